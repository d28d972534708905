//! `judged`: something on a host asks by which interface packets come, set while a flow is direct: a reverse-path
//! check of the packet filter, the kernel's own, and a policy rule, which the agent does not look for. The flow goes
//! on by `sal0`.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::{Findings, Scenario, pair};
use crate::agent::{self, Agents};
use crate::host::Host;
use crate::lab::Lab;
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::series::Series;
use crate::server::{self, Outcome};
use crate::topology::Topology;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "judged",
    summary: "reverse-path checks and policy rules that would drop what is rewritten at a card",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 3] = [
    bound("failed", Exactly(0.0)),
    bound("judges", Exactly(JUDGES.len() as f64)),
    // By the policy rule alone: the others are seen before they drop anything that would count.
    bound("undelivered", AtLeast(1.0)),
];

const TOPOLOGY: &str = r#"
[subnet.site]
v4 = "10.1.0.0/24"

[host.router]
role = "router"
links = [{ subnet = "site" }]

[host.server]
role = "agent"
links = [{ subnet = "site" }]

[host.client]
role = "agent"
links = [{ subnet = "site" }]
"#;

/// What judges, how it is set, and how it is taken back. The policy rule is the first: the agent may not have
/// seen yet that a parameter was taken back.
const JUDGES: [(&str, &str, &str); 3] = [
    (
        "a policy rule",
        "ip rule add pref 10 lookup local; ip rule del pref 0; ip rule add pref 5 iif eth0 to 198.18.0.1 blackhole",
        "ip rule del pref 5",
    ),
    (
        "the packet filter",
        "nft 'add table inet fw; add chain inet fw pre { type filter hook prerouting priority -140; }; \
         add rule inet fw pre fib saddr . mark . iif oif missing drop'",
        "nft delete table inet fw",
    ),
    (
        "the kernel's filter",
        "echo 1 > /proc/sys/net/ipv4/conf/eth0/rp_filter",
        "echo 0 > /proc/sys/net/ipv4/conf/eth0/rp_filter",
    ),
];
/// It waits until the flow is direct, and there is a judge.
const EXCHANGES: [&str; 9] =
    ["--count", "1", "--rounds", "100", "--wait-before", "50", "--round-pause-ms", "10", "--timeout-ms=15000"];
const LIMIT: Duration = Duration::from_secs(30);

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("judged", TOPOLOGY)?, dir)?;
    let _agents = Agents::start(&lab)?;
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    pair::demand_kernel(&[client, server], findings)?;
    let _echo = server::echo(server, &["0.0.0.0:7".parse()?])?;
    agent::publish(server, "echo.shop", "0.0.0.0:7", &[])?;
    findings.set("judges", 0.0);
    for (what, set, take_back) in JUDGES {
        pair::attempt_part(what, findings, |findings| {
            let judged = judge(client, server, what, set, findings);
            client.run(["sh", "-c", take_back])?;
            judged
        });
    }
    findings.set("undelivered", agent::metric(client, "margay_kernel_undelivered_total")?);
    Ok(())
}

fn judge(client: &Host, server: &Host, what: &str, set: &str, findings: &mut Findings) -> Result<()> {
    // There is no reverse-path filter of IPv6.
    let (address, _) = agent::virtual_addresses(client, "echo.shop")?;
    let words = ["attempt", &address, "7"].into_iter().chain(EXCHANGES).map(str::to_owned);
    let exchanges = Series::<Outcome>::start(client, &words.collect::<Vec<_>>())?;
    agent::await_paths(&[client, server], true, 1, LIMIT)?;
    client.run(["sh", "-c", set])?;
    let outcomes = exchanges.finish(LIMIT)?;
    let outcome = outcomes.first().context("the exchanges have no outcome")?;
    findings.figures.add("failed", outcome.failed() as f64);
    outcome.errors.keys().for_each(|error| findings.note(format!("{what}: {error}")));
    findings.figures.add("judges", 1.0);
    Ok(())
}
