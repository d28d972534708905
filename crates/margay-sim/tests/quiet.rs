//! Quiet ends in virtual time: a drained instance asks a client's host, whose agent answers.

mod shop;

use std::time::Duration;

use margay_core::Role;
use margay_core::quiet::QuietAnswer;
use margay_sim::Weather;
use margay_sim::stream::Plan;
use margay_wire::FlowId;
use shop::{Shop, shop};

const SECOND: Duration = Duration::from_secs(1);
const QUIET_MS: u32 = 50;

/// A client with an idle connection, and the flow of it at the instance.
fn idle(seed: u64) -> (Shop, FlowId) {
    let mut shop = shop(seed, Weather::FAIR);
    let instance = shop.instances[0];
    let service = shop.world.publish_streams(shop.router, instance, "chat.shop", Plan::LISTEN);
    shop.world.connect_stream(shop.client, "chat.shop", Plan::LISTEN);
    shop.world.run_for(SECOND);
    let served = shop.world.host(instance).sal.served_flows(&service.into());
    assert_eq!(served.len(), 1);
    let flow = served[0].flow;
    (shop, flow)
}

/// The instance asks; gives whether it could.
fn ask(shop: &mut Shop, flow: FlowId) -> bool {
    let (now, instance) = (shop.world.now, shop.instances[0]);
    let asked = shop.world.host(instance).sal.ask_quiet_end(now, flow, QUIET_MS);
    shop.world.touch(instance);
    shop.world.run_for(SECOND);
    asked
}

#[test]
fn a_clients_agent_hears_of_its_own_connection_and_its_answer_comes_back() {
    for (seed, answer) in [(1, QuietAnswer::Ended), (2, QuietAnswer::NotNow("no socket".to_owned()))] {
        let (mut shop, flow) = idle(seed);
        assert!(ask(&mut shop, flow));
        let client = shop.client;
        let now = shop.world.now;
        let requests = shop.world.host(client).sal.take_quiet_requests(now);
        let own =
            shop.world.host(client).sal.flows().find(|flow| flow.role == Role::Initiator && flow.peer_flow.0 != 0);
        let own = own.expect("the connection");
        assert_eq!(requests.len(), 1);
        assert_eq!((requests[0].flow, requests[0].app, requests[0].quiet_ms), (own.flow, own.app, QUIET_MS));
        shop.world.host(client).sal.answer_quiet_end(now, own.flow, &answer);
        shop.world.touch(client);
        shop.world.run_for(SECOND);
        let instance = shop.instances[0];
        assert_eq!(shop.world.host(instance).sal.take_quiet_answer(flow), Some(answer));
        assert!(shop.world.host(client).streams.iter().all(|stream| !stream.was_reset), "asking changes nothing");
    }
}

#[test]
fn what_is_lost_is_asked_again() {
    let (mut shop, flow) = idle(3);
    shop.world.network.weather.loss_per_mille = 1000;
    assert!(ask(&mut shop, flow));
    let client = shop.client;
    let now = shop.world.now;
    assert!(shop.world.host(client).sal.take_quiet_requests(now).is_empty());
    shop.world.network.weather.loss_per_mille = 0;
    assert!(ask(&mut shop, flow));
    let now = shop.world.now;
    assert_eq!(shop.world.host(client).sal.take_quiet_requests(now).len(), 1);
}
