//! When a silent peer is given up (DESIGN §7). Three facts are kept apart: whether the host can be reached, whether
//! its agent is alive, and whether a flow is; here they are joined. An *initiator's* flows fail when nothing of the
//! host has come for [`GIVE_UP_AFTER`], what was asked of it by every pair of addresses and by its router goes
//! unanswered, and the routers list it no more. A responder never gives up a silent client: its transport does.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::time::Duration;

use margay_wire::FlowId;

use crate::entry::RemoveReason;
use crate::event::{Event, Lifecycle, Role};
use crate::flow::Flow;
use crate::greeting::GREETING;
use crate::key::HostId;
use crate::location::Scope;
use crate::name::ServiceId;
use crate::sal::Sal;
use crate::time::Instant;

/// Unless the operator says otherwise: long enough for hosts that move or sleep.
pub const GIVE_UP_AFTER: Duration = Duration::from_secs(30);
/// Less is less than a host that moves may take.
pub const GIVE_UP_AFTER_MIN: Duration = Duration::from_millis(500);
const UDP: u8 = 17;
/// From one look at peers that no router lists to the next: so many in the time for which a peer is waited.
const LOOKS: u32 = 16;

/// A peer that no router lists.
#[derive(Clone, Copy, Debug)]
struct Absence {
    /// When this was told first.
    since: Instant,
    /// When packets of its flows have come last, as the flow cache says.
    heard: Instant,
}

fn is_open_initiator(flow: &Flow) -> bool {
    flow.role == Role::Initiator
        && matches!(flow.lifecycle, Lifecycle::Established | Lifecycle::HalfClosed)
        && flow.app.protocol != GREETING
}

/// Peers that no router lists, and how long one that is silent is waited for.
#[derive(Debug)]
pub(crate) struct Patience {
    /// `None`: for ever.
    limit: Option<Duration>,
    absent: BTreeMap<HostId, Absence>,
    next_look: Instant,
}

impl Default for Patience {
    fn default() -> Self {
        Self { limit: Some(GIVE_UP_AFTER), absent: BTreeMap::new(), next_look: Instant::ZERO }
    }
}

impl Patience {
    /// When peers are looked at next.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.limit.filter(|_| !self.absent.is_empty()).map(|_| self.next_look)
    }
}

impl Sal {
    /// Sets for how long a silent peer is waited for; `None`: for ever.
    pub fn set_give_up_after(&mut self, limit: Option<Duration>) {
        self.patience.limit = limit;
    }

    /// Sets the peers that no router lists, of those that flows of programs here are with. One of them is asked for a
    /// sign of life when it has been silent for half of the time, also where flows with it only wait.
    pub fn set_absent(&mut self, now: Instant, absent: &BTreeSet<HostId>) {
        self.now = now;
        self.patience.absent.retain(|host, _| absent.contains(host));
        if self.patience.absent.is_empty() {
            self.patience.next_look = now;
        }
        for host in absent {
            self.patience.absent.entry(*host).or_insert(Absence { since: now, heard: now });
        }
    }

    /// Whether nothing comes from a peer, which is asked again and again by every way.
    pub fn is_silent(&self, host: HostId) -> bool {
        self.is_unheard(Scope::of(host))
    }

    /// Peers that no router lists and that have been silent for half of the time: whether packets of flows with them
    /// come decides now, of which the flow cache knows.
    pub fn doubted_peers(&self, now: Instant) -> Vec<HostId> {
        let Some(limit) = self.patience.limit else { return Vec::new() };
        let all = self.patience.absent.iter();
        all.filter(|(host, absence)| self.silent_for(now, **host, absence) >= limit / 2)
            .map(|(host, _)| *host)
            .collect()
    }

    fn silent_for(&self, now: Instant, host: HostId, absence: &Absence) -> Duration {
        let heard = self.associations.all_with(host).map(|association| association.heard).max();
        now.since(heard.unwrap_or(Instant::ZERO).max(absence.heard))
    }

    /// Packets of flows with a peer have come since the flow cache was asked last.
    pub fn handle_life(&mut self, now: Instant, host: HostId) {
        if let Some(absence) = self.patience.absent.get_mut(&host) {
            absence.heard = now;
        }
    }

    /// Flows of datagrams of programs here, with an instance of a service that has left, begin anew: the next datagram
    /// goes to another one. Gives how many there were.
    pub fn rebind_datagrams(&mut self, now: Instant, host: HostId, service: &ServiceId) -> usize {
        self.now = now;
        let is_it = |flow: &&Flow| flow.app.protocol == UDP && flow.service == *service;
        let flows: Vec<FlowId> = self.initiated_with(host).filter(is_it).map(|flow| flow.id).collect();
        for id in &flows {
            self.remove_flow(*id, RemoveReason::GivenUp);
        }
        flows.len()
    }

    /// The peers that programs here have open flows with, and by which names. Takes a walk over all flows.
    pub fn initiated(&self) -> BTreeMap<HostId, BTreeSet<ServiceId>> {
        let mut initiated: BTreeMap<HostId, BTreeSet<ServiceId>> = BTreeMap::new();
        for flow in self.flows.iter().filter(|flow| is_open_initiator(flow)) {
            if let Some(known) = self.associations.get(flow.association).filter(|known| !known.is_self()) {
                initiated.entry(known.host).or_default().insert(flow.service);
            }
        }
        initiated
    }

    /// The open flows of programs here with a peer.
    pub fn flows_initiated_with(&self, host: HostId) -> Vec<FlowId> {
        self.initiated_with(host).map(|flow| flow.id).collect()
    }

    fn initiated_with(&self, host: HostId) -> impl Iterator<Item = &Flow> {
        let is_with = move |flow: &&Flow| {
            self.associations.get(flow.association).is_some_and(|known| known.host == host && !known.is_self())
        };
        self.flows.iter().filter(|flow| is_open_initiator(flow)).filter(is_with)
    }

    /// Looks at the peers that no router lists.
    pub(crate) fn patience_due(&mut self, now: Instant) {
        let Some(limit) = self.patience.limit.filter(|_| now >= self.patience.next_look) else { return };
        self.patience.next_look = now + (limit / LOOKS).max(Duration::from_millis(50));
        for (host, absence) in self.patience.absent.clone() {
            let silent = self.silent_for(now, host, &absence);
            // It has been asked for half of the time at least.
            let is_asked = now.since(absence.since) >= limit / 2 && self.is_unheard(Scope::of(host));
            if silent >= limit && is_asked {
                self.give_up(now, host);
            } else if silent >= limit / 2 {
                self.suspect(now, host, None);
            }
        }
    }

    fn give_up(&mut self, now: Instant, host: HostId) {
        self.patience.absent.remove(&host);
        let flows = self.flows_initiated_with(host);
        for id in &flows {
            self.fail_flow(now, *id, RemoveReason::GivenUp);
        }
        self.events.push(Event::GivenUp { peer: host, flows: flows.len() });
    }
}
