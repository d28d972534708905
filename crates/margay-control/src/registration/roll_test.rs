use std::net::IpAddr;

use margay_core::AssociationSetup;
use margay_core::certificate::TrustAnchor;
use margay_core::name::Name;
use parking_lot::Mutex;

use super::*;

const ADDRESS: &str = "10.0.0.2:54324";
const BOOT: [u8; 16] = [1; 16];

/// A table of rules with a bound.
struct Rules {
    present: Mutex<BTreeMap<u64, Prefix>>,
    room: usize,
}

impl Rules {
    fn with_room(room: usize) -> Self {
        Self { present: Mutex::default(), room }
    }

    fn prefixes(&self) -> Vec<Prefix> {
        self.present.lock().values().copied().collect()
    }
}

impl SalControl for Rules {
    fn install_association(&self, _: AssociationSetup) {}
    fn add_trust_anchor(&self, _: TrustAnchor) {}
    fn set_membership(&self, _: Vec<u8>) {}
    fn set_service_certificate(&self, _: Prefix, _: Vec<u8>) {}
    fn add_rule(&self, prefix: Prefix, _: Rule) -> Result<RuleId, TableError> {
        let mut present = self.present.lock();
        if present.len() >= self.room {
            return Err(TableError { limit: self.room });
        }
        let id = present.last_key_value().map_or(1, |(last, _)| last + 1);
        present.insert(id, prefix);
        Ok(RuleId(id))
    }
    fn remove_rule(&self, id: RuleId) -> bool {
        self.present.lock().remove(&id.0).is_some()
    }
    fn bind_name(&self, _: IpAddr, _: ServiceId) {}
    fn unbind_name(&self, _: IpAddr) {}
}

fn place(n: u8) -> Place {
    Place { host: HostId([n; 16]), authority: [7; 8] }
}

fn prefix(name: &str) -> Prefix {
    name.parse::<Name>().expect("literal").prefix()
}

fn arrive(roll: &mut Roll, n: u8, boot_id: [u8; 16], now: Instant) -> Result<Seat, RollError> {
    roll.arrive(place(n), "web1", ADDRESS.parse().expect("literal"), boot_id, now)
}

fn register(roll: &mut Roll, stream: u64, name: &str, rules: &Rules) -> Result<(), RollError> {
    roll.register(place(1), stream, prefix(name), name, (100, 100), rules)
}

#[test]
fn a_newer_stream_supersedes_and_what_it_does_not_say_again_is_swept() {
    let (mut roll, rules, now) = (Roll::default(), Rules::with_room(10), Instant::now());
    let first = arrive(&mut roll, 1, BOOT, now).expect("room");
    for name in ["web.shop", "db.shop"] {
        register(&mut roll, first.stream, name, &rules).expect("room");
    }
    let second = arrive(&mut roll, 1, BOOT, now).expect("its own host");
    assert_eq!(rules.prefixes().len(), 2, "no gap while the agent starts again");
    assert_eq!(register(&mut roll, first.stream, "late.shop", &rules), Err(RollError::Superseded));
    roll.withdraw(place(1), first.stream, &prefix("web.shop"), &rules);
    assert!(
        !roll.depart(place(1), first.stream, Leave::Ended, &rules),
        "the end of the older stream is no end of the host"
    );
    assert_eq!((rules.prefixes().len(), roll.len()), (2, 1));
    register(&mut roll, second.stream, "web.shop", &rules).expect("known");
    roll.sweep(place(1), first.stream, &rules);
    assert_eq!(rules.prefixes().len(), 2, "only the stream that speaks sweeps");
    roll.sweep(place(1), second.stream, &rules);
    assert_eq!(rules.prefixes(), [prefix("web.shop")]);
    assert!(roll.depart(place(1), second.stream, Leave::Lapsed, &rules));
    assert_eq!((rules.prefixes(), roll.len()), (vec![], 0));
    // What a stream that was replaced says, or its end, counts for nothing.
    assert_eq!(Leave::ALL.map(|why| roll.left(why)), [0, 1, 0, 1, 0]);
}

#[test]
fn two_hosts_with_one_key_are_told_apart_from_one_that_reboots() {
    let (mut roll, start) = (Roll::default(), Instant::now());
    arrive(&mut roll, 1, BOOT, start).expect("room");
    for takeover in 0..TAKEOVERS_MAX {
        arrive(&mut roll, 1, [takeover as u8 + 2; 16], start).expect("it may have been started anew");
    }
    assert_eq!(arrive(&mut roll, 1, [99; 16], start).err(), Some(RollError::Clone));
    assert!(arrive(&mut roll, 1, [TAKEOVERS_MAX as u8 + 1; 16], start).is_ok(), "the one that is there goes on");
    assert!(arrive(&mut roll, 2, [99; 16], start).is_ok(), "others are not concerned");
    assert!(arrive(&mut roll, 1, [99; 16], start + TAKEOVER_TIME).is_ok(), "it is forgotten");
}

#[test]
fn what_there_is_no_room_for_is_refused_and_changes_nothing() {
    let (mut roll, rules, now) = (Roll::default(), Rules::with_room(1), Instant::now());
    let seat = arrive(&mut roll, 1, BOOT, now).expect("room");
    register(&mut roll, seat.stream, "web.shop", &rules).expect("room");
    assert_eq!(register(&mut roll, seat.stream, "db.shop", &rules), Err(RollError::Table(TableError { limit: 1 })));
    let names = |roll: &Roll| roll.instances().into_iter().map(|instance| instance.name).collect::<Vec<_>>();
    assert_eq!(names(&roll), ["web.shop"]);

    let rules = Rules::with_room(usize::MAX);
    for number in 1..PREFIXES_MAX {
        register(&mut roll, seat.stream, &format!("a{number}.shop"), &rules).expect("room");
    }
    assert_eq!(register(&mut roll, seat.stream, "more.shop", &rules), Err(RollError::Prefixes));
    assert_eq!(register(&mut roll, seat.stream, "a1.shop", &rules), Ok(()), "what is there may be said again");
}

#[test]
fn a_host_that_is_put_out_is_told_and_leaves_nothing() {
    let (mut roll, rules, now) = (Roll::default(), Rules::with_room(10), Instant::now());
    let seat = arrive(&mut roll, 1, BOOT, now).expect("room");
    register(&mut roll, seat.stream, "web.shop", &rules).expect("room");
    roll.expel(place(1).host, &rules);
    assert_eq!((rules.prefixes(), roll.len(), roll.left(Leave::Expelled)), (vec![], 0, 1));
    let mut told = std::pin::pin!(seat.end.notified());
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(told.as_mut().poll(&mut context).is_ready());
}
