//! Connections that go to instances with fewer than their share, with reports.

use std::sync::Arc;

use margay_control::api::v1::*;
use tokio::sync::watch;
use tonic::Status;

use super::service::parse_name;
use super::{Streamed, environment, misuse, not_found};
use crate::agent::Agent;
use crate::agent::rebalance::RATES;
use crate::agent::rebalance::order::{self, RebalanceError};

fn refusal(error: RebalanceError) -> Status {
    match error {
        RebalanceError::Unknown(_) => not_found(error),
        RebalanceError::Obstacle(..) => misuse(error),
        RebalanceError::Unasked(..) | RebalanceError::Alone(..) | RebalanceError::Entropy(_) => environment(error),
    }
}

pub(super) async fn rebalance(
    agent: &Arc<Agent>,
    request: &RebalanceRequest,
) -> Result<Streamed<RebalanceReport>, Status> {
    let name = parse_name(&request.name)?;
    if request.dry_run {
        let report = order::rehearse(agent, name).await.map_err(refusal)?;
        return Ok(Box::pin(futures_util::stream::iter([Ok(report)])));
    }
    if !RATES.contains(&request.max_per_s) {
        let (least, most) = (RATES.start(), RATES.end());
        return Err(misuse(format!("a rate is from {least} to {most}: connections that a host gives in a second")));
    }
    Ok(reports(order::begin(agent, name, request.max_per_s).await.map_err(refusal)?))
}

/// Each report as it comes, until the last one. Nothing is ordered any more when this is dropped.
fn reports(receiver: watch::Receiver<RebalanceReport>) -> Streamed<RebalanceReport> {
    Box::pin(futures_util::stream::unfold(Some(receiver), |receiver| async move {
        let mut receiver = receiver?;
        // The task ends with the agent alone, or with its last report.
        receiver.changed().await.ok()?;
        let report = receiver.borrow_and_update().clone();
        let is_last = report.phase != "moving";
        Some((Ok(report), (!is_last).then_some(receiver)))
    }))
}
