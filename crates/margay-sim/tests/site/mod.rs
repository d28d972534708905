//! A router, a server and a client with one long connection, for tests of moves.

#![allow(dead_code, reason = "not every test uses all of it")]

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use margay_core::{FlowInfo, Lifecycle};
use margay_sim::check::{ends_agree, no_request_met, paths_agree};
use margay_sim::stream::Plan;
use margay_sim::{HostId, Weather, World};
use margay_wire::{Kind, PORT};

pub const SECOND: Duration = Duration::from_secs(1);
pub const RTT: Duration = Duration::from_millis(40);
/// A little, often, for ever.
pub const CHAT: Plan = Plan { write: 300, every: Duration::from_millis(10), writes: u32::MAX, closes: false };

/// A router, a server and a client host.
pub struct Site {
    pub world: World,
    pub router: HostId,
    pub server: HostId,
    pub client: HostId,
    pub stream: usize,
    /// Its other end.
    pub answer: usize,
}

pub fn steady() -> Weather {
    Weather { delay_min: RTT / 2, delay_max: RTT / 2, ..Weather::FAIR }
}

pub fn address(n: u8) -> IpAddr {
    [10, 7, 0, n].into()
}

pub fn v6(n: u16) -> IpAddr {
    [0xfd07, 0, 0, 0, 0, 0, 0, n].into()
}

pub fn site(seed: u64, weather: Weather, direct: bool, plans: (Plan, Plan)) -> Site {
    let mut world = World::new(seed, weather);
    let router = world.add_host(true);
    let (server, client) = (world.add_host(false), world.add_host(false));
    for host in [server, client] {
        world.register(router, host);
        world.set_direct(host, direct);
    }
    world.publish_streams(router, server, "talk.shop", plans.1);
    let stream = world.connect_stream(client, "talk.shop", plans.0);
    let mut site = Site { world, router, server, client, stream, answer: 0 };
    site.world.run_for(5 * SECOND);
    assert_eq!(site.flow().lifecycle, Lifecycle::Established, "seed {seed}");
    site
}

impl Site {
    pub fn flow(&mut self) -> FlowInfo {
        self.world.host(self.client).flow_of(self.stream).expect("the client's flow")
    }

    pub fn servers_flow(&mut self) -> FlowInfo {
        let session = self.flow().session;
        self.world.host(self.server).sal.flows().find(|flow| flow.session == session).expect("the server's flow")
    }

    pub fn acknowledged(&mut self) -> (u64, u64) {
        let (at, answer) = (self.stream, self.answer);
        let own = self.world.host(self.client).streams[at].acknowledged();
        (own, self.world.host(self.server).streams[answer].acknowledged())
    }

    /// Whether bytes pass in both directions now.
    pub fn is_alive(&mut self) -> bool {
        let before = self.acknowledged();
        self.world.run_for(2 * SECOND);
        let after = self.acknowledged();
        after.0 > before.0 && after.1 > before.1
    }

    pub fn assert_well(&mut self, seed: u64) {
        assert!(self.is_alive(), "seed {seed}: client {:?}, server {:?}", self.flow(), self.servers_flow());
        let (own, peer) = (self.flow(), self.servers_flow());
        let at = |host: HostId, world: &mut World| world.host(host).address;
        let (client, server) = (at(self.client, &mut self.world), at(self.server, &mut self.world));
        assert_eq!(
            own.remote,
            Some(SocketAddr::new(server, PORT)),
            "seed {seed}: the client knows where the server is"
        );
        assert_eq!(
            peer.remote,
            Some(SocketAddr::new(client, PORT)),
            "seed {seed}: the server knows where the client is"
        );
        ends_agree(&self.world).expect("both ends say the same");
        paths_agree(&self.world).expect("paths are those of associations");
        no_request_met(&self.world).expect("first packets come from the agent");
    }

    pub fn sent(&mut self, host: HostId) -> [u64; 3] {
        [Kind::Rsyn, Kind::RsynAck, Kind::RsynDone].map(|kind| self.world.host(host).sal.counters().messages_sent(kind))
    }
}
