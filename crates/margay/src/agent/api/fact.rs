//! Facts from outside, by order of an operator or a program.

use std::time::Duration;

use margay_control::api::v1::{FactClearReply, FactInfo, FactListReply, FactSetRequest};
use margay_control::store::AuditEntry;
use margay_core::stack_rule::{FactRefused, FactValue, OutsideInfo};
use margay_datapath::clock;
use tonic::Status;

use super::flow::age_ms;
use super::{blocking, environment, misuse, not_found};
use crate::agent::{Agent, Host, core::CoreHandle, stack_rules};

/// How long a fact holds that says nothing of that.
const TTL_S: u32 = 3600;

/// Sets a fact; the rules are looked at before the answer.
pub(super) fn set(agent: &Agent, request: &FactSetRequest) -> Result<FactInfo, Status> {
    let name = &request.name;
    let ttl_s = if request.ttl_s == 0 { TTL_S } else { request.ttl_s };
    let value = FactValue::read(&request.value);
    let ttl = Duration::from_secs(ttl_s.into());
    agent.core.0.with_sal(|sal, now| sal.set_fact(now, name, value, ttl)).map_err(misuse)?;
    note(&agent.host, "fact-set", name, format!("{} for {ttl_s} s", request.value))?;
    stack_rules::judge(agent);
    let found = infos(&agent.core).into_iter().find(|fact| fact.name == *name);
    found.ok_or_else(|| environment("the fact has been cleared meanwhile"))
}

/// The facts that are set, by their names.
pub(super) fn list(agent: &Agent) -> FactListReply {
    FactListReply { facts: infos(&agent.core) }
}

/// Forgets a fact; the rules are looked at before the answer.
pub(super) fn clear(agent: &Agent, name: &str) -> Result<FactClearReply, Status> {
    let cleared = agent.core.0.with_sal(|sal, now| sal.clear_fact(now, name));
    cleared.map_err(|refused| match refused {
        FactRefused::NotSet(_) => not_found(refused),
        other => misuse(other),
    })?;
    note(&agent.host, "fact-clear", name, String::new())?;
    stack_rules::judge(agent);
    Ok(FactClearReply {})
}

fn note(host: &Host, act: &str, name: &str, detail: String) -> Result<(), Status> {
    let entry = AuditEntry::once(host.clock.unix_s(), act, name.to_owned(), detail);
    blocking(|| host.store.note_all(&[entry])).map_err(environment)
}

fn infos(core: &CoreHandle) -> Vec<FactInfo> {
    core.0.with_sal(|sal, now| sal.outside_facts(now)).into_iter().map(info).collect()
}

fn info(found: OutsideInfo) -> FactInfo {
    let (value, kind) = match found.fact.value {
        FactValue::Bool(is) => (is.to_string(), "truth"),
        FactValue::Number(number) => (number.to_string(), "number"),
        FactValue::Text(text) => (text, "text"),
    };
    let left = found.fact.until.since(clock::now());
    FactInfo {
        name: found.name,
        value,
        kind: kind.to_owned(),
        since_ms: age_ms(found.fact.since),
        left_ms: u64::try_from(left.as_millis()).unwrap_or(u64::MAX),
        rules: found.rules.into_iter().map(u32::from).collect(),
    }
}
