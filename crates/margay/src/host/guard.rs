//! Where the kernel takes no eBPF programs, nftables drops what comes by a card with a virtual address, and what
//! would leave by one (DESIGN §18). Where it does take them they do it: a packet that they have rewritten at the card
//! bears virtual addresses from there on.

use std::io::{self, Write};
use std::net::IpAddr;
use std::process::{Command, Stdio};

use margay_core::chain::{FORWARDED_HOP_LIMIT, OUTSIDE_HOP_LIMIT};
use serde::{Deserialize, Serialize};

use super::change::State;
use super::netlink::Block;
use crate::agent::{INTERFACE, OWN_INTERFACES};

/// The table, which is nobody else's.
pub const TABLE: &str = "inet margay";
/// Its counters, as the metrics of the programs call theirs.
const COUNTERS: [&str; 2] = ["drop_virtual_ingress", "drop_virtual_egress"];

/// What bears the tag of a box (docs/decisions/0077): the TCP option 253 of 8 bytes.
const TAGGED: &str = "tcp option @253,0,16 64776";

/// Who may send to virtual addresses, and be answered from them, at an interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opening {
    /// Its name.
    pub interface: String,
    /// Addresses.
    pub prefixes: Vec<Block>,
}

impl std::fmt::Display for Opening {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let prefixes: Vec<_> = self.prefixes.iter().map(Block::to_string).collect();
        write!(
            f,
            "{} ({})",
            self.interface,
            if prefixes.is_empty() { "no address".into() } else { prefixes.join(", ") }
        )
    }
}

/// The rules of either chain, as nftables itself writes them: what comes, and what leaves.
fn rules(openings: &[Opening], networks: [Block; 2], drops_tags: bool) -> [Vec<String>; 2] {
    let own = OWN_INTERFACES.map(|name| format!("\"{name}\""));
    let [v4, v6] = networks;
    let word = |family: &IpAddr| if family.is_ipv4() { ("ip", v4) } else { ("ip6", v6) };
    let mut chains = [("iifname", "saddr", "daddr"), ("oifname", "daddr", "saddr")].map(|(at, outside, inside)| {
        let mut rules = vec![format!("{at} {{ \"lo\", {} }} accept", own.join(", "))];
        for Opening { interface, prefixes } in openings {
            rules.extend(prefixes.iter().map(|prefix| {
                let (ip, network) = word(&prefix.address);
                let prefix = literal(prefix);
                format!("{at} \"{interface}\" {ip} {outside} {prefix} {ip} {inside} {} accept", literal(&network))
            }));
        }
        rules
    });
    // Before the rules that accept.
    chains[1].splice(..0, marks(drops_tags));
    if drops_tags {
        chains[1].push(format!("{TAGGED} counter name \"{}\" drop", COUNTERS[1]));
    }
    for (chain, counter) in chains.iter_mut().zip(COUNTERS) {
        for (ip, network) in [("ip", v4), ("ip6", v6)] {
            for side in ["saddr", "daddr"] {
                chain.push(format!("{ip} {side} {} counter name \"{counter}\" drop", literal(&network)));
            }
        }
    }
    chains
}

/// Marks what comes to `sal0` from outside of this host, and where there are middleboxes what was forwarded, as opposed
/// to what programs of this host send.
fn marks(has_boxes: bool) -> Vec<String> {
    let (forwarded, outside, taken) = (FORWARDED_HOP_LIMIT, OUTSIDE_HOP_LIMIT, OUTSIDE_HOP_LIMIT - 1);
    let to = format!("oifname \"{INTERFACE}\"");
    let of_family = |(ip, field): (&str, &str)| {
        let set = |value: u8| format!("{ip} {field} set {value}");
        // What comes by no interface is this host's.
        let mut rules = vec![
            format!("{to} {ip} {field} {outside}-{forwarded} {}", set(taken)),
            format!("{to} iif != 0 {}", set(outside)),
        ];
        if has_boxes {
            rules.push(format!("{to} iifname \"{INTERFACE}\" {}", set(forwarded)));
            // A RST that is no socket's is the kernel's, which refuses a connection for a middlebox.
            rules.push(format!("{to} iif 0 tcp flags rst {}", set(forwarded)));
            rules.push(format!("{to} iif 0 meta skuid >= 0 {ip} {field} {forwarded} {}", set(taken)));
        }
        rules
    };
    [("ip", "ttl"), ("ip6", "hoplimit")].map(of_family).concat()
}

/// A whole address goes without its length.
fn literal(block: &Block) -> String {
    let whole = if block.address.is_ipv4() { 32 } else { 128 };
    if block.bits == whole { block.address.to_string() } else { format!("{}/{}", block.address, block.bits) }
}

fn script(openings: &[Opening], networks: [Block; 2], drops_tags: bool) -> String {
    let [arriving, leaving] = rules(openings, networks, drops_tags).map(|rules| rules.join("\n\t\t"));
    let counters = COUNTERS.map(|name| format!("\tcounter {name} {{ }}\n")).concat();
    // Before all that changes addresses or makes exceptions, and after it: what counts is what is on the link.
    let chains = "\tchain arriving { type filter hook prerouting priority -310; policy accept; }\n\
                  \tchain leaving { type filter hook postrouting priority 310; policy accept; }\n";
    format!(
        "table {TABLE} {{\n{counters}{chains}}}\nflush chain {TABLE} arriving\nflush chain {TABLE} leaving\n\
         table {TABLE} {{\n\tchain arriving {{\n\t\t{arriving}\n\t}}\n\tchain leaving {{\n\t\t{leaving}\n\t}}\n}}\n"
    )
}

fn nft(arguments: &[&str], input: &str) -> io::Result<Result<String, String>> {
    let missing = |error: io::Error| {
        io::Error::new(error.kind(), format!("nft cannot be run ({error}); it comes with the package nftables"))
    };
    let pipes = || Stdio::piped();
    let mut command = Command::new("nft");
    let mut nft = command.args(arguments).stdin(pipes()).stdout(pipes()).stderr(pipes()).spawn().map_err(missing)?;
    if let Some(mut stdin) = nft.stdin.take() {
        // It may have ended already, and says why.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = nft.wait_with_output()?;
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).trim().to_owned();
    Ok(if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) })
}

fn is_rule(line: &str) -> bool {
    ["iifname ", "oifname ", "ip ", "ip6 ", "tcp "].iter().any(|begin| line.starts_with(begin))
}

/// Whether the table is there, with the rules about these networks of virtual addresses.
pub fn state(openings: &[Opening], networks: [Block; 2], drops_tags: bool) -> io::Result<State> {
    let Ok(listed) = nft(&["list", "table", "inet", "margay"], "")? else { return Ok(State::Absent) };
    let found = listed.lines().map(str::trim).filter(|line| is_rule(line));
    let is_same = found.eq(rules(openings, networks, drops_tags).concat().iter().map(String::as_str));
    Ok(if is_same { State::Present } else { State::Differs(format!("other rules in the table {TABLE}")) })
}

/// Puts the table there in one step; counters go on.
pub fn apply(openings: &[Opening], networks: [Block; 2], drops_tags: bool) -> io::Result<()> {
    nft(&["-f", "-"], &script(openings, networks, drops_tags))?
        .map(drop)
        .map_err(|said| io::Error::other(format!("nft: {said}")))
}

/// Takes it away.
pub fn undo() -> io::Result<()> {
    // Gone already is well.
    if nft(&["list", "table", "inet", "margay"], "")?.is_err() {
        return Ok(());
    }
    nft(&["delete", "table", "inet", "margay"], "")?.map(drop).map_err(|said| io::Error::other(format!("nft: {said}")))
}

/// What it has dropped, by the names of the counters; nothing where there is no table.
pub fn dropped() -> Vec<(&'static str, u64)> {
    let packets = |name: &str| {
        let said = nft(&["list", "counter", "inet", "margay", name], "").ok()?.ok()?;
        let mut words = said.split_whitespace().skip_while(|word| *word != "packets");
        words.nth(1)?.parse().ok()
    };
    COUNTERS.iter().filter_map(|name| Some((*name, packets(name)?))).collect()
}

#[cfg(test)]
mod test {
    use margay_core::Ranges;

    use super::super::plan::networks;
    use super::*;

    #[test]
    fn an_opening_lets_its_own_prefix_in_and_answers_to_it_out() {
        let block = |text: &str, bits| Block { address: text.parse().expect("literal"), bits };
        let prefixes = vec![block("172.17.0.0", 16), block("fd17::7", 128)];
        let openings = [Opening { interface: "docker0".into(), prefixes }];
        let [arriving, leaving] = rules(&openings, networks(Ranges::USUAL), false);
        assert_eq!(
            arriving[..4],
            [
                "iifname { \"lo\", \"sal0\", \"sal-dns\" } accept",
                "iifname \"docker0\" ip saddr 172.17.0.0/16 ip daddr 198.18.0.0/15 accept",
                "iifname \"docker0\" ip6 saddr fd17::7 ip6 daddr fd5a:4c00::/32 accept",
                "ip saddr 198.18.0.0/15 counter name \"drop_virtual_ingress\" drop",
            ]
        );
        assert_eq!(
            leaving[..4],
            [
                "oifname \"sal0\" ip ttl 253-254 ip ttl set 252",
                "oifname \"sal0\" iif != 0 ip ttl set 253",
                "oifname \"sal0\" ip6 hoplimit 253-254 ip6 hoplimit set 252",
                "oifname \"sal0\" iif != 0 ip6 hoplimit set 253",
            ]
        );
        assert_eq!(leaving[5], "oifname \"docker0\" ip daddr 172.17.0.0/16 ip saddr 198.18.0.0/15 accept");
        assert_eq!((arriving.len(), leaving.len()), (7, 11));
        let [_, with_boxes] = rules(&openings, networks(Ranges::USUAL), true);
        assert_eq!(
            with_boxes[..6],
            [
                "oifname \"sal0\" ip ttl 253-254 ip ttl set 252",
                "oifname \"sal0\" iif != 0 ip ttl set 253",
                "oifname \"sal0\" iifname \"sal0\" ip ttl set 254",
                "oifname \"sal0\" iif 0 tcp flags rst ip ttl set 254",
                "oifname \"sal0\" iif 0 meta skuid >= 0 ip ttl 254 ip ttl set 252",
                "oifname \"sal0\" ip6 hoplimit 253-254 ip6 hoplimit set 252",
            ]
        );
        assert_eq!(with_boxes[13], "tcp option @253,0,16 64776 counter name \"drop_virtual_egress\" drop");
        assert!(with_boxes.iter().all(|rule| is_rule(rule)));
    }
}
