//! Striped flows that are sealed by some places and plain by others, in virtual time (docs/decisions/0097): nothing
//! plain goes by any other place, nothing of a flow that an end demands sealed goes plain at all, and nothing is lost.

#[path = "pair/mod.rs"]
mod pair;

use std::net::IpAddr;
use std::time::Duration;

use margay_core::stack_rule::{Expression, Fact, Network, StackRule};
use margay_core::{MoveRefused, PlaceStack, PlaceStacks, Policy, Stack};
use margay_sim::HostId;
use margay_sim::stream::Plan;
use margay_wire::{DATA_HEADER_LEN, DataRepr, is_sealed};

use pair::{BOTH, CHAT, Pair, SECOND, floor, pair, slow};

/// The client's and the server's addresses by the cable; their first ones are by Wi-Fi.
const CABLE: [u8; 4] = [10, 7, 0, 52];
const SERVERS_CABLE: [u8; 4] = [10, 7, 0, 51];

fn partly(address: [u8; 4]) -> Policy {
    Policy::StripePartly(PlaceStacks::new([(IpAddr::from(address), PlaceStack::Plain)]).expect("one"))
}

/// What was recorded of DATA that carries something, by the place by which it went.
#[derive(Debug, Default, PartialEq, Eq)]
struct Seen {
    plain_cable: usize,
    sealed_cable: usize,
    plain_air: usize,
    sealed_air: usize,
}

impl Pair {
    /// Each end has two addresses, and a flow.
    fn begin(&mut self) {
        self.open();
        for (host, cable) in [(self.client, CABLE), (self.server, SERVERS_CABLE)] {
            let first = self.world.host(host).address;
            self.world.set_addresses(host, vec![first, cable.into()]);
        }
        self.chat(SECOND);
    }

    fn give(&mut self, host: HostId, policy: Policy) -> Result<(), MoveRefused> {
        let now = self.world.now;
        let id = self.flow(host).flow;
        let given = self.world.host(host).sal.set_flow_policy(now, id, policy);
        self.world.touch(host);
        given
    }

    /// What the host sends while both talk for so long.
    fn sent_by(&mut self, hosts: &[HostId], time: Duration) -> Seen {
        self.record();
        self.chat(time);
        let cables = [IpAddr::from(CABLE), IpAddr::from(SERVERS_CABLE)];
        let own: Vec<IpAddr> = hosts.iter().map(|host| self.world.host(*host).address).chain(cables).collect();
        let mut seen = Seen::default();
        for (from, to, bytes) in self.world.recording.iter().flatten() {
            let Ok(data) = DataRepr::parse(bytes) else { continue };
            if !own.contains(&from.ip()) || bytes.len() <= DATA_HEADER_LEN + 8 {
                continue;
            }
            let is_cable = [from, to].iter().any(|end| cables.contains(&end.ip()));
            *match (is_sealed(data.stack), is_cable) {
                (false, true) => &mut seen.plain_cable,
                (true, true) => &mut seen.sealed_cable,
                (false, false) => &mut seen.plain_air,
                (true, false) => &mut seen.sealed_air,
            } += 1;
        }
        seen
    }

    fn is_partly(&mut self) -> bool {
        self.hosts().iter().all(|host| {
            let places = self.flow(*host).places;
            places.len() == 2
                && places.iter().filter(|place| [place.sends, place.takes] == [Some(PlaceStack::Plain); 2]).count() == 1
        })
    }
}

#[test]
fn one_path_bears_sealed_datagrams_and_the_other_plain_ones() {
    for is_direct in [false, true] {
        for by_server in [false, true] {
            let what = format!("direct {is_direct}, by server {by_server}");
            let mut pair = pair(1, slow(7), is_direct, (false, false), Plan::LISTEN);
            pair.begin();
            let orderer = if by_server { pair.server } else { pair.client };
            pair.give(orderer, partly(if by_server { SERVERS_CABLE } else { CABLE })).expect("it can be had");
            pair.chat(SECOND * 2);
            assert!(pair.is_partly() && pair.is_settled(Stack::Secure), "{what}: {:?}", pair.flow(pair.client).places);
            let both = pair.hosts();
            let seen = pair.sent_by(&both, SECOND * 2);
            assert!(seen.plain_cable > 200 && seen.sealed_air > 200, "{what}: {seen:?}");
            assert_eq!((seen.plain_air, seen.sealed_cable), (0, 0), "{what}");
            // Sealed by both again, and then as any other sealed flow.
            pair.give(orderer, Policy::Stripe).expect("it can be had");
            pair.chat(SECOND);
            let seen = pair.sent_by(&both, SECOND);
            assert!(seen.plain_cable == 0 && seen.plain_air == 0 && seen.sealed_cable > 100, "{what}: {seen:?}");
            pair.give(orderer, Policy::FailOver).expect("always");
            pair.chat(SECOND);
            let seen = pair.sent_by(&both, SECOND);
            assert_eq!((seen.plain_cable, seen.plain_air, seen.sealed_cable), (0, 0, 0), "{what}");
            assert_eq!(pair.locked(), 0, "{what}");
        }
    }
}

#[test]
fn nothing_is_lost_or_doubled_when_a_place_comes_to_be_plain() {
    let mut pair = pair(2, slow(7), false, (false, false), Plan::LISTEN);
    pair.begin();
    pair.give(pair.client, partly(CABLE)).expect("it can be had");
    pair.chat(SECOND * 3);
    assert!(pair.is_partly());
    pair.world.run_for(SECOND);
    pair.hear();
    for (said, heard) in [(pair.said[0], &pair.heard[1]), (pair.said[1], &pair.heard[0])] {
        // The places are as quick as each other here, and the simulated cache puts nothing in order.
        let mut sorted = heard.clone();
        sorted.sort_unstable();
        assert!(sorted.iter().copied().eq(1..=said), "of {said} came {}", heard.len());
    }
}

#[test]
fn connections_are_carried_so_too() {
    let mut pair = pair(3, slow(7), true, (false, false), CHAT);
    pair.begin();
    pair.connect(CHAT);
    pair.chat(SECOND);
    let now = pair.world.now;
    let ids: Vec<_> = pair.world.host(pair.client).sal.flows().filter(|flow| flow.app.protocol == 6).collect();
    for flow in ids {
        pair.world.host(pair.client).sal.set_flow_policy(now, flow.flow, partly(CABLE)).expect("it can be had");
    }
    pair.world.touch(pair.client);
    pair.chat(SECOND * 4);
    let client = pair.client;
    let mut flows = pair.world.host(client).sal.flows().filter(|flow| flow.app.protocol == 6);
    assert!(flows.all(|flow| flow.places.iter().any(|place| place.sends == Some(PlaceStack::Plain))));
    drop(flows);
    pair.check(SECOND * 2, "a connection");
}

/// Who demands is given no less: not by an order, here or there, and from when it demands on.
#[test]
fn a_flow_that_an_end_demands_sealed_has_no_plain_place() {
    for demands in [(true, false), (false, true), (true, true)] {
        let mut pair = pair(4, slow(7), true, demands, Plan::LISTEN);
        pair.record();
        pair.begin();
        for host in pair.hosts() {
            assert_eq!(pair.give(host, partly(CABLE)), Err(MoveRefused::Demanded), "{demands:?}");
        }
        pair.give(pair.client, Policy::Stripe).expect("it can be had");
        pair.chat(SECOND);
        assert_eq!(pair.plain(), 0, "{demands:?}");
    }
    for by_server in [false, true] {
        let mut pair = pair(5, slow(7), false, (false, false), Plan::LISTEN);
        pair.begin();
        pair.give(pair.client, partly(CABLE)).expect("it can be had");
        pair.chat(SECOND * 2);
        assert!(pair.is_partly());
        let demanding = if by_server { pair.server } else { pair.client };
        pair.world.host(demanding).set_secure(BOTH, true);
        pair.world.touch(demanding);
        let own = pair.sent_by(&[demanding], Duration::from_millis(5));
        assert_eq!(own.plain_air, 0, "by server {by_server}");
        // The peer has been told.
        pair.chat(SECOND);
        let both = pair.hosts();
        let seen = pair.sent_by(&both, SECOND);
        assert!(seen.plain_cable == 0 && seen.plain_air == 0 && seen.sealed_cable > 100, "{by_server}: {seen:?}");
    }
}

/// A rule with a floor keeps flows of its names to one pair of addresses.
#[test]
fn a_floor_that_a_rule_sets_ends_it() {
    let mut pair = pair(6, slow(7), false, (false, false), Plan::LISTEN);
    pair.begin();
    pair.give(pair.client, partly(CABLE)).expect("it can be had");
    pair.chat(SECOND * 2);
    assert!(pair.is_partly());
    let now = pair.world.now;
    let everywhere = Network { address: [0, 0, 0, 0].into(), bits: 0 };
    let when = Expression::Within(Box::new(Expression::Fact(Fact::Local)), everywhere);
    pair.world.host(pair.client).sal.set_stack_rules(now, vec![StackRule { when, ..floor(Fact::Local) }]);
    pair.world.touch(pair.client);
    pair.chat(SECOND);
    let both = pair.hosts();
    let seen = pair.sent_by(&both, SECOND);
    assert_eq!((seen.plain_cable, seen.plain_air), (0, 0));
    assert_eq!(pair.give(pair.client, partly(CABLE)), Err(MoveRefused::Demanded));
}

#[test]
fn what_cannot_be_had_is_refused_and_changes_nothing() {
    let mut pair = pair(7, slow(7), false, (false, false), Plan::LISTEN);
    pair.begin();
    let refused = pair.give(pair.client, partly([192, 0, 2, 1]));
    assert!(matches!(refused, Err(MoveRefused::NoPair(..))), "{refused:?}");
    pair.give(pair.client, Policy::Stripe).expect("it can be had");
    pair.chat(SECOND);
    let refused = pair.give(pair.client, partly(CABLE));
    assert!(matches!(refused, Err(MoveRefused::CannotSeal(_))), "it is striped, and not sealed: {refused:?}");
    pair.chat(SECOND);
    assert!(pair.flow(pair.client).is_striped && pair.is_settled(Stack::Plain));
}

/// An order is forgotten where its agent starts again, and known again where the other one does.
#[test]
fn either_agent_starts_again_and_the_air_is_never_plain() {
    for which in [0, 1] {
        let what = format!("host {which}");
        let mut pair = pair(8, slow(7), false, (false, false), Plan::LISTEN);
        pair.begin();
        pair.give(pair.client, partly(CABLE)).expect("it can be had");
        pair.chat(SECOND * 2);
        assert!(pair.is_partly(), "{what}");
        pair.record();
        let host = pair.hosts()[which];
        pair.world.kill_agent(host);
        pair.world.start_agent(host);
        pair.chat(SECOND * 3);
        let both = pair.hosts();
        let seen = pair.sent_by(&both, SECOND);
        assert_eq!(seen.plain_air, 0, "{what}: {seen:?}");
        assert!(pair.is_settled(Stack::Secure), "{what}: {:?}", pair.stacks());
        if which == 0 {
            assert_eq!(seen.plain_cable, 0, "{what}: the order is forgotten");
        } else {
            assert!(pair.is_partly() && seen.plain_cable > 50, "{what}: {seen:?}");
        }
    }
}

#[test]
fn whatever_the_network_loses_the_air_is_never_plain() {
    let mut settled = 0;
    for seed in 0..12 {
        let what = format!("seed {seed}");
        let mut pair = pair(80 + seed, slow(7), seed % 2 == 0, (false, false), Plan::LISTEN);
        pair.begin();
        pair.world.network.weather.loss_per_mille = 150;
        let orderer = if seed % 3 == 0 { pair.server } else { pair.client };
        // The order finds the flow plain, so the change to the seal may meet losses, too.
        pair.give(orderer, partly(CABLE)).expect("it can be had");
        pair.chat(SECOND * 12);
        let both = pair.hosts();
        if pair.stacks() == [Stack::Secure; 2] {
            settled += 1;
            let seen = pair.sent_by(&both, SECOND);
            assert_eq!(seen.plain_air, 0, "{what}: {seen:?}");
        }
    }
    assert!(settled >= 6, "few flows were sealed: {settled} of 12");
}
