/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
#pragma once

/* What the entry learns from a packet that it carries. Races between processors can lose a number, never a bit of `seen`. */
static __always_inline void note_numbers(struct tcp_numbers *numbers, const struct packet *packet)
{
	bool is_newer = !(numbers->flags & NUMBERS_KNOWN) || (__s32)(packet->sequence - numbers->sequence) >= 0;

	if (is_newer) {
		numbers->sequence = packet->sequence;
		numbers->length = packet->payload_len;
		numbers->flags = NUMBERS_KNOWN | (packet->tcp_flags & TCP_FIN ? NUMBERS_FIN : 0);
	}
	numbers->acknowledgement = packet->acknowledgement;
	numbers->window = packet->window;
}

static __always_inline void tell_of(__u32 flow, __u32 bits, const struct app_key *key)
{
	struct flow_event *event;

	event = bpf_ringbuf_reserve(&events, sizeof(*event), 0);
	if (!event) {
		count(COUNT_EVENT_LOST);
		return;
	}
	event->flow = flow;
	event->seen = bits;
	if (key)
		event->wire = *key;
	else
		__builtin_memset(&event->wire, 0, sizeof(event->wire));
	bpf_ringbuf_submit(event, 0);
}

static __always_inline void tell(const struct flow_entry *entry, __u32 bits, const struct app_key *key)
{
	tell_of(entry ? entry->flow : 0, bits, key);
}

/* Of a flow that the agent was not told of it hears the end with the beginning (`tell_opened`): whoever is second there sees what the
 * other one has noted.
 */
static __always_inline void note_end(struct flow_entry *entry, __u32 bits)
{
	__u32 ends = bits & ~SEEN_OVER;

	if (!bits || (entry->seen & bits) == bits)
		return;
	/* With its result it orders what follows, on every processor: without, it need not. */
	if ((__sync_fetch_and_or(&entry->seen, bits) & bits) == bits)
		return;
	if (ends && !(entry->flags & FLOW_UNTOLD))
		tell(entry, ends, NULL);
}

/* Tells of a flow that was opened by a grant, and what has been seen of its end; of one that was told of before only `again`. */
static __noinline void tell_opened(struct flow_entry *entry, bool again)
{
	struct flow_event *event;
	__u32 before;

	/* Should there be no room, it stays untold, and somebody comes again. */
	event = bpf_ringbuf_reserve(&events, sizeof(*event), 0);
	if (!event) {
		count(COUNT_EVENT_LOST);
		return;
	}
	before = __sync_fetch_and_and(&entry->flags, ~FLOW_UNTOLD);
	if (!(before & FLOW_UNTOLD) && !again) {
		bpf_ringbuf_discard(event, 0);
		return;
	}
	event->flow = entry->flow;
	event->seen = SEEN_OPENED | (entry->seen & SEEN_ENDS);
	event->wire = entry->app;
	bpf_ringbuf_submit(event, 0);
}

static __always_inline __u32 end_of(const struct tcp_numbers *numbers)
{
	return numbers->sequence + numbers->length + (numbers->flags & NUMBERS_FIN ? 1 : 0);
}

/* What is to be noted when an end has passed, or an acknowledgement after both: a FIN alone may have overtaken data. */
static __always_inline __u32 with_over(const struct flow_entry *entry, __u32 ends)
{
	const struct tcp_numbers *egress = &entry->egress.numbers, *ingress = &entry->ingress.numbers;

	if (((entry->seen | ends) & SEEN_BOTH_FINS) != SEEN_BOTH_FINS || ingress->acknowledgement != end_of(egress) ||
	    egress->acknowledgement != end_of(ingress))
		return ends;
	return ends | SEEN_OVER;
}

static __always_inline void note_packet(struct direction *direction, struct __sk_buff *skb, const struct packet *packet,
					__u64 now)
{
	__u32 segment = skb->gso_size ? skb->gso_size : packet->payload_len;

	direction->last_ns = now;
	if (segment > direction->segment)
		direction->segment = segment;
	__sync_fetch_and_add(&direction->bytes, packet->payload_len);
	__sync_fetch_and_add(&direction->segments, skb->gso_segs ? skb->gso_segs : 1);
}
