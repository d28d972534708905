/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
#pragma once

#define VLAN_ID_MASK 0x0fff

/* The kernel has taken the outer tag off before it runs the programs of a card, and keeps it beside the packet; only
 * then it gives the packet to the sub-interface of that VLAN, whose own programs see it without the tag. Redirected
 * before, it would take the tag along: into the packet where it leaves by `sal0`, and as one of another host where it
 * comes in there.
 *
 * A tag of VLAN 0 is a priority alone, and the packet the card's own (IEEE 802.1Q §6.9.1): it goes on without.
 */
static __always_inline bool is_of_sub_interface(struct __sk_buff *skb)
{
	if (!skb->vlan_present)
		return false;
	return skb->vlan_tci & VLAN_ID_MASK || bpf_skb_vlan_pop(skb);
}
