//! `active-sockets`: programs join a service by listening and leave it by no longer doing so, however that comes about.
//! Clients connect throughout; an instance that has left gets nobody any more.

mod doors;
mod served;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;

use super::{Findings, Scenario, is_long, pair, site};
use crate::agent::{self, Agents};
use crate::arrivals::{Arrival, Arrivals, now_ms};
use crate::cgroup;
use crate::command::progress;
use crate::host::Host;
use crate::lab::Lab;
use crate::program::{Program, wait_for};
use crate::report::Limit::{AtLeast, Below, Exactly};
use crate::report::{Bound, bound, median, percentile};
use served::{End, Files, KINDS, Kind};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "active-sockets",
    summary: "programs of seven kinds start, listen, stop, close, are killed, become others; new connections \
              throughout",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 7] = [
    bound("register_ms_p99", Below(100.0)),
    bound("withdraw_ms_p99", Below(100.0)),
    bound("wrong_landings", Exactly(0.0)),
    bound("stale_entries", Exactly(0.0)),
    bound("cycles", AtLeast((ROUNDS * CYCLES) as f64)),
    bound("doors", AtLeast(17.0)),
    bound("failed", Exactly(0.0)),
];

const ROUNDS: usize = 2;
const ROUNDS_LONG: usize = 4;
/// Of all kinds in all the ways that they end, in a round.
const CYCLES: usize = 13;
const LIMIT: Duration = Duration::from_secs(15);
/// Between two connections to one service.
const EVERY: Duration = Duration::from_millis(40);
/// Connections that are awaited in each state.
const LANDINGS: usize = 3;
/// Listeners of one program in a row, none of which lasts.
const STORM: usize = 3000;

/// A network namespace inside of a host, as a container has one. Gives the process that holds it, and shows what
/// listens there.
fn box_of(host: &Host) -> Result<Program> {
    let program = host.spawn("box", ["unshare", "--net", "sleep", "infinity"])?;
    let pid = program.pid();
    wait_for("a network namespace", LIMIT, || {
        let of = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/net"));
        // It passes through both on its way there.
        let is_outside = of(pid)? == of(host.holder_pid())? || of(pid)? == of(std::process::id())?;
        if is_outside { bail!("it is the host's") } else { Ok(()) }
    })?;
    host.shell(&format!(
        "ip link add box0 type veth peer name eth0 netns {pid}; ip address add 10.9.0.1/30 dev box0; ip link set box0 \
         up\n\
         nsenter --target {pid} --net sh -ec 'ip link set lo up; ip address add 10.9.0.2/30 dev eth0; ip link set eth0 \
         up; \
         ip route add default via 10.9.0.1'\necho 1 > /proc/sys/net/ipv4/ip_forward"
    ))?;
    Ok(program)
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    // Programs of alpha come and go, those of beta stay.
    let lab = site::build("active-sockets", site::V4, &["alpha", "beta", "client"], dir)?;
    let (alpha, beta) = (lab.host("alpha")?, lab.host("beta")?);
    for host in [alpha, beta] {
        host.shell("echo 'inside = [\"box0\"]' >> /etc/margay/margay.toml")?;
    }
    let _agents = Agents::start(&lab)?;
    pair::demand_kernel(&[alpha, beta], findings)?;
    let boxes = [box_of(alpha)?, box_of(beta)?];
    let box_pid = boxes[0].pid();
    let files = Files::make(dir, [(alpha.name(), box_pid), (beta.name(), boxes[1].pid())])?;
    let mut kept = Vec::new();
    let mut stage = Stage { lab: &lab, files: &files, box_pid, cgroups: Vec::new(), times: Times::default() };
    let mut probes = Vec::new();
    for kind in &KINDS {
        kept.extend(stage.begin(kind, beta)?);
        agent::await_instances(lab.host("router")?, &kind.service(), 1)?;
        tell_name(kind, beta)?;
        probes.push(Probe::start(&lab, kind)?);
    }
    let sockets_before = agent::metric(alpha, "margay_listening_sockets")?;
    let rounds = if is_long() { ROUNDS_LONG } else { ROUNDS };
    for round in 0..rounds {
        for (kind, probe) in KINDS.iter().zip(&mut probes) {
            for end in kind.ends {
                stage.cycle(kind, *end, probe)?;
            }
        }
        progress(&format!("round {} of {rounds}: {}", round + 1, stage.times.sentence()));
    }
    for (kind, probe) in KINDS.iter().zip(&mut probes) {
        stage.drain(kind, probe)?;
    }
    stage.storm(&mut probes[0])?;
    doors::try_all(&stage, findings)?;
    for probe in &mut probes {
        probe.judge(findings)?;
    }
    let stale = stage.stale(sockets_before, findings)?;
    let times = &stage.times;
    findings.set("register_ms_p50", median(&times.register_ms));
    findings.set("register_ms_p99", percentile(&times.register_ms, 99.0));
    findings.set("withdraw_ms_p50", median(&times.withdraw_ms));
    findings.set("withdraw_ms_p99", percentile(&times.withdraw_ms, 99.0));
    findings.set("cycles", times.withdraw_ms.len() as f64);
    findings.set("stale_entries", stale);
    Ok(())
}

/// From the kernel's state to the router's registry, asked every few milliseconds.
#[derive(Default)]
struct Times {
    register_ms: Vec<f64>,
    withdraw_ms: Vec<f64>,
}

impl Times {
    fn sentence(&self) -> String {
        let [register, withdraw] = [&self.register_ms, &self.withdraw_ms].map(|times| percentile(times, 99.0));
        format!("registered within {register:.0} ms, withdrawn within {withdraw:.0} ms")
    }
}

struct Stage<'a> {
    lab: &'a Lab,
    files: &'a Files,
    /// A process in the network namespace inside of alpha.
    box_pid: u32,
    /// Of programs of alpha.
    cgroups: Vec<PathBuf>,
    times: Times,
}

impl Stage<'_> {
    fn begin(&self, kind: &Kind, host: &Host) -> Result<Vec<Program>> {
        let argv = kind.argv(self.files, host)?;
        (0..kind.processes).map(|number| host.spawn(&format!("{}-{number}", kind.name), &argv)).collect()
    }

    fn cycle(&mut self, kind: &Kind, end: End, probe: &mut Probe) -> Result<()> {
        let (alpha, router) = (self.lab.host("alpha")?, self.lab.host("router")?);
        let watched = if kind.in_box { self.box_pid } else { alpha.holder_pid() };
        let what = |act: &str| format!("{} {act} ({end:?})", kind.name);
        probe.others_may_answer();
        let mut programs = self.begin(kind, alpha)?;
        let listens = |count: usize| move || listeners(watched, kind.port).map(|found| found == count);
        let listening_at = moment(&what("listens"), listens(kind.processes))?;
        self.times.register_ms.push(self.until_instances(router, kind, 2, listening_at)?);
        for program in &programs {
            self.cgroups.push(cgroup::of(program.pid())?);
        }
        tell_name(kind, alpha)?;
        probe.await_answers("alpha", LANDINGS)?;
        let last = programs.pop().context("no program")?;
        for other in &programs {
            other.signal(end.signal())?;
        }
        if !programs.is_empty() {
            moment(&what("loses one"), listens(1))?;
            probe.await_answers("alpha", LANDINGS)?;
            let left = instances(router, kind)?;
            if left != 2 {
                bail!("{}: with one process left, there are {left} instances", kind.name);
            }
        }
        last.signal(end.signal())?;
        let ended_at = moment(&what("ends"), listens(0))?;
        self.times.withdraw_ms.push(self.until_instances(router, kind, 1, ended_at)?);
        probe.only_beta_may_answer();
        probe.await_answers("beta", LANDINGS)?;
        Ok(())
    }

    /// An operator takes a program that listens out of service, and lets it back in: its connections go to the other
    /// host meanwhile, and none fails.
    fn drain(&mut self, kind: &Kind, probe: &mut Probe) -> Result<()> {
        let (alpha, router, service) = (self.lab.host("alpha")?, self.lab.host("router")?, kind.service());
        probe.others_may_answer();
        let programs = self.begin(kind, alpha)?;
        agent::await_instances(router, &service, 2)?;
        for program in &programs {
            self.cgroups.push(cgroup::of(program.pid())?);
        }
        tell_name(kind, alpha)?;
        probe.await_answers("alpha", LANDINGS)?;
        agent::withdraw(alpha, &service)?;
        probe.only_beta_may_answer();
        probe.await_answers("beta", LANDINGS)?;
        let watched = if kind.in_box { self.box_pid } else { alpha.holder_pid() };
        if listeners(watched, kind.port)? != kind.processes {
            bail!("{service}: the program that was to be drained has ended");
        }
        probe.others_may_answer();
        agent::margay(alpha, ["service", "set", &service, "--weight", "100"])?;
        probe.await_answers("alpha", LANDINGS)?;
        for program in &programs {
            program.signal(Signal::SIGKILL)?;
        }
        agent::await_instances(router, &service, 1)?;
        probe.only_beta_may_answer();
        probe.await_answers("beta", LANDINGS)
    }

    /// Milliseconds since `from` after which the router has so many instances.
    fn until_instances(&self, router: &Host, kind: &Kind, count: usize, from: Instant) -> Result<f64> {
        let reached = moment(&format!("{count} instances of {}", kind.service()), || {
            instances(router, kind).map(|found| found == count)
        })?;
        Ok(reached.duration_since(from).as_secs_f64() * 1e3)
    }

    /// A program that makes thousands of listeners before its own: others are served all the same, and nothing of it
    /// stays.
    fn storm(&mut self, probe: &mut Probe) -> Result<()> {
        let (alpha, router) = (self.lab.host("alpha")?, self.lab.host("router")?);
        let mut argv: Vec<String> = ["margay", "run", "--service", "storm.shop", "--"].map(str::to_owned).into();
        argv.extend(self.files.script(alpha, 8099, &["--storm", &STORM.to_string()]));
        let program = alpha.spawn("storm", argv)?;
        wait_for("the one listener that lasts", LIMIT, || {
            let shown = agent::show(alpha, "storm.shop")?;
            let addresses: Vec<_> = shown["service"]["listeners"].as_array().into_iter().flatten().collect();
            if addresses.len() == 1 && addresses[0]["address"] == "0.0.0.0:8099" { Ok(()) } else { bail!("{shown}") }
        })?;
        agent::await_instances(router, "storm.shop", 1)?;
        probe.await_answers("beta", LANDINGS)?;
        self.cgroups.push(cgroup::of(program.pid())?);
        program.signal(Signal::SIGKILL)?;
        agent::await_instances(router, "storm.shop", 0)
    }

    /// What is left of programs that have ended: on their host, at the router, in the kernel.
    fn stale(&self, sockets_before: f64, findings: &mut Findings) -> Result<f64> {
        let (alpha, router) = (self.lab.host("alpha")?, self.lab.host("router")?);
        let mut left = Vec::new();
        let cleared = wait_for("the end of all programs", LIMIT, || {
            left.clear();
            let programs = agent::metric(alpha, "margay_programs")?;
            let sockets = agent::metric(alpha, "margay_listening_sockets")? - sockets_before;
            left.extend((programs > 0.0).then(|| format!("{programs} programs")));
            left.extend((sockets > 0.0).then(|| format!("{sockets} sockets")));
            for kind in &KINDS {
                let surplus = instances(router, kind)?.saturating_sub(1);
                left.extend((surplus > 0).then(|| format!("{surplus} instances of {}", kind.service())));
            }
            left.extend(self.cgroups.iter().filter(|path| path.exists()).map(|path| path.display().to_string()));
            if left.is_empty() { Ok(()) } else { bail!("{}", left.join(", ")) }
        });
        if let Err(error) = cleared {
            findings.note(format!("{error:#}"));
        }
        Ok(left.len() as f64)
    }
}

/// Connections to a service, made all the time.
struct Probe {
    arrivals: Arrivals,
    service: String,
    /// When nobody but beta may answer: from, and to where it is over ([`now_ms`]).
    alone: Vec<(f64, Option<f64>)>,
}

impl Probe {
    fn start(lab: &Lab, kind: &Kind) -> Result<Self> {
        let name = format!("{}.sal.internal", kind.service());
        let arrivals = Arrivals::start(lab.host("client")?, &name, 80, EVERY, Some(kind.ask))?;
        let mut probe = Self { arrivals, service: kind.service(), alone: vec![(now_ms(), None)] };
        probe.await_answers("beta", 1)?;
        Ok(probe)
    }

    fn others_may_answer(&mut self) {
        if let Some((_, end @ None)) = self.alone.last_mut() {
            *end = Some(now_ms());
        }
    }

    fn only_beta_may_answer(&mut self) {
        self.alone.push((now_ms(), None));
    }

    /// Until so many connections that begin from now on were answered by whom.
    fn await_answers(&mut self, who: &str, count: usize) -> Result<()> {
        let (from, deadline) = (now_ms(), Instant::now() + LIMIT);
        loop {
            let all = self.arrivals.until(now_ms(), LIMIT)?;
            let since: Vec<&Arrival> = all.filter(|arrival| arrival.begun_ms > from).collect();
            let found = since.iter().filter(|arrival| arrival.answered.contains(who)).count();
            if found >= count {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("{who} has answered {found} of {} connections to {}", since.len(), self.service);
            }
        }
    }

    /// Counts connections that began when only beta was there, and did not get to it.
    fn judge(&mut self, findings: &mut Findings) -> Result<()> {
        let all: Vec<Arrival> = self.arrivals.until(now_ms(), LIMIT)?.cloned().collect();
        let is_alone = |arrival: &&Arrival| {
            let ends_after = |end: &Option<f64>| end.is_none_or(|end| arrival.begun_ms < end);
            self.alone.iter().any(|(from, to)| arrival.begun_ms > *from && ends_after(to))
        };
        let alone: Vec<&Arrival> = all.iter().filter(is_alone).collect();
        let wrong: Vec<&&Arrival> = alone.iter().filter(|arrival| !arrival.answered.contains("beta")).collect();
        if let Some(first) = wrong.first() {
            findings.note(format!("{}: {} wrong landings, first {first:?}", self.service, wrong.len()));
        }
        let refused = all.iter().filter(|arrival| !arrival.error.is_empty()).count();
        findings.figures.add("wrong_landings", wrong.len() as f64);
        findings.figures.add("landings", all.len() as f64);
        findings.figures.add("landings_alone", alone.len() as f64);
        findings.figures.add("refused_in_change", refused.saturating_sub(wrong.len()) as f64);
        Ok(())
    }
}

/// When something came true. Looks often: it is what the figures are made of.
fn moment(what: &str, mut is_true: impl FnMut() -> Result<bool>) -> Result<Instant> {
    let deadline = Instant::now() + LIMIT;
    loop {
        if is_true()? {
            return Ok(Instant::now());
        }
        if Instant::now() > deadline {
            bail!("{what}: not within {LIMIT:?}");
        }
        std::thread::sleep(Duration::from_micros(500));
    }
}

/// How many TCP sockets listen on a port, in the network namespace of a process.
fn listeners(pid: u32, port: u16) -> Result<usize> {
    let wanted = format!(":{port:04X}");
    let mut found = 0;
    for table in ["tcp", "tcp6"] {
        let text = fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap_or_default();
        let listens = |line: &&str| {
            let words: Vec<_> = line.split_whitespace().collect();
            words.len() > 3 && words[1].ends_with(&wanted) && words[3] == "0A"
        };
        found += text.lines().filter(listens).count();
    }
    Ok(found)
}

fn instances(router: &Host, kind: &Kind) -> Result<usize> {
    Ok(agent::resolve(router, &kind.service())?["instances"].as_array().map_or(0, Vec::len))
}

/// Lets memcached say whose it is. The others know.
fn tell_name(kind: &Kind, host: &Host) -> Result<()> {
    if kind.name == "memcached" {
        let (name, port) = (host.name(), kind.port);
        let set = format!("set who 0 0 {}\\r\\n{name}\\r\\n", name.len());
        host.shell(&format!("exec 3<>/dev/tcp/127.0.0.1/{port}; printf '{set}' >&3; head -n 1 <&3"))?;
    }
    Ok(())
}
