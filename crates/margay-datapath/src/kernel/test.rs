//! The programs by test run: packets in, verdicts and packets out. They need root; without it they say so and pass.
//!
//! The kernel's test run knows Ethernet frames only, so the program of `sal0` is told that its packets have a header of
//! 14 bytes; everything after that is what ships.

use std::mem::MaybeUninit;
use std::net::SocketAddr;

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{MapCore, MapFlags, MapHandle, ProgramInput};
use margay_core::chain::FORWARDED_HOP_LIMIT;
use margay_core::entry::PathId;
use margay_core::flow_cache::STALL;
use margay_core::{Ranges, Tuple};
use margay_wire::FlowId;

use super::address_pair::AddressPairs;
use super::layout::{
    self, COUNTERS, LAYOUT_VERSION, PATH_HELD, PATH_WATCHED, flow_change, flow_entry, flow_event, path_entry,
};
use super::plain::Plain;
use super::ring::Ring;
use super::skeleton::{FlowCacheSkel, FlowCacheSkelBuilder};
use super::{WireFlow, WirePath, get};
use crate::packet::{ACK, FIN, FlowKey, RST, SYN, TCP, UDP};
use crate::sample::{self, Checksum, Seen};

const ETHERNET: usize = 14;
/// Verdicts of tcx.
const NEXT: i32 = -1;
const DROP: i32 = 2;
const REDIRECT: i32 = 7;
pub(super) const SAL0: u32 = 1;
const LOCAL_PORT: u16 = 61_001;
const REMOTE_PORT: u16 = 62_080;
const PATH: PathId = PathId(7);
const STALL_US: u32 = STALL.as_micros() as u32;

#[path = "checksum_test.rs"]
mod checksum;
#[path = "delivery_test.rs"]
mod delivery;
#[path = "delta_test.rs"]
mod delta;
#[path = "ending_test.rs"]
mod ending;
#[path = "forwarded_test.rs"]
mod forwarded;
#[path = "host_traffic_test.rs"]
mod host_traffic;
#[path = "lifting_test.rs"]
mod lifting;
#[path = "opening_test.rs"]
pub(super) mod opening;
#[path = "socketless_test.rs"]
mod socketless;
#[path = "virtual_test.rs"]
mod stays_inside;
#[path = "time_wait_test.rs"]
mod time_wait;
#[path = "vlan_test.rs"]
mod vlan;

pub(super) struct Rig(pub(super) FlowCacheSkel<'static>);

fn flow_of(app: Tuple, egress: bool, accept: bool) -> WireFlow {
    WireFlow {
        flow: FlowId(99),
        generation: 1,
        app: app.into(),
        path: PATH,
        local_port: LOCAL_PORT,
        remote_port: REMOTE_PORT,
        egress,
        accept,
        by_sal0: false,
        of_socket: false,
        delta: None,
    }
}

/// The programs with one flow and one path.
fn rig(app: Tuple, wire_v4: bool, egress: bool, accept: bool) -> Option<Rig> {
    let rig = programs(SAL0)?;
    let flow = flow_of(app, egress, accept);
    let (key, app) = (layout::wire_key_of(&flow), layout::app_key_of(&flow.app));
    let entry = flow_entry { flow: 99, generation: 1, app, flags: layout::flags_of(&flow), ..Default::default() };
    let wire = Tuple { protocol: flow.app.protocol, ..wire(wire_v4) };
    let next_hop = wire.destination.ip();
    let path = WirePath {
        local: wire.source.ip(),
        remote: next_hop,
        next_hop,
        ifindex: 1,
        mtu: 1500,
        stall_us: STALL_US,
        held: false,
        watched: false,
    };
    let path = layout::path_entry_of(&path);
    let maps = &rig.0.maps;
    put(&maps.flows, key.bytes(), entry.bytes());
    put(&maps.apps, app.bytes(), key.bytes());
    put(&maps.paths, &PATH.0.to_ne_bytes(), path.bytes());
    let leads = layout::pair_value { path: PATH.0, flags: 0, told_ns: 0 };
    put(&maps.pairs, layout::pair_of(&path).bytes(), leads.bytes());
    rig.beat(crate::clock::now().micros() * 1000);
    Some(rig)
}

/// The programs, with `sal0` at that index; `None` without root.
pub(super) fn programs(sal0: u32) -> Option<Rig> {
    programs_in_place(sal0, false)
}

fn programs_in_place(sal0: u32, in_place: bool) -> Option<Rig> {
    programs_of(sal0, in_place, Ranges::USUAL)
}

fn programs_of(sal0: u32, in_place: bool, ranges: Ranges) -> Option<Rig> {
    if !nix::unistd::Uid::effective().is_root() {
        eprintln!("skipped: eBPF needs root");
        return None;
    }
    let mut open = FlowCacheSkelBuilder::default().open(Box::leak(Box::new(MaybeUninit::uninit()))).expect("an object");
    if let Some(constants) = open.maps.rodata_data.as_deref_mut() {
        constants.sal0_ifindex = sal0;
        constants.sal0_header_len = ETHERNET as u32;
        (constants.flow_port_first, constants.flow_port_last) = (61_000, 65_535);
        super::interface::set_virtual(constants, ranges);
        super::interface::set_common(constants);
        constants.drops_tags = 1;
        constants.forwarded_hop_limit = FORWARDED_HOP_LIMIT.into();
        assert_eq!(constants.layout_version, LAYOUT_VERSION, "layout.h and layout.rs are of one version");
    }
    let rig = Rig(open.load().expect("the verifier takes them"));
    put(&rig.0.maps.in_place, &0_u32.to_ne_bytes(), &u32::from(in_place).to_ne_bytes());
    Some(rig)
}

#[test]
fn the_verifier_has_little_to_look_at() {
    let Some(Rig(skeleton)) = programs(1) else { return };
    let all = &skeleton.progs;
    let of_packets = [&all.app_egress, &all.wire_ingress, &all.card_ingress, &all.card_egress, &all.app_ingress];
    let of_agent = [&all.change_flow, &all.lift_flow, &all.forget_flows, &all.survey_flows, &all.tell_flows];
    of_packets.into_iter().chain(of_agent).for_each(sample::is_soon_verified);
}

fn put(map: &impl MapCore, key: &[u8], value: &[u8]) {
    map.update(key, value, MapFlags::ANY).expect("room");
}

/// The flow as its packets leave this host.
fn wire(v4: bool) -> Tuple {
    let (local, remote) = if v4 { ("10.1.0.2", "10.1.0.1") } else { ("fd00::2", "fd00::1") };
    let address = |text: &str, port| SocketAddr::new(text.parse().expect("literal"), port);
    Tuple { protocol: TCP, source: address(local, LOCAL_PORT), destination: address(remote, REMOTE_PORT) }
}

fn frame(packet: &[u8]) -> Vec<u8> {
    let ethertype = if packet[0] >> 4 == 4 { [8, 0] } else { [0x86, 0xdd] };
    [&[2; 12][..], &ethertype, packet].concat()
}

/// Verdict, and the IP packet that came out.
pub(super) fn run_program(program: &libbpf_rs::ProgramMut<'_>, packet: &[u8]) -> (i32, Vec<u8>) {
    let data = frame(packet);
    let mut out = vec![0; 4096];
    let input = ProgramInput { data_in: Some(&data), data_out: Some(&mut out), ..Default::default() };
    let result = program.test_run(input).expect("a run");
    let out = result.data.expect("bytes out").get(ETHERNET..).expect("a frame").to_vec();
    (result.return_value.cast_signed(), out)
}

/// Where a program's context has the interface that a packet came by, and how long it is.
const INGRESS_IFINDEX: usize = 36;
const MARK: usize = 8;
const CONTEXT_LEN: usize = 192;

/// The same of a packet that came by this interface; by none: a program here has sent it.
fn run_from(program: &libbpf_rs::ProgramMut<'_>, from: u32, packet: &[u8]) -> (i32, Vec<u8>) {
    run_marked(program, from, 0, packet)
}

/// The same of a packet with this `skb->mark`.
fn run_marked(program: &libbpf_rs::ProgramMut<'_>, from: u32, mark: u32, packet: &[u8]) -> (i32, Vec<u8>) {
    let mut context = [0; CONTEXT_LEN];
    context[MARK..MARK + 4].copy_from_slice(&mark.to_ne_bytes());
    context[INGRESS_IFINDEX..INGRESS_IFINDEX + 4].copy_from_slice(&from.to_ne_bytes());
    let (data, mut out) = (frame(packet), vec![0; 4096]);
    let input = ProgramInput {
        context_in: Some(&mut context),
        data_in: Some(&data),
        data_out: Some(&mut out),
        ..Default::default()
    };
    let result = program.test_run(input).expect("a run");
    let out = result.data.expect("bytes out").get(ETHERNET..).expect("a frame").to_vec();
    (result.return_value.cast_signed(), out)
}

impl Rig {
    fn beat(&self, at_ns: u64) {
        put(&self.0.maps.heartbeat, &0_u32.to_ne_bytes(), &at_ns.to_ne_bytes());
    }

    /// Verdict, and the IP packet that came out.
    fn run(&self, is_egress: bool, packet: &[u8]) -> (i32, Vec<u8>) {
        self.run_one(if is_egress { &self.0.progs.app_egress } else { &self.0.progs.wire_ingress }, packet)
    }

    fn run_one(&self, program: &libbpf_rs::ProgramMut<'_>, packet: &[u8]) -> (i32, Vec<u8>) {
        run_program(program, packet)
    }

    fn counted(&self) -> Vec<&'static str> {
        let is_counted = |number: u32| {
            let values = self.0.maps.counters.lookup_percpu(&number.to_ne_bytes(), MapFlags::ANY).expect("a map");
            values.into_iter().flatten().flatten().any(|byte| byte != 0)
        };
        COUNTERS.iter().zip(0..).filter(|(_, number)| is_counted(*number)).map(|(name, _)| *name).collect()
    }

    fn count_of(&self, name: &str) -> u64 {
        let number = COUNTERS.iter().zip(0_u32..).find(|(counter, _)| **counter == name).expect("a counter").1;
        let values = self.0.maps.counters.lookup_percpu(&number.to_ne_bytes(), MapFlags::ANY).expect("a map");
        values.into_iter().flatten().map(|value| u64::from_ne_bytes(value.try_into().expect("eight bytes"))).sum()
    }

    fn entry(&self) -> flow_entry {
        let mut found = None;
        for key in self.0.maps.flows.keys() {
            found = self
                .0
                .maps
                .flows
                .lookup(&key, MapFlags::ANY)
                .expect("a map")
                .and_then(|bytes| flow_entry::read(&bytes));
        }
        found.expect("one entry")
    }

    fn path(&self) -> path_entry {
        let key = self.0.maps.paths.keys().next().expect("one path");
        let bytes = self.0.maps.paths.lookup(&key, MapFlags::ANY).expect("a map").expect("its own key");
        path_entry::read(&bytes).expect("a whole record")
    }
}

fn segment(tuple: Tuple, flags: u8, payload: &[u8]) -> Vec<u8> {
    sample::packet(tuple, flags, payload, Checksum::Complete)
}

#[test]
fn every_family_is_rewritten_to_every_family_and_back() {
    for app in [sample::tuple4(TCP), sample::tuple6(TCP)] {
        for wire_v4 in [true, false] {
            let Some(rig) = rig(app, wire_v4, true, true) else { return };
            let wire = wire(wire_v4);
            let (verdict, out) = rig.run(true, &segment(app, ACK, b"request"));
            let Seen { tuple, payload, traffic_class, hop_limit, .. } = sample::see(&out);
            assert_eq!((verdict, tuple, payload), (REDIRECT, wire, b"request".to_vec()));
            assert_eq!((traffic_class, hop_limit), (0x0a, 63));
            let (verdict, out) = rig.run(false, &segment(wire.reversed(), ACK, b"answer"));
            let Seen { tuple, payload, .. } = sample::see(&out);
            assert_eq!((verdict, tuple, payload), (REDIRECT, app.reversed(), b"answer".to_vec()));
            assert_eq!(rig.counted(), ["egress_packets", "ingress_packets"]);
            let entry = rig.entry();
            assert_eq!((entry.egress.bytes, entry.ingress.bytes, entry.unanswered_since_ns), (7, 6, 0));
            assert!(
                entry.rtt_ns > 0 && entry.egress.numbers.sequence == 0xffff_f000 && entry.egress.numbers.length == 7
            );
            assert_eq!(rig.path().rtt_ns, entry.rtt_ns, "a hint for the next flow on the path");
        }
    }
}

#[test]
fn the_agents_word_changes_a_flow_in_place() {
    let app = sample::tuple4(TCP);
    let Some(rig) = rig(app, true, true, true) else { return };
    let change = |change: &flow_change| {
        let mut bytes = change.bytes().to_vec();
        let input = ProgramInput { context_in: Some(&mut bytes), ..Default::default() };
        rig.0.progs.change_flow.test_run(input).expect("a run").return_value
    };
    rig.run(true, &segment(app, ACK | FIN, b"the last of it"));
    let before = rig.entry();
    assert!(before.seen != 0 && before.unanswered_since_ns != 0);

    let back = WireFlow { generation: 3, ..flow_of(app, false, true) };
    assert_eq!(change(&layout::flow_change_of(&back)), layout::CHANGE_DONE);
    let after = rig.entry();
    assert_eq!((after.generation, after.flags, after.unanswered_since_ns), (3, layout::FLOW_ACCEPT, 0));
    let as_before =
        flow_entry { generation: 1, flags: before.flags, unanswered_since_ns: before.unanswered_since_ns, ..after };
    assert_eq!(as_before.bytes(), before.bytes(), "what it has seen and counted stays");

    for (order, result) in [
        (WireFlow { generation: 2, ..flow_of(app, true, true) }, layout::CHANGE_LATE),
        (WireFlow { generation: 4, flow: FlowId(98), ..back }, layout::CHANGE_TAKEN),
        (WireFlow { generation: 4, remote_port: REMOTE_PORT + 1, ..back }, layout::CHANGE_ABSENT),
    ] {
        assert_eq!(change(&layout::flow_change_of(&order)), result);
        assert_eq!(rig.entry().bytes(), after.bytes());
    }
}

fn datagram(tuple: Tuple, payload: &[u8]) -> Vec<u8> {
    sample::packet(tuple, 0, payload, Checksum::Complete)
}

fn datagrams_wire(v4: bool) -> Tuple {
    Tuple { protocol: UDP, ..wire(v4) }
}

#[test]
fn datagrams_are_rewritten_to_every_family_and_back() {
    for app in [sample::tuple4(UDP), sample::tuple6(UDP)] {
        for wire_v4 in [true, false] {
            let Some(rig) = rig(app, wire_v4, true, true) else { return };
            let wire = datagrams_wire(wire_v4);
            let (verdict, out) = rig.run(true, &datagram(app, b"request"));
            let Seen { tuple, payload, .. } = sample::see(&out);
            assert_eq!((verdict, tuple, payload), (REDIRECT, wire, b"request".to_vec()));
            assert!(rig.entry().unanswered_since_ns > 0);
            let (verdict, out) = rig.run(false, &datagram(wire.reversed(), b"answer"));
            let Seen { tuple, payload, .. } = sample::see(&out);
            assert_eq!((verdict, tuple, payload), (REDIRECT, app.reversed(), b"answer".to_vec()));
            let entry = rig.entry();
            assert_eq!((entry.egress.bytes, entry.ingress.bytes, entry.unanswered_since_ns), (7, 6, 0));
        }
    }
}

#[test]
fn a_datagram_without_checksum_keeps_none_and_every_checksum_is_right() {
    let app = sample::tuple4(UDP);
    let Some(rig) = rig(app, true, true, true) else { return };
    let (verdict, out) = rig.run(true, &sample::packet(app, 0, b"x", Checksum::Absent));
    assert_eq!((verdict, &out[26..28]), (REDIRECT, &[0, 0][..]));
    // Every sum comes up, the one that would say that there is none among them: `see` checks each.
    for number in 0..=u16::MAX {
        let (_, out) = rig.run(true, &datagram(app, &number.to_be_bytes()));
        assert_ne!(out[26..28], [0, 0]);
        assert_eq!(sample::see(&out).payload, number.to_be_bytes());
    }
}

#[test]
fn an_empty_datagram_is_the_agents_on_both_sides() {
    let app = sample::tuple4(UDP);
    let Some(rig) = rig(app, true, true, true) else { return };
    let empty = datagram(app, b"");
    assert_eq!(rig.run(true, &empty), (NEXT, empty.clone()), "what looks like a pinhole is not sent as one");
    rig.run(true, &datagram(app, b"x"));
    assert_eq!(rig.run(false, &datagram(datagrams_wire(true).reversed(), b"")).0, DROP, "told, not passed on");
    assert_eq!(rig.entry().unanswered_since_ns, 0, "it is an answer");
    assert_eq!(rig.counted(), ["egress_packets", "pinholes"]);
}

/// What a router says of a packet that its next link does not take.
fn too_big(packet: &[u8], mtu: u16) -> Vec<u8> {
    let is_v4 = packet[0] >> 4 == 4;
    let quoted = &packet[..if is_v4 { 28 } else { 48 }];
    let (len, mut said) = (8 + quoted.len(), Vec::new());
    if is_v4 {
        said.extend([0x45, 0]);
        said.extend((20 + len as u16).to_be_bytes());
        said.extend([0, 0, 0, 0, 64, 1, 0, 0, 10, 9, 9, 9]);
        said.extend(&packet[12..16]);
        said.extend([3, 4, 0, 0, 0, 0]);
        said.extend(mtu.to_be_bytes());
    } else {
        said.extend([0x60, 0, 0, 0]);
        said.extend((len as u16).to_be_bytes());
        said.extend([58, 64]);
        said.extend([9; 16]);
        said.extend(&packet[8..24]);
        said.extend([2, 0, 0, 0, 0, 0]);
        said.extend(mtu.to_be_bytes());
    }
    said.extend(quoted);
    said
}

#[test]
fn a_routers_word_that_a_packet_is_too_big_is_heard_of_live_flows_alone() {
    for wire_v4 in [true, false] {
        let Some(rig) = rig(sample::tuple4(UDP), wire_v4, true, true) else { return };
        let ring = Ring::<flow_event>::new(MapHandle::try_from(&rig.0.maps.events).expect("a map")).expect("a ring");
        let wire = datagrams_wire(wire_v4);
        let mut other = wire;
        other.destination.set_port(63_000);
        for (of, mtu) in [(other, 1400), (wire, 500)] {
            let said = too_big(&datagram(of, &[7; 900]), mtu);
            assert_eq!(rig.run(false, &said), (NEXT, said.clone()));
            assert!(ring.take().is_empty(), "{of} {mtu}");
        }
        let said = too_big(&datagram(wire, &[7; 900]), 1400);
        assert_eq!(rig.run(false, &said), (NEXT, said.clone()), "the host's stack may have it");
        let heard = ring.take();
        let [event] = &heard[..] else { panic!("{}", heard.len()) };
        assert_eq!((event.flow, super::Seen(event.seen).too_big()), (99, Some(1400)));
        assert_eq!(layout::flow_key_of(&event.wire), wire.into());
        assert_eq!(rig.counted(), ["too_big"]);
    }
}

#[test]
fn what_is_not_direct_is_left_alone() {
    let app = sample::tuple4(TCP);
    let Some(rig) = rig(app, true, false, false) else { return };
    let mut other = app;
    other.source.set_port(9);
    let mut fragment = segment(app, ACK, b"x");
    fragment[6] = 0x20;
    let mut options = segment(app, ACK, b"x");
    options[0] = 0x46;
    let udp = sample::packet(sample::tuple4(UDP), 0, b"x", Checksum::Absent);
    for packet in [segment(app, ACK, b"x"), segment(other, ACK, b"x"), fragment, options, udp] {
        assert_eq!(rig.run(true, &packet), (NEXT, packet.clone()));
    }
    let mut foreign = wire(true).reversed();
    foreign.destination.set_port(443);
    let packet = segment(foreign, ACK, b"x");
    assert_eq!(rig.run(false, &packet), (NEXT, packet.clone()), "not a flow port");
    assert_eq!(rig.counted(), [""; 0]);
}

#[test]
fn what_cannot_go_direct_goes_to_the_agent() {
    let app = sample::tuple4(TCP);
    let Some(rig) = rig(app, true, true, false) else { return };
    let syn = segment(app, SYN, b"");
    assert_eq!(rig.run(true, &syn), (NEXT, syn.clone()), "it may begin a new flow");
    let large = segment(app, ACK, &[7; 1480]);
    assert_eq!(rig.run(true, &large), (NEXT, large.clone()));
    assert_eq!(rig.counted(), ["left_too_large"]);
    let early = segment(wire(true).reversed(), ACK, b"early");
    assert_eq!(rig.run(false, &early), (REDIRECT, early.clone()), "up, as it stands");
    let mut unknown = wire(true).reversed();
    unknown.source.set_port(63_000);
    assert_eq!(rig.run(false, &segment(unknown, ACK, b"x")).0, REDIRECT);
    assert_eq!(rig.counted(), ["up_no_flow", "up_not_accepted", "left_too_large"]);
    rig.beat(1);
    assert_eq!(rig.run(false, &early).0, DROP, "the host's TCP never sees it, also when the agent is dead");
}

#[test]
fn an_unanswered_flow_stalls_only_while_the_agent_lives() {
    let app = sample::tuple4(TCP);
    let Some(rig) = rig(app, true, true, true) else { return };
    let data = segment(app, ACK, b"data");
    assert_eq!(rig.run(true, &data).0, REDIRECT);
    let key = rig.0.maps.flows.keys().next().expect("one entry");
    let mut entry = rig.entry();
    assert!(entry.unanswered_since_ns > 0);
    entry.unanswered_since_ns = 1;
    entry.rtt_ns = 1000;
    put(&rig.0.maps.flows, &key, entry.bytes());
    rig.beat(1);
    assert_eq!(rig.run(true, &data).0, REDIRECT, "nobody would take it");
    rig.beat(crate::clock::now().micros() * 1000);
    assert_eq!(rig.run(true, &segment(app, ACK, b"")).0, REDIRECT, "an acknowledgement expects no answer");
    assert_eq!(rig.run(true, &data), (NEXT, data.clone()));
    assert_eq!(rig.entry().flags & layout::FLOW_STALLED, layout::FLOW_STALLED);
    assert_eq!(rig.run(true, &data).0, NEXT, "until the agent says otherwise");
    rig.beat(1);
    assert_eq!(rig.run(true, &data).0, REDIRECT, "or is dead");
    rig.beat(crate::clock::now().micros() * 1000);

    let now = crate::clock::now().micros() * 1000;
    for (path_rtt_ns, verdict) in [(0, REDIRECT), (1000, NEXT)] {
        // Half a second without an answer, and no round trip of its own: what the path has seen decides.
        (entry.unanswered_since_ns, entry.rtt_ns, entry.flags) =
            (now - 500_000_000, 0, rig.entry().flags & !layout::FLOW_STALLED);
        put(&rig.0.maps.flows, &key, entry.bytes());
        let path_key = rig.0.maps.paths.keys().next().expect("one path");
        put(&rig.0.maps.paths, &path_key, path_entry { rtt_ns: path_rtt_ns, ..rig.path() }.bytes());
        assert_eq!(rig.run(true, &data).0, verdict, "path {path_rtt_ns}");
    }
}

#[test]
fn an_end_that_finds_the_ring_full_is_kept_in_its_entry() {
    let app = sample::tuple4(TCP);
    let Some(rig) = rig(app, true, true, true) else { return };
    rig.run(true, &segment(app, ACK, b"x"));
    let news = too_big(&segment(wire(true), ACK, b"x"), 1400);
    (0..8000).for_each(|_| drop(rig.run(false, &news)));
    assert!(rig.counted().contains(&"event_lost"));
    rig.run(true, &segment(app, FIN | ACK, b""));
    assert_eq!(rig.entry().seen, 1);
}

#[test]
fn a_reset_by_a_held_path_is_nobodys_and_shows_nothing() {
    let Some(rig) = rig(sample::tuple4(TCP), true, true, true) else { return };
    let (pair, wire) = (layout::pair_of(&rig.path()), wire(true).reversed());
    let lead = |flags: u32| {
        put(&rig.0.maps.pairs, pair.bytes(), layout::pair_value { path: PATH.0, flags, told_ns: 0 }.bytes());
    };
    let told = || get::<layout::pair_value>(&rig.0.maps.pairs, pair.bytes()).is_some_and(|value| value.told_ns > 0);
    lead(PATH_HELD | PATH_WATCHED);
    assert_eq!(rig.run(false, &segment(wire, RST | ACK, b"")).0, DROP);
    assert_eq!((rig.counted(), told()), (vec!["drop_reset"], false));
    assert_eq!(rig.run(false, &segment(wire, ACK, b"")).0, REDIRECT);
    assert!(told(), "anything else comes from the peer's own host");
    lead(PATH_HELD | PATH_WATCHED);
    rig.beat(1);
    rig.run(false, &segment(wire, ACK, b""));
    assert!(!told(), "nobody reads it");
    rig.beat(crate::clock::now().micros() * 1000);
    lead(PATH_WATCHED);
    assert_eq!(rig.run(false, &segment(wire, RST | ACK, b"")).0, REDIRECT);
    assert!(!told());
}

#[test]
fn a_pair_that_two_paths_share_leads_to_the_last_of_them() {
    let Some(rig) = rig(sample::tuple4(TCP), true, true, true) else { return };
    let (maps, other) = (&rig.0.maps, PathId(PATH.0 + 1));
    let (entry, pairs) = (rig.path(), AddressPairs { paths: &maps.paths, pairs: &maps.pairs });
    let pair = layout::pair_of(&entry);
    let leads_to = || get::<layout::pair_value>(&maps.pairs, pair.bytes()).map(|value| value.path);
    let stand = |id: PathId| {
        pairs.lead(id, &pair, entry.flags).expect("room");
        put(&maps.paths, &id.0.to_ne_bytes(), entry.bytes());
    };
    let go = |id: PathId| {
        maps.paths.delete(&id.0.to_ne_bytes()).expect("it stood there");
        pairs.forget(id, &pair);
    };
    stand(other);
    assert_eq!(leads_to(), Some(layout::PATH_SHARED));
    stand(PATH);
    assert_eq!(leads_to(), Some(layout::PATH_SHARED), "set again, it is shared as before");
    go(PATH);
    assert_eq!(leads_to(), Some(other.0));
    stand(PATH);
    maps.paths.delete(&other.0.to_ne_bytes()).expect("it stood there");
    stand(PATH);
    assert_eq!(leads_to(), Some(PATH.0), "the other has gone elsewhere without a word");
    go(PATH);
    assert_eq!(leads_to(), None);
}

#[test]
fn keys_are_in_network_order() {
    let key = FlowKey::from(sample::tuple4(TCP));
    assert_eq!(layout::app_key_of(&key).bytes()[32..37], [0x9c, 0x40, 0, 80, TCP]);
}
