//! Loss by time (RACK, RFC 8985): a chunk is lost when one that was sent later has come, and it has not within a
//! reordering window.
//!
//! RFC 8985 enlarges the window when duplicates are reported. Here none are, and chunks of one connection go to members
//! that answer at different speeds. So the window follows what is seen: how much later than one that was sent after it
//! a chunk came that was sent once, and whether an acknowledgement comes too soon to be of the repetition.

use core::time::Duration;

use margay_core::Instant;

/// So many recoveries without reordering and the window is as it was.
const RECOVERIES_MAX: u8 = 16;
/// The least time-out, and the first.
const TIMEOUT_MIN: Duration = Duration::from_millis(200);
const TIMEOUT_FIRST: Duration = Duration::from_secs(1);
/// Up to here time-outs double. An end that waits asks the other one far more often, and takes it for dead when it does
/// not answer: a longer pause would spare nothing, and what a member died with would wait for it.
const DOUBLED_MAX: Duration = Duration::from_millis(400);
const TIMEOUT_MAX: Duration = Duration::from_secs(60);

/// When what has not come counts as lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Patience {
    /// After so long without an answer everything does, while no round trip is known.
    pub timeout_first: Duration,
    /// The same at the least, once one is.
    pub timeout_min: Duration,
    /// Up to here the time doubles with every time-out.
    pub doubled_max: Duration,
    /// What was sent before something that has come is waited for no longer than a round trip and this.
    pub reordering_max: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            timeout_first: TIMEOUT_FIRST,
            timeout_min: TIMEOUT_MIN,
            doubled_max: DOUBLED_MAX,
            reordering_max: TIMEOUT_MAX,
        }
    }
}

/// What is known of the path's time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Rack {
    patience: Patience,
    least: Option<Duration>,
    smoothed: Option<Duration>,
    deviation: Duration,
    /// Of the chunk that was sent last among those that have come: when it was sent, and how long it took.
    latest: Option<(Instant, Duration)>,
    /// When it was known.
    latest_at: Instant,
    /// How much later a chunk has come than another that was sent after it.
    spread: Duration,
    recoveries: u8,
    backed_off: u32,
}

impl Rack {
    /// Nothing is known yet.
    pub(super) fn new(patience: Patience) -> Self {
        Self { patience, ..Self::default() }
    }

    /// A chunk has come that was last sent at `sent_at`.
    pub(super) fn acknowledged(&mut self, now: Instant, sent_at: Instant, is_repeated: bool) {
        let took = now.since(sent_at);
        if is_repeated && self.least.is_some_and(|least| took < least) {
            // It is the first one that came: what was taken for lost was late by so much.
            self.widen(took + self.window());
            return;
        }
        if !is_repeated {
            self.sample(took);
        }
        match self.latest {
            Some((latest, _)) if sent_at < latest => {
                if !is_repeated {
                    self.widen(now.since(self.latest_at));
                }
            }
            _ => {
                self.latest = Some((sent_at, took));
                self.latest_at = now;
            }
        }
        self.backed_off = 0;
    }

    fn widen(&mut self, late: Duration) {
        if late > Duration::ZERO {
            self.spread = self.spread.max(late);
            self.recoveries = 0;
        }
    }

    /// RFC 6298, 2.
    fn sample(&mut self, took: Duration) {
        self.least = Some(self.least.map_or(took, |least| least.min(took)));
        match self.smoothed {
            None => (self.smoothed, self.deviation) = (Some(took), took / 2),
            Some(smoothed) => {
                self.deviation = (self.deviation * 3 + smoothed.abs_diff(took)) / 4;
                self.smoothed = Some((smoothed * 7 + took) / 8);
            }
        }
    }

    /// How much later than another that was sent after it a chunk may come.
    pub(super) fn window(&self) -> Duration {
        let least = self.least.unwrap_or_default() / 4;
        (self.spread + self.spread / 4).max(least).min(self.timeout()).min(self.patience.reordering_max)
    }

    /// When a chunk counts as lost that was sent at this time and has not come; nothing while none that was sent later
    /// has.
    pub(super) fn lost_at(&self, sent_at: Instant) -> Option<Instant> {
        let (latest, took) = self.latest?;
        (sent_at < latest).then(|| sent_at + took + self.window())
    }

    /// A recovery is over: after many without reordering its window is forgotten.
    pub(super) fn recovered(&mut self) {
        self.recoveries = self.recoveries.saturating_add(1);
        if self.recoveries >= RECOVERIES_MAX {
            self.spread = Duration::ZERO;
        }
    }

    /// An answer has come within this time, if it has not been lost (RFC 6298, 2.3).
    pub(super) fn answer_max(&self) -> Duration {
        self.smoothed.map_or(self.patience.timeout_min, |smoothed| smoothed + self.deviation * 4)
    }

    /// After so long without an answer all counts as lost.
    pub(super) fn timeout(&self) -> Duration {
        let Patience { timeout_first, timeout_min, doubled_max, .. } = self.patience;
        let once = self.smoothed.map_or(timeout_first, |_| self.answer_max().max(timeout_min));
        (once * (1 << self.backed_off.min(8))).min(once.max(doubled_max)).min(TIMEOUT_MAX)
    }

    /// It ran out.
    pub(super) fn timed_out(&mut self) {
        self.backed_off += 1;
    }

    /// The smoothed round trip.
    pub(super) fn round_trip(&self) -> Option<Duration> {
        self.smoothed
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn at(millis: u64) -> Instant {
        Instant::from_millis(millis)
    }

    #[test]
    fn what_was_sent_earlier_is_lost_after_a_quarter_of_a_round_trip() {
        let mut rack = Rack::default();
        rack.acknowledged(at(40), at(0), false);
        assert_eq!(rack.lost_at(at(0)), None, "nothing later has come");
        rack.acknowledged(at(45), at(5), false);
        assert_eq!(rack.lost_at(at(4)), Some(at(4 + 40 + 10)));
    }

    #[test]
    fn reordering_widens_the_window_until_it_is_forgotten() {
        let mut rack = Rack::default();
        rack.acknowledged(at(40), at(1), false);
        // Sent before, and comes 24 ms later.
        rack.acknowledged(at(64), at(0), false);
        assert_eq!(rack.window(), Duration::from_millis(30));
        (0..RECOVERIES_MAX).for_each(|_| rack.recovered());
        assert_eq!(rack.window(), Duration::from_micros(39_000 / 4));
    }

    #[test]
    fn an_answer_that_comes_too_soon_is_the_first_ones() {
        let mut rack = Rack::default();
        rack.acknowledged(at(40), at(0), false);
        let before = rack.window();
        rack.acknowledged(at(103), at(100), true);
        assert!(rack.window() > before);
        assert_eq!(rack.round_trip(), Some(Duration::from_millis(40)), "no sample");
    }

    #[test]
    fn time_outs_double_up_to_a_bound() {
        let mut rack = Rack::default();
        assert_eq!(rack.timeout(), TIMEOUT_FIRST);
        rack.acknowledged(at(10), at(0), false);
        assert_eq!(rack.timeout(), TIMEOUT_MIN);
        rack.timed_out();
        assert_eq!(rack.timeout(), TIMEOUT_MIN * 2);
        (0..20).for_each(|_| rack.timed_out());
        assert_eq!(rack.timeout(), DOUBLED_MAX);
        rack.acknowledged(at(1000), at(990), false);
        assert_eq!(rack.timeout(), TIMEOUT_MIN);
    }
}
