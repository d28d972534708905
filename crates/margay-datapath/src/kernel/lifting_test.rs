//! A flow of datagrams whose direct packets went up, and that the kernel is to take.

use super::super::layout::{FLOW_ACCEPT, FLOW_EGRESS, FLOW_LIFTING, FLOW_SENT_UP, LIFT_AGAIN, LIFT_DONE, flow_lift};
use super::*;

impl Rig {
    /// The flow of these bits, which the agent is about to have accepted.
    fn lifted(app: Tuple, flags: u32) -> Option<Self> {
        let rig = rig(app, true, false, false)?;
        let key = layout::wire_key_of(&flow_of(app, false, false));
        put(&rig.0.maps.flows, key.bytes(), flow_entry { flags, ..rig.entry() }.bytes());
        Some(rig)
    }

    fn lift(&self, app: Tuple, flow: u32, is_last: bool) -> u32 {
        let wire = layout::wire_key_of(&flow_of(app, false, false));
        let mut bytes = flow_lift { wire, flow, is_last: is_last.into() }.bytes().to_vec();
        let input = ProgramInput { context_in: Some(&mut bytes), ..Default::default() };
        self.0.progs.lift_flow.test_run(input).expect("a run").return_value
    }

    /// Whether a datagram of the peer goes up.
    fn goes_up(&self) -> bool {
        let packet = datagram(datagrams_wire(true).reversed(), b"direct");
        let (verdict, out) = self.run(false, &packet);
        assert_eq!(verdict, REDIRECT);
        out == packet
    }
}

#[test]
fn a_flow_is_accepted_when_nothing_has_gone_up_since_it_was_asked_about() {
    let app = sample::tuple4(UDP);
    let Some(rig) = Rig::lifted(app, FLOW_EGRESS | FLOW_LIFTING | FLOW_SENT_UP) else { return };
    assert!(rig.goes_up(), "what went up before may wait still");
    assert_eq!((rig.lift(app, 99, false), rig.entry().flags), (LIFT_AGAIN, FLOW_EGRESS | FLOW_LIFTING));
    assert!(rig.goes_up());
    assert_eq!((rig.lift(app, 99, false), rig.entry().flags), (LIFT_AGAIN, FLOW_EGRESS | FLOW_LIFTING));
    assert_eq!((rig.lift(app, 99, false), rig.entry().flags), (LIFT_DONE, FLOW_EGRESS | FLOW_ACCEPT));
    assert!(!rig.goes_up());
    assert_eq!((rig.lift(app, 99, false), rig.entry().flags), (LIFT_DONE, FLOW_EGRESS | FLOW_ACCEPT));
    assert_eq!(rig.counted(), ["ingress_packets", "up_not_accepted"]);
}

#[test]
fn a_flow_whose_packets_never_pause_is_accepted_at_last() {
    let app = sample::tuple4(UDP);
    let Some(rig) = Rig::lifted(app, FLOW_LIFTING | FLOW_SENT_UP) else { return };
    assert!(rig.goes_up());
    assert_eq!((rig.lift(app, 99, true), rig.entry().flags), (LIFT_DONE, FLOW_ACCEPT));
}

#[test]
fn no_other_flow_is_accepted_and_none_that_the_agent_has_taken_back() {
    let app = sample::tuple4(UDP);
    let Some(rig) = Rig::lifted(app, FLOW_LIFTING) else { return };
    assert_eq!((rig.lift(app, 98, true), rig.entry().flags), (LIFT_DONE, FLOW_LIFTING));
    let Some(rig) = Rig::lifted(app, FLOW_EGRESS) else { return };
    assert_eq!((rig.lift(app, 99, true), rig.entry().flags), (LIFT_DONE, FLOW_EGRESS));
    assert!(rig.goes_up());
    assert_eq!(rig.entry().flags, FLOW_EGRESS, "nobody asks what goes up");
}
