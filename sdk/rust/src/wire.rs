//! What is said on the program socket, as this library handles it; the bytes are `margay_wire`'s.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use margay_core::name::{Prefix, ServiceId};
pub(crate) use margay_wire::ProgramKind as Kind;
use margay_wire::{
    PROGRAM_REPLY_LEN, PROGRAM_TEXT_MAX, PROGRAM_VERSION, ProgramError, ProgramReplyRepr, ProgramRequestRepr,
};

/// Room for any message that an agent sends, in bytes.
pub(crate) const MESSAGE_MAX: usize = 16 * 1024;

/// The transport of a socket, by its number in the IP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// Streams.
    Tcp = 6,
    /// Datagrams.
    Udp = 17,
}

/// One request.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    pub(crate) kind: Kind,
    pub(crate) protocol: Option<Protocol>,
    pub(crate) port: u16,
    pub(crate) prefix: Prefix,
    pub(crate) address: Option<IpAddr>,
    pub(crate) text: &'a str,
}

impl Request<'_> {
    pub(crate) fn new(kind: Kind) -> Self {
        Self { kind, protocol: None, port: 0, prefix: Prefix::default(), address: None, text: "" }
    }

    /// The message. `Err` says what is wrong with what the caller gave.
    pub(crate) fn to_bytes(&self) -> Result<Vec<u8>, String> {
        let text = self.text;
        if text.len() > PROGRAM_TEXT_MAX {
            return Err(format!("the name has {} bytes; at most {PROGRAM_TEXT_MAX} can be asked", text.len()));
        }
        let blank = ProgramRequestRepr::new(self.kind);
        let fixed = ProgramRequestRepr {
            protocol: self.protocol.map_or(0, |protocol| protocol as u8),
            port: self.port,
            bits: self.prefix.bits,
            id: self.prefix.id.0,
            address: self.address.unwrap_or(blank.address),
            text,
            ..blank
        };
        Ok([&fixed.emit()[..], text.as_bytes()].concat())
    }
}

/// One reply, or one event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    /// `None`: one that this library does not know.
    pub(crate) kind: Option<Kind>,
    /// 0: done. Otherwise the text says why not, and what to do.
    pub(crate) errno: u16,
    pub(crate) prefix: Prefix,
    pub(crate) port: u16,
    pub(crate) v6: Ipv6Addr,
    pub(crate) v4: Ipv4Addr,
    pub(crate) text: String,
}

impl Reply {
    /// Reads a message. `Err` says in what it is not the format of version 1.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let ProgramReplyRepr { kind, errno, bits, port, id, v6, v4, text } =
            ProgramReplyRepr::parse(bytes).map_err(|error| match error {
                ProgramError::Version { found } => {
                    format!("version {found} of the program socket, not {PROGRAM_VERSION}")
                }
                ProgramError::Bits { found } => format!("a prefix of {found} bits"),
                ProgramError::Text => "a text that is not UTF-8".to_owned(),
                ProgramError::Length { .. } | ProgramError::Kind | ProgramError::Reserved => {
                    format!("a reply of {} bytes, where {PROGRAM_REPLY_LEN} are the least", bytes.len())
                }
            })?;
        // Not masked: a reply about one name may leave the bits zero.
        let prefix = Prefix { id: ServiceId(id), bits };
        Ok(Self { kind: Kind::of(kind), errno, prefix, port, v6, v4, text: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_its_fields_where_the_format_says() {
        let prefix = Prefix::new(ServiceId([0xab; 32]), 96);
        let address = Some("198.18.1.7".parse().expect("literal"));
        let request = Request {
            protocol: Some(Protocol::Udp),
            port: 0x1234,
            prefix,
            address,
            text: "a",
            ..Request::new(Kind::Peer)
        };
        let bytes = request.to_bytes().expect("short");
        assert_eq!(bytes[..8], [1, 5, 17, 0, 0x12, 0x34, 0, 96]);
        assert_eq!(bytes[8..40], prefix.id.0);
        assert_eq!(bytes[40..], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 198, 18, 1, 7, b'a']);
        let load = Request { port: 40, prefix, ..Request::new(Kind::Load) }.to_bytes().expect("short");
        assert_eq!((&load[..8], load.len()), (&[1, 15, 0, 0, 0, 40, 0, 96][..], 56));
        let text = "x".repeat(256);
        assert!(Request { text: &text, ..Request::new(Kind::Name) }.to_bytes().is_err());
    }

    fn literal_reply() -> Vec<u8> {
        let mut bytes = vec![1, 2, 0, 13, 1, 0, 0xd4, 0x34];
        bytes.extend([7; 32]);
        bytes.extend([0xfd, 0x5a, 0x4c, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9]);
        bytes.extend([198, 18, 1, 7]);
        bytes.extend(b"no right");
        bytes
    }

    #[test]
    fn a_reply_is_read_where_the_format_says() {
        let reply = Reply::parse(&literal_reply()).expect("well-formed");
        assert_eq!((reply.kind, reply.errno, reply.port), (Some(Kind::Resolve), 13, 54324));
        assert_eq!(reply.prefix, Prefix::from(ServiceId([7; 32])));
        assert_eq!(reply.v6.to_string(), "fd5a:4c00::9");
        assert_eq!(reply.v4.to_string(), "198.18.1.7");
        assert_eq!(reply.text, "no right");
    }

    #[test]
    fn what_is_no_reply_is_refused_with_the_reason() {
        let broken = |at: usize, value: u8| {
            let mut bytes = literal_reply();
            bytes[at] = value;
            Reply::parse(&bytes).expect_err("broken")
        };
        assert_eq!(broken(0, 2), "version 2 of the program socket, not 1");
        assert_eq!(broken(5, 1), "a prefix of 257 bits");
        assert_eq!(broken(60, 0xff), "a text that is not UTF-8");
        assert_eq!(
            Reply::parse(&literal_reply()[..59]).expect_err("short"),
            "a reply of 59 bytes, where 60 are the least"
        );
    }
}
