//! FORWARD to all, in virtual time: every next hop gets a copy of a first packet, and one of them the connection.

use std::net::SocketAddr;
use std::time::Duration;

use margay_core::certificate::{CertificateKind, TrustAnchor};
use margay_core::forward_all::COPIES_MAX;
use margay_core::key::SigningKey;
use margay_core::name::Prefix;
use margay_core::rng::Rng;
use margay_core::table::{Action, Allow, NextHop, Rule, RuleId};
use margay_sim::certificate;
use margay_sim::world::service;
use margay_sim::{HostId, Outcome, Weather, World};

const SECOND: Duration = Duration::from_secs(1);
const NAME: &str = "web.shop";

/// A router, hosts that are registered with it, and a client.
struct Shop {
    world: World,
    router: HostId,
    hosts: Vec<HostId>,
    client: HostId,
}

fn shop(seed: u64, weather: Weather, hosts: usize) -> Shop {
    let mut world = World::new(seed, weather);
    let router = world.add_host(true);
    let hosts: Vec<HostId> = (0..hosts).map(|_| world.add_host(false)).collect();
    let client = world.add_host(false);
    for host in hosts.iter().chain([&client]) {
        world.register(router, *host);
    }
    world.run_for(SECOND);
    Shop { world, router, hosts, client }
}

impl Shop {
    fn serve(&mut self, at: usize) {
        let number = u32::try_from(at).expect("few");
        self.world.host(self.hosts[at]).serve(service(NAME), 80, number, Allow::Any);
    }

    /// A rule for all on `on`, which leads to `to`.
    fn forward_all(&mut self, on: HostId, to: HostId) {
        let (now, address) = (self.world.now, self.world.host(to).address);
        let hop = NextHop { address: SocketAddr::new(address, margay_wire::PORT), host: None, router: false };
        let rule = Rule { priority: 100, weight: 1, action: Action::ForwardAll(hop) };
        self.world.host(on).sal.add_rule(now, service(NAME).into(), rule).expect("room");
    }

    fn connect(&mut self, time: Duration) -> Outcome {
        let client = self.world.connect(self.client, NAME);
        self.world.run_for(time);
        self.world.host(self.client).clients[client].outcome
    }

    /// How many programs have a connection.
    fn accepted(&mut self) -> usize {
        let hosts = self.hosts.clone();
        hosts
            .iter()
            .map(|host| self.world.host(*host).servers.iter().map(|one| one.accepted.len()).sum::<usize>())
            .sum()
    }

    fn forwarded(&mut self, router: HostId) -> u64 {
        self.world.host(router).sal.counters().forwarded
    }
}

#[test]
fn one_of_all_has_the_connection_and_the_others_none() {
    for seed in 0..20 {
        let mut shop = shop(seed, Weather::FAIR, 3);
        for at in 0..3 {
            shop.serve(at);
            shop.forward_all(shop.router, shop.hosts[at]);
        }
        assert!(matches!(shop.connect(SECOND), Outcome::Answered(_)), "seed {seed}");
        assert_eq!(shop.accepted(), 1, "seed {seed}");
        assert!(shop.forwarded(shop.router) >= 3, "each got a copy");
    }
}

#[test]
fn who_does_not_serve_the_name_or_refuses_does_not_spoil_it_for_who_does() {
    for seed in 0..40 {
        let mut shop = shop(seed, Weather::FAIR, 3);
        // The first serves another name, and so knows the client when it says that it has not this one; at the second
        // nobody listens any more, and its TCP refuses.
        shop.world.publish(shop.router, shop.hosts[0], "other.shop", 9);
        shop.world.connect(shop.client, "other.shop");
        shop.world.run_for(SECOND);
        shop.world.host(shop.hosts[1]).serve(service(NAME), 80, 1, Allow::Any);
        shop.world.host(shop.hosts[1]).servers.clear();
        shop.serve(2);
        let on = if seed % 2 == 0 { shop.router } else { shop.client };
        for at in 0..3 {
            shop.forward_all(on, shop.hosts[at]);
        }
        assert_eq!(shop.connect(SECOND), Outcome::Answered(2), "seed {seed}");
        // Once all of them know the client, too.
        assert_eq!(shop.connect(SECOND), Outcome::Answered(2), "seed {seed}");
    }
}

#[test]
fn a_host_of_its_own_makes_copies_too_and_in_bad_weather() {
    for seed in 0..20 {
        let mut shop = shop(seed, Weather::FOUL, 3);
        shop.serve(1);
        for at in 0..3 {
            shop.forward_all(shop.client, shop.hosts[at]);
        }
        assert_eq!(shop.connect(6 * SECOND), Outcome::Answered(1), "seed {seed}");
    }
}

/// Two of three answer without the right to; the client's own rule leads to all.
#[test]
fn who_may_not_speak_for_the_name_does_not_end_the_wait_for_who_may() {
    let right = SigningKey::generate(&mut Rng::new([77; 32]));
    for seed in 0..20 {
        let mut shop = shop(seed, Weather::FAIR, 3);
        let anchor = TrustAnchor { authority: service(NAME).authority(), key: right.public() };
        shop.world.host(shop.client).sal.add_trust_anchor(anchor);
        for at in 0..3 {
            shop.serve(at);
            shop.forward_all(shop.client, shop.hosts[at]);
        }
        let prefix = Prefix::from(service(NAME));
        let host_key = shop.world.host(shop.hosts[1]).public_key();
        let chain = certificate::chain(CertificateKind::Service, prefix, host_key, &right);
        shop.world.host(shop.hosts[1]).sal.set_service_certificate(prefix, chain);
        assert_eq!(shop.connect(SECOND), Outcome::Answered(1), "seed {seed}");
    }
}

#[test]
fn where_nobody_serves_the_program_hears_so_in_the_end() {
    let mut shop = shop(1, Weather::FAIR, 2);
    for at in 0..2 {
        shop.forward_all(shop.router, shop.hosts[at]);
    }
    let outcome = shop.connect(7 * SECOND);
    assert!(!matches!(outcome, Outcome::Answered(_) | Outcome::Pending), "{outcome:?}");
}

/// Three routers that each copy to both others: what comes from a router is not copied again, or a first packet would
/// be in the thousands before its hops are used up.
#[test]
fn routers_that_copy_to_each_other_do_not_multiply_a_packet() {
    let mut shop = shop(2, Weather::FAIR, 1);
    shop.serve(0);
    let others = [shop.world.add_host(true), shop.world.add_host(true)];
    let routers = [shop.router, others[0], others[1]];
    for one in routers {
        for other in routers.into_iter().filter(|other| *other != one) {
            shop.world.register(one, other);
            shop.forward_all(one, other);
        }
    }
    for router in routers {
        let sal = &mut shop.world.host(router).sal;
        let ways: Vec<RuleId> = sal.rules().filter(|(prefix, ..)| prefix.bits == 0).map(|(_, id, _)| id).collect();
        ways.into_iter().for_each(|way| assert!(sal.remove_rule(way)));
    }
    shop.world.run_for(SECOND);
    shop.forward_all(shop.router, shop.hosts[0]);
    assert_eq!(shop.connect(SECOND), Outcome::Answered(0));
    let forwarded: u64 = routers.into_iter().map(|router| shop.forwarded(router)).sum();
    assert!(forwarded <= 6, "{forwarded}: the first packet and another try, three times each at the most");
}

#[test]
fn copies_have_a_bound() {
    let mut shop = shop(3, Weather::FAIR, COPIES_MAX + 2);
    for at in 0..COPIES_MAX + 2 {
        shop.forward_all(shop.router, shop.hosts[at]);
    }
    let before = shop.forwarded(shop.router);
    shop.world.connect(shop.client, NAME);
    shop.world.run_for(SECOND / 10);
    assert_eq!(shop.forwarded(shop.router) - before, COPIES_MAX as u64);
}
