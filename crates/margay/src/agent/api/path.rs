//! Paths: where this host and its peers find each other.

use std::net::IpAddr;

use margay_control::api::v1::{PathInfo, PathListReply, PathMigrateReply, PathMigrateRequest};
use margay_core::key::HostId;
use margay_core::{AssociationInfo, Moving, Passage, Sal, Towards};
use tonic::Status;

use super::flow::age_ms;
use super::misuse;
use crate::agent::{Agent, naming};

pub(super) fn parse_address(text: &str) -> Result<IpAddr, Status> {
    text.parse().map_err(|_| misuse(format!("`{text}` is no IP address; name one of this host, or one of the peer")))
}

/// An address of this host, or else one of the peer.
pub(super) fn towards(sal: &Sal, address: IpAddr) -> Towards {
    if sal.has_address(address) { Towards::Local(address) } else { Towards::Remote(address) }
}

pub(super) async fn list(agent: &Agent) -> PathListReply {
    naming::ask(agent).await;
    let mut found: Vec<AssociationInfo> = agent.core.0.with_sal(|sal, _| sal.paths());
    found.sort_by_key(|known| (known.router, known.host));
    let mut striped = super::places::by_peer(agent);
    let names = naming::hosts(agent);
    let with_places = |known: &AssociationInfo| PathInfo {
        striped: striped.remove(&known.host).unwrap_or_default(),
        peer_name: names.get(&known.host).cloned().unwrap_or_default(),
        ..info(known)
    };
    PathListReply { paths: found.iter().map(with_places).collect() }
}

pub(super) fn migrate(agent: &Agent, request: &PathMigrateRequest) -> Result<PathMigrateReply, Status> {
    let address = parse_address(&request.to)?;
    let paths = agent.core.0.with_sal(|sal, _| sal.paths());
    let host = find(agent, &paths, &request.peer)?;
    agent.core.0.with_sal(|sal, now| sal.migrate_host(now, host, towards(sal, address))).map_err(misuse)?;
    Ok(PathMigrateReply {})
}

/// A peer by its name, its host-ID or the first letters of that, or its address.
fn find(agent: &Agent, paths: &[AssociationInfo], peer: &str) -> Result<HostId, Status> {
    let names = naming::hosts(agent);
    let name = |host: &HostId| names.get(host).cloned().unwrap_or_default();
    let at = peer.parse::<IpAddr>().ok();
    let is_there = |known: &&AssociationInfo| at.is_none_or(|address| known.remote.ip() == address);
    let candidates: Vec<(HostId, String)> =
        paths.iter().filter(is_there).map(|known| (known.host, name(&known.host))).collect();
    let chosen = match (at, &candidates[..]) {
        (Some(_), [(host, _)]) => Ok(*host),
        _ => naming::pick(peer, &candidates, "margay path list"),
    };
    chosen.map_err(misuse)
}

fn info(known: &AssociationInfo) -> PathInfo {
    let state = match known.moving {
        Moving::Settled => "settled",
        Moving::Asking => "asking",
        Moving::Closing => "closing",
    };
    let passage = match known.passage {
        Passage::Open => "open",
        Passage::Held => "held",
        Passage::Void => "void",
    };
    let left_ms = |until: margay_core::Instant| until.since(margay_datapath::clock::now()).as_millis();
    PathInfo {
        peer: known.host.to_string(),
        local: known.local.map(|local| local.to_string()).unwrap_or_default(),
        remote: known.remote.to_string(),
        state: state.to_owned(),
        passage: passage.to_owned(),
        flows: known.flows,
        router: known.router,
        addresses: known.addresses.iter().map(ToString::to_string).collect(),
        rendezvous: known.rendezvous.map(|router| router.to_string()).unwrap_or_default(),
        moves: known.moves,
        moved_ms_ago: known.moved.map_or(0, |moved| age_ms(moved.at)),
        moved_why: known.moved.map_or("", |moved| moved.cause.text()).to_owned(),
        round_trip_us: known.rtt.map_or(0, |rtt| u64::try_from(rtt.as_micros()).unwrap_or(u64::MAX)),
        suspected: known.is_suspected,
        lost_ppm: known.loss_ppm,
        jitter_us: known.timing.jitter_us,
        reordered_ppm: known.timing.reordered_ppm,
        striped: Vec::new(),
        peer_name: String::new(),
        trouble: known.trouble.map_or("", margay_core::Trouble::label).to_owned(),
        flapping_ms: known.flapping.map_or(0, |until| u64::try_from(left_ms(until)).unwrap_or(u64::MAX)),
    }
}
