/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
 *
 * What the service router's program and the agent share. Nothing of it outlives the agent. Addresses are v4-mapped
 * where they are IPv4; what comes from packets is in network byte order.
 */
#pragma once

#define ROUTER_LENGTHS 32 /* lengths of prefixes in use at once */
#define ROUTER_BUCKETS 4096
#define ROUTER_FILTER_WORDS 8192
#define NO_FILTER 0xffffffff
/* A prefix lies in one block of cells. */
#define BLOCK_CELLS 64
#define CHUNK_BLOCKS 7
#define CHUNK_CELLS (CHUNK_BLOCKS * BLOCK_CELLS)

/* The masks of the lengths in use, longest first: a look-up is one search per length. */
struct route_length {
	__u64 mask[4];
	__u32 bits;
	__u32 filter; /* number of the filter that knows which names may have such a prefix */
};

/* Where the prefixes are: chunks of cells, by number. */
struct cell_table {
	__u32 first_chunk;
	__u32 chunks;
};

struct route_lengths {
	__u32 count;
	__u32 zero;
	struct cell_table table;
	struct route_length of[ROUTER_LENGTHS];
};

/* Of a route: what it is, where it leads, and the length of its prefix, in one word, so that they change at once. */
#define ROUTE_GONE 1 /* no such prefix any more */
#define ROUTE_AGENT 2 /* the agent decides: a listener may want it */
#define ROUTE_HOP 3
#define ROUTE_BUCKETS 4
#define ROUTE_NUMBER(route) ((__u32)(route)) /* of the next hop, or of the list of buckets */
#define ROUTE_KIND(route) ((__u32)((route) >> 32 & 0xffff))
#define ROUTE_BITS(route) ((__u32)((route) >> 48))

/* What a rule has done. */
struct usage {
	__u64 packets; /* that it has decided upon */
	__u64 last_ns;
};

/* A prefix and all that is to be known of it, so that one line of the processor's cache is fetched from memory. Once it
 * is used, a cell is this prefix's for as long as its table is.
 */
struct cell {
	__u64 id[4]; /* bits beyond the prefix are zero */
	__u64 route; /* 0: not used yet */
	__u64 zero;
	struct usage usage; /* since the route was written, where it leads to one next hop */
};

/* Cells, and room to have them begin where a pair of lines does. */
struct chunk {
	__u8 bytes[(CHUNK_CELLS + 2) * 64];
};

/* cell_order.action */
#define CELL_WRITE 1 /* `usage` becomes what was done by the route before */
#define CELL_READ 2 /* `usage` becomes what was done */
#define CELL_ADD 3 /* `usage` was done besides */

/* cell_order.result */
#define CELL_ABSENT 0
#define CELL_CROWDED 1 /* others are where it might be: names with such a prefix are left to the agent */
#define CELL_KNOWN 2
#define CELL_NEW 3

/* What the agent asks of `keep_cell`. */
struct cell_order {
	__u64 id[4];
	__u64 route; /* of CELL_WRITE; the others look at its length alone */
	struct usage usage;
	struct cell_table table;
	__u32 filter;
	__u16 action;
	__u16 result;
};

/* By bucket, the number of a seat. */
struct bucket_list {
	__u32 seats[ROUTER_BUCKETS];
};

#define HOP_NONE 0xffffffff /* packets are discarded */

/* A rule. */
struct seat {
	struct usage usage; /* beside others of its prefix */
	__u32 hop;
	__u32 zero;
};

/* hop_version.flags */
#define HOP_READY 1 /* interface and neighbour are known */
#define HOP_KEYED 2
#define HOP_V4 4
#define HOP_OUTER 8 /* a router above or beside this one */

struct hop_version {
	__u8 remote[16];
	__u8 local[16];
	__u64 key[2]; /* of hop tags */
	__u32 ifindex;
	__u32 mtu; /* largest IP packet */
	__u16 remote_port;
	__u16 flags;
	__u8 remote_mac[6];
	__u8 local_mac[6];
};

/* Where packets are sent on to. One of the two versions is in force, while the agent writes the other. */
struct hop {
	__u32 active;
	__u32 zero;
	__u64 checked_ns; /* a packet was left to the agent last, so that the kernel looks whether the neighbour is still there */
	struct hop_version versions[2];
};

/* Whose hop tags can be checked. */
struct neighbour_key {
	__u8 address[16];
	__u16 port;
	__u8 zero[6];
};

struct hop_key {
	__u64 words[2];
};

struct own_address {
	__u8 address[16];
};

/* What is counted, by number; never reused. */
enum router_counter {
	ROUTER_FORWARDED,
	ROUTER_DROP_HOP_LIMIT, /* DropReason::HopLimit */
	ROUTER_DROP_SERVICE, /* DropReason::ServiceDrop */
	ROUTER_DROP_NO_DEVICE, /* the interface went while the packet was on its way */
	ROUTER_LEFT_SHAPE, /* to the agent: no plain SYN, or no plain packet */
	ROUTER_LEFT_NO_ROUTE, /* no rule, or one that the agent must decide by, or whether it may go there */
	ROUTER_LEFT_NO_WAY, /* next hop of the other family, or its neighbour is not known */
	ROUTER_LEFT_TOO_LARGE,
	ROUTER_LEFT_CHECK, /* so that the kernel looks after the neighbour */
	ROUTER_LEFT_CHECKSUM, /* whether it is complete cannot be told */
	ROUTER_BAD_HOP_TAG, /* forwarded all the same, as from a first router */
	ROUTER_LEFT_CROWDED, /* there may be a prefix that had no room */
	ROUTER_COUNTERS,
};
