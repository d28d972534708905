//! The one clock of the process: what the core's [`Instant`]s are made of.

use margay_core::time::Instant;
use nix::sys::time::TimeValLike;
use nix::time::{ClockId, clock_gettime};

/// Now, in microseconds of `CLOCK_MONOTONIC`. Everything that is given to the core must come from here.
pub fn now() -> Instant {
    // The clock cannot fail on Linux: it needs only a valid pointer and a known clock.
    clock_gettime(ClockId::CLOCK_MONOTONIC)
        .map_or(Instant::ZERO, |time| Instant::from_micros(u64::try_from(time.num_microseconds()).unwrap_or(0)))
}
