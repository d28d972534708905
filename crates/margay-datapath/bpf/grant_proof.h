/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
 *
 * How a SYN shows that its sender holds the grant by which it asks for a flow. What a grant says of numbers and ports
 * is in the clear, so whoever reads on the path knows it: the SYN bears a tag under a key that both ends derive and
 * nobody sends.
 */
#pragma once

#include "sip_hash.h"

/* An option for experiments (RFC 4727), with the number by which several share it (RFC 6994). */
#define TCP_OPTION_EXPERIMENT 253
#define TCP_OPTION_OF_GRANT 0x4d47
#define TCP_HEADER_MAX 60
#define TCP_CHECK_OFFSET 16
/* Header length and flags, with the window. */
#define TCP_LENGTH_OFFSET 12

/* The last of the SYN's options. */
struct grant_option {
	__u8 kind;
	__u8 len;
	__u16 number;
	__u16 port; /* the program's own, which the listener is to see; network byte order */
	__u16 zero;
	__u32 tag[2];
};

/* What the tag covers beside the first bytes of the header: `port` and `zero`. */
#define TAGGED_OF_OPTION 4

/* SipHash-2-4 of the first eight bytes of the TCP header, ports and sequence number, and of the option's own port. A
 * flow port is of one flow of the grant, and each grant has a key of its own. Addresses are not covered: the path at
 * which a grant lies has the pair, as this end sees it.
 */
static __always_inline __u64 grant_tag(const __u64 *key, const struct wire_key *wire, __u32 sequence, __u16 own_port)
{
	__u64 word = (__u64)bpf_htonl(sequence) << 32 | (__u64)wire->remote_port << 16 | wire->local_port;

	sip_start(key[0], key[1]);
	sip_word(word);
	/* The last word has the length, too. */
	word = (__u64)(sizeof(word) + TAGGED_OF_OPTION) << 56 | own_port;
	sip_word(word);
	sip_end();
	return v0 ^ v1 ^ v2 ^ v3;
}

/* `wire` is as the sender of the SYN has it. */
static __always_inline struct grant_option grant_option_of(const __u64 *key, const struct wire_key *wire,
							   __u32 sequence, __u16 own_port)
{
	__u64 tag = grant_tag(key, wire, sequence, own_port);

	return (struct grant_option){
		.kind = TCP_OPTION_EXPERIMENT,
		.len = sizeof(struct grant_option),
		.number = bpf_htons(TCP_OPTION_OF_GRANT),
		.port = own_port,
		.tag = { tag, tag >> 32 },
	};
}

/* Whether a SYN can bear the option: there is room for it, and no data that a copy of it with other data could give
 * way to.
 */
static __always_inline bool has_room_for_proof(const struct packet *packet)
{
	return !packet->payload_len && packet->transport_len + sizeof(struct grant_option) <= TCP_HEADER_MAX;
}

/* Appends the option to a SYN that has room for it, has taken a flow of a grant, and leaves for the wire with these
 * ports.
 */
static __noinline bool add_proof(struct __sk_buff *skb, struct packet *packet, const struct wire_key *wire, __u32 grant)
{
	const struct spare *spare = bpf_map_lookup_elem(&spares, &grant);
	struct {
		__u32 head;
		struct grant_option option;
	} new;
	__u32 at = packet->transport_offset, len = packet->transport_len, head;
	__u16 old_len, new_len;
	__s64 difference;

	if (!wire || !spare || bpf_skb_load_bytes(skb, at + TCP_LENGTH_OFFSET, &head, sizeof(head)))
		return false;
	new.head = head;
	new.option = grant_option_of(spare->key, wire, packet->sequence, packet->key.source_port);
	/* The header's length is in words, in the upper half of the first byte. */
	*(__u8 *)&new.head += sizeof(new.option) / 4 << 4;
	if (bpf_skb_change_tail(skb, at + len + sizeof(new.option), 0))
		return false;
	packet->transport_len = len + sizeof(new.option);
	/* A partial checksum covers the length and nothing of the rest. */
	old_len = bpf_htons(len);
	new_len = bpf_htons(packet->transport_len);
	difference = bpf_csum_diff(&head, sizeof(head), (__u32 *)&new, sizeof(new), 0);
	if (bpf_skb_store_bytes(skb, at + TCP_LENGTH_OFFSET, &new.head, sizeof(new.head), 0) ||
	    bpf_skb_store_bytes(skb, at + len, &new.option, sizeof(new.option), 0) ||
	    bpf_l4_csum_replace(skb, at + TCP_CHECK_OFFSET, 0, difference, 0) ||
	    bpf_l4_csum_replace(skb, at + TCP_CHECK_OFFSET, old_len, new_len, BPF_F_PSEUDO_HDR | sizeof(new_len)))
		return false;
	if (!packet->is_v4)
		return !bpf_skb_store_bytes(skb, packet->ip_offset + __builtin_offsetof(struct ipv6hdr, payload_len), &new_len,
					    sizeof(new_len), 0);
	old_len = bpf_htons(sizeof(struct iphdr) + len);
	new_len = bpf_htons(sizeof(struct iphdr) + packet->transport_len);
	return !bpf_l3_csum_replace(skb, packet->ip_offset + __builtin_offsetof(struct iphdr, check), old_len, new_len,
				    sizeof(new_len)) &&
	       !bpf_skb_store_bytes(skb, packet->ip_offset + __builtin_offsetof(struct iphdr, tot_len), &new_len,
				    sizeof(new_len), 0);
}

/* The port of the program that sends a SYN from the wire, where that bears the option with the right tag; else zero,
 * which is no program's. All of the option is compared at once, whatever of it is wrong.
 */
static __noinline __u16 proved_port(struct __sk_buff *skb, const struct packet *packet, const struct grant *grant)
{
	struct wire_key sent = { .local_port = packet->key.source_port, .remote_port = packet->key.destination_port };
	struct grant_option found, right;
	__u32 len = packet->transport_len, difference;

	if (!grant || packet->payload_len || len < sizeof(struct tcphdr) + sizeof(found) ||
	    bpf_skb_load_bytes(skb, packet->transport_offset + len - sizeof(found), &found, sizeof(found)))
		return 0;
	right = grant_option_of(grant->key, &sent, packet->sequence, found.port);
	difference = (words(&found)[0] ^ words(&right)[0]) | (words(&found)[1] ^ words(&right)[1]) |
		     (found.tag[0] ^ right.tag[0]) | (found.tag[1] ^ right.tag[1]);
	return difference ? 0 : found.port;
}

#define FOUR_NOPS 0x01010101

static const __u32 nops[] = { FOUR_NOPS, FOUR_NOPS, FOUR_NOPS, FOUR_NOPS };
_Static_assert(sizeof(nops) == sizeof(struct grant_option), "as long as what they take the place of");

/* The listener is not to see the option: NOPs take its place, so that no length changes. */
static __noinline bool blank_proof(struct __sk_buff *skb, const struct packet *packet)
{
	struct grant_option found;
	__u32 at = packet->transport_offset + packet->transport_len - sizeof(found);
	__s64 difference;

	if (bpf_skb_load_bytes(skb, at, &found, sizeof(found)))
		return false;
	difference = bpf_csum_diff((__u32 *)&found, sizeof(found), (__u32 *)nops, sizeof(nops), 0);
	return !bpf_skb_store_bytes(skb, at, nops, sizeof(nops), 0) &&
	       !bpf_l4_csum_replace(skb, packet->transport_offset + TCP_CHECK_OFFSET, 0, difference, 0);
}
