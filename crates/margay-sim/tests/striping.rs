//! Flows with a policy of their own where hosts have several addresses, in virtual time (docs/decisions/0021).

use std::net::IpAddr;
use std::time::Duration;

use margay_core::name::Prefix;
use margay_core::stripe::Sharing;
use margay_core::{ChangeRefused, Cipher, FlowInfo, Lifecycle, MoveRefused, Policy, Stack, Weights, WeightsError, Why};
use margay_sim::stream::Plan;
use margay_sim::{HostId, Weather, World};
use margay_wire::FlowId;

const SECOND: Duration = Duration::from_secs(1);
const RTT: Duration = Duration::from_millis(40);
/// A little, often, for ever.
const CHAT: Plan = Plan { write: 300, every: Duration::from_millis(10), writes: u32::MAX, closes: false };

struct Site {
    world: World,
    router: HostId,
    server: HostId,
    client: HostId,
    stream: usize,
}

fn address(n: u8) -> IpAddr {
    [10, 7, 0, n].into()
}

/// Two hosts with two addresses each, and a connection between them.
fn site(seed: u64, direct: bool) -> Site {
    let mut world = World::new(seed, Weather { delay_min: RTT / 2, delay_max: RTT / 2, ..Weather::FAIR });
    let router = world.add_host(true);
    let (server, client) = (world.add_host(false), world.add_host(false));
    for host in [server, client] {
        world.register(router, host);
        world.set_direct(host, direct);
    }
    world.publish_streams(router, server, "talk.shop", CHAT);
    let stream = world.connect_stream(client, "talk.shop", CHAT);
    world.run_for(2 * SECOND);
    for (host, n) in [(server, 51), (client, 52)] {
        let first = world.host(host).address;
        world.set_addresses(host, vec![first, address(n)]);
    }
    world.run_for(SECOND);
    Site { world, router, server, client, stream }
}

impl Site {
    fn flow(&mut self) -> FlowInfo {
        self.world.host(self.client).flow_of(self.stream).expect("the client's flow")
    }

    fn servers_flow(&mut self) -> FlowInfo {
        let session = self.flow().session;
        self.world.host(self.server).sal.flows().find(|flow| flow.session == session).expect("the server's flow")
    }

    fn order(&mut self, host: HostId, flow: FlowId, policy: Policy) {
        let now = self.world.now;
        self.world.host(host).sal.set_flow_policy(now, flow, policy).expect("it can be had");
        self.world.touch(host);
    }

    fn is_alive(&mut self) -> bool {
        let at = self.stream;
        let acknowledged = |site: &mut Self| {
            let own = site.world.host(site.client).streams[at].acknowledged();
            (own, site.world.host(site.server).streams[0].acknowledged())
        };
        let before = acknowledged(self);
        self.world.run_for(SECOND);
        let after = acknowledged(self);
        after.0 > before.0 && after.1 > before.1
    }

    /// How many places each end sends by.
    fn places(&mut self) -> [usize; 2] {
        let proved = |flow: FlowInfo| flow.places.iter().filter(|place| place.is_proved).count();
        [proved(self.flow()), proved(self.servers_flow())]
    }
}

#[test]
fn a_striped_flow_goes_by_two_pairs_at_both_ends_and_by_one_again_when_told() {
    for (seed, direct) in [(1, false), (2, true)] {
        let mut site = site(seed, direct);
        assert_eq!(site.flow().carriage.sends(), direct);
        let flow = site.flow().flow;
        site.order(site.client, flow, Policy::Stripe);
        site.world.run_for(SECOND);
        assert_eq!(site.places(), [2, 2], "seed {seed}");
        assert!(site.is_alive());
        let (own, peer) = (site.flow(), site.servers_flow());
        assert!(own.is_striped && peer.is_striped);
        assert!(!own.carriage.sends() && !peer.carriage.sends(), "it is encapsulated");
        assert_eq!((own.why, peer.why), (Why::Striped, Why::Striped));
        let pairs: Vec<_> = own.places.iter().map(|place| place.pair).collect();
        assert!(pairs[0].local != pairs[1].local && pairs[0].remote != pairs[1].remote, "{pairs:?}");
        site.order(site.client, flow, Policy::FailOver);
        site.world.run_for(2 * SECOND);
        assert!(!site.flow().is_striped && !site.servers_flow().is_striped);
        assert!(site.is_alive());
        assert_eq!(site.flow().carriage.sends(), direct, "it is lifted again");
    }
}

#[test]
fn a_striped_flow_keeps_its_stack_and_one_that_is_changed_is_not_striped_meanwhile() {
    let mut site = site(8, false);
    for host in [site.client, site.server] {
        site.world.host(host).set_secure(&[Cipher::ChaCha20Poly1305], false);
    }
    // By another flow each learns what the other can do now.
    site.world.connect_stream(site.client, "talk.shop", CHAT);
    site.world.run_for(SECOND);
    let own = site.flow().flow;
    let peer = site.servers_flow().flow;
    site.order(site.client, own, Policy::Stripe);
    site.world.run_for(SECOND);
    let now = site.world.now;
    for (host, flow) in [(site.client, own), (site.server, peer)] {
        let refused = site.world.host(host).sal.set_flow_stack(now, flow, Stack::Secure);
        assert_eq!(refused, Err(ChangeRefused::Striped));
    }
    site.order(site.client, own, Policy::FailOver);
    site.world.run_for(2 * SECOND);
    let now = site.world.now;
    let client = &mut site.world.host(site.client).sal;
    assert_eq!(client.set_flow_stack(now, own, Stack::Secure), Ok(true));
    assert!(matches!(client.set_flow_policy(now, own, Policy::Stripe), Err(MoveRefused::Busy(_))));
    site.world.touch(site.client);
    site.world.run_for(RTT * 3 / 4);
    let now = site.world.now;
    let server = &mut site.world.host(site.server).sal;
    assert_eq!(server.set_flow_policy(now, peer, Policy::Stripe), Err(MoveRefused::Changing));
    site.world.run_for(SECOND);
    assert_eq!([site.flow(), site.servers_flow()].map(|flow| flow.stack.stack), [Stack::Secure; 2]);
    site.order(site.client, own, Policy::Stripe);
    site.world.run_for(SECOND);
    assert_eq!(site.places(), [2, 2], "a sealed flow is striped as any");
    assert!(site.is_alive());
}

#[test]
fn a_name_has_a_policy_for_flows_that_begin() {
    let mut site = site(3, false);
    let service = site.flow().service;
    let all = Prefix::new(service, 96);
    site.world.host(site.server).sal.set_policies(vec![(all, Policy::Stripe)]);
    let other = site.world.connect_stream(site.client, "talk.shop", CHAT);
    site.world.run_for(2 * SECOND);
    assert!(!site.flow().is_striped, "those that there were keep theirs");
    let begun = site.world.host(site.client).flow_of(other).expect("the other flow");
    assert!(begun.is_striped);
    assert_eq!(begun.places.iter().filter(|place| place.is_proved).count(), 2);
}

#[test]
fn where_both_ends_want_to_stripe_they_agree_on_the_places() {
    let mut site = site(4, false);
    let (own, peer) = (site.flow().flow, site.servers_flow().flow);
    site.order(site.client, own, Policy::Stripe);
    site.order(site.server, peer, Policy::Stripe);
    site.world.run_for(2 * SECOND);
    assert_eq!(site.places(), [2, 2]);
    let (own, peer) = (site.flow().places, site.servers_flow().places);
    for (own, peer) in own.iter().zip(&peer) {
        assert_eq!(own.place, peer.place);
        assert_eq!(Some(own.pair.remote.ip()), peer.pair.local);
    }
}

#[test]
fn an_address_that_goes_takes_its_place_with_it_and_brings_it_back() {
    let mut site = site(5, false);
    let flow = site.flow().flow;
    site.order(site.client, flow, Policy::Stripe);
    site.world.run_for(SECOND);
    let first = site.world.host(site.client).address;
    site.world.set_addresses(site.client, vec![first]);
    site.world.run_for(SECOND);
    assert!(site.flow().places.iter().all(|place| place.pair.local == Some(first)));
    assert!(site.is_alive());
    site.world.set_addresses(site.client, vec![first, address(52)]);
    site.world.run_for(SECOND);
    assert_eq!(site.places(), [2, 2]);
}

#[test]
fn a_flow_that_ends_leaves_no_places() {
    let mut site = site(6, false);
    let flow = site.flow().flow;
    site.order(site.client, flow, Policy::Stripe);
    site.world.run_for(SECOND);
    let now = site.world.now;
    site.world.host(site.client).sal.close_flow(now, flow);
    site.world.touch(site.client);
    site.world.run_for(5 * SECOND);
    let over = |flow: Option<FlowInfo>| flow.is_none_or(|flow| flow.lifecycle >= Lifecycle::Closed);
    let found = site.world.host(site.client).flow_of(site.stream);
    assert!(over(found));
    let next = site.world.connect_stream(site.client, "talk.shop", CHAT);
    site.world.run_for(2 * SECOND);
    assert!(!site.world.host(site.client).flow_of(next).expect("a new one").is_striped);
    let _ = site.router;
}

#[test]
fn a_pinned_flow_stays_when_the_others_move() {
    let mut site = site(7, false);
    let flow = site.flow().flow;
    let first = site.world.host(site.client).address;
    site.order(site.client, flow, Policy::Pin(first));
    let peer = site.flow().peer.expect("proved");
    let now = site.world.now;
    let towards = margay_core::Towards::Local(address(52));
    site.world.host(site.client).sal.migrate_host(now, peer, towards).expect("it has that address");
    site.world.touch(site.client);
    site.world.run_for(2 * SECOND);
    assert!(site.is_alive());
    assert_eq!(site.flow().local, Some(first), "it went back");
    assert!(site.flow().is_pinned && site.flow().is_aside);
    site.order(site.client, flow, Policy::FailOver);
    site.world.run_for(SECOND);
    assert_eq!(site.flow().local, Some(address(52)));
    assert!(!site.flow().is_pinned && site.is_alive());
}

fn weights(all: &[(IpAddr, u32)]) -> Weights {
    Weights::new(all.iter().copied()).expect("they are right")
}

/// How each end shares out, and the weights of the places.
fn shares(site: &mut Site) -> [(Sharing, Vec<u8>); 2] {
    let of = |flow: FlowInfo| (flow.sharing, flow.places.iter().map(|place| place.weight).collect());
    [of(site.flow()), of(site.servers_flow())]
}

#[test]
fn an_end_that_shares_out_by_weights_tells_the_other() {
    let mut site = site(9, false);
    let flow = site.flow().flow;
    let own = weights(&[(address(52), 3)]);
    site.order(site.client, flow, Policy::Weighted(own));
    site.world.run_for(SECOND);
    assert_eq!(site.places(), [2, 2]);
    let weight_of = |flow: FlowInfo, local: IpAddr| {
        flow.places.into_iter().find(|place| place.pair.local == Some(local)).map(|place| place.weight)
    };
    assert_eq!(weight_of(site.flow(), address(52)), Some(3));
    let [(own, one), (peers, other)] = shares(&mut site);
    assert_eq!((own, peers), (Sharing::Weighted, Sharing::Weighted));
    assert_eq!(one, other, "places have one number at both ends");
    // The other end shares out what it sends as it is ordered there.
    let peer = site.servers_flow().flow;
    site.order(site.server, peer, Policy::Redundant);
    site.world.run_for(SECOND);
    let [(own, _), (peers, _)] = shares(&mut site);
    assert_eq!((own, peers), (Sharing::Weighted, Sharing::Redundant));
    assert!(site.is_alive());
    site.order(site.client, flow, Policy::Stripe);
    site.world.run_for(SECOND);
    assert_eq!(shares(&mut site)[0], (Sharing::Earliest, vec![1, 1]));
    site.order(site.client, flow, Policy::FailOver);
    site.world.run_for(2 * SECOND);
    assert!(!site.flow().is_striped && !site.servers_flow().is_striped && site.is_alive());
    assert_eq!(site.flow().sharing, Sharing::Earliest);
}

#[test]
fn what_one_end_has_redundant_the_other_sends_twice_too() {
    let mut site = site(10, false);
    let flow = site.flow().flow;
    site.order(site.client, flow, Policy::Redundant);
    site.world.run_for(SECOND);
    let found = shares(&mut site).map(|(sharing, _)| sharing);
    assert_eq!((site.places(), found), ([2, 2], [Sharing::Redundant; 2]));
    // A place that goes and comes back changes nothing of that.
    let first = site.world.host(site.client).address;
    site.world.set_addresses(site.client, vec![first]);
    site.world.run_for(SECOND);
    assert!(site.is_alive());
    site.world.set_addresses(site.client, vec![first, address(52)]);
    site.world.run_for(SECOND);
    let found = shares(&mut site).map(|(sharing, _)| sharing);
    assert_eq!((site.places(), found), ([2, 2], [Sharing::Redundant; 2]));
}

#[test]
fn an_order_that_cannot_be_had_changes_nothing() {
    let mut site = site(11, false);
    let flow = site.flow().flow;
    let order = |site: &mut Site, policy| {
        let now = site.world.now;
        let client = site.client;
        site.world.host(client).sal.set_flow_policy(now, flow, policy)
    };
    let refused = order(&mut site, Policy::Weighted(weights(&[(address(52), 2), (address(99), 1)])));
    assert!(matches!(refused, Err(MoveRefused::NoPair(unknown, ..)) if unknown == address(99)), "{refused:?}");
    assert!(!site.flow().stripes);
    let first = site.world.host(site.client).address;
    let servers = site.world.host(site.server).address;
    site.world.set_addresses(site.client, vec![first]);
    site.world.set_addresses(site.server, vec![servers]);
    site.world.run_for(SECOND);
    for policy in [Policy::Redundant, Policy::Weighted(weights(&[(first, 2)]))] {
        let refused = order(&mut site, policy);
        assert!(matches!(refused, Err(MoveRefused::OnePlace(word, _)) if word == policy.word()), "{refused:?}");
        assert!(!site.flow().stripes);
    }
    assert!(site.is_alive());
}

#[test]
fn weights_are_told_apart_from_what_is_none() {
    let of = |all: &[(IpAddr, u32)]| Weights::new(all.iter().copied()).map(|_| ());
    assert_eq!(of(&[]), Err(WeightsError::None));
    assert_eq!(of(&[(address(1), 0)]), Err(WeightsError::OutOfRange(address(1), 0)));
    assert_eq!(of(&[(address(1), 256)]), Err(WeightsError::OutOfRange(address(1), 256)));
    assert_eq!(of(&[(address(1), 2), (address(1), 3)]), Err(WeightsError::Twice(address(1))));
    let five: Vec<_> = (1..=5).map(|n| (address(n), 1)).collect();
    assert_eq!((of(&five), of(&five[..4])), (Err(WeightsError::Many), Ok(())));
}

#[test]
fn what_one_peer_stripes_leaves_the_hosts_own_orders_their_room() {
    let mut site = site(31, false);
    for _ in 0..79 {
        site.world.connect_stream(site.client, "talk.shop", Plan::LISTEN);
    }
    site.world.run_for(SECOND);
    let flows: Vec<FlowId> = site.world.host(site.client).sal.flows().map(|flow| flow.flow).collect();
    assert_eq!(flows.len(), 80);
    flows.into_iter().for_each(|flow| site.order(site.client, flow, Policy::Stripe));
    site.world.run_for(SECOND);
    let [striped, not_striped] = [true, false].map(|is_striped| {
        let flows = site.world.host(site.server).sal.flows().filter(|flow| flow.is_striped == is_striped);
        flows.map(|flow| flow.flow).collect::<Vec<_>>()
    });
    assert_eq!(striped.len(), 64, "a sixteenth of what all peers have");
    site.order(site.server, not_striped[0], Policy::Stripe);
    site.world.run_for(SECOND);
    assert!(site.world.host(site.server).sal.flows().any(|flow| flow.flow == not_striped[0] && flow.is_striped));
}
