//! Flows of responders whose peer is not proved: how many there are, and how many of one address and one network
//! (DESIGN §7).
//!
//! A cookie shows that a SYN comes from where it says. So under load an address may have a share of the places, and no
//! more: nobody who has one address can keep out those who have others.

use alloc::collections::BTreeMap;
use core::net::IpAddr;

use crate::types::site::Site;

/// An address may have one of so many places, once cookies are asked for.
const ADDRESS_SHARE: usize = 16;
/// The same of a network.
const NETWORK_SHARE: usize = 4;

#[derive(Debug, Default)]
pub(crate) struct HalfOpen {
    len: usize,
    by_site: BTreeMap<Site, usize>,
}

impl HalfOpen {
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether an address or its network has its share of `places` already; those below `calm` are anybody's.
    pub fn has_share(&self, address: IpAddr, places: usize, calm: usize) -> bool {
        let has = |site: Site| {
            let share = match site {
                Site::Address(_) => places / ADDRESS_SHARE,
                Site::Network(_) => places / NETWORK_SHARE,
            };
            self.by_site.get(&site).is_some_and(|count| *count >= share.max(calm))
        };
        self.len >= calm && Site::both(address).into_iter().any(has)
    }

    pub fn add(&mut self, address: IpAddr) {
        self.len += 1;
        for site in Site::both(address) {
            *self.by_site.entry(site).or_default() += 1;
        }
    }

    pub fn remove(&mut self, address: IpAddr) {
        self.len = self.len.saturating_sub(1);
        for site in Site::both(address) {
            if let Some(count) = self.by_site.get_mut(&site) {
                *count -= 1;
                if *count == 0 {
                    self.by_site.remove(&site);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_has_a_share_and_others_the_rest() {
        let (mut half_open, one) = (HalfOpen::default(), IpAddr::from([192, 0, 2, 1]));
        for _ in 0..16 {
            assert!(!half_open.has_share(one, 256, 8));
            half_open.add(one);
        }
        assert!(half_open.has_share(one, 256, 8));
        assert!(!half_open.has_share([192, 0, 2, 2].into(), 256, 8));
        half_open.remove(one);
        assert!(!half_open.has_share(one, 256, 8));
        (0..15).for_each(|_| half_open.remove(one));
        assert_eq!((half_open.len(), half_open.by_site.len()), (0, 0));
    }

    #[test]
    fn the_addresses_of_one_ipv6_link_are_one() {
        let mut half_open = HalfOpen::default();
        let address = |host: u16| IpAddr::from([0x2001, 0xdb8, 0, 1, 0, 0, 0, host]);
        (0..16).for_each(|host| half_open.add(address(host)));
        assert!(half_open.has_share(address(99), 256, 8));
        assert!(!half_open.has_share([0x2001, 0xdb8, 0, 2, 0, 0, 0, 1].into(), 256, 8));
    }

    #[test]
    fn the_links_of_one_network_have_a_share_together() {
        let mut half_open = HalfOpen::default();
        let address = |link: u16| IpAddr::from([0x2001, 0xdb8, 9, link, 0, 0, 0, 1]);
        (0..64).for_each(|link| half_open.add(address(link)));
        assert!(half_open.has_share(address(99), 256, 8), "one place for each of many links");
        assert!(!half_open.has_share([0x2001, 0xdb8, 10, 0, 0, 0, 0, 1].into(), 256, 8));
        (0..64).for_each(|link| half_open.remove(address(link)));
        assert!(half_open.by_site.is_empty());
    }
}
