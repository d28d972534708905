//! The stack of a live flow in virtual time: plain and sealed in turns, by order of either end, while the network, the
//! hosts' places and the agents do as they like.

mod pair;

use std::time::Duration;

use margay_core::{Carriage, ChangeRefused, Cipher, Stack};
use margay_sim::stream::Plan;
use margay_sim::{HostId, Weather};
use margay_wire::{DataRepr, FENCE, Kind, Message, STACK_ENCAP, kind_of};

use pair::{BOTH, CHAT, OF_CONNECTIONS, OUTSIDE, Pair, SECOND, TALKS, pair, slow};

#[test]
fn datagrams_go_sealed_and_plain_in_turns_and_none_is_lost_doubled_or_late() {
    for is_direct in [false, true] {
        for by_server in [false, true] {
            for delay in [1, 7, 30] {
                let what = format!("direct {is_direct}, by server {by_server}, {delay} ms");
                let mut pair = pair(1, slow(delay), is_direct, (false, false), Plan::LISTEN);
                pair.open();
                pair.chat(SECOND);
                let direct = if is_direct { Carriage::Direct } else { Carriage::Never };
                let orderer = if by_server { pair.server } else { pair.client };
                for _ in 0..4 {
                    for host in pair.hosts() {
                        assert_eq!(pair.flow(host).carriage, direct, "{what}");
                    }
                    assert_eq!(pair.order(orderer, Stack::Secure), Ok(true), "{what}");
                    pair.chat(SECOND);
                    assert!(pair.is_settled(Stack::Secure), "{what}: {:?}", pair.stacks());
                    pair.record();
                    pair.chat(SECOND);
                    assert!(pair.plain() == 0 && pair.sealed() > 100, "{what}");
                    assert_eq!(pair.order(orderer, Stack::Plain), Ok(true), "{what}");
                    pair.chat(SECOND * 2);
                    assert!(pair.is_settled(Stack::Plain), "{what}: {:?}", pair.stacks());
                }
                pair.record();
                pair.chat(SECOND);
                assert!(pair.sealed() == 0 && pair.plain() > 100, "{what}");
                pair.nothing_is_missing(&what);
                assert_eq!(pair.locked(), 0, "{what}");
                for host in pair.hosts() {
                    let changes = pair.flow(host).stack.changes;
                    assert_eq!(changes.len(), 8, "{what}");
                    assert!(changes.iter().all(|change| change.outcome.label() == "done"), "{what}: {changes:?}");
                }
            }
        }
    }
}

#[test]
fn streams_go_on_and_nothing_overtakes() {
    for is_direct in [false, true] {
        for (number, (client_plan, server_plan)) in TALKS.into_iter().enumerate() {
            let what = format!("direct {is_direct}, talk {number}");
            let mut pair = pair(2, slow(5), is_direct, (false, false), server_plan);
            pair.connect(client_plan);
            for turn in 0..20_u64 {
                let to = if turn % 2 == 0 { Stack::Secure } else { Stack::Plain };
                let host = pair.hosts()[turn as usize / 2 % 2];
                assert_eq!(pair.order(host, to), Ok(true), "{what}, turn {turn}");
                pair.world.run_for(Duration::from_millis(200 + 37 * turn));
                assert!(pair.is_settled(to), "{what}, turn {turn}: {:?}", pair.stacks());
            }
            pair.world.run_for(SECOND);
            pair.check(Duration::from_millis(150), &what);
            assert_eq!(pair.out_of_order(), 0, "{what}");
        }
    }
}

#[test]
fn whatever_the_network_does_both_ends_end_with_the_same_stack() {
    for seed in 0..24 {
        let (client_plan, server_plan) = TALKS[seed as usize % TALKS.len()];
        let what = format!("seed {seed}");
        let mut pair = pair(100 + seed, slow(5), seed % 2 == 0, (false, false), server_plan);
        pair.connect(client_plan);
        pair.world.network.weather = Weather::FOUL;
        for _ in 0..30 {
            let random = pair.world.random();
            let host = pair.hosts()[random as usize & 1];
            let to = OF_CONNECTIONS[random as usize >> 1 & 1];
            // One may be under way: then this one is refused.
            let _ = pair.order(host, to);
            pair.world.run_for(Duration::from_millis((random >> 8 & 0x3ff).into()));
        }
        pair.world.network.weather = slow(5);
        pair.world.run_for(SECOND * 12);
        let [client, server] = pair.stacks();
        assert_eq!(client, server, "{what}");
        assert!(pair.is_settled(client), "{what}");
        assert_eq!(pair.locked(), 0, "{what}");
        pair.forget_waits();
        pair.world.run_for(SECOND);
        pair.check(Duration::from_millis(500), &what);
    }
}

#[test]
fn datagrams_are_heard_once_whatever_the_network_loses() {
    let loses = Weather { loss_per_mille: 50, ..slow(5) };
    for seed in 0..10 {
        let mut pair = pair(200 + seed, slow(5), seed % 2 == 0, (false, false), Plan::LISTEN);
        pair.open();
        pair.chat(SECOND);
        pair.world.network.weather = loses;
        for turn in 0..10 {
            let _ = pair.order(pair.hosts()[turn % 2], Stack::ALL[(turn + 1) % Stack::ALL.len()]);
            pair.chat(SECOND);
        }
        pair.world.network.weather = slow(5);
        pair.chat(SECOND * 5);
        let [client, server] = pair.stacks();
        assert_eq!(client, server, "seed {seed}");
        for (said, heard) in [(pair.said[0], &pair.heard[1]), (pair.said[1], &pair.heard[0])] {
            assert!(heard.is_sorted_by(|one, next| one < next), "seed {seed}: once, and in order");
            // One in twenty is lost; what follows a lost FENCE is not.
            assert!(heard.len() * 100 > said as usize * 90, "seed {seed}: {} of {said}", heard.len());
        }
    }
}

#[test]
fn both_ends_ask_at_once() {
    for delay in [1, 10, 100] {
        for (at_client, at_server) in [(Stack::Secure, Stack::Secure), (Stack::Plain, Stack::Plain)] {
            let what = format!("{delay} ms, {at_client} and {at_server}");
            let mut pair = pair(3, slow(delay), true, (false, false), CHAT);
            pair.connect(CHAT);
            if at_client == Stack::Plain {
                assert_eq!(pair.order(pair.client, Stack::Secure), Ok(true));
                pair.world.run_for(SECOND * 3);
            }
            assert_eq!(pair.order(pair.client, at_client), Ok(true), "{what}");
            assert_eq!(pair.order(pair.server, at_server), Ok(true), "{what}");
            pair.world.run_for(SECOND * 4);
            assert!(pair.is_settled(at_client), "{what}: {:?}", pair.stacks());
            assert_eq!(pair.locked(), 0, "{what}");
            for host in pair.hosts() {
                let order = pair.flow(host).stack.order.map(|order| order.stack);
                assert!(order.is_none_or(|order| order == at_client), "{what}");
            }
            pair.check(SECOND, &what);
        }
    }
}

#[test]
fn changes_and_moves_do_not_disturb_each_other() {
    for seed in 0..20 {
        let what = format!("seed {seed}");
        let mut pair = pair(300 + seed, slow(5), true, (false, false), CHAT);
        let stream = pair.connect(CHAT);
        pair.world.run_for(SECOND * 2);
        for turn in 1..9_u8 {
            let host = pair.hosts()[usize::from(turn) % 2];
            let to = if turn % 2 == 1 { Stack::Secure } else { Stack::Plain };
            let wait = pair.world.random() % 20;
            assert_eq!(pair.order(pair.client, to), Ok(true), "{what}, turn {turn}");
            pair.world.run_for(Duration::from_millis(wait.into()));
            pair.world.set_addresses(host, vec![[10, 7, turn, seed as u8].into()]);
            pair.world.run_for(SECOND * 6);
            let [client, server] = pair.stacks();
            assert!(client == server && pair.is_settled(client), "{what}, turn {turn}: {client}, {server}");
            if !pair.is_settled(to) {
                // Messages went to where nobody was any more.
                assert_eq!(pair.order(pair.client, to), Ok(true), "{what}, turn {turn}");
                pair.world.run_for(SECOND);
                assert!(pair.is_settled(to), "{what}, turn {turn}");
            }
        }
        assert!(pair.world.host(pair.client).flow_of(stream).is_some_and(|flow| flow.moves > 0), "{what}");
        pair.forget_waits();
        pair.world.run_for(SECOND);
        pair.check(Duration::from_millis(300), &what);
    }
}

#[test]
fn either_agent_starts_again_at_any_step_and_both_ends_agree() {
    for is_direct in [false, true] {
        for to in OF_CONNECTIONS {
            for which in [0, 1] {
                for step in 0..16 {
                    let what = format!("direct {is_direct}, to {to}, host {which}, step {step}");
                    let mut pair = pair(4, slow(5), is_direct, (false, false), CHAT);
                    pair.connect(CHAT);
                    pair.world.run_for(SECOND);
                    if to == Stack::Plain {
                        assert_eq!(pair.order(pair.client, Stack::Secure), Ok(true), "{what}");
                        pair.world.run_for(SECOND);
                    }
                    assert_eq!(pair.order(pair.client, to), Ok(true), "{what}");
                    pair.world.run_for(Duration::from_millis(2 * step));
                    let host = pair.hosts()[which];
                    pair.world.kill_agent(host);
                    pair.world.run_for(Duration::from_millis(300));
                    pair.world.start_agent(host);
                    pair.world.run_for(SECOND * 6);
                    let [client, server] = pair.stacks();
                    assert_eq!(client, server, "{what}");
                    assert!(pair.is_settled(client), "{what}");
                    assert_eq!(pair.locked(), 0, "{what}");
                    pair.forget_waits();
                    pair.world.run_for(SECOND * 2);
                    pair.check(Duration::from_millis(500), &what);
                    // It may be changed as before.
                    let next = if client == Stack::Plain { Stack::Secure } else { Stack::Plain };
                    assert_eq!(pair.order(pair.server, next), Ok(true), "{what}");
                    pair.world.run_for(SECOND);
                    assert!(pair.is_settled(next), "{what}");
                }
            }
        }
    }
}

#[test]
fn either_agent_starts_again_while_a_flow_goes_by_fec_or_shall_and_both_ends_agree() {
    for case in 0..Stack::ALL.len() * 2 * 8 {
        let to = Stack::ALL[case / 16];
        let which = case / 8 % 2;
        let step = case as u64 % 8 * 2;
        let what = format!("to {to}, host {which}, step {step}");
        let mut pair = pair(6, slow(5), true, (false, false), Plan::LISTEN);
        pair.open();
        pair.chat(SECOND / 10);
        if to != Stack::Fec {
            assert_eq!(pair.order(pair.client, Stack::Fec), Ok(true), "{what}");
            pair.world.run_for(SECOND);
        }
        assert_eq!(pair.order(pair.client, to), Ok(true), "{what}");
        pair.world.run_for(Duration::from_millis(2 * step));
        let host = pair.hosts()[which];
        pair.world.kill_agent(host);
        pair.world.run_for(Duration::from_millis(300));
        pair.world.start_agent(host);
        pair.chat(SECOND * 5);
        let [client, server] = pair.stacks();
        assert!(client == server && pair.is_settled(client) && pair.locked() == 0, "{what}: {client} and {server}");
        let next = if client.repairs() { Stack::Plain } else { Stack::Fec };
        assert_eq!(pair.order(pair.server, next), Ok(true), "{what}");
        pair.world.run_for(SECOND);
        assert!(pair.is_settled(next.sealed_if(next == Stack::Fec && client.is_sealed())), "{what}");
    }
}

#[test]
fn who_demands_a_sealed_flow_is_never_given_less() {
    for demands in [(true, false), (false, true), (true, true)] {
        let what = format!("{demands:?}");
        let mut pair = pair(5, slow(5), true, demands, CHAT);
        pair.record();
        pair.connect(CHAT);
        for host in pair.hosts() {
            let is_its = if host == pair.client { demands.0 } else { demands.1 };
            let info = pair.flow(host).stack;
            let is_peers = if host == pair.client { demands.1 } else { demands.0 };
            assert_eq!((info.is_demanded, info.is_demanded_by_peer), (is_its, is_peers), "{what}");
            let begun = pair.order(host, Stack::Plain);
            assert_eq!(begun.is_err(), is_its, "{what}: who demands it is refused at once");
            pair.world.run_for(SECOND);
            let last = pair.flow(host).stack.changes.last().copied().expect("an order");
            assert_eq!(last.outcome.label(), "refused", "{what}");
            assert!(last.outcome.text().contains(if is_its { "this host" } else { "peer" }), "{what}");
            assert!(pair.is_settled(Stack::Secure), "{what}");
        }
        for host in pair.hosts() {
            pair.world.kill_agent(host);
            pair.world.run_for(Duration::from_millis(100));
            pair.world.start_agent(host);
            pair.forget_waits();
            pair.world.run_for(SECOND * 2);
            let _ = pair.order(host, Stack::Plain);
            pair.world.run_for(SECOND);
        }
        assert!(pair.is_settled(Stack::Secure), "{what}");
        assert_eq!(pair.plain(), 0, "{what}: not one packet");
        pair.check(SECOND, &what);
        // Nobody demands it any more.
        for host in pair.hosts() {
            pair.world.host(host).set_secure(BOTH, false);
        }
        assert_eq!(pair.order(pair.client, Stack::Plain), Ok(true), "{what}");
        pair.world.run_for(SECOND * 3);
        assert!(pair.is_settled(Stack::Plain), "{what}");
        for host in pair.hosts() {
            assert_eq!(pair.flow(host).carriage, Carriage::Direct, "{what}: it has kept its ports");
        }
        pair.check(SECOND, &what);
    }
}

/// A change to plain is ordered, and the configuration of an end is read anew `wait` later.
fn demand_while_unsealing(is_clients: bool, by_server: bool, wait: Duration) {
    let what = format!("of the client {is_clients}, by the server {by_server}, after {wait:?}");
    let mut pair = pair(9, slow(10), true, (false, false), CHAT);
    pair.connect(CHAT);
    let orderer = if by_server { pair.server } else { pair.client };
    assert_eq!(pair.order(orderer, Stack::Secure), Ok(true), "{what}");
    pair.world.run_for(SECOND);
    assert_eq!(pair.order(orderer, Stack::Plain), Ok(true), "{what}");
    pair.world.run_for(wait);
    let demander = if is_clients { pair.client } else { pair.server };
    let was_made = pair.flow(demander).stack.stack == Stack::Plain;
    pair.world.host(demander).set_secure(BOTH, true);
    pair.world.touch(demander);
    pair.world.run_for(SECOND * 6);
    let stack = if was_made { Stack::Plain } else { Stack::Secure };
    assert!(pair.is_settled(stack), "{what}: {:?}", pair.stacks());
    assert_eq!(pair.locked(), 0, "{what}");
    pair.check(SECOND * 2, &what);
}

#[test]
fn a_demand_that_comes_before_a_flow_is_unsealed_keeps_it_sealed() {
    for (is_clients, by_server) in [(false, false), (false, true), (true, false), (true, true)] {
        for step in 0..20 {
            demand_while_unsealing(is_clients, by_server, Duration::from_millis(3) * step);
        }
    }
}

#[test]
fn an_order_holds_until_it_is_released() {
    let mut pair = pair(6, slow(5), false, (false, false), CHAT);
    pair.connect(CHAT);
    for host in pair.hosts() {
        let id = pair.flow(host).flow;
        assert_eq!(pair.order(host, Stack::Secure), Ok(true));
        pair.world.run_for(SECOND);
        assert_eq!(pair.flow(host).stack.order.map(|order| order.stack), Some(Stack::Secure));
        let now = pair.world.now;
        assert_eq!(pair.world.host(host).sal.release_flow_stack(now, id), Ok(true));
        pair.world.touch(host);
        pair.world.run_for(SECOND);
        assert!(pair.is_settled(Stack::Plain));
        assert_eq!(pair.flow(host).stack.order, None);
        let now = pair.world.now;
        let again = pair.world.host(host).sal.release_flow_stack(now, id);
        assert_eq!(again, Err(ChangeRefused::NoOrder));
    }
}

#[test]
fn what_is_forged_or_seen_again_changes_nothing() {
    let mut pair = pair(7, slow(5), false, (false, false), CHAT);
    pair.connect(CHAT);
    pair.record();
    for to in [Stack::Secure, Stack::Plain, Stack::Secure] {
        assert_eq!(pair.order(pair.client, to), Ok(true));
        pair.world.run_for(SECOND);
        assert!(pair.is_settled(to));
    }
    let recorded = std::mem::take(pair.world.recording.as_mut().expect("recording"));
    let changes: Vec<_> = recorded.iter().filter(|(_, _, bytes)| kind_of(bytes) == Ok(Kind::Change)).cloned().collect();
    assert!(changes.len() >= 12, "{}", changes.len());
    for (from, to, bytes) in &changes {
        assert!(Message::parse(bytes).expect("ours").auth().is_some(), "tagged");
        pair.world.inject(*from, *to, bytes.clone());
        for byte in 0..bytes.len() {
            let mut forged = bytes.clone();
            forged[byte] ^= 1;
            pair.world.inject(*from, *to, forged);
        }
    }
    pair.world.run_for(SECOND * 3);
    assert!(pair.is_settled(Stack::Secure));
    assert_eq!(pair.locked(), 0);
    // Plain DATA for a sealed flow, as it was and with FENCE.
    let before: Vec<u64> = pair.hosts().map(|host| pair.world.host(host).cache.other_stack).to_vec();
    let mut forged = 0;
    for (from, to, bytes) in recorded.iter().filter(|(_, _, bytes)| kind_of(bytes) == Ok(Kind::Data)) {
        for flags in [0, FENCE] {
            let mut plain = bytes.clone();
            (plain[2], plain[3]) = (STACK_ENCAP, flags);
            pair.world.inject(*from, *to, plain);
            forged += 1;
        }
    }
    pair.world.run_for(SECOND * 2);
    let after: Vec<u64> = pair.hosts().map(|host| pair.world.host(host).cache.other_stack).to_vec();
    let counted: u64 = after.iter().zip(&before).map(|(after, before)| after - before).sum();
    assert_eq!(counted, forged, "each is counted, and dropped");
    assert!(pair.is_settled(Stack::Secure));
    pair.check(Duration::from_millis(300), "forged");
}

/// Sealed DATA that nobody has sealed, from one end of the flow to the other, `count` times.
fn forge_sealed(pair: &mut Pair, from: HostId, count: u8) {
    forge(pair, from, Cipher::Aes256Gcm.stack(), count);
}

/// DATA of a stack, which the program has never said, from one end of the flow to the other, `count` times.
fn forge(pair: &mut Pair, from: HostId, stack: u8, count: u8) {
    let source = pair.world.host(from).address;
    let recorded = pair.world.recording.as_ref().expect("recording");
    let is_its = |bytes: &[u8]| DataRepr::parse(bytes).is_ok_and(|data| data.stack == STACK_ENCAP);
    let found = recorded.iter().find(|(source_of, _, bytes)| source_of.ip() == source && is_its(bytes));
    let (from, to, mut forged) = found.expect("the flow has carried something").clone();
    (forged[2], forged[3]) = (stack, 0);
    for number in 0..count {
        forged[8] = number;
        pair.world.inject(from, to, forged.clone());
    }
}

#[test]
fn nothing_forged_makes_a_change_that_the_initiator_has_not_made() {
    for count in [1, 70] {
        let what = format!("{count} forged");
        let mut pair = pair(10, slow(30), false, (false, false), Plan::LISTEN);
        pair.record();
        pair.open();
        pair.chat(SECOND);
        assert_eq!(pair.order(pair.client, Stack::Secure), Ok(true), "{what}");
        pair.world.run_for(Duration::from_millis(20));
        // The request is on its way; the initiator hears nothing of the answer.
        pair.world.network.weather = Weather { loss_per_mille: 1000, ..slow(30) };
        pair.world.run_for(Duration::from_millis(15));
        let server = pair.server;
        assert_eq!(pair.flow(server).stack.changing_to, Some(Stack::Secure), "{what}: it is ready");
        let client = pair.client;
        forge_sealed(&mut pair, client, count);
        pair.world.run_for(SECOND);
        assert_eq!(pair.stacks(), [Stack::Plain; 2], "{what}");
        pair.world.run_for(SECOND * 5);
        assert!(pair.is_settled(Stack::Plain), "{what}");
        for host in pair.hosts() {
            let last = pair.flow(host).stack.changes.last().copied().expect("a change");
            assert_eq!(last.outcome.label(), "no-answer", "{what}");
        }
    }
}

#[test]
fn nothing_forged_has_packets_of_a_peer_that_has_not_turned_yet_dropped() {
    for count in [1, 70] {
        let mut pair = pair(11, slow(100), false, (false, false), Plan::LISTEN);
        pair.record();
        pair.open();
        pair.chat(SECOND);
        assert_eq!(pair.order(pair.client, Stack::Secure), Ok(true));
        // The answer has come, and the confirmation is on its way.
        pair.chat(Duration::from_millis(210));
        assert_eq!(pair.stacks(), [Stack::Secure, Stack::Plain]);
        let server = pair.server;
        forge_sealed(&mut pair, server, count);
        pair.chat(SECOND);
        assert!(pair.is_settled(Stack::Secure));
        pair.nothing_is_missing(&format!("{count} forged"));
    }
}

/// DATA of a stack that an end does not take has it tell the other one which stack it has. That DATA may be forged, and
/// comes at any time of a change: the change is made all the same, and by nobody but who ordered it.
#[test]
fn nothing_forged_cuts_a_change_short() {
    for (was, to, strange) in
        [(Stack::Plain, Stack::Secure, Cipher::Aes256Gcm.stack()), (Stack::Secure, Stack::Plain, STACK_ENCAP)]
    {
        for (by_server, from_server) in [(false, false), (false, true), (true, false), (true, true)] {
            for wait in (0..=150).step_by(15) {
                let what = format!("{to}, by server {by_server}, from server {from_server}, after {wait} ms");
                let mut pair = pair(12, slow(30), false, (false, false), Plan::LISTEN);
                pair.record();
                pair.open();
                pair.chat(SECOND);
                if was != Stack::Plain {
                    assert_eq!(pair.order(pair.client, was), Ok(true), "{what}");
                    pair.chat(SECOND);
                }
                let before = pair.hosts().map(|host| pair.flow(host).stack.changes.len());
                let orderer = if by_server { pair.server } else { pair.client };
                assert_eq!(pair.order(orderer, to), Ok(true), "{what}");
                pair.chat(Duration::from_millis(wait));
                let forger = if from_server { pair.server } else { pair.client };
                forge(&mut pair, forger, strange, 1);
                pair.chat(SECOND);
                assert!(pair.is_settled(to), "{what}: {:?}", pair.stacks());
                for (host, before) in pair.hosts().into_iter().zip(before) {
                    let changes = pair.flow(host).stack.changes;
                    let made: Vec<_> =
                        changes[before..].iter().map(|one| (one.cause.label(), one.outcome.label())).collect();
                    let cause = if host == orderer { "order" } else { "peer" };
                    assert_eq!(made, [(cause, "done")], "{what}");
                }
            }
        }
    }
}

#[test]
fn a_flow_within_one_host_stays_as_it_is() {
    let mut pair = pair(8, slow(5), false, (false, false), CHAT);
    let stream = pair.world.connect_stream(pair.server, "talk.shop", CHAT);
    pair.world.run_for(SECOND);
    assert!(pair.world.host(pair.server).flow_of(stream).is_some());
    assert_eq!(pair.order(pair.server, Stack::Secure), Err(ChangeRefused::SameHost));
}

impl Pair {
    /// The client goes outside, at once or while it is at home still, and comes back; both ends talk all the time.
    fn go_out_and_back(&mut self, is_broken: bool, what: &str) {
        let home = self.world.host(self.client).address;
        // From here on it is known that the client's routing chooses this one.
        self.world.set_addresses(self.client, vec![home]);
        self.record();
        let outside = if is_broken { vec![OUTSIDE.into()] } else { vec![OUTSIDE.into(), home] };
        self.world.set_addresses(self.client, outside);
        self.chat(SECOND * 3);
        assert!(self.is_settled(Stack::Secure), "{what}: {:?}", self.stacks());
        assert!(self.plain_outside() == 0 && self.sealed() > 100, "{what}: {}", self.plain_outside());
        assert!(self.hosts().iter().all(|host| self.flow(*host).trouble.is_none()), "{what}");
        self.world.set_addresses(self.client, vec![home]);
        self.chat(SECOND * 5);
        assert!(self.is_settled(Stack::Plain), "{what}: {:?}", self.stacks());
        assert_eq!(self.plain_outside(), 0, "{what}");
    }
}

#[test]
fn nothing_plain_leaves_by_addresses_where_a_rule_demands_a_sealed_flow() {
    for is_direct in [false, true] {
        for by_server in [false, true] {
            for is_broken in [false, true] {
                let what = format!("direct {is_direct}, by server {by_server}, broken {is_broken}");
                let mut pair = pair(1, slow(7), is_direct, (false, false), CHAT);
                pair.rule(by_server);
                pair.open();
                let stream = pair.connect(CHAT);
                pair.chat(SECOND);
                assert!(pair.is_settled(Stack::Plain), "{what}");
                for _ in 0..2 {
                    pair.go_out_and_back(is_broken, &what);
                }
                let moves = pair.world.host(pair.client).flow_of(stream).map_or(0, |flow| flow.moves);
                assert!(moves >= 4, "{what}: {moves}");
                pair.check(SECOND * 3, &what);
            }
        }
    }
}

#[test]
fn whatever_the_network_loses_nothing_plain_leaves_where_a_rule_demands_so() {
    for seed in 0..30 {
        let what = format!("seed {seed}");
        let weather = Weather { loss_per_mille: 100, ..slow(5) };
        let mut pair = pair(900 + seed, weather, seed % 2 == 0, (false, false), CHAT);
        pair.rule(seed % 4 < 2);
        pair.open();
        pair.chat(SECOND);
        pair.record();
        pair.world.set_addresses(pair.client, vec![OUTSIDE.into()]);
        pair.chat(SECOND * 20);
        assert_eq!(pair.plain_outside(), 0, "{what}");
        assert!(pair.is_settled(Stack::Secure), "{what}: {:?}", pair.stacks());
    }
}

#[test]
fn a_flow_that_begins_where_a_rule_demands_it_is_sealed_from_its_first_packet() {
    for by_server in [false, true] {
        let mut pair = pair(3, slow(5), true, (false, false), CHAT);
        pair.rule(by_server);
        pair.world.set_addresses(pair.client, vec![OUTSIDE.into()]);
        pair.record();
        pair.open();
        pair.connect(CHAT);
        pair.chat(SECOND);
        assert!(pair.is_settled(Stack::Secure) && pair.plain_outside() == 0 && pair.sealed() > 100, "{by_server}");
    }
}

#[test]
fn what_cannot_be_sealed_where_a_rule_demands_it_is_held_and_goes_on_at_home() {
    let mut pair = pair(4, slow(5), true, (false, false), CHAT);
    let server = pair.server;
    pair.world.host(server).set_secure(&[], false);
    pair.rule(false);
    pair.open();
    let home = pair.world.host(pair.client).address;
    pair.chat(SECOND);
    pair.record();
    pair.world.set_addresses(pair.client, vec![OUTSIDE.into()]);
    pair.chat(SECOND * 4);
    assert!(pair.flow(pair.client).trouble.is_none());
    pair.chat(SECOND * 3);
    assert_eq!(pair.plain_outside(), 0);
    assert_eq!(pair.flow(pair.client).trouble, Some(margay_core::Trouble::Unsealed));
    let rules = pair.flow(pair.client).flow;
    let rules = pair.world.host(pair.client).sal.rules_of_flow(rules).expect("a rule");
    assert!(rules.is_guarded && rules.blocked.is_some_and(|(why, _)| why == ChangeRefused::NoCipher));
    pair.world.set_addresses(pair.client, vec![home]);
    pair.hear();
    pair.heard[1].clear();
    pair.chat(SECOND * 3);
    assert!(pair.flow(pair.client).trouble.is_none() && pair.heard[1].len() > 100);
}
