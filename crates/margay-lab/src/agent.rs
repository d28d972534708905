//! Every invocation of Margay itself is in this module.

use std::ffi::OsString;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::fabric::margay_program;
use crate::host::Host;
use crate::lab::Lab;
use crate::observe;
use crate::program::wait_for;
use crate::topology::Role;

/// How long an agent may take to be up and joined.
const READY_LIMIT: Duration = Duration::from_secs(15);

/// The agents of a lab.
pub struct Agents {
    /// Join token of the lab's authority; empty without a router.
    pub token: String,
}

impl Agents {
    /// Starts routers, then everybody else, and waits until all have joined.
    ///
    /// # Errors
    ///
    /// An agent does not start or does not join; the message says why.
    pub fn start(lab: &Lab) -> Result<Self> {
        let by_role = |role| lab.hosts.iter().filter(move |host| host.plan.role == role);
        let mut token = String::new();
        for router in by_role(Role::Router) {
            if token.is_empty() {
                margay(router, ["up", "--router"])?;
                margay(router, ["id", "authority", "create", &lab.topology.authority])?;
                token = margay(router, ["id", "token", "create", &lab.topology.authority])?.trim().to_owned();
            } else {
                margay(router, ["up", "--router", "--join", &token])?;
            }
        }
        let agents: Vec<&Host> = by_role(Role::Agent).collect();
        if !agents.is_empty() && token.is_empty() {
            bail!("the topology has hosts with role \"agent\" but none with role \"router\"");
        }
        for host in agents {
            join(host, &token)?;
        }
        Ok(Self { token })
    }
}

/// Brings a host up as a member of whose token it is, and waits until it has joined.
///
/// # Errors
///
/// The agent does not start or does not join.
pub fn join(host: &Host, token: &str) -> Result<()> {
    margay(host, ["up", "--join", token])?;
    wait_for(&format!("joining of {}", host.name()), READY_LIMIT, || match status(host)?["joined"].as_bool() {
        Some(true) => Ok(()),
        _ => bail!("it has not joined"),
    })
}

/// Runs `margay WORDS` on a host and gives what it prints.
///
/// # Errors
///
/// It fails; the message is its own.
pub fn margay<'a>(host: &Host, words: impl IntoIterator<Item = &'a str>) -> Result<String> {
    let program = margay_program()?;
    let argv: Vec<OsString> = std::iter::once(program.into()).chain(words.into_iter().map(Into::into)).collect();
    host.run(argv)
}

/// `margay status --json`.
///
/// # Errors
///
/// No agent runs on the host.
pub fn status(host: &Host) -> Result<Value> {
    serde_json::from_str(&margay(host, ["status", "--json"])?).context("status is not JSON")
}

/// Process id of the host's agent, found from outside.
///
/// # Errors
///
/// None runs, or more than one.
pub fn pid(host: &Host) -> Result<u32> {
    let program = margay_program()?;
    let found = observe::processes(host, |words| {
        program.to_str() == Some(&words[0]) && words.get(1).map(String::as_str) == Some("agent")
    })?;
    match found[..] {
        [pid] => Ok(pid),
        _ => bail!("{} agents run on {}, not one", found.len(), host.name()),
    }
}
