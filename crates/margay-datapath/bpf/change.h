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
