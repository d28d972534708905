//! Small worlds for exhaustive checking: two hosts, every order of delivery, loss, duplication, replay and time-out.
//!
//! A state is the list of steps that led to it, played again on the cores that ship, and a fingerprint of what came out.
//! Slow per state, and exactly the code that runs on hosts.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use margay_core::name::virtual_v6;
use margay_core::table::Allow;
use margay_core::{Instant, Lifecycle, Limits, Role};
use margay_wire::PORT;

use crate::host::{Host, Outgoing, Start};
use crate::program::Outcome;
use crate::world::service;

/// One step of a small world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// The datagram in flight of this number arrives.
    Deliver(usize),
    /// It arrives and is in flight still.
    Duplicate(usize),
    /// It is lost.
    Lose(usize),
    /// A datagram sent earlier is seen again, from another address.
    Replay(usize),
    /// Nothing arrives for so long that the next timer runs out.
    Wait,
}

/// How much of each may happen.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Losses.
    pub lose: usize,
    /// Duplications.
    pub duplicate: usize,
    /// Replays.
    pub replay: usize,
    /// Timers.
    pub wait: usize,
}

/// How two hosts stand to each other at the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acquaintance {
    /// They have never met.
    Strangers,
    /// They share an association.
    Known,
    /// The server remembers an association that the client has lost.
    Forgotten,
}

/// A client host, a server host, one connection attempt.
pub struct SmallWorld {
    hosts: [Host; 2],
    in_flight: Vec<(SocketAddr, SocketAddr, Vec<u8>)>,
    sent: Vec<(SocketAddr, SocketAddr, Vec<u8>)>,
    now: Instant,
}

fn address(host: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, host as u8 + 1))
}

fn new_host(at: usize, seed: u8, epoch: u32, now: Instant) -> Host {
    let start = Start { key_seed: [at as u8 + 1; 32], epoch, boot: 1, router: false };
    Host::new(address(at), start, now, [seed; 32], Limits::default())
}

impl SmallWorld {
    /// The start: the client's SYN is in flight.
    pub fn new(acquaintance: Acquaintance) -> Self {
        let now = Instant::from_millis(1);
        let hosts = [new_host(0, 10, 1, now), new_host(1, 11, 1, now)];
        let mut world = Self { hosts, in_flight: Vec::new(), sent: Vec::new(), now };
        let name = service("web.shop");
        world.hosts[1].serve(name, 80, 7, Allow::Any);
        world.introduce();
        if acquaintance != Acquaintance::Strangers {
            world.connect();
            while !world.in_flight.is_empty() {
                world.play(Step::Deliver(0));
            }
            world.now += std::time::Duration::from_secs(30);
            for host in 0..2 {
                world.hosts[host].handle_time(world.now);
                world.hosts[host].clients.clear();
                world.hosts[host].servers.iter_mut().for_each(|server| server.accepted.clear());
            }
            world.in_flight.clear();
        }
        if acquaintance == Acquaintance::Forgotten {
            world.hosts[0] = new_host(0, 12, 2, world.now);
            world.introduce();
        }
        world.sent.clear();
        world.connect();
        world
    }

    /// The client's table knows where the service is.
    fn introduce(&mut self) {
        let key = self.hosts[1].public_key();
        self.hosts[0].forward(service("web.shop").into(), address(1), Some(key));
    }

    fn connect(&mut self) {
        let to = SocketAddr::new(virtual_v6(&service("web.shop")).into(), 80);
        self.hosts[0].connect(self.now, to);
        self.hosts[0].handle_time(self.now);
        self.collect(0);
    }

    fn collect(&mut self, host: usize) {
        let from = SocketAddr::new(address(host), PORT);
        for outgoing in std::mem::take(&mut self.hosts[host].outbox) {
            // Hosts of small worlds have no kernel cache: nothing goes direct.
            let Outgoing::Datagram(to, bytes) = outgoing else { continue };
            self.in_flight.push((from, to, bytes.clone()));
            self.sent.push((from, to, bytes));
        }
    }

    fn arrive(&mut self, from: SocketAddr, to: SocketAddr, bytes: &[u8]) {
        if let Some(host) = (0..2).find(|host| address(*host) == to.ip()) {
            self.hosts[host].handle_datagram(self.now, from, bytes);
            self.collect(host);
        }
    }

    /// Carries out one step. A number that names nothing does nothing.
    pub fn play(&mut self, step: Step) {
        match step {
            Step::Deliver(at) if at < self.in_flight.len() => {
                let (from, to, bytes) = self.in_flight.remove(at);
                self.arrive(from, to, &bytes);
            }
            Step::Duplicate(at) if at < self.in_flight.len() => {
                let (from, to, bytes) = self.in_flight[at].clone();
                self.arrive(from, to, &bytes);
            }
            Step::Lose(at) if at < self.in_flight.len() => {
                self.in_flight.remove(at);
            }
            Step::Replay(at) if at < self.sent.len() => {
                let (_, to, bytes) = self.sent[at].clone();
                self.arrive(SocketAddr::new([203, 0, 113, 1].into(), PORT), to, &bytes);
            }
            Step::Wait => {
                let Some(next) = self.hosts.iter().filter_map(Host::next_deadline).min() else { return };
                self.now = self.now.max(next);
                for host in 0..2 {
                    self.hosts[host].handle_time(self.now);
                    self.collect(host);
                }
            }
            _ => {}
        }
    }

    /// Steps that are possible within what is left of the budget.
    pub fn steps(&self, left: &Budget) -> Vec<Step> {
        let mut steps = Vec::new();
        for at in 0..self.in_flight.len() {
            steps.push(Step::Deliver(at));
            steps.extend((left.duplicate > 0).then_some(Step::Duplicate(at)));
            steps.extend((left.lose > 0).then_some(Step::Lose(at)));
        }
        if left.replay > 0 {
            steps.extend((0..self.sent.len()).map(Step::Replay));
        }
        if left.wait > 0 && self.in_flight.is_empty() {
            steps.push(Step::Wait);
        }
        steps
    }

    /// How the client's attempt stands.
    pub fn outcome(&self) -> Outcome {
        self.hosts[0].clients.last().map_or(Outcome::Pending, |client| client.outcome)
    }

    /// The server program accepted although no flow of its host is proved.
    pub fn accepted_unproved(&self) -> bool {
        let proved = self.hosts[1].sal.flows().any(|flow| flow.lifecycle >= Lifecycle::Established);
        let accepted: usize = self.hosts[1].servers.iter().map(|server| server.accepted.len()).sum();
        accepted > 0 && !proved
    }

    /// The server holds two established flows of the one session.
    pub fn is_doubled(&self) -> bool {
        let established =
            |flow: &margay_core::FlowInfo| flow.role == Role::Responder && flow.lifecycle == Lifecycle::Established;
        self.hosts[1].sal.flows().filter(established).count() > 1
    }

    /// Nothing is in flight, nothing will run out, and the client waits.
    pub fn is_stuck(&self) -> bool {
        let idle = self.in_flight.is_empty() && self.hosts.iter().all(|host| host.next_deadline().is_none());
        idle && self.outcome() == Outcome::Pending
    }

    /// Equal for worlds that cannot be told apart: what is in flight, and what each host shows of itself.
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        let mut in_flight: Vec<_> = self.in_flight.iter().collect();
        in_flight.sort();
        in_flight.hash(&mut hasher);
        for host in &self.hosts {
            let mut flows: Vec<_> =
                host.sal.flows().map(|flow| (flow.flow, flow.peer_flow, flow.lifecycle as u8)).collect();
            flows.sort();
            flows.hash(&mut hasher);
            let mut associations: Vec<_> =
                host.sal.associations().map(|peer| (peer.host, peer.flows, peer.epoch)).collect();
            associations.sort();
            associations.hash(&mut hasher);
            host.next_deadline().hash(&mut hasher);
            host.cache.len().hash(&mut hasher);
            host.servers.iter().for_each(|server| server.accepted.len().hash(&mut hasher));
        }
        self.outcome().hash(&mut hasher);
        self.now.hash(&mut hasher);
        hasher.finish()
    }
}
