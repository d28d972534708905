//! `unrest`: real programs keep sessions for minutes while links are cut, addresses change and agents are killed at
//! every host, in an order that a seed gives. Three sites: one behind a translator, one that reaches the others by
//! IPv6 alone, and the servers'; a hundredth of all packets between them is lost. When the unrest ends, every session
//! must go on, with every answer right.

mod disturbance;
mod exchange;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use self::disturbance::Unrest;
use self::exchange::Exchanges;
use super::apps::{self, Stage};
use super::{Findings, Scenario, is_long, pair};
use crate::agent::{self, Agents};
use crate::command::progress;
use crate::host::Host;
use crate::lab::Lab;
use crate::observe;
use crate::program::{Program, wait_for};
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::topology::Topology;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "unrest",
    summary: "long sessions of PostgreSQL, Redis, WebSocket, MQTT, ssh, rsync and git while links, addresses and \
     agents come and go",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 6] = [
    bound("stuck", Exactly(0.0)),
    bound("resets", Exactly(0.0)),
    bound("broken", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("disturbances", AtLeast(SHORT.disturbances as f64)),
    bound("failed", Exactly(0.0)),
];

/// Names a seed in the environment: then that one alone is run.
const SEED: &str = "MARGAY_LAB_SEED";

/// How much unrest there is.
struct Length {
    seeds: u64,
    /// Of each seed.
    disturbances: usize,
}

const SHORT: Length = Length { seeds: 1, disturbances: 12 };
const LONG: Length = Length { seeds: 20, disturbances: 40 };

const SERVERS: [&str; 5] = ["postgresql", "redis", "websocket", "mqtt", "openssh"];
/// Of each client: a session with each server, and two more by the connection of ssh.
const SESSIONS: usize = SERVERS.len() + 2;
const CLIENTS: [&str; 2] = ["home", "branch"];
/// Exchanges of a session that count as going on.
const EXCHANGES: usize = 3;
/// Beside a compiler, three exchanges of git take a while.
const CALM_LIMIT: Duration = Duration::from_secs(90);
/// After the last disturbance. TCP alone waits for as long as the outage was; 2 s of outage, and an agent that
/// starts, are less.
const QUIET_LIMIT: Duration = Duration::from_secs(60);

const TOPOLOGY: &str = r#"
[subnet.core]
v4 = "10.1.0.0/24"
delay_ms = 5
loss = 0.005

[subnet.spine]
v6 = "fd01::/64"
delay_ms = 5
loss = 0.005

[subnet.house]
v4 = "192.168.1.0/24"

[subnet.office]
v6 = "fd03::/64"

[subnet.centre]
v4 = "10.4.0.0/24"
v6 = "fd04::/64"

[host.housegw]
role = "gateway"
nat = "core"
links = [{ subnet = "core" }, { subnet = "house" }]

[host.officegw]
role = "gateway"
links = [{ subnet = "spine" }, { subnet = "office" }]

[host.centregw]
role = "gateway"
links = [{ subnet = "core" }, { subnet = "spine" }, { subnet = "centre" }]

[host.router]
role = "router"
links = [{ subnet = "centre" }]

[host.server]
role = "agent"
links = [{ subnet = "centre" }]

[host.home]
role = "agent"
links = [{ subnet = "house" }]

[host.branch]
role = "agent"
links = [{ subnet = "office" }]
"#;

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("unrest", TOPOLOGY)?, dir)?;
    let _agents = Agents::start(&lab)?;
    let [server, home, branch] = ["server", CLIENTS[0], CLIENTS[1]].map(|name| lab.host(name));
    let hosts = [server?, home?, branch?];
    pair::demand_kernel(&hosts, findings)?;
    for figure in ["stuck", "resets", "broken", "wrong_bytes", "disturbances", "longest_pause_s"] {
        findings.set(figure, 0.0);
    }
    let stage = Stage::new(dir, hosts[0], hosts[1])?;
    let _servers: Vec<Program> =
        SERVERS.iter().map(|name| apps::serve(&stage, apps::find(name)?)).collect::<Result<_>>()?;
    hosts.iter().try_for_each(|host| observe::count_virtual_resets(host))?;
    let script = dir.join("sessions.py");
    std::fs::write(&script, include_str!("sessions.py")).context("cannot write the sessions' script")?;
    for seed in seeds()? {
        pair::attempt_part(&format!("seed {seed}"), findings, |findings| {
            unrest(&lab, &hosts, &script, seed, findings).with_context(|| format!("repeat it by {SEED}={seed}"))
        });
    }
    Ok(())
}

fn seeds() -> Result<Vec<u64>> {
    match std::env::var(SEED) {
        Ok(text) => Ok(vec![text.parse().with_context(|| format!("{SEED}={text} is no number"))?]),
        Err(_) => Ok((1..=length().seeds).collect()),
    }
}

fn length() -> Length {
    if is_long() { LONG } else { SHORT }
}

/// New sessions of all clients, and the unrest of one seed.
fn unrest(lab: &Lab, hosts: &[&Host; 3], script: &Path, seed: u64, findings: &mut Findings) -> Result<()> {
    let clients = &hosts[1..];
    let mut programs = Vec::new();
    for client in clients {
        programs.push(start(client, hosts[0], script, seed)?);
    }
    let read = || Exchanges::read(&programs.iter().map(Program::log).collect::<String>());
    wait_for("calm sessions", CALM_LIMIT, || {
        let found = read()?;
        let late = found.slower_than(EXCHANGES);
        let all = SESSIONS * clients.len();
        ensure!(
            found.sessions.len() == all,
            "{} of {all} sessions have begun; {:?}",
            found.sessions.len(),
            found.broken
        );
        ensure!(late.is_empty(), "{late:?}");
        Ok(())
    })?;
    let resets = observe::virtual_resets(hosts)?.0;
    let mut unrest = Unrest::begin(lab, seed)?;
    let stirred = (0..length().disturbances).try_for_each(|_| {
        unrest.disturb()?;
        findings.figures.add("disturbances", 1.0);
        Ok(())
    });
    let before = read()?;
    let calmed = wait_for("sessions that go on", QUIET_LIMIT, || {
        let now = read()?;
        let late = now.behind(&before, EXCHANGES);
        if late.is_empty() { Ok(()) } else { bail!("{late:?}") }
    });
    let found = read()?;
    let (all, places) = observe::virtual_resets(hosts)?;
    findings.figures.add("resets", all - resets);
    if all > resets {
        findings.note(format!("seed {seed}: {} resets; with those before: {places}", all - resets));
    }
    if let Err(error) = calmed {
        findings.note(format!("seed {seed}: {error:#}; {}", unrest.history()));
        for host in hosts {
            // What the agents say of a session that is stuck is the beginning of every search.
            progress(&format!("paths of {}: {:?}", host.name(), agent::paths(host)));
        }
    }
    found.report(seed, &found.behind(&before, EXCHANGES), findings);
    unrest.settle()?;
    stirred
}

/// The sessions of a client. Their log is the output of one program.
fn start(client: &Host, server: &Host, script: &Path, seed: u64) -> Result<Program> {
    let home = client.dir.join(format!("sessions-{seed}"));
    std::fs::create_dir_all(&home).with_context(|| format!("cannot make {}", home.display()))?;
    let mut command = client.command(["/usr/bin/python3".as_ref(), script.as_os_str()]);
    command.env("HOME", &home).env("OF_OPENSSH", Stage::dir(apps::find("openssh")?, server));
    Program::start(command, &home.join("sessions.log"))
}
