//! One TCP segment, of which parts are written anew.

use alloc::vec::Vec;
use core::ops::Range;

use crate::cache::packet::{self, AppPacket, tcp_flags, tcp_options};

const HEADER_LEN: usize = 20;
const OPTION_NOP: u8 = 1;
const OPTION_SACK: u8 = 5;
const OPTION_TIMESTAMPS: u8 = 8;
const PSH: u8 = 0x08;
const URG: u8 = 0x20;
const BLOCK_LEN: usize = 8;

/// Whether number `a` comes before `b`.
pub(in super::super) const fn before(a: u32, b: u32) -> bool {
    a.wrapping_sub(b).cast_signed() < 0
}

/// Whether number `a` comes after `b`.
pub(in super::super) const fn after(a: u32, b: u32) -> bool {
    before(b, a)
}

/// The later one of the two.
pub(in super::super) fn largest(known: Option<u32>, number: u32) -> Option<u32> {
    Some(known.filter(|known| after(*known, number)).unwrap_or(number))
}

/// Which blocks of a selective acknowledgement are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Blocks {
    All,
    None,
    /// As far as they are below the number.
    Below(u32),
    /// As far as they are not.
    From(u32),
}

impl Blocks {
    fn of(self, (left, right): (u32, u32)) -> Option<(u32, u32)> {
        match self {
            Self::All => Some((left, right)),
            Self::None => None,
            Self::Below(cut) => before(left, cut).then_some((left, if after(right, cut) { cut } else { right })),
            Self::From(cut) => after(right, cut).then_some((if before(left, cut) { cut } else { left }, right)),
        }
    }
}

/// What is written of a segment.
#[derive(Clone, Debug)]
pub(in super::super) struct Piece {
    pub sequence: u32,
    pub acknowledgement: u32,
    pub window: u16,
    pub drops_timestamps: bool,
    blocks: Blocks,
    data: Range<usize>,
    has_fin: bool,
}

impl Piece {
    pub fn with(self, acknowledgement: u32, blocks: Blocks) -> Self {
        Self { acknowledgement, blocks, ..self }
    }

    /// Without data, with this number.
    pub fn bare_at(self, sequence: u32) -> Self {
        Self { sequence, data: 0..0, has_fin: false, ..self }
    }

    pub fn is_bare(&self) -> bool {
        self.data.is_empty() && !self.has_fin
    }

    /// The number after its last.
    pub fn end(&self) -> u32 {
        self.sequence.wrapping_add(self.data.len() as u32 + u32::from(self.has_fin))
    }
}

/// A segment as it came.
pub(in super::super) struct Segment<'a> {
    packet: &'a AppPacket<'a>,
    header_len: usize,
    pub sequence: u32,
    pub acknowledgement: u32,
}

impl<'a> Segment<'a> {
    /// `None`: it is no TCP. The reader of packets has seen that the header is whole.
    pub fn of(packet: &'a AppPacket<'a>) -> Option<Self> {
        let (sequence, acknowledgement) = packet.tcp_numbers()?;
        let header_len = usize::from(packet.transport.get(12)? >> 4) * 4;
        let is_whole = header_len >= HEADER_LEN && header_len <= packet.transport.len();
        is_whole.then_some(Self { packet, header_len, sequence, acknowledgement })
    }

    /// As it came, with its IP header.
    pub fn whole(&self) -> &'a [u8] {
        self.packet.whole
    }

    pub fn has(&self, flag: u8) -> bool {
        self.packet.tcp_flags() & flag != 0
    }

    pub fn window(&self) -> u16 {
        // The header is whole.
        u16::from_be_bytes([self.packet.transport[14], self.packet.transport[15]])
    }

    fn data_len(&self) -> u32 {
        u32::try_from(self.packet.transport.len() - self.header_len).unwrap_or(u32::MAX)
    }

    /// Numbers that it takes: its bytes, and one for a FIN.
    pub fn len(&self) -> u32 {
        self.data_len() + u32::from(self.has(tcp_flags::FIN))
    }

    pub fn is_bare(&self) -> bool {
        self.len() == 0
    }

    /// The number after its last.
    pub fn end(&self) -> u32 {
        self.sequence.wrapping_add(self.len())
    }

    /// How many of its numbers are below `cut`.
    pub fn len_below(&self, cut: u32) -> u32 {
        if before(self.sequence, cut) { cut.wrapping_sub(self.sequence).min(self.len()) } else { 0 }
    }

    /// These of its numbers, counted from its first.
    pub fn part(&self, numbers: Range<u32>) -> Piece {
        let at = |number: u32| number.min(self.data_len()) as usize;
        Piece {
            sequence: self.sequence.wrapping_add(numbers.start),
            acknowledgement: self.acknowledgement,
            window: self.window(),
            drops_timestamps: false,
            blocks: Blocks::All,
            data: at(numbers.start)..at(numbers.end),
            has_fin: self.has(tcp_flags::FIN) && numbers.end == self.len() && !numbers.is_empty(),
        }
    }

    /// All but its data.
    pub fn bare(&self) -> Piece {
        self.part(0..0)
    }

    fn blocks(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        let options = tcp_options(self.packet.transport).filter(|(kind, ..)| *kind == OPTION_SACK);
        options.flat_map(|(_, at, len)| {
            let blocks = self.packet.transport[at + 2..at + len].chunks_exact(BLOCK_LEN);
            blocks.map(|block| {
                let number = |at: usize| block[at..at + 4].iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte));
                (number(0), number(4))
            })
        })
    }

    /// Whether a block of its selective acknowledgement is beyond `cut`.
    pub fn has_block_from(&self, cut: u32) -> bool {
        self.blocks().any(|block| Blocks::From(cut).of(block).is_some())
    }

    /// The piece as a packet of its own, with a complete checksum.
    pub fn write(&self, piece: Piece) -> Option<Vec<u8>> {
        let whole = self.packet.transport;
        let data = whole.get(self.header_len..)?.get(piece.data.clone())?;
        let mut transport = whole.get(..self.header_len)?.to_vec();
        transport[4..8].copy_from_slice(&piece.sequence.to_be_bytes());
        transport[8..12].copy_from_slice(&piece.acknowledgement.to_be_bytes());
        transport[14..16].copy_from_slice(&piece.window.to_be_bytes());
        let ends = piece.data.end == whole.len() - self.header_len && !piece.data.is_empty();
        let mut gone = tcp_flags::FIN;
        gone |= if ends { 0 } else { PSH };
        let urgent = self.urgent_from(piece.sequence);
        gone |= if urgent.is_some() { 0 } else { URG };
        transport[18..20].copy_from_slice(&urgent.unwrap_or(0).to_be_bytes());
        transport[13] &= !gone;
        transport[13] |= if piece.has_fin { tcp_flags::FIN } else { 0 };
        self.write_options(&piece, &mut transport);
        transport.extend_from_slice(data);
        packet::build(&self.packet.tuple, transport, self.packet.class, self.packet.hop_limit)
    }

    /// The urgent pointer of a part that begins with this number: it counts from there (RFC 9293 §3.8.5). `None` where
    /// urgent data ends before the part, or there is none.
    fn urgent_from(&self, sequence: u32) -> Option<u16> {
        let pointer = u16::from_be_bytes([self.packet.transport[18], self.packet.transport[19]]);
        if !self.has(URG) {
            return None;
        }
        let end = self.sequence.wrapping_add(pointer.into());
        let is_ahead = before(sequence, end) || sequence == self.sequence;
        u16::try_from(end.wrapping_sub(sequence)).ok().filter(|_| is_ahead)
    }

    fn write_options(&self, piece: &Piece, transport: &mut [u8]) {
        let options: Vec<_> = tcp_options(&self.packet.transport[..self.header_len]).collect();
        for (kind, at, len) in options {
            match kind {
                OPTION_TIMESTAMPS if piece.drops_timestamps => transport[at..at + len].fill(OPTION_NOP),
                OPTION_SACK if piece.blocks != Blocks::All => {
                    let kept: Vec<_> = self.blocks().filter_map(|block| piece.blocks.of(block)).collect();
                    let option = &mut transport[at..at + len];
                    option.fill(OPTION_NOP);
                    // No more blocks than there were.
                    let kept_len = 2 + kept.len() * BLOCK_LEN;
                    if kept.is_empty() || kept_len > len {
                        continue;
                    }
                    // The NOPs come first: a reader of options that has seen the last block stops.
                    let option = &mut option[len - kept_len..];
                    (option[0], option[1]) = (OPTION_SACK, kept_len as u8);
                    for (place, (left, right)) in option[2..].chunks_exact_mut(BLOCK_LEN).zip(kept) {
                        place[..4].copy_from_slice(&left.to_be_bytes());
                        place[4..].copy_from_slice(&right.to_be_bytes());
                    }
                }
                _ => {}
            }
        }
    }
}
