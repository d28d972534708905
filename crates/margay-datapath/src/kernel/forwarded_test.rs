//! Packets to the agent say whether they were forwarded, or made by a socket of this host.

use margay_core::chain::mark_forwarded;

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
fn only_what_came_in_by_sal0_has_the_hop_limit_of_what_was_forwarded() {
    let Some(rig) = programs(SAL0) else { return };
    for tuple in [sample::tuple4(UDP), sample::tuple6(UDP), sample::tuple4(TCP), sample::tuple6(TCP)] {
        let plain = if tuple.protocol == UDP { datagram(tuple, b"hello") } else { segment(tuple, SYN, b"") };
        let mut marked = plain.clone();
        mark_forwarded(&mut marked);
        assert_eq!(leave(&rig, SAL0, &plain), marked, "it is forwarded");
        assert_eq!(leave(&rig, SAL0, &marked), marked);
        for from in [0, CARD] {
            assert_eq!(leave(&rig, from, &plain), plain, "another hop limit stays");
            let taken = leave(&rig, from, &marked);
            assert_eq!(sample::see(&taken).hop_limit, FORWARDED_HOP_LIMIT - 1, "a program has chosen it");
        }
    }
}

#[test]
fn a_fragment_is_forwarded_as_a_whole_packet_is() {
    let Some(rig) = programs(SAL0) else { return };
    let mut fragment = datagram(sample::tuple4(UDP), b"hello");
    // More of them follow.
    fragment[6] = 0x20;
    mark_forwarded(&mut fragment);
    assert_eq!(leave(&rig, 0, &fragment)[8], FORWARDED_HOP_LIMIT - 1);
    assert_eq!(leave(&rig, SAL0, &fragment), fragment);
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
            assert_eq!((verdict, &out), (NEXT, &packet), "the agent refuses it, without the mark");
        }
        assert_eq!(send(&rig, SAL0).0, REDIRECT);
    }
}
