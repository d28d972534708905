//! What happens to the flows of a program's user, as one line of JSON each.

use std::collections::HashSet;
use std::fs;

use margay_core::name::ServiceId;
use margay_core::{Event, Tuple};
use margay_wire::{FlowId, SessionId};
use serde_json::json;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;

use super::rights::Caller;
use crate::agent::Agent;

/// Flows of one user that are remembered until they close; of more, the end is not told.
const FLOWS_MAX: usize = 65_536;

/// Somebody who is told.
pub struct Subscription {
    receiver: Receiver<Event>,
    /// Whose flows; `None`: all.
    uid: Option<u32>,
    flows: HashSet<FlowId>,
}

impl Subscription {
    /// From now on; `None` when the agent goes down.
    pub fn new(agent: &Agent, caller: &Caller) -> Option<Self> {
        let uid = (!caller.uid.is_root()).then(|| caller.uid.as_raw());
        Some(Self { receiver: agent.watchers.subscribe()?, uid, flows: HashSet::new() })
    }

    /// The next line; `None` when the agent goes down.
    pub async fn next(&mut self, agent: &Agent) -> Option<String> {
        loop {
            match self.receiver.recv().await {
                Ok(event) => {
                    if let Some(line) = tokio::task::block_in_place(|| self.line_of(agent, event)) {
                        return Some(line);
                    }
                }
                Err(RecvError::Lagged(count)) => return Some(json!({"kind": "missed", "count": count}).to_string()),
                Err(RecvError::Closed) => return None,
            }
        }
    }

    fn line_of(&mut self, agent: &Agent, event: Event) -> Option<String> {
        match event {
            Event::FlowOpened(id) => {
                // One that is gone again already will be told of by its end.
                let flow = agent.core.0.with_sal(|sal, _| sal.flow(id))?;
                if !self.is_theirs(agent, &flow.app) || self.flows.len() >= FLOWS_MAX {
                    return None;
                }
                self.flows.insert(id);
                Some(line(agent, "opened", &flow.service, Some(flow.session), ""))
            }
            Event::FlowClosed { flow, reason } => {
                let is_known = self.flows.remove(&flow.flow);
                let is_told = is_known || self.uid.is_none();
                is_told.then(|| line(agent, "closed", &flow.service, Some(flow.session), reason.label()))
            }
            Event::ConnectFailed { service, app, why } => {
                self.is_theirs(agent, &app).then(|| line(agent, "failed", &service, None, &why))
            }
            Event::FlowChanged(_)
            | Event::AssociationUp(_)
            | Event::PeerRebooted(_)
            | Event::Twin(_)
            | Event::Moved { .. }
            | Event::Whereabouts(_)
            | Event::Flapping(_)
            | Event::Silent(_)
            | Event::Unanswered(_)
            | Event::OtherHost { .. }
            | Event::RouterFound { .. }
            | Event::RuleExpired { .. } => None,
        }
    }

    fn is_theirs(&self, agent: &Agent, app: &Tuple) -> bool {
        let Some(uid) = self.uid else { return true };
        // A socket that is closed is nobody's in the kernel's tables; a client that has a name is known all the same.
        match agent.programs.sources.user_of((app.protocol, app.source.port())) {
            Some(owner) => owner.as_raw() == uid,
            None => tables(app.protocol).iter().any(|table| is_of_user(table, app.source.port(), uid)),
        }
    }
}

fn line(agent: &Agent, kind: &str, service: &ServiceId, session: Option<SessionId>, why: &str) -> String {
    let registered = agent.store.name_of(&(*service).into()).ok().flatten();
    let name = registered.or_else(|| agent.leases.written(service)).unwrap_or_default();
    let session = session.map(|session| session.to_string()).unwrap_or_default();
    json!({"kind": kind, "name": name, "service": service.to_string(), "session": session, "why": why}).to_string()
}

fn tables(protocol: u8) -> [String; 2] {
    let names = if protocol == 6 { ["tcp", "tcp6"] } else { ["udp", "udp6"] };
    names.map(|name| fs::read_to_string(format!("/proc/self/net/{name}")).unwrap_or_default())
}

/// Whether a table of the kernel has a socket of this user on a local port.
fn is_of_user(table: &str, port: u16, uid: u32) -> bool {
    table.lines().skip(1).any(|line| {
        let mut columns = line.split_ascii_whitespace();
        let local = columns.nth(1).and_then(|local| local.rsplit_once(':'));
        let of_line = local.and_then(|(_, port)| u16::from_str_radix(port, 16).ok());
        of_line == Some(port) && columns.nth(5).and_then(|owner| owner.parse().ok()) == Some(uid)
    })
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_socket_is_its_users() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n \
                     12: 0100007F:1F90 00000000:0000 01 00000000:00000000 00:00000000 00000000  1000        0 4711 2 0\n bad";
        assert!(is_of_user(table, 8080, 1000));
        assert!(!is_of_user(table, 8080, 0) && !is_of_user(table, 8081, 1000) && !is_of_user("", 8080, 1000));
    }
}
