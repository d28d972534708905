//! `many-flows`: ten thousand direct flows between two hosts, held open and all sending now and then; what they cost
//! kernel and agents.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use super::{Findings, Scenario, flow_memory, pair};
use crate::agent::{self, Agents};
use crate::program::wait_for;
use crate::report::Limit::{AtLeast, AtMost, Exactly};
use crate::report::{Bound, bound};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "many-flows",
    summary: "10,000 direct TCP flows between two hosts, held open and all sending now and then",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 6] = [
    bound("failed", Exactly(0.0)),
    bound("resets", Exactly(0.0)),
    bound("direct", AtLeast(flow_memory::FLOWS as f64)),
    bound("kernel_bytes_per_flow", AtMost(600.0)),
    // None at all would mean that it is not seen.
    bound("kernel_bytes_per_flow", AtLeast(1.0)),
    bound("user_bytes_per_flow", AtMost(800.0)),
];

/// All of them say something within seconds; those that are not direct by then do not become so.
const LIFT_LIMIT: Duration = Duration::from_secs(20);

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = pair::build("many-flows", dir)?;
    let _agents = Agents::start(&lab)?;
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    pair::demand_kernel(&[client, server], findings)?;
    flow_memory::hold(client, server, findings, |findings, open| {
        let mut fewest = 0;
        let all = wait_for("direct flows", LIFT_LIMIT, || {
            let (at_client, known) = agent::direct_flows(client)?;
            fewest = at_client.min(agent::direct_flows(server)?.0);
            anyhow::ensure!(fewest >= open, "{fewest} are direct, of {known}");
            Ok(())
        });
        findings.set("direct", fewest as f64);
        if let Err(error) = all {
            findings.note(format!("of {open} flows that are open, {error:#}"));
        }
        Ok(())
    })
}
