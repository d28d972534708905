//! The virtio network header in front of every packet of a TUN with `IFF_VNET_HDR` (virtio 1.2, §5.1.6), in its legacy
//! form of ten bytes and native byte order.

/// Bytes of the header.
pub const LEN: usize = 10;

const NEEDS_CSUM: u8 = 1;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
const GSO_UDP_L4: u8 = 5;
const GSO_ECN: u8 = 0x80;

/// How the kernel is to cut a super-packet, or has left it to us to cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gso {
    /// One packet, not to be cut.
    #[default]
    None,
    /// TCP over IPv4.
    Tcp4,
    /// TCP over IPv6.
    Tcp6,
    /// UDP over IPv4 or IPv6, into datagrams of one size.
    Udp,
}

/// The header's content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Vnet {
    /// Whether the transport checksum is only the pseudo-header's sum.
    pub partial_checksum: bool,
    /// Super-packet kind.
    pub gso: Gso,
    /// Whether CWR belongs to the first segment alone.
    pub ecn: bool,
    /// Bytes of IP and transport header; the kernel makes so much of the packet linear.
    pub header_len: u16,
    /// Payload bytes of each segment.
    pub segment_size: u16,
    /// Where the checksummed part begins, in bytes from the packet's start.
    pub checksum_start: u16,
    /// Where the checksum lies, in bytes from `checksum_start`.
    pub checksum_offset: u16,
}

impl Vnet {
    /// Reads what the kernel wrote; `None` for a kind of super-packet that was never agreed to.
    pub fn parse(bytes: &[u8; LEN]) -> Option<Self> {
        let word = |at: usize| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
        let gso = match bytes[1] & !GSO_ECN {
            0 => Gso::None,
            GSO_TCPV4 => Gso::Tcp4,
            GSO_TCPV6 => Gso::Tcp6,
            GSO_UDP_L4 => Gso::Udp,
            _ => return None,
        };
        Some(Self {
            partial_checksum: bytes[0] & NEEDS_CSUM != 0,
            gso,
            ecn: bytes[1] & GSO_ECN != 0,
            header_len: word(2),
            segment_size: word(4),
            checksum_start: word(6),
            checksum_offset: word(8),
        })
    }

    /// The header as the kernel wants it.
    pub fn emit(&self) -> [u8; LEN] {
        let kind = match self.gso {
            Gso::None => 0,
            Gso::Tcp4 => GSO_TCPV4,
            Gso::Tcp6 => GSO_TCPV6,
            Gso::Udp => GSO_UDP_L4,
        };
        let mut bytes = [0; LEN];
        bytes[0] = if self.partial_checksum { NEEDS_CSUM } else { 0 };
        bytes[1] = kind | if self.ecn { GSO_ECN } else { 0 };
        bytes[2..4].copy_from_slice(&self.header_len.to_ne_bytes());
        bytes[4..6].copy_from_slice(&self.segment_size.to_ne_bytes());
        bytes[6..8].copy_from_slice(&self.checksum_start.to_ne_bytes());
        bytes[8..10].copy_from_slice(&self.checksum_offset.to_ne_bytes());
        bytes
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn literal_tcp_super_packet() {
        let vnet = Vnet {
            partial_checksum: true,
            gso: Gso::Tcp4,
            ecn: true,
            header_len: 52,
            segment_size: 1396,
            checksum_start: 20,
            checksum_offset: 16,
        };
        let bytes = vnet.emit();
        assert_eq!(bytes[..2], [1, 0x81]);
        assert_eq!(Vnet::parse(&bytes), Some(vnet));
    }

    #[test]
    fn unknown_kind_is_refused() {
        assert_eq!(Vnet::parse(&[0, 3, 0, 0, 0, 0, 0, 0, 0, 0]), None);
    }
}
