/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
 *
 * New addresses on a packet, and the checksums that follow (RFC 1624): what was wrong on arrival stays wrong.
 */
#pragma once

enum checksum {
	CHECKSUM_NONE, /* UDP over IPv4 without one */
	CHECKSUM_COMPLETE,
	CHECKSUM_PARTIAL, /* of the pseudo header alone; whoever sends the packet completes it */
	CHECKSUM_UNKNOWN,
};

static __always_inline __u64 sum_of_words(const word32 *words, __u32 count)
{
	__u64 sum = 0;
	__u32 at;

	_Pragma("unroll") for (at = 0; at < count; at++) sum += words[at];
	return sum;
}

/* Of what the router changes in the message. */
static __always_inline __u64 sum_of_changed(const struct resolvable *sal)
{
	return sum_of_words((const void *)sal + CHANGED_OFFSET, CHANGED_LEN / 4) + sum_of_words(sal->hop_tag, 2);
}

/* What is to be added to a sum when what `before` is the sum of becomes what `after` is the sum of. */
static __always_inline __u64 difference(__u64 before, __u64 after)
{
	return after + (__u16)~fold(before);
}

/* Of two addresses as the pseudo header has them. */
static __always_inline __u64 sum_of_pair(const word32 *source, const word32 *destination, bool is_v4)
{
	if (is_v4)
		return (__u64)source[3] + destination[3];
	return sum_of_words(source, 4) + sum_of_words(destination, 4);
}

static __always_inline __u64 sum_of_pseudo_header(__u64 pair, const struct datagram *datagram)
{
	return pair + bpf_htons(IPPROTO_UDP) + bpf_htons(datagram->sal_len + sizeof(struct udphdr));
}

/* Whether a datagram's checksum is that of all its bytes. They are read by pieces: the verifier wants lengths that it
 * knows. Where the rest begins is reckoned anew, so that it looks at that once, and not once for each number of pieces.
 */
#define PIECE 64
#define PIECES 64 /* a power of two */
_Static_assert(PIECES * PIECE >= 2 * SYN_LEN + sizeof(struct udphdr), "room for all that is looked at");
static __always_inline bool is_complete(const void *udp, const void *end, const struct datagram *datagram, __u64 sum)
{
	__u32 len = datagram->sal_len + sizeof(struct udphdr), pieces = len / PIECE, at;
	const void *piece = udp;

	for (at = 0; at < PIECES; at++) {
		if (at >= pieces || piece + PIECE > end)
			break;
		sum += sum_of_words(piece, PIECE / 4);
		piece += PIECE;
	}
	pieces &= PIECES - 1;
	piece = udp + pieces * PIECE;
	len %= PIECE;
	for (at = 0; at < PIECE / 2; at++) {
		if (len < 2 || piece + 2 > end)
			break;
		sum += *(const __u16 *)piece;
		piece += 2;
		len -= 2;
	}
	if (len == 1 && piece + 1 <= end)
		sum += bpf_htons((__u16)(*(const __u8 *)piece << 8));
	return fold(sum) == 0xffff;
}

/* A sender on this machine leaves it to the interface to complete a checksum, and the packet may never see one that
 * does. Such a checksum is the sum of the pseudo header; of others, one in 65,536 is, too.
 */
static __always_inline enum checksum checksum_of(const void *data, const void *end, const struct datagram *datagram,
						  bool is_v4, bool in_buffer)
{
	const struct udphdr *udp = data + SAL_OFFSET(is_v4) - sizeof(*udp);
	__u64 sum;

	if ((const void *)(udp + 1) > end)
		return CHECKSUM_UNKNOWN;
	if (!udp->check)
		return is_v4 ? CHECKSUM_NONE : CHECKSUM_UNKNOWN;
	sum = sum_of_pseudo_header(sum_of_pair(datagram->source, datagram->destination, is_v4), datagram);
	if (fold(sum) != udp->check)
		return CHECKSUM_COMPLETE;
	/* Without its buffer, a packet's checksum cannot be completed any more. */
	if (!in_buffer || is_complete(udp, end, datagram, sum))
		return CHECKSUM_UNKNOWN;
	return CHECKSUM_PARTIAL;
}

static __always_inline void write_checksum(struct udphdr *udp, enum checksum checksum, __u64 pseudo, __u64 changed)
{
	__u16 value;

	if (checksum == CHECKSUM_NONE)
		return;
	if (checksum == CHECKSUM_PARTIAL) {
		udp->check = fold(pseudo);
		return;
	}
	value = ~fold((__u16)~udp->check + changed);
	udp->check = value ? value : 0xffff;
}

/* From this host to the next hop. */
static __always_inline bool readdress(void *data, void *end, const struct datagram *datagram, bool is_v4,
				      const struct hop_version *to, enum checksum checksum, __u64 changed)
{
	const word32 *local = (const word32 *)to->local, *remote = (const word32 *)to->remote;
	struct udphdr *udp = data + SAL_OFFSET(is_v4) - sizeof(*udp);
	struct ethhdr *ethernet = data;
	__u64 pair, ports;

	if ((void *)(udp + 1) > end || data + sizeof(*ethernet) + sizeof(struct ipv6hdr) > end)
		return false;
	pair = sum_of_pair(local, remote, is_v4);
	changed += difference(sum_of_pair(datagram->source, datagram->destination, is_v4), pair);
	ports = difference((__u64)udp->source + udp->dest, (__u64)sal_port + to->remote_port);
	write_checksum(udp, checksum, sum_of_pseudo_header(pair, datagram), changed + ports);
	udp->source = sal_port;
	udp->dest = to->remote_port;
	if (is_v4) {
		struct iphdr *ip = data + sizeof(*ethernet);

		/* A link further on may be narrower, and nobody here would hear of it: it may cut the packet. */
		ip->frag_off = 0;
		ip->id = (__u16)((const struct resolvable *)(data + SAL_OFFSET(true)))->nonce[1];
		ip->ttl = TTL;
		ip->saddr = local[3];
		ip->daddr = remote[3];
		ip->check = 0;
		ip->check = ~fold(sum_of_header(ip));
	} else {
		struct ipv6hdr *ip = data + sizeof(*ethernet);

		ip->hop_limit = TTL;
		write_words(ip->saddr.in6_u.u6_addr32, local);
		write_words(ip->daddr.in6_u.u6_addr32, remote);
	}
	__builtin_memcpy(ethernet->h_dest, to->remote_mac, 6);
	__builtin_memcpy(ethernet->h_source, to->local_mac, 6);
	return true;
}
