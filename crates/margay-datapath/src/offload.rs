//! In software what an interface with offloads leaves undone: for packets that leave the fast path, so that the core
//! sees packets as they would be on a wire.

use margay_core::DropReason;
use margay_wire::TrainRepr;

use crate::checksum::{fold, sum};
use crate::packet::{FlowKey, TCP};
use crate::template::{Headers, Template};
use crate::vnet::{self, Vnet};

/// Fills in a checksum that was left partial. False when the packet is too short for what its header says.
#[must_use]
pub fn complete(vnet: &Vnet, packet: &mut [u8]) -> bool {
    let start = usize::from(vnet.checksum_start);
    let at = start + usize::from(vnet.checksum_offset);
    if at + 2 > packet.len() {
        return false;
    }
    let value = match !fold(sum(&packet[start..])) {
        0 => 0xffff,
        value => value,
    };
    packet[at..at + 2].copy_from_slice(&value.to_be_bytes());
    true
}

/// Cuts a super-packet with five-tuple `key` into the packets that it stands for, with complete checksums.
pub fn segments(train: &TrainRepr, key: &FlowKey, packet: &[u8]) -> Result<Vec<Vec<u8>>, DropReason> {
    let template = Template::parse(train, packet)?;
    let payload = &packet[template.header_len()..];
    let size = usize::from(train.segment_size).max(1);
    let one = |(index, bytes): (usize, &[u8])| {
        let mut headers: Headers = [0; size_of::<Headers>()];
        let start = index * size;
        let written = template.write(key, start..start + bytes.len(), None, &mut headers);
        let mut segment = headers[vnet::LEN..written.len].to_vec();
        segment.extend(bytes);
        let vnet = Vnet {
            partial_checksum: true,
            checksum_start: if key.is_v4() { 20 } else { 40 },
            checksum_offset: if key.protocol == TCP { 16 } else { 6 },
            ..Vnet::default()
        };
        complete(&vnet, &mut segment).then_some(segment).ok_or(DropReason::Malformed)
    };
    payload.chunks(size).enumerate().map(one).collect()
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::packet::{ACK, CWR, FIN, PSH, UDP};
    use crate::sample::{self, Checksum};
    use margay_wire::GsoKind;

    fn train(gso: GsoKind, packet: &[u8]) -> TrainRepr {
        TrainRepr { gso, partial_checksum: true, segment_size: 1000, inner_len: packet.len() as u32 }
    }

    #[test]
    fn tcp_super_packet() {
        let payload: Vec<u8> = (0..2500u32).map(|at| at as u8).collect();
        let tuple = sample::tuple6(TCP);
        let packet = sample::packet(tuple, FIN | PSH | ACK | CWR, &payload, Checksum::Partial);
        let cut = segments(&train(GsoKind::Tcp, &packet), &tuple.into(), &packet).expect("well-formed");
        let seen: Vec<_> = cut.iter().map(|packet| sample::see(packet)).collect();
        let shape: Vec<_> = seen.iter().map(|packet| (packet.sequence, packet.flags, packet.payload.len())).collect();
        let start = 0xffff_f000_u32;
        let expected = [(start, ACK | CWR, 1000), (start + 1000, ACK, 1000), (start + 2000, ACK | FIN | PSH, 500)];
        assert_eq!(shape, expected);
        assert_eq!(seen.iter().flat_map(|packet| packet.payload.clone()).collect::<Vec<_>>(), payload);
    }

    #[test]
    fn udp_super_packet() {
        let tuple = sample::tuple4(UDP);
        let packet = sample::packet(tuple, 0, &[7; 1001], Checksum::Partial);
        let cut = segments(&train(GsoKind::Udp, &packet), &tuple.into(), &packet).expect("well-formed");
        let lengths: Vec<_> = cut.iter().map(|packet| sample::see(packet).payload.len()).collect();
        assert_eq!(lengths, [1000, 1]);
    }

    #[test]
    fn partial_becomes_complete() {
        let mut packet = sample::packet(sample::tuple4(UDP), 0, b"odd", Checksum::Partial);
        let vnet = Vnet { checksum_start: 20, checksum_offset: 6, ..Vnet::default() };
        assert!(complete(&vnet, &mut packet));
        assert_eq!(sample::see(&packet).payload, b"odd");
        assert!(!complete(&Vnet { checksum_start: 30, ..vnet }, &mut packet[..31]));
    }
}
