/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
#pragma once

/* How a flow goes on, by the agent's word. In place: to read an entry and to write it anew would lose what packets that
 * pass meanwhile note in it, a FIN among it.
 */
SEC("syscall")
int change_flow(struct flow_change *change)
{
	struct wire_key wire = change->wire;
	struct flow_entry *entry;
	__u32 before, ends;

	entry = bpf_map_lookup_elem(&flows, &wire);
	if (!entry)
		return CHANGE_ABSENT;
	if (entry->flow != change->flow)
		return CHANGE_TAKEN;
	if (entry->generation > change->generation)
		return CHANGE_LATE;
	entry->generation = change->generation;
	entry->unanswered_since_ns = 0;
	entry->delta = change->delta;
	before = __sync_lock_test_and_set(&entry->flags, change->flags);
	/* Of what it was not told of it has not heard the end either. */
	ends = entry->seen & SEEN_ENDS;
	if (before & FLOW_UNTOLD && ends)
		tell(entry, ends, NULL);
	return CHANGE_DONE;
}

/* From now on direct datagrams of a flow go straight to the application: if none has gone up since this was asked last,
 * which would come behind them. Whatever passes meanwhile either finds the flow accepted, or is seen here: one word has
 * both.
 */
SEC("syscall")
int lift_flow(struct flow_lift *lift)
{
	struct wire_key wire = lift->wire;
	struct flow_entry *entry;
	__u32 flags, accepted;

	entry = bpf_map_lookup_elem(&flows, &wire);
	if (!entry || entry->flow != lift->flow)
		return LIFT_DONE;
	flags = entry->flags;
	if (!(flags & FLOW_LIFTING))
		return LIFT_DONE;
	if (flags & FLOW_SENT_UP && !lift->is_last) {
		__sync_fetch_and_and(&entry->flags, ~FLOW_SENT_UP);
		return LIFT_AGAIN;
	}
	accepted = (flags & ~(FLOW_LIFTING | FLOW_SENT_UP)) | FLOW_ACCEPT;
	return __sync_val_compare_and_swap(&entry->flags, flags, accepted) == flags ? LIFT_DONE : LIFT_AGAIN;
}
