//! A client host, a server host, one connection attempt.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use margay_core::table::Allow;
use margay_core::{Instant, Lifecycle, Ranges, Role};

use super::{Budget, SmallWorld, new_host};
use crate::host::{Host, Start};
use crate::program::Outcome;
use crate::world::service;

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

pub(super) fn address(host: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, host as u8 + 1))
}

pub(super) fn start(at: usize, seed: u8, epoch: u32, now: Instant) -> Host {
    let start = Start { key_seed: [at as u8 + 1; 32], epoch, boot: 1, router: false, ranges: Ranges::USUAL };
    new_host(address(at), start, seed, now)
}

impl SmallWorld {
    /// The client's SYN is in flight.
    pub fn meeting(acquaintance: Acquaintance, budget: Budget) -> Self {
        let now = Instant::from_millis(1);
        let mut world = Self::new(vec![start(0, 10, 1, now), start(1, 11, 1, now)], now);
        let name = service("web.shop");
        world.hosts[1].serve(name, 80, 7, Allow::Any);
        world.introduce();
        if acquaintance != Acquaintance::Strangers {
            world.connect();
            world.deliver_all();
            world.now += std::time::Duration::from_secs(30);
            for host in 0..2 {
                world.hosts[host].handle_time(world.now);
                world.hosts[host].outbox.clear();
                world.hosts[host].clients.clear();
                world.hosts[host].servers.iter_mut().for_each(|server| server.accepted.clear());
            }
        }
        if acquaintance == Acquaintance::Forgotten {
            world.hosts[0] = start(0, 12, 2, world.now);
            world.introduce();
        }
        world.connect();
        world.begin(budget)
    }

    /// The client's table knows where the service is.
    fn introduce(&mut self) {
        let key = self.hosts[1].public_key();
        self.hosts[0].forward(service("web.shop").into(), address(1), Some(key));
    }

    fn connect(&mut self) {
        let to = SocketAddr::new(Ranges::USUAL.virtual_v6(&service("web.shop")).into(), 80);
        self.hosts[0].connect(self.now, to);
        self.hosts[0].handle_time(self.now);
        self.collect(0);
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
        self.in_flight.is_empty() && self.next_deadline().is_none() && self.outcome() == Outcome::Pending
    }
}
