//! What the core counts: for metrics, and for tests that must see that something did not happen.

use margay_wire::Kind;

use crate::act::reconfiguration::{Durations, EDITS, OUTCOMES};
use crate::cache::entry::RemoveReason;
use crate::session::give_up::GiveUpCause;
use crate::types::drop_reason::DropReason;

const KINDS: usize = 33;
const DROPS: usize = 64;
const REMOVALS: usize = 13;
const CAUSES: usize = GiveUpCause::LABELS.len();

/// Monotonic counts since the start.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    received: Table<KINDS>,
    sent: Table<KINDS>,
    drops: Table<DROPS>,
    removals: Table<REMOVALS>,
    given_up: Table<CAUSES>,
    /// Cookies asked for.
    pub cookies_sent: u64,
    /// Applications whose connect failed.
    pub connects_failed: u64,
    /// Resolvable packets forwarded for others.
    pub forwarded: u64,
    /// Answers relayed for others.
    pub relayed: u64,
    /// Answers that would have been larger than their request, and were not sent.
    pub answers_too_large: u64,
    /// Idle associations that had to make room for others.
    pub associations_displaced: u64,
    /// Idle associations whose time was over.
    pub associations_expired: u64,
    /// Times that a held packet found its flow's queue full.
    pub held_full: u64,
    /// Proved messages of set-up that came from another place than where flows with their sender go.
    pub elsewhere: u64,
    /// Times that a peer and this host, or one of their flows, changed their addresses.
    pub moves: u64,
    /// Times that this host asked its segments for a router.
    pub searches: u64,
    /// Answers to that by hosts that proved to be one.
    pub routers_found: u64,
    /// Others' searches that this router answered.
    pub searches_answered: u64,
    /// Notices of other hosts that were believed.
    pub notices_heard: u64,
    /// Notices that were not: a wrong signature, no right to the name, or no room.
    pub notices_refused: u64,
    /// First packets that went to a host that was heard of, and not to the whole segment.
    pub notices_used: u64,
    /// Of those, such as the segment was asked about all the same, since nothing came of it.
    pub notices_failed: u64,
    /// First packets that waited for a resolver.
    pub delayed: u64,
    /// First packets that could not wait, since too many did.
    pub delays_refused: u64,
    /// Questions to resolvers.
    pub questions: u64,
    /// Questions that brought nothing, in time or at all.
    pub questions_failed: u64,
    /// Answers that nobody waited for any more.
    pub answers_late: u64,
    /// Rules that ended by themselves.
    pub rules_expired: u64,
    /// Flows that were begun to be striped.
    pub stripes: u64,
    /// Flows whose name's policy could not be had: they go as others do.
    pub policies_refused: u64,
    /// Applications' TCP connections reset because their flow failed.
    pub resets: u64,
    /// Grants that were asked for.
    pub grants_asked: u64,
    /// Grants that this host gave.
    pub grants_given: u64,
    /// Grants by which no flow may be opened any more, of either role.
    pub grants_ended: u64,
    /// Grants of which no flow was answered: something on the way takes what their SYNs bear, or their giver is dead.
    pub grants_silent: u64,
    /// Flows that the kernel has opened by grants.
    pub flows_granted: u64,
    /// Of these, those that were over before they were listed anywhere.
    pub flows_brief: u64,
    /// Sessions that have passed a box of this host, and were proved to it.
    pub chains_joined: u64,
    /// Sessions that were refused at a box of this host: by the box, or since nobody was there to go on to.
    pub chains_refused: u64,
    /// Reconfigurations that are over, by what was ordered and what has become of them.
    pub reconfigurations: [[u64; OUTCOMES]; EDITS],
    /// How long they have taken, from their first message to their end, by what has become of them.
    pub reconfiguration_durations: [Durations; OUTCOMES],
    /// How long it has taken until the programs here sent by new ways.
    pub reconfiguration_turns: Durations,
    /// Times that a reconfiguration found its session busy with another act.
    pub reconfigurations_locked: u64,
    /// Orders of other hosts on sessions of programs here, by what has become of them.
    pub orders_of_others: [u64; OUTCOMES],
    /// Programs here that have left a session.
    pub splices_done: u64,
    /// Those that were to, and have not.
    pub splices_failed: u64,
}

#[derive(Clone, Debug)]
struct Table<const N: usize>([u64; N]);

impl<const N: usize> Default for Table<N> {
    fn default() -> Self {
        Self([0; N])
    }
}

impl<const N: usize> Table<N> {
    fn add(&mut self, at: u8) {
        if let Some(count) = self.0.get_mut(usize::from(at)) {
            *count += 1;
        }
    }

    fn get(&self, at: u8) -> u64 {
        self.0.get(usize::from(at)).copied().unwrap_or(0)
    }
}

impl Counters {
    pub(crate) fn received(&mut self, kind: Kind) {
        self.received.add(kind.into());
    }

    pub(crate) fn sent(&mut self, kind: Kind) {
        self.sent.add(kind.into());
    }

    pub(crate) fn drop(&mut self, reason: DropReason) {
        self.drops.add(reason as u8);
    }

    pub(crate) fn removed(&mut self, reason: RemoveReason) {
        self.removals.add(reason as u8);
    }

    pub(crate) fn given_up(&mut self, cause: GiveUpCause) {
        self.given_up.add(cause.number());
    }

    /// Messages of a kind that came in.
    pub fn messages_received(&self, kind: Kind) -> u64 {
        self.received.get(kind.into())
    }

    /// Messages of a kind that went out.
    pub fn messages_sent(&self, kind: Kind) -> u64 {
        self.sent.get(kind.into())
    }

    /// Packets dropped for a reason.
    pub fn drops(&self, reason: DropReason) -> u64 {
        self.drops.get(reason as u8)
    }

    /// Peers given up, by cause.
    pub fn peers_given_up(&self) -> [(&'static str, u64); CAUSES] {
        core::array::from_fn(|at| (GiveUpCause::LABELS[at], self.given_up.0[at]))
    }

    /// Flows removed for a reason.
    pub fn removals(&self, reason: RemoveReason) -> u64 {
        self.removals.get(reason as u8)
    }
}
