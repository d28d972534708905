//! Tests of whole journeys: a packet is cut into a train, the train is dropped, doubled, mixed up and split over
//! receives, and what the other end writes must be right packets, which smoltcp judges.

use margay_core::Tuple;
use margay_core::entry::PathId;
use std::io::IoSlice;
use std::sync::Arc;

use margay_core::delta::{Clock, Delta};
use margay_core::time::Instant;
use margay_core::{Cipher, DropReason, Stack};
use margay_wire::{
    DATA_HEADER_LEN, DataRepr, FlowId, GsoKind, SEAL_TAG_LEN, STACK_FEC, STACK_SCTP, TRAIN_HEADER_LEN, TrainRepr,
};
use proptest::prelude::*;

use crate::offload;
use crate::outbox::{self, Outbox};
use crate::packet::{self, ACK, CWR, FIN, FlowKey, PSH, Packet, TCP, UDP};
use crate::sample::{self, Checksum, Seen};
use crate::seal::Seal;
use crate::table::{Destination, EgressRoute, Recipient};
use crate::train::{Assembler, Delivered, Piece, Run, measure, open_run, pieces};
use crate::udp::{SEGMENTS_MAX, SEND_MAX};
use crate::vnet::{self, Gso, Vnet};

fn route(datagram_max: u16, packet_number: u32) -> EgressRoute {
    let remote = "10.0.0.2:54324".parse().expect("literal");
    let to = Destination { path: PathId(1), remote, local: None, datagram_max, is_void: false };
    EgressRoute {
        flow: FlowId(1),
        peer_flow: FlowId(2),
        packet_number,
        to,
        is_beside: false,
        wants_pinhole: false,
        takes_end: false,
        seal: None,
        fec: None,
        sctp: None,
        silence: None,
        stripe: None,
        delta: None,
    }
}

/// How the kernel would describe the packet; `segment` is zero for one that is not to be cut.
fn described(packet: &[u8], segment: u16, partial: bool) -> Vnet {
    let v4 = packet[0] >> 4 == 4;
    let protocol = if v4 { packet[9] } else { packet[6] };
    Vnet {
        partial_checksum: partial,
        gso: match (segment, protocol) {
            (0, _) => Gso::None,
            (_, TCP) if v4 => Gso::Tcp4,
            (_, TCP) => Gso::Tcp6,
            _ => Gso::Udp,
        },
        segment_size: segment,
        checksum_start: if !partial {
            0
        } else if v4 {
            20
        } else {
            40
        },
        checksum_offset: if !partial {
            0
        } else if protocol == TCP {
            16
        } else {
            6
        },
        ..Vnet::default()
    }
}

/// Cuts packets as T1 does; gives the datagrams of every send.
fn cut(packets: &[(Vec<u8>, Vnet)], expected: u16, datagram_max: u16) -> Vec<Vec<u8>> {
    cut_and_seal(packets, expected, datagram_max, None)
}

fn cut_and_seal(
    packets: &[(Vec<u8>, Vnet)],
    expected: u16,
    datagram_max: u16,
    seal: Option<Arc<Seal>>,
) -> Vec<Vec<u8>> {
    let mut outbox = Outbox::new(expected);
    let mut datagrams = Vec::new();
    let mut send = |bytes: &[u8], segment: usize, to: &Destination| {
        assert!(bytes.len() <= SEND_MAX && bytes.len().div_ceil(segment) <= SEGMENTS_MAX);
        assert!(segment <= usize::from(to.datagram_max));
        datagrams.extend(bytes.chunks(segment).map(<[u8]>::to_vec));
    };
    for (number, (packet, vnet)) in packets.iter().enumerate() {
        let loaded = outbox.load(*vnet, packet).expect("short enough");
        let Ok(Packet::Transport(found)) = packet::parse(outbox.head(&loaded), loaded.len) else { panic!("parse") };
        assert_eq!(outbox.whole(&loaded), packet);
        let train = outbox::train_header(vnet, &found).expect("consistent");
        let route = EgressRoute { seal: seal.clone(), ..route(datagram_max, number as u32) };
        outbox.carry(&loaded, &train, &route, &mut send).expect("sealed");
    }
    outbox.flush(&mut send);
    datagrams
}

/// Gives datagrams to an assembler in receives of at most `batch` datagrams of one size, as UDP GRO joins them.
fn receive(datagrams: &[Vec<u8>], batch: usize, to: &FlowKey) -> (Vec<Vec<u8>>, Vec<Result<Delivered, DropReason>>) {
    receive_and_open(datagrams, batch, to, None)
}

fn receive_and_open(
    datagrams: &[Vec<u8>],
    batch: usize,
    to: &FlowKey,
    seal: Option<&Seal>,
) -> (Vec<Vec<u8>>, Vec<Result<Delivered, DropReason>>) {
    let (mut assembler, mut written, mut results) = (Assembler::default(), Vec::new(), Vec::new());
    let mut rest = datagrams;
    while let Some(first) = rest.first() {
        let mut count = 1;
        while count < batch.min(rest.len()) && rest[count].len() <= first.len() {
            count += 1;
            if rest[count - 1].len() < first.len() {
                break;
            }
        }
        let mut received = rest[..count].concat();
        let mut accept = |run: &Run<'_>| {
            let write = |parts: &[IoSlice<'_>]| {
                written.push(parts.iter().flat_map(|part| part.to_vec()).collect::<Vec<u8>>());
                Ok(())
            };
            assembler.accept(run, &(*to).into(), || Instant::ZERO, write)
        };
        let mut at = 0;
        while at < received.len() {
            let (header, len) = measure(&received[at..], first.len());
            let run = &mut received[at..at + len];
            match (header, seal) {
                (None, _) => results.push(Err(DropReason::Malformed)),
                (Some(header), None) => results.push(accept(&Run::new(header, run, first.len()))),
                (Some(header), Some(seal)) => open_run(seal, header, (run, first.len()), |opened| {
                    results.push(opened.and_then(|run| accept(&run)));
                }),
            }
            at += len;
        }
        rest = &rest[count..];
    }
    (written, results)
}

/// Judges a written packet: completes its checksum as the kernel would, and lets smoltcp look.
fn judge(written: &[u8]) -> (Vnet, Seen) {
    let (header, packet) = written.split_at(vnet::LEN);
    let vnet = Vnet::parse(header.try_into().expect("its length")).expect("known kind");
    let mut packet = packet.to_vec();
    if vnet.partial_checksum {
        assert!(offload::complete(&vnet, &mut packet));
    } else {
        assert_eq!(vnet.gso, Gso::None);
    }
    if vnet.gso != Gso::None {
        assert!(vnet.segment_size > 0 && usize::from(vnet.header_len) < packet.len());
    }
    (vnet, sample::see(&packet))
}

fn tuple(v4: bool, protocol: u8) -> Tuple {
    if v4 { sample::tuple4(protocol) } else { sample::tuple6(protocol) }
}

fn numbered(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251) as u8 ^ (at >> 8) as u8).collect()
}

/// The sequence number of the samples.
const START: u32 = 0xffff_f000;

#[test]
fn literal_single_chunk() {
    let packet = sample::packet(sample::tuple4(UDP), 0, b"hi", Checksum::Complete);
    let datagrams = cut(&[(packet.clone(), described(&packet, 0, false))], 1472, 1472);
    let header = [1, 32, 2, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1];
    let train = [0, 0, 0, 0, 0, 0, 0, 30];
    assert_eq!(datagrams, [[&header[..], &train, &packet].concat()]);
}

#[test]
fn datagrams_with_an_absent_checksum_get_one_only_in_ipv6() {
    let packet = sample::packet(sample::tuple4(UDP), 0, b"odd", Checksum::Absent);
    let datagrams = cut(&[(packet.clone(), described(&packet, 0, false))], 1472, 1472);
    let to = tuple(true, UDP).reversed();
    let (written, _) = receive(&datagrams, 1, &to.into());
    assert_eq!(written[0][vnet::LEN + 26..vnet::LEN + 28], [0, 0]);
    let to = tuple(false, UDP).reversed();
    let (written, _) = receive(&datagrams, 1, &to.into());
    assert_eq!(judge(&written[0]).1.payload, b"odd");
}

#[test]
fn small_packets_to_one_place_share_a_send() {
    let packets: Vec<_> = [10, 10, 10, 4, 10, 11]
        .map(|len| {
            let packet = sample::packet(sample::tuple4(UDP), 0, &vec![1; len], Checksum::Complete);
            (packet.clone(), described(&packet, 0, false))
        })
        .to_vec();
    let mut outbox = Outbox::new(1472);
    let mut sends = Vec::new();
    let mut send = |bytes: &[u8], segment: usize, _: &Destination| sends.push((bytes.len(), segment));
    for (packet, vnet) in &packets {
        let loaded = outbox.load(*vnet, packet).expect("short");
        let Ok(Packet::Transport(found)) = packet::parse(outbox.head(&loaded), loaded.len) else { panic!("parse") };
        let train = outbox::train_header(vnet, &found).expect("consistent");
        outbox.carry(&loaded, &train, &route(1472, 0), &mut send).expect("carried");
    }
    outbox.flush(&mut send);
    // 62 = 16 + 8 + 28 + 10.
    assert_eq!(sends, [(62 * 3 + 56, 62), (62, 62), (63, 63)]);
}

#[test]
fn a_lost_chunk_leaves_the_rest_of_a_tcp_train() {
    let payload = numbered(10_000);
    let packet = sample::packet(sample::tuple4(TCP), FIN | PSH | ACK | CWR, &payload, Checksum::Partial);
    let mut datagrams = cut(&[(packet.clone(), described(&packet, 1400, true))], 1472, 1472);
    datagrams.remove(3);
    let (written, _) = receive(&datagrams, 64, &tuple(false, TCP).reversed().into());
    let shape: Vec<_> = written
        .iter()
        .map(|packet| {
            let (vnet, seen) = judge(packet);
            (vnet.gso, vnet.ecn, seen.sequence.wrapping_sub(START), seen.flags, seen.payload.len())
        })
        .collect();
    // Chunk 0 holds 1456 bytes less the train header (8) and 52 of headers; chunk 4 begins at 4 * 1456 - 60.
    let expected = [(Gso::Tcp6, true, 0, CWR | ACK, 4308), (Gso::Tcp6, false, 5764, FIN | PSH | ACK, 4236)];
    assert_eq!(shape, expected);
}

/// One end translates what goes, the other what comes; a part of a train has the numbers of its first byte.
#[test]
fn numbers_are_translated_where_a_flow_has_a_delta() {
    let delta = Delta { peer: 0x1000, own: 0x2000, peer_clock: Clock::Fixed(77), ..Delta::ZERO };
    let both = delta.translations().expect("its clocks are fixed");
    let payload = numbered(10_000);
    for checksum in [Checksum::Partial, Checksum::Complete] {
        let is_partial = checksum == Checksum::Partial;
        let packet = sample::packet(sample::tuple4(TCP), ACK, &payload, checksum);
        let vnet = described(&packet, if is_partial { 1400 } else { 0 }, is_partial);
        let mut outbox = Outbox::new(1472);
        let loaded = outbox.load(vnet, &packet).expect("short enough");
        let Ok(Packet::Transport(found)) = packet::parse(outbox.head(&loaded), loaded.len) else { panic!("parse") };
        outbox.translate(&loaded, &both.egress);
        let mut datagrams = Vec::new();
        let mut send = |bytes: &[u8], segment: usize, _: &Destination| {
            datagrams.extend(bytes.chunks(segment).map(<[u8]>::to_vec));
        };
        let train = outbox::train_header(&vnet, &found).expect("consistent");
        outbox.carry(&loaded, &train, &route(1472, 0), &mut send).expect("carried");
        if is_partial {
            datagrams.remove(3);
        }
        let to = Recipient { key: tuple(false, TCP).reversed().into(), delta: Some(both.ingress) };
        let mut assembler = Assembler::default();
        let mut written = Vec::new();
        let mut last = None;
        for datagram in &datagrams {
            let header = DataRepr::parse(datagram).expect("DATA");
            let write = |parts: &[IoSlice<'_>]| {
                written.push(parts.iter().flat_map(|part| part.to_vec()).collect::<Vec<u8>>());
                Ok(())
            };
            let run = Run::single(header, datagram);
            let delivered = assembler.accept(&run, &to, || Instant::ZERO, write).expect("accepted");
            last = delivered.numbers.or(last);
        }
        // To the wire this end's own, 0x2000, is taken off; from there the peer's, 0x1000, is added.
        let start = START.wrapping_sub(0x1000);
        let numbers = last.expect("segments came");
        assert_eq!((numbers.sequence, numbers.acknowledgement), (start.wrapping_add(10_000), 0x0102_0304 + 0x1000));
        let seen: Vec<_> = written.iter().map(|packet| judge(packet).1).collect();
        assert!(seen.len() > usize::from(is_partial));
        for seen in seen {
            let at = seen.sequence.wrapping_sub(start) as usize;
            assert_eq!(seen.payload[..], payload[at..at + seen.payload.len()]);
        }
    }
}

#[test]
fn a_train_too_large_for_its_path_is_cut_anew() {
    let payload = numbered(20_000);
    let packet = sample::packet(sample::tuple6(TCP), ACK, &payload, Checksum::Partial);
    let datagrams = cut(&[(packet.clone(), described(&packet, 1400, true))], 1472, 1472);
    let again: Vec<_> = outbox::recut(&datagrams.concat(), 1472, 1252)
        .into_iter()
        .flat_map(|(bytes, stride)| bytes.chunks(stride).map(<[u8]>::to_vec).collect::<Vec<_>>())
        .collect();
    assert!(again.iter().all(|datagram| datagram.len() <= 1252) && again.len() > datagrams.len());
    let (written, _) = receive(&again, 64, &tuple(false, TCP).reversed().into());
    assert_eq!(written.len(), 1);
    assert_eq!(judge(&written[0]).1.payload, payload);
}

#[test]
fn an_ipv6_packet_too_long_for_ipv4_is_split_only_if_it_is_tcp() {
    for (protocol, parts, len) in [(TCP, 2, 65_500), (UDP, 0, 65_520)] {
        let payload = numbered(len);
        let packet = sample::packet(tuple(false, protocol), 0, &payload, Checksum::Partial);
        let segment = if protocol == TCP { 1400 } else { 0 };
        let datagrams = cut(&[(packet.clone(), described(&packet, segment, true))], 1472, 1472);
        let (written, _) = receive(&datagrams, 64, &tuple(true, protocol).reversed().into());
        assert_eq!(written.len(), parts, "protocol {protocol}");
        let bytes: Vec<u8> = written.iter().flat_map(|packet| judge(packet).1.payload).collect();
        assert!(parts == 0 || bytes == payload);
    }
}

/// Chunks of a train as a stack of datagrams delivers them.
fn delivered_by(stack: Stack, datagrams: &[Vec<u8>]) -> Vec<(DataRepr, Vec<u8>, Stack)> {
    let number = if stack.repairs() { STACK_FEC } else { STACK_SCTP };
    let parsed = datagrams.iter().map(|datagram| (DataRepr::parse(datagram).expect("DATA"), datagram.clone()));
    parsed.map(|(header, datagram)| (DataRepr { stack: number, ..header }, datagram, stack)).collect()
}

/// A flow turns from `sctp` to `secure-sctp`, or from `fec` to `secure-fec`: both deliver chunks with the same numbers.
#[test]
fn authenticated_chunks_are_never_mixed_with_replaced_or_displaced_by_others() {
    let payload = numbered(5000);
    let packet = sample::packet(sample::tuple4(UDP), 0, &payload, Checksum::Complete);
    let datagrams = cut(&[(packet.clone(), described(&packet, 0, false))], 1472, 1472);
    let mut forged = datagrams.clone();
    forged.iter_mut().skip(1).for_each(|datagram| datagram[DATA_HEADER_LEN..].fill(0xee));
    let to = Recipient { key: tuple(true, UDP).reversed().into(), delta: None };
    for (plain, secure) in [(Stack::Sctp, Stack::SecureSctp), (Stack::Fec, Stack::SecureFec)] {
        let mut assembler = Assembler::default();
        let mut accept = |(header, datagram, stack): &(DataRepr, Vec<u8>, Stack)| {
            let mut written = Vec::new();
            let write = |parts: &[IoSlice<'_>]| {
                written.push(parts.iter().flat_map(|part| part.to_vec()).collect::<Vec<u8>>());
                Ok(())
            };
            let run = Run::delivered(*header, datagram, *stack);
            assembler.accept(&run, &to, || Instant::ZERO, write).expect("accepted");
            written
        };
        let (own, others) = (delivered_by(secure, &datagrams), delivered_by(plain, &forged));
        assert!(accept(&others[2]).is_empty() && accept(&own[0]).is_empty() && accept(&others[1]).is_empty());
        // As many trains that are never whole as may wait.
        for number in 1000..1200 {
            let (header, datagram, stack) = &others[1];
            accept(&(DataRepr { packet_number: number, ..*header }, datagram.clone(), *stack));
        }
        let written: Vec<Vec<u8>> = own[1..].iter().flat_map(&mut accept).collect();
        assert_eq!(written.len(), 1);
        assert_eq!(judge(&written[0]).1.payload, payload);
    }
}

#[test]
fn every_chunk_of_an_unsplittable_train_is_waited_for() {
    let packet = sample::packet(sample::tuple4(UDP), 0, &numbered(5000), Checksum::Complete);
    let mut datagrams = cut(&[(packet.clone(), described(&packet, 0, false))], 1472, 1472);
    datagrams.reverse();
    let to = tuple(true, UDP).reversed();
    let (written, _) = receive(&datagrams[..3], 1, &to.into());
    assert!(written.is_empty());
    let (written, _) = receive(&datagrams, 1, &to.into());
    assert_eq!(judge(&written[0]).1.payload, numbered(5000));
}

#[test]
fn chunks_of_two_trains_with_one_number_are_not_joined() {
    // An agent that has started again counts anew; its peer may still wait for the rest of a train.
    let train = |payload: &[u8], sequence: u32| {
        let mut packet = sample::packet(sample::tuple4(TCP), ACK, payload, Checksum::Partial);
        packet[24..28].copy_from_slice(&sequence.to_be_bytes());
        cut(&[(packet.clone(), described(&packet, 1400, true))], 1472, 1472)
    };
    let (older, newer) = (train(&[1; 10_000], START), train(&numbered(10_000), START.wrapping_add(10_000)));
    let count = older.len();
    // The older one's end alone came; or all of it but the end.
    for lost in [0..count - 1, count - 1..count] {
        let (mut assembler, mut bytes) = (Assembler::default(), vec![0; 20_000]);
        let mut give = |datagram: &[u8], ms: u64| {
            let write = |parts: &[IoSlice<'_>]| {
                let (_, seen) = judge(&parts.iter().flat_map(|part| part.to_vec()).collect::<Vec<u8>>());
                let at = seen.sequence.wrapping_sub(START) as usize;
                bytes[at..at + seen.payload.len()].copy_from_slice(&seen.payload);
                Ok(())
            };
            let header = DataRepr::parse(datagram).expect("DATA");
            let run = Run::single(header, datagram);
            assembler.accept(
                &run,
                &FlowKey::from(tuple(true, TCP).reversed()).into(),
                || Instant::from_millis(ms),
                write,
            )
        };
        for (_, datagram) in older.iter().enumerate().filter(|(at, _)| !lost.contains(at)) {
            give(datagram, 0).expect("accepted");
        }
        for datagram in &newer {
            give(datagram, 300).expect("accepted");
        }
        assert!(bytes[10_000..] == numbered(10_000), "lost of the older one: {lost:?}");
        assert!(bytes[..10_000].iter().all(|byte| *byte < 2), "lost of the older one: {lost:?}");
    }
}

/// One way in which a train may be sent.
#[derive(Clone, Debug)]
struct Case {
    from_v4: bool,
    to_v4: bool,
    protocol: u8,
    len: usize,
    segment: u16,
    expected: u16,
    datagram_max: u16,
    batch: usize,
    cipher: Option<Cipher>,
}

fn case() -> impl Strategy<Value = Case> {
    let size = || prop_oneof![Just(548u16), Just(1232), Just(1472), Just(8972), Just(65_000)];
    let len = prop_oneof![0usize..3000, 0usize..64_000];
    let segment = prop_oneof![Just(0u16), 500u16..1500];
    let protocol = prop_oneof![Just(TCP), Just(UDP)];
    let families = (any::<bool>(), any::<bool>());
    let cipher = prop_oneof![Just(None), Just(Some(Cipher::Aes256Gcm)), Just(Some(Cipher::ChaCha20Poly1305))];
    (families, protocol, len, segment, size(), size(), 1usize..70, cipher).prop_map(
        |((from_v4, to_v4), protocol, len, segment, expected, datagram_max, batch, cipher)| {
            let segment = if usize::from(segment) < len { segment } else { 0 };
            Case { from_v4, to_v4, protocol, len, segment, expected, datagram_max, batch, cipher }
        },
    )
}

impl Case {
    fn datagrams(&self, checksum: Checksum) -> Vec<Vec<u8>> {
        let flags = if self.protocol == TCP { FIN | PSH | ACK | CWR } else { 0 };
        let packet = sample::packet(tuple(self.from_v4, self.protocol), flags, &numbered(self.len), checksum);
        let vnet = described(&packet, self.segment, checksum == Checksum::Partial);
        let seal = self.cipher.map(|cipher| Arc::new(Seal::new(&sample::seal_keys(cipher))));
        cut_and_seal(&[(packet, vnet)], self.expected, self.datagram_max, seal)
    }

    /// As [`receive`].
    fn receive(&self, datagrams: &[Vec<u8>]) -> (Vec<Vec<u8>>, Vec<Result<Delivered, DropReason>>) {
        let seal = self.cipher.map(|cipher| Seal::new(&sample::peer_seal_keys(cipher)));
        receive_and_open(datagrams, self.batch, &self.to().into(), seal.as_ref())
    }

    /// Bytes of a chunk beside its payload.
    fn overhead(&self) -> usize {
        DATA_HEADER_LEN + if self.cipher.is_some() { SEAL_TAG_LEN } else { 0 }
    }

    fn to(&self) -> Tuple {
        tuple(self.to_v4, self.protocol).reversed()
    }
}

proptest! {
    #[test]
    fn nothing_lost(case in case(), complete: bool) {
        let checksum = if complete && case.segment == 0 { Checksum::Complete } else { Checksum::Partial };
        let (written, results) = case.receive(&case.datagrams(checksum));
        prop_assert!(results.iter().all(Result::is_ok), "{results:?}");
        let mut payload = Vec::new();
        for (at, packet) in written.iter().enumerate() {
            let (vnet, seen) = judge(packet);
            prop_assert_eq!(seen.tuple, case.to());
            prop_assert_eq!((seen.traffic_class, seen.hop_limit), (0x0a, 63));
            if case.protocol == TCP {
                prop_assert_eq!(seen.sequence, START.wrapping_add(payload.len() as u32));
                let last = at + 1 == written.len();
                prop_assert_eq!(seen.flags & (FIN | PSH) == FIN | PSH, last);
                prop_assert_eq!(seen.flags & CWR != 0, at == 0);
            }
            let cut = case.segment > 0 && seen.payload.len() > usize::from(case.segment);
            prop_assert_eq!(vnet.segment_size, if cut { case.segment } else { 0 });
            payload.extend(seen.payload);
        }
        prop_assert_eq!(payload, numbered(case.len));
        let delivered: usize = results.iter().flatten().map(|delivered| delivered.bytes).sum();
        prop_assert_eq!(delivered, case.len);
    }

    #[test]
    fn lost_doubled_and_mixed_up(
        case in case(),
        fates in proptest::collection::vec((0u8..8, 0usize..12), 150),
    ) {
        let datagrams = case.datagrams(Checksum::Partial);
        // Fate 0 loses a chunk, 1 doubles it; the number moves it back by so many places.
        let mut arriving: Vec<(usize, &Vec<u8>)> = Vec::new();
        for ((at, datagram), (fate, late)) in datagrams.iter().enumerate().zip(fates.iter().cycle()) {
            let copies = match fate { 0 => 0, 1 => 2, _ => 1 };
            let late = if *fate == 2 { *late } else { 0 };
            arriving.extend((0..copies).map(|copy| (at + late + copy, datagram)));
        }
        arriving.sort_by_key(|(at, _)| *at);
        let arriving: Vec<Vec<u8>> = arriving.into_iter().map(|(_, datagram)| datagram.clone()).collect();
        let (written, _) = case.receive(&arriving);
        let original = numbered(case.len);
        let mut given = vec![0u8; case.len];
        let segment = usize::from(case.segment);
        for packet in &written {
            let (_, seen) = judge(packet);
            let at = if case.protocol == TCP {
                seen.sequence.wrapping_sub(START) as usize
            } else {
                // Datagrams have no numbers: find where these bytes belong.
                let unit = segment.max(1);
                let starts = (0..=case.len).step_by(if segment > 0 { unit } else { case.len.max(1) });
                let mut fitting = starts.filter(|&at| original[at..].starts_with(&seen.payload));
                fitting.next().expect("whole datagrams of the original")
            };
            prop_assert!(original[at..].starts_with(&seen.payload));
            given[at..at + seen.payload.len()].iter_mut().for_each(|count| *count += 1);
        }
        if case.protocol == TCP && datagrams.len() > 1 {
            // With the first chunk, every byte that came is given on, again only when the whole train came twice;
            // without it, none.
            let first_came = arriving.iter().any(|datagram| datagram[12..14] == [0, 0]);
            let overhead = TRAIN_HEADER_LEN + if case.from_v4 { 52 } else { 72 };
            let chunk = datagrams[0].len() - case.overhead();
            let mut came = vec![0u8; case.len];
            for datagram in arriving.iter().filter(|_| first_came) {
                let header = DataRepr::parse(datagram).expect("ours");
                let begin = usize::from(header.index) * chunk;
                let end = begin + datagram.len() - case.overhead();
                came[begin.saturating_sub(overhead)..end.saturating_sub(overhead)].fill(1);
            }
            let wrong = (0..case.len).find(|&at| (given[at] > 0) != (came[at] > 0));
            prop_assert_eq!(wrong, None);
        }
    }

    #[test]
    fn several_flows_in_one_receive(lens in proptest::collection::vec(0usize..4000, 1..20), batch in 1usize..70) {
        let packets: Vec<_> = lens
            .iter()
            .map(|&len| {
                let packet = sample::packet(sample::tuple6(TCP), ACK, &numbered(len), Checksum::Partial);
                let vnet = described(&packet, if len > 1400 { 1400 } else { 0 }, true);
                (packet, vnet)
            })
            .collect();
        let datagrams = cut(&packets, 1472, 1472);
        let (written, results) = receive(&datagrams, batch, &tuple(true, TCP).reversed().into());
        prop_assert!(results.iter().all(Result::is_ok));
        let total: usize = written.iter().map(|packet| judge(packet).1.payload.len()).sum();
        prop_assert_eq!(total, lens.iter().sum::<usize>());
        if batch > 1 {
            prop_assert!(written.len() <= datagrams.len());
        }
    }

    #[test]
    fn strangers_never_panic(
        bytes in proptest::collection::vec(any::<u8>(), 0..300),
        damage in proptest::collection::vec((0usize..200, any::<u8>()), 0..6),
        stride in 1usize..200,
        case in case(),
    ) {
        let to = FlowKey::from(case.to()).into();
        let mut assembler = Assembler::default();
        let mut take = |received: &[u8], stride: usize| {
            for piece in pieces(received, stride) {
                if let Piece::Run(run) = piece {
                    let _ = assembler.accept(&run, &to, || Instant::ZERO, |_| Ok(()));
                }
            }
        };
        take(&bytes, stride);
        let mut datagrams = case.datagrams(Checksum::Partial);
        for (at, value) in damage {
            let datagram = &mut datagrams[at % 3 % case.datagrams(Checksum::Partial).len()];
            let at = at % datagram.len();
            datagram[at] = value;
        }
        for datagram in &datagrams {
            take(datagram, datagram.len());
        }
        let size = datagrams[0].len();
        take(&datagrams.concat(), size);
        let _ = case.receive(&datagrams);
        let _ = case.receive(&[bytes]);
    }
}

#[test]
fn hostile_trains_are_refused() {
    let packet = sample::packet(sample::tuple4(TCP), ACK, &numbered(100), Checksum::Complete);
    let good = &cut(&[(packet.clone(), described(&packet, 0, false))], 1472, 1472)[0];
    let to = tuple(true, TCP).reversed();
    let accept = |datagram: &[u8]| receive(&[datagram.to_vec()], 1, &to.into()).1[0];
    assert!(accept(good).is_ok());
    let changed = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut datagram = good.clone();
        change(&mut datagram);
        accept(&datagram)
    };
    let train = |train: TrainRepr| move |datagram: &mut Vec<u8>| train.emit(&mut datagram[16..]);
    let right = TrainRepr { gso: GsoKind::None, partial_checksum: false, segment_size: 0, inner_len: 152 };
    assert!(changed(&train(right)).is_ok());
    let wrong = Err(DropReason::Malformed);
    assert_eq!(changed(&train(TrainRepr { inner_len: 151, ..right })), wrong);
    assert_eq!(changed(&train(TrainRepr { inner_len: u32::MAX, ..right })), wrong);
    assert_eq!(
        changed(&train(TrainRepr { gso: GsoKind::Udp, partial_checksum: true, segment_size: 9, ..right })),
        wrong
    );
    assert_eq!(changed(&train(TrainRepr { gso: GsoKind::Tcp, segment_size: 9, ..right })), wrong);
    assert_eq!(changed(&|datagram| datagram[13] = 1), wrong, "index beyond count");
    assert_eq!(changed(&|datagram| datagram[15] = 0), wrong, "no chunks");
    assert_eq!(changed(&|datagram| datagram[14] = 2), wrong, "too many chunks");
    assert_eq!(changed(&|datagram| datagram[2] = 3), Err(DropReason::Protocol), "another stack");
    assert_eq!(changed(&|datagram| datagram[24 + 9] = UDP), wrong, "another protocol");
    assert_eq!(changed(&|datagram| datagram.truncate(60)), wrong);
}

#[test]
fn chunks_that_have_come_are_left_out_of_a_run_and_the_rest_is_as_it_was() {
    let stride = DATA_HEADER_LEN + 10;
    let header = DataRepr { stack: 2, flags: 0, dst_flow: FlowId(2), packet_number: 7, index: 3, count: 9 };
    let mut received = vec![0; stride * 5 - 4];
    for (at, chunk) in (3..).zip(received.chunks_mut(stride)) {
        DataRepr { index: at, ..header }.emit(chunk);
        chunk[DATA_HEADER_LEN..].fill(at as u8);
    }
    let Some(Piece::Run(run)) = pieces(&received, stride).next() else { panic!("one run") };
    let left = |wanted: &[u16]| {
        let runs = run.filtered(|index| wanted.contains(&index));
        runs.map(|run| (run.header.index, run.datagrams().map(<[u8]>::len).collect::<Vec<_>>())).collect::<Vec<_>>()
    };
    assert_eq!(left(&[3, 4, 5, 6, 7]), [(3, vec![26, 26, 26, 26, 22])]);
    assert_eq!(left(&[3, 4, 6, 7]), [(3, vec![26, 26]), (6, vec![26, 22])]);
    assert_eq!(left(&[5]), [(5, vec![26])]);
    assert_eq!(left(&[7]), [(7, vec![22])]);
    assert_eq!(left(&[]), []);
}
