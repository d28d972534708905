//! `narrow-path`: a link between the hosts is narrower than those of both. Datagrams go direct; then they grow larger
//! than that link takes. A router says so, once to each end, and the rest goes encapsulated in pieces.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::{Findings, Scenario, pair};
use crate::agent::{self, Agents};
use crate::lab::Lab;
use crate::report::Limit::{AtLeast, AtMost, Exactly};
use crate::report::{Bound, bound};
use crate::series::Series;
use crate::server::{self, Outcome};
use crate::topology::Topology;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "narrow-path",
    summary: "direct datagrams grow larger than a link in the middle of the way takes",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 5] = [
    // One in each direction, as without Margay.
    bound("lost", AtMost(2.0)),
    bound("too_big_heard", AtLeast(2.0)),
    // Otherwise nothing was direct, and nothing could be too big.
    bound("direct_packets", AtLeast(10.0)),
    bound("exchanged", Exactly(ROUNDS as f64)),
    bound("failed", Exactly(0.0)),
];

const TOPOLOGY: &str = r#"
[subnet.left]
v4 = "10.1.0.0/24"

[subnet.middle]
v4 = "10.2.0.0/24"
mtu = 1300

[subnet.right]
v4 = "10.3.0.0/24"

[host.near]
role = "gateway"
links = [{ subnet = "left" }, { subnet = "middle" }]

[host.far]
role = "gateway"
links = [{ subnet = "middle" }, { subnet = "right" }]

[host.router]
role = "router"
links = [{ subnet = "left" }]

[host.client]
role = "agent"
links = [{ subnet = "left" }]

[host.server]
role = "agent"
links = [{ subnet = "right" }]
"#;

/// How long the flow may take to be direct.
const LIMIT: Duration = Duration::from_secs(30);
/// Exchanges; the second half is of large datagrams, and the second quarter waits until the flow is direct.
const ROUNDS: usize = 100;
const EXCHANGES: [&str; 19] = [
    "attempt",
    "echo.shop.sal.internal",
    "7",
    "--udp",
    "--count",
    "1",
    "--rounds",
    "100",
    "--bytes",
    "100",
    "--then-bytes",
    "1440",
    "--wait-before",
    "25",
    "--round-pause-ms",
    "20",
    "--resend-ms",
    "200",
    "--timeout-ms=60000",
];

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("narrow-path", TOPOLOGY)?, dir)?;
    let _agents = Agents::start(&lab)?;
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    pair::demand_kernel(&[client, server], findings)?;
    let _echo = server::echo(server, &["0.0.0.0:7".parse()?])?;
    agent::publish(server, "echo.shop", "0.0.0.0:7", &[])?;
    let exchanges = Series::<Outcome>::start(client, &EXCHANGES.map(str::to_owned))?;
    agent::await_paths(&[client, server], true, 1, LIMIT)?;
    let outcomes = exchanges.finish(LIMIT * 2)?;
    let outcome = outcomes.first().context("the exchanges have no outcome")?;
    findings.figures.add("failed", outcome.failed() as f64);
    findings.set("exchanged", if outcome.failed() == 0 { ROUNDS as f64 } else { 0.0 });
    findings.set("lost", outcome.lost as f64);
    let both = |name| Ok(agent::metric(client, name)? + agent::metric(server, name)?) as Result<f64>;
    findings.set("too_big_heard", both("margay_kernel_too_big_total")?);
    findings.set("direct_packets", both("margay_kernel_egress_packets_total")?);
    findings.set("left_too_large", both("margay_kernel_left_too_large_total")?);
    Ok(())
}
