//! How long data stands still after an event: by the times in which nothing came.

use serde::{Deserialize, Serialize};

/// A time in which a receiver got nothing: between two of its reads, in microseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gap {
    /// The read before it.
    pub from_us: u64,
    /// The read that ended it.
    pub to_us: u64,
}

/// The pause after an event: the longest time in which nothing came, of those that ended after the event and began
/// before `until_us`. It counts from the event, or from the last read before it where that was later: what was under
/// way past the place of the break when it broke still comes. None where nothing came after the event.
pub fn pause_us(gaps: &[Gap], last_us: u64, event_us: u64, until_us: u64) -> Option<u64> {
    if last_us <= event_us {
        return None;
    }
    let met = gaps.iter().filter(|gap| gap.to_us > event_us && gap.from_us < until_us);
    Some(met.map(|gap| gap.to_us - gap.from_us.max(event_us)).max().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::{Gap, pause_us};

    const fn gap(from_us: u64, to_us: u64) -> Gap {
        Gap { from_us, to_us }
    }

    #[test]
    fn it_counts_from_the_event_or_from_the_last_read_after_it() {
        // The gap began before the event.
        assert_eq!(pause_us(&[gap(900, 5_000)], 9_000, 1_000, 9_000), Some(4_000));
        // Bytes that were under way came after the event.
        assert_eq!(pause_us(&[gap(1_500, 5_000)], 9_000, 1_000, 9_000), Some(3_500));
    }

    #[test]
    fn the_longest_counts_and_others_do_not() {
        let gaps = [gap(100, 990), gap(1_100, 1_200), gap(1_300, 3_000), gap(3_100, 3_300), gap(9_500, 20_000)];
        assert_eq!(pause_us(&gaps, 20_000, 1_000, 9_000), Some(1_700));
    }

    #[test]
    fn nothing_after_the_event_is_no_pause_and_no_gap_is_none() {
        assert_eq!(pause_us(&[gap(100, 900)], 900, 1_000, 9_000), None);
        assert_eq!(pause_us(&[gap(100, 900)], 2_000, 1_000, 9_000), Some(0));
    }
}
