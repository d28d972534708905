//! By which stack flows are sent, and what of each is taken (docs/decisions/0073).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use margay_core::DropReason;
use margay_core::stack_change::{Stack, Taking};
use margay_core::time::Instant;
use margay_wire::{DataRepr, FlowId};

use super::{EgressRoute, PathRecord, Slot, Table};
use crate::clock;
use crate::seal::Seal;
use crate::turning::Turn;

/// It is said no more often that what comes by a path is of another stack than its flow, in microseconds.
const COMPLAIN_US: u64 = 100_000;

/// The last packet of the stack that a flow has had.
#[derive(Debug, PartialEq, Eq)]
pub struct LastPacket {
    /// Where it goes, and what it is sealed with.
    pub route: EgressRoute,
    /// The number of the change.
    pub change: u32,
}

impl Slot {
    /// Whether it is sent sealed now.
    pub(super) fn is_sealing(&self) -> bool {
        self.is_sealing.load(Ordering::Relaxed)
    }

    /// What DATA is opened with, if it is of a stack that this flow may have; and the stack.
    pub(super) fn admit(&self, data: &DataRepr) -> Result<(Stack, Option<Arc<Seal>>), DropReason> {
        let stack = Stack::of_number(data.stack).filter(|stack| self.stacks.takes.has(*stack));
        match stack.ok_or(DropReason::OtherStack)? {
            Stack::Plain => Ok((Stack::Plain, None)),
            Stack::Secure => {
                let seal = self.seal.as_ref().filter(|seal| seal.stack() == data.stack);
                seal.map(|seal| (Stack::Secure, Some(Arc::clone(seal)))).ok_or(DropReason::OtherStack)
            }
        }
    }
}

impl PathRecord {
    /// Whether it is time to say that something of another stack has come by it.
    fn may_complain(&self, now: Instant) -> bool {
        let last = self.complained_us.load(Ordering::Relaxed);
        let is_due = last == 0 || now.micros().saturating_sub(last) >= COMPLAIN_US;
        if is_due {
            self.complained_us.store(now.micros().max(1), Ordering::Relaxed);
        }
        is_due
    }
}

impl Table {
    /// Whether a flow is to be sent by another stack than it is.
    pub fn is_to_turn(&self, flow: FlowId) -> bool {
        self.find(flow).is_some_and(|slot| slot.is_sealing() != (slot.stacks.sends == Stack::Secure))
    }

    /// From here on a flow is sent by the stack that its entry says. `None` if it is already.
    pub fn begin_turn(&self, flow: FlowId) -> Option<LastPacket> {
        let slot = self.find(flow)?;
        let seals = slot.stacks.sends == Stack::Secure;
        if slot.is_sealing.swap(seals, Ordering::Relaxed) == seals {
            return None;
        }
        let seal = if seals { None } else { Some(self.seals.get(&flow).cloned()?) };
        Some(LastPacket { route: EgressRoute { seal, ..self.bare_route(slot)? }, change: slot.stacks.change })
    }

    /// Whether the core is to hear that something of another stack than its flow's has come.
    pub fn may_complain_of_stack(&self, flow: FlowId) -> bool {
        let record = self.find(flow).and_then(|slot| self.paths.get(&slot.path));
        record.is_some_and(|record| record.may_complain(clock::now()))
    }

    /// The turn of a flow's peer, while there is one, or something waits of it.
    pub(super) fn turn_of(&self, slot: &Slot) -> Option<Arc<Turn>> {
        // There seldom is any.
        if self.turns.is_empty() { None } else { self.turns.get(&slot.flow).cloned() }
    }

    /// Keeps what is known of a turn as long as the entries say that there is one, or something waits of it.
    pub(super) fn follow_turn(&mut self, flow: FlowId, takes: Taking, change: u32) {
        let to = match takes {
            Taking::Only(_) => {
                if self.turns.get(&flow).is_some_and(|turn| !turn.end(clock::now())) {
                    self.turns.remove(&flow);
                }
                return;
            }
            Taking::Ready(to) | Taking::Turning(to) => to,
        };
        if self.turns.get(&flow).is_none_or(|turn| turn.change != change) {
            self.turns.insert(flow, Arc::new(Turn::new(flow, change, to)));
        }
        if let Some(turn) = self.turns.get(&flow).filter(|_| matches!(takes, Taking::Turning(_))) {
            turn.say(clock::now());
        }
    }

    /// The turn of a flow of which something waits, and until when at most.
    pub fn waiting_turn(&self, flow: FlowId) -> Option<(Arc<Turn>, Instant)> {
        let turn = self.turns.get(&flow)?;
        Some((Arc::clone(turn), turn.due()?))
    }

    /// Nothing waits any more of a turn that is over.
    pub fn forget_turn(&mut self, turn: &Turn) {
        if self.turns.get(&turn.flow).is_some_and(|known| **known == *turn) {
            self.turns.remove(&turn.flow);
        }
    }
}
