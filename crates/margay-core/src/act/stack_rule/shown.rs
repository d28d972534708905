//! Rules, and what they see of a flow, for lists.

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::time::Duration;

use margay_wire::FlowId;

use super::fact::Facts;
use super::{RuleCounts, StackRule};
use crate::act::stack_change::ChangeRefused;
use crate::leg::stack::Stack;
use crate::machine::sal::Sal;
use crate::types::time::Instant;

/// A rule, for lists.
#[derive(Clone, Debug, PartialEq)]
pub struct StackRuleInfo {
    /// The rule, as the configuration has it.
    pub rule: StackRule,
    /// Flows that it is about.
    pub flows: usize,
    /// Of how many of them it is in force.
    pub in_force: usize,
    /// For how many the condition has no value now.
    pub failing: usize,
    /// Since it was set.
    pub counts: RuleCounts,
}

/// What a rule makes of a flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowRule {
    /// The rule's place in the configuration, as lists number it.
    pub number: u16,
    /// The condition, as it is written.
    pub text: String,
    /// What the rule wants.
    pub uses: Stack,
    /// It is a demand.
    pub is_floor: bool,
    /// Whether the condition holds, and since when.
    pub holds: bool,
    /// Since when that is so.
    pub since: Instant,
    /// Whether the rule has its say.
    pub in_force: bool,
    /// How long the condition must be as it is until the rule comes into force, or goes out of it; nothing where that
    /// changes nothing.
    pub waits: Option<Duration>,
    /// Why the condition has no value.
    pub failure: Option<String>,
}

/// What the rules make of a flow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlowRules {
    /// Those about the flow, the first to decide first.
    pub rules: Vec<FlowRule>,
    /// What they see of it now: facts and their values.
    pub facts: Vec<(String, String)>,
    /// Why the last change was not made, and when it is tried again at the earliest.
    pub blocked: Option<(ChangeRefused, Instant)>,
    /// Nothing of the flow is sent until it is sealed.
    pub is_guarded: bool,
}

impl Sal {
    /// The rules, the first to decide first.
    pub fn stack_rules(&self) -> Vec<StackRuleInfo> {
        let rules = &self.stack_rules.rules;
        let counts = self.stack_rules.counts.iter().copied();
        let with_none = |(rule, counts): (&StackRule, RuleCounts)| StackRuleInfo {
            rule: rule.clone(),
            flows: 0,
            in_force: 0,
            failing: 0,
            counts,
        };
        let mut infos: Vec<StackRuleInfo> = rules.iter().zip(counts).map(with_none).collect();
        for (at, state) in self.stack_rules.followed.values().flat_map(|followed| &followed.states) {
            if let Some(info) = infos.get_mut(usize::from(*at)) {
                info.flows += 1;
                info.in_force += usize::from(state.in_force);
                info.failing += usize::from(state.failure.is_some());
            }
        }
        infos
    }

    /// Whether there are rules.
    pub fn has_stack_rules(&self) -> bool {
        !self.stack_rules.rules.is_empty()
    }

    /// What the rules make of a flow; nothing where none is about it.
    pub fn rules_of_flow(&self, id: FlowId) -> Option<FlowRules> {
        let is_guarded = self.stack_rules.guarded.contains(id);
        let flow = self.flows.get(id)?;
        let Some(followed) = self.stack_rules.followed.get(&id) else {
            return is_guarded.then(|| FlowRules { is_guarded, ..FlowRules::default() });
        };
        let rules: Vec<(&StackRule, &super::RuleState)> = followed
            .states
            .iter()
            .filter_map(|(at, state)| Some((self.stack_rules.rules.get(usize::from(*at))?, state)))
            .collect();
        let of = |(rule, state): &(&StackRule, &super::RuleState)| FlowRule {
            number: rule.number,
            text: rule.text.clone(),
            uses: rule.uses,
            is_floor: rule.is_floor,
            holds: state.holds,
            since: state.since,
            in_force: state.in_force,
            waits: (state.holds != state.in_force).then(|| if state.holds { rule.hold() } else { rule.release }),
            failure: state.failure.as_ref().map(ToString::to_string),
        };
        let mut facts: Vec<(String, String)> = Vec::new();
        if let Some(seen) = self.seen(flow, followed.carried) {
            for (rule, _) in &rules {
                let known = |value: Option<super::Value<'_>>| value.map_or("unknown".into(), |value| value.to_string());
                let own = rule.when.facts().into_iter().map(|fact| (fact.name().into(), known(seen.fact(fact))));
                let outside = rule.when.outside_facts().into_iter();
                let outside = outside.map(|name| (alloc::format!("fact.{name}"), known(seen.outside(name))));
                facts.extend(own.chain(outside));
            }
        }
        facts.sort();
        facts.dedup();
        let blocked = followed.blocked.filter(|(_, until)| *until > self.now);
        Some(FlowRules { rules: rules.iter().map(of).collect(), facts, blocked, is_guarded })
    }
}
