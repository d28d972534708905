//! Time as the pure parts know it.

use std::time::{Duration, Instant as SystemInstant};

use margay_core::Instant;

/// Microseconds since this clock was made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    origin: SystemInstant,
}

impl Clock {
    pub(crate) fn start() -> Self {
        Self { origin: SystemInstant::now() }
    }

    pub(crate) fn now(&self) -> Instant {
        // In half a million years a number of 64 bits is too small.
        Instant::from_micros(self.origin.elapsed().as_micros() as u64)
    }

    /// The same moment for timers; far away where there is none.
    pub(crate) fn deadline(&self, at: Option<Instant>) -> tokio::time::Instant {
        let after = at.map_or(Duration::from_secs(3600), |at| Duration::from_micros(at.micros()));
        tokio::time::Instant::from_std(self.origin + after).max(tokio::time::Instant::from_std(self.origin))
    }
}
