//! IP fragments that leave `sal0`, put together before they are looked up (DESIGN §7, MTU). Bounded in datagrams,
//! parts, bytes and time; overlaps are refused (RFC 5722), since only an attacker makes them.

use std::time::Duration;

use margay_core::DropReason;
use margay_core::time::Instant;

use crate::checksum::{fold, pseudo, sum};
use crate::packet::{FRAGMENT, IPV4_LEN, IPV6_LEN, TCP, UDP};

/// Most datagrams in the making; the oldest goes.
const DATAGRAMS_MAX: usize = 64;
/// Most fragments of one datagram.
const PARTS_MAX: usize = 128;
/// Most bytes of all.
const BYTES_MAX: usize = 2 << 20;
/// Longest wait for the last fragment. RFC 8200 says 60 s, but what leaves a local stack comes at once.
const WAIT_MAX: Duration = Duration::from_secs(10);
/// Largest payload of a datagram.
const PAYLOAD_MAX: usize = 65_535;

/// What makes fragments belong together.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Key {
    /// Version, protocol (IPv4 only), source and destination.
    addresses: Vec<u8>,
    identification: u32,
}

/// One fragment, taken apart.
struct Fragment<'a> {
    key: Key,
    offset: usize,
    more: bool,
    /// The datagram's header, without what makes it a fragment; its lengths are still to be set.
    header: Vec<u8>,
    payload: &'a [u8],
}

/// A datagram in the making.
struct Datagram {
    key: Key,
    since: Instant,
    /// Header of the first fragment, which decides.
    header: Option<Vec<u8>>,
    /// Length of the whole payload, once the last fragment has come.
    len: Option<usize>,
    /// Offset and bytes, in order.
    parts: Vec<(usize, Vec<u8>)>,
}

/// Puts datagrams together. One thread owns it.
#[derive(Default)]
pub struct Reassembler {
    datagrams: Vec<Datagram>,
    bytes: usize,
    incomplete: u64,
}

impl Reassembler {
    /// Takes a fragment; gives the whole packet when it was the last one missing.
    pub fn accept(&mut self, packet: &[u8], now: Instant) -> Result<Option<Vec<u8>>, DropReason> {
        let fragment = parse(packet).ok_or(DropReason::Malformed)?;
        let end = fragment.offset + fragment.payload.len();
        let is_odd = fragment.more && !fragment.payload.len().is_multiple_of(8);
        if fragment.payload.is_empty() || is_odd || end > PAYLOAD_MAX {
            return Err(DropReason::Malformed);
        }
        self.make_room(fragment.payload.len(), now);
        let at = self.datagrams.iter().position(|datagram| datagram.key == fragment.key).unwrap_or_else(|| {
            self.datagrams.push(Datagram {
                key: fragment.key.clone(),
                since: now,
                header: None,
                len: None,
                parts: Vec::new(),
            });
            self.datagrams.len() - 1
        });
        match self.datagrams[at].add(fragment) {
            Ok(added) => self.bytes += added,
            Err(reason) => {
                self.remove(at);
                return Err(reason);
            }
        }
        if !self.datagrams[at].is_whole() {
            return Ok(None);
        }
        self.remove(at).finish().map(Some)
    }

    /// Datagrams given up with fragments missing, since the last call.
    pub fn take_incomplete(&mut self) -> u64 {
        core::mem::take(&mut self.incomplete)
    }

    fn make_room(&mut self, bytes: usize, now: Instant) {
        while let Some(oldest) = self.datagrams.first() {
            let is_late = now.since(oldest.since) > WAIT_MAX;
            if !is_late && self.datagrams.len() < DATAGRAMS_MAX && self.bytes + bytes <= BYTES_MAX {
                return;
            }
            self.remove(0);
            self.incomplete += 1;
        }
    }

    fn remove(&mut self, at: usize) -> Datagram {
        let datagram = self.datagrams.remove(at);
        self.bytes -= datagram.parts.iter().map(|(_, part)| part.len()).sum::<usize>();
        datagram
    }
}

impl Datagram {
    /// Adds a fragment; gives the bytes that it added.
    fn add(&mut self, fragment: Fragment<'_>) -> Result<usize, DropReason> {
        let (start, end) = (fragment.offset, fragment.offset + fragment.payload.len());
        let at = self.parts.partition_point(|(offset, _)| *offset < start);
        if self.parts.get(at).is_some_and(|(offset, part)| *offset == start && part == fragment.payload) {
            return Ok(0);
        }
        let before = at.checked_sub(1).map(|before| &self.parts[before]);
        let overlaps = before.is_some_and(|(offset, part)| offset + part.len() > start)
            || self.parts.get(at).is_some_and(|(offset, _)| *offset < end);
        let passes_end = self.len.is_some_and(|len| end > len || (!fragment.more && end != len));
        let ends_early = !fragment.more && self.parts.last().is_some_and(|(offset, part)| offset + part.len() > end);
        if overlaps || passes_end || ends_early {
            return Err(DropReason::Malformed);
        }
        if self.parts.len() >= PARTS_MAX {
            return Err(DropReason::Full);
        }
        if !fragment.more {
            self.len = Some(end);
        }
        if start == 0 {
            self.header = Some(fragment.header);
        }
        self.parts.insert(at, (start, fragment.payload.to_vec()));
        Ok(end - start)
    }

    fn is_whole(&self) -> bool {
        // Parts never overlap and never pass the end, so their sum says it all.
        self.header.is_some() && self.len == Some(self.parts.iter().map(|(_, part)| part.len()).sum())
    }

    fn finish(self) -> Result<Vec<u8>, DropReason> {
        let mut packet = self.header.ok_or(DropReason::Incomplete)?;
        let header_len = packet.len();
        packet.extend(self.parts.into_iter().flat_map(|(_, part)| part));
        if packet[0] >> 4 == 4 {
            let total = u16::try_from(packet.len()).map_err(|_| DropReason::Malformed)?;
            packet[2..4].copy_from_slice(&total.to_be_bytes());
            packet[10..12].fill(0);
            let checksum = !fold(sum(&packet[..header_len]));
            packet[10..12].copy_from_slice(&checksum.to_be_bytes());
        } else {
            let payload = u16::try_from(packet.len() - IPV6_LEN).map_err(|_| DropReason::Malformed)?;
            packet[4..6].copy_from_slice(&payload.to_be_bytes());
        }
        if has_right_checksum(&packet, header_len) { Ok(packet) } else { Err(DropReason::Incomplete) }
    }
}

/// Whether the transport checksum of a whole packet is right; nothing is said of protocols other than TCP and UDP. A
/// fragment of one packet may have waited for another one with the same identification (RFC 4963): senders number the
/// packets of each socket by themselves. What is made of the packet afterwards has a checksum of its own, which would
/// be right.
fn has_right_checksum(packet: &[u8], header_len: usize) -> bool {
    let is_v4 = packet[0] >> 4 == 4;
    let transport = &packet[header_len..];
    let protocol = packet[if is_v4 { 9 } else { 6 }];
    let has_none = is_v4 && protocol == UDP && transport.get(6..8) == Some(&[0, 0]);
    if !matches!(protocol, TCP | UDP) || has_none {
        return true;
    }
    let addresses = if is_v4 { &packet[12..20] } else { &packet[8..IPV6_LEN] };
    // A packet has 65,535 bytes at most.
    fold(sum(addresses) + pseudo(protocol, transport.len() as u32) + sum(transport)) == 0xffff
}

fn parse(packet: &[u8]) -> Option<Fragment<'_>> {
    if *packet.first()? >> 4 == 4 { parse_v4(packet) } else { parse_v6(packet) }
}

fn parse_v4(packet: &[u8]) -> Option<Fragment<'_>> {
    let header_len = usize::from(packet[0] & 0x0f) * 4;
    let total = usize::from(u16::from_be_bytes(packet.get(2..4)?.try_into().ok()?));
    if header_len < IPV4_LEN || total < header_len || total > packet.len() {
        return None;
    }
    let field = u16::from_be_bytes([packet[6], packet[7]]);
    let mut header = packet[..header_len].to_vec();
    header[6..8].fill(0);
    let mut addresses = vec![4, packet[9]];
    addresses.extend(&packet[12..20]);
    Some(Fragment {
        key: Key { addresses, identification: u32::from(u16::from_be_bytes([packet[4], packet[5]])) },
        offset: usize::from(field & 0x1fff) * 8,
        more: field & 0x2000 != 0,
        header,
        payload: &packet[header_len..total],
    })
}

fn parse_v6(packet: &[u8]) -> Option<Fragment<'_>> {
    let extension = packet.get(IPV6_LEN..IPV6_LEN + 8)?;
    let total = IPV6_LEN + usize::from(u16::from_be_bytes([packet[4], packet[5]]));
    if packet[6] != FRAGMENT || total < IPV6_LEN + 8 || total > packet.len() {
        return None;
    }
    let field = u16::from_be_bytes([extension[2], extension[3]]);
    let mut header = packet[..IPV6_LEN].to_vec();
    header[6] = extension[0];
    let mut addresses = vec![6];
    addresses.extend(&packet[8..40]);
    Some(Fragment {
        key: Key { addresses, identification: u32::from_be_bytes(extension[4..8].try_into().ok()?) },
        offset: usize::from(field & 0xfff8),
        more: field & 1 != 0,
        header,
        payload: &packet[IPV6_LEN + 8..total],
    })
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::sample::{self, Checksum};
    use proptest::prelude::*;

    /// Cuts a packet into fragments of `size` payload bytes.
    fn cut(packet: &[u8], size: usize) -> Vec<Vec<u8>> {
        let v4 = packet[0] >> 4 == 4;
        let (header, payload) = packet.split_at(if v4 { 20 } else { 40 });
        let count = payload.len().div_ceil(size);
        let one = |(index, part): (usize, &[u8])| {
            let (offset, more) = ((index * size / 8) as u16, u16::from(index + 1 < count));
            let mut fragment = header.to_vec();
            if v4 {
                fragment[2..4].copy_from_slice(&((20 + part.len()) as u16).to_be_bytes());
                fragment[6..8].copy_from_slice(&(offset | more << 13).to_be_bytes());
            } else {
                fragment[4..6].copy_from_slice(&((8 + part.len()) as u16).to_be_bytes());
                fragment[6] = FRAGMENT;
                fragment.extend([header[6], 0]);
                fragment.extend((offset << 3 | more).to_be_bytes());
                fragment.extend([0xab; 4]);
            }
            fragment.extend(part);
            fragment
        };
        payload.chunks(size).enumerate().map(one).collect()
    }

    fn packet(v4: bool, len: usize) -> Vec<u8> {
        let tuple = if v4 { sample::tuple4(UDP) } else { sample::tuple6(UDP) };
        let mut packet = sample::packet(tuple, 0, &vec![9; len], Checksum::Complete);
        if v4 {
            // A packet that may be fragmented.
            packet[6] = 0;
            packet[10..12].fill(0);
            let checksum = !fold(sum(&packet[..20]));
            packet[10..12].copy_from_slice(&checksum.to_be_bytes());
        }
        packet
    }

    #[test]
    fn overlap_is_refused_and_a_copy_is_not() {
        let fragments = cut(&packet(true, 100), 64);
        let mut reassembler = Reassembler::default();
        assert_eq!(reassembler.accept(&fragments[0], Instant::ZERO), Ok(None));
        assert_eq!(reassembler.accept(&fragments[0], Instant::ZERO), Ok(None));
        let mut other = fragments[0].clone();
        other[60] ^= 1;
        assert_eq!(reassembler.accept(&other, Instant::ZERO), Err(DropReason::Malformed));
        assert_eq!((reassembler.bytes, reassembler.datagrams.len()), (0, 0));
    }

    #[test]
    fn parts_of_two_packets_with_one_identification_are_no_packet() {
        for v4 in [true, false] {
            let one = packet(v4, 100);
            let mut other = one.clone();
            *other.last_mut().expect("it has bytes") ^= 1;
            let mut reassembler = Reassembler::default();
            // The first fragment of the other one was lost on the way.
            assert_eq!(reassembler.accept(&cut(&other, 64)[1], Instant::ZERO), Ok(None));
            assert_eq!(reassembler.accept(&cut(&one, 64)[0], Instant::ZERO), Err(DropReason::Incomplete));
            assert_eq!(reassembler.accept(&cut(&one, 64)[1], Instant::ZERO), Ok(None), "and nothing of both stays");
        }
    }

    #[test]
    fn bounds_hold() {
        let mut reassembler = Reassembler::default();
        for identification in 0..200u16 {
            let mut first = cut(&packet(true, 60_000), 59_000)[0].clone();
            first[4..6].copy_from_slice(&identification.to_be_bytes());
            assert_eq!(reassembler.accept(&first, Instant::ZERO), Ok(None));
            assert!(reassembler.bytes <= BYTES_MAX && reassembler.datagrams.len() <= DATAGRAMS_MAX);
        }
        let late = Instant::from_millis(10_001);
        let last = &cut(&packet(false, 100), 64)[1];
        assert_eq!(reassembler.accept(last, late), Ok(None));
        assert_eq!(reassembler.datagrams.len(), 1);
        assert_eq!(reassembler.take_incomplete(), 200);
    }

    proptest! {
        #[test]
        fn any_order_gives_the_packet(
            v4: bool,
            len in 1usize..4000,
            size in 1usize..40,
            order in any::<prop::sample::Index>(),
            twice: bool,
        ) {
            let original = packet(v4, len);
            let mut fragments = cut(&original, size * 40);
            let count = fragments.len();
            fragments.rotate_left(order.index(count));
            if twice {
                let first = fragments[0].clone();
                fragments.insert(count / 2, first);
            }
            let mut reassembler = Reassembler::default();
            let mut whole = Vec::new();
            for fragment in &fragments {
                whole.extend(reassembler.accept(fragment, Instant::ZERO).expect("well-formed"));
            }
            prop_assert_eq!(&whole[0], &original);
            sample::see(&whole[0]);
        }

        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 1..120), v6: bool) {
            let mut bytes = bytes;
            bytes[0] = if v6 { 0x60 } else { 0x40 | bytes[0] & 0x0f };
            let mut reassembler = Reassembler::default();
            let _ = reassembler.accept(&bytes, Instant::ZERO);
        }
    }
}
