//! The end that takes a connection over.

use alloc::vec::Vec;

use margay_wire::{ErrorCode, Flags, FlowId, HandoverRepr, Kind, Message};

use super::{LEASE, handover};
use crate::act::setup::retry_after;
use crate::association::auth::Verified;
use crate::cache::entry::RemoveReason;
use crate::machine::sal::Sal;
use crate::session::event::Event;
use crate::session::flow::FlowTable;
use crate::session::flow::{Flow, Setup};
use crate::session::hand_over::{HandOver, HandedSession, PeerTicket, Ticket};
use crate::table::{Demux, HAND_OVER_PORT};
use crate::types::drop_reason::DropReason;
use crate::types::key::HostId;
use crate::types::role::Role;
use crate::types::time::Instant;

/// A flow that waits for its connection, or for the initiator's word.
#[derive(Debug)]
pub(crate) struct Awaited {
    pub flow: FlowId,
    giver: HostId,
    /// When the initiator is told again that the connection is here; `None` before it is.
    next: Option<Instant>,
    tries: u32,
    until: Instant,
}

impl Awaited {
    pub fn due(&self) -> Instant {
        self.next.map_or(self.until, |next| next.min(self.until))
    }
}

impl Sal {
    /// The initiator says that its session is at another host, and is proved: what is here of it is of the past.
    fn forget_left_behind(&mut self, id: FlowId) {
        let Some((session, association)) = self.flows.get(id).map(|flow| (flow.session, flow.association)) else {
            return;
        };
        let is_of_peer = |flow: &&Flow| flow.id != id && self.associations.is_same_peer(flow.association, association);
        // The initiator's own flow, where that is this host, is of the session, too.
        let is_served = |flow: &&Flow| flow.role == Role::Responder && is_of_peer(flow);
        let is_half_open = |flow: &Flow| matches!(flow.setup, Setup::Responder(_));
        let of_session = self.flows.of_session(session).filter(is_served);
        let left: Vec<(FlowId, bool)> = of_session.map(|flow| (flow.id, is_half_open(flow))).collect();
        for (old, is_half_open) in left {
            let awaited = self.fetches.awaited.iter().find(|(_, one)| one.flow == old).map(|(ticket, _)| *ticket);
            match awaited {
                Some(ticket) => self.drop_awaited(ticket),
                None if is_half_open => self.drop_half_open(old),
                None => self.remove_flow(old, RemoveReason::HandedOver),
            }
        }
    }

    /// The initiator's flow is proved: whoever keeps sockets hears of it.
    pub(crate) fn await_connection(&mut self, now: Instant, id: FlowId, repr: &HandoverRepr) {
        let Some(Flow { association, session, service, port, app, .. }) = self.flows.get(id) else { return };
        let Some(client) = self.associations.get(*association) else { return };
        let (peer, client) = (client.peer(), client.host);
        let ticket = PeerTicket { peer: client, ticket: Ticket(repr.ticket) };
        let (giver, app) = (HostId(repr.giver), *app);
        let of = HandedSession { giver, client, session: *session, service: *service, port: *port };
        if self.fetches.awaited.contains_key(&ticket) || self.fetches.awaited.check(peer).is_err() {
            self.say_fail(id, ErrorCode::Overloaded);
            self.forget_between(id);
            return;
        }
        self.forget_left_behind(id);
        let awaited = Awaited { flow: id, giver, next: None, tries: 0, until: now + LEASE };
        // There is room.
        let _ = self.fetches.awaited.insert(peer, ticket, awaited);
        self.events.push(Event::HandOver(HandOver::Awaits { ticket, of, app }));
    }

    /// The connection is restored here, and frozen: the initiator may commit. Where no initiator waits for it under
    /// this ticket, it is dropped at once, as an event says.
    pub fn take_over(&mut self, now: Instant, ticket: PeerTicket) {
        self.now = now;
        let Some(awaited) = self.fetches.awaited.get_mut(&ticket) else {
            self.events.push(Event::HandOver(HandOver::Dropped(ticket)));
            return;
        };
        awaited.next = Some(now);
        awaited.until = now + LEASE;
        self.awaited_due(now);
    }

    /// The connection is not taken. False: it was not awaited any more, since it is here, or the client has let go.
    pub fn refuse_hand_over(&mut self, now: Instant, ticket: PeerTicket) -> bool {
        self.now = now;
        let Some(awaited) = self.fetches.awaited.remove(&ticket) else { return false };
        self.say_fail(awaited.flow, ErrorCode::Refused);
        self.forget_between(awaited.flow);
        true
    }

    /// RSYN-DONE of a hand-over: at the initiator, the taker has the connection; at the taker, the initiator's word.
    pub(crate) fn handle_hand_over_done(&mut self, now: Instant, message: &Verified<'_>) -> Result<(), DropReason> {
        let association = message.association();
        let repr = message.handover().ok_or(DropReason::Unexpected)?;
        if !message.flags.contains(Flags::CONFIRM) {
            return self.hear_ready(now, message, repr);
        }
        let peer = self.associations.get(association).ok_or(DropReason::UnknownAssociation)?.host;
        let ticket = PeerTicket { peer, ticket: Ticket(repr.ticket) };
        let awaited = self.fetches.awaited.get(&ticket).ok_or(DropReason::Unexpected)?;
        let id = awaited.flow;
        let is_its = self.flows.get(id).is_some_and(|flow| {
            id == message.dst_flow && self.associations.is_same_peer(flow.association, association)
        });
        if !is_its || awaited.next.is_none() {
            return Err(DropReason::Unexpected);
        }
        self.fetches.awaited.remove(&ticket);
        self.flows.begin_direct(&self.fetches, &mut self.associations, now, id, false);
        self.begin_rules(now, id);
        self.flows.install_again(&mut self.queue, id);
        self.begin_policy(now, id);
        self.events.push(Event::FlowOpened(id));
        self.events.push(Event::HandOver(HandOver::Taken(ticket)));
        Ok(())
    }

    /// The initiator does not wait any more, or nobody has brought the connection.
    pub(super) fn drop_awaited(&mut self, ticket: PeerTicket) {
        let Some(awaited) = self.fetches.awaited.remove(&ticket) else { return };
        self.forget_between(awaited.flow);
        self.events.push(Event::HandOver(HandOver::Dropped(ticket)));
    }

    pub(super) fn awaited_due(&mut self, now: Instant) {
        let due: Vec<PeerTicket> =
            self.fetches.awaited.iter().filter(|(_, one)| one.due() <= now).map(|(ticket, _)| *ticket).collect();
        for ticket in due {
            let Some(awaited) = self.fetches.awaited.get_mut(&ticket) else { continue };
            let id = awaited.flow;
            if awaited.until <= now {
                self.say_fail(id, ErrorCode::Closed);
                self.drop_awaited(ticket);
                continue;
            }
            awaited.next = Some(now + retry_after(awaited.tries));
            awaited.tries += 1;
            let own = handover(ticket.ticket, awaited.giver, self.config.host_id());
            self.say_of_hand_over(id, Kind::RsynDone, Flags::empty(), own, None);
        }
    }
}

impl FlowTable {
    /// A session is to come to this host, and has a flow here already: of an earlier stay, which ended while the agent
    /// was dead, or of a hand-over that the initiator has given up since. It stays until the initiator is proved.
    pub(crate) fn may_be_left_behind(&self, id: FlowId, message: &Message<'_>) -> bool {
        message.handover().is_some() && self.get(id).is_some_and(|flow| flow.peer_flow != message.src_flow)
    }
}

/// Whether a SYN may ask for a session that comes from another host: this host is the one that it names, and the
/// session comes to a port of the service, by whose allow list it is admitted. The agents' own port has none.
pub(crate) fn check_fetch(message: &Message<'_>, demux: &Demux, own: HostId) -> Result<(), DropReason> {
    let Some(repr) = message.handover() else { return Ok(()) };
    if demux.service_port == Some(HAND_OVER_PORT) || repr.taker != own.0 || repr.giver == own.0 {
        return Err(DropReason::NotAllowed);
    }
    Ok(())
}
