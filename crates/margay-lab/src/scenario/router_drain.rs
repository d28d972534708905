//! `router-drain`: two routers share etcd, and one of them is drained while connections are held and others begin all
//! the time. First packets go to the other router, and hosts name that one to their peers. The drained router is
//! killed and comes back, and nobody notices. The last router that is not drained is drained by `--last` alone.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};

use super::router_ha::count_resets;
use super::router_ha::stage::{Cast, LIMIT, Stage};
use super::{Findings, Scenario, is_long, pair};
use crate::agent::{self, margay};
use crate::arrivals::{Arrivals, now_ms};
use crate::draining::Drain;
use crate::held::Held;
use crate::host::Host;
use crate::program::{Program, wait_for};
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::{observe, server};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "router-drain",
    summary: "one of two routers is drained, dies and comes back under load; the last one is drained by --last alone",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 10] = [
    bound("failed", Exactly(0.0)),
    bound("resets", Exactly(0.0)),
    bound("held_lost", Exactly(0.0)),
    bound("failed_connects", Exactly(0.0)),
    // Otherwise there were none to speak of.
    bound("connects", AtLeast(200.0)),
    // First packets that come to the drained router.
    bound("late_connects", Exactly(0.0)),
    bound("by_the_other_router", AtLeast(1.0)),
    // Peers for which a host still names the drained router.
    bound("stale_rendezvous", Exactly(0.0)),
    // While the other router is dead, drained, and both.
    bound("last_refused", Exactly(3.0)),
    bound("last_drained", Exactly(1.0)),
];

const CAST: Cast =
    Cast { name: SCENARIO.name, routers: &[DRAINED, OTHER], members: &["e1"], servers: &["web1", "web2"], late: &[] };
const DRAINED: &str = "r1";
const OTHER: &str = "r2";
const WHO: &str = "who.shop.sal.internal";
const WHO_PORT: u16 = 70;
const ECHO: &str = "echo.shop.sal.internal";
const ECHO_PORT: u16 = 7;
const HELD: usize = 20;
const EVERY: Duration = Duration::from_millis(10);
/// A grant lives for a second: who was let in by the drained router comes for so long.
const GRACE_MS: f64 = 1500.0;
const WATCH_MS: f64 = 1500.0;
const WATCH_LONG_MS: f64 = 10_000.0;
const FORWARDED: &str = "margay_forwarded_total";

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let stage = Stage::build(CAST, dir)?;
    let _programs = serve(&stage)?;
    let ends = CAST.servers.iter().chain(&["client"]).map(|name| stage.host(name)).collect::<Result<Vec<_>>>()?;
    ends.iter().try_for_each(|host| count_resets(host))?;
    let client = stage.host("client")?;
    let mut held = Held::open(client, ECHO, HELD)?;
    ensure!(held.open_count() == HELD as f64, "not all connections opened: {}", held.said());
    let mut arrivals = Arrivals::start(client, WHO, WHO_PORT, EVERY, None)?;
    arrivals.until(now_ms(), LIMIT).map(drop)?;
    ["failed", "resets", "last_refused", "last_drained", "late_connects"]
        .into_iter()
        .for_each(|figure| findings.set(figure, 0.0));
    pair::attempt_part("a router is drained", findings, |findings| drain(&stage, &mut arrivals, &ends, findings));
    pair::attempt_part("the drained router dies", findings, |findings| die(&stage, &mut arrivals, findings));
    pair::attempt_part("the last router", findings, |findings| drain_last(&stage, &mut arrivals, findings));
    judge(&mut arrivals, findings)?;
    held.round()?;
    findings.set("held_lost", held.end()?);
    for host in &ends {
        findings.figures.add("resets", observe::counts(host)?.values().map(|count| count.packets).sum());
    }
    Ok(())
}

fn serve(stage: &Stage) -> Result<Vec<Program>> {
    let mut programs = Vec::new();
    for name in CAST.servers {
        let host = stage.host(name)?;
        programs.push(server::greeter(host, ([0; 4], WHO_PORT).into())?);
        programs.push(server::echo(host, &[([0; 4], ECHO_PORT).into()])?);
        agent::publish(host, "who.shop", &format!("0.0.0.0:{WHO_PORT}"), &[])?;
        agent::publish(host, "echo.shop", &format!("0.0.0.0:{ECHO_PORT}"), &[])?;
    }
    for router in CAST.routers {
        wait_for(&format!("the servers at {router}"), LIMIT, || {
            let listed = [stage.listed(router, "who.shop")?, stage.listed(router, "echo.shop")?];
            ensure!(listed.iter().all(|names| names == CAST.servers), "it lists {listed:?}");
            Ok(())
        })?;
    }
    Ok(programs)
}

/// Drains a router. From then on nobody asks it, or names it.
fn drain(stage: &Stage, arrivals: &mut Arrivals, ends: &[&Host], findings: &mut Findings) -> Result<()> {
    let drained = stage.host(DRAINED)?;
    let other = stage.host(OTHER)?;
    let report = Drain::start(drained, &["--host", "--deadline", "5s"])?.finish(LIMIT)?;
    ensure!(report["phase"] == "over", "its report: {report}");
    let begun_ms = now_ms();
    let others = other.plan.address().map(|address| address.to_string()).unwrap_or_default();
    let mut stale = Vec::new();
    let named = wait_for("the name of the other router", LIMIT, || {
        stale = stale_rendezvous(ends, &others)?;
        ensure!(stale.is_empty(), "{stale:?}");
        Ok(())
    });
    findings.set("stale_rendezvous", stale.len() as f64);
    arrivals.until(begun_ms + GRACE_MS, LIMIT).map(drop)?;
    let before = [agent::metric(drained, FORWARDED)?, agent::metric(other, FORWARDED)?];
    let watch_ms = if is_long() { WATCH_LONG_MS } else { WATCH_MS };
    arrivals.until(now_ms() + watch_ms, LIMIT).map(drop)?;
    findings.figures.add("late_connects", agent::metric(drained, FORWARDED)? - before[0]);
    findings.set("by_the_other_router", agent::metric(other, FORWARDED)? - before[1]);
    named
}

/// Peers that hosts have flows with, and for which another router is named than the one at this address.
fn stale_rendezvous(hosts: &[&Host], address: &str) -> Result<Vec<String>> {
    let mut stale = Vec::new();
    for host in hosts {
        let is_peer = |path: &serde_json::Value| path["router"] != true && path["flows"].as_f64() > Some(0.0);
        for path in agent::paths(host)?.into_iter().filter(is_peer) {
            let named = path["rendezvous"].as_str().unwrap_or_default();
            if !named.starts_with(&format!("{address}:")) {
                stale.push(format!("{}: {named:?} for {}", host.name(), path["peer"]));
            }
        }
    }
    Ok(stale)
}

/// The drained router is killed: nobody notices, and the other one is the last. It comes back, and is drained still.
fn die(stage: &Stage, arrivals: &mut Arrivals, findings: &mut Findings) -> Result<()> {
    let drained = stage.host(DRAINED)?;
    let other = stage.host(OTHER)?;
    refuse(other, "while the other router is drained", findings)?;
    agent::kill(drained)?;
    arrivals.until(now_ms() + WATCH_MS, LIMIT).map(drop)?;
    refuse(other, "while the other router is dead", findings)?;
    agent::start_again(drained)?;
    stage.await_router(DRAINED)?;
    refuse(other, "after the drained router's return", findings)?;
    arrivals.until(now_ms() + WATCH_MS, LIMIT).map(drop)?;
    findings.figures.add("late_connects", agent::metric(drained, FORWARDED)?);
    Ok(())
}

/// A router that is the last one is not drained, and the command says how it would be.
fn refuse(host: &Host, when: &str, findings: &mut Findings) -> Result<()> {
    let refused = wait_for("a refusal", LIMIT, || {
        let refused = margay(host, ["drain", "--host", "--dry-run"]);
        ensure!(refused.is_err(), "{when}, the last router would be drained");
        Ok(refused)
    })?;
    let said = refused.err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(said.contains("--last"), "{when}: {said}");
    findings.figures.add("last_refused", 1.0);
    Ok(())
}

/// With `--last` the last router is drained; it forwards all the same.
fn drain_last(stage: &Stage, arrivals: &mut Arrivals, findings: &mut Findings) -> Result<()> {
    let other = stage.host(OTHER)?;
    let report = Drain::start(other, &["--host", "--last", "--deadline", "5s"])?.finish(LIMIT)?;
    ensure!(report["phase"] == "over", "its report: {report}");
    arrivals.until(now_ms() + WATCH_MS, LIMIT).map(drop)?;
    findings.figures.add("last_drained", 1.0);
    [DRAINED, OTHER].into_iter().try_for_each(|router| agent::undrain(stage.host(router)?, "--host"))?;
    // With both there, either may be drained again.
    wait_for("the end of both drains", LIMIT, || margay(other, ["drain", "--host", "--dry-run"]).map(drop))
}

fn judge(arrivals: &mut Arrivals, findings: &mut Findings) -> Result<()> {
    let mut connects = 0.0;
    let mut failed = 0.0;
    for arrival in arrivals.until(now_ms(), LIMIT)? {
        connects += 1.0;
        if !arrival.error.is_empty() {
            failed += 1.0;
            // The first few tell as much as all of them.
            if failed <= 3.0 {
                findings.note(format!("a connection failed after {:.0} ms: {}", arrival.took_ms, arrival.error));
            }
        }
    }
    findings.set("connects", connects);
    findings.set("failed_connects", failed);
    arrivals.stop()
}
