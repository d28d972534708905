//! `containers`: containers use names and serve them, TCP and UDP, in each of the ways in which people connect
//! containers: bridges with published ports and the runtime's own translation rules, the host's network, and rootless
//! ones (slirp4netns, pasta).

mod engine;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};

use super::{Findings, Scenario, site};
use crate::agent::{self, Agents};
use crate::fabric::{Privilege, privilege_inside};
use crate::host::Host;
use crate::interface;
use crate::lab::Lab;
use crate::program::{Program, output_within, tail, wait_for};
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::server;
use engine::{Engine, User};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "containers",
    summary: "containers use and serve names by bridge, published port, host network, slirp4netns and pasta",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 4] = [
    bound("failed", Exactly(0.0)),
    bound("failed_ways", Exactly(0.0)),
    bound("ways", Exactly(13.0)),
    bound("attempts", AtLeast(8000.0)),
];

/// Exchanges of each way and protocol, one after the other.
const COUNT: &str = "20";
/// Connections of each way, some at once: enough for the kernels to set up some by themselves (docs/decisions/0035).
const MANY: &str = "600";
const AT_ONCE: &str = "16";
/// More than one segment, and more than a datagram's first fragment would be.
const BYTES: &str = "20000";
const DATAGRAM_BYTES: &str = "1000";
const LIMIT: Duration = Duration::from_secs(120);
/// The service of the other host.
const OUTSIDE: &str = "outside.shop";

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    for figure in ["failed", "failed_ways", "ways", "attempts"] {
        findings.set(figure, 0.0);
    }
    ensure!(privilege_inside() == Privilege::Root, "podman runs here for root alone");
    let lab = site::build("containers", site::BOTH, &["host", "other"], dir)?;
    let (host, other) = (lab.host("host")?, lab.host("other")?);
    // pasta takes the interface that the default route leads to.
    let gateway = interface::first_address(&lab, lab.host("router")?, 0, false)?.addr();
    host.shell(&format!("ip route add default via {gateway}"))?;
    let _agents = Agents::start(&lab)?;
    let _outside = server::echo(other, &["0.0.0.0:7".parse()?])?;
    agent::publish(other, OUTSIDE, "0.0.0.0:7", &[])?;
    let place = Place { host, other, engine: Engine::start(host)? };
    place.bridge(&lab, findings)?;
    place.host_network(findings)?;
    place.run_by_margay(findings)?;
    place.slirp4netns(findings)?;
    place.pasta(findings)
}

/// Exchanges by both protocols with port 7 of a service, and many short connections. `client` gives the command for
/// these words.
fn exchange(
    findings: &mut Findings,
    way: &str,
    service: &str,
    client: impl Fn(&[&str]) -> Result<Command>,
) -> Result<()> {
    findings.figures.add("ways", 1.0);
    let name = format!("{service}.sal.internal");
    let mut failed_all = 0;
    for what in [
        &["--count", COUNT, "--bytes", BYTES][..],
        &["--count", COUNT, "--bytes", DATAGRAM_BYTES, "--udp"],
        &["--count", MANY, "--parallel", AT_ONCE],
    ] {
        let words: Vec<&str> = ["attempt", &name, "7"].iter().chain(what).copied().collect();
        let output = output_within(&mut client(&words)?, LIMIT)?;
        let (tried, failed, why) = match server::outcome(output) {
            Ok(outcome) => (outcome.ok + outcome.failed(), outcome.failed(), format!("{:?}", outcome.errors)),
            Err(error) => (1, 1, format!("{error:#}")),
        };
        findings.figures.add("attempts", tried as f64);
        findings.figures.add("failed", failed as f64);
        failed_all += failed;
        if failed > 0 {
            findings.note(format!("{way}, {what:?}: {failed} failed: {why}"));
        }
    }
    findings.figures.add("failed_ways", f64::from(u8::from(failed_all > 0)));
    Ok(())
}

/// A host with containers, and another with an agent alone.
struct Place<'a> {
    host: &'a Host,
    other: &'a Host,
    engine: Engine<'a>,
}

impl Place<'_> {
    /// A service of the host is used by the other one.
    fn use_from_outside(&self, way: &str, service: &str, findings: &mut Findings) -> Result<()> {
        agent::await_instances(self.other, service, 1)?;
        exchange(findings, way, service, |words| self.other.traffic(words))
    }

    fn publish(&self, service: &str, listen: &str) -> Result<()> {
        agent::margay(self.host, ["service", "publish", &format!("{service}:7"), "--listen", listen]).map(drop)
    }

    /// A container that runs uses a service.
    fn use_from_inside(
        &self,
        way: &str,
        (user, container): (User, &str),
        service: &str,
        findings: &mut Findings,
    ) -> Result<()> {
        agent::await_instances(self.host, service, 1)?;
        exchange(findings, way, service, |words| self.engine.inside(user, container, words))
    }

    /// podman's own bridge. Netfilter's rules translate what comes for the published port, and masquerade what
    /// containers send.
    fn bridge(&self, lab: &Lab, findings: &mut Findings) -> Result<()> {
        let published = ["--network", "bridge", "--publish", "8001:7", "--publish", "8001:7/udp"];
        self.engine.start_echo(User::Root, "bridged", &published, 7)?;
        let bridged = (User::Root, "bridged");
        self.use_from_inside("a client behind a bridge", bridged, OUTSIDE, findings)?;
        self.publish("port.shop", "0.0.0.0:8001")?;
        self.use_from_outside("a published port, at every address", "port.shop", findings)?;
        let address = interface::first_address(lab, self.host, 0, false)?.addr();
        self.publish("address.shop", &format!("{address}:8001"))?;
        self.use_from_outside("a published port, at the host's address", "address.shop", findings)?;
        let address = self.engine.address("bridged")?;
        self.publish("inside.shop", &format!("{address}:7"))?;
        self.use_from_outside("the container's own address", "inside.shop", findings)?;
        self.engine.start_echo(User::Root, "second", &["--network", "bridge"], 7)?;
        let second = (User::Root, "second");
        self.use_from_inside("two containers of one host, by a published port", second, "port.shop", findings)?;
        self.use_from_inside("two containers of one host, by the address", second, "inside.shop", findings)
    }

    fn host_network(&self, findings: &mut Findings) -> Result<()> {
        self.engine.start_echo(User::Root, "hosted", &["--network", "host"], 8002)?;
        self.use_from_inside("a client in the host's network", (User::Root, "hosted"), OUTSIDE, findings)?;
        self.publish("hosted.shop", "0.0.0.0:8002")?;
        self.use_from_outside("a server in the host's network", "hosted.shop", findings)
    }

    /// The container is served because it listens, in its own network namespace.
    fn run_by_margay(&self, findings: &mut Findings) -> Result<()> {
        let podman = self.engine.echo(User::Root, "run", &["--network", "bridge"], 7, false)?;
        let margay = ["margay", "run", "--service", "run.shop:7", "--"].map(Into::into);
        let _container = self.host.spawn("run", margay.into_iter().chain(podman))?;
        self.use_from_outside("a container that `margay run` starts", "run.shop", findings)
    }

    /// What podman gives containers of users: a process carries their packets, another one listens for them.
    fn slirp4netns(&self, findings: &mut Findings) -> Result<()> {
        let options = ["--network", "slirp4netns", "--publish", "8003:7", "--publish", "8003:7/udp"];
        self.engine.start_echo(User::Somebody, "rootless", &options, 7)?;
        let rootless = (User::Somebody, "rootless");
        self.use_from_inside("a rootless client, slirp4netns", rootless, OUTSIDE, findings)?;
        self.publish("rootless.shop", "0.0.0.0:8003")?;
        self.use_from_outside("a rootless server, slirp4netns", "rootless.shop", findings)
    }

    /// What newer versions of podman give them.
    fn pasta(&self, findings: &mut Findings) -> Result<()> {
        exchange(findings, "a rootless client, pasta", OUTSIDE, |words| self.engine.pasta(&[], words))?;
        let server = ["--tcp-ports", "8004:7", "--udp-ports", "8004:7"];
        let server = self.engine.pasta(&server, &["echo", "--listen", "0.0.0.0:7"])?;
        let server = Program::start(server, &self.host.dir.join("pasta.log"))?;
        // pasta takes connections before.
        wait_for("the server that pasta connects", LIMIT, || {
            ensure!(server.log().contains("ready"), "{}", tail(&server.log()));
            Ok(())
        })?;
        self.publish("pasta.shop", "0.0.0.0:8004")?;
        self.use_from_outside("a rootless server, pasta", "pasta.shop", findings)
    }
}
