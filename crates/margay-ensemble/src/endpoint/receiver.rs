//! Receives frames, and gives them on in their order.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use core::time::Duration;

use margay_core::Instant;
use margay_wire::sctp::{Chunk, Chunks, IDataFlags, IDataRepr, IForwardTsn, PacketWriter, WatermarkRepr};

use crate::acknowledgement::gap_blocks;
use crate::number::{Csn, Row, Serial, Tsn};
use crate::plugin::Order;
use crate::split::{FrameKey, key_of, order_of};

/// Chunks beyond the oldest that is missing, at most.
const AHEAD_MAX: u32 = 8192;
/// Watermarks that wait until all they speak of has come. More are not needed: the last says all that those before it
/// say.
const WATERMARKS_MAX: usize = 32;
/// Where nothing is whole, so that nobody can make room by reading, so many buffers may wait here at most: large frames
/// that come between each other. Beyond, they do not end.
const BUFFERS_MAX: usize = 8;
/// A sender that was told of less room than this part of the buffer hears when there is as much again.
const LITTLE: usize = 4;
/// Where the owner has no memory, and nothing is ready that could be read to make room, a connection that holds parts
/// of frames ends after so long: of several that wait for each other, one has to go.
const HELD_BACK_MAX: Duration = Duration::from_secs(2);
/// Bytes that it takes to keep a chunk beside its payload.
pub(super) const CHUNK_BYTES: usize = 96;

/// What the frames in order without a stream of their own are put in order by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reading {
    /// By message identifiers that follow each other (RFC 8260).
    Plain,
    /// By watermarks: this end is a member of an ensemble.
    Watermarks,
}

/// What a receiver is set up with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReceiverConfig {
    /// The sender's initial TSN.
    pub first: Tsn,
    /// How frames are put in order.
    pub reading: Reading,
    /// Bytes that may wait here for others, or to be read.
    pub buffer_bytes: usize,
    /// A single packet is acknowledged after so long; of several, every second at once.
    pub sack_delay: Duration,
}

impl Default for ReceiverConfig {
    fn default() -> Self {
        let sack_delay = Duration::from_millis(20);
        Self { first: Tsn(0), reading: Reading::Plain, buffer_bytes: 1 << 20, sack_delay }
    }
}

/// A frame that has come whole, and whose turn it is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Received {
    /// Where it had its place.
    pub order: Order,
    /// What its sender says is in it.
    pub ppid: u32,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// A frame of which some has come.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Assembly {
    fragments: BTreeMap<u32, Vec<u8>>,
    ppid: u32,
    /// How many there are, once the last has come.
    count: Option<u32>,
}

impl Assembly {
    fn is_complete(&self) -> bool {
        self.count == u32::try_from(self.fragments.len()).ok()
    }

    fn bytes(&self) -> usize {
        self.fragments.values().map(Vec::len).sum()
    }

    /// Whether the fragment has a place in it.
    fn takes(&self, repr: &IDataRepr) -> bool {
        let at = repr.fragment();
        let is_new = !self.fragments.contains_key(&at);
        let is_within = self.count.is_none_or(|count| at < count && !repr.ends());
        let is_last = !repr.ends() || self.fragments.keys().all(|other| *other < at);
        is_new && is_within && is_last
    }
}

/// The receiving half of an end.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Receiver {
    config: ReceiverConfig,
    /// What has come, from the oldest that has not.
    come: Row<Tsn, bool>,
    frames: BTreeMap<FrameKey, Assembly>,
    /// By stream, the message identifier that is next.
    streams: BTreeMap<u16, u32>,
    held_bytes: usize,
    held_chunks: usize,
    ready: VecDeque<Received>,
    ready_bytes: usize,
    /// Watermarks that wait, the greatest last.
    watermarks: Vec<WatermarkRepr>,
    /// The greatest that was told.
    told: Option<WatermarkRepr>,
    /// In the peer's order, all before this may be given on.
    given_to: Option<Csn>,
    packets: u32,
    sack_at: Option<Instant>,
    is_sack_due: bool,
    /// The sender was told of little room.
    is_little_told: bool,
    /// The owner has no memory for more.
    is_held_back: bool,
    /// Since when nothing can go on for that.
    stuck_since: Option<Instant>,
    is_overfull: bool,
}

impl Receiver {
    /// Nothing has come yet.
    pub fn new(config: ReceiverConfig) -> Self {
        Self {
            config,
            come: Row::new(config.first.0),
            frames: BTreeMap::new(),
            streams: BTreeMap::new(),
            held_bytes: 0,
            held_chunks: 0,
            ready: VecDeque::new(),
            ready_bytes: 0,
            watermarks: Vec::new(),
            told: None,
            given_to: None,
            packets: 0,
            sack_at: None,
            is_sack_due: false,
            is_little_told: false,
            is_held_back: false,
            stuck_since: None,
            is_overfull: false,
        }
    }

    /// The chunks of a packet that are for a receiver; others are the sender's
    /// ([`Sender::on_sack`](super::Sender::on_sack)).
    pub fn on_packet(&mut self, now: Instant, packet: &[u8]) {
        let mut has_data = false;
        let mut has_mark = false;
        for chunk in Chunks::new(packet).filter_map(Result::ok) {
            match chunk {
                Chunk::IData(repr, payload) => {
                    has_data = true;
                    self.take(now, &repr, payload);
                }
                Chunk::IForwardTsn(forward) => self.forward(&forward),
                Chunk::Watermark(mark) => {
                    has_mark = true;
                    self.note(&mark);
                }
                Chunk::Sack(_) | Chunk::Unknown { .. } => {}
            }
        }
        self.give_on();
        // What comes alone is wanted to be confirmed, or was not confirmed in time.
        self.is_sack_due |= has_mark && !has_data && self.config.reading == Reading::Watermarks;
        if has_data {
            self.packets += 1;
            self.is_sack_due |= self.packets >= 2 || !self.come.is_empty();
            self.sack_at = self.sack_at.or(Some(now + self.config.sack_delay));
        }
    }

    fn take(&mut self, now: Instant, repr: &IDataRepr, payload: &[u8]) {
        let tsn = Tsn(repr.tsn);
        self.is_sack_due |= repr.flags.contains(IDataFlags::IMMEDIATE);
        let ahead = tsn.since(self.come.first());
        if tsn.is_before(self.come.first()) || self.come.get(tsn) == Some(&true) {
            self.is_sack_due = true;
            return;
        }
        if self.is_held_back {
            return self.note_stuck(now, ahead == 0);
        }
        let has_room = payload.len() <= self.room() || (ahead == 0 && self.overdraws(payload.len()));
        if ahead >= AHEAD_MAX || !has_room || self.is_over(repr) {
            return;
        }
        let assembly = self.frames.entry(key_of(repr)).or_default();
        if !assembly.takes(repr) {
            return;
        }
        assembly.fragments.insert(repr.fragment(), payload.to_vec());
        if repr.begins() {
            assembly.ppid = repr.number;
        }
        if repr.ends() {
            assembly.count = Some(repr.fragment() + 1);
        }
        self.held_bytes += payload.len();
        self.held_chunks += 1;
        self.stuck_since = self.stuck_since.filter(|_| ahead > 0);
        self.mark(tsn);
    }

    /// A chunk is dropped for want of the owner's memory.
    fn note_stuck(&mut self, now: Instant, is_oldest: bool) {
        if is_oldest && self.ready.is_empty() && !self.frames.is_empty() {
            let since = *self.stuck_since.get_or_insert(now);
            self.is_overfull |= now.since(since) >= HELD_BACK_MAX;
        }
    }

    /// The owner has no memory for more, or has some again: until then what comes is dropped, and its sender told that
    /// there is no room.
    pub fn hold_back(&mut self, is_held_back: bool) {
        self.is_held_back = is_held_back;
        self.is_sack_due |= self.is_little_told && !self.has_little_room();
    }

    /// Bytes of memory that frames take here, however short they are.
    pub fn memory(&self) -> usize {
        self.held_bytes + self.ready_bytes + (self.held_chunks + self.ready.len()) * CHUNK_BYTES
    }

    /// Whether what everything else waits for is taken though there is no room: not where reading makes room.
    fn overdraws(&mut self, len: usize) -> bool {
        let is_within = self.held_bytes + len <= self.config.buffer_bytes.saturating_mul(BUFFERS_MAX);
        self.is_overfull |= self.ready.is_empty() && !is_within;
        self.ready.is_empty() && is_within
    }

    /// Whether frames that have begun take more than eight times the buffer, and none of them is whole: the sender does
    /// not keep to what it was told, and nothing will ever be read.
    pub fn is_overfull(&self) -> bool {
        self.is_overfull
    }

    /// Of a stream, a frame that was passed over.
    fn is_over(&self, repr: &IDataRepr) -> bool {
        let is_counted = !repr.is_unordered() && (repr.stream != 0 || self.config.reading == Reading::Plain);
        let next = self.streams.get(&repr.stream).copied().unwrap_or(0);
        is_counted && Csn(repr.mid).is_before(Csn(next))
    }

    /// A number has come, or will not.
    fn mark(&mut self, tsn: Tsn) {
        while !tsn.is_before(self.come.next()) {
            self.come.push(false);
        }
        if let Some(come) = self.come.get_mut(tsn) {
            *come = true;
        }
        while self.come.front() == Some(&true) {
            self.come.pop();
        }
    }

    fn room(&self) -> usize {
        if self.is_held_back {
            return 0;
        }
        self.config.buffer_bytes.saturating_sub(self.held_bytes + self.ready_bytes)
    }

    /// What will not come any more (RFC 3758, 3.6).
    fn forward(&mut self, forward: &IForwardTsn<'_>) {
        let to = Tsn(forward.cumulative);
        self.is_sack_due = true;
        if to.is_before(self.come.first()) || to.since(self.come.first()) >= AHEAD_MAX {
            return;
        }
        // What has come behind goes with it.
        while !to.is_before(self.come.first()) {
            self.mark(self.come.first());
        }
        for skipped in forward.skipped() {
            let is_passed = |key: &FrameKey| {
                (key.0, key.1) == (skipped.stream, skipped.is_unordered) && !Csn(skipped.mid).is_before(Csn(key.2))
            };
            let passed: Vec<FrameKey> = self.frames.keys().filter(|key| is_passed(key)).copied().collect();
            let (whole, cut): (Vec<_>, Vec<_>) = passed.into_iter().partition(|key| self.is_complete(key));
            cut.iter().for_each(|key| drop(self.take_out(key)));
            if !skipped.is_unordered {
                self.pass_over(skipped.stream, skipped.mid, whole);
            }
        }
    }

    /// Gives on what is there of a stream up to a message identifier, which is then behind.
    fn pass_over(&mut self, stream: u16, mid: u32, mut whole: Vec<FrameKey>) {
        let next = self.streams.get(&stream).copied().unwrap_or(0);
        whole.sort_by_key(|key| key.2.wrapping_sub(next));
        whole.iter().for_each(|key| self.give(key));
        self.streams.insert(stream, Csn(next).later(Csn(mid.wrapping_add(1))).0);
    }

    fn note(&mut self, mark: &WatermarkRepr) {
        if self.config.reading != Reading::Watermarks || mark.confirms {
            return;
        }
        if self.told.is_some_and(|told| !Csn(told.csn).is_before(Csn(mark.csn))) {
            return;
        }
        self.told = Some(*mark);
        if self.watermarks.len() == WATERMARKS_MAX {
            self.watermarks.pop();
        }
        self.watermarks.push(*mark);
    }

    fn is_complete(&self, key: &FrameKey) -> bool {
        self.frames.get(key).is_some_and(Assembly::is_complete)
    }

    fn take_out(&mut self, key: &FrameKey) -> Option<Assembly> {
        let assembly = self.frames.remove(key)?;
        self.held_bytes = self.held_bytes.saturating_sub(assembly.bytes());
        self.held_chunks = self.held_chunks.saturating_sub(assembly.fragments.len());
        Some(assembly)
    }

    fn give(&mut self, key: &FrameKey) {
        let Some(assembly) = self.take_out(key) else { return };
        let flags = if key.1 { IDataFlags::UNORDERED } else { IDataFlags::empty() };
        let order = order_of(&IDataRepr { flags, tsn: 0, stream: key.0, mid: key.2, number: 0 });
        let bytes = assembly.fragments.into_values().flatten().collect::<Vec<u8>>();
        self.ready_bytes += bytes.len();
        self.ready.push_back(Received { order, ppid: assembly.ppid, bytes });
    }

    /// Gives on whatever may be.
    fn give_on(&mut self) {
        let is_free = |(key, assembly): &(&FrameKey, &Assembly)| key.1 && assembly.is_complete();
        let free: Vec<FrameKey> = self.frames.iter().filter(is_free).map(|(key, _)| *key).collect();
        free.iter().for_each(|key| self.give(key));
        let streams: Vec<u16> = self.frames.keys().filter(|key| !key.1).map(|key| key.0).collect();
        for stream in streams {
            if stream == 0 && self.config.reading == Reading::Watermarks {
                continue;
            }
            loop {
                let next = self.streams.get(&stream).copied().unwrap_or(0);
                let key = (stream, false, next);
                if !self.is_complete(&key) {
                    break;
                }
                self.give(&key);
                self.streams.insert(stream, next.wrapping_add(1));
            }
        }
        if self.config.reading == Reading::Watermarks {
            self.give_on_by_watermarks();
        }
    }

    fn give_on_by_watermarks(&mut self) {
        let missing = self.come.first();
        let has_come = |mark: &&WatermarkRepr| Tsn(mark.lsn).is_before(missing);
        if let Some(mark) = self.watermarks.iter().rfind(has_come) {
            self.given_to = Some(self.given_to.map_or(Csn(mark.csn), |to| to.later(Csn(mark.csn))));
        }
        self.watermarks.retain(|mark| !Tsn(mark.lsn).is_before(missing));
        let Some(to) = self.given_to else { return };
        // All that is here is less than 2^31 from there.
        let from = to.0.wrapping_sub(1 << 31);
        while let Some(key) = self.least(from).filter(|key| Csn(key.2).is_before(to) && self.is_complete(key)) {
            self.give(&key);
        }
    }

    /// The first in the peer's order of what is here, counted from this number on.
    fn least(&self, from: u32) -> Option<FrameKey> {
        let behind = self.frames.range((0, false, from)..=(0, false, u32::MAX)).next();
        let wrapped = || self.frames.range((0, false, 0)..(0, false, from)).next();
        behind.or_else(wrapped).map(|(key, _)| *key)
    }

    /// The next frame.
    pub fn poll_frame(&mut self) -> Option<Received> {
        let received = self.ready.pop_front()?;
        self.ready_bytes -= received.bytes.len();
        // The sender waits to hear of room.
        self.is_sack_due |= self.is_little_told && !self.has_little_room();
        Some(received)
    }

    fn has_little_room(&self) -> bool {
        self.room() < self.config.buffer_bytes / LITTLE
    }

    /// Something is sent now: an acknowledgement that would wait goes with it.
    pub(crate) fn hasten_sack(&mut self) {
        self.is_sack_due |= self.sack_at.is_some();
    }

    /// When [`poll_sack`](Self::poll_sack) is to be called, if ever.
    pub fn next_deadline(&self) -> Option<Instant> {
        if self.is_sack_due { Some(Instant::ZERO) } else { self.sack_at }
    }

    /// Writes what has come into a packet, if it is time. Gives whether it was.
    pub fn poll_sack(&mut self, now: Instant, packet: &mut PacketWriter<'_>) -> bool {
        if !self.is_sack_due && self.sack_at.is_none_or(|at| at > now) {
            return false;
        }
        if let Some(told) = self.told
            && packet.watermark(&WatermarkRepr { confirms: true, ..told }).is_err()
        {
            return false;
        }
        let window = u32::try_from(self.room()).unwrap_or(u32::MAX);
        let blocks = gap_blocks(self.come.iter().map(|(_, has_come)| *has_come));
        if packet.sack(self.come.first().previous().0, window, blocks).is_err() {
            return false;
        }
        (self.packets, self.sack_at, self.is_sack_due) = (0, None, false);
        self.is_little_told = self.has_little_room();
        true
    }

    /// All before this has come, or will not.
    pub fn expected(&self) -> Tsn {
        self.come.first()
    }

    /// Whether this number has come.
    pub fn has(&self, tsn: Tsn) -> bool {
        tsn.is_before(self.come.first()) || self.come.get(tsn) == Some(&true)
    }
}
