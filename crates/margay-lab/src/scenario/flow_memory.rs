//! `flow-memory`: ten thousand TCP flows between two hosts, held open, all of them sending now and then; what they cost the agents.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::{Findings, Scenario};
use crate::agent::{self, Agents};
use crate::host::Host;
use crate::lab::Lab;
use crate::observe;
use crate::report::Limit::{AtMost, Exactly};
use crate::report::{Bound, bound};
use crate::server;
use crate::topology::Topology;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "flow-memory",
    summary: "10,000 TCP flows between two hosts, held open and all sending now and then",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 4] = [
    bound("failed", Exactly(0.0)),
    bound("resets", Exactly(0.0)),
    bound("user_bytes_per_flow", AtMost(800.0)),
    bound("agent_rss_mb", AtMost(120.0)),
];

const FLOWS: usize = 10_000;
/// Times that every flow says something.
const ROUNDS: usize = 3;
const NAME: &str = "echo.shop.sal.internal";

const TOPOLOGY: &str = r#"
[subnet.site]
v4 = "10.1.0.0/24"

# The server is its own router: two agents, and nothing else that could hold the flows.
[host.server]
role = "router"
links = [{ subnet = "site" }]

[host.client]
role = "agent"
links = [{ subnet = "site" }]
"#;

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("flow-memory", TOPOLOGY)?, dir)?;
    let _agents = Agents::start(&lab)?;
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    let _echo = server::echo(server, &["0.0.0.0:7".parse()?])?;
    agent::publish(server, "echo.shop", "0.0.0.0:7", &[])?;
    // One flow first: what both agents need for the first of all flows is not the price of the ten-thousandth.
    Holder::open(client, 1)?.finish(findings)?;
    let agents = [agent::pid(client)?, agent::pid(server)?];
    let resident = || agents.iter().map(|pid| observe::resident_bytes(*pid)).collect::<Result<Vec<f64>>>();
    let resets_before = observe::tcp_resets(client)? + observe::tcp_resets(server)?;
    let before = resident()?;

    let mut holder = Holder::open(client, FLOWS)?;
    let opened = holder.last["open"].as_u64().unwrap_or_default();
    if opened != FLOWS as u64 {
        findings.note(format!("{opened} flows opened: {}", holder.last));
    }
    for _ in 0..ROUNDS {
        holder.round()?;
    }
    let after = resident()?;
    findings.set("flows_known", agent::status(server)?["flows"].as_f64().unwrap_or_default());
    let grown = before.iter().zip(&after).map(|(before, after)| after - before).fold(0.0, f64::max);
    findings.set("user_bytes_per_flow", grown / FLOWS as f64);
    findings.set("agent_rss_mb", after.iter().copied().fold(0.0, f64::max) / 1e6);
    findings.set("resets", observe::tcp_resets(client)? + observe::tcp_resets(server)? - resets_before);
    findings.set("exchanges", holder.last["exchanges"].as_f64().unwrap_or_default());
    holder.finish(findings)
}

/// The program that holds the flows.
struct Holder {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    last: Value,
    wanted: usize,
}

impl Holder {
    fn open(client: &Host, count: usize) -> Result<Self> {
        let mut command = client.traffic(["flows", NAME, "7", "--count", &count.to_string()])?;
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("cannot start the flows")?;
        let orders = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().context("the flows have no output")?);
        let mut this = Self { child, orders, answers, last: Value::Null, wanted: count };
        this.read()?;
        Ok(this)
    }

    fn read(&mut self) -> Result<()> {
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            bail!("the program that holds the flows has ended");
        }
        self.last = serde_json::from_str(&line).with_context(|| format!("the flows said {line:?}"))?;
        Ok(())
    }

    fn round(&mut self) -> Result<()> {
        writeln!(self.orders.as_mut().context("the flows have no input")?)?;
        self.read()
    }

    /// Ends it, and counts what went wrong in all of its time.
    fn finish(mut self, findings: &mut Findings) -> Result<()> {
        drop(self.orders.take());
        self.read()?;
        let missing = self.wanted as f64 - self.last["open"].as_f64().unwrap_or_default();
        let failed = self.last["failed"].as_f64().unwrap_or_default().max(missing);
        if failed > 0.0 {
            findings.note(format!("at the end: {}", self.last));
        }
        findings.figures.add("failed", failed);
        self.child.wait().context("the flows do not end").map(drop)
    }
}
