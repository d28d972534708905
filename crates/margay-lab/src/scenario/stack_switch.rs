//! `stack-switch`: numbered datagrams at half the rate of the slower stack, while their flow is carried in one way and
//! another in turns: encapsulated and sealed, direct and sealed, encapsulated and by `fec`, direct and by `fec`, sealed
//! and both at once, and the same with `sctp`. Then TCP transfers, every byte checked, whose flows are changed one
//! after the other. How long nothing comes at a change is held against as long a time in which the agent is only asked
//! something.

use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::{Findings, Scenario, is_long, pair};
use crate::agent::{self, Agents};
use crate::command::progress;
use crate::host::Host;
use crate::lab::Lab;
use crate::observe;
use crate::program::{Program, wait_for};
use crate::report::Limit::{AtLeast, AtMost, Exactly};
use crate::report::{Bound, bound, median};
use crate::series::Series;
use crate::traffic::{Came, Sent, now_ms};
use crate::transfers::{Order, Server, Transfers};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "stack-switch",
    summary: "numbered datagrams and TCP transfers whose live flows are carried by each of the stacks in turns",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 10] = [
    bound("lost", Exactly(0.0)),
    bound("duplicated", Exactly(0.0)),
    bound("reordered", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("resets", Exactly(0.0)),
    // The longest gap at a change over that of as long a time without.
    bound("gap_ratio_p50", AtMost(2.0)),
    // Of a flow's first change to a stack, and of those that come back to it.
    bound("gap_first_ms_p50", AtMost(10.0)),
    // On two processors as long a time without a change has gaps of 4 to 5 ms: 3 cannot be told from none.
    bound("gap_cached_ms_p50", AtMost(10.0)),
    bound("changes", AtLeast(60.0)),
    bound("failed", Exactly(0.0)),
];

const SERVICE: &str = "count.shop";
const NAME: &str = "count.shop.sal.internal";
const PORT: u16 = 9;
/// Each run sends from a port of its own, none that the kernel gives out.
const FIRST_PORT: u16 = 20_000;
const BULK_SERVICE: &str = "bulk.shop";
const BULK_NAME: &str = "bulk.shop.sal.internal";
const BULK_PORT: u16 = 5010;
/// Eight, both ways.
const WAYS: [&str; 8] =
    ["up:cubic", "down:cubic", "up:cubic", "down:cubic", "up:bbr", "down:bbr", "up:cubic", "down:cubic"];
/// Bytes per second of each.
const PACE: u64 = 2_000_000;
/// Changes of transfers' flows.
const BULK_CHANGES: usize = 50;
const LIMIT: Duration = Duration::from_secs(20);
/// How long the rate of each stack is measured.
const MEASURED: Duration = Duration::from_millis(800);
/// After a change, and without one: gaps within are the change's, or nobody's.
const WINDOW: Duration = Duration::from_millis(150);

/// How a flow is carried in turns: what is ordered, and what lists call it.
#[derive(Clone, Copy)]
struct Ways {
    stack: &'static str,
    path: &'static str,
    other: &'static str,
    other_path: &'static str,
}

const PAIRS: [Ways; 8] = [
    Ways { stack: "plain", path: "encapsulated", other: "secure", other_path: "secure" },
    Ways { stack: "plain", path: "direct", other: "secure", other_path: "secure" },
    Ways { stack: "plain", path: "encapsulated", other: "fec", other_path: "fec" },
    Ways { stack: "plain", path: "direct", other: "fec", other_path: "fec" },
    Ways { stack: "plain", path: "encapsulated", other: "sctp", other_path: "sctp" },
    Ways { stack: "plain", path: "direct", other: "sctp", other_path: "sctp" },
    // A flow that is sealed stays so.
    Ways { stack: "secure", path: "secure", other: "fec", other_path: "secure-fec" },
    Ways { stack: "secure", path: "secure", other: "sctp", other_path: "secure-sctp" },
];

struct Stage<'a> {
    client: &'a Host,
    server: &'a Host,
    sink: Program,
    runs: u32,
}

/// The gaps of changes, in milliseconds.
#[derive(Default)]
struct Gaps {
    first_ms: Vec<f64>,
    cached_ms: Vec<f64>,
    ratios: Vec<f64>,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = pair::build(SCENARIO.name, dir)?;
    let _agents = Agents::start(&lab)?;
    for figure in ["lost", "duplicated", "reordered", "wrong_bytes", "changes", "failed"] {
        findings.figures.add(figure, 0.0);
    }
    let mut stage = prepare(&lab)?;
    let hosts = [stage.client, stage.server];
    pair::demand_kernel(&hosts, findings)?;
    let rate = slowest_rate(&mut stage)? / 2;
    findings.note(format!("the slowest stack carries {} datagrams/s", rate * 2));
    let mut gaps = Gaps::default();
    let (rounds, turns) = if is_long() { (6, 10) } else { (2, 3) };
    for round in 0..rounds {
        for pair in PAIRS {
            let what = format!("round {round}, {} and {}", pair.path, pair.other_path);
            pair::attempt_part(&what, findings, |findings| switch(&mut stage, pair, rate, turns, &mut gaps, findings));
        }
    }
    findings.set("gap_first_ms_p50", median(&gaps.first_ms));
    findings.set("gap_cached_ms_p50", median(&gaps.cached_ms));
    findings.set("gap_ratio_p50", median(&gaps.ratios));
    pair::attempt_part("transfers", findings, |findings| transfer(&stage, findings));
    pair::report_resets(&hosts, findings)
}

fn prepare(lab: &Lab) -> Result<Stage<'_>> {
    let client = lab.host("client")?;
    let server = lab.host("server")?;
    let command = server.traffic(["numbered-sink", "--listen", &format!("0.0.0.0:{PORT}")])?;
    let sink = Program::start(command, &server.dir.join("numbered-sink.log"))?;
    wait_for("a sink", LIMIT, || sink.log().contains("ready").then_some(()).context("it is not ready"))?;
    agent::publish(server, SERVICE, &format!("0.0.0.0:{PORT}"), &[])?;
    agent::await_instances(client, SERVICE, 1)?;
    for host in [client, server] {
        observe::count_virtual_resets(host)?;
    }
    Ok(Stage { client, server, sink, runs: 0 })
}

impl Stage<'_> {
    /// Begins a run of datagrams; gives its number, its program and its flow.
    fn begin(&mut self, rate: u64) -> Result<(u32, Series<Sent>, String)> {
        self.runs += 1;
        let run = self.runs;
        // From the port of a run before, datagrams go by that run's flow, which lives for minutes.
        let from = u64::from(FIRST_PORT) + u64::from(run);
        let [port, number, rate, from] = [u64::from(PORT), run.into(), rate, from].map(|word| word.to_string());
        let words = ["numbered", NAME, &port, "--run", &number, "--rate", &rate, "--from", &from].map(str::to_owned);
        let known = flows(self.client, SERVICE, "udp")?;
        let series = Series::start(self.client, &words)?;
        let flow = wait_for("the flow of a run", LIMIT, || {
            let now = flows(self.client, SERVICE, "udp")?;
            now.into_iter().find(|flow| !known.contains(flow)).context("there is none")
        })?;
        self.await_datagrams(run)?;
        Ok((run, series, flow))
    }

    fn await_datagrams(&self, run: u32) -> Result<()> {
        wait_for("datagrams of a run", LIMIT, || {
            let has_come = self.came(run).last().is_some_and(|came| came.received > 0);
            has_come.then_some(()).context("none has come")
        })
    }

    /// What the sink has said of a run.
    fn came(&self, run: u32) -> Vec<Came> {
        // The last line may be half-written.
        let log = self.sink.log();
        log.lines().filter_map(|line| serde_json::from_str::<Came>(line).ok()).filter(|came| came.run == run).collect()
    }

    /// The longest gap that ended since a moment, and until another one, in milliseconds; all of that time, where
    /// nothing came.
    fn longest_gap_ms(&self, run: u32, from_ms: f64, to_ms: f64) -> f64 {
        let within = |came: &Came| (from_ms - 10.0..to_ms).contains(&(came.unix_ms as f64));
        let gaps = self.came(run).into_iter().filter(within).map(|came| came.longest_gap_us as f64 / 1e3);
        gaps.reduce(f64::max).unwrap_or(to_ms - from_ms)
    }

    /// Ends a run, and counts what has become of it.
    fn finish(&self, run: u32, series: Series<Sent>, pair: Ways, findings: &mut Findings) -> Result<()> {
        let sent = series.finish(LIMIT)?.first().context("a sender has said nothing")?.sent;
        // What is under way comes within moments, or never.
        let _ = wait_for("all datagrams of a run", Duration::from_secs(2), || {
            let received = self.came(run).last().map_or(0, |came| came.received);
            ensure!(received >= sent, "{received} of {sent} have come");
            Ok(())
        });
        let last = self.came(run).last().copied().context("nothing has come")?;
        let lost = sent.saturating_sub(last.received);
        if lost + last.duplicated + last.reordered + last.wrong > 0 {
            let drops = [self.client, self.server].map(|host| (host.name(), observe::drops(host)));
            findings.note(format!("run {run}: {lost} of {sent} lost; {last:?}; dropped by now: {drops:?}"));
        }
        // By `sctp` datagrams have no order, nor have those behind a change to what went by it before.
        let reordered = if pair.other == "sctp" { "reordered_sctp" } else { "reordered" };
        for (figure, count) in [
            ("lost", lost),
            ("duplicated", last.duplicated),
            (reordered, last.reordered),
            ("wrong_bytes", last.wrong),
            ("datagrams", sent),
        ] {
            findings.figures.add(figure, count as f64);
        }
        Ok(())
    }
}

/// The open flows of a service that programs here have begun.
fn flows(host: &Host, service: &str, protocol: &str) -> Result<Vec<String>> {
    let open = agent::open_flows(host, service, protocol)?;
    let own = open.iter().filter(|flow| flow["role"] == "initiator" && flow["lifecycle"] == "established");
    Ok(own.filter_map(|flow| flow["flow"].as_str()).map(str::to_owned).collect())
}

/// How many datagrams a second arrive of a flow that goes by the slowest of the other stacks.
fn slowest_rate(stage: &mut Stage<'_>) -> Result<u64> {
    let mut slowest = u64::MAX;
    for stack in ["secure", "fec", "secure-fec", "sctp", "secure-sctp"] {
        slowest = slowest.min(rate_of(stage, stack)?);
    }
    Ok(slowest)
}

fn rate_of(stage: &mut Stage<'_>, stack: &str) -> Result<u64> {
    let (run, series, flow) = stage.begin(0)?;
    agent::set_stack(stage.client, &flow, stack)?;
    let from = received(stage, run);
    let start = Instant::now();
    sleep(MEASURED);
    let rate = (received(stage, run) - from) as f64 / start.elapsed().as_secs_f64();
    // How many of those were lost that came too fast is of no interest.
    series.finish(LIMIT)?;
    ensure!(rate >= 100.0, "no more than {rate} datagrams/s arrive by `{stack}`");
    Ok(rate as u64)
}

fn received(stage: &Stage<'_>, run: u32) -> u64 {
    stage.came(run).last().map_or(0, |came| came.received)
}

/// One flow of datagrams, carried in two ways in turns.
fn switch(
    stage: &mut Stage<'_>,
    pair: Ways,
    rate: u64,
    turns: usize,
    gaps: &mut Gaps,
    findings: &mut Findings,
) -> Result<()> {
    for host in [stage.client, stage.server] {
        agent::cache(host, if pair.path == "direct" { "load" } else { "unload" })?;
    }
    let (run, series, flow) = stage.begin(rate)?;
    if pair.stack != "plain" {
        agent::set_stack(stage.client, &flow, pair.stack)?;
    }
    for turn in 0..turns * 2 {
        let is_other = turn % 2 == 0;
        let (to, path) = if is_other { (pair.other, pair.other_path) } else { (pair.stack, pair.path) };
        await_path(stage, &flow, if is_other { pair.path } else { pair.other_path })?;
        // What the question itself takes of the machine is in both.
        let quiet_ms = now_ms();
        agent::stack(stage.client, &flow)?;
        sleep(WINDOW);
        let begun_ms = now_ms();
        let orderer = if turn / 2 % 2 == 0 { stage.client } else { stage.server };
        agent::set_stack(orderer, &number_at(stage, orderer, &flow)?, to)?;
        sleep(WINDOW);
        let until_ms = now_ms();
        await_path(stage, &flow, path)?;
        findings.figures.add("changes", 1.0);
        let gap_ms = stage.longest_gap_ms(run, begun_ms, until_ms);
        let quiet_gap_ms = stage.longest_gap_ms(run, quiet_ms, begun_ms);
        progress(&format!("to {path}: {gap_ms:.2} ms, {quiet_gap_ms:.2} ms before"));
        if turn < 2 { &mut gaps.first_ms } else { &mut gaps.cached_ms }.push(gap_ms);
        gaps.ratios.push(gap_ms / quiet_gap_ms.max(1.0));
    }
    stage.finish(run, series, pair, findings)
}

/// The number that a host has given the client's flow.
fn number_at(stage: &Stage<'_>, host: &Host, flow: &str) -> Result<String> {
    if host.name() == stage.client.name() {
        return Ok(flow.to_owned());
    }
    let shown = agent::stack(stage.client, flow)?;
    Ok(shown["peer_flow"].as_str().context("the peer has no number of the flow")?.to_owned())
}

/// Waits until both directions of the client's flow go by a path.
fn await_path(stage: &Stage<'_>, flow: &str, path: &str) -> Result<()> {
    wait_for(&format!("a flow that goes {path}"), LIMIT, || {
        for host in [stage.client, stage.server] {
            let shown = agent::stack(host, &number_at(stage, host, flow)?)?;
            let is_calm = shown["stack"]["changing_to"].as_str().is_none_or(str::is_empty);
            if shown["path"] != path || !is_calm {
                bail!("on {} it goes {}: {}", host.name(), shown["path"], shown["path_why"]);
            }
        }
        Ok(())
    })
}

/// Transfers, whose flows are changed one after the other.
fn transfer(stage: &Stage<'_>, findings: &mut Findings) -> Result<()> {
    let mut server = Server::start(stage.server, BULK_PORT, false)?;
    agent::publish(stage.server, BULK_SERVICE, &format!("0.0.0.0:{BULK_PORT}"), &[])?;
    agent::await_instances(stage.client, BULK_SERVICE, 1)?;
    let mut transfers = Transfers::start(stage.client, &mut server, Order { to: BULK_NAME, ways: &WAYS, pace: PACE })?;
    let flows = flows(stage.client, BULK_SERVICE, "tcp")?;
    ensure!(flows.len() >= WAYS.len(), "there are {} flows of transfers", flows.len());
    for change in 0..BULK_CHANGES {
        let to = if change / flows.len() % 2 == 0 { "secure" } else { "plain" };
        agent::set_stack(stage.client, &flows[change % flows.len()], to)?;
        findings.figures.add("changes", 1.0);
    }
    transfers.await_bytes("transfers after all changes", 100_000, LIMIT)?;
    let sealed = flows.iter().map(|flow| Ok(agent::stack(stage.client, flow)?["path"] == "secure"));
    let sealed: Vec<bool> = sealed.collect::<Result<_>>()?;
    let wanted = (0..flows.len()).map(|flow| ((BULK_CHANGES - 1 - flow) / flows.len()).is_multiple_of(2));
    ensure!(sealed.iter().copied().eq(wanted), "of {} flows these are sealed: {sealed:?}", flows.len());
    transfers.finish("transfers", findings)
}
