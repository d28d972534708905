//! What this host's own packet filter does to connections by name: they come by `sal0`, which rules for a network card
//! do not mean.

use std::net::SocketAddr;
use std::time::Duration;

use margay_control::lease::Asker;
use margay_core::name::Name;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::{Finding, Steps, sockets};
use crate::agent::{Agent, INTERFACE, Names};
use crate::host::judge::{self, Judge};
use crate::listener::Protocol;

/// A program of this host accepts sooner.
const LIMIT: Duration = Duration::from_secs(1);
/// So many services are tried; what a filter does to one it does to most.
const SERVICES_MAX: usize = 8;

/// The filter of this host that may refuse packets; none where nobody filters, and where it is a reverse-path filter.
pub(super) fn filter() -> Option<Judge> {
    judge::find().ok().flatten().filter(|judge| !matches!(judge, Judge::ReversePath { .. }))
}

/// Connects to what this host serves, the way by which connections of other hosts come, where a filter may be in the
/// way.
pub(super) async fn this_host(agent: &Agent, steps: &mut Steps) {
    let Some(filter) = tokio::task::block_in_place(filter) else { return };
    let served = agent.publishing.services.list().into_iter().flat_map(|service| {
        let of_tcp = service.listeners.into_iter().filter(|listener| listener.protocol != Some(Protocol::Udp));
        of_tcp.map(move |listener| (service.name.clone(), listener))
    });
    let served = served.filter(|(_, listener)| sockets::is_listening(listener.address, Some(Protocol::Tcp)));
    for (name, listener) in served.take(SERVICES_MAX) {
        let port = listener.service_port.unwrap_or_else(|| listener.address.port());
        let Some(why) = refusal(&agent.names, &name, port).await else { continue };
        let text = format!(
            "connections to {name} port {port} come by {INTERFACE}, and {why}, though a program listens at {}: \
             {filter} drops or rejects them",
            listener.address
        );
        let advice = format!(
            "let the firewall take packets with `iifname {INTERFACE}` for this port: what comes there has passed the \
             agent's own checks; Margay changes nothing in it"
        );
        steps.say("firewall", Finding::failed(text, advice)).await;
    }
}

/// How a connection by name to this host's own instance fails; none where it does not.
async fn refusal(names: &Names, name: &Name, port: u16) -> Option<String> {
    let address = tokio::task::block_in_place(|| names.leases.lease(name, Asker::Operator)).ok()?;
    match timeout(LIMIT, TcpStream::connect(SocketAddr::new(address.into(), port))).await {
        Ok(Ok(_)) => None,
        Ok(Err(error)) => Some(format!("fail: {error}")),
        Err(_) => Some(format!("get no answer in {LIMIT:?}")),
    }
}
