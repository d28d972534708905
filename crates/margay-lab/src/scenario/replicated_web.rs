//! `replicated-web`: Serval's Figure 7. Four clients fetch from one name, each over a new connection as soon as it has
//! what it asked for; instances join, one leaves while requests run, a larger one joins.

use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;

use super::{Findings, Scenario, is_long, site};
use crate::agent::{self, Agents};
use crate::host::Host;
use crate::program::wait_for;
use crate::report::Limit::{AtMost, Exactly};
use crate::report::{Bound, bound};
use crate::series::Series;
use crate::server::{Nginx, noise};
use crate::timeline::Timeline;
use crate::traffic::{Fetched, now_ms};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "replicated-web",
    summary: "Serval Fig. 7: four closed-loop clients of one name, while instances join and one leaves",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 5] = [
    bound("proportional_error", AtMost(SHARE_ERROR_MAX)),
    bound("failed_requests", Exactly(0.0)),
    bound("late_requests", Exactly(0.0)),
    bound("figure_drawn", Exactly(1.0)),
    bound("failed", Exactly(0.0)),
];

const SERVICE: &str = "web.shop";
const NAME: &str = "web.shop.sal.internal";
const FILE: &str = "page";
const FILE_BYTES: usize = 4000;
const CLIENTS: [&str; 4] = ["c1", "c2", "c3", "c4"];
/// Requests at once, of each client: together enough for all instances.
const WINDOW: usize = 25;
const SERVERS: [&str; 5] = ["s1", "s2", "s3", "s4", "s5"];
/// What each instance answers, in requests per second, is what it says of itself to the router: its weight.
const WEIGHTS: [u32; 5] = [100, 100, 100, 100, 200];
const RATE_OF_WEIGHT: u32 = 3;
/// Who serves in each phase: as in the paper, but that one instance leaves, not two, and that the last to join is
/// larger.
const PHASES: [&[usize]; 5] = [&[0], &[0, 1], &[0, 1, 2, 3], &[1, 2, 3], &[1, 2, 3, 4]];
/// What chance may do to a share by the number of requests alone.
const REQUEST_ERROR_MAX: f64 = 0.1;
/// An instance with the share p of n requests gets p·n of them, give or take √(p(1−p)n): relative to its share that is
/// √((1−p)/(pn)). A phase lasts until [`REQUEST_ERROR_MAX`] is so many of these deviations. Beyond 4.5 of them chance
/// goes once in 150,000 times, and there are 14 shares to judge: one run of 10,000 fails by bad luck.
const DEVIATIONS: f64 = 4.5;
/// An instance has its share of a router's 4096 [buckets](margay_core::table::BUCKETS) by chance, too, give or take
/// √((1−p)/(4096p)): 0.031 for a fifth, whatever the number of requests. With the 0.022 of the requests the deviation
/// is 0.038, and 4.5 of these are 0.17.
const SHARE_ERROR_MAX: f64 = 0.17;
const PHASE_MIN: Duration = Duration::from_secs(2);
const PHASE_MIN_LONG: Duration = Duration::from_secs(12);
const LIMIT: Duration = Duration::from_secs(60);
const STEP_MS: f64 = 250.0;

/// A time with the same instances.
struct Phase {
    from_ms: f64,
    to_ms: f64,
    servers: &'static [usize],
}

/// The site while requests come.
struct Cluster<'a> {
    hosts: Vec<&'a Host>,
    router: &'a Host,
    running: Vec<Option<Nginx>>,
    clients: Vec<Series<Fetched>>,
    /// When somebody had left, and who.
    left: Vec<(f64, &'static str)>,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = site::build(SCENARIO.name, site::V4, &[&SERVERS[..], &CLIENTS[..]].concat(), dir)?;
    let _agents = Agents::start(&lab)?;
    findings.set("failed", 0.0);
    let hosts = SERVERS.iter().map(|name| lab.host(name)).collect::<Result<Vec<_>>>()?;
    let running = SERVERS.iter().map(|_| None).collect();
    let mut cluster = Cluster { hosts, router: lab.host("router")?, running, clients: Vec::new(), left: Vec::new() };
    let mut phases = Vec::new();
    let mut before: &[usize] = &[];
    for servers in PHASES {
        servers.iter().filter(|server| !before.contains(server)).try_for_each(|server| cluster.join(*server))?;
        before.iter().filter(|server| !servers.contains(server)).try_for_each(|server| cluster.leave(*server))?;
        agent::await_instances(cluster.router, SERVICE, servers.len())?;
        if cluster.clients.is_empty() {
            cluster.clients = CLIENTS.iter().map(|name| fetches(lab.host(name)?)).collect::<Result<_>>()?;
        }
        phases.push(cluster.stay(servers)?);
        before = servers;
    }
    let mut fetched = Vec::new();
    for client in cluster.clients {
        fetched.extend(client.finish(LIMIT)?);
    }
    judge(&phases, &fetched, &cluster.left, findings);
    draw(&phases, &fetched, findings)
}

fn fetches(client: &Host) -> Result<Series<Fetched>> {
    let words = ["fetches", NAME, "80", FILE, "--clients", &WINDOW.to_string()].map(str::to_owned);
    Series::start(client, &words)
}

impl Cluster<'_> {
    fn join(&mut self, server: usize) -> Result<()> {
        let (host, weight) = (self.hosts[server], WEIGHTS[server]);
        let nginx = Nginx::start_limited(host, &["0.0.0.0:80"], weight * RATE_OF_WEIGHT)?;
        let mut file = format!("{}\n", host.name()).into_bytes();
        file.extend(noise(FILE_BYTES, 1));
        nginx.put(FILE, &file)?;
        self.running[server] = Some(nginx);
        agent::publish(host, SERVICE, "0.0.0.0:80", &["--weight", &weight.to_string()])
    }

    /// Takes an instance away as an operator would: withdrawn first, then given time for what it has begun, and
    /// stopped.
    fn leave(&mut self, server: usize) -> Result<()> {
        let host = self.hosts[server];
        agent::withdraw(host, SERVICE)?;
        self.left.push((now_ms(), SERVERS[server]));
        wait_for(&format!("the end of what {} has begun", host.name()), LIMIT, || {
            let mut flows = agent::flows(host)?;
            flows.retain(|flow| flow["name"] == SERVICE && flow["lifecycle"] != "closed");
            if flows.is_empty() { Ok(()) } else { bail!("{} flows are there: {}", flows.len(), flows[0]) }
        })?;
        let mut nginx = self.running[server].take().context("it does not run")?;
        nginx.program.signal(Signal::SIGQUIT)?;
        nginx.program.finish(LIMIT)
    }

    /// Lets requests come until there are enough of them to judge.
    fn stay(&self, servers: &'static [usize]) -> Result<Phase> {
        let from_ms = now_ms();
        sleep(if is_long() { PHASE_MIN_LONG } else { PHASE_MIN });
        let wanted = requests_wanted(servers);
        wait_for(&format!("{wanted} requests"), LIMIT, || {
            let came: usize =
                self.clients.iter().map(|client| client.count(|fetched| fetched.begun_ms >= from_ms)).sum();
            if came >= wanted { Ok(()) } else { bail!("there were {came}") }
        })?;
        Ok(Phase { from_ms, to_ms: now_ms(), servers })
    }
}

/// The share of an instance among those who serve.
fn share(server: usize, servers: &[usize]) -> f64 {
    f64::from(WEIGHTS[server]) / f64::from(servers.iter().map(|server| WEIGHTS[*server]).sum::<u32>())
}

/// Of how many requests chance leaves the smallest share as it is; see [`DEVIATIONS`].
fn requests_wanted(servers: &[usize]) -> usize {
    let least = servers.iter().map(|server| share(*server, servers)).fold(1.0, f64::min);
    ((DEVIATIONS / REQUEST_ERROR_MAX).powi(2) * (1.0 - least) / least).round() as usize
}

fn judge(phases: &[Phase], fetched: &[Fetched], left: &[(f64, &str)], findings: &mut Findings) {
    let mut worst = 0.0_f64;
    for (number, phase) in (1..).zip(phases) {
        // By when they began: how long an instance takes for them says nothing about how they were spread.
        let begun = |one: &&Fetched| (phase.from_ms..phase.to_ms).contains(&one.begun_ms) && one.error.is_empty();
        let all = fetched.iter().filter(begun).count() as f64;
        let mut shares = Vec::new();
        for server in phase.servers {
            let of_server = fetched.iter().filter(begun).filter(|one| one.server == SERVERS[*server]).count();
            let error = (of_server as f64 / all.max(1.0) / share(*server, phase.servers) - 1.0).abs();
            worst = worst.max(error);
            shares.push(format!("{} {of_server}", SERVERS[*server]));
        }
        let ended = fetched.iter().filter(|one| (phase.from_ms..phase.to_ms).contains(&one.ended_ms)).count() as f64;
        findings.set(&format!("requests_per_s_{number}"), ended * 1e3 / (phase.to_ms - phase.from_ms));
        findings.note(format!("phase {number}: {}", shares.join(", ")));
    }
    findings.set("proportional_error", worst);
    let failed: Vec<&Fetched> = fetched.iter().filter(|one| !one.error.is_empty()).collect();
    for one in failed.iter().take(5) {
        let (at_ms, took_ms) = (one.begun_ms - phases[0].from_ms, one.ended_ms - one.begun_ms);
        findings.note(format!("at {at_ms:.0} ms, for {took_ms:.0} ms: {}", one.error));
    }
    findings.set("failed_requests", failed.len() as f64);
    let is_late = |one: &&Fetched| left.iter().any(|(at_ms, who)| one.begun_ms > *at_ms && one.server == *who);
    findings.set("late_requests", fetched.iter().filter(is_late).count() as f64);
    findings.set("requests", fetched.len() as f64);
    findings.note(format!(
        "proportional_error: the greatest |share/weight's share − 1| of an instance in a phase, by when requests \
         began; late_requests: those that began after an instance had been withdrawn, and were answered by it; \
         requests_per_s_N: answers in phase N; an instance answers {RATE_OF_WEIGHT} requests per second for each unit \
         of its weight"
    ));
}

fn draw(phases: &[Phase], fetched: &[Fetched], findings: &mut Findings) -> Result<()> {
    let (Some(first), Some(last)) = (phases.first(), phases.last()) else { bail!("there was no phase") };
    let steps = ((last.to_ms - first.from_ms) / STEP_MS) as usize;
    let mut rates = vec![vec![0.0; steps]; SERVERS.len()];
    for one in fetched {
        let step = (one.ended_ms - first.from_ms) / STEP_MS;
        let server = SERVERS.iter().position(|name| *name == one.server);
        if let Some(rate) = server.filter(|_| step >= 0.0).and_then(|server| rates[server].get_mut(step as usize)) {
            *rate += 1e3 / STEP_MS;
        }
    }
    let words = ["s2 joins", "s3 and s4 join", "s1 leaves", "s5 joins"].map(str::to_owned);
    let changes: Vec<(f64, String)> =
        phases[1..].iter().map(|phase| (phase.from_ms - first.from_ms) / 1e3).zip(words).collect();
    let picture = Timeline {
        names: &SERVERS,
        unit: "requests per second",
        rates: &rates,
        step_s: STEP_MS / 1e3,
        changes: &changes,
    };
    findings.draw(SCENARIO.name, &picture.svg())?;
    let is_drawn = rates.iter().all(|of_server| of_server.iter().any(|rate| *rate > 0.0));
    findings.set("figure_drawn", f64::from(u8::from(is_drawn)));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_last_until_chance_is_small() {
        let wanted: Vec<usize> = PHASES.iter().map(|servers| requests_wanted(servers)).collect();
        assert_eq!(wanted, [0, 2025, 6075, 4050, 8100]);
        assert!((share(4, PHASES[4]) - 0.4).abs() < 1e-9);
    }

    #[test]
    fn shares_failures_and_late_answers_are_counted() {
        let phase = Phase { from_ms: 0.0, to_ms: 100.0, servers: &[0, 1] };
        let one = |at: f64, server: &str, error: &str| Fetched {
            begun_ms: at,
            ended_ms: at + 1.0,
            server: server.to_owned(),
            error: error.to_owned(),
        };
        let fetched =
            [one(1.0, "s1", ""), one(2.0, "s1", ""), one(3.0, "s1", ""), one(4.0, "s2", ""), one(9.0, "", "no")];
        let mut findings = Findings::default();
        judge(&[phase], &fetched, &[(2.5, "s1")], &mut findings);
        let figures = ["proportional_error", "failed_requests", "late_requests", "requests"];
        assert_eq!(figures.map(|figure| findings.figures.get(figure)), [0.5, 1.0, 1.0, 5.0]);
    }
}
