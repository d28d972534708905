//! What gateways do to packets: masquerading and stateful filtering, by nftables; and the trouble that they make in the
//! middle of a scenario.

use std::net::IpAddr;

use anyhow::Result;

use crate::host::Host;
use crate::moment::{Change, Moment};

/// Installs the rules of a gateway, as its plan says.
///
/// # Errors
///
/// `nft` refuses.
pub fn install(host: &Host) -> Result<()> {
    let interface = |subnet: usize| host.plan.links.iter().position(|link| link.subnet == subnet);
    let mut rules = Vec::new();
    if let Some(outer) = host.plan.nat.and_then(interface) {
        rules.push("add table inet lab_nat".to_owned());
        rules.push("add chain inet lab_nat post { type nat hook postrouting priority srcnat; }".into());
        rules.push(format!("add rule inet lab_nat post meta nfproto ipv4 oifname eth{outer} masquerade"));
        // Of IPv6 it translates nothing, but filters it. It knows nobody behind it whom it was not asked for.
        rules.push("add chain inet lab_nat forward { type filter hook forward priority filter; }".into());
        rules.push(format!("add rule inet lab_nat forward iifname eth{outer} ct state established,related accept"));
        rules.push(format!("add rule inet lab_nat forward iifname eth{outer} drop"));
        // Nor does it talk to strangers itself: a packet that it took in would hold the ports that its answer would
        // have, and somebody behind it who writes there later would get others.
        rules.push("add chain inet lab_nat input { type filter hook input priority filter; }".into());
        rules.push(format!(
            "add rule inet lab_nat input iifname eth{outer} meta l4proto {{ tcp, udp }} ct state new drop"
        ));
    }
    if let Some(outer) = host.plan.firewall.and_then(interface) {
        rules.push("add table inet lab_firewall".to_owned());
        rules.push("add chain inet lab_firewall forward { type filter hook forward priority filter; }".into());
        rules.push("add rule inet lab_firewall forward ct state invalid drop".into());
        rules
            .push(format!("add rule inet lab_firewall forward iifname eth{outer} ct state established,related accept"));
        rules.push(format!("add rule inet lab_firewall forward iifname eth{outer} drop"));
    }
    if rules.is_empty() {
        return Ok(());
    }
    host.run(["nft".to_owned(), rules.join("; ")]).map(drop)
}

/// What [`bury`] needs at a gateway; as often as one likes.
const GONE: &str = "
    add table inet lab_gone
    add set inet lab_gone v4 { type ipv4_addr; }
    add set inet lab_gone v6 { type ipv6_addr; }
    add chain inet lab_gone forward { type filter hook forward priority -20; }
    flush chain inet lab_gone forward
    add rule inet lab_gone forward ip saddr @v4 drop
    add rule inet lab_gone forward ip daddr @v4 drop
    add rule inet lab_gone forward ip6 saddr @v6 drop
    add rule inet lab_gone forward ip6 daddr @v6 drop
";

/// Lets a gateway forward nothing from or to addresses that are `gone`, and from and to those that are `here`, again. A
/// gateway that remembers whose address it was would bring packets there for as long as it does, and in a real network
/// the old address is that of another place.
///
/// # Errors
///
/// `nft` refuses.
pub fn bury(gateway: &Host, gone: &[IpAddr], here: &[IpAddr]) -> Result<Change> {
    gateway.run(["nft", GONE])?;
    let element = |word: &str, address: &IpAddr| {
        let set = if address.is_ipv4() { "v4" } else { "v6" };
        format!("{word} element inet lab_gone {set} {{ {address} }}")
    };
    // What is not there cannot be deleted, and what is there can be added.
    let backs = here.iter().flat_map(|address| [element("add", address), element("delete", address)]);
    let lines: Vec<String> = gone.iter().map(|address| element("add", address)).chain(backs).collect();
    Change::start(gateway, "", &format!("nft '{}'", lines.join("; ")))
}

/// The rules of trouble, which replace those before.
fn trouble(gateway: &Host, rule: &str) -> Result<Moment> {
    let first = "nft 'add table inet lab_trouble'";
    let act = format!(
        "nft 'flush table inet lab_trouble; add chain inet lab_trouble forward {{ type filter hook forward priority \
         -10; }}; {rule}'"
    );
    Change::start(gateway, first, &act)?.finish()
}

/// From now on a gateway forwards nothing, and says nothing about it.
///
/// # Errors
///
/// `nft` refuses.
pub fn swallow(gateway: &Host) -> Result<Moment> {
    trouble(gateway, "add rule inet lab_trouble forward drop")
}

/// From now on a gateway forwards nothing to what is beyond one of its links, and nothing from there.
///
/// # Errors
///
/// `nft` refuses.
pub fn isolate(gateway: &Host, link: usize) -> Result<Moment> {
    let rule = |way: &str| format!("add rule inet lab_trouble forward {way} eth{link} drop");
    trouble(gateway, &format!("{}; {}", rule("iifname"), rule("oifname")))
}

/// From now on a gateway forwards by IPv4 what agents say to each other, and no data of flows: neither direct nor DATA.
///
/// # Errors
///
/// `nft` refuses.
pub fn deafen(gateway: &Host) -> Result<Moment> {
    let rule = |matching: &str| format!("add rule inet lab_trouble forward meta nfproto ipv4 {matching} drop");
    // The second byte of a datagram is its type, and 32 is DATA.
    let rules = ["tcp dport >= 61000 tcp sport >= 61000", "udp dport 54324 @th,72,8 32"].map(rule);
    trouble(gateway, &rules.join("; "))
}

/// From now on a gateway loses so many of a hundred packets, in each direction.
///
/// # Errors
///
/// `nft` refuses.
pub fn lose(gateway: &Host, percent: u32) -> Result<Moment> {
    trouble(gateway, &format!("add rule inet lab_trouble forward numgen random mod 100 < {percent} drop"))
}

/// A gateway forwards all again.
///
/// # Errors
///
/// `nft` refuses.
pub fn relent(gateway: &Host) -> Result<Moment> {
    trouble(gateway, "")
}
