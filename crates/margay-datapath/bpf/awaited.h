/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
#pragma once

/* Connections that a listener of this host has been asked for, and that its TCP has no socket of yet (decision 0048).
 * A listener whose queue is full keeps nothing of a connection but what its own answer says (SYN cookies, RFC 4987
 * §3.6), and takes up the connection by whatever comes first of what follows the SYN. All else it resets, although
 * what comes first is still to come: the client's TCP sends it again. So nothing of a connection reaches a listener
 * but the SYN and what follows it.
 */

/* By five-tuple as it comes in. A flow that is pushed out is as it would be without this. */
#define AWAITED_MAX 16384
/* For so long a listener takes a cookie (TCP_SYNCOOKIE_VALID). */
#define AWAITED_NS 120000000000ULL

struct awaited {
	__u64 until_ns;
	__u32 next; /* the number after the SYN's */
	__u32 is_answered;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, AWAITED_MAX);
	__type(key, struct app_key);
	__type(value, struct awaited);
} awaited SEC(".maps");

/* The windows of pinholes (`PINHOLE_WINDOW` and `KNOCK_WINDOW` of the core). */
const volatile __u16 pinhole_window = 0;
const volatile __u16 knock_window = 0;

/* Whether an agent may have made it, and not the TCP of a program: a bare acknowledgement without options. */
static __always_inline bool is_bare(const struct packet *packet)
{
	return packet->key.protocol == IPPROTO_TCP && packet->transport_len == sizeof(struct tcphdr) &&
	       packet->tcp_flags == TCP_ACK;
}

static __always_inline bool is_pinhole_segment(const struct packet *packet)
{
	return is_bare(packet) && (packet->window == pinhole_window || packet->window == knock_window);
}

/* By which the core has a TCP say what it has (`stale_ack` there). */
static __always_inline bool is_probe_segment(const struct packet *packet)
{
	return is_bare(packet) && !packet->window && !packet->sequence && !packet->acknowledgement;
}

/* The state of the socket that a segment would come to; 0: there is none. A listener at another address is given what
 * has no connection (`assign_listener`).
 */
static __noinline __u32 state_of_socket(struct __sk_buff *skb, const struct packet *packet)
{
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *socket;
	__u32 state;

	socket = bpf_skc_lookup_tcp(skb, &tuple, socket_tuple(packet, &tuple), BPF_F_CURRENT_NETNS, 0);
	if (!socket)
		return listener_address(packet) ? BPF_TCP_LISTEN : 0;
	state = socket->state;
	bpf_sk_release(socket);
	return state;
}

/* A SYN comes to a listener. False where it is one again that has been answered by a cookie: by now there may be room,
 * and the listener would answer it once more, by a request with another number. Agents say answers again by themselves.
 */
static __noinline bool note_awaited(struct __sk_buff *skb, const struct packet *packet)
{
	struct awaited *before, value = {
		.until_ns = bpf_ktime_get_coarse_ns() + AWAITED_NS,
		.next = packet->sequence + 1,
	};

	before = bpf_map_lookup_elem(&awaited, &packet->key);
	if (before && before->next == value.next) {
		if (before->is_answered && state_of_socket(skb, packet) == BPF_TCP_LISTEN)
			return false;
		value.is_answered = before->is_answered;
	}
	bpf_map_update_elem(&awaited, &packet->key, &value, BPF_ANY);
	return true;
}

/* The five-tuple of the other direction. */
static __always_inline void turn(const struct app_key *key, struct app_key *turned)
{
	__builtin_memcpy(turned->source, key->destination, sizeof(turned->source));
	__builtin_memcpy(turned->destination, key->source, sizeof(turned->destination));
	turned->source_port = key->destination_port;
	turned->destination_port = key->source_port;
	turned->protocol = key->protocol;
}

/* What leaves sal0 may be a listener's answer. */
static __noinline void note_answered(const struct packet *packet)
{
	struct awaited *value;
	struct app_key key = {};

	if ((packet->tcp_flags & (TCP_SYN | TCP_ACK)) != (TCP_SYN | TCP_ACK))
		return;
	turn(&packet->key, &key);
	value = bpf_map_lookup_elem(&awaited, &key);
	if (value && value->next == packet->acknowledgement)
		value->is_answered = 1;
}

/* Whether it is a late acknowledgement of a flow that both ends have closed: what came by the agent may come after what
 * came by the card.
 */
static __noinline bool is_late(const struct packet *packet)
{
	struct app_key key = {};
	struct flow_entry *entry;
	struct wire_key *wire;

	if (packet->payload_len || packet->tcp_flags != TCP_ACK)
		return false;
	turn(&packet->key, &key);
	wire = bpf_map_lookup_elem(&apps, &key);
	entry = wire ? bpf_map_lookup_elem(&flows, wire) : NULL;
	return entry && is_over(entry);
}

/* Whether a segment would come to a listener that can make nothing of it; or to a request of its, with numbers of
 * before the request: the listener answers these with a reset, too (RFC 9293 §3.10.7.4, SYN-RECEIVED). What an agent
 * has made says nothing to a connection that is over, either: in TIME-WAIT it would be acknowledged, and the peer's end,
 * which is gone, would leave that acknowledgement to its listener.
 */
static __noinline bool is_lost_on_listener(struct __sk_buff *skb, const struct packet *packet)
{
	bool is_probe = is_probe_segment(packet), is_made = is_probe || is_pinhole_segment(packet);
	struct awaited *value;
	__u32 state;

	value = bpf_map_lookup_elem(&awaited, &packet->key);
	if (!value && !is_made && !is_late(packet))
		return false;
	state = state_of_socket(skb, packet);
	if (state == BPF_TCP_NEW_SYN_RECV)
		return is_probe || (value && (__s32)(packet->sequence - value->next) < 0);
	if (state != BPF_TCP_LISTEN) {
		if (value)
			bpf_map_delete_elem(&awaited, &packet->key);
		return is_made && state == BPF_TCP_TIME_WAIT;
	}
	if (is_made || !value)
		return true;
	return packet->sequence != value->next && (__s64)(bpf_ktime_get_coarse_ns() - value->until_ns) < 0;
}

/* Whether the host's TCP has a socket of a flow, as far as is known here. */
static __noinline bool has_socket(struct flow_entry *entry)
{
	struct app_key key = {};

	if (entry->app.protocol != IPPROTO_TCP || entry->seen & SEEN_SOCKET)
		return true;
	turn(&entry->app, &key);
	if (bpf_map_lookup_elem(&awaited, &key))
		return false;
	__sync_fetch_and_or(&entry->seen, SEEN_SOCKET);
	return true;
}
