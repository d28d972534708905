//! The program socket: what a program and the agent of its host say to each other, one message each
//! (docs/book/program-socket.md).
//!
//! ```text
//! request:  0 version = 1 | 1 kind | 2 protocol | 3 zero | 4 port | 6 bits | 8 id (32) | 40 address (16) | 56 text
//! reply:    0 version = 1 | 1 kind | 2 errno | 4 bits | 6 port | 8 id (32) | 40 IPv6 (16) | 56 IPv4 (4) | 60 text
//! ```
//! Numbers are big-endian; a text is UTF-8 and goes to the end of the message.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The version of the format.
pub const PROGRAM_VERSION: u8 = 1;
/// Bytes of a request before its text.
pub const PROGRAM_REQUEST_LEN: usize = 56;
/// Bytes of a reply before its text.
pub const PROGRAM_REPLY_LEN: usize = 60;
/// Longest text of a request in bytes.
pub const PROGRAM_TEXT_MAX: usize = 255;
const BITS_MAX: u16 = 256;
/// The port of a request of kind `TakeOver` by a program that gives its own connections away when it is asked to.
pub const TAKE_OVER_GIVES: u16 = 1;
/// Highest port of a request of kind `Load`: the whole weight stays.
pub const LOAD_PERCENT_MAX: u16 = 100;
/// Most that a program says of a socket that it hands over, in bytes.
pub const HANDED_DATA_MAX: u64 = 1 << 20;

/// The port of a request of kind `Splice` by a program that relays on.
pub const SPLICE_RELAYS_ON: u16 = 1;

mod field {
    use core::ops::Range;

    pub const VERSION: usize = 0;
    pub const KIND: usize = 1;
    pub const ID: Range<usize> = 8..40;

    pub const PROTOCOL: usize = 2;
    pub const ZERO: usize = 3;
    pub const REQUEST_PORT: Range<usize> = 4..6;
    pub const REQUEST_BITS: Range<usize> = 6..8;
    pub const ADDRESS: Range<usize> = 40..56;

    pub const ERRNO: Range<usize> = 2..4;
    pub const REPLY_BITS: Range<usize> = 4..6;
    pub const REPLY_PORT: Range<usize> = 6..8;
    pub const V6: Range<usize> = 40..56;
    pub const V4: Range<usize> = 56..60;
}

/// What is asked for, and answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ProgramKind {
    /// A written name's bits.
    Name = 1,
    /// Virtual addresses of a name.
    Resolve = 2,
    /// A socket serves a name.
    Bind = 3,
    /// A socket has a name of its own.
    Source = 4,
    /// What the peer of a socket is called.
    Peer = 5,
    /// What happens to flows, from now on.
    Events = 6,
    /// Something has happened: a reply that nobody asked for, after one to `Events`.
    Event = 7,
    /// The host's own virtual addresses.
    Ranges = 8,
    /// A socket goes to another process of the same user.
    HandOver = 9,
    /// The program takes over sockets of a name.
    TakeOver = 10,
    /// A socket that another process has given: a reply that nobody asked for, after one to `TakeOver`; and the
    /// request by which the program takes it.
    Handed = 11,
    /// Connections of a name are to go to other hosts: a reply that nobody asked for, after one to `TakeOver` with the
    /// port [`TAKE_OVER_GIVES`]. With a port, one connection is meant: that of the peer at the IPv6 address, IPv4
    /// mapped, and the port. Without, all are.
    Give = 12,
    /// Who serves a name, now and from now on.
    Instances = 13,
    /// An instance of a name, or the end of a list of them: a reply that nobody asked for, after one to `Instances`.
    Instance = 14,
    /// How much of the weight of a name is to stay: the port, in percent.
    Load = 15,
    /// The program of a box wants a session to go through other boxes next, whose first packet it has not let out yet:
    /// of the protocol, from the address and the port to those that the id has as [`ProgramTarget`]. The text: names of
    /// boxes in order, with spaces between them.
    Next = 16,
    /// The program leaves between two TCP connections, one that it has accepted and one that it has opened: two
    /// descriptors, in this order. It has written all that it has read. With the port [`SPLICE_RELAYS_ON`] it goes on
    /// relaying until its sockets end; otherwise they are the agent's.
    Splice = 75,
}

impl ProgramKind {
    /// Whether programs ask with it; the others are the agent's alone.
    const fn is_request(self) -> bool {
        !matches!(self, Self::Event | Self::Give | Self::Instance)
    }

    /// The kind of this number.
    pub fn of(number: u8) -> Option<Self> {
        let all = [
            Self::Name,
            Self::Resolve,
            Self::Bind,
            Self::Source,
            Self::Peer,
            Self::Events,
            Self::Event,
            Self::Ranges,
            Self::HandOver,
            Self::TakeOver,
            Self::Handed,
            Self::Give,
            Self::Instances,
            Self::Instance,
            Self::Load,
            Self::Next,
            Self::Splice,
        ];
        all.into_iter().find(|kind| *kind as u8 == number)
    }
}

/// Why bytes are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramError {
    /// Another version.
    Version {
        /// Theirs.
        found: u8,
    },
    /// Less than the fixed bytes, or more than there may be.
    Length {
        /// How many there are.
        found: usize,
    },
    /// Not a kind of request.
    Kind,
    /// A prefix of more than 256 bits.
    Bits {
        /// How many it says.
        found: u16,
    },
    /// What is reserved is not zero.
    Reserved,
    /// The text is not UTF-8.
    Text,
}

fn half(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |sum, byte| sum << 8 | u16::from(*byte))
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(bytes);
    array
}

fn text(bytes: &[u8]) -> Result<&str, ProgramError> {
    core::str::from_utf8(bytes).map_err(|_| ProgramError::Text)
}

/// The fixed part and the rest, of a message of this version.
fn split(bytes: &[u8], fixed_len: usize) -> Result<(&[u8], &[u8]), ProgramError> {
    match bytes.first() {
        Some(&found) if found != PROGRAM_VERSION => Err(ProgramError::Version { found }),
        _ => bytes.split_at_checked(fixed_len).ok_or(ProgramError::Length { found: bytes.len() }),
    }
}

fn check_bits(found: u16) -> Result<u16, ProgramError> {
    if found > BITS_MAX { Err(ProgramError::Bits { found }) } else { Ok(found) }
}

/// The address and the port of a session's service as its first packet has them, as the id of a request of kind `Next`
/// says them: address 16 (IPv4 is mapped), port 2, zero 14.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramTarget(pub SocketAddr);

impl ProgramTarget {
    /// Reads an id. `None`: bytes that are reserved are not zero.
    pub fn parse(id: &[u8; 32]) -> Option<Self> {
        let address = Ipv6Addr::from(array::<16>(&id[..16])).to_canonical();
        let is_reserved_zero = id[18..].iter().all(|byte| *byte == 0);
        is_reserved_zero.then_some(Self(SocketAddr::new(address, half(&id[16..18]))))
    }

    /// The id.
    pub fn emit(&self) -> [u8; 32] {
        let mut id = [0; 32];
        let address = match self.0.ip() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        id[..16].copy_from_slice(&address.octets());
        id[16..18].copy_from_slice(&self.0.port().to_be_bytes());
        id
    }
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramRequestRepr<'a> {
    /// What for.
    pub kind: ProgramKind,
    /// IP protocol number; 0 where it does not matter.
    pub protocol: u8,
    /// A port.
    pub port: u16,
    /// Length of a prefix.
    pub bits: u16,
    /// A name, or the beginning of one.
    pub id: [u8; 32],
    /// An address; IPv4 is mapped on the wire.
    pub address: IpAddr,
    /// A text of at most [`PROGRAM_TEXT_MAX`] bytes.
    pub text: &'a str,
}

impl<'a> ProgramRequestRepr<'a> {
    /// A request without anything but its kind.
    pub const fn new(kind: ProgramKind) -> Self {
        let address = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
        Self { kind, protocol: 0, port: 0, bits: 0, id: [0; 32], address, text: "" }
    }

    /// Reads a message.
    ///
    /// # Errors
    ///
    /// What is wrong with it.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, ProgramError> {
        let (fixed, rest) = split(bytes, PROGRAM_REQUEST_LEN)?;
        if rest.len() > PROGRAM_TEXT_MAX {
            return Err(ProgramError::Length { found: bytes.len() });
        }
        let kind = ProgramKind::of(fixed[field::KIND]).filter(|kind| kind.is_request());
        let kind = kind.ok_or(ProgramError::Kind)?;
        if fixed[field::ZERO] != 0 {
            return Err(ProgramError::Reserved);
        }
        Ok(Self {
            kind,
            protocol: fixed[field::PROTOCOL],
            port: half(&fixed[field::REQUEST_PORT]),
            bits: check_bits(half(&fixed[field::REQUEST_BITS]))?,
            id: array(&fixed[field::ID]),
            address: Ipv6Addr::from(array::<16>(&fixed[field::ADDRESS])).to_canonical(),
            text: text(rest)?,
        })
    }

    /// The fixed bytes; the text follows them.
    pub fn emit(&self) -> [u8; PROGRAM_REQUEST_LEN] {
        let mut out = [0; PROGRAM_REQUEST_LEN];
        let address = match self.address {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        out[field::VERSION] = PROGRAM_VERSION;
        out[field::KIND] = self.kind as u8;
        out[field::PROTOCOL] = self.protocol;
        out[field::REQUEST_PORT].copy_from_slice(&self.port.to_be_bytes());
        out[field::REQUEST_BITS].copy_from_slice(&self.bits.to_be_bytes());
        out[field::ID].copy_from_slice(&self.id);
        out[field::ADDRESS].copy_from_slice(&address.octets());
        out
    }
}

/// A reply, or an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramReplyRepr<'a> {
    /// Number of the kind; one that nobody knows when the request had such a one.
    pub kind: u8,
    /// Zero: done. Otherwise as in errno(3), and the text says why not and what to do.
    pub errno: u16,
    /// Length of a prefix.
    pub bits: u16,
    /// A port.
    pub port: u16,
    /// A name.
    pub id: [u8; 32],
    /// An address; unspecified: none.
    pub v6: Ipv6Addr,
    /// An address; unspecified: none.
    pub v4: Ipv4Addr,
    /// A text.
    pub text: &'a str,
}

impl<'a> ProgramReplyRepr<'a> {
    /// Reads a message.
    ///
    /// # Errors
    ///
    /// What is wrong with it.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, ProgramError> {
        let (fixed, rest) = split(bytes, PROGRAM_REPLY_LEN)?;
        Ok(Self {
            kind: fixed[field::KIND],
            errno: half(&fixed[field::ERRNO]),
            bits: check_bits(half(&fixed[field::REPLY_BITS]))?,
            port: half(&fixed[field::REPLY_PORT]),
            id: array(&fixed[field::ID]),
            v6: array::<16>(&fixed[field::V6]).into(),
            v4: array::<4>(&fixed[field::V4]).into(),
            text: text(rest)?,
        })
    }

    /// The fixed bytes; the text follows them.
    pub fn emit(&self) -> [u8; PROGRAM_REPLY_LEN] {
        let mut out = [0; PROGRAM_REPLY_LEN];
        out[field::VERSION] = PROGRAM_VERSION;
        out[field::KIND] = self.kind;
        out[field::ERRNO].copy_from_slice(&self.errno.to_be_bytes());
        out[field::REPLY_BITS].copy_from_slice(&self.bits.to_be_bytes());
        out[field::REPLY_PORT].copy_from_slice(&self.port.to_be_bytes());
        out[field::ID].copy_from_slice(&self.id);
        out[field::V6].copy_from_slice(&self.v6.octets());
        out[field::V4].copy_from_slice(&self.v4.octets());
        out
    }
}
