//! Whose connections a switch has, by the clients' hosts.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};

use margay_core::fair_table::{FairShares, Full, Peer};

/// Connections at once; those of one host are a sixteenth of them.
const CONNECTIONS_MAX: usize = 16_384;
/// Who has one address of IPv6 has its /64.
const V6_HOST: u128 = !0 << 64;

/// The host that an address is of.
pub(super) fn host_at(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => Ipv6Addr::from(u128::from(v6) & V6_HOST).into(),
        v4 @ IpAddr::V4(_) => v4,
    }
}

/// How many connections each host has.
pub(super) struct Clients {
    shares: FairShares,
    by_host: BTreeMap<IpAddr, usize>,
}

impl Clients {
    /// None.
    pub(super) const fn new() -> Self {
        Self { shares: FairShares::new(CONNECTIONS_MAX, 0), by_host: BTreeMap::new() }
    }

    /// Hosts that have a connection.
    pub(super) fn hosts(&self) -> usize {
        self.by_host.len()
    }

    /// A connection of this address begins.
    ///
    /// # Errors
    ///
    /// There is no room for it.
    pub(super) fn add(&mut self, address: IpAddr) -> Result<(), Full> {
        self.shares.take(Peer::Unauthenticated(address), 1)?;
        *self.by_host.entry(host_at(address)).or_default() += 1;
        Ok(())
    }

    /// One that was added is over.
    pub(super) fn remove(&mut self, address: IpAddr) {
        self.shares.give_back(Peer::Unauthenticated(address), 1);
        if let Some(count) = self.by_host.get_mut(&host_at(address)) {
            *count -= 1;
            if *count == 0 {
                self.by_host.remove(&host_at(address));
            }
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn one_host_leaves_room_for_others() {
        let mut clients = Clients::new();
        let address = |text: &str| text.parse::<IpAddr>().expect("literal");
        let [one, other] = [address("192.0.2.1"), address("198.51.100.1")];
        assert_eq!((0..CONNECTIONS_MAX).filter(|_| clients.add(one).is_ok()).count(), CONNECTIONS_MAX / 16);
        assert!(clients.add(other).is_ok() && clients.add(one).is_err());
        clients.remove(one);
        assert!(clients.add(one).is_ok());
        assert_eq!(clients.hosts(), 2);
        clients.remove(other);
        assert_eq!(clients.hosts(), 1);
        assert_eq!(host_at(address("2001:db8::1:2")), host_at(address("2001:db8::7")));
        assert_eq!(host_at(address("::ffff:192.0.2.1")), one);
    }
}
