//! Repairs of places of striped flows (docs/decisions/0095), as simulated hosts send and take them: by the agent's own
//! code, with a loss that is supposed.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

use margay_core::{Instant, PathId};
use margay_stack::{Loss, Repair, RepairBeside, Repairer, Restorer};
use margay_wire::{COVERED_LEN_MAX, ChunkName, Covered, DATA_HEADER_LEN, DataRepr, FlowId, REPAIR, STACK_FEC};

/// What every place is supposed to lose.
const SUPPOSED: Loss = Loss { ppm: 100_000, row_thousandths: 1000 };

/// A datagram of the cache's own: where it leaves from, where it goes.
pub(crate) type Sent = (Option<IpAddr>, SocketAddr, Vec<u8>);

struct Sending {
    repairer: Repairer,
    local: Option<IpAddr>,
    to: SocketAddr,
    peer_flow: FlowId,
}

/// What a host knows of places that repair, by flow and path.
#[derive(Default)]
pub(crate) struct PlaceFecs {
    sending: HashMap<(FlowId, PathId), Sending>,
    receiving: HashMap<(FlowId, PathId), Restorer>,
    /// Datagrams that were brought back.
    pub restored: u64,
}

fn name_of(header: &DataRepr) -> ChunkName {
    ChunkName { number: header.packet_number, index: header.index }
}

fn written(peer_flow: FlowId, covered: &Covered, repair: &Repair<'_>) -> Vec<u8> {
    let Repair { base, index, count, symbol, .. } = *repair;
    let header = DataRepr { stack: STACK_FEC, flags: REPAIR, dst_flow: peer_flow, packet_number: base, index, count };
    let mut datagram = vec![0; DATA_HEADER_LEN];
    header.emit(&mut datagram);
    let mut names = [0; COVERED_LEN_MAX];
    let len = covered.emit(&mut names);
    datagram.extend_from_slice(&names[..len]);
    datagram.extend_from_slice(symbol);
    datagram
}

impl PlaceFecs {
    /// A datagram goes by a place. Gives what follows it.
    pub fn sent(&mut self, now: Instant, place: (FlowId, PathId), datagram: &Sent) -> Vec<Sent> {
        let (local, to, bytes) = datagram;
        let Ok(header) = DataRepr::parse(bytes) else { return Vec::new() };
        let sending = self.sending.entry(place).or_insert_with(|| {
            let mut repairer = Repairer::default();
            repairer.note_loss(SUPPOSED);
            Sending { repairer, local: *local, to: *to, peer_flow: header.dst_flow }
        });
        let mut all = Vec::new();
        sending.repairer.add(now, name_of(&header), bytes, |covered, repair| {
            all.push((*local, *to, written(header.dst_flow, covered, repair)));
        });
        all
    }

    /// When a block ends.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.sending.values().filter_map(|sending| sending.repairer.deadline()).min()
    }

    /// What repairs blocks that end now.
    pub fn take_due(&mut self, now: Instant) -> Vec<Sent> {
        let mut all = Vec::new();
        for Sending { repairer, local, to, peer_flow } in self.sending.values_mut() {
            repairer.close_due(now, |covered, repair| all.push((*local, *to, written(*peer_flow, covered, repair))));
        }
        all
    }

    /// A datagram has come by a place, and was taken. Gives those that can be brought back now.
    pub fn keep(&mut self, place: (FlowId, PathId), datagram: &[u8]) -> Vec<Vec<u8>> {
        let Ok(header) = DataRepr::parse(datagram) else { return Vec::new() };
        let mut all = Vec::new();
        let restorer = self.receiving.entry(place).or_default();
        restorer.keep(name_of(&header), datagram, |_, datagram| all.push(datagram.to_vec()));
        self.restored += all.len() as u64;
        all
    }

    /// A repair has come by a place. As [`keep`](Self::keep).
    pub fn restore(&mut self, place: (FlowId, PathId), repair: &[u8]) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        let (Ok(header), Ok((covered, symbol))) =
            (DataRepr::parse(repair), Covered::parse(&repair[DATA_HEADER_LEN.min(repair.len())..]))
        else {
            return all;
        };
        let of = RepairBeside { block: header.packet_number, index: header.index, count: header.count };
        let restorer = self.receiving.entry(place).or_default();
        // What does not fit brings nothing back.
        let _ = restorer.repair(of, &covered, symbol, |_, datagram| all.push(datagram.to_vec()));
        self.restored += all.len() as u64;
        all
    }

    /// Whether a datagram was brought back, and given on, before.
    pub fn is_late(&mut self, place: (FlowId, PathId), datagram: &[u8]) -> bool {
        let restorer = self.receiving.get_mut(&place);
        restorer
            .zip(DataRepr::parse(datagram).ok())
            .is_some_and(|(restorer, header)| restorer.is_late(name_of(&header)))
    }
}
