//! Orders of other hosts on the boxes of sessions of programs here, in the audit log (docs/decisions/0112).

use std::sync::Arc;

use margay_control::store::AuditEntry;
use margay_core::key::HostId;
use margay_core::name::{Prefix, ServiceId};
use margay_core::reconfiguration::{Edit, ReconfigurationOutcome};
use margay_core::{Event, Role};
use margay_wire::SessionId;
use tokio::sync::broadcast::error::RecvError;

use super::{Agent, naming};

/// Notes them until the agent goes down: each when it comes, and again if it comes to nothing.
pub async fn follow(agent: Arc<Agent>) {
    let Some(mut heard) = agent.process.watchers.follow_distant_orders() else { return };
    loop {
        match heard.recv().await {
            Ok(Event::Ordered { session, by, edit, refused, .. }) => note(&agent, session, by, edit, &refused),
            Ok(Event::Reconfigured { session, change, .. }) if change.outcome != ReconfigurationOutcome::Done => {
                if let Some(by) = change.by {
                    note(&agent, session, by, change.edit, change.outcome.text());
                }
            }
            Ok(_) => {}
            Err(RecvError::Lagged(missed)) => {
                tracing::warn!(missed, "some orders of other hosts on sessions' boxes are not in the audit log");
            }
            Err(RecvError::Closed) => return,
        }
    }
}

/// `why`: it came to nothing for this reason; empty: it is to be carried out.
fn note(agent: &Agent, session: SessionId, by: HostId, edit: Edit, why: &str) {
    let name = |service: &ServiceId| naming::prefix(agent, &Prefix::from(*service));
    let boxes = match &edit {
        Edit::Insert { service, before: Some(other) } | Edit::Replace { service, by: other } => {
            format!("{} {}", name(service), name(other))
        }
        Edit::Insert { service, before: None } | Edit::Remove { service } | Edit::Leave { service } => name(service),
    };
    let failed = if why.is_empty() { "" } else { "-failed" };
    let why = if why.is_empty() { String::new() } else { format!(": {why}") };
    let flow = agent.core.0.with_sal(|sal, _| {
        sal.flows().find(|flow| flow.session == session && flow.role == Role::Initiator).map(|flow| flow.service)
    });
    let subject = flow.map_or_else(|| session.to_string(), |service| format!("{session} to {}", name(&service)));
    let detail = format!("{boxes}, by order of host {by}{why}");
    let entry =
        AuditEntry::once(agent.host.clock.unix_s(), &format!("chain-{}{failed}", edit.label()), subject, detail);
    if let Err(error) = tokio::task::block_in_place(|| agent.host.store.note_all(&[entry])) {
        tracing::warn!(%error, "an order of another host on a session's boxes is not in the audit log");
    }
}
