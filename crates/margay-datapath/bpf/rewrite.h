/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
#pragma once

/* Whether an address of four words is a v4-mapped one. */
static __always_inline bool is_mapped(const __u32 address[4])
{
	return !address[0] && !address[1] && address[2] == bpf_htonl(0xffff);
}

static __always_inline __u16 fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return (sum & 0xffff) + (sum >> 16);
}

/* What a ones' complement sum grows by when `old` gives way to `new` (RFC 1624). */
static __always_inline __u64 growth(__u32 old, __u32 new)
{
	return (__u64)(__u32)~old + new;
}

/* How the checksum of a packet stands; the program's own context does not say. */
#define CHECKSUM_COMPLETE 2
#define CHECKSUM_PARTIAL 3

struct sk_buff___margay {
	__u8 ip_summed : 2;
} __attribute__((preserve_access_index));

extern void *bpf_cast_to_kern_ctx(void *) __ksym;

static __always_inline __u8 checksum_state(struct __sk_buff *skb)
{
	struct sk_buff___margay *kernel = bpf_cast_to_kern_ctx(skb);

	return BPF_CORE_READ_BITFIELD(kernel, ip_summed);
}

/* A TCP header up to its checksum. */
struct tcp_head {
	__u16 source;
	__u16 destination;
	__u32 middle[3]; /* stays as it is */
	__u16 check;
};

struct udp_head {
	__u16 source;
	__u16 destination;
	__u16 len; /* stays as it is */
	__u16 check;
};

/* What is written over an IPv4 packet from the IP checksum on, and over an IPv6 packet from its addresses on: all that
 * changes lies in one piece.
 */
struct v4_tail {
	__u16 zero; /* keeps the rest aligned */
	__u16 check;
	__u32 source;
	__u32 destination;
	union {
		struct tcp_head tcp;
		struct udp_head udp;
	};
};

struct v6_tail {
	__u32 source[4];
	__u32 destination[4];
	union {
		struct tcp_head tcp;
		struct udp_head udp;
	};
};

#define TCP_HEAD_LEN 18
#define UDP_HEAD_LEN 8

/* A transport checksum after what it covers has grown. A partial one is of the pseudo-header alone. */
static __always_inline __u16 grown(__u16 check, __u64 addresses, __u64 ports, bool is_partial)
{
	return is_partial ? fold(check + addresses) : ~fold((__u16)~check + addresses + ports);
}

/* Other addresses of the same family and other ports, in a packet whose checksum is complete in the header, or partial:
 * then it stays so. The helpers that do the same one by one cost more (decision 0010). The packet is not written to
 * directly: then the kernel would make every packet's headers its own before the program runs, those of others, too.
 */
static __always_inline bool rewrite_head(struct __sk_buff *skb, const struct packet *packet, const __u32 source[4],
					 const __u32 destination[4], __u16 source_port, __u16 destination_port,
					 bool is_partial)
{
	bool is_udp = packet->key.protocol == IPPROTO_UDP;
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	const __u32 *old = words(packet->key.source);
	/* The verifier has forgotten how small the offsets are. */
	void *transport = data + (packet->transport_offset & 0xff);
	struct iphdr *ip = data + (packet->ip_offset & 0xff);
	struct tcphdr *tcp = transport;
	struct udphdr *udp = transport;
	struct v4_tail v4 = {};
	struct v6_tail v6 = {};
	__u64 addresses, ports;
	__u32 head_len;

	if ((void *)(ip + 1) > end || (void *)(udp + 1) > end)
		return false;
	if (packet->is_v4) {
		addresses = growth(old[3], source[3]) + growth(old[7], destination[3]);
		v4.check = ~fold((__u16)~ip->check + addresses);
		v4.source = source[3];
		v4.destination = destination[3];
	} else {
		addresses = growth(old[0], source[0]) + growth(old[1], source[1]) + growth(old[2], source[2]) +
			    growth(old[3], source[3]) + growth(old[4], destination[0]) + growth(old[5], destination[1]) +
			    growth(old[6], destination[2]) + growth(old[7], destination[3]);
		__builtin_memcpy(v6.source, source, 16);
		__builtin_memcpy(v6.destination, destination, 16);
	}
	ports = growth(packet->key.source_port, source_port) + growth(packet->key.destination_port, destination_port);
	if (is_udp) {
		struct udp_head *head = packet->is_v4 ? &v4.udp : &v6.udp;

		head->source = source_port;
		head->destination = destination_port;
		head->len = udp->len;
		head->check = packet->no_checksum ? 0 : grown(udp->check, addresses, ports, is_partial);
		/* Zero says that there is none (RFC 768). */
		if (!head->check && !packet->no_checksum && !is_partial)
			head->check = 0xffff;
		head_len = UDP_HEAD_LEN;
	} else {
		struct tcp_head *head = packet->is_v4 ? &v4.tcp : &v6.tcp;

		if ((void *)(tcp + 1) > end)
			return false;
		head->source = source_port;
		head->destination = destination_port;
		__builtin_memcpy(head->middle, &tcp->seq, sizeof(head->middle));
		head->check = grown(tcp->check, addresses, ports, is_partial);
		head_len = TCP_HEAD_LEN;
	}
	if (packet->is_v4)
		return !bpf_skb_store_bytes(skb, packet->ip_offset + 10, &v4.check, 10 + head_len, 0);
	return !bpf_skb_store_bytes(skb, packet->ip_offset + 8, &v6, 32 + head_len, 0);
}

/* Changes what the transport checksum covers of the IP header, and the ports. A partial checksum stays partial, with
 * the right pseudo-header, and offloads go on (DESIGN §2). Length and protocol count the same in both families'
 * pseudo-headers. `pseudo_header`: BPF_F_PSEUDO_HDR where the card's sum over the packet, if there is one, does not
 * stay the same by itself.
 */
static __always_inline bool rewrite_transport(struct __sk_buff *skb, const struct packet *packet, __s64 difference,
					      __u16 source_port, __u16 destination_port, __u64 pseudo_header)
{
	bool is_udp = packet->key.protocol == IPPROTO_UDP;
	__u32 check_offset = packet->transport_offset + (is_udp ? 6 : 16);
	__u64 mangled = is_udp ? BPF_F_MARK_MANGLED_0 : 0;
	__u32 old_ports = (__u32)packet->key.source_port | (__u32)packet->key.destination_port << 16;
	__u32 new_ports = (__u32)source_port | (__u32)destination_port << 16;

	if (!packet->no_checksum) {
		if (bpf_l4_csum_replace(skb, check_offset, 0, difference, pseudo_header | mangled))
			return false;
		difference = bpf_csum_diff(&old_ports, 4, &new_ports, 4, 0);
		if (bpf_l4_csum_replace(skb, check_offset, 0, difference, mangled))
			return false;
	}
	return !bpf_skb_store_bytes(skb, packet->transport_offset, &new_ports, 4, 0);
}

/* An IPv4 header in the place of the IPv6 one. */
static __always_inline bool to_v4(struct __sk_buff *skb, struct packet *packet, const __u32 addresses[2])
{
	struct iphdr ip = {
		.version = 4,
		.ihl = 5,
		.tos = packet->traffic_class,
		.tot_len = bpf_htons(sizeof(ip) + packet->transport_len),
		.frag_off = bpf_htons(IP_DF),
		.ttl = packet->hop_limit,
		.protocol = packet->key.protocol,
		.saddr = addresses[0],
		.daddr = addresses[1],
	};

	if (bpf_skb_change_proto(skb, bpf_htons(ETH_P_IP), 0))
		return false;
	ip.check = ~fold((__u32)bpf_csum_diff(NULL, 0, (__be32 *)&ip, sizeof(ip), 0));
	packet->transport_offset = packet->ip_offset + sizeof(ip);
	return !bpf_skb_store_bytes(skb, packet->ip_offset, &ip, sizeof(ip), BPF_F_RECOMPUTE_CSUM);
}

/* An IPv6 header in the place of the IPv4 one. */
static __always_inline bool to_v6(struct __sk_buff *skb, struct packet *packet, const __u32 addresses[8])
{
	struct ipv6hdr ip = {
		.version = 6,
		.priority = packet->traffic_class >> 4,
		.flow_lbl = { packet->traffic_class << 4 },
		.payload_len = bpf_htons(packet->transport_len),
		.nexthdr = packet->key.protocol,
		.hop_limit = packet->hop_limit,
	};

	/* It has no way to say that there is no checksum (RFC 8200 §8.1). */
	if (packet->no_checksum || bpf_skb_change_proto(skb, bpf_htons(ETH_P_IPV6), 0))
		return false;
	__builtin_memcpy(&ip.saddr, addresses, 32);
	packet->transport_offset = packet->ip_offset + sizeof(ip);
	return !bpf_skb_store_bytes(skb, packet->ip_offset, &ip, sizeof(ip), BPF_F_RECOMPUTE_CSUM);
}

/* Gives the packet other addresses (v4-mapped), of whichever family, and ports. */
static __always_inline bool rewrite(struct __sk_buff *skb, struct packet *packet, const __u32 source[4],
				    const __u32 destination[4], __u16 source_port, __u16 destination_port)
{
	bool was_v4 = packet->is_v4, is_v4 = is_mapped(source);
	__u64 pseudo_header = BPF_F_PSEUDO_HDR;
	__u32 old[8], new[8];
	__s64 difference;

	if (was_v4 == is_v4) {
		__u8 state = checksum_state(skb);

		/* The card's sum over the whole packet would have to change with it. */
		if (state != CHECKSUM_COMPLETE)
			return rewrite_head(skb, packet, source, destination, source_port, destination_port,
					    state == CHECKSUM_PARTIAL);
	}
	__builtin_memcpy(old, packet->key.source, 32);
	__builtin_memcpy(new, source, 16);
	__builtin_memcpy(new + 4, destination, 16);
	if (was_v4) {
		old[0] = old[3];
		old[1] = old[7];
	}
	if (is_v4) {
		new[0] = source[3];
		new[1] = destination[3];
	}
	if (was_v4 && is_v4) {
		difference = bpf_csum_diff(old, 8, new, 8, 0);
		if (bpf_skb_store_bytes(skb, packet->ip_offset + 12, new, 8, 0) ||
		    bpf_l3_csum_replace(skb, packet->ip_offset + 10, 0, difference, 0))
			return false;
	} else if (!was_v4 && !is_v4) {
		difference = bpf_csum_diff(old, 32, new, 32, 0);
		/* What the addresses grow by, the transport checksum shrinks by: there is no checksum of the header,
		 * as IPv4 has, that makes up for the addresses.
		 */
		pseudo_header = 0;
		if (bpf_skb_store_bytes(skb, packet->ip_offset + 8, new, 32, 0))
			return false;
	} else if (is_v4) {
		difference = bpf_csum_diff(old, 32, new, 8, 0);
		if (!to_v4(skb, packet, new))
			return false;
	} else {
		difference = bpf_csum_diff(old, 8, new, 32, 0);
		if (!to_v6(skb, packet, new))
			return false;
	}
	return rewrite_transport(skb, packet, difference, source_port, destination_port, pseudo_header);
}

/* Whether a packet would not fit the path with the addresses that it gets. */
static __always_inline bool is_too_large(struct __sk_buff *skb, const struct packet *packet, const struct path_entry *path)
{
	__u32 ip_len = is_mapped((const __u32 *)path->remote) ? sizeof(struct iphdr) : sizeof(struct ipv6hdr);
	__u32 headers = ip_len + packet->transport_len - packet->payload_len;
	__u32 len = headers + (skb->gso_size ? skb->gso_size : packet->payload_len);

	return len > path->mtu;
}
