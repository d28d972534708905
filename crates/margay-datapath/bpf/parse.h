/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
#pragma once

#define IP_DF 0x4000
#define IP_FRAGMENT_MASK 0x3fff
#define TCP_FIN 0x01
#define TCP_SYN 0x02
#define TCP_RST 0x04
#define TCP_ACK 0x10

/* A TCP or UDP packet whose headers are plain: no IPv4 options, no IPv6 extension headers, no fragment. */
struct packet {
	struct app_key key; /* as its headers have it */
	__u32 ip_offset;
	__u32 transport_offset;
	__u32 transport_len; /* header and payload */
	__u32 payload_len;
	__u32 sequence; /* host byte order, as are the next two */
	__u32 acknowledgement;
	__u16 window;
	__u8 tcp_flags;
	__u8 traffic_class;
	__u8 hop_limit;
	bool is_v4;
	bool no_checksum; /* UDP over IPv4 without one */
	bool is_fresh; /* of a flow that the agent does not know yet (grant.h) */
};

/* An address by words. */
#define words(address) ((__u32 *)(address))

/* Whether the first bytes can be read, if need be after the kernel has put them together. */
static __always_inline bool is_linear(struct __sk_buff *skb, __u32 len)
{
	if ((void *)(long)skb->data + len <= (void *)(long)skb->data_end)
		return true;
	return !bpf_skb_pull_data(skb, len);
}

static __always_inline bool parse_transport(struct __sk_buff *skb, struct packet *packet, __u32 len)
{
	__u32 need = packet->key.protocol == IPPROTO_TCP ? sizeof(struct tcphdr) : sizeof(struct udphdr);
	__u32 header_len;
	void *data, *end;

	if (!is_linear(skb, packet->transport_offset + need))
		return false;
	data = (void *)(long)skb->data;
	end = (void *)(long)skb->data_end;
	data += packet->transport_offset;
	if (packet->key.protocol == IPPROTO_TCP) {
		struct tcphdr *tcp = data;

		if ((void *)(tcp + 1) > end)
			return false;
		header_len = tcp->doff * 4;
		packet->key.source_port = tcp->source;
		packet->key.destination_port = tcp->dest;
		packet->sequence = bpf_ntohl(tcp->seq);
		packet->acknowledgement = bpf_ntohl(tcp->ack_seq);
		packet->window = bpf_ntohs(tcp->window);
		packet->tcp_flags = ((__u8 *)tcp)[13];
	} else {
		struct udphdr *udp = data;

		if ((void *)(udp + 1) > end)
			return false;
		header_len = sizeof(*udp);
		packet->key.source_port = udp->source;
		packet->key.destination_port = udp->dest;
		packet->no_checksum = packet->is_v4 && udp->check == 0;
	}
	if (len < header_len)
		return false;
	packet->transport_len = len;
	packet->payload_len = len - header_len;
	return true;
}

static __always_inline bool parse_v4(struct __sk_buff *skb, struct packet *packet)
{
	struct iphdr *ip;
	__u32 len;

	if (!is_linear(skb, packet->ip_offset + sizeof(*ip)))
		return false;
	ip = (void *)(long)skb->data + packet->ip_offset;
	if ((void *)(ip + 1) > (void *)(long)skb->data_end)
		return false;
	if (ip->version != 4 || ip->ihl != 5 || bpf_ntohs(ip->frag_off) & IP_FRAGMENT_MASK)
		return false;
	packet->key.protocol = ip->protocol;
	packet->traffic_class = ip->tos;
	packet->hop_limit = ip->ttl;
	packet->is_v4 = true;
	words(packet->key.source)[2] = words(packet->key.destination)[2] = bpf_htonl(0xffff);
	words(packet->key.source)[3] = ip->saddr;
	words(packet->key.destination)[3] = ip->daddr;
	packet->transport_offset = packet->ip_offset + sizeof(*ip);
	len = bpf_ntohs(ip->tot_len);
	/* Super-packets of over 64 KiB have none. */
	if (!len)
		len = skb->len - packet->ip_offset;
	return len >= sizeof(*ip) && parse_transport(skb, packet, len - sizeof(*ip));
}

static __always_inline bool parse_v6(struct __sk_buff *skb, struct packet *packet)
{
	struct ipv6hdr *ip;
	__u32 len;

	if (!is_linear(skb, packet->ip_offset + sizeof(*ip)))
		return false;
	ip = (void *)(long)skb->data + packet->ip_offset;
	if ((void *)(ip + 1) > (void *)(long)skb->data_end)
		return false;
	if (ip->version != 6)
		return false;
	packet->key.protocol = ip->nexthdr;
	packet->traffic_class = ip->priority << 4 | ip->flow_lbl[0] >> 4;
	packet->hop_limit = ip->hop_limit;
	__builtin_memcpy(packet->key.source, &ip->saddr, 32);
	packet->transport_offset = packet->ip_offset + sizeof(*ip);
	len = bpf_ntohs(ip->payload_len);
	if (!len)
		len = skb->len - packet->transport_offset;
	return parse_transport(skb, packet, len);
}

/* False for everything that the fast path does not take. */
static __always_inline bool parse(struct __sk_buff *skb, __u32 ip_offset, struct packet *packet)
{
	packet->ip_offset = ip_offset;
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if (!parse_v4(skb, packet))
			return false;
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		if (!parse_v6(skb, packet))
			return false;
	} else {
		return false;
	}
	return packet->key.protocol == IPPROTO_TCP || packet->key.protocol == IPPROTO_UDP;
}
