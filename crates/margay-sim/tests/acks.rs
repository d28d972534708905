//! The ACK that completes a set-up, where the addresses between which two hosts know each other carry nothing.

mod site;

use margay_core::Lifecycle;
use margay_sim::World;
use margay_sim::stream::State;

use site::{CHAT, SECOND, Site, address, steady};

/// A router, a client, and a server of which the first address can be reached by the router alone.
fn half_reachable(seed: u64, direct: bool) -> (World, [margay_sim::HostId; 3]) {
    let mut world = World::new(seed, steady());
    let router = world.add_host(true);
    let (server, client) = (world.add_host(false), world.add_host(false));
    let first = world.host(server).address;
    world.set_addresses(server, vec![first, address(2)]);
    for host in [server, client] {
        world.register(router, host);
        world.set_direct(host, direct);
    }
    world.publish_streams(router, server, "talk.shop", CHAT);
    (world, [router, server, client])
}

fn connects(mut world: World, [router, server, client]: [margay_sim::HostId; 3], seed: u64) {
    let answers = world.host(server).streams.len();
    let stream = world.connect_stream(client, "talk.shop", CHAT);
    world.run_for(12 * SECOND);
    let state = &world.hosts[client.0].streams[stream];
    assert!(state.state == State::Open && !state.was_reset, "seed {seed}: {:?}", state.state);
    let mut site = Site { world, router, server, client, stream, answer: answers };
    assert!(site.is_alive(), "seed {seed}");
    assert_eq!(site.flow().lifecycle, Lifecycle::Established);
    assert_eq!(site.flow().remote.map(|remote| remote.ip()), Some(address(2)), "seed {seed}");
}

#[test]
fn hosts_that_meet_where_one_address_is_dead_find_the_other() {
    for seed in 0..10 {
        let (mut world, hosts) = half_reachable(600 + seed, seed % 2 == 0);
        let [_, server, client] = hosts.map(|host| world.host(host).address);
        world.network.cut(server, client);
        connects(world, hosts, seed);
    }
}
