/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
#pragma once

/* Listeners at one address of the host, or on its loopback, with their clients' real addresses (docs/decisions/0052).
 * Connections come by sal0 for the host's virtual address, where the kernel finds wildcards alone; what is for one of
 * these is given to it here. Only by sal0: what others send to that address was never asked who it is. The socket is
 * found as the kernel finds it, so that any will do: one of MPTCP, or one of several on a port.
 */

/* At which address the listener is. Pinned: without the agent grants still bring connections. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 16384);
	__type(key, struct listener_key);
	__type(value, struct address_key);
} listeners SEC(".maps");

static __always_inline bool is_to_host(const struct packet *packet)
{
	const __u32 *to = (const __u32 *)packet->key.destination;

	if (packet->is_v4)
		return to[3] == host_v4;
	return to[0] == host_v6[0] && to[1] == host_v6[1] && to[2] == host_v6[2] && to[3] == host_v6[3];
}

/* Whether the host has a connection of this packet, one that begins, or one that lingers. */
static __always_inline bool has_connection(struct __sk_buff *skb, struct bpf_sock_tuple *tuple, __u32 len)
{
	struct bpf_sock *socket = bpf_skc_lookup_tcp(skb, tuple, len, BPF_F_CURRENT_NETNS, 0);
	bool is_connection;

	if (!socket)
		return false;
	is_connection = socket->state != BPF_TCP_LISTEN;
	bpf_sk_release(socket);
	return is_connection;
}

/* Whether a socket is bound to an address, and not to every one. The kernel notes an IPv4 address for those of IPv6,
 * too: the one that is mapped, or a loopback address for all others but `::`.
 */
static __always_inline bool is_at_one_address(const struct bpf_sock *socket)
{
	return socket->src_ip4;
}

/* Gives the packet to what listens at this address. Where nothing does, the kernel refuses it. A socket at every
 * address the kernel finds by itself, and it forwards no packet that has a socket: runtimes of containers hold such a
 * socket for a published port, and translate what comes for the port to a container.
 */
static __noinline void assign_listener(struct __sk_buff *skb, const struct packet *packet,
				       const struct address_key *address)
{
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *socket;
	__u32 len = socket_tuple(packet, &tuple);

	if (!address || has_connection(skb, &tuple, len))
		return;
	if (packet->is_v4)
		tuple.ipv4.daddr = ((const __u32 *)address->address)[3];
	else
		__builtin_memcpy(tuple.ipv6.daddr, address->address, 16);
	socket = bpf_skc_lookup_tcp(skb, &tuple, len, BPF_F_CURRENT_NETNS, 0);
	if (!socket)
		return;
	/* Refused where another program has chosen one already; that choice stands. */
	if (socket->state == BPF_TCP_LISTEN && is_at_one_address(socket))
		bpf_sk_assign(skb, socket, 0);
	bpf_sk_release(socket);
}

/* At which address a listener for it is that the kernel does not find by the packet's own; NULL: none is known. */
static __always_inline const struct address_key *listener_address(const struct packet *packet)
{
	struct listener_key key = {};

	if (!is_to_host(packet))
		return NULL;
	key.port = packet->key.destination_port;
	key.family = packet->is_v4 ? AF_INET : AF_INET6;
	return bpf_map_lookup_elem(&listeners, &key);
}
