// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
/*
 * First packets out of nothing, for the measurement of the service router and of what it is compared with: the kernel
 * runs `generate` on frames as if they had just arrived (BPF_PROG_TEST_RUN with live frames), each with a name of its
 * own.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#define FRAME_WORDS 25
/* In a frame of Ethernet, IPv4 and UDP without options. */
#define SERVICE_OFFSET (42 + 60)
#define NONCE_OFFSET (42 + 92)

typedef __u64 __attribute__((__may_alias__)) word64;

/* The beginning of every frame. */
__u64 head[FRAME_WORDS] = {};
/* How many names there are. */
__u32 names = 1;
__u32 egress_ifindex = 0;
__u64 sequence = 0;

/* Element 0: who gets the frames; without one, the kernel does. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} next SEC(".maps");

static __always_inline __u64 mix(__u64 number)
{
	number = (number ^ number >> 31) * 0xbf58476d1ce4e5b9ULL;
	number = (number ^ number >> 31) * 0x94d049bb133111ebULL;
	return number ^ number >> 29;
}

SEC("xdp.frags")
int generate(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	word64 *words = data;
	__u64 drawn, name;

	if (data + FRAME_WORDS * 8 > end)
		return XDP_ABORTED;
	_Pragma("unroll") for (int at = 0; at < FRAME_WORDS; at++) words[at] = head[at];
	drawn = mix(++sequence * 0x9e3779b97f4a7c15ULL);
	name = (drawn >> 32) * names >> 32;
	*(word64 *)(data + SERVICE_OFFSET) = mix(2 * name + 1);
	*(word64 *)(data + SERVICE_OFFSET + 8) = mix(2 * name + 2);
	*(word64 *)(data + NONCE_OFFSET) = drawn;
	bpf_tail_call(ctx, &next, 0);
	return XDP_PASS;
}

/* What sending a frame on costs by itself. */
SEC("xdp.frags")
int send_on(struct xdp_md *ctx)
{
	return bpf_redirect(egress_ifindex, 0);
}

SEC("xdp.frags")
int discard(struct xdp_md *ctx)
{
	return XDP_DROP;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
