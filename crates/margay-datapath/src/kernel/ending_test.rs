//! Which FIN and which RST end a connection: those that its TCP takes (RFC 5961).

use margay_core::Direction;

use super::opening::numbered;
use super::*;
use crate::kernel::layout::{SEEN_FIN_EGRESS, SEEN_FIN_INGRESS, SEEN_RST_INGRESS};

/// What the application says next, and what it expects.
const OWN: u32 = 0xffff_ff00;
const PEER: u32 = 0xffff_fff0;

/// A connection whose application has had all until [`PEER`], and has said so.
struct Talk {
    rig: Rig,
    app: Tuple,
    answers: Tuple,
}

fn talk(wire_v4: bool) -> Option<Talk> {
    let app = if wire_v4 { sample::tuple4(TCP) } else { sample::tuple6(TCP) };
    let talk = Talk { rig: rig(app, wire_v4, true, true)?, app, answers: wire(wire_v4).reversed() };
    talk.says(ACK, (OWN, PEER), b"");
    Some(talk)
}

impl Talk {
    fn says(&self, flags: u8, numbers: (u32, u32), payload: &[u8]) {
        assert_eq!(self.rig.run(true, &numbered(self.app, flags, numbers, payload)).0, REDIRECT);
    }

    fn hears(&self, flags: u8, sequence: u32, payload: &[u8]) {
        let packet = numbered(self.answers, flags, (sequence, OWN), payload);
        assert_eq!(self.rig.run(false, &packet).0, REDIRECT, "the application decides for itself");
    }

    fn seen(&self) -> u32 {
        self.rig.entry().seen
    }
}

#[test]
fn a_reset_counts_at_the_very_number_that_is_expected() {
    for wire_v4 in [true, false] {
        let Some(talk) = talk(wire_v4) else { return };
        let around = [1, 2, 1000, 65_535, 0x4000_0000, 0x8000_0000, 0xc000_0000, u32::MAX];
        for sequence in around.map(|far| PEER.wrapping_add(far)) {
            talk.hears(RST, sequence, b"");
            talk.hears(RST | ACK, sequence, b"");
            assert_eq!(talk.seen(), 0, "{sequence:#x}");
        }
        talk.hears(RST, PEER, b"");
        assert_eq!(talk.seen(), SEEN_RST_INGRESS);
    }
}

#[test]
fn a_reset_of_which_nothing_is_known_here_is_the_agents_to_judge() {
    let Some(rig) = rig(sample::tuple4(TCP), true, true, true) else { return };
    rig.run(false, &numbered(wire(true).reversed(), RST, (PEER, OWN), b""));
    let entry = rig.entry();
    let state = layout::state_of(&layout::wire_key_of(&flow_of(sample::tuple4(TCP), true, true)), &entry);
    assert_eq!((entry.seen, state.unjudged.reset, state.unjudged.end), (0, Some(PEER), None));
}

#[test]
fn a_fin_counts_when_it_is_acknowledged() {
    for wire_v4 in [true, false] {
        let Some(talk) = talk(wire_v4) else { return };
        talk.says(FIN | ACK, (OWN, PEER), b"");
        for far in [5000, 0x4000_0000, 0x8000_0000, u32::MAX - 3] {
            talk.hears(FIN | ACK, PEER.wrapping_add(far), b"");
        }
        talk.says(ACK, (OWN.wrapping_add(1), PEER), b"");
        assert_eq!(talk.seen(), SEEN_FIN_EGRESS, "made up");
        // The last data is lost at first, and the FIN before it waits for it.
        talk.hears(FIN | ACK, PEER.wrapping_add(20), b"");
        talk.hears(FIN | ACK, PEER.wrapping_add(7000), b"");
        talk.says(ACK, (OWN.wrapping_add(1), PEER), b"");
        talk.hears(ACK, PEER, &[7; 20]);
        assert_eq!(talk.seen(), SEEN_FIN_EGRESS);
        talk.says(ACK, (OWN.wrapping_add(1), PEER.wrapping_add(21)), b"");
        assert_eq!(talk.seen(), SEEN_FIN_EGRESS | SEEN_FIN_INGRESS);
        let ends: Vec<_> = super::super::Seen(talk.seen()).ends().collect();
        assert_eq!(ends, [(Direction::Egress, FIN), (Direction::Ingress, FIN)]);
    }
}

#[test]
fn a_fin_that_is_acknowledged_already_counts_when_it_comes_again() {
    let Some(talk) = talk(true) else { return };
    talk.hears(FIN | ACK, PEER.wrapping_sub(11), &[7; 10]);
    assert_eq!(talk.seen(), SEEN_FIN_INGRESS);
    assert_eq!(super::super::Seen(2 | 16).ends().collect::<Vec<_>>(), [(Direction::Egress, RST)]);
}
