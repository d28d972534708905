//! The hand-over record as bytes, and flows that are carried on from it.

use alloc::string::ToString;
use core::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::act::reconfiguration::PeerCut;
use crate::cache::entry::{PathId, Wire};
use crate::cache::output::Output;
use crate::cache::packet::{Unreachable, tcp_flags, unreachable_for};
use crate::leg::carriage::Carriage;
use crate::leg::delta::Clock;
use crate::machine::control::AssociationSetup;
use crate::machine::input::Input;
use crate::session::event::Event;
use crate::types::config::{Config, Limits};
use crate::types::direction::Direction;
use crate::types::key::HostSecret;

const PEER: [u8; 32] = [9; 32];

fn peer() -> HostId {
    crate::types::key::HostPublic(PEER).id()
}

pub(crate) fn record() -> HandoverRecord {
    let source = SocketAddr::new([198, 18, 0, 1].into(), 0x9c40);
    let destination = SocketAddr::new([198, 18, 0, 9].into(), 80);
    let tuple = Tuple { protocol: 6, source, destination };
    let keys = KeyReference { host: peer(), association: 0x0a0b_0c0d };
    let numbers = Numbers {
        highest: (0x0102_0304, 5),
        last_ack: 6,
        last_window: 7,
        scale: Some(8),
        sack_permitted: true,
        timestamps: Some((9, 10)),
    };
    HandoverRecord {
        flow: FlowId(0x1111_1111),
        peer_flow: FlowId(0x2222_2222),
        session: SessionId([3; 16]),
        key_session: None,
        service: ServiceId([4; 32]),
        port: 0x0e0f,
        source: None,
        role: Role::Responder,
        lifecycle: Lifecycle::HalfClosed,
        authenticated: true,
        fins: (true, false),
        is_demanded: false,
        is_demanded_by_peer: false,
        is_demanded_by_rule: false,
        is_guarded: false,
        generation: 12,
        age_ms: 0x1000,
        idle_ms: 0x20,
        egress: Some(numbers),
        ingress: None,
        give_up_after: None,
        chain: None,
        delta: None,
        way: None,
        fetched: None,
        legs: alloc::vec![
            Leg { kind: LegKind::Sal0, stack: 0, tuple: Some(tuple), flow: None, keys: None },
            Leg { kind: LegKind::Stack, stack: 2, tuple: None, flow: Some(FlowId(0x2222_2222)), keys: Some(keys) },
        ],
    }
}

#[test]
fn the_format_is_as_written_above() {
    let bytes = record().encode();
    assert_eq!(bytes.len(), 152 + 2 * 68);
    assert_eq!(bytes[..16], *b"MGHO\x00\x01\x01\x20\x11\x11\x11\x11\x22\x22\x22\x22");
    assert_eq!(bytes[16..64], [[3; 16], [4; 16], [4; 16]].concat());
    assert_eq!(
        bytes[64..88],
        *b"\x02\x03\x03\x02\x00\x00\x00\x0c\x00\x00\x00\x00\x00\x00\x10\x00\x00\x00\x00\x00\x00\x00\x00\x20"
    );
    let egress = *b"\x01\x02\x03\x04\x00\x00\x00\x05\x00\x00\x00\x06\x00\x07\x08\x07\x00\x00\x00\x09\x00\x00\x00\x0a";
    assert_eq!(bytes[88..112], egress);
    assert_eq!(bytes[112..152], [0; 40]);
    assert_eq!(bytes[152..156], [1, 0, 1, 6]);
    assert_eq!(bytes[156..174], *b"\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\xc6\x12\x00\x01\x9c\x40");
    assert_eq!(bytes[216..220], [0x0e, 0x0f, 0, 0]);
    assert_eq!(bytes[220..224], [3, 2, 6, 0]);
    assert_eq!(bytes[260..264], [0x22; 4]);
    assert_eq!(bytes[264..280], peer().0);
    assert_eq!(bytes[280..288], [0x0a, 0x0b, 0x0c, 0x0d, 0, 0, 0, 0]);
    assert_eq!(HandoverRecord::decode(&bytes), Ok(record()));
}

#[test]
fn a_pair_of_its_own_is_the_tuple_of_the_legs_stack() {
    let remote = SocketAddr::new([192, 0, 2, 9].into(), 40_000);
    for local in [None, Some(IpAddr::from([192, 0, 2, 1]))] {
        let mut kept = record();
        kept.legs[1].tuple = Some(tuple_of_pair(Pair { local, remote }));
        let bytes = kept.encode();
        assert_eq!(bytes[220..224], [3, 2, 7, 17]);
        assert_eq!(bytes[242..260], *b"\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\xc0\x00\x02\x09\x9c\x40");
        let read = HandoverRecord::decode(&bytes).expect("it was written so");
        assert_eq!(read.pair(), Some(Pair { local, remote }));
    }
    assert_eq!(record().pair(), None);
}

#[test]
fn the_clients_own_name_comes_last() {
    let named = HandoverRecord { source: Some(ServiceId([7; 32])), ..record() };
    let bytes = named.encode();
    assert_eq!((bytes.len(), bytes[66]), (record().encode().len() + 32, record().encode()[66] | 8));
    assert_eq!(bytes[288..], [7; 32]);
    assert_eq!(HandoverRecord::decode(&bytes), Ok(named));
    assert_eq!(HandoverRecord::decode(&bytes[..288]), Err(HandoverError::Malformed { at: 6 }));
}

#[test]
fn what_the_service_has_said_comes_after_the_name() {
    let told = Some(GiveUpAfter(Some(Duration::from_secs(3))));
    for (source, at) in [(None, 288), (Some(ServiceId([7; 32])), 320)] {
        let record = HandoverRecord { source, give_up_after: told, ..record() };
        let mut bytes = record.encode();
        assert_eq!((bytes[66] & 16, &bytes[at..]), (16, &[0, 0, 0x0b, 0xb8][..]));
        assert_eq!(HandoverRecord::decode(&bytes), Ok(record));
        bytes[at + 2] = 0;
        assert_eq!(HandoverRecord::decode(&bytes), Err(HandoverError::Malformed { at }), "less than the least");
    }
}

#[test]
fn what_the_service_has_said_is_known_where_the_flow_goes_on() {
    let told = Some(GiveUpAfter(None));
    for (role, known) in [(Role::Initiator, told), (Role::Responder, None)] {
        let mut sal = sal(Limits::default());
        meet_peer(&mut sal, 77);
        let record = HandoverRecord { role, fins: (false, false), give_up_after: told, ..record() };
        sal.adopt_flow(Instant::ZERO, &record).expect("the peer is known");
        let again = sal.export_flow(Instant::ZERO, record.flow).expect("it is carried on");
        assert_eq!(again.give_up_after, known);
    }
}

fn delta() -> Delta {
    Delta {
        peer: 0x0102_0304,
        own: 0x0506_0708,
        peer_clock: Clock::awaited(0x0a0b_0c0d, Instant::ZERO),
        own_clock: Clock::Absent,
        ingress_shift: -2,
        egress_shift: 3,
        drops_sack: true,
    }
}

#[test]
fn a_delta_makes_it_another_version() {
    let record = HandoverRecord { delta: Some(delta()), ..record() };
    let mut bytes = record.encode();
    assert_eq!(bytes[4..8], [0, 2, 1, 0x34]);
    assert_eq!(bytes[288..], *b"\x01\x02\x03\x04\x05\x06\x07\x08\x0a\x0b\x0c\x0d\x00\x00\x00\x00\xfe\x03\x19\x00");
    assert_eq!(HandoverRecord::decode(&bytes), Ok(record));
    assert_eq!(HandoverRecord::decode(&bytes[..300]), Err(HandoverError::Malformed { at: 300 }));
    for (at, wrong) in [(306, 0x39), (306, 0x1b), (307, 1), (304, 0x7f), (303, 1)] {
        let right = core::mem::replace(&mut bytes[at], wrong);
        assert_eq!(HandoverRecord::decode(&bytes), Err(HandoverError::Malformed { at: 288 }), "byte {at}");
        bytes[at] = right;
    }
}

fn ways() -> PartingRecord {
    let peer = PeerCut { number: 0x0405_0607, is_closed: true };
    let before = SessionId([6; 16]);
    let new = FlowId(0x3333_3333);
    PartingRecord { number: 9, new, own: 0x0a0b_0c0d, peer: Some(peer), scale: 7, before, delta: Some(delta()) }
}

#[test]
fn two_ways_make_it_another_version() {
    let old = HandoverRecord { way: Some(KeptWay::Old(ways())), ..record() };
    let mut bytes = old.encode();
    assert_eq!(bytes[4..8], [0, 3, 1, 0x20 + 4 + 56]);
    assert_eq!(bytes[288..308], *b"\x02\0\0\0\0\0\0\x09\x33\x33\x33\x33\x0a\x0b\x0c\x0d\x04\x05\x06\x07");
    assert_eq!(bytes[308..312], *b"\x07\x07\0\0");
    assert_eq!(bytes[312..328], [6; 16]);
    assert_eq!(bytes[328..], delta().encode(Instant::ZERO));
    assert_eq!(HandoverRecord::decode(&bytes), Ok(old));
    for (at, wrong) in [(288, 0), (288, 6), (288, 128), (289, 1)] {
        let right = core::mem::replace(&mut bytes[at], wrong);
        let error = HandoverRecord::decode(&bytes).expect_err("no such parts");
        assert_eq!(error, HandoverError::Malformed { at: at.min(288) + usize::from(at == 289) }, "byte {at}");
        bytes[at] = right;
    }
    for (at, wrong) in [(308, 15), (309, 8), (309, 6), (310, 1)] {
        let right = core::mem::replace(&mut bytes[at], wrong);
        assert_eq!(HandoverRecord::decode(&bytes), Err(HandoverError::Malformed { at: 292 }), "byte {at}");
        bytes[at] = right;
    }
    let new = HandoverRecord { way: Some(KeptWay::New), delta: Some(delta()), ..record() };
    let bytes = new.encode();
    assert_eq!(bytes[288..292], [5, 0, 0, 0]);
    assert_eq!(HandoverRecord::decode(&bytes), Ok(new));
}

#[test]
fn keys_of_another_session_stay_so() {
    let spliced = HandoverRecord { key_session: Some(SessionId([9; 16])), ..record() };
    let bytes = spliced.encode();
    assert_eq!(bytes[4..8], [0, 3, 1, 0x24 + 16]);
    assert_eq!((&bytes[288..292], &bytes[292..]), (&[32, 0, 0, 0][..], &[9; 16][..]));
    assert_eq!(HandoverRecord::decode(&bytes), Ok(spliced));
}

#[test]
fn a_flow_that_waits_to_be_encrypted_says_so_in_its_record() {
    for (is_demanded_by_rule, is_guarded, parts) in [(true, false, 8), (false, true, 16), (true, true, 24)] {
        let held = HandoverRecord { is_demanded_by_rule, is_guarded, ..record() };
        let bytes = held.encode();
        assert_eq!(
            (bytes[4..8].to_vec(), bytes[288..].to_vec()),
            (alloc::vec![0, 3, 1, 0x24], alloc::vec![parts, 0, 0, 0])
        );
        assert_eq!(HandoverRecord::decode(&bytes), Ok(held));
    }
    let mut with_delta = HandoverRecord { is_guarded: true, delta: Some(delta()), ..record() }.encode();
    assert!(HandoverRecord::decode(&with_delta).is_ok_and(|record| record.is_guarded && record.delta.is_some()));
    with_delta[288] = 1;
    assert_eq!(HandoverRecord::decode(&with_delta), Err(HandoverError::Malformed { at: 288 }), "of version 2");
}

#[test]
fn a_session_that_was_fetched_has_its_hand_over_in_its_record() {
    let ticket = PeerTicket { peer: HostId([0x77; 16]), ticket: Ticket([0x88; 16]) };
    let fetched = HandoverRecord { fetched: Some(ticket), ..record() };
    let bytes = fetched.encode();
    assert_eq!(bytes[4..8], [0, 3, 1, 0x44]);
    assert_eq!(bytes[288..], [&[64, 0, 0, 0][..], &[0x77; 16], &[0x88; 16]].concat());
    assert_eq!(HandoverRecord::decode(&bytes), Ok(fetched));
    assert!(HandoverRecord::decode(&bytes[..bytes.len() - 1]).is_err());
}

/// Two records of one session's two ways, in either order, and one of them alone.
#[test]
fn a_session_with_two_ways_goes_on_with_both_or_ends() {
    let peer_flow = FlowId(0x4444_4444);
    let open = HandoverRecord { role: Role::Responder, fins: (false, false), ..record() };
    let old = HandoverRecord { way: Some(KeptWay::Old(ways())), ..open.clone() };
    let new = HandoverRecord { flow: ways().new, peer_flow, way: Some(KeptWay::New), ..open.clone() };
    let only = HandoverRecord { way: None, ..new.clone() };
    let now = Instant::from_millis(5000);
    let taken = |records: &[&HandoverRecord]| {
        let mut sal = sal(Limits::default());
        meet_peer(&mut sal, 77);
        for record in records {
            // Of two of one five-tuple the second one is refused.
            let _ = sal.adopt_flow(now, record);
        }
        sal.resume_ways(now);
        let ids: Vec<FlowId> = [old.flow, new.flow].into_iter().filter(|id| sal.flow(*id).is_some()).collect();
        let way = sal.export_flow(now, old.flow).and_then(|record| record.way);
        (ids, way.is_some(), sal.flow(old.flow).is_some_and(|flow| flow.lifecycle < Lifecycle::Closed))
    };
    for both in [[&old, &new], [&new, &old]] {
        assert_eq!(taken(&both), (alloc::vec![old.flow, new.flow], true, true));
    }
    for ended in [[&old, &only], [&only, &old]] {
        assert_eq!(taken(&ended).0, [new.flow], "the new way has become the only one");
    }
    assert!(!taken(&[&old]).2, "bytes may be lost");
    assert_eq!(taken(&[&new]).0, []);
    for canceled in [[&open, &new], [&new, &open]] {
        assert_eq!(taken(&canceled), (alloc::vec![open.flow], false, true));
    }
}

#[test]
fn a_delta_goes_on_with_its_flow_and_its_clocks() {
    let mut sal = sal(Limits::default());
    meet_peer(&mut sal, 77);
    let adopted = HandoverRecord { fins: (false, false), delta: Some(delta()), ..record() };
    sal.adopt_flow(Instant::from_millis(5000), &adopted).expect("the peer is known");
    let again = sal.export_flow(Instant::from_millis(5300), adopted.flow).expect("it is carried on");
    let peer_clock = Clock::awaited(0x0a0b_0c0d + 300, Instant::ZERO);
    assert_eq!(again.delta, Some(Delta { peer_clock, ..delta() }));
}

#[test]
fn another_version_is_refused_in_words() {
    let mut bytes = record().encode();
    bytes[5] = 4;
    let error = HandoverRecord::decode(&bytes).expect_err("version 4");
    assert_eq!(error, HandoverError::Version { found: 4 });
    let said = "the hand-over record has version 4, this program reads version 3; run the same version on both sides";
    assert_eq!(error.to_string(), said);
    bytes[0] = b'X';
    assert_eq!(HandoverRecord::decode(&bytes), Err(HandoverError::Malformed { at: 0 }));
    assert!(matches!(HandoverRecord::decode(&[]), Err(HandoverError::Malformed { at: 0 })));
}

proptest! {
    /// What decodes has one form: encoding it again gives the same bytes. Nothing makes the reader stumble.
    #[test]
    fn a_record_has_one_form(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = record().encode();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(record) = HandoverRecord::decode(&bytes) {
            prop_assert_eq!(record.encode(), bytes.clone());
        }
        bytes.truncate(cut.index(bytes.len()));
        prop_assert!(HandoverRecord::decode(&bytes).is_err());
    }
}

pub(crate) fn sal(limits: Limits) -> Sal {
    let config = Config {
        host_key: HostSecret::from_bytes([5; 32]),
        epoch: 1,
        boot_id: [6; 16],
        router: false,
        datagram_max: 1472,
        local_addresses: Vec::new(),
        ranges: crate::Ranges::USUAL,
        limits,
    };
    Sal::new(config, Instant::ZERO, 0, [7; 32])
}

pub(crate) fn meet_peer(sal: &mut Sal, local_id: u32) {
    let setup = AssociationSetup {
        host_key: PEER,
        key: [1; 32],
        local_id,
        remote_id: 3,
        peer_epoch: 1,
        boot_id: None,
        remote: SocketAddr::new([10, 0, 0, 2].into(), 54324),
        hop_key: None,
        router: false,
        initiator: true,
    };
    sal.install_association(Instant::ZERO, setup);
}

#[test]
fn an_adopted_flow_is_carried_on_and_can_be_exported_again() {
    let mut sal = sal(Limits::default());
    assert_eq!(sal.adopt_flow(Instant::ZERO, &record()), Err(AdoptError::UnknownPeer(peer())));
    meet_peer(&mut sal, 77);
    let now = Instant::from_millis(60_000);
    sal.adopt_flow(now, &record()).expect("the peer is known");
    let mut buf = alloc::vec![0; 65_536];
    let mut installed = None;
    while let Some(output) = sal.poll(&mut buf) {
        if let Output::Update(EntryUpdate::Install(entry)) = output {
            installed = Some(entry);
        }
    }
    let entry = installed.expect("the cache was told");
    assert_eq!((entry.flow, entry.peer_flow, entry.generation), (FlowId(0x1111_1111), FlowId(0x2222_2222), 13));
    let mut wanted = record();
    wanted.generation = 13;
    wanted.egress = None;
    wanted.legs[1].keys = Some(KeyReference { host: peer(), association: 77 });
    wanted.age_ms += 500;
    wanted.idle_ms += 500;
    assert_eq!(sal.export_flow(Instant::from_millis(60_500), FlowId(0x1111_1111)), Some(wanted));
    assert_eq!(sal.adopt_flow(now, &record()), Err(AdoptError::Taken("identifier")));
    let twin = HandoverRecord { flow: FlowId(5), ..record() };
    assert_eq!(sal.adopt_flow(now, &twin), Err(AdoptError::Taken("five-tuple")));
}

#[test]
fn a_flow_that_both_have_closed_is_carried_on_until_nothing_can_come_late() {
    let mut before = sal(Limits::default());
    meet_peer(&mut before, 77);
    let now = Instant::from_millis(60_000);
    before.adopt_flow(now, &HandoverRecord { fins: (true, false), ..record() }).expect("the peer is known");
    while before.poll_event().is_some() {}
    assert_eq!(before.flow(record().flow).and_then(|flow| flow.closed), Some(Direction::Egress));
    before.handle(now, Input::Transport { flow: record().flow, direction: Direction::Ingress, flags: tcp_flags::FIN });
    let changed = core::iter::from_fn(|| before.poll_event())
        .any(|event| matches!(event, Event::FlowEnded { flow, .. } if flow == record().flow));
    assert!(changed, "whoever keeps records hears of it");
    assert_eq!(before.flow(record().flow).and_then(|flow| flow.closed), None, "by both");
    let over = before.export_flow(now, record().flow).expect("it lingers");
    assert_eq!((over.lifecycle, over.fins), (Lifecycle::Closed, (true, true)));
    let mut after = sal(Limits::default());
    meet_peer(&mut after, 77);
    after.adopt_flow(now, &over).expect("the peer is known");
    after.handle(now + (LINGER - Duration::from_millis(1)), Input::Timeout);
    assert_eq!(after.flow_count(), 1);
    after.handle(now + LINGER, Input::Timeout);
    let mut buf = alloc::vec![0; 65_536];
    let is_asked = |output| matches!(output, Output::Ending(flow) if flow == record().flow);
    assert!(core::iter::from_fn(|| after.poll(&mut buf)).any(is_asked));
    after.handle(now + LINGER, Input::Ending { flow: record().flow, is_over: true });
    assert_eq!(after.flow_count(), 0, "not after days");
}

/// Taken up with ports of its own, while the cache's entry names the record `path`.
fn adopted(sal: &mut Sal, association: u32, path: u32, (role, accepting): (Role, bool)) -> (bool, u32, u32) {
    let now = Instant::from_millis(1);
    let (local, remote) = ([0, 0, 0, 0].into(), [10, 0, 0, 2].into());
    let ports =
        Tuple { protocol: 6, source: SocketAddr::new(local, 61_001), destination: SocketAddr::new(remote, 61_002) };
    let mut direct = HandoverRecord { role, ..record() };
    direct.legs[1].keys = Some(KeyReference { host: peer(), association });
    direct.legs.push(Leg { kind: LegKind::Nic, stack: 0, tuple: Some(ports), flow: None, keys: None });
    sal.adopt_flow(now, &direct).expect("the peer is known");
    let wire =
        Wire { path: PathId(path), local_port: 61_001, remote_port: 61_002, sending: true, accepting, begun: true };
    let is_adopted = sal.adopt_direct(now, direct.flow, 12, &wire);
    let named = sal.flows.get(direct.flow).map_or(0, |flow| flow.direct.path);
    (is_adopted, named, sal.associations.get(association).map_or(0, |association| association.wire_path))
}

#[test]
fn a_direct_flow_goes_on_by_the_record_that_its_peer_has() {
    for (entry, path) in [(77, 77), (78, 78), (5, 78)] {
        let mut sal = sal(Limits::default());
        meet_peer(&mut sal, 77);
        sal.associations.hold(77);
        meet_peer(&mut sal, 78);
        assert_eq!(adopted(&mut sal, 78, entry, (Role::Initiator, true)), (true, path, path), "{entry}");
    }
}

#[test]
fn a_direct_flow_whose_first_packet_has_not_come_waits_for_it_as_before() {
    for (role, now) in [(Role::Initiator, (Carriage::Sending, true)), (Role::Responder, (Carriage::Direct, false))] {
        let mut sal = sal(Limits::default());
        meet_peer(&mut sal, 77);
        assert!(adopted(&mut sal, 77, 77, (role, false)).0);
        let direct = &sal.flows.get(record().flow).expect("adopted").direct;
        assert_eq!((direct.carriage, direct.wire().is_some_and(|wire| wire.begun)), now);
    }
}

#[test]
fn what_cannot_be_carried_on_is_refused_and_nothing_changes() {
    let mut sal = sal(Limits { flows: 0, ..Limits::default() });
    meet_peer(&mut sal, 77);
    let now = Instant::ZERO;
    assert_eq!(sal.adopt_flow(now, &record()), Err(AdoptError::Full { limit: 0 }));
    let over = HandoverRecord { lifecycle: Lifecycle::TimedOut, ..record() };
    assert_eq!(sal.adopt_flow(now, &over), Err(AdoptError::NotAlive));
    let mut chained = record();
    chained.legs.push(chained.legs[1]);
    assert_eq!(sal.adopt_flow(now, &chained), Err(AdoptError::Legs));
    assert_eq!(sal.flow_count(), 0);
    assert_eq!(sal.export_flow(now, FlowId(1)), None);
}

/// An IPv4 packet of UDP without data, checksums left out.
fn datagram(tuple: &Tuple) -> alloc::vec::Vec<u8> {
    let mut packet = alloc::vec![0_u8; 28];
    (packet[0], packet[3], packet[8], packet[9]) = (0x45, 28, 64, tuple.protocol);
    for (at, end) in [(12, tuple.source), (16, tuple.destination)] {
        let IpAddr::V4(v4) = end.ip() else { panic!("IPv4") };
        packet[at..at + 4].copy_from_slice(&v4.octets());
    }
    packet[20..22].copy_from_slice(&tuple.source.port().to_be_bytes());
    packet[22..24].copy_from_slice(&tuple.destination.port().to_be_bytes());
    packet[25] = 8;
    packet
}

#[test]
fn who_may_write_icmp_ends_no_flow_of_a_named_socket_and_no_open_connection() {
    let named = Some(ServiceId([7; 32]));
    for (protocol, source, is_outside, is_ended) in
        [(17, None, false, true), (17, None, true, true), (17, named, true, false), (6, None, false, false)]
    {
        let mut sal = sal(Limits::default());
        meet_peer(&mut sal, 77);
        let mut record = HandoverRecord {
            source,
            role: Role::Initiator,
            lifecycle: Lifecycle::Established,
            fins: (false, false),
            egress: None,
            ..record()
        };
        record.legs[0].tuple.as_mut().expect("it has one").protocol = protocol;
        sal.adopt_flow(Instant::ZERO, &record).expect("the peer is known");
        // What the peer has sent cannot be delivered, somebody says.
        let tuple = record.app().expect("it has one").reversed();
        let packet = datagram(&tuple);
        let mut error =
            unreachable_for(&packet, tuple.destination.ip(), tuple.source.ip(), Unreachable::Port).expect("one family");
        if is_outside {
            crate::act::chain::mark_outside(&mut error);
        }
        sal.handle_app_packet(Instant::ZERO, &error);
        let is_open = sal.flow(record.flow).is_some_and(|flow| flow.lifecycle == Lifecycle::Established);
        assert_eq!(!is_open, is_ended, "{protocol}, {source:?}, outside {is_outside}");
    }
}
