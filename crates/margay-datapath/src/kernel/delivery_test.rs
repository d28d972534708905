//! What the programs do where the host does not give its programs what was rewritten for them, and with fragments.

use super::*;
use crate::checksum::{fold, sum};

/// Before the tests' time began.
const LONG_AGO_NS: u64 = 1;

impl Rig {
    /// Changes the one entry.
    pub(super) fn alter(&self, change: impl FnOnce(&mut flow_entry)) {
        let key = self.0.maps.flows.keys().next().expect("one entry");
        let mut entry = self.entry();
        change(&mut entry);
        put(&self.0.maps.flows, &key, entry.bytes());
    }

    fn set_in_place(&self, in_place: bool) {
        put(&self.0.maps.in_place, &0_u32.to_ne_bytes(), &u32::from(in_place).to_ne_bytes());
    }
}

#[test]
fn a_flow_whose_packets_the_host_swallows_in_place_takes_the_way_by_sal0() {
    let app = sample::tuple4(TCP);
    let Some(rig) = rig(app, true, true, true) else { return };
    rig.set_in_place(true);
    let from = wire(true).reversed();
    let data = |rig: &Rig| rig.run(false, &segment(from, ACK, b"x")).0;
    assert_eq!((data(&rig), data(&rig)), (NEXT, NEXT));
    let waits = |entry: &mut flow_entry| entry.ingress.asked_ns = LONG_AGO_NS;

    // It answers in time, if late.
    rig.alter(waits);
    rig.run(true, &segment(app, ACK, b""));
    assert_eq!(data(&rig), NEXT);
    // It answers by way of the agent.
    rig.alter(|entry| (entry.ingress.asked_ns, entry.egress.last_ns) = (LONG_AGO_NS, 0));
    rig.alter(|entry| entry.flags &= !layout::FLOW_EGRESS);
    assert_eq!(data(&rig), NEXT);
    rig.alter(|entry| entry.flags |= layout::FLOW_EGRESS);
    // Acknowledgements need no answer.
    assert_eq!(rig.run(false, &segment(from, ACK, b"")).0, NEXT);
    assert!(!rig.counted().contains(&"undelivered"));

    assert_eq!(data(&rig), REDIRECT, "it says nothing");
    assert_eq!((data(&rig), rig.counted().contains(&"undelivered")), (REDIRECT, true));
    rig.run(true, &segment(app, ACK, b""));
    assert_eq!(data(&rig), REDIRECT, "for good");
}

#[test]
fn what_was_acknowledged_and_is_sent_again_shows_that_the_host_swallows_answers() {
    let app = sample::tuple4(TCP);
    let Some(rig) = rig(app, true, true, true) else { return };
    rig.set_in_place(true);
    let send = |rig: &Rig| rig.run(true, &segment(app, ACK, b"request")).0;
    let (known, end) = (1_u8, 0xffff_f000_u32.wrapping_add(7));
    let acknowledge = |up_to: u32, at_ns: u64| {
        rig.alter(|entry| {
            entry.unanswered_since_ns = 0;
            // The peer, too, sends again what this host has swallowed.
            entry.ingress.last_ns = u64::MAX / 2;
            (entry.ingress.numbers.acknowledgement, entry.ingress.numbers.flags) = (up_to, known);
            entry.egress.asked_ns = at_ns;
        });
    };
    let is_stalled = || rig.entry().flags & layout::FLOW_STALLED != 0;

    assert_eq!(send(&rig), REDIRECT);
    acknowledge(end.wrapping_sub(1), LONG_AGO_NS);
    assert_eq!((send(&rig), rig.counted().contains(&"undelivered")), (REDIRECT, false), "one byte is missing");
    acknowledge(end, u64::MAX / 2);
    assert_eq!((send(&rig), rig.counted().contains(&"undelivered")), (REDIRECT, false), "it came only now");
    acknowledge(end, LONG_AGO_NS);
    assert_eq!((send(&rig), rig.counted().contains(&"undelivered")), (REDIRECT, true));
    assert!(!is_stalled(), "the way by sal0 comes first");
    assert_eq!(rig.run(false, &segment(wire(true).reversed(), ACK, b"")).0, REDIRECT);

    acknowledge(end, LONG_AGO_NS);
    assert_eq!((send(&rig), is_stalled()), (NEXT, true), "then the encapsulation");
}

#[test]
fn what_a_box_is_to_see_comes_by_sal0_and_what_is_sent_again_is_no_sign_of_anything() {
    let app = sample::tuple4(TCP);
    let Some(rig) = rig(app, true, true, true) else { return };
    rig.set_in_place(true);
    let data = |rig: &Rig| rig.run(false, &segment(wire(true).reversed(), ACK, b"x")).0;
    assert_eq!(data(&rig), NEXT);
    rig.alter(|entry| entry.flags |= layout::FLOW_BY_SAL0);
    assert_eq!(data(&rig), REDIRECT);
    let end = 0xffff_f000_u32.wrapping_add(7);
    rig.alter(|entry| {
        entry.unanswered_since_ns = 0;
        (entry.ingress.numbers.acknowledgement, entry.ingress.numbers.flags) = (end, 1);
        entry.egress.asked_ns = LONG_AGO_NS;
    });
    let sent = |rig: &Rig| run_from(&rig.0.progs.app_egress, SAL0, &segment(app, ACK, b"request")).0;
    assert_eq!((sent(&rig), sent(&rig)), (REDIRECT, REDIRECT));
    assert_eq!(rig.entry().flags & layout::FLOW_STALLED, 0);
}

/// Cuts the payload of a packet in two.
fn halves(packet: &[u8], identification: u32) -> [Vec<u8>; 2] {
    let is_v4 = packet[0] >> 4 == 4;
    let (header, payload) = packet.split_at(if is_v4 { 20 } else { 40 });
    let at = payload.len() / 2 / 8 * 8;
    let half = |part: &[u8], offset: usize, more: u16| {
        let mut half = header.to_vec();
        if is_v4 {
            half[2..4].copy_from_slice(&((20 + part.len()) as u16).to_be_bytes());
            half[4..6].copy_from_slice(&(identification as u16).to_be_bytes());
            half[6..8].copy_from_slice(&((offset / 8) as u16 | more << 13).to_be_bytes());
            half[10..12].fill(0);
            let check = !fold(sum(&half));
            half[10..12].copy_from_slice(&check.to_be_bytes());
        } else {
            half[4..6].copy_from_slice(&((8 + part.len()) as u16).to_be_bytes());
            half[6] = 44;
            half.extend([header[6], 0]);
            half.extend((offset as u16 | more).to_be_bytes());
            half.extend(identification.to_be_bytes());
        }
        half.extend(part);
        half
    };
    [half(&payload[..at], 0, 1), half(&payload[at..], at, 0)]
}

#[test]
fn fragments_of_flows_are_the_agents_and_others_are_the_hosts() {
    for protocol in [TCP, UDP] {
        for v4 in [true, false] {
            let app = sample::tuple4(protocol);
            let Some(rig) = rig(app, v4, true, true) else { return };
            let from = Tuple { protocol, ..wire(v4).reversed() };
            let cut = |tuple: Tuple, identification: u32| {
                halves(&sample::packet(tuple, ACK, &[7; 200], Checksum::Complete), identification)
            };
            let [first, second] = cut(from, 1);
            assert_eq!(rig.run(false, &second).0, NEXT, "nobody knows yet what it is of");
            assert_eq!((rig.run(false, &first).0, rig.run(false, &second).0), (REDIRECT, REDIRECT));
            assert_eq!(rig.counted(), ["up_fragment"]);
            let with_port = |port: u16| Tuple { destination: SocketAddr::new(from.destination.ip(), port), ..from };
            let stranger = if v4 { "10.9.9.9:62080" } else { "[fd00::9]:62080" };
            let stranger = Tuple { source: stranger.parse().expect("literal"), ..from };
            for (tuple, identification) in [(with_port(80), 2), (stranger, 1)] {
                let [first, second] = cut(tuple, identification);
                assert_eq!((rig.run(false, &first).0, rig.run(false, &second).0), (NEXT, NEXT), "{tuple:?}");
            }
        }
    }
}
