//! `chain-attacks`: who has a box, or none, and wants more than that: a box's host that connects as if it were a
//! client, a box that answers in the server's place, a host that serves a box without a right to; clients with changed
//! agents that try to bypass a required middlebox; and a client that requests to re-route more sessions than its share.
//! What is said on the wire is attacked in the simulator.

mod evading;
mod exhausting;

use std::path::Path;

use anyhow::{Result, bail, ensure};

use super::{PORT, ZONE, apply, await_chains, await_reason, build, chain, count_sessions, serve, sessions, watch};
use crate::agent::{self, Agents, margay};
use crate::host::Host;
use crate::lab::Lab;
use crate::program::wait_for;
use crate::report::Limit::{AtLeast, AtMost, Below, Exactly};
use crate::report::{Bound, bound};
use crate::scenario::{Findings, Scenario, pair};
use crate::server;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "chain-attacks",
    summary: "middleboxes that pose as clients or servers; clients that bypass middleboxes, or exhaust requests",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 11] = [
    bound("accepted", Exactly(0.0)),
    bound("honest_failed", Exactly(0.0)),
    bound("error_ms_max", Below(2500.0)),
    // Controls: what the same attackers get while no policy requires a middlebox.
    bound("granted", AtLeast(1.0)),
    bound("let_in", AtLeast(evading::LET_IN)),
    // SYNs without the required middlebox that were refused or counted as dropped.
    bound("refused_syns", AtLeast(evading::REFUSED)),
    // Re-route requests refused because their peer had its share.
    bound("exhausting_requests", AtLeast(exhausting::REFUSED)),
    bound("operator_changed", AtLeast(exhausting::CHANGED)),
    bound("operator_refused", Exactly(0.0)),
    bound("memory_growth_mb", AtMost(20.0)),
    bound("failed", Exactly(0.0)),
];

const TRIES: u64 = 10;
/// Admits the client alone.
const NAME: &str = "web.shop";
/// Admits everybody. Like [`NAME`], it requires [`FIREWALL`].
const POST: &str = "post.shop";
/// Admits everybody, and requires nothing.
const OPEN: &str = "open.shop";
const FIREWALL: &str = "fw.shop";
const TALK: &str = "talk.shop";

/// A user without rights says what a client says, all the while, to any virtual address.
const GUESSER: &str = r#"
import os, socket, sys, time
os.setgid(65534)
os.setuid(65534)
guess = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
# What tells forwarded packets apart must not be for anybody to choose.
guess.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, int(sys.argv[2]))
until = time.monotonic() + 2
while time.monotonic() < until:
    try:
        guess.sendto(b"guessed", (sys.argv[1], 53))
    except OSError:
        pass
    time.sleep(0.002)
"#;
/// Prints a line for each datagram that comes.
const LISTENER: &str = r#"
import socket
heard = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
heard.bind(("0.0.0.0", 53))
while True:
    print(heard.recv(2048).decode(), flush=True)
"#;

#[derive(Default)]
struct Tally {
    accepted: f64,
    honest_failed: f64,
    error_ms: f64,
}

impl Tally {
    fn honest(&mut self, host: &Host, findings: &mut Findings) -> Result<()> {
        self.honest_to(NAME, host, findings)
    }

    fn honest_to(&mut self, name: &str, host: &Host, findings: &mut Findings) -> Result<()> {
        let outcome = server::attempt(host, &format!("{name}.{ZONE}"), PORT, &["--count", &TRIES.to_string()])?;
        if outcome.failed() > 0 {
            findings.note(format!("of {} to {name}: {:?}", host.name(), outcome.errors));
        }
        self.honest_failed += outcome.failed() as f64;
        Ok(())
    }

    fn attack(&mut self, what: &str, host: &Host, options: &[&str], findings: &mut Findings) -> Result<()> {
        let words = [&["--count", "5"], options].concat();
        // Of IPv4, like the addresses that they connect from.
        let to = agent::virtual_addresses(host, NAME)?.0;
        let outcome = server::attempt(host, &to, PORT, &words)?;
        findings.note(format!("{what}: {:?}", outcome.errors));
        self.accepted += outcome.ok as f64;
        self.error_ms = outcome.error_ms.iter().copied().fold(self.error_ms, f64::max);
        Ok(())
    }
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = build("chain-attacks", 2, &["other"], dir)?;
    let _agents = Agents::start(&lab)?;
    let router = lab.host("router")?;
    let server = lab.host("server")?;
    let client = lab.host("client")?;
    let other = lab.host("other")?;
    let one = lab.host("box1")?;
    let _echo = server::echo(server, &["0.0.0.0:7".parse()?])?;
    let id = agent::status(client)?["host_id"].as_str().unwrap_or_default().to_owned();
    agent::publish(server, NAME, "0.0.0.0:7", &["--allow", &format!("host:{id}")])?;
    for name in [POST, OPEN] {
        agent::publish(server, name, "0.0.0.0:7", &["--allow", "any"])?;
    }
    serve(one, FIREWALL, "forward", &[])?;
    count_sessions(one)?;
    evading::get_granted(other, server, findings)?;
    // Before there is a policy.
    evading::leave_router(other)?;
    let required: String =
        [NAME, POST].map(|name| format!("[[require]]\nname = \"{name}\"\nboxes = [\"{FIREWALL}\"]\n")).concat();
    let inspected = chain("inspect", NAME, &[FIREWALL], "") + &chain("inspect-post", POST, &[FIREWALL], "");
    let policy = format!("{inspected}{}{required}", chain("translate", TALK, &["nat.shop"], ""));
    let names = ["inspect", "inspect-post", "translate"];
    let hosts: Vec<&Host> = lab.hosts.iter().filter(|host| host.name() != other.name()).collect();
    apply(router, &policy, &hosts, &names)?;
    let mut tally = Tally::default();
    tally.honest(client, findings)?;
    ensure!(sessions(one)? >= TRIES as f64, "honest sessions do not pass the box");
    evading::evade(&lab, &mut tally, findings)?;
    evading::return_to_router(other)?;
    await_chains(other, &names)?;
    made_up_client(&lab, &mut tally, findings)?;
    answers_itself(&lab, &mut tally, findings)?;
    local_user(&lab, &mut tally, findings)?;
    box_without_grant(&lab, &mut tally, findings)?;
    exhausting::exhaust(&lab, &mut tally, findings)?;
    tally.honest(client, findings)?;
    findings.set("accepted", tally.accepted);
    findings.set("honest_failed", tally.honest_failed);
    findings.set("error_ms_max", tally.error_ms);
    findings.figures.add("failed", 0.0);
    Ok(())
}

/// The box's host connects from the client's address: its agent can sign for nobody but itself.
fn made_up_client(lab: &Lab, tally: &mut Tally, findings: &mut Findings) -> Result<()> {
    let (server, one) = (lab.host("server")?, lab.host("box1")?);
    let address = pair::address(lab.host("client")?)?;
    let before = evading::refused(server)?;
    // Nobody else on the segment is to take this host for the client.
    one.shell("echo 1 > /proc/sys/net/ipv4/conf/eth0/arp_ignore")?;
    one.shell(&format!("ip addr add {address}/32 dev lo"))?;
    tally.attack("a box's host as the client", one, &["--from", &format!("{address}:0")], findings)?;
    tally.attack("a box's host as itself", one, &[], findings)?;
    ensure!(evading::refused(server)? >= before + 10.0, "the server's host has not refused all of them");
    one.shell(&format!("ip addr del {address}/32 dev lo")).map(drop)
}

/// The box sends sessions to a server of its own.
fn answers_itself(lab: &Lab, tally: &mut Tally, findings: &mut Findings) -> Result<()> {
    let client = lab.host("client")?;
    let one = lab.host("box1")?;
    let _own = server::echo(one, &["0.0.0.0:7777".parse()?])?;
    one.shell(
        "nft 'add table inet fw; add chain inet fw pre { type nat hook prerouting priority dstnat; };
              add rule inet fw pre iifname sal0 tcp dport 7 redirect to :7777'",
    )?;
    let watching = watch(client)?;
    tally.attack("a box that answers in the server's place", client, &[], findings)?;
    await_reason(&watching, FIREWALL)?;
    one.run(["nft", "delete table inet fw"])?;
    tally.honest(client, findings)
}

/// A client says the same from five ports, one after the other.
fn say(there: &str) -> String {
    format!(
        "for try in 1 2 3 4 5; do
             python3 -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b\"guessed\",
                 (\"{there}\", 53))'
             sleep 0.2
         done"
    )
}

/// The box drops all of a session's datagrams, and a user of its host says what was in them: nothing comes through.
fn local_user(lab: &Lab, tally: &mut Tally, findings: &mut Findings) -> Result<()> {
    let (client, server, two) = (lab.host("client")?, lab.host("server")?, lab.host("box2")?);
    let heard = server.spawn("heard", ["python3", "-c", LISTENER])?;
    agent::publish(server, TALK, "0.0.0.0:53", &["--protocol", "udp"])?;
    serve(two, "nat.shop", "rewrite", &[])?;
    two.shell(
        "nft 'add table inet nat; add chain inet nat forward { type filter hook forward priority 0; };
              add rule inet nat forward iifname sal0 udp dport 53 counter drop'",
    )?;
    let there = agent::virtual_addresses(client, TALK)?.0;
    let elsewhere = agent::virtual_addresses(two, "mail.shop")?.0;
    for ttl in ["64", "254"] {
        let guesser = two.spawn(&format!("guesser-{ttl}"), ["python3", "-c", GUESSER, elsewhere.as_str(), ttl])?;
        client.shell(&say(&there))?;
        drop(guesser);
    }
    let came_through = heard.log().lines().count();
    findings.note(format!("a local user who says what a client says: {came_through} datagrams came through"));
    tally.accepted += came_through as f64;
    // Otherwise nothing could have come through.
    two.run(["nft", "delete table inet nat"])?;
    client.shell(&say(&there))?;
    wait_for("an honest datagram", agent::READY_LIMIT, || {
        if heard.log().lines().count() > came_through { Ok(()) } else { bail!("none has come") }
    })?;
    agent::withdraw(two, "nat.shop")
}

/// A member without a grant serves the box: no session goes there.
fn box_without_grant(lab: &Lab, tally: &mut Tally, findings: &mut Findings) -> Result<()> {
    let router = lab.host("router")?;
    let two = lab.host("box2")?;
    let client = lab.host("client")?;
    let id = agent::status(two)?["host_id"].as_str().unwrap_or_default().to_owned();
    margay(router, ["id", "member", "grant", &id, "mail.shop"])?;
    count_sessions(two)?;
    margay(two, ["middlebox", "serve", FIREWALL, "--kind", "forward"])?;
    wait_for("the router's refusal", agent::READY_LIMIT, || {
        let shown = agent::show(two, FIREWALL)?;
        match shown["service"]["state"].as_str() {
            Some("refused") => Ok(()),
            state => bail!("the state of {FIREWALL} is {state:?}"),
        }
    })?;
    tally.honest(client, findings)?;
    tally.accepted += sessions(two)?;
    agent::withdraw(two, FIREWALL)
}
