/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
 *
 * What leaves sal0 to the agent says by its hop limit where it comes from. It was forwarded: it came in by sal0, or
 * whoever may send anything sends it (a box that keeps first packets back sends them by a packet socket). Or it is from
 * outside: no socket of this host has sent it under its own address. Every user may open sockets of TCP and UDP and
 * choose their hop limit, so these values are taken from all other packets.
 */
#pragma once

#ifndef AF_PACKET
#define AF_PACKET 17
#endif
#define SOCKET_RAW 3

/* Set before the programs are loaded. 0: there are no boxes here. */
const volatile __u32 forwarded_hop_limit = 0;
const volatile __u32 outside_hop_limit = 0;

/* A socket that only who may send anything can have. */
static __always_inline bool is_raw(const struct bpf_sock *socket)
{
	return socket->family == AF_PACKET || socket->type == SOCKET_RAW;
}

static __always_inline bool is_reset_segment(struct __sk_buff *skb)
{
	__u32 at = tcp_at(skb);
	__u8 flags;

	return at && read_from_ip(skb, at + 13, &flags, sizeof(flags)) && flags & TCP_RST;
}

static __noinline bool is_forwarded(struct __sk_buff *skb)
{
	struct bpf_sock *socket;

	if (skb->ingress_ifindex)
		return skb->ingress_ifindex == sal0_ifindex;
	socket = skb->sk;
	/* The kernel refuses a connection for a box (`reject` of nftables); what a program's socket resets is the socket's.
	 */
	if (!socket)
		return is_reset_segment(skb);
	/* None: the kernel answers for a connection that is half open, or over. */
	socket = bpf_sk_fullsock(socket);
	return socket && is_raw(socket);
}

/* Whether a socket is bound to another address or port than the one that its packet comes from: NAT has changed that.
 */
static __always_inline bool is_translated(struct __sk_buff *skb, const struct bpf_sock *socket)
{
	__u32 at, source[4];
	__u16 port;
	__u8 protocol;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr v4;

		/* Of fragments the first one's counts. */
		if (!read_from_ip(skb, 0, &v4, sizeof(v4)) || bpf_ntohs(v4.frag_off) & 0x1fff)
			return false;
		if (socket->src_ip4 && socket->src_ip4 != v4.saddr)
			return true;
		at = v4.ihl * 4;
		protocol = v4.protocol;
	} else {
		if (!read_from_ip(skb, __builtin_offsetof(struct ipv6hdr, saddr), source, sizeof(source)) ||
		    !read_from_ip(skb, __builtin_offsetof(struct ipv6hdr, nexthdr), &protocol, sizeof(protocol)))
			return false;
		if ((socket->src_ip6[0] || socket->src_ip6[1] || socket->src_ip6[2] || socket->src_ip6[3]) &&
		    (socket->src_ip6[0] != source[0] || socket->src_ip6[1] != source[1] || socket->src_ip6[2] != source[2] ||
		     socket->src_ip6[3] != source[3]))
			return true;
		at = sizeof(struct ipv6hdr);
	}
	/* Nothing is translated behind another header, such as that of fragments. */
	if (protocol != IPPROTO_TCP && protocol != IPPROTO_UDP)
		return false;
	return socket->src_port && read_from_ip(skb, at, &port, sizeof(port)) && bpf_ntohs(port) != socket->src_port;
}

/* Whether no socket of this host has sent a packet under its own address. What the kernel says for a connection that is
 * half open, or over, is the connection's.
 */
static __noinline bool is_from_outside(struct __sk_buff *skb)
{
	struct bpf_sock *socket;

	if (skb->ingress_ifindex)
		return true;
	socket = skb->sk;
	if (!socket)
		return false;
	socket = bpf_sk_fullsock(socket);
	return socket && !is_raw(socket) && is_translated(skb, socket);
}

/* The hop limit that a packet is to have, which has `now`. */
static __always_inline __u8 marked(struct __sk_buff *skb, __u8 now)
{
	if (forwarded_hop_limit && is_forwarded(skb))
		return forwarded_hop_limit;
	if (is_from_outside(skb))
		return outside_hop_limit;
	if (now == outside_hop_limit || (forwarded_hop_limit && now == forwarded_hop_limit))
		return outside_hop_limit - 1;
	return now;
}

/* Of fragments, too: of a datagram that is put together, the first one's counts. Not inlined: the verifier looks at it
 * once.
 */
static __noinline int mark_origin(struct __sk_buff *skb)
{
	bool is_v4 = skb->protocol == bpf_htons(ETH_P_IP);
	__u32 at = sal0_header_len;
	__u8 now, wanted;

	if (!is_v4 && skb->protocol != bpf_htons(ETH_P_IPV6))
		return 0;
	at += is_v4 ? __builtin_offsetof(struct iphdr, ttl) : __builtin_offsetof(struct ipv6hdr, hop_limit);
	if (bpf_skb_load_bytes(skb, at, &now, sizeof(now)))
		return 0;
	wanted = marked(skb, now);
	if (wanted == now)
		return 0;
	/* It is the first byte of a word. */
	if (is_v4 && bpf_l3_csum_replace(skb, sal0_header_len + __builtin_offsetof(struct iphdr, check), bpf_htons(now << 8),
					 bpf_htons(wanted << 8), 2))
		return -1;
	return bpf_skb_store_bytes(skb, at, &wanted, sizeof(wanted), 0);
}
