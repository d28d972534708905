//! I-FORWARD-TSN: what will not come any more (RFC 8260, 2.3.1, and RFC 3758).

use super::{CHUNK_HEADER_LEN, emit_chunk_header, half, kind, word};
use crate::header::Error;

/// Bytes of an I-FORWARD-TSN that names no stream.
pub const I_FORWARD_TSN_LEN: usize = 8;
/// Bytes of each stream that it names.
pub const SKIPPED_LEN: usize = 8;
const UNORDERED: u16 = 1;

/// Fields of the value, which starts behind the four bytes of every chunk, and of each stream.
mod field {
    use core::ops::Range;

    pub const CUMULATIVE: Range<usize> = 0..4;
    pub const SKIPPED: usize = 4;

    pub const STREAM: Range<usize> = 0..2;
    pub const FLAGS: Range<usize> = 2..4;
    pub const MID: Range<usize> = 4..8;
}

/// Of a stream: frames up to this one do not wait for any that has not come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SkippedRepr {
    /// Stream.
    pub stream: u16,
    /// Of the frames without order.
    pub is_unordered: bool,
    /// The largest message identifier that is passed over.
    pub mid: u32,
}

impl SkippedRepr {
    fn parse(bytes: &[u8]) -> Self {
        Self {
            stream: half(&bytes[field::STREAM]),
            is_unordered: half(&bytes[field::FLAGS]) & UNORDERED != 0,
            mid: word(&bytes[field::MID]),
        }
    }

    pub(super) fn emit(&self, out: &mut [u8]) {
        let flags = if self.is_unordered { UNORDERED } else { 0 };
        out[field::STREAM].copy_from_slice(&self.stream.to_be_bytes());
        out[field::FLAGS].copy_from_slice(&flags.to_be_bytes());
        out[field::MID].copy_from_slice(&self.mid.to_be_bytes());
    }
}

/// What will not come any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IForwardTsn<'a> {
    /// Of the TSNs up to this one.
    pub cumulative: u32,
    /// Checked: a whole number of streams.
    skipped: &'a [u8],
}

impl<'a> IForwardTsn<'a> {
    pub(super) fn parse(value: &'a [u8]) -> Result<Self, Error> {
        let skipped = value.get(field::SKIPPED..).ok_or(Error)?;
        if !skipped.len().is_multiple_of(SKIPPED_LEN) {
            return Err(Error);
        }
        Ok(Self { cumulative: word(&value[field::CUMULATIVE]), skipped })
    }

    /// The streams that are concerned.
    pub fn skipped(&self) -> impl Iterator<Item = SkippedRepr> + Clone + 'a {
        self.skipped.chunks_exact(SKIPPED_LEN).map(SkippedRepr::parse)
    }
}

/// Writes what stands before the streams, of which there will be `skipped`.
pub(super) fn emit_head(cumulative: u32, skipped: usize, out: &mut [u8]) {
    emit_chunk_header(kind::I_FORWARD_TSN, 0, I_FORWARD_TSN_LEN + skipped * SKIPPED_LEN, out);
    out[CHUNK_HEADER_LEN..][field::CUMULATIVE].copy_from_slice(&cumulative.to_be_bytes());
}
