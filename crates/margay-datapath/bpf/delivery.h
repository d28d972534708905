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

/* What the host does with what comes by an interface for the program of a flow (BPF_FIB_LKUP_RET_…). */
static __always_inline long route_from(struct __sk_buff *skb, const struct flow_entry *entry, __u32 ifindex)
{
	const __u32 *from = (const __u32 *)entry->app.destination, *to = (const __u32 *)entry->app.source;
	struct bpf_fib_lookup route = { .ifindex = ifindex, .l4_protocol = entry->app.protocol };

	if (is_mapped(to)) {
		route.family = AF_INET;
		route.ipv4_src = from[3];
		route.ipv4_dst = to[3];
	} else {
		route.family = AF_INET6;
		__builtin_memcpy(route.ipv6_src, from, sizeof(route.ipv6_src));
		__builtin_memcpy(route.ipv6_dst, to, sizeof(route.ipv6_dst));
	}
	return bpf_fib_lookup(skb, &route, sizeof(route), 0);
}

/* Whether what stays on the card that it came by comes to the program: one in another network namespace is reached by
 * forwarding, which may be off for that card and on for sal0. The first packet of a flow asks.
 */
static __noinline bool is_let_in(struct __sk_buff *skb, struct flow_entry *entry)
{
	long by_sal0;

	if (entry->seen & SEEN_LET_IN)
		return true;
	by_sal0 = route_from(skb, entry, sal0_ifindex);
	/* Where sal0 forwards nothing, this says nothing of the host's own addresses either; no program elsewhere is
	 * reached then.
	 */
	if ((by_sal0 == BPF_FIB_LKUP_RET_SUCCESS || by_sal0 == BPF_FIB_LKUP_RET_NO_NEIGH) &&
	    route_from(skb, entry, skb->ifindex) == BPF_FIB_LKUP_RET_FWD_DISABLED) {
		__sync_fetch_and_or(&entry->seen, SEEN_UNDELIVERED);
		return false;
	}
	__sync_fetch_and_or(&entry->seen, SEEN_LET_IN);
	return true;
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
	/* Not whether anything came lately: where both ends have lost each other's words, each sends again when the other
	 * one does.
	 */
	return heard->flags & NUMBERS_KNOWN &&
	       (__s32)(heard->acknowledgement - packet->sequence - packet->payload_len) >= 0 &&
	       (__s64)(now - entry->egress.asked_ns) > (__s64)LATELY_NS;
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
