//! How much waits in sessions that have two ways, in bytes: of all sessions of a peer together, and of all peers.

use margay_wire::{FlowId, SessionId};

use super::following::Following;
use super::leading::Leading;
use super::{Reconfigurations, Ways};
use crate::association::{Association, AssociationTable};
use crate::session::flow::FlowTable;
use crate::types::fair_table::{FairShares, Peer};
use crate::types::role::Role;

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

    /// Whether so many bytes more may wait in the session of a flow. They count for the peer by which the first ones
    /// came, until [`Self::settle_held`].
    pub(super) fn may_hold(
        &mut self,
        flows: &FlowTable,
        associations: &AssociationTable,
        id: FlowId,
        amount: usize,
    ) -> bool {
        let Some((session, role)) = flows.get(id).map(|flow| (flow.session, flow.role)) else { return false };
        let by = peer_of(flows, associations, id);
        self.ways_and_held(session, role).is_some_and(|(ways, held)| ways.may_hold(held, by, amount))
    }

    /// Some of what has waited in a session waits no longer.
    pub(super) fn settle_held(&mut self, session: SessionId, role: Role) {
        if let Some((ways, held)) = self.ways_and_held(session, role) {
            ways.settle(held);
        }
    }

    /// A change that this host leads is over.
    pub(super) fn take_leading(&mut self, session: SessionId) -> Option<Leading> {
        let leading = self.leading.remove(&session)?;
        self.give_back(&leading.ways);
        Some(leading)
    }

    /// A change that this host follows is over.
    pub(super) fn take_following(&mut self, session: SessionId) -> Option<Following> {
        let following = self.following.remove(&session)?;
        self.give_back(&following.ways);
        Some(following)
    }

    fn give_back(&mut self, ways: &Ways) {
        if let Some((peer, counted)) = ways.counted {
            self.held.give_back(peer, counted);
        }
    }
}

impl Ways {
    /// What waits here.
    fn bytes(&self) -> usize {
        self.held_bytes + self.gate.as_ref().map_or(0, |gate| gate.bytes())
    }

    fn may_hold(&mut self, held: &mut FairShares, by: Peer, amount: usize) -> bool {
        let (peer, counted) = self.counted.unwrap_or((by, 0));
        let has_room = held.take(peer, amount).is_ok();
        if has_room {
            self.counted = Some((peer, counted + amount));
        }
        has_room
    }

    /// Gives back what counts and does not wait.
    fn settle(&mut self, held: &mut FairShares) {
        let waiting = self.bytes();
        if let Some((peer, counted)) = &mut self.counted {
            let gone = counted.saturating_sub(waiting);
            *counted -= gone;
            held.give_back(*peer, gone);
        }
    }
}

fn peer_of(flows: &FlowTable, associations: &AssociationTable, id: FlowId) -> Peer {
    let association = flows.get(id).and_then(|flow| associations.get(flow.association));
    association.map_or(Peer::Own, Association::peer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::key::HostId;

    #[test]
    fn what_waits_counts_for_its_first_peer_until_it_waits_no_longer() {
        let mut held = no_bytes();
        let share = HELD_BYTES_ALL / 16;
        let [one, other] = [1, 2].map(|n| Peer::Member(HostId([n; 16])));
        let mut ways = [1, 2].map(|n| Ways::of(FlowId(n), 0));
        for way in &mut ways {
            assert!(way.may_hold(&mut held, one, share / 2));
            way.held_bytes = share / 2;
        }
        assert!(!ways[0].may_hold(&mut held, one, 1), "its sessions have its share");
        assert!(!ways[0].may_hold(&mut held, other, 1), "whoever it is heard by now");
        assert!(Ways::of(FlowId(3), 0).may_hold(&mut held, other, share), "another peer has its own");
        ways[0].held_bytes = 10;
        ways[0].settle(&mut held);
        assert!(ways[1].may_hold(&mut held, one, share / 2 - 10));
        for way in &mut ways {
            way.held_bytes = 0;
            way.settle(&mut held);
        }
        assert_eq!(held.used(), share, "that of the other peer");
    }
}
