/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
 *
 * Which port of its client a listener sees of a flow that is opened by a grant: the program's own, as of a connection
 * without Margay. What the client's TCP has made sure of holds at the listener then: while a connection of this port
 * lingers there in TIME-WAIT, the sequence number and timestamps of the next one are greater (docs/decisions/0049).
 */
#pragma once

/* In network byte order; defined with what else is known of flow ports. */
static __always_inline bool is_flow_port(__u16 port);

/* Where the program's own port is not to be had: another one of the client's shows the connection as well. */
#define SHOWN_PORT_TRIES 8
#define SHOWN_PORT_MIN 1024
/* Where timestamps lie in the options of a SYN, after its MSS and either two bytes of another option or two NOPs. */
#define TCP_OPTION_TIMESTAMPS 8
#define TCP_OPTION_TIMESTAMPS_LEN 10

/* The members that are read here. The loader finds where they lie in the running kernel (CO-RE). */
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct sock_common {
	__u32 skc_tw_rcv_nxt;
};

struct inet_timewait_sock {
	struct sock_common __tw_common;
	volatile unsigned char tw_substate;
};

struct tcp_timewait_sock {
	struct inet_timewait_sock tw_sk;
	__u32 tw_ts_recent;
};

#pragma clang attribute pop

/* Element 0: which socket is looked for. There is no stack left where it is. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct bpf_sock_tuple);
} sought SEC(".maps");

/* The first options of a SYN. */
struct syn_options {
	__u8 mss[4];
	__u8 other[2];
	__u8 kind;
	__u8 len;
	__u32 timestamp;
};

/* Both ends have closed. What is left of the flow waits for late packets. */
static __always_inline bool is_over(const struct flow_entry *entry)
{
	return (entry->seen & SEEN_BOTH_FINS) == SEEN_BOTH_FINS;
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

/* Whether a SYN opens a connection anew in the place of one that lingers, as TCP decides it (RFC 6191 §2): one of
 * another name may have come from the same port, and its numbers and timestamps say nothing of this one's.
 */
static __always_inline bool is_newer(struct __sk_buff *skb, const struct packet *packet, struct bpf_sock *socket)
{
	struct tcp_timewait_sock *old = bpf_skc_to_tcp_timewait_sock(socket);
	struct syn_options options;
	__s32 since;

	if (!old || old->tw_sk.tw_substate != BPF_TCP_TIME_WAIT)
		return false;
	if (old->tw_ts_recent &&
	    !bpf_skb_load_bytes(skb, packet->transport_offset + sizeof(struct tcphdr), &options, sizeof(options)) &&
	    options.mss[0] == TCP_OPTION_MSS && options.kind == TCP_OPTION_TIMESTAMPS &&
	    options.len == TCP_OPTION_TIMESTAMPS_LEN) {
		since = bpf_ntohl(options.timestamp) - old->tw_ts_recent;
		if (since)
			return since > 0;
	}
	return (__s32)(packet->sequence - old->tw_sk.__tw_common.skc_tw_rcv_nxt) > 0;
}

/* Whether the host's TCP has no connection of this five-tuple, or one that gives way to a new one. */
static __noinline bool is_free(struct __sk_buff *skb, const struct packet *packet, const struct app_key *app)
{
	struct bpf_sock_tuple *tuple;
	struct bpf_sock *socket;
	bool is_free = true;
	__u32 len, zero = 0;

	tuple = bpf_map_lookup_elem(&sought, &zero);
	if (!tuple)
		return false;
	if (is_mapped((const __u32 *)app->source)) {
		tuple->ipv4.saddr = words(app->destination)[3];
		tuple->ipv4.daddr = words(app->source)[3];
		tuple->ipv4.sport = app->destination_port;
		tuple->ipv4.dport = app->source_port;
		len = sizeof(tuple->ipv4);
	} else {
		__builtin_memcpy(tuple->ipv6.saddr, app->destination, 16);
		__builtin_memcpy(tuple->ipv6.daddr, app->source, 16);
		tuple->ipv6.sport = app->destination_port;
		tuple->ipv6.dport = app->source_port;
		len = sizeof(tuple->ipv6);
	}
	socket = bpf_skc_lookup_tcp(skb, tuple, len, BPF_F_CURRENT_NETNS, 0);
	if (!socket)
		return true;
	if (socket->state != BPF_TCP_LISTEN)
		is_free = socket->state == BPF_TCP_TIME_WAIT && is_newer(skb, packet, socket);
	bpf_sk_release(socket);
	return is_free;
}

/* Whether no flow has this five-tuple: one that is over, or was reset, gives it up. */
static __noinline bool is_unused(const struct app_key *app)
{
	struct flow_entry *entry;
	struct wire_key *wire;

	wire = bpf_map_lookup_elem(&apps, app);
	if (!wire)
		return true;
	entry = bpf_map_lookup_elem(&flows, wire);
	if (!entry || !(is_over(entry) || entry->seen & (SEEN_RST_EGRESS | SEEN_RST_INGRESS)))
		return false;
	return !bpf_map_delete_elem(&apps, app);
}

/* Adds the entry of a flow that a client's program opens from a port of its own. A client of two names may have the
 * port of another connection: then the listener sees another one. Never a flow port: by these the listener sees those
 * connections that agents set up while a client has grants (`beside_grants` of the core), so that neither has the
 * five-tuple of the other.
 */
static __always_inline bool add_shown(struct __sk_buff *skb, const struct packet *packet, const struct wire_key *wire,
				 struct flow_entry *entry, __u16 own_port)
{
	__u16 port = own_port;

	for (__u32 at = 0; at < SHOWN_PORT_TRIES; at++) {
		if (at)
			port = bpf_htons(SHOWN_PORT_MIN + bpf_get_prandom_u32() % (0x10000 - SHOWN_PORT_MIN));
		if (is_flow_port(port))
			continue;
		entry->app.destination_port = port;
		if (is_unused(&entry->app) && is_free(skb, packet, &entry->app) && add_entry(wire, entry))
			return true;
	}
	return false;
}
