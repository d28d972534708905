//! `both-move`: client and server change their addresses in the same instant, so that neither knows where the other is;
//! only the router stays. Again and again, without loss and with it.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::ends::Ends;
use super::moved::{self, NAME, Pauses};
use super::{Findings, Scenario, pair};
use crate::agent::Agents;
use crate::command::progress;
use crate::filter;
use crate::observe;
use crate::report::Limit::Exactly;
use crate::report::{Bound, bound};
use crate::transfers::{Order, Server, Transfers};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "both-move",
    summary: "client and server change their addresses in the same instant, 50 times, half of them with loss",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 4] = [
    bound("recovered", Exactly((2 * TIMES) as f64)),
    bound("resets", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

/// Without loss, and with it.
const TIMES: usize = 25;
const LOSS_PERCENT: u32 = 5;
const WAYS: [&str; 2] = ["up:cubic", "down:cubic"];
/// Bytes per second of each: little enough to get through with the loss.
const PACE: u64 = 100_000;
const CALM_BYTES: u64 = PACE;
/// More than was under way, and time between two changes: hosts that move too often are left where they are.
const RESUMED_BYTES: u64 = PACE * 3 / 2;
const STEP_LIMIT: Duration = Duration::from_secs(15);

/// Both hosts, and how far apart they moved at the most.
struct Stage<'a> {
    ends: Ends<'a>,
    apart_us_max: u64,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = moved::build_far("both-move", dir)?;
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    let rtt_ms = moved::measure_rtt_ms(client, server, findings)?;
    let ends = Ends::at_one_address(&lab)?;
    let _agents = Agents::start(&lab)?;
    pair::demand_kernel(&[client, server], findings)?;
    let mut serving = moved::serve(server)?;
    [client, server].iter().try_for_each(|host| observe::count_virtual_resets(host))?;
    let mut stage = Stage { ends, apart_us_max: 0 };
    findings.set("recovered", 0.0);
    for (prefix, percent) in [("", 0), ("loss_", LOSS_PERCENT)] {
        if percent > 0 {
            filter::lose(lab.host("far")?, percent)?;
        }
        let mut pauses = Pauses::default();
        pair::attempt_part(&format!("with {percent} % loss"), findings, |findings| {
            move_again_and_again(&mut stage, &mut serving, &mut pauses, findings)
        });
        findings.set(&format!("{prefix}recovered"), findings.figures.get("recovered"));
        pauses.report_rtts(prefix, rtt_ms, findings);
    }
    findings.set("apart_ms_max", stage.apart_us_max as f64 / 1e3);
    pair::report_resets(&[client, server], findings)?;
    moved::report_moves(&[client, server], findings)
}

/// So many times. Transfers that do not go on are begun again.
fn move_again_and_again(
    stage: &mut Stage<'_>,
    serving: &mut Server,
    pauses: &mut Pauses,
    findings: &mut Findings,
) -> Result<()> {
    let (mut done, mut lost) = (0, 0);
    while done < TIMES {
        let order = Order { to: NAME, ways: &WAYS, pace: PACE };
        let mut transfers = Transfers::start(stage.ends.lab.host("client")?, serving, order)?;
        let moved = move_on(stage, &mut transfers, &mut done, pauses, findings);
        transfers.finish("transfers", findings)?;
        if let Err(error) = moved {
            findings.note(format!("{error:#}"));
            lost += 1;
            anyhow::ensure!(lost <= moved::FAILED_MAX, "given up after {done} times");
        }
    }
    Ok(())
}

/// Until all is done, or transfers do not go on.
fn move_on(
    stage: &mut Stage<'_>,
    transfers: &mut Transfers<'_>,
    done: &mut usize,
    pauses: &mut Pauses,
    findings: &mut Findings,
) -> Result<()> {
    transfers.await_bytes("calm transfers", CALM_BYTES, STEP_LIMIT)?;
    while *done < TIMES {
        let (event_us, apart_us) = stage.ends.change_both()?;
        stage.apart_us_max = stage.apart_us_max.max(apart_us);
        *done += 1;
        let [client, server] = stage.ends.addresses;
        let stood = pauses
            .enter("transfers that go on", transfers, event_us, RESUMED_BYTES, STEP_LIMIT)
            .with_context(|| format!("time {done}: to {client} and {server}"))?;
        progress(&format!("time {done}: to {client} and {server}: {stood}"));
        findings.figures.add("recovered", 1.0);
    }
    Ok(())
}
