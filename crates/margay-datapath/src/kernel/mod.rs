//! The kernel's flow cache: two eBPF programs and their maps (DESIGN §2, §7). Flows that it holds are carried without
//! this process; maps and programs are pinned, so they outlive it.
//!
//! Nothing depends on it: whatever it does not carry comes to user space.

mod address_pair;
mod delta;
mod error;
mod grant;
mod guard;
mod interface;
pub(crate) mod layout;
#[cfg(test)]
mod listener_test;
mod load;
mod peer_addresses;
pub(crate) mod plain;
pub(crate) mod ring;
#[cfg(test)]
mod test;
#[cfg(test)]
pub(crate) mod unattached;
pub(crate) mod words;

pub use error::{CacheError, Unavailable};
pub use interface::{Inside, Interface};
pub(crate) use interface::{host_words, prefix_v4, prefix_v6};
pub(crate) use load::remove_pin;

/// Generated from the object.
#[allow(unsafe_code, missing_docs, unreachable_pub, dead_code, clippy::all, clippy::print_stdout, clippy::unwrap_used)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/flow_cache.skel.rs"));
}

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use libbpf_rs::{ErrorKind, MapCore, MapFlags};
use margay_core::delta::Translations;
use margay_core::entry::{FlowCounters, Grant, PathId};
use margay_core::flow_cache::LINGER;
use margay_core::time::Instant;
use margay_core::{Direction, Ranges};
use margay_wire::FlowId;
use parking_lot::Mutex;

use crate::clock;
use crate::packet::{FIN, FlowKey, RST, UDP, mapped};
use crate::table::Connection;
use address_pair::AddressPairs;
use guard::Guard;
use layout::{app_key, flow_entry, flow_lift, pair_key, path_entry, wire_key};
use load::Loaded;
use peer_addresses::PeerAddresses;
use plain::Plain;

/// Where the cache sits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    /// Name of the virtual interface.
    pub sal0: String,
    /// All but the loopback and `sal0`.
    pub interfaces: Vec<Interface>,
    /// This host's addresses.
    pub local_addresses: Vec<IpAddr>,
    /// See [`KernelCache::set_in_place`].
    pub in_place: bool,
    /// Directory for pinned maps and links; a bpffs is mounted there if it is none.
    pub pin_dir: PathBuf,
    /// Ports of direct flows.
    pub flow_ports: RangeInclusive<u16>,
    /// This host's virtual addresses.
    pub ranges: Ranges,
    /// Boxes of this host may change addresses: the tags by which their SYNs are known leave by no card.
    pub boxes: bool,
    /// Most flows.
    pub flows_max: u32,
}

/// How packets of a path leave this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WirePath {
    /// This host's address.
    pub local: IpAddr,
    /// The peer's; of the same family.
    pub remote: IpAddr,
    /// The neighbour that they are handed to.
    pub next_hop: IpAddr,
    /// Interface that they leave by.
    pub ifindex: u32,
    /// Largest IP packet in bytes.
    pub mtu: u32,
    /// How much longer than two round trips an answer may take, in microseconds.
    pub stall_us: u32,
    /// Nothing goes direct for now.
    pub held: bool,
    /// Direct packets that come are told of.
    pub watched: bool,
}

/// What the cache is to hold for a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireFlow {
    /// The local flow.
    pub flow: FlowId,
    /// Rises with every change.
    pub generation: u32,
    /// The application's five-tuple as it leaves `sal0`.
    pub app: FlowKey,
    /// The path record.
    pub path: PathId,
    /// This end's flow port.
    pub local_port: u16,
    /// The peer's.
    pub remote_port: u16,
    /// Send direct.
    pub egress: bool,
    /// Give direct packets to the application.
    pub accept: bool,
    /// By `sal0`, and never in place on the card: a box is to see them there.
    pub by_sal0: bool,
    /// The agent has packets with its five-tuple that come from outside of this host.
    pub of_socket: bool,
    /// What becomes of the numbers of a connection, where they differ on the wire.
    pub delta: Option<Translations>,
}

/// What passed of a connection's end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen(u32);

impl Seen {
    /// The ends that passed: the application's, and the peer's, with the TCP flags FIN and RST of each that showed one.
    pub fn ends(self) -> impl Iterator<Item = (Direction, u8)> {
        let flags =
            |fin: u32, rst: u32| if self.0 & fin != 0 { FIN } else { 0 } | if self.0 & rst != 0 { RST } else { 0 };
        let both = [(Direction::Egress, flags(1, 2)), (Direction::Ingress, flags(4, 8))];
        both.into_iter().filter(|(_, flags)| *flags != 0)
    }

    /// Datagrams come and none goes: the peer waits for a sign that they arrive.
    pub const fn wants_answer(self) -> bool {
        self.0 & 16 != 0
    }

    /// A datagram without payload came on flow ports.
    pub const fn pinhole(self) -> bool {
        self.0 & 32 != 0
    }

    /// A direct packet came by a path that is held; the event names the path instead of a flow.
    pub const fn path(self) -> bool {
        self.0 & 128 != 0
    }

    /// A flow that the kernel had opened by a grant, and the peer has answered.
    pub const fn opened(self) -> bool {
        self.0 & 256 != 0
    }

    /// Both ends have closed, and each has acknowledged all of the other's.
    pub const fn over(self) -> bool {
        self.0 & 512 != 0
    }

    /// How many flows of a grant have been opened; the event names the grant instead of a flow.
    pub const fn taken(self) -> Option<u16> {
        if self.0 & 1024 != 0 { Some((self.0 >> 16) as u16) } else { None }
    }

    /// A router has dropped a packet of the flow: the largest that it takes, in bytes.
    pub const fn too_big(self) -> Option<u32> {
        if self.0 & 64 != 0 { Some(self.0 >> 16) } else { None }
    }
}

/// What one direction of a TCP flow showed last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpSeen {
    /// Highest sequence number.
    pub sequence: u32,
    /// Payload bytes of that segment.
    pub length: u32,
    /// It bears a FIN, which has a number of its own.
    pub fin: bool,
    /// Last acknowledgement.
    pub acknowledgement: u32,
    /// Last window, unscaled.
    pub window: u16,
    /// Payload bytes of its largest segment on the wire.
    pub segment: u32,
}

impl TcpSeen {
    /// The number that comes next.
    pub fn next(&self) -> u32 {
        self.sequence.wrapping_add(self.length).wrapping_add(u32::from(self.fin))
    }
}

/// Endings of the peer's that the programs have not taken for such, and what they know by which these could be judged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unjudged {
    /// Sequence number of the last RST that is not what the application's TCP expects, as far as they have seen.
    pub reset: Option<u32>,
    /// The number after a FIN whose acknowledgement they have not seen.
    pub end: Option<u32>,
    /// What the application's TCP expects.
    pub next: Option<u32>,
    /// What it has acknowledged last.
    pub acknowledged: Option<u32>,
    /// The farthest segment of the peer's: its number, and that after it.
    pub farthest: Option<(u32, u32)>,
}

impl Unjudged {
    /// Whether there is an ending to judge.
    pub(crate) const fn is_ending(&self) -> bool {
        self.reset.is_some() || self.end.is_some()
    }

    /// The TCP flags FIN and RST of what the application's TCP has taken, with what user space has carried of the
    /// connection.
    pub fn taken(&self, connection: Option<&Connection>) -> u8 {
        let own = connection.and_then(|seen| seen.own).map(|own| own.acknowledgement);
        let is_fin = self.end.is_some_and(|end| [self.acknowledged, own].contains(&Some(end)));
        let is_rst = self.reset.is_some_and(|reset| self.expected(connection).any(|next| next == reset));
        (if is_fin { FIN } else { 0 }) | (if is_rst { RST } else { 0 })
    }

    /// What the application's TCP may expect of the peer's, as far as somebody has seen. The last is how far the peer's
    /// data has reached in user space, where that is known.
    pub fn expected(&self, connection: Option<&Connection>) -> impl Iterator<Item = u32> {
        let own = connection.and_then(|seen| seen.own).map(|own| own.acknowledgement);
        let peer = connection.and_then(|seen| seen.peer).map(|peer| peer.sequence);
        let known = [self.acknowledged, self.next, own, peer];
        // The programs see nothing of what user space has carried: a segment that begins where that has ended is not
        // known to them as what comes next, but here it is.
        let behind = self.farthest.filter(|(from, _)| known.contains(&Some(*from))).map(|(_, to)| to);
        [behind].into_iter().chain(known).flatten()
    }
}

/// What the cache holds of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireState {
    /// The local flow.
    pub flow: FlowId,
    /// Of the last change.
    pub generation: u32,
    /// The application's five-tuple.
    pub app: FlowKey,
    /// The path record.
    pub path: PathId,
    /// This end's flow port.
    pub local_port: u16,
    /// The peer's.
    pub remote_port: u16,
    /// Sends direct.
    pub egress: bool,
    /// Takes direct packets.
    pub accept: bool,
    /// Direct packets went unanswered for too long.
    pub stalled: bool,
    /// Opened by a grant, and not answered yet.
    pub fresh: bool,
    /// What passed of its end.
    pub seen: Seen,
    /// What it has carried.
    pub counters: FlowCounters,
    /// Last seen of the application, for TCP.
    pub sent: Option<TcpSeen>,
    /// Last seen of the peer, for TCP.
    pub received: Option<TcpSeen>,
    /// What is left to judge.
    pub unjudged: Unjudged,
    /// When it carried something last, on CLOCK_MONOTONIC.
    pub last_ns: u64,
}

/// A connection's end passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowEvent {
    /// The local flow.
    pub flow: FlowId,
    /// What passed.
    pub seen: Seen,
    /// The addresses and flow ports of a pinhole, or of a packet that was too big, as they stood on the wire; or the
    /// application's five-tuple of a flow that the kernel has opened.
    pub wire: Option<FlowKey>,
}

/// What was there when the cache was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Adopted {
    /// Nothing.
    Fresh,
    /// Maps of this layout: their entries are kept.
    Kept,
    /// Maps of another layout: they are gone.
    Replaced {
        /// Theirs.
        found: u32,
    },
}

/// Bytes of a key and of a value of the maps that grow with the hosts that are met, and not with their flows: path
/// records, and the pairs of addresses that lead to them.
pub const HOST_MAP_SIZES: [(usize, usize); 2] =
    [(size_of::<PathId>(), size_of::<path_entry>()), (size_of::<pair_key>(), size_of::<layout::pair_value>())];

/// A loaded cache. Dropping it leaves programs and maps in the kernel: they go with [`remove_pins`](Self::remove_pins).
pub struct KernelCache {
    loaded: Loaded,
    adopted: Adopted,
    /// `None` where the kernel takes none.
    guard: Option<Guard>,
    /// Where each flow's entry lies. It has the five-tuple, by which programs' packets find it.
    index: Mutex<HashMap<FlowId, wire_key>>,
    /// Pairs of addresses that paths have left, and until when packets that were on their way still come by them.
    left: Mutex<Vec<(Instant, PathId, pair_key)>>,
    peers: Mutex<PeerAddresses>,
    /// By which the kernel may have opened flows.
    grants: Mutex<HashMap<FlowId, Grant>>,
}

impl KernelCache {
    /// Loads the programs, or takes over what the last process has left pinned, and attaches them.
    ///
    /// # Errors
    ///
    /// Why not; nothing is attached then.
    pub fn open(config: &CacheConfig) -> Result<Self, Unavailable> {
        load::prepare_pins(&config.pin_dir)?;
        // Before anything of what is there is touched.
        let guard = Guard::open(&config.pin_dir, &config.flow_ports, config.ranges).inspect_err(|error| {
            tracing::warn!(%error, "flows may be reset by this host's own TCP while the programs are replaced");
        });
        let (loaded, adopted) = Loaded::open(config)?;
        let peers = Mutex::new(PeerAddresses::of_before(&loaded.maps.peers));
        let cache = Self {
            loaded,
            adopted,
            guard: guard.ok(),
            index: Mutex::default(),
            left: Mutex::default(),
            peers,
            grants: Mutex::default(),
        };
        // Before the programs are attached: to whom a packet is not, theirs it cannot be.
        cache.set_local_addresses(&config.local_addresses);
        cache.set_in_place(config.in_place);
        cache.keep_grants();
        // What nobody has answered is its grant's.
        let answered = cache.entries_with_keys().filter(|(_, entry)| entry.flags & layout::FLOW_FRESH == 0);
        let index = answered.map(|(key, entry)| (FlowId(entry.flow), key)).collect();
        *cache.index.lock() = index;
        cache.drop_strange_deltas();
        cache.heartbeat();
        cache.attach().map_err(|error| Unavailable::Kernel(error.to_string()))?;
        Ok(cache)
    }

    /// What was there.
    pub const fn adopted(&self) -> Adopted {
        self.adopted
    }

    /// Attaches the programs to `sal0` and to every other interface; where one is attached it is left, or replaced in
    /// place.
    ///
    /// # Errors
    ///
    /// The kernel's word, with the interface.
    pub fn attach(&self) -> Result<(), CacheError> {
        self.loaded.attach()
    }

    /// Takes the flow cache off `sal0`: nothing is sent direct any more. Maps stay, and so do the programs on the
    /// cards, which keep what peers still send direct from the host's TCP. Where there are middleboxes, a program that
    /// marks what they forward stays as well.
    pub fn detach(&self) {
        self.end_grants();
        self.loaded.detach();
    }

    /// This host's interfaces have changed.
    pub fn set_interfaces(&self, interfaces: &[Interface]) {
        self.loaded.set_interfaces(interfaces);
    }

    /// Brings connections for the host's virtual address to what listens at these addresses, at most one of each family
    /// and port; `alone`: to no others, which an agent before may have left.
    ///
    /// # Errors
    ///
    /// There are too many.
    pub fn set_listeners(&self, listeners: &HashSet<SocketAddr>, alone: bool) -> Result<(), CacheError> {
        let map = &self.loaded.maps.listeners;
        let entry = |one: &SocketAddr| (layout::listener_key_of(*one).bytes().to_vec(), mapped(one.ip()));
        let wanted: HashMap<Vec<u8>, [u8; 16]> = listeners.iter().map(entry).collect();
        for key in map.keys().filter(|key| alone && !wanted.contains_key(key)) {
            // Absent, if it was forgotten already.
            let _ = map.delete(&key);
        }
        wanted.iter().try_for_each(|(key, address)| put(map, key, address, "listeners that are looked up"))
    }

    /// Puts programs on again that somebody has taken off their interfaces; gives how many those were.
    pub fn reattach(&self) -> usize {
        self.loaded.reattach()
    }

    /// Interfaces that took no program.
    pub fn bare_interfaces(&self) -> Vec<u32> {
        self.loaded.bare_interfaces()
    }

    /// This host's addresses: only packets to them can be of direct flows.
    pub fn set_local_addresses(&self, addresses: &[IpAddr]) {
        let map = &self.loaded.maps.locals;
        let wanted: Vec<[u8; 16]> = addresses.iter().map(|address| mapped(*address)).collect();
        let gone: Vec<_> = map.keys().filter(|key| !wanted.iter().any(|wanted| wanted[..] == key[..])).collect();
        for key in &wanted {
            if let Err(error) = put(map, key, &1_u32.to_ne_bytes(), "local addresses") {
                tracing::warn!(%error, "direct packets to an address of this host are not known as such");
            }
        }
        for key in gone {
            // Refused only when it is gone already.
            let _ = map.delete(&key);
        }
    }

    /// A peer, whose association has this path record, is at `address` now, or is none any more.
    pub fn set_peer(&self, id: PathId, address: Option<IpAddr>) {
        self.peers.lock().stand(&self.loaded.maps.peers, id, address);
    }

    /// Every peer has been told of: what comes from others to flow ports is the host's from now on.
    pub fn trust_peers(&self) {
        if let Err(error) = put(&self.loaded.maps.peers_known, &0_u32.to_ne_bytes(), &1_u32.to_ne_bytes(), "peers") {
            tracing::warn!(%error, "what no socket of this host takes on flow ports stays unanswered");
        }
    }

    /// Whether direct packets seem to have come by the card that they came by; otherwise they come to programs by
    /// `sal0`. For hosts where nothing judges packets by their interface.
    pub fn set_in_place(&self, in_place: bool) {
        let value = u32::from(in_place).to_ne_bytes();
        if let Err(error) = put(&self.loaded.maps.in_place, &0_u32.to_ne_bytes(), &value, "ways of direct packets") {
            tracing::error!(%error, in_place, "direct packets go on coming to programs as before");
        }
    }

    /// Adds or replaces a path record: every flow on it follows.
    ///
    /// # Errors
    ///
    /// Full, or two families.
    pub fn set_path(&self, id: PathId, path: &WirePath) -> Result<(), CacheError> {
        if path.local.is_ipv4() != path.remote.is_ipv4() {
            return Err(CacheError::Families { local: path.local, remote: path.remote });
        }
        let mut entry = layout::path_entry_of(path);
        let pair = layout::pair_of(&entry);
        if let Some(guard) = &self.guard {
            guard.add(&pair.remote);
        }
        let maps = &self.loaded.maps;
        let before = get::<path_entry>(&maps.paths, &id.0.to_ne_bytes());
        let left = before.as_ref().map(layout::pair_of).filter(|before| before.bytes() != pair.bytes());
        if let Some(before) = &before {
            entry.rtt_ns = before.rtt_ns;
            let is_as_before = left.is_none() && before.flags == entry.flags;
            entry.since_ns = if is_as_before { before.since_ns } else { clock::now().micros() * 1000 };
        }
        // The new pair is known before anything is sent from it, and the old one for a while after nothing is.
        self.address_pairs().lead(id, &pair, entry.flags)?;
        put(&maps.paths, &id.0.to_ne_bytes(), entry.bytes(), "paths")?;
        match left {
            // Nothing that came by it was known for this path's; another may have it for itself now.
            Some(left) if self.address_pairs().is_shared(&left) => self.address_pairs().forget(id, &left),
            Some(left) => self.left.lock().push((clock::now() + LINGER, id, left)),
            None => {}
        }
        Ok(())
    }

    fn address_pairs(&self) -> AddressPairs<'_, impl MapCore> {
        AddressPairs { paths: &self.loaded.maps.paths, pairs: &self.loaded.maps.pairs }
    }

    /// Forgets pairs of addresses that were left a while ago.
    fn forget_left(&self) {
        let now = clock::now();
        let mut left = self.left.lock();
        left.retain(|(until, id, pair)| {
            let is_over = *until <= now;
            let current = get::<path_entry>(&self.loaded.maps.paths, &id.0.to_ne_bytes());
            if is_over && current.is_none_or(|entry| layout::pair_of(&entry).bytes() != pair.bytes()) {
                self.address_pairs().forget(*id, pair);
            }
            !is_over
        });
    }

    /// The path records.
    pub fn paths(&self) -> impl Iterator<Item = PathId> {
        let number = |key: Vec<u8>| Some(PathId(u32::from_ne_bytes(key.try_into().ok()?)));
        self.loaded.maps.paths.keys().filter_map(number)
    }

    /// The peers' addresses of all path records.
    fn remotes(&self) -> HashSet<[u8; 16]> {
        let paths = &self.loaded.maps.paths;
        paths.keys().filter_map(|key| Some(get::<path_entry>(paths, &key)?.remote)).collect()
    }

    /// Forgets a path record. Flows that still name it are sent to user space.
    pub fn remove_path(&self, id: PathId) {
        let maps = &self.loaded.maps;
        let Some(entry) = get::<path_entry>(&maps.paths, &id.0.to_ne_bytes()) else { return };
        self.address_pairs().forget(id, &layout::pair_of(&entry));
        // Refused only when it is gone already.
        let _ = maps.paths.delete(&id.0.to_ne_bytes());
    }

    /// Forgets every path record that is not wanted, and pairs of addresses that lead to none.
    pub fn retain_paths(&self, is_wanted: impl Fn(PathId) -> bool) {
        let unwanted: Vec<PathId> = self.paths().filter(|id| !is_wanted(*id)).collect();
        unwanted.into_iter().for_each(|id| self.remove_path(id));
        if self.left.lock().is_empty() {
            self.address_pairs().forget_unled();
        }
    }

    /// Adds an entry, or changes it; what it has counted and seen stays. Where it moves to another path, packets that
    /// pass in the same moment may not be counted.
    ///
    /// Direct datagrams of a flow that was not accepted have gone up to the agent, and may wait there: true where they
    /// still go up, until [`lift`](Self::lift) has the flow accepted. Connections put their segments in order
    /// themselves.
    ///
    /// # Errors
    ///
    /// Full, or the ports are another flow's. An older generation than the one held is ignored.
    pub fn install(&self, flow: &WireFlow) -> Result<bool, CacheError> {
        let (key, app) = (layout::wire_key_of(flow), layout::app_key_of(&flow.app));
        let maps = &self.loaded.maps;
        let mut index = self.index.lock();
        let mut moved = None;
        if let Some((old_key, old)) = index.get(&flow.flow).and_then(|old_key| self.entry_at(old_key, flow.flow))
            && (old_key.bytes() != key.bytes() || old.app.bytes() != app.bytes())
        {
            if old.generation > flow.generation {
                return Ok(false);
            }
            self.delete(&old_key, &old.app);
            index.remove(&flow.flow);
            // How long answers take is of the path.
            moved = Some(flow_entry { rtt_ns: 0, ..old });
        }
        // The kernel has begun another one in the place of this, which is over: late packets are no reason to lead the
        // new one's there.
        if self.is_anothers(&app, flow.flow) {
            return Err(CacheError::Taken);
        }
        let mut change = layout::flow_change_of(flow);
        let is_lifted = self.has_to_be_lifted(flow, &key);
        if is_lifted {
            change.flags &= !layout::FLOW_ACCEPT;
            change.flags |= layout::FLOW_LIFTING | layout::FLOW_SENT_UP;
        }
        if let Some(delta) = &flow.delta {
            // Before a packet that is translated by it.
            self.put_delta(change.delta, delta)?;
        }
        match self.loaded.change_flow(&change) {
            Ok(layout::CHANGE_DONE) => {}
            Ok(layout::CHANGE_LATE) => return Ok(false),
            Ok(layout::CHANGE_TAKEN) => return Err(CacheError::Taken),
            Ok(layout::CHANGE_ABSENT) => {
                let entry = flow_entry {
                    generation: change.generation,
                    flow: change.flow,
                    app,
                    flags: change.flags,
                    unanswered_since_ns: 0,
                    delta: change.delta,
                    ..moved.unwrap_or_default()
                };
                put(&maps.flows, key.bytes(), entry.bytes(), "flows")?;
            }
            Ok(other) => return Err(CacheError::System(format!("change_flow gives {other}"))),
            Err(error) => return Err(CacheError::System(error.to_string())),
        }
        if let Err(error) = put(&maps.apps, app.bytes(), key.bytes(), "flows") {
            let _ = maps.flows.delete(key.bytes());
            return Err(error);
        }
        index.insert(flow.flow, key);
        Ok(is_lifted)
    }

    /// Whether datagrams of a flow that is to be accepted may have gone up.
    fn has_to_be_lifted(&self, flow: &WireFlow, key: &wire_key) -> bool {
        let is_accepted = |entry: flow_entry| entry.flags & layout::FLOW_ACCEPT != 0;
        flow.accept
            && flow.app.protocol == UDP
            && !self.entry_at(key, flow.flow).is_some_and(|(_, entry)| is_accepted(entry))
    }

    /// What had gone up of a flow that is lifted, when this was asked last, has been delivered: the flow is accepted
    /// from now on, if nothing has gone up since. False if something has, unless this `is_last`.
    pub fn lift(&self, flow: FlowId, is_last: bool) -> bool {
        let index = self.index.lock();
        let Some(wire) = index.get(&flow) else { return true };
        let lift = flow_lift { wire: *wire, flow: flow.0, is_last: is_last.into() };
        match self.loaded.lift_flow(&lift) {
            Ok(result) => result == layout::LIFT_DONE,
            Err(error) => {
                tracing::debug!(flow = flow.0, %error, "direct datagrams of a flow go by the agent");
                true
            }
        }
    }

    /// Whether a five-tuple is that of another flow, which goes on. What the agent sets up anew has been closed or
    /// removed before.
    fn is_anothers(&self, app: &app_key, flow: FlowId) -> bool {
        let maps = &self.loaded.maps;
        let of_app = get::<wire_key>(&maps.apps, app.bytes());
        let entry = of_app.and_then(|key| get::<flow_entry>(&maps.flows, key.bytes()));
        entry.is_some_and(|entry| entry.flow != flow.0 && entry.flags & layout::FLOW_EGRESS != 0)
    }

    /// Forgets an entry; gives what it was.
    pub fn remove(&self, flow: FlowId) -> Option<WireState> {
        // Held until it is gone: its place may be another's at once, and must not be changed then.
        let mut index = self.index.lock();
        let key = index.remove(&flow)?;
        // Absent only where somebody has emptied the maps.
        let (key, entry) = self.entry_at(&key, flow)?;
        self.delete(&key, &entry.app);
        self.drop_delta(entry.delta);
        Some(layout::state_of(&key, &entry))
    }

    /// A flow's entry, where it is one.
    fn entry_at(&self, key: &wire_key, flow: FlowId) -> Option<(wire_key, flow_entry)> {
        let entry = get::<flow_entry>(&self.loaded.maps.flows, key.bytes())?;
        (entry.flow == flow.0).then_some((*key, entry))
    }

    fn delete(&self, key: &wire_key, app: &app_key) {
        let maps = &self.loaded.maps;
        // The application's side first: what it sends now is the agent's. Unless the five-tuple is another flow's by
        // now, which the agent has set up, or the kernel by a grant.
        if get::<wire_key>(&maps.apps, app.bytes()).is_some_and(|found| found.bytes() == key.bytes()) {
            // Refused only when it is gone already.
            let _ = maps.apps.delete(app.bytes());
        }
        let _ = maps.flows.delete(key.bytes());
    }

    /// What is held of a flow.
    pub fn state(&self, flow: FlowId) -> Option<WireState> {
        let key = *self.index.lock().get(&flow)?;
        let (key, entry) = self.entry_at(&key, flow)?;
        // The two maps are one entry: without the application's side nothing finds it on the way out.
        self.loaded.maps.apps.lookup(entry.app.bytes(), MapFlags::ANY).ok().flatten()?;
        Some(layout::state_of(&key, &entry))
    }

    /// Every entry.
    pub fn entries(&self) -> impl Iterator<Item = WireState> {
        self.entries_with_keys().map(|(key, entry)| layout::state_of(&key, &entry))
    }

    fn entries_with_keys(&self) -> impl Iterator<Item = (wire_key, flow_entry)> {
        const BATCH: u32 = 512;
        let batches = self.loaded.maps.flows.lookup_batch(BATCH, MapFlags::ANY, MapFlags::ANY);
        batches
            .into_iter()
            .flatten()
            .filter_map(|(key, entry)| Some((wire_key::read(&key)?, flow_entry::read(&entry)?)))
    }

    /// Empties the cache; paths stay. Every flow goes on in user space, which brings its entry back. Grants are over.
    pub fn clear(&self) {
        self.end_grants();
        let flows: Vec<FlowId> = self.index.lock().keys().copied().collect();
        for flow in flows {
            self.remove(flow);
        }
    }

    /// The agent is alive. Without it for two seconds, packets that user space should have are dropped.
    pub fn heartbeat(&self) {
        let now_ns = clock::now().micros() * 1000;
        if let Err(error) =
            self.loaded.maps.heartbeat.update(&0_u32.to_ne_bytes(), &now_ns.to_ne_bytes(), MapFlags::ANY)
        {
            tracing::error!(%error, "the kernel's cache does not hear that the agent is alive");
        }
        self.forget_left();
        self.peers.lock().forget_left(&self.loaded.maps.peers);
        if let Some(guard) = &self.guard {
            guard.look(clock::now(), || self.remotes());
        }
    }

    /// Readable when connections have ended.
    pub fn events(&self) -> BorrowedFd<'_> {
        self.loaded.events.as_fd()
    }

    /// Hears of the ends of connections.
    pub fn take_events(&self, mut heard: impl FnMut(FlowEvent)) {
        for event in self.loaded.events.take() {
            let seen = Seen(event.seen);
            let has_wire = seen.pinhole() || seen.too_big().is_some() || seen.opened();
            let wire = has_wire.then(|| layout::flow_key_of(&event.wire));
            heard(FlowEvent { flow: FlowId(event.flow), seen, wire });
        }
    }

    /// How many flows have shown that what is rewritten for them in place does not reach their programs.
    pub fn undelivered(&self) -> u64 {
        self.count(layout::COUNT_UNDELIVERED)
    }

    fn count(&self, number: u32) -> u64 {
        counted(&self.loaded.maps.counters, number)
    }

    /// Everything counted, by name, all processors together.
    pub fn counters(&self) -> Vec<(&'static str, u64)> {
        let of_cache = layout::COUNTERS.iter().zip(0..).map(|(name, number)| (*name, self.count(number)));
        let of_guard = self.guard.as_ref().map(|guard| ("drop_reset_of_host", guard.dropped()));
        of_cache.chain(of_guard).collect()
    }

    /// Whether the programs could be attached here.
    pub fn is_possible() -> bool {
        load::has_tcx()
    }

    /// Mounts a BPF file system at `pin_dir`, where there is none: an agent in a sandbox of its own cannot.
    ///
    /// # Errors
    ///
    /// No privilege, or no such file system.
    pub fn prepare(pin_dir: &Path) -> Result<(), Unavailable> {
        load::prepare_pins(pin_dir)
    }

    /// Has nothing sent by the entries that a process has left at `pin_dir`, where no process is to keep them in step
    /// any more. The programs on the cards stay: what peers still send direct is a flow's.
    pub fn stop_sending(pin_dir: &Path) {
        load::remove_egress(pin_dir);
    }

    /// Takes everything out of the kernel that a process has left pinned at `pin_dir`.
    pub fn remove_pins(pin_dir: &Path) {
        load::remove_pins(pin_dir);
    }
}

fn get<T: Plain>(map: &impl MapCore, key: &[u8]) -> Option<T> {
    T::read(&map.lookup(key, MapFlags::ANY).ok().flatten()?)
}

/// An element of an array of counters, all processors together.
fn counted(map: &impl MapCore, number: u32) -> u64 {
    let values = map.lookup_percpu(&number.to_ne_bytes(), MapFlags::ANY).ok().flatten();
    let value = |bytes: &Vec<u8>| bytes.as_slice().try_into().map_or(0, u64::from_ne_bytes);
    values.map_or(0, |values| values.iter().map(value).sum())
}

fn put(map: &impl MapCore, key: &[u8], value: &[u8], what: &'static str) -> Result<(), CacheError> {
    map.update(key, value, MapFlags::ANY).map_err(|error| match error.kind() {
        ErrorKind::TooBig => CacheError::Full { what, limit: map.max_entries() },
        _ => CacheError::System(format!("the kernel refused an entry of {what}: {error}")),
    })
}
