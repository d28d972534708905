//! The agent as a whole.

use margay_control::api::v1::{
    AssociationInfo, AssociationListReply, ClusterInfo, ClusterRouterInfo, DropCount, RouterInfo, StatusReply,
};
use margay_control::cluster::{Cluster, RouterEntry};
use margay_control::quantity::count;
use margay_control::registration::{Home, Phase};

use crate::agent::start::sal_address;
use crate::agent::{Agent, INTERFACE, Routing, home, metrics, naming};

pub(super) fn reply(agent: &Agent) -> StatusReply {
    let (flows, flows_direct, half_open, associations) = agent
        .core
        .0
        .with_sal(|sal, _| (sal.flow_count(), sal.direct_count(), sal.half_open_count(), sal.association_count()));
    let homes = agent.publishing.services.homes();
    let signs = agent.host.keyring.authorities().is_ok_and(|authorities| !authorities.is_empty());
    let joined = if homes.is_empty() { signs } else { homes.iter().any(|home| home::is_connected(home)) };
    let ranges = agent.config().ranges();
    StatusReply {
        host_id: agent.host.identity.host_id().to_string(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        epoch: agent.host.identity.epoch,
        uptime_s: agent.process.started.elapsed().as_secs(),
        router: agent.routing.router.is_some(),
        interface: INTERFACE.to_owned(),
        sal_address: sal_address(&agent.config()).to_string(),
        addresses: vec![ranges.host_v4().to_string(), ranges.host_v6().to_string()],
        datapath: datapath(agent).to_owned(),
        datapath_why: agent.kernel.direct.why_not().unwrap_or_default(),
        zone: agent.config().dns.zone.clone(),
        dns_address: agent.names.dns.as_ref().map(|dns| dns.way.address().to_string()).unwrap_or_default(),
        flows: flows as u64,
        flows_direct: flows_direct as u64,
        half_open: half_open as u64,
        associations: associations as u64,
        leases: agent.names.leases.len() as u64,
        services: agent.publishing.services.list().len() as u64,
        hosts: agent.routing.router.as_ref().map_or(0, |router| router.host_count() as u64),
        routers: homes.iter().map(|home| router_info(&agent.routing, home)).collect(),
        warnings: warnings(agent, joined),
        joined,
        drops: drops(agent),
        cluster: agent.routing.cluster.as_ref().map(|cluster| cluster_info(&agent.routing, cluster)),
    }
}

/// How it stands with etcd, and with the other routers.
fn cluster_info(routing: &Routing, cluster: &Cluster) -> ClusterInfo {
    let (state, me) = (cluster.state(), cluster.router().id());
    let links = routing.router.as_ref().map(|router| router.links()).unwrap_or_default();
    let router = |router: RouterEntry| {
        let state = match router.id() {
            id if id == me => "this",
            id if links.contains(&id) => "connected",
            _ => "unreachable",
        };
        ClusterRouterInfo {
            host_id: router.id().to_string(),
            name: router.name,
            address: router.address,
            state: state.to_owned(),
        }
    };
    ClusterInfo {
        connected: state.is_connected,
        endpoint: state.endpoint,
        why: state.why,
        since_unix_s: state.since_unix_s,
        prefix: cluster.prefix().to_owned(),
        routers: cluster.routers().into_iter().map(router).collect(),
    }
}

/// What carries established data.
pub(super) fn datapath(agent: &Agent) -> &'static str {
    if agent.kernel.direct.why_not().is_none() { "kernel" } else { "user-space" }
}

fn router_info(routing: &Routing, home: &Home) -> RouterInfo {
    let (config, state) = (home.config(), home.state());
    RouterInfo {
        address: config.router_address.clone(),
        host_id: config.router_key.id().to_string(),
        authority: config.authority.clone(),
        state: phase(state.phase).to_owned(),
        why: state.why,
        since_unix_s: state.since_unix_s,
        found_at: routing.searches.found_at(home).map(|at| at.to_string()).unwrap_or_default(),
    }
}

/// As lists show it.
pub(crate) const fn phase(phase: Phase) -> &'static str {
    match phase {
        Phase::Connecting => "connecting",
        Phase::Connected => "connected",
        Phase::Refused => "refused",
        Phase::Unreachable => "unreachable",
    }
}

fn warnings(agent: &Agent, joined: bool) -> Vec<String> {
    let mut warnings = agent.process.warnings.clone();
    if !joined && agent.publishing.services.homes().is_empty() {
        warnings.push(if agent.routing.router.is_some() {
            "this router signs for no authority: `margay id authority create NAME` makes one".to_owned()
        } else {
            "this host belongs to no authority: `margay id token create` on a router prints a token for `margay up \
             --join`"
                .to_owned()
        });
    }
    if let Some(why) = agent.publishing.active.why_not() {
        warnings.push(format!("services are published by order only, not because a program listens: {why}"));
    }
    warnings.extend(agent.publishing.drains.warnings());
    warnings.extend(agent.publishing.health.warnings());
    let overflowed = agent.core.0.with_sal(|sal, _| sal.overflowed());
    if overflowed > 0 {
        warnings.push(format!(
            "lost since the start because the agent was too slow: {} of signalling",
            count(overflowed, "packet")
        ));
    }
    warnings
}

fn drops(agent: &Agent) -> Vec<DropCount> {
    let all = metrics::drops(agent).into_iter().filter(|(_, packets)| *packets > 0);
    all.map(|(reason, packets)| DropCount { reason: reason.to_owned(), packets }).collect()
}

pub(super) async fn associations(agent: &Agent) -> AssociationListReply {
    naming::ask(agent).await;
    let names = naming::hosts(agent);
    let mut associations = agent.core.0.with_sal(|sal, now| {
        let info = |known: margay_core::AssociationInfo| AssociationInfo {
            host_id: known.host.to_string(),
            host_name: names.get(&known.host).cloned().unwrap_or_default(),
            remote: known.remote.to_string(),
            datagram_max_bytes: known.datagram_max.into(),
            epoch: known.epoch,
            flows: known.flows,
            router: known.router,
            heard_ms_ago: u64::try_from(now.since(known.heard).as_millis()).unwrap_or(u64::MAX),
        };
        sal.associations().map(info).collect::<Vec<_>>()
    });
    associations.sort_by(|one, other| one.host_id.cmp(&other.host_id));
    AssociationListReply { associations }
}
