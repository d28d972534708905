//! The way to a peer: a name, a host-ID or an address.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use margay_control::api::v1::{TraceReply, TraceRequest};
use margay_control::lease::Asker;
use margay_control::registration::Instance;
use margay_core::key::HostId;
use margay_core::segment::SEGMENT;
use margay_core::table::Resolution;
use margay_core::{AssociationInfo, Event};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::time::{interval, timeout};

use super::{Finding, LOOKUP_LIMIT, Steps, direct, firewall};
use crate::agent::api::trace;
use crate::agent::{Agent, core::CoreHandle, home};
use crate::listener::{Protocol, ServiceName, name_and_port};
use margay_control::quantity::{count, count_of};

const ANSWER_LIMIT: Duration = Duration::from_secs(1);
/// A handshake with a host that was never met, its repetitions included.
const MEET_LIMIT: Duration = Duration::from_secs(2);
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// How often the association is looked at while an answer is awaited.
const LOOK: Duration = Duration::from_millis(5);

/// `protocol`: of the connection, where `peer` has a port.
pub(super) async fn look(agent: &Agent, steps: &mut Steps, peer: &str, protocol: Protocol) {
    if let Ok(host) = peer.parse::<HostId>() {
        let Some(known) = find(&agent.core, |known| known.host == host) else {
            let advice = "name a service of it, or its address: a host-ID alone says nothing about where it is";
            let text = format!("host {host} was never met");
            return steps.say("peer", Finding::failed(text, advice)).await;
        };
        return reach(agent, steps, known, &format!("host {host}")).await;
    }
    if let Ok(address) = peer.parse::<IpAddr>() {
        return look_at_address(agent, steps, address).await;
    }
    match name_and_port(peer) {
        Err(error) => {
            let advice = "a peer is a name (web.shop or web.shop:80), a host-ID or an address";
            steps.say("peer", Finding::failed(error, advice)).await;
        }
        Ok((name, port)) => look_at_name(agent, steps, &name, port, protocol).await,
    }
}

async fn look_at_address(agent: &Agent, steps: &mut Steps, address: IpAddr) {
    let what = format!("the host at {address}");
    let known = find(&agent.core, |known| known.remote.ip() == address);
    let at = SocketAddr::new(address, margay_wire::PORT);
    let Some(known) = (match known {
        Some(known) => Some(known),
        None => meet(agent, at, |known| known.remote.ip() == address).await,
    }) else {
        let text = format!("{what} was never met, and nobody answers at {at}");
        return steps.say("peer", Finding::failed(text, no_answer())).await;
    };
    reach(agent, steps, known, &what).await;
}

/// Greets whoever is at an address; what comes of it.
async fn meet(agent: &Agent, at: SocketAddr, is_wanted: impl Fn(&AssociationInfo) -> bool) -> Option<AssociationInfo> {
    // A full flow table greets nobody; the drops `full` count that.
    agent.core.0.with_sal(|sal, now| sal.greet(now, at)).ok()?;
    let mut looks = interval(LOOK);
    let answered = timeout(MEET_LIMIT, async {
        loop {
            looks.tick().await;
            if let Some(known) = find(&agent.core, &is_wanted) {
                return known;
            }
        }
    });
    answered.await.ok()
}

fn find(core: &CoreHandle, is_wanted: impl Fn(&AssociationInfo) -> bool) -> Option<AssociationInfo> {
    core.0.with_sal(|sal, _| sal.associations().find(is_wanted))
}

/// Asks a known peer for a sign of life.
async fn reach(agent: &Agent, steps: &mut Steps, known: AssociationInfo, what: &str) {
    let start = Instant::now();
    let host = known.host;
    agent.core.0.with_sal(|sal, now| sal.probe(now, host));
    let mut looks = interval(LOOK);
    let answered = timeout(ANSWER_LIMIT, async {
        loop {
            looks.tick().await;
            if find(&agent.core, |now| now.host == host).is_some_and(|now| now.heard > known.heard) {
                return;
            }
        }
    });
    let finding = match answered.await {
        Ok(()) => Finding::Ok(format!(
            "{what} answers from {} in {} ms; {} bytes per datagram, {}",
            known.remote,
            start.elapsed().as_millis(),
            known.datagram_max,
            count(known.flows.into(), "flow")
        )),
        Err(_) => Finding::failed(format!("{what} does not answer at {}", known.remote), no_answer()),
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
            Some(Finding::Ok(format!("{name}: {} is asked for it", agent.routing.rules.resolvers.name_of(resolver))))
        }
        Resolution::Forward(rule, hop) if !hop.router && hop.address != SEGMENT => {
            Some(Finding::Ok(format!("{name}: rule {} of this host sends it to {}", rule.0, hop.address)))
        }
        Resolution::Forward(..) | Resolution::Demux(..) | Resolution::Box(..) | Resolution::None => None,
    })
}

async fn look_at_name(agent: &Agent, steps: &mut Steps, name: &ServiceName, port: Option<u16>, protocol: Protocol) {
    let own = own_way(agent, name);
    let is_own = own.is_some();
    let instances = match own {
        Some(finding) => {
            let is_failed = matches!(finding, Finding::Failed(..));
            steps.say("name", finding).await;
            (!is_failed).then(Vec::new)
        }
        None => registered(agent, steps, name).await,
    };
    let Some(instances) = instances else { return };
    lookup(agent, steps, name).await;
    if !is_own {
        steps.say("trace", way(agent, name, port, protocol).await).await;
    }
    for instance in &instances {
        look_at_instance(agent, steps, instance).await;
    }
    if let Some(port) = port {
        steps.say("connect", connect(agent, name, port, protocol).await).await;
    }
}

/// What the router knows; `None` where that is nothing.
async fn registered(agent: &Agent, steps: &mut Steps, name: &ServiceName) -> Option<Vec<Instance>> {
    let (instances, by) =
        match home::instances(&agent.publishing.services, agent.routing.router.as_deref(), &name.0).await {
            Err(why) => {
                steps.say("name", Finding::failed(why, "the router must be reached first; see above")).await;
                return None;
            }
            Ok(found) => found,
        };
    agent.names.naming.learn(&instances);
    if instances.is_empty() {
        let advice = format!(
            "on a host that is to serve it: `margay run --service {name} -- COMMAND`, or `margay service publish`; \
             `margay service show {name}` there says why its router has refused it"
        );
        steps.say("name", Finding::failed(format!("{by} knows no instance of {name}"), advice)).await;
        return None;
    }
    let are = if instances.len() == 1 { "is" } else { "are" };
    let text = format!("{name}: {} {are} known to {by}", count_of(instances.len(), "instance"));
    steps.say("name", Finding::Ok(text)).await;
    Some(instances)
}

/// The name as programs ask for it.
async fn lookup(agent: &Agent, steps: &mut Steps, name: &ServiceName) {
    // Other names have no form that a resolver library takes, or the step `dns` has said what is wrong.
    if agent.names.dns.is_none() || !name.0.is_service() {
        return;
    }
    let asked = format!("{}.{}", name.0.written(), agent.config().dns.zone);
    let found = timeout(LOOKUP_LIMIT, tokio::net::lookup_host((asked.as_str(), 0))).await;
    let advice = "see the step `dns`";
    let finding = match found {
        Err(_) => Finding::failed(format!("{asked}: no answer in {LOOKUP_LIMIT:?}"), advice),
        Ok(Err(error)) => Finding::failed(format!("{asked}: {error}"), advice),
        Ok(Ok(addresses)) => {
            let mut found: Vec<String> = addresses.map(|address| address.ip().to_string()).collect();
            found.dedup();
            Finding::Ok(format!("{asked} is {}", found.join(", ")))
        }
    };
    steps.say("lookup", finding).await;
}

/// The way of a first packet, as the hosts on it explain it.
async fn way(agent: &Agent, name: &ServiceName, port: Option<u16>, protocol: Protocol) -> Finding {
    let request =
        TraceRequest { name: name.to_string(), port: port.map(u32::from), protocol: protocol.label().to_owned() };
    match trace::reply(agent, &request).await {
        Ok(reply) => of_trace(name, &reply),
        Err(status) => Finding::warning(format!("{name}: {}", status.message()), "the other steps do without it"),
    }
}

fn of_trace(name: &ServiceName, reply: &TraceReply) -> Finding {
    let hops: Vec<&str> = reply.hops.iter().map(|hop| hop.host_name.as_str()).collect();
    let hops = hops.join(" > ");
    let Some(last) = reply.hops.last() else { return Finding::Ok(format!("{name}: nothing is known of its way")) };
    let text = format!("{hops}: {}", last.why);
    let at = &last.host_name;
    match last.act.as_str() {
        "deliver" => Finding::Ok(text),
        "unasked" => Finding::warning(text, format!("what {at} would do is not known; the next steps try it")),
        "discard" => Finding::failed(text, format!("`margay route list {name}` on {at}, and `margay route delete`")),
        "refuse" => {
            Finding::failed(text, format!("let this host in on {at}: --allow of `margay run` or `service publish`"))
        }
        _ => Finding::failed(text, format!("`margay trace {name}` shows each rule on the way; is the port right?")),
    }
}

async fn look_at_instance(agent: &Agent, steps: &mut Steps, instance: &Instance) {
    let Instance { host, host_name, address, .. } = instance;
    if *host == agent.host.identity.host_id() {
        return steps.say("instance", Finding::Ok(format!("{host_name} is this host"))).await;
    }
    let begun = Instant::now();
    if let Some(known) = find(&agent.core, |known| known.host == *host) {
        return reach(agent, steps, known, &format!("instance {host_name}")).await;
    }
    if let Some(known) = meet(agent, *address, |known| known.host == *host).await {
        let text = format!("{host_name} at {address} was never met; now it was, in {} ms", begun.elapsed().as_millis());
        steps.say("instance", Finding::Ok(text)).await;
        return reach(agent, steps, known, &format!("instance {host_name}")).await;
    }
    // Behind a translator it answers what comes by its router, and nothing else.
    let text = format!("{host_name} was never met, and does not answer at {address}");
    steps.say("instance", Finding::warning(text, no_answer())).await;
}

/// A connection as a program would make it, through the virtual interface.
async fn connect(agent: &Agent, name: &ServiceName, port: u16, protocol: Protocol) -> Finding {
    let address = match tokio::task::block_in_place(|| agent.names.leases.lease(&name.0, Asker::Operator)) {
        Ok(address) => SocketAddr::new(address.into(), port),
        Err(error) => return Finding::failed(error.to_string(), "see the agent's log"),
    };
    let events = agent.process.watchers.subscribe();
    let start = Instant::now();
    let tried = match protocol {
        Protocol::Tcp => timeout(CONNECT_LIMIT, TcpStream::connect(address)).await.map(|done| done.map(drop)),
        Protocol::Udp => timeout(CONNECT_LIMIT, send_datagram(agent, address)).await,
    };
    let what = format!("{} to {name}:{port} ({address})", protocol.label().to_uppercase());
    match tried {
        Ok(Ok(())) if protocol == Protocol::Udp => Finding::Ok(format!(
            "{what}: a flow to the instance in {} ms; its program was sent one empty datagram",
            start.elapsed().as_millis()
        )),
        Ok(Ok(())) => Finding::Ok(format!("{what} in {} ms", start.elapsed().as_millis())),
        Ok(Err(error)) => match events.and_then(|events| reason(events, address)) {
            Some(why) => Finding::failed(
                format!("{what}: {error}: {why}"),
                format!("`margay trace {name}:{port}` shows which rules of which hosts decide"),
            ),
            None => Finding::failed(
                format!("{what}: {error}"),
                format!(
                    "`margay flow watch` on both hosts tells why; the service may not listen on this port, or not \
                     let this host in, or a firewall on its host drops or rejects what comes by sal0 (`margay check` \
                     there names the rule){}",
                    own_filter()
                ),
            ),
        },
        Err(_) => Finding::failed(
            format!("{what}: no answer in {CONNECT_LIMIT:?}"),
            format!(
                "first packets or answers are lost. Where the steps above reach the instance's host, its own \
                 firewall drops what comes by sal0, or the program does not accept: `margay check` there names the \
                 rule. Else: does a firewall let UDP port 54324 through between all hosts?{}",
                own_filter()
            ),
        ),
    }
}

/// Sends an empty datagram, and waits for the flow that it opens. The instance's agent answers for the flow, its
/// program may keep silent.
async fn send_datagram(agent: &Agent, to: SocketAddr) -> io::Result<()> {
    let events = agent.process.watchers.subscribe();
    let mut events = events.ok_or_else(|| io::Error::other("the agent is going down"))?;
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind(SocketAddr::new(any, 0)).await?;
    socket.connect(to).await?;
    let own = socket.local_addr()?;
    socket.send(&[]).await?;
    loop {
        match events.recv().await {
            Ok(Event::FlowOpened(id)) => {
                let app = agent.core.0.with_sal(|sal, _| sal.flow(id)).map(|flow| flow.app);
                if app.is_some_and(|app| app.destination == to && app.source == own) {
                    return Ok(());
                }
            }
            Ok(Event::ConnectFailed { app, .. }) if app.destination == to && app.source == own => {
                return Err(io::ErrorKind::ConnectionRefused.into());
            }
            Ok(_) | Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => return Err(io::Error::other("the agent is going down")),
        }
    }
}

/// What to look at where a host does not answer.
fn no_answer() -> String {
    format!("is its agent up, and does a firewall let UDP port 54324 through, both ways?{}", own_filter())
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
    use margay_control::api::v1::TraceHop;
    use margay_core::Tuple;
    use margay_core::name::ServiceId;
    use tokio::sync::broadcast;

    use super::*;

    #[test]
    fn where_a_trace_ends_decides_what_is_wrong() {
        let name: ServiceName = "web.shop".parse().expect("a name");
        let hop = |host: &str, act: &str| TraceHop {
            host_name: host.to_owned(),
            act: act.to_owned(),
            why: "so it is".to_owned(),
            ..TraceHop::default()
        };
        let end = |act: &str| {
            let hops = vec![hop("client", "forward"), hop("web1", act)];
            of_trace(&name, &TraceReply { hops, ..TraceReply::default() })
        };
        let Finding::Ok(text) = end("deliver") else { panic!("it arrives") };
        assert_eq!(text, "client > web1: so it is");
        assert!(matches!(end("unasked"), Finding::Warning(..)));
        for act in ["discard", "refuse", "nobody", "loop", "hop-limit"] {
            assert!(matches!(end(act), Finding::Failed(..)), "{act}");
        }
    }

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
