//! Operators on other hosts: the API over TLS, where the configuration has it.

use std::net::SocketAddr;
use std::sync::Arc;

use margay_control::api::remote::{self, Heard, TlsFiles};
use margay_control::store::AuditEntry;
use miette::{IntoDiagnostic, Result};
use tokio::task::JoinHandle;

use super::Agent;
use super::api::Api;

/// Calls that change nothing: they are not written down.
const READING: [&str; 9] = ["Status", "Check", "List", "Show", "Resolve", "Watch", "Trace", "Identity", "Metrics"];

/// Hears operators from now on, until the task is ended.
///
/// # Errors
///
/// The files make no sense, or the address cannot be had.
pub async fn start(agent: &Arc<Agent>) -> Result<Option<JoinHandle<()>>> {
    let Some(section) = &agent.config().api else { return Ok(None) };
    let files = TlsFiles {
        certificate: section.certificate.clone(),
        key: section.key.clone(),
        authorities: section.operators.clone(),
    };
    let door = remote::open(section.listen, &files).await.into_diagnostic()?;
    let (writer, api) = (Arc::clone(agent), Api(Arc::clone(agent)));
    let heard: Heard = Arc::new(move |operator, from, call| note(&writer, operator, from, call));
    Ok(Some(tokio::spawn(async move {
        if let Err(error) = remote::serve(door, api, heard, std::future::pending()).await {
            tracing::warn!(%error, "operators on other hosts are no longer heard");
        }
    })))
}

fn note(agent: &Arc<Agent>, operator: &str, from: Option<SocketAddr>, call: &str) {
    let from = from.map(|from| from.ip().to_canonical().to_string()).unwrap_or_default();
    tracing::info!(operator, from, call, "an operator on another host");
    if READING.iter().any(|word| call.ends_with(word)) {
        return;
    }
    let detail = format!("{call}, from {from}");
    let entry = AuditEntry::once(agent.host.clock.unix_s(), "remote-call", operator.to_owned(), detail);
    let agent = Arc::clone(agent);
    tokio::task::spawn_blocking(move || {
        if let Err(error) = agent.host.store.note_all(&[entry]) {
            tracing::warn!(%error, "what an operator has called for is not in the audit log");
        }
    });
}
