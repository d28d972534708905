//! The simplest flow cache that keeps the contract of `margay_core::entry`: one packet, one DATA chunk.

use std::collections::HashMap;
use std::net::SocketAddr;

use margay_core::{Entry, EntryUpdate, Path, PathId, Tuple};
use margay_wire::{DATA_HEADER_LEN, DataRepr, FlowId, GsoKind, TRAIN_HEADER_LEN, TrainRepr};

const STACK_ENCAP: u8 = 2;

/// Entries and paths as the core gave them.
#[derive(Default)]
pub struct Cache {
    by_tuple: HashMap<Tuple, Entry>,
    by_flow: HashMap<FlowId, Entry>,
    paths: HashMap<PathId, Path>,
    packet_number: u32,
}

impl Cache {
    pub(crate) fn apply(&mut self, update: EntryUpdate) {
        match update {
            EntryUpdate::Path(path) => {
                self.paths.insert(path.id, path);
            }
            EntryUpdate::RemovePath(id) => {
                self.paths.remove(&id);
            }
            EntryUpdate::Install(entry) => {
                let older = self.by_flow.get(&entry.flow).is_none_or(|known| known.generation <= entry.generation);
                if older {
                    self.by_flow.insert(entry.flow, entry);
                    self.by_tuple.insert(entry.app, entry);
                }
            }
            EntryUpdate::Remove { flow, .. } => {
                if let Some(entry) = self.by_flow.remove(&flow) {
                    self.by_tuple.remove(&entry.app);
                }
            }
        }
    }

    /// Forgets everything: the next packets miss.
    pub fn clear(&mut self) {
        *self = Self { packet_number: self.packet_number, ..Self::default() };
    }

    /// Flows that it carries.
    pub fn len(&self) -> usize {
        self.by_flow.len()
    }

    /// Whether it carries none.
    pub fn is_empty(&self) -> bool {
        self.by_flow.is_empty()
    }

    pub(crate) fn encapsulate(&mut self, tuple: &Tuple, packet: &[u8]) -> Option<(FlowId, SocketAddr, Vec<u8>)> {
        let entry = *self.by_tuple.get(tuple)?;
        let path = self.paths.get(&entry.path)?;
        self.packet_number = self.packet_number.wrapping_add(1);
        let data = DataRepr {
            stack: STACK_ENCAP,
            flags: 0,
            dst_flow: entry.peer_flow,
            packet_number: self.packet_number,
            index: 0,
            count: 1,
        };
        let inner_len = u32::try_from(packet.len()).ok()?;
        let train = TrainRepr { gso: GsoKind::None, partial_checksum: false, segment_size: 0, inner_len };
        let mut datagram = vec![0; DATA_HEADER_LEN + TRAIN_HEADER_LEN];
        data.emit(&mut datagram[..DATA_HEADER_LEN]);
        train.emit(&mut datagram[DATA_HEADER_LEN..]);
        datagram.extend_from_slice(packet);
        Some((entry.flow, path.remote, datagram))
    }

    /// The flow, the tuple that the packet shall carry, and the inner packet.
    pub(crate) fn decapsulate<'a>(&self, from: SocketAddr, datagram: &'a [u8]) -> Option<(FlowId, Tuple, &'a [u8])> {
        let data = DataRepr::parse(datagram).ok()?;
        let entry = self.by_flow.get(&data.dst_flow)?;
        let path = self.paths.get(&entry.path)?;
        if path.remote != from {
            return None;
        }
        let inner = datagram.get(DATA_HEADER_LEN + TRAIN_HEADER_LEN..)?;
        Some((entry.flow, entry.app.reversed(), inner))
    }
}
