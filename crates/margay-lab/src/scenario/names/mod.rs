//! `names`: programs with many resolvers look up names of the zone, names of others and names of nobody, whatever the
//! host's `resolv.conf` was before `up`; and while the agent or the responder is killed.

mod programs;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use self::programs::Finder;
use super::{Findings, Scenario, is_long, pair};
use crate::agent::{self, Agents};
use crate::host::Host;
use crate::lab::Lab;
use crate::program::{Program, wait_for};
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::topology::Topology;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "names",
    summary: "resolvers of many programs and hosts find names of the zone and of others, also while agents are killed",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 6] = [
    bound("found_share", Exactly(1.0)),
    bound("foreign_failed", Exactly(0.0)),
    bound("wrong", Exactly(0.0)),
    bound("runs", AtLeast(100.0)),
    bound("kills", Exactly(2.0 * KILLS as f64)),
    bound("taken_ports", Exactly(0.0)),
];

const TOPOLOGY: &str = r#"
[subnet.site]
v4 = "10.1.0.0/24"

[host.router]
role = "router"
links = [{ subnet = "site" }]

[host.other]
role = "plain"
links = [{ subnet = "site" }]

[host.client]
role = "agent"
links = [{ subnet = "site" }]
"#;

const SERVICE: &str = "web.shop";
const OWN: &str = "web.shop.sal.internal";
const FOREIGN: &str = "www.example.test";
const FOREIGN_ADDRESS: &str = "203.0.113.7";
/// What another server says of the same name.
const OTHER_ADDRESS: &str = "203.0.113.8";
const NOBODYS: &str = "no-such-host.example.invalid";
/// Of the agent, and of the responder.
const KILLS: usize = 5;
const LIMIT: Duration = Duration::from_secs(10);

/// A `resolv.conf` before `up`, with `FIRST` and `SECOND` for two servers of the network.
const SITUATIONS: [(&str, &str); 6] = [
    ("one server", "nameserver FIRST\n"),
    ("several servers, one of them silent", "nameserver FIRST\nnameserver 10.1.0.253\nnameserver SECOND\n"),
    ("options rotate", "nameserver FIRST\nnameserver SECOND\noptions rotate timeout:1\n"),
    ("a local cache that knows no such zone", "nameserver 127.0.0.1\n"),
    ("a search list", "nameserver FIRST\nsearch sal.internal lan\n"),
    ("a search list that comes first", "search sal.internal\nnameserver FIRST\noptions ndots:5\n"),
];

/// A container on a bridge, with the host's own `resolv.conf`. The name of its namespace is a file of the machine: an
/// earlier run may have left it.
const CONTAINER: &str = r#"
    mkdir -p /run/netns
    ip netns del c1 2>/dev/null || true
    ip netns add c1
    ip link add docker0 type bridge; ip addr add 172.17.0.1/16 dev docker0; ip link set docker0 up
    ip link add vc1 type veth peer name eth0 netns c1; ip link set vc1 master docker0 up
    ip -n c1 addr add 172.17.0.2/16 dev eth0; ip -n c1 link set eth0 up; ip -n c1 link set lo up
    ip -n c1 route add default via 172.17.0.1
    echo 1 > /proc/sys/net/ipv4/ip_forward
    nft 'add table ip nat
         add chain ip nat post { type nat hook postrouting priority srcnat; }
         add rule ip nat post ip saddr 172.17.0.0/16 oifname != "docker0" masquerade'
"#;
const IN_CONTAINER: &str = "ip netns exec c1 env";

struct Stage<'a> {
    client: &'a Host,
    servers: [String; 2],
    finders: Vec<Finder>,
    /// The address that stands for [`OWN`].
    own: String,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    for bound in BOUNDS {
        findings.set(bound.figure, 0.0);
    }
    findings.set("slowest_ms", 0.0);
    let lab = Lab::build(Topology::parse("names", TOPOLOGY)?, dir)?;
    let (router, other, client) = (lab.host("router")?, lab.host("other")?, lab.host("client")?);
    let servers = [pair::address(router)?.to_string(), pair::address(other)?.to_string()];
    let _servers = [
        name_server(router, &servers[0], FOREIGN_ADDRESS)?,
        name_server(other, &servers[1], FOREIGN_ADDRESS)?,
        name_server(client, "127.0.0.1", FOREIGN_ADDRESS)?,
    ];
    let _agents = Agents::start(&lab)?;
    let _server = router.spawn("web", ["socat", "TCP-LISTEN:80,fork,reuseaddr", "EXEC:true"])?;
    agent::publish(router, SERVICE, "0.0.0.0:80", &[])?;
    let finders = programs::build(dir)?;
    let own = agent::virtual_addresses(client, SERVICE)?.0;
    let stage = Stage { client, servers, finders, own };
    let mut asked = Asked::default();
    for (what, text) in SITUATIONS {
        pair::attempt_part(what, findings, |findings| stage.situation(what, text, &mut asked, findings));
    }
    pair::attempt_part("a container", findings, |findings| {
        client.shell(CONTAINER)?;
        stage.ask_all("a container", IN_CONTAINER, FOREIGN_ADDRESS, &mut asked, findings)
    });
    pair::attempt_part("port 53", findings, |findings| stage.port(findings));
    pair::attempt_part("kills", findings, |findings| stage.kill_each(&mut asked, findings));
    // Its server is gone with it.
    pair::attempt_part("a DHCP client", findings, |findings| stage.overwritten(other, &mut asked, findings));
    findings.set("found_share", if asked.own == 0 { 0.0 } else { asked.found as f64 / asked.own as f64 });
    findings.set("runs", asked.runs as f64);
    Ok(())
}

/// Somebody else's: it knows names under `test` alone.
fn name_server(host: &Host, address: &str, answer: &str) -> Result<Program> {
    let listen = format!("{address}:53");
    let command = host.traffic(["dns", "--listen", &listen, "--answer", answer, "--under", "test"])?;
    let log = host.dir.join(format!("dns-{address}-{answer}.log"));
    let program = Program::start(command, &log)?;
    wait_for("the name server", LIMIT, || {
        if program.log().contains("ready") { Ok(()) } else { bail!("it is not ready: {}", program.log()) }
    })?;
    Ok(program)
}

/// What was asked so far.
#[derive(Default)]
struct Asked {
    runs: usize,
    own: usize,
    found: usize,
}

impl Stage<'_> {
    /// Brings the client up with another `resolv.conf`, and has everybody ask.
    fn situation(&self, what: &str, text: &str, asked: &mut Asked, findings: &mut Findings) -> Result<()> {
        agent::down(self.client)?;
        let text = text.replace("FIRST", &self.servers[0]).replace("SECOND", &self.servers[1]);
        std::fs::write(self.client.dir.join("resolv.conf.new"), &text)?;
        self.client.shell(&format!("cat {} > /etc/resolv.conf", self.client.dir.join("resolv.conf.new").display()))?;
        agent::start_again(self.client)?;
        self.ask_all(what, "", FOREIGN_ADDRESS, asked, findings)
    }

    fn ask_all(
        &self,
        what: &str,
        before: &str,
        foreign: &str,
        asked: &mut Asked,
        findings: &mut Findings,
    ) -> Result<()> {
        for finder in &self.finders {
            let said = self.ask(finder, before, OWN, asked, findings)?;
            asked.own += 1;
            asked.found += usize::from(said.contains(&self.own));
            if !said.contains(&self.own) {
                findings.note(format!("{what}: {} does not find {OWN}: {said:?}", finder.name));
            }
            let said = self.ask(finder, before, FOREIGN, asked, findings)?;
            if !said.contains(foreign) {
                findings.figures.add("foreign_failed", 1.0);
                findings.note(format!("{what}: {} does not find {FOREIGN}: {said:?}", finder.name));
            }
            let said = self.ask(finder, before, NOBODYS, asked, findings)?;
            let words = said.split(|letter: char| !letter.is_ascii_digit() && letter != '.');
            let is_leased = |word: &str| word.starts_with("198.18.") && !word.starts_with("198.18.0.");
            if said.contains("203.0.113.") || words.into_iter().any(is_leased) {
                findings.figures.add("wrong", 1.0);
                findings.note(format!("{what}: {} finds {NOBODYS}: {said:?}", finder.name));
            }
        }
        Ok(())
    }

    fn ask(
        &self,
        finder: &Finder,
        before: &str,
        name: &str,
        asked: &mut Asked,
        findings: &mut Findings,
    ) -> Result<String> {
        let start = Instant::now();
        let said = finder.ask(self.client, before, name)?;
        let slowest_ms = findings.figures.get("slowest_ms").max(start.elapsed().as_secs_f64() * 1e3);
        findings.set("slowest_ms", slowest_ms);
        asked.runs += 1;
        // An address of the zone for a name of others, or the other way round.
        let wrong = if name == OWN { "203.0.113." } else { self.own.as_str() };
        if said.contains(wrong) {
            findings.figures.add("wrong", 1.0);
            findings.note(format!("{} says of {name}: {said:?}", finder.name));
        }
        Ok(said)
    }

    /// A DHCP client names another server, which says other things.
    fn overwritten(&self, other: &Host, asked: &mut Asked, findings: &mut Findings) -> Result<()> {
        other.shell("ip addr add 10.1.0.200/24 dev eth0")?;
        let _server = name_server(other, "10.1.0.200", OTHER_ADDRESS)?;
        self.client.shell("printf '# Generated by NetworkManager\\nnameserver 10.1.0.200\\n' > /etc/resolv.conf")?;
        let start = Instant::now();
        wait_for("the responder in resolv.conf", LIMIT, || {
            let servers = self.client.shell("grep '^nameserver' /etc/resolv.conf || true")?;
            if servers.trim() == "nameserver 198.18.0.2" { Ok(()) } else { bail!("it says {servers:?}") }
        })?;
        findings.set("overwritten_back_ms", start.elapsed().as_secs_f64() * 1e3);
        self.ask_all("a DHCP client", "", OTHER_ADDRESS, asked, findings)
    }

    /// Nobody is kept from port 53 of all addresses.
    fn port(&self, findings: &mut Findings) -> Result<()> {
        let taken = self.client.shell("ss -Hlntu 'sport = :53' | grep -v '127\\.0\\.0\\.1:53' || true")?;
        findings.set("taken_ports", taken.lines().count() as f64);
        Ok(())
    }

    /// The agent and the responder, each alone, while a program asks.
    fn kill_each(&self, asked: &mut Asked, findings: &mut Findings) -> Result<()> {
        let glibc = self.finders.first().context("there are programs")?;
        let look = |what: &str, asked: &mut Asked, findings: &mut Findings| -> Result<()> {
            let said = self.ask(glibc, "", OWN, asked, findings)?;
            asked.own += 1;
            asked.found += usize::from(said.contains(&self.own));
            if !said.contains(&self.own) {
                findings.note(format!("{what}: {OWN} is not found: {said:?}"));
            }
            if !self.ask(glibc, "", FOREIGN, asked, findings)?.contains("203.0.113.") {
                findings.figures.add("foreign_failed", 1.0);
                findings.note(format!("{what}: {FOREIGN} is not found"));
            }
            Ok(())
        };
        let times = if is_long() { 4 } else { 1 };
        for _ in 0..KILLS {
            agent::kill(self.client)?;
            for _ in 0..times {
                look("without an agent", asked, findings)?;
            }
            agent::start_again(self.client)?;
            look("with the next agent", asked, findings)?;
            findings.figures.add("kills", 1.0);
        }
        for number in 0..KILLS {
            agent::kill_responder(self.client, number % 2 == 0)?;
            for _ in 0..times {
                look("after the responder was killed", asked, findings)?;
            }
            findings.figures.add("kills", 1.0);
        }
        Ok(())
    }
}
