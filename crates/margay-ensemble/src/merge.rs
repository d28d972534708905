//! From the members to the peer: the frame ring of what is outbound (§4.1 and 4.2 of the paper).
//!
//! Whose a hole is, is known here: gaps in a member's numbers become gaps in the connection's. Towards the peer each
//! member has streams of its own, and so none waits for another.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::time::Duration;

use margay_core::Instant;
use margay_wire::sctp::{GapBlock, IDataFlags, IDataRepr, Sack, SkippedRepr};

use crate::acknowledgement::{gap_blocks, reported};
use crate::config::Config;
use crate::counters::Dropped;
use crate::member::{MEMBER_STREAMS_MAX, Member, MemberId, Members};
use crate::number::{Csn, Lsn, Row, Serial};
use crate::outbox::{Outbox, To};
use crate::repeat::Repeat;
use crate::split::{FrameKey, key_of};

/// A member that may send less than so many bytes hears at once when there is more room: four packets.
const LITTLE_BYTES: u32 = 5000;

/// A place of the ring (Table 3 of the paper).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Place {
    /// It has not come from its member.
    Hole,
    /// The peer was given it.
    Sent {
        /// Whose it is.
        member: MemberId,
        /// As the peer knows it.
        repr: IDataRepr,
        /// For now: the peer may take it back.
        is_acked: bool,
    },
    /// Its member is gone, and nobody can repeat it.
    Abandoned(Option<SkippedRepr>),
}

/// MIDs of a stream towards the peer, which several members may have had, one after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Mids {
    /// Where the present member's begin.
    base: u32,
    /// Behind the greatest.
    next: u32,
}

/// How much of a frame of several chunks has come from its member.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Progress {
    come: u32,
    total: Option<u32>,
}

/// Per-flow state of what is outbound (Table 4 of the paper).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Merge {
    window: u32,
    sack_delay: Duration,
    ring: Row<Csn, Place>,
    mids: BTreeMap<(u16, bool), Mids>,
    /// Frames of which some chunks have come and others not, as the peer knows them.
    open: BTreeMap<FrameKey, Progress>,
    /// Up to here the peer was told that nothing will come.
    forwarded: Option<Csn>,
    repeat: Repeat,
    /// Bytes that the peer has room for.
    window_bytes: u32,
}

impl Merge {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            window: config.window(),
            sack_delay: config.sack_delay,
            ring: Row::new(config.to_peer.0),
            mids: BTreeMap::new(),
            open: BTreeMap::new(),
            forwarded: None,
            repeat: Repeat::default(),
            window_bytes: 0,
        }
    }

    /// A member has a place that another may have had: its frames follow that one's.
    pub(crate) fn welcome(&mut self, id: MemberId) {
        for ((stream, _), mids) in &mut self.mids {
            if is_stream_of(id, *stream) {
                mids.base = mids.next;
            }
        }
    }

    /// A chunk of a member: as the peer shall know it.
    pub(crate) fn take(&mut self, member: &mut Member, repr: &IDataRepr) -> Result<IDataRepr, Dropped> {
        let lsn = Lsn(repr.tsn);
        if lsn.is_before(member.sources.first()) {
            // The acknowledgement was lost.
            member.is_sack_due = true;
            return Err(Dropped::Duplicate);
        }
        if repr.stream >= MEMBER_STREAMS_MAX || self.open.len() > self.window as usize {
            return Err(Dropped::Bound);
        }
        let csn = match member.sources.get(lsn) {
            Some(csn) => *csn,
            None => self.make_place(member, lsn)?,
        };
        let stream = u16::from(member.id.slot) * MEMBER_STREAMS_MAX + repr.stream;
        let mids = self.mids.entry((stream, repr.is_unordered())).or_default();
        let mid = mids.base.wrapping_add(repr.mid);
        let place = self.ring.get_mut(csn).ok_or(Dropped::Duplicate)?;
        let onward = IDataRepr { tsn: csn.0, stream, mid, ..*repr };
        match place {
            Place::Hole => {
                mids.next = Csn(mids.next).later(Csn(mid.wrapping_add(1))).0;
                *place = Place::Sent { member: member.id, repr: onward, is_acked: false };
                self.note_progress(&onward);
            }
            Place::Sent { repr: was, .. } => {
                let steady = |repr: IDataRepr| IDataRepr { flags: repr.flags - IDataFlags::IMMEDIATE, ..repr };
                if steady(*was) != steady(onward) {
                    return Err(Dropped::Differs);
                }
            }
            Place::Abandoned(_) => return Err(Dropped::Duplicate),
        }
        Ok(onward)
    }

    fn note_progress(&mut self, repr: &IDataRepr) {
        if repr.begins() && repr.ends() {
            return;
        }
        let progress = self.open.entry(key_of(repr)).or_default();
        progress.come += 1;
        if repr.ends() {
            progress.total = Some(repr.fragment() + 1);
        }
        if progress.total == Some(progress.come) {
            self.open.remove(&key_of(repr));
        }
    }

    /// Whether all that is known of has come from a member, and the peer has it.
    pub(crate) fn is_done_with(&self, member: &Member) -> bool {
        member.sources.is_empty() && !self.open.keys().any(|key| is_stream_of(member.id, key.0))
    }

    /// Numbers for a member's chunk that is new, and for those before it that are late.
    fn make_place(&mut self, member: &mut Member, lsn: Lsn) -> Result<Csn, Dropped> {
        let late = lsn.since(member.sources.next());
        // What wraps around is no less than 2^31, and beyond every window.
        let room = self.window.saturating_sub(self.ring.len() as u32);
        if late >= room {
            return Err(Dropped::BeyondWindow);
        }
        for _ in 0..=late {
            member.sources.push(self.ring.push(Place::Hole));
        }
        Ok(self.ring.next().previous())
    }

    /// The peer's SACK.
    pub(crate) fn sack(&mut self, members: &mut Members, now: Instant, sack: &Sack<'_>) -> Result<(), Dropped> {
        let behind = Csn(sack.cumulative).plus(1);
        if behind.is_before(self.ring.first()) {
            // Overtaken by a later one.
            return Ok(());
        }
        let covered = behind.since(self.ring.first()) as usize;
        let reported = self.reported(covered, sack)?;
        let had_little = self.window_bytes(members) < LITTLE_BYTES;
        self.window_bytes = sack.window_bytes;
        // The peer has read: it may have acknowledged all long before, and members would hear of room when they ask.
        if had_little && self.window_bytes(members) >= LITTLE_BYTES {
            members.all_mut().for_each(|member| member.is_sack_due = true);
        }
        for _ in 0..covered {
            if let Some(Place::Sent { member, .. }) = self.ring.pop()
                && let Some(member) = members.get_mut(member)
            {
                // Its numbers and the connection's rise together: its oldest is this one.
                member.sources.pop();
                member.note_taken(now, self.sack_delay);
            }
        }
        for ((_, place), is_reported) in self.ring.iter_mut().zip(reported) {
            if let Place::Sent { member, is_acked, .. } = place
                && *is_acked != is_reported
            {
                *is_acked = is_reported;
                if let Some(member) = members.get_mut(*member) {
                    member.is_sack_due = true;
                }
            }
        }
        Ok(())
    }

    /// Which places behind the `covered` first ones a SACK reports, up to the last that it does.
    fn reported(&self, covered: usize, sack: &Sack<'_>) -> Result<Vec<bool>, Dropped> {
        let first = self.ring.first();
        let was_sent = |at: usize| match self.ring.get(first.plus(at as u32)) {
            Some(Place::Sent { .. } | Place::Abandoned(_)) => true,
            Some(Place::Hole) | None => false,
        };
        reported(sack, covered, self.ring.len(), was_sent)
    }

    /// What a member is told: up to where the peer has all of its, and what is behind that.
    pub(crate) fn acknowledged(&self, member: &Member) -> (Lsn, impl Iterator<Item = GapBlock>) {
        let is_acked = |csn: &Csn| matches!(self.ring.get(*csn), Some(Place::Sent { is_acked: true, .. }));
        (member.sources.first().previous(), gap_blocks(member.sources.iter().map(move |(_, csn)| is_acked(csn))))
    }

    /// The peer's room, shared out evenly (conservative, §6.1 of the paper).
    pub(crate) fn window_bytes(&self, members: &Members) -> u32 {
        let sources = members.all().count().max(1);
        self.window_bytes / u32::try_from(sources).unwrap_or(u32::MAX)
    }

    /// Bytes that the peer has said it has room for.
    pub(crate) const fn peer_window_bytes(&self) -> u32 {
        self.window_bytes
    }

    /// Chunks of a member that have not come, though later ones have.
    pub(crate) fn holes_of(&self, member: &Member) -> usize {
        member.sources.iter().filter(|(_, csn)| matches!(self.ring.get(**csn), Some(Place::Hole))).count()
    }

    pub(crate) fn set_window_bytes(&mut self, window_bytes: u32) {
        self.window_bytes = window_bytes;
    }

    /// What a member that is gone has sent, and the peer has not acknowledged, will not come.
    pub(crate) fn abandon(&mut self, member: &Member) {
        for (_, csn) in member.sources.iter() {
            if let Some(place) = self.ring.get_mut(*csn) {
                let skipped = match place {
                    Place::Sent { repr, .. } => {
                        Some(SkippedRepr { stream: repr.stream, is_unordered: repr.is_unordered(), mid: repr.mid })
                    }
                    Place::Hole | Place::Abandoned(_) => None,
                };
                *place = Place::Abandoned(skipped);
            }
        }
        // The peer may have begun frames for good whose ends never came here. There is no number to pass over, so each
        // of the member's streams is given one: whoever has its place next would wait for ever.
        let mut cut = BTreeMap::new();
        for (stream, is_unordered, mid) in self.open.keys().filter(|key| is_stream_of(member.id, key.0)) {
            let last = cut.entry((*stream, *is_unordered)).or_insert(*mid);
            *last = Csn(*last).later(Csn(*mid)).0;
        }
        for ((stream, is_unordered), mid) in cut {
            self.ring.push(Place::Abandoned(Some(SkippedRepr { stream, is_unordered, mid })));
        }
        self.open.retain(|key, _| !is_stream_of(member.id, key.0));
    }

    /// Tells the peer of what will not come, once all before it has been acknowledged.
    pub(crate) fn release(&mut self, now: Instant, outbox: &mut Outbox) {
        let mut to = None;
        let mut skipped = BTreeMap::new();
        for (csn, place) in self.ring.iter() {
            let Place::Abandoned(of) = place else { break };
            to = Some(csn);
            if let Some(of) = of {
                let mid = skipped.entry((of.stream, of.is_unordered)).or_insert(of.mid);
                *mid = Csn(*mid).later(Csn(of.mid)).0;
            }
        }
        let Some(to) = to else { return self.repeat.stop() };
        if self.forwarded.is_none_or(|was| was.is_before(to)) {
            self.forwarded = Some(to);
            self.repeat.start(now);
        } else if !self.repeat.is_due(now) {
            return;
        }
        let skipped =
            skipped.into_iter().map(|((stream, is_unordered), mid)| SkippedRepr { stream, is_unordered, mid });
        outbox.forward(To::Peer, to.0, &skipped.collect::<Vec<_>>());
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.repeat.due()
    }
}

/// Whether a stream towards the peer is a member's.
fn is_stream_of(id: MemberId, stream: u16) -> bool {
    stream / MEMBER_STREAMS_MAX == u16::from(id.slot)
}
