//! The responder's end of a change: it is ready, and follows.

use margay_wire::{ChangeRepr, ChangeStep, ErrorCode, Flags, FlowId, Message};

use super::{ChangeCause, ChangeOutcome, ChangeRefused, PATIENCE, Sends, StackChange, due_of};
use crate::association::Association;
use crate::leg::seal::Cipher;
use crate::leg::stack::{Stack, Taking};
use crate::machine::sal::Sal;
use crate::session::event::Event;
use crate::types::drop_reason::DropReason;
use crate::types::fair_table::Peer;
use crate::types::state::Machine;
use crate::types::time::Instant;

/// How far the following end is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FollowingState {
    /// It takes both stacks, and sends by the old one.
    Ready,
    /// The same. The initiator's FENCE has come, and its word has not.
    FenceFirst,
    /// It sends by the new stack; the initiator's FENCE has not come.
    Turning,
    /// The change is over, and made.
    Made,
    /// The change is over, and the flow is as it was.
    Left,
}

/// What the following end hears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FollowingEvent {
    /// The initiator sends by the new stack.
    Confirmed,
    /// A FENCE has come, as the initiator sends when it turns.
    Fenced,
    /// The initiator has given the change up.
    Abandoned,
    /// Nothing of the kind has come for as long as the state lasts.
    TimeOut,
}

/// The declared life of a change at its following end.
pub const FOLLOWING: Machine<FollowingState, FollowingEvent> = {
    use FollowingEvent::{Abandoned, Confirmed, Fenced, TimeOut};
    use FollowingState::{FenceFirst, Left, Made, Ready, Turning};
    Machine {
        name: "change of a stack at the responder",
        states: &[Ready, FenceFirst, Turning, Made, Left],
        events: &[Confirmed, Fenced, Abandoned, TimeOut],
        transitions: &[
            (Ready, Confirmed, Turning),
            (Ready, Fenced, FenceFirst),
            (Ready, Abandoned, Left),
            (Ready, TimeOut, Left),
            (FenceFirst, Confirmed, Made),
            (FenceFirst, Abandoned, Left),
            (FenceFirst, TimeOut, Left),
            (Turning, Fenced, Made),
            (Turning, TimeOut, Made),
        ],
    }
};

/// A change that this host follows.
#[derive(Debug)]
pub(super) struct Following {
    pub from: Stack,
    pub to: Stack,
    pub state: FollowingState,
    pub until: Instant,
    pub number: u32,
    cause: ChangeCause,
    /// The initiator's next request, until this change is over.
    next: Option<ChangeRepr>,
}

impl Following {
    /// Whether there is no way back to the old stack.
    pub fn is_made(&self) -> bool {
        !matches!(self.state, FollowingState::Ready | FollowingState::FenceFirst)
    }
}

/// A change that the initiator has been asked for.
#[derive(Debug)]
pub(super) struct Proposing {
    pub to: Stack,
    pub cause: ChangeCause,
    from: Stack,
    number: u32,
    sends: Sends,
    until: Instant,
}

impl Proposing {
    pub fn due(&self) -> Instant {
        self.sends.next.map_or(self.until, |next| next.min(self.until))
    }
}

impl Sal {
    /// Asks the initiator for a change.
    pub(super) fn propose(
        &mut self,
        now: Instant,
        id: FlowId,
        to: Stack,
        cause: ChangeCause,
    ) -> Result<(), ChangeRefused> {
        self.may_change(id, to)?;
        let flow = self.flows.get(id).ok_or(ChangeRefused::UnknownFlow(id))?;
        let from = flow.stacks.sends;
        if let Some(cipher) = self.cipher_for(flow) {
            self.flows.derive_seal(&self.associations, &self.config, id, cipher)?;
        }
        let number = self.rng.u32();
        let proposing = Proposing { to, from, number, cause, sends: Sends::starting(now), until: now + PATIENCE };
        self.stack_changes.proposing.insert(id, proposing);
        self.proposing_due(now);
        Ok(())
    }

    /// The initiator asks whether this end is ready for a change.
    pub(super) fn requested(&mut self, now: Instant, id: FlowId, said: ChangeRepr) -> Result<(), DropReason> {
        let to = Stack::of_number(said.stack).ok_or(DropReason::Unexpected)?;
        let Some(stacks) = self.flows.get(id).map(|flow| flow.stacks) else { return Err(DropReason::UnknownFlow) };
        let distance = said.number.wrapping_sub(stacks.change).cast_signed();
        if let Some(following) = self.stack_changes.following.get(&id).filter(|one| one.number == said.number) {
            if !following.is_made() {
                self.say_change(id, ChangeStep::Answer, to, said.number);
            }
            return Ok(());
        }
        if stacks.change != 0 && distance <= 0 {
            return Err(DropReason::Stale);
        }
        if let Some(following) = self.stack_changes.following.get_mut(&id).filter(|one| one.is_made()) {
            // What the initiator sent before its FENCE may still wait to be read: no other stack is taken until then.
            if following.next.is_none_or(|kept| said.number.wrapping_sub(kept.number).cast_signed() > 0) {
                following.next = Some(said);
            }
            return Ok(());
        }
        if self.stack_changes.following.contains_key(&id) {
            // The initiator has given the change before up, and the word of that is lost.
            self.unready(id);
            self.end_following(now, id, ChangeOutcome::NoAnswer);
        }
        if self.flows.get(id).is_some_and(|flow| flow.stacks.settled() == Some(to)) {
            self.tell(id, Flags::empty());
            return Ok(());
        }
        if let Err(refused) = self.make_ready(now, id, to, said) {
            let no = self.change_repr(id, ChangeStep::Refuse, to, said.number);
            self.say_change_repr(id, no, Flags::empty(), Some(refused.code()));
            return Ok(());
        }
        self.say_change(id, ChangeStep::Answer, to, said.number);
        Ok(())
    }

    /// From here on this end takes both stacks.
    fn make_ready(&mut self, now: Instant, id: FlowId, to: Stack, said: ChangeRepr) -> Result<(), ChangeRefused> {
        self.may_change(id, to)?;
        self.outranks(id, to, &said)?;
        let flow = self.flows.get(id).ok_or(ChangeRefused::UnknownFlow(id))?;
        let from = flow.stacks.sends;
        let peer = self.associations.get(flow.association).map_or(Peer::Own, Association::peer);
        self.stack_changes.following.check(peer).map_err(ChangeRefused::Full)?;
        if let Some(cipher) = Cipher::sealing(said.stack) {
            if self.secure.secure_stacks() & cipher.bit() == 0 {
                return Err(ChangeRefused::NoCipher);
            }
            self.flows.derive_seal(&self.associations, &self.config, id, cipher)?;
        }
        let proposed = self.stack_changes.proposing.remove(&id);
        let cause = match proposed {
            Some(own) if own.to == to => own.cause,
            Some(own) => {
                let Proposing { to, from, cause, .. } = own;
                let outcome = ChangeOutcome::Refused(ChangeRefused::PeerBusy);
                self.remember(now, id, StackChange { at: now, from, to, cause, outcome });
                ChangeCause::Peer
            }
            None => ChangeCause::Peer,
        };
        let number = said.number;
        let until = now + PATIENCE + PATIENCE;
        let following = Following { from, to, state: FollowingState::Ready, until, number, cause, next: None };
        self.stack_changes.following.insert(peer, id, following).map_err(ChangeRefused::Full)?;
        if let Some(flow) = self.flows.get_mut(id) {
            flow.stacks.change = number;
            flow.stacks.takes = Taking::Ready(to);
            flow.stacks.before = from;
        }
        self.flows.install_again(&mut self.queue, id);
        self.events.push(Event::FlowChanged(id));
        Ok(())
    }

    /// The initiator sends by the new stack.
    pub(super) fn confirmed(&mut self, now: Instant, id: FlowId, said: ChangeRepr) -> Result<(), DropReason> {
        let to = Stack::of_number(said.stack).ok_or(DropReason::Unexpected)?;
        if self.stack_changes.following.get(&id).is_some_and(|one| one.number == said.number && !one.is_made()) {
            return self.following_event(now, id, said.number, FollowingEvent::Confirmed);
        }
        let is_made =
            self.flows.get(id).is_some_and(|flow| flow.stacks.change == said.number && flow.stacks.sends == to);
        if is_made {
            // The word of that is lost.
            self.say_change(id, ChangeStep::Done, to, said.number);
            return Ok(());
        }
        // This end knows no such change: it has given it up, or its agent has started again.
        self.told(now, id, said, false)
    }

    /// The initiator has given a change up: this one, or the next.
    pub(super) fn abandoned(&mut self, now: Instant, id: FlowId, number: u32) -> Result<(), DropReason> {
        if let Some(following) = self.stack_changes.following.get_mut(&id)
            && following.next.take_if(|kept| kept.number == number).is_some()
        {
            return Ok(());
        }
        self.following_event(now, id, number, FollowingEvent::Abandoned)
    }

    /// What is not listed changes nothing: words come twice, and late.
    pub(super) fn following_event(
        &mut self,
        now: Instant,
        id: FlowId,
        number: u32,
        event: FollowingEvent,
    ) -> Result<(), DropReason> {
        let following = self.stack_changes.following.get_mut(&id).filter(|one| one.number == number);
        let following = following.ok_or(DropReason::Stale)?;
        let was_made = following.is_made();
        let after = FOLLOWING.after(following.state, event).map_err(|_| DropReason::Unexpected)?;
        following.state = after;
        let to = following.to;
        match after {
            FollowingState::Turning => {
                following.until = now + PATIENCE;
                self.turn(id, to, Taking::Turning(to));
                self.say_change(id, ChangeStep::Done, to, number);
                if self.stack_rules.is_guarded_by_move(id) {
                    // Nothing of the old stack has been sent by this path.
                    return self.following_event(now, id, number, FollowingEvent::Fenced);
                }
            }
            FollowingState::Made => {
                let next = following.next.take();
                self.settle(now, id, to);
                if !was_made {
                    self.say_change(id, ChangeStep::Done, to, number);
                }
                self.end_following(now, id, ChangeOutcome::Done);
                if let Some(next) = next {
                    return self.requested(now, id, next);
                }
            }
            FollowingState::Left => {
                self.unready(id);
                self.end_following(now, id, ChangeOutcome::NoAnswer);
            }
            FollowingState::Ready | FollowingState::FenceFirst => {}
        }
        Ok(())
    }

    /// This end is not ready any more: it goes on as it was.
    pub(super) fn unready(&mut self, id: FlowId) {
        let Some(from) = self.stack_changes.following.get(&id).map(|one| one.from) else { return };
        if let Some(flow) = self.flows.get_mut(id) {
            flow.stacks.takes = Taking::Only(from);
            flow.stacks.before = from;
            self.flows.install_again(&mut self.queue, id);
        }
    }

    /// The change is over.
    pub(super) fn end_following(&mut self, now: Instant, id: FlowId, outcome: ChangeOutcome) {
        let Some(following) = self.stack_changes.following.remove(&id) else { return };
        let Following { from, to, cause, .. } = following;
        self.remember(now, id, StackChange { at: now, from, to, cause, outcome });
        self.events.push(Event::FlowChanged(id));
    }

    /// The proposal has come to nothing.
    pub(super) fn end_proposing(&mut self, now: Instant, id: FlowId, outcome: ChangeOutcome) {
        let Some(proposing) = self.stack_changes.proposing.remove(&id) else { return };
        let Proposing { from, to, cause, .. } = proposing;
        self.remember(now, id, StackChange { at: now, from, to, cause, outcome });
    }

    /// The initiator does not agree.
    pub(super) fn proposal_refused(
        &mut self,
        now: Instant,
        id: FlowId,
        message: &Message<'_>,
        said: ChangeRepr,
    ) -> Result<(), DropReason> {
        if self.stack_changes.proposing.get(&id).is_none_or(|one| one.number != said.number) {
            return Err(DropReason::Stale);
        }
        let code = message.error().map_or(ErrorCode::Refused, |error| error.code);
        self.end_proposing(now, id, ChangeOutcome::Refused(ChangeRefused::of_peer(code)));
        Ok(())
    }

    /// Ends what has waited for too long.
    pub(super) fn following_due(&mut self, now: Instant) {
        for id in due_of(self.stack_changes.following.iter(), |one| one.until <= now) {
            let Some(number) = self.stack_changes.following.get(&id).map(|one| one.number) else { continue };
            // It is listed: this is the state that it is in.
            let _ = self.following_event(now, id, number, FollowingEvent::TimeOut);
        }
    }

    /// Asks again for what has not come, and ends what has waited for too long.
    pub(super) fn proposing_due(&mut self, now: Instant) {
        for id in due_of(self.stack_changes.proposing.iter(), |one| one.due() <= now) {
            let Some(proposing) = self.stack_changes.proposing.get_mut(&id) else { continue };
            if proposing.until <= now {
                self.end_proposing(now, id, ChangeOutcome::NoAnswer);
                continue;
            }
            if proposing.sends.take(now) {
                let to = proposing.to;
                let number = proposing.number;
                self.say_change(id, ChangeStep::Propose, to, number);
            }
        }
    }
}
