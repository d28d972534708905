//! `odd-hosts`: hosts, programs and links that are not as one would draw them (DESIGN §18): everything on one host,
//! addresses that clash, ports that clash, families that differ, TCP without its options, small and large MTUs,
//! fragments.

use std::path::Path;
use std::process::Output;

use anyhow::{Context, Result};

use super::{Findings, Scenario};
use crate::agent::{self, Agents};
use crate::host::Host;
use crate::lab::Lab;
use crate::program::{Program, output_within};
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::server::{self, Outcome};
use crate::topology::{Role, Topology};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "odd-hosts",
    summary: "one host as both ends, clashing addresses and ports, mixed families, TCP options off, MTUs, fragments",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 3] =
    [bound("failed", Exactly(0.0)), bound("combinations", AtLeast(60.0)), bound("attempts", AtLeast(300.0))];

/// Attempts of each combination.
const COUNT: usize = 5;
/// None that a kernel gives out by itself: an earlier connection, closed and remembered for a minute, would keep it
/// from being bound.
const SAME_PORT: u16 = 20_000;
const LIMIT: std::time::Duration = std::time::Duration::from_secs(60);
/// Many segments each way, more than any window at its start.
const LONG_BYTES: &str = "300000";
/// Longest datagram by IPv4: 65,535 less IP and UDP headers.
const LONGEST_V4: &str = "65507";
const SERVICES: [(&str, &str); 3] = [("any", "0.0.0.0:7"), ("six", "[::]:7"), ("four", "0.0.0.0:9")];

/// Homes have the same addresses; so has one interface of the server.
const TOPOLOGY: &str = r#"
[subnet.core]
v4 = "10.1.0.0/24"
v6 = "fd01::/64"

[subnet.home1]
v4 = "192.168.1.0/24"

[subnet.home2]
v4 = "192.168.2.0/24"

[subnet.small]
v4 = "10.4.0.0/24"
v6 = "fd04::/64"
mtu = 1280

[subnet.large]
v4 = "10.5.0.0/24"
v6 = "fd05::/64"
mtu = 9000

[subnet.six]
v6 = "fd06::/64"

[host.router]
role = "router"
links = [{ subnet = "core" }]

[host.nat1]
role = "gateway"
nat = "core"
links = [{ subnet = "core" }, { subnet = "home1" }]

[host.nat2]
role = "gateway"
nat = "core"
links = [{ subnet = "core" }, { subnet = "home2" }]

[host.hill]
role = "gateway"
links = [{ subnet = "core" }, { subnet = "small" }, { subnet = "large" }, { subnet = "six" }]

[host.server]
role = "agent"
links = [{ subnet = "core" }]

[host.client]
role = "agent"
links = [{ subnet = "core" }]

[host.behind1]
role = "agent"
links = [{ subnet = "home1", v4 = "192.168.1.77" }]

[host.behind1b]
role = "agent"
links = [{ subnet = "home1" }]

[host.behind2]
role = "agent"
links = [{ subnet = "home2" }]

[host.tiny]
role = "agent"
links = [{ subnet = "small" }]

[host.jumbo]
role = "agent"
links = [{ subnet = "large" }]

[host.jumbo2]
role = "agent"
links = [{ subnet = "large" }]

# Have no IPv4 but the virtual one; they join by the router's IPv6 address.
[host.six1]
role = "plain"
links = [{ subnet = "six" }]

[host.six2]
role = "plain"
links = [{ subnet = "six" }]
"#;

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = build("odd-hosts", "", dir)?;
    for host in lab.hosts.iter().filter(|host| host.plan.role != Role::Gateway) {
        agent::keep_encapsulated(host)?;
    }
    let _echoes = start(&lab)?;
    try_all(&lab, &mut Trials { findings, extra: &[] })
}

/// Builds the lab, with `more` hosts than these; no agent is started.
///
/// # Errors
///
/// As for [`Lab::build`].
pub fn build(name: &str, more: &str, dir: &Path) -> Result<Lab> {
    let lab = Lab::build(Topology::parse(name, &format!("{TOPOLOGY}{more}"))?, dir)?;
    // An address of the server that is also one of a client, behind a NAT.
    let own = "ip link add own0 type bridge && ip link set own0 up && ip addr add 192.168.1.77/32 dev own0";
    lab.host("server")?.shell(own)?;
    Ok(lab)
}

/// Starts agents and echo servers.
///
/// # Errors
///
/// One of them does not start.
pub fn start(lab: &Lab) -> Result<Vec<Program>> {
    let _agents = Agents::start(lab)?;
    let mut echoes = Vec::new();
    publish(lab.host("server")?, "server", &mut echoes)?;
    let [six1, six2] = ["six1", "six2"].map(|name| lab.host(name));
    join_by_v6(lab, &[six1?, six2?])?;
    for (host, name) in [("jumbo2", "jumbo"), ("tiny", "tiny"), ("six1", "six")] {
        publish(lab.host(host)?, name, &mut echoes)?;
    }
    Ok(echoes)
}

/// How attempts are made, and what became of them.
pub struct Trials<'a> {
    /// Where they are counted.
    pub findings: &'a mut Findings,
    /// Options of every attempt.
    pub extra: &'a [&'a str],
}

/// All combinations.
///
/// # Errors
///
/// Attempts cannot be made at all. One that fails is counted.
pub fn try_all(lab: &Lab, trials: &mut Trials) -> Result<()> {
    trials.findings.figures.add("failed", 0.0);
    trials.one_host(lab)?;
    trials.families(lab.host("client")?, "a client")?;
    trials.families(lab.host("behind1")?, "a client with an address of the server")?;
    trials.same_port(lab)?;
    trials.sizes(lab)?;
    trials.tcp_options(lab)
}

/// Hosts without IPv4 join by an address that they can reach.
fn join_by_v6(lab: &Lab, hosts: &[&Host]) -> Result<()> {
    let router = lab.host("router")?;
    let address = router.plan.links.iter().find_map(|link| link.v6).context("the router has no IPv6 address")?;
    let at = format!("[{address}]:54324");
    let words = ["id", "token", "create", &lab.topology.authority, "--uses", "10", "--router-address", &at];
    let token = agent::margay(router, words)?;
    hosts.iter().try_for_each(|host| agent::join(host, token.trim()))
}

/// An echo server for each kind of listener, as services `any-NAME`, `six-NAME`, `four-NAME`.
fn publish(host: &Host, name: &str, echoes: &mut Vec<Program>) -> Result<()> {
    for (kind, listen) in SERVICES {
        echoes.push(server::echo(host, &[listen.parse()?])?);
        agent::publish(host, &format!("{kind}-{name}.shop"), listen, &[])?;
    }
    Ok(())
}

impl Trials<'_> {
    /// Counts what became of one combination.
    pub fn judge(&mut self, what: &str, outcome: &Outcome) {
        self.findings.figures.add("combinations", 1.0);
        self.findings.figures.add("attempts", (outcome.ok + outcome.failed()) as f64);
        self.findings.figures.add("failed", outcome.failed() as f64);
        if outcome.failed() > 0 {
            let tried = outcome.ok + outcome.failed();
            self.findings.note(format!("{what}: {} of {tried} failed: {:?}", outcome.failed(), outcome.errors));
        }
    }

    /// Attempts of one combination, to a virtual address of a service.
    pub fn tries(&mut self, from: &Host, service: &str, v6: bool, options: &[&str], what: &str) -> Result<()> {
        let (four, six) = agent::virtual_addresses(from, &format!("{service}.shop"))?;
        let to = if v6 { six } else { four };
        let port = if service.starts_with("four") { 9 } else { 7 };
        let count = COUNT.to_string();
        let options: Vec<&str> = ["--count", &count].iter().chain(self.extra).chain(options).copied().collect();
        let outcome = server::attempt(from, &to, port, &options)?;
        self.judge(&format!("{what}, {} to {service} by {to}, {options:?}", from.name()), &outcome);
        Ok(())
    }

    /// IPv4 and IPv6 programs to listeners of both families, TCP and UDP.
    fn families(&mut self, from: &Host, what: &str) -> Result<()> {
        for kind in ["any", "six"] {
            for v6 in [false, true] {
                self.tries(from, &format!("{kind}-server"), v6, &[], what)?;
                self.tries(from, &format!("{kind}-server"), v6, &["--udp"], what)?;
            }
        }
        Ok(())
    }

    /// Client and server on one host: both families, both protocols, long and short.
    fn one_host(&mut self, lab: &Lab) -> Result<()> {
        let server = lab.host("server")?;
        self.families(server, "one host")?;
        self.tries(server, "any-server", false, &["--bytes", LONG_BYTES], "one host")?;
        self.tries(server, "any-server", true, &["--udp", "--bytes", "8000"], "one host")
    }

    /// Clients on different hosts, two of them behind one NAT, use one source port at the same time and again.
    fn same_port(&mut self, lab: &Lab) -> Result<()> {
        let from = format!("0.0.0.0:{SAME_PORT}");
        let count = COUNT.to_string();
        for protocol in [&[][..], &["--udp"][..]] {
            let hosts = ["client", "behind1", "behind1b", "behind2", "jumbo", "tiny", "server"];
            let outputs = std::thread::scope(|scope| -> Result<Vec<Result<Output>>> {
                let mut running = Vec::new();
                for name in hosts {
                    let host = lab.host(name)?;
                    let (to, _) = agent::virtual_addresses(host, "four-server.shop")?;
                    let mut command = host.traffic(["attempt", &to, "9", "--count", &count, "--from", &from])?;
                    command.args(protocol).args(["--bytes", "5000", "--pause-ms", "50"]).args(self.extra);
                    running.push(scope.spawn(move || output_within(&mut command, LIMIT)));
                }
                running.into_iter().map(|one| one.join().ok().context("a thread ended badly")).collect()
            })?;
            for (name, output) in hosts.iter().zip(outputs) {
                self.judge(&format!("port {SAME_PORT} on {name} {protocol:?}"), &server::outcome(output?)?);
            }
        }
        Ok(())
    }

    /// MTUs 1280 and 9000 at either end, with a gateway between; datagrams that fit and that come in fragments.
    fn sizes(&mut self, lab: &Lab) -> Result<()> {
        for (from, service) in [
            ("tiny", "any-server"),
            ("client", "any-tiny"),
            ("jumbo", "any-server"),
            ("client", "any-jumbo"),
            ("jumbo", "any-tiny"),
            ("tiny", "any-jumbo"),
            ("jumbo", "any-jumbo"),
            ("behind1", "any-server"),
            ("six2", "any-six"),
            ("six2", "any-server"),
            ("client", "any-six"),
        ] {
            let host = lab.host(from)?;
            for v6 in [false, true] {
                self.tries(host, service, v6, &["--bytes", LONG_BYTES], "sizes")?;
            }
            for bytes in ["1", "1180", "1420", "1453"] {
                self.tries(host, service, false, &["--udp", "--bytes", bytes], "sizes")?;
            }
            for bytes in ["3000", "8950", "20000"] {
                self.tries(host, service, false, &in_pieces(bytes), "sizes")?;
            }
            self.tries(host, service, true, &in_pieces("5000"), "sizes")?;
        }
        self.tries(lab.host("client")?, "any-server", false, &in_pieces(LONGEST_V4), "the longest")
    }

    /// TCP without time stamps, without selective acknowledgements, and without either, at one end and at both.
    fn tcp_options(&mut self, lab: &Lab) -> Result<()> {
        let (client, server) = (lab.host("client")?, lab.host("server")?);
        for ends in [&[client][..], &[server][..], &[client, server][..]] {
            for off in [&["tcp_timestamps"][..], &["tcp_sack"][..], &["tcp_timestamps", "tcp_sack"][..]] {
                set(ends, off, "0")?;
                let what = format!("{off:?} off on {} hosts", ends.len());
                self.tries(client, "any-server", false, &["--bytes", LONG_BYTES], &what)?;
                self.tries(client, "any-server", true, &["--bytes", LONG_BYTES], &what)?;
                set(ends, off, "1")?;
            }
        }
        Ok(())
    }
}

/// How a datagram is tried that comes in pieces, of which none may be lost on a busy machine: as programs do, it is
/// sent again.
const fn in_pieces(bytes: &str) -> [&str; 5] {
    ["--udp", "--bytes", bytes, "--resend-ms", "500"]
}

/// Writes a key of `net.ipv4` on hosts.
///
/// # Errors
///
/// There is none such.
pub fn set(hosts: &[&Host], keys: &[&str], value: &str) -> Result<()> {
    for host in hosts {
        for key in keys {
            host.shell(&format!("echo '{value}' > /proc/sys/net/ipv4/{key}"))?;
        }
    }
    Ok(())
}
