//! The direct path: what the kernel's flow cache holds, kept in step with the core's entries (DESIGN §2, §7, §18).
//!
//! The user-space table says for every flow whether it is to be direct; this module carries that to the kernel's cache
//! where there is one, and hears from it. Without a cache every flow is encapsulated, and nothing else changes.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use margay_core::entry::{FlowCounters, Grant, Passage, Path, PathId, Survey, Wire};
use margay_core::flow_cache::STALL;
use margay_core::{Direction, DropReason, Tuple};
use margay_wire::FlowId;
use parking_lot::{Mutex, RwLock};

use crate::due_flows::DueFlows;
use crate::kernel::{KernelCache, WireFlow, WirePath, WireState};
use crate::pinhole::{self, Segment};
use crate::table::{Table, TcpNumbers, Wired};
use crate::tun::QUEUE_PACKETS;

/// Where packets to an address leave this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// The address that they leave with.
    pub local: IpAddr,
    /// The neighbour that they are handed to: a gateway, or the remote end itself.
    pub next_hop: IpAddr,
    /// Index of the interface.
    pub ifindex: u32,
    /// The interface's MTU in bytes.
    pub mtu: u32,
}

/// The host's routing. Called under the core's lock.
pub trait Routing: Send + Sync {
    /// The way to `remote`, from `local` if one is given; `None` where there is none.
    fn route(&self, remote: IpAddr, local: Option<IpAddr>) -> Option<Route>;

    /// Whether an interface that is up has an address.
    fn is_up(&self, local: IpAddr) -> bool;

    /// Forgets what is known of a neighbour, and what waits for it. A TCP does not send again what it believes to be in
    /// a queue of this host still, and there it may wait for seconds.
    fn forget_neighbour(&self, interface: u32, neighbour: IpAddr);
}

/// [`STALL`] in microseconds.
const STALL_US: u32 = STALL.as_micros() as u32;
/// Reads of `sal0` after which whatever was queued when a flow was lifted has been read.
pub(crate) const QUEUE_READS: u32 = QUEUE_PACKETS + 1;

/// Number of no interface: the kernel refuses to send by it.
const NOWHERE: u32 = i32::MAX.cast_unsigned();
/// Pairs of addresses whose interface is kept.
const INTERFACES_MAX: usize = 4096;

/// A path record, and how its packets leave this host.
struct KnownPath {
    path: Path,
    wire: WirePath,
    /// Something narrower than this host's link lies on the way: largest IP packet in bytes that passes.
    narrow: Option<u32>,
    /// Flows may go direct on it: its address pair is in the kernel's cache. Two associations with one peer have one
    /// such record between them, so that the pair leads to one path.
    is_used: bool,
}

/// What becomes of a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// The kernel has opened it by a grant, with this five-tuple of the application.
    Opened(Tuple),
    /// These flags have passed.
    Ended(Direction, u8),
}

/// What the kernel's cache saw.
#[derive(Default, PartialEq, Eq)]
pub(crate) struct Events {
    /// In their order: one that is opened may have the five-tuple of one that has ended just before.
    pub turns: Vec<(FlowId, Turn)>,
    /// Grants, and how many of their flows have been opened.
    pub taken: Vec<(FlowId, u16)>,
    /// The peer waits for a sign that its datagrams arrive.
    pub one_way: Vec<FlowId>,
    /// Watched paths by which direct packets came.
    pub paths: Vec<PathId>,
    /// Pinholes, whole, as they came.
    pub pinholes: Vec<Vec<u8>>,
    /// Addresses, and the largest UDP payload in bytes that reaches them.
    pub narrow: Vec<(IpAddr, u16)>,
}

/// The kernel's cache, if there is one, and what waits to be said about flows.
pub(crate) struct Direct {
    cache: RwLock<Option<Arc<KernelCache>>>,
    routing: Option<Box<dyn Routing>>,
    paths: Mutex<HashMap<PathId, KnownPath>>,
    /// By which interface what leaves from the second address goes to the first: not always the one that the kernel
    /// would choose.
    interfaces: RwLock<HashMap<(IpAddr, IpAddr), u32>>,
    /// Neighbours that were left since [`forget_left`](Direct::forget_left): interface, address.
    left: Mutex<Vec<(u32, IpAddr)>>,
    raw: pinhole::Sender,
    /// Flows whose FENCE the egress thread sends once it has read what is queued.
    pub fences: DueFlows,
    /// Flows of datagrams whose direct packets the kernel is to take, for the egress thread.
    pub lifting: DueFlows,
}

impl Direct {
    pub fn new(routing: Option<Box<dyn Routing>>) -> std::io::Result<Self> {
        Ok(Self {
            cache: RwLock::new(None),
            routing,
            paths: Mutex::default(),
            interfaces: RwLock::default(),
            left: Mutex::default(),
            raw: pinhole::Sender::default(),
            fences: DueFlows::new()?,
            lifting: DueFlows::new()?,
        })
    }

    /// The cache that is in use.
    pub fn cache(&self) -> Option<Arc<KernelCache>> {
        self.cache.read().clone()
    }

    /// Uses `cache` from now on, or none. What was granted by way of the one before is over.
    pub fn use_cache(&self, cache: Option<Arc<KernelCache>>) {
        if let Some(before) = self.cache() {
            before.end_grants();
        }
        if let Some(cache) = &cache {
            for (id, path) in self.paths.lock().iter() {
                cache.set_peer(*id, Some(path.path.remote.ip()));
                if path.is_used {
                    set_path(cache, *id, &path.wire);
                }
            }
        }
        *self.cache.write() = cache;
    }

    /// The kernel's cache forgets path records that no flow names: those of the agent before whose associations have
    /// gone while there was none. Where two stand at one pair of addresses, direct packets lead to neither.
    pub fn drop_strange_paths(&self) {
        if let Some(cache) = self.cache() {
            let paths = self.paths.lock();
            cache.retain_paths(|id| paths.get(&id).is_some_and(|path| path.is_used));
        }
    }

    /// The interface by which a datagram from `local` leaves; zero where it does not matter. [`NOWHERE`] where the one
    /// that has that address is down: the kernel would send it by another, where a translator would remember it for
    /// somebody else.
    pub fn interface(&self, remote: IpAddr, local: IpAddr) -> u32 {
        let Some(routing) = &self.routing else { return 0 };
        if let Some(index) = self.interfaces.read().get(&(remote, local)) {
            return *index;
        }
        let Some(found) = routing.route(remote, Some(local)) else {
            return if routing.is_up(local) { 0 } else { NOWHERE };
        };
        let mut interfaces = self.interfaces.write();
        if interfaces.len() >= INTERFACES_MAX {
            interfaces.clear();
        }
        interfaces.insert((remote, local), found.ifindex);
        found.ifindex
    }

    /// A path record of the core: finds out how its packets leave this host.
    pub fn set_path(&self, path: &Path) {
        let Some(routing) = &self.routing else { return };
        let mut paths = self.paths.lock();
        let known = paths.get(&path.id);
        if path.remote.ip().is_loopback() || known.is_some_and(|known| known.path == *path) {
            return;
        }
        let cache = self.cache();
        if let Some(cache) = &cache {
            cache.set_peer(path.id, Some(path.remote.ip()));
        }
        let was_used = known.is_some_and(|known| known.is_used);
        let is_used = was_used && path.wired;
        if let Some(cache) = cache.as_ref().filter(|_| was_used && !is_used) {
            cache.remove_path(path.id);
        }
        let narrow = known.filter(|known| known.path.remote == path.remote).and_then(|known| known.narrow);
        let (found, held) = (routing.route(path.remote.ip(), path.local), path.passage != Passage::Open);
        let wire = match (found, known) {
            (Some(found), _) => WirePath {
                local: found.local,
                remote: path.remote.ip(),
                next_hop: found.next_hop,
                ifindex: found.ifindex,
                mtu: mtu_of(found.mtu, path.remote.ip(), path.datagram_max, narrow),
                stall_us: STALL_US,
                held,
                watched: path.watched,
            },
            // There is no way to it now: nothing may leave by the one that there was.
            (None, Some(known)) => WirePath { held: true, ..known.wire },
            (None, None) => return,
        };
        if let Some(cache) = cache.filter(|_| is_used) {
            set_path(&cache, path.id, &wire);
        }
        // After the cache: nothing more is handed to the neighbour then.
        let leaves = |known: &&KnownPath| (known.wire.ifindex, known.wire.next_hop) != (wire.ifindex, wire.next_hop);
        if let Some(left) = known.filter(|known| path.passage == Passage::Void || leaves(known)) {
            let neighbour = (left.wire.ifindex, left.wire.next_hop);
            routing.forget_neighbour(neighbour.0, neighbour.1);
            self.left.lock().push(neighbour);
        }
        paths.insert(path.id, KnownPath { path: *path, wire, narrow, is_used });
    }

    /// Forgets once more what waits for neighbours that were left: packets that were on their way out then. Who comes
    /// back would get them seconds late, when their connections may have ended.
    pub fn forget_left(&self) {
        let Some(routing) = &self.routing else { return };
        let paths = self.paths.lock();
        for (interface, neighbour) in self.left.lock().drain(..) {
            let is_there = |known: &KnownPath| (known.wire.ifindex, known.wire.next_hop) == (interface, neighbour);
            if !paths.values().any(|known| is_there(known) && known.path.passage != Passage::Void) {
                routing.forget_neighbour(interface, neighbour);
            }
        }
    }

    /// Asks the routing again for every path: the host's addresses or routes have changed.
    pub fn refresh_paths(&self) {
        let Some(routing) = &self.routing else { return };
        self.interfaces.write().clear();
        for (id, known) in self.paths.lock().iter_mut() {
            let Some(found) = routing.route(known.path.remote.ip(), known.path.local) else { continue };
            let wire = WirePath {
                local: found.local,
                next_hop: found.next_hop,
                ifindex: found.ifindex,
                mtu: mtu_of(found.mtu, known.path.remote.ip(), known.path.datagram_max, known.narrow),
                ..known.wire
            };
            if wire != known.wire {
                known.wire = wire;
                if let Some(cache) = self.cache().filter(|_| known.is_used) {
                    set_path(&cache, *id, &wire);
                }
            }
        }
    }

    /// The kernel has learned that datagrams to an address may have no more than `datagram_max` bytes. Nobody learns it
    /// from packets that go direct: an ICMP error about one names ports that no socket has.
    pub fn shrink_paths(&self, remote: IpAddr, datagram_max: u16) {
        self.narrow_paths(remote, packet_max(remote, datagram_max));
    }

    /// Larger IP packets than `narrow` bytes do not reach an address.
    fn narrow_paths(&self, remote: IpAddr, narrow: u32) {
        self.paths.lock().values_mut().filter(|path| path.path.remote.ip() == remote).for_each(|path| {
            path.narrow = Some(path.narrow.map_or(narrow, |before| before.min(narrow)));
        });
        self.refresh_paths();
    }

    /// Lets every path try the full size of its link again.
    pub fn restore_paths(&self) {
        self.paths.lock().values_mut().for_each(|path| path.narrow = None);
        self.refresh_paths();
    }

    pub fn remove_path(&self, id: PathId) {
        self.paths.lock().remove(&id);
        if let Some(cache) = self.cache() {
            cache.remove_path(id);
            cache.set_peer(id, None);
        }
    }

    /// Brings the kernel's entry of a flow in step with the table's. Gives what a removed one was.
    pub fn follow(&self, flow: FlowId, wanted: Option<Wired>) -> Option<WireState> {
        let cache = self.cache()?;
        if let Some(Wired { wire, .. }) = &wanted {
            // From now on packets on its ports are the agent's, and never the host's TCP's.
            self.use_path(&cache, wire.path);
        }
        match wanted {
            Some(wanted) if wanted.wire.sending || wanted.wire.accepting => {
                match cache.install(&wire_flow(flow, &wanted)) {
                    Ok(true) => self.lifting.add(flow),
                    Ok(false) => {}
                    Err(error) => tracing::debug!(flow = flow.0, %error, "the kernel's cache refused an entry"),
                }
                None
            }
            _ => cache.remove(flow),
        }
    }

    /// Lets the kernel open flows by itself.
    pub fn grant(&self, grant: &Grant) {
        let Some(cache) = self.cache() else { return };
        if !self.paths.lock().contains_key(&grant.path) {
            return;
        }
        self.use_path(&cache, grant.path);
        if let Err(error) = cache.install_grant(grant) {
            tracing::debug!(grant = grant.id.0, %error, "the kernel's cache refused a grant");
        }
    }

    /// Lets it open no more flows by a grant.
    pub fn stop_grant(&self, id: FlowId) {
        if let Some(cache) = self.cache() {
            cache.stop_grant(id);
        }
    }

    /// What has become of these flows of a grant.
    pub fn survey_grant(&self, id: FlowId, these: u128) -> Survey {
        self.cache().map_or_else(Survey::default, |cache| cache.survey_grant(id, these))
    }

    /// Has the events tell of these flows of a grant.
    pub fn tell_of_flows(&self, id: FlowId, these: u128) {
        if let Some(cache) = self.cache() {
            cache.tell_of_flows(id, these);
        }
    }

    /// A grant is over: what was opened by it goes, unless its flow `is_known`.
    pub fn remove_grant(&self, id: FlowId, is_known: impl Fn(FlowId) -> bool) {
        if let Some(cache) = self.cache() {
            cache.remove_grant(id, is_known);
        }
    }

    /// The kernel has opened a flow, which the table has now.
    pub fn note_opened(&self, flow: FlowId, opened: &Wired) {
        if let Some(cache) = self.cache() {
            cache.note_opened(&wire_flow(flow, opened));
        }
    }

    fn use_path(&self, cache: &KernelCache, id: PathId) {
        if let Some(path) = self.paths.lock().get_mut(&id).filter(|path| !path.is_used) {
            path.is_used = true;
            set_path(cache, id, &path.wire);
        }
    }

    /// A packet of a flow that is sent direct came to user space. True if the flow has stalled.
    pub fn is_stalled(&self, flow: FlowId, wanted: Option<Wired>) -> bool {
        match self.cache().and_then(|cache| cache.state(flow)) {
            Some(state) => state.stalled,
            None => {
                self.follow(flow, wanted);
                false
            }
        }
    }

    /// What the kernel's cache holds of a flow.
    pub fn state(&self, flow: FlowId) -> Option<WireState> {
        self.cache()?.state(flow)
    }

    /// What the kernel's cache has carried of a flow.
    pub fn counters(&self, flow: FlowId) -> Option<FlowCounters> {
        self.cache()?.state(flow).map(|state| state.counters)
    }

    /// A FENCE is to be sent once the egress thread has read what is queued now.
    pub fn fence(&self, flow: FlowId) {
        self.fences.add(flow);
    }

    /// The flows whose FENCE is due. `is_drained`: nothing is left in `sal0`.
    pub fn due_fences(&self, reads: &mut u32, is_drained: bool) -> Vec<FlowId> {
        if !self.fences.is_waiting() {
            *reads = 0;
            return Vec::new();
        }
        *reads += 1;
        if !is_drained && *reads < QUEUE_READS {
            return Vec::new();
        }
        *reads = 0;
        self.fences.take()
    }

    /// As [`KernelCache::lift`]. True where there is no cache.
    pub fn lift(&self, flow: FlowId, is_last: bool) -> bool {
        self.cache().is_none_or(|cache| cache.lift(flow, is_last))
    }

    /// Sends a bare segment of a connection on its flow ports, or a datagram without payload.
    pub fn send_pinhole(&self, wire: &Wire, numbers: Option<TcpNumbers>, is_knock: bool) -> Result<(), DropReason> {
        let path = self.paths.lock().get(&wire.path).map(|known| known.wire).ok_or(DropReason::Environment)?;
        let segment = Segment {
            source: SocketAddr::new(path.local, wire.local_port),
            destination: SocketAddr::new(path.remote, wire.remote_port),
            numbers,
            is_knock,
        };
        self.raw.send(&segment).map_err(|error| {
            tracing::debug!(%error, to = %segment.destination, "a pinhole could not be sent");
            DropReason::Environment
        })
    }

    /// Hears what the kernel's cache saw.
    pub fn take_events(&self) -> Events {
        let mut seen = Events::default();
        let Some(cache) = self.cache() else { return seen };
        cache.take_events(|event| {
            if event.seen.path() {
                seen.paths.push(PathId(event.flow.0));
                return;
            }
            if let Some(count) = event.seen.taken() {
                seen.taken.push((event.flow, count));
                return;
            }
            if event.seen.wants_answer() {
                seen.one_way.push(event.flow);
            }
            match (event.seen.too_big(), event.wire) {
                (Some(mtu), Some(key)) => {
                    let remote = key.destination().ip();
                    self.narrow_paths(remote, mtu);
                    let payload = mtu.saturating_sub(packet_max(remote, 0));
                    seen.narrow.push((remote, u16::try_from(payload).unwrap_or(u16::MAX)));
                }
                (None, Some(key)) if event.seen.opened() => seen.turns.push((event.flow, Turn::Opened(key.tuple()))),
                (None, Some(key)) => seen.pinholes.extend(pinhole::received(&key)),
                (_, None) => {}
            }
            let ended = event.seen.ends().map(|(direction, flags)| (event.flow, Turn::Ended(direction, flags)));
            seen.turns.extend(ended);
        });
        seen
    }

    /// Empties the kernel's cache.
    pub fn clear(&self) {
        if let Some(cache) = self.cache() {
            cache.clear();
        }
    }

    /// Brings every entry of the table to the kernel's cache: after it was loaded, or to mend what was lost.
    pub fn follow_all(&self, table: &Table) {
        for flow in table.wired() {
            self.follow(flow, table.wire(flow));
        }
    }
}

/// Largest IP packet that can carry a UDP payload of `datagram_max` bytes and no more.
fn packet_max(remote: IpAddr, datagram_max: u16) -> u32 {
    u32::from(datagram_max) + if remote.is_ipv4() { 28 } else { 48 }
}

/// Largest IP packet in bytes that goes direct: what this host's link takes, what the peer's does, and what has been
/// learned of the way between. TCP asks the peer by its MSS; a datagram asks nobody.
fn mtu_of(link: u32, remote: IpAddr, datagram_max: u16, narrow: Option<u32>) -> u32 {
    link.min(packet_max(remote, datagram_max)).min(narrow.unwrap_or(u32::MAX))
}

fn set_path(cache: &KernelCache, id: PathId, path: &WirePath) {
    if let Err(error) = cache.set_path(id, path) {
        tracing::warn!(remote = %path.remote, %error, "flows to this address stay encapsulated");
    }
}

fn wire_flow(flow: FlowId, wanted: &Wired) -> WireFlow {
    let Wired { app, generation, wire, at_middlebox, is_of_named_socket, delta } = *wanted;
    WireFlow {
        flow,
        generation,
        app,
        path: wire.path,
        local_port: wire.local_port,
        remote_port: wire.remote_port,
        egress: wire.sending,
        accept: wire.takes(),
        by_sal0: at_middlebox,
        of_socket: is_of_named_socket,
        delta,
    }
}

/// The descriptor that becomes readable when the cache has something to tell.
pub(crate) fn events_fd(cache: &KernelCache) -> BorrowedFd<'_> {
    cache.events()
}
