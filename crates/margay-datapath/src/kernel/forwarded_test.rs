//! Packets to the agent say whether they were forwarded, made by a socket of this host, or come from outside.

use margay_core::chain::{OUTSIDE_HOP_LIMIT, mark_forwarded, mark_outside};

use super::*;

const CARD: u32 = 8;

/// What leaves `sal0` to the agent, with the flow cache and without it, of a packet that came by `from`, or by no
/// interface.
fn leave(rig: &Rig, from: u32, packet: &[u8]) -> Vec<u8> {
    let [cached, uncached] =
        [&rig.0.progs.app_egress, &rig.0.progs.app_egress_uncached].map(|program| leave_by(program, from, packet));
    assert_eq!(cached, uncached);
    cached
}

fn leave_by(program: &libbpf_rs::ProgramMut<'_>, from: u32, packet: &[u8]) -> Vec<u8> {
    let (verdict, out) = run_from(program, from, packet);
    assert_eq!(verdict, NEXT);
    out
}

#[test]
fn the_hop_limit_says_where_a_packet_comes_from() {
    let Some(rig) = programs(SAL0) else { return };
    for tuple in [sample::tuple4(UDP), sample::tuple6(UDP), sample::tuple4(TCP), sample::tuple6(TCP)] {
        let plain = if tuple.protocol == UDP { datagram(tuple, b"hello") } else { segment(tuple, SYN, b"") };
        let [mut forwarded, mut outside] = [plain.clone(), plain.clone()];
        mark_forwarded(&mut forwarded);
        mark_outside(&mut outside);
        assert_eq!(leave(&rig, 0, &plain), plain, "a program's hop limit stays");
        for packet in [&plain, &forwarded, &outside] {
            assert_eq!(leave(&rig, SAL0, packet), forwarded, "it is forwarded");
            assert_eq!(leave(&rig, CARD, packet), outside, "a container's");
        }
        for chosen in [&forwarded, &outside] {
            let taken = leave(&rig, 0, chosen);
            assert_eq!(sample::see(&taken).hop_limit, OUTSIDE_HOP_LIMIT - 1, "a program has chosen it");
        }
    }
}

#[test]
fn what_goes_up_from_a_card_is_not_marked() {
    let Some(rig) = programs(SAL0) else { return };
    let packet = segment(sample::tuple4(TCP), ACK, b"x");
    let mark = layout::UP_MARK;
    assert_eq!(run_marked(&rig.0.progs.app_egress, CARD, mark, &packet), (NEXT, packet));
}

#[test]
fn fragments_are_marked_as_whole_packets_are() {
    let Some(rig) = programs(SAL0) else { return };
    let mut fragment = datagram(sample::tuple4(UDP), b"hello");
    // More of them follow.
    fragment[6] = 0x20;
    mark_forwarded(&mut fragment);
    assert_eq!(leave(&rig, 0, &fragment)[8], OUTSIDE_HOP_LIMIT - 1);
    assert_eq!(leave(&rig, CARD, &fragment)[8], OUTSIDE_HOP_LIMIT);
    assert_eq!(leave(&rig, SAL0, &fragment), fragment);
}

#[test]
fn of_a_flow_of_a_named_socket_what_comes_from_outside_does_not_go_direct() {
    for app in [sample::tuple4(UDP), sample::tuple6(UDP), sample::tuple4(TCP), sample::tuple6(TCP)] {
        let Some(rig) = rig(app, true, true, true) else { return };
        let packet = if app.protocol == UDP { datagram(app, b"x") } else { segment(app, ACK, b"x") };
        let send = |rig: &Rig, from| run_from(&rig.0.progs.app_egress, from, &packet);
        assert_eq!(send(&rig, CARD).0, REDIRECT, "the flow may be a container's");
        rig.alter(|entry| entry.flags |= layout::FLOW_OF_SOCKET);
        let mut outside = packet.clone();
        mark_outside(&mut outside);
        assert_eq!(send(&rig, CARD), (NEXT, outside), "the agent refuses it");
        assert_eq!(send(&rig, 0).0, REDIRECT);
    }
}

#[test]
fn of_a_flow_at_a_box_only_what_was_forwarded_goes_direct() {
    for app in [sample::tuple4(UDP), sample::tuple6(UDP), sample::tuple4(TCP), sample::tuple6(TCP)] {
        let Some(rig) = rig(app, true, true, true) else { return };
        let packet = if app.protocol == UDP { datagram(app, b"x") } else { segment(app, ACK, b"x") };
        let send = |rig: &Rig, from| run_from(&rig.0.progs.app_egress, from, &packet);
        assert_eq!(send(&rig, 0).0, REDIRECT, "a program has it");
        rig.alter(|entry| entry.flags |= layout::FLOW_BY_SAL0);
        for from in [0, CARD] {
            let (verdict, out) = send(&rig, from);
            assert_eq!(verdict, NEXT);
            assert_ne!(sample::see(&out).hop_limit, FORWARDED_HOP_LIMIT, "the agent refuses it, without the mark");
        }
        assert_eq!(send(&rig, SAL0).0, REDIRECT);
    }
}
