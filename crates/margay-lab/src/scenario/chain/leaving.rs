//! Programs that leave between two connections while every byte is checked at both ends: `proxy-removal` has HAProxy as
//! it is, under the shim; `offset-middlebox` a proxy that puts bytes of its own in front, so that numbers differ.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{ZONE, build};
use crate::agent::{self, Agents, margay};
use crate::command::progress;
use crate::host::Host;
use crate::observe;
use crate::program::{Program, wait_for};
use crate::python;
use crate::report::Limit::Exactly;
use crate::report::{Bound, bound};
use crate::scenario::af_serval::programs::Programs;
use crate::scenario::{Findings, Scenario, is_long, pair};
use crate::server::await_listener;
use crate::transfers::{Order, Server, Transfers};

/// HAProxy leaves.
pub const REMOVAL: Scenario = Scenario {
    name: "proxy-removal",
    summary: "HAProxy leaves running sessions, whose bytes are checked at both ends",
    bounds: &BOUNDS,
    run: removal,
};

/// A proxy that adds bytes leaves.
pub const OFFSET: Scenario = Scenario {
    name: "offset-middlebox",
    summary: "a proxy that has put bytes in front leaves, so that the numbers of both ends differ",
    bounds: &BOUNDS,
    run: offset,
};

const BOUNDS: [Bound; 4] = [
    bound("staying", Exactly(0.0)),
    bound("resets", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("incomplete", Exactly(0.0)),
];

const BULK: &str = "bulk.shop";
const GATE: &str = "gate.shop";
const PORT: u16 = 5010;
/// Bytes per second of each transfer.
const PACE: u64 = 2_000_000;
const LIMIT: Duration = Duration::from_secs(15);
const PROXY: &str = include_str!("../../../../../examples/leaving-proxy.py");
const TALK: &str = include_str!("offset.py");

fn flows(host: &Host) -> Result<usize> {
    let shown: Value = serde_json::from_str(&margay(host, ["flow", "list", "--json"])?)?;
    Ok(shown["flows"].as_array().map_or(0, Vec::len))
}

/// Waits until the proxy has left all sessions.
fn await_left(proxy: &Host, findings: &mut Findings) -> Result<()> {
    let begun = Instant::now();
    let has_left = wait_for("the proxy to leave", LIMIT, || {
        let left = flows(proxy)?;
        ensure!(left == 0, "it has {left} flows");
        Ok(())
    });
    if let Err(error) = &has_left {
        findings.note(format!("{error:#}"));
    }
    findings.set("left_ms", begun.elapsed().as_secs_f64() * 1e3);
    findings.set("staying", flows(proxy)? as f64);
    Ok(())
}

fn haproxy(host: &Host, shim: &Path) -> Result<Program> {
    let text = format!(
        "global\n  maxconn 512\ndefaults\n  mode tcp\n  option splice-request\n  option splice-response\n  timeout \
         connect 5s\n  timeout client 1m\n  timeout server 1m\nlisten lines\n  bind 0.0.0.0:{PORT}\n  server bulk \
         {BULK}.{ZONE}:{PORT}\n"
    );
    let path = host.dir.join("leaving-haproxy.cfg");
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    let config = path.to_str().context("the path is no text")?.to_owned();
    let preload = format!("LD_PRELOAD={}", shim.display());
    let ports = format!("MARGAY_SPLICE_PORTS={PORT}");
    let words = ["env", &preload, &ports, "haproxy", "-db", "-f", &config];
    let mut program = host.spawn("leaving-haproxy", words)?;
    await_listener(host, &mut program, &PORT.to_string())?;
    Ok(program)
}

fn removal(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = build("proxy-removal", 0, &["proxy"], dir)?;
    let _agents = Agents::start(&lab)?;
    let [client, server, proxy] = [lab.host("client")?, lab.host("server")?, lab.host("proxy")?];
    let programs = Programs::make(dir)?;
    ["incomplete", "wrong_bytes"].into_iter().for_each(|figure| findings.figures.add(figure, 0.0));
    for host in [client, server] {
        observe::count_virtual_resets(host)?;
    }
    let mut bulk = Server::start(server, PORT, false)?;
    agent::publish(server, BULK, &format!("0.0.0.0:{PORT}"), &[])?;
    agent::await_instances(proxy, BULK, 1)?;
    let _haproxy = haproxy(proxy, &programs.shim())?;
    agent::publish(proxy, GATE, &format!("0.0.0.0:{PORT}"), &[])?;
    agent::await_instances(client, GATE, 1)?;
    let pairs = if is_long() { 50 } else { 4 };
    let ways: Vec<&str> = ["up:cubic", "down:cubic"].into_iter().cycle().take(2 * pairs).collect();
    let to = format!("{GATE}.{ZONE}");
    let mut transfers = Transfers::start(client, &mut bulk, Order { to: &to, ways: &ways, pace: PACE })?;
    progress("transfers run through the proxy");
    await_left(proxy, findings)?;
    progress("the proxy has left");
    transfers.await_bytes("transfers without the proxy", 4_000_000, LIMIT)?;
    transfers.finish("transfers", findings)?;
    pair::report_resets(&[client, server], findings)
}

fn offset(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = build("offset-middlebox", 0, &["proxy"], dir)?;
    let _agents = Agents::start(&lab)?;
    let [client, server, proxy] = [lab.host("client")?, lab.host("server")?, lab.host("proxy")?];
    for host in [client, server] {
        observe::count_virtual_resets(host)?;
    }
    let serves = python::sdk(server, "offset-serve.py", TALK, &["serve"])?;
    wait_for("the server", LIMIT, || {
        ensure!(serves.log().contains("ready"), "it says: {}", serves.log());
        Ok(())
    })?;
    agent::await_instances(proxy, "web.shop", 1)?;
    let _proxy = python::sdk(proxy, "leaving-proxy.py", PROXY, &[GATE, "web.shop", "HELLO"])?;
    agent::await_instances(client, GATE, 1)?;
    let asks = python::sdk(client, "offset-ask.py", TALK, &["ask"])?;
    wait_for("both ends", LIMIT, || {
        let have_begun = [&asks, &serves].iter().all(|one| one.log().contains("begun"));
        ensure!(have_begun, "they say: {} {}", asks.log(), serves.log());
        Ok(())
    })?;
    await_left(proxy, findings)?;
    for (who, program) in [("client", &asks), ("server", &serves)] {
        let said: Value = wait_for(&format!("the {who}'s word"), LIMIT, || {
            let log = program.log();
            let last = log.lines().rfind(|line| line.starts_with('{')).context("it has not ended")?;
            Ok(serde_json::from_str(last)?)
        })?;
        let received = said["received"].as_f64().unwrap_or_default();
        findings.figures.add("wrong_bytes", said["wrong"].as_f64().unwrap_or(1.0));
        findings.figures.add("incomplete", f64::from(received < 1_000_000.0 || said["error"] != ""));
        findings.set(&format!("{who}_bytes"), received);
        if said["error"] != "" {
            findings.note(format!("{who}: {said}"));
        }
    }
    pair::report_resets(&[client, server], findings)
}
