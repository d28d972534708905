//! Requests and replies as the agent handles them; their bytes are `margay_wire`'s.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use margay_core::name::ServiceId;
pub use margay_wire::ProgramKind as Kind;
use margay_wire::{PROGRAM_REQUEST_LEN, PROGRAM_TEXT_MAX, ProgramError, ProgramReplyRepr, ProgramRequestRepr};
use nix::errno::Errno;

/// Longest request.
pub const REQUEST_MAX: usize = PROGRAM_REQUEST_LEN + PROGRAM_TEXT_MAX;
const REPLY_TEXT_MAX: usize = 1024;

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
        let read = ProgramRequestRepr::parse(bytes).map_err(|error| {
            let (errno, text) = match error {
                ProgramError::Version { .. } => (
                    Errno::EPROTONOSUPPORT,
                    "this agent speaks version 1 of the program socket; install the library that came with it",
                ),
                ProgramError::Bits { .. } | ProgramError::Reserved => {
                    (Errno::EINVAL, "a prefix has 0 to 256 bits, and what is reserved is zero")
                }
                ProgramError::Length { .. } | ProgramError::Kind | ProgramError::Text => {
                    (Errno::EBADMSG, "this is no request; see the book's page on the program socket")
                }
            };
            Reply::refused(bytes.get(1).copied().unwrap_or(0), errno, text)
        })?;
        let ProgramRequestRepr { kind, protocol, port, bits, id, address, text } = read;
        Ok(Self { kind, protocol, port, bits, id: ServiceId(id), address, text: text.to_owned() })
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

    /// The bytes. A text that is too long is cut.
    pub fn emit(&self) -> Vec<u8> {
        let end = self.text.floor_char_boundary(REPLY_TEXT_MAX);
        let text = &self.text[..end];
        let Self { kind, errno, bits, port, id, v6, v4, .. } = *self;
        let fixed = ProgramReplyRepr { kind, errno, bits, port, id: id.0, v6, v4, text }.emit();
        [&fixed[..], text.as_bytes()].concat()
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
            (changed(1, 12), Errno::EBADMSG),
            (changed(1, 17), Errno::EBADMSG),
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
