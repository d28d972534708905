//! An ensemble: one peer, one switch, many members, and what must hold of them in every run.
//!
//! [`small`] is for searching every run of a small one, [`large`] for random runs with the endpoints that ship. Both
//! keep a [`Ledger`], which is told from outside what happens and says what is wrong.

use std::collections::BTreeSet;
use std::ops::Range;

use margay_ensemble::{Frame, MemberId, Members, Order, Plugin, Rules, Verdict};

pub mod large;
pub mod small;

/// Patches are released at once, also when something before them is merely late.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct NoDeferral;

impl Rules for NoDeferral {
    const DEFERS_PATCHES: bool = false;
}

/// Members are told that all is complete.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct NoWatermark;

impl Rules for NoWatermark {
    const WATERMARKS: bool = false;
}

/// One that joins knows nothing of the holes that there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct HoleForgotten;

impl Rules for HoleForgotten {
    const HOLES_AT_JOIN: bool = false;
}

/// The switch acknowledges what it has passed on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct EarlyAcknowledgement;

impl Rules for EarlyAcknowledgement {
    const END_TO_END: bool = false;
}

/// Where in a chunk's payload it says which member it is for: by the order in which they joined.
const TARGET: usize = 1;

/// Where a request or an answer says which it is. Those of small ensembles do not: nothing is answered there.
const REQUEST: Range<usize> = 4..8;

/// Does what the frames say. All of them are safe to repeat.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Plan {
    joined: Vec<MemberId>,
    /// Requests that are not answered.
    owed: BTreeSet<(MemberId, Vec<u8>)>,
}

impl Plugin for Plan {
    fn add_member(&mut self, member: MemberId) {
        self.joined.push(member);
    }

    fn remove_member(&mut self, member: MemberId) {
        self.owed.retain(|(by, _)| *by != member);
    }

    fn may_go(&self, member: MemberId) -> bool {
        !self.owed.iter().any(|(by, _)| *by == member)
    }

    fn answer(&mut self, frame: &mut Frame<'_>, from: MemberId) {
        if let Some(request) = frame.payload.get(REQUEST) {
            self.owed.remove(&(from, request.to_vec()));
        }
    }

    fn follow(&mut self, frame: &mut Frame<'_>, member: MemberId, _: &mut u64) {
        if let Some(request) = frame.payload.get(REQUEST) {
            self.owed.insert((member, request.to_vec()));
        }
    }

    fn redirect(&mut self, frame: &mut Frame<'_>, members: &Members, rtx: &mut u64) -> Verdict {
        let target = frame.payload.get(TARGET).map_or(0, |target| usize::from(*target));
        let wanted = self.joined.get(target).copied().filter(|id| members.is_active(*id));
        let Some(member) = wanted.or_else(|| members.active().next()) else { return Verdict::Drop };
        self.follow(frame, member, rtx);
        Verdict::To { member, is_safe: true, pins: false }
    }
}

/// What one member's host has done.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Deeds {
    is_dead: bool,
    /// Frames that its program was given, by their first chunk.
    given: Vec<usize>,
}

/// What has happened to each chunk. Members and chunks have numbers from 0; frames have their first chunk's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Ledger {
    members: Vec<Deeds>,
    /// By chunk, the members that it was sent to, as bits.
    addressed: Vec<u64>,
    /// By chunk, the members whose hosts have it, as bits.
    had: Vec<u64>,
    /// The first thing that should not have happened.
    wrong: Option<&'static str>,
}

impl Ledger {
    /// One more member; gives its number.
    pub fn join(&mut self) -> usize {
        self.members.push(Deeds::default());
        self.members.len() - 1
    }

    /// A member is dead.
    pub fn die(&mut self, member: usize) {
        self.members[member].is_dead = true;
    }

    /// Whether it is.
    pub fn is_dead(&self, member: usize) -> bool {
        self.members[member].is_dead
    }

    fn complain(&mut self, wrong: &'static str) {
        self.wrong.get_or_insert(wrong);
    }

    fn grow(&mut self, chunk: usize) {
        let len = self.addressed.len().max(chunk + 1);
        self.addressed.resize(len, 0);
        self.had.resize(len, 0);
    }

    /// The switch sends a chunk to a member.
    pub fn address(&mut self, member: usize, chunk: usize) {
        self.grow(chunk);
        self.addressed[chunk] |= 1 << member;
        let living = self.addressed[chunk] & !self.dead();
        if living.count_ones() > 1 {
            self.complain("a frame was sent to two members that live");
        }
    }

    /// A member's host has a chunk.
    pub fn have(&mut self, member: usize, chunk: usize) {
        self.grow(chunk);
        self.had[chunk] |= 1 << member;
    }

    /// A member's program was given a frame.
    pub fn give(&mut self, member: usize, frame: usize, order: Order, order_of: impl Fn(usize) -> Order) {
        self.grow(frame);
        if self.members[member].given.contains(&frame) {
            self.complain("a program was given a frame twice");
        }
        let living = self.members.iter().filter(|other| !other.is_dead && other.given.contains(&frame)).count();
        if living > 0 && !self.members[member].is_dead {
            self.complain("two programs were given a frame");
        }
        // What is sent a second time after a death comes late.
        let is_first_time = |frame: usize| self.addressed[frame].count_ones() <= 1;
        let is_before = |other: &usize| is_first_time(*other) && order_of(*other) == order && *other > frame;
        if order != Order::None && is_first_time(frame) && self.members[member].given.iter().any(is_before) {
            self.complain("a program was given frames out of order");
        }
        self.members[member].given.push(frame);
    }

    /// The peer is told that a chunk has come.
    pub fn acknowledge(&mut self, chunk: usize) {
        self.grow(chunk);
        if self.had[chunk] == 0 {
            self.complain("what no member has was acknowledged");
        }
    }

    /// It is over, and quiet: each of these frames must be somewhere.
    pub fn close(&mut self, frames: impl Iterator<Item = usize>) {
        for frame in frames {
            self.grow(frame);
            let is_given = self.members.iter().any(|member| member.given.contains(&frame));
            // What a dead member had acknowledged died with it.
            let is_dead = self.had[frame] & self.dead() != 0;
            if !is_given && !is_dead {
                self.complain("a frame was lost");
            }
        }
    }

    fn dead(&self) -> u64 {
        (0..).zip(&self.members).filter(|(_, member)| member.is_dead).map(|(at, _)| 1_u64 << at).sum()
    }

    /// Something that must not happen has.
    pub fn note(&mut self, wrong: &'static str) {
        self.complain(wrong);
    }

    /// What was wrong first.
    pub const fn wrong(&self) -> Option<&'static str> {
        self.wrong
    }
}
