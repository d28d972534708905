use std::net::IpAddr;
use std::time::Duration;

use margay_core::AssociationSetup;
use margay_core::certificate::{Revocation, TrustAnchor};
use margay_core::fence::FenceNotice;
use margay_core::give_up::GiveUpAfter;
use margay_core::key::HostSecret;
use margay_core::key_revocation::KeyRevocation;
use margay_core::name::Name;
use margay_core::succession::Succession;
use margay_core::table::{RuleId, TableError};
use parking_lot::Mutex;

use super::*;

const ADDRESS: &str = "10.0.0.2:54324";
const BOOT: [u8; 16] = [1; 16];
const TERMS: Terms = Terms {
    weight: 100,
    priority: 100,
    partition_bits: 0,
    exclusive: false,
    fenced: false,
    sticky: false,
    give_up_after_ms: None,
    quiet_ms: None,
};

/// A table of rules with a bound.
struct Rules {
    present: Mutex<BTreeMap<u64, (Prefix, Action)>>,
    room: usize,
    /// Prefixes that lost their last rule.
    bared: Mutex<BTreeSet<Prefix>>,
}

impl Rules {
    fn with_room(room: usize) -> Self {
        Self { present: Mutex::default(), room, bared: Mutex::default() }
    }

    fn prefixes(&self) -> Vec<Prefix> {
        self.present.lock().values().map(|(prefix, _)| *prefix).collect()
    }

    /// How many partitions lead to each host; own listeners count as host 0. Every partition has one rule.
    fn held(&self, service: &str) -> BTreeMap<u8, usize> {
        let (service, mut held, mut seen) = (self::service(service), BTreeMap::new(), BTreeSet::new());
        for (partition, action) in self.present.lock().values() {
            if partition.bits > service.bits && service.covers(partition) {
                let host = match action {
                    Action::Forward(hop) => hop.host.map_or(0, |host| host.0[0]),
                    _ => 0,
                };
                assert!(seen.insert(*partition), "{partition} has two");
                *held.entry(host).or_default() += 1;
            }
        }
        held
    }
}

impl SalControl for Rules {
    fn install_association(&self, _: AssociationSetup) {}
    fn add_trust_anchor(&self, _: TrustAnchor) {}
    fn revoke(&self, _: Revocation) {}
    fn revoke_key(&self, _: KeyRevocation) {}
    fn succeed(&self, _: &Succession) {}
    fn set_membership(&self, _: Vec<u8>) {}
    fn set_own_terms(&self, _: Prefix, _: Option<GiveUpAfter>) {}

    fn set_service_certificate(&self, _: Prefix, _: Vec<u8>) {}
    fn add_rule(&self, prefix: Prefix, rule: Rule) -> Result<RuleId, TableError> {
        let mut present = self.present.lock();
        if present.len() >= self.room {
            return Err(TableError { limit: self.room });
        }
        let id = present.last_key_value().map_or(1, |(last, _)| last + 1);
        present.insert(id, (prefix, rule.action));
        Ok(RuleId(id))
    }
    fn remove_rule(&self, id: RuleId) -> bool {
        let mut present = self.present.lock();
        let Some((prefix, _)) = present.remove(&id.0) else { return false };
        if present.values().all(|(other, _)| *other != prefix) {
            self.bared.lock().insert(prefix);
        }
        true
    }
    fn bind_name(&self, _: IpAddr, _: ServiceId) {}
    fn unbind_name(&self, _: IpAddr) {}
}

/// A table that only counts what is asked of it.
#[derive(Default)]
struct Counting(Mutex<usize>);

impl Counting {
    fn take(&self) -> usize {
        std::mem::take(&mut *self.0.lock())
    }
}

impl SalControl for Counting {
    fn install_association(&self, _: AssociationSetup) {}
    fn add_trust_anchor(&self, _: TrustAnchor) {}
    fn revoke(&self, _: Revocation) {}
    fn revoke_key(&self, _: KeyRevocation) {}
    fn succeed(&self, _: &Succession) {}
    fn set_membership(&self, _: Vec<u8>) {}
    fn set_own_terms(&self, _: Prefix, _: Option<GiveUpAfter>) {}

    fn set_service_certificate(&self, _: Prefix, _: Vec<u8>) {}
    fn add_rule(&self, _: Prefix, _: Rule) -> Result<RuleId, TableError> {
        *self.0.lock() += 1;
        Ok(RuleId(1))
    }
    fn remove_rule(&self, _: RuleId) -> bool {
        *self.0.lock() += 1;
        true
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

fn arrive(roll: &mut Roll, n: u8, boot_id: [u8; 16]) -> Result<Seat, RollError> {
    roll.arrive(place(n), "web1", ADDRESS.parse().expect("literal"), boot_id)
}

fn register(roll: &mut Roll, stream: u64, name: &str, rules: &Rules) -> Result<bool, RollError> {
    roll.register(place(1), stream, prefix(name), name, TERMS, rules)
}

#[test]
fn a_newer_stream_supersedes_and_what_it_does_not_say_again_is_swept() {
    let (mut roll, rules) = (Roll::default(), Rules::with_room(10));
    let first = arrive(&mut roll, 1, BOOT).expect("room");
    for name in ["web.shop", "db.shop"] {
        register(&mut roll, first.stream, name, &rules).expect("room");
    }
    let second = arrive(&mut roll, 1, BOOT).expect("its own host");
    assert_eq!(rules.prefixes().len(), 2, "no gap while the agent starts again");
    assert_eq!(register(&mut roll, first.stream, "late.shop", &rules), Err(RollError::Superseded));
    roll.withdraw(place(1), first.stream, &prefix("web.shop"), &rules);
    assert!(
        roll.depart(place(1), first.stream, Leave::Ended, &rules) == Departure::Superseded,
        "the end of the older stream is no end of the host"
    );
    assert_eq!((rules.prefixes().len(), roll.len()), (2, 1));
    register(&mut roll, second.stream, "web.shop", &rules).expect("known");
    roll.sweep(place(1), first.stream, &rules);
    assert_eq!(rules.prefixes().len(), 2, "only the stream that speaks sweeps");
    roll.sweep(place(1), second.stream, &rules);
    assert_eq!(rules.prefixes(), [prefix("web.shop")]);
    assert_eq!(roll.depart(place(1), second.stream, Leave::Lapsed, &rules), Departure::Gone);
    assert_eq!((rules.prefixes(), roll.len()), (vec![], 0));
    // What a stream that was replaced says, or its end, counts for nothing.
    assert_eq!(Leave::ALL.map(|why| roll.left(why)), [0, 1, 0, 1, 0, 0]);
}

#[test]
fn of_a_host_with_a_key_that_is_here_it_is_known_which_other_one_has_it() {
    let (mut roll, rules) = (Roll::default(), Rules::with_room(1));
    let seat = arrive(&mut roll, 1, BOOT).expect("room");
    assert!(roll.elder(place(1), BOOT).is_none(), "its agent has started again");
    assert!(roll.elder(place(2), [99; 16]).is_none(), "others are not concerned");
    let elder = roll.elder(place(1), [99; 16]).expect("another boot");
    seat.signs.send_modify(|signs| *signs += 1);
    assert_eq!(elder.signs.has_changed().ok(), Some(true));
    roll.depart(place(1), seat.stream, Leave::Ended, &rules);
    drop(seat);
    assert!(elder.signs.has_changed().is_err(), "it is gone");
    assert!(roll.elder(place(1), [99; 16]).is_none());
}

#[test]
fn what_there_is_no_room_for_is_refused_and_changes_nothing() {
    let (mut roll, rules) = (Roll::default(), Rules::with_room(1));
    let seat = arrive(&mut roll, 1, BOOT).expect("room");
    register(&mut roll, seat.stream, "web.shop", &rules).expect("room");
    assert_eq!(register(&mut roll, seat.stream, "db.shop", &rules), Err(RollError::Table(TableError { limit: 1 })));
    let names = |roll: &Roll| roll.instances().into_iter().map(|instance| instance.name).collect::<Vec<_>>();
    assert_eq!(names(&roll), ["web.shop"]);

    let rules = Rules::with_room(usize::MAX);
    for number in 1..PREFIXES_MAX {
        register(&mut roll, seat.stream, &format!("a{number}.shop"), &rules).expect("room");
    }
    assert_eq!(register(&mut roll, seat.stream, "more.shop", &rules), Err(RollError::Prefixes));
    assert_eq!(roll.check_room(place(1), &prefix("more.shop")), Err(RollError::Prefixes));
    assert_eq!(roll.check_room(place(1), &prefix("a1.shop")), Ok(()));
    assert_eq!(register(&mut roll, seat.stream, "a1.shop", &rules), Ok(false), "what is there may be said again");
}

#[test]
fn a_host_that_is_put_out_is_told_and_leaves_nothing() {
    let (mut roll, rules) = (Roll::default(), Rules::with_room(10));
    let seat = arrive(&mut roll, 1, BOOT).expect("room");
    register(&mut roll, seat.stream, "web.shop", &rules).expect("room");
    roll.expel(place(1).host, &rules);
    assert_eq!((rules.prefixes(), roll.len(), roll.left(Leave::Expelled)), (vec![], 0, 1));
    let mut told = std::pin::pin!(seat.end.notified());
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(told.as_mut().poll(&mut context).is_ready());
}

const DIVIDED: Terms = Terms { partition_bits: 4, ..TERMS };
const ALONE: Terms = Terms { exclusive: true, ..TERMS };

/// Hosts 1 to `count`, and a table with room.
fn hosts(count: u8) -> (Roll, Rules, Vec<u64>) {
    let mut roll = Roll::default();
    let streams = (1..=count).map(|n| arrive(&mut roll, n, BOOT).expect("room").stream).collect();
    (roll, Rules::with_room(1000), streams)
}

fn service(name: &str) -> Prefix {
    name.parse::<Name>().expect("literal").service_prefix()
}

fn serve(roll: &mut Roll, n: u8, streams: &[u64], terms: Terms, rules: &Rules) -> Result<bool, RollError> {
    // As hosts do: without partitions by the name's own bits.
    let prefix = if terms.partition_bits > 0 { service("cache.shop") } else { prefix("cache.shop") };
    let known = roll.instances().iter().any(|found| found.host == place(n).host && found.prefix != prefix);
    if known {
        for other in [service("cache.shop"), self::prefix("cache.shop")].iter().filter(|other| **other != prefix) {
            roll.withdraw(place(n), streams[usize::from(n) - 1], other, rules);
        }
    }
    roll.register(place(n), streams[usize::from(n) - 1], prefix, "cache.shop", terms, rules)
}

fn own(terms: Terms) -> OwnService {
    let Terms { weight, priority, partition_bits, exclusive, fenced, sticky, .. } = terms;
    let instance = Instance {
        host: HostId([99; 16]),
        host_name: "router".into(),
        address: ADDRESS.parse().expect("literal"),
        name: "cache.shop".into(),
        prefix: if partition_bits > 0 { service("cache.shop") } else { prefix("cache.shop") },
        weight,
        priority,
        sticky,
        fence: None,
        zero_weight: None,
    };
    OwnService { instance, actions: vec![Action::Drop], partition_bits, exclusive, fenced }
}

#[test]
fn partitions_follow_who_serves_and_none_is_ever_without_a_rule() {
    let (mut roll, rules, streams) = hosts(4);
    for n in 1..=4 {
        serve(&mut roll, n, &streams, DIVIDED, &rules).expect("room");
    }
    assert_eq!(rules.held("cache.shop"), BTreeMap::from([(1, 4), (2, 4), (3, 4), (4, 4)]));
    assert_eq!(roll.partitions_moved(), 8 + 5 + 4);
    let under = roll.instances_under(&service("cache.shop"));
    assert_eq!((under.len(), under.iter().filter(|found| found.prefix.bits == 100).count()), (4 + 16, 16));
    let one = service("cache.shop").partition(4, 7);
    let bits: Vec<u16> = roll.instances_under(&one).iter().map(|found| found.prefix.bits).collect();
    assert_eq!(bits, [96, 96, 96, 96, 100], "the service's own, and the one that holds it");
    assert_eq!(roll.instances_of(&service("cache.shop").id).len(), 4, "partitions hide no server");
    let key = prefix("cache.shop/key:user42").id;
    let partition = service("cache.shop").partition(4, key.partition(4));
    let holder = roll.instances_under(&partition).into_iter().filter(|found| found.prefix == partition);
    assert_eq!(roll.instances_of(&key), holder.collect::<Vec<_>>());

    roll.withdraw(place(1), streams[0], &service("cache.shop"), &rules);
    assert_eq!(roll.depart(place(2), streams[1], Leave::Lapsed, &rules), Departure::Gone);
    assert_eq!(rules.held("cache.shop"), BTreeMap::from([(3, 8), (4, 8)]));
    serve(&mut roll, 1, &streams, DIVIDED, &rules).expect("room");
    assert_eq!(rules.held("cache.shop").values().copied().collect::<BTreeSet<_>>(), BTreeSet::from([5, 6]));
    assert_eq!(*rules.bared.lock(), BTreeSet::new());

    // Who takes no new connections, or comes after others, holds nothing.
    serve(&mut roll, 3, &streams, Terms { weight: 0, ..DIVIDED }, &rules).expect("room");
    serve(&mut roll, 4, &streams, Terms { priority: 1, ..DIVIDED }, &rules).expect("room");
    assert_eq!(rules.held("cache.shop"), BTreeMap::from([(1, 16)]));
    for n in [1, 3, 4] {
        roll.depart(place(n), streams[usize::from(n) - 1], Leave::Ended, &rules);
    }
    assert!(rules.prefixes().is_empty() && roll.instances_under(&Prefix::default()).is_empty());
}

#[test]
fn the_number_of_partitions_is_that_of_the_first() {
    let (mut roll, rules, streams) = hosts(2);
    serve(&mut roll, 1, &streams, DIVIDED, &rules).expect("room");
    let eight = Terms { partition_bits: 3, ..TERMS };
    let error = serve(&mut roll, 2, &streams, eight, &rules).expect_err("another number");
    assert!(error.to_string().contains("--partitions 16"), "{error}");
    assert!(serve(&mut roll, 2, &streams, TERMS, &rules).is_err());
    assert_eq!((rules.prefixes().len(), roll.instances().len()), (17, 1));
    // Alone it may say something else, and then that is what counts.
    serve(&mut roll, 1, &streams, eight, &rules).expect("alone");
    assert_eq!(rules.held("cache.shop"), BTreeMap::from([(1, 8)]));
    serve(&mut roll, 2, &streams, eight, &rules).expect("the same");
    assert!(serve(&mut roll, 2, &streams, DIVIDED, &rules).is_err());
    assert_eq!(rules.held("cache.shop"), BTreeMap::from([(1, 8)]), "what is refused is not registered");
    serve(&mut roll, 1, &streams, TERMS, &rules).expect("alone");
    assert_eq!(rules.prefixes().len(), 1);
}

#[test]
fn the_router_s_own_host_holds_partitions_by_its_listeners() {
    let (mut roll, rules, streams) = hosts(1);
    serve(&mut roll, 1, &streams, DIVIDED, &rules).expect("room");
    assert!(roll.admit_own(own(TERMS)).is_err());
    roll.admit_own(own(DIVIDED)).expect("the same");
    roll.set_own(vec![own(DIVIDED)], &rules);
    assert_eq!(rules.held("cache.shop"), BTreeMap::from([(0, 8), (1, 8)]));
    roll.depart(place(1), streams[0], Leave::Ended, &rules);
    assert_eq!(rules.held("cache.shop"), BTreeMap::from([(0, 16)]));
    roll.set_own(Vec::new(), &rules);
    assert!(rules.prefixes().is_empty());
}

#[test]
fn where_the_table_is_full_the_service_s_own_rules_answer() {
    let (mut roll, _, streams) = hosts(2);
    let rules = Rules::with_room(10);
    serve(&mut roll, 1, &streams, DIVIDED, &rules).expect("room for the service");
    assert_eq!(rules.prefixes().len(), 10);
    assert_eq!(roll.instances_under(&service("cache.shop")).len(), 17, "assigned all the same");
    roll.depart(place(1), streams[0], Leave::Ended, &rules);
    assert!(rules.prefixes().is_empty());
}

#[test]
fn one_host_alone_serves_an_exclusive_name() {
    let (mut roll, rules, streams) = hosts(2);
    serve(&mut roll, 1, &streams, ALONE, &rules).expect("the first");
    serve(&mut roll, 1, &streams, Terms { weight: 7, ..ALONE }, &rules).expect("itself");
    for terms in [ALONE, TERMS] {
        let error = serve(&mut roll, 2, &streams, terms, &rules).expect_err("held");
        assert!(matches!(&error, RollError::Held { holder, .. } if holder == "web1"), "{error}");
    }
    assert!(roll.admit_own(own(TERMS)).is_err());
    roll.depart(place(1), streams[0], Leave::Lapsed, &rules);
    roll.admit_own(own(TERMS)).expect("free");
    assert!(serve(&mut roll, 2, &streams, ALONE, &rules).is_err(), "the router's own host serves it already");
    serve(&mut roll, 2, &streams, TERMS, &rules).expect("shared");
    assert!(serve(&mut roll, 2, &streams, ALONE, &rules).is_err());
    assert!(rules.prefixes().is_empty(), "what is refused is not registered");
}

#[test]
fn a_host_with_many_names_goes_in_parts_and_may_come_back_between() {
    let (mut roll, rules, streams) = hosts(2);
    let names: Vec<String> = (0..2 * DEPARTING_MAX + 1).map(|n| format!("box.shop/key:{n}")).collect();
    for name in &names {
        roll.register(place(1), streams[0], prefix(name), name, TERMS, &rules).expect("room");
    }
    roll.register(place(2), streams[1], prefix(&names[0]), &names[0], TERMS, &rules).expect("room");
    let depart = |roll: &mut Roll, stream| roll.depart(place(1), stream, Leave::Ended, &rules);
    assert_eq!(depart(&mut roll, streams[0]), Departure::Going);
    let left = names.len() - DEPARTING_MAX;
    assert_eq!((roll.instances().len(), rules.prefixes().len()), (left + 1, left + 1));
    let again = arrive(&mut roll, 1, BOOT).expect("its own host").stream;
    assert_eq!(depart(&mut roll, streams[0]), Departure::Superseded, "what is left is the newer stream's");
    assert_eq!(roll.instances().len(), left + 1);
    assert_eq!([depart(&mut roll, again), depart(&mut roll, again)], [Departure::Going, Departure::Gone]);
    assert_eq!(depart(&mut roll, again), Departure::Superseded);
    assert_eq!((roll.instances().len(), rules.prefixes(), roll.len()), (1, vec![prefix(&names[0])], 1));
    assert_eq!(roll.left(Leave::Ended), names.len() as u64);
}

/// Who serves what is found by prefix, not by looking at everybody: the same is found either way, whatever came and
/// went.
#[test]
fn what_is_found_by_prefix_is_what_everybody_has_registered() {
    let mut rng = margay_core::rng::Rng::new([9; 32]);
    let (mut roll, rules) = (Roll::default(), Rules::with_room(usize::MAX));
    let seats: Vec<(Place, u64)> = (1..=5)
        .map(|n| (place(n), roll.arrive(place(n), &format!("h{n}"), ADDRESS.parse().expect("literal"), BOOT)))
        .map(|(place, seat)| (place, seat.expect("room").stream))
        .collect();
    let ids: Vec<ServiceId> =
        (0..4_u8).map(|n| ServiceId([n / 2, 1, n % 2, 0xff, n, 5, 5, 5].repeat(4).try_into().expect("32"))).collect();
    let mut pick = |among: usize| usize::try_from(rng.u64() % among as u64).expect("small");
    let mut told = BTreeMap::new();
    for round in 0..600 {
        let prefix = Prefix::new(ids[pick(ids.len())], [8, 16, 20, 96, 256][pick(5)]);
        let (place, stream) = seats[pick(seats.len())];
        if round > 500 || pick(3) == 0 {
            roll.withdraw(place, stream, &prefix, &rules);
        } else {
            roll.register(place, stream, prefix, "web.shop", TERMS, &rules).expect("room");
        }
        let all = roll.instances();
        let about = Prefix::new(ids[pick(ids.len())], [0, 8, 12, 96, 256][pick(5)]);
        let mut under: Vec<_> = all.iter().filter(|one| about.overlaps(&one.prefix)).cloned().collect();
        under.sort_by_key(|instance| (instance.prefix, instance.host));
        assert_eq!(roll.instances_under(&about), under, "round {round}");
        let is_unchanged = |seen: &(u64, Vec<Instance>)| seen.1 == under || roll.recent().concerns(&about, seen.0);
        assert!(told.get(&about).is_none_or(is_unchanged), "round {round}: {about} has changed unheard");
        told.insert(about, (roll.recent().count(), under));
        let service = ids[pick(ids.len())];
        let longest = all.iter().filter(|one| one.prefix.contains(&service)).map(|one| one.prefix.bits).max();
        let serving: Vec<_> =
            all.into_iter().filter(|one| one.prefix.contains(&service) && Some(one.prefix.bits) == longest).collect();
        assert_eq!(roll.instances_of(&service), serving, "round {round}");
    }
    for (place, stream) in seats {
        roll.depart(place, stream, Leave::Ended, &rules);
    }
    assert!(roll.lengths.is_empty() && roll.serving.is_empty(), "{:?}", roll.lengths);
}

/// What a router says of a host; weight zero: nothing.
fn there(host: u8, router: u8, weights: &[u32]) -> (HostId, Vec<Arc<Served>>) {
    let of = |(at, weight): (usize, &u32)| {
        let name = format!("s{at}.shop");
        let instance = Instance {
            host: place(host).host,
            host_name: format!("h{host}"),
            address: ADDRESS.parse().expect("literal"),
            prefix: if *weight == 2 { service(&name) } else { prefix(&name) },
            name,
            weight: *weight,
            priority: 100 + *weight,
            sticky: false,
            fence: None,
            zero_weight: None,
        };
        Arc::new(Served { instance, partition_bits: 0, exclusive: false })
    };
    (HostId([router; 16]), weights.iter().enumerate().filter(|(_, weight)| **weight > 0).map(of).collect())
}

fn linked() -> BTreeMap<HostId, SocketAddr> {
    [101, 102].map(|n: u8| (HostId([n; 16]), SocketAddr::from(([10, 0, 0, n], 54_324)))).into()
}

#[test]
fn whether_it_hears_each_change_or_all_at_once_a_router_leads_to_the_same() {
    for seed in 0..30 {
        let mut rng = margay_core::rng::Rng::new([seed; 32]);
        let mut pick = |among: u64| u8::try_from(rng.u64() % among).expect("small");
        let (mut followed, rules, streams) = hosts(3);
        let mut all: BTreeMap<Place, ByRouter> = BTreeMap::new();
        followed.set_links(linked(), &rules);
        let about = service("s1.shop");
        let mut told = (0, Vec::new());
        for round in 0..150 {
            let (host, router) = (pick(5) + 1, pick(2) + 101);
            let weights = [pick(4).into(), pick(4).into(), pick(2).into()];
            match pick(8) {
                // Who is registered here is not looked for elsewhere.
                0 if host <= 3 => {
                    let stream = streams[usize::from(host) - 1];
                    let terms = Terms { priority: u32::from(pick(2)) * 1000, ..TERMS };
                    followed.register(place(host), stream, prefix("s0.shop"), "s0.shop", terms, &rules).expect("room");
                }
                1 if host <= 3 => {
                    followed.withdraw(place(host), streams[usize::from(host) - 1], &prefix("s0.shop"), &rules)
                }
                _ => {
                    let (router, served) = there(host, router, &weights);
                    let by_router = all.entry(place(host)).or_default();
                    match served.is_empty() {
                        true => drop(by_router.remove(&router)),
                        false => drop(by_router.insert(router, served)),
                    }
                    followed.hear_elsewhere(vec![(place(host), by_router.clone())], &rules);
                }
            }
            let now = (followed.recent().count(), followed.instances_under(&about));
            assert!(now.1 == told.1 || followed.recent().concerns(&about, told.0), "seed {seed}: changed unheard");
            told = now;
            if round % 10 != 0 {
                continue;
            }
            let (mut anew, fresh, streams) = hosts(3);
            for (at, listed) in followed.hosts.iter().flat_map(|(at, host)| host.list(at).map(move |one| (at, one))) {
                let stream = streams[usize::from(at.host.0[0]) - 1];
                anew.register(*at, stream, listed.prefix, &listed.entry.name, listed.entry.terms, &fresh)
                    .expect("room");
            }
            anew.set_links(linked(), &fresh);
            anew.hear_elsewhere(all.clone().into_iter().collect(), &fresh);
            assert_eq!(followed.instances(), anew.instances(), "seed {seed}");
            let leads = |rules: &Rules| -> BTreeSet<String> {
                rules.present.lock().values().map(|rule| format!("{rule:?}")).collect()
            };
            assert_eq!(leads(&rules), leads(&fresh), "seed {seed}");
            assert_eq!(rules.present.lock().len(), fresh.present.lock().len(), "seed {seed}");
            assert_eq!(followed.instances_under(&about), anew.instances_under(&about), "seed {seed}");
            assert_eq!(followed.instances_of(&about.id), anew.instances_of(&about.id), "seed {seed}");
        }
        for place in all.into_keys() {
            followed.hear_elsewhere(vec![(place, ByRouter::new())], &rules);
        }
        assert_eq!(followed.elsewhere.prefixes().count() + followed.elsewhere.lengths().count(), 0, "seed {seed}");
    }
}

#[test]
fn a_change_elsewhere_touches_what_has_changed_however_much_is_registered_there() {
    let at = |n: u32| {
        let mut host = [0; 16];
        host[..4].copy_from_slice(&n.to_be_bytes());
        Place { host: HostId(host), authority: [7; 8] }
    };
    // Services have 32 bits of their own, which are too few for so many.
    let name = |n: u32| format!("box.shop/key:{n}");
    let of = |n: u32, weight: u32| {
        let name = name(n);
        let (host, address) = (at(n).host, ADDRESS.parse().expect("literal"));
        let (host_name, prefix) = (format!("h{n}"), prefix(&name));
        let instance = Instance {
            host,
            host_name,
            address,
            name,
            prefix,
            weight,
            priority: 1,
            sticky: false,
            fence: None,
            zero_weight: None,
        };
        let served = Arc::new(Served { instance, partition_bits: 0, exclusive: false });
        (at(n), ByRouter::from([(HostId([101; 16]), vec![served])]))
    };
    for others in [10, 100_000] {
        let (mut roll, core) = (Roll::default(), Counting::default());
        roll.set_links(linked(), &core);
        roll.hear_elsewhere((0..others).map(|n| of(n, 1)).collect(), &core);
        assert_eq!(core.take(), others as usize);
        roll.hear_elsewhere(vec![of(7, 2)], &core);
        assert_eq!(core.take(), 2, "one rule for another");
        assert_eq!(roll.elsewhere.hear(at(7), of(7, 3).1), BTreeSet::from([prefix(&name(7))]));
        assert_eq!(roll.elsewhere.hear(at(7), of(7, 3).1), BTreeSet::new(), "the same again");
        roll.hear_elsewhere(vec![(at(7), ByRouter::new())], &core);
        assert_eq!((core.take(), roll.elsewhere.prefixes().count()), (1, others as usize - 1));
    }
}

#[test]
fn a_notice_is_taken_from_the_holder_alone_and_told_to_all() {
    let (rules, mut roll) = (Rules::with_room(10), Roll::new(Duration::from_millis(850)));
    let key = HostSecret::from_bytes([3; 32]);
    let holder = Place { host: key.public().id(), authority: place(1).authority };
    let streams = [holder, place(2)].map(|place| roll.arrive(place, "h", ADDRESS.parse().expect("literal"), BOOT));
    let streams = streams.map(|seat| seat.expect("room").stream);
    let fenced = Terms { fenced: true, ..ALONE };
    let name = prefix("db.shop");
    roll.register(holder, streams[0], name, "db.shop", fenced, &rules).expect("nobody has it");
    roll.hold_fence(place(2), &name, 6);
    assert_eq!(roll.fence_number(&name, place(2).host), None, "it has not registered it");
    roll.hold_fence(holder, &name, 7);
    roll.untold();
    let notice = |number| FenceNotice::new(name, number, &key, Vec::new());
    assert!(!roll.set_fence_notice(place(2), &notice(7)) && !roll.set_fence_notice(holder, &notice(8)));
    let mut changes = roll.changes();
    changes.mark_unchanged();
    assert!(roll.set_fence_notice(holder, &notice(7)) && changes.has_changed().expect("it lives"));
    let encoded = Some(notice(7).encode().into());
    let listed = roll.instances_under(&service("db.shop"));
    assert_eq!(listed.iter().map(|instance| &instance.fence).collect::<Vec<_>>(), [&encoded]);
    let told = roll.untold();
    assert_eq!(
        told.iter().map(|(place, all)| (*place, &all[0].instance.fence)).collect::<Vec<_>>(),
        [(holder, &encoded)]
    );
    assert_eq!(roll.instances_of(&name.id)[0].fence, None, "who asks is not told");
    roll.end_fence(holder, &name);
    assert_eq!(roll.instances_under(&name)[0].fence, None);
    roll.withdraw(holder, streams[0], &name, &rules);
    roll.register(place(2), streams[1], name, "db.shop", ALONE, &rules).expect("it has left");
}
