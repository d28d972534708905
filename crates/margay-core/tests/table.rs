//! The service table against a list that is searched from end to end.

use core::net::SocketAddr;

use margay_core::Instant;
use margay_core::name::{Prefix, ServiceId};
use margay_core::table::{Action, NextHop, Resolution, Rule, RuleId, ServiceTable, TableError};
use proptest::prelude::*;

const LIMIT: usize = 24;

/// Names that differ in few places, so that prefixes nest and collide often.
fn service() -> impl Strategy<Value = ServiceId> {
    (0_usize..4, 0_u8..4, 0_usize..4, any::<bool>()).prop_map(|(byte, value, other, end)| {
        let mut id = [0; 32];
        id[byte * 8] = value << 6;
        id[other * 8 + 7] |= 1;
        id[31] |= u8::from(end);
        ServiceId(id)
    })
}

fn prefix() -> impl Strategy<Value = Prefix> {
    let bits = prop_oneof![
        Just(0),
        Just(1),
        Just(2),
        Just(63),
        Just(64),
        Just(65),
        Just(96),
        Just(255),
        Just(256),
        0_u16..=256
    ];
    (service(), bits).prop_map(|(id, bits)| Prefix::new(id, bits))
}

#[derive(Clone, Debug)]
enum Step {
    Insert(Prefix, Rule),
    /// The n-th of the rules that are there, counted round.
    Remove(usize),
    /// A name, a sticky number, and which instances are usable, as bits.
    Resolve(ServiceId, u64, u8),
}

fn step() -> impl Strategy<Value = Step> {
    let rule = (0_u32..3, 0_u32..3, 0_u8..8).prop_map(|(priority, weight, n)| {
        let address = SocketAddr::new([10, 0, 0, n].into(), 54324);
        let hop = NextHop { address, host: None, router: false };
        Rule { priority, weight, action: if n == 7 { Action::Drop } else { Action::Forward(hop) } }
    });
    prop_oneof![
        3 => (prefix(), rule).prop_map(|(prefix, rule)| Step::Insert(prefix, rule)),
        1 => any::<usize>().prop_map(Step::Remove),
        4 => (service(), any::<u64>(), any::<u8>()).prop_map(|(id, sticky, usable)| Step::Resolve(id, sticky, usable)),
    ]
}

fn instance(action: &Action) -> u8 {
    match action {
        Action::Forward(NextHop { address: SocketAddr::V4(v4), .. }) => v4.ip().octets()[3],
        _ => 7,
    }
}

/// Bit by bit, as one would explain it.
fn covers(prefix: &Prefix, id: &ServiceId) -> bool {
    (0..usize::from(prefix.bits)).all(|bit| {
        let at = |id: &ServiceId| id.0[bit / 8] >> (7 - bit % 8) & 1;
        at(&prefix.id) == at(id)
    })
}

type Listed = (Prefix, RuleId, Rule);

/// The rules among which the table may choose: usable, longest prefix, then highest priority.
fn candidates(list: &[Listed], id: &ServiceId, usable: impl Fn(&Rule) -> bool) -> Vec<RuleId> {
    let fit = |(prefix, _, rule): &&Listed| covers(prefix, id) && rule.weight > 0 && usable(rule);
    let best = list.iter().filter(fit).map(|(prefix, _, rule)| (prefix.bits, rule.priority)).max();
    let is_best = |(prefix, _, rule): &&Listed| Some((prefix.bits, rule.priority)) == best;
    list.iter().filter(fit).filter(is_best).map(|(_, rule, _)| *rule).collect()
}

fn chosen(resolution: Resolution<'_>) -> Option<RuleId> {
    match resolution {
        Resolution::Forward(id, _)
        | Resolution::Demux(id, _)
        | Resolution::Box(id, _)
        | Resolution::Delay(id, _)
        | Resolution::Drop(id) => Some(id),
        Resolution::None => None,
    }
}

proptest! {
    #[test]
    fn the_table_agrees_with_a_naive_list(steps in proptest::collection::vec(step(), 1..120)) {
        let mut table = ServiceTable::new(LIMIT);
        let mut list: Vec<Listed> = Vec::new();
        let mut newest = RuleId(0);
        for step in steps {
            match step {
                Step::Insert(prefix, rule) => match table.insert(Instant::ZERO, prefix, rule.clone()) {
                    Ok(id) => {
                        prop_assert!(id > newest, "an identifier came twice");
                        newest = id;
                        list.push((prefix, id, rule));
                    }
                    Err(error) => {
                        prop_assert_eq!(error, TableError { limit: LIMIT });
                        prop_assert_eq!(list.len(), LIMIT);
                    }
                },
                Step::Remove(_) if list.is_empty() => prop_assert!(table.is_empty()),
                Step::Remove(n) => {
                    let (prefix, id, rule) = list.remove(n % list.len());
                    prop_assert_eq!(table.remove(id), Some((prefix, rule)));
                    prop_assert_eq!(table.remove(id), None);
                }
                Step::Resolve(id, sticky, bits) => {
                    let usable = |rule: &Rule| bits >> instance(&rule.action) & 1 == 1;
                    let wanted = candidates(&list, &id, usable);
                    match chosen(table.resolve(&id, sticky, usable)) {
                        Some(picked) => {
                            prop_assert!(wanted.contains(&picked), "{picked:?} is not among {wanted:?}");
                            prop_assert_eq!(chosen(table.resolve(&id, sticky, usable)), Some(picked));
                        }
                        None => prop_assert!(wanted.is_empty(), "none of {wanted:?} was taken"),
                    }
                    let longest = list.iter().filter(|(prefix, _, _)| covers(prefix, &id)).map(|(prefix, _, _)| prefix.bits).max();
                    let looked_up = table.lookup(&id).and_then(|set| set.iter().next().map(|(rule, _)| rule));
                    let bits_of = |rule: RuleId| list.iter().find(|(_, id, _)| *id == rule).map(|(prefix, _, _)| prefix.bits);
                    prop_assert_eq!(looked_up.and_then(bits_of), longest);
                }
            }
            prop_assert_eq!(table.len(), list.len());
            let mut listed: Vec<RuleId> = table.iter().map(|(_, id, _)| id).collect();
            listed.sort_unstable();
            let mut known: Vec<RuleId> = list.iter().map(|(_, id, _)| *id).collect();
            known.sort_unstable();
            prop_assert_eq!(listed, known);
        }
    }

    /// An instance that comes or goes moves only the flows that it gains or loses.
    #[test]
    fn a_change_of_the_set_disturbs_as_few_as_it_can(weights in proptest::collection::vec(1_u32..5, 2..9), gone in any::<prop::sample::Index>()) {
        let mut table = ServiceTable::new(LIMIT);
        let service = ServiceId([1; 32]);
        let mut ids = Vec::new();
        for (n, weight) in (0_u8..).zip(&weights) {
            let hop = NextHop { address: SocketAddr::new([10, 0, 0, n].into(), 1), host: None, router: false };
            let rule = Rule { priority: 1, weight: *weight, action: Action::Forward(hop) };
            ids.push(table.insert(Instant::ZERO, service.into(), rule).expect("room"));
        }
        let pick = |table: &ServiceTable, sticky: u64| chosen(table.resolve(&service, sticky, |_| true));
        let before: Vec<_> = (0..400).map(|sticky| pick(&table, sticky)).collect();
        let gone = ids[gone.index(ids.len())];
        let (prefix, rule) = table.remove(gone).expect("it is there");
        for (sticky, old) in (0..).zip(&before) {
            prop_assert!(*old == Some(gone) || pick(&table, sticky) == *old);
        }
        // It comes back under another number, and has the same flows again.
        let back = table.insert(Instant::ZERO, prefix, rule).expect("room");
        for (sticky, old) in (0..).zip(&before) {
            let wanted = if *old == Some(gone) { Some(back) } else { *old };
            prop_assert_eq!(pick(&table, sticky), wanted);
        }
    }
}
