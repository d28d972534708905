//! `direct-throughput`: iperf3 by name over the direct path, against plain TCP between the same hosts on the same veth
//! link. Both sides take turns, with the same congestion control; ratios are medians over pairs of connections.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use super::{Findings, Scenario, pair};
use crate::agent::{self, Agents};
use crate::host::Host;
use crate::iperf::Load;
use crate::observe;
use crate::report::Limit::{AtLeast, AtMost, Below, Exactly};
use crate::report::{Bound, bound};
use crate::turns::{self, End, Pace, Ways};
use crate::wire::set_rate;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "direct-throughput",
    summary: "iperf3 over the direct path and over plain TCP on one veth link, alternating",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 7] = [
    bound("ratio_1", AtLeast(0.97)),
    bound("ratio_8", AtLeast(0.97)),
    bound("ratio_reverse", AtLeast(0.97)),
    bound("ratio_1g", AtLeast(0.98)),
    bound("cpu_per_byte_ratio", AtMost(1.1)),
    bound("failed", Exactly(0.0)),
    // By the kernel's count: all signalling, and what was encapsulated. The ratios are of what the link carries, which
    // is the same for the same payload on the direct path alone.
    bound("datagrams_sent", Below(10_000.0)),
];

/// What the link is held to for the last figure.
const HELD_MBIT: u32 = 1000;
const FULL: Pace = Pace { rounds: 25, turn: Duration::from_millis(50) };
/// What the other way left in a queue takes a while at that rate.
const HELD: Pace = Pace { rounds: 5, turn: Duration::from_millis(200) };

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = pair::build("direct-throughput", dir)?;
    let _agents = Agents::start(&lab)?;
    let hosts = [lab.host("client")?, lab.host("server")?];
    pair::demand_kernel(&hosts, findings)?;
    let (client, server) = (End::bind(hosts[0], 0)?, End::bind(hosts[1], 1)?);
    let _iperf = server.serve()?;
    agent::publish(hosts[1], "iperf.shop", &format!("0.0.0.0:{}", turns::PORTS[1]), &[])?;
    let plain = pair::address(hosts[1])?;
    let (named, _) = agent::virtual_addresses(hosts[0], "iperf.shop")?;
    let ways = Ways { client, server, addresses: [&plain, &named] };
    let before = datagrams(&hosts)?;

    let ratios = ways.compare(Load { streams: 1, reverse: false }, FULL, "veth, 1 stream", findings)?;
    findings.set("ratio_1", ratios.throughput);
    findings.set("cpu_per_byte_ratio", ratios.busy_per_byte);
    let ratios = ways.compare(Load { streams: 8, reverse: false }, FULL, "veth, 8 streams", findings)?;
    findings.set("ratio_8", ratios.throughput);
    let ratios = ways.compare(Load { streams: 1, reverse: true }, FULL, "veth, 1 stream from the server", findings)?;
    findings.set("ratio_reverse", ratios.throughput);
    for host in hosts {
        set_rate(Some(host), "eth0", HELD_MBIT)?;
    }
    let ratios =
        ways.compare(Load { streams: 1, reverse: false }, HELD, "link held to 1 Gbit/s, 1 stream", findings)?;
    findings.set("ratio_1g", ratios.throughput);
    findings.set("cpu_per_byte_ratio_1g", ratios.busy_per_byte);
    findings.set("datagrams_sent", datagrams(&hosts)? - before);
    Ok(())
}

/// UDP datagrams that hosts have sent.
fn datagrams(hosts: &[&Host]) -> Result<f64> {
    let sent = hosts.iter().map(|host| Ok(observe::nstat(host)?.get("UdpOutDatagrams").copied().unwrap_or_default()));
    sent.sum()
}
