//! `cloned-key`: the state directory of a host is copied to a second one, which starts with it. The elder keeps its
//! place, the copy is kept out, and the logs of all three say so; when the copy has gone the elder goes on as if
//! nothing had been. Then the elder boots anew, and is taken for itself; and it is restored from an older state
//! directory, and is met anew.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::{Findings, Scenario, pair};
use crate::agent::{self, Agents};
use crate::held::Held;
use crate::host::Host;
use crate::lab::Lab;
use crate::program::wait_for;
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::server;
use crate::topology::Topology;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "cloned-key",
    summary: "a second host starts with a copy of a host's key and state; then the first boots anew, and is restored",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 8] = [
    bound("copy_accepted", Exactly(0.0)),
    // Otherwise it has asked for nothing.
    bound("copy_tried", AtLeast(COPY_TRIES as f64)),
    bound("elder_cut", Exactly(0.0)),
    bound("elder_failed", Exactly(0.0)),
    bound("logs", Exactly(3.0)),
    bound("rebooted", Exactly(2.0)),
    bound("restored", Exactly(2.0)),
    bound("failed", Exactly(0.0)),
];

const TOPOLOGY: &str = r#"
[subnet.site]
v4 = "10.1.0.0/24"

[host.router]
role = "router"
links = [{ subnet = "site" }]

[host.server]
role = "agent"
links = [{ subnet = "site" }]

[host.elder]
role = "agent"
links = [{ subnet = "site" }]

# Has Margay when it has the elder's state.
[host.copy]
role = "plain"
links = [{ subnet = "site" }]
"#;

const SERVED: &str = "echo.shop";
const OWN: &str = "elder.shop";
const HELD: usize = 4;
const COPY_TRIES: usize = 4;
const STATE: &str = "/var/lib/margay";
/// Programs and maps that outlive an agent, and no boot.
const PINNED: &str = "/run/margay/bpf";
const SETTLE: Duration = Duration::from_secs(20);
/// The elder is used for so long after the copy has gone.
const AFTER: Duration = Duration::from_secs(8);
/// What each of the three logs says.
const WARNINGS: [(&str, &str); 3] = [
    ("server", "two hosts use the same key"),
    ("elder", "another host shows this host's key"),
    ("copy", "another host with this host's key was there before"),
];

struct Stage<'a> {
    lab: &'a Lab,
    server: &'a Host,
    elder: &'a Host,
    copy: &'a Host,
    /// The virtual addresses of [`SERVED`] and of [`OWN`].
    served: String,
    own: String,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("cloned-key", TOPOLOGY)?, dir)?;
    let [server, elder, copy] = [lab.host("server")?, lab.host("elder")?, lab.host("copy")?];
    for host in &lab.hosts {
        boot(host)?;
    }
    let _agents = Agents::start(&lab)?;
    let _echoes = [server, elder].map(|host| server::echo(host, &[([0; 4], 7).into()]));
    agent::publish(server, SERVED, "0.0.0.0:7", &[])?;
    agent::publish(elder, OWN, "0.0.0.0:7", &[])?;
    agent::await_instances(elder, SERVED, 1)?;
    agent::await_instances(server, OWN, 1)?;
    let served = agent::virtual_addresses(elder, SERVED)?.0;
    let own = agent::virtual_addresses(server, OWN)?.0;
    let stage = Stage { lab: &lab, server, elder, copy, served, own };
    for Bound { figure, .. } in BOUNDS {
        findings.set(figure, 0.0);
    }
    stage.elder.run(["cp", "-a", STATE, "/run/older"])?;
    pair::attempt_part("a copy", findings, |findings| copied(&stage, findings));
    pair::attempt_part("a new boot", findings, |findings| rebooted(&stage, findings));
    pair::attempt_part("an older state", findings, |findings| restored(&stage, findings));
    Ok(())
}

/// From now on the host has booted anew, as far as programs can tell: all hosts of a lab have one kernel.
fn boot(host: &Host) -> Result<()> {
    let boot_id = "/proc/sys/kernel/random/boot_id";
    let script = format!(
        "file=$(mktemp -p /run)\ncat /proc/sys/kernel/random/uuid > $file\nmount --bind $file {boot_id}\n\
         if mountpoint -q {PINNED}; then umount {PINNED}; fi\nrm -rf /run/margay/*"
    );
    host.shell(&script).map(drop)
}

/// Connections of the elder's, to it and from it, one after the other.
fn use_elder(stage: &Stage<'_>) -> Result<u64> {
    let options = ["--count", "5", "--pause-ms", "20"];
    let from = server::attempt(stage.elder, &stage.served, 7, &options)?;
    let to = server::attempt(stage.server, &stage.own, 7, &options)?;
    Ok(from.failed() + to.failed())
}

fn copied(stage: &Stage<'_>, findings: &mut Findings) -> Result<()> {
    let mut held = Held::open(stage.elder, &stage.served, HELD)?;
    findings.figures.add("elder_failed", use_elder(stage)? as f64);
    for place in [STATE, "/etc/margay"] {
        let [from, to] = [stage.elder, stage.copy].map(|host| format!("/proc/{}/root{place}", host.holder_pid()));
        let status = std::process::Command::new("cp").args(["-a", &format!("{from}/."), &to]).status()?;
        ensure!(status.success(), "{place} cannot be copied");
    }
    agent::start(stage.copy)?;
    // The copy knows names as the elder does; whoever answers it, has let it in.
    for _ in 0..COPY_TRIES {
        let outcome = server::attempt(stage.copy, &stage.served, 7, &["--count", "1", "--timeout-ms", "2000"])?;
        findings.figures.add("copy_tried", 1.0);
        findings.figures.add("copy_accepted", outcome.ok as f64);
        findings.figures.add("elder_failed", use_elder(stage)? as f64);
        held.round()?;
    }
    for (host, words) in WARNINGS {
        let host = stage.lab.host(host)?;
        let said = wait_for(&format!("a warning of {}", host.name()), SETTLE, || {
            let log = host.run(["cat", "/run/margay/agent.log"])?;
            ensure!(log.contains(words), "it does not say {words:?}");
            Ok(())
        });
        match said {
            Ok(()) => findings.figures.add("logs", 1.0),
            Err(error) => findings.note(format!("{error:#}")),
        }
    }
    agent::kill(stage.copy)?;
    let gone = Instant::now();
    while gone.elapsed() < AFTER {
        findings.figures.add("elder_failed", use_elder(stage)? as f64);
        held.round()?;
    }
    findings.figures.add("elder_cut", HELD as f64 - held.open_count());
    held.end().context("connections of the elder").map(drop)
}

/// Waits until connections from the elder, and to it, are answered; how many of the two ways are.
fn ways_found(stage: &Stage<'_>) -> Result<f64> {
    let ways = [(stage.elder, &stage.served), (stage.server, &stage.own)];
    let found = ways.iter().filter(|(host, to)| {
        let found = wait_for(&format!("a connection of {}", host.name()), SETTLE, || {
            let outcome = server::attempt(host, to, 7, &["--count", "1", "--timeout-ms", "2000"])?;
            ensure!(outcome.ok == 1, "{:?}", outcome.errors);
            Ok(())
        });
        found.is_ok()
    });
    Ok(found.count() as f64)
}

/// The elder's agent dies without a word, and so does all that it had in the kernel.
fn reboot(stage: &Stage<'_>) -> Result<()> {
    agent::kill(stage.elder)?;
    agent::down(stage.elder)?;
    boot(stage.elder)
}

fn rebooted(stage: &Stage<'_>, findings: &mut Findings) -> Result<()> {
    reboot(stage)?;
    let start = Instant::now();
    agent::start_again(stage.elder)?;
    findings.set("rebooted", ways_found(stage)?);
    findings.set("rebooted_s", start.elapsed().as_secs_f64());
    Ok(())
}

fn restored(stage: &Stage<'_>, findings: &mut Findings) -> Result<()> {
    reboot(stage)?;
    stage.elder.shell(&format!("rm -rf {STATE}/* && cp -a /run/older/. {STATE}/"))?;
    let start = Instant::now();
    agent::start_again(stage.elder)?;
    findings.set("restored", ways_found(stage)?);
    findings.set("restored_s", start.elapsed().as_secs_f64());
    Ok(())
}
