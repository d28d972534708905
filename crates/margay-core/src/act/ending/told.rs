//! What hosts have said in their SYN-ACKs of the services that programs here have flows to.

use margay_wire::FlowId;

use crate::association::AssociationTable;
use crate::session::flow::FlowTable;
use crate::types::fair_table::{FairTable, Peer};
use crate::types::key::HostId;
use crate::types::name::ServiceId;

/// Services of which something is kept.
pub(super) const TOLD_MAX: usize = 4096;

/// One fact of each service. A host has no more than its share: what it says beyond that is as if it had not said it.
#[derive(Debug)]
pub(super) struct Told<V>(FairTable<(HostId, ServiceId), V>);

impl<V> Default for Told<V> {
    fn default() -> Self {
        Self(FairTable::elastic(TOLD_MAX, TOLD_MAX))
    }
}

impl<V> Told<V> {
    /// What the peer of a flow of a program here says of the flow's service; `None`: it says nothing any more.
    pub fn note_of(&mut self, flows: &FlowTable, associations: &AssociationTable, id: FlowId, said: Option<V>) {
        let Some(flow) = flows.get(id) else { return };
        if let Some(association) = associations.get(flow.association) {
            self.note(association.peer(), (association.host, flow.asked()), said);
        }
    }

    /// `peer`: whom it counts for.
    pub fn note(&mut self, peer: Peer, key: (HostId, ServiceId), said: Option<V>) {
        match said {
            // There is no room: it is not known, as of those that say nothing.
            Some(said) => drop(self.0.insert(peer, key, said)),
            None => drop(self.0.remove(&key)),
        }
    }

    /// What a host has said of a service.
    pub fn get(&self, host: HostId, service: &ServiceId) -> Option<&V> {
        self.0.get(&(host, *service))
    }

    /// All that a host has said.
    pub fn of_host(&self, host: HostId) -> impl Iterator<Item = &V> {
        let [first, last] = [0, u8::MAX].map(|byte| (host, ServiceId([byte; 32])));
        self.0.range(first..=last).map(|(_, said)| said)
    }

    /// Forgets what hosts have said with which this one shares nothing any more.
    pub fn forget_strangers(&mut self, associations: &AssociationTable) {
        self.0.retain(|(host, _), _| associations.by_host(*host).is_some());
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_says_much_leaves_room_for_others_and_may_say_the_same_anew() {
        let mut told = Told::default();
        let service = |number: u32| {
            let mut service = ServiceId([0; 32]);
            service.0[..4].copy_from_slice(&number.to_be_bytes());
            service
        };
        let [one, other] = [1, 2].map(|n| HostId([n; 16]));
        for number in 0..TOLD_MAX as u32 {
            told.note(Peer::Member(one), (one, service(number)), Some(number));
        }
        assert_eq!(told.len(), TOLD_MAX / 2);
        told.note(Peer::Member(other), (other, service(7)), Some(70));
        assert_eq!(told.get(other, &service(7)), Some(&70));
        told.note(Peer::Member(one), (one, service(7)), Some(71));
        assert_eq!(told.get(one, &service(7)), Some(&71), "a later word of what is known");
        assert_eq!(told.of_host(other).count(), 1);
        told.note(Peer::Member(one), (one, service(7)), None);
        assert_eq!((told.get(one, &service(7)), told.len()), (None, TOLD_MAX / 2));
    }
}
