/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
 *
 * Virtual addresses stay inside (DESIGN §18): what bears one does not come in by a card, and does not leave by one.
 * Linux delivers packets for any of a host's addresses whatever interface brings them, so without this whoever is on a
 * link could send to services as if the agent had let it, add to flows, and ask the DNS responder.
 *
 * Addresses of the IP header alone decide: a fragment has no ports, and IPv6 may have extension headers before them.
 *
 * What comes from the host's own virtual address is for sal0, wherever routing has sent it. Where the host has
 * translated the destination of a connection (a published port of a container), it routes answers by the container's
 * address, past the rule for this one, and puts this one there afterwards.
 */
#pragma once

#include "layout.h"
#include "maps.h"

/* What virtual addresses begin with: IPv4's under a mask, and the first 32 bits of IPv6's. Network byte order; set
 * before the programs are loaded.
 */
const volatile __u32 virtual_v4 = 0;
const volatile __u32 virtual_v4_mask = 0xffffffff;
const volatile __u32 virtual_v6 = 0;

/* Whether boxes of this host change addresses, so that SYNs inside bear a tag: none leaves by a card (docs/decisions/
 * 0077). Set before the programs are loaded.
 */
const volatile __u32 drops_tags = 0;

/* The TCP option of a tag: one of experiments (RFC 6994). */
#define TAG_KIND 253
#define TAG_LEN 8
#define TAG_EXPERIMENT 0x4d47
#define TCP_OPTION_END 0
#define TCP_OPTION_NOP 1
#define TCP_OPTIONS_MAX 40

/* skb->tc_index of a packet that has been rewritten in place: the interfaces above the card (a bridge's, a bond's) meet
 * it again, with virtual addresses. Nothing else reads the field. It is taken off where a packet leaves this host.
 */
#define REWRITTEN_INDEX 0x4d47

/* Who may send to virtual addresses, and where answers may go: by interface, the prefixes that are inside. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 4096);
	__type(key, struct inside_key);
	__type(value, __u32);
} insides SEC(".maps");

/* IPv4 addresses are v4-mapped. */
struct ip_addresses {
	__u32 source[4];
	__u32 destination[4];
	bool is_from_virtual;
	bool is_to_virtual;
};

/* False where the host's IP would not read them, either. */
static __always_inline bool read_addresses(struct __sk_buff *skb, struct ip_addresses *ip)
{
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		__u32 both[2];

		if (bpf_skb_load_bytes_relative(skb, __builtin_offsetof(struct iphdr, saddr), both, sizeof(both), BPF_HDR_START_NET))
			return false;
		ip->source[2] = ip->destination[2] = bpf_htonl(0xffff);
		ip->source[3] = both[0];
		ip->destination[3] = both[1];
		ip->is_from_virtual = (both[0] & virtual_v4_mask) == virtual_v4;
		ip->is_to_virtual = (both[1] & virtual_v4_mask) == virtual_v4;
		return true;
	}
	if (skb->protocol != bpf_htons(ETH_P_IPV6))
		return false;
	if (bpf_skb_load_bytes_relative(skb, __builtin_offsetof(struct ipv6hdr, saddr), ip->source, 32, BPF_HDR_START_NET))
		return false;
	ip->is_from_virtual = ip->source[0] == virtual_v6;
	ip->is_to_virtual = ip->destination[0] == virtual_v6;
	return true;
}

static __always_inline bool is_inside(__u32 ifindex, const __u32 *address)
{
	struct inside_key key = { .prefix_len = INSIDE_BITS, .ifindex = ifindex };

	__builtin_memcpy(key.address, address, 16);
	return bpf_map_lookup_elem(&insides, &key) != NULL;
}

/* Whether this is the host's own virtual address. */
static __always_inline bool is_own(const __u32 *address)
{
	if (!address[0] && !address[1] && address[2] == bpf_htonl(0xffff))
		return address[3] == host_v4;
	return address[0] == host_v6[0] && address[1] == host_v6[1] && address[2] == host_v6[2] && address[3] == host_v6[3];
}

/* Reads from the IP header on. False where the packet is shorter. */
static __always_inline bool read_from_ip(struct __sk_buff *skb, __u32 at, void *into, __u32 len)
{
	return !bpf_skb_load_bytes_relative(skb, at, into, len, BPF_HDR_START_NET);
}

/* Where TCP begins, from the IP header on; 0 for what is no TCP, or no first fragment. */
static __always_inline __u32 tcp_at(struct __sk_buff *skb)
{
	struct ipv6hdr v6;
	struct iphdr v4;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if (!read_from_ip(skb, 0, &v4, sizeof(v4)) || v4.protocol != IPPROTO_TCP)
			return 0;
		return bpf_ntohs(v4.frag_off) & 0x1fff ? 0 : v4.ihl * 4;
	}
	if (skb->protocol != bpf_htons(ETH_P_IPV6))
		return 0;
	return read_from_ip(skb, 0, &v6, sizeof(v6)) && v6.nexthdr == IPPROTO_TCP ? sizeof(v6) : 0;
}

/* Whether a packet is a SYN with a tag. */
static __noinline bool is_tagged(struct __sk_buff *skb)
{
	__u32 at = tcp_at(skb);
	struct tcphdr tcp;
	__u16 experiment;
	__u8 option[2];
	__u32 end, i;

	if (!at || !read_from_ip(skb, at, &tcp, sizeof(tcp)) || !tcp.syn)
		return false;
	end = at + tcp.doff * 4;
	at += sizeof(tcp);
	for (i = 0; i < TCP_OPTIONS_MAX && at < end; i++) {
		if (!read_from_ip(skb, at, option, 1) || option[0] == TCP_OPTION_END)
			return false;
		if (option[0] == TCP_OPTION_NOP) {
			at++;
			continue;
		}
		if (!read_from_ip(skb, at, option, 2) || option[1] < 2)
			return false;
		if (option[0] == TAG_KIND && option[1] == TAG_LEN && read_from_ip(skb, at + 2, &experiment, 2) &&
		    experiment == bpf_htons(TAG_EXPERIMENT))
			return true;
		at += option[1];
	}
	return false;
}

/* Whether a packet that has come must not come in. Not inlined: the verifier loses sight of a caller's stack
 * otherwise.
 */
static __noinline bool is_intruding(struct __sk_buff *skb)
{
	struct ip_addresses ip = {};

	if (skb->tc_index == REWRITTEN_INDEX || !read_addresses(skb, &ip))
		return false;
	if (!ip.is_from_virtual && !(ip.is_to_virtual && !is_inside(skb->ifindex, ip.source)))
		return false;
	count(COUNT_DROP_VIRTUAL_INGRESS);
	return true;
}

/* On cards that bear no Ethernet frames. */
SEC("tcx/ingress")
int card_ingress(struct __sk_buff *skb)
{
	return is_intruding(skb) ? TCX_DROP : TCX_NEXT;
}

/* On every card: whatever the routes say, and whichever device a socket is bound to. On the way to sal0 the kernel
 * takes the card's header off.
 */
SEC("tcx/egress")
int card_egress(struct __sk_buff *skb)
{
	struct ip_addresses ip = {};

	if (skb->tc_index == REWRITTEN_INDEX)
		skb->tc_index = 0;
	if (drops_tags && is_tagged(skb)) {
		count(COUNT_DROP_VIRTUAL_EGRESS);
		return TCX_DROP;
	}
	if (!read_addresses(skb, &ip))
		return TCX_NEXT;
	if (!ip.is_to_virtual && !(ip.is_from_virtual && !is_inside(skb->ifindex, ip.destination)))
		return TCX_NEXT;
	if (!ip.is_to_virtual && is_own(ip.source))
		return bpf_redirect(sal0_ifindex, 0);
	count(COUNT_DROP_VIRTUAL_EGRESS);
	return TCX_DROP;
}
