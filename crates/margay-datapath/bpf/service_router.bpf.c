// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
/*
 * The service router (DESIGN §6, §8; Serval §4.2): resolvable packets that only need to be forwarded are, where they
 * arrive, as the core does it (`forward.rs`, `table.rs`). Whatever it cannot decide goes up unchanged, and the agent
 * does (docs/decisions/0022).
 */
#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

/* Words of a packet, whatever its structures call them. */
typedef __u64 __attribute__((__may_alias__)) word64;
typedef __u32 __attribute__((__may_alias__)) word32;

#include "router_maps.h"
#include "router_cells.h"
#include "hop_hash.h"
#include "resolvable.h"
#include "vlan.h"

/* Headers older than tcx (6.6) lack them. */
#define TCX_NEXT -1
#define TCX_DROP 2

#define IP_FRAGMENT_MASK 0x3fff
/* Of datagrams that leave this host by themselves. */
#define TTL 64
#define IPV6_MTU_MIN 1280
/* How often a next hop's packet takes the way through the kernel, which looks after its neighbours when they are used.
 */
#define CHECK_NS 5000000000ULL

/* Names the types that the agent shares, so that they are in the object's type information. */
struct shared_router_layout {
	struct cell cell;
	struct chunk chunk;
	struct cell_order order;
	struct bucket_list buckets;
	struct usage usage;
	struct seat seat;
	struct hop hop;
	struct neighbour_key neighbour;
	struct hop_key hop_key;
	struct own_address own;
};
const volatile struct shared_router_layout shared_router_layout = {};

/* A datagram for the agent. */
struct datagram {
	__u32 source[4]; /* v4-mapped where it is IPv4, as is the next */
	__u32 destination[4];
	__u32 ip_len;
	__u32 sal_len;
	__u16 source_port;
};

#define SAL_OFFSET(is_v4) \
	(sizeof(struct ethhdr) + ((is_v4) ? sizeof(struct iphdr) : sizeof(struct ipv6hdr)) + sizeof(struct udphdr))

/* An address. */
static __always_inline void write_words(__u32 *to, const word32 *from)
{
	to[0] = from[0];
	to[1] = from[1];
	to[2] = from[2];
	to[3] = from[3];
}

#include "router_parse.h"
#include "router_checksum.h"

static __always_inline void note_use(struct usage *usage, __u64 now)
{
	__sync_fetch_and_add(&usage->packets, 1);
	usage->last_ns = now;
}

/* Where the packet goes; and the usage of the rule that says so, or none. */
static __always_inline struct usage *find_hop(const struct resolvable *sal, __u32 *hop)
{
	const word64 *service = (const word64 *)sal->service;
	struct name name = { .id = { service[0], service[1], service[2], service[3] } };
	__u32 number, zero = 0;
	struct bucket_list *list;
	struct cell *cell;
	struct seat *seat;
	void *lists;
	__u64 place, route;

	place = find_place(&name);
	if (place == PLACE_CROWDED) {
		count(ROUTER_LEFT_CROWDED);
		return NULL;
	}
	cell = cell_of(place);
	if (!cell)
		goto to_agent;
	route = *(volatile __u64 *)&cell->route;
	number = ROUTE_NUMBER(route);
	if (ROUTE_KIND(route) == ROUTE_HOP) {
		*hop = number;
		return &cell->usage;
	}
	if (ROUTE_KIND(route) != ROUTE_BUCKETS)
		goto to_agent;
	lists = bpf_map_lookup_elem(&bucket_lists, &number);
	if (!lists)
		goto to_agent;
	list = bpf_map_lookup_elem(lists, &zero);
	if (!list)
		goto to_agent;
	number = list->seats[bucket_of(sal) & (ROUTER_BUCKETS - 1)];
	seat = bpf_map_lookup_elem(&seats, &number);
	if (!seat)
		goto to_agent;
	*hop = seat->hop;
	return &seat->usage;
to_agent:
	count(ROUTER_LEFT_NO_ROUTE);
	return NULL;
}

/* Whether a router that this host shares a key with has tagged the packet: then it says who asks. */
static __always_inline bool is_hop_tagged(const struct resolvable *sal, const struct datagram *datagram)
{
	struct neighbour_key neighbour = { .port = datagram->source_port };
	struct hop_key *key;
	__u64 tag;

	__builtin_memcpy(neighbour.address, datagram->source, 16);
	key = bpf_map_lookup_elem(&neighbours, &neighbour);
	if (!key)
		return false;
	tag = bpf_cpu_to_be64(hop_hash(key->words[0], key->words[1], sal));
	return tag == *(const word64 *)sal->hop_tag;
}

static __always_inline void clear_address(__u32 *to)
{
	to[0] = to[1] = to[2] = to[3] = 0;
}

static __always_inline bool is_unspecified(const __u32 *address)
{
	return !(address[0] | address[1] | address[3]) && (!address[2] || address[2] == bpf_htonl(0xffff));
}

/* One hop less, and who asks: known from the packet itself, or from the router before. */
static __always_inline void rewrite(struct resolvable *sal, const struct datagram *datagram, bool passed_a_router)
{
	sal->hop_limit--;
	sal->reserved = 0;
	if (!passed_a_router) {
		sal->present = REPLY_TO_PRESENT | VIA_PRESENT;
		sal->reply_port = datagram->source_port;
		write_words(sal->reply_to, datagram->source);
		/* "Whoever sent this": the next hop sees which of this host's addresses that is. */
		sal->via_port = bpf_htons(SAL_PORT);
		clear_address(sal->via);
		sal->via[2] = bpf_htonl(0xffff);
		return;
	}
	sal->present &= REPLY_TO_PRESENT | VIA_PRESENT;
	if (!(sal->present & REPLY_TO_PRESENT)) {
		sal->reply_port = 0;
		clear_address(sal->reply_to);
	}
	if (is_unspecified(sal->via)) {
		sal->via_port = datagram->source_port;
		write_words(sal->via, datagram->source);
	}
}

/* What becomes of a packet. */
enum verdict {
	LEAVE, /* to the agent, as it came */
	DISCARD,
	SEND,
};

static __always_inline enum verdict leave(__u32 why)
{
	count(why);
	return LEAVE;
}

/* Whether the agent must say if a packet may take this hop: what has passed a router does not go on to one above or
 * beside this one unless it comes from below, and nothing goes back to a router (`way.rs`).
 */
static __always_inline bool may_be_barred(const struct resolvable *sal, const struct datagram *datagram, const struct hop_version *to)
{
	const word32 *remote = (const word32 *)to->remote;

	if (!(sal->present & VIA_PRESENT))
		return false;
	return to->flags & HOP_OUTER ||
	       (datagram->source_port == to->remote_port && datagram->source[0] == remote[0] && datagram->source[1] == remote[1] &&
		datagram->source[2] == remote[2] && datagram->source[3] == remote[3]);
}

/* Whether the packet can be sent on to this hop from here. */
static __always_inline bool is_ready(struct hop *hop, const struct hop_version *to, const struct datagram *datagram, bool is_v4,
				     __u64 now)
{
	if (!(to->flags & HOP_READY) || !(to->flags & HOP_V4) != !is_v4) {
		count(ROUTER_LEFT_NO_WAY);
		return false;
	}
	/* IPv6 is cut by nobody on its way. What every link takes needs no word of those further on. */
	if (datagram->ip_len > to->mtu || (!is_v4 && datagram->ip_len > IPV6_MTU_MIN)) {
		count(ROUTER_LEFT_TOO_LARGE);
		return false;
	}
	/* `now` goes by ticks, and may be a little behind. */
	if ((__s64)(now - hop->checked_ns) > (__s64)CHECK_NS) {
		hop->checked_ns = now;
		count(ROUTER_LEFT_CHECK);
		return false;
	}
	return true;
}

/* `in_buffer`: the packet has a buffer, where whoever sends it may still have to complete the checksum. */
static __always_inline enum verdict forward(void *data, void *end, const struct datagram *datagram, bool is_v4, bool in_buffer,
					    __u32 *ifindex)
{
	struct resolvable *sal = data + SAL_OFFSET(is_v4);
	const struct hop_version *to;
	enum checksum checksum;
	bool passed_a_router;
	struct usage *usage;
	struct hop *hop;
	__u32 number = 0;
	__u64 sum, now;

	if ((void *)(sal + 1) > end || !is_plain_syn(sal, datagram->sal_len))
		return leave(ROUTER_LEFT_SHAPE);
	usage = find_hop(sal, &number);
	if (!usage)
		return LEAVE;
	now = bpf_ktime_get_coarse_ns();
	if (number == HOP_NONE) {
		note_use(usage, now);
		count(ROUTER_DROP_SERVICE);
		return DISCARD;
	}
	hop = bpf_map_lookup_elem(&hops, &number);
	if (!hop)
		return leave(ROUTER_LEFT_NO_WAY);
	to = &hop->versions[hop->active & 1];
	if (may_be_barred(sal, datagram, to))
		return leave(ROUTER_LEFT_NO_ROUTE);
	if (!is_ready(hop, to, datagram, is_v4, now))
		return LEAVE;
	checksum = checksum_of(data, end, datagram, is_v4, in_buffer);
	if (checksum == CHECKSUM_UNKNOWN)
		return leave(ROUTER_LEFT_CHECKSUM);
	note_use(usage, now);
	if (sal->hop_limit <= 1) {
		count(ROUTER_DROP_HOP_LIMIT);
		return DISCARD;
	}
	passed_a_router = false;
	if (sal->present & VIA_PRESENT) {
		passed_a_router = is_hop_tagged(sal, datagram);
		if (!passed_a_router)
			count(ROUTER_BAD_HOP_TAG);
	}
	sum = sum_of_changed(sal);
	rewrite(sal, datagram, passed_a_router);
	*(word64 *)sal->hop_tag = to->flags & HOP_KEYED ? bpf_cpu_to_be64(hop_hash(to->key[0], to->key[1], sal)) : 0;
	if (!readdress(data, end, datagram, is_v4, to, checksum, difference(sum, sum_of_changed(sal))))
		return leave(ROUTER_LEFT_SHAPE);
	*ifindex = to->ifindex;
	return SEND;
}

static __always_inline enum verdict route_family(void *data, void *end, bool is_v4, bool in_buffer, __u32 *ifindex)
{
	struct datagram datagram = {};

	switch (is_v4 ? parse_v4(data, end, &datagram) : parse_v6(data, end, &datagram)) {
	case NOT_OURS:
		return LEAVE;
	case NOT_PLAIN:
		return leave(ROUTER_LEFT_SHAPE);
	default:
		return forward(data, end, &datagram, is_v4, in_buffer, ifindex);
	}
}

static __always_inline enum verdict route_packet(void *data, void *end, bool in_buffer, __u32 *ifindex)
{
	struct ethhdr *ethernet = data;

	if ((void *)(ethernet + 1) > end)
		return LEAVE;
	if (ethernet->h_proto == bpf_htons(ETH_P_IP))
		return route_family(data, end, true, in_buffer, ifindex);
	if (ethernet->h_proto == bpf_htons(ETH_P_IPV6))
		return route_family(data, end, false, in_buffer, ifindex);
	return LEAVE;
}

/* In a card's driver. */
SEC("xdp.frags")
int route_frame(struct xdp_md *ctx)
{
	__u32 ifindex = 0;
	long verdict;

	switch (route_packet((void *)(long)ctx->data, (void *)(long)ctx->data_end, false, &ifindex)) {
	case LEAVE:
		return XDP_PASS;
	case DISCARD:
		return XDP_DROP;
	default:
		break;
	}
	if (ifindex == ctx->ingress_ifindex) {
		count(ROUTER_FORWARDED);
		return XDP_TX;
	}
	verdict = bpf_redirect_map(&devices, ifindex, XDP_DROP);
	count(verdict == XDP_REDIRECT ? ROUTER_FORWARDED : ROUTER_DROP_NO_DEVICE);
	return verdict;
}

/* On interfaces whose driver runs no programs, or runs them on copies: packets that may be for the agent's port go to
 * `route_buffer`. Before that would write into a buffer that a TCP has its own copy of, the kernel makes one, so it is
 * run for no others.
 */
SEC("tcx/ingress")
int find_buffer(struct __sk_buff *skb)
{
	void *data, *end;
	struct udphdr *udp;

	if (is_of_sub_interface(skb))
		return TCX_NEXT;
	data = (void *)(long)skb->data;
	end = (void *)(long)skb->data_end;
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = data + sizeof(struct ethhdr);

		udp = (void *)(ip + 1);
		if ((void *)(udp + 1) > end || ip->protocol != IPPROTO_UDP)
			return TCX_NEXT;
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip = data + sizeof(struct ethhdr);

		udp = (void *)(ip + 1);
		if ((void *)(udp + 1) > end || ip->nexthdr != IPPROTO_UDP)
			return TCX_NEXT;
	} else {
		return TCX_NEXT;
	}
	if (udp->dest == sal_port && !skb->gso_size)
		bpf_tail_call(skb, &programs, 0);
	return TCX_NEXT;
}

SEC("tcx/ingress")
int route_buffer(struct __sk_buff *skb)
{
	__u32 ifindex = 0;

	if (bpf_skb_pull_data(skb, skb->len))
		return TCX_NEXT;
	switch (route_packet((void *)(long)skb->data, (void *)(long)skb->data_end, true, &ifindex)) {
	case LEAVE:
		return TCX_NEXT;
	case DISCARD:
		return TCX_DROP;
	default:
		count(ROUTER_FORWARDED);
		return bpf_redirect(ifindex, 0);
	}
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
