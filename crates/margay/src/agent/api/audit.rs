//! The audit log.

use margay_control::api::v1::*;
use margay_control::store::AuditEntry;
use tonic::Status;

use super::{blocking, environment};
use crate::agent::Agent;

const LIMIT: usize = 100;

pub(super) async fn list(agent: &Agent, request: &AuditListRequest) -> Result<AuditListReply, Status> {
    if let Some(router) = &agent.router {
        router.write_audit().await;
    }
    let limit = if request.limit == 0 { LIMIT } else { request.limit as usize };
    let entries = blocking(|| agent.store.audit(limit)).map_err(environment)?;
    let info = |entry: AuditEntry| {
        let AuditEntry { unix_s, act, subject, detail, count } = entry;
        AuditInfo { unix_s, act, subject, detail, count }
    };
    Ok(AuditListReply { entries: entries.into_iter().map(info).collect() })
}
