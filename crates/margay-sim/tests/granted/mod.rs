//! Two servers and a client whose kernels set connections up by themselves.

#![allow(dead_code, reason = "not every story needs all of it")]

use std::time::Duration;

use margay_core::Stack;
use margay_core::stack_rule::{Constant, Expression, StackRule};
use margay_sim::check::{ends_agree, no_request_met, paths_agree};
use margay_sim::stream::Plan;
use margay_sim::world::service;
use margay_sim::{HostId, Weather, World};

pub const SECOND: Duration = Duration::from_secs(1);
pub const STEP: Duration = Duration::from_millis(1);
pub const NAME: &str = "talk.shop";
/// In the flags of a TCP header.
pub const FIN: u8 = 1;
/// Asks once and closes when it is answered, which takes a moment.
pub const ASK: Plan = Plan { write: 100, every: Duration::from_millis(1), writes: 1, closes: true };
pub const ANSWER: Plan = Plan { write: 100, every: Duration::from_millis(1), writes: 1, closes: false };
/// Says a little, often, for ever.
pub const CHAT: Plan = Plan { write: 300, every: Duration::from_millis(100), writes: u32::MAX, closes: false };

/// A router, two servers and a client host, all but the router with a kernel cache.
pub struct Shop {
    pub world: World,
    pub router: HostId,
    pub servers: [HostId; 2],
    pub client: HostId,
}

pub fn shop(seed: u64, weather: Weather, server_plan: Plan) -> Shop {
    let mut world = World::new(seed, weather);
    let router = world.add_host(true);
    let servers = [world.add_host(false), world.add_host(false)];
    let client = world.add_host(false);
    for host in [servers[0], servers[1], client] {
        world.register(router, host);
        world.set_direct(host, true);
    }
    for server in servers {
        world.publish_streams(router, server, NAME, server_plan);
    }
    Shop { world, router, servers, client }
}

pub fn slow(millis: u64) -> Weather {
    let delay = Duration::from_millis(millis);
    Weather { delay_min: delay, delay_max: delay, ..Weather::FAIR }
}

/// Demands encryption of everything.
pub fn floor() -> StackRule {
    StackRule {
        number: 1,
        names: vec![service(NAME).into()],
        text: String::new(),
        when: Expression::Constant(Constant::Bool(true)),
        uses: Stack::Secure,
        hold: Duration::ZERO,
        release: SECOND,
        priority: 0,
        is_floor: true,
    }
}

impl Shop {
    /// Opens a connection every millisecond.
    pub fn connect_often(&mut self, count: usize, plan: Plan) -> Vec<usize> {
        let connect = |_| {
            let stream = self.world.connect_stream(self.client, NAME, plan);
            self.world.run_for(STEP);
            stream
        };
        (0..count).map(connect).collect()
    }

    /// Flows that the client's kernel took by grants, and that each server's opened.
    pub fn set_up(&mut self) -> (u64, [u64; 2]) {
        let client = self.world.host(self.client).cache.kernel.as_ref().map_or(0, |kernel| kernel.set_up.0);
        let opened = self
            .servers
            .map(|server| self.world.host(server).cache.kernel.as_ref().map_or(0, |kernel| kernel.set_up.1));
        (client, opened)
    }

    pub fn grants(&mut self) -> usize {
        self.world.host(self.client).sal.grant_count()
    }

    pub fn are_encrypted(&mut self, streams: &[usize]) {
        for stream in streams {
            let stack = self.world.host(self.client).flow_of(*stream).map(|flow| flow.stack.stack);
            assert_eq!(stack, Some(Stack::Secure), "stream {stream}");
        }
    }

    pub fn check(&mut self, streams: &[usize]) {
        for stream in streams {
            let stream = &self.world.hosts[self.client.0].streams[*stream];
            assert!(!stream.was_wrong && !stream.was_reset, "wrong or reset");
        }
        ends_agree(&self.world).expect("both ends agree");
        paths_agree(&self.world).expect("paths agree");
        no_request_met(&self.world).expect("first packets come from the agent");
    }
}
