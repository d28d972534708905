use crate::agent::{orders, programs, rebalance, relocation};

/// Programs that speak to the agent, and their connections that change hosts.
///
/// `agent::programs` adds and removes programs as they come and go; a relocation or a rebalance has an entry here while
/// it lasts. Those who ask a program for its connections (drains, rebalances) go through `programs.takers`.
pub struct Connections {
    /// Programs that speak to the agent.
    pub programs: programs::Programs,
    /// Connections of theirs that go to another host, or come from one.
    pub relocations: relocation::Relocations,
    /// Orders to give connections to instances that have fewer than their share.
    pub rebalances: rebalance::Rebalances,
    /// Orders of an authority to change the boxes of sessions.
    pub orders: orders::Orders,
}
