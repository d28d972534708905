//! A small world: a router, a service, a client.

use margay_sim::{HostId, Outcome, Weather, World};

/// A router, two instances of web.shop that answer 1 and 2, one client host.
pub struct Shop {
    pub world: World,
    pub router: HostId,
    pub instances: [HostId; 2],
    pub client: HostId,
}

pub fn shop(seed: u64, weather: Weather) -> Shop {
    let mut world = World::new(seed, weather);
    let router = world.add_host(true);
    let instances = [world.add_host(false), world.add_host(false)];
    let client = world.add_host(false);
    for host in [instances[0], instances[1], client] {
        world.register(router, host);
    }
    for (number, instance) in [1, 2].into_iter().zip(instances) {
        world.publish(router, instance, "web.shop", number);
    }
    Shop { world, router, instances, client }
}

#[allow(dead_code, reason = "not every story has clients that ask and end")]
pub fn outcome(world: &mut World, host: HostId, client: usize) -> Outcome {
    world.host(host).clients[client].outcome
}
