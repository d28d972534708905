//! Bounded tables in which no peer can take what others need (DESIGN §3.11): one peer has at most a sixteenth, and
//! what this host itself asks for has room of its own.
//!
//! A peer that an authority vouches for is counted by its host-ID, whatever its addresses and associations are. A
//! host-ID that nobody vouches for costs nothing, so such a peer is counted by where it is: by its address (a /64 of
//! IPv6), by its network (a /24, or a /48 of IPv6), and all of them together, who never get the half that is left to
//! members. What comes through the middlebox of another host is known by its client's signature alone: it counts for
//! that client, and for the middlebox's host, behind which no more than a quarter is. Of what this host gives to its
//! own users, one of them has a quarter at most, and root room of its own.
//!
//! Where honest members may need much more than a sixteenth, shares are elastic: a member may have as much as is free.
//! One alone has at most half of all, a second one at most half of the rest, and so on.

use alloc::collections::BTreeMap;
use alloc::collections::btree_map;
use core::net::IpAddr;
use core::ops::RangeBounds;

use super::key::HostId;
use super::site::Site;

/// A peer has at most one of so many places.
const PEER_SHARE: usize = 16;
/// The same of a network of unauthenticated hosts, of all that are behind the middlebox of one host, and of a local
/// user.
const GROUP_SHARE: usize = 4;
/// The same of all unauthenticated hosts.
const UNAUTHENTICATED_SHARE: usize = 2;

/// Whose an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Peer {
    /// This host's: of its operator, its agent, or its programs.
    Own,
    /// A user of this host but root.
    User(u32),
    /// A host that an authority vouches for which this host trusts.
    Member(HostId),
    /// Any other host, at the address that it has shown.
    Unauthenticated(IpAddr),
    /// A host that speaks through the middlebox of another one.
    Behind {
        /// Who has signed.
        host: HostId,
        /// Whose middlebox it is.
        by: HostId,
    },
}

/// What has no more room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Full {
    /// The peer has its share.
    #[error("the peer has its share of {share} already; try again when one of them has ended")]
    Peer {
        /// The most that one peer may have.
        share: usize,
    },
    /// The peer's network, those behind its middlebox, or all hosts without a certificate have theirs.
    #[error(
        "the peer's network, the hosts behind its middlebox, or all hosts without a certificate that is trusted here \
         have their share of {share} already; try again later"
    )]
    Group {
        /// The most that they may have together.
        share: usize,
    },
    /// The whole table is taken.
    #[error("all {limit} are taken; try again when one of them has ended")]
    Table {
        /// The bound.
        limit: usize,
    },
}

impl Full {
    /// The bound that was met.
    pub const fn limit(self) -> usize {
        match self {
            Self::Peer { share } | Self::Group { share } => share,
            Self::Table { limit } => limit,
        }
    }
}

/// What is counted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Account {
    Own,
    Peers,
    User(u32),
    Member(HostId),
    Site(Site),
    Behind(HostId),
    Unauthenticated,
}

impl Peer {
    /// All that an entry of this peer counts for, the smallest first.
    fn accounts(self) -> impl Iterator<Item = Account> {
        let accounts = match self {
            Self::Own => [Some(Account::Own), None, None, None],
            Self::User(uid) => [Some(Account::User(uid)), Some(Account::Peers), None, None],
            Self::Member(host) => [Some(Account::Member(host)), Some(Account::Peers), None, None],
            Self::Unauthenticated(address) => {
                let [at, network] = Site::both(address).map(|site| Some(Account::Site(site)));
                [at, network, Some(Account::Unauthenticated), Some(Account::Peers)]
            }
            Self::Behind { host, by } => {
                [Some(Account::Member(host)), Some(Account::Behind(by)), Some(Account::Peers), None]
            }
        };
        accounts.into_iter().flatten()
    }
}

/// How much of a bounded thing each peer has: places, or bytes.
#[derive(Clone, Debug)]
pub struct FairShares {
    used: BTreeMap<Account, usize>,
    limit: usize,
    own: usize,
    is_elastic: bool,
    refused: u64,
}

impl FairShares {
    /// `limit` for all peers together, and `own` beside it for this host, which no peer can use up.
    pub const fn new(limit: usize, own: usize) -> Self {
        Self { used: BTreeMap::new(), limit, own, is_elastic: false, refused: 0 }
    }

    /// The same, but a member may have as much as is free where that is more than a sixteenth.
    pub const fn elastic(limit: usize, own: usize) -> Self {
        let mut shares = Self::new(limit, own);
        shares.is_elastic = true;
        shares
    }

    /// Whether this peer may have so much more.
    ///
    /// # Errors
    ///
    /// What is full.
    pub fn check(&self, peer: Peer, amount: usize) -> Result<(), Full> {
        peer.accounts().try_for_each(|account| {
            let full = self.bound(account);
            let left = full.limit().saturating_sub(self.used_by(account));
            if amount <= left { Ok(()) } else { Err(full) }
        })
    }

    /// Gives this peer so much more.
    ///
    /// # Errors
    ///
    /// What is full; the peer has what it had.
    pub fn take(&mut self, peer: Peer, amount: usize) -> Result<(), Full> {
        self.check(peer, amount).inspect_err(|_| self.refused += 1)?;
        self.add(peer, amount);
        Ok(())
    }

    /// Counts what this peer has already, whatever its share is.
    pub fn add(&mut self, peer: Peer, amount: usize) {
        if amount == 0 {
            return;
        }
        peer.accounts().for_each(|account| *self.used.entry(account).or_default() += amount);
    }

    /// The peer has so much less: what it was given by [`Self::take`].
    pub fn give_back(&mut self, peer: Peer, amount: usize) {
        for account in peer.accounts() {
            if let btree_map::Entry::Occupied(mut used) = self.used.entry(account) {
                *used.get_mut() = used.get().saturating_sub(amount);
                if *used.get() == 0 {
                    used.remove();
                }
            }
        }
    }

    /// What all have together.
    pub fn used(&self) -> usize {
        self.used_by(Account::Own) + self.used_by(Account::Peers)
    }

    /// How often somebody was refused.
    pub const fn refused(&self) -> u64 {
        self.refused
    }

    /// The smallest of a peer's accounts that has no room for one more.
    pub(crate) fn full(&self, peer: Peer) -> Option<Account> {
        peer.accounts().find(|account| self.used_by(*account) >= self.bound(*account).limit())
    }

    /// How much a peer has of what shares an account with it, the largest account below that first.
    fn rank(&self, peer: Peer, below: Account) -> [usize; 3] {
        let mut rank = [0; 3];
        for account in peer.accounts().take_while(|account| *account != below) {
            rank.rotate_right(1);
            rank[0] = self.used_by(account);
        }
        rank
    }

    fn used_by(&self, account: Account) -> usize {
        self.used.get(&account).copied().unwrap_or_default()
    }

    /// What an account may have. In a small table, one.
    fn bound(&self, account: Account) -> Full {
        let share = |of: usize| (self.limit / of).max(1);
        match account {
            Account::Own => Full::Table { limit: self.own },
            Account::Peers => Full::Table { limit: self.limit },
            Account::Member(_) if self.is_elastic => {
                let free = self.limit.saturating_sub(self.used_by(Account::Peers));
                Full::Peer { share: share(PEER_SHARE).max(free) }
            }
            Account::Member(_) | Account::Site(Site::Address(_)) => Full::Peer { share: share(PEER_SHARE) },
            Account::User(_) => Full::Peer { share: share(GROUP_SHARE) },
            Account::Site(Site::Network(_)) | Account::Behind(_) => Full::Group { share: share(GROUP_SHARE) },
            Account::Unauthenticated => Full::Group { share: share(UNAUTHENTICATED_SHARE) },
        }
    }
}

/// A bounded map whose entries are each somebody's.
#[derive(Clone, Debug)]
pub struct FairTable<K, V> {
    entries: BTreeMap<K, (Peer, V)>,
    shares: FairShares,
}

impl<K: Ord, V> FairTable<K, V> {
    /// `limit` entries of all peers together, and `own` beside them of this host.
    pub const fn new(limit: usize, own: usize) -> Self {
        Self { entries: BTreeMap::new(), shares: FairShares::new(limit, own) }
    }

    /// The same with [`FairShares::elastic`].
    pub const fn elastic(limit: usize, own: usize) -> Self {
        Self { entries: BTreeMap::new(), shares: FairShares::elastic(limit, own) }
    }

    /// Refuses this peer another entry where it may have none.
    ///
    /// # Errors
    ///
    /// What is full.
    pub fn check(&mut self, peer: Peer) -> Result<(), Full> {
        self.shares.check(peer, 1).inspect_err(|_| self.shares.refused += 1)
    }

    /// Whether this peer may have another entry.
    pub fn has_room(&self, peer: Peer) -> bool {
        self.shares.check(peer, 1).is_ok()
    }

    /// Whether this peer may have so many more entries.
    pub fn has_room_for(&self, peer: Peer, count: usize) -> bool {
        self.shares.check(peer, count).is_ok()
    }

    /// Adds an entry of this peer, or replaces the value of the one that there is, which stays its peer's.
    ///
    /// # Errors
    ///
    /// What is full; the table is as it was.
    pub fn insert(&mut self, peer: Peer, key: K, value: V) -> Result<(), Full> {
        match self.entries.entry(key) {
            btree_map::Entry::Occupied(mut entry) => entry.get_mut().1 = value,
            btree_map::Entry::Vacant(entry) => {
                self.shares.take(peer, 1)?;
                entry.insert((peer, value));
            }
        }
        Ok(())
    }

    /// Adds an entry of this peer. Where it has its share already, its own least value goes for it, or that of those
    /// with whom it has a share together.
    pub fn displace(&mut self, peer: Peer, key: K, value: V)
    where
        K: Clone,
        V: Ord,
    {
        while let Some(full) = self.shares.full(peer).filter(|_| !self.entries.contains_key(&key)) {
            let shares_it = |(_, (one, _)): &(&K, &(Peer, V))| one.accounts().any(|account| account == full);
            let least = self.entries.iter().filter(shares_it).min_by(|(_, (_, one)), (_, (_, other))| one.cmp(other));
            let Some(least) = least.map(|(key, _)| key.clone()) else { return };
            self.remove(&least);
        }
        // There is room by now.
        let _ = self.insert(peer, key, value);
    }

    /// Adds an entry of this peer. Where those that it shares a bound with have all there is, and one of them has more
    /// than this peer, the entry with the least key of who has the most goes for it. Gives the value that went.
    ///
    /// # Errors
    ///
    /// What is full: the peer has its share, or nobody has more.
    pub fn insert_fairly(&mut self, peer: Peer, key: K, value: V) -> Result<Option<V>, Full>
    where
        K: Clone,
    {
        let mut gone = None;
        if let Some(full) = self.shares.full(peer).filter(|_| !self.entries.contains_key(&key)) {
            let rank = |one: Peer| self.shares.rank(one, full);
            let shares_it = |(_, (one, _)): &(&K, &(Peer, V))| one.accounts().any(|account| account == full);
            // Of equal ones the last is taken: the order is turned for the least key.
            let most = self.entries.iter().rev().filter(shares_it).max_by_key(|(_, (one, _))| rank(*one));
            let Some(most) = most.filter(|(_, (one, _))| rank(*one) > rank(peer)).map(|(key, _)| key.clone()) else {
                self.shares.refused += 1;
                return Err(self.shares.bound(full));
            };
            gone = self.remove(&most);
        }
        self.insert(peer, key, value)?;
        Ok(gone)
    }

    /// Takes an entry out.
    pub fn remove(&mut self, key: &K) -> Option<V> {
        let (peer, value) = self.entries.remove(key)?;
        self.shares.give_back(peer, 1);
        Some(value)
    }

    /// Keeps those entries only for which `keep` is true.
    pub fn retain(&mut self, mut keep: impl FnMut(&K, &mut V) -> bool) {
        let shares = &mut self.shares;
        self.entries.retain(|key, (peer, value)| {
            let stays = keep(key, value);
            if !stays {
                shares.give_back(*peer, 1);
            }
            stays
        });
    }

    /// The value of a key.
    pub fn get(&self, key: &K) -> Option<&V> {
        self.entries.get(key).map(|(_, value)| value)
    }

    /// The value of a key.
    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        self.entries.get_mut(key).map(|(_, value)| value)
    }

    /// Whether there is an entry of this key.
    pub fn contains_key(&self, key: &K) -> bool {
        self.entries.contains_key(key)
    }

    /// The entries whose keys are in a range, by key.
    pub fn range(&self, keys: impl RangeBounds<K>) -> impl Iterator<Item = (&K, &V)> {
        self.entries.range(keys).map(|(key, (_, value))| (key, value))
    }

    /// All entries, by key.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.entries.iter().map(|(key, (_, value))| (key, value))
    }

    /// All entries, by key.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&K, &mut V)> {
        self.entries.iter_mut().map(|(key, (_, value))| (key, value))
    }

    /// All values, by key.
    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.entries.values().map(|(_, value)| value)
    }

    /// All values, by key.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut V> {
        self.entries.values_mut().map(|(_, value)| value)
    }

    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// How often somebody was refused an entry.
    pub const fn refused(&self) -> u64 {
        self.shares.refused()
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    fn member(n: u8) -> Peer {
        Peer::Member(HostId([n; 16]))
    }

    fn at(network: u8, host: u8) -> Peer {
        Peer::Unauthenticated([192, 0, network, host].into())
    }

    fn behind(host: u8, by: u8) -> Peer {
        Peer::Behind { host: HostId([host; 16]), by: HostId([by; 16]) }
    }

    /// How many entries a peer gets.
    fn fill(table: &mut FairTable<u32, ()>, peer: Peer, keys: core::ops::Range<u32>) -> usize {
        keys.filter(|key| table.insert(peer, *key, ()).is_ok()).count()
    }

    #[test]
    fn a_thousand_entries_of_one_peer_leave_room_for_others_and_for_this_host() {
        let mut table = FairTable::new(1024, 8);
        assert_eq!(fill(&mut table, member(1), 0..1024), 64);
        assert_eq!(table.insert(member(1), 9999, ()), Err(Full::Peer { share: 64 }));
        assert_eq!(fill(&mut table, member(2), 2000..2064), 64, "another peer has its whole share");
        assert_eq!(fill(&mut table, Peer::Own, 3000..3010), 8, "so has this host, beside all peers");
        assert_eq!(table.refused(), 1024 - 64 + 1 + 2);
        (0..64).for_each(|key| table.remove(&key).expect("it is there"));
        assert_eq!(table.check(member(1)), Ok(()), "what has ended is given back");
    }

    #[test]
    fn hosts_without_a_certificate_count_by_where_they_are_and_leave_half_to_members() {
        let mut table = FairTable::new(1024, 1);
        let mut keys = (0_u32..).step_by(1000);
        let mut filled = |table: &mut _, peer| {
            let first = keys.next().expect("endless");
            fill(table, peer, first..first + 1000)
        };
        assert_eq!(filled(&mut table, at(0, 1)), 64, "an address");
        let of_network: usize = (2..=200).map(|host| filled(&mut table, at(0, host))).sum();
        assert_eq!(of_network, 256 - 64, "a network");
        let of_others: usize = (1..=200).map(|network| filled(&mut table, at(network, 1))).sum();
        assert_eq!(of_others, 512 - 256, "all of them together");
        let of_members: usize = (0..100).map(|n| filled(&mut table, member(n))).sum();
        assert_eq!(of_members, 512);
        assert_eq!(table.check(member(101)), Err(Full::Table { limit: 1024 }));
        assert_eq!(table.check(Peer::Own), Ok(()));
    }

    #[test]
    fn what_is_behind_one_middlebox_leaves_three_quarters_to_others() {
        let mut table = FairTable::new(1024, 1);
        let of_box: usize =
            (0..100).map(|n| fill(&mut table, behind(n, 200), n as u32 * 100..n as u32 * 100 + 99)).sum();
        assert_eq!(of_box, 256);
        assert_eq!(fill(&mut table, behind(101, 201), 20_000..20_099), 64, "behind another one");
        assert_eq!(fill(&mut table, member(200), 30_000..30_099), 64, "the middlebox's own host");
    }

    #[test]
    fn an_elastic_share_is_half_of_what_others_leave_and_a_sixteenth_at_least() {
        let mut shares = FairShares::elastic(1024, 0);
        let mut fill = |peer| (0..1024).filter(|_| shares.take(peer, 1).is_ok()).count();
        assert_eq!([1, 2, 3, 4, 5].map(|n| fill(member(n))), [512, 256, 128, 64, 64], "the last one has its sixteenth");
        assert_eq!(fill(at(0, 1)), 0, "all are taken");
        shares.give_back(member(1), 512);
        let mut fill = |peer| (0..1024).filter(|_| shares.take(peer, 1).is_ok()).count();
        assert_eq!((fill(at(0, 1)), fill(member(2))), (64, 96), "a stranger's share does not grow");
    }

    #[test]
    fn a_local_user_has_a_quarter_and_takes_nothing_of_roots() {
        let mut shares = FairShares::new(1024, 8);
        let mut fill = |peer| (0..1025).filter(|_| shares.take(peer, 1).is_ok()).count();
        assert_eq!([1, 2, 3, 4, 5].map(|uid| fill(Peer::User(uid))), [256, 256, 256, 256, 0]);
        assert_eq!(fill(Peer::Own), 8);
    }

    #[test]
    fn the_addresses_of_one_ipv6_link_are_one() {
        let mut shares = FairShares::new(160, 0);
        let address = |link, host| Peer::Unauthenticated([0x2001, 0xdb8, 0, link, 0, 0, 0, host].into());
        (0..10).for_each(|host| shares.take(address(1, host), 1).expect("its share"));
        assert_eq!(shares.take(address(1, 99), 1), Err(Full::Peer { share: 10 }));
        assert_eq!(shares.take(address(2, 1), 1), Ok(()));
    }

    #[test]
    fn a_known_key_keeps_its_place_and_costs_nothing() {
        let mut table = FairTable::new(16, 0);
        table.insert(member(1), 1, 'a').expect("room");
        table.insert(member(1), 1, 'b').expect("it has it already");
        assert_eq!((table.get(&1), table.len()), (Some(&'b'), 1));
        assert_eq!(table.insert(member(1), 2, 'c'), Err(Full::Peer { share: 1 }));
        table.retain(|_, value| *value != 'b');
        assert!(table.is_empty() && table.insert(member(1), 2, 'c').is_ok());
    }

    #[test]
    fn a_newcomer_displaces_the_oldest_of_who_has_the_most_and_never_who_has_less() {
        // Of all 64 half; 4 an address, 16 a network.
        let mut table = FairTable::new(64, 0);
        let mut key = 0_u32;
        let mut enter = |table: &mut FairTable<u32, u32>, peer| {
            key += 1;
            table.insert_fairly(peer, key, key)
        };
        for network in 1..=2 {
            for host in 1..=4 {
                (0..4).for_each(|_| assert_eq!(enter(&mut table, at(network, host)), Ok(None)));
                assert_eq!(enter(&mut table, at(network, host)), Err(Full::Peer { share: 4 }), "its own share");
            }
        }
        assert_eq!(enter(&mut table, at(3, 1)), Ok(Some(1)), "all have theirs; the oldest goes");
        for _ in 0..50 {
            _ = (enter(&mut table, at(1, 1)), enter(&mut table, at(2, 1)));
        }
        assert!(table.contains_key(&41), "who has less stays");
        assert!(matches!(enter(&mut table, at(2, 9)), Ok(Some(_))), "a neighbour with none");
        assert_eq!(table.len(), 32);
    }

    #[test]
    fn who_has_its_share_displaces_its_own_and_nobody_elses() {
        let mut table = FairTable::new(32, 1);
        table.displace(member(2), 0, 0);
        for n in 1..100 {
            table.displace(member(1), n, n);
            table.displace(member(1), n, n);
        }
        table.displace(Peer::Own, 200, 1);
        table.displace(Peer::Own, 201, 0);
        assert_eq!(table.iter().map(|(key, _)| *key).collect::<Vec<_>>(), [0, 98, 99, 201]);
        (0..50).for_each(|n| table.displace(at(n, 1), 1000 + u32::from(n), u32::from(n)));
        assert_eq!(table.len(), 4 + 16, "half is left to members");
        assert!(table.contains_key(&1049) && !table.contains_key(&1000));
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Insert(Peer, u8),
        Remove(u8),
        RetainEven,
    }

    fn peers() -> impl Strategy<Value = Peer> {
        prop_oneof![
            1 => Just(Peer::Own),
            2 => (0..3_u32).prop_map(Peer::User),
            3 => (0..4_u8).prop_map(member),
            4 => (0..3_u8, 0..4_u8).prop_map(|(network, host)| at(network, host)),
            2 => (3..9_u8, 0..2_u8).prop_map(|(host, by)| behind(host, by)),
        ]
    }

    fn steps() -> impl Strategy<Value = Step> {
        prop_oneof![
            12 => (peers(), any::<u8>()).prop_map(|(peer, key)| Step::Insert(peer, key)),
            5 => any::<u8>().prop_map(Step::Remove),
            1 => Just(Step::RetainEven),
        ]
    }

    /// Counts from the list alone whether a peer may have one more.
    fn has_room(list: &[(u8, Peer)], peer: Peer, limit: usize, own: usize) -> bool {
        let count = |is: &dyn Fn(Peer) -> bool| list.iter().filter(|(_, one)| is(*one)).count();
        let share = |of: usize| (limit / of).max(1);
        let is_unauthenticated = |one| matches!(one, Peer::Unauthenticated(_));
        let network = |one| match one {
            Peer::Unauthenticated(IpAddr::V4(address)) => address.octets()[..3].to_vec(),
            _ => Vec::new(),
        };
        let middlebox = |one| match one {
            Peer::Behind { by, .. } => Some(by),
            _ => None,
        };
        let host = |one| match one {
            Peer::Member(host) | Peer::Behind { host, .. } => Some(host),
            _ => None,
        };
        let of_peers = count(&|one| one != Peer::Own) < limit;
        match peer {
            Peer::Own => count(&|one| one == Peer::Own) < own,
            Peer::User(_) => count(&|one| one == peer) < share(4) && of_peers,
            Peer::Member(_) => count(&|one| host(one) == host(peer)) < share(16) && of_peers,
            Peer::Behind { .. } => {
                count(&|one| host(one) == host(peer)) < share(16)
                    && count(&|one| middlebox(one) == middlebox(peer)) < share(4)
                    && of_peers
            }
            Peer::Unauthenticated(_) => {
                count(&|one| one == peer) < share(16)
                    && count(&|one| network(one) == network(peer)) < share(4)
                    && count(&is_unauthenticated) < share(2)
                    && of_peers
            }
        }
    }

    proptest! {
        #[test]
        fn the_table_agrees_with_a_list(
            limit in 1..80_usize,
            own in 0..9_usize,
            steps in proptest::collection::vec(steps(), 1..300),
        ) {
            let mut table = FairTable::new(limit, own);
            let mut list: Vec<(u8, Peer)> = Vec::new();
            for (n, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Insert(peer, key) => {
                        let is_known = list.iter().any(|(known, _)| *known == key);
                        let fits = is_known || has_room(&list, peer, limit, own);
                        prop_assert_eq!(table.insert(peer, key, n).is_ok(), fits);
                        if fits && !is_known {
                            list.push((key, peer));
                        }
                        if fits {
                            prop_assert_eq!(table.get(&key), Some(&n));
                        }
                    }
                    Step::Remove(key) => {
                        prop_assert_eq!(table.remove(&key).is_some(), list.iter().any(|(known, _)| *known == key));
                        list.retain(|(known, _)| *known != key);
                    }
                    Step::RetainEven => {
                        table.retain(|key, _| key.is_multiple_of(2));
                        list.retain(|(key, _)| key.is_multiple_of(2));
                    }
                }
                prop_assert_eq!(table.len(), list.len());
                prop_assert_eq!(table.shares.used(), list.len());
            }
            table.retain(|_, _| false);
            prop_assert!(table.shares.used.is_empty(), "nothing is left behind");
        }
    }
}
