//! What stands between one peer and the members of an ensemble.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::fmt;
use core::marker::PhantomData;

use margay_core::Instant;
use margay_wire::sctp::{Chunk, Chunks, IDataRepr};

use crate::config::{Config, Failure};
use crate::counters::{Counters, Dropped};
use crate::member::{Joining, Member, MemberId, Members};
use crate::merge::Merge;
use crate::number::Csn;
use crate::outbox::{Outbox, Packet, To};
use crate::patch;
use crate::plugin::{Frame, Order, Plugin};
use crate::rules::{Rules, Sound};
use crate::split::{Around, Nowhere, Split, order_of};

/// RFC 9260's DATA.
const PLAIN_DATA: u8 = 0;

/// The connection has [`MEMBERS_MAX`](crate::MEMBERS_MAX) members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the connection has as many members as it may; wait until one has gone")
    }
}

impl core::error::Error for Full {}

/// What has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// A member that drained has gone: it has acknowledged all it was given, and all it has sent has come.
    Gone(MemberId),
    /// The connection is over.
    Failed(Failure),
}

/// One connection of a peer with an ensemble.
///
/// Whoever owns it gives it every packet ([`from_peer`](Self::from_peer), [`from_member`](Self::from_member)), calls
/// [`on_time`](Self::on_time) at [`next_deadline`](Self::next_deadline), and after each of them sends what
/// [`poll_packet`](Self::poll_packet) gives. `now` never goes backwards.
///
/// It never
///
/// - keeps a frame: its state is bounded by the window and the number of members, whatever is sent;
/// - acknowledges what no member has;
/// - gives a frame to two members, unless the plug-in called it safe and the first one died.
///
/// Connections share nothing.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Switch<P, R = Sound> {
    config: Config,
    plugin: P,
    members: Members,
    split: Split,
    merge: Merge,
    outbox: Outbox,
    events: VecDeque<Event>,
    counters: Counters,
    failure: Option<Failure>,
    rules: PhantomData<R>,
}

impl<P: Plugin, R: Rules> Switch<P, R> {
    /// A connection without members. `peer_window_bytes` is what the peer has room for.
    pub fn new(config: Config, mut plugin: P, peer_window_bytes: u32) -> Self {
        plugin.add_connection(config.connection);
        let (split, mut merge) = (Split::new(&config), Merge::new(&config));
        merge.set_window_bytes(peer_window_bytes);
        Self {
            config,
            plugin,
            members: Members::default(),
            split,
            merge,
            outbox: Outbox::default(),
            events: VecDeque::new(),
            counters: Counters::default(),
            failure: None,
            rules: PhantomData,
        }
    }

    /// A member joins, and takes frames from now on.
    ///
    /// # Errors
    ///
    /// [`Full`].
    pub fn join(&mut self, joining: &Joining) -> Result<MemberId, Full> {
        let id = self.members.free().ok_or(Full)?;
        let (oldest, next) = (self.split.ring.first(), self.split.ring.next());
        let oldest = if R::HOLES_AT_JOIN { oldest } else { next };
        self.members.insert(Member::new(id, joining, oldest, self.split.mark, next));
        self.merge.welcome(id);
        self.plugin.add_member(id);
        Ok(id)
    }

    /// A member takes no new frames from now on, and goes when its chain is empty ([`Event::Gone`]).
    pub fn drain(&mut self, now: Instant, id: MemberId) {
        if let Some(member) = self.members.get_mut(id) {
            member.is_draining = true;
        }
        self.settle(now);
    }

    /// A member is dead. What it has not acknowledged goes elsewhere when the peer repeats it.
    pub fn died(&mut self, now: Instant, id: MemberId) {
        let Some(member) = self.members.remove(id) else { return };
        self.plugin.remove_member(id);
        self.merge.abandon(&member);
        if let Err(failure) = self.split.bereave(id) {
            return self.fail(failure);
        }
        self.split.retire(&mut self.plugin);
        self.settle(now);
    }

    /// A packet of the peer: what was in DATA.
    ///
    /// # Errors
    ///
    /// The connection is over. The peer is to be told so, and the members.
    pub fn from_peer(&mut self, now: Instant, packet: &[u8]) -> Result<(), Failure> {
        self.failure.map_or(Ok(()), Err)?;
        for chunk in Chunks::new(packet) {
            let taken = match chunk {
                Ok(Chunk::IData(repr, payload)) => self.split_chunk(now, &repr, payload),
                Ok(Chunk::Sack(sack)) => self.merge.sack(&mut self.members, now, &sack).map_err(Nowhere::from),
                Ok(Chunk::IForwardTsn(_)) => Err(Failure::Abandoned.into()),
                Ok(Chunk::Unknown { kind: PLAIN_DATA }) => Err(Failure::PlainData.into()),
                Ok(Chunk::Unknown { .. }) => Ok(()),
                Ok(Chunk::Watermark(_)) | Err(_) => Err(Dropped::Malformed.into()),
            };
            self.note(taken);
        }
        self.settle(now);
        self.failure.map_or(Ok(()), Err)
    }

    /// A packet of a member: what was in DATA. Of one that is gone, nothing is taken.
    ///
    /// # Errors
    ///
    /// The connection is over.
    pub fn from_member(&mut self, now: Instant, id: MemberId, packet: &[u8]) -> Result<(), Failure> {
        self.failure.map_or(Ok(()), Err)?;
        for chunk in Chunks::new(packet) {
            let taken = match chunk {
                Ok(Chunk::IData(repr, payload)) => self.merge_chunk(id, &repr, payload),
                Ok(Chunk::Sack(sack)) => {
                    let (config, members, plugin) = (&self.config, &mut self.members, &mut self.plugin);
                    self.split.sack(&mut Around { now, config, members, plugin }, id, &sack)
                }
                Ok(Chunk::Watermark(mark)) => {
                    self.members.get_mut(id).map_or(Ok(()), |member| patch::confirm(member, &mark))
                }
                Ok(Chunk::Unknown { kind: 0x80.. }) => Ok(()),
                Ok(Chunk::IForwardTsn(_) | Chunk::Unknown { .. }) | Err(_) => Err(Dropped::Malformed),
            };
            self.note(taken.map_err(Nowhere::from));
        }
        self.settle(now);
        self.failure.map_or(Ok(()), Err)
    }

    fn split_chunk(&mut self, now: Instant, repr: &IDataRepr, payload: &[u8]) -> Result<(), Nowhere> {
        let (config, members, plugin) = (&self.config, &mut self.members, &mut self.plugin);
        let mut around = Around { now, config, members, plugin };
        let onward = self.split.take(&mut around, repr, payload)?;
        let Some(member) = self.members.get_mut(onward.member) else { return Err(Dropped::NoMember.into()) };
        let mark = patch::beside_frame::<R>(&self.split, member, now);
        member.hasten_sack();
        self.outbox.frame(To::Member(onward.member), mark, &onward.repr, &onward.payload);
        // Of use to a broken variant alone.
        self.split.is_sack_due |= !R::END_TO_END;
        Ok(())
    }

    fn merge_chunk(&mut self, id: MemberId, repr: &IDataRepr, payload: &[u8]) -> Result<(), Dropped> {
        let member = self.members.get_mut(id).ok_or(Dropped::NoMember)?;
        let onward = self.merge.take(member, repr)?;
        let mut frame = Frame {
            connection: self.config.connection,
            order: if repr.is_unordered() { Order::None } else { order_of(&onward) },
            is_whole: repr.begins() && repr.ends(),
            payload: payload.into(),
        };
        if repr.begins() {
            self.plugin.answer(&mut frame, id);
        }
        self.outbox.frame(To::Peer, None, &onward, &frame.payload);
        Ok(())
    }

    fn note(&mut self, taken: Result<(), Nowhere>) {
        match taken {
            Ok(()) => {}
            Err(Nowhere::Dropped(dropped)) => self.counters.note(dropped),
            Err(Nowhere::Failed(failure)) => self.fail(failure),
        }
    }

    fn fail(&mut self, failure: Failure) {
        if self.failure.is_none() {
            self.failure = Some(failure);
            self.events.push_back(Event::Failed(failure));
        }
    }

    /// Says what follows from what has come.
    fn settle(&mut self, now: Instant) {
        if self.failure.is_some() {
            return;
        }
        for member in self.members.all_mut() {
            patch::tell::<R>(&self.split, member, now, &mut self.outbox);
        }
        self.merge.release(now, &mut self.outbox);
        self.acknowledge(now);
        self.let_go();
    }

    fn acknowledge(&mut self, now: Instant) {
        let len = self.config.packet_bytes;
        if core::mem::take(&mut self.split.is_sack_due) {
            let (cumulative, blocks) = self.split.acknowledged::<R>(self.config.peer);
            self.outbox.sack(To::Peer, len, cumulative.0, Split::window_bytes(&self.members), blocks);
        }
        let window_bytes = self.merge.window_bytes(&self.members);
        for member in self.members.all_mut().filter_map(|member| member.take_sack_due(now).then_some(member)) {
            let (cumulative, blocks) = self.merge.acknowledged(member);
            self.outbox.sack(To::Member(member.id), len, cumulative.0, window_bytes, blocks);
        }
    }

    /// Members that drain and have nothing left go.
    fn let_go(&mut self) {
        let is_done = |member: &&Member| {
            let is_empty = member.chain.is_empty() && self.merge.is_done_with(member);
            let is_over = is_empty && patch::is_told_all(&self.split, member) && self.split.is_done_with(member.id);
            member.is_draining && is_over && self.plugin.may_go(member.id)
        };
        let done: Vec<MemberId> = self.members.all().filter(is_done).map(|member| member.id).collect();
        for id in done {
            self.members.remove(id);
            self.plugin.remove_member(id);
            self.events.push_back(Event::Gone(id));
        }
    }

    /// Time has passed.
    pub fn on_time(&mut self, now: Instant) {
        self.settle(now);
    }

    /// When [`on_time`](Self::on_time) is to be called, if ever.
    pub fn next_deadline(&self) -> Option<Instant> {
        let members = self.members.all().filter_map(Member::next_deadline);
        members.chain(self.merge.next_deadline()).min().filter(|_| self.failure.is_none())
    }

    /// A packet that is to be sent.
    pub fn poll_packet(&mut self) -> Option<Packet> {
        self.outbox.pop()
    }

    /// What has happened.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// What was dropped since it was asked last.
    pub fn take_counters(&mut self) -> Counters {
        core::mem::take(&mut self.counters)
    }

    /// What was dropped since it was taken last.
    pub const fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The members.
    pub const fn members(&self) -> &Members {
        &self.members
    }

    /// The oldest of the peer's numbers that is not acknowledged, and the one behind the newest that has come.
    pub fn inbound(&self) -> (Csn, Csn) {
        (self.split.ring.first(), self.split.ring.next())
    }

    /// Chunks of the peer whose place is open, though later ones have come: they have not come, or their member has
    /// died with them. Whose they will be nobody knows.
    pub fn holes(&self) -> usize {
        self.split.holes()
    }

    /// Chunks of a member that have not come, though later ones of its have.
    pub fn holes_of(&self, id: MemberId) -> Option<usize> {
        Some(self.merge.holes_of(self.members.get(id)?))
    }

    /// Bytes that the peer has said it has room for.
    pub const fn peer_window_bytes(&self) -> u32 {
        self.merge.peer_window_bytes()
    }

    /// Whether something is to come from a member: an acknowledgement, what it owes, or the rest of what it has begun.
    pub fn is_owing(&self, id: MemberId) -> bool {
        let is_owing =
            |member: &Member| !member.chain.is_empty() || !self.merge.is_done_with(member) || !self.plugin.may_go(id);
        self.members.get(id).is_some_and(is_owing)
    }

    /// The plug-in.
    pub const fn plugin(&self) -> &P {
        &self.plugin
    }

    /// The plug-in, to tell it of what the switch does not know, as how members are called.
    pub const fn plugin_mut(&mut self) -> &mut P {
        &mut self.plugin
    }

    /// Ends the connection: plug-ins hear of it.
    pub fn close(mut self) -> P {
        self.plugin.remove_connection(self.config.connection);
        self.plugin
    }
}
