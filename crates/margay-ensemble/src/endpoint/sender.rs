//! Sends frames, and repeats what is lost.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use core::fmt;
use core::time::Duration;

use margay_core::Instant;
use margay_wire::sctp::{
    I_DATA_HEADER_LEN, I_DATA_PAYLOAD_MAX, IDataFlags, IDataRepr, NoRoom, PacketWriter, Sack, SkippedRepr,
};

use super::congestion::Congestion;
use super::rack::{Patience, Rack};
use super::receiver::CHUNK_BYTES;
use crate::number::{Row, Serial, Tsn};
use crate::plugin::Order;

/// Words of the receiver hasten so many repetitions after a time-out: a late answer looks like one.
const HASTENED_MAX: u8 = 3;
/// An answer may take so long on the shortest path: its host is busy.
const ANSWER_MIN: Duration = Duration::from_millis(5);

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
    /// When what has not come counts as lost.
    pub patience: Patience,
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
            patience: Patience::default(),
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
    /// Its time is over: it is not sent any more. Its bytes are kept while they count as under way, so that what is
    /// given up makes no room on a path that may be cut.
    GivenUp,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Chunk {
    repr: IDataRepr,
    payload: Vec<u8>,
    /// When it was sent last; nothing while it waits for its first time.
    sent_at: Option<Instant>,
    is_repeated: bool,
    standing: Standing,
    /// It is given up when it has not come by then.
    until: Option<Instant>,
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
    /// How often words of the receiver may hasten a repetition before the next time-out; none where nothing is overdue.
    hastened_max: u8,
    lost_at: Option<Instant>,
    /// No frame's time is over before that.
    until: Option<Instant>,
    /// The receiver is to be told what will not come any more.
    is_forward_due: bool,
    /// It was told that all up to here will not come, and has not confirmed that.
    forwarded: Option<Tsn>,
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
            rack: Rack::new(config.patience),
            congestion: Congestion::new(config.packet_bytes),
            recovery: None,
            timeout_at: None,
            hastened_max: 0,
            lost_at: None,
            until: None,
            is_forward_due: false,
            forwarded: None,
        }
    }

    /// Takes a frame. `ppid` says what is in it.
    ///
    /// # Errors
    ///
    /// [`TooLarge`], and nothing is taken.
    pub fn send(&mut self, order: Order, ppid: u32, frame: &[u8]) -> Result<Queued, TooLarge> {
        self.send_until(None, order, ppid, frame)
    }

    /// The same, of a frame that is [given up](Self::give_up) when it has not come by `until`.
    ///
    /// # Errors
    ///
    /// [`TooLarge`], and nothing is taken.
    pub fn send_until(
        &mut self,
        until: Option<Instant>,
        order: Order,
        ppid: u32,
        frame: &[u8],
    ) -> Result<Queued, TooLarge> {
        if frame.is_empty() || frame.len() > self.config.buffer_bytes.saturating_sub(self.held_bytes) {
            return Err(TooLarge);
        }
        self.held_bytes += frame.len();
        self.until = self.until.into_iter().chain(until).min();
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
            self.chunks.push(Chunk { repr, payload, sent_at: None, is_repeated: false, standing, until });
        }
        Ok(Queued { first })
    }

    /// Gives up the chunks whose time is over: the receiver is told that they will not come (RFC 3758, 3.5). Gives how
    /// many there were.
    pub fn give_up(&mut self, now: Instant) -> usize {
        if self.until.is_none_or(|until| until > now) {
            return 0;
        }
        self.until = None;
        let mut count = 0;
        for (_, chunk) in self.chunks.iter_mut() {
            let is_open = !matches!(chunk.standing, Standing::Come | Standing::GivenUp);
            let Some(until) = chunk.until.filter(|_| is_open) else { continue };
            if until > now {
                self.until = Some(self.until.map_or(until, |earliest| earliest.min(until)));
                continue;
            }
            if chunk.sent_at.is_none() || chunk.standing == Standing::Lost {
                self.held_bytes -= core::mem::take(&mut chunk.payload).len();
            }
            chunk.standing = Standing::GivenUp;
            count += 1;
        }
        self.pass_given_up();
        self.want_forward();
        count
    }

    /// The receiver is to be told of what is given up, unless it was told of other things and has not confirmed them.
    fn want_forward(&mut self) {
        let is_before = |tsn: &Tsn| tsn.is_before(self.chunks.first());
        self.forwarded = self.forwarded.filter(|tsn| !is_before(tsn));
        self.is_forward_due |= self.forwarded.is_none() && self.is_given_up(self.chunks.first());
    }

    /// What is given up before it was sent once is not sent at all.
    fn pass_given_up(&mut self) {
        while self.is_given_up(self.next) {
            self.next = self.next.plus(1);
        }
    }

    fn is_given_up(&self, tsn: Tsn) -> bool {
        self.chunks.get(tsn).is_some_and(|chunk| chunk.standing == Standing::GivenUp)
    }

    /// Tells the receiver what will not come: all that is given up with nothing before it that may come still.
    fn write_forward(&mut self, now: Instant, packet: &mut PacketWriter<'_>) -> bool {
        if !self.is_forward_due || !self.is_given_up(self.chunks.first()) {
            return false;
        }
        let is_over = |chunk: &Chunk| matches!(chunk.standing, Standing::Come | Standing::GivenUp);
        let mut cumulative = self.chunks.first();
        let mut skipped = BTreeMap::new();
        for (tsn, chunk) in self.chunks.iter().take_while(|(_, chunk)| is_over(chunk)) {
            cumulative = tsn;
            if chunk.standing == Standing::GivenUp {
                skipped.insert((chunk.repr.stream, chunk.repr.is_unordered()), chunk.repr.mid);
            }
        }
        let skipped: Vec<SkippedRepr> = skipped
            .into_iter()
            .map(|((stream, is_unordered), mid)| SkippedRepr { stream, is_unordered, mid })
            .collect();
        if packet.i_forward_tsn(cumulative.0, &skipped).is_err() {
            return false;
        }
        self.is_forward_due = false;
        self.forwarded = Some(cumulative);
        self.timeout_at = self.timeout_at.or(Some(now + self.rack.timeout()));
        true
    }

    /// Writes what may be sent now into a packet: what is lost first, then what is new. Gives whether there was
    /// something.
    pub fn poll(&mut self, now: Instant, packet: &mut PacketWriter<'_>) -> bool {
        let mut has_written = self.write_forward(now, packet);
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
            self.pass_given_up();
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
        } else if self.next == self.chunks.first() {
            // What was given up is known to be so.
            self.timeout_at = None;
        } else if self.is_unasked(now) {
            self.hastened_max -= 1;
            self.repeat_all(now);
        }
        if self.next == self.chunks.first() {
            self.hastened_max = 0;
        }
        self.until = self.until.filter(|_| !self.chunks.is_empty());
        self.want_forward();
        self.find_lost(now);
    }

    /// A chunk has come that had not. Gives its bytes.
    fn come(&mut self, now: Instant, chunk: Sending) -> usize {
        match chunk.standing {
            Standing::UnderWay | Standing::Lost => {}
            Standing::Come => return 0,
            Standing::GivenUp => {
                self.flight = self.flight.saturating_sub(chunk.len);
                return 0;
            }
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
                (Standing::GivenUp, _) => {}
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
        self.hastened_max = HASTENED_MAX;
        self.rack.timed_out();
        self.congestion.collapse();
        self.recovery = Some(self.next);
        self.repeat_all(now);
    }

    /// Whether an acknowledgement of nothing new comes too late to be the answer to what was sent last, after a
    /// time-out. Then something has changed at the receiver: a switch says so when a member has died, and what that
    /// member had is to go elsewhere, which it would do with the next time-out only.
    fn is_unasked(&self, now: Instant) -> bool {
        let sent = self.chunks.iter().take_while(|(tsn, _)| *tsn != self.next).filter_map(|(_, chunk)| chunk.sent_at);
        let is_late = |last: Instant| now.since(last) > self.rack.answer_max().max(ANSWER_MIN);
        self.hastened_max > 0 && sent.max().is_some_and(is_late)
    }

    /// All that was sent and has not come for good is sent again.
    fn repeat_all(&mut self, now: Instant) {
        // What was acknowledged for now may have been taken back without a word.
        self.lost.clear();
        self.is_forward_due = self.is_given_up(self.chunks.first());
        let next = self.next;
        for (tsn, chunk) in self.chunks.iter_mut().take_while(|(tsn, _)| *tsn != next) {
            if chunk.standing == Standing::GivenUp {
                self.held_bytes -= core::mem::take(&mut chunk.payload).len();
                continue;
            }
            chunk.standing = Standing::Lost;
            self.lost.push_back(tsn);
        }
        self.flight = 0;
        let is_waiting = self.is_forward_due || !self.lost.is_empty();
        self.timeout_at = is_waiting.then(|| now + self.rack.timeout());
        self.lost_at = None;
    }

    /// When [`on_time`](Self::on_time) is to be called, if ever.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.timeout_at.into_iter().chain(self.lost_at).chain(self.until).min()
    }

    /// The first number that has not been sent yet.
    pub fn unsent(&self) -> Tsn {
        self.next
    }

    /// How many chunks wait or are not acknowledged for good.
    pub fn held(&self) -> usize {
        self.chunks.len()
    }

    /// Bytes of memory that frames take here, however short they are.
    pub fn memory(&self) -> usize {
        self.held_bytes + self.chunks.len() * CHUNK_BYTES
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
    pub fn round_trip(&self) -> Option<Duration> {
        self.rack.round_trip()
    }

    /// Bytes that a packet needs for the largest chunk.
    pub fn packet_len(&self) -> usize {
        let payload = self.config.chunk_bytes.clamp(1, I_DATA_PAYLOAD_MAX);
        (I_DATA_HEADER_LEN + payload.next_multiple_of(4)).max(self.config.packet_bytes)
    }
}
