//! `insert-remove`: a scrubber is put into running sessions and taken out of them, again and again: under transfers
//! both ways of which every byte is checked, and under numbered datagrams. Then it gives its place to another one.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{apply, build, chain, serve};
use crate::agent::{self, Agents, READY_LIMIT, margay};
use crate::command::progress;
use crate::host::Host;
use crate::lab::Lab;
use crate::observe::{self, Passing};
use crate::program::{Program, wait_for};
use crate::report::Limit::Exactly;
use crate::report::{Bound, bound, median};
use crate::scenario::{Findings, Scenario, is_long, pair};
use crate::series::Series;
use crate::traffic::{Came, Sent};
use crate::transfers::{Order, Server, Transfers};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "insert-remove",
    summary: "a scrubber is put into running sessions and taken out of them, again and again",
    bounds: &BOUNDS,
    run,
};

pub(super) const BOUNDS: [Bound; 6] = [
    bound("incomplete", Exactly(0.0)),
    bound("resets", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("not_scrubbed", Exactly(0.0)),
    bound("leaks", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

pub(super) const BULK_SERVICE: &str = "bulk.shop";
const BULK_NAME: &str = "bulk.shop.sal.internal";
pub(super) const BULK_PORT: u16 = 5010;
const WAYS: [&str; 2] = ["up:cubic", "down:cubic"];
/// Bytes per second of each transfer.
const PACE: u64 = 2_000_000;
const COUNT_SERVICE: &str = "count.shop";
const COUNT_NAME: &str = "count.shop.sal.internal";
const COUNT_PORT: u16 = 9;
/// Datagrams a second.
const RATE: u64 = 1000;
const SCRUBBER: &str = "scrub.shop";
const OTHER: &str = "scrub2.shop";
const LIMIT: Duration = Duration::from_secs(20);

pub(super) struct Stage<'a> {
    pub client: &'a Host,
    pub server: &'a Host,
    boxes: [&'a Host; 2],
    /// Where changes are ordered.
    pub orders_at: &'a Host,
    took_ms: Vec<f64>,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    changes(&build("insert-remove", 2, &[], dir)?, findings)
}

/// The whole of it, in a lab of client, server, two boxes and a router.
pub(super) fn changes(lab: &Lab, findings: &mut Findings) -> Result<()> {
    let _agents = Agents::start(lab)?;
    let mut stage = prepare(lab, &[], findings)?;
    for figure in ["lost", "duplicated"] {
        findings.figures.add(figure, 0.0);
    }
    pair::attempt_part("transfers", findings, |findings| transfers(&mut stage, findings));
    pair::attempt_part("datagrams", findings, |findings| datagrams(&mut stage, findings));
    stage.report(findings)
}

/// The two boxes, and a policy that knows them. `more`: chains beside that one, by their names.
pub(super) fn prepare<'a>(lab: &'a Lab, more: &[(&str, String)], findings: &mut Findings) -> Result<Stage<'a>> {
    for figure in ["completed", "incomplete", "wrong_bytes", "not_scrubbed", "leaks", "failed"] {
        findings.figures.add(figure, 0.0);
    }
    let client = lab.host("client")?;
    let server = lab.host("server")?;
    let boxes = [lab.host("box1")?, lab.host("box2")?];
    serve(boxes[0], SCRUBBER, "forward", &[])?;
    serve(boxes[1], OTHER, "sniff", &[])?;
    for one in boxes {
        observe::count(one, "passed", Passing::In, "iifname \"sal0\"")?;
    }
    // No session gets this chain: it says which boxes the authority knows.
    let known = chain("known", "nobody.shop", &[SCRUBBER, OTHER], "");
    let policy: String = more.iter().map(|(_, chain)| chain.as_str()).chain([known.as_str()]).collect();
    let names: Vec<&str> = more.iter().map(|(name, _)| *name).chain(["known"]).collect();
    let hosts = [lab.host("router")?, client, server, boxes[0], boxes[1]];
    apply(hosts[0], &policy, &hosts, &names)?;
    for host in [client, server] {
        observe::count_virtual_resets(host)?;
    }
    for name in [SCRUBBER, OTHER] {
        agent::await_instances(client, name, 1)?;
    }
    Ok(Stage { client, server, boxes, orders_at: client, took_ms: Vec::new() })
}

impl Stage<'_> {
    /// What all changes have cost, and left behind.
    pub(super) fn report(&self, findings: &mut Findings) -> Result<()> {
        findings.set("change_ms_p50", median(&self.took_ms));
        self.boxes.iter().try_for_each(|one| leaks(one, findings))?;
        pair::report_resets(&[self.client, self.server], findings)
    }

    /// Changes the boxes of all sessions to a name; counts how many it has worked for.
    fn change(&mut self, words: &[&str], name: &str, wanted: usize, findings: &mut Findings) -> Result<()> {
        let begun = Instant::now();
        let said = margay(self.orders_at, [&["chain"], words, &["--name", name, "--json"]].concat());
        self.took_ms.push(begun.elapsed().as_secs_f64() * 1e3);
        let done = match &said {
            Ok(said) => {
                let reply: Value = serde_json::from_str(said)?;
                reply["changed"].as_array().into_iter().flatten().filter(|one| one["outcome"] == "done").count()
            }
            Err(_) => 0,
        };
        if done < wanted {
            findings.note(format!("{words:?} of {name}: {said:?}"));
        }
        findings.figures.add("completed", done as f64);
        findings.figures.add("incomplete", wanted.saturating_sub(done) as f64);
        Ok(())
    }

    fn passed(&self, at: usize) -> Result<f64> {
        Ok(observe::counts(self.boxes[at])?.get("passed").map_or(0.0, |count| count.packets))
    }

    /// Whether packets pass a box now.
    fn await_passing(&self, at: usize, findings: &mut Findings) -> Result<()> {
        let before = self.passed(at)?;
        let passes = wait_for("packets at a box", LIMIT, || {
            ensure!(self.passed(at)? > before + 10.0, "none passes {}", self.boxes[at].name());
            Ok(())
        });
        if let Err(error) = passes {
            findings.note(format!("{error:#}"));
            findings.figures.add("not_scrubbed", 1.0);
        }
        Ok(())
    }

    /// Puts the scrubber into all sessions to a name and takes it out; at last another one takes its place.
    pub(super) fn rounds(&mut self, name: &str, sessions: usize, rounds: usize, findings: &mut Findings) -> Result<()> {
        for round in 0..rounds {
            self.change(&["insert", SCRUBBER], name, sessions, findings)?;
            self.await_passing(0, findings)?;
            if round + 1 == rounds {
                self.change(&["replace", SCRUBBER, "--by", OTHER], name, sessions, findings)?;
                self.await_passing(1, findings)?;
                self.change(&["remove", OTHER], name, sessions, findings)?;
            } else {
                self.change(&["remove", SCRUBBER], name, sessions, findings)?;
            }
            progress(&format!("{name}: round {round}"));
        }
        Ok(())
    }
}

/// The server of transfers, which is published.
pub(super) fn bulk(stage: &Stage<'_>) -> Result<Server> {
    let server = Server::start(stage.server, BULK_PORT, false)?;
    agent::publish(stage.server, BULK_SERVICE, &format!("0.0.0.0:{BULK_PORT}"), &[])?;
    agent::await_instances(stage.client, BULK_SERVICE, 1)?;
    Ok(server)
}

fn transfers(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let mut server = bulk(stage)?;
    let order = Order { to: BULK_NAME, ways: &WAYS, pace: PACE };
    let mut transfers = Transfers::start(stage.client, &mut server, order)?;
    let rounds = if is_long() { 50 } else { 4 };
    stage.rounds(BULK_SERVICE, WAYS.len(), rounds, findings)?;
    transfers.await_bytes("transfers after all changes", 100_000, LIMIT)?;
    transfers.finish("transfers", findings)
}

fn datagrams(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let command = stage.server.traffic(["numbered-sink", "--listen", &format!("0.0.0.0:{COUNT_PORT}")])?;
    let sink = Program::start(command, &stage.server.dir.join("numbered-sink.log"))?;
    wait_for("a sink", LIMIT, || sink.log().contains("ready").then_some(()).context("it is not ready"))?;
    agent::publish(stage.server, COUNT_SERVICE, &format!("0.0.0.0:{COUNT_PORT}"), &[])?;
    agent::await_instances(stage.client, COUNT_SERVICE, 1)?;
    let [port, rate] = [u64::from(COUNT_PORT), RATE].map(|word| word.to_string());
    let words = ["numbered", COUNT_NAME, &port, "--run", "1", "--rate", &rate].map(str::to_owned);
    let series: Series<Sent> = Series::start(stage.client, &words)?;
    let came = || {
        let log = sink.log();
        log.lines().filter_map(|line| serde_json::from_str::<Came>(line).ok()).next_back()
    };
    wait_for("datagrams", LIMIT, || {
        ensure!(came().is_some_and(|came| came.received > 0), "none has come");
        Ok(())
    })?;
    stage.rounds(COUNT_SERVICE, 1, if is_long() { 5 } else { 1 }, findings)?;
    let sent = series.finish(LIMIT)?.first().context("a sender has said nothing")?.sent;
    // What is under way comes within moments, or never.
    let _ = wait_for("all datagrams", Duration::from_secs(2), || {
        ensure!(came().is_some_and(|came| came.received >= sent), "some have not come");
        Ok(())
    });
    let last = came().context("nothing has come")?;
    for (figure, count) in [
        ("datagrams", sent),
        ("lost", sent.saturating_sub(last.received)),
        ("duplicated", last.duplicated),
        ("reordered", last.reordered),
        ("wrong_bytes", last.wrong),
    ] {
        findings.figures.add(figure, count as f64);
    }
    Ok(())
}

/// Flows that a box's agent has not forgotten although their sessions go another way.
pub(super) fn leaks(one: &Host, findings: &mut Findings) -> Result<()> {
    let left = || -> Result<Vec<Value>> {
        Ok(agent::flows(one)?.into_iter().filter(|flow| !flow["chain"].is_null()).collect())
    };
    let is_empty = wait_for(&format!("no flows at {}", one.name()), READY_LIMIT, || {
        let left = left()?;
        ensure!(left.is_empty(), "{} are left", left.len());
        Ok(())
    });
    if let Err(error) = is_empty {
        findings.note(format!("{error:#}"));
        let left = left()?;
        left.iter().for_each(|flow| progress(&format!("{}: this flow is left: {flow}", one.name())));
        findings.figures.add("leaks", left.len() as f64);
    }
    Ok(())
}
