//! The sending end: datagrams leave at once, and what repairs their block follows.

use std::time::Duration;

use margay_core::time::Instant;
use margay_wire::{BLOCK_MAX, SYMBOL_HEAD_LEN};
use reed_solomon_simd::ReedSolomonEncoder;

use crate::plan::{Loss, Plan};

/// A block that is not full ends so long after its first datagram: what repairs it is of no use when it comes late.
pub const BLOCK_TIME: Duration = Duration::from_millis(8);
/// A block has no datagrams more once it has so many bytes.
const BLOCK_BYTES_MAX: usize = 64 << 10;
/// Longest datagram that is repaired, in bytes: a symbol says its length in two.
const PAYLOAD_MAX: usize = u16::MAX as usize - SYMBOL_HEAD_LEN - 1;

/// Where a datagram is in its block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Number of the block's first datagram.
    pub base: u32,
    /// Place of this one.
    pub index: u16,
}

/// One repair of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repair<'a> {
    /// Number of the block's first datagram.
    pub base: u32,
    /// Datagrams of the block.
    pub datagrams: u16,
    /// Place among the repairs of the block.
    pub index: u16,
    /// How many these are.
    pub count: u16,
    /// What is sent: all repairs of a block have the same length, an even one.
    pub symbol: &'a [u8],
}

/// The sending end of one flow. It keeps one block: at most [`BLOCK_MAX`] datagrams and some 128 KiB.
#[derive(Debug)]
pub struct Encoder {
    base: u32,
    len: u16,
    /// Of the block, one behind the other: length, then the datagram.
    symbols: Vec<u8>,
    ends: Vec<usize>,
    due: Option<Instant>,
    /// Whether the block will be repaired.
    keeps: bool,
    plan: Plan,
}

impl Encoder {
    /// The first datagram gets this number.
    pub fn new(first: u32) -> Self {
        let plan = Plan::default();
        let keeps = plan.is_active();
        Self { base: first, len: 0, symbols: Vec::new(), ends: Vec::new(), due: None, keeps, plan }
    }

    /// Takes note of what is lost.
    pub fn note_loss(&mut self, loss: Loss) {
        self.plan.note(loss);
    }

    /// Numbers a datagram of these two parts, which is to be sent at once. Before, a block that
    /// [`is_due`](Self::is_due), and after, one that [`is_full`](Self::is_full), is to be [`close`](Self::close)d.
    pub fn add(&mut self, now: Instant, head: &[u8], rest: &[u8]) -> Slot {
        let slot = Slot { base: self.base, index: self.len };
        if self.len == 0 {
            self.due = Some(now + BLOCK_TIME);
        }
        self.len += 1;
        let len = head.len() + rest.len();
        self.keeps &= len <= PAYLOAD_MAX;
        if self.keeps {
            // It fits: it is at most PAYLOAD_MAX.
            self.symbols.extend_from_slice(&(len as u16).to_be_bytes());
            self.symbols.extend_from_slice(head);
            self.symbols.extend_from_slice(rest);
            self.ends.push(self.symbols.len());
        }
        slot
    }

    /// Whether the block has room for no more.
    pub fn is_full(&self) -> bool {
        self.len >= BLOCK_MAX || self.symbols.len() >= BLOCK_BYTES_MAX
    }

    /// Whether the block has lasted long enough.
    pub fn is_due(&self, now: Instant) -> bool {
        self.len > 0 && self.due.is_some_and(|due| due <= now)
    }

    /// When the block is to be [`close`](Self::close)d, if something is to be sent then.
    pub fn deadline(&self) -> Option<Instant> {
        self.due.filter(|_| self.len > 0 && self.keeps)
    }

    /// Ends the block. Calls `each` with what repairs it, in order.
    pub fn close(&mut self, mut each: impl FnMut(Repair<'_>)) {
        if self.len > 0 && self.keeps {
            let count = self.plan.take(self.len);
            if count > 0 {
                // Nothing but the counts and the length can be refused, and all are within their bounds: such a block
                // would go without repairs.
                let _ = self.repair(count, &mut each);
            }
        }
        self.base = self.base.wrapping_add(u32::from(self.len));
        self.len = 0;
        self.symbols.clear();
        self.ends.clear();
        self.due = None;
        self.keeps = self.plan.is_active();
    }

    fn repair(&self, count: u16, each: &mut impl FnMut(Repair<'_>)) -> Result<(), reed_solomon_simd::Error> {
        let starts = || std::iter::once(0).chain(self.ends.iter().copied());
        let symbols = || starts().zip(&self.ends).map(|(start, end)| &self.symbols[start..*end]);
        let longest = symbols().map(<[u8]>::len).max().unwrap_or_default().next_multiple_of(2);
        let mut coder = ReedSolomonEncoder::new(self.ends.len(), usize::from(count), longest)?;
        let mut padded = Vec::with_capacity(longest);
        for symbol in symbols() {
            padded.clear();
            padded.extend_from_slice(symbol);
            padded.resize(longest, 0);
            coder.add_original_shard(&padded)?;
        }
        let coded = coder.encode()?;
        for (index, symbol) in (0..count).zip(coded.recovery_iter()) {
            each(Repair { base: self.base, datagrams: self.len, index, count, symbol });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Instant {
        Instant::from_millis(millis)
    }

    fn closed(encoder: &mut Encoder) -> Vec<(u32, u16, u16, u16, Vec<u8>)> {
        let mut repairs = Vec::new();
        encoder.close(|one| repairs.push((one.base, one.datagrams, one.index, one.count, one.symbol.to_vec())));
        repairs
    }

    #[test]
    fn datagrams_are_numbered_through_and_blocks_end_in_time() {
        let mut encoder = Encoder::new(u32::MAX);
        assert_eq!((encoder.deadline(), encoder.is_due(at(1000))), (None, false));
        assert_eq!(encoder.add(at(100), &[], b"abc"), Slot { base: u32::MAX, index: 0 });
        assert_eq!(encoder.add(at(105), &[], b"d"), Slot { base: u32::MAX, index: 1 });
        assert_eq!(
            (encoder.deadline(), encoder.is_due(at(107)), encoder.is_due(at(108))),
            (Some(at(108)), false, true)
        );
        let repairs = closed(&mut encoder);
        assert!(repairs.iter().all(|one| (one.0, one.1, one.4.len()) == (u32::MAX, 2, 6)), "{repairs:?}");
        assert!(!repairs.is_empty());
        assert_eq!(encoder.add(at(200), &[], b"e"), Slot { base: 1, index: 0 });
        assert!(closed(&mut encoder).iter().all(|one| one.4.len() == 4));
        for index in 0..BLOCK_MAX {
            assert!(!encoder.is_full());
            assert_eq!(encoder.add(at(300), &[], &[7; 100]), Slot { base: 2, index });
        }
        assert!(encoder.is_full());
        closed(&mut encoder);
        let long = vec![1; 40_000];
        encoder.add(at(400), &[], &long);
        assert!(!encoder.is_full());
        encoder.add(at(400), &[], &long);
        assert!(encoder.is_full(), "in bytes");
    }

    #[test]
    fn a_repair_of_one_datagram_has_its_length_in_front() {
        // Reed-Solomon of one symbol: whatever the coder makes of it, the symbol itself comes out of it again.
        let mut encoder = Encoder::new(9);
        encoder.note_loss(Loss { ppm: 100_000, row_thousandths: 1000 });
        encoder.add(at(0), &[], &[0xaa, 0xbb, 0xcc]);
        let repairs = closed(&mut encoder);
        let mut coder = reed_solomon_simd::ReedSolomonDecoder::new(1, repairs.len(), 6).expect("supported");
        coder.add_recovery_shard(0, &repairs[0].4).expect("one of it");
        let restored = coder.decode().expect("enough");
        assert_eq!(restored.restored_original(0), Some(&[0, 3, 0xaa, 0xbb, 0xcc, 0][..]));
    }

    #[test]
    fn where_nothing_is_lost_nothing_is_kept_or_added() {
        let mut encoder = Encoder::new(0);
        encoder.note_loss(Loss { ppm: 0, row_thousandths: 1000 });
        // What had been kept of this block is repaired by what is known at its end: by nothing.
        encoder.add(at(0), &[], &[1; 1000]);
        assert!(closed(&mut encoder).is_empty());
        encoder.add(at(1), &[], &[1; 1000]);
        assert_eq!((encoder.deadline(), encoder.symbols.len(), encoder.is_due(at(9))), (None, 0, true));
        assert!(closed(&mut encoder).is_empty());
        let mut encoder = Encoder::new(0);
        encoder.add(at(0), &[], &vec![1; PAYLOAD_MAX + 1]);
        assert!(closed(&mut encoder).is_empty(), "too long for a symbol");
    }
}
