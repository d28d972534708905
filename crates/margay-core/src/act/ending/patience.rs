//! When a silent peer is given up (DESIGN §7). Three facts are kept apart: whether the host can be reached, whether
//! its agent is alive, and whether a flow is; here they are joined. An *initiator's* flows fail when nothing of the
//! host has come for as long as the operator or the service says, or for [`GIVE_UP_AFTER`]; what was asked of it by
//! every pair of addresses and by its router goes unanswered; and the routers list it no more. A responder never gives
//! up a silent client: its transport does. The host of a box before it, or of a proxy, is not merely a client: that
//! host serves the box's name, and is given up as by an initiator.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::time::Duration;

use margay_wire::{Extension, FlowId, TermsRepr};

use super::told::Told;
use crate::association::AssociationTable;
use crate::association::location::Scope;
use crate::cache::entry::RemoveReason;
use crate::machine::sal::Sal;
use crate::session::flow::Flow;
use crate::session::flow::FlowTable;
use crate::session::give_up::{GIVE_UP_AFTER, GiveUpAfter, GiveUpCause};
use crate::types::key::HostId;
use crate::types::name::{Prefix, ServiceId};
use crate::types::role::{Lifecycle, Role};
use crate::types::time::Instant;
use crate::types::tuple::GREETING;

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

/// The name that an open flow's peer serves it by, and is listed under: what the flow asked for, or the box that it has
/// come through. `None`: its peer is a client.
fn served_by(flow: &Flow) -> Option<ServiceId> {
    let is_open = matches!(flow.lifecycle, Lifecycle::Established | Lifecycle::HalfClosed);
    match flow.role {
        _ if !is_open || flow.app.protocol == GREETING => None,
        Role::Initiator => Some(flow.asked()),
        Role::Responder => flow.chain.as_deref().filter(|_| flow.carries_data())?.box_before(),
    }
}

/// Peers that no router lists, and how long one that is silent is waited for.
#[derive(Debug, Default)]
pub(crate) struct Patience {
    /// What the operator of this host says, of all peers.
    of_host: Option<GiveUpAfter>,
    /// What services here say to their clients.
    own: BTreeMap<Prefix, GiveUpAfter>,
    /// What services have said to programs here; of others, this end waits for as long as it does by itself.
    told: Told<GiveUpAfter>,
    absent: BTreeMap<HostId, Absence>,
    next_look: Instant,
}

impl Patience {
    /// How long a host is waited for by flows to one of its services.
    fn limit(&self, host: HostId, service: &ServiceId) -> Option<Duration> {
        let told = || self.told.get(host, service).copied();
        self.of_host.or_else(told).unwrap_or(GiveUpAfter(Some(GIVE_UP_AFTER))).0
    }

    /// The shortest time for which any flow may wait for a host.
    fn shortest(&self, host: HostId) -> Option<Duration> {
        if let Some(of_host) = self.of_host {
            return of_host.0;
        }
        self.told.of_host(host).filter_map(|told| told.0).chain([GIVE_UP_AFTER]).min()
    }

    /// From one look at peers to the next.
    fn between_looks(&self) -> Option<Duration> {
        let shortest = self.absent.keys().filter_map(|host| self.shortest(*host)).min()?;
        Some((shortest / LOOKS).max(Duration::from_millis(50)))
    }

    /// When peers are looked at next.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.between_looks().map(|_| self.next_look)
    }
}

impl Sal {
    /// Sets for how long a silent peer is waited for, whatever its services say; `None`: as they say.
    pub fn set_give_up_after(&mut self, limit: Option<GiveUpAfter>) {
        self.patience.of_host = limit;
    }

    /// Sets for how long clients of services here are to wait for this host; `None`: the services say nothing.
    pub fn set_own_terms(&mut self, served: Prefix, terms: Option<GiveUpAfter>) {
        match terms {
            Some(terms) => self.patience.own.insert(served, terms),
            None => self.patience.own.remove(&served),
        };
    }

    /// What the instance has said in its SYN-ACK, or that it says nothing.
    pub(crate) fn note_terms(&mut self, id: FlowId, terms: Option<TermsRepr>) {
        self.note_told(id, terms.map(|terms| GiveUpAfter::of_ms(terms.give_up_after_ms)));
    }

    pub(crate) fn note_told(&mut self, id: FlowId, told: Option<GiveUpAfter>) {
        if self.flows.get(id).is_some_and(|flow| flow.role == Role::Initiator) {
            self.patience.told.note_of(&self.flows, &self.associations, id, told);
        }
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
        self.locations.is_unheard(Scope::of(host))
    }

    /// Peers that no router lists and that have been silent for half of the time: whether packets of flows with them
    /// come decides now, of which the flow cache knows.
    pub fn doubted_peers(&self, now: Instant) -> Vec<HostId> {
        let is_doubted = |(host, absence): &(&HostId, &Absence)| {
            let shortest = self.patience.shortest(**host);
            shortest.is_some_and(|shortest| self.associations.silent_for(now, **host, absence) >= shortest / 2)
        };
        self.patience.absent.iter().filter(is_doubted).map(|(host, _)| *host).collect()
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
        let is_it = |flow: &&Flow| flow.role == Role::Initiator && flow.app.protocol == UDP && flow.asked() == *service;
        let flows: Vec<FlowId> =
            self.flows.served_by(&self.associations, host).filter(is_it).map(|flow| flow.id).collect();
        for id in &flows {
            self.remove_flow(*id, RemoveReason::GivenUp);
        }
        if !flows.is_empty() {
            self.note_given_up(host, flows.len(), GiveUpCause::Left);
        }
        flows.len()
    }

    /// The peers that open flows here lean on, and by which names: of programs here the services that they have asked
    /// for, of sessions through boxes the box before. Takes a walk over all flows.
    pub fn initiated(&self) -> BTreeMap<HostId, BTreeSet<ServiceId>> {
        let mut initiated: BTreeMap<HostId, BTreeSet<ServiceId>> = BTreeMap::new();
        for (flow, name) in self.flows.iter().filter_map(|flow| Some((flow, served_by(flow)?))) {
            if let Some(known) = self.associations.get(flow.association).filter(|known| !known.is_self()) {
                initiated.entry(known.host).or_default().insert(name);
            }
        }
        initiated
    }

    /// The open flows here that lean on a peer.
    pub fn flows_initiated_with(&self, host: HostId) -> Vec<FlowId> {
        self.flows.served_by(&self.associations, host).map(|flow| flow.id).collect()
    }

    /// Looks at the peers that no router lists.
    pub(crate) fn patience_due(&mut self, now: Instant) {
        let Some(pause) = self.patience.between_looks().filter(|_| now >= self.patience.next_look) else { return };
        self.patience.next_look = now + pause;
        for (host, absence) in self.patience.absent.clone() {
            let Some(shortest) = self.patience.shortest(host) else { continue };
            let silent = self.associations.silent_for(now, host, &absence);
            // It has been asked for half of the time at least.
            let is_asked = now.since(absence.since) >= shortest / 2 && self.locations.is_unheard(Scope::of(host));
            if silent >= shortest && is_asked {
                self.give_up(now, host, silent);
            } else if silent >= shortest / 2 {
                self.suspect(now, host, None);
            }
        }
    }

    /// Ends the flows with a silent peer whose time is over.
    fn give_up(&mut self, now: Instant, host: HostId, silent: Duration) {
        let limit = |flow: &Flow| self.patience.limit(host, &served_by(flow)?);
        let is_over = |flow: &&Flow| limit(flow).is_some_and(|limit| silent >= limit);
        let flows: Vec<FlowId> =
            self.flows.served_by(&self.associations, host).filter(is_over).map(|flow| flow.id).collect();
        if flows.is_empty() {
            return;
        }
        for id in &flows {
            self.fail_flow(now, *id, RemoveReason::GivenUp);
        }
        self.note_given_up(host, flows.len(), GiveUpCause::Silent(silent));
    }
}

impl Patience {
    /// TERMS of the SYN-ACK for a service here.
    pub(crate) fn own_terms(&self, service: &ServiceId) -> Option<Extension<'static>> {
        let serving = self.own.iter().filter(|(served, _)| served.contains(service));
        let (_, terms) = serving.max_by_key(|(served, _)| served.bits)?;
        Some(Extension::Terms(TermsRepr { give_up_after_ms: terms.ms() }))
    }

    /// What the service of a flow of a program here has said.
    pub(crate) fn told_of(&self, associations: &AssociationTable, flow: &Flow) -> Option<GiveUpAfter> {
        let host = associations.get(flow.association).filter(|_| flow.role == Role::Initiator)?.host;
        self.told.get(host, &flow.asked()).copied()
    }

    /// Forgets what hosts have said with which this one shares nothing any more.
    pub(crate) fn forget_terms(&mut self, associations: &AssociationTable) {
        self.told.forget_strangers(associations);
    }
}

impl AssociationTable {
    fn silent_for(&self, now: Instant, host: HostId, absence: &Absence) -> Duration {
        let heard = self.all_with(host).map(|association| association.heard).max();
        now.since(heard.unwrap_or(Instant::ZERO).max(absence.heard))
    }
}

impl FlowTable {
    fn served_by(&self, associations: &AssociationTable, host: HostId) -> impl Iterator<Item = &Flow> {
        let is_with = move |flow: &&Flow| {
            associations.get(flow.association).is_some_and(|known| known.host == host && !known.is_self())
        };
        self.iter().filter(|flow| served_by(flow).is_some()).filter(is_with)
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::types::fair_table::Peer;

    #[test]
    fn terms_have_bounds_and_a_word_for_never() {
        for (ms, limit) in [(0, Some(500)), (499, Some(500)), (3000, Some(3000)), (u32::MAX, None)] {
            assert_eq!(GiveUpAfter::of_ms(ms), GiveUpAfter(limit.map(Duration::from_millis)));
        }
        for (limit_ms, ms) in [(Some(500), 500), (Some(u64::MAX), u32::MAX - 1), (None, u32::MAX)] {
            assert_eq!(GiveUpAfter(limit_ms.map(Duration::from_millis)).ms(), ms);
        }
    }

    #[test]
    fn the_shortest_time_is_that_of_any_service_and_the_operator_has_the_last_word() {
        let (host, other) = (HostId([1; 16]), HostId([2; 16]));
        let (quick, slow, silent) = (ServiceId([1; 32]), ServiceId([2; 32]), ServiceId([3; 32]));
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        let mut patience = Patience::default();
        let note = |patience: &mut Patience, service, told| {
            patience.told.note(Peer::Member(host), (host, service), told);
        };
        note(&mut patience, quick, Some(GiveUpAfter(seconds(2))));
        note(&mut patience, slow, Some(GiveUpAfter(None)));
        assert_eq!(patience.shortest(host), seconds(2));
        assert_eq!([quick, slow, silent].map(|of| patience.limit(host, &of)), [seconds(2), None, seconds(30)]);
        assert_eq!((patience.shortest(other), patience.limit(other, &quick)), (seconds(30), seconds(30)));
        note(&mut patience, quick, None);
        assert_eq!((patience.shortest(host), patience.limit(host, &quick)), (seconds(30), seconds(30)));
        patience.of_host = Some(GiveUpAfter(seconds(9)));
        assert_eq!((patience.shortest(host), patience.limit(host, &slow)), (seconds(9), seconds(9)));
        patience.of_host = Some(GiveUpAfter(None));
        assert_eq!((patience.shortest(host), patience.limit(host, &quick)), (None, None));
    }
}
