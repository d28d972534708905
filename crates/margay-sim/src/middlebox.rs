//! Boxes: what the kernel of a host does with packets that come in by `sal0` and are for nobody here.

use std::collections::BTreeSet;

use margay_core::Tuple;

use crate::program::{ACK, RST, SYN, Segment};

/// What a box does with the first packet of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Habit {
    /// It lets it pass, as every other.
    Passes,
    /// It drops it; of datagrams every one.
    Eats,
    /// It resets it.
    Refuses,
    /// It answers it, as if it were the service.
    Answers,
    /// It lets it pass twice.
    Doubles,
}

/// A box of a simulated host.
#[derive(Debug)]
pub struct Middlebox {
    /// What it does with first packets.
    pub habit: Habit,
    /// Five-tuples of first packets that it was given.
    pub seen: BTreeSet<Tuple>,
    /// Packets that have passed.
    pub passed: u64,
    /// Bytes of programs that have passed.
    pub bytes: u64,
}

impl Middlebox {
    pub(crate) const fn new(habit: Habit) -> Self {
        Self { habit, seen: BTreeSet::new(), passed: 0, bytes: 0 }
    }

    /// What comes out of it, in the order in which it does.
    pub(crate) fn handle(&mut self, segment: &Segment) -> Vec<Segment> {
        let is_datagram = segment.tuple.protocol == crate::program::UDP;
        let is_first = if is_datagram {
            !self.seen.contains(&segment.tuple.reversed()) && !self.seen.contains(&segment.tuple)
        } else {
            segment.flags & (SYN | ACK) == SYN
        };
        if is_first {
            self.seen.insert(segment.tuple);
        }
        let back = |flags: u8| Segment {
            tuple: segment.tuple.reversed(),
            sequence: 0,
            acknowledgement: segment.sequence.wrapping_add(1),
            flags,
            data: Vec::new(),
            proof: None,
        };
        match self.habit {
            Habit::Eats if is_first || is_datagram => return Vec::new(),
            Habit::Refuses if is_first => return vec![back(RST | ACK)],
            Habit::Answers if is_first => return vec![back(SYN | ACK)],
            _ => {}
        }
        self.passed += 1;
        self.bytes += segment.data.len() as u64;
        let count = if is_first && self.habit == Habit::Doubles { 2 } else { 1 };
        vec![segment.clone(); count]
    }
}
