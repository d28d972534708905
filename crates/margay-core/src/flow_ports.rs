//! Flow ports: which pairs of them are in use with whom, and which rest (DESIGN §7).

use alloc::collections::{BTreeSet, VecDeque};
use core::ops::RangeInclusive;
use core::time::Duration;

use hashbrown::HashMap;
use margay_wire::FlowId;

use crate::flow::KeyedHash;
use crate::key::HostId;
use crate::time::Instant;

/// A pair of flow ports is not used again for so long after its flow (DESIGN §7).
const REST: Duration = Duration::from_secs(60);

/// The peer, this end's port, the peer's port. Not the peer's address, which may change.
type Ports = (HostId, u16, u16);

/// Flow ports in use, and those that rest.
pub(crate) struct FlowPorts {
    pub range: Option<RangeInclusive<u16>>,
    /// Whether flows may go direct now.
    pub is_on: bool,
    /// Flow zero: the pair rests.
    pub pairs: HashMap<Ports, FlowId, KeyedHash>,
    resting: VecDeque<(Instant, Ports)>,
    pub due: BTreeSet<(Instant, FlowId)>,
}

impl FlowPorts {
    pub fn new(hasher: KeyedHash) -> Self {
        Self {
            range: None,
            is_on: false,
            pairs: HashMap::with_hasher(hasher),
            resting: VecDeque::new(),
            due: BTreeSet::new(),
        }
    }

    /// What has rested for long enough is free.
    pub fn wake(&mut self, now: Instant) {
        while self.resting.front().is_some_and(|(until, _)| *until <= now) {
            if let Some((_, rested)) = self.resting.pop_front() {
                self.pairs.remove(&rested);
            }
        }
    }

    pub fn claim(&mut self, now: Instant, pair: Ports, flow: FlowId) -> bool {
        self.wake(now);
        if self.pairs.contains_key(&pair) {
            return false;
        }
        self.pairs.insert(pair, flow);
        true
    }

    /// Whether `count` pairs are free whose ports rise by one at the peer's end.
    pub fn are_free(&self, (host, local, remote): Ports, count: u16) -> bool {
        (0..count).all(|k| !self.pairs.contains_key(&(host, local, remote.wrapping_add(k))))
    }

    /// Takes `count` pairs for as many flows, whose ports rise by one at this end (`rises_here`) or at the peer's: all or none.
    pub fn claim_all(
        &mut self,
        now: Instant,
        (host, local, remote): Ports,
        rises_here: bool,
        flows: RangeInclusive<u32>,
    ) -> bool {
        let pair = |k: u16| if rises_here { (host, local + k, remote) } else { (host, local, remote + k) };
        for (k, flow) in (0..).zip(flows) {
            if !self.claim(now, pair(k), FlowId(flow)) {
                for k in 0..k {
                    self.pairs.remove(&pair(k));
                }
                return false;
            }
        }
        true
    }

    pub fn rest(&mut self, now: Instant, pair: Ports) {
        if let Some(flow) = self.pairs.get_mut(&pair) {
            *flow = FlowId(0);
            self.resting.push_back((now + REST, pair));
        }
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_of_ports_rests_after_use() {
        let mut ports = FlowPorts::new(KeyedHash(1, 2));
        let pair = (HostId([1; 16]), 61_000, 62_000);
        assert!(ports.claim(Instant::ZERO, pair, FlowId(1)));
        assert!(!ports.claim(Instant::ZERO, pair, FlowId(2)));
        ports.rest(Instant::from_millis(1000), pair);
        assert!(!ports.claim(Instant::from_millis(60_999), pair, FlowId(2)));
        assert!(ports.claim(Instant::from_millis(61_000), pair, FlowId(2)));
    }
}
