//! How long reconfigurations take, from their own first message.

use core::time::Duration;

use crate::types::time::Instant;

/// Upper bounds of the classes of [`Durations`], in milliseconds; the last class has none.
pub const CLASSES_MS: [u64; 11] = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 5_000];
const CLASSES: usize = CLASSES_MS.len() + 1;

/// How long one has taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Took {
    /// Until this end's program sent by the new way. `None`: it has not, or an earlier start of the agent had begun.
    pub to_turn: Option<Duration>,
    /// Until the session had one way, whichever.
    pub to_end: Duration,
}

/// When one has begun, and when this end has turned.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    begun: Instant,
    turned: Option<Instant>,
}

impl Times {
    pub const fn begun(now: Instant) -> Self {
        Self { begun: now, turned: None }
    }

    pub fn turn(&mut self, now: Instant) {
        self.turned.get_or_insert(now);
    }

    pub fn took(&self, now: Instant) -> Took {
        Took { to_turn: self.turned.map(|at| at.since(self.begun)), to_end: now.since(self.begun) }
    }
}

/// Counts of durations, by class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Durations {
    counts: [u64; CLASSES],
    sum_us: u64,
}

impl Durations {
    pub(super) fn note(&mut self, time: Duration) {
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let class = CLASSES_MS.iter().position(|bound| micros <= bound * 1_000).unwrap_or(CLASSES - 1);
        self.counts[class] += 1;
        self.sum_us = self.sum_us.saturating_add(micros);
    }

    /// Each class: its upper bound in seconds, infinite for the last one, and how many are in it and in no lower one.
    pub fn classes(&self) -> [(f64, u64); CLASSES] {
        core::array::from_fn(|class| {
            let bound = CLASSES_MS.get(class).map_or(f64::INFINITY, |ms| *ms as f64 / 1e3);
            (bound, self.counts[class])
        })
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// All together, in seconds.
    pub fn sum_s(&self) -> f64 {
        self.sum_us as f64 / 1e6
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    #[test]
    fn durations_are_counted_in_the_lowest_class_that_has_them() {
        let mut durations = Durations::default();
        for micros in [0, 1_000, 1_001, 5_000, 5_000_000, 5_000_001] {
            durations.note(Duration::from_micros(micros));
        }
        let filled: Vec<(f64, u64)> = durations.classes().into_iter().filter(|(_, count)| *count > 0).collect();
        assert_eq!(filled, [(0.001, 2), (0.002, 1), (0.005, 1), (5.0, 1), (f64::INFINITY, 1)]);
        assert_eq!(durations.count(), 6);
        assert!((durations.sum_s() - 10.007_002).abs() < 1e-9);
    }

    #[test]
    fn a_turn_counts_once() {
        let at = |ms: u64| Instant::ZERO + Duration::from_millis(ms);
        let mut times = Times::begun(at(10));
        assert_eq!(times.took(at(12)), Took { to_turn: None, to_end: Duration::from_millis(2) });
        times.turn(at(13));
        times.turn(at(15));
        let took = Took { to_turn: Some(Duration::from_millis(3)), to_end: Duration::from_millis(30) };
        assert_eq!(times.took(at(40)), took);
    }
}
