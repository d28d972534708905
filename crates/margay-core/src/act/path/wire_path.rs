//! Path records as the flow cache keeps them: one per association, and which of them direct flows name.
//!
//! A direct packet says nothing but its addresses and ports, so its pair of addresses must lead to one record (DESIGN
//! §7): all associations with one peer at one place share the record of one of them, its owner.

use alloc::vec::Vec;

use margay_wire::FlowId;

use crate::association::location::LocationTable;
use crate::association::location::Scope;
use crate::association::{Association, AssociationTable};
use crate::cache::entry::{EntryUpdate, Path, PathId};
use crate::cache::queue::OutputQueue;
use crate::leg::carriage::Carriage;
use crate::machine::sal::Sal;
use crate::session::flow::Flow;
use crate::session::flow::FlowTable;
use crate::types::key::HostId;

impl Sal {
    /// The cache forgets the records of associations that are gone. Flows of others that named one name the record of
    /// another that did.
    pub(crate) fn drop_gone_paths(&mut self) {
        while let Some((gone, host)) = self.associations.pop_gone() {
            let named: Vec<u32> =
                self.associations.all_with(host).filter(|one| one.wire_path == gone).map(|one| one.local_id).collect();
            if let Some(&heir) = named.last() {
                for id in named {
                    if let Some(association) = self.associations.get_mut(id) {
                        association.wire_path = heir;
                    }
                }
                self.locations.announce_path(&self.associations, &mut self.queue, heir);
                self.flows
                    .follow_wire_path(&self.associations, &mut self.queue, heir, |flow, _| flow.direct.path == gone);
            }
            if self.associations.by_host(host).is_none() {
                // Nothing is left of the peer.
                self.locations.remove(Scope::of(host));
            }
            self.queue.update(EntryUpdate::RemovePath(PathId(gone)));
        }
    }
}

impl LocationTable {
    /// Tells the cache where an association's packets go now.
    pub(crate) fn announce_path(&self, associations: &AssociationTable, queue: &mut OutputQueue, local_id: u32) {
        let Some(association) = associations.get(local_id) else { return };
        let path = Path {
            id: PathId(local_id),
            remote: association.remote,
            local: association.local,
            datagram_max: association.datagram_max,
            passage: self.passage_of(association.host),
            wired: association.wire_path == 0 || association.wire_path == local_id,
            expected: self
                .get(Scope::of(association.host))
                .and_then(|location| location.expected)
                .map(|(from, _)| from),
            watched: self.is_watched(association.host),
            peer: association.peer(),
        };
        queue.update(EntryUpdate::Path(path));
    }

    /// Tells the cache of every path record of a host.
    pub(crate) fn announce_paths(&self, associations: &AssociationTable, queue: &mut OutputQueue, host: HostId) {
        let ids: Vec<u32> = associations.all_with(host).map(|association| association.local_id).collect();
        for id in ids {
            self.announce_path(associations, queue, id);
        }
    }
}

impl AssociationTable {
    /// The path record for the association's address pair: shared by all associations with the same peer there.
    pub(crate) fn wire_path(&mut self, association: u32) -> Option<u32> {
        let (remote, host, own) = {
            let association = self.get(association)?;
            (association.remote, association.host, association.wire_path)
        };
        if own != 0 && self.get(own).is_some_and(|owner| owner.remote == remote) {
            return Some(own);
        }
        let mut found = association;
        for other in self.at_address(remote) {
            if other.host != host {
                return None;
            }
            if other.wire_path != 0 && self.get(other.wire_path).is_some_and(|owner| owner.remote == remote) {
                found = other.wire_path;
            }
        }
        if let Some(association) = self.get_mut(association) {
            association.wire_path = found;
        }
        Some(found)
    }
}

impl FlowTable {
    /// Associations that were made at different places are at one now: their direct flows name one record, as the pair
    /// of addresses leads to one.
    pub(crate) fn join_wire_paths(
        &mut self,
        associations: &mut AssociationTable,
        queue: &mut OutputQueue,
        host: HostId,
        ids: &[u32],
    ) {
        let named = ids.iter().filter_map(|id| associations.get(*id)).map(|association| association.wire_path);
        let Some(owner) = named.into_iter().find(|path| ids.contains(path)) else { return };
        for id in ids {
            if let Some(association) = associations.get_mut(*id) {
                association.wire_path = owner;
            }
        }
        self.follow_wire_path(associations, queue, owner, |flow, associations| {
            let is_its = associations.get(flow.association).is_some_and(|association| association.host == host);
            is_its && flow.side.is_none() && flow.direct.path != owner
        });
    }

    /// The cache has kept the record `owner`, by which direct flows go: all associations where `association` is name
    /// it. False if no association there has it.
    pub(crate) fn take_up_wire_path(
        &mut self,
        associations: &mut AssociationTable,
        queue: &mut OutputQueue,
        association: u32,
        owner: u32,
    ) -> bool {
        let Some(association) = associations.get(association) else { return false };
        let (host, remote, named) = (association.host, association.remote, association.wire_path);
        let is_there = move |one: &Association| one.host == host && one.remote == remote;
        if !associations.get(owner).is_some_and(is_there) {
            return false;
        }
        if named != owner {
            let there = associations.all_with(host).filter(|one| is_there(one));
            for id in there.map(|one| one.local_id).collect::<Vec<_>>() {
                if let Some(association) = associations.get_mut(id) {
                    association.wire_path = owner;
                }
            }
            self.follow_wire_path(associations, queue, owner, |flow, associations| {
                let is_its = associations.get(flow.association).is_some_and(is_there);
                is_its && flow.side.is_none() && flow.direct.path != owner
            });
        }
        true
    }

    /// Makes wired flows name the record `owner`.
    fn follow_wire_path(
        &mut self,
        associations: &AssociationTable,
        queue: &mut OutputQueue,
        owner: u32,
        follows: impl Fn(&Flow, &AssociationTable) -> bool,
    ) {
        let is_wired = |flow: &Flow| flow.direct.carriage != Carriage::Never && flow.direct.path != 0;
        let follow = |flow: &&Flow| is_wired(flow) && follows(flow, associations);
        let ids: Vec<FlowId> = self.iter().filter(follow).map(|flow| flow.id).collect();
        for id in ids {
            if let Some(flow) = self.get_mut(id) {
                flow.direct.path = owner;
            }
            self.install_again(queue, id);
        }
    }
}
