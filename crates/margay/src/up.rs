//! `margay up`: prepares this host and starts the agent.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use margay_control::token::JoinToken;
use miette::{IntoDiagnostic, Report, Result, miette};
use serde_json::json;

use crate::agent;
use crate::config::Config;
use crate::host::change::{Change, State};
use crate::host::{self, Programs, netlink::Netlink};
use crate::start::{self, StartOptions};

/// The words after `up`.
#[derive(Args, Debug)]
pub struct UpArgs {
    /// Print what would be changed on this host, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Be a service router
    #[arg(long)]
    router: bool,
    /// Join the router that printed this token
    #[arg(long, value_name = "TOKEN")]
    join: Option<String>,
    /// Prepare the host, and leave the agent to systemd
    #[arg(long, conflicts_with_all = ["dry_run", "join"])]
    host_only: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Does it.
pub async fn up(config: &Config, config_path: Option<PathBuf>, args: UpArgs, out: &mut dyn Write) -> Result<()> {
    let join = args.join.as_deref().map(check_token).transpose()?;
    let plan = host::plan(config).await.into_diagnostic()?;
    if args.dry_run {
        let programs = host::programs(config, config.router.enabled || args.router || start::was_router(config));
        return show(plan.changes(), &programs, plan.remarks(), args.json, out).await;
    }
    let was_running = start::is_running(config).await.into_diagnostic()?;
    if was_running && (args.join.is_some() || args.router) {
        return Err(miette!(
            help = "`margay down` first, then `margay up` with the new options; connections of this host end",
            "an agent runs on this host already, and takes --join and --router only when it starts"
        ));
    }
    let was_prepared = host::is_prepared(config).into_diagnostic()?;
    let mut said = Vec::new();
    host::apply(config, &plan, |text| said.push(text.to_owned())).await.into_diagnostic()?;
    agent::direct::prepare(config);
    if !args.json {
        for text in said.iter().chain(plan.remarks()) {
            line(out, text)?;
        }
    }
    if args.host_only {
        return if args.json { line(out, &json!({ "changes": said }).to_string()) } else { Ok(()) };
    }
    let config_path = config_path.map(|path| path.canonicalize().unwrap_or(path));
    let options = StartOptions { config_path, router: args.router || start::was_router(config), join };
    match start::start(config, &options).await {
        Ok(started) if args.json => line(
            out,
            &json!({ "changes": said, "started_by": started.how, "was_running": started.was_running }).to_string(),
        ),
        Ok(started) if started.was_running => line(out, "the agent runs already"),
        Ok(started) => line(
            out,
            &format!(
                "the agent runs (started by {})",
                match started.how {
                    "systemd" => "systemd",
                    _ => "this command; `make install` lets systemd do it",
                }
            ),
        ),
        Err(error) => {
            let mut report = error.to_string();
            if !was_running && !was_prepared {
                // Nothing half-applied: a host that was not prepared before is not after a failed start.
                match host::restore(config).await {
                    Ok(_) => report.push_str("\nThe host is as it was before."),
                    Err(error) => report.push_str(&format!("\nThe host could not be restored: {error}")),
                }
            }
            Err(miette!(help = "`margay up` again when the cause is mended", "{report}"))
        }
    }
}

fn check_token(text: &str) -> Result<String> {
    let text = text.trim();
    text.parse::<JoinToken>().into_diagnostic()?;
    Ok(text.to_owned())
}

fn line(out: &mut dyn Write, text: &str) -> Result<()> {
    writeln!(out, "{text}").map_err(Report::from_err)
}

async fn show(
    changes: &[Change],
    programs: &[Programs],
    remarks: &[String],
    as_json: bool,
    out: &mut dyn Write,
) -> Result<()> {
    let net = Netlink::connect().into_diagnostic()?;
    let mut rows = Vec::new();
    for change in changes {
        let (mark, note) = match change.state(&net).await {
            Ok(State::Present) => ("present", String::new()),
            Ok(State::Absent) => ("would", String::new()),
            Ok(State::Differs(how)) => ("would", how),
            Err(refused) => ("unknown", refused.to_string()),
        };
        rows.push((change.to_string(), mark, note));
    }
    if as_json {
        let changes: Vec<_> =
            rows.iter().map(|(what, state, note)| json!({ "what": what, "state": state, "now": note })).collect();
        return line(out, &json!({ "changes": changes, "programs": programs, "remarks": remarks }).to_string());
    }
    for (what, mark, note) in rows {
        let note = if note.is_empty() { note } else { format!(" (now: {note})") };
        let mark = if mark == "present" { "is there   " } else { "would      " };
        line(out, &format!("{mark}{what}{note}"))?;
    }
    for Programs { at, purpose } in programs {
        line(out, &format!("the agent  puts eBPF programs on: {at} ({purpose})"))?;
    }
    for remark in remarks {
        line(out, &format!("note: {remark}"))?;
    }
    line(out, "nothing was changed; `margay down` undoes all of it")
}
