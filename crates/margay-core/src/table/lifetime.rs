//! Rules that end by themselves: when each is due, in one order. As in OpenFlow, the idle time counts from the last
//! packet that the rule decided upon, the hard time from when it was given.
//!
//! A packet moves nothing here: when a rule's idle time may be over, its usage says whether it is.

use alloc::collections::{BTreeMap, BTreeSet};
use core::time::Duration;

use crate::table::RuleId;
use crate::types::time::Instant;

/// How long a rule lasts. Without either time it stays until somebody takes it out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lifetime {
    /// It ends when it has decided upon no packet for so long.
    pub idle: Option<Duration>,
    /// It ends then, used or not.
    pub until: Option<Instant>,
}

/// Why a rule has ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expiry {
    /// It decided upon no packet for its idle time.
    Idle,
    /// Its hard time was over.
    Hard,
}

impl Expiry {
    /// As logs and lists say it.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Idle => "it decided upon nothing for its idle time",
            Self::Hard => "its hard time was over",
        }
    }
}

/// When a rule ends, as far as is known now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ends {
    /// Unless it decides upon a packet before.
    pub idle: Option<Instant>,
    /// In any case.
    pub hard: Option<Instant>,
}

impl Ends {
    fn first(self) -> Option<(Instant, Expiry)> {
        let idle = self.idle.map(|at| (at, Expiry::Idle));
        let hard = self.hard.map(|at| (at, Expiry::Hard));
        // Of two that end together the hard time is the better reason: no packet would have helped.
        [hard, idle].into_iter().flatten().min_by_key(|(at, _)| *at)
    }
}

#[derive(Clone, Copy, Debug)]
struct Term {
    lifetime: Lifetime,
    /// The idle time counts from here until the rule is used.
    given: Instant,
    /// Where it stands in the order: not later than its end.
    due: Instant,
}

impl Term {
    fn ends(&self, last_use: Option<Instant>) -> Ends {
        let counts_from = last_use.map_or(self.given, |last| last.max(self.given));
        Ends { idle: self.lifetime.idle.map(|idle| counts_from + idle), hard: self.lifetime.until }
    }
}

/// The lifetimes of all rules that have one.
#[derive(Debug, Default)]
pub(crate) struct Lifetimes {
    terms: BTreeMap<RuleId, Term>,
    order: BTreeSet<(Instant, RuleId)>,
}

impl Lifetimes {
    /// Gives a rule another lifetime, from now on.
    pub fn set(&mut self, now: Instant, id: RuleId, lifetime: Lifetime) {
        self.remove(id);
        let mut term = Term { lifetime, given: now, due: now };
        if let Some((due, _)) = term.ends(None).first() {
            term.due = due;
            self.terms.insert(id, term);
            self.order.insert((due, id));
        }
    }

    /// The rule is gone.
    pub fn remove(&mut self, id: RuleId) {
        if let Some(term) = self.terms.remove(&id) {
            self.order.remove(&(term.due, id));
        }
    }

    /// Whether a rule lives by being used: then whoever decides has to say so here.
    pub fn counts_use(&self, id: RuleId) -> bool {
        self.terms.get(&id).is_some_and(|term| term.lifetime.idle.is_some())
    }

    /// When a rule ends that was used last at `last_use`, as far as is known now.
    pub fn ends(&self, id: RuleId, last_use: Option<Instant>) -> Ends {
        self.terms.get(&id).map_or_else(Ends::default, |term| term.ends(last_use))
    }

    /// When the next rule may end.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.order.first().map(|(due, _)| *due)
    }

    /// A rule that has ended, and why; `last_use` says when one decided last.
    pub fn pop_due(&mut self, now: Instant, last_use: impl Fn(RuleId) -> Option<Instant>) -> Option<(RuleId, Expiry)> {
        while let Some((due, id)) = self.order.first().copied().filter(|(due, _)| *due <= now) {
            self.order.remove(&(due, id));
            let Some(term) = self.terms.get_mut(&id) else { continue };
            let Some((ends, why)) = term.ends(last_use(id)).first() else { continue };
            if ends <= now {
                self.terms.remove(&id);
                return Some((id, why));
            }
            term.due = ends;
            self.order.insert((ends, id));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;
    use alloc::vec::Vec;

    use super::*;

    fn at(ms: u64) -> Instant {
        Instant::from_millis(ms)
    }

    fn idle(ms: u64) -> Lifetime {
        Lifetime { idle: Some(Duration::from_millis(ms)), until: None }
    }

    /// All that ends up to `now`.
    fn ended(lifetimes: &mut Lifetimes, now: Instant, last_use: &[(RuleId, Instant)]) -> Vec<(RuleId, Expiry)> {
        let last_use = |id| last_use.iter().find(|(known, _)| *known == id).map(|(_, at)| *at);
        core::iter::from_fn(|| lifetimes.pop_due(now, last_use)).collect()
    }

    #[test]
    fn idle_time_counts_from_the_last_use_and_hard_time_does_not() {
        let mut lifetimes = Lifetimes::default();
        let (one, other) = (RuleId(1), RuleId(2));
        lifetimes.set(at(0), one, Lifetime { until: Some(at(250)), ..idle(100) });
        lifetimes.set(at(0), other, idle(100));
        assert_eq!(lifetimes.next_deadline(), Some(at(100)));
        assert_eq!(ended(&mut lifetimes, at(99), &[]), []);
        assert_eq!(ended(&mut lifetimes, at(100), &[(one, at(60))]), [(other, Expiry::Idle)]);
        assert_eq!(lifetimes.next_deadline(), Some(at(160)));
        assert_eq!(ended(&mut lifetimes, at(160), &[(one, at(159))]), []);
        assert_eq!(lifetimes.next_deadline(), Some(at(250)));
        assert_eq!(ended(&mut lifetimes, at(250), &[(one, at(249))]), [(one, Expiry::Hard)]);
        assert_eq!(lifetimes.next_deadline(), None);
    }

    #[test]
    fn another_lifetime_begins_anew_and_none_is_for_ever() {
        let mut lifetimes = Lifetimes::default();
        let id = RuleId(1);
        lifetimes.set(at(0), id, idle(100));
        // It has not been used since long before.
        lifetimes.set(at(90), id, idle(50));
        assert_eq!(ended(&mut lifetimes, at(139), &[(id, at(1))]), []);
        assert_eq!(ended(&mut lifetimes, at(140), &[(id, at(1))]), [(id, Expiry::Idle)]);
        lifetimes.set(at(200), id, idle(10));
        lifetimes.set(at(200), id, Lifetime::default());
        assert_eq!((lifetimes.next_deadline(), lifetimes.terms.len(), lifetimes.order.len()), (None, 0, 0));
        lifetimes.set(at(200), id, idle(10));
        lifetimes.remove(id);
        assert_eq!((lifetimes.next_deadline(), lifetimes.terms.len()), (None, 0));
        let two = Lifetime { idle: Some(Duration::from_millis(5)), until: Some(at(205)) };
        lifetimes.set(at(200), id, two);
        assert_eq!(ended(&mut lifetimes, at(300), &[]), vec![(id, Expiry::Hard)]);
    }
}
