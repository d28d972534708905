//! The service table, rule by rule; and the operator's own rules in it.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use margay_control::api::v1::{
    EndedRouteInfo, ResolverInfo, ResolverWrites, RouteAddReply, RouteAddRequest, RouteChangeRequest, RouteDeleteReply,
    RouteInfo, RouteListReply,
};
use margay_control::registration::Router;
use margay_control::resolver::{Figures, Resolver};
use margay_control::store::StoredRule;
use margay_core::key::HostId;
use margay_core::lifetime::{Ends, Expiry};
use margay_core::name::{Name, Prefix, SERVICE_BITS};
use margay_core::notice::Heard;
use margay_core::segment::SEGMENT;
use margay_core::table::resolver::ResolverId;
use margay_core::table::{Action, NextHop, Rule, RuleId, Usage, is_answering};
use margay_core::{Instant, Ranges, Sal};
use margay_datapath::clock;
use tonic::Status;

use super::flow::age_ms;
use super::service::{DEFAULT_PRIORITY, DEFAULT_WEIGHT, parse_name};
use super::{blocking, environment, misuse, not_found};
use crate::agent::rule_book::{Amendment, Ended, Order, RuleError, check_hop};
use crate::agent::{Agent, Routing};

pub(super) fn refusal(error: RuleError) -> Status {
    match error {
        RuleError::Misuse(_) | RuleError::NotOurs(..) => misuse(error),
        RuleError::Unknown(_) => not_found(error),
        RuleError::Table(_) | RuleError::Store(_) => environment(error),
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// A rule, and all that the core knows of it.
pub(in crate::agent) struct Found {
    prefix: Prefix,
    pub id: RuleId,
    pub rule: Rule,
    usage: Option<Usage>,
    ends: Ends,
    resolved_by: Option<ResolverId>,
}

impl Found {
    pub fn of(sal: &Sal, prefix: Prefix, id: RuleId, rule: &Rule) -> Self {
        let (usage, ends, resolved_by) = (sal.rule_usage(id), sal.rule_ends(id), sal.resolved_by(id));
        Self { prefix, id, rule: rule.clone(), usage, ends, resolved_by }
    }
}

/// All rules, or those that cover `name`, in the order in which they are asked: longest prefixes first, then
/// priorities.
pub(super) fn list(agent: &Agent, name: &str) -> Result<RouteListReply, Status> {
    let wanted = if name.is_empty() { None } else { Some(parse_name(name)?) };
    let mut rules: Vec<Found> = agent.core.0.with_sal(|sal, _| match &wanted {
        None => sal.rules().map(|(prefix, id, rule)| Found::of(sal, prefix, id, rule)).collect(),
        Some(name) => {
            let covering = sal.rules_covering(name.service_id());
            covering.map(|(prefix, id, rule)| Found::of(sal, prefix, id, rule)).collect()
        }
    });
    rules.sort_by_key(|found| (Reverse(found.prefix.bits), found.prefix.id, Reverse(found.rule.priority), found.id));
    let covers = |rule: &StoredRule| wanted.as_ref().is_none_or(|name| rule.prefix.contains(&name.service_id()));
    let about = wanted.as_ref().map(|name| Prefix::from(name.service_id()));
    let known = Known::of(agent, wanted.as_ref(), about.as_ref());
    let ended = agent.routing.rules.ended().into_iter().filter(|ended| covers(&ended.rule));
    let routes = rules.iter().map(|found| known.route(found));
    Ok(RouteListReply {
        routes: routes.chain(heard(agent, &known, wanted.as_ref())).collect(),
        ended: ended.map(|ended| ended_of(&known, &ended)).collect(),
        resolvers: agent
            .routing
            .rules
            .resolvers
            .all()
            .iter()
            .map(|resolver| resolver_info(&agent.routing, resolver))
            .collect(),
    })
}

/// Hosts of the segment that were heard of: no rules, and asked before the rule that asks all of the segment.
fn heard(agent: &Agent, known: &Known<'_>, wanted: Option<&Name>) -> Vec<RouteInfo> {
    let covers = |heard: &Heard| wanted.is_none_or(|name| heard.prefix.contains(&name.service_id()));
    let all: Vec<Heard> = agent.core.0.with_sal(|sal, now| sal.heard(now).filter(covers).collect());
    let info = |heard: Heard| {
        let mut info = RouteInfo {
            prefix: heard.prefix.to_string(),
            name: known.name(&heard.prefix),
            action: "forward".to_owned(),
            weight: if heard.has_failed { 0 } else { 1 },
            origin: "heard on the segment".to_owned(),
            age_ms: age_ms(heard.at),
            packets: heard.packets,
            used_ms_ago: heard.used.map(age_ms),
            ..RouteInfo::default()
        };
        known.set_host(&mut info, heard.address, Some(heard.host));
        info
    };
    all.into_iter().map(info).collect()
}

fn resolver_info(routing: &Routing, resolver: &Resolver) -> ResolverInfo {
    let Figures { asked, answered, failed, ms } = resolver.figures();
    let writes = routing.rules.resolvers.report(resolver.name()).map(|report| ResolverWrites {
        names: report.names as u64,
        failing: report.failing as u64,
        written: report.written,
        failed: report.failed,
        trouble: report.trouble.unwrap_or_default(),
    });
    ResolverInfo {
        name: resolver.name().to_owned(),
        kind: resolver.kind().to_owned(),
        asked,
        answered,
        failed,
        ms,
        trouble: resolver.trouble().unwrap_or_default(),
        writes,
    }
}

/// A rule that has ended by itself.
pub(in crate::agent) fn ended_of(known: &Known<'_>, ended: &Ended) -> EndedRouteInfo {
    let why = match ended.why {
        Expiry::Idle => "idle",
        Expiry::Hard => "hard",
    };
    EndedRouteInfo {
        route: Some(known.ended(&ended.rule)),
        why: why.to_owned(),
        ended_ms_ago: millis(ended.at.elapsed()),
    }
}

fn parse_hop(text: &str, ranges: Ranges) -> Result<SocketAddr, Status> {
    let with_port = |ip: IpAddr| SocketAddr::new(ip, margay_wire::PORT);
    let address = text.parse::<IpAddr>().map(with_port).or_else(|_| text.parse::<SocketAddr>());
    let address = address.map_err(|_| {
        misuse(format!(
            "`{text}` is no address of a next hop; write for example 10.1.0.9, 10.1.0.9:54324 or [fd01::9]:54324"
        ))
    })?;
    check_hop(address, ranges).map_err(misuse)
}

/// What is ordered, of a host with these virtual addresses.
pub(super) fn order_of(request: &RouteAddRequest, ranges: Ranges) -> Result<Order, Status> {
    let name = parse_name(&request.name)?;
    let (forward, resolver) = match (request.action.as_str(), &request.to[..]) {
        ("forward" | "forward-all", []) => return Err(misuse("a rule that forwards needs an address")),
        ("forward" | "forward-all", to) => {
            (to.iter().map(|text| parse_hop(text, ranges)).collect::<Result<Vec<_>, _>>()?, None)
        }
        ("delay", [resolver]) => (Vec::new(), Some(resolver.clone())),
        ("delay", _) => return Err(misuse("a rule that delays needs one resolver; for several give several rules")),
        ("drop", []) => (Vec::new(), None),
        ("drop", _) => return Err(misuse("a rule that discards leads nowhere; leave the addresses out")),
        (other, _) => return Err(misuse(format!("`{other}` is no action; it is forward, forward-all, delay or drop"))),
    };
    Ok(Order {
        name,
        forward,
        all: request.action == "forward-all",
        resolver,
        weight: request.weight.unwrap_or(DEFAULT_WEIGHT),
        priority: request.priority.unwrap_or(DEFAULT_PRIORITY),
        idle: request.idle_timeout_ms.map(Duration::from_millis),
        hard: request.hard_timeout_ms.map(Duration::from_millis),
    })
}

pub(super) fn add(agent: &Agent, request: &RouteAddRequest) -> Result<RouteAddReply, Status> {
    let order = order_of(request, agent.config().ranges())?;
    let ids = blocking(|| agent.routing.rules.add(&order, &agent.authorities())).map_err(refusal)?;
    tracing::info!(name = %order.name, rules = ids.len(), "rules added by the operator");
    let routes: Vec<RouteInfo> = ids.into_iter().filter_map(|id| info(agent, id)).collect();
    Ok(RouteAddReply { warnings: warnings(agent, &order), routes })
}

/// On a router: next hops that what others send cannot be tagged for.
fn warnings(agent: &Agent, order: &Order) -> Vec<String> {
    let is_strange = |address: &&SocketAddr| {
        let hop = NextHop { address: **address, host: None, router: false };
        agent.routing.router.is_some() && !agent.core.0.with_sal(|sal, _| sal.is_hop_known(&hop))
    };
    let strange = order.forward.iter().filter(is_strange);
    strange
        .map(|address| {
            format!(
                "no host that is registered here, and no router of this host, is known at {address}: connections that \
                 this router sends there for others end in a time-out, since the answers do not find back"
            )
        })
        .collect()
}

pub(super) fn change(agent: &Agent, request: &RouteChangeRequest) -> Result<RouteInfo, Status> {
    let time = |given: Option<u64>, none: bool| match (given, none) {
        (Some(ms), _) => Some(Some(Duration::from_millis(ms))),
        (None, true) => Some(None),
        (None, false) => None,
    };
    let forward = if request.to.is_empty() { None } else { Some(parse_hop(&request.to, agent.config().ranges())?) };
    let amendment = Amendment {
        forward,
        weight: request.weight,
        priority: request.priority,
        idle: time(request.idle_timeout_ms, request.no_idle_timeout),
        hard: time(request.hard_timeout_ms, request.no_hard_timeout),
    };
    blocking(|| agent.routing.rules.change(RuleId(request.id), &amendment)).map_err(refusal)?;
    tracing::info!(rule = request.id, "changed by the operator");
    info(agent, RuleId(request.id)).ok_or_else(|| refusal(RuleError::Unknown(request.id)))
}

pub(super) fn delete(agent: &Agent, id: u64) -> Result<RouteDeleteReply, Status> {
    blocking(|| agent.routing.rules.delete(RuleId(id))).map_err(refusal)?;
    tracing::info!(rule = id, "deleted by the operator");
    Ok(RouteDeleteReply {})
}

fn info(agent: &Agent, id: RuleId) -> Option<RouteInfo> {
    let found = agent.core.0.with_sal(|sal, _| {
        let (prefix, rule) = sal.rule(id)?;
        Some(Found::of(sal, prefix, id, rule))
    });
    let found = found?;
    Some(Known::of(agent, None, Some(&found.prefix)).route(&found))
}

/// What people call prefixes and hosts, as far as this host knows.
pub(in crate::agent) struct Known<'a> {
    agent: &'a Agent,
    names: HashMap<Prefix, String>,
    hosts: HashMap<HostId, String>,
}

impl<'a> Known<'a> {
    /// From what it publishes, what is registered here, the operator's rules, and what was asked for. With `about` only
    /// what concerns names under that prefix, which is soon found where much is registered.
    pub fn of(agent: &'a Agent, wanted: Option<&Name>, about: Option<&Prefix>) -> Self {
        let under =
            |router: &Arc<Router>| about.map_or_else(|| router.instances(), |about| router.instances_under(about));
        let registered = agent.routing.router.as_ref().map(under).unwrap_or_default();
        let named = |name: &Name| (name.prefix(), name.written().to_owned());
        let own = agent.publishing.services.list();
        let of_authority = |authority: String| (Prefix::of_authority(&authority), format!("*.{authority}"));
        let names = agent.authorities().into_iter().map(of_authority).chain(agent.routing.rules.names());
        let names = names.chain(agent.routing.rules.resolvers.names());
        let names = names.chain(registered.iter().map(|one| (one.prefix, one.name.clone())));
        let announced = agent.routing.area.as_ref().map(|area| area.names(about)).unwrap_or_default();
        let names = announced.into_iter().chain(names);
        let names = names.chain(own.iter().map(|service| named(&service.name))).chain(wanted.map(named));
        Self {
            agent,
            names: names.collect(),
            hosts: registered.iter().map(|one| (one.host, one.host_name.clone())).collect(),
        }
    }

    fn set_host(&self, info: &mut RouteInfo, address: SocketAddr, host: Option<HostId>) {
        info.to = address.to_string();
        let named = host.and_then(|host| Some((host, self.hosts.get(&host)?.clone())));
        let there = || {
            self.agent
                .routing
                .router
                .as_ref()?
                .host_at(address)
                .filter(|(found, _)| host.is_none_or(|host| host == *found))
        };
        if let Some((host, name)) = named.or_else(there).or(host.map(|host| (host, String::new()))) {
            (info.host_id, info.host_name) = (host.to_string(), name);
        }
    }

    /// A rule that has ended.
    fn ended(&self, rule: &StoredRule) -> RouteInfo {
        let mut info = RouteInfo {
            prefix: rule.prefix.to_string(),
            name: rule.name.clone(),
            action: match (rule.forward, &rule.resolver) {
                (Some(_), _) => "forward",
                (None, Some(_)) => "delay",
                (None, None) => "drop",
            }
            .to_owned(),
            to: rule.resolver.clone().unwrap_or_default(),
            priority: rule.priority,
            weight: rule.weight,
            id: rule.id.0,
            ..RouteInfo::default()
        };
        if let Some(address) = rule.forward {
            self.set_host(&mut info, address, None);
        }
        self.set_order(&mut info, rule);
        info
    }

    /// What the operator said of a rule.
    fn set_order(&self, info: &mut RouteInfo, rule: &StoredRule) {
        info.origin = "operator".to_owned();
        info.age_ms =
            self.agent.host.clock.unix_s().saturating_sub(rule.created_s).saturating_mul(1000).max(info.age_ms);
        info.idle_timeout_ms = rule.idle.map(millis);
        info.hard_timeout_ms = rule.hard.map(millis);
    }

    /// A prefix as people write it; empty: nobody here knows. A service stands for all its keys.
    pub fn name(&self, prefix: &Prefix) -> String {
        let whole = (prefix.bits == SERVICE_BITS).then(|| Prefix::from(prefix.id));
        let named = self.names.get(prefix).or_else(|| self.names.get(&whole?));
        named.cloned().unwrap_or_default()
    }

    /// A rule as lists show it.
    pub fn route(&self, found: &Found) -> RouteInfo {
        let Found { prefix, id, rule, usage, ends, resolved_by } = found;
        let usage = usage.map(|usage| self.agent.kernel.router.whole_usage(*id, usage));
        let now = clock::now();
        let left = |at: Option<Instant>| at.map(|at| millis(at.since(now)));
        let mut info = RouteInfo {
            prefix: prefix.to_string(),
            name: self.name(prefix),
            priority: rule.priority,
            weight: rule.weight,
            age_ms: usage.map_or(0, |usage| age_ms(usage.since)),
            packets: usage.map_or(0, |usage| usage.packets),
            used_ms_ago: usage.and_then(|usage| usage.last).map(age_ms),
            id: id.0,
            idle_left_ms: left(ends.idle),
            hard_left_ms: left(ends.hard),
            ..RouteInfo::default()
        };
        let (action, origin) = match &rule.action {
            Action::Forward(hop) if hop.address == SEGMENT => {
                info.to = "the segment".to_owned();
                ("forward", "ad hoc")
            }
            Action::Forward(hop) => {
                self.set_host(&mut info, hop.address, hop.host);
                ("forward", if hop.router { "router" } else { "registered" })
            }
            Action::ForwardAll(hop) => {
                self.set_host(&mut info, hop.address, hop.host);
                ("forward-all", "operator")
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
                ("demux", if is_answering(rule) { "searches for a router" } else { "published" })
            }
            Action::Box(_) => ("box", "published"),
            Action::Delay(resolver) => {
                info.to = self.agent.routing.rules.resolvers.name_of(*resolver);
                ("delay", "configured")
            }
            Action::Drop => ("drop", "operator"),
        };
        (info.action, info.origin) = (action.to_owned(), origin.to_owned());
        if let (Action::Forward(NextHop { router: true, host: Some(host), .. }), Some(cluster)) =
            (&rule.action, &self.agent.routing.cluster)
            && let Some(router) = cluster.routers().into_iter().find(|router| router.id() == *host)
        {
            info.origin = format!("registered with {}", router.name);
        }
        if let Some(announced) = self.agent.routing.area.as_ref().and_then(|area| area.origin(*id)) {
            (info.origin, info.sites) = ("announced".to_owned(), announced);
        }
        if let Some(resolver) = resolved_by {
            info.origin = format!("resolved by {}", self.agent.routing.rules.resolvers.name_of(*resolver));
        }
        if let Some(order) = self.agent.routing.rules.get(*id) {
            self.set_order(&mut info, &order);
        }
        info
    }
}
