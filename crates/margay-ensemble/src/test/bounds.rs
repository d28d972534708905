//! What is beyond bounds, what lies, and what is no packet at all.

use alloc::vec::Vec;

use proptest::collection::vec;
use proptest::prelude::*;

use super::rig::{Rig, data, fragment, of_stream, packet, sack, whole};
use crate::{Config, Failure, Kind, STREAMS_MAX, To, WINDOW_MIN};

fn narrow() -> (Rig, crate::MemberId) {
    let mut rig = Rig::new(Config { window: WINDOW_MIN, ..Config::default() });
    let a = rig.join(Kind::Margay);
    (rig, a)
}

#[test]
fn what_is_beyond_the_window_is_dropped_in_either_direction() {
    let (mut rig, a) = narrow();
    rig.send(&whole(u32::from(WINDOW_MIN)), "A");
    rig.member(a, &data(&whole(u32::from(WINDOW_MIN)), b"a"));
    assert_eq!((rig.sent(), rig.switch.counters().beyond_window), (Vec::new(), 2));
    rig.send(&whole(u32::from(WINDOW_MIN) - 1), "A");
    rig.member(a, &data(&whole(u32::from(WINDOW_MIN) - 1), b"a"));
    assert_eq!(rig.sent().len(), 2);
}

#[test]
fn acknowledgements_of_what_was_never_sent_change_nothing() {
    let (mut rig, [a, b]) = Rig::two(Kind::Foreign);
    rig.send(&whole(0), "A");
    rig.send(&whole(2), "A");
    rig.member(b, &data(&whole(1), b"b1"));
    rig.sent();
    let was = rig.switch.inbound();
    for lie in [sack(3, &[]), sack(0, &[(1, 1)]), sack(1, &[]), sack(0, &[(2, 9)]), sack(0, &[(1, 2)])] {
        rig.member(a, &lie);
    }
    for lie in [sack(2, &[]), sack(u32::MAX, &[(1, 1)]), sack(0, &[]), sack(u32::MAX, &[(2, 3)])] {
        rig.peer(&lie).expect("it lives");
    }
    rig.confirm(b, 7, 7);
    assert_eq!(rig.sent(), []);
    assert_eq!((rig.switch.inbound(), rig.switch.counters().lie, rig.switch.counters().malformed), (was, 9, 1));
}

#[test]
fn a_confirmation_of_what_was_never_told_changes_nothing() {
    let (mut rig, a) = narrow();
    rig.send(&whole(1), "A");
    rig.confirm(a, 0, 2);
    rig.send(&whole(0), "!");
    assert_eq!((rig.switch.counters().lie, rig.switch.counters().plugin), (1, 1));
}

#[test]
fn a_repetition_that_differs_is_dropped() {
    let (mut rig, a) = narrow();
    rig.send(&whole(0), "A");
    rig.send(&fragment(0, 0, 0, false), "A");
    rig.member(a, &data(&whole(0), b"a"));
    rig.member(a, &data(&of_stream(0, 1, 0), b"a"));
    assert_eq!((rig.sent().len(), rig.switch.counters().differs), (2, 2));
}

#[test]
fn streams_are_bounded() {
    let mut rig = Rig::new(Config { window: 4096, ..Config::default() });
    let a = rig.join(Kind::Margay);
    for stream in 0..=STREAMS_MAX as u16 {
        rig.send(&of_stream(stream.into(), stream + 1, 0), "A");
    }
    assert_eq!((rig.sent().len(), rig.switch.counters().bound), (STREAMS_MAX, 1));
    rig.member(a, &data(&of_stream(0, crate::MEMBER_STREAMS_MAX, 0), b"a"));
    assert_eq!((rig.sent().len(), rig.switch.counters().bound), (0, 2));
}

#[test]
fn without_members_the_peer_repeats() {
    let mut rig = Rig::new(Config::default());
    rig.send(&whole(0), "A");
    assert_eq!((rig.sent(), rig.switch.counters().no_member), (Vec::new(), 1));
    let a = rig.join(Kind::Margay);
    rig.send(&whole(0), "A");
    assert_eq!(rig.sent_to(To::Member(a)), ["mark 0<1, data 0.0#0 A"]);
}

#[test]
fn a_peer_of_another_protocol_is_told_at_once() {
    let (mut rig, _) = narrow();
    assert_eq!(rig.peer(&[0, 3, 0, 17, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, b'x']), Err(Failure::PlainData));
    let (mut rig, _) = narrow();
    let forward = packet(|packet| packet.i_forward_tsn(0, &[]).expect("room"));
    assert_eq!(rig.peer(&forward), Err(Failure::Abandoned));
    assert_eq!(rig.switch.next_deadline(), None);
}

#[test]
fn what_a_member_says_in_plain_data_is_dropped_and_counted() {
    let (mut rig, a) = narrow();
    rig.member(a, &[0, 3, 0, 17, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, b'x', 0, 0, 0]);
    rig.member(a, &data(&whole(0), b"a"));
    assert_eq!((rig.sent_to(To::Peer).len(), rig.switch.counters().malformed), (1, 1));
}

#[test]
fn numbers_wrap() {
    let first = crate::Csn(u32::MAX - 1);
    let mut rig = Rig::new(Config { from_peer: first, to_peer: first, ..Config::default() });
    let joining = crate::Joining {
        kind: Kind::Foreign,
        to_member: crate::Lsn(u32::MAX),
        from_member: crate::Lsn(u32::MAX),
        window_bytes: 1,
    };
    let a = rig.switch.join(&joining).expect("a place");
    for at in [0, 2, 1, 3] {
        rig.send(&whole((u32::MAX - 1).wrapping_add(at)), "A");
        rig.member(a, &data(&whole(u32::MAX.wrapping_add(at)), b"a"));
    }
    let numbers = ["data 4294967295.0#0 A", "data 1.0#2 A", "data 0.0#1 A", "data 2.0#3 A"];
    assert_eq!(rig.sent_to(To::Member(a)), numbers);
    rig.member(a, &sack(2, &[]));
    assert_eq!(rig.sent_to(To::Peer), ["sack 1"]);
}

/// Bytes of packets that are almost right.
fn almost() -> impl Strategy<Value = Vec<u8>> {
    let chunk = prop_oneof![
        (0..40_u32, 0..3_u16, 0..5_u32, 0..16_u8, 0..3_u32).prop_map(|(tsn, stream, mid, flags, at)| {
            let flags = margay_wire::sctp::IDataFlags::from_bits_truncate(flags);
            let repr = margay_wire::sctp::IDataRepr { flags, tsn, stream, mid, number: at + 1 };
            data(&repr, b"As")
        }),
        (0..40_u32, vec((1..9_u16, 0..9_u16), 0..3)).prop_map(|(tsn, blocks)| {
            sack(tsn.wrapping_sub(1), &blocks.iter().map(|(start, len)| (*start, start + len)).collect::<Vec<_>>())
        }),
        vec(any::<u8>(), 0..40),
    ];
    vec(chunk, 0..4).prop_map(|chunks| chunks.concat())
}

proptest! {
    /// Whatever is sent, nothing panics, no acknowledgement goes beyond what came, and state is bounded.
    #[test]
    fn any_packets_do_no_harm(
        steps in vec((0..7_u8, almost()), 0..60),
        kinds in vec(any::<bool>(), 2),
    ) {
        let mut rig = Rig::new(Config { window: WINDOW_MIN, ..Config::default() });
        let kind = |at: usize| if kinds[at] { Kind::Margay } else { Kind::Foreign };
        let members = [rig.join(kind(0)), rig.join(kind(1))];
        for (what, packet) in &steps {
            let _ = match what {
                0..3 => rig.peer(packet),
                3..6 => rig.switch.from_member(rig.now, members[usize::from(*what) % 2], packet),
                _ if packet.len() > 40 => {
                    rig.switch.died(rig.now, members[1]);
                    Ok(())
                }
                _ => {
                    rig.wait(250);
                    Ok(())
                }
            };
            let (oldest, next) = rig.switch.inbound();
            prop_assert!(crate::Serial::since(next, oldest) <= u32::from(WINDOW_MIN));
            for id in members {
                let bound = 2 * usize::from(WINDOW_MIN);
                prop_assert!(rig.switch.members().in_flight(id).is_none_or(|count| count <= bound + usize::from(WINDOW_MIN)));
            }
            rig.sent();
        }
    }
}
