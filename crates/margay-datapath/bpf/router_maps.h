/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
#pragma once

#include "router_layout.h"

/* Set before the program is loaded. */
const volatile __u16 sal_port = 0; /* network byte order */
const volatile __u64 hash_seed = 0;

/* Two, so that the agent writes the one that is not in force. */
struct route_lengths lengths[2] = {};
__u32 lengths_active = 0;

/* Which names may have a prefix of a length: most have none of most lengths, and need not be looked for in memory that
 * is far away.
 */
__u64 filters[ROUTER_LENGTHS][ROUTER_FILTER_WORDS] = {};

struct chunk_array {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct chunk);
};

/* Of two tables, of which one is in force. The kernel takes what is no larger than a chunk from memory that it has
 * large pages for: whatever is far away costs half as much there.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, struct chunk_array);
} chunks SEC(".maps");

/* Sizes of the maps are the agent's to set. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct seat);
} seats SEC(".maps");

struct bucket_array {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct bucket_list);
};

/* A list is made whole, and then put in the place of the one before. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, struct bucket_array);
} bucket_lists SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct hop);
} hops SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1);
	__type(key, struct neighbour_key);
	__type(value, struct hop_key);
} neighbours SEC(".maps");

/* This host's own addresses. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1024);
	__type(key, struct own_address);
	__type(value, __u32);
} own_addresses SEC(".maps");

/* Interfaces that packets may leave by. */
struct {
	__uint(type, BPF_MAP_TYPE_DEVMAP_HASH);
	__uint(max_entries, 256);
	__type(key, __u32);
	__type(value, __u32);
} devices SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, ROUTER_COUNTERS);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

/* Element 0: `route_buffer`, which is run for the few packets that it is about. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} programs SEC(".maps");

static __always_inline void count(__u32 which)
{
	__u64 *value = bpf_map_lookup_elem(&counters, &which);

	if (value)
		*value += 1;
}
