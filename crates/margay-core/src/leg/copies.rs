//! Which chunks of a redundant flow have come: each is sent by two places, and only the first one is given on
//! (docs/decisions/0084).

use alloc::boxed::Box;
use alloc::vec;

/// Trains that are remembered: those of a quarter of a second at 90 Mbit/s in packets of plain size.
const TRAINS: usize = 2048;
const TRAINS_WIDE: u32 = TRAINS as u32;
/// Chunks of one train, at most.
const CHUNKS: usize = 256;
/// So many in a row that are older than what is remembered are of a peer that counts anew.
const ANEW: u32 = 32;

/// Which chunks of a train have come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Train {
    number: u32,
    /// Chunks that it has; 0: nothing has come.
    count: u16,
    come: [u64; CHUNKS / 64],
}

/// What has come of one flow, of late.
#[derive(Debug)]
pub struct Copies {
    trains: Box<[Train]>,
    /// The greatest number so far.
    newest: Option<u32>,
    /// How many in a row were too old.
    old: u32,
}

impl Default for Copies {
    fn default() -> Self {
        Self { trains: vec![Train::default(); TRAINS].into_boxed_slice(), newest: None, old: 0 }
    }
}

impl Copies {
    /// Takes note of a chunk: number `index` of the `count` of a train. False if it has come before, or is so old that
    /// this cannot be told, or of a train that was cut otherwise than what has come of it.
    pub fn admit(&mut self, number: u32, count: u16, index: u16) -> bool {
        if usize::from(index) >= CHUNKS || index >= count {
            return false;
        }
        let newest = *self.newest.get_or_insert(number);
        let ahead = number.wrapping_sub(newest).cast_signed();
        if ahead > 0 {
            self.newest = Some(number);
        } else if ahead.unsigned_abs() >= TRAINS_WIDE {
            self.old += 1;
            if self.old < ANEW {
                return false;
            }
            *self = Self { newest: Some(number), ..Self::default() };
        }
        self.old = 0;
        let train = &mut self.trains[number as usize % TRAINS];
        if (train.number, train.count > 0) != (number, true) {
            *train = Train { number, count, ..Train::default() };
        }
        let word = usize::from(index) / 64;
        let bit = 1 << (index % 64);
        if train.count != count || train.come[word] & bit != 0 {
            return false;
        }
        train.come[word] |= bit;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_chunk_is_admitted_once_in_whatever_order_copies_come() {
        let mut copies = Copies::default();
        let first = u32::MAX - 100;
        // One place is 50 trains behind the other, and loses what the other one brings, and the other way round.
        let mut given = 0;
        for at in 0..1000_u32 {
            let number = first.wrapping_add(at);
            for index in 0..2 {
                given += u32::from(at % 7 != 0 && copies.admit(number, 2, index));
                let behind = number.wrapping_sub(50);
                given += u32::from(at >= 50 && at % 5 != 0 && copies.admit(behind, 2, index));
            }
        }
        let mut expected = 0;
        for at in 0..1000_u32 {
            let came_first = at % 7 != 0;
            let came_second = at < 950 && (at + 50) % 5 != 0;
            expected += u32::from(came_first || came_second) * 2;
        }
        assert_eq!(given, expected);
    }

    #[test]
    fn one_of_a_train_that_was_cut_otherwise_or_is_too_old_is_not_admitted() {
        let mut copies = Copies::default();
        assert!(copies.admit(10, 2, 0) && !copies.admit(10, 3, 1) && copies.admit(10, 2, 1));
        assert!(!copies.admit(11, 2, 2) && !copies.admit(11, 300, 256));
        assert!(copies.admit(10 + TRAINS_WIDE, 1, 0));
        assert!(!copies.admit(10, 2, 0), "it would be given twice");
        assert!(copies.admit(11, 1, 0), "the oldest that is remembered");
    }

    #[test]
    fn a_peer_that_counts_anew_is_heard_after_a_while() {
        let mut copies = Copies::default();
        assert!(copies.admit(1_000_000, 1, 0));
        let heard = (0..100).filter(|number| copies.admit(*number, 1, 0)).count();
        assert_eq!(heard, 100 - ANEW as usize + 1);
    }
}
