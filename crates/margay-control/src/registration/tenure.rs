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
    names: BTreeMap<Prefix, Given>,
    /// How long after it was heard last this host may count on them.
    hold: Duration,
    /// When the stream to it began.
    began: Option<Instant>,
    /// This host was alive then, as the router knows.
    heard: Option<Instant>,
    /// The number of the last sign of life; and when those were sent that the router has not answered.
    last: u64,
    beats: VecDeque<(u64, Instant)>,
}

#[derive(Debug, Default)]
struct Given {
    number: u64,
    /// It was given by an earlier stream. What the router hears since says nothing of it until it is given again.
    ends: Option<Instant>,
}

/// How this host holds a name by a router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tenure {
    /// Higher than that of every earlier holder; 0: the router did not know one.
    pub number: u64,
    /// Until then, whatever is heard.
    pub until: Instant,
}

impl Tenures {
    /// A new stream to the router.
    pub fn begin_stream(&mut self, now: Instant) {
        let until = self.until().unwrap_or(now);
        for given in self.names.values_mut() {
            given.ends.get_or_insert(until);
        }
        self.beats.clear();
        self.began = Some(now);
    }

    /// A sign of life is sent now. Gives its number.
    pub fn beat(&mut self, now: Instant) -> u64 {
        self.last += 1;
        if self.beats.len() < BEATS_MAX {
            self.beats.push_back((self.last, now));
        }
        self.last
    }

    /// The router has answered the sign of life with this number; 0, or one that is not awaited: it has said something
    /// unasked. It has not heard an answered one before that was sent.
    pub fn answered(&mut self, number: u64) {
        let Some(at) = self.beats.iter().position(|(sent, _)| *sent == number) else { return };
        self.heard = self.heard.max(self.beats.drain(..=at).next_back().map(|(_, sent)| sent));
    }

    /// The router has given a name to this host, which may count on it for `hold` after each sign of life. It has heard
    /// the host since the stream began, since it was asked for the name. Number 0 changes none that is known.
    pub fn begin(&mut self, prefix: Prefix, number: u64, hold: Duration) {
        let given = self.names.entry(prefix).or_default();
        given.ends = None;
        if number > 0 {
            given.number = number;
        }
        self.hold = hold;
        self.heard = self.heard.max(self.began);
    }

    /// It has it no more.
    pub fn end(&mut self, prefix: &Prefix) {
        self.names.remove(prefix);
    }

    /// How it stands with a name.
    pub fn of(&self, prefix: &Prefix) -> Option<Tenure> {
        let given = self.names.get(prefix)?;
        let until = given.ends.or_else(|| self.until())?;
        Some(Tenure { number: given.number, until })
    }

    fn until(&self) -> Option<Instant> {
        self.heard.map(|heard| heard + self.hold)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_tenure_lasts_from_the_last_sign_of_life_that_was_answered() {
        let ms = Duration::from_millis;
        let start = Instant::now();
        let name = "db.shop".parse().expect("literal");
        let mut tenures = Tenures::default();
        tenures.begin_stream(start);
        assert_eq!((tenures.of(&name), tenures.beat(start + ms(100))), (None, 1));
        tenures.begin(name, 7, ms(1300));
        assert_eq!(tenures.of(&name), Some(Tenure { number: 7, until: start + ms(1300) }), "it has asked for the name");
        let until = |tenures: &Tenures| tenures.of(&name).map(|tenure| tenure.until - start);
        // What a router says of itself answers nothing.
        tenures.answered(0);
        assert_eq!(until(&tenures), Some(ms(1300)));
        assert_eq!([200, 300].map(|sent_ms| tenures.beat(start + ms(sent_ms))), [2, 3]);
        tenures.answered(2);
        assert_eq!(until(&tenures), Some(ms(1500)));
        tenures.answered(1);
        assert_eq!(until(&tenures), Some(ms(1500)), "an earlier one");
        // What a former stream has not answered, no later one does.
        tenures.begin_stream(start + ms(800));
        tenures.answered(3);
        assert_eq!(until(&tenures), Some(ms(1500)));
        assert_eq!(tenures.beat(start + ms(900)), 4);
        tenures.answered(4);
        assert_eq!(until(&tenures), Some(ms(1500)), "the router may have given it to another host");
        tenures.begin(name, 0, ms(1300));
        assert_eq!(tenures.of(&name), Some(Tenure { number: 7, until: start + ms(2200) }));
        tenures.end(&name);
        assert_eq!(tenures.of(&name), None);
    }
}
