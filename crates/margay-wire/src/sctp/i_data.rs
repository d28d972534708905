//! I-DATA: a frame, or a fragment of one (RFC 8260, 2.1).

use bitflags::bitflags;

use super::{CHUNK_HEADER_LEN, emit_chunk_header, half, kind, word};
use crate::header::Error;

/// Bytes of an I-DATA chunk before its payload.
pub const I_DATA_HEADER_LEN: usize = 20;
/// The most bytes of a frame that one chunk takes, so that with its padding it is no longer than a length field can
/// say.
pub const I_DATA_PAYLOAD_MAX: usize = 65_532 - I_DATA_HEADER_LEN;

/// Fields of the value, which starts behind the four bytes of every chunk.
mod field {
    use core::ops::Range;

    pub const TSN: Range<usize> = 0..4;
    pub const STREAM: Range<usize> = 4..6;
    pub const RESERVED: Range<usize> = 6..8;
    pub const MID: Range<usize> = 8..12;
    pub const NUMBER: Range<usize> = 12..16;
    pub const PAYLOAD: usize = 16;
}

bitflags! {
    /// Flags of I-DATA.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct IDataFlags: u8 {
        /// The last fragment of its frame.
        const END = 1;
        /// The first fragment of its frame.
        const BEGIN = 2;
        /// The frame has no place in an order.
        const UNORDERED = 4;
        /// The receiver is asked to acknowledge at once (RFC 7053).
        const IMMEDIATE = 8;
    }
}

/// The head of an I-DATA chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IDataRepr {
    /// Flags; a frame of one chunk has BEGIN and END.
    pub flags: IDataFlags,
    /// Transmission sequence number, of the chunk.
    pub tsn: u32,
    /// Stream.
    pub stream: u16,
    /// Message identifier: which frame of the stream, counted apart for those with and without order.
    pub mid: u32,
    /// With BEGIN the payload protocol identifier, else the fragment sequence number, from 1.
    pub number: u32,
}

impl IDataRepr {
    /// Reads the value of the chunk; gives the frame's bytes behind it.
    pub(super) fn parse(flags: u8, value: &[u8]) -> Result<(Self, &[u8]), Error> {
        let payload = value.get(field::PAYLOAD..).ok_or(Error)?;
        let repr = Self {
            flags: IDataFlags::from_bits_truncate(flags),
            tsn: word(&value[field::TSN]),
            stream: half(&value[field::STREAM]),
            mid: word(&value[field::MID]),
            number: word(&value[field::NUMBER]),
        };
        // A chunk without user data is an error (RFC 9260, 3.3.1), and the number 0 is the first fragment's.
        let is_misnumbered = !repr.flags.contains(IDataFlags::BEGIN) && repr.number == 0;
        if payload.is_empty() || is_misnumbered { Err(Error) } else { Ok((repr, payload)) }
    }

    /// Writes the head of a chunk with `payload_len` bytes of payload into the first [`I_DATA_HEADER_LEN`] bytes of
    /// `out`.
    pub(super) fn emit(&self, payload_len: usize, out: &mut [u8]) {
        emit_chunk_header(kind::I_DATA, self.flags.bits(), I_DATA_HEADER_LEN + payload_len, out);
        let value = &mut out[CHUNK_HEADER_LEN..];
        value[field::TSN].copy_from_slice(&self.tsn.to_be_bytes());
        value[field::STREAM].copy_from_slice(&self.stream.to_be_bytes());
        value[field::RESERVED].fill(0);
        value[field::MID].copy_from_slice(&self.mid.to_be_bytes());
        value[field::NUMBER].copy_from_slice(&self.number.to_be_bytes());
    }

    /// Whether it is the first fragment.
    pub const fn begins(&self) -> bool {
        self.flags.contains(IDataFlags::BEGIN)
    }

    /// Whether it is the last fragment.
    pub const fn ends(&self) -> bool {
        self.flags.contains(IDataFlags::END)
    }

    /// Whether the frame has no place in an order.
    pub const fn is_unordered(&self) -> bool {
        self.flags.contains(IDataFlags::UNORDERED)
    }

    /// Which fragment of the frame it is, from 0.
    pub const fn fragment(&self) -> u32 {
        if self.begins() { 0 } else { self.number }
    }
}
