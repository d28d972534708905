//! A client requests to re-route 1,100 sessions at once, and drops all answers, so that its requests stay open at the
//! server's host. Operators re-route other sessions at the same time.

use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::super::ZONE;
use super::{FIREWALL, Tally};
use crate::agent;
use crate::host::Host;
use crate::idle;
use crate::lab::Lab;
use crate::observe;
use crate::program::{output_within, wait_for};
use crate::scenario::Findings;
use crate::server;

/// One command re-routes up to 256 sessions at once; five commands run in parallel.
const CROWDED: [&str; 5] = ["crowd1.shop", "crowd2.shop", "crowd3.shop", "crowd4.shop", "crowd5.shop"];
const SESSIONS_OF_EACH: usize = 220;
const CALM: &str = "calm.shop";
const CALM_SESSIONS: usize = 5;
const PORT: u16 = 17;
const ROUNDS: usize = 3;
/// Per round, one command at the client's host, and one at the server's.
pub(super) const CHANGED: f64 = (2 * ROUNDS * CALM_SESSIONS) as f64;
/// Open requests that one peer may have (docs/decisions/0121).
const SHARE: usize = 8192 / 16;
/// Those beyond it, without retries.
pub(super) const REFUSED: f64 = (ROUNDS * (CROWDED.len() * SESSIONS_OF_EACH - SHARE)) as f64;
const LIMIT: Duration = Duration::from_secs(20);
/// Drops the answers of the server's host: ACK-LOCK (13) and NACK-LOCK (14).
const DROP_ANSWERS: &str = "add table inet silent; \
    add chain inet silent in { type filter hook input priority 0; }; \
    add rule inet silent in udp dport 54324 @th,72,8 { 13, 14 } drop";

pub(super) fn exhaust(lab: &Lab, tally: &mut Tally, findings: &mut Findings) -> Result<()> {
    let (server, client, other) = (lab.host("server")?, lab.host("client")?, lab.host("other")?);
    let _greeter = server::greeter(server, format!("0.0.0.0:{PORT}").parse()?)?;
    for name in CROWDED.iter().chain([&CALM]) {
        agent::publish(server, name, &format!("0.0.0.0:{PORT}"), &[])?;
    }
    let crowd = CROWDED.map(|name| idle::open(other, &format!("{name}.{ZONE}"), PORT, SESSIONS_OF_EACH));
    let _crowd = crowd.into_iter().collect::<Result<Vec<_>>>()?;
    let _calm = idle::open(client, &format!("{CALM}.{ZONE}"), PORT, CALM_SESSIONS)?;
    let pid = agent::pid(server)?;
    let memory_before = observe::resident_bytes(pid)?;
    let all_before = refused(server)?;
    for figure in ["operator_changed", "operator_refused"] {
        findings.set(figure, 0.0);
    }
    other.run(["nft", DROP_ANSWERS])?;
    for _ in 0..ROUNDS {
        let before = refused(server)?;
        let mut commands = CROWDED.iter().map(|name| insert(other, name)).collect::<Result<Vec<_>>>()?;
        wait_for("requests beyond the share of a peer", LIMIT, || {
            ensure!(refused(server)? > before, "none was refused");
            Ok(())
        })?;
        order(client, "insert", findings)?;
        order(server, "remove", findings)?;
        tally.honest(client, findings)?;
        for command in &mut commands {
            command.wait().context("a command does not end")?;
        }
    }
    other.run(["nft", "delete table inet silent"])?;
    findings.set("exhausting_requests", refused(server)? - all_before);
    findings.set("memory_growth_mb", (observe::resident_bytes(pid)? - memory_before) / 1e6);
    Ok(())
}

/// Starts a command that inserts the middlebox into all sessions to a name. It is expected to fail.
fn insert(host: &Host, name: &str) -> Result<Child> {
    let mut command = agent::command(host, ["chain", "insert", FIREWALL, "--name", name])?;
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().context("cannot start a command")
}

/// An operator inserts the middlebox into the client's sessions, or removes it.
fn order(host: &Host, act: &str, findings: &mut Findings) -> Result<()> {
    let mut command = agent::command(host, ["chain", act, FIREWALL, "--name", CALM, "--json"])?;
    let output = output_within(&mut command, LIMIT)?;
    let reply: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let changed = reply["changed"].as_array().into_iter().flatten().filter(|one| one["outcome"] == "done").count();
    findings.figures.add("operator_changed", changed as f64);
    findings.figures.add("operator_refused", CALM_SESSIONS.saturating_sub(changed) as f64);
    if changed < CALM_SESSIONS {
        findings.note(format!("{act} at {}: {reply}{}", host.name(), String::from_utf8_lossy(&output.stderr)));
    }
    Ok(())
}

/// Requests to re-route that were refused because their peer had its share.
fn refused(server: &Host) -> Result<f64> {
    agent::metric(server, "margay_share_refused_total{table=\"chain_changes\"}")
}
