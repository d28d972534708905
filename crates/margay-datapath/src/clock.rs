//! The one clock of the process: what the core's [`Instant`]s are made of.

use margay_core::time::Instant;
use nix::sys::time::TimeValLike;
use nix::time::{ClockId, clock_gettime};

/// Now, in microseconds of `CLOCK_MONOTONIC`. Everything that is given to the core must come from here.
pub fn now() -> Instant {
    #[cfg(test)]
    if let Some(stopped) = stopped::at() {
        return stopped;
    }
    // The clock cannot fail on Linux: it needs only a valid pointer and a known clock.
    clock_gettime(ClockId::CLOCK_MONOTONIC)
        .map_or(Instant::ZERO, |time| Instant::from_micros(u64::try_from(time.num_microseconds()).unwrap_or(0)))
}

/// The clock of a test that has stopped it, for its own thread.
#[cfg(test)]
pub(crate) mod stopped {
    use std::cell::Cell;
    use std::time::Duration;

    use margay_core::time::Instant;

    thread_local!(static STOPPED: Cell<Option<Instant>> = const { Cell::new(None) });

    pub(super) fn at() -> Option<Instant> {
        STOPPED.get()
    }

    /// Time stands from here on, but for what passes.
    pub(crate) fn pass(time: Duration) {
        STOPPED.set(Some(super::now() + time));
    }
}
