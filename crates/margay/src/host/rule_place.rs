//! Where Margay's policy rules stand among those of others: after the table of this host's own addresses, and before
//! all else. A VPN's rule sends whatever it is asked for into its tunnel, virtual addresses among it (decision 0047).

use std::net::IpAddr;

use margay_core::{BITS_V4, BITS_V6, Ranges};

use super::netlink::{ListedRule, Rule};

/// Of the rule by which the responder's answers go to containers; before the other.
pub const RESPONDER_PRIORITY: u32 = 500;
/// Of the rules that lead to `sal0`.
pub const PRIORITY: u32 = 501;
/// Rules of Margay's stand at so many priorities.
const SLOTS: u32 = PRIORITY - RESPONDER_PRIORITY + 1;
/// The kernel's table of this host's own addresses.
const LOCAL_TABLE: u32 = 255;

/// Whether Margay has made a rule, where `own` is one of its virtual addresses: no rule of others is about those alone.
fn is_own(listed: &ListedRule, own: IpAddr) -> bool {
    let Some(rule) = listed.rule else { return false };
    rule.about().is_some_and(|address| is_of_one_range(address, own))
}

/// Whether two addresses are in the same range of virtual addresses, if either is in one.
fn is_of_one_range(one: IpAddr, other: IpAddr) -> bool {
    match (one, other) {
        (IpAddr::V4(one), IpAddr::V4(other)) => (one.to_bits() ^ other.to_bits()) >> (32 - BITS_V4) == 0,
        (IpAddr::V6(one), IpAddr::V6(other)) => (one.to_bits() ^ other.to_bits()) >> (128 - BITS_V6) == 0,
        _ => false,
    }
}

/// The priority of the first rule that looks into the table of own addresses: what came before it would not be
/// delivered here.
fn floor(is_v4: bool, rules: &[ListedRule]) -> u32 {
    let local = rules.iter().filter(|rule| rule.is_v4 == is_v4 && rule.table == Some(LOCAL_TABLE));
    local.map(|rule| rule.priority).min().unwrap_or(0)
}

/// At which priority a rule is to stand that stands at `rule.priority` where nobody is in the way. Equal ones come in
/// the order in which they were made.
pub fn place(rule: &Rule, rules: &[ListedRule]) -> u32 {
    let floor = floor(rule.is_v4(), rules);
    let is_own = |other: &ListedRule| rule.about().is_some_and(|own| is_own(other, own));
    let others = rules.iter().filter(|other| other.is_v4 == rule.is_v4() && !is_own(other) && other.priority > floor);
    let first = others.map(|other| other.priority).min().unwrap_or(u32::MAX);
    let begin = RESPONDER_PRIORITY.min(first.saturating_sub(SLOTS)).max(floor.saturating_add(1));
    begin + rule.priority.saturating_sub(RESPONDER_PRIORITY)
}

/// Rules of others that are asked before one of Margay's, and that it cannot go before.
pub fn before(rules: &[ListedRule], ranges: Ranges) -> Vec<&ListedRule> {
    let is_own =
        |rule: &ListedRule| is_own(rule, if rule.is_v4 { ranges.host_v4().into() } else { ranges.host_v6().into() });
    let is_before = |other: &&ListedRule| {
        let own = rules.iter().filter(|rule| rule.is_v4 == other.is_v4 && is_own(rule)).map(|rule| rule.priority).max();
        !is_own(other) && other.table != Some(LOCAL_TABLE) && own.is_some_and(|own| other.priority < own)
    };
    rules.iter().filter(is_before).collect()
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::host::netlink::Block;

    fn other(priority: u32, table: u32) -> ListedRule {
        ListedRule { priority, is_v4: true, table: Some(table), rule: None }
    }

    fn own(priority: u32) -> Rule {
        let from = Some(Block { address: Ranges::USUAL.host_v4().into(), bits: 32 });
        Rule { priority, from, to: None, source_port: None, table: 54_324 }
    }

    fn listed(rule: Rule) -> ListedRule {
        ListedRule { priority: rule.priority, is_v4: true, table: Some(rule.table), rule: Some(rule) }
    }

    #[test]
    fn rules_stand_before_those_of_a_vpn_and_after_own_addresses() {
        let usual = [other(0, LOCAL_TABLE), other(32_766, 254), other(32_767, 253)];
        for (more, expected) in [
            (vec![], [500, 501]),
            (vec![other(5_270, 52)], [500, 501]),
            (vec![other(499, 51_820)], [497, 498]),
            (vec![other(501, 52), listed(own(497))], [499, 500]),
            // Others of another family, and those that come before this host's own addresses, are not in the way.
            (vec![ListedRule { is_v4: false, ..other(3, 9) }], [500, 501]),
            // No room: as near as it goes, and not before own addresses.
            (vec![other(1, 52)], [1, 2]),
        ] {
            let rules = [usual.to_vec(), more].concat();
            let found = [RESPONDER_PRIORITY, PRIORITY].map(|priority| place(&own(priority), &rules));
            assert_eq!(found, expected, "{rules:?}");
        }
        let moved = [other(5, 7), other(100, LOCAL_TABLE), other(32_766, 254)];
        assert_eq!(place(&own(PRIORITY), &moved), 501);
        let moved = [other(1_000, LOCAL_TABLE), other(32_766, 254)];
        assert_eq!(place(&own(PRIORITY), &moved), 1_002);
    }

    #[test]
    fn who_is_before_is_named() {
        let rules = [other(0, LOCAL_TABLE), other(1, 52), listed(own(2)), other(32_766, 254)];
        assert_eq!(before(&rules, Ranges::USUAL), [&rules[1]]);
        assert_eq!(before(&rules[1..2], Ranges::USUAL), Vec::<&ListedRule>::new(), "nothing of ours");
    }
}
