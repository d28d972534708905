//! One connection of a client with the ensemble, as the switch knows it.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use margay_core::Instant;
use margay_ensemble::{MemberId, Switch};
use margay_wire::{FRAMED_LOST_MAX, FramedTerms};

use super::member::Host;
use crate::router::Router;

/// A HELLO to a member is repeated after so long.
pub(super) const HELLO_AGAIN: Duration = Duration::from_millis(100);
/// A list of lost requests is repeated after so long.
const LOST_AGAIN: Duration = Duration::from_millis(100);
/// A client from which nothing has come for so long is gone: it asks more often than that.
pub(super) const IDLE_MAX: Duration = Duration::from_secs(90);
/// Members are told so often that the connection lives.
pub(super) const PING_EVERY: Duration = Duration::from_secs(20);
/// A member that did not take a connection is asked again after so long.
pub(super) const LEG_PAUSE: Duration = Duration::from_millis(200);

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
}

/// How far a leg has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LegStanding {
    /// The member has not answered.
    Opening {
        /// When the HELLO is repeated.
        again_at: Instant,
    },
    /// It is a member of the connection.
    Joined(MemberId),
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
    /// When members are told that the connection lives, though nothing is asked.
    pub(super) ping_at: Instant,
    /// Members that did not take this connection, until when.
    pub(super) refused: BTreeMap<Host, Instant>,
    /// For timers.
    pub(super) due: Option<Instant>,
}

impl Served {
    /// When something is to be done.
    pub(super) fn next_deadline(&self) -> Instant {
        let again = self.legs.values().filter_map(|leg| match leg.standing {
            LegStanding::Opening { again_at } => Some(again_at),
            LegStanding::Joined(_) => None,
        });
        let others = [self.switch.next_deadline(), self.lost.next_deadline()].into_iter().flatten();
        let all = again.chain(others).chain(self.refused.values().copied());
        all.fold(self.ping_at.min(self.heard_at + IDLE_MAX), Instant::min)
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
}
