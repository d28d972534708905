//! Hosts that wander, from seeds: they change addresses and families, lose them, have two, at any time and at once, in
//! any weather; paths die; agents start again; an attacker sends on what it saw. When it is quiet again both ends of
//! every flow agree on where they are, no flow is lost, and bytes pass.

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use margay_core::{Moving, Passage};
use margay_sim::check::{ends_agree, paths_agree};
use margay_sim::stream::Plan;
use margay_sim::{HostId, Weather, World};
use margay_wire::PORT;

const SECOND: Duration = Duration::from_secs(1);
const CHAT: Plan = Plan { write: 200, every: Duration::from_millis(50), writes: u32::MAX, closes: false };

struct Wanderers {
    world: World,
    router: HostId,
    hosts: Vec<HostId>,
    next_address: u8,
}

impl Wanderers {
    fn new(seed: u64) -> Self {
        let mut world = World::new(seed, Weather::FAIR);
        let router = world.add_host(true);
        let hosts: Vec<HostId> = (0..3).map(|_| world.add_host(false)).collect();
        for host in &hosts {
            world.register(router, *host);
            let is_direct = !world.random().is_multiple_of(3);
            world.set_direct(*host, is_direct);
        }
        for (host, name) in hosts.iter().zip(["a.shop", "b.shop", "c.shop"]) {
            world.publish_streams(router, *host, name, CHAT);
        }
        for (host, name) in hosts.iter().zip(["b.shop", "c.shop", "a.shop"]) {
            world.connect_stream(*host, name, CHAT);
        }
        let mut wanderers = Self { world, router, hosts, next_address: 0 };
        wanderers.world.run_for(3 * SECOND);
        wanderers.world.recording = Some(Vec::new());
        wanderers
    }

    fn pick(&mut self, below: u32) -> u32 {
        self.world.random() % below
    }

    fn fresh(&mut self) -> IpAddr {
        self.next_address = self.next_address.wrapping_add(1);
        [10, 9, self.next_address % 3, self.next_address].into()
    }

    fn step(&mut self) {
        let at = self.pick(3) as usize;
        let host = self.hosts[at];
        match self.pick(10) {
            0..=3 => {
                let address = self.fresh();
                self.world.set_addresses(host, vec![address]);
            }
            4 => self.world.set_addresses(host, Vec::new()),
            5 => {
                let kept = self.world.host(host).address;
                let other = self.fresh();
                self.world.set_addresses(host, vec![kept, other]);
            }
            6 => {
                let others: Vec<IpAddr> = self.hosts.iter().map(|host| self.world.hosts[host.0].address).collect();
                self.world.network.cut(others[at], others[(at + 1) % 3]);
            }
            7 => self.world.network.heal(),
            8 => {
                for host in self.hosts.clone() {
                    let address = self.fresh();
                    self.world.set_addresses(host, vec![address]);
                }
            }
            _ => self.replay(),
        }
    }

    fn replay(&mut self) {
        let seen = self.world.recording.clone().unwrap_or_default();
        for _ in 0..20.min(seen.len()) {
            let (from, to, bytes) = seen[self.pick(seen.len() as u32) as usize].clone();
            let elsewhere = SocketAddr::new([203, 0, 113, 9].into(), PORT);
            let from = if self.pick(2) == 0 { from } else { elsewhere };
            self.world.inject(from, to, bytes);
        }
    }

    fn settle(&mut self) -> Result<(), String> {
        self.world.network.heal();
        for host in self.hosts.clone() {
            let address = self.fresh();
            if self.world.host(host).addresses.is_empty() {
                self.world.set_addresses(host, vec![address]);
            }
        }
        self.world.run_for(30 * SECOND);
        self.world.network.weather = Weather::FAIR;
        self.world.run_for(20 * SECOND);
        let before = self.acknowledged();
        self.world.run_for(5 * SECOND);
        let after = self.acknowledged();
        for (stream, (before, after)) in before.iter().zip(&after).enumerate() {
            if after <= before {
                return Err(format!("stream {stream} stands still at {before} bytes\n{}", self.situation()));
            }
        }
        self.agree()
    }

    fn acknowledged(&self) -> Vec<u64> {
        let streams = self.hosts.iter().flat_map(|host| &self.world.hosts[host.0].streams);
        streams.map(margay_sim::stream::Stream::acknowledged).collect()
    }

    /// For whoever looks for the cause.
    fn situation(&self) -> String {
        let mut text = String::new();
        for (at, host) in self.world.hosts.iter().enumerate() {
            writeln!(text, "host {at} {} at {:?}", host.sal.host(), host.addresses).expect("a String takes all");
            for known in host.sal.paths() {
                let pair = (known.local, known.remote, known.moving, known.passage, known.flows, known.is_suspected);
                writeln!(text, "  {} {pair:?} {:?}", known.host, known.moved).expect("a String takes all");
            }
            for flow in host.sal.flows() {
                writeln!(text, "  flow {:?} {:?} {:?} {:?}", flow.app, flow.lifecycle, flow.carriage, flow.peer)
                    .expect("a String takes all");
            }
        }
        text
    }

    /// Each knows where the other is, whoever asks.
    fn agree(&mut self) -> Result<(), String> {
        ends_agree(&self.world)?;
        paths_agree(&self.world)?;
        let was_reset = |host: &HostId| self.world.hosts[host.0].streams.iter().any(|stream| stream.was_reset);
        if let Some(host) = self.hosts.iter().find(|host| was_reset(host)) {
            return Err(format!("a connection of {host:?} was reset"));
        }
        for host in self.hosts.iter().chain([&self.router]) {
            for known in self.world.hosts[host.0].sal.paths() {
                let is_at = |other: &&margay_sim::Host| other.addresses.contains(&known.remote.ip());
                let found = self.world.hosts.iter().find(is_at).map(|other| other.sal.host());
                if known.flows > 0 && found != Some(known.host) {
                    return Err(format!("{host:?} takes {} for {}", known.remote, known.host));
                }
                if known.flows > 0 && (known.moving, known.passage) != (Moving::Settled, Passage::Open) {
                    let state = (known.moving, known.passage);
                    return Err(format!("{host:?} is {state:?} with {}\n{}", known.remote, self.situation()));
                }
            }
        }
        Ok(())
    }
}

/// One world.
pub fn run(seed: u64) -> Result<(), String> {
    let mut wanderers = Wanderers::new(seed);
    let (delay, loss, double) = (wanderers.pick(60), wanderers.pick(250), wanderers.pick(250));
    wanderers.world.network.weather = Weather {
        delay_max: Duration::from_millis(1 + u64::from(delay)),
        loss_per_mille: loss,
        duplicate_per_mille: double,
        ..Weather::FAIR
    };
    for _ in 0..12 {
        wanderers.step();
        let pause = wanderers.pick(3000).into();
        wanderers.world.run_for(Duration::from_millis(pause));
    }
    wanderers.settle()
}

/// Runs a world for every seed; gives those that go wrong, and why.
pub fn explore(seeds: Range<u64>, threads: usize, run: &(dyn Fn(u64) -> Result<(), String> + Sync)) -> Vec<String> {
    let (next, wrong) = (AtomicU64::new(seeds.start), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Relaxed);
                    if seed >= seeds.end {
                        break;
                    }
                    if let Err(why) = run(seed) {
                        wrong.lock().expect("nobody panics").push(format!("seed {seed}: {why}"));
                    }
                }
            });
        }
    });
    wrong.into_inner().expect("nobody panics")
}
