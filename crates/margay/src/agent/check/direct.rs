//! What keeps flows from going direct.

use std::collections::BTreeMap;

use margay_control::quantity::count_of;
use margay_core::key::HostId;
use margay_core::{FlowInfo, Lifecycle, Why};
use nix::net::if_::if_indextoname;

use super::{Finding, Steps, firewall};
use crate::agent::Agent;
use crate::agent::direct::FLOW_PORTS;
use crate::agent::way::Detour;
use crate::host::sysctl;

const PORT_RANGE: &str = "net/ipv4/ip_local_port_range";

/// The direct path of this host.
pub(super) async fn this_host(agent: &Agent, steps: &mut Steps) {
    if let Some(why) = agent.kernel.direct.why_unguarded() {
        let text = format!("whoever is on a network of this host can send to its virtual addresses: {why}");
        let ranges = agent.config().ranges();
        let advice =
            format!("install nftables, or let this host's firewall drop what comes for {ranges}, or from there");
        steps.say("direct", Finding::failed(text, advice)).await;
    }
    if let Some(why) = agent.kernel.direct.why_not() {
        let advice = "it works: flows are encapsulated, at several times the processor time per byte, and pause while \
                      the agent is not there";
        return steps.say("direct", Finding::warning(why, advice)).await;
    }
    let bare: Vec<String> = agent.kernel.direct.bare_interfaces().into_iter().map(name_of).collect();
    if !bare.is_empty() {
        let text = format!(
            "{} took no eBPF program; flows that arrive there stay encapsulated, and whoever is there can send to \
             virtual addresses",
            bare.join(", ")
        );
        let advice = "the agent's log says why; programs that were attached to be the only ones keep others away";
        steps.say("direct", Finding::warning(text, advice)).await;
    }
    if let Some(clash) = port_clash() {
        steps.say("direct", clash).await;
    }
    if let Some(detour) = agent.kernel.way.detour() {
        steps.say("direct", of_detour(detour)).await;
    }
    let paths = Paths::of(agent, |_| true);
    let none = || Finding::Ok("programs and maps are in place; no flow is open".to_owned());
    steps.say("direct", paths.finding().unwrap_or_else(none)).await;
}

/// Why direct packets do not come to programs in place at the cards.
fn of_detour(detour: Detour) -> Finding {
    match detour {
        Detour::Judged(judge) => Finding::Ok(format!(
            "direct packets come to programs by sal0: {judge} may ask by which interface they come (at the cost of \
             some processor time)"
        )),
        Detour::Unknown(why) => Finding::warning(
            format!(
                "direct packets come to programs by sal0, since this host's packet filter cannot be looked at: {why}"
            ),
            "it works, at the cost of some processor time",
        ),
        Detour::Swallowed(flows) => Finding::warning(
            format!(
                "something on this host drops direct packets that come by a card for a virtual address: {flows} \
                 flows took the way by sal0, and so do \
                 all until the next start"
            ),
            "`nft list ruleset`, `iptables-save` and `bpftool net` show what filters; it works, at the cost of some \
             processor time",
        ),
    }
}

/// How the flows with one peer go, and why not direct where they do not.
pub(super) async fn peer(agent: &Agent, steps: &mut Steps, host: HostId) {
    if let Some(finding) = Paths::of(agent, |flow| flow.peer == Some(host)).finding() {
        steps.say("direct", finding).await;
    }
}

pub(super) fn name_of(index: u32) -> String {
    if_indextoname(index).ok().and_then(|name| name.into_string().ok()).unwrap_or_else(|| format!("interface {index}"))
}

/// How open flows go.
#[derive(Default)]
struct Paths {
    direct: usize,
    /// Those that are not direct, by why.
    others: BTreeMap<&'static str, (usize, Why)>,
}

impl Paths {
    fn of(agent: &Agent, is_wanted: impl Fn(&FlowInfo) -> bool) -> Self {
        let is_open = |flow: &FlowInfo| matches!(flow.lifecycle, Lifecycle::Established | Lifecycle::HalfClosed);
        agent.core.0.with_sal(|sal, _| {
            let mut paths = Self::default();
            for flow in sal.flows().filter(|flow| is_open(flow) && is_wanted(flow)) {
                if flow.carriage.sends() {
                    paths.direct += 1;
                } else {
                    paths.others.entry(flow.why.text()).or_insert((0, flow.why)).0 += 1;
                }
            }
            paths
        })
    }

    /// `None` when there are no flows.
    fn finding(&self) -> Option<Finding> {
        let total = self.direct + self.others.values().map(|(count, _)| count).sum::<usize>();
        if total == 0 {
            return None;
        }
        let mut detail = format!("direct: {} of {}", self.direct, count_of(total, "flow"));
        for (text, (count, _)) in &self.others {
            detail.push_str(&format!("; {count}: {text}"));
        }
        // The commonest of those that somebody could do something about.
        let mendable = self.others.values().filter_map(|(count, why)| Some((count, advice(*why)?)));
        Some(match mendable.max_by_key(|(count, _)| **count) {
            Some((_, advice)) => {
                let own = self.others.values().any(|(_, why)| matches!(why, Why::Unproved | Why::Stalled));
                let filter = own.then(|| tokio::task::block_in_place(firewall::filter)).flatten();
                let filter =
                    filter.map(|filter| format!("; on this host {filter} may refuse them")).unwrap_or_default();
                Finding::warning(detail, format!("{advice}{filter}"))
            }
            None => Finding::Ok(detail),
        })
    }
}

/// What somebody could do about a flow that is not direct; nothing where that is as it should be.
fn advice(why: Why) -> Option<&'static str> {
    match why {
        Why::Unproved | Why::Stalled => Some(
            "a firewall or an address translator between the hosts drops TCP between ports 61000 and 65535 whose SYN \
             it never saw; let it pass both ways, or leave it: it works as it is",
        ),
        Why::PeerBack | Why::PeerHasNone => Some("`margay check` on the peer says why"),
        Why::SharedAddress => Some("the hosts behind one address need addresses of their own to be told apart"),
        Why::Nowhere => Some("`margay path list` shows where this host looks for its peers"),
        Why::NoCache => Some("see the step before"),
        Why::Secure
        | Why::Fec
        | Why::Sctp
        | Why::Striped
        | Why::SameHost
        | Why::PortsTaken
        | Why::Proved
        | Why::Hinted
        | Why::Granted
        | Why::Held => None,
    }
}

/// Sockets of this host that may be given flow ports by the kernel.
fn port_clash() -> Option<Finding> {
    let text = sysctl::read(PORT_RANGE).ok().flatten()?;
    let last: u16 = text.split_whitespace().nth(1)?.parse().ok()?;
    (last >= *FLOW_PORTS.start()).then(|| {
        Finding::Ok(format!(
            "{PORT_RANGE} is {text}: sockets of this host are given ports of direct flows, from {} on; what is for \
             such a socket gets there, \
             and a flow of datagrams that has drawn the port of one stays encapsulated",
            FLOW_PORTS.start()
        ))
    })
}
