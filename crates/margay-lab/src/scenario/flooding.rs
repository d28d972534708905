//! `flooding`: hosts that tell their segment which names they serve are asked alone, counted from outside; what is
//! withdrawn is gone, what is forged is not believed, and what comes to nothing is asked of all.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use margay_core::key::HostSecret;
use margay_core::name::Name;
use margay_core::rng::Rng;
use margay_wire::{Addresses, Extension, Flags, FlowId, Kind, MessageWriter, NoticeRepr, PORT, ResolvableRepr};
use serde_json::Value;

use super::{Findings, Scenario};
use crate::agent::{self, margay};
use crate::host::Host;
use crate::lab::Lab;
use crate::observe::{self, Passing};
use crate::program::wait_for;
use crate::report::Limit::{AtLeast, Below, Exactly};
use crate::report::{Bound, bound};
use crate::server::{Nginx, fetch, fetch_text};
use crate::topology::Topology;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "flooding",
    summary: "names that hosts tell their segment of: asked for without a broadcast, withdrawn, forged, and out of \
              date",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 9] = [
    bound("ok", Exactly(1.0)),
    bound("failed", Exactly(0.0)),
    bound("heard_ms", Below(2000.0)),
    bound("broadcasts", Exactly(0.0)),
    bound("broadcasts_without", AtLeast(1.0)),
    bound("withdrawn_ms", Below(2000.0)),
    bound("forged_believed", Exactly(0.0)),
    bound("forged_refused", AtLeast(1.0)),
    bound("fell_back", AtLeast(1.0)),
];

const FETCHES: usize = 20;
/// Fetches more, for those that a busy machine answered so late that all were asked.
const LATE_MAX: usize = 5;
const SERVICE: &str = "web.shop";
const LIMIT: Duration = Duration::from_secs(20);
/// What goes to all hosts of a segment.
const TO_ALL: &str = "udp dport 54324 meta pkttype { broadcast, multicast }";
const COUNTER: &str = "asked";

const TOPOLOGY: &str = r#"
[subnet.desk]
v4 = "10.1.0.0/24"
v6 = "fd01::/64"

[host.client]
role = "plain"
links = [{ subnet = "desk" }]

[host.web1]
role = "plain"
links = [{ subnet = "desk" }]

[host.web2]
role = "plain"
links = [{ subnet = "desk" }]

[host.rogue]
role = "plain"
links = [{ subnet = "desk" }]
"#;

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("flooding", TOPOLOGY)?, dir)?;
    findings.set("failed", 0.0);
    let (client, web1, web2) = (lab.host("client")?, lab.host("web1")?, lab.host("web2")?);
    for host in [client, web1] {
        host.shell("printf '[ad_hoc]\nflood = true\n' >> /etc/margay/margay.toml")?;
    }
    for host in [client, web1, web2] {
        margay(host, ["up"])?;
    }
    // Counted where it comes in: that is what others hear of it.
    observe::count(lab.host("rogue")?, COUNTER, Passing::In, &format!("ip saddr {} {TO_ALL}", v4_of(client)?))?;
    let _server = serve(web1)?;
    findings.set("heard_ms", await_heard(client, 1)?);
    // A trace that ends where nobody can be asked any further says so by its exit status, too.
    let told = margay(client, ["trace", SERVICE]).unwrap_or_else(|error| format!("{error:#}"));
    if !told.contains("alone, which has said on the segment") {
        bail!("what was heard does not show in a trace: {told}");
    }
    fetch_by_notice(&lab, findings)?;
    forge(&lab, findings)?;
    go_out_of_date(&lab, findings)?;
    findings.set("ok", f64::from(u8::from(findings.figures.get("failed") == 0.0)));
    Ok(())
}

fn v4_of(host: &Host) -> Result<std::net::IpAddr> {
    match host.plan.links[0].address(false) {
        Some(address) => Ok(address),
        None => bail!("{} has no IPv4 address", host.name()),
    }
}

fn serve(host: &Host) -> Result<Nginx> {
    let server = Nginx::start(host, &["0.0.0.0:80", "[::]:80"])?;
    agent::publish(host, SERVICE, "0.0.0.0:80", &["--allow", "any"])?;
    Ok(server)
}

/// Datagrams to all that the client has sent.
fn broadcasts(lab: &Lab) -> Result<f64> {
    Ok(observe::counts(lab.host("rogue")?)?.get(COUNTER).map_or(0.0, |count| count.packets))
}

/// The rules of the client that it has heard of.
fn heard(client: &Host) -> Result<Vec<Value>> {
    let mut routes = agent::routes(client, SERVICE)?;
    routes.retain(|route| route["origin"] == "heard on the segment");
    Ok(routes)
}

/// Waits until the client has heard of so many hosts; gives how long it took.
fn await_heard(client: &Host, count: usize) -> Result<f64> {
    let begin = Instant::now();
    wait_for(&format!("{count} hosts to be heard of"), LIMIT, || {
        let heard = heard(client)?;
        if heard.len() == count { Ok(()) } else { bail!("{heard:?}") }
    })?;
    Ok(begin.elapsed().as_secs_f64() * 1000.0)
}

/// Waits until the client goes by what it has heard: a host that has not answered is not asked alone for a while.
fn await_asked_alone(client: &Host) -> Result<()> {
    wait_for("a host that is asked alone", LIMIT, || {
        let heard = heard(client)?;
        if heard.iter().any(|route| route["weight"].as_u64() > Some(0)) { Ok(()) } else { bail!("{heard:?}") }
    })
}

/// First packets that went to all in the end, since one host alone did not answer in time.
fn fallen_back(client: &Host) -> Result<f64> {
    agent::metric(client, "margay_notices_failed_total")
}

/// Fetches for which one host alone was asked, and it answered in time.
fn fetch_by_notice(lab: &Lab, findings: &mut Findings) -> Result<()> {
    let client = lab.host("client")?;
    let (mut counted, mut sent) = (0, 0.0);
    for _ in 0..FETCHES + LATE_MAX {
        if counted == FETCHES {
            break;
        }
        await_asked_alone(client)?;
        let (late_before, sent_before) = (fallen_back(client)?, broadcasts(lab)?);
        fetch_all(client, "web1", 1, findings);
        if fallen_back(client)? == late_before {
            sent += broadcasts(lab)? - sent_before;
            counted += 1;
        }
    }
    ensure!(counted == FETCHES, "for only {counted} fetches one host alone answered in time");
    findings.set("broadcasts", sent);
    Ok(())
}

fn fetch_all(client: &Host, from: &str, count: usize, findings: &mut Findings) {
    for _ in 0..count {
        match fetch_text(client, &format!("http://{SERVICE}.sal.internal/host")) {
            Ok(name) if name == from => {}
            other => {
                findings.note(format!("{from} was to answer: {other:?}"));
                findings.figures.add("failed", 1.0);
            }
        }
    }
}

/// What says that it is by another host is refused; the name stays where it is.
fn forge(lab: &Lab, findings: &mut Findings) -> Result<()> {
    let (client, rogue) = (lab.host("client")?, lab.host("rogue")?);
    let hex: String = forged(v4_of(rogue)?).iter().map(|byte| format!("{byte:02x}")).collect();
    let script = format!(
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); \
         s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1); s.bind(('{}', 0)); \
         s.sendto(bytes.fromhex('{hex}'), ('255.255.255.255', {PORT}))",
        v4_of(rogue)?
    );
    let refused = || agent::metric(client, "margay_notices_refused_total");
    let before = refused()?;
    rogue.run(["python3", "-c", &script])?;
    wait_for("a forged notice to be refused", LIMIT, || if refused()? > before { Ok(()) } else { bail!("none is") })?;
    findings.set("forged_refused", refused()? - before);
    let rogue_at = v4_of(rogue)?.to_string();
    let is_believed = |route: &&Value| route["to"].as_str().is_some_and(|to| to.starts_with(&rogue_at));
    findings.set("forged_believed", heard(client)?.iter().filter(is_believed).count() as f64);
    fetch_all(client, "web1", 1, findings);
    Ok(())
}

/// A notice by a host whose key nobody here has: the signature is of another one.
fn forged(at: std::net::IpAddr) -> Vec<u8> {
    let [claimed, signs] = [1, 2].map(|seed| HostSecret::generate(&mut Rng::new([seed; 32])));
    let Ok(name) = SERVICE.parse::<Name>() else { return Vec::new() };
    let (prefix, mut address) = (name.prefix(), [0; 20]);
    Addresses::emit_one((at, PORT).into(), 0, &mut address);
    let unix_s = std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
    let mut notice = NoticeRepr {
        epoch: u32::MAX,
        sequence: 1,
        until_s: unix_s + 60,
        bits: prefix.bits,
        withdrawn: false,
        prefix: prefix.id.0,
        host_key: claimed.public().0,
        signature: [0; 64],
    };
    notice.signature = signs.sign(&[&notice.signed_head()[..], &address].concat());
    let mut buf = vec![0; 1024];
    let mut writer = MessageWriter::new(&mut buf, Kind::Notice, FlowId(0), FlowId(0), 0);
    writer.flags(Flags::RESOLVABLE);
    let (service, hop_tag) = (prefix.id.0, [0; 8]);
    let resolvable = ResolvableRepr { hop_limit: 16, reply_to: None, via: None, service, nonce: 0, hop_tag };
    let written = writer.resolvable(&resolvable).is_ok()
        && writer.extension(&Extension::Notice(notice)).is_ok()
        && Addresses::parse(&address).is_ok_and(|one| writer.extension(&Extension::Addresses(one)).is_ok());
    let len = if written { writer.finish().unwrap_or(0) } else { 0 };
    buf.truncate(len);
    buf
}

/// The host that was heard of dies without a word: another one is found by asking all. A host that withdraws a name is
/// forgotten at once.
fn go_out_of_date(lab: &Lab, findings: &mut Findings) -> Result<()> {
    let (client, web1, web2) = (lab.host("client")?, lab.host("web1")?, lab.host("web2")?);
    let _server = serve(web2)?;
    await_asked_alone(client)?;
    let (late_before, sent_before) = (fallen_back(client)?, broadcasts(lab)?);
    agent::kill(web1)?;
    fetch_all(client, "web2", 2, findings);
    findings.set("fell_back", fallen_back(client)? - late_before);
    findings.set("broadcasts_without", broadcasts(lab)? - sent_before);
    margay(web1, ["up"])?;
    await_heard(client, 1)?;
    agent::withdraw(web1, SERVICE)?;
    findings.set("withdrawn_ms", await_heard(client, 0)?);
    agent::withdraw(web2, SERVICE)?;
    let refused = fetch(client, &[], &format!("http://{SERVICE}.sal.internal/host"))?;
    if refused.status != 7 {
        bail!("nobody serves the name: status {}, {}", refused.status, refused.error);
    }
    Ok(())
}
