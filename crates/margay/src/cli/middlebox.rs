//! `margay middlebox`.

use std::net::SocketAddr;

use clap::{Args, Subcommand};
use margay_control::api::v1::*;
use miette::Result;

use super::service::state;
use super::{Client, Json, Out, refused};
use crate::listener::{MiddleboxKind, ServiceName};

#[derive(Subcommand)]
pub enum MiddleboxVerb {
    /// Serve a name as a box: sessions whose chain names it pass this host's kernel, or end at a proxy, until `margay
    /// service withdraw`
    Serve(Box<ServeArgs>),
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
    let MiddleboxVerb::Serve(args) = verb;
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
