//! `margay service`.

mod checks;

use std::net::SocketAddr;

use clap::{Args, Subcommand};
use margay_control::api::v1::*;
use margay_core::give_up::GiveUpAfter;
use miette::{Result, miette};

use self::checks::{CheckOptions, out_of_service, weight};
use super::drain::DrainTermsArgs;
use super::output::{count, moment};
use super::{Client, Json, Out, flow, refused};
use crate::fields::{Patience, socket_address};
use crate::listener::{Protocol, ServiceName, name_and_port, partition_count};

#[derive(Subcommand)]
pub enum ServiceVerb {
    /// Serve a name: connections to it reach a program that listens on this host
    Publish(Box<PublishArgs>),
    /// Take no more new connections for a name; running ones stay. What a program serves by listening gets weight 0
    Withdraw {
        /// The name
        name: ServiceName,
        /// Only this listener
        #[arg(long, value_name = "ADDRESS:PORT", value_parser = socket_address)]
        listen: Option<SocketAddr>,
        #[command(flatten)]
        json: Json,
    },
    /// Change the share of a service of this host, published or run, until it is changed again or its program ends
    Set {
        /// The name
        name: ServiceName,
        /// Share among instances of one priority; 0 takes no new connections, and running ones stay
        #[arg(long, value_name = "NUMBER")]
        weight: u32,
        #[command(flatten)]
        json: Json,
    },
    /// Wait until this host serves a name, as a router knows: then a standby may be promoted, say
    Wait {
        /// The name
        name: ServiceName,
        /// Wait until this host does not
        #[arg(long)]
        lost: bool,
        #[command(flatten)]
        json: Json,
    },
    /// Services of this host; on a router those of others, too
    List(Json),
    /// All about one service
    Show {
        /// The name
        name: ServiceName,
        #[command(flatten)]
        json: Json,
    },
    /// What would happen now to a connection to a name
    Resolve {
        /// The name
        name: ServiceName,
        #[command(flatten)]
        json: Json,
    },
}

#[derive(Args)]
pub struct PublishArgs {
    /// The name, and the port that clients use where it is not the listener's: web.shop or web.shop:80
    #[arg(value_name = "NAME[:PORT]", value_parser = name_and_port)]
    name: (ServiceName, Option<u16>),
    /// Where the program listens
    #[arg(long, value_name = "ADDRESS:PORT", value_parser = socket_address)]
    listen: SocketAddr,
    /// Only this protocol
    #[arg(long)]
    protocol: Option<Protocol>,
    /// Who may connect: authority (the name's, the default), any, host:<id>, group:<name>, authority:<name>; may be
    /// repeated
    #[arg(long, value_name = "WHO")]
    allow: Vec<String>,
    /// Share among instances of one priority; 0 takes no new connections
    #[arg(long, value_name = "NUMBER")]
    weight: Option<u32>,
    /// Instances of the highest priority take all connections, as long as there are any
    #[arg(long, value_name = "NUMBER")]
    priority: Option<u32>,
    /// Divide the service into so many partitions (a power of two, 2 to 1024); each is held by one of its hosts
    #[arg(long, value_name = "NUMBER", value_parser = partition_count)]
    partitions: Option<u32>,
    /// No other program and no other host may serve the name; a second host stands by
    #[arg(long)]
    exclusive: bool,
    /// With --exclusive: once another host holds the name, connections to the former one are reset at once, and that
    /// host serves it no more; a host that hears no router for a moment does not, either
    #[arg(long, requires = "exclusive")]
    fence: bool,
    /// Keep all datagrams of an unconnected UDP socket with one instance (QUIC, DTLS, games); otherwise each is for
    /// itself
    #[arg(long)]
    sticky: bool,
    /// Clients wait for so long for this host when it is silent and no router lists it, unless their own operator says
    /// otherwise: 500ms to 24h, or never; 30s unless given
    #[arg(long, value_name = "TIME")]
    give_up_after: Option<Patience>,
    #[command(flatten)]
    drained: DrainTermsArgs,
    #[command(flatten)]
    checks: CheckOptions,
    #[command(flatten)]
    json: Json,
}

pub async fn service(mut client: Client, verb: ServiceVerb, out: &mut Out) -> Result<()> {
    match verb {
        ServiceVerb::Publish(args) => publish(client, *args, out).await,
        ServiceVerb::Withdraw { name, listen, json } => {
            let listener = listen.map(|listen| listen.to_string()).unwrap_or_default();
            let request = ServiceWithdrawRequest { name: name.to_string(), listener };
            let reply = client.service_withdraw(request).await.map_err(refused)?.into_inner();
            let mut sentence = Vec::new();
            if reply.listeners > 0 {
                sentence.push(format!("{} withdrawn", count(u64::from(reply.listeners), "listener")));
            }
            if reply.drained {
                sentence.push(format!(
                    "weight 0, no new connections; `margay service set {name} --weight 100` lets them come again"
                ));
            }
            let sentence = format!("{name}: {}", sentence.join("; "));
            out.done(json.json, &reply, &sentence)
        }
        ServiceVerb::Set { name, weight, json } => {
            let request = ServiceSetRequest { name: name.to_string(), weight };
            let reply = client.service_set(request).await.map_err(refused)?.into_inner();
            let effect = if weight == 0 { ": no new connections" } else { "" };
            out.done(json.json, &reply, &format!("{name}: weight {weight}{effect}"))
        }
        ServiceVerb::Wait { name, lost, json } => {
            let request = ServiceWaitRequest { name: name.to_string(), lost };
            let reply = client.service_wait(request).await.map_err(refused)?.into_inner();
            let what = if reply.served { "serves" } else { "does not serve" };
            out.done(json.json, &reply, &format!("this host {what} {name} now"))
        }
        ServiceVerb::List(json) => list(client, json, out).await,
        ServiceVerb::Show { name, json } => show(client, &name, json, out).await,
        ServiceVerb::Resolve { name, json } => {
            let request = ServiceResolveRequest { name: name.to_string() };
            let reply = client.service_resolve(request).await.map_err(refused)?.into_inner();
            if json.json { out.json(&reply) } else { describe(&reply, out) }
        }
    }
}

async fn publish(mut client: Client, args: PublishArgs, out: &mut Out) -> Result<()> {
    let (name, port) = args.name;
    let request = ServicePublishRequest {
        name: name.to_string(),
        listener: args.listen.to_string(),
        service_port: Some(u32::from(port.unwrap_or(args.listen.port()))),
        protocol: args.protocol.map(Protocol::label).unwrap_or_default().to_owned(),
        allow: args.allow,
        weight: args.weight,
        priority: args.priority,
        partitions: args.partitions,
        exclusive: args.exclusive,
        fence: args.fence,
        sticky: args.sticky,
        give_up_after_ms: args.give_up_after.map(|patience| patience.0.ms()),
        quiet_ms: args.drained.quiet_ms()?,
        health: args.checks.health(),
        load: args.checks.load(),
        middlebox: String::new(),
    };
    let info = client.service_publish(request).await.map_err(refused)?.into_inner();
    if args.json.json {
        return out.json(&info);
    }
    out.line(&format!("{} is published: {}", info.name, state(&info)))
}

/// How it stands with a service of this host, in a few words.
pub(super) fn state(info: &ServiceInfo) -> String {
    if let Some(why) = out_of_service(info) {
        return format!("takes no new flows ({why}); {} there", count(info.flows, "flow"));
    }
    let why: Vec<&str> =
        info.registrations.iter().map(|known| known.why.as_str()).filter(|why| !why.is_empty()).collect();
    let text = match info.state.as_str() {
        "pending" => "the router is being told",
        "waiting" => "nothing listens there yet; it is served when something does",
        "local" => "known to this host alone, which has joined no router of the authority",
        other => other,
    };
    if why.is_empty() { text.to_owned() } else { format!("{text} ({})", why.join("; ")) }
}

/// Where a listener is; a box that sessions pass has no address.
fn place(listener: &ListenerInfo) -> String {
    match (listener.middlebox.as_str(), listener.address.as_str()) {
        ("", address) => address.to_owned(),
        (kind, "") => format!("box ({kind})"),
        (kind, address) => format!("box ({kind}) at {address}"),
    }
}

async fn list(mut client: Client, json: Json, out: &mut Out) -> Result<()> {
    let reply = client.service_list(ServiceListRequest {}).await.map_err(refused)?.into_inner();
    if json.json {
        return out.json(&reply);
    }
    let mut rows = Vec::new();
    for service in &reply.services {
        for listener in &service.listeners {
            rows.push(vec![
                service.name.clone(),
                listener.service_port.map_or("any".into(), |port| port.to_string()),
                "this host".into(),
                place(listener),
                weight(service),
                match (out_of_service(service), service.state.as_str()) {
                    (Some(why), _) => why,
                    (None, "refused") => state(service),
                    (None, other) => other.to_owned(),
                },
            ]);
        }
    }
    for found in &reply.registered {
        rows.push(vec![
            found.name.clone(),
            String::new(),
            found.host_name.clone(),
            found.address.clone(),
            format!("{}/{}", found.priority, found.weight),
            if found.zero_weight.is_empty() { "registered".into() } else { found.zero_weight.clone() },
        ]);
    }
    for waiting in &reply.waiting {
        let state = if waiting.why.is_empty() { "waiting for a socket".to_owned() } else { waiting.why.clone() };
        let here = "this host".to_owned();
        rows.push(vec![waiting.name.clone(), String::new(), here, waiting.program.clone(), String::new(), state]);
    }
    let nothing = "nothing is published here; `margay run --service NAME -- COMMAND` or `margay service publish` does";
    out.table(&["NAME", "PORT", "HOST", "ADDRESS", "PRIORITY/WEIGHT", "STATE"], rows, nothing)
}

async fn show(mut client: Client, name: &ServiceName, json: Json, out: &mut Out) -> Result<()> {
    let request = ServiceShowRequest { name: name.to_string() };
    let reply = client.service_show(request).await.map_err(refused)?.into_inner();
    if json.json {
        return out.json(&reply);
    }
    if let Some(service) = &reply.service {
        out.line(&format!("published by this host: {}", state(service)))?;
        if service.partitions > 0 {
            out.line(&format!("  with {} partitions; the router says who holds which", service.partitions))?;
        }
        if let Some(line) = alone(service) {
            out.line(line)?;
        }
        if service.sticky {
            out.line("  all datagrams of a socket to one instance")?;
        }
        if let Some(ms) = service.give_up_after_ms {
            let patience = Patience(GiveUpAfter::of_ms(ms));
            out.line(&format!("  clients give this host up when it is silent for {patience}"))?;
        }
        if let Some(ms) = service.quiet_ms {
            out.line(&format!("  a drain ends connections that have carried nothing for {ms} ms"))?;
        }
        for line in service.health.iter().flat_map(checks::lines) {
            out.line(&format!("  {line}"))?;
        }
        for listener in &service.listeners {
            out.line(&format!("  {}", listening(listener)))?;
        }
        for known in service.registrations.iter().filter(|known| known.certificate_expires_unix_s > 0) {
            out.line(&format!(
                "  router {}: certificate ends {}",
                known.router,
                moment(known.certificate_expires_unix_s)
            ))?;
        }
    }
    for waiting in &reply.waiting {
        let why = if waiting.why.is_empty() { String::new() } else { format!(": {}", waiting.why) };
        out.line(&format!("waits for a socket of {}{why}", waiting.program))?;
    }
    let resolution =
        reply.resolution.ok_or_else(|| miette!("the agent's answer has no resolution; update the agent"))?;
    describe(&resolution, out)?;
    if !reply.partitions.is_empty() {
        out.line("")?;
        let held = |of: &PartitionsInfo| {
            let host = if of.local { format!("{} (this host)", of.host_name) } else { of.host_name.clone() };
            vec![host, format!("{} of {}", of.count, of.total), of.held.clone()]
        };
        out.table(&["HOST", "HOLDS", "PARTITIONS"], reply.partitions.iter().map(held).collect(), "")?;
    }
    if !reply.flows.is_empty() {
        out.line("")?;
        flow::table(&reply.flows, out)?;
    }
    Ok(())
}

/// A listener or a box: what it takes, from whom, and until when.
fn listening(listener: &ListenerInfo) -> String {
    let who = listener.allow.join(", ");
    let until = match listener.origin.as_str() {
        "socket" if !listener.middlebox.is_empty() => "while its program runs",
        "socket" => "while a program listens",
        "configuration" => "by the configuration",
        _ => "until it is withdrawn",
    };
    let what = match listener.middlebox.as_str() {
        "" => {
            let port = listener.service_port.map_or("every port".into(), |port| format!("port {port}"));
            let protocol = if listener.protocol.is_empty() { "tcp and udp" } else { &listener.protocol };
            format!("{port} ({protocol}) at {}", listener.address)
        }
        "sniff" => "a box that looks at packets".to_owned(),
        "rewrite" => "a box that changes addresses".to_owned(),
        "proxy" => format!("a proxy at {}", listener.address),
        _ => "a box that forwards packets".to_owned(),
    };
    format!("{what}, for {who}, {until}")
}

/// How a name is served that one host alone may serve.
fn alone(service: &ServiceInfo) -> Option<&'static str> {
    match (service.exclusive, service.fence, service.held) {
        (false, ..) => None,
        (true, false, _) => Some("  by this host alone, while it serves it"),
        (true, true, true) => {
            Some("  by this host alone, which holds the name; fenced: another holder ends connections to it")
        }
        (true, true, false) => Some("  fenced, and not held by this host now: it serves nobody"),
    }
}

fn describe(reply: &ServiceResolveReply, out: &mut Out) -> Result<()> {
    let next = match reply.rule.as_str() {
        "demux" => format!("to the listener here at {}", reply.next_hop),
        "forward" => format!("to {}, which knows more", reply.next_hop),
        "ask" => "to all hosts of the network segment: this host knows no router".to_owned(),
        "delay" => format!("held until the resolver {} has said where they go", reply.next_hop),
        "box" => "to the box of that name here".to_owned(),
        "drop" => "discarded, by a rule".to_owned(),
        _ => "nowhere: this host knows no router".to_owned(),
    };
    out.facts(&[
        ("name", reply.name.clone()),
        ("service", reply.service_id.clone()),
        ("addresses", [reply.virtual_v4.as_str(), &reply.virtual_v6].join(" ").trim().to_owned()),
        ("first packet", next),
        ("asked", if reply.why.is_empty() { reply.answered_by.clone() } else { reply.why.clone() }),
        ("fallback", reply.fallback.join(" ")),
    ])?;
    let rows = reply.instances.iter().map(|found| {
        let host = if found.local { format!("{} (this host)", found.host_name) } else { found.host_name.clone() };
        let why = if found.zero_weight.is_empty() { String::new() } else { format!(" ({})", found.zero_weight) };
        vec![host, found.address.clone(), format!("{}/{}{why}", found.priority, found.weight), found.host_id.clone()]
    });
    out.table(
        &["INSTANCE", "ADDRESS", "PRIORITY/WEIGHT", "HOST-ID"],
        rows.collect(),
        "no instance: a connection is refused",
    )
}
