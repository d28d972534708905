//! `fec` under a seal, in virtual time: what is sealed gets repairs and loses them, by order of either end and by
//! rules, and nothing of it is ever seen plain, whatever the network, the hosts' places and the agents do.

mod pair;

use std::time::Duration;

use margay_core::stack_change::End;
use margay_core::stack_rule::{Expression, Fact, StackRule};
use margay_core::{ChangeRefused, Stack};
use margay_sim::Weather;
use margay_sim::check::ends_agree;
use margay_sim::stream::Plan;
use margay_wire::{DataRepr, STACK_SECURE_FEC_AES};

use pair::{BOTH, CHAT, OUTSIDE, Pair, SECOND, floor, pair, slow};

/// DATA by `secure-fec` that was sent since recording began.
fn sealed_fec(pair: &Pair) -> usize {
    let recorded = pair.world.recording.iter().flatten();
    let is_its = |bytes: &[u8]| DataRepr::parse(bytes).is_ok_and(|data| data.stack == STACK_SECURE_FEC_AES);
    recorded.filter(|(_, _, bytes)| is_its(bytes)).count()
}

/// A rule without a condition.
fn always(number: u16, uses: Stack, priority: i32) -> StackRule {
    let when = Expression::Constant(margay_core::stack_rule::Constant::Bool(true));
    let hold = Duration::from_millis(500);
    StackRule { number, when, uses, hold, priority, is_floor: false, ..floor(Fact::Local) }
}

#[test]
fn a_sealed_flow_gets_repairs_and_loses_them_and_is_sealed_all_the_time() {
    for demands in [(false, false), (true, false), (false, true)] {
        for by_server in [false, true] {
            let what = format!("{demands:?}, by server {by_server}");
            let mut pair = pair(1, slow(7), true, demands, Plan::LISTEN);
            pair.open();
            let orderer = if by_server { pair.server } else { pair.client };
            if demands == (false, false) {
                assert_eq!(pair.order(orderer, Stack::Secure), Ok(true), "{what}");
            }
            pair.chat(SECOND);
            pair.record();
            for _ in 0..3 {
                assert_eq!(pair.order(orderer, Stack::Fec), Ok(true), "{what}");
                pair.chat(SECOND);
                assert!(pair.is_settled(Stack::SecureFec), "{what}: {:?}", pair.stacks());
                let info = pair.flow(orderer).stack;
                assert_eq!(info.order.map(|order| order.stack), Some(Stack::SecureFec), "{what}");
                assert_eq!(pair.order(orderer, Stack::Secure), Ok(true), "{what}");
                pair.chat(SECOND);
                assert!(pair.is_settled(Stack::Secure), "{what}: {:?}", pair.stacks());
            }
            assert!(pair.plain() == 0 && sealed_fec(&pair) > 100, "{what}: {}", pair.plain());
            pair.nothing_is_missing(&what);
            assert_eq!(pair.locked(), 0, "{what}");
        }
    }
}

#[test]
fn every_stack_follows_every_other_and_nothing_is_missing() {
    for from in Stack::ALL {
        for to in Stack::ALL.into_iter().filter(|to| *to != from) {
            // Repairs alone take no seal away.
            let becomes = to.sealed_if(to.makes_good() && from.is_sealed());
            let what = format!("{from} to {to}");
            let mut pair = pair(2, slow(5), true, (false, false), Plan::LISTEN);
            pair.open();
            if from != Stack::Plain {
                assert_eq!(pair.order(pair.client, from), Ok(true), "{what}");
            }
            pair.chat(SECOND);
            assert!(pair.is_settled(from), "{what}: {:?}", pair.stacks());
            assert_eq!(pair.order(pair.server, to), Ok(becomes != from), "{what}");
            pair.chat(SECOND);
            assert!(pair.is_settled(becomes), "{what}: {:?}", pair.stacks());
            pair.nothing_is_missing(&what);
        }
    }
}

#[test]
fn either_agent_starts_again_at_any_step_and_a_demanded_flow_is_never_seen_plain() {
    for demands in [(true, false), (false, true)] {
        for (which, step) in (0..2).flat_map(|which| (0..10).map(move |step| (which, step))) {
            let what = format!("{demands:?}, host {which}, step {step}");
            let mut pair = pair(3, slow(5), true, demands, Plan::LISTEN);
            pair.record();
            pair.open();
            pair.chat(SECOND / 5);
            let to = if step % 2 == 0 { Stack::Fec } else { Stack::Secure };
            if to == Stack::Secure {
                assert_eq!(pair.order(pair.client, Stack::Fec), Ok(true), "{what}");
                pair.world.run_for(SECOND);
            }
            assert_eq!(pair.order(pair.client, to), Ok(true), "{what}");
            pair.world.run_for(Duration::from_millis(2 * step));
            let host = pair.hosts()[which];
            pair.world.kill_agent(host);
            pair.chat(Duration::from_millis(300));
            pair.world.start_agent(host);
            pair.chat(SECOND * 5);
            let [client, server] = pair.stacks();
            assert!(client == server && pair.is_settled(client) && client.is_sealed(), "{what}: {client}, {server}");
            assert_eq!((pair.plain(), pair.locked()), (0, 0), "{what}");
            ends_agree(&pair.world).expect("both ends agree");
            if client == Stack::Secure {
                assert_eq!(pair.order(pair.server, Stack::Fec), Ok(true), "{what}");
                pair.chat(SECOND);
                assert!(pair.is_settled(Stack::SecureFec), "{what}: {:?}", pair.stacks());
            }
            let less = pair.order(pair.client, Stack::Plain);
            assert_eq!(less == Err(ChangeRefused::Demanded(End::This)), demands.0, "{what}");
            pair.chat(SECOND);
            assert_eq!(pair.plain(), 0, "{what}");
        }
    }
}

/// The configuration demands a seal while a flow goes from one stack to another: no less than that from then on, where
/// the end that demands has not turned yet.
#[test]
fn a_demand_that_comes_late_is_met_by_repairs_under_a_seal() {
    for (is_clients, step) in [false, true].into_iter().flat_map(|one| (0..12).map(move |step| (one, step))) {
        let what = format!("of the client {is_clients}, step {step}");
        let mut pair = pair(4, slow(10), false, (false, false), Plan::LISTEN);
        pair.open();
        assert_eq!(pair.order(pair.client, Stack::SecureFec), Ok(true), "{what}");
        pair.chat(SECOND);
        assert_eq!(pair.order(pair.client, Stack::Plain), Ok(true), "{what}");
        pair.world.run_for(Duration::from_millis(5) * step);
        let demander = if is_clients { pair.client } else { pair.server };
        let was_made = pair.flow(demander).stack.stack == Stack::Plain;
        pair.world.host(demander).set_secure(BOTH, true);
        pair.world.touch(demander);
        pair.chat(SECOND * 6);
        let [client, server] = pair.stacks();
        assert!(client == server && pair.is_settled(client), "{what}: {client} and {server}");
        assert_eq!(client.is_sealed(), !was_made, "{what}: {client}");
        assert_eq!(pair.locked(), 0, "{what}");
        assert_eq!(pair.order(demander, Stack::Fec), Ok(client != Stack::SecureFec), "{what}");
        pair.chat(SECOND);
        assert!(pair.is_settled(Stack::SecureFec), "{what}: {:?}", pair.stacks());
    }
}

#[test]
fn a_rule_for_repairs_and_a_rule_with_a_floor_are_both_met() {
    for (by_server, fec_at_server) in [(false, false), (false, true), (true, false), (true, true)] {
        let what = format!("floor of the server {by_server}, repairs of the server {fec_at_server}");
        let mut pair = pair(5, slow(7), true, (false, false), Plan::LISTEN);
        let (guard, fact) = if by_server { (pair.server, Fact::Remote) } else { (pair.client, Fact::Local) };
        let repairer = if fec_at_server { pair.server } else { pair.client };
        let now = pair.world.now;
        for host in pair.hosts() {
            let mut rules = Vec::new();
            rules.extend((host == guard).then(|| floor(fact)));
            rules.extend((host == repairer).then(|| always(2, Stack::Fec, -1)));
            pair.world.host(host).sal.set_stack_rules(now, rules);
        }
        pair.open();
        pair.chat(SECOND * 3);
        assert!(pair.is_settled(Stack::Fec), "{what}: {:?}", pair.stacks());
        let home = pair.world.host(pair.client).address;
        pair.world.set_addresses(pair.client, vec![home]);
        pair.record();
        pair.world.set_addresses(pair.client, vec![OUTSIDE.into()]);
        pair.chat(SECOND * 8);
        assert!(pair.is_settled(Stack::SecureFec), "{what}: {:?}", pair.stacks());
        assert!(pair.plain_outside() == 0 && sealed_fec(&pair) > 100, "{what}: {}", pair.plain_outside());
        let before = pair.hosts().map(|host| pair.flow(host).stack.changes.len());
        pair.chat(SECOND * 10);
        let after = pair.hosts().map(|host| pair.flow(host).stack.changes.len());
        assert_eq!(before, after, "{what}: the two hosts do not change it to and fro");
        pair.world.set_addresses(pair.client, vec![home]);
        pair.chat(SECOND * 8);
        assert!(pair.is_settled(Stack::Fec), "{what}: {:?}", pair.stacks());
        // Without the rule for repairs.
        let now = pair.world.now;
        pair.world.host(repairer).sal.set_stack_rules(now, if repairer == guard { vec![floor(fact)] } else { vec![] });
        pair.world.touch(repairer);
        pair.chat(SECOND * 5);
        assert!(pair.is_settled(Stack::Plain), "{what}: {:?}", pair.stacks());
        assert_eq!(pair.plain_outside(), 0, "{what}");
    }
}

/// Orders, moves outside and home, agents that start again, and a network that loses: with a floor for what is outside.
#[test]
fn changes_meet_moves_and_restarts_and_nothing_plain_is_seen_where_a_rule_demands_a_seal() {
    for seed in 0..8 {
        let what = format!("seed {seed}");
        let weather = Weather { loss_per_mille: 30, ..slow(5) };
        let mut pair = pair(700 + seed, weather, seed % 2 == 0, (false, false), CHAT);
        let by_server = seed % 4 < 2;
        pair.rule(by_server);
        pair.open();
        pair.chat(SECOND);
        let home = pair.world.host(pair.client).address;
        pair.world.set_addresses(pair.client, vec![home]);
        pair.record();
        for _ in 0..10 {
            let random = pair.world.random();
            let host = pair.hosts()[random as usize & 1];
            match random >> 1 & 3 {
                0 => {
                    let place = if random >> 8 & 1 == 0 { home } else { OUTSIDE.into() };
                    pair.world.set_addresses(pair.client, vec![place]);
                }
                1 if random >> 8 & 1 == 0 => {
                    pair.world.kill_agent(host);
                    pair.world.start_agent(host);
                    // An agent has its rules before it carries anything.
                    pair.rule(by_server);
                }
                // One may be under way, or less than the rule demands: then this one is refused.
                _ => drop(pair.order(host, Stack::ALL[(random as usize >> 3) % Stack::ALL.len()])),
            }
            pair.chat(Duration::from_millis((random >> 16 & 0x7ff).into()));
            assert_eq!(pair.plain_outside(), 0, "{what}");
        }
        pair.world.network.weather = slow(5);
        pair.chat(SECOND * 15);
        let [client, server] = pair.stacks();
        assert!(client == server && pair.is_settled(client), "{what}: {client} and {server}");
        assert_eq!((pair.plain_outside(), pair.locked()), (0, 0), "{what}");
        ends_agree(&pair.world).expect("both ends agree");
        for heard in &pair.heard {
            assert!(heard.is_sorted_by(|one, next| one < next), "{what}: once, and in order");
        }
    }
}
