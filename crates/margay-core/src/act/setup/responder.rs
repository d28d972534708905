//! The listening side.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};

use margay_wire::{
    AuthRepr, Chain, ErrorCode, ErrorRepr, Extension, Flags, FlowId, KeyExchangeRepr, Kind, Message, NextProtocol,
    SessionId, StackRepr,
};

use super::{LISTENER_PATIENCE, ResponderSetup, SETUP_TIMEOUT, bare, next_protocol, prologue};
use crate::act::chain::{Refused, Ruling};
use crate::act::fetch::check_fetch;
use crate::act::secure::Verdict;
use crate::association::AssociationTable;
use crate::association::auth;
use crate::association::draft::{Arrival, Draft, Reply, relay_part};
use crate::cache::entry::{Directions, RemoveReason};
use crate::cache::packet::{self, AppPacket, Parsed};
use crate::machine::sal::Sal;
use crate::resolve::forward::rewrite;
use crate::resolve::segment::COPIES;
use crate::session::flow::FlowTable;
use crate::session::flow::{Flow, Marks, Setup};
use crate::table::Demux;
use crate::table::surrogate::{other_port, shown as shown_as};
use crate::trust::half_open::HalfOpen;
use crate::trust::handshake::Responder;
use crate::trust::handshake_rate::GREETING_COST;
use crate::types::config::Config;
use crate::types::drop_reason::DropReason;
use crate::types::key::HostId;
use crate::types::name::ServiceId;
use crate::types::role::Role;
use crate::types::time::Instant;
use crate::types::tuple::GREETING;

/// Five-tuples that a host may still have old connections of, before a connect has failed.
const MOVES_MAX: u8 = 8;
/// One of so many flows is left to programs of this host that connect.
const OWN_FLOWS_SHARE: usize = 16;

impl Sal {
    /// A SYN for a service that listens here.
    pub(crate) fn respond(&mut self, now: Instant, arrival: &Arrival<'_>, demux: &Demux) -> Result<(), DropReason> {
        let message = arrival.message;
        let exchange = message.key_exchange().ok_or(DropReason::Malformed)?;
        let session = message.session().ok_or(DropReason::Malformed)?;
        check_fetch(message, demux, self.config.host_id())?;
        if let Some(id) = self.flow_to_answer(session.session, arrival) {
            if !self.flows.is_superseded(id, message) {
                return self.answer_again(id, arrival);
            }
            if self.supersede_left(id, arrival, &exchange) {
                return Ok(());
            }
            self.drop_half_open(id);
        }
        let claimed = HostId(exchange.host_id);
        let known = match message.chain() {
            _ if message.flags.contains(Flags::FULL) => None,
            None => self.known_host(claimed, &arrival.service, &demux.allow),
            // What decides is in the chain, and in the ACK.
            Some(_) => self.associations.by_host(claimed).map(|association| association.local_id),
        };
        let fresh_cost = if session.protocol == GREETING { GREETING_COST } else { 1 };
        let cost = if known.is_some() { 0 } else { fresh_cost };
        self.check_cookie(now, arrival, cost)?;
        self.flows.check_room(&self.half_open, &self.config, arrival.reply.direct.ip())?;
        let is_flow = session.protocol != GREETING;
        if let Some(known) = known.filter(|known| is_flow && self.associations.check_flow_share(*known).is_err()) {
            // Who has its share hears of it. Who has not met this host yet counts once it is proved: until then it has
            // a half-open flow, and no more of them than its share.
            self.refuse_syn(arrival, known, ErrorCode::Overloaded);
            return Err(DropReason::Full);
        }
        let ruling = self.read_chain(now, arrival, &demux.allow)?.and_then(|read| {
            let is_let_in = |known| self.is_allowed(known, &arrival.service, &demux.allow);
            let is_kept_out = read.chained.is_none() && known.is_some_and(|known| !is_let_in(known));
            read.ruled(is_kept_out.then_some(ErrorCode::NotAllowed))
        });
        let ruling = ruling.and_then(|read| {
            let begin = message.reconfiguration();
            let why = begin.and_then(|begin| self.why_no_way(arrival, &read, begin, claimed));
            read.ruled(why)
        });
        match (message.grant(), ruling) {
            (_, Err(refused)) if known.is_some() && refused.unnamed == 0 => {
                // The claim is not proved yet, so this refuses whoever makes it; an honest host loses nothing.
                known.into_iter().for_each(|known| self.refuse_syn(arrival, known, refused.code));
                Err(DropReason::NotAllowed)
            }
            // Only hosts that have met are granted something: others are not even answered.
            (Some(_), Err(_)) => Err(DropReason::NotAllowed),
            (Some(wanted), Ok(read)) => {
                // The rule was found by the protocol of the session, and a grant is of TCP.
                if session.protocol != 6 || arrival.app.is_some() || read.chained.is_some() {
                    return Err(DropReason::Malformed);
                }
                self.respond_to_asking(now, arrival, demux, known, wanted)
            }
            (None, ruling) => self.begin_half_open(now, arrival, demux, known, ruling),
        }
    }

    /// Makes the flow of a SYN, and asks its listener or its box.
    fn begin_half_open(
        &mut self,
        now: Instant,
        arrival: &Arrival<'_>,
        demux: &Demux,
        known: Option<u32>,
        ruling: Ruling,
    ) -> Result<(), DropReason> {
        let message = arrival.message;
        let (exchange, session) = message.key_exchange().zip(message.session()).ok_or(DropReason::Malformed)?;
        let destination = message.chain().map_or(arrival.service, |chain| ServiceId(chain.destination()));
        let inner = inner_packet(arrival, session.protocol)?;
        let is_other_way = message.reconfiguration().is_some();
        let (read, ruling, number) = Refused::apart(ruling);
        let verdict = self.answer_stack(message, &destination, arrival.reply.direct);
        let cipher = verdict.cipher();
        let direct = arrival.reply.direct.ip();
        let of_chain = read.chained.as_ref().and_then(|chained| chained.setup.as_ref()).map(|setup| setup.client);
        let client = of_chain.unwrap_or(SocketAddr::new(direct, session.client.port()));
        let is_at_box = read.is_at_box();
        let datagram_max = message.capabilities().map_or(1200, |c| c.mtu).clamp(600, self.config.datagram_max);
        let id = self.grants.fresh_flow_id(&self.flows, &mut self.rng);
        let app = self.tuple_of_new(id, arrival, client, demux, (&read, ruling.is_err()))?;
        let mut flow = Flow::new(id, session.session, destination, Role::Responder, app, now);
        if is_other_way {
            flow.marks |= Marks::LATER;
            flow.directions = if is_at_box { Directions::Both } else { Directions::Neither };
        }
        flow.port = arrival.port;
        flow.peer_flow = message.src_flow;
        flow.association = known.unwrap_or(0);
        flow.chain = read.chained;
        known.into_iter().for_each(|known| self.associations.touch(known, now));
        let mss_max = self.ports.mss_max(datagram_max, app.source.ip(), cipher.is_some());
        let is_tcp = session.protocol == 6;
        let first = inner.as_ref().and_then(|inner| packet::readdress(inner, &app.reversed(), mss_max));
        // Nothing that was shown in a SYN is believed of a sealed flow but that a connection begins; the rest comes
        // again.
        let first = if cipher.is_some() { first.as_deref().and_then(bare) } else { first };
        // A box is given a datagram before its sender is proved, as every listener is given a TCP SYN.
        let is_shown_now = is_tcp || is_at_box;
        flow.setup = Setup::Responder(Box::new(ResponderSetup {
            association: if known.is_some() { 0 } else { self.associations.fresh_id(&mut self.rng) },
            datagram_max,
            first: if is_shown_now { None } else { first.clone() },
            syn: if is_shown_now { first.clone() } else { None },
            shown: shown_as(client, session.client.ip(), &app, self.config.own())
                .filter(|_| !is_at_box && !is_other_way),
            cipher,
            ruling,
            ..ResponderSetup::new(arrival, &exchange, demux.allow.clone(), self.certificate_for(&arrival.service))
        }));
        self.flows.insert(flow);
        self.half_open.add(direct);
        self.answer_port(now, id, (HostId(exchange.host_id), direct), message.flow_port());
        self.note_demands(now, id, message, arrival.reply.direct, cipher.is_some());
        if let Some(code) = ruling.err().filter(|_| number != 0) {
            // No box sees it, and nobody after it; nor does a listener one that has passed a box which nobody may add.
            self.refuse_left(id, code, number);
            return Err(DropReason::NotAllowed);
        }
        if is_at_box && verdict != Verdict::Refused {
            return self.show_box(now, id, first);
        }
        self.flows.set_deadline(id, Some(now + SETUP_TIMEOUT));
        self.ask_listener(id, is_tcp && message.handover().is_none() && !is_other_way, first, verdict)
    }

    /// Gives a new flow's SYN to the listener, if it `asks` one. A datagram service says nothing of its own: it is
    /// answered for at once, and hears when the peer is proved. A connection from another host has no SYN.
    fn ask_listener(
        &mut self,
        id: FlowId,
        asks: bool,
        first: Option<Vec<u8>>,
        verdict: Verdict,
    ) -> Result<(), DropReason> {
        if verdict == Verdict::Refused {
            self.answer(id, &[], Some(ErrorCode::NoCommonStack));
            self.drop_half_open(id);
            return Err(DropReason::NotAllowed);
        }
        match (asks, first) {
            (true, Some(syn)) => self.queue.inject(syn),
            (true, None) => return Err(DropReason::Malformed),
            (false, _) => self.answer(id, &[], None),
        }
        Ok(())
    }

    /// The flow that a SYN is of, where this host has it already.
    fn flow_to_answer(&mut self, session: SessionId, arrival: &Arrival<'_>) -> Option<FlowId> {
        if arrival.message.reconfiguration().is_some() {
            let sender = arrival.message.src_flow;
            let is_it = |flow: &&Flow| flow.role == Role::Responder && flow.peer_flow == sender;
            return self.flows.of_session(session).find(is_it).map(|flow| flow.id);
        }
        let known = self.flow_of_session(session, &arrival.service, arrival.message.src_flow);
        known.filter(|id| !self.flows.may_be_left_behind(*id, arrival.message))
    }

    /// The same SYN again: the same answer, if there is one yet (DESIGN §7).
    fn answer_again(&mut self, id: FlowId, arrival: &Arrival<'_>) -> Result<(), DropReason> {
        let Some(flow) = self.flows.get(id) else { return Err(DropReason::UnknownFlow) };
        let Setup::Responder(setup) = &flow.setup else { return Ok(()) };
        // A shorter one is a copy that somebody has cut, to have more come back than it costs.
        if setup.initiator_flow != arrival.message.src_flow || arrival.syn_len < setup.syn_len {
            return Err(DropReason::Unexpected);
        }
        if self.came_to_all && self.now.since(flow.since) < COPIES {
            // The same question by the other family, or another relay.
            return Ok(());
        }
        // A listener whose queue was full has said nothing; it is asked again, as TCP itself would. Where the flow was
        // moved to another port, an old connection has answered.
        let is_silent = setup.answers.is_empty() && setup.moves == 0 && self.now.since(flow.since) >= LISTENER_PATIENCE;
        let is_at_box = flow.chain.as_ref().is_some_and(|chain| chain.is_left());
        if let Some(syn) = setup.syn.clone().filter(|_| self.flows.other_half(flow).is_none()) {
            self.queue.inject(syn);
            if is_silent && !is_at_box {
                self.flows.turn_answers(&self.associations, id, arrival.reply);
                self.answer(id, &[], Some(ErrorCode::ListenerSilent));
                return Ok(());
            }
        }
        self.flows.turn_answers(&self.associations, id, arrival.reply);
        self.send_answers_again(id);
        Ok(())
    }

    /// Sends the SYN-ACK once more, as it was but for the sequence number of its tag.
    fn send_answers_again(&mut self, id: FlowId) {
        let Some(flow) = self.flows.get(id) else { return };
        let Setup::Responder(setup) = &flow.setup else { return };
        let association = flow.association;
        let answers = setup.answers.clone();
        if let Some(Setup::Responder(setup)) = self.flows.get_mut(id).map(|flow| &mut flow.setup) {
            setup.answered = None;
        }
        for (to, mut datagram) in answers {
            // At first contact the tag's key came with the handshake and has no window.
            if let Some(association) = self.associations.get_mut(association) {
                if auth::sign_again(association, &mut datagram).is_err() {
                    continue;
                }
                if is_relay_datagram(&datagram) {
                    Self::tag_hop(&mut datagram, self.associations.hop_key_of(to));
                }
            }
            self.transmit(to, datagram, Kind::SynAck);
        }
    }

    /// Under load a SYN must bring a cookie before any state is kept or key work done (DESIGN §7). So it must where
    /// strangers at its source, which may be forged, have begun too many handshakes of late; `cost`: how many it
    /// counts for, 0 if the hosts have met.
    fn check_cookie(&mut self, now: Instant, arrival: &Arrival<'_>, cost: u32) -> Result<(), DropReason> {
        let from = arrival.reply.direct;
        let is_calm = self.half_open.len() < self.config.limits.half_open_cookie;
        if is_calm && (cost == 0 || self.handshakes.take(now, from.ip(), false, cost)) {
            return Ok(());
        }
        let (flow, nonce) = (arrival.message.src_flow, arrival.nonce);
        match arrival.message.cookie() {
            Some(cookie) if self.cookies.is_valid(now, &cookie, from, flow, nonce) => {
                let is_within = cost == 0 || self.handshakes.take(now, from.ip(), true, cost);
                return if is_within { Ok(()) } else { Err(DropReason::RateLimited) };
            }
            Some(_) => self.counters.drop(DropReason::BadCookie),
            None => {}
        }
        if !self.answers.take(now) {
            return Err(DropReason::RateLimited);
        }
        let cookie = self.cookies.issue(now, from, flow, nonce);
        let extensions =
            [Extension::Error(ErrorRepr { code: ErrorCode::CookieWanted, text: "" }), Extension::Cookie(cookie)];
        self.counters.cookies_sent += 1;
        let mut draft = Draft::new(Kind::Error, flow, FlowId(0));
        draft.extensions = &extensions;
        self.send_both_ways(arrival.reply, draft);
        Err(DropReason::CookieWanted)
    }

    /// Sends an untagged message straight and through the router.
    fn send_both_ways(&mut self, reply: Reply, mut draft: Draft<'_>) {
        let kind = draft.kind;
        if let Some(datagram) = draft.write(None).filter(|_| !reply.is_detour) {
            self.transmit(reply.direct, datagram, kind);
        }
        if let Some(via) = reply.via {
            draft.flags = Flags::RESOLVABLE | Flags::RELAY;
            draft.resolvable = Some(relay_part(reply.direct));
            if let Some(mut datagram) = draft.write(None) {
                Self::tag_hop(&mut datagram, self.associations.hop_key_of(via));
                self.transmit(via, datagram, kind);
            }
        }
    }

    /// Refuses a SYN under an association that the claimed sender shares with this host.
    pub(crate) fn refuse_syn(&mut self, arrival: &Arrival<'_>, association: u32, code: ErrorCode) {
        if arrival.reply.is_detour || arrival.reply.is_copy {
            // Others may answer; who asked hears in time that nobody has.
            return;
        }
        let extensions = [Extension::Error(ErrorRepr { code, text: "" })];
        let mut draft = Draft::new(Kind::SynAck, arrival.message.src_flow, FlowId(0));
        draft.extensions = &extensions;
        let epoch = self.config.epoch;
        let Some(association) = self.associations.get_mut(association) else { return };
        if let Some(datagram) = draft.seal(association, epoch) {
            self.transmit(arrival.reply.direct, datagram, Kind::SynAck);
        }
    }

    /// The listening program answered: its SYN-ACK goes inside ours, its RST refuses.
    pub(crate) fn handle_listener_packet(&mut self, id: FlowId, packet: &AppPacket<'_>) -> Result<(), DropReason> {
        let Some(flow) = self.flows.get(id) else { return Err(DropReason::Unexpected) };
        let Setup::Responder(setup) = &flow.setup else { return Err(DropReason::Unexpected) };
        if flow.chain.as_ref().is_some_and(|chain| chain.is_left()) {
            return self.box_packet(id, packet);
        }
        if packet.tcp_flags() & packet::tcp_flags::RST != 0 {
            self.answer(id, &[], Some(ErrorCode::Refused));
            self.drop_half_open(id);
            return Ok(());
        }
        if !packet.is_tcp_syn_ack() {
            return if self.move_half_open(id) { Ok(()) } else { Err(DropReason::Unexpected) };
        }
        if setup.syn.is_some() {
            if let Some(Setup::Responder(setup)) = self.flows.get_mut(id).map(|flow| &mut flow.setup) {
                setup.syn = None;
            }
            self.answer(id, packet.whole, None);
        }
        // Said again by the host's TCP, it is not sent again: nobody has asked, and whoever is named as the sender may
        // never have.
        Ok(())
    }

    /// The host's TCP acknowledges something else instead of answering the SYN: it still has a connection of this
    /// five-tuple, which lingers in TIME-WAIT most often. Clients of two services may have the same port, so their
    /// numbers do not rise from one to the next as RFC 9293 §3.6.1 wants. The flow takes another port.
    fn move_half_open(&mut self, id: FlowId) -> bool {
        let Some(flow) = self.flows.get(id) else { return false };
        let Setup::Responder(setup) = &flow.setup else { return false };
        let Some(syn) = setup.syn.as_ref().filter(|_| setup.moves < MOVES_MAX) else { return false };
        let (before, random) = (flow.app, self.rng.u32());
        let Some(app) = other_port(&before, random, |tuple| self.grants.is_taken(&self.flows, tuple)) else {
            return false;
        };
        let Ok(Parsed::Transport(inner)) = packet::parse(syn) else { return false };
        let Some(moved) = packet::readdress(&inner, &app.reversed(), u16::MAX) else { return false };
        self.flows.set_tuple(id, app);
        if let Some(Setup::Responder(setup)) = self.flows.get_mut(id).map(|flow| &mut flow.setup) {
            setup.moves += 1;
            setup.syn = Some(moved.clone());
        }
        self.queue.inject(moved);
        true
    }

    /// Sends the SYN-ACK, with the program's own answer or a refusal inside, straight and through the router.
    pub(crate) fn answer(&mut self, id: FlowId, app_answer: &[u8], error: Option<ErrorCode>) {
        let Some(flow) = self.flows.get(id) else { return };
        let session = flow.session;
        let known = flow.association;
        let asked = flow.asked();
        let demands = flow.is_demanded_here();
        let Setup::Responder(setup) = &flow.setup else { return };
        let (initiator_flow, wanted, reserved) = (setup.initiator_flow, setup.initiator_association, setup.association);
        let (reply, syn_len, cipher, chain) = (setup.reply, setup.syn_len, setup.cipher, setup.chain.clone());
        let granted = setup.offer.as_ref().map(|offer| Extension::Grant(offer.given));
        if error.is_some_and(|code| code != ErrorCode::ListenerSilent) && reply.is_copy {
            return;
        }
        let mut tag_key = [0; 32];
        let mut message_2 = Vec::new();
        if known == 0 {
            tag_key = self.rng.bytes();
            let mine = self.introduction(reserved, tag_key, Vec::new());
            let message_1 = match self.flows.get(id).map(|flow| &flow.setup) {
                Some(Setup::Responder(setup)) => setup.message_1.clone(),
                _ => return,
            };
            let prologue = prologue(session, &asked, initiator_flow, wanted);
            let answered = Responder::answer(&self.config.host_key, &mut self.rng, &prologue, &message_1, &mine);
            let Ok((handshake, answer)) = answered else {
                self.counters.drop(DropReason::BadHandshake);
                return;
            };
            message_2 = answer;
            if let Some(Setup::Responder(setup)) = self.flows.get_mut(id).map(|flow| &mut flow.setup) {
                setup.handshake = Some(handshake);
            }
        }
        let host_id = self.config.host_id().0;
        let exchange = KeyExchangeRepr { host_id, assoc_id: reserved, message: &message_2 };
        let mut extensions = alloc::vec![self.secure.capabilities(&self.config)];
        extensions.extend(self.flows.flow_port(id).into_iter().chain(granted));
        extensions.extend(cipher.map(|cipher| Extension::Stack(StackRepr { stack: cipher.stack(), demands })));
        extensions.extend(
            self.patience
                .own_terms(&asked)
                .into_iter()
                .chain(self.fences.own_fence(&asked))
                .filter(|_| error.is_none()),
        );
        extensions.extend((!message_2.is_empty()).then_some(Extension::KeyExchange(exchange)));
        let passed = self.chain_answer(id, &chain, error);
        extensions.extend((!chain.is_empty()).then_some(Extension::Certificate(&chain)));
        extensions.extend(passed.as_deref().and_then(|value| Chain::parse(value).ok()).map(Extension::Chain));
        extensions.extend(error.map(|code| Extension::Error(ErrorRepr { code, text: "" })));
        let mut draft = Draft::new(Kind::SynAck, initiator_flow, id);
        draft.extensions = &extensions;
        draft.payload =
            if app_answer.is_empty() { (NextProtocol::None, &[]) } else { (next_protocol(app_answer), app_answer) };
        let key = (known == 0).then_some((tag_key, wanted));
        let answers = self.write_answers(draft, known, key, reply, syn_len);
        for (to, datagram) in &answers {
            self.transmit(*to, datagram.clone(), Kind::SynAck);
        }
        if let Some(Setup::Responder(setup)) = self.flows.get_mut(id).map(|flow| &mut flow.setup) {
            setup.answers = answers;
            setup.answered = Some(self.now);
            setup.app_answer = (!app_answer.is_empty()).then(|| app_answer.to_vec());
        }
    }

    /// Both copies of a SYN-ACK, together no larger than the SYN: nobody can be made to flood a third (DESIGN §6).
    fn write_answers(
        &mut self,
        draft: Draft<'_>,
        known: u32,
        first_contact: Option<([u8; 32], u32)>,
        reply: Reply,
        syn_len: usize,
    ) -> Vec<(SocketAddr, Vec<u8>)> {
        let mut budget = syn_len;
        let mut answers = Vec::new();
        let straight = (!reply.is_detour).then_some((reply.direct, false));
        let routes = reply.via.map(|via| (via, true)).into_iter().chain(straight);
        for (to, relayed) in routes {
            let mut copy = Draft { ..Draft::new(draft.kind, draft.dst_flow, draft.src_flow) };
            copy.extensions = draft.extensions;
            copy.payload = draft.payload;
            if relayed {
                copy.flags = Flags::RESOLVABLE | Flags::RELAY;
                copy.resolvable = Some(relay_part(reply.direct));
            }
            let epoch = self.config.epoch;
            let sealed = match (first_contact, self.associations.get_mut(known)) {
                (Some((tag_key, assoc_id)), _) => {
                    copy.write(Some(first_tag(assoc_id, epoch))).and_then(|mut datagram| {
                        auth::sign_with_key(&tag_key, &mut datagram).ok()?;
                        Some(datagram)
                    })
                }
                (None, Some(association)) => copy.seal(association, epoch),
                (None, None) => None,
            };
            let Some(mut datagram) = sealed else { continue };
            if relayed {
                Self::tag_hop(&mut datagram, self.associations.hop_key_of(to));
            }
            if datagram.len() > budget {
                self.counters.answers_too_large += 1;
                continue;
            }
            budget -= datagram.len();
            answers.push((to, datagram));
        }
        answers
    }

    /// Forgets a half-open flow; a program that waits for the client's ACK gets a RST instead.
    pub(crate) fn drop_half_open(&mut self, id: FlowId) {
        let Some(flow) = self.take_flow(id) else { return };
        self.counters.removed(RemoveReason::Unproved);
        self.forget_right(&flow);
        let Setup::Responder(setup) = flow.setup else { return };
        self.half_open.remove(setup.reply.direct.ip());
        if let Some(answer) = setup.app_answer
            && let Ok(Parsed::Transport(answer)) = packet::parse(&answer)
            && let Some(reset) = packet::reset_for(&answer)
        {
            self.queue.inject(reset);
        }
    }
}

impl FlowTable {
    /// Whether a flow from there may be half-open, too.
    fn check_room(&self, half_open: &HalfOpen, config: &Config, client: IpAddr) -> Result<(), DropReason> {
        let limits = &config.limits;
        let is_full = half_open.len() >= limits.half_open
            || self.len() >= limits.flows - limits.flows / OWN_FLOWS_SHARE
            || half_open.has_share(client, limits.half_open, limits.half_open_cookie);
        if is_full { Err(DropReason::Full) } else { Ok(()) }
    }

    /// Whether the initiator could not read the tagged answer that a half-open flow gave, and now asks for a full
    /// handshake.
    fn is_superseded(&self, id: FlowId, message: &Message<'_>) -> bool {
        let is_half_open = |flow: &&Flow| matches!(&flow.setup, Setup::Responder(setup) if setup.association == 0);
        message.flags.contains(Flags::FULL)
            && self.get(id).filter(is_half_open).is_some_and(|flow| flow.peer_flow == message.src_flow)
    }

    /// The SYN comes by another router than before: from now on that one relays, since it may reach the initiator where
    /// the former one cannot be reached. Nobody else's address comes into it: the initiator's is where it was.
    fn turn_answers(&mut self, associations: &AssociationTable, id: FlowId, reply: Reply) {
        let Some(via) = reply.via.filter(|_| !reply.is_detour) else { return };
        let hop_key = associations.hop_key_of(via);
        let Some(Setup::Responder(setup)) = self.get_mut(id).map(|flow| &mut flow.setup) else { return };
        if setup.reply.via == Some(via) || setup.reply.direct.ip() != reply.direct.ip() {
            return;
        }
        setup.reply = reply;
        for (to, datagram) in setup.answers.iter_mut().filter(|(_, datagram)| is_relay_datagram(datagram)) {
            if let Some(copy) = rewrite(datagram, &relay_part(reply.direct), hop_key) {
                (*to, *datagram) = (via, copy);
            }
        }
    }
}

/// Whether a finished answer of ours goes through a router.
fn is_relay_datagram(datagram: &[u8]) -> bool {
    Message::parse(datagram).is_ok_and(|message| message.resolvable.is_some())
}

/// The tag, still zero, of an answer to a first contact. It is under a key of this handshake alone, and the receiver's
/// epoch is not known yet.
fn first_tag(assoc_id: u32, epoch: u32) -> AuthRepr {
    AuthRepr { assoc_id, epoch, receiver_epoch: 0, tag: [0; 16] }
}

/// The application's first packet inside a SYN; only TCP must have one, unless its connection comes from another host.
fn inner_packet<'a>(arrival: &Arrival<'a>, protocol: u8) -> Result<Option<AppPacket<'a>>, DropReason> {
    let message = arrival.message;
    if message.handover().is_some() {
        let is_sound = message.payload.is_empty() && protocol == 6 && arrival.app.is_none();
        return if is_sound { Ok(None) } else { Err(DropReason::Malformed) };
    }
    if message.payload.is_empty() && (protocol != 6 || message.reconfiguration().is_some()) {
        return Ok(None);
    }
    match packet::parse(message.payload)? {
        Parsed::Transport(inner) if inner.tuple.protocol == protocol && (protocol == 17 || inner.is_tcp_syn()) => {
            Ok(Some(inner))
        }
        _ => Err(DropReason::Malformed),
    }
}
