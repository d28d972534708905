//! `margay middlebox`.

use std::net::SocketAddr;

use clap::{Args, Subcommand};
use margay_control::api::v1::*;
use margay_sdk::{Agent, FirstPacket, Protocol};
use miette::{IntoDiagnostic, Result, miette};

use super::service::state;
use super::{Client, Json, Out, refused};
use crate::agent::programs;
use crate::config::Config;
use crate::listener::{MiddleboxKind, ServiceName};

#[derive(Subcommand)]
pub enum MiddleboxVerb {
    /// Serve a name as a box: sessions whose chain names it pass this host's kernel, or end at a proxy, until `margay
    /// service withdraw`
    Serve(Box<ServeArgs>),
    /// Have a session that has come to a box of this host go through these boxes next: for the program of the box,
    /// before it lets the session's first packet out
    Next(NextArgs),
}

#[derive(Args)]
pub struct NextArgs {
    /// The boxes, in order, which `may_add` of the session's chain names
    #[arg(value_name = "NAME", required = true)]
    names: Vec<ServiceName>,
    /// Source of the first packet as it came by sal0: the client
    #[arg(long, value_name = "ADDRESS:PORT")]
    from: SocketAddr,
    /// Destination of the first packet as it came by sal0
    #[arg(long, value_name = "ADDRESS:PORT")]
    to: SocketAddr,
    /// The first packet is a datagram of UDP
    #[arg(long)]
    udp: bool,
    #[command(flatten)]
    json: Json,
}

/// Asks by the socket for programs: whoever is the box may ask, an operator or not.
pub async fn next(config: &Config, args: &NextArgs, out: &mut Out) -> Result<()> {
    let agent = Agent::connect_to(&programs::path(&config.host.runtime_dir)).await.into_diagnostic()?;
    let protocol = if args.udp { Protocol::Udp } else { Protocol::Tcp };
    let first = FirstPacket { protocol, from: args.from, to: args.to };
    let names: Vec<&str> = args.names.iter().map(|name| name.0.written()).collect();
    agent.pass_next(&first, &names).await.into_diagnostic()?;
    let goes = serde_json::json!({ "from": args.from, "to": args.to, "next": names });
    out.done(args.json.json, &goes, &format!("the session from {} goes through {} next", args.from, names.join(", ")))
}

#[derive(Args)]
pub struct ServeArgs {
    /// The box's name, as chains have it: fw.shop
    #[arg(value_name = "NAME")]
    name: ServiceName,
    /// What the box does
    #[arg(long)]
    kind: MiddleboxKind,
    /// Where a proxy takes connections; 0.0.0.0 and [::] mean every address
    #[arg(long, value_name = "ADDRESS:PORT", required_if_eq("kind", "proxy"))]
    listen: Option<SocketAddr>,
    /// The agent runs this program, which says by the exit status 0 that all is well; while it fails, new sessions go
    /// to other hosts that serve the box. Takes all that follows, up to a `;`; for root alone
    #[arg(long, value_name = "COMMAND", num_args = 1.., allow_hyphen_values = true, value_terminator = ";")]
    check: Vec<String>,
    /// Whose sessions it takes: authority (the name's, the default), any, host:<id>, group:<name>, authority:<name>;
    /// may be repeated
    #[arg(long, value_name = "WHO")]
    allow: Vec<String>,
    /// Share among instances of one priority; 0 takes no new sessions
    #[arg(long, value_name = "NUMBER")]
    weight: Option<u32>,
    /// Instances of the highest priority take all sessions, as long as there are any
    #[arg(long, value_name = "NUMBER")]
    priority: Option<u32>,
    #[command(flatten)]
    json: Json,
}

pub async fn middlebox(mut client: Client, verb: MiddleboxVerb, out: &mut Out) -> Result<()> {
    let MiddleboxVerb::Serve(args) = verb else {
        return Err(miette!("this verb does not ask the agent as an operator does"));
    };
    let ServeArgs { name, kind, listen, check, allow, weight, priority, json } = *args;
    let health = (!check.is_empty()).then(|| HealthCheck { command: check, ..HealthCheck::default() });
    let request = ServicePublishRequest {
        name: name.to_string(),
        middlebox: kind.label().to_owned(),
        listener: listen.map(|address| address.to_string()).unwrap_or_default(),
        allow,
        weight,
        priority,
        health,
        ..ServicePublishRequest::default()
    };
    let info = client.service_publish(request).await.map_err(refused)?.into_inner();
    out.done(json.json, &info, &format!("{} is a box of this host: {}", info.name, state(&info)))
}
