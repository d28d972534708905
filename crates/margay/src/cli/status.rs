//! `margay status`.

use std::time::Duration;

use clap::Args;
use margay_control::api::v1::{ClusterInfo, MetricsRequest, RouterInfo, StatusRequest};
use miette::Result;

use super::output::{count, lasting, span};
use super::{Client, Json, Out, refused};

#[derive(Args)]
pub struct StatusArgs {
    #[command(flatten)]
    json: Json,
    /// Print all counts as OpenMetrics text
    #[arg(long, conflicts_with = "json")]
    metrics: bool,
}

fn print_cluster(cluster: &ClusterInfo, out: &mut Out) -> Result<()> {
    let time = lasting(cluster.since_unix_s);
    let how = match (cluster.connected, cluster.why.as_str()) {
        (true, _) => format!("connected to {} {time}", cluster.endpoint),
        (false, "") => format!("not reached {time}"),
        (false, why) => format!("away {time}: {why}"),
    };
    out.line(&format!("etcd       {}: {how}", cluster.prefix))?;
    for router in &cluster.routers {
        let state = if router.state == "this" { "this router" } else { &router.state };
        out.line(&format!("cluster    {} at {}: {state}", router.name, router.address))?;
    }
    Ok(())
}

fn print_router(router: &RouterInfo, out: &mut Out) -> Result<()> {
    let why = if router.why.is_empty() { String::new() } else { format!(": {}", router.why) };
    let time = lasting(router.since_unix_s);
    let found = match router.found_at.as_str() {
        "" => String::new(),
        at => format!(", found on the network segment at {at}"),
    };
    out.line(&format!("router     {} of {}: {} {time}{found}{why}", router.address, router.authority, router.state))
}

pub async fn status(mut client: Client, args: StatusArgs, out: &mut Out) -> Result<()> {
    if args.metrics {
        let reply = client.metrics(MetricsRequest {}).await.map_err(refused)?.into_inner();
        return out.line(reply.text.trim_end());
    }
    let reply = client.status(StatusRequest {}).await.map_err(refused)?.into_inner();
    if args.json.json {
        return out.json(&reply);
    }
    let role =
        if reply.router { format!("router, {} registered", count(reply.hosts, "host")) } else { "host".to_owned() };
    out.facts(&[
        ("host", reply.host_id),
        ("role", role),
        (
            "agent",
            format!(
                "margay {}, up {}, epoch {}",
                reply.version,
                span(Duration::from_secs(reply.uptime_s)),
                reply.epoch
            ),
        ),
        ("interface", format!("{} ({}), SAL at {}", reply.interface, reply.addresses.join(", "), reply.sal_address)),
        (
            "datapath",
            [reply.datapath, reply.datapath_why]
                .into_iter()
                .filter(|part| !part.is_empty())
                .collect::<Vec<_>>()
                .join(": "),
        ),
        (
            "names",
            if reply.dns_address.is_empty() {
                "not answered".into()
            } else {
                format!("*.{} at {}", reply.zone, reply.dns_address)
            },
        ),
        (
            "flows",
            format!(
                "{} ({} direct, {} half-open), {} known",
                reply.flows,
                reply.flows_direct,
                reply.half_open,
                count(reply.associations, "peer")
            ),
        ),
        ("services", format!("{} published here", reply.services)),
    ])?;
    for router in &reply.routers {
        print_router(router, out)?;
    }
    if let Some(cluster) = reply.cluster {
        print_cluster(&cluster, out)?;
    }
    if !reply.drops.is_empty() {
        let drops: Vec<String> = reply.drops.iter().map(|drop| format!("{} {}", drop.packets, drop.reason)).collect();
        out.line(&format!("dropped    {}", drops.join(", ")))?;
    }
    for warning in reply.warnings {
        out.line(&format!("warning: {warning}"))?;
    }
    Ok(())
}
