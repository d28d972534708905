//! How flows are carried, by order of the operator.

use std::time::Duration;

use margay_control::api::v1::{FlowInfo, FlowStack, FlowStackChange, StackReleaseRequest, StackSetRequest};
use margay_control::store::AuditEntry;
use margay_core::stack_change::{ChangeOutcome, Stack, StackChange, StackInfo};
use margay_core::{ChangeRefused, Event};
use margay_wire::FlowId;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::timeout;
use tonic::Status;

use super::flow::{age_ms, parse_id, show};
use super::{blocking, environment, misuse, not_found};
use crate::agent::Agent;

/// Longer than a change takes.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(8);

/// Has a flow carried by a stack. Answers when the change is over.
pub(super) async fn set(agent: &Agent, request: &StackSetRequest) -> Result<FlowInfo, Status> {
    let id = parse_id(&request.flow)?;
    let wanted = Stack::ALL.into_iter().find(|stack| stack.label() == request.stack);
    let to = wanted.ok_or_else(|| misuse(format!("`{}` is no stack; there are plain and secure", request.stack)))?;
    order(agent, id, Some(to)).await
}

/// Takes an order back. Answers when the flow is carried as the configurations want it.
pub(super) async fn release(agent: &Agent, request: &StackReleaseRequest) -> Result<FlowInfo, Status> {
    order(agent, parse_id(&request.flow)?, None).await
}

/// `to`: what is ordered; nothing where an order is released. The audit log has what is ordered before it is done, and
/// what is refused besides.
async fn order(agent: &Agent, id: FlowId, to: Option<Stack>) -> Result<FlowInfo, Status> {
    let (act, detail) = to.map_or(("stack-release", String::new()), |to| ("stack-set", to.to_string()));
    note(agent, act, id, detail.clone())?;
    let ordered = change(agent, id, to).await;
    if let Err(refused) = &ordered {
        note(agent, "stack-refused", id, format!("{act} {detail}: {}", refused.message()))?;
    }
    ordered?;
    show(agent, &id.to_string()).await
}

fn note(agent: &Agent, act: &str, id: FlowId, detail: String) -> Result<(), Status> {
    let entry = AuditEntry::once(agent.clock.unix_s(), act, id.to_string(), detail);
    blocking(|| agent.store.note_all(&[entry])).map_err(environment)
}

/// Gives an order, and waits until the flow is so.
async fn change(agent: &Agent, id: FlowId, to: Option<Stack>) -> Result<(), Status> {
    // Before the order: what comes of it may be told at once.
    let heard = agent.watchers.subscribe().ok_or_else(|| Status::unavailable("the agent is going down"))?;
    let begun = agent.core.0.with_sal(|sal, now| match to {
        Some(to) => sal.set_flow_stack(now, id, to),
        None => sal.release_flow_stack(now, id),
    });
    if !begun.map_err(|refused| status_of(&refused))? {
        return Ok(());
    }
    match outcome(agent, id, heard).await {
        Some(ChangeOutcome::Done) => Ok(()),
        Some(ChangeOutcome::Refused(refused)) => Err(status_of(&refused)),
        Some(other) => Err(environment(other.text())),
        None => Err(environment("the change is not over yet; `margay stack show` shows what becomes of it")),
    }
}

fn status_of(refused: &ChangeRefused) -> Status {
    match refused {
        ChangeRefused::UnknownFlow(_) => not_found(refused),
        ChangeRefused::Busy(_)
        | ChangeRefused::PeerBusy
        | ChangeRefused::UnderWay
        | ChangeRefused::Full { .. }
        | ChangeRefused::UnknownToPeer => environment(refused),
        _ => misuse(refused),
    }
}

/// What has become of the change of a flow that was begun after `heard` was.
async fn outcome(agent: &Agent, id: FlowId, mut heard: Receiver<Event>) -> Option<ChangeOutcome> {
    let wait = async {
        loop {
            match heard.recv().await {
                Ok(Event::StackChanged { flow, change }) if flow == id => return Some(change.outcome),
                Ok(_) => {}
                // Of many events the one that matters may be lost: the flow itself says it.
                Err(RecvError::Lagged(_)) => {
                    if let Some(outcome) = last_outcome(agent, id) {
                        return Some(outcome);
                    }
                }
                Err(RecvError::Closed) => return None,
            }
        }
    };
    timeout(CHANGE_TIMEOUT, wait).await.ok().flatten()
}

/// Of a flow whose change is over.
fn last_outcome(agent: &Agent, id: FlowId) -> Option<ChangeOutcome> {
    let Some(flow) = agent.core.0.with_sal(|sal, _| sal.flow(id)) else { return Some(ChangeOutcome::Ended) };
    let last = flow.stack.changes.last().map(|change| change.outcome);
    last.filter(|_| flow.stack.changing_to.is_none())
}

/// As lists show it.
pub(super) fn info(stack: &StackInfo) -> FlowStack {
    let label = |stack: Option<Stack>| stack.map_or("", Stack::label).to_owned();
    FlowStack {
        stack: stack.stack.label().to_owned(),
        since_ms: age_ms(stack.since),
        changing_to: label(stack.changing_to),
        order: label(stack.order.map(|order| order.stack)),
        order_ms_ago: stack.order.map_or(0, |order| age_ms(order.at)),
        demanded_here: stack.is_demanded,
        demanded_by_peer: stack.is_demanded_by_peer,
        changes: stack.changes.iter().map(change_info).collect(),
    }
}

fn change_info(change: &StackChange) -> FlowStackChange {
    FlowStackChange {
        ms_ago: age_ms(change.at),
        from: change.from.label().to_owned(),
        to: change.to.label().to_owned(),
        cause: change.cause.label().to_owned(),
        outcome: change.outcome.label().to_owned(),
        why: change.outcome.text(),
    }
}
