//! The programs give packets the numbers that the core's own translation gives them.

use margay_core::delta::{self, Clock, Delta, Translation};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use super::*;
use crate::checksum::{fold, pseudo, sum};

/// Where TCP begins behind IPv4, and behind IPv6.
const TCP_AT: [usize; 2] = [20, 40];

fn delta() -> Delta {
    Delta {
        peer: 0xffff_ff00,
        own: 0x1234_5678,
        peer_clock: Clock::Fixed(1_000_000),
        own_clock: Clock::Fixed(u32::MAX - 7),
        ingress_shift: -3,
        egress_shift: 2,
        drops_sack: false,
    }
}

/// The programs with one flow, which has `delta`.
fn rig_of(app: Tuple, wire_v4: bool, delta: &Delta) -> Option<Rig> {
    let rig = rig(app, wire_v4, true, true)?;
    rig.give(app, delta);
    Some(rig)
}

impl Rig {
    /// As the agent does it.
    fn give(&self, app: Tuple, delta: &Delta) {
        let delta = delta.translations().expect("its clocks are fixed");
        let flow = WireFlow { delta: Some(delta), ..flow_of(app, true, true) };
        put(&self.0.maps.deltas, &flow.flow.0.to_ne_bytes(), layout::delta_of(&delta).bytes());
        let mut bytes = layout::flow_change_of(&flow).bytes().to_vec();
        let input = ProgramInput { context_in: Some(&mut bytes), ..Default::default() };
        let said = self.0.progs.change_flow.test_run(input).expect("a run").return_value;
        assert_eq!(said, layout::CHANGE_DONE);
    }
}

/// What follows the ports in a TCP header: numbers, flags, a window, options padded to a multiple of four bytes.
fn tcp(numbers: (u32, u32), flags: u8, window: u16, options: &[u8]) -> Vec<u8> {
    let len = options.len().next_multiple_of(4);
    let mut bytes = [numbers.0.to_be_bytes(), numbers.1.to_be_bytes()].concat();
    bytes.extend([(((20 + len) / 4) << 4) as u8, flags]);
    bytes.extend(window.to_be_bytes());
    bytes.extend([0; 4]);
    bytes.extend(options);
    bytes.resize(16 + len, 0);
    bytes
}

/// The TCP header behind its ports, and without its checksum.
fn header(packet: &[u8]) -> Vec<u8> {
    let at = TCP_AT[usize::from(packet[0] >> 4 == 6)];
    let len = usize::from(packet[at + 12] >> 4) * 4;
    let tcp = &packet[at..at + len];
    [&tcp[4..16], &tcp[18..]].concat()
}

/// smoltcp reads no options that are malformed.
fn has_right_checksum(packet: &[u8]) -> bool {
    let (addresses, tcp) = packet[12..].split_at(8);
    fold(sum(addresses) + sum(tcp) + pseudo(TCP, tcp.len() as u32)) == 0xffff
}

fn translated(packet: &[u8], by: &Translation) -> Vec<u8> {
    let mut packet = packet.to_vec();
    by.apply(&mut packet, delta::Checksum::Full);
    packet
}

#[test]
fn both_directions_are_translated_between_all_families() {
    let delta = delta();
    let both = delta.translations().expect("its clocks are fixed");
    let options = [1, 1, 8, 10, 0, 0, 1, 0, 0, 0, 2, 0, 1, 1, 5, 18, 0, 0, 0, 9, 0, 0, 0, 10, 9, 9, 9, 9, 8, 8, 8, 8];
    for app in [sample::tuple4(TCP), sample::tuple6(TCP)] {
        for wire_v4 in [true, false] {
            let Some(rig) = rig_of(app, wire_v4, &delta) else { return };
            let wire = wire(wire_v4);
            let out = sample::packet_of(app, &tcp((7, 9), ACK, 0x0800, &options), b"data", Checksum::Complete);
            let (verdict, sent) = rig.run(true, &out);
            let seen = sample::see(&sent);
            assert_eq!((verdict, seen.tuple, seen.payload), (REDIRECT, wire, b"data".to_vec()));
            assert_eq!(header(&sent), header(&translated(&out, &both.egress)));
            let at = TCP_AT[usize::from(!wire_v4)];
            assert_eq!(sent[at + 14..at + 16], 0x2000_u16.to_be_bytes());

            let came = tcp((0x100, 50), ACK, 0x0800, &options);
            let came = sample::packet_of(wire.reversed(), &came, b"answer", Checksum::Complete);
            let (verdict, given) = rig.run(false, &came);
            let seen = sample::see(&given);
            assert_eq!((verdict, seen.tuple, seen.payload), (REDIRECT, app.reversed(), b"answer".to_vec()));
            assert_eq!((header(&given), seen.sequence), (header(&translated(&came, &both.ingress)), 0));
            // The entry has the numbers of the application's TCP.
            let entry = rig.entry();
            assert_eq!((entry.egress.numbers.sequence, entry.egress.numbers.acknowledgement), (7, 9));
            let came = &entry.ingress.numbers;
            assert_eq!((came.sequence, came.acknowledgement, came.window), (0, 50 + 0x1234_5678, 0x0100));
        }
    }
}

/// Headers of every length, with options that are whole and such as are not.
#[test]
fn any_options_are_translated_as_the_core_does() {
    let Some(rig) = rig_of(sample::tuple4(TCP), true, &delta()) else { return };
    let piece = prop_oneof![
        Just(vec![1]),
        any::<[u8; 8]>().prop_map(|bytes| [&[8, 10][..], &bytes].concat()),
        (1..=4_u8, any::<[u8; 32]>())
            .prop_map(|(blocks, bytes)| { [&[5, 2 + 8 * blocks][..], &bytes[..8 * usize::from(blocks)]].concat() }),
        (any::<u8>(), 0..12_u8, any::<[u8; 12]>()).prop_map(|(kind, len, bytes)| [
            &[kind, len][..],
            &bytes[..usize::from(len.saturating_sub(2))]
        ]
        .concat()),
        proptest::collection::vec(any::<u8>(), 0..6),
    ];
    let options = proptest::collection::vec(piece, 0..6).prop_map(|pieces| {
        let mut bytes = pieces.concat();
        bytes.truncate(40);
        bytes
    });
    let clocks = prop_oneof![3 => any::<u32>().prop_map(Clock::Fixed), 1 => Just(Clock::Absent)];
    let deltas = (any::<(u32, u32)>(), clocks.clone(), clocks, -14_i8..=14, -14_i8..=14, any::<bool>()).prop_map(
        |((peer, own), peer_clock, own_clock, ingress_shift, egress_shift, drops_sack)| Delta {
            peer,
            own,
            peer_clock,
            own_clock,
            ingress_shift,
            egress_shift,
            drops_sack,
        },
    );
    let numbers = (any::<(u32, u32)>(), any::<u16>());
    let result = TestRunner::deterministic().run(&(deltas, numbers, options), |(delta, (numbers, window), options)| {
        let app = sample::tuple4(TCP);
        rig.give(app, &delta);
        let both = delta.translations().expect("its clocks are fixed");
        for (is_egress, tuple, by) in [(true, app, both.egress), (false, wire(true).reversed(), both.ingress)] {
            let packet = sample::packet_of(tuple, &tcp(numbers, ACK, window, &options), b"", Checksum::Complete);
            let (verdict, out) = rig.run(is_egress, &packet);
            prop_assert_eq!(verdict, REDIRECT);
            prop_assert_eq!(header(&out), header(&translated(&packet, &by)));
            prop_assert!(has_right_checksum(&out));
        }
        Ok(())
    });
    result.expect("as the core does");
}

#[test]
fn a_cards_sum_stays_true() {
    let options = [1, 1, 8, 10, 0, 0, 1, 0, 0, 0, 2, 0, 1, 5, 10, 0, 0, 0, 9, 0, 0, 0, 10];
    for app in [sample::tuple4(TCP), sample::tuple6(TCP)] {
        for wire_v4 in [true, false] {
            let Some(rig) = rig_of(app, wire_v4, &delta()) else { return };
            let came = tcp((0x100, 50), ACK, 0x0800, &options);
            let came = sample::packet_of(wire(wire_v4).reversed(), &came, b"odd", Checksum::Complete);
            match super::checksum::run_with_sum(&rig.0.progs.wire_ingress, &came) {
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                    eprintln!("skipped: this kernel makes no test run with the sum of a card");
                    return;
                }
                result => {
                    let (verdict, out) = result.expect("the sum is true");
                    assert_eq!((verdict, sample::see(&out).sequence), (REDIRECT, 0));
                }
            }
        }
    }
}

/// A packet is never passed with the numbers of the other side.
#[test]
fn without_its_delta_a_flow_is_the_agents() {
    let app = sample::tuple4(TCP);
    let Some(rig) = rig_of(app, true, &delta()) else { return };
    rig.0.maps.deltas.delete(&99_u32.to_ne_bytes()).expect("it was there");
    let (verdict, out) = rig.run(true, &segment(app, ACK, b"data"));
    assert_eq!((verdict, sample::see(&out).tuple), (NEXT, app));
    let came = segment(wire(true).reversed(), ACK, b"data");
    let (verdict, out) = rig.run(false, &came);
    assert_eq!((verdict, sample::see(&out).tuple), (REDIRECT, wire(true).reversed()));
    assert!(rig.counted().contains(&"up_not_accepted"));
}
