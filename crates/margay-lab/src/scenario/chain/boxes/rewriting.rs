//! Boxes that change addresses: source and destination translation by nftables and by iptables, over TCP and UDP; those
//! that have not said that they do so; and those that would send sessions out of a card.

use anyhow::{Result, ensure};

use super::super::{await_registered, serve, watch};
use super::{Stage, TRIES};
use crate::agent::{self, READY_LIMIT, margay};
use crate::host::Host;
use crate::program::{Program, wait_for};
use crate::scenario::{Findings, pair};

/// A SYN whose first option is a box's tag.
const TAGGED: &str = "tcp[tcpflags] & tcp-syn != 0 and tcp[20:4] = 0xfd084d47";

/// Lines that tcpdump writes of tagged SYNs at an interface.
struct Tags {
    program: Program,
}

impl Tags {
    fn watch(host: &Host, interface: &str) -> Result<Self> {
        let log = format!("tags-{interface}");
        let mut program = host.spawn(&log, ["tcpdump", "-n", "-l", "--immediate-mode", "-i", interface, TAGGED])?;
        wait_for("tcpdump", READY_LIMIT, || {
            ensure!(program.ended()?.is_none(), "it has ended: {}", program.log());
            ensure!(program.log().contains("listening on"), "it says: {}", program.log());
            Ok(())
        })?;
        Ok(Self { program })
    }

    fn count(&self) -> u64 {
        self.program.log().lines().filter(|line| line.contains(" > ")).count() as u64
    }
}

/// A translation: what sets it up, what takes it away, and what shows that it was used.
struct Translation {
    what: &'static str,
    begin: String,
    end: &'static str,
    is_udp: bool,
}

/// Hooks of nftables.
const SOURCE: &str = "postrouting priority srcnat";
const DESTINATION: &str = "prerouting priority dstnat";
const NFT_END: &str = "nft delete table ip translation";

/// A command that adds one rule of translation to nftables.
fn nft(hook: &str, rule: &str) -> String {
    format!(
        "nft 'add table ip translation
              add chain ip translation box {{ type nat hook {hook}; }}
              add rule ip translation box iifname sal0 {rule}'"
    )
}

fn by_nftables(what: &'static str, is_udp: bool, hook: &str, rule: &str) -> Translation {
    Translation { what, begin: nft(hook, rule), end: NFT_END, is_udp }
}

fn translations() -> [Translation; 6] {
    [
        by_nftables("nftables SNAT, TCP", false, SOURCE, "oifname sal0 counter snat to 203.0.113.9"),
        by_nftables("nftables masquerading, UDP", true, SOURCE, "oifname sal0 counter masquerade"),
        by_nftables("nftables DNAT, TCP", false, DESTINATION, "tcp dport 7 counter dnat to :8007"),
        by_nftables("nftables DNAT, UDP", true, DESTINATION, "udp dport 7 counter dnat to :8007"),
        Translation {
            what: "iptables SNAT",
            begin: "iptables -t nat -A POSTROUTING -o sal0 -p tcp --dport 7 -j SNAT --to-source 203.0.113.10".into(),
            end: "iptables -t nat -F POSTROUTING",
            is_udp: false,
        },
        Translation {
            what: "iptables DNAT",
            begin: "iptables -t nat -A PREROUTING -i sal0 -p tcp --dport 7 -j DNAT --to-destination :9007".into(),
            end: "iptables -t nat -F PREROUTING",
            is_udp: false,
        },
    ]
}

/// All of them on the second box's host, which serves `nat.shop`.
pub(super) fn judge(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let two = stage.two;
    margay(two, ["middlebox", "serve", "nat.shop", "--kind", "rewrite"])?;
    await_registered(two, "nat.shop")?;
    let inside = Tags::watch(two, "sal0")?;
    let outside = Tags::watch(two, "eth0")?;
    for translation in translations() {
        two.shell(&translation.begin)?;
        let options: &[&str] = if translation.is_udp { &["--udp"] } else { &[] };
        let passed = stage.pass("nated.shop", options, findings)?;
        let is_used = translated(two)?;
        two.shell(translation.end)?;
        stage.judge(translation.what, passed && is_used, findings);
    }
    let passed = stage.pass("nated.shop", &[], findings)?;
    stage.judge("a box that may change addresses and does not", passed, findings);
    out_of_the_card(stage, findings)?;
    // Each session's SYN comes and goes by sal0 with its tag.
    let seen = inside.count();
    ensure!(seen >= 2 * TRIES, "tcpdump has seen {seen} tagged SYNs at sal0, and would have seen none at the card");
    findings.set("tags_on_wire", outside.count() as f64);
    unannounced(stage, findings)
}

/// Whether a rule of the box's tables has changed a packet.
fn translated(host: &Host) -> Result<bool> {
    let shown = host.shell(
        "nft list table ip translation 2>/dev/null | grep -o 'packets [0-9]*' || true
         iptables -t nat -nvxL | awk '/NAT/ {print \"packets\", $1}'",
    )?;
    let counts = shown.lines().filter_map(|line| line.strip_prefix("packets ")?.trim().parse::<u64>().ok());
    Ok(counts.max().unwrap_or_default() > 0)
}

/// What would leave by a card is refused, and leaves by none.
fn out_of_the_card(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let two = stage.two;
    let metric = "margay_kernel_drop_virtual_egress_total";
    let before = agent::metric(two, metric)?;
    let elsewhere = pair::address(stage.one)?;
    two.shell(&nft(DESTINATION, &format!("tcp dport 7 dnat to {elsewhere}")))?;
    let watching = watch(stage.client)?;
    let is_refused = stage.are_refused("nated.shop", &watching, "box nat.shop of the chain has not let")?;
    two.shell(NFT_END)?;
    let is_counted = agent::metric(two, metric)? > before;
    stage.judge("DNAT to another host's address", is_refused && is_counted, findings);
    Ok(())
}

/// A box that is served as one that forwards, and changes addresses.
fn unannounced(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let two = stage.two;
    serve(two, "nat.shop", "forward", &[])?;
    two.shell(&nft(SOURCE, "oifname sal0 counter snat to 203.0.113.9"))?;
    let watching = watch(stage.client)?;
    let is_right = stage.are_refused("nated.shop", &watching, "box nat.shop of the chain has changed")?;
    two.shell(NFT_END)?;
    stage.judge("SNAT of a box that is to forward", is_right, findings);
    let passed = stage.pass("nated.shop", &[], findings)?;
    ensure!(passed, "sessions do not pass although nothing is translated");
    agent::withdraw(two, "nat.shop")
}
