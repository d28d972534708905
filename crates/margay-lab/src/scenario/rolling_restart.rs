//! `rolling-restart`: web servers of one name are restarted one after the other under requests and downloads; each is
//! drained before. Then the same with HAProxy in front of the same servers, drained by its runtime API with the same
//! deadline.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{Findings, Scenario, is_long, pair, site};
use crate::agent::{self, Agents};
use crate::arrivals::{Arrival, Arrivals, now_ms};
use crate::downloads::{self, Download, Downloads, Order};
use crate::draining::Drain;
use crate::entries::{self, Entries};
use crate::host::Host;
use crate::observe;
use crate::program::{Program, wait_for};
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::server::{Nginx, await_listener, noise, sha256};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "rolling-restart",
    summary: "nginx is drained and restarted on one host after the other, under load; beside it the same by HAProxy",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 9] = [
    bound("wrong_bytes", Exactly(0.0)),
    bound("resets", Exactly(0.0)),
    // At full length there are more. A server that is not restarted ends its part, and counts as a failure.
    bound("restarts", AtLeast(SHORT.servers as f64)),
    // Otherwise there were none to speak of.
    bound("requests", AtLeast(200.0)),
    // Otherwise drains had nothing to wait for.
    bound("finished_in_drains", AtLeast(1.0)),
    // Otherwise there is nothing to compare with: how many failed there has no bound.
    bound("haproxy_restarts", AtLeast(SHORT.servers as f64)),
    bound("haproxy_requests", AtLeast(200.0)),
    bound("leaked_entries", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

pub(super) const SERVICE: &str = "web.shop";
pub(super) const NAME: &str = "web.shop.sal.internal";
/// Short runs have the first of them.
const SERVERS: [&str; 5] = ["web1", "web2", "web3", "web4", "web5"];
pub(super) const LISTEN: &str = "0.0.0.0:80";
const PORT: u16 = 80;
/// The answer ends with the instance's name.
const ASK: &str = "GET /host HTTP/1.0\\r\\n\\r\\n";
const EVERY: Duration = Duration::from_millis(20);
const LIMIT: Duration = Duration::from_secs(20);
/// More than the longest of them takes.
const DOWNLOADS_LIMIT: Duration = Duration::from_secs(90);
/// HAProxy's name of the servers.
const BACKEND: &str = "web";
/// Where the sessions that a server has now are in its line of statistics, after the two names: behind those that wait
/// now, and the most that did.
const SESSIONS_COLUMN: usize = 2;

/// A file, and how fast each download of it is.
#[derive(Clone, Copy)]
struct Load {
    path: &'static str,
    bytes: usize,
    pace: u64,
    /// Whether a download is shorter than the deadline of a drain: none may fail then, and with each restart new ones
    /// begin.
    ends_in_time: bool,
}

/// How much, and for how long.
struct Length {
    servers: usize,
    deadline_s: u64,
    /// At once.
    downloads: usize,
    ending: Load,
}

const SHORT: Length = Length {
    servers: 3,
    deadline_s: 4,
    downloads: 24,
    ending: Load { path: "ending", bytes: 2_400_000, pace: 1_000_000, ends_in_time: true },
};
const LONG: Length = Length {
    servers: SERVERS.len(),
    deadline_s: 10,
    downloads: 100,
    ending: Load { path: "ending", bytes: 2_400_000, pace: 400_000, ends_in_time: true },
};
/// A minute, at full length only: no drain waits for it.
const LASTING: Load = Load { path: "lasting", bytes: 12_000_000, pace: 200_000, ends_in_time: false };

struct Stage<'a> {
    client: &'a Host,
    servers: Vec<&'a Host>,
    /// One on each server.
    running: Vec<Nginx>,
    length: Length,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let length = if is_long() { LONG } else { SHORT };
    let names = &SERVERS[..length.servers];
    let lab = site::build(SCENARIO.name, site::V4, &[names, &["proxy", "client"]].concat(), dir)?;
    let _agents = Agents::start(&lab)?;
    let client = lab.host("client")?;
    let proxy = lab.host("proxy")?;
    let servers = names.iter().map(|name| lab.host(name)).collect::<Result<Vec<_>>>()?;
    let hosts: Vec<&Host> = std::iter::once(client).chain(servers.iter().copied()).collect();
    pair::demand_kernel(&hosts, findings)?;
    let running = servers.iter().map(|host| serve(host)).collect::<Result<Vec<_>>>()?;
    agent::await_instances(client, SERVICE, servers.len())?;
    let mut stage = Stage { client, servers, running, length };
    // All instances are known, and what that takes is there.
    stage.await_all()?;
    let before = Entries::settled(&hosts)?;
    hosts.iter().try_for_each(|host| observe::count_virtual_resets(host))?;

    let ending = stage.length.ending;
    pair::attempt_part("restarts", findings, |findings| roll(&mut stage, &Front::Margay, ending, findings));
    pair::attempt_part("resets", findings, |findings| pair::report_resets(&hosts, findings));
    if is_long() {
        pair::attempt_part("restarts under downloads that last", findings, |findings| {
            roll(&mut stage, &Front::Margay, LASTING, findings)
        });
    }
    pair::attempt_part("restarts behind HAProxy", findings, |findings| {
        let front = Front::HaProxy(HaProxy::start(proxy, &stage.servers)?);
        roll(&mut stage, &front, ending, findings)?;
        if is_long() { roll(&mut stage, &front, LASTING, findings) } else { Ok(()) }
    });
    pair::attempt_part("what is left", findings, |findings| entries::report_leaks(&hosts, &before, findings));
    Ok(())
}

fn serve(host: &Host) -> Result<Nginx> {
    let nginx = Nginx::start(host, &[LISTEN])?;
    agent::publish(host, SERVICE, LISTEN, &[])?;
    Ok(nginx)
}

/// Requests at a fixed rate, to the service's name or to an address.
pub(super) fn connect(client: &Host, to: &str) -> Result<Arrivals> {
    Arrivals::start(client, to, PORT, EVERY, Some(ASK))
}

/// Which instance answered; empty when none did.
pub(super) fn instance(arrival: &Arrival) -> &str {
    arrival.answered.lines().last().unwrap_or_default().trim()
}

pub(super) fn has_failed(arrival: &Arrival) -> bool {
    !arrival.error.is_empty() || !SERVERS.contains(&instance(arrival))
}

/// Waits until an instance answers a request that begins after this.
pub(super) fn await_answer(arrivals: &mut Arrivals, server: &Host) -> Result<()> {
    let from_ms = now_ms();
    wait_for(&format!("an answer of {}", server.name()), LIMIT, || {
        let mut since = arrivals.until(now_ms(), LIMIT)?.filter(|arrival| arrival.begun_ms > from_ms);
        ensure!(since.any(|arrival| instance(arrival) == server.name()), "there is none");
        Ok(())
    })
}

impl Stage<'_> {
    fn await_all(&self) -> Result<()> {
        let mut arrivals = connect(self.client, NAME)?;
        self.servers.iter().try_for_each(|server| await_answer(&mut arrivals, server))?;
        arrivals.stop()
    }

    /// Puts the file of a load on all servers, and gives its hash.
    fn put(&self, load: Load) -> Result<String> {
        let content = noise(load.bytes, 1);
        self.running.iter().try_for_each(|nginx| nginx.put(load.path, &content))?;
        sha256(self.client, &self.running[0].root.join(load.path))
    }

    /// Starts downloads. Returns when each receives; or has failed, which is judged with the others.
    fn download(&self, host: &str, load: Load) -> Result<Downloads> {
        let count = self.length.downloads;
        let mut begun = Downloads::start(self.client, Order { host, path: load.path, count, pace: load.pace })?;
        let is_begun = |progress: downloads::Progress| progress.open + progress.ended >= count;
        begun.await_progress("the start of all downloads", LIMIT, is_begun)?;
        Ok(begun)
    }

    /// Ends a server's nginx, and starts another one in its place.
    fn restart(&mut self, server: usize) -> Result<()> {
        // Both have the same port.
        self.running[server].program.stop();
        self.running[server] = Nginx::start(self.servers[server], &[LISTEN])?;
        Ok(())
    }
}

/// Who sends connections to the servers, and can keep them away from one.
enum Front {
    /// The service's name.
    Margay,
    /// An address between client and servers.
    HaProxy(HaProxy),
}

impl Front {
    fn address(&self) -> &str {
        match self {
            Self::Margay => NAME,
            Self::HaProxy(haproxy) => &haproxy.address,
        }
    }

    /// What one of its figures is called.
    fn figure(&self, name: &str) -> String {
        match self {
            Self::Margay => name.to_owned(),
            Self::HaProxy(_) => format!("haproxy_{name}"),
        }
    }

    /// Takes a server out of service. Returns when nothing of it is open; at the latest at the deadline.
    fn drain(&self, server: &Host, deadline_s: u64, findings: &mut Findings) -> Result<()> {
        match self {
            Self::Margay => drain(server, deadline_s, findings),
            Self::HaProxy(haproxy) => haproxy.drain(server, deadline_s, findings),
        }
    }

    fn undrain(&self, server: &Host) -> Result<()> {
        match self {
            Self::Margay => agent::undrain(server, SERVICE),
            Self::HaProxy(haproxy) => haproxy.set_state(server, "ready"),
        }
    }
}

/// Restarts all servers, one after the other, under requests and downloads.
fn roll(stage: &mut Stage<'_>, front: &Front, load: Load, findings: &mut Findings) -> Result<()> {
    let sha256 = stage.put(load)?;
    let mut arrivals = connect(stage.client, front.address())?;
    let mut running = vec![stage.download(front.address(), load)?];
    for server in 0..stage.servers.len() {
        let host = stage.servers[server];
        front.drain(host, stage.length.deadline_s, findings)?;
        if load.ends_in_time {
            // They are open while the server is away, and when the next one is drained.
            running.push(stage.download(front.address(), load)?);
        }
        stage.restart(server)?;
        front.undrain(host)?;
        await_answer(&mut arrivals, host)?;
        findings.figures.add(&front.figure("restarts"), 1.0);
        if load.ends_in_time {
            let results = running.remove(0).finish(DOWNLOADS_LIMIT)?;
            judge_downloads(front, load, &results, &sha256, findings);
        }
    }
    for last in running {
        judge_downloads(front, load, &last.finish(DOWNLOADS_LIMIT)?, &sha256, findings);
    }
    judge_requests(front, &mut arrivals, findings)
}

/// Counts what became of downloads. Those that last may be cut.
fn judge_downloads(front: &Front, load: Load, results: &[Download], sha256: &str, findings: &mut Findings) {
    let mut judged = Findings::default();
    downloads::judge(&format!("a download from {}", front.address()), results, sha256, &mut judged);
    let mut add = |name: &str, count: f64| findings.figures.add(&front.figure(name), count);
    add("wrong_bytes", judged.figures.get("wrong_bytes"));
    if load.ends_in_time {
        add("downloads", results.len() as f64);
        add("failed", judged.figures.get("failed"));
        findings.notes.append(&mut judged.notes);
    } else {
        add("lasting_downloads", results.len() as f64);
        add("cut", judged.figures.get("failed"));
    }
}

/// None has failed, whoever was drained; and no more begin.
fn judge_requests(front: &Front, arrivals: &mut Arrivals, findings: &mut Findings) -> Result<()> {
    let seen: Vec<&Arrival> = arrivals.until(now_ms(), LIMIT)?.collect();
    let failed: Vec<&Arrival> = seen.iter().copied().filter(|arrival| has_failed(arrival)).collect();
    // The first few tell as much as all of them.
    for arrival in failed.iter().take(3) {
        let at_ms = arrival.begun_ms - seen[0].begun_ms;
        let Arrival { took_ms, answered, error, .. } = arrival;
        let to = front.address();
        findings
            .note(format!("a request to {to} begun at {at_ms:.0} ms, after {took_ms:.0} ms: {error}; {answered:?}"));
    }
    findings.figures.add(&front.figure("failed"), failed.len() as f64);
    findings.figures.add(&front.figure("requests"), seen.len() as f64);
    let slowest_ms = seen.iter().map(|arrival| arrival.took_ms).fold(0.0, f64::max);
    let of_slowest = front.figure("request_ms_max");
    findings.set(&of_slowest, findings.figures.get(&of_slowest).max(slowest_ms));
    arrivals.stop()
}

/// What a report counts of all its names together.
fn counted(report: &Value, of: &str) -> f64 {
    let services = report["services"].as_array().into_iter().flatten();
    services.filter_map(|service| service[of].as_f64()).sum()
}

/// `margay drain`. Returns when it is over.
fn drain(server: &Host, deadline_s: u64, findings: &mut Findings) -> Result<()> {
    let deadline = format!("{deadline_s}s");
    let drain = Drain::start(server, &[SERVICE, "--deadline", &deadline])?;
    let report = drain.finish(Duration::from_secs(deadline_s) + LIMIT)?;
    ensure!(report["name"] == SERVICE && report["phase"] == "over", "the report of {}: {report}", server.name());
    findings.figures.add("finished_in_drains", counted(&report, "finished"));
    findings.figures.add("reset_in_drains", counted(&report, "reset"));
    Ok(())
}

/// HAProxy in TCP mode, and its runtime API.
struct HaProxy {
    address: String,
    socket: PathBuf,
    /// It ends with this.
    _program: Program,
}

impl HaProxy {
    /// Starts it in front of servers. Returns when it listens.
    fn start(host: &Host, servers: &[&Host]) -> Result<Self> {
        let socket = host.dir.join("haproxy.sock");
        let mut text = format!(
            "global\n  maxconn 4096\n  stats socket {} level admin\ndefaults\n  mode tcp\n  timeout connect 5s\n  \
             timeout client 2m\n  timeout server 2m\nlisten {BACKEND}\n  bind {LISTEN}\n",
            socket.display()
        );
        for server in servers {
            text.push_str(&format!("  server {} {}:{PORT}\n", server.name(), pair::address(server)?));
        }
        let config = host.dir.join("haproxy.cfg");
        std::fs::write(&config, text).with_context(|| format!("cannot write {}", config.display()))?;
        let argv = ["haproxy", "-db", "-f"].map(Path::new);
        let mut program = host.spawn("haproxy", argv.into_iter().chain([config.as_path()]))?;
        await_listener(host, &mut program, &PORT.to_string())?;
        Ok(Self { address: pair::address(host)?, socket, _program: program })
    }

    /// Says one command to it, and gives the answer.
    fn ask(&self, command: &str) -> Result<String> {
        let socket = UnixStream::connect(&self.socket);
        let mut socket = socket.with_context(|| format!("cannot reach {}", self.socket.display()))?;
        socket.set_read_timeout(Some(LIMIT))?;
        socket.write_all(format!("{command}\n").as_bytes())?;
        let mut answer = String::new();
        socket.read_to_string(&mut answer).with_context(|| format!("no answer of HAProxy to {command}"))?;
        Ok(answer)
    }

    /// `drain`, or `ready`.
    fn set_state(&self, server: &Host, state: &str) -> Result<()> {
        let command = format!("set server {BACKEND}/{} state {state}", server.name());
        let answer = self.ask(&command)?;
        ensure!(answer.trim().is_empty(), "HAProxy says to {command}: {answer}");
        Ok(())
    }

    /// Sessions that a server has now.
    fn sessions(&self, server: &Host) -> Result<u64> {
        let statistics = self.ask("show stat")?;
        let names = format!("{BACKEND},{},", server.name());
        let row = statistics.lines().find_map(|line| line.strip_prefix(&names));
        let sessions: Option<u64> = row.and_then(|row| row.split(',').nth(SESSIONS_COLUMN)?.parse().ok());
        sessions.with_context(|| format!("HAProxy does not tell of {}: {statistics}", server.name()))
    }

    /// No new sessions; those that there are have time until the deadline.
    fn drain(&self, server: &Host, deadline_s: u64, findings: &mut Findings) -> Result<()> {
        self.set_state(server, "drain")?;
        let mut left = None;
        let limit = Duration::from_secs(deadline_s);
        let emptied = wait_for(&format!("the end of sessions of {}", server.name()), limit, || {
            let sessions = self.sessions(server)?;
            left = Some(sessions);
            ensure!(sessions == 0, "{sessions} are left");
            Ok(())
        });
        match left {
            // What is left ends with the server, and is counted there.
            Some(left) => findings.figures.add("haproxy_left_in_drains", left as f64),
            None => emptied?,
        }
        Ok(())
    }
}
