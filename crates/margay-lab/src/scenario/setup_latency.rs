//! `setup-latency`: what the first packet costs: `connect()` plain, to a known instance, to a known host through the
//! router, and to a host never met; and connections per second. Both sides alternate in one run.

use std::path::Path;

use anyhow::Result;

use super::{Findings, Scenario, pair, site};
use crate::agent::{self, Agents};
use crate::command::progress;
use crate::host::Host;
use crate::lab::Lab;
use crate::report::Limit::{AtLeast, AtMost, Exactly};
use crate::report::{Bound, bound, median};
use crate::server;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "setup-latency",
    summary: "connect() plain, to a known instance, through the router, and to hosts never met; connections per second",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 4] = [
    bound("p50_known_instance", AtMost(2.5)),
    bound("p50_known_host", AtMost(4.0)),
    bound("rate_ratio", AtLeast(0.5)),
    bound("failed", Exactly(0.0)),
];

const PAIRS: usize = 7;
/// Connections of one measurement, one after the other; and at once, for the rate.
const COUNT: usize = 400;
const RATE_COUNT: usize = 2000;
const RATE_PARALLEL: usize = 16;
/// Hosts that are met for the first time.
const STRANGERS: usize = 8;
const NAME: &str = "echo.shop.sal.internal";

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let hosts =
        ["server", "client"].map(str::to_owned).into_iter().chain((0..STRANGERS).map(|number| format!("far{number}")));
    let lab = site::build("setup-latency", site::V4, &hosts.collect::<Vec<_>>(), dir)?;
    // Ten thousand connections that have just ended keep as many ports from the next ones.
    for host in &lab.hosts {
        host.shell(
            "echo 10000 60999 > /proc/sys/net/ipv4/ip_local_port_range; echo 1 > /proc/sys/net/ipv4/tcp_tw_reuse",
        )?;
    }
    let _agents = Agents::start(&lab)?;
    // A router knows the instances of its names itself; programs on it find them without another hop.
    let (router, server, client) = (lab.host("router")?, lab.host("server")?, lab.host("client")?);
    pair::demand_kernel(&[router, server, client], findings)?;
    let _echo = server::echo(server, &["0.0.0.0:7".parse()?])?;
    agent::publish(server, "echo.shop", "0.0.0.0:7", &[])?;
    agent::await_instances(router, "echo.shop", 1)?;
    let plain = pair::address(server)?;

    let known_instance = compare(router, &plain, COUNT, 1, "to a known instance", findings)?;
    findings.set("p50_known_instance", known_instance.p50);
    findings.set("taken_share_known_instance", known_instance.taken_share);
    let known_host = compare(client, &plain, COUNT, 1, "through the router", findings)?;
    findings.set("p50_known_host", known_host.p50);
    findings.set("taken_share_known_host", known_host.taken_share);
    findings.set("p50_plain_us", known_host.plain_us);
    let rate = compare(client, &plain, RATE_COUNT, RATE_PARALLEL, "at once, through the router", findings)?;
    findings.set("rate_ratio", rate.rate);
    findings.set("taken_share", rate.taken_share);
    findings.set("rate_plain_per_s", rate.plain_per_s);
    let rate = compare(router, &plain, RATE_COUNT, RATE_PARALLEL, "at once, to a known instance", findings)?;
    findings.set("rate_ratio_known_instance", rate.rate);
    let first_us = first_contacts(&lab, client, findings)?;
    findings.set("p50_first_contact", first_us / known_host.plain_us);
    findings.set("p50_first_contact_us", first_us);
    Ok(())
}

/// By name to plain: medians over pairs.
struct Ratios {
    p50: f64,
    rate: f64,
    plain_us: f64,
    plain_per_s: f64,
    /// Of all connections by name, those that the kernels set up by themselves.
    taken_share: f64,
}

fn compare(
    from: &Host,
    plain: &str,
    count: usize,
    parallel: usize,
    what: &str,
    findings: &mut Findings,
) -> Result<Ratios> {
    let (mut p50, mut rate, mut plain_us, mut plain_per_s) = (vec![], vec![], vec![], vec![]);
    let mut failed = 0;
    // The first connection of all may be to a host never met, which is another figure.
    failed += server::connects(from, NAME, 1, 1)?.failed;
    let taken = agent::taken(from)?;
    for pair in 0..PAIRS {
        let mut measure = |to: &str| -> Result<server::Connects> {
            let found = server::connects(from, to, count, parallel)?;
            failed += found.failed;
            if found.failed > 0 {
                findings.note(format!("{what}, to {to}: {} failed, one of them {}", found.failed, found.error));
            }
            Ok(found)
        };
        // Which goes first alternates, too: neither always meets the warmer machine.
        let (base, ours) = if pair % 2 == 0 {
            let base = measure(plain)?;
            (base, measure(NAME)?)
        } else {
            let ours = measure(NAME)?;
            (measure(plain)?, ours)
        };
        let so_far = agent::taken(from)? - taken;
        progress(&format!(
            "{what}: plain {:.0} us, {:.0} per s; by name {:.0} us, {:.0} per s; the kernels set up {:.1} %",
            base.median_us,
            base.per_s,
            ours.median_us,
            ours.per_s,
            1e2 * so_far / ((pair + 1) * count) as f64
        ));
        p50.push(ours.median_us / base.median_us);
        rate.push(ours.per_s / base.per_s);
        plain_us.push(base.median_us);
        plain_per_s.push(base.per_s);
    }
    if failed > 0 {
        findings.figures.add("failed", failed as f64);
    }
    let taken = agent::taken(from)? - taken;
    Ok(Ratios {
        p50: median(&p50),
        rate: median(&rate),
        plain_us: median(&plain_us),
        plain_per_s: median(&plain_per_s),
        taken_share: taken / (PAIRS * count) as f64,
    })
}

/// Microseconds of `connect()` to hosts never met, the middle of them.
fn first_contacts(lab: &Lab, client: &Host, findings: &mut Findings) -> Result<f64> {
    let known = || -> Result<u64> { Ok(agent::status(client)?["associations"].as_u64().unwrap_or_default()) };
    let mut echoes = Vec::new();
    for number in 0..STRANGERS {
        let far = lab.host(&format!("far{number}"))?;
        echoes.push(server::echo(far, &["0.0.0.0:7".parse()?])?);
        agent::publish(far, &format!("far{number}.shop"), "0.0.0.0:7", &[])?;
    }
    let (before, mut times_us) = (known()?, Vec::new());
    for number in 0..STRANGERS {
        let found = server::connects(client, &format!("far{number}.shop.sal.internal"), 1, 1)?;
        findings.figures.add("failed", found.failed as f64);
        times_us.push(found.median_us);
    }
    let met = known()?.saturating_sub(before);
    if met != STRANGERS as u64 {
        findings.note(format!("the client has met {met} hosts in {STRANGERS} contacts: not all were first ones"));
        findings.figures.add("failed", 1.0);
    }
    Ok(median(&times_us))
}
