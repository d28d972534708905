//! Frames that programs send and receive themselves (docs/decisions/0087), with the sockets of the SDKs.
//!
//! ```text
//!  0..4 number of the frame; of an answer, that of what it answers; of other frames of a server zero
//!  4..8 of a client's: the oldest number that is not answered; of a server's zero
//!  8 mark and flags | 9 length of the key | 10.. key | payload
//!
//!  8: 0x80 is always there | 0x01 safe: may be given to another server, too | 0x02 wants an answer | 0x04 is one
//! ```
//! A frame whose byte 8 is zero stands in the place of one that nobody is to be given any more: a switch has sent it.

/// The number of the protocol in HELLO.
pub const OWN_FRAMES: u8 = 41;
/// Longest key of a frame, in bytes.
pub const OWN_FRAME_KEY_MAX: usize = u8::MAX as usize;
/// Bytes before the key.
pub const OWN_FRAME_HEADER_LEN: usize = 10;
/// Bytes before what the numbers are for.
const NUMBERS_LEN: usize = 8;

mod field {
    use core::ops::Range;

    pub const NUMBER: Range<usize> = 0..4;
    pub const OLDEST: Range<usize> = 4..8;
    pub const FLAGS: usize = 8;
    pub const KEY_LEN: usize = 9;
}

mod flag {
    pub const MARK: u8 = 0x80;
    pub const IS_SAFE: u8 = 0x01;
    pub const WANTS_ANSWER: u8 = 0x02;
    pub const IS_ANSWER: u8 = 0x04;
}

/// A frame of a program's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnFrameRepr<'a> {
    /// The number of a client's frame, or of what is answered.
    pub number: u32,
    /// Of a client's: all before it that wanted an answer have one, or will have none.
    pub oldest: u32,
    /// Another server may be given it, too, where nobody knows whether this one has acted on it.
    pub is_safe: bool,
    /// An answer is to come.
    pub wants_answer: bool,
    /// It is one.
    pub is_answer: bool,
    /// What a switch divides frames by; empty: any server will do.
    pub key: &'a [u8],
    /// The program's bytes.
    pub payload: &'a [u8],
}

fn word(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte))
}

impl<'a> OwnFrameRepr<'a> {
    /// Reads a frame, of which the beginning is enough for all but the payload. None: it is none.
    pub fn parse(frame: &'a [u8]) -> Option<Self> {
        let (numbers, rest) = frame.split_at_checked(NUMBERS_LEN)?;
        let repr = Self::parse_unnumbered(rest)?;
        Some(Self { number: word(&numbers[field::NUMBER]), oldest: word(&numbers[field::OLDEST]), ..repr })
    }

    /// The same of what stands behind the numbers, which are zero then.
    pub fn parse_unnumbered(rest: &'a [u8]) -> Option<Self> {
        let (head, rest) = rest.split_at_checked(OWN_FRAME_HEADER_LEN - NUMBERS_LEN)?;
        let flags = head[field::FLAGS - NUMBERS_LEN];
        let (key, payload) = rest.split_at_checked(head[field::KEY_LEN - NUMBERS_LEN].into())?;
        let has = |flag| flags & flag != 0;
        has(flag::MARK).then_some(Self {
            number: 0,
            oldest: 0,
            is_safe: has(flag::IS_SAFE),
            wants_answer: has(flag::WANTS_ANSWER),
            is_answer: has(flag::IS_ANSWER),
            key,
            payload,
        })
    }

    /// Bytes of the frame.
    pub const fn len(&self) -> usize {
        OWN_FRAME_HEADER_LEN + self.key.len() + self.payload.len()
    }

    /// No frame is.
    pub const fn is_empty(&self) -> bool {
        false
    }

    /// Writes the frame, and gives its length. None: there is no room, or the key is too long.
    pub fn emit(&self, out: &mut [u8]) -> Option<usize> {
        let out = out.get_mut(..self.len())?;
        let key_len = u8::try_from(self.key.len()).ok()?;
        out[field::NUMBER].copy_from_slice(&self.number.to_be_bytes());
        out[field::OLDEST].copy_from_slice(&self.oldest.to_be_bytes());
        let flags =
            [(self.is_safe, flag::IS_SAFE), (self.wants_answer, flag::WANTS_ANSWER), (self.is_answer, flag::IS_ANSWER)];
        out[field::FLAGS] = flags.iter().filter(|(is_set, _)| *is_set).fold(flag::MARK, |sum, (_, flag)| sum | flag);
        out[field::KEY_LEN] = key_len;
        let (key, payload) = out[OWN_FRAME_HEADER_LEN..].split_at_mut(self.key.len());
        key.copy_from_slice(self.key);
        payload.copy_from_slice(self.payload);
        Some(self.len())
    }
}
