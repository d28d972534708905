//! Repairs beside what goes by one place of a striped flow (docs/decisions/0095): its datagrams go as by any other
//! place, in the flow's one order, and what repairs a block of them says which they are. The receiver gives on what
//! comes at once, and keeps a copy; what a repair brings back is taken as if it had come by that place.

use std::collections::VecDeque;

use margay_core::time::Instant;
use margay_wire::{COVERED_MAX, ChunkName, Covered, SYMBOL_HEAD_LEN};
use reed_solomon_simd::ReedSolomonDecoder;

use crate::REPAIRS_MAX;
use crate::decoder::Refused;
use crate::encoder::{Encoder, Repair};
use crate::plan::Loss;

/// Bytes in front of a datagram in its symbol that show whether it was brought back as it was: a copy that was forged,
/// or cut otherwise on its way, makes another.
pub const CHECK_LEN: usize = 4;
/// Most datagrams, and bytes of them or of repairs, that the receiver keeps of one place.
const KEPT_MAX: usize = 256;
const KEPT_BYTES_MAX: usize = 512 << 10;
/// Datagrams that were brought back, and may come late by themselves, that are remembered.
const BROUGHT_MAX: usize = 64;
/// Most blocks of which repairs wait for datagrams to come.
const BLOCKS_MAX: usize = 8;

fn check_of(datagram: &[u8]) -> [u8; CHECK_LEN] {
    let hash = blake3::hash(datagram);
    let [a, b, c, d, ..] = *hash.as_bytes();
    [a, b, c, d]
}

/// The sending end, of one place and direction. It keeps one block.
#[derive(Debug)]
pub struct Repairer {
    encoder: Encoder,
    covered: Covered,
}

impl Default for Repairer {
    fn default() -> Self {
        Self { encoder: Encoder::new(0), covered: Covered::default() }
    }
}

impl Repairer {
    /// Takes note of what the place loses.
    pub fn note_loss(&mut self, loss: Loss) {
        self.encoder.note_loss(loss);
    }

    /// A datagram is sent by the place. Calls `each` with what is to follow it: repairs of blocks that have ended, with
    /// the datagrams that they cover.
    pub fn add(&mut self, now: Instant, name: ChunkName, datagram: &[u8], mut each: impl FnMut(&Covered, &Repair<'_>)) {
        if self.encoder.is_due(now) {
            self.close(&mut each);
        }
        let mut covered = self.covered;
        if !covered.add(name) {
            self.close(&mut each);
            covered = Covered::default();
            if !covered.add(name) {
                // It goes without a repair.
                return;
            }
        }
        self.covered = covered;
        self.encoder.add(now, &check_of(datagram), datagram);
        if self.covered.names().len() >= COVERED_MAX || self.encoder.is_full() {
            self.close(&mut each);
        }
    }

    /// When the block is to be [`close_due`](Self::close_due)d, if something is to be sent then.
    pub fn deadline(&self) -> Option<Instant> {
        self.encoder.deadline()
    }

    /// Ends the block, if it has lasted long enough. As [`add`](Self::add).
    pub fn close_due(&mut self, now: Instant, mut each: impl FnMut(&Covered, &Repair<'_>)) {
        if self.encoder.is_due(now) {
            self.close(&mut each);
        }
    }

    fn close(&mut self, each: &mut impl FnMut(&Covered, &Repair<'_>)) {
        let covered = core::mem::take(&mut self.covered);
        self.encoder.close(|repair| each(&covered, &repair));
    }
}

/// A repair of a block, as it has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RepairBeside {
    /// Which block of the place it is.
    pub block: u32,
    /// Place among the repairs of the block.
    pub index: u16,
    /// How many these are.
    pub count: u16,
}

#[derive(Debug)]
struct Kept {
    name: ChunkName,
    datagram: Box<[u8]>,
}

#[derive(Debug)]
struct Block {
    number: u32,
    covered: Covered,
    count: u16,
    repairs: Vec<(u16, Box<[u8]>)>,
}

/// The receiving end, of one place and direction. It keeps 256 datagrams and the repairs of eight blocks, at most 512
/// KiB of each.
#[derive(Debug, Default)]
pub struct Restorer {
    kept: VecDeque<Kept>,
    bytes: usize,
    blocks: VecDeque<Block>,
    /// What was brought back, and whether it has passed on its way to the program.
    brought: VecDeque<(ChunkName, bool)>,
}

impl Restorer {
    /// Whether a datagram that is about to be given on was brought back before, and given on then: it comes late. What
    /// is brought back is to pass here itself. Few are remembered, so that a sender that counts anew is heard.
    pub fn is_late(&mut self, name: ChunkName) -> bool {
        let Some((_, has_passed)) = self.brought.iter_mut().find(|(known, _)| *known == name) else { return false };
        core::mem::replace(has_passed, true)
    }

    /// A datagram has come by the place, and was taken. Calls `give` with those that can be brought back now.
    pub fn keep(&mut self, name: ChunkName, datagram: &[u8], mut give: impl FnMut(ChunkName, &[u8])) {
        if self.find(name).is_some() {
            return;
        }
        self.put(name, datagram.into());
        if let Some(at) = self.blocks.iter().position(|block| block.covered.names().contains(&name)) {
            self.restore(at, &mut give);
        }
    }

    /// A repair has come by the place. As [`keep`](Self::keep).
    ///
    /// # Errors
    ///
    /// It does not fit itself, or what has come of its block before.
    pub fn repair(
        &mut self,
        of: RepairBeside,
        covered: &Covered,
        symbol: &[u8],
        mut give: impl FnMut(ChunkName, &[u8]),
    ) -> Result<(), Refused> {
        let is_sound = (1..=REPAIRS_MAX).contains(&of.count)
            && of.index < of.count
            && symbol.len() >= SYMBOL_HEAD_LEN + CHECK_LEN
            && symbol.len().is_multiple_of(2)
            && symbol.len() <= usize::from(u16::MAX);
        if !is_sound {
            return Err(Refused::Malformed);
        }
        if self.missing(covered) == 0 {
            return Ok(());
        }
        let is_it = |block: &Block| block.number == of.block && block.covered == *covered;
        let at = match self.blocks.iter().position(is_it) {
            Some(at) => at,
            None => {
                if self.blocks.len() >= BLOCKS_MAX {
                    self.blocks.pop_front();
                }
                let fresh = Block { number: of.block, covered: *covered, count: of.count, repairs: Vec::new() };
                self.blocks.push_back(fresh);
                self.blocks.len() - 1
            }
        };
        let block = &mut self.blocks[at];
        let is_of_block =
            block.count == of.count && block.repairs.first().is_none_or(|(_, first)| first.len() == symbol.len());
        if !is_of_block {
            return Err(Refused::Malformed);
        }
        if block.repairs.iter().any(|(index, _)| *index == of.index) {
            return Err(Refused::Late);
        }
        block.repairs.push((of.index, symbol.into()));
        self.restore(at, &mut give);
        while self.repair_bytes() > KEPT_BYTES_MAX {
            self.blocks.pop_front();
        }
        Ok(())
    }

    /// How many bytes are kept.
    pub fn bytes(&self) -> usize {
        self.bytes + self.repair_bytes()
    }

    /// Keeps nothing: there is no memory for it. What was brought back is remembered.
    pub fn clear(&mut self) {
        self.kept.clear();
        self.blocks.clear();
        self.bytes = 0;
    }

    fn repair_bytes(&self) -> usize {
        self.blocks.iter().flat_map(|block| &block.repairs).map(|(_, symbol)| symbol.len()).sum()
    }

    fn find(&self, name: ChunkName) -> Option<&[u8]> {
        self.kept.iter().rev().find(|kept| kept.name == name).map(|kept| &*kept.datagram)
    }

    fn missing(&self, covered: &Covered) -> usize {
        covered.names().iter().filter(|name| self.find(**name).is_none()).count()
    }

    fn put(&mut self, name: ChunkName, datagram: Box<[u8]>) {
        self.bytes += datagram.len();
        self.kept.push_back(Kept { name, datagram });
        while self.kept.len() > KEPT_MAX || self.bytes > KEPT_BYTES_MAX {
            let Some(oldest) = self.kept.pop_front() else { return };
            self.bytes -= oldest.datagram.len();
        }
    }

    /// Brings back what is missing of a block, if that can be; then nothing more of the block is waited for.
    fn restore(&mut self, at: usize, give: &mut impl FnMut(ChunkName, &[u8])) {
        let Some(block) = self.blocks.get(at) else { return };
        let missing = self.missing(&block.covered);
        if missing > block.repairs.len() {
            return;
        }
        let restored = if missing == 0 { Vec::new() } else { self.restored(block, missing).unwrap_or_default() };
        self.blocks.remove(at);
        for (name, datagram) in restored {
            if self.brought.len() >= BROUGHT_MAX {
                self.brought.pop_front();
            }
            self.brought.push_back((name, false));
            give(name, &datagram);
            self.put(name, datagram);
        }
    }

    /// The missing datagrams of a block. `None` where they do not fit the others, or none comes out as it was sent.
    fn restored(&self, block: &Block, missing: usize) -> Option<Vec<(ChunkName, Box<[u8]>)>> {
        let names = block.covered.names();
        let longest = block.repairs.first()?.1.len();
        let mut coder = ReedSolomonDecoder::new(names.len(), usize::from(block.count), longest).ok()?;
        let mut symbol = Vec::with_capacity(longest);
        for (at, name) in names.iter().enumerate() {
            let Some(datagram) = self.find(*name) else { continue };
            symbol.clear();
            symbol.extend_from_slice(&u16::try_from(CHECK_LEN + datagram.len()).ok()?.to_be_bytes());
            symbol.extend_from_slice(&check_of(datagram));
            symbol.extend_from_slice(datagram);
            if symbol.len() > longest {
                return None;
            }
            symbol.resize(longest, 0);
            coder.add_original_shard(at, &symbol).ok()?;
        }
        for (index, symbol) in block.repairs.iter().take(missing) {
            coder.add_recovery_shard(usize::from(*index), symbol).ok()?;
        }
        let decoded = coder.decode().ok()?;
        let all = decoded.restored_original_iter();
        all.map(|(at, symbol)| Some((*names.get(at)?, datagram_of(symbol)?.into()))).collect()
    }
}

/// The datagram of a symbol, if it is as it was sent.
fn datagram_of(symbol: &[u8]) -> Option<&[u8]> {
    let (len, rest) = symbol.split_first_chunk::<SYMBOL_HEAD_LEN>()?;
    let (check, datagram) = rest.get(..usize::from(u16::from_be_bytes(*len)))?.split_first_chunk::<CHECK_LEN>()?;
    (check_of(datagram) == *check).then_some(datagram)
}

#[cfg(test)]
#[path = "beside_test.rs"]
mod test;
