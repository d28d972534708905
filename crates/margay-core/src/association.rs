//! Associations: what two hosts share (DESIGN §7). All flows between two hosts use one; a path of it is where they go.

use core::net::{IpAddr, SocketAddr};
use core::time::Duration;

use hashbrown::HashMap;

use crate::certificate::Membership;
use crate::changes::Changes;
use crate::flow::KeyedHash;
use crate::handshake::Keys;
use crate::key::{HostId, HostPublic};
use crate::output::DropReason;
use crate::rng::Rng;
use crate::router_copy::Part;
use crate::time::Instant;

/// Associations without flows that may share one UDP address. A NAT reuses its ports, so a few may; without a bound one
/// address could make every look-up of it slow.
const IDLE_PER_ADDRESS_MAX: usize = 16;
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
    /// The peer has answered what only this start can have asked, or this start met it: what was seen before the window begins is no more
    /// taken for new.
    pub is_fresh: bool,
    /// The last round trip of signalling.
    pub rtt: Option<Duration>,
    /// Largest UDP payload that fits both ends.
    pub datagram_max: u16,
    /// What the peer has proved of its authority.
    pub membership: Option<Membership>,
    /// Flows that use it.
    pub flows: u32,
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
    with_itself: bool,
}

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
            heard: Instant::ZERO,
            hop_key: None,
            router: false,
            greeted: None,
            wire_path: 0,
            direct_proved: None,
            epoch_told: None,
            with_itself: false,
        }
    }

    /// The association of a host with itself: both directions are one.
    pub fn with_itself(mut self) -> Self {
        self.with_itself = true;
        self
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

    /// The key of the peer's tags under its `epoch`. Kept only for the epoch that the peer is known to be in: a stranger who
    /// names others must not push it out.
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
    /// Several hosts may share an address (DESIGN §18).
    by_address: HashMap<SocketAddr, alloc::vec::Vec<u32>, KeyedHash>,
    /// Those whose peer has shown a newer epoch, until somebody has taken note.
    pub(crate) renewed: alloc::vec::Vec<u32>,
    /// Taken out, and the cache has their path records still.
    gone: alloc::vec::Vec<(u32, HostId)>,
    by_ip: HashMap<IpAddr, alloc::vec::Vec<u32>, KeyedHash>,
    limit: usize,
    /// Whose hop key may have changed.
    changes: Changes<Neighbour>,
}

impl AssociationTable {
    /// An empty table for at most `limit`; `hasher` keeps strangers from choosing collisions.
    pub(crate) fn with_hasher(limit: usize, hasher: KeyedHash) -> Self {
        Self {
            by_id: HashMap::with_hasher(hasher),
            by_host: HashMap::with_hasher(hasher),
            by_address: HashMap::with_hasher(hasher),
            renewed: alloc::vec::Vec::new(),
            gone: alloc::vec::Vec::new(),
            by_ip: HashMap::with_hasher(hasher),
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

    /// What hosts have shown of their authorities, to be taken back or shortened.
    pub fn memberships_mut(&mut self) -> impl Iterator<Item = &mut Option<Membership>> {
        self.by_id.values_mut().map(|association| &mut association.membership)
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

    /// Whether two associations are with one host: an older flow may belong to an older association.
    pub fn is_same_peer(&self, one: u32, other: u32) -> bool {
        one == other || self.get(one).zip(self.get(other)).is_some_and(|(one, other)| one.host == other.host)
    }

    /// Those whose peer is at `address`.
    pub fn at_address(&self, address: SocketAddr) -> impl Iterator<Item = &Association> {
        self.by_address.get(&address).into_iter().flatten().filter_map(|id| self.by_id.get(id))
    }

    /// Those whose peer is at `ip`, whatever its UDP port.
    pub fn at_ip(&self, ip: IpAddr) -> impl Iterator<Item = &Association> {
        self.by_ip.get(&ip).into_iter().flatten().filter_map(|id| self.by_id.get(id))
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

    /// Adds one; it is now the one that new flows with the host use. One without flows that it supersedes goes.
    ///
    /// # Errors
    ///
    /// The table is full of associations in use.
    pub fn insert(&mut self, association: Association) -> Result<(), DropReason> {
        let (id, host) = (association.local_id, association.host);
        if let Some(older) = self.newest(host).filter(|older| *older != id)
            && self.get(older).is_some_and(|older| older.flows == 0)
        {
            self.remove(older);
        }
        self.thin_out(association.remote);
        self.insert_beside(association)
    }

    /// The same, but what it supersedes stays for now, and others at its address: flows that need them may be on their way.
    ///
    /// # Errors
    ///
    /// The table is full of associations in use.
    pub fn insert_beside(&mut self, association: Association) -> Result<(), DropReason> {
        let (id, host, remote) = (association.local_id, association.host, association.remote);
        if self.by_id.len() >= self.limit && !self.make_room() {
            return Err(DropReason::Full);
        }
        self.remove(id);
        self.by_id.insert(id, association);
        self.by_host.entry(host).or_default().push(id);
        self.note_address(remote, id);
        self.note_hop_key(host, remote);
        Ok(())
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

    /// Lets the longest unheard association that nothing needs go.
    fn make_room(&mut self) -> bool {
        let oldest = oldest_idle(self.by_id.values());
        oldest.is_some_and(|id| self.remove(id).is_some())
    }

    /// Makes room at one address, if idle associations crowd it.
    fn thin_out(&mut self, address: SocketAddr) {
        let crowd = self.by_address.get(&address).map_or(0, alloc::vec::Vec::len);
        if crowd >= IDLE_PER_ADDRESS_MAX
            && let Some(id) = oldest_idle(self.at_address(address))
        {
            self.remove(id);
        }
    }

    /// Takes one out.
    pub fn remove(&mut self, local_id: u32) -> Option<Association> {
        let (host, remote) = self.get(local_id).map(|association| (association.host, association.remote))?;
        self.note_hop_key(host, remote);
        let association = self.by_id.remove(&local_id)?;
        forget(&mut self.by_host, &association.host, local_id);
        self.forget_address(association.remote, local_id);
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
        self.by_address.entry(address).or_default().push(local_id);
        self.by_ip.entry(address.ip()).or_default().push(local_id);
    }

    fn forget_address(&mut self, address: SocketAddr, local_id: u32) {
        forget(&mut self.by_address, &address, local_id);
        forget(&mut self.by_ip, &address.ip(), local_id);
    }

    /// The peer is at another address now.
    pub fn set_remote(&mut self, local_id: u32, remote: SocketAddr) {
        let Some(association) = self.by_id.get_mut(&local_id) else { return };
        let (host, old) = (association.host, core::mem::replace(&mut association.remote, remote));
        if old != remote {
            self.forget_address(old, local_id);
            self.note_address(remote, local_id);
            self.note_hop_key(host, old);
            self.note_hop_key(host, remote);
        }
    }

    /// A flow uses it.
    pub fn hold(&mut self, local_id: u32) {
        if let Some(association) = self.by_id.get_mut(&local_id) {
            association.flows += 1;
        }
    }

    /// A flow uses it no more. One that is not the newest of its host and has no flows left goes; gives whether it went.
    pub fn release(&mut self, local_id: u32) -> bool {
        let Some(association) = self.by_id.get_mut(&local_id) else { return false };
        association.flows = association.flows.saturating_sub(1);
        let (flows, host) = (association.flows, association.host);
        let is_over = flows == 0 && self.newest(host) != Some(local_id);
        is_over && self.remove(local_id).is_some()
    }
}

/// Takes one index out of a list of them; an empty list goes, too.
fn forget<K: Eq + core::hash::Hash>(lists: &mut HashMap<K, alloc::vec::Vec<u32>, KeyedHash>, key: &K, local_id: u32) {
    if let Some(ids) = lists.get_mut(key) {
        ids.retain(|id| *id != local_id);
        if ids.is_empty() {
            lists.remove(key);
        }
    }
}

/// The longest unheard association without flows that is neither a router's nor the host's own.
fn oldest_idle<'a>(among: impl Iterator<Item = &'a Association>) -> Option<u32> {
    let idle = among.filter(|association| association.flows == 0 && !association.router && !association.with_itself);
    idle.map(|association| (association.heard, association.local_id)).min().map(|(_, id)| id)
}

#[cfg(test)]
mod tests {
    use alloc::collections::BTreeSet;

    use super::*;

    fn association(id: u32, host: u8) -> Association {
        let remote = SocketAddr::new([10, 0, 0, host].into(), 54324);
        Association::new(id, id, HostPublic([host; 32]), Keys { root: [1; 32] }, true, remote)
    }

    fn table(limit: usize) -> AssociationTable {
        AssociationTable::with_hasher(limit, KeyedHash(1, 2))
    }

    #[test]
    fn the_window_takes_each_number_once() {
        let mut rng = Rng::new([4; 32]);
        let (mut window, mut naive) = (ReplayWindow::default(), BTreeSet::new());
        let mut newest = 0_u32;
        for _ in 0..10_000 {
            let sequence = (newest + 1).saturating_sub(rng.u32() % 100) + rng.u32() % 8;
            let wanted = sequence != 0 && !naive.contains(&sequence) && newest < sequence + WINDOW;
            assert_eq!(window.is_new(sequence), wanted, "{sequence} after {newest}");
            if wanted {
                window.note(sequence);
                naive.insert(sequence);
                newest = newest.max(sequence);
            }
        }
    }

    #[test]
    fn the_newest_association_of_a_host_serves_and_older_ones_go_with_their_flows() {
        let mut table = table(10);
        table.insert(association(1, 5)).expect("room");
        table.hold(1);
        table.insert(association(2, 5)).expect("room");
        let host = HostPublic([5; 32]).id();
        assert_eq!(table.by_host(host).map(|association| association.local_id), Some(2));
        assert!(table.get(1).is_some(), "it has a flow");
        assert!(table.release(1));
        assert!(table.get(1).is_none());
        assert_eq!(table.at_address(SocketAddr::new([10, 0, 0, 5].into(), 54324)).count(), 1);
    }

    #[test]
    fn a_full_table_lets_idle_ones_go_and_refuses_when_none_is() {
        let mut table = table(2);
        table.insert(association(1, 1)).expect("room");
        table.insert(association(2, 2)).expect("room");
        table.hold(2);
        table.insert(association(3, 3)).expect("the first is idle");
        assert!(table.get(1).is_none());
        table.hold(3);
        assert_eq!(table.insert(association(4, 4)), Err(DropReason::Full));
    }

    #[test]
    fn each_direction_and_epoch_has_its_own_key() {
        let mut here = association(1, 5);
        let remote = here.remote;
        let mut there = Association::new(1, 1, HostPublic([6; 32]), Keys { root: [1; 32] }, false, remote);
        assert_eq!(here.sending_key(3), there.receiving_key(3));
        assert_eq!(there.sending_key(3), here.receiving_key(3));
        assert_ne!(here.sending_key(3), here.receiving_key(3));
        assert_ne!(here.sending_key(3), here.sending_key(4));
        let mut own = association(1, 5).with_itself();
        assert_eq!(own.sending_key(3), own.receiving_key(3));
    }
    #[test]
    fn idle_associations_do_not_crowd_an_address_and_busy_ones_stay() {
        let mut table = table(1000);
        let crowd = SocketAddr::new([10, 0, 0, 99].into(), 54324);
        for n in 1..=200 {
            let mut one = association(n, n as u8);
            one.remote = crowd;
            one.heard = Instant::from_millis(n.into());
            table.insert(one).expect("room");
            if n <= 40 {
                table.hold(n);
            }
        }
        assert!((1..=40).all(|n| table.get(n).is_some()));
        assert_eq!(table.at_address(crowd).count(), 41, "the newest is always there");
        assert!(table.get(200).is_some());
    }

    /// The three indices say the same after whatever happened, and the bound holds.
    #[test]
    fn whose_hop_key_may_have_changed_is_given_to_a_copy_once() {
        let mut table = table(9);
        let (host, at) =
            (Neighbour::Host(association(1, 1).host), |n| Neighbour::At(SocketAddr::new([10, 0, 0, n].into(), 1)));
        let with_key = |id, n| {
            let remote = SocketAddr::new([10, 0, 0, n].into(), 1);
            Association { hop_key: Some([n; 16]), remote, ..association(id, 1) }
        };
        table.insert(with_key(1, 5)).expect("room");
        table.insert(association(2, 2)).expect("room");
        table.follow_hop_keys();
        assert!(table.has_news());
        let key = Some([5; 16]);
        let first = Part { begins_anew: true, changed: alloc::vec![(host, key), (at(5), key)] };
        assert_eq!(table.take_hop_keys(9), first);
        table.insert(association(3, 3)).expect("room");
        let nothing = Part { begins_anew: false, changed: alloc::vec![] };
        assert_eq!((table.has_news(), table.take_hop_keys(9)), (false, nothing), "it has none");
        table.set_remote(1, SocketAddr::new([10, 0, 0, 6].into(), 1));
        assert_eq!(table.take_hop_keys(9).changed, [(host, key), (at(5), None), (at(6), key)]);
        table.insert(with_key(4, 7)).expect("room");
        let key = Some([7; 16]);
        assert_eq!(
            table.take_hop_keys(9).changed,
            [(host, key), (at(6), None), (at(7), key)],
            "it superseded the other"
        );
        table.remove(4);
        assert_eq!(table.take_hop_keys(9).changed, [(host, None), (at(7), None)]);
    }

    #[test]
    fn the_indices_agree_after_any_history() {
        let mut rng = Rng::new([11; 32]);
        let mut table = table(12);
        for step in 0..20_000_u64 {
            let n = rng.u32() % 20 + 1;
            match rng.u32() % 6 {
                0 | 1 => {
                    let mut one = association(n, (rng.u32() % 6) as u8);
                    one.heard = Instant::from_millis(step);
                    let host = one.host;
                    if table.insert(one).is_ok() {
                        assert_eq!(table.by_host(host).map(|known| known.local_id), Some(n));
                    }
                }
                2 => table.hold(n),
                3 => {
                    let was = table.get(n).map(|known| known.flows);
                    assert!(!table.release(n) || was.is_some_and(|flows| flows <= 1));
                }
                4 => {
                    table.remove(n);
                }
                _ => table.set_remote(n, SocketAddr::new([10, 0, 0, (rng.u32() % 6) as u8].into(), 54324)),
            }
            assert!(table.len() <= 12);
            let count = |lists: alloc::vec::Vec<usize>| lists.iter().sum::<usize>();
            assert_eq!(count(table.by_address.values().map(alloc::vec::Vec::len).collect()), table.len());
            assert_eq!(count(table.by_ip.values().map(alloc::vec::Vec::len).collect()), table.len());
            assert_eq!(count(table.by_host.values().map(alloc::vec::Vec::len).collect()), table.len());
            for known in table.iter() {
                assert!(table.at_address(known.remote).any(|at| at.local_id == known.local_id));
                assert!(known.flows == 0 || table.get(known.local_id).is_some());
            }
            let is_its = |host: &HostId, id: &u32| table.get(*id).is_some_and(|known| known.host == *host);
            assert!(table.by_host.iter().all(|(host, ids)| ids.iter().all(|id| is_its(host, id))));
        }
    }
}
