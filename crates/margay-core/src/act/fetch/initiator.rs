//! The client's end: it fetches the session, and its word decides where the connection is.

use alloc::vec::Vec;

use margay_wire::{ErrorCode, Flags, FlowId, HandoverRepr, Kind, Message};

use super::{LEASE, TCP, handover, tuple_between};
use crate::act::setup::Start;
use crate::act::stack_rule::guard;
use crate::association::auth::Verified;
use crate::association::{Association, AssociationTable};
use crate::cache::entry::{EntryUpdate, RemoveReason};
use crate::cache::output::AppVerdict;
use crate::cache::packet::Unreachable;
use crate::cache::queue::OutputQueue;
use crate::cache::waiting_packets::WaitingPackets;
use crate::machine::sal::Sal;
use crate::resolve::named::way_to_named_host;
use crate::session::event::Event;
use crate::session::flow::FlowTable;
use crate::session::flow::{Flow, Marks};
use crate::session::hand_over::{PeerTicket, Ticket};
use crate::session::{Act, Holder, LockGuardId};
use crate::types::drop_reason::DropReason;
use crate::types::fair_table::Peer;
use crate::types::key::HostId;
use crate::types::role::{Lifecycle, Role};
use crate::types::time::Instant;

/// Memory for the packets of a program that wait for the word where they go: TCP sends others again.
const HELD_BYTES_MAX: usize = 1 << 20;

/// What a flow is set up for in the place of a connection: which session it fetches, and from whom.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fetch {
    pub ticket: Ticket,
    pub giver: HostId,
    pub taker: HostId,
}

impl Fetch {
    /// What the SYN says of it.
    pub fn asked(&self) -> HandoverRepr {
        handover(self.ticket, self.giver, self.taker)
    }

    /// By which this host knows the hand-over.
    pub fn key(&self) -> PeerTicket {
        PeerTicket { peer: self.giver, ticket: self.ticket }
    }
}

/// A session that is being fetched.
#[derive(Debug)]
pub(crate) struct Fetching {
    /// The program's flow, to the giver.
    pub old: FlowId,
    /// The flow to the taker, which no program has yet.
    pub new: FlowId,
    taker: HostId,
    guard: LockGuardId,
    /// The taker has proved that it is there.
    is_ready: bool,
    /// What the program has sent since: nobody would have it, or both would.
    held: WaitingPackets,
    pub until: Instant,
}

impl Sal {
    /// A giver asks for a session of this host's to be fetched.
    pub(super) fn asked_to_fetch(
        &mut self,
        now: Instant,
        message: &Verified<'_>,
        repr: HandoverRepr,
    ) -> Result<(), DropReason> {
        let association = message.association();
        let ticket = self.associations.ticket_of(association, &repr)?;
        if let Some(fetching) = self.fetches.fetching.get(&ticket) {
            let (is_its, is_ready) = (fetching.old == message.dst_flow, fetching.is_ready);
            if !is_its || self.flows.fetchable(&self.associations, message, association).is_none() {
                return Err(DropReason::Unexpected);
            }
            if is_ready {
                self.tell_ready(ticket);
            }
            return Ok(());
        }
        if let Err(code) = self.begin_fetch(now, message, association, repr, ticket) {
            let to = (message.src_flow, message.dst_flow);
            let word = answer_to(&repr);
            self.answer_of_hand_over(association, to, Kind::NackLock, Flags::empty(), word, Some(code));
        }
        Ok(())
    }

    fn begin_fetch(
        &mut self,
        now: Instant,
        message: &Message<'_>,
        association: u32,
        repr: HandoverRepr,
        ticket: PeerTicket,
    ) -> Result<(), ErrorCode> {
        if self.fetches.has_stayed(ticket, now) {
            return Err(ErrorCode::Overloaded);
        }
        let (giver, taker) = (ticket.peer, HostId(repr.taker));
        let old = self.flows.fetchable(&self.associations, message, association).ok_or(ErrorCode::UnknownFlow)?;
        let is_open = matches!(old.lifecycle, Lifecycle::Established | Lifecycle::HalfClosed);
        if old.app.protocol != TCP || !is_open || !old.has(Marks::CONFIRMED) || old.has(Marks::FAILED) {
            return Err(ErrorCode::Closed);
        }
        let Flow { id: old_id, session, service, app, .. } = *old;
        let is_sealed = old.is_sealed();
        // Of a session with middleboxes the first one's host could lead past the others.
        if taker == giver || old.chain.is_some() {
            return Err(ErrorCode::Refused);
        }
        // Not to the address that the giver says: it could send this host's SYNs to anybody.
        let next_hop = way_to_named_host(self, taker, &service, (TCP, app.destination.port()));
        let next_hop = next_hop.ok_or(ErrorCode::HopLimit)?;
        let peer = self.associations.get(association).map_or(Peer::Own, Association::peer);
        if self.fetches.fetching.check(peer).is_err() || self.flows.len() >= self.config.limits.flows {
            return Err(ErrorCode::Overloaded);
        }
        let holder = Holder { host: giver, act: Act::HandOver };
        let guard = self.locks.acquire(peer, session, holder, now, LEASE).map_err(|_| ErrorCode::Overloaded)?;
        let id = self.grants.fresh_flow_id(&self.flows, &mut self.rng);
        let nonce = self.rng.u64();
        let between = tuple_between(id, app.source.port(), app.destination.port());
        let until = now + LEASE;
        let fetching =
            Fetching { old: old_id, new: id, taker, guard, is_ready: false, held: WaitingPackets::default(), until };
        self.fetches.fetching.insert(peer, ticket, fetching).map_err(|_| ErrorCode::Overloaded)?;
        let mut flow = Flow::new(id, session, service, Role::Initiator, between, now);
        // What is sealed is never given less.
        flow.marks |= if is_sealed { Marks::SECURE } else { Marks::empty() };
        let fetch = Some(Fetch { ticket: ticket.ticket, giver, taker });
        let start = Start {
            nonce,
            next_hop,
            beside: Vec::new(),
            first: Vec::new(),
            full: false,
            related: None,
            pin: None,
            asks: None,
            fetch,
            begin: None,
        };
        self.start_setup(now, flow, start);
        Ok(())
    }

    /// The taker has answered, and is proved: the giver may freeze the connection. The ACK, which proves this host to
    /// the taker, is there before what the giver sends upon this. What the program sends from now on waits for the
    /// word where it goes.
    pub(crate) fn fetch_answered(&mut self, id: FlowId) {
        let Some((ticket, fetching)) = self.fetches.fetching.iter_mut().find(|(_, one)| one.new == id) else { return };
        let ticket = *ticket;
        let old = fetching.old;
        fetching.is_ready = true;
        let is_sealed = |id| self.flows.get(id).is_some_and(Flow::is_sealed);
        if is_sealed(old) && !is_sealed(id) {
            self.abandon_fetch(self.now, ticket, ErrorCode::NoCommonStack);
            return;
        }
        self.flows.set_held(&mut self.queue, old, true);
        self.tell_ready(ticket);
    }

    /// A packet of a program whose session is on its way.
    pub(crate) fn hold_packet(&mut self, id: FlowId, packet: &[u8]) -> AppVerdict {
        let fetching = self.fetches.fetching.values_mut().find(|one| one.old == id);
        if fetching.is_some_and(|one| one.held.push(packet, HELD_BYTES_MAX)) {
            return AppVerdict::Consumed;
        }
        // Its TCP sends it again.
        self.counters.held_full += 1;
        AppVerdict::Drop(DropReason::Full)
    }

    fn tell_ready(&mut self, ticket: PeerTicket) {
        let Some(fetching) = self.fetches.fetching.get(&ticket) else { return };
        let word = handover(ticket.ticket, ticket.peer, fetching.taker);
        self.say_of_hand_over(fetching.old, Kind::AckLock, Flags::empty(), word, None);
    }

    /// The flow to the taker did not come to be.
    pub(crate) fn fetch_failed(&mut self, ticket: PeerTicket, how: Unreachable) {
        let code = match how {
            Unreachable::Prohibited => ErrorCode::NotAllowed,
            Unreachable::Port => ErrorCode::Refused,
            Unreachable::Host => ErrorCode::HopLimit,
        };
        self.abandon_fetch(self.now, ticket, code);
    }

    /// The session stays where it is.
    pub(super) fn abandon_fetch(&mut self, now: Instant, ticket: PeerTicket, code: ErrorCode) {
        let Some(fetching) = self.fetches.fetching.remove(&ticket) else { return };
        let association = self.flows.get(fetching.old).and_then(|flow| self.associations.get(flow.association));
        self.fetches.note_stay(association.map_or(Peer::Own, Association::peer), ticket, now);
        // It may have ended by itself: then it is free already.
        let _ = self.locks.release(fetching.guard, now);
        self.flows.set_held(&mut self.queue, fetching.old, false);
        fetching.held.packets.into_iter().for_each(|packet| guard::send_or_hold(self, fetching.old, packet));
        if self.flows.get(fetching.new).is_some_and(Flow::carries_data) {
            self.say_fail(fetching.new, ErrorCode::Closed);
        }
        self.forget_between(fetching.new);
        self.say_of_hand_over(
            fetching.old,
            if fetching.is_ready { Kind::AckCancel } else { Kind::NackLock },
            Flags::empty(),
            handover(ticket.ticket, ticket.peer, fetching.taker),
            Some(code),
        );
    }

    /// Forgets a flow that no program has had.
    pub(super) fn forget_between(&mut self, id: FlowId) {
        let Some(flow) = self.take_flow(id) else { return };
        if flow.association != 0 {
            self.associations.release_flow(flow.association, flow.role);
            self.queue.update(EntryUpdate::Remove { flow: id, reason: RemoveReason::HandedOver });
        }
    }

    /// A giver does not know what became of its hand-over.
    pub(super) fn asked_for_word(&mut self, message: &Verified<'_>, repr: HandoverRepr) -> Result<(), DropReason> {
        let association = message.association();
        let ticket = self.associations.ticket_of(association, &repr)?;
        let is_fetched = self.fetches.fetching.get(&ticket).is_some_and(|one| one.old == message.dst_flow);
        // Otherwise it is still open, and the giver hears of it.
        if !is_fetched || self.flows.fetchable(&self.associations, message, association).is_none() {
            self.give_word(message, association, &repr, ticket);
        }
        Ok(())
    }

    /// A giver wants to keep its connection.
    pub(super) fn asked_to_leave(
        &mut self,
        now: Instant,
        message: &Verified<'_>,
        repr: HandoverRepr,
    ) -> Result<(), DropReason> {
        let association = message.association();
        let ticket = self.associations.ticket_of(association, &repr)?;
        let is_its = self.flows.fetchable(&self.associations, message, association).is_some();
        if is_its && self.fetches.fetching.get(&ticket).is_some_and(|one| one.old == message.dst_flow) {
            self.abandon_fetch(now, ticket, ErrorCode::Closed);
        }
        self.give_word(message, association, &repr, ticket);
        Ok(())
    }

    /// The connection is at the giver as long as its flow is here: the flow goes when this host commits, and with it
    /// all memory of the hand-over that this answer needs. That it stays is said once and for all.
    fn give_word(&mut self, message: &Message<'_>, association: u32, repr: &HandoverRepr, ticket: PeerTicket) {
        let stays = self.flows.fetchable(&self.associations, message, association).is_some();
        if stays {
            let peer = self.associations.get(association).map_or(Peer::Own, Association::peer);
            self.fetches.note_stay(peer, ticket, self.now);
        }
        let flags = if stays { Flags::empty() } else { Flags::CONFIRM };
        let to = (message.src_flow, message.dst_flow);
        self.answer_of_hand_over(association, to, Kind::AckCancel, flags, answer_to(repr), None);
    }

    /// The taker has the connection.
    pub(super) fn hear_ready(
        &mut self,
        now: Instant,
        message: &Verified<'_>,
        repr: HandoverRepr,
    ) -> Result<(), DropReason> {
        let association = message.association();
        // The taker says whose ticket it is; that this is its flow is checked below.
        let ticket = PeerTicket { peer: HostId(repr.giver), ticket: Ticket(repr.ticket) };
        let id = message.dst_flow;
        let own = self.flows.fetchable(&self.associations, message, association);
        let is_its = own.is_some();
        let is_fetched = own.and_then(Flow::fetched) == Some(ticket);
        let Some(fetching) = self.fetches.fetching.get(&ticket) else {
            // The confirmation was lost, or nothing was committed: the flow is there, or it is not.
            if !is_its {
                let fail = (message.src_flow, id);
                self.fail_of_hand_over(association, fail, repr);
                return Err(DropReason::UnknownFlow);
            }
            if !is_fetched {
                return Err(DropReason::Unexpected);
            }
            self.say_of_hand_over(id, Kind::RsynDone, Flags::CONFIRM, repr, None);
            return Ok(());
        };
        let holds = self.locks.is_held_by(fetching.guard, now);
        if !is_its || fetching.new != id || !fetching.is_ready {
            return Err(DropReason::Unexpected);
        }
        if !holds || self.flows.get(fetching.old).is_none() {
            // Too late, or the client's connection has ended meanwhile.
            self.abandon_fetch(now, ticket, ErrorCode::Closed);
            return Ok(());
        }
        // A taker that has the connection had the ACK, whether its confirmation has come or is lost.
        self.handle_confirm(now, message, association)?;
        self.commit(now, ticket);
        self.say_of_hand_over(id, Kind::RsynDone, Flags::CONFIRM, repr, None);
        Ok(())
    }

    fn fail_of_hand_over(&mut self, association: u32, flows: (FlowId, FlowId), repr: HandoverRepr) {
        self.answer_of_hand_over(association, flows, Kind::Fail, Flags::empty(), repr, Some(ErrorCode::UnknownFlow));
    }

    /// From here on the program's packets go to the taker.
    fn commit(&mut self, now: Instant, ticket: PeerTicket) {
        let Some(fetching) = self.fetches.fetching.remove(&ticket) else { return };
        let _ = self.locks.release(fetching.guard, now);
        let Some(old) = self.flows.get(fetching.old) else { return };
        let Flow { app, lifecycle, since, closed_at, .. } = *old;
        let source = old.source.clone();
        let kept = old.marks & (Marks::FIN_EGRESS | Marks::FIN_INGRESS | Marks::STRIPES);
        let word = handover(ticket.ticket, ticket.peer, fetching.taker);
        self.say_of_hand_over(fetching.old, Kind::AckCancel, Flags::CONFIRM, word, None);
        self.carry_share(fetching.old, fetching.new);
        self.remove_flow(fetching.old, RemoveReason::HandedOver);
        self.flows.set_tuple(fetching.new, app);
        let Some(new) = self.flows.get_mut(fetching.new) else { return };
        new.lifecycle = lifecycle;
        new.since = since;
        new.closed_at = closed_at;
        new.active = now;
        new.source = source;
        new.marks |= kept;
        new.set_fetched(Some(ticket));
        self.flows.begin_direct(&self.fetches, &mut self.associations, now, fetching.new, false);
        self.begin_rules(now, fetching.new);
        self.flows.install_again(&mut self.queue, fetching.new);
        fetching.held.packets.into_iter().for_each(|packet| guard::send_or_hold(self, fetching.new, packet));
        self.flows.begin_pinholes(&mut self.ports, &mut self.queue, now, fetching.new);
        self.begin_policy(now, fetching.new);
        self.events.push(Event::FlowOpened(fetching.new));
    }

    /// Sessions whose givers or takers have gone silent stay where they are.
    pub(super) fn fetching_due(&mut self, now: Instant) {
        let due: Vec<PeerTicket> =
            self.fetches.fetching.iter().filter(|(_, one)| one.until <= now).map(|(ticket, _)| *ticket).collect();
        due.into_iter().for_each(|ticket| self.abandon_fetch(now, ticket, ErrorCode::Closed));
    }
}

/// What is answered to a message about a hand-over: the same, without its address.
fn answer_to(repr: &HandoverRepr) -> HandoverRepr {
    handover(Ticket(repr.ticket), HostId(repr.giver), HostId(repr.taker))
}

impl AssociationTable {
    /// The ticket of a giver, who must be the host that it says it is.
    fn ticket_of(&self, association: u32, repr: &HandoverRepr) -> Result<PeerTicket, DropReason> {
        let peer = self.get(association).ok_or(DropReason::UnknownAssociation)?.host;
        let is_giver = peer.0 == repr.giver;
        is_giver.then_some(PeerTicket { peer, ticket: Ticket(repr.ticket) }).ok_or(DropReason::Unexpected)
    }
}

impl FlowTable {
    /// The flow that a message about a hand-over is of, if this host is the one that began it, with this peer.
    fn fetchable(&self, associations: &AssociationTable, message: &Message<'_>, association: u32) -> Option<&Flow> {
        self.get(message.dst_flow)
            .filter(|flow| flow.role == Role::Initiator && associations.is_same_peer(flow.association, association))
    }

    fn set_held(&mut self, queue: &mut OutputQueue, id: FlowId, is_held: bool) {
        if let Some(flow) = self.get_mut(id) {
            flow.is_held = is_held;
            self.install_again(queue, id);
        }
    }
}
