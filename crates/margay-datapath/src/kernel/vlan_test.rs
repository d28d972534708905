//! Packets of VLANs: the kernel has taken their tags off when the programs see them.

use super::*;
use crate::prelude::{self, Before};

/// What `wire_ingress` does with a packet whose tag had this control information: verdict, and the IP packet that
/// came out.
fn run_tagged(rig: &Rig, control: u16, packet: &[u8]) -> (i32, Vec<u8>) {
    let (verdict, out) = prelude::run(Before::Tagged(control), &rig.0.progs.wire_ingress, &frame(packet));
    (verdict, out[ETHERNET..].to_vec())
}

#[test]
fn a_packet_of_a_vlan_is_its_sub_interfaces() {
    for wire_v4 in [true, false] {
        for accept in [true, false] {
            let Some(rig) = rig(sample::tuple4(TCP), wire_v4, true, accept) else { return };
            let packet = segment(wire(wire_v4).reversed(), ACK, b"answer");
            for control in [7, 0xe007, 4095] {
                assert_eq!(run_tagged(&rig, control, &packet), (NEXT, packet.clone()), "{control:#x}");
            }
            assert_eq!(rig.counted(), <[&str; 0]>::default());
        }
    }
}

#[test]
fn a_priority_alone_makes_no_vlan() {
    for wire_v4 in [true, false] {
        let app = sample::tuple4(TCP);
        let Some(rig) = rig(app, wire_v4, true, true) else { return };
        let (verdict, out) = run_tagged(&rig, 0xa000, &segment(wire(wire_v4).reversed(), ACK, b"answer"));
        let Seen { tuple, payload, .. } = sample::see(&out);
        assert_eq!((verdict, tuple, payload), (REDIRECT, app.reversed(), b"answer".to_vec()));
        assert_eq!(rig.counted(), ["ingress_packets"]);
        let forged = segment(app.reversed(), ACK, b"forged");
        assert_eq!(run_tagged(&rig, 0xa000, &forged), (DROP, forged));
    }
}
