//! Which associations are worth their place (DESIGN §3.11): those in use stay; of those that are idle, a proved
//! member's is kept for long, a stranger's for a while, and no more of them than a share. Each act costs the
//! logarithm of what is listed.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::net::IpAddr;
use core::time::Duration;

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
/// So much of the table is kept free of strangers, also of those with flows.
const RESERVED_SHARE: usize = 4;
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
    /// Somebody vouches for the peer, or one end is the other's service router.
    pub is_vouched: bool,
    /// When it was last of use.
    pub since: Instant,
    /// Where the peer is.
    pub address: IpAddr,
}

type Ages = BTreeSet<(Instant, u32)>;

/// Associations by standing; the idle ones by when they were last of use.
#[derive(Debug, Default)]
pub(crate) struct Standings {
    in_use: BTreeSet<u32>,
    members: Ages,
    strangers: Ages,
    strangers_at: BTreeMap<Site, Ages>,
    /// Associations, idle or in use, with peers that nobody vouches for.
    unvouched: usize,
    /// What the next start of the agent needs has changed.
    is_news: bool,
}

impl Standings {
    /// Lists an association that is not listed yet.
    pub fn add(&mut self, id: u32, listed: &Listed) {
        let age = (listed.since, id);
        match listed.standing {
            Standing::InUse => drop(self.in_use.insert(id)),
            Standing::Member => drop(self.members.insert(age)),
            Standing::Stranger => {
                self.strangers.insert(age);
                for site in Site::both(listed.address) {
                    self.strangers_at.entry(site).or_default().insert(age);
                }
            }
        }
        self.unvouched += usize::from(!listed.is_vouched);
        self.is_news |= listed.standing != Standing::Stranger;
    }

    /// Takes an association off its list.
    pub fn remove(&mut self, id: u32, listed: &Listed) {
        let age = (listed.since, id);
        match listed.standing {
            Standing::InUse => drop(self.in_use.remove(&id)),
            Standing::Member => drop(self.members.remove(&age)),
            Standing::Stranger => {
                self.strangers.remove(&age);
                for site in Site::both(listed.address) {
                    if let Some(ages) = self.strangers_at.get_mut(&site) {
                        ages.remove(&age);
                        if ages.is_empty() {
                            self.strangers_at.remove(&site);
                        }
                    }
                }
            }
        }
        self.unvouched -= usize::from(!listed.is_vouched);
        self.is_news |= listed.standing != Standing::Stranger;
    }

    /// Moves an association from one place to another.
    pub fn change(&mut self, id: u32, from: &Listed, to: &Listed) {
        if from == to {
            return;
        }
        // That a peer was heard again, the next start of the agent need not know.
        let is_news = self.is_news || from.standing != to.standing;
        self.remove(id, from);
        self.add(id, to);
        self.is_news = is_news;
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

    /// Whether peers that nobody vouches for have all of the table that they may have: the last quarter is for others.
    pub fn is_full_of_strangers(&self, limit: usize) -> bool {
        self.unvouched >= limit - limit / RESERVED_SHARE
    }

    /// What may go for a newcomer once there is no room: never a member's place for a stranger.
    pub fn dispensable(&self, is_vouched: bool) -> Option<u32> {
        let members = if is_vouched { self.members.first() } else { None };
        self.strangers.first().or(members).map(|(_, id)| *id)
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
