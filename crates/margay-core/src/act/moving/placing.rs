//! Packets go by another pair of addresses: what follows for all flows with a peer, or for one.

use alloc::vec::Vec;
use core::time::Duration;

use margay_wire::FlowId;

use crate::association::AssociationTable;
use crate::association::location::{Cause, Moved, Pair, Scope};
use crate::cache::queue::OutputQueue;
use crate::machine::sal::Sal;
use crate::session::event::Event;
use crate::session::flow::Flow;
use crate::session::flow::FlowTable;
use crate::types::key::HostId;
use crate::types::role::Lifecycle;
use crate::types::time::Instant;

/// Connections that were busy within this time are restarted after a break, and at most so many.
const BUSY: Duration = Duration::from_secs(60);
const RESTARTS_MAX: usize = 1024;
const TCP: u8 = 6;

impl Sal {
    /// From now on packets go by this pair.
    pub(crate) fn place(&mut self, now: Instant, scope: Scope, pair: Pair, broken: bool, cause: Cause) {
        // A host that was started again asks for the pair that it had: that is no move.
        let has_moved = self.pair_in_use(scope) != Some(pair);
        if has_moved {
            self.guard_moved(now, scope, pair);
        }
        if scope.is_host() {
            self.place_host(now, scope.host, pair, broken, cause);
        } else {
            self.place_flow(now, scope, pair, broken, cause);
        }
        self.locations.with(scope, |location| {
            location.looked = Some(now);
            location.deaf = false;
        });
        if !has_moved {
            return;
        }
        self.seal_moved(now, scope);
        self.counters.moves += 1;
        self.locations.with(scope, |location| {
            location.moved = Some(Moved { at: now, cause });
            location.moves += 1;
        });
        self.events.push(Event::Moved { host: scope.host, flow: scope.flow, pair, cause });
    }

    fn place_host(&mut self, now: Instant, host: HostId, pair: Pair, broken: bool, cause: Cause) {
        let former = self.associations.pair_of(host);
        let is_same = former == Some(pair);
        let ids: Vec<u32> = self.associations.all_with(host).map(|association| association.local_id).collect();
        for id in &ids {
            self.associations.set_remote(*id, pair.remote);
            if let Some(association) = self.associations.get_mut(*id) {
                association.local = pair.local;
                association.chosen = matches!(cause, Cause::Operator | Cause::Silence | Cause::Unanswered);
                association.is_kept = false;
                if !is_same {
                    association.direct_proved = None;
                }
            }
        }
        if is_same {
            self.locations.watch_direct(&self.associations, &mut self.queue, host);
        } else {
            self.flows.join_wire_paths(&mut self.associations, &mut self.queue, host, &ids);
            self.hold_direct(now, host);
            self.locations.announce_paths(&self.associations, &mut self.queue, host);
        }
        if broken {
            self.flows.restart_connections(&self.associations, &mut self.queue, now, host);
        }
        self.prove_direct_now(now, host);
        if let Some(former) = former.filter(|_| !is_same && !broken) {
            self.return_pinned(now, host, former);
        }
    }
}

impl FlowTable {
    /// After a break: what was in flight is sent again. Connections that were silent for long had nothing in flight.
    pub(crate) fn restart_connections(
        &self,
        associations: &AssociationTable,
        queue: &mut OutputQueue,
        now: Instant,
        host: HostId,
    ) {
        let is_busy = |flow: &&Flow| {
            let is_its = associations.get(flow.association).is_some_and(|association| association.host == host);
            let is_open = matches!(flow.lifecycle, Lifecycle::Established | Lifecycle::HalfClosed);
            is_its
                && is_open
                && flow.side.is_none()
                && flow.stripe.is_none()
                && flow.app.protocol == TCP
                && now.since(flow.active) < BUSY
        };
        let busy: Vec<FlowId> = self.iter().filter(is_busy).map(|flow| flow.id).take(RESTARTS_MAX).collect();
        for flow in busy {
            queue.restart(flow);
        }
    }
}
