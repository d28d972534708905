//! The flow caches of a host as one: the agent's own table, the kernel's cache, and the endings that wait to be judged
//! by what either has seen.

use margay_core::entry::{Entry, EntryUpdate, FlowCounters, RemoveReason};
use margay_core::{Direction, Stack};
use margay_wire::FlowId;
use parking_lot::RwLock;

use crate::direct::Direct;
use crate::ending::{Arrived, Endings};
use crate::kernel::Unjudged;
use crate::packet::FIN;
use crate::table::{Connection, Table, Wired};

/// What is told to all of them, and asked of them.
pub(crate) struct Caches<'a> {
    pub table: &'a RwLock<Table>,
    pub direct: &'a Direct,
    pub endings: &'a Endings,
}

impl Caches<'_> {
    /// Brings a change to the table and to the kernel's cache. What is lifted enters the table first, so that whatever
    /// still comes to user space is marked; what goes back leaves the kernel first (DESIGN §18).
    pub fn apply(&self, update: EntryUpdate) {
        match update {
            EntryUpdate::Path(path) => {
                self.table.write().apply(update);
                self.direct.set_path(&path);
            }
            EntryUpdate::RemovePath(id) => {
                self.direct.remove_path(id);
                self.table.write().apply(update);
            }
            EntryUpdate::Install(entry) => self.install(entry),
            EntryUpdate::Opened(entry) => {
                self.table.write().apply(update);
                if let Some(opened) = self.table.read().wire(entry.flow) {
                    self.direct.note_opened(entry.flow, &opened);
                }
            }
            // Not under the table's lock for writing, for which whoever sends waits.
            EntryUpdate::Begun { flow, next, expected } => self.table.read().note_begun(flow, next, expected),
            EntryUpdate::Grant(grant) => self.direct.grant(&grant),
            EntryUpdate::StopGrant(id) => self.direct.stop_grant(id),
            EntryUpdate::RemoveGrant(id) => {
                self.direct.remove_grant(id, |flow| self.table.read().key(flow).is_some());
            }
            EntryUpdate::Suspend(flow) => {
                // What the kernel's cache has seen and counted is the table's from here on.
                if let Some(removed) = self.direct.follow(flow, None) {
                    self.table.read().take_over(flow, &removed);
                }
                self.table.write().apply(update);
            }
            EntryUpdate::Remove { flow, reason } => {
                self.remove(flow, reason);
            }
            EntryUpdate::Succession { .. }
            | EntryUpdate::Show { .. }
            | EntryUpdate::Stripe { .. }
            | EntryUpdate::Count(_)
            | EntryUpdate::Loss { .. } => {
                self.table.write().apply(update);
            }
        }
    }

    /// Brings an entry to the table and the kernel's cache.
    fn install(&self, entry: Entry) {
        let is_direct = entry.wire.is_some_and(|wire| wire.sending || wire.accepting);
        // Of a flow that is sealed from here on, the last direct packet is before the last encapsulated one.
        let enters = is_direct && entry.stacks.sends == Stack::Plain;
        if enters {
            self.table.write().apply(EntryUpdate::Install(entry));
        }
        let removed = self.direct.follow(entry.flow, Wired::of(&entry));
        if !enters {
            self.table.write().apply(EntryUpdate::Install(entry));
        }
        if let Some(removed) = removed {
            self.table.read().take_over(entry.flow, &removed);
            // Its acknowledgement goes by user space.
            if removed.unjudged.is_ending() {
                if removed.end(Direction::Ingress).is_none() {
                    self.table.read().note_peer_end(entry.flow, removed.unjudged.end);
                }
                self.endings.wait(entry.flow, &removed.unjudged);
            }
        }
    }

    /// Takes a flow off the table and the kernel's cache. Gives what it has carried.
    pub fn remove(&self, flow: FlowId, reason: RemoveReason) -> FlowCounters {
        let counted = self.table.read().counters(flow).unwrap_or_default();
        let direct = self.direct.follow(flow, None);
        let heir = self.table.read().heir(flow);
        self.table.write().apply(EntryUpdate::Remove { flow, reason });
        if let Some(heir) = heir {
            self.endings.pass_on(flow, heir);
        }
        direct.map_or(counted, |direct| counted + direct.counters)
    }

    /// Whether each end of a connection has closed, and has acknowledged all of the other's.
    pub fn is_over(&self, flow: FlowId) -> bool {
        let state = self.direct.state(flow);
        self.table.read().is_over(flow, state.as_ref())
    }

    /// What is known of what a connection's application expects of its peer.
    pub fn known_of(&self, flow: FlowId) -> (Unjudged, Option<Connection>) {
        let by = self.table.read().heir(flow).unwrap_or(flow);
        let known = self.direct.state(by).map(|state| state.unjudged).unwrap_or_default();
        (known, self.table.read().connection(by))
    }

    /// The TCP flags FIN and RST of a segment of the peer's that its application's TCP has taken, by what is known of
    /// it. Of others is asked again, when the application acknowledges a FIN, and from time to time.
    pub fn take_ending(&self, flow: FlowId, arrived: &Arrived, (known, seen): (Unjudged, Option<Connection>)) -> u8 {
        let Some(ending) = arrived.ending(known) else { return 0 };
        let taken = ending.taken(seen.as_ref());
        self.table.read().note_peer_end(flow, ending.end);
        if taken == 0 {
            self.endings.wait(flow, &ending);
        }
        taken
    }

    /// Endings that applications' TCPs have taken since they came: flow, and which of FIN and RST.
    pub fn judge_endings(&self) -> Vec<(FlowId, u8)> {
        let taken = self.endings.judge(|flow, ending| {
            let (known, connection) = self.known_of(flow);
            let ending = Unjudged { reset: ending.reset, end: ending.end, ..known };
            connection.map(|connection| ending.taken(Some(&connection)))
        });
        taken.into_iter().map(|(flow, ending, flags)| (flow, self.note_taken(flow, &ending, flags))).collect()
    }

    /// An application's TCP has taken an ending of the peer's: FIN, RST or both.
    pub fn note_taken(&self, flow: FlowId, ending: &Unjudged, taken: u8) -> u8 {
        if taken & FIN != 0 {
            self.table.read().note_peer_end(flow, ending.end);
        }
        taken
    }
}
