//! `chain-setup`: what a box adds to `connect()`, beside the same hosts in a line that forward IP packets.

use std::path::Path;

use anyhow::Result;

use super::{ZONE, apply, build, chain, serve};
use crate::agent::{self, Agents};
use crate::command::progress;
use crate::host::Host;
use crate::lab::Lab;
use crate::report::Limit::{AtMost, Exactly};
use crate::report::{Bound, bound, median};
use crate::scenario::{Findings, Scenario, pair};
use crate::server;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "chain-setup",
    summary: "connect() through one box and through four, beside hosts that forward IP packets",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 2] = [bound("added_per_box", AtMost(1.2)), bound("failed", Exactly(0.0))];

const BOXES: usize = 4;
const ROUNDS: usize = 5;
const COUNT: usize = 200;
/// The ends of the line by IP: the client's address there, and the server's.
const LINE: [&str; 2] = ["192.0.2.2", "192.0.2.1"];

/// Where connections go, and through how many boxes.
struct Way {
    to: String,
    boxes: usize,
    is_ip: bool,
    us: Vec<f64>,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = build("chain-setup", BOXES, &[], dir)?;
    for host in &lab.hosts {
        host.shell(
            "echo 10000 60999 > /proc/sys/net/ipv4/ip_local_port_range; echo 1 > /proc/sys/net/ipv4/tcp_tw_reuse",
        )?;
    }
    let _agents = Agents::start(&lab)?;
    let router = lab.host("router")?;
    let server = lab.host("server")?;
    let client = lab.host("client")?;
    let _echo = server::echo(server, &["0.0.0.0:7".parse()?])?;
    for name in ["none.shop", "one.shop", "four.shop"] {
        agent::publish(server, name, "0.0.0.0:7", &[])?;
    }
    let names = ["fw1.shop", "fw2.shop", "fw3.shop", "fw4.shop"];
    for (name, number) in names.iter().zip(1..) {
        serve(lab.host(&format!("box{number}"))?, name, "forward", &[])?;
    }
    let policy = [
        chain("one", "one.shop", &names[..1], ""),
        chain("four", "four.shop", &names, ""),
        // Sessions of UDP alone: no grants are given for the name, and agents set up its connections as those of
        // others.
        chain("none", "none.shop", &names[..1], "protocol = \"udp\""),
    ];
    let hosts: Vec<&Host> = lab.hosts.iter().collect();
    apply(router, &policy.concat(), &hosts, &["one", "four", "none"])?;
    let way = |to: String, boxes, is_ip| Way { to, boxes, is_ip, us: Vec::new() };
    let by_name = |name: &str| format!("{name}.shop.{ZONE}");
    let mut ways = [
        way(by_name("none"), 0, false),
        way(by_name("one"), 1, false),
        way(by_name("four"), 4, false),
        way(pair::address(server)?, 0, true),
        way(LINE[1].to_owned(), 1, true),
        way(LINE[1].to_owned(), 4, true),
    ];
    findings.set("first_contact_us", server::connects(client, &ways[2].to, 1, 1)?.median_us);
    measure(&lab, &mut ways, findings)?;
    let us = |boxes: usize, is_ip: bool| {
        let found = ways.iter().find(|way| way.boxes == boxes && way.is_ip == is_ip);
        found.map_or(f64::NAN, |way| median(&way.us))
    };
    findings.set("p50_us", us(0, false));
    findings.set("added_us_per_box", (us(4, false) - us(0, false)) / 4.0);
    findings.set("added_per_box", (us(4, false) - us(0, false)) / 4.0 / us(0, false));
    findings.set("ratio_ip_1", us(1, false) / us(1, true));
    findings.set("ratio_ip_4", us(4, false) / us(4, true));
    findings.figures.add("failed", 0.0);
    Ok(())
}

/// In turns, so that each meets the machine as the others do.
fn measure(lab: &Lab, ways: &mut [Way], findings: &mut Findings) -> Result<()> {
    let client = lab.host("client")?;
    for _ in 0..ROUNDS {
        for way in ways.iter_mut() {
            if way.is_ip && way.boxes > 0 {
                line(lab, way.boxes)?;
            }
            let found = server::connects(client, &way.to, COUNT, 1)?;
            let kind = if way.is_ip { "IP" } else { "names" };
            progress(&format!("{kind}, {} boxes: {:.0} us", way.boxes, found.median_us));
            if found.failed > 0 {
                findings.note(format!("to {}: {} failed, one of them {}", way.to, found.failed, found.error));
                findings.figures.add("failed", found.failed as f64);
            }
            way.us.push(found.median_us);
        }
    }
    Ok(())
}

/// Leads packets between two addresses of the ends through so many of the boxes' hosts.
fn line(lab: &Lab, boxes: usize) -> Result<()> {
    let hosts = ["client".to_owned()].into_iter().chain((1..=boxes).map(|number| format!("box{number}")));
    let hosts = hosts.chain(["server".to_owned()]).map(|name| lab.host(&name)).collect::<Result<Vec<_>>>()?;
    let last = hosts.len() - 1;
    for (at, host) in hosts.iter().enumerate() {
        // Without the word that there is a shorter way.
        host.shell(
            "echo 1 > /proc/sys/net/ipv4/conf/eth0/forwarding
             echo 0 > /proc/sys/net/ipv4/conf/all/send_redirects; echo 0 > /proc/sys/net/ipv4/conf/eth0/send_redirects
             echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter; echo 0 > /proc/sys/net/ipv4/conf/eth0/rp_filter",
        )?;
        let own = match at {
            0 => Some(LINE[0]),
            _ if at == last => Some(LINE[1]),
            _ => None,
        };
        if let Some(own) = own {
            host.shell(&format!("ip addr replace {own}/32 dev lo"))?;
        }
        let source = own.map(|own| format!("src {own}")).unwrap_or_default();
        if at > 0 {
            host.shell(&format!("ip route replace {} via {} {source}", LINE[0], pair::address(hosts[at - 1])?))?;
        }
        if at < last {
            host.shell(&format!("ip route replace {} via {} {source}", LINE[1], pair::address(hosts[at + 1])?))?;
        }
    }
    Ok(())
}
