//! Who may answer and who may connect, by certificates: what is proved, what ends, what is taken back, and keys that
//! follow each other.

mod shop;

use std::net::SocketAddr;
use std::time::Duration;

use margay_core::Event;
use margay_core::certificate::{Certificate, CertificateKind, Revocation, TrustAnchor, decode_chain, encode_chain};
use margay_core::key::{SigningKey, VerifyingKey};
use margay_core::key_revocation::KeyRevocation;
use margay_core::name::{Prefix, self_certifying_tail};
use margay_core::rng::Rng;
use margay_core::succession::Succession;
use margay_core::table::Allow;
use margay_sim::certificate::chain;
use margay_sim::check::all_ended_within;
use margay_sim::world::service;
use margay_sim::{HostId, Outcome, Weather, World};
use shop::{Shop, outcome, shop};

const SECOND: Duration = Duration::from_secs(1);

/// The client's name has the hash of a key in it, and the client trusts nobody: whoever its router, or an impostor at
/// its address, sends it to answers by that key or not at all.
#[test]
fn a_name_with_a_key_in_it_is_answered_by_that_key_or_not_at_all() {
    let mut shop = shop(14, Weather::FAIR);
    let [own, other] = [5, 6].map(|seed| SigningKey::generate(&mut Rng::new([seed; 32])));
    let mut name = service("web.shop");
    let head = name.0[..12].try_into().expect("twelve");
    name.0[12..].copy_from_slice(&self_certifying_tail(&own.public(), &head));
    let whole = Prefix::from(name);
    let (instance, at) = (shop.instances[0], SocketAddr::new("fd5a:4c00::77".parse().expect("literal"), 80));
    shop.world.host(shop.client).sal.bind_name(at.ip(), name);
    shop.world.host(instance).serve(name, 80, 7, Allow::Any);
    let (address, host_key) = (shop.world.host(instance).address, shop.world.host(instance).public_key());
    shop.world.host(shop.router).forward(whole, address, Some(host_key));
    let by = |key: &SigningKey| chain(CertificateKind::Service, whole, host_key, key);
    let link = Certificate {
        host_key: [0; 32],
        delegate: Some(own.public()),
        ..decode_chain(&by(&own)).expect("made").remove(0)
    };
    let shown = [Vec::new(), by(&other), encode_chain(&[link.sign(&own)]), by(&own)];
    let answered: Vec<bool> = shown
        .into_iter()
        .map(|chain| {
            shop.world.host(instance).sal.set_service_certificate(whole, chain);
            let now = shop.world.now;
            let connecting = shop.world.host(shop.client).connect(now, at);
            shop.world.run_for(2 * SECOND);
            matches!(outcome(&mut shop.world, shop.client, connecting), Outcome::Answered(_))
        })
        .collect();
    assert_eq!(answered, [false, false, false, true], "nothing, another key's word, a delegation, its own key's");
    assert!(shop.world.host(shop.client).sal.flows().all(|flow| flow.authenticated));
}

/// A shop whose names have an authority: members may connect, certified hosts may answer.
fn certified(seed: u64) -> (Shop, SigningKey) {
    let mut shop = shop(seed, Weather::FAIR);
    let authority = SigningKey::generate(&mut Rng::new([77; 32]));
    let name = service("web.shop");
    for host in [shop.router, shop.instances[0], shop.instances[1], shop.client] {
        let sal = &mut shop.world.host(host).sal;
        sal.add_trust_anchor(TrustAnchor { authority: name.authority(), key: authority.public() });
    }
    for host in shop.instances {
        let chain = certificate(&mut shop.world, host, CertificateKind::Service, &authority, 4_000_000_000);
        shop.world.host(host).sal.set_service_certificate(Prefix::new(name, 96), chain);
        let rules: Vec<_> =
            shop.world.host(host).sal.rules().filter(|(prefix, ..)| prefix.bits == 256).map(|(_, id, _)| id).collect();
        for rule in rules {
            shop.world.host(host).sal.remove_rule(rule);
        }
    }
    for (number, host) in [1, 2].into_iter().zip(shop.instances) {
        shop.world.host(host).servers.clear();
        shop.world.host(host).serve(name, 80, number, Allow::Authority);
    }
    (shop, authority)
}

fn certificate(world: &mut World, host: HostId, kind: CertificateKind, key: &SigningKey, not_after_s: u64) -> Vec<u8> {
    let bits = if kind == CertificateKind::Member { 64 } else { 96 };
    let certificate = Certificate {
        kind,
        prefix: Prefix::new(service("web.shop"), bits),
        host_key: world.host(host).public_key(),
        not_before_s: 0,
        not_after_s,
        groups: Vec::new(),
        issuer: VerifyingKey([0; 32]),
        delegate: None,
        signature: [0; 64],
    };
    encode_chain(&[certificate.sign(key)])
}

fn connect_once(shop: &mut Shop) -> Outcome {
    let client = shop.world.connect(shop.client, "web.shop");
    shop.world.run_for(2 * SECOND);
    outcome(&mut shop.world, shop.client, client)
}

fn accepted(shop: &mut Shop) -> usize {
    let instances = shop.instances;
    instances.into_iter().map(|host| shop.world.host(host).servers[0].accepted.len()).sum()
}

#[test]
fn members_connect_and_others_do_not() {
    let (mut shop, authority) = certified(12);
    assert!(matches!(connect_once(&mut shop), Outcome::Refused | Outcome::Reset));
    assert_eq!(accepted(&mut shop), 0, "accept never returns an unproved peer");
    let expired = certificate(&mut shop.world, shop.client, CertificateKind::Member, &authority, 1);
    shop.world.host(shop.client).sal.set_membership(expired);
    assert!(matches!(connect_once(&mut shop), Outcome::Refused | Outcome::Reset));
    let foreign = SigningKey::generate(&mut Rng::new([78; 32]));
    let forged = certificate(&mut shop.world, shop.client, CertificateKind::Member, &foreign, 4_000_000_000);
    shop.world.host(shop.client).sal.set_membership(forged);
    assert!(matches!(connect_once(&mut shop), Outcome::Refused | Outcome::Reset));
    assert_eq!(accepted(&mut shop), 0);
    let good = certificate(&mut shop.world, shop.client, CertificateKind::Member, &authority, 4_000_000_000);
    shop.world.host(shop.client).sal.set_membership(good);
    for _ in 0..4 {
        assert!(matches!(connect_once(&mut shop), Outcome::Answered(_)));
    }
    assert!(shop.world.host(shop.client).sal.flows().all(|flow| flow.authenticated));
}

/// A host that belongs to two authorities shows a server which is needed, in any order.
#[test]
fn a_member_of_two_authorities_connects_to_services_of_both() {
    let (mut shop, first) = certified(22);
    let second = SigningKey::generate(&mut Rng::new([80; 32]));
    let name = service("web.den");
    let at = SocketAddr::new("fd5a:4c00::77".parse().expect("literal"), 80);
    let client = shop.client;
    let instance = shop.instances[0];
    for host in [shop.router, instance, client] {
        let anchor = TrustAnchor { authority: name.authority(), key: second.public() };
        shop.world.host(host).sal.add_trust_anchor(anchor);
    }
    let address = shop.world.host(instance).address;
    let host_key = shop.world.host(instance).public_key();
    let right = chain(CertificateKind::Service, Prefix::new(name, 96), host_key, &second);
    shop.world.host(instance).sal.set_service_certificate(Prefix::new(name, 96), right);
    shop.world.host(instance).serve(name, 80, 7, Allow::Authority);
    shop.world.host(shop.router).forward(Prefix::from(name), address, Some(host_key));
    shop.world.host(client).sal.bind_name(at.ip(), name);
    let own_key = shop.world.host(client).public_key();
    for (of, key) in [("web.shop", &first), ("web.den", &second)] {
        let shown = chain(CertificateKind::Member, Prefix::new(service(of), 64), own_key, key);
        shop.world.host(client).sal.set_membership(shown);
    }
    for _ in 0..4 {
        assert!(matches!(connect_once(&mut shop), Outcome::Answered(_)));
        let now = shop.world.now;
        let connecting = shop.world.host(client).connect(now, at);
        shop.world.run_for(2 * SECOND);
        assert!(matches!(outcome(&mut shop.world, client, connecting), Outcome::Answered(_)));
    }
}

#[test]
fn a_membership_that_ends_during_a_set_up_has_been_asked_for_anew() {
    const BEGIN_S: u64 = 1_800_000_000;
    let (mut shop, authority) = certified(12);
    let now = shop.world.now;
    for host in [shop.router, shop.instances[0], shop.instances[1], shop.client] {
        shop.world.host(host).sal.set_wall_clock(now, BEGIN_S);
    }
    let member = |shop: &mut Shop, until_s| {
        let shown = certificate(&mut shop.world, shop.client, CertificateKind::Member, &authority, until_s);
        shop.world.host(shop.client).sal.set_membership(shown);
    };
    member(&mut shop, BEGIN_S + 20);
    for _ in 0..8 {
        assert!(matches!(connect_once(&mut shop), Outcome::Answered(_)));
    }
    // Renewed long before its end; the servers know the old one until somebody asks.
    member(&mut shop, BEGIN_S + 10_000);
    shop.world.run_until(now + Duration::from_millis(19_900));
    let across: Vec<_> = (0..200)
        .map(|_| {
            shop.world.run_for(Duration::from_millis(1));
            shop.world.connect(shop.client, "web.shop")
        })
        .collect();
    shop.world.run_for(5 * SECOND);
    let outcomes = across.into_iter().map(|client| outcome(&mut shop.world, shop.client, client));
    let failed: Vec<_> = outcomes.filter(|outcome| !matches!(outcome, Outcome::Answered(_))).collect();
    assert!(failed.is_empty(), "{failed:?}");
}

/// For flows that are there see `trouble.rs`: they notice nothing.
#[test]
fn a_clock_that_jumps_refuses_new_connections_in_words_until_it_is_right() {
    let (mut shop, authority) = certified(12);
    let member = certificate(&mut shop.world, shop.client, CertificateKind::Member, &authority, 4_000_000_000);
    shop.world.host(shop.client).sal.set_membership(member);
    assert!(matches!(connect_once(&mut shop), Outcome::Answered(_)));
    let now = shop.world.now;
    shop.world.host(shop.client).sal.set_wall_clock(now, 4_000_003_600);
    assert_eq!(connect_once(&mut shop), Outcome::Refused);
    let said = shop.world.host(shop.client).events.iter().any(|event| match event {
        Event::ConnectFailed { why, .. } => why.contains("expired; check both clocks"),
        _ => false,
    });
    assert!(said);
    let now = shop.world.now;
    shop.world.host(shop.client).sal.set_wall_clock(now, 1_800_000_000);
    assert!(matches!(connect_once(&mut shop), Outcome::Answered(_)));
}

#[test]
fn a_host_without_the_right_certificate_does_not_answer() {
    let (mut shop, authority) = certified(13);
    let member = certificate(&mut shop.world, shop.client, CertificateKind::Member, &authority, 4_000_000_000);
    shop.world.host(shop.client).sal.set_membership(member);
    let foreign = SigningKey::generate(&mut Rng::new([78; 32]));
    let prefix = Prefix::new(service("web.shop"), 96);
    let instances = shop.instances;
    for host in instances {
        let other_host = certificate(&mut shop.world, shop.client, CertificateKind::Service, &authority, 4_000_000_000);
        let expired = certificate(&mut shop.world, host, CertificateKind::Service, &authority, 1);
        let forged = certificate(&mut shop.world, host, CertificateKind::Service, &foreign, 4_000_000_000);
        for bad in [Vec::new(), other_host, expired, forged] {
            for both in instances {
                shop.world.host(both).sal.set_service_certificate(prefix, bad.clone());
            }
            assert_eq!(connect_once(&mut shop), Outcome::Refused);
        }
    }
    assert_eq!(accepted(&mut shop), 0);
    all_ended_within(&shop.world, Duration::from_millis(100)).expect("a clear error at once");
}

#[test]
fn who_was_put_out_neither_connects_nor_answers_until_it_is_let_in_again() {
    const END_S: u64 = 4_000_000_000;
    let (mut shop, authority) = certified(16);
    let (client, instances) = (shop.client, shop.instances);
    let member = |shop: &mut Shop, end_s: u64| {
        let chain = certificate(&mut shop.world, client, CertificateKind::Member, &authority, end_s);
        shop.world.host(client).sal.set_membership(chain);
    };
    member(&mut shop, END_S);
    assert!(matches!(connect_once(&mut shop), Outcome::Answered(_)));
    let revocation = |shop: &mut Shop, host: HostId| {
        let host_key = shop.world.host(host).public_key();
        Revocation { authority: service("web.shop").authority(), host_key, until_s: END_S, by: None }
    };
    let before = accepted(&mut shop);
    let put_out = revocation(&mut shop, client);
    for host in instances {
        shop.world.host(host).sal.revoke(put_out);
    }
    assert!(matches!(connect_once(&mut shop), Outcome::Refused | Outcome::Reset));
    assert_eq!(accepted(&mut shop), before);
    member(&mut shop, END_S + 1);
    assert!(matches!(connect_once(&mut shop), Outcome::Answered(_)));
    for host in instances {
        let put_out = revocation(&mut shop, host);
        shop.world.host(client).sal.revoke(put_out);
    }
    assert_eq!(connect_once(&mut shop), Outcome::Refused);
    let said = shop.world.host(client).events.iter().any(|event| match event {
        Event::ConnectFailed { why, .. } => why.contains("put out of the authority"),
        _ => false,
    });
    assert!(said);
}

#[test]
fn what_a_router_signed_is_believed_until_its_key_is_revoked_and_no_longer() {
    const END_S: u64 = 4_000_000_000;
    let (mut shop, authority) = certified(17);
    let (client, instances, block) = (shop.client, shop.instances, service("web.shop").authority());
    let router = SigningKey::generate(&mut Rng::new([78; 32]));
    let below = |shop: &mut Shop, host: HostId, kind: CertificateKind| {
        let own = certificate(&mut shop.world, host, kind, &router, END_S);
        let leaf = decode_chain(&own).expect("just made").remove(0);
        let prefix = Prefix::new(service("web.shop"), 64);
        let link = Certificate { prefix, host_key: [0; 32], delegate: Some(router.public()), ..leaf.clone() };
        encode_chain(&[link.sign(&authority), leaf])
    };
    let member = below(&mut shop, client, CertificateKind::Member);
    shop.world.host(client).sal.set_membership(member);
    assert!(matches!(connect_once(&mut shop), Outcome::Answered(_)));
    let before = accepted(&mut shop);
    let revocation = KeyRevocation::new(block, router.public(), END_S, &authority);
    for host in instances {
        shop.world.host(host).sal.revoke_key(revocation);
    }
    assert!(matches!(connect_once(&mut shop), Outcome::Refused | Outcome::Reset));
    assert_eq!(accepted(&mut shop), before);
    let member = certificate(&mut shop.world, client, CertificateKind::Member, &authority, END_S);
    shop.world.host(client).sal.set_membership(member);
    assert!(matches!(connect_once(&mut shop), Outcome::Answered(_)), "another router has signed for it");
    for host in instances {
        let chain = below(&mut shop, host, CertificateKind::Service);
        shop.world.host(host).sal.set_service_certificate(Prefix::new(service("web.shop"), 96), chain);
    }
    assert!(matches!(connect_once(&mut shop), Outcome::Answered(_)), "the client has not heard of it");
    shop.world.host(client).sal.revoke_key(revocation);
    assert_eq!(connect_once(&mut shop), Outcome::Refused);
    let said = shop.world.host(client).events.iter().any(|event| match event {
        Event::ConnectFailed { why, .. } => why.contains("may sign for the authority no longer"),
        _ => false,
    });
    assert!(said);
}

#[test]
fn connections_go_on_while_one_key_follows_another_and_the_old_one_ends() {
    const BEGIN_S: u64 = 1_800_000_000;
    const END_S: u64 = 4_000_000_000;
    let (mut shop, old) = certified(18);
    let (client, instances) = (shop.client, shop.instances);
    let new = SigningKey::generate(&mut Rng::new([79; 32]));
    let begin = shop.world.now;
    for host in [shop.router, instances[0], instances[1], client] {
        shop.world.host(host).sal.set_wall_clock(begin, BEGIN_S);
    }
    let member = |shop: &mut Shop, key: &SigningKey| {
        let shown = certificate(&mut shop.world, client, CertificateKind::Member, key, END_S);
        shop.world.host(client).sal.set_membership(shown);
    };
    let serve = |shop: &mut Shop, host: HostId, key: &SigningKey| {
        let chain = certificate(&mut shop.world, host, CertificateKind::Service, key, END_S);
        shop.world.host(host).sal.set_service_certificate(Prefix::new(service("web.shop"), 96), chain);
    };
    member(&mut shop, &old);
    assert!(matches!(connect_once(&mut shop), Outcome::Answered(_)));
    let block = service("web.shop").authority();
    let succession = Succession::new(block, &old, &new, BEGIN_S + 20, BEGIN_S + 40);
    let mut connects = Vec::new();
    for round in 0..240 {
        match round {
            // Hosts hear of it one after the other, and get what the new key signs one after the other.
            8 => shop.world.host(client).sal.succeed(&succession),
            16 => shop.world.host(instances[0]).sal.succeed(&succession),
            24 => shop.world.host(instances[1]).sal.succeed(&succession),
            84 => serve(&mut shop, instances[0], &new),
            100 => member(&mut shop, &new),
            140 => serve(&mut shop, instances[1], &new),
            _ => {}
        }
        connects.push(shop.world.connect(client, "web.shop"));
        shop.world.run_until(begin + 2 * SECOND + (round + 1) * Duration::from_millis(250));
    }
    let outcomes = connects.into_iter().map(|connect| outcome(&mut shop.world, client, connect));
    let failed: Vec<_> = outcomes.filter(|outcome| !matches!(outcome, Outcome::Answered(_))).collect();
    assert!(failed.is_empty(), "{failed:?}");
    let before = accepted(&mut shop);
    let (router, thief) = (shop.router, shop.world.add_host(false));
    shop.world.register(router, thief);
    shop.client = thief;
    shop.world.host(thief).sal.add_trust_anchor(TrustAnchor { authority: block, key: new.public() });
    for (key, is_believed) in [(&old, false), (&new, true)] {
        let shown = certificate(&mut shop.world, thief, CertificateKind::Member, key, END_S);
        shop.world.host(thief).sal.set_membership(shown);
        assert_eq!(matches!(connect_once(&mut shop), Outcome::Answered(_)), is_believed);
    }
    assert_eq!(accepted(&mut shop), before + 1);
    shop.client = client;
    for host in instances {
        serve(&mut shop, host, &old);
    }
    assert_eq!(connect_once(&mut shop), Outcome::Refused, "nobody answers by the old key");
}

#[test]
fn an_instance_that_leaves_while_its_listener_is_slow_answers_by_what_it_had() {
    let (mut shop, authority) = certified(13);
    let member = certificate(&mut shop.world, shop.client, CertificateKind::Member, &authority, 4_000_000_000);
    shop.world.host(shop.client).sal.set_membership(member);
    let (instances, prefix) = (shop.instances, Prefix::new(service("web.shop"), 96));
    for host in instances {
        shop.world.host(host).full_queue = 1;
    }
    let client = shop.world.connect(shop.client, "web.shop");
    shop.world.run_for(Duration::from_millis(50));
    let half_open: usize = instances.into_iter().map(|host| shop.world.host(host).sal.half_open_count()).sum();
    assert_eq!(half_open, 1, "it was asked and has not answered");
    for host in instances {
        shop.world.host(host).sal.set_service_certificate(prefix, Vec::new());
    }
    shop.world.run_for(SECOND);
    assert!(matches!(outcome(&mut shop.world, shop.client, client), Outcome::Answered(_)));
}
