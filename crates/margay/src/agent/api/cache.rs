//! The flow caches, by order of the operator.

use margay_control::api::v1::{CacheReply, CacheRequest};
use tonic::Status;

use super::{environment, misuse};
use crate::agent::Agent;

pub(super) fn act(agent: &Agent, request: &CacheRequest) -> Result<CacheReply, Status> {
    match request.act.as_str() {
        "clear" => agent.core.0.clear_cache(),
        "unload" => agent.kernel.direct.unload(&agent.core).map_err(environment)?,
        "load" => agent.kernel.direct.load(&agent.core).map_err(environment)?,
        other => return Err(misuse(format!("`{other}` is not one of clear, unload, load"))),
    }
    Ok(CacheReply { datapath: super::status::datapath(agent).to_owned() })
}
