//! The agent's log: to the journal under systemd, to standard error otherwise. Its level may change while it runs.

use std::sync::OnceLock;

use tracing::Level;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, fmt, reload};

use crate::config::LogSection;

/// Crates whose words people want.
const OWN: [&str; 4] = ["margay", "margay_control", "margay_core", "margay_datapath"];

static FILTER: OnceLock<reload::Handle<Targets, Registry>> = OnceLock::new();

fn filter(section: &LogSection) -> Targets {
    let level = section.level.tracing();
    OWN.into_iter().fold(Targets::new().with_default(Level::WARN), |filter, target| filter.with_target(target, level))
}

/// Begins it.
pub fn start(section: &LogSection) {
    let journal = std::env::var_os("JOURNAL_STREAM").and_then(|_| tracing_journald::layer().ok());
    let layer: Box<dyn Layer<Registry> + Send + Sync> = match journal {
        Some(journal) => Box::new(journal),
        None => Box::new(fmt::layer().with_writer(std::io::stderr).with_ansi(false)),
    };
    let (filter, handle) = reload::Layer::new(filter(section));
    // Fails only when a subscriber is set already: this is the only place that sets one.
    if tracing_subscriber::registry().with(layer.with_filter(filter)).try_init().is_ok() {
        let _ = FILTER.set(handle);
    }
}

/// Says more or less from now on.
pub fn set_level(section: &LogSection) {
    if let Some(handle) = FILTER.get()
        && let Err(error) = handle.reload(filter(section))
    {
        tracing::warn!(%error, "the level of the log stays as it was");
    }
}
