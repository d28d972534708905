//! Gives rules their lifetimes, and takes out those that have ended.

use crate::machine::sal::Sal;
use crate::session::event::Event;
use crate::table::RuleId;
use crate::table::lifetime::{Ends, Lifetime};
use crate::types::time::Instant;

impl Sal {
    /// Gives a rule a lifetime that begins now, instead of the one that it has. False if there is no such rule.
    pub fn set_rule_lifetime(&mut self, now: Instant, id: RuleId, lifetime: Lifetime) -> bool {
        self.now = now;
        let is_there = self.table.usage(id).is_some();
        if is_there {
            self.lifetimes.set(now, id, lifetime);
            self.table.touch(id);
        }
        is_there
    }

    /// When a rule ends, if it does so by itself.
    pub fn rule_ends(&self, id: RuleId) -> Ends {
        let last_use = self.table.usage(id).and_then(|usage| usage.last);
        self.lifetimes.ends(id, last_use)
    }

    /// Takes rules out whose time is over.
    pub(crate) fn rules_due(&mut self, now: Instant) {
        let table = &self.table;
        let last_use = |id| table.usage(id).and_then(|usage| usage.last);
        let mut ended = alloc::vec::Vec::new();
        while let Some(gone) = self.lifetimes.pop_due(now, last_use) {
            ended.push(gone);
        }
        for (id, why) in ended {
            let packets = self.table.usage(id).map_or(0, |usage| usage.packets);
            if let Some((prefix, rule)) = self.table.remove(id) {
                self.end_grants_under(&prefix);
                self.forget_resolved(id, &rule);
                self.counters.rules_expired += 1;
                self.events.push(Event::RuleExpired { id, prefix, why, packets });
            }
        }
    }
}
