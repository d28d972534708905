//! The end that gives a connection away.

use alloc::vec::Vec;
use core::net::SocketAddr;

use margay_wire::{ErrorCode, Flags, FlowId, HandoverRepr, Kind, SessionId};

use super::{HandOverError, LEASE, PARTED, TCP, handover};
use crate::act::fetch::Fetches;
use crate::act::setup::{SETUP_TIMEOUT, retry_after};
use crate::association::auth::Verified;
use crate::cache::entry::{EntryUpdate, RemoveReason};
use crate::cache::queue::OutputQueue;
use crate::machine::sal::Sal;
use crate::session::event::Event;
use crate::session::event::EventQueue;
use crate::session::flow::Flow;
use crate::session::hand_over::{HandOver, Ticket};
use crate::types::drop_reason::DropReason;
use crate::types::key::HostId;
use crate::types::name::ServiceId;
use crate::types::role::{Lifecycle, Role};
use crate::types::state::Machine;
use crate::types::time::Instant;
use crate::types::tuple::Tuple;

/// How far a giver is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GivingState {
    /// The initiator is asked to fetch the session. Nothing is frozen.
    Asking,
    /// The initiator waits; the connection is frozen, and on its way to the taker.
    Frozen,
    /// The taker has it. The initiator's word is asked for.
    Waiting,
    /// The connection is to stay; the initiator's word is asked for.
    Cancelling,
    /// It has gone. What comes late is dropped.
    Parted,
    /// It is over.
    Over,
}

/// What a giver hears, from its initiator or from the program's side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GivingEvent {
    /// The initiator waits.
    Granted,
    /// The initiator does not fetch it.
    Refused,
    /// The taker has all of it.
    Sent,
    /// It is to stay.
    Cancelled,
    /// The initiator's word: it stays.
    Stays,
    /// The initiator's word: it has gone.
    Gone,
    /// Nobody has said anything for as long as the state lasts.
    TimeOut,
}

/// The declared life of a hand-over at its giver.
pub const GIVING: Machine<GivingState, GivingEvent> = {
    use GivingEvent::{Cancelled, Gone, Granted, Refused, Sent, Stays, TimeOut};
    use GivingState::{Asking, Cancelling, Frozen, Over, Parted, Waiting};
    Machine {
        name: "hand-over at its giver",
        states: &[Asking, Frozen, Waiting, Cancelling, Parted, Over],
        events: &[Granted, Refused, Sent, Cancelled, Stays, Gone, TimeOut],
        transitions: &[
            (Asking, Granted, Frozen),
            (Asking, Refused, Over),
            (Asking, Cancelled, Cancelling),
            (Asking, TimeOut, Cancelling),
            (Frozen, Sent, Waiting),
            (Frozen, Cancelled, Cancelling),
            (Frozen, Stays, Over),
            (Frozen, Gone, Parted),
            (Frozen, TimeOut, Cancelling),
            (Waiting, Cancelled, Cancelling),
            (Waiting, Stays, Over),
            (Waiting, Gone, Parted),
            (Waiting, TimeOut, Over),
            (Cancelling, Stays, Over),
            (Cancelling, Gone, Parted),
            (Cancelling, TimeOut, Over),
            (Parted, TimeOut, Over),
        ],
    }
};

/// A connection that no program of this host has any more, since it goes to another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeavingFlow {
    /// This host's number of the flow.
    pub flow: FlowId,
    /// Its service.
    pub service: ServiceId,
    /// Whether the other host has it; otherwise it may come to stay.
    pub has_gone: bool,
}

/// One connection on its way.
#[derive(Debug)]
pub(crate) struct Giving {
    pub flow: FlowId,
    taker: HostId,
    at: SocketAddr,
    state: GivingState,
    /// Whether the entry has been taken out of the cache.
    was_frozen: bool,
    tries: u32,
    next: Instant,
    /// When the state is over, whatever is heard.
    until: Instant,
}

impl Giving {
    pub fn due(&self) -> Instant {
        self.next.min(self.until)
    }

    /// Whether its TCP must not be heard of any more.
    pub fn is_frozen(&self) -> bool {
        self.was_frozen
    }
}

impl Sal {
    /// The flow and the name by which a client has come to a program here, by the program's five-tuple.
    pub fn served_flow(&self, app: &Tuple) -> Option<(FlowId, ServiceId)> {
        let flow = self.flows.by_tuple(app).and_then(|id| self.flows.get(id))?;
        (flow.role == Role::Responder && flow.carries_data()).then_some((flow.id, flow.service))
    }

    /// The connections that are frozen to go to another host, and for two seconds more those that have gone. In no
    /// order.
    pub fn leaving_flows(&self) -> Vec<LeavingFlow> {
        let leaving = self.fetches.giving.values().filter(|one| one.is_frozen());
        let told = leaving.filter_map(|one| {
            let service = self.flows.get(one.flow)?.service;
            Some(LeavingFlow { flow: one.flow, service, has_gone: one.state == GivingState::Parted })
        });
        told.collect()
    }

    /// Asks the initiator of a flow that a program here serves to fetch its session from `taker`, which hears SAL at
    /// `at`. What becomes of that comes as events.
    ///
    /// # Errors
    ///
    /// Why not; nothing has changed.
    pub fn hand_over(
        &mut self,
        now: Instant,
        flow: FlowId,
        ticket: Ticket,
        taker: HostId,
        at: SocketAddr,
    ) -> Result<(), HandOverError> {
        self.now = now;
        let known = self.flows.get(flow).filter(|flow| flow.role == Role::Responder).ok_or(HandOverError::NotOpen)?;
        if known.app.protocol != TCP {
            return Err(HandOverError::NotTcp);
        }
        if known.chain.is_some() {
            return Err(HandOverError::Chained);
        }
        if !matches!(known.lifecycle, Lifecycle::Established | Lifecycle::HalfClosed) || !known.carries_data() {
            return Err(HandOverError::NotOpen);
        }
        if taker == self.config.host_id() {
            return Err(HandOverError::Here);
        }
        let giving = &self.fetches.giving;
        if giving.contains_key(&ticket) || giving.values().any(|one| one.flow == flow) {
            return Err(HandOverError::Busy);
        }
        let one = Giving {
            flow,
            taker,
            at,
            state: GivingState::Asking,
            was_frozen: false,
            tries: 0,
            next: now,
            // The initiator has its own time to reach the taker.
            until: now + SETUP_TIMEOUT + SETUP_TIMEOUT,
        };
        self.fetches.giving.insert(ticket, one);
        self.giving_due(now);
        Ok(())
    }

    /// The taker has the whole connection: from now on the initiator is asked for its word.
    pub fn await_word(&mut self, now: Instant, ticket: Ticket) {
        self.now = now;
        self.giving_event(now, ticket, GivingEvent::Sent);
    }

    /// The connection is to stay. It does unless the initiator has committed; the answer comes as an event.
    pub fn cancel_hand_over(&mut self, now: Instant, ticket: Ticket) {
        self.now = now;
        self.giving_event(now, ticket, GivingEvent::Cancelled);
        self.giving_due(now);
    }

    /// The initiator says something of a hand-over.
    pub(super) fn hear_of_lock(
        &mut self,
        now: Instant,
        message: &Verified<'_>,
        repr: &HandoverRepr,
    ) -> Result<(), DropReason> {
        let association = message.association();
        let ticket = Ticket(repr.ticket);
        let giving = self.fetches.giving.get(&ticket).ok_or(DropReason::Unexpected)?;
        if repr.taker != giving.taker.0 {
            return Err(DropReason::Unexpected);
        }
        let is_its = self.flows.get(giving.flow).is_some_and(|flow| {
            flow.id == message.dst_flow && self.associations.is_same_peer(flow.association, association)
        });
        if !is_its {
            return Err(DropReason::Unexpected);
        }
        let event = match (message.kind, message.flags.contains(Flags::CONFIRM)) {
            (Kind::AckLock, _) => GivingEvent::Granted,
            (Kind::NackLock, _) => GivingEvent::Refused,
            (Kind::AckCancel, true) => GivingEvent::Gone,
            (Kind::AckCancel, false) => GivingEvent::Stays,
            _ => return Err(DropReason::Unexpected),
        };
        let code = message.error().map_or(ErrorCode::Closed, |error| error.code);
        if event == GivingEvent::Refused && giving.state == GivingState::Asking {
            self.events.push(Event::HandOver(HandOver::Refused { ticket, code }));
        }
        self.giving_event(now, ticket, event);
        Ok(())
    }

    /// What is not listed changes nothing: answers come twice, and late.
    fn giving_event(&mut self, now: Instant, ticket: Ticket, event: GivingEvent) {
        let Some(giving) = self.fetches.giving.get_mut(&ticket) else { return };
        let before = giving.state;
        let Ok(after) = GIVING.after(before, event) else { return };
        giving.state = after;
        giving.tries = 0;
        giving.next = now;
        let Giving { flow, was_frozen, .. } = *giving;
        giving.until = match after {
            GivingState::Parted => now + PARTED,
            _ => now + LEASE,
        };
        match (before, after) {
            (_, GivingState::Frozen) => self.fetches.freeze(&mut self.queue, &mut self.events, ticket, flow),
            (_, GivingState::Parted) => self.events.push(Event::HandOver(HandOver::Gone(ticket))),
            (GivingState::Parted, GivingState::Over) => self.end_giving(ticket, RemoveReason::HandedOver),
            (_, GivingState::Over) if event == GivingEvent::TimeOut => {
                self.events.push(Event::HandOver(HandOver::Lost(ticket)));
                if was_frozen {
                    self.end_giving(ticket, RemoveReason::PeerFailed);
                } else {
                    self.fetches.giving.remove(&ticket);
                }
            }
            (_, GivingState::Over) => {
                self.fetches.giving.remove(&ticket);
                if event == GivingEvent::Stays {
                    self.events.push(Event::HandOver(HandOver::Stays(ticket)));
                }
                self.queue.thaw(flow);
                if was_frozen {
                    self.flows.install_again(&mut self.queue, flow);
                }
            }
            _ => {}
        }
    }

    fn end_giving(&mut self, ticket: Ticket, reason: RemoveReason) {
        let Some(giving) = self.fetches.giving.remove(&ticket) else { return };
        self.queue.thaw(giving.flow);
        self.remove_flow(giving.flow, reason);
    }

    /// The flow that serves a session here under the name that was asked for, the one of this initiator's number before
    /// others. One that has gone to another host is forgotten: the session comes back before what it has left behind is
    /// over.
    pub(crate) fn flow_of_session(
        &mut self,
        session: SessionId,
        asked: &ServiceId,
        initiator_flow: FlowId,
    ) -> Option<FlowId> {
        let serves = |flow: &&Flow| flow.role == Role::Responder && flow.asked() == *asked;
        let of_initiator = |flow: &&Flow| serves(flow) && flow.peer_flow == initiator_flow;
        let any = self.flows.of_session(session).find(serves);
        let id = self.flows.of_session(session).find(of_initiator).or(any)?.id;
        let is_it = |one: &Giving| one.flow == id && one.state == GivingState::Parted;
        let parted = self.fetches.giving.iter().find(|(_, one)| is_it(one)).map(|(ticket, _)| *ticket);
        parted.into_iter().for_each(|ticket| self.end_giving(ticket, RemoveReason::HandedOver));
        parted.is_none().then_some(id)
    }

    /// Asks the initiators that have not answered yet.
    pub(super) fn giving_due(&mut self, now: Instant) {
        let due = |one: &Giving| one.due() <= now;
        let due: Vec<Ticket> =
            self.fetches.giving.iter().filter(|(_, one)| due(one)).map(|(ticket, _)| *ticket).collect();
        for ticket in due {
            if self.fetches.giving.get(&ticket).is_some_and(|one| one.until <= now) {
                self.giving_event(now, ticket, GivingEvent::TimeOut);
            }
            let Some(giving) = self.fetches.giving.get_mut(&ticket) else { continue };
            if giving.next > now {
                continue;
            }
            giving.next = now + retry_after(giving.tries);
            giving.tries += 1;
            let Giving { flow, state, taker, at, .. } = *giving;
            let word = handover(ticket, self.config.host_id(), taker);
            let request = HandoverRepr { address: at, ..word };
            match state {
                GivingState::Asking => self.say_of_hand_over(flow, Kind::RequestLock, Flags::empty(), request, None),
                GivingState::Waiting => self.say_of_hand_over(flow, Kind::RequestLock, Flags::empty(), word, None),
                GivingState::Cancelling => self.say_of_hand_over(flow, Kind::CancelLock, Flags::empty(), word, None),
                GivingState::Frozen | GivingState::Parted | GivingState::Over => {}
            }
        }
    }
}

impl Fetches {
    /// From here on nothing of the flow leaves this host, nor reaches its socket.
    fn freeze(&mut self, queue: &mut OutputQueue, events: &mut EventQueue, ticket: Ticket, flow: FlowId) {
        if let Some(giving) = self.giving.get_mut(&ticket) {
            giving.was_frozen = true;
        }
        // Not removed: where the connection comes to stay, its keys are the same and their numbers go on.
        queue.update(EntryUpdate::Suspend(flow));
        queue.freeze(flow);
        events.push(Event::HandOver(HandOver::Fetched(ticket)));
    }
}
