//! What the connecting side says first, and where that goes.

use alloc::vec::Vec;
use core::net::SocketAddr;

use margay_wire::{
    Chain, Extension, Flags, FlowId, FlowPortRepr, KeyExchangeRepr, Kind, Message, NextProtocol, ResolvableRepr,
    SessionRepr,
};

use super::initiator::{TCP, UDP};
use super::{SYN_LEN, bare, digest_of_syn, next_protocol, retry_after};
use crate::association::draft::Draft;
use crate::cache::packet::Unreachable;
use crate::machine::sal::Sal;
use crate::resolve::instance::sticky;
use crate::resolve::named::SYNS_TO_NAMED_MAX;
use crate::resolve::way::Sender;
use crate::session::flow::{Flow, Marks, Setup};
use crate::table::{NextHop, Resolution, Rule};
use crate::types::hop::HOP_LIMIT;
use crate::types::role::Role;
use crate::types::time::Instant;
use crate::types::tuple::GREETING;

/// After so many SYNs without an answer another router is asked, where there is one.
const TURN_RETRIES: u32 = 2;
const TOO_LONG: &str = "the first packet does not fit a SYN; lower the MTU of sal0";
const CHAIN_TOO_LONG: &str = "the first packet does not fit a SYN with its chain of boxes and this host's \
                              certificates; name fewer boxes, or lower the MTU of sal0";

impl Sal {
    /// Nobody has answered yet. Where no rule leads any more to where the SYN went (a router was lost, say), it goes by
    /// those that there are now; and where several routers are known, another one may reach whom the first one does
    /// not.
    pub(crate) fn send_syn_again(&mut self, now: Instant, id: FlowId) {
        if self.leave_notice(now, id) {
            return;
        }
        let Some(flow) = self.flows.get(id) else { return };
        let Setup::Initiator(setup) = &flow.setup else { return };
        let service = flow.asked();
        let app = flow.app;
        let port = flow.service_port();
        let retries = setup.retries;
        let is_by_rule = matches!(app.protocol, 6 | 17)
            && setup.pin.is_none()
            && setup.related.is_none()
            && setup.fetch.is_none()
            && setup.next_hop != self.loopback();
        let is_it = |hop: &NextHop| hop.address == setup.next_hop;
        let led = self.rules_covering(service).find_map(|(_, _, rule)| rule.action.next_hop().filter(|hop| is_it(hop)));
        let turns = led.is_some_and(|hop| hop.router && retries >= TURN_RETRIES);
        // Each turn draws a new number.
        let number = sticky(id, setup.nonce.wrapping_add(if turns { retries.into() } else { 0 }));
        let is_other = |rule: &Rule| !rule.action.next_hop().is_some_and(is_it);
        let way = self.way_on(Sender::Own);
        let found = self.table.resolve(&service, number, |rule| {
            is_other(rule) && self.config.unusable(rule, app.protocol, port, way).is_none()
        });
        if let Resolution::Forward(rule, hop) = found
            && is_by_rule
            && (led.is_none() || turns && hop.router)
        {
            let to = hop.address;
            let beside = self.note_own(rule);
            if let Some(Setup::Initiator(setup)) = self.flows.get_mut(id).map(|flow| &mut flow.setup) {
                (setup.next_hop, setup.beside) = (to, beside);
            }
        }
        self.send_syn(now, id);
    }

    /// Sends the SYN of a connecting flow, and arms the next try.
    pub(crate) fn send_syn(&mut self, now: Instant, id: FlowId) {
        demand_as_rules_do(self, id);
        let Some((datagram, syn_digest, carried)) = self.write_syn(id) else {
            let is_chained = self.flows.get(id).is_some_and(|flow| flow.chain.is_some());
            self.fail_connecting(id, Unreachable::Host, if is_chained { CHAIN_TOO_LONG } else { TOO_LONG });
            return;
        };
        let instance_at = instance_asked(self, id);
        let Some(Setup::Initiator(setup)) = self.flows.get_mut(id).map(|flow| &mut flow.setup) else { return };
        // Also where it says meanwhile that it serves the name no longer.
        setup.instance_at = instance_at.or(setup.instance_at);
        if setup.named_host().is_some_and(|host| self.associations.by_host(host).is_none())
            && setup.retries >= SYNS_TO_NAMED_MAX
            && setup.cookie.is_none()
        {
            let give_up = setup.give_up;
            self.flows.set_deadline(id, Some(give_up));
            return;
        }
        let (to, beside, wait) = (setup.next_hop, setup.beside.clone(), retry_after(setup.retries));
        setup.retries += 1;
        (setup.syn_digest, setup.first_carried) = (syn_digest, carried);
        let next = (now + wait).min(setup.give_up);
        self.flows.set_deadline(id, Some(next));
        beside.into_iter().for_each(|to| self.transmit(to, datagram.clone(), Kind::Syn));
        self.transmit(to, datagram, Kind::Syn);
    }

    /// The SYN, a digest of what it asks for, and whether it carries the first packet.
    fn write_syn(&self, id: FlowId) -> Option<(Vec<u8>, [u8; 32], bool)> {
        let flow = self.flows.get(id)?;
        let Setup::Initiator(setup) = &flow.setup else { return None };
        let (_, message_1) = self.config.handshake_of(flow, setup.association, &setup.handshake);
        let host_id = self.config.host_id().0;
        // What is asked for is meant as a connection: rules decide by its protocol and port.
        let asked = setup.asks.map(|asks| (TCP, asks.destination.port()));
        let (protocol, service_port) = asked.unwrap_or((flow.app.protocol, flow.service_port()));
        let of_chain = flow.chain.as_ref().and_then(|chain| chain.setup.as_ref()).map(|setup| setup.client);
        let chain = self.chain_of_syn(flow);
        if flow.chain.is_some() != chain.is_some() {
            return None;
        }
        let session =
            SessionRepr { session: flow.session, client: of_chain.unwrap_or(setup.client), service_port, protocol };
        let mut extensions = alloc::vec![
            Extension::Session(session),
            self.secure.capabilities(&self.config),
            Extension::KeyExchange(KeyExchangeRepr { host_id, assoc_id: setup.association, message: &message_1 }),
        ];
        extensions.extend(setup.flow_port.map(|port| Extension::FlowPort(FlowPortRepr { port, starts: false })));
        let is_sealed = flow.has(Marks::SECURE);
        extensions.extend(if is_sealed { Some(self.secure.secure_request(flow)?) } else { None });
        extensions.extend(setup.asks.map(|asks| Extension::Grant(asks.wanted)));
        extensions.extend(setup.cookie.map(Extension::Cookie));
        extensions.extend(setup.fetch.map(|fetch| Extension::Handover(fetch.asked())));
        extensions.extend(setup.begin.map(Extension::Reconfiguration));
        extensions.extend(chain.as_deref().and_then(|value| Chain::parse(value).ok()).map(Extension::Chain));
        let mut draft = Draft::new(Kind::Syn, setup.related.map_or(FlowId(0), |related| related.flow), id);
        draft.flags = Flags::RESOLVABLE;
        draft.flags.set(Flags::FULL, setup.full);
        draft.flags.set(Flags::COPIED, !setup.beside.is_empty());
        draft.flags.set(Flags::NAMED, setup.named_host().is_some());
        draft.resolvable = Some(ResolvableRepr {
            hop_limit: HOP_LIMIT,
            reply_to: None,
            via: None,
            service: flow.asked().0,
            nonce: setup.nonce,
            hop_tag: [0; 8],
        });
        draft.extensions = &extensions;
        let datagram_max = usize::from(self.config.datagram_max);
        // The answer to a chain has the certificates of two hosts.
        draft.pad_to = if chain.is_some() { datagram_max } else { SYN_LEN.min(datagram_max) };
        let bare = if is_sealed { bare(&setup.first) } else { None };
        let first = bare.as_deref().unwrap_or(&setup.first);
        draft.payload = (next_protocol(first), first);
        // A large first datagram waits for the answer, and so does one that a rule demands encrypted by now; the SYN
        // goes without it.
        let fits = |datagram: &Vec<u8>| datagram.len() <= datagram_max;
        let is_demanded = || self.rules_demand(flow.service, flow.app.protocol, Role::Initiator, None, None);
        let may_show = flow.app.protocol == TCP || !is_sealed && !is_demanded();
        let whole = draft.write(None).filter(|datagram| may_show && fits(datagram));
        let carried = whole.is_some();
        if !carried && flow.app.protocol != UDP {
            return None;
        }
        draft.payload = (NextProtocol::None, &[]);
        let datagram = whole.or_else(|| draft.write(None).filter(fits))?;
        let digest = digest_of_syn(&Message::parse(&datagram).ok()?);
        Some((datagram, digest, carried))
    }
}

/// Where the SYN of a flow goes, if the table, or a notice, has a host itself there, and no router that finds one.
fn instance_asked(sal: &Sal, id: FlowId) -> Option<SocketAddr> {
    let flow = sal.flows.get(id)?;
    let Setup::Initiator(setup) = &flow.setup else { return None };
    let next_hop = setup.next_hop;
    let service = flow.asked();
    let of_rule = sal.rules_covering(service).any(|(_, id, rule)| {
        let hop = rule.action.next_hop().filter(|hop| hop.address == next_hop && !hop.router);
        hop.is_some_and(|hop| hop.host.is_some() || sal.resolved_by(id).is_some())
    });
    (of_rule || sal.notices.has_at(&service, next_hop)).then_some(next_hop)
}

/// A flow that is being set up begins encrypted where a rule of this host demands it. Its first SYN says so: the answer
/// may be to that one, whatever a later one says. A rule that comes into force between two has its say once the flow is
/// set up.
fn demand_as_rules_do(sal: &mut Sal, id: FlowId) {
    let is_first = |flow: &&Flow| matches!(&flow.setup, Setup::Initiator(setup) if setup.retries == 0);
    let Some(flow) = sal.flows.get(id).filter(|flow| flow.app.protocol != GREETING).filter(is_first) else { return };
    let is_demanded = sal.rules_demand(flow.service, flow.app.protocol, Role::Initiator, None, None);
    if let Some(flow) = sal.flows.get_mut(id).filter(|_| is_demanded) {
        flow.marks |= Marks::SECURE | Marks::RULED;
    }
}
