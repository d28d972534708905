//! SYNs for one host that an extension names: for the taker of a hand-over, or for the host at the other end of a
//! session that goes another way.
//!
//! A peer has named the host. This host's own table, associations and routers say where it is, never the peer: it could
//! have SYNs, which are large, sent to anybody. Routers know where the hosts are that are registered with them.

use core::net::SocketAddr;

use margay_wire::{Flags, Kind, Message, ReconfigurationRepr};

use crate::machine::sal::Sal;
use crate::resolve::segment::SEGMENT;
use crate::resolve::way::Sender;
use crate::session::flow::Flow;
use crate::table::{NextHop, Resolution, Rule};
use crate::types::drop_reason::DropReason;
use crate::types::key::HostId;
use crate::types::name::ServiceId;
use crate::types::time::Instant;

/// SYNs to a host that has not answered yet, and that this host shares no association with.
pub(crate) const SYNS_TO_NAMED_MAX: u32 = 2;

/// The host that a SYN is for.
pub(crate) fn named_host(message: &Message<'_>) -> Option<HostId> {
    if !message.flags.contains(Flags::NAMED) {
        return None;
    }
    let taker = message.handover().map(|repr| repr.taker);
    taker.or_else(|| message.reconfiguration().map(|begin| begin.host)).map(HostId)
}

/// Where a SYN to a named host goes: to where an association or a rule has it, or to a router that knows more. `None`:
/// nobody here knows the host. `app` is the protocol and the port of the service.
pub(crate) fn way_to_named_host(
    sal: &Sal,
    host: HostId,
    service: &ServiceId,
    (protocol, port): (u8, u16),
) -> Option<SocketAddr> {
    if host == sal.config.host_id() {
        return Some(sal.loopback());
    }
    if let Some(known) = sal.associations.by_host(host) {
        return Some(known.remote);
    }
    let is_there = |hop: &&NextHop| hop.host == Some(host) && sal.config.has_family_of(hop.address.ip());
    let listed = sal.rules_covering(*service).find_map(|(_, _, rule)| rule.action.next_hop().filter(is_there));
    if let Some(hop) = listed {
        return Some(hop.address);
    }
    if let Some(heard) = sal.heard(sal.now).find(|heard| heard.host == host && heard.prefix.contains(service)) {
        return Some(heard.address);
    }
    next_router(sal, host, service, (protocol, port), Sender::Own).map(|hop| hop.address)
}

/// Where a SYN goes that is to end at the right anchor.
pub(crate) fn way_to_anchor(sal: &Sal, begin: &ReconfigurationRepr, flow: &Flow) -> Option<SocketAddr> {
    let app = (flow.app.protocol, flow.service_port());
    way_to_named_host(sal, HostId(begin.host), &flow.asked(), app)
}

/// A next hop that may know where a host is.
fn next_router(
    sal: &Sal,
    host: HostId,
    service: &ServiceId,
    (protocol, port): (u8, u16),
    sender: Sender,
) -> Option<NextHop> {
    let way = sal.way_on(sender);
    let leads_there = |hop: &NextHop| hop.router || hop.address == SEGMENT || hop.host.is_none_or(|at| at == host);
    let usable = |rule: &Rule| {
        rule.action.next_hop().is_some_and(leads_there) && sal.config.unusable(rule, protocol, port, way).is_none()
    };
    match sal.table.resolve_last(service, 0, usable, |rule| sal.has_failed(service, rule)) {
        Resolution::Forward(_, hop) => Some(*hop),
        _ => None,
    }
}

/// A SYN for another host: to where it is registered, or to a router that may know it.
pub(crate) fn forward_named(
    sal: &mut Sal,
    now: Instant,
    (from, sender): (SocketAddr, Sender),
    message: &Message<'_>,
    datagram: &[u8],
    host: HostId,
) -> Result<(), DropReason> {
    let resolvable = message.resolvable.ok_or(DropReason::Malformed)?;
    let session = message.session().ok_or(DropReason::Malformed)?;
    if let Some(to) = sal.associations.registered(host).filter(|_| sal.config.router) {
        return sal.forward(from, &resolvable, datagram, Kind::Syn, to, Some(host));
    }
    if sal.came_to_all {
        return sal.pass_on(now, from, message, &resolvable, datagram);
    }
    let service = ServiceId(resolvable.service);
    match next_router(sal, host, &service, (session.protocol, session.service_port), sender) {
        Some(hop) => sal.forward(from, &resolvable, datagram, Kind::Syn, hop.address, hop.host),
        None => {
            sal.answer_nobody(now, from, message, &service, datagram);
            Err(DropReason::NoService)
        }
    }
}
