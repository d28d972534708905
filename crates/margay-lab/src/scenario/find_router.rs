//! `find-router`: hosts whose join token leads nowhere find their router on the network segment, and no other; again
//! where it has moved; on a segment of IPv6 alone; not at all where that is off.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::{Findings, Scenario};
use crate::agent::{self, margay};
use crate::host::Host;
use crate::interface::{self, Act};
use crate::lab::Lab;
use crate::program::wait_for;
use crate::report::Limit::{AtLeast, Below, Exactly};
use crate::report::{Bound, bound};
use crate::server::{Nginx, fetch_text};
use crate::topology::Topology;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "find-router",
    summary: "a router is found on the segment, also where it has moved, and a stranger's is passed over",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 8] = [
    bound("ok", Exactly(1.0)),
    bound("failed", Exactly(0.0)),
    // What is configured has a second to answer first.
    bound("found_ms", Below(6000.0)),
    bound("found_v6_ms", Below(6000.0)),
    bound("found_again_ms", Below(10000.0)),
    bound("rogue_answers", AtLeast(1.0)),
    bound("rogue_hosts", Exactly(0.0)),
    bound("searches_when_off", Exactly(0.0)),
];

/// Nobody is there.
const NOWHERE: &str = "192.0.2.1:54324";
const SERVICE: &str = "web.shop";
const LIMIT: Duration = Duration::from_secs(30);
/// The router's next address; the topology gives out lower ones.
const FREE_NUMBER: usize = 99;

const TOPOLOGY: &str = r#"
[subnet.office]
v4 = "10.1.0.0/24"
v6 = "fd01::/64"

[subnet.six]
v6 = "fd02::/64"

[host.router]
role = "plain"
links = [{ subnet = "office" }, { subnet = "six" }]

[host.rogue]
role = "plain"
links = [{ subnet = "office" }, { subnet = "six" }]

[host.web]
role = "plain"
links = [{ subnet = "office" }]

[host.client]
role = "plain"
links = [{ subnet = "office" }]

[host.far]
role = "plain"
links = [{ subnet = "six" }]

[host.off]
role = "plain"
links = [{ subnet = "office" }]
"#;

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("find-router", TOPOLOGY)?, dir)?;
    findings.set("failed", 0.0);
    let (router, rogue, off) = (lab.host("router")?, lab.host("rogue")?, lab.host("off")?);
    // It signs for an authority of the same name, by a key of its own, and is there first.
    let _ = start_router(rogue)?;
    let token = start_router(router)?;
    // Not by `--join`, which waits for an answer that never comes.
    off.shell(&format!(
        "printf '[ad_hoc]\nenabled = false\n[join]\ntoken = \"{token}\"\n' >> /etc/margay/margay.toml"
    ))?;
    margay(off, ["up"])?;
    findings.set("found_ms", find(lab.host("web")?, &token)?);
    findings.set("found_v6_ms", find(lab.host("far")?, &token)?);
    find(lab.host("client")?, &token)?;
    use_it(&lab)?;
    findings.set("found_again_ms", move_router(&lab)?);
    let rogue_answers = agent::metric(rogue, "margay_searches_answered_total")?;
    findings.set("rogue_answers", rogue_answers);
    findings.set("rogue_hosts", agent::status(rogue)?["hosts"].as_u64().unwrap_or_default() as f64);
    findings.set("searches_when_off", agent::metric(off, "margay_searches_total")?);
    if is_joined(off)? {
        bail!("the host that does not search has joined");
    }
    findings.set("ok", 1.0);
    Ok(())
}

/// Gives a token with an address where nobody is.
fn start_router(host: &Host) -> Result<String> {
    margay(host, ["up", "--router"])?;
    margay(host, ["id", "authority", "create", "shop"])?;
    let words = ["id", "token", "create", "shop", "--uses", "9", "--router-address", NOWHERE];
    Ok(margay(host, words)?.trim().to_owned())
}

fn is_joined(host: &Host) -> Result<bool> {
    Ok(agent::status(host)?["joined"].as_bool() == Some(true))
}

/// Brings a host up with the token, and waits until it has joined; gives how long both took together.
fn find(host: &Host, token: &str) -> Result<f64> {
    let begin = Instant::now();
    margay(host, ["up", "--join", token])?;
    await_router(host)?;
    Ok(begin.elapsed().as_secs_f64() * 1000.0)
}

/// Waits until a host has joined, and says where it has found its router.
fn await_router(host: &Host) -> Result<String> {
    let mut found = String::new();
    wait_for(&format!("{} to find its router", host.name()), LIMIT, || {
        let status = agent::status(host)?;
        found = status["routers"][0]["found_at"].as_str().unwrap_or_default().to_owned();
        if status["joined"].as_bool() == Some(true) && !found.is_empty() { Ok(()) } else { bail!("{status}") }
    })?;
    Ok(found)
}

/// Names go by the router that was found as by any.
fn use_it(lab: &Lab) -> Result<()> {
    let (web, client) = (lab.host("web")?, lab.host("client")?);
    let _server = Nginx::start(web, &["0.0.0.0:80", "[::]:80"])?;
    agent::publish(web, SERVICE, "0.0.0.0:80", &[])?;
    agent::await_instances(client, SERVICE, 1)?;
    match fetch_text(client, &format!("http://{SERVICE}.sal.internal/host"))?.as_str() {
        "web" => Ok(()),
        other => bail!("{other} answers for {SERVICE}"),
    }
}

/// The router has other addresses on the segment; gives how long it takes until a host has found it there.
fn move_router(lab: &Lab) -> Result<f64> {
    let (router, web) = (lab.host("router")?, lab.host("web")?);
    let former = await_router(web)?;
    let mut acts = Vec::new();
    for v6 in [false, true] {
        acts.push(Act::Add(0, interface::address(lab, router, 0, v6, FREE_NUMBER)?));
        acts.push(Act::Remove(0, interface::first_address(lab, router, 0, v6)?));
    }
    interface::change(lab, router, &acts)?;
    let begin = Instant::now();
    wait_for("the host to find its router where it is now", LIMIT, || {
        let found = await_router(web)?;
        if found == former { bail!("it is at {found}") } else { Ok(()) }
    })?;
    Ok(begin.elapsed().as_secs_f64() * 1000.0)
}
