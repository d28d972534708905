//! Services that demand middleboxes, and clients whose agents were changed: nobody is granted a connection past them.

use std::net::IpAddr;
use std::time::Duration;

use margay_core::chain::{BoxWanted, ChainPolicy, ChainRule, Requirement};
use margay_core::name::Prefix;
use margay_core::{DropReason, Event, Role};
use margay_sim::stream::Plan;
use margay_sim::world::service;
use margay_sim::{HostId, Weather, World};
use margay_wire::{FLAGS_OFFSET, Flags, Kind, Message, RESOLVABLE_LEN, RESOLVABLE_OFFSET};

const NAME: &str = "talk.shop";
const OTHER: &str = "open.shop";
const FIREWALL: &str = "fw.shop";
const SECOND: Duration = Duration::from_secs(1);
const CHAT: Plan = Plan { write: 300, every: Duration::from_millis(100), writes: u32::MAX, closes: false };

/// A server that goes by `policy`, and a client that goes by none. They have met, and direct packets pass.
fn met(policy: ChainPolicy) -> (World, HostId, HostId) {
    let delay = Duration::from_millis(2);
    let mut world = World::new(1, Weather { delay_min: delay, delay_max: delay, ..Weather::FAIR });
    let router = world.add_host(true);
    let (server, client) = (world.add_host(false), world.add_host(false));
    for host in [server, client] {
        world.register(router, host);
        world.set_direct(host, true);
    }
    world.publish_streams(router, server, NAME, CHAT);
    let other = service(OTHER);
    world.host(server).serve_streams(other, 82, CHAT);
    let (address, key) = (world.host(server).address, world.host(server).public_key());
    world.host(router).forward(other.into(), address, Some(key));
    world.host(server).sal.set_chain_policy(policy).expect("sound");
    world.connect_stream(client, OTHER, CHAT);
    world.run_for(2 * SECOND);
    (world, server, client)
}

/// Has the client connect often. What it sends to ask for grants arrives as `alter` leaves it, and is all that arrives
/// meanwhile. Gives how often it has asked.
fn ask_often(world: &mut World, client: HostId, alter: impl Fn(&mut Vec<u8>)) -> usize {
    let from = world.host(client).address;
    let others: Vec<IpAddr> = world.hosts.iter().map(|host| host.address).filter(|other| *other != from).collect();
    let asks = |bytes: &[u8]| {
        Message::parse(bytes).is_ok_and(|message| message.kind == Kind::Syn && message.grant().is_some())
    };
    let mut asked = 0;
    for _ in 0..300 {
        if asked >= 3 {
            break;
        }
        world.recording = Some(Vec::new());
        others.iter().for_each(|other| world.network.cut(from, *other));
        world.connect_stream(client, NAME, CHAT);
        world.run_for(Duration::from_micros(500));
        world.network.heal();
        let sent = world.recording.take().unwrap_or_default();
        for (of, to, mut bytes) in sent.into_iter().filter(|(of, _, bytes)| of.ip() == from && asks(bytes)) {
            alter(&mut bytes);
            world.inject(of, to, bytes);
            asked += 1;
        }
        world.run_for(Duration::from_micros(500));
    }
    world.run_for(SECOND);
    asked
}

fn served(world: &mut World, server: HostId) -> usize {
    let flows = world.host(server).sal.flows();
    flows.filter(|flow| flow.role == Role::Responder && flow.service == service(NAME)).count()
}

fn required() -> Vec<Requirement> {
    vec![Requirement { services: Prefix::from(service(NAME)), boxes: vec![service(FIREWALL)] }]
}

#[test]
fn who_says_that_it_has_lost_its_keys_is_granted_nothing() {
    let (mut world, server, client) =
        met(ChainPolicy { rules: Vec::new(), required: required(), ..ChainPolicy::default() });
    let full = |bytes: &mut Vec<u8>| bytes[FLAGS_OFFSET] |= Flags::FULL.bits();
    assert!(ask_often(&mut world, client, full) > 0, "it has asked");
    assert_eq!(world.host(server).sal.counters().grants_given, 0);
    assert_eq!((served(&mut world, server), world.host(server).sal.grant_count()), (0, 0));
    assert!(world.host(server).sal.counters().drops(DropReason::NotAllowed) > 0);
}

/// The client's host has not heard of the policy yet, by which its sessions go through a middlebox.
#[test]
fn nothing_is_granted_of_what_goes_through_middleboxes() {
    let one = BoxWanted { service: service(FIREWALL), name: FIREWALL.into(), may_be_left_out: true, is_proxy: false };
    let rule = ChainRule {
        name: "inspect".to_owned(),
        services: Prefix::from(service(NAME)),
        protocol: None,
        ports: None,
        clients: Vec::new(),
        filter: None,
        boxes: vec![one],
        is_ordered: false,
        may_add: Vec::new(),
    };
    let (mut world, server, client) =
        met(ChainPolicy { rules: vec![rule], required: Vec::new(), ..ChainPolicy::default() });
    assert!(ask_often(&mut world, client, |_| {}) > 0, "it has asked");
    assert_eq!(world.host(server).sal.counters().grants_given, 0);
    assert!(served(&mut world, server) > 0, "each of its sessions is ruled on for itself");
}

#[test]
fn without_a_policy_the_same_client_is_granted_connections() {
    let (mut world, server, client) = met(ChainPolicy::default());
    ask_often(&mut world, client, |_| {});
    assert!(world.host(server).sal.counters().grants_given > 0);
}

/// Where a host is asked for one port, and its client has asked for another one.
#[test]
fn nothing_is_granted_of_a_port_that_the_client_has_not_asked_for() {
    let (mut world, server, client) = met(ChainPolicy::default());
    let other_port = |bytes: &mut Vec<u8>| {
        let session = RESOLVABLE_OFFSET + RESOLVABLE_LEN + 4;
        bytes[session + 34..session + 36].copy_from_slice(&9000_u16.to_be_bytes());
    };
    assert!(ask_often(&mut world, client, other_port) > 0, "it has asked");
    let sal = &world.host(server).sal;
    assert_eq!((sal.counters().grants_given, sal.grant_count()), (0, 0));
    assert!(sal.counters().drops(DropReason::SynChanged) > 0);
}

/// The rules that demanded middleboxes count no longer: the server's host takes no session, and the client's begins
/// none.
#[test]
fn where_rules_have_lapsed_nobody_gets_past_them() {
    let lapsed = ChainPolicy { lapsed: vec![Prefix::from(service(NAME))], ..ChainPolicy::default() };
    let (mut world, server, client) = met(lapsed.clone());
    let stream = world.connect_stream(client, NAME, CHAT);
    world.run_for(2 * SECOND);
    assert_eq!((served(&mut world, server), world.host(client).streams[stream].received), (0, 0));
    assert!(ask_often(&mut world, client, |_| {}) > 0, "the client knows of nothing");
    assert_eq!(world.host(server).sal.counters().grants_given, 0);
    world.host(client).sal.set_chain_policy(lapsed).expect("sound");
    let syns = |world: &World| world.recording.iter().flatten().filter(|(.., bytes)| is_syn(bytes)).count();
    world.run_for(5 * SECOND);
    world.recording = Some(Vec::new());
    world.connect_stream(client, NAME, CHAT);
    world.run_for(SECOND);
    assert_eq!(syns(&world), 0, "nothing leaves the host");
    let failed = world.host(client).events.iter().rev().find_map(|event| match event {
        Event::ConnectFailed { why, .. } => Some(why.clone()),
        _ => None,
    });
    assert!(failed.is_some_and(|why| why.contains("margay policy apply")));
    world.host(server).sal.set_chain_policy(ChainPolicy::default()).expect("sound");
    world.host(client).sal.set_chain_policy(ChainPolicy::default()).expect("sound");
    let stream = world.connect_stream(client, NAME, CHAT);
    world.run_for(2 * SECOND);
    assert!(world.host(client).streams[stream].received > 0, "other rules count");
}

fn is_syn(bytes: &[u8]) -> bool {
    Message::parse(bytes).is_ok_and(|message| message.kind == Kind::Syn)
}
