//! `router-throughput`: datagrams of full size through the service router, and through the kernel's forwarding of IP
//! (Serval, Table 2).

use std::path::Path;

use anyhow::Result;

use super::{Findings, Scenario, router_rate, site};
use crate::lab::Lab;
use crate::report::Limit::AtLeast;
use crate::report::{Bound, bound};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "router-throughput",
    summary: "datagrams of full size through the service router in the kernel, and through IP forwarding, alternating",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 2] = [bound("ratio", AtLeast(0.97)), bound("forwarded_share", AtLeast(0.99))];

/// Payload of the largest datagram on an Ethernet.
const DATAGRAM_LEN: usize = 1472;
const PREFIXES: u32 = 1000;

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab: Lab = site::build("router-throughput", site::V4, &[] as &[&str], dir)?;
    let router = lab.host("router")?;
    router_rate::prepare(router)?;
    let rate = router_rate::measure(router, PREFIXES, DATAGRAM_LEN)?;
    let gbit_s = |ns: f64| (DATAGRAM_LEN * 8) as f64 / ns;
    findings.set("router_gbit_s", gbit_s(rate.router_ns));
    findings.set("ip_gbit_s", gbit_s(rate.ip_ns));
    findings.set("ratio", rate.ip_ns / rate.router_ns);
    findings.set("forwarded_share", rate.forwarded_share);
    Ok(())
}
