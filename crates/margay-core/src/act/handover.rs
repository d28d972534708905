//! The hand-over record: one flow in a form that leaves the process (DESIGN §7). Adoption after a restart, socket
//! hand-over and moves of virtual machines all use it.
//!
//! Keys are not in the record: a leg names its association by the peer's host-ID, and whoever adopts the flow must
//! share one with that peer; the very same one, where the leg's stack seals. Legs of an unknown stack are refused.
//!
//! ```text
//!  0 "MGHO" | 4..6 version | 6..8 length of the whole
//!  8 flowID | 12 peer's flowID | 16 session (16) | 32 service (32)
//! 64 role (1 initiator, 2 responder) | 65 lifecycle | 66 flags | 67 number of legs
//! 68 generation | 72 age in ms (8) | 80 idle for ms (8)
//! 88 numbers of the egress direction (32) | 120 of the ingress direction (32) | 152 legs, 68 each
//! flags: 1 authenticated, 2 and 4 FINs seen, 8, 16 and 128 as below, 32 this host demands a sealed flow, 64 the peer
//! does
//! then, with bit 3 of the flags, the initiator's own name (32); then, with bit 4, for how many milliseconds the
//! service has its clients wait for a silent host (4; all ones: for ever); then, with bit 7, the chain of boxes that
//! the session goes through (`chain/record.rs`); then, in version 2, the delta of the flow (`leg/delta/record.rs`)
//! in version 3, instead, what else there is: 0 flags | 1 zero (3); then, with bit 0 of these flags, the delta; then,
//! with bit 1, what is known of the session's two ways (`reconfiguration/record.rs`). Bit 2: it is the new one of two;
//! bit 3: a rule of this host demands that it is encrypted; bit 4: nothing of it may be sent until it is; then, with
//! bit 5, the session that its keys are of, where it has become another (16); last, with bit 6, by which hand-over the
//! initiator has fetched its session: the giver's host-ID (16), the ticket (16)
//!
//! numbers:  0 highest sequence | 4 its length | 8 last ACK | 12 last window (2) | 14 window scale (255: none)
//!          15 flags (1 known, 2 SACK permitted, 4 timestamps) | 16 TSval | 20 TSecr | 24 zero (8)
//! leg:      0 kind | 1 stack | 2 flags (1 tuple, 2 flowID, 4 association) | 3 IP protocol
//!           4 source address (16) | 20 port (2) | 22 destination address (16) | 38 port (2)
//!          40 flowID | 44 peer's host-ID (16) | 60 association index
//!          64 of the leg at sal0 the port of the service, at the responder (2) | 66 zero (2)
//! ```
//! A stack's leg has a tuple where the flow goes by a pair of addresses of its own: that pair, with the agents' ports.
//! Numbers are big-endian, IPv4 addresses mapped into IPv6, reserved bytes zero.

mod leg;

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv6Addr, SocketAddr};

use margay_wire::{FlowId, PORT, STACK_ENCAP, SessionId};

use crate::act::chain::ChainRecord;
use crate::act::ending::closing::LINGER;
use crate::act::reconfiguration::{KeptWay, PartingRecord};
use crate::act::stack_rule::engine::{act_as_rules_do, guard_as_rules_do};
use crate::act::stack_rule::guard;
use crate::association::location::Pair;
use crate::cache::entry::{Directions, EntryUpdate};
use crate::leg::delta::{DELTA_RECORD_LEN, Delta};
use crate::leg::seal::Cipher;
use crate::machine::sal::Sal;
use crate::session::flow::{Flow, Marks};
use crate::session::give_up::GiveUpAfter;
use crate::session::hand_over::{PeerTicket, Ticket};
use crate::types::key::HostId;
use crate::types::name::ServiceId;
use crate::types::role::{Lifecycle, Role};
use crate::types::time::Instant;
use crate::types::tuple::Tuple;

pub use leg::{KeyReference, Leg, LegKind};
use leg::{LEG_LEN, decode_leg, encode_leg};

/// The highest version that this program reads, and the one of a flow that is one of its session's two ways, or that a
/// rule demands encrypted. Every other flow's record is of version 1, or, with a delta, of version 2, which programs of
/// before read.
pub const HANDOVER_VERSION: u16 = 3;
const WITH_DELTA: u16 = 2;
const WITHOUT_DELTA: u16 = 1;
/// Of version 3.
const PARTS_LEN: usize = 4;
const PART_DELTA: u8 = 1;
const PART_OLD_WAY: u8 = 2;
const PART_NEW_WAY: u8 = 4;
const PART_RULED: u8 = 8;
const PART_GUARDED: u8 = 16;
const PART_KEY_SESSION: u8 = 32;
const PART_FETCHED: u8 = 64;
/// Most legs of a flow in a record.
pub const LEGS_MAX: usize = 8;
const MAGIC: [u8; 4] = *b"MGHO";
const FIXED_LEN: usize = 152;
const NUMBERS_LEN: usize = 32;
const SOURCE_LEN: usize = 32;
const GIVE_UP_LEN: usize = 4;
const KEY_SESSION_LEN: usize = 16;
const FETCHED_LEN: usize = 32;
const HAS_SOURCE: u8 = 8;
const HAS_GIVE_UP: u8 = 16;
const DEMANDS: u8 = 32;
const PEER_DEMANDS: u8 = 64;
const HAS_CHAIN: u8 = 128;
const NO_SCALE: u8 = 255;
const UDP: u8 = 17;

/// Why bytes are no record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandoverError {
    /// Of another version of this program.
    #[error(
        "the hand-over record has version {found}, this program reads version {HANDOVER_VERSION}; run the same version \
         on both sides"
    )]
    Version {
        /// The version found.
        found: u16,
    },
    /// Not a record, or damaged.
    #[error("the hand-over record is damaged at byte {at}; export the flow again")]
    Malformed {
        /// Where the first wrong thing stands.
        at: usize,
    },
}

/// Why a flow cannot be adopted here. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdoptError {
    /// The flow is not in the middle of its life.
    #[error("the flow is over, or was never set up; there is nothing to carry on")]
    NotAlive,
    /// Not the two legs of an end host's flow.
    #[error("this host carries flows from sal0 to an encapsulating stack or a card only; the record has other legs")]
    Legs,
    /// The identifier or the five-tuple is in use.
    #[error("another flow of this host has the same {0}; give the restored socket another tuple")]
    Taken(&'static str),
    /// No association with the peer.
    #[error("this host shares no association with host {0}; connect to it once, then adopt the flow")]
    UnknownPeer(HostId),
    /// The flow table is at its bound.
    #[error("the flow table is full: {limit} flows; close some, or raise the limit")]
    Full {
        /// The bound.
        limit: usize,
    },
}

/// What one direction of a TCP flow last showed: needed to restart or to reset the local TCP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Numbers {
    /// Highest sequence number, and the length of its segment.
    pub highest: (u32, u32),
    /// Last acknowledgement.
    pub last_ack: u32,
    /// Last window, unscaled.
    pub last_window: u16,
    /// Window scale from the SYN.
    pub scale: Option<u8>,
    /// Whether the SYN permitted SACK.
    pub sack_permitted: bool,
    /// TSval and TSecr.
    pub timestamps: Option<(u32, u32)>,
}

/// A flow, as it leaves the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandoverRecord {
    /// Local identifier: what the peer's DATA names.
    pub flow: FlowId,
    /// The peer's identifier.
    pub peer_flow: FlowId,
    /// The session, the same on all hosts.
    pub session: SessionId,
    /// The one that its keys are of, where the session has become another since: a program has left from between.
    pub key_session: Option<SessionId>,
    /// The name.
    pub service: ServiceId,
    /// At the responder, the port of the service that the initiator asked for. Without a leg at `sal0` it is zero.
    pub port: u16,
    /// What the initiator's socket is called, where it has a name of its own.
    pub source: Option<ServiceId>,
    /// Which end this is.
    pub role: Role,
    /// Where in its life it is.
    pub lifecycle: Lifecycle,
    /// Whether the responder's right to the name was proved.
    pub authenticated: bool,
    /// FINs seen, egress and ingress.
    pub fins: (bool, bool),
    /// Whether this host demands that the flow is sealed.
    pub is_demanded: bool,
    /// Whether the peer does.
    pub is_demanded_by_peer: bool,
    /// Whether a rule of this host does.
    pub is_demanded_by_rule: bool,
    /// Nothing of it may be sent until it is encrypted.
    pub is_guarded: bool,
    /// Of the last entry that the cache was given.
    pub generation: u32,
    /// Milliseconds since it began.
    pub age_ms: u64,
    /// Milliseconds since it last carried anything.
    pub idle_ms: u64,
    /// From the application to the peer; `None` where nobody kept count.
    pub egress: Option<Numbers>,
    /// From the peer to the application.
    pub ingress: Option<Numbers>,
    /// For how long the service has its clients wait for a silent host, where it has said so to this end.
    pub give_up_after: Option<GiveUpAfter>,
    /// The boxes that its session goes through, if it does.
    pub chain: Option<ChainRecord>,
    /// What its numbers on the wire differ by. Clocks that are awaited show what they show when the record is made, at
    /// [`Instant::ZERO`].
    pub delta: Option<Delta>,
    /// Where its session has two ways because a program leaves: which of them it is.
    pub way: Option<KeptWay>,
    /// The hand-over by which the initiator has fetched its session, if it has.
    pub fetched: Option<PeerTicket>,
    /// The application's leg first.
    pub legs: Vec<Leg>,
}

const LIFECYCLES: [(Lifecycle, u8); 5] = [
    (Lifecycle::Connecting, 1),
    (Lifecycle::Established, 2),
    (Lifecycle::HalfClosed, 3),
    (Lifecycle::Closed, 4),
    (Lifecycle::TimedOut, 5),
];

impl HandoverRecord {
    /// The bytes. Legs beyond [`LEGS_MAX`] are left out; no flow has so many.
    pub fn encode(&self) -> Vec<u8> {
        let legs = &self.legs[..self.legs.len().min(LEGS_MAX)];
        let rest = self.source.map_or(0, |_| SOURCE_LEN) + self.give_up_after.map_or(0, |_| GIVE_UP_LEN);
        let rest = rest + self.chain.as_ref().map_or(0, ChainRecord::len);
        let rest = rest + self.delta.map_or(0, |_| DELTA_RECORD_LEN);
        let old_way = match &self.way {
            Some(KeptWay::Old(record)) => Some(record),
            _ => None,
        };
        let parts = self.parts();
        let has_parts = parts & !PART_DELTA != 0;
        let rest = rest + if has_parts { PARTS_LEN } else { 0 } + old_way.map_or(0, PartingRecord::len);
        let rest = rest + self.key_session.map_or(0, |_| KEY_SESSION_LEN);
        let rest = rest + self.fetched.map_or(0, |_| FETCHED_LEN);
        let whole = FIXED_LEN + legs.len() * LEG_LEN + rest;
        let mut out = Vec::with_capacity(whole);
        out.extend_from_slice(&MAGIC);
        let version = match parts {
            0 => WITHOUT_DELTA,
            PART_DELTA => WITH_DELTA,
            _ => HANDOVER_VERSION,
        };
        out.extend_from_slice(&version.to_be_bytes());
        // At most 152 + 8 × 68 + 32 + 4 + 260 + 4 + 20 + 56 + 16 + 32.
        out.extend_from_slice(&(whole as u16).to_be_bytes());
        out.extend_from_slice(&self.flow.0.to_be_bytes());
        out.extend_from_slice(&self.peer_flow.0.to_be_bytes());
        out.extend_from_slice(&self.session.0);
        out.extend_from_slice(&self.service.0);
        let role = if self.role == Role::Initiator { 1 } else { 2 };
        let lifecycle = LIFECYCLES.iter().find(|(state, _)| *state == self.lifecycle).map_or(0, |(_, number)| *number);
        let flags = u8::from(self.authenticated) | u8::from(self.fins.0) << 1 | u8::from(self.fins.1) << 2;
        let flags = flags | if self.is_demanded { DEMANDS } else { 0 };
        let flags = flags | if self.is_demanded_by_peer { PEER_DEMANDS } else { 0 };
        let flags = flags | self.source.map_or(0, |_| HAS_SOURCE) | self.give_up_after.map_or(0, |_| HAS_GIVE_UP);
        let flags = flags | self.chain.as_ref().map_or(0, |_| HAS_CHAIN);
        out.extend_from_slice(&[role, lifecycle, flags, legs.len() as u8]);
        out.extend_from_slice(&self.generation.to_be_bytes());
        out.extend_from_slice(&self.age_ms.to_be_bytes());
        out.extend_from_slice(&self.idle_ms.to_be_bytes());
        out.extend_from_slice(&encode_numbers(self.egress.as_ref()));
        out.extend_from_slice(&encode_numbers(self.ingress.as_ref()));
        for leg in legs {
            out.extend_from_slice(&encode_leg(leg, self.port));
        }
        out.extend(self.source.iter().flat_map(|source| source.0));
        out.extend(self.give_up_after.iter().flat_map(|told| told.ms().to_be_bytes()));
        out.extend(self.chain.iter().flat_map(ChainRecord::encode));
        if has_parts {
            out.extend_from_slice(&[parts, 0, 0, 0]);
        }
        out.extend(self.delta.iter().flat_map(|delta| delta.encode(Instant::ZERO)));
        out.extend(old_way.iter().flat_map(|record| record.encode()));
        out.extend(self.key_session.iter().flat_map(|session| session.0));
        out.extend(self.fetched.iter().flat_map(|fetched| fetched.peer.0.into_iter().chain(fetched.ticket.0)));
        out
    }

    /// What there is behind the legs, and what the flags have no room for.
    fn parts(&self) -> u8 {
        let way = match &self.way {
            None => 0,
            Some(KeptWay::Old(_)) => PART_OLD_WAY,
            Some(KeptWay::New) => PART_NEW_WAY,
        };
        let part = |part: u8, is_there: bool| if is_there { part } else { 0 };
        way | part(PART_DELTA, self.delta.is_some())
            | part(PART_RULED, self.is_demanded_by_rule)
            | part(PART_GUARDED, self.is_guarded)
            | part(PART_KEY_SESSION, self.key_session.is_some())
            | part(PART_FETCHED, self.fetched.is_some())
    }

    /// Reads a record.
    ///
    /// # Errors
    ///
    /// Another version, or not a record at all.
    pub fn decode(bytes: &[u8]) -> Result<Self, HandoverError> {
        let reader = Reader(bytes);
        if reader.array::<4>(0)? != MAGIC {
            return Err(HandoverError::Malformed { at: 0 });
        }
        let found = reader.u16(4)?;
        if !(WITHOUT_DELTA..=HANDOVER_VERSION).contains(&found) {
            return Err(HandoverError::Version { found });
        }
        let legs_len = usize::from(reader.byte(67)?);
        let flags = reader.byte(66)?;
        let source_at = FIXED_LEN + legs_len * LEG_LEN;
        let give_up_at = source_at + if flags & HAS_SOURCE == 0 { 0 } else { SOURCE_LEN };
        let chain_at = give_up_at + if flags & HAS_GIVE_UP == 0 { 0 } else { GIVE_UP_LEN };
        let chain = if flags & HAS_CHAIN == 0 { None } else { Some(decode_chain(bytes, chain_at)?) };
        let parts_at = chain_at + chain.as_ref().map_or(0, ChainRecord::len);
        let (parts, delta_at) = match found {
            WITHOUT_DELTA => (0, parts_at),
            WITH_DELTA => (PART_DELTA, parts_at),
            _ => (decode_parts(&reader, parts_at)?, parts_at + PARTS_LEN),
        };
        let delta = if parts & PART_DELTA == 0 { None } else { Some(decode_delta(&reader, delta_at)?) };
        let way_at = delta_at + delta.map_or(0, |_| DELTA_RECORD_LEN);
        let (way, key_session_at) = decode_way(bytes, parts, way_at)?;
        let has_key_session = parts & PART_KEY_SESSION != 0;
        let fetched_at = key_session_at + if has_key_session { KEY_SESSION_LEN } else { 0 };
        let fetched = if parts & PART_FETCHED == 0 { None } else { Some(decode_fetched(&reader, fetched_at)?) };
        let whole = fetched_at + fetched.map_or(0, |_| FETCHED_LEN);
        if legs_len > LEGS_MAX || usize::from(reader.u16(6)?) != whole || bytes.len() != whole {
            return Err(HandoverError::Malformed { at: 6 });
        }
        let role = match reader.byte(64)? {
            1 => Role::Initiator,
            2 => Role::Responder,
            _ => return Err(HandoverError::Malformed { at: 64 }),
        };
        let lifecycle = reader.byte(65)?;
        let lifecycle = LIFECYCLES.iter().find(|(_, number)| *number == lifecycle).map(|(state, _)| *state);
        let legs_at = (0..legs_len).map(|leg| FIXED_LEN + leg * LEG_LEN);
        let legs: Vec<Leg> = legs_at.clone().map(|at| decode_leg(&reader, at)).collect::<Result<_, _>>()?;
        let port_at = legs_at.zip(&legs).find(|(_, leg)| leg.kind == LegKind::Sal0).map(|(at, _)| at + 64);
        Ok(Self {
            flow: FlowId(reader.u32(8)?),
            peer_flow: FlowId(reader.u32(12)?),
            session: SessionId(reader.array(16)?),
            key_session: if has_key_session { Some(SessionId(reader.array(key_session_at)?)) } else { None },
            service: ServiceId(reader.array(32)?),
            port: port_at.map_or(Ok(0), |at| reader.u16(at))?,
            source: if give_up_at > source_at { Some(ServiceId(reader.array(source_at)?)) } else { None },
            give_up_after: if chain_at > give_up_at { Some(decode_give_up(&reader, give_up_at)?) } else { None },
            chain,
            delta,
            way,
            fetched,
            role,
            lifecycle: lifecycle.ok_or(HandoverError::Malformed { at: 65 })?,
            authenticated: flags & 1 != 0,
            fins: (flags & 2 != 0, flags & 4 != 0),
            is_demanded: flags & DEMANDS != 0,
            is_demanded_by_peer: flags & PEER_DEMANDS != 0,
            is_demanded_by_rule: parts & PART_RULED != 0,
            is_guarded: parts & PART_GUARDED != 0,
            generation: reader.u32(68)?,
            age_ms: u64::from_be_bytes(reader.array(72)?),
            idle_ms: u64::from_be_bytes(reader.array(80)?),
            egress: decode_numbers(&reader, 88)?,
            ingress: decode_numbers(&reader, 88 + NUMBERS_LEN)?,
            legs,
        })
    }

    /// The application's leg, if it is at `sal0`.
    pub(crate) fn app(&self) -> Option<Tuple> {
        self.legs.iter().find(|leg| leg.kind == LegKind::Sal0).and_then(|leg| leg.tuple)
    }

    /// The flow ports, where it has agreed on some.
    fn ports(&self) -> Option<Tuple> {
        self.legs.iter().find(|leg| leg.kind == LegKind::Nic).and_then(|leg| leg.tuple)
    }

    /// What holds of the flow. `demands`: this end's configuration wants it sealed.
    fn marks(&self, demands: bool) -> Marks {
        let mark = |mark: Marks, holds: bool| if holds { mark } else { Marks::empty() };
        Marks::CONFIRMED
            | mark(Marks::AUTHENTICATED, self.authenticated)
            | mark(Marks::FIN_EGRESS, self.fins.0)
            | mark(Marks::FIN_INGRESS, self.fins.1)
            | mark(Marks::DEMANDS, self.is_demanded || demands)
            | mark(Marks::PEER_DEMANDS, self.is_demanded_by_peer)
            // It may have gone another way before.
            | mark(Marks::LATER, self.chain.is_some())
    }

    /// The pair of addresses that it has for itself, where it does not go by that of all flows with its peer.
    fn pair(&self) -> Option<Pair> {
        let tuple = self.legs.iter().find(|leg| leg.kind == LegKind::Stack)?.tuple?;
        let local = Some(tuple.source.ip()).filter(|local| !local.is_unspecified());
        Some(Pair { local, remote: tuple.destination })
    }

    /// The keys of the leg to the network, and how it is sealed.
    fn keys(&self) -> Option<(KeyReference, Option<Cipher>)> {
        let stack = self.legs.iter().find(|leg| leg.kind == LegKind::Stack)?;
        let cipher = Cipher::of_stack(stack.stack);
        stack.keys.filter(|_| stack.stack == STACK_ENCAP || cipher.is_some()).map(|keys| (keys, cipher))
    }
}

pub(crate) fn unspecified(like: IpAddr) -> IpAddr {
    if like.is_ipv4() { core::net::Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
}

/// A pair of UDP addresses.
fn tuple_of_pair(pair: Pair) -> Tuple {
    let local = pair.local.unwrap_or(unspecified(pair.remote.ip()));
    Tuple { protocol: UDP, source: SocketAddr::new(local, PORT), destination: pair.remote }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&self, at: usize) -> Result<[u8; N], HandoverError> {
        let bytes = self.0.get(at..at + N).and_then(|bytes| bytes.try_into().ok());
        bytes.ok_or(HandoverError::Malformed { at: self.0.len() })
    }

    fn byte(&self, at: usize) -> Result<u8, HandoverError> {
        self.array::<1>(at).map(|[byte]| byte)
    }

    fn u16(&self, at: usize) -> Result<u16, HandoverError> {
        self.array(at).map(u16::from_be_bytes)
    }

    fn u32(&self, at: usize) -> Result<u32, HandoverError> {
        self.array(at).map(u32::from_be_bytes)
    }

    fn socket(&self, at: usize) -> Result<SocketAddr, HandoverError> {
        let ip = Ipv6Addr::from(self.array::<16>(at)?);
        Ok(SocketAddr::new(ip.to_canonical(), self.u16(at + 16)?))
    }

    fn zeros(&self, at: usize, len: usize) -> Result<(), HandoverError> {
        let bytes = self.0.get(at..at + len).ok_or(HandoverError::Malformed { at: self.0.len() })?;
        match bytes.iter().position(|byte| *byte != 0) {
            None => Ok(()),
            Some(first) => Err(HandoverError::Malformed { at: at + first }),
        }
    }
}

fn encode_numbers(numbers: Option<&Numbers>) -> [u8; NUMBERS_LEN] {
    let mut out = [0; NUMBERS_LEN];
    let Some(numbers) = numbers else { return out };
    out[..4].copy_from_slice(&numbers.highest.0.to_be_bytes());
    out[4..8].copy_from_slice(&numbers.highest.1.to_be_bytes());
    out[8..12].copy_from_slice(&numbers.last_ack.to_be_bytes());
    out[12..14].copy_from_slice(&numbers.last_window.to_be_bytes());
    out[14] = numbers.scale.unwrap_or(NO_SCALE);
    out[15] = 1 | u8::from(numbers.sack_permitted) << 1 | u8::from(numbers.timestamps.is_some()) << 2;
    let (value, echo) = numbers.timestamps.unwrap_or_default();
    out[16..20].copy_from_slice(&value.to_be_bytes());
    out[20..24].copy_from_slice(&echo.to_be_bytes());
    out
}

fn decode_numbers(reader: &Reader<'_>, at: usize) -> Result<Option<Numbers>, HandoverError> {
    let flags = reader.byte(at + 15)?;
    if flags & 1 == 0 {
        return reader.zeros(at, NUMBERS_LEN).map(|()| None);
    }
    let scale = Some(reader.byte(at + 14)?).filter(|scale| *scale != NO_SCALE);
    // RFC 7323: a scale is at most 14.
    if flags > 7 || scale.is_some_and(|scale| scale > 14) {
        return Err(HandoverError::Malformed { at: at + 14 });
    }
    let has_timestamps = flags & 4 != 0;
    if has_timestamps { reader.zeros(at + 24, 8) } else { reader.zeros(at + 16, 16) }?;
    Ok(Some(Numbers {
        highest: (reader.u32(at)?, reader.u32(at + 4)?),
        last_ack: reader.u32(at + 8)?,
        last_window: reader.u16(at + 12)?,
        scale,
        sack_permitted: flags & 2 != 0,
        timestamps: if has_timestamps { Some((reader.u32(at + 16)?, reader.u32(at + 20)?)) } else { None },
    }))
}

fn decode_delta(reader: &Reader<'_>, at: usize) -> Result<Delta, HandoverError> {
    Delta::decode(&reader.array(at)?, Instant::ZERO).ok_or(HandoverError::Malformed { at })
}

fn decode_parts(reader: &Reader<'_>, at: usize) -> Result<u8, HandoverError> {
    reader.zeros(at + 1, PARTS_LEN - 1)?;
    let parts = reader.byte(at)?;
    let is_one_way = matches!(parts & (PART_OLD_WAY | PART_NEW_WAY), 0 | PART_OLD_WAY | PART_NEW_WAY);
    // What has none of these is of an earlier version.
    let is_needed = parts & !PART_DELTA != 0;
    // All bits but the last one mean something.
    let is_known = parts & 128 == 0;
    if is_one_way && is_needed && is_known { Ok(parts) } else { Err(HandoverError::Malformed { at }) }
}

/// Gives where it ends, too.
fn decode_way(bytes: &[u8], parts: u8, at: usize) -> Result<(Option<KeptWay>, usize), HandoverError> {
    Ok(match parts & (PART_OLD_WAY | PART_NEW_WAY) {
        PART_OLD_WAY => {
            let record = bytes.get(at..).and_then(PartingRecord::decode).ok_or(HandoverError::Malformed { at })?;
            let end = at + record.len();
            (Some(KeptWay::Old(record)), end)
        }
        PART_NEW_WAY => (Some(KeptWay::New), at),
        _ => (None, at),
    })
}

fn decode_fetched(reader: &Reader<'_>, at: usize) -> Result<PeerTicket, HandoverError> {
    Ok(PeerTicket { peer: HostId(reader.array(at)?), ticket: Ticket(reader.array(at + 16)?) })
}

fn decode_give_up(reader: &Reader<'_>, at: usize) -> Result<GiveUpAfter, HandoverError> {
    let ms = reader.u32(at)?;
    let told = GiveUpAfter::of_ms(ms);
    // A record has one form: nobody writes less than the least.
    if told.ms() == ms { Ok(told) } else { Err(HandoverError::Malformed { at }) }
}

fn decode_chain(bytes: &[u8], at: usize) -> Result<ChainRecord, HandoverError> {
    bytes.get(at..).and_then(ChainRecord::decode).ok_or(HandoverError::Malformed { at })
}

impl Sal {
    /// The record of a flow, or `None` where there is nothing to hand over: no such flow, one that is still being set
    /// up, or one that was given up. One that is closed, by both sides or by a reset, lingers where it goes, too. The
    /// flow stays here; whoever hands it over closes it. The core keeps no TCP numbers: a cache that does adds them.
    pub fn export_flow(&self, now: Instant, id: FlowId) -> Option<HandoverRecord> {
        let flow = self.flows.get(id)?;
        // A session that runs uses a way once all of it is confirmed, and until then has another one.
        let is_of_running = flow.is_at_box() && flow.has(Marks::LATER);
        let is_set_up = flow.role == Role::Responder || flow.has(Marks::CONFIRMED) || is_of_running;
        let way = self.kept_way(now, flow);
        let goes_on = (flow.directions.has_egress() || way.is_some()) && !flow.has(Marks::LEAVING);
        if !is_set_up || !flow.carries_data() || !goes_on || self.fetches.is_between(id) {
            return None;
        }
        let association = self.associations.get(flow.association)?;
        let keys = KeyReference { host: association.host, association: association.local_id };
        let app = Leg { kind: LegKind::Sal0, stack: 0, tuple: Some(flow.app), flow: None, keys: None };
        // In the middle of a change the higher one of the two. What repairs is not handed over.
        let seal = flow.seal.as_ref().filter(|_| flow.stacks.has_sealed());
        let stack = seal.map_or(STACK_ENCAP, |keys| keys.cipher.stack());
        let aside = flow.side.and_then(|side| self.side_path(side)).map(|side| tuple_of_pair(side.pair));
        let wire = Leg { kind: LegKind::Stack, stack, tuple: aside, flow: Some(flow.peer_flow), keys: Some(keys) };
        let remote = aside.map_or(association.remote, |pair| pair.destination);
        let ports = flow.direct.peer.map(|_| remote.ip()).map(|peer| Tuple {
            protocol: flow.app.protocol,
            // The route says with which address; only the port is the flow's own.
            source: SocketAddr::new(unspecified(peer), flow.direct.local_port),
            destination: SocketAddr::new(peer, flow.direct.peer_port),
        });
        let direct =
            ports.map(|tuple| Leg { kind: LegKind::Nic, stack: 0, tuple: Some(tuple), flow: None, keys: None });
        let millis = |since: Instant| u64::try_from(now.since(since).as_millis()).unwrap_or(u64::MAX);
        let session = if way.is_some() { flow.session } else { self.reconfigurations.session_before(flow) };
        Some(HandoverRecord {
            flow: flow.id,
            peer_flow: flow.peer_flow,
            session,
            key_session: Some(flow.key_session()).filter(|of_keys| *of_keys != session),
            service: flow.service,
            port: flow.port,
            source: flow.source.as_deref().copied(),
            way,
            fetched: flow.fetched(),
            role: flow.role,
            lifecycle: flow.lifecycle,
            authenticated: flow.has(Marks::AUTHENTICATED),
            fins: (flow.has(Marks::FIN_EGRESS), flow.has(Marks::FIN_INGRESS)),
            is_demanded: flow.has(Marks::DEMANDS),
            is_demanded_by_peer: flow.has(Marks::PEER_DEMANDS),
            is_demanded_by_rule: flow.has(Marks::RULED),
            is_guarded: flow.has(Marks::GUARDED),
            generation: flow.generation,
            age_ms: millis(flow.since),
            idle_ms: millis(flow.active),
            egress: None,
            ingress: None,
            give_up_after: self.patience.told_of(&self.associations, flow),
            chain: flow.chain.as_deref().map(ChainRecord::of),
            delta: flow.delta.as_deref().map(|delta| delta.shown_at(now, Instant::ZERO)),
            legs: [app, wire].into_iter().chain(direct).collect(),
        })
    }

    /// Whether nobody has the flow's identifier or five-tuple. `is_aside`: it is the new one of its session's two ways,
    /// and the old one has the tuple.
    fn check_is_free(&mut self, flow: FlowId, app: &Tuple, is_aside: bool) -> Result<(), AdoptError> {
        if flow.0 == 0 || self.flows.get(flow).is_some() {
            return Err(AdoptError::Taken("identifier"));
        }
        if !is_aside && let Some(old) = self.flows.by_tuple(app) {
            self.forget_kept_old(old, flow);
        }
        if !is_aside && self.flows.by_tuple(app).is_some() {
            return Err(AdoptError::Taken("five-tuple"));
        }
        Ok(())
    }

    /// Carries a flow on that another process or host has exported. Its entry is in the output queue then.
    ///
    /// # Errors
    ///
    /// Why not; nothing has changed.
    pub fn adopt_flow(&mut self, now: Instant, record: &HandoverRecord) -> Result<(), AdoptError> {
        self.now = now;
        if matches!(record.lifecycle, Lifecycle::Connecting | Lifecycle::TimedOut) {
            return Err(AdoptError::NotAlive);
        }
        let (app, (keys, cipher)) = record.app().zip(record.keys()).ok_or(AdoptError::Legs)?;
        let ports = record.ports();
        if record.legs.len() != 2 + usize::from(ports.is_some()) {
            return Err(AdoptError::Legs);
        }
        let limit = self.config.limits.flows;
        if self.flows.len() >= limit {
            return Err(AdoptError::Full { limit });
        }
        let is_aside = record.way == Some(KeptWay::New);
        self.check_is_free(record.flow, &app, is_aside)?;
        let same = self.associations.get(keys.association).filter(|association| association.host == keys.host);
        // The keys of a sealed flow are of one association; only a host's own with itself is made anew, at both ends.
        let is_free = cipher.is_none() || keys.host == self.config.host_id();
        let association = same.or_else(|| self.associations.by_host(keys.host).filter(|_| is_free));
        let association = association.ok_or(AdoptError::UnknownPeer(keys.host))?.local_id;
        let before = |ms: u64| Instant::from_micros(now.micros().saturating_sub(ms.saturating_mul(1000)));
        let mut flow = Flow::new(record.flow, record.session, record.service, record.role, app, before(record.age_ms));
        flow.set_key_session(record.key_session);
        flow.port = record.port;
        flow.peer_flow = record.peer_flow;
        flow.lifecycle = record.lifecycle;
        flow.association = association;
        flow.generation = record.generation.saturating_add(1);
        flow.active = before(record.idle_ms);
        flow.source = record.source.map(Box::new);
        flow.chain = record.chain.as_ref().map(|chain| Box::new(chain.to_chained(record.service)));
        flow.set_fetched(record.fetched);
        flow.delta = record.delta.map(|delta| Box::new(delta.shown_at(Instant::ZERO, now)));
        if is_aside {
            flow.directions = Directions::PartedAside;
        }
        flow.marks = record.marks(self.secure.demands_secure(&record.service));
        self.flows.insert(flow);
        if record.lifecycle == Lifecycle::Closed {
            self.flows.set_deadline(record.flow, Some(now + LINGER));
        }
        self.associations.hold_flow(association, record.role);
        if let Some(pair) = record.pair() {
            // One too many goes by the pair of all others, as far as this end knows.
            let by = self.associations.peer_of(keys.host);
            let side = self.hold_side_path(by, keys.host, pair, true);
            self.flows.get_mut(record.flow).into_iter().for_each(|flow| flow.side = side);
        }
        if let Some(ports) = ports {
            self.flows.adopt_ports(&mut self.associations, &mut self.ports, now, record.flow, &ports);
        }
        if let Some(cipher) = cipher {
            self.keep_sealed(now, record.flow);
            self.flows.seal_flow(&self.associations, &self.config, record.flow, cipher);
            self.tell_epoch(now, association);
        }
        if record.give_up_after.is_some() {
            self.note_told(record.flow, record.give_up_after);
        }
        if let Some(KeptWay::Old(ways)) = record.way {
            self.adopt_old_way(record.flow, ways);
        }
        self.locations.announce_path(&self.associations, &mut self.queue, association);
        install_adopted(self, now, record);
        Ok(())
    }
}

/// Whatever keeps packets of a flow that was adopted from leaving plain.
fn guard_adopted(sal: &mut Sal, now: Instant, record: &HandoverRecord) {
    if record.is_guarded {
        guard::guard_as_before(sal, now, record.flow);
    }
    if record.is_demanded_by_rule {
        sal.stack_rules.carry_over(record.flow);
    }
    guard_as_rules_do(sal, now, record.flow);
}

/// Gives the cache the entry of a flow that was adopted. Of a session's new way it comes when both are there.
fn install_adopted(sal: &mut Sal, now: Instant, record: &HandoverRecord) {
    guard_adopted(sal, now, record);
    if record.way == Some(KeptWay::New) {
        return;
    }
    act_as_rules_do(sal, now, record.flow);
    let Some(entry) = sal.flows.get(record.flow).map(Flow::entry) else { return };
    sal.queue.update(EntryUpdate::Install(entry));
    sal.begin_policy(now, record.flow);
}

#[cfg(test)]
#[path = "handover_test.rs"]
pub(crate) mod tests;
