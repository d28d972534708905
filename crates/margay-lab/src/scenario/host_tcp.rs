//! `host-tcp`: whatever way segments of flows take past the eBPF programs, the host's own TCP resets no flow.
//! Something on the way takes DF off and a narrow link cuts segments; then, on each end, the interface goes down and
//! up, the programs are taken off, and an agent that finds no maps of its own layout takes the place of one that was
//! killed.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::moved::{self, NAME};
use super::{Findings, Scenario, pair};
use crate::agent::{self, Agents};
use crate::host::Host;
use crate::interface::{self, Act};
use crate::lab::Lab;
use crate::observe;
use crate::program::wait_for;
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::series::Series;
use crate::server::{self, Outcome};
use crate::topology::Topology;
use crate::transfers::{Order, Transfers};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "host-tcp",
    summary: "links down and up, layouts old and new, fragments on the way: the host's own TCP resets no flow",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 6] = [
    bound("resets", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
    bound("windows", Exactly(4.0)),
    // Otherwise it has been asked for none.
    bound("dropped_resets_of_hosts", AtLeast(2.0)),
    // Otherwise none was on the way.
    bound("fragments", AtLeast(20.0)),
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

/// As some firewalls do (`scrub no-df` of pf).
const TAKE_DF_OFF: &str = "add table ip lab_df; add chain ip lab_df pre { type filter hook prerouting priority -150; \
 }; \
                           add rule ip lab_df pre meta l4proto tcp ip frag-off 0x4000 ip frag-off set 0";
const WAYS: [&str; 8] =
    ["up:cubic", "down:cubic", "up:cubic", "down:cubic", "up:cubic", "down:cubic", "up:cubic", "down:cubic"];
/// Bytes per second of each.
const PACE: u64 = 200_000;
const CALM_BYTES: u64 = PACE;
/// The second half is of messages of several segments, and the second quarter waits until the flow is direct: an
/// agent that has carried large ones knows how narrow the way is.
const EXCHANGES: [&str; 15] = [
    "attempt",
    "echo.shop.sal.internal",
    "7",
    "--count",
    "1",
    "--rounds",
    "100",
    "--bytes",
    "100",
    "--then-bytes",
    "4000",
    "--wait-before",
    "25",
    "--round-pause-ms=20",
    "--timeout-ms=60000",
];
const STEP_LIMIT: Duration = Duration::from_secs(30);

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("host-tcp", TOPOLOGY)?, dir)?;
    for gateway in ["near", "far"] {
        lab.host(gateway)?.run(["nft", TAKE_DF_OFF])?;
    }
    let _agents = Agents::start(&lab)?;
    let ends = [lab.host("client")?, lab.host("server")?];
    pair::demand_kernel(&ends, findings)?;
    ends.iter().try_for_each(|host| observe::count_virtual_resets(host))?;
    fragments(&ends, findings)?;
    let mut serving = moved::serve(ends[1])?;
    findings.set("windows", 0.0);
    let mut transfers = Transfers::start(ends[0], &mut serving, Order { to: NAME, ways: &WAYS, pace: PACE })?;
    pair::attempt_part("windows", findings, |findings| {
        settle(&ends, &mut transfers)?;
        for host in ends {
            let [down, up] = [Act::Down(0), Act::Up(0)];
            interface::change(&lab, host, &[down])?;
            interface::change(&lab, host, &[up])?;
            settle(&ends, &mut transfers)?;
            findings.figures.add("windows", 1.0);

            replace_agent(host)?;
            settle(&ends, &mut transfers)?;
            findings.figures.add("windows", 1.0);
        }
        Ok(())
    });
    transfers.finish("all windows", findings)?;
    findings.set("dropped_resets_of_hosts", total(&ends, "margay_kernel_drop_reset_of_host_total")?);
    pair::report_resets(&ends, findings)
}

/// Segments that are cut on the way.
fn fragments(ends: &[&Host], findings: &mut Findings) -> Result<()> {
    let _echo = server::echo(ends[1], &["0.0.0.0:7".parse()?])?;
    agent::publish(ends[1], "echo.shop", "0.0.0.0:7", &[])?;
    let exchanges = Series::<Outcome>::start(ends[0], &EXCHANGES.map(str::to_owned))?;
    agent::await_paths(ends, true, 1, STEP_LIMIT)?;
    let outcomes = exchanges.finish(STEP_LIMIT * 2)?;
    let outcome = outcomes.first().context("the exchanges have no outcome")?;
    findings.figures.add("failed", outcome.failed() as f64);
    outcome.errors.keys().for_each(|error| findings.note(format!("fragments: {error}")));
    findings.set("fragments", total(ends, "margay_kernel_up_fragment_total")?);
    Ok(())
}

/// Kills the agent, and takes the programs off and the mark away that says by which layout the maps were made. The
/// next agent comes when the host's TCP has had segments of flows.
fn replace_agent(host: &Host) -> Result<()> {
    agent::kill(host)?;
    let before = resets_of(host)?;
    host.run(["sh", "-c", "rm /run/margay/bpf/layout /run/margay/bpf/link_*"])?;
    wait_for("resets of the host's own TCP", STEP_LIMIT, || {
        if resets_of(host)? > before { Ok(()) } else { bail!("there are none") }
    })?;
    agent::start_again(host)
}

/// Resets that a host's TCP has made, whether or not they have left the host.
fn resets_of(host: &Host) -> Result<f64> {
    let text = host.run(["cat", "/proc/net/snmp"])?;
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Tcp:")).map(str::split_whitespace);
    let (names, values) = (lines.next().context("no names")?, lines.next().context("no values")?);
    let (_, value) = names.zip(values).find(|(name, _)| *name == "OutRsts").context("no OutRsts")?;
    Ok(value.parse()?)
}

/// All transfers go on, and go direct.
fn settle(ends: &[&Host], transfers: &mut Transfers<'_>) -> Result<()> {
    transfers.await_bytes("transfers that go on", CALM_BYTES, STEP_LIMIT)?;
    agent::await_paths(ends, true, WAYS.len(), STEP_LIMIT)?;
    transfers.await_bytes("transfers that go direct", CALM_BYTES, STEP_LIMIT)
}

fn total(ends: &[&Host], metric: &str) -> Result<f64> {
    ends.iter().try_fold(0.0, |sum, host| Ok(sum + agent::metric(host, metric)?))
}
