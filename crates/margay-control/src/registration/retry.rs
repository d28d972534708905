//! Names that the router refuses because of what another host serves: asked for again, so that a standby takes over
//! when it may.

use std::collections::BTreeMap;
use std::future::pending;

use margay_core::name::Prefix;
use tokio::time::{Duration, Instant, sleep_until};

use super::proto::Code;

/// From a refusal to the next try.
pub const PAUSE: Duration = Duration::from_millis(500);

/// The names that wait.
#[derive(Default)]
pub struct Retries(BTreeMap<Prefix, Instant>);

impl Retries {
    /// The router said no. What another host serves now it may not serve in a moment; other refusals stay.
    pub fn refused(&mut self, prefix: Prefix, code: Code, now: Instant) {
        match code {
            Code::Exclusive | Code::Partitions => self.0.insert(prefix, now + PAUSE),
            _ => self.0.remove(&prefix),
        };
    }

    /// The name is registered, or no longer wanted.
    pub fn forget(&mut self, prefix: &Prefix) {
        self.0.remove(prefix);
    }

    /// Ends when there are some to ask for again; never, if none waits.
    pub async fn wait(&self) {
        match self.0.values().min() {
            Some(at) => sleep_until(*at).await,
            None => pending().await,
        }
    }

    /// Takes those that shall be asked for again.
    pub fn due(&mut self, now: Instant) -> Vec<Prefix> {
        let due: Vec<Prefix> = self.0.iter().filter(|(_, at)| **at <= now).map(|(prefix, _)| *prefix).collect();
        self.0.retain(|prefix, _| !due.contains(prefix));
        due
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_another_host_holds_is_asked_for_twice_a_second_and_nothing_else_is() {
        let prefix = |text: &str| text.parse::<Prefix>().expect("literal");
        let (held, other, denied) = (prefix("a.shop"), prefix("b.shop"), prefix("c.shop"));
        let mut retries = Retries::default();
        retries.refused(held, Code::Exclusive, Instant::now());
        retries.refused(other, Code::Partitions, Instant::now());
        retries.refused(denied, Code::NoGrant, Instant::now());
        assert!(retries.due(Instant::now()).is_empty());
        retries.forget(&other);
        let (start, mut tries) = (Instant::now(), Vec::new());
        while tries.len() < 3 {
            retries.wait().await;
            for prefix in retries.due(Instant::now()) {
                assert_eq!(prefix, held);
                // The timer's grain is a millisecond.
                tries.push((start.elapsed().as_secs_f64() * 10.0).floor());
                retries.refused(prefix, Code::Exclusive, Instant::now());
            }
        }
        assert_eq!(tries, [5.0, 10.0, 15.0]);
        retries.refused(held, Code::NoGrant, Instant::now());
        tokio::time::advance(PAUSE * 2).await;
        assert!(retries.due(Instant::now()).is_empty());
    }
}
