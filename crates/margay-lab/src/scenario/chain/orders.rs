//! `chain-orders`: one order at the router puts a scrubber into the running sessions of all hosts, under transfers and
//! datagrams, and another one takes it out. One host has no sessions, and the agent of another one is dead meanwhile.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::insert_remove::leaks;
use super::{ZONE, apply, build, chain, serve};
use crate::agent::{self, Agents, margay};
use crate::host::Host;
use crate::lab::Lab;
use crate::observe;
use crate::program::{Program, wait_for};
use crate::report::Limit::Exactly;
use crate::report::{Bound, bound};
use crate::scenario::{Findings, Scenario, pair};
use crate::series::Series;
use crate::traffic::Sent;
use crate::transfers::{Order, Server, Transfers};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "chain-orders",
    summary: "one order at the router changes the boxes of sessions on all hosts",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 6] = [
    bound("not_changed", Exactly(0.0)),
    bound("not_named", Exactly(0.0)),
    bound("resets", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("leaks", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

const SCRUBBER: &str = "scrub.shop";
const BULK: &str = "bulk.shop";
const BULK_PORT: u16 = 5010;
const WAYS: [&str; 4] = ["up:cubic", "down:cubic", "up:cubic", "down:cubic"];
/// Bytes per second of each transfer.
const PACE: u64 = 1_000_000;
const COUNT: &str = "count.shop";
const COUNT_PORT: u16 = 9;
/// Datagrams a second.
const RATE: &str = "500";
const LIMIT: Duration = Duration::from_secs(20);
/// How long the order waits for the host whose agent is dead.
const WAIT: &str = "4s";

struct Stage<'a> {
    lab: &'a Lab,
    router: &'a Host,
    client: &'a Host,
    other: &'a Host,
    away: &'a Host,
    scrubber: &'a Host,
}

/// What an order has come to.
struct Ended {
    report: Value,
    succeeded: bool,
}

impl Ended {
    fn number(&self, of: &str) -> u64 {
        self.report[of].as_u64().unwrap_or_default()
    }

    /// Hosts in one state.
    fn hosts(&self, state: &str) -> Vec<&str> {
        let all = self.report["hosts"].as_array().into_iter().flatten();
        all.filter(|host| host["state"] == state).filter_map(|host| host["host_name"].as_str()).collect()
    }
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = build("chain-orders", 1, &["other", "away"], dir)?;
    let _agents = Agents::start(&lab)?;
    let [router, client, server] = [lab.host("router")?, lab.host("client")?, lab.host("server")?];
    let stage = Stage {
        lab: &lab,
        router,
        client,
        other: lab.host("other")?,
        away: lab.host("away")?,
        scrubber: lab.host("box1")?,
    };
    serve(stage.scrubber, SCRUBBER, "forward", &[])?;
    let hosts: Vec<&Host> = lab.hosts.iter().collect();
    apply(router, &chain("known", "nobody.shop", &[SCRUBBER], ""), &hosts, &["known"])?;
    for host in [client, stage.other, server] {
        observe::count_virtual_resets(host)?;
    }
    for figure in ["not_changed", "not_named", "wrong_bytes", "leaks", "failed"] {
        findings.figures.add(figure, 0.0);
    }
    let mut bulk = Server::start(server, BULK_PORT, false)?;
    agent::publish(server, BULK, &format!("0.0.0.0:{BULK_PORT}"), &[])?;
    let command = server.traffic(["numbered-sink", "--listen", &format!("0.0.0.0:{COUNT_PORT}")])?;
    let sink = Program::start(command, &server.dir.join("numbered-sink.log"))?;
    wait_for("a sink", LIMIT, || sink.log().contains("ready").then_some(()).context("it is not ready"))?;
    agent::publish(server, COUNT, &format!("0.0.0.0:{COUNT_PORT}"), &[])?;
    agent::await_instances(client, BULK, 1)?;
    agent::await_instances(client, SCRUBBER, 1)?;
    agent::await_instances(stage.other, COUNT, 1)?;
    let order = Order { to: &format!("{BULK}.{ZONE}"), ways: &WAYS, pace: PACE };
    let mut transfers = Transfers::start(client, &mut bulk, order)?;
    let words = ["numbered", &format!("{COUNT}.{ZONE}"), "9", "--run", "1", "--rate", RATE].map(str::to_owned);
    let series: Series<Sent> = Series::start(stage.other, &words)?;
    wait_for("a session of datagrams", LIMIT, || {
        ensure!(agent::open_flows(stage.other, COUNT, "udp")?.len() == 1, "there is none");
        Ok(())
    })?;
    refused(&stage)?;
    orders(&stage, findings)?;
    transfers.await_bytes("transfers after all orders", 100_000, LIMIT)?;
    transfers.finish("transfers", findings)?;
    series.finish(LIMIT)?;
    leaks(stage.scrubber, findings)?;
    pair::report_resets(&[client, stage.other, server], findings)
}

/// What nobody can carry out is refused where it is said, and no host hears of it.
fn refused(stage: &Stage<'_>) -> Result<()> {
    let insert = |name: &'static str, of: &'static str| ["chain", "insert", name, "--everywhere", "--name", of];
    for (host, words, wanted) in [
        (stage.router, insert("other.shop", "*.shop"), "no chain of the policy names the box other.shop"),
        (stage.client, insert(SCRUBBER, "*.shop"), "this host is no router"),
        (stage.router, insert(SCRUBBER, "web.elsewhere"), "no key of the authority"),
        (stage.router, insert("scrub.shop/key:1", "*.shop"), "is no box"),
    ] {
        let said = margay(host, words);
        let error = said.err().map(|error| format!("{error:#}")).unwrap_or_default();
        ensure!(error.contains(wanted), "`{wanted}` is not in: {error}");
    }
    let nobody = [&insert(SCRUBBER, "*.shop")[..], &["--from", "group:nobody"]].concat();
    let error = margay(stage.router, nobody).err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(error.contains("no host of shop is meant"), "of an empty group: {error}");
    for host in &stage.lab.hosts {
        ensure!(acts(host)?.is_empty(), "{} has heard of an order that was refused", host.name());
    }
    Ok(())
}

/// Entries of the audit log that are about orders, the oldest first.
fn acts(host: &Host) -> Result<Vec<String>> {
    let log: Value = serde_json::from_str(&margay(host, ["audit", "list", "--json"])?)?;
    let entries = log["entries"].as_array().into_iter().flatten().rev();
    let acts = entries.filter_map(|entry| entry["act"].as_str()).filter(|act| act.starts_with("chain-order"));
    Ok(acts.map(str::to_owned).collect())
}

impl Stage<'_> {
    fn order(&self, words: &[&str]) -> Result<Ended> {
        let program = crate::fabric::margay_program()?;
        let program = program.to_str().context("a path that is no text")?;
        let words = [&[program, "chain"], words, &["--name", "*.shop", "--everywhere", "--json"]].concat();
        let output = self.router.output(words.iter().copied())?;
        let report = serde_json::from_slice(&output.stdout)
            .with_context(|| format!("{words:?}: {}", String::from_utf8_lossy(&output.stderr)))?;
        Ok(Ended { report, succeeded: output.status.success() })
    }

    /// Carries an order out, and compares what has become of it.
    fn expect(
        &self,
        words: &[&str],
        asked: usize,
        changed: u64,
        silent: &[&str],
        findings: &mut Findings,
    ) -> Result<()> {
        let ended = self.order(words)?;
        let (has_changed, named) = (ended.number("changed"), ended.hosts("silent"));
        if has_changed != changed || ended.number("as_before") > 0 || ended.number("asked") != asked as u64 {
            findings.note(format!("{words:?}: {changed} of {asked} hosts to be changed: {}", ended.report));
            findings.figures.add("not_changed", changed.saturating_sub(has_changed).max(1) as f64);
        }
        if named != silent || ended.succeeded != silent.is_empty() {
            findings.note(format!("{words:?}: {silent:?} to be named: {}", ended.report));
            findings.figures.add("not_named", 1.0);
        }
        Ok(())
    }
}

fn orders(stage: &Stage<'_>, findings: &mut Findings) -> Result<()> {
    let all = stage.lab.hosts.len();
    let sessions = WAYS.len() as u64 + 1;
    agent::kill(stage.away)?;
    let away = [stage.away.name()];
    stage.expect(&["insert", SCRUBBER, "--wait", WAIT], all, sessions, &away, findings)?;
    let at_box = agent::flows(stage.scrubber)?.iter().filter(|flow| !flow["chain"].is_null()).count() as u64;
    ensure!(at_box >= sessions, "{at_box} flows pass the scrubber, and {sessions} sessions are to");
    // What comes back later finds nothing to do.
    agent::start_again(stage.away)?;
    ensure!(acts(stage.away)?.is_empty(), "a host has begun with an order whose life was over");
    stage.expect(&["remove", SCRUBBER], all, sessions, &[], findings)?;
    let id = agent::status(stage.client)?["host_id"].as_str().unwrap_or_default().to_owned();
    let client = format!("host:{id}");
    let of_client = WAYS.len() as u64;
    stage.expect(&["insert", SCRUBBER, "--from", &client, "--protocol", "tcp"], 1, of_client, &[], findings)?;
    // Those of datagrams go straight: a box that is not there is none to be taken out.
    let mixed = stage.order(&["remove", SCRUBBER])?;
    let is_counted = mixed.number("changed") == of_client && mixed.number("as_before") == 1 && !mixed.succeeded;
    ensure!(is_counted, "four sessions have the box and one has not: {}", mixed.report);
    let done = ["chain-order", "chain-order", "chain-order", "chain-order"];
    ensure!(acts(stage.client)? == done, "the client's log has {:?}", acts(stage.client)?);
    let of_router = acts(stage.router)?.into_iter().filter(|act| act == "chain-order-over").count();
    ensure!(of_router == 4, "the router's log has the end of {of_router} orders");
    ensure!(acts(stage.other)?.last().map(String::as_str) == Some("chain-order-failed"), "{:?}", acts(stage.other)?);
    Ok(())
}
