//! Every invocation of Margay itself is in this module.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use serde_json::Value;

use crate::host::Host;
use crate::lab::Lab;
use crate::observe;
use crate::program::wait_for;
use crate::topology::Role;

/// How long an agent may take to be up and joined.
pub const READY_LIMIT: Duration = Duration::from_secs(15);

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
                token = create_token(lab, router, &[])?;
            } else {
                margay(router, ["up", "--router", "--join", &token])?;
            }
        }
        let agents: Vec<&Host> = by_role(Role::Agent).collect();
        if !agents.is_empty() && token.is_empty() {
            bail!("the topology has hosts with role \"agent\" but none with role \"router\"");
        }
        for host in agents {
            match by_role(Role::Router).next().and_then(|router| router_address(host, router)) {
                // The token names the first address of the router, which is of IPv4 where the router has one.
                Some((router, address)) => {
                    join(host, &create_token(lab, router, &["--router-address", &address])?)?;
                }
                None => join(host, &token)?,
            }
        }
        Ok(Self { token })
    }

    /// As [`start`](Self::start), with all flows encapsulated: for what measures or counts that.
    ///
    /// # Errors
    ///
    /// As for [`start`](Self::start).
    pub fn start_encapsulated(lab: &Lab) -> Result<Self> {
        for host in lab.hosts.iter().filter(|host| matches!(host.plan.role, Role::Router | Role::Agent)) {
            keep_encapsulated(host)?;
        }
        Self::start(lab)
    }
}

fn create_token(lab: &Lab, router: &Host, options: &[&str]) -> Result<String> {
    let words = ["id", "token", "create", &lab.topology.authority, "--uses", "100"];
    Ok(margay(router, words.iter().chain(options).copied())?.trim().to_owned())
}

/// Where a host that has IPv6 alone reaches a router that has both families.
fn router_address<'a>(host: &Host, router: &'a Host) -> Option<(&'a Host, String)> {
    let has_v4 = |host: &Host| host.plan.links.iter().any(|link| link.v4.is_some());
    let address = router.plan.links.iter().find_map(|link| link.v6)?;
    (!has_v4(host) && has_v4(router)).then(|| (router, format!("[{address}]:{}", margay_wire::PORT)))
}

/// Configures a host whose agent does not run yet: none of its flows goes direct.
///
/// # Errors
///
/// The configuration cannot be written.
pub fn keep_encapsulated(host: &Host) -> Result<()> {
    host.shell("printf 'direct = false\n' >> /etc/margay/margay.toml").map(drop)
}

/// Configures a host whose agent does not run yet: all of its flows are sealed, or refused.
///
/// # Errors
///
/// The configuration cannot be written.
pub fn demand_sealed(host: &Host) -> Result<()> {
    host.shell("printf 'secure = true\n' >> /etc/margay/margay.toml").map(drop)
}

/// Brings a host up as a member of whose token it is, and waits until it has joined.
///
/// # Errors
///
/// The agent does not start or does not join.
pub fn join(host: &Host, token: &str) -> Result<()> {
    margay(host, ["up", "--join", token])?;
    await_joined(host)
}

fn await_joined(host: &Host) -> Result<()> {
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
    host.run(argv(host, words)?)
}

/// `margay WORDS` on a host, for what runs beside a scenario, or may be refused.
///
/// # Errors
///
/// There is no such program.
pub fn command<'a>(host: &Host, words: impl IntoIterator<Item = &'a str>) -> Result<Command> {
    Ok(host.command(argv(host, words)?))
}

fn argv<'a>(host: &Host, words: impl IntoIterator<Item = &'a str>) -> Result<Vec<OsString>> {
    let program = host.program()?;
    Ok(std::iter::once(program.into()).chain(words.into_iter().map(Into::into)).collect())
}

/// `margay status --json`.
///
/// # Errors
///
/// No agent runs on the host.
pub fn status(host: &Host) -> Result<Value> {
    serde_json::from_str(&margay(host, ["status", "--json"])?).context("status is not JSON")
}

/// What carries established data on a host, and why it is not the kernel where it is not.
///
/// # Errors
///
/// As for [`status`].
pub fn datapath(host: &Host) -> Result<(String, String)> {
    let status = status(host)?;
    let text = |field: &str| status[field].as_str().unwrap_or_default().to_owned();
    Ok((text("datapath"), text("datapath_why")))
}

/// A count of a host's agent by its name in `margay status --metrics`, with its label (`name{kind="syn"}`); without
/// one, all of its family together.
///
/// # Errors
///
/// No agent runs on the host, or it counts no such thing.
pub fn metric(host: &Host, name: &str) -> Result<f64> {
    let text = margay(host, ["status", "--metrics"])?;
    let rows = text.lines().filter_map(|line| line.split_once(' '));
    let counts: Vec<f64> = rows
        .filter(|(key, _)| *key == name || key.split('{').next() == Some(name))
        .filter_map(|(_, value)| value.parse().ok())
        .collect();
    if counts.is_empty() { bail!("the agent of {} counts no {name}", host.name()) } else { Ok(counts.iter().sum()) }
}

/// Packets that a host's agent has dropped, by reason; those reasons that occurred.
///
/// # Errors
///
/// No agent runs on the host.
pub fn drops(host: &Host) -> Result<BTreeMap<String, f64>> {
    let rows = status(host)?["drops"].as_array().cloned().unwrap_or_default();
    let counts = rows.iter().filter_map(|row| Some((row["reason"].as_str()?.to_owned(), row["packets"].as_f64()?)));
    Ok(counts.filter(|(_, packets)| *packets > 0.0).collect())
}

/// Connections that a host's kernel has begun by itself, by grants (docs/decisions/0035).
///
/// # Errors
///
/// No agent runs on the host, or its flows are not the kernel's.
pub fn taken(host: &Host) -> Result<f64> {
    metric(host, "margay_kernel_taken_total")
}

/// Live flows of a host, at most ten thousand of them.
///
/// # Errors
///
/// No agent runs on the host.
pub fn flows(host: &Host) -> Result<Vec<Value>> {
    let text = margay(host, ["flow", "list", "--json", "--limit", "10000"])?;
    let answer: Value = serde_json::from_str(&text).context("flow list is not JSON")?;
    Ok(answer["flows"].as_array().cloned().unwrap_or_default())
}

/// Flows of a name that a host lists and that are not over.
///
/// # Errors
///
/// No agent runs on the host.
pub fn open_flows(host: &Host, service: &str, protocol: &str) -> Result<Vec<Value>> {
    let mut flows = flows(host)?;
    flows.retain(|flow| {
        let is_over = matches!(flow["lifecycle"].as_str(), Some("closed" | "timed-out"));
        flow["name"] == service && flow["protocol"] == protocol && !is_over
    });
    Ok(flows)
}

/// `margay route list`: the rules of a host that cover a name, with `action`, `origin`, `packets` and `used_ms_ago`.
///
/// # Errors
///
/// No agent runs on the host.
pub fn routes(host: &Host, name: &str) -> Result<Vec<Value>> {
    let answer: Value =
        serde_json::from_str(&margay(host, ["route", "list", name, "--json"])?).context("route list is not JSON")?;
    Ok(answer["routes"].as_array().cloned().unwrap_or_default())
}

/// `margay flow migrate`: moves one flow, by its id as [`flows`] has it, to an address of this host.
///
/// # Errors
///
/// The agent refuses, or the flow does not move.
pub fn migrate(host: &Host, flow: &str, to: &str) -> Result<()> {
    margay(host, ["flow", "migrate", flow, "--to", to]).map(drop)
}

/// `margay path list --json`: where a host's peers are, with `peer`, `local`, `remote`, `state` and `moves`.
///
/// # Errors
///
/// No agent runs on the host.
pub fn paths(host: &Host) -> Result<Vec<Value>> {
    let answer: Value =
        serde_json::from_str(&margay(host, ["path", "list", "--json"])?).context("path list is not JSON")?;
    Ok(answer["paths"].as_array().or(answer.as_array()).cloned().unwrap_or_default())
}

/// Messages about moves that a host's agent has sent: RSYN, RSYN-ACK and RSYN-DONE, repeats and confirmations among
/// them.
///
/// # Errors
///
/// No agent runs on the host.
pub fn moving_messages(host: &Host) -> Result<f64> {
    let kinds = ["rsyn", "rsynack", "rsyndone"];
    kinds.iter().map(|kind| metric(host, &format!("margay_messages_sent_total{{kind=\"{kind}\"}}"))).sum()
}

/// How many of a host's flows are direct, and how many there are.
///
/// # Errors
///
/// As for [`flows`].
pub fn direct_flows(host: &Host) -> Result<(usize, usize)> {
    // By the agent's own count: a list of ten thousand would be in its memory.
    let status = status(host)?;
    let count = |field: &str| status[field].as_u64().and_then(|count| usize::try_from(count).ok()).unwrap_or_default();
    Ok((count("flows_direct"), count("flows")))
}

/// Waits until all established flows of these hosts are direct, at least `count` of them on each; or until none is.
///
/// # Errors
///
/// They are not in time; the message says how they go, and why.
pub fn await_paths(hosts: &[&Host], direct: bool, count: usize, limit: Duration) -> Result<()> {
    let wanted = if direct { "direct" } else { "encapsulated" };
    let mut last_other = String::new();
    wait_for(&format!("{count} flows, all {wanted}"), limit, || {
        for host in hosts {
            let mut flows = flows(host)?;
            flows.retain(|flow| flow["lifecycle"] == "established");
            let other = flows.iter().filter(|flow| flow["path"] != wanted);
            let (others, first) = (other.clone().count(), other.clone().next());
            if let Some(first) = first {
                last_other = format!("on {} {others} of {} were not: {}", host.name(), flows.len(), first["path_why"]);
                bail!("{last_other}");
            }
            if flows.len() < count {
                bail!("{} has {}; before, {last_other}", host.name(), flows.len());
            }
        }
        Ok(())
    })
}

/// `margay stack show`: how a flow is carried.
///
/// # Errors
///
/// There is no such flow.
pub fn stack(host: &Host, flow: &str) -> Result<Value> {
    serde_json::from_str(&margay(host, ["stack", "show", flow, "--json"])?).context("stack show is not JSON")
}

/// `margay stack set`. Returns when the flow is carried so.
///
/// # Errors
///
/// It is not; the message says why.
pub fn set_stack(host: &Host, flow: &str, stack: &str) -> Result<()> {
    margay(host, ["stack", "set", flow, stack]).map(drop)
}

/// `margay cache ACT`: `clear`, `unload` or `load`.
///
/// # Errors
///
/// The agent refuses.
pub fn cache(host: &Host, act: &str) -> Result<()> {
    margay(host, ["cache", act]).map(drop)
}

/// Ends a host's agent as nothing else could: it has no time to say goodbye. Returns when it is gone.
///
/// # Errors
///
/// None runs, or it does not end.
pub fn kill(host: &Host) -> Result<()> {
    kill_known(host, pid(host)?)
}

/// As [`kill`], where its process id is known from [`pid`]: a search for it would take longer than some moments last.
///
/// # Errors
///
/// As for [`kill`].
pub fn kill_known(host: &Host, pid: u32) -> Result<()> {
    signal::kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL)
        .with_context(|| format!("cannot end the agent of {}", host.name()))?;
    wait_for(&format!("the end of the agent of {}", host.name()), READY_LIMIT, || {
        if self::pid(host).is_err() { Ok(()) } else { bail!("it is there") }
    })
}

/// Ends the process of a host that answers DNS, and `with_keeper` the one that starts it again, too. Returns without
/// waiting for their end.
///
/// # Errors
///
/// None runs, or it cannot be ended.
pub fn kill_responder(host: &Host, with_keeper: bool) -> Result<()> {
    let of_kind = |is_worker: bool| {
        observe::processes(host, |words: &[String]| {
            words.get(1).is_some_and(|word| word == "responder")
                && words.iter().any(|word| word == "--worker") == is_worker
        })
    };
    let mut found = of_kind(true)?;
    if with_keeper {
        // After the others: they end by themselves without it, and who is gone cannot be ended.
        found.extend(of_kind(false)?);
    }
    if found.is_empty() {
        bail!("no DNS responder of {} runs", host.name());
    }
    let mut command = vec!["kill".to_owned(), "-9".to_owned()];
    command.extend(found.iter().map(u32::to_string));
    host.run(command).map(drop)
}

/// Starts the agent of a host that was up before, with the state and runtime directories that it left. Returns when it
/// is ready, and a member again.
///
/// # Errors
///
/// It does not start, or does not join.
pub fn start_again(host: &Host) -> Result<()> {
    start(host)?;
    await_joined(host)
}

/// As [`start_again`], where nobody may be reached: it returns when the agent is ready, whether it is a member yet or
/// not.
///
/// # Errors
///
/// It does not start.
pub fn start(host: &Host) -> Result<()> {
    let words = if host.plan.role == Role::Router { &["up", "--router"][..] } else { &["up"][..] };
    margay(host, words.iter().copied()).map(drop)
}

/// Process id of the host's agent, found from outside.
///
/// # Errors
///
/// None runs, or more than one.
pub fn pid(host: &Host) -> Result<u32> {
    let program = host.program()?;
    let found = observe::processes(host, |words| {
        program.to_str() == Some(&words[0]) && words.get(1).map(String::as_str) == Some("agent")
    })?;
    match found[..] {
        [pid] => Ok(pid),
        _ => bail!("{} agents run on {}, not one", found.len(), host.name()),
    }
}

/// Publishes a service of this host, and waits until it is registered.
///
/// # Errors
///
/// The agent refuses, or the router does.
pub fn publish(host: &Host, service: &str, listen: &str, options: &[&str]) -> Result<()> {
    margay(host, ["service", "publish", service, "--listen", listen].iter().chain(options).copied())?;
    wait_for(&format!("registration of {service} by {}", host.name()), READY_LIMIT, || {
        let shown = show(host, service)?;
        match shown["service"]["state"].as_str() {
            Some("registered" | "local") => Ok(()),
            state => bail!("its state is {state:?}: {shown}"),
        }
    })
}

/// Withdraws all of this host's listeners of a service.
///
/// # Errors
///
/// The agent refuses.
pub fn withdraw(host: &Host, service: &str) -> Result<()> {
    margay(host, ["service", "withdraw", service]).map(drop)
}

/// Whether a host serves a name and is drained of it, by `margay service list`.
///
/// # Errors
///
/// No agent runs on the host, or it does not serve the name.
pub fn is_drained(host: &Host, service: &str) -> Result<bool> {
    let list: Value =
        serde_json::from_str(&margay(host, ["service", "list", "--json"])?).context("service list is not JSON")?;
    let mut all = list["services"].as_array().into_iter().flatten();
    let found = all.find(|found| found["name"] == service);
    let found = found.with_context(|| format!("{} does not list {service}", host.name()))?;
    Ok(found["drained"].as_bool().unwrap_or_default())
}

/// `margay undrain WHAT`: a name, or `--host`.
///
/// # Errors
///
/// The agent refuses.
pub fn undrain(host: &Host, what: &str) -> Result<()> {
    margay(host, ["undrain", what]).map(drop)
}

/// What would happen to a first packet to a name.
///
/// # Errors
///
/// No agent runs, or the name is none.
pub fn resolve(host: &Host, service: &str) -> Result<Value> {
    serde_json::from_str(&margay(host, ["service", "resolve", service, "--json"])?).context("resolve is not JSON")
}

/// `margay service show NAME --json`.
///
/// # Errors
///
/// Nobody knows the service.
pub fn show(host: &Host, service: &str) -> Result<Value> {
    serde_json::from_str(&margay(host, ["service", "show", service, "--json"])?).context("show is not JSON")
}

/// Waits until a host finds this many instances of a service.
///
/// # Errors
///
/// It does not in time.
pub fn await_instances(host: &Host, service: &str, count: usize) -> Result<()> {
    wait_for(&format!("{count} instances of {service}"), READY_LIMIT, || {
        let found = resolve(host, service)?["instances"].as_array().map_or(0, Vec::len);
        if found == count { Ok(()) } else { bail!("there are {found}") }
    })
}

/// The host's virtual addresses of a service: IPv4 (a lease) and IPv6.
///
/// # Errors
///
/// As for [`resolve`].
pub fn virtual_addresses(host: &Host, service: &str) -> Result<(String, String)> {
    let found = resolve(host, service)?;
    let text = |field: &str| found[field].as_str().unwrap_or_default().to_owned();
    Ok((text("virtual_v4"), text("virtual_v6")))
}

/// Takes a host down.
///
/// # Errors
///
/// It does not go.
pub fn down(host: &Host) -> Result<()> {
    margay(host, ["down"]).map(drop)
}
