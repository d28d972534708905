//! Chains: sessions that go through boxes, which forward packets or listen in (docs/decisions/0074; Dysco, section 2).
//! Boxes that end sessions, and boxes that change addresses, are in docs/decisions/0077.
//!
//! ```text
//!   client            host of box 1             host of box 2             server
//!     ── SYN, CHAIN ──▶ left │ right ── SYN, CHAIN ──▶ left │ right ── SYN, CHAIN ──▶
//!                       sal0 ▼   ▲                     sal0 ▼   ▲
//!                         the box                       the box
//! ```
//!
//! Each arrow is an ordinary flow between two hosts, and its two ends know it by numbers of their own. On a box's host
//! a session has two: the left one, of which the host is the responder, and the right one, of which it is the
//! initiator. The five-tuple of one is that of the other reversed, so that what one delivers is what the other sends
//! on, once the box has let it pass.
//!
//! `adding` puts boxes behind one whose program asks for them,
//! `policy` says which sessions (pure), `filter` by what their first packets look like (pure),
//! `deciding` what is asked of both; `proof` who vouches for one, `first` is the initiator's end, `last` what a
//! responder asks of its neighbour, `middlebox` the two halves on a box's host, `forwarded` tells what a box lets out
//! from what programs of its host send, `proxy` a box at which sessions end, `rewrite` one that changes addresses.

mod adding;
mod deciding;
mod filter;
mod first;
mod forwarded;
mod given;
mod last;
mod memory;
mod middlebox;
mod policy;
mod proof;
mod proxy;
mod record;
mod rewrite;
mod tag;
mod wanted_lease;

pub use adding::AddRefused;
pub use filter::{Filter, INSTRUCTIONS_MAX, Program, ProgramError};
pub(crate) use first::NewWay;
pub use forwarded::{FORWARDED_HOP_LIMIT, OUTSIDE_HOP_LIMIT, mark_forwarded, mark_outside};
pub(crate) use last::{Read, Refused, Ruling};
pub use policy::{BoxWanted, CHAIN_RULES_MAX, ChainPolicy, ChainRule, Client, PolicyError, Requirement, SessionHeader};
pub use record::{ChainPlace, ChainRecord, PassedBox};

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;

use margay_wire::{BoxFlags, BoxRepr, Chain, ErrorCode, FlowId, SessionId};

use crate::machine::sal::Sal;
use crate::session::flow::Flow;
use crate::types::key::HostId;
use crate::types::name::ServiceId;
use crate::types::rate::RateLimit;
use crate::types::time::Instant;
use crate::types::tuple::Tuple;
use given::{Given, Mark};
use memory::Memory;
use proof::{Answered, Origin};
pub use wanted_lease::WantedLease;
use wanted_lease::WantedLeases;

/// What is signed of a session counts for so long, one way and the other: clocks differ.
pub const SIGNED_FOR_S: u64 = 120;
/// Sessions that are remembered for that time, so that nobody shows one twice.
const HEARD_MAX: usize = 1 << 16;
/// What a box lets out so long after its session is over is still known as that session's.
const OVER_FOR: Duration = Duration::from_secs(60);
/// Sessions of which that is known.
const OVER_MAX: usize = 1 << 16;
/// Signatures of first agents that are checked before their neighbours are proved. Of more, each is checked afterwards:
/// the refusal comes later then.
const CHECKED_EARLY_PER_S: u32 = 4000;

/// Where in the chain a flow is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// From the client's host to the first box.
    First,
    /// From the host before, to box `at` here.
    Left { at: usize },
    /// From box `at` here, to the next host.
    Right { at: usize },
    /// From the last box to the server's host.
    Last,
    /// From the host before, to box `at` here, a proxy: the session ends there.
    Proxy { at: usize },
}

/// What a set-up has failed at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub code: ErrorCode,
    /// The box, from 1; 0: none.
    pub at: u8,
}

/// What a flow keeps of the chain that its session goes through.
#[derive(Debug)]
pub(crate) struct Chained {
    /// The name that the SYN of this flow asks for: a box's, or after the last box the session's own.
    pub asked: ServiceId,
    pub place: Place,
    pub boxes: Vec<BoxRepr>,
    /// Of the boxes that were passed, in order.
    pub hosts: Vec<HostId>,
    /// Of a half whose box changes addresses: the other half, which the five-tuple does not lead to.
    pub other_half: Option<FlowId>,
    /// At an end of the session: the host at the other end, which has signed what it says of the session. Of a left
    /// half: the client's.
    pub far_end: Option<HostId>,
    /// What is needed until the flow is set up.
    pub setup: Option<Box<ChainSetup>>,
}

/// The part of [`Chained`] that a flow has no more once it is set up.
#[derive(Debug)]
pub(crate) struct ChainSetup {
    /// The client as the first box's host has seen it.
    pub client: SocketAddr,
    /// The port of the service that the program asked for.
    pub port: u16,
    pub origin: Origin,
    /// A left flow's: its first packet has come out of the box.
    pub has_come_out: bool,
    /// A left flow's: what the last host has signed.
    pub answer: Option<Answered>,
    /// A left flow's: why it is refused. A right flow's: what the left one is to be refused with.
    pub failure: Option<Failure>,
    /// A left flow's: the five-tuple that its first packet has come out with.
    pub out_as: Option<Tuple>,
    /// A left flow's: by what its first packet is known when it comes out.
    pub marks: Vec<Mark>,
    /// A right flow's ACK waits until the client of the left one is proved.
    pub keeps_ack: bool,
}

impl ChainSetup {
    const fn new(client: SocketAddr, port: u16, origin: Origin) -> Self {
        Self {
            client,
            port,
            origin,
            has_come_out: false,
            answer: None,
            failure: None,
            out_as: None,
            marks: Vec::new(),
            keeps_ack: false,
        }
    }
}

impl Chained {
    /// The box that the SYN is to pass next, if there is one.
    pub fn next_box(&self) -> Option<usize> {
        self.boxes.iter().position(BoxRepr::is_ahead)
    }

    /// Of a right half: whoever has answered for the next box may not speak for it.
    pub fn note_uncertified(&mut self) {
        let next = self.next_box().filter(|_| self.is_right());
        if let Some((at, setup)) = next.zip(self.setup.as_mut()) {
            // A chain has eight boxes at most.
            setup.failure = Some(Failure { code: ErrorCode::BadCertificate, at: at as u8 + 1 });
        }
    }

    /// Whether the SYN comes to the session's other end next: to its server, or to the proxy that it ends at.
    pub fn ends_next(&self) -> bool {
        self.next_box().is_none_or(|at| self.boxes[at].flags.contains(BoxFlags::ENDS))
    }

    /// The name that the SYN is to ask for.
    fn next_name(&self, destination: ServiceId) -> ServiceId {
        self.next_box().map_or(destination, |at| service_of(&self.boxes[at]))
    }

    /// At an end of the session: the boxes that both ends are between, in order. Not among them: a proxy at either end,
    /// and what was left out.
    pub fn boxes_between(&self) -> Vec<ServiceId> {
        let own = if self.place == Place::First { self.first_asked() } else { 0 };
        let none = BoxFlags::LEFT_OUT | BoxFlags::ENDS;
        self.boxes.iter().skip(own).filter(|one| !one.flags.intersects(none)).map(service_of).collect()
    }

    /// Of a flow that has come through boxes: the last one before this host, whose host is the flow's peer.
    pub fn box_before(&self) -> Option<ServiceId> {
        let until = match self.place {
            Place::Left { at } | Place::Proxy { at } => at.min(self.boxes.len()),
            Place::Last => self.boxes.len(),
            Place::First | Place::Right { .. } => 0,
        };
        self.boxes[..until].iter().rfind(|one| one.flags.contains(BoxFlags::PASSED)).map(service_of)
    }

    /// Of the first flow: the proxy of this host that has begun the session.
    pub fn begun_by(&self) -> Option<ServiceId> {
        let mut before = self.boxes.iter().take(self.first_asked()).filter(|_| self.place == Place::First);
        before.find(|one| one.flags.contains(BoxFlags::PASSED)).map(service_of)
    }

    /// The proxy that the session ends at.
    pub fn ends_at(&self) -> Option<ServiceId> {
        self.boxes.iter().rfind(|one| one.flags.contains(BoxFlags::ENDS)).map(service_of)
    }

    /// Where among the boxes the one is that the flow has asked for.
    fn first_asked(&self) -> usize {
        self.boxes.iter().position(|one| service_of(one) == self.asked).unwrap_or(self.boxes.len())
    }

    pub const fn is_left(&self) -> bool {
        matches!(self.place, Place::Left { .. })
    }

    pub const fn is_right(&self) -> bool {
        matches!(self.place, Place::Right { .. })
    }

    /// Whether the session ends at this host: at its server, or at a proxy.
    pub const fn is_end(&self) -> bool {
        matches!(self.place, Place::Last | Place::Proxy { .. })
    }

    /// Whether the flow is one of the two halves on a box's host.
    pub const fn is_at_box(&self) -> bool {
        self.is_left() || self.is_right()
    }
}

/// A box that was not passed yet.
fn box_ahead(service: &ServiceId) -> BoxRepr {
    BoxRepr { service: head_of(service), flags: BoxFlags::empty(), added_by: 0 }
}

/// A box's name.
pub(crate) fn service_of(one: &BoxRepr) -> ServiceId {
    let mut id = [0; 32];
    id[..12].copy_from_slice(&one.service);
    ServiceId(id)
}

/// The part of a box's name that is on the wire.
pub(crate) fn head_of(service: &ServiceId) -> [u8; 12] {
    let mut head = [0; 12];
    head.copy_from_slice(&service.0[..12]);
    head
}

/// What a host knows of chains.
pub(crate) struct Chains {
    pub policy: ChainPolicy,
    /// Sessions that have come to services here, until they could not come again, in seconds since 1970.
    heard: Memory<SessionId, u64>,
    /// Five-tuples of packets that boxes were given, of sessions that are over.
    over: Memory<Tuple, Instant>,
    /// First packets that boxes here have.
    given: Given,
    /// Those of sessions that came to nothing.
    past: Memory<Mark, Instant>,
    early: RateLimit,
    /// Leased virtual addresses by name, and whether they are of IPv4.
    leases: BTreeMap<(ServiceId, bool), IpAddr>,
    wanted: WantedLeases,
    has_news: bool,
}

impl Chains {
    pub fn new(now: Instant) -> Self {
        Self {
            policy: ChainPolicy::default(),
            heard: Memory::new(HEARD_MAX),
            over: Memory::new(OVER_MAX),
            given: Given::default(),
            past: Memory::new(OVER_MAX),
            early: RateLimit::new(CHECKED_EARLY_PER_S, now),
            leases: BTreeMap::new(),
            wanted: WantedLeases::default(),
            has_news: false,
        }
    }

    /// Remembers a session until nobody could show it again.
    fn note_heard(&mut self, session: SessionId, unix_s: u64, signed_s: u64) {
        self.heard.note(session, unix_s, signed_s.saturating_add(SIGNED_FOR_S));
    }

    /// Whether a packet is of a session that is over, and was kept by a box until now.
    fn is_late(&self, tuple: &Tuple, now: Instant) -> bool {
        self.over.has(tuple, now)
    }

    /// A flow is gone. What its box still lets out is no program's: nobody here begins a session of his own with it.
    pub fn note_gone(&mut self, flow: &Flow, now: Instant) {
        let Some(chained) = flow.chain.as_deref().filter(|chained| chained.is_at_box()) else { return };
        if chained.is_left() {
            self.over.note(flow.app.reversed(), now, now + OVER_FOR);
        } else {
            // The session may go on by another way: what the server sends late is answered by nobody, either.
            self.over.note(flow.app.reversed(), now, now + OVER_FOR);
            if chained.other_half.is_some() {
                self.over.note(flow.app, now, now + OVER_FOR);
            }
        }
        let marks = chained.setup.as_ref().map(|setup| &setup.marks[..]).unwrap_or_default();
        for mark in marks {
            self.given.forget(*mark, flow.id);
            self.past.note(*mark, now, now + mark.is_kept_for());
        }
    }

    pub fn note_lease(&mut self, address: IpAddr, service: ServiceId) {
        self.leases.insert((service, address.is_ipv4()), address);
        if address.is_ipv4() {
            self.wanted.remove(&service);
        }
    }

    pub fn forget_lease(&mut self, address: IpAddr, service: &ServiceId) {
        let key = (*service, address.is_ipv4());
        if self.leases.get(&key) == Some(&address) {
            self.leases.remove(&key);
        }
    }

    /// The agent is to lease an IPv4 address for a name. True where the session that wants it waits for that.
    fn want_lease(&mut self, now: Instant, service: ServiceId, by: IpAddr) -> bool {
        let (is_asked, is_first) = self.wanted.want(now, service, by);
        self.has_news |= is_asked;
        is_first
    }

    /// How often a name was refused a place among those that want an address.
    pub const fn leases_refused(&self) -> u64 {
        self.wanted.refused()
    }

    pub const fn has_news(&self) -> bool {
        self.has_news
    }

    pub const fn take_news(&mut self) -> bool {
        core::mem::replace(&mut self.has_news, false)
    }
}

impl Sal {
    /// Goes by another policy from now on. Sessions that are bound go on as they are.
    ///
    /// # Errors
    ///
    /// It cannot be gone by; the one before stays.
    pub fn set_chain_policy(&mut self, policy: ChainPolicy) -> Result<(), PolicyError> {
        policy.check()?;
        if self.chains.policy != policy {
            self.end_all_grants();
            self.chains.policy = policy;
        }
        Ok(())
    }

    /// The policy that this host goes by.
    pub const fn chain_policy(&self) -> &ChainPolicy {
        &self.chains.policy
    }

    /// Names that need an IPv4 virtual address on this host, since boxes here are to see sessions to them. Each is said
    /// once, and again from time to time while sessions want it; [`Sal::bind_name`] is the answer.
    pub fn take_wanted_leases(&mut self) -> Vec<WantedLease> {
        self.chains.wanted.take_news()
    }
}

/// Whether a SYN that bears CHAIN, or none, has come to where it says.
pub(crate) fn is_for(chain: Option<&Chain<'_>>, asked: &ServiceId, is_box: bool) -> bool {
    let Some(chain) = chain else { return !is_box };
    let ahead = chain.boxes().find(BoxRepr::is_ahead);
    let name = ahead.map_or(ServiceId(chain.destination()), |one| service_of(&one));
    ahead.is_some() == is_box && name == *asked && !chain.is_answer()
}
