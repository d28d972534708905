//! The agent: the core on its threads, and around it everything that decides. Started by `margay up` or by systemd.
//!
//! Reading order: [`parts`] (what an agent consists of), [`start`] (what comes up in which order, and goes down),
//! [`core`], [`service`], [`active`], [`programs`], [`watch`], [`api`].

mod absence;
pub mod active;
pub mod api;
pub mod authority;
pub mod chain;
pub mod check;
pub mod cluster;
pub mod core;
pub mod direct;
mod distant_orders;
pub mod dns;
pub mod drain;
pub mod ended;
mod ensembles;
pub mod failure;
mod fencing;
mod flow_programs;
pub mod flows;
pub mod health;
pub mod home;
pub mod host_changes;
pub mod instance_addresses;
pub mod joining;
pub mod keepsake;
pub mod listening;
pub mod lookup;
pub mod metrics;
pub mod naming;
mod network;
pub mod orders;
mod orphans;
pub mod parts;
pub mod programs;
pub mod quiet;
pub mod rebalance;
pub mod reload;
pub mod relocation;
pub mod remote;
pub mod resolvers;
pub mod rule_book;
pub mod search;
pub mod service;
pub mod service_router;
pub mod spread;
pub mod stack_rules;
pub mod start;
pub mod trace;
pub mod upkeep;
pub mod watch;
pub mod way;

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::config::Config;

pub use parts::{Connections, Host, Kernel, Names, Process, Publishing, Routing};
pub use reload::{Configuration, StartedWith};
pub use start::run;

/// Name of the virtual interface (DESIGN §4).
pub const INTERFACE: &str = "sal0";
/// Name of the interface behind which the DNS responder answers.
pub const RESPONDER_INTERFACE: &str = "sal-dns";
/// Interfaces that are Margay's own: what has a virtual address may come and leave by them.
pub const OWN_INTERFACES: [&str; 2] = [INTERFACE, RESPONDER_INTERFACE];

/// A running agent: its parts, each with an owner (`parts/`). Its API, metrics and upkeep see it so.
pub struct Agent {
    /// The core and the datapath.
    pub core: core::CoreHandle,
    /// The process: what it was told, how it ends, who looks on.
    pub process: Process,
    /// Who this host is, and what it keeps.
    pub host: Host,
    /// What the agent has in the kernel.
    pub kernel: Kernel,
    /// Programs that speak to the agent, and their connections that change hosts.
    pub connections: Connections,
    /// What this host publishes.
    pub publishing: Publishing,
    /// Where first packets go.
    pub routing: Routing,
    /// Names and virtual addresses.
    pub names: Names,
}

impl Agent {
    /// What holds of the configuration now.
    pub fn config(&self) -> Arc<Config> {
        self.process.configuration.now()
    }

    /// The authorities that this host belongs to: those of its routers, and those whose keys are here.
    pub fn authorities(&self) -> Vec<String> {
        let joined = self.publishing.services.homes().into_iter().map(|home| home.config().authority.clone());
        let own = self.host.keyring.authorities().unwrap_or_default().into_iter().map(|authority| authority.name);
        joined.chain(own).collect::<BTreeSet<String>>().into_iter().collect()
    }
}
