//! The decision engine: which flows are carried otherwise than their rules say, and what becomes of that.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;

use margay_wire::{ChangeRepr, FlowId};

use super::expression::Failure;
use super::fact::{Fact, Facts, Pace};
use super::guard::{hold_until_sealed, tell_of_demand};
use super::region::{Watch, are_as_found, regions};
use super::seen::{Seen, Steady};
use super::state::RuleState;
use super::{Carried, Followed, LocalPlace, RuleCounts, STACK_RULES_MAX, StackRule};
use crate::act::stack_change::{ChangeCause, ChangeOutcome, ChangeRefused, End, StackChange};
use crate::act::stack_rule::StackRules;
use crate::association::Association;
use crate::association::location::{Pair, Scope};
use crate::leg::stack::Stack;
use crate::machine::sal::Sal;
use crate::session::flow::FlowTable;
use crate::session::flow::{Flow, Marks};
use crate::types::name::ServiceId;
use crate::types::role::{Lifecycle, Role};
use crate::types::time::Instant;
use crate::types::tuple::GREETING;

/// How often [`Sal::judge_stacks`] is to be called while there are rules.
pub const JUDGE_EVERY: Duration = Duration::from_millis(250);
/// A flow that has carried nothing for so long is not active: of its facts only those that come with events change.
const ACTIVE: Duration = Duration::from_secs(10);
/// At most one change of a flow in this time.
const CHANGE_EVERY: Duration = Duration::from_secs(2);
/// A flow that cannot be changed is not tried again for so long.
const BLOCKED: Duration = Duration::from_secs(60);

impl ChangeRefused {
    /// Whether the next moment may do what this one does not.
    fn passes(self) -> bool {
        matches!(
            self,
            Self::UnderWay
                | Self::Busy(_)
                | Self::PeerBusy
                | Self::Unconfirmed
                | Self::UnknownToPeer
                | Self::Full { .. }
                | Self::Held
        )
    }
}

impl Followed {
    /// The rules in force, the first to decide first.
    fn all_in_force<'a>(&self, rules: &'a [StackRule]) -> impl Iterator<Item = &'a StackRule> {
        let all = self.states.iter().filter(|(_, state)| state.in_force);
        all.filter_map(|(at, _)| rules.get(usize::from(*at)))
    }

    /// The first of those that demand.
    fn floor<'a>(&self, rules: &'a [StackRule]) -> Option<&'a StackRule> {
        self.all_in_force(rules).find(|rule| rule.is_floor)
    }

    /// The first of those that say more than that the flow is sealed. A demand says nothing of what is lost, unless it
    /// is one for both.
    fn wish<'a>(&self, rules: &'a [StackRule]) -> Option<&'a StackRule> {
        self.all_in_force(rules).find(|rule| !rule.is_floor || rule.uses.makes_good())
    }

    /// Whether a rule is in force.
    fn has_in_force(&self, rules: &[StackRule], number: u16) -> bool {
        self.all_in_force(rules).any(|rule| rule.number == number)
    }
}

impl Sal {
    /// Which rules there are from now on; those beyond [`STACK_RULES_MAX`] are left out. Flows that earlier ones had
    /// changed are judged by these.
    pub fn set_stack_rules(&mut self, now: Instant, mut rules: Vec<StackRule>) {
        self.now = now;
        rules.truncate(STACK_RULES_MAX);
        rules.sort_by_key(|rule| core::cmp::Reverse(rule.priority));
        let ruled: Vec<FlowId> = self.stack_rules.followed.keys().copied().collect();
        self.stack_rules.counts = alloc::vec![RuleCounts::default(); rules.len()];
        self.stack_rules.watches = rules.iter().map(|rule| Watch::of(&rule.when)).collect();
        self.stack_rules.rules = rules.into();
        self.stack_rules.epoch += 1;
        self.end_all_grants();
        self.grants.hurry(now, |service| self.stack_rules.has_floor_for(service));
        let all: Vec<FlowId> = self.flows.iter().filter(|flow| flow.carries_data()).map(|flow| flow.id).collect();
        for id in all {
            let acted = self.stack_rules.followed.remove(&id).and_then(|followed| followed.acted);
            let service = self.flows.get(id).map(|flow| flow.service);
            // Under a floor a flow goes by one pair, and nothing plain by that where it is to be sealed.
            let is_apart = service.is_some_and(|service| self.stack_rules.has_floor_for(&service));
            let was_striped = is_apart && self.leave_places(id, true);
            let was_guarded = self.stack_rules.guarded.contains(id);
            self.begin_rules(now, id);
            if let Some(guarded) = self.stack_rules.guarded.get_mut(id).filter(|_| !was_guarded) {
                // It has been plain here until now.
                guarded.is_moved = false;
            }
            if was_striped {
                self.flows.open_pinhole(&mut self.ports, &mut self.queue, now, id);
            }
            match self.stack_rules.followed.get_mut(&id) {
                Some(followed) => followed.acted = followed.acted.or(acted),
                None if ruled.contains(&id) => self.leave_rules(now, id, acted),
                None => {}
            }
        }
        // Of some there was a floor.
        self.stripe_what_waits(now);
    }

    /// No rule is about a flow any more.
    fn leave_rules(&mut self, now: Instant, id: FlowId, acted: Option<u16>) {
        self.set_ruled(now, id, false);
        let is_demanded = self.flows.get(id).is_some_and(Flow::is_demanded);
        if let Some(number) = acted {
            // What comes of it is told as every change is.
            let to = Stack::Plain.sealed_if(is_demanded);
            let _ = self.begin_change(now, id, to, ChangeCause::RuleEnded(number));
        }
    }

    /// What rules say of this host's addresses. Comes before [`set_routes`](Self::set_routes), by which flows move to
    /// them.
    pub fn set_local_places(&mut self, places: Vec<LocalPlace>) {
        if self.stack_rules.places != places {
            self.stack_rules.places = places;
            self.stack_rules.epoch += 1;
        }
    }

    /// Flows of which a rule wants to know what they have carried, and that are active.
    pub fn flows_to_measure(&self, now: Instant) -> Vec<FlowId> {
        let is_active = |id: &FlowId| self.flows.get(*id).is_some_and(|flow| now.since(flow.active) < ACTIVE);
        let measured = self.stack_rules.followed.iter().filter(|(_, followed)| followed.is_measured);
        measured.map(|(id, _)| *id).filter(is_active).collect()
    }

    /// What a flow has carried in all, in bytes.
    pub fn note_carried(&mut self, now: Instant, id: FlowId, bytes: u64) {
        let Some(followed) = self.stack_rules.followed.get_mut(&id) else { return };
        let bytes_per_s = match followed.carried {
            // Half of what it was, half of what is new: one burst between two looks is no rate.
            Some(before) if now > before.at => {
                let since_s = now.since(before.at).as_secs_f64();
                f64::midpoint(before.bytes_per_s, bytes.saturating_sub(before.bytes) as f64 / since_s)
            }
            Some(before) => before.bytes_per_s,
            None => 0.0,
        };
        followed.carried = Some(Carried { at: now, bytes, bytes_per_s });
    }

    /// Looks at the facts, and begins what the rules want.
    pub fn judge_stacks(&mut self, now: Instant) {
        self.now = now;
        self.stack_rules.expire_facts(now);
        if self.stack_rules.rules.is_empty() {
            return;
        }
        let minute = self.unix_s() / 60;
        if core::mem::replace(&mut self.stack_rules.minute, minute) != minute {
            let is_of_clock = |rule: &StackRule| rule.when.facts().into_iter().any(|fact| fact.pace() == Pace::Clock);
            self.stack_rules.epoch += u64::from(self.stack_rules.rules.iter().any(is_of_clock));
        }
        let rules = Arc::clone(&self.stack_rules.rules);
        let epoch = self.stack_rules.epoch;
        let mut counts = core::mem::take(&mut self.stack_rules.counts);
        let mut all = core::mem::take(&mut self.stack_rules.followed);
        let mut due = Vec::new();
        for (id, followed) in &mut all {
            let is_stale = followed.epoch != epoch;
            if followed.is_calm && !is_stale && !followed.is_timed {
                continue;
            }
            let Some(flow) = self.flows.get(*id) else { continue };
            let is_active = followed.is_timed && now.since(flow.active) < ACTIVE;
            if is_stale || is_active && self.has_left_regions(flow, followed) {
                followed.epoch = epoch;
                self.evaluate(now, flow, followed, &rules, &mut counts, is_stale);
            } else if followed.is_calm {
                continue;
            }
            let mut turns = false;
            for (at, state) in &mut followed.states {
                let Some(rule) = rules.get(usize::from(*at)) else { continue };
                turns |= state.advance(now, rule.hold(), rule.release);
            }
            let is_due = turns || self.is_to_change(flow, followed, &rules);
            let waits = followed.states.iter().any(|(_, state)| state.in_force != state.holds);
            followed.is_calm = !is_due && !waits;
            if is_due {
                due.push(*id);
            }
        }
        self.stack_rules.followed = all;
        self.stack_rules.counts = counts;
        for id in due {
            self.decide(now, id);
        }
    }

    fn evaluate(
        &self,
        now: Instant,
        flow: &Flow,
        followed: &mut Followed,
        rules: &[StackRule],
        counts: &mut [RuleCounts],
        is_stale: bool,
    ) {
        let Some(seen) = self.seen(flow, followed.carried) else { return };
        for (at, state) in &mut followed.states {
            let place = usize::from(*at);
            let (Some(rule), Some(counts)) = (rules.get(place), counts.get_mut(place)) else { continue };
            if is_stale {
                state.is_steady = !rule.when.asks_of_packets() && rule.when.holds(&Steady(seen)).is_ok();
            } else if state.is_steady {
                continue;
            }
            counts.evaluations += 1;
            counts.failures += u64::from(state.note(now, rule.when.holds(&seen)));
        }
        let is_timed = |at: u16| rules.get(usize::from(at)).is_some_and(StackRule::is_timed);
        followed.is_timed = followed.states.iter().any(|(at, state)| !state.is_steady && is_timed(*at));
        let undecided = followed.states.iter().filter(|(_, state)| !state.is_steady);
        let watches = undecided.filter_map(|(at, _)| self.stack_rules.watches.get(usize::from(*at)));
        followed.regions = regions(watches, |fact| seen.fact(fact));
    }

    /// Whether a fact that every packet changes is such that a condition may be another one.
    fn has_left_regions(&self, flow: &Flow, followed: &Followed) -> bool {
        let seen = Seen::of_packets(self, flow, followed.carried);
        !are_as_found(&followed.regions, |fact| seen.fact(fact))
    }

    pub(super) fn seen<'a>(&'a self, flow: &'a Flow, carried: Option<Carried>) -> Option<Seen<'a>> {
        let host = self.associations.get(flow.association)?.host;
        let pair = self.pair_in_use(Scope { host, flow: flow.id })?;
        Some(Seen::at(self, flow, pair, carried))
    }

    /// By which stack rules want a flow carried, and why; nothing where they do not care.
    fn aim(&self, flow: &Flow, followed: &Followed, rules: &[StackRule]) -> Option<(Stack, ChangeCause)> {
        let floor = followed.floor(rules).map(|rule| ChangeCause::Rule(rule.number));
        let ended = followed.acted.filter(|number| !followed.has_in_force(rules, *number));
        if let Some(order) = self.order_of(flow.id) {
            let ordered =
                ended.map(|number| (order.stack.sealed_if(flow.is_demanded()), ChangeCause::RuleEnded(number)));
            return floor.map(|cause| (self.under_seal(flow, order.stack), cause)).or(ordered);
        }
        if let Some(rule) = followed.wish(rules) {
            let cause = ChangeCause::Rule(rule.number);
            let is_demanded = floor.is_some() || flow.is_demanded();
            let to = if is_demanded { self.under_seal(flow, rule.uses) } else { rule.uses };
            // What a flow has from the demand alone is the demand's doing.
            return Some((to, floor.filter(|_| to == Stack::Secure).unwrap_or(cause)));
        }
        match (floor, ended) {
            (None, None) => None,
            (None, Some(number)) => {
                let to = Stack::Plain.sealed_if(flow.is_demanded());
                Some((to, ChangeCause::RuleEnded(number)))
            }
            (Some(_), Some(number)) if flow.stacks.sends.is_sealed() && flow.stacks.sends.makes_good() => {
                Some((Stack::Secure, ChangeCause::RuleEnded(number)))
            }
            // A demand is content with whatever is sealed: somebody else, at the other end perhaps, wants more.
            (Some(cause), _) if flow.stacks.sends.is_sealed() => Some((flow.stacks.sends, cause)),
            (Some(cause), _) => Some((Stack::Secure, cause)),
        }
    }

    /// By which stack a flow goes that is to be sealed, and that somebody wants carried by `wanted`. A flow that is not
    /// sealed yet is so in any case, also where the peer cannot seal what goes by `fec` or `sctp`.
    fn under_seal(&self, flow: &Flow, wanted: Stack) -> Stack {
        let may_wait = flow.is_sealed() || self.can_seal(flow, wanted);
        if may_wait { wanted.sealed() } else { Stack::Secure }
    }

    fn is_to_change(&self, flow: &Flow, followed: &Followed, rules: &[StackRule]) -> bool {
        let is_ruled = followed.floor(rules).is_some();
        let aim = self.aim(flow, followed, rules);
        is_ruled != flow.has(Marks::RULED) || aim.is_some_and(|(to, _)| flow.stacks.settled() != Some(to))
    }

    /// Rules have their say about a flow.
    pub(super) fn decide(&mut self, now: Instant, id: FlowId) {
        let rules = Arc::clone(&self.stack_rules.rules);
        let Some(followed) = self.stack_rules.followed.get(&id) else { return };
        let is_ruled = followed.floor(&rules).is_some();
        self.set_ruled(now, id, is_ruled);
        hold_until_sealed(self, now, id);
        let (Some(flow), Some(followed)) = (self.flows.get(id), self.stack_rules.followed.get(&id)) else { return };
        let Some((to, cause)) = self.aim(flow, followed, &rules) else { return };
        let acted = if let ChangeCause::Rule(number) = cause { Some(number) } else { None };
        let is_so = flow.stacks.settled() == Some(to);
        // What is only being set up is looked at again.
        let is_open = flow.lifecycle == Lifecycle::Established && flow.is_proved();
        // What waits for its seal is tried with every look, unless it has been refused for longer.
        let is_rested = now >= followed.next_at || flow.has(Marks::GUARDED);
        let may_try = is_rested && followed.blocked.is_none_or(|(_, until)| now >= until);
        if is_so {
            self.stack_rules.follow_with(id, |followed| {
                followed.acted = acted;
                followed.blocked = None;
            });
            return;
        }
        if !may_try || !is_open || self.stack_changes.under_way(id).is_some() {
            return;
        }
        // What is refused is noted already.
        if self.begin_change(now, id, to, cause).is_ok() {
            self.stack_rules.follow_with(id, |followed| {
                followed.next_at = now + CHANGE_EVERY;
                followed.acted = followed.acted.or(acted);
            });
        }
    }

    /// A flow is established: rules may be about it. Those that demand have their say before it sends anything.
    pub(crate) fn begin_rules(&mut self, now: Instant, id: FlowId) {
        guard_as_rules_do(self, now, id);
        act_as_rules_do(self, now, id);
    }

    /// Evaluates the rules that demand, for a flow that is about to go by a pair; whether one is in force then.
    pub(super) fn demand_at(&mut self, now: Instant, id: FlowId, pair: Pair) -> bool {
        let rules = Arc::clone(&self.stack_rules.rules);
        let Some(mut followed) = self.stack_rules.followed.remove(&id) else { return false };
        let mut counts = core::mem::take(&mut self.stack_rules.counts);
        if let Some(flow) = self.flows.get(id) {
            let seen = Seen::at(self, flow, pair, followed.carried);
            for (at, state) in &mut followed.states {
                let place = usize::from(*at);
                let (Some(rule), Some(counts)) = (rules.get(place), counts.get_mut(place)) else { continue };
                if rule.is_floor {
                    counts.evaluations += 1;
                    counts.failures += u64::from(state.note(now, rule.when.holds(&seen)));
                    state.advance(now, rule.hold(), rule.release);
                }
            }
        }
        let is_ruled = followed.floor(&rules).is_some();
        self.stack_rules.counts = counts;
        self.stack_rules.followed.insert(id, followed);
        if is_ruled {
            self.set_ruled(now, id, true);
        }
        // A demand that is over ends when the flow is there, and not while it still goes by the pair before.
        self.flows.get(id).is_some_and(|flow| flow.has(Marks::RULED))
    }

    /// Whether a rule that demands would hold for a flow at a pair; nothing is changed.
    pub(super) fn would_demand(&self, flow: &Flow, pair: Pair) -> bool {
        let seen = Seen::at(self, flow, pair, None);
        let mut floors = self.stack_rules.rules.iter().filter(|rule| rule.is_floor && rule.is_of(&flow.service));
        floors.any(|rule| rule.when.holds(&seen) == Ok(true))
    }

    /// Whether a rule demands that a flow which is being set up is sealed. Where the condition is about what nobody
    /// knows yet, such as who will answer, it may, and the flow begins sealed.
    pub(crate) fn rules_demand(
        &self,
        service: ServiceId,
        protocol: u8,
        role: Role,
        local: Option<IpAddr>,
        remote: Option<SocketAddr>,
    ) -> bool {
        let mut floors = self.stack_rules.rules.iter().filter(|rule| rule.is_floor && rule.is_of(&service)).peekable();
        if floors.peek().is_none() {
            return false;
        }
        let own = &self.config.local_addresses;
        let candidates: Vec<Option<IpAddr>> = match local {
            Some(local) => alloc::vec![Some(local)],
            None if own.is_empty() => alloc::vec![None],
            None => own.iter().copied().map(Some).collect(),
        };
        floors.any(|rule| {
            candidates.iter().any(|local| {
                let seen = Seen {
                    sal: self,
                    service,
                    protocol,
                    role,
                    source: None,
                    flow: None,
                    local: *local,
                    remote,
                    carried: None,
                };
                matches!(rule.when.holds(&seen), Ok(true) | Err(Failure::Unknown(_)))
            })
        })
    }

    /// Takes note of whether a rule demands that a flow is sealed.
    pub(super) fn set_ruled(&mut self, now: Instant, id: FlowId, is_ruled: bool) {
        let Some(flow) = self.flows.get_mut(id).filter(|flow| flow.has(Marks::RULED) != is_ruled) else { return };
        flow.marks ^= Marks::RULED;
        if is_ruled {
            self.stack_rules.guarded.demand(id, self.rng.u64() | 1);
            self.keep_as_demanded(id);
        } else {
            self.stack_rules.guarded.end_demand(id);
            self.end_demand(now, id);
        }
    }

    /// Why a peer's rule does not have its way with a flow here.
    pub(crate) fn outranks(&self, id: FlowId, to: Stack, said: &ChangeRepr) -> Result<(), ChangeRefused> {
        let Some(flow) = self.flows.get(id) else { return Ok(()) };
        // A demand has its way with a flow that is not sealed; whether one that is has repairs, too, is no demand.
        let is_sealing = said.demands && to.is_sealed() && !flow.is_sealed();
        if !said.by_rule || is_sealing {
            return Ok(());
        }
        if to.makes_good() && self.stack_changes.has_failed_of_late(self.now, id) {
            return Err(ChangeRefused::Failed);
        }
        let is_demanded = said.demands || flow.is_demanded();
        let ordered = self.order_of(id).map(|order| order.stack);
        let followed = self.stack_rules.followed.get(&id);
        let ruled = followed.and_then(|followed| followed.wish(&self.stack_rules.rules)).map(|rule| rule.uses);
        match ordered.or(ruled) {
            Some(stack) if stack.sealed_if(is_demanded) != to => Err(ChangeRefused::Outranked(End::This)),
            _ => Ok(()),
        }
    }
}

/// A flow is established, and nothing of it has left: where a rule demands that it is encrypted, it waits. Nothing is
/// said to the peer, which may not know of the flow yet.
pub(crate) fn guard_as_rules_do(sal: &mut Sal, now: Instant, id: FlowId) {
    let Some(flow) = sal.flows.get(id) else { return };
    let is_self = sal.associations.get(flow.association).is_none_or(Association::is_self);
    if flow.app.protocol == GREETING || is_self || !flow.carries_data() || sal.stack_rules.followed.contains_key(&id) {
        return;
    }
    let rules = Arc::clone(&sal.stack_rules.rules);
    let mine = || rules.iter().enumerate().filter(|(_, rule)| rule.is_of(&flow.service));
    let paces = || mine().flat_map(|(_, rule)| rule.when.facts());
    // Not plain, and no order wants it so: it was a rule's doing, of this start of the agent or the one before.
    let is_changed = flow.stacks.sends != Stack::Plain && sal.order_of(id).is_none();
    let sends = flow.stacks.sends;
    // Two rules may have had their say about a flow that is sealed, and of which what is lost is made good.
    let is_both = sends.is_sealed() && sends.makes_good();
    let is_part = |uses: Stack| uses == sends || is_both && (uses == Stack::Secure || uses.sealed() == sends);
    let is_in_force = |rule: &StackRule| is_changed && is_part(rule.uses);
    let is_last = |rule: &StackRule| is_in_force(rule) && rule.uses.makes_good() == sends.makes_good();
    let acted = mine().find(|(_, rule)| is_last(rule)).map(|(_, rule)| rule.number);
    let is_carried_over = sal.stack_rules.carried_over.contains(&id);
    let state_of = |rule: &StackRule| match is_carried_over && rule.is_floor {
        true => RuleState::carried_over(now),
        false => RuleState::new(now, is_in_force(rule)),
    };
    let states: Vec<(u16, RuleState)> =
        mine().map(|(at, rule)| (u16::try_from(at).unwrap_or(u16::MAX), state_of(rule))).collect();
    if states.is_empty() {
        return;
    }
    let has_floor = mine().any(|(_, rule)| rule.is_floor);
    let asks_for_program = paces().any(|fact| matches!(fact, Fact::Executable | Fact::Unit | Fact::User));
    let followed = Followed {
        states,
        is_timed: false,
        is_calm: false,
        is_measured: paces().any(|fact| matches!(fact, Fact::Bytes | Fact::BytesPerS)),
        asks_for_loss: paces().any(|fact| matches!(fact, Fact::Loss | Fact::JitterMs | Fact::Reordering)),
        epoch: 0,
        regions: Vec::new(),
        acted,
        next_at: now,
        blocked: None,
        carried: None,
    };
    sal.stack_rules.followed.insert(id, followed);
    sal.stack_rules.carried_over.remove(&id);
    if asks_for_program {
        sal.stack_rules.programs.ask(id);
    }
    if has_floor {
        sal.guard_new(now, id);
    }
}

/// The peer has the flow: starts what the rules request for it, and reports what they demand to the peer.
pub(crate) fn act_as_rules_do(sal: &mut Sal, now: Instant, id: FlowId) {
    if !sal.stack_rules.followed.contains_key(&id) {
        return;
    }
    sal.watch_loss(now, id);
    if sal.stack_rules.guarded.contains(id) {
        tell_of_demand(sal, id);
        sal.decide(now, id);
    }
}

impl StackRules {
    fn follow_with(&mut self, id: FlowId, change: impl FnOnce(&mut Followed)) {
        if let Some(followed) = self.followed.get_mut(&id) {
            change(followed);
            followed.is_calm = false;
        }
    }

    fn note_refused(
        &mut self,
        flows: &FlowTable,
        now: Instant,
        id: FlowId,
        change: &StackChange,
        refused: ChangeRefused,
    ) {
        let is_guarded = flows.get(id).is_some_and(|flow| flow.has(Marks::GUARDED));
        let rest = match refused.passes() {
            true if is_guarded => Duration::ZERO,
            true => CHANGE_EVERY,
            false => BLOCKED,
        };
        let is_left = matches!(refused, ChangeRefused::Outranked(_) | ChangeRefused::Demanded(_));
        self.follow_with(id, |followed| {
            followed.blocked = Some((refused, now + rest));
            if is_left && matches!(change.cause, ChangeCause::RuleEnded(_)) {
                // Somebody else wants the flow as it is.
                followed.acted = None;
            }
        });
    }

    /// A change of a flow is over, whoever wanted it.
    pub(crate) fn note_change_for_rules(&mut self, flows: &FlowTable, now: Instant, id: FlowId, change: &StackChange) {
        match (change.cause, change.outcome) {
            (cause, ChangeOutcome::Done) => {
                let rules = Arc::clone(&self.rules);
                self.follow_with(id, |followed| {
                    followed.next_at = now + CHANGE_EVERY;
                    match cause {
                        ChangeCause::Rule(number) => followed.acted = Some(number),
                        // What is left of its stack is a demand's doing.
                        ChangeCause::RuleEnded(_) => followed.acted = followed.floor(&rules).map(|rule| rule.number),
                        _ => {}
                    }
                });
            }
            (ChangeCause::Rule(_) | ChangeCause::RuleEnded(_), ChangeOutcome::Refused(refused)) => {
                self.note_refused(flows, now, id, change, refused);
            }
            (ChangeCause::Rule(_) | ChangeCause::RuleEnded(_), ChangeOutcome::NoAnswer) => {
                // A seal does not wait, and one that nothing is sent without waits least.
                let flow = flows.get(id);
                let rest = match flow {
                    Some(flow) if flow.has(Marks::GUARDED) => Duration::ZERO,
                    _ if change.to.is_sealed() && !change.from.is_sealed() => CHANGE_EVERY,
                    _ => BLOCKED,
                };
                self.follow_with(id, |followed| followed.blocked = Some((ChangeRefused::NoAnswer, now + rest)));
            }
            _ => self.stir(id),
        }
    }

    /// What repairs a flow has failed: no rule tries it again for a while.
    pub(crate) fn note_failed(&mut self, id: FlowId, until: Instant) {
        self.follow_with(id, |followed| followed.blocked = Some((ChangeRefused::Failed, until)));
    }

    /// The facts about a flow's path are others.
    pub(super) fn note_moved(&mut self, id: FlowId) {
        self.follow_with(id, |followed| followed.epoch = 0);
    }

    /// What rules want of a flow whose order is released.
    pub(crate) fn stack_by_rules(&self, id: FlowId) -> Option<Stack> {
        let followed = self.followed.get(&id)?;
        let rules = &self.rules;
        followed.wish(rules).or_else(|| followed.floor(rules)).map(|rule| rule.uses)
    }
}
