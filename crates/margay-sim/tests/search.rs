//! Searches for routers, in virtual time: with relays, bad weather, strangers and liars.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use margay_core::Event;
use margay_core::certificate::{CertificateKind, TrustAnchor};
use margay_core::key::{HostPublic, SigningKey};
use margay_core::name::{Prefix, ServiceId, authority_block};
use margay_core::rng::Rng;
use margay_core::search::answering;
use margay_core::segment::SEGMENT;
use margay_sim::certificate;
use margay_sim::check::nothing_left_over;
use margay_sim::world::service;
use margay_sim::{HostId, Outcome, Weather, World};
use margay_wire::{Kind, PORT};

const SECOND: Duration = Duration::from_secs(1);

fn key(seed: u8) -> SigningKey {
    SigningKey::generate(&mut Rng::new([seed; 32]))
}

/// The key of the authority shop, and one that nobody trusts.
fn keys() -> (SigningKey, SigningKey) {
    (key(77), key(78))
}

/// A host that trusts shop.
fn searcher(world: &mut World) -> HostId {
    let host = world.add_host(false);
    let anchor = TrustAnchor { authority: authority_block("shop"), key: keys().0.public() };
    world.host(host).sal.add_trust_anchor(anchor);
    host
}

/// A host that answers searches, by a certificate for `prefix` by `key`.
fn answerer(world: &mut World, prefix: Prefix, key: Option<&SigningKey>) -> HostId {
    let host = world.add_host(true);
    let now = world.now;
    let routers = ServiceId::of_routers(authority_block("shop"));
    let listener = SocketAddr::from(([0, 0, 0, 0], PORT));
    world.host(host).sal.add_rule(now, routers.into(), answering(listener)).expect("room");
    let host_key = world.host(host).public_key();
    if let Some(key) = key {
        world.host(host).sal.set_service_certificate(
            routers.into(),
            certificate::chain(CertificateKind::Service, prefix, host_key, key),
        );
    }
    host
}

fn router(world: &mut World) -> HostId {
    answerer(world, ServiceId::of_routers(authority_block("shop")).into(), Some(&keys().0))
}

fn place(world: &mut World, host: HostId, addresses: &[[u8; 4]]) {
    world.set_addresses(host, addresses.iter().map(|address| IpAddr::from(*address)).collect());
}

fn begin(world: &mut World, host: HostId) {
    let now = world.now;
    assert!(world.host(host).sal.search_routers(now, authority_block("shop")));
    world.touch(host);
}

/// The routers that a search brings, each with where it is.
fn search(world: &mut World, host: HostId) -> Vec<(HostPublic, SocketAddr)> {
    let before = world.host(host).events.len();
    begin(world, host);
    world.run_for(3 * SECOND);
    let mut found: Vec<_> = world.host(host).events[before..]
        .iter()
        .filter_map(|event| match event {
            Event::RouterFound { authority, key, at } => {
                assert_eq!(*authority, authority_block("shop"));
                Some((*key, *at))
            }
            _ => None,
        })
        .collect();
    found.sort_by_key(|(key, _)| key.0);
    found.dedup();
    found
}

fn as_found(world: &mut World, host: HostId) -> (HostPublic, SocketAddr) {
    let host = world.host(host);
    (HostPublic(host.public_key()), SocketAddr::new(host.address, PORT))
}

fn sent(world: &mut World, host: HostId) -> u64 {
    let counters = world.host(host).sal.counters();
    Kind::ALL.iter().map(|kind| counters.messages_sent(*kind)).sum()
}

#[test]
fn every_router_of_the_segment_is_found_and_nobody_else_says_a_word() {
    let mut world = World::new(1, Weather::FAIR);
    let host = searcher(&mut world);
    let bystander = searcher(&mut world);
    let routers = [router(&mut world), router(&mut world)];
    let mut expected = routers.map(|router| as_found(&mut world, router));
    expected.sort_by_key(|(key, _)| key.0);
    for _ in 0..2 {
        assert_eq!(search(&mut world, host), expected);
    }
    assert_eq!(sent(&mut world, bystander), 0);
    world.run_for(30 * SECOND);
    nothing_left_over(&world).expect("nothing is left");
}

#[test]
fn in_foul_weather_too() {
    for seed in 1..20 {
        let mut world = World::new(seed, Weather::FOUL);
        let host = searcher(&mut world);
        let router = router(&mut world);
        let expected = as_found(&mut world, router);
        // One search may be lost; whoever searches does so again.
        let found = (0..3).flat_map(|_| search(&mut world, host)).next();
        assert_eq!(found, Some(expected), "seed {seed}");
        world.run_for(30 * SECOND);
        nothing_left_over(&world).expect("nothing is left");
    }
}

/// The liars are there first, and answer in several ways that are none.
#[test]
fn strangers_are_passed_over_and_end_nothing() {
    let (right, wrong) = keys();
    for with_router in [true, false] {
        let mut world = World::new(2, Weather::FAIR);
        let host = searcher(&mut world);
        let routers: Prefix = ServiceId::of_routers(authority_block("shop")).into();
        answerer(&mut world, routers, None);
        answerer(&mut world, routers, Some(&wrong));
        // It may answer for a service of the authority, and is no router.
        answerer(&mut world, Prefix::new(service("web.shop"), 96), Some(&right));
        let expected = if with_router {
            let router = router(&mut world);
            vec![as_found(&mut world, router)]
        } else {
            Vec::new()
        };
        // Once as strangers, once as hosts that have been met.
        for _ in 0..2 {
            assert_eq!(search(&mut world, host), expected);
        }
        world.run_for(30 * SECOND);
        nothing_left_over(&world).expect("nothing is left");
    }
}

/// Another host's certificate says nothing of who shows it.
#[test]
fn a_router_s_certificate_is_of_no_use_to_another_host() {
    let mut world = World::new(3, Weather::FAIR);
    let host = searcher(&mut world);
    let routers = ServiceId::of_routers(authority_block("shop"));
    let honest = router(&mut world);
    let thief = answerer(&mut world, routers.into(), None);
    let host_key = world.host(honest).public_key();
    let chain = certificate::chain(CertificateKind::Service, routers.into(), host_key, &keys().0);
    world.host(thief).sal.set_service_certificate(routers.into(), chain);
    let expected = as_found(&mut world, honest);
    assert_eq!(search(&mut world, host), [expected]);
}

/// What was said to one search proves nothing in the next, nor to anybody else.
#[test]
fn answers_that_are_sent_again_find_nothing() {
    let mut world = World::new(4, Weather::FAIR);
    let host = searcher(&mut world);
    let router = router(&mut world);
    world.recording = Some(Vec::new());
    assert_eq!(search(&mut world, host).len(), 1);
    let caught = world.recording.take().expect("recording");
    place(&mut world, router, &[]);
    begin(&mut world, host);
    let before = world.host(host).events.len();
    for (from, to, bytes) in caught.into_iter().filter(|(_, to, _)| *to != SEGMENT) {
        world.inject(from, to, bytes);
    }
    world.run_for(3 * SECOND);
    let is_found = |event: &Event| matches!(event, Event::RouterFound { .. });
    assert!(!world.host(host).events[before..].iter().any(is_found));
}

/// The host has registered since, and the two share another key. Words of the search that come once more, either way,
/// must not bring back what they had then.
#[test]
fn words_of_a_search_that_come_late_leave_a_registration_alone() {
    let mut world = World::new(10, Weather::FAIR);
    let (host, router, client) = (searcher(&mut world), router(&mut world), world.add_host(false));
    world.register(router, client);
    world.recording = Some(Vec::new());
    begin(&mut world, host);
    world.run_for(Duration::from_millis(200));
    let caught = world.recording.take().expect("recording");
    world.register(router, host);
    world.publish(router, host, "web.shop", 7);
    for (from, to, bytes) in caught.into_iter().filter(|(_, to, _)| *to != SEGMENT) {
        world.inject(from, to, bytes);
    }
    world.run_for(SECOND);
    let number = world.connect(client, "web.shop");
    world.run_for(6 * SECOND);
    assert_eq!(world.host(client).clients[number].outcome, Outcome::Answered(7));
}

#[test]
fn a_router_is_found_behind_relays_and_where_it_is_itself() {
    let mut world = World::new(5, Weather::FAIR);
    let host = searcher(&mut world);
    place(&mut world, host, &[[10, 1, 0, 1]]);
    for n in 2..4 {
        let relay = world.add_host(false);
        place(&mut world, relay, &[[10, 1, 0, n], [10, 2, 0, n]]);
        let now = world.now;
        world.host(relay).sal.set_relay(now, true);
    }
    let router = router(&mut world);
    place(&mut world, router, &[[10, 2, 0, 9]]);
    let expected = as_found(&mut world, router);
    assert_eq!(search(&mut world, host), [expected]);
}

/// It has met this host before, elsewhere, and proves itself by the keys that they share.
#[test]
fn a_router_that_has_moved_is_found_where_it_is_now() {
    let mut world = World::new(6, Weather::FAIR);
    let (host, router) = (searcher(&mut world), router(&mut world));
    world.register(router, host);
    let own = world.host(host).address;
    let IpAddr::V4(own) = own else { panic!("IPv4") };
    let [a, b, c, _] = own.octets();
    place(&mut world, router, &[[a, b, c, 250]]);
    let expected = as_found(&mut world, router);
    assert_eq!(search(&mut world, host), [expected]);
}

#[test]
fn without_a_trusted_key_nobody_is_believed() {
    let mut world = World::new(7, Weather::FAIR);
    let host = world.add_host(false);
    router(&mut world);
    assert!(search(&mut world, host).is_empty());
}

#[test]
fn searches_without_end_are_answered_at_a_bounded_rate() {
    let mut world = World::new(8, Weather::FAIR);
    let host = searcher(&mut world);
    let router = router(&mut world);
    for _ in 0..40 {
        for _ in 0..10 {
            begin(&mut world, host);
        }
        world.run_for(Duration::from_millis(10));
    }
    let answered = world.host(router).sal.counters().searches_answered;
    assert!((100..=150).contains(&answered), "a second's worth, and what came in 0.4 s: {answered}");
    world.run_for(30 * SECOND);
    nothing_left_over(&world).expect("nothing is left");
}

/// Nobody outside a segment can have its routers do the work of a handshake by this door, nor learn by it where they
/// are.
#[test]
fn a_search_that_came_to_a_router_alone_is_none() {
    let mut world = World::new(9, Weather::FAIR);
    let host = searcher(&mut world);
    let router = router(&mut world);
    world.recording = Some(Vec::new());
    begin(&mut world, host);
    let caught = world.recording.take().expect("recording");
    let (from, _, syn) = caught.into_iter().find(|(_, to, _)| *to == SEGMENT).expect("a search");
    let before = world.host(router).sal.counters().searches_answered;
    let to = SocketAddr::new(world.host(router).address, PORT);
    world.inject(from, to, syn);
    world.run_for(Duration::from_millis(100));
    assert_eq!(world.host(router).sal.counters().searches_answered, before + 1, "that to the segment alone");
}
