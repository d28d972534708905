/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
 *
 * What the service router's program and the agent share. Nothing of it outlives the agent. Addresses are v4-mapped where they are
 * IPv4; what comes from packets is in network byte order.
 */
#pragma once

#define ROUTER_LENGTHS 32 /* lengths of prefixes in use at once */
#define ROUTER_BUCKETS 4096
#define ROUTER_FILTER_WORDS 8192
#define NO_FILTER 0xffffffff

/* The masks of the lengths in use, longest first: a look-up is one search per length. */
struct route_length {
	__u64 mask[4];
	__u32 bits;
	__u32 filter; /* number of the filter that knows which names may have such a prefix */
};

struct route_lengths {
	__u32 count;
	__u32 zero;
	struct route_length of[ROUTER_LENGTHS];
};

struct route_key {
	__u64 id[4]; /* bits beyond the prefix are zero */
	__u32 bits;
	__u32 zero;
};

/* route.kind */
#define ROUTE_AGENT 0 /* the agent decides: a listener may want it */
#define ROUTE_SEAT 1
#define ROUTE_BUCKETS 2

/* What a rule has done. */
struct usage {
	__u64 packets; /* that it has decided upon */
	__u64 last_ns;
};

/* All that is to be known of a prefix with one rule, so that nothing else must be fetched from memory. */
struct route {
	__u32 kind;
	__u32 number; /* of the seat, or of the list of buckets */
	__u32 hop;
	__u32 zero;
	struct usage usage; /* since the route was written */
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
	ROUTER_COUNTERS,
};
