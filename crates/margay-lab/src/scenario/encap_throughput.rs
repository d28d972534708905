//! `encap-throughput`: iperf3 by name over the user-space path, against plain TCP between the same hosts on the same veth
//! link. Both sides alternate in one run, with the same congestion control; ratios are medians over pairs.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::{Findings, Scenario};
use crate::agent::{self, Agents};
use crate::command::progress;
use crate::host::Host;
use crate::lab::Lab;
use crate::observe;
use crate::program::{Program, wait_for};
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound, median};
use crate::server;
use crate::topology::Topology;
use crate::wire::set_offload;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "encap-throughput",
    summary: "iperf3 over the user-space path and over plain TCP on one veth link, alternating",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 4] = [
    bound("ratio_1", AtLeast(0.4)),
    bound("ratio_8", AtLeast(0.4)),
    bound("ratio_wire", AtLeast(0.35)),
    bound("failed", Exactly(0.0)),
];

/// Pairs of runs per figure.
const PAIRS: usize = 5;
const SECONDS: u32 = 3;
/// Left out at the start of each run: slow start.
const OMITTED_SECONDS: u32 = 1;
const RUN_LIMIT: Duration = Duration::from_secs(30);
const ROUND_TRIPS: &str = "3000";
const PORT: &str = "5201";

const TOPOLOGY: &str = r#"
[subnet.wire]
v4 = "10.1.0.0/24"

# The server is its own router, so that the link has two ends and nothing else.
[host.server]
role = "router"
links = [{ subnet = "wire" }]

[host.client]
role = "agent"
links = [{ subnet = "wire" }]
"#;

/// One way to the server, and what it took.
struct Run {
    gbit_per_s: f64,
    busy_ns_per_byte: f64,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("encap-throughput", TOPOLOGY)?, dir)?;
    let _agents = Agents::start(&lab)?;
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    let plain = server.plan.address().context("the server has no address")?.to_string();
    let _iperf = iperf_server(server)?;
    agent::publish(server, "iperf.shop", &format!("0.0.0.0:{PORT}"), &[])?;
    let _echo = server::echo(server, &["0.0.0.0:7".parse()?])?;
    agent::publish(server, "echo.shop", "0.0.0.0:7", &[])?;
    let (named, _) = agent::virtual_addresses(client, "iperf.shop")?;

    let (ratio, cpu) = compare(client, &plain, &named, 1, "veth, 1 stream", findings)?;
    findings.set("ratio_1", ratio);
    findings.set("cpu_per_byte_ratio", cpu);
    let (ratio, _) = compare(client, &plain, &named, 8, "veth, 8 streams", findings)?;
    findings.set("ratio_8", ratio);
    compare_round_trips(client, &plain, findings)?;
    for host in [client, server] {
        set_offload(Some(host), "eth0", false)?;
    }
    let (ratio, _) = compare(client, &plain, &named, 1, "segments cut on the way, 1 stream", findings)?;
    findings.set("ratio_wire", ratio);
    findings.figures.add("failed", 0.0);
    Ok(())
}

fn iperf_server(server: &Host) -> Result<Program> {
    let program = server.spawn("iperf3", ["iperf3", "-s", "-p", PORT])?;
    let filter = format!("sport = :{PORT}");
    wait_for("the iperf3 server", Duration::from_secs(5), || {
        if server.run(["ss", "-Hltn", &filter])?.trim().is_empty() { bail!("nobody listens") } else { Ok(()) }
    })?;
    Ok(program)
}

/// Medians over pairs: throughput by name to plain, and processor time per byte by name to plain.
fn compare(
    client: &Host,
    plain: &str,
    named: &str,
    streams: u32,
    what: &str,
    findings: &mut Findings,
) -> Result<(f64, f64)> {
    let (mut ratios, mut cpu, mut plain_gbit, mut named_gbit) = (vec![], vec![], vec![], vec![]);
    for pair in 0..PAIRS {
        // Which goes first alternates, too: neither always meets the warmer machine.
        let (base, ours) = if pair % 2 == 0 {
            let base = iperf(client, plain, streams)?;
            (base, iperf(client, named, streams)?)
        } else {
            let ours = iperf(client, named, streams)?;
            (iperf(client, plain, streams)?, ours)
        };
        progress(&format!("{what}: plain {:.1} Gbit/s, by name {:.1} Gbit/s", base.gbit_per_s, ours.gbit_per_s));
        ratios.push(ours.gbit_per_s / base.gbit_per_s);
        cpu.push(ours.busy_ns_per_byte / base.busy_ns_per_byte);
        plain_gbit.push(base.gbit_per_s);
        named_gbit.push(ours.gbit_per_s);
    }
    findings.notes.push(format!(
        "{what}: plain {:.1} Gbit/s, by name {:.1} Gbit/s (medians of {PAIRS} pairs; ratios {})",
        median(&plain_gbit),
        median(&named_gbit),
        ratios.iter().map(|ratio| format!("{ratio:.2}")).collect::<Vec<_>>().join(" ")
    ));
    Ok((median(&ratios), median(&cpu)))
}

fn iperf(client: &Host, address: &str, streams: u32) -> Result<Run> {
    let busy_before = observe::machine_busy_seconds()?;
    let (streams, seconds, omitted) = (streams.to_string(), SECONDS.to_string(), OMITTED_SECONDS.to_string());
    let argv = [
        "iperf3",
        "-c",
        address,
        "-p",
        PORT,
        "-C",
        "cubic",
        "-P",
        &streams,
        "-t",
        &seconds,
        "-O",
        &omitted,
        "-J",
        "--connect-timeout",
        "5000",
    ];
    let mut command: Command = client.command(argv);
    let output = crate::program::output_within(&mut command, RUN_LIMIT)?;
    let busy = observe::machine_busy_seconds()? - busy_before;
    let answer: Value = serde_json::from_slice(&output.stdout).context("iperf3 did not answer with JSON")?;
    if let Some(error) = answer["error"].as_str() {
        bail!("iperf3 to {address}: {error}");
    }
    let received = &answer["end"]["sum_received"];
    let (bits_per_s, bytes) = (received["bits_per_second"].as_f64(), received["bytes"].as_f64());
    let (Some(bits_per_s), Some(bytes)) = (bits_per_s, bytes) else { bail!("iperf3 measured nothing: {answer}") };
    // What was left out at the start was carried too.
    let carried = bytes * f64::from(SECONDS + OMITTED_SECONDS) / f64::from(SECONDS);
    Ok(Run { gbit_per_s: bits_per_s / 1e9, busy_ns_per_byte: busy * 1e9 / carried.max(1.0) })
}

fn compare_round_trips(client: &Host, plain: &str, findings: &mut Findings) -> Result<()> {
    let (mut added_us, mut plain_us) = (vec![], vec![]);
    for _ in 0..PAIRS {
        let base = round_trip_us(client, plain)?;
        added_us.push(round_trip_us(client, "echo.shop.sal.internal")? - base);
        plain_us.push(base);
    }
    findings.set("rtt_added_us", median(&added_us));
    findings.set("rtt_plain_us", median(&plain_us));
    Ok(())
}

fn round_trip_us(client: &Host, to: &str) -> Result<f64> {
    let mut command = client.traffic(["pingpong", to, "7", "--count", ROUND_TRIPS])?;
    let output = crate::program::output_within(&mut command, RUN_LIMIT)?;
    let answer: Value = serde_json::from_slice(&output.stdout)
        .with_context(|| format!("no round trips to {to}: {}", String::from_utf8_lossy(&output.stderr)))?;
    answer["median_us"].as_f64().context("no median")
}
