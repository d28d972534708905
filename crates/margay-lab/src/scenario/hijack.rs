//! `hijack`: somebody who saw what two hosts said to each other, and is not on their way, tries to take over their
//! flows: by forgeries of every type of message, and by what it saw, sent again as it was or changed; while transfers
//! run, while hosts move, and after an agent has started again.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::process::Output;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ipnet::IpNet;
use serde_json::Value;

use super::{Findings, Scenario, pair};
use crate::agent::{self, Agents};
use crate::filter;
use crate::host::Host;
use crate::interface::{self, Act};
use crate::lab::Lab;
use crate::observe::{self, Passing};
use crate::program::{output_within, wait_for};
use crate::recorder::Recorder;
use crate::report::Limit::{AtLeast, AtMost, Exactly};
use crate::report::{Bound, bound};
use crate::topology::Topology;
use crate::transfers::{Order, Server, Transfers};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "hijack",
    summary: "forgeries of every type of message, and replays by one who saw earlier ones, while hosts move",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 9] = [
    bound("accepted", Exactly(0.0)),
    bound("resets", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("types", Exactly(margay_wire::Kind::ALL.len() as f64)),
    bound("forged", AtLeast(30_000.0)),
    bound("refused_share", AtLeast(0.6)),
    bound("amplification", AtMost(1.0)),
    bound("attacks", Exactly(4.0)),
    bound("failed", Exactly(0.0)),
];

/// Everybody is on a network of their own, and one router lets any sender's address pass.
pub(super) const TOPOLOGY: &str = r#"
[subnet.west]
v4 = "10.1.0.0/24"

[subnet.east]
v4 = "10.3.0.0/24"

[subnet.hub]
v4 = "10.4.0.0/24"

[subnet.wild]
v4 = "10.5.0.0/24"

[host.way]
role = "gateway"
links = [{ subnet = "west" }, { subnet = "east" }, { subnet = "hub" }, { subnet = "wild" }]

[host.router]
role = "router"
links = [{ subnet = "hub" }]

[host.server]
role = "agent"
links = [{ subnet = "east" }]

[host.client]
role = "agent"
links = [{ subnet = "west" }]

[host.attacker]
role = "plain"
links = [{ subnet = "wild" }]
"#;

/// What the server's configuration says once its authority is there.
const SEALED: &str = r#"
[[service]]
name = "sealed.shop"
listen = "0.0.0.0:5203"
secure = true
"#;

/// The attacker's made-up addresses are in its /16.
const STRANGERS: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 0);
const SERVICES: [(&str, &str, u16); 2] =
    [("flow.shop", "flow.shop.sal.internal", 5202), ("sealed.shop", "sealed.shop.sal.internal", 5203)];
const WAYS: [&str; 2] = ["up:cubic", "down:cubic"];
/// Bytes per second of each.
const PACE: u64 = 300_000;
const STEP_BYTES: u64 = PACE / 2;
/// A TCP of which a tenth is lost, and of its acknowledgements, may wait for long by itself: where six tries in a row
/// are, for 13 s.
const STEP_LIMIT: Duration = Duration::from_secs(60);
const SETTLE_LIMIT: Duration = Duration::from_secs(20);
const ATTACK_LIMIT: Duration = Duration::from_secs(60);
/// Moves of client and server, in turn: while everything is recorded, and while it is used.
const MOVES: usize = 4;
/// While it is recorded, so many messages are seen and do not arrive.
const LOSS_PERCENT: u32 = 10;
/// All messages, and of DATA (type 32) what has a packet number that 32 divides.
const SEEN: &str = "(udp[9] != 32 or udp[19] & 31 == 0)";
const CAPTURED: usize = 1_000;
const FORGERIES: usize = 150;
const FLIPS: usize = 3;
const PER_S: usize = 4_000;
const FREE_NUMBER: usize = 100;
/// What a peer has said of where it is.
const TOLD: &str = "told by the peer";

struct Stage<'a> {
    lab: &'a Lab,
    /// Client, server and router, and where they are.
    hosts: [&'a Host; 3],
    addresses: [IpNet; 3],
    number: usize,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("hijack", TOPOLOGY)?, dir)?;
    let hosts = [lab.host("client")?, lab.host("server")?, lab.host("router")?];
    let [client, server, _] = hosts;
    let _agents = Agents::start(&lab)?;
    let mut servers = Vec::new();
    for (_, _, port) in SERVICES {
        servers.push(Server::start(server, port, false)?);
    }
    agent::publish(server, SERVICES[0].0, &format!("0.0.0.0:{}", SERVICES[0].2), &[])?;
    server.shell(&format!("cat >> /etc/margay/margay.toml <<'END'\n{SEALED}END\n"))?;
    agent::kill(server)?;
    agent::start_again(server)?;
    SERVICES.iter().try_for_each(|(service, ..)| agent::await_instances(client, service, 1))?;
    watch(&lab, hosts)?;
    let addresses = [0, 1, 2].map(|host| interface::first_address(&lab, hosts[host], 0, false));
    let [one, two, three] = addresses;
    let mut stage = Stage { lab: &lab, hosts, addresses: [one?, two?, three?], number: FREE_NUMBER };

    let mut recorder = Recorder::start(lab.host("way")?, 0, SEEN, CAPTURED)?;
    let mut running = Vec::new();
    for (server, (_, to, _)) in servers.iter_mut().zip(SERVICES) {
        running.push(Transfers::start(client, server, Order { to, ways: &WAYS, pace: PACE })?);
    }
    let done = attack_all(&mut stage, &mut recorder, &mut running, findings);
    if done.is_err() {
        for flow in agent::flows(client)? {
            findings.note(format!("client: {flow}"));
        }
    }
    for (transfers, (service, ..)) in running.into_iter().zip(SERVICES) {
        transfers.finish(service, findings)?;
    }
    // There are no other connections by name. Who only asked for one, and was not proved, is reset, as it must be.
    findings.set("resets", findings.figures.get("transfer_resets"));
    let (unproved, _) = observe::virtual_resets(&[client, server])?;
    findings.set("unproved_resets", unproved);
    report_amplification(hosts, findings)?;
    done
}

/// Counts what must not be, and what is said to strangers.
fn watch(lab: &Lab, hosts: [&Host; 3]) -> Result<()> {
    // Answers to forged addresses go to somebody.
    let attacker = pair::address(lab.host("attacker")?)?;
    lab.host("way")?.run(["ip", "route", "add", "10.99.0.0/16", "via", &attacker])?;
    for host in hosts {
        observe::count(host, "asked", Passing::In, "ip saddr 10.99.0.0/16 udp dport 54324")?;
        observe::count(host, "answered", Passing::Out, "ip daddr 10.99.0.0/16")?;
    }
    [hosts[0], hosts[1]].iter().try_for_each(|host| observe::count_virtual_resets(host))
}

fn attack_all(
    stage: &mut Stage<'_>,
    recorder: &mut Recorder,
    running: &mut [Transfers<'_>],
    findings: &mut Findings,
) -> Result<()> {
    for figure in ["accepted", "forged", "refused", "types", "attacks"] {
        findings.set(figure, 0.0);
    }
    filter::lose(stage.lab.host("way")?, LOSS_PERCENT)?;
    for _ in 0..MOVES {
        stage.move_one(running)?;
    }
    filter::relent(stage.lab.host("way")?)?;
    go_on(running)?;
    let capture = recorder.finish()?;
    let capture = capture.to_str().context("a path that is no text")?;

    stage.attack_at_rest("after moves", capture, running, findings)?;
    stage.attack_on_the_move(capture, running, findings)?;
    for (host, what) in [(1, "after a new start of the server's agent"), (0, "after one of the client's, too")] {
        agent::kill(stage.hosts[host])?;
        agent::start_again(stage.hosts[host])?;
        go_on(running)?;
        stage.attack_at_rest(what, capture, running, findings)?;
    }
    let [refused, forged] = ["refused", "forged"].map(|figure| findings.figures.get(figure));
    findings.set("refused_share", refused / forged.max(1.0));
    Ok(())
}

fn go_on(running: &mut [Transfers<'_>]) -> Result<()> {
    running.iter_mut().try_for_each(|transfers| transfers.await_bytes("transfers", STEP_BYTES, STEP_LIMIT))
}

impl Stage<'_> {
    fn address(&self, host: usize) -> IpAddr {
        self.addresses[host].addr()
    }

    /// Packets that agents have dropped.
    fn drops(&self) -> Result<f64> {
        self.hosts.iter().map(|host| agent::metric(host, "margay_drops_total")).sum()
    }

    /// The client or the server, in turn, goes to another address.
    fn move_one(&mut self, running: &mut [Transfers<'_>]) -> Result<()> {
        self.number += 1;
        let host = self.number % 2;
        let new = interface::address(self.lab, self.hosts[host], 0, false, self.number)?;
        let old = std::mem::replace(&mut self.addresses[host], new);
        interface::change(self.lab, self.hosts[host], &[Act::Add(0, new), Act::Remove(0, old)])?;
        go_on(running)
    }

    /// Nobody moves, so nothing of what hosts have on each other may change.
    fn attack_at_rest(
        &self,
        what: &str,
        capture: &str,
        running: &mut [Transfers<'_>],
        findings: &mut Findings,
    ) -> Result<()> {
        self.settle()?;
        let (before, refused) = (self.standing()?, self.drops()?);
        let said = self.attack(capture, || running.iter_mut().try_for_each(Transfers::refresh))?;
        note_attack(what, &said, findings);
        go_on(running)?;
        self.settle()?;
        findings.figures.add("refused", self.drops()? - refused);
        let after = self.standing()?;
        // A host whose agent has just started may still hear from an honest peer where that is.
        let is_true = |place: std::net::SocketAddr| self.addresses.iter().any(|at| at.addr() == place.ip());
        let is_news =
            |line: &str| line.contains(TOLD) && line.split('"').filter_map(|part| part.parse().ok()).all(is_true);
        for changed in before.symmetric_difference(&after).filter(|line| before.contains(*line) || !is_news(line)) {
            findings.figures.add("accepted", 1.0);
            let when = if before.contains(changed) { "before" } else { "after" };
            findings.note(format!("{what}: only {when}: {changed}"));
        }
        Ok(())
    }

    /// Hosts move all the while. In the end they find each other where they are.
    fn attack_on_the_move(
        &mut self,
        capture: &str,
        running: &mut [Transfers<'_>],
        findings: &mut Findings,
    ) -> Result<()> {
        let mut command = self.command(capture)?;
        let refused = self.drops()?;
        let said = std::thread::scope(|scope| -> Result<Output> {
            let attacking = scope.spawn(move || output_within(&mut command, ATTACK_LIMIT));
            for _ in 0..MOVES {
                self.move_one(running)?;
            }
            attacking.join().ok().context("a thread ended badly")?
        })?;
        note_attack("while hosts move", &understand(&said)?, findings);
        go_on(running)?;
        findings.figures.add("refused", self.drops()? - refused);
        if let Err(error) = self.settle() {
            findings.figures.add("accepted", 1.0);
            findings.note(format!("while hosts move: {error:#}"));
        }
        Ok(())
    }

    /// Waits until no host looks for another, and each is known to be where it is.
    fn settle(&self) -> Result<()> {
        wait_for("hosts that know where they are", SETTLE_LIMIT, || {
            for (at, host) in self.hosts.iter().enumerate() {
                let mut places = BTreeSet::new();
                for path in agent::paths(host)? {
                    let is_known = path["state"] == "settled" && path["suspected"] == false && path["local"] != "";
                    ensure!(is_known, "{}: {path}", host.name());
                    let remote = path["remote"].as_str().unwrap_or_default();
                    places.insert(remote.parse::<std::net::SocketAddr>().context("no address")?.ip());
                }
                let others: BTreeSet<_> =
                    (0..3).filter(|other| *other != at).map(|other| self.address(other)).collect();
                if places != others {
                    bail!("{} takes others to be at {places:?}, and they are at {others:?}", host.name());
                }
            }
            Ok(())
        })
    }

    /// All that hosts have on each other, a line for each.
    fn standing(&self) -> Result<BTreeSet<String>> {
        const OF_PATH: [&str; 6] = ["peer", "local", "remote", "flows", "router", "moves"];
        const OF_FLOW: [&str; 10] =
            ["flow", "peer_flow", "session", "service", "role", "lifecycle", "peer", "remote", "local", "moves"];
        let line = |host: &Host, what: &str, of: &Value, fields: &[&str]| {
            let fields: Vec<_> = fields.iter().map(|field| format!("{field} {}", of[field])).collect();
            format!("{}: {what}: {}", host.name(), fields.join(", "))
        };
        let mut lines = BTreeSet::new();
        for host in self.hosts {
            let paths = agent::paths(host)?;
            lines.extend(paths.iter().map(|path| line(host, "path", path, &OF_PATH)));
            for path in &paths {
                // A line for each place, since what is news of one takes nothing back of another.
                let addresses = path["addresses"].as_array().into_iter().flatten();
                let told = addresses.chain([&path["rendezvous"]]).filter(|place| **place != "");
                lines.extend(told.map(|place| format!("{}: {TOLD}: peer {}: {place}", host.name(), path["peer"])));
            }
            let mut flows = agent::flows(host)?;
            // Who asks for a flow is owed an answer, and gets no more than that.
            flows.retain(|flow| flow["lifecycle"] != "connecting");
            lines.extend(flows.iter().map(|flow| line(host, "flow", flow, &OF_FLOW)));
            for count in ["margay_moves_total", "margay_resets_total"] {
                lines.insert(format!("{}: {count} {}", host.name(), agent::metric(host, count)?));
            }
        }
        Ok(lines)
    }

    fn command(&self, capture: &str) -> Result<std::process::Command> {
        let numbers = [FORGERIES, FLIPS, PER_S].map(|number| number.to_string());
        let attacker = self.lab.host("attacker")?;
        let mut command = attacker.traffic(["hijack", "--strangers", &STRANGERS.to_string(), "--capture", capture])?;
        command.args(["--forgeries", &numbers[0], "--flips", &numbers[1], "--rate", &numbers[2]]);
        for host in 0..3 {
            let address = self.address(host).to_string();
            command.args(["--target", &address, "--honest", &address]);
        }
        Ok(command)
    }

    fn attack(&self, capture: &str, mut meanwhile: impl FnMut() -> Result<()>) -> Result<Value> {
        let mut command = self.command(capture)?;
        let said = std::thread::scope(|scope| -> Result<Output> {
            let attacking = scope.spawn(move || output_within(&mut command, ATTACK_LIMIT));
            while !attacking.is_finished() {
                meanwhile()?;
                std::thread::sleep(Duration::from_millis(100));
            }
            attacking.join().ok().context("a thread ended badly")?
        })?;
        understand(&said)
    }
}

/// What the attacker says of its work.
pub(super) fn understand(output: &Output) -> Result<Value> {
    if !output.status.success() {
        bail!("the attacker failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    serde_json::from_slice(&output.stdout).context("the attacker says nothing")
}

fn note_attack(what: &str, said: &Value, findings: &mut Findings) {
    findings.note(format!("{what}: {said}"));
    findings.figures.add("attacks", 1.0);
    findings.figures.add("forged", said["sent"].as_f64().unwrap_or_default());
    let types = said["types"].as_object().map_or(0, serde_json::Map::len) as f64;
    findings.set("types", findings.figures.get("types").max(types));
}

/// Bytes to strangers by bytes from them, at the host that says most; more than one is an answer too many.
fn report_amplification(hosts: [&Host; 3], findings: &mut Findings) -> Result<()> {
    let mut worst = 0.0_f64;
    for host in hosts {
        let counts = observe::counts(host)?;
        let bytes = |name: &str| counts.get(name).copied().unwrap_or_default().bytes;
        worst = worst.max(bytes("answered") / bytes("asked").max(1.0));
    }
    findings.set("amplification", worst);
    findings.figures.add("accepted", f64::from(u8::from(worst > 1.0)));
    Ok(())
}
