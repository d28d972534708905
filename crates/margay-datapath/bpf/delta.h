/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
#pragma once

/* Numbers of one TCP connection as another one has them, where a program between the two has left (decision 0088).
 * The entry's own numbers are those of the host's TCP: a packet is translated before the entry learns from one that
 * comes in, and after it has learned from one that goes out. The core does the same (`leg/delta`), and tests compare.
 */

#define OPTION_END 0
#define OPTION_NOP 1
#define OPTION_SACK 5
#define OPTION_TIMESTAMPS 8
#define OPTION_TIMESTAMPS_LEN 10
#define TCP_HEADER_MAX 60
/* So that the verifier sees an index that is bounded. */
#define TCP_INDEX 63

/* Deltas, by the number of the flow. Only the agent writes here. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 131072);
	__type(key, __u32);
	__type(value, struct delta);
} deltas SEC(".maps");

/* A TCP header before and after; a number may end behind the last byte that an index reaches. */
struct tcp_room {
	__u8 before[TCP_INDEX + 5];
	__u8 after[TCP_INDEX + 5];
};

/* Element 0: too large for the stack. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct tcp_room);
} tcp_rooms SEC(".maps");

struct option_walk {
	struct tcp_room *room;
	const struct translation *by;
	__u32 at;
	__u32 len;
};

static __always_inline void add_to(__u8 *tcp, __u32 at, __u32 shift)
{
	__u8 *bytes = tcp + (at & TCP_INDEX);
	__u32 number = (__u32)bytes[0] << 24 | (__u32)bytes[1] << 16 | (__u32)bytes[2] << 8 | bytes[3];

	number += shift;
	bytes[0] = number >> 24;
	bytes[1] = number >> 16;
	bytes[2] = number >> 8;
	bytes[3] = number;
}

/* One option, or one NOP; 1 ends the walk. */
static long walk_option(__u64 index, struct option_walk *walk)
{
	const struct translation *by = walk->by;
	__u8 *tcp = walk->room->after;
	__u32 at = walk->at, len, i;
	__u8 kind;

	if (at >= walk->len)
		return 1;
	kind = tcp[at & TCP_INDEX];
	if (kind == OPTION_NOP) {
		walk->at = at + 1;
		return 0;
	}
	if (kind == OPTION_END || at + 1 >= walk->len)
		return 1;
	len = tcp[(at + 1) & TCP_INDEX];
	if (len < 2 || at + len > walk->len)
		return 1;
	walk->at = at + len;
	if ((kind == OPTION_TIMESTAMPS && by->flags & DELTA_NO_TIMESTAMPS) ||
	    (kind == OPTION_SACK && by->flags & DELTA_NO_SACK)) {
		for (i = 0; i < TCP_HEADER_MAX - sizeof(struct tcphdr) && i < len; i++)
			tcp[(at + i) & TCP_INDEX] = OPTION_NOP;
	} else if (kind == OPTION_TIMESTAMPS && len == OPTION_TIMESTAMPS_LEN) {
		add_to(tcp, at + 2, by->timestamp);
		add_to(tcp, at + 6, by->echo);
	} else if (kind == OPTION_SACK) {
		for (i = 2; i + 4 <= TCP_HEADER_MAX - sizeof(struct tcphdr) && i + 4 <= len; i += 4)
			add_to(tcp, at + i, by->acknowledgement);
	}
	return 0;
}

static __always_inline __u16 translated_window(const struct translation *by, __u16 window)
{
	__u64 wide = (__u64)window << (by->raised & 31) >> (by->lowered & 31);

	return wide > 0xffff ? 0xffff : wide;
}

/* Translates the TCP header that begins at `offset`; false where it is not whole, or cannot be written. */
static __noinline bool translate(struct __sk_buff *skb, __u32 offset, const struct translation *by, bool is_partial)
{
	struct option_walk walk = { .by = by, .at = sizeof(struct tcphdr) };
	struct tcp_room *room;
	__u32 zero = 0, len;
	__u16 window, check;
	__u64 growth;
	__u8 *tcp;

	room = bpf_map_lookup_elem(&tcp_rooms, &zero);
	if (!room || bpf_skb_load_bytes(skb, offset, room->before, sizeof(struct tcphdr)))
		return false;
	len = (room->before[12] >> 4) * 4;
	if (len < sizeof(struct tcphdr) || len > TCP_HEADER_MAX)
		return false;
	/* What lies behind it is of another packet, and the same in both. */
	if (bpf_skb_load_bytes(skb, offset, room->before, len))
		return false;
	__builtin_memcpy(room->after, room->before, sizeof(room->after));
	tcp = room->after;
	add_to(tcp, 4, by->sequence);
	if (tcp[13] & TCP_ACK)
		add_to(tcp, 8, by->acknowledgement);
	if (!(tcp[13] & TCP_SYN)) {
		window = translated_window(by, (__u16)tcp[14] << 8 | tcp[15]);
		tcp[14] = window >> 8;
		tcp[15] = window;
	}
	walk.room = room;
	walk.len = len;
	if (len > sizeof(struct tcphdr))
		bpf_loop(TCP_HEADER_MAX - sizeof(struct tcphdr), walk_option, &walk, 0);
	if (!is_partial) {
		/* The sum of a card over the whole packet stays true by it. */
		growth = (__u32)bpf_csum_diff((__be32 *)room->before, TCP_HEADER_MAX, (__be32 *)room->after,
					      TCP_HEADER_MAX, 0);
		__builtin_memcpy(&check, tcp + 16, sizeof(check));
		check = ~fold((__u64)(__u16)~check + growth);
		__builtin_memcpy(tcp + 16, &check, sizeof(check));
	}
	return !bpf_skb_store_bytes(skb, offset, room->after, len, 0);
}

static __always_inline const struct delta *delta_of(const struct flow_entry *entry)
{
	__u32 key = entry->delta;

	return bpf_map_lookup_elem(&deltas, &key);
}

/* Gives what comes from the wire the numbers of the host's TCP. */
static __always_inline bool translate_ingress(struct __sk_buff *skb, struct packet *packet, const struct delta *delta)
{
	const struct translation *by = &delta->ingress;

	if (!translate(skb, packet->transport_offset, by, checksum_state(skb) == CHECKSUM_PARTIAL))
		return false;
	packet->sequence += by->sequence;
	if (packet->tcp_flags & TCP_ACK)
		packet->acknowledgement += by->acknowledgement;
	if (!(packet->tcp_flags & TCP_SYN))
		packet->window = translated_window(by, packet->window);
	return true;
}
