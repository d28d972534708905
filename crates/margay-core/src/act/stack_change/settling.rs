//! Two ends that think different things of a flow: an agent has started again in the middle of a change, with the stack
//! that was written down last, or a change was given up at one end and made at the other. Each tells the other what it
//! has, and both go to [what the two agree in](Stack::agreed): `secure` where one is sealed, plain otherwise.

use core::time::Duration;

use margay_wire::{CHANGES, ChangeRepr, ChangeStep, Flags, FlowId};

use super::{ChangeCause, ChangeOutcome, ChangeRefused, End, StackChange};
use crate::act::secure::CipherBound;
use crate::act::stack_rule::guard;
use crate::leg::seal::Cipher;
use crate::leg::stack::Stack;
use crate::machine::sal::Sal;
use crate::session::event::Event;
use crate::session::flow::Marks;
use crate::types::drop_reason::DropReason;
use crate::types::time::Instant;

/// A peer is not told more often.
const TELL_AGAIN: Duration = Duration::from_millis(100);

impl Sal {
    /// DATA has come of a stack that this end does not take: it was dropped, and is late, or forged; or the two ends do
    /// not think the same of the flow.
    pub(crate) fn handle_strange_stack(&mut self, now: Instant, id: FlowId) {
        let Some(flow) = self.flows.get(id).filter(|flow| flow.carries_data()) else { return };
        let Some(association) = self.associations.get_mut(flow.association) else { return };
        let is_able = association.stacks & CHANGES != 0 && !association.is_self();
        let is_early = association.stack_told.is_some_and(|at| now.since(at) < TELL_AGAIN);
        if is_able && !is_early {
            association.stack_told = Some(now);
            self.tell(id, Flags::empty());
            guard::tell_of_demand(self, id);
        }
    }

    /// Tells the peer which stack this end has.
    pub(crate) fn tell(&mut self, id: FlowId, flags: Flags) {
        let Some(number) = self.flows.get(id).map(|flow| flow.stacks.change) else { return };
        let repr = self.change_repr(id, ChangeStep::Tell, self.word_of(id), number);
        self.say_change_repr(id, repr, flags, None);
    }

    /// The stack by which a flow goes on at this end, whatever becomes of a change that is not made.
    fn word_of(&self, id: FlowId) -> Stack {
        let leading = self.stack_changes.leading.get(&id).filter(|one| one.is_made()).map(|one| one.to);
        let following = self.stack_changes.following.get(&id).filter(|one| one.is_made()).map(|one| one.to);
        let sent = self.flows.get(id).map_or(Stack::Plain, |flow| flow.stacks.sends);
        leading.or(following).unwrap_or(sent)
    }

    /// The peer has told which stack it has.
    pub(super) fn told(
        &mut self,
        now: Instant,
        id: FlowId,
        said: ChangeRepr,
        is_answer: bool,
    ) -> Result<(), DropReason> {
        let theirs = Stack::of_number(said.stack).ok_or(DropReason::Unexpected)?;
        if !is_answer && self.stack_changes.awaits_word(id, said.number) {
            // The peer knows the change, and whatever it has now is what the change begins with. Forged DATA may have
            // had it say so.
            return Ok(());
        }
        let own = self.word_of(id);
        let agreed = own.agreed(theirs);
        let following = self.stack_changes.following.get(&id);
        let has_unknown = following.is_some_and(|one| !one.is_made() && one.number != said.number);
        if own != agreed && agreed.is_sealed() {
            self.go_to_sealed(now, id, said)?;
        } else if own != agreed {
            self.go_to_plain(now, id, said.number);
        } else if theirs == own && has_unknown {
            // The initiator knows nothing of the change that this end is ready for.
            self.unready(id);
            self.end_following(now, id, ChangeOutcome::NoAnswer);
        }
        if !is_answer {
            self.tell(id, Flags::CONFIRM);
        }
        Ok(())
    }

    /// An end has the flow sealed; so has this end from here on, and without repairs.
    fn go_to_sealed(&mut self, now: Instant, id: FlowId, said: ChangeRepr) -> Result<(), DropReason> {
        if let Some(cipher) = Cipher::sealing(said.stack) {
            if self.secure.secure_stacks() & cipher.bit() == 0 {
                return Ok(());
            }
            self.flows.derive_seal(&self.associations, &self.config, id, cipher).map_err(|CipherBound| {
                // It is encrypted under the cipher that it has, or not at all.
                DropReason::OtherCipher
            })?;
        }
        self.settle_as_told(now, id, Stack::Secure, said.number);
        Ok(())
    }

    /// The peer has the flow plain, and this end by `fec` or `sctp`: neither has anything that the other needs.
    fn go_to_plain(&mut self, now: Instant, id: FlowId, number: u32) {
        if self.flows.get(id).is_some_and(|flow| !flow.is_demanded_here()) {
            self.settle_as_told(now, id, Stack::Plain, number);
        }
    }

    /// The flow is as the peer has it; a change that was under way is over.
    fn settle_as_told(&mut self, now: Instant, id: FlowId, stack: Stack, number: u32) {
        let is_demanded = self.flows.get(id).is_some_and(|flow| flow.has(Marks::PEER_DEMANDS));
        let outcome = |to: Stack| match to {
            _ if to == stack => ChangeOutcome::Done,
            _ if is_demanded && !to.is_sealed() => ChangeOutcome::Refused(ChangeRefused::Demanded(End::Peer)),
            _ => ChangeOutcome::NoAnswer,
        };
        let cut_short = self.stack_changes.under_way(id);
        let from = self.word_of(id);
        if let Some(flow) = self.flows.get_mut(id) {
            // By this the peer knows the FENCE.
            flow.stacks.change = number;
        }
        self.settle(now, id, stack);
        if let Some(to) = cut_short {
            self.end_leading(now, id, outcome(to));
            self.end_following(now, id, outcome(to));
            self.end_proposing(now, id, outcome(to));
        }
        if cut_short != Some(stack) {
            let cause = ChangeCause::Settled;
            self.remember(now, id, StackChange { at: now, from, to: stack, cause, outcome: ChangeOutcome::Done });
        }
        self.events.push(Event::FlowChanged(id));
    }
}
