/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
 *
 * Which packets are for this host's agent, and plain: no VLAN tag, no IP options or extension headers, no fragment,
 * whole in one buffer.
 */
#pragma once

enum shape {
	NOT_OURS,
	NOT_PLAIN,
	PLAIN,
};

static __always_inline enum shape parse_udp(const struct udphdr *udp, const void *end, struct datagram *datagram, __u32 len)
{
	if ((const void *)(udp + 1) > end || udp->dest != sal_port)
		return NOT_OURS;
	datagram->source_port = udp->source;
	datagram->sal_len = len - sizeof(*udp);
	/* Two datagrams that the kernel has put together would look like one. */
	if (bpf_ntohs(udp->len) != len || datagram->sal_len >= 2 * SYN_LEN)
		return NOT_PLAIN;
	return bpf_map_lookup_elem(&own_addresses, datagram->destination) ? PLAIN : NOT_OURS;
}

/* Folded into 16 bits. */
static __always_inline __u16 fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

static __always_inline __u64 sum_of_header(const struct iphdr *ip)
{
	const word32 *words = (const word32 *)ip;

	return (__u64)words[0] + words[1] + words[2] + words[3] + words[4];
}

static __always_inline enum shape parse_v4(const void *data, const void *end, struct datagram *datagram)
{
	const struct iphdr *ip = data + sizeof(struct ethhdr);
	__u32 len, first;

	if ((const void *)(ip + 1) > end || ip->protocol != IPPROTO_UDP)
		return NOT_OURS;
	if (ip->version != 4 || ip->ihl != 5 || ip->frag_off & bpf_htons(IP_FRAGMENT_MASK))
		return NOT_OURS;
	len = bpf_ntohs(ip->tot_len);
	if (len < sizeof(*ip) + sizeof(struct udphdr) || (const void *)ip + len > end)
		return NOT_OURS;
	/* Who cannot be answered: the kernel has its own ways with these. */
	first = bpf_ntohl(ip->saddr) >> 24;
	if (!first || first == 127 || first >= 224 || fold(sum_of_header(ip)) != 0xffff)
		return NOT_OURS;
	datagram->source[2] = datagram->destination[2] = bpf_htonl(0xffff);
	datagram->source[3] = ip->saddr;
	datagram->destination[3] = ip->daddr;
	datagram->ip_len = len;
	return parse_udp((const void *)(ip + 1), end, datagram, len - sizeof(*ip));
}

static __always_inline enum shape parse_v6(const void *data, const void *end, struct datagram *datagram)
{
	const struct ipv6hdr *ip = data + sizeof(struct ethhdr);
	const __u32 *source;
	__u32 len;

	if ((const void *)(ip + 1) > end || ip->version != 6 || ip->nexthdr != IPPROTO_UDP)
		return NOT_OURS;
	len = bpf_ntohs(ip->payload_len);
	if (len < sizeof(struct udphdr) || (const void *)(ip + 1) + len > end)
		return NOT_OURS;
	/* Multicast, link-local; unspecified, loopback and whatever stands for IPv4. */
	source = ip->saddr.in6_u.u6_addr32;
	if (ip->saddr.in6_u.u6_addr8[0] == 0xff || (source[0] & bpf_htonl(0xffc00000)) == bpf_htonl(0xfe800000) ||
	    !(source[0] | source[1]))
		return NOT_OURS;
	write_words(datagram->source, source);
	write_words(datagram->destination, ip->daddr.in6_u.u6_addr32);
	datagram->ip_len = sizeof(*ip) + len;
	return parse_udp((const void *)(ip + 1), end, datagram, len);
}
