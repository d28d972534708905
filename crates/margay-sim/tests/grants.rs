//! Connections that kernels set up by themselves, in virtual time: when grants are asked for, what they save, and what
//! ends them.

#[path = "granted/mod.rs"]
mod granted;

use std::net::SocketAddr;
use std::time::Duration;

use margay_core::certificate::Revocation;
use margay_core::table::{Action, Allow, Demux, Rule};
use margay_core::{Carriage, Cipher, Direction, DropReason, Event, FlowInfo, Input, Tuple, Why};
use margay_sim::check::{ends_agree, no_request_met, nothing_left_over};
use margay_sim::host::Host;
use margay_sim::stream::State;
use margay_sim::world::service;
use margay_sim::{HostId, Weather};
use margay_wire::{Flags, FlowId, Kind, Message, PORT, kind_of};

use granted::{ANSWER, ASK, CHAT, FIN, NAME, SECOND, STEP, Shop, floor, shop, slow};

#[test]
fn who_connects_often_is_granted_flows_and_they_are_as_any_other() {
    let mut shop = shop(1, slow(2), CHAT);
    let streams = shop.connect_often(300, CHAT);
    // The last one is on its way.
    shop.world.run_for(Duration::from_millis(3));
    let (taken, opened) = shop.set_up();
    assert!(taken > 100, "{taken} of 300");
    assert_eq!(taken, opened[0] + opened[1]);
    assert!(opened.iter().all(|count| *count > 10), "both instances give grants: {opened:?}");
    shop.world.run_for(SECOND);
    shop.check(&streams);
    let flows: Vec<_> = streams.iter().filter_map(|stream| shop.world.host(shop.client).flow_of(*stream)).collect();
    assert_eq!(flows.len(), 300);
    assert!(flows.iter().all(|flow| flow.carriage == Carriage::Direct));
    assert_eq!(flows.iter().filter(|flow| flow.why == Why::Granted).count() as u64, taken);
    // When nobody connects any more, nothing is asked for, and what is left is forgotten.
    shop.world.run_for(10 * SECOND);
    for host in [shop.client, shop.servers[0], shop.servers[1]] {
        assert_eq!(shop.world.host(host).sal.grant_count(), 0);
    }
}

#[test]
fn a_port_whose_connection_is_over_is_connected_from_again() {
    let mut shop = shop(10, slow(2), ANSWER);
    let mut streams = shop.connect_often(300, ASK);
    let before = shop.set_up().0;
    // The last of them has begun a tenth of a second ago.
    shop.world.run_for(Duration::from_millis(100));
    shop.world.host(shop.client).come_round(50);
    streams.extend(shop.connect_often(50, ASK));
    shop.world.run_for(Duration::from_millis(3));
    assert_eq!(shop.set_up().0, before + 50);
    shop.world.run_for(60 * SECOND);
    shop.check(&streams);
    assert!(streams.iter().all(|stream| shop.world.host(shop.client).streams[*stream].received == 100));
    nothing_left_over(&shop.world).expect("nothing");
}

#[test]
fn a_grant_has_no_port_that_a_connection_took_while_it_was_asked_for() {
    let mut shop = shop(13, slow(5), CHAT);
    // Programs' own ports, as listeners see them, are in the row of which grants have theirs, just when the first ones
    // are asked for.
    shop.world.host(shop.client).come_round(29_130);
    let streams = shop.connect_often(300, CHAT);
    shop.world.run_for(Duration::from_millis(20));
    let (taken, opened) = shop.set_up();
    assert!(taken > 50, "{taken} of 300");
    assert_eq!(taken, opened[0] + opened[1], "no SYN is for nothing");
    shop.world.run_for(SECOND);
    shop.check(&streams);
}

#[test]
fn the_record_of_a_path_lasts_as_long_as_the_grants_that_name_it() {
    let mut shop = shop(19, slow(2), ANSWER);
    // Each makes an association of its own. All share the record of the first, which lasts until its connection is
    // forgotten.
    let mut streams: Vec<usize> = (0..20).map(|_| shop.world.connect_stream(shop.client, NAME, ASK)).collect();
    let associations = |shop: &mut Shop| shop.world.host(shop.client).sal.associations().count();
    shop.world.run_for(SECOND);
    assert!(associations(&mut shop) > 3, "{}", associations(&mut shop));
    shop.world.run_for(Duration::from_millis(8_500));
    streams.extend(shop.connect_often(1000, ASK));
    assert_eq!(associations(&mut shop), 5, "the newest with each host, and the two whose records are in use");
    shop.world.run_for(Duration::from_millis(50));
    assert!(shop.set_up().0 > 700, "{:?}", shop.set_up());
    let late =
        streams.iter().filter(|stream| shop.world.hosts[shop.client.0].streams[**stream].received != 100).count();
    assert_eq!(late, 0, "all are answered");
    shop.check(&streams);
    shop.world.run_for(20 * SECOND);
    assert_eq!(associations(&mut shop), 3);
}

#[test]
fn what_is_over_within_a_moment_is_counted_and_leaves_nothing() {
    let mut shop = shop(11, slow(2), ANSWER);
    let hosts = [shop.client, shop.servers[0], shop.servers[1]];
    let mut streams = shop.connect_often(300, ASK);
    // Ports come round while the kernels still keep what was before.
    shop.world.run_for(Duration::from_millis(100));
    shop.world.host(shop.client).come_round(50);
    streams.extend(shop.connect_often(50, ASK));
    let taken = shop.set_up().0;
    shop.world.run_for(Duration::from_millis(300));
    let client = shop.world.host(shop.client);
    assert_eq!(client.sal.counters().flows_granted, taken);
    for host in hosts {
        let host = shop.world.host(host);
        let (brief, granted) = (host.sal.counters().flows_brief, host.sal.counters().flows_granted);
        assert!(brief > 20 && brief == granted, "{brief} of {granted}");
        let is_grants = |flow: &FlowInfo| flow.why == Why::Granted;
        let is_ones_end = |event: &Event| matches!(event, Event::FlowClosed { flow, .. } if is_grants(flow));
        assert!(!host.events.iter().any(is_ones_end) && !host.sal.flows().any(|flow| is_grants(&flow)));
    }
    shop.check(&streams);
    assert!(streams.iter().all(|stream| shop.world.host(shop.client).streams[*stream].received == 100));
    shop.world.run_for(60 * SECOND);
    for host in hosts {
        let kernel = shop.world.host(host).cache.kernel.as_ref().expect("a kernel");
        assert!(kernel.entries().is_empty());
    }
    nothing_left_over(&shop.world).expect("nothing");
}

#[test]
fn what_lasts_is_told_of() {
    let mut shop = shop(12, slow(2), CHAT);
    let streams = shop.connect_often(250, CHAT);
    shop.world.run_for(Duration::from_millis(20));
    let host = shop.world.host(shop.client);
    let opened = |host: &Host| host.events.iter().filter(|event| matches!(event, Event::FlowOpened(_))).count();
    // Nobody has heard of the last ones.
    assert!(host.sal.flow_count() < 250 && opened(host) == host.sal.flow_count());
    shop.world.run_for(Duration::from_millis(500));
    let host = shop.world.host(shop.client);
    assert_eq!((host.sal.flow_count(), opened(host), host.sal.counters().flows_brief), (250, 250, 0));
    shop.check(&streams);
}

#[test]
fn who_connects_now_and_then_is_resolved_each_time() {
    let mut shop = shop(2, slow(2), ANSWER);
    for _ in 0..100 {
        shop.world.connect_stream(shop.client, NAME, ASK);
        shop.world.run_for(Duration::from_millis(20));
    }
    assert_eq!((shop.set_up(), shop.grants()), ((0, [0, 0]), 0));
}

#[test]
fn a_granted_connection_takes_one_round_trip_and_no_message() {
    let mut shop = shop(3, slow(10), CHAT);
    shop.connect_often(220, CHAT);
    // What agents had set up meanwhile goes direct by now.
    shop.world.run_for(Duration::from_millis(100));
    let before = shop.set_up().0;
    shop.world.recording = Some(Vec::new());
    let stream = shop.world.connect_stream(shop.client, NAME, CHAT);
    shop.world.run_for(Duration::from_millis(21));
    assert_eq!(shop.set_up().0, before + 1);
    assert_eq!(shop.world.host(shop.client).streams[stream].state, State::Open);
    let sent = shop.world.recording.take().expect("recording");
    // Another grant may be asked for; nothing is said of this connection.
    let data = sent.iter().filter(|(_, _, bytes)| kind_of(bytes) == Ok(Kind::Data)).count();
    shop.world.run_for(SECOND);
    let session = shop.world.host(shop.client).flow_of(stream).expect("known").session;
    let named = sent.iter().filter(|(_, _, bytes)| bytes.windows(16).any(|window| window == session.0)).count();
    assert_eq!((data, named), (0, 0));
}

#[test]
fn what_leads_to_a_name_ends_its_grants_when_it_changes() {
    let demux = |allow| {
        let listener = "0.0.0.0:81".parse().expect("literal");
        let demux =
            Demux { listener, other_family: None, is_looked_up: false, service_port: None, protocol: Some(6), allow };
        Rule { priority: 100, weight: 1, action: Action::Demux(demux) }
    };
    type Change = fn(&mut Shop, Rule);
    let changes: [(&str, Change); 3] = [
        ("withdrawn", |shop, _| {
            for server in shop.servers {
                let sal = &mut shop.world.host(server).sal;
                let rules: Vec<_> = sal.rules_covering(service(NAME)).map(|(_, id, _)| id).collect();
                assert!(rules.into_iter().all(|id| sal.remove_rule(id)));
                shop.world.touch(server);
            }
        }),
        ("others are allowed", |shop, rule| {
            for server in shop.servers {
                let sal = &mut shop.world.host(server).sal;
                let own = sal.rules_covering(service(NAME)).find(|(_, _, rule)| rule.action.next_hop().is_none());
                let id = own.map(|(_, id, _)| id).expect("served");
                assert!(sal.change_rule(id, rule.clone()));
                shop.world.touch(server);
            }
        }),
        ("the client leads it elsewhere", |shop, _| {
            let now = shop.world.now;
            let drop = Rule { priority: 1, weight: 1, action: Action::Drop };
            shop.world.host(shop.client).sal.add_rule(now, service(NAME).into(), drop).expect("room");
            shop.world.touch(shop.client);
        }),
    ];
    for (name, change) in changes {
        let mut shop = shop(4, slow(2), CHAT);
        shop.connect_often(220, CHAT);
        change(&mut shop, demux(Allow::List(Vec::new())));
        // The word is on its way for two milliseconds.
        shop.world.run_for(Duration::from_millis(3));
        let before = shop.set_up();
        shop.connect_often(3, CHAT);
        assert_eq!(shop.set_up(), before, "{name}");
    }
}

#[test]
fn what_ends_grants_ends_those_that_are_being_agreed_on() {
    let mut shop = shop(17, slow(2), CHAT);
    let asked = |shop: &mut Shop| shop.world.host(shop.client).sal.counters().grants_asked;
    while asked(&mut shop) == 0 {
        shop.connect_often(1, CHAT);
    }
    // By way of the router the question takes four milliseconds, and the ACK two more after the answer's.
    shop.world.run_for(5 * STEP);
    for server in shop.servers {
        let sal = &mut shop.world.host(server).sal;
        let rules: Vec<_> = sal.rules_covering(service(NAME)).map(|(_, id, _)| id).collect();
        assert!(rules.into_iter().all(|id| sal.remove_rule(id)));
        shop.world.touch(server);
    }
    shop.world.run_for(20 * STEP);
    let given: u64 = shop.servers.iter().map(|server| shop.world.hosts[server.0].sal.counters().grants_given).sum();
    assert_eq!((given, shop.grants()), (0, 0));
}

#[test]
fn a_confirmation_that_is_lost_is_said_again() {
    let mut shop = shop(21, slow(2), CHAT);
    shop.connect_often(140, CHAT);
    shop.world.run_for(20 * STEP);
    let client = shop.world.host(shop.client).address;
    shop.world.network.losing = Some(Box::new(move |packet| {
        let confirms = |message: Message<'_>| message.kind == Kind::Ack && message.flags.contains(Flags::CONFIRM);
        packet.to.ip() == client && Message::parse(packet.bytes).is_ok_and(confirms)
    }));
    shop.connect_often(30, CHAT);
    let given = |shop: &Shop| -> u64 {
        shop.servers.iter().map(|server| shop.world.hosts[server.0].sal.counters().grants_given).sum()
    };
    assert!(given(&shop) > 0);
    assert_eq!(shop.grants(), 0, "nobody has heard of them");
    shop.world.network.losing = None;
    shop.world.run_for(250 * STEP);
    let asked = shop.world.host(shop.client).sal.counters().grants_asked;
    assert_eq!((given(&shop), shop.grants() as u64), (asked, asked));
}

#[test]
fn nobody_is_granted_connections_by_a_rule_for_datagrams() {
    let mut shop = shop(18, slow(2), CHAT);
    shop.world.recording = Some(Vec::new());
    shop.connect_often(220, CHAT);
    let asks = |bytes: &[u8]| {
        Message::parse(bytes).is_ok_and(|message| message.kind == Kind::Syn && message.grant().is_some())
    };
    let sent = shop.world.recording.take().expect("recording");
    let (_, _, syn) = sent.into_iter().find(|(_, _, bytes)| asks(bytes)).expect("it asks");
    let session = Message::parse(&syn).expect("whole").session().expect("in a SYN").session;
    let at = syn.windows(16).position(|window| window == session.0).expect("there");
    let server = shop.servers[0];
    let (client_address, server_address) = (shop.world.host(shop.client).address, shop.world.host(server).address);
    let listener = "0.0.0.0:5000".parse().expect("literal");
    for (number, protocol) in [(1, 17), (2, 6)] {
        let demux = Demux {
            listener,
            other_family: None,
            is_looked_up: false,
            service_port: None,
            protocol: Some(protocol),
            allow: Allow::Any,
        };
        let rule = Rule { priority: 100, weight: 1, action: Action::Demux(demux) };
        let (now, host) = (shop.world.now, shop.world.host(server));
        host.sal.add_rule(now, service("ask.shop").into(), rule).expect("room");
        let before =
            (host.sal.counters().drops(DropReason::Malformed), host.sal.counters().messages_sent(Kind::SynAck));
        let mut forged = syn.clone();
        // As the client may send it by itself: another session, the other service, and what it is said to be of.
        forged[at] ^= number;
        forged[at + 36] = protocol;
        forged[60..92].copy_from_slice(&service("ask.shop").0);
        shop.world.inject((client_address, PORT).into(), (server_address, PORT).into(), forged);
        shop.world.run_for(STEP);
        let counters = shop.world.host(server).sal.counters();
        let after = (counters.drops(DropReason::Malformed), counters.messages_sent(Kind::SynAck));
        let (refused, answered) = if protocol == 17 { (1, 0) } else { (0, 1) };
        assert_eq!(after, (before.0 + refused, before.1 + answered), "protocol {protocol}");
    }
}

#[test]
fn who_is_put_out_has_no_grants_any_more() {
    let mut shop = shop(8, slow(2), CHAT);
    shop.connect_often(220, CHAT);
    let host_key = shop.world.host(shop.client).public_key();
    for server in shop.servers {
        let revocation = Revocation { authority: [0; 8], host_key, until_s: u64::MAX, by: None };
        shop.world.host(server).sal.revoke(revocation);
        shop.world.touch(server);
    }
    let before = shop.set_up().1;
    // What was taken before the word came meets nothing: no kernel opens it.
    shop.world.connect_stream(shop.client, NAME, CHAT);
    shop.world.run_for(Duration::from_millis(3));
    assert_eq!(shop.set_up().1, before);
    assert!(shop.servers.iter().all(|server| shop.world.hosts[server.0].sal.counters().grants_ended > 0));
}

#[test]
fn a_lost_answer_costs_what_it_costs_a_plain_connection() {
    let mut shop = shop(5, slow(2), CHAT);
    shop.connect_often(220, CHAT);
    let before = shop.set_up().0;
    // Nothing direct comes back any more: the SYN is said again after a second, and the agent sets the connection up.
    let (client, servers) = (shop.world.host(shop.client).address, shop.servers);
    for server in servers {
        let server = shop.world.host(server).address;
        shop.world.network.wall_off(server, client);
    }
    let stream = shop.world.connect_stream(shop.client, NAME, CHAT);
    shop.world.run_for(3 * SECOND);
    assert_eq!(shop.set_up().0, before + 1);
    let flow = shop.world.host(shop.client).flow_of(stream).expect("set up");
    assert_ne!(flow.why, Why::Granted);
    assert!(shop.world.host(shop.client).streams[stream].received > 0);
    shop.check(&[stream]);
}

#[test]
fn who_reads_on_the_path_can_use_no_grant() {
    const SYN_AND_ACK: u8 = 0x12;
    let mut shop = shop(24, slow(2), CHAT);
    shop.world.direct_recording = Some(Vec::new());
    let mut streams = shop.connect_often(220, CHAT);
    shop.world.run_for(3 * STEP);
    let recorded = shop.world.direct_recording.take().expect("it was set");
    // IPv4 without options: ports from byte 20 on, the sequence number from 24, flags at 33.
    let read: Vec<Vec<u8>> =
        recorded.into_iter().map(|(.., bytes)| bytes).filter(|bytes| bytes[33] & SYN_AND_ACK == 2).collect();
    let grants: Vec<_> = shop.world.host(shop.client).cache.grants.values().copied().collect();
    assert!(read.len() > 30 && grants.len() > 3, "{} SYNs by {} grants", read.len(), grants.len());
    let before = shop.set_up();
    for grant in &grants {
        let ports = |syn: &[u8]| [20, 22].map(|at| u16::from_be_bytes([syn[at], syn[at + 1]]));
        let is_its = |syn: &&Vec<u8>| {
            let [from, to] = ports(syn);
            from.checked_sub(grant.local_port).is_some_and(|flow| flow < grant.count) && to == grant.remote_port
        };
        let Some(syn) = read.iter().find(is_its) else { continue };
        // As it was, with another number, and for every flow of the grant, with the tag and without.
        shop.world.inject_direct(syn.clone());
        let mut numbered = syn.clone();
        numbered[24] ^= 1;
        shop.world.inject_direct(numbered);
        for flow in 0..grant.count {
            let mut forged = syn.clone();
            forged[20..22].copy_from_slice(&(grant.local_port + flow).to_be_bytes());
            let mut bare = forged[..40].to_vec();
            (bare[3], bare[32]) = (40, 5 << 4);
            [forged, bare]
                .into_iter()
                .filter(|packet| packet != syn)
                .for_each(|packet| shop.world.inject_direct(packet));
        }
    }
    shop.world.run_for(3 * STEP);
    assert_eq!(shop.set_up(), before);
    let unproved = |shop: &mut Shop, server: HostId| {
        shop.world.host(server).cache.kernel.as_ref().map_or(0, |kernel| kernel.unproved)
    };
    let servers = shop.servers;
    assert!(servers.into_iter().all(|server| unproved(&mut shop, server) > 50));
    // What was tried at spoils nothing for whom the flows were granted to.
    streams.extend(shop.connect_often(20, CHAT));
    shop.world.run_for(3 * STEP);
    let (taken, opened) = shop.set_up();
    assert_eq!((taken - before.0, taken), (20, opened[0] + opened[1]));
    shop.world.run_for(SECOND);
    shop.check(&streams);
}

#[test]
fn where_nobody_answers_what_grants_open_no_more_are_asked_for_until_a_minute_has_passed() {
    let mut shop = shop(25, slow(2), ANSWER);
    // Something on the way takes the option off: no SYN of a grant is taken.
    shop.world.network.losing = Some(Box::new(|passing| passing.is_direct && passing.bytes[33] & 0x12 == 2));
    let streams = shop.connect_often(1500, ASK);
    let taken = shop.set_up().0;
    let silent = shop.world.host(shop.client).sal.counters().grants_silent;
    assert!(silent >= 4, "{silent}: two of each instance");
    let later = shop.connect_often(300, ASK);
    assert_eq!(shop.set_up(), (taken, [0, 0]), "nobody waits for a second any more");
    shop.world.run_for(5 * SECOND);
    for stream in streams.iter().chain(&later) {
        assert_eq!(shop.world.hosts[shop.client.0].streams[*stream].received, 100);
    }
    assert!(taken < 1200, "{taken} waited");
    shop.world.network.losing = None;
    shop.world.run_for(60 * SECOND);
    shop.connect_often(300, ASK);
    assert!(shop.set_up().1.iter().all(|opened| *opened > 10), "{:?}", shop.set_up());
}

/// Whether an agent knows a connection of the client's, by the numbers that both ends have of it.
fn is_known(shop: &mut Shop, stream: usize) -> bool {
    let Some(flow) = shop.world.host(shop.client).flow_of(stream) else { return false };
    shop.servers.iter().any(|server| shop.world.hosts[server.0].sal.flows().any(|other| other.session == flow.session))
}

#[test]
fn what_goes_by_the_agents_they_hear_of_at_once() {
    for end in 0..2 {
        let mut shop = shop(23 + end, slow(2), CHAT);
        shop.connect_often(230, CHAT);
        let before = shop.set_up().0;
        let stream = shop.world.connect_stream(shop.client, NAME, CHAT);
        shop.world.run_for(10 * STEP);
        assert!(shop.set_up().0 == before + 1 && !is_known(&mut shop, stream));
        // All that has data is too large for the direct path, at one of the ends: the other one sees it first as DATA
        // of the peer's.
        let hosts = if end == 0 { vec![shop.client] } else { shop.servers.to_vec() };
        for host in hosts {
            shop.world.host(host).cache.kernel.as_mut().expect("a kernel").mtu = 100;
        }
        let now = shop.world.now;
        shop.world.host(shop.client).streams[stream].forget_waits(now);
        shop.world.run_for(120 * STEP);
        assert!(is_known(&mut shop, stream), "end {end}");
        let longest = shop.world.hosts[shop.client.0].streams[stream].longest_wait(shop.world.now);
        assert!(longest < 110 * STEP, "end {end}: nothing is sent again, for which it took {longest:?}");
        shop.world.run_for(SECOND);
        shop.check(&[stream]);
    }
}

/// The last connections have not been answered yet when a rule comes to demand encryption. Where the server's demands
/// it, its kernel opens nothing for their SYNs any more, which are sent again after a second.
#[test]
fn a_floor_holds_connections_that_only_the_kernels_know() {
    for end in 0..2 {
        let mut shop = shop(31 + end, slow(2), CHAT);
        for host in [shop.servers[0], shop.servers[1], shop.client] {
            shop.world.host(host).set_secure(&[Cipher::Aes256Gcm], false);
        }
        let streams = shop.connect_often(240, CHAT);
        let opened = if end == 0 { 240 } else { 235 };
        assert!(!is_known(&mut shop, streams[opened - 1]));
        let hosts = if end == 0 { vec![shop.client] } else { shop.servers.to_vec() };
        let now = shop.world.now;
        for host in hosts {
            shop.world.host(host).sal.set_stack_rules(now, vec![floor()]);
            shop.world.touch(host);
        }
        shop.world.run_for(100 * STEP);
        shop.are_encrypted(&streams[..opened]);
        shop.world.run_for(2 * SECOND);
        shop.are_encrypted(&streams);
        shop.check(&streams);
    }
}

#[test]
fn young_connections_outlive_the_direct_path() {
    for end in 0..2 {
        let mut shop = shop(25 + end, slow(2), CHAT);
        let streams = shop.connect_often(240, CHAT);
        shop.world.run_for(10 * STEP);
        let last = streams[239];
        assert!(!is_known(&mut shop, last));
        let hosts = if end == 0 { vec![shop.client] } else { shop.servers.to_vec() };
        hosts.into_iter().for_each(|host| shop.world.set_direct(host, false));
        shop.world.run_for(3 * SECOND);
        for stream in &streams {
            assert_eq!(
                shop.world.host(shop.client).flow_of(*stream).map(|flow| flow.carriage),
                Some(Carriage::Encapsulated)
            );
        }
        shop.check(&streams);
    }
}

#[test]
fn young_connections_end_with_their_host() {
    for end in 0..2 {
        let mut shop = shop(27 + end, slow(2), CHAT);
        let last = shop.connect_often(240, CHAT)[239];
        shop.world.run_for(10 * STEP);
        assert!(!is_known(&mut shop, last));
        let hosts = if end == 0 { vec![shop.client] } else { shop.servers.to_vec() };
        let now = shop.world.now;
        for host in hosts {
            shop.world.host(host).shut_down(now);
            shop.world.touch(host);
        }
        shop.world.run_for(50 * STEP);
        for host in [shop.client, shop.servers[0], shop.servers[1]] {
            assert!(shop.world.host(host).streams.iter().all(|stream| stream.was_reset), "end {end}");
        }
    }
}

#[test]
fn what_is_answered_late_is_told_of_before_its_grant_is_forgotten() {
    let mut shop = shop(16, slow(2), CHAT);
    shop.connect_often(220, CHAT);
    let (client, now) = (shop.client, shop.world.now);
    let grant = shop.world.host(client).cache.grants.values().max_by_key(|grant| grant.until).copied().expect("one");
    let (last, app) = (FlowId(grant.first_flow.0 + u32::from(grant.count) - 1), grant.app);
    // Its answer has been on its way for as long as it may: the kernel is asked for all that it knows, and answers in a
    // while.
    shop.world.run_for((grant.until + 5 * SECOND).since(now) + Duration::from_millis(100));
    let now = shop.world.now;
    let host = shop.world.host(client);
    assert!(host.cache.grants.contains_key(&grant.id));
    let source = SocketAddr::new(app.source.ip(), 50_000);
    host.sal.handle(now, Input::Opened { flow: last, app: &Tuple { source, ..app } });
    shop.world.touch(client);
    shop.world.run_for(Duration::from_millis(200));
    let host = shop.world.host(client);
    assert!(!host.cache.grants.contains_key(&grant.id) && host.events.contains(&Event::FlowOpened(last)));
    assert!(host.sal.flow(last).is_some());
}

#[test]
fn a_flow_opened_from_the_port_of_a_program_that_has_sent_its_fin_takes_the_place_of_the_old_one() {
    for has_fin in [false, true] {
        let mut shop = shop(29, slow(2), CHAT);
        let streams = shop.connect_often(220, CHAT);
        let client = shop.client;
        let now = shop.world.now;
        let host = shop.world.host(client);
        let old = streams.iter().find_map(|stream| host.flow_of(*stream)).expect("agents set some up");
        let grant = host.cache.grants.values().max_by_key(|grant| grant.until).copied().expect("one");
        let opened = FlowId(grant.first_flow.0 + u32::from(grant.count) - 1);
        if has_fin {
            host.sal.handle(now, Input::Transport { flow: old.flow, direction: Direction::Egress, flags: FIN });
        }
        host.sal.handle(now, Input::Opened { flow: opened, app: &old.app });
        assert_eq!((host.sal.flow(opened).is_some(), host.sal.flow(old.flow).is_none()), (has_fin, has_fin));
    }
}

#[test]
fn a_port_of_an_old_connection_at_the_listener_costs_another_try() {
    let mut shop = shop(14, slow(2), CHAT);
    let mut streams = shop.connect_often(220, CHAT);
    for server in shop.servers {
        shop.world.host(server).old_connections = 2;
    }
    let before = shop.set_up().0;
    streams.extend(shop.connect_often(10, CHAT));
    assert_eq!(shop.set_up().0, before + 10);
    shop.world.run_for(5 * SECOND);
    assert!(streams.iter().all(|stream| shop.world.host(shop.client).streams[*stream].received > 0));
    shop.check(&streams);
}

#[test]
fn a_granted_flow_falls_back_and_moves_as_any_other() {
    let mut shop = shop(6, slow(2), CHAT);
    let streams = shop.connect_often(240, CHAT);
    shop.world.network.wall_off_all();
    shop.world.run_for(5 * SECOND);
    for stream in &streams {
        let flow = shop.world.host(shop.client).flow_of(*stream).expect("alive");
        assert_eq!(flow.carriage, Carriage::Encapsulated);
    }
    shop.check(&streams);
    shop.world.network.take_walls_down();
    shop.world.run_for(20 * SECOND);
    shop.world.set_addresses(shop.client, vec!["10.7.0.9".parse().expect("literal")]);
    shop.world.run_for(5 * SECOND);
    for stream in &streams {
        let now = shop.world.now;
        let stream = &mut shop.world.host(shop.client).streams[*stream];
        stream.forget_waits(now);
    }
    shop.world.run_for(2 * SECOND);
    for stream in &streams {
        let longest = shop.world.hosts[shop.client.0].streams[*stream].longest_wait(shop.world.now);
        assert!(longest < SECOND, "waited {longest:?}");
    }
    shop.check(&streams);
}

/// Starts a host's agent again, with what it had kept when it last wrote that down; the kernel's cache is as it is now.
#[test]
fn without_a_kernel_cache_nothing_is_asked_or_given() {
    for off in [0, 1] {
        let mut shop = shop(7, slow(2), ANSWER);
        let hosts = if off == 0 { vec![shop.client] } else { shop.servers.to_vec() };
        hosts.into_iter().for_each(|host| shop.world.set_direct(host, false));
        let streams = shop.connect_often(250, ASK);
        shop.world.run_for(20 * SECOND);
        assert_eq!(shop.set_up(), (0, [0, 0]));
        shop.check(&streams);
    }
}

#[test]
fn in_bad_weather_every_connection_is_carried_to_its_end() {
    for seed in 0..8 {
        let weather = Weather { loss_per_mille: 50, duplicate_per_mille: 50, ..slow(3) };
        let mut shop = shop(100 + seed, weather, ANSWER);
        let streams = shop.connect_often(400, ASK);
        shop.world.run_for(60 * SECOND);
        assert!(shop.set_up().0 > 0, "seed {seed}: none was granted");
        for stream in &streams {
            let found = &shop.world.hosts[shop.client.0].streams[*stream];
            assert!(!found.was_wrong && !found.was_reset && found.received == 100, "seed {seed}: {}", found.received);
        }
        ends_agree(&shop.world).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        no_request_met(&shop.world).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        nothing_left_over(&shop.world).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        assert!(shop.world.host(shop.router).sal.flow_count() == 0, "seed {seed}");
    }
}
