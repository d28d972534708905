//! The program's table of prefixes when it grows, is crowded, and is made anew under packets. They need root, as
//! `test.rs` does.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use margay_core::name::{Prefix, ServiceId};
use margay_core::table::RuleId;

use super::test::{PASS, Rig, SERVICE, Syn, TX, address, forward, frame, own, place};
use crate::sample::{self, Checksum};

const ETHERNET: usize = 14;
/// Rules of a table that has a single chunk.
const FEW: u32 = 170;

/// The n-th name.
fn name(n: u32) -> ServiceId {
    let mut id = [0x11; 32];
    id[..4].copy_from_slice(&n.to_be_bytes());
    ServiceId(id)
}

/// To the n-th of the names.
fn syn(n: u32) -> Vec<u8> {
    Syn::to(name(n)).bytes()
}

/// Rules for names, each of which leads to one of 200 next hops.
fn add(rig: &mut Rig, numbers: impl Iterator<Item = u32>, bits: u16) -> Vec<RuleId> {
    numbers.map(|n| rig.rule(Prefix::new(name(n), bits), 1, 1, forward((n % 200) as u8, true, None))).collect()
}

/// Whose the packet is that came out.
fn sent_to(out: &[u8]) -> std::net::SocketAddr {
    sample::see(&out[ETHERNET..]).tuple.destination
}

#[test]
fn a_table_grows_with_its_prefixes_and_shrinks() {
    let Some(mut rig) = Rig::of_size(1 << 14) else { return };
    let from = address("10.1.0.50:40000");
    let small = rig.router.table_bytes();
    let first = add(&mut rig, 0..1, 256)[0];
    rig.rule(Prefix::default(), 1, 1, forward(250, true, None));
    rig.sync();
    assert_eq!(rig.compare(from, &syn(0)), TX);
    let rules = add(&mut rig, 1..2001, 96);
    rig.sync();
    let large = rig.router.table_bytes();
    assert!(large > small, "{large} bytes, {small} before");
    for n in (0..2001).step_by(47).chain([5000]) {
        assert_eq!(rig.compare(from, &syn(n)), TX, "{n}");
    }
    // Two of each comparison: what was done before the table grew is not forgotten.
    assert_eq!(rig.router.usage(first).packets, 4);
    rules.into_iter().for_each(|rule| assert!(rig.sal.remove_rule(rule)));
    rig.sync();
    // Cells are not used again: it is when they have run out that the table is made anew, and small.
    for n in 0..2000 {
        let rule = add(&mut rig, 10_000 + n..10_001 + n, 64)[0];
        rig.sync_routes();
        assert!(rig.sal.remove_rule(rule));
        rig.sync_routes();
    }
    assert!(rig.router.table_bytes() < large);
    assert_eq!(rig.compare(from, &syn(0)), TX);
    assert_eq!((rig.router.usage(first).packets, rig.counted()), (6, vec!["forwarded"]));
}

#[test]
fn where_a_table_is_crowded_no_shorter_prefix_answers() {
    let Some(mut rig) = Rig::of_size(FEW) else { return };
    let from = address("10.1.0.50:40000");
    rig.rule(Prefix::default(), 1, 1, forward(250, true, None));
    // Those beyond the limit of rules have no next hop here, but must not be missed.
    let rules = add(&mut rig, 0..700, 256);
    rig.sync();
    let verdicts: Vec<u32> = (0..700).map(|n| rig.compare(from, &syn(n))).collect();
    let sent = verdicts.iter().filter(|verdict| **verdict == TX).count();
    assert!((100..200).contains(&sent), "{sent} were sent on");
    assert_eq!(rig.counted(), ["forwarded", "left_no_route", "left_crowded"]);
    assert_eq!(rig.compare(from, &Syn::to(SERVICE).bytes()), TX, "the filter knows that it is not among them");
    rules.into_iter().for_each(|rule| assert!(rig.sal.remove_rule(rule)));
    rig.sync();
    // The next one finds the table full of what is gone.
    let rule = add(&mut rig, 0..1, 256);
    rig.sync();
    for n in 0..700 {
        assert_eq!(rig.compare(from, &syn(n)), TX, "{n}");
    }
    assert_eq!(rig.router.usage(rule[0]).packets, 2);
}

#[test]
fn a_prefix_that_comes_back_is_another_rules() {
    let Some(mut rig) = Rig::of_size(FEW) else { return };
    let from = address("10.1.0.50:40000");
    rig.rule(Prefix::default(), 1, 1, forward(250, true, None));
    for round in 0..3 {
        let rule = rig.rule(name(0).into(), 1, 1, forward(20 + round, true, None));
        rig.sync();
        assert_eq!((rig.compare(from, &syn(0)), rig.router.usage(rule).packets), (TX, 2));
        assert!(rig.sal.remove_rule(rule));
        rig.sync();
        assert_eq!(rig.compare(from, &syn(0)), TX, "by the shorter one");
        let credits: Vec<_> =
            rig.router.take_credits().into_iter().map(|(rule, usage)| (rule, usage.packets)).collect();
        assert_eq!(credits, [(rule, 2)]);
    }
}

/// Other prefixes come and go, and the table is made anew several times: a name's longest prefix is there at all times.
#[test]
fn packets_find_their_prefix_while_others_come_and_go() {
    let Some(mut rig) = Rig::of_size(1 << 14) else { return };
    rig.rule(Prefix::default(), 1, 1, forward(250, true, None));
    rig.rule(Prefix::new(name(7), 64), 1, 1, forward(249, true, None));
    rig.rule(name(7).into(), 1, 1, forward(7, true, None));
    rig.sync();
    let packet = frame(address("10.1.0.50:40000"), own(true), &syn(7), Checksum::Complete);
    let (is_over, seen) = (AtomicBool::new(false), AtomicU32::new(0));
    let Rig { router, sal, now } = &mut rig;
    std::thread::scope(|scope| {
        let router = &*router;
        let reader = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let (verdict, out) = super::test::run_on(router, &packet);
                // One in five seconds is for the kernel to look after the next hop.
                assert!(verdict == PASS || sent_to(&out) == place(7, true));
                seen.fetch_add(u32::from(verdict == TX), Ordering::Relaxed);
            }
        });
        for round in 0..4_u32 {
            let of = |n| Prefix::new(name(1000 + 5000 * round + n), [96, 128, 256][n as usize % 3]);
            let rule =
                |n| margay_core::table::Rule { priority: 1, weight: 1, action: forward((n % 200) as u8, true, None) };
            let rules: Vec<_> = (0..2500).map(|n| sal.add_rule(*now, of(n), rule(n)).expect("room")).collect();
            router.take_routes(&sal.take_route_changes(4096));
            rules.into_iter().for_each(|rule| assert!(sal.remove_rule(rule)));
            router.take_routes(&sal.take_route_changes(4096));
        }
        is_over.store(true, Ordering::Relaxed);
        reader.join().expect("every packet found its prefix");
    });
    assert!(seen.load(Ordering::Relaxed) > 100, "{seen:?} packets were sent on");
    let counted: Vec<_> = rig.counted().into_iter().filter(|name| *name != "left_check").collect();
    assert_eq!((counted, rig.router.failure()), (vec!["forwarded"], None));
}
