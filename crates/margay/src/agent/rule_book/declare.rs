//! All of the operator's rules at once: what is declared is there afterwards, and nothing else (`margay policy apply`).

use margay_control::store::StoredRule;

use super::{Core, Order, RuleBook, RuleError, check_copies, check_new, install, over_at, remove, rule_of};

/// What has to change, or has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RuleChange {
    /// There is a rule more.
    Add(StoredRule),
    /// A rule has other terms.
    Amend {
        /// What it was.
        before: StoredRule,
        /// What it is; the same number.
        after: StoredRule,
    },
    /// There is a rule less.
    Delete(StoredRule),
}

impl<C: Core> RuleBook<C> {
    /// Makes the operator's rules what is declared: keeps what is the same, changes terms, adds, and deletes the rest;
    /// all of it or nothing. Of a rule that stays, number, age and what is left of its time stay as well. With `is_dry`
    /// nothing is done but to look.
    ///
    /// # Errors
    ///
    /// What is wrong with an order; then nothing has changed.
    pub fn declare(
        &self,
        orders: &[Order],
        authorities: &[String],
        is_dry: bool,
    ) -> Result<Vec<RuleChange>, RuleError> {
        let mut rules = self.rules.lock();
        let mut wanted: Vec<StoredRule> = Vec::new();
        for order in orders {
            for rule in self.rules_of(order, authorities)? {
                check_new(&rule, wanted.iter())?;
                wanted.push(rule);
            }
        }
        check_copies(wanted.iter())?;
        let mut changes = compare(rules.values().cloned().collect(), wanted);
        if is_dry || changes.is_empty() {
            return Ok(changes);
        }
        let (mut fresh, mut amended, mut gone) = (Vec::new(), Vec::new(), Vec::new());
        for change in changes.clone() {
            match change {
                RuleChange::Add(rule) => fresh.push(rule),
                RuleChange::Amend { before, after } => amended.push((before, after)),
                RuleChange::Delete(rule) => gone.push(rule.id),
            }
        }
        // New rules are there before old ones go: no packet finds neither.
        self.core.with_sal(|sal, now| install(sal, now, &mut fresh, &self.resolvers))?;
        let amended_rules = amended.iter().map(|(_, after)| after);
        let kept: Vec<StoredRule> = fresh.iter().chain(amended_rules).cloned().collect();
        if let Err(error) = self.store.exchange_rules(&kept, &gone) {
            self.core.with_sal(|sal, _| remove(sal, &fresh));
            return Err(error.into());
        }
        amended.iter().for_each(|(before, after)| self.amend(before, after));
        self.core.with_sal(|sal, _| {
            for id in &gone {
                sal.remove_rule(*id);
            }
        });
        rules.retain(|id, _| !gone.contains(id));
        rules.extend(kept.into_iter().map(|rule| (rule.id, rule)));
        let mut numbered = fresh.into_iter();
        for change in &mut changes {
            if let RuleChange::Add(rule) = change
                && let Some(made) = numbered.next()
            {
                *rule = made;
            }
        }
        self.changed();
        Ok(changes)
    }

    /// One whose time is over just now is noted as ended by whoever follows the core.
    fn amend(&self, before: &StoredRule, after: &StoredRule) {
        let lifetime = self.lifetime_left(after);
        self.core.with_sal(|sal, now| {
            if (before.idle, before.hard) != (after.idle, after.hard) {
                let lifetime = lifetime.map_or_else(|| over_at(now), |left| left(now));
                sal.set_rule_lifetime(now, after.id, lifetime);
            }
            sal.change_rule(after.id, rule_of(after, &self.resolvers))
        });
    }
}

/// Rules that lead to the same place of the same name are one rule with other terms: first those of the same priority,
/// then any.
fn compare(mut known: Vec<StoredRule>, wanted: Vec<StoredRule>) -> Vec<RuleChange> {
    let leads = |one: &StoredRule, other: &StoredRule| {
        let to = |rule: &StoredRule| (rule.prefix, rule.forward, rule.all);
        to(one) == to(other) && one.resolver == other.resolver
    };
    let (mut changes, mut added) = (Vec::new(), Vec::new());
    let mut pair = |before: StoredRule, want: StoredRule| {
        let hard_since_s = if before.hard == want.hard { before.hard_since_s } else { want.hard_since_s };
        let after = StoredRule { id: before.id, created_s: before.created_s, hard_since_s, ..want };
        if after != before {
            changes.push(RuleChange::Amend { before, after });
        }
    };
    let mut left = Vec::new();
    for want in wanted {
        match known.iter().position(|rule| leads(rule, &want) && rule.priority == want.priority) {
            Some(at) => pair(known.remove(at), want),
            None => left.push(want),
        }
    }
    for want in left {
        match known.iter().position(|rule| leads(rule, &want)) {
            Some(at) => pair(known.remove(at), want),
            None => added.push(RuleChange::Add(want)),
        }
    }
    changes.extend(added);
    changes.extend(known.into_iter().map(RuleChange::Delete));
    changes
}
