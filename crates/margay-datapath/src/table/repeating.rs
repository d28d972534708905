//! What repeats flows that go by `sctp`, and how long it stays when they have turned to another stack
//! (docs/decisions/0099).

use std::sync::Arc;

use margay_core::{Stack, Stacks};
use margay_wire::{DataRepr, FENCE, FlowId};

use super::{Slot, Table};
use crate::clock;
use crate::sctp::Sctp;
use crate::seal::Seal;
use crate::turning::Turn;

/// What repeats a flow as it is, and what repeats it sealed: while one becomes the other, a flow has both.
#[derive(Debug, Default)]
pub(super) struct KeptSctps {
    bare: Option<Arc<Sctp>>,
    sealed: Option<Arc<Sctp>>,
}

impl KeptSctps {
    fn of(&self, stack: Stack) -> Option<&Arc<Sctp>> {
        match stack {
            Stack::Sctp => self.bare.as_ref(),
            Stack::SecureSctp => self.sealed.as_ref(),
            Stack::Plain | Stack::Fec | Stack::Secure | Stack::SecureFec => None,
        }
    }

    /// Keeps what a stack needs as long as the flow may have that stack, or is sent so; and then as long as something
    /// of it is under way, unless the flow has come to be sealed: then nothing goes as it is any more.
    fn follow(&mut self, flow: FlowId, stack: Stack, stacks: Stacks, sends: Stack) {
        let kept = if stack == Stack::SecureSctp { &mut self.sealed } else { &mut self.bare };
        if stacks.has(stack) {
            // One that has been left and comes again has numbers of its own; not while the change that leaves it lasts.
            let is_again = stacks.sends == stack || stacks.before != stack;
            if kept.as_ref().is_none_or(|kept| kept.is_left() && is_again) {
                *kept = Some(Arc::new(Sctp::new(flow, stack, stacks.change)));
            }
            return;
        }
        let is_exposed = !stack.is_sealed() && stacks.is_sealed_only();
        let lingers = |kept: &Arc<Sctp>| kept.is_lingering(clock::now()) && !is_exposed;
        if sends != stack && !kept.as_ref().is_some_and(lingers) {
            *kept = None;
        }
    }

    /// What has not been left.
    fn in_use(&self) -> impl Iterator<Item = &Arc<Sctp>> {
        self.sealed.iter().chain(&self.bare).filter(|kept| !kept.is_left())
    }

    fn is_empty(&self) -> bool {
        self.bare.is_none() && self.sealed.is_none()
    }
}

impl Table {
    /// What repeats a flow that goes by `sctp`, sealed or not; while one becomes the other, the sealed one.
    pub fn sctp(&self, flow: FlowId) -> Option<Arc<Sctp>> {
        // There seldom is any.
        if self.sctps.is_empty() {
            return None;
        }
        self.sctps.get(&flow)?.in_use().next().cloned()
    }

    /// The same, of one of the two stacks, also while what is under way of it is still repeated.
    pub fn sctp_of(&self, flow: FlowId, stack: Stack) -> Option<Arc<Sctp>> {
        self.sctps.get(&flow)?.of(stack).cloned()
    }

    /// Keeps what repeats a flow as long as its entry says that it goes by `sctp`, or it is sent so, and for a while
    /// longer.
    pub(super) fn follow_sctp(&mut self, flow: FlowId, stacks: Stacks, sends: Stack) {
        if !stacks.has_repeated() && !self.sctps.contains_key(&flow) {
            return;
        }
        let kept = self.sctps.entry(flow).or_default();
        for stack in [Stack::Sctp, Stack::SecureSctp] {
            kept.follow(flow, stack, stacks, sends);
        }
        if kept.is_empty() {
            self.sctps.remove(&flow);
        }
    }

    /// Nothing is owed any more by what a flow has left. It stays where the flow may still be given something by it.
    pub fn forget_sctp(&mut self, sctp: &Sctp) {
        let stacks = self.find(sctp.flow).map(|slot| slot.stacks);
        if stacks.is_some_and(|stacks| stacks.has(sctp.stack)) {
            return;
        }
        let Some(kept) = self.sctps.get_mut(&sctp.flow) else { return };
        for one in [&mut kept.bare, &mut kept.sealed] {
            if one.as_deref() == Some(sctp) {
                *one = None;
            }
        }
        if kept.is_empty() {
            self.sctps.remove(&sctp.flow);
        }
    }

    /// With what DATA by `sctp` is opened that comes when its flow has turned to another stack: repetitions and
    /// acknowledgements of what was under way. Nothing that is not sealed, of a flow that is.
    pub(super) fn admit_late(&self, slot: &Slot, data: &DataRepr) -> Option<(Stack, Option<Arc<Seal>>)> {
        if self.sctps.is_empty() || data.flags & FENCE != 0 {
            return None;
        }
        let stack = Stack::of_number(data.stack)?;
        let sctp = self.sctps.get(&slot.flow)?.of(stack)?;
        let is_exposed = !stack.is_sealed() && slot.stacks.is_sealed_only();
        // The change may be over before this end's last packet of the stack is sent.
        let is_left = slot.sends.last() != stack;
        if is_exposed || is_left && !sctp.is_lingering(clock::now()) {
            return None;
        }
        if !stack.is_sealed() {
            return Some((stack, None));
        }
        let seal = self.seals.get(&slot.flow).filter(|seal| seal.number_of(stack) == data.stack)?;
        Some((stack, Some(Arc::clone(seal))))
    }
}

/// Whether DATA does not take its place before or behind the FENCE of a turn: by `sctp` nothing has an order. What is
/// under way is repeated behind the FENCE, and acknowledgements come before it: those of a peer that has not turned
/// itself yet, and takes what this end sends by its new stack. Were they held until the peer's FENCE, this end would
/// send no more than its first window, and have no room for what the program sends meanwhile. Nothing as it is of a
/// flow that is sealed, before or behind the FENCE: anybody may forge that.
pub(super) fn passes_turn(stack: Stack, data: &DataRepr, before: Stack, turn: &Turn) -> bool {
    let is_exposed = (turn.to().is_sealed() || before.is_sealed()) && !stack.is_sealed();
    stack.repeats() && data.flags & FENCE == 0 && !is_exposed
}

#[cfg(test)]
#[path = "repeating_test.rs"]
mod test;
