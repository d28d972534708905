//! `datagram-rate`: datagrams of one unconnected socket as fast as they go, to a name with four instances, against
//! plain UDP to one host on the same subnet. Both sides alternate in one run; what counts is what arrives. Then an
//! instance is withdrawn in the middle.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::{Findings, Scenario, pair, site};
use crate::agent::{self, Agents};
use crate::host::Host;
use crate::lab::Lab;
use crate::program::{Program, wait_for};
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound, median};
use crate::traffic::now_ms;
use crate::traffic::{Blasted, Slice};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "datagram-rate",
    summary: "1 KB datagrams of an unconnected socket to a name with four instances, against plain UDP to one host",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 5] = [
    bound("ratio", AtLeast(0.6)),
    bound("share_min", AtLeast(0.2)),
    bound("late", Exactly(0.0)),
    // Otherwise there was nothing that could have been late.
    bound("before_withdrawal", AtLeast(1000.0)),
    bound("failed", Exactly(0.0)),
];

const SERVICE: &str = "sink.shop";
const NAME: &str = "sink.shop.sal.internal";
const PORT: u16 = 9;
const SERVERS: [&str; 4] = ["one", "two", "three", "four"];
/// Runs of each side.
const PAIRS: usize = 5;
const RUN: Duration = Duration::from_millis(1500);
const WARM_UP: Duration = Duration::from_millis(500);
const LAST_RUN: Duration = Duration::from_millis(3000);
/// From the order to withdraw, the order's own way included.
const GRACE_MS: f64 = 100.0;
const STEP_LIMIT: Duration = Duration::from_secs(20);

/// Programs that count, one on each server.
struct Sinks<'a>(Vec<(&'a Host, Program)>);

impl<'a> Sinks<'a> {
    fn start(lab: &'a Lab) -> Result<Self> {
        let mut sinks = Vec::new();
        for name in SERVERS {
            let host = lab.host(name)?;
            let command = host.traffic(["sink", "--listen", &format!("0.0.0.0:{PORT}")])?;
            let sink = Program::start(command, &host.dir.join("sink.log"))?;
            wait_for("a sink", STEP_LIMIT, || sink.log().contains("ready").then_some(()).context("it is not ready"))?;
            sinks.push((host, sink));
        }
        Ok(Self(sinks))
    }

    fn publish(&self) -> Result<()> {
        self.0.iter().try_for_each(|(host, _)| agent::publish(host, SERVICE, &format!("0.0.0.0:{PORT}"), &[]))
    }

    /// What each has counted in slices that began within these times.
    fn counted(&self, from_ms: f64, to_ms: f64) -> Vec<f64> {
        let within = |slice: &Slice| (from_ms..to_ms).contains(&(slice.unix_ms as f64));
        let of_sink = |(_, sink): &(&Host, Program)| {
            let log = sink.log();
            // The last line may be half-written.
            let slices = log.lines().filter_map(|line| serde_json::from_str::<Slice>(line).ok()).filter(within);
            slices.map(|slice| slice.count).sum::<u64>() as f64
        };
        self.0.iter().map(of_sink).collect()
    }
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = site::build("datagram-rate", site::V4, &[&["client"][..], &SERVERS].concat(), dir)?;
    let client = lab.host("client")?;
    let plain = pair::address(lab.host(SERVERS[0])?)?;
    let sinks = Sinks::start(&lab)?;
    blast(client, &plain, WARM_UP)?;
    let mut alone = Vec::new();
    for _ in 0..PAIRS {
        alone.push(rates(client, &plain, &sinks)?.iter().sum());
    }
    let _agents = Agents::start(&lab)?;
    pair::demand_kernel(&[client], findings)?;
    sinks.publish()?;
    agent::await_instances(client, SERVICE, SERVERS.len())?;
    blast(client, NAME, WARM_UP)?;
    let beside = compare(client, &plain, &sinks, findings)?;
    // Of plain datagrams without agents, how many there are beside them. One after the other, not in turns: what the
    // machine does meanwhile is in it, so it has no bound.
    findings.set("plain_kept", beside / median(&alone));
    withdraw_one(client, &sinks, findings)
}

/// Sends for so long; gives how many arrive per second at each sink.
fn rates(client: &Host, to: &str, sinks: &Sinks<'_>) -> Result<Vec<f64>> {
    let start_ms = now_ms();
    let blasted = blast(client, to, RUN)?;
    // What was under way when the sender ended is counted by then, and nobody else sends.
    wait_for("the sinks to be calm", STEP_LIMIT, || {
        let now = now_ms();
        let is_calm = sinks.counted(now - 100.0, now).iter().sum::<f64>() == 0.0;
        is_calm.then_some(()).context("datagrams still come")
    })?;
    let counted = sinks.counted(start_ms - 10.0, now_ms());
    Ok(counted.into_iter().map(|count| count / blasted.seconds).collect())
}

/// Gives how many plain ones there are per second.
fn compare(client: &Host, plain: &str, sinks: &Sinks<'_>, findings: &mut Findings) -> Result<f64> {
    let (mut ratios, mut plains, mut shares) = (Vec::new(), Vec::new(), vec![0.0; SERVERS.len()]);
    for _ in 0..PAIRS {
        let of_plain: f64 = rates(client, plain, sinks)?.iter().sum();
        let named = rates(client, NAME, sinks)?;
        let of_name: f64 = named.iter().sum();
        findings.note(format!("{of_plain:.0} datagrams/s plain, {of_name:.0} by name"));
        ratios.push(of_name / of_plain);
        plains.push(of_plain);
        shares.iter_mut().zip(named).for_each(|(share, rate)| *share += rate / of_name / PAIRS as f64);
    }
    findings.set("ratio", median(&ratios));
    findings.set("share_min", shares.iter().copied().fold(f64::INFINITY, f64::min));
    let (direct, all) = agent::direct_flows(client)?;
    findings.set("flows_direct", direct as f64);
    findings.set("flows", all as f64);
    Ok(median(&plains))
}

/// One instance is withdrawn while datagrams go to all of them.
fn withdraw_one(client: &Host, sinks: &Sinks<'_>, findings: &mut Findings) -> Result<()> {
    let time = LAST_RUN.as_millis().to_string();
    let begun_ms = now_ms();
    let mut command = client.traffic(["blast", NAME, &PORT.to_string(), "--time-ms", &time])?;
    let mut sender = command.stdout(std::process::Stdio::null()).spawn().context("cannot start the sender")?;
    let (leaving, sink) = sinks.0.last().context("there are sinks")?;
    let of_leaving = |from_ms, to_ms| sinks.counted(from_ms, to_ms).last().copied().unwrap_or_default();
    wait_for("datagrams at the instance that will go", STEP_LIMIT, || {
        (of_leaving(begun_ms, now_ms()) > 10_000.0).then_some(()).context("too few have come")
    })?;
    let ordered_ms = now_ms();
    agent::withdraw(leaving, SERVICE)?;
    sender.wait().context("the sender is lost")?;
    let ended_ms = now_ms();
    findings.set("before_withdrawal", of_leaving(begun_ms, ordered_ms));
    findings.set("late", of_leaving(ordered_ms + GRACE_MS, ended_ms));
    let others: f64 = sinks.counted(ordered_ms + GRACE_MS, ended_ms).iter().sum();
    findings.set("after_withdrawal", others);
    let last = sink.log().lines().filter_map(|line| serde_json::from_str::<Slice>(line).ok()).next_back();
    findings.set("last_after_ms", last.map_or(0.0, |slice| slice.unix_ms as f64 - ordered_ms));
    Ok(())
}

fn blast(client: &Host, to: &str, time: Duration) -> Result<Blasted> {
    let time_ms = time.as_millis().to_string();
    let output = client.traffic(["blast", to, &PORT.to_string(), "--time-ms", &time_ms])?.output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    serde_json::from_str(&text).with_context(|| format!("{text} {}", String::from_utf8_lossy(&output.stderr)))
}
