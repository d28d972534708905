//! Which associations are worth their place (DESIGN §3.11): those in use stay; of those that are idle, a proved
//! member's is kept for long, a stranger's for a while, and no more of them than a share. Each act costs the
//! logarithm of what is listed.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::net::IpAddr;
use core::time::Duration;

use crate::types::fair_table::{Account, FairShares, Full, Peer};
use crate::types::site::Site;
use crate::types::time::Instant;

/// Idle associations with strangers at one address (a /64 of IPv6).
pub(crate) const STRANGERS_PER_ADDRESS: usize = 64;
/// The same in one network: a /24 of IPv4, a /48 of IPv6.
pub(crate) const STRANGERS_PER_NETWORK: usize = 256;
/// All idle associations with strangers have so much of the table.
const STRANGERS_SHARE: usize = 8;
/// Of them the next start of the agent is told of so many.
pub(crate) const STRANGERS_KEPT: usize = 256;
/// In a small table, this many.
const STRANGERS_MIN: usize = 16;
/// An idle association is forgotten after so long without a message: the next connection costs a handshake.
pub(crate) const STRANGER_IDLE: Duration = Duration::from_secs(120);
/// The same of hosts whose authority this host trusts.
pub(crate) const MEMBER_IDLE: Duration = Duration::from_secs(6 * 3600);

/// What keeps an association.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// Flows use it, or one end is the other's service router, or it is the host's own.
    InUse,
    /// Nothing uses it; an authority that is trusted here vouches for the peer.
    Member,
    /// Nothing uses it, and nobody vouches for the peer.
    Stranger,
}

/// Where an association is listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Listed {
    pub standing: Standing,
    /// What it counts for, and the flows that its peer has begun.
    pub peer: Peer,
    /// This host has begun it, and the peer no flow in it. A peer may have this host begin some, to greet it.
    pub is_own: bool,
    /// How many those are.
    pub served: u32,
    /// When it was last of use.
    pub since: Instant,
}

impl Listed {
    /// Where the peer is, if nobody vouches for it.
    const fn stranger_at(&self) -> Option<IpAddr> {
        match self.peer {
            Peer::Unauthenticated(address) => Some(address),
            Peer::Own | Peer::User(_) | Peer::Member(_) | Peer::Behind { .. } => None,
        }
    }

    /// The same, if it is of use to the peer: all such have a share.
    fn newcomer_at(&self) -> Option<IpAddr> {
        self.stranger_at().filter(|_| !self.is_own)
    }

    fn sites(&self) -> impl Iterator<Item = Site> {
        self.stranger_at().into_iter().flat_map(Site::both)
    }
}

type Ages = BTreeSet<(Instant, u32)>;

/// Associations by standing; the idle ones by when they were last of use.
#[derive(Debug)]
pub(crate) struct Standings {
    in_use: BTreeSet<u32>,
    members: Ages,
    strangers: Ages,
    strangers_at: BTreeMap<Site, Ages>,
    /// Associations, idle or in use, that are of use to peers that nobody vouches for.
    unvouched: FairShares,
    /// Flows that peers have begun.
    served: FairShares,
    /// What the next start of the agent needs has changed.
    is_news: bool,
}

impl Standings {
    /// `associations`, `flows`: the most that there may be.
    pub const fn new(associations: usize, flows: usize) -> Self {
        Self {
            in_use: BTreeSet::new(),
            members: BTreeSet::new(),
            strangers: BTreeSet::new(),
            strangers_at: BTreeMap::new(),
            unvouched: FairShares::new(associations, 0),
            served: FairShares::elastic(flows, usize::MAX),
            is_news: false,
        }
    }

    /// Lists an association that is not listed yet.
    pub fn add(&mut self, id: u32, listed: &Listed) {
        self.count(listed);
        self.list(id, listed);
    }

    fn list(&mut self, id: u32, listed: &Listed) {
        let age = (listed.since, id);
        match listed.standing {
            Standing::InUse => drop(self.in_use.insert(id)),
            Standing::Member => drop(self.members.insert(age)),
            Standing::Stranger => {
                self.strangers.insert(age);
                for site in listed.sites() {
                    self.strangers_at.entry(site).or_default().insert(age);
                }
            }
        }
        self.is_news |= listed.standing != Standing::Stranger;
    }

    /// Takes an association off its list.
    pub fn remove(&mut self, id: u32, listed: &Listed) {
        self.discount(listed);
        self.unlist(id, listed);
    }

    fn unlist(&mut self, id: u32, listed: &Listed) {
        let age = (listed.since, id);
        match listed.standing {
            Standing::InUse => drop(self.in_use.remove(&id)),
            Standing::Member => drop(self.members.remove(&age)),
            Standing::Stranger => {
                self.strangers.remove(&age);
                for site in listed.sites() {
                    if let Some(ages) = self.strangers_at.get_mut(&site) {
                        ages.remove(&age);
                        if ages.is_empty() {
                            self.strangers_at.remove(&site);
                        }
                    }
                }
            }
        }
        self.is_news |= listed.standing != Standing::Stranger;
    }

    fn count(&mut self, listed: &Listed) {
        self.unvouched.add(listed.peer, usize::from(listed.newcomer_at().is_some()));
        self.served.add(listed.peer, listed.served as usize);
    }

    fn discount(&mut self, listed: &Listed) {
        self.unvouched.give_back(listed.peer, usize::from(listed.newcomer_at().is_some()));
        self.served.give_back(listed.peer, listed.served as usize);
    }

    /// Moves an association from one place to another.
    pub fn change(&mut self, id: u32, from: &Listed, to: &Listed) {
        if from == to {
            return;
        }
        // That a peer was heard again, the next start of the agent need not know.
        let is_news = self.is_news || from.standing != to.standing;
        if (from.peer, from.served) != (to.peer, to.served) {
            self.discount(from);
            self.count(to);
        }
        self.unlist(id, from);
        self.list(id, to);
        self.is_news = is_news;
    }

    /// Whether a peer may begin another flow in an association.
    pub fn check_served(&self, listed: &Listed) -> Result<(), Full> {
        self.served.check(listed.peer, 1)?;
        // From its first flow on the association counts.
        if listed.is_own && listed.stranger_at().is_some() { self.unvouched.check(listed.peer, 1) } else { Ok(()) }
    }

    /// The stranger that must go before another at `address` may come, if one must.
    pub fn crowded(&self, address: IpAddr, limit: usize) -> Option<u32> {
        let [at, network] = Site::both(address);
        let oldest = |ages: &Ages| ages.first().map(|(_, id)| *id);
        let in_site = |site, max| self.strangers_at.get(&site).filter(|ages| ages.len() >= max).and_then(oldest);
        in_site(at, STRANGERS_PER_ADDRESS).or_else(|| in_site(network, STRANGERS_PER_NETWORK)).or_else(|| {
            oldest(&self.strangers).filter(|_| self.strangers.len() >= (limit / STRANGERS_SHARE).max(STRANGERS_MIN))
        })
    }

    /// Whether the peer of a newcomer may have another association, idle or in use.
    pub fn has_share_left(&self, newcomer: &Listed) -> bool {
        self.full_for(newcomer).is_none()
    }

    fn full_for(&self, newcomer: &Listed) -> Option<Account> {
        newcomer.newcomer_at().and_then(|_| self.unvouched.full(newcomer.peer))
    }

    /// What may go for a newcomer once there is no room: never a member's place for a stranger; and where those at its
    /// address or in its network have their share, one of these.
    pub fn dispensable(&self, newcomer: &Listed) -> Option<u32> {
        let oldest = |ages: &Ages| ages.first().map(|(_, id)| *id);
        match self.full_for(newcomer) {
            Some(Account::Site(site)) => self.strangers_at.get(&site).and_then(oldest),
            None if newcomer.stranger_at().is_none() => oldest(&self.strangers).or_else(|| oldest(&self.members)),
            _ => oldest(&self.strangers),
        }
    }

    /// Those that have been idle for too long.
    pub fn expired(&self, now: Instant) -> Vec<u32> {
        let of = |ages: &'_ Ages, idle: Duration| -> Vec<u32> {
            ages.iter().take_while(|(since, _)| now.since(*since) >= idle).map(|(_, id)| *id).collect()
        };
        [of(&self.strangers, STRANGER_IDLE), of(&self.members, MEMBER_IDLE)].concat()
    }

    /// When the next one has been.
    pub fn next_expiry(&self) -> Option<Instant> {
        let of = |ages: &Ages, idle: Duration| ages.first().map(|(since, _)| *since + idle);
        of(&self.strangers, STRANGER_IDLE).into_iter().chain(of(&self.members, MEMBER_IDLE)).min()
    }

    /// Those in use.
    pub fn in_use(&self) -> impl Iterator<Item = u32> + '_ {
        self.in_use.iter().copied()
    }

    /// Those that the next start of the agent shall have: all but idle ones with strangers, of which it has the
    /// latest few.
    pub fn kept(&self) -> impl Iterator<Item = u32> + '_ {
        let strangers = self.strangers.iter().rev().take(STRANGERS_KEPT);
        self.in_use().chain(self.members.iter().chain(strangers).map(|(_, id)| *id))
    }

    /// Something else is to be kept of one in use.
    pub fn note_news(&mut self) {
        self.is_news = true;
    }

    /// Whether those have changed since this was asked last, strangers aside that have come and gone without a flow.
    pub fn take_news(&mut self) -> bool {
        core::mem::take(&mut self.is_news)
    }

    /// How many are idle and with strangers.
    pub fn strangers(&self) -> usize {
        self.strangers.len()
    }
}
