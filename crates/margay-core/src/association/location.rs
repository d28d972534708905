//! Where this host and a peer find each other: the pair of addresses in use, and how it changes (docs/decisions/0018;
//! DESIGN §10).
//!
//! What is kept of it for each peer, and for each flow that has gone its own way. The messages are in `moving`,
//! suspicion in `liveness`.

use alloc::collections::{BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::fmt;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;

use hashbrown::HashMap;
use margay_wire::{FlowId, MoveRepr};

use crate::association::AssociationTable;
use crate::types::key::HostId;
use crate::types::keyed_hash::KeyedHash;
use crate::types::rng::Rng;
use crate::types::state::Machine;
use crate::types::time::Instant;

/// From which of this host's addresses its routing sends to an address; `None` where it has no route.
pub(crate) type Routes = HashMap<IpAddr, Option<IpAddr>, KeyedHash>;

/// Addresses of a peer that are kept.
pub(crate) const ADDRESSES_MAX: usize = 8;
/// Pairs that one move is tried over.
pub(crate) const PAIRS_MAX: usize = 16;
/// Pairs that are asked and have not answered, of one peer.
const UNPROVED_MAX: usize = 2 * PAIRS_MAX;
/// So many messages go by such a pair at once; then the waits begin, and double up to the longest.
const UNPROVED_AT_ONCE: u32 = 2;
const UNPROVED_WAIT: Duration = Duration::from_millis(500);
const UNPROVED_WAIT_MAX: Duration = Duration::from_secs(64);
/// A peer that moves more often than this is left where it is for a while.
const COMMITS_MAX: usize = 8;
const COMMITS_TIME: Duration = Duration::from_secs(10);

/// A location's number, and whose move it is. Both ends count together: the locations of a pair of hosts have one
/// order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Numbered {
    pub number: u32,
    pub by: HostId,
}

impl Numbered {
    /// Of two equal numbers, that of the smaller host-ID is the later.
    pub fn is_after(self, other: Self) -> bool {
        self.number > other.number || self.number == other.number && self.by < other.by
    }
}

/// Two addresses between which packets go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pair {
    /// This host's; `None` where its routing decides.
    pub local: Option<IpAddr>,
    /// The peer's UDP address.
    pub remote: SocketAddr,
}

impl fmt::Display for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.local {
            Some(local) => write!(f, "{local} > {}", self.remote),
            None => write!(f, "> {}", self.remote),
        }
    }
}

/// What a location is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Scope {
    pub host: HostId,
    /// One flow, by our number; zero: all with the host.
    pub flow: FlowId,
}

impl Scope {
    pub const fn of(host: HostId) -> Self {
        Self { host, flow: FlowId(0) }
    }

    pub const fn is_host(&self) -> bool {
        self.flow.0 == 0
    }
}

/// What this host, as a mover, is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Moving {
    /// The peer knows where this host is.
    Settled,
    /// RSYN is out.
    Asking,
    /// The peer has answered, and RSYN-DONE is out.
    Closing,
}

/// What happens to a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MoveEvent {
    /// The pair in use is not, or shall not be, the right one any more.
    Leave,
    /// RSYN-ACK came.
    Answered,
    /// The peer has committed to it.
    Confirmed,
    /// It is not needed any more.
    Dropped,
}

/// The declared life of a move.
pub const MOVING: Machine<Moving, MoveEvent> = Machine {
    name: "move",
    states: &[Moving::Settled, Moving::Asking, Moving::Closing],
    events: &[MoveEvent::Leave, MoveEvent::Answered, MoveEvent::Confirmed, MoveEvent::Dropped],
    transitions: &[
        (Moving::Settled, MoveEvent::Leave, Moving::Asking),
        (Moving::Asking, MoveEvent::Leave, Moving::Asking),
        (Moving::Asking, MoveEvent::Answered, Moving::Closing),
        (Moving::Asking, MoveEvent::Dropped, Moving::Settled),
        (Moving::Closing, MoveEvent::Leave, Moving::Asking),
        (Moving::Closing, MoveEvent::Confirmed, Moving::Settled),
        (Moving::Closing, MoveEvent::Dropped, Moving::Settled),
    ],
};

/// Why a pair was left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// This host's addresses or routes have changed.
    Address,
    /// Nothing came by the pair any more, and by another it did.
    Silence,
    /// An address translator on the way has given this host another address or port.
    Rebound,
    /// The agent has started again, and its addresses may have changed meanwhile.
    Restart,
    /// By order.
    Operator,
    /// Data went unanswered by the pair, although probes did not.
    Unanswered,
    /// The peer looked for this host where it is no longer.
    Sought,
    /// The peer has moved.
    Peer,
}

impl Cause {
    /// The words of lists and logs.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Address => "this host's addresses or routes changed",
            Self::Silence => "the path before was silent",
            Self::Rebound => "an address translator gave this host another address",
            Self::Restart => "the agent started again",
            Self::Operator => "by order",
            Self::Unanswered => "data went unanswered on the path before, although probes were answered",
            Self::Sought => "the peer looked for this host at an address that it has left",
            Self::Peer => "the peer moved",
        }
    }
}

/// What is wrong with how a peer and this host find each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Trouble {
    /// The peer moves too often.
    Flapping,
    /// Nothing comes from it.
    Silent,
    /// Nothing comes from it, and another host is at its address.
    OtherHost,
    /// Probes are answered between the addresses in use, data is not, and no other pair is better.
    Unanswered,
    /// A rule demands that the flow is sealed at these addresses, and it is not.
    Unsealed,
}

impl Trouble {
    /// A word for programs.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Flapping => "flapping",
            Self::Silent => "silent",
            Self::OtherHost => "other-host",
            Self::Unanswered => "unanswered",
            Self::Unsealed => "unsealed",
        }
    }

    /// A sentence for lists.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Flapping => {
                "the peer moves more often than eight times in ten seconds; until that is over it is left where it is"
            }
            Self::Silent => "nothing comes from the peer by any way that is known; it is asked again and again",
            Self::OtherHost => {
                "nothing comes from the peer, and a host with another key is at its address; the flow waits for its own"
            }
            Self::Unanswered => {
                "probes are answered between these addresses, but data is not, and no other pair of addresses does better"
            }
            Self::Unsealed => {
                "a stack rule demands that the flow is sealed at these addresses, and it is not: nothing of it is \
                 sent; `margay stack show FLOW` says why"
            }
        }
    }
}

/// A move of this host that is under way.
#[derive(Debug)]
pub(crate) struct Ask {
    pub cause: Cause,
    /// Nothing passes between the addresses in use.
    pub broken: bool,
    /// By no other pair either: the one in use is as good as any, and data goes on by it.
    pub unheard: bool,
    pub pairs: Vec<Pair>,
    pub asked: Instant,
    pub tries: u32,
    pub next: Instant,
    /// Which one the peer has answered over, with its token.
    pub answered: Option<(Pair, u64)>,
    /// That it is there is the word of a router that the peer has named.
    pub is_hearsay: bool,
    /// The peer has found this host where it leaves, or a move before this one was not confirmed: by this pair it
    /// shall find it instead.
    pub wish: Option<Pair>,
    /// Moves to the pair that is wished that were answered, and not confirmed.
    pub unconfirmed: u8,
}

/// How often this host has sent to addresses that a peer has named, or says to be at, and that have not answered: the
/// peer may have named somebody else's. Counted by IP address, because all ports of it are one victim's.
#[derive(Debug, Default)]
pub(crate) struct Unproved(Vec<Asked>);

#[derive(Debug)]
struct Asked {
    local: Option<IpAddr>,
    remote: IpAddr,
    times: u32,
    /// It may be asked again.
    next: Instant,
}

impl Unproved {
    /// Whether one more message may go by a pair; it counts as sent. The waits between them double.
    pub fn may_ask(&mut self, now: Instant, pair: Pair) -> bool {
        let at = self.0.iter().position(|asked| asked.is_of(pair));
        let Some(at) = at.or_else(|| self.make_room(now, pair)) else { return false };
        let asked = &mut self.0[at];
        if now < asked.next {
            return false;
        }
        asked.times = asked.times.saturating_add(1);
        let doublings = asked.times.checked_sub(UNPROVED_AT_ONCE);
        let wait =
            doublings.map(|doublings| UNPROVED_WAIT.saturating_mul(1 << doublings.min(8)).min(UNPROVED_WAIT_MAX));
        asked.next = now + wait.unwrap_or_default();
        true
    }

    /// The peer has shown that it receives what goes by a pair.
    pub fn answered(&mut self, pair: Pair) {
        self.0.retain(|asked| !asked.is_of(pair));
    }

    /// Begins to count for a pair. A pair that has not been asked for long gives way to it.
    fn make_room(&mut self, now: Instant, pair: Pair) -> Option<usize> {
        if self.0.len() >= UNPROVED_MAX {
            let (oldest, asked) = self.0.iter().enumerate().min_by_key(|(_, asked)| asked.next)?;
            if now < asked.next + UNPROVED_WAIT_MAX {
                return None;
            }
            self.0.swap_remove(oldest);
        }
        self.0.push(Asked { local: pair.local, remote: pair.remote.ip(), times: 0, next: now });
        Some(self.0.len() - 1)
    }
}

impl Asked {
    fn is_of(&self, pair: Pair) -> bool {
        (self.local, self.remote) == (pair.local, pair.remote.ip())
    }
}

/// A path record is held until a direct packet has come by the new pair.
#[derive(Debug)]
pub(crate) struct Hold {
    pub tries: u32,
    pub next: Instant,
}

/// A pair that is asked over whether it works.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Question {
    pub pair: Pair,
    /// Random, so that only a peer that receives what goes by this pair can answer for it.
    pub number: u32,
}

/// The pair in use may be dead.
#[derive(Debug)]
pub(crate) struct Suspicion {
    pub asked: Instant,
    pub until: Instant,
    pub tries: u32,
    pub questions: Vec<Question>,
    /// Other pairs that were answered over, the quickest first.
    pub answered: Vec<Pair>,
    /// It is data that goes unanswered: that probes are answered acquits nobody.
    pub of_data: bool,
    /// The pair in use was answered over.
    pub is_alive: bool,
}

impl Suspicion {
    /// Of the pair that is the first of `pairs`; nothing is asked yet.
    pub fn new(now: Instant, pairs: impl IntoIterator<Item = Pair>, rng: &mut Rng, of_data: bool) -> Self {
        let (asked, until, answered) = (now, now, Vec::new());
        let mut new = Self { asked, until, tries: 0, questions: Vec::new(), answered, of_data, is_alive: false };
        new.extend(pairs, rng);
        new
    }

    /// More pairs to ask, after those that are asked.
    pub fn extend(&mut self, others: impl IntoIterator<Item = Pair>, rng: &mut Rng) {
        for pair in others {
            if self.questions.len() <= PAIRS_MAX && self.questions.iter().all(|asked| asked.pair != pair) {
                self.questions.push(Question { pair, number: rng.u32() });
            }
        }
    }

    /// The pair that an answer speaks for: the number is that of the question by that pair.
    pub fn pair_of(&self, answer: &MoveRepr) -> Option<Pair> {
        let question = usize::try_from(answer.token).ok().and_then(|place| self.questions.get(place))?;
        (question.number == answer.number).then_some(question.pair)
    }
}

/// The last change of the pair in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// When.
    pub at: Instant,
    /// Why.
    pub cause: Cause,
}

/// What is kept of where a peer and this host find each other.
#[derive(Debug)]
pub(crate) struct Location {
    pub state: Moving,
    /// Of the move that is under way, or was last.
    pub number: u32,
    /// The location in force, whoever moved.
    pub force: Numbered,
    /// The greatest number with which this host has said RSYN-DONE: that may still arrive.
    pub spent: u32,
    pub ask: Option<Ask>,
    /// An address that data is taken from although packets still go to another, and for how long.
    pub expected: Option<(SocketAddr, Instant)>,
    /// The location that was in force when data was last taken so: once only while that is in force.
    pub expected_in: Option<Numbered>,
    /// Where else the peer says that it can be reached; one port of each IP address.
    pub addresses: Vec<SocketAddr>,
    pub unproved: Unproved,
    /// The peer's service router.
    pub rendezvous: Option<SocketAddr>,
    pub hold: Option<Hold>,
    /// The peer holds its direct path, too, and waits to hear that a direct packet came.
    pub watches: bool,
    /// Number of this watch, or of the last one: DIRECT bears it, and OPENED gives it back.
    pub watch: u32,
    pub suspicion: Option<Suspicion>,
    /// At which address the peer sees this host, by the pair in use.
    pub seen: Option<SocketAddr>,
    /// Then something goes out, so that a translator does not forget this host.
    pub keep_alive: Option<Instant>,
    /// Pairs by which probes passed and data did not.
    pub tried: Vec<Pair>,
    /// The pair in use is one, and no other is better.
    pub deaf: bool,
    /// Data that has gone unanswered was sent lately: by then it is sent again, and tells of it again, or it was
    /// answered.
    pub lost_until: Option<Instant>,
    /// When the pair in use was last seen to be alive, or found without another.
    pub looked: Option<Instant>,
    pub moved: Option<Moved>,
    pub moves: u32,
    commits: VecDeque<Instant>,
    /// Until then the peer is not followed any more.
    pub flapping: Option<Instant>,
    due: Option<Instant>,
}

impl Default for Location {
    fn default() -> Self {
        Self {
            state: Moving::Settled,
            number: 0,
            force: Numbered { number: 0, by: HostId([0xff; 16]) },
            spent: 0,
            ask: None,
            expected: None,
            expected_in: None,
            addresses: Vec::new(),
            unproved: Unproved::default(),
            rendezvous: None,
            hold: None,
            watches: false,
            watch: 0,
            suspicion: None,
            seen: None,
            keep_alive: None,
            tried: Vec::new(),
            deaf: false,
            lost_until: None,
            looked: None,
            moved: None,
            moves: 0,
            commits: VecDeque::new(),
            flapping: None,
            due: None,
        }
    }
}

impl Location {
    /// Takes a declared transition; false where there is none.
    pub fn take(&mut self, event: MoveEvent) -> bool {
        let Ok(next) = MOVING.after(self.state, event) else { return false };
        self.state = next;
        true
    }

    /// Whether a location is later than the one in force, and than any that `own` may still bring about.
    pub fn is_later(&self, found: Numbered, own: HostId) -> bool {
        found.is_after(self.force) && found.is_after(Numbered { number: self.spent, by: own })
    }

    /// The peer is to hear of direct packets that come from now on.
    pub fn begin_watch(&mut self) {
        self.watches = true;
        self.watch = self.watch.wrapping_add(1);
    }

    /// The number of the next move.
    pub fn next_number(&self) -> u32 {
        self.force.number.max(self.spent).max(self.number).saturating_add(1)
    }

    /// Counts a commitment. False when the peer has moved too often, and is left where it is.
    pub fn may_commit(&mut self, now: Instant) -> bool {
        self.commits.retain(|at| now.since(*at) < COMMITS_TIME);
        if self.commits.len() < COMMITS_MAX {
            return true;
        }
        self.flapping = self.commits.front().map(|first| *first + COMMITS_TIME);
        false
    }

    pub fn note_commit(&mut self, now: Instant) {
        self.commits.push_back(now);
        self.flapping = None;
    }

    fn next_due(&self) -> Option<Instant> {
        let ask = self.ask.as_ref().map(|ask| ask.next);
        let hold = self.hold.as_ref().map(|hold| hold.next);
        let suspicion = self.suspicion.as_ref().map(|suspicion| suspicion.until);
        let expected = self.expected.map(|(_, until)| until);
        ask.into_iter().chain(hold).chain(suspicion).chain(self.keep_alive).chain(expected).min()
    }
}

/// The locations of all peers, and of flows that have one of their own.
pub(crate) struct LocationTable {
    locations: HashMap<Scope, Location, KeyedHash>,
    due: BTreeSet<(Instant, Scope)>,
}

impl LocationTable {
    pub fn with_hasher(hasher: KeyedHash) -> Self {
        Self { locations: HashMap::with_hasher(hasher), due: BTreeSet::new() }
    }

    pub fn get(&self, scope: Scope) -> Option<&Location> {
        self.locations.get(&scope)
    }

    /// Changes one, which is made if there is none; its next deadline follows.
    pub fn with<R>(&mut self, scope: Scope, change: impl FnOnce(&mut Location) -> R) -> R {
        let location = self.locations.entry(scope).or_default();
        let result = change(location);
        let next = location.next_due();
        let before = core::mem::replace(&mut location.due, next);
        if before != next {
            if let Some(before) = before {
                self.due.remove(&(before, scope));
            }
            if let Some(next) = next {
                self.due.insert((next, scope));
            }
        }
        result
    }

    /// Whether one more message may go to where a peer may be. Its address in use has proved itself, and this host's
    /// own routers are no word of the peer's; for others see [`Unproved`].
    pub fn may_ask(&mut self, associations: &AssociationTable, now: Instant, host: HostId, pair: Pair) -> bool {
        let is_in_use = associations.pair_of(host).is_some_and(|present| present.remote == pair.remote);
        is_in_use
            || associations.is_own_router_at(pair.remote)
            || self.with(Scope::of(host), |location| location.unproved.may_ask(now, pair))
    }

    pub fn remove(&mut self, scope: Scope) {
        if let Some(location) = self.locations.remove(&scope)
            && let Some(due) = location.due
        {
            self.due.remove(&(due, scope));
        }
    }

    /// Whether this host moves, with all flows that it has with a peer or with one of them.
    pub fn is_any_moving(&self, host: HostId) -> bool {
        let is_its = |scope: &Scope| scope.host == host;
        self.scopes().filter(is_its).any(|scope| self.get(scope).is_some_and(|at| at.state != Moving::Settled))
    }

    pub fn scopes(&self) -> impl Iterator<Item = Scope> {
        self.locations.keys().copied()
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    /// One whose deadline is at or before `now`.
    pub fn next_due(&self, now: Instant) -> Option<Scope> {
        self.due.first().filter(|(at, _)| *at <= now).map(|(_, scope)| *scope)
    }
}

#[cfg(test)]
mod tests {
    use margay_wire::MoveFlags;

    use super::*;

    #[test]
    fn the_whole_matrix_of_a_move() {
        let expected = "\
Settled Leave Asking\nSettled Answered -\nSettled Confirmed -\nSettled Dropped -
Asking Leave Asking\nAsking Answered Closing\nAsking Confirmed -\nAsking Dropped Settled
Closing Leave Asking\nClosing Answered -\nClosing Confirmed Settled\nClosing Dropped Settled\n";
        assert_eq!(MOVING.matrix(), expected);
        assert!(MOVING.faults().is_empty());
    }

    #[test]
    fn locations_have_one_order_and_a_number_is_used_once() {
        let of = |number, by: u8| Numbered { number, by: HostId([by; 16]) };
        assert!(of(2, 9).is_after(of(1, 1)) && of(2, 1).is_after(of(2, 9)));
        assert!(!of(2, 9).is_after(of(2, 9)) && !of(2, 9).is_after(of(2, 1)));
        let location = Location { number: 3, force: of(4, 1), spent: 6, ..Location::default() };
        assert_eq!(location.next_number(), 7);
        assert!(location.is_later(of(7, 9), HostId([1; 16])));
        // This host's own DONE may still arrive.
        assert!(!location.is_later(of(6, 9), HostId([1; 16])) && location.is_later(of(6, 1), HostId([9; 16])));
    }

    #[test]
    fn a_peer_that_moves_all_the_time_is_left_where_it_is_for_a_while() {
        let mut location = Location::default();
        for second in 0..8 {
            let now = Instant::from_millis(second * 100);
            assert!(location.may_commit(now));
            location.note_commit(now);
        }
        assert!(!location.may_commit(Instant::from_millis(900)));
        assert_eq!(location.flapping, Some(Instant::from_millis(10_000)));
        assert!(location.may_commit(Instant::from_millis(10_000)));
    }

    #[test]
    fn a_peer_that_gets_one_probe_cannot_answer_for_another_pair() {
        let pair = |last: u8| Pair { local: None, remote: SocketAddr::from(([192, 0, 2, last], 54_324)) };
        let suspicion = Suspicion::new(Instant::ZERO, [pair(1), pair(2), pair(1)], &mut Rng::new([1; 32]), false);
        let numbers: Vec<u32> = suspicion.questions.iter().map(|question| question.number).collect();
        assert_eq!(numbers.len(), 2, "a pair is asked once");
        let speaks_for = |token, number| {
            suspicion.pair_of(&MoveRepr {
                number,
                token,
                challenge: 0,
                address: pair(1).remote,
                flags: MoveFlags::empty(),
            })
        };
        assert_eq!([speaks_for(0, numbers[0]), speaks_for(1, numbers[1])], [Some(pair(1)), Some(pair(2))]);
        assert_eq!([speaks_for(1, numbers[0]), speaks_for(0, numbers[1])], [None, None]);
    }

    #[test]
    fn an_address_that_does_not_answer_is_asked_ever_more_seldom() {
        let pair = |last: u8, port| Pair { local: None, remote: SocketAddr::from(([192, 0, 2, last], port)) };
        let (mut unproved, victim) = (Unproved::default(), pair(1, 54_324));
        let asked = |unproved: &mut Unproved, pair, seconds: u64| {
            (0..seconds * 10).filter(|tenth| unproved.may_ask(Instant::from_millis(tenth * 100), pair)).count()
        };
        assert_eq!(asked(&mut unproved, victim, 30), 7, "at 0 and 0.1 s, and then after 0.5, 1, 2, 4 and 8 s");
        // Another port of it is the same address.
        assert!(!unproved.may_ask(Instant::from_millis(30_000), pair(1, 7)));
        // A peer that names one address after another has them all asked no more often.
        let others = (2..=200).filter(|last| unproved.may_ask(Instant::from_millis(30_000), pair(*last, 7))).count();
        assert_eq!(others, UNPROVED_MAX - 1);
        unproved.answered(victim);
        assert!(unproved.may_ask(Instant::from_millis(30_000), victim));
    }

    #[test]
    fn a_table_knows_the_next_deadline_whatever_changes() {
        let mut table = LocationTable::with_hasher(KeyedHash(1, 2));
        let scope = |n: u8| Scope::of(HostId([n; 16]));
        let hold = |ms| Some(Hold { tries: 0, next: Instant::from_millis(ms) });
        table.with(scope(1), |location| location.hold = hold(50));
        table.with(scope(2), |location| location.hold = hold(20));
        assert_eq!(table.next_deadline(), Some(Instant::from_millis(20)));
        assert_eq!(table.next_due(Instant::from_millis(20)), Some(scope(2)));
        table.with(scope(2), |location| location.hold = None);
        assert_eq!(table.next_deadline(), Some(Instant::from_millis(50)));
        table.remove(scope(1));
        assert_eq!(table.next_deadline(), None);
    }
}
