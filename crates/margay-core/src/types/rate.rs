//! A token bucket: for answers to strangers, and for questions that others ask.

use crate::types::time::Instant;

const MICROS_PER_S: u64 = 1_000_000;

/// Allows so many per second, with a burst of one second's worth.
#[derive(Debug)]
pub struct RateLimit {
    per_s: u64,
    /// Millionths of a token.
    credit: u64,
    at: Instant,
}

impl RateLimit {
    /// So many per second, from `now` on.
    pub fn new(per_s: u32, now: Instant) -> Self {
        let per_s = u64::from(per_s);
        Self { per_s, credit: per_s * MICROS_PER_S, at: now }
    }

    /// Takes one token; false when there is none.
    pub fn take(&mut self, now: Instant) -> bool {
        self.take_some(now, 1)
    }

    /// Takes so many tokens; false, and none is taken, when there are fewer.
    pub fn take_some(&mut self, now: Instant, count: u32) -> bool {
        let wanted = u64::from(count) * MICROS_PER_S;
        let micros = u64::try_from(now.since(self.at).as_micros()).unwrap_or(u64::MAX);
        self.at = self.at.max(now);
        self.credit = self.credit.saturating_add(micros.saturating_mul(self.per_s)).min(self.per_s * MICROS_PER_S);
        if self.credit < wanted {
            return false;
        }
        self.credit -= wanted;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_then_the_rate() {
        let mut limit = RateLimit::new(10, Instant::ZERO);
        assert_eq!((0..20).filter(|_| limit.take(Instant::ZERO)).count(), 10);
        assert_eq!((0..20).filter(|_| limit.take(Instant::from_millis(500))).count(), 5);
    }
}
