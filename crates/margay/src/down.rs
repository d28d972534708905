//! `margay down`: stops the agent and restores this host.

use std::io::Write;

use clap::Args;
use miette::{IntoDiagnostic, Result};
use serde_json::json;

use crate::cli::Unwritable;
use crate::config::Config;
use crate::start::StartError;
use crate::{agent, host, start};

/// The words after `down`.
#[derive(Args, Debug)]
pub struct DownArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Does it. Undone is what the last `up` has done, also where the configuration names other directories by now.
pub async fn down(config: &Config, args: DownArgs, out: &mut dyn Write) -> Result<()> {
    let mut config = config.clone();
    if let Some(prepared) = host::Prepared::load() {
        prepared.direct(&mut config);
    }
    let Undone { was_running, remarks } = undo(&config).await?;
    let mut line = |text: &str| writeln!(out, "{text}").map_err(Unwritable::report);
    if args.json {
        return line(&json!({ "was_running": was_running, "remarks": remarks }).to_string());
    }
    for remark in &remarks {
        line(remark)?;
    }
    line(if was_running {
        "the agent is stopped, and the host is as it was"
    } else {
        "no agent ran; the host is as it was"
    })
}

/// What was undone.
pub struct Undone {
    /// An agent ran.
    was_running: bool,
    /// What somebody else has changed meanwhile.
    remarks: Vec<String>,
}

/// Stops the agent of a configuration and restores the host.
///
/// # Errors
///
/// The agent does not end, or the host cannot be restored.
pub async fn undo(config: &Config) -> Result<Undone> {
    let mut was_running = start::stop(config).await.into_diagnostic()?;
    // An agent that has just begun again, since its interface was gone, would make that anew.
    let lock = loop {
        match start::lock(config) {
            Err(StartError::Running { .. }) => was_running |= start::stop(config).await.into_diagnostic()?,
            other => break other,
        }
    };
    start::forget_router(config).into_diagnostic()?;
    agent::direct::remove_pins(&config.host.runtime_dir);
    agent::active::leave(&config.host.runtime_dir);
    let remarks = host::restore(config).await.into_diagnostic()?;
    drop(lock);
    Ok(Undone { was_running, remarks })
}
