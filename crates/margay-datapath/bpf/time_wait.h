/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
 *
 * Connections in TIME-WAIT that a new one of the same five-tuple ends (docs/decisions/0049). The listener that closed
 * first keeps each of them for a minute, and takes a SYN in its place only if the SYN's number and timestamp are
 * greater (RFC 6191 §2). Between two connections of one program's port the client's TCP makes sure of that. The port
 * that a listener sees of a flow of a grant is another program's each time, and half of all SYNs would get an
 * acknowledgement of the old connection, and wait for a second.
 *
 * TIME-WAIT keeps what is old from a new connection. Here each flow has ports and a number of its own on the wire, so
 * nothing old comes to a new one; and both ends have agreed on the new one. So the old connection gets the reset that
 * the client's TCP would answer the acknowledgement with (RFC 9293 §3.10.7.3), and the SYN comes after it.
 */
#pragma once

/* The members that are read here. The loader finds where they lie in the running kernel (CO-RE). */
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct sock_common {
	__u32 skc_tw_rcv_nxt;
};

struct inet_timewait_sock {
	struct sock_common __tw_common;
};

struct tcp_timewait_sock {
	struct inet_timewait_sock tw_sk;
};

#pragma clang attribute pop

/* Where the header's numbers lie, its length and flags behind them. */
#define TCP_SEQUENCE_OFFSET 4

/* The head of a TCP segment that a reset differs in. */
struct numbers {
	__u32 sequence;
	__u32 acknowledgement;
	__u8 length;
	__u8 flags;
	__u16 window;
};

/* Whether a SYN comes to a connection in TIME-WAIT, and which number that expects. False for a SYN that has been here:
 * where the reset had no effect (`net.ipv4.tcp_rfc1337`, a firewall), TCP decides, as without it.
 */
static __noinline bool meets_time_wait(struct __sk_buff *skb, const struct packet *packet, __u32 *expected)
{
	struct bpf_sock_tuple tuple = {};
	struct tcp_timewait_sock *lingering;
	struct socketless *before;
	struct bpf_sock *socket;

	before = bpf_map_lookup_elem(&socketless, &packet->key);
	if (before && before->state == SOCKETLESS_ASKED && before->next == packet->sequence + 1)
		return false;
	socket = bpf_skc_lookup_tcp(skb, &tuple, socket_tuple(packet, &tuple), BPF_F_CURRENT_NETNS, 0);
	if (!socket)
		return false;
	lingering = socket->state == BPF_TCP_TIME_WAIT ? bpf_skc_to_tcp_timewait_sock(socket) : NULL;
	if (lingering)
		*expected = lingering->tw_sk.__tw_common.skc_tw_rcv_nxt;
	bpf_sk_release(socket);
	return lingering;
}

/* Makes a SYN the reset of the connection that it has met. Its options become data, which TIME-WAIT does not look at,
 * so that no length changes but the header's.
 */
static __noinline bool make_reset(struct __sk_buff *skb, const struct packet *packet, __u32 expected)
{
	__u32 at = packet->transport_offset + TCP_SEQUENCE_OFFSET;
	struct numbers before, after;
	__s64 difference;

	if (bpf_skb_load_bytes(skb, at, &before, sizeof(before)))
		return false;
	after = (struct numbers){
		.sequence = bpf_htonl(expected),
		.length = sizeof(struct tcphdr) / 4 << 4,
		.flags = TCP_RST,
		.window = before.window,
	};
	difference = bpf_csum_diff((__u32 *)&before, sizeof(before), (__u32 *)&after, sizeof(after), 0);
	return !bpf_skb_store_bytes(skb, at, &after, sizeof(after), 0) &&
	       !bpf_l4_csum_replace(skb, packet->transport_offset + TCP_CHECK_OFFSET, 0, difference, 0);
}
