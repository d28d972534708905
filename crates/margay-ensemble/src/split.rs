//! From the peer to the members: the frame ring of what is inbound (§4.1 and 4.2 of the paper).
//!
//! The ring has a place for each of the peer's numbers from the oldest that is not acknowledged. A place that is
//! *pending* (a hole, or a frame whose member died) may become any member's; what is behind it in the peer's order must
//! not be given on by a member that could still get it.
//!
//! The paper's `flow.left` is `flow.una` here: what is acknowledged for good is known by its number alone when it comes
//! again.

use alloc::borrow::Cow;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use margay_core::Instant;
use margay_wire::sctp::{GapBlock, I_DATA_PAYLOAD_MAX, IDataFlags, IDataRepr, Sack};

use crate::acknowledgement::{gap_blocks, reported};
use crate::config::{Config, Failure, LossDetection};
use crate::counters::Dropped;
use crate::member::{Link, Member, MemberId, Members, Sequencing};
use crate::number::{Csn, Lsn, Row, Serial};
use crate::plugin::{Frame, Order, Plugin, Verdict};
use crate::rules::Rules;

/// Streams that a peer may have towards an ensemble, beside the frames in order per member.
pub const STREAMS_MAX: usize = 256;

/// How far a chunk's acknowledgement by its member goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Acked {
    No,
    /// The member may take it back (RFC 9260, 6.2).
    Gap,
    /// For good.
    Cumulative,
}

/// A chunk that a member was given.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Held {
    pub(crate) member: MemberId,
    /// As the member knows it.
    pub(crate) lsn: Lsn,
    pub(crate) mid: u32,
    /// As the peer sent it.
    pub(crate) repr: IDataRepr,
    /// The first chunk of its frame.
    pub(crate) first: Csn,
    pub(crate) acked: Acked,
    /// Its member has reported something behind it, and not this.
    pub(crate) is_missing: bool,
    pub(crate) is_safe: bool,
    pub(crate) rtx: u64,
    /// When it was given, as long as that is not ambiguous.
    sent_at: Option<Instant>,
}

/// A place of the ring (Table 3 of the paper).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Place {
    /// It has not come.
    Hole,
    /// A member was given it.
    Held(Held),
    /// Its member died with it; it goes elsewhere when the peer repeats it.
    Orphan { repr: IDataRepr, is_safe: bool, rtx: u64 },
}

/// Stream, whether without order, and message identifier, as the peer has them.
pub(crate) type FrameKey = (u16, bool, u32);

/// A frame of several chunks, from its first to the acknowledgement of all.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct OpenFrame {
    pub(crate) first: Csn,
    pub(crate) member: MemberId,
    /// At the member.
    pub(crate) mid: u32,
    pub(crate) is_safe: bool,
    /// Chunks that are acknowledged.
    pub(crate) acked: u32,
    /// How many there are, once the last has come.
    pub(crate) total: Option<u32>,
}

impl OpenFrame {
    pub(crate) fn is_complete(&self) -> bool {
        self.total == Some(self.acked)
    }
}

/// A stream of the peer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Stream {
    pub(crate) member: Option<MemberId>,
    /// What is added to the peer's MIDs.
    pub(crate) offset: u32,
    /// Behind the greatest MID that has come.
    pub(crate) top: u32,
    /// How many frames have come.
    pub(crate) count: u32,
    /// Behind the last frame that has left the ring.
    pub(crate) retired: u32,
    /// Chunks that are not acknowledged for good.
    pub(crate) unacked: u32,
    /// What the plug-in said when it was redirected.
    pub(crate) is_safe: bool,
}

impl Stream {
    /// All that was sent has come and is acknowledged: its next frame may go elsewhere.
    fn is_idle(&self) -> bool {
        self.unacked == 0 && self.count == self.top
    }
}

pub(crate) fn key_of(repr: &IDataRepr) -> FrameKey {
    (repr.stream, repr.is_unordered(), repr.mid)
}

pub(crate) fn order_of(repr: &IDataRepr) -> Order {
    match repr.stream {
        _ if repr.is_unordered() => Order::None,
        0 => Order::Member,
        stream => Order::Stream(stream),
    }
}

fn is_whole(repr: &IDataRepr) -> bool {
    repr.begins() && repr.ends()
}

/// What the split of a chunk needs besides.
pub(crate) struct Around<'a, P> {
    pub(crate) now: Instant,
    pub(crate) config: &'a Config,
    pub(crate) members: &'a mut Members,
    pub(crate) plugin: &'a mut P,
}

impl<P: Plugin> Around<'_, P> {
    fn frame<'b>(&self, repr: &IDataRepr, payload: &'b [u8]) -> Frame<'b> {
        Frame {
            connection: self.config.connection,
            order: order_of(repr),
            is_whole: is_whole(repr),
            payload: Cow::Borrowed(payload),
        }
    }
}

/// Why a chunk goes nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nowhere {
    Dropped(Dropped),
    Failed(Failure),
}

impl From<Dropped> for Nowhere {
    fn from(dropped: Dropped) -> Self {
        Self::Dropped(dropped)
    }
}

impl From<Failure> for Nowhere {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

/// Where a chunk goes, with what number and bytes.
pub(crate) struct Onward<'a> {
    pub(crate) member: MemberId,
    pub(crate) repr: IDataRepr,
    pub(crate) payload: Cow<'a, [u8]>,
}

/// What was decided of a chunk that is new.
struct Decision {
    member: MemberId,
    is_safe: bool,
    rtx: u64,
    /// The frame's, where this is not its first chunk.
    open: Option<(Csn, u32)>,
}

/// Per-flow state of what is inbound (Table 4 of the paper).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Split {
    window: u32,
    pub(crate) ring: Row<Csn, Place>,
    pub(crate) open: BTreeMap<FrameKey, OpenFrame>,
    pub(crate) streams: BTreeMap<u16, Stream>,
    /// The oldest pending place: all before has been decided.
    pub(crate) mark: Csn,
    /// Where all frames to come go, and whether they are safe.
    pub(crate) pinned: Option<(MemberId, bool)>,
    pub(crate) is_sack_due: bool,
}

impl Split {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            window: config.window(),
            ring: Row::new(config.from_peer.0),
            open: BTreeMap::new(),
            streams: BTreeMap::new(),
            mark: config.from_peer,
            pinned: None,
            is_sack_due: false,
        }
    }

    /// A chunk of the peer: where it goes.
    pub(crate) fn take<'a, P: Plugin>(
        &mut self,
        around: &mut Around<'_, P>,
        repr: &IDataRepr,
        payload: &'a [u8],
    ) -> Result<Onward<'a>, Nowhere> {
        let csn = Csn(repr.tsn);
        if csn.is_before(self.ring.first()) {
            // The acknowledgement was lost.
            self.is_sack_due = true;
            return Err(Dropped::Duplicate.into());
        }
        if csn.since(self.ring.first()) >= self.window {
            return Err(Dropped::BeyondWindow.into());
        }
        match self.ring.get(csn) {
            Some(Place::Held(_)) => return self.take_again(around, csn, repr, payload),
            Some(Place::Orphan { repr: was, .. }) if !is_same(was, repr) => return Err(Dropped::Differs.into()),
            _ => {}
        }
        let mut frame = around.frame(repr, payload);
        let decision = self.decide(around, csn, repr, &mut frame)?;
        let payload = checked(frame.payload)?;
        let (lsn, mid) = self.assign(around.members, csn, repr, &decision)?;
        self.note(csn, repr, &decision, lsn, mid, around.now);
        self.resolve(around.members, csn);
        Ok(Onward { member: decision.member, repr: outgoing(repr, lsn, mid), payload })
    }

    /// A chunk that a member was given already: it keeps its numbers.
    fn take_again<'a, P: Plugin>(
        &mut self,
        around: &mut Around<'_, P>,
        csn: Csn,
        repr: &IDataRepr,
        payload: &'a [u8],
    ) -> Result<Onward<'a>, Nowhere> {
        let Some(Place::Held(held)) = self.ring.get_mut(csn) else { return Err(Dropped::Duplicate.into()) };
        if !is_same(&held.repr, repr) {
            return Err(Dropped::Differs.into());
        }
        if held.acked == Acked::Cumulative {
            self.is_sack_due = true;
            return Err(Dropped::Duplicate.into());
        }
        // Which of the two will be acknowledged? (Karn)
        held.sent_at = None;
        let mut frame = around.frame(repr, payload);
        if repr.begins() {
            around.plugin.again(&mut frame, &mut held.rtx);
        }
        let payload = checked(frame.payload)?;
        Ok(Onward { member: held.member, repr: outgoing(repr, held.lsn, held.mid), payload })
    }

    /// Whose a chunk is that no living member has.
    fn decide<P: Plugin>(
        &mut self,
        around: &mut Around<'_, P>,
        csn: Csn,
        repr: &IDataRepr,
        frame: &mut Frame<'_>,
    ) -> Result<Decision, Nowhere> {
        if !repr.begins() {
            let open = self.open.get(&key_of(repr)).ok_or(Dropped::BeforeFirst)?;
            // Its place is behind the first's, or nobody will know when the frame is over.
            let is_in_place = open.first.is_before(csn) && open.total.is_none_or(|total| repr.fragment() < total);
            if !is_in_place || around.members.get(open.member).is_none() {
                return Err(Dropped::BeforeFirst.into());
            }
            let (member, is_safe) = (open.member, open.is_safe);
            return Ok(Decision { member, is_safe, rtx: 0, open: Some((open.first, open.mid)) });
        }
        if !repr.ends() && self.open.len() >= self.window as usize {
            return Err(Dropped::Bound.into());
        }
        let orphan = match self.ring.get(csn) {
            Some(Place::Orphan { is_safe, rtx, .. }) => Some((*is_safe, *rtx)),
            _ => None,
        };
        if let Some((false, rtx)) = orphan {
            return refuse(around, csn, repr, frame, rtx);
        }
        let mut rtx = orphan.map_or(0, |(_, rtx)| rtx);
        if let Order::Stream(number) = frame.order
            && let Some(member) = self.follow(around.members, number, repr.mid)?
        {
            let is_safe = self.streams.get(&number).is_some_and(|stream| stream.is_safe);
            around.plugin.follow(frame, member, &mut rtx);
            return Ok(Decision { member, is_safe, rtx, open: None });
        }
        let (member, is_safe) = self.redirect(around, frame, &mut rtx)?;
        Ok(Decision { member, is_safe, rtx, open: None })
    }

    /// The member that a stream's frame must go to; nobody where the stream may be redirected.
    fn follow(&mut self, members: &Members, number: u16, mid: u32) -> Result<Option<MemberId>, Dropped> {
        let is_known = self.streams.contains_key(&number);
        if !is_known && self.streams.len() >= STREAMS_MAX {
            return Err(Dropped::Bound);
        }
        let fresh = Stream::default();
        let stream = self.streams.get(&number).unwrap_or(&fresh);
        let is_next = mid == stream.top;
        let frames = self.open.range((number, false, 0)..=(number, false, u32::MAX));
        let is_idle = stream.is_idle() && frames.map(|(_, open)| open).all(OpenFrame::is_complete);
        match stream.member.filter(|id| members.get(*id).is_some()) {
            _ if is_next && is_idle => Ok(None),
            // Also to one that drains: its acknowledgements may wait for this very frame.
            Some(member) => Ok(Some(member)),
            None => Err(Dropped::BeforeFirst),
        }
    }

    fn redirect<P: Plugin>(
        &mut self,
        around: &mut Around<'_, P>,
        frame: &mut Frame<'_>,
        rtx: &mut u64,
    ) -> Result<(MemberId, bool), Nowhere> {
        if let Some((pinned, is_safe)) = self.pinned {
            let is_there = around.members.get(pinned).is_some();
            if !is_there {
                return Err(Failure::PinnedMemberGone.into());
            }
            around.plugin.follow(frame, pinned, rtx);
            return Ok((pinned, is_safe));
        }
        if around.members.active().next().is_none() {
            return Err(Dropped::NoMember.into());
        }
        match around.plugin.redirect(frame, around.members, rtx) {
            Verdict::Drop => Err(Dropped::Plugin.into()),
            Verdict::To { member, .. } if !around.members.is_active(member) => Err(Dropped::NoMember.into()),
            Verdict::To { member, is_safe, pins } => {
                self.pinned = pins.then_some((member, is_safe));
                Ok((member, is_safe))
            }
        }
    }

    /// Numbers for a chunk in the space of its member.
    fn assign(
        &mut self,
        members: &mut Members,
        csn: Csn,
        repr: &IDataRepr,
        decision: &Decision,
    ) -> Result<(Lsn, u32), Dropped> {
        let member = members.get_mut(decision.member).ok_or(Dropped::NoMember)?;
        let link = Link::Chunk(csn);
        let order = order_of(repr);
        // Each pending place is reserved for once, so this is reached by patches alone that nothing releases.
        if member.chain.len() >= 2 * self.window as usize {
            return Err(Dropped::Bound);
        }
        if let Some((_, mid)) = decision.open {
            return Ok((member.chain.push(link), mid));
        }
        match (order, &mut member.sequencing) {
            (Order::None, _) => Ok((member.chain.push(link), repr.mid)),
            (Order::Stream(number), _) => {
                let stream = self.streams.entry(number).or_default();
                let next = member.streams.entry(number).or_default();
                if stream.member != Some(member.id) {
                    stream.member = Some(member.id);
                    stream.offset = next.wrapping_sub(repr.mid);
                }
                stream.is_safe = decision.is_safe;
                let mid = repr.mid.wrapping_add(stream.offset);
                *next = later_mid(*next, mid.wrapping_add(1));
                Ok((member.chain.push(link), mid))
            }
            // Its place in the peer's order is what the member puts it in order by.
            (Order::Member, Sequencing::Watermarks(marks)) => {
                marks.ordered_to = marks.ordered_to.later(csn.plus(1));
                Ok((member.chain.push(link), csn.0))
            }
            (Order::Member, Sequencing::Patches(_)) => Ok(self.assign_in_order(member, csn)),
        }
    }

    /// A place in order at a member that knows no watermarks: what is pending before it is reserved for.
    fn assign_in_order(&self, member: &mut Member, csn: Csn) -> (Lsn, u32) {
        let Sequencing::Patches(patches) = &mut member.sequencing else { return (member.chain.next(), 0) };
        if csn.is_before(patches.reserved_to) {
            let is_for_it =
                |(_, link): &(Lsn, &mut Link)| matches!(**link, Link::Reserved { csn: of, .. } if of == csn);
            if let Some((lsn, link)) = member.chain.iter_mut().find(is_for_it)
                && let Link::Reserved { mid, .. } = *link
            {
                *link = Link::Chunk(csn);
                return (lsn, mid);
            }
        } else {
            let mut at = patches.reserved_to.later(self.ring.first());
            while at.is_before(csn) {
                // What is behind the ring's end is pending, too.
                if !matches!(self.ring.get(at), Some(Place::Held(_))) {
                    member.chain.push(Link::Reserved { csn: at, mid: patches.next_mid });
                    patches.next_mid = patches.next_mid.wrapping_add(1);
                }
                at = at.plus(1);
            }
            patches.reserved_to = csn.plus(1);
        }
        // Behind everything: also what comes late because its member died.
        let mid = patches.next_mid;
        patches.next_mid = mid.wrapping_add(1);
        (member.chain.push(Link::Chunk(csn)), mid)
    }

    /// Notes in the ring, and of its frame and stream, whose a chunk is.
    fn note(&mut self, csn: Csn, repr: &IDataRepr, decision: &Decision, lsn: Lsn, mid: u32, now: Instant) {
        let member = decision.member;
        let first = decision.open.map_or(csn, |(first, _)| first);
        if repr.begins() && !repr.ends() {
            let open = OpenFrame { first, member, mid, is_safe: decision.is_safe, acked: 0, total: None };
            self.open.insert(key_of(repr), open);
        }
        if repr.ends()
            && let Some(open) = self.open.get_mut(&key_of(repr))
        {
            open.total = Some(repr.fragment() + 1);
        }
        if let Order::Stream(number) = order_of(repr) {
            let stream = self.streams.entry(number).or_default();
            stream.unacked += 1;
            if repr.begins() {
                stream.count = stream.count.wrapping_add(1);
                stream.top = later_mid(stream.top, repr.mid.wrapping_add(1));
            }
        }
        let place = Place::Held(Held {
            member,
            lsn,
            mid,
            repr: *repr,
            first,
            acked: Acked::No,
            is_missing: false,
            is_safe: decision.is_safe,
            rtx: decision.rtx,
            sent_at: Some(now),
        });
        while !csn.is_before(self.ring.next()) {
            self.ring.push(Place::Hole);
        }
        if let Some(was) = self.ring.get_mut(csn) {
            *was = place;
        }
    }

    /// A place is pending no more: what was reserved for it elsewhere is patched, and the mark goes on.
    fn resolve(&mut self, members: &mut Members, csn: Csn) {
        for member in members.all_mut() {
            let may_have = member.patches().is_some_and(|patches| csn.is_before(patches.reserved_to));
            for (_, link) in member.chain.iter_mut().filter(|_| may_have) {
                if let Link::Reserved { csn: of, mid } = *link
                    && of == csn
                {
                    *link = Link::Patched { mid };
                }
            }
        }
        while let Some(Place::Held(held)) = self.ring.get(self.mark) {
            self.mark = self.mark.plus(1);
            if let Some(marks) = members.get_mut(held.member).and_then(Member::watermarks) {
                marks.lsn = marks.lsn.later(held.lsn);
            }
        }
    }

    /// A member's SACK. Gives whether something is acknowledged that was not, or no longer is.
    pub(crate) fn sack<P: Plugin>(
        &mut self,
        around: &mut Around<'_, P>,
        id: MemberId,
        sack: &Sack<'_>,
    ) -> Result<(), Dropped> {
        let member = around.members.get_mut(id).ok_or(Dropped::NoMember)?;
        let behind = Lsn(sack.cumulative).plus(1);
        if behind.is_before(member.chain.first()) {
            // Overtaken by a later one.
            return Ok(());
        }
        let covered = behind.since(member.chain.first()) as usize;
        let reported = reported_by(member, covered, sack)?;
        member.window_bytes = sack.window_bytes;
        for _ in 0..covered {
            if let Some(Link::Chunk(csn)) = member.chain.pop() {
                self.acknowledge(csn, Acked::Cumulative, around.now, member);
            }
        }
        let chunks = member.chain.iter().zip(&reported).filter_map(|((_, link), is_reported)| match link {
            Link::Chunk(csn) => Some((*csn, *is_reported)),
            _ => None,
        });
        let chunks: Vec<_> = chunks.collect();
        for (csn, is_reported) in chunks {
            self.acknowledge(csn, if is_reported { Acked::Gap } else { Acked::No }, around.now, member);
        }
        self.retire(around.plugin);
        self.is_sack_due = true;
        Ok(())
    }

    fn acknowledge(&mut self, csn: Csn, acked: Acked, now: Instant, member: &mut Member) {
        let Some(Place::Held(held)) = self.ring.get_mut(csn) else { return };
        let was = core::mem::replace(&mut held.acked, acked);
        held.is_missing = acked == Acked::No;
        if let Some(sent_at) = held.sent_at.take_if(|_| acked != Acked::No) {
            member.note_round_trip(now.since(sent_at));
        }
        let key = key_of(&held.repr);
        if let Some(open) = self.open.get_mut(&key).filter(|_| !is_whole(&held.repr)) {
            match (was == Acked::No, acked == Acked::No) {
                (true, false) => open.acked += 1,
                (false, true) => open.acked = open.acked.saturating_sub(1),
                _ => {}
            }
        }
        let is_for_good = was != Acked::Cumulative && acked == Acked::Cumulative;
        if let Order::Stream(number) = order_of(&held.repr)
            && let Some(stream) = self.streams.get_mut(&number).filter(|_| is_for_good)
        {
            stream.unacked = stream.unacked.saturating_sub(1);
        }
    }

    /// Takes from the ring's front what will not come again.
    pub(crate) fn retire<P: Plugin>(&mut self, plugin: &mut P) {
        while let Some(Place::Held(Held { acked: Acked::Cumulative, .. })) = self.ring.front() {
            let Some(Place::Held(held)) = self.ring.pop() else { return };
            if held.repr.begins() {
                plugin.retire(held.rtx);
                if let Some(stream) = self.streams.get_mut(&held.repr.stream).filter(|_| !held.repr.is_unordered()) {
                    stream.retired = held.repr.mid.wrapping_add(1);
                }
            }
            if held.repr.ends() {
                self.open.remove(&key_of(&held.repr));
            }
        }
    }

    /// What the peer is told: up to where all is acknowledged, and what is behind that.
    ///
    /// A peer that counts misses is not told of what is behind the first frame that is neither acknowledged nor
    /// reported missing by its own member: it may only be slow. What is next to the cumulative number may be
    /// acknowledged for now: it is told of that, or it would repeat it for ever and never come to what is missing.
    pub(crate) fn acknowledged<R: Rules>(&self, peer: LossDetection) -> (Csn, impl Iterator<Item = GapBlock>) {
        let is_acked = |place: &Place| matches!(place, Place::Held(held) if held.acked != Acked::No);
        let is_revealed = move |place: &Place| match place {
            _ if peer == LossDetection::Time => true,
            Place::Held(held) => held.acked != Acked::No || held.is_missing,
            // Something behind it has come.
            Place::Hole | Place::Orphan { .. } => true,
        };
        let first = self.ring.first();
        let places = self.ring.iter().take_while(move |(_, place)| is_revealed(place));
        let broken_to =
            self.ring.iter().take_while(|(_, place)| !R::END_TO_END && matches!(place, Place::Held(_))).count();
        let blocks = gap_blocks(places.map(move |(_, place)| is_acked(place)));
        (first.previous().plus(broken_to as u32), blocks)
    }

    /// Places that are pending.
    pub(crate) fn holes(&self) -> usize {
        self.ring.iter().filter(|(_, place)| !matches!(place, Place::Held(_))).count()
    }

    /// The least room that a member has: what any frame may find (conservative, §4.3 of the paper).
    pub(crate) fn window_bytes(members: &Members) -> u32 {
        members.all().filter(|member| !member.is_draining).map(|member| member.window_bytes).min().unwrap_or(0)
    }

    /// Whether a member's part in the connection is over: nothing of it is open, and no stream waits for it.
    pub(crate) fn is_done_with(&self, id: MemberId) -> bool {
        let open = self.open.values().any(|open| open.member == id && !open.is_complete());
        let streams = self.streams.values().any(|stream| stream.member == Some(id) && !stream.is_idle());
        !open && !streams && self.pinned.is_none_or(|(pinned, _)| pinned != id)
    }
}

/// For a member died: the plug-in may name another that answers with an error, and only with other bytes.
fn refuse<P: Plugin>(
    around: &mut Around<'_, P>,
    csn: Csn,
    repr: &IDataRepr,
    frame: &mut Frame<'_>,
    mut rtx: u64,
) -> Result<Decision, Nowhere> {
    let is_simple = is_whole(repr) && !matches!(frame.order, Order::Stream(_));
    let named = if is_simple { around.plugin.refuse(frame, around.members, &mut rtx) } else { None };
    let is_replaced = matches!(frame.payload, Cow::Owned(_));
    match named.filter(|id| is_replaced && around.members.is_active(*id)) {
        Some(member) => Ok(Decision { member, is_safe: false, rtx, open: None }),
        None => Err(Failure::Unsafe(csn).into()),
    }
}

/// Which links behind the `covered` first ones a SACK reports, up to the last that it does.
fn reported_by(member: &Member, covered: usize, sack: &Sack<'_>) -> Result<Vec<bool>, Dropped> {
    let first = member.chain.first();
    let forwarded = match &member.sequencing {
        Sequencing::Patches(patches) => patches.forwarded,
        Sequencing::Watermarks(_) => None,
    };
    // Whether the member can have it.
    let was_sent = |at: usize| match member.chain.get(first.plus(at as u32)) {
        Some(Link::Chunk(_)) => true,
        Some(Link::Patched { .. }) => forwarded.is_some_and(|(to, _)| !to.is_before(first.plus(at as u32))),
        Some(Link::Reserved { .. }) | None => false,
    };
    reported(sack, covered, member.chain.len(), was_sent)
}

/// The same chunk as before, but for what may change when it is repeated.
fn is_same(was: &IDataRepr, repr: &IDataRepr) -> bool {
    let flags = |repr: &IDataRepr| repr.flags - IDataFlags::IMMEDIATE;
    flags(was) == flags(repr) && key_of(was) == key_of(repr) && was.number == repr.number
}

fn outgoing(repr: &IDataRepr, lsn: Lsn, mid: u32) -> IDataRepr {
    IDataRepr { tsn: lsn.0, mid, ..*repr }
}

fn later_mid(a: u32, b: u32) -> u32 {
    Csn(a).later(Csn(b)).0
}

/// Bytes that a plug-in leaves.
fn checked(payload: Cow<'_, [u8]>) -> Result<Cow<'_, [u8]>, Dropped> {
    let fits = !payload.is_empty() && payload.len() <= I_DATA_PAYLOAD_MAX;
    if fits { Ok(payload) } else { Err(Dropped::Plugin) }
}
