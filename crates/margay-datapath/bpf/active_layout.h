/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
 *
 * What the programs of active sockets and the agent share. Nothing of it outlives the agent.
 */
#pragma once

/* Bits of owner.flags. */
#define OWNER_PRIVATE 1 /* its sockets are bound to the host's virtual address */
#define OWNER_LOW_PORTS 2 /* datagram sockets below port 1024 are of interest without being named */

/* socket_event.kind */
#define SOCKET_LISTENS 1
#define SOCKET_ENDED 2
#define SOCKET_RELEASED 3 /* of a held socket: its last descriptor is closed */
#define SOCKET_REBOUND 4 /* some socket that is bound already may have been bound to another interface, or to none */

/* Whose sockets are watched in every network namespace. By the number of its cgroup. */
struct owner {
	__u32 number; /* never 0, which stands for nobody */
	__u32 flags;
};

/* A port whose datagram sockets are of interest. Owner 0: of the agent's own network namespace. */
struct datagram_key {
	__u32 owner;
	__u16 port; /* host byte order */
	__u16 zero;
};

/* A socket begins or ends to listen; a datagram socket listens while it is bound. */
struct socket_event {
	__u64 cookie;
	__u64 netns; /* the cookie of its network namespace */
	__u64 executable_inode; /* of the process that made it listen; 0: not known */
	__u32 executable_device;
	__u32 owner;
	__u8 address[16]; /* IPv4 addresses are v4-mapped */
	__u16 port; /* host byte order; 0: the kernel chooses in this moment */
	__u16 kind;
	__u8 protocol;
	__u8 is_v6;
	__u8 is_v6_only;
	__u8 zero;
	__u32 interface; /* whose packets alone it takes, or by which alone it sends; 0: any */
	__u32 zero_too;
};
