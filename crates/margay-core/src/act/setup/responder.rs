//! The listening side.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};

use margay_wire::{
    AuthRepr, Chain, ErrorCode, ErrorRepr, Extension, Flags, FlowId, GrantRepr, KeyExchangeRepr, Kind, Message,
    MoveFlags, MoveRepr, NextProtocol, SessionId, StackRepr,
};

use super::{LISTENER_PATIENCE, ResponderSetup, SETUP_TIMEOUT, Shown, bare, next_protocol, prologue, starts_direct};
use crate::act::chain::{Refused, Ruling};
use crate::act::fetch::check_fetch;
use crate::act::secure::Verdict;
use crate::association::AssociationTable;
use crate::association::draft::{Arrival, Draft, Reply, relay_part, relayed_from};
use crate::association::location::Pair;
use crate::association::{Association, auth};
use crate::cache::entry::{Directions, EntryUpdate, RemoveReason};
use crate::cache::packet::{self, AppPacket, Parsed};
use crate::machine::sal::Sal;
use crate::resolve::forward::rewrite;
use crate::resolve::segment::COPIES;
use crate::session::event::Event;
use crate::session::flow::FlowTable;
use crate::session::flow::{Flow, LifeEvent, Marks, Setup};
use crate::table::Demux;
use crate::table::surrogate::{other_port, shown as shown_as};
use crate::trust::half_open::HalfOpen;
use crate::trust::handshake::{Introduction, Keys, Responder};
use crate::trust::handshake_rate::GREETING_COST;
use crate::types::config::Config;
use crate::types::drop_reason::DropReason;
use crate::types::key::{HostId, HostPublic};
use crate::types::name::ServiceId;
use crate::types::role::{Lifecycle, Role};
use crate::types::time::Instant;
use crate::types::tuple::GREETING;

/// Five-tuples that a host may still have old connections of, before a connect has failed.
const MOVES_MAX: u8 = 8;
/// One of so many flows is left to programs of this host that connect.
const OWN_FLOWS_SHARE: usize = 16;

/// What an ACK proved.
#[derive(Clone, Copy)]
struct Proof {
    association: u32,
    /// The handshake ended with it.
    fresh: bool,
    /// The initiator sends direct from the start.
    starts: bool,
    /// What its socket is called, as it says.
    claimed: Option<ServiceId>,
    /// The grant that it has asked for: nobody vouches for a SYN.
    asks: Option<GrantRepr>,
    /// What it says that its SYN has asked for.
    syn_seen: Option<[u8; 32]>,
    /// It may pass on the session that it has: its own, or such as has passed a box that it may speak for.
    is_neighbour: bool,
    /// The pair of addresses by which the initiator has had an answer.
    answered: Pair,
}

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

    /// The ACK: the peer is proved, or not.
    pub(crate) fn handle_ack(
        &mut self,
        now: Instant,
        from: SocketAddr,
        message: &Message<'_>,
    ) -> Result<(), DropReason> {
        if message.flags.contains(Flags::CONFIRM) {
            let association = auth::authenticate(&mut self.associations, message, now)?.association();
            return self.handle_confirm(now, message, association);
        }
        let id = message.dst_flow;
        if let Some((given, peer_grant)) = self.grants.given_by(id) {
            let association = auth::authenticate(&mut self.associations, message, now)?.association();
            if association != given {
                return Err(DropReason::Unexpected);
            }
            // The CONFIRM was lost.
            self.confirm((id, peer_grant), association, false);
            return Ok(());
        }
        let flow = self.flows.get(id).filter(|flow| flow.role == Role::Responder).ok_or(DropReason::UnknownFlow)?;
        let fresh = matches!(&flow.setup, Setup::Responder(setup) if setup.handshake.is_some());
        // A router may have passed it on. Which address that names decides nothing: see `relayed_from`.
        let straight = Some(from).filter(|_| relayed_from(message).is_none());
        let at = match &flow.setup {
            Setup::Responder(setup) => setup.reply.proved(straight),
            _ => straight,
        };
        let association = if fresh {
            self.finish_handshake(now, at.ok_or(DropReason::WrongPath)?, message)?
        } else {
            auth::authenticate(&mut self.associations, message, now)?.association()
        };
        let flow = self.flows.get_mut(id).ok_or(DropReason::UnknownFlow)?;
        if flow.lifecycle != Lifecycle::Connecting {
            if flow.association != association {
                return Err(DropReason::Unexpected);
            }
            let peer_flow = flow.peer_flow;
            if let Some(remote) = straight {
                self.find_peer(association, Pair { local: self.arrival, remote });
            }
            self.confirm((id, peer_flow), association, false);
            self.confirm_where_asked((id, peer_flow), association, message, from);
            return Ok(());
        }
        if !fresh && flow.association != association {
            return Err(DropReason::Unexpected);
        }
        if message.kind == Kind::Rst {
            if fresh {
                // The initiator proved itself only to say no, and keeps no association: nor do we.
                self.associations.remove(association);
            }
            self.drop_half_open(id);
            return Ok(());
        }
        let at = at.ok_or(DropReason::WrongPath)?;
        let answered = Pair { local: self.arrival.filter(|_| straight == Some(at)), remote: at };
        let claimed = message.source_service().map(ServiceId);
        let is_neighbour = self.is_neighbour(id, association, message);
        self.note_whereabouts(association, message);
        self.associations.note_abilities(association, message);
        let (starts, asks, syn_seen) = (starts_direct(message), message.grant(), message.syn_seen());
        let peer_flow = message.src_flow;
        let proof = Proof { association, fresh, starts, claimed, asks, syn_seen, is_neighbour, answered };
        self.admit(now, id, proof)?;
        if self.flows.get(id).is_some() {
            self.confirm_where_asked((id, peer_flow), association, message, from);
            let known = self.associations.get(association).map(|known| (known.host, known.remote));
            if let Some(((host, known), remote)) = known.zip(straight)
                && known != remote
            {
                // It has to prove by RSYN that it is there, before anything but this goes there.
                let number = self.rng.u32();
                let probe = MoveRepr { number, token: 0, address: remote, flags: MoveFlags::ELSEWHERE };
                self.send_probe(host, Pair { local: self.arrival, remote }, probe, Flags::empty());
            }
        }
        Ok(())
    }

    /// Reads the third handshake message and adopts the association that it makes; the one check then sees its tag.
    fn finish_handshake(&mut self, now: Instant, at: SocketAddr, message: &Message<'_>) -> Result<u32, DropReason> {
        let exchange = message.key_exchange().ok_or(DropReason::Untagged)?;
        let flow = self.flows.get_mut(message.dst_flow).ok_or(DropReason::UnknownFlow)?;
        let Setup::Responder(setup) = &mut flow.setup else { return Err(DropReason::Unexpected) };
        let handshake = setup.handshake.as_mut().ok_or(DropReason::Unexpected)?;
        let read = setup.shown_by.take().filter(|shown| shown.message_3 == exchange.message).map(|shown| shown.proved);
        let (peer, theirs, keys) = match read {
            Some(proved) => proved,
            None => handshake.finish(exchange.message).map_err(|_| DropReason::BadHandshake)?,
        };
        let (reserved, datagram_max, claimed) = (setup.association, setup.datagram_max, setup.claimed);
        if peer.id() != claimed || peer.id().0 != exchange.host_id {
            return Err(DropReason::BadHandshake);
        }
        let adopted = self.adopt_peer(now, &peer, &theirs, reserved, &keys, message, at, false);
        if let Err(reason) = adopted {
            self.put_newcomer_off(at, message, reserved, (peer, theirs, keys), reason);
            return Err(reason);
        }
        if let Some(association) = self.associations.get_mut(reserved) {
            association.datagram_max = datagram_max;
        }
        Ok(reserved)
    }

    /// A peer has proved its key, and another host uses that as well: it waits until it is known whether that one is
    /// there, or goes.
    fn put_newcomer_off(
        &mut self,
        from: SocketAddr,
        message: &Message<'_>,
        reserved: u32,
        proved: (HostPublic, Introduction, Keys),
        reason: DropReason,
    ) {
        let id = message.dst_flow;
        match reason {
            DropReason::KeptOut => {
                let (peer, theirs, keys) = proved;
                let mut once = Association::new(reserved, theirs.assoc_id, peer, keys, false, from);
                once.peer_epoch = theirs.epoch;
                self.say_kept_out(id, message, from, once);
            }
            DropReason::Inquired | DropReason::Full => {
                let message_3 = message.key_exchange().map(|exchange| exchange.message.to_vec()).unwrap_or_default();
                if let Some(Setup::Responder(setup)) = self.flows.get_mut(id).map(|flow| &mut flow.setup) {
                    setup.shown_by = Some(Box::new(Shown { message_3, proved }));
                }
            }
            _ => {}
        }
    }

    /// A proved peer: may it connect? Then the flow is established and what was held is let go.
    fn admit(&mut self, now: Instant, id: FlowId, proof: Proof) -> Result<(), DropReason> {
        let Proof { association, fresh, starts, claimed, asks, syn_seen, is_neighbour, answered: pair } = proof;
        let Some(flow) = self.flows.get(id) else { return Err(DropReason::UnknownFlow) };
        // A greeting is over at once, and nothing needs the association for its sake.
        let flow_is_connection = flow.app.protocol != GREETING;
        let is_chained = flow.chain.is_some();
        let Setup::Responder(setup) = &flow.setup else { return Err(DropReason::Unexpected) };
        let answered = setup.answered;
        let client = setup.reply.direct.ip();
        self.find_peer(association, pair);
        if let Some(association) = self.associations.get_mut(association) {
            association.rtt = answered.map(|at| now.since(at)).or(association.rtt);
        }
        if let Err(code) = self.rule_on_proved(id, association, syn_seen, is_neighbour) {
            if let Some(flow) = self.flows.get_mut(id) {
                flow.association = association;
            }
            self.say_fail(id, code);
            self.drop_half_open(id);
            return Err(reason_of(code));
        }
        self.locations.announce_path(&self.associations, &mut self.queue, association);
        if flow_is_connection {
            self.associations.hold_flow(association, Role::Responder);
        }
        self.half_open.remove(client);
        // Who passes a session on is not its client.
        let source = claimed.filter(|_| !is_chained).and_then(|claimed| self.believed(association, claimed));
        let Some(flow) = self.flows.get_mut(id) else { return Err(DropReason::UnknownFlow) };
        flow.source = source.map(Box::new);
        flow.association = association;
        flow.generation += 1;
        flow.active = now;
        flow.marks |= Marks::AUTHENTICATED;
        flow.lifecycle = flow.lifecycle.after(LifeEvent::Proved).unwrap_or(flow.lifecycle);
        let (protocol, peer_flow) = (flow.app.protocol, flow.peer_flow);
        let mut setup = core::mem::replace(&mut flow.setup, Setup::Done);
        self.flows.set_deadline(id, None);
        if protocol == GREETING {
            if self.give_offered(now, id, &setup, asks) {
                self.confirm((id, peer_flow), association, fresh);
                self.remove_flow(id, RemoveReason::Closed);
            }
            return Ok(());
        }
        self.flows.seal_as_set_up(&self.associations, &self.config, id, &setup);
        if self.way_set_up(now, id, &mut setup) {
            self.confirm((id, peer_flow), association, fresh);
            return Ok(());
        }
        let handover = if let Setup::Responder(setup) = &setup { setup.handover } else { None };
        if handover.is_none() {
            self.flows.begin_direct(&self.fetches, &mut self.associations, now, id, starts);
        }
        self.left_proved(now, id);
        if let Setup::Responder(setup) = setup {
            self.let_in(id, *setup);
        }
        if let Some(handover) = handover {
            self.confirm((id, peer_flow), association, fresh);
            self.await_connection(now, id, &handover);
            return Ok(());
        }
        self.flows.open_pinhole(&mut self.ports, &mut self.queue, now, id);
        self.confirm((id, peer_flow), association, fresh);
        self.begin_policy(now, id);
        self.begin_rules(now, id);
        self.events.push(Event::FlowOpened(id));
        Ok(())
    }

    /// Installs an established flow, and gives its program what was held.
    fn let_in(&mut self, id: FlowId, setup: ResponderSetup) {
        let Some(entry) = self.flows.get(id).map(Flow::entry) else { return };
        if let Some(address) = setup.shown {
            // Before the first datagram: a client that has two addresses is two clients.
            self.queue.update(EntryUpdate::Show { surrogate: entry.app.destination, address });
        }
        self.queue.update(EntryUpdate::Install(entry));
        if let Some(Ok(Parsed::Transport(answer))) = setup.app_answer.as_deref().map(packet::parse)
            && let Some((sequence, expected)) = answer.tcp_numbers()
        {
            self.queue.update(EntryUpdate::Begun { flow: id, next: sequence.wrapping_add(1), expected });
        }
        if let Some(first) = setup.first {
            self.queue.deliver(id, first);
        }
        for (from, datagram) in setup.held {
            self.queue.ingress(from, datagram);
        }
        let have_waited = !setup.held_direct.is_empty();
        for packet in setup.held_direct {
            self.deliver_direct(id, &packet);
        }
        if have_waited {
            // Now the cache may give it others: see `Direct::begun`.
            self.flows.install_again(&mut self.queue, id);
        }
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

    fn seal_as_set_up(&mut self, associations: &AssociationTable, config: &Config, id: FlowId, setup: &Setup) {
        if let Setup::Responder(setup) = setup
            && let Some(cipher) = setup.cipher
        {
            self.seal_flow(associations, config, id, cipher);
        }
    }
}

/// As what a refusal of a proved host is counted.
fn reason_of(code: ErrorCode) -> DropReason {
    if code == ErrorCode::SynChanged { DropReason::SynChanged } else { DropReason::NotAllowed }
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
