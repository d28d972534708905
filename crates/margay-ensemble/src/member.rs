//! The endpoint table: what the switch keeps of each member (Table 2 of the paper).

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::fmt;
use core::time::Duration;

use margay_core::Instant;

use crate::number::{Csn, Lsn, Row, Serial};
use crate::repeat::Repeat;

/// Members that a connection may have at once.
pub const MEMBERS_MAX: usize = 64;
/// Streams that a member may have towards the peer.
pub const MEMBER_STREAMS_MAX: u16 = 64;
/// A member is told at once what the peer has of its when there is so much to tell, in chunks.
const UNTOLD_MAX: u32 = 2;

/// A member of one connection's ensemble. One that comes later has another, also where it takes the place of one that
/// is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MemberId {
    pub(crate) slot: u8,
    pub(crate) turn: u32,
}

impl MemberId {
    pub(crate) fn slot(self) -> usize {
        usize::from(self.slot)
    }
}

impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "member {}.{}", self.slot, self.turn)
    }
}

/// What a member's host understands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Watermarks: it is one of Margay's.
    Margay,
    /// RFC 8260 and no more: holes are reserved for, and patched.
    Foreign,
}

/// What is known of a member that joins.
#[derive(Clone, Copy, Debug)]
pub struct Joining {
    /// What its host understands.
    pub kind: Kind,
    /// The first number of what it is sent.
    pub to_member: Lsn,
    /// The first number of what it sends.
    pub from_member: Lsn,
    /// Bytes that it has room for.
    pub window_bytes: u32,
}

/// What one number of a member's space is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Link {
    /// A chunk that it was given.
    Chunk(Csn),
    /// What has not come yet, should it become this member's.
    Reserved { csn: Csn, mid: u32 },
    /// Nothing: what it was reserved for went elsewhere (redirect patch). Released by I-FORWARD-TSN when its turn
    /// comes.
    Patched { mid: u32 },
}

/// How a member of Margay's is told what is complete.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Watermarks {
    /// The greatest number of what is its before the oldest hole.
    pub(crate) lsn: Lsn,
    /// Behind the last frame in order that it was given.
    pub(crate) ordered_to: Csn,
    /// The greatest that it was told.
    pub(crate) told: Csn,
    /// The greatest that it has confirmed.
    pub(crate) confirmed: Csn,
    /// When it joined, this was next: of use to broken variants alone.
    pub(crate) joined_at: Csn,
    pub(crate) repeat: Repeat,
}

/// How numbers are kept free for what has not come, at a member that knows no watermarks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Patches {
    /// All holes before this one have a number at the member.
    pub(crate) reserved_to: Csn,
    /// The MID of its next frame in order.
    pub(crate) next_mid: u32,
    /// Up to here it was told that nothing will come.
    pub(crate) forwarded: Option<(Lsn, u32)>,
    pub(crate) repeat: Repeat,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Sequencing {
    Watermarks(Watermarks),
    Patches(Patches),
}

/// What the switch keeps of a member.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Member {
    pub(crate) id: MemberId,
    pub(crate) is_draining: bool,
    /// As a sink: its chain, by its numbers, from the oldest that is not acknowledged.
    pub(crate) chain: Row<Lsn, Link>,
    pub(crate) sequencing: Sequencing,
    /// By stream of the peer, the MID of the next frame that it is given.
    pub(crate) streams: BTreeMap<u16, u32>,
    pub(crate) window_bytes: u32,
    pub(crate) round_trip: Option<Duration>,
    /// As a source: the connection's number for each of its own, from the oldest that is not acknowledged.
    pub(crate) sources: Row<Lsn, Csn>,
    /// What it has sent has come, or comes again.
    pub(crate) is_sack_due: bool,
    /// Chunks of its that the peer has acknowledged for good, and it has not heard of.
    untold: u32,
    /// When it hears of them at the latest.
    sack_at: Option<Instant>,
}

impl Member {
    pub(crate) fn new(id: MemberId, joining: &Joining, oldest: Csn, mark: Csn, next: Csn) -> Self {
        let sequencing = match joining.kind {
            Kind::Margay => Sequencing::Watermarks(Watermarks {
                lsn: joining.to_member.previous(),
                ordered_to: mark,
                told: mark,
                confirmed: mark,
                joined_at: next,
                repeat: Repeat::default(),
            }),
            Kind::Foreign => Sequencing::Patches(Patches {
                reserved_to: oldest,
                next_mid: 0,
                forwarded: None,
                repeat: Repeat::default(),
            }),
        };
        Self {
            id,
            is_draining: false,
            chain: Row::new(joining.to_member.0),
            sequencing,
            streams: BTreeMap::new(),
            window_bytes: joining.window_bytes,
            round_trip: None,
            sources: Row::new(joining.from_member.0),
            is_sack_due: false,
            untold: 0,
            sack_at: None,
        }
    }

    /// A round trip to the member took so long (RFC 6298, 2.3).
    pub(crate) fn note_round_trip(&mut self, took: Duration) {
        self.round_trip = Some(self.round_trip.map_or(took, |smoothed| (smoothed * 7 + took) / 8));
    }

    /// The peer has a chunk of its for good. A member that hears of each would get a packet for each answer; one that
    /// hears of none would fill its window (RFC 9260, 6.2: of every second at least, and within a time).
    pub(crate) fn note_taken(&mut self, now: Instant, delay: Duration) {
        self.untold += 1;
        self.is_sack_due |= self.untold >= UNTOLD_MAX || self.is_draining || delay.is_zero();
        self.sack_at = self.sack_at.or(Some(now + delay));
    }

    /// Something is sent to it: what it would hear of later goes along.
    pub(crate) fn hasten_sack(&mut self) {
        self.is_sack_due |= self.sack_at.is_some();
    }

    /// Whether it is to be told now what the peer has of its; it counts as told then.
    pub(crate) fn take_sack_due(&mut self, now: Instant) -> bool {
        let is_due = self.is_sack_due || self.sack_at.is_some_and(|at| at <= now);
        if is_due {
            (self.is_sack_due, self.untold, self.sack_at) = (false, 0, None);
        }
        is_due
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let repeat = match &self.sequencing {
            Sequencing::Watermarks(marks) => marks.repeat.due(),
            Sequencing::Patches(patches) => patches.repeat.due(),
        };
        repeat.into_iter().chain(self.sack_at).min()
    }

    pub(crate) fn patches(&mut self) -> Option<&mut Patches> {
        match &mut self.sequencing {
            Sequencing::Patches(patches) => Some(patches),
            Sequencing::Watermarks(_) => None,
        }
    }

    pub(crate) fn watermarks(&mut self) -> Option<&mut Watermarks> {
        match &mut self.sequencing {
            Sequencing::Watermarks(marks) => Some(marks),
            Sequencing::Patches(_) => None,
        }
    }
}

/// The members of one connection.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Members {
    slots: Vec<Option<Member>>,
    turn: u32,
}

impl Members {
    /// A name for one more.
    pub(crate) fn free(&self) -> Option<MemberId> {
        let slot = self.slots.iter().position(Option::is_none).unwrap_or(self.slots.len());
        let slot = u8::try_from(slot).ok().filter(|_| slot < MEMBERS_MAX)?;
        Some(MemberId { slot, turn: self.turn })
    }

    pub(crate) fn insert(&mut self, member: Member) {
        self.turn = self.turn.wrapping_add(1);
        let slot = member.id.slot();
        if slot == self.slots.len() {
            self.slots.push(None);
        }
        self.slots[slot] = Some(member);
    }

    pub(crate) fn remove(&mut self, id: MemberId) -> Option<Member> {
        self.slots.get_mut(id.slot())?.take_if(|member| member.id == id)
    }

    pub(crate) fn get(&self, id: MemberId) -> Option<&Member> {
        self.slots.get(id.slot())?.as_ref().filter(|member| member.id == id)
    }

    pub(crate) fn get_mut(&mut self, id: MemberId) -> Option<&mut Member> {
        self.slots.get_mut(id.slot())?.as_mut().filter(|member| member.id == id)
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Member> {
        self.slots.iter().flatten()
    }

    pub(crate) fn all_mut(&mut self) -> impl Iterator<Item = &mut Member> {
        self.slots.iter_mut().flatten()
    }

    /// Those that take new frames.
    pub fn active(&self) -> impl Iterator<Item = MemberId> + '_ {
        self.all().filter(|member| !member.is_draining).map(|member| member.id)
    }

    /// Whether this one takes new frames.
    pub fn is_active(&self, id: MemberId) -> bool {
        self.get(id).is_some_and(|member| !member.is_draining)
    }

    /// Bytes that a member has said it has room for.
    pub fn window_bytes(&self, id: MemberId) -> Option<u32> {
        self.get(id).map(|member| member.window_bytes)
    }

    /// Chunks that a member has not acknowledged, and numbers that are kept free for it.
    pub fn in_flight(&self, id: MemberId) -> Option<usize> {
        self.get(id).map(|member| member.chain.len())
    }

    /// Numbers of a member that are kept free: for what has not come from the peer and may become the member's, and for
    /// what went elsewhere (redirect patches). None at members that know watermarks.
    pub fn patches(&self, id: MemberId) -> Option<usize> {
        let is_patch = |link: &Link| !matches!(link, Link::Chunk(_));
        Some(self.get(id)?.chain.iter().filter(|(_, link)| is_patch(link)).count())
    }

    /// The smoothed round trip to a member: from a chunk to its acknowledgement.
    pub fn round_trip(&self, id: MemberId) -> Option<Duration> {
        self.get(id)?.round_trip
    }
}
