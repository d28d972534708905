//! What programs send of flows that must not leave plain, until those flows are encrypted. Bounded in bytes, as a queue
//! is: what is beyond is dropped, and a TCP sends it again.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use margay_wire::FlowId;

use crate::types::key::HostId;

/// Bytes of one flow.
const FLOW_BYTES_MAX: usize = 128 << 10;
/// Bytes of all flows.
const BYTES_MAX: usize = 16 << 20;
/// Bytes of all flows with one peer: a peer that has this host hold many leaves room for those with other peers.
const PEER_BYTES_MAX: usize = BYTES_MAX / 16;
/// What a packet takes beside its own bytes.
const PACKET_OVERHEAD_BYTES: usize = 64;

#[derive(Debug)]
struct FlowPackets {
    host: HostId,
    packets: Vec<Vec<u8>>,
    bytes: usize,
}

/// The packets, in order for each flow.
#[derive(Debug, Default)]
pub(super) struct HeldPackets {
    flows: BTreeMap<FlowId, FlowPackets>,
    peers: BTreeMap<HostId, usize>,
    bytes: usize,
}

impl HeldPackets {
    /// Keeps a packet of a flow with a peer. False where there is no room for it.
    pub fn push(&mut self, flow: FlowId, host: HostId, packet: &[u8]) -> bool {
        let bytes = packet.len() + PACKET_OVERHEAD_BYTES;
        let of_flow = self.flows.get(&flow).map_or(0, |held| held.bytes);
        let of_peer = self.peers.get(&host).copied().unwrap_or(0);
        if of_flow + bytes > FLOW_BYTES_MAX || of_peer + bytes > PEER_BYTES_MAX || self.bytes + bytes > BYTES_MAX {
            return false;
        }
        let held = self.flows.entry(flow).or_insert_with(|| FlowPackets { host, packets: Vec::new(), bytes: 0 });
        held.packets.push(packet.to_vec());
        held.bytes += bytes;
        *self.peers.entry(host).or_default() += bytes;
        self.bytes += bytes;
        true
    }

    /// Takes the packets of a flow.
    pub fn take(&mut self, flow: FlowId) -> Vec<Vec<u8>> {
        let Some(FlowPackets { host, packets, bytes }) = self.flows.remove(&flow) else { return Vec::new() };
        self.bytes -= bytes;
        if let Some(of_peer) = self.peers.get_mut(&host) {
            *of_peer -= bytes;
            if *of_peer == 0 {
                self.peers.remove(&host);
            }
        }
        packets
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACKET: [u8; 1500] = [7; 1500];

    fn fill(held: &mut HeldPackets, flow: u32, host: u8) -> usize {
        (0..).take_while(|_| held.push(FlowId(flow), HostId([host; 16]), &PACKET)).count()
    }

    #[test]
    fn a_flow_a_peer_and_all_together_have_a_bound_in_bytes_and_what_is_taken_makes_room() {
        let mut held = HeldPackets::default();
        let of_flow = FLOW_BYTES_MAX / (PACKET.len() + PACKET_OVERHEAD_BYTES);
        assert_eq!(fill(&mut held, 1, 1), of_flow);
        let of_peer = of_flow + (2..1026).map(|flow| fill(&mut held, flow, 1)).sum::<usize>();
        assert!(of_peer * (PACKET.len() + PACKET_OVERHEAD_BYTES) <= PEER_BYTES_MAX, "1,024 flows of one peer");
        assert_eq!(fill(&mut held, 2000, 2), of_flow, "there is room for another peer");
        for host in 3..=255 {
            for flow in 0..16 {
                fill(&mut held, u32::from(host) * 100_000 + flow, host);
            }
        }
        assert!(held.bytes <= BYTES_MAX && fill(&mut held, 3000, 250) == 0);
        assert_eq!(held.take(FlowId(1)).len(), of_flow);
        assert!(held.take(FlowId(1)).is_empty());
        assert_eq!(fill(&mut held, 3000, 2), of_flow, "what was taken has made room");
        let flows: Vec<FlowId> = held.flows.keys().copied().collect();
        flows.into_iter().for_each(|flow| drop(held.take(flow)));
        assert!(held.bytes == 0 && held.peers.is_empty());
    }

    #[test]
    fn empty_packets_count_too() {
        let mut held = HeldPackets::default();
        let count = (0..).take_while(|_| held.push(FlowId(1), HostId([1; 16]), &[])).count();
        assert_eq!(count, FLOW_BYTES_MAX / PACKET_OVERHEAD_BYTES);
    }
}
