//! How long a host may take for granted that it holds a fenced name by a router: until a little before that may give
//! the name to another host. Pure.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use margay_core::name::Prefix;
use tokio::time::Instant;

/// Signs of life that were not answered yet; more are none within any lease.
const BEATS_MAX: usize = 1024;

/// What one router has given to this host.
#[derive(Debug, Default)]
pub struct Tenures {
    names: BTreeMap<Prefix, u64>,
    /// How long after it was heard last this host may count on them.
    hold: Duration,
    /// This host was alive then, as the router knows.
    heard: Option<Instant>,
    /// When signs of life were sent that the router has not answered.
    beats: VecDeque<Instant>,
}

/// How this host holds a name by a router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tenure {
    /// Higher than that of every earlier holder.
    pub number: u64,
    /// Until then, whatever is heard.
    pub until: Instant,
}

impl Tenures {
    /// A new stream to the router.
    pub fn begin_stream(&mut self) {
        self.beats.clear();
    }

    /// A sign of life is sent now.
    pub fn beat(&mut self, now: Instant) {
        if self.beats.len() < BEATS_MAX {
            self.beats.push_back(now);
        }
    }

    /// The router has answered the earliest one that it had not. What it has heard then, it had not heard before that
    /// was sent.
    pub fn answered(&mut self) {
        self.heard = self.beats.pop_front().or(self.heard);
    }

    /// The router has given a name to this host, and keeps it for `hold` after each sign of life. The host sends one
    /// every `heartbeat`, to each of its routers at another time.
    pub fn begin(&mut self, prefix: Prefix, number: u64, hold: Duration, heartbeat: Duration) {
        self.names.insert(prefix, number);
        self.hold = hold.saturating_sub(heartbeat);
    }

    /// It has it no more.
    pub fn end(&mut self, prefix: &Prefix) {
        self.names.remove(prefix);
    }

    /// How it stands with a name.
    pub fn of(&self, prefix: &Prefix) -> Option<Tenure> {
        let (number, heard) = (*self.names.get(prefix)?, self.heard?);
        Some(Tenure { number, until: heard + self.hold })
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_tenure_lasts_from_the_last_sign_of_life_that_was_answered() {
        let ms = Duration::from_millis;
        let (start, name) = (Instant::now(), "db.shop".parse().expect("literal"));
        let mut tenures = Tenures::default();
        tenures.beat(start);
        tenures.begin(name, 7, ms(1500), ms(200));
        assert_eq!(tenures.of(&name), None, "nothing is known of what the router has heard");
        tenures.beat(start + ms(200));
        tenures.answered();
        assert_eq!(tenures.of(&name), Some(Tenure { number: 7, until: start + ms(1300) }));
        tenures.answered();
        tenures.answered();
        assert_eq!(tenures.of(&name).map(|tenure| tenure.until), Some(start + ms(1500)), "one that was not asked for");
        // What a former stream has not answered, no later one does.
        tenures.beat(start + ms(400));
        tenures.begin_stream();
        tenures.beat(start + ms(900));
        tenures.answered();
        assert_eq!(tenures.of(&name).map(|tenure| tenure.until), Some(start + ms(2200)));
        tenures.end(&name);
        assert_eq!(tenures.of(&name), None);
    }
}
