//! WATERMARK: what of the peer's order is complete at a member of an ensemble (docs/decisions/0056).

use super::{CHUNK_HEADER_LEN, emit_chunk_header, kind, word};
use crate::header::Error;

/// Bytes of a WATERMARK.
pub const WATERMARK_LEN: usize = 12;
const CONFIRMS: u8 = 1;

/// Fields of the value, which starts behind the four bytes of every chunk.
mod field {
    use core::ops::Range;

    pub const LSN: Range<usize> = 0..4;
    pub const CSN: Range<usize> = 4..8;
    pub const END: usize = 8;
}

/// From the switch: what is the member's before `csn` in the peer's order has a TSN of up to `lsn` in the member's
/// space. The member, once it has all up to `lsn`, gives on in the peer's order up to `csn`.
///
/// It is the first chunk of its packet. The switch repeats one that goes alone until the member has confirmed it, or a
/// later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WatermarkRepr {
    /// From the member, with a SACK: the last watermark that it knows.
    pub confirms: bool,
    /// Local sequence number: a TSN of the member's space.
    pub lsn: u32,
    /// Connection sequence number: a TSN of the peer's space, itself not covered.
    pub csn: u32,
}

impl WatermarkRepr {
    pub(super) fn parse(flags: u8, value: &[u8]) -> Result<Self, Error> {
        if value.len() != field::END {
            return Err(Error);
        }
        Ok(Self { confirms: flags & CONFIRMS != 0, lsn: word(&value[field::LSN]), csn: word(&value[field::CSN]) })
    }

    pub(super) fn emit(&self, out: &mut [u8]) {
        emit_chunk_header(kind::WATERMARK, if self.confirms { CONFIRMS } else { 0 }, WATERMARK_LEN, out);
        let value = &mut out[CHUNK_HEADER_LEN..];
        value[field::LSN].copy_from_slice(&self.lsn.to_be_bytes());
        value[field::CSN].copy_from_slice(&self.csn.to_be_bytes());
    }
}
