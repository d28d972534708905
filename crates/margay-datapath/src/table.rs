//! The user-space flow cache (DESIGN §3.2, §7): one copy of each entry, found by the application's five-tuple on the
//! way out and by flowID on the way in; and the path records that entries name.
//!
//! Entries lie in blocks that never move or grow, about 110 bytes each; both indexes hold block numbers only.

use core::net::{IpAddr, SocketAddr};
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use hashbrown::{DefaultHashBuilder, HashMap, HashTable};
use margay_core::delta::Translations;
use margay_core::entry::{Directions, Entry, EntryUpdate, FlowCounters, Passage, Path, PathId, RemoveReason, Wire};
use margay_core::fair_table::Peer;
use margay_core::flow_cache::{DATAGRAMS_MIN, LINGER, SILENCE, UNANSWERED};
use margay_core::time::Instant;
use margay_core::{DropReason, SealKeys, Stack, Stacks};
use margay_wire::{BESIDE, DataRepr, FENCE, FlowId, REPAIR, STACK_ENCAP, STACK_FEC};
use std::hash::BuildHasher;
use std::sync::Arc;
use std::time::Duration;

use crate::clock;
pub use crate::connection::{Connection, TcpNumbers};
use crate::connection::{Ending, Shown};
use crate::held_bytes::HeldBytes;
use crate::order::Watched;
use crate::packet::{FlowKey, TCP};
use crate::seal::Seal;
use crate::striped::Stripe;
pub use crate::table::opening::Origin;
use crate::table::opening::Sender;
use crate::table::repeating::{KeptSctps, passes_turn};
pub use crate::table::route::{Destination, EgressRoute, IngressRoute, Recipient, Wired};
pub use crate::table::stacks::LastPacket;
use crate::table::stacks::{KeptFecs, Sends};
use crate::turning::Turn;

/// Entries per block.
const BLOCK: usize = 256;

/// One cached flow. Counters are plain atomics: readers of the table count while others read.
struct Slot {
    key: FlowKey,
    occupied: bool,
    active: AtomicBool,
    flow: FlowId,
    peer_flow: FlowId,
    generation: u32,
    path: PathId,
    /// Which of its packets are carried. One without the application's is not found by its five-tuple.
    directions: Directions,
    /// What of it is left to the core ([`opening`]).
    left_to_core: AtomicU8,
    /// Whose packets its own are: the core is given all others.
    sender: Sender,
    next_packet: AtomicU64,
    egress_bytes: AtomicU64,
    egress_segments: AtomicU64,
    ingress_bytes: AtomicU64,
    ingress_segments: AtomicU64,
    wire: Option<Wire>,
    /// Packet number of the peer's FENCE: what came before it says nothing.
    fence: AtomicU32,
    /// Of the application.
    numbers: Shown,
    /// Of the peer, as it sent them encapsulated.
    peer_numbers: Shown,
    ending: Ending,
    /// Payload of the application's largest segment, in bytes.
    segment: AtomicU16,
    wants_pinhole: AtomicBool,
    /// Where any of it is sent or taken sealed.
    seal: Option<Arc<Seal>>,
    /// As the entry says. By which stack it is sent now says the next one.
    stacks: Stacks,
    sends: Sends,
    /// When data of a connection was first sent encapsulated that nothing has come back for, in microseconds; zero: it
    /// has.
    unanswered_since: AtomicU64,
    /// The core was told that it goes unanswered, and not of an answer yet. Nothing but an answer ends it: what an
    /// update of the entry forgets, the core still has in mind.
    is_silence_told: AtomicBool,
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
            directions: Directions::Both,
            left_to_core: AtomicU8::new(opening::NOTHING),
            sender: Sender::Anybody,
            next_packet: AtomicU64::new(0),
            egress_bytes: AtomicU64::new(0),
            egress_segments: AtomicU64::new(0),
            ingress_bytes: AtomicU64::new(0),
            ingress_segments: AtomicU64::new(0),
            wire: None,
            fence: AtomicU32::new(0),
            numbers: Shown::new(),
            peer_numbers: Shown::new(),
            ending: Ending::new(),
            segment: AtomicU16::new(0),
            wants_pinhole: AtomicBool::new(false),
            seal: None,
            stacks: Stacks::only(Stack::Plain),
            sends: Sends::new(Stack::Plain),
            unanswered_since: AtomicU64::new(0),
            is_silence_told: AtomicBool::new(false),
        }
    }

    /// Takes note of a segment of the application, by the bytes of its payload.
    fn note_segment(&self, bytes: impl TryInto<u16>) {
        self.segment.fetch_max(bytes.try_into().unwrap_or(u16::MAX), Ordering::Relaxed);
    }

    /// Takes note of data that was sent, and says for how long there has been no answer: nobody need answer a datagram.
    fn unanswered_for(&self, not_before: u64) -> Duration {
        if self.key.protocol != TCP {
            return Duration::ZERO;
        }
        let now = clock::now().micros();
        let since = self.unanswered_since.load(Ordering::Relaxed).max(not_before);
        if since <= not_before {
            self.unanswered_since.store(now, Ordering::Relaxed);
            return Duration::ZERO;
        }
        Duration::from_micros(now.saturating_sub(since))
    }

    /// Takes note of an answer. True if the core waits for one.
    fn note_answer(&self) -> bool {
        if self.unanswered_since.load(Ordering::Relaxed) != 0 {
            self.unanswered_since.store(0, Ordering::Relaxed);
        }
        // Reading first keeps the cache line shared in the common case.
        self.is_silence_told.load(Ordering::Relaxed) && self.is_silence_told.swap(false, Ordering::Relaxed)
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

    /// A connection's numbers must be known. A question and its answer, which set-up carries, are over before datagrams
    /// could go direct: only a flow of several is worth the packets that lift it.
    fn is_ready_for_pinhole(&self) -> bool {
        if self.key.protocol == TCP {
            return self.numbers.numbers().is_some();
        }
        let [sent, received] =
            [&self.egress_segments, &self.ingress_segments].map(|count| count.load(Ordering::Relaxed));
        sent >= DATAGRAMS_MIN.into() || received > 0
    }
}

struct PathRecord {
    path: Path,
    /// `path.datagram_max`, or less where the kernel has learned of a narrower link.
    datagram_max: AtomicU16,
    /// Where the peer was before, and until when what was on its way from there is taken.
    former: Option<(SocketAddr, Instant)>,
    /// When data was first sent that nothing has come back for, in microseconds; zero: it has.
    unanswered_since: AtomicU64,
    /// Since when it is between these addresses, in microseconds.
    placed: u64,
    /// When it was last said that something of another stack has come by it, in microseconds.
    complained_us: AtomicU64,
}

impl PathRecord {
    /// Takes note of data that was sent. True where nothing has come back for too long; then the wait begins anew.
    fn is_silent(&self) -> bool {
        let since = self.unanswered_since.load(Ordering::Relaxed);
        let now = clock::now().micros();
        if since != 0 && u128::from(now.saturating_sub(since)) <= SILENCE.as_micros() {
            return false;
        }
        self.unanswered_since.store(now, Ordering::Relaxed);
        since != 0
    }
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
    /// The next packet number of flows without an entry. While a flow lives no number comes twice: the other end puts
    /// trains together by it, and may still wait for the rest of an old one.
    numbers: HashMap<FlowId, u64>,
    /// Flows of which nothing is carried for now ([`suspending`]).
    suspended: HashMap<FlowId, Slot>,
    /// What sealed flows are sealed with. It outlives their entries, since no number may come twice, here or there.
    seals: HashMap<FlowId, Arc<Seal>>,
    /// What numbers and repairs flows that go by `fec`. It outlives their entries, since numbers go on.
    fecs: HashMap<FlowId, KeptFecs>,
    /// What repeats flows that go by `sctp`, and a while longer.
    sctps: HashMap<FlowId, KeptSctps>,
    /// Flows whose peers turn to another stack. It outlives their entries, since the FENCE comes once.
    turns: HashMap<FlowId, Arc<Turn>>,
    /// What waits of all flows, or is kept to repair them.
    held_bytes: HeldBytes,
    /// Where striped flows go. It outlives their entries, since what is known of places does.
    stripes: HashMap<FlowId, Arc<Stripe>>,
    /// In which order flows of datagrams arrive, whose loss is measured.
    watched: HashMap<FlowId, Watched>,
    /// Flows whose sessions' programs go by others: what is shown of their connections counts for those.
    heirs: HashMap<FlowId, FlowId>,
    /// What becomes of the numbers of flows whose entries say that they differ on the wire.
    deltas: HashMap<FlowId, Translations>,
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
            // Nothing that packets here need.
            EntryUpdate::Show { .. }
            | EntryUpdate::Count(_)
            | EntryUpdate::Loss { .. }
            | EntryUpdate::Grant(_)
            | EntryUpdate::StopGrant(_)
            | EntryUpdate::RemoveGrant(_) => Applied::Done,
            EntryUpdate::Stripe { flow, news } => self.stripes.get(&flow).map_or(Applied::Stale, |stripe| {
                stripe.note(news);
                Applied::Done
            }),
            EntryUpdate::RemovePath(id) => self.paths.remove(&id).map_or(Applied::Stale, |_| Applied::Done),
            EntryUpdate::Install(entry) | EntryUpdate::Opened(entry) => self.install(&entry),
            EntryUpdate::Begun { flow, next, expected } => {
                self.note_begun(flow, next, expected);
                Applied::Done
            }
            EntryUpdate::Succession { from, to } => self.succeed(from, to),
            EntryUpdate::Suspend(flow) => self.suspend(flow),
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
        origin: Origin,
    ) -> Option<EgressRoute> {
        let hash = self.hasher.hash_one(key);
        let slot = self.slot(*self.by_key.find(hash, |&index| self.slot(index).key == *key)?);
        if slot.is_left_to_core(origin) {
            return None;
        }
        self.egress_of(slot, bytes, segments, numbers)
    }

    /// The same of a packet that the core carries by a flow, whatever its five-tuple leads to.
    pub fn egress_by(
        &self,
        flow: FlowId,
        bytes: usize,
        segments: usize,
        numbers: Option<TcpNumbers>,
    ) -> Option<EgressRoute> {
        self.egress_of(self.find(flow)?, bytes, segments, numbers)
    }

    fn egress_of(
        &self,
        slot: &Slot,
        bytes: usize,
        segments: usize,
        numbers: Option<TcpNumbers>,
    ) -> Option<EgressRoute> {
        let to = self.destination(slot.path)?;
        let stack = slot.sends.now();
        let seal = if stack.is_sealed() { Some(slot.seal.clone()?) } else { None };
        let packet_number = slot.next_packet.fetch_add(1, Ordering::Relaxed) as u32;
        slot.egress_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        slot.egress_segments.fetch_add(segments as u64, Ordering::Relaxed);
        slot.mark_active();
        if numbers.is_some() {
            slot.note_segment(bytes / segments.max(1));
        }
        // What the core carries of a program's packet has other numbers, where its way has.
        let takes_end = numbers.filter(|_| !slot.directions.gives_up()).is_some_and(|numbers| slot.note_own(numbers));
        let wants_pinhole = slot.takes_pinhole();
        let is_beside = slot.wire.is_some_and(|wire| wire.sending);
        let silence = if bytes > 0 && !to.is_void { self.silence_of(slot, is_beside) } else { None };
        let flow = slot.flow;
        let peer_flow = slot.peer_flow;
        let stripe = self.stripe_of(slot);
        let delta = self.delta(flow).map(|delta| delta.egress);
        let fec = if stack.repairs() { self.kept_fec(flow, stack) } else { None };
        let sctp = if stack.repeats() { self.sctp_of(flow, stack) } else { None };
        Some(EgressRoute {
            flow,
            peer_flow,
            packet_number,
            to,
            is_beside,
            wants_pinhole,
            takes_end,
            silence,
            seal,
            fec,
            sctp,
            stripe,
            delta,
        })
    }

    /// Takes note of data that goes encapsulated.
    fn silence_of(&self, slot: &Slot, is_beside: bool) -> Option<Duration> {
        let record = self.paths.get(&slot.path)?;
        // What goes direct has its own watch.
        if is_beside && record.path.passage == Passage::Open {
            return None;
        }
        let (is_silent, unanswered) = (record.is_silent(), slot.unanswered_for(record.placed));
        if unanswered >= UNANSWERED && !slot.is_silence_told.load(Ordering::Relaxed) {
            slot.is_silence_told.store(true, Ordering::Relaxed);
        }
        (is_silent || unanswered >= UNANSWERED).then_some(unanswered)
    }

    /// The route of a packet of the cache's own, such as a FENCE, that counts for nobody. Only plain flows have one.
    pub fn mark_route(&self, flow: FlowId) -> Option<EgressRoute> {
        self.bare_route(self.find(flow).filter(|slot| slot.sends.now() == Stack::Plain)?)
    }

    fn bare_route(&self, slot: &Slot) -> Option<EgressRoute> {
        let (to, packet_number) =
            (self.destination(slot.path)?, slot.next_packet.fetch_add(1, Ordering::Relaxed) as u32);
        let flow = slot.flow;
        let peer_flow = slot.peer_flow;
        Some(EgressRoute {
            flow,
            peer_flow,
            packet_number,
            to,
            is_beside: false,
            wants_pinhole: false,
            takes_end: false,
            silence: None,
            seal: None,
            fec: None,
            sctp: None,
            stripe: None,
            delta: None,
        })
    }

    /// The flow's direct path, and a connection's numbers for a pinhole; if it is not the time for one yet, a later
    /// packet of the application will ask for it.
    pub fn pinhole(&self, flow: FlowId) -> Option<(Wire, Option<TcpNumbers>)> {
        let found = self.knock(flow);
        if found.is_none()
            && let Some(slot) = self.find(flow).filter(|slot| slot.wire.is_some())
        {
            slot.wants_pinhole.store(true, Ordering::Relaxed);
        }
        found
    }

    /// The same, if it is the time. The numbers are those of the wire.
    pub fn knock(&self, flow: FlowId) -> Option<(Wire, Option<TcpNumbers>)> {
        let slot = self.find(flow).filter(|slot| slot.is_ready_for_pinhole())?;
        let wire = slot.wire?;
        let numbers = slot.numbers.numbers().filter(|_| slot.key.protocol == TCP);
        let numbers = numbers.map(|numbers| match self.delta(flow) {
            None => numbers,
            Some(delta) => numbers.translated(&delta.egress),
        });
        Some((wire, numbers))
    }

    /// The five-tuple of a flow.
    pub fn key(&self, flow: FlowId) -> Option<FlowKey> {
        self.find(flow).map(|slot| slot.key)
    }

    /// What the kernel's cache is to hold for the flow.
    pub fn wire(&self, flow: FlowId) -> Option<Wired> {
        let slot = self.find(flow)?;
        let delta = self.delta(flow).copied();
        let Slot { key, generation, sender, .. } = *slot;
        let (at_middlebox, is_of_named_socket) = (sender == Sender::Middlebox, sender == Sender::NamedSocket);
        Some(Wired { app: key, generation, wire: slot.wire?, at_middlebox, is_of_named_socket, delta })
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
    pub fn ingress(
        &self,
        flow: FlowId,
        (local, from): (Option<IpAddr>, SocketAddr),
        data: &DataRepr,
    ) -> Result<IngressRoute, DropReason> {
        let is_taken = |slot: &&Slot| slot.directions.has_ingress() || slot.directions.gives_up();
        let slot = self.find(flow).filter(is_taken).ok_or(DropReason::UnknownFlow)?;
        let record = self.paths.get(&slot.path).ok_or(DropReason::UnknownFlow)?;
        let is_same = |at: SocketAddr| (at.ip(), at.port()) == (from.ip(), from.port());
        let is_late = |(at, until): (SocketAddr, Instant)| is_same(at) && clock::now() < until;
        let stripe = self.stripe_of(slot).map(|stripe| {
            let place = self.place(&stripe, local, &is_same);
            (stripe, place)
        });
        if is_same(record.path.remote) || matches!(stripe, Some((_, Some(_)))) {
            record.unanswered_since.store(0, Ordering::Relaxed);
        } else if !record.path.expected.is_some_and(is_same) && !record.former.is_some_and(is_late) {
            return Err(DropReason::WrongPath);
        }
        let place = stripe.as_ref().and_then(|(stripe, place)| Some((stripe, (*place)?)));
        // Where it came to is known, or it may have come by another place of the same peer's address.
        let is_of_place = data.stack == STACK_ENCAP && local.is_some();
        let by_plain_place = is_of_place && place.is_some_and(|(stripe, at)| stripe.takes_plain(at));
        let is_of_repair = data.stack == STACK_FEC && data.flags & REPAIR != 0 && local.is_some();
        let is_repair = is_of_repair && place.is_some_and(|(stripe, at)| stripe.takes_fec(at));
        // What a repair brings back is looked at as if it had come itself.
        let is_bare = by_plain_place || is_repair;
        let admit = || slot.admit(data).or_else(|refused| self.admit_late(slot, data).ok_or(refused));
        let (stack, seal) = if is_bare { (Stack::Plain, None) } else { admit()? };
        let fec = if stack.repairs() { Some(self.fec_of(flow, stack).ok_or(DropReason::OtherStack)?) } else { None };
        let sctp = if stack.repeats() { Some(self.sctp_of(flow, stack).ok_or(DropReason::OtherStack)?) } else { None };
        let turning = if by_plain_place { Stack::Secure } else { stack };
        let turn = self
            .turn_of(slot)
            .filter(|turn| !passes_turn(stack, data, slot.stacks.before, turn))
            .map(|turn| (turn, turning));
        slot.mark_active();
        let ends_silence = slot.note_answer();
        let is_later = data.packet_number.wrapping_sub(slot.fence.load(Ordering::Relaxed)).cast_signed() > 0;
        let is_encapsulating = is_later && data.flags & (BESIDE | FENCE) == 0;
        let is_back = is_encapsulating && slot.wire.is_some_and(|wire| wire.accepting);
        let is_sending = slot.wire.is_some_and(|wire| wire.sending);
        let to = self.recipient_of(slot);
        let is_opening = slot.is_opening();
        let gives_up = slot.directions.gives_up();
        Ok(IngressRoute {
            to,
            gives_up,
            is_back,
            is_sending,
            seal,
            fec,
            sctp,
            turn,
            ends_silence,
            is_opening,
            stripe,
            by_plain_place,
            is_repair,
        })
    }

    /// Counts what was given to the application. True if a pinhole was asked for before its time, which has come.
    pub fn count_ingress(&self, flow: FlowId, bytes: usize, segments: usize) -> bool {
        let Some(slot) = self.find(flow) else { return false };
        slot.ingress_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        slot.ingress_segments.fetch_add(segments as u64, Ordering::Relaxed);
        slot.takes_pinhole()
    }

    /// What the flow has carried; `None` when it is not cached.
    pub fn counters(&self, flow: FlowId) -> Option<FlowCounters> {
        self.find(flow).or_else(|| self.suspended.get(&flow)).map(|slot| FlowCounters {
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
            is_void: record.path.passage == Passage::Void,
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

    /// Empties the cache, as an operator or a test may at any time (DESIGN §3.2). Paths stay, and packet numbers.
    pub fn clear(&mut self) {
        for slot in self.blocks.iter_mut().flatten().filter(|slot| slot.occupied) {
            self.numbers.insert(slot.flow, *slot.next_packet.get_mut());
        }
        self.blocks.clear();
        self.vacant.clear();
        self.by_key.clear();
        self.by_flow.clear();
        self.deltas.clear();
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
        let record = self.paths.entry(path.id).or_insert_with(|| PathRecord {
            path,
            datagram_max: AtomicU16::new(path.datagram_max),
            former: None,
            unanswered_since: AtomicU64::new(0),
            placed: 0,
            complained_us: AtomicU64::new(0),
        });
        let learned = *record.datagram_max.get_mut();
        let same_links = record.path.remote == path.remote && record.path.local == path.local;
        if !same_links {
            *record.unanswered_since.get_mut() = 0;
            record.placed = clock::now().micros();
        }
        if record.path.remote != path.remote {
            record.former = Some((record.path.remote, clock::now() + LINGER));
        }
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
            let is_linked = self.slot(index).directions.carries_egress();
            if self.slot(index).key != key || is_linked != entry.directions.carries_egress() {
                self.unlink_key(index);
                self.slot_mut(index).key = key;
                self.link_as(index, entry.directions);
            }
            self.fill(index, entry);
            return Applied::Done;
        }
        if self.suspended.get(&entry.flow).is_some_and(|slot| slot.generation > entry.generation) {
            return Applied::Stale;
        }
        let slot = self.suspended.remove(&entry.flow).unwrap_or_else(|| {
            let next_packet = self.numbers.remove(&entry.flow).unwrap_or_default().into();
            let sends = Sends::new(entry.stacks.sends);
            let left_to_core = opening::of_new(key.protocol);
            Slot { occupied: true, flow: entry.flow, next_packet, sends, left_to_core, ..Slot::vacant() }
        });
        let index = self.take_vacant();
        *self.slot_mut(index) = Slot { key, ..slot };
        self.fill(index, entry);
        self.link_as(index, entry.directions);
        self.link_flow(index);
        self.len += 1;
        Applied::Done
    }

    /// Has an entry found by its five-tuple, where it carries what the application sends.
    fn link_as(&mut self, index: u32, directions: Directions) {
        if directions.carries_egress() {
            let key = self.slot(index).key;
            self.displace(&key);
            self.link_key(index);
        }
    }

    fn fill(&mut self, index: u32, entry: &Entry) {
        let seal = entry.seal.as_ref().map(|keys| self.seal(entry.flow, keys));
        let peer = self.paths.get(&entry.path).map_or(Peer::Own, |record| record.path.peer);
        self.follow_stripe(entry, peer);
        self.follow_delta(entry);
        self.follow_turn(entry.flow, entry.stacks.takes, entry.stacks.change, peer);
        // Until it is told that the flow is turned, it is sent as it was.
        let sends = self.slot(index).sends.last();
        let last = if sends.is_sealed() { self.seals.get(&entry.flow).cloned() } else { None };
        self.follow_fec(entry.flow, entry.stacks, sends, peer);
        self.follow_sctp(entry.flow, entry.stacks, sends);
        self.linger(self.slot(index).path, entry.path);
        let slot = self.slot_mut(index);
        slot.seal = seal.or(last);
        slot.stacks = entry.stacks;
        slot.directions = entry.directions;
        slot.sender = Sender::of(entry);
        slot.peer_flow = entry.peer_flow;
        slot.generation = entry.generation;
        // What was sent one way may have been answered the other way.
        *slot.unanswered_since.get_mut() = 0;
        slot.path = entry.path;
        slot.wire = entry.wire;
        let was_held = slot.follow_hold(entry.is_held);
        if entry.is_held {
            // Nothing of it has been sent by this path: there is no last packet of the stack before.
            slot.sends.set(entry.stacks.sends);
        } else if was_held {
            // Not one packet more goes by the stack before but its last one, which may come behind those of the next.
            slot.sends.set_owing(entry.stacks.sends);
        }
    }

    fn seal(&mut self, flow: FlowId, keys: &SealKeys) -> Arc<Seal> {
        if let Some(known) = self.seals.get(&flow).filter(|known| known.has(keys)) {
            return Arc::clone(known);
        }
        let fresh = Arc::new(Seal::new(keys));
        self.seals.insert(flow, Arc::clone(&fresh));
        fresh
    }

    fn remove(&mut self, flow: FlowId, reason: RemoveReason) -> Applied {
        self.seals.remove(&flow);
        self.fecs.remove(&flow);
        self.sctps.remove(&flow);
        self.stripes.remove(&flow);
        self.turns.remove(&flow);
        self.watched.remove(&flow);
        self.numbers.remove(&flow);
        self.heirs.remove(&flow);
        let was_suspended = self.suspended.remove(&flow).is_some();
        let Some(index) = self.find_index(flow) else {
            return if was_suspended { Applied::Done } else { Applied::Stale };
        };
        tracing::trace!(flow = flow.0, ?reason, "entry removed");
        self.remove_at(index);
        Applied::Done
    }

    /// Two flows never share a five-tuple: a new one takes it from an old one that lingers.
    fn displace(&mut self, key: &FlowKey) {
        let hash = self.hasher.hash_one(key);
        if let Some(&index) = self.by_key.find(hash, |&index| self.slot(index).key == *key) {
            let slot = self.slot_mut(index);
            let (flow, next) = (slot.flow, *slot.next_packet.get_mut());
            self.numbers.insert(flow, next);
            self.remove_at(index);
        }
    }

    fn remove_at(&mut self, index: u32) -> Slot {
        self.unlink_key(index);
        let hash = self.hasher.hash_one(self.slot(index).flow);
        if let Ok(entry) = self.by_flow.find_entry(hash, |&other| other == index) {
            entry.remove();
        }
        let flow = self.slot(index).flow;
        self.deltas.remove(&flow);
        self.vacant.push(index);
        self.len -= 1;
        core::mem::replace(self.slot_mut(index), Slot::vacant())
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

mod delta;
mod opening;
mod order;
mod repeating;
mod route;
mod shown;
mod stacks;
mod stripes;
mod suspending;

#[cfg(test)]
#[path = "table_test.rs"]
mod test;
