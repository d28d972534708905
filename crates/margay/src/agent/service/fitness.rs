//! How fit services are for new flows, as their checks have found: what is left of their weight.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use margay_core::name::{Name, Prefix};

use super::{Listener, Published, Services};
use crate::listener::Protocol;

/// A service that takes no new flows since its checks fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sick {
    /// Since when, in seconds since 1970.
    pub since_unix_s: u64,
    /// The last failure, in one line.
    pub reason: String,
}

/// What checks have left of a service's weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fitness {
    /// Why nothing is left.
    pub sick: Option<Sick>,
    /// How much is left otherwise: 0 to 100.
    pub percent: u32,
}

impl Default for Fitness {
    fn default() -> Self {
        Self { sick: None, percent: 100 }
    }
}

impl Fitness {
    /// What is left of a weight of at most [`WEIGHT_MAX`](crate::listener::WEIGHT_MAX).
    pub fn of(&self, weight: u32) -> u32 {
        if self.sick.is_some() {
            return 0;
        }
        // Rounded up: a share that is left does not become none.
        (weight * self.percent).div_ceil(100)
    }
}

impl Services {
    /// Sets what an earlier start of the agent has found, before anything is published.
    pub fn restore_fitness(&self, fitness: BTreeMap<Prefix, Fitness>) {
        *self.fitness.lock() = fitness;
    }

    /// Sets what checks have found of a name. When nothing of its weight is left, routers are told before the service
    /// table, so that what they have sent on until then is served.
    pub async fn set_fitness(&self, name: &Name, fitness: Fitness) {
        let prefix = name.prefix();
        if fitness == Fitness::default() {
            self.fitness.lock().remove(&prefix);
        } else {
            self.fitness.lock().insert(prefix, fitness.clone());
        }
        if let Some(found) = self.find(name).filter(|found| found.is_served && found.weight() > 0) {
            let next = Published { fitness, ..found };
            if next.weight() == 0 {
                let silent = self.tell_first(&[next]).await;
                if !silent.is_empty() {
                    tracing::debug!(%name, ?silent, "a router has not acknowledged that a service is sick");
                }
            }
        }
        self.follow_shares();
    }

    /// Addresses at which connections to a name are taken now. Listeners without a socket are left out: one socket is
    /// enough for a name.
    pub fn connectable(&self, name: &Name) -> Vec<SocketAddr> {
        let of_connections = |protocol| protocol == Protocol::Tcp;
        let takes = |listener: &&Listener| listener.carries(Protocol::Tcp) && self.is_taken(listener, of_connections);
        let listeners = self.find(name).map(|found| found.listeners).unwrap_or_default();
        let mut addresses: Vec<SocketAddr> = listeners.iter().filter(takes).map(|taken| taken.address).collect();
        addresses.sort_unstable();
        addresses.dedup();
        addresses
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn what_is_left_of_a_weight_is_rounded_up() {
        let left = |percent: u32, weight: u32| Fitness { sick: None, percent }.of(weight);
        assert_eq!([left(100, 100), left(40, 100), left(10, 3), left(1, 1), left(0, 100)], [100, 40, 1, 1, 0]);
        assert_eq!(left(99, crate::listener::WEIGHT_MAX), 64_880);
        let sick = Some(Sick { since_unix_s: 1, reason: "connection refused".to_owned() });
        assert_eq!(Fitness { sick, percent: 100 }.of(100), 0);
    }
}
