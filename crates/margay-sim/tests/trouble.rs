//! What moving hosts may meet that should not be (docs/book/mobility.md): old addresses that are still asked at, paths
//! that carry probes and no data, clocks that jump, keys that change, one key in two places.

mod site;

use std::net::SocketAddr;
use std::time::Duration;

use margay_core::handover::HandoverRecord;
use margay_core::twin::Twin;
use margay_core::{Cause, Event, Lifecycle, Pair, Ranges, Towards, Trouble};
use margay_sim::host::Start;
use margay_sim::stream::Plan;
use margay_sim::{HostId, Weather, World};
use margay_wire::{Kind, PORT, kind_of};

use site::{CHAT, RTT, SECOND, Site, address, site, steady};

/// Gives the server a second address that nobody hears of.
fn add_in_secret(site: &mut Site, n: u8) {
    let old = site.world.host(site.server).address;
    site.world.network.losing = Some(Box::new(|_| true));
    site.world.set_addresses(site.server, vec![old, address(n)]);
    site.world.run_for(RTT);
    site.world.network.losing = None;
}

/// Whether the server has moved to a pair, wherever it is now.
fn server_was_at(site: &mut Site, there: Pair) -> bool {
    let is_there = |event: &Event| matches!(event, Event::Moved { pair, .. } if *pair == there);
    site.world.host(site.server).events.iter().any(is_there)
}

#[test]
fn a_host_that_is_found_where_it_leaves_says_where_it_is() {
    // Whoever has the smaller host-ID wins where both count the same.
    for seed in 0..40 {
        let mut site = site(400 + seed, steady(), seed % 2 == 0, (CHAT, CHAT));
        let old = site.world.host(site.server).address;
        add_in_secret(&mut site, 91);
        let router = site.world.host(site.router).address;
        for end in [old, address(91), address(92)] {
            site.world.network.cut(router, end);
        }
        let forwarded = site.world.host(site.router).sal.counters().forwarded;
        let (now, peer) = (site.world.now, site.world.host(site.client).sal.host());
        site.world.host(site.server).sal.migrate_host(now, peer, Towards::Local(address(91))).expect("it has that");
        site.world.touch(site.server);
        if seed >= 10 {
            site.world.network.weather = Weather { loss_per_mille: 200, duplicate_per_mille: 200, ..Weather::FOUL };
        }
        site.world.set_addresses(site.client, vec![address(92)]);
        site.world.run_for(10 * SECOND);
        site.world.network.weather = steady();
        assert!(site.is_alive(), "seed {seed}");
        let there = Pair { local: Some(address(91)), remote: SocketAddr::new(address(92), PORT) };
        assert!(server_was_at(&mut site, there), "seed {seed}: where it was told to go");
        if seed < 10 {
            // Later losses may have taken them elsewhere again.
            let (own, peers) = (site.servers_flow(), site.flow());
            assert_eq!((own.local, own.remote), (there.local, Some(there.remote)), "seed {seed}");
            assert_eq!(peers.remote, Some(SocketAddr::new(address(91), PORT)), "seed {seed}: the client knows it");
        }
        assert_eq!(site.world.host(site.router).sal.counters().forwarded, forwarded, "seed {seed}: alone");
    }
}

/// No router helps: the client finds the server at the address that the server leaves by order. With the seeds after
/// the first ten, six rounds of RSYN, or the confirmations of five RSYN-DONEs, are lost in a row.
#[test]
fn an_order_to_move_is_kept_though_the_peer_moves_meanwhile_in_foul_weather() {
    for seed in (0..10).chain([305, 786, 955, 1677, 2049, 2113, 2360, 2423, 2833, 4120, 4987, 8027]) {
        let mut site = site(2000 + seed, steady(), seed % 2 == 0, (CHAT, CHAT));
        let (old, wanted) = (site.world.host(site.server).address, address(51));
        site.world.set_addresses(site.server, vec![old, wanted]);
        site.world.run_for(SECOND);
        site.world.kill_agent(site.router);
        site.world.network.weather = Weather { loss_per_mille: 1000, ..steady() };
        let (now, client) = (site.world.now, site.world.host(site.client).sal.host());
        site.world.host(site.server).sal.migrate_host(now, client, Towards::Local(wanted)).expect("it has that");
        site.world.touch(site.server);
        site.world.run_for(Duration::from_millis(seed % 40 * 10));
        site.world.set_addresses(site.client, vec![address(50)]);
        site.world.run_for(Duration::from_millis(seed % 70 * 10));
        site.world.network.weather = Weather { loss_per_mille: 200, duplicate_per_mille: 200, ..Weather::FOUL };
        site.world.run_for(20 * SECOND);
        // Later losses may have taken them elsewhere again.
        let there = Pair { local: Some(wanted), remote: SocketAddr::new(address(50), PORT) };
        assert!(server_was_at(&mut site, there), "seed {seed}: where it was told to go");
    }
}

/// The order comes when the silence of the path has been noticed, and the server already seeks the client.
#[test]
fn an_order_to_move_is_kept_by_a_host_that_seeks_its_peer() {
    for seed in 0..40 {
        let mut site = site(2100 + seed, steady(), seed % 2 == 0, (CHAT, CHAT));
        let (old, wanted) = (site.world.host(site.server).address, address(51));
        site.world.set_addresses(site.server, vec![old, wanted]);
        site.world.run_for(SECOND);
        site.world.kill_agent(site.router);
        site.world.network.weather = Weather { loss_per_mille: 1000, ..steady() };
        site.world.run_for(Duration::from_millis(500 + seed * 50));
        let (now, client) = (site.world.now, site.world.host(site.client).sal.host());
        site.world.host(site.server).sal.migrate_host(now, client, Towards::Local(wanted)).expect("it has that");
        site.world.touch(site.server);
        site.world.set_addresses(site.client, vec![address(50)]);
        site.world.network.weather = steady();
        site.world.run_for(20 * SECOND);
        let there = Pair { local: Some(wanted), remote: SocketAddr::new(address(50), PORT) };
        assert!(server_was_at(&mut site, there), "seed {seed}: where it was told to go");
    }
}

/// Starts the agent of a host again, with what it had kept at some time before.
fn start_again(world: &mut World, host: HostId, start: Start, kept: &[u8], records: &[HandoverRecord]) {
    let now = world.now;
    let old = world.host(host);
    let (streams, address) = (std::mem::take(&mut old.streams), old.address);
    world.start_host(host, address, start);
    let new = world.host(host);
    new.streams = streams;
    new.sal.take_up_associations(now, kept).expect("kept whole");
    records.iter().for_each(|record| new.sal.adopt_flow(now, record).expect("adopted"));
    new.sal.forget_superseded();
    world.touch(host);
}

fn records_of(site: &mut Site) -> Vec<HandoverRecord> {
    let now = site.world.now;
    let client = site.client;
    let sal = &site.world.host(client).sal;
    let flows: Vec<_> = sal.flows().map(|flow| flow.flow).collect();
    flows.iter().filter_map(|flow| sal.export_flow(now, *flow)).collect()
}

#[test]
fn a_peer_that_missed_a_move_is_told_where_it_asks() {
    let mut site = site(201, steady(), false, (CHAT, Plan::LISTEN));
    let server = site.world.host(site.server).address;
    site.world.set_addresses(site.server, vec![server, address(93)]);
    let (kept, records) = (site.world.host(site.client).sal.keep_associations(), records_of(&mut site));
    let (now, peer) = (site.world.now, site.world.host(site.client).sal.host());
    site.world.host(site.server).sal.migrate_host(now, peer, Towards::Local(address(93))).expect("it has that");
    site.world.touch(site.server);
    site.world.run_for(3 * SECOND);
    assert_eq!(site.flow().remote, Some(SocketAddr::new(address(93), PORT)));
    // Its next start knows only what was before.
    let key_seed = site.world.host(site.client).key_seed();
    start_again(
        &mut site.world,
        site.client,
        Start { key_seed, epoch: 2, boot: 1, router: false, ranges: Ranges::USUAL },
        &kept,
        &records,
    );
    assert_eq!(site.flow().remote, Some(SocketAddr::new(server, PORT)));
    site.world.run_for(5 * SECOND);
    let before = site.acknowledged().0;
    site.world.run_for(SECOND);
    assert!(site.acknowledged().0 > before, "{:?} {:?}", site.flow(), site.servers_flow());
    assert_eq!(site.flow().remote, Some(SocketAddr::new(address(93), PORT)));
    assert_eq!(site.flow().moved.map(|moved| moved.cause), Some(Cause::Peer));
}

#[test]
fn a_path_that_carries_probes_and_no_data_is_left_for_one_that_does() {
    for seed in 300..330 {
        let (direct, lossy) = (seed % 2 == 0, seed >= 302);
        let mut site = site(seed, steady(), direct, (CHAT, CHAT));
        let (client, server) = (site.world.host(site.client).address, site.world.host(site.server).address);
        site.world.set_addresses(site.client, vec![client, address(94)]);
        site.world.set_addresses(site.server, vec![server, address(95)]);
        site.world.run_for(SECOND);
        let (ends, mut dice) = ([client, server], seed);
        site.world.network.losing = Some(Box::new(move |packet| {
            let is_there = ends.contains(&packet.from.ip()) && ends.contains(&packet.to.ip());
            let is_message = !packet.is_direct && kind_of(packet.bytes) != Ok(Kind::Data);
            // Messages are lost, too, now and then; on the better path as well.
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            if is_message { lossy && (dice >> 33).is_multiple_of(5) } else { is_there }
        }));
        site.world.run_for(15 * SECOND);
        assert!(site.is_alive(), "seed {seed}: {:?} {:?}", site.flow(), site.servers_flow());
        let causes = [site.flow(), site.servers_flow()].map(|flow| flow.moved.map(|moved| moved.cause));
        assert!(lossy || causes.contains(&Some(Cause::Unanswered)), "seed {seed}: {causes:?}");
        assert!(site.flow().moves <= 4, "seed {seed}: it does not wander: {:?}", site.flow());
    }
}

#[test]
fn where_no_path_carries_data_it_is_said_and_it_goes_on_when_one_does() {
    let mut site = site(204, steady(), false, (CHAT, CHAT));
    let server = site.world.host(site.server).address;
    site.world.set_addresses(site.server, vec![server, address(96)]);
    site.world.run_for(SECOND);
    site.world.network.losing = Some(Box::new(|packet| packet.is_direct || kind_of(packet.bytes) == Ok(Kind::Data)));
    site.world.run_for(60 * SECOND);
    let is_said = |event: &Event| matches!(event, Event::Unanswered(_));
    for host in [site.client, site.server] {
        assert!(site.world.host(host).events.iter().any(is_said));
        assert!(site.world.host(host).sal.paths().iter().any(|path| path.trouble == Some(Trouble::Unanswered)));
    }
    let unanswered = Some(Trouble::Unanswered);
    assert_eq!((site.flow().trouble, site.servers_flow().trouble), (unanswered, unanswered));
    let moves = site.flow().moves;
    assert!(moves <= 16, "each pair is tried now and then: {moves}");
    site.world.network.losing = None;
    site.world.run_for(60 * SECOND);
    assert!(site.is_alive());
    assert_eq!((site.flow().trouble, site.servers_flow().trouble), (None, None));
}

#[test]
fn a_wall_clock_that_jumps_is_nothing_to_flows() {
    for direct in [false, true] {
        let mut site = site(205, steady(), direct, (CHAT, CHAT));
        let now = site.world.now;
        let before = [site.client, site.server].map(|host| site.world.host(host).events.len());
        site.world.host(site.client).streams[0].forget_waits(now);
        for unix_s in [1_800_000_000 + 36_000, 1_800_000_000 - 36_000, 0, 1_800_000_000] {
            for host in [site.client, site.server, site.router] {
                let now = site.world.now;
                site.world.host(host).sal.set_wall_clock(now, unix_s);
                site.world.run_for(SECOND);
            }
            site.assert_well(205);
        }
        let now = site.world.now;
        assert!(site.world.host(site.client).streams[0].longest_wait(now) <= RTT * 2);
        assert_eq!(before, [site.client, site.server].map(|host| site.world.host(host).events.len()));
    }
}

#[test]
fn a_host_that_comes_back_with_another_key_is_another_host() {
    for direct in [false, true] {
        let mut site = site(206, steady(), direct, (CHAT, CHAT));
        let (address, former) = (site.world.host(site.server).address, site.world.host(site.server).sal.host());
        site.world.start_host(
            site.server,
            address,
            Start { key_seed: [77; 32], epoch: 1, boot: 9, router: false, ranges: Ranges::USUAL },
        );
        site.world.set_direct(site.server, direct);
        let host = site.world.host(site.server).sal.host();
        site.world.run_for(20 * SECOND);
        let flow = site.flow();
        assert_eq!((flow.peer, flow.lifecycle), (Some(former), Lifecycle::Established), "nobody else gets it");
        assert_eq!(flow.trouble, Some(Trouble::OtherHost));
        assert!(site.world.host(site.client).events.contains(&Event::OtherHost { former, host }));
        assert_eq!(site.world.host(site.server).sal.flow_count(), 0);
        // The new host is met as any other.
        site.world.register(site.router, site.server);
        site.world.publish_streams(site.router, site.server, "new.shop", CHAT);
        let stream = site.world.connect_stream(site.client, "new.shop", CHAT);
        site.world.run_for(3 * SECOND);
        let new = site.world.host(site.client).flow_of(stream).expect("a flow with the new host");
        assert_eq!((new.peer, new.lifecycle), (Some(host), Lifecycle::Established));
    }
}

#[test]
fn one_key_in_two_places_is_in_one_of_them_at_a_time() {
    let mut site = site(207, steady(), false, (CHAT, CHAT));
    let key_seed = site.world.host(site.client).key_seed();
    let (kept, records) = (site.world.host(site.client).sal.keep_associations(), records_of(&mut site));
    let twin = site.world.add_host(false);
    let [here, there] = [site.client, twin].map(|host| site.world.hosts[host.0].address);
    // A copy of the machine, with all that it had, number and all.
    start_again(
        &mut site.world,
        twin,
        Start { key_seed, epoch: 1, boot: 1, router: false, ranges: Ranges::USUAL },
        &kept,
        &records,
    );
    site.world.set_addresses(twin, vec![there]);
    site.world.run_for(SECOND);
    assert_eq!(site.servers_flow().remote, Some(SocketAddr::new(there, PORT)), "the later word");
    // Where the program is, data goes unanswered: it says that it is there.
    site.world.run_for(10 * SECOND);
    assert_eq!(site.servers_flow().remote, Some(SocketAddr::new(here, PORT)));
    assert!(site.is_alive());
    let moves = site.servers_flow().moves;
    assert!(moves <= 9, "they do not outbid each other: {moves}");
    let was_reset = |host: HostId| site.world.hosts[host.0].streams[0].was_reset;
    assert!(!was_reset(site.client) && !was_reset(site.server));
}

/// A copy of the client's machine that connects to its server.
fn copy_of_client(site: &mut Site, start: Start) -> HostId {
    let twin = site.world.add_host(false);
    let address = site.world.host(twin).address;
    site.world.start_host(twin, address, start);
    connect_to_server(site, twin);
    twin
}

/// Connects to the server, and nobody is asked where it is.
fn connect_to_server(site: &mut Site, host: HostId) -> usize {
    let (server, to) = (site.world.host(site.server).address, margay_sim::world::service("talk.shop"));
    site.world.host(host).forward(to.into(), server, None);
    site.world.connect_stream(host, "talk.shop", CHAT)
}

/// Whether the program at the other end has answered: an end that nobody has proved to may think that it is connected.
fn is_connected(site: &mut Site, host: HostId, stream: usize) -> bool {
    site.world.host(host).streams[stream].received > 0
}

#[test]
fn of_two_hosts_with_one_key_the_elder_stays_and_all_three_are_told() {
    // Whichever of them has been started more often.
    for (seed, epoch) in [(208, 1), (209, 7)] {
        let mut site = site(seed, steady(), false, (CHAT, CHAT));
        let key_seed = site.world.host(site.client).key_seed();
        let twin = copy_of_client(&mut site, Start { key_seed, epoch, boot: 2, router: false, ranges: Ranges::USUAL });
        site.world.run_for(30 * SECOND);
        assert!(!is_connected(&mut site, twin, 0), "epoch {epoch}");
        let places = [site.client, twin].map(|host| SocketAddr::new(site.world.host(host).address, PORT));
        let peer = site.world.host(site.server).sal.host();
        let host = site.world.host(site.client).sal.host();
        let (server, client) = (site.server, site.client);
        let said = |site: &mut Site, at: HostId, what: Twin| site.world.host(at).events.contains(&Event::Twin(what));
        let (at_server, at_client, at_twin) = (
            Twin::KeptOut { host, elder: places[0], newcomer: places[1] },
            Twin::Elsewhere { peer, newcomer: places[1] },
            Twin::Refused { peer },
        );
        assert!(said(&mut site, server, at_server), "the peer");
        assert!(said(&mut site, client, at_client), "the elder");
        assert!(said(&mut site, twin, at_twin), "the later one");
        site.assert_well(seed);
        assert_eq!(site.flow().moves, 0);
        // The elder has not been cut off from anything: it connects anew.
        let again = site.client;
        let stream = connect_to_server(&mut site, again);
        site.world.run_for(SECOND);
        assert!(is_connected(&mut site, again, stream));
    }
}

/// The machine is the same, and its disk is an older copy: the epoch goes back, and nothing else is to be seen of it.
#[test]
fn a_host_that_was_restored_from_an_older_copy_is_met_anew_within_seconds() {
    for (seed, has_moved) in [(210, false), (211, true)] {
        let mut site = site(seed, steady(), false, (CHAT, CHAT));
        let (client, key_seed) = (site.client, site.world.host(site.client).key_seed());
        let mut address = site.world.host(client).address;
        let restart = |site: &mut Site, epoch: u32, boot: u8, address| {
            site.world.start_host(
                client,
                address,
                Start { key_seed, epoch, boot, router: false, ranges: Ranges::USUAL },
            );
            let stream = connect_to_server(site, client);
            site.world.run_for(2 * SECOND);
            is_connected(site, client, stream)
        };
        assert!(restart(&mut site, 20, 2, address), "as it was");
        if has_moved {
            address = [10, 0, 7, 7].into();
        }
        assert!(restart(&mut site, 3, 3, address), "restored, moved: {has_moved}");
        let kept_out = |event: &Event| matches!(event, Event::Twin(_));
        assert!(!site.world.host(site.server).events.iter().any(kept_out));
    }
}
