use std::sync::atomic::AtomicBool;
use std::time::Instant;

use tokio::sync::Notify;

use crate::agent::reload::Configuration;
use crate::agent::{metrics, watch};

/// The process itself: what it was told, since when it runs, how it ends, and who looks on.
///
/// `agent::reload` alone changes the configuration; watchers and metrics lock by themselves, each for one call. The
/// rest is as it was at the start.
pub struct Process {
    /// The configuration, and what the agent was started with.
    pub configuration: Configuration,
    /// When it started.
    pub started: Instant,
    /// Problems of the start that did not keep the agent from running, each with a remedy.
    pub warnings: Vec<String>,
    /// How it ends.
    pub parting: Parting,
    /// Readers of events: streams of the API, the log, programs.
    pub watchers: watch::Watchers,
    /// The server of metrics.
    pub metrics: metrics::Server,
}

impl Process {
    /// A process that starts now.
    pub fn new(configuration: Configuration, watchers: watch::Watchers, warnings: Vec<String>) -> Self {
        let metrics = metrics::Server::default();
        Self { configuration, started: Instant::now(), warnings, parting: Parting::default(), watchers, metrics }
    }
}

/// How an agent ends.
#[derive(Debug, Default)]
pub struct Parting {
    /// Somebody asked it to go down for good.
    pub for_good: Notify,
    /// Flows end with it; otherwise they wait for the next start.
    pub ends_flows: AtomicBool,
}
