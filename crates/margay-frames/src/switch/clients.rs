//! Whose connections a switch has, by the clients' hosts.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use margay_core::Instant;
use margay_core::fair_table::{FairShares, Full, Peer};

/// Connections at once: half of the places that there are, since a switch knows clients by their addresses alone. One
/// network has half of these at most, and one host an eighth.
const CONNECTIONS_MAX: usize = 8192;
/// A connection counts for so long after its end. Each one is opened with all members, so a host that opens and closes
/// connections without end would have the switch say HELLO as often as it likes: now 4,096 times a second.
const LINGER: Duration = Duration::from_millis(250);
/// Who has one address of IPv6 has its /64.
const V6_HOST: u128 = !0 << 64;
/// What one person may well have: a /48, and a /24 of IPv4.
const V6_NETWORK: u128 = !0 << 80;
const V4_NETWORK: u32 = !0 << 8;

/// The host that an address is of.
pub(super) fn host_at(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => Ipv6Addr::from(u128::from(v6) & V6_HOST).into(),
        v4 @ IpAddr::V4(_) => v4,
    }
}

/// The network that a host is of.
fn network_of(host: IpAddr) -> IpAddr {
    match host {
        IpAddr::V6(v6) => Ipv6Addr::from(u128::from(v6) & V6_NETWORK).into(),
        IpAddr::V4(v4) => Ipv4Addr::from(u32::from(v4) & V4_NETWORK).into(),
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
        Self { shares: FairShares::new(2 * CONNECTIONS_MAX, 0), by_host: BTreeMap::new(), over: VecDeque::new() }
    }

    /// Whether `some` are more than half of the hosts that have connections, `newcomer` among them, and are in more
    /// than half of the networks of these: one person may have a whole network. Hosts that have gone count for nothing.
    pub(super) fn are_most(&self, some: &BTreeSet<IpAddr>, newcomer: IpAddr) -> bool {
        let here: BTreeSet<IpAddr> = self.by_host.keys().copied().chain([newcomer]).collect();
        let those: Vec<IpAddr> = here.intersection(some).copied().collect();
        let networks = |hosts: &mut dyn Iterator<Item = IpAddr>| hosts.map(network_of).collect::<BTreeSet<_>>().len();
        let (of_those, of_all) = (networks(&mut those.iter().copied()), networks(&mut here.iter().copied()));
        those.len() * 2 > here.len() && of_those * 2 > of_all
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

    fn address(text: &str) -> IpAddr {
        text.parse().expect("literal")
    }

    #[test]
    fn one_host_and_one_network_leave_room_for_others() {
        let mut clients = Clients::new();
        let [one, other] = [address("192.0.2.1"), address("198.51.100.1")];
        let at = Instant::from_millis;
        let taken = |clients: &mut Clients, of: IpAddr| {
            (0..=CONNECTIONS_MAX).filter(|_| clients.add(at(0), of).is_ok()).count()
        };
        assert_eq!(taken(&mut clients, one), CONNECTIONS_MAX / 8);
        assert!(clients.add(at(0), other).is_ok() && clients.add(at(0), one).is_err());
        clients.remove(at(1), one);
        assert!(clients.add(at(250), one).is_err(), "it counts for a while");
        assert!(clients.add(at(251), one).is_ok());
        let more = (2..=9).map(|host| taken(&mut clients, Ipv4Addr::new(192, 0, 2, host).into())).sum::<usize>();
        assert_eq!(more + CONNECTIONS_MAX / 8, CONNECTIONS_MAX / 2, "all of one network");
        let rest = (0..=99).map(|net| taken(&mut clients, Ipv4Addr::new(203, 0, net, 1).into())).sum::<usize>();
        assert_eq!(rest + CONNECTIONS_MAX / 2 + 1, CONNECTIONS_MAX);
        assert_eq!(host_at(address("2001:db8::1:2")), host_at(address("2001:db8::7")));
        assert_eq!(host_at(address("::ffff:192.0.2.1")), one);
    }

    #[test]
    fn hosts_of_one_network_are_the_most_of_no_more_than_themselves() {
        let (mut clients, at) = (Clients::new(), Instant::from_millis);
        let some: BTreeSet<IpAddr> = (1..=20).map(|link| address(&format!("2001:db8:1:{link}::"))).collect();
        let newcomer = address("2001:db8:1:1::");
        assert!(clients.are_most(&some, newcomer), "nobody else is there");
        let others = ["192.0.2.1", "192.0.2.2", "198.51.100.1", "2001:db8:2::1"].map(address);
        others.iter().for_each(|other| clients.add(at(0), *other).expect("room"));
        assert!(!clients.are_most(&some, newcomer), "the others of its hosts have gone");
        some.iter().for_each(|host| clients.add(at(0), *host).expect("room"));
        assert!(!clients.are_most(&some, newcomer), "one network of four");
        let all = some.iter().copied().chain(others.map(host_at)).collect();
        assert!(clients.are_most(&all, newcomer));
        others.iter().for_each(|other| clients.remove(at(0), *other));
        assert!(clients.are_most(&some, newcomer));
    }
}
