//! `virtual-addresses`: somebody on the link who holds no key sends to a host's virtual addresses, and from virtual
//! ones; with eBPF at the cards and without. Containers behind a bridge of the host reach names all the same.

use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use margay_core::Ranges;
use serde_json::Value;

use super::{Findings, Scenario, pair};
use crate::agent::{self, Agents};
use crate::host::Host;
use crate::interface;
use crate::lab::Lab;
use crate::observe::{self, Passing};
use crate::program::{Program, wait_for};
use crate::report::Limit::Exactly;
use crate::report::{Bound, bound};
use crate::topology::Topology;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "virtual-addresses",
    summary: "a stranger on the link sends to virtual addresses and from them, with eBPF and without; a container may",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 6] = [
    bound("accepted", Exactly(0.0)),
    bound("answered", Exactly(0.0)),
    bound("leaked", Exactly(0.0)),
    // In each of two ways to drop them.
    bound("attacks", Exactly(10.0)),
    bound("honest_failed", Exactly(0.0)),
    bound("inside_failed", Exactly(0.0)),
];

const TOPOLOGY: &str = r#"
[subnet.site]
v4 = "10.1.0.0/24"
v6 = "fd01::/64"

[host.router]
role = "router"
links = [{ subnet = "site" }]

[host.ebpf]
role = "agent"
links = [{ subnet = "site" }]

[host.nftables]
role = "agent"
links = [{ subnet = "site" }]

[host.stranger]
role = "plain"
links = [{ subnet = "site" }]
"#;

const PORT: u16 = 9;
/// Datagrams of an attack that fit a packet; after each comes one that goes in fragments.
const DATAGRAMS: usize = 20;
const LIMIT: Duration = Duration::from_secs(15);
/// Asks the responder at its virtual address for the address of a host's service, and says how many of the first
/// bytes of an answer came within the time.
fn question(host: &Host) -> String {
    let (name, responder) = (host.name(), Ranges::USUAL.responder_v4());
    format!(
        r"exec 3<>/dev/udp/{responder}/53
printf '\22\64\1\0\0\1\0\0\0\0\0\0\{:o}{name}\4shop\3sal\10internal\0\0\1\0\1' >&3
timeout 2 head -c 12 <&3 | wc -c",
        name.len()
    )
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    for bound in BOUNDS {
        findings.set(bound.figure, 0.0);
    }
    let lab = Lab::build(Topology::parse("virtual-addresses", TOPOLOGY)?, dir)?;
    let hosts = [lab.host("ebpf")?, lab.host("nftables")?];
    agent::keep_encapsulated(hosts[1])?;
    let _agents = Agents::start(&lab)?;
    pair::demand_kernel(&hosts[..1], findings)?;
    let sinks = [Sink::start(hosts[0])?, Sink::start(hosts[1])?];
    for host in hosts {
        agent::publish(host, &format!("{}.shop", host.name()), &format!("[::]:{PORT}"), &[])?;
    }
    let stages = [(0, 1), (1, 0)].map(|(this, other)| Stage {
        lab: &lab,
        host: hosts[this],
        sink: &sinks[this],
        other: hosts[other],
        others: &sinks[other],
    });
    // First all that must not arrive, so that nothing else is on its way.
    for stage in &stages {
        stage.attack_all(findings).with_context(|| stage.host.name().to_owned())?;
    }
    for stage in &stages {
        stage.use_names(findings).with_context(|| stage.host.name().to_owned())?;
    }
    Ok(())
}

/// A host that is attacked, what counts there, and another whose service it uses.
struct Stage<'a> {
    lab: &'a Lab,
    host: &'a Host,
    sink: &'a Sink,
    other: &'a Host,
    others: &'a Sink,
}

/// Counts the datagrams that a program is given.
struct Sink(Program);

impl Sink {
    fn start(host: &Host) -> Result<Self> {
        // Both families.
        let command = host.traffic(["sink", "--listen", &format!("[::]:{PORT}")])?;
        let sink = Self(Program::start(command, &host.dir.join("sink.log"))?);
        wait_for("a sink", LIMIT, || {
            ensure!(sink.0.log().contains("ready"), "it does not listen");
            Ok(())
        })?;
        Ok(sink)
    }

    fn count(&self) -> f64 {
        let log = self.0.log();
        let slices = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        slices.filter_map(|slice| slice["count"].as_f64()).sum()
    }
}

impl Stage<'_> {
    fn at(&self, host: &Host, v6: bool) -> Result<IpAddr> {
        Ok(interface::first_address(self.lab, host, 0, v6)?.addr())
    }

    fn attack_all(&self, findings: &mut Findings) -> Result<()> {
        let stranger = self.lab.host("stranger")?;
        let (own, strangers) =
            ([false, true].map(|v6| self.at(self.host, v6)), [false, true].map(|v6| self.at(stranger, v6)));
        let ([own_v4, own_v6], [stranger_v4, stranger_v6]) = (own, strangers);
        let (own, strangers) = ([own_v4?, own_v6?], [stranger_v4?, stranger_v6?]);
        stranger.shell(&format!(
            "ip address replace 198.19.64.7/32 dev eth0; ip address replace fd5a:4c00::8000:1/128 dev eth0 nodad
             ip route replace 198.18.0.0/15 via {0} src {2}; ip route replace fd5a:4c00::/32 via {1} src {3}
             ip route replace {0}/32 dev eth0 src 198.19.64.7; ip route replace {1}/128 dev eth0 src fd5a:4c00::8000:1",
            own[0], own[1], strangers[0], strangers[1]
        ))?;
        let virtual_ones = [IpAddr::V4(Ranges::USUAL.host_v4()), IpAddr::V6(Ranges::USUAL.host_v6())];
        // What has a virtual source is sent to real addresses, where plain datagrams would be taken.
        for to in virtual_ones.into_iter().chain(own) {
            attack(stranger, self.host, to, "margay_kernel_drop_virtual_ingress_total")?;
            findings.figures.add("attacks", 1.0);
        }
        let accepted = self.sink.count();
        findings.figures.add("accepted", accepted);
        let answered = stranger.run(["bash", "-c", &question(self.host)])?;
        findings.figures.add("answered", answered.trim().parse::<f64>().context("no count")?);

        // Even where the routes of a host say so, nothing virtual leaves by a card.
        observe::count(stranger, "leaked", Passing::In, "ip daddr 198.18.0.0/15")?;
        self.host.shell(&format!("ip route add 198.18.99.0/24 via {}", strangers[0]))?;
        let to = IpAddr::from([198, 18, 99, 1]);
        attack(self.host, self.host, to, "margay_kernel_drop_virtual_egress_total")?;
        findings.figures.add("attacks", 1.0);
        let leaked = observe::counts(stranger)?.get("leaked").copied().unwrap_or_default();
        findings.figures.add("leaked", leaked.packets);
        Ok(())
    }

    /// The host, and a container of it, use another's service.
    fn use_names(&self, findings: &mut Findings) -> Result<()> {
        let name = format!("{}.shop", self.other.name());
        agent::await_instances(self.host, &name, 1)?;
        let script = format!("echo x > /dev/udp/{name}.sal.internal/{PORT}");
        let honest = await_datagrams(self.others, || self.host.run(["bash", "-c", &script]));
        note_failure(findings, "honest_failed", honest);
        let (service_v4, _) = agent::virtual_addresses(self.host, &name)?;
        let inside = try_inside(self.host, &question(self.other), self.others, &service_v4);
        note_failure(findings, "inside_failed", inside);
        Ok(())
    }
}

fn note_failure(findings: &mut Findings, figure: &str, result: Result<()>) {
    if let Err(error) = result {
        findings.figures.add(figure, 1.0);
        findings.note(format!("{error:#}"));
    }
}

/// Sends, and waits until the host has dropped all of it. Where nftables drops what would leave, its sender hears of
/// it.
fn attack(from: &Host, host: &Host, to: IpAddr, counter: &str) -> Result<()> {
    let before = agent::metric(host, counter)?;
    let to_port = format!("/dev/udp/{to}/{PORT}");
    from.shell(&format!(
        "bash -c 'for n in $(seq {DATAGRAMS}); do echo x > {to_port}; head -c 3000 /dev/zero > {to_port}; done' \
         2>/dev/null || true"
    ))?;
    wait_for("drops", LIMIT, || {
        let dropped = agent::metric(host, counter)? - before;
        // The second of each pair counts by its fragments, where they are counted.
        ensure!(dropped >= 2.0 * DATAGRAMS as f64, "{} has dropped {dropped} of what went to {to}", host.name());
        Ok(())
    })
}

/// Sends until the sink has more than before.
fn await_datagrams(sink: &Sink, send: impl Fn() -> Result<String>) -> Result<()> {
    let before = sink.count();
    wait_for("datagrams that may come", LIMIT, || {
        send()?;
        ensure!(sink.count() > before, "none came");
        Ok(())
    })
}

/// A container behind a bridge, as its runtime makes one, that has come after the agent: it resolves names, and sends
/// to them.
fn try_inside(host: &Host, question: &str, sink: &Sink, service: &str) -> Result<()> {
    let holder = host.spawn("container", ["unshare", "--net", "sleep", "infinity"])?;
    let pid = holder.pid();
    host.shell(&format!(
        "ip link add docker0 type bridge; ip address add 172.17.0.1/16 dev docker0; ip link set docker0 up
         until ip link add port0 type veth peer name eth0 netns {pid} && nsenter --target {pid} --net ip link show eth0; do
             ip link del port0; sleep 0.1; done
         ip link set port0 master docker0 up; echo 1 > /proc/sys/net/ipv4/ip_forward
         nsenter --target {pid} --net sh -ec 'ip address add 172.17.0.2/16 dev eth0; ip link set eth0 up; ip route add default via 172.17.0.1'"
    ))?;
    let inside = |script: &str| {
        host.run(["nsenter", "--target", &pid.to_string(), "--net", "bash", "-c", script])
            .map(|said| said.trim().to_owned())
    };
    wait_for("an answer of the responder to a container", LIMIT, || {
        let bytes = inside(question)?;
        ensure!(bytes == "12", "{bytes} bytes came");
        Ok(())
    })?;
    await_datagrams(sink, || inside(&format!("echo x > /dev/udp/{service}/{PORT}")))
}
