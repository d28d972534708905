//! The scheduler on simulated links, in virtual time: a source that always has more, links with a rate, a delay and a
//! queue, a receiver that says what has come.

use alloc::collections::{BTreeSet, VecDeque};
use alloc::vec::Vec;

use super::*;
use crate::leg::copies::Copies;
use crate::leg::reorder::{Part, Sequencer};

/// Trains of every length, as TCP makes them.
const TRAINS: [usize; 6] = [10_000, 1_500, 9_000, 24_000, 300, 12_000];
const STEP_US: u64 = 250;
/// Trains of a burst; there is one every 30 ms.
const BURST: u32 = 6;
const REPORT_US: u64 = 10_000;
/// The receiver's clock is another than the sender's.
const OTHER_CLOCK_US: u64 = 0xffff_f000;

const fn train(number: u32) -> usize {
    TRAINS[number as usize % TRAINS.len()]
}

/// A link: bytes per second, one way in microseconds, bytes that wait for it at most.
#[derive(Clone, Copy)]
struct Link {
    rate: u64,
    delay_us: u64,
    queue: usize,
    is_up: bool,
}

const fn link(mbit: u64, delay_ms: u64) -> Link {
    Link { rate: mbit * 125_000, delay_us: delay_ms * 1000, queue: 250_000, is_up: true }
}

struct World {
    now_us: u64,
    links: Vec<Link>,
    scheduler: Scheduler,
    /// By place: what waits for its turn.
    waiting: Vec<VecDeque<(Instant, u32, bool)>>,
    /// When each link is free again.
    free_us: Vec<u64>,
    /// By arrival: train and place.
    under_way: BTreeSet<(u64, u32, usize)>,
    reports: VecDeque<(u64, ArrivalsRepr)>,
    arrivals: ArrivalsRepr,
    next: u32,
    delivered: Vec<u64>,
    copies: Copies,
    sequencer: Sequencer<u32>,
    newest: u32,
    given: u32,
    overtaken: u32,
    dropped: u32,
    full: u32,
    /// Trains that the source still has in this burst, where it speaks in bursts.
    burst: Option<u32>,
    latest_us: u64,
}

impl World {
    fn new(links: &[Link]) -> Self {
        let mut world = Self {
            now_us: 1_000_000,
            links: links.to_vec(),
            scheduler: Scheduler::default(),
            waiting: links.iter().map(|_| VecDeque::new()).collect(),
            free_us: alloc::vec![0; links.len()],
            under_way: BTreeSet::new(),
            reports: VecDeque::new(),
            arrivals: ArrivalsRepr::default(),
            next: 0,
            delivered: alloc::vec![0; links.len()],
            copies: Copies::default(),
            sequencer: Sequencer::default(),
            newest: 0,
            given: 0,
            overtaken: 0,
            dropped: 0,
            full: 0,
            burst: None,
            latest_us: 0,
        };
        world.probe();
        world
    }

    fn now(&self) -> Instant {
        Instant::from_micros(self.now_us)
    }

    /// Places that work answer.
    fn probe(&mut self) {
        for (place, link) in self.links.clone().iter().enumerate().filter(|(_, link)| link.is_up) {
            self.scheduler.handle_alive(self.now(), place, Duration::from_micros(link.delay_us * 2));
        }
    }

    fn run(&mut self, ms: u64) {
        let end_us = self.now_us + ms * 1000;
        while self.now_us < end_us {
            self.step();
        }
    }

    fn step(&mut self) {
        self.now_us += STEP_US;
        let now = self.now();
        if self.now_us.is_multiple_of(250_000) {
            self.probe();
        }
        if self.now_us.is_multiple_of(30_000) {
            self.burst = self.burst.map(|_| BURST);
        }
        while self.burst != Some(0) {
            self.burst = self.burst.map(|left| left - 1);
            match self.scheduler.choose(now, train(self.next)) {
                Turn::Place(place, at) => {
                    self.waiting[place].push_back((at, self.next, at > now));
                    self.next += 1;
                    if at > now + Duration::from_millis(400) {
                        break;
                    }
                }
                Turn::Twice(both) => {
                    for (place, at) in both {
                        self.waiting[place].push_back((at, self.next, at > now));
                    }
                    self.next += 1;
                    if both.iter().all(|(_, at)| *at > now + Duration::from_millis(400)) {
                        break;
                    }
                }
                Turn::Full | Turn::Elsewhere => {
                    self.full += 1;
                    break;
                }
            }
        }
        for place in 0..self.links.len() {
            self.send(place);
        }
        self.receive();
        while self.reports.front().is_some_and(|(at_us, _)| *at_us <= self.now_us) {
            let Some((_, report)) = self.reports.pop_front() else { break };
            self.scheduler.handle_arrivals(now, &report);
        }
    }

    fn send(&mut self, place: usize) {
        let now = self.now();
        while let Some(&(_, number, waited)) = self.waiting[place].front().filter(|(at, ..)| *at <= now) {
            self.waiting[place].pop_front();
            if !self.scheduler.is_live(place) {
                if let Turn::Place(other, at) = self.scheduler.choose(now, train(number)) {
                    self.waiting[other].push_back((at, number, true));
                }
                continue;
            }
            let (link, bytes) = (self.links[place], train(number) as u64);
            self.scheduler.note_sent(now, place, number, train(number), waited);
            let backlog_us = self.free_us[place].saturating_sub(self.now_us);
            if !link.is_up || backlog_us * link.rate / 1_000_000 + bytes > link.queue as u64 {
                self.dropped += 1;
                continue;
            }
            self.free_us[place] = self.free_us[place].max(self.now_us) + bytes * 1_000_000 / link.rate;
            self.under_way.insert((self.free_us[place] + link.delay_us, number, place));
        }
    }

    fn receive(&mut self) {
        while let Some(&(at_us, number, place)) = self.under_way.first().filter(|(at_us, ..)| *at_us <= self.now_us) {
            self.under_way.pop_first();
            self.delivered[place] += train(number) as u64;
            if self.copies.admit(number, 1, 0) {
                self.put_in_order(place, number);
            } else {
                self.sequencer.note_copy(self.now(), Some(place), number);
            }
            let arrival = ArrivalRepr {
                packet_number: number,
                at_us: (at_us + OTHER_CLOCK_US) as u32,
                bytes: self.delivered[place] as u32,
            };
            self.arrivals.places[place] = Some(arrival);
            self.latest_us = at_us;
        }
        let is_fresh = self.latest_us + REPORT_US > self.now_us;
        if self.now_us.is_multiple_of(REPORT_US) && is_fresh {
            self.arrivals.number += 1;
            let quickest = self.links.iter().filter(|link| link.is_up).map(|link| link.delay_us).min();
            self.reports.push_back((self.now_us + quickest.unwrap_or(0), self.arrivals));
        }
    }

    fn put_in_order(&mut self, place: usize, number: u32) {
        let (now, part) = (self.now(), Part { number, step: 1, chunks: 1, count: 1 });
        if self.sequencer.admit(now, Some(place), &part) {
            self.give(number);
        } else {
            self.sequencer.hold(now, part, number);
        }
        while let Some(number) = self.sequencer.take(now) {
            self.give(number);
        }
    }

    fn give(&mut self, number: u32) {
        self.given += 1;
        self.overtaken += u32::from(number < self.newest);
        self.newest = self.newest.max(number);
    }

    /// Bytes per second that arrive in so many milliseconds from now on, as a share of what the links that are up can.
    fn share(&mut self, ms: u64) -> f64 {
        let before: u64 = self.delivered.iter().sum();
        self.run(ms);
        let sum: u64 = self.links.iter().filter(|link| link.is_up).map(|link| link.rate).sum();
        (self.delivered.iter().sum::<u64>() - before) as f64 * 1e3 / ms as f64 / sum as f64
    }

    /// Of all trains that the receiver gives on from now on, those that come after a later one.
    fn disorder(&mut self, ms: u64) -> f64 {
        let (before, given) = (self.overtaken, self.given);
        self.run(ms);
        f64::from(self.overtaken - before) / f64::from(self.given - given)
    }
}

#[test]
fn equal_links_carry_twice_as_much_in_order() {
    let mut world = World::new(&[link(40, 10), link(40, 10)]);
    world.run(1500);
    let share = world.share(3000);
    assert!(share > 0.93, "{share}");
    let disorder = world.disorder(2000);
    assert!(disorder < 0.01, "{disorder}");
}

#[test]
fn unequal_links_carry_what_they_can() {
    for links in [[link(40, 10), link(20, 10)], [link(40, 5), link(40, 60)], [link(100, 2), link(10, 30)]] {
        let mut world = World::new(&links);
        world.run(2500);
        let share = world.share(3000);
        assert!(share > 0.9, "{share}");
        let disorder = world.disorder(2000);
        assert!(disorder < 0.02, "{disorder}, {} Mbit/s", links[0].rate / 125_000);
    }
}

#[test]
fn a_place_that_dies_is_left_and_one_that_comes_back_is_used_again() {
    let mut world = World::new(&[link(40, 10), link(40, 10)]);
    world.run(2000);
    world.links[1].is_up = false;
    let lost = world.dropped;
    world.run(250);
    assert!(!world.scheduler.is_live(1) && world.scheduler.is_live(0));
    assert!(world.dropped - lost < 300, "{}", world.dropped - lost);
    world.run(500);
    let share = world.share(1000);
    assert!(share > 0.93, "{share}");
    world.links[1].is_up = true;
    world.run(2500);
    let share = world.share(1000);
    assert!(share > 0.9, "{share}");
}

#[test]
fn a_place_that_never_brings_anything_is_asked_ever_less_often() {
    let mut world = World::new(&[link(40, 10), link(40, 10)]);
    world.run(1000);
    // It answers probes, and brings no data.
    world.links[1].queue = 0;
    world.run(4000);
    let dropped = world.dropped;
    let share = world.share(4000);
    assert!(share > 0.45, "{share}");
    assert!(world.dropped - dropped < 250, "{}", world.dropped - dropped);
}

#[test]
fn all_places_dead_is_for_the_host_to_deal_with() {
    let mut world = World::new(&[link(40, 10), link(40, 10)]);
    world.run(1000);
    world.links.iter_mut().for_each(|link| link.is_up = false);
    world.run(400);
    assert_eq!(world.scheduler.choose(world.now(), TRAINS[0]), Turn::Elsewhere);
}

#[test]
fn a_place_that_gets_slower_is_given_less_and_one_that_gets_faster_more() {
    let mut world = World::new(&[link(40, 10), link(40, 10)]);
    world.run(2000);
    world.links[1].rate /= 4;
    world.run(1000);
    let share = world.share(2000);
    assert!(share > 0.9, "{share}");
    world.links[1].rate *= 4;
    world.run(3000);
    let share = world.share(2000);
    assert!(share > 0.9, "{share}");
}

#[test]
fn a_place_that_is_far_too_slow_is_left_out() {
    let mut world = World::new(&[link(40, 5), link(40, 300)]);
    world.run(1000);
    let before = world.delivered[1];
    world.run(2000);
    assert_eq!(world.delivered[1], before);
}

#[test]
fn a_report_that_is_late_says_nothing() {
    let mut world = World::new(&[link(40, 10)]);
    world.run(500);
    let newest = world.arrivals;
    let places = world.scheduler.places();
    let now = world.now();
    let places_of_late = [None; PLACES_MAX];
    world.scheduler.handle_arrivals(now, &ArrivalsRepr { number: newest.number - 1, places: places_of_late });
    assert_eq!(world.scheduler.places(), places);
}

#[test]
fn a_place_that_is_given_little_does_not_look_slow() {
    let mut world = World::new(&[link(40, 10), link(20, 10)]);
    world.run(2000);
    // A fourth of what both carry, in bursts: they idle between them.
    world.burst = Some(0);
    world.run(4000);
    let rates = world.scheduler.places().map(|place| place.map_or(0, |place| place.rate));
    for (rate, link) in rates.iter().zip(&world.links) {
        assert!(*rate > link.rate * 7 / 10, "{rate} of {}", link.rate);
    }
    world.burst = None;
    world.run(500);
    let share = world.share(1000);
    assert!(share > 0.9, "{share}");
}

/// What each of two places has brought meanwhile, in bytes.
fn brought(world: &mut World, ms: u64) -> [u64; 2] {
    let before = world.delivered.clone();
    world.run(ms);
    core::array::from_fn(|place| world.delivered[place] - before[place])
}

#[test]
fn places_have_their_turns_by_weight_whether_there_is_room_or_not() {
    for (weights, links, ratio) in [
        ([2, 1], [link(40, 10), link(20, 10)], 2.0),
        ([3, 1], [link(40, 10), link(40, 30)], 3.0),
        ([1, 1], [link(40, 10), link(20, 10)], 1.0),
        ([0, 0], [link(40, 10), link(40, 10)], 1.0),
    ] {
        let mut world = World::new(&links);
        world.scheduler.set_sharing(Sharing::Weighted, [weights[0], weights[1], 0, 0]);
        world.run(2000);
        let [one, other] = brought(&mut world, 3000);
        let found = one as f64 / other as f64;
        assert!((found / ratio - 1.0).abs() < 0.05, "{weights:?}: {found}");
        // Half of what the links carry.
        world.burst = Some(0);
        world.run(1000);
        let [one, other] = brought(&mut world, 3000);
        let found = one as f64 / other as f64;
        assert!((found / ratio - 1.0).abs() < 0.05, "{weights:?}, in bursts: {found}");
    }
}

#[test]
fn a_place_that_comes_back_makes_up_for_no_turns() {
    let mut world = World::new(&[link(40, 10), link(40, 10)]);
    world.scheduler.set_sharing(Sharing::Weighted, [1; PLACES_MAX]);
    world.run(1000);
    world.links[1].is_up = false;
    world.run(3000);
    let [one, _] = brought(&mut world, 500);
    assert!(one > 2_000_000, "the other has all turns: {one}");
    world.links[1].is_up = true;
    world.run(3000);
    let [one, other] = brought(&mut world, 1000);
    assert!((one as f64 / other as f64 - 1.0).abs() < 0.1, "{one} and {other}");
}

#[test]
fn a_redundant_flow_loses_nothing_with_a_place_and_has_nothing_twice() {
    let mut world = World::new(&[link(40, 10), link(40, 25)]);
    world.scheduler.set_sharing(Sharing::Redundant, [0; PLACES_MAX]);
    // Less than one of them carries.
    world.burst = Some(0);
    world.run(2000);
    let [one, other] = brought(&mut world, 1000);
    assert!(one > 500_000 && (one as f64 / other as f64 - 1.0).abs() < 0.1, "{one} and {other}");
    for (down, up) in [(1, 0), (0, 1)] {
        world.links[up].is_up = true;
        world.run(2000);
        world.links[down].is_up = false;
        world.run(1000);
    }
    assert!(world.dropped > 0, "something was sent by the place that was down");
    assert_eq!((world.given, world.overtaken), (world.newest + 1, 0));
    assert!(world.next - world.newest < 3 * BURST, "{} of {}", world.newest, world.next);
}
