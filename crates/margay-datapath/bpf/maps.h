/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
#pragma once

#include "layout.h"

/* Flows are allocated one by one and never evicted: an entry that vanished by itself would move its flow to the slow
 * path.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 131072);
	__type(key, struct app_key);
	__type(value, struct wire_key);
} apps SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 131072);
	__type(key, struct wire_key);
	__type(value, struct flow_entry);
} flows SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, __u32);
	__type(value, struct path_entry);
} paths SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, struct pair_key);
	__type(value, struct pair_value);
} pairs SEC(".maps");

/* This host's own addresses. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1024);
	__type(key, struct address_key);
	__type(value, __u32);
} locals SEC(".maps");

/* Which grants a SYN may take a flow of, by its destination. Only the agent writes here. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 4096);
	__type(key, struct offer_key);
	__type(value, struct offer);
} offers SEC(".maps");

/* Grants of peers, by number. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct spare);
} spares SEC(".maps");

/* Grants to peers. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 4096);
	__type(key, struct wire_key);
	__type(value, struct grant);
} grants SEC(".maps");

/* Element 0: where an entry is made, which is too large for the stack. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct flow_entry);
} scratch SEC(".maps");

/* Element 0: LAYOUT_VERSION of whoever made the pinned maps. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} layout SEC(".maps");

/* Element 0: when the agent was alive last, by bpf_ktime_get_ns. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} heartbeat SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, COUNTERS);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 262144);
} events SEC(".maps");

static __always_inline void count(__u32 which)
{
	__u64 *value = bpf_map_lookup_elem(&counters, &which);

	if (value)
		*value += 1;
}

/* An agent that has said nothing for this long is dead: nothing is given to it. */
#define HEARTBEAT_MAX_NS 2000000000ULL

static __always_inline bool agent_is_alive(__u64 now)
{
	__u32 zero = 0;
	__u64 *beat = bpf_map_lookup_elem(&heartbeat, &zero);

	/* `now` goes by ticks, and may be a little behind. */
	return beat && (__s64)(now - *beat) < (__s64)HEARTBEAT_MAX_NS;
}
