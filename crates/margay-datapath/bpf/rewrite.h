/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
#pragma once

/* Gives the packet other addresses (v4-mapped) and ports. What the checksum covers is changed by its difference, so a partial
 * checksum stays partial, with the right pseudo-header, and offloads go on (DESIGN §2).
 */
static __always_inline bool rewrite(struct __sk_buff *skb, const struct packet *packet, const __u32 source[4],
				    const __u32 destination[4], __u16 source_port, __u16 destination_port)
{
	bool is_udp = packet->protocol == IPPROTO_UDP;
	__u32 check_offset = packet->transport_offset + (is_udp ? 6 : 16);
	__u64 mangled = is_udp ? BPF_F_MARK_MANGLED_0 : 0;
	__u32 old_ports = (__u32)packet->source_port | (__u32)packet->destination_port << 16;
	__u32 new_ports = (__u32)source_port | (__u32)destination_port << 16;
	__u32 old[8], new[8];
	__s64 difference;

	if (packet->is_v4) {
		old[0] = packet->source[3];
		old[1] = packet->destination[3];
		new[0] = source[3];
		new[1] = destination[3];
		difference = bpf_csum_diff(old, 8, new, 8, 0);
		if (bpf_skb_store_bytes(skb, packet->ip_offset + 12, new, 8, 0) ||
		    bpf_l3_csum_replace(skb, packet->ip_offset + 10, 0, difference, 0))
			return false;
	} else {
		__builtin_memcpy(old, packet->source, 16);
		__builtin_memcpy(old + 4, packet->destination, 16);
		__builtin_memcpy(new, source, 16);
		__builtin_memcpy(new + 4, destination, 16);
		difference = bpf_csum_diff(old, 32, new, 32, 0);
		if (bpf_skb_store_bytes(skb, packet->ip_offset + 8, new, 32, 0))
			return false;
	}
	if (!packet->no_checksum) {
		if (bpf_l4_csum_replace(skb, check_offset, 0, difference, BPF_F_PSEUDO_HDR | mangled))
			return false;
		difference = bpf_csum_diff(&old_ports, 4, &new_ports, 4, 0);
		if (bpf_l4_csum_replace(skb, check_offset, 0, difference, mangled))
			return false;
	}
	return !bpf_skb_store_bytes(skb, packet->transport_offset, &new_ports, 4, 0);
}
