//! Listeners whose queue is full: a connect waits, as it would without Margay (decision 0048).

use std::time::Duration;

use margay_sim::{HostId, Outcome, Weather, World};

const NUMBER: u32 = 7;

fn world(seed: u64) -> (World, HostId, HostId) {
    let mut world = World::new(seed, Weather::FAIR);
    let router = world.add_host(true);
    let (server, client) = (world.add_host(false), world.add_host(false));
    for host in [server, client] {
        world.register(router, host);
    }
    world.publish(router, server, "web.shop", NUMBER);
    (world, server, client)
}

fn set_full(world: &mut World, server: HostId, is_full: bool) {
    world.host(server).servers.iter_mut().for_each(|server| server.is_full = is_full);
}

#[test]
fn a_connect_into_a_full_queue_waits_until_there_is_room() {
    // Hosts that have never met, and hosts that have.
    for have_met in [false, true] {
        for wait_s in [3, 8, 16] {
            let (mut world, server, client) = world(wait_s);
            if have_met {
                let first = world.connect(client, "web.shop");
                world.run_for(Duration::from_secs(1));
                assert_eq!(world.host(client).clients[first].outcome, Outcome::Answered(NUMBER));
            }
            set_full(&mut world, server, true);
            let waiting = world.connect(client, "web.shop");
            world.run_for(Duration::from_secs(wait_s));
            assert_eq!(world.host(client).clients[waiting].outcome, Outcome::Pending, "{have_met} {wait_s}");
            set_full(&mut world, server, false);
            world.run_for(Duration::from_secs(3));
            assert_eq!(world.host(client).clients[waiting].outcome, Outcome::Answered(NUMBER), "{have_met} {wait_s}");
        }
    }
}

#[test]
fn an_agent_that_says_nothing_is_no_full_queue() {
    let (mut world, server, client) = world(1);
    world.kill_agent(server);
    let refused = world.connect(client, "web.shop");
    world.run_for(Duration::from_secs(8));
    assert_eq!(world.host(client).clients[refused].outcome, Outcome::Refused);
}
