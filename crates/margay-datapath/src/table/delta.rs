//! Flows whose numbers differ on the wire from those of the application's TCP.

use margay_core::delta::Translations;
use margay_core::entry::Entry;
use margay_wire::FlowId;

use super::{Recipient, Slot, Table};

impl Table {
    /// Whom packets of a flow's peer are given to.
    pub fn recipient(&self, flow: FlowId) -> Option<Recipient> {
        self.find(flow).map(|slot| self.recipient_of(slot))
    }

    pub(super) fn recipient_of(&self, slot: &Slot) -> Recipient {
        let delta = self.delta(slot.flow).map(|delta| delta.ingress);
        Recipient { key: slot.key.reversed(), delta }
    }

    /// Few flows have one, so slots do not say it.
    pub(super) fn delta(&self, flow: FlowId) -> Option<&Translations> {
        if self.deltas.is_empty() { None } else { self.deltas.get(&flow) }
    }

    pub(super) fn follow_delta(&mut self, entry: &Entry) {
        match entry.delta.and_then(|delta| delta.translations()) {
            Some(delta) => self.deltas.insert(entry.flow, delta),
            None => self.deltas.remove(&entry.flow),
        };
    }
}
