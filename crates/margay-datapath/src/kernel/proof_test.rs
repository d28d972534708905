//! What a SYN must bear to take a flow of a grant, and what becomes of any other.

use super::*;

/// What the listener sees in the place of the option.
const NOPS: [u8; 16] = [1; 16];

/// The TCP options of a packet.
fn options(packet: &[u8]) -> &[u8] {
    let ip_len = ip_len(packet);
    &packet[ip_len + 20..ip_len + usize::from(packet[ip_len + 12] >> 4) * 4]
}

/// A client's program's.
const OWN_PORT: u16 = 50_000;

/// Each family here with each on the wire.
fn families() -> impl Iterator<Item = (Tuple, bool)> {
    [sample::tuple4(TCP), sample::tuple6(TCP)].into_iter().flat_map(|app| [(app, true), (app, false)])
}

#[test]
fn the_option_of_a_syn_in_literal_bytes() {
    // As in the examples of SipHash's authors: key 00 to 0f, message 00 to 09 and two zeros.
    let app = from_port(sample::tuple4(TCP), 0x0809);
    let Some(rig) = granting(Role::Initiator, app, true) else { return };
    let key = GrantKey(array::from_fn(|at| at as u8));
    rig.grant(&Grant { key, local_port: 0x0001, remote_port: 0x0203, ..granted(Role::Initiator, app) });
    let (verdict, out) = rig.run(true, &numbered(app, SYN, (0x0405_0607, 0), b""));
    assert_eq!((verdict, sample::see(&out).sequence), (REDIRECT, 0x0405_0607));
    let before = [1, 1, 8, 10, 0, 0, 0, 9, 0, 0, 0, 8];
    let option = [253, 16, 0x4d, 0x47, 0x08, 0x09, 0, 0, 0xc1, 0x29, 0x3f, 0x31, 0x0f, 0x3e, 0x71, 0x27];
    assert_eq!(options(&out), [&before[..], &option].concat());
}

/// A packet as it arrives in a world where both hosts of the rig have changed places: no checksum changes by that.
fn other_way(packet: &[u8]) -> Vec<u8> {
    let mut packet = packet.to_vec();
    let (at, len) = if packet[0] >> 4 == 4 { (12, 4) } else { (8, 16) };
    packet[at..at + 2 * len].rotate_left(len);
    packet
}

#[test]
fn what_one_kernel_sends_the_other_takes() {
    for (app, wire_v4) in families() {
        let Some(client) = granting(Role::Initiator, app, wire_v4) else { return };
        let Some(server) = granting(Role::Responder, app, wire_v4) else { return };
        let (local_port, remote_port) = (REMOTE_PORT, LOCAL_PORT);
        client.grant(&Grant { local_port, remote_port, ..granted(Role::Initiator, app) });
        for flow in 0..3 {
            let (verdict, sent) = client.run(true, &syn(from_port(app, 50_000 + flow)));
            let tuple = sample::see(&sent).tuple;
            let ports = (tuple.source.port(), tuple.destination.port());
            assert_eq!((verdict, ports), (REDIRECT, (REMOTE_PORT + flow, LOCAL_PORT)));
            let (verdict, out) = server.run(false, &other_way(&sent));
            let mut seen = app.reversed();
            seen.source.set_port(50_000 + flow);
            assert_eq!((verdict, sample::see(&out).tuple), (REDIRECT, seen));
            assert_eq!(options(&out), [options(&syn(app)), &NOPS].concat(), "the listener sees nothing of it");
        }
        assert_eq!((client.counted(), server.counted().len()), (vec!["egress_packets", "taken"], 2));
        assert_eq!((server.count_of("opened"), server.flows()), (3, 6));
    }
}

#[test]
fn who_has_read_the_grant_takes_no_flow_and_spoils_none() {
    for (app, wire_v4) in families() {
        let Some(rig) = granting(Role::Responder, app, wire_v4) else { return };
        let from = |flow| wire_of(wire_v4, 0, flow).reversed();
        let bears = |option: &[u8]| with_options(syn(from(3)), option);
        let mut right = option_of(KEY, OWN_PORT, from(3), SEQUENCE);
        let other_key = option_of(GrantKey(*b"another's grant "), OWN_PORT, from(3), SEQUENCE);
        let of_other_flow = option_of(KEY, OWN_PORT, from(4), SEQUENCE);
        let of_other_number = option_of(KEY, OWN_PORT, from(3), SEQUENCE + 1);
        let swapped = option_of(KEY, OWN_PORT, from(3).reversed(), SEQUENCE);
        let of_no_port = option_of(KEY, 0, from(3), SEQUENCE);
        let data = with_options(segment(from(3), SYN, b"data of a reader"), &right);
        let last = with_options(syn(from(3)), &[&right[..], &[1; 4]].concat());
        let mut unproved = vec![
            ("no option", syn(from(3))),
            ("no options at all", bare(from(3))),
            ("another grant's key", bears(&other_key)),
            ("another flow's", bears(&of_other_flow)),
            ("another sequence number's", bears(&of_other_number)),
            ("of the other direction", bears(&swapped)),
            ("of no program's port", bears(&of_no_port)),
            ("with data", data),
            ("not the last option", last),
        ];
        for at in 0..right.len() {
            right[at] ^= 1;
            unproved.push(("a bit is another", bears(&right)));
            right[at] ^= 1;
        }
        let count = unproved.len() as u64;
        for (why, packet) in unproved {
            assert_eq!(rig.run(false, &packet).0, DROP, "{why}");
        }
        assert_eq!(rig.counted(), ["drop_unproved"]);
        assert_eq!((rig.count_of("drop_unproved"), rig.flows()), (count, 0));
        assert_eq!(rig.run(false, &bears(&right)).0, REDIRECT, "the flow is still there for whom it was granted to");
        assert_eq!((rig.count_of("opened"), rig.flows()), (1, 2));
    }
}

/// A SYN that has no options.
fn bare(tuple: Tuple) -> Vec<u8> {
    let mut packet = syn(tuple);
    let ip_len = ip_len(&packet);
    packet.truncate(ip_len + 20);
    packet[ip_len + 12] = 5 << 4;
    complete(packet)
}

#[test]
fn a_flow_that_is_open_takes_no_other_syn() {
    // By a grant or without: once the program's socket is gone, its listener would take it for another connection.
    let app = sample::tuple4(TCP);
    let from = wire(true).reversed();
    let Some(rig) = granting(Role::Responder, app, true) else { return };
    rig.run(false, &proved(app, from));
    let mut numbered_otherwise = syn(from);
    numbered_otherwise[24..28].copy_from_slice(&[1, 2, 3, 4]);
    for step in 0..3 {
        for packet in [syn(from), proved(app, from), complete(numbered_otherwise.clone())] {
            assert_eq!(rig.run(false, &packet).0, DROP, "step {step}");
        }
        assert_eq!(rig.entry_of(app).expect("opened").1.ingress.segments, 1 + step);
        if step < 2 {
            rig.run(false, &segment(from, if step == 0 { ACK } else { ACK | FIN }, b""));
        }
    }
    assert_eq!(rig.count_of("drop_unproved"), 9);

    let Some(rig) = super::super::rig(app, true, true, true) else { return };
    assert_eq!(rig.run(false, &segment(from, ACK, b"")).0, REDIRECT);
    assert_eq!(rig.run(false, &syn(from)).0, DROP);
    assert_eq!((rig.counted(), rig.count_of("drop_unproved")), (vec!["ingress_packets", "drop_unproved"], 1));
}

#[test]
fn a_syn_that_cannot_bear_the_option_is_the_agents() {
    for app in [sample::tuple4(TCP), sample::tuple6(TCP)] {
        let Some(rig) = granting(Role::Initiator, app, true) else { return };
        // The usual ones are 12 bytes; of 40 that a header has room for, 16 are the option's.
        for packet in [segment(app, SYN, b"data of a fast open"), with_options(syn(app), &[1; 16])] {
            assert_eq!(rig.run(true, &packet), (NEXT, packet.clone()));
        }
        assert_eq!((rig.flows(), rig.count_of("taken")), (0, 0));
        let (verdict, out) = rig.run(true, &with_options(syn(app), &[1; 12]));
        assert_eq!((verdict, options(&out).len(), sample::see(&out).flags), (REDIRECT, 40, SYN));
    }
}
