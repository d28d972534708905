//! `chain-boxes`: real boxes, unmodified: a packet filter that counts, drops and refuses, and translates addresses,
//! traffic control, capturing by libpcap, proxies; over TCP and UDP, one box and two in a row, and one in a network
//! namespace.

mod inner;
mod proxies;
mod rewriting;

use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::{PORT, Watch, ZONE, apply, await_reason, await_registered, build, chain, serve, watch};
use crate::agent::{self, Agents};
use crate::command::progress;
use crate::host::Host;
use crate::lab::Lab;
use crate::program::wait_for;
use crate::report::Limit::{Below, Exactly};
use crate::report::{Bound, bound};
use crate::scenario::{Findings, Scenario, pair};
use crate::server;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "chain-boxes",
    summary: "sessions pass nftables, iptables, tc, tcpdump, HAProxy, nginx and squid as they are",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 6] = [
    bound("boxes_wrong", Exactly(0.0)),
    bound("boxes_total", Exactly(21.0)),
    bound("headers_wrong", Exactly(0.0)),
    bound("tags_on_wire", Exactly(0.0)),
    bound("refused_ms_max", Below(2500.0)),
    bound("failed", Exactly(0.0)),
];

const TRIES: u64 = 20;
const BYTES: &str = "20000";
/// Virtual addresses that stand for names, as packets bear them.
const VIRTUAL: [&str; 2] = ["198.18.", "198.19."];

struct Stage<'a> {
    client: &'a Host,
    one: &'a Host,
    two: &'a Host,
    total: u64,
    wrong: u64,
    refused_ms: f64,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = build("chain-boxes", 2, &["inner"], dir)?;
    inner::prepare(lab.host("inner")?)?;
    let _agents = Agents::start(&lab)?;
    let router = lab.host("router")?;
    let server = lab.host("server")?;
    let one = lab.host("box1")?;
    let two = lab.host("box2")?;
    let _echo = server::echo(server, &["0.0.0.0:7".parse()?])?;
    let names = ["one.shop", "two.shop", "tap.shop", "nated.shop", "inside.shop", "ha.shop", "ng.shop"];
    for name in names {
        agent::publish(server, name, "0.0.0.0:7", &[])?;
    }
    let _web = server::Nginx::start(server, &["0.0.0.0:80"])?;
    agent::publish(server, "sq.shop", "0.0.0.0:80", &[])?;
    serve(one, "fw.shop", "forward", &[])?;
    serve(two, "shaper.shop", "forward", &["--check", "/bin/true"])?;
    let policy = [
        chain("one", "one.shop", &["fw.shop"], ""),
        chain("two", "two.shop", &["fw.shop", "shaper.shop"], ""),
        chain("tap", "tap.shop", &["ids.shop"], ""),
        chain("nated", "nated.shop", &["fw.shop", "nat.shop"], ""),
    ];
    let proxied = [("ha", "lb-ha.shop"), ("ng", "lb-ng.shop"), ("sq", "lb-sq.shop"), ("inside", "inner.shop")];
    let proxied = proxied.map(|(name, proxy)| {
        let more = format!("protocol = \"tcp\"\nproxies = [\"{proxy}\"]");
        chain(name, &format!("{name}.shop"), &["fw.shop", proxy], &more)
    });
    let policy = policy.into_iter().chain(proxied).collect::<String>();
    let hosts: Vec<&Host> = lab.hosts.iter().collect();
    apply(router, &policy, &hosts, &["one", "two", "tap", "nated", "ha", "ng", "sq", "inside"])?;
    let client = lab.host("client")?;
    let mut stage = Stage { client, one, two, total: 0, wrong: 0, refused_ms: 0.0 };
    filters(&mut stage, findings)?;
    refusals(&mut stage, findings)?;
    shaped(&mut stage, findings)?;
    captured(&lab, &mut stage, findings)?;
    rewriting::judge(&mut stage, findings)?;
    proxies::judge(&mut stage, findings)?;
    inner::judge(&mut stage, lab.host("inner")?, findings)?;
    findings.set("boxes_ok", (stage.total - stage.wrong) as f64);
    findings.set("boxes_total", stage.total as f64);
    findings.set("boxes_wrong", stage.wrong as f64);
    findings.set("refused_ms_max", stage.refused_ms);
    findings.figures.add("failed", 0.0);
    Ok(())
}

impl Stage<'_> {
    /// Sessions to a name all of whose bytes come back.
    fn pass(&self, name: &str, options: &[&str], findings: &mut Findings) -> Result<bool> {
        let words = ["--count", "20", "--bytes", BYTES];
        let words: Vec<&str> = if options.is_empty() { words.to_vec() } else { [&words[..2], options].concat() };
        let outcome = server::attempt(self.client, &format!("{name}.{ZONE}"), PORT, &words)?;
        if outcome.ok != TRIES {
            findings.note(format!("to {name}: {:?}", outcome.errors));
            findings.figures.add("failed", outcome.failed() as f64);
        }
        Ok(outcome.ok == TRIES)
    }

    /// Whether sessions to a name are refused, by an error that names a box.
    fn are_refused(&mut self, name: &str, watch: &Watch, reason: &str) -> Result<bool> {
        let outcome = server::attempt(self.client, &format!("{name}.{ZONE}"), PORT, &["--count", "2"])?;
        self.refused_ms = outcome.error_ms.iter().copied().fold(self.refused_ms, f64::max);
        await_reason(watch, reason)?;
        Ok(outcome.ok == 0)
    }

    fn judge(&mut self, what: &str, is_right: bool, findings: &mut Findings) {
        self.total += 1;
        progress(&format!("{what}: {}", if is_right { "as it should be" } else { "wrong" }));
        if !is_right {
            self.wrong += 1;
            findings.note(format!("{what} is not as it should be"));
        }
    }
}

/// Packets that a rule of the box has counted.
fn counted(host: &Host, name: &str) -> Result<f64> {
    let text = host.run(["nft", "-j", "list", "counter", "inet", "fw", name])?;
    let answer: serde_json::Value = serde_json::from_str(&text)?;
    let entries = answer["nftables"].as_array().cloned().unwrap_or_default();
    let found = entries.iter().find_map(|entry| entry["counter"]["packets"].as_f64());
    found.with_context(|| format!("there is no counter {name}: {text}"))
}

/// Connection tracking and a rule for each protocol; iptables where the machine has it. Datagrams are counted whatever
/// connection tracking takes them for: a socket may get the port that an earlier one had.
fn filters(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let one = stage.one;
    one.shell(
        "nft 'add table inet fw; add counter inet fw tcp_seen; add counter inet fw udp_seen; add counter inet fw other;
              add chain inet fw forward { type filter hook forward priority filter; policy drop; };
              add rule inet fw forward udp dport 7 counter name udp_seen;
              add rule inet fw forward ct state established,related accept;
              add rule inet fw forward iifname sal0 oifname sal0 tcp dport 7 ct state new counter name tcp_seen accept;
              add rule inet fw forward iifname sal0 oifname sal0 udp dport 7 ct state new accept;
              add rule inet fw forward counter name other'",
    )?;
    let passed = stage.pass("one.shop", &[], findings)?;
    let seen = counted(one, "tcp_seen")?;
    stage.judge("nftables, TCP", passed && seen >= TRIES as f64, findings);
    let passed = stage.pass("one.shop", &["--udp"], findings)?;
    let seen = counted(one, "udp_seen")?;
    stage.judge("nftables, UDP", passed && seen >= TRIES as f64, findings);
    let before = counted(one, "tcp_seen")?;
    let passed = stage.pass("two.shop", &[], findings)?;
    let seen = counted(one, "tcp_seen")? - before;
    stage.judge("two boxes in a row", passed && seen >= TRIES as f64 && counted(one, "other")? == 0.0, findings);
    one.run(["nft", "delete table inet fw"])?;
    one.shell("iptables -P FORWARD DROP; iptables -A FORWARD -i sal0 -o sal0 -p tcp -j ACCEPT")?;
    let passed = stage.pass("one.shop", &[], findings)?;
    let shown = one.run(["iptables", "-nvxL", "FORWARD"])?;
    let is_seen = shown.lines().any(|line| {
        let packets = line.split_whitespace().next().and_then(|word| word.parse::<f64>().ok());
        line.contains("ACCEPT") && packets.is_some_and(|packets| packets >= TRIES as f64)
    });
    stage.judge("iptables", passed && is_seen, findings);
    one.shell("iptables -F FORWARD; iptables -P FORWARD ACCEPT").map(drop)
}

/// What a filter drops is refused within two seconds, what it refuses at once; the error has the box's name.
fn refusals(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    for (what, verdict, reason) in [
        ("a filter that drops", "drop", "box fw.shop of the chain has not let"),
        ("a filter that refuses", "reject with tcp reset", "box fw.shop of the chain refuses"),
    ] {
        stage.one.shell(&format!(
            "nft 'add table inet fw; add chain inet fw forward {{ type filter hook forward priority filter; }};
                  add rule inet fw forward tcp dport 7 {verdict}'"
        ))?;
        let watching = watch(stage.client)?;
        let is_right = stage.are_refused("one.shop", &watching, reason)?;
        stage.judge(what, is_right, findings);
        stage.one.run(["nft", "delete table inet fw"])?;
    }
    let is_well = stage.pass("one.shop", &[], findings)?;
    ensure!(is_well, "sessions do not pass although the filter is gone");
    Ok(())
}

/// Traffic control at the interface that sessions leave the box's kernel by. The kernel's flow cache takes packets
/// before that queue.
fn shaped(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    agent::cache(stage.two, "unload")?;
    stage.two.run([
        "tc", "qdisc", "replace", "dev", "sal0", "root", "tbf", "rate", "40mbit", "burst", "64k", "latency", "400ms",
    ])?;
    let passed = stage.pass("two.shop", &[], findings)?;
    let shown = stage.two.run(["tc", "-s", "qdisc", "show", "dev", "sal0"])?;
    let sent = shown.split_whitespace().skip_while(|word| *word != "Sent").nth(1);
    let sent: f64 = sent.and_then(|word| word.parse().ok()).with_context(|| format!("tc says: {shown}"))?;
    stage.two.run(["tc", "qdisc", "del", "dev", "sal0", "root"])?;
    agent::cache(stage.two, "load")?;
    // Each byte passes the box there and back.
    let wanted = 2.0 * TRIES as f64 * BYTES.parse::<f64>()?;
    stage.judge("tc", passed && sent >= wanted, findings);
    Ok(())
}

/// A program that listens in is the box itself: while it runs, the name is served. Packets bear the session's header.
fn captured(lab: &Lab, stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let two = lab.host("box2")?;
    let margay = super::agent_program()?;
    let words = [
        margay.as_str(),
        "run",
        "--middlebox",
        "ids.shop",
        "--kind",
        "sniff",
        "--",
        "tcpdump",
        "-n",
        "-l",
        "-i",
        "sal0",
        "tcp port 7 and tcp[tcpflags] & (tcp-syn|tcp-ack) == tcp-syn",
    ];
    let mut sniffer = two.spawn("tcpdump", words)?;
    await_registered(two, "ids.shop")?;
    wait_for("tcpdump", agent::READY_LIMIT, || {
        ensure!(sniffer.log().contains("listening on sal0"), "it says: {}", sniffer.log());
        Ok(())
    })?;
    let passed = stage.pass("tap.shop", &[], findings)?;
    // Each SYN comes into the box and leaves it.
    let heard = wait_for("the SYNs", agent::READY_LIMIT, || {
        let log = sniffer.log();
        let heard: Vec<String> = log.lines().filter(|line| line.contains(" > ")).map(str::to_owned).collect();
        ensure!(heard.len() as u64 >= 2 * TRIES, "{} of them", heard.len());
        Ok(heard)
    })?;
    let client = pair::address(stage.client)?;
    let is_right = |line: &String| {
        let mut ends = line.split(" > ");
        let is_client = ends.next().is_some_and(|source| source.contains(&format!(" {client}.")));
        let to = ends.next().unwrap_or_default();
        is_client && VIRTUAL.iter().any(|begin| to.starts_with(begin)) && to.contains(".7:")
    };
    let wrong: Vec<&String> = heard.iter().filter(|line| !is_right(line)).collect();
    if let Some(first) = wrong.first() {
        findings.note(format!("a packet has another header than its session's: {first}"));
    }
    findings.set("headers_wrong", wrong.len() as f64);
    stage.judge("tcpdump", passed, findings);
    sniffer.stop();
    wait_for("the end of ids.shop", agent::READY_LIMIT, || {
        let found = agent::resolve(stage.client, "ids.shop")?["instances"].as_array().map_or(0, Vec::len);
        ensure!(found == 0, "{found} instances are listed");
        Ok(())
    })
}
