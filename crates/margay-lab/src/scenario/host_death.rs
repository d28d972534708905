//! `host-death`: a host that serves a service vanishes without a word; new connections must soon go to the others only.
//! And while all processors are busy, no host that lives may be taken for dead.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::{Findings, Scenario, is_long, pair, site};
use crate::agent::{self, Agents};
use crate::arrivals::{Arrival, Arrivals, now_ms};
use crate::command::progress;
use crate::downloads::{self, Downloads, Order};
use crate::host::Host;
use crate::lab::Lab;
use crate::observe;
use crate::program::{Program, wait_for};
use crate::report::Limit::{AtLeast, Below, Exactly};
use crate::report::{Bound, bound, median, percentile};
use crate::server::{self, Nginx, sha256};
use crate::wire;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "host-death",
    summary: "a serving host's link is cut; then all processors are busy, and no living host may be taken for dead",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 8] = [
    bound("gone_ms", Below(1000.0)),
    bound("rounds", Exactly(ROUNDS as f64)),
    // The count that shows false ones has counted each true one.
    bound("true_withdrawals", Exactly((ROUNDS * SERVICES.len()) as f64)),
    bound("false_withdrawals", Exactly(0.0)),
    bound("watched_s", AtLeast(30.0)),
    // Otherwise there was nothing that could have delayed a sign of life.
    bound("busy_share", AtLeast(0.95)),
    bound("failed", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
];

const ROUNDS: usize = 5;
/// Instances of each service: one per host.
const INSTANCES: usize = 2;
const SERVICES: [&str; 2] = ["web.shop", "who.shop"];
/// What the router counts when an instance leaves its registry, for whatever reason.
const LEFT: &str = "margay_instances_left_total";
const WHO: &str = "who.shop.sal.internal";
const WHO_PORT: u16 = 7;
const EVERY: Duration = Duration::from_millis(10);
const EVERY_BUSY: Duration = Duration::from_millis(50);
/// Whoever was not answered until then had to ask again: the core asks again after 150 ms.
const PROMPT_MS: f64 = 140.0;
/// Connections for so long before a cut, and after the dead host was last heard of.
const CALM_MS: f64 = 1000.0;
const STEP_LIMIT: Duration = Duration::from_secs(20);
/// A host that lost its router asks for it less and less often.
const BACK_LIMIT: Duration = Duration::from_secs(60);
/// How long the busy machine is watched: in tests, and for figures.
const WATCH: Duration = Duration::from_secs(30);
const WATCH_LONG: Duration = Duration::from_secs(600);
const BUSY_PER_PROCESSOR: usize = 2;
const DOWNLOADS: usize = 8;
/// Bytes per second of each, all of them hashed.
const PACE: u64 = 5_000_000;

/// A host that serves both services.
struct Site {
    web: Nginx,
    _who: Program,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let watch = if is_long() { WATCH_LONG } else { WATCH };
    let lab = site::build("host-death", site::V4, &["web1", "web2", "client"], dir)?;
    let _agents = Agents::start(&lab)?;
    let sites = [serve(lab.host("web1")?, watch)?, serve(lab.host("web2")?, watch)?];
    await_all(lab.host("router")?, STEP_LIMIT)?;
    findings.set("failed", 0.0);
    let mut each_ms = Vec::new();
    for round in 0..ROUNDS {
        let gone_ms = die(&lab, findings)?;
        progress(&format!("round {round}: web2 was gone after {gone_ms:.0} ms"));
        each_ms.push(gone_ms);
        findings.figures.add("rounds", 1.0);
    }
    findings.set("gone_ms", median(&each_ms));
    findings.set("gone_ms_max", percentile(&each_ms, 100.0));
    findings.set("true_withdrawals", agent::metric(lab.host("router")?, LEFT)?);
    pair::attempt_part("all processors busy", findings, |findings| watch_busy(&lab, &sites[0], watch, findings));
    Ok(())
}

fn serve(host: &Host, watch: Duration) -> Result<Site> {
    let web = Nginx::start(host, &["0.0.0.0:80"])?;
    // All zeros, and no room on the disk: only that they come counts.
    std::fs::File::create(web.root.join("long"))?.set_len(PACE * watch.as_secs())?;
    let who = server::greeter(host, ([0; 4], WHO_PORT).into())?;
    agent::publish(host, SERVICES[0], "0.0.0.0:80", &[])?;
    agent::publish(host, SERVICES[1], &format!("0.0.0.0:{WHO_PORT}"), &[])?;
    Ok(Site { web, _who: who })
}

/// How many instances of both services the router lists.
fn listed(router: &Host) -> Result<usize> {
    let count = |service| Ok(agent::resolve(router, service)?["instances"].as_array().map_or(0, Vec::len));
    SERVICES.iter().map(|service| count(service)).sum()
}

fn await_all(router: &Host, limit: Duration) -> Result<()> {
    wait_for("both hosts in the registry", limit, || match listed(router)? {
        count if count == INSTANCES * SERVICES.len() => Ok(()),
        count => bail!("{count} instances are listed"),
    })
}

/// Cuts the link of `web2`, and gives the time from then until no new connection had to ask again. Then mends the link.
fn die(lab: &Lab, findings: &mut Findings) -> Result<f64> {
    let (router, web2) = (lab.host("router")?, lab.host("web2")?);
    let mut arrivals = Arrivals::start(lab.host("client")?, WHO, WHO_PORT, EVERY, None)?;
    // Both hosts answer, each at once.
    let answered: BTreeSet<_> =
        arrivals.until(now_ms() + CALM_MS, STEP_LIMIT)?.map(|arrival| arrival.answered.as_str()).collect();
    if answered != BTreeSet::from(["web1", "web2"]) {
        bail!("those who answer are {answered:?}");
    }
    let cut_ms = now_ms();
    wire::set_link(&lab.topology, web2, false)?;
    // Who has connected before may wait in vain for the dead host's first words: that connection was bound.
    let is_cut_ms = now_ms();
    wait_for("the end of web2 in the registry", STEP_LIMIT, || match listed(router)? {
        count if count == SERVICES.len() => Ok(()),
        count => bail!("{count} instances are listed"),
    })?;
    let unlisted_ms = now_ms();
    let seen = arrivals.until(unlisted_ms + CALM_MS, STEP_LIMIT)?;
    let after: Vec<&Arrival> = seen.filter(|arrival| arrival.begun_ms > is_cut_ms).collect();
    let last_late_ms = judge(&after, is_cut_ms, findings);
    wire::set_link(&lab.topology, web2, true)?;
    await_all(router, BACK_LIMIT)?;
    Ok(last_late_ms - cut_ms)
}

/// Counts what became of connections that began after the cut, and gives when the last one began that had to ask again.
fn judge(after: &[&Arrival], cut_ms: f64, findings: &mut Findings) -> f64 {
    for failed in after.iter().filter(|arrival| !arrival.error.is_empty()) {
        let (began_ms, Arrival { took_ms, error, .. }) = (failed.begun_ms - cut_ms, failed);
        findings
            .note(format!("a connection begun {began_ms:.0} ms after the cut failed after {took_ms:.0} ms: {error}"));
        findings.figures.add("failed", 1.0);
    }
    let late = after.iter().filter(|arrival| arrival.answered != "web1" || arrival.took_ms > PROMPT_MS);
    findings.figures.add("late_connects", late.clone().count() as f64);
    let slowest_ms = after.iter().map(|arrival| arrival.took_ms).fold(0.0, f64::max);
    findings.set("connect_ms_max", findings.figures.get("connect_ms_max").max(slowest_ms));
    late.map(|arrival| arrival.begun_ms).fold(cut_ms, f64::max)
}

/// Loops on all processors, transfers, and new connections: whatever leaves the registry then is still alive.
fn watch_busy(lab: &Lab, site: &Site, watch: Duration, findings: &mut Findings) -> Result<()> {
    let (router, client) = (lab.host("router")?, lab.host("client")?);
    let processors = std::thread::available_parallelism()?.get();
    let mut loops = Vec::new();
    for number in 0..processors * BUSY_PER_PROCESSOR {
        loops.push(client.spawn(&format!("busy-{number}"), ["bash", "-c", "while :; do :; done"])?);
    }
    let before = agent::metric(router, LEFT)?;
    let busy_before = observe::machine_busy_seconds()?;
    let start = Instant::now();
    let order = Order { host: "web.shop.sal.internal", path: "long", count: DOWNLOADS, pace: PACE };
    let running = Downloads::start(client, order)?;
    let mut arrivals = Arrivals::start(client, WHO, WHO_PORT, EVERY_BUSY, None)?;
    let seen: Vec<&Arrival> = arrivals.until(now_ms() + watch.as_secs_f64() * 1e3, watch + STEP_LIMIT)?.collect();
    let watched = start.elapsed().as_secs_f64();
    let busy = (observe::machine_busy_seconds()? - busy_before) / (watched * processors as f64);
    findings.set("false_withdrawals", agent::metric(router, LEFT)? - before);
    findings.set("watched_s", watched);
    findings.set("busy_share", busy);
    for failed in seen.iter().filter(|arrival| !arrival.error.is_empty()) {
        findings.note(format!("busy: a connection failed after {:.0} ms: {}", failed.took_ms, failed.error));
        findings.figures.add("failed", 1.0);
    }
    findings.set("busy_connects", seen.len() as f64);
    downloads::judge("busy", &running.finish(watch)?, &sha256(client, &site.web.root.join("long"))?, findings);
    await_all(router, STEP_LIMIT)
}
