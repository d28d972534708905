//! The smallest lab: two hosts on one veth link, with nothing else that could carry or hold flows.

use std::path::Path;

use anyhow::{Context, Result};

use super::Findings;
use crate::agent;
use crate::host::Host;
use crate::lab::Lab;
use crate::observe;
use crate::topology::Topology;

const TOPOLOGY: &str = r#"
[subnet.wire]
v4 = "10.1.0.0/24"

# The server is its own router, so that the link has two ends and nothing else.
[host.server]
role = "router"
links = [{ subnet = "wire" }]

[host.client]
role = "agent"
links = [{ subnet = "wire" }]
"#;

/// Builds it, with hosts `client` and `server`; no agent is started.
///
/// # Errors
///
/// As for [`Lab::build`].
pub fn build(name: &str, dir: &Path) -> Result<Lab> {
    Lab::build(Topology::parse(name, TOPOLOGY)?, dir)
}

/// A host's own address as text.
///
/// # Errors
///
/// It has none.
pub fn address(host: &Host) -> Result<String> {
    Ok(host.plan.address().with_context(|| format!("{} has no address", host.name()))?.to_string())
}

/// Says, and counts as a failure, where the kernel does not carry flows: figures about the direct path mean nothing
/// then.
///
/// # Errors
///
/// No agent runs on a host.
pub fn demand_kernel(hosts: &[&Host], findings: &mut Findings) -> Result<()> {
    findings.figures.add("failed", 0.0);
    for host in hosts {
        let (datapath, why) = agent::datapath(host)?;
        if datapath != "kernel" {
            findings.note(format!("there is no direct path on {}: its datapath is {datapath}: {why}", host.name()));
            findings.figures.add("failed", 1.0);
        }
    }
    Ok(())
}

/// Sets `resets` to what [`observe::count_virtual_resets`] has counted on hosts, and says where they were.
///
/// # Errors
///
/// As for [`observe::virtual_resets`].
pub fn report_resets(hosts: &[&Host], findings: &mut Findings) -> Result<()> {
    let (resets, places) = observe::virtual_resets(hosts)?;
    findings.set("resets", resets);
    if resets > 0.0 {
        findings.note(format!("resets: {places}"));
    }
    Ok(())
}

/// Runs `work` of a scenario; that it fails is noted and counted, and the scenario goes on with its next part.
pub fn attempt_part(what: &str, findings: &mut Findings, work: impl FnOnce(&mut Findings) -> Result<()>) {
    if let Err(error) = work(findings) {
        findings.note(format!("{what}: {error:#}"));
        findings.figures.add("failed", 1.0);
    }
}
