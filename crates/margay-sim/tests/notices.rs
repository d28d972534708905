//! Notices, in virtual time: names that hosts have heard of are asked for at one host alone; loss, relays, replays and
//! lies.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use margay_core::DropReason;
use margay_core::certificate::{CertificateKind, TrustAnchor};
use margay_core::key::{HostSecret, SigningKey};
use margay_core::name::{Name, Prefix};
use margay_core::notice::{HEARD_MAX, LIFETIME_S};
use margay_core::rng::Rng;
use margay_core::segment::SEGMENT;
use margay_core::table::{Allow, RuleId};
use margay_sim::check::nothing_left_over;
use margay_sim::world::service;
use margay_sim::{HostId, Outcome, Weather, World, certificate};
use margay_wire::{
    Addresses, Extension, Flags, FlowId, Kind, Message, MessageWriter, NoticeRepr, PORT, ResolvableRepr,
};

const SECOND: Duration = Duration::from_secs(1);
const NAME: &str = "web.shop";
/// Of the simulated wall clock.
const START_S: u64 = 1_800_000_000;

/// A host that tells, and goes by what it is told.
fn listener(world: &mut World) -> HostId {
    let host = world.add_host(false);
    let now = world.now;
    world.host(host).forward(Prefix::default(), SEGMENT.ip(), None);
    world.host(host).sal.set_notices(now, true);
    host
}

/// One that serves the name and answers `number`.
fn server(world: &mut World, number: u32) -> (HostId, RuleId) {
    let host = listener(world);
    let rule = world.host(host).serve(service(NAME), 80, number, Allow::Any).expect("room");
    world.touch(host);
    (host, rule)
}

fn connect(world: &mut World, host: HostId) -> Outcome {
    let client = world.connect(host, NAME);
    world.run_for(4 * SECOND);
    world.host(host).clients[client].outcome
}

fn place(world: &mut World, host: HostId, addresses: &[[u8; 4]]) {
    world.set_addresses(host, addresses.iter().map(|address| IpAddr::from(*address)).collect());
}

fn heard(world: &mut World, host: HostId) -> usize {
    let now = world.now;
    world.host(host).sal.heard(now).count()
}

fn syns_to_all(recording: &[(SocketAddr, SocketAddr, Vec<u8>)]) -> usize {
    recording.iter().filter(|(_, to, bytes)| *to == SEGMENT && margay_wire::kind_of(bytes) == Ok(Kind::Syn)).count()
}

/// The notices of a recording, one of each.
fn notices(recording: &[(SocketAddr, SocketAddr, Vec<u8>)]) -> Vec<(SocketAddr, Vec<u8>)> {
    let is_notice = |bytes: &[u8]| margay_wire::kind_of(bytes) == Ok(Kind::Notice);
    recording.iter().filter(|(_, _, bytes)| is_notice(bytes)).map(|(from, _, bytes)| (*from, bytes.clone())).collect()
}

/// What a host makes of a datagram to its whole segment.
fn tell(world: &mut World, host: HostId, from: SocketAddr, bytes: &[u8]) -> Result<(), DropReason> {
    let now = world.now;
    let result = world.host(host).sal.handle_datagram(now, Some(SEGMENT.ip()), from, bytes);
    world.touch(host);
    result
}

fn key(seed: u8) -> SigningKey {
    SigningKey::generate(&mut Rng::new([seed; 32]))
}

fn chain(host_key: [u8; 32], key: &SigningKey) -> Vec<u8> {
    certificate::chain(CertificateKind::Service, Prefix::new(service(NAME), 96), host_key, key)
}

/// What any program can say of itself.
fn notice(secret: &HostSecret, name: &str, at: SocketAddr, chain: &[u8]) -> Vec<u8> {
    let prefix = name.parse::<Name>().expect("literal").prefix();
    let mut address = [0; 20];
    Addresses::emit_one(at, 0, &mut address);
    let mut notice = NoticeRepr {
        epoch: 1,
        sequence: 1,
        until_s: START_S + LIFETIME_S,
        bits: prefix.bits,
        withdrawn: false,
        prefix: prefix.id.0,
        host_key: secret.public().0,
        signature: [0; 64],
    };
    notice.signature = secret.sign(&[&notice.signed_head()[..], &address].concat());
    let mut buf = vec![0; 2048];
    let mut writer = MessageWriter::new(&mut buf, Kind::Notice, FlowId(0), FlowId(0), 0);
    writer.flags(Flags::RESOLVABLE);
    let (service, hop_tag) = (prefix.id.0, [0; 8]);
    let resolvable = ResolvableRepr { hop_limit: 16, reply_to: None, via: None, service, nonce: 0, hop_tag };
    writer.resolvable(&resolvable).expect("room");
    writer.extension(&Extension::Notice(notice)).expect("room");
    writer.extension(&Extension::Addresses(Addresses::parse(&address).expect("one"))).expect("room");
    if !chain.is_empty() {
        writer.extension(&Extension::Certificate(chain)).expect("room");
    }
    let len = writer.finish().expect("room");
    buf.truncate(len);
    buf
}

#[test]
fn a_host_that_was_heard_of_is_asked_alone() {
    let mut world = World::new(1, Weather::FAIR);
    let (client, bystander) = (listener(&mut world), listener(&mut world));
    server(&mut world, 7);
    world.run_for(SECOND);
    assert_eq!((heard(&mut world, client), heard(&mut world, bystander)), (1, 1));
    world.recording = Some(Vec::new());
    for _ in 0..3 {
        assert_eq!(connect(&mut world, client), Outcome::Answered(7));
    }
    assert_eq!(syns_to_all(&world.recording.take().expect("recording")), 0);
    assert_eq!(world.host(client).sal.counters().notices_used, 3);
    world.run_for(30 * SECOND);
    nothing_left_over(&world).expect("nothing is left");
}

/// It is off unless it is turned on.
#[test]
fn hosts_that_do_not_want_it_neither_tell_nor_listen() {
    let mut world = World::new(2, Weather::FAIR);
    let silent = world.add_host(false);
    world.host(silent).serve(service(NAME), 80, 7, Allow::Any);
    world.touch(silent);
    server(&mut world, 8);
    world.run_for(SECOND);
    let counters = world.host(silent).sal.counters();
    assert_eq!((counters.messages_sent(Kind::Notice), counters.notices_heard), (0, 0));
    assert_eq!(heard(&mut world, silent), 0);
}

#[test]
fn what_is_withdrawn_is_gone_at_once_and_an_old_word_does_not_bring_it_back() {
    let mut world = World::new(3, Weather::FAIR);
    let client = listener(&mut world);
    world.recording = Some(Vec::new());
    let (host, rule) = server(&mut world, 7);
    world.run_for(SECOND);
    let said = notices(&world.recording.take().expect("recording"));
    world.host(host).sal.remove_rule(rule);
    world.host(host).servers.clear();
    world.touch(host);
    world.run_for(Duration::from_millis(100));
    assert_eq!(heard(&mut world, client), 0);
    assert!(said.len() >= 3, "what is new is said again: {}", said.len());
    for (from, bytes) in &said {
        assert_eq!(tell(&mut world, client, *from, bytes), Err(DropReason::Replayed));
    }
    world.run_for(Duration::from_secs(LIFETIME_S + 5));
    for (from, bytes) in &said {
        assert_eq!(tell(&mut world, client, *from, bytes), Err(DropReason::Stale), "when all is forgotten");
    }
    assert_eq!((heard(&mut world, client), connect(&mut world, client)), (0, Outcome::Refused));
}

#[test]
fn a_host_that_goes_says_so_and_one_that_vanishes_is_forgotten() {
    for says_so in [true, false] {
        let mut world = World::new(4, Weather::FAIR);
        let client = listener(&mut world);
        let (host, _) = server(&mut world, 7);
        world.run_for(SECOND);
        assert_eq!(heard(&mut world, client), 1);
        if says_so {
            let now = world.now;
            world.host(host).shut_down(now);
            world.touch(host);
            world.run_for(Duration::from_millis(100));
        } else {
            place(&mut world, host, &[]);
            world.run_for(Duration::from_secs(LIFETIME_S + 1));
        }
        assert_eq!(heard(&mut world, client), 0);
    }
}

#[test]
fn in_foul_weather_it_is_heard_sooner_or_later_and_names_are_found_all_the_while() {
    for seed in 1..20 {
        let mut world = World::new(seed, Weather::FOUL);
        let client = listener(&mut world);
        let (host, rule) = server(&mut world, 7);
        assert_eq!(connect(&mut world, client), Outcome::Answered(7), "seed {seed}");
        world.run_for(60 * SECOND);
        assert_eq!(heard(&mut world, client), 1, "seed {seed}");
        assert_eq!(connect(&mut world, client), Outcome::Answered(7), "seed {seed}");
        world.host(host).sal.remove_rule(rule);
        world.touch(host);
        world.run_for(Duration::from_secs(LIFETIME_S + 1));
        assert_eq!(heard(&mut world, client), 0, "seed {seed}");
    }
}

/// The one that was heard of is dead, refuses, or may not speak for the name: the segment is asked, and another
/// answers.
#[test]
fn what_comes_to_nothing_costs_one_syn() {
    for trouble in ["dead", "refuses", "lies"] {
        let mut world = World::new(5, Weather::FAIR);
        let client = listener(&mut world);
        let (first, _) = server(&mut world, 1);
        world.run_for(SECOND);
        match trouble {
            "dead" => place(&mut world, first, &[]),
            "refuses" => world.host(first).servers.clear(),
            _ => {
                // Trusted from now on, so that the one that was heard of has no right to the name.
                let anchor = TrustAnchor { authority: service(NAME).authority(), key: key(77).public() };
                world.host(client).sal.add_trust_anchor(anchor);
            }
        }
        // It tells nobody.
        let second = world.add_host(false);
        world.host(second).serve(service(NAME), 80, 2, Allow::Any);
        let certificate = chain(world.host(second).public_key(), &key(77));
        world.host(second).sal.set_service_certificate(Prefix::new(service(NAME), 96), certificate);
        assert_eq!(connect(&mut world, client), Outcome::Answered(2), "{trouble}: {:?}", world.host(client).events);
        assert_eq!(world.host(client).sal.counters().notices_failed, 1, "{trouble}");
        // The next one does not go there.
        assert_eq!(connect(&mut world, client), Outcome::Answered(2), "{trouble}");
        assert_eq!(world.host(client).sal.counters().notices_used, 1, "{trouble}");
    }
}

#[test]
fn of_several_hosts_those_whose_right_is_proved_come_first() {
    let mut world = World::new(6, Weather::FAIR);
    let client = listener(&mut world);
    let stranger = HostSecret::generate(&mut Rng::new([9; 32]));
    let at = SocketAddr::from(([10, 0, 0, 200], PORT));
    tell(&mut world, client, at, &notice(&stranger, NAME, at, &[])).expect("nobody is trusted yet");
    let anchor = TrustAnchor { authority: service(NAME).authority(), key: key(77).public() };
    world.host(client).sal.add_trust_anchor(anchor);
    let (host, _) = server(&mut world, 7);
    let certificate = chain(world.host(host).public_key(), &key(77));
    world.host(host).sal.set_service_certificate(Prefix::new(service(NAME), 96), certificate);
    world.touch(host);
    world.run_for(SECOND);
    assert_eq!(heard(&mut world, client), 2);
    for _ in 0..4 {
        assert_eq!(connect(&mut world, client), Outcome::Answered(7));
    }
    assert_eq!(world.host(client).sal.counters().notices_failed, 0);
}

#[test]
fn nothing_forged_is_believed() {
    let mut world = World::new(7, Weather::FAIR);
    let client = listener(&mut world);
    let anchor = TrustAnchor { authority: service(NAME).authority(), key: key(77).public() };
    world.host(client).sal.add_trust_anchor(anchor);
    let [honest, liar] = [1, 2].map(|seed| HostSecret::generate(&mut Rng::new([seed; 32])));
    let at = SocketAddr::from(([10, 0, 0, 200], PORT));
    let right = chain(honest.public().0, &key(77));
    let refused = |world: &mut World, bytes: &[u8], what: &str| {
        world.run_for(Duration::from_millis(10));
        assert!(tell(world, client, at, bytes).is_err(), "{what}");
        assert_eq!(heard(world, client), 0, "{what}");
    };
    refused(&mut world, &notice(&liar, NAME, at, &[]), "no certificate");
    refused(&mut world, &notice(&liar, NAME, at, &right), "another's certificate");
    refused(&mut world, &notice(&liar, NAME, at, &chain(liar.public().0, &key(78))), "nobody's certificate");
    refused(&mut world, &notice(&honest, "mail.shop", at, &right), "a certificate for another name");
    let good = notice(&honest, NAME, at, &right);
    let len = Message::parse(&good).expect("ours").signed_bytes().len();
    // Header and resolvable part carry nothing that is believed.
    for byte in 108..len {
        let mut bad = good.clone();
        bad[byte] ^= 1;
        let before = world.host(client).sal.counters().notices_heard;
        // Refused, or taken for a copy of what is known.
        let _ = tell(&mut world, client, at, &bad);
        let is_believed = world.host(client).sal.counters().notices_heard > before;
        world.run_for(Duration::from_millis(10));
        // Reserved bytes of extensions and padding mean nothing.
        let is_free = Message::parse(&bad).ok().zip(Message::parse(&good).ok()).is_some_and(|(bad, good)| {
            (bad.notice(), bad.addresses(), bad.certificate()) == (good.notice(), good.addresses(), good.certificate())
        });
        assert!(!is_believed || is_free, "byte {byte}");
    }
    let now = world.now;
    let at_router = world.host(client).sal.handle_datagram(now, None, at, &good);
    assert_eq!(at_router, Err(DropReason::Unexpected), "not to the whole segment");
}

#[test]
fn relays_pass_each_notice_on_once_and_no_further_than_it_may_go() {
    let mut world = World::new(8, Weather::FAIR);
    let client = listener(&mut world);
    place(&mut world, client, &[[10, 1, 0, 1]]);
    let relays: Vec<HostId> = (2..4)
        .map(|n| {
            let relay = world.add_host(false);
            place(&mut world, relay, &[[10, 1, 0, n], [10, 2, 0, n]]);
            let now = world.now;
            world.host(relay).sal.set_relay(now, true);
            relay
        })
        .collect();
    let (far, _) = server(&mut world, 7);
    place(&mut world, far, &[[10, 2, 0, 9]]);
    world.run_for(SECOND);
    let said = world.host(far).sal.counters().messages_sent(Kind::Notice);
    for relay in &relays {
        let passed = world.host(*relay).sal.counters().forwarded;
        assert!((1..=said).contains(&passed), "{passed} of {said}");
    }
    let now = world.now;
    let hops = world.host(client).sal.heard(now).next().expect("heard").hops;
    assert_eq!(hops, 1);
    world.recording = Some(Vec::new());
    assert_eq!(connect(&mut world, client), Outcome::Answered(7));
    assert_eq!(syns_to_all(&world.recording.take().expect("recording")), 0);
    let secret = HostSecret::generate(&mut Rng::new([5; 32]));
    let at = SocketAddr::from(([10, 2, 0, 77], PORT));
    let mut tired = notice(&secret, "mail.shop", at, &[]);
    tired[margay_wire::RESOLVABLE_OFFSET] = 1;
    assert_eq!(tell(&mut world, relays[0], at, &tired), Err(DropReason::HopLimit));
}

#[test]
fn the_table_is_bounded_in_all_and_for_each_host_and_what_is_proved_has_room() {
    let mut world = World::new(9, Weather::FAIR);
    let client = listener(&mut world);
    let at = SocketAddr::from(([10, 0, 0, 200], PORT));
    let one = HostSecret::generate(&mut Rng::new([1; 32]));
    let mut say = |secret: &HostSecret, name: &str, chain: &[u8]| {
        world.run_for(Duration::from_millis(6));
        tell(&mut world, client, at, &notice(secret, name, at, chain))
    };
    let kept = (0..80).filter(|n| say(&one, &format!("n{n}.other"), &[]).is_ok()).count();
    assert_eq!(kept, 64);
    let mut last = Ok(());
    for n in 0..HEARD_MAX {
        let mut seed = [2; 32];
        seed[..8].copy_from_slice(&n.to_be_bytes());
        last = say(&HostSecret::generate(&mut Rng::new(seed)), NAME, &[]);
    }
    assert_eq!(last, Err(DropReason::Full));
    world
        .host(client)
        .sal
        .add_trust_anchor(TrustAnchor { authority: service(NAME).authority(), key: key(77).public() });
    let honest = HostSecret::generate(&mut Rng::new([3; 32]));
    let right = chain(honest.public().0, &key(77));
    tell(&mut world, client, at, &notice(&honest, NAME, at, &right)).expect("it is proved");
    assert_eq!(world.host(client).sal.heard_count(), HEARD_MAX);
    assert!(world.host(client).sal.counters().notices_refused > 0);
}

#[test]
fn notices_without_end_are_checked_at_a_bounded_rate() {
    let mut world = World::new(10, Weather::FAIR);
    let client = listener(&mut world);
    let at = SocketAddr::from(([10, 0, 0, 200], PORT));
    let secret = HostSecret::generate(&mut Rng::new([1; 32]));
    let mut forged = notice(&secret, NAME, at, &[]);
    // The last byte of the signature.
    forged[20 + 88 + 4 + 147] ^= 1;
    let results: Vec<_> = (0..1000).map(|_| tell(&mut world, client, at, &forged)).collect();
    let checked = results.iter().filter(|result| **result == Err(DropReason::BadTag)).count();
    assert_eq!(checked, 200, "a second's worth");
    assert!(results[200..].iter().all(|result| *result == Err(DropReason::RateLimited)));
}

/// As other languages read it.
#[test]
fn the_vector_is_what_a_host_says() {
    let secret = HostSecret::from_bytes([3; 32]);
    let at = SocketAddr::from(([192, 0, 2, 9], PORT));
    let said: String = notice(&secret, NAME, at, &[]).iter().map(|byte| format!("{byte:02x}")).collect();
    let vectors = include_str!("../../margay-wire/vectors/messages.json");
    assert!(vectors.contains(&said), "{said}");
}
