//! Associations: what two hosts share (DESIGN §7). All flows between two hosts use one; a path of it is where they go.

pub mod auth;
pub(crate) mod draft;
pub mod location;
pub mod twin;

use alloc::collections::{BTreeMap, BTreeSet};
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;

use hashbrown::HashMap;
use margay_wire::{STACK_FEC, STACK_SCTP};

use crate::leg::seal::Cipher;
use crate::table::changes::{Changes, Part};
use crate::trust::certificate::Membership;
use crate::trust::handshake::Keys;
use crate::trust::standing::{Listed, Standing, Standings};
use crate::types::drop_reason::DropReason;
use crate::types::fair_table::{Full, Peer};
use crate::types::key::{HostId, HostPublic};
use crate::types::keyed_hash::KeyedHash;
use crate::types::rng::Rng;
use crate::types::role::Role;
use crate::types::time::Instant;

/// Associations at one UDP address that a look-up of it goes through. A NAT reuses its ports, so a few hosts may
/// share one.
const AT_ADDRESS_MAX: usize = 64;
/// Associations with one host: each but the newest has flows, of connections that began at once, before the first
/// answer, or from before the two lost what they shared. More than programs open within a round trip; a host alone
/// fills no table with them.
const WITH_HOST_MAX: usize = 1024;
/// How far behind the newest a control sequence number may come.
const WINDOW: u32 = 64;

/// Which sequence numbers of a peer were seen: the newest, and the 64 up to it.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReplayWindow {
    newest: u32,
    seen: u64,
}

impl ReplayWindow {
    /// Whether `sequence` is new.
    pub fn is_new(&self, sequence: u32) -> bool {
        if sequence > self.newest {
            return true;
        }
        let behind = self.newest - sequence;
        sequence != 0 && behind < WINDOW && self.seen & (1 << behind) == 0
    }

    /// Whether nothing later has been seen.
    pub const fn is_newest(&self, sequence: u32) -> bool {
        sequence >= self.newest
    }

    /// Marks it seen.
    pub fn note(&mut self, sequence: u32) {
        if sequence > self.newest {
            let ahead = sequence - self.newest;
            self.seen = if ahead < WINDOW { self.seen << ahead } else { 0 };
            self.newest = sequence;
        }
        let behind = self.newest - sequence;
        if behind < WINDOW {
            self.seen |= 1 << behind;
        }
    }
}

/// What this host shares with a peer.
pub struct Association {
    /// Index by which the peer names it to us.
    pub local_id: u32,
    /// Index by which we name it to the peer.
    pub remote_id: u32,
    /// The peer.
    pub host: HostId,
    /// The peer's public key.
    pub host_key: HostPublic,
    keys: Keys,
    /// Which of the two directions is ours.
    initiator: bool,
    /// Sending and receiving keys with the epochs that they are of.
    send_key: Option<(u32, [u8; 32])>,
    receive_key: Option<(u32, [u8; 32])>,
    sent: u32,
    /// The newest epoch of the peer.
    pub peer_epoch: u32,
    /// What came under it.
    pub window: ReplayWindow,
    /// The peer's boot, once it said so.
    pub boot_id: Option<[u8; 16]>,
    /// The peer's UDP address.
    pub remote: SocketAddr,
    /// This host's address that it is reached from; `None` where the host's routing decides, and before that is known.
    pub local: Option<IpAddr>,
    /// The pair was chosen for a reason of its own: the host's routing does not overrule it.
    pub chosen: bool,
    /// Taken up from an earlier start of the agent, and not looked at since.
    pub is_kept: bool,
    /// The peer has answered what only this start can have asked, or this start met it: what was seen before the window
    /// begins is no more taken for new.
    pub is_fresh: bool,
    /// The last round trip of signalling.
    pub rtt: Option<Duration>,
    /// Largest UDP payload that fits both ends.
    pub datagram_max: u16,
    /// What the peer has proved of its authority.
    pub membership: Option<Membership>,
    /// Flows that use it.
    pub flows: u32,
    /// Those of them that the peer has begun.
    served: u32,
    /// When a right tag came last.
    pub heard: Instant,
    /// Key of hop tags, between router and host.
    pub hop_key: Option<[u8; 16]>,
    /// One end is the other's service router.
    pub router: bool,
    /// When the peer was last greeted.
    pub greeted: Option<Instant>,
    /// The path record that direct flows name: this one's index, or that of an older association at the same address.
    pub wire_path: u32,
    /// When a flow last proved that direct packets pass both ways; `None` once one was stopped.
    pub direct_proved: Option<Instant>,
    /// When the peer was last told this agent's epoch for the sake of sealed flows.
    pub epoch_told: Option<Instant>,
    /// What the peer can do: a bit for each stack, and [`CHANGES`](margay_wire::CHANGES). Zero where it has not said.
    pub stacks: u32,
    /// When the peer was last told the stack of a flow.
    pub stack_told: Option<Instant>,
    with_itself: bool,
    /// Its number among those at its address, in the order in which they came there.
    arrival: u64,
    /// Where the table lists it.
    listed: Option<Listed>,
}

/// Bit of [`Association::stacks`]: the peer has `fec`, and says what it has received of a flow.
pub(crate) const FEC: u32 = 1 << STACK_FEC;
/// Bit of [`Association::stacks`]: the peer has `sctp`.
pub(crate) const SCTP: u32 = 1 << STACK_SCTP;

impl Association {
    /// A new association. `initiator`: this end started the handshake.
    pub fn new(
        local_id: u32,
        remote_id: u32,
        peer: HostPublic,
        keys: Keys,
        initiator: bool,
        remote: SocketAddr,
    ) -> Self {
        Self {
            local_id,
            remote_id,
            host: peer.id(),
            host_key: peer,
            keys,
            initiator,
            send_key: None,
            receive_key: None,
            sent: 0,
            peer_epoch: 0,
            window: ReplayWindow::default(),
            boot_id: None,
            remote,
            local: None,
            chosen: false,
            is_kept: false,
            is_fresh: true,
            rtt: None,
            datagram_max: 1200,
            membership: None,
            flows: 0,
            served: 0,
            heard: Instant::ZERO,
            hop_key: None,
            router: false,
            greeted: None,
            wire_path: 0,
            direct_proved: None,
            epoch_told: None,
            stacks: 0,
            stack_told: None,
            with_itself: false,
            arrival: 0,
            listed: None,
        }
    }

    /// The association of a host with itself: both directions are one.
    pub fn with_itself(mut self) -> Self {
        self.with_itself = true;
        self
    }

    /// Whether the peer has `fec`.
    pub fn has_fec(&self) -> bool {
        self.stacks & FEC != 0
    }

    /// Whether the peer has `fec` that is sealed with a cipher.
    pub fn has_sealed_fec(&self, cipher: Cipher) -> bool {
        self.stacks & cipher.fec_bit() != 0
    }

    /// Whether the peer has `sctp`.
    pub fn has_sctp(&self) -> bool {
        self.stacks & SCTP != 0
    }

    /// Whether the peer has `sctp` that is sealed with a cipher.
    pub fn has_sealed_sctp(&self, cipher: Cipher) -> bool {
        self.stacks & cipher.sctp_bit() != 0
    }

    /// Whether the peer is this host.
    pub fn is_self(&self) -> bool {
        self.with_itself
    }

    /// Whether this host is a router, and the peer is registered with it.
    pub fn is_of_registered(&self) -> bool {
        self.router && !self.initiator
    }

    /// Whether the peer is a router that this host is registered with.
    pub fn is_with_router(&self) -> bool {
        self.router && self.initiator
    }

    /// Router or host of one another, or this host itself.
    const fn is_tied(&self) -> bool {
        self.router || self.with_itself || self.hop_key.is_some()
    }

    /// What its peer's entries in shared tables count for.
    pub const fn peer(&self) -> Peer {
        match &self.membership {
            _ if self.with_itself => Peer::Own,
            None if !self.is_tied() => Peer::Unauthenticated(self.remote.ip()),
            _ => Peer::Member(self.host),
        }
    }

    /// Where it is to be listed, if it was of use at `since`.
    fn place(&self, since: Instant) -> Listed {
        let is_tied = self.is_tied();
        let standing = match &self.membership {
            _ if self.flows > 0 || is_tied => Standing::InUse,
            Some(_) => Standing::Member,
            None => Standing::Stranger,
        };
        let is_own = self.initiator && self.served == 0;
        Listed { standing, peer: self.peer(), is_own, served: self.served, since }
    }

    /// Whether this end started the handshake.
    pub fn is_initiator(&self) -> bool {
        self.initiator
    }

    pub(crate) fn root_key(&self) -> [u8; 32] {
        self.keys.root
    }

    /// The next control sequence number. Four thousand million control messages do not pass in one epoch of one pair.
    pub fn next_seq(&mut self) -> u32 {
        self.sent = self.sent.saturating_add(1);
        self.sent
    }

    fn derive(&self, from_initiator: bool, epoch: u32) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key("margay 2026 control tag");
        hasher.update(&self.keys.root).update(&[u8::from(from_initiator)]).update(&epoch.to_be_bytes());
        *hasher.finalize().as_bytes()
    }

    /// The key of our own tags under our `epoch`.
    pub fn sending_key(&mut self, epoch: u32) -> [u8; 32] {
        match self.send_key {
            Some((of, key)) if of == epoch => key,
            _ => {
                let key = self.derive(self.initiator, epoch);
                self.send_key = Some((epoch, key));
                key
            }
        }
    }

    /// The key of the peer's tags under its `epoch`. Kept only for the epoch that the peer is known to be in: a
    /// stranger who names others must not push it out.
    pub fn receiving_key(&mut self, epoch: u32) -> [u8; 32] {
        match self.receive_key {
            Some((of, key)) if of == epoch => key,
            _ => {
                let key = self.derive(self.with_itself == self.initiator, epoch);
                if epoch == self.peer_epoch {
                    self.receive_key = Some((epoch, key));
                }
                key
            }
        }
    }
}

/// Somebody that this host may share a hop key with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Neighbour {
    /// Whom packets are tagged for.
    Host(HostId),
    /// Whose tags are checked.
    At(SocketAddr),
}

/// Every association of a host: by our index, by peer, by the peer's address.
pub struct AssociationTable {
    by_id: HashMap<u32, Association, KeyedHash>,
    /// The associations with each host, the newest last.
    by_host: HashMap<HostId, alloc::vec::Vec<u32>, KeyedHash>,
    /// Several hosts may share an address (DESIGN §18); in the order in which they came there.
    by_address: BTreeMap<(SocketAddr, u64), u32>,
    arrivals: u64,
    /// What each is worth keeping for.
    standings: Standings,
    /// Those where one end is the other's service router.
    routers: BTreeSet<u32>,
    /// Routers that want to be asked no more.
    leaving: BTreeSet<HostId>,
    /// The latest time that the table was told of.
    now: Instant,
    /// Those whose peer has shown a newer epoch, until somebody has taken note.
    pub(crate) renewed: alloc::vec::Vec<u32>,
    /// Those whose peer does not know this agent's epoch, until it is told.
    pub(crate) outdated: alloc::vec::Vec<u32>,
    /// This agent's.
    epoch: u32,
    /// Taken out, and the cache has their path records still.
    gone: alloc::vec::Vec<(u32, HostId)>,
    limit: usize,
    /// Whose hop key may have changed.
    changes: Changes<Neighbour>,
}

impl AssociationTable {
    /// An empty table for at most `limit`, and so many `flows`, of an agent in its present `epoch`; `hasher` keeps
    /// strangers from choosing collisions.
    pub(crate) fn with_hasher(limit: usize, flows: usize, epoch: u32, hasher: KeyedHash) -> Self {
        Self {
            by_id: HashMap::with_hasher(hasher),
            by_host: HashMap::with_hasher(hasher),
            by_address: BTreeMap::new(),
            arrivals: 0,
            standings: Standings::new(limit, flows),
            routers: BTreeSet::new(),
            leaving: BTreeSet::new(),
            now: Instant::ZERO,
            renewed: alloc::vec::Vec::new(),
            outdated: alloc::vec::Vec::new(),
            epoch,
            gone: alloc::vec::Vec::new(),
            limit,
            changes: Changes::new(2 * limit),
        }
    }

    /// Keeps note of what changes of hop keys from now on, for whoever holds a copy.
    pub(crate) const fn follow_hop_keys(&mut self) {
        self.changes.follow();
    }

    pub(crate) const fn changes(&mut self) -> &mut Changes<Neighbour> {
        &mut self.changes
    }

    pub(crate) fn has_news(&self) -> bool {
        self.changes.has_news()
    }

    /// The hop keys of up to `max` neighbours for whom they may have changed; whether the copy must begin anew.
    pub(crate) fn take_hop_keys(&mut self, max: usize) -> Part<(Neighbour, Option<[u8; 16]>)> {
        let with_key = self.by_id.values().filter(|association| association.hop_key.is_some());
        let both = |one: &Association| [Neighbour::Host(one.host), Neighbour::At(one.remote)];
        let begins_anew = self.changes.begin_anew(with_key.flat_map(both));
        let changed = self.changes.take(max);
        Part { begins_anew, changed: changed.into_iter().map(|who| (who, self.hop_key(who))).collect() }
    }

    /// The hop key that this host shares with a neighbour.
    pub fn hop_key(&self, neighbour: Neighbour) -> Option<[u8; 16]> {
        match neighbour {
            Neighbour::Host(host) => self.by_host(host).and_then(|association| association.hop_key),
            Neighbour::At(address) => self.at_address(address).find_map(|association| association.hop_key),
        }
    }

    /// One with `host` at `address` came or went: with it, a hop key may have.
    fn note_hop_key(&mut self, host: HostId, address: SocketAddr) {
        if self.all_with(host).any(|association| association.hop_key.is_some()) {
            self.changes.note(Neighbour::Host(host));
            self.changes.note(Neighbour::At(address));
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    /// All of them, in no order.
    pub fn iter(&self) -> impl Iterator<Item = &Association> {
        self.by_id.values()
    }

    /// Those that flows use, and those where one end is the other's service router.
    pub fn in_use(&self) -> impl Iterator<Item = &Association> {
        self.standings.in_use().filter_map(|id| self.by_id.get(&id))
    }

    /// Those that the next start of the agent shall have: all but most of the idle ones with strangers.
    pub fn kept(&self) -> impl Iterator<Item = u32> + '_ {
        self.standings.kept()
    }

    /// Whether those have changed since this was asked last, strangers aside that have come and gone without a flow.
    pub fn take_kept_news(&mut self) -> bool {
        self.standings.take_news()
    }

    /// How many are idle, with peers that nobody vouches for.
    pub fn strangers(&self) -> usize {
        self.standings.strangers()
    }

    /// The newest with a service router: of this host, or where this host is one, a host that is registered. One that
    /// is leaving comes after all others.
    pub fn router(&self) -> Option<&Association> {
        let last = |one: &&Association| (self.leaving.contains(&one.host), !self.is_newest(one.local_id));
        self.routers().min_by_key(last)
    }

    /// Sets whether a router wants to be asked no more.
    pub(crate) fn set_leaving(&mut self, router: HostId, is_leaving: bool) {
        if is_leaving {
            self.leaving.insert(router);
        } else {
            self.leaving.remove(&router);
        }
    }

    /// Those with routers.
    pub fn routers(&self) -> impl Iterator<Item = &Association> {
        self.routers.iter().filter_map(|id| self.by_id.get(id))
    }

    /// What the entries of a host count for in shared tables.
    pub(crate) fn peer_of(&self, host: HostId) -> Peer {
        self.by_host(host).map_or(Peer::Member(host), Association::peer)
    }

    /// Whether a router that this host is registered with is at `address`.
    pub(crate) fn is_own_router_at(&self, address: SocketAddr) -> bool {
        self.at_address(address).any(Association::is_with_router)
    }

    /// What a host has shown of its authority.
    pub fn set_membership(&mut self, local_id: u32, membership: Option<Membership>) {
        if let Some(association) = self.by_id.get_mut(&local_id) {
            association.membership = membership;
            self.list_again(local_id, None);
        }
    }

    /// What a peer has said that it can do.
    pub fn set_stacks(&mut self, local_id: u32, stacks: u32) {
        let Some(association) = self.by_id.get_mut(&local_id).filter(|known| known.stacks != stacks) else { return };
        association.stacks = stacks;
        if association.flows > 0 {
            self.standings.note_news();
        }
    }

    /// Takes back or shortens what hosts have shown of their authorities.
    pub fn revise_memberships(&mut self, mut revise: impl FnMut(&mut Option<Membership>)) {
        let is_of_member = |(id, one): (&u32, &Association)| one.membership.is_some().then_some(*id);
        let members: alloc::vec::Vec<u32> = self.by_id.iter().filter_map(is_of_member).collect();
        for id in members {
            if let Some(association) = self.by_id.get_mut(&id) {
                revise(&mut association.membership);
            }
            self.list_again(id, None);
        }
    }

    /// Somebody has use for it now: it is not the next one to go.
    pub fn touch(&mut self, local_id: u32, now: Instant) {
        self.now = self.now.max(now);
        self.list_again(local_id, Some(now));
    }

    /// Lets idle ones go whose time is over; gives how many.
    pub fn expire(&mut self, now: Instant) -> usize {
        self.now = self.now.max(now);
        let over = self.standings.expired(now);
        over.iter().filter(|id| self.remove(**id).is_some()).count()
    }

    /// When the next one's time is over, if no message comes under it.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.standings.next_expiry()
    }

    /// Lists it where it belongs after a change. `used`: when it was last of use, where that has changed.
    fn list_again(&mut self, local_id: u32, used: Option<Instant>) {
        let Some(association) = self.by_id.get_mut(&local_id) else { return };
        let Some(listed) = association.listed else { return };
        let place = association.place(used.map_or(listed.since, |at| at.max(listed.since)));
        association.listed = Some(place);
        self.standings.change(local_id, &listed, &place);
    }

    /// By our index.
    pub fn get(&self, local_id: u32) -> Option<&Association> {
        self.by_id.get(&local_id)
    }

    /// By our index.
    pub fn get_mut(&mut self, local_id: u32) -> Option<&mut Association> {
        self.by_id.get_mut(&local_id)
    }

    /// The newest with a host.
    pub fn by_host(&self, host: HostId) -> Option<&Association> {
        self.newest(host).and_then(|id| self.by_id.get(&id))
    }

    fn newest(&self, host: HostId) -> Option<u32> {
        self.by_host.get(&host)?.last().copied()
    }

    /// All with a host, the newest last.
    pub fn all_with(&self, host: HostId) -> impl Iterator<Item = &Association> {
        self.by_host.get(&host).into_iter().flatten().filter_map(|id| self.by_id.get(id))
    }

    /// Whether a flow goes by the pair of addresses that all associations with a host share.
    pub fn has_flows_with(&self, host: HostId) -> bool {
        self.all_with(host).any(|association| association.flows > 0)
    }

    /// Whether two associations are with one host: an older flow may belong to an older association.
    pub fn is_same_peer(&self, one: u32, other: u32) -> bool {
        one == other || self.get(one).zip(self.get(other)).is_some_and(|(one, other)| one.host == other.host)
    }

    /// Those whose peer is at `address`, as far as they are not too many to be looked at.
    pub fn at_address(&self, address: SocketAddr) -> impl Iterator<Item = &Association> {
        let there = self.by_address.range((address, 0)..=(address, u64::MAX));
        there.take(AT_ADDRESS_MAX).filter_map(|(_, id)| self.by_id.get(id))
    }

    /// Those whose peer is at `ip`, whatever its UDP port, as far as they are not too many to be looked at.
    pub fn at_ip(&self, ip: IpAddr) -> impl Iterator<Item = &Association> {
        let [first, last] = [0, u16::MAX].map(|port| SocketAddr::new(ip, port));
        let there = self.by_address.range((first, 0)..=(last, u64::MAX));
        there.take(AT_ADDRESS_MAX).filter_map(|(_, id)| self.by_id.get(id))
    }

    /// That of them under which a peer has said something last. Of older ones the peer may know nothing any more.
    pub fn last_heard_at(&self, address: SocketAddr) -> Option<&Association> {
        let there = self.by_address.range((address, 0)..=(address, u64::MAX)).rev();
        let there = there.take(AT_ADDRESS_MAX).filter_map(|(_, id)| self.by_id.get(id));
        there.max_by_key(|association| (association.heard, association.arrival))
    }

    /// Whether any peer is at `ip`, whatever its UDP port.
    pub fn is_any_at(&self, ip: IpAddr) -> bool {
        let [first, last] = [0, u16::MAX].map(|port| SocketAddr::new(ip, port));
        self.by_address.range((first, 0)..=(last, u64::MAX)).next().is_some()
    }

    /// Whether the peer `host` is at `ip`, whatever its UDP port, by any association with it.
    pub fn is_at(&self, host: HostId, ip: IpAddr) -> bool {
        self.all_with(host).any(|association| association.remote.ip() == ip)
    }

    /// An index that is random, free and not zero.
    pub fn fresh_id(&self, rng: &mut Rng) -> u32 {
        loop {
            let id = rng.u32();
            if id != 0 && !self.by_id.contains_key(&id) {
                return id;
            }
        }
    }

    /// Adds one; it is now the one that new flows with the host use. One without flows that it supersedes goes. Gives
    /// how many idle ones had to make room.
    ///
    /// # Errors
    ///
    /// The table is full of associations in use, or of those that only the like of this one may push out.
    pub fn insert(&mut self, association: Association) -> Result<usize, DropReason> {
        let (id, host) = (association.local_id, association.host);
        if let Some(older) = self.newest(host).filter(|older| *older != id)
            && self.get(older).is_some_and(|older| older.flows == 0)
        {
            self.remove(older);
        }
        let mut gone = 0;
        if association.place(association.heard).standing == Standing::Stranger
            && let Some(other) = self.standings.crowded(association.remote.ip(), self.limit)
        {
            gone += usize::from(self.remove(other).is_some());
        }
        Ok(gone + self.insert_beside(association)?)
    }

    /// The same, but what it supersedes stays for now, and others at its address: flows that need them may be on their
    /// way.
    ///
    /// # Errors
    ///
    /// As above; or there are too many with this host, all with flows.
    pub fn insert_beside(&mut self, mut association: Association) -> Result<usize, DropReason> {
        let (id, host, remote) = (association.local_id, association.host, association.remote);
        let place = association.place(association.heard.max(self.now));
        if self.by_host.get(&host).is_some_and(|ids| ids.len() >= WITH_HOST_MAX && !ids.contains(&id)) {
            return Err(DropReason::Full);
        }
        let mut gone = 0;
        if self.by_id.len() >= self.limit || !self.standings.has_share_left(&place) {
            let idle = self.standings.dispensable(&place).ok_or(DropReason::Full)?;
            gone += usize::from(self.remove(idle).is_some());
        }
        self.remove(id);
        association.listed = Some(place);
        self.standings.add(id, &place);
        if association.router {
            self.routers.insert(id);
        }
        self.by_id.insert(id, association);
        self.by_host.entry(host).or_default().push(id);
        self.note_address(remote, id);
        self.note_hop_key(host, remote);
        Ok(gone)
    }

    /// Whether new flows with its host use it.
    pub fn is_newest(&self, local_id: u32) -> bool {
        self.get(local_id).is_some_and(|association| self.newest(association.host) == Some(local_id))
    }

    /// Lets those go that are superseded and have no flows.
    pub fn forget_superseded(&mut self) {
        let is_over = |one: &&Association| one.flows == 0 && !self.is_newest(one.local_id);
        let over: alloc::vec::Vec<u32> = self.iter().filter(is_over).map(|one| one.local_id).collect();
        over.into_iter().for_each(|id| drop(self.remove(id)));
    }

    /// Takes one out.
    pub fn remove(&mut self, local_id: u32) -> Option<Association> {
        let (host, remote) = self.get(local_id).map(|association| (association.host, association.remote))?;
        self.note_hop_key(host, remote);
        let association = self.by_id.remove(&local_id)?;
        if let Some(ids) = self.by_host.get_mut(&host) {
            ids.retain(|id| *id != local_id);
            if ids.is_empty() {
                self.by_host.remove(&host);
            }
        }
        self.by_address.remove(&(remote, association.arrival));
        self.routers.remove(&local_id);
        if let Some(listed) = &association.listed {
            self.standings.remove(local_id, listed);
        }
        self.gone.push((local_id, association.host));
        Some(association)
    }

    /// One that was taken out and has not come back, and its host: once each.
    pub(crate) fn pop_gone(&mut self) -> Option<(u32, HostId)> {
        while let Some((local_id, host)) = self.gone.pop() {
            if !self.by_id.contains_key(&local_id) {
                return Some((local_id, host));
            }
        }
        None
    }

    /// Whether [`pop_gone`](Self::pop_gone) may have one.
    pub(crate) fn has_gone(&self) -> bool {
        !self.gone.is_empty()
    }

    fn note_address(&mut self, address: SocketAddr, local_id: u32) {
        self.arrivals += 1;
        if let Some(association) = self.by_id.get_mut(&local_id) {
            association.arrival = self.arrivals;
            self.by_address.insert((address, self.arrivals), local_id);
        }
    }

    /// The peer is at another address now.
    pub fn set_remote(&mut self, local_id: u32, remote: SocketAddr) {
        let Some(association) = self.by_id.get_mut(&local_id) else { return };
        let (host, old) = (association.host, core::mem::replace(&mut association.remote, remote));
        if old != remote {
            self.by_address.remove(&(old, association.arrival));
            self.note_address(remote, local_id);
            self.list_again(local_id, None);
            self.note_hop_key(host, old);
            self.note_hop_key(host, remote);
        }
    }

    /// Whether its peer may begin another flow here.
    ///
    /// # Errors
    ///
    /// What is full: the peer, or those that it is counted with, have their share.
    pub fn check_flow_share(&self, local_id: u32) -> Result<(), Full> {
        let listed = self.get(local_id).and_then(|association| association.listed.as_ref());
        listed.map_or(Ok(()), |listed| self.standings.check_served(listed))
    }

    /// A flow uses it. `role`: this host's in the flow.
    pub fn hold_flow(&mut self, local_id: u32, role: Role) {
        if let Some(association) = self.by_id.get_mut(&local_id) {
            association.served += u32::from(role == Role::Responder);
        }
        self.hold(local_id);
    }

    /// A flow uses it no more; as [`Self::release`].
    pub fn release_flow(&mut self, local_id: u32, role: Role) -> bool {
        if let Some(association) = self.by_id.get_mut(&local_id) {
            association.served = association.served.saturating_sub(u32::from(role == Role::Responder));
        }
        self.release(local_id)
    }

    /// Something needs it that is no flow, or is about to be one.
    pub fn hold(&mut self, local_id: u32) {
        if let Some(association) = self.by_id.get_mut(&local_id) {
            association.flows += 1;
            self.list_again(local_id, None);
        }
    }

    /// Something needs it no more. One that is not the newest of its host and has no flows left goes; gives whether it
    /// went.
    pub fn release(&mut self, local_id: u32) -> bool {
        let Some(association) = self.by_id.get_mut(&local_id) else { return false };
        association.flows = association.flows.saturating_sub(1);
        let (flows, host) = (association.flows, association.host);
        self.list_again(local_id, Some(self.now));
        let is_over = flows == 0 && self.newest(host) != Some(local_id);
        is_over && self.remove(local_id).is_some()
    }
}

#[cfg(test)]
mod test;
