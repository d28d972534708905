//! What a stranger can have a host do, in virtual time: send more than was asked for, keep more than there is room for,
//! and keep others out.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use margay_core::table::Allow;
use margay_core::{DropReason, Limits, Tuple};
use margay_sim::world::service;
use margay_sim::{HostId, Outcome, Weather, World};
use margay_wire::{DataRepr, FLAGS_OFFSET, Flags, FlowId, HeaderRepr, Kind, PORT, STACK_ENCAP};

const MILLISECOND: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const NAME: &str = "web.shop";
/// Whom an attacker gives for the sender.
const VICTIM: SocketAddr = SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::new(203, 0, 113, 1)), PORT);

/// A server, and somebody who connects to it without a router.
fn pair(limits: Limits) -> (World, HostId, HostId) {
    let mut world = World::new(1, Weather::FAIR);
    world.limits = limits;
    let (server, client) = (world.add_host(false), world.add_host(false));
    world.host(server).serve(service(NAME), 80, 1, Allow::Any);
    let (address, key) = (world.host(server).address, world.host(server).public_key());
    world.host(client).forward(service(NAME).into(), address, Some(key));
    (world, server, client)
}

fn port_of(world: &mut World, host: HostId) -> SocketAddr {
    SocketAddr::new(world.host(host).address, PORT)
}

/// A well-formed SYN: an honest client's, with another flow and session.
fn forged_syn(world: &mut World, client: HostId) -> Vec<u8> {
    world.recording = Some(Vec::new());
    world.connect(client, NAME);
    world.run_for(SECOND);
    let caught = world.recording.take().expect("recording");
    let syn = caught.into_iter().find(|(_, _, bytes)| margay_wire::kind_of(bytes) == Ok(Kind::Syn));
    let (_, _, mut syn) = syn.expect("a SYN");
    syn[12..16].copy_from_slice(&[7; 4]);
    syn[112..116].copy_from_slice(&[7; 4]);
    syn
}

/// Sends a datagram as the victim's; gives the bytes that the victim gets for it.
fn sent_to_victim(world: &mut World, server: HostId, datagram: &[u8]) -> usize {
    let to = port_of(world, server);
    world.recording = Some(Vec::new());
    world.inject(VICTIM, to, datagram.to_vec());
    world.run_for(10 * MILLISECOND);
    let sent = world.recording.take().expect("recording");
    sent.iter().filter(|(_, to, _)| *to == VICTIM).map(|(_, _, bytes)| bytes.len()).sum()
}

/// The five-tuple and number of the one flow that is half-open.
fn half_open(world: &mut World, server: HostId) -> (Tuple, FlowId) {
    let flows: Vec<_> =
        world.host(server).sal.flows().filter(|flow| flow.app.destination.ip() == VICTIM.ip()).collect();
    assert_eq!(flows.len(), 1);
    (flows[0].app, flows[0].flow)
}

#[test]
fn a_syn_that_comes_again_shorter_brings_nothing_back() {
    let (mut world, server, client) = pair(Limits::default());
    let mut syn = forged_syn(&mut world, client);
    // From a host that this one has never met, for a name that takes a certificate.
    syn[FLAGS_OFFSET] |= Flags::FULL.bits();
    world.host(server).sal.set_service_certificate(service(NAME).into(), vec![0; 600]);
    let answered = sent_to_victim(&mut world, server, &syn);
    assert!(answered > 600 && answered <= syn.len(), "{answered}");
    assert_eq!(sent_to_victim(&mut world, server, &syn), answered, "the same again");
    let header = HeaderRepr::parse(&syn).expect("a SYN");
    let bare = &syn[..usize::from(header.header_len + header.payload_len)];
    assert!(bare.len() < answered, "the padding is most of it");
    assert_eq!(sent_to_victim(&mut world, server, bare), 0);
}

#[test]
fn what_the_hosts_own_tcp_says_again_is_not_sent_again() {
    let (mut world, server, client) = pair(Limits::default());
    let syn = forged_syn(&mut world, client);
    assert!(sent_to_victim(&mut world, server, &syn) > 0);
    let (app, _) = half_open(&mut world, server);
    world.recording = Some(Vec::new());
    for _ in 0..5 {
        let now = world.now;
        world.host(server).sal.handle_app_packet(now, &syn_ack(&app));
        world.touch(server);
        world.run_for(500 * MILLISECOND);
    }
    assert!(world.recording.take().expect("recording").is_empty());
}

fn syn_ack(app: &Tuple) -> Vec<u8> {
    let (SocketAddr::V4(source), SocketAddr::V4(destination)) = (app.source, app.destination) else {
        panic!("the listener is one of IPv4");
    };
    let mut packet = vec![0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6, 0, 0];
    packet.extend(source.ip().octets());
    packet.extend(destination.ip().octets());
    packet.extend(source.port().to_be_bytes());
    packet.extend(destination.port().to_be_bytes());
    packet.extend([0, 0, 0, 9, 0, 0, 0, 1, 5 << 4, 0x12, 0xff, 0xff, 0, 0, 0, 0]);
    packet
}

#[test]
fn what_waits_for_an_ack_is_no_longer_than_what_this_host_takes() {
    let (mut world, server, client) = pair(Limits::default());
    let syn = forged_syn(&mut world, client);
    sent_to_victim(&mut world, server, &syn);
    let (_, flow) = half_open(&mut world, server);
    let mut datagram = vec![0; 1472];
    let header = DataRepr { stack: STACK_ENCAP, flags: 0, dst_flow: flow, packet_number: 1, index: 0, count: 1 };
    header.emit(&mut datagram);
    let now = world.now;
    let sal = &mut world.host(server).sal;
    assert_eq!(sal.handle_datagram(now, None, VICTIM, &datagram), Ok(()));
    datagram.resize(60_000, 0);
    assert_eq!(sal.handle_datagram(now, None, VICTIM, &datagram), Err(DropReason::Full));
    assert_eq!(sal.counters().held_full, 1);
}

#[test]
fn one_address_does_not_take_the_places_of_all_others() {
    let limits = Limits { half_open_cookie: 4, half_open: 128, ..Limits::default() };
    let (mut world, server, client) = pair(limits);
    let other = world.add_host(false);
    let (address, key) = (world.host(server).address, world.host(server).public_key());
    world.host(other).forward(service(NAME).into(), address, Some(key));
    // Nobody's connection is accepted for now, so that all of them stay half-open.
    world.host(server).full_queue = u32::MAX;
    for _ in 0..100 {
        world.connect(client, NAME);
    }
    world.run_for(SECOND);
    assert_eq!(world.host(server).sal.half_open_count(), 8, "a sixteenth");
    assert!(world.host(server).sal.counters().drops(DropReason::Full) > 0);
    let late = world.connect(other, NAME);
    world.run_for(SECOND);
    assert_eq!(world.host(server).sal.half_open_count(), 9, "there is room for others");
    world.host(server).full_queue = 0;
    world.run_for(3 * SECOND);
    assert_eq!(world.host(other).clients[late].outcome, Outcome::Answered(1));
}
