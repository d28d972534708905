//! A point in time as the core knows it: microseconds since an origin that the caller chose.
//!
//! The core never reads a clock (DESIGN §3.4); every input carries an [`Instant`], and they must not go backwards.

use core::ops::{Add, AddAssign};
use core::time::Duration;

/// Microseconds since the caller's origin. Monotonic by contract.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant {
    micros: u64,
}

impl Instant {
    /// The origin itself.
    pub const ZERO: Self = Self { micros: 0 };

    /// The instant `micros` microseconds after the origin.
    pub const fn from_micros(micros: u64) -> Self {
        Self { micros }
    }

    /// The instant `millis` milliseconds after the origin.
    pub const fn from_millis(millis: u64) -> Self {
        Self { micros: millis.saturating_mul(1000) }
    }

    /// Microseconds since the origin.
    pub const fn micros(self) -> u64 {
        self.micros
    }

    /// Time from `earlier` to `self`; zero when `earlier` is later.
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.micros.saturating_sub(earlier.micros))
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, rhs: Duration) -> Self {
        Self { micros: self.micros.saturating_add(u64::try_from(rhs.as_micros()).unwrap_or(u64::MAX)) }
    }
}

impl AddAssign<Duration> for Instant {
    fn add_assign(&mut self, rhs: Duration) {
        *self = *self + rhs;
    }
}
