//! Searches: a host that reaches no router asks its network segments for one, by the means by which it asks for names (DESIGN §8;
//! Serval §4.4).
//!
//! On the wire a search is a greeting to a whole segment: a SYN of protocol 0 to the name that stands for the routers of an authority
//! ([`ServiceId::of_routers`]), passed on by relays as any other. A router that has a certificate for that name answers; nobody else
//! has a word that counts. No flow comes of it: every answer is reported and reset at once, and the search goes on to its end, so that
//! whoever answers first keeps nobody else from being heard.

use alloc::vec::Vec;
use core::net::SocketAddr;

use margay_wire::{FlowId, Message, ResolvableRepr};

use crate::event::{Event, Role};
use crate::flow::{Flow, Setup};
use crate::greeting::{GREETING, tuple_of};
use crate::name::ServiceId;
use crate::output::DropReason;
use crate::sal::Sal;
use crate::segment::SEGMENT;
use crate::setup::{Arrival, Start};
use crate::table::{Action, Demux, Resolution, Rule};
use crate::time::Instant;
use crate::way::Sender;

/// Searches that a router answers in a second; each costs it the work of a handshake.
pub(crate) const ANSWERED_PER_S: u32 = 100;

/// What makes a host answer searches for routers. It needs a certificate for the name, too.
pub fn answering(listener: SocketAddr) -> Rule {
    let allow = crate::table::Allow::Any;
    let demux = Demux { listener, service_port: None, protocol: Some(GREETING), allow };
    Rule { priority: 0, weight: 1, action: Action::Demux(demux) }
}

/// Whether a rule is that.
pub fn is_answering(rule: &Rule) -> bool {
    matches!(&rule.action, Action::Demux(demux) if demux.protocol == Some(GREETING))
}

impl Sal {
    /// Asks this host's segments for routers of an authority whose key it trusts. Each that answers within two seconds, and proves that
    /// it is one, is an [`Event::RouterFound`]. False where there are too many flows already.
    pub fn search_routers(&mut self, now: Instant, authority: [u8; 8]) -> bool {
        self.now = now;
        if self.flows.len() >= self.config.limits.flows {
            return false;
        }
        let id = self.fresh_flow_id();
        let session = margay_wire::SessionId(self.rng.bytes());
        let service = ServiceId::of_routers(authority);
        let flow = Flow::new(id, session, service, Role::Initiator, tuple_of(id), now);
        let (nonce, first) = (self.rng.u64(), Vec::new());
        self.counters.searches += 1;
        let start =
            Start { nonce, next_hop: SEGMENT, beside: Vec::new(), first, full: false, related: None, pinned: false };
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
        self.respond(now, &Arrival { message, service, reply, syn_len, nonce, app: None }, &demux)
    }

    /// Whether a connecting flow is a search.
    pub(crate) fn is_search(flow: &Flow) -> bool {
        flow.app.protocol == GREETING && flow.service != ServiceId::default()
    }

    /// A host has answered a search and proved that it is such a router. It is asked no more; others may still answer.
    pub(crate) fn report_router(&mut self, flow: FlowId, association: u32, at: SocketAddr) {
        let Some(Setup::Initiator(setup)) = self.flows.get(flow).map(|flow| &flow.setup) else { return };
        let until = setup.give_up;
        self.flows.set_deadline(flow, Some(until));
        let service = self.flows.get(flow).map(|flow| flow.service).unwrap_or_default();
        let Some(key) = self.associations.get(association).map(|association| association.host_key) else { return };
        self.counters.routers_found += 1;
        self.events.push(Event::RouterFound { authority: service.authority(), key, at });
    }
}
