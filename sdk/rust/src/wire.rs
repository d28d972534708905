//! What is said on the program socket: one request message, one reply message, big-endian.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use margay_core::name::{Prefix, ServiceId};

/// The version of the format that this library speaks.
const VERSION: u8 = 1;
/// Fixed bytes of a request, before its text.
const REQUEST_LEN: usize = 56;
/// Fixed bytes of a reply, before its text.
const REPLY_LEN: usize = 60;
/// Longest text of a request, in bytes.
const TEXT_MAX: usize = 255;
/// Room for any message that an agent sends, in bytes.
pub(crate) const MESSAGE_MAX: usize = 16 * 1024;

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Name = 1,
    Resolve = 2,
    Bind = 3,
    Source = 4,
    Peer = 5,
    Events = 6,
    /// Comes unasked, after a reply to `Events`.
    Event = 7,
}

impl Kind {
    fn from_wire(kind: u8) -> Option<Self> {
        let all = [Self::Name, Self::Resolve, Self::Bind, Self::Source, Self::Peer, Self::Events, Self::Event];
        all.into_iter().find(|known| *known as u8 == kind)
    }
}

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
        if self.text.len() > TEXT_MAX {
            return Err(format!("the name has {} bytes; at most {TEXT_MAX} can be asked", self.text.len()));
        }
        let mut bytes = Vec::with_capacity(REQUEST_LEN + self.text.len());
        bytes.extend([VERSION, self.kind as u8, self.protocol.map_or(0, |protocol| protocol as u8), 0]);
        bytes.extend(self.port.to_be_bytes());
        bytes.extend(self.prefix.bits.to_be_bytes());
        bytes.extend(self.prefix.id.0);
        let address = match self.address {
            None => Ipv6Addr::UNSPECIFIED,
            Some(IpAddr::V4(v4)) => v4.to_ipv6_mapped(),
            Some(IpAddr::V6(v6)) => v6,
        };
        bytes.extend(address.octets());
        bytes.extend(self.text.as_bytes());
        Ok(bytes)
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
        let Some((fixed, text)) = bytes.split_first_chunk::<REPLY_LEN>() else {
            return Err(format!("a reply of {} bytes, where {REPLY_LEN} are the least", bytes.len()));
        };
        if fixed[0] != VERSION {
            return Err(format!("version {} of the program socket, not {VERSION}", fixed[0]));
        }
        let number = |at: usize| u16::from_be_bytes([fixed[at], fixed[at + 1]]);
        let bits = number(4);
        if bits > 256 {
            return Err(format!("a prefix of {bits} bits"));
        }
        let mut id = [0; 32];
        id.copy_from_slice(&fixed[8..40]);
        let mut v6 = [0; 16];
        v6.copy_from_slice(&fixed[40..56]);
        Ok(Self {
            kind: Kind::from_wire(fixed[1]),
            errno: number(2),
            // Not masked: a reply about one name may leave the bits zero.
            prefix: Prefix { id: ServiceId(id), bits },
            port: number(6),
            v6: v6.into(),
            v4: Ipv4Addr::new(fixed[56], fixed[57], fixed[58], fixed[59]),
            text: str::from_utf8(text).map_err(|_| "a text that is not UTF-8".to_owned())?.to_owned(),
        })
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
