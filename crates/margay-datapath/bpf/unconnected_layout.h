/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
 *
 * What lies in the maps of unconnected datagrams. They are pinned: a change is a new UNCONNECTED_VERSION.
 */
#pragma once

#define UNCONNECTED_VERSION 3

/* An instance takes as many of them as its weight has a share. A power of two. */
#define SPREAD_SLOTS 64

/* IPv4 addresses are v4-mapped; ports in network byte order. */
struct name_key {
	__u32 address[4];
	__u16 port;
	__u16 zero;
};

/* A client as servers know it. Agents before this one wrote zero as the own port. */
struct client_key {
	__u32 address[4];
	__u16 port;
	__u16 own_port; /* the server's; 0: any */
};

struct address_value {
	__u32 address[4];
};

/* Where datagrams to a name go. */
struct spread {
	__u64 used_ns; /* the last datagram, to a second */
	__u32 sticky; /* 1: a socket keeps to one slot */
	__u32 zero;
	struct address_value slots[SPREAD_SLOTS];
};

/* Whom a socket heard from, as its program knows the sender. */
struct heard_key {
	__u64 cookie;
	struct name_key shown;
	__u32 zero;
};

struct question {
	struct name_key name;
};
