//! Drains, with their reports.

use std::sync::Arc;
use std::time::Duration;

use margay_control::api::v1::*;
use margay_core::quiet::QUIET_MS_DEFAULT;
use tokio::sync::watch;
use tonic::Status;

use super::service::parse_name;
use super::{Streamed, environment, misuse, not_found};
use crate::agent::Agent;
use crate::agent::drain::{self, DrainError, Order, When};
use crate::fields;

fn refusal(error: DrainError) -> Status {
    match error {
        DrainError::Unknown(_) | DrainError::NotDrained(_) => not_found(error),
        DrainError::Already(..) | DrainError::OfHost | DrainError::TooLong | DrainError::Destination { .. } => {
            misuse(error)
        }
        DrainError::Last(_) | DrainError::LastRouter | DrainError::Unasked(..) | DrainError::State(_) => {
            environment(error)
        }
    }
}

fn order(request: &DrainRequest) -> Result<Order, Status> {
    let name = (!request.name.is_empty()).then(|| parse_name(&request.name)).transpose()?;
    let quiet_ms = request.quiet_ms.map(fields::quiet_ms).transpose().map_err(misuse)?;
    if quiet_ms.is_some() && request.when != "quiet" {
        return Err(misuse("a time without data is for `quiet` alone; leave it out, or drain with --when quiet"));
    }
    if !request.to.is_empty() && request.when == "now" {
        return Err(misuse("with `now` connections are reset before programs can give them away; leave --to out"));
    }
    let (deadline, when) = match request.when.as_str() {
        "" => (Duration::from_millis(request.deadline_ms), None),
        "finish" => (Duration::from_millis(request.deadline_ms), Some(When::Finish)),
        "quiet" => {
            let quiet_ms = quiet_ms.unwrap_or(QUIET_MS_DEFAULT);
            (Duration::from_millis(request.deadline_ms), Some(When::Quiet { quiet_ms }))
        }
        "now" => (Duration::ZERO, Some(When::Finish)),
        other => return Err(misuse(format!("`{other}` is not one of finish, quiet, now"))),
    };
    let to = request.to.clone();
    Ok(Order { name, deadline, when, to, is_last_drained: request.last, is_kept: !request.until_restart })
}

pub(super) async fn drain(agent: &Arc<Agent>, request: &DrainRequest) -> Result<Streamed<DrainReport>, Status> {
    let order = order(request)?;
    if request.dry_run {
        let report = drain::rehearse(agent, order).await.map_err(refusal)?;
        return Ok(Box::pin(futures_util::stream::iter([Ok(report)])));
    }
    Ok(reports(drain::begin(agent, order).await.map_err(refusal)?))
}

/// Each report as it changes, until the last one.
fn reports(receiver: watch::Receiver<DrainReport>) -> Streamed<DrainReport> {
    Box::pin(futures_util::stream::unfold(Some(receiver), |receiver| async move {
        let mut receiver = receiver?;
        receiver.changed().await.ok()?;
        let report = receiver.borrow_and_update().clone();
        let is_last = !matches!(report.phase.as_str(), "announcing" | "emptying");
        Some((Ok(report), (!is_last).then_some(receiver)))
    }))
}

pub(super) async fn undrain(agent: &Agent, request: &UndrainRequest) -> Result<UndrainReply, Status> {
    let name = (!request.name.is_empty()).then(|| parse_name(&request.name)).transpose()?;
    Ok(UndrainReply { names: drain::end(agent, name.as_ref()).await.map_err(refusal)? })
}
