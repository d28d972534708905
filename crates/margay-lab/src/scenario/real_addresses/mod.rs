//! `real-addresses`: which address servers see of their clients: on any address of both families, of one, on one
//! address, on the loopback, with a socket for each family. A client that the server's network has an address of must
//! be seen by that one.

mod bound;
mod programs;

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::{Findings, Scenario, pair};
use crate::agent::{self, Agents};
use crate::host::Host;
use crate::interface;
use crate::lab::Lab;
use crate::program::Program;
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::topology::Topology;
use programs::{KINDS, Kind};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "real-addresses",
    summary: "servers in five languages, on every way to listen, tell clients of both families which address they see",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 4] = [
    bound("client_address_right", Exactly(1.0)),
    bound("failed", Exactly(0.0)),
    // Of those that are bound to a card: each is refused at once, with the reason.
    bound("refused", Exactly(10.0)),
    // With those programs alone that every machine for tests has.
    bound("cases", AtLeast(40.0)),
];

/// A network of each family, so that a client has one address that the server's network knows.
const TOPOLOGY: &str = r#"
[subnet.four]
v4 = "10.1.0.0/24"

[subnet.six]
v6 = "fd01::/64"

[host.router]
role = "router"
links = [{ subnet = "four" }, { subnet = "six" }]

[host.server]
role = "agent"
links = [{ subnet = "four" }, { subnet = "six" }]

[host.client4]
role = "agent"
links = [{ subnet = "four" }]

[host.client6]
role = "agent"
links = [{ subnet = "six" }]
"#;

const PORT_FIRST: u16 = 8000;
/// Port that clients use.
const PORT: u16 = 80;

/// A transport protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl Protocol {
    const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

/// A way to listen.
struct Way {
    name: &'static str,
    addresses: Vec<String>,
    /// Families of clients, IPv4 and IPv6, that are to be seen by their real addresses.
    real: [bool; 2],
    /// On the loopback, where clients have to be allowed.
    is_loopback: bool,
    kinds: &'static [Kind],
    protocols: &'static [Protocol],
}

/// Those that can have more than one.
const SEVERAL_SOCKETS: &[Kind] = &[Kind::Nginx, Kind::Python];
const PYTHON: &[Kind] = &[Kind::Python];
const TCP: &[Protocol] = &[Protocol::Tcp];
const BOTH: &[Protocol] = &[Protocol::Tcp, Protocol::Udp];

impl Way {
    fn new(name: &'static str, addresses: &[&str], real: [bool; 2]) -> Self {
        let addresses = addresses.iter().map(|address| (*address).to_owned()).collect();
        Self { name, addresses, real, is_loopback: false, kinds: &KINDS, protocols: BOTH }
    }

    fn all(v4: IpAddr, v6: IpAddr) -> Vec<Self> {
        let (v4, v6) = (v4.to_string(), v6.to_string());
        let on_loopback =
            |name, address, real| Self { is_loopback: true, protocols: TCP, ..Self::new(name, &[address], real) };
        vec![
            Self::new("any", &["::"], [true, true]),
            Self::new("any4", &["0.0.0.0"], [true, false]),
            Self { kinds: SEVERAL_SOCKETS, ..Self::new("twins", &["0.0.0.0", "only6|::"], [true, true]) },
            Self::new("one4", &[&v4], [true, false]),
            Self::new("one6", &[&v6], [false, true]),
            Self { kinds: SEVERAL_SOCKETS, ..Self::new("cards", &[&v4, &v6], [true, true]) },
            on_loopback("loopback4", "127.0.0.1", [true, false]),
            on_loopback("loopback6", "::1", [false, true]),
            Self { kinds: PYTHON, ..on_loopback("mptcp4", "mptcp|127.0.0.1", [true, false]) },
            Self { kinds: PYTHON, protocols: TCP, ..Self::new("mptcp", &["mptcp|::"], [true, true]) },
        ]
    }
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    for figure in ["cases", "right", "refused", "programs_missing", "failed"] {
        findings.set(figure, 0.0);
    }
    let lab = Lab::build(Topology::parse("real-addresses", TOPOLOGY)?, dir)?;
    programs::write_all(dir)?;
    let _agents = Agents::start(&lab)?;
    let server = lab.host("server")?;
    pair::demand_kernel(&[server], findings)?;
    let clients = [client(&lab, "client4", false)?, client(&lab, "client6", true)?];
    let stage = Stage { dir: dir.to_owned(), router: lab.host("router")?, server, clients };
    let own = |at, v6| interface::first_address(&lab, server, at, v6).map(|address| address.addr());
    let ways = Way::all(own(0, false)?, own(1, true)?);
    let mut port = PORT_FIRST;
    for kind in KINDS {
        if !kind.is_here() {
            findings.note(format!("{} is not installed, and was not tried", kind.name()));
            findings.figures.add("programs_missing", 1.0);
            continue;
        }
        for way in ways.iter().filter(|way| way.kinds.contains(&kind)) {
            for protocol in kind.protocols().iter().filter(|protocol| way.protocols.contains(protocol)) {
                port += 1;
                let what = format!("{} on {} by {}", kind.name(), way.addresses.join(" and "), protocol.name());
                pair::attempt_part(&what, findings, |findings| stage.attempt(kind, way, *protocol, port, findings));
            }
        }
    }
    for part in [Stage::refuse_servers, Stage::refuse_clients] {
        pair::attempt_part("sockets that are bound to a card", findings, |findings| part(&stage, findings));
    }
    let (cases, right) = (findings.figures.get("cases"), findings.figures.get("right"));
    findings.set("client_address_right", if cases > 0.0 { right / cases } else { 0.0 });
    Ok(())
}

fn client<'a>(lab: &'a Lab, name: &str, v6: bool) -> Result<(&'a Host, IpAddr)> {
    let host = lab.host(name)?;
    Ok((host, interface::first_address(lab, host, 0, v6)?.addr()))
}

struct Stage<'a> {
    dir: PathBuf,
    router: &'a Host,
    server: &'a Host,
    /// With the address that the server's network knows: of IPv4, and of IPv6.
    clients: [(&'a Host, IpAddr); 2],
}

impl Stage<'_> {
    /// Serves a name in one way, and lets both clients ask.
    fn attempt(&self, kind: Kind, way: &Way, protocol: Protocol, port: u16, findings: &mut Findings) -> Result<()> {
        let service = format!("{}-{}-{}.shop", kind.name(), way.name, protocol.name());
        let _program = self.serve(kind, way, protocol, port, &service)?;
        for (at, (client, address)) in self.clients.iter().enumerate() {
            let seen = self.ask(client, &service, protocol)?;
            if !way.real[at] {
                continue;
            }
            for seen in seen {
                findings.figures.add("cases", 1.0);
                if seen == *address {
                    findings.figures.add("right", 1.0);
                } else {
                    findings.note(format!("{service} sees {seen} of {}, which is {address}", client.name()));
                }
            }
        }
        Ok(())
    }

    /// Serves a name in one way, until the program is dropped.
    fn serve(&self, kind: Kind, way: &Way, protocol: Protocol, port: u16, service: &str) -> Result<Program> {
        let options: &[&str] = if way.is_loopback { &["--allow", "authority"] } else { &[] };
        let program = self.start(kind, &way.addresses, protocol, port, (service, options))?;
        agent::await_instances(self.router, service, 1).with_context(|| program.log())?;
        Ok(program)
    }

    fn start(
        &self,
        kind: Kind,
        addresses: &[String],
        protocol: Protocol,
        port: u16,
        (service, options): (&str, &[&str]),
    ) -> Result<Program> {
        let offer = format!("{service}:{PORT}:{port}");
        let words = [&["margay", "run", "--service", &offer], options, &["--"]].concat();
        let mut argv: Vec<String> = words.into_iter().map(str::to_owned).collect();
        argv.extend(kind.argv(&self.dir, self.server, protocol, port, addresses)?);
        self.server.spawn(service, argv)
    }

    /// What the server sees of a client that asks at each of the name's addresses.
    fn ask(&self, client: &Host, service: &str, protocol: Protocol) -> Result<Vec<IpAddr>> {
        let said = self.question(client, service, protocol, "")?;
        let seen: Vec<IpAddr> =
            said.lines().filter_map(|line| line.parse().ok()).map(|seen: IpAddr| seen.to_canonical()).collect();
        if seen.len() != 2 {
            bail!("{service} told {} this: {said}", client.name());
        }
        Ok(seen)
    }

    /// What a client prints that asks in this way.
    fn question(&self, client: &Host, service: &str, protocol: Protocol, way: &str) -> Result<String> {
        let script = self.dir.join("client.py").display().to_string();
        let name = format!("{service}.sal.internal");
        client.run(["python3", &script, &name, &PORT.to_string(), protocol.name(), way])
    }
}
