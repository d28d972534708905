//! `memcached-switch`: memcaslap with 64 connections asks four memcacheds through a switch and, in turns, through
//! nutcracker. Either stands on the same host, which has one processor for itself; clients and servers have the other.
//! What a request costs that processor; how long answers take at a rate that is the same for both.

use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

use super::ensemble::{await_members, shown};
use super::{Findings, Scenario, is_long, pair, site};
use crate::agent::{self, Agents};
use crate::arrivals::now_ms;
use crate::command::progress;
use crate::host::Host;
use crate::lab::Lab;
use crate::observe;
use crate::program::{Program, output_within, tail};
use crate::report::Limit::{AtLeast, AtMost, Exactly};
use crate::report::{Bound, bound, median};
use crate::server::await_listener;
use crate::traffic::Paced;
use crate::turns::End;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "memcached-switch",
    summary: "memcaslap asks four memcacheds through a switch and through nutcracker: what a request costs either",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 5] = [
    bound("cpu_per_request_ratio", AtMost(1.0)),
    bound("p99_ratio", AtMost(2.0)),
    bound("wrong_answers", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
    // Otherwise there was no load to speak of.
    bound("requests", AtLeast(2000.0)),
];

const ENSEMBLE: &str = "cache.shop";
const MEMBERS: &str = "cache-members.shop";
const MEMBER_HOSTS: [&str; 4] = ["m1", "m2", "m3", "m4"];
/// Of the memcacheds, and of the framer.
const PORT: &str = "11211";
const PROXY_PORT: &str = "22121";
/// The processor of the box, and that of everybody else.
const BOX_PROCESSOR: usize = 0;
const OTHER_PROCESSOR: usize = 1;
const CONNECTIONS: u32 = 64;
const LIMIT: Duration = Duration::from_secs(30);
/// Connections are set up, their flows become direct, and values are stored.
const WARM: Duration = Duration::from_secs(1);
/// What memcaslap asks for: 24 bytes of key, 100 of value, nine of ten requests are `get`.
const MIX: &str = "key\n24 24 1\nvalue\n100 100 1\ncmd\n0 0.1\n1 0.9\n";

/// How long each part lasts.
struct Length {
    rounds: usize,
    /// What is measured of a run; the run is longer by what goes before, and by half a second behind.
    window: Duration,
    paced_seconds: u32,
}

const SHORT: Length = Length { rounds: 2, window: Duration::from_millis(1500), paced_seconds: 1 };
const LONG: Length = Length { rounds: 7, window: Duration::from_millis(4500), paced_seconds: 5 };
/// What memcaslap asks in the binary protocol.
const BINARY_REQUESTS: &str = "4000";
/// Requests of all connections in a second, where the rate is given.
const PACED_PER_S: u32 = 3000;

/// A way to the memcacheds.
#[derive(Clone, Debug)]
struct Way {
    name: &'static str,
    /// Address and port, as clients have them.
    to: String,
    /// The switch, or the proxy.
    pid: u32,
}

/// What one run of memcaslap has cost.
#[derive(Clone, Copy, Debug)]
struct Cost {
    requests: f64,
    busy_s: f64,
    /// The part of it that the switch or the proxy has used itself: the rest is the kernel's, and the agent's.
    process_s: f64,
    window_s: f64,
}

impl Cost {
    fn per_request_us(self) -> f64 {
        self.busy_s * 1e6 / self.requests
    }

    fn process_per_request_us(self) -> f64 {
        self.process_s * 1e6 / self.requests
    }
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let processors = std::thread::available_parallelism().context("the number of processors is not known")?.get();
    ensure!(processors > OTHER_PROCESSOR, "the box wants a processor for itself, and there is one in all");
    // Whatever is started from here is not on the box's processor.
    pin_to(OTHER_PROCESSOR)?;
    let names = [&MEMBER_HOSTS[..], &["box", "client"]].concat();
    let lab = site::build(SCENARIO.name, site::V4, &names, dir)?;
    let _agents = Agents::start(&lab)?;
    let middle = lab.host("box")?;
    let client = lab.host("client")?;
    for host in &lab.hosts {
        End::bind(host, if host.name() == "box" { BOX_PROCESSOR } else { OTHER_PROCESSOR })?;
    }
    middle.run(["taskset", "-acp", &BOX_PROCESSOR.to_string(), &agent::pid(middle)?.to_string()])?;
    let _members = MEMBER_HOSTS.iter().map(|name| start_member(lab.host(name)?)).collect::<Result<Vec<_>>>()?;
    let serve = ["margay", "ensemble", "serve", ENSEMBLE, "--members", MEMBERS];
    let switch = on_box(middle, "switch", &serve)?;
    let proxy = start_nutcracker(&lab, middle)?;
    await_members(middle, ENSEMBLE, MEMBER_HOSTS.len())?;
    let mut framer = client.spawn("framer", ["margay", "ensemble", "framer", "memcached", "--service", ENSEMBLE])?;
    await_listener(client, &mut framer, PORT)?;
    let ways = [
        Way { name: "switch", to: format!("127.0.0.1:{PORT}"), pid: switch.pid() },
        Way { name: "nutcracker", to: format!("{}:{PROXY_PORT}", pair::address(middle)?), pid: proxy.pid() },
    ];
    std::fs::write(mix_of(client), MIX).context("cannot write memcaslap's configuration")?;
    findings.set("failed", 0.0);
    findings.set("wrong_answers", 0.0);
    let length = if is_long() { LONG } else { SHORT };
    let stage = Stage { client, middle, ways, servers: servers(&lab)?, length };
    stage.compare_cost(findings)?;
    stage.compare_times(findings)?;
    stage.ask_in_binary(findings)?;
    let shown = shown(middle, ENSEMBLE)?;
    for figure in ["failed", "lost_requests"] {
        findings.figures.add("failed", shown[figure].as_f64().unwrap_or_default());
    }
    Ok(())
}

/// Where memcaslap's configuration is.
fn mix_of(client: &Host) -> PathBuf {
    client.dir.join("memcaslap.conf")
}

/// Binds this thread, and what it starts from here on, to a processor.
fn pin_to(processor: usize) -> Result<()> {
    let mut only = CpuSet::new();
    only.set(processor)?;
    sched_setaffinity(Pid::from_raw(0), &only).with_context(|| format!("processor {processor} cannot be had"))
}

fn on_box(host: &Host, log: &str, words: &[&str]) -> Result<Program> {
    let processor = BOX_PROCESSOR.to_string();
    host.spawn(log, ["taskset", "-c", &processor].iter().chain(words))
}

/// Addresses of the memcacheds.
fn servers(lab: &Lab) -> Result<Vec<String>> {
    MEMBER_HOSTS.iter().map(|name| pair::address(lab.host(name)?)).collect()
}

/// A memcached, and the framer that makes it a member with the name that nutcracker has for it.
fn start_member(host: &Host) -> Result<[Program; 2]> {
    let words = ["memcached", "-u", "root", "-l", "0.0.0.0", "-p", PORT, "-t", "1", "-m", "256"];
    let mut memcached = host.spawn("memcached", words)?;
    await_listener(host, &mut memcached, PORT)?;
    let label = pair::address(host)?;
    Ok([memcached, host.spawn("member", ["margay", "ensemble", "member", MEMBERS, "--as", &label])?])
}

/// With the same ring, and with a connection to each server, as the switch has a flow.
fn start_nutcracker(lab: &Lab, host: &Host) -> Result<Program> {
    let servers: String = servers(lab)?.iter().map(|address| format!("   - {address}:{PORT}:1\n")).collect();
    let text = format!(
        "cache:\n  listen: 0.0.0.0:{PROXY_PORT}\n  hash: md5\n  distribution: ketama\n  timeout: 5000\n  \
         preconnect: true\n  auto_eject_hosts: false\n  servers:\n{servers}"
    );
    let file = |name: &str| host.dir.join(name).display().to_string();
    std::fs::write(file("nutcracker.yml"), text).context("cannot write nutcracker's configuration")?;
    let [config, output, pid] = ["nutcracker.yml", "nutcracker.txt", "nutcracker.pid"].map(file);
    let words = ["nutcracker", "-c", &config, "-o", &output, "-p", &pid];
    let mut program = on_box(host, "nutcracker", &words)?;
    await_listener(host, &mut program, PROXY_PORT)?;
    Ok(program)
}

/// What the switch shows.
/// Where it happens.
struct Stage<'a> {
    client: &'a Host,
    middle: &'a Host,
    ways: [Way; 2],
    /// Addresses of the memcacheds.
    servers: Vec<String>,
    length: Length,
}

impl Stage<'_> {
    /// By either way in turns; which goes first alternates. Gives what was found by each of them.
    fn take_turns<T>(&self, mut ask: impl FnMut(&Way) -> Result<T>) -> Result<[Vec<T>; 2]> {
        let mut found = [Vec::new(), Vec::new()];
        for round in 0..self.length.rounds {
            for at in [round % 2, (round + 1) % 2] {
                found[at].push(ask(&self.ways[at])?);
            }
        }
        Ok(found)
    }

    /// memcaslap asks as fast as it is answered.
    fn compare_cost(&self, findings: &mut Findings) -> Result<()> {
        let costs = self.take_turns(|way| self.ask_all_the_time(way, findings))?;
        findings.set("cpu_per_request_ratio", median_ratio(&costs, |cost| cost.per_request_us()));
        self.set_each(findings, "cpu_us", &costs, |cost| cost.per_request_us());
        self.set_each(findings, "process_cpu_us", &costs, |cost| cost.process_per_request_us());
        self.set_each(findings, "per_s", &costs, |cost| cost.requests / cost.window_s);
        findings.set("requests", costs[0].iter().map(|cost| cost.requests).sum());
        Ok(())
    }

    fn set_each<T>(&self, findings: &mut Findings, figure: &str, found: &[Vec<T>; 2], of: impl Fn(&T) -> f64) {
        for (way, found) in self.ways.iter().zip(found) {
            findings.set(&format!("{}_{figure}", way.name), median(&found.iter().map(&of).collect::<Vec<_>>()));
        }
    }

    fn ask_all_the_time(&self, way: &Way, findings: &mut Findings) -> Result<Cost> {
        let Self { client, servers, length, .. } = self;
        let connections = CONNECTIONS.to_string();
        let seconds = format!("{}s", (WARM + length.window + Duration::from_millis(500)).as_secs());
        let mix = mix_of(client).display().to_string();
        let words = ["memcaslap", "-s", &way.to, "-F", &mix, "-T", "1", "-c", &connections, "-v", "1", "-t", &seconds];
        let log = format!("memcaslap-{}-{}", way.name, now_ms());
        let mut program = client.spawn(&log, words)?;
        sleep(WARM);
        let before = requests_of(client, servers)?;
        let process_before_s = observe::processor_seconds(way.pid)?;
        let busy_before_s = observe::processor_busy_seconds(BOX_PROCESSOR)?;
        sleep(length.window);
        let busy_s = observe::processor_busy_seconds(BOX_PROCESSOR)? - busy_before_s;
        let process_s = observe::processor_seconds(way.pid)? - process_before_s;
        let requests = requests_of(client, servers)? - before;
        let (direct, flows) = agent::direct_flows(self.middle)?;
        program.finish(LIMIT)?;
        let said = Said::parse(&program.log());
        findings.figures.add("wrong_answers", said.wrong);
        findings.figures.add("failed", said.errors);
        ensure!(requests > 0.0 && said.is_whole, "nothing is answered by the {}: {}", way.name, tail(&program.log()));
        let cost = Cost { requests, busy_s, process_s, window_s: length.window.as_secs_f64() };
        progress(&format!(
            "{}: {:.1} us of the box's processor per request, {:.0} per s; {direct} of {flows} flows are direct",
            way.name,
            cost.per_request_us(),
            cost.requests / cost.window_s
        ));
        Ok(cost)
    }

    /// The binary protocol, by clients of libmemcached: some thousand requests of memcaslap, with many keys at once,
    /// and a value that one program stores and another one reads.
    fn ask_in_binary(&self, findings: &mut Findings) -> Result<()> {
        let way = &self.ways[0];
        let mix = mix_of(self.client).display().to_string();
        let words = ["memcaslap", "--binary", "-s", &way.to, "-F", &mix, "-T", "1", "-c", "8", "-d", "10", "-v", "1"];
        let mut program =
            self.client.spawn("memcaslap-binary", words.iter().copied().chain(["-x", BINARY_REQUESTS]))?;
        program.finish(LIMIT)?;
        let said = Said::parse(&program.log());
        findings.figures.add("wrong_answers", said.wrong);
        findings.figures.add("failed", said.errors);
        ensure!(said.is_whole, "no answers in binary: {}", tail(&program.log()));
        let file = self.client.dir.join("in-binary");
        let value = "a line\r\nEND\r\n\u{80}".repeat(10_000);
        std::fs::write(&file, &value).context("cannot write the value")?;
        let path = file.display().to_string();
        let servers = format!("--servers={}", way.to);
        self.client.run(["memccp", "--binary", &servers, &path])?;
        let read = output_within(&mut self.client.command(["memccat", "--binary", &servers, "in-binary"]), LIMIT)?;
        let is_same = String::from_utf8_lossy(&read.stdout).trim_end() == value.trim_end();
        findings.figures.add("wrong_answers", f64::from(u8::from(!is_same)));
        Ok(())
    }

    /// The same number of requests a second by either way.
    fn compare_times(&self, findings: &mut Findings) -> Result<()> {
        let found = self.take_turns(|way| self.ask_at_a_rate(way, findings))?;
        findings.set("p99_ratio", median_ratio(&found, |paced| paced.p99_us));
        self.set_each(findings, "p99_us", &found, |paced| paced.p99_us);
        self.set_each(findings, "median_us", &found, |paced| paced.median_us);
        Ok(())
    }

    fn ask_at_a_rate(&self, way: &Way, findings: &mut Findings) -> Result<Paced> {
        let words = [
            "memcached-paced".to_owned(),
            way.to.clone(),
            format!("--count={CONNECTIONS}"),
            format!("--per-s={PACED_PER_S}"),
            format!("--seconds={}", self.length.paced_seconds),
        ];
        let output = output_within(&mut self.client.traffic(words)?, LIMIT)?;
        let why = String::from_utf8_lossy(&output.stderr);
        let paced: Paced = serde_json::from_slice(&output.stdout)
            .with_context(|| format!("no answers by the {}: {}", way.name, why.trim()))?;
        findings.figures.add("wrong_answers", paced.wrong as f64);
        findings.figures.add("failed", paced.failed as f64);
        progress(&format!(
            "{}: {:.0} us (median), {:.0} us (99 %), {} answers",
            way.name, paced.median_us, paced.p99_us, paced.answered
        ));
        Ok(paced)
    }
}

/// The middle of the ratios of a figure, the first way's over the second's, turn by turn.
fn median_ratio<T>([ours, theirs]: &[Vec<T>; 2], of: impl Fn(&T) -> f64) -> f64 {
    median(&ours.iter().zip(theirs).map(|(ours, theirs)| of(ours) / of(theirs)).collect::<Vec<_>>())
}

/// Requests that the memcacheds have carried out, by their own count.
fn requests_of(client: &Host, servers: &[String]) -> Result<f64> {
    let script = format!(
        "for host in {}; do exec 3<>/dev/tcp/$host/{PORT}; printf 'stats\\r\\nquit\\r\\n' >&3; cat <&3; done",
        servers.join(" ")
    );
    let text = client.shell(&script)?;
    let counts = text.lines().filter_map(|line| {
        let count = line.strip_prefix("STAT cmd_get ").or(line.strip_prefix("STAT cmd_set "))?;
        count.trim().parse::<f64>().ok()
    });
    let counts: Vec<f64> = counts.collect();
    ensure!(counts.len() == 2 * servers.len(), "the memcacheds do not say what they have done: {text}");
    Ok(counts.iter().sum())
}

/// What memcaslap says at its end.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Said {
    /// Values that are missing, or others than were stored.
    wrong: f64,
    /// Errors of servers, and of connections.
    errors: f64,
    is_whole: bool,
}

impl Said {
    fn parse(text: &str) -> Self {
        let mut said = Self::default();
        for line in text.lines() {
            match line.split_once(": ") {
                Some(("get_misses" | "verify_misses" | "verify_failed", count)) => {
                    said.wrong += count.trim().parse().unwrap_or(1.0);
                }
                Some(("Run time", _)) => said.is_whole = true,
                _ if line.contains("ERROR") || line.contains("ailed") => said.errors += 1.0,
                _ => {}
            }
        }
        said
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_memcaslap_says_is_read_with_all_that_went_wrong() {
        let well = "cmd_get: 95855\ncmd_set: 10659\nget_misses: 0\nverify_misses: 0\nverify_failed: 0\n\
                    written_bytes: 4367210\n\nRun time: 2.0s Ops: 106514 TPS: 53251 Net_rate: 8.7M/s\n";
        assert_eq!(Said::parse(well), Said { wrong: 0.0, errors: 0.0, is_whole: true });
        let wrong = "<7 SERVER_ERROR the server died\nget_misses: 2\nverify_misses: 3\nverify_failed: 4\n";
        assert_eq!(Said::parse(wrong), Said { wrong: 9.0, errors: 1.0, is_whole: false });
    }
}
