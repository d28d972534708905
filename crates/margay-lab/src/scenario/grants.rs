//! `grants`: a client connects so often that the kernels set connections up by themselves, by grants; and two instances
//! share the connections, are withdrawn, cut off, closed to the client, and their agents killed, as if each connection
//! were asked for.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::{Findings, Scenario, pair, site};
use crate::agent::{self, Agents};
use crate::arrivals::{Arrival, Arrivals, now_ms};
use crate::downloads::{self, Downloads, Order};
use crate::entries::{self, Entries};
use crate::host::Host;
use crate::lab::Lab;
use crate::program::{output_within, wait_for};
use crate::report::Limit::{AtLeast, AtMost, Exactly};
use crate::report::{Bound, bound};
use crate::server::{Nginx, noise, sha256};
use crate::wire;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "grants",
    summary: "hundreds of connections a second, set up by the kernels; meanwhile instances go and agents are killed",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 17] = [
    // Otherwise there were no grants to speak of.
    bound("taken_share", AtLeast(0.5)),
    bound("share_min", AtLeast(0.35)),
    // Somebody on the path, who reads what grants say.
    bound("read_grants", AtLeast(READ_GRANTS)),
    bound("reader_dropped", AtLeast(READ_GRANTS)),
    bound("reader_accepted", Exactly(0.0)),
    bound("late_connects", Exactly(0.0)),
    bound("returns", Exactly(RETURNS)),
    bound("accepted", Exactly(0.0)),
    bound("refused", AtLeast(REFUSED)),
    bound("held_taken_share", AtLeast(0.3)),
    bound("kills", Exactly((2 * KILLS + 2) as f64)),
    bound("lost_with_an_agent", AtMost(LOST_MAX)),
    bound("resets", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("leaked_entries", Exactly(0.0)),
    bound("hash_maps_kept", AtLeast(FLOW_MAPS)),
    bound("failed", Exactly(0.0)),
];

/// The hashes of a flow cache, those of grants among them.
const FLOW_MAPS: f64 = 8.0;
const SERVICE: &str = "web.shop";
const LISTEN: &str = "0.0.0.0:80";
const PORT: u16 = 80;
/// The answer ends with the instance's name.
const ASK: &str = "GET /host HTTP/1.0\\r\\n\\r\\n";
const NAMES: [&str; 2] = ["web1", "web2"];
const EVERY: Duration = Duration::from_millis(1);
/// Where agents must set up each one on a busy machine, there are fewer.
const AT_MOST: usize = 32;
const LIMIT: Duration = Duration::from_secs(30);
/// How long each part looks on.
const LOOK_MS: f64 = 1000.0;
const CALM_MS: f64 = 5000.0;
/// A grant lives for a second: what was taken back is over when it is.
const GRACE_MS: f64 = 1500.0;
/// Nobody waits for longer than this for an instance that lives.
const PATIENCE_MS: f64 = 5000.0;
/// What had begun so shortly before its instance was cut off is lost with it: its answer was on the way.
const BOUND_MS: f64 = 200.0;
/// Instances that come back: published again, reached again, and both allowed again.
const RETURNS: f64 = 4.0;
const REFUSED: f64 = LOOK_MS / 10.0;
/// More than were begun by chance, with the last of a grant.
const GRANTED: f64 = 20.0;
const READ_GRANTS: f64 = 10.0;
const READER_LIMIT: Duration = Duration::from_secs(30);
const NOBODY: &str = "host:00000000000000000000000000000000";
/// Of hundreds that begin while an agent is dead or starts: those that it had just set up when it was killed.
const LOST_MAX: f64 = 3.0;
/// Of each agent, when transfers have just begun.
const KILLS: usize = 2;
const HELD: usize = 60;
const HELD_BYTES: usize = 3_000_000;
const PACE: u64 = 500_000;

struct Stage<'a> {
    lab: &'a Lab,
    client: &'a Host,
    webs: [&'a Host; 2],
    /// The service's virtual address at the client: who asks the resolver for each connection measures that.
    address: String,
    arrivals: Arrivals,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = site::build("grants", site::V4, &["web1", "web2", "client"], dir)?;
    for host in &lab.hosts {
        host.shell("echo 10000 60999 > /proc/sys/net/ipv4/ip_local_port_range")?;
    }
    let _agents = Agents::start(&lab)?;
    let (router, client) = (lab.host("router")?, lab.host("client")?);
    let webs = [lab.host(NAMES[0])?, lab.host(NAMES[1])?];
    let hosts = [client, webs[0], webs[1]];
    pair::demand_kernel(&hosts, findings)?;
    let held = noise(HELD_BYTES, 1);
    let mut servers = Vec::new();
    for web in webs {
        let server = Nginx::start(web, &[LISTEN])?;
        server.put("held", &held)?;
        agent::publish(web, SERVICE, LISTEN, &[])?;
        servers.push(server);
    }
    agent::await_instances(router, SERVICE, webs.len())?;
    let expected = sha256(client, &servers[0].root.join("held"))?;
    for figure in ["late_connects", "returns", "accepted", "refused", "kills", "resets"] {
        findings.set(figure, 0.0);
    }
    let address = agent::virtual_addresses(client, SERVICE)?.0;
    let arrivals = connect(client, &address)?;
    let mut stage = Stage { lab: &lab, client, webs, address, arrivals };
    // Both instances are known, and what that takes is there.
    NAMES.iter().try_for_each(|name| stage.await_answers(name).map(drop))?;
    stage.arrivals.stop()?;
    let before = Entries::settled(&hosts)?;

    stage.arrivals = connect(client, &stage.address)?;
    pair::attempt_part("undisturbed", findings, |findings| calm(&mut stage, findings));
    pair::attempt_part("a reader on the path", findings, |findings| read(&mut stage, findings));
    pair::attempt_part("an instance withdrawn", findings, |findings| withdraw(&mut stage, findings));
    pair::attempt_part("an instance cut off", findings, |findings| cut(&mut stage, router, findings));
    pair::attempt_part("not allowed", findings, |findings| forbid(&mut stage, findings));
    pair::attempt_part("agents killed", findings, |findings| kill(&mut stage, &expected, findings));
    pair::attempt_part("what is left", findings, |findings| entries::report_leaks(&hosts, &before, findings));
    stage.arrivals = connect(client, &stage.address)?;
    pair::attempt_part("agents killed under load", findings, |findings| kill_under_load(&mut stage, findings));
    pair::attempt_part("without the fast path", findings, |findings| unload(&mut stage, findings));
    Ok(())
}

fn connect(client: &Host, address: &str) -> Result<Arrivals> {
    Arrivals::start_at_most(AT_MOST, client, (address, PORT), EVERY, ASK)
}

/// Which instance answered; empty when none did.
fn instance(arrival: &Arrival) -> &str {
    arrival.answered.lines().last().unwrap_or_default().trim()
}

impl Stage<'_> {
    /// What became of all connections that began between two moments.
    fn seen(&mut self, from_ms: f64, until_ms: f64) -> Result<Vec<&Arrival>> {
        let all = self.arrivals.until(until_ms, LIMIT)?;
        Ok(all.filter(|arrival| (from_ms..until_ms).contains(&arrival.begun_ms)).collect())
    }

    /// Waits until an instance answers a connection that begins after this.
    fn await_answers(&mut self, name: &str) -> Result<()> {
        let from_ms = now_ms();
        wait_for(&format!("an answer of {name}"), LIMIT, || {
            let seen = self.seen(from_ms, now_ms())?;
            if seen.iter().any(|arrival| instance(arrival) == name) { Ok(()) } else { bail!("of {} none", seen.len()) }
        })
    }

    /// Waits until the client's kernel begins connections by itself.
    fn await_taken(&mut self) -> Result<()> {
        let taken = agent::taken(self.client)?;
        wait_for("connections by grants", LIMIT, || {
            // One after the other is looked at, or they would fill the pipe.
            self.seen(now_ms(), now_ms())?;
            let now = agent::taken(self.client)? - taken;
            if now >= GRANTED { Ok(()) } else { bail!("{now} so far") }
        })
    }
}

/// Counts connections that failed, or took so long that nobody would have waited.
fn judge(what: &str, arrivals: &[&Arrival], findings: &mut Findings) {
    let failed = arrivals.iter().filter(|arrival| !arrival.error.is_empty() || arrival.took_ms > PATIENCE_MS);
    findings.figures.add("failed", failed.clone().count() as f64);
    // The first few tell as much as all of them.
    for Arrival { number, took_ms, error, .. } in failed.take(3) {
        findings.note(format!("{what}: connection {number}: after {took_ms:.0} ms: {error}"));
    }
    let slowest_ms = arrivals.iter().map(|arrival| arrival.took_ms).fold(0.0, f64::max);
    findings.set("connect_ms_max", findings.figures.get("connect_ms_max").max(slowest_ms));
}

/// Who answers, and who has set that up.
fn calm(stage: &mut Stage, findings: &mut Findings) -> Result<()> {
    let (from_ms, taken) = (now_ms(), agent::taken(stage.client)?);
    let seen = stage.seen(from_ms, from_ms + CALM_MS)?;
    judge("undisturbed", &seen, findings);
    let mut answered = BTreeMap::new();
    seen.iter().for_each(|arrival| *answered.entry(instance(arrival).to_owned()).or_insert(0.0) += 1.0);
    let all = seen.len() as f64;
    let of = |name: &str| answered.get(name).copied().unwrap_or_default() / all;
    findings.set("share_min", of(NAMES[0]).min(of(NAMES[1])));
    findings.set("connects_per_s", all * 1e3 / CALM_MS);
    // Connections that began before or after make a few of hundreds.
    findings.set("taken_share", ((agent::taken(stage.client)? - taken) / all).min(1.0));
    Ok(())
}

/// Whoever reads what grants say gets no connection by it, and costs the client none.
fn read(stage: &mut Stage, findings: &mut Findings) -> Result<()> {
    let webs = stage.webs;
    let dropped =
        || -> Result<f64> { webs.iter().map(|web| agent::metric(web, "margay_kernel_drop_unproved_total")).sum() };
    let before = dropped()?;
    let (from_ms, time_ms) = (now_ms(), (CALM_MS as u64).to_string());
    let mut reader = stage.client.traffic(["reader", "--time-ms", &time_ms])?;
    let reading = std::thread::spawn(move || output_within(&mut reader, READER_LIMIT));
    let seen = stage.seen(from_ms, from_ms + CALM_MS).map(|seen| judge("a reader on the path", &seen, findings));
    let said = reading.join().ok().context("a thread ended badly")??;
    seen?;
    if !said.status.success() {
        bail!("the reader failed: {}", String::from_utf8_lossy(&said.stderr).trim());
    }
    let said: Value = serde_json::from_slice(&said.stdout).context("the reader says nothing")?;
    findings.note(format!("a reader on the path: {said}"));
    findings.set("read_grants", said["grants"].as_f64().unwrap_or_default());
    // Flows were there for whom they were granted to.
    findings.set("reader_dropped", dropped()? - before);
    findings.set("reader_accepted", said["accepted"].as_f64().unwrap_or(f64::NAN));
    Ok(())
}

/// Nobody lands on an instance that was withdrawn; and somebody does when it is published again.
fn withdraw(stage: &mut Stage, findings: &mut Findings) -> Result<()> {
    let from_ms = now_ms();
    agent::withdraw(stage.webs[1], SERVICE)?;
    let gone_ms = now_ms() + GRACE_MS;
    let seen = stage.seen(from_ms, gone_ms + LOOK_MS)?;
    judge("an instance withdrawn", &seen, findings);
    let late = seen.iter().filter(|arrival| arrival.begun_ms > gone_ms && instance(arrival) != NAMES[0]).count();
    findings.figures.add("late_connects", late as f64);
    agent::publish(stage.webs[1], SERVICE, LISTEN, &[])?;
    stage.await_answers(NAMES[1])?;
    findings.figures.add("returns", 1.0);
    Ok(())
}

/// Whoever connects after an instance was cut off is answered by the other one.
fn cut(stage: &mut Stage, router: &Host, findings: &mut Findings) -> Result<()> {
    let (lab, web) = (stage.lab, stage.webs[1]);
    let from_ms = now_ms();
    stage.seen(from_ms, from_ms + LOOK_MS)?;
    let cutting_ms = now_ms();
    wire::set_link(&lab.topology, web, false)?;
    let cut_ms = now_ms();
    agent::await_instances(router, SERVICE, 1)?;
    let seen = stage.seen(from_ms, now_ms() + LOOK_MS);
    // The next parts need it in any case.
    wire::set_link(&lab.topology, web, true)?;
    let is_bound = |arrival: &Arrival| (cutting_ms - BOUND_MS..cut_ms).contains(&arrival.begun_ms);
    let (lost, judged): (Vec<_>, Vec<_>) = seen?.into_iter().partition(|arrival| is_bound(arrival));
    judge("an instance cut off", &judged, findings);
    let lost = lost.iter().filter(|arrival| !arrival.error.is_empty()).count();
    findings.set("lost_with_the_instance", lost as f64);
    stage.await_answers(NAMES[1])?;
    findings.figures.add("returns", 1.0);
    Ok(())
}

/// Nobody connects who may not any more, and everybody does who may again.
fn forbid(stage: &mut Stage, findings: &mut Findings) -> Result<()> {
    for web in stage.webs {
        agent::publish(web, SERVICE, LISTEN, &["--allow", NOBODY])?;
    }
    let from_ms = now_ms() + GRACE_MS;
    let seen = stage.seen(from_ms, from_ms + LOOK_MS)?;
    let accepted = seen.iter().filter(|arrival| !arrival.answered.is_empty()).count();
    findings.set("accepted", accepted as f64);
    findings.set("refused", (seen.len() - accepted) as f64);
    for web in stage.webs {
        agent::publish(web, SERVICE, LISTEN, &[])?;
    }
    for name in NAMES {
        stage.await_answers(name)?;
        findings.figures.add("returns", 1.0);
    }
    Ok(())
}

/// Agents of both ends are killed when transfers have just begun, most of them by grants.
fn kill(stage: &mut Stage, expected: &str, findings: &mut Findings) -> Result<()> {
    let mut held_taken = 0.0;
    for host in [stage.client, stage.webs[0]].repeat(KILLS) {
        // Grants are there, and nothing else is about to be set up: a connection of the last milliseconds before a kill
        // can be lost.
        stage.arrivals = connect(stage.client, &stage.address)?;
        stage.await_taken()?;
        stage.arrivals.stop()?;
        let taken = agent::taken(stage.client)?;
        let order = Order { host: &stage.address, path: "held", count: HELD, pace: PACE };
        let mut running = Downloads::start(stage.client, order)?;
        running.await_open(LIMIT)?;
        held_taken += agent::taken(stage.client)? - taken;
        agent::kill(host)?;
        agent::start_again(host)?;
        findings.figures.add("kills", 1.0);
        let results = running.finish(LIMIT)?;
        downloads::judge(&format!("the agent of {} killed", host.name()), &results, expected, findings);
        findings.figures.add("resets", results.iter().filter(|result| result.reset).count() as f64);
    }
    findings.set("held_taken_share", held_taken / (2 * KILLS * HELD) as f64);
    Ok(())
}

/// Connections go on as before when agents are back that were killed while some were set up.
fn kill_under_load(stage: &mut Stage, findings: &mut Findings) -> Result<()> {
    for host in [stage.client, stage.webs[0]] {
        stage.await_taken()?;
        let killed_ms = now_ms();
        agent::kill(host)?;
        agent::start_again(host)?;
        findings.figures.add("kills", 1.0);
        let back_ms = now_ms();
        let seen = stage.seen(killed_ms - LOOK_MS, back_ms + LOOK_MS)?;
        let (after, meanwhile): (Vec<_>, Vec<_>) = seen.into_iter().partition(|arrival| arrival.begun_ms > back_ms);
        judge(&format!("the agent of {} is back", host.name()), &after, findings);
        let lost: Vec<&Arrival> = meanwhile.into_iter().filter(|arrival| !arrival.error.is_empty()).collect();
        findings.figures.add("lost_with_an_agent", lost.len() as f64);
        for Arrival { begun_ms, took_ms, error, .. } in lost {
            let after_ms = begun_ms - killed_ms;
            let name = host.name();
            findings
                .note(format!("begun {after_ms:.0} ms after the agent of {name} died: {error}, after {took_ms:.0} ms"));
        }
    }
    stage.await_taken()
}

/// Without the fast path at one end all goes on, and with it as before.
fn unload(stage: &mut Stage, findings: &mut Findings) -> Result<()> {
    for host in [stage.client, stage.webs[0]] {
        let from_ms = now_ms();
        agent::cache(host, "unload")?;
        let without = stage.seen(from_ms, now_ms() + LOOK_MS).map(drop);
        agent::cache(host, "load")?;
        without?;
        let seen = stage.seen(from_ms, now_ms() + LOOK_MS)?;
        judge(&format!("without the fast path on {}", host.name()), &seen, findings);
    }
    stage.await_taken()
}
