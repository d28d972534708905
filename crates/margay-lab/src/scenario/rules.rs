//! `rules`: a laptop's numbered datagrams are carried plain or sealed as its rules say. A fact from outside has them
//! sealed and plain again, several times; one that comes and goes faster than a rule wants changes nothing; and away
//! from home a rule with a floor seals them, before anything plain is seen there.

use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use margay_wire::{DataRepr, is_sealed};

use super::{Findings, Scenario, is_long, pair};
use crate::agent::{self, Agents};
use crate::command::progress;
use crate::host::Host;
use crate::interface::{self, Act};
use crate::lab::Lab;
use crate::program::{Program, wait_for};
use crate::recorder::Recorder;
use crate::report::Limit::{AtLeast, AtMost, Exactly};
use crate::report::{Bound, bound, percentile};
use crate::series::Series;
use crate::topology::Topology;
use crate::traffic::{Came, Sent, read_frames};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "rules",
    summary: "live flows are sealed and unsealed by rules: on a fact from outside, and away from home",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 9] = [
    // Changes by rules, over those that were expected.
    bound("changes_share", Exactly(1.0)),
    bound("wrong_stack", Exactly(0.0)),
    bound("react_s_p90", AtMost(HOLD_S + 2.0)),
    bound("flaps", Exactly(0.0)),
    bound("plain_outside", Exactly(0.0)),
    // Otherwise nothing was seen outside.
    bound("sealed_outside", AtLeast(100.0)),
    bound("cpu_share", AtMost(0.01)),
    bound("lost_by_rules", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

/// As the rules have it.
const HOLD_S: f64 = 1.0;
const RULES: &str = r#"
[[stack_rule]]
names = ["count.shop"]
when = '!path.local.within("10.2.0.0/24")'
use = "secure"
floor = true
release_s = 1

[[stack_rule]]
names = ["count.shop"]
when = 'fact.lockdown && flow.protocol == "udp"'
use = "secure"
hold_s = 1
release_s = 1

[[stack_rule]]
names = ["count.shop"]
when = "has(fact.flapping) && fact.flapping"
use = "secure"
hold_s = 3
release_s = 1
"#;

/// A laptop at home, whose other network is a cafe's, and a server elsewhere.
pub const TOPOLOGY: &str = r#"
[subnet.core]
v4 = "10.1.0.0/24"
delay_ms = 2

[subnet.home]
v4 = "10.2.0.0/24"

[subnet.cafe]
v4 = "10.3.0.0/24"

[host.router]
role = "router"
links = [{ subnet = "core" }]

[host.server]
role = "agent"
links = [{ subnet = "core" }]

[host.homegw]
role = "gateway"
links = [{ subnet = "core" }, { subnet = "home" }]

[host.cafegw]
role = "gateway"
links = [{ subnet = "core" }, { subnet = "cafe" }]

[host.laptop]
role = "agent"
links = [{ subnet = "home" }, { subnet = "cafe" }]
"#;

const SERVICE: &str = "count.shop";
const NAME: &str = "count.shop.sal.internal";
const PORT: u16 = 9;
/// Datagrams a second.
const RATE: u64 = 200;
const LIMIT: Duration = Duration::from_secs(15);
/// What is seen outside is looked at until so much has come.
const CAPTURED_MAX: usize = 100_000;
const CHANGES: &str = "margay_stack_changes_total";

struct Stage<'a> {
    laptop: &'a Host,
    server: &'a Host,
    sink: Program,
    flow: String,
    /// Changes that rules should have made.
    expected: f64,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse(SCENARIO.name, TOPOLOGY)?, dir)?;
    let laptop = lab.host("laptop")?;
    let server = lab.host("server")?;
    interface::change(&lab, laptop, &[Act::Down(1)])?;
    laptop.shell(&format!("cat >> /etc/margay/margay.toml <<'END'\n{RULES}END"))?;
    let checked = agent::margay(laptop, ["stack", "rules", "check", "/etc/margay/margay.toml"])?;
    ensure!(checked.contains("3 rules"), "the rules are read as: {checked}");
    let _agents = Agents::start(&lab)?;
    for figure in ["wrong_stack", "flaps", "failed", "lost_by_rules"] {
        findings.figures.add(figure, 0.0);
    }
    let sink = serve(laptop, server)?;
    let series: Series<Sent> = Series::start(laptop, &words())?;
    let flow = wait_for("a flow", LIMIT, || flow_of(laptop))?;
    let mut stage = Stage { laptop, server, sink, flow, expected: 0.0 };
    let begun = Instant::now();
    await_stack(&stage, "plain")?;
    pair::attempt_part("a fact from outside", findings, |findings| facts(&mut stage, findings));
    pair::attempt_part("a fact that flaps", findings, |findings| flap(&stage, findings));
    finish(&stage, series, findings)?;
    pair::attempt_part("away from home", findings, |findings| leave(&lab, &mut stage, findings));
    let spent_s = agent::metric(laptop, "margay_stack_rule_time_seconds_total")?;
    findings.set("cpu_share", spent_s / begun.elapsed().as_secs_f64());
    findings.set("changes", changes(laptop)?);
    findings.set("changes_share", changes(laptop)? / stage.expected.max(1.0));
    Ok(())
}

fn words() -> [String; 7] {
    let [port, rate] = [u64::from(PORT), RATE].map(|number| number.to_string());
    ["numbered", NAME, &port, "--run", "1", "--rate", &rate].map(str::to_owned)
}

fn serve(laptop: &Host, server: &Host) -> Result<Program> {
    let command = server.traffic(["numbered-sink", "--listen", &format!("0.0.0.0:{PORT}")])?;
    let sink = Program::start(command, &server.dir.join("numbered-sink.log"))?;
    wait_for("a sink", LIMIT, || sink.log().contains("ready").then_some(()).context("it is not ready"))?;
    agent::publish(server, SERVICE, &format!("0.0.0.0:{PORT}"), &[])?;
    agent::await_instances(laptop, SERVICE, 1)?;
    Ok(sink)
}

/// The laptop's number of its newest flow.
fn flow_of(laptop: &Host) -> Result<String> {
    let open = agent::open_flows(laptop, SERVICE, "udp")?;
    let flow = open.iter().rev().find(|flow| flow["lifecycle"] == "established").context("there is none")?;
    Ok(flow["flow"].as_str().context("it has no number")?.to_owned())
}

/// The stack of the laptop's flow at both ends, where they have the same and none is under way.
fn stack(stage: &Stage<'_>) -> Result<String> {
    let shown = agent::stack(stage.laptop, &stage.flow)?;
    let peer = agent::stack(stage.server, shown["peer_flow"].as_str().context("the peer has no number of the flow")?)?;
    let is_calm = |shown: &serde_json::Value| shown["stack"]["changing_to"].as_str().is_none_or(str::is_empty);
    let own = shown["stack"]["stack"].as_str().unwrap_or_default();
    if peer["stack"]["stack"] != own || !is_calm(&shown) || !is_calm(&peer) {
        bail!("here it is {own}, and there {}", peer["stack"]["stack"]);
    }
    Ok(own.to_owned())
}

fn await_stack(stage: &Stage<'_>, wanted: &str) -> Result<()> {
    wait_for(&format!("a flow that is {wanted}"), LIMIT, || match stack(stage)? {
        found if found == wanted => Ok(()),
        found => bail!("it is {found}"),
    })
}

/// Changes that rules have made on a host.
fn changes(host: &Host) -> Result<f64> {
    let text = agent::margay(host, ["status", "--metrics"])?;
    let is_ruled = |line: &&str| {
        let is_rules = line.contains("cause=\"rule\"") || line.contains("cause=\"rule-ended\"");
        line.starts_with(CHANGES) && is_rules && line.contains("outcome=\"done\"")
    };
    let counts = text.lines().filter(is_ruled).filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    Ok(counts.sum())
}

/// Flows that say nothing are changed as well, a moment later perhaps.
fn await_changes(stage: &Stage<'_>) -> Result<()> {
    wait_for("changes by rules", LIMIT, || {
        let made = changes(stage.laptop)?;
        ensure!(made >= stage.expected, "of {} there are {made}", stage.expected);
        Ok(())
    })
}

/// A fact has the flow sealed, and when it is cleared plain again.
fn facts(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let mut reacted_s = Vec::new();
    for turn in 0..if is_long() { 10 } else { 2 } {
        for (words, wanted) in [
            (&["fact", "set", "lockdown", "true", "--ttl", "5m"][..], "secure"),
            (&["fact", "clear", "lockdown"][..], "plain"),
        ] {
            agent::margay(stage.laptop, words.iter().copied())?;
            let begun = Instant::now();
            await_stack(stage, wanted)?;
            reacted_s.push(begun.elapsed().as_secs_f64());
            stage.expected += 1.0;
            // It stays so.
            sleep(Duration::from_millis(500));
            let is_wrong = stack(stage)? != wanted;
            findings.figures.add("wrong_stack", f64::from(u8::from(is_wrong)));
        }
        progress(&format!("turn {turn}: {reacted_s:.2?} s"));
    }
    findings.set("react_s_p90", percentile(&reacted_s, 90.0));
    Ok(())
}

/// A fact comes and goes faster than its rule wants it to hold.
fn flap(stage: &Stage<'_>, findings: &mut Findings) -> Result<()> {
    let before = changes(stage.laptop)?;
    for turn in 0..if is_long() { 40 } else { 8 } {
        let value = if turn % 2 == 0 { "true" } else { "false" };
        agent::margay(stage.laptop, ["fact", "set", "flapping", value])?;
        sleep(Duration::from_millis(500));
    }
    agent::margay(stage.laptop, ["fact", "clear", "flapping"])?;
    findings.figures.add("flaps", changes(stage.laptop)? - before);
    Ok(())
}

/// Ends the datagrams of the changes at home: none of them was lost.
fn finish(stage: &Stage<'_>, series: Series<Sent>, findings: &mut Findings) -> Result<()> {
    let sent = series.finish(LIMIT)?.first().context("a sender has said nothing")?.sent;
    let received = || {
        let log = stage.sink.log();
        let mut came = log.lines().rev().filter_map(|line| serde_json::from_str::<Came>(line).ok());
        came.find(|came| came.run == 1).map_or(0, |came| came.received)
    };
    let _ = wait_for("all datagrams", Duration::from_secs(2), || {
        ensure!(received() >= sent, "{} of {sent} have come", received());
        Ok(())
    });
    findings.figures.add("lost_by_rules", sent.saturating_sub(received()) as f64);
    Ok(())
}

/// The laptop goes to the cafe and comes home: nothing plain is seen there.
fn leave(lab: &Lab, stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let mut run_words = words();
    "2".clone_into(&mut run_words[4]);
    let series: Series<Sent> = Series::start(stage.laptop, &run_words)?;
    let before = stage.flow.clone();
    stage.flow = wait_for("a flow", LIMIT, || {
        let flow = flow_of(stage.laptop)?;
        ensure!(flow != before, "there is none but the one before");
        Ok(flow)
    })?;
    await_stack(stage, "plain")?;
    // The one before is there still, and moves as well.
    let flows = agent::open_flows(stage.laptop, SERVICE, "udp")?.len() as f64;
    let cafegw = lab.host("cafegw")?;
    // DATA that is not sealed, and whatever goes by flow ports.
    let filter = "(udp port 54324 and udp[9] = 32) or ((tcp or udp) and portrange 61000-65535)";
    let mut recorder = Recorder::start_of(cafegw, 1, filter, CAPTURED_MAX)?;
    for _ in 0..if is_long() { 3 } else { 1 } {
        interface::change(lab, stage.laptop, &[Act::Down(0), Act::Up(1)])?;
        await_stack(stage, "secure")?;
        stage.expected += flows;
        sleep(Duration::from_secs(1));
        let shown = agent::margay(stage.laptop, ["stack", "show", &stage.flow])?;
        ensure!(shown.contains("rule 1"), "the rule is not named: {shown}");
        interface::change(lab, stage.laptop, &[Act::Down(1), Act::Up(0)])?;
        await_stack(stage, "plain")?;
        stage.expected += flows;
        await_changes(stage)?;
    }
    series.finish(LIMIT)?;
    let file = recorder.finish()?;
    let frames = read_frames(&file)?;
    let sealed = frames.iter().filter(|frame| is_sealed_data(frame)).count();
    findings.set("sealed_outside", sealed as f64);
    findings.set("plain_outside", (frames.len() - sealed) as f64);
    Ok(())
}

/// Whether a frame with an IPv4 packet has DATA that is sealed.
fn is_sealed_data(frame: &[u8]) -> bool {
    const PAYLOAD: usize = 14 + 20 + 8;
    let is_udp = frame.get(23) == Some(&17);
    let data = frame.get(PAYLOAD..).and_then(|payload| DataRepr::parse(payload).ok());
    is_udp && data.is_some_and(|data| is_sealed(data.stack))
}
