//! The core's main stories in virtual time: a router, instances, clients; and what must not happen.

mod shop;

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use margay_core::key::HostPublic;
use margay_core::name::Prefix;
use margay_core::table::{Action, Allow, Demux, NextHop, Rule};
use margay_core::{DropReason, Event, Instant, Limits, Ranges, RemoveReason};
use margay_sim::check::{all_ended_within, ends_agree, nothing_left_over};
use margay_sim::host::Start;
use margay_sim::stream::Plan;
use margay_sim::world::service;
use margay_sim::{HostId, Outcome, Weather, World};
use margay_wire::{Kind, PORT};
use shop::{Shop, outcome, shop};

const SECOND: Duration = Duration::from_secs(1);

/// Publishes a name on one port alone, whoever listens there.
fn publish_port(shop: &mut Shop, instance: HostId, name: &str, port: u16) {
    let listener = SocketAddr::new([0, 0, 0, 0].into(), port);
    let demux = Demux {
        listener,
        other_family: None,
        is_looked_up: false,
        service_port: Some(port),
        protocol: Some(6),
        allow: Allow::Any,
    };
    let rule = Rule { priority: 100, weight: 1, action: Action::Demux(demux) };
    let (address, key) = (shop.world.host(instance).address, shop.world.host(instance).public_key());
    shop.world.host(instance).sal.add_rule(Instant::ZERO, service(name).into(), rule).expect("room");
    shop.world.host(shop.router).forward(service(name).into(), address, Some(key));
}

#[test]
fn the_first_packet_goes_through_the_router_and_nothing_else_does() {
    let mut shop = shop(1, Weather::FAIR);
    // What registration brings with it.
    shop.world.run_for(SECOND);
    shop.world.recording = Some(Vec::new());
    let client = shop.world.connect(shop.client, "web.shop");
    shop.world.run_for(SECOND);
    assert!(matches!(outcome(&mut shop.world, shop.client, client), Outcome::Answered(1 | 2)));
    let router: IpAddr = shop.world.host(shop.router).address;
    let sent = shop.world.recording.take().expect("recording");
    let kinds = |to: bool| -> Vec<Kind> {
        let mine = sent.iter().filter(|(from, dest, _)| (if to { dest } else { from }).ip() == router);
        mine.filter_map(|(_, _, bytes)| margay_wire::kind_of(bytes).ok()).collect()
    };
    assert_eq!(kinds(true), [Kind::Syn, Kind::SynAck], "one SYN, and one answer to relay");
    assert_eq!(kinds(false), [Kind::Syn, Kind::SynAck]);
    ends_agree(&shop.world).expect("both ends agree");
    // By these the RST of a client whose program has gone is told.
    let begun: Vec<_> = shop.instances.iter().filter_map(|host| shop.world.host(*host).cache.last_begun).collect();
    assert_eq!(begun, [(501, 101)], "the numbers after both SYNs");
}

#[test]
fn connections_spread_over_the_instances_and_follow_a_withdrawal() {
    let mut shop = shop(2, Weather::FAIR);
    for _ in 0..60 {
        shop.world.connect(shop.client, "web.shop");
        shop.world.run_for(Duration::from_millis(20));
    }
    let answered = |world: &mut World, number: u32| {
        world.host(shop.client).clients.iter().filter(|client| client.outcome == Outcome::Answered(number)).count()
    };
    let (one, two) = (answered(&mut shop.world, 1), answered(&mut shop.world, 2));
    assert_eq!(one + two, 60);
    assert!(one >= 15 && two >= 15, "{one} and {two}");
    let rule = shop.world.host(shop.router).sal.rules().find(|(prefix, ..)| prefix.bits == 256).map(|(_, id, _)| id);
    assert!(shop.world.host(shop.router).sal.remove_rule(rule.expect("published")));
    for _ in 0..20 {
        shop.world.connect(shop.client, "web.shop");
        shop.world.run_for(Duration::from_millis(20));
    }
    let now = [answered(&mut shop.world, 1) - one, answered(&mut shop.world, 2) - two];
    assert_eq!(now.iter().sum::<usize>(), 20);
    assert!(now.contains(&0), "the withdrawn instance got a connection: {now:?}");
}

#[test]
fn a_connection_that_has_begun_with_a_router_that_is_gone_goes_by_the_rules_that_are_left() {
    let mut shop = shop(22, Weather::FAIR);
    let name = service("web.shop");
    let nobody = IpAddr::from([10, 99, 99, 99]);
    let rule = shop.world.host(shop.client).forward(name.into(), nobody, Some([1; 32])).expect("room");
    let client = shop.world.connect(shop.client, "web.shop");
    shop.world.run_for(SECOND);
    assert_eq!(outcome(&mut shop.world, shop.client, client), Outcome::Pending, "nobody is there");
    assert!(shop.world.host(shop.client).sal.remove_rule(rule));
    shop.world.run_for(SECOND);
    assert!(matches!(outcome(&mut shop.world, shop.client, client), Outcome::Answered(1 | 2)));
}

#[test]
fn of_two_routers_the_other_one_is_asked_where_the_first_does_not_answer() {
    let mut shop = shop(24, Weather::FAIR);
    let nobody = SocketAddr::new(IpAddr::from([10, 99, 99, 99]), PORT);
    let hop = NextHop { address: nobody, host: None, router: true };
    let rule = Rule { priority: 1, weight: 100, action: Action::Forward(hop) };
    shop.world.host(shop.client).sal.add_rule(Instant::ZERO, Prefix::default(), rule).expect("room");
    let address = SocketAddr::new(shop.world.host(shop.router).address, PORT);
    let rule = Rule { priority: 1, weight: 1, action: Action::Forward(NextHop { address, host: None, router: true }) };
    shop.world.host(shop.client).sal.add_rule(Instant::ZERO, Prefix::default(), rule).expect("room");
    for _ in 0..20 {
        let client = shop.world.connect(shop.client, "web.shop");
        shop.world.run_for(SECOND);
        assert!(matches!(outcome(&mut shop.world, shop.client, client), Outcome::Answered(1 | 2)));
    }
}

#[test]
fn a_host_that_was_never_met_is_greeted_and_silence_leaves_nothing() {
    let mut world = World::new(26, Weather::FAIR);
    let [one, other] = [world.add_host(false), world.add_host(false)];
    let there = SocketAddr::new(world.host(other).address, PORT);
    let key = world.host(other).public_key();
    let nobody = SocketAddr::new(IpAddr::from([10, 99, 99, 99]), PORT);
    for to in [there, nobody] {
        world.host(one).sal.greet(Instant::ZERO, to).expect("room for a flow");
    }
    world.run_for(SECOND);
    let known: Vec<_> = world.host(one).sal.associations().map(|known| (known.host, known.remote)).collect();
    assert_eq!(known, [(HostPublic(key).id(), there)]);
    world.run_for(30 * SECOND);
    assert_eq!(world.host(one).sal.flow_count(), 0, "the greeting without an answer has ended");
}

#[test]
fn an_answer_is_relayed_by_the_router_that_the_first_packet_comes_by_now() {
    let mut world = World::new(25, Weather::FAIR);
    let [one, other] = [world.add_host(true), world.add_host(true)];
    let [server, client] = [world.add_host(false), world.add_host(false)];
    world.register(other, one);
    for router in [one, other] {
        world.register(router, server);
        world.register(router, client);
    }
    world.publish(other, server, "web.shop", 7);
    let [at_one, at_other, at_server, at_client] = [one, other, server, client].map(|id| world.host(id).address);
    let key = world.host(other).public_key();
    world.host(one).forward(service("web.shop").into(), at_other, Some(key));
    for (priority, address) in [(900, at_one), (800, at_other)] {
        let hop = NextHop { address: SocketAddr::new(address, PORT), host: None, router: true };
        let rule = Rule { priority, weight: 1, action: Action::Forward(hop) };
        world.host(client).sal.add_rule(Instant::ZERO, Prefix::default(), rule).expect("room");
    }
    // The first router reaches the server by the other one alone, and the server does not reach it; nor, for now, the
    // client.
    world.network.cut(at_one, at_server);
    world.network.cut(at_client, at_server);
    let number = world.connect(client, "web.shop");
    world.run_for(2 * SECOND);
    assert!(world.host(one).sal.counters().forwarded > 0, "it was asked first");
    assert!(world.host(other).sal.counters().relayed > 0, "the answer got as far as the client");
    world.network.heal();
    world.run_for(3 * SECOND);
    assert_eq!(outcome(&mut world, client, number), Outcome::Answered(7));
}

#[test]
fn a_router_sends_on_to_another_one_what_is_registered_there() {
    let mut world = World::new(23, Weather::FAIR);
    let [one, other] = [world.add_host(true), world.add_host(true)];
    let [server, client] = [world.add_host(false), world.add_host(false)];
    world.register(other, one);
    world.register(one, client);
    world.register(other, server);
    world.publish(other, server, "web.shop", 7);
    let (address, key) = (world.host(other).address, world.host(other).public_key());
    world.host(one).forward(service("web.shop").into(), address, Some(key));
    for _ in 0..3 {
        let number = world.connect(client, "web.shop");
        world.run_for(SECOND);
        assert_eq!(outcome(&mut world, client, number), Outcome::Answered(7));
    }
}

#[test]
fn a_second_connection_to_a_known_host_needs_no_key_work() {
    let mut shop = shop(3, Weather::FAIR);
    for _ in 0..6 {
        shop.world.connect(shop.client, "web.shop");
        shop.world.run_for(SECOND);
    }
    shop.world.recording = Some(Vec::new());
    let client = shop.world.connect(shop.client, "web.shop");
    shop.world.run_for(SECOND);
    assert!(matches!(outcome(&mut shop.world, shop.client, client), Outcome::Answered(_)));
    let sent = shop.world.recording.take().expect("recording");
    let answers = sent.iter().filter_map(|(_, _, bytes)| margay_wire::Message::parse(bytes).ok());
    let mut answers = answers.filter(|message| message.kind == Kind::SynAck).peekable();
    assert!(answers.peek().is_some());
    assert!(answers.all(|message| message.key_exchange().is_none() && message.auth().is_some()));
}

/// Each runs the whole handshake: nobody knows yet which host will answer.
#[test]
fn connects_at_once_to_hosts_that_were_never_met_are_all_served() {
    let mut shop = shop(21, Weather::FAIR);
    shop.world.run_for(SECOND);
    for _ in 0..300 {
        shop.world.connect(shop.client, "web.shop");
    }
    shop.world.run_for(20 * SECOND);
    let clients = &shop.world.host(shop.client).clients;
    assert!(
        clients.iter().all(|client| matches!(client.outcome, Outcome::Answered(1 | 2))),
        "{:?}",
        margay_sim::check::tally(&shop.world)
    );
}

#[test]
fn a_name_that_nobody_serves_is_refused_at_once() {
    let mut shop = shop(4, Weather::FAIR);
    let client = shop.world.connect(shop.client, "mail.shop");
    shop.world.run_for(SECOND);
    assert_eq!(outcome(&mut shop.world, shop.client, client), Outcome::Refused);
    all_ended_within(&shop.world, Duration::from_millis(20)).expect("at once");
}

#[test]
fn a_silent_network_ends_in_an_error_and_leaves_nothing() {
    let mut shop = shop(5, Weather::FAIR);
    let (router, client_address) = (shop.world.host(shop.router).address, shop.world.host(shop.client).address);
    shop.world.network.cut(router, client_address);
    let client = shop.world.connect(shop.client, "web.shop");
    shop.world.run_for(30 * SECOND);
    assert_eq!(outcome(&mut shop.world, shop.client, client), Outcome::Refused);
    all_ended_within(&shop.world, 6 * SECOND).expect("in bounded time");
    nothing_left_over(&shop.world).expect("nothing is left");
}

#[test]
fn first_contact_works_through_a_nat_and_a_firewall() {
    let mut shop = shop(6, Weather::FAIR);
    let guarded = shop.world.add_host(false);
    let walled = shop.world.add_host(false);
    let (private, wall) = (shop.world.host(guarded).address, shop.world.host(walled).address);
    shop.world.network.put_behind_nat(private, [192, 0, 2, 1].into());
    shop.world.network.put_behind_firewall(wall);
    for host in [guarded, walled] {
        shop.world.register(shop.router, host);
        for _ in 0..10 {
            shop.world.connect(host, "web.shop");
        }
    }
    shop.world.run_for(3 * SECOND);
    for host in [guarded, walled] {
        let clients = &shop.world.host(host).clients;
        assert!(clients.iter().all(|client| matches!(client.outcome, Outcome::Answered(_))));
    }
    all_ended_within(&shop.world, Duration::from_millis(200)).expect("without waiting for a retry");
}

#[test]
fn a_host_keeps_the_way_to_its_router_open() {
    let mut shop = shop(6, Weather::FAIR);
    let (guarded, free) = (shop.world.add_host(false), shop.world.add_host(false));
    let private = shop.world.host(guarded).address;
    shop.world.network.put_behind_nat(private, [192, 0, 2, 1].into());
    for host in [guarded, free] {
        shop.world.register(shop.router, host);
    }
    shop.world.run_for(10 * SECOND);
    let mut probes = |host: HostId| shop.world.host(host).sal.counters().messages_sent(Kind::Probe);
    let before = [guarded, free].map(&mut probes);
    shop.world.run_for(100 * SECOND);
    let mut probes = |host: HostId| shop.world.host(host).sal.counters().messages_sent(Kind::Probe);
    let now = [guarded, free].map(&mut probes);
    assert_eq!(
        [now[0] - before[0], now[1] - before[1]],
        [4, 4],
        "every 25 s, whether a translator is on the way or not"
    );
}

#[test]
fn a_router_that_has_just_started_refuses_nobody_yet() {
    let mut world = World::new(23, Weather::FAIR);
    let router = world.add_host(true);
    let [client, server] = [(); 2].map(|()| world.add_host(false));
    [client, server].iter().for_each(|host| world.register(router, *host));
    world.run_for(SECOND);
    let now = world.now;
    world.host(router).sal.await_hosts(now);
    let (others, own) = (world.connect(client, "web.shop"), world.connect(router, "web.shop"));
    world.run_for(SECOND / 5);
    assert_eq!(
        (outcome(&mut world, client, others), outcome(&mut world, router, own)),
        (Outcome::Pending, Outcome::Pending)
    );
    assert!(world.host(router).sal.counters().drops(DropReason::Awaited) >= 2);
    // The server is back, and both ask again.
    world.publish(router, server, "web.shop", 1);
    world.run_for(SECOND / 2);
    assert_eq!(outcome(&mut world, client, others), Outcome::Answered(1));
    assert_eq!(outcome(&mut world, router, own), Outcome::Answered(1));
    // By now all of them are.
    world.run_for(SECOND / 2);
    let (others, own) = (world.connect(client, "nobodys.shop"), world.connect(router, "nobodys.shop"));
    world.run_for(SECOND / 50);
    assert_eq!(
        (outcome(&mut world, client, others), outcome(&mut world, router, own)),
        (Outcome::Refused, Outcome::Refused)
    );
}

/// What an agent's restart takes: its socket keeps the SYNs that came meanwhile, and they are the first that it reads.
#[test]
fn a_host_that_is_starting_answers_no_syn() {
    for starting_serves in [false, true] {
        let mut world = World::new(25, Weather::FAIR);
        let router = world.add_host(true);
        let [client, server] = [(); 2].map(|()| world.add_host(false));
        [client, server].iter().for_each(|host| world.register(router, *host));
        let starting = if starting_serves { server } else { router };
        if starting_serves {
            world.publish(router, server, "web.shop", 1);
        }
        world.run_for(SECOND);
        world.host(starting).sal.hold_connects();
        let asked = world.connect(client, "web.shop");
        world.run_for(SECOND / 5);
        assert_eq!(outcome(&mut world, client, asked), Outcome::Pending);
        assert!(world.host(starting).sal.counters().drops(DropReason::Awaited) >= 1);
        if !starting_serves {
            world.publish(router, server, "web.shop", 1);
        }
        world.host(starting).sal.take_connects();
        world.run_for(SECOND);
        assert_eq!(outcome(&mut world, client, asked), Outcome::Answered(1));
    }
}

#[test]
fn a_router_that_has_started_waits_longer_for_hosts_that_were_there_before() {
    for comes_back in [true, false] {
        let mut world = World::new(24, Weather::FAIR);
        let router = world.add_host(true);
        let [client, server] = [(); 2].map(|()| world.add_host(false));
        [client, server].iter().for_each(|host| world.register(router, *host));
        world.publish(router, server, "web.shop", 1);
        let (address, key_seed) = (world.host(router).address, world.host(router).key_seed());
        let kept = world.host(router).sal.keep_associations();
        world.start_host(router, address, Start { key_seed, epoch: 2, boot: 1, router: true, ranges: Ranges::USUAL });
        let now = world.now;
        let sal = &mut world.host(router).sal;
        sal.take_up_associations(now, &kept).expect("kept whole");
        sal.await_hosts(now);
        world.register(router, client);
        world.run_for(2 * SECOND);
        let asked = world.connect(client, "web.shop");
        world.run_for(SECOND / 2);
        assert_eq!(outcome(&mut world, client, asked), Outcome::Pending);
        if comes_back {
            world.register(router, server);
            // What it serves it says after that.
            world.run_for(SECOND / 20);
            world.publish(router, server, "web.shop", 1);
        }
        world.run_for(SECOND);
        let expected = if comes_back { Outcome::Answered(1) } else { Outcome::Refused };
        assert_eq!(outcome(&mut world, client, asked), expected);
        let asked = world.connect(client, "nobodys.shop");
        world.run_for(SECOND / 50);
        assert_eq!(outcome(&mut world, client, asked), Outcome::Refused, "nobody is awaited any more");
    }
}

#[test]
fn a_refusal_through_the_router_shows_the_peer_where_it_is() {
    let mut shop = shop(8, Weather::FAIR);
    let instance = shop.instances[0];
    shop.world.publish(shop.router, instance, "off.shop", 3);
    shop.world.host(instance).servers.clear();
    let walled = shop.world.add_host(false);
    let wall = shop.world.host(walled).address;
    // The instance's own answer does not get in; the one by way of the router does.
    shop.world.network.put_behind_firewall(wall);
    shop.world.register(shop.router, walled);
    let client = shop.world.connect(walled, "off.shop");
    shop.world.run_for(SECOND);
    assert_eq!(outcome(&mut shop.world, walled, client), Outcome::Refused);
    all_ended_within(&shop.world, Duration::from_millis(20)).expect("at once");
    let (address, key) = (shop.world.host(instance).address, shop.world.host(instance).public_key());
    let peer = margay_core::key::HostPublic(key).id();
    let known = shop.world.host(walled).sal.associations().find(|known| known.host == peer);
    assert_eq!(known.map(|known| known.remote), Some(SocketAddr::new(address, PORT)));
}

#[test]
fn a_port_that_an_instance_does_not_publish_is_refused_at_once_through_a_router_too() {
    let mut shop = shop(9, Weather::FAIR);
    let instance = shop.instances[0];
    shop.world.publish(shop.router, instance, "met.shop", 3);
    let met = shop.world.connect(shop.client, "met.shop");
    shop.world.run_for(SECOND);
    let met = outcome(&mut shop.world, shop.client, met);
    assert!(matches!(met, Outcome::Answered(_)), "{met:?}: they share an association");
    publish_port(&mut shop, instance, "db.shop", 5432);
    let client = shop.world.connect(shop.client, "db.shop");
    shop.world.run_for(Duration::from_millis(20));
    assert_eq!(outcome(&mut shop.world, shop.client, client), Outcome::Refused);
}

#[test]
fn old_connections_of_the_listening_host_are_in_nobodys_way() {
    let mut shop = shop(11, Weather::FAIR);
    let instance = shop.instances[0];
    publish_port(&mut shop, instance, "db.shop", 80);
    shop.world.host(instance).old_connections = 3;
    let client = shop.world.connect(shop.client, "db.shop");
    shop.world.run_for(Duration::from_millis(20));
    let found = outcome(&mut shop.world, shop.client, client);
    assert!(matches!(found, Outcome::Answered(_)), "{found:?}: another port was free at once");
    // However many there are, the connect ends.
    shop.world.host(instance).old_connections = u32::MAX;
    let client = shop.world.connect(shop.client, "db.shop");
    shop.world.run_for(10 * SECOND);
    assert_eq!(outcome(&mut shop.world, shop.client, client), Outcome::Refused);
}

#[test]
fn a_listener_whose_queue_is_full_is_asked_again() {
    let mut shop = shop(12, Weather::FAIR);
    let instance = shop.instances[0];
    publish_port(&mut shop, instance, "db.shop", 80);
    shop.world.host(instance).full_queue = 2;
    let client = shop.world.connect(shop.client, "db.shop");
    shop.world.run_for(4 * SECOND);
    let found = outcome(&mut shop.world, shop.client, client);
    assert!(matches!(found, Outcome::Answered(_)), "{found:?}");
}

#[test]
fn a_changed_copy_of_a_syn_does_not_end_the_flow_that_it_set_up() {
    let mut shop = shop(10, Weather::FAIR);
    let instance = shop.instances[0];
    publish_port(&mut shop, instance, "db.shop", 80);
    let address = shop.world.host(instance).address;
    let talk = Plan { write: 100, every: Duration::from_millis(50), writes: u32::MAX, closes: false };
    // The program's own rule is for another name: this one is published on one port alone.
    shop.world.host(instance).serve_streams(service("any.shop"), 80, Plan::LISTEN);
    shop.world.recording = Some(Vec::new());
    let stream = shop.world.connect_stream(shop.client, "db.shop", talk);
    shop.world.run_for(Duration::from_millis(5));
    let sent = shop.world.recording.take().expect("recording");
    let is_syn = |bytes: &[u8]| margay_wire::kind_of(bytes) == Ok(Kind::Syn);
    let (_, _, syn) = sent.into_iter().find(|(_, to, bytes)| to.ip() == address && is_syn(bytes)).expect("a SYN");
    let session = margay_wire::Message::parse(&syn).expect("ours").session().expect("it has one").session.0;
    let at = syn.windows(16).position(|bytes| *bytes == session).expect("it is in the clear");
    // As if the router had sent them: its tag does not cover what they were changed in.
    let router = SocketAddr::new(shop.world.host(shop.router).address, PORT);
    for changed in (at + 16..at + 40).rev() {
        let mut copy = syn.clone();
        copy[changed] ^= 1;
        shop.world.inject(router, SocketAddr::new(address, PORT), copy);
        shop.world.run_for(Duration::from_micros(100));
    }
    shop.world.run_for(SECOND);
    let now = shop.world.now;
    let stream = &shop.world.host(shop.client).streams[stream];
    assert!(!stream.was_reset && stream.acknowledged() > 0 && stream.longest_wait(now) < SECOND);
}

#[test]
fn client_and_server_on_one_host() {
    let mut shop = shop(7, Weather::FAIR);
    let mut ended = Vec::new();
    for _ in 0..8 {
        let client = shop.world.connect(shop.instances[0], "web.shop");
        shop.world.run_for(SECOND);
        ended.push(outcome(&mut shop.world, shop.instances[0], client));
    }
    assert_eq!(ended, [Outcome::Answered(1); 8], "its own instance is nearest: it is in the host's own table");
}

#[test]
fn an_emptied_cache_costs_a_miss_and_no_more() {
    let mut shop = shop(8, Weather::FAIR);
    let client = shop.world.connect(shop.client, "web.shop");
    shop.world.run_for(Duration::from_millis(3));
    for host in 0..shop.world.hosts.len() {
        shop.world.hosts[host].cache.clear();
    }
    shop.world.run_for(SECOND);
    assert!(matches!(outcome(&mut shop.world, shop.client, client), Outcome::Answered(_)));
}

#[test]
fn closed_flows_go_after_their_linger() {
    let mut shop = shop(9, Weather::FAIR);
    for _ in 0..10 {
        shop.world.connect(shop.client, "web.shop");
    }
    shop.world.run_for(30 * SECOND);
    for host in &shop.world.hosts {
        assert_eq!(host.sal.flow_count(), 0);
        assert_eq!(host.sal.counters().removals(RemoveReason::Idle), 0);
        assert!(host.cache.is_empty());
    }
}

#[test]
fn a_peer_that_rebooted_resets_the_flows_of_its_older_boot() {
    let mut shop = shop(10, Weather::FAIR);
    let client_host = shop.client;
    let client = shop.world.connect(client_host, "web.shop");
    shop.world.run_for(Duration::from_millis(4));
    let now_known = shop.world.host(client_host).sal.flows().next().expect("connected");
    let instance = shop.instances.into_iter().find(|id| {
        let address = shop.world.host(*id).address;
        now_known.remote.is_some_and(|remote| remote.ip() == address)
    });
    let instance = instance.expect("one of the two");
    let (address, old_seed) = (shop.world.host(instance).address, key_seed_of(&mut shop.world, instance));
    let start = Start { key_seed: old_seed, epoch: 2, boot: 2, router: false, ranges: Ranges::USUAL };
    shop.world.start_host(instance, address, start);
    shop.world.register(shop.router, instance);
    shop.world.host(instance).serve(service("web.shop"), 80, 9, Allow::Any);
    let _ = outcome(&mut shop.world, client_host, client);
    for _ in 0..8 {
        shop.world.connect(client_host, "web.shop");
    }
    shop.world.run_for(8 * SECOND);
    let events = &shop.world.host(client_host).events;
    assert!(events.iter().any(|event| matches!(event, Event::PeerRebooted(_))), "{events:?}");
    let again = shop.world.host(client_host).clients.iter().filter(|client| client.outcome == Outcome::Answered(9));
    assert!(again.count() > 0);
}

fn key_seed_of(world: &mut World, host: HostId) -> [u8; 32] {
    world.host(host).key_seed()
}

#[test]
fn under_a_flood_honest_clients_bring_a_cookie_and_get_through() {
    let mut world = World::new(11, Weather::FAIR);
    world.limits = Limits { half_open_cookie: 4, half_open: 16, ..Limits::default() };
    let server = world.add_host(false);
    let client = world.add_host(false);
    world.host(server).serve(service("web.shop"), 80, 1, Allow::Any);
    let (address, key) = (world.host(server).address, world.host(server).public_key());
    world.host(client).forward(service("web.shop").into(), address, Some(key));
    // A well-formed SYN, caught from an honest client and sent again with other flows, sessions and sources.
    world.recording = Some(Vec::new());
    world.connect(client, "web.shop");
    world.run_for(SECOND);
    let caught = world.recording.take().expect("recording");
    let syn =
        caught.iter().find(|(_, _, bytes)| margay_wire::kind_of(bytes) == Ok(Kind::Syn)).expect("a SYN").2.clone();
    for n in 0..2000_u32 {
        let mut forged = syn.clone();
        forged[12..16].copy_from_slice(&n.to_be_bytes());
        forged[112..116].copy_from_slice(&n.to_be_bytes());
        let from = SocketAddr::new([203, 0, 113, (n % 250) as u8].into(), 1000 + (n % 5000) as u16);
        world.inject(from, SocketAddr::new(address, PORT), forged);
        if n % 100 == 0 {
            world.connect(client, "web.shop");
        }
        world.run_for(Duration::from_millis(1));
    }
    world.run_for(20 * SECOND);
    let server = world.host(server);
    assert!(server.sal.counters().cookies_sent > 1000);
    assert!(server.sal.counters().drops(DropReason::Full) == 0);
    let clients = &world.host(client).clients;
    assert!(
        clients.iter().all(|client| client.outcome == Outcome::Answered(1)),
        "{:?}",
        margay_sim::check::tally(&world)
    );
    nothing_left_over(&world).expect("nothing is left");
}

#[test]
fn a_restarted_agent_ends_flows_of_its_older_start_cleanly() {
    let mut shop = shop(14, Weather::FAIR);
    let client_host = shop.client;
    for _ in 0..8 {
        shop.world.connect(client_host, "web.shop");
        shop.world.run_for(2 * SECOND);
    }
    shop.world.run_for(30 * SECOND);
    let client = shop.world.connect(client_host, "web.shop");
    // The client has its answer and has asked; the question is on its way.
    shop.world.run_for(Duration::from_micros(3500));
    let remote = shop.world.host(client_host).sal.flows().next().and_then(|flow| flow.remote).expect("answered");
    let instance =
        shop.instances.into_iter().find(|id| shop.world.host(*id).address == remote.ip()).expect("one of two");
    let (address, key_seed) = (shop.world.host(instance).address, shop.world.host(instance).key_seed());
    let kept = shop.world.host(instance).sal.keep_associations();
    shop.world.start_host(
        instance,
        address,
        Start { key_seed, epoch: 2, boot: 1, router: false, ranges: Ranges::USUAL },
    );
    let now = shop.world.now;
    assert_eq!(shop.world.host(instance).sal.take_up_associations(now, &kept), Ok(2));
    shop.world.run_for(2 * SECOND);
    assert_eq!(outcome(&mut shop.world, client_host, client), Outcome::Reset, "at the next data, not after a time-out");
    shop.world.host(instance).serve(service("web.shop"), 80, 9, Allow::Any);
    shop.world.recording = Some(Vec::new());
    // Enough that some of them go to this one of the two instances.
    for _ in 0..24 {
        shop.world.connect(client_host, "web.shop");
    }
    shop.world.run_for(2 * SECOND);
    let again =
        shop.world.host(client_host).clients.iter().filter(|client| client.outcome == Outcome::Answered(9)).count();
    assert!(again > 0);
    let sent = shop.world.recording.take().expect("recording");
    let from_instance = sent.iter().filter(|(from, ..)| from.ip() == address);
    let messages: Vec<_> = from_instance.filter_map(|(_, _, bytes)| margay_wire::Message::parse(bytes).ok()).collect();
    assert!(messages.iter().all(|message| message.key_exchange().is_none()), "the kept key serves");
}

#[test]
fn a_client_whose_agent_has_started_again_reaches_whom_it_has_met_before() {
    let mut shop = shop(14, Weather::FAIR);
    let client_host = shop.client;
    for _ in 0..8 {
        shop.world.connect(client_host, "web.shop");
        shop.world.run_for(2 * SECOND);
    }
    // Nothing but the associations is left.
    shop.world.run_for(30 * SECOND);
    let (address, key_seed) = (shop.world.host(client_host).address, shop.world.host(client_host).key_seed());
    let kept = shop.world.host(client_host).sal.keep_associations();
    shop.world.start_host(
        client_host,
        address,
        Start { key_seed, epoch: 2, boot: 1, router: false, ranges: Ranges::USUAL },
    );
    let now = shop.world.now;
    assert!(shop.world.host(client_host).sal.take_up_associations(now, &kept).is_ok_and(|taken_up| taken_up > 0));
    shop.world.register(shop.router, client_host);
    let client = shop.world.connect(client_host, "web.shop");
    shop.world.run_for(2 * SECOND);
    assert!(matches!(outcome(&mut shop.world, client_host, client), Outcome::Answered(_)));
}

#[test]
fn a_host_that_lost_everything_is_greeted_and_its_old_flows_are_reset() {
    for boot in [1, 2] {
        let mut shop = shop(15, Weather::FAIR);
        let client_host = shop.client;
        for _ in 0..8 {
            shop.world.connect(client_host, "web.shop");
            shop.world.run_for(2 * SECOND);
        }
        shop.world.run_for(30 * SECOND);
        let client = shop.world.connect(client_host, "web.shop");
        shop.world.run_for(Duration::from_micros(3500));
        let remote = shop.world.host(client_host).sal.flows().next().and_then(|flow| flow.remote).expect("answered");
        let instance =
            shop.instances.into_iter().find(|id| shop.world.host(*id).address == remote.ip()).expect("one of two");
        let (address, key_seed) = (shop.world.host(instance).address, shop.world.host(instance).key_seed());
        shop.world.start_host(
            instance,
            address,
            Start { key_seed, epoch: 2, boot, router: false, ranges: Ranges::USUAL },
        );
        shop.world.run_for(3 * SECOND);
        assert_eq!(outcome(&mut shop.world, client_host, client), Outcome::Reset, "boot {boot}");
        nothing_left_over(&shop.world).expect("the greeting is over");
    }
}
