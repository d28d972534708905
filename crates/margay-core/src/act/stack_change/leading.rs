//! The initiator's end of a change: it leads.

use core::time::Duration;

use margay_wire::{ChangeRepr, ChangeStep, ErrorCode, Flags, FlowId, Message};

use super::{ChangeCause, ChangeOutcome, ChangeRefused, PATIENCE, Sends, StackChange, due_of};
use crate::association::Association;
use crate::leg::stack::{Stack, Taking};
use crate::machine::sal::Sal;
use crate::session::event::Event;
use crate::session::{Act, Holder, LockGuardId};
use crate::types::drop_reason::DropReason;
use crate::types::fair_table::Peer;
use crate::types::state::Machine;
use crate::types::time::Instant;

/// Longer than a change takes, whatever is lost of it.
const LEASE: Duration = Duration::from_secs(5);

/// How far the leading end is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeadingState {
    /// The responder is asked whether it is ready.
    Asking,
    /// This end sends by the new stack, and waits for the responder.
    Turning,
    /// The responder's FENCE has come, and its word has not.
    FenceFirst,
    /// The responder has said that it sends by the new stack, too; its FENCE has not come.
    Told,
    /// The change is over.
    Over,
}

/// What the leading end hears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeadingEvent {
    /// The responder is ready.
    Answered,
    /// The responder does not agree.
    Refused,
    /// The responder sends by the new stack.
    Done,
    /// A FENCE has come, as the responder sends when it turns.
    Fenced,
    /// The responder has said nothing for as long as the state lasts.
    TimeOut,
}

/// The declared life of a change at its leading end.
pub const LEADING: Machine<LeadingState, LeadingEvent> = {
    use LeadingEvent::{Answered, Done, Fenced, Refused, TimeOut};
    use LeadingState::{Asking, FenceFirst, Over, Told, Turning};
    Machine {
        name: "change of a stack at the initiator",
        states: &[Asking, Turning, FenceFirst, Told, Over],
        events: &[Answered, Refused, Done, Fenced, TimeOut],
        transitions: &[
            (Asking, Answered, Turning),
            (Asking, Refused, Over),
            (Asking, TimeOut, Over),
            (Turning, Done, Told),
            (Turning, Fenced, FenceFirst),
            (Turning, TimeOut, Over),
            (FenceFirst, Done, Over),
            (FenceFirst, TimeOut, Over),
            (Told, Fenced, Over),
            (Told, TimeOut, Over),
        ],
    }
};

/// A change that this host leads.
#[derive(Debug)]
pub(super) struct Leading {
    pub from: Stack,
    pub to: Stack,
    pub number: u32,
    pub cause: ChangeCause,
    pub state: LeadingState,
    guard: LockGuardId,
    sends: Sends,
    until: Instant,
}

impl Leading {
    pub fn due(&self) -> Instant {
        self.sends.next.map_or(self.until, |next| next.min(self.until))
    }

    /// Whether there is no way back to the old stack.
    pub fn is_made(&self) -> bool {
        self.state != LeadingState::Asking
    }
}

/// A number that is later than all that this flow's changes had, also in earlier starts of the agent: the clock goes on
/// over those.
pub(crate) fn number_after(last: u32, now: Instant) -> u32 {
    // Numbers wrap after 49 days; which of two is the later one is told by their distance.
    let clock = (now.micros() / 1000) as u32;
    let is_later = last == 0 || clock.wrapping_sub(last).cast_signed() > 0;
    let number = if is_later { clock } else { last.wrapping_add(1) };
    number.max(1)
}

impl Sal {
    /// Begins a change at the initiator.
    pub(super) fn lead(
        &mut self,
        now: Instant,
        id: FlowId,
        to: Stack,
        cause: ChangeCause,
    ) -> Result<(), ChangeRefused> {
        self.may_change(id, to)?;
        let flow = self.flows.get(id).ok_or(ChangeRefused::UnknownFlow(id))?;
        let peer = self.associations.get(flow.association).filter(|_| cause == ChangeCause::Peer);
        let peer = peer.map_or(Peer::Own, Association::peer);
        self.stack_changes.leading.check(peer).map_err(ChangeRefused::Full)?;
        let cipher = self.cipher_for(flow);
        let session = flow.session;
        let from = flow.stacks.sends;
        let number = number_after(flow.stacks.change, now);
        let holder = Holder { host: self.config.host_id(), act: Act::Stack };
        if let Some(cipher) = cipher {
            self.flows.derive_seal(&self.associations, &self.config, id, cipher)?;
        }
        let guard = self.locks.acquire(peer, session, holder, now, LEASE).map_err(ChangeRefused::Busy)?;
        if let Some(flow) = self.flows.get_mut(id) {
            flow.stacks.change = number;
        }
        let sends = Sends::starting(now);
        let leading =
            Leading { from, to, number, cause, state: LeadingState::Asking, guard, sends, until: now + PATIENCE };
        self.stack_changes.leading.insert(peer, id, leading).map_err(ChangeRefused::Full)?;
        self.leading_due(now);
        Ok(())
    }

    /// The responder's host proposes a change.
    pub(super) fn proposed(&mut self, now: Instant, id: FlowId, said: ChangeRepr) -> Result<(), DropReason> {
        let to = Stack::of_number(said.stack).ok_or(DropReason::Unexpected)?;
        if self.stack_changes.leading.get(&id).is_some_and(|one| one.to == to && one.cause == ChangeCause::Peer) {
            // It has asked again; so does this end.
            return Ok(());
        }
        let settled = self.flows.get(id).and_then(|flow| flow.stacks.settled());
        if self.stack_changes.under_way(id).is_none() && settled == Some(to) {
            self.tell(id, Flags::empty());
            return Ok(());
        }
        let begun = match self.stack_changes.under_way(id) {
            Some(_) => Err(ChangeRefused::UnderWay),
            None => self.outranks(id, to, &said).and_then(|()| self.lead(now, id, to, ChangeCause::Peer)),
        };
        if let Err(refused) = begun {
            let no = ChangeRepr { step: ChangeStep::Refuse, demands: self.flows.has_demand(id), ..said };
            self.say_change_repr(id, no, Flags::empty(), Some(refused.code()));
        }
        Ok(())
    }

    /// The responder does not agree.
    pub(super) fn request_refused(
        &mut self,
        now: Instant,
        id: FlowId,
        message: &Message<'_>,
        said: ChangeRepr,
    ) -> Result<(), DropReason> {
        let leading = self.stack_changes.leading.get(&id).filter(|one| one.number == said.number);
        let leading = leading.ok_or(DropReason::Stale)?;
        if LEADING.after(leading.state, LeadingEvent::Refused).is_err() {
            return Err(DropReason::Unexpected);
        }
        let code = message.error().map_or(ErrorCode::Refused, |error| error.code);
        self.end_leading(now, id, ChangeOutcome::Refused(ChangeRefused::of_peer(code)));
        Ok(())
    }

    /// What is not listed changes nothing: answers come twice, and late.
    pub(super) fn leading_event(
        &mut self,
        now: Instant,
        id: FlowId,
        number: u32,
        event: LeadingEvent,
    ) -> Result<(), DropReason> {
        let leading = self.stack_changes.leading.get_mut(&id).filter(|one| one.number == number);
        let leading = leading.ok_or(DropReason::Stale)?;
        let before = leading.state;
        let after = LEADING.after(before, event).map_err(|_| DropReason::Unexpected)?;
        if before == LeadingState::Asking && after == LeadingState::Turning {
            if !self.locks.is_held_by(leading.guard, now) {
                // Whatever the lock protects may have changed.
                self.abandon(now, id, ChangeOutcome::NoAnswer);
                return Ok(());
            }
            leading.sends = Sends::starting(now);
            leading.until = now + PATIENCE;
            leading.state = after;
            let to = leading.to;
            self.turn(id, to, Taking::Ready(to));
            self.leading_due(now);
            return Ok(());
        }
        leading.state = after;
        match after {
            LeadingState::Told => {
                leading.sends.next = None;
                let to = leading.to;
                self.turn(id, to, Taking::Turning(to));
                if self.stack_rules.is_guarded_by_move(id) {
                    // Nothing of the old stack has been sent by this path.
                    return self.leading_event(now, id, number, LeadingEvent::Fenced);
                }
            }
            LeadingState::Over if before == LeadingState::Asking => self.abandon(now, id, ChangeOutcome::NoAnswer),
            LeadingState::Over => {
                let to = leading.to;
                self.settle(now, id, to);
                self.end_leading(now, id, ChangeOutcome::Done);
            }
            LeadingState::Asking | LeadingState::Turning | LeadingState::FenceFirst => {}
        }
        Ok(())
    }

    /// The flow goes on as it was; the responder need not be ready any more.
    pub(super) fn abandon(&mut self, now: Instant, id: FlowId, outcome: ChangeOutcome) {
        if let Some(Leading { from, number, .. }) = self.stack_changes.leading.get(&id) {
            let from = *from;
            let number = *number;
            self.say_change(id, ChangeStep::Abandon, from, number);
        }
        self.end_leading(now, id, outcome);
    }

    /// The change is over, and the lock is free.
    pub(super) fn end_leading(&mut self, now: Instant, id: FlowId, outcome: ChangeOutcome) {
        let Some(leading) = self.stack_changes.leading.remove(&id) else { return };
        // The lease may have ended by itself: then the lock is free already.
        let _ = self.locks.release(leading.guard, now);
        let Leading { from, to, cause, .. } = leading;
        self.remember(now, id, StackChange { at: now, from, to, cause, outcome });
        self.events.push(Event::FlowChanged(id));
    }

    /// How many sessions are locked at `now`, for whatever act.
    pub fn locked_sessions(&mut self, now: Instant) -> usize {
        self.locks.expire(now);
        self.locks.len()
    }

    /// Says again what has not been answered, and ends what has waited for too long.
    pub(super) fn leading_due(&mut self, now: Instant) {
        for id in due_of(self.stack_changes.leading.iter(), |one| one.due() <= now) {
            let Some(leading) = self.stack_changes.leading.get_mut(&id) else { continue };
            let Leading { to, number, state, until, .. } = *leading;
            if until <= now {
                // It is listed: this is the state that it is in.
                let _ = self.leading_event(now, id, number, LeadingEvent::TimeOut);
                continue;
            }
            if leading.sends.take(now) {
                match state {
                    LeadingState::Asking => self.say_change(id, ChangeStep::Request, to, number),
                    LeadingState::Turning | LeadingState::FenceFirst => {
                        self.say_change(id, ChangeStep::Confirm, to, number);
                    }
                    LeadingState::Told | LeadingState::Over => {}
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_rise_whatever_the_clock_says() {
        let at = |millis| Instant::from_millis(millis);
        assert_eq!(number_after(0, at(0)), 1);
        assert_eq!(number_after(0, at(70)), 70);
        assert_eq!(number_after(70, at(70)), 71);
        assert_eq!(number_after(70, at(71)), 71);
        assert_eq!(number_after(u32::MAX, at(u64::from(u32::MAX))), 1, "zero is no number");
        assert_eq!(number_after(u32::MAX - 5, at(u64::from(u32::MAX) + 3)), 2);
    }
}
