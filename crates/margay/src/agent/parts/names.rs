use std::sync::Arc;

use margay_control::lease::Leases;

use crate::agent::{dns, home, naming};

/// What names programs and operators use, and the virtual addresses that stand for them.
///
/// Leases change as programs ask for names (the DNS responder, `agent::programs`) and as `agent::upkeep` lets unused
/// ones go; they tell the core and the store themselves.
pub struct Names {
    /// What hosts and prefixes are called.
    pub naming: naming::Naming,
    /// Virtual addresses.
    pub leases: Arc<Leases>,
    /// The DNS responder's process; none where it is not configured or could not start.
    pub dns: Option<dns::Dns>,
    /// Plain addresses of names that nobody serves.
    pub fallbacks: Arc<home::Fallbacks>,
}
