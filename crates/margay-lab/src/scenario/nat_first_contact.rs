//! `nat-first-contact`: every connection of this scenario is the first between two hosts. The clients are behind a NAT
//! or behind a stateful firewall, which let in nobody whom they were not asked for: the first answer must come by the
//! router.

use std::path::Path;

use anyhow::Result;

use super::{Findings, Scenario};
use crate::agent::{self, Agents};
use crate::lab::Lab;
use crate::observe::{self, Passing};
use crate::program::Program;
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::server;
use crate::topology::Topology;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "nat-first-contact",
    summary: "100 first contacts of clients behind a NAT and behind a stateful firewall",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 3] =
    [bound("failed", Exactly(0.0)), bound("contacts", Exactly(100.0)), bound("dropped_strangers", AtLeast(1.0))];

/// Clients behind each of the two gateways.
const CLIENTS: usize = 5;
const SERVERS: usize = 10;

fn topology() -> Result<Topology> {
    let mut text = r#"
        [subnet.core]
        v4 = "10.1.0.0/24"
        [subnet.home]
        v4 = "192.168.1.0/24"
        [subnet.office]
        v4 = "10.3.0.0/24"
        [host.router]
        role = "router"
        links = [{ subnet = "core" }]
        [host.nat]
        role = "gateway"
        nat = "core"
        links = [{ subnet = "core" }, { subnet = "home" }]
        [host.wall]
        role = "gateway"
        firewall = "core"
        links = [{ subnet = "core" }, { subnet = "office" }]
    "#
    .to_owned();
    let mut host = |name: String, subnet: &str| {
        text.push_str(&format!("[host.{name}]\nrole = \"agent\"\nlinks = [{{ subnet = \"{subnet}\" }}]\n"));
    };
    (0..SERVERS).for_each(|number| host(format!("server{number}"), "core"));
    (0..CLIENTS).for_each(|number| host(format!("home{number}"), "home"));
    (0..CLIENTS).for_each(|number| host(format!("office{number}"), "office"));
    Ok(Topology::parse("nat-first-contact", &text)?)
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(topology()?, dir)?;
    let _agents = Agents::start(&lab)?;
    let mut echoes: Vec<Program> = Vec::new();
    for number in 0..SERVERS {
        let server = lab.host(&format!("server{number}"))?;
        echoes.push(server::echo(server, &["0.0.0.0:7".parse()?])?);
        agent::publish(server, &format!("echo{number}.shop"), "0.0.0.0:7", &[])?;
    }
    let known_before = associations(&lab)?;
    // What a gateway refuses: packets to the SAL port from hosts that were not written to from behind it.
    let nat = lab.host("nat")?;
    let wall = lab.host("wall")?;
    for gateway in [nat, wall] {
        observe::count(gateway, "strangers", Passing::In, "iifname eth0 udp dport 54324 ct state new")?;
    }
    let (mut contacts, mut failed, mut slowest_ms) = (0.0, 0.0, 0.0_f64);
    for number in 0..SERVERS {
        let name = format!("echo{number}.shop.sal.internal");
        for (place, client) in ["home", "office"].into_iter().flat_map(|at| (0..CLIENTS).map(move |n| (at, n))) {
            let host = lab.host(&format!("{place}{client}"))?;
            // Half of them with datagrams, which have no retransmission of their own.
            let udp = (number + client) % 2 == 0;
            let options: &[&str] = if udp { &["--count", "1", "--udp"] } else { &["--count", "1"] };
            let outcome = server::attempt(host, &name, 7, options)?;
            contacts += 1.0;
            failed += outcome.failed() as f64;
            slowest_ms = outcome.ok_ms.iter().copied().fold(slowest_ms, f64::max);
            for reason in outcome.errors.keys() {
                let what = if udp { "UDP" } else { "TCP" };
                findings.note(format!("{what} from {} to {name}: {reason}", host.name()));
            }
        }
    }
    let mut strangers = 0.0;
    for gateway in [nat, wall] {
        strangers += observe::counts(gateway)?.get("strangers").copied().unwrap_or_default().packets;
    }
    findings.set("contacts", contacts);
    findings.set("dropped_strangers", strangers);
    findings.set("slowest_ms", slowest_ms);
    findings.figures.add("failed", failed);
    for ((name, before), (_, after)) in known_before.into_iter().zip(associations(&lab)?) {
        if after != before + SERVERS as u64 {
            findings.note(format!(
                "{name} has met {} hosts in {SERVERS} contacts: not all were first ones",
                after.saturating_sub(before)
            ));
            findings.figures.add("failed", 1.0);
        }
    }
    Ok(())
}

/// How many hosts each client shares keys with: one more after each first contact.
fn associations(lab: &Lab) -> Result<Vec<(String, u64)>> {
    let clients = lab.hosts.iter().filter(|host| host.name().starts_with("home") || host.name().starts_with("office"));
    clients
        .map(|host| {
            let known = agent::status(host)?["associations"].as_u64().unwrap_or_default();
            Ok((host.name().to_owned(), known))
        })
        .collect()
}
