//! From the members to the peer.

use alloc::vec::Vec;
use core::time::Duration;

use super::rig::{Rig, data, fragment, free, of_stream, packet, sack, whole};
use crate::{Config, Kind, To};

fn sack_with_room(cumulative: u32, window_bytes: u32) -> Vec<u8> {
    packet(|packet| packet.sack(cumulative, window_bytes, core::iter::empty()).expect("room"))
}

#[test]
fn answers_are_merged_as_they_come_each_member_with_streams_of_its_own() {
    let (mut rig, [a, b]) = Rig::two(Kind::Margay);
    rig.member(a, &data(&whole(0), b"a0"));
    rig.member(b, &data(&of_stream(0, 3, 0), b"b0"));
    rig.member(a, &data(&free(1), b"a1"));
    assert_eq!(rig.sent_to(To::Peer), ["data 0.0#0 a0", "data 1.67#0 b0", "data 2.~0#1 a1"]);
}

#[test]
fn a_sources_gap_is_passed_on_and_filled() {
    let (mut rig, [a, b]) = Rig::two(Kind::Margay);
    rig.member(a, &data(&whole(2), b"a2"));
    rig.member(b, &data(&whole(0), b"b0"));
    rig.member(a, &data(&whole(0), b"a0"));
    rig.member(a, &data(&whole(1), b"a1"));
    rig.member(a, &data(&whole(1), b"a1"));
    let expected = ["data 2.0#2 a2", "data 3.64#0 b0", "data 0.0#0 a0", "data 1.0#1 a1", "data 1.0#1 a1"];
    assert_eq!(rig.sent_to(To::Peer), expected);
}

#[test]
fn each_source_is_told_of_its_own() {
    let (mut rig, [a, b]) = Rig::two(Kind::Margay);
    for tsn in 0..3 {
        rig.member(a, &data(&whole(tsn), b"a"));
        rig.member(b, &data(&whole(tsn), b"b"));
    }
    rig.sent();
    // All of B's, none of A's.
    rig.peer(&sack(u32::MAX, &[(2, 2), (4, 4), (6, 6)])).expect("it lives");
    assert_eq!(rig.sent(), [(To::Member(b), "sack 4294967295 1-3".into())], "none of them for good");
    rig.peer(&sack(2, &[(3, 3)])).expect("it lives");
    let sent: Vec<_> = rig.sent();
    assert_eq!(sent, [(To::Member(a), "sack 1".into()), (To::Member(b), "sack 0 2-2".into())]);
    rig.peer(&sack(5, &[])).expect("it lives");
    assert_eq!(rig.sent(), [(To::Member(a), "sack 2".into()), (To::Member(b), "sack 2".into())]);
    rig.member(a, &data(&whole(2), b"a"));
    assert_eq!(rig.sent(), [(To::Member(a), "sack 2".into())], "the acknowledgement was lost");
}

/// The peer may take back what it has not acknowledged for good: the member repeats it, and the switch gives it on.
#[test]
fn what_the_peer_takes_back_is_taken_back() {
    let mut rig = Rig::new(Config::default());
    let a = rig.join(Kind::Margay);
    (0..3).for_each(|tsn| rig.member(a, &data(&whole(tsn), b"a")));
    rig.sent();
    rig.peer(&sack(u32::MAX, &[(2, 3)])).expect("it lives");
    rig.peer(&sack(u32::MAX, &[(3, 3)])).expect("it lives");
    assert_eq!(rig.sent_to(To::Member(a)), ["sack 4294967295 2-3", "sack 4294967295 3-3"]);
    rig.member(a, &data(&whole(1), b"a"));
    assert_eq!(rig.sent_to(To::Peer), ["data 1.0#1 a"]);
}

/// A peer that has acknowledged all, and then reads what it has, says nothing but that there is room.
#[test]
fn members_hear_at_once_that_the_peer_has_room_again() {
    let (mut rig, [a, b]) = Rig::two(Kind::Margay);
    rig.member(a, &data(&whole(0), b"a"));
    rig.sent();
    rig.peer(&sack_with_room(0, 0)).expect("it lives");
    assert_eq!(rig.sent(), [(To::Member(a), "sack 0".into())]);
    rig.peer(&sack_with_room(0, 9000)).expect("it lives");
    assert_eq!(rig.sent(), [], "too little for each of two");
    rig.peer(&sack_with_room(0, 10_000)).expect("it lives");
    assert_eq!(rig.sent(), [(To::Member(a), "sack 0".into()), (To::Member(b), "sack 4294967295".into())]);
    rig.peer(&sack_with_room(0, 20_000)).expect("it lives");
    assert_eq!(rig.sent(), [], "they send, and hear of it with the next acknowledgement");
}

#[test]
fn holes_and_patches_of_each_leg_are_counted() {
    let mut rig = Rig::new(Config::default());
    let [a, b] = [rig.join(Kind::Margay), rig.join(Kind::Foreign)];
    rig.member(a, &data(&whole(2), b"a"));
    rig.send(&whole(1), "B");
    let switch = &rig.switch;
    let members = switch.members();
    assert_eq!((switch.holes(), switch.holes_of(a), switch.holes_of(b)), (1, Some(2), Some(0)));
    assert_eq!((members.patches(a), members.patches(b)), (Some(0), Some(1)));
    rig.send(&whole(0), "A");
    assert_eq!((rig.switch.holes(), rig.switch.members().patches(b)), (0, Some(1)), "it is a patch now");
    rig.member(a, &data(&whole(0), b"a"));
    assert_eq!(rig.switch.holes_of(a), Some(1));
}

/// A member that answers one request at a time hears with the next one what the peer has of its answers.
#[test]
fn a_source_is_told_with_what_it_is_sent_or_of_two_or_after_a_while() {
    let mut rig = Rig::new(Config { sack_delay: Duration::from_millis(20), ..Config::default() });
    let [a, b] = [rig.join(Kind::Margay), rig.join(Kind::Margay)];
    for tsn in 0..4 {
        rig.member(a, &data(&whole(tsn), b"a"));
    }
    rig.sent();
    rig.peer(&sack(0, &[])).expect("it lives");
    assert_eq!(rig.sent(), [], "it waits");
    assert_eq!(rig.switch.next_deadline(), Some(rig.now + Duration::from_millis(20)));
    rig.send(&whole(0), "B");
    assert_eq!(rig.sent(), [(To::Member(b), "mark 0<1, data 0.0#0 B".into())], "this is another one's");
    rig.send(&whole(1), "A");
    let with_it = [(To::Member(a), "mark 0<2, data 0.0#1 A".into()), (To::Member(a), "sack 0".into())];
    assert_eq!(rig.sent(), with_it);
    rig.peer(&sack(1, &[])).expect("it lives");
    rig.wait(19);
    assert_eq!(rig.sent_to(To::Member(a)), [""; 0]);
    rig.wait(1);
    assert_eq!(rig.sent_to(To::Member(a)), ["sack 1"]);
    rig.peer(&sack(3, &[])).expect("it lives");
    assert_eq!(rig.sent_to(To::Member(a)), ["sack 3"], "two at once");
    rig.member(a, &data(&whole(3), b"a"));
    assert_eq!(rig.sent_to(To::Member(a)), ["sack 3"], "what comes again is answered at once");
}

#[test]
fn what_a_dead_member_owes_the_peer_is_passed_over_when_its_turn_comes() {
    let (mut rig, [a, b]) = Rig::two(Kind::Margay);
    rig.member(b, &data(&whole(0), b"b0"));
    rig.member(a, &data(&whole(1), b"a1"));
    rig.member(b, &data(&whole(1), b"b1"));
    rig.sent();
    rig.switch.died(rig.now, a);
    assert_eq!(rig.sent_to(To::Peer), ["sack 4294967295"], "frame 0 of B is merely late, perhaps");
    rig.peer(&sack(0, &[(3, 3)])).expect("it lives");
    assert_eq!(rig.sent_to(To::Peer), ["forward 2 0#1"]);
    rig.wait(200);
    assert_eq!(rig.sent_to(To::Peer), ["forward 2 0#1"]);
    rig.peer(&sack(3, &[])).expect("it lives");
    assert_eq!(rig.switch.next_deadline(), None);
    // One that takes its place goes on behind the messages that the peer knows of.
    let c = rig.join(Kind::Margay);
    rig.sent();
    rig.member(c, &data(&whole(0), b"c0"));
    assert_eq!(rig.sent_to(To::Peer), ["data 4.0#2 c0"]);
}

/// The peer has the first half for good, and nothing else of it has a number.
#[test]
fn a_frame_that_a_dead_member_only_began_is_passed_over() {
    let (mut rig, [a, _]) = Rig::two(Kind::Margay);
    rig.member(a, &data(&fragment(0, 0, 0, false), b"half"));
    rig.peer(&sack(0, &[])).expect("it lives");
    rig.sent();
    rig.switch.died(rig.now, a);
    assert_eq!(rig.sent_to(To::Peer), ["forward 1 0#0", "sack 4294967295"]);
    rig.peer(&sack(1, &[])).expect("it lives");
    rig.join(Kind::Margay);
    let c = rig.switch.members().active().next().expect("it has the first place");
    rig.member(c, &data(&whole(0), b"whole"));
    assert_eq!(rig.sent_to(To::Peer), ["data 2.0#1 whole"]);
}
