//! Rules with a floor while an attacker on the path drops the messages by which flows come to be encrypted, while
//! agents start again, and while a floor comes into force for a flow that runs: nothing plain is sent
//! (docs/decisions/0120).

#[path = "pair/mod.rs"]
mod pair;

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use margay_core::stack_rule::{Expression, Fact, FactValue, Kind as FactKind, StackRule};
use margay_core::{Stack, Towards, Trouble};
use margay_sim::HostId;
use margay_wire::{
    DATA_HEADER_LEN, DataRepr, Extension, Flags, Kind, Message, MoveFlags, PORT, STACK_SECURE_AES, is_sealed, kind_of,
};
use pair::{CHAT, OUTSIDE, Pair, SECOND, floor, pair, slow};

/// Longer than peers have asked to be freed, before they sent plain.
const ATTACK: Duration = Duration::from_secs(12);
/// Within this the agents try again once the attacker is gone.
const RECOVERY: Duration = Duration::from_secs(8);
/// The peer hears of a floor after this, the network's delay, and not before.
const ONE_WAY: Duration = Duration::from_millis(15);

fn is_change(bytes: &[u8]) -> bool {
    kind_of(bytes) == Ok(Kind::Change)
}

fn is_signalling(bytes: &[u8]) -> bool {
    kind_of(bytes) != Ok(Kind::Data)
}

impl Pair {
    /// Packets of programs that a host has sent and that are not encrypted, since recording began.
    fn plain_of(&mut self, host: HostId) -> usize {
        let own: Vec<IpAddr> = self.world.host(host).addresses.clone();
        let is_plain = |bytes: &[u8]| {
            let has_payload = bytes.len() > DATA_HEADER_LEN + 8;
            has_payload && DataRepr::parse(bytes).is_ok_and(|data| !is_sealed(data.stack))
        };
        let recorded = self.world.recording.iter().flatten();
        let encapsulated = recorded.filter(|(from, _, bytes)| own.contains(&from.ip()) && is_plain(bytes)).count();
        let direct = self.world.direct_recording.iter().flatten();
        encapsulated + direct.filter(|(from, ..)| own.contains(&from.ip())).count()
    }

    /// The rule's host, and the other.
    fn ruled(&self, by_server: bool) -> (HostId, HostId) {
        if by_server { (self.server, self.client) } else { (self.client, self.server) }
    }

    /// A floor that holds while a fact is set.
    fn floor_by_fact(&mut self, host: HostId) {
        let when = Expression::Outside("lockdown".to_owned(), FactKind::Bool);
        let now = self.world.now;
        let rule = StackRule { when, ..floor(Fact::Local) };
        self.world.host(host).sal.set_stack_rules(now, vec![rule]);
        self.world.touch(host);
    }

    /// Sets the fact; rules are looked at before it returns, as for an operator.
    fn lock_down(&mut self, host: HostId, is_on: bool) {
        let now = self.world.now;
        let sal = &mut self.world.host(host).sal;
        sal.set_fact(now, "lockdown", FactValue::Bool(is_on), SECOND * 600).expect("room");
        sal.judge_stacks(now);
        self.world.touch(host);
    }

    /// The attacker is gone: every flow is encrypted, and both ends hear each other.
    fn recovers(&mut self, what: &str) {
        self.world.attacker_drops = None;
        self.chat(RECOVERY);
        assert!(self.is_settled(Stack::Secure), "{what}: {:?}", self.stacks());
        let before = [self.heard[0].len(), self.heard[1].len()];
        self.chat(SECOND);
        let heard = [self.heard[0].len() - before[0], self.heard[1].len() - before[1]];
        assert!(heard.iter().all(|heard| *heard > 150), "{what}: {heard:?}");
    }
}

#[test]
fn a_floor_that_comes_into_force_while_a_flow_is_set_up_holds_and_fails_nothing() {
    // With the longer delay the client says its SYN again before the first one is answered.
    for (one_way_ms, step) in [(15, 1), (150, 25)] {
        for by_server in [false, true] {
            for at in (0..3 * one_way_ms).step_by(step) {
                let what = format!("{one_way_ms} ms, rule of server {by_server}, in force after {at} ms");
                let mut pair = pair(1, slow(one_way_ms), true, (false, false), CHAT);
                let (host, _) = pair.ruled(by_server);
                pair.floor_by_fact(host);
                pair.ask();
                pair.world.run_for(Duration::from_millis(at));
                pair.record();
                pair.lock_down(host, true);
                pair.chat(SECOND * 4);
                assert_eq!(pair.plain_of(host), 0, "{what}");
                assert!(pair.is_settled(Stack::Secure), "{what}: {:?}", pair.stacks());
            }
        }
    }
}

#[test]
fn nothing_plain_goes_outside_where_changes_are_dropped() {
    for is_direct in [false, true] {
        for by_server in [false, true] {
            for is_alone in [false, true] {
                let what = format!("direct {is_direct}, rule of server {by_server}, a flow alone {is_alone}");
                let mut pair = pair(1, slow(7), is_direct, (false, false), CHAT);
                pair.rule(by_server);
                pair.open();
                pair.chat(SECOND);
                let home = pair.world.host(pair.client).address;
                if is_alone {
                    pair.world.set_addresses(pair.client, vec![home, OUTSIDE.into()]);
                    pair.chat(SECOND);
                }
                pair.record();
                pair.world.attacker_drops = Some(is_change);
                if is_alone {
                    let (now, id) = (pair.world.now, pair.flow(pair.client).flow);
                    let sal = &mut pair.world.host(pair.client).sal;
                    sal.migrate_flow(now, id, Towards::Local(OUTSIDE.into())).expect("the client has that address");
                    pair.world.touch(pair.client);
                } else {
                    pair.world.set_addresses(pair.client, vec![OUTSIDE.into()]);
                }
                pair.chat(ATTACK);
                assert_eq!(pair.plain_outside(), 0, "{what}");
                assert!(pair.world.dropped_by_attacker > 0 && pair.stacks() == [Stack::Plain; 2], "{what}");
                let (host, _) = pair.ruled(by_server);
                assert_eq!(pair.flow(host).trouble, Some(Trouble::Unsealed), "{what}");
                pair.recovers(&what);
                assert_eq!(pair.plain_outside(), 0, "{what}");
            }
        }
    }
}

#[test]
fn connections_outlive_an_attacker_that_drops_changes() {
    for by_server in [false, true] {
        let what = format!("rule of server {by_server}");
        let mut pair = pair(2, slow(7), by_server, (false, false), CHAT);
        pair.rule(by_server);
        pair.open();
        pair.connect(CHAT);
        pair.chat(SECOND);
        pair.record();
        pair.world.attacker_drops = Some(is_change);
        pair.world.set_addresses(pair.client, vec![OUTSIDE.into()]);
        pair.chat(ATTACK);
        pair.recovers(&what);
        // TCP has doubled its wait for as long as nothing passed.
        pair.chat(ATTACK * 2);
        assert_eq!(pair.plain_outside(), 0, "{what}");
        pair.forget_waits();
        pair.chat(SECOND * 3);
        pair.check(SECOND * 2, &what);
    }
}

/// The peer that keeps asking to be freed is answered at last, if nobody demands anything of its flow.
#[test]
fn a_flow_that_need_not_be_encrypted_is_freed_however_late_the_answer_comes() {
    let mut pair = pair(3, slow(7), false, (false, false), CHAT);
    pair.rule(false);
    pair.open();
    let home = pair.world.host(pair.client).address;
    pair.chat(SECOND);
    pair.world.attacker_drops = Some(is_change);
    pair.world.set_addresses(pair.client, vec![OUTSIDE.into()]);
    pair.chat(ATTACK);
    pair.world.set_addresses(pair.client, vec![home]);
    pair.world.attacker_drops = None;
    pair.chat(RECOVERY);
    let before = [pair.heard[0].len(), pair.heard[1].len()];
    pair.chat(SECOND);
    assert!(pair.heard[0].len() > before[0] + 150 && pair.heard[1].len() > before[1] + 150);
    assert_eq!(pair.stacks(), [Stack::Plain; 2]);
}

#[test]
fn nothing_plain_goes_once_a_floor_holds_by_a_fact() {
    for drops in [None, Some(is_change as fn(&[u8]) -> bool)] {
        for is_direct in [false, true] {
            for by_server in [false, true] {
                let what = format!("drops {}, direct {is_direct}, rule of server {by_server}", drops.is_some());
                let mut pair = pair(4, slow(7), is_direct, (false, false), CHAT);
                let (host, peer) = pair.ruled(by_server);
                pair.floor_by_fact(host);
                pair.open();
                pair.chat(SECOND);
                assert!(pair.is_settled(Stack::Plain), "{what}");
                pair.world.attacker_drops = drops;
                pair.lock_down(host, true);
                pair.record();
                pair.chat(ONE_WAY);
                assert_eq!(pair.plain_of(host), 0, "{what}: by the host of the rule, at once");
                pair.record();
                pair.chat(ATTACK);
                assert_eq!((pair.plain_of(host), pair.plain_of(peer)), (0, 0), "{what}");
                assert_eq!(pair.is_settled(Stack::Secure), drops.is_none(), "{what}: {:?}", pair.stacks());
                pair.recovers(&what);
                assert_eq!(pair.plain(), 0, "{what}");
                if drops.is_none() {
                    pair.nothing_is_missing(&what);
                }
            }
        }
    }
}

/// All that is signalled is dropped, for ever: the host of the rule sends nothing plain all the same.
#[test]
fn the_host_of_a_floor_sends_nothing_plain_whatever_is_dropped() {
    for by_server in [false, true] {
        for is_by_fact in [false, true] {
            let what = format!("rule of server {by_server}, by a fact {is_by_fact}");
            let mut pair = pair(5, slow(7), false, (false, false), CHAT);
            let (host, _) = pair.ruled(by_server);
            if is_by_fact {
                pair.floor_by_fact(host)
            } else {
                pair.rule(by_server)
            }
            pair.open();
            pair.chat(SECOND);
            pair.world.attacker_drops = Some(is_signalling);
            if is_by_fact {
                pair.lock_down(host, true);
            } else {
                pair.world.set_addresses(pair.client, vec![OUTSIDE.into()]);
            }
            pair.record();
            pair.chat(ATTACK * 2);
            if is_by_fact || !by_server {
                assert_eq!(pair.plain_of(host), 0, "{what}");
            }
            assert!(is_by_fact || pair.plain_outside() == 0, "{what}");
        }
    }
}

/// A rule comes with a reload, and holds.
#[test]
fn nothing_plain_goes_once_a_reload_has_brought_a_floor() {
    for is_direct in [false, true] {
        let mut pair = pair(6, slow(7), is_direct, (false, false), CHAT);
        pair.open();
        pair.chat(SECOND);
        pair.world.attacker_drops = Some(is_change);
        let (now, client, server) = (pair.world.now, pair.client, pair.server);
        let address = margay_core::stack_rule::Network { address: [0, 0, 0, 0].into(), bits: 0 };
        let when = Expression::Within(Box::new(Expression::Fact(Fact::Local)), address);
        pair.world.host(client).sal.set_stack_rules(now, vec![StackRule { when, ..floor(Fact::Local) }]);
        pair.world.touch(client);
        pair.record();
        pair.chat(ONE_WAY);
        assert_eq!(pair.plain_of(client), 0, "direct {is_direct}");
        pair.record();
        pair.chat(ATTACK);
        assert_eq!((pair.plain_of(client), pair.plain_of(server)), (0, 0), "direct {is_direct}");
        pair.recovers("reload");
    }
}

/// The floor ends, and with it what waits at either end.
#[test]
fn a_flow_goes_on_plain_when_the_floor_is_over_before_it_was_encrypted() {
    for by_server in [false, true] {
        let mut pair = pair(7, slow(7), false, (false, false), CHAT);
        let (host, _) = pair.ruled(by_server);
        pair.floor_by_fact(host);
        pair.open();
        pair.chat(SECOND);
        pair.world.attacker_drops = Some(is_change);
        pair.lock_down(host, true);
        pair.chat(SECOND * 3);
        pair.lock_down(host, false);
        pair.chat(SECOND * 4);
        let before = [pair.heard[0].len(), pair.heard[1].len()];
        pair.chat(SECOND);
        assert!(pair.heard[0].len() > before[0] + 150 && pair.heard[1].len() > before[1] + 150, "{by_server}");
        assert_eq!(pair.stacks(), [Stack::Plain; 2]);
    }
}

/// Either agent starts again while the flow waits; a fact from outside is forgotten with the agent that had it.
#[test]
fn a_new_start_of_either_agent_frees_nothing() {
    for is_by_fact in [false, true] {
        for by_server in [false, true] {
            for kills_ruled in [false, true] {
                let what =
                    format!("by a fact {is_by_fact}, rule of server {by_server}, kills the rule's {kills_ruled}");
                let mut pair = pair(8, slow(7), by_server, (false, false), CHAT);
                let (host, peer) = pair.ruled(by_server);
                if is_by_fact {
                    pair.floor_by_fact(host)
                } else {
                    pair.rule(by_server)
                }
                pair.open();
                pair.chat(SECOND);
                pair.world.attacker_drops = Some(is_change);
                if is_by_fact {
                    pair.lock_down(host, true);
                } else {
                    pair.world.set_addresses(pair.client, vec![OUTSIDE.into()]);
                }
                pair.chat(SECOND * 2);
                pair.record();
                let victim = if kills_ruled { host } else { peer };
                pair.world.kill_agent(victim);
                pair.chat(SECOND / 2);
                pair.world.start_agent(victim);
                pair.chat(ATTACK);
                assert_eq!((pair.plain_of(host), pair.plain_of(peer)), (0, 0), "{what}");
                pair.recovers(&what);
                assert_eq!(pair.plain(), 0, "{what}");
            }
        }
    }
}

/// Whoever kept the messages by which a flow became plain once says them again when the peer's agent has started again
/// and remembers none of them, and drops what the true sender says.
#[test]
fn what_was_said_to_an_agent_before_it_started_again_changes_nothing() {
    let mut pair = pair(9, slow(7), false, (false, false), CHAT);
    pair.open();
    let (client, server) = (pair.client, pair.server);
    let become_as = |pair: &mut Pair, stack| {
        pair.order(client, stack).expect("both can");
        pair.chat(SECOND);
        assert!(pair.is_settled(stack), "{:?}", pair.stacks());
    };
    become_as(&mut pair, Stack::Secure);
    pair.record();
    become_as(&mut pair, Stack::Plain);
    let from_client = pair.world.host(client).address;
    let recorded = pair.world.recording.take().into_iter().flatten();
    let kept: Vec<_> = recorded.filter(|(from, _, bytes)| from.ip() == from_client && is_change(bytes)).collect();
    assert!(kept.len() >= 2, "a request and a confirmation");
    become_as(&mut pair, Stack::Secure);
    pair.world.kill_agent(server);
    pair.chat(SECOND / 2);
    pair.world.attacker_drops = Some(is_signalling);
    pair.world.start_agent(server);
    pair.record();
    for (from, to, bytes) in kept {
        pair.world.inject(from, to, bytes);
        pair.chat(SECOND / 10);
    }
    pair.chat(SECOND);
    assert_eq!((pair.flow(server).stack.stack, pair.plain_of(server)), (Stack::Secure, 0));
    pair.world.attacker_drops = None;
    pair.chat(RECOVERY);
    assert!(pair.is_settled(Stack::Secure), "{:?}", pair.stacks());
}

/// An answer of the peer to an earlier word, which somebody held back, does not show that it knows of a demand.
#[test]
fn an_answer_that_was_held_back_frees_nothing_after_a_move() {
    let is_answer = |bytes: &[u8]| {
        is_change(bytes) && Message::parse(bytes).is_ok_and(|message| message.flags.contains(Flags::CONFIRM))
    };
    let says_demand = |bytes: &[u8]| {
        let demands = |message: &Message<'_>| {
            let said = message.extensions().find_map(|extension| match extension {
                Extension::Move(said) => Some(said.flags),
                _ => None,
            });
            message.kind == Kind::Probe && said.is_some_and(|flags| flags.contains(MoveFlags::DEMANDED))
        };
        is_change(bytes) || is_signalling(bytes) && Message::parse(bytes).is_ok_and(|message| demands(&message))
    };
    let mut pair = pair(10, slow(7), false, (false, false), CHAT);
    pair.rule(false);
    pair.open();
    pair.chat(SECOND);
    // A packet of a stack that the client does not take has it tell the server which one it has.
    pair.world.attacker_drops = Some(is_answer);
    pair.record();
    let (client, server) = (pair.client, pair.server);
    let flow = pair.flow(client).flow;
    let [client, server] = [client, server].map(|host| SocketAddr::new(pair.world.host(host).address, PORT));
    let mut strange = [0; 64];
    let header = DataRepr { stack: STACK_SECURE_AES, flags: 0, dst_flow: flow, packet_number: 1, index: 0, count: 1 };
    header.emit(&mut strange);
    pair.world.inject(server, client, strange.to_vec());
    pair.chat(SECOND / 2);
    let recorded = pair.world.recording.take().into_iter().flatten();
    let held: Vec<_> = recorded.filter(|(_, _, bytes)| is_answer(bytes)).collect();
    assert!(!held.is_empty(), "the server has answered");
    pair.record();
    pair.world.attacker_drops = Some(says_demand);
    pair.world.set_addresses(pair.client, vec![OUTSIDE.into()]);
    pair.chat(SECOND * 6);
    for (from, _, bytes) in held {
        pair.world.inject(from, SocketAddr::new(OUTSIDE.into(), PORT), bytes);
    }
    pair.chat(ATTACK);
    assert_eq!(pair.plain_outside(), 0);
    pair.recovers("an answer that was held back");
    assert_eq!(pair.plain_outside(), 0);
}

/// What the operator has ordered holds again once a floor, which outranks it, is over.
#[test]
fn an_order_has_its_way_again_after_a_floor() {
    let mut pair = pair(11, slow(7), false, (false, false), CHAT);
    pair.floor_by_fact(pair.client);
    pair.open();
    pair.chat(SECOND);
    for stack in [Stack::Secure, Stack::Plain] {
        pair.order(pair.client, stack).expect("both can");
        pair.chat(SECOND);
    }
    for (is_on, stack) in [(true, Stack::Secure), (false, Stack::Plain)] {
        pair.lock_down(pair.client, is_on);
        pair.chat(SECOND * 5);
        assert!(pair.is_settled(stack), "{:?}", pair.stacks());
    }
}
