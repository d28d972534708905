//! `stack-attacks`: somebody who saw how two hosts changed the stacks of their flows, and is not on their way, sends
//! forgeries and what it saw, while flows are sealed by order and while they are changed. Nothing changes but by the
//! client's orders, nothing plain is said of a sealed flow, and no lock stays. Then somebody on the path drops the
//! messages of changes while a rule demands encryption: because of where the client is, and because of a fact. What
//! waits is never sent plain, and goes on when the attacker is gone.

use std::path::Path;
use std::process::Output;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ipnet::IpNet;
use serde_json::Value;

use super::hijack::{TOPOLOGY, understand};
use super::{Findings, Scenario, pair};
use crate::agent::{self, Agents};
use crate::host::Host;
use crate::interface::{self, Act};
use crate::lab::Lab;
use crate::observe::{self, Passing};
use crate::program::{output_within, wait_for};
use crate::recorder::Recorder;
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::topology::Topology;
use crate::transfers::{Order, Server, Transfers};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "stack-attacks",
    summary: "forgeries and replays of one who saw stacks changed, while flows are sealed, and while they are changed",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 13] = [
    // Changes that nobody ordered, and flows whose ends have not the stack of the last order.
    bound("accepted", Exactly(0.0)),
    bound("plain_of_sealed", Exactly(0.0)),
    // While flows are plain, they are seen so.
    bound("plain_seen", AtLeast(100.0)),
    bound("stuck_locks", Exactly(0.0)),
    bound("resets", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("changes_under_attack", AtLeast(8.0)),
    // Of the messages of changes alone.
    bound("forged_changes", AtLeast(1000.0)),
    bound("attacks", Exactly(2.0)),
    // While changes are dropped: what leaves plain under a floor, flows that wait for it, and those that do not go on.
    bound("plain_outside", Exactly(0.0)),
    bound("held", Exactly((FLOORS * WAYS.len()) as f64)),
    bound("honest_failed", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

const SERVICE: &str = "bulk.shop";
const NAME: &str = "bulk.shop.sal.internal";
const PORT: u16 = 5202;
const WAYS: [&str; 4] = ["up:cubic", "down:cubic", "up:cubic", "down:cubic"];
/// Bytes per second of each.
const PACE: u64 = 300_000;
const STEP_BYTES: u64 = PACE / 4;
const LIMIT: Duration = Duration::from_secs(20);
const ATTACK_LIMIT: Duration = Duration::from_secs(60);
/// Changes of each flow that are seen.
const SEEN_CHANGES: usize = 4;
/// All messages, and of DATA (type 32) what has a packet number that 32 divides.
const SEEN: &str = "(udp[9] != 32 or udp[19] & 31 == 0)";
const CAPTURED: usize = 1000;
const FORGERIES: &str = "300";
const FLIPS: &str = "2";
const PER_S: &str = "4000";
/// The attacker's made-up addresses are in its /16.
const STRANGERS: &str = "10.99.0.0";
const FREE_NUMBER: usize = 100;
/// Messages of changes are dropped for longer than a peer has ever asked before it sent plain.
const DROPPED: Duration = Duration::from_secs(8);
/// A floor by where the client is, and one by a fact.
const FLOORS: usize = 2;
const DROP_CHANGES: &str = "add table inet attacker; \
    add chain inet attacker path { type filter hook forward priority 0; }; \
    add rule inet attacker path udp dport 54324 @th,72,8 18 drop";
/// The hosts' own packets, as they come to the router between them: direct ones, and DATA of the stack 2 without FENCE.
const PLAIN: [&str; 2] = [
    "iifname { eth0, eth1 } meta l4proto { tcp, udp } th dport 61000-65535",
    "iifname { eth0, eth1 } udp dport 54324 @th,72,8 32 @th,80,8 2 @th,88,8 & 1 == 0",
];

struct Stage<'a> {
    lab: &'a Lab,
    client: &'a Host,
    server: &'a Host,
    /// Where the client is, and the server.
    addresses: [String; 2],
    /// The transfers', as the client numbers them, and as the server does.
    flows: Vec<[String; 2]>,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse(SCENARIO.name, TOPOLOGY)?, dir)?;
    let client = lab.host("client")?;
    let server = lab.host("server")?;
    let way = lab.host("way")?;
    let _agents = Agents::start(&lab)?;
    for figure in ["accepted", "plain_of_sealed", "stuck_locks", "changes_under_attack", "forged_changes", "attacks"] {
        findings.set(figure, 0.0);
    }
    for figure in ["plain_outside", "held", "honest_failed"] {
        findings.set(figure, 0.0);
    }
    let mut sink = Server::start(server, PORT, false)?;
    agent::publish(server, SERVICE, &format!("0.0.0.0:{PORT}"), &[])?;
    agent::await_instances(client, SERVICE, 1)?;
    way.run(["ip", "route", "add", "10.99.0.0/16", "via", &pair::address(lab.host("attacker")?)?])?;
    for matching in PLAIN {
        observe::count(way, "plain", Passing::In, matching)?;
    }
    let mut recorder = Recorder::start(way, 0, SEEN, CAPTURED)?;
    let mut transfers = Transfers::start(client, &mut sink, Order { to: NAME, ways: &WAYS, pace: PACE })?;
    // The attacker sees a move, too: its forgeries say where hosts are.
    let new = interface::address(&lab, client, 0, false, FREE_NUMBER)?;
    let old = interface::first_address(&lab, client, 0, false)?;
    interface::change(&lab, client, &[Act::Add(0, new), Act::Remove(0, old)])?;
    transfers.await_bytes("transfers", STEP_BYTES, LIMIT)?;
    let addresses = [new.addr().to_string(), pair::address(server)?];
    let stage = Stage { lab: &lab, client, server, addresses, flows: flows(client)? };
    let done = attack_all(&stage, &mut recorder, &mut transfers, findings);
    if done.is_err() {
        for [flow, _] in &stage.flows {
            findings.note(format!("client: {:?}", agent::stack(client, flow)));
        }
    }
    transfers.finish("transfers", findings)?;
    findings.set("resets", findings.figures.get("transfer_resets"));
    done
}

fn flows(client: &Host) -> Result<Vec<[String; 2]>> {
    let open = agent::open_flows(client, SERVICE, "tcp")?;
    let number = |flow: &Value, of: &str| flow[of].as_str().map(str::to_owned).context("a flow without a number");
    let flows: Vec<[String; 2]> =
        open.iter().map(|flow| Ok([number(flow, "flow")?, number(flow, "peer_flow")?])).collect::<Result<_>>()?;
    ensure!(flows.len() == WAYS.len(), "there are {} flows of {} transfers", flows.len(), WAYS.len());
    Ok(flows)
}

fn attack_all(
    stage: &Stage<'_>,
    recorder: &mut Recorder,
    transfers: &mut Transfers<'_>,
    findings: &mut Findings,
) -> Result<()> {
    for change in 0..SEEN_CHANGES {
        stage.set_all(if change % 2 == 0 { "secure" } else { "plain" })?;
        transfers.await_bytes("transfers", STEP_BYTES, LIMIT)?;
    }
    stage.set_all("secure")?;
    let capture = recorder.finish()?;
    let capture = capture.to_str().context("a path that is no text")?;
    stage.attack_at_rest(capture, transfers, findings)?;
    stage.attack_while_changing(capture, findings)?;
    transfers.await_bytes("transfers", STEP_BYTES, LIMIT)?;
    // A lease is shorter than this.
    let locks = wait_for("the end of all locks", LIMIT, || {
        let locks = stage.locks()?;
        ensure!(locks == 0.0, "{locks} are held");
        Ok(())
    });
    if locks.is_err() {
        findings.set("stuck_locks", stage.locks()?);
    }
    stage.set_all("plain")?;
    stage.drop_changes_after_a_move(transfers, findings)?;
    stage.drop_changes_after_a_fact(transfers, findings)
}

impl Stage<'_> {
    fn set_all(&self, stack: &str) -> Result<()> {
        self.flows.iter().try_for_each(|[flow, _]| agent::set_stack(self.client, flow, stack))?;
        self.flows.iter().try_for_each(|flow| self.await_stack(flow, stack))
    }

    /// What `margay stack show` says of a flow, at each end.
    fn shown(&self, [here, there]: &[String; 2]) -> Result<[Value; 2]> {
        Ok([agent::stack(self.client, here)?["stack"].take(), agent::stack(self.server, there)?["stack"].take()])
    }

    /// Waits until both ends of a flow have a stack, and no change is under way.
    fn await_stack(&self, flow: &[String; 2], stack: &str) -> Result<()> {
        wait_for("a stack at both ends", LIMIT, || {
            let shown = self.shown(flow)?;
            let is_calm = |end: &Value| end["stack"] == stack && end["changing_to"].as_str().is_none_or(str::is_empty);
            if shown.iter().all(is_calm) { Ok(()) } else { bail!("it is {shown:?}, not {stack}") }
        })
    }

    fn locks(&self) -> Result<f64> {
        [self.client, self.server].iter().map(|host| agent::metric(host, "margay_sessions_locked")).sum()
    }

    /// Packets that the router between the hosts has counted under a name.
    fn counted(&self, name: &str) -> Result<f64> {
        Ok(observe::counts(self.lab.host("way")?)?.get(name).copied().unwrap_or_default().packets)
    }

    /// All flows are sealed, and nobody orders anything.
    fn attack_at_rest(&self, capture: &str, transfers: &mut Transfers<'_>, findings: &mut Findings) -> Result<()> {
        let standing = |flow| Ok(self.shown(flow)?.each_ref().map(standing));
        let all = || self.flows.iter().map(standing).collect::<Result<Vec<_>>>();
        let before = all()?;
        let plain_before = self.counted("plain")?;
        findings.set("plain_seen", plain_before);
        let mut command = self.command(capture)?;
        let said = std::thread::scope(|scope| -> Result<Output> {
            let attacking = scope.spawn(move || output_within(&mut command, ATTACK_LIMIT));
            while !attacking.is_finished() {
                transfers.await_bytes("transfers under attack", STEP_BYTES, LIMIT)?;
            }
            attacking.join().ok().context("a thread ended badly")?
        })?;
        note_attack("at rest", &understand(&said)?, findings);
        findings.set("plain_of_sealed", self.counted("plain")? - plain_before);
        for (before, after) in before.iter().zip(&all()?).filter(|(before, after)| before != after) {
            findings.figures.add("accepted", 1.0);
            findings.note(format!("at rest: {before:?} became {after:?}"));
        }
        Ok(())
    }

    /// The client's operator has the flows changed all the while.
    fn attack_while_changing(&self, capture: &str, findings: &mut Findings) -> Result<()> {
        let mut command = self.command(capture)?;
        let mut last = vec!["secure"; self.flows.len()];
        let said = std::thread::scope(|scope| -> Result<Output> {
            let attacking = scope.spawn(move || output_within(&mut command, ATTACK_LIMIT));
            for at in (0..self.flows.len()).cycle() {
                if attacking.is_finished() {
                    break;
                }
                let to = if last[at] == "secure" { "plain" } else { "secure" };
                agent::set_stack(self.client, &self.flows[at][0], to)?;
                last[at] = to;
                findings.figures.add("changes_under_attack", 1.0);
            }
            attacking.join().ok().context("a thread ended badly")?
        })?;
        note_attack("while flows are changed", &understand(&said)?, findings);
        for (flow, stack) in self.flows.iter().zip(last) {
            let settled = self.await_stack(flow, stack);
            let [here, there] = self.shown(flow)?;
            let is_other = |end: &Value, cause: &str| {
                let changes = end["changes"].as_array().into_iter().flatten();
                changes.filter(|change| change["cause"] != cause || change["outcome"] != "done").count()
            };
            let others = is_other(&here, "order") + is_other(&there, "peer");
            if settled.is_err() || others > 0 {
                findings.figures.add("accepted", 1.0);
                findings.note(format!("while flows are changed: {settled:?}; {here}; {there}"));
            }
        }
        Ok(())
    }

    /// Somebody on the path drops the messages of changes while the client is where a rule demands encryption.
    fn drop_changes_after_a_move(&self, transfers: &mut Transfers<'_>, findings: &mut Findings) -> Result<()> {
        let [home, away] = self.homes()?;
        let at = away.addr();
        let rules = format!(
            "[[stack_rule]]\nnames = [\"{SERVICE}\"]\nwhen = 'path.local.within(\"{at}/32\") || has(fact.lockdown) && \
             fact.lockdown'\nuse = \"secure\"\nfloor = true\nrelease_s = 1\n"
        );
        self.client.shell(&format!("cat >> /etc/margay/margay.toml <<'END'\n{rules}END"))?;
        agent::margay(self.client, ["reload"])?;
        let way = self.lab.host("way")?;
        for matching in PLAIN {
            for end in ["saddr", "daddr"] {
                observe::count(way, "plain_away", Passing::In, &format!("{matching} ip {end} {at}"))?;
            }
        }
        way.run(["nft", DROP_CHANGES])?;
        interface::change(self.lab, self.client, &[Act::Add(0, away), Act::Remove(0, home)])?;
        self.wait_under_floor("away", transfers, findings)?;
        findings.figures.add("plain_outside", self.counted("plain_away")?);
        Ok(())
    }

    /// At home flows are plain again. Then the same is dropped, and a fact demands encryption where the flows are.
    fn drop_changes_after_a_fact(&self, transfers: &mut Transfers<'_>, findings: &mut Findings) -> Result<()> {
        let [home, away] = self.homes()?;
        interface::change(self.lab, self.client, &[Act::Add(0, home), Act::Remove(0, away)])?;
        self.flows.iter().try_for_each(|flow| self.await_stack(flow, "plain"))?;
        let before = self.counted("plain")?;
        transfers.await_bytes("transfers at home", STEP_BYTES, LIMIT)?;
        ensure!(self.counted("plain")? > before, "what is plain at home is not seen");
        self.lab.host("way")?.run(["nft", DROP_CHANGES])?;
        agent::margay(self.client, ["fact", "set", "lockdown", "true"])?;
        wait_for("flows that wait at both ends", LIMIT, || {
            for flow in &self.flows {
                let shown = self.shown(flow)?;
                ensure!(shown.iter().all(waits), "a flow does not wait: {shown:?}");
            }
            Ok(())
        })?;
        let before = self.counted("plain")?;
        self.wait_under_floor("by a fact", transfers, findings)?;
        findings.figures.add("plain_outside", self.counted("plain")? - before);
        agent::margay(self.client, ["fact", "clear", "lockdown"]).map(drop)
    }

    /// The client's address before the last attack, and the one where a rule demands encryption.
    fn homes(&self) -> Result<[IpNet; 2]> {
        let number = |at| interface::address(self.lab, self.client, 0, false, FREE_NUMBER + at);
        Ok([number(0)?, number(1)?])
    }

    /// All flows wait while messages are dropped, and are encrypted and go on once they are not.
    fn wait_under_floor(&self, what: &str, transfers: &mut Transfers<'_>, findings: &mut Findings) -> Result<()> {
        sleep(DROPPED);
        for flow in &self.flows {
            let shown = self.shown(flow)?;
            let is_held = shown.iter().all(waits);
            findings.figures.add("held", f64::from(u8::from(is_held)));
            if !is_held {
                findings.note(format!("{what}: a flow does not wait: {shown:?}"));
            }
        }
        self.lab.host("way")?.run(["nft", "delete table inet attacker"])?;
        for flow in &self.flows {
            if let Err(error) = self.await_stack(flow, "secure") {
                findings.figures.add("honest_failed", 1.0);
                findings.note(format!("{what}: {error:#}"));
            }
        }
        transfers.await_bytes("transfers under a floor", STEP_BYTES, LIMIT * 2)
    }

    fn command(&self, capture: &str) -> Result<std::process::Command> {
        let attacker = self.lab.host("attacker")?;
        let mut command = attacker.traffic(["hijack", "--strangers", STRANGERS, "--capture", capture])?;
        command.args(["--forgeries", FORGERIES, "--flips", FLIPS, "--rate", PER_S]);
        for address in &self.addresses {
            command.args(["--target", address, "--honest", address]);
        }
        Ok(command)
    }
}

/// Whether an end holds what a flow sends until the flow is encrypted.
fn waits(end: &Value) -> bool {
    end["waits_for_seal"] == true
}

/// The stack that a flow has, and which changes there were.
fn standing(end: &Value) -> (String, Vec<[String; 4]>) {
    let changes = end["changes"].as_array().into_iter().flatten();
    let changes = changes.map(|change| ["from", "to", "cause", "outcome"].map(|of| change[of].to_string()));
    (end["stack"].to_string(), changes.collect())
}

fn note_attack(what: &str, said: &Value, findings: &mut Findings) {
    findings.note(format!("{what}: {said}"));
    findings.figures.add("attacks", 1.0);
    findings.figures.add("forged_changes", said["types"]["Change"].as_f64().unwrap_or_default());
}
