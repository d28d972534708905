//! `ad-hoc`: hosts with agents and without any router find services by asking their network segment, and behind a relay
//! those of the next one.

use std::path::Path;

use anyhow::{Result, ensure};

use super::{Findings, Scenario};
use crate::agent::{self, margay};
use crate::command::progress;
use crate::host::Host;
use crate::lab::Lab;
use crate::report::Limit::{AtMost, Below, Exactly};
use crate::report::{Bound, bound, median};
use crate::server::{Nginx, fetch, fetch_text, served};
use crate::topology::Topology;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "ad-hoc",
    summary: "services on a segment without a router, and behind a relay; one leaves, one is nobody's",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 7] = [
    bound("ok", Exactly(1.0)),
    bound("failed", Exactly(0.0)),
    bound("first_answer_ms", Below(1000.0)),
    // What asks and hears nothing is told after two seconds.
    bound("refusal_ms", Below(4000.0)),
    bound("bystander_messages", Exactly(0.0)),
    bound("instances_per_fetch", Exactly(1.0)),
    bound("passed_per_fetch", AtMost(2.0)),
];

const FETCHES: usize = 20;
const SERVICE: &str = "web.shop";
const FAR: &str = "far.shop";
const NOBODYS: &str = "nobody.shop";

/// The relay forwards IP too: it carries the data between the segments, as any router between them would.
const TOPOLOGY: &str = r#"
[subnet.near]
v4 = "10.1.0.0/24"
v6 = "fd01::/64"

[subnet.next]
v4 = "10.2.0.0/24"
v6 = "fd02::/64"

[host.relay]
role = "gateway"
links = [{ subnet = "near" }, { subnet = "next" }]

[host.client]
role = "plain"
links = [{ subnet = "near" }]

[host.web1]
role = "plain"
links = [{ subnet = "near" }]

[host.web2]
role = "plain"
links = [{ subnet = "near" }]

[host.bystander]
role = "plain"
links = [{ subnet = "near" }]

[host.far]
role = "plain"
links = [{ subnet = "next" }]
"#;

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("ad-hoc", TOPOLOGY)?, dir)?;
    lab.host("relay")?.shell("printf '[ad_hoc]\nrelay = true\n' >> /etc/margay/margay.toml")?;
    for host in &lab.hosts {
        margay(host, ["up"])?;
    }
    findings.set("failed", 0.0);
    let near = [serve(&lab, "web1", SERVICE)?, serve(&lab, "web2", SERVICE)?];
    let _far = serve(&lab, "far", FAR)?;
    find(&lab, &near, findings)?;
    leave(&lab, findings)?;
    ask_in_vain(&lab, findings)?;
    pass_on(&lab, findings)?;
    findings.set("bystander_messages", messages(lab.host("bystander")?)?);
    findings.set("ok", f64::from(u8::from(findings.figures.get("failed") == 0.0)));
    Ok(())
}

/// Without an authority nobody is a member of one: anybody may connect, and says who it is.
fn serve(lab: &Lab, host: &str, service: &str) -> Result<Nginx> {
    let host = lab.host(host)?;
    let server = Nginx::start(host, &["0.0.0.0:80", "[::]:80"])?;
    agent::publish(host, service, "0.0.0.0:80", &["--allow", "any"])?;
    Ok(server)
}

fn url(name: &str) -> String {
    format!("http://{name}.sal.internal/host")
}

fn messages(host: &Host) -> Result<f64> {
    agent::metric(host, "margay_messages_sent_total")
}

/// Each fetch reaches one instance; the other, which has answered too, forgets it.
fn find(lab: &Lab, servers: &[Nginx], findings: &mut Findings) -> Result<()> {
    let client = lab.host("client")?;
    let first = fetch(client, &[], &url(SERVICE))?;
    ensure!(first.status == 0, "the first fetch: {}", first.error);
    findings.set("first_answer_ms", first.took_ms);
    let mut fetched = 1;
    for _ in 0..FETCHES {
        match fetch_text(client, &url(SERVICE)) {
            Ok(name) if name == "web1" || name == "web2" => fetched += 1,
            other => fail(findings, &format!("{other:?}")),
        }
    }
    let served: usize = served(servers, "host", fetched)?.iter().sum();
    findings.set("instances_per_fetch", served as f64 / fetched as f64);
    Ok(())
}

/// Whoever has withdrawn does not answer any more.
fn leave(lab: &Lab, findings: &mut Findings) -> Result<()> {
    agent::withdraw(lab.host("web1")?, SERVICE)?;
    for _ in 0..FETCHES {
        match fetch_text(lab.host("client")?, &url(SERVICE)) {
            Ok(name) if name == "web2" => {}
            other => fail(findings, &format!("after web1 has withdrawn: {other:?}")),
        }
    }
    Ok(())
}

fn ask_in_vain(lab: &Lab, findings: &mut Findings) -> Result<()> {
    let refused = fetch(lab.host("client")?, &[], &url(NOBODYS))?;
    progress(&format!("a name that nobody serves: {}", refused.error));
    if refused.status != 7 {
        fail(findings, &format!("a name that nobody serves: status {}, {}", refused.status, refused.error));
    }
    findings.set("refusal_ms", refused.took_ms);
    Ok(())
}

/// What is on the next segment is found by the relay's word, and reached without it.
fn pass_on(lab: &Lab, findings: &mut Findings) -> Result<()> {
    let (client, relay) = (lab.host("client")?, lab.host("relay")?);
    // A busy machine may answer so late that the client asks again: what most fetches took is the figure.
    let mut each = Vec::new();
    for _ in 0..FETCHES {
        let before = passed(relay)?;
        match fetch_text(client, &url(FAR)) {
            Ok(name) if name == "far" => {}
            other => fail(findings, &format!("behind the relay: {other:?}")),
        }
        each.push(passed(relay)? - before);
    }
    findings.set("passed_per_fetch", median(&each));
    Ok(())
}

/// Questions and answers that a relay has passed on.
fn passed(relay: &Host) -> Result<f64> {
    Ok(agent::metric(relay, "margay_forwarded_total")? + agent::metric(relay, "margay_relayed_total")?)
}

fn fail(findings: &mut Findings, what: &str) {
    findings.note(what.to_owned());
    findings.figures.add("failed", 1.0);
}
