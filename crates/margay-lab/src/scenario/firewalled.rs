//! `firewalled`: an IP router between the hosts becomes a stateful firewall that drops TCP segments whose SYN it never
//! saw: before transfers, and in the middle of them. Flows go encapsulated then, and direct again when it is gone.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;

use super::{Findings, Scenario, pair};
use crate::agent::{self, Agents};
use crate::command::progress;
use crate::downloads::{self, Download, Downloads, Order};
use crate::host::Host;
use crate::lab::Lab;
use crate::observe;
use crate::report::Limit::{AtLeast, Below, Exactly};
use crate::report::{Bound, bound};
use crate::server::{Nginx, noise, sha256};
use crate::topology::Topology;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "firewalled",
    summary: "a stateful firewall between the hosts, put up before transfers, in the middle of transfers, and taken \
              down",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 6] = [
    bound("failed", Exactly(0.0)),
    bound("resets", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("stall_ms_max", Below(3000.0)),
    bound("direct_again", Exactly(1.0)),
    // Otherwise the firewall was in nobody's way, and the rest proves nothing.
    bound("segments_dropped", AtLeast(1.0)),
];

const NAME: &str = "web.shop.sal.internal";
const COUNT: usize = 8;
const SHORT_BYTES: usize = 5_000_000;
/// Bytes per second of each of those: they go on when half of all is there, however fast the machine is.
const SHORT_PACE: u64 = 500_000;
/// Enough for the whole story at the link's rate.
const LONG_BYTES: usize = 80_000_000;
/// A second of the link, about.
const STAGE_BYTES: f64 = 12e6;
const OPEN_LIMIT: Duration = Duration::from_secs(20);
const CHANGE_LIMIT: Duration = Duration::from_secs(30);
const END_LIMIT: Duration = Duration::from_secs(120);

const TOPOLOGY: &str = r#"
[subnet.west]
v4 = "10.1.0.0/24"

[subnet.east]
v4 = "10.2.0.0/24"
rate_mbit = 100

[host.wall]
role = "gateway"
links = [{ subnet = "west" }, { subnet = "east" }]

[host.server]
role = "router"
links = [{ subnet = "east" }]

[host.client]
role = "agent"
links = [{ subnet = "west" }]
"#;

/// Margay's own port is open, as its documentation wants it; of other TCP, only what belongs to a connection whose SYN
/// passed.
const WALL: &str = r#"
    echo 0 > /proc/sys/net/netfilter/nf_conntrack_tcp_loose
    nft 'add table inet wall;
         add counter inet wall dropped;
         add chain inet wall forward { type filter hook forward priority filter; policy accept; };
         add rule inet wall forward meta l4proto { tcp, udp } th dport 54324 accept;
         add rule inet wall forward meta l4proto { tcp, udp } th sport 54324 accept;
         add rule inet wall forward ct state invalid,untracked counter name dropped drop;
         add rule inet wall forward tcp flags & (fin|syn|rst|ack) != syn ct state new counter name dropped drop'
"#;

/// The firewall, while it stands.
struct Wall<'a>(&'a Host);

impl Wall<'_> {
    fn up(&self) -> Result<()> {
        self.0.shell(WALL).map(drop)
    }

    /// Takes it down, and gives how many segments it has dropped.
    fn down(&self) -> Result<f64> {
        let text = self.0.run(["nft", "-j", "reset", "counter", "inet", "wall", "dropped"])?;
        let answer: serde_json::Value = serde_json::from_str(&text)?;
        let entries = answer["nftables"].as_array().cloned().unwrap_or_default();
        let dropped = entries.iter().find_map(|entry| entry["counter"]["packets"].as_f64()).unwrap_or_default();
        self.0.run(["nft", "delete table inet wall"])?;
        // What it knew is forgotten with its last rule.
        Ok(dropped)
    }
}

struct Stage<'a> {
    client: &'a Host,
    server: &'a Host,
    wall: Wall<'a>,
    root: PathBuf,
}

impl Stage<'_> {
    fn hosts(&self) -> [&Host; 2] {
        [self.client, self.server]
    }

    fn downloads(&self, path: &str, pace: u64) -> Result<Downloads> {
        Downloads::start(self.client, Order { host: NAME, path, count: COUNT, pace })
    }

    fn judge(&self, what: &str, path: &str, results: &[Download], findings: &mut Findings) -> Result<()> {
        downloads::judge(what, results, &sha256(self.client, &self.root.join(path))?, findings);
        let stall_ms = downloads::stall_ms_max(results);
        progress(&format!("{what}: the longest stall was {stall_ms:.0} ms"));
        findings.set("stall_ms_max", findings.figures.get("stall_ms_max").max(stall_ms));
        Ok(())
    }
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("firewalled", TOPOLOGY)?, dir)?;
    let _agents = Agents::start(&lab)?;
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    pair::demand_kernel(&[client, server], findings)?;
    let nginx = Nginx::start(server, &["0.0.0.0:80"])?;
    nginx.put("short", &noise(SHORT_BYTES, 1))?;
    nginx.put("long", &noise(LONG_BYTES, 2))?;
    agent::publish(server, "web.shop", "0.0.0.0:80", &[])?;
    let stage = Stage { client, server, wall: Wall(lab.host("wall")?), root: nginx.root.clone() };
    findings.set("direct_again", 0.0);
    stage.hosts().iter().try_for_each(|host| observe::count_virtual_resets(host))?;
    pair::attempt_part("the firewall before transfers", findings, |findings| before(&stage, findings));
    // Where that part failed, the firewall may still stand.
    let _ = stage.wall.down();
    findings.set("resets_before", observe::virtual_resets(&[client, server])?.0);
    pair::attempt_part("the firewall in the middle", findings, |findings| in_the_middle(&stage, findings));
    pair::report_resets(&[client, server], findings)?;
    Ok(())
}

/// Transfers that begin behind the firewall end behind it, encapsulated.
fn before(stage: &Stage, findings: &mut Findings) -> Result<()> {
    stage.wall.up()?;
    let mut running = stage.downloads("short", SHORT_PACE)?;
    let half = (COUNT * SHORT_BYTES) as f64 / 2.0;
    let looked = running
        .await_progress("half of the transfers", END_LIMIT, |progress| progress.bytes >= half)
        // At the latest now: what carries data behind the firewall is not direct.
        .and_then(|_| agent::await_paths(&stage.hosts(), false, 1, CHANGE_LIMIT));
    let results = running.finish(END_LIMIT)?;
    stage.judge("the firewall before transfers", "short", &results, findings)?;
    let dropped = stage.wall.down()?;
    findings.set("dropped_before", dropped);
    findings.figures.add("segments_dropped", dropped);
    looked
}

/// Direct transfers meet it, go on, and are direct again when it is gone.
fn in_the_middle(stage: &Stage, findings: &mut Findings) -> Result<()> {
    let mut running = stage.downloads("long", 0)?;
    let met = meet(stage, &mut running, findings);
    // Where that failed, the firewall may still stand.
    let _ = stage.wall.down();
    // What became of the transfers is said in any case.
    let results = running.finish(END_LIMIT)?;
    stage.judge("the firewall in the middle", "long", &results, findings)?;
    met
}

fn meet(stage: &Stage, running: &mut Downloads, findings: &mut Findings) -> Result<()> {
    running.await_open(OPEN_LIMIT)?;
    agent::await_paths(&stage.hosts(), true, COUNT, CHANGE_LIMIT)?;
    let here = running.progress()?.bytes;
    running.await_progress("direct data", CHANGE_LIMIT, |progress| progress.bytes > here + STAGE_BYTES)?;

    let here = running.progress()?.bytes;
    stage.wall.up()?;
    let start = Instant::now();
    agent::await_paths(&stage.hosts(), false, COUNT, CHANGE_LIMIT)?;
    findings.set("fall_back_ms", start.elapsed().as_secs_f64() * 1e3);
    running.await_progress("data behind it", CHANGE_LIMIT, |progress| progress.bytes > here + 2.0 * STAGE_BYTES)?;
    let dropped = stage.wall.down()?;
    findings.set("dropped_in_the_middle", dropped);
    findings.figures.add("segments_dropped", dropped);

    let start = Instant::now();
    agent::await_paths(&stage.hosts(), true, COUNT, CHANGE_LIMIT)?;
    findings.set("direct_again_ms", start.elapsed().as_secs_f64() * 1e3);
    findings.set("direct_again", 1.0);
    Ok(())
}
