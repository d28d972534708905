//! `hostile-packets`: somebody on the network sends a million datagrams that nobody should send, and then floods with
//! well-formed SYNs from addresses that are not its own; honest programs connect and talk all the while.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Output;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::{Findings, Scenario};
use crate::agent::{self, Agents};
use crate::held::Held;
use crate::host::Host;
use crate::lab::Lab;
use crate::observe::{self, Passing};
use crate::program::output_within;
use crate::recorder::Recorder;
use crate::report::Limit::{AtLeast, AtMost, Exactly};
use crate::report::{Bound, bound, percentile};
use crate::server::{self, Outcome};
use crate::topology::Topology;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "hostile-packets",
    summary: "a million hostile datagrams, forged signalling and a flood of forged SYNs, while honest clients connect",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 8] = [
    bound("resets", Exactly(0.0)),
    bound("agent_restarts", Exactly(0.0)),
    bound("honest_ok_share", AtLeast(0.99)),
    bound("amplification", AtMost(1.0)),
    bound("drops_by_reason", AtLeast(5.0)),
    bound("memory_growth_mb", AtMost(20.0)),
    bound("syns_per_s", AtLeast(20_000.0)),
    bound("failed", Exactly(0.0)),
];

const NOISE: u64 = 1_000_000;
const NOISE_PER_S: u64 = 90_000;
const SYNS: u64 = 300_000;
const SYNS_PER_S: u64 = 50_000;
/// Connections that are held open through all of it.
const HELD: usize = 100;
const HONEST_PAUSE_MS: &str = "5";
/// The attacker's made-up addresses are in its /16.
const STRANGERS: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 0);
const LIMIT: Duration = Duration::from_secs(90);
const NAME: &str = "echo.shop.sal.internal";
const CAPTURED: usize = 400;

const TOPOLOGY: &str = r#"
[subnet.site]
v4 = "10.1.0.0/24"

[host.router]
role = "router"
links = [{ subnet = "site" }]

[host.server]
role = "agent"
links = [{ subnet = "site" }]

[host.client]
role = "agent"
links = [{ subnet = "site" }]

[host.attacker]
role = "plain"
links = [{ subnet = "site" }]
"#;

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("hostile-packets", TOPOLOGY)?, dir)?;
    let _agents = Agents::start_encapsulated(&lab)?;
    let hosts = [lab.host("router")?, lab.host("server")?, lab.host("client")?];
    let [_, server, client] = hosts;
    let attacker = lab.host("attacker")?;
    let _echo = server::echo(server, &["0.0.0.0:7".parse()?])?;
    agent::publish(server, "echo.shop", "0.0.0.0:7", &[])?;
    // Answers to forged addresses go to somebody, and are counted.
    let attacker_at = attacker.plan.address().context("the attacker has no address")?.to_string();
    for host in hosts {
        host.run(["ip", "route", "add", "10.99.0.0/16", "via", &attacker_at])?;
        observe::count(host, "asked", Passing::In, "ip saddr 10.99.0.0/16 udp dport 54324")?;
        observe::count(host, "answered", Passing::Out, "ip daddr 10.99.0.0/16 udp sport 54324")?;
    }
    let mut recorder = Recorder::start(server, 0, "udp", CAPTURED)?;
    let mut held = Held::open(client, NAME, HELD)?;
    let warm_up = server::attempt(client, NAME, 7, &["--count", "200"])?;
    let capture = recorder.finish()?;
    findings.figures.add("failed", warm_up.failed() as f64);

    let before = Look::at(hosts)?;
    let mut honest = Outcome::default();
    let noise = under(
        attacker,
        hosts,
        client,
        &mut held,
        &mut honest,
        &[
            &["--count", &NOISE.to_string(), "--rate", &NOISE_PER_S.to_string()],
            &["--capture", capture.to_str().context("a path that is no text")?],
        ],
    );
    findings.note(format!("noise: {}", noise?));
    let after_noise = Look::at(hosts)?;
    let flood = under(
        attacker,
        hosts,
        client,
        &mut held,
        &mut honest,
        &[
            &["--count", &SYNS.to_string(), "--rate", &SYNS_PER_S.to_string()],
            &["--service", "echo.shop", "--port", "7"],
        ],
    )?;
    findings.note(format!("flood: {flood}"));
    let number = |field: &str| flood[field].as_f64().unwrap_or_default();
    findings.set("syns_per_s", number("sent") / number("seconds").max(0.001));
    let after = Look::at(hosts)?;
    let lost = held.end()?;
    if lost > 0.0 {
        findings.note(format!("{lost} of {HELD} connections that were held did not survive"));
    }
    findings.figures.add("failed", lost);
    report(&before, &[after_noise, after], &honest, findings);
    let mut drops = BTreeMap::<String, f64>::new();
    for host in hosts {
        agent::drops(host)?.into_iter().for_each(|(reason, packets)| *drops.entry(reason).or_default() += packets);
    }
    findings.set("drops_by_reason", drops.len() as f64);
    let rows: Vec<_> = drops.iter().map(|(reason, packets)| format!("{reason} {packets}")).collect();
    findings.note(format!("drops by reason: {}", rows.join(", ")));
    Ok(())
}

/// Lets the attacker do this while an honest client connects again and again; gives what the attacker says it did.
fn under(
    attacker: &Host,
    targets: [&Host; 3],
    client: &Host,
    held: &mut Held,
    honest: &mut Outcome,
    words: &[&[&str]],
) -> Result<Value> {
    let mut command = attacker.traffic(["hostile", "--strangers", &STRANGERS.to_string()])?;
    for host in targets {
        let address = host.plan.address().context("a target without an address")?.to_string();
        command.args(["--honest", &address]);
        // The client answers to nobody; the other two serve.
        command.args((host.name() != client.name()).then_some(["--target", &address]).into_iter().flatten());
    }
    command.args(words.concat());
    let hostile = std::thread::scope(|scope| -> Result<Output> {
        let running = scope.spawn(move || output_within(&mut command, LIMIT));
        while !running.is_finished() {
            let one =
                server::attempt(client, NAME, 7, &["--count", "50", "--pause-ms", HONEST_PAUSE_MS, "--parallel", "2"])?;
            honest.ok += one.ok;
            honest.ok_ms.extend(one.ok_ms);
            for (reason, count) in one.errors {
                *honest.errors.entry(reason).or_default() += count;
            }
            held.round()?;
        }
        running.join().ok().context("a thread ended badly")?
    })?;
    if !hostile.status.success() {
        bail!("the attacker failed: {}", String::from_utf8_lossy(&hostile.stderr).trim());
    }
    serde_json::from_slice(&hostile.stdout).context("the attacker says nothing")
}

fn report(before: &Look, after: &[Look; 2], honest: &Outcome, findings: &mut Findings) {
    let last = &after[1];
    findings.set("resets", last.resets - before.resets);
    findings.set("rsts_sent", last.rsts - before.rsts);
    let restarted = before.pids.iter().zip(&last.pids).filter(|(old, new)| old != new || new.is_none()).count();
    findings.set("agent_restarts", restarted as f64);
    let tried = (honest.ok + honest.failed()) as f64;
    findings.set("honest_tried", tried);
    findings.set("honest_ok_share", honest.ok as f64 / tried.max(1.0));
    findings.set("honest_ms_p99", percentile(&honest.ok_ms, 99.0));
    if honest.failed() > 0 {
        findings.note(format!("honest clients saw: {:?}", honest.errors));
    }
    let worst = last.answered.iter().zip(&last.asked).zip(before.answered.iter().zip(&before.asked));
    let worst =
        worst.map(|((out, into), (out_before, into_before))| (out - out_before) / (into - into_before).max(1.0));
    findings.set("amplification", worst.fold(0.0, f64::max));
    let grown = after.iter().flat_map(|look| look.resident.iter().zip(&before.resident));
    findings.set("memory_growth_mb", grown.map(|(now, then)| (now - then) / 1e6).fold(0.0, f64::max));
}

/// What can be seen of the hosts from outside.
struct Look {
    /// Connections that were reset.
    resets: f64,
    /// RSTs that kernels sent, also for segments that came after their connection's end.
    rsts: f64,
    pids: Vec<Option<u32>>,
    resident: Vec<f64>,
    asked: Vec<f64>,
    answered: Vec<f64>,
}

impl Look {
    fn at(hosts: [&Host; 3]) -> Result<Self> {
        let mut look = Self { resets: 0.0, rsts: 0.0, pids: vec![], resident: vec![], asked: vec![], answered: vec![] };
        for host in hosts {
            let pid = agent::pid(host).ok();
            look.pids.push(pid);
            // An agent that is gone counts as a restart.
            look.resident.push(pid.and_then(|pid| observe::resident_bytes(pid).ok()).unwrap_or_default());
            let counts = observe::counts(host)?;
            let bytes = |name: &str| counts.get(name).copied().unwrap_or_default().bytes;
            look.asked.push(bytes("asked"));
            look.answered.push(bytes("answered"));
            let kernel = observe::nstat(host)?;
            let of = |name: &str| kernel.get(name).copied().unwrap_or_default();
            look.resets += of("TcpEstabResets");
            look.rsts += of("TcpOutRsts");
        }
        Ok(look)
    }
}
