//! Hosts that move, in virtual time (docs/decisions/0018): one end, both, in bad weather, with an attacker about.

mod site;

use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use margay_core::Carriage;
use margay_core::key::HostPublic;
use margay_core::{AssociationSetup, Cause, DropReason, Event, Lifecycle, RemoveReason};
use margay_sim::check::nothing_left_over;
use margay_sim::stream::{Plan, State};
use margay_sim::{Weather, World};
use margay_wire::{Kind, Message, MoveFlags, PORT, kind_of};

use site::{CHAT, RTT, SECOND, Site, address, site, steady, v6};

#[test]
fn a_client_moves_with_four_messages_and_its_flow_goes_on() {
    for direct in [false, true] {
        let mut site = site(1, steady(), direct, (CHAT, CHAT));
        site.world.set_addresses(site.client, vec![address(1)]);
        site.world.run_for(SECOND);
        site.assert_well(1);
        // Two peers were told: the server, and the router.
        assert_eq!(site.sent(site.client), [2, 0, 2]);
        assert_eq!(site.sent(site.server), [0, 1, 1]);
        let (own, peer) = (site.flow(), site.servers_flow());
        assert_eq!(own.moved.map(|moved| moved.cause), Some(Cause::Address));
        assert_eq!(peer.moved.map(|moved| moved.cause), Some(Cause::Peer));
        assert_eq!((own.moves, peer.moves), (1, 1));
    }
}

#[test]
fn a_change_that_is_seen_in_two_halves_is_one_move() {
    let mut site = site(21, steady(), true, (CHAT, CHAT));
    let old = site.world.host(site.client).address;
    // Routing wants the new address already, while the old one is still there.
    site.world.set_addresses(site.client, vec![address(1), old]);
    site.world.run_for(RTT / 8);
    site.world.set_addresses(site.client, vec![address(1)]);
    site.world.run_for(SECOND);
    site.assert_well(21);
    assert_eq!(site.sent(site.client), [2, 0, 2], "the server and the router");
    assert_eq!(site.sent(site.server), [0, 1, 1]);
    assert_eq!((site.flow().moves, site.servers_flow().moves), (1, 1));
}

#[test]
fn the_pause_is_two_round_trips_at_most() {
    for (mover, seed) in [(true, 2), (false, 3)] {
        for direct in [false, true] {
            let mut site = site(seed, steady(), direct, (CHAT, CHAT));
            let who = if mover { site.client } else { site.server };
            let now = site.world.now;
            site.world.host(site.client).streams[0].forget_waits(now);
            site.world.host(site.server).streams[0].forget_waits(now);
            site.world.set_addresses(who, vec![address(9)]);
            site.world.run_for(SECOND);
            let now = site.world.now;
            for host in [site.client, site.server] {
                let wait = site.world.host(host).streams[0].longest_wait(now);
                // An acknowledgement takes a round trip in any case.
                assert!(wait <= RTT * 7 / 2, "{wait:?} (client moves: {mover}, direct: {direct})");
            }
            site.assert_well(seed);
        }
    }
}

#[test]
fn a_server_moves_and_comes_back_and_moves_again() {
    let mut site = site(4, steady(), true, (CHAT, CHAT));
    for n in [5, 6, 5, 7] {
        site.world.set_addresses(site.server, vec![address(n)]);
        site.world.run_for(SECOND);
        site.assert_well(4);
    }
}

#[test]
fn an_agent_that_starts_again_has_not_moved() {
    for who in 0..2 {
        let mut site = site(6, steady(), true, (CHAT, CHAT));
        let again = [site.client, site.server][who];
        site.world.kill_agent(again);
        site.world.start_agent(again);
        site.world.run_for(3 * SECOND);
        site.assert_well(6);
        for host in [site.client, site.server] {
            let moves: Vec<u32> = site.world.host(host).sal.paths().iter().map(|path| path.moves).collect();
            assert!(!moves.is_empty() && moves.iter().all(|moves| *moves == 0), "{moves:?}");
        }
    }
}

#[test]
fn another_family_will_do() {
    let mut site = site(5, steady(), true, (CHAT, CHAT));
    let server = site.world.host(site.server).address;
    site.world.set_addresses(site.server, vec![server, v6(2)]);
    site.world.run_for(SECOND);
    for addresses in [vec![v6(1)], vec![address(3)], vec![v6(4)]] {
        site.world.set_addresses(site.client, addresses);
        site.world.run_for(SECOND);
        assert!(site.is_alive());
        assert_eq!(site.servers_flow().remote.map(|remote| remote.ip()), Some(site.world.host(site.client).address));
    }
}

#[test]
fn a_host_without_any_address_is_waited_for() {
    for who in 0..2 {
        let mut site = site(6, steady(), true, (CHAT, CHAT));
        let who = [site.client, site.server][who];
        site.world.set_addresses(who, Vec::new());
        site.world.run_for(8 * SECOND);
        assert!(site.world.host(who).cache.void > 0, "its packets have nowhere to go");
        site.world.set_addresses(who, vec![address(8)]);
        site.world.run_for(SECOND);
        site.assert_well(6);
    }
}

#[test]
fn what_was_lost_in_flight_is_sent_again_at_once() {
    let mut site = site(7, steady(), true, (CHAT, CHAT));
    site.world.set_addresses(site.client, Vec::new());
    site.world.run_for(8 * SECOND);
    let before = site.acknowledged();
    site.world.set_addresses(site.client, vec![address(8)]);
    site.world.run_for(RTT * 3);
    let after = site.acknowledged();
    assert!(after.0 > before.0 && after.1 > before.1, "{before:?} {after:?}");
}

#[test]
fn both_ends_move_in_the_same_instant_and_meet_at_the_router() {
    for seed in 0..20 {
        for direct in [false, true] {
            let mut site = site(100 + seed, steady(), direct, (CHAT, CHAT));
            site.world.set_addresses(site.client, vec![address(20)]);
            site.world.set_addresses(site.server, vec![address(21)]);
            site.world.run_for(2 * SECOND);
            site.assert_well(seed);
            assert!(site.world.host(site.router).sal.counters().forwarded >= 2, "seed {seed}");
        }
    }
}

#[test]
fn both_ends_move_in_foul_weather() {
    for seed in 0..60 {
        let mut site = site(1000 + seed, steady(), seed % 2 == 0, (CHAT, CHAT));
        site.world.network.weather = Weather { loss_per_mille: 200, duplicate_per_mille: 200, ..Weather::FOUL };
        site.world.set_addresses(site.client, vec![address(30)]);
        site.world.run_for(Duration::from_millis(seed * 7));
        site.world.set_addresses(site.server, vec![address(31)]);
        site.world.run_for(Duration::from_millis(seed * 11));
        // A move during a move.
        site.world.set_addresses(site.client, vec![address(32)]);
        site.world.run_for(20 * SECOND);
        site.world.network.weather = Weather::FAIR;
        site.world.run_for(10 * SECOND);
        site.assert_well(seed);
        let resets =
            site.world.host(site.client).streams[0].was_reset || site.world.host(site.server).streams[0].was_reset;
        assert!(!resets, "seed {seed}");
    }
}

#[test]
fn a_silent_path_is_left_for_another() {
    for (seed, plans) in [(8, (CHAT, Plan::LISTEN)), (9, (Plan::LISTEN, CHAT)), (10, (CHAT, CHAT))] {
        let mut site = site(seed, steady(), true, plans);
        let (client, server) = (site.world.host(site.client).address, site.world.host(site.server).address);
        site.world.set_addresses(site.client, vec![client, address(41)]);
        site.world.set_addresses(site.server, vec![server, address(42)]);
        site.world.run_for(SECOND);
        let now = site.world.now;
        for host in [site.client, site.server] {
            site.world.host(host).streams[0].forget_waits(now);
        }
        site.world.network.cut(client, server);
        site.world.run_for(3 * SECOND);
        let now = site.world.now;
        let waits = [site.client, site.server].map(|host| site.world.host(host).streams[0].longest_wait(now));
        assert!(waits.iter().all(|wait| *wait <= SECOND), "seed {seed}: {waits:?}");
        assert_eq!(site.flow().moved.map(|moved| matches!(moved.cause, Cause::Silence | Cause::Peer)), Some(true));
    }
}

#[test]
fn when_the_network_is_back_connections_do_not_wait_for_their_timers() {
    for direct in [false, true] {
        let mut site = site(12, steady(), direct, (CHAT, CHAT));
        let (client, server) = (site.world.host(site.client).address, site.world.host(site.server).address);
        site.world.network.cut(client, server);
        // The timers of both would expire some five seconds later.
        site.world.run_for(20 * SECOND);
        site.world.network.heal();
        site.world.run_for(3 * SECOND);
        assert!(site.is_alive(), "direct {direct}");
    }
}

#[test]
fn one_flow_moves_and_the_others_stay() {
    for direct in [false, true] {
        let mut site = site(11, steady(), direct, (CHAT, CHAT));
        let server = site.world.host(site.server).address;
        site.world.set_addresses(site.server, vec![server, address(51)]);
        site.world.run_for(SECOND);
        let other = site.world.connect_stream(site.client, "talk.shop", CHAT);
        site.world.run_for(3 * SECOND);
        let flow = site.servers_flow().flow;
        let now = site.world.now;
        let towards = margay_core::Towards::Local(address(51));
        site.world.host(site.server).sal.migrate_flow(now, flow, towards).expect("it has that address");
        site.world.touch(site.server);
        site.world.run_for(3 * SECOND);
        assert!(site.is_alive());
        assert_eq!(site.flow().remote, Some(SocketAddr::new(address(51), PORT)));
        assert!(site.flow().is_aside && site.servers_flow().is_aside);
        let stayed = site.world.host(site.client).flow_of(other).expect("the other flow");
        assert_eq!(stayed.remote, Some(SocketAddr::new(server, PORT)));
        // Its address goes: it joins the other.
        site.world.set_addresses(site.server, vec![server]);
        site.world.run_for(3 * SECOND);
        assert!(site.is_alive());
        assert_eq!(site.flow().remote, Some(SocketAddr::new(server, PORT)));
    }
}

#[test]
fn a_flow_with_a_pair_of_its_own_has_it_after_either_agent_has_started_again() {
    for (seed, direct) in [(13, false), (14, true)] {
        for is_server in [false, true] {
            let what = format!("direct {direct}, server {is_server}");
            let mut site = site(seed, steady(), direct, (CHAT, CHAT));
            let server = site.world.host(site.server).address;
            site.world.set_addresses(site.server, vec![server, address(51)]);
            site.world.run_for(SECOND);
            let flow = site.servers_flow().flow;
            let now = site.world.now;
            let towards = margay_core::Towards::Local(address(51));
            site.world.host(site.server).sal.migrate_flow(now, flow, towards).expect("it has that address");
            site.world.touch(site.server);
            site.world.run_for(3 * SECOND);
            let victim = if is_server { site.server } else { site.client };
            site.world.kill_agent(victim);
            site.world.run_for(SECOND / 2);
            site.world.start_agent(victim);
            site.world.run_for(3 * SECOND);
            assert!(site.is_alive(), "{what}");
            assert_eq!(site.flow().remote, Some(SocketAddr::new(address(51), PORT)), "{what}");
            assert!(site.flow().is_aside && site.servers_flow().is_aside, "{what}");
            assert_eq!(site.flow().carriage.sends(), direct, "{what}");
        }
    }
}

#[test]
fn flows_outlive_the_association_whose_path_they_named() {
    let mut world = World::new(12, steady());
    let router = world.add_host(true);
    let (server, client) = (world.add_host(false), world.add_host(false));
    for host in [server, client] {
        world.register(router, host);
        world.set_direct(host, true);
    }
    world.publish_streams(router, server, "talk.shop", CHAT);
    // Both greet a stranger: each makes an association. The one that comes last is the newest, and the other ends with
    // its flow.
    let first = world.connect_stream(client, "talk.shop", CHAT);
    let stream = world.connect_stream(client, "talk.shop", CHAT);
    let mut site = Site { world, router, server, client, stream, answer: 1 };
    site.world.run_for(2 * SECOND);
    let peers = |site: &mut Site| site.world.host(site.client).sal.associations().count();
    assert_eq!(peers(&mut site), 3, "the router, and the server twice");
    for n in 1..4 {
        site.world.set_addresses(site.client, vec![address(n)]);
        site.world.run_for(3 * SECOND);
        site.assert_well(12);
        assert_eq!(site.flow().carriage, Carriage::Direct, "move {n}");
        let (now, client) = (site.world.now, site.world.host(site.client));
        if let Some(flow) = client.flow_of(first) {
            client.sal.close_flow(now, flow.flow);
            site.world.touch(site.client);
            site.world.run_for(60 * SECOND);
        }
    }
    assert_eq!(peers(&mut site), 2, "one is left with the server");
}

#[test]
fn what_an_attacker_saw_is_of_no_use_to_it() {
    let mut site = site(12, steady(), true, (CHAT, CHAT));
    site.world.recording = Some(Vec::new());
    for n in [61, 62] {
        site.world.set_addresses(site.client, vec![address(n)]);
        site.world.run_for(SECOND);
    }
    site.assert_well(12);
    let seen = site.world.recording.take().expect("it was recording");
    let moves = |bytes: &[u8]| matches!(kind_of(bytes), Ok(Kind::Rsyn | Kind::RsynAck | Kind::RsynDone | Kind::Probe));
    let before = [site.client, site.server].map(|host| site.world.host(host).sal.counters().moves);
    for (from, to, bytes) in seen.iter().filter(|(_, _, bytes)| moves(bytes)) {
        let elsewhere = SocketAddr::new([192, 0, 2, 66].into(), PORT);
        for source in [*from, elsewhere] {
            site.world.inject(source, *to, bytes.clone());
            for at in [1, 9, 17, 24, 40, bytes.len().saturating_sub(1)] {
                let mut forged = bytes.clone();
                forged[at.min(bytes.len() - 1)] ^= 1;
                site.world.inject(source, *to, forged);
            }
        }
    }
    site.world.run_for(3 * SECOND);
    let after = [site.client, site.server].map(|host| site.world.host(host).sal.counters().moves);
    assert_eq!(before, after);
    assert!(site.world.host(site.server).sal.counters().drops(DropReason::Replayed) > 0);
    assert!(site.world.host(site.server).sal.counters().drops(DropReason::BadTag) > 0);
    site.assert_well(12);
}

/// One who can hold back and forward packets, and forge sources, delays an RSYN and sends it on from elsewhere: no data
/// goes there, since nobody there knows the token.
#[test]
fn a_delayed_rsyn_from_another_place_gets_an_answer_and_no_more() {
    let mut site = site(13, steady(), true, (CHAT, CHAT));
    let server = SocketAddr::new(site.world.host(site.server).address, PORT);
    let (held, sink) = std::sync::mpsc::channel();
    site.world.network.losing = Some(Box::new(move |packet| {
        let is_rsyn = kind_of(packet.bytes) == Ok(Kind::Rsyn) && !packet.is_direct && packet.to == server;
        if is_rsyn {
            held.send(packet.bytes.to_vec()).expect("the test listens");
        }
        is_rsyn
    }));
    site.world.set_addresses(site.client, vec![address(71)]);
    site.world.run_for(SECOND);
    let elsewhere = SocketAddr::new([192, 0, 2, 66].into(), PORT);
    for rsyn in sink.try_iter() {
        site.world.inject(elsewhere, server, rsyn);
    }
    site.world.run_for(SECOND);
    assert_ne!(site.servers_flow().remote, Some(elsewhere));
    site.world.network.losing = None;
    site.world.run_for(5 * SECOND);
    site.assert_well(13);
}

#[test]
fn a_host_that_moves_all_the_time_is_left_where_it_is_for_a_while() {
    let mut site = site(14, steady(), false, (CHAT, CHAT));
    for n in 0..12 {
        site.world.set_addresses(site.client, vec![address(100 + n)]);
        site.world.run_for(Duration::from_millis(200));
    }
    let is_flapping = |event: &Event| matches!(event, Event::Flapping(_));
    assert!(site.world.host(site.server).events.iter().any(is_flapping));
    assert!(site.world.host(site.server).sal.counters().drops(DropReason::RateLimited) > 0);
    site.world.run_for(15 * SECOND);
    site.assert_well(14);
}

#[test]
fn an_rsyn_for_a_flow_that_is_gone_ends_it_at_the_mover() {
    let mut site = site(15, steady(), false, (CHAT, CHAT));
    let server = site.world.host(site.server).address;
    site.world.set_addresses(site.server, vec![server, address(81)]);
    site.world.run_for(SECOND);
    let flow = site.servers_flow().flow;
    let now = site.world.now;
    // The client loses it without a word.
    let clients = site.flow().flow;
    site.world.network.cut(server, site.world.hosts[site.client.0].address);
    site.world.host(site.client).sal.close_flow(now, clients);
    site.world.touch(site.client);
    site.world.run_for(RTT * 2);
    site.world.network.heal();
    let now = site.world.now;
    let towards = margay_core::Towards::Local(address(81));
    site.world.host(site.server).sal.migrate_flow(now, flow, towards).expect("it has that address");
    site.world.touch(site.server);
    site.world.run_for(3 * SECOND);
    assert!(site.world.host(site.server).sal.flow(flow).is_none_or(|flow| flow.lifecycle >= Lifecycle::Closed));
    assert_eq!(site.world.host(site.server).streams[0].state, State::Gone);
    let reasons = site.world.host(site.server).events.iter().filter_map(|event| match event {
        Event::FlowClosed { flow: closed, reason, .. } if closed.flow == flow => Some(*reason),
        _ => None,
    });
    assert_eq!(reasons.collect::<Vec<_>>(), [RemoveReason::PeerFailed], "and it is said why");
    nothing_left_over(&site.world).expect("nothing");
}

/// What a stream says of the router's own address is nothing: it was found out, and is not forgotten.
#[test]
fn a_host_that_registers_again_from_where_it_was_is_where_it_was() {
    let mut site = site(22, steady(), false, (CHAT, CHAT));
    site.world.set_addresses(site.client, vec![address(3)]);
    site.world.run_for(SECOND);
    let (key, epoch) = (site.world.host(site.client).public_key(), 1);
    let host = HostPublic(key).id();
    let path = |site: &mut Site| {
        let known = site.world.host(site.router).sal.associations().find(|known| known.host == host);
        known.map(|known| (known.local, known.remote, known.moves)).expect("the client is registered")
    };
    let before = path(&mut site);
    assert!(before.0.is_some(), "{before:?}");
    let setup = AssociationSetup {
        host_key: key,
        key: [1; 32],
        local_id: 77,
        remote_id: 78,
        peer_epoch: epoch,
        boot_id: None,
        remote: before.1,
        hop_key: None,
        router: true,
        initiator: false,
    };
    let now = site.world.now;
    site.world.host(site.router).sal.install_association(now, setup);
    assert_eq!(path(&mut site), before);
}

/// What a peer has said of the first move's path comes after the second move: it is no word about the second one's.
#[test]
fn a_host_that_moves_twice_in_a_short_time_is_direct_again() {
    // The second time to a third place, or back to the first.
    for (seed, second) in [(31, 62), (32, 60)] {
        let mut site = site(seed, steady(), true, (CHAT, CHAT));
        site.world.set_addresses(site.client, vec![address(60)]);
        site.world.run_for(SECOND);
        let late = Rc::new(RefCell::new(Vec::new()));
        let caught = Rc::clone(&late);
        site.world.network.losing = Some(Box::new(move |packet| {
            let is_opened = !packet.is_direct && says_opened(packet.bytes);
            if is_opened {
                caught.borrow_mut().push((packet.from, packet.to, packet.bytes.to_vec()));
            }
            is_opened
        }));
        site.world.set_addresses(site.client, vec![address(61)]);
        site.world.run_for(SECOND);
        // The first packets that go directly after the second move are lost.
        site.world.network.losing = Some(Box::new(|packet| packet.is_direct));
        site.world.set_addresses(site.client, vec![address(second)]);
        site.world.run_for(RTT * 4);
        assert_eq!(site.servers_flow().remote, Some(SocketAddr::new(address(second), PORT)), "it has moved");
        assert!(!late.borrow().is_empty(), "nobody has said that a path is open");
        for (from, to, bytes) in late.take() {
            site.world.inject(from, to, bytes);
        }
        site.world.run_for(RTT * 4);
        site.world.network.losing = None;
        site.world.run_for(20 * SECOND);
        let carriages = [site.flow().carriage, site.servers_flow().carriage];
        assert_eq!(carriages, [Carriage::Direct; 2], "seed {seed}: {:?} {:?}", site.flow(), site.servers_flow());
    }
}

fn says_opened(datagram: &[u8]) -> bool {
    let said = Message::parse(datagram).ok().filter(|message| message.kind == Kind::Probe);
    said.and_then(|message| message.location()).is_some_and(|said| said.flags.contains(MoveFlags::OPENED))
}
