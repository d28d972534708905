//! Rules that say how flows are carried: conditions on facts, which the engine evaluates while flows run (DESIGN §12;
//! docs/decisions/0076). What they bring about is a change as orders do ([`stack_change`](crate::act::stack_change)).
//!
//! Whoever has the clock calls [`Sal::judge_stacks`] from time to time. Conditions whose facts seldom change are
//! evaluated when one has; those about what every packet changes, when such a fact passes a number that it is compared
//! with, for flows that are active.
//!
//! Reading order: [`fact`], [`expression`], [`region`] (which values of a fact change nothing), [`state`] (one rule and
//! one flow), [`engine`], [`guard`] (what a rule with a floor keeps from leaving plain), [`guarded`] (which flows that
//! is about), [`held`] (what waits meanwhile), [`peer_demand`] (what a peer's rules have this host hold).

pub(crate) mod engine;
mod expression;
mod fact;
pub(crate) mod guard;
mod guarded;
mod held;
mod outside;
mod peer_demand;
mod program;
mod region;
mod seen;
mod shown;
mod state;

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::net::IpAddr;
use core::time::Duration;

use margay_wire::FlowId;

use crate::act::stack_change::ChangeRefused;
use crate::leg::stack::Stack;
use crate::types::name::{Prefix, ServiceId};
use crate::types::time::Instant;

pub use engine::JUDGE_EVERY;
pub use expression::{Arithmetic, Comparison, Expression, Failure, Network, Place};
pub use fact::{Constant, Fact, Facts, Kind, Value};
pub use outside::{FactRefused, FactValue, OutsideFact, OutsideInfo, is_fact_name};
pub use program::Program;
pub use shown::{FlowRule, FlowRules, StackRuleInfo};

use guarded::GuardedFlows;
use held::HeldPackets;
use peer_demand::PeerDemands;
use program::Programs;
use region::{Region, Watch};
use state::RuleState;

/// Rules of a host: each is evaluated for each flow that it is about.
pub const STACK_RULES_MAX: usize = 256;

/// What a host's configuration says of flows of some names.
#[derive(Clone, Debug, PartialEq)]
pub struct StackRule {
    /// What lists call it: its place in the file, from 1 on.
    pub number: u16,
    /// Which names, or prefixes with all that is under them.
    pub names: Vec<Prefix>,
    /// The condition, as it is written.
    pub text: String,
    /// The condition, parsed and typed.
    pub when: Expression,
    /// By which stack flows are carried while it is in force.
    pub uses: Stack,
    /// For how long the condition must hold before that.
    pub hold: Duration,
    /// For how long it must be over before flows are carried as without it.
    pub release: Duration,
    /// Of several rules in force the one with the greatest decides; of two that have the same, the first.
    pub priority: i32,
    /// It is a demand: at addresses where it holds nothing is sent but sealed.
    pub is_floor: bool,
}

impl StackRule {
    fn is_of(&self, service: &ServiceId) -> bool {
        self.names.iter().any(|prefix| prefix.contains(service))
    }

    /// Whether the condition is about what every packet changes.
    fn is_timed(&self) -> bool {
        self.when.facts().into_iter().any(|fact| fact.pace() == fact::Pace::Always)
    }

    /// A demand holds at once.
    fn hold(&self) -> Duration {
        if self.is_floor { Duration::ZERO } else { self.hold }
    }
}

/// An address of this host, for rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalPlace {
    /// An address of this host.
    pub address: IpAddr,
    /// Its network: `10.1.0.0/16`.
    pub prefix: String,
    /// The interface that has it.
    pub interface: String,
    /// Whether that is a radio's.
    pub is_wireless: bool,
}

/// A flow that rules are about.
#[derive(Debug)]
struct Followed {
    /// In the order of [`StackRules::rules`]: the place of a rule there, and its state.
    states: Vec<(u16, RuleState)>,
    /// Whether a condition is about what every packet changes, and is not decided by other facts.
    is_timed: bool,
    /// Nothing is waited for, and the flow is as the rules want it: until a fact or the flow's stack changes, there is
    /// nothing to look at.
    is_calm: bool,
    /// Whether one is about what the flow has carried.
    is_measured: bool,
    /// Whether one is about what is lost of it, or how evenly it arrives.
    asks_for_loss: bool,
    /// Up to which change of facts it has been evaluated.
    epoch: u64,
    /// Where the facts that every packet changes were at the last evaluation.
    regions: Vec<Region>,
    /// The rule by which the flow is carried as it is.
    acted: Option<u16>,
    /// No rule changes the flow before that.
    next_at: Instant,
    /// Why a rule could not change it, and until when none is tried.
    blocked: Option<(ChangeRefused, Instant)>,
    carried: Option<Carried>,
}

/// What a flow has carried.
#[derive(Clone, Copy, Debug)]
struct Carried {
    at: Instant,
    bytes: u64,
    bytes_per_s: f64,
}

/// Counts of one rule since it was set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RuleCounts {
    /// How often the condition was evaluated.
    pub evaluations: u64,
    /// How often it has begun to fail for a flow.
    pub failures: u64,
}

/// The rules, what they are evaluated with, and the flows that they are about.
#[derive(Debug, Default)]
pub(crate) struct StackRules {
    /// The greatest priority first.
    rules: Arc<[StackRule]>,
    /// In the order of the rules: what each compares.
    watches: Arc<[Watch]>,
    counts: Vec<RuleCounts>,
    places: Vec<LocalPlace>,
    outside: BTreeMap<String, OutsideFact>,
    /// Rises with every change of facts that are not one flow's; zero: none yet.
    epoch: u64,
    /// Minutes since 1970 at the last look.
    minute: u64,
    followed: BTreeMap<FlowId, Followed>,
    programs: Programs,
    guarded: GuardedFlows,
    held: HeldPackets,
    peer_demands: PeerDemands,
    /// Flows that the start of the agent before held to a floor, until their rules are evaluated.
    carried_over: BTreeSet<FlowId>,
}

impl StackRules {
    /// Whether any rule is about flows of a name.
    pub fn has_any_of(&self, service: &ServiceId) -> bool {
        self.rules.iter().any(|rule| rule.is_of(service))
    }

    /// Whether a rule demands something of flows of a name.
    pub fn has_floor_for(&self, service: &ServiceId) -> bool {
        self.rules.iter().any(|rule| rule.is_floor && rule.is_of(service))
    }

    /// Whether a rule is about what is lost of a flow.
    pub fn asks_for_loss(&self, id: FlowId) -> bool {
        self.followed.get(&id).is_some_and(|followed| followed.asks_for_loss)
    }

    /// Rules of this host demanded a flow encrypted when the agent stopped.
    pub fn carry_over(&mut self, id: FlowId) {
        self.carried_over.insert(id);
    }

    /// Something about a flow has changed that rules care for.
    pub fn stir(&mut self, id: FlowId) {
        if let Some(followed) = self.followed.get_mut(&id) {
            followed.is_calm = false;
        }
    }

    /// The flow is over.
    pub fn forget(&mut self, id: FlowId) {
        self.followed.remove(&id);
        self.programs.forget(id);
        self.guarded.remove(id);
        self.held.take(id);
        self.peer_demands.forget_flow(id);
        self.carried_over.remove(&id);
    }
}

#[cfg(test)]
mod test;
