//! Connections of programs of this host that failed a short while ago, by name and reason: for `margay check`.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use margay_core::Event;
use margay_core::name::ServiceId;
use parking_lot::Mutex;

/// How long a failure is spoken of.
pub const KEPT: Duration = Duration::from_secs(5 * 60);
/// Names and reasons that are remembered; the oldest is forgotten for one more.
const FAILURES_MAX: usize = 64;

/// Connections to one name that failed for one reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failed {
    /// To whom.
    pub service: ServiceId,
    /// Why, as a sentence.
    pub why: String,
    /// How many.
    pub count: u64,
    /// When the last of them failed.
    pub last: Instant,
    /// The virtual address and the port of the last of them.
    pub to: SocketAddr,
}

/// All of them.
#[derive(Debug, Default)]
pub struct Failures(Mutex<HashMap<(ServiceId, String), Failed>>);

impl Failures {
    /// Remembers what concerns it.
    pub fn note(&self, event: &Event, now: Instant) {
        let Event::ConnectFailed { service, app, why } = event else { return };
        let mut all = self.0.lock();
        let key = (*service, why.clone());
        if !all.contains_key(&key) && all.len() >= FAILURES_MAX {
            let oldest = all.iter().min_by_key(|(_, failed)| failed.last).map(|(key, _)| key.clone());
            oldest.and_then(|key| all.remove(&key));
        }
        let why = why.clone();
        let fresh = Failed { service: *service, why, count: 0, last: now, to: app.destination };
        let failed = all.entry(key).or_insert(fresh);
        if now.saturating_duration_since(failed.last) > KEPT {
            failed.count = 0;
        }
        failed.count += 1;
        failed.last = now;
        failed.to = app.destination;
    }

    /// Those that failed within [`KEPT`], the latest first.
    pub fn recent(&self, now: Instant) -> Vec<Failed> {
        let mut all = self.0.lock();
        all.retain(|_, failed| now.saturating_duration_since(failed.last) <= KEPT);
        let mut recent: Vec<Failed> = all.values().cloned().collect();
        recent.sort_by_key(|failed| std::cmp::Reverse(failed.last));
        recent
    }
}

#[cfg(test)]
mod test {
    use margay_core::Tuple;

    use super::*;

    fn failed(service: u8, why: &str) -> Event {
        let to = |port| SocketAddr::from(([198, 18, 1, 1], port));
        let app = Tuple { protocol: 6, source: to(9), destination: to(80) };
        Event::ConnectFailed { service: ServiceId([service; 32]), app, why: why.to_owned() }
    }

    #[test]
    fn failures_are_counted_by_name_and_reason_and_forgotten_after_a_while() {
        let (failures, start) = (Failures::default(), Instant::now());
        for (service, why) in [(1, "nobody"), (1, "nobody"), (1, "refused"), (2, "nobody")] {
            failures.note(&failed(service, why), start);
        }
        let mut counts: Vec<u64> = failures.recent(start).into_iter().map(|failed| failed.count).collect();
        counts.sort_unstable();
        assert_eq!(counts, [1, 1, 2]);
        let later = start + KEPT + Duration::from_secs(1);
        failures.note(&failed(2, "nobody"), later);
        let recent = failures.recent(later);
        assert_eq!(recent.iter().map(|failed| failed.count).collect::<Vec<_>>(), [1], "the older one does not count");
    }

    #[test]
    fn of_very_many_the_oldest_are_forgotten() {
        let (failures, start) = (Failures::default(), Instant::now());
        for n in 0..=FAILURES_MAX as u64 {
            failures.note(&failed(0, &n.to_string()), start + Duration::from_millis(n));
        }
        let recent = failures.recent(start);
        assert!(recent.len() == FAILURES_MAX && recent.iter().all(|failed| failed.why != "0"));
    }
}
