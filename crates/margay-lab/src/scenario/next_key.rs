//! `next-key`: an authority's key is followed by another one under a stream of connects; a host that was off for all of
//! it follows, and whoever has the old key is believed no more.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::{Findings, Scenario, site};
use crate::agent::{self, Agents, margay};
use crate::host::Host;
use crate::program::wait_for;
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::server;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "next-key",
    summary: "an authority's key is followed by another one while hosts connect; the old one is refused afterwards",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 5] = [
    bound("failed", Exactly(0.0)),
    bound("connects", AtLeast(100.0)),
    bound("thief_before", Exactly(1.0)),
    bound("thief_after", Exactly(0.0)),
    bound("followed", Exactly(1.0)),
];

const SERVICE: &str = "web.shop";
const PORT: u16 = 7;
/// The new key signs after half of it.
const OVERLAP: &str = "30s";
const LIMIT: Duration = Duration::from_secs(60);
const KEY_FILE: &str = "/var/lib/margay/keys/authority/shop.key";

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = site::build("next-key", site::V4, &["web", "client", "away", "thief"], dir)?;
    let _agents = Agents::start(&lab)?;
    let [router, web, client] = [lab.host("router")?, lab.host("web")?, lab.host("client")?];
    let [away, thief] = [lab.host("away")?, lab.host("thief")?];
    for figure in ["failed", "connects", "thief_before", "thief_after", "followed"] {
        findings.set(figure, 0.0);
    }
    let _echo = server::echo(web, &[format!("0.0.0.0:{PORT}").parse()?])?;
    agent::publish(web, SERVICE, &format!("0.0.0.0:{PORT}"), &[])?;
    agent::await_instances(client, SERVICE, 1)?;
    steal(router, thief, web)?;
    findings.set("thief_before", connects(thief)?);
    agent::down(away)?;
    let old = keys(router)?.0;
    let over = AtomicBool::new(false);
    let (outcome, stream) = std::thread::scope(|scope| {
        let stream = scope.spawn(|| keep_connecting(client, &over));
        let outcome = follow(router, &[web, client]);
        over.store(true, Ordering::Relaxed);
        (outcome, stream.join())
    });
    let (count, failures) = stream.ok().context("a thread ended badly")??;
    findings.set("connects", count as f64);
    findings.set("failed", failures.len() as f64);
    failures.into_iter().take(3).for_each(|failure| findings.note(failure));
    outcome?;
    let new = keys(router)?.0;
    if new == old {
        bail!("the router signs with the old key still");
    }
    findings.set("thief_after", connects(thief)?);
    margay(away, ["up"])?;
    wait_for("away to follow", LIMIT, || {
        if agent::status(away)?["joined"].as_bool() == Some(true) { Ok(()) } else { bail!("it has not joined") }
    })?;
    agent::await_instances(away, SERVICE, 1)?;
    findings.set("followed", connects(away)?);
    Ok(())
}

/// The key that the router signs with, and how many follow each other just now.
fn keys(host: &Host) -> Result<(String, usize)> {
    let identity: Value = serde_json::from_str(&margay(host, ["id", "--json"])?)?;
    let authority = &identity["authorities"][0];
    let key = authority["key"].as_str().context("no authority is known")?.to_owned();
    Ok((key, authority["successions"].as_array().map_or(0, Vec::len)))
}

/// A host gets a copy of the authority's key, and makes itself a member by it; it has joined nowhere.
fn steal(router: &Host, thief: &Host, web: &Host) -> Result<()> {
    let key = router.run(["cat", KEY_FILE])?;
    agent::down(thief)?;
    thief.shell("rm -rf /var/lib/margay/*")?;
    margay(thief, ["up", "--router"])?;
    thief.shell(&format!("umask 077 && echo '{}' > {KEY_FILE}", key.trim()))?;
    // Whatever makes it look at its keys.
    margay(thief, ["id", "authority", "create", "zebra"])?;
    let address = web.plan.address().context("no address")?.to_string();
    margay(thief, ["route", "add", SERVICE, "forward", &address])?;
    Ok(())
}

/// 1: it connects.
fn connects(host: &Host) -> Result<f64> {
    let outcome = server::attempt(host, &format!("{SERVICE}.sal.internal"), PORT, &["--count", "10"])?;
    Ok(outcome.ok as f64 / 10.0)
}

fn keep_connecting(client: &Host, over: &AtomicBool) -> Result<(u64, Vec<String>)> {
    let (mut count, mut failures) = (0, Vec::new());
    while !over.load(Ordering::Relaxed) {
        let outcome = server::attempt(client, &format!("{SERVICE}.sal.internal"), PORT, &["--count", "10"])?;
        count += outcome.ok;
        failures.extend(outcome.errors.into_iter().map(|(error, times)| format!("{times} times: {error}")));
    }
    Ok((count, failures))
}

/// One key follows the other, from the operator's word to the end of the old one's time.
fn follow(router: &Host, hosts: &[&Host]) -> Result<()> {
    let began = Instant::now();
    margay(router, ["id", "authority", "succeed", "shop", "--overlap", OVERLAP])?;
    for host in hosts {
        wait_for(&format!("the next key at {}", host.name()), LIMIT, || {
            if keys(host)?.1 == 1 { Ok(()) } else { bail!("it has not heard") }
        })?;
    }
    wait_for("the end of the old key's time", LIMIT, || {
        if keys(router)?.1 == 0 { Ok(()) } else { bail!("it is trusted after {:?}", began.elapsed()) }
    })
}
