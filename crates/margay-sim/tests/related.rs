//! Datagram servers that answer from a new port, as TFTP's do (DESIGN §9): both programs keep their ports, and nobody
//! but the server's host may join in.

use std::net::SocketAddr;
use std::time::Duration;

use margay_core::table::{Action, Allow, Demux, Rule};
use margay_core::{AppVerdict, DropReason, FlowInfo, Instant, Lifecycle, Ranges};
use margay_sim::world::service;
use margay_sim::{Datagram, HostId, Weather, World};
use margay_wire::{Kind, PORT};

const SECOND: Duration = Duration::from_secs(1);
const NAME: &str = "tftp.shop";

struct Shop {
    world: World,
    server: HostId,
    client: HostId,
    other: HostId,
}

fn shop(seed: u64) -> Shop {
    let mut world = World::new(seed, Weather::FAIR);
    let [router, server, client, other] = [true, false, false, false].map(|router| world.add_host(router));
    for host in [server, client, other] {
        world.register(router, host);
    }
    let listener = "[::]:69".parse().expect("literal");
    let demux = Demux {
        listener,
        other_family: None,
        is_looked_up: false,
        service_port: None,
        protocol: Some(17),
        allow: Allow::Any,
    };
    let rule = Rule { priority: 100, weight: 1, action: Action::Demux(demux) };
    world.host(server).sal.add_rule(Instant::ZERO, service(NAME).into(), rule).expect("room");
    let (address, key) = (world.host(server).address, world.host(server).public_key());
    world.host(router).forward(service(NAME).into(), address, Some(key));
    Shop { world, server, client, other }
}

fn here(port: u16) -> SocketAddr {
    SocketAddr::new(Ranges::USUAL.host_v6().into(), port)
}

fn there(port: u16) -> SocketAddr {
    SocketAddr::new(Ranges::USUAL.virtual_v6(&service(NAME)).into(), port)
}

/// The client asks from port 4000; gives whom the server saw.
fn ask(shop: &mut Shop) -> SocketAddr {
    shop.world.send_datagram(shop.client, &Datagram::new(here(4000), there(69), b"read"));
    shop.world.run_for(SECOND);
    let asked = shop.world.host(shop.server).datagrams.pop().expect("delivered");
    assert_eq!((asked.tuple.destination.port(), &asked.data[..]), (69, &b"read"[..]));
    asked.tuple.source
}

fn flow_of(world: &mut World, host: HostId, source: SocketAddr, destination: SocketAddr) -> Option<FlowInfo> {
    let found =
        world.host(host).sal.flows().find(|flow| (flow.app.source, flow.app.destination) == (source, destination));
    found.filter(|flow| flow.lifecycle == Lifecycle::Established)
}

#[test]
fn an_answer_from_a_new_port_reaches_the_socket_that_asked() {
    let mut shop = shop(1);
    let asker = ask(&mut shop);
    shop.world.send_datagram(shop.server, &Datagram::new(here(7777), asker, b"block 1"));
    shop.world.run_for(SECOND);
    let answer = shop.world.host(shop.client).datagrams.pop().expect("delivered");
    assert_eq!(answer, Datagram::new(there(7777), here(4000), b"block 1"));
    let (one, other) = (
        flow_of(&mut shop.world, shop.server, here(7777), asker).expect("established"),
        flow_of(&mut shop.world, shop.client, here(4000), there(7777)).expect("established"),
    );
    assert_eq!((one.flow, one.session), (other.peer_flow, other.session));
    assert!(one.service == service(NAME) && other.service == service(NAME));
    // What the client says to the new port goes the same way.
    let acknowledged = shop.world.send_datagram(shop.client, &Datagram::new(here(4000), there(7777), b"got 1"));
    assert_eq!(acknowledged, AppVerdict::Forward(other.flow));
}

#[test]
fn nobody_else_joins_a_flow_and_an_address_that_asked_nothing_is_refused() {
    let mut shop = shop(2);
    let asker = ask(&mut shop);
    // Another host knows the number of the client's flow, which it cannot.
    let flow = flow_of(&mut shop.world, shop.client, here(4000), there(69)).expect("established").flow;
    shop.world.recording = Some(Vec::new());
    shop.world.send_datagram(shop.other, &Datagram::new(here(5000), there(69), b"read"));
    let sent = shop.world.recording.take().expect("recording");
    let (.., mut syn) =
        sent.into_iter().find(|(.., bytes)| margay_wire::kind_of(bytes) == Ok(Kind::Syn)).expect("sent");
    syn[8..12].copy_from_slice(&flow.0.to_be_bytes());
    let [from, to] = [shop.other, shop.client].map(|host| SocketAddr::new(shop.world.host(host).address, PORT));
    let before = shop.world.host(shop.client).sal.flow_count();
    shop.world.inject(from, to, syn);
    shop.world.run_for(SECOND);
    let sal = &shop.world.host(shop.client).sal;
    assert_eq!((sal.flow_count(), sal.counters().drops(DropReason::UnknownFlow)), (before, 1));
    assert!(shop.world.host(shop.client).datagrams.is_empty());

    let nobody = SocketAddr::new(asker.ip(), asker.port() + 1);
    let verdict = shop.world.send_datagram(shop.server, &Datagram::new(here(7777), nobody, b"block 1"));
    assert_eq!(verdict, AppVerdict::Drop(DropReason::NoName));
}
