//! `margay chain`.

use clap::{Args, Subcommand};
use margay_control::api::v1::*;
use margay_control::chains::written;
use miette::{Result, miette};

use super::output::moment;
use super::{Client, Json, Out, flow, order, refused};
use crate::listener::ServiceName;

#[derive(Subcommand)]
pub enum ChainVerb {
    /// Which sessions go through which boxes, and those that do
    Show(Json),
    /// Put a box into running sessions: of programs here, served here, or beside a box of this host
    Insert {
        /// The box, of the kind forward or sniff: fw.shop
        #[arg(value_name = "BOX")]
        name: ServiceName,
        /// The box of the session that it comes before; without this, it is the last one
        #[arg(long, value_name = "BOX")]
        before: Option<ServiceName>,
        #[command(flatten)]
        of: OfSessions,
    },
    /// Take a box out of running sessions: of programs here, served here, or a box of this host
    Remove {
        /// The box
        #[arg(value_name = "BOX")]
        name: ServiceName,
        #[command(flatten)]
        of: OfSessions,
    },
    /// Put a box in another one's place in running sessions: of programs here, served here, or a box of this host
    Replace {
        /// The box that is taken out
        #[arg(value_name = "BOX")]
        name: ServiceName,
        /// The box that is put in, of the kind forward or sniff
        #[arg(long, value_name = "BOX")]
        by: ServiceName,
        #[command(flatten)]
        of: OfSessions,
    },
}

/// Which sessions are changed.
#[derive(Args)]
pub struct OfSessions {
    /// One flow, as `margay flow list` shows it
    #[arg(required_unless_present = "service")]
    flow: Option<String>,
    /// All sessions to this name: of programs here, of those served here, and of those that pass a box here; with
    /// --everywhere also *.shop: to all names of the authority
    #[arg(long = "name", value_name = "NAME", conflicts_with = "flow")]
    service: Option<order::Services>,
    #[command(flatten)]
    whose: order::Everywhere,
    #[command(flatten)]
    json: Json,
}

pub async fn chain(client: Client, verb: ChainVerb, out: &mut Out) -> Result<()> {
    match verb {
        ChainVerb::Show(json) => show(client, json, out).await,
        ChainVerb::Insert { name, before, of } => change(client, ("insert", &name, before.as_ref()), of, out).await,
        ChainVerb::Remove { name, of } => change(client, ("remove", &name, None), of, out).await,
        ChainVerb::Replace { name, by, of } => change(client, ("replace", &name, Some(&by)), of, out).await,
    }
}

/// Orders a change of sessions' boxes. Fails if a session stays as it was.
async fn change(
    mut client: Client,
    (act, name, other): (&str, &ServiceName, Option<&ServiceName>),
    of: OfSessions,
    out: &mut Out,
) -> Result<()> {
    let request = ChainChangeRequest {
        flow: of.flow.unwrap_or_default(),
        name: of.service.map(|service| service.to_string()).unwrap_or_default(),
        act: act.to_owned(),
        r#box: name.to_string(),
        other: other.map(ToString::to_string).unwrap_or_default(),
    };
    if of.whose.is_meant() {
        return order::order(client, &request, of.whose, of.json.json, out).await;
    }
    let reply = client.chain_change(request).await.map_err(refused)?.into_inner();
    let failed: Vec<&ChainChanged> = reply.changed.iter().filter(|one| one.outcome != "done").collect();
    let total = reply.changed.len();
    if of.json.json {
        out.json(&reply)?;
    } else {
        failed.iter().try_for_each(|one| out.line(&format!("{} {}: {}", one.flow, one.outcome, one.why)))?;
        let changed: Vec<&str> =
            reply.changed.iter().filter(|one| one.outcome == "done").map(|one| one.flow.as_str()).collect();
        match &changed[..] {
            [flow] => out.line(&format!("1 session is changed; its flow is {flow} now"))?,
            changed => out.line(&format!("{} sessions are changed", changed.len()))?,
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(miette!("{} of {total} sessions stay as they were", failed.len())) }
}

async fn show(mut client: Client, json: Json, out: &mut Out) -> Result<()> {
    let reply = client.chain_show(ChainShowRequest {}).await.map_err(refused)?.into_inner();
    if json.json {
        return out.json(&reply);
    }
    if reply.policies.iter().all(|policy| policy.chains.is_empty() && policy.required.is_empty()) {
        out.line("no chains: `margay policy apply` on a router of the authority declares some")?;
    }
    for policy in &reply.policies {
        let key: String = policy.signer.chars().take(16).collect();
        let until = match policy.until_unix_s {
            0 => String::new(),
            until_s => format!(", counts until {}", moment(until_s)),
        };
        out.line(&format!("{}, signed {} by key {key}{until}", policy.authority, moment(policy.signed_unix_s)))?;
        if !policy.refused.is_empty() {
            out.line(&format!("  this host does not go by it: {}", policy.refused))?;
        }
        for one in &policy.chains {
            out.line(&format!("  chain {}", written(one)))?;
        }
        for one in &policy.required {
            out.line(&format!("  require {}: {}", one.services, one.boxes.join(", ")))?;
        }
    }
    for one in &reply.required {
        out.line(&format!("required by this host's configuration: {}: {}", one.services, one.boxes.join(", ")))?;
    }
    out.line("")?;
    let rows = reply.flows.iter().map(|of| {
        let way = if of.role == "initiator" { "to" } else { "from" };
        let hops = of.chain.as_ref().map(flow::hops).unwrap_or_default();
        vec![of.flow.clone(), of.session.clone(), flow::label(of), format!("{way} {}", flow::peer(of)), hops]
    });
    out.table(&["FLOW", "SESSION", "SERVICE", "PEER", "HOPS"], rows.collect(), "no session goes through boxes here")
}
