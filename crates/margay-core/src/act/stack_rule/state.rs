//! One rule and one flow: since when the condition holds, and whether the rule is in force.

use core::time::Duration;

use super::expression::Failure;
use crate::types::time::Instant;

/// What is known of a rule for a flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RuleState {
    /// Whether the condition holds, and since when that is so.
    pub holds: bool,
    pub since: Instant,
    /// Whether the rule has its say: the condition has held, or not held, for long enough.
    pub in_force: bool,
    /// Why the condition has no value; then it does not hold.
    pub failure: Option<Failure>,
    /// Facts that seldom change decide the condition: it need not be evaluated before one of those has.
    pub is_steady: bool,
    /// It was in force when the agent stopped, and the condition has had no value since. What it is about may have been
    /// forgotten with the agent, such as a fact from outside: that does not end a demand.
    is_carried_over: bool,
}

impl RuleState {
    pub const fn new(now: Instant, in_force: bool) -> Self {
        Self { holds: in_force, since: now, in_force, failure: None, is_steady: false, is_carried_over: false }
    }

    /// Of a demand that was in force when the agent stopped.
    pub fn carried_over(now: Instant) -> Self {
        Self { is_carried_over: true, ..Self::new(now, true) }
    }

    /// What the condition is now. True if it fails, and did not before.
    pub fn note(&mut self, now: Instant, found: Result<bool, Failure>) -> bool {
        let (holds, failure) = match found {
            Ok(holds) => (holds, None),
            Err(failure) => (self.is_carried_over, Some(failure)),
        };
        self.is_carried_over &= failure.is_some();
        if holds != self.holds {
            self.holds = holds;
            self.since = now;
        }
        let fails_anew = failure.is_some() && self.failure.is_none();
        self.failure = failure;
        fails_anew
    }

    /// Whether the rule comes into force now, or goes out of it.
    pub fn advance(&mut self, now: Instant, hold: Duration, release: Duration) -> bool {
        let wait = if self.holds { hold } else { release };
        let turns = self.in_force != self.holds && now.since(self.since) >= wait;
        if turns {
            self.in_force = self.holds;
        }
        turns
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::act::stack_rule::Fact;

    const HOLD: Duration = Duration::from_secs(3);
    const RELEASE: Duration = Duration::from_secs(10);

    fn at(seconds: u64) -> Instant {
        Instant::from_millis(seconds * 1000)
    }

    #[test]
    fn a_condition_must_hold_for_a_while_and_be_over_for_another() {
        let mut state = RuleState::new(at(0), false);
        let mut step = |second, holds| {
            state.note(at(second), Ok(holds));
            state.advance(at(second), HOLD, RELEASE)
        };
        assert!(!step(1, true) && !step(3, true) && step(4, true), "three seconds after the first");
        assert!(!step(5, true) && !step(6, false) && !step(15, false) && step(16, false));
        assert!(!step(17, true) && !step(19, false) && !step(20, true) && !step(22, true) && step(23, true));
    }

    #[test]
    fn what_flaps_faster_than_it_must_hold_changes_nothing() {
        let mut state = RuleState::new(at(0), false);
        for second in 0..100 {
            state.note(at(second), Ok(second % 3 != 0));
            assert!(!state.advance(at(second), HOLD, RELEASE));
        }
    }

    #[test]
    fn a_demand_of_the_start_before_holds_until_its_condition_has_a_value() {
        let failure = || Err(Failure::Unknown(Fact::RttMs));
        let mut state = RuleState::carried_over(at(0));
        for second in 1..100 {
            assert_eq!(state.note(at(second), failure()), second == 1);
            assert!(!state.advance(at(second), HOLD, RELEASE) && state.in_force);
        }
        state.note(at(100), Ok(false));
        state.note(at(101), failure());
        assert!(!state.holds && state.advance(at(110), HOLD, RELEASE) && !state.in_force);
    }

    #[test]
    fn a_failure_is_false_and_is_counted_when_it_begins() {
        let mut state = RuleState::new(at(0), true);
        let failure = || Err(Failure::Unknown(Fact::RttMs));
        assert!(state.note(at(1), failure()) && !state.note(at(2), failure()));
        assert!(!state.holds && state.in_force && state.failure.is_some());
        assert!(state.advance(at(11), HOLD, RELEASE) && !state.in_force);
        assert!(!state.note(at(12), Ok(true)) && state.note(at(13), failure()), "anew");
    }
}
