//! The headers of an arriving packet, taken from its first chunk and written anew for the local application (DESIGN
//! §18: each end has its own five-tuple, and its own IP version).
//!
//! A template writes headers for the whole payload or for a contiguous part of it: when a chunk is lost, what came of a
//! TCP train is given to the application's TCP as shorter super-packets.

use core::ops::Range;

use margay_core::DropReason;
use margay_core::delta::Checksum;
use margay_wire::{GsoKind, TrainRepr};

use crate::checksum::{adjust, fold, pseudo, sum};
use crate::packet::{self, CWR, FIN, FlowKey, HEADERS_MAX, IPV4_LEN, IPV6_LEN, PSH, Packet, RST, SYN, TCP, UDP, URG};
use crate::vnet::{self, Gso, Vnet};

/// Room for a virtio header, an IP header and a transport header.
pub type Headers = [u8; vnet::LEN + IPV6_LEN + 60];

/// Longest IPv4 packet.
const IPV4_MAX: usize = 65_535;
/// Longest IPv6 payload.
const IPV6_PAYLOAD_MAX: usize = 65_535;

/// What is known of a packet from its first chunk.
#[derive(Clone, Debug, PartialEq)]
pub struct Template {
    protocol: u8,
    traffic_class: u8,
    hop_limit: u8,
    identification: u16,
    dont_fragment: bool,
    transport: [u8; 60],
    transport_len: usize,
    /// Sum of the sender's own addresses and ports.
    tuple_sum: u64,
    header_len: usize,
    payload_len: usize,
    gso: bool,
    partial: bool,
    segment_size: usize,
}

/// What was written by [`Template::write`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// Bytes of all headers, the virtio header included.
    pub len: usize,
    /// Segments that the packet stands for.
    pub segments: usize,
}

impl Template {
    /// Reads the headers at the start of `inner`, the part of the packet that the first chunk holds.
    pub fn parse(train: &TrainRepr, inner: &[u8]) -> Result<Self, DropReason> {
        let inner_len = train.inner_len as usize;
        if inner.len() > inner_len || (inner.len() < inner_len && inner.len() < HEADERS_MAX) {
            return Err(DropReason::Malformed);
        }
        let Ok(Packet::Transport(found)) = packet::parse(inner, inner_len) else { return Err(DropReason::Malformed) };
        if found.total_len != inner_len || (inner[0] >> 4 == 4 && sum_is_wrong(&inner[..found.ip_len])) {
            return Err(DropReason::Malformed);
        }
        let gso = match (train.gso, found.key.protocol) {
            (GsoKind::None, _) => false,
            (GsoKind::Tcp, TCP) | (GsoKind::Udp, UDP) if train.partial_checksum && train.segment_size > 0 => true,
            _ => return Err(DropReason::Malformed),
        };
        let header_len = found.ip_len + found.transport_len;
        let mut transport = [0; 60];
        transport[..found.transport_len].copy_from_slice(&inner[found.ip_len..header_len]);
        let v4 = inner[0] >> 4 == 4;
        let word = |at: usize| u16::from_be_bytes([inner[at], inner[at + 1]]);
        let addresses = if v4 { &inner[12..20] } else { &inner[8..40] };
        Ok(Self {
            protocol: found.key.protocol,
            traffic_class: if v4 { inner[1] } else { (word(0) >> 4) as u8 },
            hop_limit: if v4 { inner[8] } else { inner[7] },
            identification: if v4 { word(4) } else { 0 },
            dont_fragment: !v4 || inner[6] & 0x40 != 0,
            tuple_sum: sum(addresses) + sum(&transport[..4]),
            transport,
            transport_len: found.transport_len,
            header_len,
            payload_len: inner_len - header_len,
            gso,
            partial: train.partial_checksum,
            segment_size: usize::from(train.segment_size),
        })
    }

    /// TCP or UDP.
    pub const fn protocol(&self) -> u8 {
        self.protocol
    }

    /// Bytes of the sender's IP and transport headers: where the payload begins.
    pub const fn header_len(&self) -> usize {
        self.header_len
    }

    /// Bytes of payload.
    pub const fn payload_len(&self) -> usize {
        self.payload_len
    }

    /// How the checksum stands that [`write`](Self::write) writes.
    pub const fn checksum_state(&self) -> Checksum {
        if self.partial { Checksum::Partial } else { Checksum::Full }
    }

    /// TCP flags; zero for UDP.
    pub const fn flags(&self) -> u8 {
        if self.protocol == TCP { self.transport[13] } else { 0 }
    }

    /// The grain in which parts may be given to the application: any byte of a TCP super-packet, whole datagrams of a
    /// UDP one, and all or nothing of what carries a complete checksum or cannot be split.
    pub fn unit(&self) -> usize {
        if !self.partial || self.payload_len == 0 {
            return self.payload_len.max(1);
        }
        match self.protocol {
            TCP if self.flags() & (SYN | RST | URG) == 0 => 1,
            UDP if self.gso => self.segment_size,
            _ => self.payload_len,
        }
    }

    /// Longest part that one packet to `to` can hold: translation may need more room than the sender had, or less.
    pub fn part_max(&self, to: &FlowKey) -> usize {
        let room = if to.is_v4() { IPV4_MAX - IPV4_LEN } else { IPV6_PAYLOAD_MAX };
        room - self.transport_len
    }

    /// Writes the headers of a packet to the application with five-tuple `to` and the bytes `part` of the payload. A
    /// part other than the whole must lie on [`unit`](Self::unit)s. The whole of a packet with an absent UDP checksum
    /// needs `payload_sum`, when it is to become IPv6, where a checksum is a must.
    pub fn write(&self, to: &FlowKey, part: Range<usize>, payload_sum: Option<u64>, out: &mut Headers) -> Written {
        let len = part.len();
        let transport_len = (self.transport_len + len) as u32;
        let ip_len = if to.is_v4() { IPV4_LEN } else { IPV6_LEN };
        let end = vnet::LEN + ip_len + self.transport_len;
        let gso = self.gso && len > self.segment_size;
        let (ip, transport) = out[vnet::LEN..end].split_at_mut(ip_len);
        if to.is_v4() {
            self.write_v4(to, transport_len, ip);
        } else {
            self.write_v6(to, transport_len, ip);
        }
        transport.copy_from_slice(&self.transport[..self.transport_len]);
        transport[0..2].copy_from_slice(&to.source_port.to_be_bytes());
        transport[2..4].copy_from_slice(&to.destination_port.to_be_bytes());
        let addresses = if to.is_v4() { sum(&ip[12..20]) } else { sum(&ip[8..40]) };
        let checksum_at = if self.protocol == TCP { 16 } else { 6 };
        if self.protocol == TCP {
            self.move_tcp(&part, transport);
        } else {
            transport[4..6].copy_from_slice(&(transport_len as u16).to_be_bytes());
        }
        let checksum = self.checksum(to, addresses, transport, transport_len, payload_sum);
        transport[checksum_at..checksum_at + 2].copy_from_slice(&checksum.to_be_bytes());
        let ecn = gso && self.protocol == TCP && transport[13] & CWR != 0;
        let vnet = Vnet {
            partial_checksum: self.partial,
            gso: match (gso, self.protocol) {
                (false, _) => Gso::None,
                (true, TCP) if to.is_v4() => Gso::Tcp4,
                (true, TCP) => Gso::Tcp6,
                _ => Gso::Udp,
            },
            ecn,
            header_len: (ip_len + self.transport_len) as u16,
            segment_size: if gso { self.segment_size as u16 } else { 0 },
            checksum_start: if self.partial { ip_len as u16 } else { 0 },
            checksum_offset: if self.partial { checksum_at as u16 } else { 0 },
        };
        out[..vnet::LEN].copy_from_slice(&vnet.emit());
        Written { len: end, segments: if gso { len.div_ceil(self.segment_size) } else { 1 } }
    }

    fn write_v4(&self, to: &FlowKey, transport_len: u32, ip: &mut [u8]) {
        ip[0] = 0x45;
        ip[1] = self.traffic_class;
        ip[2..4].copy_from_slice(&(transport_len as u16 + IPV4_LEN as u16).to_be_bytes());
        ip[4..6].copy_from_slice(&self.identification.to_be_bytes());
        ip[6..8].copy_from_slice(&[if self.dont_fragment { 0x40 } else { 0 }, 0]);
        ip[8] = self.hop_limit;
        ip[9] = self.protocol;
        ip[10..12].fill(0);
        ip[12..16].copy_from_slice(&to.source[12..]);
        ip[16..20].copy_from_slice(&to.destination[12..]);
        let checksum = !fold(sum(ip));
        ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    }

    fn write_v6(&self, to: &FlowKey, transport_len: u32, ip: &mut [u8]) {
        ip[0] = 0x60 | self.traffic_class >> 4;
        ip[1] = self.traffic_class << 4;
        ip[2..4].fill(0);
        ip[4..6].copy_from_slice(&(transport_len as u16).to_be_bytes());
        ip[6] = self.protocol;
        ip[7] = self.hop_limit;
        ip[8..24].copy_from_slice(&to.source);
        ip[24..40].copy_from_slice(&to.destination);
    }

    /// Makes the TCP header that of a part: its own sequence number, CWR only first, FIN and PSH only last.
    fn move_tcp(&self, part: &Range<usize>, transport: &mut [u8]) {
        let sequence = u32::from_be_bytes([transport[4], transport[5], transport[6], transport[7]]);
        transport[4..8].copy_from_slice(&sequence.wrapping_add(part.start as u32).to_be_bytes());
        if part.start > 0 {
            transport[13] &= !CWR;
        }
        if part.end < self.payload_len {
            transport[13] &= !(FIN | PSH);
        }
    }

    fn checksum(
        &self,
        to: &FlowKey,
        addresses: u64,
        transport: &[u8],
        transport_len: u32,
        payload_sum: Option<u64>,
    ) -> u16 {
        if self.partial {
            return fold(addresses + pseudo(self.protocol, transport_len));
        }
        let at = if self.protocol == TCP { 16 } else { 6 };
        let old = u16::from_be_bytes([transport[at], transport[at + 1]]);
        let ports = sum(&transport[..4]);
        let new = match (self.protocol, old) {
            (UDP, 0) if to.is_v4() => return 0,
            (UDP, 0) => !fold(
                addresses + pseudo(UDP, transport_len) + ports + u64::from(transport_len) + payload_sum.unwrap_or(0),
            ),
            _ => adjust(old, self.tuple_sum, addresses + ports),
        };
        // For UDP a zero would mean "none".
        if self.protocol == UDP && new == 0 { 0xffff } else { new }
    }

    /// Whether [`write`](Self::write) needs the payload's sum for a packet to `to`.
    pub fn needs_payload_sum(&self, to: &FlowKey) -> bool {
        self.protocol == UDP && !self.partial && !to.is_v4() && self.transport[6..8] == [0, 0]
    }
}

fn sum_is_wrong(header: &[u8]) -> bool {
    fold(sum(header)) != 0xffff
}
