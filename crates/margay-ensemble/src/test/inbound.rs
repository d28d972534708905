//! From the peer to the members.

use alloc::format;
use alloc::vec;
use alloc::vec::Vec;

use super::rig::{Rig, fragment, free, of_stream, sack, whole};
use crate::{Config, Kind, LossDetection, To};

#[test]
fn frames_in_order_have_the_next_number_of_their_member() {
    let (mut rig, [a, b]) = Rig::two(Kind::Margay);
    for (tsn, frame) in ["A0", "B1", "A2"].iter().enumerate() {
        rig.send(&whole(tsn as u32), frame);
    }
    let expected = [
        (To::Member(a), "mark 0<1, data 0.0#0 A0"),
        (To::Member(b), "mark 0<2, data 0.0#1 B1"),
        (To::Member(a), "mark 1<3, data 1.0#2 A2"),
    ];
    assert_eq!(rig.sent(), expected.map(|(to, words)| (to, words.into())));
}

#[test]
fn foreign_members_see_consecutive_messages() {
    let (mut rig, [a, b]) = Rig::two(Kind::Foreign);
    for (tsn, frame) in ["A0", "B1", "A2"].iter().enumerate() {
        rig.send(&whole(tsn as u32), frame);
    }
    let expected =
        [(To::Member(a), "data 0.0#0 A0"), (To::Member(b), "data 0.0#0 B1"), (To::Member(a), "data 1.0#1 A2")];
    assert_eq!(rig.sent(), expected.map(|(to, words)| (to, words.into())));
}

/// Figure 2: frame 1 is lost; each sink has a gap of length 1 in its space. When it comes, it fills one and patches the
/// other.
#[test]
fn figure_2_a_hole_is_reserved_for_at_each_sink() {
    let (mut rig, [a, b]) = Rig::two(Kind::Foreign);
    rig.send(&whole(0), "A0");
    rig.send(&whole(2), "B2");
    rig.send(&whole(3), "A3");
    rig.send(&whole(4), "B4");
    let sent: Vec<_> = rig.sent().into_iter().map(|(_, words)| words).collect();
    assert_eq!(sent, ["data 0.0#0 A0", "data 1.0#1 B2", "data 2.0#2 A3", "data 2.0#2 B4"]);
    rig.member(b, &sack(u32::MAX, &[(2, 3)]));
    rig.member(a, &sack(0, &[(2, 2)]));
    assert_eq!(rig.sent_to(To::Peer), ["sack 4294967295 3-3 5-5", "sack 0 2-4"]);
    rig.send(&whole(1), "A1");
    assert_eq!(rig.sent(), [(To::Member(a), "data 1.0#1 A1".into()), (To::Member(b), "forward 0 0#0".into())]);
    rig.member(b, &sack(2, &[]));
    rig.member(a, &sack(2, &[]));
    assert_eq!(rig.sent_to(To::Peer), ["sack 0 2-4", "sack 4"]);
}

/// Figure 3: frames 2 and 3 are reordered; 2 goes to A, and a null frame to B.
#[test]
fn figure_3_a_redirect_patch() {
    let (mut rig, [a, b]) = Rig::two(Kind::Foreign);
    for (tsn, frame) in [(0, "A"), (1, "B"), (3, "B"), (2, "A")] {
        rig.send(&whole(tsn), frame);
    }
    rig.member(b, &sack(0, &[(2, 2)]));
    let to_b: Vec<_> = rig.sent().into_iter().filter(|(to, _)| *to == To::Member(b)).map(|(_, words)| words).collect();
    assert_eq!(to_b, ["data 0.0#0 B", "data 2.0#2 B", "forward 1 0#1"]);
    assert_ne!(a, b);
}

#[test]
fn a_patch_waits_for_all_before_it() {
    let (mut rig, [a, b]) = Rig::two(Kind::Foreign);
    rig.send(&whole(0), "A0");
    rig.send(&whole(2), "A2");
    rig.sent();
    rig.send(&whole(1), "B1");
    assert_eq!(rig.sent_to(To::Member(a)), [""; 0], "frame 0 is merely late, perhaps");
    rig.member(a, &sack(u32::MAX, &[(3, 3)]));
    assert_eq!(rig.sent_to(To::Member(a)), [""; 0]);
    rig.member(a, &sack(0, &[(2, 2)]));
    assert_eq!(rig.sent_to(To::Member(a)), ["forward 1 0#1"]);
    rig.wait(199);
    assert_eq!(rig.sent_to(To::Member(a)), [""; 0]);
    rig.wait(1);
    assert_eq!(rig.sent_to(To::Member(a)), ["forward 1 0#1"]);
    rig.wait(400);
    assert_eq!(rig.sent_to(To::Member(a)), ["forward 1 0#1"]);
    rig.member(a, &sack(2, &[]));
    assert_eq!(rig.switch.next_deadline(), None);
    rig.member(b, &sack(0, &[]));
    assert_eq!(rig.sent_to(To::Peer), ["sack 0 2-2", "sack 2"]);
}

#[test]
fn a_patch_does_not_pass_over_a_frame_that_is_incomplete() {
    let (mut rig, [a, _]) = Rig::two(Kind::Foreign);
    rig.send(&fragment(0, 0, 0, false), "A");
    rig.send(&whole(3), "A3");
    rig.send(&whole(1), "B1");
    rig.sent();
    // CSN 2 is a hole: A has 0, reserved 1 (patched) and 2, and 3.
    rig.member(a, &sack(0, &[(3, 3)]));
    assert_eq!(rig.sent_to(To::Member(a)), [""; 0], "message 0 would be thrown away");
    rig.send(&fragment(2, 0, 1, true), "end");
    assert_eq!(rig.sent_to(To::Member(a)), ["data 4.0#0 end"]);
    rig.member(a, &sack(0, &[(3, 4)]));
    assert_eq!(rig.sent_to(To::Member(a)), ["forward 2 0#2"]);
}

#[test]
fn frames_without_order_reserve_nothing() {
    let (mut rig, [a, b]) = Rig::two(Kind::Foreign);
    rig.send(&free(1), "A1");
    rig.send(&free(2), "B2");
    rig.send(&free(0), "B0");
    let expected =
        [(To::Member(a), "data 0.~0#1 A1"), (To::Member(b), "data 0.~0#2 B2"), (To::Member(b), "data 1.~0#0 B0")];
    assert_eq!(rig.sent(), expected.map(|(to, words)| (to, words.into())));
}

#[test]
fn a_watermark_goes_alone_until_it_is_confirmed() {
    let (mut rig, [a, b]) = Rig::two(Kind::Margay);
    rig.send(&whole(1), "A1");
    rig.send(&whole(2), "A2");
    assert_eq!(rig.sent_to(To::Member(a)), ["mark 4294967295<0, data 0.0#1 A1", "mark 4294967295<0, data 1.0#2 A2"]);
    rig.send(&whole(0), "B0");
    let expected = [(To::Member(b), "mark 0<3, data 0.0#0 B0"), (To::Member(a), "mark 1<3")];
    assert_eq!(rig.sent(), expected.map(|(to, words)| (to, words.into())));
    rig.confirm(b, 0, 3);
    rig.wait(199);
    assert_eq!(rig.sent(), []);
    rig.wait(1);
    assert_eq!(rig.sent_to(To::Member(a)), ["mark 1<3"]);
    rig.wait(399);
    assert_eq!(rig.sent(), []);
    rig.wait(1);
    assert_eq!(rig.sent_to(To::Member(a)), ["mark 1<3"]);
    rig.confirm(a, 1, 3);
    assert_eq!(rig.switch.next_deadline(), None);
}

#[test]
fn the_mark_stops_at_the_oldest_hole() {
    let (mut rig, [a, _]) = Rig::two(Kind::Margay);
    for tsn in [0, 2, 4] {
        rig.send(&whole(tsn), "A");
    }
    rig.sent();
    rig.send(&whole(1), "A");
    assert_eq!(rig.sent_to(To::Member(a)), ["mark 3<3, data 3.0#1 A"], "up to its own number, before hole 3");
}

#[test]
fn the_peer_is_told_of_the_oldest_frame_that_no_member_has() {
    let (mut rig, [a, b]) = Rig::two(Kind::Margay);
    for (tsn, frame) in ["A0", "B1", "A2", "B3", "A4"].iter().enumerate() {
        rig.send(&whole(tsn as u32), frame);
    }
    assert_eq!(rig.sent_to(To::Peer), [""; 0], "nothing is acknowledged by the switch itself");
    rig.member(a, &sack(1, &[]));
    assert_eq!(rig.sent_to(To::Peer), ["sack 0 2-2"]);
    rig.member(b, &sack(0, &[]));
    assert_eq!(rig.sent_to(To::Peer), ["sack 2"]);
    rig.member(a, &sack(2, &[]));
    assert_eq!(rig.sent_to(To::Peer), ["sack 2 2-2"]);
    assert_eq!(rig.switch.close().retired, [1, 2, 3]);
}

/// A member may take back what it has not acknowledged for good, and so may the switch.
#[test]
fn what_a_member_takes_back_is_taken_back() {
    let (mut rig, [a, _]) = Rig::two(Kind::Margay);
    (0..3).for_each(|tsn| rig.send(&whole(tsn), "A"));
    rig.sent();
    rig.member(a, &sack(u32::MAX, &[(2, 3)]));
    rig.member(a, &sack(u32::MAX, &[(3, 3)]));
    assert_eq!(rig.sent_to(To::Peer), ["sack 4294967295 2-3", "sack 4294967295 3-3"]);
}

#[test]
fn a_peer_that_counts_misses_is_not_told_of_what_is_merely_slow() {
    let mut rig = Rig::new(Config { peer: LossDetection::Misses, ..Config::default() });
    let [a, b] = [rig.join(Kind::Margay), rig.join(Kind::Margay)];
    for (tsn, frame) in ["A", "B", "A", "B", "A", "B"].iter().enumerate() {
        rig.send(&whole(tsn as u32), frame);
    }
    rig.sent();
    rig.member(b, &sack(2, &[]));
    assert_eq!(rig.sent_to(To::Peer), ["sack 4294967295"], "A is slow, and nothing of it is missing");
    rig.member(a, &sack(u32::MAX, &[(2, 2)]));
    assert_eq!(rig.sent_to(To::Peer), ["sack 4294967295 2-4"], "A has reported frame 0 missing, and not frame 4");
    rig.member(a, &sack(1, &[]));
    assert_eq!(rig.sent_to(To::Peer), ["sack 3"]);
}

/// Else it would repeat frame 0 alone for ever, and never frame 1, which A's number for frame 0 waits behind.
#[test]
fn a_peer_that_counts_misses_is_told_of_what_is_acknowledged_for_now() {
    let mut rig = Rig::new(Config { peer: LossDetection::Misses, ..Config::default() });
    let a = rig.join(Kind::Margay);
    rig.send(&whole(1), "A");
    rig.send(&whole(0), "A");
    rig.sent();
    rig.member(a, &sack(u32::MAX, &[(2, 2)]));
    assert_eq!(rig.sent_to(To::Peer), ["sack 4294967295 1-1"]);
}

#[test]
fn what_comes_again_keeps_its_member_and_numbers() {
    let (mut rig, [a, _]) = Rig::two(Kind::Margay);
    rig.send(&whole(0), "A");
    // The payload would now say B.
    rig.send(&whole(0), "B");
    assert_eq!(rig.sent_to(To::Member(a)), ["mark 0<1, data 0.0#0 A", "mark 0<1, data 0.0#0 B"]);
    rig.member(a, &sack(0, &[]));
    rig.sent();
    rig.send(&whole(0), "A");
    assert_eq!(rig.sent(), [(To::Peer, "sack 0".into())], "it is acknowledged once more, and goes nowhere");
    assert_eq!(rig.switch.counters().duplicate, 1);
}

#[test]
fn fragments_follow_their_first() {
    let (mut rig, [_, b]) = Rig::two(Kind::Margay);
    rig.send(&fragment(1, 0, 1, false), "A");
    assert_eq!((rig.sent(), rig.switch.counters().before_first), (vec![], 1));
    rig.send(&fragment(0, 0, 0, false), "B");
    rig.send(&fragment(2, 0, 2, true), "A");
    rig.send(&fragment(1, 0, 1, false), "A");
    let expected = ["mark 0<1, data 0.0#0 B", "mark 0<1, data 1.0#0 A", "mark 2<3, data 2.0#0 A"];
    assert_eq!(rig.sent_to(To::Member(b)), expected);
}

#[test]
fn a_stream_follows_its_first_frame_and_moves_when_all_is_acknowledged() {
    let (mut rig, [a, b]) = Rig::two(Kind::Margay);
    rig.send(&of_stream(1, 7, 1), "B");
    assert_eq!((rig.sent(), rig.switch.counters().before_first), (vec![], 1), "nobody knows where frame 0 will go");
    rig.send(&of_stream(0, 7, 0), "A");
    rig.send(&of_stream(1, 7, 1), "B");
    assert_eq!(rig.sent_to(To::Member(a)), ["mark 0<1, data 0.7#0 A", "mark 1<2, data 1.7#1 B"]);
    rig.member(a, &sack(0, &[]));
    rig.send(&of_stream(2, 7, 2), "B");
    assert_eq!(rig.sent_to(To::Member(a)), ["mark 2<3, data 2.7#2 B"]);
    rig.member(a, &sack(2, &[]));
    rig.send(&of_stream(3, 7, 3), "B");
    assert_eq!(rig.sent_to(To::Member(b)), ["mark 0<4, data 0.7#0 B"], "renumbered from 0");
    rig.member(b, &sack(0, &[]));
    rig.send(&of_stream(4, 7, 4), "A");
    assert_eq!(rig.sent_to(To::Member(a)), ["mark 3<5, data 3.7#3 A"], "it has had that stream before");
}

#[test]
fn a_stream_with_a_hole_does_not_move() {
    let (mut rig, [a, _]) = Rig::two(Kind::Margay);
    rig.send(&of_stream(0, 7, 0), "A");
    rig.send(&of_stream(2, 7, 2), "A");
    rig.member(a, &sack(1, &[]));
    rig.sent();
    rig.send(&of_stream(3, 7, 3), "B");
    rig.send(&of_stream(1, 7, 1), "B");
    assert_eq!(rig.sent_to(To::Member(a)), ["mark 0<1, data 2.7#3 B", "mark 3<4, data 3.7#1 B"]);
}

#[test]
fn a_plugin_changes_a_frame_always_in_the_same_way() {
    let mut rig = Rig::new(Config::default());
    rig.switch = crate::Switch::new(Config::default(), super::rig::Script { lengthens: true, ..Default::default() }, 1);
    let a = rig.join(Kind::Foreign);
    rig.send(&whole(0), "A");
    rig.send(&whole(0), "A");
    assert_eq!(rig.sent_to(To::Member(a)), [format!("data 0.0#0 A{}", '\u{1}'), format!("data 0.0#0 A{}", '\u{1}')]);
}
