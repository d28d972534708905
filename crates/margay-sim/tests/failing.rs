//! Stacks that fail, in virtual time: while they are built, and in use, where a box on the way lets nothing of them
//! pass. The flow goes on by what it had, and no rule tries again for a minute.

mod pair;

use std::time::Duration;

use margay_core::stack_change::End;
use margay_core::stack_rule::{Constant, Expression, Fact, StackRule};
use margay_core::{ChangeCause, ChangeOutcome, ChangeRefused, Stack};
use margay_sim::HostId;
use margay_sim::stream::Plan;
use margay_wire::DataRepr;

use pair::{Pair, SECOND, floor, pair, slow};

/// A rule without a condition.
fn always(uses: Stack) -> StackRule {
    let when = Expression::Constant(Constant::Bool(true));
    StackRule { when, uses, hold: Duration::from_millis(500), is_floor: false, ..floor(Fact::Local) }
}

impl Pair {
    fn set_rule(&mut self, host: HostId, uses: Stack) {
        let now = self.world.now;
        self.world.host(host).sal.set_stack_rules(now, vec![always(uses)]);
        self.world.touch(host);
    }

    /// Nothing passes that has repairs, or that is sent again.
    fn wall(&mut self) {
        self.world.network.losing = Some(Box::new(|packet| {
            let data = DataRepr::parse(packet.bytes).ok().filter(|_| !packet.is_direct);
            data.and_then(|data| Stack::of_number(data.stack)).is_some_and(Stack::makes_good)
        }));
    }

    /// How often a flow of a host has been changed for this cause, with this outcome.
    fn count(&mut self, host: HostId, is_it: impl Fn(ChangeCause, ChangeOutcome) -> bool) -> usize {
        self.flow(host).stack.changes.iter().filter(|change| is_it(change.cause, change.outcome)).count()
    }

    /// All that is said from now on is heard.
    fn is_whole(&mut self, time: Duration) -> bool {
        let before = self.said;
        self.chat(time);
        self.world.run_for(SECOND);
        self.hear();
        let came = |at: usize| self.heard[at].iter().filter(|number| **number > before[1 - at]).count();
        [came(1), came(0)] == [0, 1].map(|at| (self.said[at] - before[at]) as usize)
    }
}

const fn has_failed(cause: ChangeCause, outcome: ChangeOutcome) -> bool {
    matches!((cause, outcome), (ChangeCause::Failed, ChangeOutcome::Done))
}

/// By order of either end, sealed or not: the seal stays, whoever has wanted it.
#[test]
fn what_brings_nothing_is_left_and_the_seal_stays() {
    for (is_sealed, stack) in [(false, Stack::Fec), (true, Stack::Fec), (false, Stack::Sctp), (true, Stack::Sctp)] {
        for by_server in [false, true] {
            let what = format!("{stack}, sealed {is_sealed}, by server {by_server}");
            let mut pair = pair(1, slow(7), false, (is_sealed && by_server, false), Plan::LISTEN);
            pair.open();
            let orderer = if by_server { pair.server } else { pair.client };
            let bare = if is_sealed { Stack::Secure } else { Stack::Plain };
            if is_sealed && !by_server {
                assert_eq!(pair.order(orderer, Stack::Secure), Ok(true), "{what}");
            }
            pair.chat(SECOND);
            pair.record();
            pair.wall();
            assert_eq!(pair.order(orderer, stack), Ok(true), "{what}");
            pair.chat(SECOND * 12);
            assert!(pair.is_settled(bare), "{what}: {:?}", pair.stacks());
            let failed: usize = pair.hosts().iter().map(|host| pair.count(*host, has_failed)).sum();
            assert!(failed >= 1, "{what}: {:?}", pair.flow(orderer).stack.changes);
            assert_eq!(pair.flow(orderer).stack.order, None, "{what}: an order that cannot be followed does not hold");
            assert!(pair.is_whole(SECOND * 2), "{what}");
            assert!(!is_sealed || pair.plain() == 0, "{what}: {} plain", pair.plain());
            assert_eq!(pair.locked(), 0, "{what}");
            // An operator may try again at once, and the box may be gone.
            pair.world.network.losing = None;
            assert_eq!(pair.order(orderer, stack), Ok(true), "{what}");
            pair.chat(SECOND * 5);
            assert!(pair.is_settled(stack.sealed_if(is_sealed)), "{what}: {:?}", pair.stacks());
        }
    }
}

/// Of either end, or of both.
#[test]
fn no_rule_tries_again_for_a_minute_and_then_one_does() {
    for rules in [[true, false], [false, true], [true, true]] {
        let what = format!("{rules:?}");
        let mut pair = pair(2, slow(7), false, (false, false), Plan::LISTEN);
        pair.open();
        pair.chat(SECOND);
        pair.wall();
        for (host, has_rule) in pair.hosts().into_iter().zip(rules) {
            if has_rule {
                pair.set_rule(host, Stack::Fec);
            }
        }
        pair.chat(SECOND * 12);
        assert!(pair.is_settled(Stack::Plain), "{what}: {:?}", pair.stacks());
        let tries = |pair: &mut Pair| {
            let is_try =
                |cause: ChangeCause, outcome| outcome == ChangeOutcome::Done && !matches!(cause, ChangeCause::Failed);
            pair.hosts().map(|host| {
                let changes = pair.flow(host).stack.changes;
                changes.iter().filter(|one| one.to == Stack::Fec && is_try(one.cause, one.outcome)).count()
            })
        };
        assert_eq!(tries(&mut pair), [1, 1], "{what}");
        assert!(pair.is_whole(SECOND * 40), "{what}");
        assert_eq!(tries(&mut pair), [1, 1], "{what}: within the minute");
        pair.world.network.losing = None;
        pair.chat(SECOND * 30);
        assert!(pair.is_settled(Stack::Fec), "{what}: {:?}", pair.stacks());
        assert_eq!(pair.locked(), 0, "{what}");
    }
}

#[test]
fn what_is_not_answered_is_not_asked_for_again_for_a_minute_unless_it_is_a_seal() {
    for uses in [Stack::Fec, Stack::Secure] {
        let mut pair = pair(3, slow(7), false, (false, false), Plan::LISTEN);
        pair.open();
        pair.chat(SECOND);
        pair.world.kill_agent(pair.server);
        pair.set_rule(pair.client, uses);
        pair.chat(SECOND * 12);
        let no_answer = |_: ChangeCause, outcome| outcome == ChangeOutcome::NoAnswer;
        let asked = pair.count(pair.client, no_answer);
        assert_eq!(asked > 1, uses == Stack::Secure, "{uses:?}: {asked} times");
        let id = pair.flow(pair.client).flow;
        let blocked = pair.world.host(pair.client).sal.rules_of_flow(id).and_then(|rules| rules.blocked);
        let why = blocked.map(|(why, _)| why);
        assert_eq!(why, Some(ChangeRefused::NoAnswer), "{uses:?}");
        assert!(pair.is_settled_at(pair.client, Stack::Plain), "{uses:?}");
    }
}

impl Pair {
    fn is_settled_at(&mut self, host: HostId, stack: Stack) -> bool {
        let info = self.flow(host).stack;
        info.stack == stack && info.changing_to.is_none_or(|to| to == Stack::Secure)
    }
}

#[test]
fn a_demand_is_kept_whatever_fails() {
    let mut pair = pair(4, slow(7), false, (true, true), Plan::LISTEN);
    pair.open();
    pair.chat(SECOND);
    pair.record();
    pair.wall();
    pair.set_rule(pair.client, Stack::Fec);
    pair.chat(SECOND * 20);
    assert!(pair.is_settled(Stack::Secure) && pair.plain() == 0, "{:?}", pair.stacks());
    let refused = pair.order(pair.client, Stack::Plain);
    assert_eq!(refused, Err(ChangeRefused::Demanded(End::This)));
}
