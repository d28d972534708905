//! Leaving trains: an application's super-packet, read from `sal0` straight into the chunks that it will be sent in.
//!
//! The buffer is laid out before the packet is read, with gaps for the DATA headers, by the chunk size of the packet
//! before; so as long as paths have one size and flows are sealed alike, nothing is copied. Small packets to one
//! destination that wait in `sal0` together are sent together: each is a train of its own, so their inner headers may
//! differ.

use std::io::{self, IoSliceMut};

use margay_core::DropReason;
use margay_core::delta::{Checksum, Translation};
use margay_wire::{BESIDE, DATA_HEADER_LEN, DataRepr, GsoKind, SEAL_TAG_LEN, STACK_ENCAP, TRAIN_HEADER_LEN, TrainRepr};

use crate::packet::{HEADERS_MAX, TCP, Transport, UDP};
use crate::table::{Destination, EgressRoute};
use crate::train::{self, CHUNKS_MAX, Piece};
use crate::tun::{PACKET_MAX, Tun};
use crate::udp::{SEGMENTS_MAX, SEND_MAX};
use crate::vnet::{self, Gso, Vnet};

/// Smallest datagram that a path may have: the least IPv4 MTU (RFC 791) less IP and UDP.
pub const DATAGRAM_MIN: u16 = 548;
/// Largest datagram that is ever sent.
pub const DATAGRAM_MAX: u16 = SEND_MAX as u16;

/// Slots of one read; in the smallest chunks a large packet overflows the last one and is laid out anew.
const SLOTS_MAX: usize = 64;
/// Bytes in front of a packet in its first chunk.
const FIRST_GAP: usize = DATA_HEADER_LEN + TRAIN_HEADER_LEN;
/// Where joined packets are sent at the latest, in bytes of buffer.
const JOINED_MAX: usize = SEND_MAX;
/// Room for the joined packets, a whole packet behind them, and every gap.
const BUFFER_LEN: usize =
    JOINED_MAX + PACKET_MAX + CHUNKS_MAX * (DATA_HEADER_LEN + SEAL_TAG_LEN) + DATAGRAM_MAX as usize;

/// A packet in the outbox that has been read and not been sent.
#[derive(Clone, Copy, Debug)]
pub struct Loaded {
    /// What the kernel says of it.
    pub vnet: Vnet,
    /// Its bytes.
    pub len: usize,
}

/// Small packets that go out with one send.
#[derive(Clone, Copy, Debug)]
struct Joined {
    to: Destination,
    /// Bytes of the first datagram: those that follow have the same, the last may have fewer.
    segment: usize,
    start: usize,
    count: usize,
}

/// How a packet lies in the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layout {
    /// Bytes from one chunk to the next.
    stride: usize,
    /// Bytes at the end of each chunk that are for its tag.
    tail: usize,
}

impl Layout {
    /// Payload of one chunk.
    const fn chunk(self) -> usize {
        self.stride - DATA_HEADER_LEN - self.tail
    }

    /// A packet's bytes in its first chunk.
    const fn first(self) -> usize {
        self.chunk() - TRAIN_HEADER_LEN
    }
}

/// The buffer in which packets are cut. One thread owns it.
pub struct Outbox {
    bytes: Box<[u8]>,
    scratch: Box<[u8]>,
    /// Where the next packet goes.
    at: usize,
    /// For the next packet.
    layout: Layout,
    joined: Option<Joined>,
    relaid: u64,
}

impl Outbox {
    /// An empty outbox that expects paths of `datagram_max` bytes.
    pub fn new(datagram_max: u16) -> Self {
        Self {
            bytes: vec![0; BUFFER_LEN].into_boxed_slice(),
            scratch: vec![0; PACKET_MAX].into_boxed_slice(),
            at: 0,
            layout: Layout { stride: usize::from(clamp(datagram_max)), tail: 0 },
            joined: None,
            relaid: 0,
        }
    }

    /// Reads the next packet of `tun`, if one waits. Kinds of super-packet that were not agreed to are an error.
    pub fn read(&mut self, tun: &Tun) -> io::Result<Option<Loaded>> {
        let mut header = [0; vnet::LEN];
        let (at, layout) = (self.at, self.layout);
        let len = {
            let mut parts: [IoSliceMut<'_>; SLOTS_MAX + 1] = core::array::from_fn(|_| IoSliceMut::new(&mut []));
            parts[0] = IoSliceMut::new(&mut header);
            let count = fill_slots(&mut self.bytes[at..], layout, &mut parts[1..]);
            tun.read(&mut parts[..=count])?
        };
        let Some(len) = len else { return Ok(None) };
        let vnet = Vnet::parse(&header).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Some(Loaded { vnet, len }))
    }

    /// Loads a packet that comes from elsewhere, as if it had been read; `None` when it is too long.
    pub fn load(&mut self, vnet: Vnet, packet: &[u8]) -> Option<Loaded> {
        if packet.len() > PACKET_MAX {
            return None;
        }
        scatter(&mut self.bytes[self.at..], self.layout, packet, SLOTS_MAX);
        Some(Loaded { vnet, len: packet.len() })
    }

    /// The loaded packet's first bytes: all of it, or at least its headers.
    pub fn head(&self, loaded: &Loaded) -> &[u8] {
        &self.bytes[self.at + FIRST_GAP..self.at + FIRST_GAP + loaded.len.min(self.layout.first())]
    }

    /// Gives the loaded packet other numbers, where it is TCP.
    pub fn translate(&mut self, loaded: &Loaded, by: &Translation) {
        let checksum = if loaded.vnet.partial_checksum { Checksum::Partial } else { Checksum::Full };
        let start = self.at + FIRST_GAP;
        by.apply(&mut self.bytes[start..start + loaded.len.min(self.layout.first())], checksum);
    }

    /// The loaded packet in one piece.
    pub fn whole(&mut self, loaded: &Loaded) -> &[u8] {
        if loaded.len <= self.layout.first() {
            return &self.bytes[self.at + FIRST_GAP..self.at + FIRST_GAP + loaded.len];
        }
        gather(&self.bytes[self.at..], self.layout, &mut self.scratch[..loaded.len]);
        &self.scratch[..loaded.len]
    }

    /// Sends the loaded packet on its way: cut into chunks for `route`. It may wait for others of its kind until
    /// [`flush`](Self::flush). `send` gets datagrams of one size in a row (the last may be shorter), and that size.
    ///
    /// # Errors
    ///
    /// It could not be sealed, and does not go.
    pub fn carry<S>(
        &mut self,
        loaded: &Loaded,
        train: &TrainRepr,
        route: &EgressRoute,
        send: &mut S,
    ) -> Result<(), DropReason>
    where
        S: FnMut(&[u8], usize, &Destination),
    {
        let stride = usize::from(clamp(route.to.datagram_max));
        let layout = Layout { stride, tail: if route.seal.is_some() { SEAL_TAG_LEN } else { 0 } };
        let len = TRAIN_HEADER_LEN + loaded.len;
        let count = len.div_ceil(layout.chunk());
        // Never so many: DATAGRAM_MIN gives 124 chunks to the longest packet.
        debug_assert!(count <= CHUNKS_MAX);
        let overflows = len > SLOTS_MAX * self.layout.chunk();
        let fits_first = len <= self.layout.chunk();
        if (layout != self.layout && !(count == 1 && fits_first)) || overflows {
            self.lay_out_anew(loaded.len, layout);
        }
        let total = len + count * (DATA_HEADER_LEN + layout.tail);
        train.emit(&mut self.bytes[self.at + DATA_HEADER_LEN..]);
        match &route.seal {
            Some(seal) => seal.seal_train(route.peer_flow, &mut self.bytes[self.at..self.at + total], stride)?,
            None => self.stamp(route, stride, count),
        }
        if count > 1 {
            self.send_joined(send);
            let chunks = (SEND_MAX / stride).clamp(1, SEGMENTS_MAX);
            self.bytes[self.at..self.at + total].chunks(chunks * stride).for_each(|part| send(part, stride, &route.to));
            self.at = 0;
        } else {
            self.join(total, &route.to, send);
        }
        self.layout = layout;
        Ok(())
    }

    /// Sends what waits. A loaded packet that was not carried is forgotten.
    pub fn flush<S: FnMut(&[u8], usize, &Destination)>(&mut self, send: &mut S) {
        self.send_joined(send);
        self.at = 0;
    }

    /// Sends what waits before the loaded packet, which may still be carried.
    pub fn send_earlier<S: FnMut(&[u8], usize, &Destination)>(&mut self, send: &mut S) {
        self.send_joined(send);
    }

    /// How many packets had to be copied because their path had another size than the one before.
    pub const fn relaid(&self) -> u64 {
        self.relaid
    }

    fn send_joined<S: FnMut(&[u8], usize, &Destination)>(&mut self, send: &mut S) {
        if let Some(joined) = self.joined.take() {
            send(&self.bytes[joined.start..self.at], joined.segment, &joined.to);
        }
    }

    fn join<S: FnMut(&[u8], usize, &Destination)>(&mut self, total: usize, to: &Destination, send: &mut S) {
        let fits = self.joined.as_ref().is_some_and(|joined| joined.to == *to && total <= joined.segment);
        if !fits {
            self.send_joined(send);
            self.joined = Some(Joined { to: *to, segment: total, start: self.at, count: 0 });
        }
        self.at += total;
        let Some(joined) = &mut self.joined else { return };
        joined.count += 1;
        let bytes = self.at - joined.start;
        let full = joined.count == SEGMENTS_MAX || bytes + joined.segment > SEND_MAX;
        if total < joined.segment || full || self.at > JOINED_MAX {
            self.flush(send);
        }
    }

    fn lay_out_anew(&mut self, len: usize, layout: Layout) {
        gather(&self.bytes[self.at..], self.layout, &mut self.scratch[..len]);
        scatter(&mut self.bytes[self.at..], layout, &self.scratch[..len], usize::MAX);
        self.relaid += 1;
    }

    fn stamp(&mut self, route: &EgressRoute, stride: usize, count: usize) {
        let mut header = DataRepr {
            stack: STACK_ENCAP,
            flags: if route.is_beside { BESIDE } else { 0 },
            dst_flow: route.peer_flow,
            packet_number: route.packet_number,
            index: 0,
            count: count as u16,
        };
        for chunk in self.bytes[self.at..].chunks_mut(stride).take(count) {
            // The buffer is longer than any train, so every chunk has room for its header.
            header.emit(chunk);
            header.index += 1;
        }
    }
}

/// In how many chunks a packet of so many bytes goes as it is, in datagrams of at most `datagram_max` bytes.
pub fn chunks(len: usize, datagram_max: u16) -> usize {
    let layout = Layout { stride: usize::from(clamp(datagram_max)), tail: 0 };
    (TRAIN_HEADER_LEN + len).div_ceil(layout.chunk())
}

fn clamp(datagram_max: u16) -> u16 {
    datagram_max.clamp(DATAGRAM_MIN, DATAGRAM_MAX)
}

/// The slots of a packet in `bytes`: behind a header gap each and before room for a tag, the last one as long as need
/// be. Gives their number.
fn fill_slots<'a>(bytes: &'a mut [u8], layout: Layout, slots: &mut [IoSliceMut<'a>]) -> usize {
    let mut rest = bytes;
    let mut left = PACKET_MAX;
    let mut gap = FIRST_GAP;
    let last = slots.len() - 1;
    for (at, slot) in slots.iter_mut().enumerate() {
        let room = if at == last { left } else { (layout.stride - gap - layout.tail).min(left) };
        let (head, behind) = rest.split_at_mut(gap + room);
        *slot = IoSliceMut::new(&mut head[gap..]);
        rest = &mut behind[layout.tail..];
        left -= room;
        gap = DATA_HEADER_LEN;
        if left == 0 {
            return at + 1;
        }
    }
    last + 1
}

/// Where each part of a packet of `len` bytes lies, as `fill_slots` has it: (in the buffer, in the packet, bytes).
fn slots(len: usize, layout: Layout, slots_max: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    let mut done = 0;
    (0..).map_while(move |at| {
        if done == len {
            return None;
        }
        let gap = if at == 0 { FIRST_GAP } else { DATA_HEADER_LEN };
        let left = len - done;
        let room = if at + 1 == slots_max { left } else { (layout.stride - gap - layout.tail).min(left) };
        done += room;
        Some((at * layout.stride + gap, done - room, room))
    })
}

fn gather(bytes: &[u8], layout: Layout, packet: &mut [u8]) {
    for (from, to, len) in slots(packet.len(), layout, SLOTS_MAX) {
        packet[to..to + len].copy_from_slice(&bytes[from..from + len]);
    }
}

fn scatter(bytes: &mut [u8], layout: Layout, packet: &[u8], slots_max: usize) {
    for (to, from, len) in slots(packet.len(), layout, slots_max) {
        bytes[to..to + len].copy_from_slice(&packet[from..from + len]);
    }
}

/// The train header of a packet, from what the kernel and the packet itself say; `None` where they disagree.
pub fn train_header(vnet: &Vnet, found: &Transport) -> Option<TrainRepr> {
    let offset = if found.key.protocol == TCP { 16 } else { 6 };
    let starts = usize::from(vnet.checksum_start) == found.ip_len && vnet.checksum_offset == offset;
    let gso = match (vnet.gso, found.key.protocol) {
        (Gso::None, _) => GsoKind::None,
        (Gso::Tcp4 | Gso::Tcp6, TCP) => GsoKind::Tcp,
        (Gso::Udp, UDP) => GsoKind::Udp,
        _ => return None,
    };
    let cut = gso != GsoKind::None;
    if (vnet.partial_checksum && !starts) || (cut && !(vnet.partial_checksum && vnet.segment_size > 0)) {
        return None;
    }
    Some(TrainRepr {
        gso,
        partial_checksum: vnet.partial_checksum,
        segment_size: if cut { vnet.segment_size } else { 0 },
        inner_len: found.total_len as u32,
    })
}

/// Cuts trains that were too large for their path anew, for datagrams of `datagram_max` bytes. Only whole trains can
/// be: of one that needs several sends the rest is gone already. Nor what is sealed or goes by `fec`, whose numbers are
/// used up: what was in it is gone. Gives datagrams and their size for each.
pub fn recut(datagrams: &[u8], segment: usize, datagram_max: u16) -> Vec<(Vec<u8>, usize)> {
    let stride = usize::from(clamp(datagram_max));
    let whole_trains = train::pieces(datagrams, segment).filter_map(|piece| match piece {
        Piece::Run(run)
            if run.header.index == 0
                && run.chunks() == usize::from(run.header.count)
                && run.header.stack == STACK_ENCAP =>
        {
            Some(run)
        }
        _ => None,
    });
    let recut_one = |run: train::Run<'_>| {
        let stream: Vec<u8> = run.datagrams().flat_map(|datagram| &datagram[DATA_HEADER_LEN..]).copied().collect();
        let chunks = stream.chunks(stride - DATA_HEADER_LEN);
        let count = chunks.len();
        let mut cut = Vec::with_capacity(stream.len() + count * DATA_HEADER_LEN);
        for (index, chunk) in chunks.enumerate() {
            let mut header = [0; DATA_HEADER_LEN];
            DataRepr { index: index as u16, count: count as u16, ..run.header }.emit(&mut header);
            cut.extend(header);
            cut.extend(chunk);
        }
        let per_send = (SEND_MAX / stride).clamp(1, SEGMENTS_MAX) * stride;
        cut.chunks(per_send).map(|part| (part.to_vec(), stride)).collect::<Vec<_>>()
    };
    whole_trains.flat_map(recut_one).collect()
}

const _: () =
    assert!(DATAGRAM_MIN as usize >= FIRST_GAP + HEADERS_MAX + SEAL_TAG_LEN, "headers lie in the first chunk");
