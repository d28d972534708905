/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
 *
 * What lies in the maps. Rust has its types from this file, through the object's type information, and its numbers, by
 * `build.rs`: there is no second definition. A change of any of these structures is a new LAYOUT_VERSION: pinned maps
 * outlive the program that made them.
 */
#pragma once

#define LAYOUT_VERSION 9

/* Bits of flow_entry.flags. */
#define FLOW_EGRESS 1 /* packets of the application go direct */
#define FLOW_ACCEPT 2 /* direct packets of the peer go to the application */
#define FLOW_STALLED 4 /* direct packets go unanswered; the agent has been given one */
#define FLOW_FRESH 8 /* opened by a grant, and not answered yet */
#define FLOW_UNTOLD 16 /* opened by a grant, and the agent has not been told of it */
#define FLOW_BY_SAL0 32 /* a box has it: its packets are never rewritten in place, and only what it forwards is sent */
#define FLOW_LIFTING 64 /* of datagrams: accepted once nothing of it that went up waits at the agent */
#define FLOW_SENT_UP 128 /* while it is lifted: something may have gone up since the agent looked last */
#define FLOW_OF_SOCKET 256 /* of a socket with a source name: the agent refuses what comes from outside of the host */

/* Bits of flow_entry.seen. */
#define SEEN_FIN_EGRESS 1
#define SEEN_RST_EGRESS 2
#define SEEN_FIN_INGRESS 4
#define SEEN_RST_INGRESS 8
#define SEEN_BOTH_FINS (SEEN_FIN_EGRESS | SEEN_FIN_INGRESS)
#define SEEN_ENDS (SEEN_BOTH_FINS | SEEN_RST_EGRESS | SEEN_RST_INGRESS)
/* In events only: datagrams come and none goes, so the agent is to answer with a pinhole. */
#define SEEN_ONE_WAY 16
#define SEEN_PINHOLE 32
#define SEEN_PATH 128 /* a direct packet came by a path that is watched; the event's flow is the path */
#define SEEN_OPENED 256 /* a flow that was opened by a grant; the event has the application's five-tuple */
#define SEEN_TAKEN 1024 /* flows of a grant have been opened, which the event names in the place of the flow; how many is in the upper half */
#define SEEN_TOO_BIG 64 /* a router's word about a packet of the flow; the MTU of its link is in the upper half */
/* In entries only: both ends have closed, and each has acknowledged all of the other's. Nothing is left to pass. */
#define SEEN_OVER 512
#define SEEN_UNDELIVERED 2048 /* in entries only: what was rewritten in place has not reached its program */
#define SEEN_LET_IN 8192 /* in entries only: the host takes it from that card, or forwards it from there */
#define SEEN_SOCKET 4096 /* in entries only: the host's TCP has a socket of it, and has not closed last */

/* skb->mark of a packet on its way from a network card up to the agent, which reads the TUN. */
#define UP_MARK 0x4d475550

/* Value of `pairs` where several peers share the address pair. */
#define PATH_SHARED 0xffffffff

/* Most grants for one destination. A power of two. */
#define OFFER_GRANTS 8

/* Most flows of one grant. */
#define GRANT_FLOWS_MAX 128

/* What the agent keeps with a grant, in bytes. */
#define GRANT_RECORD_LEN 80

/* Bits of path_entry.flags and pair_value.flags. */
#define PATH_HELD 1 /* nothing goes direct: the hosts have moved, and no direct packet has come by yet */
#define PATH_WATCHED 2 /* the agent is told of direct packets that come: the peer waits to hear of them */

/* An application's five-tuple as its packets leave sal0. IPv4 addresses are v4-mapped. Network byte order. */
struct app_key {
	__u8 source[16];
	__u8 destination[16];
	__u16 source_port;
	__u16 destination_port;
	__u8 protocol;
	__u8 zero[3];
};

/* A flow on the wire: the path record stands for the address pair. Ports in network byte order. */
struct wire_key {
	__u32 path;
	__u16 local_port;
	__u16 remote_port;
	__u8 protocol;
	__u8 zero[3];
};

/* Bits of tcp_numbers.flags. */
#define NUMBERS_KNOWN 1 /* the sequence is */
#define NUMBERS_FIN 2 /* that segment bears a FIN, which has a number of its own */
#define NUMBERS_ACKNOWLEDGED 4 /* the acknowledgement is known */
#define NUMBERS_NEXT 8 /* `next` is; ingress alone, as the rest is */
#define NUMBERS_END 16 /* `end` is */
#define NUMBERS_RESET 32 /* `reset` is */

/* What one direction of a TCP flow showed last. */
struct tcp_numbers {
	__u32 sequence; /* the highest, of a segment's first byte */
	__u32 length; /* of that segment */
	__u32 acknowledgement;
	__u32 end; /* the number after a FIN that waits for its acknowledgement */
	__u32 reset; /* of the last RST that may not be what the application's TCP expects */
	__u16 window;
	__u8 scale; /* room */
	__u8 flags; /* NUMBERS_… */
};

/* One direction of a flow. */
struct direction {
	__u64 last_ns; /* the last packet */
	__u64 bytes;
	__u64 segments;
	struct tcp_numbers numbers;
	/* Ingress of datagrams: when the agent was asked to answer last; of TCP: since when its data may go unanswered
	 * here. Egress of TCP: when the peer acknowledged more of it last.
	 */
	__u64 asked_ns;
	__u32 segment; /* payload of the largest TCP segment, since the entry was made */
	__u32 next; /* what the application's TCP expects, as far as has been seen */
};

/* Both directions of a flow may pass on different processors at once: what each writes lies on cache lines of its own.
 * The kernel puts a value at 8 bytes past a line, which is where the odd first part comes from.
 */
struct flow_entry {
	__u32 generation;
	__u32 flow;
	struct app_key app;
	__u32 flags;
	__u32 seen;
	struct direction egress;
	struct direction ingress;
	__u64 unanswered_since_ns; /* the first direct data that nothing has come back for; 0: none */
	__u64 rtt_ns; /* longest wait for an answer lately; 0: not known */
	__u32 own_path; /* room: a path of its own */
	__u32 delta; /* where its numbers are translated: which element of `deltas`; 0: nowhere */
};

/* Bits of translation.flags. */
#define DELTA_NO_TIMESTAMPS 1 /* the option is overwritten */
#define DELTA_NO_SACK 2 /* the same */

/* What is added to the numbers of one direction. */
struct translation {
	__u32 sequence;
	__u32 acknowledgement; /* selective ones, too */
	__u32 timestamp;
	__u32 echo;
	__u8 raised; /* by how many bits windows are shifted to the left */
	__u8 lowered; /* and then to the right; one of the two is zero */
	__u8 flags; /* DELTA_… */
	__u8 zero;
};

/* Between the wire and the host's TCP, of one flow. */
struct delta {
	struct translation egress;
	struct translation ingress;
};

/* The one record that is swapped when a peer moves. */
struct path_entry {
	__u8 local[16];
	__u8 remote[16];
	__u8 next_hop[16]; /* v4-mapped where it is IPv4 */
	__u32 ifindex;
	__u32 mtu;
	__u64 stall_ns;
	__u64 rtt_ns; /* the first wait for an answer of the flow that came last; 0: not known */
	__u64 since_ns; /* what was sent before went to other addresses: it says nothing of these */
	__u32 flags;
	__u32 zero;
};

/* What `change_flow` is told: how a flow goes on. */
struct flow_change {
	struct wire_key wire;
	__u32 flow;
	__u32 generation;
	__u32 flags;
	__u32 delta; /* as in its entry */
};

/* What it says. */
#define CHANGE_DONE 0
#define CHANGE_ABSENT 1 /* nothing lies there */
#define CHANGE_TAKEN 2 /* another flow does */
#define CHANGE_LATE 3 /* what lies there is newer */

/* What `lift_flow` is told: a flow of which the agent has worked off what had gone up when it looked last. */
struct flow_lift {
	struct wire_key wire;
	__u32 flow;
	__u32 is_last; /* it is accepted, whatever has gone up meanwhile */
};

/* What it says. */
#define LIFT_DONE 0 /* it is accepted, or is not lifted any more */
#define LIFT_AGAIN 1 /* something has gone up meanwhile */

/* What `survey_flows`, `tell_flows` and `forget_flows` are told: flows of a grant. */
struct grant_flows {
	struct wire_key first; /* of flow 0 */
	__u32 first_flow;
	__u64 these[2]; /* by flow: to be looked at, to be told of, or to be kept */
	__u16 count;
	__u8 rises_here; /* flows differ in the port of this end, and not of the peer's */
	__u8 zero[5];
	/* What `survey_flows` says, of those that it has looked at. */
	__u64 answered[2];
	__u64 over[2]; /* and nobody was told of them */
};

/* How often the agent hears, while the flows of a grant are opened, how many are. */
#define GRANT_NEWS 8

/* What a pair of addresses leads to. */
struct pair_value {
	__u32 path; /* or PATH_SHARED */
	__u32 flags;
	__u64 told_ns; /* when the agent heard last that a direct packet came */
};

struct pair_key {
	__u8 remote[16];
	__u8 local[16];
};

struct address_key {
	__u8 address[16];
};

/* Addresses that are inside, at one interface: of all its bits those of the interface count always. */
#define INSIDE_BITS 160
struct inside_key {
	__u32 prefix_len;
	__u32 ifindex;
	__u8 address[16];
};

/* A TCP listener of this host that is looked up. The port in network byte order. */
struct listener_key {
	__u16 port;
	__u8 family; /* AF_INET or AF_INET6 */
	__u8 zero;
};

/* What the agent hears of a flow. */
struct flow_event {
	__u32 flow;
	__u32 seen;
	struct app_key wire; /* a pinhole, or the packet that was too big: as it stood on the wire; the application's of a flow that was opened */
};

/* Where programs of this host connect to. Network byte order. */
struct offer_key {
	__u8 address[16];
	__u16 port;
	__u8 protocol;
	__u8 zero;
};

/* The grants for a destination, by number; 0: none. */
struct offer {
	__u32 grants[OFFER_GRANTS];
};

/* A grant of a peer's: flows that programs of this host may open. What rises with each of them is of the first one
 * here.
 */
struct spare {
	__u32 grant; /* its number: elements of the map are used again, and whoever has found one must see that it still is the same */
	__u32 path;
	__u32 first_flow; /* rises */
	__u32 next; /* flows that are taken; the programs alone change it */
	__u16 count;
	__u16 local_port; /* rises; host byte order, as is the next */
	__u16 remote_port;
	__u16 zero;
	__u64 until_ns;
	__u64 key[2]; /* under which its SYNs are tagged; zero when the grant is over */
	__u8 record[GRANT_RECORD_LEN]; /* the agent's own, for its next start */
};

/* A grant to a peer: flows that it may open. It lies at the wire key of the first of them: their remote ports begin at
 * a multiple of GRANT_FLOWS_MAX.
 */
struct grant {
	__u32 grant; /* its number, as above */
	__u32 first_flow; /* rises */
	struct app_key app; /* but for the destination port */
	__u16 app_ports[GRANT_FLOWS_MAX]; /* that of each flow, in network byte order */
	__u16 remote_port; /* rises; host byte order */
	__u16 count;
	__u32 opened; /* how many of them are; the programs alone change it */
	__u64 until_ns;
	__u64 key[2]; /* as above */
	__u64 used[GRANT_FLOWS_MAX / 64]; /* a bit for each flow that was opened; the programs alone change it */
	__u8 record[GRANT_RECORD_LEN]; /* as above */
};

/* What is counted, and why packets leave the fast path. Numbers are stable: metrics carry them. */
enum counter {
	COUNT_EGRESS_PACKETS = 0,
	COUNT_INGRESS_PACKETS = 1,
	COUNT_UP_NO_FLOW = 2, /* on a flow port, no entry */
	COUNT_UP_NOT_ACCEPTED = 3, /* an entry that does not accept yet */
	COUNT_LEFT_TOO_LARGE = 4, /* larger than the path takes */
	COUNT_LEFT_STALLED = 5, /* unanswered for too long */
	COUNT_LEFT_NO_PATH = 6, /* no record of the path */
	COUNT_DROP_AGENT_DEAD = 7, /* for the agent, which is not there */
	COUNT_DROP_REWRITE = 8, /* the kernel refused to rewrite it */
	COUNT_EVENT_LOST = 9, /* the ring of events was full; the agent's scan finds it */
	COUNT_PINHOLES = 10, /* datagrams without payload: between the agents */
	COUNT_TOO_BIG = 11, /* routers said that a packet was too large */
	COUNT_LEFT_HELD = 12, /* the path is held */
	COUNT_DROP_RESET = 13, /* a reset by a path that is held */
	COUNT_TAKEN = 14, /* flows of grants that programs of this host opened */
	COUNT_OPENED = 15, /* flows of grants that peers opened */
	COUNT_DROP_UNPROVED = 16, /* a SYN for a flow of a grant without proof that its sender holds it, or for an open flow */
	COUNT_DROP_VIRTUAL_INGRESS = 17, /* came by a card with a virtual address */
	COUNT_DROP_VIRTUAL_EGRESS = 18, /* would have left by a card with one, or with the tag of a box */
	COUNT_OF_HOST = 19, /* on a flow port, no entry, and none of Margay's: the host has it */
	COUNT_DROP_RATE = 20, /* on a flow port, no entry, and too many of these have come */
	COUNT_UP_FRAGMENT = 21, /* of a packet for a flow port */
	COUNT_UNDELIVERED = 22, /* flows whose packets did not reach their program in place */
	COUNT_DROP_SOCKETLESS = 23, /* of a connection without a socket, and TCP could make nothing of it */
	COUNTERS = 24,
};
