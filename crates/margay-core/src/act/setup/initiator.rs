//! The connecting side.

use alloc::boxed::Box;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};

use margay_wire::{ErrorCode, Extension, Flags, FlowId, KeyExchangeRepr, Kind, Message, ReconfigurationRepr};

use super::{
    HandshakeSeed, InitiatorSetup, LATE_WINDOW, LateAnswers, NO_COMMON_STACK, SETUP_TIMEOUT, prologue, retry_after,
    starts_direct,
};
use crate::act::fetch::Fetch;
use crate::act::grant::Asks;
use crate::act::path::related::Related;
use crate::act::secure::Verdict;
use crate::act::stack_rule::engine::{act_as_rules_do, guard_as_rules_do};
use crate::act::stack_rule::guard;
use crate::association::draft::{Draft, relayed_from};
use crate::association::location::Pair;
use crate::association::{Association, auth};
use crate::cache::entry::{Directions, EntryUpdate, RemoveReason};
use crate::cache::output::AppVerdict;
use crate::cache::packet::{self, AppPacket, Parsed, Unreachable};
use crate::leg::carriage::{DirectEvent, Why};
use crate::leg::seal::Cipher;
use crate::machine::sal::Sal;
use crate::resolve::instance::{Pin, sticky};
use crate::resolve::segment::{SEGMENT, SEGMENT_TIMEOUT};
use crate::resolve::way::Sender;
use crate::session::event::Event;
use crate::session::flow::{Flow, LifeEvent, Marks, Setup};
use crate::table::Resolution;
use crate::trust::handshake::{Finished, Initiator};
use crate::types::config::Config;
use crate::types::drop_reason::DropReason;
use crate::types::name::ServiceId;
use crate::types::rng::Rng;
use crate::types::role::{Lifecycle, Role};
use crate::types::time::Instant;
use crate::types::tuple::{GREETING, Tuple};

pub(super) const TCP: u8 = 6;
pub(super) const UDP: u8 = 17;
/// What people are told.
const SIGNED_TCP: &str = "the connection is signed (TCP-MD5 or TCP-AO), addresses included, and Margay gives it others";
const CHAINS_LAPSED: &str = "the chains that decide about this name count no longer: their signature has run out, or \
                             its key was taken back; `margay chain show` says which, and `margay policy apply` on a \
                             router of the authority signs them again";
const FLOWS_FULL: &str = "this host has as many flows as it may; `margay flow list` shows them";

/// What a SYN-ACK proved: the association that it came under, and where it came from.
struct Answer {
    association: u32,
    /// Third handshake message, when the hosts had not met.
    message_3: Option<Vec<u8>>,
}

/// Where a new flow begins.
pub(crate) struct Start {
    pub nonce: u64,
    pub next_hop: SocketAddr,
    /// Who gets a copy.
    pub beside: Vec<SocketAddr>,
    /// The application's own first packet.
    pub first: Vec<u8>,
    /// Whether no older association shall be counted on.
    pub full: bool,
    /// The peer's flow that it is related to, if it is to any.
    pub related: Option<Related>,
    /// The next hop is one instance's, and that firmly.
    pub pin: Option<Pin>,
    /// What it asks for in the place of a connection.
    pub asks: Option<Asks>,
    /// What it is set up for in the place of a connection.
    pub fetch: Option<Fetch>,
    /// The session that it is to be another way of.
    pub begin: Option<ReconfigurationRepr>,
}

impl Start {
    /// Of a session by the service table.
    pub const fn of(nonce: u64, next_hop: SocketAddr, beside: Vec<SocketAddr>, first: Vec<u8>) -> Self {
        Self {
            nonce,
            next_hop,
            beside,
            first,
            full: false,
            related: None,
            pin: None,
            asks: None,
            fetch: None,
            begin: None,
        }
    }
}

impl Sal {
    /// Takes an application's first packet to a name.
    pub(crate) fn initiate(&mut self, now: Instant, packet: &AppPacket<'_>) -> AppVerdict {
        if packet.is_signed_tcp() {
            self.queue.refuse(packet, Unreachable::Prohibited);
            let service = self.service_of(packet.tuple.destination.ip()).unwrap_or_default();
            self.connect_failed(service, packet, SIGNED_TCP.to_string());
            return AppVerdict::Drop(DropReason::SignedTcp);
        }
        let Some(service) = self.service_of(packet.tuple.destination.ip()) else {
            if let Some(verdict) = self.initiate_related(now, packet) {
                return verdict;
            }
            self.queue.refuse(packet, Unreachable::Host);
            return AppVerdict::Drop(DropReason::NoName);
        };
        self.note_use_of_lease(packet.tuple.destination.ip());
        if self.flows.len() >= self.config.limits.flows {
            self.queue.refuse(packet, Unreachable::Host);
            self.connect_failed(service, packet, FLOWS_FULL.to_string());
            return AppVerdict::Drop(DropReason::Full);
        }
        if self.chains.policy.has_lapsed(&service) {
            self.queue.refuse(packet, Unreachable::Prohibited);
            self.connect_failed(service, packet, CHAINS_LAPSED.to_string());
            return AppVerdict::Drop(DropReason::NotAllowed);
        }
        let nonce = self.rng.u64();
        let id = self.grants.fresh_flow_id(&self.flows, &mut self.rng);
        let session = margay_wire::SessionId(self.rng.bytes());
        let chain = self.begin_chain(session, &service, packet);
        let asked = chain.as_ref().map_or(service, |chain| chain.asked);
        let instance = self.instances.get(&packet.tuple.destination.ip()).filter(|_| chain.is_none());
        let pin = instance.map(|instance| instance.pin);
        let first_hop = match instance.map(|instance| instance.next_hop.address) {
            Some(instance) => Ok((instance, Vec::new())),
            None => self.first_hop(now, &asked, sticky(id, nonce), packet),
        };
        let (next_hop, beside) = match first_hop {
            Ok(hops) => hops,
            Err(verdict) => return verdict,
        };
        let mut flow = Flow::new(id, session, service, Role::Initiator, packet.tuple, now);
        flow.chain = chain;
        let may_grant = packet.is_tcp() && flow.chain.is_none();
        self.start_setup(now, flow, Start { pin, ..Start::of(nonce, next_hop, beside, packet.whole.to_vec()) });
        if may_grant {
            self.note_connects(now, packet.tuple.destination, 1);
        }
        AppVerdict::Consumed
    }

    /// Where the first packet to a name goes, and who gets a copy. Where it goes nowhere, or not yet, that is seen to.
    fn first_hop(
        &mut self,
        now: Instant,
        service: &ServiceId,
        sticky: u64,
        packet: &AppPacket<'_>,
    ) -> Result<(SocketAddr, Vec<SocketAddr>), AppVerdict> {
        match self.pick(service, sticky, packet.tuple.protocol, packet.tuple.destination.port(), Sender::Own) {
            Resolution::Forward(rule, hop) => {
                let address = hop.address;
                let beside = self.note_own(rule);
                let heard = if address == SEGMENT { self.hop_by_notice(now, service, sticky) } else { None };
                Ok((heard.unwrap_or(address), beside))
            }
            // The same host serves it: over the loopback address, never a NIC (DESIGN §18).
            Resolution::Demux(rule, _) | Resolution::Box(rule, _) => {
                self.table.note_use(self.now, rule);
                Ok((self.loopback(), Vec::new()))
            }
            Resolution::Delay(rule, resolver) => Err(self.delay_own(now, *service, packet, (rule, resolver))),
            Resolution::Drop(rule) => {
                self.table.note_use(self.now, rule);
                self.queue.refuse(packet, Unreachable::Prohibited);
                let why =
                    format!("rule {} of this host discards it; `margay trace NAME` shows why that one decides", rule.0);
                self.connect_failed(*service, packet, why);
                Err(AppVerdict::Drop(DropReason::ServiceDrop))
            }
            Resolution::None if self.is_awaited(now, service) => Err(AppVerdict::Drop(DropReason::Awaited)),
            Resolution::None => {
                self.queue.refuse(packet, Unreachable::Port);
                let why = "no instance serves this name, and no service router is known; see `margay status`";
                self.connect_failed(*service, packet, why.to_string());
                Err(AppVerdict::Drop(DropReason::NoService))
            }
        }
    }

    /// Sends the first SYN of a new flow.
    pub(crate) fn start_setup(&mut self, now: Instant, mut flow: Flow, start: Start) {
        let id = flow.id;
        if flow.app.protocol != GREETING && self.secure.demands_secure(&flow.service) {
            flow.marks |= Marks::SECURE | Marks::DEMANDS;
        }
        let flow_port = self.ports.offer_port(&mut self.rng, &flow.app);
        // A new path of a running session has the name that the session has begun with.
        if start.begin.is_none() {
            let is_program = flow.chain.as_ref().is_none_or(|chain| !chain.is_right());
            let source = if is_program { self.source_of(&flow.app, &start.first) } else { None };
            flow.source = source.map(Box::new);
        }
        let client = self.config.local_addresses.first().map_or(flow.app.source.ip(), |ip| *ip);
        flow.setup = Setup::Initiator(Box::new(InitiatorSetup {
            nonce: start.nonce,
            client: SocketAddr::new(client, flow.app.source.port()),
            next_hop: start.next_hop,
            instance_at: None,
            beside: start.beside,
            first: start.first,
            held: Vec::new(),
            retries: 0,
            first_carried: false,
            give_up: now + if start.next_hop == SEGMENT { SEGMENT_TIMEOUT } else { SETUP_TIMEOUT },
            handshake: HandshakeSeed::new(self.rng.bytes()),
            association: self.associations.fresh_id(&mut self.rng),
            cookie: None,
            full: start.full,
            flow_port,
            related: start.related,
            pin: start.pin,
            asks: start.asks,
            fetch: start.fetch,
            begin: start.begin,
            syn_digest: [0; 32],
            refused: None,
            is_listener_silent: false,
        }));
        self.flows.insert(flow);
        self.send_syn(now, id);
    }

    /// A SYN-ACK came, straight or through a router.
    pub(crate) fn handle_syn_ack(
        &mut self,
        now: Instant,
        from: SocketAddr,
        message: &Message<'_>,
    ) -> Result<(), DropReason> {
        let id = message.dst_flow;
        let flow = self.flows.get(id).filter(|flow| flow.role == Role::Initiator).ok_or(DropReason::UnknownFlow)?;
        let answered = match &flow.setup {
            Setup::Initiator(setup) => setup.source_of_answer(&self.associations, message, from)?,
            // A refusal of a copy of our SYN, which somebody has changed on its way: no instance stands behind it.
            Setup::Late(_) if message.error().is_some() => return Err(DropReason::Unexpected),
            Setup::Late(_) => {
                return if message.src_flow == flow.peer_flow {
                    // The peer has not seen our ACK yet.
                    self.send_ack_again(id);
                    Ok(())
                } else {
                    self.reset_late(from, message)
                };
            }
            Setup::Done | Setup::Responder(_) => return Err(DropReason::Unexpected),
        };
        // The router knows the peer by a family that this host has not: the direct answer shows a path, or there is
        // none.
        if message.error().is_none() && !self.config.has_family_of(answered.ip()) {
            return Err(DropReason::WrongPath);
        }
        if self.flows.get(id).is_some_and(Self::is_search) {
            return self.hear_router(now, answered, message);
        }
        if let Some(error) = message.error() {
            return self.hear_refusal(now, answered, message, error.code);
        }
        let answer = match self.prove_answer(now, message, answered) {
            Err(DropReason::UnknownAssociation) => {
                self.ask_full_handshake(now, id);
                return Err(DropReason::UnknownAssociation);
            }
            Err(DropReason::KeptOut) => {
                self.refuse_newcomers_answer(now, id);
                return Err(DropReason::KeptOut);
            }
            other => other?,
        };
        self.accept_answer(now, answered, message, answer)
    }

    /// The peer tags with a key that we no longer hold: ask once for a full handshake.
    pub(crate) fn ask_full_handshake(&mut self, now: Instant, id: FlowId) {
        let Some(Setup::Initiator(setup)) = self.flows.get_mut(id).map(|flow| &mut flow.setup) else { return };
        if !core::mem::replace(&mut setup.full, true) {
            self.send_syn(now, id);
        }
    }

    /// Checks who answered: by the association's tag, or by finishing the handshake.
    fn prove_answer(&mut self, now: Instant, message: &Message<'_>, at: SocketAddr) -> Result<Answer, DropReason> {
        let Some(exchange) = message.key_exchange() else {
            let association = auth::authenticate(&mut self.associations, message, now)?.association();
            return Ok(Answer { association, message_3: None });
        };
        let (local_id, (peer, theirs, message_3, keys)) = self.prove_handshake(message, exchange.message)?;
        self.adopt_peer(now, &peer, &theirs, local_id, &keys, message, at, true)?;
        Ok(Answer { association: local_id, message_3: Some(message_3) })
    }

    /// What an answer's handshake shows, tagged by who has its key: the index that this host has given out, and both
    /// ends' words.
    pub(crate) fn prove_handshake(
        &mut self,
        message: &Message<'_>,
        message_2: &[u8],
    ) -> Result<(u32, Finished), DropReason> {
        let id = message.dst_flow;
        let service = self.flows.get(id).map(|flow| flow.service).ok_or(DropReason::UnknownFlow)?;
        let membership = self.membership_for(&service);
        let Some(flow) = self.flows.get_mut(id) else { return Err(DropReason::UnknownFlow) };
        let (association, handshake) = match &mut flow.setup {
            Setup::Initiator(setup) => (setup.association, &mut setup.handshake),
            Setup::Late(late) => (late.association, &mut late.handshake),
            Setup::Done | Setup::Responder(_) => return Err(DropReason::Unexpected),
        };
        handshake.membership.get_or_insert(membership.into_boxed_slice());
        let handshake = handshake.clone();
        let (initiator, _) = self.config.handshake_of(flow, association, &handshake);
        let mine = self.introduction(association, [0; 32], handshake.membership.unwrap_or_default().into_vec());
        let finished = initiator.finish(message_2, &mine).map_err(|_| DropReason::BadHandshake)?;
        auth::verify_with_key(&finished.1.tag_key, message)?;
        Ok((association, finished))
    }

    fn accept_answer(
        &mut self,
        now: Instant,
        answered: SocketAddr,
        message: &Message<'_>,
        answer: Answer,
    ) -> Result<(), DropReason> {
        let id = message.dst_flow;
        let (authenticated, cipher) = match self.check_answer(id, message, answer.association) {
            Ok(checked) => checked,
            Err((why, reason)) => {
                self.turn_down(now, message, &answer, &why);
                return Err(reason);
            }
        };
        self.place_association(answer.association, answered, message);
        self.locations.announce_path(&self.associations, &mut self.queue, answer.association);
        self.associations.hold_flow(answer.association, Role::Initiator);
        let setup = self.note_answered(message, answer.association, authenticated)?;
        let Some(app) = self.flows.get(id).map(|flow| flow.app) else { return Err(DropReason::UnknownFlow) };
        let granted = self.read_grant(now, id, (setup.asks, authenticated), message, answer.association);
        // The responder demands it: what an untold SYN showed does not count.
        let shown_in_vain = app.protocol == UDP && cipher.is_some();
        self.settle_ports(now, id, setup.flow_port, message.flow_port());
        begin_stack(self, now, message, cipher);
        let is_other_way = setup.begin.is_some() && !self.keeps_ack(id);
        let has_program = app.protocol != GREETING && setup.fetch.is_none() && !is_other_way;
        if has_program {
            guard_as_rules_do(self, now, id);
        }
        let Some(entry) = self.flows.get(id).map(Flow::entry) else { return Err(DropReason::UnknownFlow) };
        let message_3 = answer.message_3.unwrap_or_default();
        let is_first = !message_3.is_empty();
        let (pair, elsewhere) = self.associations.ways_of_ack(answer.association, answered, is_first);
        if let Some(flow) = self.flows.get_mut(id) {
            let is_relayed = relayed_from(message).is_some();
            let late = LateAnswers::new(&setup, now, message_3.clone(), elsewhere, granted, is_relayed);
            flow.setup = Setup::Late(Box::new(late));
        }
        let ack = self.write_ack(id, Some(&message_3), None).unwrap_or_default();
        let keeps_ack = self.keeps_ack(id);
        self.flows.set_deadline(id, (!keeps_ack).then(|| now + retry_after(0)));
        if has_program {
            // Before the ACK: what the peer then sends direct would come up here first, and be overtaken.
            self.queue.update(EntryUpdate::Install(entry));
        }
        if !keeps_ack {
            elsewhere.into_iter().for_each(|there| self.transmit(there, ack.clone(), Kind::Ack));
            self.transmit_from(pair.local, pair.remote, ack, Kind::Ack);
        }
        if !has_program {
            self.answered_between(now, id, is_other_way);
            return Ok(());
        }
        self.deliver_answer(message, &app.reversed(), answer.association, cipher.is_some());
        if keeps_ack {
            self.right_answered(id);
        } else {
            self.flows.prepare_pinhole(&mut self.ports, &mut self.queue, now, id, is_first);
            self.forget_chain_setup(id);
        }
        self.begin_policy(now, id);
        act_as_rules_do(self, now, id);
        say_held(self, id, *setup, shown_in_vain);
        self.events.push(Event::FlowOpened(id));
        Ok(())
    }

    /// The other end of a flow that no program has yet is proved.
    fn answered_between(&mut self, now: Instant, id: FlowId, is_other_way: bool) {
        if is_other_way {
            self.way_answered(now, id);
        } else {
            self.fetch_answered(id);
        }
    }

    /// The other end is proved, and the flow is with it from now on. Gives what the flow was to be set up with.
    fn note_answered(
        &mut self,
        message: &Message<'_>,
        association: u32,
        authenticated: bool,
    ) -> Result<Box<InitiatorSetup>, DropReason> {
        let id = message.dst_flow;
        self.flows.set_peer_flow(id, message.src_flow);
        let Some(flow) = self.flows.get_mut(id) else { return Err(DropReason::UnknownFlow) };
        flow.association = association;
        flow.generation += 1;
        flow.lifecycle = flow.lifecycle.after(LifeEvent::Proved).unwrap_or(flow.lifecycle);
        flow.marks |= if authenticated { Marks::AUTHENTICATED } else { Marks::empty() };
        let Setup::Initiator(setup) = core::mem::replace(&mut flow.setup, Setup::Done) else {
            return Err(DropReason::Unexpected);
        };
        self.note_said(id, message);
        Ok(setup)
    }

    /// The host that answered may not, or not so. Its half of the flow ends, and the flow with it unless others may
    /// answer.
    fn turn_down(&mut self, now: Instant, message: &Message<'_>, answer: &Answer, why: &str) {
        self.say_reset(answer.association, message, answer.message_3.as_deref());
        if let Some(chained) = self.flows.get_mut(message.dst_flow).and_then(|flow| flow.chain.as_mut()) {
            chained.note_uncertified();
        }
        if !self.others_may_answer(now, message.dst_flow, ErrorCode::BadCertificate) {
            self.fail_connecting(message.dst_flow, Unreachable::Prohibited, why);
        } else if answer.message_3.is_some() {
            // The next answer brings an association of the same number.
            self.associations.remove(answer.association);
        }
    }

    /// Gives the application the answer that came inside the SYN-ACK.
    fn deliver_answer(&mut self, message: &Message<'_>, to_app: &Tuple, association: u32, is_sealed: bool) {
        let datagram_max = self.associations.get(association).map_or(self.config.datagram_max, |a| a.datagram_max);
        if let Ok(Parsed::Transport(inner)) = packet::parse(message.payload)
            && let mss_max = self.ports.mss_max(datagram_max, to_app.destination.ip(), is_sealed)
            && let Some(out) = packet::readdress(&inner, to_app, mss_max)
        {
            self.queue.inject(out);
        }
    }

    /// The path as this answer shows it.
    fn place_association(&mut self, local_id: u32, remote: SocketAddr, message: &Message<'_>) {
        let own_max = self.config.datagram_max;
        self.associations.note_abilities(local_id, message);
        let Some(host) = self.associations.get(local_id).map(|association| association.host) else { return };
        let has_flows = self.associations.has_flows_with(host);
        let Some(association) = self.associations.get_mut(local_id) else { return };
        if let Some(capabilities) = message.capabilities() {
            association.datagram_max = capabilities.mtu.clamp(600, own_max);
        }
        // A relayed answer says less about the path than what an older association already knows.
        if !message.flags.contains(Flags::RELAY) {
            self.find_peer(local_id, Pair { local: self.arrival, remote });
        } else if !has_flows {
            self.associations.set_remote(local_id, remote);
        }
    }

    /// Whether the answer may be accepted, whether the right to give it was checked, and how the flow will be sealed.
    fn check_answer(
        &mut self,
        id: FlowId,
        message: &Message<'_>,
        association: u32,
    ) -> Result<(bool, Option<Cipher>), (String, DropReason)> {
        let is_proved = self.check_right_to_answer(id, message, association);
        let is_proved = is_proved.and_then(|is_next| Ok(self.hear_chain_answer(id, message)? && is_next));
        let authenticated = is_proved.map_err(|why| (why, DropReason::BadCertificate))?;
        let unix_s = self.unix_s();
        self.fences
            .check_holder(&self.flows, &self.associations, id, message, association, unix_s)
            .map_err(|why| (why, DropReason::NotAllowed))?;
        match self.secure.settle_stack(&self.flows, id, message) {
            Verdict::Plain => Ok((authenticated, None)),
            Verdict::Sealed(cipher) => Ok((authenticated, Some(cipher))),
            Verdict::Refused => Err((NO_COMMON_STACK.to_string(), DropReason::NotAllowed)),
        }
    }

    /// The responder has our ACK.
    pub(crate) fn handle_confirm(
        &mut self,
        now: Instant,
        message: &Message<'_>,
        association: u32,
    ) -> Result<(), DropReason> {
        let id = message.dst_flow;
        let flow =
            self.flows.get_mut(id).filter(|flow| flow.association == association).ok_or(DropReason::UnknownFlow)?;
        if flow.role != Role::Initiator || flow.lifecycle == Lifecycle::Connecting {
            return Err(DropReason::Unexpected);
        }
        let is_first = !flow.has(Marks::CONFIRMED);
        flow.marks |= Marks::CONFIRMED;
        if starts_direct(message) {
            self.direct_event(now, id, DirectEvent::PeerDirect, Why::Hinted);
        }
        let is_whole = self.flows.get(id).is_some_and(|flow| flow.directions == Directions::Both);
        if is_first && is_whole && !self.fetches.is_between(id) {
            self.flows.begin_pinholes(&mut self.ports, &mut self.queue, now, id);
        }
        let Some(flow) = self.flows.get_mut(id) else { return Err(DropReason::UnknownFlow) };
        if flow.app.protocol == GREETING {
            let granted = if let Setup::Late(late) = &mut flow.setup { late.granted.take() } else { None };
            granted.into_iter().for_each(|granted| self.use_grant(now, *granted));
            self.remove_flow(id, RemoveReason::Closed);
            return Ok(());
        }
        if is_first {
            self.seal_what_waits(now, id);
        }
        let Some(flow) = self.flows.get_mut(id) else { return Err(DropReason::UnknownFlow) };
        let mut rtt = None;
        if let Setup::Late(late) = &mut flow.setup {
            // Neither said again: it is the answer to that one ACK.
            rtt = (late.retries == 1).then(|| SETUP_TIMEOUT.saturating_sub(late.give_up.since(now)));
            late.retries = u32::MAX;
            late.give_up = now + LATE_WINDOW;
            let until = late.give_up;
            if flow.lifecycle != Lifecycle::Closed {
                self.flows.set_deadline(id, Some(until));
            }
        }
        if let Some(chain) = message.certificate() {
            self.note_membership(association, chain);
        }
        self.note_whereabouts(association, message);
        if let Some(host) = self.associations.get(association).map(|association| association.host) {
            rtt.into_iter().for_each(|rtt| self.associations.note_rtt(host, rtt));
        }
        Ok(())
    }

    /// A second instance answered a retransmitted SYN: it is told so, and forgets its half (DESIGN §7).
    fn reset_late(&mut self, from: SocketAddr, message: &Message<'_>) -> Result<(), DropReason> {
        let Some(exchange) = message.key_exchange() else {
            let now = self.now;
            let association = auth::authenticate(&mut self.associations, message, now)?.association();
            self.say_reset(association, message, None);
            return Ok(());
        };
        let (association, (peer, theirs, message_3, keys)) = self.prove_handshake(message, exchange.message)?;
        let mut once = Association::new(association, theirs.assoc_id, peer, keys, true, from);
        once.peer_epoch = theirs.epoch;
        let host_id = self.config.host_id().0;
        let epoch = self.config.epoch;
        if let Some(reset) = write_reset(host_id, epoch, &mut once, message, Some(&message_3)) {
            self.transmit(from, reset, Kind::Rst);
        }
        Ok(())
    }

    /// Tells the host that sent `message` that its half of the flow is not wanted.
    fn say_reset(&mut self, association: u32, message: &Message<'_>, message_3: Option<&[u8]>) {
        let host_id = self.config.host_id().0;
        let epoch = self.config.epoch;
        let Some(association) = self.associations.get_mut(association) else { return };
        let to = association.remote;
        if let Some(datagram) = write_reset(host_id, epoch, association, message, message_3) {
            self.transmit(to, datagram, Kind::Rst);
        }
    }
}

impl Config {
    /// The handshake of a flow, made again from its seed: the same first message every time.
    pub(super) fn handshake_of(
        &self,
        flow: &Flow,
        association: u32,
        handshake: &HandshakeSeed,
    ) -> (Initiator, Vec<u8>) {
        let prologue = prologue(flow.session, &flow.asked(), flow.id, association);
        Initiator::start(&self.host_key, &mut Rng::new(handshake.seed), &prologue)
    }

    pub(crate) fn has_family_of(&self, remote: IpAddr) -> bool {
        let own = &self.local_addresses;
        own.is_empty() || remote.is_loopback() || own.iter().any(|own| own.is_ipv4() == remote.is_ipv4())
    }
}

/// The stack that both ends have agreed on is the flow's.
fn begin_stack(sal: &mut Sal, now: Instant, answer: &Message<'_>, cipher: Option<Cipher>) {
    let id = answer.dst_flow;
    if let Some(cipher) = cipher {
        sal.keep_sealed(now, id);
        sal.flows.seal_flow(&sal.associations, &sal.config, id, cipher);
    }
    sal.note_demand(id, Marks::PEER_DEMANDS, answer.stack().is_some_and(|said| said.demands));
    sal.flows.begin_direct(&sal.fetches, &mut sal.associations, now, id, false);
}

/// What the program has said before the answer, as far as no SYN has carried it.
fn say_held(sal: &mut Sal, id: FlowId, setup: InitiatorSetup, shown_in_vain: bool) {
    let is_first_unsaid = (!setup.first_carried || shown_in_vain) && !setup.first.is_empty();
    let first = is_first_unsaid.then_some(setup.first);
    first.into_iter().chain(setup.held).for_each(|packet| guard::send_or_hold(sal, id, packet));
}

/// A RST for the sender of `message`; with `message_3` it also ends the handshake that the sender still holds.
fn write_reset(
    host_id: [u8; 16],
    epoch: u32,
    association: &mut Association,
    message: &Message<'_>,
    message_3: Option<&[u8]>,
) -> Option<Vec<u8>> {
    let assoc_id = association.local_id;
    let exchange = message_3.map(|message| Extension::KeyExchange(KeyExchangeRepr { host_id, assoc_id, message }));
    let mut draft = Draft::new(Kind::Rst, message.src_flow, message.dst_flow);
    draft.extensions = exchange.as_slice();
    draft.seal(association, epoch)
}

#[cfg(test)]
mod tests {
    use margay_wire::{ResolvableRepr, SessionId};

    use super::*;
    use crate::act::handover::tests::sal;
    use crate::association::draft::relay_part;
    use crate::cache::output::Output;
    use crate::table::{Action, NextHop, Rule};
    use crate::types::config::Limits;
    use crate::types::key::HostSecret;
    use crate::types::name::Prefix;

    fn said(sal: &mut Sal) -> Vec<u8> {
        let mut buf = alloc::vec![0; 2000];
        while let Some(output) = sal.poll(&mut buf) {
            if let Output::Transmit { len, .. } = output {
                buf.truncate(len);
                return buf;
            }
        }
        panic!("nothing is sent");
    }

    #[test]
    fn a_host_that_serves_a_name_relays_for_nobody() {
        let (at, victim) =
            (SocketAddr::new([10, 0, 0, 2].into(), 54324), SocketAddr::new([192, 0, 2, 66].into(), 54324));
        let known = Some(crate::types::key::HostId([5; 16]));
        for (host, router, is_believed) in [(known, false, false), (known, true, true), (None, false, true)] {
            let mut sal = sal(Limits::default());
            let action = Action::Forward(NextHop { address: at, host, router });
            sal.add_rule(Instant::ZERO, Prefix::default(), Rule { priority: 100, weight: 1, action }).expect("room");
            let app = Tuple { protocol: 6, source: at, destination: victim };
            let flow =
                Flow::new(FlowId(1), SessionId([1; 16]), ServiceId([7; 32]), Role::Initiator, app, Instant::ZERO);
            sal.start_setup(Instant::ZERO, flow, Start::of(1, at, Vec::new(), Vec::new()));
            let mut draft = Draft::new(Kind::SynAck, FlowId(1), FlowId(2));
            draft.flags = Flags::RESOLVABLE | Flags::RELAY;
            draft.resolvable = Some(ResolvableRepr { via: Some(victim), ..relay_part(at) });
            let answer = draft.write(None).expect("room");
            let answer = Message::parse(&answer).expect("well-formed");
            let flow = sal.flows.get(FlowId(1)).expect("it is connecting");
            let Setup::Initiator(setup) = &flow.setup else { panic!("it is connecting") };
            assert_eq!(
                setup.source_of_answer(&sal.associations, &answer, at).is_ok(),
                is_believed,
                "{host:?}, {router}"
            );
        }
    }

    #[test]
    fn copies_of_an_answer_have_one_message_3_although_the_membership_is_renewed() {
        let (mut client, mut server) = (sal(Limits::default()), sal(Limits::default()));
        server.config.host_key = HostSecret::from_bytes([8; 32]);
        let at = |number| SocketAddr::new([10, 0, 0, number].into(), margay_wire::PORT);
        client.set_membership(alloc::vec![1; 40]);
        client.greet(Instant::ZERO, at(2)).expect("room");
        let syn = said(&mut client);
        server.handle_datagram(Instant::ZERO, None, at(1), &syn).expect("a greeting");
        let answer = said(&mut server);
        let answer = Message::parse(&answer).expect("a SYN-ACK");
        let message_2 = answer.key_exchange().expect("they have not met").message;
        let (_, (_, _, first, _)) = client.prove_handshake(&answer, message_2).expect("it is whole");
        client.set_membership(alloc::vec![2; 40]);
        let (_, (_, _, second, _)) = client.prove_handshake(&answer, message_2).expect("it is whole");
        assert_eq!(first, second, "other contents would be encrypted under the same key and nonce");
    }
}
