use alloc::string::ToString;

use super::*;

fn hop(n: u8) -> Action {
    Action::Forward(NextHop { address: SocketAddr::new([10, 0, 0, n].into(), 54324), host: None, router: false })
}

fn rule(priority: u32, weight: u32, n: u8) -> Rule {
    Rule { priority, weight, action: hop(n) }
}

fn prefix(text: &str) -> Prefix {
    text.parse().expect("literal")
}

#[test]
fn the_port_of_hand_overs_is_found_by_agents_alone() {
    let demux = |service_port| Demux {
        listener: SocketAddr::new([0, 0, 0, 0].into(), 80),
        other_family: None,
        is_looked_up: false,
        service_port,
        protocol: None,
        allow: Allow::Any,
    };
    let ports = [80, 81, SERVICE_PORT, HAND_OVER_PORT];
    for (service_port, answered) in [
        (None, [true, true, true, false]),
        (Some(80), [true, false, true, false]),
        (Some(HAND_OVER_PORT), [false, false, false, true]),
    ] {
        assert_eq!(ports.map(|port| demux(service_port).answers(port)), answered, "{service_port:?}");
    }
}

#[test]
fn the_longest_prefix_wins_and_what_is_unusable_falls_through() {
    let mut table = ServiceTable::new(10);
    let any = table.insert(Instant::ZERO, prefix("sid:/0"), rule(1, 1, 1)).expect("room");
    let narrow = table.insert(Instant::ZERO, prefix("sid:abcd/16"), rule(1, 1, 2)).expect("room");
    let mut id = ServiceId([0; 32]);
    id.0[..2].copy_from_slice(&[0xab, 0xcd]);
    assert!(matches!(table.resolve(&id, 5, |_| true), Resolution::Forward(rule, _) if rule == narrow));
    assert!(matches!(table.resolve(&id, 5, |rule| rule.action == hop(1)), Resolution::Forward(rule, _) if rule == any));
    assert!(matches!(table.resolve(&ServiceId([0; 32]), 5, |_| true), Resolution::Forward(rule, _) if rule == any));
    assert_eq!(table.resolve(&id, 5, |_| false), Resolution::None);
    assert!(table.remove(narrow).is_some() && table.remove(narrow).is_none());
    assert!(matches!(table.resolve(&id, 5, |_| true), Resolution::Forward(rule, _) if rule == any));
}

#[test]
fn priorities_come_first_and_weight_zero_takes_nothing() {
    let mut table = ServiceTable::new(10);
    let low = table.insert(Instant::ZERO, prefix("sid:/0"), rule(1, 1, 1)).expect("room");
    let high = table.insert(Instant::ZERO, prefix("sid:/0"), rule(9, 1, 2)).expect("room");
    table.insert(Instant::ZERO, prefix("sid:/0"), rule(20, 0, 3)).expect("room");
    assert!(matches!(table.resolve(&ServiceId([1; 32]), 5, |_| true), Resolution::Forward(rule, _) if rule == high));
    table.remove(high);
    assert!(matches!(table.resolve(&ServiceId([1; 32]), 5, |_| true), Resolution::Forward(rule, _) if rule == low));
}

#[test]
fn instances_share_by_weight_and_a_change_moves_only_what_it_must() {
    let mut table = ServiceTable::new(10);
    let service = ServiceId([1; 32]);
    let ids: Vec<RuleId> = [1, 1, 2]
        .into_iter()
        .map(|weight| table.insert(Instant::ZERO, Prefix::from(service), rule(1, weight, 1)).expect("room"))
        .collect();
    let picked = |table: &ServiceTable, sticky: u64| match table.resolve(&service, sticky, |_| true) {
        Resolution::Forward(id, _) => id,
        other => panic!("not forwarded: {other:?}"),
    };
    let before: Vec<RuleId> = (0..8000_u64).map(|n| picked(&table, n.wrapping_mul(0x1234_5678_9abc_def1))).collect();
    let share = |id: RuleId| before.iter().filter(|at| **at == id).count();
    assert!((1800..2200).contains(&share(ids[0])), "{}", share(ids[0]));
    assert!((3700..4300).contains(&share(ids[2])), "{}", share(ids[2]));
    table.remove(ids[0]);
    for (n, old) in before.iter().enumerate() {
        let now = picked(&table, (n as u64).wrapping_mul(0x1234_5678_9abc_def1));
        assert!(*old == ids[0] || now == *old);
    }
}

#[test]
fn routers_that_learnt_the_instances_in_another_order_pick_the_same() {
    let service = ServiceId([1; 32]);
    let table = |order: [u8; 4]| {
        let mut table = ServiceTable::new(10);
        for n in order {
            // Two of the instances live on one host.
            table.insert(Instant::ZERO, Prefix::from(service), rule(1, u32::from(n), n / 2)).expect("room");
        }
        table
    };
    let one = table([2, 3, 4, 6]);
    let other = table([6, 2, 3, 4]);
    for sticky in 0..1000 {
        let hop = |table: &ServiceTable| match table.resolve(&service, sticky, |_| true) {
            Resolution::Forward(_, hop) => hop.address,
            other => panic!("not forwarded: {other:?}"),
        };
        assert_eq!(hop(&one), hop(&other), "{sticky}");
    }
}

#[test]
fn a_copy_of_the_buckets_picks_as_the_table_does() {
    let mut table = ServiceTable::new(10);
    table.follow();
    for (n, weight) in [(1, 1), (2, 3), (3, 7)] {
        table.insert(Instant::ZERO, Prefix::default(), rule(1, weight, n)).expect("room");
    }
    table.insert(Instant::ZERO, Prefix::default(), rule(0, 9, 4)).expect("room");
    let Part { begins_anew, changed } = table.take_changes(10);
    let [(_, Outcome::Shares(shares))] = &changed[..] else { panic!("not one prefix with shares: {changed:?}") };
    let holders = Share::holders(shares);
    assert!(begins_anew && shares.len() == 3 && holders.len() == BUCKETS);
    for sticky in 0..5000 {
        let Resolution::Forward(picked, _) = table.resolve(&ServiceId([7; 32]), sticky, |_| true) else {
            panic!("not forwarded")
        };
        assert_eq!(shares[holders[bucket(sticky) as usize] as usize].rule, picked);
    }
}

#[test]
fn buckets_follow_what_changes() {
    let mut rng = crate::types::rng::Rng::new([3; 32]);
    let share = |number: u64, weight: u64| Share {
        rule: RuleId(number),
        to: None,
        point: bucket::mix(number % 40 + 1),
        weight: weight as u32 % 3 + 1,
    };
    let mut shares: Vec<Share> = (0..3).map(|number| share(number, 0)).collect();
    let mut holders = Share::holders(&shares);
    for number in 3..60 {
        let before = shares.clone();
        for _ in 0..(rng.u64() % 3).min(shares.len() as u64 - 1) {
            shares.remove(rng.u64() as usize % shares.len());
        }
        let at = rng.u64() as usize % (shares.len() + 1);
        if number % 4 > 0 || shares.is_empty() {
            shares.insert(at, share(number, rng.u64()));
        } else if let Some(one) = shares.first_mut() {
            one.weight += 1;
        }
        holders = Share::holders_after(&shares, &before, &holders);
        assert_eq!(holders, Share::holders(&shares), "change {number} of {} shares", shares.len());
    }
}

#[test]
fn a_client_is_taken_by_its_own_family_where_that_can_be() {
    let ip = |text: &str| -> IpAddr { text.parse().expect("literal") };
    let v4 = ip("10.0.1.5");
    let v6 = ip("fd00::9");
    for (listener, other_family, of_v4, of_v6) in [
        ("[::]:80", None, "[::]:80", "[::]:80"),
        ("[::]:80", Some("0.0.0.0"), "0.0.0.0:80", "[::]:80"),
        ("0.0.0.0:80", Some("::"), "0.0.0.0:80", "[::]:80"),
        ("10.0.0.2:80", Some("fd00::2"), "10.0.0.2:80", "[fd00::2]:80"),
        ("10.0.0.2:80", Some("10.0.0.3"), "10.0.0.2:80", "10.0.0.2:80"),
    ] {
        let demux = Demux {
            listener: listener.parse().expect("literal"),
            other_family: other_family.map(ip),
            is_looked_up: false,
            service_port: None,
            protocol: None,
            allow: Allow::default(),
        };
        let places = [v4, v6].map(|client| demux.place_for(client).listener.to_string());
        assert_eq!(places, [of_v4, of_v6], "{listener} and {other_family:?}");
    }
}

#[test]
fn what_changes_is_given_to_a_copy_once() {
    let mut table = ServiceTable::new(10);
    let before = table.insert(Instant::ZERO, prefix("sid:aa/8"), rule(1, 1, 1)).expect("room");
    table.follow();
    assert!(table.has_news());
    let Part { begins_anew, changed } = table.take_changes(10);
    assert!(begins_anew && matches!(&changed[..], [(of, Outcome::Shares(_))] if *of == prefix("sid:aa/8")));
    assert_eq!((table.has_news(), table.take_changes(10).changed), (false, Vec::new()));
    table.remove(before);
    let listener = Demux {
        listener: ([0; 4], 80).into(),
        other_family: None,
        is_looked_up: false,
        service_port: None,
        protocol: None,
        allow: Allow::default(),
    };
    let listens = Rule { priority: 5, weight: 1, action: Action::Demux(listener) };
    table.insert(Instant::ZERO, prefix("sid:bb/8"), rule(1, 1, 1)).expect("room");
    table.insert(Instant::ZERO, prefix("sid:bb/8"), listens).expect("room");
    table.insert(Instant::ZERO, prefix("sid:cc/8"), rule(1, 0, 1)).expect("room");
    let Part { changed, .. } = table.take_changes(10);
    let wanted = [("sid:aa/8", Outcome::Shorter), ("sid:bb/8", Outcome::Depends), ("sid:cc/8", Outcome::Shorter)];
    assert_eq!(changed, wanted.map(|(text, outcome)| (prefix(text), outcome)));
}

#[test]
fn what_a_rule_decided_is_counted_until_it_goes() {
    let mut table = ServiceTable::new(10);
    let made = Instant::from_millis(5);
    let used = Instant::from_millis(9);
    let id = table.insert(made, prefix("sid:/0"), rule(1, 1, 1)).expect("room");
    assert_eq!(table.usage(id), Some(Usage { since: made, packets: 0, last: None }));
    table.note_use(made, id);
    table.note_use(used, id);
    assert_eq!(table.usage(id), Some(Usage { since: made, packets: 2, last: Some(used) }));
    table.add_use(id, 5, None);
    table.add_use(id, 1, Some(made));
    assert_eq!(table.usage(id), Some(Usage { since: made, packets: 8, last: Some(used) }));
    table.remove(id);
    table.add_use(id, 1, Some(used));
    table.note_use(used, id);
    assert_eq!(table.usage(id), None);
}

#[test]
fn a_full_table_says_so() {
    let mut table = ServiceTable::new(1);
    table.insert(Instant::ZERO, Prefix::default(), rule(1, 1, 1)).expect("room");
    assert_eq!(table.insert(Instant::ZERO, Prefix::default(), rule(1, 1, 1)), Err(TableError { limit: 1 }));
}
