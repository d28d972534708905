//! Members that join, drain and die.

use super::rig::{Rig, data, fragment, free, of_stream, sack, whole};
use crate::{Event, Failure, Kind, MEMBERS_MAX, To};

#[test]
fn one_that_joins_has_the_holes_pending_that_there_are() {
    let mut rig = Rig::new(crate::Config::default());
    let a = rig.join(Kind::Margay);
    rig.send(&whole(1), "A1");
    let (b, c) = (rig.join(Kind::Margay), rig.join(Kind::Foreign));
    rig.sent();
    rig.send(&whole(2), "B2");
    assert_eq!(rig.sent_to(To::Member(b)), ["mark 4294967295<0, data 0.0#2 B2"]);
    rig.send(&whole(3), "C3");
    assert_eq!(rig.sent_to(To::Member(c)), ["data 1.0#1 C3"], "0 is kept free for frame 0");
    rig.send(&whole(0), "C0");
    assert_eq!(rig.sent_to(To::Member(c)), ["data 0.0#0 C0"]);
    rig.wait(200);
    assert_eq!(rig.sent_to(To::Member(a)), ["mark 0<4"]);
}

#[test]
fn one_that_drains_is_given_no_new_frames_and_goes_when_its_chain_is_empty() {
    let (mut rig, [a, b]) = Rig::two(Kind::Margay);
    rig.send(&whole(0), "A");
    rig.send(&whole(2), "A");
    rig.member(a, &data(&whole(0), b"answer"));
    rig.switch.drain(rig.now, a);
    rig.sent();
    rig.send(&whole(3), "A");
    assert_eq!(rig.sent_to(To::Member(b)), ["mark 4294967295<1, data 0.0#3 A"]);
    rig.member(a, &sack(1, &[]));
    assert_eq!(rig.events(), [], "it waits for frame 1, which will not be its");
    rig.send(&whole(1), "A");
    rig.confirm(a, 1, 4);
    assert_eq!(rig.events(), [], "its answer has not come");
    rig.peer(&sack(0, &[])).expect("it lives");
    assert_eq!(rig.events(), [Event::Gone(a)]);
    assert_eq!(rig.switch.close().gone, [a]);
}

#[test]
fn one_that_drains_stays_while_the_plugin_says_that_it_owes() {
    let mut rig = Rig::new(crate::Config::default());
    rig.switch =
        crate::Switch::new(crate::Config::default(), super::rig::Script { owing: true, ..Default::default() }, 1);
    let a = rig.join(Kind::Foreign);
    rig.switch.drain(rig.now, a);
    assert_eq!(rig.events(), []);
    assert!(rig.switch.members().window_bytes(a).is_some());
}

#[test]
fn a_stream_leaves_a_member_that_drains_once_all_of_it_is_acknowledged() {
    let (mut rig, [a, b]) = Rig::two(Kind::Margay);
    rig.send(&of_stream(0, 7, 0), "A");
    rig.switch.drain(rig.now, a);
    rig.sent();
    rig.send(&of_stream(1, 7, 1), "A");
    assert_eq!(rig.sent_to(To::Member(a)), ["mark 1<2, data 1.7#1 A"], "it follows");
    rig.member(a, &sack(1, &[]));
    rig.send(&of_stream(2, 7, 2), "A");
    assert_eq!(rig.sent_to(To::Member(b)), ["mark 0<3, data 0.7#0 A"]);
    assert_eq!(rig.events(), [Event::Gone(a)]);
}

#[test]
fn what_a_dead_member_acknowledged_stays_so_and_what_is_safe_goes_elsewhere() {
    let (mut rig, [a, b]) = Rig::two(Kind::Margay);
    for tsn in 0..4 {
        rig.send(&whole(tsn), "As");
    }
    rig.member(a, &sack(0, &[(2, 2)]));
    rig.sent();
    rig.switch.died(rig.now, a);
    assert_eq!(rig.sent_to(To::Peer), ["sack 0"], "frame 2 was not acted on: it is in order, and 1 was missing");
    rig.send(&whole(1), "As");
    rig.send(&whole(2), "As");
    assert_eq!(rig.sent_to(To::Member(b)), ["mark 4294967295<4, data 0.0#1 As", "mark 4294967295<4, data 1.0#2 As"]);
    rig.send(&whole(0), "As");
    assert_eq!(rig.sent_to(To::Peer), ["sack 0"]);
    rig.member(a, &sack(3, &[]));
    assert_eq!(rig.sent(), [], "the dead say nothing");
}

#[test]
fn what_was_without_order_and_acknowledged_may_have_been_acted_on() {
    let (mut rig, [a, _]) = Rig::two(Kind::Margay);
    rig.send(&free(0), "Au");
    rig.send(&free(1), "Au");
    rig.member(a, &sack(u32::MAX, &[(2, 2)]));
    rig.sent();
    rig.switch.died(rig.now, a);
    assert_eq!(rig.sent_to(To::Peer), ["sack 4294967295 2-2"]);
}

#[test]
fn what_is_not_safe_is_refused_by_another_member_or_ends_the_connection() {
    for has_refuser in [true, false] {
        let mut rig = Rig::new(crate::Config::default());
        let (a, b) = (rig.join(Kind::Margay), rig.join(Kind::Margay));
        let script = super::rig::Script { refuser: has_refuser.then_some(b), ..Default::default() };
        rig.switch = crate::Switch::new(crate::Config::default(), script, 1);
        assert_eq!([rig.join(Kind::Margay), rig.join(Kind::Margay)], [a, b]);
        rig.send(&whole(0), "Au");
        rig.switch.died(rig.now, a);
        rig.sent();
        let sent = rig.peer(&data(&whole(0), b"Au"));
        if has_refuser {
            assert_eq!(sent, Ok(()));
            assert_eq!(rig.sent_to(To::Member(b)), ["mark 4294967295<1, data 0.0#0 refused"], "and not the frame");
        } else {
            let failure = Failure::Unsafe(crate::Csn(0));
            assert_eq!((sent, rig.events()), (Err(failure), [Event::Failed(failure)].into()));
            assert_eq!(rig.peer(&data(&whole(1), b"B")), Err(failure), "it is over");
        }
    }
}

#[test]
fn a_frame_that_is_half_acknowledged_goes_elsewhere_whole_or_ends_the_connection() {
    let (mut rig, [a, b]) = Rig::two(Kind::Margay);
    rig.send(&whole(0), "B");
    rig.send(&fragment(1, 1, 0, false), "As");
    rig.send(&fragment(2, 1, 1, true), "end");
    rig.member(a, &sack(0, &[]));
    rig.sent();
    rig.switch.died(rig.now, a);
    assert_eq!(rig.sent_to(To::Peer), ["sack 4294967295"]);
    rig.send(&fragment(2, 1, 1, true), "end");
    assert_eq!(rig.sent(), []);
    rig.send(&fragment(1, 1, 0, false), "As");
    rig.send(&fragment(2, 1, 1, true), "end");
    assert_eq!(rig.sent_to(To::Member(b)), ["mark 0<3, data 1.0#1 As", "mark 0<3, data 2.0#1 end"]);

    // Of this one the peer has been told for good.
    rig.member(b, &sack(1, &[]));
    rig.switch.died(rig.now, b);
    let failure = Failure::PartlyAcknowledged(crate::Csn(1));
    assert_eq!(rig.events(), [Event::Failed(failure)]);
}

#[test]
fn of_a_stream_what_follows_a_missing_frame_goes_elsewhere_with_it() {
    let (mut rig, [a, b]) = Rig::two(Kind::Margay);
    rig.send(&of_stream(0, 7, 0), "As");
    rig.send(&of_stream(2, 7, 2), "As");
    rig.member(a, &sack(1, &[]));
    rig.switch.died(rig.now, a);
    assert_eq!(rig.sent_to(To::Peer), ["sack 0 2-2", "sack 0"], "A has frame 2, and could not give it on");
    rig.send(&of_stream(2, 7, 2), "As");
    assert_eq!(rig.sent(), [], "1 is to be first");
    rig.send(&of_stream(1, 7, 1), "As");
    rig.send(&of_stream(2, 7, 2), "As");
    assert_eq!(rig.sent_to(To::Member(b)), ["mark 0<2, data 0.7#0 As", "mark 1<3, data 1.7#1 As"]);
}

#[test]
fn a_pinned_connection_ends_with_its_member() {
    let (mut rig, [a, _]) = Rig::two(Kind::Margay);
    rig.send(&whole(0), "Ap");
    rig.send(&whole(1), "B");
    assert_eq!(rig.sent_to(To::Member(a)).len(), 2, "B is not asked for");
    rig.switch.died(rig.now, a);
    assert_eq!(rig.peer(&data(&whole(2), b"B")), Err(Failure::PinnedMemberGone));
}

#[test]
fn there_is_an_end_to_members_and_a_place_is_used_again() {
    let mut rig = Rig::new(crate::Config::default());
    let members: [_; MEMBERS_MAX] = core::array::from_fn(|_| rig.join(Kind::Margay));
    let joining =
        crate::Joining { kind: Kind::Margay, to_member: crate::Lsn(0), from_member: crate::Lsn(0), window_bytes: 1 };
    assert_eq!(rig.switch.join(&joining), Err(crate::Full));
    rig.switch.died(rig.now, members[5]);
    let again = rig.switch.join(&joining).expect("a place");
    assert_ne!(again, members[5]);
    rig.sent();
    rig.member(members[5], &data(&whole(0), b"of the dead"));
    assert_eq!(rig.sent(), []);
}
