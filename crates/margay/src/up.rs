//! `margay up`: prepares this host and starts the agent, or makes a running one follow its configuration.

mod running;

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use margay_control::api::v1::JoinReply;
use margay_control::token::JoinToken;
use miette::{IntoDiagnostic, Report, Result, WrapErr, miette};
use serde_json::json;

use crate::agent;
use crate::cli::Unwritable;
use crate::config::Config;
use crate::host::change::{Change, State};
use crate::host::{self, Programs, netlink::Netlink};
use crate::start::{self, StartOptions};
use crate::{down, joining};

/// The words after `up`.
#[derive(Args, Debug)]
pub struct UpArgs {
    /// Print what would be changed on this host, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Be a service router
    #[arg(long)]
    router: bool,
    /// Join the router that printed this token; `-` reads it from standard input
    #[arg(long, value_name = "TOKEN")]
    join: Option<String>,
    /// As --join, with the token in a file
    #[arg(long, value_name = "FILE", conflicts_with = "join")]
    token_file: Option<PathBuf>,
    /// Where the configuration has changed and a change needs it: start the running agent again; connections stay
    #[arg(long)]
    restart: bool,
    /// Prepare the host, and leave the agent to systemd
    #[arg(long, conflicts_with_all = ["dry_run", "join", "token_file", "restart"])]
    host_only: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl UpArgs {
    /// Whether systemd calls, and not somebody who has just written the configuration.
    pub fn is_of_unit(&self) -> bool {
        self.host_only
    }
}

/// Does it.
pub async fn up(config: &Config, config_path: Option<PathBuf>, args: UpArgs, out: &mut dyn Write) -> Result<()> {
    let join = token(&args)?;
    let mut config = config.clone();
    // Started again by systemd, this host goes on with what its flows have.
    let has_kept = args.host_only && host::Prepared::load().is_some_and(|prepared| prepared.keep_ranges(&mut config));
    let config = &config;
    let mut plan = host::plan(config).await.into_diagnostic()?;
    if has_kept {
        plan.remark(format!(
            "the virtual addresses stay {}: others, as [ranges] in the configuration has them now, need `margay down` \
             and `margay up`",
            config.ranges()
        ));
    }
    let clashes = host::clashes(config.ranges()).await.into_diagnostic()?;
    if args.dry_run {
        let programs = host::programs(config, config.router.enabled || args.router || start::was_router(config));
        let clashes =
            clashes.iter().map(|clash| format!("`margay up` refuses: in the way of the virtual addresses is {clash}"));
        let remarks: Vec<String> = clashes.chain(plan.remarks().iter().cloned()).collect();
        return show(plan.changes(), &programs, &remarks, args.json, out).await;
    }
    let config_path = config_path.map(|path| path.canonicalize().unwrap_or(path));
    let options = StartOptions { config_path, router: args.router || start::was_router(config) };
    if !args.host_only && start::is_running(config).await.into_diagnostic()? {
        return running::up(config, &options, &plan, join, &args, out).await;
    }
    let was_prepared = host::is_prepared(config).into_diagnostic()?;
    if !was_prepared && let [clash, ..] = &clashes[..] {
        let (clash, ranges) = (clash.clone(), config.ranges());
        return Err(host::HostError::Clash { clash, ranges }).into_diagnostic();
    }
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
    let started = match start::start(config, &options).await {
        Ok(started) => started,
        Err(error) => return Err(undone(config, error.parts(), was_prepared).await),
    };
    let joined = match join {
        None => None,
        Some(token) => match joining::join(config, &token, args.json).await {
            Ok(joined) => Some(joined),
            Err(error) => return Err(undone(config, (error.to_string(), String::new()), was_prepared).await),
        },
    };
    if args.json {
        let was_running = started.was_running;
        let report =
            json!({ "changes": said, "started_by": started.how, "was_running": was_running, "joined": joined });
        return line(out, &report.to_string());
    }
    line(
        out,
        match started.how {
            "systemd" => "the agent runs (started by systemd)",
            _ => "the agent runs (started by this command; `make install` lets systemd do it)",
        },
    )?;
    joined.map_or(Ok(()), |joined| line(out, &welcome(&joined)))
}

/// What has become of a join.
fn welcome(joined: &JoinReply) -> String {
    let JoinReply { authority, router_address, was_member } = joined;
    if *was_member {
        return format!(
            "this host is a member of {authority} already, by the router at {router_address}; the token is not used"
        );
    }
    format!("this host is a member of {authority}, by the router at {router_address}")
}

/// An error after the host was changed. Nothing is half-applied: there is no agent then, and a host that was not
/// prepared before is not prepared.
/// What is wrong comes first, and what the agent said before it ended comes last.
async fn undone(config: &Config, (mut report, last_lines): (String, String), was_prepared: bool) -> Report {
    let undone = if was_prepared {
        start::stop(config).await.map(drop).into_diagnostic()
    } else {
        down::undo(config).await.map(drop)
    };
    match undone {
        Ok(()) if was_prepared => report.push_str("\nNo agent runs, as before."),
        Ok(()) => report.push_str("\nThe host is as it was before."),
        Err(error) => report.push_str(&format!("\nThe host could not be restored: {error}")),
    }
    miette!(help = "`margay up` again when the cause is mended", "{report}{last_lines}")
}

/// The join token that the command line gives, wherever it stands.
fn token(args: &UpArgs) -> Result<Option<String>> {
    let text = match (args.join.as_deref(), &args.token_file) {
        (Some("-"), _) => io::read_to_string(io::stdin()).into_diagnostic().wrap_err("cannot read the join token")?,
        (Some(token), _) => token.to_owned(),
        (None, Some(path)) => std::fs::read_to_string(path)
            .into_diagnostic()
            .wrap_err_with(|| format!("cannot read the join token from {}", path.display()))?,
        (None, None) => return Ok(None),
    };
    check_token(&text).map(Some)
}

fn check_token(text: &str) -> Result<String> {
    let text = text.trim();
    text.parse::<JoinToken>().into_diagnostic()?;
    Ok(text.to_owned())
}

fn line(out: &mut dyn Write, text: &str) -> Result<()> {
    writeln!(out, "{text}").map_err(Unwritable::report)
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
            _ if change.is_agents() => ("agent", String::new()),
            Ok(State::Absent) => ("would", String::new()),
            Ok(State::Differs(how)) => ("would", how),
            Err(refused) => ("unknown", refused.to_string()),
        };
        rows.push((change, mark, note));
    }
    if as_json {
        let row = |(change, state, note): &(&Change, &str, String)| {
            let what = change.to_string();
            json!({ "what": what, "change": change, "state": state, "now": note })
        };
        let changes: Vec<_> = rows.iter().map(row).collect();
        return line(out, &json!({ "changes": changes, "programs": programs, "remarks": remarks }).to_string());
    }
    for (change, mark, note) in rows {
        let note = if note.is_empty() { note } else { format!(" (now: {note})") };
        let mark = match mark {
            "present" => "is there   ",
            "agent" => "the agent does: ",
            _ => "would      ",
        };
        line(out, &format!("{mark}{change}{note}"))?;
    }
    for Programs { at, purpose } in programs {
        line(out, &format!("the agent  puts eBPF programs on: {at} ({purpose})"))?;
    }
    for remark in remarks {
        line(out, &format!("note: {remark}"))?;
    }
    line(out, "nothing was changed; `margay down` undoes all of it")
}
