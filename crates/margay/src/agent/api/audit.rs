//! The audit log.

use margay_control::api::v1::*;
use margay_control::store::AuditEntry;
use tonic::Status;

use super::{blocking, environment, misuse};
use crate::agent::Agent;

const LIMIT: usize = 100;

pub(super) async fn list(agent: &Agent, request: &AuditListRequest) -> Result<AuditListReply, Status> {
    if let Some(router) = &agent.routing.router {
        router.write_audit().await;
    }
    let limit = if request.limit == 0 { LIMIT } else { request.limit as usize };
    let entries = blocking(|| agent.host.store.audit(limit)).map_err(environment)?;
    let info = |entry: AuditEntry| {
        let AuditEntry { unix_s, act, subject, detail, count } = entry;
        AuditInfo { unix_s, act, subject, detail, count }
    };
    Ok(AuditListReply { entries: entries.into_iter().map(info).collect() })
}

/// Bytes of a hash in hexadecimal digits.
const HASH_LEN: usize = 64;
/// Longest name that is noted.
const NAME_MAX: usize = 512;

/// Notes that a switch's module is loaded, or unloaded.
pub(super) fn note_module(agent: &Agent, request: &ModuleNoteRequest) -> Result<ModuleNoteReply, Status> {
    let ModuleNoteRequest { ensemble, hash } = request;
    let is_hash = hash.len() == HASH_LEN && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !hash.is_empty() && !is_hash {
        return Err(misuse(format!("`{hash}` is no hash: it has {HASH_LEN} hexadecimal digits, or none")));
    }
    if ensemble.is_empty() || ensemble.len() > NAME_MAX || ensemble.chars().any(char::is_control) {
        return Err(misuse("this is no ensemble's name"));
    }
    let act = if hash.is_empty() { "module-unload" } else { "module-load" };
    let entry = AuditEntry::once(agent.host.clock.unix_s(), act, ensemble.clone(), hash.clone());
    blocking(|| agent.host.store.note_all(&[entry])).map_err(environment)?;
    Ok(ModuleNoteReply {})
}
