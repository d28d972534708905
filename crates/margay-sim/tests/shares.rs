//! One client with a thousand sessions asks for all that it can: others, and the operators of all hosts, go on.

mod line;

use std::time::Duration;

use line::{CHAT, Line, name, open_line};
use margay_core::config::Limits;
use margay_core::reconfiguration::{Edit, ReconfigurationOutcome};
use margay_core::{Event, Lifecycle, Role, chain::ChainPolicy};
use margay_sim::stream::Plan;
use margay_sim::{HostId, Weather, World};
use margay_wire::FlowId;

const SESSIONS: usize = 1024;
const SECOND: Duration = Duration::from_secs(1);
const IDLE: Plan = Plan { write: 1, every: Duration::from_secs(3600), writes: 1, closes: false };
const INSERT: fn() -> Edit = || Edit::Insert { service: name(0), before: None };

/// A line, its server with `SESSIONS` sessions of one client, and one of an honest client.
fn crowded() -> (Line, HostId) {
    let mut line = open_line(4, Weather::FAIR, 1);
    let (router, server, client) = (line.router, line.server, line.client);
    let crowd = line.world.add_host(false);
    line.world.register(router, crowd);
    let policy: ChainPolicy = line.world.host(client).sal.chain_policy().clone();
    line.world.host(crowd).sal.set_chain_policy(policy).expect("it can be gone by");
    line.world.publish_streams(router, server, CHAT, IDLE);
    line.world.connect_stream(client, CHAT, IDLE);
    for _ in 0..SESSIONS {
        line.world.connect_stream(crowd, CHAT, IDLE);
        line.world.run_for(Duration::from_millis(20));
    }
    line.world.run_for(3 * SECOND);
    (line, crowd)
}

fn sessions(line: &mut Line, host: HostId) -> Vec<FlowId> {
    let is_session = |flow: &margay_core::FlowInfo| flow.role == Role::Initiator && flow.app.protocol == 6;
    line.world.host(host).sal.flows().filter(is_session).map(|flow| flow.flow).collect()
}

/// Has a host's operator put a middlebox into all its sessions; every order must be taken.
fn insert_everywhere(line: &mut Line, host: HostId) -> usize {
    let flows = sessions(line, host);
    let now = line.world.now;
    for flow in &flows {
        line.world
            .host(host)
            .sal
            .reconfigure(now, *flow, INSERT())
            .expect("an operator is never refused for want of room");
    }
    line.world.touch(host);
    flows.len()
}

fn outcomes(line: &mut Line, host: HostId) -> Vec<ReconfigurationOutcome> {
    let events = line.world.host(host).events.iter();
    let change = |event: &Event| match event {
        Event::Reconfigured { change, .. } => Some(change.outcome.clone()),
        _ => None,
    };
    events.filter_map(change).collect()
}

#[test]
fn a_client_that_asks_to_re_route_a_thousand_sessions_keeps_nobody_else_from_a_middlebox() {
    let (mut line, crowd) = crowded();
    assert_eq!(insert_everywhere(&mut line, crowd), SESSIONS);
    line.world.run_for(Duration::from_micros(1500));
    // An agent that asks, and says nothing more.
    let [at, server] = [crowd, line.server].map(|host| line.world.host(host).address);
    line.world.network.cut(at, server);
    line.world.run_for(Duration::from_millis(5));
    let client = line.client;
    assert_eq!(insert_everywhere(&mut line, client), 1);
    line.world.run_for(SECOND);
    assert_eq!(outcomes(&mut line, client), [ReconfigurationOutcome::Done]);
}

/// The open flows of a host, by which end it is.
fn open_flows(world: &mut World, host: HostId, role: Role) -> usize {
    let is_open = |flow: &margay_core::FlowInfo| {
        (flow.role, flow.lifecycle, flow.app.protocol) == (role, Lifecycle::Established, 6)
    };
    world.host(host).sal.flows().filter(is_open).count()
}

#[test]
fn a_client_that_keeps_all_the_flows_it_can_leaves_room_for_others_and_for_the_servers_own() {
    let mut world = World::new(3, Weather::FAIR);
    let router = world.add_host(true);
    let [crowd, client] = [(); 2].map(|()| world.add_host(false));
    // Nobody has a certificate: one address has a sixteenth.
    world.limits = Limits { flows: 64, ..Limits::default() };
    let server = world.add_host(false);
    for host in [crowd, client, server] {
        world.register(router, host);
    }
    world.publish_streams(router, server, CHAT, IDLE);
    world.publish_streams(router, client, "news.shop", IDLE);
    for _ in 0..100 {
        world.connect_stream(crowd, CHAT, IDLE);
        world.run_for(Duration::from_millis(100));
    }
    assert_eq!(open_flows(&mut world, server, Role::Responder), 4);
    assert_eq!(open_flows(&mut world, crowd, Role::Initiator), 4, "it hears that it has its share");
    world.connect_stream(client, CHAT, IDLE);
    world.connect_stream(server, "news.shop", IDLE);
    world.run_for(SECOND);
    assert_eq!(open_flows(&mut world, client, Role::Initiator), 1);
    assert_eq!(open_flows(&mut world, server, Role::Initiator), 1);
}
