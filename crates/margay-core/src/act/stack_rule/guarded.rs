//! The flows that are guarded: when something is due for each, and which are with a host. One peer may have many of
//! them, so nothing here looks at all for the sake of one.

use alloc::collections::{BTreeMap, BTreeSet};
use core::time::Duration;

use margay_wire::FlowId;

use crate::types::key::HostId;
use crate::types::time::Instant;

/// After so long a flow that is not encrypted has a trouble.
const LATE: Duration = Duration::from_secs(5);
/// How soon this end repeats to the peer what it demands of a flow, and how often from then on.
const TELL_SOON: Duration = Duration::from_millis(100);
const TELL_EVERY: Duration = Duration::from_secs(1);

/// Nothing of a flow is sent until it is encrypted.
#[derive(Debug)]
pub(super) struct Guarded {
    host: HostId,
    since: Instant,
    /// Nothing of it has been sent by its present path: then its old stack has no last packet there.
    pub is_moved: bool,
    /// When this end repeats its demand to the peer, and how often it has.
    next: Instant,
    tells: u32,
    /// It waits for longer than encrypting takes.
    pub is_late: bool,
    /// Names what the peer is told of the demand; zero where no rule of this host demands anything.
    pub token: u64,
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct GuardedFlows {
    flows: BTreeMap<FlowId, Guarded>,
    by_host: BTreeSet<(HostId, FlowId)>,
    unanswered: BTreeSet<(HostId, FlowId)>,
    due: BTreeSet<(Instant, FlowId)>,
}

impl GuardedFlows {
    /// Adds a flow that is not guarded yet.
    pub fn insert(&mut self, now: Instant, (host, id): (HostId, FlowId), is_moved: bool) {
        self.remove(id);
        let next = now + TELL_SOON;
        let guarded = Guarded { host, since: now, is_moved, next, tells: 0, is_late: false, token: 0 };
        self.flows.insert(id, guarded);
        self.by_host.insert((host, id));
        self.due.insert((next, id));
    }

    pub fn remove(&mut self, id: FlowId) {
        let Some(Guarded { host, next, .. }) = self.flows.remove(&id) else { return };
        self.by_host.remove(&(host, id));
        self.unanswered.remove(&(host, id));
        self.due.remove(&(next, id));
    }

    /// A rule of this host demands the flow encrypted from now on. The token names what the peer is told of that.
    pub fn demand(&mut self, id: FlowId, token: u64) {
        let Some(guarded) = self.flows.get_mut(&id) else { return };
        guarded.token = token;
        self.unanswered.insert((guarded.host, id));
    }

    /// The peer has said that the flow waits there, too; or no rule of this host demands anything any more.
    pub fn end_demand(&mut self, id: FlowId) {
        let Some(guarded) = self.flows.get(&id) else { return };
        self.unanswered.remove(&(guarded.host, id));
    }

    pub fn contains(&self, id: FlowId) -> bool {
        self.flows.contains_key(&id)
    }

    pub fn get(&self, id: FlowId) -> Option<&Guarded> {
        self.flows.get(&id)
    }

    pub fn get_mut(&mut self, id: FlowId) -> Option<&mut Guarded> {
        self.flows.get_mut(&id)
    }

    /// Those with a host.
    pub fn with(&self, host: HostId) -> impl Iterator<Item = FlowId> {
        self.by_host.range((host, FlowId(0))..=(host, FlowId(u32::MAX))).map(|(_, id)| *id)
    }

    /// Whether a host has yet to answer what it was told of one.
    pub fn is_any_unanswered(&self, host: HostId) -> bool {
        self.unanswered.range((host, FlowId(0))..=(host, FlowId(u32::MAX))).next().is_some()
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        self.due.first().map(|(next, _)| *next)
    }

    /// The next one for which something is due: which, and whether it is late, and is so from now on.
    pub fn pop_due(&mut self, now: Instant) -> Option<(FlowId, Lateness)> {
        let (_, id) = self.due.first().copied().filter(|(next, _)| *next <= now)?;
        self.due.pop_first();
        let guarded = self.flows.get_mut(&id)?;
        let was_late = guarded.is_late;
        guarded.wait(now);
        self.due.insert((guarded.next, id));
        let lateness = match (was_late, guarded.is_late) {
            (_, false) => Lateness::InTime,
            (false, true) => Lateness::LateNow,
            (true, true) => Lateness::Late,
        };
        Some((id, lateness))
    }
}

/// Whether a flow has waited for longer than encrypting takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lateness {
    InTime,
    /// For the first time.
    LateNow,
    Late,
}

impl Guarded {
    /// What was due is done: when there is something again, and whether the flow waits for too long.
    fn wait(&mut self, now: Instant) {
        self.tells += 1;
        self.is_late = now.since(self.since) >= LATE;
        let wait = (TELL_SOON * (1 << self.tells.min(8))).min(TELL_EVERY);
        self.next = if self.is_late { now + wait } else { (now + wait).min(self.since + LATE) };
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    const HOST: HostId = HostId([1; 16]);
    const OTHER: HostId = HostId([2; 16]);

    fn at(millis: u64) -> Instant {
        Instant::from_millis(millis)
    }

    #[test]
    fn flows_are_due_in_order_and_late_after_five_seconds() {
        let mut guarded = GuardedFlows::default();
        guarded.insert(at(0), (HOST, FlowId(1)), false);
        guarded.demand(FlowId(1), 7);
        guarded.insert(at(50), (OTHER, FlowId(2)), true);
        assert_eq!((guarded.next_deadline(), guarded.pop_due(at(99))), (Some(at(100)), None));
        assert_eq!(guarded.pop_due(at(150)), Some((FlowId(1), Lateness::InTime)));
        assert_eq!(guarded.pop_due(at(150)), Some((FlowId(2), Lateness::InTime)));
        assert_eq!(guarded.pop_due(at(150)), None);
        guarded.remove(FlowId(2));
        let due: Vec<_> = (200..7200).filter_map(|ms| Some((ms, guarded.pop_due(at(ms))?.1))).collect();
        let late = due.iter().position(|(_, lateness)| *lateness == Lateness::LateNow).expect("it waits too long");
        assert_eq!(due[late].0, 5000);
        assert!(due[..late].iter().all(|(_, lateness)| *lateness == Lateness::InTime));
        assert_eq!(due[late + 1..], [(6000, Lateness::Late), (7000, Lateness::Late)]);
        guarded.remove(FlowId(1));
        assert_eq!(guarded.next_deadline(), None);
        assert!(guarded.by_host.is_empty() && guarded.unanswered.is_empty());
    }

    #[test]
    fn a_hosts_flows_are_found_by_it_and_so_is_what_it_has_not_answered() {
        let mut guarded = GuardedFlows::default();
        for n in 1..=3 {
            guarded.insert(at(0), (HOST, FlowId(n)), false);
        }
        guarded.demand(FlowId(2), 7);
        guarded.insert(at(0), (OTHER, FlowId(9)), false);
        guarded.demand(FlowId(9), 8);
        assert_eq!(guarded.with(HOST).collect::<Vec<_>>(), [1, 2, 3].map(FlowId));
        assert!(guarded.is_any_unanswered(HOST));
        guarded.end_demand(FlowId(2));
        guarded.demand(FlowId(7), 9);
        assert!(!guarded.is_any_unanswered(HOST) && guarded.is_any_unanswered(OTHER));
    }
}
