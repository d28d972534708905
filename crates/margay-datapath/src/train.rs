//! Arriving trains: chunks of an application's super-packet, put together again and given to `sal0` in one write.
//!
//! The common case is a train that came whole with one receive: its chunks are written from where they lie, behind new
//! headers. What came in parts is given on in parts, as the [`Template`] allows: TCP at once, UDP by datagrams, the
//! rest when it is complete. What waits is bounded in trains, bytes and time.

use core::ops::Range;
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::time::Duration;

use margay_core::delta::Translation;
use margay_core::time::Instant;
use margay_core::{DropReason, Stack};
use margay_wire::FlowId;
use margay_wire::{
    DATA_HEADER_LEN, DataRepr, FENCE, SEAL_TAG_LEN, STACK_ENCAP, STACK_FEC, STACK_SCTP, TRAIN_HEADER_LEN, TrainRepr,
    change_of_fence, is_sealed,
};

use crate::checksum::sum;
use crate::packet::{self, FlowKey, Packet, SYN};
use crate::seal::Seal;
use crate::table::{Recipient, TcpNumbers};
use crate::template::{Headers, Template};
use crate::vnet;

/// Most chunks of one train: 64 KiB in the smallest datagrams that a path may have.
pub const CHUNKS_MAX: usize = 256;
/// Most parts of one write: headers, and the chunks of one receive.
const PARTS_MAX: usize = 136;
/// Most trains that wait for chunks, authenticated and not.
const PENDING_MAX: usize = 64;
/// Most bytes that wait, of either.
const HELD_MAX: usize = 4 << 20;
/// Longest wait.
const WAIT_MAX: Duration = Duration::from_secs(1);
/// Longest wait for a train's first chunk, which is sent before the others. What has come long before it is of another
/// train: an agent that has started again counts anew.
const EARLY_MAX: Duration = Duration::from_millis(100);

/// Chunks of one train that follow each other in one receive.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    /// The first chunk's header.
    pub header: DataRepr,
    /// The datagrams, with their headers.
    datagrams: &'a [u8],
    /// Bytes from one datagram to the next.
    stride: usize,
    /// Bytes at the end of each datagram that were its tag.
    tail: usize,
    /// Whether the peer has encrypted the chunks: anybody may have forged others.
    is_authentic: bool,
}

/// A run that is kept.
#[derive(Debug)]
pub struct OwnedRun {
    header: DataRepr,
    datagrams: Vec<u8>,
    stride: usize,
    tail: usize,
    is_authentic: bool,
}

impl From<&Run<'_>> for OwnedRun {
    fn from(run: &Run<'_>) -> Self {
        let Run { header, datagrams, stride, tail, is_authentic } = *run;
        Self { header, datagrams: datagrams.to_vec(), stride, tail, is_authentic }
    }
}

impl OwnedRun {
    /// As it was.
    pub fn run(&self) -> Run<'_> {
        let Self { header, ref datagrams, stride, tail, is_authentic } = *self;
        Run { header, datagrams, stride, tail, is_authentic }
    }
}

/// What a receive holds, in order.
#[derive(Clone, Copy, Debug)]
pub enum Piece<'a> {
    /// DATA.
    Run(Run<'a>),
    /// One datagram of any other kind.
    Other(&'a [u8]),
}

/// The first run of a receive of datagrams of `stride` bytes each, the last of which may be shorter: its first header,
/// and its bytes. Without a header it is one datagram of another kind.
pub fn measure(received: &[u8], stride: usize) -> (Option<DataRepr>, usize) {
    let first = &received[..stride.min(received.len())];
    let Ok(header) = DataRepr::parse(first) else { return (None, first.len()) };
    let mut len = first.len();
    let mut index = header.index;
    while let Some(next) = received.get(len..).filter(|next| next.len() >= DATA_HEADER_LEN) {
        index = index.wrapping_add(1);
        let same = next[..12] == first[..12] && next[14..16] == first[14..16];
        if !same || next[12..14] != index.to_be_bytes() {
            break;
        }
        len += stride.min(next.len());
    }
    (Some(header), len)
}

/// Iterates over a receive of datagrams of `stride` bytes each, the last of which may be shorter.
pub fn pieces(received: &[u8], stride: usize) -> impl Iterator<Item = Piece<'_>> {
    let mut rest = received;
    core::iter::from_fn(move || {
        if rest.is_empty() || stride == 0 {
            return None;
        }
        let (header, len) = measure(rest, stride);
        let (datagrams, after) = rest.split_at(len);
        rest = after;
        Some(header.map_or(Piece::Other(datagrams), |header| Piece::Run(Run::new(header, datagrams, stride))))
    })
}

/// Opens a run of sealed chunks in place. What can be opened is given on in order, in runs as long as there are, and
/// why the rest cannot.
pub fn open_run(
    seal: &Seal,
    header: DataRepr,
    (datagrams, stride): (&mut [u8], usize),
    mut each: impl FnMut(Result<Run<'_>, DropReason>),
) {
    let index_at = |at: usize| header.index.wrapping_add((at / stride) as u16);
    let (mut good, mut at) = (0, 0);
    while at < datagrams.len() {
        let end = (at + stride).min(datagrams.len());
        let opened = seal.open(&DataRepr { index: index_at(at), ..header }, &mut datagrams[at..end]);
        if let Err(reason) = opened {
            if good < at {
                each(Ok(Run::opened(DataRepr { index: index_at(good), ..header }, &datagrams[good..at], stride)));
            }
            each(Err(reason));
            good = end;
        }
        at = end;
    }
    if good < at {
        each(Ok(Run::opened(DataRepr { index: index_at(good), ..header }, &datagrams[good..at], stride)));
    }
}

impl<'a> Run<'a> {
    /// A run of one datagram, whose header has been read.
    pub fn single(header: DataRepr, datagram: &'a [u8]) -> Self {
        Self::new(header, datagram, datagram.len())
    }

    /// A chunk that a flow's `fec` or `sctp` delivers, which were inside a seal or not.
    pub fn delivered(header: DataRepr, datagram: &'a [u8], stack: Stack) -> Self {
        Self { is_authentic: stack.is_sealed(), ..Self::single(header, datagram) }
    }

    /// A run of plain datagrams as [`measure`] found it.
    pub const fn new(header: DataRepr, datagrams: &'a [u8], stride: usize) -> Self {
        Self { header, datagrams, stride, tail: 0, is_authentic: false }
    }

    /// A run of datagrams that have been opened: each ends with what was its tag.
    const fn opened(header: DataRepr, datagrams: &'a [u8], stride: usize) -> Self {
        Self { header, datagrams, stride, tail: SEAL_TAG_LEN, is_authentic: true }
    }

    /// Whether it carries nothing but its header: a FENCE, or word that the sender encapsulates again.
    pub const fn is_mark(&self) -> bool {
        self.datagrams.len() == DATA_HEADER_LEN
    }

    /// The change by which its sender turns to another stack, if it is the last packet of this one.
    pub fn turns(&self) -> Option<u32> {
        let is_last = self.header.flags & FENCE != 0 && self.chunks() == 1;
        if is_last { change_of_fence(self.chunk(0)) } else { None }
    }

    /// Whether it is a TCP packet with SYN.
    pub fn opens(&self) -> bool {
        let inner = self.datagrams.get(DATA_HEADER_LEN + TRAIN_HEADER_LEN..).unwrap_or_default();
        let found = if self.header.index == 0 { packet::parse(inner, inner.len()) } else { return false };
        matches!(found, Ok(Packet::Transport(found)) if found.flags & SYN != 0)
    }

    /// Every datagram of the run.
    pub fn datagrams(&self) -> impl Iterator<Item = &'a [u8]> {
        self.datagrams.chunks(self.stride)
    }

    /// Number of chunks.
    pub const fn chunks(&self) -> usize {
        self.datagrams.len().div_ceil(self.stride)
    }

    /// What is in each datagram behind its header.
    pub fn chunk_bytes(&self) -> impl Iterator<Item = &'a [u8]> {
        (0..self.chunks()).map(|at| self.chunk(at))
    }

    fn chunk(&self, at: usize) -> &'a [u8] {
        let start = at * self.stride;
        &self.datagrams[start + DATA_HEADER_LEN..self.datagrams.len().min(start + self.stride) - self.tail]
    }

    fn part(&self, chunks: Range<usize>) -> Self {
        let end = self.datagrams.len().min(chunks.end * self.stride);
        let index = self.header.index + chunks.start as u16;
        let header = DataRepr { index, ..self.header };
        Self { header, datagrams: &self.datagrams[chunks.start * self.stride..end], ..*self }
    }

    /// The chunks of it whose index is `wanted`, in runs.
    pub(crate) fn filtered(&self, mut wanted: impl FnMut(u16) -> bool) -> impl Iterator<Item = Self> {
        let count = self.chunks();
        let mut at = 0;
        core::iter::from_fn(move || {
            let mut is_wanted = |at: usize| wanted(self.header.index.wrapping_add(at as u16));
            let start = (at..count).find(|at| is_wanted(*at)).unwrap_or(count);
            let end = (start + 1..count).find(|at| !is_wanted(*at)).unwrap_or(count);
            at = end + 1;
            (start < count).then(|| self.part(start..end))
        })
    }

    /// Whether all chunks but the train's last have `chunk_len` bytes, and the last ends where the train ends.
    fn fits(&self, chunk_len: usize, stream_len: usize) -> bool {
        let last = self.chunks() - 1;
        let index = usize::from(self.header.index) + last;
        let tail = self.chunk(last).len();
        let others = last == 0 || self.stride - DATA_HEADER_LEN - self.tail == chunk_len;
        let end = index * chunk_len + tail;
        let tail_fits = if index + 1 == usize::from(self.header.count) {
            tail > 0 && tail <= chunk_len && end == stream_len
        } else {
            tail == chunk_len && end < stream_len
        };
        others && tail_fits
    }
}

/// What was given to the application.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delivered {
    /// Bytes after the transport header.
    pub bytes: usize,
    /// Segments that they stand for.
    pub segments: usize,
    /// TCP flags that went with them.
    pub flags: u8,
    /// Sequence number and acknowledgement of the last segment of a connection.
    pub numbers: Option<TcpNumbers>,
}

/// Puts trains together. There is one for all of a host: chunks of a train may come by different threads.
///
/// Authenticated chunks are kept apart from others. While a flow turns between `sctp` and `secure-sctp`, chunks of both
/// have the same packet numbers: in one train a forged chunk would replace an authenticated one.
#[derive(Debug, Default)]
pub struct Assembler {
    plain: PendingTrains,
    authentic: PendingTrains,
}

/// Trains that wait for chunks, the oldest first. It gives up its own only.
#[derive(Debug, Default)]
struct PendingTrains {
    trains: VecDeque<Pending>,
    held: usize,
    incomplete: u64,
}

/// A train of which not all chunks have come.
#[derive(Debug)]
struct Pending {
    flow: FlowId,
    /// Each stack has numbers of its own.
    stack: u8,
    packet_number: u32,
    count: u16,
    since: Instant,
    seen: [u64; CHUNKS_MAX / 64],
    seen_count: u16,
    first: Option<First>,
    /// Whole datagrams that came before the first chunk.
    early: Vec<Box<[u8]>>,
    /// Payload that cannot be given on yet: where it begins, and the bytes.
    waiting: Vec<(usize, Vec<u8>)>,
}

/// What the first chunk says of the train.
#[derive(Debug, PartialEq)]
struct First {
    template: Template,
    chunk_len: usize,
    stream_len: usize,
}

impl First {
    fn parse(run: &Run<'_>) -> Result<Self, DropReason> {
        let chunk = run.chunk(0);
        let train = TrainRepr::parse(chunk).map_err(|_| DropReason::Malformed)?;
        let template = Template::parse(&train, &chunk[TRAIN_HEADER_LEN..])?;
        let stream_len = TRAIN_HEADER_LEN + train.inner_len as usize;
        let first = Self { template, chunk_len: chunk.len(), stream_len };
        if run.fits(first.chunk_len, stream_len) { Ok(first) } else { Err(DropReason::Malformed) }
    }

    /// Where the payload begins in the train's stream of bytes.
    const fn payload_at(&self) -> usize {
        TRAIN_HEADER_LEN + self.template.header_len()
    }
}

/// The application's side: five-tuple, and where packets are written.
struct Sink<'a, W> {
    to: &'a FlowKey,
    delta: Option<&'a Translation>,
    write: W,
    delivered: Delivered,
}

impl<W: FnMut(&[IoSlice<'_>]) -> io::Result<()>> Sink<'_, W> {
    /// Writes `part` of the payload, which lies in `run`.
    fn emit_run(&mut self, first: &First, run: &Run<'_>, part: Range<usize>) -> Result<(), DropReason> {
        let largest = first.template.part_max(self.to);
        if part.len() <= largest {
            return self.emit_run_part(first, run, part);
        }
        if first.template.unit() != 1 {
            return Err(DropReason::Protocol);
        }
        let middle = part.start + largest / 2;
        self.emit_run_part(first, run, part.start..middle)?;
        self.emit_run_part(first, run, middle..part.end)
    }

    fn emit_run_part(&mut self, first: &First, run: &Run<'_>, part: Range<usize>) -> Result<(), DropReason> {
        let begin = usize::from(run.header.index) * first.chunk_len;
        let (mut at, end) = (first.payload_at() + part.start - begin, first.payload_at() + part.end - begin);
        let mut slices = [&[][..]; PARTS_MAX];
        let mut count = 0;
        while at < end {
            let (chunk, offset) = (at / first.chunk_len, at % first.chunk_len);
            let bytes = run.chunk(chunk);
            let take = (bytes.len() - offset).min(end - at);
            // A receive has at most 64 KiB, and a kernel joins at most 128 datagrams.
            *slices.get_mut(count).ok_or(DropReason::Malformed)? = &bytes[offset..offset + take];
            count += 1;
            at += take;
        }
        self.emit(&first.template, part, &slices[..count])
    }

    fn emit(&mut self, template: &Template, part: Range<usize>, payload: &[&[u8]]) -> Result<(), DropReason> {
        let mut headers: Headers = [0; size_of::<Headers>()];
        let payload_sum = template.needs_payload_sum(self.to).then(|| sum(&payload.concat()));
        let written = template.write(self.to, part.clone(), payload_sum, &mut headers);
        let ip_len = if self.to.is_v4() { crate::packet::IPV4_LEN } else { crate::packet::IPV6_LEN };
        if let Some(delta) = self.delta {
            delta.apply(&mut headers[vnet::LEN..written.len], template.checksum_state());
        }
        let mut parts = [IoSlice::new(&[]); PARTS_MAX + 1];
        parts[0] = IoSlice::new(&headers[..written.len]);
        for (to, from) in parts[1..].iter_mut().zip(payload) {
            *to = IoSlice::new(from);
        }
        (self.write)(&parts[..=payload.len()]).map_err(|_| DropReason::Environment)?;
        self.delivered.bytes += part.len();
        self.delivered.segments += written.segments;
        if self.to.protocol == crate::packet::TCP {
            let tcp = vnet::LEN + ip_len;
            self.delivered.flags |= headers[tcp + 13];
            let number =
                |at: usize| u32::from_be_bytes([headers[at], headers[at + 1], headers[at + 2], headers[at + 3]]);
            let acknowledgement = number(tcp + 8);
            let next = number(tcp + 4).wrapping_add(part.len() as u32);
            let is_last = headers[tcp + 13] & crate::packet::FIN != 0;
            let before = self.delivered.numbers.and_then(|numbers| numbers.end);
            let end = is_last.then(|| next.wrapping_add(1)).or(before);
            self.delivered.numbers = Some(TcpNumbers { sequence: next, acknowledgement, end });
        }
        Ok(())
    }
}

impl Assembler {
    /// Takes the chunks of a run and writes to `write` what of their train can be given to the application, with
    /// five-tuple and numbers as `to` says. `now` is asked for only when something has to wait.
    pub fn accept<W>(
        &mut self,
        run: &Run<'_>,
        to: &Recipient,
        now: impl FnOnce() -> Instant,
        write: W,
    ) -> Result<Delivered, DropReason>
    where
        W: FnMut(&[IoSlice<'_>]) -> io::Result<()>,
    {
        let (header, len) = (&run.header, run.chunks());
        // Only the opener makes an authentic run of a sealed stack; and what has come by `fec` or `sctp` is chunks
        // again.
        let is_taken =
            matches!(header.stack, STACK_ENCAP | STACK_FEC | STACK_SCTP) || is_sealed(header.stack) && run.is_authentic;
        if !is_taken {
            return Err(DropReason::Protocol);
        }
        let count = usize::from(header.count);
        if count > CHUNKS_MAX || usize::from(header.index) + len > count {
            return Err(DropReason::Malformed);
        }
        let Recipient { key: to, delta } = to;
        let mut sink = Sink { to, delta: delta.as_ref(), write, delivered: Delivered::default() };
        if header.index == 0 && len == count {
            let first = First::parse(run)?;
            if first.template.protocol() != to.protocol {
                return Err(DropReason::Malformed);
            }
            let whole = 0..first.template.payload_len();
            sink.emit_run(&first, run, whole)?;
            return Ok(sink.delivered);
        }
        let trains = if run.is_authentic { &mut self.authentic } else { &mut self.plain };
        trains.accept_part(run, now(), &mut sink)?;
        Ok(sink.delivered)
    }

    /// Trains given up with chunks missing, since the last call.
    pub fn take_incomplete(&mut self) -> u64 {
        core::mem::take(&mut self.plain.incomplete) + core::mem::take(&mut self.authentic.incomplete)
    }
}

impl PendingTrains {
    fn accept_part<W>(&mut self, run: &Run<'_>, now: Instant, sink: &mut Sink<'_, W>) -> Result<(), DropReason>
    where
        W: FnMut(&[IoSlice<'_>]) -> io::Result<()>,
    {
        self.expire(now);
        let at = self.find_or_insert(&run.header, now);
        let pending = &mut self.trains[at];
        let before = pending.held();
        let result = pending.forget_older(run, now).and_then(|()| pending.accept(run, sink));
        self.held = self.held - before + pending.held();
        if result.is_err() && pending.first.is_none() || pending.seen_count == pending.count {
            self.held -= pending.held();
            self.trains.remove(at);
        }
        while self.held > HELD_MAX {
            self.give_up_oldest();
        }
        result
    }

    fn find_or_insert(&mut self, header: &DataRepr, now: Instant) -> usize {
        let same = |pending: &Pending| {
            pending.packet_number == header.packet_number
                && pending.stack == header.stack
                && pending.flow == header.dst_flow
                && pending.count == header.count
        };
        // The newest train is the likeliest.
        if let Some(at) = self.trains.iter().rposition(same) {
            return at;
        }
        if self.trains.len() >= PENDING_MAX {
            self.give_up_oldest();
        }
        self.trains.push_back(Pending::new(header, now));
        self.trains.len() - 1
    }

    fn expire(&mut self, now: Instant) {
        while self.trains.front().is_some_and(|oldest| now.since(oldest.since) > WAIT_MAX) {
            self.give_up_oldest();
        }
    }

    fn give_up_oldest(&mut self) {
        if let Some(pending) = self.trains.pop_front() {
            self.held -= pending.held();
            self.incomplete += 1;
        }
    }
}

impl Pending {
    const fn new(header: &DataRepr, since: Instant) -> Self {
        Self {
            flow: header.dst_flow,
            stack: header.stack,
            packet_number: header.packet_number,
            count: header.count,
            since,
            seen: [0; CHUNKS_MAX / 64],
            seen_count: 0,
            first: None,
            early: Vec::new(),
            waiting: Vec::new(),
        }
    }

    /// A train's first chunk comes: what is here may be of an older one with the same number.
    fn forget_older(&mut self, run: &Run<'_>, now: Instant) -> Result<(), DropReason> {
        if run.header.index > 0 || self.seen_count == 0 {
            return Ok(());
        }
        let is_older = match &self.first {
            Some(first) => *first != First::parse(run)?,
            // What is sent again comes behind what was sent after it, as long as it lives.
            None if run.header.stack == STACK_SCTP => false,
            None => now.since(self.since) > EARLY_MAX,
        };
        if is_older {
            *self = Self::new(&run.header, self.since);
        }
        Ok(())
    }

    fn held(&self) -> usize {
        let early: usize = self.early.iter().map(|datagram| datagram.len()).sum();
        let waiting: usize = self.waiting.iter().map(|(_, bytes)| bytes.len()).sum();
        early + waiting
    }

    fn has_seen(&self, index: usize) -> bool {
        self.seen[index / 64] & (1 << (index % 64)) != 0
    }

    fn mark_seen(&mut self, index: usize) {
        self.seen[index / 64] |= 1 << (index % 64);
        self.seen_count += 1;
    }

    /// Takes what is new in the run; chunks that came before are skipped.
    fn accept<W>(&mut self, run: &Run<'_>, sink: &mut Sink<'_, W>) -> Result<(), DropReason>
    where
        W: FnMut(&[IoSlice<'_>]) -> io::Result<()>,
    {
        let base = usize::from(run.header.index);
        let mut at = 0;
        while at < run.chunks() {
            let new = (at..run.chunks()).take_while(|&chunk| !self.has_seen(base + chunk)).count();
            if new > 0 {
                self.accept_new(&run.part(at..at + new), sink)?;
            }
            at += new + 1;
        }
        Ok(())
    }

    fn accept_new<W>(&mut self, run: &Run<'_>, sink: &mut Sink<'_, W>) -> Result<(), DropReason>
    where
        W: FnMut(&[IoSlice<'_>]) -> io::Result<()>,
    {
        let indexes = usize::from(run.header.index)..usize::from(run.header.index) + run.chunks();
        let begins = self.first.is_none() && run.header.index == 0;
        if begins {
            let first = First::parse(run)?;
            if first.template.protocol() != sink.to.protocol {
                return Err(DropReason::Malformed);
            }
            self.first = Some(first);
        }
        let Some(first) = &self.first else {
            self.early.extend(run.datagrams().map(|datagram| Box::from(&datagram[..datagram.len() - run.tail])));
            indexes.for_each(|index| self.mark_seen(index));
            return Ok(());
        };
        if !run.fits(first.chunk_len, first.stream_len) {
            return Err(DropReason::Malformed);
        }
        deliver(first, &mut self.waiting, run, sink)?;
        if begins {
            let mut early = core::mem::take(&mut self.early);
            early.sort_by_key(|datagram| [datagram[12], datagram[13]]);
            for datagram in &early {
                let header = DataRepr::parse(datagram).map_err(|_| DropReason::Malformed)?;
                let run = Run::single(header, datagram);
                if run.fits(first.chunk_len, first.stream_len) {
                    deliver(first, &mut self.waiting, &run, sink)?;
                }
            }
        }
        indexes.for_each(|index| self.mark_seen(index));
        Ok(())
    }
}

/// Writes the whole units of a run, and lets the rest wait for its neighbours.
fn deliver<W>(
    first: &First,
    waiting: &mut Vec<(usize, Vec<u8>)>,
    run: &Run<'_>,
    sink: &mut Sink<'_, W>,
) -> Result<(), DropReason>
where
    W: FnMut(&[IoSlice<'_>]) -> io::Result<()>,
{
    let begin = usize::from(run.header.index) * first.chunk_len;
    let end = (begin + run.chunks() * first.chunk_len).min(first.stream_len);
    let part = begin.saturating_sub(first.payload_at())..end.saturating_sub(first.payload_at());
    let whole = whole_units(&first.template, &part);
    if whole.is_empty() {
        hold(waiting, first, run, part);
        return release(first, waiting, sink);
    }
    hold(waiting, first, run, part.start..whole.start);
    release(first, waiting, sink)?;
    sink.emit_run(first, run, whole.clone())?;
    hold(waiting, first, run, whole.end..part.end);
    release(first, waiting, sink)
}

/// The part of `part` that begins and ends on units; empty if it holds none.
fn whole_units(template: &Template, part: &Range<usize>) -> Range<usize> {
    let unit = template.unit();
    let start = part.start.next_multiple_of(unit);
    let end = if part.end == template.payload_len() { part.end } else { part.end - part.end % unit };
    if start < end { start..end } else { part.start..part.start }
}

/// Copies `part` of the payload out of the run, and joins it to what waits beside it.
fn hold(waiting: &mut Vec<(usize, Vec<u8>)>, first: &First, run: &Run<'_>, part: Range<usize>) {
    if part.is_empty() {
        return;
    }
    let begin = usize::from(run.header.index) * first.chunk_len;
    let (mut at, end) = (first.payload_at() + part.start - begin, first.payload_at() + part.end - begin);
    let mut bytes = Vec::with_capacity(part.len());
    while at < end {
        let chunk = run.chunk(at / first.chunk_len);
        let offset = at % first.chunk_len;
        let take = (chunk.len() - offset).min(end - at);
        bytes.extend_from_slice(&chunk[offset..offset + take]);
        at += take;
    }
    let mut joined = (part.start, bytes);
    while let Some(at) =
        waiting.iter().position(|(start, bytes)| start + bytes.len() == joined.0 || *start == joined.0 + joined.1.len())
    {
        let (start, bytes) = waiting.swap_remove(at);
        if start < joined.0 {
            joined = (start, [bytes, joined.1].concat());
        } else {
            joined.1.extend(bytes);
        }
    }
    waiting.push(joined);
}

/// Writes what waits and has become whole.
fn release<W>(first: &First, waiting: &mut Vec<(usize, Vec<u8>)>, sink: &mut Sink<'_, W>) -> Result<(), DropReason>
where
    W: FnMut(&[IoSlice<'_>]) -> io::Result<()>,
{
    let mut at = 0;
    while let Some((start, bytes)) = waiting.get(at) {
        let start = *start;
        let whole = whole_units(&first.template, &(start..start + bytes.len()));
        if whole.is_empty() {
            at += 1;
            continue;
        }
        if whole.len() > first.template.part_max(sink.to) {
            return Err(DropReason::Protocol);
        }
        let (_, bytes) = waiting.swap_remove(at);
        sink.emit(&first.template, whole.clone(), &[&bytes[whole.start - start..whole.end - start]])?;
        let (before, after) = (&bytes[..whole.start - start], &bytes[whole.end - start..]);
        waiting.extend(
            [(start, before), (whole.end, after)]
                .into_iter()
                .filter(|(_, rest)| !rest.is_empty())
                .map(|(start, rest)| (start, rest.to_vec())),
        );
    }
    Ok(())
}
