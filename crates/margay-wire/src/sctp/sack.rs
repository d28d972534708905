//! SACK: what has come (RFC 9260, 3.3.4). Duplicates are not reported: writers say none, readers pass over them.

use super::{CHUNK_HEADER_LEN, emit_chunk_header, half, kind, word};
use crate::header::Error;

/// Bytes of a SACK without gap blocks.
pub const SACK_LEN: usize = 16;
/// Bytes of a gap block.
pub const GAP_BLOCK_LEN: usize = 4;
const DUPLICATE_LEN: usize = 4;

/// Fields of the value, which starts behind the four bytes of every chunk.
mod field {
    use core::ops::Range;

    pub const CUMULATIVE: Range<usize> = 0..4;
    pub const WINDOW: Range<usize> = 4..8;
    pub const BLOCKS: Range<usize> = 8..10;
    pub const DUPLICATES: Range<usize> = 10..12;
    pub const LISTS: usize = 12;

    pub const START: Range<usize> = 0..2;
    pub const END: Range<usize> = 2..4;
}

/// A run of TSNs that have come, as distances from the cumulative one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GapBlock {
    /// Distance of the first, at least 1.
    pub start: u16,
    /// Distance of the last, no less than the first's.
    pub end: u16,
}

impl GapBlock {
    fn parse(bytes: &[u8]) -> Self {
        Self { start: half(&bytes[field::START]), end: half(&bytes[field::END]) }
    }

    const fn is_sound(&self) -> bool {
        self.start > 0 && self.start <= self.end
    }

    pub(super) fn emit(&self, out: &mut [u8]) {
        out[field::START].copy_from_slice(&self.start.to_be_bytes());
        out[field::END].copy_from_slice(&self.end.to_be_bytes());
    }
}

/// What has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sack<'a> {
    /// All up to this TSN.
    pub cumulative: u32,
    /// The receiver has room for so many bytes (a_rwnd).
    pub window_bytes: u32,
    /// Checked: each has the length of a block and starts before it ends.
    blocks: &'a [u8],
}

impl<'a> Sack<'a> {
    pub(super) fn parse(value: &'a [u8]) -> Result<Self, Error> {
        let lists = value.get(field::LISTS..).ok_or(Error)?;
        let blocks_len = usize::from(half(&value[field::BLOCKS])) * GAP_BLOCK_LEN;
        let duplicates_len = usize::from(half(&value[field::DUPLICATES])) * DUPLICATE_LEN;
        if lists.len() != blocks_len + duplicates_len {
            return Err(Error);
        }
        let blocks = &lists[..blocks_len];
        let (cumulative, window_bytes) = (word(&value[field::CUMULATIVE]), word(&value[field::WINDOW]));
        let sack = Self { cumulative, window_bytes, blocks };
        if sack.blocks().all(|block| block.is_sound()) { Ok(sack) } else { Err(Error) }
    }

    /// The gap blocks, as they were written.
    pub fn blocks(&self) -> impl Iterator<Item = GapBlock> + Clone + 'a {
        self.blocks.chunks_exact(GAP_BLOCK_LEN).map(GapBlock::parse)
    }
}

/// Writes what stands before the blocks, of which there will be `blocks`.
pub(super) fn emit_head(cumulative: u32, window_bytes: u32, blocks: u16, out: &mut [u8]) {
    emit_chunk_header(kind::SACK, 0, SACK_LEN + usize::from(blocks) * GAP_BLOCK_LEN, out);
    let value = &mut out[CHUNK_HEADER_LEN..];
    value[field::CUMULATIVE].copy_from_slice(&cumulative.to_be_bytes());
    value[field::WINDOW].copy_from_slice(&window_bytes.to_be_bytes());
    value[field::BLOCKS].copy_from_slice(&blocks.to_be_bytes());
    value[field::DUPLICATES].fill(0);
}
