//! Whose connections a switch has, by the clients' hosts.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use margay_core::Instant;
use margay_core::fair_table::{FairShares, Full, Peer};

/// Connections at once; those of one host are a sixteenth of them.
const CONNECTIONS_MAX: usize = 16_384;
/// A connection counts for so long after its end. Each one is opened with all members, so a host that opens and closes
/// connections without end would have the switch say HELLO as often as it likes: now 4,096 times a second.
const LINGER: Duration = Duration::from_millis(250);
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
    /// Connections that are over, and until when they count.
    over: VecDeque<(Instant, IpAddr)>,
}

impl Clients {
    /// None.
    pub(super) const fn new() -> Self {
        Self { shares: FairShares::new(CONNECTIONS_MAX, 0), by_host: BTreeMap::new(), over: VecDeque::new() }
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
    pub(super) fn add(&mut self, now: Instant, address: IpAddr) -> Result<(), Full> {
        while let Some((_, of)) = self.over.pop_front_if(|(until, _)| *until <= now) {
            self.shares.give_back(Peer::Unauthenticated(of), 1);
        }
        self.shares.take(Peer::Unauthenticated(address), 1)?;
        *self.by_host.entry(host_at(address)).or_default() += 1;
        Ok(())
    }

    /// One that was added is over.
    pub(super) fn remove(&mut self, now: Instant, address: IpAddr) {
        self.over.push_back((now + LINGER, address));
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
        let at = Instant::from_millis;
        let taken = (0..CONNECTIONS_MAX).filter(|_| clients.add(at(0), one).is_ok()).count();
        assert_eq!(taken, CONNECTIONS_MAX / 16);
        assert!(clients.add(at(0), other).is_ok() && clients.add(at(0), one).is_err());
        clients.remove(at(1), one);
        assert!(clients.add(at(250), one).is_err(), "it counts for a while");
        assert!(clients.add(at(251), one).is_ok());
        assert_eq!(clients.hosts(), 2);
        clients.remove(at(300), other);
        assert_eq!(clients.hosts(), 1);
        assert_eq!(host_at(address("2001:db8::1:2")), host_at(address("2001:db8::7")));
        assert_eq!(host_at(address("::ffff:192.0.2.1")), one);
    }
}
