//! `round-trips`: one byte there and back, again and again, over established flows; by name and plain, alternating.

use std::path::Path;

use anyhow::Result;

use super::{Findings, Scenario, pair};
use crate::agent::{self, Agents};
use crate::command::progress;
use crate::host::Host;
use crate::report::Limit::{AtMost, Exactly};
use crate::report::{Bound, bound, median};
use crate::server::{self, RoundTrips};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "round-trips",
    summary: "request and response over established flows, by name and plain, alternating",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 2] = [bound("p50_ratio", AtMost(1.1)), bound("failed", Exactly(0.0))];

const PAIRS: usize = 9;
const COUNT: usize = 20_000;
const NAME: &str = "echo.shop.sal.internal";

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = pair::build("round-trips", dir)?;
    let _agents = Agents::start(&lab)?;
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    pair::demand_kernel(&[client, server], findings)?;
    let _echo = server::echo(server, &["0.0.0.0:7".parse()?])?;
    agent::publish(server, "echo.shop", "0.0.0.0:7", &[])?;
    let plain = pair::address(server)?;
    let tcp = compare(client, &plain, &[])?;
    findings.set("p50_ratio", tcp.p50);
    findings.set("p99_ratio", tcp.p99);
    findings.set("p50_plain_us", tcp.plain_us);
    let udp = compare(client, &plain, &["--udp"])?;
    findings.set("p50_ratio_udp", udp.p50);
    findings.set("p99_ratio_udp", udp.p99);
    Ok(())
}

/// By name to plain: medians over pairs.
struct Ratios {
    p50: f64,
    p99: f64,
    plain_us: f64,
}

fn compare(client: &Host, plain: &str, options: &[&str]) -> Result<Ratios> {
    let measure = |to: &str| -> Result<RoundTrips> { server::round_trips(client, to, COUNT, options) };
    let (mut p50, mut p99, mut plain_us) = (vec![], vec![], vec![]);
    for pair in 0..PAIRS {
        // Which goes first alternates, too: neither always meets the warmer machine.
        let (base, ours) = if pair % 2 == 0 {
            let base = measure(plain)?;
            (base, measure(NAME)?)
        } else {
            let ours = measure(NAME)?;
            (measure(plain)?, ours)
        };
        progress(&format!(
            "{options:?}: plain {:.1} us (p99 {:.1}), by name {:.1} us (p99 {:.1})",
            base.median_us, base.p99_us, ours.median_us, ours.p99_us
        ));
        p50.push(ours.median_us / base.median_us);
        p99.push(ours.p99_us / base.p99_us);
        plain_us.push(base.median_us);
    }
    Ok(Ratios { p50: median(&p50), p99: median(&p99), plain_us: median(&plain_us) })
}
