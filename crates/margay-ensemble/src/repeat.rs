//! When something is said again that has not been confirmed.

use core::time::Duration;

use margay_core::Instant;

/// The first repetition; each next one waits twice as long.
const FIRST: Duration = Duration::from_millis(200);
const DOUBLED_MAX: u32 = 5;

/// Says when, doubling.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Repeat {
    due: Option<Instant>,
    doubled: u32,
}

impl Repeat {
    /// It was said now, for the first time.
    pub(crate) fn start(&mut self, now: Instant) {
        *self = Self { due: Some(now + FIRST), doubled: 0 };
    }

    /// It needs no repetition any more.
    pub(crate) fn stop(&mut self) {
        *self = Self::default();
    }

    /// Whether it is to be said again now; if so, counts on that.
    pub(crate) fn is_due(&mut self, now: Instant) -> bool {
        let is_due = self.due.is_some_and(|due| due <= now);
        if is_due {
            self.doubled = (self.doubled + 1).min(DOUBLED_MAX);
            self.due = Some(now + FIRST * (1 << self.doubled));
        }
        is_due
    }

    pub(crate) fn due(&self) -> Option<Instant> {
        self.due
    }
}
