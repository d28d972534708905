use alloc::vec::Vec;
use core::time::Duration;

use proptest::prelude::*;

use super::*;

const ACK: u8 = 0x10;
const NOW: Instant = Instant::from_millis(1_000_000);

/// A segment: IP version, number, acknowledgement, flags, window, options (a multiple of four bytes), payload.
#[derive(Clone, Debug)]
struct Segment {
    is_v4: bool,
    numbers: (u32, u32),
    flags: u8,
    window: u16,
    options: Vec<u8>,
    payload: Vec<u8>,
}

impl Segment {
    fn plain(sequence: u32, acknowledgement: u32, options: &[u8]) -> Self {
        let numbers = (sequence, acknowledgement);
        Self { is_v4: true, numbers, flags: ACK, window: 512, options: options.to_vec(), payload: b"hello".to_vec() }
    }

    /// With a complete checksum.
    fn packet(&self) -> Vec<u8> {
        let mut tcp = alloc::vec![0; 20];
        tcp[0..4].copy_from_slice(&[0x9c, 0x40, 0, 80]);
        tcp[4..8].copy_from_slice(&self.numbers.0.to_be_bytes());
        tcp[8..12].copy_from_slice(&self.numbers.1.to_be_bytes());
        tcp[12] = (((20 + self.options.len()) / 4) << 4) as u8;
        tcp[13] = self.flags;
        tcp[14..16].copy_from_slice(&self.window.to_be_bytes());
        tcp.extend_from_slice(&self.options);
        tcp.extend_from_slice(&self.payload);
        let mut packet = if self.is_v4 {
            let mut ip = alloc::vec![0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 6, 0, 0, 198, 18, 0, 1, 198, 18, 1, 1];
            ip[2..4].copy_from_slice(&((20 + tcp.len()) as u16).to_be_bytes());
            ip
        } else {
            let mut ip = alloc::vec![0x60, 0, 0, 0, 0, 0, 6, 64];
            ip[4..6].copy_from_slice(&(tcp.len() as u16).to_be_bytes());
            ip.extend((0..32).map(|byte| byte * 7));
            ip
        };
        let start = packet.len();
        packet.extend_from_slice(&tcp);
        let check = !ones_sum(&packet);
        packet[start + 16..start + 18].copy_from_slice(&check.to_be_bytes());
        packet
    }
}

/// Sum over the pseudo-header and all of TCP.
fn ones_sum(packet: &[u8]) -> u16 {
    let (addresses, tcp) =
        if packet[0] >> 4 == 4 { (&packet[12..20], &packet[20..]) } else { (&packet[8..40], &packet[40..]) };
    let words = |bytes: &[u8]| -> u64 {
        bytes.chunks(2).map(|word| u64::from(word[0]) << 8 | u64::from(word.get(1).copied().unwrap_or(0))).sum()
    };
    let mut sum = words(addresses) + words(tcp) + 6 + tcp.len() as u64;
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

fn header(packet: &[u8]) -> &[u8] {
    &packet[if packet[0] >> 4 == 4 { 20 } else { 40 }..]
}

fn word(packet: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(header(packet)[at..at + 4].try_into().expect("four bytes"))
}

fn window(packet: &[u8]) -> u16 {
    u16::from_be_bytes(header(packet)[14..16].try_into().expect("two bytes"))
}

fn socket(unread: u32, written: u32) -> SocketFacts {
    SocketFacts { unread, written, timestamp: Some(5000), peer_scale: 7, own_scale: 7, has_sack: true }
}

/// NOP, NOP, timestamps, then NOP, NOP, selective acknowledgement of one block.
fn options(timestamp: u32, echo: u32, block: (u32, u32)) -> Vec<u8> {
    let mut bytes = alloc::vec![1, 1, 8, 10];
    bytes.extend_from_slice(&timestamp.to_be_bytes());
    bytes.extend_from_slice(&echo.to_be_bytes());
    bytes.extend_from_slice(&[1, 1, 5, 10]);
    bytes.extend_from_slice(&block.0.to_be_bytes());
    bytes.extend_from_slice(&block.1.to_be_bytes());
    bytes
}

#[test]
fn what_the_program_read_of_one_is_what_it_wrote_to_the_other() {
    let facts = SpliceFacts { left: socket(1000, 50_000), right: socket(90_000, 7000) };
    let mut delta = facts.delta(NOW);
    let mut packet = Segment::plain(1000, 50_000, &[]).packet();
    delta.apply_ingress(NOW, &mut packet, Checksum::Full);
    assert_eq!((word(&packet, 4), word(&packet, 8)), (7000, 90_000));
    let mut back = Segment::plain(90_000, 7000, &[]).packet();
    delta.apply_egress(NOW, &mut back, Checksum::Full);
    assert_eq!((word(&back, 4), word(&back, 8)), (50_000, 1000));
    assert_eq!((ones_sum(&packet), ones_sum(&back)), (0xffff, 0xffff));
}

#[test]
fn every_number_of_a_literal_packet_is_translated() {
    let mut delta = Delta { peer: 0x10, own: 0x100, peer_clock: Clock::Fixed(1000), ..Delta::ZERO };
    (delta.own_clock, delta.ingress_shift) = (Clock::Fixed(0x2000), -2);
    let mut packet = Segment::plain(1, 2, &options(3, 4, (5, 6))).packet();
    delta.apply_ingress(NOW, &mut packet, Checksum::Full);
    let seen: Vec<u32> = [4, 8, 24, 28, 36, 40].map(|at| word(&packet, at)).into();
    assert_eq!(seen, [0x11, 0x102, 1003, 0x2004, 0x105, 0x106]);
    assert_eq!((window(&packet), ones_sum(&packet)), (128, 0xffff));
}

#[test]
fn numbers_wrap() {
    let facts = SpliceFacts { left: socket(u32::MAX - 1, 3), right: socket(1, u32::MAX) };
    let mut delta = facts.delta(NOW);
    let mut packet = Segment::plain(u32::MAX, 3, &[]).packet();
    delta.apply_ingress(NOW, &mut packet, Checksum::Full);
    assert_eq!((word(&packet, 4), word(&packet, 8), ones_sum(&packet)), (0, 1, 0xffff));
}

#[test]
fn clocks_go_on_from_where_the_socket_that_has_left_showed_them() {
    let [mut left, mut right] = [socket(1, 1), socket(1, 1)];
    (left.timestamp, right.timestamp) = (Some(70_000), Some(u32::MAX - 4));
    let mut delta = SpliceFacts { left, right }.delta(NOW);
    assert!(!delta.is_settled() && delta.translations().is_none());
    // The client has seen no timestamp of this end's clock: what it echoes is zero.
    let mut packet = Segment::plain(1, 1, &options(123_456, 69_999, (1, 2))).packet();
    delta.apply_ingress(NOW + Duration::from_millis(10), &mut packet, Checksum::Full);
    assert_eq!((word(&packet, 24), word(&packet, 28), ones_sum(&packet)), (5, 0, 0xffff));
    let mut answer = Segment::plain(1, 1, &options(40, 5, (1, 2))).packet();
    delta.apply_egress(NOW + Duration::from_millis(30), &mut answer, Checksum::Full);
    assert_eq!((word(&answer, 24), word(&answer, 28)), (70_030, 123_456));
    assert!(delta.is_settled());
    // Both clocks go on by themselves.
    let mut packet = Segment::plain(1, 1, &options(123_500, 70_030, (1, 2))).packet();
    delta.apply_ingress(NOW + Duration::from_secs(9), &mut packet, Checksum::Full);
    assert_eq!((word(&packet, 24), word(&packet, 28)), (49, 40));
}

#[test]
fn options_that_one_connection_lacks_are_overwritten() {
    let mut left = socket(1, 1);
    (left.timestamp, left.has_sack) = (None, false);
    let mut delta = SpliceFacts { left, right: socket(1, 1) }.delta(NOW);
    assert!(delta.is_settled());
    let mut packet = Segment::plain(1, 1, &options(3, 4, (5, 6))).packet();
    delta.apply_egress(NOW, &mut packet, Checksum::Full);
    assert_eq!(header(&packet)[20..44], [1; 24]);
    assert_eq!(ones_sum(&packet), 0xffff);
    let neither = SpliceFacts { left, right: left };
    assert!(neither.delta(NOW).is_zero(), "two connections that lack the same");
}

#[test]
fn windows_are_scaled_and_held() {
    let [mut left, mut right] = [socket(1, 1), socket(1, 1)];
    (left.peer_scale, right.own_scale, right.peer_scale, left.own_scale) = (9, 2, 0, 14);
    let delta = SpliceFacts { left, right }.delta(NOW);
    let delta = Delta { peer_clock: Clock::NONE, own_clock: Clock::NONE, ..delta };
    let Translations { egress, ingress } = delta.translations().expect("its clocks are fixed");
    assert_eq!([0, 3, 511, 512].map(|window| ingress.window(window)), [0, 384, 65_408, 65_535]);
    assert_eq!([0, 16_383, 65_535].map(|window| egress.window(window)), [0, 0, 3]);
}

#[test]
fn a_partial_checksum_stays() {
    let mut delta = Delta { peer: 77, own: 88, ..Delta::ZERO };
    let mut packet = Segment::plain(1, 2, &options(3, 4, (5, 6))).packet();
    let before = header(&packet)[16..18].to_vec();
    delta.apply_ingress(NOW, &mut packet, Checksum::Partial);
    assert_eq!(header(&packet)[16..18], before);
    assert_eq!(word(&packet, 4), 78);
}

#[test]
fn an_acknowledgement_that_does_not_count_and_the_window_of_a_syn_stay() {
    let mut delta = Delta { peer: 77, own: 88, ingress_shift: 3, ..Delta::ZERO };
    let mut syn = Segment { flags: 0x02, ..Segment::plain(1, 2, &[]) }.packet();
    delta.apply_ingress(NOW, &mut syn, Checksum::Full);
    assert_eq!((word(&syn, 4), word(&syn, 8), window(&syn), ones_sum(&syn)), (78, 2, 512, 0xffff));
}

#[test]
fn what_is_no_whole_tcp_packet_stays() {
    let packet = Segment::plain(1, 2, &options(3, 4, (5, 6))).packet();
    let mut delta = Delta { peer: 77, own: 88, ..Delta::ZERO };
    let mut untouched = |bytes: &[u8]| {
        let mut given = bytes.to_vec();
        delta.apply_ingress(NOW, &mut given, Checksum::Full);
        given == bytes
    };
    assert!((0..64).all(|len| untouched(&packet[..len])));
    let changed = |at: usize, to: u8| {
        let mut other = packet.clone();
        other[at] = to;
        other
    };
    assert!(untouched(&changed(9, 17)), "a datagram");
    assert!(untouched(&changed(6, 0x20)), "a fragment");
    assert!(untouched(&changed(32, 4 << 4)), "a header that is too short");
}

/// A malformed option ends the walk: what comes before it is translated.
#[test]
fn garbage_options_end_the_walk() {
    for garbage in [[5, 0, 9, 9], [5, 1, 9, 9], [8, 40, 9, 9], [1, 1, 1, 5]] {
        let mut bytes = options(3, 4, (5, 6));
        bytes.extend_from_slice(&garbage);
        let mut delta = Delta { peer: 16, own: 32, ..Delta::ZERO };
        let mut packet = Segment::plain(1, 2, &bytes).packet();
        delta.apply_ingress(NOW, &mut packet, Checksum::Full);
        assert_eq!((word(&packet, 36), ones_sum(&packet)), (37, 0xffff));
        assert_eq!(header(&packet)[44..48], garbage);
    }
}

fn segments() -> impl Strategy<Value = Segment> {
    let blocks = proptest::collection::vec(any::<[u8; 8]>(), 0..=4);
    let padding = proptest::collection::vec(Just(1_u8), 0..=3);
    let timestamps = proptest::option::of(any::<[u8; 8]>());
    let options = (padding, timestamps, blocks).prop_map(|(mut bytes, timestamps, mut blocks)| {
        if let Some(timestamps) = timestamps {
            bytes.extend_from_slice(&[8, 10]);
            bytes.extend_from_slice(&timestamps);
            blocks.truncate(2);
        }
        blocks.truncate((40 - bytes.len()).saturating_sub(2) / 8);
        if !blocks.is_empty() {
            bytes.extend_from_slice(&[5, 2 + 8 * blocks.len() as u8]);
            bytes.extend(blocks.iter().flatten());
        }
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    });
    let head = (any::<bool>(), any::<(u32, u32)>(), any::<u8>(), any::<u16>());
    (head, options, proptest::collection::vec(any::<u8>(), 0..70)).prop_map(
        |((is_v4, numbers, bits, window), options, payload)| Segment {
            is_v4,
            numbers,
            flags: bits & 0x19 | ACK,
            window,
            options,
            payload,
        },
    )
}

fn deltas() -> impl Strategy<Value = Delta> {
    (any::<[u32; 4]>(), -14_i8..=14, -14_i8..=14).prop_map(
        |([peer, own, first, second], ingress_shift, egress_shift)| {
            let clocks = [first, second].map(Clock::Fixed);
            let [peer_clock, own_clock] = clocks;
            Delta { peer, own, peer_clock, own_clock, ingress_shift, egress_shift, drops_sack: false }
        },
    )
}

/// The same packet with numbers, clocks and acknowledgements of the other direction.
fn reflected(segment: &Segment) -> Segment {
    Segment { numbers: (segment.numbers.1, segment.numbers.0), ..segment.clone() }
}

proptest! {
    #[test]
    fn the_inverse_gives_the_packet_back(segment in segments(), delta in deltas()) {
        let mut there = Delta { ingress_shift: 0, egress_shift: 0, ..delta };
        let mut back = there.inverse().expect("its clocks are fixed");
        let mut packet = segment.packet();
        there.apply_ingress(NOW, &mut packet, Checksum::Full);
        prop_assert_eq!(ones_sum(&packet), 0xffff);
        back.apply_ingress(NOW, &mut packet, Checksum::Full);
        prop_assert_eq!(packet, segment.packet());
        prop_assert!(there.then(back).is_zero());
    }

    #[test]
    fn what_comes_in_and_goes_out_again_has_its_numbers_back(segment in segments(), delta in deltas()) {
        let mut bare = segment;
        bare.options.clear();
        let mut delta = Delta { ingress_shift: 0, egress_shift: 0, ..delta };
        let mut packet = bare.packet();
        delta.apply_ingress(NOW, &mut packet, Checksum::Full);
        let local = Segment { numbers: (word(&packet, 4), word(&packet, 8)), ..bare.clone() };
        let mut out = reflected(&local).packet();
        delta.apply_egress(NOW, &mut out, Checksum::Full);
        prop_assert_eq!(out, reflected(&bare).packet());
    }

    #[test]
    fn the_checksum_holds(segment in segments(), delta in deltas(), drops in any::<(bool, bool)>()) {
        let mut delta = Delta { drops_sack: drops.0, ..delta };
        if drops.1 {
            (delta.peer_clock, delta.own_clock) = (Clock::Absent, Clock::Absent);
        }
        let mut packet = segment.packet();
        delta.apply_ingress(NOW, &mut packet, Checksum::Full);
        prop_assert_eq!(ones_sum(&packet), 0xffff);
        delta.apply_egress(NOW, &mut packet, Checksum::Full);
        prop_assert_eq!(ones_sum(&packet), 0xffff);
    }

    #[test]
    fn two_deltas_are_one(segment in segments(), first in deltas(), second in deltas()) {
        let plain = |delta: Delta| Delta { ingress_shift: 0, egress_shift: 0, ..delta };
        let [mut first, mut second] = [plain(first), plain(second)];
        let [mut twice, mut once] = [segment.packet(), segment.packet()];
        first.apply_ingress(NOW, &mut twice, Checksum::Full);
        second.apply_ingress(NOW, &mut twice, Checksum::Full);
        first.then(second).apply_ingress(NOW, &mut once, Checksum::Full);
        prop_assert_eq!(once, twice);
    }

    #[test]
    fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..120), delta in deltas()) {
        let mut delta = delta;
        for first in [0x45, 0x60] {
            let mut packet = bytes.clone();
            if let [version, .., ] = &mut packet[..] {
                *version = first;
            }
            if let Some(protocol) = packet.get_mut(if first == 0x45 { 9 } else { 6 }) {
                *protocol = 6;
            }
            delta.apply_ingress(NOW, &mut packet, Checksum::Full);
            delta.apply_egress(NOW, &mut packet, Checksum::Full);
        }
    }
}
