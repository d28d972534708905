//! First packets by way of several routers, in virtual time: up, once across, and down; and a clear no where nobody
//! serves a name.

use std::time::Duration;

use margay_core::DropReason;
use margay_core::key::HostPublic;
use margay_core::way::Relation;
use margay_sim::world::service;
use margay_sim::{HostId, Outcome, Weather, World};

const SECOND: Duration = Duration::from_secs(1);

/// `top` is above `hub`, which is above `a` and `b`; `c` is beside `a`, and below `hub`, too. A client in site a, a
/// server in b.
struct Sites {
    world: World,
    top: HostId,
    hub: HostId,
    a: HostId,
    b: HostId,
    c: HostId,
    client: HostId,
    server: HostId,
}

fn sites(seed: u64) -> Sites {
    let mut world = World::new(seed, Weather::FAIR);
    let [top, hub, a, b, c] = [(); 5].map(|()| world.add_host(true));
    let [client, server] = [(); 2].map(|()| world.add_host(false));
    for (above, below) in [(top, hub), (hub, a), (hub, b), (hub, c)] {
        world.register(above, below);
        relate(&mut world, above, below, Relation::Below);
        relate(&mut world, below, above, Relation::Above);
    }
    world.register(a, client);
    world.register(b, server);
    let mut this = Sites { world, top, hub, a, b, c, client, server };
    this.world.run_for(SECOND);
    this
}

fn relate(world: &mut World, own: HostId, other: HostId, relation: Relation) {
    let other = HostPublic(world.host(other).public_key()).id();
    world.host(own).sal.set_relation(other, Some(relation));
}

impl Sites {
    /// A router below has announced a name.
    fn announce(&mut self, from: HostId, to: HostId, name: &str) {
        let (address, key) = (self.world.host(from).address, self.world.host(from).public_key());
        self.world.host(to).forward(service(name).into(), address, Some(key));
    }

    fn connect(&mut self, name: &str) -> Outcome {
        let client = self.world.connect(self.client, name);
        self.world.run_for(SECOND / 2);
        self.world.host(self.client).clients[client].outcome
    }

    /// How often each of the routers has sent a first packet on.
    fn forwarded(&mut self) -> [u64; 5] {
        [self.top, self.hub, self.a, self.b, self.c].map(|host| self.world.host(host).sal.counters().forwarded)
    }
}

#[test]
fn a_first_packet_goes_up_and_down_by_announcements_and_its_answer_straight_back() {
    let mut sites = sites(1);
    sites.world.publish(sites.b, sites.server, "web.shop", 7);
    sites.announce(sites.b, sites.hub, "web.shop");
    assert_eq!(sites.connect("web.shop"), Outcome::Answered(7));
    let [top, hub, a, b, c] = sites.forwarded();
    // A copy of the first packet may have been on its way.
    assert!(top == 0 && c == 0 && hub >= 1 && hub == a && a == b, "{:?}", sites.forwarded());
    let dropped = sites.world.host(sites.a).sal.counters().drops(DropReason::BadHopTag);
    assert_eq!(dropped, 0, "the server asks no router that it shares no key with to relay");
}

#[test]
fn a_name_that_nobody_serves_is_refused_by_the_highest_router_and_the_program_hears_of_it() {
    let mut sites = sites(2);
    assert_eq!(sites.connect("nobody.shop"), Outcome::Refused);
    assert_eq!(sites.forwarded()[0], 0);
}

#[test]
fn nothing_goes_back_to_the_router_that_it_comes_from() {
    let mut sites = sites(3);
    // An aggregate covers what its site does not serve: a has announced it, and the hub further up.
    sites.announce(sites.a, sites.hub, "gone.shop");
    sites.announce(sites.hub, sites.top, "gone.shop");
    assert_eq!(sites.connect("gone.shop"), Outcome::Refused);
    assert_eq!(sites.forwarded(), [0, 1, 1, 0, 0], "by a to the hub, by that to the top, and no further");
    // Another site has announced it as well: the hub picks that one, and never the one that the packet comes from.
    sites.world.publish(sites.b, sites.server, "gone.shop", 8);
    sites.announce(sites.b, sites.hub, "gone.shop");
    for _ in 0..8 {
        assert_eq!(sites.connect("gone.shop"), Outcome::Answered(8));
    }
}

#[test]
fn what_comes_from_above_or_beside_goes_to_hosts_and_routers_below_alone() {
    let mut sites = sites(4);
    sites.world.register(sites.c, sites.a);
    relate(&mut sites.world, sites.a, sites.c, Relation::Beside);
    relate(&mut sites.world, sites.c, sites.a, Relation::Beside);
    let address = sites.world.host(sites.c).address;
    // c has announced it to a, and serves it no longer; the hub knows somebody who does.
    sites.world.host(sites.a).forward(service("web.shop").into(), address, None);
    sites.world.publish(sites.b, sites.server, "web.shop", 9);
    sites.announce(sites.b, sites.hub, "web.shop");
    assert_eq!(sites.connect("web.shop"), Outcome::Refused);
    assert_eq!(sites.forwarded()[4], 0, "c sends nothing up for a, which can do that itself");
    // From above, too: c is below the hub.
    sites.announce(sites.c, sites.hub, "other.shop");
    assert_eq!(sites.connect("other.shop"), Outcome::Refused);
    assert_eq!(sites.forwarded()[4], 0);
}

#[test]
fn peers_look_for_a_host_by_another_router_while_its_own_is_drained() {
    let mut world = World::new(5, Weather::FAIR);
    let routers = [(); 2].map(|()| world.add_host(true));
    let [client, server] = [(); 2].map(|()| world.add_host(false));
    for (router, host) in routers.into_iter().flat_map(|router| [(router, client), (router, server)]) {
        world.register(router, host);
    }
    world.publish(routers[0], server, "web.shop", 7);
    let address = world.host(server).address;
    let key = world.host(server).public_key();
    world.host(routers[1]).forward(service("web.shop").into(), address, Some(key));
    world.run_for(SECOND);
    let connected = world.connect(client, "web.shop");
    world.run_for(SECOND / 2);
    assert_eq!(world.host(client).clients[connected].outcome, Outcome::Answered(7));

    let named = |world: &mut World| {
        let of_server = HostPublic(key).id();
        let paths = world.host(client).sal.paths();
        paths.into_iter().find(|path| path.host == of_server).and_then(|path| path.rendezvous).map(|router| router.ip())
    };
    let first = named(&mut world);
    let places = routers.map(|router| world.host(router).address);
    let number = places.iter().position(|place| Some(*place) == first).expect("one of the two");
    let leaving = HostPublic(world.host(routers[number]).public_key()).id();
    for (is_leaving, expected) in [(true, places[1 - number]), (false, places[number])] {
        let now = world.now;
        world.host(server).sal.set_leaving(now, leaving, is_leaving);
        world.touch(server);
        world.run_for(SECOND);
        assert_eq!(named(&mut world), Some(expected), "the router leaves: {is_leaving}");
    }
}
