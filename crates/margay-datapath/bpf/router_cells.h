/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
 *
 * The table of prefixes: cells, each a line of the cache, in which a prefix has its home by a hash. Where that is
 * another's, it lies in the first cell of the block that was free, beginning with its home's neighbour, which the
 * processor fetches along with it. The agent has them written by a program, so that one place says how they are found
 * (docs/decisions/0022).
 */
#pragma once

/* Where the bytes of an array are in the kernel's structure, which itself begins a pair of lines. */
struct bpf_array {
	__u32 index_mask;
	char value[];
} __attribute__((preserve_access_index));

#define LINE 64
_Static_assert(sizeof(struct cell) == LINE, "one fetch");

/* Clang must not know what a number may be: else it makes sums by `or`, of which the verifier knows less. */
#define hide(number) asm volatile("" : "+r"(number))

/* A service, by words. */
struct name {
	__u64 id[4];
};

/* Of a prefix: by the length too, since shorter ones are parts of longer ones. */
static __always_inline __u64 hash_of(const __u64 *id, __u32 bits)
{
	__u64 hash = hash_seed ^ bits;
	__u32 at;

	_Pragma("unroll") for (at = 0; at < 4; at++) {
		hash = (hash ^ id[at]) * 0xbf58476d1ce4e5b9ULL;
		hash ^= hash >> 32;
	}
	return hash;
}

static __always_inline __u64 *filter_word(__u32 filter, __u64 hash)
{
	return &filters[filter & (ROUTER_LENGTHS - 1)][hash >> 6 & (ROUTER_FILTER_WORDS - 1)];
}

/* What a prefix sets of it. */
static __always_inline __u64 filter_bits(__u64 hash)
{
	return 1ULL << (hash & 63) | 1ULL << (hash >> 20 & 63) | 1ULL << (hash >> 40 & 63);
}

static __always_inline bool may_have_prefix(__u32 filter, __u64 hash)
{
	__u64 bits = filter_bits(hash);

	return filter >= ROUTER_LENGTHS || (*filter_word(filter, hash) & bits) == bits;
}

static __always_inline __u32 chunk_number(const struct cell_table *table, __u64 hash)
{
	return table->first_chunk + (__u32)((hash >> 32) * table->chunks >> 32);
}

/* The cell of a chunk that is looked at after so many others. */
static __always_inline __u32 cell_number(__u64 hash, __u32 step)
{
	__u32 first = (hash & 0xffffffff) * CHUNK_BLOCKS >> 32;

	hide(first);
	first *= BLOCK_CELLS;
	hide(first);
	return first + ((hash >> 32 ^ step) & (BLOCK_CELLS - 1));
}

static __always_inline struct chunk *chunk_at(__u32 number)
{
	void *chunk = bpf_map_lookup_elem(&chunks, &number);
	__u32 zero = 0;

	return chunk ? bpf_map_lookup_elem(chunk, &zero) : NULL;
}

/* `at` is less than CHUNK_CELLS. */
static __always_inline struct cell *cell_at(struct chunk *chunk, __u32 at)
{
	__u32 lead = -bpf_core_field_offset(struct bpf_array, value) & (2 * LINE - 1);

	hide(lead);
	return (void *)chunk + lead + at * sizeof(struct cell);
}

static __always_inline bool is_of(const struct cell *cell, const __u64 *id)
{
	return !((cell->id[0] ^ id[0]) | (cell->id[1] ^ id[1]) | (cell->id[2] ^ id[2]) | (cell->id[3] ^ id[3]));
}

/* Else a place is the number of a chunk, and of a cell in it. */
#define PLACE_NONE (~0ULL)
#define PLACE_CROWDED (~0ULL - 1) /* a prefix that there is no room for may be the longest */

/* Where a prefix of so many bits is, that begins with `name`. A function of its own, which says no address, as the next
 * one: so the verifier looks at the cells once, and not once for each length, and at what follows once, and not once
 * for each cell.
 */
__attribute__((noinline)) __u64 find_prefix(const struct name *name, __u32 bits, __u64 hash, __u32 number)
{
	struct chunk *chunk = chunk_at(number);
	__u32 step;

	if (!name || !chunk)
		return PLACE_CROWDED;
	_Pragma("nounroll") for (step = 0; step < BLOCK_CELLS; step++) {
		__u32 in_chunk = cell_number(hash, step);
		const struct cell *cell = cell_at(chunk, in_chunk);
		__u64 route = *(volatile __u64 *)&cell->route;

		if (!route)
			return PLACE_NONE;
		if (ROUTE_BITS(route) != bits || !is_of(cell, name->id))
			continue;
		if (ROUTE_KIND(route) == ROUTE_GONE)
			return PLACE_NONE;
		return (__u64)number << 32 | in_chunk;
	}
	return PLACE_CROWDED;
}

/* Where a name's longest prefix is. */
__attribute__((noinline)) __u64 find_place(const struct name *name)
{
	__u32 active = *(volatile __u32 *)&lengths_active & 1, at;

	if (!name)
		return PLACE_NONE;
	for (at = 0; at < ROUTER_LENGTHS; at++) {
		const struct route_length *length = &lengths[active].of[at];
		struct name prefix;
		__u64 hash, place;

		if (at >= lengths[active].count)
			break;
		prefix.id[0] = name->id[0] & length->mask[0];
		prefix.id[1] = name->id[1] & length->mask[1];
		prefix.id[2] = name->id[2] & length->mask[2];
		prefix.id[3] = name->id[3] & length->mask[3];
		hash = hash_of(prefix.id, length->bits);
		if (!may_have_prefix(length->filter, hash))
			continue;
		place = find_prefix(&prefix, length->bits, hash, chunk_number(&lengths[active].table, hash));
		if (place != PLACE_NONE)
			return place;
	}
	return PLACE_NONE;
}

/* The cell at a place that was found. */
static __always_inline struct cell *cell_of(__u64 place)
{
	__u32 at = (__u32)place;
	struct chunk *chunk;

	if (at >= CHUNK_CELLS)
		return NULL;
	chunk = chunk_at(place >> 32);
	return chunk ? cell_at(chunk, at) : NULL;
}

static __always_inline __u16 keep(struct cell *cell, struct cell_order *order, bool is_known)
{
	switch (order->action) {
	case CELL_READ:
		order->usage.packets = cell->usage.packets;
		order->usage.last_ns = cell->usage.last_ns;
		break;
	case CELL_ADD:
		__sync_fetch_and_add(&cell->usage.packets, order->usage.packets);
		if (cell->usage.last_ns < order->usage.last_ns)
			cell->usage.last_ns = order->usage.last_ns;
		break;
	case CELL_WRITE:
		if (!is_known) {
			cell->id[0] = order->id[0];
			cell->id[1] = order->id[1];
			cell->id[2] = order->id[2];
			cell->id[3] = order->id[3];
		}
		/* After the name, which is looked at where there is a route. */
		__sync_lock_test_and_set(&cell->route, order->route);
		order->usage.packets = __sync_lock_test_and_set(&cell->usage.packets, 0);
		order->usage.last_ns = __sync_lock_test_and_set(&cell->usage.last_ns, 0);
		break;
	default:
		break;
	}
	return is_known ? CELL_KNOWN : CELL_NEW;
}

/* Reads or writes a cell for the agent, which has no two of these at once. */
SEC("syscall")
int keep_cell(struct cell_order *order)
{
	__u64 id[4] = { order->id[0], order->id[1], order->id[2], order->id[3] };
	struct cell_table table = { order->table.first_chunk, order->table.chunks };
	__u32 bits = ROUTE_BITS(order->route), step;
	__u64 hash = hash_of(id, bits);
	struct chunk *chunk = chunk_at(chunk_number(&table, hash));

	order->result = CELL_ABSENT;
	if (!chunk)
		return 0;
	_Pragma("nounroll") for (step = 0; step < BLOCK_CELLS; step++) {
		struct cell *cell = cell_at(chunk, cell_number(hash, step));
		bool is_known = cell->route;

		if (is_known && (ROUTE_BITS(cell->route) != bits || !is_of(cell, id)))
			continue;
		if (is_known || (order->action == CELL_WRITE && ROUTE_KIND(order->route) != ROUTE_GONE))
			order->result = keep(cell, order, is_known);
		break;
	}
	if (step == BLOCK_CELLS)
		order->result = CELL_CROWDED;
	if (order->action == CELL_WRITE && order->filter < ROUTER_LENGTHS)
		__sync_fetch_and_or(filter_word(order->filter, hash), filter_bits(hash));
	return 0;
}
