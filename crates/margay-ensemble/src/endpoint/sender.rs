//! Sends frames, and repeats what is lost.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use core::fmt;

use margay_core::Instant;
use margay_wire::sctp::{I_DATA_HEADER_LEN, I_DATA_PAYLOAD_MAX, IDataFlags, IDataRepr, NoRoom, PacketWriter, Sack};

use super::congestion::Congestion;
use super::rack::Rack;
use crate::number::{Row, Serial, Tsn};
use crate::plugin::Order;

/// What a sender is set up with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SenderConfig {
    /// Its initial TSN.
    pub first: Tsn,
    /// Chunks under way at most: no more than the switch's window, if there is one.
    pub window: u16,
    /// Bytes of a frame that go into one chunk, at most [`I_DATA_PAYLOAD_MAX`].
    pub chunk_bytes: usize,
    /// Bytes of a packet on the path.
    pub packet_bytes: usize,
    /// Bytes of frames that wait or are under way.
    pub buffer_bytes: usize,
    /// Bytes that the receiver has room for.
    pub receiver_bytes: u32,
}

impl Default for SenderConfig {
    fn default() -> Self {
        Self {
            first: Tsn(0),
            window: crate::config::WINDOW_DEFAULT,
            chunk_bytes: 1200,
            packet_bytes: 1232,
            buffer_bytes: 1 << 20,
            receiver_bytes: 1 << 16,
        }
    }
}

/// The frame is empty, or larger than what may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLarge;

impl fmt::Display for TooLarge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the frame is empty, or there is no room for it: send less, or wait")
    }
}

impl core::error::Error for TooLarge {}

/// Where a frame has been put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queued {
    /// The TSN of its first chunk.
    pub first: Tsn,
}

/// How a chunk stands that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Standing {
    UnderWay,
    Lost,
    /// For now.
    Come,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Chunk {
    repr: IDataRepr,
    payload: Vec<u8>,
    /// When it was sent last; nothing while it waits for its first time.
    sent_at: Option<Instant>,
    is_repeated: bool,
    standing: Standing,
}

/// How a chunk was sent.
#[derive(Clone, Copy)]
struct Sending {
    sent_at: Option<Instant>,
    is_repeated: bool,
    standing: Standing,
    len: usize,
}

impl Chunk {
    fn sending(&self) -> Sending {
        let Self { sent_at, is_repeated, standing, .. } = *self;
        Sending { sent_at, is_repeated, standing, len: self.payload.len() }
    }
}

/// The sending half of an end.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Sender {
    config: SenderConfig,
    /// All that is not acknowledged for good; those that wait are at the end.
    chunks: Row<Tsn, Chunk>,
    /// The first that waits.
    next: Tsn,
    lost: VecDeque<Tsn>,
    mids: BTreeMap<(u16, bool), u32>,
    held_bytes: usize,
    /// Bytes under way.
    flight: usize,
    receiver_bytes: usize,
    rack: Rack,
    congestion: Congestion,
    /// The window has been made smaller for losses before this one.
    recovery: Option<Tsn>,
    timeout_at: Option<Instant>,
    lost_at: Option<Instant>,
}

impl Sender {
    /// Nothing is sent yet.
    pub fn new(config: SenderConfig) -> Self {
        Self {
            config,
            chunks: Row::new(config.first.0),
            next: config.first,
            lost: VecDeque::new(),
            mids: BTreeMap::new(),
            held_bytes: 0,
            flight: 0,
            receiver_bytes: config.receiver_bytes as usize,
            rack: Rack::default(),
            congestion: Congestion::new(config.packet_bytes),
            recovery: None,
            timeout_at: None,
            lost_at: None,
        }
    }

    /// Takes a frame. `ppid` says what is in it.
    ///
    /// # Errors
    ///
    /// [`TooLarge`], and nothing is taken.
    pub fn send(&mut self, order: Order, ppid: u32, frame: &[u8]) -> Result<Queued, TooLarge> {
        if frame.is_empty() || frame.len() > self.config.buffer_bytes.saturating_sub(self.held_bytes) {
            return Err(TooLarge);
        }
        self.held_bytes += frame.len();
        let (stream, flags) = match order {
            Order::None => (0, IDataFlags::UNORDERED),
            Order::Member => (0, IDataFlags::empty()),
            Order::Stream(stream) => (stream, IDataFlags::empty()),
        };
        let mid = self.mids.entry((stream, order == Order::None)).or_default();
        let head = IDataRepr { flags, tsn: 0, stream, mid: *mid, number: 0 };
        *mid = mid.wrapping_add(1);
        let first = self.chunks.next();
        let len = self.config.chunk_bytes.clamp(1, I_DATA_PAYLOAD_MAX);
        let count = frame.len().div_ceil(len);
        for (at, payload) in frame.chunks(len).enumerate() {
            let mut repr = IDataRepr { tsn: self.chunks.next().0, number: at as u32, ..head };
            if at == 0 {
                repr.flags |= IDataFlags::BEGIN;
                repr.number = ppid;
            }
            repr.flags.set(IDataFlags::END, at + 1 == count);
            let payload = payload.to_vec();
            let standing = Standing::UnderWay;
            self.chunks.push(Chunk { repr, payload, sent_at: None, is_repeated: false, standing });
        }
        Ok(Queued { first })
    }

    /// Writes what may be sent now into a packet: what is lost first, then what is new. Gives whether there was
    /// something.
    pub fn poll(&mut self, now: Instant, packet: &mut PacketWriter<'_>) -> bool {
        let mut has_written = false;
        while let Some(tsn) = self.due() {
            if self.write(now, tsn, packet).is_err() {
                break;
            }
            has_written = true;
        }
        has_written
    }

    fn write(&mut self, now: Instant, tsn: Tsn, packet: &mut PacketWriter<'_>) -> Result<(), NoRoom> {
        // What is due is in the row.
        let Some(chunk) = self.chunks.get_mut(tsn) else { return Err(NoRoom) };
        packet.i_data(&chunk.repr, &chunk.payload)?;
        chunk.is_repeated |= chunk.sent_at.is_some();
        chunk.sent_at = Some(now);
        chunk.standing = Standing::UnderWay;
        self.flight += chunk.payload.len();
        if tsn == self.next {
            self.next = tsn.plus(1);
        } else {
            self.lost.pop_front();
        }
        if self.timeout_at.is_none() {
            self.timeout_at = Some(now + self.rack.timeout());
        }
        Ok(())
    }

    /// Whether something may be sent now.
    pub(crate) fn has_due(&mut self) -> bool {
        self.due().is_some()
    }

    /// What is to be sent next, and may be.
    fn due(&mut self) -> Option<Tsn> {
        while let Some(tsn) = self.lost.front() {
            if self.chunks.get(*tsn).is_some_and(|chunk| chunk.standing == Standing::Lost) {
                break;
            }
            self.lost.pop_front();
        }
        let tsn = self.lost.front().copied().unwrap_or(self.next);
        let len = self.chunks.get(tsn)?.payload.len();
        // One chunk may always be under way: a full receiver is asked so (RFC 9260, 6.1 A).
        let has_room = self.flight + len <= self.congestion.window().min(self.receiver_bytes);
        let is_within = tsn.since(self.chunks.first()) < self.config.window.into();
        (is_within && (has_room || self.flight == 0)).then_some(tsn)
    }

    /// A SACK of what this end has sent.
    pub fn on_sack(&mut self, now: Instant, sack: &Sack<'_>) {
        let behind = Tsn(sack.cumulative).plus(1);
        if behind.is_before(self.chunks.first()) || self.next.is_before(behind) {
            // Overtaken; or of what was never sent.
            return;
        }
        let flight = self.flight;
        let mut acked = 0;
        while self.chunks.first() != behind {
            let Some(chunk) = self.chunks.pop() else { break };
            self.held_bytes -= chunk.payload.len();
            acked += self.come(now, chunk.sending());
        }
        acked += self.read_blocks(now, behind, sack);
        // What is under way is not yet taken from the receiver's room.
        self.receiver_bytes = sack.window_bytes as usize;
        if self.recovery.is_some_and(|until| !self.chunks.first().is_before(until)) {
            self.recovery = None;
            self.rack.recovered();
        }
        if acked > 0 {
            let is_in_use = flight + self.config.packet_bytes >= self.congestion.window();
            if self.recovery.is_none() && is_in_use {
                self.congestion.grow(acked);
            }
            self.timeout_at = (self.next != self.chunks.first()).then(|| now + self.rack.timeout());
        }
        self.find_lost(now);
    }

    /// A chunk has come that had not. Gives its bytes.
    fn come(&mut self, now: Instant, chunk: Sending) -> usize {
        if chunk.standing == Standing::Come {
            return 0;
        }
        if let Some(sent_at) = chunk.sent_at {
            self.rack.acknowledged(now, sent_at, chunk.is_repeated);
        }
        if chunk.standing == Standing::UnderWay {
            self.flight = self.flight.saturating_sub(chunk.len);
        }
        chunk.len
    }

    fn read_blocks(&mut self, now: Instant, behind: Tsn, sack: &Sack<'_>) -> usize {
        let last = sack.blocks().map(|block| u32::from(block.end)).max().unwrap_or(0);
        if last > self.next.since(behind) {
            return 0;
        }
        let mut acked = 0;
        for (at, tsn) in (1..=last).map(|at| (at, behind.plus(at - 1))) {
            let is_reported = sack.blocks().any(|block| (u32::from(block.start)..=block.end.into()).contains(&at));
            let Some(sending) = self.chunks.get(tsn).map(Chunk::sending) else { break };
            if is_reported {
                acked += self.come(now, sending);
            }
            let Some(chunk) = self.chunks.get_mut(tsn) else { break };
            match (chunk.standing, is_reported) {
                (_, true) => chunk.standing = Standing::Come,
                // It was taken back (RFC 9260, 6.2).
                (Standing::Come, false) => {
                    chunk.standing = Standing::Lost;
                    self.lost.push_back(tsn);
                }
                _ => {}
            }
        }
        acked
    }

    /// Finds what is lost by now, and when the next will be.
    fn find_lost(&mut self, now: Instant) {
        self.lost_at = None;
        let mut first_lost = None;
        let next = self.next;
        for (tsn, chunk) in self.chunks.iter_mut().take_while(|(tsn, _)| *tsn != next) {
            let Some(sent_at) = chunk.sent_at.filter(|_| chunk.standing == Standing::UnderWay) else { continue };
            let Some(lost_at) = self.rack.lost_at(sent_at) else { continue };
            if lost_at > now {
                self.lost_at = Some(self.lost_at.map_or(lost_at, |earliest| earliest.min(lost_at)));
                continue;
            }
            chunk.standing = Standing::Lost;
            self.flight = self.flight.saturating_sub(chunk.payload.len());
            self.lost.push_back(tsn);
            first_lost = first_lost.or(Some(tsn));
        }
        if first_lost.is_some() && self.recovery.is_none() {
            self.congestion.shrink();
            self.recovery = Some(self.next);
        }
    }

    /// Time has passed.
    pub fn on_time(&mut self, now: Instant) {
        if self.lost_at.is_some_and(|at| at <= now) {
            self.find_lost(now);
        }
        if self.timeout_at.is_none_or(|at| at > now) {
            return;
        }
        // What was acknowledged for now may have been taken back without a word.
        self.lost.clear();
        let next = self.next;
        for (tsn, chunk) in self.chunks.iter_mut().take_while(|(tsn, _)| *tsn != next) {
            chunk.standing = Standing::Lost;
            self.lost.push_back(tsn);
        }
        self.flight = 0;
        self.rack.timed_out();
        self.congestion.collapse();
        self.recovery = Some(self.next);
        self.timeout_at = (!self.lost.is_empty()).then(|| now + self.rack.timeout());
        self.lost_at = None;
    }

    /// When [`on_time`](Self::on_time) is to be called, if ever.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.timeout_at.into_iter().chain(self.lost_at).min()
    }

    /// All up to here, itself not included, has been acknowledged for good.
    pub fn acknowledged(&self) -> Tsn {
        self.chunks.first()
    }

    /// Whether nothing waits or is under way.
    pub fn is_idle(&self) -> bool {
        self.chunks.is_empty()
    }

    /// The smoothed round trip.
    pub fn round_trip(&self) -> Option<core::time::Duration> {
        self.rack.round_trip()
    }

    /// Bytes that a packet needs for the largest chunk.
    pub fn packet_len(&self) -> usize {
        let payload = self.config.chunk_bytes.clamp(1, I_DATA_PAYLOAD_MAX);
        (I_DATA_HEADER_LEN + payload.next_multiple_of(4)).max(self.config.packet_bytes)
    }
}
