//! One connection of a client with the ensemble, as the switch knows it.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use margay_core::Instant;
use margay_ensemble::{MemberId, Switch};
use margay_wire::{FRAMED_LOST_MAX, FramedTerms};

use super::member::{Due, Host};
use crate::router::Router;

/// A HELLO to a member is repeated after so long, so often; then the pauses double.
const HELLO_AGAIN: Duration = Duration::from_millis(100);
const HELLOS_OFTEN: u32 = 10;
/// A list of lost requests is repeated after so long.
const LOST_AGAIN: Duration = Duration::from_millis(100);
/// A client from which nothing has come for so long is gone: it asks more often than that.
pub(super) const IDLE_MAX: Duration = Duration::from_secs(90);
/// Members are told so often that the connection lives.
pub(super) const PING_EVERY: Duration = Duration::from_secs(20);
/// A member that did not take a connection is asked again after so long, and so is one that has left; the pauses double
/// where it fails again and again.
const RETRY_FIRST: Duration = Duration::from_millis(200);
/// Pauses double so often: up to 6.4 s.
const DOUBLED_MAX: u32 = 5;
/// A member that has stayed up for this long starts from the first pause again.
const WELL_AFTER: Duration = Duration::from_secs(2);

/// A member that owes a connection something is asked after so long without a word of it whether it knows the
/// connection, and again. Where it says each time that it does, without doing more, the pauses double.
const ASK_AFTER: Duration = Duration::from_millis(100);
const ASK_DOUBLED_MAX: u32 = 4;
/// A part of a connection is over when the member has said nothing of it to so many of these questions.
const ASKS_MAX: u32 = 20;

/// When a member is tried again that has failed, so that none makes the switch say HELLO without end.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Retry {
    failures: u32,
    at: Option<Instant>,
}

impl Retry {
    /// It has failed, and had been there since then, if at all.
    pub(super) fn failed(&mut self, now: Instant, since: Option<Instant>) {
        let was_well = since.is_some_and(|since| now.since(since) >= WELL_AFTER);
        self.failures = if was_well { 1 } else { self.failures.saturating_add(1) };
        self.at = Some(now + RETRY_FIRST * (1 << (self.failures - 1).min(DOUBLED_MAX)));
    }

    /// Failures in a row.
    pub(super) fn failures(&self) -> u32 {
        self.failures
    }

    /// Whether it may be tried.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.at.is_none_or(|at| at <= now)
    }
}

/// Which connection: by the client's address and the number that the client has chosen.
pub(super) type Key = (SocketAddr, u64);

/// A member's part of a connection.
#[derive(Clone, Debug)]
pub(super) struct Leg {
    /// The number of the connection with the member.
    pub(super) number: u64,
    /// The first number of what the member is sent.
    pub(super) first: u32,
    pub(super) standing: LegStanding,
    /// When the member has taken the connection; until then, when it was asked to.
    pub(super) since: Instant,
    pub(super) asking: Asking,
    /// The member owes the connection something, as the member's entry has it.
    pub(super) is_owing: bool,
}

/// Whether a member knows a connection that it owes something. That its host answers does not say so: another process
/// may be there by the same name.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Asking {
    /// When it is asked; none: it owes nothing.
    at: Option<Instant>,
    /// Questions since it has said something of the connection.
    unanswered: u32,
    /// Answers since it has done something for the connection.
    answered: u32,
}

impl Asking {
    /// It owes the connection something, or does so no longer.
    pub(super) fn owes(&mut self, now: Instant, is_owing: bool) {
        match (is_owing, self.at) {
            (false, _) => *self = Self::default(),
            (true, None) => self.at = Some(now + ASK_AFTER),
            (true, Some(_)) => {}
        }
    }

    /// It has said something of the connection: that it knows the connection, or more.
    pub(super) fn heard(&mut self, now: Instant, has_done: bool) {
        self.unanswered = 0;
        self.answered = if has_done { 0 } else { (self.answered + 1).min(ASK_DOUBLED_MAX) };
        if let Some(at) = &mut self.at {
            *at = now + ASK_AFTER * (1 << self.answered);
        }
    }

    pub(super) fn on_time(&mut self, now: Instant) -> Due {
        if self.at.is_none_or(|at| at > now) {
            return Due::Nothing;
        }
        if self.unanswered >= ASKS_MAX {
            return Due::Dead;
        }
        self.unanswered += 1;
        self.at = Some(now + ASK_AFTER);
        Due::Ping
    }
}

/// How far a leg has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LegStanding {
    /// The member has not answered.
    Opening {
        /// When the HELLO is repeated.
        again_at: Instant,
        /// How often it was said.
        said: u32,
    },
    /// It is a member of the connection.
    Joined(MemberId),
}

impl LegStanding {
    /// A HELLO is said now.
    pub(super) fn opening(now: Instant) -> Self {
        Self::Opening { again_at: now + HELLO_AGAIN, said: 1 }
    }

    /// Whether the HELLO is to be repeated now; it counts as said.
    pub(super) fn repeats(&mut self, now: Instant) -> bool {
        let Self::Opening { again_at, said } = self else { return false };
        let is_due = *again_at <= now;
        if is_due {
            *again_at = now + HELLO_AGAIN * (1 << said.saturating_sub(HELLOS_OFTEN).min(DOUBLED_MAX + 1));
            *said += 1;
        }
        is_due
    }
}

impl Leg {
    pub(super) fn member(&self) -> Option<MemberId> {
        match self.standing {
            LegStanding::Joined(id) => Some(id),
            LegStanding::Opening { .. } => None,
        }
    }
}

/// Requests of dead members, on their way to the client.
#[derive(Clone, Debug, Default)]
pub(super) struct Lost {
    waiting: VecDeque<u32>,
    under_way: Vec<u32>,
    generation: u32,
    again_at: Option<Instant>,
}

impl Lost {
    pub(super) fn add(&mut self, numbers: Vec<u32>) {
        self.waiting.extend(numbers);
    }

    /// The list that is to be sent now, and its generation.
    pub(super) fn poll(&mut self, now: Instant) -> Option<(u32, &[u32])> {
        if self.under_way.is_empty() {
            if self.waiting.is_empty() {
                return None;
            }
            let count = self.waiting.len().min(FRAMED_LOST_MAX);
            self.under_way = self.waiting.drain(..count).collect();
            self.generation = self.generation.wrapping_add(1);
            self.again_at = None;
        }
        if self.again_at.is_some_and(|at| at > now) {
            return None;
        }
        self.again_at = Some(now + LOST_AGAIN);
        Some((self.generation, &self.under_way))
    }

    /// The client has seen a list.
    pub(super) fn seen(&mut self, generation: u32) {
        if generation == self.generation {
            self.under_way.clear();
            self.again_at = None;
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        if self.under_way.is_empty() && !self.waiting.is_empty() { Some(Instant::ZERO) } else { self.again_at }
    }

    /// How many requests the client does not know of yet.
    pub(super) fn len(&self) -> usize {
        self.waiting.len() + self.under_way.len()
    }
}

/// A connection.
#[derive(Debug)]
pub(super) struct Served {
    pub(super) switch: Switch<Router>,
    /// What the client has begun with.
    pub(super) hello: FramedTerms,
    /// The first number of what the client is sent.
    pub(super) first: u32,
    pub(super) legs: BTreeMap<Host, Leg>,
    pub(super) began: Instant,
    pub(super) heard_at: Instant,
    /// The client has been answered.
    pub(super) is_welcome: bool,
    pub(super) lost: Lost,
    /// The number of the module that divides its requests.
    pub(super) module: Option<u64>,
    /// The number of the module that it was offered to last, or has begun with.
    pub(super) offered: Option<u64>,
    /// Calls of the module that are counted.
    pub(super) module_calls: u64,
    /// When members are told that the connection lives, though nothing is asked.
    pub(super) ping_at: Instant,
    /// Members that did not take this connection, or keep it.
    pub(super) refused: BTreeMap<Host, Retry>,
    /// It is among those of which something has come.
    pub(super) is_touched: bool,
    /// For timers.
    pub(super) due: Option<Instant>,
}

impl Served {
    /// When something is to be done.
    pub(super) fn next_deadline(&self) -> Instant {
        let again = self.legs.values().filter_map(|leg| match leg.standing {
            LegStanding::Opening { again_at, .. } => Some(again_at),
            LegStanding::Joined(_) => None,
        });
        let asks = self.legs.values().filter_map(|leg| leg.asking.at);
        let others = [self.switch.next_deadline(), self.lost.next_deadline()].into_iter().flatten();
        let all = again.chain(asks).chain(others).chain(self.refused.values().filter_map(|retry| retry.at));
        all.fold(self.ping_at.min(self.heard_at + IDLE_MAX), Instant::min)
    }

    /// Forgets what is over of refusals: a member that does not take this connection now is asked once it takes any.
    pub(super) fn forget_refusals(&mut self, now: Instant) {
        let Self { refused, legs, .. } = self;
        refused.retain(|host, retry| {
            retry.at = retry.at.filter(|at| *at > now);
            retry.at.is_some() || legs.contains_key(host)
        });
    }

    pub(super) fn joined(&self) -> impl Iterator<Item = (&Host, MemberId)> {
        self.legs.iter().filter_map(|(host, leg)| Some((host, leg.member()?)))
    }

    pub(super) fn host_of(&self, id: MemberId) -> Option<Host> {
        self.joined().find(|(_, member)| *member == id).map(|(host, _)| *host)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn lost_requests_are_told_one_list_after_the_other_until_they_are_seen() {
        let at = Instant::from_millis;
        let mut lost = Lost::default();
        let poll =
            |lost: &mut Lost, millis| lost.poll(at(millis)).map(|(generation, list)| (generation, list.to_vec()));
        assert_eq!((poll(&mut lost, 0), lost.next_deadline()), (None, None));
        lost.add((0..300).collect());
        let first: Vec<u32> = (0..256).collect();
        assert_eq!(poll(&mut lost, 0), Some((1, first.clone())));
        assert_eq!(poll(&mut lost, 50), None);
        assert_eq!((lost.next_deadline(), lost.len()), (Some(at(100)), 300));
        assert_eq!(poll(&mut lost, 100), Some((1, first)), "it is repeated");
        lost.seen(0);
        assert_eq!(poll(&mut lost, 150), None, "another list was seen");
        lost.seen(1);
        assert_eq!(poll(&mut lost, 150), Some((2, (256..300).collect())));
        lost.seen(2);
        assert_eq!((poll(&mut lost, 150), lost.len()), (None, 0));
    }

    #[test]
    fn who_fails_again_and_again_is_tried_ever_more_seldom() {
        let at = Instant::from_millis;
        let mut retry = Retry::default();
        assert!(retry.is_due(at(0)));
        for (failures, pause) in [200, 400, 800, 1600, 3200, 6400, 6400].into_iter().enumerate() {
            retry.failed(at(0), Some(at(0)));
            assert!(!retry.is_due(at(pause - 1)) && retry.is_due(at(pause)), "{failures}");
        }
        retry.failed(at(2000), Some(at(0)));
        assert!(retry.is_due(at(2200)), "it had been there for a while");
        let mut standing = LegStanding::opening(at(0));
        let said = (1..=60_000).filter(|millis| standing.repeats(at(*millis))).count();
        assert_eq!(said, 24, "each 100 ms at first, then each 6.4 s");
    }

    #[test]
    fn a_member_is_asked_whether_it_knows_a_connection_that_it_owes_something() {
        let at = Instant::from_millis;
        let mut asking = Asking::default();
        assert_eq!(asking.on_time(at(1000)), Due::Nothing, "it owes nothing");
        asking.owes(at(1000), true);
        asking.owes(at(1050), true);
        assert_eq!((asking.on_time(at(1099)), asking.on_time(at(1100))), (Due::Nothing, Due::Ping));
        asking.heard(at(1101), false);
        assert_eq!(
            (asking.on_time(at(1300)), asking.on_time(at(1301))),
            (Due::Nothing, Due::Ping),
            "it takes its time"
        );
        asking.heard(at(1302), true);
        assert_eq!(
            (asking.on_time(at(1401)), asking.on_time(at(1402))),
            (Due::Nothing, Due::Ping),
            "it does something"
        );
        let asked = (0..100).take_while(|n| asking.on_time(at(1502 + n * 100)) == Due::Ping).count();
        assert_eq!(asked + 1, ASKS_MAX as usize, "then it is taken for gone");
        asking.owes(at(9000), false);
        assert_eq!(asking.at, None);
    }
}
