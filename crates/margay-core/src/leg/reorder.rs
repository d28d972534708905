//! Trains of a striped flow, put in order again where they arrive (docs/decisions/0021).
//!
//! Each place keeps its own order. So what is missing is lost when every place that is in use has brought something
//! later, and is waited for no longer (as RFC 1990 §4.1 has it for bundled links); and never for longer than a bounded
//! time. Where repairs come by a place, what every place has passed by may still be brought back, and is waited for.

use alloc::collections::VecDeque;
use core::time::Duration;

use margay_wire::PLACES_MAX;

use crate::types::time::Instant;

/// Longest wait for what is missing.
const WAIT_MAX: Duration = Duration::from_millis(50);
/// The same where repairs come by a place: a block lasts for 8 ms, and what repairs it follows.
const WAIT_FOR_REPAIRS: Duration = Duration::from_millis(40);
/// A place by which nothing has come for so long is not in use.
const IN_USE: Duration = Duration::from_millis(100);
/// What waits, in parts.
const HELD_MAX: usize = 2048;

/// What has come: chunks of one train.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Of the train, as it is on the wire.
    pub number: u32,
    /// How far the next train's number is from it.
    pub step: u32,
    /// How many chunks these are.
    pub chunks: u32,
    /// How many the train has.
    pub count: u32,
}

/// A place, and what of it has come last.
#[derive(Clone, Copy, Debug)]
struct Seen {
    number: u32,
    at: Instant,
}

#[derive(Debug)]
struct Held<T> {
    part: Part,
    since: Instant,
    item: T,
}

/// Puts the parts of one flow in order.
#[derive(Debug)]
pub struct Sequencer<T> {
    /// The train that is due, once something has come, and how many of its chunks have come.
    next: Option<(u32, u32)>,
    places: [Option<Seen>; PLACES_MAX + 1],
    /// In order; parts of one train as they came.
    held: VecDeque<Held<T>>,
    /// What is lost may be brought back.
    is_repaired: bool,
}

impl<T> Default for Sequencer<T> {
    fn default() -> Self {
        Self { next: None, places: [None; PLACES_MAX + 1], held: VecDeque::new(), is_repaired: false }
    }
}

const fn is_before(one: u32, other: u32) -> bool {
    one.wrapping_sub(other).cast_signed() < 0
}

impl<T> Sequencer<T> {
    /// From here on repairs come by a place, or come no more.
    pub const fn set_repaired(&mut self, is_repaired: bool) {
        self.is_repaired = is_repaired;
    }

    /// Takes note of a part that has come by a place, and has come before by another one: it is not given on.
    pub fn note_copy(&mut self, now: Instant, place: Option<usize>, number: u32) {
        let Some(seen) = place.and_then(|place| self.places.get_mut(place)) else { return };
        if seen.is_none_or(|seen| is_before(seen.number, number)) {
            *seen = Some(Seen { number, at: now });
        }
    }

    /// Takes note of a part that has come by a place (`None`: by a pair that is none). True if it is not to wait; then
    /// what [`take`](Self::take) gives follows it. Otherwise it is to be given to [`hold`](Self::hold).
    pub fn admit(&mut self, now: Instant, place: Option<usize>, part: &Part) -> bool {
        let place = place.map_or(PLACES_MAX, |place| place.min(PLACES_MAX));
        self.places[place] = Some(Seen { number: part.number, at: now });
        let (next, _) = *self.next.get_or_insert((part.number, 0));
        if is_before(next, part.number) {
            return self.held.len() >= HELD_MAX;
        }
        if part.number == next {
            self.pass(part);
        }
        true
    }

    /// Lets a part wait for those before it.
    pub fn hold(&mut self, now: Instant, part: Part, item: T) {
        let at = self.held.iter().rposition(|held| !is_before(part.number, held.part.number)).map_or(0, |at| at + 1);
        self.held.insert(at, Held { part, since: now, item });
    }

    /// The next one that waits no longer.
    pub fn take(&mut self, now: Instant) -> Option<T> {
        let first = self.held.front()?;
        let (next, _) = self.next?;
        let number = first.part.number;
        let is_due = !is_before(next, number);
        let is_lost = !self.is_repaired && self.is_lost(now, next);
        if !is_due && !is_lost && now.since(self.oldest()?) < self.wait_max() {
            return None;
        }
        let held = self.held.pop_front()?;
        if is_before(next, number) {
            self.next = Some((number, 0));
        }
        if !is_before(number, next) {
            self.pass(&held.part);
        }
        Some(held.item)
    }

    /// When something that waits is not to wait any longer.
    pub fn deadline(&self) -> Option<Instant> {
        self.oldest().map(|oldest| oldest + self.wait_max())
    }

    const fn wait_max(&self) -> Duration {
        if self.is_repaired { WAIT_FOR_REPAIRS } else { WAIT_MAX }
    }

    fn oldest(&self) -> Option<Instant> {
        self.held.iter().map(|held| held.since).min()
    }

    fn pass(&mut self, part: &Part) {
        let Some((_, come)) = self.next.as_mut() else { return };
        *come += part.chunks;
        if *come >= part.count {
            self.next = Some((part.number.wrapping_add(part.step), 0));
        }
    }

    /// Whether every place in use has brought something later.
    fn is_lost(&self, now: Instant, number: u32) -> bool {
        let mut in_use = self.places.iter().flatten().filter(|seen| now.since(seen.at) < IN_USE);
        in_use.all(|seen| is_before(number, seen.number))
    }
}

#[cfg(test)]
mod test {
    use alloc::vec::Vec;

    use super::*;

    const fn whole(number: u32) -> Part {
        Part { number, step: 1, chunks: 1, count: 1 }
    }

    fn at(ms: u64) -> Instant {
        Instant::from_millis(ms)
    }

    /// Gives parts to a sequencer, by place; what it lets through, in order.
    fn run(sequencer: &mut Sequencer<u32>, now: Instant, place: usize, part: Part) -> Vec<u32> {
        let mut out = Vec::new();
        if sequencer.admit(now, Some(place), &part) {
            out.push(part.number);
        } else {
            sequencer.hold(now, part, part.number);
        }
        out.extend(core::iter::from_fn(|| sequencer.take(now)));
        out
    }

    #[test]
    fn what_comes_in_order_does_not_wait() {
        let mut sequencer = Sequencer::default();
        for number in 0..100 {
            let number = (u32::MAX - 50).wrapping_add(number);
            assert_eq!(run(&mut sequencer, at(1), (number % 2) as usize, whole(number)), [number]);
        }
    }

    #[test]
    fn what_overtakes_waits_for_what_it_has_overtaken() {
        let mut sequencer = Sequencer::default();
        assert_eq!(run(&mut sequencer, at(0), 1, whole(7)), [7]);
        assert_eq!(run(&mut sequencer, at(1), 0, whole(10)), []);
        assert_eq!(run(&mut sequencer, at(1), 0, whole(11)), []);
        assert_eq!(run(&mut sequencer, at(2), 1, whole(8)), [8]);
        assert_eq!(run(&mut sequencer, at(3), 1, whole(9)), [9, 10, 11]);
        assert_eq!(sequencer.deadline(), None);
    }

    #[test]
    fn what_every_place_has_passed_by_is_lost() {
        let mut sequencer = Sequencer::default();
        assert_eq!(run(&mut sequencer, at(0), 0, whole(1)), [1]);
        assert_eq!(run(&mut sequencer, at(0), 1, whole(2)), [2]);
        // 3 is lost on one of the two.
        assert_eq!(run(&mut sequencer, at(1), 0, whole(4)), []);
        assert_eq!(run(&mut sequencer, at(2), 1, whole(5)), [4, 5]);
        // Late after all: it is given on.
        assert_eq!(run(&mut sequencer, at(3), 1, whole(3)), [3]);
        assert_eq!(run(&mut sequencer, at(3), 1, whole(6)), [6]);
    }

    #[test]
    fn one_place_alone_makes_nothing_wait() {
        let mut sequencer = Sequencer::default();
        assert_eq!(run(&mut sequencer, at(0), 1, whole(1)), [1]);
        assert_eq!(run(&mut sequencer, at(200), 0, whole(2)), [2]);
        assert_eq!(run(&mut sequencer, at(201), 0, whole(4)), [4]);
    }

    #[test]
    fn nothing_waits_for_long() {
        let mut sequencer = Sequencer::default();
        assert_eq!(run(&mut sequencer, at(0), 0, whole(1)), [1]);
        assert_eq!(run(&mut sequencer, at(1), 1, whole(3)), []);
        assert_eq!(sequencer.deadline(), Some(at(51)));
        assert_eq!(sequencer.take(at(50)), None);
        assert_eq!(sequencer.take(at(51)), Some(3));
        assert_eq!(sequencer.deadline(), None);
    }

    #[test]
    fn what_every_place_has_passed_by_is_waited_for_where_repairs_come() {
        let mut sequencer = Sequencer::default();
        sequencer.set_repaired(true);
        assert_eq!(run(&mut sequencer, at(0), 0, whole(1)), [1]);
        assert_eq!(run(&mut sequencer, at(0), 1, whole(2)), [2]);
        assert_eq!(run(&mut sequencer, at(1), 0, whole(4)), []);
        assert_eq!(run(&mut sequencer, at(2), 1, whole(5)), []);
        assert_eq!(run(&mut sequencer, at(9), 0, whole(3)), [3, 4, 5], "brought back");
        assert_eq!(run(&mut sequencer, at(10), 1, whole(7)), []);
        assert_eq!(sequencer.deadline(), Some(at(50)));
        assert_eq!(sequencer.take(at(49)), None);
        assert_eq!(sequencer.take(at(50)), Some(7), "for a bounded time");
        sequencer.set_repaired(false);
        assert_eq!(run(&mut sequencer, at(60), 0, whole(9)), []);
        assert_eq!(run(&mut sequencer, at(61), 1, whole(10)), [9, 10], "as ever");
    }

    #[test]
    fn a_train_in_parts_is_whole_before_the_next_one() {
        let mut sequencer = Sequencer::default();
        let part = |number, chunks| Part { number, step: 3, chunks, count: 3 };
        assert_eq!(run(&mut sequencer, at(0), 0, part(0, 2)), [0]);
        assert_eq!(run(&mut sequencer, at(0), 1, part(3, 3)), []);
        assert_eq!(run(&mut sequencer, at(1), 0, part(0, 1)), [0, 3]);
        assert_eq!(run(&mut sequencer, at(1), 0, part(6, 3)), [6]);
    }
}
