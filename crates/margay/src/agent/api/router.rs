//! Routers of other sites, and what is announced to them and by them.

use margay_control::api::v1::{AnnouncementInfo, ClusterRouterInfo, NeighbourInfo, RouterListReply, RouterRemoveReply};
use margay_control::cluster::RouterEntry;
use margay_control::registration::Home;
use margay_control::store::AuditEntry;
use margay_control::wide_area::{self, Announcement, Link, Scope};
use margay_core::name::authority_block;
use margay_core::way::Relation;
use tonic::{Code, Status};

use super::route::Known;
use super::{blocking, environment, identity, misuse, not_found, status};
use crate::agent::Agent;

/// All of them, or those of one site, or one by its host-ID.
pub(super) fn list(agent: &Agent, name: &str) -> Result<RouterListReply, Status> {
    let Some(area) = &agent.routing.area else {
        let why = if agent.routing.router.is_some() { "its configuration names no site" } else { "it is no router" };
        return Err(misuse(format!(
            "this host exchanges no announcements with routers of other sites: {why} ([router] site)"
        )));
    };
    let known = Known::of(agent, None, None);
    let attached = area.neighbours();
    let waiting: Vec<_> = agent.publishing.services.homes();
    let is_attached = |home: &Home| attached.iter().any(|one| one.link == link_of(home));
    let waiting = waiting.iter().filter(|home| !is_attached(home)).map(|home| unattached(home));
    let mut neighbours: Vec<NeighbourInfo> =
        attached.iter().map(|one| info(agent, &known, one, !name.is_empty())).chain(waiting).collect();
    if !name.is_empty() {
        let is_meant = |one: &NeighbourInfo| one.site == name || one.host_id.starts_with(name);
        neighbours.retain(is_meant);
        if neighbours.len() > 1 && neighbours.iter().all(|one| one.site != name) {
            let all: Vec<String> = neighbours.iter().map(|one| format!("{} ({})", one.site, one.host_id)).collect();
            return Err(misuse(format!("`{name}` stands for several routers: {}; write one of these", all.join(", "))));
        }
        if neighbours.is_empty() {
            return Err(not_found(format!(
                "no router of a site {name} is known here; `margay router list` shows which are"
            )));
        }
    }
    neighbours.sort_by(|one, other| (&one.site, &one.host_id).cmp(&(&other.site, &other.host_id)));
    Ok(RouterListReply { site: area.policy().site.clone(), neighbours })
}

/// Takes a router that is gone out of the cluster: nobody is told of it any more, and it is no member of the authority
/// either.
pub(super) async fn remove(agent: &Agent, name: &str) -> Result<RouterRemoveReply, Status> {
    let (Some(cluster), Some(router)) = (&agent.routing.cluster, &agent.routing.router) else {
        return Err(misuse("this host is no router that shares an etcd with others ([router.etcd])"));
    };
    let routers = cluster.routers();
    let is_meant =
        |one: &&RouterEntry| !name.is_empty() && (one.name == name || one.id().to_string().starts_with(name));
    let found: Vec<&RouterEntry> = routers.iter().filter(is_meant).collect();
    let [meant] = &found[..] else {
        let names = routers.iter().map(|one| format!("{} ({})", one.name, one.id())).collect::<Vec<_>>().join(", ");
        return Err(if found.is_empty() {
            not_found(format!("no router of the cluster is called {name}; it has {names}"))
        } else {
            misuse(format!("{name} is more than one router of the cluster: {names}; write its host-ID"))
        });
    };
    let id = meant.id();
    if id == cluster.router().id() {
        return Err(misuse(format!(
            "{name} is this router: `margay down` here, then `margay router remove {name}` on another one of the \
             cluster"
        )));
    }
    if router.links().contains(&id) {
        return Err(misuse(format!(
            "{name} is still there, and would write itself down again: `margay down` there first"
        )));
    }
    let was_member = match identity::remove_member(agent, &id.to_string()) {
        Err(refused) if refused.code() == Code::NotFound => false,
        removed => removed.map(|_| true)?,
    };
    cluster.remove(id).await.map_err(environment)?;
    tracing::info!(router = meant.name, host = %id, was_member, "taken out of the cluster by the operator");
    let entry = AuditEntry::once(agent.host.clock.unix_s(), "router-remove", id.to_string(), meant.name.clone());
    blocking(|| agent.host.store.note_all(&[entry])).map_err(environment)?;
    let (name, address) = (meant.name.clone(), meant.address.clone());
    let gone = ClusterRouterInfo { host_id: id.to_string(), name, address, state: "removed".to_owned() };
    Ok(RouterRemoveReply { router: Some(gone) })
}

fn link_of(home: &Home) -> Link {
    let config = home.config();
    Link { host: config.router_key.id(), authority: authority_block(&config.authority), joined: true }
}

/// A router that this one has joined, and that is not there, or belongs to no site.
fn unattached(home: &Home) -> NeighbourInfo {
    let (config, state) = (home.config(), home.state());
    NeighbourInfo {
        host_id: config.router_key.id().to_string(),
        address: config.router_address.clone(),
        state: status::phase(state.phase).to_owned(),
        why: if state.why.is_empty() { "it belongs to no site".to_owned() } else { state.why },
        since_unix_s: state.since_unix_s,
        authority: config.authority.clone(),
        ..NeighbourInfo::default()
    }
}

fn info(agent: &Agent, known: &Known<'_>, one: &wide_area::NeighbourInfo, in_full: bool) -> NeighbourInfo {
    let wide_area::NeighbourInfo { link, neighbour, address, since_unix_s, told, heard } = one;
    let relation = match neighbour.relation {
        Relation::Above => "upstream",
        Relation::Beside => "peer",
        Relation::Below => "downstream",
    };
    let is_it = |authority: &String| authority_block(authority) == link.authority;
    let all = |infos: Vec<AnnouncementInfo>| if in_full { infos } else { Vec::new() };
    let announced_to = told.iter().map(|(said, declined)| announcement(known, said, 0, declined));
    let heard_from = heard.iter().map(|(said, age_ms)| announcement(known, said, *age_ms, ""));
    NeighbourInfo {
        site: neighbour.site.clone(),
        host_id: link.host.to_string(),
        address: address.to_string(),
        relation: relation.to_owned(),
        state: "connected".to_owned(),
        why: String::new(),
        since_unix_s: *since_unix_s,
        authority: agent.authorities().into_iter().find(is_it).unwrap_or_default(),
        preference: neighbour.preference,
        weight: neighbour.weight,
        told: told.len() as u64,
        heard: heard.len() as u64,
        announced_to: all(announced_to.collect()),
        heard_from: all(heard_from.collect()),
    }
}

fn announcement(known: &Known<'_>, said: &Announcement, age_ms: u64, declined: &str) -> AnnouncementInfo {
    AnnouncementInfo {
        prefix: said.prefix.to_string(),
        name: known.name(&said.prefix),
        passed_on: said.scope == Scope::World,
        sites: said.sites().into_iter().map(str::to_owned).collect(),
        weight: said.weight,
        age_ms,
        declined: declined.to_owned(),
    }
}
