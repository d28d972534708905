//! `interface-balance` (Serval, figure 9): two flows of a server share one of its two interfaces; one of them is moved
//! to the other, and both together carry twice as much.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::moved::{self, NAME};
use super::{Findings, Scenario, pair};
use crate::agent::{self, Agents};
use crate::interface;
use crate::lab::Lab;
use crate::observe;
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::timeline::Timeline;
use crate::topology::Topology;
use crate::transfers::{Order, Transfers, Word, now_us, rate};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "interface-balance",
    summary: "two flows share one of a server's two interfaces; one of them is moved to the other",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 4] = [
    bound("gain", AtLeast(1.8)),
    bound("resets", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

const WAYS: [&str; 2] = ["down:cubic", "down:cubic"];
/// What both together bring in about this time is one stage of the figure.
const STAGE: Duration = Duration::from_secs(6);
/// Left out of each stage: slow start, and what the moved flow needs to grow.
const OMITTED_US: u64 = 2_000_000;
const STEP_LIMIT: Duration = Duration::from_secs(20);
const STEP_US: u64 = 250_000;

const TOPOLOGY: &str = r#"
[subnet.one]
v4 = "10.1.0.0/24"
rate_mbit = 100

[subnet.two]
v4 = "10.2.0.0/24"
rate_mbit = 100

[subnet.clients]
v4 = "10.3.0.0/24"

[host.gateway]
role = "gateway"
links = [{ subnet = "one" }, { subnet = "two" }, { subnet = "clients" }]

[host.router]
role = "router"
links = [{ subnet = "clients" }]

[host.server]
role = "agent"
links = [{ subnet = "one" }, { subnet = "two" }]

[host.client]
role = "agent"
links = [{ subnet = "clients" }]
"#;

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("interface-balance", TOPOLOGY)?, dir)?;
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    interface::route_by_source(&lab, server)?;
    let _agents = Agents::start(&lab)?;
    pair::demand_kernel(&[client, server], findings)?;
    let mut serving = moved::serve(server)?;
    [client, server].iter().try_for_each(|host| observe::count_virtual_resets(host))?;
    let order = Order { to: NAME, ways: &WAYS, pace: 0 };
    let mut transfers = Transfers::start(client, &mut serving, order)?;
    let balanced = balance(&lab, &mut transfers, findings);
    transfers.finish("transfers", findings)?;
    pair::report_resets(&[client, server], findings)?;
    balanced
}

/// Lets both run, moves one, lets both run.
fn balance(lab: &Lab, transfers: &mut Transfers<'_>, findings: &mut Findings) -> Result<()> {
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    agent::await_paths(&[client, server], true, WAYS.len(), STEP_LIMIT)?;
    let links = interface::carried(server)?;
    let begun_us = now_us();
    std::thread::sleep(STAGE);
    let busy = interface::busiest(server, &links)?;
    let other = interface::first_address(lab, server, 1 - busy, false)?.addr().to_string();
    let flows = agent::flows(server)?;
    let flow = flows.iter().find(|flow| flow["lifecycle"] == "established").context("no flow is established")?;
    let moved_us = now_us();
    let migrated = agent::migrate(server, flow["flow"].as_str().context("a flow without an id")?, &other);
    findings.set("migrate_ms", (now_us() - moved_us) as f64 / 1e3);
    std::thread::sleep(STAGE);
    let ended_us = now_us();
    transfers.refresh()?;
    let words = transfers.received();
    let sum = |from_us: u64, to_us: u64| -> f64 { words.iter().map(|word| rate(&word.marks, from_us, to_us)).sum() };
    let before = sum(begun_us + OMITTED_US, moved_us);
    let after = sum(moved_us + OMITTED_US, ended_us);
    findings.set("before_mbit", before * 8.0 / 1e6);
    findings.set("after_mbit", after * 8.0 / 1e6);
    findings.set("gain", after / before.max(1.0));
    let slower =
        words.iter().map(|word| rate(&word.marks, moved_us + OMITTED_US, ended_us)).fold(f64::INFINITY, f64::min);
    findings.set("after_slower_mbit", slower * 8.0 / 1e6);
    draw(&words, [begun_us, moved_us, ended_us], findings)?;
    migrated
}

/// Both flows over time, one upon the other.
fn draw(words: &[Word], [begun_us, moved_us, ended_us]: [u64; 3], findings: &Findings) -> Result<()> {
    // The last step may be a part of one.
    let steps: Vec<u64> = (begun_us..ended_us - STEP_US).step_by(usize::try_from(STEP_US)?).collect();
    let of_word = |word: &Word| steps.iter().map(|from| rate(&word.marks, *from, from + STEP_US) * 8.0 / 1e6).collect();
    let rates: Vec<Vec<f64>> = words.iter().map(of_word).collect();
    let changes = [((moved_us - begun_us) as f64 / 1e6, "one flow is moved".to_owned())];
    let timeline = Timeline {
        names: &["one", "other"],
        unit: "Mbit/s",
        rates: &rates,
        step_s: STEP_US as f64 / 1e6,
        changes: &changes,
    };
    findings.draw(SCENARIO.name, &timeline.svg())
}
