//! `intruders`: hosts without a key, one on the link of a server, one far away and one on the path between two honest
//! hosts, each try what they can reach: virtual addresses, names that are a key's, tables, others' grants and
//! connections, and the ports of flows. Honest hosts connect and talk all the while. Each attack is a part of its
//! own, with its count in the notes.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use margay_core::name::{Name, ServiceId};
use serde_json::Value;

use super::{Findings, Scenario, pair};
use crate::agent::{self, Agents};
use crate::filter;
use crate::held::Held;
use crate::host::Host;
use crate::iperf::{Load, Ratios};
use crate::lab::Lab;
use crate::observe::{self, Passing};
use crate::program::{output_within, wait_for};
use crate::recorder::Recorder;
use crate::report::Limit::{AtLeast, AtMost, Exactly};
use crate::report::{Bound, bound};
use crate::server;
use crate::topology::Topology;
use crate::traffic::FLOW_PORTS;
use crate::turns::{self, End, Pace, Ways};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "intruders",
    summary: "hosts without a key, on the link, on the path and far away, try to get in and to cut what others have",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 12] = [
    bound("accepted", Exactly(0.0)),
    bound("accepted_on_path", Exactly(0.0)),
    bound("cut", Exactly(0.0)),
    bound("cut_on_path", Exactly(0.0)),
    bound("honest_failed", Exactly(0.0)),
    bound("honest_tried", AtLeast(200.0)),
    // Otherwise there was nothing for the host on the path to take.
    bound("granted", AtLeast(1.0)),
    bound("strangers_kept", AtMost(STRANGERS_KEPT_MAX)),
    bound("memory_growth_mb", AtMost(20.0)),
    // Without a flood it is 0.91 to 0.93 here (docs/decisions/0036), where 0.97 was wanted; under one, medians of 0.84,
    // 0.87 and 1.02 were measured, of rounds from 0.70 to 1.35.
    bound("honest_ratio", AtLeast(0.75)),
    bound("attacks", Exactly(8.0)),
    bound("failed", Exactly(0.0)),
];

const TOPOLOGY: &str = r#"
[subnet.west]
v4 = "10.1.0.0/24"

[subnet.east]
v4 = "10.3.0.0/24"

[subnet.wild]
v4 = "10.5.0.0/24"

# Between client and server: it reads, injects and drops.
[host.way]
role = "gateway"
links = [{ subnet = "west" }, { subnet = "east" }, { subnet = "wild" }]

[host.router]
role = "router"
links = [{ subnet = "west" }]

[host.server]
role = "agent"
links = [{ subnet = "west" }]

# Serves what is sealed.
[host.vault]
role = "agent"
links = [{ subnet = "west" }]

[host.client]
role = "agent"
links = [{ subnet = "east" }]

# On the server's link.
[host.near]
role = "plain"
links = [{ subnet = "west" }]

# Knows no router and no authority.
[host.loner]
role = "plain"
links = [{ subnet = "west" }]

[host.far]
role = "plain"
links = [{ subnet = "wild" }]
"#;

const OPEN: &str = "open.shop";
const SEALED: &str = "sealed.shop";
const BULK: &str = "bulk.shop";
/// What the vault's configuration says once its authority is there.
const SEALED_SERVICE: &str = "[[service]]\nname = \"sealed.shop\"\nlisten = \"0.0.0.0:7\"\nsecure = true\n";
/// Connections of each kind that are held open.
const HELD: usize = 8;
/// Hosts without a key that ask one host, from one address.
const STRANGERS: &str = "1000";
const STRANGERS_KEPT_MAX: f64 = 64.0;
const FLOOD_PER_S: &str = "100000";
/// Longer than what is compared meanwhile.
const FLOOD_MS: &str = "16000";
const PACE: Pace = Pace { rounds: 5, turn: Duration::from_millis(50) };
const LIMIT: Duration = Duration::from_secs(60);
const SETTLE: Duration = Duration::from_secs(15);
/// Packets that are captured at most.
const CAPTURED: usize = 10_000;
/// A pcap file without a packet.
const EMPTY_CAPTURE: u64 = 24;
/// A link of `way` that all of the client's packets pass.
const EAST: usize = 1;
/// Late: to hosts whose largest datagrams differ, as those of one family and of two, nothing is granted.
const SERVER_V6: &str = "fd01::1";
/// What reaches the host's own stack by a card, and bears an address that no packet outside a host has.
const INSIDE: &str = "iifname \"eth*\"";

struct Stage<'a> {
    lab: &'a Lab,
    server: &'a Host,
    client: &'a Host,
    /// The server's address, the vault's and the client's.
    at: String,
    vault_at: String,
    client_at: String,
    /// The virtual address of [`OPEN`] at the client.
    open: String,
    direct: Held,
    sealed: Held,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("intruders", TOPOLOGY)?, dir)?;
    let _agents = Agents::start(&lab)?;
    let [router, server, client] = [lab.host("router")?, lab.host("server")?, lab.host("client")?];
    let _echo = server::echo(server, &["0.0.0.0:7".parse()?])?;
    agent::publish(server, OPEN, "0.0.0.0:7", &[])?;
    let vault = lab.host("vault")?;
    let _vault_echo = server::echo(vault, &["0.0.0.0:7".parse()?])?;
    vault.shell(&format!("cat >> /etc/margay/margay.toml <<'END'\n{SEALED_SERVICE}END\n"))?;
    agent::kill(vault)?;
    agent::start_again(vault)?;
    [OPEN, SEALED].iter().try_for_each(|service| agent::await_instances(client, service, 1))?;
    pair::demand_kernel(&[server, client], findings)?;
    let open = agent::virtual_addresses(client, OPEN)?.0;
    let direct = open_direct(client, &open)?;
    let sealed = Held::open(client, &agent::virtual_addresses(client, SEALED)?.0, HELD)?;
    let [at, vault_at, client_at] = [server, vault, client].map(pair::address);
    let (at, vault_at, client_at) = (at?, vault_at?, client_at?);
    let mut stage = Stage { lab: &lab, server, client, at, vault_at, client_at, open, direct, sealed };
    for figure in ["accepted", "accepted_on_path", "cut", "cut_on_path", "honest_failed", "honest_tried", "attacks"] {
        findings.set(figure, 0.0);
    }
    stage.honest(findings)?;
    let hosts = [router, server, vault, client];
    let before = resident(hosts)?;

    // First: see `SERVER_V6`.
    pair::attempt_part("others' grants", findings, |findings| grants(&mut stage, findings));
    pair::attempt_part("virtual addresses", findings, |findings| virtual_addresses(&mut stage, findings));
    pair::attempt_part("a name that is a key's", findings, |findings| key_name(&mut stage, findings));
    pair::attempt_part("tables", findings, |findings| strangers(&mut stage, findings));
    pair::attempt_part("blind endings", findings, |findings| blind_endings(&mut stage, findings));
    pair::attempt_part("messages on the path", findings, |findings| messages(&mut stage, findings));
    pair::attempt_part("flow ports", findings, |findings| flood(&mut stage, findings));
    let after = resident(hosts)?;
    let grown = after.iter().zip(&before).map(|(after, before)| (after - before) / 1e6);
    findings.set("memory_growth_mb", grown.fold(0.0, f64::max));
    pair::attempt_part("endings on the path", findings, |findings| exact_endings(&mut stage, findings));
    Ok(())
}

fn open_direct(client: &Host, open: &str) -> Result<Held> {
    let mut held = Held::open(client, open, HELD)?;
    wait_for("direct flows", SETTLE, || {
        held.round()?;
        let (count, all) = agent::direct_flows(client)?;
        ensure!(count >= HELD, "{count} of {all} flows are direct");
        Ok(held.open_count())
    })?;
    Ok(held)
}

fn resident(hosts: [&Host; 4]) -> Result<Vec<f64>> {
    hosts.iter().map(|host| observe::resident_bytes(agent::pid(host)?)).collect()
}

/// Runs an attacker to its end; gives what it says.
fn attack(command: &mut Command) -> Result<Value> {
    understand(&output_within(command, LIMIT)?)
}

fn understand(output: &Output) -> Result<Value> {
    if !output.status.success() {
        bail!("the attacker failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    serde_json::from_slice(&output.stdout).context("the attacker says nothing")
}

fn number(said: &Value, field: &str) -> f64 {
    said[field].as_f64().unwrap_or_default()
}

impl Stage<'_> {
    /// What an attacker does on a host, while honest programs go on.
    fn under(&mut self, host: &Host, words: &[&str], findings: &mut Findings) -> Result<Value> {
        let mut command = host.traffic(words)?;
        let output = std::thread::scope(|scope| -> Result<Output> {
            let attacking = scope.spawn(move || output_within(&mut command, LIMIT));
            while !attacking.is_finished() {
                self.honest(findings)?;
            }
            attacking.join().ok().context("a thread ended badly")?
        })?;
        understand(&output)
    }

    /// Honest connections, one after the other, by name.
    fn honest(&mut self, findings: &mut Findings) -> Result<()> {
        let options = ["--count", "25", "--pause-ms", "5", "--parallel", "2"];
        let outcome = server::attempt(self.client, &self.open, 7, &options)?;
        findings.figures.add("honest_tried", (outcome.ok + outcome.failed()) as f64);
        findings.figures.add("honest_failed", outcome.failed() as f64);
        if outcome.failed() > 0 {
            findings.note(format!("honest connections: {:?}", outcome.errors));
        }
        Ok(())
    }

    /// Connections of each kind that have ended since the last look: direct ones, and sealed ones. What ends a
    /// connection late has time for it.
    fn cut(&mut self, findings: &mut Findings) -> Result<[f64; 2]> {
        let before = [self.direct.open_count(), self.sealed.open_count()];
        // A flow whose end was seen lives for two seconds more.
        for _ in 0..3 {
            self.client.shell("sleep 1")?;
            self.honest(findings)?;
        }
        self.direct.round()?;
        self.sealed.round()?;
        let cut = [before[0] - self.direct.open_count(), before[1] - self.sealed.open_count()];
        if cut[0] > 0.0 {
            self.direct = open_direct(self.client, &self.open)?;
        }
        Ok(cut)
    }

    /// The outcome of an attack by one who is not on the path.
    fn report(&mut self, what: &str, said: &Value, accepted: f64, findings: &mut Findings) -> Result<()> {
        let [direct, sealed] = self.cut(findings)?;
        findings.note(format!("{what}: accepted {accepted}, cut {direct} direct and {sealed} sealed; {said}"));
        findings.figures.add("accepted", accepted);
        findings.figures.add("cut", direct + sealed);
        findings.figures.add("attacks", 1.0);
        Ok(())
    }

    /// The outcome of an attack on the path; direct connections are as open there as those of plain TCP.
    fn report_on_path(&mut self, what: &str, said: &Value, accepted: f64, findings: &mut Findings) -> Result<()> {
        let [direct, sealed] = self.cut(findings)?;
        findings.note(format!("{what}: accepted {accepted}, cut {direct} direct and {sealed} sealed; {said}"));
        findings.figures.add("accepted_on_path", accepted);
        findings.figures.add("cut_on_path", sealed);
        findings.figures.add("cut_direct_on_path", direct);
        findings.figures.add("attacks", 1.0);
        Ok(())
    }

    /// What passes between client and server while they talk (pcap).
    fn capture(&mut self, filter: &str, talk: impl FnOnce(&mut Self) -> Result<()>) -> Result<String> {
        let mut recorder = Recorder::start_of(self.lab.host("way")?, EAST, filter, CAPTURED)?;
        // What dumpcap has seen is in its file some moments later.
        talk(self)?;
        let mut before = EMPTY_CAPTURE;
        wait_for("a capture that is complete", SETTLE, || {
            self.client.shell("sleep 0.5")?;
            let length = std::fs::metadata(recorder.file())?.len();
            let is_complete = length == before && length > EMPTY_CAPTURE;
            before = length;
            if is_complete { Ok(()) } else { bail!("{length} bytes, and it grows") }
        })?;
        let file: PathBuf = recorder.finish()?;
        Ok(file.to_str().context("a path that is no text")?.to_owned())
    }
}

/// From the link, to virtual addresses and from them, both families; what reaches the server's stack is let in.
fn virtual_addresses(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let (server, near) = (stage.server, stage.lab.host("near")?);
    for (name, matching) in [
        ("virtual_to", "ip daddr 198.18.0.0/15"),
        ("virtual_from", "ip saddr 198.18.0.0/15"),
        ("virtual6_to", "ip6 daddr fd5a:4c00::/32"),
        ("virtual6_from", "ip6 saddr fd5a:4c00::/32"),
    ] {
        observe::count(server, name, Passing::In, &format!("{INSIDE} {matching}"))?;
    }
    for (host, address) in [(server, SERVER_V6), (near, "fd01::2")] {
        host.run(["ip", "-6", "address", "add", &format!("{address}/64"), "dev", "eth0", "nodad"])?;
    }
    near.run(["ip", "route", "add", "198.18.0.0/15", "via", &stage.at])?;
    near.run(["ip", "-6", "route", "add", "fd5a:4c00::/32", "via", SERVER_V6])?;
    near.run(["ip", "-6", "address", "add", "fd5a:4c00::77/128", "dev", "lo"])?;
    let (own, at) = (pair::address(near)?, stage.at.clone());
    let words = ["strike", "virtual", "--target", &at, "--strangers", &own, "--count", "20"];
    let said = stage.under(near, &words, findings)?;
    // Nobody answers; what matters is what arrives.
    for (to, from) in [("fd5a:4c00::1", "[::]:0"), (SERVER_V6, "[fd5a:4c00::77]:0")] {
        let options = ["--udp", "--count", "5", "--timeout-ms", "50", "--from", from];
        server::attempt(near, to, 9, &options)?;
    }
    let counts = observe::counts(server)?;
    let of = |name: &str| counts.get(name).copied().unwrap_or_default().packets;
    let rows = ["virtual_to", "virtual_from", "virtual6_to", "virtual6_from"].map(|name| (name, of(name)));
    let accepted = rows.iter().map(|(_, packets)| packets).sum();
    findings.note(format!("packets with virtual addresses that the server's stack got: {rows:?}"));
    stage.report("virtual addresses from the link", &said, accepted, findings)
}

/// A host that answers, with a key of its own, for a name that only the key in it may answer for. Who asks knows no
/// router, hence the whole segment is asked.
fn key_name(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let (near, loner) = (stage.lab.host("near")?, stage.lab.host("loner")?);
    agent::margay(loner, ["up"])?;
    let mut service: ServiceId = "web.elsewhere".parse::<Name>()?.service_id();
    service.0[12..].fill(0x5a);
    let name = service.to_string();
    let address = agent::virtual_addresses(loner, &name)?.0;
    let mut command = near.traffic(["strange", &name, "--time-ms", "6000"])?;
    let output = std::thread::scope(|scope| -> Result<Output> {
        let answering = scope.spawn(move || output_within(&mut command, LIMIT));
        while !answering.is_finished() {
            let options = ["--udp", "--count", "2", "--timeout-ms", "200", "--pause-ms", "50"];
            server::attempt(loner, &address, 9, &options)?;
        }
        answering.join().ok().context("a thread ended badly")?
    })?;
    let said = understand(&output)?;
    ensure!(number(&said, "answers") > 0.0, "the stranger was not asked: {said}");
    stage.report("an answer for a name that is another's key", &said, number(&said, "accepted"), findings)
}

/// Hosts that nobody knows, each with a port and a key of its own, at one address.
fn strangers(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let (server, near) = (stage.server, stage.lab.host("near")?);
    let known = || agent::metric(server, "margay_associations");
    let before = known()?;
    let to = format!("{}:{}", stage.at, margay_wire::PORT);
    let words = ["strange", OPEN, "--ask", &to, "--count", STRANGERS, "--time-ms", "10000"];
    let said = stage.under(near, &words, findings)?;
    ensure!(number(&said, "answered") > 0.0, "no stranger was answered: {said}");
    findings.set("strangers_kept", (known()? - before).max(0.0));
    stage.report("strangers that fill tables", &said, 0.0, findings)
}

fn of_flow_ports() -> String {
    format!("tcp portrange {FLOW_PORTS}-65535")
}

/// Endings with the right addresses and ports, and numbers at random.
fn blind_endings(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let capture = stage.capture(&of_flow_ports(), |stage| stage.direct.round())?;
    let far = stage.lab.host("far")?;
    let said = stage.under(far, &["strike", "endings", "--capture", &capture, "--count", "40"], findings)?;
    stage.report("endings with random numbers", &said, 0.0, findings)
}

/// The host on the path sees that kernels set up connections by themselves, and does so, too.
fn grants(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let way = stage.lab.host("way")?;
    let before = agent::taken(stage.client)?;
    let mut command = way.traffic(["strike", "grants", "--time-ms", "4000"])?;
    let mut per_s = 0.0_f64;
    let said = std::thread::scope(|scope| -> Result<Output> {
        let striking = scope.spawn(move || output_within(&mut command, LIMIT));
        while !striking.is_finished() {
            per_s = per_s.max(server::connects(stage.client, &stage.open, 2000, 16)?.per_s);
        }
        striking.join().ok().context("a thread ended badly")?
    })?;
    let said = understand(&said)?;
    let taken = agent::taken(stage.client)? - before;
    let (asked, given) = (
        agent::metric(stage.client, "margay_grants_asked_total")?,
        agent::metric(stage.server, "margay_grants_given_total")?,
    );
    findings.note(format!(
        "of {per_s:.0} connections a second, the client's kernel has set up {taken} by itself; {asked} grants asked \
         for, {given} given"
    ));
    findings.set("granted", taken);
    stage.report_on_path("others' grants", &said, number(&said, "accepted"), findings)
}

/// The host on the path sends signalling and sealed data again, as it was and changed, and for a while lets nothing
/// pass.
fn messages(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let (way, sealed) = (stage.lab.host("way")?, agent::virtual_addresses(stage.client, SEALED)?.0);
    let filter = format!("udp port 54324 and less 1514 and host {}", stage.vault_at);
    let capture = stage.capture(&filter, |stage| {
        server::attempt(stage.client, &sealed, 7, &["--count", "20"])?;
        (0..5).try_for_each(|_| stage.sealed.round())
    })?;
    let (at, client_at) = (stage.vault_at.clone(), stage.client_at.clone());
    let words = ["strike", "messages", "--capture", &capture, "--target", &at, "--peer", &client_at, "--count", "30"];
    let said = stage.under(way, &words, findings)?;
    filter::swallow(way)?;
    way.shell("sleep 2")?;
    filter::relent(way)?;
    stage.report_on_path("messages and sealed data", &said, 0.0, findings)
}

/// Segments to flow ports that no flow has, beside a transfer by name and one of plain TCP that take turns.
fn flood(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let far = stage.lab.host("far")?;
    let ends = (End::bind(stage.client, 0)?, End::bind(stage.server, 1)?);
    let _servers = ends.1.serve()?;
    agent::publish(stage.server, BULK, &format!("0.0.0.0:{}", turns::PORTS[1]), &[])?;
    agent::await_instances(stage.client, BULK, 1)?;
    let (named, plain) = (agent::virtual_addresses(stage.client, BULK)?.0, stage.at.clone());
    let words = ["strike", "flood", "--target", &plain, "--rate", FLOOD_PER_S, "--time-ms", FLOOD_MS];
    let mut command = far.traffic(words)?;
    let ways = Ways { client: ends.0, server: ends.1, addresses: [&plain, &named] };
    let (said, ratios) = std::thread::scope(|scope| -> Result<(Value, Ratios)> {
        let flooding = scope.spawn(move || attack(&mut command));
        let ratios = ways.compare(Load { streams: 1, reverse: false }, PACE, "under a flood of flow ports", findings);
        Ok((flooding.join().ok().context("a thread ended badly")??, ratios?))
    })?;
    findings.set("honest_ratio", ratios.throughput);
    findings.set("flood_per_s", number(&said, "per_s"));
    stage.report("a flood of flow ports", &said, 0.0, findings)
}

/// Endings by one who sees the numbers: they end direct connections as they end those of plain TCP, which are tried
/// beside.
fn exact_endings(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let mut plain = Held::open(stage.client, &stage.at, HELD)?;
    let capture = stage.capture(&format!("tcp port 7 or {}", of_flow_ports()), |stage| {
        plain.round()?;
        stage.direct.round()
    })?;
    let said = attack(&mut stage.lab.host("way")?.traffic(["strike", "exact", "--capture", &capture])?)?;
    stage.report_on_path("endings with the right numbers", &said, 0.0, findings)?;
    plain.round()?;
    findings.set("cut_plain_on_path", HELD as f64 - plain.open_count());
    Ok(())
}
