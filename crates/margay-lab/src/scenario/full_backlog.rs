//! `full-backlog`: more connections at once than a listener's queue takes, and programs that take them late; with SYN
//! cookies, without, and with nothing else. Beside them the same without Margay.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::{Findings, Scenario, pair};
use crate::agent::{self, Agents};
use crate::host::Host;
use crate::lab::Lab;
use crate::observe;
use crate::program::Program;
use crate::recorder::Recorder;
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::series::Series;
use crate::server::{self, Outcome};
use crate::topology::Topology;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "full-backlog",
    summary: "bursts into short accept queues, taken late, with SYN cookies and without: by name as without Margay",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 4] = [
    bound("failed_more_than_plain", Exactly(0.0)),
    bound("resets", Exactly(0.0)),
    bound("connections", Exactly((COOKIES.len() * SHAPES.len() * BURST) as f64)),
    // Otherwise no queue has been full.
    bound("overflows", AtLeast((COOKIES.len() * SHAPES.len()) as f64)),
];

const TOPOLOGY: &str = r#"
[subnet.wire]
v4 = "10.1.0.0/24"

[host.router]
role = "router"
links = [{ subnet = "wire" }]

[host.server]
role = "agent"
links = [{ subnet = "wire" }]

[host.client]
role = "agent"
links = [{ subnet = "wire" }]
"#;

/// What `net.ipv4.tcp_syncookies` is set to.
const COOKIES: [u8; 3] = [1, 0, 2];
/// Connections at once.
const BURST: usize = 12;
const NAMED_PORT: u16 = 7000;
const PLAIN_PORT: u16 = 8000;
const BURST_LIMIT: Duration = Duration::from_secs(60);
/// More than all bursts take.
const RECORDED: usize = 200_000;

/// A server, and what is sent to it.
struct Shape {
    /// Connections that may wait.
    backlog: u32,
    /// Time after the first one is taken.
    after_ms: u32,
    /// Time before each further one.
    every_ms: u32,
    /// Message of each.
    bytes: u32,
}

const SHAPES: [Shape; 3] = [
    Shape { backlog: 2, after_ms: 2500, every_ms: 0, bytes: 64 },
    Shape { backlog: 1, after_ms: 300, every_ms: 250, bytes: 64 },
    // Several segments: what follows the first one finds no socket.
    Shape { backlog: 5, after_ms: 1500, every_ms: 50, bytes: 4000 },
];

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("full-backlog", TOPOLOGY)?, dir)?;
    let _agents = Agents::start(&lab)?;
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    pair::demand_kernel(&[client, server], findings)?;
    [client, server].iter().try_for_each(|host| observe::count_virtual_resets(host))?;
    // For whoever looks for the cause of a failure: the files stay then.
    let mut recorders = Vec::new();
    for host in [client, server] {
        for interface in ["eth0", "sal0"] {
            recorders.push(Recorder::start_at(host, interface, "tcp or udp port 54324", RECORDED)?);
        }
    }
    for name in ["connections", "failed", "plain_failed"] {
        findings.set(name, 0.0);
    }
    for (round, cookies) in COOKIES.into_iter().enumerate() {
        server.shell(&format!("echo {cookies} > /proc/sys/net/ipv4/tcp_syncookies"))?;
        burst(client, server, round, findings).with_context(|| format!("tcp_syncookies = {cookies}"))?;
    }
    recorders.iter_mut().try_for_each(|recorder| recorder.finish().map(drop))?;
    let numbers = observe::nstat(server)?;
    findings.set("overflows", numbers.get("TcpExtListenOverflows").copied().unwrap_or_default());
    // Also those that no program has seen, since it had closed.
    pair::report_resets(&[client, server], findings)?;
    let (failed, plain_failed) = (findings.figures.get("failed"), findings.figures.get("plain_failed"));
    findings.set("failed_more_than_plain", (failed - plain_failed).max(0.0));
    Ok(())
}

/// One burst of each shape, by name and by address, all at once.
fn burst(client: &Host, server: &Host, round: usize, findings: &mut Findings) -> Result<()> {
    let mut serving = Vec::new();
    for (at, shape) in SHAPES.iter().enumerate() {
        for first in [NAMED_PORT, PLAIN_PORT] {
            serving.push(serve(server, first + place(round, at), shape)?);
        }
        let port = NAMED_PORT + place(round, at);
        agent::publish(server, &name(round, at), &format!("0.0.0.0:{port}"), &[])?;
    }
    let plain = pair::address(server)?;
    let mut bursts = Vec::new();
    for (at, shape) in SHAPES.iter().enumerate() {
        let named = format!("{}.sal.internal", name(round, at));
        for (to, first, kind) in [(named.as_str(), NAMED_PORT, ""), (plain.as_str(), PLAIN_PORT, "plain_")] {
            bursts.push((at, kind, connect(client, to, first + place(round, at), shape)?));
        }
    }
    for (at, kind, burst) in bursts {
        let outcomes = burst.finish(BURST_LIMIT)?;
        let outcome = outcomes.first().context("a burst has no outcome")?;
        note(outcome, kind, &format!("{kind}{}", name(round, at)), findings);
    }
    Ok(())
}

fn place(round: usize, at: usize) -> u16 {
    (round * SHAPES.len() + at) as u16
}

fn name(round: usize, at: usize) -> String {
    format!("queue{}.shop", place(round, at))
}

fn serve(server: &Host, port: u16, shape: &Shape) -> Result<Program> {
    let options =
        [("backlog", shape.backlog), ("accept-after-ms", shape.after_ms), ("accept-every-ms", shape.every_ms)];
    let options = options.map(|(name, value)| format!("--{name}={value}"));
    server::echo_late(server, ([0; 4], port).into(), &options.each_ref().map(String::as_str))
}

fn connect(client: &Host, to: &str, port: u16, shape: &Shape) -> Result<Series<Outcome>> {
    let options = [format!("--count={BURST}"), format!("--parallel={BURST}"), format!("--bytes={}", shape.bytes)];
    let words = ["attempt".to_owned(), to.to_owned(), port.to_string(), "--timeout-ms=45000".to_owned()];
    Series::start(client, &words.into_iter().chain(options).collect::<Vec<_>>())
}

fn note(outcome: &Outcome, kind: &str, what: &str, findings: &mut Findings) {
    findings.figures.add(&format!("{kind}failed"), outcome.failed() as f64);
    if kind.is_empty() {
        findings.figures.add("connections", (outcome.ok + outcome.failed()) as f64);
    }
    let slowest = format!("{kind}slowest_ms");
    let longest = outcome.ok_ms.iter().copied().fold(findings.figures.get(&slowest), f64::max);
    findings.set(&slowest, longest);
    outcome.errors.iter().for_each(|(error, count)| findings.note(format!("{what}: {count} times {error}")));
}
