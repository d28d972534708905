//! Drain in virtual time: a SYN that is on its way to a drained instance is answered by another one, and what has not
//! ended in time ends at both ends.

mod shop;

use std::net::SocketAddr;
use std::time::Duration;

use margay_core::name::Prefix;
use margay_core::table::Rule;
use margay_core::{Event, RemoveReason};
use margay_sim::check::{ends_agree, nothing_left_over};
use margay_sim::stream::Plan;
use margay_sim::world::service;
use margay_sim::{HostId, Outcome, Weather};
use margay_wire::PORT;
use shop::{Shop, outcome, shop};

const SECOND: Duration = Duration::from_secs(1);
const NAME: &str = "web.shop";
const CHAT: Plan = Plan { write: 300, every: Duration::from_millis(20), writes: u32::MAX, closes: false };

/// Gives an instance weight zero in its own table: the router has not heard of the drain yet.
fn stop_taking(shop: &mut Shop, instance: HostId) {
    let sal = &mut shop.world.host(instance).sal;
    let known = sal.rules().find(|(prefix, ..)| *prefix == Prefix::from(service(NAME)));
    let (id, rule) = known.map(|(_, id, rule)| (id, rule.clone())).expect("the instance serves it");
    assert!(sal.change_rule(id, Rule { weight: 0, ..rule }));
}

/// Takes what leads to an instance out of the router's table.
fn tell_router(shop: &mut Shop, instance: HostId) {
    let address = SocketAddr::new(shop.world.host(instance).address, PORT);
    let sal = &mut shop.world.host(shop.router).sal;
    let leads = sal.rules().find(|(_, _, rule)| rule.action.next_hop().is_some_and(|hop| hop.address == address));
    let id = leads.map(|(_, id, _)| id).expect("it was published");
    assert!(sal.remove_rule(id));
}

#[test]
fn a_syn_that_is_on_its_way_to_a_drained_instance_is_answered_by_another() {
    // The second run: by a client that the instance has met.
    for seed in 1..=2 {
        let mut shop = shop(seed, Weather::FAIR);
        let [drained, _] = shop.instances;
        if seed == 2 {
            for _ in 0..8 {
                shop.world.connect(shop.client, NAME);
                shop.world.run_for(SECOND);
            }
        }
        stop_taking(&mut shop, drained);
        let clients: Vec<usize> = (0..8).map(|_| shop.world.connect(shop.client, NAME)).collect();
        shop.world.run_for(Duration::from_millis(120));
        tell_router(&mut shop, drained);
        shop.world.run_for(SECOND);
        for client in clients {
            assert_eq!(outcome(&mut shop.world, shop.client, client), Outcome::Answered(2), "seed {seed}");
        }
        ends_agree(&shop.world).expect("both ends agree");
    }
}

#[test]
fn where_no_other_instance_serves_the_name_the_connect_fails_in_time() {
    let mut shop = shop(3, Weather::FAIR);
    for instance in shop.instances {
        stop_taking(&mut shop, instance);
    }
    let client = shop.world.connect(shop.client, NAME);
    shop.world.run_for(Duration::from_millis(300));
    assert_eq!(outcome(&mut shop.world, shop.client, client), Outcome::Pending, "another may come");
    shop.world.run_for(6 * SECOND);
    assert_eq!(outcome(&mut shop.world, shop.client, client), Outcome::Refused);
}

#[test]
fn what_has_not_ended_by_the_deadline_ends_at_both_ends_and_says_why() {
    let mut shop = shop(4, Weather::FAIR);
    let chat = service("chat.shop");
    let prefix = Prefix::from(chat);
    let [drained, other] = shop.instances;
    let client = shop.client;
    for instance in shop.instances {
        shop.world.publish_streams(shop.router, instance, "chat.shop", Plan::LISTEN);
    }
    let streams: Vec<usize> = (0..8).map(|_| shop.world.connect_stream(shop.client, "chat.shop", CHAT)).collect();
    shop.world.run_for(SECOND);
    let served = shop.world.host(drained).sal.served_flows(&prefix);
    let stays = shop.world.host(other).sal.served_flows(&prefix).len();
    assert!(!served.is_empty() && stays > 0, "{} and {stays}", served.len());
    assert!(served.iter().all(|flow| (flow.app.protocol, flow.service) == (6, chat)));
    let flows: Vec<_> = served.iter().map(|served| served.flow).collect();
    let now = shop.world.now;
    assert_eq!(shop.world.host(drained).sal.end_drained(now, &flows), flows.len());
    assert_eq!(shop.world.host(drained).sal.end_drained(now, &flows), 0, "they are over");
    shop.world.touch(drained);
    shop.world.run_for(SECOND);
    assert!(shop.world.host(drained).sal.served_flows(&prefix).is_empty());
    assert_eq!(shop.world.host(other).sal.served_flows(&prefix).len(), stays);
    let reset = |shop: &mut Shop, host| shop.world.host(host).streams.iter().filter(|stream| stream.was_reset).count();
    assert_eq!(reset(&mut shop, client), flows.len());
    assert_eq!(reset(&mut shop, drained), flows.len());
    assert_eq!(reset(&mut shop, other), 0);
    let said = |event: &&Event| matches!(event, Event::FlowClosed { reason: RemoveReason::Drained, .. });
    for host in [drained, shop.client] {
        assert_eq!(shop.world.host(host).events.iter().filter(said).count(), flows.len());
    }
    assert_eq!(streams.len(), flows.len() + stays);
    ends_agree(&shop.world).expect("both ends agree");
    nothing_left_over(&shop.world).expect("entries are gone with their flows");
}

#[test]
fn an_idle_client_hears_of_the_end_though_messages_are_lost() {
    let mut shop = shop(5, Weather::FAIR);
    let [drained, other] = shop.instances;
    let client = shop.client;
    for instance in shop.instances {
        shop.world.publish_streams(shop.router, instance, "chat.shop", Plan::LISTEN);
    }
    for _ in 0..60 {
        shop.world.connect_stream(client, "chat.shop", Plan::LISTEN);
        shop.world.run_for(Duration::from_millis(50));
    }
    let flows = shop.world.host(drained).sal.served_flows(&service("chat.shop").into());
    let flows: Vec<_> = flows.into_iter().map(|served| served.flow).collect();
    assert!(flows.len() > 15 && flows.len() < 45, "{}", flows.len());
    shop.world.network.weather.loss_per_mille = 300;
    let now = shop.world.now;
    shop.world.host(drained).sal.end_drained(now, &flows);
    shop.world.touch(drained);
    shop.world.run_for(2 * SECOND);
    let reset = shop.world.host(client).streams.iter().filter(|stream| stream.was_reset).count();
    // One in 37 may be lost each time.
    assert!(reset + 2 >= flows.len(), "{reset} of {} were told", flows.len());
    assert!(shop.world.host(other).streams.iter().all(|stream| !stream.was_reset));
}
