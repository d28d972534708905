//! What the kernel's counters count, for metrics and for the book.

/// The counters of the flow cache, those of its guard, and those of nftables in its place.
const OF_CACHE: &[(&str, &str)] = &[
    ("egress_packets", "Packets of programs that were rewritten and sent by the kernel"),
    ("ingress_packets", "Packets of peers that were rewritten and delivered by the kernel"),
    ("up_no_flow", "Packets on a flow port without an entry: given to the agent"),
    ("up_not_accepted", "Packets whose entry does not accept direct packets yet: given to the agent"),
    ("left_too_large", "Packets larger than their path takes: given to the agent"),
    ("left_stalled", "Packets whose flow was unanswered for too long: given to the agent"),
    ("left_no_path", "Packets without a record of their path: given to the agent"),
    ("drop_agent_dead", "Packets for the agent, dropped because there was none"),
    ("drop_rewrite", "Packets that the kernel refused to rewrite"),
    ("event_lost", "Events that did not fit into the ring; the agent finds what they say by a scan"),
    ("pinholes", "Datagrams without payload between agents, which open firewalls on the way"),
    ("too_big", "Messages of routers on the way that a packet was too large"),
    ("left_held", "Packets whose path is held: given to the agent"),
    ("drop_reset", "Resets by a path that is held, dropped"),
    ("taken", "Flows of grants that programs of this host opened"),
    ("opened", "Flows of grants that peers opened"),
    ("drop_unproved", "SYNs for a flow of a grant, or for an open flow, without proof"),
    ("drop_virtual_ingress", "Packets with a virtual address that came by a card"),
    ("drop_virtual_egress", "Packets with a virtual address, or with the tag of a box, that would have left by a card"),
    ("of_host", "Packets on a flow port that are none of Margay's: left to the host"),
    ("drop_rate", "Packets on a flow port without an entry, dropped because too many of these have come"),
    ("up_fragment", "Fragments of packets for a flow port: given to the agent"),
    ("undelivered", "Flows whose packets did not reach their program in place"),
    (
        "drop_socketless",
        "Segments that the host would have reset: of connections that wait for room at a listener, or that are over",
    ),
    ("drop_reset_of_host", "Resets that the host's own TCP would have sent to peers of flows"),
];

/// The counters of the service router.
const OF_ROUTER: &[(&str, &str)] = &[
    ("forwarded", "First packets forwarded"),
    ("drop_hop_limit", "First packets whose hop limit ran out"),
    ("drop_service", "First packets that a rule discards"),
    ("drop_no_device", "First packets whose interface is gone"),
    ("left_shape", "First packets that are no plain SYN: given to the agent"),
    ("left_no_route", "First packets without a rule, or with one that the agent decides by: given to the agent"),
    (
        "left_no_way",
        "First packets whose next hop is of the other family, or has no known neighbour: given to the agent",
    ),
    ("left_too_large", "First packets larger than the way takes: given to the agent"),
    (
        "left_check",
        "First packets that the agent sends from time to time, so that the kernel looks after the neighbour",
    ),
    ("left_checksum", "First packets whose checksum may be incomplete: given to the agent"),
    ("bad_hop_tag", "First packets with a wrong hop tag, forwarded as from a first router"),
    ("left_crowded", "First packets of a prefix that may have had no room in the table: given to the agent"),
];

/// What a counter of the flow cache counts.
pub fn of_cache(name: &str) -> &'static str {
    find(OF_CACHE, name)
}

/// What a counter of the service router counts.
pub fn of_router(name: &str) -> &'static str {
    find(OF_ROUTER, name)
}

/// All counters of the flow cache.
pub fn names_of_cache() -> impl Iterator<Item = &'static str> {
    OF_CACHE.iter().map(|(name, _)| *name)
}

/// All counters of the service router.
pub fn names_of_router() -> impl Iterator<Item = &'static str> {
    OF_ROUTER.iter().map(|(name, _)| *name)
}

fn find(table: &'static [(&str, &str)], name: &str) -> &'static str {
    table.iter().find(|(known, _)| *known == name).map_or("", |(_, meaning)| meaning)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn every_counter_has_a_meaning_and_nothing_else_has() {
        let of_cache: Vec<&str> =
            crate::kernel::layout::COUNTERS.iter().copied().chain(["drop_reset_of_host"]).collect();
        assert_eq!(names_of_cache().collect::<Vec<_>>(), of_cache);
        assert_eq!(names_of_router().collect::<Vec<_>>(), crate::service_router::layout::COUNTERS);
    }
}
