//! Searches: a host that reaches no router asks its network segments for one, by the means by which it asks for names
//! (DESIGN §8; Serval §4.4).
//!
//! On the wire a search is a greeting to a whole segment: a SYN of protocol 0 to the name that stands for the routers
//! of an authority ([`ServiceId::of_routers`]), passed on by relays as any other. A router that has a certificate for
//! that name answers; nobody else has a word that counts. Nothing comes of it at either end, no flow and no
//! association: answers are reported and nothing is said to them, and the search goes on to its end, so that whoever
//! answers first keeps nobody else from being heard.

use alloc::vec::Vec;
use core::net::SocketAddr;

use margay_wire::{Message, ResolvableRepr};

use crate::act::setup::Start;
use crate::association::auth;
use crate::association::draft::Arrival;
use crate::machine::sal::Sal;
use crate::resolve::segment::SEGMENT;
use crate::resolve::way::Sender;
use crate::session::event::Event;
use crate::session::flow::{Flow, Setup};
use crate::table::{Action, Allow, Demux, Resolution, Rule};
use crate::types::drop_reason::DropReason;
use crate::types::key::HostPublic;
use crate::types::name::ServiceId;
use crate::types::role::Role;
use crate::types::time::Instant;
use crate::types::tuple::{GREETING, tuple_of};

/// Searches that a router answers in a second; each costs it the work of a handshake.
pub(crate) const ANSWERED_PER_S: u32 = 100;

/// What makes a host answer searches for routers. It needs a certificate for the name, too.
pub fn answering(listener: SocketAddr) -> Rule {
    let allow = Allow::Any;
    let demux = Demux {
        listener,
        other_family: None,
        is_looked_up: false,
        service_port: None,
        protocol: Some(GREETING),
        allow,
    };
    Rule { priority: 0, weight: 1, action: Action::Demux(demux) }
}

impl Sal {
    /// Asks this host's segments for routers of an authority whose key it trusts. Each that answers within two seconds,
    /// and proves that it is one, is an [`Event::RouterFound`]. False where there are too many flows already.
    pub fn search_routers(&mut self, now: Instant, authority: [u8; 8]) -> bool {
        self.now = now;
        if self.flows.len() >= self.config.limits.flows {
            return false;
        }
        let id = self.grants.fresh_flow_id(&self.flows, &mut self.rng);
        let session = margay_wire::SessionId(self.rng.bytes());
        let service = ServiceId::of_routers(authority);
        let flow = Flow::new(id, session, service, Role::Initiator, tuple_of(id), now);
        let (nonce, first) = (self.rng.u64(), Vec::new());
        self.counters.searches += 1;
        let start = Start {
            nonce,
            next_hop: SEGMENT,
            beside: Vec::new(),
            first,
            full: false,
            related: None,
            pin: None,
            asks: None,
            fetch: None,
            begin: None,
        };
        self.start_setup(now, flow, start);
        true
    }

    /// A search came to this host's segment. Who is no such router keeps silent, or passes it on.
    pub(crate) fn handle_search(
        &mut self,
        now: Instant,
        from: SocketAddr,
        message: &Message<'_>,
        resolvable: &ResolvableRepr,
        datagram: &[u8],
    ) -> Result<(), DropReason> {
        let service = ServiceId(resolvable.service);
        // A service that takes all protocols is no router for that.
        let found = match self.pick(&service, 0, GREETING, 0, Sender::Host) {
            Resolution::Demux(rule, demux) if demux.protocol == Some(GREETING) => Some((rule, demux.clone())),
            _ => None,
        };
        let Some((rule, demux)) = found else { return self.pass_on(now, from, message, resolvable, datagram) };
        if !self.searches_answered.take(now) {
            return Err(DropReason::RateLimited);
        }
        self.table.note_use(now, rule);
        self.counters.searches_answered += 1;
        let reply = self.reply_path(from, resolvable, datagram);
        let (syn_len, nonce) = (datagram.len(), resolvable.nonce);
        self.respond(now, &Arrival { message, service, port: 0, reply, syn_len, nonce, app: None }, &demux)
    }

    /// Whether a connecting flow is a search.
    pub(crate) fn is_search(flow: &Flow) -> bool {
        let asks = matches!(&flow.setup, Setup::Initiator(setup) if setup.asks.is_some());
        flow.app.protocol == GREETING && flow.service != ServiceId::default() && !asks
    }

    /// A search is answered: who proves to be a router is reported, and nothing else comes of it. No association least
    /// of all: it would take the place of the one by which the two know each other, if they have met again since.
    pub(crate) fn hear_router(
        &mut self,
        now: Instant,
        at: SocketAddr,
        message: &Message<'_>,
    ) -> Result<(), DropReason> {
        let id = message.dst_flow;
        let key = match self.prove_router(now, message) {
            Err(DropReason::UnknownAssociation) => {
                self.ask_full_handshake(now, id);
                return Err(DropReason::UnknownAssociation);
            }
            other => other?,
        };
        if message.error().is_some() || key == self.config.host_key.public() {
            return Ok(());
        }
        let flow = self.flows.get(id).ok_or(DropReason::UnknownFlow)?;
        let Setup::Initiator(setup) = &flow.setup else { return Err(DropReason::Unexpected) };
        let (service, until, unix_s) = (flow.service, setup.give_up, self.unix_s());
        let right = self.trust.verify_service(message.certificate().unwrap_or_default(), &service, &key.0, unix_s);
        if !right.map_err(|_| DropReason::BadCertificate)?.is_proved() {
            return Ok(());
        }
        // Nobody is asked any more; others may still answer.
        self.flows.set_deadline(id, Some(until));
        self.counters.routers_found += 1;
        self.events.push(Event::RouterFound { authority: service.authority(), key, at });
        Ok(())
    }

    /// The key of the host that answers: by the association of the two, or by the handshake, which goes no further.
    fn prove_router(&mut self, now: Instant, message: &Message<'_>) -> Result<HostPublic, DropReason> {
        let Some(exchange) = message.key_exchange() else {
            let association = auth::authenticate(&mut self.associations, message, now)?.association();
            let known = self.associations.get(association).map(|association| association.host_key);
            return known.ok_or(DropReason::UnknownAssociation);
        };
        let (_, (peer, ..)) = self.prove_handshake(message, exchange.message)?;
        Ok(peer)
    }
}
