//! Where the trains of a striped flow go: by the place where they are predicted to arrive first (docs/decisions/0021),
//! by all in turns, or each by two places (docs/decisions/0084).
//!
//! A *place* is one of the pairs of addresses that the flow uses at once. For each the sender keeps how fast it
//! carries, and how long it takes compared with the others: the two clocks need not agree, since only differences
//! count. Both come from what the receiver says has come by it, and when. A train waits here, not in the network, until
//! its place can take it: so the predictions hold, and what a place that dies has not been given yet goes another way.
//!
//! The pace of a place follows what is delivered, as in BBR: it grows until delivery does not, tries a little more now
//! and then, and gives way when a queue builds up in the network.

use alloc::collections::VecDeque;
use core::time::Duration;

pub use margay_wire::Sharing;
use margay_wire::{ArrivalRepr, ArrivalsRepr, PLACES_MAX};

use crate::leg::loss::Loss;
use crate::types::time::Instant;

/// Under way by a new place until its rate is known, for each round trip, in bytes.
const FIRST_WINDOW: u64 = 64_000;
/// The least rate in bytes per second that a place is taken to have.
const RATE_MIN: u64 = 10_000;
/// What a sample of the rate is taken over, at least and at most.
const SAMPLE_MIN: Duration = Duration::from_millis(30);
const SAMPLE_MAX: Duration = Duration::from_secs(1);
/// The rate is the greatest of so many samples.
const SAMPLES: usize = 12;
/// A round is a round trip, but no less.
const ROUND_MIN: Duration = Duration::from_millis(20);
/// Growth of less than a fourth in a round is none; after so many rounds the rate is found.
const FLAT_ROUNDS: u32 = 3;
/// Rounds between two tries to go faster.
const CRUISE_ROUNDS: u32 = 6;
/// More than this waiting in the network, in microseconds, and less is sent until less than that waits there.
const QUEUE_HIGH_US: i64 = 8_000;
const QUEUE_LOW_US: i64 = 2_000;
/// Trains wait here so much longer than the slowest place in use takes, at most; then they are dropped, and TCP sends
/// less.
const QUEUE_MAX_US: i64 = 60_000;
/// A place that takes so much longer than the quickest is not used: what is put in order again would wait for it.
const SPREAD_MAX_US: i64 = 200_000;
/// What the receiver has not spoken of for so long, beyond a round trip and what waits, has not come.
const DEAD_MORE: Duration = Duration::from_millis(100);
/// A place that was dead is not used again for so long, doubled each time that nothing came.
const DEAD_FIRST: Duration = Duration::from_millis(500);
const DEAD_DOUBLED_MAX: u32 = 6;
/// The least delay is that of the last one or two of these.
const LEAST_TIME: Duration = Duration::from_secs(5);
/// So many bytes are sent by a place before what it loses is reckoned anew, and over so many that is forgotten.
const LOSS_SAMPLE: u64 = 20_000;
const LOSS_SPAN: u64 = 1_000_000;
/// Trains under way by one place that are remembered.
const LOG_MAX: usize = 8192;

/// Where a train goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// By this place, not before this moment.
    Place(usize, Instant),
    /// By both of these, each not before its moment; the first one is predicted to arrive first.
    Twice([(usize, Instant); 2]),
    /// Nowhere: more waits than is good.
    Full,
    /// By whatever pair the host uses with the peer: no place is known to work.
    Elsewhere,
}

/// One place, for lists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlaceInfo {
    /// Bytes of datagrams sent by it.
    pub sent_bytes: u64,
    /// What it carries, in bytes per second.
    pub rate: u64,
    /// How much longer than the quickest it takes, one way, in microseconds.
    pub later_us: u64,
    /// Whether it is used.
    pub is_live: bool,
}

/// A train that was sent.
#[derive(Clone, Copy, Debug)]
struct Sent {
    number: u32,
    at: Instant,
    bytes: usize,
    /// Bytes that had been sent by the place by then, repairs included.
    total: u64,
    /// It had waited for its place: the place was busy.
    waited: bool,
}

/// What a rate is measured from.
#[derive(Clone, Copy, Debug)]
struct Anchor {
    at_us: u32,
    bytes: u32,
    sent: Instant,
}

/// What is done about the pace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Twice what is delivered.
    Grow { best: u64, flat: u32, round_ends: Instant },
    /// What is delivered.
    Cruise { since: Instant },
    /// A fourth more.
    Try { until: Instant, from: u64 },
    /// A fourth less.
    Drain { until: Instant },
}

/// The least of late.
#[derive(Clone, Copy, Debug)]
struct Least {
    present: i64,
    former: i64,
    since: Instant,
}

impl Least {
    const fn new(now: Instant, first: i64) -> Self {
        Self { present: first, former: first, since: now }
    }

    fn add(&mut self, now: Instant, value: i64) {
        if now.since(self.since) >= LEAST_TIME {
            (self.former, self.present, self.since) = (self.present, value, now);
        }
        self.present = self.present.min(value);
    }

    fn get(&self) -> i64 {
        self.present.min(self.former)
    }
}

/// What a place loses, from bytes that were sent and bytes that had come by then.
#[derive(Clone, Copy, Debug, Default)]
struct Losing {
    anchor: Option<(u64, u32)>,
    sent: u64,
    /// Less than nothing where something has overtaken what is counted.
    lost: i64,
}

impl Losing {
    /// Of so many bytes that were sent so many have come; the second count wraps.
    fn add(&mut self, total: u64, came: u32) {
        let (total_before, came_before) = *self.anchor.get_or_insert((total, came));
        let sent = total.saturating_sub(total_before);
        if sent < LOSS_SAMPLE {
            return;
        }
        self.anchor = Some((total, came));
        let came = u64::from(came.wrapping_sub(came_before));
        if came > sent * 2 {
            // The receiver counts anew.
            return;
        }
        self.sent += sent;
        self.lost += i64::try_from(sent).unwrap_or(i64::MAX) - i64::try_from(came).unwrap_or(i64::MAX);
        if self.sent > LOSS_SPAN {
            self.sent /= 2;
            self.lost /= 2;
        }
    }

    fn loss(&self) -> Option<Loss> {
        let ppm = (self.lost.max(0).unsigned_abs() * 1_000_000).checked_div(self.sent)?;
        // Bytes do not say what is lost in a row.
        Some(Loss { ppm: u32::try_from(ppm).unwrap_or(u32::MAX), row_thousandths: 1000 })
    }
}

/// One place.
#[derive(Debug)]
struct Lane {
    rtt: Duration,
    /// Bytes per second, of the last samples, the oldest first.
    samples: VecDeque<u64>,
    rate: u64,
    phase: Phase,
    /// When what it has been given is gone.
    free_at: Instant,
    /// One way, in microseconds of the receiver's clock less the sender's, from the scheduler's origin.
    least: Option<Least>,
    /// How much longer than the least the last one took.
    queue_us: i64,
    log: VecDeque<Sent>,
    anchor: Option<Anchor>,
    /// Everything that has come since then had waited here: the place had something to do all the time.
    is_busy: bool,
    last_number: Option<u32>,
    /// When something last came by it, as far as is known here.
    progress: Instant,
    /// Until then it is taken to be dead, and longer where nothing shows that it lives.
    dead: Option<Instant>,
    deaths: u32,
    sent_bytes: u64,
    losing: Losing,
    /// Its turns: what it has been given, for its weight. Of several places the one with least is next.
    turns: u64,
}

/// When a train would arrive by a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Prediction {
    /// From now on, in microseconds of the receiver's clock less the sender's.
    arrives_us: i64,
    place: usize,
    start: Instant,
    /// It would wait here for too long.
    is_full: bool,
}

impl Lane {
    fn new(now: Instant, rtt: Duration) -> Self {
        let mut lane = Self {
            rtt,
            samples: VecDeque::new(),
            rate: 0,
            phase: Phase::Cruise { since: now },
            free_at: now,
            least: None,
            queue_us: 0,
            log: VecDeque::new(),
            anchor: None,
            is_busy: true,
            last_number: None,
            progress: now,
            dead: None,
            deaths: 0,
            sent_bytes: 0,
            losing: Losing::default(),
            turns: 0,
        };
        lane.begin(now);
        lane
    }

    /// From a careful rate on.
    fn begin(&mut self, now: Instant) {
        self.samples.clear();
        self.rate = (FIRST_WINDOW * 1_000_000 / micros(self.rtt.max(Duration::from_millis(1)))).max(RATE_MIN);
        self.phase = Phase::Grow { best: 0, flat: 0, round_ends: now + self.round() };
    }

    fn round(&self) -> Duration {
        self.rtt.max(ROUND_MIN)
    }

    /// Bytes per second at which it is given trains.
    fn pace(&self) -> u64 {
        match self.phase {
            Phase::Grow { .. } => self.rate * 2,
            Phase::Cruise { .. } => self.rate,
            Phase::Try { .. } => self.rate + self.rate / 4,
            Phase::Drain { .. } => self.rate - self.rate / 4,
        }
    }

    /// The delay that a train is predicted to have, but for its own length and what is before it here.
    fn delay_us(&self) -> Option<i64> {
        self.least.as_ref().map(|least| least.get() + self.queue_us)
    }

    fn handle_arrival(&mut self, now: Instant, origin: u32, arrival: &ArrivalRepr) {
        if self.last_number == Some(arrival.packet_number) {
            return;
        }
        let Some(at) = self.log.iter().rposition(|sent| sent.number == arrival.packet_number) else { return };
        let sent = self.log[at];
        let has_waited = self.log.drain(..=at).all(|sent| sent.waited);
        self.is_busy &= has_waited;
        self.last_number = Some(arrival.packet_number);
        self.progress = now;
        self.deaths = 0;
        self.losing.add(sent.total, arrival.bytes);
        let took = i64::from(arrival.at_us.wrapping_sub(sent.at.micros() as u32).wrapping_sub(origin).cast_signed());
        let least = self.least.get_or_insert(Least::new(now, took));
        least.add(now, took);
        // Its own length is no queue: a long train would look as if it had waited.
        self.queue_us = (took - least.get() - micros(takes(sent.bytes, self.rate)) as i64).max(0);
        self.measure(now, arrival, &sent);
    }

    fn measure(&mut self, now: Instant, arrival: &ArrivalRepr, sent: &Sent) {
        let fresh = Anchor { at_us: arrival.at_us, bytes: arrival.bytes, sent: sent.at };
        let anchor = *self.anchor.get_or_insert(fresh);
        let received = Duration::from_micros(u64::from(arrival.at_us.wrapping_sub(anchor.at_us)));
        if received < SAMPLE_MIN {
            return;
        }
        self.anchor = Some(fresh);
        let is_busy = core::mem::replace(&mut self.is_busy, true);
        let elapsed = received.max(sent.at.since(anchor.sent));
        if elapsed > SAMPLE_MAX {
            return;
        }
        let rate = u64::from(arrival.bytes.wrapping_sub(anchor.bytes)) * 1_000_000 / micros(elapsed);
        // A place that had nothing to do shows only what it was given: unless that waited here, or in the network. Else
        // a rate that is taken for too great would never be found wrong, since nothing waits here then.
        if is_busy || self.queue_us > QUEUE_LOW_US || rate > self.rate {
            if self.samples.len() >= SAMPLES {
                self.samples.pop_front();
            }
            self.samples.push_back(rate.max(RATE_MIN));
            if !matches!(self.phase, Phase::Grow { .. }) || rate > self.rate || self.samples.len() >= SAMPLES / 2 {
                self.rate = self.samples.iter().copied().max().unwrap_or(self.rate);
            }
        }
        self.steer(now, is_busy);
    }

    fn steer(&mut self, now: Instant, is_busy: bool) {
        let (round, is_queueing) = (self.round(), self.queue_us > QUEUE_HIGH_US);
        match self.phase {
            Phase::Grow { .. } if is_queueing => self.drain(now),
            Phase::Grow { best, flat, round_ends } if now >= round_ends => {
                let (best, flat) = match () {
                    () if self.rate > best + best / 4 => (self.rate, 0),
                    () if is_busy => (best, flat + 1),
                    () => (best, flat),
                };
                if flat >= FLAT_ROUNDS {
                    self.drain(now);
                } else {
                    self.phase = Phase::Grow { best, flat, round_ends: now + round };
                }
            }
            Phase::Cruise { since } if is_queueing && now.since(since) > round * 2 => self.drain(now),
            Phase::Cruise { since } if is_busy && now.since(since) > round * CRUISE_ROUNDS => {
                self.phase = Phase::Try { until: now + round + ROUND_MIN, from: self.rate };
            }
            Phase::Try { .. } if is_queueing => self.drain(now),
            Phase::Try { until, from } if now >= until => {
                if self.rate > from + from / 10 {
                    self.phase = Phase::Try { until: now + round + ROUND_MIN, from: self.rate };
                } else {
                    self.drain(now);
                }
            }
            Phase::Drain { until } if self.queue_us < QUEUE_LOW_US || now >= until => {
                self.phase = Phase::Cruise { since: now };
            }
            _ => {}
        }
    }

    fn drain(&mut self, now: Instant) {
        self.phase = Phase::Drain { until: now + self.round() * 2 };
    }

    /// Whether what was sent should have come, and the receiver has not spoken of it.
    fn is_overdue(&self, now: Instant, slowest: Duration) -> bool {
        let queue = Duration::from_micros(self.queue_us.max(0).unsigned_abs());
        let since = self.log.front().map(|oldest| oldest.at.max(self.progress));
        since.is_some_and(|since| now.since(since) > slowest + queue * 2 + DEAD_MORE)
    }

    fn die(&mut self, now: Instant) {
        self.dead = Some(now + DEAD_FIRST * (1 << self.deaths.min(DEAD_DOUBLED_MAX)));
        self.deaths += 1;
        self.log.clear();
        self.anchor = None;
        self.losing.anchor = None;
        self.free_at = now;
    }
}

fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX).max(1)
}

/// How long so many bytes take at a rate.
fn takes(bytes: usize, rate: u64) -> Duration {
    Duration::from_micros(bytes as u64 * 1_000_000 / rate.max(RATE_MIN))
}

/// Where the trains of one flow and direction go.
#[derive(Debug, Default)]
pub struct Scheduler {
    sharing: Sharing,
    /// By place; 0 is as 1.
    weights: [u8; PLACES_MAX],
    lanes: [Option<Lane>; PLACES_MAX],
    /// Of the delays: the first one that was seen.
    origin: Option<u32>,
    last_report: Option<u32>,
}

impl Scheduler {
    /// From now on trains are shared out so. Weights are by place.
    pub fn set_sharing(&mut self, sharing: Sharing, weights: [u8; PLACES_MAX]) {
        if (sharing, weights) == (self.sharing, self.weights) {
            return;
        }
        self.sharing = sharing;
        self.weights = weights;
        self.lanes.iter_mut().flatten().for_each(|lane| lane.turns = 0);
    }

    /// A place has shown that it works, with this round trip.
    pub fn handle_alive(&mut self, now: Instant, place: usize, rtt: Duration) {
        // It makes up for no turns that it has not had.
        let turns = self.live().filter(|(other, _)| *other != place).map(|(_, lane)| lane.turns).min();
        let Some(lane) = self.lanes.get_mut(place) else { return };
        let is_new = lane.is_none();
        let lane = lane.get_or_insert_with(|| Lane::new(now, rtt));
        if is_new || lane.dead.is_some() {
            lane.turns = turns.unwrap_or(lane.turns);
        }
        lane.rtt = if rtt < lane.rtt { rtt } else { (lane.rtt * 7 + rtt) / 8 };
        if lane.dead.is_some_and(|until| now >= until) {
            lane.dead = None;
            lane.progress = now;
            lane.begin(now);
        }
    }

    /// A place is no more, or is another pair of addresses now.
    pub fn forget(&mut self, place: usize) {
        if let Some(lane) = self.lanes.get_mut(place) {
            *lane = None;
        }
    }

    /// The receiver has said what has come. Older reports than the last one say nothing.
    pub fn handle_arrivals(&mut self, now: Instant, arrivals: &ArrivalsRepr) {
        let is_older = |last: u32| arrivals.number.wrapping_sub(last).cast_signed() <= 0;
        if self.last_report.is_some_and(is_older) {
            return;
        }
        self.last_report = Some(arrivals.number);
        for (lane, arrival) in self.lanes.iter_mut().zip(&arrivals.places) {
            let (Some(lane), Some(arrival)) = (lane, arrival) else { continue };
            let origin = match (self.origin, lane.log.iter().find(|sent| sent.number == arrival.packet_number)) {
                (Some(origin), _) => origin,
                (None, Some(sent)) => arrival.at_us.wrapping_sub(sent.at.micros() as u32),
                (None, None) => continue,
            };
            self.origin = Some(origin);
            lane.handle_arrival(now, origin, arrival);
        }
    }

    /// Where a train of so many bytes goes, and when. It has its turn there then.
    pub fn choose(&mut self, now: Instant, bytes: usize) -> Turn {
        self.bury(now);
        let mut all = self.predictions(now, bytes);
        all.sort_unstable_by_key(|prediction| {
            prediction.map_or((true, 0, 0), |one| (false, one.arrives_us, one.place))
        });
        let [first, second, ..] = all;
        let Some(first) = first else { return Turn::Elsewhere };
        let chosen = match self.sharing {
            Sharing::Earliest => [Some(first), None],
            Sharing::Weighted => [all.into_iter().flatten().min_by_key(|one| self.turns_of(one.place)), None],
            Sharing::Redundant => [Some(first), second],
        };
        let mut free = chosen.into_iter().flatten().filter(|one| !one.is_full);
        let given = [free.next(), free.next()].map(|one| one.map(|one| self.give_turn(&one, bytes)));
        match given {
            [Some(one), Some(other)] => Turn::Twice([one, other]),
            [Some((place, at)), None] => Turn::Place(place, at),
            _ => Turn::Full,
        }
    }

    /// Of every place that can be used.
    fn predictions(&self, now: Instant, bytes: usize) -> [Option<Prediction>; PLACES_MAX] {
        let known = |lane: &Lane| Some((lane.delay_us()?, lane.rtt));
        let quickest_known = self.live().filter_map(|(_, lane)| known(lane)).min_by_key(|(delay, _)| *delay);
        // Half of a round trip is how long it takes by a place by which nothing has come yet.
        let delay_of = |lane: &Lane| match (lane.delay_us(), quickest_known) {
            (Some(delay), _) => delay,
            (None, Some((delay, rtt))) => delay + (micros(lane.rtt) as i64 - micros(rtt) as i64) / 2,
            (None, None) => micros(lane.rtt) as i64 / 2,
        };
        let quickest = self.live().map(|(_, lane)| delay_of(lane)).min().unwrap_or_default();
        let usable = || self.live().filter(|(_, lane)| delay_of(lane) - quickest <= SPREAD_MAX_US);
        let slowest = usable().map(|(_, lane)| delay_of(lane)).max().unwrap_or(quickest);
        let mut all = [None; PLACES_MAX];
        for (place, lane) in usable() {
            let start = lane.free_at.max(now);
            let arrives_us = micros_between(now, start) + micros(takes(bytes, lane.rate)) as i64 + delay_of(lane);
            let is_full = arrives_us - slowest > QUEUE_MAX_US && start > now;
            all[place] = Some(Prediction { arrives_us, place, start, is_full });
        }
        all
    }

    /// How many turns a place has had, and after them its number.
    fn turns_of(&self, place: usize) -> (u64, usize) {
        (self.lanes[place].as_ref().map_or(u64::MAX, |lane| lane.turns), place)
    }

    fn give_turn(&mut self, prediction: &Prediction, bytes: usize) -> (usize, Instant) {
        let Prediction { place, start, .. } = *prediction;
        if let Some(lane) = self.lanes[place].as_mut() {
            lane.free_at = start + takes(bytes, lane.pace());
            lane.turns += bytes as u64 * u64::from(u8::MAX) / u64::from(self.weights[place].max(1));
        }
        (place, start)
    }

    /// A train, or a part of one, has been sent.
    pub fn note_sent(&mut self, now: Instant, place: usize, number: u32, bytes: usize, waited: bool) {
        let Some(lane) = self.lanes.get_mut(place).and_then(Option::as_mut) else { return };
        if lane.log.len() >= LOG_MAX {
            lane.log.pop_front();
        }
        if lane.log.is_empty() {
            lane.progress = now;
        }
        lane.sent_bytes += bytes as u64;
        lane.log.push_back(Sent { number, at: now, bytes, total: lane.sent_bytes, waited });
    }

    /// So many bytes of repairs have been sent by a place, behind what they repair: they take time of its own.
    pub fn note_repairs(&mut self, now: Instant, place: usize, bytes: usize) {
        let Some(lane) = self.lanes.get_mut(place).and_then(Option::as_mut) else { return };
        lane.sent_bytes += bytes as u64;
        lane.free_at = lane.free_at.max(now) + takes(bytes, lane.pace());
    }

    /// What a place loses, once that is known.
    pub fn loss(&self, place: usize) -> Option<Loss> {
        self.lanes.get(place)?.as_ref()?.losing.loss()
    }

    /// Whether what waits for a place may still go there.
    pub fn is_live(&self, place: usize) -> bool {
        self.live().any(|(live, _)| live == place)
    }

    /// Every place, for lists.
    pub fn places(&self) -> [Option<PlaceInfo>; PLACES_MAX] {
        let quickest = self.live().filter_map(|(_, lane)| lane.least).map(|least| least.get()).min();
        let info = |lane: &Lane| PlaceInfo {
            sent_bytes: lane.sent_bytes,
            rate: lane.rate,
            later_us: lane
                .least
                .zip(quickest)
                .map_or(0, |(least, quickest)| (least.get() - quickest).max(0).unsigned_abs()),
            is_live: lane.dead.is_none(),
        };
        core::array::from_fn(|place| self.lanes[place].as_ref().map(info))
    }

    fn live(&self) -> impl Iterator<Item = (usize, &Lane)> {
        let known = self.lanes.iter().enumerate().filter_map(|(place, lane)| Some((place, lane.as_ref()?)));
        known.filter(|(_, lane)| lane.dead.is_none())
    }

    /// Leaves places of which nothing is heard.
    fn bury(&mut self, now: Instant) {
        // What is said of one place may come by any other.
        let slowest = self.live().map(|(_, lane)| lane.rtt).max().unwrap_or_default();
        let overdue = |lane: &&mut Lane| lane.dead.is_none() && lane.is_overdue(now, slowest);
        self.lanes.iter_mut().flatten().filter(overdue).for_each(|lane| lane.die(now));
    }
}

fn micros_between(earlier: Instant, later: Instant) -> i64 {
    i64::try_from(later.since(earlier).as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
#[path = "stripe_test.rs"]
mod test;
