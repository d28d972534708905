//! Programs that serve names by listening.

use margay_control::api::v1::*;
use margay_core::name::Name;
use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Status};

use super::service::{
    DEFAULT_PRIORITY, DEFAULT_WEIGHT, check_fence, check_forwarding, parse_give_up, parse_middlebox, parse_name,
    parse_partitions, parse_port, parse_protocol, parse_quiet,
};
use super::{blocking, misuse};
use crate::agent::Agent;
use crate::agent::active::Order;
use crate::agent::active::rule::Offer;
use crate::allow;
use crate::listener::{MiddleboxKind, WEIGHT_MAX, box_name, divisible};

pub(super) fn attach(agent: &Agent, request: Request<ProgramAttachRequest>) -> Result<ProgramAttachReply, Status> {
    // The kernel says who calls; what the caller says could be anybody.
    let pid = request.extensions().get::<UdsConnectInfo>().and_then(|info| info.peer_cred.as_ref()?.pid());
    let pid = pid.and_then(|pid| u32::try_from(pid).ok()).ok_or_else(|| misuse("the calling process is not known"))?;
    let order = order(request.into_inner())?;
    check_forwarding(agent, order.offers.iter().any(|offer| offer.middlebox.is_some()))?;
    tracing::info!(pid, command = order.command, "a program serves names when it listens");
    blocking(|| {
        agent.publishing.active.attach(pid, order).map_err(misuse)?;
        Ok(ProgramAttachReply {})
    })
}

/// Whether a box can be served for as long as a program runs.
fn check_kind(kind: MiddleboxKind, name: &Name) -> Result<(), Status> {
    if kind.is_passed() {
        return Ok(());
    }
    Err(misuse(format!(
        "a proxy is served where it listens, and not for as long as it runs: start it, and say `margay middlebox serve \
         {name} --kind proxy --listen ADDRESS:PORT`"
    )))
}

fn order(request: ProgramAttachRequest) -> Result<Order, Status> {
    if request.offers.is_empty() {
        return Err(misuse("no name is given"));
    }
    let protocol = parse_protocol(&request.protocol)?;
    allow::parse(&request.allow).map_err(misuse)?;
    let weight = request.weight.unwrap_or(DEFAULT_WEIGHT);
    if weight > WEIGHT_MAX {
        return Err(misuse(format!("a weight is 0 to {WEIGHT_MAX}; 0 takes no new connections")));
    }
    let partition_bits = parse_partitions(request.partitions)?;
    check_fence(request.fence, request.exclusive)?;
    let give_up_after_ms = parse_give_up(request.give_up_after_ms)?;
    let quiet_ms = parse_quiet(request.quiet_ms)?;
    let middlebox = parse_middlebox(&request.middlebox)?;
    let offer = |offer: ProgramOffer| {
        let name = parse_name(&offer.name)?;
        divisible(&name, partition_bits).map_err(misuse)?;
        if let Some(kind) = middlebox {
            box_name(&name).map_err(misuse)?;
            check_kind(kind, &name)?;
        }
        Ok(Offer {
            name,
            port: offer.port.map(parse_port).transpose()?,
            listen_port: offer.listen_port.map(parse_port).transpose()?,
            protocol,
            allow: request.allow.clone(),
            weight,
            priority: request.priority.unwrap_or(DEFAULT_PRIORITY),
            partition_bits,
            exclusive: request.exclusive,
            fenced: request.fence,
            sticky: request.sticky,
            give_up_after_ms,
            quiet_ms,
            middlebox,
        })
    };
    Ok(Order {
        offers: request.offers.into_iter().map(offer).collect::<Result<_, Status>>()?,
        private: request.private,
        command: request.command,
        passed: request.passed,
        whole_cgroup: request.whole_cgroup,
    })
}
