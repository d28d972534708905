//! `margay chain`.

use clap::Subcommand;
use margay_control::api::v1::*;
use margay_control::chains::written;
use miette::Result;

use super::output::moment;
use super::{Client, Json, Out, flow, refused};

#[derive(Subcommand)]
pub enum ChainVerb {
    /// Which sessions go through which boxes, and those that do
    Show(Json),
}

pub async fn chain(mut client: Client, verb: ChainVerb, out: &mut Out) -> Result<()> {
    let ChainVerb::Show(json) = verb;
    let reply = client.chain_show(ChainShowRequest {}).await.map_err(refused)?.into_inner();
    if json.json {
        return out.json(&reply);
    }
    if reply.policies.iter().all(|policy| policy.chains.is_empty() && policy.required.is_empty()) {
        out.line("no chains: `margay policy apply` on a router of the authority declares some")?;
    }
    for policy in &reply.policies {
        let key: String = policy.signer.chars().take(16).collect();
        out.line(&format!("{}, signed {} by key {key}", policy.authority, moment(policy.signed_unix_s)))?;
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
