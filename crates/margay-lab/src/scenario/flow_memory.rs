//! `flow-memory`: ten thousand TCP flows between two hosts, held open, all of them sending now and then; what they cost
//! the agents. `many-flows` does the same with direct flows.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};

use super::{Findings, Scenario, pair};
use crate::agent::{self, Agents};
use crate::held::Held;
use crate::host::Host;
use crate::observe;
use crate::program::wait_for;
use crate::report::Limit::{AtMost, Exactly};
use crate::report::{Bound, bound};
use crate::server;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "flow-memory",
    summary: "10,000 encapsulated TCP flows between two hosts, held open and all sending now and then",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 4] = [
    bound("failed", Exactly(0.0)),
    bound("resets", Exactly(0.0)),
    bound("user_bytes_per_flow", AtMost(USER_BYTES_MAX)),
    bound("agent_rss_mb", AtMost(120.0)),
];

/// How many are held.
pub const FLOWS: usize = 10_000;
/// Times that every flow says something.
const ROUNDS: usize = 3;
const USER_BYTES_MAX: f64 = 800.0;
const GIVEN_BACK_LIMIT: Duration = Duration::from_secs(15);
const NAME: &str = "echo.shop.sal.internal";

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = pair::build("flow-memory", dir)?;
    let _agents = Agents::start_encapsulated(&lab)?;
    hold(lab.host("client")?, lab.host("server")?, findings, |_, _| Ok(()))
}

/// Holds the flows between two hosts, and measures. `open` looks at them while as many as it is told are open and have
/// talked: one first, then all.
///
/// # Errors
///
/// They cannot be held at all, or `open` fails.
pub fn hold(
    client: &Host,
    server: &Host,
    findings: &mut Findings,
    open: impl Fn(&mut Findings, usize) -> Result<()>,
) -> Result<()> {
    let _echo = server::echo(server, &["0.0.0.0:7".parse()?])?;
    agent::publish(server, "echo.shop", "0.0.0.0:7", &[])?;
    // One flow first, and through all that the others go through: what both agents need for the first of all flows, and
    // be it the pages of code that nothing else has run, is not the price of the ten-thousandth.
    let mut first = Held::open(client, NAME, 1)?;
    first.round()?;
    open(findings, 1)?;
    findings.figures.add("failed", first.end()?);
    let agents = [agent::pid(client)?, agent::pid(server)?];
    let resident = || agents.iter().map(|pid| observe::resident_bytes(*pid)).collect::<Result<Vec<f64>>>();
    let allocated = || agents.iter().map(|pid| observe::allocated_bytes(*pid)).collect::<Result<Vec<f64>>>();
    let kernel = || agents.iter().map(|pid| observe::bpf_bytes(*pid)).collect::<Result<Vec<f64>>>();
    let resets_before = observe::tcp_resets(client)? + observe::tcp_resets(server)?;
    let before = allocated()?;
    let kernel_before = kernel()?;

    let mut held = Held::open(client, NAME, FLOWS)?;
    if held.open_count() != FLOWS as f64 {
        findings.note(format!("not all flows opened: {}", held.said()));
    }
    for _ in 0..ROUNDS {
        held.round()?;
    }
    let looked = open(findings, FLOWS);
    // What set-up took for a moment is given back within seconds; if it is not, the figure says so.
    let _ = wait_for("the memory of set-up", GIVEN_BACK_LIMIT, || {
        let per_flow = grown(&before, &allocated()?) / FLOWS as f64;
        ensure!(per_flow <= USER_BYTES_MAX, "{per_flow} bytes per flow are held");
        Ok(())
    });
    let after = allocated()?;
    let kernel_after = kernel()?;
    findings.set("flows_known", agent::status(server)?["flows"].as_f64().unwrap_or_default());
    findings.set("user_bytes_per_flow", grown(&before, &after) / FLOWS as f64);
    findings.set("kernel_bytes_per_flow", grown(&kernel_before, &kernel_after) / FLOWS as f64);
    findings.set("agent_rss_mb", resident()?.into_iter().fold(0.0, f64::max) / 1e6);
    findings.set("resets", observe::tcp_resets(client)? + observe::tcp_resets(server)? - resets_before);
    findings.set("exchanges", held.exchanges());
    let said = held.said();
    let failed = held.end()?;
    if failed > 0.0 {
        findings.note(format!("{failed} flows failed; after the last round: {said}"));
    }
    findings.figures.add("failed", failed);
    looked
}

/// By how much the one that has grown most has.
fn grown(before: &[f64], after: &[f64]) -> f64 {
    before.iter().zip(after).map(|(before, after)| after - before).fold(0.0, f64::max)
}
