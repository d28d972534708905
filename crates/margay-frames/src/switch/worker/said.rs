//! What is said of a connection to its ends, and what is counted of it.

use margay_core::Instant;
use margay_wire::sctp::{Chunk, Chunks};
use margay_wire::{FRAMED_HEADER_LEN, Framed};

use super::super::gathered::Gathered;
use super::super::served::{Key, Served};
use super::Worker;

/// Longest message: chunks are gathered up to here.
const DATAGRAM_MAX: usize = 1300;

impl Worker {
    /// Tells a client of requests that nobody will answer.
    pub(super) fn tell_lost(&mut self, now: Instant, key: Key) {
        let Some(served) = self.connections.get_mut(&key) else { return };
        let lost = served.switch.plugin_mut().take_lost();
        self.totals.lost_requests += lost.len() as u64;
        served.lost.add(lost);
        if let Some((generation, numbers)) = served.lost.poll(now) {
            let mut bytes = vec![0; DATAGRAM_MAX];
            if let Some(len) = Framed::emit_lost(key.1, generation, numbers, &mut bytes) {
                self.out.to_peers.push(Some(key.0), &bytes[..len]);
            }
        }
    }

    /// Puts the packets of a connection into messages: as many chunks into each as there is room for.
    pub(super) fn gather(&mut self, now: Instant, key: Key) {
        let Some(served) = self.connections.get_mut(&key) else { return };
        // One for each of a few ends: to look through them is less than to hash.
        let mut open: Vec<Gathered> = Vec::new();
        while let Some(packet) = served.switch.poll_packet() {
            let at = match open.iter().position(|gathered| gathered.to == packet.to) {
                Some(at) => at,
                None => {
                    let Some(gathered) = Gathered::begin(packet.to, &key, &served.legs) else {
                        // It has died since.
                        continue;
                    };
                    open.push(gathered);
                    open.len() - 1
                }
            };
            let gathered = &mut open[at];
            // What else is sent to a member is acknowledged, or confirmed.
            gathered.is_asking |= !matches!(Chunks::new(&packet.bytes).next(), Some(Ok(Chunk::Sack(_))));
            if gathered.bytes.len() > FRAMED_HEADER_LEN && gathered.bytes.len() + packet.bytes.len() > DATAGRAM_MAX {
                let full = std::mem::take(&mut gathered.bytes);
                self.out.put(key, gathered.host, &full);
            }
            gathered.add(&packet.bytes);
        }
        self.totals.dropped.add(&served.switch.take_counters());
        for Gathered { host, bytes, is_asking, .. } in open {
            self.out.put(key, host, &bytes);
            if let Some(member) = host.filter(|_| is_asking).and_then(|host| self.members.get_mut(&host)) {
                member.asked(now);
            }
        }
    }

    /// Counts what members and the module have done for a connection.
    pub(super) fn count(&mut self, key: Key) {
        let Some(Served { switch, legs, module, module_calls, .. }) = self.connections.get_mut(&key) else { return };
        let calls = switch.plugin().module_calls().unwrap_or_default();
        let calls_new = calls - std::mem::replace(module_calls, calls);
        if let Some(placed) = self.module.as_mut().filter(|placed| Some(placed.number) == *module) {
            placed.calls += calls_new;
        }
        for (id, tally) in switch.plugin_mut().take_tallies() {
            let host = legs.iter().find(|(_, leg)| leg.member() == Some(id)).map(|(host, _)| host);
            if let Some(member) = host.and_then(|host| self.members.get_mut(host)) {
                member.tally.add(tally);
            }
        }
    }
}
