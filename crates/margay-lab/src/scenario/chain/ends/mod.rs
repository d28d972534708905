//! `chain-ends`: connections end by FIN and by RST, of either side, at every moment of a change of their boxes; some
//! are half-closed for long, and some idle. Both ends hear of each end, nothing is wrong, and nothing is left.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde::Deserialize;
use serde_json::Value;

use super::insert_remove::leaks;
use super::{apply, build, chain, serve};
use crate::agent::{self, Agents};
use crate::entries;
use crate::host::Host;
use crate::program::{Program, wait_for};
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::scenario::{Findings, Scenario, is_long};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "chain-ends",
    summary: "connections end by FIN and RST of either side at every moment of a change of their boxes",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 6] = [
    bound("hung", Exactly(0.0)),
    bound("wrong_ends", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("leaks", Exactly(0.0)),
    bound("completed", AtLeast(1.0)),
    bound("failed", Exactly(0.0)),
];

const SCRUBBER: &str = "scrub.shop";
const NAME: &str = "ends.shop";
const PORT: &str = "5020";
const LIMIT: Duration = Duration::from_secs(20);

/// What one end says of a connection.
#[derive(Debug, Deserialize)]
struct Ended {
    number: usize,
    by: String,
    how: String,
    sent: u64,
    received: u64,
    wrong: u64,
    end: String,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = build("chain-ends", 1, &[], dir)?;
    let _agents = Agents::start(&lab)?;
    let [client, server, middlebox] = [lab.host("client")?, lab.host("server")?, lab.host("box1")?];
    serve(middlebox, SCRUBBER, "forward", &[])?;
    let hosts: Vec<&Host> = lab.hosts.iter().collect();
    apply(lab.host("router")?, &chain("known", "nobody.shop", &[SCRUBBER], ""), &hosts, &["known"])?;
    let script = dir.join("ends.py");
    std::fs::write(&script, include_str!("ends.py")).context("cannot write the ends' script")?;
    let script = script.to_str().context("a path that is no text")?;
    let mut serving = server.spawn("serving", ["python3", script, "serve", PORT])?;
    await_word(&serving, "listens")?;
    agent::publish(server, NAME, &format!("0.0.0.0:{PORT}"), &[])?;
    agent::await_instances(client, NAME, 1)?;
    agent::await_instances(client, SCRUBBER, 1)?;
    for figure in ["hung", "wrong_ends", "wrong_bytes", "leaks", "completed", "incomplete", "failed"] {
        findings.figures.add(figure, 0.0);
    }
    let rounds = if is_long() { 12 } else { 2 };
    let words = [&format!("{NAME}.{}", super::ZONE), PORT, &rounds.to_string(), "4"].map(str::to_owned);
    let words = ["python3", script, "connect"].map(str::to_owned).into_iter().chain(words);
    let mut connecting = client.spawn("connecting", words)?;
    await_word(&connecting, "connected ")?;
    for round in 0..=rounds {
        for program in [&connecting, &serving] {
            program.signal(Signal::SIGUSR1)?;
        }
        if round < rounds {
            change(client, if round % 2 == 0 { "insert" } else { "remove" }, findings)?;
        }
    }
    for program in [&mut connecting, &mut serving] {
        await_word(program, "all")?;
        program.finish(LIMIT)?;
    }
    judge(&ends(&connecting)?, &ends(&serving)?, findings);
    findings.figures.add("leaks", entries::flows_left(&[client, server], LIMIT)?);
    leaks(middlebox, findings)
}

fn await_word(program: &Program, word: &str) -> Result<()> {
    wait_for(word, LIMIT, || {
        ensure!(program.log().lines().any(|line| line.starts_with(word)), "not yet");
        Ok(())
    })
}

/// Some of the sessions end meanwhile; of the others, each is changed.
fn change(client: &Host, act: &str, findings: &mut Findings) -> Result<()> {
    let words = ["chain", act, SCRUBBER, "--name", NAME, "--json"];
    // The order is no success if a session has ended; what it says of each is on its output all the same.
    let output = client.output([crate::fabric::margay_program()?.to_str().context("a path")?].iter().chain(&words))?;
    let reply: Value = serde_json::from_slice(&output.stdout)
        .with_context(|| format!("{act}: {}", String::from_utf8_lossy(&output.stderr)))?;
    for one in reply["changed"].as_array().into_iter().flatten() {
        let why = one["why"].as_str().unwrap_or_default();
        let figure = match one["outcome"].as_str() {
            Some("done") => "completed",
            Some("ended") => "ended",
            // One of the hosts, or both, know already that it is over: all of them have been set up.
            Some("refused") if why.contains(" over") => "ended",
            _ => "incomplete",
        };
        findings.figures.add(figure, 1.0);
        if figure == "incomplete" {
            findings.note(format!("{act}: {}: {}", one["outcome"], one["why"]));
        }
    }
    Ok(())
}

fn ends(program: &Program) -> Result<BTreeMap<usize, Ended>> {
    let log = program.log();
    let lines = log.lines().filter(|line| line.starts_with('{'));
    lines.map(|line| Ok(serde_json::from_str::<Ended>(line).map(|one| (one.number, one))?)).collect()
}

/// What one end has sent has come to the other one, and each end was heard of.
fn judge(client: &BTreeMap<usize, Ended>, server: &BTreeMap<usize, Ended>, findings: &mut Findings) {
    findings.set("connections", client.len() as f64);
    for (number, of_client) in client {
        let Some(of_server) = server.get(number) else {
            findings.figures.add("wrong_ends", 1.0);
            continue;
        };
        let both = [of_client, of_server];
        let is_reset = of_client.how == "rst";
        let is_whole = of_client.sent == of_server.received && of_server.sent == of_client.received;
        let is_wrong = both.iter().any(|one| one.wrong > 0) || !is_reset && !is_whole;
        let is_hung = both.iter().any(|one| one.end == "hung");
        let has_ended = |one: &Ended| match (is_reset, one.end.as_str()) {
            (false, end) => end == "closed",
            (true, end) => ["aborted", "reset"].contains(&end),
        };
        let is_other = !is_hung && !both.iter().all(|one| has_ended(one));
        for (figure, is_it) in [("wrong_bytes", is_wrong), ("hung", is_hung), ("wrong_ends", is_other)] {
            if is_it {
                findings.figures.add(figure, 1.0);
                findings.note(format!("{figure}: {of_client:?}, {of_server:?} (by {})", of_client.by));
            }
        }
    }
}
