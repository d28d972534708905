//! The agent: the core on its threads, and around it everything that decides. Started by `margay up` or by systemd.
//!
//! Reading order: [`start`] (what comes up in which order, and goes down), [`core`], [`service`], [`active`],
//! [`programs`], [`watch`], [`api`].

mod absence;
pub mod active;
pub mod api;
pub mod authority;
pub mod chain;
pub mod check;
pub mod cluster;
pub mod core;
pub mod direct;
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
mod orphans;
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
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use margay_control::Clock;
use margay_control::cluster::Cluster;
use margay_control::identity::Identity;
use margay_control::keyring::Keyring;
use margay_control::lease::Leases;
use margay_control::registration::{Local, Router, Ways};
use margay_control::store::Store;
use margay_control::wide_area::WideArea;
use tokio::sync::Notify;

use crate::config::Config;

pub use reload::{Configuration, StartedWith};
pub use start::run;

/// Name of the virtual interface (DESIGN §4).
pub const INTERFACE: &str = "sal0";
/// Name of the interface behind which the DNS responder answers.
pub const RESPONDER_INTERFACE: &str = "sal-dns";
/// Interfaces that are Margay's own: what has a virtual address may come and leave by them.
pub const OWN_INTERFACES: [&str; 2] = [INTERFACE, RESPONDER_INTERFACE];

/// A running agent, as its API, metrics and upkeep see it.
pub struct Agent {
    /// What it was told.
    pub configuration: Configuration,
    /// Who it is.
    pub identity: Identity,
    /// The same, for the registration.
    pub local: Local,
    /// The core and the datapath.
    pub core: core::CoreHandle,
    /// Interfaces, addresses and routes as they were looked at last, and what `up` has changed of them.
    pub network: network::Network,
    /// The kernel's flow cache.
    pub direct: direct::DirectPath,
    /// By which way direct packets come to programs.
    pub way: way::Way,
    /// The service router in the kernel.
    pub kernel_router: service_router::KernelRouter,
    /// What listens here, and which names that serves.
    pub active: active::Active,
    /// Unconnected datagrams, each to an instance of its own.
    pub spreads: spread::Spreads,
    /// Programs that speak to the agent.
    pub programs: programs::Programs,
    /// Connections of theirs that go to another host, or come from one.
    pub relocations: relocation::Relocations,
    /// Which of them go to instances that have fewer than their share.
    pub rebalances: rebalance::Rebalances,
    /// What hosts and prefixes are called.
    pub naming: naming::Naming,
    /// Where metrics are served.
    pub metrics: metrics::Server,
    /// Who wants to know what happens.
    pub watchers: watch::Watchers,
    /// How it finds routers that it does not reach.
    pub searches: search::Searches,
    /// How it is found as a router.
    pub answering: search::Answering,
    /// What this host publishes.
    pub services: Arc<service::Services>,
    /// Switches of ensembles.
    pub ensembles: ensembles::Ensembles,
    /// What of it is drained.
    pub drains: drain::Drains,
    /// Whether what it publishes is well.
    pub health: health::Health,
    /// The operator's own rules.
    pub rules: rule_book::RuleBook,
    /// The router on this host.
    pub router: Option<Arc<Router>>,
    /// Its part in a cluster.
    pub cluster: Option<Arc<Cluster>>,
    /// Which of this host's routers first packets go to.
    pub ways: Arc<Ways>,
    /// What it tells routers of other sites, and is told by them.
    pub area: Option<Arc<WideArea>>,
    /// Plain addresses of names that nobody serves.
    pub fallbacks: Arc<home::Fallbacks>,
    /// Virtual addresses.
    pub leases: Arc<Leases>,
    /// The DNS responder's process.
    pub dns: Option<dns::Dns>,
    /// Keys of authorities and services.
    pub keyring: Keyring,
    /// The store.
    pub store: Arc<Store>,
    /// The wall clock.
    pub clock: Clock,
    /// When it started.
    pub started: Instant,
    /// How it ends.
    pub parting: Parting,
    /// What could not be set up, and what to do.
    pub warnings: Vec<String>,
}

/// How an agent ends.
#[derive(Debug, Default)]
pub struct Parting {
    /// Somebody asked it to go down for good.
    pub for_good: Notify,
    /// Flows end with it; otherwise they wait for the next start.
    pub ends_flows: AtomicBool,
}

impl Agent {
    /// What holds of the configuration now.
    pub fn config(&self) -> Arc<Config> {
        self.configuration.now()
    }

    /// The authorities that this host belongs to: those of its routers, and those whose keys are here.
    pub fn authorities(&self) -> Vec<String> {
        let joined = self.services.homes().into_iter().map(|home| home.config().authority.clone());
        let own = self.keyring.authorities().unwrap_or_default().into_iter().map(|authority| authority.name);
        joined.chain(own).collect::<BTreeSet<String>>().into_iter().collect()
    }
}
