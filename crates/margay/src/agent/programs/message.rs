//! The bytes of a request and of a reply.
//!
//! ```text
//! request:  0 version = 1 | 1 kind | 2 protocol | 3 zero | 4 port | 6 bits | 8 id (32) | 40 address (16) | 56 text
//! reply:    0 version = 1 | 1 kind | 2 errno | 4 bits | 6 port | 8 id (32) | 40 IPv6 (16) | 56 IPv4 (4) | 60 text
//! ```
//! Numbers are big-endian; a text is UTF-8 and goes to the end.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use margay_core::name::ServiceId;
use nix::errno::Errno;

const VERSION: u8 = 1;
const REQUEST_LEN: usize = 56;
const REPLY_LEN: usize = 60;
/// Longest text of a request.
pub const TEXT_MAX: usize = 255;
/// Longest request.
pub const REQUEST_MAX: usize = REQUEST_LEN + TEXT_MAX;
const REPLY_TEXT_MAX: usize = 1024;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
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
    /// Something has happened.
    Event = 7,
}

const KINDS: [Kind; 6] = [Kind::Name, Kind::Resolve, Kind::Bind, Kind::Source, Kind::Peer, Kind::Events];

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// What for.
    pub kind: Kind,
    /// IP protocol number; 0 where it does not matter.
    pub protocol: u8,
    /// A port.
    pub port: u16,
    /// Length of a prefix.
    pub bits: u16,
    /// A name, or the beginning of one.
    pub id: ServiceId,
    /// An address.
    pub address: IpAddr,
    /// A text.
    pub text: String,
}

impl Request {
    /// Reads a request.
    ///
    /// # Errors
    ///
    /// The refusal: whoever sent it speaks another version, or none of this.
    pub fn parse(bytes: &[u8]) -> Result<Self, Reply> {
        let kind = KINDS.into_iter().find(|kind| bytes.get(1) == Some(&(*kind as u8)));
        let refused = |errno, text: &str| Reply::refused(bytes.get(1).copied().unwrap_or(0), errno, text);
        if bytes.first().is_some_and(|version| *version != VERSION) {
            return Err(refused(
                Errno::EPROTONOSUPPORT,
                "this agent speaks version 1 of the program socket; install the library that came with it",
            ));
        }
        let malformed = || refused(Errno::EBADMSG, "this is no request; see the book's page on the program socket");
        let kind = kind.filter(|_| bytes.len() <= REQUEST_MAX).ok_or_else(malformed)?;
        let array = |at: usize| bytes.get(at..at + 2).and_then(|word| word.try_into().ok()).map(u16::from_be_bytes);
        let (fixed, text) = bytes.split_at_checked(REQUEST_LEN).ok_or_else(malformed)?;
        let (port, bits) = array(4).zip(array(6)).ok_or_else(malformed)?;
        if fixed[3] != 0 || bits > 256 {
            return Err(refused(Errno::EINVAL, "a prefix has 0 to 256 bits, and what is reserved is zero"));
        }
        let mut id = [0; 32];
        id.copy_from_slice(&fixed[8..40]);
        let mut address = [0; 16];
        address.copy_from_slice(&fixed[40..]);
        Ok(Self {
            kind,
            protocol: fixed[2],
            port,
            bits,
            id: ServiceId(id),
            address: Ipv6Addr::from(address).to_canonical(),
            text: String::from_utf8(text.to_vec()).map_err(|_| malformed())?,
        })
    }
}

/// A reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    kind: u8,
    /// 0: done.
    errno: u16,
    /// Length of a prefix.
    pub bits: u16,
    /// A port.
    pub port: u16,
    /// A name.
    pub id: ServiceId,
    /// An address.
    pub v6: Ipv6Addr,
    /// An address.
    pub v4: Ipv4Addr,
    /// A text; with an error, what is wrong and what to do.
    pub text: String,
}

impl Reply {
    /// It is done.
    pub fn done(kind: Kind) -> Self {
        Self::blank(kind as u8, 0, String::new())
    }

    /// It is not done.
    pub fn refused(kind: u8, errno: Errno, text: impl Into<String>) -> Self {
        // Errors of the kernel are small positive numbers.
        Self::blank(kind, u16::try_from(errno as i32).unwrap_or(u16::MAX), text.into())
    }

    /// Something has happened.
    pub fn event(text: String) -> Self {
        Self::blank(Kind::Event as u8, 0, text)
    }

    fn blank(kind: u8, errno: u16, text: String) -> Self {
        let (v6, v4) = (Ipv6Addr::UNSPECIFIED, Ipv4Addr::UNSPECIFIED);
        Self { kind, errno, bits: 0, port: 0, id: ServiceId::default(), v6, v4, text }
    }

    /// Whether it was done.
    pub fn is_done(&self) -> bool {
        self.errno == 0
    }

    /// The bytes. A text that is too long is cut.
    pub fn emit(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(REPLY_LEN + self.text.len().min(REPLY_TEXT_MAX));
        bytes.extend_from_slice(&[VERSION, self.kind]);
        for word in [self.errno, self.bits, self.port] {
            bytes.extend_from_slice(&word.to_be_bytes());
        }
        bytes.extend_from_slice(&self.id.0);
        bytes.extend_from_slice(&self.v6.octets());
        bytes.extend_from_slice(&self.v4.octets());
        let text = self.text.char_indices().take_while(|(at, found)| at + found.len_utf8() <= REPLY_TEXT_MAX);
        bytes.extend(text.map(|(_, found)| found).collect::<String>().bytes());
        bytes
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn bytes() -> Vec<u8> {
        let mut bytes = vec![1, 3, 6, 0, 0x1f, 0x90, 0, 100];
        bytes.extend_from_slice(&[0xab; 32]);
        bytes.extend_from_slice(&Ipv4Addr::new(198, 18, 0, 9).to_ipv6_mapped().octets());
        bytes.extend_from_slice(b"web.shop");
        bytes
    }

    #[test]
    fn a_request_is_read_as_the_book_has_it() {
        let read = Request::parse(&bytes()).expect("a request");
        assert_eq!((read.kind, read.protocol, read.port, read.bits), (Kind::Bind, 6, 8080, 100));
        assert_eq!((read.id, read.address), (ServiceId([0xab; 32]), Ipv4Addr::new(198, 18, 0, 9).into()));
        assert_eq!(read.text, "web.shop");
    }

    #[test]
    fn whatever_else_comes_is_refused_in_words() {
        let changed = |at: usize, byte: u8| {
            let mut bytes = bytes();
            bytes[at] = byte;
            bytes
        };
        for (bytes, errno) in [
            (Vec::new(), Errno::EBADMSG),
            (bytes()[..55].to_vec(), Errno::EBADMSG),
            (changed(0, 2), Errno::EPROTONOSUPPORT),
            (changed(1, 0), Errno::EBADMSG),
            (changed(1, 7), Errno::EBADMSG),
            (changed(3, 1), Errno::EINVAL),
            (changed(6, 2), Errno::EINVAL),
            (changed(57, 0xff), Errno::EBADMSG),
            ([bytes(), vec![b'x'; 256]].concat(), Errno::EBADMSG),
        ] {
            let reply = Request::parse(&bytes).expect_err("refused");
            assert_eq!(reply.errno, errno as u16, "{bytes:x?}");
            assert!(!reply.text.is_empty());
        }
    }

    #[test]
    fn a_reply_is_written_as_the_book_has_it() {
        let mut reply = Reply::done(Kind::Resolve);
        (reply.bits, reply.port, reply.id) = (96, 54324, ServiceId([1; 32]));
        (reply.v6, reply.v4) = (Ipv6Addr::LOCALHOST, Ipv4Addr::new(1, 2, 3, 4));
        reply.text = "ä".repeat(600);
        let bytes = reply.emit();
        assert_eq!(bytes[..8], [1, 2, 0, 0, 0, 96, 0xd4, 0x34]);
        assert_eq!(bytes[8..40], [1; 32]);
        assert_eq!(bytes[54..60], [0, 1, 1, 2, 3, 4]);
        assert_eq!((bytes.len(), std::str::from_utf8(&bytes[60..]).is_ok()), (60 + 1024, true));
        let refused = Reply::refused(Kind::Bind as u8, Errno::EACCES, "no").emit();
        assert_eq!((&refused[..4], &refused[60..]), (&[1, 3, 0, 13][..], &b"no"[..]));
    }
}
