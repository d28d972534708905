//! The two halves of a session on a box's host, and what joins them: the five-tuple of one is that of the other
//! reversed.

use alloc::boxed::Box;
use alloc::vec::Vec;

use core::net::{IpAddr, SocketAddr};
use core::time::Duration;

use margay_wire::{BoxFlags, ErrorCode, Extension, FlowId, KeyExchangeRepr, Kind};

use super::first::Wanted;
use super::forwarded::is_feigned;
use super::proof::Answered;
use super::{ChainSetup, Chained, Failure, Place};
use crate::act::setup::{SETUP_TIMEOUT, Start, retry_after};
use crate::association::draft::{Arrival, Draft};
use crate::cache::entry::RemoveReason;
use crate::cache::output::AppVerdict;
use crate::cache::packet::{AppPacket, tcp_flags};
use crate::machine::sal::Sal;
use crate::resolve::instance::{Pin, sticky};
use crate::resolve::named::way_to_anchor;
use crate::resolve::segment::SEGMENT;
use crate::resolve::way::Sender;
use crate::session::flow::{Flow, FlowTable, Marks, Setup};
use crate::table::Resolution;
use crate::table::surrogate::box_tuple;
use crate::types::drop_reason::DropReason;
use crate::types::name::ServiceId;
use crate::types::role::{Lifecycle, Role};
use crate::types::time::Instant;
use crate::types::tuple::Tuple;

/// How long a box may keep a session's first packet.
pub(crate) const BOX_PATIENCE: Duration = Duration::from_secs(1);
/// A box's host gives the next one up so much before its own neighbour gives up: the reason comes back in time. So the
/// first box's host does, and the later ones earlier still, by [`TELLING_PER_BOX`].
const TELLING: Duration = Duration::from_millis(1000);
const TELLING_PER_BOX: Duration = Duration::from_millis(200);
const TCP: u8 = 6;

impl FlowTable {
    /// The other half of a session that passes a box here.
    pub(crate) fn other_half(&self, flow: &Flow) -> Option<FlowId> {
        let chained = flow.chain.as_deref().filter(|chained| chained.is_at_box())?;
        let other = chained.other_half.or_else(|| self.by_tuple(&flow.app.reversed()));
        let other = other.and_then(|id| self.get(id))?;
        let theirs = other.chain.as_deref().filter(|theirs| theirs.is_at_box())?;
        (other.session == flow.session && theirs.is_left() != chained.is_left()).then_some(other.id)
    }

    /// Halves in use whose other half is not here. Of two that are closed, one may go first.
    pub(crate) fn lone_halves(&self) -> Vec<FlowId> {
        let is_in_use = |flow: &Flow| matches!(flow.lifecycle, Lifecycle::Established | Lifecycle::HalfClosed);
        let halves = self.iter().filter(|flow| flow.is_at_box() && is_in_use(flow));
        halves.filter(|flow| self.other_half(flow).is_none()).map(|flow| flow.id).collect()
    }

    pub(super) fn chain_setup(&mut self, id: FlowId) -> Option<&mut ChainSetup> {
        self.get_mut(id)?.chain.as_mut()?.setup.as_deref_mut()
    }
}

impl Sal {
    /// The five-tuple of a left half: what its box sees, reversed. `None`: no address of this host stands for the name
    /// yet, or none is free.
    pub(crate) fn left_tuple(&mut self, arrival: &Arrival<'_>, protocol: u8, client: SocketAddr) -> Option<Tuple> {
        let (chain, session) = arrival.message.chain().zip(arrival.message.session())?;
        let destination = ServiceId(chain.destination());
        let own_family = self.stands_for(&destination, client.is_ipv4());
        // In IPv6 a name has the address that is computed from it, or none.
        let is_wanted = own_family.is_none() && client.is_ipv4();
        if is_wanted && self.chains.want_lease(self.now, destination, arrival.reply.direct.ip()) {
            return None;
        }
        let address = own_family.or_else(|| self.stands_for(&destination, !client.is_ipv4()))?;
        let random = self.rng.u32();
        let taken = |tuple: &Tuple| {
            self.grants.is_taken(&self.flows, tuple) || self.grants.is_taken(&self.flows, &tuple.reversed())
        };
        let service = SocketAddr::new(address, session.service_port);
        box_tuple(protocol, client, service, self.config.own(), random, taken)
    }

    /// The virtual address of this host that stands for a name.
    pub(super) fn stands_for(&self, service: &ServiceId, is_v4: bool) -> Option<IpAddr> {
        let leased = self.chains.leases.get(&(*service, is_v4)).copied();
        let computed = || IpAddr::V6(self.config.ranges.virtual_v6(service));
        leased.or_else(|| (!is_v4 && crate::types::name::is_computable(service)).then(computed))
    }

    /// Gives a session's first packet to the box; one that is not in the SYN comes later, and the session goes on
    /// without.
    pub(crate) fn show_box(&mut self, now: Instant, id: FlowId, first: Option<Vec<u8>>) -> Result<(), DropReason> {
        self.flows.set_deadline(id, Some(now + BOX_PATIENCE));
        let protocol = self.flows.get(id).map_or(0, |flow| flow.app.protocol);
        match first {
            Some(first) => match self.mark_first(id, first) {
                Ok(first) => {
                    self.queue.inject(first);
                    Ok(())
                }
                Err(code) => {
                    self.refuse_at_box(id, code);
                    Err(DropReason::NotAllowed)
                }
            },
            None if self.is_of_running_session(id) => self.show_nothing(now, id),
            None if protocol == TCP => Err(DropReason::Malformed),
            None if self.needs_first(id) => {
                self.refuse_at_box(id, ErrorCode::NoRoomForTag);
                Err(DropReason::NotAllowed)
            }
            None => self.begin_right(now, id, None),
        }
    }

    /// Whether a half-open flow is another way of a session that runs.
    fn is_of_running_session(&self, id: FlowId) -> bool {
        matches!(self.flows.get(id).map(|flow| &flow.setup), Some(Setup::Responder(setup)) if setup.begin.is_some())
    }

    /// A session that runs comes to a box: no packet begins it there.
    fn show_nothing(&mut self, now: Instant, id: FlowId) -> Result<(), DropReason> {
        if self.needs_first(id) {
            self.refuse_at_box(id, ErrorCode::BoxNeedsFirst);
            return Err(DropReason::NotAllowed);
        }
        self.begin_right(now, id, None)
    }

    /// A packet that is no flow's has come out of `sal0`. The first one of a session that a box has let pass begins the
    /// right half. `None`: it is nothing that a box was given.
    pub(crate) fn come_out(&mut self, now: Instant, packet: &AppPacket<'_>) -> Option<AppVerdict> {
        if !packet.is_forwarded() {
            let is_taken = is_feigned(&self.flows, packet) || self.chains.is_late(&packet.tuple, now);
            return is_taken.then_some(AppVerdict::Drop(DropReason::NotForwarded));
        }
        if let Some(verdict) = self.come_out_changed(now, packet) {
            return Some(verdict);
        }
        let Some(left) = self.flows.by_tuple(&packet.tuple.reversed()).and_then(|id| self.flows.get(id)) else {
            let is_late = self.chains.is_late(&packet.tuple, now);
            return is_late.then_some(AppVerdict::Drop(DropReason::UnknownFlow));
        };
        let id = left.chain.as_ref().filter(|chained| chained.is_left()).map(|_| left.id)?;
        let is_first = !packet.is_tcp() || packet.is_tcp_syn();
        if !matches!(left.setup, Setup::Responder(_)) {
            // Its right half is gone, or was never taken up by this start of the agent.
            self.end_half(id, RemoveReason::PeerFailed);
            return Some(AppVerdict::Drop(DropReason::UnknownFlow));
        }
        if !is_first {
            return Some(AppVerdict::Drop(DropReason::Unexpected));
        }
        Some(self.begin_right(now, id, Some(packet)).map_or_else(AppVerdict::Drop, |()| AppVerdict::Consumed))
    }

    /// Begins the right half of a session, with what has come out of the box. `None`: the first packet comes later.
    pub(super) fn begin_right(
        &mut self,
        now: Instant,
        left: FlowId,
        packet: Option<&AppPacket<'_>>,
    ) -> Result<(), DropReason> {
        if let Some(setup) = self.flows.chain_setup(left) {
            setup.has_come_out = true;
            setup.out_as = packet.map(|packet| packet.tuple);
        }
        let (mut flow, at, wanted) = self.right_of(now, left).ok_or(DropReason::Unexpected)?;
        if self.flows.len() >= self.config.limits.flows {
            self.refuse_left(left, ErrorCode::Overloaded, at as u8 + 1);
            return Err(DropReason::Full);
        }
        let tuple = packet.map_or(flow.app, |packet| packet.tuple);
        if !self.set_right_tuple(left, &mut flow, tuple) {
            self.refuse_left(left, ErrorCode::BoxAmbiguous, at as u8 + 1);
            return Err(DropReason::Unexpected);
        }
        let nonce = self.rng.u64();
        let asked = flow.asked();
        let begin = match self.flows.get(left).map(|left| &left.setup) {
            Some(Setup::Responder(setup)) => setup.begin,
            _ => None,
        };
        if let Some(begin) = begin {
            flow.marks |= Marks::LATER;
            if flow.chain.as_ref().is_some_and(|chain| chain.ends_next()) {
                // It ends where the session is, whoever else serves the name.
                let Some(next_hop) = way_to_anchor(self, &begin, &flow) else {
                    self.refuse_left(left, ErrorCode::NoAnswer, at as u8 + 1);
                    return Err(DropReason::Nowhere);
                };
                let start = Start::of(nonce, next_hop, Vec::new(), Vec::new());
                let start = Start { pin: Some(Pin::Only), begin: Some(begin), ..start };
                self.start_right(now, (left, at), flow, start);
                return Ok(());
            }
        }
        let number = sticky(flow.id, nonce);
        let (next_hop, beside) = match self.pick(&asked, number, wanted.protocol, wanted.port, Sender::Own) {
            Resolution::Forward(rule, hop) => {
                let address = hop.address;
                let beside = self.note_own(rule);
                let heard = if address == SEGMENT { self.hop_by_notice(now, &asked, number) } else { None };
                (heard.unwrap_or(address), beside)
            }
            Resolution::Demux(rule, _) | Resolution::Box(rule, _) => {
                self.table.note_use(now, rule);
                (self.loopback(), Vec::new())
            }
            Resolution::Delay(rule, resolver) => {
                let packet = packet.ok_or(DropReason::NoService)?;
                return match self.delay_own(now, asked, packet, (rule, resolver)) {
                    AppVerdict::Drop(reason) => Err(reason),
                    AppVerdict::Consumed | AppVerdict::Parted(_) | AppVerdict::Forward(_) => Ok(()),
                };
            }
            Resolution::None if self.is_awaited(now, &asked) => return Err(DropReason::Awaited),
            Resolution::None | Resolution::Drop(_) => {
                self.refuse_left(left, ErrorCode::NoService, number_after(&flow, at));
                return Err(DropReason::NoService);
            }
        };
        let first = packet.map(|packet| packet.whole.to_vec()).unwrap_or_default();
        self.start_right(now, (left, at), flow, Start { begin, ..Start::of(nonce, next_hop, beside, first) });
        Ok(())
    }

    /// Sends the SYN of a right half.
    fn start_right(&mut self, now: Instant, (left, at): (FlowId, usize), mut flow: Flow, start: Start) {
        if self.flows.get(left).is_some_and(|left| left.has(Marks::SECURE)) {
            flow.marks |= Marks::SECURE;
        }
        let id = flow.id;
        self.start_setup(now, flow, start);
        if let Some(Setup::Initiator(setup)) = self.flows.get_mut(id).map(|flow| &mut flow.setup) {
            let telling = TELLING + TELLING_PER_BOX.saturating_mul(at as u32);
            setup.give_up = setup.give_up.min(now + SETUP_TIMEOUT.saturating_sub(telling));
        }
    }

    /// The right half of a left one, before it is begun, and the number of the box between them, from 0.
    fn right_of(&mut self, now: Instant, left: FlowId) -> Option<(Flow, usize, Wanted)> {
        let id = self.grants.fresh_flow_id(&self.flows, &mut self.rng);
        let own = self.config.host_id();
        let left = self.flows.get(left)?;
        let chained = left.chain.as_deref()?;
        let Place::Left { at } = chained.place else { return None };
        let known = chained.setup.as_deref()?;
        let mut boxes = chained.boxes.clone();
        boxes.get_mut(at)?.flags |= BoxFlags::PASSED;
        let mut hosts = chained.hosts.clone();
        hosts.push(own);
        let setup = ChainSetup { keeps_ack: true, ..ChainSetup::new(known.client, known.port, known.origin.clone()) };
        let mut flow = Flow::new(id, left.session, left.service, Role::Initiator, left.app.reversed(), now);
        let wanted = Wanted { destination: left.service, protocol: left.app.protocol, port: known.port };
        let mut right = Chained {
            asked: left.service,
            place: Place::Right { at },
            boxes,
            hosts,
            other_half: None,
            far_end: None,
            setup: Some(Box::new(setup)),
        };
        self.leave_unserved_out(&mut right, wanted);
        flow.chain = Some(Box::new(right));
        Some((flow, at, wanted))
    }

    /// A half-open left half has said or been given something else than what it waits for: of the box, since the next
    /// host has not answered.
    pub(crate) fn box_packet(&mut self, id: FlowId, packet: &AppPacket<'_>) -> Result<(), DropReason> {
        let flow = self.flows.get(id).ok_or(DropReason::UnknownFlow)?;
        let Some(Place::Left { at }) = flow.chain.as_ref().map(|chained| chained.place) else {
            return Err(DropReason::Unexpected);
        };
        let number = at as u8 + 1;
        let is_answered = flow.chain.as_ref().and_then(|chained| chained.setup.as_ref()?.answer.as_ref()).is_some();
        if packet.tcp_flags() & tcp_flags::RST != 0 {
            self.refuse_left(id, ErrorCode::BoxRefused, number);
        } else if !packet.is_tcp_syn_ack() {
            return Err(DropReason::Unexpected);
        } else if is_answered {
            if let Some(Setup::Responder(setup)) = self.flows.get_mut(id).map(|flow| &mut flow.setup)
                && setup.syn.take().is_some()
            {
                self.answer(id, packet.whole, None);
            }
        } else {
            self.refuse_left(id, ErrorCode::BoxAnswered, number);
        }
        Ok(())
    }

    /// The box has refused what it was given by an ICMP error. False where the flow is none that a box was given.
    pub(crate) fn box_refused(&mut self, id: FlowId) -> bool {
        let Some(flow) = self.flows.get(id).filter(|flow| matches!(flow.setup, Setup::Responder(_))) else {
            return false;
        };
        let Some(Place::Left { at }) = flow.chain.as_ref().map(|chained| chained.place) else { return false };
        self.refuse_left(id, ErrorCode::BoxRefused, at as u8 + 1);
        true
    }

    /// Resolvers have not said who serves what comes after a box. False where the packet has come out of none.
    pub(crate) fn refuse_unresolved(&mut self, packet: &AppPacket<'_>) -> bool {
        if !packet.is_forwarded() {
            return false;
        }
        let left = self.flows.by_tuple(&packet.tuple.reversed()).or_else(|| self.left_that_let_out(packet));
        let left = left.and_then(|id| self.flows.get(id));
        let Some(left) = left.filter(|left| matches!(left.setup, Setup::Responder(_))) else { return false };
        let Some(Place::Left { at }) = left.chain.as_ref().map(|chained| chained.place) else { return false };
        let id = left.id;
        let number = number_after(left, at);
        self.refuse_left(id, ErrorCode::NoService, number);
        true
    }

    /// Refuses a session at its left half; `at`: the box that it is about, from 1; 0: none.
    pub(crate) fn refuse_left(&mut self, left: FlowId, code: ErrorCode, at: u8) {
        if self.flows.get(left).is_none_or(|flow| !matches!(flow.setup, Setup::Responder(_))) {
            return self.end_half(left, RemoveReason::PeerFailed);
        }
        if let Some(setup) = self.flows.chain_setup(left) {
            setup.failure = Some(Failure { code, at });
        }
        self.counters.chains_refused += 1;
        self.answer(left, &[], Some(code));
        self.drop_half_open(left);
    }

    /// The initiator of a left half could not read its answer, and asks for a full handshake. The right half stays: the
    /// next host has the session already. False where the flow is no left half.
    pub(crate) fn supersede_left(&mut self, id: FlowId, arrival: &Arrival<'_>, exchange: &KeyExchangeRepr<'_>) -> bool {
        let association = self.associations.fresh_id(&mut self.rng);
        let Some(flow) = self.flows.get_mut(id) else { return false };
        let Some(chained) = flow.chain.as_ref().filter(|chained| chained.is_left()) else { return false };
        let has_answer = chained.setup.as_ref().is_some_and(|setup| setup.answer.is_some());
        let says_nothing = has_no_answer(flow);
        let Setup::Responder(setup) = &mut flow.setup else { return false };
        flow.association = 0;
        setup.association = association;
        setup.initiator_association = exchange.assoc_id;
        setup.message_1 = exchange.message.to_vec();
        (setup.handshake, setup.shown_by) = (None, None);
        (setup.reply, setup.syn_len) = (arrival.reply, arrival.syn_len);
        match setup.app_answer.clone() {
            Some(answer) => self.answer(id, &answer, None),
            None if has_answer && says_nothing => self.answer(id, &[], None),
            None => {}
        }
        true
    }

    /// A left half's time is over: the box has kept the first packet, or nobody has answered.
    pub(crate) fn left_due(&mut self, now: Instant, id: FlowId) {
        let Some(flow) = self.flows.get(id) else { return };
        let Some(Place::Left { at }) = flow.chain.as_ref().map(|chained| chained.place) else { return };
        let setup = flow.chain.as_ref().and_then(|chained| chained.setup.as_ref());
        let until = flow.since + SETUP_TIMEOUT;
        let has_right = self.flows.other_half(flow).is_some();
        if !has_right && !setup.is_some_and(|setup| setup.has_come_out) {
            self.refuse_left(id, ErrorCode::BoxSilent, at as u8 + 1);
        } else if now < until {
            self.flows.set_deadline(id, Some(until));
        } else if has_right {
            self.drop_half_open(id);
        } else {
            // Nobody has said where it is to go on to.
            let number = number_after(flow, at);
            self.refuse_left(id, ErrorCode::NoService, number);
        }
    }

    /// The next host has answered a right half, whose ACK waits for the left one's client. What TCP answers goes
    /// through the box; of a datagram service nothing does.
    pub(crate) fn right_answered(&mut self, id: FlowId) {
        let Some(flow) = self.flows.get(id).filter(|flow| has_no_answer(flow)) else { return };
        if let Some(left) = self.flows.other_half(flow) {
            self.answer(left, &[], None);
        }
    }

    /// What a session's first agent needs no more.
    pub(crate) fn forget_chain_setup(&mut self, id: FlowId) {
        if let Some(chained) = self.flows.get_mut(id).and_then(|flow| flow.chain.as_mut()) {
            chained.setup = None;
        }
    }

    /// Whether a flow's ACK is not to be sent yet.
    pub(crate) fn keeps_ack(&self, id: FlowId) -> bool {
        let chained = self.flows.get(id).and_then(|flow| flow.chain.as_deref());
        chained.and_then(|chained| chained.setup.as_deref()).is_some_and(|setup| setup.keeps_ack)
    }

    /// The client of a left half is proved: the right half's ACK goes now.
    pub(crate) fn left_proved(&mut self, now: Instant, left: FlowId) {
        self.forget_marks(left);
        let Some(flow) = self.flows.get_mut(left) else { return };
        let Some(chained) = flow.chain.as_mut() else { return };
        if let Some(answered) = chained.setup.take().and_then(|setup| setup.answer) {
            (chained.boxes, chained.hosts) = (answered.boxes, answered.hosts);
        }
        let Some(flow) = self.flows.get(left) else { return };
        let Some(right) = self.flows.other_half(flow) else { return };
        let Some(flow) = self.flows.get_mut(right) else { return };
        if let Some(chained) = &mut flow.chain {
            chained.setup = None;
        }
        if flow.has(Marks::LATER) {
            self.reconfigurations.check_new_path(now, [left, right]);
        }
        let Setup::Late(late) = &mut flow.setup else { return };
        let is_first_contact = !late.ack.is_empty();
        (late.retries, late.give_up) = (1, now + SETUP_TIMEOUT);
        self.flows.set_deadline(right, Some(now + retry_after(0)));
        self.send_ack_again(right);
        self.flows.prepare_pinhole(&mut self.ports, &mut self.queue, now, right, is_first_contact);
        self.counters.chains_joined += 1;
    }

    /// A right half could not be set up: the left one is refused, and the reason goes back to the first agent.
    pub(crate) fn right_failed(&mut self, flow: &Flow, code: ErrorCode) {
        let Some(left) = self.flows.other_half(flow) else { return };
        let setup = flow.chain.as_ref().and_then(|chained| chained.setup.as_ref());
        let failure = setup.and_then(|setup| setup.failure).unwrap_or(Failure { code, at: 0 });
        if let Some((right, chained)) =
            flow.chain.as_ref().zip(self.flows.get_mut(left).and_then(|left| left.chain.as_mut()))
            && chained.setup.is_some()
        {
            // What the refusal is about is a number among these.
            chained.boxes.clone_from(&right.boxes);
            chained.hosts.clone_from(&right.hosts);
        }
        self.refuse_left(left, failure.code, failure.at);
    }

    /// The listener behind a right half says nothing; neither does the left one's.
    pub(crate) fn right_is_silent(&mut self, id: FlowId) {
        let left = self.flows.get(id).and_then(|flow| self.flows.other_half(flow));
        if let Some(left) = left {
            self.answer(left, &[], Some(ErrorCode::ListenerSilent));
        }
    }

    /// The other half of a session is gone: so is this one, and its peer is told. What has passed through the box, both
    /// have heard of by themselves, unless the box has kept a FIN or a RST for itself.
    pub(crate) fn end_half(&mut self, id: FlowId, reason: RemoveReason) {
        let Some(flow) = self.flows.get(id) else { return };
        match (&flow.setup, flow.lifecycle) {
            (Setup::Responder(_), _) => self.refuse_left(id, ErrorCode::NoAnswer, 0),
            (Setup::Initiator(_), _) => {
                self.take_flow(id);
            }
            (Setup::Late(_), _) if self.keeps_ack(id) => self.take_back(id),
            (_, Lifecycle::Established | Lifecycle::HalfClosed) => {
                // Of one that was idle, this half's peer is told as the other's was.
                if reason != RemoveReason::Idle {
                    self.say_fail(id, ErrorCode::Closed);
                }
                self.fail_flow(self.now, id, reason);
            }
            (_, Lifecycle::Closed) => self.flows.end_with_other_half(self.now, id),
            (_, Lifecycle::Connecting | Lifecycle::TimedOut) => {}
        }
    }

    /// A left half that was never proved is gone: its right half goes with it, before the peer has been told anything.
    pub(crate) fn forget_right(&mut self, left: &Flow) {
        let Some(right) = self.flows.other_half(left) else { return };
        match self.flows.get(right).map(|flow| &flow.setup) {
            Some(Setup::Initiator(_)) => {
                self.take_flow(right);
            }
            Some(Setup::Late(_)) => self.take_back(right),
            _ => {}
        }
    }

    /// The next host has answered a right half, and is told that nothing comes of it.
    fn take_back(&mut self, right: FlowId) {
        let Some(flow) = self.flows.get(right) else { return };
        let Setup::Late(late) = &flow.setup else { return };
        let association = flow.association;
        let message_3 = late.ack.clone();
        let host_id = self.config.host_id().0;
        let exchange = KeyExchangeRepr { host_id, assoc_id: association, message: &message_3 };
        let is_new = !message_3.is_empty();
        let extensions = [Extension::KeyExchange(exchange)];
        let mut draft = Draft::new(Kind::Rst, flow.peer_flow, right);
        draft.extensions = if is_new { &extensions } else { &[] };
        self.seal_and_send(association, draft);
        self.remove_flow(right, RemoveReason::Unproved);
        // The next host keeps none, either.
        if is_new && self.associations.get(association).is_some_and(|association| association.flows == 0) {
            self.associations.remove(association);
        }
    }

    /// CHAIN of a SYN-ACK: of the last host, what it signs; of a box's host, what the last one has signed.
    pub(crate) fn chain_answer(&self, id: FlowId, certificate: &[u8], error: Option<ErrorCode>) -> Option<Vec<u8>> {
        let flow = self.flows.get(id)?;
        let chained = flow.chain.as_deref()?;
        let setup = chained.setup.as_deref()?;
        match (error, chained.place) {
            (Some(_), _) => setup.failure?.write(&flow.service, &chained.boxes, &chained.hosts),
            (None, Place::Last | Place::Proxy { .. }) => {
                let (boxes, hosts) = chained.passed_at_end(self.config.host_id());
                let answered = Answered {
                    host_key: self.config.host_key.public(),
                    signature: self.sign_answer(flow.session, &flow.service, &setup.origin),
                    certificates: certificate.to_vec(),
                    boxes,
                    hosts,
                };
                answered.write(&flow.service, certificate)
            }
            (None, _) => setup.answer.as_ref()?.write(&flow.service, certificate),
        }
    }

    /// CHAIN of a SYN.
    pub(crate) fn chain_of_syn(&self, flow: &Flow) -> Option<Vec<u8>> {
        let chained = flow.chain.as_deref()?;
        chained.setup.as_deref()?.origin.write(&flow.service, &chained.boxes, &chained.hosts)
    }
}

/// Whether no packet of a program comes with a half's SYN-ACK: datagrams have no handshake, and a running session's new
/// path begins in the middle of its connection.
fn has_no_answer(flow: &Flow) -> bool {
    flow.app.protocol != TCP || flow.has(Marks::LATER)
}

/// The box that comes after box `at` of a flow's chain, from 1; 0: none does.
fn number_after(flow: &Flow, at: usize) -> u8 {
    let boxes = flow.chain.as_ref().map_or(&[][..], |chained| &chained.boxes);
    let ahead = boxes.iter().enumerate().skip(at + 1).find(|(_, one)| one.is_ahead());
    ahead.map_or(0, |(at, _)| at as u8 + 1)
}
