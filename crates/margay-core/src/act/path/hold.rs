//! After a move: the direct path is held until it has shown that it goes by the new addresses, for all flows at once
//! (docs/decisions/0018).
//!
//! The record of the path is held, the flows' entries stay as they are. A bare packet of one flow goes directly, and
//! whoever sees such a packet come by says so. What is proved for one flow is a hint for the others, as ever: one that
//! stalls goes back by itself.

use alloc::vec::Vec;
use core::time::Duration;

use margay_wire::{Extension, FlowId, Kind, MoveFlags, MoveRepr};

use crate::act::moving::wait_for;
use crate::association::AssociationTable;
use crate::association::draft::Draft;
use crate::association::location::LocationTable;
use crate::association::location::{Hold, Location, Moving, Pair, Scope};
use crate::cache::entry::{Passage, PathId};
use crate::cache::queue::OutputQueue;
use crate::leg::carriage::{DirectEvent, Why};
use crate::machine::sal::Sal;
use crate::session::flow::Flow;
use crate::types::key::HostId;
use crate::types::role::Lifecycle;
use crate::types::time::Instant;

/// Longest wait between two tries.
const PROVE_MAX: Duration = Duration::from_secs(8);

impl Sal {
    /// Holds the direct path with a peer, if any flow uses it. Where a translator is on the way, every flow needs its
    /// own way in, and what is proved for one says nothing of others: each goes back, and is proved by itself.
    pub(crate) fn hold_direct(&mut self, now: Instant, host: HostId) {
        if self.locations.is_translated_between(&self.associations, &self.config, host) {
            let direct =
                self.flows.iter().filter(|flow| flow.side.is_none() && self.associations.is_direct_with(flow, host));
            for id in direct.map(|flow| flow.id).collect::<Vec<_>>() {
                self.direct_event(now, id, DirectEvent::Stalled, Why::Held);
            }
        }
        let is_used = self.flows.iter().any(|flow| self.associations.is_direct_with(flow, host));
        self.locations.with(Scope::of(host), |location| {
            location.hold = is_used.then_some(Hold { tries: 0, next: now });
            // Its flows may be direct where this end's are not yet.
            location.begin_watch();
        });
    }

    /// The first try, after the cache knows the new addresses.
    pub(crate) fn prove_direct_now(&mut self, now: Instant, host: HostId) {
        if self.locations.get(Scope::of(host)).is_some_and(|location| location.hold.is_some()) {
            self.prove_direct(now, host);
        }
    }

    /// Sends a bare packet of one flow directly.
    pub(crate) fn prove_direct(&mut self, now: Instant, host: HostId) {
        let alive = |flow: &&Flow| flow.lifecycle == Lifecycle::Established;
        let direct = self.flows.iter().filter(|flow| self.associations.is_direct_with(flow, host)).filter(alive);
        // The one that was busy last: its numbers are known, and holes on the way are open for it.
        let found = direct.max_by_key(|flow| flow.active).map(|flow| flow.id);
        let rtt = self.associations.by_host(host).and_then(|association| association.rtt);
        self.locations.with(Scope::of(host), |location| match (&mut location.hold, found) {
            (Some(hold), Some(_)) => {
                hold.next = now + (wait_for(rtt, 0).saturating_mul(1 << hold.tries.min(16))).min(PROVE_MAX);
                hold.tries += 1;
            }
            (hold, _) => *hold = None,
        });
        match found {
            Some(flow) => self.queue.pinhole(flow),
            None => self.locations.announce_paths(&self.associations, &mut self.queue, host),
        }
    }

    /// A direct packet came by a path that is watched: the peer is told that its packets pass.
    pub(crate) fn handle_path_direct(&mut self, path: PathId) {
        if let Some(host) = self.associations.get(path.0).map(|association| association.host) {
            let watch = self.locations.get(Scope::of(host)).map_or(0, |location| location.watch);
            self.say_of_direct(host, MoveFlags::DIRECT, watch);
        }
    }

    fn say_of_direct(&mut self, host: HostId, flags: MoveFlags, number: u32) {
        let Some(pair) = self.associations.pair_of(host) else { return };
        let extensions = [Extension::Move(MoveRepr { number, token: 0, challenge: 0, address: pair.remote, flags })];
        let mut draft = Draft::new(Kind::Probe, FlowId(0), FlowId(0));
        draft.extensions = &extensions;
        self.send_over(host, pair, draft);
    }

    /// What a peer says of direct packets. It comes late, or twice, where the network is like that: what it says of a
    /// pair that has been left since, or of an earlier watch, is no word about the pair in use.
    pub(crate) fn hear_of_direct(&mut self, now: Instant, host: HostId, pair: Pair, said: &MoveRepr) {
        if said.flags.contains(MoveFlags::OPENED) {
            return self.locations.end_watch(&self.associations, &mut self.queue, host, said.number);
        }
        let is_there = |known: Pair| {
            let is_here = known.local.is_none() || pair.local.is_none() || known.local == pair.local;
            known.remote == pair.remote && is_here
        };
        if self.associations.pair_of(host).is_some_and(is_there) {
            self.open_direct(now, host, said.number);
        }
    }

    /// The peer has seen a direct packet of this host; it hears that this host has heard of it.
    fn open_direct(&mut self, now: Instant, host: HostId, watch: u32) {
        self.say_of_direct(host, MoveFlags::OPENED, watch);
        let was_held = self.locations.with(Scope::of(host), |location| location.hold.take().is_some());
        if !was_held {
            return;
        }
        let ids: Vec<u32> = self.associations.all_with(host).map(|association| association.local_id).collect();
        for id in ids {
            if let Some(association) = self.associations.get_mut(id) {
                association.direct_proved = Some(now);
            }
        }
        // What was encapsulated meanwhile, and went unanswered, goes another way now.
        self.locations.note_data_passes(host);
        self.locations.announce_paths(&self.associations, &mut self.queue, host);
    }
}

impl LocationTable {
    /// What may pass between this host and a peer now.
    pub(crate) fn passage_of(&self, host: HostId) -> Passage {
        let Some(location) = self.get(Scope::of(host)) else { return Passage::Open };
        let is_lost =
            location.state == Moving::Asking && location.ask.as_ref().is_some_and(|ask| ask.broken && !ask.unheard);
        match &location.hold {
            _ if is_lost => Passage::Void,
            Some(_) => Passage::Held,
            None => Passage::Open,
        }
    }

    /// The same for what a flow sends and gets: one that has a pair of its own does not move with the others.
    pub(crate) fn passage_of_flow(&self, associations: &AssociationTable, flow: &Flow) -> Passage {
        match associations.get(flow.association) {
            _ if flow.side.is_some() => Passage::Open,
            Some(association) => self.passage_of(association.host),
            None => Passage::Void,
        }
    }

    /// Whether the peer is to hear of direct packets.
    pub(crate) fn is_watched(&self, host: HostId) -> bool {
        self.get(Scope::of(host)).is_some_and(|location| location.watches)
    }

    /// The pair is what it was for this host. The peer may see another, such as one that has started again and does not
    /// know yet what it sends from: its direct path is held then, and it waits to hear that its packets come.
    pub(crate) fn watch_direct(&mut self, associations: &AssociationTable, queue: &mut OutputQueue, host: HostId) {
        self.with(Scope::of(host), Location::begin_watch);
        self.announce_paths(associations, queue, host);
    }

    /// The peer needs to hear no more of direct packets, since it has heard of this watch.
    fn end_watch(&mut self, associations: &AssociationTable, queue: &mut OutputQueue, host: HostId, watch: u32) {
        let is_over =
            self.with(Scope::of(host), |location| location.watch == watch && core::mem::take(&mut location.watches));
        if is_over {
            self.announce_paths(associations, queue, host);
        }
    }
}

impl AssociationTable {
    /// Whether a flow is one that goes direct with `host`, when nothing holds it.
    fn is_direct_with(&self, flow: &Flow, host: HostId) -> bool {
        let is_its = self.get(flow.association).is_some_and(|association| association.host == host);
        is_its && flow.direct.carriage.sends() && flow.carries_data()
    }
}
