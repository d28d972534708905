//! The service table, rule by rule.

use std::cmp::Reverse;
use std::collections::HashMap;

use margay_control::api::v1::{RouteInfo, RouteListReply};
use margay_core::key::HostId;
use margay_core::name::{Name, Prefix};
use margay_core::segment::SEGMENT;
use margay_core::table::{Action, Rule, Usage};
use tonic::Status;

use super::flow::age_ms;
use super::service::parse_name;
use crate::agent::Agent;

/// All rules, or those that cover `name`, in the order in which they are asked: longest prefixes first, then priorities.
pub(super) fn list(agent: &Agent, name: &str) -> Result<RouteListReply, Status> {
    let wanted = if name.is_empty() { None } else { Some(parse_name(name)?) };
    let covers = |prefix: &Prefix| wanted.as_ref().is_none_or(|name| prefix.contains(&name.service_id()));
    let mut rules: Vec<(Prefix, Rule, Option<Usage>)> = agent.core.0.with_sal(|sal, _| {
        let covering = sal.rules().filter(|(prefix, ..)| covers(prefix));
        let whole = |id| sal.rule_usage(id).map(|usage| agent.kernel_router.whole_usage(id, usage));
        covering.map(|(prefix, id, rule)| (prefix, rule.clone(), whole(id))).collect()
    });
    rules.sort_by_key(|(prefix, rule, _)| (Reverse(prefix.bits), prefix.id, Reverse(rule.priority)));
    let known = Known::of(agent, wanted);
    Ok(RouteListReply {
        routes: rules.iter().map(|(prefix, rule, usage)| known.route(*prefix, rule, *usage)).collect(),
    })
}

/// What people call prefixes and hosts, as far as this host knows.
struct Known {
    names: HashMap<Prefix, String>,
    hosts: HashMap<HostId, String>,
}

impl Known {
    /// From what it publishes, what is registered here, and what was asked for.
    fn of(agent: &Agent, wanted: Option<Name>) -> Self {
        let registered = agent.router.as_ref().map(|router| router.instances()).unwrap_or_default();
        let named = |name: &Name| (name.prefix(), name.written().to_owned());
        let own = agent.services.list();
        let names = registered.iter().map(|one| (one.prefix, one.name.clone()));
        let names = names.chain(own.iter().map(|service| named(&service.name))).chain(wanted.as_ref().map(named));
        Self { names: names.collect(), hosts: registered.iter().map(|one| (one.host, one.host_name.clone())).collect() }
    }

    fn route(&self, prefix: Prefix, rule: &Rule, usage: Option<Usage>) -> RouteInfo {
        let mut info = RouteInfo {
            prefix: prefix.to_string(),
            name: self.names.get(&prefix).cloned().unwrap_or_default(),
            priority: rule.priority,
            weight: rule.weight,
            age_ms: usage.map_or(0, |usage| age_ms(usage.since)),
            packets: usage.map_or(0, |usage| usage.packets),
            used_ms_ago: usage.and_then(|usage| usage.last).map(age_ms),
            ..RouteInfo::default()
        };
        let (action, origin) = match &rule.action {
            Action::Forward(hop) if hop.address == SEGMENT => {
                info.to = "the segment".to_owned();
                ("forward", "ad hoc")
            }
            Action::Forward(hop) => {
                info.to = hop.address.to_string();
                info.host_id = hop.host.map(|host| host.to_string()).unwrap_or_default();
                info.host_name = hop.host.and_then(|host| self.hosts.get(&host)).cloned().unwrap_or_default();
                ("forward", if hop.router { "router" } else { "registered" })
            }
            Action::Demux(demux) => {
                info.to = demux.listener.to_string();
                info.service_port = demux.service_port.map_or(0, u32::from);
                info.protocol = match demux.protocol {
                    Some(6) => "tcp",
                    Some(17) => "udp",
                    _ => "",
                }
                .to_owned();
                ("demux", "published")
            }
            Action::Drop => ("drop", "published"),
        };
        (info.action, info.origin) = (action.to_owned(), origin.to_owned());
        info
    }
}
