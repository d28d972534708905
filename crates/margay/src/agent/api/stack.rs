//! How flows are carried, by order of the operator.

use std::time::Duration;

use margay_control::api::v1::{
    FlowFact, FlowInfo, FlowRule, FlowStack, FlowStackChange, StackReleaseRequest, StackRuleInfo, StackRuleListReply,
    StackSetRequest,
};
use margay_control::store::AuditEntry;
use margay_core::stack_change::{ChangeCause, ChangeOutcome, StackChange, StackInfo};
use margay_core::{ChangeRefused, Event, Stack, stack_rule};
use margay_datapath::clock;
use margay_wire::FlowId;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::timeout;
use tonic::Status;

use super::flow::{age_ms, parse_id, show};
use super::{blocking, environment, misuse, not_found};
use crate::agent::{Agent, Host, core::CoreHandle, naming};

/// Longer than a change takes.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(8);

/// Has a flow carried by a stack. Answers when the change is over.
pub(super) async fn set(agent: &Agent, request: &StackSetRequest) -> Result<FlowInfo, Status> {
    let id = parse_id(&request.flow)?;
    let wanted = Stack::ALL.into_iter().find(|stack| stack.label() == request.stack);
    let to = wanted.ok_or_else(|| misuse(format!("`{}` is no stack; there are {}", request.stack, all_stacks())))?;
    order(agent, id, Some(to)).await
}

fn all_stacks() -> String {
    Stack::ALL.map(Stack::label).join(", ")
}

/// Takes an order back. Answers when the flow is carried as the configurations want it.
pub(super) async fn release(agent: &Agent, request: &StackReleaseRequest) -> Result<FlowInfo, Status> {
    order(agent, parse_id(&request.flow)?, None).await
}

/// `to`: what is ordered; nothing where an order is released. The audit log has what is ordered before it is done, and
/// what is refused besides.
async fn order(agent: &Agent, id: FlowId, to: Option<Stack>) -> Result<FlowInfo, Status> {
    let (act, detail) = to.map_or(("stack-release", String::new()), |to| ("stack-set", to.to_string()));
    note(&agent.host, act, id, detail.clone())?;
    let ordered = change(agent, id, to).await;
    if let Err(refused) = &ordered {
        note(&agent.host, "stack-refused", id, format!("{act} {detail}: {}", refused.message()))?;
    }
    ordered?;
    show(agent, &id.to_string()).await
}

fn note(host: &Host, act: &str, id: FlowId, detail: String) -> Result<(), Status> {
    let entry = AuditEntry::once(host.clock.unix_s(), act, id.to_string(), detail);
    blocking(|| host.store.note_all(&[entry])).map_err(environment)
}

/// Gives an order, and waits until the flow is so.
async fn change(agent: &Agent, id: FlowId, to: Option<Stack>) -> Result<(), Status> {
    // Before the order: what comes of it may be told at once.
    let heard = agent.process.watchers.subscribe().ok_or_else(|| Status::unavailable("the agent is going down"))?;
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
        | ChangeRefused::Full(_)
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
                    if let Some(outcome) = last_outcome(&agent.core, id) {
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
fn last_outcome(core: &CoreHandle, id: FlowId) -> Option<ChangeOutcome> {
    let Some(flow) = core.0.with_sal(|sal, _| sal.flow(id)) else { return Some(ChangeOutcome::Ended) };
    let last = flow.stack.changes.last().map(|change| change.outcome);
    last.filter(|_| flow.stack.changing_to.is_none())
}

/// The rules, the first to decide first.
pub(super) fn rules(agent: &Agent) -> StackRuleListReply {
    let found = agent.core.0.with_sal(|sal, _| sal.stack_rules());
    let info = |info: &stack_rule::StackRuleInfo| StackRuleInfo {
        number: info.rule.number.into(),
        names: info.rule.names.iter().map(|prefix| naming::prefix(agent, prefix)).collect(),
        when: info.rule.text.clone(),
        r#use: info.rule.uses.label().to_owned(),
        hold_s: seconds(info.rule.hold),
        release_s: seconds(info.rule.release),
        priority: info.rule.priority,
        floor: info.rule.is_floor,
        flows: info.flows as u64,
        in_force: info.in_force as u64,
        failing: info.failing as u64,
        evaluations: info.counts.evaluations,
        failures: info.counts.failures,
    };
    StackRuleListReply { rules: found.iter().map(info).collect() }
}

fn seconds(time: Duration) -> u32 {
    u32::try_from(time.as_secs()).unwrap_or(u32::MAX)
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Adds what rules make of a flow.
pub(super) fn add_rules(agent: &Agent, id: FlowId, info: &mut FlowStack) {
    let Some(found) = agent.core.0.with_sal(|sal, _| sal.rules_of_flow(id)) else { return };
    let rule = |rule: &stack_rule::FlowRule| FlowRule {
        number: rule.number.into(),
        when: rule.text.clone(),
        r#use: rule.uses.label().to_owned(),
        floor: rule.is_floor,
        holds: rule.holds,
        since_ms: age_ms(rule.since),
        in_force: rule.in_force,
        waits_ms: rule.waits.map_or(0, millis),
        failure: rule.failure.clone().unwrap_or_default(),
    };
    info.rules = found.rules.iter().map(rule).collect();
    info.facts = found.facts.into_iter().map(|(name, value)| FlowFact { name, value }).collect();
    if let Some((refused, until)) = found.blocked {
        info.blocked = refused.to_string();
        info.blocked_ms = millis(until.since(clock::now()));
    }
    info.waits_for_seal = found.is_guarded;
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
        demanded_by_rule: stack.is_demanded_by_rule,
        ..FlowStack::default()
    }
}

fn change_info(change: &StackChange) -> FlowStackChange {
    FlowStackChange {
        ms_ago: age_ms(change.at),
        from: change.from.label().to_owned(),
        to: change.to.label().to_owned(),
        cause: change.cause.label().to_owned(),
        outcome: change.outcome.label().to_owned(),
        why: change.text(),
        rule: match change.cause {
            ChangeCause::Rule(number) | ChangeCause::RuleEnded(number) => number.into(),
            _ => 0,
        },
    }
}
