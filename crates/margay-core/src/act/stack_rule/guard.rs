//! What a rule that demands keeps from leaving by new addresses (docs/decisions/0076).
//!
//! Before packets go by another pair, the rules are looked at with that pair. A flow of which one demands that it is
//! sealed there is *guarded*: what its program sends waits in the core until the flow is sealed. The peer is told by
//! RSYN-ACK or RSYN-DONE, before it sends anything there, and guards every plain flow with this host; it asks until it
//! is *freed*, and by then it knows by the requests for changes which flows are to be sealed.

use alloc::vec::Vec;
use core::time::Duration;

use margay_wire::{Extension, Flags, FlowId, Kind, MoveFlags, MoveRepr};

use super::{Guarded, Late, Sealing};
use crate::act::stack_rule::StackRules;
use crate::association::AssociationTable;
use crate::association::draft::Draft;
use crate::association::location::{Cause, Moving, Pair, Scope};
use crate::cache::output::AppVerdict;
use crate::leg::stack::Stack;
use crate::machine::sal::Sal;
use crate::session::event::Event;
use crate::session::flow::FlowTable;
use crate::session::flow::{Flow, Marks};
use crate::types::drop_reason::DropReason;
use crate::types::key::HostId;
use crate::types::time::Instant;
use crate::types::tuple::GREETING;

/// Packets of a program that wait until their flow is sealed; TCP sends others again.
const HELD_MAX: usize = 64;
/// After so long a flow that is not sealed has a trouble.
const LATE: Duration = Duration::from_secs(5);
/// From then on the two ends tell each other so often what they demand of it.
const TELL_EVERY: Duration = Duration::from_secs(1);
/// How often a peer is asked to free what need not be sealed, and how many times.
const ASK_EVERY: Duration = Duration::from_millis(100);
const ASKS_MAX: u32 = 60;

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
        let is_told = self.stack_rules.sealing.contains_key(&scope);
        if self.stack_rules.rules.is_empty() && !is_told {
            return;
        }
        let moved: Vec<(FlowId, bool)> =
            self.flows.flows_at(&self.associations, scope).map(|flow| (flow.id, flow.is_settled_sealed())).collect();
        for (id, is_sealed) in moved {
            // What is sealed leaves as it is; its rules are looked at when it is there.
            self.stack_rules.note_moved(id);
            if !is_sealed && (self.demand_at(now, id, pair) || is_told) {
                self.guard(now, id);
            }
        }
    }

    /// Packets of a scope go by another pair now: what waits there is sealed.
    pub(crate) fn seal_moved(&mut self, now: Instant, scope: Scope) {
        let guarded: Vec<FlowId> = self.stack_rules.guarded.keys().copied().collect();
        for id in guarded {
            let association = self.flows.get(id).and_then(|flow| self.associations.get(flow.association));
            if association.is_some_and(|association| association.host == scope.host) {
                self.decide(now, id);
            }
        }
    }

    /// A flow is established. Where a rule demands that it is sealed, and it is not, nothing of it goes before that.
    pub(super) fn guard_new(&mut self, now: Instant, id: FlowId) {
        let Some(flow) = self.flows.get(id) else { return };
        let Some(host) = self.associations.get(flow.association).map(|association| association.host) else { return };
        let Some(pair) = self.pair_in_use(Scope { host, flow: id }) else { return };
        if self.demand_at(now, id, pair) && self.flows.get(id).is_some_and(|flow| !flow.is_sealed()) {
            self.guard(now, id);
            self.decide(now, id);
        }
    }

    fn guard(&mut self, now: Instant, id: FlowId) {
        let is_plain = |flow: &&mut Flow| !flow.has(Marks::GUARDED) && !flow.is_settled_sealed();
        let Some(flow) = self.flows.get_mut(id).filter(is_plain) else { return };
        flow.marks |= Marks::GUARDED;
        self.stack_rules.guarded.insert(id, Guarded { since: now, held: Vec::new(), late: None });
        self.queue.guard(id);
        self.flows.install_again(&mut self.queue, id);
        self.events.push(Event::FlowChanged(id));
    }

    /// What has waited goes on.
    fn unguard(&mut self, now: Instant, id: FlowId) {
        let Some(guarded) = self.stack_rules.guarded.remove(&id) else { return };
        self.queue.unguard(id);
        let Some(flow) = self.flows.get_mut(id) else { return };
        flow.marks &= !Marks::GUARDED;
        self.flows.install_again(&mut self.queue, id);
        guarded.held.into_iter().for_each(|packet| self.queue.egress(packet));
        self.flows.open_pinhole(&mut self.ports, &mut self.queue, now, id);
        self.events.push(Event::FlowChanged(id));
    }

    /// A packet of a program whose flow is not sealed yet.
    pub(crate) fn hold_unsealed(&mut self, id: FlowId, packet: &[u8]) -> AppVerdict {
        match self.stack_rules.guarded.get_mut(&id) {
            Some(guarded) if guarded.held.len() < HELD_MAX => {
                guarded.held.push(packet.to_vec());
                AppVerdict::Consumed
            }
            _ => {
                self.counters.held_full += 1;
                AppVerdict::Drop(DropReason::Full)
            }
        }
    }

    /// Both ends seal a flow now, or it is plain at both again.
    pub(crate) fn end_guard_of_sealed(&mut self, now: Instant, id: FlowId, stack: Stack) {
        if stack.is_sealed() {
            self.unguard(now, id);
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

    /// Nobody demands of a guarded flow that it is sealed, as far as is known; while its peer's rules have it wait for
    /// all flows to be sealed, it waits.
    pub(crate) fn end_guard_of_freed(&mut self, now: Instant, id: FlowId) {
        let Some(flow) = self.flows.get(id).filter(|flow| flow.has(Marks::GUARDED)) else { return };
        let host = self.associations.get(flow.association).map(|association| association.host);
        let is_sealing = host.is_some_and(|host| self.stack_rules.sealing.keys().any(|scope| scope.host == host));
        if !is_sealing && !flow.has(Marks::RULED) && !flow.has(Marks::PEER_DEMANDS) {
            self.unguard(now, id);
        }
    }

    /// What a peer says of flows that wait to be sealed; `scope` names one flow where that waits alone.
    pub(crate) fn hear_of_sealing(&mut self, now: Instant, scope: Scope, pair: Pair, said: MoveFlags) {
        let host = scope.host;
        if said.contains(MoveFlags::FREED) {
            self.stack_rules.sealing.retain(|scope, _| scope.host != host);
            self.free(now, host);
            return;
        }
        let is_there = self.associations.pair_of(host).is_some_and(|known| known.remote == pair.remote);
        let is_its = |scope: &Scope| scope.host == host;
        let is_moving = |scope: Scope| self.locations.get(scope).is_some_and(|at| at.state != Moving::Settled);
        // Whoever is not there yet itself has guarded nothing so far.
        let is_moving = self.locations.scopes().filter(is_its).any(is_moving);
        if is_moving || self.is_found_elsewhere(now, scope, pair) {
            return;
        }
        let waits = |(id, guarded): (&FlowId, &Guarded)| {
            let of_host = |flow: &Flow| {
                flow.has(Marks::RULED) && self.associations.get(flow.association).is_some_and(|one| one.host == host)
            };
            let is_open = guarded.late.is_none_or(|late| !late.is_told);
            is_open && self.flows.get(*id).is_some_and(of_host)
        };
        if (is_there || !scope.is_host()) && !self.stack_rules.guarded.iter().any(waits) {
            self.say_of_sealing(Scope::of(host), MoveFlags::FREED);
        }
    }

    /// Whether a peer sends a single flow by another pair than this host, whose agent has started again before it heard
    /// the end of the flow's move: the peer is told where the flow is, as by any move.
    fn is_found_elsewhere(&mut self, now: Instant, scope: Scope, pair: Pair) -> bool {
        let Some(flow) = self.flows.get(scope.flow) else { return false };
        let is_its = self.associations.get(flow.association).is_some_and(|one| one.host == scope.host);
        let Some(known) = self.pair_in_use(scope).filter(|_| is_its) else { return false };
        let is_here = known.local.is_none() || pair.local.is_none() || known.local == pair.local;
        if is_here && known.remote == pair.remote {
            return false;
        }
        self.leave(now, scope, Cause::Restart, false, alloc::vec![known]);
        true
    }

    /// Flows with a peer that need not be sealed go on.
    fn free(&mut self, now: Instant, host: HostId) {
        let guarded: Vec<FlowId> = self.stack_rules.guarded.keys().copied().collect();
        for id in guarded {
            let association = self.flows.get(id).and_then(|flow| self.associations.get(flow.association));
            if association.is_some_and(|association| association.host == host) {
                self.end_guard_of_freed(now, id);
            }
        }
    }

    /// Of a single flow by the pair that this has.
    fn say_of_sealing(&mut self, scope: Scope, flags: MoveFlags) {
        let Some(pair) = self.pair_in_use(scope) else { return };
        let peer_flow = self.flows.get(scope.flow).map_or(FlowId(0), |flow| flow.peer_flow);
        let extensions = [Extension::Move(MoveRepr { number: 0, token: 0, address: pair.remote, flags })];
        let mut draft = Draft::new(Kind::Probe, peer_flow, scope.flow);
        draft.extensions = &extensions;
        self.send_over(scope.host, pair, draft);
    }

    /// Asks peers to free what waits, and takes note of what waits for too long.
    pub(crate) fn guards_due(&mut self, now: Instant) {
        let due: Vec<Scope> =
            self.stack_rules.sealing.iter().filter(|(_, one)| one.next <= now).map(|(scope, _)| *scope).collect();
        for scope in due {
            let Some(sealing) = self.stack_rules.sealing.get_mut(&scope) else { continue };
            sealing.tries += 1;
            sealing.next = now + ASK_EVERY;
            if sealing.tries > ASKS_MAX {
                self.stack_rules.sealing.remove(&scope);
                self.free(now, scope.host);
            } else {
                self.say_of_sealing(scope, MoveFlags::SEALED);
            }
        }
        let due = self.stack_rules.guarded.iter().filter(|(_, guarded)| guarded.due() <= now);
        for id in due.map(|(id, _)| *id).collect::<Vec<_>>() {
            let Some(guarded) = self.stack_rules.guarded.get_mut(&id) else { continue };
            let is_told = guarded.late.is_some_and(|late| late.is_told);
            if guarded.late.replace(Late { is_told, next: now + TELL_EVERY }).is_none() {
                self.events.push(Event::FlowChanged(id));
            }
            // The answer says what the peer demands, and that it knows what this end does.
            self.tell(id, Flags::empty());
        }
    }
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
    pub(crate) fn note_sealing(&mut self, now: Instant, scope: Scope) {
        self.sealing.insert(scope, Sealing { next: now + ASK_EVERY, tries: 0 });
    }

    /// Whether a flow waits for longer than sealing takes.
    pub(crate) fn is_late_to_seal(&self, id: FlowId) -> bool {
        self.guarded.get(&id).is_some_and(|guarded| guarded.late.is_some())
    }

    /// The peer has answered what it was told of a flow.
    pub(crate) fn note_told_of_demand(&mut self, id: FlowId) {
        if let Some(late) = self.guarded.get_mut(&id).and_then(|guarded| guarded.late.as_mut()) {
            late.is_told = true;
        }
    }

    /// When something of this is due.
    pub(crate) fn guards_deadline(&self) -> Option<Instant> {
        let sealing = self.sealing.values().map(|sealing| sealing.next);
        sealing.chain(self.guarded.values().map(Guarded::due)).min()
    }
}

impl Guarded {
    fn due(&self) -> Instant {
        self.late.map_or(self.since + LATE, |late| late.next)
    }
}
