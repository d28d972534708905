//! `resolve-script`: a script that knows the format from the book alone, on a host without an agent, asks a router
//! which instance has a name.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{Findings, Scenario};
use crate::agent::{self, Agents, margay};
use crate::host::Host;
use crate::lab::Lab;
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::server::{Nginx, fetch_text};
use crate::topology::Topology;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "resolve-script",
    summary: "a Python script that speaks the documented format resolves names through the kernel's service router",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 5] = [
    bound("ok", Exactly(QUESTIONS as f64)),
    bound("instances", Exactly(2.0)),
    // One packet in a while is the agent's, by which the kernel keeps the instance's address of layer 2; these come
    // slowly.
    bound("kernel_share", AtLeast(0.5)),
    bound("answers_for_nobody", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

const QUESTIONS: usize = 40;
const SCRIPT: &str = include_str!("../../../../docs/examples/resolve.py");
const TOPOLOGY: &str = r#"
[subnet.site]
v4 = "10.1.0.0/24"
v6 = "fd00:1::/64"
[host.router]
role = "router"
links = [{ subnet = "site" }]
[host.web1]
role = "agent"
links = [{ subnet = "site" }]
[host.web2]
role = "agent"
links = [{ subnet = "site" }]
[host.visitor]
role = "plain"
links = [{ subnet = "site" }]
"#;

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("resolve-script", TOPOLOGY)?, dir)?;
    let _agents = Agents::start(&lab)?;
    let (router, visitor) = (lab.host("router")?, lab.host("visitor")?);
    let mut servers = Vec::new();
    for name in ["web1", "web2"] {
        servers.push(Nginx::start(lab.host(name)?, &["0.0.0.0:80"])?);
        agent::publish(lab.host(name)?, "web.shop", "0.0.0.0:80", &[])?;
    }
    agent::await_instances(router, "web.shop", 2)?;
    let script = dir.join("resolve.py");
    fs::write(&script, SCRIPT)?;
    let address = router.plan.address().context("the router has no address")?.to_string();
    let ask = |name: &str| ask(visitor, &script, &address, name);

    let forwarded = || agent::metric(router, "margay_kernel_router_forwarded_total");
    let (before, mut ok, mut instances) = (forwarded()?, 0, BTreeSet::new());
    for number in 0..QUESTIONS {
        let (said, is_found) = ask("web.shop")?;
        let (found, wrong) = check(&lab, &said)?;
        match wrong {
            None if is_found => ok += 1,
            _ => findings.note(format!("question {number}: {wrong:?}, {said}")),
        }
        instances.insert(found);
    }
    findings.set("ok", f64::from(ok));
    findings.set("instances", instances.len() as f64);
    findings.set("kernel_share", (forwarded()? - before) / QUESTIONS as f64);
    // By its bits it is the same name; and a name that nobody serves has no answer.
    let shown = agent::show(lab.host("web1")?, "web.shop")?;
    let prefix = shown["service"]["prefix"].as_str().context("the service has no prefix")?;
    let by_bits = ask(prefix.split_once('/').map_or(prefix, |(bits, _)| bits))?;
    ensure!(by_bits.1, "not found by its bits {prefix}: {}", by_bits.0);
    let nobody = ask("nobody.shop")?;
    findings.set("answers_for_nobody", f64::from(u8::from(nobody.1)));
    // What it left half open does no harm to those who connect.
    let fetched = fetch_text(lab.host("web2")?, "http://web.shop.sal.internal/host");
    findings.set("failed", f64::from(u8::from(fetched.is_err())));
    Ok(())
}

/// What the script prints, and whether an instance answered.
fn ask(host: &Host, script: &Path, router: &str, name: &str) -> Result<(Value, bool)> {
    let script = script.to_str().context("the script's path is no text")?;
    let output = host.output(["python3", script, router, name])?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let error = String::from_utf8_lossy(&output.stderr);
    let said = serde_json::from_str(&text).with_context(|| format!("the script said {text}{error}"))?;
    Ok((said, output.status.success()))
}

/// The host that answered; and what of it is not as the host itself says.
fn check(lab: &Lab, said: &Value) -> Result<(String, Option<&'static str>)> {
    let instance = said["instance"].as_str().unwrap_or_default();
    for name in ["web1", "web2"] {
        let host = lab.host(name)?;
        if host.plan.address().context("no address")?.to_string() != instance {
            continue;
        }
        let identity: Value = serde_json::from_str(&margay(host, ["id", "--json"])?)?;
        let certificate = &said["certificates"][0];
        let wrong = match () {
            () if said["host_id"] != identity["host_id"] => Some("its host-ID is another"),
            () if certificate["host_key"] != identity["host_key"] => Some("its certificate is another host's"),
            () => None,
        };
        return Ok((name.to_owned(), wrong));
    }
    Ok((instance.to_owned(), Some("no instance has this address")))
}
