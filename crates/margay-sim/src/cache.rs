//! The simplest flow cache that keeps the contract of `margay_core::entry`: one packet, one DATA chunk. What the
//! agent's own table knows lies here; what the kernel's cache knows, where the host has one, in [`Kernel`].

mod shown;

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use margay_core::chain::{FORWARDED_HOP_LIMIT, OUTSIDE_HOP_LIMIT};
use margay_core::entry::Place;
use margay_core::flow_cache::{DATAGRAMS_MIN, LINGER, SILENCE, UNANSWERED};
use margay_core::loss::FlowCount;
use margay_core::{
    Entry, EntryUpdate, Grant, Instant, KNOCK_WINDOW, PINHOLE_WINDOW, Passage, Path, PathId, PlaceStack, Stack, Survey,
    Taking, Tuple, Wire,
};
use margay_wire::{
    BESIDE, DATA_HEADER_LEN, DataRepr, FENCE, FlowId, GsoKind, REPAIR, STACK_ENCAP, STACK_FEC, STACK_SCTP,
    TRAIN_HEADER_LEN, TrainRepr, change_of_fence, fence_of_change, is_sealed,
};

use crate::kernel::{Ending, Kernel, Unjudged, Wanted};
use crate::nonces::Nonces;
use crate::place_fec::{PlaceFecs, Sent};
use crate::program::{ACK, Segment, TCP};
use crate::seal::{Refused, Seal};
use crate::turn::{Admission, Turns};

/// What the agent's table keeps of a flow.
struct Slot {
    entry: Entry,
    /// Of the next DATA.
    packet_number: u32,
    /// Packet number of the peer's FENCE: what came before it says nothing.
    fence: u32,
    /// How the connection ends, as far as it has passed here.
    ending: Ending,
    /// Next sequence number and acknowledgement, as the application showed them to the agent last.
    numbers: Option<(u32, u32)>,
    wants_pinhole: bool,
    /// Packets of the application, and to it.
    carried: (u32, u32),
    /// When data of a connection was first sent that nothing has come back for.
    unanswered_since: Option<Instant>,
    /// It was told of that, and not of an answer yet.
    is_silence_told: bool,
}

/// Where DATA came to, where that is known, and who sent it.
pub(crate) type Came = (Option<IpAddr>, SocketAddr);

/// An application's packet, encapsulated.
pub(crate) struct Carried {
    pub flow: FlowId,
    pub local: Option<IpAddr>,
    /// Nowhere, while no place is known.
    pub to: Option<SocketAddr>,
    pub datagram: Vec<u8>,
    /// The flow is sent direct, but this packet was not.
    pub is_beside: bool,
    /// A pinhole was wanted, and its numbers are known now.
    pub wants_pinhole: bool,
    /// For how long the connection's data has gone unanswered, where that is too long.
    pub silence: Option<Duration>,
    /// What repairs those before it, and it.
    pub repairs: Vec<Sent>,
}

/// What a DATA datagram is.
pub(crate) struct Decapsulated<'a> {
    pub flow: FlowId,
    /// What the packet shall carry.
    pub tuple: Tuple,
    /// Nothing, or the application's packet.
    pub inner: Cow<'a, [u8]>,
    /// The peer sends direct from now on.
    pub is_fence: bool,
    /// It is the last packet of its stack, by this change.
    pub turns: Option<u32>,
    /// The peer, which sent direct, encapsulates again.
    pub is_back: bool,
    /// This end sends the flow direct.
    pub is_sending: bool,
    /// A pinhole was wanted, and its time has come.
    pub wants_pinhole: bool,
    /// It is for nobody; the core is to know where it is sealed in a way that this host cannot open.
    pub is_refused: Option<Refused>,
    /// It answers data that went unanswered for long.
    pub ends_silence: bool,
}

/// Entries and paths as the core gave them.
pub struct Cache {
    /// The host's first address.
    pub(crate) own: IpAddr,
    /// Packets that had nowhere to go.
    pub void: u64,
    by_tuple: HashMap<Tuple, FlowId>,
    by_flow: HashMap<FlowId, Slot>,
    /// Of flows of which nothing is carried for now.
    suspended: HashMap<FlowId, Slot>,
    paths: HashMap<PathId, Path>,
    /// The next packet number of flows without an entry: while a flow lives no number comes twice.
    numbers: HashMap<FlowId, u32>,
    /// Endings of the peers' that their programs' TCPs have not been seen to take.
    unjudged: BTreeMap<FlowId, Unjudged>,
    /// By path, when data was first sent that nothing has come back for.
    silent_since: HashMap<PathId, Instant>,
    /// Where the peer was before, by path: what it has sent from there is taken for a while.
    former: HashMap<PathId, (SocketAddr, Instant)>,
    /// Sealed flows; nothing forgets them but their end.
    seals: HashMap<FlowId, Seal>,
    /// What is encrypted in the host's world.
    nonces: Nonces,
    /// Flows whose sessions' programs go by others: how their connections end is known of those.
    heirs: HashMap<FlowId, FlowId>,
    /// Places of striped flows that repair what they lose.
    pub(crate) place_fecs: PlaceFecs,
    /// Flows whose peers turn to another stack.
    pub(crate) turns: Turns,
    /// Flows that this end sends by another stack from here on: their last packets of the one before.
    last_packets: Vec<(Option<IpAddr>, SocketAddr, Vec<u8>)>,
    /// Flows that have one stack again, and what has waited of them.
    settled: Vec<(Came, Vec<u8>)>,
    /// DATA that came from where its flow's peer is not.
    pub wrong_path: u64,
    /// DATA that could not be opened, or was not sealed as it should be.
    pub refused: u64,
    /// Of that, what was of another stack than the flow's.
    pub other_stack: u64,
    /// The kernel's cache, where the host has one.
    pub kernel: Option<Kernel>,
    /// Grants that are not over.
    pub grants: HashMap<FlowId, Grant>,
    /// The numbers that follow what a listener has answered last: its own, and its client's.
    pub last_begun: Option<(u32, u32)>,
}

impl Cache {
    pub(crate) fn new(own: IpAddr, nonces: Nonces) -> Self {
        Self {
            own,
            void: 0,
            by_tuple: HashMap::new(),
            by_flow: HashMap::new(),
            suspended: HashMap::new(),
            paths: HashMap::new(),
            numbers: HashMap::new(),
            unjudged: BTreeMap::new(),
            silent_since: HashMap::new(),
            wrong_path: 0,
            former: HashMap::new(),
            seals: HashMap::new(),
            nonces,
            heirs: HashMap::new(),
            place_fecs: PlaceFecs::default(),
            turns: Turns::default(),
            last_packets: Vec::new(),
            settled: Vec::new(),
            refused: 0,
            other_stack: 0,
            kernel: None,
            grants: HashMap::new(),
            last_begun: None,
        }
    }

    /// Whether it has, or has had, an entry of a flow that is not removed.
    pub(crate) fn knows(&self, flow: FlowId) -> bool {
        self.by_flow.contains_key(&flow) || self.suspended.contains_key(&flow)
    }

    pub(crate) fn apply(&mut self, now: Instant, update: EntryUpdate) {
        match update {
            EntryUpdate::Path(path) => self.set_path(now, path),
            EntryUpdate::RemovePath(id) => {
                self.paths.remove(&id);
                self.former.remove(&id);
                self.silent_since.remove(&id);
                self.kernel.iter_mut().for_each(|kernel| kernel.lose_path(now, id));
            }
            // Simulated programs know surrogates, and striped flows take their places in turn. By `fec` and `sctp`
            // nothing is repaired or repeated here. The host answers what is asked about counts.
            EntryUpdate::Show { .. }
            | EntryUpdate::Stripe { .. }
            | EntryUpdate::Count(_)
            | EntryUpdate::Loss { .. } => {}
            EntryUpdate::Begun { flow, next, expected } => {
                self.last_begun = Some((next, expected));
                if let Some(slot) = self.shown_of(flow) {
                    slot.ending.note_begun(next, expected);
                }
            }
            EntryUpdate::Install(entry) | EntryUpdate::Opened(entry) => self.install(now, entry),
            EntryUpdate::Grant(grant) => {
                self.grants.insert(grant.id, *grant);
                if let (Some(kernel), Some(path)) = (&mut self.kernel, self.paths.get(&grant.path)) {
                    kernel.grants.add(*grant, (path.local.unwrap_or(self.own), path.remote.ip()));
                }
            }
            EntryUpdate::StopGrant(id) => {
                if let Some(kernel) = &mut self.kernel {
                    kernel.grants.stop(id);
                }
            }
            EntryUpdate::RemoveGrant(id) => {
                if let (Some(grant), Some(kernel)) = (self.grants.remove(&id), &mut self.kernel) {
                    kernel.reap(grant.first_flow, grant.count, |flow| self.by_flow.contains_key(&flow));
                }
            }
            EntryUpdate::Succession { from, to } => self.succeed(from, to),
            EntryUpdate::Suspend(flow) => self.suspend(now, flow),
            EntryUpdate::Remove { flow, .. } => {
                self.seals.remove(&flow);
                self.numbers.remove(&flow);
                self.suspended.remove(&flow);
                self.pass_on_endings(flow);
                self.turns.end(flow);
                // What the kernel has opened and nobody has told the caches of stays there.
                let Some(slot) = self.by_flow.remove(&flow) else { return };
                self.unlist(&slot.entry.app, flow);
                if let Some(kernel) = &mut self.kernel {
                    kernel.follow(now, flow, None);
                }
            }
        }
    }

    fn set_path(&mut self, now: Instant, path: Path) {
        let before = self.paths.insert(path.id, path);
        if let Some(before) = before.filter(|before| before.remote != path.remote) {
            self.former.insert(path.id, (before.remote, now + LINGER));
        }
        if before.is_some_and(|before| (before.local, before.remote) != (path.local, path.remote)) {
            let on = self.by_flow.values_mut().filter(|slot| slot.entry.path == path.id);
            on.for_each(|slot| slot.unanswered_since = None);
            self.silent_since.remove(&path.id);
        }
        if before != Some(path) {
            let is_on = |slot: &Slot| slot.entry.wire.is_some_and(|wire| wire.path == path.id);
            let on: Vec<_> = self.by_flow.values().filter(|slot| is_on(slot)).map(|slot| slot.entry.flow).collect();
            on.into_iter().for_each(|flow| self.follow(now, flow));
        }
    }

    fn install(&mut self, now: Instant, entry: Entry) {
        let known = self.by_flow.get(&entry.flow).or(self.suspended.get(&entry.flow));
        if known.is_some_and(|known| known.entry.generation > entry.generation) {
            return;
        }
        self.by_flow.extend(self.suspended.remove_entry(&entry.flow));
        let known = self.by_flow.get(&entry.flow);
        let turns = |known: &Slot| known.entry.stacks.sends != entry.stacks.sends && !entry.is_held;
        if known.is_some_and(turns) {
            let last = self.last_packet(entry.flow, entry.stacks.change);
            self.last_packets.extend(last);
        }
        match entry.stacks.takes {
            Taking::Only(_) => self.settled.extend(self.turns.end(entry.flow)),
            Taking::Turning(_) => self.turns.say(now, entry.flow, entry.stacks.change),
            Taking::Ready(_) => {}
        }
        if let Some(keys) = entry.seal
            && self.seals.get(&entry.flow).is_none_or(|known| !known.has(&keys))
        {
            self.seals.insert(entry.flow, Seal::new(keys, self.nonces.clone()));
        }
        let fresh = Slot {
            entry,
            packet_number: self.numbers.remove(&entry.flow).unwrap_or_default(),
            fence: 0,
            ending: Ending::default(),
            numbers: None,
            wants_pinhole: false,
            carried: (0, 0),
            unanswered_since: None,
            is_silence_told: false,
        };
        let slot = self.by_flow.entry(entry.flow).or_insert(fresh);
        let record = |id: PathId| self.paths.get(&id).map(|path| path.remote);
        if let Some(former) = record(slot.entry.path).filter(|former| record(entry.path) != Some(*former)) {
            self.former.insert(entry.path, (former, now + LINGER));
        }
        let before = std::mem::replace(&mut slot.entry, entry);
        slot.unanswered_since = None;
        self.unlist(&before.app, entry.flow);
        if entry.directions.carries_egress() {
            self.displace(&entry.app);
            self.by_tuple.insert(entry.app, entry.flow);
        }
        self.follow(now, entry.flow);
    }

    /// Nothing of a flow is carried until it is installed again; what is known of it stays.
    fn suspend(&mut self, now: Instant, flow: FlowId) {
        if let Some(slot) = self.by_flow.get_mut(&flow) {
            slot.entry.wire = None;
        }
        self.follow(now, flow);
        let Some(slot) = self.by_flow.remove(&flow) else { return };
        self.unlist(&slot.entry.app, flow);
        self.suspended.insert(flow, slot);
    }

    /// Two flows never share a five-tuple: a new one takes it from an old one that lingers.
    fn displace(&mut self, app: &Tuple) {
        let Some(old) = self.by_tuple.remove(app) else { return };
        if let Some(slot) = self.by_flow.remove(&old) {
            self.numbers.insert(old, slot.packet_number);
        }
    }

    /// What an application sends goes by this flow no more, if it did.
    fn unlist(&mut self, app: &Tuple, flow: FlowId) {
        if self.by_tuple.get(app) == Some(&flow) {
            self.by_tuple.remove(app);
        }
    }

    /// The last packet of the stack that a flow has until now.
    fn last_packet(&mut self, flow: FlowId, change: u32) -> Option<(Option<IpAddr>, SocketAddr, Vec<u8>)> {
        let slot = self.by_flow.get_mut(&flow)?;
        let path = self.paths.get(&slot.entry.path).filter(|path| path.passage != Passage::Void)?;
        let mut datagram = slot.header(FENCE);
        if slot.entry.stacks.sends.is_sealed() {
            let header = DataRepr::parse(&datagram).ok()?;
            datagram = self.seals.get_mut(&flow)?.seal(header, &fence_of_change(change));
        } else {
            datagram.extend_from_slice(&fence_of_change(change));
        }
        Some((path.local, path.remote, datagram))
    }

    /// The last packets of stacks that flows of this host have had until now.
    pub(crate) fn take_last_packets(&mut self) -> Vec<(Option<IpAddr>, SocketAddr, Vec<u8>)> {
        std::mem::take(&mut self.last_packets)
    }

    /// What has waited of flows that have one stack again.
    pub(crate) fn take_settled(&mut self) -> Vec<(Came, Vec<u8>)> {
        std::mem::take(&mut self.settled)
    }

    /// Whether what comes from there may be plain, though its flow is sealed. Where it came to is known, or it may have
    /// come by another place of the same peer's address.
    fn is_plain_place(&self, entry: &Entry, came: Came) -> bool {
        let place = came.0.and_then(|_| place_of(&self.paths, entry, came));
        place.is_some_and(|place| place.takes == Some(PlaceStack::Plain))
    }

    /// The place that repairs by which a datagram of a flow has come from there, if it has come by one.
    fn repairing_place(&self, data: &DataRepr, came: Came) -> Option<(FlowId, PathId)> {
        let entry = self.by_flow.get(&data.dst_flow)?.entry;
        let place = place_of(&self.paths, &entry, came).filter(|place| place.takes == Some(PlaceStack::Fec))?;
        Some((entry.flow, place.path))
    }

    /// What a repair brings back, where a datagram is one. `None` elsewhere.
    pub(crate) fn restore(&mut self, came: Came, datagram: &[u8]) -> Option<Vec<Vec<u8>>> {
        let data = DataRepr::parse(datagram).ok().filter(|data| data.stack == STACK_FEC && data.flags & REPAIR != 0)?;
        let place = came.0.and_then(|_| self.repairing_place(&data, came))?;
        Some(self.place_fecs.restore(place, datagram))
    }

    /// A datagram was taken as it came: what can be brought back now.
    pub(crate) fn keep(&mut self, came: Came, datagram: &[u8]) -> Vec<Vec<u8>> {
        let place = DataRepr::parse(datagram).ok().and_then(|data| self.repairing_place(&data, came));
        place.map(|place| self.place_fecs.keep(place, datagram)).unwrap_or_default()
    }

    /// Whether DATA of a flow is taken from there: from where its path leads or led a moment ago, from where the peer
    /// says that it is, or by one of its places.
    fn is_of_peer(&mut self, now: Instant, entry: &Entry, came: Came) -> Option<bool> {
        let path = self.paths.get(&entry.path)?;
        let (_, from) = came;
        if path.remote == from || place_of(&self.paths, entry, came).is_some() {
            self.silent_since.remove(&path.id);
            return Some(true);
        }
        let is_late = self.former.get(&path.id).is_some_and(|(former, until)| *former == from && now < *until);
        Some(path.expected == Some(from) || is_late)
    }

    /// What becomes of a DATA datagram, and of which flow it is. `None` where no entry says.
    pub(crate) fn admit(&mut self, now: Instant, came: Came, datagram: &[u8]) -> Option<(FlowId, Admission)> {
        let data = DataRepr::parse(datagram).ok()?;
        let entry = self.by_flow.get(&data.dst_flow)?.entry;
        if !entry.directions.has_ingress() && !entry.directions.gives_up() {
            return None;
        }
        if !self.is_of_peer(now, &entry, came)? {
            self.wrong_path += 1;
            return Some((data.dst_flow, Admission::Elsewhere));
        }
        let stacks = entry.stacks;
        let is_by_plain_place = data.stack == STACK_ENCAP && self.is_plain_place(&entry, came);
        let stack = match is_by_plain_place {
            true => Some(Stack::Secure),
            false => Stack::of_number(data.stack).filter(|stack| stacks.takes(*stack)),
        };
        let admission = self.turns.admit(now, data.dst_flow, (stacks.takes, stacks.change), stack, (came, datagram));
        self.refused += u64::from(matches!(admission, Admission::Late | Admission::Strange | Admission::Full));
        self.other_stack += u64::from(matches!(admission, Admission::Late | Admission::Strange));
        Some((data.dst_flow, admission))
    }

    /// Brings the kernel's entry of a flow in step with the table's.
    fn follow(&mut self, now: Instant, flow: FlowId) {
        let Some(kernel) = &mut self.kernel else { return };
        let wanted = self.by_flow.get(&flow).and_then(|slot| {
            let wire = slot.entry.wire?;
            let path = self.paths.get(&wire.path)?;
            let between = (path.local.unwrap_or(self.own), path.remote.ip());
            let delta = slot.entry.delta;
            Some(Wanted { app: slot.entry.app, wire, between, is_held: path.passage != Passage::Open, delta })
        });
        let removed = kernel.follow(now, flow, wanted);
        if let (Some(removed), Some(slot)) = (removed, self.by_flow.get_mut(&flow)) {
            slot.ending = slot.ending.after(removed);
        }
    }

    /// Flows of a grant, by their bits.
    fn flows_of(&self, grant: FlowId, flows: u128) -> Vec<(u16, FlowId)> {
        let Some(grant) = self.grants.get(&grant) else { return Vec::new() };
        let wanted = (0..grant.count).filter(|number| flows >> number & 1 != 0);
        wanted.map(|number| (number, FlowId(grant.first_flow.0 + u32::from(number)))).collect()
    }

    /// What the kernel has made of flows of a grant.
    pub(crate) fn survey(&self, grant: FlowId, flows: u128) -> Survey {
        let mut survey = Survey::default();
        let Some(kernel) = &self.kernel else { return survey };
        for (number, flow) in self.flows_of(grant, flows) {
            let (is_answered, is_over) = kernel.survey(flow);
            survey.answered |= u128::from(is_answered) << number;
            survey.over |= u128::from(is_over) << number;
        }
        survey
    }

    /// Has the kernel tell of flows of a grant.
    pub(crate) fn tell_of(&mut self, grant: FlowId, flows: u128) {
        let flows = self.flows_of(grant, flows);
        if let Some(kernel) = &mut self.kernel {
            flows.into_iter().for_each(|(_, flow)| kernel.tell(flow));
        }
    }

    /// The path between two addresses, if it is watched, whatever flow a packet by it is of.
    pub(crate) fn watched(&self, local: IpAddr, remote: IpAddr) -> Option<PathId> {
        let is_it =
            |path: &&Path| path.watched && path.remote.ip() == remote && path.local.unwrap_or(self.own) == local;
        self.paths.values().find(is_it).map(|path| path.id)
    }

    /// A packet of the wire as the program's TCP is given it, and whether it comes to the core instead.
    pub(crate) fn local(&self, flow: FlowId, segment: Segment) -> (Segment, bool) {
        let Some(slot) = self.by_flow.get(&flow) else { return (segment, false) };
        let segment = slot.entry.delta.map_or(segment.clone(), |delta| segment.local(&delta));
        (segment, slot.entry.directions.gives_up())
    }

    /// The five-tuple of a flow.
    pub(crate) fn tuple_of(&self, flow: FlowId) -> Option<Tuple> {
        self.by_flow.get(&flow).map(|slot| slot.entry.app)
    }

    /// Every path record.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.paths.values()
    }

    /// The records that flows name for what goes direct.
    pub fn wire_paths(&self) -> impl Iterator<Item = PathId> {
        self.by_flow.values().filter_map(|slot| slot.entry.wire).map(|wire| wire.path)
    }

    /// Forgets every entry: the next packets miss. Paths stay, and packet numbers.
    pub fn clear(&mut self) {
        self.by_tuple.clear();
        self.numbers.extend(self.by_flow.drain().map(|(flow, slot)| (flow, slot.packet_number)));
        self.clear_kernel();
    }

    /// The kernel's cache forgets everything; the agent's table does not.
    pub fn clear_kernel(&mut self) {
        if let Some(kernel) = &mut self.kernel {
            kernel.clear();
        }
    }

    /// When something that waits is due.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.turns.next_deadline().into_iter().chain(self.place_fecs.next_deadline()).min()
    }

    /// What a flow's datagrams have been counted for.
    pub(crate) fn count(&self, flow: FlowId) -> FlowCount {
        let (sent, received) = self.by_flow.get(&flow).map(|slot| slot.carried).unwrap_or_default();
        FlowCount { sent, received, ..FlowCount::default() }
    }

    /// Datagrams that repairs of places have brought back.
    pub const fn restored(&self) -> u64 {
        self.place_fecs.restored
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
    pub(crate) fn send_direct(&mut self, now: Instant, segment: &Segment, packet: &[u8]) -> Option<(FlowId, Vec<u8>)> {
        if self.is_feigned(segment, packet) {
            return None;
        }
        self.kernel.as_mut()?.egress(now, segment)
    }

    /// Whether a packet is of a flow at a middlebox, which has not forwarded it, or of a named socket, which has not
    /// sent it.
    fn is_feigned(&self, segment: &Segment, packet: &[u8]) -> bool {
        let slot = self.by_tuple.get(&segment.tuple).and_then(|flow| self.by_flow.get(flow));
        let hop_limit = packet[if packet[0] >> 4 == 4 { 8 } else { 7 }];
        slot.is_some_and(|Slot { entry, .. }| {
            (entry.at_middlebox && hop_limit != FORWARDED_HOP_LIMIT)
                || (entry.is_of_named_socket && hop_limit == OUTSIDE_HOP_LIMIT)
        })
    }

    /// A packet of a flow that is sent direct came to the agent. True if the flow has stalled; what the kernel's cache
    /// has lost is put back.
    pub(crate) fn is_stalled(&mut self, now: Instant, flow: FlowId) -> bool {
        let state = self.kernel.as_ref().and_then(|kernel| kernel.is_stalled(flow));
        if state.is_none() {
            self.follow(now, flow);
        }
        state.unwrap_or(false)
    }

    pub(crate) fn encapsulate(&mut self, now: Instant, segment: &Segment, packet: &[u8]) -> Option<Carried> {
        let flow = *self.by_tuple.get(&segment.tuple)?;
        self.by_flow.get(&flow).filter(|slot| !slot.entry.is_held && !self.is_feigned(segment, packet))?;
        self.encapsulate_by(now, flow, segment, packet)
    }

    /// The same by a flow that the core names.
    pub(crate) fn encapsulate_by(
        &mut self,
        now: Instant,
        flow: FlowId,
        segment: &Segment,
        packet: &[u8],
    ) -> Option<Carried> {
        let slot = self.by_flow.get_mut(&flow)?;
        let place = slot.next_place();
        let path = self.paths.get(&place.map_or(slot.entry.path, |place| place.path))?;
        let (local, to) = (path.local, (path.passage != Passage::Void).then_some(path.remote));
        let is_beside = slot.entry.wire.is_some_and(|wire| wire.sending);
        slot.carried.0 += 1;
        // What the core carries of a program's packet has other numbers, where its way has.
        if !slot.entry.directions.gives_up() {
            slot.note_own(segment);
        }
        let wants_pinhole = slot.is_ready_for_pinhole() && std::mem::take(&mut slot.wants_pinhole);
        let is_watched = !segment.data.is_empty() && to.is_some();
        let silence = if is_watched && !(is_beside && path.passage == Passage::Open) {
            let is_silent = is_silent(&mut self.silent_since, path.id, now);
            let unanswered = slot.unanswered_for(now);
            slot.is_silence_told |= unanswered >= UNANSWERED;
            (is_silent || unanswered >= UNANSWERED).then_some(unanswered)
        } else {
            None
        };
        let mut datagram = slot.header(if is_beside { BESIDE } else { 0 });
        let inner_len = u32::try_from(packet.len()).ok()?;
        let train = TrainRepr { gso: GsoKind::None, partial_checksum: false, segment_size: 0, inner_len };
        datagram.resize(DATA_HEADER_LEN + TRAIN_HEADER_LEN, 0);
        train.emit(&mut datagram[DATA_HEADER_LEN..]);
        match &slot.entry.delta {
            Some(delta) => datagram.extend_from_slice(&segment.clone().on_wire(delta).emit()),
            None => datagram.extend_from_slice(packet),
        }
        if place.is_some_and(|place| place.sends == Some(PlaceStack::Plain)) {
            let header = DataRepr::parse(&datagram).ok()?;
            let packet_number = self.seals.get_mut(&flow)?.number();
            DataRepr { flags: 0, packet_number, ..header }.emit(&mut datagram);
        } else if slot.entry.stacks.sends.is_sealed() {
            let header = DataRepr::parse(&datagram).ok()?;
            let header = DataRepr { flags: 0, ..header };
            datagram = self.seals.get_mut(&flow)?.seal(header, &datagram[DATA_HEADER_LEN..]);
        }
        self.void += u64::from(to.is_none());
        let repairing = place.filter(|place| place.sends == Some(PlaceStack::Fec)).zip(to);
        let repairs =
            repairing.map(|(place, to)| self.place_fecs.sent(now, (flow, place.path), &(local, to, datagram.clone())));
        let repairs = repairs.unwrap_or_default();
        Some(Carried { flow, local, to, datagram, is_beside, wants_pinhole, silence, repairs })
    }

    /// An empty DATA with these flags, and where it goes.
    pub(crate) fn mark(&mut self, flow: FlowId, flags: u8) -> Option<(Option<IpAddr>, SocketAddr, Vec<u8>)> {
        let slot = self.by_flow.get_mut(&flow).filter(|slot| slot.entry.stacks.sends == Stack::Plain)?;
        let path = self.paths.get(&slot.entry.path).filter(|path| path.passage != Passage::Void)?;
        Some((path.local, path.remote, slot.header(flags)))
    }

    /// A bare segment of the flow on its flow ports. Before its time, a later packet of the application asks for it.
    pub(crate) fn pinhole(&mut self, flow: FlowId) -> Option<Vec<u8>> {
        let slot = self.by_flow.get_mut(&flow)?;
        if !slot.is_ready_for_pinhole() {
            slot.wants_pinhole = true;
            return None;
        }
        self.bare(flow).map(|packet| with_window(packet, PINHOLE_WINDOW))
    }

    /// A pinhole that answers none.
    pub(crate) fn knock(&self, flow: FlowId) -> Option<Vec<u8>> {
        self.by_flow.get(&flow).filter(|slot| slot.is_ready_for_pinhole())?;
        self.bare(flow).map(|packet| with_window(packet, KNOCK_WINDOW))
    }

    /// Tells the peer that its direct datagrams arrive, where this end sends direct.
    pub(crate) fn one_way_answer(&self, flow: FlowId) -> Option<Vec<u8>> {
        let wire = self.by_flow.get(&flow)?.entry.wire?;
        if wire.sending { self.bare(flow) } else { None }
    }

    fn bare(&self, flow: FlowId) -> Option<Vec<u8>> {
        let slot = self.by_flow.get(&flow)?;
        let wire = slot.entry.wire?;
        let path = self.paths.get(&wire.path)?;
        let tuple = wire_tuple(slot.entry.app.protocol, path.local.unwrap_or(self.own), path.remote.ip(), &wire);
        let (sequence, acknowledgement) = slot.numbers.unwrap_or_default();
        let flags = if tuple.protocol == TCP { ACK } else { 0 };
        let bare = Segment { tuple, sequence, acknowledgement, flags, data: Vec::new(), proof: None, tag: None };
        Some(slot.entry.delta.map_or(bare.clone(), |delta| bare.on_wire(&delta)).emit())
    }

    /// The application's packet inside a DATA datagram, and what the datagram says of the direct path.
    pub(crate) fn decapsulate<'a>(&mut self, came: Came, datagram: &'a [u8]) -> Option<Decapsulated<'a>> {
        let data = DataRepr::parse(datagram).ok()?;
        let is_taken = |slot: &&mut Slot| slot.entry.directions.has_ingress() || slot.entry.directions.gives_up();
        let slot = self.by_flow.get_mut(&data.dst_flow).filter(is_taken)?;
        self.paths.get(&slot.entry.path)?;
        let (flow, tuple) = (slot.entry.flow, slot.entry.app.reversed());
        let place = place_of(&self.paths, &slot.entry, came).filter(|place| place.takes == Some(PlaceStack::Fec));
        let repairing = place.map(|place| (flow, place.path));
        let is_late = !is_sealed(data.stack) && repairing.is_some_and(|at| self.place_fecs.is_late(at, datagram));
        slot.unanswered_since = None;
        let ends_silence = std::mem::take(&mut slot.is_silence_told);
        let opened = match self.seals.get_mut(&flow).filter(|_| is_sealed(data.stack)) {
            Some(seal) => seal.open(&data, datagram).map(Some),
            None if is_sealed(data.stack) => Err(Refused::Dropped),
            None => Ok(None),
        };
        // What a sealed datagram says is inside.
        let plain = Decapsulated {
            flow,
            tuple,
            inner: Cow::Borrowed(&[]),
            is_fence: false,
            turns: None,
            is_back: false,
            is_sending: false,
            wants_pinhole: false,
            is_refused: None,
            ends_silence,
        };
        if !matches!(opened, Ok(None)) {
            self.refused += u64::from(opened.is_err());
            slot.carried.1 += 1;
            let is_refused = opened.as_ref().err().copied();
            let stream = opened.ok().flatten().unwrap_or_default();
            let turns = change_of_fence(&stream).filter(|_| data.flags & FENCE != 0);
            let inner = Cow::Owned(stream.get(TRAIN_HEADER_LEN..).unwrap_or_default().to_vec());
            return Some(Decapsulated { inner, turns, is_refused, ..plain });
        }
        if is_late {
            return Some(plain);
        }
        let turns = change_of_fence(&datagram[DATA_HEADER_LEN..]).filter(|_| data.flags & FENCE != 0);
        if turns.is_some() {
            return Some(Decapsulated { turns, ..plain });
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
        let inner = Cow::Borrowed(datagram.get(DATA_HEADER_LEN + TRAIN_HEADER_LEN..).unwrap_or_default());
        let is_sending = slot.entry.wire.is_some_and(|wire| wire.sending);
        Some(Decapsulated { inner, is_fence, is_back, is_sending, wants_pinhole, ..plain })
    }
}

impl Slot {
    /// Striped flows go by their places in turn.
    fn next_place(&self) -> Option<Place> {
        let all = self.entry.stripe.iter().flat_map(|stripe| stripe.places).flatten();
        let places: Vec<_> = all.filter(|place| place.may_send).collect();
        match places.len() {
            0 => None,
            count => Some(places[self.packet_number as usize % count]),
        }
    }

    /// For how long a connection's data has gone unanswered, where more is sent now: nobody need answer a datagram.
    fn unanswered_for(&mut self, now: Instant) -> Duration {
        match self.entry.app.protocol {
            TCP => now.since(*self.unanswered_since.get_or_insert(now)),
            _ => Duration::ZERO,
        }
    }

    fn is_ready_for_pinhole(&self) -> bool {
        match self.entry.app.protocol {
            TCP => self.numbers.is_some(),
            _ => self.carried.0 >= DATAGRAMS_MIN || self.carried.1 > 0,
        }
    }

    /// The header of the next DATA.
    fn header(&mut self, flags: u8) -> Vec<u8> {
        let packet_number = self.packet_number;
        self.packet_number = packet_number.wrapping_add(1);
        let data = DataRepr {
            stack: match self.entry.stacks.sends {
                Stack::Fec | Stack::SecureFec => STACK_FEC,
                Stack::Sctp | Stack::SecureSctp => STACK_SCTP,
                Stack::Plain | Stack::Secure => STACK_ENCAP,
            },
            flags,
            dst_flow: self.entry.peer_flow,
            packet_number,
            index: 0,
            count: 1,
        };
        let mut header = vec![0; DATA_HEADER_LEN];
        data.emit(&mut header);
        header
    }
}

/// The place of a flow by which a datagram has come.
fn place_of(paths: &HashMap<PathId, Path>, entry: &Entry, (local, from): Came) -> Option<Place> {
    let mut places = entry.stripe.iter().flat_map(|stripe| stripe.places).flatten();
    let is_it = |path: &Path| path.remote == from && (local.is_none() || path.local == local);
    places.find(|place| paths.get(&place.path).is_some_and(is_it))
}

/// Takes note of data that goes by a path. True where nothing has come back for too long; then the wait begins anew.
fn is_silent(since: &mut HashMap<PathId, Instant>, path: PathId, now: Instant) -> bool {
    let began = *since.entry(path).or_insert(now);
    let is_silent = now.since(began) > SILENCE;
    if is_silent {
        since.insert(path, now);
    }
    is_silent
}

/// What stands on the wire: the hosts' own addresses and the flow ports.
pub(crate) fn wire_tuple(protocol: u8, local: IpAddr, remote: IpAddr, wire: &Wire) -> Tuple {
    Tuple {
        protocol,
        source: SocketAddr::new(local, wire.local_port),
        destination: SocketAddr::new(remote, wire.remote_port),
    }
}

/// A bare TCP segment with another window; a datagram has none.
fn with_window(mut packet: Vec<u8>, window: u16) -> Vec<u8> {
    let at = if packet[0] >> 4 == 4 { 34 } else { 54 };
    if let Some(bytes) = packet.get_mut(at..at + 2) {
        bytes.copy_from_slice(&window.to_be_bytes());
    }
    packet
}
