//! Extensions: type, length, value, padded to four bytes. An unknown one is skipped unless its critical bit is set.

use core::net::SocketAddr;

use crate::address::{emit_ip, parse_socket};
use crate::chain::Chain;
use crate::change::{CHANGE_LEN, ChangeRepr, DEMANDS};
use crate::grant::{GRANT_LEN, GrantRepr};
use crate::handover::{HANDOVER_LEN, HandoverRepr};
use crate::header::{Error, SessionId};
use crate::loss::{LOSS_LEN, LossRepr};
use crate::notice::{NOTICE_LEN, NoticeRepr};
use crate::order::{ORDER_LEN, OrderRepr};
use crate::reconfiguration::{RECONFIGURATION_LEN, ReconfigurationRepr};
use crate::splice::{CUT_LEN, CutRepr, SPLICE_LEN, SpliceRepr};
use crate::stripe::{ArrivalsRepr, STRIPE_LEN, StripeRepr};
use crate::timing::{TIMING_LEN, TimingRepr};

/// Bit of the type byte: who does not know this extension must not act on the message.
pub const CRITICAL: u8 = 0x80;
/// Bytes of a whole AUTH extension.
pub const AUTH_EXT_LEN: usize = 32;
/// Longest text of an ERROR, in bytes.
pub const ERROR_TEXT_MAX: usize = 128;
/// Bit of FLOW_PORT's flags byte.
const STARTS: u8 = 1;
/// In TERMS: a silent host is never given up.
pub const TERMS_NEVER: u32 = u32::MAX;
/// Bytes of MOVE's value.
const MOVE_LEN: usize = 40;
const PREFIX_LEN: usize = 4;
const ADDRESS_LEN: usize = 20;

/// Type bytes, critical bit included.
pub mod extension_type {
    #![allow(missing_docs)]
    use super::CRITICAL;
    pub const SOURCE_SERVICE: u8 = 1;
    pub const SESSION: u8 = 2;
    pub const ADDRESSES: u8 = 3;
    pub const CAPABILITIES: u8 = 4;
    pub const KEY_EXCHANGE: u8 = 5;
    pub const CERTIFICATE: u8 = 6 | CRITICAL;
    pub const CHAIN: u8 = 7 | CRITICAL;
    pub const RENDEZVOUS: u8 = 8;
    pub const ERROR: u8 = 9;
    pub const AUTH: u8 = 10 | CRITICAL;
    pub const COOKIE: u8 = 11 | CRITICAL;
    pub const STACK: u8 = 12 | CRITICAL;
    pub const FLOW_PORT: u8 = 13;
    pub const MOVE: u8 = 14 | CRITICAL;
    pub const STRIPE: u8 = 15;
    pub const ARRIVALS: u8 = 16;
    pub const NOTICE: u8 = 17;
    pub const GRANT: u8 = 19 | CRITICAL;
    pub const TERMS: u8 = 20;
    pub const HANDOVER: u8 = 22 | CRITICAL;
    pub const QUIET: u8 = 21;
    pub const FENCE_NUMBER: u8 = 23;
    pub const CHANGE: u8 = 24 | CRITICAL;
    pub const SYN_SEEN: u8 = 25;
    pub const LOSS: u8 = 26;
    pub const TIMING: u8 = 36;
    pub const RECONFIGURATION: u8 = 26 | CRITICAL;
    pub const SPLICE: u8 = 76 | CRITICAL;
    pub const CUT: u8 = 77 | CRITICAL;
    pub const ORDER: u8 = 78 | CRITICAL;
    pub const CHAIN_ADDED: u8 = 108 | CRITICAL;
}
use extension_type as kind;

macro_rules! error_codes {
    ($($(#[$doc:meta])* $name:ident = $number:literal;)*) => {
        /// Why something was refused.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum ErrorCode { $($(#[$doc])* $name,)* /// A number that this program does not know.
            Other(u16) }

        impl From<u16> for ErrorCode {
            fn from(number: u16) -> Self {
                match number { $($number => Self::$name,)* other => Self::Other(other) }
            }
        }

        impl From<ErrorCode> for u16 {
            fn from(code: ErrorCode) -> Self {
                match code { $(ErrorCode::$name => $number,)* ErrorCode::Other(other) => other }
            }
        }
    };
}

error_codes! {
    /// Nobody serves the name.
    NoService = 1;
    /// Nothing listens there.
    Refused = 2;
    /// The peer may not connect.
    NotAllowed = 3;
    /// The certificate does not cover the name.
    BadCertificate = 4;
    /// Come again with this cookie.
    CookieWanted = 5;
    /// A critical extension is not known.
    UnknownCritical = 6;
    /// No such flow.
    UnknownFlow = 7;
    /// The hop limit ran out.
    HopLimit = 8;
    /// Too busy.
    Overloaded = 9;
    /// Another version is spoken here.
    Version = 10;
    /// The shared key is lost.
    FullHandshakeWanted = 11;
    /// No such association.
    UnknownAssociation = 12;
    /// Ended by an operator.
    Closed = 13;
    /// The flow must be carried in a way that the two ends do not share: one demands `secure`, the other has not got
    /// it.
    NoCommonStack = 14;
    /// Another host uses the sender's key, was there before it, and is alive.
    KeptOut = 15;
    /// The instance has given the SYN to its listener, which says nothing: its queue is full, most often. No refusal.
    ListenerSilent = 16;
    /// The instance is drained: it takes no new flows, or has ended this one. Others may serve the name.
    Drained = 17;
    /// The connection cannot be ended quietly now: it carries something, or nobody finds its socket.
    NotQuiet = 18;
    /// The name is held by another host now.
    Elsewhere = 19;
    /// An end demands that the flow is sealed, and the change would give it less.
    Demanded = 20;
    /// The flow goes by several pairs of addresses at once.
    Striped = 21;
    /// A box of the chain has not passed on the session's first packet.
    BoxSilent = 22;
    /// A box of the chain refuses the session.
    BoxRefused = 23;
    /// A box of the chain has answered in the place of the service.
    BoxAnswered = 24;
    /// The service takes only what comes through boxes, and this has not.
    ChainRequired = 25;
    /// The next host of the chain has not answered in time.
    NoAnswer = 26;
    /// The box is a proxy, and the chain does not say so; or the chain says so of a box that is none.
    BoxOtherKind = 27;
    /// A box of the chain has changed the session's addresses or ports, and is not said to.
    BoxRewrites = 28;
    /// The session's first packet has no room for the tag by which a box's host would know it again.
    NoRoomForTag = 29;
    /// A box of the chain has changed addresses, and nobody can tell which session a packet is of.
    BoxAmbiguous = 30;
    /// A rule wants a change that an order at the receiver's host, or a rule there, is against.
    Outranked = 31;
    /// The stack is for flows of datagrams, and this is a connection.
    DatagramsOnly = 32;
    /// A box of the chain must see a session from its first packet on: it changes addresses, or ends connections.
    BoxNeedsFirst = 33;
    /// No policy that the host goes by names a box of the chain.
    BoxUnknown = 34;
    /// The SYN that has come is not the one that the initiator has sent: somebody on the path has changed it.
    SynChanged = 35;
    /// A program that was leaving the session has ended, and bytes that it had acknowledged are lost.
    BytesLost = 84;
}

/// SESSION: which session, and its header as middleboxes shall see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionRepr {
    /// The same on all hosts.
    pub session: SessionId,
    /// The client's address, and the port that its program uses.
    pub client: SocketAddr,
    /// The port of the service.
    pub service_port: u16,
    /// IP protocol of the application: 6 or 17.
    pub protocol: u8,
}

/// CAPABILITIES: what the sender can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CapabilitiesRepr {
    /// One bit per stack number, and [`CHANGES`](crate::CHANGES).
    pub stacks: u32,
    /// Largest UDP payload in bytes that the sender's path takes.
    pub mtu: u16,
}

/// TERMS: what the service asks of its clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TermsRepr {
    /// How long a silent host of the service is waited for, in milliseconds; [`TERMS_NEVER`]: for ever.
    pub give_up_after_ms: u32,
}

/// QUIET: the connection shall end in order if it has been quiet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuietRepr {
    /// For how long it must have carried nothing, in milliseconds.
    pub quiet_ms: u32,
}

/// KEY_EXCHANGE: one message of a Noise XX handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyExchangeRepr<'a> {
    /// The sender's host-ID, claimed.
    pub host_id: [u8; 16],
    /// The index by which the peer shall name a new association; zero for none.
    pub assoc_id: u32,
    /// The handshake message.
    pub message: &'a [u8],
}

/// STACK: how the flow is carried from its first packet on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StackRepr {
    /// Number of the stack.
    pub stack: u8,
    /// The sender demands a sealed flow. Versions before this one never say so.
    pub demands: bool,
}

/// FLOW_PORT: the sender's port of the flow's direct packets (DESIGN §7). Who does not know it stays encapsulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowPortRepr {
    /// The port.
    pub port: u16,
    /// The sender sends direct from here on, and has encapsulated nothing of this flow.
    pub starts: bool,
}

bitflags::bitflags! {
    /// Flags of MOVE. Unknown bits are kept and mean nothing.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct MoveFlags: u16 {
        /// The sender's former location is dead: what was in flight is lost.
        const BROKEN = 0x0001;
        /// What is confirmed came from another place than where the sender knows the receiver to be. In a PROBE that
        /// asks: so did the receiver's ACK, and packets do not go there before the receiver has proved it with RSYN.
        const ELSEWHERE = 0x0002;
        /// A direct packet of the receiver has come by this pair of addresses.
        const DIRECT = 0x0004;
        /// The sender has heard of it, and sends directly again.
        const OPENED = 0x0008;
        /// An RSYN was of no later location than this number's.
        const STALE = 0x0010;
        /// In a PROBE: another host, at the address, shows the receiver's key.
        const TWIN = 0x0020;
        /// The sender's rules demand that flows are sealed at this pair of addresses: the receiver sends nothing plain
        /// there until they are, or until it is freed. In a PROBE: the sender waits to be freed, and the token names
        /// its question.
        const SEALED = 0x0040;
        /// In a PROBE: what is not sealed by now need not be. The token is that of the question.
        const FREED = 0x0080;
        /// In a PROBE: the sender's rules demand that the flow is sealed: the receiver sends nothing plain of it until
        /// it is, or until it is freed.
        const DEMANDED = 0x0100;
        /// In a PROBE: what the receiver demanded of the flow is known, and it waits. The token is that of the demand.
        const WAITS = 0x0200;
        const _ = !0;
    }
}

/// MOVE: where a host is, as its peer is to believe it (docs/decisions/0018).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoveRepr {
    /// Which of the mover's locations: each is one more than the last. Of a PROBE, which one.
    pub number: u32,
    /// What shows that RSYN-ACK came to where it was sent; zero in RSYN.
    pub token: u64,
    /// In RSYN and RSYN-DONE, what the mover expects of a peer that receives what goes to the address that this goes
    /// to; the answer repeats it. Zero in a PROBE.
    pub challenge: u64,
    /// In RSYN, the address that the mover thinks it sends from; in what answers, the source that was seen.
    pub address: SocketAddr,
    /// Flags.
    pub flags: MoveFlags,
}

impl MoveRepr {
    fn emit(&self, value: &mut [u8]) {
        value[..4].copy_from_slice(&self.number.to_be_bytes());
        value[4..12].copy_from_slice(&self.token.to_be_bytes());
        value[12..20].copy_from_slice(&self.challenge.to_be_bytes());
        emit_ip(self.address.ip(), &mut value[20..36]);
        value[36..38].copy_from_slice(&self.address.port().to_be_bytes());
        value[38..40].copy_from_slice(&self.flags.bits().to_be_bytes());
    }
}

/// ERROR: why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorRepr<'a> {
    /// The decision.
    pub code: ErrorCode,
    /// An explanation; at most [`ERROR_TEXT_MAX`] bytes.
    pub text: &'a str,
}

/// AUTH: the tag that every message but a SYN needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuthRepr {
    /// The receiver's index of the association.
    pub assoc_id: u32,
    /// The sender's epoch.
    pub epoch: u32,
    /// The receiver's, as far as the sender knows it.
    pub receiver_epoch: u32,
    /// Over header and payload with tag and resolvable part as zero.
    pub tag: [u8; 16],
}

/// ADDRESSES: where else the sender can be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses<'a>(&'a [u8]);

impl<'a> Addresses<'a> {
    /// Around the value of an extension.
    ///
    /// # Errors
    ///
    /// Not a whole number of addresses.
    pub fn parse(value: &'a [u8]) -> Result<Self, Error> {
        if value.len().is_multiple_of(ADDRESS_LEN) { Ok(Self(value)) } else { Err(Error) }
    }

    /// Writes one entry, 20 bytes, at the start of `out`.
    ///
    /// # Panics
    ///
    /// When `out` is shorter.
    pub fn emit_one(address: SocketAddr, flags: u16, out: &mut [u8]) {
        emit_ip(address.ip(), &mut out[..16]);
        out[16..18].copy_from_slice(&address.port().to_be_bytes());
        out[18..20].copy_from_slice(&flags.to_be_bytes());
    }

    /// The value of the extension.
    pub const fn as_bytes(&self) -> &'a [u8] {
        self.0
    }

    /// Address and flags, in order of preference.
    pub fn iter(&self) -> impl Iterator<Item = (SocketAddr, u16)> + 'a {
        self.0
            .chunks_exact(ADDRESS_LEN)
            .map(|entry| (parse_socket(&entry[..16], &entry[16..18]), u16::from_be_bytes([entry[18], entry[19]])))
    }
}

/// One extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extension<'a> {
    /// The sender's own name.
    SourceService([u8; 32]),
    /// The session.
    Session(SessionRepr),
    /// The sender's addresses.
    Addresses(Addresses<'a>),
    /// What the sender can do.
    Capabilities(CapabilitiesRepr),
    /// A handshake message.
    KeyExchange(KeyExchangeRepr<'a>),
    /// A certificate chain.
    Certificate(&'a [u8]),
    /// The boxes that the session goes through.
    Chain(Chain<'a>),
    /// The sender's rendezvous router.
    Rendezvous(SocketAddr),
    /// Why not.
    Error(ErrorRepr<'a>),
    /// The tag.
    Auth(AuthRepr),
    /// A cookie, to be brought back.
    Cookie([u8; 24]),
    /// The stack that shall carry the flow.
    Stack(StackRepr),
    /// The sender's flow port.
    FlowPort(FlowPortRepr),
    /// Where the mover is.
    Move(MoveRepr),
    /// A pair of addresses is a place of the flow.
    Stripe(StripeRepr),
    /// What has come by each place.
    Arrivals(ArrivalsRepr),
    /// A name that the sender serves.
    Notice(NoticeRepr),
    /// Flows that the kernels may open.
    Grant(GrantRepr),
    /// What the service asks of its clients.
    Terms(TermsRepr),
    /// The session goes on at another host.
    Handover(HandoverRepr),
    /// The connection shall end if it has been quiet.
    Quiet(QuietRepr),
    /// With which number the sender holds the name for itself.
    FenceNumber(u64),
    /// A step of a change of the flow's stack.
    Change(ChangeRepr),
    /// A digest of what the sender's SYN has asked for.
    SynSeen([u8; 32]),
    /// How much of a flow has arrived.
    Loss(LossRepr),
    /// How evenly they have arrived.
    Timing(TimingRepr),
    /// A step by which a session comes to go through other boxes.
    Reconfiguration(ReconfigurationRepr),
    /// Two connections become one.
    Splice(SpliceRepr),
    /// What goes by which way of a session.
    Cut(CutRepr),
    /// An order of a host that is not the client's.
    Order(OrderRepr),
    /// A critical one that this program does not know, by type byte.
    UnknownCritical(u8),
}

const fn is_unknown_critical(byte: u8) -> bool {
    byte & CRITICAL != 0
        && !matches!(
            byte,
            kind::CERTIFICATE
                | kind::CHAIN
                | kind::AUTH
                | kind::COOKIE
                | kind::STACK
                | kind::MOVE
                | kind::GRANT
                | kind::HANDOVER
                | kind::CHANGE
                | kind::RECONFIGURATION
                | kind::SPLICE
                | kind::CUT
                | kind::ORDER
                | kind::CHAIN_ADDED
        )
}

fn array<const N: usize>(value: &[u8]) -> Result<[u8; N], Error> {
    value.get(..N).and_then(|bytes| bytes.try_into().ok()).ok_or(Error)
}

fn exactly(value: &[u8], len: usize) -> Result<(), Error> {
    if value.len() == len { Ok(()) } else { Err(Error) }
}

/// All of a value that has this length.
fn whole<const N: usize>(value: &[u8]) -> Result<[u8; N], Error> {
    value.try_into().map_err(|_| Error)
}

fn u32_at(value: &[u8], at: usize) -> Result<u32, Error> {
    Ok(u32::from_be_bytes(array(value.get(at..).ok_or(Error)?)?))
}

impl<'a> Extension<'a> {
    /// Reads one extension from the start of `bytes`. Gives it (`None` for an unknown one that may be skipped), its
    /// type byte, and the bytes that it takes.
    ///
    /// # Errors
    ///
    /// Cut short, or a value of the wrong length.
    pub fn parse(bytes: &'a [u8]) -> Result<(Option<Self>, u8, usize), Error> {
        let prefix: [u8; PREFIX_LEN] = array(bytes)?;
        let value_len = usize::from(u16::from_be_bytes([prefix[2], prefix[3]]));
        let value = bytes.get(PREFIX_LEN..PREFIX_LEN + value_len).ok_or(Error)?;
        let taken = PREFIX_LEN + value_len.next_multiple_of(4);
        if taken > bytes.len() {
            return Err(Error);
        }
        Ok((Self::parse_value(prefix[0], value)?, prefix[0], taken))
    }

    fn parse_value(kind_byte: u8, value: &'a [u8]) -> Result<Option<Self>, Error> {
        Ok(Some(match kind_byte {
            kind::SOURCE_SERVICE => Self::SourceService(whole(value)?),
            kind::SESSION => Self::parse_session(value)?,
            kind::ADDRESSES => Self::Addresses(Addresses::parse(value)?),
            kind::CAPABILITIES => {
                exactly(value, 8)?;
                let mtu = u16::from_be_bytes([value[4], value[5]]);
                Self::Capabilities(CapabilitiesRepr { stacks: u32_at(value, 0)?, mtu })
            }
            kind::KEY_EXCHANGE => Self::KeyExchange(KeyExchangeRepr {
                host_id: array(value)?,
                assoc_id: u32_at(value, 16)?,
                message: value.get(20..).ok_or(Error)?,
            }),
            kind::CERTIFICATE => Self::Certificate(value),
            kind::CHAIN | kind::CHAIN_ADDED => Self::parse_chain(kind_byte, value)?,
            kind::RENDEZVOUS => {
                exactly(value, ADDRESS_LEN)?;
                Self::Rendezvous(parse_socket(&value[..16], &value[16..18]))
            }
            kind::ERROR => {
                let code: [u8; 2] = array(value)?;
                let text = value.get(4..).filter(|text| text.len() <= ERROR_TEXT_MAX).ok_or(Error)?;
                let text = core::str::from_utf8(text).map_err(|_| Error)?;
                Self::Error(ErrorRepr { code: u16::from_be_bytes(code).into(), text })
            }
            kind::AUTH => {
                exactly(value, AUTH_EXT_LEN - 4)?;
                let (assoc_id, epoch, receiver_epoch) = (u32_at(value, 0)?, u32_at(value, 4)?, u32_at(value, 8)?);
                Self::Auth(AuthRepr { assoc_id, epoch, receiver_epoch, tag: array(&value[12..])? })
            }
            kind::COOKIE => Self::Cookie(whole(value)?),
            kind::STACK => {
                exactly(value, 4)?;
                Self::Stack(StackRepr { stack: value[0], demands: value[1] & DEMANDS != 0 })
            }
            kind::FLOW_PORT => {
                exactly(value, 4)?;
                let port = u16::from_be_bytes([value[0], value[1]]);
                Self::FlowPort(FlowPortRepr { port, starts: value[2] & STARTS != 0 })
            }
            kind::MOVE => Self::parse_move(value)?,
            kind::STRIPE => Self::Stripe(StripeRepr::parse(value)?),
            kind::ARRIVALS => Self::Arrivals(ArrivalsRepr::parse(value)?),
            kind::NOTICE => Self::Notice(NoticeRepr::parse(value)?),
            kind::GRANT => Self::Grant(GrantRepr::parse(value)?),
            kind::TERMS => {
                exactly(value, 4)?;
                Self::Terms(TermsRepr { give_up_after_ms: u32_at(value, 0)? })
            }
            kind::HANDOVER => Self::Handover(HandoverRepr::parse(value)?),
            kind::CHANGE => Self::Change(ChangeRepr::parse(value)?),
            kind::RECONFIGURATION => Self::Reconfiguration(ReconfigurationRepr::parse(value)?),
            kind::SPLICE => Self::Splice(SpliceRepr::parse(value)?),
            kind::CUT => Self::Cut(CutRepr::parse(value)?),
            kind::ORDER => Self::Order(OrderRepr::parse(value)?),
            kind::QUIET => {
                exactly(value, 4)?;
                Self::Quiet(QuietRepr { quiet_ms: u32_at(value, 0)? })
            }
            kind::FENCE_NUMBER => Self::FenceNumber(u64::from_be_bytes(whole(value)?)),
            kind::SYN_SEEN => Self::SynSeen(whole(value)?),
            kind::LOSS => Self::Loss(LossRepr::parse(value)?),
            kind::TIMING => Self::Timing(TimingRepr::parse(value)?),
            unknown if is_unknown_critical(unknown) => Self::UnknownCritical(unknown),
            _ => return Ok(None),
        }))
    }

    fn parse_chain(kind_byte: u8, value: &'a [u8]) -> Result<Self, Error> {
        let chain = Chain::parse(value)?;
        if chain.names_adders() == (kind_byte == kind::CHAIN_ADDED) { Ok(Self::Chain(chain)) } else { Err(Error) }
    }

    fn parse_session(value: &'a [u8]) -> Result<Self, Error> {
        exactly(value, 40)?;
        Ok(Self::Session(SessionRepr {
            session: SessionId(array(value)?),
            client: parse_socket(&value[16..32], &value[32..34]),
            service_port: u16::from_be_bytes([value[34], value[35]]),
            protocol: value[36],
        }))
    }

    fn parse_move(value: &[u8]) -> Result<Self, Error> {
        exactly(value, MOVE_LEN)?;
        let flags = u16::from_be_bytes([value[38], value[39]]);
        Ok(Self::Move(MoveRepr {
            number: u32_at(value, 0)?,
            token: u64::from_be_bytes(array(&value[4..])?),
            challenge: u64::from_be_bytes(array(&value[12..])?),
            address: parse_socket(&value[20..36], &value[36..38]),
            flags: MoveFlags::from_bits_retain(flags),
        }))
    }

    /// The type byte.
    pub fn type_byte(&self) -> u8 {
        match self {
            Self::SourceService(_) => kind::SOURCE_SERVICE,
            Self::Session(_) => kind::SESSION,
            Self::Addresses(_) => kind::ADDRESSES,
            Self::Capabilities(_) => kind::CAPABILITIES,
            Self::KeyExchange(_) => kind::KEY_EXCHANGE,
            Self::Certificate(_) => kind::CERTIFICATE,
            Self::Chain(chain) if chain.names_adders() => kind::CHAIN_ADDED,
            Self::Chain(_) => kind::CHAIN,
            Self::Rendezvous(_) => kind::RENDEZVOUS,
            Self::Error(_) => kind::ERROR,
            Self::Auth(_) => kind::AUTH,
            Self::Cookie(_) => kind::COOKIE,
            Self::Stack(_) => kind::STACK,
            Self::FlowPort(_) => kind::FLOW_PORT,
            Self::Move(_) => kind::MOVE,
            Self::Stripe(_) => kind::STRIPE,
            Self::Arrivals(_) => kind::ARRIVALS,
            Self::Notice(_) => kind::NOTICE,
            Self::Grant(_) => kind::GRANT,
            Self::Terms(_) => kind::TERMS,
            Self::Handover(_) => kind::HANDOVER,
            Self::Quiet(_) => kind::QUIET,
            Self::FenceNumber(_) => kind::FENCE_NUMBER,
            Self::Change(_) => kind::CHANGE,
            Self::SynSeen(_) => kind::SYN_SEEN,
            Self::Loss(_) => kind::LOSS,
            Self::Timing(_) => kind::TIMING,
            Self::Reconfiguration(_) => kind::RECONFIGURATION,
            Self::Splice(_) => kind::SPLICE,
            Self::Cut(_) => kind::CUT,
            Self::Order(_) => kind::ORDER,
            Self::UnknownCritical(byte) => *byte,
        }
    }

    fn value_len(&self) -> usize {
        match self {
            Self::SourceService(_) | Self::SynSeen(_) => 32,
            Self::Session(_) => 40,
            Self::Addresses(addresses) => addresses.0.len(),
            Self::Capabilities(_) | Self::FenceNumber(_) => 8,
            Self::KeyExchange(exchange) => 20 + exchange.message.len(),
            Self::Certificate(chain) => chain.len(),
            Self::Chain(chain) => chain.as_bytes().len(),
            Self::Rendezvous(_) => ADDRESS_LEN,
            Self::Error(error) => 4 + error.text.len(),
            Self::Auth(_) => AUTH_EXT_LEN - 4,
            Self::Cookie(_) => 24,
            Self::Stack(_) | Self::FlowPort(_) | Self::Terms(_) | Self::Quiet(_) => 4,
            Self::Move(_) => MOVE_LEN,
            Self::Stripe(_) => STRIPE_LEN,
            Self::Arrivals(arrivals) => arrivals.value_len(),
            Self::Notice(_) => NOTICE_LEN,
            Self::Grant(_) => GRANT_LEN,
            Self::Handover(_) => HANDOVER_LEN,
            Self::Change(_) => CHANGE_LEN,
            Self::Loss(_) => LOSS_LEN,
            Self::Timing(_) => TIMING_LEN,
            Self::Reconfiguration(_) => RECONFIGURATION_LEN,
            Self::Splice(_) => SPLICE_LEN,
            Self::Cut(_) => CUT_LEN,
            Self::Order(_) => ORDER_LEN,
            Self::UnknownCritical(_) => 0,
        }
    }

    /// Bytes of the whole extension.
    pub fn buffer_len(&self) -> usize {
        PREFIX_LEN + self.value_len().next_multiple_of(4)
    }

    /// Writes the extension at the start of `out`; gives the bytes it took.
    ///
    /// # Errors
    ///
    /// `out` is too small, the value is too long for its length field or its bound, or an unknown extension is a known
    /// one.
    pub fn emit(&self, out: &mut [u8]) -> Result<usize, Error> {
        match self {
            Self::Error(error) if error.text.len() > ERROR_TEXT_MAX => return Err(Error),
            Self::UnknownCritical(byte) if !is_unknown_critical(*byte) => return Err(Error),
            Self::Grant(grant) if !grant.is_sound() => return Err(Error),
            _ => {}
        }
        let len = self.buffer_len();
        let out = out.get_mut(..len).ok_or(Error)?;
        out.fill(0);
        out[0] = self.type_byte();
        let value_len = u16::try_from(self.value_len()).map_err(|_| Error)?;
        out[2..4].copy_from_slice(&value_len.to_be_bytes());
        self.emit_value(&mut out[PREFIX_LEN..]);
        Ok(len)
    }

    fn emit_value(&self, value: &mut [u8]) {
        match self {
            Self::SourceService(bytes) | Self::SynSeen(bytes) => value.copy_from_slice(bytes),
            Self::Session(session) => {
                value[..16].copy_from_slice(&session.session.0);
                emit_ip(session.client.ip(), &mut value[16..32]);
                value[32..34].copy_from_slice(&session.client.port().to_be_bytes());
                value[34..36].copy_from_slice(&session.service_port.to_be_bytes());
                value[36] = session.protocol;
            }
            Self::Addresses(addresses) => value[..addresses.0.len()].copy_from_slice(addresses.0),
            Self::Capabilities(capabilities) => {
                value[..4].copy_from_slice(&capabilities.stacks.to_be_bytes());
                value[4..6].copy_from_slice(&capabilities.mtu.to_be_bytes());
            }
            Self::KeyExchange(exchange) => {
                value[..16].copy_from_slice(&exchange.host_id);
                value[16..20].copy_from_slice(&exchange.assoc_id.to_be_bytes());
                value[20..20 + exchange.message.len()].copy_from_slice(exchange.message);
            }
            Self::Certificate(chain) => value[..chain.len()].copy_from_slice(chain),
            Self::Chain(chain) => value[..chain.as_bytes().len()].copy_from_slice(chain.as_bytes()),
            Self::Rendezvous(address) => {
                emit_ip(address.ip(), &mut value[..16]);
                value[16..18].copy_from_slice(&address.port().to_be_bytes());
            }
            Self::Error(error) => {
                value[..2].copy_from_slice(&u16::from(error.code).to_be_bytes());
                value[4..4 + error.text.len()].copy_from_slice(error.text.as_bytes());
            }
            Self::Auth(auth) => {
                value[..4].copy_from_slice(&auth.assoc_id.to_be_bytes());
                value[4..8].copy_from_slice(&auth.epoch.to_be_bytes());
                value[8..12].copy_from_slice(&auth.receiver_epoch.to_be_bytes());
                value[12..28].copy_from_slice(&auth.tag);
            }
            Self::Cookie(cookie) => value.copy_from_slice(cookie),
            Self::Stack(stack) => {
                value[0] = stack.stack;
                value[1] = if stack.demands { DEMANDS } else { 0 };
            }
            Self::FlowPort(port) => {
                value[..2].copy_from_slice(&port.port.to_be_bytes());
                value[2] = if port.starts { STARTS } else { 0 };
            }
            Self::Move(location) => location.emit(value),
            Self::Stripe(stripe) => stripe.emit(value),
            Self::Arrivals(arrivals) => arrivals.emit(value),
            Self::Notice(notice) => notice.emit(value),
            Self::Grant(grant) => grant.emit(value),
            Self::Handover(handover) => handover.emit(value),
            Self::Change(change) => change.emit(value),
            Self::Loss(loss) => loss.emit(value),
            Self::Timing(timing) => timing.emit(value),
            Self::Reconfiguration(step) => step.emit(value),
            Self::Splice(splice) => splice.emit(value),
            Self::Cut(cut) => cut.emit(value),
            Self::Order(order) => order.emit(value),
            Self::Terms(terms) => value.copy_from_slice(&terms.give_up_after_ms.to_be_bytes()),
            Self::Quiet(quiet) => value.copy_from_slice(&quiet.quiet_ms.to_be_bytes()),
            Self::FenceNumber(number) => value.copy_from_slice(&number.to_be_bytes()),
            Self::UnknownCritical(_) => {}
        }
    }
}
