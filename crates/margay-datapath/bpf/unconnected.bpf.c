// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
/*
 * Unconnected datagrams (DESIGN §9; Serval §4.1, Table 1): each one that a program sends to a name goes to an
 * instance that is chosen for it alone. An instance has a virtual address of its own on this host; the flow to it is
 * as every other. The program sees the name's address only: what it hears from an instance is shown as from the name.
 *
 * A datagram server, in turn, hears its clients from surrogates, without which its answers would not come by sal0; it
 * is shown the clients' real addresses, and answers there.
 */
#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "kernel_types.h"
#include "unconnected_layout.h"

/* Set before the programs are loaded. */
const volatile __u64 own_netns = 0;
/* What every virtual address begins with; 198.18.0.0/15, and the first word of fd5a:4c00::/32. */
const volatile __u32 virtual_v4 = 0;
const volatile __u32 virtual_v4_mask = 0;
const volatile __u32 virtual_v6 = 0;

/* The interface that virtual addresses lead to. */
const volatile __u32 sal0_ifindex = 0;

struct shared_layout {
	struct name_key name;
	struct client_key client;
	struct address_value address;
	struct spread spread;
	struct heard_key heard;
	struct question question;
};
const volatile struct shared_layout shared_layout = {};
const volatile __u32 layout_version = UNCONNECTED_VERSION;

/* Names and ports that programs send to. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 4096);
	__type(key, struct name_key);
	__type(value, struct spread);
} spreads SEC(".maps");

/* Instances' addresses, and the names' that stand for them. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 16384);
	__type(key, struct address_value);
	__type(value, struct address_value);
} faces SEC(".maps");

/* Clients of datagram servers: the surrogates that their datagrams come from and their real addresses, with one port;
 * and the way back, by the port at which the client was heard, and by port 0 for sockets that have heard nothing from
 * the client yet: servers answer from other sockets, too.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 131072);
	__type(key, struct name_key);
	__type(value, struct address_value);
} clients SEC(".maps");

/* Two of each client. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 262144);
	__type(key, struct client_key);
	__type(value, struct address_value);
} surrogates SEC(".maps");

/* With whom a socket goes on: an instance that answered from a port that is not spread, since what the socket says to
 * that port is for the one that it heard from (TFTP); the name itself, where the socket began before the name was
 * spread; or an address that is a client's, too, where the socket was sent to from that address without Margay. The
 * oldest go.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct heard_key);
	__type(value, struct address_value);
} heard SEC(".maps");

/* Element 0: UNCONNECTED_VERSION of whoever made the pinned maps. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} unconnected_layout SEC(".maps");

/* When the agent was asked about a name last. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct name_key);
	__type(value, __u64);
} asked SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 65536);
} questions SEC(".maps");

#define SECOND_NS 1000000000ULL
#define ALLOW 1
#define REFUSE 0
#define ENETUNREACH 101
#define AF_INET6 10

static __always_inline bool is_own(struct bpf_sock_addr *ctx)
{
	return bpf_get_netns_cookie(ctx) == own_netns;
}

static __always_inline bool is_virtual(const struct name_key *name)
{
	if (!name->address[0] && !name->address[1] && name->address[2] == bpf_htonl(0xffff))
		return (name->address[3] & virtual_v4_mask) == virtual_v4;
	return name->address[0] == virtual_v6;
}

static __always_inline void name_of_v4(struct bpf_sock_addr *ctx, struct name_key *name)
{
	name->address[2] = bpf_htonl(0xffff);
	name->address[3] = ctx->user_ip4;
	name->port = ctx->user_port;
}

static __always_inline void name_of_v6(struct bpf_sock_addr *ctx, struct name_key *name)
{
	name->address[0] = ctx->user_ip6[0];
	name->address[1] = ctx->user_ip6[1];
	name->address[2] = ctx->user_ip6[2];
	name->address[3] = ctx->user_ip6[3];
	name->port = ctx->user_port;
}

static __always_inline void set_v4(struct bpf_sock_addr *ctx, const struct address_value *to)
{
	ctx->user_ip4 = to->address[3];
}

static __always_inline void set_v6(struct bpf_sock_addr *ctx, const struct address_value *to)
{
	ctx->user_ip6[0] = to->address[0];
	ctx->user_ip6[1] = to->address[1];
	ctx->user_ip6[2] = to->address[2];
	ctx->user_ip6[3] = to->address[3];
}

/* The agent finds out who serves it; until then the name's one flow carries what is sent. */
static __always_inline void ask(const struct name_key *name)
{
	__u64 now = bpf_ktime_get_coarse_ns();
	__u64 *last = bpf_map_lookup_elem(&asked, name);
	struct question *question;

	if (last && now - *last < SECOND_NS)
		return;
	bpf_map_update_elem(&asked, name, &now, BPF_ANY);
	question = bpf_ringbuf_reserve(&questions, sizeof(*question), 0);
	/* Asked again after a second. */
	if (!question)
		return;
	question->name = *name;
	bpf_ringbuf_submit(question, 0);
}

/* Whether a known address is that of a name or peer; NULL is none. */
static __always_inline bool is_same(const struct address_value *known, const struct name_key *name)
{
	return known && known->address[3] == name->address[3] && known->address[2] == name->address[2] &&
	       known->address[1] == name->address[1] && known->address[0] == name->address[0];
}

static __always_inline void heard_key_of(struct bpf_sock_addr *ctx, const __u32 *shown, __u16 port,
					 struct heard_key *key)
{
	key->cookie = bpf_get_socket_cookie(ctx);
	__builtin_memcpy(key->shown.address, shown, 16);
	key->shown.port = port;
}

/* The socket goes on with `with`, whom it knows as `shown`. */
static __always_inline void go_on(struct bpf_sock_addr *ctx, const __u32 *shown, const struct name_key *with)
{
	struct heard_key key = {};
	struct address_value value;

	heard_key_of(ctx, shown, with->port, &key);
	if (is_same(bpf_map_lookup_elem(&heard, &key), with))
		return;
	__builtin_memcpy(value.address, with->address, 16);
	bpf_map_update_elem(&heard, &key, &value, BPF_ANY);
}

static __always_inline struct address_value *heard_from(struct bpf_sock_addr *ctx, const struct name_key *name)
{
	struct heard_key key = {};

	heard_key_of(ctx, name->address, name->port, &key);
	return bpf_map_lookup_elem(&heard, &key);
}

/* The same for a socket as long as it lives. */
static __always_inline __u32 number_of(struct bpf_sock_addr *ctx)
{
	/* Cookies rise one by one; by the golden ratio neighbours come apart. */
	return (bpf_get_socket_cookie(ctx) * 0x9e3779b97f4a7c15ULL) >> 32;
}

static __always_inline __u16 own_port(struct bpf_sock_addr *ctx)
{
	return ctx->sk ? bpf_htons(ctx->sk->src_port) : 0;
}

/* A client's address, as a socket with this port knows the client. */
static __always_inline void client_key_of(const __u32 *address, __u16 port, __u16 own, struct client_key *key)
{
	__builtin_memcpy(key->address, address, 16);
	key->port = port;
	key->own_port = own;
}

/* The surrogate of the client with this address; NULL: there is none, or this socket hears from the address without
 * Margay. A port that has heard from the surrogate keeps to the flow: the address of a datagram that comes without
 * Margay can be forged, and what a flow seals would go there in the clear.
 */
static __always_inline struct address_value *surrogate_of(struct bpf_sock_addr *ctx, const struct name_key *address)
{
	struct address_value *last, *here;
	struct client_key key = {};

	client_key_of(address->address, address->port, 0, &key);
	last = bpf_map_lookup_elem(&surrogates, &key);
	if (!last)
		return NULL;
	key.own_port = own_port(ctx);
	here = bpf_map_lookup_elem(&surrogates, &key);
	if (here)
		return here;
	return is_same(heard_from(ctx, address), address) ? NULL : last;
}

/* Where a datagram goes instead, or NULL. */
static __always_inline struct address_value *chosen(struct bpf_sock_addr *ctx, const struct name_key *name)
{
	struct address_value *known;
	struct spread *spread;
	__u64 now;

	if (!is_virtual(name))
		return surrogate_of(ctx, name);
	spread = bpf_map_lookup_elem(&spreads, name);
	if (spread) {
		now = bpf_ktime_get_coarse_ns();
		if (now - spread->used_ns > SECOND_NS)
			spread->used_ns = now;
		if (!spread->sticky)
			return &spread->slots[bpf_get_prandom_u32() & (SPREAD_SLOTS - 1)];
		known = heard_from(ctx, name);
		return known ? known : &spread->slots[number_of(ctx) & (SPREAD_SLOTS - 1)];
	}
	known = heard_from(ctx, name);
	/* Until the agent has answered, datagrams of a socket all go by the name's own address. A sticky one goes on
	 * so.
	 */
	if (!known)
		go_on(ctx, name->address, name);
	if (!known || is_same(known, name))
		ask(name);
	return known;
}

/* A socket that has heard from an instance goes on with it alone; a server may connect to its client. */
static __always_inline struct address_value *meant(struct bpf_sock_addr *ctx, const struct name_key *name)
{
	if (ctx->protocol != IPPROTO_UDP)
		return NULL;
	return is_virtual(name) ? heard_from(ctx, name) : surrogate_of(ctx, name);
}

/* The name's address in place of an instance's; NULL if it is none. A key begins with the address. */
static __always_inline struct address_value *name_behind(const struct name_key *source)
{
	return is_virtual(source) ? bpf_map_lookup_elem(&faces, source) : NULL;
}

/* The client's address in place of its surrogate's. */
static __always_inline struct address_value *client_behind(const struct name_key *source)
{
	return is_virtual(source) ? bpf_map_lookup_elem(&clients, source) : NULL;
}

/* A socket heard from an instance: at a port that is not spread, it goes on with that one. */
static __always_inline void hear_instance(struct bpf_sock_addr *ctx, const struct name_key *source,
					  const struct address_value *face)
{
	struct name_key name = { .port = source->port };

	__builtin_memcpy(name.address, face->address, 16);
	if (!bpf_map_lookup_elem(&spreads, &name))
		go_on(ctx, face->address, source);
}

/* False where there is no room. */
static __always_inline bool note_surrogate(const struct name_key *surrogate, const struct address_value *client,
					   __u16 own)
{
	struct client_key key = {};
	struct address_value now;

	client_key_of(client->address, surrogate->port, own, &key);
	if (is_same(bpf_map_lookup_elem(&surrogates, &key), surrogate))
		return true;
	__builtin_memcpy(now.address, surrogate->address, 16);
	return !bpf_map_update_elem(&surrogates, &key, &now, BPF_ANY);
}

/* A client's socket may have several flows to one server. Answers take the one that it was heard by last. False where
 * that cannot be noted: a datagram without Margay from the client's address, which can be forged, would then lead
 * answers away from the flow.
 */
static __always_inline bool hear_client(struct bpf_sock_addr *ctx, const struct name_key *surrogate,
					const struct address_value *client)
{
	return note_surrogate(surrogate, client, 0) && note_surrogate(surrogate, client, own_port(ctx));
}

/* A datagram that came without Margay. A client that has a flow may have used its port again since. */
static __always_inline void hear_plain(struct bpf_sock_addr *ctx, const struct name_key *source)
{
	struct client_key key = {};

	client_key_of(source->address, source->port, 0, &key);
	if (!bpf_map_lookup_elem(&surrogates, &key))
		return;
	key.own_port = own_port(ctx);
	if (!bpf_map_lookup_elem(&surrogates, &key))
		go_on(ctx, source->address, source);
}

/* Whom a program shall see as the sender, or NULL. */
static __always_inline struct address_value *hear(struct bpf_sock_addr *ctx, const struct name_key *source)
{
	struct address_value *face;

	if (!is_virtual(source)) {
		hear_plain(ctx, source);
		return NULL;
	}
	face = name_behind(source);
	if (face) {
		hear_instance(ctx, source, face);
		return face;
	}
	face = client_behind(source);
	/* A program that is shown the surrogate itself answers there, by the flow. */
	return face && hear_client(ctx, source, face) ? face : NULL;
}

/* Whom a program shall see as its peer, or NULL. */
static __always_inline struct address_value *peer_behind(struct bpf_sock_addr *ctx, const struct name_key *peer)
{
	struct address_value *face;

	if (ctx->protocol != IPPROTO_UDP)
		return NULL;
	face = name_behind(peer);
	return face ? face : client_behind(peer);
}

/* Nothing refuses what a program hears. */
static __always_inline bool is_heard(struct bpf_sock_addr *ctx, const struct name_key *name)
{
	return true;
}

/* Whether what a socket sends to a name gets to sal0. One that is bound to a card would send it there, where it is
 * dropped, and its program would wait for an answer until it tires.
 */
static __always_inline bool is_sent(struct bpf_sock_addr *ctx, const struct name_key *name)
{
	struct bpf_sock *socket = ctx->sk;
	const struct inet_sock *inet;
	__u32 interface;

	if (!socket || !is_virtual(name))
		return true;
	interface = socket->bound_dev_if;
	if (!interface && ctx->protocol == IPPROTO_UDP) {
		/* Of the socket itself, programs of this kind are shown a part: the pointer is read as any number. */
		bpf_probe_read_kernel(&inet, sizeof(inet), &socket);
		interface = BPF_CORE_READ(inet, uc_index);
		if (!interface && ctx->family == AF_INET6)
			interface = BPF_CORE_READ(inet, pinet6, ucast_oif);
	}
	if (!interface || interface == sal0_ifindex)
		return true;
	bpf_set_retval(-ENETUNREACH);
	return false;
}

/* A program: the address that a call is given, or gives, is replaced by what `find` has for it, unless it `may` not
 * pass.
 */
#define CALL(call, program, family, may, find)        \
	SEC("cgroup/" call)                           \
	int program(struct bpf_sock_addr *ctx)        \
	{                                             \
		struct name_key name = {};            \
		struct address_value *to;             \
                                                      \
		if (!is_own(ctx))                     \
			return ALLOW;                 \
		name_of_##family(ctx, &name);         \
		if (!may(ctx, &name))                 \
			return REFUSE;                \
		to = find(ctx, &name);                \
		if (to)                               \
			set_##family(ctx, to);        \
		return ALLOW;                         \
	}

CALL("sendmsg4", send_v4, v4, is_sent, chosen)
CALL("sendmsg6", send_v6, v6, is_sent, chosen)
CALL("connect4", connect_v4, v4, is_sent, meant)
CALL("connect6", connect_v6, v6, is_sent, meant)
CALL("recvmsg4", receive_v4, v4, is_heard, hear)
CALL("recvmsg6", receive_v6, v6, is_heard, hear)
CALL("getpeername4", peer_v4, v4, is_heard, peer_behind)
CALL("getpeername6", peer_v6, v6, is_heard, peer_behind)

char LICENSE[] SEC("license") = "Dual BSD/GPL";
