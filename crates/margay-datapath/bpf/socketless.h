/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
#pragma once

/* Connections that the host's TCP has no socket of: not yet, or no more (decision 0048). What comes of them and is not
 * what makes the socket would be answered by a reset.
 *
 * Not yet: a listener whose queue is full keeps nothing of a connection but what its own answer says (SYN cookies, RFC
 * 4987 §3.6), and takes up the connection by whatever comes first of what follows the SYN. All else it resets, although
 * what comes first is still to come: the client's TCP sends it again. So nothing of a connection reaches a listener
 * but the SYN and what follows it.
 *
 * A port that a runtime of containers publishes has a listener on the host, too, which nothing comes to: all of the
 * connection is translated, and forwarded to the container, whose TCP has the socket.
 *
 * No more: the end that closes last forgets a connection as soon as its FIN is acknowledged (RFC 9293 §3.6). The other
 * end, in TIME-WAIT, acknowledges whatever is old; and what goes by one way may be overtaken by what goes by another.
 */

/* By five-tuple as it comes in. One that is pushed out is as it would be without this. */
#define SOCKETLESS_MAX 32768
/* For so long a listener takes a cookie (TCP_SYNCOOKIE_VALID). */
#define AWAITED_NS 120000000000ULL
/* And for so long the other end may acknowledge what is old (TCP_TIMEWAIT_LEN). */
#define PARTED_NS 60000000000ULL

/* Values of socketless.state. */
#define SOCKETLESS_ASKED 0 /* a listener has been given the SYN */
#define SOCKETLESS_ANSWERED 1 /* and has answered it */
#define SOCKETLESS_PARTED 2 /* this end has closed last */
#define SOCKETLESS_ELSEWHERE 3 /* what has answered is no listener of the host: a rule translates what comes */

struct socketless {
	__u64 until_ns;
	__u32 next; /* the number after the peer's SYN; of what has parted, the one after its FIN */
	__u32 state;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, SOCKETLESS_MAX);
	__type(key, struct app_key);
	__type(value, struct socketless);
} socketless SEC(".maps");

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
static __noinline bool note_asked(struct __sk_buff *skb, const struct packet *packet)
{
	struct socketless *before, value = {
		.until_ns = bpf_ktime_get_coarse_ns() + AWAITED_NS,
		.next = packet->sequence + 1,
	};

	before = bpf_map_lookup_elem(&socketless, &packet->key);
	if (before && before->state != SOCKETLESS_PARTED && before->next == value.next) {
		if (before->state == SOCKETLESS_ANSWERED && state_of_socket(skb, packet) == BPF_TCP_LISTEN)
			return false;
		value.state = before->state;
	}
	bpf_map_update_elem(&socketless, &packet->key, &value, BPF_ANY);
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

/* A SYN leaves sal0: where it answers one, it is a listener's, or, where it has come from elsewhere, a container's. A
 * cookie bears no socket, and so the interface by which the answer came in tells the two apart.
 */
static __noinline void note_answered(struct __sk_buff *skb, const struct packet *packet)
{
	struct socketless *value;
	struct app_key key = {};

	turn(&packet->key, &key);
	value = bpf_map_lookup_elem(&socketless, &key);
	if (value && value->state == SOCKETLESS_ASKED && value->next == packet->acknowledgement)
		value->state = skb->ingress_ifindex ? SOCKETLESS_ELSEWHERE : SOCKETLESS_ANSWERED;
}

/* A FIN leaves sal0. Whoever closes first keeps a socket, in TIME-WAIT at the end. What another network namespace sends
 * bears none: its TCP is not the host's.
 */
static __noinline void note_parting(struct __sk_buff *skb, const struct packet *packet)
{
	struct bpf_sock *socket = skb->sk;
	struct socketless value = {
		.until_ns = bpf_ktime_get_coarse_ns() + PARTED_NS,
		.next = packet->acknowledgement,
		.state = SOCKETLESS_PARTED,
	};
	struct flow_entry *entry;
	struct app_key key = {};
	struct wire_key *wire;

	if (!socket || socket->state == BPF_TCP_FIN_WAIT1 || !(packet->tcp_flags & TCP_ACK))
		return;
	turn(&packet->key, &key);
	bpf_map_update_elem(&socketless, &key, &value, BPF_ANY);
	/* After that: whoever has seen nothing there sets it before this, or looks again (`has_socket`). */
	wire = bpf_map_lookup_elem(&apps, &packet->key);
	entry = wire ? bpf_map_lookup_elem(&flows, wire) : NULL;
	if (entry)
		__sync_fetch_and_and(&entry->seen, ~SEEN_SOCKET);
}

/* Whether the host's TCP would answer a segment by a reset that nobody should hear: it has no socket of the connection,
 * and its listener can make nothing of it; or only a request, and the segment has a number of before that one: the
 * listener answers these with a reset, too (RFC 9293 §3.10.7.4, SYN-RECEIVED). Of what has parted the peer can say
 * nothing but what was said. A SYN-ACK passes all the same: it may be another instance's, which the same SYN has
 * reached, too, and the reset ends the flow there. What an agent has made says nothing to a connection in TIME-WAIT,
 * either: it would be acknowledged there.
 */
static __noinline bool is_lost(struct __sk_buff *skb, const struct packet *packet)
{
	bool is_probe = is_probe_segment(packet), is_made = is_probe || is_pinhole_segment(packet), is_parted, is_due;
	struct socketless *value;
	__s32 ahead;
	__u32 state;

	value = bpf_map_lookup_elem(&socketless, &packet->key);
	if (!value && !is_made)
		return false;
	/* It ends without an acknowledgement: what the peer still sends is to hear of that. */
	if (packet->tcp_flags & TCP_RST) {
		bpf_map_delete_elem(&socketless, &packet->key);
		return false;
	}
	if (value && value->state == SOCKETLESS_ELSEWHERE)
		return false;
	state = state_of_socket(skb, packet);
	ahead = value ? (__s32)(packet->sequence - value->next) : 0;
	is_parted = value && value->state == SOCKETLESS_PARTED;
	is_due = value && (__s64)(bpf_ktime_get_coarse_ns() - value->until_ns) < 0;
	if (state == BPF_TCP_NEW_SYN_RECV)
		return is_probe || (value && !is_parted && ahead < 0);
	if (state && state != BPF_TCP_LISTEN) {
		/* What has parted waits for its last acknowledgement still; otherwise it is another connection's by
		 * now.
		 */
		if (value && !(is_parted && state == BPF_TCP_LAST_ACK))
			bpf_map_delete_elem(&socketless, &packet->key);
		return is_made && state == BPF_TCP_TIME_WAIT;
	}
	if (is_parted && is_due && !(packet->tcp_flags & TCP_SYN) && (ahead <= 0 || is_probe))
		return true;
	if (!state)
		return false;
	return is_made || (is_due && !is_parted && ahead);
}

/* Whether the host's TCP has a socket of a flow, as far as is known here. */
static __noinline bool has_socket(struct flow_entry *entry)
{
	struct app_key key = {};

	if (entry->app.protocol != IPPROTO_TCP || entry->seen & SEEN_SOCKET)
		return true;
	turn(&entry->app, &key);
	if (bpf_map_lookup_elem(&socketless, &key))
		return false;
	__sync_fetch_and_or(&entry->seen, SEEN_SOCKET);
	/* It may part at this very moment. */
	if (!bpf_map_lookup_elem(&socketless, &key))
		return true;
	__sync_fetch_and_and(&entry->seen, ~SEEN_SOCKET);
	return false;
}
