//! `margay check`: looks at everything between a program on this host and its peer, step by step, and names the cause.

mod direct;
mod disk;
mod firewall;
pub mod list;
mod peer;
mod refusal;
mod resolver;
mod service;
mod sockets;

use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::Stream;
use margay_control::api::v1::CheckStep;
use margay_control::registration::Phase;
use margay_control::warrant::lineages;
use margay_datapath::service_router::Mode;
use nix::net::if_::if_nametoindex;
use tokio::sync::mpsc;
use tonic::Status;

use super::api::phase;
use super::{Agent, Host, INTERFACE};
use crate::host::{self, change::State};
use crate::listener::Protocol;
use margay_control::quantity::{count, count_of};

/// Longer than any resolver that works.
const LOOKUP_LIMIT: Duration = Duration::from_secs(3);

/// A warrant that ends sooner is to be renewed.
const WARRANT_DAYS: u64 = 14;
const DAY_S: u64 = 24 * 60 * 60;

/// What a step has found.
enum Finding {
    Ok(String),
    /// Under way by itself.
    Waiting(String, String),
    Warning(String, String),
    Failed(String, String),
}

impl Finding {
    fn failed(detail: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::Failed(detail.into(), advice.into())
    }

    fn waiting(detail: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::Waiting(detail.into(), advice.into())
    }

    fn warning(detail: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::Warning(detail.into(), advice.into())
    }
}

/// Gives steps to the caller as they are done.
struct Steps {
    sender: mpsc::Sender<CheckStep>,
    since: Instant,
}

impl Steps {
    async fn say(&mut self, name: &str, finding: Finding) {
        let (state, detail, advice) = match finding {
            Finding::Ok(detail) => ("ok", detail, String::new()),
            Finding::Waiting(detail, advice) => ("waiting", detail, advice),
            Finding::Warning(detail, advice) => ("warning", detail, advice),
            Finding::Failed(detail, advice) => ("failed", detail, advice),
        };
        let elapsed_us = u64::try_from(self.since.elapsed().as_micros()).unwrap_or(u64::MAX);
        let looks_at = list::looks_at(name).to_owned();
        let (name, state) = (name.to_owned(), state.to_owned());
        let step = CheckStep { name, state, detail, advice, elapsed_us, looks_at };
        // Whoever asked may have gone away; the rest of the steps harm nobody.
        let _ = self.sender.send(step).await;
        self.since = Instant::now();
    }
}

/// All steps; with a peer, those on the way to it, too.
pub fn stream(
    agent: Arc<Agent>,
    peer: String,
    protocol: Protocol,
) -> Pin<Box<dyn Stream<Item = Result<CheckStep, Status>> + Send>> {
    let (sender, receiver) = mpsc::channel(16);
    tokio::spawn(async move {
        let mut steps = Steps { sender, since: Instant::now() };
        this_host(&agent, &mut steps).await;
        if !peer.is_empty() {
            peer::look(&agent, &mut steps, &peer, protocol).await;
        }
    });
    let steps = futures_util::stream::unfold(receiver, |mut receiver| async move {
        receiver.recv().await.map(|step| (Ok(step), receiver))
    });
    Box::pin(steps)
}

async fn this_host(agent: &Agent, steps: &mut Steps) {
    steps.say("kernel", kernel()).await;
    match host::inspect(&agent.config()).await {
        Err(error) => steps.say("host", Finding::failed(error.to_string(), "run `margay up` again")).await,
        Ok(changes) => {
            let wrong: Vec<_> = changes.iter().filter(|(_, state)| *state != State::Present).collect();
            if wrong.is_empty() {
                let text = format!("all that `margay up` changes is in place: {}", count_of(changes.len(), "change"));
                steps.say("host", Finding::Ok(text)).await;
            }
            for (what, state) in wrong {
                let how = match state {
                    State::Differs(how) => format!("{what}: {how}"),
                    _ => format!("{what}: is missing"),
                };
                steps.say("host", Finding::failed(how, "`margay up` puts it back")).await;
            }
        }
    }
    surroundings(agent, steps).await;
    disk::look(agent, steps).await;
    steps.say("datapath", datapath(agent)).await;
    direct::this_host(agent, steps).await;
    steps.say("dns", dns(agent).await).await;
    if let Some(remark) = agent.names.dns.as_ref().and_then(|dns| dns.way.remark()) {
        let advice = "give the agent CAP_SYS_ADMIN, and a kernel with network namespaces and veth";
        steps.say("dns", Finding::warning(remark, advice)).await;
    }
    steps.say("leases", leases(agent)).await;
    routers(agent, steps).await;
    warrants(&agent.host, steps).await;
    service::look(agent, steps).await;
    resolver::look(agent, steps).await;
    refusal::look(agent, steps).await;
    firewall::this_host(agent, steps).await;
}

/// What others have on this host that is in the way of packets with virtual addresses.
async fn surroundings(agent: &Agent, steps: &mut Steps) {
    for why in agent.kernel.network.host_changes.not_kept() {
        let advice = "find out which program it is, and have it leave Margay's alone; then `margay up`";
        steps.say("host", Finding::failed(why, advice)).await;
    }
    for clash in host::clashes(agent.config().ranges()).await.unwrap_or_default() {
        let text = format!("virtual addresses are taken away by {clash}");
        let advice = "take it away, or give Margay other ranges: [ranges] in margay.toml";
        steps.say("host", Finding::failed(text, advice)).await;
    }
    for rule in host::rules_before(agent.config().ranges()).await.unwrap_or_default() {
        let text = format!("{rule} of another program is asked before Margay's, and may take packets to names away");
        let advice = "`ip rule` and `ip -6 rule` show it; give it a priority above the rule of `lookup local`, and \
                      Margay's goes before it";
        steps.say("host", Finding::warning(text, advice)).await;
    }
}

/// Whether what this host signs or shows by the word of keys elsewhere holds for a while.
async fn warrants(host: &Host, steps: &mut Steps) {
    let authorities = host.keyring.authorities().unwrap_or_default();
    let lines = match lineages(&host.keyring, &host.store) {
        Ok(lines) => lines,
        Err(error) => {
            let advice = "the names of its authorities are closed until they can be; `margay id` and the log say more";
            return steps.say("warrant", Finding::failed(error.to_string(), advice)).await;
        }
    };
    let to_sign = authorities.iter().filter_map(|authority| {
        let end_s = authority.warrant.as_ref()?.not_after_s();
        // The key that has signed it may end before it.
        let trusted_s = lines.get(&authority.block()).and_then(|(_, line)| line.until_s(&authority.root()));
        let end_s = end_s.min(trusted_s.unwrap_or(u64::MAX));
        // What was taken back has ended.
        let end_s = if authority.revoked.is_some() { 0 } else { end_s };
        Some((format!("the right to sign for {}", authority.name), end_s, authority.ended()))
    });
    let permits = host.keyring.permits().unwrap_or_default();
    let to_answer = permits.iter().map(|permit| {
        let advice = format!("`margay id key sign {}` where its key is, `margay id accept` here", permit.name);
        (format!("the right to answer for the key of {}", permit.name), permit.not_after_s(), advice)
    });
    let now = host.clock.unix_s();
    for (what, end_s, advice) in to_sign.chain(to_answer) {
        let days = end_s.saturating_sub(now) / DAY_S;
        let finding = match end_s {
            _ if end_s < now => Finding::failed(format!("{what} has ended"), advice),
            _ if days < WARRANT_DAYS => Finding::warning(format!("{what} ends in {}", count(days, "day")), advice),
            _ => Finding::Ok(format!("{what} holds for {}", count(days, "day"))),
        };
        steps.say("warrant", finding).await;
    }
}

fn kernel() -> Finding {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version < (6, 2) {
        let advice = "it works; from 6.2 on a TUN carries large UDP packets whole";
        return Finding::warning(format!("Linux {release}"), advice);
    }
    Finding::Ok(format!("Linux {release}"))
}

fn datapath(agent: &Agent) -> Finding {
    if let Some(failure) = agent.core.0.failure() {
        return Finding::failed(failure, "`margay down`, then `margay up`");
    }
    let counted = agent.core.0.counters();
    let carried = format!(
        "{INTERFACE} and UDP port {}: {} out, {} in",
        agent.config().host.port,
        count(counted.egress_packets, "packet"),
        count(counted.ingress_runs, "run")
    );
    if if_nametoindex(INTERFACE).is_ok() {
        Finding::Ok(carried)
    } else {
        Finding::failed(format!("{INTERFACE} is gone"), "`margay down`, then `margay up`")
    }
}

/// A name of the zone, as a program would look it up.
async fn dns(agent: &Agent) -> Finding {
    if agent.names.dns.is_none() {
        return match agent.config().dns.enabled {
            false => Finding::Ok("off by configuration; programs use virtual addresses".to_owned()),
            true => Finding::failed(agent.process.warnings.join("; "), "free the address, or set [dns] listen"),
        };
    }
    let name = format!("check.margay.{}", agent.config().dns.zone);
    let looked_up = tokio::time::timeout(LOOKUP_LIMIT, tokio::net::lookup_host((name.as_str(), 80))).await;
    let advice = "programs of this host do not ask the agent: `margay up` sets /etc/resolv.conf or systemd-resolved; \
                  another program may have rewritten it";
    match looked_up {
        Err(_) => Finding::failed(format!("{name}: no answer in {LOOKUP_LIMIT:?}"), advice),
        Ok(Err(error)) => Finding::failed(format!("{name}: {error}"), advice),
        Ok(Ok(addresses)) => {
            let found: Vec<IpAddr> = addresses.map(|address| address.ip()).collect();
            if found.iter().any(|address| agent.config().ranges().is_virtual(*address)) {
                Finding::Ok(format!("names of {} are found", agent.config().dns.zone))
            } else {
                Finding::failed(format!("{name}: answered by somebody else with {found:?}"), advice)
            }
        }
    }
}

/// Whether new names still get a virtual IPv4 address.
fn leases(agent: &Agent) -> Finding {
    let fullness = agent.names.leases.fullness();
    let counts = agent.names.leases.counts();
    let text = format!("{} of {} virtual IPv4 addresses stand for names", fullness.leased, fullness.pool);
    let advice = "find out which program looks up so many names (`journalctl`, `ss -unp`), and stop it; an address \
     is free for \
                  another name a day after its last use";
    if fullness.is_exhausted() {
        return Finding::failed(format!("{text}, all in use: new names get none"), advice);
    }
    if counts.too_many > 0 {
        let text = format!("{text}; {} new names were refused, since one asker asked for too many", counts.too_many);
        return Finding::warning(text, advice);
    }
    if fullness.is_nearly_full() {
        return Finding::warning(text, advice);
    }
    Finding::Ok(text)
}

/// Who forwards first packets for others.
fn kernel_router(agent: &Agent) -> Finding {
    let advice =
        "it works: this process forwards, at some times the processor time per packet; the agent's log says more";
    if let Some(why) = agent.kernel.router.why_not() {
        return Finding::warning(format!("the kernel forwards nothing: {why}"), advice);
    }
    let Some(kernel) = agent.kernel.router.kernel() else { return Finding::Ok("not loaded".to_owned()) };
    let bare = kernel.bare_interfaces();
    if let Some((index, why)) = bare.first() {
        let name = direct::name_of(*index);
        let text = format!("no program at {}, {name} among them: {why}", count_of(bare.len(), "interface"));
        return Finding::warning(text, advice);
    }
    let forwarded = count(kernel.forwarded(), "packet");
    match kernel.mode() {
        Some((Mode::Driver, interfaces)) => Finding::Ok(format!(
            "the drivers of {} run the service router; {forwarded} forwarded",
            count_of(interfaces, "interface")
        )),
        Some((Mode::Buffer, interfaces)) => Finding::Ok(format!(
            "the kernel runs the service router on {}, not all of whose drivers could; {forwarded} forwarded",
            count_of(interfaces, "interface")
        )),
        None => Finding::Ok("the service router is on no interface yet".to_owned()),
    }
}

async fn routers(agent: &Agent, steps: &mut Steps) {
    let homes = agent.publishing.services.homes();
    if homes.is_empty() && agent.routing.router.is_none() {
        let advice = "`margay id token create AUTHORITY` on a router prints a token for `margay up --join`";
        steps.say("router", Finding::warning("this host has joined no router", advice)).await;
    }
    if let Some(router) = &agent.routing.router {
        let text = format!("this host is a router; registered with it: {}", count_of(router.host_count(), "host"));
        steps.say("router", Finding::Ok(text)).await;
        steps.say("router", kernel_router(agent)).await;
    }
    if let Some(cluster) = &agent.routing.cluster {
        let state = cluster.state();
        let text = format!("the cluster {} has {}", cluster.prefix(), count_of(cluster.routers().len(), "router"));
        let finding = match (state.is_connected, state.why) {
            (true, _) => Finding::Ok(format!("{text}; this one follows {}", state.endpoint)),
            (false, why) if why.is_empty() => Finding::waiting("etcd was not reached yet", "look again in a moment"),
            (false, why) => Finding::failed(
                format!("{text}; etcd is away: {why}"),
                "members and their services go on meanwhile; nobody new can join, and no token, grant or name is \
                 decided about",
            ),
        };
        steps.say("etcd", finding).await;
    }
    for home in homes {
        let (config, state) = (home.config(), home.state());
        let found = agent.routing.searches.found_at(&home);
        let found = found.map(|at| format!(", found on the network segment at {at}")).unwrap_or_default();
        let text = format!("{} of {}: {}{found}", config.router_address, config.authority, phase(state.phase));
        let finding = match state.phase {
            Phase::Connected => Finding::Ok(text),
            Phase::Connecting => Finding::waiting(format!("{text} {}", state.why), "look again in a moment"),
            Phase::Refused => Finding::failed(format!("{text}: {}", state.why), "a new join token may be needed"),
            Phase::Unreachable => Finding::failed(
                format!("{text}: {}", state.why),
                "is the router up, and does a firewall let TCP and UDP port 54324 through?",
            ),
        };
        steps.say("router", finding).await;
    }
}
