//! What a frame begins with: the number of a request, by which its answer is found.
//!
//! ```text
//!  0..4 number of the request | 4..8 of requests: the oldest number that is not answered; of answers: zero
//!  8..  bytes of the program's own protocol
//! ```
//! Numbers rise by one with each request of a framed connection, and wrap. A request whose first byte behind the head
//! is zero, as no request of memcached or Redis begins, is answered with what follows that byte: so a switch has a
//! refusal given in the program's own words.

/// Bytes of the head.
pub const HEAD_LEN: usize = 8;
/// The first byte of a request that is answered with what follows it.
pub const ANSWER_IS: u8 = 0;

/// The head of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Of the request.
    pub number: u32,
    /// Of requests: all before it have been answered.
    pub oldest: u32,
}

fn word(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte))
}

impl Head {
    /// Reads a frame: its head, and the program's bytes. None: it is too short.
    pub fn split(frame: &[u8]) -> Option<(Self, &[u8])> {
        let (head, bytes) = frame.split_at_checked(HEAD_LEN).filter(|(_, bytes)| !bytes.is_empty())?;
        Some((Self { number: word(&head[..4]), oldest: word(&head[4..]) }, bytes))
    }

    /// A frame with the program's bytes.
    pub fn frame(self, bytes: &[u8]) -> Vec<u8> {
        [&self.number.to_be_bytes()[..], &self.oldest.to_be_bytes(), bytes].concat()
    }

    /// A frame for a request whose answer is known.
    pub fn answered(self, answer: &[u8]) -> Vec<u8> {
        [&self.number.to_be_bytes()[..], &self.oldest.to_be_bytes(), &[ANSWER_IS], answer].concat()
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_frame_has_its_numbers_in_front() {
        let head = Head { number: 0x0102_0304, oldest: 9 };
        let frame = head.frame(b"get a\r\n");
        assert_eq!(frame[..9], [1, 2, 3, 4, 0, 0, 0, 9, b'g']);
        assert_eq!(Head::split(&frame), Some((head, &b"get a\r\n"[..])));
        assert_eq!(Head::split(&frame[..8]), None);
        assert_eq!(head.answered(b"END\r\n")[8..], *b"\0END\r\n");
    }
}
