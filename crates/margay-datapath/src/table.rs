//! The user-space flow cache (DESIGN §3.2, §7): one copy of each entry, found by the application's five-tuple on the way
//! out and by flowID on the way in; and the path records that entries name.
//!
//! Entries lie in blocks that never move or grow, about 110 bytes each; both indexes hold block numbers only.

use core::net::{IpAddr, SocketAddr};
use core::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering};

use hashbrown::{DefaultHashBuilder, HashMap, HashTable};
use margay_core::entry::{Entry, EntryUpdate, Path, PathId, RemoveReason, Wire};
use margay_core::output::DropReason;
use margay_wire::{BESIDE, DataRepr, FENCE, FlowId};
use std::hash::BuildHasher;

use crate::packet::{FlowKey, TCP};

/// Entries per block.
const BLOCK: usize = 256;

/// What a flow has carried. Bytes are those after the transport header; a super-packet counts as its segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowCounters {
    /// From the application to the peer.
    pub egress_bytes: u64,
    /// From the application to the peer.
    pub egress_segments: u64,
    /// From the peer to the application.
    pub ingress_bytes: u64,
    /// From the peer to the application.
    pub ingress_segments: u64,
}

impl core::ops::Add for FlowCounters {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            egress_bytes: self.egress_bytes + other.egress_bytes,
            egress_segments: self.egress_segments + other.egress_segments,
            ingress_bytes: self.ingress_bytes + other.ingress_bytes,
            ingress_segments: self.ingress_segments + other.ingress_segments,
        }
    }
}

/// All that a packet on its way out needs, copied, so that no lock is held while it is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EgressRoute {
    /// The local flow.
    pub flow: FlowId,
    /// What the DATA header names as destination.
    pub peer_flow: FlowId,
    /// This train's packet number, already counted up.
    pub packet_number: u32,
    /// Where it goes.
    pub to: Destination,
    /// The flow is sent direct: only what the kernel's cache left comes this way.
    pub is_beside: bool,
    /// A pinhole with this packet's numbers is wanted.
    pub wants_pinhole: bool,
}

/// What a DATA packet is for its flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IngressRoute {
    /// The five-tuple that the packet gets.
    pub key: FlowKey,
    /// The peer, which sent this flow direct, encapsulates again.
    pub is_back: bool,
    /// This end sends the flow direct.
    pub is_sending: bool,
}

/// A TCP flow's numbers as its application showed them last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpNumbers {
    /// The next sequence number.
    pub sequence: u32,
    /// The acknowledgement.
    pub acknowledgement: u32,
}

/// Where datagrams of a path go now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// The path record.
    pub path: PathId,
    /// The peer's UDP address.
    pub remote: SocketAddr,
    /// The address to send from, where the choice matters.
    pub local: Option<IpAddr>,
    /// Largest UDP payload in bytes.
    pub datagram_max: u16,
}

impl TcpNumbers {
    const fn packed(self) -> u64 {
        (self.sequence as u64) << 32 | self.acknowledgement as u64
    }

    const fn unpacked(packed: u64) -> Self {
        Self { sequence: (packed >> 32) as u32, acknowledgement: packed as u32 }
    }
}

/// Datagrams of the application, beside the first, after which its flow is lifted though none has come back.
const DATAGRAMS_MIN: u64 = 4;

/// One cached flow. Counters are plain atomics: readers of the table count while others read.
struct Slot {
    key: FlowKey,
    occupied: bool,
    active: AtomicBool,
    flow: FlowId,
    peer_flow: FlowId,
    generation: u32,
    path: PathId,
    next_packet: AtomicU64,
    egress_bytes: AtomicU64,
    egress_segments: AtomicU64,
    ingress_bytes: AtomicU64,
    ingress_segments: AtomicU64,
    wire: Option<Wire>,
    /// Packet number of the peer's FENCE: what came before it says nothing.
    fence: AtomicU32,
    /// [`TcpNumbers`], sequence number first; zero while unknown.
    numbers: AtomicU64,
    wants_pinhole: AtomicBool,
}

const VACANT_KEY: FlowKey =
    FlowKey { source: [0; 16], destination: [0; 16], source_port: 0, destination_port: 0, protocol: 0 };

impl Slot {
    const fn vacant() -> Self {
        Self {
            key: VACANT_KEY,
            occupied: false,
            active: AtomicBool::new(false),
            flow: FlowId(0),
            peer_flow: FlowId(0),
            generation: 0,
            path: PathId(0),
            next_packet: AtomicU64::new(0),
            egress_bytes: AtomicU64::new(0),
            egress_segments: AtomicU64::new(0),
            ingress_bytes: AtomicU64::new(0),
            ingress_segments: AtomicU64::new(0),
            wire: None,
            fence: AtomicU32::new(0),
            numbers: AtomicU64::new(0),
            wants_pinhole: AtomicBool::new(false),
        }
    }

    fn mark_active(&self) {
        // Reading first keeps the cache line shared in the common case.
        if !self.active.load(Ordering::Relaxed) {
            self.active.store(true, Ordering::Relaxed);
        }
    }

    /// Whether a pinhole was asked for before its time, which has come; says so once.
    fn takes_pinhole(&self) -> bool {
        self.wants_pinhole.load(Ordering::Relaxed)
            && self.is_ready_for_pinhole()
            && self.wants_pinhole.swap(false, Ordering::Relaxed)
    }

    /// A connection's numbers must be known. A question and its answer, which set-up carries, are over before datagrams could go
    /// direct: only a flow of several is worth the packets that lift it.
    fn is_ready_for_pinhole(&self) -> bool {
        if self.key.protocol == TCP {
            return self.numbers.load(Ordering::Relaxed) != 0;
        }
        let [sent, received] =
            [&self.egress_segments, &self.ingress_segments].map(|count| count.load(Ordering::Relaxed));
        sent >= DATAGRAMS_MIN || received > 0
    }
}

struct PathRecord {
    path: Path,
    /// `path.datagram_max`, or less where the kernel has learned of a narrower link.
    datagram_max: AtomicU16,
}

/// What became of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applied {
    /// The cache now says what the update said.
    Done,
    /// An older generation than the one held, or nothing to remove: ignored.
    Stale,
}

/// The cache. Write access is for updates alone; packets need only read access.
#[derive(Default)]
pub struct Table {
    blocks: Vec<Box<[Slot]>>,
    vacant: Vec<u32>,
    by_key: HashTable<u32>,
    by_flow: HashTable<u32>,
    paths: HashMap<PathId, PathRecord>,
    hasher: DefaultHashBuilder,
    len: usize,
}

impl Table {
    /// Number of entries.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no entry.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Changes the cache as the core says.
    pub fn apply(&mut self, update: EntryUpdate) -> Applied {
        match update {
            EntryUpdate::Path(path) => self.set_path(path),
            // Nothing that packets need.
            EntryUpdate::Show { .. } => Applied::Done,
            EntryUpdate::RemovePath(id) => self.paths.remove(&id).map_or(Applied::Stale, |_| Applied::Done),
            EntryUpdate::Install(entry) => self.install(&entry),
            EntryUpdate::Remove { flow, reason } => self.remove(flow, reason),
        }
    }

    /// The route of a packet that leaves the application, and its counting: `bytes` of payload in `segments`.
    pub fn egress(
        &self,
        key: &FlowKey,
        bytes: usize,
        segments: usize,
        numbers: Option<TcpNumbers>,
    ) -> Option<EgressRoute> {
        let hash = self.hasher.hash_one(key);
        let slot = self.slot(*self.by_key.find(hash, |&index| self.slot(index).key == *key)?);
        let to = self.destination(slot.path)?;
        let packet_number = slot.next_packet.fetch_add(1, Ordering::Relaxed) as u32;
        slot.egress_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        slot.egress_segments.fetch_add(segments as u64, Ordering::Relaxed);
        slot.mark_active();
        if let Some(numbers) = numbers.filter(|_| slot.wire.is_some()) {
            slot.numbers.store(numbers.packed(), Ordering::Relaxed);
        }
        let wants_pinhole = slot.takes_pinhole();
        let is_beside = slot.wire.is_some_and(|wire| wire.sending);
        Some(EgressRoute { flow: slot.flow, peer_flow: slot.peer_flow, packet_number, to, is_beside, wants_pinhole })
    }

    /// The route of a packet of the cache's own, such as a FENCE, that counts for nobody.
    pub fn mark_route(&self, flow: FlowId) -> Option<EgressRoute> {
        let slot = self.find(flow)?;
        let (to, packet_number) =
            (self.destination(slot.path)?, slot.next_packet.fetch_add(1, Ordering::Relaxed) as u32);
        let peer_flow = slot.peer_flow;
        Some(EgressRoute { flow, peer_flow, packet_number, to, is_beside: false, wants_pinhole: false })
    }

    /// The flow's direct path, and a connection's numbers for a pinhole; if it is not the time for one yet, a later packet of the
    /// application will ask for it.
    pub fn pinhole(&self, flow: FlowId) -> Option<(Wire, Option<TcpNumbers>)> {
        let slot = self.find(flow)?;
        let wire = slot.wire?;
        if !slot.is_ready_for_pinhole() {
            slot.wants_pinhole.store(true, Ordering::Relaxed);
            return None;
        }
        let numbers = (slot.key.protocol == TCP).then(|| TcpNumbers::unpacked(slot.numbers.load(Ordering::Relaxed)));
        Some((wire, numbers))
    }

    /// The five-tuple of a flow.
    pub fn key(&self, flow: FlowId) -> Option<FlowKey> {
        self.find(flow).map(|slot| slot.key)
    }

    /// What the kernel's cache is to hold for the flow.
    pub fn wire(&self, flow: FlowId) -> Option<(FlowKey, u32, Wire)> {
        let slot = self.find(flow)?;
        Some((slot.key, slot.generation, slot.wire?))
    }

    /// Every cached flow that has a direct path.
    pub fn wired(&self) -> impl Iterator<Item = FlowId> {
        self.blocks.iter().flatten().filter(|slot| slot.occupied && slot.wire.is_some()).map(|slot| slot.flow)
    }

    /// Takes note of the peer's FENCE.
    pub fn note_fence(&self, flow: FlowId, packet_number: u32) {
        if let Some(slot) = self.find(flow) {
            slot.fence.store(packet_number, Ordering::Relaxed);
        }
    }

    /// The five-tuple that DATA for `flow` gets, if it comes from where the flow's path leads (DESIGN §18).
    /// [`DropReason::UnknownFlow`] is a miss: the core may know the flow.
    pub fn ingress(&self, flow: FlowId, from: SocketAddr, data: &DataRepr) -> Result<IngressRoute, DropReason> {
        let slot = self.find(flow).ok_or(DropReason::UnknownFlow)?;
        let record = self.paths.get(&slot.path).ok_or(DropReason::UnknownFlow)?;
        if record.path.remote.ip() != from.ip() || record.path.remote.port() != from.port() {
            return Err(DropReason::WrongPath);
        }
        slot.mark_active();
        let is_later = data.packet_number.wrapping_sub(slot.fence.load(Ordering::Relaxed)).cast_signed() > 0;
        let is_encapsulating = is_later && data.flags & (BESIDE | FENCE) == 0;
        let is_back = is_encapsulating && slot.wire.is_some_and(|wire| wire.accepting);
        let is_sending = slot.wire.is_some_and(|wire| wire.sending);
        Ok(IngressRoute { key: slot.key.reversed(), is_back, is_sending })
    }

    /// Counts what was given to the application. True if a pinhole was asked for before its time, which has come.
    pub fn count_ingress(&self, flow: FlowId, bytes: usize, segments: usize) -> bool {
        let Some(slot) = self.find(flow) else { return false };
        slot.ingress_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        slot.ingress_segments.fetch_add(segments as u64, Ordering::Relaxed);
        slot.takes_pinhole()
    }

    /// Adds what the kernel's cache had counted.
    pub fn add_counters(&self, flow: FlowId, counted: &FlowCounters) {
        if let Some(slot) = self.find(flow) {
            slot.egress_bytes.fetch_add(counted.egress_bytes, Ordering::Relaxed);
            slot.egress_segments.fetch_add(counted.egress_segments, Ordering::Relaxed);
            slot.ingress_bytes.fetch_add(counted.ingress_bytes, Ordering::Relaxed);
            slot.ingress_segments.fetch_add(counted.ingress_segments, Ordering::Relaxed);
        }
    }

    /// What the flow has carried; `None` when it is not cached.
    pub fn counters(&self, flow: FlowId) -> Option<FlowCounters> {
        self.find(flow).map(|slot| FlowCounters {
            egress_bytes: slot.egress_bytes.load(Ordering::Relaxed),
            egress_segments: slot.egress_segments.load(Ordering::Relaxed),
            ingress_bytes: slot.ingress_bytes.load(Ordering::Relaxed),
            ingress_segments: slot.ingress_segments.load(Ordering::Relaxed),
        })
    }

    /// Where the path leads now.
    pub fn destination(&self, path: PathId) -> Option<Destination> {
        self.paths.get(&path).map(|record| Destination {
            path,
            remote: record.path.remote,
            local: record.path.local,
            datagram_max: record.datagram_max.load(Ordering::Relaxed),
        })
    }

    /// Lowers the path's datagram size to `bytes`, until [`restore_paths`](Self::restore_paths); never raises it.
    pub fn shrink_path(&self, path: PathId, bytes: u16) {
        if let Some(record) = self.paths.get(&path) {
            record.datagram_max.fetch_min(bytes, Ordering::Relaxed);
        }
    }

    /// The same for every path to an address.
    pub fn shrink_paths(&self, remote: IpAddr, bytes: u16) {
        for record in self.paths.values().filter(|record| record.path.remote.ip() == remote) {
            record.datagram_max.fetch_min(bytes, Ordering::Relaxed);
        }
    }

    /// Lets every shrunken path try its full size again: what the kernel learned of a path expires (RFC 1191 §6.3).
    pub fn restore_paths(&self) {
        for record in self.paths.values() {
            record.datagram_max.store(record.path.datagram_max, Ordering::Relaxed);
        }
    }

    /// Number of blocks for [`take_active`](Self::take_active).
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Appends the flows of one block that carried something since the last call for it.
    pub fn take_active(&self, block: usize, flows: &mut Vec<FlowId>) {
        let slots = self.blocks.get(block).map_or(&[][..], |block| block);
        let taken = slots.iter().filter(|slot| slot.occupied && slot.active.swap(false, Ordering::Relaxed));
        flows.extend(taken.map(|slot| slot.flow));
    }

    /// Empties the cache, as an operator or a test may at any time (DESIGN §3.2). Paths stay.
    pub fn clear(&mut self) {
        self.blocks.clear();
        self.vacant.clear();
        self.by_key.clear();
        self.by_flow.clear();
        self.len = 0;
    }

    fn slot(&self, index: u32) -> &Slot {
        // Both indexes hold only numbers of slots that exist, and blocks never shrink without the indexes.
        &self.blocks[index as usize / BLOCK][index as usize % BLOCK]
    }

    fn slot_mut(&mut self, index: u32) -> &mut Slot {
        &mut self.blocks[index as usize / BLOCK][index as usize % BLOCK]
    }

    fn find_index(&self, flow: FlowId) -> Option<u32> {
        let hash = self.hasher.hash_one(flow);
        self.by_flow.find(hash, |&index| self.slot(index).flow == flow).copied()
    }

    fn find(&self, flow: FlowId) -> Option<&Slot> {
        self.find_index(flow).map(|index| self.slot(index))
    }

    fn set_path(&mut self, path: Path) -> Applied {
        let record = self
            .paths
            .entry(path.id)
            .or_insert_with(|| PathRecord { path, datagram_max: AtomicU16::new(path.datagram_max) });
        let learned = *record.datagram_max.get_mut();
        let same_links = record.path.remote == path.remote && record.path.local == path.local;
        record.path = path;
        *record.datagram_max.get_mut() = if same_links { learned.min(path.datagram_max) } else { path.datagram_max };
        Applied::Done
    }

    fn install(&mut self, entry: &Entry) -> Applied {
        let key = FlowKey::from(entry.app);
        if let Some(index) = self.find_index(entry.flow) {
            if self.slot(index).generation > entry.generation {
                return Applied::Stale;
            }
            if self.slot(index).key != key {
                self.unlink_key(index);
                self.displace(&key);
                self.slot_mut(index).key = key;
                self.link_key(index);
            }
            self.fill(index, entry);
            return Applied::Done;
        }
        self.displace(&key);
        let index = self.take_vacant();
        *self.slot_mut(index) = Slot { key, occupied: true, flow: entry.flow, ..Slot::vacant() };
        self.fill(index, entry);
        self.link_key(index);
        self.link_flow(index);
        self.len += 1;
        Applied::Done
    }

    fn fill(&mut self, index: u32, entry: &Entry) {
        let slot = self.slot_mut(index);
        slot.peer_flow = entry.peer_flow;
        slot.generation = entry.generation;
        slot.path = entry.path;
        slot.wire = entry.wire;
    }

    fn remove(&mut self, flow: FlowId, reason: RemoveReason) -> Applied {
        let Some(index) = self.find_index(flow) else { return Applied::Stale };
        tracing::trace!(flow = flow.0, ?reason, "entry removed");
        self.remove_at(index);
        Applied::Done
    }

    /// Two flows never share a five-tuple: a new one takes it from an old one that lingers.
    fn displace(&mut self, key: &FlowKey) {
        let hash = self.hasher.hash_one(key);
        if let Some(&index) = self.by_key.find(hash, |&index| self.slot(index).key == *key) {
            self.remove_at(index);
        }
    }

    fn remove_at(&mut self, index: u32) {
        self.unlink_key(index);
        let hash = self.hasher.hash_one(self.slot(index).flow);
        if let Ok(entry) = self.by_flow.find_entry(hash, |&other| other == index) {
            entry.remove();
        }
        *self.slot_mut(index) = Slot::vacant();
        self.vacant.push(index);
        self.len -= 1;
    }

    fn unlink_key(&mut self, index: u32) {
        let hash = self.hasher.hash_one(self.slot(index).key);
        if let Ok(entry) = self.by_key.find_entry(hash, |&other| other == index) {
            entry.remove();
        }
    }

    fn link_key(&mut self, index: u32) {
        let Self { blocks, by_key, hasher, .. } = self;
        let key = |index: u32| hasher.hash_one(blocks[index as usize / BLOCK][index as usize % BLOCK].key);
        by_key.insert_unique(key(index), index, |&index| key(index));
    }

    fn link_flow(&mut self, index: u32) {
        let Self { blocks, by_flow, hasher, .. } = self;
        let flow = |index: u32| hasher.hash_one(blocks[index as usize / BLOCK][index as usize % BLOCK].flow);
        by_flow.insert_unique(flow(index), index, |&index| flow(index));
    }

    fn take_vacant(&mut self) -> u32 {
        if let Some(index) = self.vacant.pop() {
            return index;
        }
        let first = (self.blocks.len() * BLOCK) as u32;
        self.blocks.push((0..BLOCK).map(|_| Slot::vacant()).collect());
        // Lowest numbers are used first.
        self.vacant.extend((first + 1..first + BLOCK as u32).rev());
        first
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::packet::{TCP, UDP};
    use crate::sample;
    use margay_core::entry::Tuple;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn entry(flow: u32, generation: u32, port: u16) -> Entry {
        let mut app = sample::tuple4(TCP);
        app.source.set_port(port);
        Entry { flow: FlowId(flow), generation, app, peer_flow: FlowId(flow + 1000), path: PathId(1), wire: None }
    }

    fn path(remote: &str, datagram_max: u16) -> Path {
        Path { id: PathId(1), remote: remote.parse().expect("literal"), local: None, datagram_max }
    }

    fn data(packet_number: u32, flags: u8) -> DataRepr {
        DataRepr { stack: 2, flags, dst_flow: FlowId(7), packet_number, index: 0, count: 1 }
    }

    fn table() -> Table {
        let mut table = Table::default();
        table.apply(EntryUpdate::Path(path("10.0.0.2:54324", 1472)));
        table
    }

    #[test]
    fn found_both_ways_and_counted() {
        let mut table = table();
        assert_eq!(table.apply(EntryUpdate::Install(entry(7, 1, 100))), Applied::Done);
        let key = FlowKey::from(entry(7, 1, 100).app);
        let first = table.egress(&key, 10, 1, None).expect("installed");
        let second = table.egress(&key, 20, 2, None).expect("installed");
        assert_eq!((first.packet_number, second.packet_number), (0, 1));
        assert_eq!((first.peer_flow, first.to.datagram_max), (FlowId(1007), 1472));
        let from = "10.0.0.2:54324".parse().expect("literal");
        let route = IngressRoute { key: key.reversed(), is_back: false, is_sending: false };
        assert_eq!(table.ingress(FlowId(7), from, &data(0, 0)), Ok(route));
        table.count_ingress(FlowId(7), 5, 1);
        let counters = FlowCounters { egress_bytes: 30, egress_segments: 3, ingress_bytes: 5, ingress_segments: 1 };
        assert_eq!(table.counters(FlowId(7)), Some(counters));
        assert_eq!(table.egress(&key.reversed(), 1, 1, None), None);
    }

    #[test]
    fn data_from_elsewhere_is_refused() {
        let mut table = table();
        table.apply(EntryUpdate::Install(entry(7, 1, 100)));
        for from in ["10.0.0.3:54324", "10.0.0.2:54325", "[::1]:54324"] {
            assert_eq!(
                table.ingress(FlowId(7), from.parse().expect("literal"), &data(0, 0)),
                Err(DropReason::WrongPath)
            );
        }
        let right = "10.0.0.2:54324".parse().expect("literal");
        assert_eq!(table.ingress(FlowId(8), right, &data(0, 0)), Err(DropReason::UnknownFlow));
    }

    #[test]
    fn older_generations_are_ignored() {
        let mut table = table();
        table.apply(EntryUpdate::Install(entry(7, 5, 100)));
        assert_eq!(table.apply(EntryUpdate::Install(entry(7, 4, 200))), Applied::Stale);
        assert!(table.egress(&FlowKey::from(entry(7, 4, 200).app), 1, 1, None).is_none());
        assert_eq!(table.apply(EntryUpdate::Install(entry(7, 5, 300))), Applied::Done);
        assert!(table.egress(&FlowKey::from(entry(7, 5, 100).app), 1, 1, None).is_none());
        assert!(table.egress(&FlowKey::from(entry(7, 5, 300).app), 1, 1, None).is_some());
        assert_eq!(table.len(), 1);
    }

    #[test]
    fn a_new_flow_takes_the_tuple_of_an_old_one() {
        let mut table = table();
        table.apply(EntryUpdate::Install(entry(7, 1, 100)));
        table.apply(EntryUpdate::Install(entry(8, 1, 100)));
        assert_eq!(table.len(), 1);
        assert_eq!(
            table.egress(&FlowKey::from(entry(8, 1, 100).app), 1, 1, None).map(|route| route.flow),
            Some(FlowId(8))
        );
        assert_eq!(table.counters(FlowId(7)), None);
    }

    #[test]
    fn a_path_swap_moves_every_flow_and_keeps_what_was_learned_only_on_the_same_links() {
        let mut table = table();
        table.apply(EntryUpdate::Install(entry(7, 1, 100)));
        table.shrink_path(PathId(1), 1252);
        table.shrink_path(PathId(1), 1400);
        let size = |table: &Table| table.destination(PathId(1)).map(|to| to.datagram_max);
        assert_eq!(size(&table), Some(1252));
        table.apply(EntryUpdate::Path(path("10.0.0.2:54324", 1472)));
        assert_eq!(size(&table), Some(1252));
        table.apply(EntryUpdate::Path(path("10.9.0.2:54324", 1472)));
        assert_eq!(size(&table), Some(1472));
        let key = FlowKey::from(entry(7, 1, 100).app);
        let remote = table.egress(&key, 1, 1, None).map(|route| route.to.remote.to_string());
        assert_eq!(remote.as_deref(), Some("10.9.0.2:54324"));
    }

    #[test]
    fn activity_is_reported_once() {
        let mut table = table();
        table.apply(EntryUpdate::Install(entry(7, 1, 100)));
        table.apply(EntryUpdate::Install(entry(8, 1, 101)));
        let _ = table.egress(&FlowKey::from(entry(7, 1, 100).app), 1, 1, None);
        let mut flows = Vec::new();
        table.take_active(0, &mut flows);
        assert_eq!(flows, [FlowId(7)]);
        flows.clear();
        table.take_active(0, &mut flows);
        assert!(flows.is_empty());
    }

    #[test]
    fn a_peer_that_encapsulates_again_is_noticed_once_its_fence_has_passed() {
        let mut table = table();
        let wire = Wire { path: PathId(1), local_port: 61_001, remote_port: 61_002, sending: true, accepting: true };
        table.apply(EntryUpdate::Install(Entry { wire: Some(wire), ..entry(7, 1, 100) }));
        let from = "10.0.0.2:54324".parse().expect("literal");
        let is_back = |table: &Table, packet_number, flags| {
            table.ingress(FlowId(7), from, &data(packet_number, flags)).map(|route| route.is_back)
        };
        table.note_fence(FlowId(7), 20);
        assert_eq!(is_back(&table, 19, 0), Ok(false), "sent before the fence");
        assert_eq!(is_back(&table, 21, BESIDE), Ok(false), "too large to go direct");
        assert_eq!(is_back(&table, 21, 0), Ok(true));
        table.apply(EntryUpdate::Install(Entry { wire: Some(Wire { accepting: false, ..wire }), ..entry(7, 2, 100) }));
        assert_eq!(is_back(&table, 22, 0), Ok(false), "known already");
    }

    #[test]
    fn a_pinhole_waits_for_the_applications_numbers() {
        let mut table = table();
        let wire = Wire { path: PathId(1), local_port: 61_001, remote_port: 61_002, sending: false, accepting: false };
        table.apply(EntryUpdate::Install(Entry { wire: Some(wire), ..entry(7, 1, 100) }));
        let key = FlowKey::from(entry(7, 1, 100).app);
        let numbers = TcpNumbers { sequence: 5, acknowledgement: 6 };
        let asks = |table: &Table| table.egress(&key, 1, 1, Some(numbers)).map(|route| route.wants_pinhole);
        assert_eq!(table.pinhole(FlowId(7)), None);
        assert_eq!((asks(&table), asks(&table)), (Some(true), Some(false)));
        assert_eq!(table.pinhole(FlowId(7)), Some((wire, Some(numbers))));
    }

    #[test]
    fn an_entry_is_small() {
        // 800 bytes per flow are for the whole agent; the two indexes add about 20 bytes each at their emptiest.
        assert!(size_of::<Slot>() <= 144, "{}", size_of::<Slot>());
    }

    #[test]
    fn v4_and_v6_tuples_never_meet() {
        assert_ne!(FlowKey::from(sample::tuple4(UDP)), FlowKey::from(sample::tuple6(UDP)));
    }

    proptest! {
        #[test]
        fn like_a_plain_map(steps in proptest::collection::vec((0u8..3, 1u32..40, 0u32..4, 0u16..20), 0..400)) {
            let mut table = table();
            let mut model: BTreeMap<u32, (u32, Tuple)> = BTreeMap::new();
            for (act, flow, generation, port) in steps {
                let new = entry(flow, generation, port);
                if act == 0 {
                    let held = model.remove(&flow).is_some();
                    let done = table.apply(EntryUpdate::Remove { flow: FlowId(flow), reason: RemoveReason::Closed });
                    prop_assert_eq!(done == Applied::Done, held);
                } else if model.get(&flow).is_none_or(|held| held.0 <= generation) {
                    model.retain(|&other, held| other == flow || held.1 != new.app);
                    model.insert(flow, (generation, new.app));
                    prop_assert_eq!(table.apply(EntryUpdate::Install(new)), Applied::Done);
                } else {
                    prop_assert_eq!(table.apply(EntryUpdate::Install(new)), Applied::Stale);
                }
                prop_assert_eq!(table.len(), model.len());
            }
            for port in 0..20 {
                let tuple = entry(0, 0, port).app;
                let expected = model.iter().find(|(_, held)| held.1 == tuple).map(|(&flow, _)| FlowId(flow));
                prop_assert_eq!(table.egress(&FlowKey::from(tuple), 1, 1, None).map(|route| route.flow), expected);
            }
        }
    }
}
