//! Flows that the programs open by themselves.

use std::array;
use std::hash::Hasher;
use std::time::Duration;

use margay_core::Role;
use margay_core::entry::{GRANT_RECORD_LEN, Grant, GrantKey};
use siphasher::sip::SipHasher24;

use super::*;
use crate::checksum::{fold, pseudo, sum};
use crate::clock;
use crate::kernel::layout::{
    FLOW_ACCEPT, FLOW_EGRESS, FLOW_FRESH, FLOW_UNTOLD, PATH_HELD, SEEN_OPENED, SEEN_OVER, SEEN_RST_INGRESS, SEEN_TAKEN,
    offer, spare, wire_key,
};

const OPENED: u32 = FLOW_EGRESS | FLOW_ACCEPT;
const ANSWERED: u32 = OPENED | FLOW_UNTOLD;
const FRESH: u32 = ANSWERED | FLOW_FRESH;
/// Of every packet of [`segment`].
const SEQUENCE: u32 = 0xffff_f000;
const GRANT: FlowId = FlowId(500);
const FIRST_FLOW: u32 = 1000;
const COUNT: u16 = 70;
const KEY: GrantKey = GrantKey(*b"key of one grant");

#[path = "proof_test.rs"]
mod proof;

/// A grant of flows of `app` by the wire addresses of this rig, for ten seconds from now.
fn granted(role: Role, app: Tuple) -> Grant {
    let mut app = app;
    if role == Role::Initiator {
        app.source.set_port(0);
    }
    Grant {
        id: GRANT,
        role,
        app,
        path: PATH,
        local_port: LOCAL_PORT,
        remote_port: REMOTE_PORT,
        first_flow: FlowId(FIRST_FLOW),
        count: COUNT,
        until: clock::now() + Duration::from_secs(10),
        ports: array::from_fn(|flow| app.destination.port().wrapping_add(flow as u16)),
        key: KEY,
        record: [0; GRANT_RECORD_LEN],
    }
}

/// The programs with that grant and its path, and no flow.
fn granting(role: Role, app: Tuple, wire_v4: bool) -> Option<Rig> {
    granting_in_place(role, app, wire_v4, false)
}

fn granting_in_place(role: Role, app: Tuple, wire_v4: bool, in_place: bool) -> Option<Rig> {
    let rig = programs_in_place(SAL0, in_place)?;
    rig.lead(wire_v4, 0);
    rig.beat(clock::now().micros() * 1000);
    rig.grant(&granted(role, app));
    Some(rig)
}

impl Rig {
    /// Makes the path stand at the wire addresses.
    fn lead(&self, wire_v4: bool, flags: u32) {
        let (wire, maps) = (wire(wire_v4), &self.0.maps);
        let path = WirePath {
            local: wire.source.ip(),
            remote: wire.destination.ip(),
            next_hop: wire.destination.ip(),
            ifindex: 1,
            mtu: 1500,
            stall_us: STALL_US,
            held: flags & PATH_HELD != 0,
            watched: false,
        };
        let path = path_entry { flags, ..layout::path_entry_of(&path) };
        put(&maps.paths, &PATH.0.to_ne_bytes(), path.bytes());
        let leads = layout::pair_value { path: PATH.0, flags, told_ns: 0 };
        put(&maps.pairs, layout::pair_of(&path).bytes(), leads.bytes());
    }

    fn grant(&self, granted: &Grant) {
        let maps = &self.0.maps;
        if granted.role == Role::Responder {
            return put(&maps.grants, layout::grant_key_of(granted).bytes(), layout::grant_of(granted).bytes());
        }
        let offered = offer { grants: [0, 0, 0, 0, 0, granted.id.0, 0, 0] };
        put(&maps.offers, layout::offer_key_of(granted.app.destination).bytes(), offered.bytes());
        put(&maps.spares, &granted.id.0.to_ne_bytes(), layout::spare_of(granted).bytes());
    }

    fn flows(&self) -> usize {
        self.0.maps.flows.keys().count() + self.0.maps.apps.keys().count()
    }

    /// The entry of a five-tuple, by both maps.
    fn entry_of(&self, app: Tuple) -> Option<(wire_key, flow_entry)> {
        let key = get::<wire_key>(&self.0.maps.apps, layout::app_key_of(&app.into()).bytes())?;
        Some((key, get::<flow_entry>(&self.0.maps.flows, key.bytes())?))
    }

    fn forget(&self) {
        let maps = &self.0.maps;
        maps.apps.keys().for_each(|key| maps.apps.delete(&key).expect("its own key"));
        maps.flows.keys().for_each(|key| maps.flows.delete(&key).expect("its own key"));
    }

    fn events(&self) -> Ring<flow_event> {
        Ring::new(MapHandle::try_from(&self.0.maps.events).expect("a map")).expect("a ring")
    }
}

/// What was opened is told of: flow and five-tuple.
fn told(ring: &Ring<flow_event>) -> Vec<(u32, FlowKey)> {
    let opened = ring.take().into_iter().filter(|event| event.seen & SEEN_OPENED != 0);
    opened.map(|event| (event.flow, layout::flow_key_of(&event.wire))).collect()
}

/// A flow's place on the wire: as packets leave this host.
fn wire_of(wire_v4: bool, local: u16, remote: u16) -> Tuple {
    let mut wire = wire(wire_v4);
    wire.source.set_port(LOCAL_PORT.wrapping_add(local));
    wire.destination.set_port(REMOTE_PORT.wrapping_add(remote));
    wire
}

fn from_port(app: Tuple, port: u16) -> Tuple {
    let mut app = app;
    app.source.set_port(port);
    app
}

fn syn(tuple: Tuple) -> Vec<u8> {
    segment(tuple, SYN, b"")
}

/// A SYN with these options more, a multiple of four bytes.
fn with_options(mut packet: Vec<u8>, options: &[u8]) -> Vec<u8> {
    let ip_len = ip_len(&packet);
    let header_len = usize::from(packet[ip_len + 12] >> 4) * 4;
    packet.splice(ip_len + header_len..ip_len + header_len, options.iter().copied());
    packet[ip_len + 12] = ((header_len + options.len()) as u8 / 4) << 4;
    complete(packet)
}

/// What a SYN that leaves with this tuple and sequence number bears, by the words of the wire's description.
fn option_of(GrantKey(key): GrantKey, tuple: Tuple, sequence: u32) -> Vec<u8> {
    let mut hasher = SipHasher24::new_with_key(&key);
    hasher.write(&tuple.source.port().to_be_bytes());
    hasher.write(&tuple.destination.port().to_be_bytes());
    hasher.write(&sequence.to_be_bytes());
    [&[253, 12, b'M', b'G'][..], &hasher.finish().to_le_bytes()].concat()
}

/// A SYN that takes a flow of the grant.
fn proved(tuple: Tuple) -> Vec<u8> {
    with_options(syn(tuple), &option_of(KEY, tuple, SEQUENCE))
}

/// A packet whose first option is an MSS.
fn with_mss(tuple: Tuple, flags: u8, mss: u16) -> Vec<u8> {
    let mut packet = segment(tuple, flags, b"");
    let ip_len = ip_len(&packet);
    let [high, low] = mss.to_be_bytes();
    packet[ip_len + 20..ip_len + 24].copy_from_slice(&[2, 4, high, low]);
    packet[ip_len + 24..].fill(1);
    complete(packet)
}

/// A packet with its own sequence number and acknowledgement.
pub(in crate::kernel) fn numbered(
    tuple: Tuple,
    flags: u8,
    (sequence, acknowledgement): (u32, u32),
    payload: &[u8],
) -> Vec<u8> {
    let mut packet = segment(tuple, flags, payload);
    let at = if tuple.source.is_ipv4() { 20 } else { 40 } + 4;
    packet[at..at + 4].copy_from_slice(&sequence.to_be_bytes());
    packet[at + 4..at + 8].copy_from_slice(&acknowledgement.to_be_bytes());
    complete(packet)
}

fn ip_len(packet: &[u8]) -> usize {
    if packet[0] >> 4 == 4 { 20 } else { 40 }
}

/// What the application says when it has had a bare FIN of [`segment`].
fn acknowledging(app: Tuple) -> Vec<u8> {
    numbered(app, ACK, (0xffff_f001, 0xffff_f001), b"")
}

/// With the lengths and checksums that belong to it.
pub(in crate::kernel) fn complete(mut packet: Vec<u8>) -> Vec<u8> {
    let (ip_len, len) = (ip_len(&packet), packet.len() as u16);
    if ip_len == 20 {
        packet[2..4].copy_from_slice(&len.to_be_bytes());
        packet[10..12].fill(0);
        let check = !fold(sum(&packet[..20]));
        packet[10..12].copy_from_slice(&check.to_be_bytes());
    } else {
        packet[4..6].copy_from_slice(&(len - 40).to_be_bytes());
    }
    packet[ip_len + 16..ip_len + 18].fill(0);
    let addresses = if ip_len == 20 { sum(&packet[12..20]) } else { sum(&packet[8..40]) };
    let transport = &packet[ip_len..];
    let check = !fold(addresses + pseudo(TCP, transport.len() as u32) + sum(transport));
    packet[ip_len + 16..ip_len + 18].copy_from_slice(&check.to_be_bytes());
    packet
}

fn mss_of(packet: &[u8]) -> u16 {
    let at = if packet[0] >> 4 == 4 { 20 } else { 40 } + 22;
    u16::from_be_bytes([packet[at], packet[at + 1]])
}

#[test]
fn a_syn_takes_a_flow_of_a_grant_and_goes_direct() {
    for app in [sample::tuple4(TCP), sample::tuple6(TCP)] {
        for wire_v4 in [true, false] {
            let Some(rig) = granting(Role::Initiator, app, wire_v4) else { return };
            for flow in 0..3 {
                let app = from_port(app, 50_000 + flow);
                let (verdict, out) = rig.run(true, &syn(app));
                let Seen { tuple, flags, .. } = sample::see(&out);
                assert_eq!((verdict, tuple, flags), (REDIRECT, wire_of(wire_v4, flow, 0), SYN));
                let (key, entry) = rig.entry_of(app).expect("both maps have it");
                assert_eq!((key.path, key.protocol), (PATH.0, TCP));
                assert_eq!(u16::from_be(key.local_port), LOCAL_PORT + flow);
                assert_eq!(u16::from_be(key.remote_port), REMOTE_PORT);
                assert_eq!((entry.flow, entry.generation), (FIRST_FLOW + u32::from(flow), 1));
                assert_eq!((entry.flags, layout::flow_key_of(&entry.app)), (FRESH, app.into()));
                assert_eq!((entry.egress.segments, entry.egress.bytes), (1, 0));
                assert_eq!(entry.egress.numbers.sequence, 0xffff_f001, "the SYN has a number");
            }
            assert_eq!(rig.counted(), ["egress_packets", "taken"]);
            assert_eq!((rig.count_of("taken"), rig.flows()), (3, 6));
        }
    }
}

/// Takes what it needs from a grant.
type Spoil = fn(&Rig, &mut Grant);

#[test]
fn a_syn_that_cannot_go_direct_opens_nothing() {
    const SPOILED: [(&str, Spoil); 8] = [
        ("the grant is another's in this moment", |rig, granted| {
            granted.id = FlowId(501);
            put(&rig.0.maps.spares, &GRANT.0.to_ne_bytes(), layout::spare_of(granted).bytes());
        }),
        ("it is used up", |rig, granted| {
            granted.count = 2;
            rig.grant(granted);
            rig.run(true, &syn(from_port(granted.app, 1)));
            rig.run(true, &syn(from_port(granted.app, 2)));
            rig.forget();
        }),
        ("it is over", |rig, granted| {
            granted.until = clock::now();
            rig.grant(granted);
        }),
        ("it was stopped", |rig, _| rig.0.maps.spares.delete(&GRANT.0.to_ne_bytes()).expect("it is there")),
        ("the agent is dead", |rig, _| rig.beat(1)),
        ("the path is held", |rig, _| rig.lead(true, PATH_HELD)),
        ("there is no path", |rig, _| rig.0.maps.paths.delete(&PATH.0.to_ne_bytes()).expect("it is there")),
        ("its place on the wire is another flow's", |rig, granted| {
            let (_, key) = layout::flows_of(granted).next().expect("a flow");
            put(&rig.0.maps.flows, key.bytes(), flow_entry::default().bytes());
        }),
    ];
    for app in [sample::tuple4(TCP), sample::tuple6(TCP)] {
        for (why, spoil) in SPOILED {
            let Some(rig) = granting(Role::Initiator, app, true) else { return };
            spoil(&rig, &mut granted(Role::Initiator, app));
            let before = (rig.flows(), rig.count_of("taken"));
            assert_eq!(rig.run(true, &syn(app)), (NEXT, syn(app)), "{why}");
            assert_eq!((rig.flows(), rig.count_of("taken")), before, "{why}");
        }
    }
}

#[test]
fn what_is_used_up_is_not_counted_on() {
    let app = sample::tuple4(TCP);
    let Some(rig) = granting(Role::Initiator, app, true) else { return };
    rig.grant(&Grant { count: 2, ..granted(Role::Initiator, app) });
    (1..=5).for_each(|port| drop(rig.run(true, &syn(from_port(app, port)))));
    let next = get::<spare>(&rig.0.maps.spares, &GRANT.0.to_ne_bytes()).map(|spare| spare.next);
    assert_eq!(next, Some(2), "or it would come round again");
}

#[test]
fn a_syn_to_elsewhere_or_too_large_is_the_agents() {
    let app = sample::tuple4(TCP);
    let Some(rig) = granting(Role::Initiator, app, true) else { return };
    let mut other = app;
    other.destination.set_port(81);
    for packet in [syn(other), segment(app, SYN, &[7; 1480]), segment(app, SYN | ACK, b""), segment(app, ACK, b"")] {
        assert_eq!(rig.run(true, &packet), (NEXT, packet.clone()));
    }
    assert_eq!((rig.flows(), rig.counted()), (0, vec![]));
}

#[test]
fn a_syn_that_is_sent_again_closes_what_was_opened() {
    let app = sample::tuple4(TCP);
    let Some(rig) = granting(Role::Initiator, app, true) else { return };
    let ring = rig.events();
    assert_eq!(rig.run(true, &syn(app)).0, REDIRECT);
    assert_eq!(rig.run(true, &syn(app)), (NEXT, syn(app)));
    assert_eq!(rig.entry_of(app).expect("kept").1.flags, FLOW_FRESH | FLOW_UNTOLD);
    assert_eq!((rig.count_of("taken"), rig.flows()), (1, 2));
    let late = segment(wire(true).reversed(), SYN | ACK, b"");
    assert_eq!(rig.run(false, &late), (REDIRECT, late.clone()), "up, as it stands");
    assert_eq!((rig.count_of("up_not_accepted"), told(&ring)), (1, vec![]));

    // One that was answered stays as it is, and the agent hears of it first.
    rig.forget();
    rig.grant(&granted(Role::Initiator, app));
    rig.run(true, &syn(app));
    rig.run(false, &late);
    assert!(told(&ring).is_empty());
    assert_eq!(rig.run(true, &syn(app)), (NEXT, syn(app)));
    assert_eq!(rig.entry_of(app).expect("kept").1.flags, OPENED);
    assert_eq!(told(&ring), [(FIRST_FLOW, app.into())]);
}

#[test]
fn a_port_whose_connection_is_over_is_connected_from_again() {
    let (app, answers) = (sample::tuple4(TCP), wire(true).reversed());
    for (is_closed, ends) in [(true, [FIN | ACK, FIN | ACK]), (false, [FIN | ACK, ACK]), (false, [ACK, FIN | ACK])] {
        let Some(rig) = granting(Role::Initiator, app, true) else { return };
        rig.run(true, &syn(app));
        rig.run(false, &segment(answers, SYN | ACK, b""));
        rig.run(true, &segment(app, ends[0], b""));
        rig.run(false, &segment(answers, ends[1], b""));
        rig.run(true, &acknowledging(app));
        let (before, _) = rig.entry_of(app).expect("taken");
        let (verdict, out) = rig.run(true, &syn(app));
        if !is_closed {
            assert_eq!((verdict, out), (NEXT, syn(app)));
            continue;
        }
        assert_eq!((verdict, sample::see(&out).tuple), (REDIRECT, wire_of(true, 1, 0)));
        let (key, entry) = rig.entry_of(app).expect("another one");
        assert_eq!((entry.flow, entry.flags, rig.count_of("taken")), (FIRST_FLOW + 1, FRESH, 2));
        // What comes late for the former one still goes by its entry.
        assert!(key.local_port != before.local_port && rig.flows() == 3);
        assert_eq!(rig.run(false, &segment(answers, FIN | ACK, b"")).0, REDIRECT);
    }
}

#[test]
fn a_flow_is_over_when_each_end_has_acknowledged_all_of_the_others() {
    let (app, answers) = (sample::tuple4(TCP), wire(true).reversed());
    // What goes out and what comes in: flags, sequence number, acknowledgement, payload; and whether it is over by
    // that.
    type Step = (bool, u8, (u32, u32), &'static [u8], bool);
    const FIN_ACK: u8 = FIN | ACK;
    const WAYS: [&[Step]; 4] = [
        // This end closes first.
        &[
            (true, FIN_ACK, (101, 501), b"", false),
            (false, ACK, (501, 102), b"", false),
            (false, FIN_ACK, (501, 102), b"", false),
            (true, ACK, (102, 502), b"", true),
            (true, ACK, (102, 502), b"", true),
        ],
        // The peer does, with its last data, and its FIN is sent again.
        &[
            (false, FIN_ACK, (501, 101), b"bye", false),
            (true, ACK, (101, 505), b"", false),
            (false, FIN_ACK, (501, 101), b"bye", false),
            (true, FIN_ACK, (101, 505), b"", false),
            (false, ACK, (505, 102), b"", true),
        ],
        // Its FIN overtakes data.
        &[
            (true, FIN_ACK, (101, 501), b"", false),
            (false, FIN_ACK, (511, 102), b"", false),
            (true, ACK, (102, 501), b"", false),
            (false, ACK, (501, 102), b"0123456789", false),
            (true, ACK, (102, 512), b"", true),
        ],
        // Both close at once, and numbers come round.
        &[
            (true, FIN_ACK, (u32::MAX, u32::MAX), b"", false),
            (false, FIN_ACK, (u32::MAX, u32::MAX), b"", false),
            (true, ACK, (0, 0), b"", false),
            (false, ACK, (0, 0), b"", true),
        ],
    ];
    for (number, steps) in WAYS.iter().enumerate() {
        let Some(rig) = granting(Role::Initiator, app, true) else { return };
        let ring = rig.events();
        let first = if number == 3 { (u32::MAX - 1, u32::MAX - 1) } else { (100, 500) };
        rig.run(true, &numbered(app, SYN, (first.0, 0), b""));
        rig.run(false, &numbered(answers, SYN | ACK, (first.1, first.0.wrapping_add(1)), b""));
        drop(ring.take());
        for (at, (is_egress, flags, numbers, payload, is_over)) in steps.iter().enumerate() {
            let tuple = if *is_egress { app } else { answers };
            assert_eq!(rig.run(*is_egress, &numbered(tuple, *flags, *numbers, payload)).0, REDIRECT);
            let seen = rig.entry_of(app).expect("kept").1.seen;
            assert_eq!(seen & SEEN_OVER != 0, *is_over, "way {number}, step {at}");
        }
        assert_eq!(ring.take().len(), 0, "the agent is told of none of it");
    }
}

#[test]
fn a_peers_syn_opens_a_flow_of_its_grant_once() {
    for app in [sample::tuple4(TCP), sample::tuple6(TCP)] {
        for wire_v4 in [true, false] {
            let Some(rig) = granting(Role::Responder, app, wire_v4) else { return };
            // The first, the last of the first word of bits, the first of the second, the last.
            for flow in [0, 63, 64, COUNT - 1] {
                let mut app = app;
                app.destination.set_port(app.destination.port() + flow);
                let from = wire_of(wire_v4, 0, flow).reversed();
                let (verdict, out) = rig.run(false, &proved(from));
                assert_eq!((verdict, sample::see(&out).tuple), (REDIRECT, app.reversed()));
                let (key, entry) = rig.entry_of(app).expect("both maps have it");
                assert_eq!((key.path, u16::from_be(key.local_port)), (PATH.0, LOCAL_PORT));
                assert_eq!(u16::from_be(key.remote_port), REMOTE_PORT + flow);
                assert_eq!((entry.flow, entry.generation), (FIRST_FLOW + u32::from(flow), 1));
                assert_eq!((entry.flags, layout::flow_key_of(&entry.app)), (FRESH, app.into()));
                assert_eq!((entry.ingress.segments, entry.ingress.numbers.sequence), (1, 0xffff_f001));
                assert_eq!(rig.run(false, &proved(from)).0, DROP, "sent twice");
            }
            assert_eq!((rig.count_of("opened"), rig.count_of("drop_unproved"), rig.flows()), (4, 4, 8));
            assert_eq!(rig.counted(), ["ingress_packets", "opened", "drop_unproved"]);
            rig.forget();
            for flow in [0, 63, 64, COUNT - 1] {
                let again = proved(wire_of(wire_v4, 0, flow).reversed());
                assert_eq!(rig.run(false, &again), (REDIRECT, again.clone()), "up: it is used");
            }
            assert_eq!((rig.count_of("up_no_flow"), rig.flows()), (4, 0));
        }
    }
}

#[test]
fn a_peers_syn_that_may_not_open_a_flow_is_the_agents() {
    let app = sample::tuple4(TCP);
    let up = |rig: &Rig, packet: Vec<u8>, why: &str| {
        let before = (rig.flows(), rig.count_of("up_no_flow"));
        assert_eq!(rig.run(false, &packet), (REDIRECT, packet.clone()), "{why}");
        assert_eq!((rig.flows(), rig.count_of("up_no_flow")), (before.0, before.1 + 1), "{why}");
        assert_eq!(rig.count_of("opened"), 0, "{why}");
    };
    let from = |local: u16, remote: u16| wire_of(true, local, remote).reversed();
    let Some(rig) = granting(Role::Responder, app, true) else { return };
    up(&rig, proved(from(0, COUNT)), "a number above");
    up(&rig, proved(from(0, u16::MAX)), "a number below");
    up(&rig, proved(from(1, 0)), "another port");
    up(&rig, segment(from(0, 0), ACK, b""), "no SYN");
    up(&rig, segment(from(0, 0), SYN | ACK, b""), "an answer");
    rig.lead(true, PATH_HELD);
    up(&rig, proved(from(0, 0)), "its answer could not go direct");
    rig.lead(true, 0);
    rig.grant(&Grant { until: clock::now(), ..granted(Role::Responder, app) });
    up(&rig, proved(from(0, 0)), "it is over");
    rig.grant(&granted(Role::Responder, app));
    put(&rig.0.maps.apps, layout::app_key_of(&app.into()).bytes(), wire_key::default().bytes());
    up(&rig, proved(from(0, 0)), "the five-tuple is another flow's");
    assert_eq!(rig.0.maps.flows.keys().count(), 0, "the other half of its entry is gone again");
}

#[test]
fn a_syn_by_a_watched_path_is_told_of_as_any_packet() {
    let app = sample::tuple4(TCP);
    let Some(rig) = granting(Role::Responder, app, true) else { return };
    let ring = rig.events();
    rig.lead(true, layout::PATH_WATCHED);
    rig.run(false, &proved(wire(true).reversed()));
    let heard: Vec<_> = ring.take().iter().map(|event| (event.flow, event.seen)).collect();
    assert_eq!((heard, rig.count_of("opened")), (vec![(PATH.0, 128)], 1));
}

#[test]
fn the_answer_to_an_opened_flow_goes_direct_until_the_peer_has_it() {
    for (app, wire_v4) in [(sample::tuple4(TCP), false), (sample::tuple6(TCP), true)] {
        let Some(rig) = granting(Role::Responder, app, wire_v4) else { return };
        let ring = rig.events();
        let from = wire(wire_v4).reversed();
        rig.run(false, &proved(from));
        let (verdict, out) = rig.run(true, &segment(app, SYN | ACK, b""));
        let Seen { tuple, flags, .. } = sample::see(&out);
        assert_eq!((verdict, tuple, flags), (REDIRECT, wire(wire_v4), SYN | ACK));
        let (_, entry) = rig.entry_of(app).expect("opened");
        assert_eq!((entry.egress.segments, entry.egress.numbers.sequence), (1, 0xffff_f001));
        assert!(told(&ring).is_empty(), "the peer has said nothing yet");
        let (verdict, out) = rig.run(false, &segment(from, ACK, b""));
        assert_eq!((verdict, sample::see(&out).tuple), (REDIRECT, app.reversed()));
        assert_eq!(rig.entry_of(app).expect("opened").1.flags, ANSWERED);
        rig.run(false, &segment(from, ACK, b"request"));
        assert!(told(&ring).is_empty(), "it may be over at once");
        let again = segment(app, SYN | ACK, b"");
        assert_eq!(rig.run(true, &again), (NEXT, again.clone()), "the agent's, as of any flow");
        assert_eq!(told(&ring), [(FIRST_FLOW, app.into())], "which hears of it first");
        assert_eq!(rig.entry_of(app).expect("opened").1.flags, OPENED);
        assert_eq!(rig.run(true, &segment(app, ACK, b"answer")).0, REDIRECT);
    }
}

#[test]
fn an_answer_is_noted_and_a_reset_is_none() {
    let app = sample::tuple4(TCP);
    let from = wire(true).reversed();
    let Some(rig) = granting(Role::Initiator, app, true) else { return };
    let ring = rig.events();
    rig.run(true, &syn(app));
    let (verdict, out) = rig.run(false, &numbered(from, RST | ACK, (0, 0xffff_f001), b""));
    assert_eq!((verdict, sample::see(&out).flags), (REDIRECT, RST | ACK), "the connection is refused");
    assert_ne!(rig.entry_of(app).expect("kept").1.seen & SEEN_RST_INGRESS, 0);
    assert_eq!(rig.entry_of(app).expect("kept").1.flags, FRESH);
    for _ in 0..2 {
        let (verdict, out) = rig.run(false, &segment(from, SYN | ACK, b""));
        let Seen { tuple, flags, .. } = sample::see(&out);
        assert_eq!((verdict, tuple, flags), (REDIRECT, app.reversed(), SYN | ACK));
    }
    assert_eq!(ring.take().len(), 0, "nobody is told");
    let (_, entry) = rig.entry_of(app).expect("opened");
    assert_eq!((entry.flags, entry.ingress.segments), (ANSWERED, 3));
}

#[test]
fn the_agent_hears_now_and_then_how_many_flows_of_a_grant_are_opened() {
    let app = sample::tuple4(TCP);
    let heard = |ring: &Ring<flow_event>| -> Vec<(u32, u32, u32)> {
        ring.take().into_iter().map(|event| (event.flow, event.seen & 0xffff, event.seen >> 16)).collect()
    };
    for role in [Role::Initiator, Role::Responder] {
        for (count, news) in [(COUNT, vec![8, 16, 24, 32, 40, 48, 56, 64, 70]), (5, vec![1, 2, 3, 4, 5])] {
            let Some(rig) = granting(role, app, true) else { return };
            let ring = rig.events();
            rig.grant(&Grant { count, ..granted(role, app) });
            for flow in 0..count {
                let verdict = match role {
                    Role::Initiator => rig.run(true, &syn(from_port(app, 1000 + flow))).0,
                    Role::Responder => rig.run(false, &proved(wire_of(true, 0, flow).reversed())).0,
                };
                assert_eq!(verdict, REDIRECT);
            }
            let expected: Vec<_> = news.into_iter().map(|count| (GRANT.0, SEEN_TAKEN, count)).collect();
            assert_eq!(heard(&ring), expected, "{role:?}");
        }
    }
}

/// Makes a packet of a flow the agent's.
type Turn = fn(&Rig);

#[test]
fn what_goes_to_the_agent_is_told_of_first() {
    const TURNS: [(&str, u8, &[u8], Turn); 6] = [
        ("the path is held", ACK, b"", |rig| rig.lead(true, PATH_HELD)),
        ("there is no path", ACK, b"", |rig| rig.0.maps.paths.delete(&PATH.0.to_ne_bytes()).expect("it is there")),
        ("it is too large", ACK, &[7; 1480], |_| {}),
        ("it has stalled", ACK, b"data", |rig| {
            let (key, entry) = rig.entry_of(sample::tuple4(TCP)).expect("opened");
            put(&rig.0.maps.flows, key.bytes(), flow_entry { unanswered_since_ns: 1, ..entry }.bytes());
        }),
        ("it is a SYN", SYN, b"", |_| {}),
        ("it is an answer that is sent again", SYN | ACK, b"", |_| {}),
    ];
    let app = sample::tuple4(TCP);
    for (why, flags, payload, turn) in TURNS {
        let Some(rig) = granting(Role::Initiator, app, true) else { return };
        let ring = rig.events();
        rig.run(true, &syn(app));
        rig.run(false, &segment(wire(true).reversed(), SYN | ACK, b""));
        rig.run(true, &segment(app, ACK, b""));
        assert_eq!(ring.take().len(), 0, "{why}");
        turn(&rig);
        let packet = segment(app, flags, payload);
        assert_eq!(rig.run(true, &packet), (NEXT, packet.clone()), "{why}");
        assert_eq!(told(&ring), [(FIRST_FLOW, app.into())], "{why}");
        rig.run(true, &packet);
        assert_eq!(ring.take().len(), 0, "{why}: once");
    }
}

#[test]
fn an_end_is_told_with_the_beginning_or_after_it() {
    const BY_ITSELF: u32 = 4;
    let (app, answers) = (sample::tuple4(TCP), wire(true).reversed());
    for closes_first in [true, false] {
        let Some(rig) = granting(Role::Initiator, app, true) else { return };
        let ring = rig.events();
        rig.run(true, &syn(app));
        rig.run(false, &segment(answers, SYN | ACK, b""));
        if closes_first {
            rig.run(false, &segment(answers, FIN | ACK, b""));
            rig.run(true, &acknowledging(app));
        }
        rig.lead(true, PATH_HELD);
        rig.run(true, &segment(app, ACK, b""));
        rig.lead(true, 0);
        if !closes_first {
            rig.run(false, &segment(answers, FIN | ACK, b""));
            rig.run(true, &acknowledging(app));
        }
        let seen: Vec<u32> = ring.take().into_iter().map(|event| event.seen).collect();
        let expected = if closes_first { vec![SEEN_OPENED | BY_ITSELF] } else { vec![SEEN_OPENED, BY_ITSELF] };
        assert_eq!(seen, expected);
    }
}

#[test]
fn what_a_listener_is_found_for_comes_by_sal0() {
    let app = sample::tuple4(TCP);
    let from = wire(true).reversed();
    let Some(rig) = granting_in_place(Role::Responder, app, true, true) else { return };
    let ack = segment(from, ACK, b"");
    for (packet, verdict) in [(proved(from), REDIRECT), (ack.clone(), REDIRECT), (ack, NEXT)] {
        let (found, out) = rig.run(false, &packet);
        assert_eq!((found, sample::see(&out).tuple), (verdict, app.reversed()));
    }
    let Some(rig) = granting_in_place(Role::Initiator, app, true, true) else { return };
    rig.run(true, &syn(app));
    assert_eq!(
        rig.run(false, &segment(from, SYN | ACK, b"")).0,
        NEXT,
        "what it may bring with it must not overtake it"
    );
}

#[test]
fn segments_are_held_to_the_path_by_both_ends() {
    for (app, wire_v4, most) in [
        (sample::tuple4(TCP), true, 1460),
        (sample::tuple6(TCP), true, 1460),
        (sample::tuple4(TCP), false, 1440),
        (sample::tuple6(TCP), false, 1440),
    ] {
        for (mss, held) in [(9000, most), (1461, most), (536, 536)] {
            let Some(rig) = granting(Role::Initiator, app, wire_v4) else { return };
            let (verdict, out) = rig.run(true, &with_mss(app, SYN, mss));
            sample::see(&out);
            assert_eq!((verdict, mss_of(&out)), (REDIRECT, held));
            let Some(rig) = granting(Role::Responder, app, wire_v4) else { return };
            rig.run(false, &proved(wire(wire_v4).reversed()));
            let (verdict, out) = rig.run(true, &with_mss(app, SYN | ACK, mss));
            sample::see(&out);
            assert_eq!((verdict, mss_of(&out)), (REDIRECT, held));
        }
    }
}
