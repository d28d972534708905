/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
#pragma once

/* Fragments of a flow's packets: something on the way has cut them, where their sender, or who forwarded them, has
 * not forbidden it. The host would put them together and give the whole to its TCP, past the programs. The agent puts
 * them together instead. Only the first has ports; those that overtake it are lost, and TCP sends again.
 */

#define IP_OFFSET_MASK 0x1fff
#define IPV6_OFFSET_MASK 0xfff8
#define IPPROTO_IPV6_FRAGMENT 44

struct fragment_key {
	__u8 source[16];
	__u8 destination[16];
	__u32 identification;
	__u32 protocol;
};

_Static_assert(__builtin_offsetof(struct fragment_key, identification) == sizeof(struct pair_key),
	       "a pair of addresses heads a fragment's key");

struct ipv6_fragment {
	__u8 next_header;
	__u8 zero;
	__u16 offset;
	__u32 identification;
};

/* Packets whose first fragment has gone to the agent. Under a flood of them the oldest is forgotten, and lost. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct fragment_key);
	__type(value, __u32);
} fragments SEC(".maps");

/* Where the payload of a fragment begins, and whether it is the first; 0 for what is none. */
static __always_inline __u32 parse_fragment(struct __sk_buff *skb, struct fragment_key *key, bool *is_first)
{
	struct ipv6_fragment part;
	struct ipv6hdr v6;
	struct iphdr v4;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if (bpf_skb_load_bytes(skb, ETH_HLEN, &v4, sizeof(v4)) || v4.version != 4 ||
		    !(v4.frag_off & bpf_htons(IP_FRAGMENT_MASK)))
			return 0;
		words(key->source)[2] = words(key->destination)[2] = bpf_htonl(0xffff);
		words(key->source)[3] = v4.saddr;
		words(key->destination)[3] = v4.daddr;
		key->identification = v4.id;
		key->protocol = v4.protocol;
		*is_first = !(v4.frag_off & bpf_htons(IP_OFFSET_MASK));
		return ETH_HLEN + v4.ihl * 4;
	}
	if (skb->protocol != bpf_htons(ETH_P_IPV6) || bpf_skb_load_bytes(skb, ETH_HLEN, &v6, sizeof(v6)) || v6.version != 6 ||
	    v6.nexthdr != IPPROTO_IPV6_FRAGMENT || bpf_skb_load_bytes(skb, ETH_HLEN + sizeof(v6), &part, sizeof(part)))
		return 0;
	__builtin_memcpy(key->source, &v6.saddr, 32);
	key->identification = part.identification;
	key->protocol = part.next_header;
	*is_first = !(part.offset & bpf_htons(IPV6_OFFSET_MASK));
	return ETH_HLEN + sizeof(v6) + sizeof(part);
}

/* Whether a packet is a fragment of one that a peer has sent to a flow port. */
static __always_inline bool is_flows_fragment(struct __sk_buff *skb)
{
	struct fragment_key key = {};
	__u16 ports[2], port;
	bool is_first = false;
	__u32 offset, one = 1;

	offset = parse_fragment(skb, &key, &is_first);
	if (!offset || (key.protocol != IPPROTO_TCP && key.protocol != IPPROTO_UDP))
		return false;
	if (!is_first)
		return bpf_map_lookup_elem(&fragments, &key);
	if (bpf_skb_load_bytes(skb, offset, ports, sizeof(ports)))
		return false;
	port = bpf_ntohs(ports[1]);
	/* A pair of addresses as they stand at the key's head. */
	if (port < flow_port_first || port > flow_port_last || !bpf_map_lookup_elem(&pairs, &key))
		return false;
	bpf_map_update_elem(&fragments, &key, &one, BPF_ANY);
	return true;
}
