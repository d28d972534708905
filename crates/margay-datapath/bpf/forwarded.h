/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
 *
 * What leaves sal0 to the agent says by its hop limit whether it was forwarded: it came in by sal0, or whoever may send
 * anything sends it (a box that keeps first packets back sends them by a packet socket). Every user may open sockets of
 * TCP and UDP and choose their hop limit, so the value is taken from all other packets, those of cards and of other
 * network namespaces among them.
 */
#pragma once

#ifndef AF_PACKET
#define AF_PACKET 17
#endif
#define SOCKET_RAW 3

/* 0: there are no boxes here. Set before the programs are loaded. */
const volatile __u32 forwarded_hop_limit = 0;

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
	return socket && (socket->family == AF_PACKET || socket->type == SOCKET_RAW);
}

/* Of fragments, too: of a datagram that is put together, the first one's counts. Not inlined: the verifier looks at it
 * once.
 */
static __noinline int mark_forwarded(struct __sk_buff *skb)
{
	bool is_v4 = skb->protocol == bpf_htons(ETH_P_IP);
	__u32 at = sal0_header_len;
	__u8 now, wanted;

	if (!forwarded_hop_limit || (!is_v4 && skb->protocol != bpf_htons(ETH_P_IPV6)))
		return 0;
	at += is_v4 ? __builtin_offsetof(struct iphdr, ttl) : __builtin_offsetof(struct ipv6hdr, hop_limit);
	if (bpf_skb_load_bytes(skb, at, &now, sizeof(now)))
		return 0;
	wanted = is_forwarded(skb) ? forwarded_hop_limit : now == forwarded_hop_limit ? now - 1 : now;
	if (wanted == now)
		return 0;
	/* It is the first byte of a word. */
	if (is_v4 && bpf_l3_csum_replace(skb, sal0_header_len + __builtin_offsetof(struct iphdr, check), bpf_htons(now << 8),
					 bpf_htons(wanted << 8), 2))
		return -1;
	return bpf_skb_store_bytes(skb, at, &wanted, sizeof(wanted), 0);
}
