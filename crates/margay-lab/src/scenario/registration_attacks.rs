//! `registration-attacks`: somebody speaks the registration protocol to a router without the right to what it asks for,
//! in every way that we know, while an honest host registers, withdraws and is looked up.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::{Findings, Scenario};
use crate::agent::{self, Agents};
use crate::host::Host;
use crate::lab::Lab;
use crate::program::wait_for;
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::server::echo;
use crate::topology::Topology;
use crate::traffic::Tally;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "registration-attacks",
    summary: "every way to register without a right to it, replays and floods, while an honest host comes and goes",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 9] = [
    bound("accepted", Exactly(0.0)),
    bound("attempts", AtLeast(700.0)),
    bound("kinds", Exactly(23.0)),
    bound("logged", Exactly(1.0)),
    bound("unexplained", Exactly(0.0)),
    bound("honest_failed", Exactly(0.0)),
    bound("honest_rounds", AtLeast(5.0)),
    bound("narrowed", Exactly(1.0)),
    bound("failed", Exactly(0.0)),
];

const TOPOLOGY: &str = r#"
[subnet.site]
v4 = "10.1.0.0/24"

[host.router]
role = "router"
links = [{ subnet = "site" }]

[host.honest]
role = "agent"
links = [{ subnet = "site" }]

[host.client]
role = "agent"
links = [{ subnet = "site" }]

[host.intruder]
role = "plain"
links = [{ subnet = "site" }]
"#;

/// Served all the time, and wanted by the intruder.
const TARGET: &str = "web.shop";
/// Comes and goes.
const ROAMER: &str = "honest.shop";
const LISTEN: [&str; 2] = ["0.0.0.0:8001", "0.0.0.0:8002"];
/// The two honest hosts, and the one that joined by right and then wants more.
const MEMBERS: usize = 3;
const LIMIT: Duration = Duration::from_secs(20);

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse(SCENARIO.name, TOPOLOGY)?, dir)?;
    let _agents = Agents::start(&lab)?;
    findings.set("failed", 0.0);
    let (router, honest) = (lab.host("router")?, lab.host("honest")?);
    let _server = echo(honest, &[LISTEN[0].parse()?, LISTEN[1].parse()?])?;
    agent::publish(honest, TARGET, LISTEN[0], &[])?;
    agent::margay(router, ["id", "authority", "create", "other"])?;
    let over = AtomicBool::new(false);
    let (tallies, rounds) = std::thread::scope(|scope| {
        let going = scope.spawn(|| come_and_go(&lab, &over));
        let tallies = intrude(&lab);
        over.store(true, Ordering::Relaxed);
        (tallies, going.join())
    });
    let (rounds, failures) = rounds.ok().context("a thread ended badly")??;
    findings.set("honest_rounds", rounds);
    findings.set("honest_failed", failures.len() as f64);
    failures.into_iter().take(3).for_each(|failure| findings.note(failure));
    let tallies = tallies?;
    judge(router, &tallies, findings)?;
    narrow(router, honest)?;
    findings.set("narrowed", 1.0);
    Ok(())
}

/// A grant is taken back: what it was for is refused at once, and served again when it is given again.
fn narrow(router: &Host, honest: &Host) -> Result<()> {
    let status = agent::status(honest)?;
    let id = status["host_id"].as_str().context("a host without an identity")?;
    let is = |wanted: &str| {
        wait_for(&format!("{TARGET} to be {wanted}"), LIMIT, || {
            let shown = agent::show(honest, TARGET)?;
            if shown["service"]["state"] == wanted { Ok(()) } else { bail!("it is {}", shown["service"]) }
        })
    };
    agent::margay(router, ["id", "member", "grant", id, ROAMER])?;
    is("refused")?;
    agent::await_instances(router, TARGET, 0)?;
    agent::margay(router, ["id", "member", "grant", id, ROAMER, TARGET])?;
    is("registered")?;
    agent::await_instances(router, TARGET, 1)
}

/// A token, and the identifier by which the operator knows it.
fn token(router: &Host, words: &[&str]) -> Result<(String, String)> {
    let words = ["id", "token", "create"].iter().chain(words).chain(&["--json"]).copied();
    let made: Value = serde_json::from_str(&agent::margay(router, words)?).context("a token is not JSON")?;
    let text = |value: &Value| value.as_str().map(str::to_owned).context("a token without text");
    Ok((text(&made["token"])?, text(&made["info"]["id"])?))
}

/// Runs the intruder, and puts the host out that it names.
fn intrude(lab: &Lab) -> Result<BTreeMap<String, Tally>> {
    let router = lab.host("router")?;
    let (insider, _) = token(router, &["shop", "--grant", "insider.shop"])?;
    let (outcast, _) = token(router, &["shop", "--grant", "outcast.shop"])?;
    let (expired, _) = token(router, &["shop", "--lifetime", "1s"])?;
    let (revoked, id) = token(router, &["shop"])?;
    let (foreign, _) = token(router, &["other"])?;
    agent::margay(router, ["id", "token", "revoke", &id])?;
    await_expiry(router)?;
    let mut command = lab.host("intruder")?.traffic(["intrude", "--name", TARGET])?;
    for (which, token) in [
        ("--insider", &insider),
        ("--outcast", &outcast),
        ("--expired", &expired),
        ("--revoked", &revoked),
        ("--foreign", &foreign),
    ] {
        command.args([which, token]);
    }
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.context("the intruder cannot be started")?;
    let mut lines = BufReader::new(child.stdout.take().context("the intruder has no output")?).lines();
    if let Some(outcast) = lines.next() {
        let outcast: String = serde_json::from_str(&outcast?).context("the outcast has no name")?;
        agent::margay(router, ["id", "member", "remove", &outcast])?;
        writeln!(child.stdin.take().context("the intruder has no input")?)?;
    }
    let last = lines.next().transpose()?;
    let output = child.wait_with_output().context("the intruder does not end")?;
    ensure!(output.status.success(), "the intruder failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    serde_json::from_str(&last.context("the intruder says nothing")?).context("the intruder's tallies are no JSON")
}

fn await_expiry(router: &Host) -> Result<()> {
    wait_for("the end of a token", LIMIT, || {
        let list: Value = serde_json::from_str(&agent::margay(router, ["id", "token", "list", "--json"])?)?;
        let is_over = list["tokens"].as_array().is_some_and(|all| all.iter().any(|one| one["state"] == "expired"));
        if is_over { Ok(()) } else { bail!("it is usable") }
    })
}

/// What an honest host does meanwhile: how often, and what went wrong.
fn come_and_go(lab: &Lab, over: &AtomicBool) -> Result<(f64, Vec<String>)> {
    let (honest, client) = (lab.host("honest")?, lab.host("client")?);
    let (mut rounds, mut failures) = (0.0, Vec::new());
    while !over.load(Ordering::Relaxed) {
        let round = || -> Result<()> {
            agent::publish(honest, ROAMER, LISTEN[1], &[])?;
            agent::await_instances(client, ROAMER, 1)?;
            agent::await_instances(client, TARGET, 1)?;
            agent::withdraw(honest, ROAMER)?;
            agent::await_instances(client, ROAMER, 0)
        };
        failures.extend(round().err().map(|error| format!("round {rounds}: {error:#}")));
        rounds += 1.0;
    }
    Ok((rounds, failures))
}

/// What the router has granted, by the intruder's word and by its own; and what of it is in its log.
fn judge(router: &Host, tallies: &BTreeMap<String, Tally>, findings: &mut Findings) -> Result<()> {
    let (mut attempts, mut logged, mut unexplained) = (0, 0, 0);
    let log = log(router)?;
    let mut by_act: BTreeMap<&str, u64> = BTreeMap::new();
    for (kind, tally) in tallies {
        attempts += tally.attempts;
        *by_act.entry(&tally.act).or_default() += tally.attempts;
        findings.figures.add("accepted", tally.accepted as f64);
        findings.note(format!("{kind}: {} tried, {} granted, \"{}\"", tally.attempts, tally.accepted, tally.said));
    }
    for (act, wanted) in by_act {
        let found = log.get(act).copied().unwrap_or_default();
        logged += found.min(wanted);
        unexplained += found.saturating_sub(wanted);
        if found != wanted {
            findings.note(format!("{act}: {found} in the log, {wanted} tried"));
        }
    }
    findings.set("attempts", attempts as f64);
    findings.set("kinds", tallies.len() as f64);
    findings.set("logged", logged as f64 / attempts.max(1) as f64);
    // Somebody else was refused, who should not be.
    findings.set("unexplained", unexplained as f64);
    let strays = wait_for("the end of what the intruder had", LIMIT, || {
        let list: Value = serde_json::from_str(&agent::margay(router, ["service", "list", "--json"])?)?;
        let registered = list["registered"].as_array().cloned().unwrap_or_default();
        let strays = registered.iter().filter(|one| one["name"] != TARGET).count();
        if strays == 0 { Ok(registered.len().abs_diff(1)) } else { bail!("{strays} names are registered") }
    })?;
    let members: Value = serde_json::from_str(&agent::margay(router, ["id", "member", "list", "--json"])?)?;
    let extra = members["members"].as_array().map_or(0, Vec::len).abs_diff(MEMBERS);
    findings.figures.add("accepted", (strays + extra) as f64);
    Ok(())
}

/// How often each act is in the router's audit log.
fn log(router: &Host) -> Result<BTreeMap<String, u64>> {
    let text = agent::margay(router, ["audit", "list", "--limit", "100000", "--json"])?;
    let list: Value = serde_json::from_str(&text).context("the audit log is not JSON")?;
    let mut counts = BTreeMap::new();
    for entry in list["entries"].as_array().into_iter().flatten() {
        let act = entry["act"].as_str().unwrap_or_default().to_owned();
        *counts.entry(act).or_default() += entry["count"].as_u64().unwrap_or_default();
    }
    Ok(counts)
}
