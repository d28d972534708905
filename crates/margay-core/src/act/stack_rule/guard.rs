//! What a rule that demands keeps from leaving plain (docs/decisions/0076, 0120).
//!
//! A flow that a rule demands encrypted, and that is not, is *guarded*: what its program sends waits in the core until
//! the flow is encrypted, or nobody demands it any more. It is guarded when the rule comes into force while the flow
//! runs, by whatever fact; and before packets go by another pair of addresses, for which the rules are looked at with
//! that pair.
//!
//! The peer guards its end as well. At a move it hears of the rule by RSYN-ACK or RSYN-DONE, before it sends anything
//! there, and guards every plain flow with this host; of a single flow it hears by a PROBE, and by the request for the
//! change. It asks until it is *freed*, or the flow is encrypted. No time, no lost message and no new start of an agent
//! frees it: whoever drops messages can only hold the flow up.

use alloc::vec::Vec;

use margay_wire::{ChangeRepr, ChangeStep, Extension, Flags, FlowId, Kind, MoveFlags, MoveRepr};

use super::guarded::Lateness;
use crate::act::stack_rule::StackRules;
use crate::association::AssociationTable;
use crate::association::draft::Draft;
use crate::association::location::{Cause, Pair, Scope};
use crate::cache::output::AppVerdict;
use crate::leg::stack::Stack;
use crate::machine::sal::Sal;
use crate::session::event::Event;
use crate::session::flow::FlowTable;
use crate::session::flow::{Flow, Marks};
use crate::types::drop_reason::DropReason;
use crate::types::key::HostId;
use crate::types::rng::Rng;
use crate::types::time::Instant;
use crate::types::tuple::GREETING;

/// What is done at once of what is due; other work comes before the rest of it.
const DUE_MAX: usize = 256;

impl Sal {
    /// Whether rules of this host demand that a flow of this scope is sealed before anything of it goes by `pair`.
    pub(crate) fn seals_at(&self, scope: Scope, pair: Pair) -> bool {
        if !self.stack_rules.rules.iter().any(|rule| rule.is_floor) {
            return false;
        }
        self.flows
            .flows_at(&self.associations, scope)
            .any(|flow| !flow.is_settled_sealed() && self.would_demand(flow, pair))
    }

    /// Packets of a scope are about to go by `pair`: what is to be sealed there waits.
    pub(crate) fn guard_moved(&mut self, now: Instant, scope: Scope, pair: Pair) {
        let is_told = self.stack_rules.peer_demands.has(scope);
        if self.stack_rules.rules.is_empty() && !is_told {
            return;
        }
        let moved: Vec<FlowId> = self.flows.flows_at(&self.associations, scope).map(|flow| flow.id).collect();
        for id in moved {
            self.stack_rules.note_moved(id);
            // One that is encrypted may be about to become plain, which a demand ends; it goes on as it is.
            if self.demand_at(now, id, pair) || is_told {
                guard(self, now, id, true);
            }
        }
    }

    /// Packets of a scope go by another pair now: what waits there is sealed.
    pub(crate) fn seal_moved(&mut self, now: Instant, scope: Scope) {
        for id in guarded_with(self, scope.host) {
            self.decide(now, id);
        }
    }

    /// A flow is established. Where a rule demands that it is sealed, and it is not, nothing of it goes before that.
    pub(super) fn guard_new(&mut self, now: Instant, id: FlowId) {
        let Some(flow) = self.flows.get(id) else { return };
        let Some(host) = self.associations.get(flow.association).map(|association| association.host) else { return };
        let Some(pair) = self.pair_in_use(Scope { host, flow: id }) else { return };
        if self.demand_at(now, id, pair) && self.flows.get(id).is_some_and(|flow| !flow.is_sealed()) {
            guard(self, now, id, true);
        }
    }

    /// A packet of a program whose flow is not sealed yet.
    pub(crate) fn hold_unsealed(&mut self, id: FlowId, packet: &[u8]) -> AppVerdict {
        let host = self.flows.get(id).and_then(|flow| host_of(&self.associations, flow));
        if host.is_some_and(|host| self.stack_rules.held.push(id, host, packet)) {
            return AppVerdict::Consumed;
        }
        self.counters.held_full += 1;
        AppVerdict::Drop(DropReason::Full)
    }

    /// Both ends seal a flow now, or it is plain at both again.
    pub(crate) fn end_guard_of_sealed(&mut self, now: Instant, id: FlowId, stack: Stack) {
        if stack.is_sealed() {
            self.stack_rules.peer_demands.forget_flow(id);
            unguard(self, now, id);
        }
    }

    /// No rule of this host demands any more that a flow is sealed.
    pub(super) fn end_demand(&mut self, now: Instant, id: FlowId) {
        if self.flows.get(id).is_some_and(|flow| flow.has(Marks::GUARDED)) {
            // The peer may wait for the flow to be sealed, too.
            self.tell(id, Flags::empty());
            self.end_guard_of_freed(now, id);
        }
    }

    /// Nobody demands of a guarded flow that it is sealed, as far as is known; while its peer's rules have it wait,
    /// alone or with all other flows, it waits.
    pub(crate) fn end_guard_of_freed(&mut self, now: Instant, id: FlowId) {
        let Some(flow) = self.flows.get(id).filter(|flow| flow.has(Marks::GUARDED)) else { return };
        let host = host_of(&self.associations, flow);
        let is_covered = host.is_some_and(|host| self.stack_rules.peer_demands.covers(host, id));
        if !is_covered && !flow.has(Marks::RULED) && !flow.has(Marks::PEER_DEMANDS) {
            unguard(self, now, id);
        }
    }

    /// What a peer says of flows that wait to be sealed; `scope` names one flow where that is about this one alone.
    pub(crate) fn hear_of_sealing(&mut self, now: Instant, scope: Scope, pair: Pair, said: MoveRepr) {
        let host = scope.host;
        if said.flags.contains(MoveFlags::FREED) {
            if self.stack_rules.peer_demands.is_answered(host, said.token) {
                guarded_with(self, host).into_iter().for_each(|id| self.end_guard_of_freed(now, id));
            }
            return;
        }
        if said.flags.contains(MoveFlags::DEMANDED) {
            hold_for_peer(self, now, scope);
            if said.token != 0 && self.stack_rules.peer_demands.has(scope) {
                say_of_sealing(self, scope, MoveFlags::WAITS, said.token);
            }
            return;
        }
        if said.flags.contains(MoveFlags::WAITS) {
            self.stack_rules.note_told_of_demand(scope.flow, said.token);
            return;
        }
        let is_there = self.associations.pair_of(host).is_some_and(|known| known.remote == pair.remote);
        // Whoever is not there yet itself has guarded nothing so far.
        if self.locations.is_any_moving(host) || self.is_found_elsewhere(now, scope, pair) {
            return;
        }
        if !scope.is_host() {
            // It waits for this flow alone, which the peer has not encrypted yet, whatever this end has done.
            match self.flows.get(scope.flow).filter(|flow| flow.has(Marks::RULED)) {
                None => say_of_sealing(self, Scope::of(host), MoveFlags::FREED, said.token),
                Some(flow) if flow.is_settled_sealed() => self.tell(scope.flow, Flags::empty()),
                // It is asked for the change, again and again.
                Some(_) => {}
            }
            return;
        }
        if is_there && !self.stack_rules.guarded.is_any_unanswered(host) {
            say_of_sealing(self, Scope::of(host), MoveFlags::FREED, said.token);
        }
    }

    /// Whether a peer sends a single flow by another pair than this host, whose agent has started again before it heard
    /// the end of the flow's move: the peer is told where the flow is, as by any move.
    fn is_found_elsewhere(&mut self, now: Instant, scope: Scope, pair: Pair) -> bool {
        let Some(flow) = self.flows.get(scope.flow) else { return false };
        let is_its = host_of(&self.associations, flow) == Some(scope.host);
        let Some(known) = self.pair_in_use(scope).filter(|_| is_its) else { return false };
        let is_here = known.local.is_none() || pair.local.is_none() || known.local == pair.local;
        if is_here && known.remote == pair.remote {
            return false;
        }
        self.leave(now, scope, Cause::Restart, false, alloc::vec![known]);
        true
    }

    /// Asks peers to free what waits, tells them what is demanded, and takes note of what waits for too long.
    pub(crate) fn guards_due(&mut self, now: Instant) {
        for (scope, token) in self.stack_rules.peer_demands.take_due(now, DUE_MAX) {
            if self.locations.is_any_moving(scope.host) {
                // What the peer has said holds for where the packets are going to be.
                continue;
            }
            if scope.is_host() && self.stack_rules.guarded.with(scope.host).next().is_none() {
                self.stack_rules.peer_demands.forget_host(scope.host);
            } else {
                say_of_sealing(self, scope, MoveFlags::SEALED, token);
            }
        }
        for _ in 0..DUE_MAX {
            let Some((id, lateness)) = self.stack_rules.guarded.pop_due(now) else { break };
            if lateness == Lateness::LateNow {
                self.events.push(Event::FlowChanged(id));
            }
            tell_of_demand(self, id);
            if lateness != Lateness::InTime {
                // The answer says what the peer demands.
                self.tell(id, Flags::empty());
            }
        }
    }
}

fn host_of(associations: &AssociationTable, flow: &Flow) -> Option<HostId> {
    associations.get(flow.association).map(|association| association.host)
}

/// Flows with a host that wait.
fn guarded_with(sal: &Sal, host: HostId) -> Vec<FlowId> {
    sal.stack_rules.guarded.with(host).collect()
}

/// From here on nothing plain of a flow is sent. `is_moved`: nothing has been by its present path.
fn guard(sal: &mut Sal, now: Instant, id: FlowId, is_moved: bool) {
    if let Some(guarded) = sal.stack_rules.guarded.get_mut(id) {
        guarded.is_moved |= is_moved;
        return;
    }
    let is_plain = |flow: &&mut Flow| flow.carries_data() && !flow.is_settled_sealed();
    let Some(flow) = sal.flows.get_mut(id).filter(is_plain) else { return };
    let Some(host) = host_of(&sal.associations, flow) else { return };
    flow.marks |= Marks::GUARDED;
    let is_ruled = flow.has(Marks::RULED);
    sal.stack_rules.guarded.insert(now, (host, id), is_moved);
    if is_ruled {
        sal.stack_rules.guarded.demand(id, sal.rng.u64() | 1);
    }
    sal.queue.guard(id);
    sal.flows.install_again(&mut sal.queue, id);
    sal.events.push(Event::FlowChanged(id));
}

/// What a program has sent while its flow had nowhere to go yet: it goes, or waits with all else of a guarded flow.
pub(crate) fn send_or_hold(sal: &mut Sal, id: FlowId, packet: Vec<u8>) {
    if sal.stack_rules.guarded.contains(id) {
        // What finds no room is counted, and lost as on a path that is full.
        let _ = sal.hold_unsealed(id, &packet);
    } else {
        sal.queue.egress(packet);
    }
}

/// A rule of this host demands that a flow is encrypted: what is sent plain until now waits, here and at the peer.
pub(super) fn hold_until_sealed(sal: &mut Sal, now: Instant, id: FlowId) {
    let is_exposed =
        |flow: &Flow| flow.has(Marks::RULED) && !flow.has(Marks::GUARDED) && !flow.stacks.sends.is_sealed();
    if sal.flows.get(id).is_some_and(is_exposed) {
        guard(sal, now, id, false);
        tell_of_demand(sal, id);
    }
}

/// A peer's rule demands that a flow is encrypted: nothing plain of it is sent, unless the peer frees it.
pub(crate) fn hold_for_peer(sal: &mut Sal, now: Instant, scope: Scope) {
    let is_exposed = |flow: &Flow| flow.carries_data() && !flow.stacks.sends.is_sealed();
    if sal.stack_rules.peer_demands.has(scope) || !sal.flows.get(scope.flow).is_some_and(is_exposed) {
        return;
    }
    sal.stack_rules.peer_demands.note(&mut sal.rng, now, scope);
    guard(sal, now, scope.flow, false);
}

/// Whether a step of a change says that a rule of the peer demands an encrypted flow.
pub(crate) fn is_demanded_by(said: &ChangeRepr) -> bool {
    let is_wish = matches!(said.step, ChangeStep::Propose | ChangeStep::Request);
    is_wish && said.by_rule && said.demands && Stack::of_number(said.stack).is_some_and(Stack::is_sealed)
}

/// The start of the agent before guarded a flow, for its own rules or the peer's: so does this one, until the flow is
/// encrypted, or its rules say otherwise and the peer frees it.
pub(crate) fn guard_as_before(sal: &mut Sal, now: Instant, id: FlowId) {
    let host = sal.flows.get(id).and_then(|flow| host_of(&sal.associations, flow));
    if let Some(host) = host {
        sal.stack_rules.peer_demands.note(&mut sal.rng, now, Scope { host, flow: id });
        guard(sal, now, id, true);
    }
}

/// Tells the peer of a single flow that this host's rules demand it encrypted: by a PROBE, beside what the messages of
/// a change say.
pub(crate) fn tell_of_demand(sal: &mut Sal, id: FlowId) {
    let Some(flow) = sal.flows.get(id).filter(|flow| flow.has(Marks::RULED)) else { return };
    if let Some(host) = host_of(&sal.associations, flow) {
        let token = sal.stack_rules.guarded.get(id).map_or(0, |guarded| guarded.token);
        say_of_sealing(sal, Scope { host, flow: id }, MoveFlags::DEMANDED, token);
    }
}

/// Of a single flow by the pair that this has.
fn say_of_sealing(sal: &mut Sal, scope: Scope, flags: MoveFlags, token: u64) {
    let Some(pair) = sal.pair_in_use(scope) else { return };
    let peer_flow = sal.flows.get(scope.flow).map_or(FlowId(0), |flow| flow.peer_flow);
    let extensions = [Extension::Move(MoveRepr { number: 0, token, challenge: 0, address: pair.remote, flags })];
    let mut draft = Draft::new(Kind::Probe, peer_flow, scope.flow);
    draft.extensions = &extensions;
    sal.send_over(scope.host, pair, draft);
}

/// A flow's entry is about to say that it is sent encrypted, by the path that its plain packets have gone: what has
/// waited may follow the last of those. Gives it; nothing where the flow waits for another reason.
pub(crate) fn end_guard_in_place(sal: &mut Sal, id: FlowId, stack: Stack) -> Vec<Vec<u8>> {
    let is_in_place = sal.stack_rules.guarded.get(id).is_some_and(|guarded| !guarded.is_moved);
    if !stack.is_sealed() || !is_in_place {
        return Vec::new();
    }
    sal.stack_rules.peer_demands.forget_flow(id);
    end_guard(sal, id)
}

fn end_guard(sal: &mut Sal, id: FlowId) -> Vec<Vec<u8>> {
    sal.stack_rules.guarded.remove(id);
    sal.queue.unguard(id);
    sal.flows.get_mut(id).into_iter().for_each(|flow| flow.marks &= !Marks::GUARDED);
    sal.stack_rules.held.take(id)
}

/// What has waited goes on.
fn unguard(sal: &mut Sal, now: Instant, id: FlowId) {
    if !sal.stack_rules.guarded.contains(id) {
        return;
    }
    let held = end_guard(sal, id);
    sal.flows.install_again(&mut sal.queue, id);
    held.into_iter().for_each(|packet| sal.queue.egress(packet));
    sal.flows.open_pinhole(&mut sal.ports, &mut sal.queue, now, id);
    sal.events.push(Event::FlowChanged(id));
}

impl FlowTable {
    /// The flows that go by a scope's pair.
    fn flows_at(&self, associations: &AssociationTable, scope: Scope) -> impl Iterator<Item = &Flow> {
        self.iter().filter(move |flow| {
            let association = associations.get(flow.association);
            let is_peers = association.is_some_and(|one| one.host == scope.host && !one.is_self());
            let is_moved = if scope.is_host() { flow.side.is_none() } else { flow.id == scope.flow };
            is_peers && is_moved && flow.app.protocol != GREETING && flow.carries_data()
        })
    }
}

impl StackRules {
    /// The peer's rules demand that flows are sealed at the pair that a scope comes to.
    pub(crate) fn note_peer_demand(&mut self, rng: &mut Rng, now: Instant, scope: Scope) {
        self.peer_demands.note(rng, now, scope);
    }

    /// Whether nothing of a flow has been sent by its present path, and it waits.
    pub(crate) fn is_guarded_by_move(&self, id: FlowId) -> bool {
        self.guarded.get(id).is_some_and(|guarded| guarded.is_moved)
    }

    /// Whether a flow waits for longer than sealing takes.
    pub(crate) fn is_late_to_seal(&self, id: FlowId) -> bool {
        self.guarded.get(id).is_some_and(|guarded| guarded.is_late)
    }

    /// The peer says that a flow waits there: it knows what it was told by the demand of this token.
    fn note_told_of_demand(&mut self, id: FlowId, token: u64) {
        if self.guarded.get(id).is_some_and(|guarded| guarded.is_late && guarded.token == token) {
            self.guarded.end_demand(id);
        }
    }

    /// When something of this is due.
    pub(crate) fn guards_deadline(&self) -> Option<Instant> {
        self.peer_demands.next_deadline().into_iter().chain(self.guarded.next_deadline()).min()
    }
}
