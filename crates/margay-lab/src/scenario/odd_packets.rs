//! `odd-packets`: everything of `odd-hosts` again with flows that live long enough to go direct, and what TCP does
//! seldom: ECN marks, the largest window scale, small segments, Fast Open, urgent data, closing in the same moment; a
//! listener on loopback only; programs of the same hosts that use flow ports without Margay; another tc program on the
//! network card.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use super::odd_hosts::{self, Trials, set};
use super::{Findings, Scenario, pair};
use crate::agent;
use crate::host::Host;
use crate::lab::Lab;
use crate::observe::{self, Passing};
use crate::program::{Program, output_within, wait_for};
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::server::{self, Nginx, fetch, noise, sha256};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "odd-packets",
    summary: "odd-hosts again on the direct path; ECN, window scale, MSS, Fast Open, urgent data, simultaneous close, \
              other tc",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 5] = [
    bound("failed", Exactly(0.0)),
    bound("combinations", AtLeast(70.0)),
    bound("attempts", AtLeast(350.0)),
    // Otherwise all of it went another way, and proves nothing about this one.
    bound("direct_packets_forwarded", AtLeast(1000.0)),
    bound("simultaneous_closes", AtLeast(1.0)),
];

/// Each connection talks, is silent for longer than it takes to go direct, and talks again.
const LASTING: [&str; 4] = ["--rounds", "3", "--round-pause-ms", "25"];
const LONG_BYTES: &str = "300000";
const FILE_BYTES: usize = 1_000_000;
const FAST_OPENS: usize = 5;
const URGENT: &str = "20";
const CLOSES: &str = "10";
const CLOSING_PORT: &str = "18";
const LIMIT: std::time::Duration = std::time::Duration::from_secs(60);
/// A flow port, and the whole range of them.
const PLAIN_PORT: u16 = 62_000;
const ALL_FLOW_PORTS: &str = "61000 65535";
/// Flow ports of both ends: nobody else uses a pair of them.
const FLOW_PORTS: &str = "meta l4proto { tcp, udp } th sport 61000-65535 th dport 61000-65535";

/// A host so far away that two ends of one connection cross.
const FAR: &str = r#"
[host.far]
role = "agent"
links = [{ subnet = "core", delay_ms = 20 }]
"#;

/// What is tried beyond `odd-hosts`.
type Part = fn(&Lab, &mut Trials) -> Result<()>;

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = odd_hosts::build("odd-packets", FAR, dir)?;
    let _echoes = odd_hosts::start(&lab)?;
    let (client, server, hill) = (lab.host("client")?, lab.host("server")?, lab.host("hill")?);
    pair::demand_kernel(&[client, server], findings)?;
    // This gateway lies between many of the hosts, and has no part in Margay.
    observe::count(hill, "direct", Passing::In, FLOW_PORTS)?;
    let mut trials = Trials { findings, extra: &LASTING };
    odd_hosts::try_all(&lab, &mut trials)?;
    let parts: [(&str, Part); 9] = [
        ("a listener on loopback", loopback),
        ("ECN", congestion_marks),
        ("window scale 14", window_scale),
        ("MSS 536", small_segments),
        ("Fast Open", fast_open),
        ("urgent data", urgent),
        ("simultaneous close", close_together),
        ("plain traffic on flow ports", plain),
        ("another tc program", other_tc),
    ];
    for (what, part) in parts {
        // One that cannot be tried does not keep the others from it.
        if let Err(error) = part(&lab, &mut trials) {
            trials.findings.note(format!("{what}: {error:#}"));
            trials.findings.figures.add("failed", 1.0);
        }
    }
    findings.set("direct_packets_forwarded", counted(hill, "direct")?);
    Ok(())
}

fn counted(host: &Host, name: &str) -> Result<f64> {
    Ok(observe::counts(host)?.get(name).copied().unwrap_or_default().packets)
}

fn nstat(host: &Host, name: &str) -> Result<f64> {
    Ok(observe::nstat(host)?.get(name).copied().unwrap_or_default())
}

/// TCP and UDP by both families, many bytes.
fn both(from: &Host, service: &str, options: &[&str], what: &str, trials: &mut Trials) -> Result<()> {
    for v6 in [false, true] {
        let long: Vec<&str> = ["--bytes", LONG_BYTES].iter().chain(options).copied().collect();
        trials.tries(from, service, v6, &long, what)?;
        trials.tries(from, service, v6, &["--udp"], what)?;
    }
    Ok(())
}

/// The listener is bound to an address that nobody else can reach.
fn loopback(lab: &Lab, trials: &mut Trials) -> Result<()> {
    let (client, six) = (lab.host("client")?, lab.host("jumbo2")?);
    // Port 7 of all addresses is taken there by other services; here it is free on loopback.
    let far = lab.host("far")?;
    let _four = server::echo(far, &["127.0.0.1:7".parse()?])?;
    agent::publish(far, "loop-four.shop", "127.0.0.1:7", &["--allow", "authority"])?;
    trials.tries(client, "loop-four", false, &["--bytes", LONG_BYTES], "a listener on 127.0.0.1")?;
    trials.tries(six, "loop-four", true, &["--udp"], "a listener on 127.0.0.1")?;
    let _six = server::echo(far, &["[::1]:7".parse()?])?;
    agent::publish(far, "loop-six.shop", "[::1]:7", &["--allow", "authority"])?;
    trials.tries(six, "loop-six", false, &["--bytes", LONG_BYTES], "a listener on ::1")?;
    // The kernel lets no datagrams into ::1 from outside: what sends one is told at once.
    let (_, to) = agent::virtual_addresses(client, "loop-six.shop")?;
    let outcome = server::attempt(client, &to, 7, &["--count", "1", "--udp"])?;
    let is_refused = outcome.errors.keys().all(|error| error.contains("refused"));
    ensure!(outcome.ok == 0 && is_refused, "a datagram for ::1 was not refused: {outcome:?}");
    Ok(())
}

/// Programs of two hosts that have a direct path talk to each other at flow ports as they would without Margay.
fn plain(lab: &Lab, trials: &mut Trials) -> Result<()> {
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    trials.tries(client, "any-server", false, &[], "before plain traffic")?;
    trials.tries(client, "any-server", true, &["--udp"], "before plain traffic")?;
    let link = server.plan.links.first().context("the server has a link")?;
    let (v4, v6) = (link.v4.context("with IPv4")?.to_string(), link.v6.context("with IPv6")?.to_string());
    let _plain =
        server::echo(server, &[format!("0.0.0.0:{PLAIN_PORT}").parse()?, format!("[::]:{PLAIN_PORT}").parse()?])?;
    let count = FAST_OPENS.to_string();
    // Ephemeral ports of no flow, and flow ports; handshakes that the listener remembers, and those that it does not.
    for (ports, cookies) in [("32768 60999", "1"), (ALL_FLOW_PORTS, "1"), (ALL_FLOW_PORTS, "2")] {
        set(&[client], &["ip_local_port_range"], ports)?;
        set(&[server], &["tcp_syncookies"], cookies)?;
        for to in [&v4, &v6] {
            for protocol in [&[][..], &["--udp"][..]] {
                let options: Vec<&str> = ["--count", &count].iter().chain(&LASTING).chain(protocol).copied().collect();
                let outcome = server::attempt(client, to, PLAIN_PORT, &options)?;
                trials.judge(&format!("plain to {to}, ports {ports}, SYN cookies {cookies}, {protocol:?}"), &outcome);
            }
            let outcome = server::attempt(client, to, PLAIN_PORT + 1, &["--count", "1"])?;
            let is_refused = outcome.errors.keys().all(|error| error.contains("refused"));
            ensure!(outcome.ok == 0 && is_refused, "a port where nobody listens did not refuse: {outcome:?}");
        }
    }
    set(&[server], &["tcp_syncookies"], "1")?;
    set(&[client], &["ip_local_port_range"], "32768 60999")
}

/// A router on the way marks packets of direct flows; the receiver must see it, and the sender be told.
fn congestion_marks(lab: &Lab, trials: &mut Trials) -> Result<()> {
    let (jumbo, server, hill) = (lab.host("jumbo")?, lab.host("server")?, lab.host("hill")?);
    set(&[jumbo, server], &["tcp_ecn"], "1")?;
    hill.run([
        "nft",
        "add table inet marks; add chain inet marks forward { type filter hook forward priority mangle; }; add rule \
         inet marks forward ip protocol tcp th dport 61000-65535 ip ecn != not-ect numgen random mod 10 0 ip ecn set \
         ce",
    ])?;
    let before = (nstat(server, "IpExtInCEPkts")?, nstat(jumbo, "TcpExtTCPDeliveredCE")?);
    both(jumbo, "any-server", &[], "ECN", trials)?;
    let (seen, told) = (nstat(server, "IpExtInCEPkts")? - before.0, nstat(jumbo, "TcpExtTCPDeliveredCE")? - before.1);
    hill.run(["nft", "delete table inet marks"])?;
    set(&[jumbo, server], &["tcp_ecn"], "2")?;
    trials.findings.set("ecn_marks_seen", seen);
    ensure!(seen > 0.0, "the receiver saw no mark");
    ensure!(told > 0.0, "the sender was told of no mark");
    Ok(())
}

/// With receive buffers of a gibibyte, both ends ask for the largest scale that there is.
fn window_scale(lab: &Lab, trials: &mut Trials) -> Result<()> {
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    let old = client.shell("cat /proc/sys/net/ipv4/tcp_rmem")?;
    set(&[client, server], &["tcp_rmem"], "4096 131072 1073741824")?;
    let syns = "tcp flags & syn == syn tcp option window count 14";
    observe::count(client, "scale_out", Passing::Out, &format!("oifname sal0 {syns}"))?;
    observe::count(client, "scale_in", Passing::In, &format!("iifname sal0 {syns}"))?;
    both(client, "any-server", &[], "window scale 14", trials)?;
    set(&[client, server], &["tcp_rmem"], old.trim())?;
    let (sent, received) = (counted(client, "scale_out")?, counted(client, "scale_in")?);
    ensure!(sent > 0.0 && received > 0.0, "scale 14 was in {sent} SYNs sent and in {received} received");
    Ok(())
}

/// As of a host behind the narrowest link that there may be.
fn small_segments(lab: &Lab, trials: &mut Trials) -> Result<()> {
    let client = lab.host("client")?;
    observe::count(client, "small", Passing::Out, "oifname sal0 tcp flags & syn == syn tcp option maxseg size <= 536")?;
    for v6 in [false, true] {
        let options = ["--bytes", LONG_BYTES, "--mss", "536"];
        trials.tries(client, "any-server", v6, &options, "MSS 536")?;
    }
    let small = counted(client, "small")?;
    ensure!(small > 0.0, "no SYN had a small MSS");
    Ok(())
}

/// curl sends its request in the SYN, once it has the server's cookie.
fn fast_open(lab: &Lab, trials: &mut Trials) -> Result<()> {
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    // For every listener, whether it asks or not.
    set(&[client, server], &["tcp_fastopen"], "1027")?;
    let nginx = Nginx::start(server, &["0.0.0.0:80"])?;
    nginx.put("file", &noise(FILE_BYTES, 1))?;
    agent::publish(server, "web.shop", "0.0.0.0:80", &[])?;
    let expected = sha256(client, &nginx.root.join("file"))?;
    let before = nstat(client, "TcpExtTCPFastOpenActive")?;
    for _ in 0..FAST_OPENS {
        let got = fetch(client, &["--tcp-fastopen"], "http://web.shop.sal.internal/file")?;
        trials.findings.figures.add("attempts", 1.0);
        if !got.is(&expected) {
            trials.findings.figures.add("failed", 1.0);
            trials.findings.note(format!("Fast Open: {:?}", got.error));
        }
    }
    trials.findings.figures.add("combinations", 1.0);
    // None is right too: the option may be taken out, and TCP does without.
    trials.findings.set("fast_opens", nstat(client, "TcpExtTCPFastOpenActive")? - before);
    set(&[client, server], &["tcp_fastopen"], "1")
}

fn urgent(lab: &Lab, trials: &mut Trials) -> Result<()> {
    let client = lab.host("client")?;
    let (four, six) = agent::virtual_addresses(client, "any-server.shop")?;
    for to in [four, six] {
        let mut command = client.traffic(["urgent", &to, "7", "--count", URGENT])?;
        let outcome = server::outcome(output_within(&mut command, LIMIT)?)?;
        trials.judge(&format!("urgent data to {to}"), &outcome);
    }
    Ok(())
}

/// Both ends of a connection are sent before either arrives; both hosts wait in TIME-WAIT then, as none does otherwise.
fn close_together(lab: &Lab, trials: &mut Trials) -> Result<()> {
    let (far, server) = (lab.host("far")?, lab.host("server")?);
    let port = format!("0.0.0.0:{CLOSING_PORT}");
    let program =
        Program::start(server.traffic(["closing-server", "--listen", &port])?, &server.dir.join("closing.log"))?;
    wait_for("the server that closes", LIMIT, || {
        if program.log().contains("ready") { Ok(()) } else { bail!("it is not ready: {}", program.log()) }
    })?;
    agent::publish(server, "closing.shop", &port, &[])?;
    let (to, _) = agent::virtual_addresses(far, "closing.shop")?;
    for host in [far, server] {
        observe::count_virtual_resets(host)?;
    }
    let mut command = far.traffic(["closing", &to, CLOSING_PORT, "--count", CLOSES])?;
    trials.judge("simultaneous close", &server::outcome(output_within(&mut command, LIMIT)?)?);
    let waiting = |host: &Host| -> Result<usize> {
        let filter = format!("sport = :{CLOSING_PORT} or dport = :{CLOSING_PORT}");
        Ok(host.run(["ss", "-Htan", "state", "time-wait", &filter])?.lines().count())
    };
    trials.findings.set("simultaneous_closes", waiting(far)?.min(waiting(server)?) as f64);
    let (resets, places) = observe::virtual_resets(&[far, server])?;
    ensure!(resets == 0.0, "there were {resets} resets: {places}");
    Ok(())
}

/// A filter of somebody else's, which mirrors pings to a device: it goes on doing so, and flows do not mind.
fn other_tc(lab: &Lab, trials: &mut Trials) -> Result<()> {
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    const FILTERS: &str = "tc filter show dev eth0 ingress; tc filter show dev eth0 egress";
    client.shell(
        "ip link add mirror0 type bridge && ip link set mirror0 up && tc qdisc add dev eth0 clsact
         for way in ingress egress; do
             tc filter add dev eth0 $way protocol ip prio 1 u32 match ip protocol 1 0xff action mirred egress mirror dev mirror0
         done",
    )?;
    let before = client.shell(FILTERS)?;
    both(client, "any-server", &[], "another tc program", trials)?;
    client.run(["ping", "-c", "3", "-i", "0.2", &pair::address(server)?])?;
    let text = client.run(["tc", "-s", "-j", "filter", "show", "dev", "eth0", "ingress"])?;
    let mirrored = find_number(&serde_json::from_str(&text).context("tc did not answer with JSON")?, "packets");
    trials.findings.set("pings_mirrored", mirrored);
    ensure!(mirrored >= 3.0, "the other program saw {mirrored} of 3 pings");
    let after = client.shell(FILTERS)?;
    ensure!(before == after, "the filters of others are not what they were: {after}");
    Ok(())
}

/// The largest number of this name, wherever it is.
fn find_number(value: &serde_json::Value, name: &str) -> f64 {
    let inner = match value {
        serde_json::Value::Array(items) => items.iter().map(|item| find_number(item, name)).fold(0.0, f64::max),
        serde_json::Value::Object(fields) => fields.values().map(|item| find_number(item, name)).fold(0.0, f64::max),
        _ => 0.0,
    };
    value.get(name).and_then(serde_json::Value::as_f64).unwrap_or_default().max(inner)
}
