//! A box's host passes on what the two anchors say to each other of a session, and forgets the session when it goes
//! another way.

use alloc::vec::Vec;
use core::time::Duration;

use margay_wire::{CutRepr, ErrorCode, FlowId, ReconfigurationRepr, ReconfigurationStep};

use super::{Beside, Reconfigurations};
use crate::association::auth::Verified;
use crate::cache::entry::RemoveReason;
use crate::machine::sal::Sal;
use crate::session::event::Event;
use crate::session::flow::{FlowTable, Marks};
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
    until: Instant,
}

impl Waiting {
    /// What is passed on.
    pub fn step(&self) -> (ReconfigurationRepr, Beside<'static>) {
        (self.said, Beside { cut: self.cut, ..Beside::default() })
    }
}

impl Reconfigurations {
    /// Has a step that has come by one half of a way at a box wait until the next start of the agent would have both:
    /// after *confirm* the ends send by that way, and a box's host that knew nothing of it would end the session. True
    /// where none waits yet; of one that is said again, what it says now is what counts.
    fn have_wait(&mut self, id: FlowId, step: Waiting) -> bool {
        let until = self.waiting.get(&id).map(|before| before.until);
        self.waiting.insert(id, Waiting { until: until.unwrap_or(step.until), ..step });
        until.is_none()
    }

    /// Both halves are written down, or that was waited for for long enough. Gives the step that waits for them.
    pub(super) fn take_waiting(&mut self, flows: &mut FlowTable, id: FlowId) -> Option<Waiting> {
        let waiting = self.waiting.remove(&id)?;
        flows.get_mut(id)?.marks |= Marks::KEPT;
        Some(waiting)
    }

    pub(super) fn waiting_until(&self) -> Option<Instant> {
        self.waiting.values().map(|one| one.until).min()
    }

    /// The halves whose step has waited for too long.
    pub(super) fn have_waited(&self, now: Instant) -> Vec<FlowId> {
        self.waiting.iter().filter(|(_, one)| one.until <= now).map(|(id, _)| *id).collect()
    }
}

impl FlowTable {
    fn begin_to_leave(&mut self, now: Instant, half: FlowId) {
        let Some(flow) = self.get_mut(half).filter(|flow| !flow.has(Marks::LEAVING)) else { return };
        flow.marks |= Marks::LEAVING;
        self.set_deadline(half, Some(now + LEAVING));
    }
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
        if said.step == ReconfigurationStep::Wish && message.splice().is_none() && message.order().is_none() {
            // A box's host that has started again asks whether this half is there.
            return Ok(());
        }
        if said.step == ReconfigurationStep::Told && said.host == self.config.host_id().0 {
            return self.hear_told(now, id, message, said);
        }
        let other = self.flows.get(id).and_then(|flow| self.flows.other_half(flow));
        let Some(other) = other.filter(|other| self.flows.get(*other).is_some_and(|flow| flow.carries_data())) else {
            // Of two halves, one alone may have been persisted when the agent was killed: then nobody is there to pass
            // it on to.
            if !matches!(said.step, ReconfigurationStep::Leave | ReconfigurationStep::Left) {
                return Err(DropReason::UnknownFlow);
            }
            if said.step == ReconfigurationStep::Leave {
                self.say_step(id, ReconfigurationStep::Left, said.number);
            }
            self.forget_halves(id);
            return Ok(());
        };
        let is_kept = self.flows.get(id).is_some_and(|flow| flow.has(Marks::KEPT));
        if said.step == ReconfigurationStep::Confirm && !is_kept {
            let waits = Waiting { said, cut: message.cut(), until: now + KEEP_WAIT };
            if self.reconfigurations.have_wait(id, waits) {
                self.events.push(Event::Keep { old: id, new: other });
            }
            return Ok(());
        }
        self.say_beside(other, said, &Beside::of(message));
        match said.step {
            ReconfigurationStep::Leave => {
                for half in [id, other] {
                    // With number 0 the session itself is over.
                    if said.number != 0 {
                        self.reconfigurations.givings.note_left(half);
                    }
                    self.flows.begin_to_leave(now, half);
                }
            }
            ReconfigurationStep::Left => self.forget_halves(id),
            _ => {}
        }
        Ok(())
    }

    /// A session goes another way: nothing is left of it here.
    pub(crate) fn forget_halves(&mut self, id: FlowId) {
        let Some(flow) = self.flows.get(id) else { return };
        if let Some(other) = self.flows.other_half(flow) {
            self.forget_way(other);
        }
        self.forget_way(id);
    }

    /// The other end of a hop is gone while this half waits to be forgotten.
    pub(crate) fn ends_leaving(&mut self, id: FlowId) -> bool {
        let is_leaving = self.flows.get(id).is_some_and(|flow| flow.has(Marks::LEAVING));
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
            RemoveReason::Closed | RemoveReason::Reset if flow.has(Marks::LATER) && !flow.is_at_box() => {
                self.say_step(id, ReconfigurationStep::Leave, 0);
            }
            _ => {}
        }
    }
}
