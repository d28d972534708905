//! Flows.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use margay_control::api::v1::{
    FlowCloseReply, FlowEvent, FlowInfo, FlowListReply, FlowListRequest, FlowMigrateReply, FlowMigrateRequest,
    FlowPolicyReply, FlowPolicyRequest, PlaceStack, PlaceWeight,
};
use margay_core::key::HostId;
use margay_core::name::{Name, Prefix, ServiceId};
use margay_core::stripe::Sharing;
use margay_core::{Cipher, Direction, Event, FlowCounters, Instant, Lifecycle, PlaceStacks, Policy, Role, Weights};
use margay_datapath::clock;
use margay_wire::FlowId;
use tokio::sync::broadcast::error::RecvError;
use tonic::Status;

use super::{Streamed, legs, misuse, not_found, places, stack};
use crate::agent::ended::Ended;
use crate::agent::watch::{End, Ends};
use crate::agent::{Agent, Names, naming};

/// Flows in one list unless more are asked for.
const LIST_MAX: u32 = 10_000;
/// Flows that belong to the description of a service.
const SHOWN_MAX: usize = 20;

fn wanted(service: &str) -> Result<Option<Prefix>, Status> {
    if service.is_empty() {
        return Ok(None);
    }
    service.parse::<Name>().map(|name| Some(name.prefix())).map_err(misuse)
}

pub(super) fn parse_id(text: &str) -> Result<FlowId, Status> {
    let id = u32::from_str_radix(text, 16).ok().filter(|id| *id != 0);
    id.map(FlowId).ok_or_else(|| {
        misuse(format!("`{text}` is no flow; `margay flow list` shows them, eight hexadecimal digits each"))
    })
}

fn unknown(id: FlowId) -> Status {
    not_found(format!("there is no flow {id}; `margay flow list` shows those that there are"))
}

pub(super) async fn list(agent: &Agent, request: &FlowListRequest) -> Result<FlowListReply, Status> {
    naming::ask(agent).await;
    let wanted = wanted(&request.service)?;
    let limit = if request.limit == 0 { LIST_MAX } else { request.limit };
    let gather = if request.failed { collect_ended } else { collect };
    let (found, total) = gather(agent, wanted.as_ref(), limit as usize);
    Ok(FlowListReply { flows: found, total: total as u64 })
}

/// The oldest flows of a prefix, and how many there are.
fn collect(agent: &Agent, wanted: Option<&Prefix>, limit: usize) -> (Vec<FlowInfo>, usize) {
    let is_wanted = |flow: &margay_core::FlowInfo| wanted.is_none_or(|prefix| flow.is_of(prefix));
    let mut found: Vec<_> = agent.core.0.with_sal(|sal, _| sal.flows().filter(is_wanted).collect());
    let total = found.len();
    found.sort_by_key(|flow| (flow.since, flow.flow));
    found.truncate(limit);
    let names = naming::hosts(agent);
    (found.iter().map(|flow| info(agent, &names, flow)).collect(), total)
}

/// The same of those that have failed lately, the latest first.
fn collect_ended(agent: &Agent, wanted: Option<&Prefix>, limit: usize) -> (Vec<FlowInfo>, usize) {
    let mut found = agent.process.watchers.ended();
    found.retain(|ended| wanted.is_none_or(|prefix| ended.flow.is_of(prefix)));
    let total = found.len();
    let names = naming::hosts(agent);
    (found.iter().take(limit).map(|ended| info_of_ended(agent, &names, ended)).collect(), total)
}

fn info_of_ended(agent: &Agent, names: &HashMap<HostId, String>, ended: &Ended) -> FlowInfo {
    FlowInfo {
        ended_ms_ago: Some(u64::try_from(ended.at.elapsed().as_millis()).unwrap_or(u64::MAX)),
        ended_by: ended.reason.label().to_owned(),
        ended_why: ended.why(names),
        ..info_of(agent, names, &ended.flow, ended.carried)
    }
}

/// The oldest flows whose sessions go through boxes.
pub(super) async fn of_chains(agent: &Agent) -> Vec<FlowInfo> {
    naming::ask(agent).await;
    let mut found: Vec<_> = agent.core.0.with_sal(|sal, _| sal.flows().filter(|flow| flow.chain.is_some()).collect());
    found.sort_by_key(|flow| (flow.since, flow.flow));
    found.truncate(LIST_MAX as usize);
    let names = naming::hosts(agent);
    found.iter().map(|flow| info(agent, &names, flow)).collect()
}

pub(super) fn of_service(agent: &Agent, prefix: &Prefix) -> Vec<FlowInfo> {
    collect(agent, Some(prefix), SHOWN_MAX).0
}

pub(super) async fn show(agent: &Agent, flow: &str) -> Result<FlowInfo, Status> {
    let id = parse_id(flow)?;
    naming::ask(agent).await;
    let names = naming::hosts(agent);
    let found = agent.core.0.with_sal(|sal, _| sal.flow(id));
    let ended = || agent.process.watchers.find_ended(id).map(|ended| info_of_ended(agent, &names, &ended));
    // One that has failed lingers, and does not know by itself why it ended.
    let shown = match found {
        Some(flow) if flow.lifecycle < Lifecycle::Closed => Some(info(agent, &names, &flow)),
        Some(flow) => ended().or_else(|| Some(info(agent, &names, &flow))),
        None => ended(),
    };
    let mut shown = shown.ok_or_else(|| unknown(id))?;
    if let Some(stack) = &mut shown.stack {
        stack::add_rules(agent, id, stack);
    }
    legs::add(agent, &mut shown).await;
    Ok(shown)
}

pub(super) fn close(agent: &Agent, flow: &str) -> Result<FlowCloseReply, Status> {
    let id = parse_id(flow)?;
    let was_there = agent.core.0.with_sal(|sal, now| sal.close_flow(now, id));
    if was_there { Ok(FlowCloseReply {}) } else { Err(unknown(id)) }
}

pub(super) fn migrate(agent: &Agent, request: &FlowMigrateRequest) -> Result<FlowMigrateReply, Status> {
    let (id, address) = (parse_id(&request.flow)?, super::path::parse_address(&request.to)?);
    agent.core.0.with_sal(|sal, now| sal.migrate_flow(now, id, super::path::towards(sal, address))).map_err(misuse)?;
    Ok(FlowMigrateReply {})
}

pub(super) fn set_policy(agent: &Agent, request: &FlowPolicyRequest) -> Result<FlowPolicyReply, Status> {
    let id = parse_id(&request.flow)?;
    let policy = match request.policy.as_str() {
        "fail-over" => Policy::FailOver,
        "stripe" => stripe(&request.stacks)?,
        other if !request.stacks.is_empty() => {
            return Err(misuse(format!("places of their own stack are for `stripe` alone, and this is `{other}`")));
        }
        "weighted" => Policy::Weighted(weights(&request.weights)?),
        "redundant" => Policy::Redundant,
        "pin" => Policy::Pin(super::path::parse_address(&request.address)?),
        other => {
            let all = "fail-over, pin, stripe, weighted and redundant";
            return Err(misuse(format!("`{other}` is no policy; there are {all}")));
        }
    };
    agent.core.0.with_sal(|sal, now| sal.set_flow_policy(now, id, policy)).map_err(misuse)?;
    Ok(FlowPolicyReply {})
}

fn stripe(said: &[PlaceStack]) -> Result<Policy, Status> {
    let mut own = Vec::new();
    for one in said {
        let address = super::path::parse_address(&one.address)?;
        match one.stack.as_str() {
            "plain" => own.push((address, margay_core::PlaceStack::Plain)),
            "fec" => own.push((address, margay_core::PlaceStack::Fec)),
            // As all that are not named, where one is plain.
            "secure" => {}
            other => {
                let what =
                    format!("a place of a striped flow is `plain`, `fec` or `secure`, and {address} is `{other}`");
                return Err(misuse(what));
            }
        }
    }
    let has_sealed = own.len() < said.len();
    let own = PlaceStacks::new(own).map_err(misuse)?;
    if has_sealed && !own.have(margay_core::PlaceStack::Plain) {
        let what = "no place is `plain`: have the flow sealed (`margay stack set FLOW secure`), and give it `stripe`";
        return Err(misuse(what.to_owned()));
    }
    Ok(if own.is_empty() { Policy::Stripe } else { Policy::StripePartly(own) })
}

fn weights(said: &[PlaceWeight]) -> Result<Weights, Status> {
    let weight = |one: &PlaceWeight| Ok((super::path::parse_address(&one.address)?, one.weight));
    let known = said.iter().map(weight).collect::<Result<Vec<_>, Status>>()?;
    Weights::new(known).map_err(misuse)
}

fn info(agent: &Agent, names: &HashMap<HostId, String>, flow: &margay_core::FlowInfo) -> FlowInfo {
    let carried = agent.core.0.flow_counters(flow.flow).unwrap_or_default();
    info_of(agent, names, flow, carried)
}

fn info_of(
    agent: &Agent,
    names: &HashMap<HostId, String>,
    flow: &margay_core::FlowInfo,
    carried: FlowCounters,
) -> FlowInfo {
    let role = match flow.role {
        Role::Initiator => "initiator",
        Role::Responder => "responder",
    };
    let protocol = match flow.app.protocol {
        6 => "tcp",
        17 => "udp",
        _ => "",
    };
    FlowInfo {
        flow: flow.flow.to_string(),
        peer_flow: flow.peer_flow.to_string(),
        session: flow.session.to_string(),
        service: flow.service.to_string(),
        name: name_of(agent, &flow.service),
        source: flow.source.map(|source| source.to_string()).unwrap_or_default(),
        role: role.to_owned(),
        lifecycle: lifecycle(flow.lifecycle).to_owned(),
        protocol: protocol.to_owned(),
        app_source: flow.app.source.to_string(),
        app_destination: flow.app.destination.to_string(),
        legs: Vec::new(),
        peer: flow.peer.map(|peer| peer.to_string()).unwrap_or_default(),
        peer_name: flow.peer.and_then(|peer| names.get(&peer).cloned()).unwrap_or_default(),
        remote: flow.remote.map(|remote| remote.to_string()).unwrap_or_default(),
        authenticated: flow.authenticated,
        path: path(flow).to_owned(),
        age_ms: age_ms(flow.since),
        sent_bytes: carried.egress_bytes,
        received_bytes: carried.ingress_bytes,
        sent_packets: carried.egress_segments,
        received_packets: carried.ingress_segments,
        path_since_ms: age_ms(flow.carriage_since),
        path_why: why(flow).to_owned(),
        local: flow.local.map(|local| local.to_string()).unwrap_or_default(),
        moves: flow.moves,
        moved_ms_ago: flow.moved.map_or(0, |moved| age_ms(moved.at)),
        moved_why: flow.moved.map_or("", |moved| moved.cause.text()).to_owned(),
        aside: flow.is_aside,
        trouble: flow.trouble.map_or("", margay_core::Trouble::text).to_owned(),
        policy: policy(flow).to_owned(),
        places: places::of_flow(agent, flow),
        closed_by: flow.closed.map_or("", closed_by).to_owned(),
        ended_ms_ago: None,
        ended_by: String::new(),
        ended_why: String::new(),
        chain: flow.chain.as_ref().map(|chain| super::chain::info(agent, names, chain)),
        stack: Some(stack::info(&flow.stack)),
        lost_sent_ppm: flow.loss.sent.map(|loss| loss.ppm),
        lost_received_ppm: flow.loss.received.map(|loss| loss.ppm),
        jitter_sent_us: flow.timing.sent.jitter_us,
        jitter_received_us: flow.timing.received.jitter_us,
        reordered_sent_ppm: flow.timing.sent.reordered_ppm,
        reordered_received_ppm: flow.timing.received.reordered_ppm,
        reconfigurations: super::reconfiguration::infos(agent, flow),
    }
}

/// Of one host alone: a busy host has many events, and looks at its members for none of them.
fn names_of(names: &Names, peer: Option<HostId>) -> HashMap<HostId, String> {
    peer.and_then(|peer| Some((peer, names.naming.name_of(peer)?))).into_iter().collect()
}

const fn policy(flow: &margay_core::FlowInfo) -> &'static str {
    match () {
        () if flow.stripes => match flow.sharing {
            Sharing::Earliest => Policy::Stripe.word(),
            Sharing::Weighted => "weighted",
            Sharing::Redundant => Policy::Redundant.word(),
        },
        () if flow.is_pinned => "pin",
        () => "fail-over",
    }
}

const fn path(flow: &margay_core::FlowInfo) -> &'static str {
    match flow.secure {
        Some(_) if flow.stack.stack.makes_good() => flow.stack.stack.sealed().label(),
        Some(_) => "secure",
        None if flow.stack.stack.makes_good() => flow.stack.stack.label(),
        None if flow.carriage.sends() => "direct",
        None => "encapsulated",
    }
}

fn why(flow: &margay_core::FlowInfo) -> &'static str {
    match flow.secure {
        Some(Cipher::Aes256Gcm) => "sealed with AES-256-GCM under the keys of the two hosts",
        Some(Cipher::ChaCha20Poly1305) => "sealed with ChaCha20-Poly1305 under the keys of the two hosts",
        None => flow.why.text(),
    }
}

pub(super) fn age_ms(since: Instant) -> u64 {
    u64::try_from(clock::now().since(since).as_millis()).unwrap_or(u64::MAX)
}

const fn closed_by(closed: Direction) -> &'static str {
    match closed {
        Direction::Egress => "this",
        Direction::Ingress => "peer",
    }
}

const fn lifecycle(lifecycle: Lifecycle) -> &'static str {
    match lifecycle {
        Lifecycle::Connecting => "connecting",
        Lifecycle::Established => "established",
        Lifecycle::HalfClosed => "half-closed",
        Lifecycle::Closed => "closed",
        Lifecycle::TimedOut => "timed-out",
    }
}

/// The written name, where this host knows it: it publishes it, or a program here looked it up, by whichever family it
/// then connects.
fn name_of(agent: &Agent, service: &ServiceId) -> String {
    let published = agent.publishing.services.list();
    let own = published.iter().filter(|own| own.name.prefix().contains(service));
    if let Some(own) = own.max_by_key(|own| own.name.prefix().bits) {
        return own.name.written().to_owned();
    }
    let registered = |agent: &Agent| agent.host.store.name_of(&Prefix::from(*service)).ok().flatten();
    agent.names.leases.written(service).or_else(|| registered(agent)).unwrap_or_default()
}

/// Events from now on, until the agent goes down.
pub(super) fn watch(agent: &Arc<Agent>, service: &str) -> Result<Streamed<FlowEvent>, Status> {
    let wanted = wanted(service)?;
    let receiver = agent.process.watchers.subscribe().ok_or_else(|| Status::unavailable("the agent is going down"))?;
    let start = (Arc::clone(agent), receiver, Ends::default(), wanted);
    Ok(Box::pin(futures_util::stream::unfold(start, |(agent, mut receiver, mut ends, wanted)| async move {
        loop {
            let event = match receiver.recv().await {
                Ok(event) => event,
                Err(RecvError::Closed) => return None,
                Err(RecvError::Lagged(count)) => {
                    ends.missed(&agent);
                    let missed = FlowEvent { kind: "missed".to_owned(), count, ..blank() };
                    return Some((Ok(missed), (agent, receiver, ends, wanted)));
                }
            };
            if let Some(event) = describe(&agent, event, &mut ends, wanted.as_ref()) {
                return Some((Ok(event), (agent, receiver, ends, wanted)));
            }
        }
    })))
}

fn blank() -> FlowEvent {
    let unix_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis());
    FlowEvent { unix_ms: u64::try_from(unix_ms).unwrap_or(u64::MAX), ..FlowEvent::default() }
}

fn describe(agent: &Agent, event: Event, ends: &mut Ends, wanted: Option<&Prefix>) -> Option<FlowEvent> {
    let is_wanted = |flow: &margay_core::FlowInfo| wanted.is_none_or(|prefix| flow.is_of(prefix));
    match event {
        Event::FlowOpened(id) => {
            // One that is gone again already will be told of by its end.
            let flow = agent.core.0.with_sal(|sal, _| sal.flow(id)).filter(is_wanted)?;
            Some(FlowEvent {
                kind: "opened".to_owned(),
                flow: Some(info(agent, &names_of(&agent.names, flow.peer), &flow)),
                ..blank()
            })
        }
        event @ (Event::FlowEnded { .. } | Event::FlowClosed { .. }) => {
            let End { flow, reason, carried } = ends.end(agent, event).filter(|end| is_wanted(&end.flow))?;
            Some(FlowEvent {
                kind: "closed".to_owned(),
                flow: Some(info_of(agent, &names_of(&agent.names, flow.peer), &flow, carried)),
                why: reason.label().to_owned(),
                ..blank()
            })
        }
        Event::ConnectFailed { service, app, why } => {
            wanted.is_none_or(|prefix| prefix.contains(&service)).then(|| {
                let flow = FlowInfo {
                    service: service.to_string(),
                    name: name_of(agent, &service),
                    app_source: app.source.to_string(),
                    app_destination: app.destination.to_string(),
                    ..FlowInfo::default()
                };
                FlowEvent { kind: "connect-failed".to_owned(), flow: Some(flow), why, ..blank() }
            })
        }
        Event::FlowChanged(_)
        | Event::StackChanged { .. }
        | Event::Reconfigured { .. }
        | Event::Ordered { .. }
        | Event::AssociationUp(_)
        | Event::PeerRebooted(_)
        | Event::Twin(_)
        | Event::Moved { .. }
        | Event::Whereabouts(_)
        | Event::Flapping(_)
        | Event::Silent(_)
        | Event::GivenUp { .. }
        | Event::Unanswered(_)
        | Event::OtherHost { .. }
        | Event::RouterFound { .. }
        | Event::HandOver(_)
        | Event::SpliceOver { .. }
        | Event::Keep { .. }
        | Event::RuleExpired { .. } => None,
    }
}
