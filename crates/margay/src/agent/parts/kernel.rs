use crate::agent::{direct, network, service_router, spread, way};

/// What the agent has in the kernel beside the core's sockets: programs, maps, addresses and routes.
///
/// `agent::host_changes` and `agent::upkeep` look at the host again and put back what somebody has undone; each field
/// locks by itself. No lock of this part is held while the core is asked.
pub struct Kernel {
    /// Interfaces, addresses and routes as they were looked at last, and what `up` has changed of them.
    pub network: network::Network,
    /// The kernel's flow cache.
    pub direct: direct::DirectPath,
    /// By which way direct packets come to programs.
    pub way: way::Way,
    /// The service router in the kernel.
    pub router: service_router::KernelRouter,
    /// Unconnected datagrams, each to an instance of its own.
    pub spreads: spread::Spreads,
}
