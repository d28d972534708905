//! `black-hole`: a path dies one hop away without a word, 40 ms long, while there is another one over other interfaces
//! of both hosts. Nobody's interface goes down and no router says anything: that transfers stand still is the only
//! sign.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::moved::{self, NAME, Pauses};
use super::{Findings, Scenario, pair};
use crate::agent::{self, Agents};
use crate::command::progress;
use crate::filter;
use crate::interface;
use crate::lab::Lab;
use crate::observe;
use crate::report::Limit::{AtMost, Exactly};
use crate::report::{Bound, bound};
use crate::topology::Topology;
use crate::transfers::{Order, Server, Transfers};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "black-hole",
    summary: "a path dies one hop away without a word, and there is another",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 5] = [
    bound("resets", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("pause_ms_p50", AtMost(1000.0)),
    bound("runs", Exactly((RUNS * WAYS.len()) as f64)),
    bound("failed", Exactly(0.0)),
];

/// Of each of the ways.
const RUNS: usize = 3;
const WAYS: [&[&str]; 3] = [
    &["up:cubic", "up:bbr"],
    &["down:cubic", "down:bbr"],
    // Both ends have something to wait for.
    &["up:cubic", "down:cubic"],
];
/// Bytes per second of each.
const PACE: u64 = 1_000_000;
const CALM_BYTES: u64 = PACE;
const RESUMED_BYTES: u64 = PACE;
const STEP_LIMIT: Duration = Duration::from_secs(10);
/// The gateway of each of the client's links.
const GATEWAYS: [&str; 2] = ["upper", "lower"];

const TOPOLOGY: &str = r#"
[subnet.upwest]
v4 = "10.1.0.0/24"
delay_ms = 10

[subnet.lowwest]
v4 = "10.2.0.0/24"
delay_ms = 10

[subnet.upeast]
v4 = "10.3.0.0/24"

[subnet.loweast]
v4 = "10.4.0.0/24"

[host.upper]
role = "gateway"
links = [{ subnet = "upwest" }, { subnet = "upeast" }]

[host.lower]
role = "gateway"
links = [{ subnet = "lowwest" }, { subnet = "loweast" }]

[host.router]
role = "router"
links = [{ subnet = "upeast" }, { subnet = "loweast" }]

[host.server]
role = "agent"
links = [{ subnet = "upeast" }, { subnet = "loweast" }]

[host.client]
role = "agent"
links = [{ subnet = "upwest" }, { subnet = "lowwest" }]
"#;

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("black-hole", TOPOLOGY)?, dir)?;
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    moved::measure_rtt_ms(client, server, findings)?;
    let _agents = Agents::start(&lab)?;
    pair::demand_kernel(&[client, server], findings)?;
    let mut serving = moved::serve(server)?;
    [client, server].iter().try_for_each(|host| observe::count_virtual_resets(host))?;
    let mut pauses = Pauses::default();
    findings.set("runs", 0.0);
    for number in 0..RUNS * WAYS.len() {
        let ways = WAYS[number % WAYS.len()];
        if number as f64 - findings.figures.get("runs") > moved::FAILED_MAX as f64 {
            break;
        }
        pair::attempt_part(&format!("run {number}, {}", ways.join(" ")), findings, |findings| {
            die(&lab, &mut serving, ways, &mut pauses, findings)?;
            findings.figures.add("runs", 1.0);
            Ok(())
        });
        // Whatever went wrong there, the next run starts with both paths.
        for gateway in GATEWAYS {
            filter::relent(lab.host(gateway)?)?;
        }
    }
    pauses.report_ms("", findings);
    pair::report_resets(&[client, server], findings)?;
    moved::report_moves(&[client, server], findings)
}

/// Transfers, and the path that carries them dies.
fn die(lab: &Lab, serving: &mut Server, ways: &[&str], pauses: &mut Pauses, findings: &mut Findings) -> Result<()> {
    let order = Order { to: NAME, ways, pace: PACE };
    let mut transfers = Transfers::start(lab.host("client")?, serving, order)?;
    let died = under(lab, &mut transfers, ways, pauses);
    // They may go on when the path is back: what they bring is checked in any case.
    for gateway in GATEWAYS {
        filter::relent(lab.host(gateway)?)?;
    }
    transfers.finish(&ways.join(" "), findings)?;
    died
}

fn under(lab: &Lab, transfers: &mut Transfers<'_>, ways: &[&str], pauses: &mut Pauses) -> Result<()> {
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    agent::await_paths(&[client, server], true, ways.len(), STEP_LIMIT)?;
    let before = interface::carried(client)?;
    transfers.await_bytes("calm transfers", CALM_BYTES, STEP_LIMIT)?;
    let gateway = GATEWAYS[interface::busiest(client, &before)?];
    let moment = filter::swallow(lab.host(gateway)?)?;
    let what = format!("{} through {gateway}", ways.join(" "));
    let stood = pauses
        .enter("transfers that go on", transfers, moment.before_us, RESUMED_BYTES, STEP_LIMIT)
        .with_context(|| what.clone())?;
    progress(&format!("{what}: {stood}"));
    Ok(())
}
