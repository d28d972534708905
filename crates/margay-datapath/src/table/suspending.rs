//! Flows of which nothing is carried for now: their connections are on their way to another host, and may come to stay.
//!
//! No packet finds such a flow, as if it had no entry. Its slot waits aside with whatever belongs to the flow: packet
//! numbers, counters, what its connection has shown. The keys' own numbers are in [`Table::seals`], which only the end
//! of the flow empties: a counter that began again under the same keys would encrypt two packets alike.

use margay_wire::FlowId;

use super::{Applied, Table};

impl Table {
    /// Takes a flow off the packet path.
    pub(super) fn suspend(&mut self, flow: FlowId) -> Applied {
        let Some(index) = self.find_index(flow) else { return Applied::Stale };
        let slot = self.remove_at(index);
        self.suspended.insert(flow, slot);
        Applied::Done
    }
}
