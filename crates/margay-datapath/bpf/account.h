/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
#pragma once

static __always_inline __u32 end_of(const struct tcp_numbers *numbers)
{
	return numbers->sequence + numbers->length + (numbers->flags & NUMBERS_FIN ? 1 : 0);
}

/* Whether an acknowledgement is of more than those before it, of what the other end has sent: what is acknowledged
 * stays so, since a segment may overtake another. Beyond all that has been seen of the other end it may have been
 * made up, and the next one counts.
 */
static __always_inline bool acknowledges_more(const struct tcp_numbers *numbers, const struct tcp_numbers *other,
					      const struct packet *packet)
{
	__u32 known = numbers->acknowledgement;

	return !(numbers->flags & NUMBERS_ACKNOWLEDGED) || (__s32)(packet->acknowledgement - known) > 0 ||
	       (__s32)(known - end_of(other)) > 0;
}

/* What the entry learns from a packet that it carries. Races between processors can lose a number, never a bit of
 * `seen`.
 */
static __always_inline void note_numbers(struct tcp_numbers *numbers, const struct tcp_numbers *other,
					 const struct packet *packet)
{
	__u32 end = packet->sequence + packet->payload_len + (packet->tcp_flags & TCP_FIN ? 1 : 0);
	__s32 farther = packet->sequence - numbers->sequence;
	/* An acknowledgement that was overtaken by a FIN has the same number as that, and reaches less far. */
	bool is_newer = !(numbers->flags & NUMBERS_KNOWN) || farther > 0 ||
			(!farther && (__s32)(end - end_of(numbers)) >= 0);

	if (is_newer) {
		numbers->sequence = packet->sequence;
		numbers->length = packet->payload_len;
		numbers->flags = (numbers->flags & ~NUMBERS_FIN) | NUMBERS_KNOWN |
				 (packet->tcp_flags & TCP_FIN ? NUMBERS_FIN : 0);
	}
	/* A SYN has none. */
	if (packet->tcp_flags & TCP_ACK && acknowledges_more(numbers, other, packet)) {
		numbers->acknowledgement = packet->acknowledgement;
		numbers->flags |= NUMBERS_ACKNOWLEDGED;
	}
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

/* Of a flow that the agent was not told of it hears the end with the beginning (`tell_opened`): whoever is second there
 * sees what the other one has noted.
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

/* Tells of a flow that was opened by a grant, and what has been seen of its end; of one that was told of before only
 * `again`.
 */
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

/* What is to be noted when an end has passed, or an acknowledgement after both: a FIN alone may have overtaken data. */
static __always_inline __u32 with_over(const struct flow_entry *entry, __u32 ends)
{
	const struct tcp_numbers *egress = &entry->egress.numbers, *ingress = &entry->ingress.numbers;

	if (((entry->seen | ends) & SEEN_BOTH_FINS) != SEEN_BOTH_FINS || ingress->acknowledgement != end_of(egress) ||
	    egress->acknowledgement != end_of(ingress))
		return ends;
	return ends | SEEN_OVER;
}

/* Takes note of what of the peer's the application's TCP has: what it has acknowledged, and what has come in order
 * since. Nobody who does not know its numbers can make it more.
 */
static __always_inline void note_in_order(struct flow_entry *entry, const struct packet *packet)
{
	const struct tcp_numbers *acknowledged = &entry->egress.numbers;
	struct direction *ingress = &entry->ingress;
	__u32 next = ingress->next;

	if (packet->is_fresh && packet->tcp_flags & TCP_SYN) {
		next = packet->sequence;
	} else if (acknowledged->flags & NUMBERS_ACKNOWLEDGED) {
		if (!(ingress->numbers.flags & NUMBERS_NEXT) || (__s32)(acknowledged->acknowledgement - next) > 0)
			next = acknowledged->acknowledgement;
	} else if (!(ingress->numbers.flags & NUMBERS_NEXT)) {
		return;
	}
	if ((__s32)(packet->sequence - next) <= 0 && (__s32)(packet->sequence + packet->payload_len - next) > 0)
		next = packet->sequence + packet->payload_len;
	ingress->next = next;
	ingress->numbers.flags |= NUMBERS_NEXT;
}

/* Whether the application's TCP takes a RST of the peer's (RFC 5961 §3.2; RFC 9293 §3.10.7.3 for one that has no
 * answer yet). Of one that it may not take, as far as can be seen here, the agent finds the number (`is_taken`
 * there): part of the flow may go by user space.
 */
static __always_inline bool is_reset_taken(struct flow_entry *entry, const struct packet *packet)
{
	const struct tcp_numbers *own = &entry->egress.numbers;
	struct tcp_numbers *numbers = &entry->ingress.numbers;

	if (own->flags & NUMBERS_ACKNOWLEDGED && packet->sequence == own->acknowledgement)
		return true;
	if (numbers->flags & NUMBERS_NEXT && packet->sequence == entry->ingress.next)
		return true;
	if (packet->is_fresh && packet->tcp_flags & TCP_ACK && packet->acknowledgement == end_of(own))
		return true;
	numbers->reset = packet->sequence;
	numbers->flags |= NUMBERS_RESET;
	return false;
}

/* What is to be noted for a FIN of the peer's that has come: it counts once the application has acknowledged it, now
 * or later. Of several the nearest waits, since the farther ones are made up.
 */
static __always_inline __u32 note_fin(struct flow_entry *entry, const struct packet *packet)
{
	const struct tcp_numbers *own = &entry->egress.numbers;
	struct tcp_numbers *numbers = &entry->ingress.numbers;
	__u32 end = packet->sequence + packet->payload_len + 1, reached = own->acknowledgement;
	bool is_reached = own->flags & NUMBERS_ACKNOWLEDGED;

	if (is_reached && end == reached)
		return SEEN_FIN_INGRESS;
	if (!(numbers->flags & NUMBERS_END) || (is_reached && (__s32)(numbers->end - reached) < 0) ||
	    ((__s32)(end - numbers->end) < 0 && (!is_reached || (__s32)(end - reached) > 0))) {
		numbers->end = end;
		numbers->flags |= NUMBERS_END;
	}
	return 0;
}

/* The same for what the application acknowledges. */
static __always_inline __u32 acknowledges_fin(const struct flow_entry *entry, const struct packet *packet)
{
	const struct tcp_numbers *numbers = &entry->ingress.numbers;

	return numbers->flags & NUMBERS_END && packet->tcp_flags & TCP_ACK && packet->acknowledgement == numbers->end ?
		       SEEN_FIN_INGRESS :
		       0;
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
