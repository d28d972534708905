/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
 *
 * Flows that the kernels of two hosts open by themselves (docs/decisions/0035). All of it is called, none of it
 * inlined: packets of established flows pass by.
 */
#pragma once

#include "grant_proof.h"

/* What an entry is opened with. */
#define FLOW_OPENED (FLOW_EGRESS | FLOW_ACCEPT)

#define TCP_OPTION_MSS 2

/* The option that a TCP puts first. */
struct mss_option {
	__u8 kind;
	__u8 len;
	__u16 size;
};

/* Whether it asks for a connection. */
static __always_inline bool is_request(const struct packet *packet)
{
	return (packet->tcp_flags & (TCP_SYN | TCP_ACK)) == TCP_SYN;
}

/* Whether a TCP of this host sends it again, as far as it can be told: of what comes from another namespace nobody
 * knows.
 */
static __noinline bool is_sent_again(struct __sk_buff *skb)
{
	struct bpf_sock *socket = skb->sk ? bpf_sk_fullsock(skb->sk) : NULL;
	struct bpf_tcp_sock *tcp = socket ? bpf_tcp_sock(socket) : NULL;

	return tcp && tcp->total_retrans;
}

/* A SYN has a number of its own: what follows it is said to have been reached. */
static __always_inline void count_syn(struct packet *packet)
{
	packet->sequence += packet->tcp_flags & TCP_SYN ? 1 : 0;
}

/* Lowers the MSS of a SYN to what the path takes, as the agent does to those that it holds: of larger segments none
 * would go direct.
 */
static __noinline void hold_mss(struct __sk_buff *skb, const struct packet *packet, const struct path_entry *path)
{
	__u32 ip_len = is_mapped((const __u32 *)path->remote) ? sizeof(struct iphdr) : sizeof(struct ipv6hdr);
	__u32 at = packet->transport_offset + sizeof(struct tcphdr);
	__u32 most = path->mtu - ip_len - sizeof(struct tcphdr);
	struct mss_option option;
	__u16 size;

	if (packet->transport_len - packet->payload_len < sizeof(struct tcphdr) + sizeof(option) ||
	    bpf_skb_load_bytes(skb, at, &option, sizeof(option)))
		return;
	if (option.kind != TCP_OPTION_MSS || option.len != sizeof(option) || bpf_ntohs(option.size) <= most)
		return;
	size = bpf_htons(most);
	/* A partial checksum does not cover it, and stays. */
	if (!bpf_l4_csum_replace(skb, packet->transport_offset + 16, option.size, size, sizeof(size)))
		bpf_skb_store_bytes(skb, at + 2, &size, sizeof(size), 0);
}

/* An entry for a flow, not in the maps yet; NULL is for the verifier alone. The agent's changes of it are of higher
 * generations.
 */
static __always_inline struct flow_entry *fresh_entry(__u32 flow, const struct app_key *app)
{
	struct flow_entry *entry;
	__u32 zero = 0;

	entry = bpf_map_lookup_elem(&scratch, &zero);
	if (!entry)
		return NULL;
	__builtin_memset(entry, 0, sizeof(*entry));
	entry->generation = 1;
	entry->flow = flow;
	entry->flags = FLOW_OPENED | FLOW_FRESH | FLOW_UNTOLD;
	/* As one assignment it would go byte by byte, and take stack that is not there. */
	_Pragma("unroll") for (__u32 at = 0; at < sizeof(*app) / sizeof(__u32); at++)
		words(&entry->app)[at] = words(app)[at];
	return entry;
}

/* Puts an entry where there is none. */
static __noinline bool add_entry(const struct wire_key *wire, const struct flow_entry *entry)
{
	if (bpf_map_update_elem(&flows, wire, entry, BPF_NOEXIST))
		return false;
	if (!bpf_map_update_elem(&apps, &entry->app, wire, BPF_NOEXIST))
		return true;
	bpf_map_delete_elem(&flows, wire);
	return false;
}

/* One more flow of a grant is opened: now and then the agent hears how many are. */
static __always_inline void tell_of_grant(__u32 grant, __u32 opened, __u32 count)
{
	__u32 step = count / GRANT_NEWS ?: 1;

	if (!(opened % step) || opened == count)
		tell_of(grant, SEEN_TAKEN | opened << 16, NULL);
}

/* Takes the next flow of a grant for a SYN that leaves the host. */
static __noinline bool take_of(struct __sk_buff *skb, const struct packet *packet, __u32 grant, __u64 now)
{
	struct wire_key wire = {};
	struct path_entry *path;
	struct flow_entry *entry;
	struct spare *spare;
	__u32 taken, flow;

	spare = bpf_map_lookup_elem(&spares, &grant);
	/* Looked at first, so that `next` does not rise for ever. */
	if (!spare || spare->next >= spare->count || (__s64)(now - spare->until_ns) >= 0)
		return false;
	wire.path = spare->path;
	path = bpf_map_lookup_elem(&paths, &wire.path);
	if (!path || path->flags & PATH_HELD || is_too_large(skb, packet, path))
		return false;
	taken = __sync_fetch_and_add(&spare->next, 1);
	if (taken >= spare->count)
		return false;
	flow = spare->first_flow + taken;
	wire.local_port = bpf_htons(spare->local_port + taken);
	wire.remote_port = bpf_htons(spare->remote_port);
	wire.protocol = packet->key.protocol;
	/* Last: whatever was read is of this grant if it still is the same. */
	asm volatile("" ::: "memory");
	if (spare->grant != grant)
		return false;
	entry = fresh_entry(flow, &packet->key);
	if (!entry || !add_entry(&wire, entry))
		return false;
	count(COUNT_TAKEN);
	tell_of_grant(grant, taken + 1, spare->count);
	hold_mss(skb, packet, path);
	return true;
}

/* The grant by which a SYN has taken a flow, or zero. */
static __noinline __u32 take(struct __sk_buff *skb, const struct packet *packet)
{
	struct offer_key to = { .port = packet->key.destination_port, .protocol = packet->key.protocol };
	__u64 now = bpf_ktime_get_ns();
	struct offer *offer;
	__u32 first;

	if (!has_room_for_proof(packet))
		return 0;
	__builtin_memcpy(to.address, packet->key.destination, sizeof(to.address));
	offer = bpf_map_lookup_elem(&offers, &to);
	/* Nobody would hear of the flow, nor carry it when it cannot go direct. */
	if (!offer || !agent_is_alive(now))
		return 0;
	/* Instances and processors take turns. */
	first = bpf_get_prandom_u32();
	for (__u32 at = 0; at < OFFER_GRANTS; at++) {
		__u32 grant = offer->grants[(first + at) % OFFER_GRANTS];

		if (grant && take_of(skb, packet, grant, now))
			return grant;
	}
	return 0;
}

/* A packet goes to the agent: of a flow that it does not know it is told before. */
static __noinline void leave_to_agent(struct flow_entry *entry)
{
	if (entry && (entry->flags & (FLOW_UNTOLD | FLOW_FRESH)) == FLOW_UNTOLD)
		tell_opened(entry, false);
}

/* Opened by a grant, and not answered yet. */
static __always_inline bool is_fresh(__u32 flags)
{
	return (flags & (FLOW_OPENED | FLOW_FRESH)) == (FLOW_OPENED | FLOW_FRESH);
}

/* Both ends have closed. What is left of the flow waits for late packets. */
static __always_inline bool is_over(const struct flow_entry *entry)
{
	return (entry->seen & SEEN_BOTH_FINS) == SEEN_BOTH_FINS;
}

/* Whether a SYN that leaves the host goes direct: by a flow that it takes of a grant, or as the answer to one that a
 * peer has opened.
 */
static __noinline bool begins_direct(struct __sk_buff *skb, struct packet *packet)
{
	struct flow_entry *entry;
	struct path_entry *path;
	struct wire_key *wire;
	__u32 path_id, flags, grant;

	wire = bpf_map_lookup_elem(&apps, &packet->key);
	entry = wire ? bpf_map_lookup_elem(&flows, wire) : NULL;
	flags = entry ? entry->flags : 0;
	if (is_request(packet)) {
		/* Who connects often comes to a port again whose connection is over: the five-tuple is the new one's.
		 */
		if (entry && is_over(entry) && !bpf_map_delete_elem(&apps, &packet->key))
			wire = NULL;
		/* One that is sent again the agent has, and goes on with it: by a grant it would be a second flow of
		 * that five-tuple.
		 */
		grant = wire || is_sent_again(skb) ? 0 : take(skb, packet);
		if (grant) {
			wire = bpf_map_lookup_elem(&apps, &packet->key);
			if (add_proof(skb, packet, wire, grant)) {
				count_syn(packet);
				return true;
			}
			/* There was no memory for it. What was taken is found as any flow whose SYN is sent again. */
			entry = wire ? bpf_map_lookup_elem(&flows, wire) : NULL;
			flags = entry ? entry->flags : 0;
		}
		/* Or it went by a grant, and had no answer. The agent sets the flow up anew; a late answer is for the
		 * agent, too.
		 */
		if (entry && is_fresh(flags))
			__sync_val_compare_and_swap(&entry->flags, flags, flags & ~FLOW_OPENED);
		leave_to_agent(entry);
		return false;
	}
	if (!entry || !is_fresh(flags)) {
		leave_to_agent(entry);
		return false;
	}
	path_id = wire->path;
	path = bpf_map_lookup_elem(&paths, &path_id);
	if (path)
		hold_mss(skb, packet, path);
	count_syn(packet);
	return true;
}

/* What becomes of a SYN from the wire. */
enum opening {
	OPENING_NONE, /* it is by no grant, or by one that has nothing for it */
	OPENING_UNPROVED, /* a flow is there for whoever holds the grant, and this one does not show that it does */
	OPENING_DONE,
};

/* Opens a flow for a SYN that comes to the host by a grant to its sender. Until it has proved itself nothing changes.
 */
static __noinline enum opening open_flow(struct __sk_buff *skb, const struct packet *packet, struct wire_key *wire)
{
	__u16 remote_port = wire->remote_port;
	struct flow_entry *entry;
	struct grant *grant;
	__u32 id, opened;
	__u64 bit;

	/* Flows of a grant begin at a multiple of what it may have. */
	wire->remote_port = bpf_htons(bpf_ntohs(remote_port) & ~(GRANT_FLOWS_MAX - 1));
	grant = bpf_map_lookup_elem(&grants, wire);
	wire->remote_port = remote_port;
	if (!grant || (__s64)(bpf_ktime_get_ns() - grant->until_ns) >= 0)
		return OPENING_NONE;
	id = grant->grant;
	opened = (__u16)(bpf_ntohs(remote_port) - grant->remote_port);
	if (opened >= grant->count || opened >= GRANT_FLOWS_MAX)
		return OPENING_NONE;
	if (!is_proved(skb, packet, grant))
		return OPENING_UNPROVED;
	bit = 1ULL << opened % 64;
	if (__sync_fetch_and_or(&grant->used[opened / 64], bit) & bit)
		return OPENING_NONE;
	entry = fresh_entry(grant->first_flow + opened, &grant->app);
	if (!entry)
		return OPENING_NONE;
	entry->app.destination_port = grant->app_ports[opened];
	/* Last: whatever was read is of this grant if it still is the same. */
	asm volatile("" ::: "memory");
	if (grant->grant != id || !add_entry(wire, entry))
		return OPENING_NONE;
	count(COUNT_OPENED);
	tell_of_grant(id, __sync_fetch_and_add(&grant->opened, 1) + 1, grant->count);
	return OPENING_DONE;
}

/* A packet of a flow that has not been answered yet goes to the application. True where the packet must come by sal0,
 * since it is the listener's: that is found for what comes there (`app_ingress`), and rules of routing count on it.
 */
static __noinline bool note_fresh(const struct packet *packet, struct flow_entry *entry)
{
	__u32 flags = entry->flags;

	if (is_request(packet))
		return true;
	if (!(packet->tcp_flags & TCP_RST))
		__sync_val_compare_and_swap(&entry->flags, flags, flags & ~FLOW_FRESH);
	return !(packet->tcp_flags & TCP_SYN);
}

/* Takes a flow of a grant out of both maps, unless the agent keeps it. One that nobody has answered is not known to it.
 */
static __noinline void forget_flow(const struct wire_key *wire, __u32 flow, bool is_known)
{
	const struct wire_key *of_app;
	struct flow_entry *entry;

	entry = bpf_map_lookup_elem(&flows, wire);
	if (!entry || entry->flow != flow || (is_known && !(entry->flags & FLOW_FRESH)))
		return;
	/* The application's side first: what it sends now is the agent's. Unless the five-tuple is another flow's by
	 * now.
	 */
	of_app = bpf_map_lookup_elem(&apps, &entry->app);
	if (of_app && of_app->path == wire->path && of_app->local_port == wire->local_port &&
	    of_app->remote_port == wire->remote_port)
		bpf_map_delete_elem(&apps, &entry->app);
	bpf_map_delete_elem(&flows, wire);
}

/* Where a flow of a grant lies. */
static __always_inline void wire_of(const struct wire_key *first, bool rises_here, __u32 number, struct wire_key *wire)
{
	*wire = *first;
	if (rises_here)
		wire->local_port = bpf_htons(bpf_ntohs(first->local_port) + number);
	else
		wire->remote_port = bpf_htons(bpf_ntohs(first->remote_port) + number);
}

/* Half of the flows that a grant may have: as many as a word has bits. */
struct half {
	struct wire_key first; /* of flow 0 of the grant */
	__u32 first_flow;
	__u32 from;
	__u32 count;
	bool rises_here;
	__u64 these;
	__u64 answered;
	__u64 over;
};

static __always_inline struct half half_of(const struct grant_flows *order, __u32 number)
{
	return (struct half){
		.first = order->first,
		.first_flow = order->first_flow,
		.from = 64 * number,
		.count = order->count,
		.rises_here = order->rises_here,
		.these = order->these[number],
	};
}

/* Whether a flow of it is one of those that the order names. */
static __always_inline bool is_meant(const struct half *half, __u32 at)
{
	return half->these >> (at & 63) & 1;
}

/* Its entry, if it has been answered. */
static __always_inline struct flow_entry *answered_entry(const struct half *half, __u32 at)
{
	struct flow_entry *entry;
	struct wire_key wire;
	__u32 number = half->from + at;

	wire_of(&half->first, half->rises_here, number, &wire);
	entry = bpf_map_lookup_elem(&flows, &wire);
	return entry && entry->flow == half->first_flow + number && !(entry->flags & FLOW_FRESH) ? entry : NULL;
}

/* What is to be done about one flow. As callbacks these are verified once, and not with all that may have become of the
 * flows before.
 */

static long forget_one(__u32 at, struct half *half)
{
	struct wire_key wire;
	__u32 number = half->from + at;

	if (number >= half->count)
		return 1;
	wire_of(&half->first, half->rises_here, number, &wire);
	forget_flow(&wire, half->first_flow + number, is_meant(half, at));
	return 0;
}

static long survey_one(__u32 at, struct half *half)
{
	struct flow_entry *entry = is_meant(half, at) ? answered_entry(half, at) : NULL;
	__u64 bit = 1ULL << (at & 63);

	if (!entry)
		return 0;
	half->answered |= bit;
	/* One that was told of is the agent's until its end. */
	if (entry->seen & SEEN_OVER && entry->flags & FLOW_UNTOLD)
		half->over |= bit;
	return 0;
}

static long tell_of_one(__u32 at, struct half *half)
{
	struct flow_entry *entry = is_meant(half, at) ? answered_entry(half, at) : NULL;

	if (entry)
		tell_opened(entry, true);
	return 0;
}

/* Acts on every flow that the grant may have; gives back what it has found. */
static __always_inline int for_each_flow(struct grant_flows *order, long (*act)(__u32, struct half *))
{
	for (__u32 number = 0; number < 2; number++) {
		struct half half = half_of(order, number);

		bpf_loop(64, act, &half, 0);
		order->answered[number] = half.answered;
		order->over[number] = half.over;
	}
	return 0;
}

/* The agent's, when a grant is over: as many calls as it may have flows would take longer than those flows took. Flows
 * that the agent knows it removes by itself.
 */
SEC("syscall")
int forget_flows(struct grant_flows *end)
{
	return for_each_flow(end, forget_one);
}

/* The agent's: which flows of a grant have been answered, and which are over already. */
SEC("syscall")
int survey_flows(struct grant_flows *order)
{
	return for_each_flow(order, survey_one);
}

/* The agent's: it is to be told of these flows, where they have been answered. */
SEC("syscall")
int tell_flows(struct grant_flows *order)
{
	return for_each_flow(order, tell_of_one);
}
