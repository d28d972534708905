//! `mixed-versions`: a router, two servers and a client run the version before, and are upgraded one by one under
//! downloads and connections that come and go. Nobody notices, whichever two versions meet.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::rolling_restart::{LISTEN, NAME, SERVICE, await_answer, connect, has_failed};
use super::{Findings, Scenario, pair, site};
use crate::agent::{self, Agents};
use crate::arrivals::{Arrival, now_ms};
use crate::command::progress;
use crate::downloads::{self, Downloads, Order};
use crate::entries::{self, Entries};
use crate::host::Host;
use crate::observe;
use crate::program::wait_for;
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::server::{Nginx, noise, sha256};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "mixed-versions",
    summary: "router, servers and client are upgraded one by one from the version before, under downloads and connects",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 7] = [
    bound("resets", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    // Agents of the new version, at the end.
    bound("upgraded", Exactly(ORDER.len() as f64)),
    // Connections that began and ended, each between two versions.
    bound("connects", AtLeast(200.0)),
    // Agents whose kernel carries nothing after the upgrade.
    bound("without_kernel", Exactly(0.0)),
    bound("leaked_entries", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

/// Names the program of the version before; `scripts/version-before` builds it, and prints its path.
const BEFORE: &str = "MARGAY_BEFORE";
/// Who is upgraded when: each step has another pair of versions at the two ends of a flow, or at a router and a host.
const ORDER: [&str; 4] = ["router", "web1", "client", "web2"];
const SERVERS: [&str; 2] = ["web1", "web2"];
const DOWNLOADS: usize = 20;
/// Some twenty seconds.
const BYTES: usize = 6_000_000;
const PACE: u64 = 300_000;
/// Of all downloads, between two upgrades.
const CARRIED_BYTES: f64 = (DOWNLOADS as u64 * PACE * 3 / 2) as f64;
const LIMIT: Duration = Duration::from_secs(30);
const END_LIMIT: Duration = Duration::from_secs(90);

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let before = program_before()?;
    let lab = site::build(SCENARIO.name, site::V4, &["web1", "web2", "client"], dir)?;
    lab.hosts.iter().for_each(|host| host.set_program(Some(before.clone())));
    let _agents = Agents::start(&lab)?;
    let client = lab.host("client")?;
    let servers = SERVERS.iter().map(|name| lab.host(name)).collect::<Result<Vec<_>>>()?;
    let ends: Vec<&Host> = std::iter::once(client).chain(servers.iter().copied()).collect();
    pair::demand_kernel(&ends, findings)?;
    findings.set("without_kernel", 0.0);
    let running = servers.iter().map(|host| Nginx::start(host, &[LISTEN])).collect::<Result<Vec<_>>>()?;
    let content = noise(BYTES, 5);
    running.iter().try_for_each(|nginx| nginx.put("file", &content))?;
    servers.iter().try_for_each(|host| agent::publish(host, SERVICE, LISTEN, &[]))?;
    agent::await_instances(client, SERVICE, servers.len())?;
    let mut warm_up = connect(client, NAME)?;
    servers.iter().try_for_each(|server| await_answer(&mut warm_up, server))?;
    warm_up.stop()?;
    let entries_before = Entries::settled(&ends)?;
    ends.iter().try_for_each(|host| observe::count_virtual_resets(host))?;

    let order = Order { host: NAME, path: "file", count: DOWNLOADS, pace: PACE };
    let mut downloads = Downloads::start(client, order)?;
    downloads.await_open(LIMIT)?;
    let mut arrivals = connect(client, NAME)?;
    for name in ORDER {
        let host = lab.host(name)?;
        pair::attempt_part(&format!("upgrade of {name}"), findings, |findings| {
            upgrade(host, findings)?;
            // Flows that began before go on, and others begin.
            let carried = downloads.progress()?.bytes + CARRIED_BYTES;
            downloads.await_progress("data after an upgrade", LIMIT, |progress| {
                progress.bytes >= carried || progress.ended >= DOWNLOADS
            })?;
            servers.iter().try_for_each(|server| await_answer(&mut arrivals, server))
        });
    }
    let ended: Vec<Arrival> = arrivals.until(now_ms(), LIMIT)?.cloned().collect();
    arrivals.stop()?;
    let failed = ended.iter().filter(|arrival| has_failed(arrival));
    for arrival in failed.clone().take(3) {
        findings.note(format!("a connection has failed: {arrival:?}"));
    }
    findings.figures.add("failed", failed.count() as f64);
    findings.set("connects", ended.len() as f64);
    let results = downloads.finish(END_LIMIT)?;
    downloads::judge("mixed versions", &results, &sha256(client, &running[0].root.join("file"))?, findings);
    findings.set("stall_ms_max", downloads::stall_ms_max(&results));
    pair::report_resets(&ends, findings)?;
    entries::report_leaks(&ends, &entries_before, findings)
}

fn program_before() -> Result<PathBuf> {
    let path = std::env::var_os(BEFORE)
        .with_context(|| format!("{BEFORE} names no program of the version before; scripts/version-before makes it"))?;
    let path = PathBuf::from(path);
    ensure!(path.is_file(), "{BEFORE} names {}, which is no file", path.display());
    Ok(path)
}

/// As a package does: the agent is told to end, and the new program started with what it has left.
fn upgrade(host: &Host, findings: &mut Findings) -> Result<()> {
    let pid = agent::pid(host)?;
    kill(Pid::from_raw(pid.cast_signed()), Signal::SIGTERM).context("cannot end the agent")?;
    wait_for(&format!("the end of the agent of {}", host.name()), LIMIT, || {
        if agent::pid(host).is_err() { Ok(()) } else { bail!("it is there") }
    })?;
    host.set_program(None);
    agent::start_again(host)?;
    let (datapath, why) = agent::datapath(host)?;
    if datapath != "kernel" {
        findings.note(format!("the datapath of {} is {datapath}: {why}", host.name()));
        findings.figures.add("without_kernel", 1.0);
    }
    findings.figures.add("upgraded", 1.0);
    progress(&format!("{} is upgraded", host.name()));
    Ok(())
}
