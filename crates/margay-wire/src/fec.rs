//! What stands behind the header of DATA of the stack `fec` (docs/decisions/0081): in front of a chunk its place in its
//! train, and in front of a repair the length of its block. Where both are sealed (`secure-fec`, docs/decisions/0085),
//! the number and the place in the block, which DATA's header has otherwise, are in front of either.

use crate::data::REPAIR;
use crate::header::Error;

/// Most datagrams of a block.
pub const BLOCK_MAX: u16 = 32;
/// Bytes in front of the chunk of a datagram of `fec`.
pub const PLACE_LEN: usize = 4;
/// Bytes in front of the symbol of a repair.
pub const REPAIR_HEADER_LEN: usize = 4;
/// Bytes in front of a datagram in the symbol that is coded: its length.
pub const SYMBOL_HEAD_LEN: usize = 2;
/// Bytes in front of a datagram, or of a repair, that is sealed.
pub const SEALED_FEC_LEN: usize = 8;

fn half(bytes: [u8; 2]) -> u16 {
    u16::from_be_bytes(bytes)
}

/// Where a chunk is in its train. The train has the number of its first chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaceRepr {
    /// Place of the chunk.
    pub index: u16,
    /// Chunks of the train.
    pub count: u16,
}

impl PlaceRepr {
    /// Reads the place, and gives the chunk behind it.
    ///
    /// # Errors
    ///
    /// Too short, or a place outside the train.
    pub fn parse(bytes: &[u8]) -> Result<(Self, &[u8]), Error> {
        let (head, chunk) = bytes.split_first_chunk::<PLACE_LEN>().ok_or(Error)?;
        let repr = Self { index: half([head[0], head[1]]), count: half([head[2], head[3]]) };
        if repr.index < repr.count { Ok((repr, chunk)) } else { Err(Error) }
    }

    /// As it is written.
    pub fn emit(&self) -> [u8; PLACE_LEN] {
        let index = self.index.to_be_bytes();
        let count = self.count.to_be_bytes();
        [index[0], index[1], count[0], count[1]]
    }
}

/// What a repair says of its block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RepairRepr {
    /// Datagrams of the block, at most [`BLOCK_MAX`].
    pub datagrams: u16,
}

impl RepairRepr {
    /// Reads the header, and gives the symbol behind it.
    ///
    /// # Errors
    ///
    /// Too short, a block of no datagrams or of too many, or a symbol of an odd length.
    pub fn parse(bytes: &[u8]) -> Result<(Self, &[u8]), Error> {
        let (head, symbol) = bytes.split_first_chunk::<REPAIR_HEADER_LEN>().ok_or(Error)?;
        let repr = Self { datagrams: half([head[0], head[1]]) };
        let is_sound =
            (1..=BLOCK_MAX).contains(&repr.datagrams) && !symbol.is_empty() && symbol.len().is_multiple_of(2);
        if is_sound { Ok((repr, symbol)) } else { Err(Error) }
    }

    /// As it is written.
    pub fn emit(&self) -> [u8; REPAIR_HEADER_LEN] {
        let datagrams = self.datagrams.to_be_bytes();
        [datagrams[0], datagrams[1], 0, 0]
    }
}

/// What DATA's header says of a datagram or of a repair that goes by `fec`, inside the seal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealedFecRepr {
    /// The number of the block's first datagram.
    pub base: u32,
    /// Whether it repairs a block.
    pub is_repair: bool,
    /// Place of the datagram in its block, or of the repair among those of the block.
    pub index: u8,
    /// [`BLOCK_MAX`], or the repairs of the block.
    pub count: u8,
}

impl SealedFecRepr {
    /// Reads the header, and gives what is behind it.
    ///
    /// # Errors
    ///
    /// Too short, or a place outside the block.
    pub fn parse(bytes: &[u8]) -> Result<(Self, &[u8]), Error> {
        let ([b0, b1, b2, b3, flags, index, count, _], rest) =
            bytes.split_first_chunk::<SEALED_FEC_LEN>().ok_or(Error)?;
        let base = u32::from_be_bytes([*b0, *b1, *b2, *b3]);
        let repr = Self { base, is_repair: flags & REPAIR != 0, index: *index, count: *count };
        if repr.index < repr.count { Ok((repr, rest)) } else { Err(Error) }
    }

    /// As it is written.
    pub fn emit(&self) -> [u8; SEALED_FEC_LEN] {
        let [b0, b1, b2, b3] = self.base.to_be_bytes();
        [b0, b1, b2, b3, if self.is_repair { REPAIR } else { 0 }, self.index, self.count, 0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sealed_says_its_place_inside() {
        let repr = SealedFecRepr { base: 0x0102_0304, is_repair: true, index: 1, count: 3 };
        assert_eq!(repr.emit(), [1, 2, 3, 4, 4, 1, 3, 0]);
        assert_eq!(SealedFecRepr::parse(&[1, 2, 3, 4, 4, 1, 3, 0, 9]), Ok((repr, &[9][..])));
        let datagram = SealedFecRepr { is_repair: false, ..repr };
        assert_eq!(SealedFecRepr::parse(&datagram.emit()), Ok((datagram, &[][..])));
        assert_eq!(SealedFecRepr::parse(&[1, 2, 3, 4, 4, 3, 3, 0]), Err(Error), "outside the block");
        assert_eq!(SealedFecRepr::parse(&[0; 7]), Err(Error));
    }

    #[test]
    fn places_and_repairs_are_as_written_in_the_book() {
        let place = PlaceRepr { index: 2, count: 0x0103 };
        assert_eq!(place.emit(), [0, 2, 1, 3]);
        assert_eq!(PlaceRepr::parse(&[0, 2, 1, 3, 9]), Ok((place, &[9][..])));
        assert_eq!(PlaceRepr::parse(&[0, 2, 0, 2, 9]), Err(Error), "outside the train");
        assert_eq!(PlaceRepr::parse(&[0, 0, 0]), Err(Error));
        let repair = RepairRepr { datagrams: 15 };
        assert_eq!(repair.emit(), [0, 15, 0, 0]);
        assert_eq!(RepairRepr::parse(&[0, 15, 0, 0, 1, 2]), Ok((repair, &[1, 2][..])));
        for bad in [&[0, 0, 0, 0, 1, 2][..], &[0, 33, 0, 0, 1, 2], &[0, 15, 0, 0, 1], &[0, 15, 0, 0], &[0, 15, 0]] {
            assert_eq!(RepairRepr::parse(bad), Err(Error), "{bad:?}");
        }
    }
}
