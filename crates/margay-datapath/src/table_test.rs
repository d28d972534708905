//! The table's own rules, and that it is like a plain map.

use super::*;
use crate::ending::Arrived;
use crate::packet::{ACK, TCP, UDP};
use crate::sample;
use crate::train::Delivered;
use margay_core::Taking;
use margay_core::delta::Delta;
use margay_core::entry::{Place, Places};
use margay_core::{Cipher, PlaceStack, Tuple};
use margay_wire::{DATA_HEADER_LEN, SEAL_TAG_LEN, STACK_ENCAP, STACK_FEC};
use proptest::prelude::*;
use std::collections::BTreeMap;

pub(super) fn entry(flow: u32, generation: u32, port: u16) -> Entry {
    let mut app = sample::tuple4(TCP);
    app.source.set_port(port);
    Entry {
        flow: FlowId(flow),
        generation,
        app,
        peer_flow: FlowId(flow + 1000),
        path: PathId(1),
        wire: None,
        seal: None,
        stacks: Stacks::only(Stack::Plain),
        stripe: None,
        is_held: false,
        at_middlebox: false,
        is_of_named_socket: false,
        directions: margay_core::Directions::Both,
        delta: None,
    }
}

fn path(remote: &str, datagram_max: u16) -> Path {
    Path {
        id: PathId(1),
        remote: remote.parse().expect("literal"),
        local: None,
        datagram_max,
        passage: Passage::Open,
        wired: true,
        expected: None,
        watched: false,
        peer: Peer::Own,
    }
}

pub(super) fn data(packet_number: u32, flags: u8) -> DataRepr {
    DataRepr { stack: 2, flags, dst_flow: FlowId(7), packet_number, index: 0, count: 1 }
}

pub(super) fn table() -> Table {
    let mut table = Table::default();
    table.apply(EntryUpdate::Path(path("10.0.0.2:54324", 1472)));
    table
}

#[test]
fn no_packet_number_comes_twice_while_a_flow_lives() {
    let mut table = table();
    let numbered = |table: &Table, port: u16| {
        let key = FlowKey::from(entry(7, 1, port).app);
        table.egress(&key, 10, 1, None, Origin::Program).expect("installed").packet_number
    };
    let install = |table: &mut Table, flow: u32, port: u16| {
        assert_eq!(table.apply(EntryUpdate::Install(entry(flow, 1, port))), Applied::Done);
    };
    install(&mut table, 7, 100);
    assert_eq!((numbered(&table, 100), numbered(&table, 100)), (0, 1));
    table.clear();
    install(&mut table, 7, 100);
    assert_eq!(numbered(&table, 100), 2, "the cache was emptied");
    install(&mut table, 8, 100);
    assert_eq!(numbered(&table, 100), 0, "another flow");
    install(&mut table, 7, 200);
    assert_eq!(numbered(&table, 200), 3, "its five-tuple had been taken");
    table.clear();
    table.apply(EntryUpdate::Remove { flow: FlowId(7), reason: RemoveReason::Closed });
    install(&mut table, 7, 100);
    assert_eq!(numbered(&table, 100), 0, "a new flow of the same number");
    assert!(table.numbers.len() <= 1);
}

#[test]
fn found_both_ways_and_counted() {
    let mut table = table();
    assert_eq!(table.apply(EntryUpdate::Install(entry(7, 1, 100))), Applied::Done);
    let key = FlowKey::from(entry(7, 1, 100).app);
    let first = table.egress(&key, 10, 1, None, Origin::Program).expect("installed");
    let second = table.egress(&key, 20, 2, None, Origin::Program).expect("installed");
    assert_eq!((first.packet_number, second.packet_number), (0, 1));
    assert_eq!((first.peer_flow, first.to.datagram_max), (FlowId(1007), 1472));
    let from = "10.0.0.2:54324".parse().expect("literal");
    let route = IngressRoute {
        gives_up: false,
        to: key.reversed().into(),
        is_back: false,
        is_sending: false,
        seal: None,
        by_plain_place: false,
        is_repair: false,
        fec: None,
        sctp: None,
        turn: None,
        ends_silence: false,
        is_opening: false,
        stripe: None,
    };
    assert_eq!(table.ingress(FlowId(7), (None, from), &data(0, 0)), Ok(route));
    table.count_ingress(FlowId(7), 5, 1);
    let counters = FlowCounters { egress_bytes: 30, egress_segments: 3, ingress_bytes: 5, ingress_segments: 1 };
    assert_eq!(table.counters(FlowId(7)), Some(counters));
    assert_eq!(table.egress(&key.reversed(), 1, 1, None, Origin::Program), None);
}

#[test]
fn of_a_flow_of_a_named_socket_the_core_has_what_comes_from_outside() {
    let mut table = table();
    let entry = Entry { is_of_named_socket: true, ..entry(7, 1, 100) };
    let key = FlowKey::from(entry.app);
    table.apply(EntryUpdate::Install(entry));
    let carries =
        [Origin::Program, Origin::Outside, Origin::Core].map(|from| table.egress(&key, 1, 1, None, from).is_some());
    assert_eq!(carries, [true, false, true]);
}

#[test]
fn of_a_flow_at_a_middlebox_the_core_has_what_was_not_forwarded() {
    let mut table = table();
    let at_middlebox = |generation, at_middlebox| Entry { at_middlebox, ..entry(7, generation, 100) };
    let key = FlowKey::from(entry(7, 1, 100).app);
    let carried = |table: &Table| {
        [Origin::Program, Origin::Middlebox, Origin::Core].map(|from| table.egress(&key, 1, 1, None, from).is_some())
    };
    table.apply(EntryUpdate::Install(at_middlebox(1, true)));
    assert_eq!(carried(&table), [false, true, true]);
    table.apply(EntryUpdate::Install(at_middlebox(2, false)));
    assert_eq!(carried(&table), [true; 3]);
}

#[test]
fn a_new_flow_of_datagrams_is_the_cores_until_it_has_sent_what_it_held() {
    let mut table = table();
    let mut datagrams = entry(7, 1, 100);
    datagrams.app = sample::tuple4(UDP);
    let key = FlowKey::from(datagrams.app);
    let from = "10.0.0.2:54324".parse().expect("literal");
    let opens = |table: &Table| {
        let arrived = table.ingress(FlowId(7), (None, from), &data(0, 0)).expect("installed");
        [table.egress(&key, 1, 1, None, Origin::Program).is_none(), arrived.is_opening]
    };
    table.apply(EntryUpdate::Install(datagrams));
    assert_eq!(opens(&table), [true, true]);
    assert!(table.egress(&key, 1, 1, None, Origin::Core).is_some(), "the core's own");
    table.open(FlowId(7));
    assert_eq!(opens(&table), [false, false]);
    datagrams.generation = 2;
    table.apply(EntryUpdate::Install(datagrams));
    assert_eq!(opens(&table), [false, false], "it was there already");
    table.clear();
    table.apply(EntryUpdate::Install(datagrams));
    assert_eq!(opens(&table), [true, true], "what found no entry meanwhile waits for the core");
}

/// A place by which a flow goes as it goes by others.
const fn place_of(id: u32) -> Place {
    Place { path: PathId(id), may_send: true, weight: 1, sends: None, takes: None }
}

#[test]
fn a_striped_flow_takes_data_from_its_places_and_keeps_what_it_knows_of_them() {
    let mut table = table();
    let places = [("10.1.0.2:54324", "10.1.0.1"), ("10.1.0.2:54324", "10.2.0.1")];
    for (id, (remote, local)) in (8..).zip(places) {
        let local = Some(local.parse().expect("literal"));
        table.apply(EntryUpdate::Path(Path { id: PathId(id), local, ..path(remote, 1472) }));
    }
    let place = |id, may_send| Some(Place { may_send, ..place_of(id) });
    let places = Places { places: [place(8, true), place(9, false), None, None], ..Places::default() };
    let striped = |generation| Entry { stripe: Some(places), ..entry(7, generation, 100) };
    table.apply(EntryUpdate::Install(striped(1)));
    let came = |table: &Table, local: Option<&str>, from: &str| {
        let local = local.map(|local| local.parse().expect("literal"));
        let route = table.ingress(FlowId(7), (local, from.parse().expect("literal")), &data(0, 0));
        route.map(|route| route.stripe.expect("it is striped").1)
    };
    assert_eq!(came(&table, Some("10.1.0.1"), "10.1.0.2:54324"), Ok(Some(0)));
    assert_eq!(came(&table, Some("10.2.0.1"), "10.1.0.2:54324"), Ok(Some(1)));
    assert_eq!(came(&table, None, "10.1.0.2:54324"), Ok(Some(0)));
    assert_eq!(came(&table, Some("10.1.0.1"), "10.0.0.2:54324"), Ok(None), "where all flows with the peer go");
    assert_eq!(came(&table, Some("10.1.0.1"), "10.1.0.3:54324"), Err(DropReason::WrongPath));
    let stripe = table.stripe(FlowId(7)).expect("it is striped");
    assert_eq!((stripe.path(0), stripe.path(1)), (Some(PathId(8)), None), "not by one that has not answered");
    table.clear();
    table.apply(EntryUpdate::Install(striped(2)));
    assert_eq!(table.stripe(FlowId(7)), Some(stripe), "what is known of places outlives the entry");
    table.apply(EntryUpdate::Install(entry(7, 3, 100)));
    assert_eq!(table.stripe(FlowId(7)), None);
}

#[test]
fn a_sealed_flow_takes_what_is_plain_by_its_plain_places_alone() {
    let mut table = table();
    for (id, local) in [(8, "10.1.0.1"), (9, "10.2.0.1")] {
        let local = Some(local.parse().expect("literal"));
        table.apply(EntryUpdate::Path(Path { id: PathId(id), local, ..path("10.1.0.2:54324", 1472) }));
    }
    let keys = sample::seal_keys(Cipher::Aes256Gcm);
    let install = |table: &mut Table, generation, is_plain| {
        let place = |id, is_plain: bool| {
            let stack = is_plain.then_some(PlaceStack::Plain);
            Some(Place { sends: stack, takes: stack, ..place_of(id) })
        };
        let places = Places { places: [place(8, is_plain), place(9, false), None, None], ..Places::default() };
        let stacks = Stacks::only(Stack::Secure);
        let entry = Entry { stripe: Some(places), seal: Some(keys), stacks, ..entry(7, generation, 100) };
        table.apply(EntryUpdate::Install(entry));
    };
    let from = "10.1.0.2:54324".parse().expect("literal");
    let takes = |table: &Table, local: Option<&str>, stack| {
        let local = local.map(|local| local.parse().expect("literal"));
        let route = table.ingress(FlowId(7), (local, from), &DataRepr { stack, ..data(0, 0) });
        route.map(|route| (route.by_plain_place, route.seal.is_some()))
    };
    install(&mut table, 1, true);
    assert_eq!(takes(&table, Some("10.1.0.1"), STACK_ENCAP), Ok((true, false)));
    assert_eq!(takes(&table, Some("10.2.0.1"), STACK_ENCAP), Err(DropReason::OtherStack));
    assert_eq!(takes(&table, None, STACK_ENCAP), Err(DropReason::OtherStack), "it may be the other place");
    assert_eq!(takes(&table, Some("10.1.0.1"), STACK_FEC), Err(DropReason::OtherStack));
    for local in ["10.1.0.1", "10.2.0.1"] {
        assert_eq!(takes(&table, Some(local), keys.cipher.stack()), Ok((false, true)), "sealed by any");
    }
    install(&mut table, 2, false);
    assert_eq!(takes(&table, Some("10.1.0.1"), STACK_ENCAP), Err(DropReason::OtherStack), "a demand has come");
}

/// Whether it is sealed or not: what a repair brings back is looked at by itself.
#[test]
fn repairs_are_taken_by_places_that_repair_alone() {
    for stack in [Stack::Plain, Stack::Secure] {
        let mut table = table();
        for (id, local) in [(8, "10.1.0.1"), (9, "10.2.0.1")] {
            let local = Some(local.parse().expect("literal"));
            table.apply(EntryUpdate::Path(Path { id: PathId(id), local, ..path("10.1.0.2:54324", 1472) }));
        }
        let places = [Some(Place { takes: Some(PlaceStack::Fec), ..place_of(8) }), Some(place_of(9)), None, None];
        let stripe = Some(Places { places, ..Places::default() });
        let seal = stack.is_sealed().then(|| sample::seal_keys(Cipher::Aes256Gcm));
        table.apply(EntryUpdate::Install(Entry { stripe, seal, stacks: Stacks::only(stack), ..entry(7, 1, 100) }));
        let from = "10.1.0.2:54324".parse().expect("literal");
        let takes = |local: Option<&str>, flags| {
            let local = local.map(|local| local.parse().expect("literal"));
            let route = table.ingress(FlowId(7), (local, from), &DataRepr { stack: STACK_FEC, flags, ..data(0, 0) });
            route.map(|route| (route.is_repair, route.seal.is_some(), route.fec.is_some()))
        };
        assert_eq!(takes(Some("10.1.0.1"), REPAIR), Ok((true, false, false)), "{stack:?}");
        assert_eq!(takes(Some("10.1.0.1"), 0), Err(DropReason::OtherStack), "{stack:?}: no datagram of `fec`");
        assert_eq!(takes(Some("10.2.0.1"), REPAIR), Err(DropReason::OtherStack), "{stack:?}: by another place");
        assert_eq!(takes(None, REPAIR), Err(DropReason::OtherStack), "{stack:?}: by either");
    }
}

/// One count for what is sealed and what is not: a train has as many numbers as chunks.
#[test]
fn plain_trains_of_a_sealed_flow_have_numbers_between_those_that_are_sealed() {
    let seal = crate::seal::Seal::new(&sample::seal_keys(Cipher::Aes256Gcm));
    let number = |seal: &crate::seal::Seal| {
        let mut train = [0; 64];
        seal.seal_train(FlowId(7), &mut train, 64).expect("sealed");
        DataRepr::parse(&train).expect("DATA").packet_number
    };
    let chunks = crate::outbox::chunks(4000, 1472);
    assert_eq!((chunks, crate::outbox::chunks(10, 1472)), (3, 1));
    assert_eq!((number(&seal), seal.take_numbers(chunks), number(&seal)), (0, 1, 4));
}

#[test]
fn a_path_swap_moves_every_flow_and_keeps_what_was_learned_only_on_the_same_links() {
    let mut table = table();
    table.apply(EntryUpdate::Install(entry(7, 1, 100)));
    table.shrink_path(PathId(1), 1252);
    table.shrink_path(PathId(1), 1400);
    let size = |table: &Table| table.destination(PathId(1)).map(|to| to.datagram_max);
    assert_eq!(size(&table), Some(1252));
    table.apply(EntryUpdate::Path(path("10.0.0.2:54324", 1472)));
    assert_eq!(size(&table), Some(1252));
    table.apply(EntryUpdate::Path(path("10.9.0.2:54324", 1472)));
    assert_eq!(size(&table), Some(1472));
    let key = FlowKey::from(entry(7, 1, 100).app);
    let remote = table.egress(&key, 1, 1, None, Origin::Program).map(|route| route.to.remote.to_string());
    assert_eq!(remote.as_deref(), Some("10.9.0.2:54324"));
}

#[test]
fn activity_is_reported_once() {
    let mut table = table();
    table.apply(EntryUpdate::Install(entry(7, 1, 100)));
    table.apply(EntryUpdate::Install(entry(8, 1, 101)));
    let _ = table.egress(&FlowKey::from(entry(7, 1, 100).app), 1, 1, None, Origin::Program);
    let mut flows = Vec::new();
    table.take_active(0, &mut flows);
    assert_eq!(flows, [FlowId(7)]);
    flows.clear();
    table.take_active(0, &mut flows);
    assert!(flows.is_empty());
}

#[test]
fn a_pinhole_waits_for_the_applications_numbers() {
    let mut table = table();
    let wire = Wire {
        path: PathId(1),
        local_port: 61_001,
        remote_port: 61_002,
        sending: false,
        accepting: false,
        begun: true,
    };
    table.apply(EntryUpdate::Install(Entry { wire: Some(wire), ..entry(7, 1, 100) }));
    let key = FlowKey::from(entry(7, 1, 100).app);
    let numbers = TcpNumbers { sequence: 5, acknowledgement: 6, end: None };
    let asks =
        |table: &Table| table.egress(&key, 1, 1, Some(numbers), Origin::Program).map(|route| route.wants_pinhole);
    assert_eq!(table.pinhole(FlowId(7)), None);
    assert_eq!((asks(&table), asks(&table)), (Some(true), Some(false)));
    assert_eq!(table.pinhole(FlowId(7)), Some((wire, Some(numbers))));
}

#[test]
fn sealed_flows_take_nothing_else_and_keep_their_numbers() {
    let mut table = table();
    let keys = sample::seal_keys(Cipher::Aes256Gcm);
    let stacks = Stacks::only(Stack::Secure);
    let sealed =
        |generation, keys| EntryUpdate::Install(Entry { seal: Some(keys), stacks, ..entry(7, generation, 100) });
    let from = "10.0.0.2:54324".parse().expect("literal");
    let key = FlowKey::from(entry(7, 1, 100).app);
    let seal =
        |table: &Table| table.egress(&key, 1, 1, None, Origin::Program).and_then(|route| route.seal).expect("sealed");
    table.apply(sealed(1, keys));
    let first = seal(&table);
    let of_stack = |stack| DataRepr { stack, ..data(0, 0) };
    let route = |table: &Table, stack| table.ingress(FlowId(7), (None, from), &of_stack(stack)).map(|route| route.seal);
    assert_eq!(route(&table, keys.cipher.stack()), Ok(Some(Arc::clone(&first))));
    for other in [STACK_ENCAP, Cipher::ChaCha20Poly1305.stack(), 0] {
        assert_eq!(route(&table, other), Err(DropReason::OtherStack));
    }
    assert!(table.mark_route(FlowId(7)).is_none(), "there is no plain word about it");
    table.clear();
    table.apply(sealed(1, keys));
    assert!(seal(&table) == first, "forgotten, and still the same numbers and window");
    table.apply(sealed(2, SealKeys { send: [9; 32], ..keys }));
    assert!(seal(&table) != first, "an agent has started again");
    table.apply(EntryUpdate::Remove { flow: FlowId(7), reason: RemoveReason::Closed });
    assert!(table.seals.is_empty());
    table.apply(EntryUpdate::Install(entry(7, 1, 100)));
    assert_eq!(route(&table, keys.cipher.stack()), Err(DropReason::OtherStack), "a plain flow takes nothing sealed");
}

#[test]
fn a_flow_turns_with_the_last_packet_of_its_stack_and_comes_back_to_its_numbers() {
    let mut table = table();
    let keys = sample::seal_keys(Cipher::Aes256Gcm);
    let key = FlowKey::from(entry(7, 1, 100).app);
    let from = "10.0.0.2:54324".parse().expect("literal");
    let seal = |table: &Table| table.egress(&key, 1, 1, None, Origin::Program).expect("cached").seal;
    let route = |table: &Table, stack| {
        let data = DataRepr { stack, ..data(0, 0) };
        let route = table.ingress(FlowId(7), (None, from), &data);
        route.map(|route| (route.seal.is_some(), route.turn.map(|(turn, of)| (turn.change, of))))
    };
    let update = |generation, sends, takes, change, seal| {
        let stacks = Stacks { sends, takes, before: Stack::Plain, change };
        EntryUpdate::Install(Entry { seal, stacks, ..entry(7, generation, 100) })
    };
    let plain = STACK_ENCAP;
    let secure = keys.cipher.stack();
    table.apply(EntryUpdate::Install(entry(7, 1, 100)));
    table.apply(update(2, Stack::Secure, Taking::Turning(Stack::Secure), 9, Some(keys)));
    assert!(table.is_to_turn(FlowId(7)) && seal(&table).is_none(), "not before its last plain packet");
    let last = table.begin_turn(FlowId(7)).expect("it turns");
    assert_eq!((last.change, last.route.seal, table.begin_turn(FlowId(7))), (9, None, None));
    let sealed = seal(&table).expect("sealed");
    assert!(table.mark_route(FlowId(7)).is_none(), "nothing plain is said of it any more");
    assert_eq!(route(&table, plain), Ok((false, Some((9, Stack::Plain)))));
    assert_eq!(route(&table, secure), Ok((true, Some((9, Stack::Secure)))));
    let turn = table.turns.get(&FlowId(7)).cloned();
    table.clear();
    table.apply(update(2, Stack::Secure, Taking::Turning(Stack::Secure), 9, Some(keys)));
    assert_eq!(table.turns.get(&FlowId(7)).cloned(), turn, "the FENCE comes once");
    table.apply(update(3, Stack::Secure, Taking::Only(Stack::Secure), 9, Some(keys)));
    assert_eq!((route(&table, plain), route(&table, secure)), (Err(DropReason::OtherStack), Ok((true, None))));
    assert!(table.turns.is_empty() && !table.is_to_turn(FlowId(7)));
    // Back at once: what is sealed goes on until the last packet of it.
    table.apply(update(4, Stack::Plain, Taking::Only(Stack::Plain), 10, None));
    assert!(seal(&table) == Some(Arc::clone(&sealed)) && table.is_to_turn(FlowId(7)));
    assert_eq!(route(&table, secure), Err(DropReason::OtherStack));
    let last = table.begin_turn(FlowId(7)).expect("it turns");
    assert_eq!((last.change, last.route.seal.as_ref()), (10, Some(&sealed)));
    assert!(seal(&table).is_none());
    table.apply(update(5, Stack::Secure, Taking::Turning(Stack::Secure), 11, Some(keys)));
    table.begin_turn(FlowId(7)).expect("it turns");
    assert!(seal(&table) == Some(sealed), "no number comes twice");
}

#[test]
fn what_numbers_and_repairs_a_flow_is_there_from_its_change_on_and_is_another_one_after_the_next() {
    let mut table = table();
    let key = FlowKey::from(entry(7, 1, 100).app);
    let from = "10.0.0.2:54324".parse().expect("literal");
    let sends = |table: &Table| table.egress(&key, 1, 1, None, Origin::Program).expect("cached").fec;
    let takes = |table: &Table, stack| {
        let data = DataRepr { stack, ..data(0, 0) };
        table.ingress(FlowId(7), (None, from), &data).map(|route| route.fec)
    };
    let update = |generation, sends, takes, before, change| {
        let stacks = Stacks { sends, takes, before, change };
        EntryUpdate::Install(Entry { stacks, ..entry(7, generation, 100) })
    };
    table.apply(EntryUpdate::Install(entry(7, 1, 100)));
    assert_eq!(takes(&table, STACK_FEC), Err(DropReason::OtherStack));
    table.apply(update(2, Stack::Plain, Taking::Ready(Stack::Fec), Stack::Plain, 9));
    let fec = table.fec(FlowId(7)).expect("ready");
    assert_eq!((takes(&table, STACK_FEC), takes(&table, STACK_ENCAP)), (Ok(Some(Arc::clone(&fec))), Ok(None)));
    assert!(sends(&table).is_none());
    table.apply(update(3, Stack::Fec, Taking::Turning(Stack::Fec), Stack::Plain, 9));
    let last = table.begin_turn(FlowId(7)).expect("it turns");
    assert_eq!((last.change, last.route.fec, last.route.seal), (9, None, None));
    assert_eq!(sends(&table), Some(Arc::clone(&fec)));
    assert!(table.mark_route(FlowId(7)).is_none());
    table.apply(update(4, Stack::Fec, Taking::Only(Stack::Fec), Stack::Fec, 9));
    assert_eq!(takes(&table, STACK_ENCAP), Err(DropReason::OtherStack));
    // The number of the next change is there before that change is made; and caches are emptied.
    table.clear();
    table.apply(update(5, Stack::Fec, Taking::Only(Stack::Fec), Stack::Fec, 10));
    assert_eq!((sends(&table), table.fec(FlowId(7))), (Some(Arc::clone(&fec)), Some(Arc::clone(&fec))));
    table.apply(update(6, Stack::Plain, Taking::Only(Stack::Plain), Stack::Plain, 10));
    assert_eq!(sends(&table), Some(Arc::clone(&fec)), "until its last packet");
    let last = table.begin_turn(FlowId(7)).expect("it turns");
    assert_eq!((last.change, last.route.fec), (10, Some(Arc::clone(&fec))));
    assert_eq!((sends(&table), table.fec(FlowId(7))), (None, None));
    table.apply(update(7, Stack::Fec, Taking::Turning(Stack::Fec), Stack::Plain, 11));
    assert!(table.fec(FlowId(7)).is_some_and(|other| other != fec), "numbers begin anew");
    table.apply(EntryUpdate::Remove { flow: FlowId(7), reason: RemoveReason::Closed });
    assert!(table.fecs.is_empty());
}

#[test]
fn a_turn_that_is_over_stays_until_nothing_waits_of_it() {
    let mut table = table();
    let keys = sample::seal_keys(Cipher::Aes256Gcm);
    let from = "10.0.0.2:54324".parse().expect("literal");
    let update = |generation, takes, change| {
        let stacks = Stacks { sends: Stack::Plain, takes, before: Stack::Plain, change };
        EntryUpdate::Install(Entry { seal: Some(keys), stacks, ..entry(7, generation, 100) })
    };
    let turn_of = |table: &Table| table.ingress(FlowId(7), (None, from), &data(0, 0)).map(|route| route.turn);
    let only = Taking::Only(Stack::Plain);
    table.apply(update(1, only, 0));
    table.apply(update(2, Taking::Ready(Stack::Secure), 9));
    table.apply(update(3, only, 9));
    assert_eq!(turn_of(&table), Ok(None), "nothing waits");
    table.apply(update(4, Taking::Ready(Stack::Secure), 10));
    let (turn, _) = turn_of(&table).expect("taken").expect("it turns");
    let header = DataRepr { stack: keys.cipher.stack(), ..data(0, 0) };
    turn.admit(crate::clock::now(), Stack::Secure, header, (&[0; 40], 40), (None, from));
    assert!(table.waiting_turn(FlowId(7)).is_none(), "the peer has said nothing: no time is set");
    table.apply(update(5, only, 10));
    assert_eq!(turn_of(&table), Ok(Some((Arc::clone(&turn), Stack::Plain))), "what waits goes before this");
    assert!(table.waiting_turn(FlowId(7)).is_some_and(|(_, until)| until <= crate::clock::now()), "at once");
    table.forget_turn(&turn);
    assert_eq!(turn_of(&table), Ok(None));
    table.apply(update(6, Taking::Ready(Stack::Secure), 11));
    table.apply(update(7, Taking::Turning(Stack::Secure), 11));
    let (turn, _) = turn_of(&table).expect("taken").expect("it turns");
    turn.admit(crate::clock::now(), Stack::Secure, header, (&[0; 40], 40), (None, from));
    assert!(table.waiting_turn(FlowId(7)).is_some(), "the peer has said that it turns");
}

#[test]
fn an_entry_is_small() {
    // 800 bytes per flow are for the whole agent; the two indexes add about 20 bytes each at their emptiest.
    assert!(size_of::<Slot>() <= 168, "{}", size_of::<Slot>());
}

#[test]
fn v4_and_v6_tuples_never_meet() {
    assert_ne!(FlowKey::from(sample::tuple4(UDP)), FlowKey::from(sample::tuple6(UDP)));
}

proptest! {
    #[test]
    fn like_a_plain_map(steps in proptest::collection::vec((0u8..3, 1u32..40, 0u32..4, 0u16..20), 0..400)) {
        let mut table = table();
        let mut model: BTreeMap<u32, (u32, Tuple)> = BTreeMap::new();
        for (act, flow, generation, port) in steps {
            let new = entry(flow, generation, port);
            if act == 0 {
                let held = model.remove(&flow).is_some();
                let done = table.apply(EntryUpdate::Remove { flow: FlowId(flow), reason: RemoveReason::Closed });
                prop_assert_eq!(done == Applied::Done, held);
            } else if model.get(&flow).is_none_or(|held| held.0 <= generation) {
                model.retain(|&other, held| other == flow || held.1 != new.app);
                model.insert(flow, (generation, new.app));
                prop_assert_eq!(table.apply(EntryUpdate::Install(new)), Applied::Done);
            } else {
                prop_assert_eq!(table.apply(EntryUpdate::Install(new)), Applied::Stale);
            }
            prop_assert_eq!(table.len(), model.len());
        }
        for port in 0..20 {
            let tuple = entry(0, 0, port).app;
            let expected = model.iter().find(|(_, held)| held.1 == tuple).map(|(&flow, _)| FlowId(flow));
            prop_assert_eq!(table.egress(&FlowKey::from(tuple), 1, 1, None, Origin::Program).map(|route| route.flow), expected);
        }
    }
}

#[test]
fn what_a_train_makes_up_is_not_what_comes_next_and_a_fin_waits_for_its_acknowledgement() {
    let mut table = table();
    table.apply(EntryUpdate::Install(entry(7, 1, 100)));
    let key = FlowKey::from(entry(7, 1, 100).app);
    let train = |sequence: u32, bytes: usize, acknowledgement: u32| {
        let numbers = TcpNumbers { sequence, acknowledgement, end: None };
        let train = Delivered { bytes, segments: 1, flags: ACK, numbers: Some(numbers) };
        table.note_train(FlowId(7), &Arrived::of_train(&train).expect("of a connection"));
        let peer = table.connection(FlowId(7)).and_then(|seen| seen.peer).expect("the first one is believed");
        (peer.sequence, peer.acknowledgement)
    };
    assert_eq!(train(100, 10, 1), (100, 1));
    assert_eq!(train(120, 10, 2), (100, 2), "what is between is missing, or it is made up");
    assert_eq!(train(110, 10, 3), (110, 3));
    let acknowledge = |acknowledgement: u32| {
        let numbers = TcpNumbers { sequence: 5, acknowledgement, end: None };
        table.egress(&key, 0, 1, Some(numbers), Origin::Program).expect("installed").takes_end
    };
    assert!(!acknowledge(120));
    assert_eq!(train(130, 10, 4), (130, 4), "the application has acknowledged what is before");
    table.note_peer_end(FlowId(7), Some(131));
    assert_eq!([acknowledge(130), acknowledge(131)], [false, true]);
}

/// What a flow has shown of its connection's end, and what it still shows, is the heir's, whose own has come later.
#[test]
fn a_way_that_is_taken_knows_what_has_passed_by_the_one_that_is_left() {
    let mut table = table();
    let [left, taken] = [FlowId(7), FlowId(8)];
    table.apply(EntryUpdate::Install(entry(7, 1, 100)));
    table.apply(EntryUpdate::Install(Entry { directions: Directions::Ingress, ..entry(8, 1, 100) }));
    let key = FlowKey::from(entry(7, 1, 100).app);
    let numbers = |sequence, acknowledgement, end| TcpNumbers { sequence, acknowledgement, end };
    let send = |table: &Table, said| table.egress(&key, 0, 1, Some(said), Origin::Program).expect("installed");
    // The application's FIN goes by the first way, and half of what acknowledges it comes there.
    assert_eq!(send(&table, numbers(500, 90, Some(501))).flow, left);
    table.note_peer_numbers(left, numbers(90, 500, None));
    table.apply(EntryUpdate::Install(Entry { directions: Directions::Ingress, ..entry(7, 2, 100) }));
    table.apply(EntryUpdate::Install(entry(8, 2, 100)));
    assert_eq!(send(&table, numbers(501, 95, None)).flow, taken);
    table.apply(EntryUpdate::Succession { from: left, to: taken });
    assert_eq!(table.connection(taken).and_then(|seen| seen.own), Some(numbers(501, 95, None)));
    assert_eq!(table.connection(left), table.connection(taken), "a FIN that waits there is judged by what passes here");
    // The rest comes by the first way still, and so does the peer's FIN.
    table.note_peer_numbers(left, numbers(100, 501, None));
    table.note_peer_end(left, Some(101));
    assert!(!table.is_over(taken, None));
    let last = send(&table, numbers(501, 101, None));
    assert!(last.takes_end && table.is_over(taken, None));
    // It goes back, and what was passed by the second way is known.
    table.apply(EntryUpdate::Install(Entry { directions: Directions::Ingress, ..entry(8, 3, 100) }));
    table.apply(EntryUpdate::Install(entry(7, 3, 100)));
    table.apply(EntryUpdate::Succession { from: taken, to: left });
    assert!(table.is_over(left, None));
    assert_eq!((table.heir(left), table.heir(taken)), (None, Some(left)));
    table.apply(EntryUpdate::Remove { flow: taken, reason: RemoveReason::Rechained });
    assert_eq!(table.heir(taken), None);
}

#[test]
fn an_entry_with_a_delta_says_how_numbers_are_translated_until_it_goes() {
    let mut table = table();
    let delta = Delta { peer: 5, own: 7, ..Delta::ZERO };
    let both = delta.translations().expect("its clocks are fixed");
    let wire =
        Wire { path: PathId(1), local_port: 61_000, remote_port: 62_000, sending: true, accepting: true, begun: true };
    let install =
        |generation, delta| EntryUpdate::Install(Entry { delta, wire: Some(wire), ..entry(7, generation, 100) });
    table.apply(install(1, Some(delta)));
    let key = table.key(FlowId(7)).expect("installed");
    let numbers = TcpNumbers { sequence: 100, acknowledgement: 200, end: None };
    let route = table.egress(&key, 10, 1, Some(numbers), Origin::Program).expect("installed");
    assert_eq!(route.delta, Some(both.egress));
    assert_eq!(table.recipient(FlowId(7)), Some(Recipient { key: key.reversed(), delta: Some(both.ingress) }));
    assert_eq!(table.wire(FlowId(7)).and_then(|wired| wired.delta), Some(both));
    // A pinhole has the numbers of the wire, the table those of the application's TCP.
    let on_wire = TcpNumbers { sequence: 93, acknowledgement: 195, end: None };
    assert_eq!(table.knock(FlowId(7)), Some((wire, Some(on_wire))));
    table.apply(install(2, None));
    assert_eq!(table.wire(FlowId(7)).and_then(|wired| wired.delta), None);
    assert_eq!(table.knock(FlowId(7)), Some((wire, Some(numbers))));
    table.apply(install(3, Some(delta)));
    table.apply(EntryUpdate::Remove { flow: FlowId(7), reason: RemoveReason::Closed });
    table.apply(install(4, None));
    assert_eq!(table.recipient(FlowId(7)), Some(key.reversed().into()));
}

/// The program's next packet of flow 7, encrypted as it leaves.
fn encrypted(table: &Table, text: &[u8]) -> Vec<u8> {
    let key = FlowKey::from(entry(7, 1, 100).app);
    let route = table.egress(&key, text.len(), 1, None, Origin::Program).expect("carried");
    let mut train = [&[0; DATA_HEADER_LEN], text, &[0; SEAL_TAG_LEN]].concat();
    let stride = train.len();
    route.seal.expect("encrypted").seal_train(route.peer_flow, &mut train, stride).expect("sealed");
    train
}

/// A hand-over that fails leaves the connection here, with the keys that it had.
#[test]
fn an_encrypted_flow_that_is_suspended_uses_no_number_twice_and_takes_nothing_twice() {
    let keys = sample::seal_keys(Cipher::Aes256Gcm);
    let sealed =
        |generation| Entry { seal: Some(keys), stacks: Stacks::only(Stack::Secure), generation, ..entry(7, 1, 100) };
    let mut table = table();
    let key = FlowKey::from(entry(7, 1, 100).app);
    assert_eq!(table.apply(EntryUpdate::Install(sealed(1))), Applied::Done);
    let before = encrypted(&table, b"attack at dawn!!");
    let kept = Arc::clone(&table.seals[&FlowId(7)]);
    table.count_ingress(FlowId(7), 500, 1);
    let counted = table.counters(FlowId(7));
    assert_eq!(table.apply(EntryUpdate::Suspend(FlowId(7))), Applied::Done);
    assert!(table.egress(&key, 1, 1, None, Origin::Core).is_none() && table.egress_by(FlowId(7), 1, 1, None).is_none());
    assert!(table.route_by(FlowId(7), Stack::Secure).is_none() && table.recipient(FlowId(7)).is_none());
    assert_eq!((table.len(), table.counters(FlowId(7))), (0, counted));
    assert_eq!(table.apply(EntryUpdate::Install(sealed(0))), Applied::Stale, "older than what waits");
    table.clear();
    assert_eq!(table.apply(EntryUpdate::Install(sealed(2))), Applied::Done);
    let after = encrypted(&table, b"retreat at noon!");
    assert_ne!(before[..DATA_HEADER_LEN], after[..DATA_HEADER_LEN], "another number");
    assert!(Arc::ptr_eq(&kept, &table.seals[&FlowId(7)]), "with the window of what was opened");
    assert_eq!(table.counters(FlowId(7)).map(|counters| counters.egress_segments), Some(2), "counted on");
    // Its end is the end of it, wherever it is.
    table.apply(EntryUpdate::Suspend(FlowId(7)));
    let reason = RemoveReason::HandedOver;
    assert_eq!(table.apply(EntryUpdate::Remove { flow: FlowId(7), reason }), Applied::Done);
    assert!(table.seals.is_empty() && table.suspended.is_empty() && table.counters(FlowId(7)).is_none());
}
