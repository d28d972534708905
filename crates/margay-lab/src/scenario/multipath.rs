//! `multipath`: two hosts with two interfaces each, on two networks that have nothing in common. One transfer goes over
//! both at once: by name, striped, and with MPTCP beside it; against what plain transfers bring over each of the two.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use margay_wire::PORT;

use super::moved::{self, NAME, SERVICE};
use super::{Findings, Scenario, pair};
use crate::agent::{self, Agents};
use crate::host::Host;
use crate::interface;
use crate::lab::Lab;
use crate::observe;
use crate::report::Limit::{AtLeast, AtMost, Exactly};
use crate::report::{Bound, bound};
use crate::topology::Topology;
use crate::transfers::{Order, Server, Transfers, now_us, rate};
use crate::wire;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "multipath",
    summary: "one transfer over two equal links, two unequal ones and two of unequal delay, at once; MPTCP beside it",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 7] = [
    bound("gain_equal", AtLeast(1.8)),
    bound("gain_unequal", AtLeast(0.85)),
    bound("gain_unequal_delay", AtLeast(0.85)),
    bound("cut_pause_ms", AtMost(1000.0)),
    bound("resets", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

const PLAIN_PORT: u16 = 5203;
const MPTCP_PORT: u16 = 5204;
const SETTLED_LIMIT: Duration = Duration::from_secs(20);

/// What the client's configuration says.
const STRIPED: &str = r#"
[[multihoming]]
names = ["flow.shop"]
policy = "stripe"
"#;

/// Two links, and what is measured over them.
struct Links {
    name: &'static str,
    mbit: [u32; 2],
    /// One way, of each.
    delay_ms: [f64; 2],
    way: &'static str,
    /// Left out at the beginning of each transfer, and what is measured then.
    omitted: Duration,
    measured: Duration,
}

const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

const LINKS: [Links; 3] = [
    Links {
        name: "equal",
        mbit: [40, 40],
        delay_ms: [10.0, 10.0],
        way: "down:cubic",
        omitted: seconds(3),
        measured: seconds(5),
    },
    Links {
        name: "unequal",
        mbit: [40, 20],
        delay_ms: [10.0, 10.0],
        way: "up:cubic",
        omitted: seconds(3),
        measured: seconds(5),
    },
    // A window that is enough for both grows slowly where the round trip is long: cubic does not know that it is alone.
    Links {
        name: "unequal_delay",
        mbit: [40, 40],
        delay_ms: [5.0, 60.0],
        way: "up:cubic",
        omitted: seconds(12),
        measured: seconds(8),
    },
];

/// For each two links a client and a server of their own; one router for all.
fn topology() -> String {
    let (mut subnets, mut hosts, mut router) = (String::new(), String::new(), Vec::new());
    for (number, links) in LINKS.iter().enumerate() {
        let names = [format!("upper{number}"), format!("lower{number}")];
        for (place, name) in names.iter().enumerate() {
            let (network, mbit) = (1 + number * 2 + place, links.mbit[place]);
            // A packet is delayed where it leaves one host, and where it comes to the other.
            let delay_ms = links.delay_ms[place] / 2.0;
            subnets += &format!(
                "[subnet.{name}]\nv4 = \"10.{network}.0.0/24\"\nrate_mbit = {mbit}\ndelay_ms = {delay_ms:?}\n\n"
            );
            router.push(format!("{{ subnet = \"{name}\" }}"));
        }
        let links = router[number * 2..].join(", ");
        for role in ["server", "client"] {
            hosts += &format!("[host.{role}{number}]\nrole = \"agent\"\nlinks = [{links}]\n\n");
        }
    }
    format!("{subnets}[host.router]\nrole = \"router\"\nlinks = [{}]\n\n{hosts}", router.join(", "))
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("multipath", &topology())?, dir)?;
    let router = lab.host("router")?;
    let mut pairs = Vec::new();
    for number in 0..LINKS.len() {
        let hosts = [lab.host(&format!("client{number}"))?, lab.host(&format!("server{number}"))?];
        // The token names an address that only the first two hosts reach.
        let home = interface::first_address(&lab, router, number * 2, false)?.addr();
        let join = format!("[join]\nrouter = \"{home}:{PORT}\"\n");
        for (host, more) in hosts.into_iter().zip([STRIPED, ""]) {
            host.shell(&format!("cat >> /etc/margay/margay.toml <<'END'\n{join}{more}END\n"))?;
        }
        pairs.push(hosts);
    }
    let _agents = Agents::start(&lab)?;
    for (links, hosts) in LINKS.iter().zip(pairs) {
        hosts.iter().try_for_each(|host| observe::count_virtual_resets(host))?;
        pair::attempt_part(links.name, findings, |findings| over(links, &lab, hosts, findings));
        let (resets, places) = observe::virtual_resets(&hosts)?;
        findings.figures.add("resets", resets);
        if resets > 0.0 {
            findings.note(format!("{}: resets: {places}", links.name));
        }
    }
    Ok(())
}

fn over(links: &Links, lab: &Lab, hosts: [&Host; 2], findings: &mut Findings) -> Result<()> {
    let [client, server] = hosts;
    let address = set_up_mptcp(lab, hosts)?;
    let sum = plain(links, lab, hosts, findings)?;
    let mut serving = moved::serve(server)?;
    agent::await_instances(client, SERVICE, 1)?;
    let striped = transfer(links, client, (&mut serving, NAME), findings, |transfers, findings| {
        if links.name == "equal" { cut(lab, client, transfers, findings) } else { Ok(()) }
    })?;
    // The next server has the same name.
    agent::withdraw(server, SERVICE)?;
    let mut serving_mptcp = Server::start(server, MPTCP_PORT, true)?;
    let mptcp = transfer(links, client, (&mut serving_mptcp, &address), findings, |_, _| Ok(()))?;
    // Over equal links: how many times as much as over one.
    let of = if links.name == "equal" { sum / 2.0 } else { sum };
    findings.set(&format!("{}_sum_mbit", links.name), sum * 8.0 / 1e6);
    findings.set(&format!("gain_{}", links.name), striped / of.max(1.0));
    findings.set(&format!("mptcp_gain_{}", links.name), mptcp / of.max(1.0));
    findings.set(&format!("ratio_mptcp_{}", links.name), striped / mptcp.max(1.0));
    Ok(())
}

/// The server tells of both of its addresses, and the client opens a subflow to each. Gives the server's first address.
fn set_up_mptcp(lab: &Lab, [client, server]: [&Host; 2]) -> Result<String> {
    for host in [client, server] {
        host.run(["ip", "mptcp", "limits", "set", "subflows", "4", "add_addr_accepted", "4"])?;
    }
    for link in 0..server.plan.links.len() {
        let address = interface::first_address(lab, server, link, false)?.addr().to_string();
        server.run(["ip", "mptcp", "endpoint", "add", &address, "dev", &format!("eth{link}"), "signal"])?;
    }
    pair::address(server)
}

/// What plain transfers bring over both links, one over each, at the same time, in bytes per second.
fn plain(links: &Links, lab: &Lab, [client, server]: [&Host; 2], findings: &mut Findings) -> Result<f64> {
    let mut sum = 0.0;
    let mut one_server = Server::start(server, PLAIN_PORT, false)?;
    let mut other_server = Server::start(server, PLAIN_PORT + 10, false)?;
    let address = |link| interface::first_address(lab, server, link, false).map(|address| address.addr().to_string());
    let (one, other) = (address(0)?, address(1)?);
    let ways = [links.way];
    let mut one = Transfers::start(client, &mut one_server, Order { to: &one, ways: &ways, pace: 0 })?;
    let mut other = Transfers::start(client, &mut other_server, Order { to: &other, ways: &ways, pace: 0 })?;
    std::thread::sleep(seconds(2));
    let from_us = now_us();
    std::thread::sleep(seconds(4));
    let to_us = now_us();
    for transfers in [&mut one, &mut other] {
        transfers.refresh()?;
        sum += transfers.received().iter().map(|word| rate(&word.marks, from_us, to_us)).sum::<f64>();
    }
    one.finish("plain over the first link", findings)?;
    other.finish("plain over the second link", findings)?;
    Ok(sum)
}

/// What one transfer brings in bytes per second, once it has had its time to grow.
fn transfer(
    links: &Links,
    client: &Host,
    (serving, to): (&mut Server, &str),
    findings: &mut Findings,
    then: impl FnOnce(&mut Transfers<'_>, &mut Findings) -> Result<()>,
) -> Result<f64> {
    let ways = [links.way];
    let mut transfers = Transfers::start(client, serving, Order { to, ways: &ways, pace: 0 })?;
    std::thread::sleep(links.omitted);
    let from_us = now_us();
    std::thread::sleep(links.measured);
    let to_us = now_us();
    transfers.refresh()?;
    let brought: f64 = transfers.received().iter().map(|word| rate(&word.marks, from_us, to_us)).sum();
    let done = then(&mut transfers, findings);
    transfers.finish(links.name, findings)?;
    done.map(|()| brought)
}

/// One of the links is cut where neither host sees it, while the transfer runs.
fn cut(lab: &Lab, client: &Host, transfers: &mut Transfers<'_>, findings: &mut Findings) -> Result<()> {
    let cut_us = now_us();
    wire::set_link(&lab.topology, client, false)?;
    // More than was under way.
    let resumed = transfers.await_bytes("the transfer goes on over the other link", 6_000_000, SETTLED_LIMIT);
    wire::set_link(&lab.topology, client, true)?;
    resumed?;
    let pause = transfers.pauses_ms(cut_us).into_iter().flatten().fold(0.0, f64::max);
    findings.set("cut_pause_ms", pause);
    Ok(())
}
