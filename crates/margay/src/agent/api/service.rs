//! Services: published here, or found elsewhere.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use margay_control::api::v1::*;
use margay_control::lease::Asker;
use margay_control::registration::{Instance, Terms, partition};
use margay_core::chain::ChainPlace;
use margay_core::name::{Name, PARTITION_BITS_MAX, SERVICE_BITS, is_computable};
use margay_core::segment::SEGMENT;
use margay_core::table::Resolution;
use tonic::{Request, Status};

use super::{blocking, environment, flow, health, misuse, not_found};
use crate::agent::active::Waiting;
use crate::agent::listening::{Listener, Origin};
use crate::agent::service::{NO_FORWARDING, Publication, PublishError, Published, check_weight};
use crate::agent::{Agent, Host, Publishing, fencing, home, lookup};
use crate::fields;
use crate::listener::{MiddleboxKind, Protocol, partition_bits};

pub(super) const DEFAULT_WEIGHT: u32 = 100;
pub(super) const DEFAULT_PRIORITY: u32 = 100;

pub(super) fn parse_name(text: &str) -> Result<Name, Status> {
    text.parse().map_err(misuse)
}

fn refusal(error: PublishError) -> Status {
    match error {
        PublishError::Misuse(_) | PublishError::Name(_) | PublishError::Followed(_) => misuse(error),
        PublishError::Unknown(_) => not_found(error),
        PublishError::Table(_) | PublishError::State(_) => environment(error),
    }
}

fn parse_address(text: &str) -> Result<SocketAddr, Status> {
    text.parse()
        .map_err(|_| misuse(format!("`{text}` is no address with a port; write for example 0.0.0.0:8080 or [::]:8080")))
}

pub(super) fn parse_port(number: u32) -> Result<u16, Status> {
    let port = u16::try_from(number).ok().filter(|port| *port != 0);
    port.ok_or_else(|| misuse(format!("{number} is no port; it is 1 to 65535")))
}

pub(super) fn parse_protocol(text: &str) -> Result<Option<Protocol>, Status> {
    match text {
        "" => Ok(None),
        "tcp" => Ok(Some(Protocol::Tcp)),
        "udp" => Ok(Some(Protocol::Udp)),
        other => Err(misuse(format!("`{other}` is no protocol; it is tcp, udp, or both when left out"))),
    }
}

pub(super) fn parse_partitions(count: Option<u32>) -> Result<u8, Status> {
    count.map_or(Ok(0), |count| partition_bits(count).map_err(misuse))
}

pub(super) fn parse_give_up(ms: Option<u32>) -> Result<Option<u32>, Status> {
    ms.map(fields::give_up_after_ms).transpose().map_err(misuse)
}

pub(super) fn parse_quiet(ms: Option<u32>) -> Result<Option<u32>, Status> {
    ms.map(fields::quiet_ms).transpose().map_err(misuse)
}

/// Whether a name may be fenced.
pub(super) fn check_fence(is_fenced: bool, is_exclusive: bool) -> Result<(), Status> {
    if is_fenced && !is_exclusive {
        return Err(misuse("only a name that one host alone serves can be fenced: say --exclusive, too"));
    }
    Ok(())
}

/// How many partitions those bits number; zero: none.
fn count_of(partition_bits: u8) -> u32 {
    if partition_bits == 0 { 0 } else { 1 << partition_bits }
}

/// What a box is, if it is one.
pub(super) fn parse_middlebox(text: &str) -> Result<Option<MiddleboxKind>, Status> {
    if text.is_empty() {
        return Ok(None);
    }
    let kind = MiddleboxKind::of_label(text);
    kind.map(Some)
        .ok_or_else(|| misuse(format!("`{text}` is no kind of box; there are forward, sniff, rewrite and proxy")))
}

fn listener(request: &ServicePublishRequest) -> Result<Listener, Status> {
    let allow = request.allow.clone();
    if let Some(kind) = parse_middlebox(&request.middlebox)? {
        if !kind.is_passed() {
            if request.listener.is_empty() {
                return Err(misuse("a proxy takes connections: say where, as in --listen 0.0.0.0:8080"));
            }
            if request.service_port.is_some() || !request.protocol.is_empty() {
                return Err(misuse("a proxy takes TCP connections to every port: no port or protocol is given"));
            }
            return Ok(Listener::of_proxy(parse_address(&request.listener)?, allow));
        }
        let has_place = !request.listener.is_empty() || request.service_port.is_some() || !request.protocol.is_empty();
        let asks_listeners = request.health.as_ref().is_some_and(|health| health.command.is_empty());
        if has_place || asks_listeners {
            return Err(misuse(
                "a box that sessions pass listens nowhere: no address, port or protocol is given, and no check but a \
                 command",
            ));
        }
        return Ok(Listener::of_box(kind, allow, Origin::Order));
    }
    Ok(Listener {
        address: parse_address(&request.listener)?,
        service_port: request.service_port.map(parse_port).transpose()?,
        protocol: parse_protocol(&request.protocol)?,
        allow,
        middlebox: None,
        origin: Origin::Order,
        takes_both: false,
    })
}

/// Whether boxes of this host can be passed.
pub(super) fn check_forwarding(agent: &Agent, is_box: bool) -> Result<(), Status> {
    if is_box && !agent.publishing.services.forwards() { Err(environment(NO_FORWARDING)) } else { Ok(()) }
}

fn publication(request: Request<ServicePublishRequest>) -> Result<Publication, Status> {
    let may_command = health::may_command(&request);
    let request = request.into_inner();
    let protocol = parse_protocol(&request.protocol)?;
    check_fence(request.fence, request.exclusive)?;
    let listener = listener(&request)?;
    Ok(Publication {
        name: parse_name(&request.name)?,
        listener,
        terms: Terms {
            weight: request.weight.unwrap_or(DEFAULT_WEIGHT),
            priority: request.priority.unwrap_or(DEFAULT_PRIORITY),
            partition_bits: parse_partitions(request.partitions)?,
            exclusive: request.exclusive,
            fenced: request.fence,
            sticky: request.sticky,
            give_up_after_ms: parse_give_up(request.give_up_after_ms)?,
            quiet_ms: parse_quiet(request.quiet_ms)?,
        },
        checks: health::checks(request.health, request.load, protocol, may_command)?,
    })
}

pub(super) fn publish(agent: &Agent, request: Request<ServicePublishRequest>) -> Result<ServiceInfo, Status> {
    let publication = publication(request)?;
    let name = publication.name.clone();
    check_forwarding(agent, publication.listener.is_passed())?;
    lookup::deliverable(publication.listener.address, &agent.kernel.direct, agent.config().ranges()).map_err(misuse)?;
    blocking(|| {
        agent.publishing.active.check_order(&name, publication.terms.exclusive).map_err(misuse)?;
        agent.publishing.services.publish(publication).map_err(refusal)?;
        agent.publishing.active.follow_orders().map_err(environment)?;
        Ok::<(), Status>(())
    })?;
    tracing::info!(%name, "published");
    let published =
        agent.publishing.services.find(&name).ok_or_else(|| not_found(format!("{name} was withdrawn meanwhile")))?;
    Ok(info(agent, &published))
}

pub(super) async fn withdraw(agent: &Agent, request: ServiceWithdrawRequest) -> Result<ServiceWithdrawReply, Status> {
    let name = parse_name(&request.name)?;
    let listener = if request.listener.is_empty() { None } else { Some(parse_address(&request.listener)?) };
    let is_whole = listener.is_none();
    let withdrawn = agent.publishing.services.withdraw(&name, listener).await;
    let (count, why) = match withdrawn {
        Ok(count) => (count, None),
        Err(why @ (PublishError::Followed(_) | PublishError::Unknown(_))) if is_whole => (0, Some(why)),
        Err(error) => return Err(refusal(error)),
    };
    // What a program serves by listening is served as long as it listens.
    let drained = is_whole && set_weight(&agent.publishing, &name, 0).await?;
    if let Some(why) = why.filter(|_| !drained) {
        return Err(refusal(why));
    }
    blocking(|| agent.publishing.active.follow_orders()).map_err(environment)?;
    tracing::info!(%name, listeners = count, drained, "withdrawn");
    Ok(ServiceWithdrawReply { listeners: u32::try_from(count).unwrap_or(u32::MAX), drained })
}

/// Gives whether this host serves, or would serve, the name.
async fn set_weight(publishing: &Publishing, name: &Name, weight: u32) -> Result<bool, Status> {
    let is_offered = blocking(|| publishing.active.set_weight(name, weight));
    Ok(publishing.services.set_weight(name, weight).await.map_err(refusal)? || is_offered)
}

pub(super) async fn set(agent: &Agent, request: &ServiceSetRequest) -> Result<ServiceSetReply, Status> {
    let (name, weight) = (parse_name(&request.name)?, request.weight);
    check_weight(weight).map_err(refusal)?;
    if !set_weight(&agent.publishing, &name, weight).await? {
        return Err(refusal(PublishError::Unknown(name.to_string())));
    }
    tracing::info!(%name, weight, "share set by the operator");
    let service = agent.publishing.services.find(&name).map(|published| info(agent, &published));
    Ok(ServiceSetReply { name: name.written().to_owned(), weight, service })
}

pub(super) async fn wait(agent: &Agent, request: &ServiceWaitRequest) -> Result<ServiceWaitReply, Status> {
    let name = parse_name(&request.name)?;
    fencing::wait(agent, &name, !request.lost).await;
    Ok(ServiceWaitReply { name: name.written().to_owned(), served: !request.lost })
}

pub(super) fn list(agent: &Agent) -> ServiceListReply {
    let own = agent.host.identity.host_id();
    let registered = agent.routing.router.as_ref().map(|router| router.instances()).unwrap_or_default();
    ServiceListReply {
        services: agent.publishing.services.list().iter().map(|published| info(agent, published)).collect(),
        registered: registered
            .iter()
            .filter(|found| found.host != own)
            .map(|found| instance(&agent.host, found))
            .collect(),
        waiting: agent.publishing.active.waiting().into_iter().map(waiting_info).collect(),
    }
}

/// What each of this host's routers, and a router on this host, says of a name that is published here.
fn registrations(agent: &Agent, published: &Published) -> Vec<RegistrationInfo> {
    let prefix = published.prefix();
    let mut registrations: Vec<RegistrationInfo> = agent
        .publishing
        .services
        .homes_of(&published.name)
        .iter()
        .filter_map(|home| {
            let state = home.registration(&prefix)?;
            Some(RegistrationInfo {
                router: home.config().router_address.clone(),
                state: state.state.to_owned(),
                why: state.why,
                since_unix_s: state.since_unix_s,
                certificate_expires_unix_s: state.certificate_expires_unix_s,
            })
        })
        .collect();
    let block = prefix.id.authority();
    let is_of_own_router =
        agent.routing.router.is_some() && matches!(agent.host.keyring.authority_of(block), Ok(Some(_)));
    if published.is_served && is_of_own_router {
        registrations.push(RegistrationInfo {
            router: "local".to_owned(),
            state: "registered".to_owned(),
            ..RegistrationInfo::default()
        });
    }
    if !published.refused.is_empty() {
        registrations.push(RegistrationInfo {
            router: "local".to_owned(),
            state: "refused".to_owned(),
            why: published.refused.clone(),
            since_unix_s: 0,
            certificate_expires_unix_s: 0,
        });
    }
    registrations
}

fn info(agent: &Agent, published: &Published) -> ServiceInfo {
    let prefix = published.prefix();
    let registrations = registrations(agent, published);
    let state = ["refused", "pending", "registered"]
        .into_iter()
        .find(|state| registrations.iter().any(|registration| registration.state == *state));
    // A session that passes a box here has two.
    let is_right_half =
        |flow: &margay_core::FlowInfo| flow.chain.as_ref().is_some_and(|chain| chain.place == ChainPlace::Right);
    let of_name = |flow: &margay_core::FlowInfo| flow.is_of(&prefix) && !is_right_half(flow);
    let flows = agent.core.0.with_sal(|sal, _| sal.flows().filter(of_name).count());
    ServiceInfo {
        name: published.name.written().to_owned(),
        prefix: prefix.to_string(),
        listeners: published.listeners.iter().map(listener_info).collect(),
        weight: published.terms.weight,
        priority: published.terms.priority,
        state: match (published.is_served, published.refused.is_empty()) {
            (true, _) => state.unwrap_or("local"),
            (false, true) => "waiting",
            (false, false) => "refused",
        }
        .to_owned(),
        registrations,
        flows: flows as u64,
        partitions: count_of(published.terms.partition_bits),
        exclusive: published.terms.exclusive,
        fence: published.terms.fenced,
        held: published.is_held(),
        sticky: published.terms.sticky,
        drained: published.is_drained,
        give_up_after_ms: published.terms.give_up_after_ms,
        quiet_ms: published.terms.quiet_ms,
        effective_weight: published.weight(),
        health: health::info(agent, published),
    }
}

fn waiting_info(waiting: Waiting) -> WaitingInfo {
    WaitingInfo { name: waiting.name.written().to_owned(), program: waiting.program, why: waiting.why }
}

fn listener_info(listener: &Listener) -> ListenerInfo {
    let allow = if listener.allow.is_empty() { vec!["authority".to_owned()] } else { listener.allow.clone() };
    ListenerInfo {
        address: if listener.is_passed() { String::new() } else { listener.address.to_string() },
        service_port: listener.service_port.map(u32::from),
        protocol: listener.protocol.map(Protocol::label).unwrap_or_default().to_owned(),
        allow,
        origin: match listener.origin {
            Origin::Order => "order",
            Origin::Configuration => "configuration",
            Origin::Socket => "socket",
        }
        .to_owned(),
        middlebox: listener.middlebox.map(MiddleboxKind::label).unwrap_or_default().to_owned(),
    }
}

fn instance(host: &Host, found: &Instance) -> InstanceInfo {
    InstanceInfo {
        host_id: found.host.to_string(),
        host_name: found.host_name.clone(),
        address: found.address.to_string(),
        name: found.name.clone(),
        prefix: found.prefix.to_string(),
        weight: found.weight,
        priority: found.priority,
        local: found.host == host.identity.host_id(),
        zero_weight: found.zero_weight.as_ref().map(ToString::to_string).unwrap_or_default(),
    }
}

pub(super) async fn show(agent: &Agent, name: &str) -> Result<ServiceShowReply, Status> {
    let parsed = parse_name(name)?;
    let resolution = resolve(agent, name).await?;
    let published = agent.publishing.services.find(&parsed);
    let waiting: Vec<WaitingInfo> = agent
        .publishing
        .active
        .waiting()
        .into_iter()
        .filter(|waiting| waiting.name.prefix() == parsed.prefix())
        .map(waiting_info)
        .collect();
    if published.is_none() && waiting.is_empty() && resolution.instances.is_empty() && resolution.fallback.is_empty() {
        return Err(not_found(format!(
            "nobody serves {parsed} ({}); `margay service list` shows what is published here",
            {
                if resolution.why.is_empty() {
                    format!("asked {}", resolution.answered_by)
                } else {
                    resolution.why.clone()
                }
            }
        )));
    }
    Ok(ServiceShowReply {
        service: published.map(|published| info(agent, &published)),
        resolution: Some(resolution),
        // Of a service, with its keys and partitions.
        flows: flow::of_service(agent, &if parsed.is_service() { parsed.service_prefix() } else { parsed.prefix() }),
        waiting,
        partitions: partitions(agent, &parsed),
    })
}

/// Who holds which partitions of a service, as the router on this host says.
fn partitions(agent: &Agent, name: &Name) -> Vec<PartitionsInfo> {
    let Some(router) = agent.routing.router.as_ref().filter(|_| name.is_service()) else { return Vec::new() };
    let mut by_host: BTreeMap<_, (String, u8, Vec<u16>)> = BTreeMap::new();
    for found in router.instances_under(&name.service_prefix()) {
        let bits = found.prefix.bits.checked_sub(SERVICE_BITS).and_then(|bits| u8::try_from(bits).ok()).unwrap_or(0);
        // Keys and the service itself stand beside them; neither is a partition.
        if (1..=PARTITION_BITS_MAX).contains(&bits) && found.prefix.bits < 256 {
            let held = by_host.entry(found.host).or_insert_with(|| (found.host_name.clone(), bits, Vec::new()));
            held.2.push(found.prefix.id.partition(bits));
        }
    }
    let mut all: Vec<PartitionsInfo> = by_host
        .into_iter()
        .map(|(host, (host_name, bits, held))| PartitionsInfo {
            host_id: host.to_string(),
            host_name,
            count: u32::try_from(held.len()).unwrap_or(u32::MAX),
            held: partition::written(held),
            total: count_of(bits),
            local: host == agent.host.identity.host_id(),
        })
        .collect();
    all.sort_by(|one, other| (&one.host_name, &one.host_id).cmp(&(&other.host_name, &other.host_id)));
    all
}

pub(super) async fn resolve(agent: &Agent, name: &str) -> Result<ServiceResolveReply, Status> {
    let name = parse_name(name)?;
    let id = name.service_id();
    let virtual_v4 = blocking(|| agent.names.leases.lease(&name, Asker::Operator)).map_err(environment)?;
    let (rule, next_hop) = agent.core.0.with_sal(|sal, _| match sal.resolve(&id) {
        Resolution::Demux(_, demux) => ("demux", demux.listener.to_string()),
        Resolution::Box(..) => ("box", String::new()),
        Resolution::Forward(_, hop) if hop.address == SEGMENT => ("ask", "the segment".to_owned()),
        Resolution::Forward(_, hop) => ("forward", hop.address.to_string()),
        Resolution::Delay(_, resolver) => ("delay", agent.routing.rules.resolvers.name_of(resolver)),
        Resolution::Drop(_) => ("drop", String::new()),
        Resolution::None => ("none", String::new()),
    });
    let (found, answered_by, why) =
        match home::instances(&agent.publishing.services, agent.routing.router.as_deref(), &name).await {
            Ok((found, by)) => {
                agent.names.naming.learn(&found);
                (found, by, String::new())
            }
            Err(why) => (Vec::new(), String::new(), why),
        };
    Ok(ServiceResolveReply {
        name: name.written().to_owned(),
        service_id: id.to_string(),
        virtual_v4: virtual_v4.to_string(),
        virtual_v6: if is_computable(&id) {
            agent.config().ranges().virtual_v6(&id).to_string()
        } else {
            String::new()
        },
        rule: rule.to_owned(),
        next_hop,
        instances: found.iter().map(|found| instance(&agent.host, found)).collect(),
        answered_by,
        fallback: agent.names.fallbacks.plain(&name).iter().map(ToString::to_string).collect(),
        why,
    })
}
