//! `primary-failover`: two PostgreSQL servers with streaming replication hold one exclusive, fenced name. The host of
//! the primary is cut off the network, and the standby promoted as soon as its agent says that it holds the name.
//! Sessions of clients learn at once that theirs are over, and write to the new primary; programs on the old primary's
//! own side are told as well, and nothing of theirs is acknowledged any more.

mod database;
mod log;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use self::database::Database;
use self::log::Log;
use super::{Findings, Scenario, is_long, pair, site};
use crate::agent::{self, Agents};
use crate::arrivals::now_ms;
use crate::host::Host;
use crate::lab::Lab;
use crate::program::{Program, wait_for};
use crate::report::Limit::{AtLeast, Below, Exactly};
use crate::report::{Bound, bound, percentile};
use crate::wire;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "primary-failover",
    summary: "sessions of PostgreSQL whose primary's host is cut off, while the standby takes a fenced name over",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 9] = [
    // Until sessions of clients have an error; and until each has a row acknowledged again.
    bound("error_ms_p99", Below(3000.0)),
    bound("write_again_ms", Below(8000.0)),
    bound("hung", Exactly(0.0)),
    // Acknowledged by the old primary when the standby was about to be promoted, or later: to anybody, by name.
    bound("old_primary_writes", Exactly(0.0)),
    // Before anything happened.
    bound("early", Exactly(0.0)),
    // Otherwise plain TCP does as well.
    bound("plain_hung", AtLeast(1.0)),
    // Programs on the old primary's host, once that is back: they reach the new one.
    bound("own_side_written", AtLeast(1.0)),
    bound("not_explained", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

const SERVICE: &str = "db.shop";
const NAME: &str = "db.shop.sal.internal";
const PORT: &str = "5432";
const OPTIONS: [&str; 2] = ["--exclusive", "--fence"];
/// Where a pooler listens on the client.
const POOLER_PORT: &str = "6432";
const LIMIT: Duration = Duration::from_secs(20);
/// A host that lost its router asks for it less and less often.
const BACK_LIMIT: Duration = Duration::from_secs(60);
/// A session that has no error by then hangs.
const HUNG_LIMIT: Duration = Duration::from_secs(8);
/// When plain sessions are looked at, after the cut.
const PLAIN_MS: f64 = 10_000.0;
const PLAIN_LONG_MS: f64 = 30_000.0;

/// Sessions of one program.
struct Group {
    name: &'static str,
    /// How many write all the time, and how many wait.
    busy: usize,
    idle: usize,
}

/// Of the client, by name; and those of them by a pooler. Twenty together.
const NAMED: Group = Group { name: "named", busy: 8, idle: 8 };
const POOLED: Group = Group { name: "pooled", busy: 2, idle: 2 };
/// To the primary's address.
const PLAIN: Group = Group { name: "plain", busy: 4, idle: 4 };
/// On the primary's own host, by name.
const OWN_SIDE: Group = Group { name: "own-side", busy: 2, idle: 2 };

struct Stage<'a> {
    lab: &'a Lab,
    client: &'a Host,
    primary: Database<'a>,
    standby: Database<'a>,
    named: Log,
    pooled: Log,
    plain: Log,
    own_side: Log,
    _pooler: Option<Program>,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = site::build(SCENARIO.name, site::V4, &["db1", "db2", "client"], dir)?;
    let _agents = Agents::start(&lab)?;
    for figure in ["hung", "early", "old_primary_writes", "not_explained", "own_side_written", "failed"] {
        findings.set(figure, 0.0);
    }
    let stage = set_up(&lab, dir, findings)?;
    let promoter = stage.standby.promote_when_held(SERVICE)?;
    let cut_ms = now_ms();
    wire::set_link(&lab.topology, stage.primary.host, false)?;
    pair::attempt_part("sessions of clients", findings, |findings| stage.judge_sessions(cut_ms, findings));
    pair::attempt_part("what the old primary acknowledged", findings, |findings| {
        stage.judge_own_side(cut_ms, &promoter, findings)
    });
    pair::attempt_part("what the client's agent says", findings, |findings| judge_words(stage.client, findings));
    pair::attempt_part("plain sessions", findings, |findings| {
        stage.judge_plain(cut_ms, findings);
        Ok(())
    });
    pair::attempt_part("the old primary's return", findings, |findings| stage.mend(findings));
    Ok(())
}

/// Two servers, the first of which holds the name, and all sessions open.
fn set_up<'a>(lab: &'a Lab, dir: &Path, findings: &mut Findings) -> Result<Stage<'a>> {
    let client = lab.host("client")?;
    let primary = Database::primary(lab.host("db1")?)?;
    let address = pair::address(primary.host)?;
    let standby = Database::standby(lab.host("db2")?, &address)?;
    let listen = format!("0.0.0.0:{PORT}");
    agent::publish(primary.host, SERVICE, &listen, &OPTIONS)?;
    agent::margay(standby.host, ["service", "publish", SERVICE, "--listen", &listen].into_iter().chain(OPTIONS))?;
    agent::await_instances(client, SERVICE, 1)?;
    let pooler = database::pooler(client, NAME)?;
    if pooler.is_none() {
        findings.note("pgbouncer is not installed: all sessions go by name themselves");
    }
    let script = dir.join("sessions.py");
    std::fs::write(&script, include_str!("sessions.py")).context("cannot write the sessions' script")?;
    let (pooled_to, pooled_port) = if pooler.is_some() { ("127.0.0.1", POOLER_PORT) } else { (NAME, PORT) };
    let stage = Stage {
        lab,
        client,
        named: Log::start(client, &script, &NAMED, NAME, PORT)?,
        pooled: Log::start(client, &script, &POOLED, pooled_to, pooled_port)?,
        plain: Log::start(client, &script, &PLAIN, &address, PORT)?,
        own_side: Log::start(primary.host, &script, &OWN_SIDE, NAME, PORT)?,
        primary,
        standby,
        _pooler: pooler,
    };
    for log in [&stage.named, &stage.pooled, &stage.plain, &stage.own_side] {
        log.await_open(LIMIT)?;
    }
    Ok(stage)
}

impl Stage<'_> {
    fn of_clients(&self) -> [&Log; 2] {
        [&self.named, &self.pooled]
    }

    /// When each session of clients has an error, and when it has written again.
    fn judge_sessions(&self, cut_ms: f64, findings: &mut Findings) -> Result<()> {
        let all: usize = self.of_clients().iter().map(|log| log.sessions).sum();
        // What it would say is counted below.
        let _ = wait_for("errors of all sessions", HUNG_LIMIT, || {
            let told: usize = self.of_clients().iter().map(|log| log.first_failures_ms(cut_ms).len()).sum();
            ensure!(told == all, "{told} of {all} have one");
            Ok(())
        });
        let mut errors_ms = Vec::new();
        for log in self.of_clients() {
            let first_ms = log.first_failures_ms(cut_ms);
            let hung = log.sessions - first_ms.len();
            if hung > 0 {
                findings.note(format!("{hung} sessions ({}) have no error", log.name));
            }
            findings.figures.add("hung", hung as f64);
            findings.figures.add("early", log.failures_before(cut_ms) as f64);
            errors_ms.extend(first_ms.into_iter().map(|at_ms| at_ms - cut_ms));
        }
        findings.set("error_ms_p99", percentile(&errors_ms, 99.0));
        findings.set("error_ms_p50", percentile(&errors_ms, 50.0));
        wait_for("rows at the new primary", LIMIT, || {
            let written: usize = self.of_clients().iter().map(|log| log.first_written_ms("db2").len()).sum();
            ensure!(written == all, "{written} of {all} sessions have written");
            Ok(())
        })?;
        let written = self.of_clients().into_iter().flat_map(|log| log.first_written_ms("db2"));
        findings.set("write_again_ms", written.map(|at_ms| at_ms - cut_ms).fold(0.0, f64::max));
        Ok(())
    }

    /// Sessions on the old primary's own host have an error as well, and nothing is acknowledged there from when the
    /// standby is about to be promoted.
    fn judge_own_side(&self, cut_ms: f64, promoter: &Program, findings: &mut Findings) -> Result<()> {
        let held_ms = wait_for("the standby's promotion", LIMIT, || database::promoted_ms(promoter))?;
        findings.set("held_ms", held_ms - cut_ms);
        let first_ms = self.own_side.first_failures_ms(cut_ms);
        findings.figures.add("hung", (self.own_side.sessions - first_ms.len()) as f64);
        let each_ms: Vec<f64> = first_ms.into_iter().map(|at_ms| at_ms - cut_ms).collect();
        findings.set("own_side_error_ms_max", percentile(&each_ms, 100.0));
        let logs = [&self.named, &self.pooled, &self.own_side];
        let late: usize = logs.iter().map(|log| log.written_since("db1", held_ms)).sum();
        if late > 0 {
            findings.note(format!("the old primary has acknowledged {late} rows after the standby held the name"));
        }
        findings.figures.add("old_primary_writes", late as f64);
        Ok(())
    }

    /// Plain TCP beside it.
    fn judge_plain(&self, cut_ms: f64, findings: &mut Findings) {
        let until_ms = cut_ms + if is_long() { PLAIN_LONG_MS } else { PLAIN_MS };
        // That nothing happens cannot be waited for.
        std::thread::sleep(Duration::from_secs_f64((until_ms - now_ms()).max(0.0) / 1e3));
        let hung = self.plain.sessions - self.plain.first_failures_ms(cut_ms).len();
        findings.set("plain_hung", hung as f64);
    }

    /// The old primary's host is back: it stays without the name, and its programs reach the new primary by it.
    fn mend(&self, findings: &mut Findings) -> Result<()> {
        wire::set_link(&self.lab.topology, self.primary.host, true)?;
        wait_for("rows of the old primary's programs at the new one", BACK_LIMIT, || {
            let written = self.own_side.first_written_ms("db2").len();
            ensure!(written == self.own_side.sessions, "{written} sessions have written");
            Ok(())
        })?;
        findings.set("own_side_written", self.own_side.first_written_ms("db2").len() as f64);
        // Its programs may be at the new primary before its agent has reached the router.
        wait_for("the router's refusal", BACK_LIMIT, || {
            let shown = agent::show(self.primary.host, SERVICE)?["service"].clone();
            ensure!(shown["held"] != true && shown["state"] == "refused", "the old primary says: {shown}");
            Ok(())
        })
    }
}

/// The agent of the clients says who was given up, and upon what.
fn judge_words(client: &Host, findings: &mut Findings) -> Result<()> {
    let text = agent::margay(client, ["flow", "list", "--failed", "--json"])?;
    let list: serde_json::Value = serde_json::from_str(&text).context("flow list is not JSON")?;
    let flows = list["flows"].as_array().cloned().unwrap_or_default();
    let of_name: Vec<_> = flows.iter().filter(|flow| flow["name"] == SERVICE).collect();
    ensure!(!of_name.is_empty(), "no flow of {SERVICE} has failed: {list}");
    let is_explained = |flow: &&&serde_json::Value| {
        let why = flow["ended_why"].as_str().unwrap_or_default();
        flow["ended_by"] == "elsewhere" && why.contains("is held by")
    };
    let explained = of_name.iter().filter(is_explained).count();
    if explained == 0 {
        findings.note(format!("none is explained; one: {}", of_name[0]));
        findings.figures.add("not_explained", 1.0);
    }
    let given_up = agent::metric(client, "margay_peers_given_up_total{cause=\"elsewhere\"}")?;
    ensure!(given_up >= 1.0, "the agent counts {given_up} peers whose name is held elsewhere");
    Ok(())
}
