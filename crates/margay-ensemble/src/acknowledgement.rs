//! SACKs, read and written.

use alloc::vec;
use alloc::vec::Vec;

use margay_wire::sctp::{GapBlock, Sack};

use crate::counters::Dropped;

/// Runs of what has come as gap blocks: for each number behind the cumulative one, whether it has.
pub(crate) fn gap_blocks(come: impl Iterator<Item = bool>) -> impl Iterator<Item = GapBlock> {
    // Windows are far below 2^16.
    let mut come = (1_u16..).zip(come).peekable();
    core::iter::from_fn(move || {
        let (start, _) = come.find(|(_, has_come)| *has_come)?;
        let mut end = start;
        while let Some((at, _)) = come.next_if(|(_, has_come)| *has_come) {
            end = at;
        }
        Some(GapBlock { start, end })
    })
}

/// Which numbers a SACK reports, behind the `covered` first ones of `len` that are under way, up to the last that it
/// does. `was_sent` says of each of the `len` whether the sender of the SACK can have it.
pub(crate) fn reported(
    sack: &Sack<'_>,
    covered: usize,
    len: usize,
    was_sent: impl Fn(usize) -> bool,
) -> Result<Vec<bool>, Dropped> {
    let last = sack.blocks().map(|block| usize::from(block.end)).max().unwrap_or(0);
    if covered.saturating_add(last) > len || !(0..covered).all(&was_sent) {
        return Err(Dropped::Lie);
    }
    let mut reported = vec![false; last];
    for block in sack.blocks() {
        // A block starts at 1 or later, and ends no sooner (margay-wire checks that).
        let run = usize::from(block.start) - 1..usize::from(block.end);
        if !run.clone().all(|at| was_sent(covered + at)) {
            return Err(Dropped::Lie);
        }
        reported[run].fill(true);
    }
    Ok(reported)
}
