//! Sessions through boxes: what they cost, whether boxes see and stop what they should, whether the policy is kept, and
//! who tries to get around it.

pub mod attacks;
pub mod boxes;
pub mod contention;
pub mod disruption;
pub mod ends;
pub mod insert_remove;
pub mod leaving;
pub mod leaving_boxes;
pub mod nat;
pub mod orders;
pub mod policy;
pub mod proxy_boxes;
pub mod setup;
pub mod weather;

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::site;
use crate::agent::{self, READY_LIMIT, margay};
use crate::host::Host;
use crate::lab::Lab;
use crate::observe::{self, Passing};
use crate::program::{Program, wait_for};

/// Where programs look up names.
const ZONE: &str = "sal.internal";
/// The port of the echo servers.
const PORT: u16 = 7;

/// A router, a client, a server, others, and hosts `box1` to `boxN` that forward sessions. No agent is started.
pub(crate) fn build(name: &str, boxes: usize, others: &[&str], dir: &Path) -> Result<Lab> {
    let boxes: Vec<String> = (1..=boxes).map(|number| format!("box{number}")).collect();
    let hosts = ["client", "server"].iter().chain(others).map(ToString::to_string).chain(boxes.iter().cloned());
    let lab = site::build(name, site::BOTH, &hosts.collect::<Vec<_>>(), dir)?;
    let_forward(&lab, boxes.len())?;
    Ok(lab)
}

/// Hosts `box1` to `boxN` of a lab whose agents do not run yet forward sessions.
fn let_forward(lab: &Lab, boxes: usize) -> Result<()> {
    for number in 1..=boxes {
        let one = lab.host(&format!("box{number}"))?;
        one.shell("printf '[host]\\nboxes = true\\n' >> /etc/margay/margay.toml")?;
    }
    Ok(())
}

/// A chain of a policy file; `more` are further lines of it.
pub(crate) fn chain(name: &str, of: &str, boxes: &[&str], more: &str) -> String {
    format!("[[chain]]\nname = \"{name}\"\nfor = \"{of}\"\nthrough = {boxes:?}\n{more}\n")
}

/// Applies a policy on the router, and waits until these hosts go by these chains.
pub(crate) fn apply(router: &Host, policy: &str, hosts: &[&Host], names: &[&str]) -> Result<String> {
    let said = try_apply(router, policy, &[])?;
    hosts.iter().try_for_each(|host| await_chains(host, names))?;
    Ok(said)
}

/// Gives what `margay policy apply` says.
fn try_apply(router: &Host, policy: &str, options: &[&str]) -> Result<String> {
    router.shell(&format!("cat > /etc/margay/policy.toml <<'END'\n{policy}\nEND"))?;
    margay(router, ["policy", "apply", "/etc/margay/policy.toml"].iter().chain(options).copied())
}

/// Names of the chains that a host goes by.
fn chains(host: &Host) -> Result<Vec<String>> {
    let shown: Value = serde_json::from_str(&margay(host, ["chain", "show", "--json"])?)?;
    let policies = shown["policies"].as_array().into_iter().flatten();
    let held = policies.filter(|policy| policy["refused"] == "");
    let chains = held.flat_map(|policy| policy["chains"].as_array().into_iter().flatten());
    Ok(chains.filter_map(|chain| Some(chain["name"].as_str()?.to_owned())).collect())
}

fn await_chains(host: &Host, names: &[&str]) -> Result<()> {
    wait_for(&format!("the chains at {}", host.name()), READY_LIMIT, || {
        let found = chains(host)?;
        ensure!(found == names, "it goes by {found:?}");
        // What is shown is on disk, and the core follows.
        let rules = agent::metric(host, "margay_chain_rules")?;
        if rules == names.len() as f64 { Ok(()) } else { bail!("its core has {rules} rules") }
    })
}

/// Serves a box, and waits until it is registered.
pub(crate) fn serve(host: &Host, name: &str, kind: &str, options: &[&str]) -> Result<()> {
    margay(host, ["middlebox", "serve", name, "--kind", kind].iter().chain(options).copied())?;
    await_registered(host, name)
}

fn await_registered(host: &Host, name: &str) -> Result<()> {
    wait_for(&format!("registration of {name} by {}", host.name()), READY_LIMIT, || {
        let shown = agent::show(host, name)?;
        match shown["service"]["state"].as_str() {
            Some("registered") => Ok(()),
            state => bail!("its state is {state:?}: {shown}"),
        }
    })
}

/// Counts sessions that pass a box of this host: their SYNs, as the kernel sees them come by `sal0`.
fn count_sessions(host: &Host) -> Result<()> {
    let syn = "iifname \"sal0\" tcp dport 7 tcp flags & (syn|ack) == syn";
    observe::count(host, "sessions", Passing::In, syn)
}

fn sessions(host: &Host) -> Result<f64> {
    Ok(observe::counts(host)?.get("sessions").map_or(0.0, |count| count.packets))
}

/// `margay flow watch` on a host.
struct Watch {
    program: Program,
    /// Bytes that earlier ones have written into the same log.
    before: usize,
}

impl Watch {
    fn said(&self) -> String {
        self.program.log().get(self.before..).unwrap_or_default().to_owned()
    }
}

fn watch(host: &Host) -> Result<Watch> {
    let words = [agent_program()?.as_str(), "flow", "watch"].map(str::to_owned);
    let log = "flow-watch";
    let before = std::fs::read_to_string(host.dir.join(format!("{log}.log"))).map_or(0, |said| said.len());
    let watch = Watch { program: host.spawn(log, words)?, before };
    wait_for("the watch", READY_LIMIT, || {
        if watch.said().contains("watching") { Ok(()) } else { bail!("it has not begun") }
    })?;
    Ok(watch)
}

fn agent_program() -> Result<String> {
    let program = crate::fabric::margay_program()?;
    program.to_str().map(str::to_owned).context("the program's path is no text")
}

/// Waits until a watch has told of a failed connection with these words in its reason.
fn await_reason(watch: &Watch, words: &str) -> Result<()> {
    wait_for(&format!("a failure that says `{words}`"), READY_LIMIT, || {
        let log = watch.said();
        let is_it = |line: &str| line.contains("connect-failed") && line.contains(words);
        if log.lines().any(is_it) { Ok(()) } else { bail!("it says: {log}") }
    })
}
