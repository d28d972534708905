//! The receiving end: datagrams are given on in order, each once. One that is missing is waited for, until its block
//! can be repaired or too much time has passed.

use std::collections::VecDeque;
use std::time::Duration;

use margay_core::time::Instant;
use margay_wire::{BLOCK_MAX, SYMBOL_HEAD_LEN};
use reed_solomon_simd::ReedSolomonDecoder;

use crate::REPAIRS_MAX;

/// A missing datagram is waited for so long after one that follows it has come: its block has ended by then, repairs
/// included, and most of what is late is there.
pub const HOLD: Duration = Duration::from_millis(40);
/// A block of which nothing waits for the program is kept for its repairs for so long after its first packet: what they
/// bring back later is of no use.
const BLOCK_LIFETIME: Duration = Duration::from_millis(80);
/// A missing datagram is not waited for any more once so many later blocks have begun.
const LATER_BLOCKS_MAX: usize = 2;
/// Most blocks that are kept.
const BLOCKS_MAX: usize = 8;
/// Most bytes that are kept.
const KEPT_BYTES_MAX: usize = 512 << 10;
/// What a datagram or repair takes beside its own bytes.
const OVERHEAD_BYTES: usize = 64;
/// Numbers so far from what is expected are of another time, or forged; or the path was dead for long.
const REACH: u64 = 256;
/// So many datagrams in a row are believed whose numbers are far ahead of what is expected, and near each other.
const AHEAD_BELIEVED: u32 = 3;
/// The same of numbers far behind: to believe them may be to give a datagram twice, and never to do so would let
/// whoever forges a few numbers ahead end the flow.
const BEHIND_BELIEVED: u32 = 32;
/// The first number as it is reckoned with: high enough to go back from.
const FIRST_ROUND: u64 = 1 << 32;

/// A datagram for the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Given<'a> {
    /// Its number.
    pub number: u32,
    /// As its sender has added it.
    pub payload: &'a [u8],
}

/// A repair, as it has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RepairOf {
    /// Number of the block's first datagram.
    pub base: u32,
    /// Datagrams of the block.
    pub datagrams: u16,
    /// Place among the repairs of the block.
    pub index: u16,
    /// How many these are.
    pub count: u16,
}

/// Why something that came is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// It does not fit what has come before, or itself.
    Malformed,
    /// It has come before, or is not waited for any more.
    Late,
    /// Its number is far from what is expected.
    Far,
}

/// What has come, counted from the first number on; it wraps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Arrivals {
    /// Datagrams that should have come.
    pub expected: u32,
    /// Those that have, by themselves.
    pub received: u32,
    /// How often one or several in a row have not.
    pub gaps: u32,
    /// Those that were repaired in time.
    pub repaired: u32,
    /// Those that were given up.
    pub lost: u32,
}

#[derive(Debug)]
struct Arrived {
    at: Instant,
    payload: Box<[u8]>,
}

#[derive(Debug)]
struct Block {
    base: u64,
    /// When its first packet came, a repair or a datagram.
    began: Instant,
    /// How many datagrams it has, where a repair has said so.
    datagrams: Option<u16>,
    arrived: Vec<Option<Arrived>>,
    repairs: Vec<(u16, Box<[u8]>)>,
    repair_count: u16,
}

impl Block {
    const fn new(base: u64, began: Instant) -> Self {
        Self { base, began, datagrams: None, arrived: Vec::new(), repairs: Vec::new(), repair_count: 0 }
    }

    /// The first datagram from number `next` on that has come.
    fn first_from(&self, next: u64) -> Option<(u64, &Arrived)> {
        let mut waiting = (self.base..).zip(&self.arrived).filter(|(number, _)| *number >= next);
        waiting.find_map(|(number, arrived)| Some((number, arrived.as_ref()?)))
    }

    /// One more than the greatest number that it has for certain.
    fn end(&self) -> u64 {
        let known = self.datagrams.map_or(self.arrived.len(), usize::from);
        self.base + known as u64
    }

    fn find(&self, number: u64) -> Option<&Arrived> {
        let place = number.checked_sub(self.base)?;
        self.arrived.get(usize::try_from(place).ok()?)?.as_ref()
    }

    fn put(&mut self, place: u16, arrived: Arrived) {
        let place = usize::from(place);
        if self.arrived.len() <= place {
            self.arrived.resize_with(place + 1, || None);
        }
        self.arrived[place] = Some(arrived);
    }

    fn bytes(&self) -> usize {
        let arrived = self.arrived.iter().flatten().map(|one| one.payload.len());
        let repairs = self.repairs.iter().map(|(_, symbol)| symbol.len());
        arrived.chain(repairs).map(|len| len + OVERHEAD_BYTES).sum()
    }

    /// What the repairs make of the block: its missing datagrams, by place. Nothing where they are too few, or do not
    /// fit what has come.
    fn restore(&self) -> Option<Vec<(u16, Box<[u8]>)>> {
        let datagrams = self.datagrams?;
        let present =
            || (0..datagrams).filter_map(|place| Some((place, self.arrived.get(usize::from(place))?.as_ref()?)));
        let missing = usize::from(datagrams) - present().count();
        let longest = self.repairs.first()?.1.len();
        if missing == 0 || self.repairs.len() < missing {
            return None;
        }
        let coder = ReedSolomonDecoder::new(usize::from(datagrams), usize::from(self.repair_count), longest);
        let mut coder = coder.ok()?;
        let mut padded = Vec::with_capacity(longest);
        for (place, arrived) in present() {
            padded.clear();
            padded.extend_from_slice(&u16::try_from(arrived.payload.len()).ok()?.to_be_bytes());
            padded.extend_from_slice(&arrived.payload);
            if padded.len() > longest {
                return None;
            }
            padded.resize(longest, 0);
            coder.add_original_shard(usize::from(place), &padded).ok()?;
        }
        for (index, symbol) in self.repairs.iter().take(missing) {
            coder.add_recovery_shard(usize::from(*index), symbol).ok()?;
        }
        let restored = coder.decode().ok()?;
        restored.restored_original_iter().map(|(place, symbol)| Some((place as u16, payload_of(symbol)?))).collect()
    }
}

/// The datagram of a symbol.
fn payload_of(symbol: &[u8]) -> Option<Box<[u8]>> {
    let (len, rest) = symbol.split_first_chunk::<SYMBOL_HEAD_LEN>()?;
    rest.get(..usize::from(u16::from_be_bytes(*len))).map(Box::from)
}

/// Datagrams that are far from what is expected, but near each other.
#[derive(Clone, Copy, Debug)]
struct Strays {
    newest: u64,
    count: u32,
}

/// The receiving end of one flow. It keeps some blocks, at most 512 KiB.
#[derive(Debug)]
pub struct Decoder {
    /// The next one to be given.
    next: u64,
    /// One more than the greatest number that is known to have been sent.
    newest: u64,
    /// In the order of their numbers.
    blocks: VecDeque<Block>,
    bytes: usize,
    strays: Option<Strays>,
    arrivals: Arrivals,
}

impl Decoder {
    /// The first datagram has this number.
    pub fn new(first: u32) -> Self {
        let next = FIRST_ROUND + u64::from(first);
        Self { next, newest: next, blocks: VecDeque::new(), bytes: 0, strays: None, arrivals: Arrivals::default() }
    }

    /// What has come.
    pub const fn arrivals(&self) -> Arrivals {
        self.arrivals
    }

    /// A datagram has come: place `index` of the block that begins with number `base`. Calls `give` with what may be
    /// given to the program now.
    ///
    /// # Errors
    ///
    /// It is not taken.
    pub fn datagram(
        &mut self,
        now: Instant,
        base: u32,
        index: u16,
        payload: &[u8],
        mut give: impl FnMut(Given<'_>),
    ) -> Result<(), Refused> {
        if index >= BLOCK_MAX || payload.len() > usize::from(u16::MAX) {
            return Err(Refused::Malformed);
        }
        let base = self.whole(base);
        let number = base + u64::from(index);
        if number.abs_diff(self.next) > REACH {
            self.note_stray(number, &mut give)?;
        }
        if number < self.next {
            return Err(Refused::Late);
        }
        let at = self.block_at(now, base, index + 1)?;
        let block = &mut self.blocks[at];
        if block.datagrams.is_some_and(|datagrams| index >= datagrams) {
            return Err(Refused::Malformed);
        }
        if block.find(number).is_some() {
            return Err(Refused::Late);
        }
        block.put(index, Arrived { at: now, payload: payload.into() });
        self.strays = None;
        self.bytes += payload.len() + OVERHEAD_BYTES;
        self.arrivals.received = self.arrivals.received.wrapping_add(1);
        self.note_sent(number, number + 1);
        self.restore(now, at);
        self.advance(&mut give);
        Ok(())
    }

    /// A repair has come. As [`datagram`](Self::datagram).
    ///
    /// # Errors
    ///
    /// It is not taken.
    pub fn repair(
        &mut self,
        now: Instant,
        of: RepairOf,
        symbol: &[u8],
        mut give: impl FnMut(Given<'_>),
    ) -> Result<(), Refused> {
        let is_sound = (1..=BLOCK_MAX).contains(&of.datagrams)
            && (1..=REPAIRS_MAX).contains(&of.count)
            && of.index < of.count
            && !symbol.is_empty()
            && symbol.len().is_multiple_of(2);
        if !is_sound {
            return Err(Refused::Malformed);
        }
        let base = self.whole(of.base);
        if base.abs_diff(self.next) > REACH {
            return Err(Refused::Far);
        }
        let end = base + u64::from(of.datagrams);
        if end <= self.next {
            return Err(Refused::Late);
        }
        let at = self.block_at(now, base, of.datagrams)?;
        let block = &mut self.blocks[at];
        let fits = block.datagrams.is_none_or(|datagrams| datagrams == of.datagrams)
            && block.arrived.len() <= usize::from(of.datagrams)
            && block.repairs.first().is_none_or(|(_, first)| first.len() == symbol.len())
            && (block.repairs.is_empty() || block.repair_count == of.count);
        if !fits {
            return Err(Refused::Malformed);
        }
        if block.repairs.iter().any(|(index, _)| *index == of.index) {
            return Err(Refused::Late);
        }
        block.datagrams = Some(of.datagrams);
        block.repair_count = of.count;
        block.repairs.push((of.index, symbol.into()));
        self.bytes += symbol.len() + OVERHEAD_BYTES;
        self.note_sent(end, end);
        self.restore(now, at);
        self.advance(&mut give);
        Ok(())
    }

    /// How many bytes are kept.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// When something has waited, or is kept for repairs, for long enough.
    pub fn deadline(&self) -> Option<Instant> {
        let idle = self.blocks.iter().filter(|block| block.first_from(self.next).is_none());
        let expiries = idle.map(|block| block.began + BLOCK_LIFETIME);
        expiries.chain(self.hold_deadline()).min()
    }

    /// Gives on what has waited for long enough, and forgets what was kept for that long.
    pub fn poll(&mut self, now: Instant, mut give: impl FnMut(Given<'_>)) {
        while self.hold_deadline().is_some_and(|deadline| deadline <= now) {
            self.give_up(&mut give);
        }
        let next = self.next;
        self.blocks.retain(|block| {
            let stays = block.first_from(next).is_some() || block.began + BLOCK_LIFETIME > now;
            self.bytes -= if stays { 0 } else { block.bytes() };
            stays
        });
    }

    /// Gives on all that waits, and keeps nothing: the sender sends no more by this stack, or there is no memory.
    pub fn finish(&mut self, mut give: impl FnMut(Given<'_>)) {
        while self.held().is_some() {
            self.give_up(&mut give);
        }
        self.blocks.clear();
        self.bytes = 0;
    }

    fn hold_deadline(&self) -> Option<Instant> {
        self.held().map(|(_, at)| at + HOLD)
    }

    /// A number as it is reckoned with: the nearest to what is expected.
    fn whole(&self, number: u32) -> u64 {
        let distance = number.wrapping_sub(self.next as u32).cast_signed();
        self.next.saturating_add_signed(distance.into())
    }

    /// All numbers below `end` have been sent; `number` is the one that says so.
    fn note_sent(&mut self, number: u64, end: u64) {
        if end <= self.newest {
            return;
        }
        self.arrivals.gaps = self.arrivals.gaps.wrapping_add(u32::from(number > self.newest));
        self.arrivals.expected = self.arrivals.expected.wrapping_add((end - self.newest) as u32);
        self.newest = end;
    }

    fn note_stray(&mut self, number: u64, give: &mut impl FnMut(Given<'_>)) -> Result<(), Refused> {
        let near = self.strays.filter(|strays| (1..=REACH).contains(&number.wrapping_sub(strays.newest)));
        let count = near.map_or(1, |strays| strays.count + 1);
        self.strays = Some(Strays { newest: number, count });
        let believed = if number > self.next { AHEAD_BELIEVED } else { BEHIND_BELIEVED };
        if count < believed {
            return Err(Refused::Far);
        }
        self.finish(give);
        self.strays = None;
        self.next = number;
        self.newest = number;
        Ok(())
    }

    /// The place of a block that begins with this number and has at least so many datagrams.
    fn block_at(&mut self, now: Instant, base: u64, len: u16) -> Result<usize, Refused> {
        let at = self.blocks.partition_point(|block| block.base < base);
        let is_known = self.blocks.get(at).is_some_and(|block| block.base == base);
        let behind = self.blocks.get(at + usize::from(is_known));
        let overlaps = behind.is_some_and(|block| block.base < base + u64::from(len))
            || at.checked_sub(1).is_some_and(|before| self.blocks[before].end() > base);
        if overlaps {
            return Err(Refused::Malformed);
        }
        if !is_known {
            self.blocks.insert(at, Block::new(base, now));
        }
        Ok(at)
    }

    /// Repairs a block, if that can be.
    fn restore(&mut self, now: Instant, at: usize) {
        let block = &mut self.blocks[at];
        let Some(restored) = block.restore() else { return };
        self.bytes -= block.bytes();
        for (place, payload) in restored {
            let is_wanted = block.base + u64::from(place) >= self.next;
            self.arrivals.repaired = self.arrivals.repaired.wrapping_add(u32::from(is_wanted));
            block.put(place, Arrived { at: now, payload });
        }
        block.repairs.clear();
        self.bytes += block.bytes();
    }

    /// Gives what is in order, and what nothing is waited for any more before it.
    fn advance(&mut self, give: &mut impl FnMut(Given<'_>)) {
        self.drain(give);
        while self.is_overdue() && self.held().is_some() {
            self.give_up(give);
        }
        while self.bytes > KEPT_BYTES_MAX || self.blocks.len() > BLOCKS_MAX {
            if self.held().is_some() {
                self.give_up(give);
            } else if let Some(block) = self.blocks.pop_front() {
                self.bytes -= block.bytes();
            }
        }
    }

    /// Whether so many blocks have begun behind the one that is waited for that no repair will come.
    fn is_overdue(&self) -> bool {
        self.blocks.iter().filter(|block| block.base > self.next).count() >= LATER_BLOCKS_MAX
    }

    /// The first datagram that waits for others, and when it came.
    fn held(&self) -> Option<(u64, Instant)> {
        if self.newest <= self.next {
            return None;
        }
        let mut waiting = self.blocks.iter().filter_map(|block| block.first_from(self.next));
        waiting.next().map(|(number, arrived)| (number, arrived.at))
    }

    /// What is missing is not waited for any more.
    fn give_up(&mut self, give: &mut impl FnMut(Given<'_>)) {
        let Some((number, _)) = self.held() else { return };
        self.arrivals.lost = self.arrivals.lost.wrapping_add((number - self.next) as u32);
        self.next = number;
        self.drain(give);
    }

    fn drain(&mut self, give: &mut impl FnMut(Given<'_>)) {
        while let Some(arrived) = self.blocks.iter().find_map(|block| block.find(self.next)) {
            give(Given { number: self.next as u32, payload: &arrived.payload });
            self.next += 1;
        }
        // All of a block is given once its last datagram is, or the next block's first may be.
        while let Some(first) = self.blocks.front() {
            let is_followed = self.blocks.get(1).is_some_and(|next| next.base <= self.next);
            let is_whole = first.datagrams.is_some() && first.end() <= self.next;
            let is_full = first.base + u64::from(BLOCK_MAX) <= self.next;
            if !(is_followed || is_whole || is_full) {
                break;
            }
            self.bytes -= first.bytes();
            self.blocks.pop_front();
        }
    }
}

#[cfg(test)]
#[path = "decoder_test.rs"]
mod test;
