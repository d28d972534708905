//! How often strangers may begin a handshake, by where they are: each costs this host some operations on curves, and
//! an association when it ends well. Constant in work, bounded in memory.
//!
//! The source of a first packet may be forged. So what is over the rate is asked for a cookie; who brings one is
//! where it says, and has a rate of its own, which nobody else can use up.

use alloc::collections::BTreeSet;

use hashbrown::HashMap;

use crate::types::keyed_hash::KeyedHash;
use crate::types::rate::RateLimit;
use crate::types::site::Site;
use crate::types::time::Instant;

/// Handshakes per second that one address may begin.
const PER_ADDRESS_S: u32 = 256;
/// The same of one network.
const PER_NETWORK_S: u32 = 1024;
/// A greeting has no connection behind it, and counts for so many.
pub(crate) const GREETING_COST: u32 = 8;
/// Sites that are remembered; the longest unseen is forgotten for another.
const SITES_MAX: usize = 4096;

type Key = (Site, bool);

/// Who has begun how many handshakes of late.
pub(crate) struct HandshakeRate {
    sites: HashMap<Key, (Instant, RateLimit), KeyedHash>,
    by_age: BTreeSet<(Instant, Key)>,
}

impl HandshakeRate {
    pub fn with_hasher(hasher: KeyedHash) -> Self {
        Self { sites: HashMap::with_hasher(hasher), by_age: BTreeSet::new() }
    }

    /// Whether another may begin at `address`, at `cost`; `is_shown`: a cookie has shown that it is there.
    pub fn take(&mut self, now: Instant, address: core::net::IpAddr, is_shown: bool, cost: u32) -> bool {
        let [at, network] = Site::both(address);
        // Each is asked: the refused ones of an address use up nothing of its network.
        self.take_of(now, (at, is_shown), PER_ADDRESS_S, cost)
            && self.take_of(now, (network, is_shown), PER_NETWORK_S, cost)
    }

    fn take_of(&mut self, now: Instant, key: Key, per_s: u32, cost: u32) -> bool {
        if let Some((seen, rate)) = self.sites.get_mut(&key) {
            self.by_age.remove(&(*seen, key));
            *seen = now;
            self.by_age.insert((now, key));
            return rate.take_some(now, cost);
        }
        if self.sites.len() >= SITES_MAX
            && let Some((_, oldest)) = self.by_age.pop_first()
        {
            self.sites.remove(&oldest);
        }
        let mut rate = RateLimit::new(per_s, now);
        let is_free = rate.take_some(now, cost);
        self.sites.insert(key, (now, rate));
        self.by_age.insert((now, key));
        is_free
    }
}

#[cfg(test)]
mod tests {
    use core::net::IpAddr;

    use super::*;

    fn taken(rate: &mut HandshakeRate, addresses: impl Iterator<Item = IpAddr>, is_shown: bool) -> usize {
        addresses.filter(|address| rate.take(Instant::ZERO, *address, is_shown, 1)).count()
    }

    #[test]
    fn an_address_and_a_network_have_their_rates_and_forgers_another() {
        let mut rate = HandshakeRate::with_hasher(KeyedHash(1, 2));
        let link = |n: u16| IpAddr::from([0x2001, 0xdb8, 0, 1, 0, 0, 0, n]);
        let site = |n: u16| IpAddr::from([0x2001, 0xdb8, 0, n, 0, 0, 0, 1]);
        assert_eq!(taken(&mut rate, (0..1000).map(link), false), PER_ADDRESS_S as usize, "one /64 is one address");
        assert_eq!(taken(&mut rate, (100..110).map(link), true), 10, "they have shown where they are");
        let all = PER_NETWORK_S as usize - PER_ADDRESS_S as usize;
        assert_eq!(taken(&mut rate, (2..3000).map(site), false), all, "one /48 is one network");
        assert!(rate.take(Instant::ZERO, [192, 0, 2, 1].into(), false, 1), "others are not concerned");
        assert!(rate.take(Instant::from_millis(1000), link(1), false, PER_ADDRESS_S));
    }

    #[test]
    fn no_more_sites_are_remembered_than_the_bound() {
        let mut rate = HandshakeRate::with_hasher(KeyedHash(1, 2));
        for n in 0..20_000_u32 {
            rate.take(Instant::from_millis(n.into()), core::net::Ipv4Addr::from(n << 8).into(), false, 1);
        }
        assert_eq!((rate.sites.len(), rate.by_age.len()), (SITES_MAX, SITES_MAX));
    }
}
