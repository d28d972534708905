//! No flow is let out before rules have had their say.

use std::collections::HashSet;

use margay_core::{Entry, Stack};
use margay_wire::FlowId;

use super::Host;

impl Host {
    /// Rules have their say of a new flow before its program can send: another thread may do so at once. `let_out`: new
    /// flows that could be sent plain since the core was asked first.
    pub(super) fn check_let_out(&self, let_out: &mut HashSet<FlowId>, entry: &Entry) {
        let is_plain = entry.stacks.sends == Stack::Plain && entry.directions.has_egress();
        if entry.is_held {
            assert!(!let_out.contains(&entry.flow), "flow {} was let out before it was held", entry.flow);
        } else if is_plain && !self.cache.knows(entry.flow) {
            let_out.insert(entry.flow);
        }
    }
}
