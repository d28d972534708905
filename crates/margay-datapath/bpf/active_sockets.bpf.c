// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
/*
 * Active sockets (DESIGN §9; Serval §4.1): who listens and who no longer does, from the kernel's own events. A stream
 * socket listens while its state says so, whoever closes it last and however that process ends; a datagram socket from
 * its bind to its release.
 *
 * The programs see every socket of the machine and report those of the agent's network namespace, and those of programs
 * whose cgroup has an owner, wherever they are.
 */
#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#define AF_INET 2
#define AF_INET6 10
#define SOCK_STREAM 1
#define SOCK_DGRAM 2
#define TCP_LISTEN 10

#include "active_layout.h"
#include "kernel_types.h"

/* Set before the programs are loaded. */
const volatile __u64 own_netns = 0;
/* Where private programs are bound instead. */
const volatile __u32 host_v4 = 0;
const volatile __u32 host_v6[4] = {};

/* Names the types that the agent shares, so that they are in the object's type information. */
struct shared_active_layout {
	struct owner owner;
	struct datagram_key datagram;
	struct socket_event event;
};
const volatile struct shared_active_layout shared_active_layout = {};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, struct owner);
} owners SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__type(key, struct datagram_key);
	__type(value, __u32);
} datagram_ports SEC(".maps");

/* Sockets that were reported as listening, by cookie: the end of no other is worth a word. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, __u64);
	__type(value, __u32);
} reported SEC(".maps");

/* Sockets that the agent has promised something to, by cookie: their release is reported. The agent puts them in. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 32768);
	__type(key, __u64);
	__type(value, __u32);
} held SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} events SEC(".maps");

/* Element 0: events that found no room. The agent looks at all sockets again when it has risen. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} lost SEC(".maps");

static __always_inline void count_lost(void)
{
	__u32 zero = 0;
	__u64 *value = bpf_map_lookup_elem(&lost, &zero);

	if (value)
		__sync_fetch_and_add(value, 1);
}

/* Deeper nesting is not looked at. */
#define LEVELS 12

/* The owner of the current task: of its cgroup, or of the nearest one around it. What is found is returned at once:
 * were it kept for the next round, the verifier would follow every combination.
 */
static __always_inline struct owner *owner_of_task(void)
{
#pragma unroll
	for (int level = LEVELS - 1; level >= 0; level--) {
		__u64 id = bpf_get_current_ancestor_cgroup_id(level);
		struct owner *owner = bpf_map_lookup_elem(&owners, &id);

		if (owner)
			return owner;
	}
	return NULL;
}

/* The owner of whoever made the socket: it may have been passed to the program that listens (socket activation). */
static __always_inline struct owner *owner_of_socket(const struct sock *sk)
{
	const struct cgroup *cgroup = BPF_CORE_READ(sk, sk_cgrp_data.cgroup);
	int deepest = BPF_CORE_READ(cgroup, level);

#pragma unroll
	for (int level = LEVELS - 1; level >= 0; level--) {
		struct owner *owner;
		__u64 id;

		if (level > deepest)
			continue;
		id = BPF_CORE_READ(cgroup, ancestors[level], kn, id);
		owner = bpf_map_lookup_elem(&owners, &id);
		if (owner)
			return owner;
	}
	return NULL;
}

static __always_inline void note_executable(struct socket_event *event)
{
	const struct task_struct *task = (const void *)bpf_get_current_task();
	const struct inode *inode = BPF_CORE_READ(task, mm, exe_file, f_inode);

	if (inode) {
		event->executable_inode = BPF_CORE_READ(inode, i_ino);
		event->executable_device = BPF_CORE_READ(inode, i_sb, s_dev);
	}
}

static __always_inline void note_v4(struct socket_event *event, __u32 v4)
{
	event->address[10] = event->address[11] = 0xff;
	__builtin_memcpy(&event->address[12], &v4, 4);
}

/* IPv6 that takes no IPv4: never changed once a socket is bound. */
static __always_inline void note_v6_only(struct socket_event *event, const struct sock_common *common)
{
	event->is_v6_only = event->is_v6 && BPF_CORE_READ_BITFIELD_PROBED(common, skc_ipv6only);
}

/* SO_BINDTODEVICE, and of datagrams IP_UNICAST_IF and IPV6_UNICAST_IF. */
static __always_inline void note_interface(struct socket_event *event, const struct sock_common *common)
{
	const struct inet_sock *inet = (const void *)common;

	event->interface = BPF_CORE_READ(common, skc_bound_dev_if);
	if (!event->interface && event->protocol == IPPROTO_UDP)
		event->interface = BPF_CORE_READ(inet, uc_index);
	if (!event->interface && event->protocol == IPPROTO_UDP && event->is_v6)
		event->interface = BPF_CORE_READ(inet, pinet6, ucast_oif);
}

static __always_inline void note_address(struct socket_event *event, const struct sock_common *common)
{
	event->netns = BPF_CORE_READ(common, skc_net.net, net_cookie);
	event->port = BPF_CORE_READ(common, skc_num);
	event->is_v6 = BPF_CORE_READ(common, skc_family) == AF_INET6;
	if (event->is_v6) {
		BPF_CORE_READ_INTO(&event->address, common, skc_v6_rcv_saddr);
	} else {
		note_v4(event, BPF_CORE_READ(common, skc_rcv_saddr));
	}
	note_v6_only(event, common);
	note_interface(event, common);
}

static __always_inline void report(const struct socket_event *event)
{
	if (bpf_ringbuf_output(&events, (void *)event, sizeof(*event), 0))
		count_lost();
}

static __always_inline void remember(__u64 cookie)
{
	__u32 yes = 1;

	/* Without it the end would go unheard. */
	if (bpf_map_update_elem(&reported, &cookie, &yes, BPF_ANY))
		count_lost();
}

/* Takes a socket out of a map. Hardly any is in one, and every socket of the host comes here: a look takes no lock. */
static __always_inline bool take(void *map, const __u64 *cookie)
{
	return bpf_map_lookup_elem(map, cookie) && !bpf_map_delete_elem(map, cookie);
}

static __always_inline void report_end(__u64 cookie)
{
	struct socket_event event = { .cookie = cookie, .kind = SOCKET_ENDED };

	if (take(&reported, &cookie))
		report(&event);
}

SEC("tp_btf/inet_sock_set_state")
int BPF_PROG(stream_state, struct sock *sk, int before, int after)
{
	struct socket_event event = { .kind = SOCKET_LISTENS, .protocol = IPPROTO_TCP };
	struct owner *owner;

	if ((before == TCP_LISTEN) == (after == TCP_LISTEN) || sk->sk_protocol != IPPROTO_TCP)
		return 0;
	event.cookie = bpf_get_socket_cookie(sk);
	if (after != TCP_LISTEN) {
		report_end(event.cookie);
		return 0;
	}
	note_address(&event, &sk->__sk_common);
	owner = owner_of_task();
	if (!owner)
		owner = owner_of_socket(sk);
	if (owner)
		event.owner = owner->number;
	else if (event.netns != own_netns)
		return 0;
	note_executable(&event);
	remember(event.cookie);
	report(&event);
	return 0;
}

static __always_inline bool is_wanted_datagram(const struct owner *owner, __u64 netns, __u16 port)
{
	struct datagram_key key = { .owner = owner ? owner->number : 0, .port = port };

	if (owner && owner->flags & OWNER_LOW_PORTS && port && port < 1024)
		return true;
	return (owner || netns == own_netns) && bpf_map_lookup_elem(&datagram_ports, &key);
}

static __always_inline int datagram_bound(struct bpf_sock *ctx, bool is_v6)
{
	struct socket_event event = { .kind = SOCKET_LISTENS, .protocol = IPPROTO_UDP, .is_v6 = is_v6 };
	struct owner *owner;

	if (ctx->type != SOCK_DGRAM || ctx->protocol != IPPROTO_UDP)
		return 1;
	event.port = ctx->src_port;
	event.netns = bpf_get_netns_cookie(ctx);
	owner = owner_of_task();
	if (!is_wanted_datagram(owner, event.netns, event.port))
		return 1;
	event.cookie = bpf_get_socket_cookie(ctx);
	event.owner = owner ? owner->number : 0;
	if (is_v6) {
		__u32 words[4] = { ctx->src_ip6[0], ctx->src_ip6[1], ctx->src_ip6[2], ctx->src_ip6[3] };

		__builtin_memcpy(event.address, words, 16);
	} else {
		note_v4(&event, ctx->src_ip4);
	}
	/* The context is the socket itself, of which programs of this kind are shown a part. */
	note_v6_only(&event, (const void *)ctx);
	note_interface(&event, (const void *)ctx);
	note_executable(&event);
	remember(event.cookie);
	report(&event);
	return 1;
}

SEC("cgroup/post_bind4")
int datagram_bound4(struct bpf_sock *ctx)
{
	return datagram_bound(ctx, false);
}

SEC("cgroup/post_bind6")
int datagram_bound6(struct bpf_sock *ctx)
{
	return datagram_bound(ctx, true);
}

#define SOL_SOCKET 1
#define SOL_IP 0
#define SOL_IPV6 41
#define SO_BINDTODEVICE 25
#define SO_BINDTOIFINDEX 62
#define IP_UNICAST_IF 50
#define IPV6_UNICAST_IF 76

/* A server that is bound may change what it takes. The kernel has not done so yet: the agent looks a little later. */
SEC("cgroup/setsockopt")
int socket_rebound(struct bpf_sockopt *ctx)
{
	struct socket_event event = { .kind = SOCKET_REBOUND };
	bool is_interface = (ctx->level == SOL_SOCKET &&
			     (ctx->optname == SO_BINDTODEVICE || ctx->optname == SO_BINDTOIFINDEX)) ||
			    (ctx->level == SOL_IP && ctx->optname == IP_UNICAST_IF) ||
			    (ctx->level == SOL_IPV6 && ctx->optname == IPV6_UNICAST_IF);

	/* Clients are not bound yet when they say so. */
	if (is_interface && ctx->sk && ctx->sk->src_port && bpf_get_netns_cookie(ctx) == own_netns)
		report(&event);
	/* The kernel takes what the program gave, however long it is. */
	ctx->optlen = 0;
	return 1;
}

/* The last descriptor of a socket is closed, by whom and however it may be. */
SEC("cgroup/sock_release")
int socket_released(struct bpf_sock *ctx)
{
	struct socket_event event = { .kind = SOCKET_RELEASED };
	bool is_datagram = ctx->type == SOCK_DGRAM && ctx->protocol == IPPROTO_UDP;

	if (!is_datagram && (ctx->type != SOCK_STREAM || ctx->protocol != IPPROTO_TCP))
		return 1;
	event.cookie = bpf_get_socket_cookie(ctx);
	if (is_datagram)
		report_end(event.cookie);
	if (take(&held, &event.cookie))
		report(&event);
	return 1;
}

/* A port of one's own choosing that is bound at every address is a server's. A client's is left alone. */
static __always_inline bool is_private_bind(const struct bpf_sock_addr *ctx)
{
	struct owner *owner;

	if (!ctx->user_port || (ctx->type != SOCK_STREAM && ctx->type != SOCK_DGRAM))
		return false;
	owner = owner_of_task();
	return owner && owner->flags & OWNER_PRIVATE;
}

static __always_inline bool is_loopback(__u32 v4)
{
	return (bpf_ntohl(v4) >> 24) == 127;
}

SEC("cgroup/bind4")
int private_bind4(struct bpf_sock_addr *ctx)
{
	if (is_private_bind(ctx) && !is_loopback(ctx->user_ip4))
		ctx->user_ip4 = host_v4;
	return 1;
}

SEC("cgroup/bind6")
int private_bind6(struct bpf_sock_addr *ctx)
{
	if (!is_private_bind(ctx))
		return 1;
	if (!ctx->user_ip6[0] && !ctx->user_ip6[1]) {
		if (!ctx->user_ip6[2] && ctx->user_ip6[3] == bpf_htonl(1))
			return 1;
		if (ctx->user_ip6[2] == bpf_htonl(0xffff)) {
			if (!is_loopback(ctx->user_ip6[3]))
				ctx->user_ip6[3] = host_v4;
			return 1;
		}
	}
	ctx->user_ip6[0] = host_v6[0];
	ctx->user_ip6[1] = host_v6[1];
	ctx->user_ip6[2] = host_v6[2];
	ctx->user_ip6[3] = host_v6[3];
	return 1;
}

/* What listens already. The kernel holds the socket's lock meanwhile: it cannot end unheard between the look and the
 * note.
 */
static __always_inline void show(struct seq_file *seq, struct socket_event *event)
{
	remember(event->cookie);
	bpf_seq_write(seq, event, sizeof(*event));
}

SEC("iter/tcp")
int all_streams(struct bpf_iter__tcp *ctx)
{
	struct socket_event event = { .kind = SOCKET_LISTENS, .protocol = IPPROTO_TCP };
	struct sock_common *common = ctx->sk_common;
	struct owner *owner;
	struct sock *sk;

	if (!common || common->skc_state != TCP_LISTEN)
		return 0;
	sk = (struct sock *)bpf_skc_to_tcp_sock(common);
	if (!sk)
		return 0;
	note_address(&event, common);
	owner = owner_of_socket(sk);
	event.owner = owner ? owner->number : 0;
	event.cookie = bpf_get_socket_cookie(sk);
	show(ctx->meta->seq, &event);
	return 0;
}

SEC("iter/udp")
int all_datagrams(struct bpf_iter__udp *ctx)
{
	struct socket_event event = { .kind = SOCKET_LISTENS, .protocol = IPPROTO_UDP };
	struct udp_sock *udp = ctx->udp_sk;
	struct owner *owner;

	if (!udp)
		return 0;
	note_address(&event, &udp->inet.sk.__sk_common);
	owner = owner_of_socket(&udp->inet.sk);
	if (!is_wanted_datagram(owner, event.netns, event.port))
		return 0;
	event.owner = owner ? owner->number : 0;
	event.cookie = bpf_get_socket_cookie(&udp->inet.sk);
	show(ctx->meta->seq, &event);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
