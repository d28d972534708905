//! What would happen to a first packet, hop by hop.

use margay_control::api::v1::{TraceReply, TraceRequest};
use margay_control::entropy;
use margay_control::registration::Question;
use margay_core::table::SERVICE_PORT;
use tonic::Status;

use super::service::{parse_name, parse_port, parse_protocol};
use super::{chain, environment, misuse};
use crate::agent::{Agent, trace};
use crate::listener::Protocol;

pub(in crate::agent) async fn reply(agent: &Agent, request: &TraceRequest) -> Result<TraceReply, Status> {
    let name = parse_name(&request.name)?;
    if name.prefix().bits < 256 && !name.is_service() {
        return Err(misuse(format!("{name} is a block of many names; a packet goes to one: write a whole name")));
    }
    let port = request.port.map(parse_port).transpose()?.unwrap_or(SERVICE_PORT);
    let protocol = parse_protocol(&request.protocol)?.unwrap_or(Protocol::Tcp);
    let chain = chain::deciding(agent, &name.service_id(), protocol.number(), port);
    let question = Question {
        service: name.service_id(),
        protocol: protocol.number(),
        port,
        // As of a flow that begins now: another trace may be given to another instance.
        sticky: entropy::rng().map_err(environment)?.u64(),
        passed: vec![agent.host.identity.host_id()],
        limit: trace::LIMIT,
    };
    let mut hops = trace::trace(agent, question, true).await;
    trace::name_circle(&mut hops);
    for hop in &hops {
        // What is no host-ID is nobody that a list could name.
        if let Ok(host) = hop.host_id.parse() {
            agent.names.naming.learn_host(host, &hop.host_name);
        }
    }
    let reached = hops.last().is_some_and(|hop| hop.act == "deliver");
    Ok(TraceReply { name: name.written().to_owned(), hops, reached, chain })
}
