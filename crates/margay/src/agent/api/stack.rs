//! The kernel's flow cache, by order of the operator.

use margay_control::api::v1::{StackReply, StackRequest};
use tonic::Status;

use super::{environment, misuse};
use crate::agent::Agent;

pub(super) fn act(agent: &Agent, request: &StackRequest) -> Result<StackReply, Status> {
    match request.act.as_str() {
        "clear-cache" => agent.core.0.clear_cache(),
        "unload" => agent.direct.unload(&agent.core).map_err(environment)?,
        "load" => agent.direct.load(&agent.core).map_err(environment)?,
        other => return Err(misuse(format!("`{other}` is not one of clear-cache, unload, load"))),
    }
    Ok(StackReply { datapath: super::status::datapath(agent).to_owned() })
}
