/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
 *
 * A resolvable packet as the wire has it (docs/book/wire.md): where its parts lie, and which of them a router decides
 * by itself.
 */
#pragma once

#define SAL_PORT 54324
#define SAL_VERSION 1
#define SAL_SYN 1
#define SAL_RESOLVABLE 0x01
#define SAL_FULL 0x02
#define EXTENSION_SESSION 2
#define SESSION_LEN 40

#define REPLY_TO_PRESENT 1
#define VIA_PRESENT 2

/* No SYN is shorter: two that the kernel has put together are longer than twice that. */
#define SYN_LEN 1200

struct resolvable {
	/* base header */
	__u8 version;
	__u8 kind;
	__u8 flags;
	__u8 next_protocol;
	__u16 header_len;
	__u16 payload_len;
	__u32 dst_flow;
	__u32 src_flow;
	__u32 control_seq;
	/* resolvable part; what a router may change comes first */
	__u8 hop_limit;
	__u8 present;
	__u16 reply_port;
	__u32 reply_to[4];
	__u16 via_port;
	__u16 reserved;
	__u32 via[4];
	__u32 service[8];
	__u32 nonce[2];
	__u32 hop_tag[2];
	/* the first extension */
	__u8 extension;
	__u8 extension_zero;
	__u16 extension_len;
	__u8 session[16];
	__u8 client[16];
	__u16 client_port;
	__u16 service_port;
	__u8 protocol;
	__u8 session_zero[3];
};

#define CHANGED_OFFSET 20
#define CHANGED_LEN 40

_Static_assert(__builtin_offsetof(struct resolvable, hop_limit) == CHANGED_OFFSET, "what a router may change");
_Static_assert(__builtin_offsetof(struct resolvable, service) == CHANGED_OFFSET + CHANGED_LEN, "follows in one piece");
_Static_assert(__builtin_offsetof(struct resolvable, hop_tag) == HOP_TAGGED_LEN, "the tag follows what it covers");

/* Whether it is one that a rule alone decides: a SYN of a program, without a flow that it is related to. Its other
 * extensions are for whoever answers.
 */
static __always_inline bool is_plain_syn(const struct resolvable *sal, __u32 len)
{
	__u32 header_len = bpf_ntohs(sal->header_len);

	if (sal->version != SAL_VERSION || sal->kind != SAL_SYN)
		return false;
	if ((sal->flags | SAL_FULL) != (SAL_RESOLVABLE | SAL_FULL) || sal->dst_flow)
		return false;
	if (header_len < sizeof(*sal) || header_len & 3 || header_len + bpf_ntohs(sal->payload_len) > len)
		return false;
	if (sal->extension != EXTENSION_SESSION || sal->extension_len != bpf_htons(SESSION_LEN))
		return false;
	return sal->protocol == IPPROTO_TCP || sal->protocol == IPPROTO_UDP;
}

/* By what an instance is picked: `bucket` of the core's service table. */
static __always_inline __u32 bucket_of(const struct resolvable *sal)
{
	__u64 flow = bpf_ntohl(sal->src_flow);
	__u64 mixed = (__u64)bpf_ntohl(sal->nonce[0]) << 32 | bpf_ntohl(sal->nonce[1]);

	mixed ^= flow << 32 | flow;
	mixed = (mixed ^ mixed >> 31) * 0xbf58476d1ce4e5b9ULL;
	mixed = (mixed ^ mixed >> 31) * 0x94d049bb133111ebULL;
	mixed ^= mixed >> 29;
	return mixed >> 52;
}
