//! `direct-throughput`: iperf3 by name over the direct path, against plain TCP between the same hosts on the same veth link.
//! Both sides alternate in one run, with the same congestion control; ratios are medians over pairs.

use std::path::Path;

use anyhow::Result;

use super::{Findings, Scenario, pair};
use crate::agent::{self, Agents};
use crate::host::Host;
use crate::iperf::{self, Load, Ways};
use crate::observe;
use crate::report::Limit::{AtLeast, AtMost, Exactly};
use crate::report::{Bound, bound};
use crate::wire::set_rate;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "direct-throughput",
    summary: "iperf3 over the direct path and over plain TCP on one veth link, alternating",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 6] = [
    bound("ratio_1", AtLeast(0.97)),
    bound("ratio_8", AtLeast(0.97)),
    bound("ratio_reverse", AtLeast(0.97)),
    bound("ratio_1g", AtLeast(0.98)),
    bound("cpu_per_byte_ratio", AtMost(1.1)),
    bound("failed", Exactly(0.0)),
];

/// What the link is held to for the last figure.
const HELD_MBIT: u32 = 1000;

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = pair::build("direct-throughput", dir)?;
    let _agents = Agents::start(&lab)?;
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    pair::demand_kernel(&[client, server], findings)?;
    let _iperf = iperf::serve(server)?;
    agent::publish(server, "iperf.shop", &format!("0.0.0.0:{}", iperf::PORT), &[])?;
    let plain = pair::address(server)?;
    let (named, _) = agent::virtual_addresses(client, "iperf.shop")?;
    let ways = Ways { client, plain: &plain, named: &named };
    let before = datagrams(&[client, server])?;

    let ratios = ways.compare(Load { streams: 1, reverse: false }, "veth, 1 stream", findings)?;
    findings.set("ratio_1", ratios.throughput);
    findings.set("cpu_per_byte_ratio", ratios.busy_per_byte);
    let ratios = ways.compare(Load { streams: 8, reverse: false }, "veth, 8 streams", findings)?;
    findings.set("ratio_8", ratios.throughput);
    let ratios = ways.compare(Load { streams: 1, reverse: true }, "veth, 1 stream from the server", findings)?;
    findings.set("ratio_reverse", ratios.throughput);
    for host in [client, server] {
        set_rate(Some(host), "eth0", HELD_MBIT)?;
    }
    let ratios = ways.compare(Load { streams: 1, reverse: false }, "link held to 1 Gbit/s, 1 stream", findings)?;
    findings.set("ratio_1g", ratios.throughput);
    findings.set("cpu_per_byte_ratio_1g", ratios.busy_per_byte);
    // By the kernel's count; what was encapsulated, and all signalling.
    findings.set("datagrams_sent", datagrams(&[client, server])? - before);
    Ok(())
}

/// UDP datagrams that hosts have sent.
fn datagrams(hosts: &[&Host]) -> Result<f64> {
    let sent = hosts.iter().map(|host| Ok(observe::nstat(host)?.get("UdpOutDatagrams").copied().unwrap_or_default()));
    sent.sum()
}
