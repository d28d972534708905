//! Sessions that come to go through other boxes, by order of the operator of this host.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use margay_control::api::v1::{ChainChangeReply, ChainChangeRequest, ChainChanged, ReconfigurationInfo};
use margay_control::store::AuditEntry;
use margay_core::chain::ChainPlace;
use margay_core::name::{Name, Prefix, ServiceId};
use margay_core::reconfiguration::{Edit, ReconfigurationRefused, Reconfigured};
use margay_core::{Event, FlowInfo, Lifecycle, Role};
use margay_wire::{FlowId, SessionId};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::{Instant, timeout_at};
use tonic::Status;

use super::flow::{age_ms, parse_id};
use super::{blocking, environment, misuse, not_found};
use crate::agent::{Agent, Host, core::CoreHandle, naming};

/// Longer than an order waits for its session and is then carried out.
const PATIENCE: Duration = Duration::from_secs(20);
/// Sessions that are changed at once.
pub(in crate::agent) const AT_ONCE: usize = 256;

/// A session, and the flow by which its program sends.
#[derive(Clone, Copy)]
pub(in crate::agent) struct Target {
    flow: FlowId,
    session: SessionId,
}

/// Has one session, or all of a name, go through other boxes; those that are served here, or pass a box of this host,
/// by the hosts of their clients. Answers when each is changed, or is known not to be. The audit log has what is
/// ordered before it is done, and afterwards how many sessions have stayed as they were.
pub(super) async fn change(agent: &Agent, request: &ChainChangeRequest) -> Result<ChainChangeReply, Status> {
    let edit = edit_of(request)?;
    let targets = targets_of(&agent.core, request)?;
    let subject = if request.flow.is_empty() { request.name.clone() } else { request.flow.clone() };
    let detail = format!("{} {}", request.r#box, request.other).trim_end().to_owned();
    note(&agent.host, &format!("chain-{}", edit.label()), &subject, detail.clone())?;
    let mut changed = Vec::new();
    for some in targets.chunks(AT_ONCE) {
        changed.extend(change_some(agent, some, edit).await?);
    }
    let failed = changed.iter().filter(|one| one.outcome != "done").count();
    if failed > 0 {
        let detail = format!("{detail}: {failed} of {} as before", changed.len());
        note(&agent.host, &format!("chain-{}-failed", edit.label()), &subject, detail)?;
    }
    Ok(ChainChangeReply { changed })
}

fn note(host: &Host, act: &str, subject: &str, detail: String) -> Result<(), Status> {
    let entry = AuditEntry::once(host.clock.unix_s(), act, subject.to_owned(), detail);
    blocking(|| host.store.note_all(&[entry])).map_err(environment)
}

fn box_of(text: &str) -> Result<ServiceId, Status> {
    let name = text.parse::<Name>().map_err(misuse)?;
    if !name.is_service() {
        return Err(misuse(format!("`{text}` is no box: a box has a name of a service, such as fw.shop")));
    }
    Ok(name.service_id())
}

/// What is to be done with sessions.
pub(in crate::agent) fn edit_of(request: &ChainChangeRequest) -> Result<Edit, Status> {
    let service = box_of(&request.r#box)?;
    let other = if request.other.is_empty() { None } else { Some(box_of(&request.other)?) };
    match (request.act.as_str(), other) {
        ("insert", before) => Ok(Edit::Insert { service, before }),
        ("remove", None) => Ok(Edit::Remove { service }),
        ("replace", Some(by)) => Ok(Edit::Replace { service, by }),
        (act, _) => {
            Err(misuse(format!("`{act}` is none of: insert, remove, replace; remove names one box, and replace two")))
        }
    }
}

/// Of a session's flows here, an order is given for the one with the least number: at its client's end, at its
/// server's, or before a box. `None`: for no such flow.
fn rank_of(flow: &FlowInfo) -> Option<u8> {
    match (flow.chain.as_ref().map(|chain| chain.place), flow.role) {
        (None | Some(ChainPlace::First), Role::Initiator) => Some(0),
        (None | Some(ChainPlace::Last), Role::Responder) => Some(1),
        (Some(ChainPlace::Left), _) => Some(2),
        _ => None,
    }
}

const fn is_open(flow: &FlowInfo) -> bool {
    matches!(flow.lifecycle, Lifecycle::Established | Lifecycle::HalfClosed)
}

fn target(flow: FlowInfo) -> Target {
    Target { flow: flow.flow, session: flow.session }
}

/// Those of the sessions of programs here that are wanted.
pub(in crate::agent) fn own_sessions(core: &CoreHandle, is_wanted: impl Fn(&FlowInfo) -> bool) -> Vec<Target> {
    let is_own = |flow: &FlowInfo| is_open(flow) && rank_of(flow) == Some(0) && is_wanted(flow);
    core.0.with_sal(|sal, _| sal.flows().filter(is_own).map(target).collect())
}

/// The sessions that an order is about.
fn targets_of(core: &CoreHandle, request: &ChainChangeRequest) -> Result<Vec<Target>, Status> {
    if request.flow.is_empty() {
        let name = request.name.parse::<Name>().map_err(misuse)?;
        // With its keys.
        let prefix = if name.is_service() { name.service_prefix() } else { name.prefix() };
        let mut by_session = BTreeMap::new();
        core.0.with_sal(|sal, _| {
            for flow in sal.flows().filter(|flow| is_open(flow) && prefix.contains(&flow.service)) {
                let Some(rank) = rank_of(&flow) else { continue };
                let best = by_session.entry(flow.session).or_insert((rank, target(flow.clone())));
                if rank < best.0 {
                    *best = (rank, target(flow));
                }
            }
        });
        return Ok(by_session.into_values().map(|(_, target)| target).collect());
    }
    let id = parse_id(&request.flow)?;
    let found = core.0.with_sal(|sal, _| sal.flow(id));
    let found = found.ok_or_else(|| not_found(ReconfigurationRefused::UnknownFlow(id)))?;
    Ok(vec![target(found)])
}

/// Orders what is wanted of some sessions, and waits until it is over.
pub(in crate::agent) async fn change_some(
    agent: &Agent,
    some: &[Target],
    edit: Edit,
) -> Result<Vec<ChainChanged>, Status> {
    // Before the orders: what comes of them may be told at once.
    let heard = agent.process.watchers.subscribe().ok_or_else(|| Status::unavailable("the agent is going down"))?;
    let mut changed = Vec::new();
    let mut waits = HashMap::new();
    for target in some {
        match agent.core.0.with_sal(|sal, now| sal.reconfigure(now, target.flow, edit)) {
            Ok(order) => {
                waits.insert(order, *target);
            }
            Err(refused) => changed.push(ChainChanged {
                outcome: "refused".to_owned(),
                why: text_of(agent, &refused),
                ..row(target.flow, target.session)
            }),
        }
    }
    let over = outcomes(heard, waits, &mut changed).await;
    changed.extend(over.into_values().map(|target| ChainChanged {
        outcome: "unknown".to_owned(),
        why: "the change is not over yet; `margay flow show` shows what becomes of it".to_owned(),
        ..row(target.flow, target.session)
    }));
    Ok(changed)
}

fn row(flow: FlowId, session: SessionId) -> ChainChanged {
    ChainChanged { flow: flow.to_string(), session: session.to_string(), ..ChainChanged::default() }
}

/// Takes note of what becomes of orders, by their numbers: others may change the same sessions meanwhile. Gives those
/// of which nothing is known in the end.
async fn outcomes(
    mut heard: Receiver<Event>,
    mut waits: HashMap<u64, Target>,
    changed: &mut Vec<ChainChanged>,
) -> HashMap<u64, Target> {
    let until = Instant::now() + PATIENCE;
    while !waits.is_empty() {
        match timeout_at(until, heard.recv()).await {
            Ok(Ok(Event::Reconfigured { flow, session, change }))
                if change.order.is_some_and(|order| waits.remove(&order).is_some()) =>
            {
                changed.push(ChainChanged {
                    outcome: change.outcome.label().to_owned(),
                    why: change.outcome.text().to_owned(),
                    ..row(flow, session)
                });
            }
            Ok(Ok(_) | Err(RecvError::Lagged(_))) => {}
            Ok(Err(RecvError::Closed)) | Err(_) => break,
        }
    }
    waits
}

/// With boxes as people write them.
fn text_of(agent: &Agent, refused: &ReconfigurationRefused) -> String {
    let name = |service: &ServiceId| naming::prefix(agent, &Prefix::from(*service));
    match refused {
        ReconfigurationRefused::Edit(error) => error.text(name),
        ReconfigurationRefused::NotNamed(service) => format!("no chain of the signed policy names {}", name(service)),
        other => other.to_string(),
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// What has become of the last ones of a session, as lists show it.
pub(super) fn infos(agent: &Agent, flow: &FlowInfo) -> Vec<ReconfigurationInfo> {
    let name = |service: &ServiceId| naming::prefix(agent, &Prefix::from(*service));
    let info = |change: &Reconfigured| ReconfigurationInfo {
        ms_ago: age_ms(change.at),
        act: change.edit.label().to_owned(),
        boxes: change.boxes.iter().map(name).collect(),
        outcome: change.outcome.label().to_owned(),
        why: change.outcome.text().to_owned(),
        ordered_by: change.by.map(|host| host.to_string()).unwrap_or_default(),
        took_us: change.took.map(|took| micros(took.to_end)),
        turned_us: change.took.and_then(|took| took.to_turn).map(micros),
    };
    flow.reconfigurations.iter().map(info).collect()
}

#[cfg(test)]
mod tests {
    use margay_core::Instant as CoreInstant;
    use margay_core::reconfiguration::ReconfigurationOutcome;
    use tokio::sync::broadcast;

    use super::*;

    const SESSION: SessionId = SessionId([7; 16]);

    fn over(order: Option<u64>, outcome: ReconfigurationOutcome) -> Event {
        let edit = Edit::Remove { service: ServiceId([1; 32]) };
        let change =
            Reconfigured { at: CoreInstant::ZERO, order, by: None, edit, boxes: Vec::new(), outcome, took: None };
        Event::Reconfigured { flow: FlowId(3), session: SESSION, change }
    }

    #[tokio::test]
    async fn an_order_is_not_answered_by_what_becomes_of_another_one_of_its_session() {
        let (tell, heard) = broadcast::channel(8);
        for event in [
            over(Some(1), ReconfigurationOutcome::Done),
            over(None, ReconfigurationOutcome::Done),
            over(Some(2), ReconfigurationOutcome::Refused("no".to_owned())),
        ] {
            tell.send(event).expect("somebody listens");
        }
        drop(tell);
        let mut changed = Vec::new();
        let target = Target { flow: FlowId(3), session: SESSION };
        let left = outcomes(heard, HashMap::from([(2, target), (3, target)]), &mut changed).await;
        assert_eq!(changed.iter().map(|one| one.outcome.as_str()).collect::<Vec<_>>(), ["refused"]);
        assert_eq!(left.into_keys().collect::<Vec<_>>(), [3]);
    }
}
