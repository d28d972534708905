//! How often peers were refused more than their share of what is bounded.

use crate::machine::sal::Sal;

/// The tables of the core that peers share, in the order of [`share_refusals`].
pub const SHARED_TABLES: [&str; 7] =
    ["chain_changes", "chain_bytes", "session_locks", "stack_changes", "hand_overs", "idle_ends", "box_addresses"];

/// Of each table, how often somebody was refused since this core began.
pub const fn share_refusals(sal: &Sal) -> [u64; SHARED_TABLES.len()] {
    [
        sal.reconfigurations.refused(),
        sal.reconfigurations.held_refused(),
        sal.locks.refused(),
        sal.stack_changes.refused(),
        sal.fetches.refused(),
        sal.quiet_ends.refused(),
        sal.chains.leases_refused(),
    ]
}
