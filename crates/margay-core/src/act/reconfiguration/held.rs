//! How much waits in sessions that have two ways, in bytes: of all sessions of a peer together, and of all peers.

use margay_wire::FlowId;

use super::{Reconfigurations, Ways};
use crate::association::{Association, AssociationTable};
use crate::session::flow::FlowTable;
use crate::types::fair_table::{FairShares, Peer};

/// All that waits at once. The sessions of one peer have a sixteenth of it, which is four times what one session may
/// have.
const HELD_BYTES_ALL: usize = 256 << 20;

/// None waits yet.
pub(super) const fn no_bytes() -> FairShares {
    FairShares::new(HELD_BYTES_ALL, HELD_BYTES_ALL)
}

impl Reconfigurations {
    /// How often a peer's change or order found no room.
    pub const fn refused(&self) -> u64 {
        let orders = self.orders.waiting.refused() + self.takings.orders.refused();
        self.leading.refused() + self.following.refused() + orders
    }

    /// How often what has overtaken something could not wait.
    pub const fn held_refused(&self) -> u64 {
        self.held.refused()
    }

    /// Whether so many bytes more may wait in the session of a flow. They are only ever added up, and counted again
    /// where there is no room: what has gone on meanwhile need not be told.
    pub(super) fn may_hold(
        &mut self,
        flows: &FlowTable,
        associations: &AssociationTable,
        id: FlowId,
        amount: usize,
    ) -> bool {
        let peer = peer_of(flows, associations, id);
        if self.held.take(peer, amount).is_ok() {
            return true;
        }
        let mut held = no_bytes();
        let leading = self.leading.values().map(|one| &one.ways);
        for ways in leading.chain(self.following.values().map(|one| &one.ways)) {
            held.add(peer_of(flows, associations, ways.old), ways.bytes());
        }
        self.held = held;
        self.held.take(peer, amount).is_ok()
    }
}

impl Ways {
    /// What waits here.
    fn bytes(&self) -> usize {
        self.held_bytes + self.gate.as_ref().map_or(0, |gate| gate.bytes())
    }
}

fn peer_of(flows: &FlowTable, associations: &AssociationTable, id: FlowId) -> Peer {
    let association = flows.get(id).and_then(|flow| associations.get(flow.association));
    association.map_or(Peer::Own, Association::peer)
}
