//! The host of a program that leaves: of its two connections one is made.

use alloc::string::String;

use margay_wire::FlowId;

use crate::leg::delta::SpliceFacts;
use crate::machine::sal::Sal;
use crate::types::time::Instant;

/// Why a program cannot leave; nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpliceRefused {
    /// This version has no such act.
    #[error("this agent makes no one connection of two; install a newer one")]
    Unknown,
}

/// What has become of a program's wish to leave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SpliceOutcome {
    /// The session goes on without it: both of its sockets are to be reset, and nothing that they still say goes out.
    Done,
    /// It goes on as before, and so does whoever relays.
    Failed(String),
}

impl Sal {
    /// A program relays between a connection that it has accepted and one that it has opened, and changes nothing: the
    /// two are made one, without it. What becomes of it comes as an event; until then the program, or whoever has its
    /// sockets, goes on relaying.
    ///
    /// # Errors
    ///
    /// Why not; nothing has changed.
    pub fn splice(
        &mut self,
        now: Instant,
        _left: FlowId,
        _right: FlowId,
        _facts: SpliceFacts,
    ) -> Result<(), SpliceRefused> {
        self.now = now;
        Err(SpliceRefused::Unknown)
    }
}
