//! `quiet-end`: two hosts serve a name with Redis, a web server and a server of idle connections; one after the other
//! is drained so that quiet connections end in order. Clients that ask all the time lose no request and see no reset,
//! and go on at the other host.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::{Findings, Scenario, pair, site};
use crate::agent::{self, Agents};
use crate::arrivals::now_ms;
use crate::draining::Drain;
use crate::entries::{self, Entries};
use crate::host::Host;
use crate::idle::{self, lost, standing};
use crate::program::{Program, wait_for};
use crate::report::Limit::{AtLeast, Below, Exactly};
use crate::report::{Bound, bound};
use crate::series::Series;
use crate::server::{self, Nginx, await_listener};
use crate::traffic::{Idle, Pooled, Turn};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "quiet-end",
    summary: "a host is drained of connections that ask now and then: they end in order, between two requests",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 11] = [
    bound("requests_cut", Exactly(0.0)),
    bound("failed_connects", Exactly(0.0)),
    // Connections that were quiet when they were reset.
    bound("resets_movable", Exactly(0.0)),
    bound("empty_after_ms", Below(3000.0)),
    bound("report_wrong", Exactly(0.0)),
    // Otherwise there were none to speak of: of each drain, those that stood at the host.
    bound("ended_quietly", AtLeast(20.0)),
    bound("answers", AtLeast(100.0)),
    // Of the host that is not drained.
    bound("ended_elsewhere", Exactly(0.0)),
    bound("dry_run_wrong", Exactly(0.0)),
    bound("leaked_entries", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

const SERVICE: &str = "kv.shop";
const NAME: &str = "kv.shop.sal.internal";
const SERVERS: [&str; 2] = ["kv1", "kv2"];
const REDIS_PORT: u16 = 6379;
const WEB_PORT: u16 = 80;
const IDLE_PORT: u16 = 7;
const QUIET_MS: &str = "50";
const DEADLINE: &str = "10s";
/// Connections of each kind: so many that both hosts have some.
const COUNT: usize = 16;
const REDIS_EVERY_MS: &str = "200";
const WEB_EVERY_MS: &str = "700";
const LIMIT: Duration = Duration::from_secs(20);

/// The programs of a server.
struct Serving {
    _redis: Program,
    _nginx: Nginx,
    _greeter: Program,
}

/// The connections of the client.
struct Clients {
    redis: Series<Pooled>,
    web: Series<Pooled>,
    idle: Series<Idle>,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = site::build(SCENARIO.name, site::V4, &[&SERVERS[..], &["client"]].concat(), dir)?;
    let _agents = Agents::start(&lab)?;
    let client = lab.host("client")?;
    let servers = [lab.host(SERVERS[0])?, lab.host(SERVERS[1])?];
    let hosts = [client, servers[0], servers[1]];
    pair::demand_kernel(&hosts, findings)?;
    let _serving = servers.into_iter().map(serve).collect::<Result<Vec<_>>>()?;
    agent::await_instances(client, SERVICE, servers.len())?;
    // What hosts need that have not met is no leak.
    Clients::open(client, &servers)?.end()?;
    let before = Entries::settled(&hosts)?;
    for figure in ["report_wrong", "ended_quietly", "ended_elsewhere", "dry_run_wrong", "resets_movable"] {
        findings.set(figure, 0.0);
    }
    // By the operator's order, and then as the service says.
    let orders: [&[&str]; 2] = [
        &[SERVICE, "--deadline", DEADLINE, "--when", "quiet", "--quiet-ms", QUIET_MS],
        &[SERVICE, "--deadline", DEADLINE],
    ];
    for (drained, words) in orders.into_iter().enumerate() {
        let what = format!("the drain of {}", SERVERS[drained]);
        pair::attempt_part(&what, findings, |findings| drain(client, &servers, drained, words, findings));
    }
    pair::attempt_part("what is left", findings, |findings| entries::report_leaks(&hosts, &before, findings));
    Ok(())
}

/// One name with three ports; its drains end quiet connections.
fn serve(host: &Host) -> Result<Serving> {
    let redis_port = REDIS_PORT.to_string();
    let data = host.dir.join("redis");
    std::fs::create_dir_all(&data).with_context(|| format!("cannot make {}", data.display()))?;
    let data = data.display().to_string();
    let options = ["--bind", "0.0.0.0", "--protected-mode", "no", "--save", "", "--dir", &data];
    let mut redis = host.spawn("redis", ["redis-server", "--port", &redis_port].iter().chain(&options))?;
    await_listener(host, &mut redis, &redis_port)?;
    host.run(["redis-cli", "-p", &redis_port, "SET", "host", host.name()])?;
    let nginx = Nginx::start(host, &["0.0.0.0:80"])?;
    let greeter = server::greeter(host, ([0; 4], IDLE_PORT).into())?;
    for port in [REDIS_PORT, WEB_PORT, IDLE_PORT] {
        let quiet = ["--on-drain", "quiet", "--quiet-ms", QUIET_MS];
        agent::publish(host, SERVICE, &format!("0.0.0.0:{port}"), &quiet)?;
    }
    Ok(Serving { _redis: redis, _nginx: nginx, _greeter: greeter })
}

impl Clients {
    /// Opens all of them, until both servers have some of each kind: what the client's kernel opens by a grant goes to
    /// one server for a second.
    fn open(client: &Host, servers: &[&Host; 2]) -> Result<Self> {
        wait_for("connections of each kind at both servers", LIMIT, || Self::try_open(client, servers))
    }

    fn try_open(client: &Host, servers: &[&Host; 2]) -> Result<Self> {
        let redis = pooled(client, REDIS_PORT, "redis", REDIS_EVERY_MS)?;
        let web = pooled(client, WEB_PORT, "http", WEB_EVERY_MS)?;
        let idle = idle::open(client, NAME, IDLE_PORT, COUNT)?;
        let clients = Self { redis, web, idle };
        let counts = servers.map(|server| clients.standing(server));
        if counts.iter().flatten().all(|count| *count > 0) {
            return Ok(clients);
        }
        clients.end()?;
        bail!("of Redis, of the web, and idle ones there are {counts:?}")
    }

    /// Connections that stand at a server: of Redis, of the web, and idle ones.
    fn standing(&self, server: &Host) -> [usize; 3] {
        let of = |series: &Series<Pooled>| {
            let last: BTreeMap<usize, Pooled> = series.lines().into_iter().map(|one| (one.number, one)).collect();
            last.values().filter(|one| is_answered(one) && one.server == server.name()).count()
        };
        [of(&self.redis), of(&self.web), standing(&self.idle, server).len()]
    }

    /// Closes all of them.
    fn end(self) -> Result<()> {
        self.redis.finish(LIMIT)?;
        self.web.finish(LIMIT)?;
        self.idle.finish(LIMIT).map(drop)
    }

    /// All turns of connections that ask.
    fn turns(&self) -> Vec<Pooled> {
        [self.redis.lines(), self.web.lines()].concat()
    }
}

/// Begins connections that ask, and waits until each was answered.
fn pooled(client: &Host, port: u16, protocol: &str, every_ms: &str) -> Result<Series<Pooled>> {
    let count = COUNT.to_string();
    let to = ["pooled", NAME, &port.to_string()].map(str::to_owned);
    let how = ["--protocol", protocol, "--count", &count, "--every-ms", every_ms].map(str::to_owned);
    let series: Series<Pooled> = Series::start(client, &to.into_iter().chain(how).collect::<Vec<_>>())?;
    wait_for(&format!("answers of {protocol}"), LIMIT, || {
        let answered: BTreeSet<usize> = series.lines().into_iter().filter(is_answered).map(|one| one.number).collect();
        ensure!(answered.len() == COUNT, "{} of {COUNT} are answered", answered.len());
        Ok(())
    })?;
    Ok(series)
}

fn is_answered(one: &Pooled) -> bool {
    one.turn == Turn::Answered
}

/// What a report counts of all its names together.
fn counted(report: &Value, of: &str) -> f64 {
    let services = report["services"].as_array().into_iter().flatten();
    services.filter_map(|service| service[of].as_f64()).sum()
}

/// Drains one of the two servers under load, and lets it serve again.
fn drain(client: &Host, servers: &[&Host; 2], drained: usize, words: &[&str], findings: &mut Findings) -> Result<()> {
    let (drained, other) = (servers[drained], servers[1 - drained]);
    let clients = Clients::open(client, servers)?;
    dry_run(&clients, drained, words, findings)?;
    let here: usize = clients.standing(drained).iter().sum();
    let order = Drain::start(drained, words)?;
    let begun_ms = order.begun_ms;
    let report = order.finish(LIMIT)?;
    let after_ms = now_ms() - begun_ms;
    findings.set("empty_after_ms", findings.figures.get("empty_after_ms").max(after_ms));
    findings.figures.add("ended_quietly", counted(&report, "quiet"));
    // A connection whose client has heard of its end before this host has counts as one that has finished. Kernels may
    // open some by grants for a moment.
    let ended = counted(&report, "quiet") + counted(&report, "finished");
    let is_over = report["name"] == SERVICE && report["phase"] == "over" && counted(&report, "open") == 0.0;
    if !is_over || counted(&report, "reset") != 0.0 || ended < here as f64 {
        findings.figures.add("report_wrong", 1.0);
        findings.note(format!("{here} were to end quietly; the report: {report}"));
    }
    // All of them have gone on there.
    wait_for(&format!("connections at {}", other.name()), LIMIT, || {
        let [redis, web, _] = clients.standing(other);
        ensure!(redis == COUNT && web == COUNT, "{redis} of Redis and {web} of the web are there");
        Ok(())
    })?;
    judge(clients, other, findings)?;
    agent::undrain(drained, SERVICE)?;
    agent::await_instances(client, SERVICE, servers.len())
}

/// Says what a drain would meet, and changes nothing.
fn dry_run(clients: &Clients, drained: &Host, words: &[&str], findings: &mut Findings) -> Result<()> {
    let here: usize = clients.standing(drained).iter().sum();
    let mut last = Value::Null;
    // Those that the kernels have begun by grants are listed a moment later, and those that ask are not always quiet.
    let right = wait_for("a dry run that counts what there is", LIMIT, || {
        last = Drain::start(drained, &[words, &["--dry-run"]].concat())?.finish(LIMIT)?;
        let counts = ["open", "quiet"].map(|of| counted(&last, of));
        let idle = standing(&clients.idle, drained).len() as f64;
        ensure!(
            counts[0] == here as f64 && (idle..=counts[0]).contains(&counts[1]),
            "{here} stand; it says {counts:?}"
        );
        Ok(())
    });
    if right.is_err() {
        findings.figures.add("dry_run_wrong", 1.0);
        findings.note(format!("the dry run: {last}"));
    }
    Ok(())
}

/// What became of the connections, which are closed now.
fn judge(clients: Clients, other: &Host, findings: &mut Findings) -> Result<()> {
    let turns = clients.turns();
    let count = |turn: Turn| turns.iter().filter(|one| one.turn == turn).count() as f64;
    findings.figures.add("requests_cut", count(Turn::Cut));
    findings.figures.add("failed_connects", count(Turn::Refused));
    findings.figures.add("answers", count(Turn::Answered));
    let lost = lost(&clients.idle);
    let resets = count(Turn::Reset) + lost.values().filter(|one| one.reset).count() as f64;
    findings.figures.add("resets_movable", resets);
    let ended = turns.iter().filter(|one| !is_answered(one) && one.server == other.name()).count();
    let idle_ended = lost.values().filter(|one| one.server == other.name()).count();
    findings.figures.add("ended_elsewhere", (ended + idle_ended) as f64);
    // The first few tell as much as all of them.
    for one in turns.iter().filter(|one| matches!(one.turn, Turn::Cut | Turn::Refused | Turn::Reset)).take(3) {
        findings.note(format!("{:?} of {:?}, after {} answers: {}", one.turn, one.server, one.answers, one.error));
    }
    clients.end()
}
