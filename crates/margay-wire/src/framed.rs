//! Framed connections (docs/decisions/0075): what the datagrams of a flow say whose program sends and receives frames.
//!
//! ```text
//!  0..2 "MF" | 2 version = 1 | 3 kind | 4..12 number of the connection | 12.. value
//!
//!  HELLO      0..4 initial TSN | 4..8 window, bytes | 8..10 window, chunks | 10..12 streams | 12..28 host meant
//!             28 protocol of the programs, absent where it is zero
//!  WELCOME    0..4 initial TSN | 4..8 window, bytes | 8..10 window, chunks | 10..12 streams | 12.. label, UTF-8
//!  DATA       a packet of SCTP's format (`sctp`)
//!  ABORT      0..2 reason | 2.. text, UTF-8
//!  LOST       0..4 generation | 4.. request numbers of 4 bytes, one at least
//!  LOST_SEEN  0..4 generation
//!  CLOSE, PING, PONG, LEAVING have no value
//! ```

use crate::header::Error;

/// Bytes of every datagram before its value.
pub const FRAMED_HEADER_LEN: usize = 12;
/// Longest label of a WELCOME, in bytes.
pub const FRAMED_LABEL_MAX: usize = 64;
/// Longest text of an ABORT, in bytes.
pub const FRAMED_TEXT_MAX: usize = 200;
/// Most request numbers of one LOST.
pub const FRAMED_LOST_MAX: usize = 256;

/// Every datagram begins with it: the last byte is the version.
const MAGIC: [u8; 3] = [b'M', b'F', 1];
/// Bytes of HELLO's and WELCOME's value before what differs.
const TERMS_LEN: usize = 12;
const HOST_LEN: usize = 16;
const PROTOCOL_LEN: usize = 1;
const GENERATION_LEN: usize = 4;
const REASON_LEN: usize = 2;
const NUMBER_LEN: usize = 4;

mod kind {
    pub const HELLO: u8 = 1;
    pub const WELCOME: u8 = 2;
    pub const DATA: u8 = 3;
    pub const ABORT: u8 = 4;
    pub const CLOSE: u8 = 5;
    pub const PING: u8 = 6;
    pub const PONG: u8 = 7;
    pub const LEAVING: u8 = 8;
    pub const LOST: u8 = 9;
    pub const LOST_SEEN: u8 = 10;
}

mod field {
    use core::ops::Range;

    pub const MAGIC: Range<usize> = 0..3;
    pub const KIND: usize = 3;
    pub const NUMBER: Range<usize> = 4..12;

    pub const TSN: Range<usize> = 0..4;
    pub const WINDOW_BYTES: Range<usize> = 4..8;
    pub const WINDOW: Range<usize> = 8..10;
    pub const STREAMS: Range<usize> = 10..12;
}

/// Why a connection is ended, or does not begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AbortReason {
    /// The receiver knows no connection of this number.
    Unknown,
    /// The receiver has as many connections as it may.
    Full,
    /// The receiver leaves, and takes no new connections.
    Leaving,
    /// Another host was meant.
    OtherHost,
    /// The program behind the receiver is gone, or has ended its connection.
    Program,
    /// An ensemble has no member.
    NoMember,
    /// The connection cannot go on: the text says why.
    Failed,
    /// The module of an ensemble's switch fails, or has: the text says why. What was asked is not to be repeated.
    Module,
    /// The receiver's program speaks another protocol: the text says which.
    OtherProtocol,
    /// A reason that is not known here.
    Other(u16),
}

impl AbortReason {
    const fn number(self) -> u16 {
        match self {
            Self::Unknown => 1,
            Self::Full => 2,
            Self::Leaving => 3,
            Self::OtherHost => 4,
            Self::Program => 5,
            Self::NoMember => 6,
            Self::Failed => 7,
            Self::Module => 8,
            Self::OtherProtocol => 9,
            Self::Other(number) => number,
        }
    }

    const fn of(number: u16) -> Self {
        match number {
            1 => Self::Unknown,
            2 => Self::Full,
            3 => Self::Leaving,
            4 => Self::OtherHost,
            5 => Self::Program,
            6 => Self::NoMember,
            7 => Self::Failed,
            8 => Self::Module,
            9 => Self::OtherProtocol,
            other => Self::Other(other),
        }
    }
}

/// The number of the PING that asks a member as such: it is of no connection, and names the host that is meant. Zero
/// where nobody knows the host.
pub fn framed_host_number(host: &[u8; 16]) -> u64 {
    host[..8].iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

/// What an end begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FramedTerms {
    /// The first number of what it sends.
    pub tsn: u32,
    /// Bytes that it has room for.
    pub window_bytes: u32,
    /// Chunks that it has room for.
    pub window: u16,
    /// Streams that it takes, beside frames in order per member.
    pub streams: u16,
}

/// A list of request numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LostNumbers<'a> {
    bytes: &'a [u8],
}

impl LostNumbers<'_> {
    /// The numbers, in the order in which they were written.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.bytes.chunks_exact(NUMBER_LEN).map(word)
    }
}

/// What a datagram says, beside the number of its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framed<'a> {
    /// A connection is to begin; repeated until it is answered.
    Hello {
        /// What the sender begins with.
        terms: FramedTerms,
        /// The host that is meant; all zero: any.
        host: [u8; 16],
        /// Of the programs whose requests the frames are; zero: memcached's text protocol.
        protocol: u8,
    },
    /// A connection has begun: the answer to every HELLO of it.
    Welcome {
        /// What the sender begins with.
        terms: FramedTerms,
        /// What the sender is called where keys are divided.
        label: &'a str,
    },
    /// A packet of chunks.
    Data(&'a [u8]),
    /// The connection is over, or does not begin. Never answered.
    Abort {
        /// Why.
        reason: AbortReason,
        /// The same in words; may be empty.
        text: &'a str,
    },
    /// The sender has no more to say, and wants no more.
    Close,
    /// Asks for a PONG.
    Ping,
    /// Answers a PING.
    Pong,
    /// The sender takes no new frames from now on; repeated until the connection is closed.
    Leaving,
    /// Requests that nobody will answer, since their member is gone; repeated until it is answered.
    Lost {
        /// Which list: one at a time is under way.
        generation: u32,
        /// Of the requests.
        numbers: LostNumbers<'a>,
    },
    /// Answers a LOST.
    LostSeen {
        /// Of the list.
        generation: u32,
    },
}

fn word(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte))
}

fn half(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |sum, byte| sum << 8 | u16::from(*byte))
}

fn text(bytes: &[u8], len_max: usize) -> Result<&str, Error> {
    let text = core::str::from_utf8(bytes).map_err(|_| Error)?;
    if text.len() > len_max { Err(Error) } else { Ok(text) }
}

impl FramedTerms {
    fn parse(value: &[u8]) -> Result<(Self, &[u8]), Error> {
        let (fixed, rest) = value.split_at_checked(TERMS_LEN).ok_or(Error)?;
        let terms = Self {
            tsn: word(&fixed[field::TSN]),
            window_bytes: word(&fixed[field::WINDOW_BYTES]),
            window: half(&fixed[field::WINDOW]),
            streams: half(&fixed[field::STREAMS]),
        };
        Ok((terms, rest))
    }

    fn emit(&self, value: &mut [u8]) {
        value[field::TSN].copy_from_slice(&self.tsn.to_be_bytes());
        value[field::WINDOW_BYTES].copy_from_slice(&self.window_bytes.to_be_bytes());
        value[field::WINDOW].copy_from_slice(&self.window.to_be_bytes());
        value[field::STREAMS].copy_from_slice(&self.streams.to_be_bytes());
    }
}

impl<'a> Framed<'a> {
    /// An ABORT with as much of the text as it may have.
    pub fn abort(reason: AbortReason, text: &'a str) -> Self {
        Self::Abort { reason, text: &text[..text.floor_char_boundary(FRAMED_TEXT_MAX)] }
    }

    /// Reads a datagram: the number of its connection, and what it says.
    ///
    /// # Errors
    ///
    /// It is none of a framed connection, or of another version.
    pub fn parse(datagram: &'a [u8]) -> Result<(u64, Self), Error> {
        let (header, value) = datagram.split_at_checked(FRAMED_HEADER_LEN).ok_or(Error)?;
        if header[field::MAGIC] != MAGIC {
            return Err(Error);
        }
        let number = header[field::NUMBER].iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        let bare = |says: Self| if value.is_empty() { Ok(says) } else { Err(Error) };
        let says = match header[field::KIND] {
            kind::HELLO => {
                let (terms, rest) = FramedTerms::parse(value)?;
                let (host, protocol) = rest.split_first_chunk::<HOST_LEN>().ok_or(Error)?;
                let protocol = match protocol {
                    [] => 0,
                    // Zero is not written.
                    [protocol] if *protocol > 0 => *protocol,
                    _ => return Err(Error),
                };
                Self::Hello { terms, host: *host, protocol }
            }
            kind::WELCOME => {
                let (terms, label) = FramedTerms::parse(value)?;
                Self::Welcome { terms, label: text(label, FRAMED_LABEL_MAX)? }
            }
            kind::DATA => Self::Data(value),
            kind::ABORT => {
                let (reason, words) = value.split_at_checked(REASON_LEN).ok_or(Error)?;
                Self::Abort { reason: AbortReason::of(half(reason)), text: text(words, FRAMED_TEXT_MAX)? }
            }
            kind::CLOSE => bare(Self::Close)?,
            kind::PING => bare(Self::Ping)?,
            kind::PONG => bare(Self::Pong)?,
            kind::LEAVING => bare(Self::Leaving)?,
            kind::LOST => {
                let (generation, bytes) = value.split_at_checked(GENERATION_LEN).ok_or(Error)?;
                if bytes.is_empty() || bytes.len() % NUMBER_LEN != 0 || bytes.len() > FRAMED_LOST_MAX * NUMBER_LEN {
                    return Err(Error);
                }
                Self::Lost { generation: word(generation), numbers: LostNumbers { bytes } }
            }
            kind::LOST_SEEN if value.len() == GENERATION_LEN => Self::LostSeen { generation: word(value) },
            _ => return Err(Error),
        };
        Ok((number, says))
    }

    const fn kind(&self) -> u8 {
        match self {
            Self::Hello { .. } => kind::HELLO,
            Self::Welcome { .. } => kind::WELCOME,
            Self::Data(_) => kind::DATA,
            Self::Abort { .. } => kind::ABORT,
            Self::Close => kind::CLOSE,
            Self::Ping => kind::PING,
            Self::Pong => kind::PONG,
            Self::Leaving => kind::LEAVING,
            Self::Lost { .. } => kind::LOST,
            Self::LostSeen { .. } => kind::LOST_SEEN,
        }
    }

    /// Bytes of the datagram.
    pub const fn len(&self) -> usize {
        let value_len = match self {
            Self::Hello { protocol: 0, .. } => TERMS_LEN + HOST_LEN,
            Self::Hello { .. } => TERMS_LEN + HOST_LEN + PROTOCOL_LEN,
            Self::Welcome { label, .. } => TERMS_LEN + label.len(),
            Self::Data(packet) => packet.len(),
            Self::Abort { text, .. } => REASON_LEN + text.len(),
            Self::Lost { numbers, .. } => GENERATION_LEN + numbers.bytes.len(),
            Self::LostSeen { .. } => GENERATION_LEN,
            Self::Close | Self::Ping | Self::Pong | Self::Leaving => 0,
        };
        FRAMED_HEADER_LEN + value_len
    }

    /// Never: a datagram has its header.
    pub const fn is_empty(&self) -> bool {
        false
    }

    /// Writes the datagram into the first [`len`](Self::len) bytes of `out`, and gives their number; `None` where `out`
    /// is shorter. A label or text that is longer than it may be is refused by whoever reads it.
    pub fn emit(&self, number: u64, out: &mut [u8]) -> Option<usize> {
        let len = self.len();
        let value = emit_framed_header(self.kind(), number, out.get_mut(..len)?)?;
        match self {
            Self::Hello { terms, host, protocol } => {
                terms.emit(value);
                let (place, rest) = value[TERMS_LEN..].split_at_mut(HOST_LEN);
                place.copy_from_slice(host);
                rest.fill(*protocol);
            }
            Self::Welcome { terms, label } => {
                terms.emit(value);
                value[TERMS_LEN..].copy_from_slice(label.as_bytes());
            }
            Self::Data(packet) => value.copy_from_slice(packet),
            Self::Abort { reason, text } => {
                value[..REASON_LEN].copy_from_slice(&reason.number().to_be_bytes());
                value[REASON_LEN..].copy_from_slice(text.as_bytes());
            }
            Self::Lost { generation, numbers } => {
                value[..GENERATION_LEN].copy_from_slice(&generation.to_be_bytes());
                value[GENERATION_LEN..].copy_from_slice(numbers.bytes);
            }
            Self::LostSeen { generation } => value.copy_from_slice(&generation.to_be_bytes()),
            Self::Close | Self::Ping | Self::Pong | Self::Leaving => {}
        }
        Some(len)
    }

    /// Writes the first bytes of a DATA datagram, and gives the place of its packet of chunks; `None` where `out` is
    /// shorter than the header.
    pub fn begin_data(number: u64, out: &mut [u8]) -> Option<&mut [u8]> {
        emit_framed_header(kind::DATA, number, out)
    }

    /// Writes a LOST with the first [`FRAMED_LOST_MAX`] of `numbers`, and gives its length; `None` where `out` is
    /// shorter, or there are none.
    pub fn emit_lost(number: u64, generation: u32, numbers: &[u32], out: &mut [u8]) -> Option<usize> {
        let numbers = &numbers[..numbers.len().min(FRAMED_LOST_MAX)];
        let len = FRAMED_HEADER_LEN + GENERATION_LEN + numbers.len() * NUMBER_LEN;
        let value = emit_framed_header(kind::LOST, number, out.get_mut(..len)?)?;
        value[..GENERATION_LEN].copy_from_slice(&generation.to_be_bytes());
        for (place, lost) in value[GENERATION_LEN..].chunks_exact_mut(NUMBER_LEN).zip(numbers) {
            place.copy_from_slice(&lost.to_be_bytes());
        }
        (!numbers.is_empty()).then_some(len)
    }
}

/// Writes the header, and gives what is behind it.
fn emit_framed_header(kind: u8, number: u64, out: &mut [u8]) -> Option<&mut [u8]> {
    let (header, value) = out.split_at_mut_checked(FRAMED_HEADER_LEN)?;
    header[field::MAGIC].copy_from_slice(&MAGIC);
    header[field::KIND] = kind;
    header[field::NUMBER].copy_from_slice(&number.to_be_bytes());
    Some(value)
}

#[cfg(test)]
mod test {
    use super::*;

    const NUMBER: u64 = 0x0102_0304_0506_0708;
    const TERMS: FramedTerms = FramedTerms { tsn: 9, window_bytes: 0x0001_0000, window: 384, streams: 256 };

    fn datagram<const N: usize>(kind: u8, value: [u8; N]) -> ([u8; 64], usize) {
        let mut bytes = [0; 64];
        bytes[..12].copy_from_slice(&[b'M', b'F', 1, kind, 1, 2, 3, 4, 5, 6, 7, 8]);
        bytes[12..12 + N].copy_from_slice(&value);
        (bytes, 12 + N)
    }

    fn both_ways<const N: usize>(kind: u8, value: [u8; N], says: Framed<'_>) {
        let (bytes, len) = datagram(kind, value);
        assert_eq!(Framed::parse(&bytes[..len]), Ok((NUMBER, says)));
        let mut out = [0xee; 64];
        assert_eq!((says.emit(NUMBER, &mut out), says.len()), (Some(len), len));
        assert_eq!(out[..len], bytes[..len]);
        assert_eq!(says.emit(NUMBER, &mut out[..len - 1]), None, "there is no room");
    }

    #[test]
    fn literal_bytes() {
        let terms = [0, 0, 0, 9, 0, 1, 0, 0, 1, 0x80, 1, 0];
        let mut hello = [7; 28];
        hello[..12].copy_from_slice(&terms);
        both_ways(1, hello, Framed::Hello { terms: TERMS, host: [7; 16], protocol: 0 });
        let mut hello = [7; 29];
        hello[..12].copy_from_slice(&terms);
        hello[28] = 1;
        both_ways(1, hello, Framed::Hello { terms: TERMS, host: [7; 16], protocol: 1 });
        hello[28] = 0;
        let (bytes, len) = datagram(1, hello);
        assert!(Framed::parse(&bytes[..len]).is_err(), "a zero is not written");
        let mut welcome = [b's'; 14];
        welcome[..12].copy_from_slice(&terms);
        both_ways(2, welcome, Framed::Welcome { terms: TERMS, label: "ss" });
        both_ways(3, [0x27, 1, 0, 12], Framed::Data(&[0x27, 1, 0, 12]));
        both_ways(4, [0, 4, b'n', b'o'], Framed::Abort { reason: AbortReason::OtherHost, text: "no" });
        both_ways(4, [9, 9], Framed::Abort { reason: AbortReason::Other(0x0909), text: "" });
        both_ways(5, [], Framed::Close);
        both_ways(6, [], Framed::Ping);
        both_ways(7, [], Framed::Pong);
        both_ways(8, [], Framed::Leaving);
        let numbers = LostNumbers { bytes: &[0, 0, 0, 1, 0, 0, 0, 5] };
        assert!(numbers.iter().eq([1, 5]));
        both_ways(9, [0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 5], Framed::Lost { generation: 2, numbers });
        both_ways(10, [0, 0, 0, 2], Framed::LostSeen { generation: 2 });
    }

    #[test]
    fn every_reason_keeps_its_number() {
        for number in 0..12 {
            assert_eq!(AbortReason::of(number).number(), number);
        }
    }

    #[test]
    fn parts_of_a_datagram_are_written_in_place() {
        let mut out = [0; 64];
        let len = Framed::emit_lost(NUMBER, 2, &[1, 5], &mut out).expect("room");
        assert_eq!(out[..len], datagram(9, [0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 5]).0[..len]);
        assert_eq!(Framed::emit_lost(NUMBER, 2, &[], &mut out), None);
        let place = Framed::begin_data(NUMBER, &mut out).expect("room");
        place[0] = 0x40;
        assert_eq!(out[..13], datagram(3, [0x40]).0[..13]);
        assert!(Framed::begin_data(NUMBER, &mut out[..11]).is_none());
    }

    #[test]
    fn what_is_none_of_these_is_refused() {
        for (kind, value) in [(0, [0; 4]), (11, [0; 4]), (1, [0; 4]), (2, [0; 4]), (5, [0; 4]), (9, [0; 4])] {
            let (bytes, len) = datagram(kind, value);
            assert_eq!(Framed::parse(&bytes[..len]), Err(Error), "kind {kind}");
        }
        let (mut bytes, len) = datagram(6, []);
        bytes[2] = 2;
        assert_eq!(Framed::parse(&bytes[..len]), Err(Error), "another version");
        let (bytes, len) = datagram(10, [0, 0, 0]);
        assert_eq!(Framed::parse(&bytes[..len]), Err(Error));
        let (bytes, len) = datagram(4, [0, 1, 0xff]);
        assert_eq!(Framed::parse(&bytes[..len]), Err(Error), "no UTF-8");
        let (bytes, _) = datagram(3, []);
        assert_eq!(Framed::parse(&bytes[..11]), Err(Error));
    }
}
