//! `router-rate`: first packets a second of the service router in the kernel, against the kernel's forwarding of IP
//! with one route (Serval §6.1), at a thousand, a hundred thousand and a million prefixes; and what a process makes of
//! it.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::{Findings, Scenario, is_long, site};
use crate::command::progress;
use crate::host::Host;
use crate::program::output_within;
use crate::report::Limit::{AtLeast, AtMost};
use crate::report::{Bound, bound};
use crate::traffic::{OUTSIDE, OWN, RouteRate, hop};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "router-rate",
    summary: "first packets of random names through the service router in the kernel, and the same through IP \
              forwarding, alternating",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 4] = [
    bound("ratio_vs_ip_1k", AtLeast(1.5)),
    bound("ratio_vs_ip_1m", AtLeast(1.0)),
    bound("bytes_per_prefix", AtMost(400.0)),
    // One in five seconds per next hop goes to the agent.
    bound("forwarded_share", AtLeast(0.99)),
];

/// The smallest first packet.
const SYN_LEN: usize = 1200;
const LIMIT: Duration = Duration::from_secs(180);

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = site::build("router-rate", site::V4, &[] as &[&str], dir)?;
    let router = lab.host("router")?;
    prepare(router)?;
    let mut forwarded = 1.0_f64;
    for (name, prefixes) in [("1k", 1000), ("100k", 100_000), ("1m", 1_000_000)] {
        let rate = measure(router, prefixes, SYN_LEN)?;
        progress(&format!(
            "{prefixes} prefixes: {:.0} ns a packet, IP forwarding {:.0}, one rule {:.0}, a bare redirect {:.0}, a \
             process {:.0}",
            rate.router_ns, rate.ip_ns, rate.one_rule_ns, rate.bare_ns, rate.user_ns
        ));
        findings.set(&format!("ratio_vs_ip_{name}"), rate.ip_ns / rate.router_ns);
        findings.set(&format!("router_ns_{name}"), rate.router_ns);
        findings.set(&format!("ip_ns_{name}"), rate.ip_ns);
        findings.set(&format!("ns_per_lookup_{name}"), rate.router_ns - rate.one_rule_ns);
        findings.set("ns_per_lookup", rate.router_ns - rate.one_rule_ns);
        findings.set("bare_ns", rate.bare_ns);
        findings.set("bytes_per_prefix", rate.bytes_per_prefix);
        findings.set("ratio_user_vs_ip", rate.ip_ns / rate.user_ns);
        forwarded = forwarded.min(rate.forwarded_share);
    }
    findings.set("forwarded_share", forwarded);
    Ok(())
}

/// Gives the host a side where packets come in and one where they leave.
///
/// # Errors
///
/// The kernel refuses.
pub fn prepare(router: &Host) -> Result<()> {
    let to = hop(0);
    router.shell(&format!(
        "set -e
         ip link add in0 type veth peer name in1
         ip link add out0 type veth peer name out1
         ip link set in0 address 02:00:00:00:00:09
         for name in in0 in1 out0 out1; do echo 0 >/proc/sys/net/ipv4/conf/$name/rp_filter; ip link set $name up; done
         echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
         echo 1 >/proc/sys/net/ipv4/ip_forward
         ip address add {OWN}/24 dev in0
         ip address add {OUTSIDE}/24 dev out0
         ip neighbour replace {to} lladdr 02:00:00:00:00:77 dev out0 nud permanent"
    ))?;
    Ok(())
}

/// Measures with datagrams of `len` bytes.
///
/// # Errors
///
/// The kernel runs no frames, or the table cannot be made.
pub fn measure(router: &Host, prefixes: u32, len: usize) -> Result<RouteRate> {
    let packets = if is_long() { 2_000_000 } else { 400_000 };
    let [prefixes, packets, len] = [prefixes, packets, len as u32].map(|number| number.to_string());
    let mut command = router.traffic([
        "route-rate",
        "--prefixes",
        &prefixes,
        "--packets",
        &packets,
        "--rounds",
        "5",
        "--bytes",
        &len,
    ])?;
    let output = output_within(&mut command, LIMIT)?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).context("no figures")
}
