//! The base header: twenty bytes at the start of every message but DATA.
//!
//! ```text
//!  0         1         2         3
//!  version   type      flags     next protocol
//!  header length       payload length
//!  destination flowID
//!  source flowID
//!  control sequence number
//! ```
//! Lengths are in bytes; the header's counts the resolvable part and the extensions. What follows header and payload is
//! zero padding.

use core::fmt;

/// The UDP port of all signalling and of encapsulated data.
pub const PORT: u16 = 54324;
/// The only version.
pub const VERSION: u8 = 1;
/// Bytes of the base header.
pub const HEADER_LEN: usize = 20;
/// Where its [`Flags`] are, one byte.
pub const FLAGS_OFFSET: usize = 2;

/// The datagram does not follow the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Error;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the datagram does not follow the SAL format")
    }
}

impl core::error::Error for Error {}

/// A host's identifier of one flow: random, so that knowing one says nothing of others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlowId(pub u32);

impl fmt::Display for FlowId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0)
    }
}

/// 128 random bits that name a session on all hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub [u8; 16]);

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $number:literal;)*) => {
        /// What a datagram is.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum Kind { $($(#[$doc])* $name = $number,)* }

        impl Kind {
            /// Every kind.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];
        }

        impl TryFrom<u8> for Kind {
            type Error = Error;

            fn try_from(number: u8) -> Result<Self, Error> {
                match number { $($number => Ok(Self::$name),)* _ => Err(Error) }
            }
        }
    };
}

kinds! {
    /// Opens a flow; carries the application's first packet.
    Syn = 1;
    /// Answers a SYN.
    SynAck = 2;
    /// Proves the initiator; with CONFIRM, answers an ACK.
    Ack = 3;
    /// Moves a flow or an association.
    Rsyn = 4;
    /// Answers an RSYN.
    RsynAck = 5;
    /// Ends a move.
    RsynDone = 6;
    /// Asks the initiator's host to end a quiet flow in order; with CONFIRM, says what has come of it.
    Fin = 7;
    /// The flow is not wanted.
    Rst = 8;
    /// The flow cannot go on.
    Fail = 9;
    /// Asks for a sign of life; with CONFIRM, gives it.
    Probe = 10;
    /// Says why a resolvable packet went no further.
    Error = 11;
    /// Asks to lock a session for an act.
    RequestLock = 12;
    /// Grants the lock.
    AckLock = 13;
    /// Refuses the lock.
    NackLock = 14;
    /// Gives the lock back.
    CancelLock = 15;
    /// Acknowledges that.
    AckCancel = 16;
    /// Says to a whole segment which name a host serves, or serves no longer.
    Notice = 17;
    /// Changes how a live flow is carried.
    Change = 18;
    /// Encapsulated data; has a header of its own.
    Data = 32;
}

impl From<Kind> for u8 {
    fn from(kind: Kind) -> Self {
        kind as Self
    }
}

bitflags::bitflags! {
    /// Flags of the base header. Unknown bits are kept and mean nothing.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Flags: u8 {
        /// The resolvable part is present.
        const RESOLVABLE = 0x01;
        /// A full handshake is wanted.
        const FULL = 0x02;
        /// Answers a message of the same type.
        const CONFIRM = 0x04;
        /// A router shall relay this to reply-to, or has.
        const RELAY = 0x08;
        /// Others have a copy of this: who does not serve the name says nothing.
        const COPIED = 0x10;
        /// Of a SYN: for the one host that an extension names; whoever forwards it picks no other instance.
        const NAMED = 0x20;
        const _ = !0;
    }
}

/// What the payload is, by IP protocol number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextProtocol {
    /// An IPv4 packet.
    Ipv4,
    /// An IPv6 packet.
    Ipv6,
    /// Nothing.
    None,
    /// Something that this program does not know.
    Unknown(u8),
}

impl From<u8> for NextProtocol {
    fn from(number: u8) -> Self {
        match number {
            4 => Self::Ipv4,
            41 => Self::Ipv6,
            59 => Self::None,
            other => Self::Unknown(other),
        }
    }
}

impl From<NextProtocol> for u8 {
    fn from(next: NextProtocol) -> Self {
        match next {
            NextProtocol::Ipv4 => 4,
            NextProtocol::Ipv6 => 41,
            NextProtocol::None => 59,
            NextProtocol::Unknown(other) => other,
        }
    }
}

mod field {
    use core::ops::Range;

    pub const VERSION: usize = 0;
    pub const KIND: usize = 1;
    pub const FLAGS: usize = 2;
    pub const NEXT_PROTOCOL: usize = 3;
    pub const HEADER_LEN: Range<usize> = 4..6;
    pub const PAYLOAD_LEN: Range<usize> = 6..8;
    pub const DST_FLOW: Range<usize> = 8..12;
    pub const SRC_FLOW: Range<usize> = 12..16;
    pub const CONTROL_SEQ: Range<usize> = 16..20;
}

/// The first look at a datagram: its kind, if the version is ours.
///
/// # Errors
///
/// Shorter than two bytes, another version, or an unknown type.
pub fn kind_of(datagram: &[u8]) -> Result<Kind, Error> {
    match datagram {
        [VERSION, kind, ..] => Kind::try_from(*kind),
        _ => Err(Error),
    }
}

/// The base header as values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeaderRepr {
    /// What the datagram is; never [`Kind::Data`].
    pub kind: Kind,
    /// Flags.
    pub flags: Flags,
    /// What the payload is.
    pub next_protocol: NextProtocol,
    /// Bytes of header, resolvable part and extensions; a multiple of four.
    pub header_len: u16,
    /// Bytes of the payload.
    pub payload_len: u16,
    /// The receiver's flow; zero in a SYN.
    pub dst_flow: FlowId,
    /// The sender's flow.
    pub src_flow: FlowId,
    /// Rises with every tagged message of an association; zero without a tag.
    pub control_seq: u32,
}

fn word(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte))
}

fn half(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |sum, byte| sum << 8 | u16::from(*byte))
}

impl HeaderRepr {
    /// Reads the header of `datagram` and checks that both lengths lie inside it.
    ///
    /// # Errors
    ///
    /// Too short, another version, an unknown type or DATA, or lengths that do not fit.
    pub fn parse(datagram: &[u8]) -> Result<Self, Error> {
        if datagram.len() < HEADER_LEN {
            return Err(Error);
        }
        let kind = kind_of(datagram)?;
        let repr = Self {
            kind,
            flags: Flags::from_bits_retain(datagram[field::FLAGS]),
            next_protocol: datagram[field::NEXT_PROTOCOL].into(),
            header_len: half(&datagram[field::HEADER_LEN]),
            payload_len: half(&datagram[field::PAYLOAD_LEN]),
            dst_flow: FlowId(word(&datagram[field::DST_FLOW])),
            src_flow: FlowId(word(&datagram[field::SRC_FLOW])),
            control_seq: word(&datagram[field::CONTROL_SEQ]),
        };
        let header_len = usize::from(repr.header_len);
        let fits = header_len >= HEADER_LEN && header_len + usize::from(repr.payload_len) <= datagram.len();
        if kind == Kind::Data || !fits || !header_len.is_multiple_of(4) {
            return Err(Error);
        }
        Ok(repr)
    }

    /// Writes the header into the first [`HEADER_LEN`] bytes of `out`.
    ///
    /// # Panics
    ///
    /// When `out` is shorter.
    pub fn emit(&self, out: &mut [u8]) {
        out[field::VERSION] = VERSION;
        out[field::KIND] = self.kind.into();
        out[field::FLAGS] = self.flags.bits();
        out[field::NEXT_PROTOCOL] = self.next_protocol.into();
        out[field::HEADER_LEN].copy_from_slice(&self.header_len.to_be_bytes());
        out[field::PAYLOAD_LEN].copy_from_slice(&self.payload_len.to_be_bytes());
        out[field::DST_FLOW].copy_from_slice(&self.dst_flow.0.to_be_bytes());
        out[field::SRC_FLOW].copy_from_slice(&self.src_flow.0.to_be_bytes());
        out[field::CONTROL_SEQ].copy_from_slice(&self.control_seq.to_be_bytes());
    }
}
