/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
#pragma once

/* A router's word that a direct packet is too large for its next link (RFC 1191 §3, RFC 4443 §3.2). The ports that it
 * quotes are no socket's, so the host's own stack learns nothing from it.
 */

#define ICMP_UNREACHABLE 3
#define ICMP_FRAGMENTATION_NEEDED 4
#define ICMPV6_PACKET_TOO_BIG 2
#define IPPROTO_ICMP_V6 58
/* Less than every link takes (RFC 791): a lie. */
#define MTU_MIN 576

struct quoted_v4 {
	struct iphdr outer;
	__u8 type;
	__u8 code;
	__u16 checksum;
	__u16 zero;
	__u16 mtu;
	struct iphdr inner;
	__u16 source_port;
	__u16 destination_port;
} __attribute__((packed));

struct quoted_v6 {
	struct ipv6hdr outer;
	__u8 type;
	__u8 code;
	__u16 checksum;
	__u32 mtu;
	struct ipv6hdr inner;
	__u16 source_port;
	__u16 destination_port;
} __attribute__((packed));

static __always_inline __u32 quoted_v4(struct __sk_buff *skb, struct app_key *key)
{
	struct quoted_v4 found;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &found, sizeof(found)))
		return 0;
	if (found.outer.ihl != 5 || found.outer.protocol != IPPROTO_ICMP || found.type != ICMP_UNREACHABLE ||
	    found.code != ICMP_FRAGMENTATION_NEEDED || found.inner.version != 4 || found.inner.ihl != 5)
		return 0;
	words(key->source)[2] = words(key->destination)[2] = bpf_htonl(0xffff);
	words(key->source)[3] = found.inner.saddr;
	words(key->destination)[3] = found.inner.daddr;
	key->source_port = found.source_port;
	key->destination_port = found.destination_port;
	key->protocol = found.inner.protocol;
	return bpf_ntohs(found.mtu);
}

static __always_inline __u32 quoted_v6(struct __sk_buff *skb, struct app_key *key)
{
	struct quoted_v6 found;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &found, sizeof(found)))
		return 0;
	if (found.outer.nexthdr != IPPROTO_ICMP_V6 || found.type != ICMPV6_PACKET_TOO_BIG || found.inner.version != 6)
		return 0;
	__builtin_memcpy(key->source, &found.inner.saddr, 32);
	key->source_port = found.source_port;
	key->destination_port = found.destination_port;
	key->protocol = found.inner.nexthdr;
	return bpf_ntohl(found.mtu);
}

/* Tells the agent, if the packet quotes one of a live flow; whoever made it up knows both flow ports. The host's stack
 * gets it, too.
 */
static __always_inline void hear_too_big(struct __sk_buff *skb)
{
	struct packet quoted = {};
	struct wire_key key = {};
	struct flow_entry *entry;
	struct pair_value *path;
	__u32 mtu = 0;

	if (skb->protocol == bpf_htons(ETH_P_IP))
		mtu = quoted_v4(skb, &quoted.key);
	else if (skb->protocol == bpf_htons(ETH_P_IPV6))
		mtu = quoted_v6(skb, &quoted.key);
	if (mtu < MTU_MIN || mtu > 0xffff)
		return;
	/* It went from here to there; pairs are as packets come. */
	struct pair_key pair = {};

	__builtin_memcpy(pair.remote, quoted.key.destination, 16);
	__builtin_memcpy(pair.local, quoted.key.source, 16);
	path = bpf_map_lookup_elem(&pairs, &pair);
	if (!path)
		return;
	key.path = path->path;
	key.local_port = quoted.key.source_port;
	key.remote_port = quoted.key.destination_port;
	key.protocol = quoted.key.protocol;
	entry = bpf_map_lookup_elem(&flows, &key);
	if (!entry)
		return;
	count(COUNT_TOO_BIG);
	tell(entry, SEEN_TOO_BIG | mtu << 16, &quoted.key);
}
