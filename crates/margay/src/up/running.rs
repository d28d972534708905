//! `margay up` while an agent runs: it follows its configuration, and the host is put right.

use std::io::Write;

use margay_control::api;
use margay_control::api::v1::{JoinReply, ReloadReply, ReloadRequest};
use miette::{IntoDiagnostic, Result};
use serde_json::json;

use super::{UpArgs, line, welcome};
use crate::agent;
use crate::cli::reload;
use crate::config::Config;
use crate::host::{self, Plan, Prepared};
use crate::joining;
use crate::start::{self, StartOptions};

/// What was done.
#[derive(Default)]
struct Done {
    changes: Vec<String>,
    joined: Option<JoinReply>,
    told: ReloadReply,
}

/// Does it.
pub async fn up(
    config: &Config,
    options: &StartOptions,
    plan: &Plan,
    token: Option<String>,
    args: &UpArgs,
    out: &mut dyn Write,
) -> Result<()> {
    let joined = match token {
        Some(token) => Some(joining::join(config, &token, args.json).await?),
        None => None,
    };
    let mut client = api::connect(&config.socket()).await.into_diagnostic()?;
    let request = ReloadRequest { router: options.router, ..reload::request(options.config_path.as_deref())? };
    let mut told = reload::ask(&mut client, request.clone()).await?;
    let is_new_router = args.router && told.need_restart.iter().any(|key| key == ROUTER);
    let restarts = (args.restart || is_new_router) && !told.need_restart.is_empty();
    let changes = put_right(config, plan, &told, restarts).await?;
    if options.config_path.is_some() || options.router {
        start::keep(config, options).await.into_diagnostic()?;
    }
    if restarts {
        let (epoch, said) = (start::epoch_of(config).await.unwrap_or_default(), start::said(config));
        let live = std::mem::take(&mut told.changed);
        told = reload::ask(&mut client, ReloadRequest { restart: true, ..request }).await?;
        told.changed.extend(live);
        start::await_restart(config, epoch, said).await.into_diagnostic()?;
    }
    say(&Done { changes, joined, told }, plan, args.json, out)
}

/// The key that `--router` stands for.
const ROUTER: &str = "[router] enabled";
/// Keys that decide what `up` changes on the host.
const OF_THE_HOST: [&str; 3] = ["direct", "secure", "[host] boxes"];

/// Makes what somebody has undone again; and what the configuration wants anew, unless the agent goes by what it wanted
/// before.
async fn put_right(config: &Config, plan: &Plan, told: &ReloadReply, restarts: bool) -> Result<Vec<String>> {
    let mut said = Vec::new();
    let waits = |key: &String| OF_THE_HOST.contains(&key.as_str()) && !restarts;
    if told.need_down.is_empty() && !told.need_restart.iter().any(waits) {
        host::apply(config, plan, |text| said.push(text.to_owned())).await.into_diagnostic()?;
    } else {
        let mut config = config.clone();
        Prepared::load().unwrap_or_else(|| Prepared::of(&config)).direct(&mut config);
        agent::host_changes::restore_all(&config, |text| said.push(text.to_owned())).await.into_diagnostic()?;
    }
    agent::direct::prepare(config);
    Ok(said)
}

fn say(done: &Done, plan: &Plan, as_json: bool, out: &mut dyn Write) -> Result<()> {
    let Done { changes, joined, told } = done;
    if as_json {
        let report = json!({ "changes": changes, "was_running": true, "joined": joined, "configuration": told });
        return line(out, &report.to_string());
    }
    for text in changes.iter().chain(plan.remarks()) {
        line(out, text)?;
    }
    let sentences = reload::sentences(told);
    let text = match (told.restarts, sentences.is_empty() && changes.is_empty() && joined.is_none()) {
        (true, _) => format!("the agent was started again, for: {}", told.need_restart.join(", ")),
        (false, true) => "the agent runs already, as the configuration says".to_owned(),
        (false, false) => "the agent runs already".to_owned(),
    };
    line(out, &text)?;
    for sentence in sentences {
        line(out, &sentence)?;
    }
    joined.as_ref().map_or(Ok(()), |joined| line(out, &welcome(joined)))
}
