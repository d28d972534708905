//! What a host grants of its services.

use alloc::boxed::Box;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;

use margay_wire::{ErrorCode, FlowId, GRANT_FLOWS_MAX, GrantRepr};

use super::{GRANTS_MAX, Given, LIFETIME, PAIRS_MAX, TCP, grant_key};
use crate::act::grant::Grants;
use crate::act::path::policy::Policy;
use crate::act::secure::Verdict;
use crate::act::setup::{ResponderSetup, SETUP_TIMEOUT};
use crate::association::draft::Arrival;
use crate::cache::entry::{GRANT_RECORD_LEN, Grant, PathId, RemoveReason};
use crate::leg::flow_ports::FlowPorts;
use crate::machine::sal::Sal;
use crate::resolve::way::Sender;
use crate::session::flow::FlowTable;
use crate::session::flow::{Flow, Setup};
use crate::table::surrogate::{Place, responder_tuple};
use crate::table::{Action, Demux, Rule};
use crate::types::config::Config;
use crate::types::drop_reason::DropReason;
use crate::types::key::HostId;
use crate::types::name::ServiceId;
use crate::types::rng::Rng;
use crate::types::role::Role;
use crate::types::time::Instant;
use crate::types::tuple::{Tuple, tuple_of};

/// What an initiator opens at the last moment is on its way for so long.
const ON_THE_WAY: Duration = Duration::from_millis(500);
/// Grants that one host may have here at once, those included that are over and not forgotten.
const GRANTS_PER_HOST: usize = GRANTS_MAX / 4;
/// Ports of one client that may be kept for its grants, so that some are found for another one soon.
const PORTS_PER_HOST: u32 = 48 << 10;
const PORT_MIN: u16 = 1024;
/// Flow ports that are tried for one grant.
const WIRE_PORT_TRIES: usize = 16;
/// Ports of clients that are tried for the flows of one grant. Those that are kept lie in long rows, each of which is
/// passed once in a round.
const PORT_TRIES: usize = 1 << 14;

/// What is granted as soon as the initiator has proved itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer {
    wanted: GrantRepr,
    /// How often grants had been ended by then.
    ends: u64,
    /// By which rule: the listener, and the port that was asked for.
    demux: (Place, u16),
    /// What the initiator is told.
    pub given: GrantRepr,
    /// The listener's side of a flow, and the client without a port: which ones are free is only known when it is
    /// given.
    app: Tuple,
}

impl Sal {
    /// A host that connects often asks for a grant. Only hosts are granted one that have proved themselves before, and
    /// to whom direct packets pass; `known` is the association with such a host. Who has lost it gets none.
    pub(crate) fn respond_to_asking(
        &mut self,
        now: Instant,
        arrival: &Arrival<'_>,
        demux: &Demux,
        known: Option<u32>,
        wanted: GrantRepr,
    ) -> Result<(), DropReason> {
        let message = arrival.message;
        let exchange = message.key_exchange().ok_or(DropReason::Malformed)?;
        let session = message.session().ok_or(DropReason::Malformed)?;
        let known = known.ok_or(DropReason::UnknownAssociation)?;
        let is_allowed = self.is_allowed(known, &arrival.service, &demux.allow);
        let offer = if is_allowed { self.offer(now, arrival, demux, known, wanted) } else { None };
        let Some(offer) = offer else {
            let code = if is_allowed { ErrorCode::Refused } else { ErrorCode::NotAllowed };
            self.refuse_syn(arrival, known, code);
            return Err(DropReason::NotAllowed);
        };
        let id = self.grants.fresh_flow_id(&self.flows, &mut self.rng);
        let mut flow = Flow::new(id, session.session, arrival.service, Role::Responder, tuple_of(id), now);
        flow.peer_flow = message.src_flow;
        flow.association = known;
        flow.setup = Setup::Responder(Box::new(ResponderSetup {
            offer: Some(Box::new(offer)),
            ..ResponderSetup::new(arrival, &exchange, demux.allow.clone(), self.certificate_for(&arrival.service))
        }));
        self.flows.insert(flow);
        self.half_open.add(arrival.reply.direct.ip());
        self.flows.set_deadline(id, Some(now + SETUP_TIMEOUT));
        self.answer(id, &[], None);
        Ok(())
    }

    /// What may be granted, if anything.
    fn offer(
        &mut self,
        now: Instant,
        arrival: &Arrival<'_>,
        demux: &Demux,
        known: u32,
        wanted: GrantRepr,
    ) -> Option<Offer> {
        let association = self.associations.get(known)?;
        let (host, is_narrow) = (association.host, association.datagram_max != self.config.datagram_max);
        let client = arrival.reply.direct.ip();
        let is_elsewhere = association.remote.ip() != client;
        let is_plain = self.answer_stack(arrival.message, &arrival.service, arrival.reply.direct) == Verdict::Plain
            && !self.stack_rules.has_any_of(&arrival.service)
            && !self.chains.policy.concerns(&arrival.service)
            && self.policy_of(&arrival.service) == Policy::FailOver;
        let count = wanted.count.min(GRANT_FLOWS_MAX);
        let is_its = |given: &&Given| given.host == host;
        let (held, kept) = (self.grants.all.values().map(Box::as_ref).filter(is_its))
            .fold((0, 0), |(held, kept), given| (held + 1, kept + u32::from(given.grant.count)));
        if !self.ports.is_direct_on()
            || !self.associations.is_hinted(now, known)
            || is_narrow
            || is_elsewhere
            || !is_plain
            || !wanted.port.is_multiple_of(GRANT_FLOWS_MAX)
            || held >= GRANTS_PER_HOST
            || kept + u32::from(count) > PORTS_PER_HOST
            || self.ports.count(host) >= PAIRS_MAX
            || self.grants.len() >= GRANTS_MAX / 2
            || self.associations.check_flow_share(known).is_err()
            || self.flows.len() >= self.config.limits.flows / 2
        {
            return None;
        }
        let service_port = arrival.message.session()?.service_port;
        let place = demux.place_for(client);
        let app = self.config.listener_tuple(client, place)?;
        let port = self.ports.port_for_row(&mut self.rng, now, host, wanted.port, count)?;
        let first_flow = self.grants.fresh_block(&self.flows, &mut self.rng, count);
        let lifetime_ms = wanted.lifetime_ms.min(LIFETIME.as_millis() as u16);
        let given = GrantRepr { first_flow, port, count, lifetime_ms };
        Some(Offer { wanted, ends: self.grants.ends, demux: (place, service_port), given, app })
    }

    /// The initiator has proved itself, and that it `asks` for a grant. False if what it was offered is not to be had
    /// any more.
    pub(crate) fn give_offered(&mut self, now: Instant, id: FlowId, setup: &Setup, asks: Option<GrantRepr>) -> bool {
        let Setup::Responder(setup) = setup else { return true };
        let is_given = setup.offer.as_ref().is_none_or(|offer| asks == Some(offer.wanted) && self.give(now, id, offer));
        if !is_given {
            self.say_fail(id, ErrorCode::Refused);
            self.remove_flow(id, RemoveReason::Unproved);
        }
        is_given
    }

    /// Whether a rule still leads to the listener, and lets the peer come by it.
    fn is_served(&self, service: &ServiceId, association: u32, offer: &Offer) -> bool {
        let (place, port) = offer.demux;
        let way = self.way_on(Sender::Host);
        if self.chains.policy.concerns(service) {
            return false;
        }
        let serves = |rule: &Rule| {
            let Action::Demux(demux) = &rule.action else { return false };
            demux.place_for(offer.app.destination.ip()) == place
                && rule.weight > 0
                && self.config.unusable(rule, TCP, port, way).is_none()
                && self.is_allowed(association, service, &demux.allow)
        };
        self.table.lookup(service).is_some_and(|set| set.iter().any(|(_, rule)| serves(rule)))
    }

    fn give(&mut self, now: Instant, id: FlowId, offer: &Offer) -> bool {
        let Some(flow) = self.flows.get(id) else { return false };
        let (session, service, association, peer_grant) =
            (flow.session, flow.service, flow.association, flow.peer_flow);
        let Some(known) = self.associations.get(association) else { return false };
        let (host, key) = (known.host, grant_key(known, session, peer_grant, id));
        if !self.ports.is_direct_on() || offer.ends != self.grants.ends || !self.is_served(&service, association, offer)
        {
            return false;
        }
        let Some(path) = self.associations.wire_path(association) else { return false };
        // What agents have set up since it was offered has some of the ports by now.
        let Some(ports) = self.grants.listener_ports(&self.flows, &offer.app, offer.given.count) else { return false };
        let lifetime = Duration::from_millis(offer.given.lifetime_ms.into());
        let grant = Grant {
            id,
            role: Role::Responder,
            app: offer.app,
            path: PathId(path),
            local_port: offer.given.port,
            remote_port: offer.wanted.port,
            first_flow: offer.given.first_flow,
            count: offer.given.count,
            until: now + lifetime + ON_THE_WAY,
            ports,
            key,
            record: [0; GRANT_RECORD_LEN],
        };
        let peer_first = offer.wanted.first_flow;
        let given = Given {
            peer_first,
            peer_grant,
            port: offer.demux.1,
            ..Given::new(grant, session, service, (association, host), true)
        };
        let is_given = self.take_up_grant(now, given);
        self.counters.grants_given += u64::from(is_given);
        is_given
    }
}

impl FlowPorts {
    /// A port of this end's with which a row of the peer's is free.
    fn port_for_row(&mut self, rng: &mut Rng, now: Instant, host: HostId, row: u16, count: u16) -> Option<u16> {
        let range = self.range.clone().filter(|_| self.is_on)?;
        self.wake(now);
        (0..WIRE_PORT_TRIES).find_map(|_| {
            let port = rng.random_port(&range);
            self.are_free((host, port, row), count).then_some(port)
        })
    }
}

impl Config {
    /// A flow as the listener has it, with the client's own address. Its port stands for any.
    fn listener_tuple(&self, client: IpAddr, place: Place) -> Option<Tuple> {
        let asked = SocketAddr::new(client, PORT_MIN);
        let tuple = responder_tuple(TCP, asked, place, self.own(), 0, |_| false)?;
        (tuple.destination == asked).then_some(tuple)
    }
}

impl Grants {
    /// Ports in turn that no connection of such a flow has. One comes again when all others have been used, since a
    /// connection that the listener closed first lingers for a minute.
    fn listener_ports(
        &mut self,
        flows: &FlowTable,
        tuple: &Tuple,
        count: u16,
    ) -> Option<[u16; GRANT_FLOWS_MAX as usize]> {
        let mut ports = [0; GRANT_FLOWS_MAX as usize];
        let mut found = 0;
        for _ in 0..PORT_TRIES {
            let port = self.next_port.max(PORT_MIN);
            self.next_port = port.wrapping_add(1);
            let destination = SocketAddr::new(tuple.destination.ip(), port);
            if self.keeps(destination) || flows.by_tuple(&Tuple { destination, ..*tuple }).is_some() {
                continue;
            }
            *ports.get_mut(found)? = port;
            found += 1;
            if found == usize::from(count) {
                return Some(ports);
            }
        }
        None
    }
}
