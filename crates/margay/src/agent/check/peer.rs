//! The way to a peer: a name, a host-ID or an address.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use margay_control::lease::Asker;
use margay_core::key::HostId;
use margay_core::segment::SEGMENT;
use margay_core::table::Resolution;
use margay_core::{AssociationInfo, Event};
use tokio::net::TcpStream;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::TryRecvError;
use tokio::time::{interval, timeout};

use super::{Finding, Steps, direct, firewall};
use crate::agent::{Agent, home};
use crate::listener::{ServiceName, name_and_port};

const ANSWER_LIMIT: Duration = Duration::from_secs(1);
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// How often the association is looked at while an answer is awaited.
const LOOK: Duration = Duration::from_millis(5);

pub(super) async fn look(agent: &Agent, steps: &mut Steps, peer: &str) {
    if let Ok(host) = peer.parse::<HostId>() {
        let known = find(agent, |known| known.host == host);
        return reach(agent, steps, known, &format!("host {host}")).await;
    }
    if let Ok(address) = peer.parse::<IpAddr>() {
        let known = find(agent, |known| known.remote.ip() == address);
        return reach(agent, steps, known, &format!("the host at {address}")).await;
    }
    match name_and_port(peer) {
        Err(error) => {
            let advice = "a peer is a name (web.shop or web.shop:80), a host-ID or an address";
            steps.say("peer", Finding::failed(error, advice)).await;
        }
        Ok((name, port)) => look_at_name(agent, steps, &name, port).await,
    }
}

fn find(agent: &Agent, is_wanted: impl Fn(&AssociationInfo) -> bool) -> Option<AssociationInfo> {
    agent.core.0.with_sal(|sal, _| sal.associations().find(is_wanted))
}

/// Asks a known peer for a sign of life.
async fn reach(agent: &Agent, steps: &mut Steps, known: Option<AssociationInfo>, what: &str) {
    let Some(known) = known else {
        let advice =
            "the first connection to a service of it makes their acquaintance; check the service's name instead";
        return steps.say("peer", Finding::warning(format!("{what} and this host share no keys yet"), advice)).await;
    };
    let start = Instant::now();
    let host = known.host;
    agent.core.0.with_sal(|sal, now| sal.probe(now, host));
    let mut looks = interval(LOOK);
    let answered = timeout(ANSWER_LIMIT, async {
        loop {
            looks.tick().await;
            if find(agent, |now| now.host == host).is_some_and(|now| now.heard > known.heard) {
                return;
            }
        }
    });
    let finding = match answered.await {
        Ok(()) => Finding::Ok(format!(
            "{what} answers from {} in {} ms; {} bytes per datagram, {} flows",
            known.remote,
            start.elapsed().as_millis(),
            known.datagram_max,
            known.flows
        )),
        Err(_) => Finding::failed(
            format!("{what} does not answer at {}", known.remote),
            format!("is its agent up, and does a firewall let UDP port 54324 through, both ways?{}", own_filter()),
        ),
    };
    steps.say("peer", finding).await;
    direct::peer(agent, steps, host).await;
}

/// Where this host's own table takes the name, where that is not to its routers.
fn own_way(agent: &Agent, name: &ServiceName) -> Option<Finding> {
    agent.core.0.with_sal(|sal, _| match sal.resolve(&name.0.service_id()) {
        Resolution::Drop(rule) => Some(Finding::failed(
            format!("rule {} of this host discards what goes to {name}", rule.0),
            format!(
                "`margay route delete {}`, if it is not meant; `margay trace {name}` shows what comes after it",
                rule.0
            ),
        )),
        Resolution::Delay(_, resolver) => {
            Some(Finding::Ok(format!("{name}: {} is asked for it", agent.rules.resolvers.name_of(resolver))))
        }
        Resolution::Forward(rule, hop) if !hop.router && hop.address != SEGMENT => {
            Some(Finding::Ok(format!("{name}: rule {} of this host sends it to {}", rule.0, hop.address)))
        }
        Resolution::Forward(..) | Resolution::Demux(..) | Resolution::None => None,
    })
}

async fn look_at_name(agent: &Agent, steps: &mut Steps, name: &ServiceName, port: Option<u16>) {
    if let Some(finding) = own_way(agent, name) {
        let is_failed = matches!(finding, Finding::Failed(..));
        steps.say("name", finding).await;
        if let Some(port) = port.filter(|_| !is_failed) {
            steps.say("connect", connect(agent, name, port).await).await;
        }
        return;
    }
    let instances = match home::instances(&agent.services, agent.router.as_deref(), &name.0).await {
        Err(why) => {
            return steps.say("name", Finding::failed(why, "the router must be reached first; see above")).await;
        }
        Ok((instances, by)) if instances.is_empty() => {
            let advice = "publish it on a host that serves it: `margay service publish`";
            return steps.say("name", Finding::failed(format!("{by} knows no instance of {name}"), advice)).await;
        }
        Ok((instances, by)) => {
            let text = format!(
                "{name}: {} known to {by}",
                if instances.len() == 1 {
                    "1 instance is".into()
                } else {
                    format!("{} instances are", instances.len())
                }
            );
            steps.say("name", Finding::Ok(text)).await;
            instances
        }
    };
    for instance in &instances {
        if instance.host == agent.identity.host_id() {
            steps.say("instance", Finding::Ok(format!("{} is this host", instance.host_name))).await;
        } else if let Some(known) = find(agent, |known| known.host == instance.host) {
            reach(agent, steps, Some(known), &format!("instance {}", instance.host_name)).await;
        } else {
            let text = format!("{} at {} was not met yet", instance.host_name, instance.address);
            steps.say("instance", Finding::Ok(text)).await;
        }
    }
    if let Some(port) = port {
        steps.say("connect", connect(agent, name, port).await).await;
    }
}

/// A connection as a program would make it, through the virtual interface.
async fn connect(agent: &Agent, name: &ServiceName, port: u16) -> Finding {
    let address = match tokio::task::block_in_place(|| agent.leases.lease(&name.0, Asker::Operator)) {
        Ok(address) => SocketAddr::new(address.into(), port),
        Err(error) => return Finding::failed(error.to_string(), "see the agent's log"),
    };
    let events = agent.watchers.subscribe();
    let start = Instant::now();
    match timeout(CONNECT_LIMIT, TcpStream::connect(address)).await {
        Ok(Ok(_)) => {
            Finding::Ok(format!("TCP to {name} port {port} ({address}) in {} ms", start.elapsed().as_millis()))
        }
        Ok(Err(error)) => match events.and_then(|events| reason(events, address)) {
            Some(why) => Finding::failed(
                format!("TCP to {name} port {port} ({address}): {error}: {why}"),
                format!("`margay trace {name} --port {port}` shows which rules of which hosts decide"),
            ),
            None => Finding::failed(
                format!("TCP to {name} port {port} ({address}): {error}"),
                format!(
                    "`margay flow watch` on both hosts tells why; the service may not listen on this port, or not let this host in, or a \
                     firewall on its host drops or rejects what comes by sal0 (`margay check` there names the rule){}",
                    own_filter()
                ),
            ),
        },
        Err(_) => Finding::failed(
            format!("TCP to {name} port {port} ({address}): no answer in {CONNECT_LIMIT:?}"),
            format!(
                "first packets or answers are lost. Where the steps above reach the instance's host, its own firewall drops what comes \
                 by sal0, or the program does not accept: `margay check` there names the rule. Else: does a firewall let UDP port 54324 \
                 through between all hosts?{}",
                own_filter()
            ),
        ),
    }
}

/// What of this host may be in the way, for the end of an advice.
fn own_filter() -> String {
    let filter = tokio::task::block_in_place(firewall::filter);
    filter.map(|filter| format!(" On this host {filter} may refuse packets")).unwrap_or_default()
}

/// What the core has said of a connection to an address that failed. It says it before the program hears of it.
fn reason(mut events: Receiver<Event>, to: SocketAddr) -> Option<String> {
    loop {
        match events.try_recv() {
            Ok(Event::ConnectFailed { app, why, .. }) if app.destination == to => return Some(why),
            Ok(_) | Err(TryRecvError::Lagged(_)) => {}
            Err(TryRecvError::Empty | TryRecvError::Closed) => return None,
        }
    }
}

#[cfg(test)]
mod test {
    use margay_core::Tuple;
    use margay_core::name::ServiceId;
    use tokio::sync::broadcast;

    use super::*;

    #[test]
    fn a_connection_s_own_reason_is_told_and_no_other() {
        let (sender, receiver) = broadcast::channel(8);
        let to = |port| SocketAddr::from(([198, 18, 1, 1], port));
        for (port, why) in [(80, "nobody"), (81, "refused")] {
            let app = Tuple { protocol: 6, source: to(9), destination: to(port) };
            sender
                .send(Event::ConnectFailed { service: ServiceId::default(), app, why: why.to_owned() })
                .expect("heard");
        }
        assert_eq!(reason(sender.subscribe(), to(81)), None, "what was before");
        assert_eq!(reason(receiver.resubscribe(), to(81)), None);
        assert_eq!(reason(receiver, to(81)).as_deref(), Some("refused"));
    }
}
