//! Ad hoc, in virtual time: names that are asked for on a segment, with and without relays, routers and liars.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use margay_core::Event;
use margay_core::certificate::{CertificateKind, TrustAnchor};
use margay_core::key::SigningKey;
use margay_core::name::Prefix;
use margay_core::rng::Rng;
use margay_core::segment::SEGMENT;
use margay_core::table::Allow;
use margay_sim::certificate;
use margay_sim::check::nothing_left_over;
use margay_sim::world::service;
use margay_sim::{HostId, Outcome, Weather, World};
use margay_wire::{Kind, PORT};

const SECOND: Duration = Duration::from_secs(1);
const NAME: &str = "web.shop";

/// A host that asks its segments for what it does not know.
fn asker(world: &mut World) -> HostId {
    let host = world.add_host(false);
    world.host(host).forward(Prefix::default(), SEGMENT.ip(), None);
    host
}

/// One more host, which serves the name and answers `number`.
fn server(world: &mut World, number: u32) -> HostId {
    let host = world.add_host(false);
    world.host(host).serve(service(NAME), 80, number, Allow::Any);
    host
}

fn connect(world: &mut World, host: HostId) -> Outcome {
    let client = world.connect(host, NAME);
    world.run_for(4 * SECOND);
    world.host(host).clients[client].outcome
}

fn sent(world: &mut World, host: HostId) -> u64 {
    let counters = world.host(host).sal.counters();
    Kind::ALL.iter().map(|kind| counters.messages_sent(*kind)).sum()
}

fn place(world: &mut World, host: HostId, addresses: &[[u8; 4]]) {
    world.set_addresses(host, addresses.iter().map(|address| IpAddr::from(*address)).collect());
}

/// Gives a host the right to answer for the name, or one that nobody believes.
fn certify(world: &mut World, host: HostId, key: &SigningKey) {
    let prefix = Prefix::new(service(NAME), 96);
    let host_key = world.host(host).public_key();
    world
        .host(host)
        .sal
        .set_service_certificate(prefix, certificate::chain(CertificateKind::Service, prefix, host_key, key));
}

#[test]
fn a_name_is_found_without_a_router_and_others_keep_silent() {
    let mut world = World::new(1, Weather::FAIR);
    let client = asker(&mut world);
    let bystander = asker(&mut world);
    server(&mut world, 7);
    assert_eq!(connect(&mut world, client), Outcome::Answered(7));
    assert_eq!(sent(&mut world, bystander), 0);
    let bystander = world.host(bystander).sal.counters().clone();
    assert_eq!((bystander.forwarded, bystander.relayed), (0, 0));
}

#[test]
fn in_foul_weather_too() {
    for seed in 1..20 {
        let mut world = World::new(seed, Weather::FOUL);
        let client = asker(&mut world);
        server(&mut world, 7);
        server(&mut world, 7);
        let outcome = connect(&mut world, client);
        assert_eq!(outcome, Outcome::Answered(7), "seed {seed}: {:?}", world.host(client).events);
    }
}

#[test]
fn a_name_that_nobody_serves_ends_in_words_and_soon() {
    let mut world = World::new(2, Weather::FAIR);
    let client = asker(&mut world);
    world.add_host(false);
    assert_eq!(connect(&mut world, client), Outcome::Refused);
    let took = world.host(client).clients[0].took().expect("it has ended");
    assert!(took <= 2 * SECOND, "{took:?}");
    let is_said = |event: &Event| matches!(event, Event::ConnectFailed { why, .. } if why.contains("no host on this network segment serves"));
    assert!(world.host(client).events.iter().any(is_said), "{:?}", world.host(client).events);
    nothing_left_over(&world).expect("nothing is left");
}

#[test]
fn of_several_instances_one_is_taken_and_the_others_forget() {
    let mut world = World::new(3, Weather::FAIR);
    let client = asker(&mut world);
    let servers = [server(&mut world, 1), server(&mut world, 2), server(&mut world, 3)];
    assert!(matches!(connect(&mut world, client), Outcome::Answered(_)));
    let accepted = servers.map(|host| world.host(host).servers[0].accepted.len());
    assert_eq!(accepted.iter().sum::<usize>(), 1, "{accepted:?}");
    assert_eq!(world.host(client).sal.flow_count(), 1);
    // Sooner than a half-open flow ends by itself: they were told.
    let flows = servers.map(|host| world.host(host).sal.flow_count());
    assert_eq!(flows.iter().sum::<usize>(), 1, "{flows:?}");
    world.run_for(30 * SECOND);
    nothing_left_over(&world).expect("nothing is left");
}

/// The liars answer first: they were there before.
#[test]
fn the_first_answer_that_may_speak_for_the_name_wins() {
    let (right, wrong) = (SigningKey::generate(&mut Rng::new([77; 32])), SigningKey::generate(&mut Rng::new([78; 32])));
    for with_honest in [true, false] {
        let mut world = World::new(4, Weather::FAIR);
        let client = asker(&mut world);
        let anchor = TrustAnchor { authority: service(NAME).authority(), key: right.public() };
        world.host(client).sal.add_trust_anchor(anchor);
        let liars = [server(&mut world, 1), server(&mut world, 2)];
        certify(&mut world, liars[1], &wrong);
        if with_honest {
            let honest = server(&mut world, 7);
            certify(&mut world, honest, &right);
        }
        // Once as strangers, once as hosts that have been met.
        for _ in 0..2 {
            let outcome = connect(&mut world, client);
            let events = &world.host(client).events;
            if with_honest {
                assert_eq!(outcome, Outcome::Answered(7), "{events:?}");
            } else {
                assert_eq!(outcome, Outcome::Refused);
                let is_said =
                    |event: &Event| matches!(event, Event::ConnectFailed { why, .. } if why.contains("may not speak"));
                assert!(events.iter().any(is_said), "{events:?}");
            }
        }
        assert!(liars.iter().all(|host| world.host(*host).servers[0].accepted.is_empty()));
        world.run_for(30 * SECOND);
        nothing_left_over(&world).expect("nothing is left");
    }
}

#[test]
fn a_host_that_refuses_does_not_speak_for_others() {
    let mut world = World::new(5, Weather::FAIR);
    let client = asker(&mut world);
    let full = world.add_host(false);
    // Published, and nothing listens there.
    world.host(full).serve(service(NAME), 80, 1, Allow::Any);
    world.host(full).servers.clear();
    server(&mut world, 7);
    for _ in 0..3 {
        assert_eq!(connect(&mut world, client), Outcome::Answered(7), "{:?}", world.host(client).events);
    }
}

#[test]
fn a_router_on_the_segment_answers_for_those_that_it_knows() {
    let mut world = World::new(6, Weather::FAIR);
    let client = asker(&mut world);
    let (router, instance) = (world.add_host(true), world.add_host(false));
    place(&mut world, instance, &[[10, 9, 0, 1]]);
    world.register(router, instance);
    world.publish(router, instance, NAME, 7);
    assert_eq!(connect(&mut world, client), Outcome::Answered(7));
}

/// `count` relays side by side, between the asker's segment and another.
fn with_relays(seed: u64, count: u8) -> (World, HostId, Vec<HostId>) {
    let mut world = World::new(seed, Weather::FAIR);
    let client = asker(&mut world);
    place(&mut world, client, &[[10, 1, 0, 1]]);
    let relays: Vec<_> = (0..count).map(|_| world.add_host(false)).collect();
    for (n, relay) in (2..).zip(&relays) {
        place(&mut world, *relay, &[[10, 1, 0, n], [10, 2, 0, n]]);
        let now = world.now;
        world.host(*relay).sal.set_relay(now, true);
    }
    (world, client, relays)
}

#[test]
fn relays_pass_the_question_on_and_the_answer_back() {
    for relays in [1, 2] {
        let (mut world, client, relays) = with_relays(7, relays);
        let far = world.add_host(false);
        place(&mut world, far, &[[10, 2, 0, 9], [10, 3, 0, 9]]);
        let now = world.now;
        world.host(far).sal.set_relay(now, true);
        let server = server(&mut world, 7);
        place(&mut world, server, &[[10, 3, 0, 1]]);
        for _ in 0..2 {
            assert_eq!(connect(&mut world, client), Outcome::Answered(7), "{:?}", world.host(client).events);
        }
        let forwarded: Vec<_> = relays.iter().map(|host| world.host(*host).sal.counters().forwarded).collect();
        assert_eq!(
            forwarded.iter().sum::<u64>(),
            2 * relays.len() as u64,
            "each passes each SYN on once: {forwarded:?}"
        );
        assert_eq!(world.host(server).servers[0].accepted.len(), 2);
    }
}

#[test]
fn a_router_is_found_behind_a_relay() {
    let (mut world, client, _) = with_relays(8, 1);
    let (router, instance) = (world.add_host(true), world.add_host(false));
    place(&mut world, router, &[[10, 2, 0, 9]]);
    place(&mut world, instance, &[[10, 4, 0, 9]]);
    world.register(router, instance);
    world.publish(router, instance, NAME, 7);
    assert_eq!(connect(&mut world, client), Outcome::Answered(7), "{:?}", world.host(client).events);
}

/// Else anybody outside could have a segment asked, and an answer sent to a third.
#[test]
fn what_came_to_a_relay_alone_is_not_passed_on() {
    let (mut world, client, relays) = with_relays(9, 1);
    world.recording = Some(Vec::new());
    connect(&mut world, client);
    let caught = world.recording.take().expect("recording");
    let is_syn = |(_, _, bytes): &&(SocketAddr, SocketAddr, Vec<u8>)| margay_wire::kind_of(bytes) == Ok(Kind::Syn);
    let mut syn = caught.iter().find(is_syn).map(|(_, _, bytes)| bytes.clone());
    let before = world.host(relays[0]).sal.counters().forwarded;
    if let Some(syn) = &mut syn {
        // Another flow, so that it is not taken for a copy.
        syn[12..16].copy_from_slice(&[1, 2, 3, 4]);
        world.inject(
            SocketAddr::new([203, 0, 113, 5].into(), PORT),
            SocketAddr::new([10, 1, 0, 2].into(), PORT),
            syn.clone(),
        );
    }
    world.run_for(SECOND);
    assert!(syn.is_some() && before > 0);
    assert_eq!(world.host(relays[0]).sal.counters().forwarded, before);
}

#[test]
fn questions_without_end_are_passed_on_at_a_bounded_rate() {
    let (mut world, client, relays) = with_relays(10, 1);
    for _ in 0..40 {
        for _ in 0..100 {
            world.connect(client, NAME);
        }
        world.run_for(Duration::from_millis(10));
    }
    let passed = world.host(relays[0]).sal.counters().forwarded;
    assert!((1000..=1500).contains(&passed), "a second's worth, and what came in 0.4 s: {passed}");
}
