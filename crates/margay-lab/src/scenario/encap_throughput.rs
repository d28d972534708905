//! `encap-throughput`: iperf3 by name over the user-space path, against plain TCP between the same hosts on the same
//! veth link. Both sides alternate in one run, with the same congestion control; ratios are medians over pairs.

use std::path::Path;

use anyhow::Result;

use super::{Findings, Scenario, pair};
use crate::agent::{self, Agents};
use crate::host::Host;
use crate::iperf::{self, Load, Ways};
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound, median};
use crate::server;
use crate::wire::set_offload;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "encap-throughput",
    summary: "iperf3 over the user-space path and over plain TCP on one veth link, alternating",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 4] = [
    bound("ratio_1", AtLeast(0.4)),
    bound("ratio_8", AtLeast(0.4)),
    bound("ratio_wire", AtLeast(0.35)),
    bound("failed", Exactly(0.0)),
];

/// Pairs of measurements of round trips.
const PAIRS: usize = 5;
const ROUND_TRIPS: usize = 3000;

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = pair::build("encap-throughput", dir)?;
    let _agents = Agents::start_encapsulated(&lab)?;
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    let plain = pair::address(server)?;
    let _iperf = iperf::serve(server)?;
    agent::publish(server, "iperf.shop", &format!("0.0.0.0:{}", iperf::PORT), &[])?;
    let _echo = server::echo(server, &["0.0.0.0:7".parse()?])?;
    agent::publish(server, "echo.shop", "0.0.0.0:7", &[])?;
    let (named, _) = agent::virtual_addresses(client, "iperf.shop")?;
    let ways = Ways { client, plain: &plain, named: &named };

    let ratios = ways.compare(Load { streams: 1, reverse: false }, "veth, 1 stream", findings)?;
    findings.set("ratio_1", ratios.throughput);
    findings.set("cpu_per_byte_ratio", ratios.busy_per_byte);
    let ratios = ways.compare(Load { streams: 8, reverse: false }, "veth, 8 streams", findings)?;
    findings.set("ratio_8", ratios.throughput);
    compare_round_trips(client, &plain, findings)?;
    for host in [client, server] {
        set_offload(Some(host), "eth0", false)?;
    }
    let ratios = ways.compare(Load { streams: 1, reverse: false }, "segments cut on the way, 1 stream", findings)?;
    findings.set("ratio_wire", ratios.throughput);
    findings.figures.add("failed", 0.0);
    Ok(())
}

fn compare_round_trips(client: &Host, plain: &str, findings: &mut Findings) -> Result<()> {
    let (mut added_us, mut plain_us) = (vec![], vec![]);
    for _ in 0..PAIRS {
        let base = server::round_trips(client, plain, ROUND_TRIPS, &[])?.median_us;
        added_us.push(server::round_trips(client, "echo.shop.sal.internal", ROUND_TRIPS, &[])?.median_us - base);
        plain_us.push(base);
    }
    findings.set("rtt_added_us", median(&added_us));
    findings.set("rtt_plain_us", median(&plain_us));
    Ok(())
}
