//! `secure-throughput`: iperf3 by name over the user-space path, plain and sealed, against plain TCP and against
//! another tunnel in user space, on one link whose segments are cut on the way. All four take turns, with the same
//! congestion control; ratios are medians over rounds. Then sealed transfers, while the agents of both ends are killed
//! and started again.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail};
use serde_json::Value;

use super::{Findings, Scenario, pair};
use crate::agent::{self, Agents};
use crate::command::progress;
use crate::downloads::{self, Downloads, Order};
use crate::host::Host;
use crate::iperf::{self, Load, Run};
use crate::lab::Lab;
use crate::observe;
use crate::program::wait_for;
use crate::report::Limit::{AtLeast, AtMost, Exactly};
use crate::report::{Bound, bound, median};
use crate::server::{Nginx, noise, sha256};
use crate::topology::Topology;
use crate::tunnel::Tunnel;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "secure-throughput",
    summary: "iperf3 by name, plain and sealed, over plain TCP and through wireguard-go; sealed transfers while agents \
              are killed",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 10] = [
    bound("encap_ratio", AtLeast(0.45)),
    bound("secure_ratio", AtLeast(0.3)),
    bound("encap_ratio_vs_tunnel", AtLeast(3.0)),
    bound("secure_ratio_vs_tunnel", AtLeast(2.2)),
    bound("unsealed", Exactly(0.0)),
    bound("kills", Exactly((2 * KILLS) as f64)),
    bound("failed", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("resets", Exactly(0.0)),
    bound("stall_ms_max", AtMost(5000.0)),
];

const TOPOLOGY: &str = r#"
[subnet.wire]
v4 = "10.1.0.0/24"
offload = false

[host.server]
role = "router"
links = [{ subnet = "wire" }]

[host.client]
role = "agent"
links = [{ subnet = "wire" }]
"#;

/// What the server's configuration says once its authority is there.
const SEALED: &str = r#"
[[service]]
name = "sealed.shop"
listen = "0.0.0.0:5201"
secure = true

[[service]]
name = "web.shop"
listen = "0.0.0.0:80"
secure = true
"#;

const NAME: &str = "web.shop.sal.internal";
const ROUNDS: usize = 7;
const TRANSFERS: usize = 20;
/// Of each agent.
const KILLS: usize = 2;
/// Long enough for all kills: twenty seconds at this pace.
const FILE_BYTES: usize = 20_000_000;
const PACE: u64 = 1_000_000;
const LIMIT: Duration = Duration::from_secs(60);

/// A way to the server.
struct Way {
    name: &'static str,
    address: String,
    runs: Vec<Run>,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("secure-throughput", TOPOLOGY)?, dir)?;
    let _agents = Agents::start_encapsulated(&lab)?;
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    let tunnel = Tunnel::start(client, server)?;
    findings.note(format!("the other tunnel is {}", tunnel.version));
    let _iperf = iperf::serve(server)?;
    agent::publish(server, "iperf.shop", &format!("0.0.0.0:{}", iperf::PORT), &[])?;
    let nginx = Nginx::start(server, &["0.0.0.0:80"])?;
    nginx.put("long", &noise(FILE_BYTES, 1))?;
    server.shell(&format!("cat >> /etc/margay/margay.toml <<'END'\n{SEALED}END\n"))?;
    kill_and_start(server)?;
    for name in ["iperf.shop", "sealed.shop", "web.shop"] {
        agent::await_instances(client, name, 1)?;
    }

    let way = |name, address| Way { name, address, runs: Vec::new() };
    let named = |name| agent::virtual_addresses(client, name).map(|(v4, _)| v4);
    let mut ways = [
        way("plain", pair::address(server)?),
        way("encap", named("iperf.shop")?),
        way("secure", named("sealed.shop")?),
        way("tunnel", tunnel.address.clone()),
    ];
    measure(client, &mut ways, findings)?;
    drop(tunnel);
    for host in [client, server] {
        observe::count_virtual_resets(host)?;
    }
    let transfers = Downloads::start(client, Order { host: NAME, path: "long", count: TRANSFERS, pace: PACE })?;
    kill_each(&[client, server], transfers, &sha256(client, &nginx.root.join("long"))?, findings)?;
    pair::report_resets(&[client, server], findings)
}

/// Every way once in each round, and each round begins with another.
fn measure(client: &Host, ways: &mut [Way; 4], findings: &mut Findings) -> Result<()> {
    let load = Load { streams: 1, reverse: false };
    for round in 0..ROUNDS {
        for turn in 0..ways.len() {
            let way = &mut ways[(round + turn) % 4];
            way.runs.push(iperf::measure(client, &way.address, load)?);
        }
        let said = ways.iter().map(|way| format!("{} {:.2}", way.name, way.runs[round].gbit_per_s));
        progress(&format!("Gbit/s: {}", said.collect::<Vec<_>>().join(", ")));
    }
    let [plain, encap, secure, tunnel] = &*ways;
    let ratio = |way: &Way, base: &Way| {
        let pairs = way.runs.iter().zip(&base.runs);
        median(&pairs.map(|(run, base)| run.gbit_per_s / base.gbit_per_s).collect::<Vec<_>>())
    };
    for (figure, way, base) in [
        ("encap_ratio", encap, plain),
        ("secure_ratio", secure, plain),
        ("encap_ratio_vs_tunnel", encap, tunnel),
        ("secure_ratio_vs_tunnel", secure, tunnel),
        ("tunnel_ratio", tunnel, plain),
    ] {
        findings.set(figure, ratio(way, base));
    }
    for way in [plain, encap, secure, tunnel] {
        let gbit: Vec<f64> = way.runs.iter().map(|run| run.gbit_per_s).collect();
        let busy: Vec<f64> = way.runs.iter().map(|run| run.busy_ns_per_byte).collect();
        let all: Vec<_> = gbit.iter().map(|gbit| format!("{gbit:.2}")).collect();
        findings.note(format!(
            "{}: {:.2} Gbit/s ({}), {:.2} ns of the machine's processors per byte",
            way.name,
            median(&gbit),
            all.join(" "),
            median(&busy)
        ));
    }
    Ok(())
}

/// Kills the agents in turn under sealed transfers.
fn kill_each(hosts: &[&Host; 2], mut running: Downloads, sum: &str, findings: &mut Findings) -> Result<()> {
    findings.figures.add("kills", 0.0);
    running.await_open(LIMIT)?;
    findings.figures.add("unsealed", 0.0);
    count_unsealed(hosts, findings)?;
    let all = (TRANSFERS * FILE_BYTES) as f64;
    for step in 0..hosts.len() * KILLS {
        let mark = all * (step + 1) as f64 / (2 * hosts.len() * KILLS) as f64;
        running.await_progress("the next part of the transfers", LIMIT, |progress| progress.bytes >= mark)?;
        let host = hosts[step % hosts.len()];
        kill_and_start(host)?;
        findings.figures.add("kills", 1.0);
    }
    count_unsealed(hosts, findings)?;
    let results = running.finish(LIMIT)?;
    downloads::judge("sealed transfers while agents were killed", &results, sum, findings);
    findings.set("stall_ms_max", downloads::stall_ms_max(&results));
    Ok(())
}

/// The next agent finds the lock of the last one taken for some milliseconds more.
fn kill_and_start(host: &Host) -> Result<()> {
    agent::kill(host)?;
    wait_for("the agent's next start", LIMIT, || agent::start_again(host))
}

/// By the port that the server's program listens on.
fn is_of_transfer(flow: &Value) -> bool {
    ["app_source", "app_destination"].iter().any(|end| flow[*end].as_str().is_some_and(|end| end.ends_with(":80")))
}

/// Flows of the transfers that are not sealed, at either end.
fn count_unsealed(hosts: &[&Host; 2], findings: &mut Findings) -> Result<()> {
    for host in hosts {
        let flows = wait_for("the flows of all transfers", LIMIT, || {
            let mut flows = agent::flows(host)?;
            // On a fast machine some have ended by now, and linger.
            flows.retain(|flow| flow["lifecycle"] != "connecting" && is_of_transfer(flow));
            if flows.len() < TRANSFERS { bail!("{} has {}", host.name(), flows.len()) } else { Ok(flows) }
        })?;
        let unsealed = flows.iter().filter(|flow| flow["path"] != "secure");
        if let Some(first) = unsealed.clone().next() {
            findings.note(format!("on {} a flow is {}: {}", host.name(), first["path"], first["path_why"]));
        }
        findings.figures.add("unsealed", unsealed.count() as f64);
    }
    Ok(())
}
