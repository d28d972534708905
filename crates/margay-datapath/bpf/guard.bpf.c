// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
/* The guard (decision 0040): the host's own TCP resets no direct flow. Whatever way a segment of a flow takes past
 * the flow cache (an interface without its program, maps of another layout, fragments that the host puts together),
 * the TCP finds no socket for it, and all that it could do is to answer with a reset: that one is dropped where it
 * would leave. The guard knows nothing of flows: only their ports, and which hosts have some, in a map whose layout
 * does not change. It stays from `up` to `down`, whatever becomes of the agent and of the other programs.
 */
#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define NF_DROP 0
#define NF_ACCEPT 1

/* Set before the programs are loaded. */
const volatile __u16 flow_port_first = 0;
const volatile __u16 flow_port_last = 0;
/* The host's virtual addresses: what leaves them is a program's own, and no segment on the wire. */
const volatile __u32 host_v4 = 0;
const volatile __u32 host_v6[4] = {};

/* What the kernel calls a netfilter program with. */
struct nf_hook_state;
struct sk_buff;
struct bpf_nf_ctx {
	const struct nf_hook_state *state;
	struct sk_buff *skb;
};

extern int bpf_dynptr_from_skb(struct __sk_buff *skb, __u64 flags, struct bpf_dynptr *dynptr) __ksym;
extern void *bpf_dynptr_slice(const struct bpf_dynptr *dynptr, __u32 offset, void *buffer, __u32 len) __ksym;

/* Addresses of hosts that have, or had until lately, direct flows with this one. IPv4 addresses are v4-mapped. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, __u32[4]);
	__type(value, __u32);
} guard_peers SEC(".maps");

/* Element 0: resets that were dropped. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} guard_count SEC(".maps");

struct addresses {
	__u32 source[4];
	__u32 destination[4];
};

/* Where the TCP header begins, and whose the packet is; 0 for what is no TCP. */
static __always_inline __u32 tcp_offset(const struct bpf_dynptr *packet, struct addresses *found)
{
	__u8 buffer[sizeof(struct ipv6hdr)];
	const struct ipv6hdr *v6;
	const struct iphdr *v4;

	v4 = bpf_dynptr_slice(packet, 0, buffer, sizeof(*v4));
	if (!v4)
		return 0;
	if (v4->version == 4) {
		if (v4->protocol != IPPROTO_TCP)
			return 0;
		found->source[2] = found->destination[2] = bpf_htonl(0xffff);
		found->source[3] = v4->saddr;
		found->destination[3] = v4->daddr;
		/* The answer to a packet with options has some. */
		return v4->ihl * 4;
	}
	v6 = bpf_dynptr_slice(packet, 0, buffer, sizeof(*v6));
	if (!v6 || v6->version != 6 || v6->nexthdr != IPPROTO_TCP)
		return 0;
	__builtin_memcpy(found->source, &v6->saddr, sizeof(found->source));
	__builtin_memcpy(found->destination, &v6->daddr, sizeof(found->destination));
	return sizeof(*v6);
}

static __always_inline bool is_virtual(const __u32 address[4])
{
	if (!address[0] && !address[1])
		return address[3] == host_v4;
	return address[0] == host_v6[0] && address[1] == host_v6[1] && address[2] == host_v6[2] && address[3] == host_v6[3];
}

static __always_inline bool is_flow_port(__be16 port)
{
	return bpf_ntohs(port) >= flow_port_first && bpf_ntohs(port) <= flow_port_last;
}

static __always_inline void count_dropped(void)
{
	__u32 zero = 0;
	__u64 *value = bpf_map_lookup_elem(&guard_count, &zero);

	if (value)
		*value += 1;
}

/* A reset without an acknowledgement answers a segment that acknowledges something and belongs to no connection (RFC
 * 9293 §3.10.7.1): every segment of an open flow does. One with an acknowledgement refuses a plain connection, or
 * ends one that the host has.
 */
SEC("netfilter")
int guard(struct bpf_nf_ctx *ctx)
{
	struct addresses found = {};
	const struct tcphdr *tcp;
	struct bpf_dynptr packet;
	struct tcphdr buffer;
	__u32 offset;

	if (bpf_dynptr_from_skb((struct __sk_buff *)ctx->skb, 0, &packet))
		return NF_ACCEPT;
	offset = tcp_offset(&packet, &found);
	if (!offset)
		return NF_ACCEPT;
	tcp = bpf_dynptr_slice(&packet, offset, &buffer, sizeof(buffer));
	if (!tcp || !tcp->rst || tcp->ack)
		return NF_ACCEPT;
	if (!is_flow_port(tcp->source) || is_virtual(found.source))
		return NF_ACCEPT;
	/* A host that moves sends direct segments from its new address before this host has heard of the move, and takes
	 * a reset from here for its peer's. They go from one flow port to another.
	 */
	if (!is_flow_port(tcp->dest) && !bpf_map_lookup_elem(&guard_peers, found.destination))
		return NF_ACCEPT;
	count_dropped();
	return NF_DROP;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
