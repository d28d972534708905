//! What a repair by a place of a striped flow says of its block (docs/decisions/0095): which datagrams it covers. They
//! have gone by this place as by any other, so a block names each by its train's number and its place in the train.

use crate::header::Error;

/// Most datagrams of a block of a place.
pub const COVERED_MAX: usize = 16;
/// Bytes in front of the names: how many there are, and the number of the first one's train.
const HEAD_LEN: usize = 8;
/// Bytes of a name.
const NAME_LEN: usize = 3;
/// Most bytes in front of the symbol of a repair.
pub const COVERED_LEN_MAX: usize = HEAD_LEN + COVERED_MAX * NAME_LEN;

/// One datagram of a striped flow, as the header of its DATA has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ChunkName {
    /// Packet number of its train.
    pub number: u32,
    /// Place in the train.
    pub index: u16,
}

/// The datagrams of a block of a place, in the order in which they are coded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Covered {
    names: [ChunkName; COVERED_MAX],
    count: u8,
}

impl Covered {
    /// In order.
    pub fn names(&self) -> &[ChunkName] {
        &self.names[..usize::from(self.count)]
    }

    /// Adds a datagram. False if the block has no room, or the name cannot be written beside the first one.
    pub fn add(&mut self, name: ChunkName) -> bool {
        let first = self.names().first().map_or(name.number, |first| first.number);
        let is_near = i16::try_from(name.number.wrapping_sub(first).cast_signed()).is_ok();
        let Some(free) = self.names.get_mut(usize::from(self.count)) else { return false };
        if !is_near || name.index > u16::from(u8::MAX) {
            return false;
        }
        *free = name;
        self.count += 1;
        true
    }

    /// Reads the names, and gives the symbol behind them.
    ///
    /// # Errors
    ///
    /// Too short, no datagram or too many, or a symbol of an odd length.
    pub fn parse(bytes: &[u8]) -> Result<(Self, &[u8]), Error> {
        let (head, rest) = bytes.split_first_chunk::<HEAD_LEN>().ok_or(Error)?;
        let [count, _, _, _, first @ ..] = *head;
        if count == 0 || usize::from(count) > COVERED_MAX {
            return Err(Error);
        }
        let (names, symbol) = rest.split_at_checked(usize::from(count) * NAME_LEN).ok_or(Error)?;
        let mut covered = Self { names: [ChunkName::default(); COVERED_MAX], count };
        for (name, bytes) in covered.names.iter_mut().zip(names.chunks_exact(NAME_LEN)) {
            let ahead = i16::from_be_bytes([bytes[0], bytes[1]]);
            let number = u32::from_be_bytes(first).wrapping_add_signed(ahead.into());
            *name = ChunkName { number, index: bytes[2].into() };
        }
        if symbol.is_empty() || !symbol.len().is_multiple_of(2) { Err(Error) } else { Ok((covered, symbol)) }
    }

    /// Writes the names, and gives how many bytes they take.
    pub fn emit(&self, bytes: &mut [u8; COVERED_LEN_MAX]) -> usize {
        let first = self.names[0].number;
        bytes[..HEAD_LEN].copy_from_slice(&[self.count, 0, 0, 0, 0, 0, 0, 0]);
        bytes[4..HEAD_LEN].copy_from_slice(&first.to_be_bytes());
        for (name, bytes) in self.names().iter().zip(bytes[HEAD_LEN..].chunks_exact_mut(NAME_LEN)) {
            // `add` has taken none that is farther away, and no greater index.
            let ahead = (name.number.wrapping_sub(first).cast_signed() as i16).to_be_bytes();
            bytes.copy_from_slice(&[ahead[0], ahead[1], name.index as u8]);
        }
        HEAD_LEN + self.names().len() * NAME_LEN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(number: u32, index: u16) -> ChunkName {
        ChunkName { number, index }
    }

    #[test]
    fn names_are_as_written_in_the_book() {
        let mut covered = Covered::default();
        for one in [name(u32::MAX, 0), name(1, 2), name(u32::MAX - 1, 255)] {
            assert!(covered.add(one));
        }
        let mut bytes = [0xee; COVERED_LEN_MAX];
        assert_eq!(covered.emit(&mut bytes), 17);
        let written = [3, 0, 0, 0, 255, 255, 255, 255, 0, 0, 0, 0, 2, 2, 255, 255, 255];
        assert_eq!(bytes[..17], written);
        let mut whole = [0; 19];
        whole[..17].copy_from_slice(&written);
        assert_eq!(Covered::parse(&whole), Ok((covered, &[0, 0][..])));
        assert_eq!(Covered::parse(&whole[..18]), Err(Error), "an odd symbol");
        assert_eq!(Covered::parse(&whole[..17]), Err(Error), "no symbol");
        assert_eq!(Covered::parse(&whole[..12]), Err(Error), "names are missing");
        for count in [0, 17, 255] {
            whole[0] = count;
            assert_eq!(Covered::parse(&whole), Err(Error), "{count} datagrams");
        }
    }

    #[test]
    fn a_block_has_an_end_and_names_are_near_each_other() {
        let mut covered = Covered::default();
        assert!(!covered.add(name(0, 256)), "a place that cannot be written");
        assert!((0..16).all(|index| covered.add(name(9, index))));
        assert!(!covered.add(name(9, 16)));
        let mut covered = Covered::default();
        assert!(covered.add(name(5, 0)) && covered.add(name(5 + 32_767, 0)));
        assert!(!covered.add(name(5 + 32_768, 0)));
        assert_eq!(covered.names().len(), 2);
    }
}
