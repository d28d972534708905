//! Flows: one session of an application each, found by identifier, by five-tuple or by session.
//!
//! DESIGN §7. A flow is kept in one place, a slab; the indices hold slot numbers only, so that a flow costs a few
//! hundred bytes and ten thousand of them a few megabytes.

use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use core::fmt;
use core::hash::{BuildHasher, Hash};
use core::net::SocketAddr;

use hashbrown::HashTable;
use margay_wire::{FlowId, SessionId, Sharing};

use crate::act::chain::{ChainRecord, Chained};
use crate::act::path::direct::Direct;
use crate::act::path::striping::Striping;
use crate::act::setup::{InitiatorSetup, LateAnswers, ResponderSetup};
use crate::act::stack_change::StackInfo;
use crate::cache::entry::{Directions, Entry, PathId, Wire};
use crate::leg::carriage::Why;
use crate::leg::delta::Delta;
use crate::leg::loss::FlowLoss;
use crate::leg::seal::SealKeys;
use crate::leg::stack::{Stack, Stacks};
use crate::leg::timing::FlowTiming;
use crate::session::event::FlowInfo;
use crate::session::hand_over::PeerTicket;
use crate::types::direction::Direction;
use crate::types::keyed_hash::KeyedHash;
use crate::types::name::ServiceId;
use crate::types::role::{Lifecycle, Role};
use crate::types::time::Instant;
use crate::types::tuple::Tuple;

const UDP: u8 = 17;
/// Flows of one peer's number that can be found by it. Peers choose at random; one that does not shall not make
/// look-ups slow.
const SAME_NUMBER_MAX: usize = 4;
/// Flows of one session that are looked at: two for each of eight boxes on one host, and more. Whoever gives many
/// connections one number finds them no more.
const SAME_SESSION_MAX: usize = 32;

/// What happens in the life of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LifeEvent {
    /// Both ends are proved.
    Proved,
    /// A first FIN passed.
    FirstFin,
    /// A FIN of the other side passed too.
    SecondFin,
    /// A RST passed, or the flow was failed.
    Reset,
    /// Its deadline or idle time passed.
    TimeOut,
}

impl LifeEvent {
    /// All of them, for the matrix.
    pub const ALL: [Self; 5] = [Self::Proved, Self::FirstFin, Self::SecondFin, Self::Reset, Self::TimeOut];
}

/// The declared transitions of a flow's life (DESIGN §7). What is not listed is ignored: late packets of a closed flow
/// are normal.
pub const LIFE: &[(Lifecycle, LifeEvent, Lifecycle)] = &[
    (Lifecycle::Connecting, LifeEvent::Proved, Lifecycle::Established),
    (Lifecycle::Connecting, LifeEvent::Reset, Lifecycle::Closed),
    (Lifecycle::Connecting, LifeEvent::TimeOut, Lifecycle::TimedOut),
    (Lifecycle::Established, LifeEvent::FirstFin, Lifecycle::HalfClosed),
    (Lifecycle::Established, LifeEvent::SecondFin, Lifecycle::Closed),
    (Lifecycle::Established, LifeEvent::Reset, Lifecycle::Closed),
    (Lifecycle::Established, LifeEvent::TimeOut, Lifecycle::TimedOut),
    (Lifecycle::HalfClosed, LifeEvent::SecondFin, Lifecycle::Closed),
    (Lifecycle::HalfClosed, LifeEvent::Reset, Lifecycle::Closed),
    (Lifecycle::HalfClosed, LifeEvent::TimeOut, Lifecycle::TimedOut),
];

impl Lifecycle {
    /// The state after `event`, or `None` where the event changes nothing.
    pub fn after(self, event: LifeEvent) -> Option<Self> {
        LIFE.iter().find(|(from, on, _)| *from == self && *on == event).map(|(_, _, to)| *to)
    }
}

bitflags::bitflags! {
    /// What holds of a flow for itself, beside its state.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) struct Marks: u16 {
        /// The program here has closed its direction.
        const FIN_EGRESS = 1;
        /// The peer's has closed its own.
        const FIN_INGRESS = 2;
        /// It is to go by several pairs of addresses where there are several.
        const STRIPES = 4;
        /// The peer has proved its host ID at set-up.
        const AUTHENTICATED = 8;
        /// The flow is dead and its application is being told: any packet of it is answered with a RST.
        const FAILED = 16;
        /// The initiator has the peer's confirmation of its ACK.
        const CONFIRMED = 32;
        /// It is sealed from its set-up on.
        const SECURE = 64;
        /// It stays where it is when the others move.
        const PINNED = 128;
        /// This host's configuration demands that it is sealed.
        const DEMANDS = 256;
        /// The peer demands it.
        const PEER_DEMANDS = 512;
        /// A rule of this host demands it.
        const RULED = 1024;
        /// Nothing of it is sent until it is sealed.
        const GUARDED = 2048;
        /// A box's half of a session that goes another way now: it waits for the word of the next host that this is so.
        const LEAVING = 4096;
        /// It was set up for a session that ran.
        const LATER = 8192;
        /// A box's half towards the client: both halves have been written down since they were set up.
        const KEPT = 16_384;
    }
}

/// What a flow needs only while it is being set up or watched for late answers.
pub(crate) enum Setup {
    Done,
    Initiator(Box<InitiatorSetup>),
    Responder(Box<ResponderSetup>),
    Late(Box<LateAnswers>),
}

pub(crate) struct Flow {
    pub id: FlowId,
    pub peer_flow: FlowId,
    pub session: SessionId,
    pub service: ServiceId,
    /// At the responder, the port of the service that the initiator asked for; zero where nobody knows it.
    pub port: u16,
    pub role: Role,
    pub lifecycle: Lifecycle,
    pub app: Tuple,
    /// Local index of the association; 0 while there is none.
    pub association: u32,
    pub generation: u32,
    pub since: Instant,
    pub active: Instant,
    /// When both ends had closed.
    pub closed_at: Instant,
    pub marks: Marks,
    /// What its application sends waits here: see [`Entry::is_held`].
    pub is_held: bool,
    pub setup: Setup,
    pub direct: Direct,
    /// A path of its own.
    pub side: Option<PathId>,
    /// The pairs that it goes by, where those are several.
    pub stripe: Option<Box<Striping>>,
    /// What the initiator's socket is called, where it says so: at its own end, or proved.
    pub source: Option<Box<ServiceId>>,
    /// What its DATA is sealed with, once that is known: also of a flow that was sealed once, and may be again.
    pub seal: Option<Box<SealKeys>>,
    /// Which of its session's packets pass by it.
    pub directions: Directions,
    /// What its numbers on the wire differ by from those of the application's TCP.
    pub delta: Option<Box<Delta>>,
    /// The boxes that its session goes through, if it does.
    pub chain: Option<Box<Chained>>,
    /// What was before it came to be as it is, where that still counts.
    past: Option<Box<Past>>,
    /// By which stack it is sent, and what is taken.
    pub stacks: Stacks,
    /// The one deadline of the flow; kept here so that it can be found and replaced in the ordered set.
    deadline: Option<Instant>,
}

/// What few flows have, and for long: in one place, so that all others have room for one pointer.
#[derive(Clone, Copy, Default)]
struct Past {
    /// The session that the keys are of, where it has become another since.
    key_session: Option<SessionId>,
    /// The hand-over by which the initiator has fetched its session: the taker asks until it has the confirmation.
    fetched: Option<PeerTicket>,
}

impl Flow {
    pub fn new(id: FlowId, session: SessionId, service: ServiceId, role: Role, app: Tuple, now: Instant) -> Self {
        Self {
            id,
            peer_flow: FlowId(0),
            session,
            service,
            port: 0,
            role,
            lifecycle: Lifecycle::Connecting,
            app,
            association: 0,
            generation: 0,
            since: now,
            active: now,
            closed_at: now,
            marks: Marks::empty(),
            is_held: false,
            setup: Setup::Done,
            direct: Direct::never(Why::NoCache, now),
            side: None,
            stripe: None,
            source: None,
            seal: None,
            directions: Directions::Both,
            delta: None,
            chain: None,
            past: None,
            stacks: Stacks::only(Stack::Plain),
            deadline: None,
        }
    }

    /// The session that its keys are of.
    pub fn key_session(&self) -> SessionId {
        self.past.as_ref().and_then(|past| past.key_session).unwrap_or(self.session)
    }

    /// The keys are of another session than the flow.
    pub fn set_key_session(&mut self, session: Option<SessionId>) {
        self.set_past(Past { key_session: session, ..self.past() });
    }

    /// The hand-over by which it has fetched its session.
    pub fn fetched(&self) -> Option<PeerTicket> {
        self.past().fetched
    }

    pub fn set_fetched(&mut self, fetched: Option<PeerTicket>) {
        self.set_past(Past { fetched, ..self.past() });
    }

    fn past(&self) -> Past {
        self.past.as_deref().copied().unwrap_or_default()
    }

    fn set_past(&mut self, past: Past) {
        let is_any = past.key_session.is_some() || past.fetched.is_some();
        self.past = is_any.then(|| Box::new(past));
    }

    /// The name that its SYN asks for: its service, or where the session goes through boxes the next one of them.
    pub fn asked(&self) -> ServiceId {
        self.chain.as_ref().map_or(self.service, |chain| chain.asked)
    }

    /// Whether a socket of this host that has a source name began it.
    pub fn is_of_named_socket(&self) -> bool {
        self.role == Role::Initiator && self.source.is_some() && !self.is_at_box()
    }

    /// Whether it is one of the two halves of a session on a box's host.
    pub fn is_at_box(&self) -> bool {
        self.chain.as_ref().is_some_and(|chain| chain.is_at_box())
    }

    /// The port of the service that it is for. Of a session at a box that changes ports, packets have another one.
    pub fn service_port(&self) -> u16 {
        let of_chain = self.chain.as_ref().and_then(|chain| chain.setup.as_ref()).map(|setup| setup.port);
        of_chain.unwrap_or(self.app.destination.port())
    }

    pub fn has(&self, marks: Marks) -> bool {
        self.marks.contains(marks)
    }

    /// Whether a SYN in this direction begins another connection. Whoever has sent a FIN does not say its SYN again;
    /// that the other FIN has passed as well, an agent that died may not have written down.
    pub fn is_over_for_syn(&self, direction: Direction) -> bool {
        let fin = if direction == Direction::Egress { Marks::FIN_EGRESS } else { Marks::FIN_INGRESS };
        self.lifecycle >= Lifecycle::Closed || self.has(fin)
    }

    /// Whether data may pass: proved, and not failed.
    pub fn carries_data(&self) -> bool {
        matches!(self.lifecycle, Lifecycle::Established | Lifecycle::HalfClosed | Lifecycle::Closed)
            && self.association != 0
            && !self.has(Marks::FAILED)
    }

    /// Whether a socket here has the connection still: it was not reset, and who has closed waits for acknowledgements,
    /// or for what comes late.
    pub fn has_socket(&self) -> bool {
        match self.lifecycle {
            Lifecycle::Established | Lifecycle::HalfClosed => true,
            Lifecycle::Closed => self.has(Marks::FIN_EGRESS | Marks::FIN_INGRESS),
            Lifecycle::Connecting | Lifecycle::TimedOut => false,
        }
    }

    pub fn entry(&self) -> Entry {
        let delta = self.delta.as_deref().copied();
        let is_settled = delta.is_none_or(|delta| delta.is_settled());
        let directions = if is_settled { self.directions } else { Directions::Neither };
        Entry {
            flow: self.id,
            generation: self.generation,
            app: self.app,
            peer_flow: self.peer_flow,
            path: self.side.unwrap_or(PathId(self.association)),
            // Between two ways a session goes by the agents.
            wire: self.direct.wire().filter(|_| directions == Directions::Both).map(|wire| self.masked(wire)),
            seal: self.seal.as_deref().copied().filter(|_| self.stacks.has_sealed()),
            stacks: self.stacks,
            stripe: self.stripe.as_ref().map(|striping| striping.places(self.may_be_plain_in_places())),
            is_held: self.is_held || self.has(Marks::GUARDED),
            at_middlebox: self.is_at_box(),
            is_of_named_socket: self.is_of_named_socket(),
            directions,
            delta,
        }
    }

    /// The direct path, as far as the flow's stacks let it be used.
    fn masked(&self, wire: Wire) -> Wire {
        let is_held = self.is_held || self.has(Marks::GUARDED);
        let sending = wire.sending && !is_held && self.stacks.sends == Stack::Plain;
        Wire { sending, accepting: wire.accepting && self.stacks.takes_direct(), ..wire }
    }

    /// Whether this host demands that it is sealed: its configuration, or a rule.
    pub fn is_demanded_here(&self) -> bool {
        self.has(Marks::DEMANDS) || self.has(Marks::RULED)
    }

    /// Whether either end does.
    pub fn is_demanded(&self) -> bool {
        self.is_demanded_here() || self.has(Marks::PEER_DEMANDS)
    }

    /// Whether each end knows that the other has it: of an initiator, whether the responder has its ACK.
    pub fn is_proved(&self) -> bool {
        self.role == Role::Responder || self.has(Marks::CONFIRMED)
    }

    /// Whether this end sends it sealed.
    pub fn is_sealed(&self) -> bool {
        self.seal.is_some() && self.stacks.sends.is_sealed()
    }

    /// Whether some of its places may be plain: it is sealed, no change is under way, and nobody demands that it is.
    pub fn may_be_plain_in_places(&self) -> bool {
        self.stacks.settled() == Some(Stack::Secure) && !self.is_demanded()
    }

    /// Whether both directions are sealed, and no change to less is under way.
    pub fn is_settled_sealed(&self) -> bool {
        self.stacks.is_sealed_only()
    }

    /// How it is carried, as far as the flow itself knows.
    pub fn stack_info(&self) -> StackInfo {
        StackInfo {
            stack: self.stacks.sends,
            since: self.since,
            changing_to: None,
            order: None,
            is_demanded: self.has(Marks::DEMANDS),
            is_demanded_by_rule: self.has(Marks::RULED),
            is_demanded_by_peer: self.has(Marks::PEER_DEMANDS),
            changes: Vec::new(),
        }
    }

    pub fn info(&self) -> FlowInfo {
        FlowInfo {
            flow: self.id,
            peer_flow: self.peer_flow,
            session: self.session,
            service: self.service,
            port: self.port,
            source: self.source.as_deref().copied(),
            role: self.role,
            lifecycle: self.lifecycle,
            closed: match (self.has(Marks::FIN_EGRESS), self.has(Marks::FIN_INGRESS)) {
                (true, false) => Some(Direction::Egress),
                (false, true) => Some(Direction::Ingress),
                _ => None,
            },
            app: self.app,
            peer: None,
            shares_as: None,
            remote: None,
            authenticated: self.has(Marks::AUTHENTICATED),
            since: self.since,
            carriage: self.direct.carriage,
            carriage_since: self.direct.since,
            why: self.direct.why,
            secure: self.seal.as_ref().filter(|_| self.is_sealed()).map(|keys| keys.cipher),
            loss: FlowLoss::default(),
            timing: FlowTiming::default(),
            stack: self.stack_info(),
            local: None,
            is_aside: self.side.is_some(),
            is_pinned: self.has(Marks::PINNED),
            stripes: self.has(Marks::STRIPES) || self.stripe.is_some(),
            is_striped: self.stripe.is_some(),
            sharing: Sharing::default(),
            places: Vec::new(),
            moved: None,
            moves: 0,
            trouble: None,
            chain: self.chain.as_deref().map(ChainRecord::of),
            reconfigurations: Vec::new(),
            goes_on: self.directions.has_egress(),
        }
    }
}

/// All flows of a host. Bounded by the caller through [`FlowTable::len`].
pub(crate) struct FlowTable {
    slots: Vec<Option<Flow>>,
    free: Vec<u32>,
    by_id: HashTable<u32>,
    by_tuple: HashTable<u32>,
    by_session: HashTable<u32>,
    /// Flows of datagram servers, by whom they answer.
    by_asker: HashTable<u32>,
    /// By the number that the peer has given a flow.
    by_peer_flow: HashTable<u32>,
    deadlines: BTreeSet<(Instant, FlowId)>,
    hasher: KeyedHash,
}

impl fmt::Debug for FlowTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FlowTable").field("len", &self.len()).finish_non_exhaustive()
    }
}

impl FlowTable {
    pub fn new(hasher: KeyedHash) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            by_id: HashTable::new(),
            by_tuple: HashTable::new(),
            by_session: HashTable::new(),
            by_asker: HashTable::new(),
            by_peer_flow: HashTable::new(),
            deadlines: BTreeSet::new(),
            hasher,
        }
    }

    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Flow> {
        self.slots.iter().flatten()
    }

    fn at(&self, slot: u32) -> Option<&Flow> {
        self.slots.get(slot as usize).and_then(Option::as_ref)
    }

    pub fn get(&self, id: FlowId) -> Option<&Flow> {
        self.slot_of(id).and_then(|slot| self.at(slot))
    }

    pub fn get_mut(&mut self, id: FlowId) -> Option<&mut Flow> {
        let slot = self.slot_of(id)?;
        self.slots.get_mut(slot as usize).and_then(Option::as_mut)
    }

    fn slot_of(&self, id: FlowId) -> Option<u32> {
        self.by_id.find(self.hasher.hash_one(id), |slot| self.at(*slot).is_some_and(|flow| flow.id == id)).copied()
    }

    /// The flow whose application sends packets of `tuple`.
    pub fn by_tuple(&self, tuple: &Tuple) -> Option<FlowId> {
        let found = self
            .by_tuple
            .find(self.hasher.hash_one(tuple), |slot| self.at(*slot).is_some_and(|flow| flow.app == *tuple));
        found.and_then(|slot| self.at(*slot)).map(|flow| flow.id)
    }

    /// The flows of a session: one; two where a box of its chain is, where both ends are, or where one is left from
    /// before the session went to another host and came back.
    pub fn of_session(&self, session: SessionId) -> impl Iterator<Item = &Flow> {
        let alike = self.by_session.iter_hash(self.hasher.hash_one(session));
        alike.filter_map(|slot| self.at(*slot)).filter(move |flow| flow.session == session).take(SAME_SESSION_MAX)
    }

    /// The flow of a datagram server that was asked from `asker`, an address of this host's choice.
    pub fn asked_from(&self, asker: SocketAddr) -> Option<FlowId> {
        let found = self
            .by_asker
            .find(self.hasher.hash_one(asker), |slot| self.at(*slot).is_some_and(|flow| flow.app.destination == asker));
        found.and_then(|slot| self.at(*slot)).map(|flow| flow.id)
    }

    /// Flows to which their peers have given this number: hardly ever more than one.
    pub fn by_peer_flow(&self, peer_flow: FlowId) -> impl Iterator<Item = &Flow> {
        let alike = self.by_peer_flow.iter_hash(self.hasher.hash_one(peer_flow));
        alike.filter_map(|slot| self.at(*slot)).filter(move |flow| flow.peer_flow == peer_flow)
    }

    /// The number that the peer has given a flow, once it is known.
    pub fn set_peer_flow(&mut self, id: FlowId, peer_flow: FlowId) {
        let Some(slot) = self.slot_of(id) else { return };
        let Some(flow) = self.slots.get_mut(slot as usize).and_then(Option::as_mut) else { return };
        let before = core::mem::replace(&mut flow.peer_flow, peer_flow);
        if let Ok(found) = self.by_peer_flow.find_entry(self.hasher.hash_one(before), |known| *known == slot) {
            found.remove();
        }
        self.note_peer_flow(slot, peer_flow);
    }

    fn note_peer_flow(&mut self, slot: u32, peer_flow: FlowId) {
        if peer_flow == FlowId(0) || self.by_peer_flow(peer_flow).take(SAME_NUMBER_MAX).count() == SAME_NUMBER_MAX {
            return;
        }
        let slots = &self.slots;
        let hasher = &self.hasher;
        let flow_at = |slot: &u32| slots.get(*slot as usize).and_then(Option::as_ref);
        self.by_peer_flow.insert_unique(hasher.hash_one(peer_flow), slot, |slot| {
            hash_of(hasher, flow_at(slot).map(|flow| flow.peer_flow))
        });
    }

    /// Adds a flow. Its identifier and tuple must be free: the callers choose them so.
    pub fn insert(&mut self, flow: Flow) {
        let is_listed = flow.directions.has_egress();
        debug_assert!(self.get(flow.id).is_none() && (!is_listed || self.by_tuple(&flow.app).is_none()));
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
        });
        let id = flow.id;
        let session = flow.session;
        let peer_flow = flow.peer_flow;
        if let Some(place) = self.slots.get_mut(slot as usize) {
            *place = Some(flow);
        }
        let slots = &self.slots;
        let hasher = &self.hasher;
        let flow_at = |slot: &u32| slots.get(*slot as usize).and_then(Option::as_ref);
        self.by_id.insert_unique(hasher.hash_one(id), slot, |slot| hash_of(hasher, flow_at(slot).map(|flow| flow.id)));
        self.by_session.insert_unique(hasher.hash_one(session), slot, |slot| {
            hash_of(hasher, flow_at(slot).map(|flow| flow.session))
        });
        if is_listed {
            self.list(slot);
        }
        self.note_peer_flow(slot, peer_flow);
    }

    /// Has a flow found by its five-tuple.
    fn list(&mut self, slot: u32) {
        let Some((role, app)) = self.at(slot).map(|flow| (flow.role, flow.app)) else { return };
        let slots = &self.slots;
        let hasher = &self.hasher;
        let flow_at = |slot: &u32| slots.get(*slot as usize).and_then(Option::as_ref);
        self.by_tuple
            .insert_unique(hasher.hash_one(app), slot, |slot| hash_of(hasher, flow_at(slot).map(|flow| flow.app)));
        if role == Role::Responder && app.protocol == UDP {
            self.by_asker.insert_unique(hasher.hash_one(app.destination), slot, |slot| {
                hash_of(hasher, flow_at(slot).map(|flow| flow.app.destination))
            });
        }
    }

    /// Has a flow no more found by its five-tuple, if it is.
    fn unlist(&mut self, slot: u32, app: Tuple) {
        let forget = |table: &mut HashTable<u32>, hash: u64| {
            if let Ok(entry) = table.find_entry(hash, |at| *at == slot) {
                entry.remove();
            }
        };
        forget(&mut self.by_tuple, self.hasher.hash_one(app));
        forget(&mut self.by_asker, self.hasher.hash_one(app.destination));
    }

    /// Which packets of its session pass by a flow. The five-tuple leads to the one flow that has its egress: whichever
    /// had it before has given it up.
    pub fn set_directions(&mut self, id: FlowId, directions: Directions) {
        let Some(slot) = self.slot_of(id) else { return };
        let Some(flow) = self.slots.get_mut(slot as usize).and_then(Option::as_mut) else { return };
        let app = flow.app;
        let was_listed = flow.directions.has_egress();
        flow.directions = directions;
        match (was_listed, directions.has_egress()) {
            (true, false) => self.unlist(slot, app),
            (false, true) => {
                debug_assert!(self.by_tuple(&app).is_none());
                self.list(slot);
            }
            _ => {}
        }
    }

    /// A flow is of another session from here on. Its keys stay: numbers under them have been used, and the peer has
    /// them too.
    pub fn set_session(&mut self, id: FlowId, session: SessionId) {
        let Some(slot) = self.slot_of(id) else { return };
        let Some(flow) = self.slots.get_mut(slot as usize).and_then(Option::as_mut) else { return };
        let before = core::mem::replace(&mut flow.session, session);
        let of_keys = flow.past.as_ref().and_then(|past| past.key_session).unwrap_or(before);
        flow.set_key_session((of_keys != session).then_some(of_keys));
        if let Ok(found) = self.by_session.find_entry(self.hasher.hash_one(before), |known| *known == slot) {
            found.remove();
        }
        let slots = &self.slots;
        let hasher = &self.hasher;
        let flow_at = |slot: &u32| slots.get(*slot as usize).and_then(Option::as_ref);
        self.by_session.insert_unique(hasher.hash_one(session), slot, |slot| {
            hash_of(hasher, flow_at(slot).map(|flow| flow.session))
        });
    }

    /// Gives a flow another tuple, which must be free.
    pub fn set_tuple(&mut self, id: FlowId, tuple: Tuple) {
        debug_assert!(self.by_tuple(&tuple).is_none());
        let Some(slot) = self.slot_of(id) else { return };
        let Some(flow) = self.slots.get_mut(slot as usize).and_then(Option::as_mut) else { return };
        let before = core::mem::replace(&mut flow.app, tuple);
        let slots = &self.slots;
        let hasher = &self.hasher;
        if let Ok(found) = self.by_tuple.find_entry(hasher.hash_one(before), |known| *known == slot) {
            found.remove();
        }
        let flow_at = |slot: &u32| slots.get(*slot as usize).and_then(Option::as_ref);
        self.by_tuple
            .insert_unique(hasher.hash_one(tuple), slot, |slot| hash_of(hasher, flow_at(slot).map(|flow| flow.app)));
    }

    pub fn remove(&mut self, id: FlowId) -> Option<Flow> {
        let slot = self.slot_of(id)?;
        let flow = self.slots.get_mut(slot as usize)?.take()?;
        let forget = |table: &mut HashTable<u32>, hash: u64| {
            if let Ok(entry) = table.find_entry(hash, |at| *at == slot) {
                entry.remove();
            }
        };
        forget(&mut self.by_id, self.hasher.hash_one(flow.id));
        forget(&mut self.by_peer_flow, self.hasher.hash_one(flow.peer_flow));
        forget(&mut self.by_session, self.hasher.hash_one(flow.session));
        self.unlist(slot, flow.app);
        if let Some(deadline) = flow.deadline {
            self.deadlines.remove(&(deadline, id));
        }
        self.free.push(slot);
        Some(flow)
    }

    /// Sets or clears the flow's one deadline.
    pub fn set_deadline(&mut self, id: FlowId, deadline: Option<Instant>) {
        let Some(flow) = self.get_mut(id) else { return };
        let old = core::mem::replace(&mut flow.deadline, deadline);
        if let Some(old) = old {
            self.deadlines.remove(&(old, id));
        }
        if let Some(deadline) = deadline {
            self.deadlines.insert((deadline, id));
        }
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// The next flow whose deadline is at or before `now`; its deadline is cleared.
    pub fn pop_due(&mut self, now: Instant) -> Option<FlowId> {
        let &(deadline, id) = self.deadlines.first()?;
        if deadline > now {
            return None;
        }
        self.deadlines.pop_first();
        if let Some(flow) = self.get_mut(id) {
            flow.deadline = None;
        }
        Some(id)
    }
}

fn hash_of<T: Hash>(hasher: &KeyedHash, key: Option<T>) -> u64 {
    // An index names only occupied slots, so the key is there whenever the table rehashes.
    key.map_or(0, |key| hasher.hash_one(key))
}

#[cfg(test)]
mod tests {
    use alloc::string::String;
    use core::fmt::Write as _;

    use super::*;

    const STATES: [Lifecycle; 5] =
        [Lifecycle::Connecting, Lifecycle::Established, Lifecycle::HalfClosed, Lifecycle::Closed, Lifecycle::TimedOut];

    #[test]
    fn the_whole_matrix_of_a_flows_life() {
        let mut matrix = String::new();
        for state in STATES {
            for event in LifeEvent::ALL {
                let after = state.after(event).map_or(String::from("-"), |to| alloc::format!("{to:?}"));
                writeln!(matrix, "{state:?} {event:?} {after}").expect("a String takes all");
            }
        }
        let expected = "\
Connecting Proved Established\nConnecting FirstFin -\nConnecting SecondFin -\nConnecting Reset Closed\nConnecting TimeOut TimedOut
Established Proved -\nEstablished FirstFin HalfClosed\nEstablished SecondFin Closed\nEstablished Reset Closed\nEstablished TimeOut TimedOut
HalfClosed Proved -\nHalfClosed FirstFin -\nHalfClosed SecondFin Closed\nHalfClosed Reset Closed\nHalfClosed TimeOut TimedOut
Closed Proved -\nClosed FirstFin -\nClosed SecondFin -\nClosed Reset -\nClosed TimeOut -
TimedOut Proved -\nTimedOut FirstFin -\nTimedOut SecondFin -\nTimedOut Reset -\nTimedOut TimeOut -\n";
        assert_eq!(matrix, expected);
    }

    fn tuple(port: u16) -> Tuple {
        Tuple {
            protocol: 6,
            source: core::net::SocketAddr::new([198, 18, 0, 1].into(), port),
            destination: core::net::SocketAddr::new([198, 18, 1, 1].into(), 80),
        }
    }

    fn flow(n: u32) -> Flow {
        let port = u16::try_from(n).expect("small");
        let session = SessionId([port as u8; 16]);
        Flow::new(FlowId(n), session, ServiceId([0; 32]), Role::Responder, tuple(port), Instant::ZERO)
    }

    #[test]
    fn flows_are_found_by_their_peers_numbers_and_few_of_one_number() {
        let mut table = FlowTable::new(KeyedHash(1, 2));
        let numbers =
            |table: &FlowTable, peer: u32| table.by_peer_flow(FlowId(peer)).map(|flow| flow.id.0).collect::<Vec<_>>();
        for n in 1..200 {
            table.insert(flow(n));
            table.set_peer_flow(FlowId(n), FlowId(1000 + n));
        }
        assert_eq!((numbers(&table, 1077), numbers(&table, 0)), (alloc::vec![77], Vec::new()));
        table.set_peer_flow(FlowId(77), FlowId(5));
        assert_eq!((numbers(&table, 1077), numbers(&table, 5)), (Vec::new(), alloc::vec![77]));
        assert!(table.remove(FlowId(77)).is_some());
        assert!(numbers(&table, 5).is_empty());
        (1..=100).filter(|n| *n != 77).for_each(|n| table.set_peer_flow(FlowId(n), FlowId(5)));
        assert_eq!(numbers(&table, 5).len(), SAME_NUMBER_MAX);
        (1..=100).for_each(|n| drop(table.remove(FlowId(n))));
        assert!(numbers(&table, 5).is_empty());
    }

    #[test]
    fn flows_are_found_by_every_key_until_removed() {
        let mut table = FlowTable::new(KeyedHash(1, 2));
        for n in 1..200 {
            table.insert(flow(n));
        }
        assert_eq!(table.len(), 199);
        assert_eq!(table.by_tuple(&tuple(77)), Some(FlowId(77)));
        assert_eq!(table.of_session(SessionId([77; 16])).map(|flow| flow.id).collect::<Vec<_>>(), [FlowId(77)]);
        assert!(table.remove(FlowId(77)).is_some());
        assert!(table.get(FlowId(77)).is_none());
        assert_eq!(table.by_tuple(&tuple(77)), None);
        assert_eq!(table.of_session(SessionId([77; 16])).count(), 0);
        table.insert(flow(77));
        assert_eq!(table.by_tuple(&tuple(77)), Some(FlowId(77)));
        table.set_tuple(FlowId(77), tuple(777));
        assert_eq!((table.by_tuple(&tuple(77)), table.by_tuple(&tuple(777))), (None, Some(FlowId(77))));
        assert!(table.remove(FlowId(77)).is_some());
        assert_eq!(table.by_tuple(&tuple(777)), None);
    }

    #[test]
    fn datagram_servers_flows_are_found_by_who_asked() {
        let mut table = FlowTable::new(KeyedHash(1, 2));
        let asker = tuple(0).destination;
        table.insert(flow(1));
        assert_eq!(table.asked_from(asker), None, "a connection answers from its own port alone");
        let mut asked = flow(2);
        asked.app.protocol = UDP;
        table.insert(asked);
        assert_eq!(table.asked_from(asker), Some(FlowId(2)));
        table.remove(FlowId(2));
        assert_eq!(table.asked_from(asker), None);
    }

    #[test]
    fn deadlines_come_in_order_and_each_flow_has_one() {
        let mut table = FlowTable::new(KeyedHash(1, 2));
        for n in 1..4 {
            table.insert(flow(n));
            table.set_deadline(FlowId(n), Some(Instant::from_millis(u64::from(10 - n))));
        }
        table.set_deadline(FlowId(1), Some(Instant::from_millis(1)));
        assert_eq!(table.next_deadline(), Some(Instant::from_millis(1)));
        assert_eq!(table.pop_due(Instant::from_millis(7)), Some(FlowId(1)));
        assert_eq!(table.pop_due(Instant::from_millis(7)), Some(FlowId(3)));
        assert_eq!(table.pop_due(Instant::from_millis(7)), None);
        table.remove(FlowId(2));
        assert_eq!(table.next_deadline(), None);
    }
}
