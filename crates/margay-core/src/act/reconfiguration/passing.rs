//! A box's host passes on what the two anchors say to each other of a session, and forgets the session when it goes
//! another way.

use alloc::vec::Vec;
use core::time::Duration;

use margay_wire::{CutRepr, ErrorCode, FlowId, ReconfigurationRepr, ReconfigurationStep};

use super::{Beside, bare};
use crate::association::auth::Verified;
use crate::cache::entry::RemoveReason;
use crate::machine::sal::Sal;
use crate::session::event::Event;
use crate::session::flow::seen;
use crate::types::drop_reason::DropReason;
use crate::types::time::Instant;

/// Whoever is told that a session goes another way forgets it after so long, also without the next host's word.
const LEAVING: Duration = Duration::from_secs(3);
/// The step after which the ends use a way waits so long at most until both halves of that way are written down.
const KEEP_WAIT: Duration = Duration::from_millis(200);

/// A step that waits at a box's host.
#[derive(Debug)]
pub(super) struct Waiting {
    said: ReconfigurationRepr,
    cut: Option<CutRepr>,
    pub until: Instant,
}

impl Sal {
    /// Passes a step on to the session's other half.
    pub(super) fn pass_step_on(
        &mut self,
        now: Instant,
        id: FlowId,
        message: &Verified<'_>,
        said: ReconfigurationRepr,
    ) -> Result<(), DropReason> {
        if said.step == ReconfigurationStep::Begin {
            return Err(DropReason::Unexpected);
        }
        if said.step == ReconfigurationStep::Wish && message.splice().is_none() {
            // A box's host that has started again asks whether this half is there; with it, a program wishes to leave.
            return Ok(());
        }
        let other = self.flows.get(id).and_then(|flow| self.other_half(flow));
        let Some(other) = other.filter(|other| self.flows.get(*other).is_some_and(|flow| flow.carries_data())) else {
            return match said.step {
                // Of two halves one alone may have been written down.
                ReconfigurationStep::Left => {
                    self.forget_halves(id);
                    Ok(())
                }
                _ => Err(DropReason::UnknownFlow),
            };
        };
        if said.step == ReconfigurationStep::Confirm && !self.are_halves_kept(now, (id, other), said, message.cut()) {
            return Ok(());
        }
        self.say_beside(other, said, &Beside::of(message));
        match said.step {
            ReconfigurationStep::Leave => [id, other].into_iter().for_each(|half| self.begin_to_leave(now, half)),
            ReconfigurationStep::Left => self.forget_halves(id),
            _ => {}
        }
        Ok(())
    }

    /// Whether the next start of the agent would have both halves of a way: after *confirm* the ends send by that way,
    /// and a box's host that knew nothing of it would end the session. Until then the step waits here.
    fn are_halves_kept(
        &mut self,
        now: Instant,
        (id, other): (FlowId, FlowId),
        said: ReconfigurationRepr,
        cut: Option<CutRepr>,
    ) -> bool {
        if self.flows.get(id).is_none_or(|flow| flow.has(seen::KEPT)) {
            return true;
        }
        let waiting = &mut self.reconfigurations.waiting;
        // Said again: what it says now is what counts.
        let until = waiting.get(&id).map(|before| before.until);
        waiting.insert(id, Waiting { said, cut, until: until.unwrap_or(now + KEEP_WAIT) });
        if until.is_none() {
            self.events.push(Event::Keep { old: id, new: other });
        }
        false
    }

    /// Both halves are written down, or it has been waited for that for long enough. False where no step waits for
    /// them.
    pub(super) fn halves_kept(&mut self, id: FlowId) -> bool {
        let Some(waiting) = self.reconfigurations.waiting.remove(&id) else { return false };
        if let Some(flow) = self.flows.get_mut(id) {
            flow.seen |= seen::KEPT;
        }
        if let Some(other) = self.flows.get(id).and_then(|flow| self.other_half(flow)) {
            self.say_beside(other, waiting.said, &Beside { cut: waiting.cut, ..Beside::default() });
        }
        true
    }

    /// Passes on what has waited for too long.
    pub(super) fn waiting_due(&mut self, now: Instant) {
        let waiting = self.reconfigurations.waiting.iter().filter(|(_, one)| one.until <= now);
        let due: Vec<FlowId> = waiting.map(|(id, _)| *id).collect();
        for id in due {
            self.halves_kept(id);
        }
    }

    fn begin_to_leave(&mut self, now: Instant, half: FlowId) {
        let Some(flow) = self.flows.get_mut(half).filter(|flow| !flow.has(seen::LEAVING)) else { return };
        flow.seen |= seen::LEAVING;
        self.flows.set_deadline(half, Some(now + LEAVING));
    }

    /// A session goes another way: nothing is left of it here.
    pub(crate) fn forget_halves(&mut self, id: FlowId) {
        let Some(flow) = self.flows.get(id) else { return };
        if let Some(other) = self.other_half(flow) {
            self.forget_way(other);
        }
        self.forget_way(id);
    }

    /// The other end of a hop is gone while this half waits to be forgotten.
    pub(crate) fn ends_leaving(&mut self, id: FlowId) -> bool {
        let is_leaving = self.flows.get(id).is_some_and(|flow| flow.has(seen::LEAVING));
        if is_leaving {
            self.forget_halves(id);
        }
        is_leaving
    }

    /// A session through boxes is over here, of which not all on the way have heard by themselves. Each host looks at
    /// its own clock for how long a session has been idle. Of one that has not always gone this way, boxes may not have
    /// seen how both ends closed.
    pub(crate) fn say_way_over(&mut self, id: FlowId, reason: RemoveReason) {
        let Some(flow) = self.flows.get(id).filter(|flow| flow.chain.is_some() && flow.carries_data()) else { return };
        match reason {
            RemoveReason::Idle => self.say_fail(id, ErrorCode::Closed),
            RemoveReason::Closed | RemoveReason::Reset if flow.has(seen::LATER) && !flow.is_at_box() => {
                self.say_step(id, ReconfigurationStep::Leave, 0);
            }
            _ => {}
        }
    }

    /// This end has forgotten a way, and says so to whoever speaks of it.
    pub(super) fn say_left(&mut self, id: FlowId, number: u32) {
        self.say_step_repr(id, bare(ReconfigurationStep::Left, number), None);
    }
}
