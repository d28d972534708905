//! What a plug-in (ALRM) is to the switch: the paper's Table 1, and what members that come and go add to it.

use alloc::borrow::Cow;

use crate::member::{MemberId, Members};

/// Where a frame has its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// Nowhere.
    None,
    /// Among those of its connection that go to the same member.
    Member,
    /// In a stream, all of which goes to one member.
    Stream(u16),
}

/// A frame as a plug-in sees it: whole, or its first chunk.
#[derive(Debug)]
pub struct Frame<'a> {
    /// The connection.
    pub connection: u32,
    /// Where it has its place.
    pub order: Order,
    /// There are no chunks but this one.
    pub is_whole: bool,
    /// Its bytes. A plug-in may change them and their number, always in the same way.
    pub payload: Cow<'a, [u8]>,
}

/// What becomes of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It goes to a member.
    To {
        /// Which takes new frames.
        member: MemberId,
        /// Whether another member may be given it, too, when this one dies and nobody knows whether it has acted on it.
        is_safe: bool,
        /// Whether all frames to come go there as well.
        pins: bool,
    },
    /// Nowhere for now. Nobody acknowledges it, and so the peer repeats it.
    Drop,
}

/// Decides where frames go. Deterministic, since a frame that is repeated must be changed as it was the first time.
pub trait Plugin {
    /// A connection begins.
    fn add_connection(&mut self, _connection: u32) {}

    /// A connection is over.
    fn remove_connection(&mut self, _connection: u32) {}

    /// A member takes frames from now on.
    fn add_member(&mut self, _member: MemberId) {}

    /// A member is gone.
    fn remove_member(&mut self, _member: MemberId) {}

    /// Whether nothing is owed by a member that has acknowledged all that it was given: one that drains may go then.
    fn may_go(&self, _member: MemberId) -> bool {
        true
    }

    /// A frame of the peer: decides whose it is. `rtx` is kept with it, zero at first.
    fn redirect(&mut self, frame: &mut Frame<'_>, members: &Members, rtx: &mut u64) -> Verdict;

    /// A frame whose member is not to be chosen: of a stream that has one, or of a connection that is pinned.
    fn follow(&mut self, _frame: &mut Frame<'_>, _member: MemberId, _rtx: &mut u64) {}

    /// The peer repeats a frame, which keeps its member: the same change of its bytes.
    fn again(&mut self, _frame: &mut Frame<'_>, _rtx: &mut u64) {}

    /// The peer repeats a frame that is not safe, and whose member died. Names a member that answers with an error, and
    /// gives other bytes in place of the frame's; else the connection ends.
    fn refuse(&mut self, _frame: &mut Frame<'_>, _members: &Members, _rtx: &mut u64) -> Option<MemberId> {
        None
    }

    /// A frame of a member, on its way to the peer, also when it is repeated.
    fn answer(&mut self, _frame: &mut Frame<'_>, _from: MemberId) {}

    /// A frame that `redirect` has seen will not come again.
    fn retire(&mut self, _rtx: u64) {}
}
