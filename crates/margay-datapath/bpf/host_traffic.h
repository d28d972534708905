/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
#pragma once

/* Whose a packet is that comes to a flow port and that no entry knows: the host's, or the agent's
 * (docs/decisions/0039). All of it is called, none of it inlined: packets of established flows pass by.
 */

/* Set before the programs are loaded. */
const volatile __u16 flow_port_first = 0;
const volatile __u16 flow_port_last = 0;

/* In network byte order. */
static __always_inline bool is_flow_port(__u16 port)
{
	return bpf_ntohs(port) >= flow_port_first && bpf_ntohs(port) <= flow_port_last;
}

/* What of such packets goes to the agent, by source: a second's worth, and how many may come at once. It is more than
 * a window of every flow that has just been lifted, and far less than the agent can read.
 */
#define UNKNOWN_PER_S 8192
#define UNKNOWN_BURST 512
/* From all sources together: a source can be made up. */
#define UNKNOWN_ALL_PER_S 32768
#define UNKNOWN_ALL_BURST 1024
#define UNKNOWN_SOURCES 4096

#define SECOND_NS 1000000000ULL

/* Addresses of hosts that this one has an association with, and until when. Pairs of addresses lead to paths that
 * flows go by; what is late, or early, comes from other addresses of the same hosts.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, struct address_key);
	__type(value, __u64);
} peers SEC(".maps");

/* Element 0: 1 once `peers` has all of them. Before, everybody may be one. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} peers_known SEC(".maps");

/* By source (IPv6: its /64), when the next unknown packet would come if all came evenly. The one that is not heard of
 * for longest gives way.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, UNKNOWN_SOURCES);
	__type(key, struct address_key);
	__type(value, __u64);
} unknown_by_source SEC(".maps");

/* Element 0: the same of all sources. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} unknown_of_all SEC(".maps");

/* Whether a packet to this host comes from one that it has an association with. All else is on its way through this
 * host, or a stranger's.
 */
static __noinline bool is_from_peer(const struct packet *packet)
{
	struct address_key address = {};
	__u64 *until_ns;
	__u32 *is_known;
	__u32 zero = 0;

	__builtin_memcpy(address.address, packet->key.destination, sizeof(address.address));
	if (!bpf_map_lookup_elem(&locals, &address))
		return false;
	__builtin_memcpy(address.address, packet->key.source, sizeof(address.address));
	until_ns = bpf_map_lookup_elem(&peers, &address);
	if (until_ns)
		return bpf_ktime_get_coarse_ns() < *until_ns;
	is_known = bpf_map_lookup_elem(&peers_known, &zero);
	return !is_known || !*is_known;
}

static __always_inline __u32 socket_tuple(const struct packet *packet, struct bpf_sock_tuple *tuple)
{
	if (packet->is_v4) {
		tuple->ipv4.saddr = words(packet->key.source)[3];
		tuple->ipv4.daddr = words(packet->key.destination)[3];
		tuple->ipv4.sport = packet->key.source_port;
		tuple->ipv4.dport = packet->key.destination_port;
		return sizeof(tuple->ipv4);
	}
	__builtin_memcpy(tuple->ipv6.saddr, packet->key.source, 16);
	__builtin_memcpy(tuple->ipv6.daddr, packet->key.destination, 16);
	tuple->ipv6.sport = packet->key.source_port;
	tuple->ipv6.dport = packet->key.destination_port;
	return sizeof(tuple->ipv6);
}

/* Whether it completes a handshake that the listener has kept nothing of but in its own answer (SYN cookies, RFC 4987
 * §3.6).
 */
static __noinline bool bears_cookie(struct __sk_buff *skb, const struct packet *packet, struct bpf_sock *listener)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	/* The verifier has forgotten how small the offsets are. */
	void *ip = data + (packet->ip_offset & 0xff);
	struct tcphdr *tcp = data + (packet->transport_offset & 0xff);

	if ((void *)(tcp + 1) > end)
		return false;
	if (packet->is_v4)
		return ip + sizeof(struct iphdr) <= end &&
		       !bpf_tcp_check_syncookie(listener, ip, sizeof(struct iphdr), tcp, sizeof(*tcp));
	return ip + sizeof(struct ipv6hdr) <= end &&
	       !bpf_tcp_check_syncookie(listener, ip, sizeof(struct ipv6hdr), tcp, sizeof(*tcp));
}

/* Whether a packet of a peer is the host's. No flow of TCP begins with a SYN but by a grant, from a flow port; what a
 * grant that is over is to be taken for, the agent knows. Of all else a listener gets only what completes a handshake
 * with itself: it would reset what is a flow's. No flow of datagrams begins with one that has payload, so that what
 * comes to a port that a socket has is for that socket.
 */
static __noinline bool is_of_host(struct __sk_buff *skb, const struct packet *packet)
{
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *socket;
	bool is_its = true;
	__u32 len;

	if (is_request(packet) && !is_flow_port(packet->key.source_port))
		return true;
	len = socket_tuple(packet, &tuple);
	if (packet->key.protocol == IPPROTO_UDP) {
		socket = bpf_sk_lookup_udp(skb, &tuple, len, BPF_F_CURRENT_NETNS, 0);
		if (!socket)
			return false;
	} else {
		/* Finds handshakes that are not complete, and connections that have just ended, too. */
		socket = bpf_skc_lookup_tcp(skb, &tuple, len, BPF_F_CURRENT_NETNS, 0);
		if (!socket)
			return false;
		is_its = is_request(packet) || socket->state != BPF_TCP_LISTEN ||
			 bears_cookie(skb, packet, socket);
	}
	bpf_sk_release(socket);
	return is_its;
}

/* Whether one more may pass of what comes at `per_s` evenly, and of which `burst` may come at once. Where two
 * processors ask at once, one of them is told no: that happens where very many come.
 */
static __always_inline bool is_within_rate(__u64 *next_ns, __u64 now, __u32 per_s, __u32 burst)
{
	__u64 step = SECOND_NS / per_s, before = *next_ns, next = before;

	if ((__s64)(now - burst * step - next) > 0)
		next = now - burst * step;
	next += step;
	return (__s64)(next - now) <= 0 && __sync_val_compare_and_swap(next_ns, before, next) == before;
}

/* Whether the agent may have one more packet from its source that no entry knows. */
static __noinline bool is_heard(const struct packet *packet)
{
	__u64 now = bpf_ktime_get_coarse_ns(), first = now - UNKNOWN_BURST * (SECOND_NS / UNKNOWN_PER_S);
	struct address_key source = {};
	__u64 *next_ns;
	__u32 zero = 0;

	__builtin_memcpy(source.address, packet->key.source, sizeof(source.address));
	/* Who has a /64 has all its addresses. */
	if (!packet->is_v4)
		words(source.address)[2] = words(source.address)[3] = 0;
	next_ns = bpf_map_lookup_elem(&unknown_by_source, &source);
	if (!next_ns) {
		/* Refused where another processor was first. */
		bpf_map_update_elem(&unknown_by_source, &source, &first, BPF_NOEXIST);
		next_ns = bpf_map_lookup_elem(&unknown_by_source, &source);
	}
	if (!next_ns || !is_within_rate(next_ns, now, UNKNOWN_PER_S, UNKNOWN_BURST))
		return false;
	next_ns = bpf_map_lookup_elem(&unknown_of_all, &zero);
	return next_ns && is_within_rate(next_ns, now, UNKNOWN_ALL_PER_S, UNKNOWN_ALL_BURST);
}
