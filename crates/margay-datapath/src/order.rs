//! In which order the trains of flows of datagrams arrive, of those whose loss is measured (docs/decisions/0084).

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use margay_core::time::Instant;
use margay_core::timing::Order;
use parking_lot::Mutex;

/// A flow that nobody has asked about for so long is not watched any more.
const FORGOTTEN: Duration = Duration::from_secs(10);
/// Numbers that are further back begin anew: the peer's agent has started again.
const BACK_MAX: u32 = 1 << 16;

/// The order of one flow's trains.
#[derive(Debug, Default)]
pub(crate) struct Watched {
    /// The stack, whose numbers are its own, and the greatest number so far.
    newest: Mutex<Option<(u8, u32)>>,
    judged: AtomicU32,
    late: AtomicU32,
    asked_us: AtomicU64,
}

impl Watched {
    /// A train has come.
    pub fn note(&self, stack: u8, number: u32) {
        let mut newest = self.newest.lock();
        let ahead =
            newest.filter(|(known, _)| *known == stack).map(|(_, known)| number.wrapping_sub(known).cast_signed());
        match ahead {
            // Another part of it.
            Some(0) => return,
            Some(ahead) if ahead < 0 && ahead.unsigned_abs() < BACK_MAX => {
                self.late.fetch_add(1, Ordering::Relaxed);
            }
            _ => *newest = Some((stack, number)),
        }
        self.judged.fetch_add(1, Ordering::Relaxed);
    }

    /// What has come so far. Somebody has asked.
    pub fn ask(&self, now: Instant) -> Order {
        self.asked_us.store(now.micros(), Ordering::Relaxed);
        Order { judged: self.judged.load(Ordering::Relaxed), late: self.late.load(Ordering::Relaxed) }
    }

    /// Whether nobody has asked for long.
    pub fn is_forgotten(&self, now: Instant) -> bool {
        u128::from(now.micros().saturating_sub(self.asked_us.load(Ordering::Relaxed))) > FORGOTTEN.as_micros()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_behind_a_later_one_is_late_by_its_own_numbers() {
        let watched = Watched::default();
        let order = || watched.ask(Instant::from_millis(1));
        for number in [u32::MAX - 1, 0, u32::MAX, 0, 1, 1, 2] {
            watched.note(2, number);
        }
        assert_eq!(order(), Order { judged: 5, late: 1 });
        // Sealed, it has other numbers; and an agent that has started again counts from zero.
        watched.note(3, 900_000);
        watched.note(3, 7);
        watched.note(3, 6);
        assert_eq!(order(), Order { judged: 8, late: 2 });
        assert!(
            !watched.is_forgotten(Instant::from_millis(10_001)) && watched.is_forgotten(Instant::from_millis(10_002))
        );
    }
}
