/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
#pragma once

/* Whether an address of four words is a v4-mapped one. */
static __always_inline bool is_mapped(const __u32 address[4])
{
	return !address[0] && !address[1] && address[2] == bpf_htonl(0xffff);
}

static __always_inline __u16 fold(__s64 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

/* Changes what the transport checksum covers of the IP header, and the ports. A partial checksum stays partial, with the right
 * pseudo-header, and offloads go on (DESIGN §2). Length and protocol count the same in both families' pseudo-headers.
 */
static __always_inline bool rewrite_transport(struct __sk_buff *skb, const struct packet *packet, __s64 difference,
					      __u16 source_port, __u16 destination_port)
{
	bool is_udp = packet->protocol == IPPROTO_UDP;
	__u32 check_offset = packet->transport_offset + (is_udp ? 6 : 16);
	__u64 mangled = is_udp ? BPF_F_MARK_MANGLED_0 : 0;
	__u32 old_ports = (__u32)packet->source_port | (__u32)packet->destination_port << 16;
	__u32 new_ports = (__u32)source_port | (__u32)destination_port << 16;

	if (!packet->no_checksum) {
		if (bpf_l4_csum_replace(skb, check_offset, 0, difference, BPF_F_PSEUDO_HDR | mangled))
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
		.protocol = packet->protocol,
		.saddr = addresses[0],
		.daddr = addresses[1],
	};

	if (bpf_skb_change_proto(skb, bpf_htons(ETH_P_IP), 0))
		return false;
	ip.check = fold(bpf_csum_diff(NULL, 0, (__be32 *)&ip, sizeof(ip), 0));
	packet->transport_offset = packet->ip_offset + sizeof(ip);
	return !bpf_skb_store_bytes(skb, packet->ip_offset, &ip, sizeof(ip), 0);
}

/* An IPv6 header in the place of the IPv4 one. */
static __always_inline bool to_v6(struct __sk_buff *skb, struct packet *packet, const __u32 addresses[8])
{
	struct ipv6hdr ip = {
		.version = 6,
		.priority = packet->traffic_class >> 4,
		.flow_lbl = { packet->traffic_class << 4 },
		.payload_len = bpf_htons(packet->transport_len),
		.nexthdr = packet->protocol,
		.hop_limit = packet->hop_limit,
	};

	/* It has no way to say that there is no checksum (RFC 8200 §8.1). */
	if (packet->no_checksum || bpf_skb_change_proto(skb, bpf_htons(ETH_P_IPV6), 0))
		return false;
	__builtin_memcpy(&ip.saddr, addresses, 32);
	packet->transport_offset = packet->ip_offset + sizeof(ip);
	return !bpf_skb_store_bytes(skb, packet->ip_offset, &ip, sizeof(ip), 0);
}

/* Gives the packet other addresses (v4-mapped), of whichever family, and ports. */
static __always_inline bool rewrite(struct __sk_buff *skb, struct packet *packet, const __u32 source[4],
				    const __u32 destination[4], __u16 source_port, __u16 destination_port)
{
	bool was_v4 = packet->is_v4, is_v4 = is_mapped(source);
	__u32 old[8], new[8];
	__s64 difference;

	__builtin_memcpy(old, packet->source, 16);
	__builtin_memcpy(old + 4, packet->destination, 16);
	__builtin_memcpy(new, source, 16);
	__builtin_memcpy(new + 4, destination, 16);
	if (was_v4) {
		old[0] = packet->source[3];
		old[1] = packet->destination[3];
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
	return rewrite_transport(skb, packet, difference, source_port, destination_port);
}
