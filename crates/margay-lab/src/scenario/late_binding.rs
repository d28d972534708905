//! `late-binding`: two instances of a service, found by their name. The first packet of each connection goes through
//! the router, the data does not; when an instance goes, the next connection lands on the other.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde_json::Value;

use super::{Findings, Scenario};
use crate::agent::{self, Agents};
use crate::command::progress;
use crate::host::Host;
use crate::lab::Lab;
use crate::observe::{self, Passing};
use crate::report::Limit::{AtLeast, AtMost, Below, Exactly};
use crate::report::{Bound, bound};
use crate::server::{Nginx, fetch, fetch_text, noise, served, sha256};
use crate::topology::Topology;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "late-binding",
    summary: "200 fetches by name from two instances behind a router; then one instance is withdrawn",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 8] = [
    bound("ok", Exactly(FETCHES as f64)),
    bound("share_min", AtLeast(0.35)),
    bound("router_byte_share", AtMost(0.01)),
    bound("decisions_per_fetch", AtLeast(1.0)),
    bound("kernel_share", AtLeast(0.9)),
    bound("next_connect_ms", Below(1000.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

const FETCHES: usize = 200;
const FILE_BYTES: usize = 10_000_000;
const AFTERWARDS: usize = 20;
const URL: &str = "http://web.shop.sal.internal";
const SERVICE: &str = "web.shop";

/// One subnet; also what the demonstration uses.
pub const TOPOLOGY: &str = include_str!("../../../../examples/web-shop.toml");

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("examples/web-shop.toml", TOPOLOGY)?, dir)?;
    let _agents = Agents::start(&lab)?;
    let (client, router) = (lab.host("client")?, lab.host("router")?);
    let content = noise(FILE_BYTES, 1);
    let mut servers = Vec::new();
    for name in ["web1", "web2"] {
        let server = Nginx::start(lab.host(name)?, &["0.0.0.0:80"])?;
        server.put("file", &content)?;
        agent::publish(lab.host(name)?, SERVICE, "0.0.0.0:80", &[])?;
        servers.push(server);
    }
    agent::await_instances(router, SERVICE, 2)?;
    let expected = sha256(client, &servers[0].root.join("file"))?;
    observe::count(router, "seen", Passing::In, "iifname eth0")?;
    observe::count(router, "sent", Passing::Out, "oifname eth0")?;

    let before = forwarded(router)?;
    let (mut ok, mut wrong_bytes) = (0_usize, 0_usize);
    for number in 0..FETCHES {
        let got = fetch(client, &[], &format!("{URL}/file"))?;
        match (got.status, got.is(&expected)) {
            (0, true) => ok += 1,
            (0, false) => wrong_bytes += 1,
            _ => findings.note(format!("fetch {number}: {}", got.error)),
        }
    }
    let counts = observe::counts(router)?;
    let router_bytes: f64 = counts.values().map(|count| count.bytes).sum();
    let served = served(&servers, "file", ok)?;
    progress(&format!("served: {served:?}; router saw {router_bytes} bytes"));
    findings.set("ok", ok as f64);
    findings.set("wrong_bytes", wrong_bytes as f64);
    findings.set("share_min", served.iter().copied().min().unwrap_or_default() as f64 / FETCHES as f64);
    findings.set("router_byte_share", router_bytes / (FETCHES * FILE_BYTES) as f64);
    findings.figures.add("failed", (FETCHES - ok) as f64);
    count_decisions(router, before, findings)?;
    look_at_names(client, findings)?;
    withdraw_one(&lab, findings)
}

/// A connection is shown by the name that its program has asked for, by whichever family it goes.
fn look_at_names(client: &Host, findings: &mut Findings) -> Result<()> {
    for family in ["-4", "-6"] {
        fetch(client, &[family], &format!("{URL}/host"))?;
    }
    let flows = agent::flows(client)?;
    let named = flows.iter().filter(|flow| flow["name"] == SERVICE).count();
    if flows.is_empty() || named < flows.len() {
        findings.note(format!("{named} of {} flows are shown by name", flows.len()));
        findings.figures.add("failed", 1.0);
    }
    Ok(())
}

/// First packets that the router has forwarded; and those of them that its kernel has, which leaves one to the agent
/// now and then.
fn forwarded(router: &Host) -> Result<[f64; 2]> {
    Ok([
        agent::metric(router, "margay_forwarded_total")?,
        agent::metric(router, "margay_kernel_router_forwarded_total")?,
    ])
}

/// Each first packet was decided upon by the router, by the rule of an instance. What a rule says of itself goes with
/// the rule: an instance that was silent for a second on a busy machine has a new one.
fn count_decisions(router: &Host, before: [f64; 2], findings: &mut Findings) -> Result<()> {
    let [all, by_kernel] = forwarded(router)?;
    let decisions = all - before[0];
    findings.set("decisions_per_fetch", decisions / FETCHES as f64);
    findings.set("kernel_share", (by_kernel - before[1]) / decisions);
    let routes = agent::routes(router, SERVICE)?;
    let is_of_instance = |route: &&Value| route["origin"] == "registered" && route["action"] == "forward";
    let (own, others): (Vec<_>, Vec<_>) = routes.iter().partition(is_of_instance);
    let packets = |rules: Vec<&Value>| rules.iter().filter_map(|rule| rule["packets"].as_f64()).sum::<f64>();
    let (own, others) = (packets(own), packets(others));
    if own == 0.0 || others > 0.0 {
        findings.note(format!("first packets by rules of instances: {own}, by others: {others}"));
        findings.figures.add("failed", 1.0);
    }
    Ok(())
}

/// Time from the word "withdraw" until a new connection was answered by the other instance; and none after it goes
/// wrong.
fn withdraw_one(lab: &Lab, findings: &mut Findings) -> Result<()> {
    let client = lab.host("client")?;
    let start = Instant::now();
    agent::withdraw(lab.host("web2")?, SERVICE)?;
    let mut first = None;
    while first.is_none() {
        match fetch_text(client, &format!("{URL}/host"))?.as_str() {
            "web1" => first = Some(start.elapsed()),
            _ if start.elapsed() > Duration::from_secs(5) => bail!("the withdrawn instance still gets connections"),
            _ => {}
        }
    }
    findings.set("next_connect_ms", first.unwrap_or_default().as_secs_f64() * 1e3);
    for _ in 0..AFTERWARDS {
        let answered = fetch_text(client, &format!("{URL}/host"));
        if !matches!(answered.as_deref(), Ok("web1")) {
            findings.note(format!("after the withdrawal: {answered:?}"));
            findings.figures.add("failed", 1.0);
        }
    }
    Ok(())
}
