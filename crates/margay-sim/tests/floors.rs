//! Rules with a floor, in virtual time: by whatever way a flow's packets come to go by other addresses, nothing plain
//! goes there where a rule demands that it is sealed (docs/decisions/0076, 0090).

#[path = "pair/mod.rs"]
mod pair;

use std::net::IpAddr;
use std::time::Duration;

use margay_core::stack_rule::{Expression, Fact, FactValue, Kind, StackRule};
use margay_core::{Cause, ChangeCause, MoveRefused, Policy, Stack, Towards, Weights};
use margay_sim::HostId;
use margay_wire::FlowId;
use pair::{CHAT, OUTSIDE, Pair, SECOND, floor, pair, slow};

/// An order by which packets come to go by the client's address outside, which it has beside the one at home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Flow,
    Pin,
    Host,
}

const ORDERS: [Order; 3] = [Order::Flow, Order::Pin, Order::Host];
/// A flow that is sealed where it comes to has no longer waited for it: two round trips, and what the move takes.
const SEALED_WITHIN: Duration = Duration::from_millis(200);
const LIMIT: Duration = Duration::from_secs(5);

impl Pair {
    fn addresses(&mut self, addresses: &[IpAddr]) {
        self.world.set_addresses(self.client, addresses.to_vec());
        self.chat(SECOND);
    }

    /// A flow of datagrams, and a connection if `streams`; the client is at home, and has the address outside as well.
    fn begin(&mut self, streams: bool) -> IpAddr {
        self.open();
        if streams {
            self.connect(CHAT);
        }
        self.chat(SECOND);
        let home = self.world.host(self.client).address;
        self.addresses(&[home, OUTSIDE.into()]);
        assert!(self.is_settled(Stack::Plain));
        self.record();
        home
    }

    fn flow_ids(&mut self, host: HostId) -> Vec<FlowId> {
        self.world.host(host).sal.flows().filter(|flow| flow.peer_flow.0 != 0).map(|flow| flow.flow).collect()
    }

    /// The client's host, or the server's, is ordered to have everything go by one of the client's addresses.
    fn go(&mut self, order: Order, by_peer: bool, to: IpAddr) {
        let host = if by_peer { self.server } else { self.client };
        let now = self.world.now;
        let towards = if by_peer { Towards::Remote(to) } else { Towards::Local(to) };
        let ids = self.flow_ids(host);
        let peer = self.flow(host).peer.expect("a peer");
        let sal = &mut self.world.host(host).sal;
        let ordered: Result<(), MoveRefused> = match order {
            Order::Flow => ids.into_iter().try_for_each(|id| sal.migrate_flow(now, id, towards)),
            Order::Pin => ids.into_iter().try_for_each(|id| sal.set_flow_policy(now, id, Policy::Pin(to))),
            Order::Host => sal.migrate_host(now, peer, towards),
        };
        ordered.expect("the client has that address");
        self.world.touch(host);
    }

    /// How long it takes until every flow is carried so at both ends, while both talk.
    fn await_stack(&mut self, stack: Stack, what: &str) -> Duration {
        let begun = self.world.now;
        while !self.all_are(stack) {
            assert!(self.world.now.since(begun) < LIMIT, "{what}: {:?}", self.stacks());
            self.chat(Duration::from_millis(5));
        }
        self.world.now.since(begun)
    }

    fn all_are(&mut self, stack: Stack) -> bool {
        self.hosts().iter().all(|host| {
            let flows = self.world.host(*host).sal.flows();
            let mut flows = flows.filter(|flow| flow.peer_flow.0 != 0);
            flows.all(|flow| flow.stack.stack == stack && flow.stack.changing_to.is_none())
        })
    }

    fn is_outside(&mut self) -> bool {
        let outside = IpAddr::from(OUTSIDE);
        self.flow(self.server).remote.is_some_and(|remote| remote.ip() == outside)
    }

    /// Everything is outside, sealed, and nothing of it was ever seen plain there.
    fn is_sealed_outside(&mut self, what: &str) {
        self.await_stack(Stack::Secure, what);
        self.chat(SECOND);
        assert!(self.is_outside() && self.all_are(Stack::Secure), "{what}: {:?}", self.stacks());
        assert!(self.plain_outside() == 0 && self.sealed() > 50, "{what}: {} plain", self.plain_outside());
    }
}

#[test]
fn by_whatever_order_flows_go_outside_nothing_plain_goes_there() {
    for is_direct in [false, true] {
        for by_server in [false, true] {
            for (order, by_peer) in ORDERS.into_iter().flat_map(|order| [(order, false), (order, true)]) {
                let what = format!("{order:?}, by peer {by_peer}, direct {is_direct}, rule of server {by_server}");
                let mut pair = pair(1, slow(7), is_direct, (false, false), CHAT);
                pair.rule(by_server);
                let home = pair.begin(false);
                pair.go(order, by_peer, OUTSIDE.into());
                let wait = pair.await_stack(Stack::Secure, &what);
                assert!(wait <= SEALED_WITHIN, "{what}: {wait:?}");
                pair.is_sealed_outside(&what);
                pair.go(order, by_peer, home);
                pair.await_stack(Stack::Plain, &what);
                assert_eq!((pair.plain_outside(), pair.locked()), (0, 0), "{what}");
                // What the client's kernel has sent direct from where it was is lost where the peer has moved on.
                if !is_direct || order != Order::Host {
                    pair.nothing_is_missing(&what);
                }
            }
        }
    }
}

#[test]
fn connections_wait_for_their_seal_as_datagrams_do() {
    for (seed, order) in (10..).zip(ORDERS) {
        for by_peer in [false, true] {
            let what = format!("{order:?}, by peer {by_peer}");
            let mut pair = pair(seed, slow(7), seed % 2 == 0, (false, false), CHAT);
            pair.rule(by_peer);
            let home = pair.begin(true);
            pair.go(order, by_peer, OUTSIDE.into());
            pair.is_sealed_outside(&what);
            pair.go(order, by_peer, home);
            pair.await_stack(Stack::Plain, &what);
            assert_eq!(pair.plain_outside(), 0, "{what}");
            pair.check(SECOND * 2, &what);
        }
    }
}

#[test]
fn whatever_the_network_loses_a_flow_that_is_ordered_outside_is_sealed_there() {
    for seed in 0..24 {
        let what = format!("seed {seed}");
        let mut pair = pair(700 + seed, slow(5), seed % 2 == 0, (false, false), CHAT);
        pair.rule(seed % 4 < 2);
        pair.begin(false);
        pair.world.network.weather.loss_per_mille = 100;
        pair.go(ORDERS[seed as usize % 3], seed % 8 < 4, OUTSIDE.into());
        pair.chat(SECOND * 12);
        assert_eq!(pair.plain_outside(), 0, "{what}");
        assert!(pair.is_outside() && pair.is_settled(Stack::Secure), "{what}: {:?}", pair.stacks());
    }
}

/// The flow is pinned at home, the others have gone outside. Home goes; or the network there is silent.
#[test]
fn a_flow_whose_own_address_goes_joins_the_others_and_is_sealed() {
    for by_server in [false, true] {
        for is_silent in [false, true] {
            let what = format!("rule of server {by_server}, silent {is_silent}");
            let mut pair = pair(3, slow(7), true, (false, false), CHAT);
            pair.rule(by_server);
            let home = pair.begin(false);
            if is_silent {
                // The whole association goes to the other pair.
                let server = pair.world.host(pair.server).address;
                pair.world.network.cut(home, server);
            } else {
                pair.go(Order::Pin, false, OUTSIDE.into());
                pair.await_stack(Stack::Secure, &what);
                pair.go(Order::Pin, false, home);
                pair.await_stack(Stack::Plain, &what);
                pair.go(Order::Host, false, OUTSIDE.into());
                pair.chat(SECOND * 4);
                assert!(!pair.is_outside() && pair.is_settled(Stack::Plain), "{what}: it is pinned");
                pair.world.set_addresses(pair.client, vec![OUTSIDE.into()]);
            }
            pair.chat(SECOND * 3);
            pair.is_sealed_outside(&what);
        }
    }
}

/// The policy is changed: the flow goes where the others are.
#[test]
fn a_flow_that_is_pinned_no_more_is_sealed_where_the_others_are() {
    for by_peer in [false, true] {
        let what = format!("by peer {by_peer}");
        let mut pair = pair(4, slow(7), true, (false, false), CHAT);
        pair.rule(false);
        let home = pair.begin(false);
        let host = if by_peer { pair.server } else { pair.client };
        let (now, id) = (pair.world.now, pair.flow(host).flow);
        let pinned = pair.world.host(host).sal.set_flow_policy(now, id, Policy::Pin(home));
        pinned.expect("it is there");
        pair.go(Order::Host, by_peer, OUTSIDE.into());
        pair.chat(SECOND * 4);
        assert!(!pair.is_outside() && pair.is_settled(Stack::Plain), "{what}: {:?}", pair.stacks());
        let now = pair.world.now;
        pair.world.host(host).sal.set_flow_policy(now, id, Policy::FailOver).expect("it can be had");
        pair.world.touch(host);
        pair.chat(SECOND);
        pair.is_sealed_outside(&what);
    }
}

/// The server goes outside: the rule is the client's, about its peer's address, or the server's own.
#[test]
fn where_the_peer_goes_outside_nothing_plain_follows_it() {
    for (rule_of_client, is_broken) in [(true, false), (true, true), (false, false), (false, true)] {
        let what = format!("rule of client {rule_of_client}, broken {is_broken}");
        let mut pair = pair(5, slow(7), true, (false, false), CHAT);
        let (host, fact) = if rule_of_client { (pair.client, Fact::Remote) } else { (pair.server, Fact::Local) };
        let now = pair.world.now;
        pair.world.host(host).sal.set_stack_rules(now, vec![floor(fact)]);
        pair.open();
        pair.chat(SECOND);
        let home = pair.world.host(pair.server).address;
        pair.world.set_addresses(pair.server, vec![home]);
        pair.record();
        let outside = if is_broken { vec![OUTSIDE.into()] } else { vec![OUTSIDE.into(), home] };
        pair.world.set_addresses(pair.server, outside);
        pair.chat(SECOND * 3);
        assert!(pair.is_settled(Stack::Secure) && pair.sealed() > 100, "{what}: {:?}", pair.stacks());
        assert_eq!(pair.plain_outside(), 0, "{what}");
    }
}

/// A flow by several pairs goes outside by one of them, whoever orders it: so none is striped under a floor, also not
/// one that was before there was the rule.
#[test]
fn no_flow_under_a_floor_is_shared_out_over_several_pairs() {
    let weights = Weights::new([(OUTSIDE.into(), 2)]).expect("one weight");
    for (seed, policy) in (20..).zip([Policy::Stripe, Policy::Weighted(weights), Policy::Redundant]) {
        for (by_server, orders_server) in [(false, false), (false, true), (true, false), (true, true)] {
            let what = format!("{policy}, rule of server {by_server}, order of server {orders_server}");
            let mut pair = pair(seed, slow(7), true, (false, false), CHAT);
            pair.rule(by_server);
            pair.begin(false);
            let host = if orders_server { pair.server } else { pair.client };
            let (now, id) = (pair.world.now, pair.flow(host).flow);
            let ordered = pair.world.host(host).sal.set_flow_policy(now, id, policy);
            pair.world.touch(host);
            assert_eq!(ordered.is_ok(), by_server != orders_server, "{what}: {ordered:?}");
            pair.chat(SECOND * 3);
            assert!(!pair.flow(pair.client).is_striped && !pair.flow(pair.server).is_striped, "{what}");
            assert_eq!(pair.plain_outside(), 0, "{what}");
            pair.nothing_is_missing(&what);
        }
    }
}

#[test]
fn a_striped_flow_goes_by_one_pair_from_when_there_is_a_floor() {
    for by_server in [false, true] {
        for is_outside in [false, true] {
            let what = format!("rule of server {by_server}, outside {is_outside}");
            let mut pair = pair(30, slow(7), true, (false, false), CHAT);
            pair.begin(false);
            if is_outside {
                pair.go(Order::Host, false, OUTSIDE.into());
                pair.chat(SECOND);
            }
            let (now, id) = (pair.world.now, pair.flow(pair.client).flow);
            pair.world.host(pair.client).sal.set_flow_policy(now, id, Policy::Stripe).expect("it can be had");
            pair.world.touch(pair.client);
            pair.chat(SECOND);
            assert!(pair.flow(pair.client).is_striped && pair.plain_outside() > 0, "{what}");
            pair.rule(by_server);
            // What is on its way, and the peer's until it has heard of it.
            pair.world.run_for(Duration::from_millis(60));
            pair.record();
            pair.chat(SECOND * 3);
            assert!(!pair.flow(pair.client).is_striped && !pair.flow(pair.server).is_striped, "{what}");
            assert_eq!(pair.plain_outside(), 0, "{what}");
            let stack = if is_outside { Stack::Secure } else { Stack::Plain };
            assert!(pair.is_settled(stack), "{what}: {:?}", pair.stacks());
            if !is_outside {
                pair.nothing_is_missing(&what);
            }
        }
    }
}

/// The agent that moved the flow starts again while the flow waits for its seal, and the network has moved it on.
#[test]
fn a_flow_that_was_ordered_outside_is_sealed_after_either_agent_has_started_again() {
    for step in 0..16 {
        for kills_server in [false, true] {
            let what = format!("step {step}, server {kills_server}");
            let mut pair = pair(40 + step, slow(7), step % 2 == 0, (false, false), CHAT);
            pair.rule(kills_server);
            pair.begin(false);
            pair.go(Order::Flow, false, OUTSIDE.into());
            pair.chat(Duration::from_millis(step * 8));
            let victim = if kills_server { pair.server } else { pair.client };
            pair.world.kill_agent(victim);
            pair.chat(SECOND / 2);
            pair.world.start_agent(victim);
            pair.rule(kills_server);
            pair.chat(SECOND * 6);
            assert_eq!(pair.plain_outside(), 0, "{what}");
            let stack = if pair.is_outside() { Stack::Secure } else { Stack::Plain };
            assert!(pair.is_settled(stack), "{what}: {:?}", pair.stacks());
            let before = [pair.heard[0].len(), pair.heard[1].len()];
            pair.chat(SECOND);
            let after = [pair.heard[0].len(), pair.heard[1].len()];
            assert!(after[0] > before[0] + 150 && after[1] > before[1] + 150, "{what}: {before:?} {after:?}");
        }
    }
}

#[test]
fn the_move_is_told_as_one_by_order() {
    let mut pair = pair(6, slow(7), true, (false, false), CHAT);
    pair.rule(false);
    pair.begin(false);
    pair.go(Order::Flow, false, OUTSIDE.into());
    pair.is_sealed_outside("by order");
    let moved = pair.flow(pair.client).moved.map(|moved| moved.cause);
    assert_eq!(moved, Some(Cause::Operator));
}

/// What a rule without a floor has added to a seal goes when that rule ends, and the seal stays.
#[test]
fn repairs_under_a_floor_end_with_the_rule_that_wanted_them() {
    for by_server in [false, true] {
        let mut pair = pair(7, slow(7), true, (false, false), CHAT);
        let (host, fact) = if by_server { (pair.server, Fact::Remote) } else { (pair.client, Fact::Local) };
        let when = Expression::Outside("lossy".to_owned(), Kind::Bool);
        let repairs = StackRule { number: 2, when, uses: Stack::Fec, hold: SECOND, is_floor: false, ..floor(fact) };
        let now = pair.world.now;
        pair.world.host(host).sal.set_stack_rules(now, vec![floor(fact), repairs]);
        pair.world.touch(host);
        pair.begin(false);
        pair.go(Order::Flow, by_server, OUTSIDE.into());
        pair.is_sealed_outside("before");
        for turn in 0..3 {
            for (is_lossy, stack) in [(true, Stack::SecureFec), (false, Stack::Secure)] {
                let now = pair.world.now;
                let set = pair.world.host(host).sal.set_fact(now, "lossy", FactValue::Bool(is_lossy), SECOND * 60);
                set.expect("there is room");
                pair.chat(SECOND * 4);
                assert!(pair.is_settled(stack), "by server {by_server}, turn {turn}: {:?}", pair.stacks());
            }
        }
        let home = pair.world.host(pair.client).address;
        pair.go(Order::Flow, by_server, home);
        pair.await_stack(Stack::Plain, "at home");
        let last = pair.flow(host).stack.changes.last().map(|change| change.cause);
        assert_eq!(last, Some(ChangeCause::RuleEnded(1)), "the rule with the floor is over");
        assert_eq!(pair.plain_outside(), 0);
        pair.nothing_is_missing("by rules");
    }
}
