//! Hand-over of a connection to another host (DESIGN §10, class b; SCAFFOLD §4.2.2): three hosts, and the word of one.
//!
//! The *giver*'s program has the connection, the *initiator*'s is its client, and the *taker* is another instance of
//! the same name. The giver asks the initiator to fetch the session; the initiator sets a flow of the same session up
//! with the taker, as every other flow is: so its certificate, allow list, ports and translators are those of a
//! connection. Then the giver's connection is frozen and goes to the taker, and once the taker has it the initiator
//! commits: from that moment on its program's packets go to the taker, and no others do. Whoever of the two does not
//! know where the connection is asks the initiator.
//!
//! The ticket only tells hand-overs apart. What counts is who has proved its key with it: the initiator fetches a
//! session from the one host that it has it with, and the taker awaits a client together with its host and session,
//! which the giver has named to it.
//!
//! While the connection is frozen, nothing of it leaves the giver: the flow cache has suspended it, so that what its
//! TCP still takes is never acknowledged, and comes again to the taker. Numbers, keys and counters wait in the cache
//! for the connection that comes to stay (docs/decisions/0117).
//!
//! [`giver`], [`initiator`] and [`taker`] are the three ends.

mod giver;
mod initiator;
mod taker;

use alloc::collections::BTreeMap;
use alloc::string::String;
use core::net::{IpAddr, Ipv6Addr, SocketAddr};
use core::time::Duration;

use margay_wire::{ErrorCode, ErrorRepr, Extension, Flags, FlowId, HandoverRepr, Kind};

use crate::association::auth::Verified;
use crate::association::draft::Draft;
use crate::machine::sal::Sal;
use crate::session::hand_over::{PeerTicket, Ticket};
use crate::types::drop_reason::DropReason;
use crate::types::fair_table::{FairTable, Peer};
use crate::types::key::HostId;
use crate::types::time::Instant;
use crate::types::tuple::Tuple;

pub use giver::{GIVING, GivingEvent, GivingState, LeavingFlow};
pub(crate) use initiator::Fetch;
pub(crate) use taker::check_fetch;

const TCP: u8 = 6;
/// Hand-overs at once that peers ask for, in each role. What this host gives away is not bounded here: it is no more
/// than it has connections.
pub const HAND_OVERS_MAX: usize = 4096;
/// How long one may take before the connection stays, or is lost where nobody can say where it is.
const LEASE: Duration = crate::session::LEASE_MAX;
/// For so long what comes late to the giver is dropped, and not answered.
const PARTED: Duration = Duration::from_secs(2);

/// Why a connection cannot be handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandOverError {
    /// No such flow is served here, or it is not open.
    #[error("no open connection of a service here has this number; `margay flow list` shows them")]
    NotOpen,
    /// Datagrams have no connection.
    #[error("only TCP connections are handed over")]
    NotTcp,
    /// Its packets pass boxes.
    #[error("the connection goes through a chain of boxes, and stays where it is while it does")]
    Chained,
    /// To itself.
    #[error("the connection is on this host already")]
    Here,
    /// One is under way.
    #[error("this connection is being handed over already")]
    Busy,
}

/// All hand-overs that this host has a part in.
pub(crate) struct Fetches {
    giving: BTreeMap<Ticket, giver::Giving>,
    fetching: FairTable<PeerTicket, initiator::Fetching>,
    awaited: FairTable<PeerTicket, taker::Awaited>,
    /// Initiator: hand-overs of which it has said that the connection stays, and until when. A giver that asks about
    /// more than its share has its own oldest forgotten.
    stayed: FairTable<PeerTicket, Instant>,
}

impl Default for Fetches {
    fn default() -> Self {
        Self {
            giving: BTreeMap::new(),
            fetching: FairTable::new(HAND_OVERS_MAX, HAND_OVERS_MAX),
            awaited: FairTable::new(HAND_OVERS_MAX, HAND_OVERS_MAX),
            stayed: FairTable::new(HAND_OVERS_MAX, HAND_OVERS_MAX),
        }
    }
}

impl Fetches {
    /// How often a peer's hand-over found no room.
    pub const fn refused(&self) -> u64 {
        self.fetching.refused() + self.awaited.refused()
    }

    /// When something is due.
    pub fn next_deadline(&self) -> Option<Instant> {
        let giving = self.giving.values().map(|one| one.due());
        let fetching = self.fetching.values().map(|one| one.until);
        let awaited = self.awaited.values().map(|one| one.due());
        giving.chain(fetching).chain(awaited).min()
    }

    /// Whether no program has the flow: not yet at the taker or the initiator, or no more at the giver.
    pub fn is_between(&self, id: FlowId) -> bool {
        self.fetching.values().any(|one| one.new == id)
            || self.awaited.values().any(|one| one.flow == id)
            || self.giving.values().any(|one| one.flow == id && one.is_frozen())
    }

    /// This host says that the connection stays. What the giver has asked for before may come after it: if the session
    /// were fetched upon that, the connection could be at both.
    fn note_stay(&mut self, peer: Peer, ticket: PeerTicket, now: Instant) {
        if !self.has_stayed(ticket, now) {
            self.stayed.remove(&ticket);
            self.stayed.displace(peer, ticket, now + LEASE);
        }
    }

    /// Whether nothing is begun with a ticket any more.
    fn has_stayed(&self, ticket: PeerTicket, now: Instant) -> bool {
        self.stayed.get(&ticket).is_some_and(|until| now < *until)
    }

    fn is_empty(&self) -> bool {
        self.giving.is_empty() && self.fetching.is_empty() && self.awaited.is_empty()
    }
}

/// A five-tuple that no packet carries: of an initiator's flow until its program's packets go by it.
fn tuple_between(id: FlowId, client_port: u16, service_port: u16) -> Tuple {
    let number = IpAddr::V6(Ipv6Addr::from(u128::from(id.0)));
    Tuple {
        protocol: TCP,
        source: SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), client_port),
        destination: SocketAddr::new(number, service_port),
    }
}

/// What HANDOVER says where no address is told.
fn handover(ticket: Ticket, giver: HostId, taker: HostId) -> HandoverRepr {
    let nowhere = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0);
    HandoverRepr { ticket: ticket.0, giver: giver.0, taker: taker.0, address: nowhere }
}

impl Sal {
    /// Sends one message about a hand-over, of this flow of an association, to the peer's flow.
    fn say_of_hand_over(&mut self, id: FlowId, kind: Kind, flags: Flags, repr: HandoverRepr, code: Option<ErrorCode>) {
        let Some(flow) = self.flows.get(id) else { return };
        let (association, peer_flow) = (flow.association, flow.peer_flow);
        self.answer_of_hand_over(association, (peer_flow, id), kind, flags, repr, code);
    }

    /// The same, where this host may have no such flow any more.
    fn answer_of_hand_over(
        &mut self,
        association: u32,
        (to, from): (FlowId, FlowId),
        kind: Kind,
        flags: Flags,
        repr: HandoverRepr,
        code: Option<ErrorCode>,
    ) {
        let mut extensions = alloc::vec![Extension::Handover(repr)];
        extensions.extend(code.map(|code| Extension::Error(ErrorRepr { code, text: "" })));
        let mut draft = Draft::new(kind, to, from);
        draft.flags = flags;
        draft.extensions = &extensions;
        self.seal_and_send(association, draft);
    }

    /// A message of the lock of a session: hand-overs alone ask for it.
    pub(crate) fn handle_lock(&mut self, now: Instant, message: &Verified<'_>) -> Result<(), DropReason> {
        let repr = message.handover().ok_or(DropReason::Unexpected)?;
        match message.kind {
            Kind::RequestLock if repr.address.port() != 0 => self.asked_to_fetch(now, message, repr),
            Kind::RequestLock => self.asked_for_word(message, repr),
            Kind::CancelLock => self.asked_to_leave(now, message, repr),
            _ => self.hear_of_lock(now, message, &repr),
        }
    }

    /// A flow ends. True where nobody else has to see to that: no program has it, or its fate is the initiator's word.
    pub(crate) fn ends_between(&mut self, now: Instant, id: FlowId) -> bool {
        if self.fetches.is_empty() {
            return false;
        }
        // The client's connection is over: nothing is left to fetch.
        let of_old = self.fetches.fetching.iter().find(|(_, one)| one.old == id).map(|(ticket, _)| *ticket);
        of_old.into_iter().for_each(|ticket| self.abandon_fetch(now, ticket, ErrorCode::Closed));
        let pending = self.fetches.fetching.iter().find(|(_, one)| one.new == id).map(|(ticket, _)| *ticket);
        let awaited = self.fetches.awaited.iter().find(|(_, one)| one.flow == id).map(|(ticket, _)| *ticket);
        let is_frozen = self.fetches.giving.values().any(|one| one.flow == id && one.is_frozen());
        pending.into_iter().for_each(|ticket| self.abandon_fetch(now, ticket, ErrorCode::Closed));
        awaited.into_iter().for_each(|ticket| self.drop_awaited(ticket));
        pending.is_some() || awaited.is_some() || is_frozen
    }

    /// What is due of all hand-overs.
    pub(crate) fn fetches_due(&mut self, now: Instant) {
        if self.fetches.is_empty() {
            return;
        }
        self.locks.expire(now);
        self.giving_due(now);
        self.fetching_due(now);
        self.awaited_due(now);
    }
}

/// What people are told of a refusal.
pub fn refusal_text(code: ErrorCode) -> String {
    let text = match code {
        ErrorCode::UnknownFlow => "the client's host does not know the connection",
        ErrorCode::Overloaded => "the client's host changes this connection already, or too many others; try again",
        ErrorCode::NotAllowed => "the client's host may not connect to the taker; the operator's `allow` list decides",
        ErrorCode::NoService | ErrorCode::Refused => "the taker does not serve the name to the client's host",
        ErrorCode::BadCertificate => "the taker may not speak for the name; its certificates say so",
        ErrorCode::Closed => "the client's connection has ended meanwhile",
        ErrorCode::Drained => "the taker is drained, and takes nothing new",
        ErrorCode::NoCommonStack => "the taker cannot carry the connection as an end of it demands",
        _ => "the client's host could not reach the taker; `margay check` there looks for the cause",
    };
    text.into()
}

#[cfg(test)]
mod test;
