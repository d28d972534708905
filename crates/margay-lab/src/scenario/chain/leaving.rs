//! Programs that leave between two connections while every byte is checked at both ends: `proxy-removal` and
//! `leaving-restart` have HAProxy as it is, under the shim; `offset-middlebox` a proxy that puts bytes of its own in
//! front, so that numbers differ.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{ZONE, build};
use crate::agent::{self, Agents, margay};
use crate::command::progress;
use crate::host::Host;
use crate::lab::Lab;
use crate::observe;
use crate::program::{Program, wait_for};
use crate::python;
use crate::report::Limit::{AtLeast, AtMost, Below, Exactly};
use crate::report::{Bound, bound, percentile};
use crate::scenario::af_serval::programs::Programs;
use crate::scenario::{Findings, Scenario, is_long, pair};
use crate::server::await_listener;
use crate::transfers::{Order, Server, Transfers};
use crate::wire;

/// HAProxy leaves.
pub const REMOVAL: Scenario = Scenario {
    name: "proxy-removal",
    summary: "HAProxy on a slower link leaves running sessions, pair by pair, whose bytes are checked at both ends",
    bounds: &REMOVAL_BOUNDS,
    run: removal,
};

/// Agents are killed while both ways are in use.
pub const RESTART: Scenario = Scenario {
    name: "leaving-restart",
    summary: "agents of both ends are killed and started again while HAProxy leaves, with megabytes still in it",
    bounds: &RESTART_BOUNDS,
    run: restart,
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

const REMOVAL_BOUNDS: [Bound; 11] = [
    bound("untold", Exactly(0.0)),
    // 5 and 20 were wanted; the paper has 2 and 4, on eleven machines. Here all hosts share two processors: decision
    // 0111 has what was measured.
    bound("reconfig_ms_p80", Below(40.0)),
    bound("reconfig_ms_p99", Below(100.0)),
    // Two of the messages wait in the proxy's queue, of 50 ms at most (decision 0111).
    bound("reconfig_full_ms_p80", Below(500.0)),
    bound("reconfig_full_ms_p99", Below(1000.0)),
    bound("staying", Exactly(0.0)),
    bound("resets", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
    bound("goodput_gain", AtLeast(1.8)),
    bound("proxy_cpu_after", AtMost(0.02)),
];

const RESTART_BOUNDS: [Bound; 4] = [
    bound("resets", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
    bound("kills_in_phase", AtLeast(2.0)),
];

/// Of clients and servers, each with a name and a HAProxy of its own.
const PAIRS: u16 = 4;
/// The proxy's link, and those of clients and servers.
pub(super) const PROXY_MBIT: u32 = 40;
pub(super) const SITE_MBIT: u32 = 200;
/// Sessions of each pair.
const SESSIONS: usize = 4;
/// Bytes per second of sessions that leave the proxy's link most of what it carries.
const QUIET_PACE: u64 = 100_000;
/// Goodput is measured for so long.
const WINDOW: Duration = Duration::from_secs(2);
/// The link to the server while agents are killed: what the proxy holds takes seconds there.
const SLOW_MBIT: u32 = 8;
const GATE: &str = "gate.shop";
const PORT: u16 = 5010;
const LIMIT: Duration = Duration::from_secs(15);
/// What the proxy holds of all sessions of a pair goes out by its own link: megabytes of each.
const LEAVES_WITHIN: Duration = Duration::from_secs(60);
const PROXY: &str = include_str!("../../../../../examples/leaving-proxy.py");
const TALK: &str = include_str!("offset.py");

pub(super) fn flows(host: &Host) -> Result<usize> {
    let shown: Value = serde_json::from_str(&margay(host, ["flow", "list", "--json"])?)?;
    Ok(shown["flows"].as_array().map_or(0, Vec::len))
}

/// Waits until the proxy has left all sessions.
pub(super) fn await_left(proxy: &Host, findings: &mut Findings) -> Result<()> {
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

/// What a HAProxy passes on to whom.
pub struct Front<'a> {
    /// Where it listens.
    pub port: u16,
    /// A name, without the zone; the port is the same.
    pub to: &'a str,
    /// It stays until there is this file.
    pub when: &'a Path,
}

/// HAProxy as it is, under the shim.
///
/// # Errors
///
/// It does not listen.
pub fn haproxy(host: &Host, shim: &Path, front: &Front<'_>) -> Result<Program> {
    let Front { port, to, when } = front;
    let text = format!(
        "global\n  maxconn 512\ndefaults\n  mode tcp\n  option splice-request\n  option splice-response\n  timeout \
         connect 5s\n  timeout client 1m\n  timeout server 1m\nlisten lines\n  bind 0.0.0.0:{port}\n  server bulk \
         {to}.{ZONE}:{port}\n"
    );
    let path = host.dir.join(format!("leaving-haproxy-{port}.cfg"));
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    let config = path.to_str().context("the path is no text")?.to_owned();
    let preload = format!("LD_PRELOAD={}", shim.display());
    let ports = format!("MARGAY_SPLICE_PORTS={port}");
    let when = format!("MARGAY_SPLICE_WHEN={}", when.display());
    let words = ["env", &preload, &ports, &when, "haproxy", "-db", "-f", &config];
    let mut program = host.spawn(&format!("leaving-haproxy-{port}"), words)?;
    await_listener(host, &mut program, &port.to_string())?;
    Ok(program)
}

/// The processes of a HAProxy: `-db` has it stay in the foreground, as one.
fn cpu_s(programs: &[Program]) -> Result<f64> {
    programs.iter().map(|program| observe::processor_seconds(program.pid())).sum()
}

/// What all transfers bring in a while, in bytes per second, and the share of a processor that the proxies take.
fn measure(all: &mut [Transfers<'_>], proxies: &[Program]) -> Result<(f64, f64)> {
    let received = |all: &mut [Transfers<'_>]| -> Result<u64> {
        all.iter_mut().try_for_each(Transfers::refresh)?;
        Ok(all.iter().flat_map(Transfers::received).map(|word| word.received).sum())
    };
    let before = (received(all)?, cpu_s(proxies)?, Instant::now());
    wait_for("the window of the measurement", 2 * WINDOW, || {
        ensure!(before.2.elapsed() >= WINDOW, "it is not over");
        Ok(())
    })?;
    let after = (received(all)?, cpu_s(proxies)?, before.2.elapsed().as_secs_f64());
    Ok(((after.0 - before.0) as f64 / after.2, (after.1 - before.1) / after.2))
}

/// A proxy for one name, with a server of transfers behind it.
pub(super) fn pair_of(lab: &Lab, number: u16) -> Result<Server> {
    let server = lab.host("server")?;
    let port = PORT + number;
    let bulk = Server::start(server, port, false)?;
    agent::publish(server, &bulk_of(number), &format!("0.0.0.0:{port}"), &[])?;
    agent::await_instances(lab.host("proxy")?, &bulk_of(number), 1)?;
    Ok(bulk)
}

pub(super) fn bulk_of(number: u16) -> String {
    format!("bulk{number}.shop")
}

pub(super) fn gate_of(number: u16) -> String {
    format!("gate{number}.shop")
}

pub(super) fn gate(lab: &Lab, shim: &Path, number: u16) -> Result<(Program, PathBuf)> {
    let proxy = lab.host("proxy")?;
    let port = PORT + number;
    let when = proxy.dir.join(format!("leave-{number}"));
    let program = haproxy(proxy, shim, &Front { port, to: &bulk_of(number), when: &when })?;
    agent::publish(proxy, &gate_of(number), &format!("0.0.0.0:{port}"), &[])?;
    agent::await_instances(lab.host("client")?, &gate_of(number), 1)?;
    Ok((program, when))
}

pub(super) fn order(when: &Path) -> Result<()> {
    std::fs::write(when, "").with_context(|| format!("cannot write {}", when.display()))
}

/// Servers of transfers, and a HAProxy before each that leaves as soon as its file is there.
struct Pairs {
    servers: Vec<Server>,
    proxies: Vec<Program>,
    orders: Vec<PathBuf>,
}

impl Pairs {
    fn begin(lab: &Lab, shim: &Path, numbers: Range<u16>) -> Result<Self> {
        let mut pairs = Self { servers: Vec::new(), proxies: Vec::new(), orders: Vec::new() };
        for number in numbers {
            pairs.servers.push(pair_of(lab, number)?);
            let (program, when) = gate(lab, shim, number)?;
            pairs.proxies.push(program);
            pairs.orders.push(when);
        }
        Ok(pairs)
    }
}

/// So many sessions of each pair; `first`: the number of the first one. `pace`: bytes per second of each; 0: all that
/// it can get.
fn start_transfers<'a>(
    client: &Host,
    first: u16,
    servers: &'a mut [Server],
    sessions: usize,
    pace: u64,
) -> Result<Vec<Transfers<'a>>> {
    let ways: Vec<&str> = ["up:cubic", "down:cubic"].into_iter().cycle().take(sessions).collect();
    let mut all = Vec::new();
    for (number, server) in (first..).zip(servers) {
        let to = format!("{}.{ZONE}", gate_of(number));
        all.push(Transfers::start(client, server, Order { to: &to, ways: &ways, pace })?);
    }
    Ok(all)
}

/// Has the proxies leave one after the other, `sessions` each.
fn leave_pair_by_pair(proxy: &Host, orders: &[PathBuf], sessions: usize, findings: &mut Findings) -> Result<()> {
    for (number, when) in orders.iter().enumerate() {
        order(when)?;
        let wanted = 2 * sessions * (orders.len() - number - 1);
        let left = wait_for("the proxy to leave a pair", LEAVES_WITHIN, || {
            let staying = flows(proxy)?;
            ensure!(staying <= wanted, "it has {staying} flows, and {wanted} are of the other pairs");
            Ok(())
        });
        if let Err(error) = left {
            findings.note(format!("pair {number}: {error:#}"));
        }
        progress(&format!("the proxy has left pair {number}"));
    }
    Ok(())
}

fn removal(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = build("proxy-removal", 0, &["proxy"], dir)?;
    let _agents = Agents::start(&lab)?;
    let [client, server, proxy] = [lab.host("client")?, lab.host("server")?, lab.host("proxy")?];
    let programs = Programs::make(dir)?;
    for host in [client, server] {
        observe::count_virtual_resets(host)?;
        wire::set_rate(Some(host), "eth0", SITE_MBIT)?;
    }
    wire::set_rate(Some(proxy), "eth0", PROXY_MBIT)?;
    quiet_removal(&lab, &programs.shim(), findings)?;
    wire::set_rate(Some(proxy), "eth0", SITE_MBIT)?;
    let mut pairs = Pairs::begin(&lab, &programs.shim(), 0..PAIRS)?;
    let sessions = if is_long() { 150 } else { SESSIONS };
    // Hundreds that want all that they can get leave the first packets of later ones too little of the links. All
    // together want what the ends' links carry, and that is several times what the proxy's does.
    let pace = if is_long() { u64::from(SITE_MBIT) * 125_000 / (u64::from(PAIRS) * sessions as u64) } else { 0 };
    let mut all = start_transfers(client, 0, &mut pairs.servers, sessions, pace)?;
    // Behind transfers that fill it, first packets of others would be lost too often to connect.
    wire::set_rate(Some(proxy), "eth0", PROXY_MBIT)?;
    progress("transfers run through the proxies");
    let (before, cpu_before) = measure(&mut all, &pairs.proxies)?;
    let begun = Instant::now();
    findings.set("sessions", flows(proxy)? as f64 / 2.0);
    leave_pair_by_pair(proxy, &pairs.orders, sessions, findings)?;
    findings.set("left_ms", begun.elapsed().as_secs_f64() * 1e3);
    findings.set("staying", flows(proxy)? as f64);
    let (after, cpu_after) = measure(&mut all, &pairs.proxies)?;
    for (figure, value) in [
        ("goodput_before", before),
        ("goodput_after", after),
        ("goodput_gain", after / before),
        ("proxy_cpu_before", cpu_before),
        ("proxy_cpu_after", cpu_after),
    ] {
        findings.set(figure, value);
    }
    report_times(client, "reconfig_full", sessions * pairs.orders.len(), findings)?;
    for (number, transfers) in all.into_iter().enumerate() {
        transfers.finish(&format!("pair {number}"), findings)?;
    }
    pair::report_resets(&[client, server], findings)
}

/// How long each removal has taken from its own first message, in milliseconds.
#[derive(Default)]
pub(super) struct Left {
    /// Until the client's program sent by the new way, which is what the paper's Figure 12 shows.
    pub to_turn: Vec<f64>,
    /// Until nothing was left of the old one, whose last bytes the proxy still had.
    pub to_end: Vec<f64>,
}

/// Of sessions that have begun at a host, those that a program has left.
pub(super) fn left_of(client: &Host) -> Result<Left> {
    let mut left = Left::default();
    for flow in agent::flows(client)? {
        let changes = flow["reconfigurations"].as_array().into_iter().flatten();
        for change in changes.filter(|change| change["act"] == "leave" && change["outcome"] == "done") {
            let ms = |of: &Value| of.as_f64().map(|us| us / 1e3);
            left.to_turn.extend(ms(&change["turned_us"]));
            left.to_end.extend(ms(&change["took_us"]));
        }
    }
    Ok(left)
}

/// How long a removal takes while the proxy's link is not full: no message waits in a queue.
fn quiet_removal(lab: &Lab, shim: &Path, findings: &mut Findings) -> Result<()> {
    let [client, proxy] = [lab.host("client")?, lab.host("proxy")?];
    let mut pairs = Pairs::begin(lab, shim, PAIRS..2 * PAIRS)?;
    let mut all = start_transfers(client, PAIRS, &mut pairs.servers, SESSIONS, QUIET_PACE)?;
    for transfers in &mut all {
        // A TCP that has just shown its numbers shows them again only after half a second
        // (net.ipv4.tcp_invalid_ratelimit).
        transfers.await_bytes("sessions that have run for a while", QUIET_PACE, LIMIT)?;
    }
    leave_pair_by_pair(proxy, &pairs.orders, SESSIONS, findings)?;
    report_times(client, "reconfig", SESSIONS * pairs.orders.len(), findings)?;
    for transfers in all {
        transfers.finish("a pair that leaves the link room", findings)?;
    }
    wait_for("the end of these sessions", LIMIT, || {
        let left = flows(client)?;
        ensure!(left == 0, "the client has {left} flows");
        Ok(())
    })
}

/// `figure`: the begin of the names of those that say how long it was until programs sent by the new way.
fn report_times(client: &Host, figure: &str, sessions: usize, findings: &mut Findings) -> Result<()> {
    let left = left_of(client)?;
    findings.figures.add("untold", sessions as f64 - left.to_turn.len() as f64);
    for (figure, times) in [(figure, &left.to_turn), ("emptied", &left.to_end)] {
        for percent in [50.0, 80.0, 99.0] {
            findings.set(&format!("{figure}_ms_p{percent}"), percentile(times, percent));
        }
    }
    Ok(())
}

fn restart(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = build("leaving-restart", 0, &["proxy"], dir)?;
    let _agents = Agents::start(&lab)?;
    let [client, server, proxy] = [lab.host("client")?, lab.host("server")?, lab.host("proxy")?];
    let programs = Programs::make(dir)?;
    for host in [client, server] {
        observe::count_virtual_resets(host)?;
    }
    wire::set_rate(Some(proxy), "eth0", SLOW_MBIT)?;
    let mut bulk = pair_of(&lab, 0)?;
    let (_haproxy, when) = gate(&lab, &programs.shim(), 0)?;
    let to = format!("{}.{ZONE}", gate_of(0));
    let ways = ["up:cubic", "up:cubic", "up:cubic"];
    let mut transfers = Transfers::start(client, &mut bulk, Order { to: &to, ways: &ways, pace: 0 })?;
    transfers.await_bytes("transfers through the proxy", 400_000, LIMIT)?;
    order(&when)?;
    for (host, kills) in [client, server, client, server].into_iter().zip(1..) {
        // Two flows of one session at this end: both ways are in use.
        let is_in_phase = wait_for("two ways", Duration::from_secs(2), || {
            ensure!(agent::metric(host, "margay_sessions_parted")? > 0.0, "none");
            Ok(())
        });
        findings.figures.add("kills_in_phase", f64::from(is_in_phase.is_ok()));
        agent::kill(host)?;
        agent::start_again(host)?;
        progress(&format!("kill {kills}: the agent of {} is back", host.name()));
    }
    wire::set_rate(Some(proxy), "eth0", SITE_MBIT)?;
    await_left(proxy, findings)?;
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
