//! Flow ports: which pairs of them are in use with whom, and which rest (DESIGN §7).

use alloc::collections::{BTreeSet, VecDeque};
use core::ops::RangeInclusive;
use core::time::Duration;

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use margay_wire::FlowId;

use crate::types::key::HostId;
use crate::types::keyed_hash::KeyedHash;
use crate::types::time::Instant;

/// A pair of flow ports is not used again for so long after its flow (DESIGN §7).
const REST: Duration = Duration::from_secs(60);

/// The peer, this end's port, the peer's port. Not the peer's address, which may change.
type Ports = (HostId, u16, u16);

/// Flow ports in use, and those that rest.
pub(crate) struct FlowPorts {
    pub range: Option<RangeInclusive<u16>>,
    /// Whether flows may go direct now.
    pub is_on: bool,
    /// By peer, the pairs that are in use, and those that rest (flow zero). Every flow has one, and most have few
    /// peers.
    pairs: HashMap<HostId, HashMap<(u16, u16), FlowId, KeyedHash>, KeyedHash>,
    /// The same, by the ports of this end and the peer's: peers at one address are many where they are behind a
    /// translator.
    by_ports: BTreeSet<(u16, u16, HostId)>,
    resting: VecDeque<(Instant, Ports)>,
    pub due: BTreeSet<(Instant, FlowId)>,
}

impl FlowPorts {
    pub fn new(hasher: KeyedHash) -> Self {
        Self {
            range: None,
            is_on: false,
            pairs: HashMap::with_hasher(hasher),
            by_ports: BTreeSet::new(),
            resting: VecDeque::new(),
            due: BTreeSet::new(),
        }
    }

    /// What has rested for long enough is free.
    pub fn wake(&mut self, now: Instant) {
        while self.resting.front().is_some_and(|(until, _)| *until <= now) {
            if let Some((_, rested)) = self.resting.pop_front() {
                self.free(rested);
            }
        }
    }

    fn free(&mut self, (host, local, remote): Ports) {
        let Some(pairs) = self.pairs.get_mut(&host) else { return };
        pairs.remove(&(local, remote));
        self.by_ports.remove(&(local, remote, host));
        if pairs.is_empty() {
            self.pairs.remove(&host);
        }
    }

    /// Pairs that are in use with a peer, or rest.
    pub fn count(&self, host: HostId) -> usize {
        self.pairs.get(&host).map_or(0, HashMap::len)
    }

    /// The flow that a pair is in use for.
    pub fn flow(&self, (host, local, remote): Ports) -> Option<FlowId> {
        self.pairs.get(&host)?.get(&(local, remote)).copied().filter(|flow| flow.0 != 0)
    }

    /// The flows that use this pair of ports, each with another peer.
    pub fn flows_by(&self, local: u16, remote: u16) -> impl Iterator<Item = (HostId, FlowId)> {
        self.peers_by(local, remote).filter_map(move |host| Some((host, self.flow((host, local, remote))?)))
    }

    /// The peers with which the flow of this pair of ports has ended a short while ago.
    pub fn resting_by(&self, local: u16, remote: u16) -> impl Iterator<Item = HostId> {
        self.peers_by(local, remote).filter(move |host| self.flow((*host, local, remote)).is_none())
    }

    fn peers_by(&self, local: u16, remote: u16) -> impl Iterator<Item = HostId> {
        let alike = self.by_ports.range((local, remote, HostId([0; 16]))..=(local, remote, HostId([0xff; 16])));
        alike.map(|(_, _, host)| *host)
    }

    /// Takes a pair for a flow. False where it is in use or rests.
    pub fn claim(&mut self, now: Instant, (host, local, remote): Ports, flow: FlowId) -> bool {
        self.wake(now);
        let hasher = *self.pairs.hasher();
        match self.pairs.entry(host).or_insert_with(|| HashMap::with_hasher(hasher)).entry((local, remote)) {
            Entry::Occupied(_) => false,
            Entry::Vacant(vacant) => {
                vacant.insert(flow);
                self.by_ports.insert((local, remote, host));
                true
            }
        }
    }

    /// Whether `count` pairs are free whose ports rise by one at the peer's end.
    pub fn are_free(&self, (host, local, remote): Ports, count: u16) -> bool {
        let Some(pairs) = self.pairs.get(&host) else { return true };
        (0..count).all(|k| !pairs.contains_key(&(local, remote.wrapping_add(k))))
    }

    /// Takes a pair for each of these flows, whose ports rise by one at this end (`rises_here`) or at the peer's: all
    /// or none.
    pub fn claim_all(
        &mut self,
        now: Instant,
        (host, local, remote): Ports,
        rises_here: bool,
        flows: RangeInclusive<u32>,
    ) -> bool {
        let pair = |k: u16| if rises_here { (host, local + k, remote) } else { (host, local, remote + k) };
        let refused = (0..).zip(flows).find(|(k, flow)| !self.claim(now, pair(*k), FlowId(*flow)));
        (0..refused.map_or(0, |(k, _)| k)).for_each(|k| self.free(pair(k)));
        refused.is_none()
    }

    /// The flow of a pair is over, or never began.
    pub fn rest(&mut self, now: Instant, (host, local, remote): Ports) {
        if let Some(flow) = self.pairs.get_mut(&host).and_then(|pairs| pairs.get_mut(&(local, remote))) {
            *flow = FlowId(0);
            self.resting.push_back((now + REST, (host, local, remote)));
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
        let of_another = (HostId([2; 16]), 61_000, 62_000);
        assert!(ports.claim(Instant::ZERO, of_another, FlowId(3)));
        assert_eq!((ports.flow(pair), ports.flow(of_another)), (Some(FlowId(1)), Some(FlowId(3))));
        ports.rest(Instant::from_millis(1000), pair);
        assert_eq!(ports.flow(pair), None);
        assert!(!ports.claim(Instant::from_millis(60_999), pair, FlowId(2)));
        assert!(ports.claim(Instant::from_millis(61_000), pair, FlowId(2)));
    }

    #[test]
    fn a_row_of_pairs_is_taken_whole_or_not_at_all() {
        let mut ports = FlowPorts::new(KeyedHash(1, 2));
        let host = HostId([1; 16]);
        assert!(ports.claim(Instant::ZERO, (host, 61_003, 62_000), FlowId(1)));
        assert!(!ports.claim_all(Instant::ZERO, (host, 61_000, 62_000), true, 2..=5));
        assert!(ports.claim_all(Instant::ZERO, (host, 61_000, 62_000), true, 2..=4), "nothing was kept");
        assert!(ports.are_free((host, 61_000, 62_001), 8) && !ports.are_free((host, 61_000, 61_993), 8));
        assert!(ports.claim_all(Instant::ZERO, (host, 61_000, 62_001), false, 5..=12));
        assert_eq!(ports.flow((host, 61_000, 62_008)), Some(FlowId(12)));
        let all = (61_000..61_004).map(|local| (local, 62_000)).chain((62_001..62_009).map(|remote| (61_000, remote)));
        all.for_each(|(local, remote)| ports.rest(Instant::ZERO, (host, local, remote)));
        ports.wake(Instant::ZERO + REST);
        assert!(ports.pairs.is_empty() && ports.resting.is_empty() && ports.by_ports.is_empty());
    }
}
