//! Rules that have their say while flows are being set up, in virtual time: whenever a host looks at its rules, every
//! flow comes to be carried as they say, and soon.

#[path = "pair/mod.rs"]
mod pair;

use std::time::Duration;

use margay_core::stack_rule::{Constant, Expression, Fact, StackRule};
use margay_core::{ChangeRefused, Stack};
use margay_sim::stream::Plan;

use pair::{Pair, SECOND, floor, pair, slow};

const TICK: Duration = Duration::from_millis(1);

fn always(uses: Stack) -> StackRule {
    let when = Expression::Constant(Constant::Bool(true));
    StackRule { when, uses, hold: Duration::ZERO, is_floor: false, ..floor(Fact::Local) }
}

impl Pair {
    fn set(&mut self, by_server: bool, rule: StackRule) {
        let now = self.world.now;
        let host = if by_server { self.server } else { self.client };
        self.world.host(host).sal.set_stack_rules(now, vec![rule]);
        self.world.touch(host);
    }
}

/// A look at the rules a quarter of a second, as the agent takes them; the first one at each third millisecond of a
/// set-up.
#[test]
fn a_look_at_the_rules_in_the_middle_of_a_set_up_delays_no_flow() {
    for by_server in [false, true] {
        for (first, uses) in (0..120).step_by(3).flat_map(|first| [(first, Stack::Fec), (first, Stack::Secure)]) {
            let what = format!("by server {by_server}, {uses}, first look after {first} ms");
            let mut pair = pair(1, slow(15), false, (false, false), Plan::LISTEN);
            pair.set(by_server, always(uses));
            pair.ask();
            pair.world.run_for(TICK * first);
            // A peer that has not heard yet of the flow is asked again after two seconds.
            for _ in 0..12 {
                pair.judge();
                pair.world.run_for(TICK * 250);
            }
            assert!(pair.is_settled(uses), "{what}: {:?}", pair.stacks());
        }
    }
}

#[test]
fn whatever_is_lost_of_the_set_up_rules_have_their_say_once_it_is_done() {
    for seed in 0..60 {
        let mut pair = pair(seed, slow(15), false, (false, false), Plan::LISTEN);
        pair.set(seed % 2 == 0, always(Stack::Fec));
        pair.world.network.weather.loss_per_mille = 300;
        pair.ask();
        for _ in 0..40 {
            pair.judge();
            pair.world.run_for(TICK * 25);
        }
        pair.world.network.weather.loss_per_mille = 0;
        pair.chat(SECOND * 6);
        assert!(pair.is_settled(Stack::Fec), "seed {seed}: {:?}", pair.stacks());
    }
}

#[test]
fn an_order_in_the_middle_of_a_set_up_is_told_to_try_again() {
    let mut pair = pair(1, slow(15), false, (false, false), Plan::LISTEN);
    pair.ask();
    let mut refusals = 0;
    let begun = loop {
        pair.world.run_for(TICK);
        let client = pair.client;
        if pair.world.host(client).sal.flows().all(|flow| flow.peer_flow.0 == 0) {
            continue;
        }
        match pair.order(client, Stack::Fec) {
            Err(refused) => assert_eq!(refused, ChangeRefused::Unconfirmed),
            begun => break begun,
        }
        refusals += 1;
    };
    assert_eq!(begun, Ok(true));
    assert!(refusals > 20, "the server confirms after a round trip: {refusals}");
    pair.world.run_for(SECOND);
    assert!(pair.is_settled(Stack::Fec), "{:?}", pair.stacks());
}
