//! What bears a virtual address comes in by no card, and leaves by none.

use std::net::IpAddr;

use libbpf_rs::ProgramMut;

use super::*;
use crate::kernel::interface::{Inside, Interface, set_insides};
use crate::prelude::{self, Before};

/// `REWRITTEN_INDEX` of `virtual.h`.
const REWRITTEN_INDEX: u16 = 0x4d47;
/// The interface of a test run: the loopback.
const INTERFACE: u32 = 1;

#[derive(Clone, Copy, Debug)]
enum Form {
    Plain,
    FirstFragment,
    LaterFragment,
    /// IPv4 options, or an extension header of IPv6 before all others.
    Options,
    /// Of no protocol that the programs know.
    Strange,
}

const FORMS: [Form; 5] = [Form::Plain, Form::FirstFragment, Form::LaterFragment, Form::Options, Form::Strange];

/// A datagram between these in one of the forms. The programs check no checksums.
fn packet(source: &str, destination: &str, form: Form) -> Vec<u8> {
    let address = |text: &str| SocketAddr::new(text.parse().expect("literal"), 5000);
    let tuple = Tuple { protocol: UDP, source: address(source), destination: address(destination) };
    let mut packet = datagram(tuple, b"sixteen of bytes");
    let is_v4 = packet[0] >> 4 == 4;
    let insert = |packet: &mut Vec<u8>, kind: u8, header: [u8; 8]| {
        packet.splice(40..40, [&[packet[6]], &header[1..]].concat());
        packet[6] = kind;
        packet[5] += 8;
    };
    match (form, is_v4) {
        (Form::Plain, _) => {}
        (Form::FirstFragment, true) => packet[6..8].copy_from_slice(&[0x20, 0]),
        (Form::LaterFragment, true) => packet[6..8].copy_from_slice(&[0, 1]),
        (Form::Options, true) => {
            packet[0] = 0x46;
            packet[3] += 4;
            packet.splice(20..20, [1, 1, 1, 0]);
        }
        (Form::FirstFragment, false) => insert(&mut packet, 44, [0, 0, 0, 1, 9, 9, 9, 9]),
        (Form::LaterFragment, false) => insert(&mut packet, 44, [0, 0, 0, 8, 9, 9, 9, 9]),
        (Form::Options, false) => insert(&mut packet, 60, [0, 0, 1, 4, 0, 0, 0, 0]),
        (Form::Strange, true) => packet[9] = 253,
        (Form::Strange, false) => packet[6] = 253,
    }
    packet
}

fn verdict(program: &ProgramMut<'_>, packet: &[u8]) -> i32 {
    let (data, mut out) = (frame(packet), vec![0; 4096]);
    let input = ProgramInput { data_in: Some(&data), data_out: Some(&mut out), ..Default::default() };
    let result = program.test_run(input).expect("a run");
    assert_eq!(result.data.and_then(|out| out.get(ETHERNET..)), Some(packet), "nothing is changed");
    result.return_value.cast_signed()
}

/// Verdicts of the programs of cards, with Ethernet frames and without.
fn ingress(rig: &Rig, packet: &[u8]) -> i32 {
    let verdicts = [&rig.0.progs.wire_ingress, &rig.0.progs.card_ingress].map(|program| verdict(program, packet));
    assert_eq!(verdicts[0], verdicts[1]);
    verdicts[0]
}

fn egress(rig: &Rig, packet: &[u8]) -> i32 {
    verdict(&rig.0.progs.card_egress, packet)
}

#[test]
fn virtual_addresses_are_not_reached_from_a_card_in_any_form() {
    let Some(rig) = programs(SAL0) else { return };
    for (source, destination) in [
        ("10.1.0.9", "198.18.0.1"),
        ("10.1.0.9", "198.19.255.254"),
        ("198.19.64.7", "10.1.0.2"),
        ("198.18.0.1", "198.18.30.1"),
        ("fd00::9", "fd5a:4c00::1"),
        ("fd00::9", "fd5a:4c00:ffff::1"),
        ("fd5a:4c00::8000:1", "fd00::2"),
        ("fd5a:4c00::1", "fd5a:4c00:1::7"),
    ] {
        for form in FORMS {
            let packet = packet(source, destination, form);
            assert_eq!(ingress(&rig, &packet), DROP, "{source} to {destination}, {form:?}, in");
            assert_eq!(egress(&rig, &packet), DROP, "{source} to {destination}, {form:?}, out");
        }
    }
    assert_eq!(rig.counted(), ["drop_virtual_ingress", "drop_virtual_egress"]);
}

#[test]
fn neighbours_of_the_virtual_prefixes_are_not_touched() {
    let Some(rig) = programs(SAL0) else { return };
    for (source, destination) in [
        ("10.1.0.9", "10.1.0.2"),
        ("198.17.255.255", "198.20.0.0"),
        ("fd00::9", "fd00::2"),
        ("fd5a:4bff:ffff::1", "fd5a:4c01::1"),
        // Words of an address beside the one that says it.
        ("fd00::fd5a:4c00:0:0", "fd00::fd5a:4c00"),
    ] {
        for form in FORMS {
            let packet = packet(source, destination, form);
            assert_eq!((ingress(&rig, &packet), egress(&rig, &packet)), (NEXT, NEXT), "{source}, {form:?}");
        }
    }
    assert_eq!(rig.counted(), <[&str; 0]>::default());
}

#[test]
fn a_host_has_the_virtual_addresses_that_it_is_given() {
    let other = Ranges { v4: "10.66.0.0/15".parse().expect("a range"), v6: "fdaa:1::/32".parse().expect("a range") };
    let Some(rig) = programs_of(SAL0, false, other) else { return };
    for (source, destination, verdict) in [
        ("10.1.0.9", "10.66.0.1", DROP),
        ("10.67.255.254", "10.1.0.2", DROP),
        ("fd00::9", "fdaa:1::1", DROP),
        ("10.1.0.9", "198.18.0.1", NEXT),
        ("198.18.0.1", "10.68.0.1", NEXT),
        ("fd5a:4c00::1", "fd00::9", NEXT),
    ] {
        for form in FORMS {
            let packet = packet(source, destination, form);
            let found = (ingress(&rig, &packet), egress(&rig, &packet));
            assert_eq!(found, (verdict, verdict), "{source} to {destination}, {form:?}");
        }
    }
}

/// An interface with these prefixes inside.
fn inside(index: u32, prefixes: &[(&str, u8)]) -> Interface {
    let prefix = |(address, bits): &(&str, u8)| -> (IpAddr, u8) { (address.parse().expect("literal"), *bits) };
    let inside = Inside::Prefixes(prefixes.iter().map(prefix).collect());
    Interface { index, is_ethernet: true, inside }
}

const OWN: [(&str, u8); 2] = [("172.17.0.0", 16), ("fd17::", 64)];
/// Of the inside, of elsewhere, and virtual ones: the host's and a service's.
const ADDRESSES: [[&str; 4]; 2] = [
    ["172.17.0.2", "172.18.0.2", "198.18.0.1", "198.18.30.1"],
    ["fd17::2", "fd17:0:0:1::2", "fd5a:4c00::1", "fd5a:4c00:1::7"],
];

#[test]
fn from_inside_its_own_addresses_reach_virtual_ones_and_are_answered() {
    let Some(rig) = programs(SAL0) else { return };
    set_insides(&rig.0.maps.insides, &[inside(INTERFACE, &OWN), inside(INTERFACE + 1, &[("0.0.0.0", 0)])])
        .expect("room");
    for [own, other, host, service] in ADDRESSES {
        for form in FORMS {
            for (source, destination, come_in, leave) in [
                (own, host, NEXT, DROP),
                (own, service, NEXT, DROP),
                (other, host, DROP, DROP),
                (service, own, DROP, NEXT),
                (host, own, DROP, NEXT),
                (service, other, DROP, DROP),
                (service, host, DROP, DROP),
            ] {
                let packet = packet(source, destination, form);
                assert_eq!(ingress(&rig, &packet), come_in, "{source} to {destination}, {form:?}, in");
                assert_eq!(egress(&rig, &packet), leave, "{source} to {destination}, {form:?}, out");
            }
        }
    }
}

#[test]
fn what_comes_from_the_hosts_own_address_goes_to_sal0_wherever_it_was_routed() {
    let Some(rig) = programs(SAL0) else { return };
    for (source, destination, leave) in [
        ("198.18.0.1", "10.1.0.9", REDIRECT),
        ("fd5a:4c00::1", "fd00::9", REDIRECT),
        ("198.18.0.2", "10.1.0.9", DROP),
        ("198.19.64.7", "10.1.0.9", DROP),
        ("fd5a:4c00::2", "fd00::9", DROP),
        ("fd5a:4c00:0:1::1", "fd00::9", DROP),
    ] {
        for form in FORMS {
            let packet = packet(source, destination, form);
            assert_eq!(egress(&rig, &packet), leave, "{source} to {destination}, {form:?}, out");
            assert_eq!(ingress(&rig, &packet), DROP, "{source} to {destination}, {form:?}, in");
        }
    }
}

#[test]
fn what_is_inside_follows_the_interfaces() {
    let Some(rig) = programs(SAL0) else { return };
    let [own, _, host, _] = ADDRESSES[0];
    let packet = packet(own, host, Form::Plain);
    let port = Interface { index: INTERFACE, is_ethernet: true, inside: Inside::Port };
    for (interfaces, come_in) in [
        (vec![inside(INTERFACE, &OWN)], NEXT),
        (vec![inside(INTERFACE, &[("172.17.0.0", 30)])], NEXT),
        (vec![inside(INTERFACE, &[("172.17.0.4", 30)])], DROP),
        (vec![Interface::card(INTERFACE)], DROP),
        (vec![port], NEXT),
        (vec![], DROP),
    ] {
        set_insides(&rig.0.maps.insides, &interfaces).expect("room");
        assert_eq!(ingress(&rig, &packet), come_in, "{interfaces:?}");
    }
}

#[test]
fn a_packet_rewritten_at_a_bridges_port_passes_the_bridge() {
    let app = sample::tuple4(TCP);
    let Some(rig) = rig(app, true, true, true) else { return };
    let rewritten = frame(&segment(app.reversed(), ACK, b"answer"));
    for program in [&rig.0.progs.wire_ingress, &rig.0.progs.card_ingress] {
        let run = |index| prelude::run(Before::Indexed(index), program, &rewritten);
        assert_eq!(run(REWRITTEN_INDEX), (NEXT, rewritten.clone()));
        assert_eq!(run(0), (DROP, rewritten.clone()));
    }
    // And takes that word nowhere else.
    assert_eq!(prelude::run(Before::Indexed(REWRITTEN_INDEX), &rig.0.progs.card_egress, &rewritten).0, DROP);
}

#[test]
fn the_tag_of_a_box_leaves_by_no_card() {
    let Some(rig) = programs(SAL0) else { return };
    let with = |tuple: Tuple, flags: u8, options: [u8; 12]| {
        let mut packet = segment(tuple, flags, b"");
        let at = packet.len() - options.len();
        packet[at..].copy_from_slice(&options);
        packet
    };
    let tag = [1, 1, 253, 8, 0x4d, 0x47, 9, 9, 9, 9, 1, 0];
    for (source, destination) in [("10.1.0.9", "10.1.0.2"), ("fd00::9", "fd00::2")] {
        let address = |text: &str| SocketAddr::new(text.parse().expect("literal"), 5000);
        let tuple = Tuple { protocol: TCP, source: address(source), destination: address(destination) };
        assert_eq!(egress(&rig, &with(tuple, SYN, tag)), DROP);
        assert_eq!(egress(&rig, &with(tuple, ACK, tag)), NEXT, "only SYNs are tagged");
        for other in [
            // What a connection of a grant bears.
            [253, 12, 0x4d, 0x47, 9, 9, 9, 9, 9, 9, 9, 9],
            [253, 8, 0x4d, 0x48, 9, 9, 9, 9, 1, 1, 1, 0],
            // After the end of the options.
            [1, 0, 253, 8, 0x4d, 0x47, 9, 9, 9, 9, 1, 0],
            // Malformed.
            [254, 1, 253, 8, 0x4d, 0x47, 9, 9, 9, 9, 1, 0],
        ] {
            assert_eq!(egress(&rig, &with(tuple, SYN, other)), NEXT, "{other:?}");
        }
    }
    assert_eq!(rig.counted(), ["drop_virtual_egress"]);
}
