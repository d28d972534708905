// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
/*
 * The flow cache (DESIGN §2, §7): established flows whose packets go direct are rewritten between the application's
 * virtual five-tuple and the wire's, at the egress of sal0 and at the ingress of every network card. Everything else is
 * the agent's: it reads what leaves sal0.
 */
#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

/* Headers older than tcx (6.6) lack them. */
#define TCX_NEXT -1
#define TCX_DROP 2

#define AF_INET 2
#define AF_INET6 10

/* Set before the programs are loaded. */
const volatile __u32 sal0_ifindex = 0;
/* The host's virtual addresses: whom packets of flows are for. */
const volatile __u32 host_v4 = 0;
const volatile __u32 host_v6[4] = {};
/* Bytes before the IP header at sal0: none on a TUN. The kernel's test run knows Ethernet frames only, so tests say 14.
 */
const volatile __u32 sal0_header_len = 0;

#include "layout.h"
#include "maps.h"
#include "virtual.h"
#include "vlan.h"
#include "parse.h"
#include "rewrite.h"
#include "delta.h"
#include "account.h"
#include "too_big.h"
#include "grant.h"
#include "host_traffic.h"
#include "change.h"

_Static_assert(__builtin_offsetof(struct app_key, source_port) == sizeof(struct pair_key),
	       "a pair of addresses heads an application's key");

#include "forwarded.h"
#include "fragment.h"
#include "delivery.h"
#include "listener.h"
#include "socketless.h"
#include "time_wait.h"

/* Names the types that the agent shares, so that they are in the object's type information. */
struct shared_layout {
	struct app_key app;
	struct wire_key wire;
	struct flow_entry flow;
	struct path_entry path;
	struct pair_key pair;
	struct pair_value pair_value;
	struct flow_event event;
	struct address_key address;
	struct listener_key listener;
	struct offer_key offer_key;
	struct offer offer;
	struct spare spare;
	struct grant grant;
	struct flow_change flow_change;
	struct grant_flows grant_flows;
	struct inside_key inside;
	struct delta delta;
};
const volatile struct shared_layout shared_layout = {};
const volatile __u32 layout_version = LAYOUT_VERSION;

/* What all flow caches have in common: `STALL_UNKNOWN` and `DATAGRAM_…` of the core, where the reasons are. */
const volatile __u64 stall_unknown_ns = 0;
const volatile __u64 datagram_answer_ns = 0;
const volatile __u64 datagram_stall_ns = 0;
const volatile __u64 datagram_idle_ns = 0;

static __always_inline bool is_reset(const struct packet *packet)
{
	return packet->key.protocol == IPPROTO_TCP && packet->tcp_flags & TCP_RST;
}

/* A datagram that is for the agents. */
static __always_inline bool is_pinhole(const struct packet *packet)
{
	return packet->key.protocol == IPPROTO_UDP && !packet->payload_len;
}

/* Since when packets have gone unanswered, those to the addresses before not counted. */
static __always_inline __u64 started_waiting(const struct flow_entry *entry, const struct path_entry *path)
{
	__u64 since = entry->unanswered_since_ns;

	return since && (__s64)(since - path->since_ns) < 0 ? 0 : since;
}

static __always_inline bool is_stalled(const struct flow_entry *entry, const struct path_entry *path, __u64 now)
{
	__u64 since = started_waiting(entry, path);
	__u64 rtt = entry->rtt_ns ? entry->rtt_ns : path->rtt_ns;
	__u64 limit = rtt ? path->stall_ns + 2 * rtt : stall_unknown_ns;

	return since && (__s64)(now - since) > (__s64)limit && agent_is_alive(now);
}

/* Whether datagrams must not go direct any more: nothing has come back although the other end answers once a second, or
 * the flow has been silent for so long that holes on the way may have closed.
 */
static __always_inline bool is_datagram_stalled(struct flow_entry *entry, const struct path_entry *path, __u64 now)
{
	__u64 since = started_waiting(entry, path);
	__u64 last = entry->egress.last_ns;

	if ((__s64)(entry->ingress.last_ns - last) > 0)
		last = entry->ingress.last_ns;
	if (!last)
		return false;
	return ((since && (__s64)(now - since) > (__s64)datagram_stall_ns) || (__s64)(now - last) > (__s64)datagram_idle_ns) &&
	       agent_is_alive(now);
}

/* Takes note of a packet on its way out; false when the agent is to have it. */
static __always_inline bool account_egress(struct __sk_buff *skb, const struct packet *packet, struct flow_entry *entry,
					   const struct path_entry *path)
{
	__u64 now = bpf_ktime_get_coarse_ns();
	__u32 ends = 0;

	if (packet->key.protocol == IPPROTO_TCP) {
		if (packet->payload_len || packet->tcp_flags & TCP_FIN) {
			if (is_stalled(entry, path, now) || (!note_delivery(entry, packet, now) && agent_is_alive(now))) {
				__sync_fetch_and_or(&entry->flags, FLOW_STALLED);
				count(COUNT_LEFT_STALLED);
				return false;
			}
			if (!started_waiting(entry, path))
				entry->unanswered_since_ns = now;
		}
		ends |= packet->tcp_flags & TCP_FIN ? SEEN_FIN_EGRESS : 0;
		ends |= packet->tcp_flags & TCP_RST ? SEEN_RST_EGRESS : 0;
		ends |= acknowledges_fin(entry, packet);
		note_numbers(&entry->egress.numbers, &entry->ingress.numbers, packet);
		note_end(entry, with_over(entry, ends));
	} else {
		if (is_datagram_stalled(entry, path, now)) {
			__sync_fetch_and_or(&entry->flags, FLOW_STALLED);
			count(COUNT_LEFT_STALLED);
			return false;
		}
		if (!started_waiting(entry, path))
			entry->unanswered_since_ns = now;
	}
	note_packet(&entry->egress, skb, packet, now);
	return true;
}

/* With the next hop given, the kernel looks for the neighbour alone and for no route. */
static __always_inline int to_next_hop(const struct path_entry *path)
{
	const __u32 *next_hop = (const __u32 *)path->next_hop;
	struct bpf_redir_neigh neighbour = {};

	if (is_mapped(next_hop)) {
		neighbour.nh_family = AF_INET;
		neighbour.ipv4_nh = next_hop[3];
	} else {
		neighbour.nh_family = AF_INET6;
		__builtin_memcpy(neighbour.ipv6_nh, next_hop, 16);
	}
	return bpf_redirect_neigh(path->ifindex, &neighbour, sizeof(neighbour), 0);
}

static __always_inline int send_direct(struct __sk_buff *skb, struct packet *packet, const struct wire_key *wire,
				       const struct path_entry *path, const struct delta *delta)
{
	if (delta && !translate(skb, packet->transport_offset, &delta->egress, checksum_state(skb) == CHECKSUM_PARTIAL))
		goto refused;
	if (!rewrite(skb, packet, (const __u32 *)path->local, (const __u32 *)path->remote, wire->local_port,
		     wire->remote_port))
		goto refused;
	/* The neighbour is found for a frame, and a TUN's packet is none: it gets room for a header, which the kernel
	 * fills in.
	 */
	if (!packet->ip_offset && bpf_skb_change_head(skb, sizeof(struct ethhdr), 0))
		goto refused;
	count(COUNT_EGRESS_PACKETS);
	return to_next_hop(path);
refused:
	count(COUNT_DROP_REWRITE);
	return TCX_DROP;
}

static __always_inline int leave_sal0(struct __sk_buff *skb)
{
	struct packet packet = {};
	const struct delta *delta = NULL;
	struct flow_entry *entry;
	struct path_entry *path;
	struct wire_key *wire, on_wire;
	__u32 path_id;

	if (skb->mark == UP_MARK) {
		skb->mark = 0;
		return TCX_NEXT;
	}
	if (!parse(skb, sal0_header_len, &packet))
		return TCX_NEXT;
	if (packet.tcp_flags & TCP_SYN)
		note_answered(skb, &packet);
	else if (packet.tcp_flags & TCP_FIN)
		note_parting(skb, &packet);
	/* It may begin a new flow on an old five-tuple. */
	if (packet.tcp_flags & TCP_SYN && !begins_direct(skb, &packet))
		return TCX_NEXT;
	wire = bpf_map_lookup_elem(&apps, &packet.key);
	if (!wire)
		return TCX_NEXT;
	on_wire = *wire;
	entry = bpf_map_lookup_elem(&flows, &on_wire);
	if (!entry || !(entry->flags & FLOW_EGRESS))
		return TCX_NEXT;
	/* A socket of this host may have the same addresses: the agent refuses what it sends. */
	if (entry->flags & FLOW_BY_SAL0 && !is_forwarded(skb))
		return TCX_NEXT;
	/* NAT may have given a container's packets the addresses. */
	if (entry->flags & FLOW_OF_SOCKET && is_from_outside(skb))
		return TCX_NEXT;
	/* One that has stalled is the agent's. Where that died in the very moment, a burst that was lost would be the
	 * end of the flow until there is another agent: what TCP sends again may still pass.
	 */
	if (entry->flags & FLOW_STALLED && agent_is_alive(bpf_ktime_get_coarse_ns()))
		goto leave;
	path_id = on_wire.path;
	path = bpf_map_lookup_elem(&paths, &path_id);
	if (!path) {
		count(COUNT_LEFT_NO_PATH);
		goto leave;
	}
	if (path->flags & PATH_HELD) {
		count(COUNT_LEFT_HELD);
		goto leave;
	}
	/* What looks like a pinhole is not sent as one. */
	if (is_pinhole(&packet))
		return TCX_NEXT;
	if (is_too_large(skb, &packet, path)) {
		count(COUNT_LEFT_TOO_LARGE);
		goto leave;
	}
	if (entry->delta) {
		delta = delta_of(entry);
		/* The agent has it, too. */
		if (!delta)
			goto leave;
	}
	if (!account_egress(skb, &packet, entry, path))
		goto leave;
	return send_direct(skb, &packet, &on_wire, path, delta);
leave:
	note_left(entry, &packet);
	leave_to_agent(entry);
	return TCX_NEXT;
}

SEC("tcx/egress")
int app_egress(struct __sk_buff *skb)
{
	bool is_of_wire = skb->mark == UP_MARK;
	int verdict = leave_sal0(skb);

	/* One that cannot be changed could pass for another's. */
	if (verdict == TCX_NEXT && !is_of_wire && mark_origin(skb))
		return TCX_DROP;
	return verdict;
}

/* In its place while the flow cache is taken off. */
SEC("tcx/egress")
int app_egress_uncached(struct __sk_buff *skb)
{
	return mark_origin(skb) ? TCX_DROP : TCX_NEXT;
}

/* What comes to the host by sal0, from the agent or from a card. */
SEC("tcx/ingress")
int app_ingress(struct __sk_buff *skb)
{
	const struct address_key *address;
	struct packet packet = {};
	__u32 expected = 0;

	if (!parse(skb, sal0_header_len, &packet) || packet.key.protocol != IPPROTO_TCP)
		return TCX_NEXT;
	/* The copy comes here again, after what goes on now. */
	if (is_request(&packet) && meets_time_wait(skb, &packet, &expected)) {
		note_asked(skb, &packet);
		if (!bpf_clone_redirect(skb, skb->ifindex, BPF_F_INGRESS)) {
			if (make_reset(skb, &packet, expected))
				return TCX_NEXT;
			count(COUNT_DROP_REWRITE);
			return TCX_DROP;
		}
	}
	if (is_request(&packet) ? !note_asked(skb, &packet) : is_lost(skb, &packet)) {
		count(COUNT_DROP_SOCKETLESS);
		return TCX_DROP;
	}
	address = listener_address(&packet);
	if (address)
		assign_listener(skb, &packet, address);
	return TCX_NEXT;
}

/* To the agent, past everything of the host: its TCP must never see a packet on a flow port. */
static __always_inline int send_up(struct __sk_buff *skb, __u32 why)
{
	if (!agent_is_alive(bpf_ktime_get_coarse_ns())) {
		count(COUNT_DROP_AGENT_DEAD);
		return TCX_DROP;
	}
	count(why);
	skb->mark = UP_MARK;
	return bpf_redirect(sal0_ifindex, 0);
}

static __always_inline void note_round_trip(struct flow_entry *entry, __u32 path_id, __u64 wait)
{
	struct path_entry *path;

	if (!entry->rtt_ns) {
		path = bpf_map_lookup_elem(&paths, &path_id);
		if (path)
			path->rtt_ns = wait;
	}
	/* The longest counts at once and is forgotten slowly: too early a suspicion costs more than a late one. */
	entry->rtt_ns = wait > entry->rtt_ns ? wait : entry->rtt_ns - (entry->rtt_ns - wait) / 8;
}

static __always_inline void account_ingress(struct __sk_buff *skb, const struct packet *packet, struct flow_entry *entry,
					    __u32 path_id)
{
	__u64 now = bpf_ktime_get_coarse_ns();
	__u64 since = entry->unanswered_since_ns;
	__u32 ends = 0;

	/* Whoever it is from, the application's TCP takes it for nothing, and so is it here. */
	if (is_reset(packet) && !is_reset_taken(entry, packet))
		return;
	if (packet->key.protocol == IPPROTO_TCP) {
		if (since) {
			/* The clock goes by ticks; zero would say that nothing is known. */
			note_round_trip(entry, path_id, now > since ? now - since : 1);
			entry->unanswered_since_ns = 0;
		}
		ends |= packet->tcp_flags & TCP_FIN ? note_fin(entry, packet) : 0;
		ends |= packet->tcp_flags & TCP_RST ? SEEN_RST_INGRESS : 0;
		note_in_order(entry, packet);
		if (packet->tcp_flags & TCP_ACK &&
		    acknowledges_more(&entry->ingress.numbers, &entry->egress.numbers, packet))
			entry->egress.asked_ns = now;
		note_numbers(&entry->ingress.numbers, &entry->egress.numbers, packet);
		note_end(entry, with_over(entry, ends));
	} else {
		entry->unanswered_since_ns = 0;
		if ((__s64)(now - entry->egress.last_ns) > (__s64)datagram_answer_ns &&
		    (__s64)(now - entry->ingress.asked_ns) > (__s64)datagram_answer_ns && agent_is_alive(now)) {
			entry->ingress.asked_ns = now;
			tell(entry, SEEN_ONE_WAY, NULL);
		}
	}
	note_packet(&entry->ingress, skb, packet, now);
}

/* How often the agent hears that direct packets come by a watched path. */
#define TELL_NS 20000000ULL

static __always_inline void tell_of_path(struct pair_value *path)
{
	__u64 now = bpf_ktime_get_coarse_ns();

	/* Without an agent that reads them, they would fill the ring that connections' ends are told by. */
	if (now - path->told_ns < TELL_NS || !agent_is_alive(now))
		return;
	path->told_ns = now;
	tell_of(path->path, SEEN_PATH, NULL);
}

/* Whether direct packets of a flow are for the agent still. Of one that is lifted, either `lift_flow` sees this
 * packet, or this packet sees what that has done.
 */
static __always_inline bool goes_up(struct flow_entry *entry)
{
	__u32 flags = entry->flags;

	if (!(flags & FLOW_ACCEPT) && flags & FLOW_LIFTING)
		flags = __sync_fetch_and_or(&entry->flags, FLOW_SENT_UP);
	return !(flags & FLOW_ACCEPT);
}

/* A packet to a flow port that no entry knows; by which path, if the pair of addresses has one. */
static __noinline int without_entry(struct __sk_buff *skb, const struct packet *packet, struct pair_value *path)
{
	if ((!path && !is_from_peer(packet)) || is_of_host(skb, packet)) {
		count(COUNT_OF_HOST);
		return TCX_NEXT;
	}
	if (!is_heard(packet)) {
		count(COUNT_DROP_RATE);
		return TCX_DROP;
	}
	if (path && path->flags & PATH_WATCHED && !is_reset(packet))
		tell_of_path(path);
	if (is_pinhole(packet)) {
		/* Not by sal0: where datagrams crowd there, the very packet that would relieve it would be lost. */
		tell(NULL, SEEN_PINHOLE, &packet->key);
		count(COUNT_PINHOLES);
		return TCX_DROP;
	}
	return send_up(skb, COUNT_UP_NO_FLOW);
}

SEC("tcx/ingress")
int wire_ingress(struct __sk_buff *skb)
{
	struct packet packet = {};
	struct wire_key key = {};
	struct flow_entry *entry;
	struct pair_value *path;
	bool is_pinhole_of_agent;

	if (is_of_sub_interface(skb))
		return TCX_NEXT;
	if (is_intruding(skb))
		return TCX_DROP;
	if (!parse(skb, ETH_HLEN, &packet)) {
		if (is_flows_fragment(skb))
			return send_up(skb, COUNT_UP_FRAGMENT);
		hear_too_big(skb);
		return TCX_NEXT;
	}
	if (!is_flow_port(packet.key.destination_port))
		return TCX_NEXT;
	/* A pair of addresses as they stand at the key's head. */
	path = bpf_map_lookup_elem(&pairs, &packet.key);
	if (!path)
		return without_entry(skb, &packet, NULL);
	key.path = path->path;
	key.local_port = packet.key.destination_port;
	key.remote_port = packet.key.source_port;
	key.protocol = packet.key.protocol;
	entry = bpf_map_lookup_elem(&flows, &key);
	if (is_request(&packet)) {
		/* A flow has one, which opens it: what comes after would open the program's connection anew, for
		 * whoever has read the ports on the way. What is sent again goes by the agents.
		 */
		enum opening opening = entry		       ? OPENING_UNPROVED :
				       path->flags & PATH_HELD ? OPENING_NONE :
								 open_flow(skb, &packet, &key);

		if (opening == OPENING_UNPROVED) {
			count(COUNT_DROP_UNPROVED);
			return TCX_DROP;
		}
		if (opening == OPENING_DONE && blank_proof(skb, &packet))
			entry = bpf_map_lookup_elem(&flows, &key);
	}
	if (!entry)
		return without_entry(skb, &packet, path);
	/* While nothing has come by the path, a reset is the word of a host on the way that knows no such connection,
	 * such as a translator: it shows nothing of the path, and is not the peer's.
	 */
	if (is_reset(&packet) && path->flags & PATH_HELD) {
		count(COUNT_DROP_RESET);
		return TCX_DROP;
	}
	if (path->flags & PATH_WATCHED && !is_reset(&packet))
		tell_of_path(path);
	if (is_pinhole(&packet)) {
		entry->unanswered_since_ns = 0;
		tell(entry, SEEN_PINHOLE, &packet.key);
		count(COUNT_PINHOLES);
		return TCX_DROP;
	}
	if ((entry->flags & (FLOW_ACCEPT | FLOW_FRESH)) != FLOW_ACCEPT) {
		if (goes_up(entry))
			return send_up(skb, COUNT_UP_NOT_ACCEPTED);
		if (entry->flags & FLOW_FRESH) {
			packet.is_fresh = true;
			count_syn(&packet);
		}
	}
	is_pinhole_of_agent = is_pinhole_segment(&packet);
	if (entry->delta) {
		const struct delta *delta = delta_of(entry);

		/* The agent has it, too. */
		if (!delta)
			return send_up(skb, COUNT_UP_NOT_ACCEPTED);
		if (!translate_ingress(skb, &packet, delta)) {
			count(COUNT_DROP_REWRITE);
			return TCX_DROP;
		}
	}
	account_ingress(skb, &packet, entry, key.path);
	if (!rewrite(skb, &packet, (const __u32 *)entry->app.destination, (const __u32 *)entry->app.source,
		     entry->app.destination_port, entry->app.source_port)) {
		count(COUNT_DROP_REWRITE);
		return TCX_DROP;
	}
	count(COUNT_INGRESS_PACKETS);
	if (packet.is_fresh && note_fresh(&packet, entry))
		return bpf_redirect(sal0_ifindex, BPF_F_INGRESS);
	/* Where there is no socket, or may be none, it comes by sal0, too: `app_ingress` asks what TCP can make of it. So
	 * does what a box is to see there.
	 */
	if (!(entry->flags & FLOW_BY_SAL0) && is_in_place(entry) && has_socket(entry) && !is_pinhole_of_agent &&
	    is_let_in(skb, entry)) {
		if (!is_mute(entry, &packet, entry->ingress.last_ns)) {
			skb->tc_index = REWRITTEN_INDEX;
			return TCX_NEXT;
		}
		note_undelivered(entry);
	}
	return bpf_redirect(sal0_ifindex, BPF_F_INGRESS);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
