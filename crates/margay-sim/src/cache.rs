//! The simplest flow cache that keeps the contract of `margay_core::entry`: one packet, one DATA chunk. What the agent's own
//! table knows lies here; what the kernel's cache knows, where the host has one, in [`Kernel`].

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

use margay_core::{Entry, EntryUpdate, Instant, Path, PathId, Tuple, Wire};
use margay_wire::{BESIDE, DATA_HEADER_LEN, DataRepr, FENCE, FlowId, GsoKind, TRAIN_HEADER_LEN, TrainRepr};

use crate::kernel::Kernel;
use crate::program::{ACK, Segment, TCP};

const STACK_ENCAP: u8 = 2;

/// What the agent's table keeps of a flow.
struct Slot {
    entry: Entry,
    /// Of the last DATA sent.
    packet_number: u32,
    /// Packet number of the peer's FENCE: what came before it says nothing.
    fence: u32,
    /// Next sequence number and acknowledgement, as the application showed them to the agent last.
    numbers: Option<(u32, u32)>,
    wants_pinhole: bool,
    /// Packets of the application, and to it.
    carried: (u32, u32),
}

/// Datagrams after which a flow is lifted though none has come back.
const DATAGRAMS_MIN: u32 = 4;

/// An application's packet, encapsulated.
pub(crate) struct Carried {
    pub flow: FlowId,
    pub to: SocketAddr,
    pub datagram: Vec<u8>,
    /// The flow is sent direct, but this packet was not.
    pub is_beside: bool,
    /// A pinhole was wanted, and its numbers are known now.
    pub wants_pinhole: bool,
}

/// What a DATA datagram is.
pub(crate) struct Decapsulated<'a> {
    pub flow: FlowId,
    /// What the packet shall carry.
    pub tuple: Tuple,
    /// Nothing, or the application's packet.
    pub inner: &'a [u8],
    /// The peer sends direct from now on.
    pub is_fence: bool,
    /// The peer, which sent direct, encapsulates again.
    pub is_back: bool,
    /// This end sends the flow direct.
    pub is_sending: bool,
    /// A pinhole was wanted, and its time has come.
    pub wants_pinhole: bool,
}

/// Entries and paths as the core gave them.
#[derive(Default)]
pub struct Cache {
    by_tuple: HashMap<Tuple, FlowId>,
    by_flow: HashMap<FlowId, Slot>,
    paths: HashMap<PathId, Path>,
    /// The kernel's cache, where the host has one.
    pub kernel: Option<Kernel>,
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
            // Simulated programs know surrogates.
            EntryUpdate::Show { .. } => {}
            EntryUpdate::Install(entry) => self.install(entry),
            EntryUpdate::Remove { flow, .. } => {
                if let Some(slot) = self.by_flow.remove(&flow) {
                    self.by_tuple.remove(&slot.entry.app);
                }
                if let Some(kernel) = &mut self.kernel {
                    kernel.follow(flow, None);
                }
            }
        }
    }

    fn install(&mut self, entry: Entry) {
        let known = self.by_flow.get(&entry.flow);
        if known.is_some_and(|known| known.entry.generation > entry.generation) {
            return;
        }
        let fresh = Slot { entry, packet_number: 0, fence: 0, numbers: None, wants_pinhole: false, carried: (0, 0) };
        self.by_flow.entry(entry.flow).or_insert(fresh).entry = entry;
        self.by_tuple.insert(entry.app, entry.flow);
        self.follow(entry.flow);
    }

    /// Brings the kernel's entry of a flow in step with the table's.
    fn follow(&mut self, flow: FlowId) {
        let wanted = self.by_flow.get(&flow).and_then(|slot| Some((slot.entry.app, slot.entry.wire?)));
        if let Some(kernel) = &mut self.kernel {
            let remote = wanted.and_then(|(_, wire)| self.paths.get(&wire.path)).map(|path| path.remote.ip());
            kernel.follow(flow, wanted.zip(remote).map(|((app, wire), remote)| (app, wire, remote)));
        }
    }

    /// Forgets everything: the next packets miss. Packet numbers begin anew, as in the agent's table.
    pub fn clear(&mut self) {
        self.by_tuple.clear();
        self.by_flow.clear();
        self.paths.clear();
        self.clear_kernel();
    }

    /// The kernel's cache forgets everything; the agent's table does not.
    pub fn clear_kernel(&mut self) {
        if let Some(kernel) = &mut self.kernel {
            kernel.clear();
        }
    }

    /// Flows that it carries.
    pub fn len(&self) -> usize {
        self.by_flow.len()
    }

    /// Whether it carries none.
    pub fn is_empty(&self) -> bool {
        self.by_flow.is_empty()
    }

    /// The application's packet as the kernel sends it, where the kernel's cache does.
    pub(crate) fn send_direct(&mut self, now: Instant, local: IpAddr, segment: &Segment) -> Option<(FlowId, Vec<u8>)> {
        self.kernel.as_mut()?.egress(now, local, segment)
    }

    /// A packet of a flow that is sent direct came to the agent. True if the flow has stalled; what the kernel's cache has lost
    /// is put back.
    pub(crate) fn is_stalled(&mut self, flow: FlowId) -> bool {
        let state = self.kernel.as_ref().and_then(|kernel| kernel.is_stalled(flow));
        if state.is_none() {
            self.follow(flow);
        }
        state.unwrap_or(false)
    }

    pub(crate) fn encapsulate(&mut self, segment: &Segment, packet: &[u8]) -> Option<Carried> {
        let flow = *self.by_tuple.get(&segment.tuple)?;
        let slot = self.by_flow.get_mut(&flow)?;
        let to = self.paths.get(&slot.entry.path)?.remote;
        slot.packet_number += 1;
        let is_beside = slot.entry.wire.is_some_and(|wire| wire.sending);
        slot.carried.0 += 1;
        if slot.entry.wire.is_some() && segment.tuple.protocol == TCP {
            slot.numbers = Some((segment.sequence.wrapping_add(segment.data.len() as u32), segment.acknowledgement));
        }
        let wants_pinhole = slot.is_ready_for_pinhole() && std::mem::take(&mut slot.wants_pinhole);
        let mut datagram = slot.header(if is_beside { BESIDE } else { 0 });
        let inner_len = u32::try_from(packet.len()).ok()?;
        let train = TrainRepr { gso: GsoKind::None, partial_checksum: false, segment_size: 0, inner_len };
        datagram.resize(DATA_HEADER_LEN + TRAIN_HEADER_LEN, 0);
        train.emit(&mut datagram[DATA_HEADER_LEN..]);
        datagram.extend_from_slice(packet);
        Some(Carried { flow, to, datagram, is_beside, wants_pinhole })
    }

    /// An empty DATA with these flags, and where it goes.
    pub(crate) fn mark(&mut self, flow: FlowId, flags: u8) -> Option<(SocketAddr, Vec<u8>)> {
        let slot = self.by_flow.get_mut(&flow)?;
        let to = self.paths.get(&slot.entry.path)?.remote;
        slot.packet_number += 1;
        Some((to, slot.header(flags)))
    }

    /// A bare segment of the flow on its flow ports. Before its time, a later packet of the application asks for it.
    pub(crate) fn pinhole(&mut self, local: IpAddr, flow: FlowId) -> Option<Vec<u8>> {
        let slot = self.by_flow.get_mut(&flow)?;
        if !slot.is_ready_for_pinhole() {
            slot.wants_pinhole = true;
            return None;
        }
        self.bare(local, flow)
    }

    /// The same, whenever.
    pub(crate) fn bare(&self, local: IpAddr, flow: FlowId) -> Option<Vec<u8>> {
        let slot = self.by_flow.get(&flow)?;
        let wire = slot.entry.wire?;
        let remote = self.paths.get(&wire.path)?.remote.ip();
        let tuple = wire_tuple(slot.entry.app.protocol, local, remote, &wire);
        let (sequence, acknowledgement) = slot.numbers.unwrap_or_default();
        let flags = if tuple.protocol == TCP { ACK } else { 0 };
        Some(Segment { tuple, sequence, acknowledgement, flags, data: Vec::new() }.emit())
    }

    /// The application's packet inside a DATA datagram, and what the datagram says of the direct path.
    pub(crate) fn decapsulate<'a>(&mut self, from: SocketAddr, datagram: &'a [u8]) -> Option<Decapsulated<'a>> {
        let data = DataRepr::parse(datagram).ok()?;
        let slot = self.by_flow.get_mut(&data.dst_flow)?;
        let path = self.paths.get(&slot.entry.path)?;
        if path.remote != from {
            return None;
        }
        let is_fence = data.flags & FENCE != 0;
        let is_later = data.packet_number.wrapping_sub(slot.fence).cast_signed() > 0;
        let is_accepting = slot.entry.wire.is_some_and(|wire| wire.accepting);
        let is_back = is_later && is_accepting && data.flags & (BESIDE | FENCE) == 0;
        if is_fence {
            slot.fence = data.packet_number;
        }
        slot.carried.1 += u32::from(!is_fence);
        let wants_pinhole = slot.is_ready_for_pinhole() && std::mem::take(&mut slot.wants_pinhole);
        let inner = datagram.get(DATA_HEADER_LEN + TRAIN_HEADER_LEN..).unwrap_or_default();
        let (flow, tuple) = (slot.entry.flow, slot.entry.app.reversed());
        let is_sending = slot.entry.wire.is_some_and(|wire| wire.sending);
        Some(Decapsulated { flow, tuple, inner, is_fence, is_back, is_sending, wants_pinhole })
    }
}

impl Slot {
    fn is_ready_for_pinhole(&self) -> bool {
        match self.entry.app.protocol {
            TCP => self.numbers.is_some(),
            _ => self.carried.0 >= DATAGRAMS_MIN || self.carried.1 > 0,
        }
    }

    fn header(&self, flags: u8) -> Vec<u8> {
        let data = DataRepr {
            stack: STACK_ENCAP,
            flags,
            dst_flow: self.entry.peer_flow,
            packet_number: self.packet_number,
            index: 0,
            count: 1,
        };
        let mut header = vec![0; DATA_HEADER_LEN];
        data.emit(&mut header);
        header
    }
}

/// What stands on the wire: the hosts' own addresses and the flow ports.
pub(crate) fn wire_tuple(protocol: u8, local: IpAddr, remote: IpAddr, wire: &Wire) -> Tuple {
    Tuple {
        protocol,
        source: SocketAddr::new(local, wire.local_port),
        destination: SocketAddr::new(remote, wire.remote_port),
    }
}
