/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
#pragma once

/* Whether the host gives its programs what is rewritten for them (decision 0040). A packet that is rewritten in place
 * seems to have come by the card: a packet filter, or the reverse-path filter, may drop it after the programs here
 * have counted it as an answer. So what the host's own TCP does has the last word. A flow whose packets do not arrive
 * in place takes the way by sal0 for good, and one whose packets do not arrive there has stalled.
 */

/* Element 0: whether packets stay on the card that they came by, rewritten: the host's stack is entered once less.
 * The agent sets it while nothing that it knows of would ask why they come by that card.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} in_place SEC(".maps");

/* The kernel's TCP delays an acknowledgement by 200 ms at most (TCP_DELACK_MAX). */
#define MUTE_NS 250000000ULL
/* An acknowledgement that came so lately may not have been looked at. */
#define LATELY_NS 20000000ULL

static __always_inline bool is_in_place(const struct flow_entry *entry)
{
	__u32 zero = 0;
	__u32 *value = bpf_map_lookup_elem(&in_place, &zero);

	return value && *value && !(entry->seen & SEEN_UNDELIVERED);
}

static __always_inline void note_undelivered(struct flow_entry *entry)
{
	__sync_fetch_and_or(&entry->seen, SEEN_UNDELIVERED);
	count(COUNT_UNDELIVERED);
}

/* Whether data has come for the host's TCP for a while, and it has said nothing at all. A lost segment is another
 * matter: a TCP answers those that come after it.
 */
static __always_inline bool is_mute(struct flow_entry *entry, const struct packet *packet, __u64 now)
{
	__u64 since = entry->ingress.asked_ns;

	/* What it says may go by the agent, unseen here. */
	if (packet->key.protocol != IPPROTO_TCP || !packet->payload_len ||
	    (entry->flags & (FLOW_EGRESS | FLOW_STALLED)) != FLOW_EGRESS)
		return false;
	if (since && (__s64)(entry->egress.last_ns - since) < 0)
		return (__s64)(now - since) > (__s64)MUTE_NS;
	entry->ingress.asked_ns = now;
	return false;
}

/* A packet of the flow goes out by way of the agent. */
static __always_inline void note_left(struct flow_entry *entry, const struct packet *packet)
{
	if (packet->key.protocol == IPPROTO_TCP && entry->ingress.asked_ns)
		entry->ingress.asked_ns = 0;
}

/* Whether the host's TCP sends again what the peer has acknowledged: the acknowledgement has not arrived. */
static __always_inline bool repeats_acknowledged(const struct flow_entry *entry, const struct packet *packet, __u64 now)
{
	const struct tcp_numbers *sent = &entry->egress.numbers, *heard = &entry->ingress.numbers;

	if (!(sent->flags & NUMBERS_KNOWN) || (__s32)(packet->sequence - sent->sequence) > 0)
		return false;
	return heard->flags & NUMBERS_KNOWN &&
	       (__s32)(heard->acknowledgement - packet->sequence - packet->payload_len) >= 0 &&
	       (__s64)(now - entry->ingress.last_ns) > (__s64)LATELY_NS;
}

/* Takes note of data that the host's TCP sends; false where the flow has stalled. Where a box has the flow, the TCP is
 * another host's: an acknowledgement may have been lost on the way to that.
 */
static __always_inline bool note_delivery(struct flow_entry *entry, const struct packet *packet, __u64 now)
{
	if (entry->flags & FLOW_BY_SAL0 || !packet->payload_len || !repeats_acknowledged(entry, packet, now))
		return true;
	if (!is_in_place(entry))
		return false;
	note_undelivered(entry);
	return true;
}
