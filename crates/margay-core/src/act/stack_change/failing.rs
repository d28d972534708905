//! A stack that fails while a flow goes by it: the peer's agent answers, and nothing of what is sent comes, as where a
//! box on the way lets no datagrams of `fec` or `sctp` pass.
//!
//! The flow goes on without repairs and repetitions. A seal stays, whatever comes of it: who can drop what is sealed
//! must not get it plain by that.

use core::time::Duration;

use margay_wire::FlowId;

use super::{ChangeCause, StackChanges};
use crate::leg::stack::Stack;
use crate::machine::sal::Sal;
use crate::types::time::Instant;

/// What has failed is not tried again for so long, but by order.
const FAILED: Duration = Duration::from_secs(60);

impl Sal {
    /// Nothing comes of what a flow sends by a stack that makes good what is lost: it goes on without, and rules do not
    /// try again for a minute.
    pub(crate) fn leave_failed_stack(&mut self, id: FlowId) {
        let now = self.now;
        let settled = self.flows.get(id).and_then(|flow| flow.stacks.settled());
        let to = match settled {
            Some(Stack::Fec | Stack::Sctp) => Stack::Plain,
            Some(Stack::SecureFec | Stack::SecureSctp) => Stack::Secure,
            // It has none, or a change is under way.
            Some(Stack::Plain | Stack::Secure) | None => return,
        };
        // What comes of it is told as every change is; where it cannot be made now, the next answer tries again.
        if self.begin_change(now, id, to, ChangeCause::Failed).is_ok() {
            self.stack_changes.histories.entry(id).or_default().failed_until = Some(now + FAILED);
            self.stack_rules.note_failed(id, now + FAILED);
        }
    }
}

impl StackChanges {
    /// Whether a stack that makes good what a flow loses has failed of late.
    pub(crate) fn has_failed_of_late(&self, now: Instant, id: FlowId) -> bool {
        let until = self.histories.get(&id).and_then(|history| history.failed_until);
        until.is_some_and(|until| now < until)
    }
}
