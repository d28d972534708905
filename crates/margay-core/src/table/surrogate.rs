//! The virtual five-tuple that a responder gives a flow (DESIGN §5, §18): the client's real address where the host
//! can take it, else a surrogate from a pool that nothing else uses.

use core::net::{IpAddr, SocketAddr};

use crate::types::ranges::Ranges;
use crate::types::tuple::Tuple;

/// Other ports that are tried before a surrogate is taken.
const PORT_TRIES: u16 = 32;
const SURROGATE_TRIES: u32 = 256;
const PORT_MIN: u16 = 1024;

const TCP: u8 = 6;
const UDP: u8 = 17;

/// Where clients are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// What the socket is bound to.
    pub listener: SocketAddr,
    /// Connections for the host's virtual address are brought to it.
    pub is_looked_up: bool,
}

impl Place {
    /// Where packets to it are delivered: the host's virtual address for a wildcard, and for connections to a socket
    /// that is looked up; else the listener's own. A datagram socket answers from where it is bound.
    fn local_side(self, protocol: u8, ranges: Ranges) -> SocketAddr {
        let Self { listener, is_looked_up } = self;
        match listener.ip() {
            ip if !(ip.is_unspecified() || is_looked_up && protocol == TCP) => listener,
            IpAddr::V4(_) => SocketAddr::new(ranges.host_v4().into(), listener.port()),
            IpAddr::V6(_) => SocketAddr::new(ranges.host_v6().into(), listener.port()),
        }
    }
}

/// Whether a packet from `address` to `local_side` could be delivered here as coming from a stranger.
fn is_presentable(protocol: u8, address: IpAddr, local_side: IpAddr, own: Own<'_>) -> bool {
    // A datagram socket that is bound to no address answers from the address of whatever interface leads to its peer:
    // only a surrogate leads to sal0. A connection keeps the address at which it was accepted.
    let answers_from_where_it_was_asked = protocol == TCP;
    let same_family = address.is_ipv4() == local_side.is_ipv4();
    // Replies to a real address reach sal0 only through the rule on the virtual local address.
    let answers_by_sal0 = own.ranges.is_host(local_side);
    answers_from_where_it_was_asked && same_family && answers_by_sal0 && own.is_strangers(address)
}

/// A host as its own listeners know it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Own<'a> {
    /// Its addresses.
    pub local: &'a [IpAddr],
    /// Its virtual ones.
    pub ranges: Ranges,
}

impl Own<'_> {
    /// Whether an address can only be another host's.
    fn is_strangers(self, address: IpAddr) -> bool {
        !address.is_loopback()
            && !address.is_unspecified()
            && !address.is_multicast()
            && !self.ranges.is_virtual(address)
            && !self.local.contains(&address)
    }
}

fn other_ports(random: u32) -> impl Iterator<Item = u16> {
    (0..PORT_TRIES).map(move |n| {
        let spread = (random as u16).wrapping_add(n.wrapping_mul(7919));
        PORT_MIN + spread % (u16::MAX - PORT_MIN)
    })
}

/// The tuple with another port of the client, or `None` when every try was taken.
pub(crate) fn other_port(tuple: &Tuple, random: u32, is_taken: impl Fn(&Tuple) -> bool) -> Option<Tuple> {
    let with = |port| Tuple { destination: SocketAddr::new(tuple.destination.ip(), port), ..*tuple };
    other_ports(random).map(with).find(|other| other != tuple && !is_taken(other))
}

/// The tuple of the flow as the listening application's packets will carry it, or `None` when every try was taken.
///
/// `client` is the client's address as this host sees it with the port that its program uses; `random` spreads
/// surrogates.
pub(crate) fn responder_tuple(
    protocol: u8,
    client: SocketAddr,
    place: Place,
    own: Own<'_>,
    random: u32,
    is_taken: impl Fn(&Tuple) -> bool,
) -> Option<Tuple> {
    let source = place.local_side(protocol, own.ranges);
    let is_shown = is_presentable(protocol, client.ip(), source.ip(), own);
    tuple_for(Tuple { protocol, source, destination: client }, is_shown, own, random, is_taken)
}

/// The tuple of a box's left half: what the box sees, reversed. Nothing here has a socket of it, so that the client's
/// address will do wherever that can only be another host's, and is of the service's family.
pub(crate) fn box_tuple(
    protocol: u8,
    client: SocketAddr,
    service: SocketAddr,
    own: Own<'_>,
    random: u32,
    is_taken: impl Fn(&Tuple) -> bool,
) -> Option<Tuple> {
    let is_shown = client.is_ipv4() == service.is_ipv4() && own.is_strangers(client.ip());
    tuple_for(Tuple { protocol, source: service, destination: client }, is_shown, own, random, is_taken)
}

/// A tuple that is not taken, with the client as its destination: by the client's own address where that can be shown,
/// with the client's port or another one, and by a surrogate otherwise.
fn tuple_for(
    wanted: Tuple,
    is_shown: bool,
    own: Own<'_>,
    random: u32,
    is_taken: impl Fn(&Tuple) -> bool,
) -> Option<Tuple> {
    let client = wanted.destination;
    let free = |destination: SocketAddr| Some(Tuple { destination, ..wanted }).filter(|tuple| !is_taken(tuple));
    if is_shown {
        let ports = core::iter::once(client.port()).chain(other_ports(random));
        if let Some(tuple) = ports.filter(|port| *port != 0).find_map(|port| free(SocketAddr::new(client.ip(), port))) {
            return Some(tuple);
        }
    }
    let surrogate = |n| own.ranges.surrogate(wanted.source.is_ipv4(), random.wrapping_add(n));
    (0..SURROGATE_TRIES).find_map(|n| free(SocketAddr::new(surrogate(n), client.port().max(1))))
}

/// The client's real address, where the host's programs can be shown it in the place of the surrogate that their
/// datagrams come from. `claimed` is the address that the client has by its own word: behind an address translator the
/// port that it has here is another's.
pub(crate) fn shown(client: SocketAddr, claimed: IpAddr, tuple: &Tuple, own: Own<'_>) -> Option<IpAddr> {
    let address = client.ip();
    let stands_for_it = tuple.protocol == UDP
        && own.ranges.is_virtual(tuple.destination.ip())
        && tuple.destination.port() == client.port()
        && tuple.destination.is_ipv4() == address.is_ipv4();
    (stands_for_it && own.is_strangers(address) && claimed == address).then_some(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn own(local: &[IpAddr]) -> Own<'_> {
        Own { local, ranges: Ranges::USUAL }
    }

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("literal")
    }

    fn place(text: &str) -> Place {
        Place { listener: address(text), is_looked_up: false }
    }

    fn looked_up(text: &str) -> Place {
        Place { listener: address(text), is_looked_up: true }
    }

    #[test]
    fn a_stranger_keeps_its_address_and_port() {
        let tuple = responder_tuple(6, address("10.0.1.5:4000"), place("0.0.0.0:80"), own(&[]), 9, |_| false);
        let tuple = tuple.expect("free");
        assert_eq!(tuple.destination, address("10.0.1.5:4000"));
        assert_eq!(tuple.source, address("198.18.0.1:80"));
    }

    #[test]
    fn a_box_sees_the_client_or_a_surrogate() {
        let service = address("198.18.3.4:80");
        for protocol in [TCP, UDP] {
            let tuple = box_tuple(protocol, address("10.0.1.5:4000"), service, own(&[]), 9, |_| false).expect("free");
            assert_eq!((tuple.source, tuple.destination), (service, address("10.0.1.5:4000")));
        }
        let taken = |tuple: &Tuple| tuple.destination.port() == 4000;
        let tuple = box_tuple(TCP, address("10.0.1.5:4000"), service, own(&[]), 9, taken).expect("free");
        assert_eq!(tuple.destination.ip(), address("10.0.1.5:1").ip(), "another port of the same client");
        let of_host = ["10.0.1.5".parse().expect("literal")];
        for (client, local) in [("10.0.1.5:4000", &of_host[..]), ("127.0.0.1:4000", &[]), ("[fd00::9]:4000", &[])] {
            let tuple = box_tuple(TCP, address(client), service, own(local), 70_000, |_| false).expect("free");
            assert!(Ranges::USUAL.is_virtual(tuple.destination.ip()), "{client} gave {tuple}");
            assert_eq!((tuple.source, tuple.destination.port()), (service, 4000));
        }
    }

    #[test]
    fn a_taken_port_gives_another_port_of_the_same_address() {
        let taken = |tuple: &Tuple| tuple.destination.port() == 4000;
        let tuple =
            responder_tuple(6, address("10.0.1.5:4000"), place("0.0.0.0:80"), own(&[]), 9, taken).expect("free");
        assert_eq!(tuple.destination.ip(), address("10.0.1.5:1").ip());
        assert_ne!(tuple.destination.port(), 4000);
    }

    #[test]
    fn a_listener_that_is_looked_up_is_asked_at_the_virtual_address() {
        for (client, listener, source) in [
            ("10.0.1.5:4000", "127.0.0.1:80", "198.18.0.1:80"),
            ("[fd00::9]:4000", "[::1]:80", "[fd5a:4c00::1]:80"),
            ("10.0.1.5:4000", "10.0.0.2:80", "198.18.0.1:80"),
            ("[fd00::9]:4000", "[fd00::2]:80", "[fd5a:4c00::1]:80"),
        ] {
            let tuple = responder_tuple(6, address(client), looked_up(listener), own(&[]), 9, |_| false).expect("free");
            assert_eq!((tuple.source, tuple.destination), (address(source), address(client)));
        }
        let private = responder_tuple(6, address("10.0.1.5:4000"), place("198.18.0.1:80"), own(&[]), 9, |_| false);
        assert_eq!(private.expect("free").destination, address("10.0.1.5:4000"), "it is there already");
        let (client, listener) = (address("10.0.1.5:4000"), looked_up("127.0.0.1:53"));
        let tuple = responder_tuple(17, client, listener, own(&[]), 9, |_| false).expect("free");
        assert_eq!(tuple.source, listener.listener, "a datagram socket answers from where it is bound");
    }

    #[test]
    fn own_addresses_other_families_and_bound_listeners_get_surrogates() {
        let of_host = ["10.0.1.5".parse().expect("literal")];
        for (client, listener, local) in [
            ("10.0.1.5:4000", "0.0.0.0:80", &of_host[..]),
            ("127.0.0.1:4000", "0.0.0.0:80", &[][..]),
            ("10.0.1.5:4000", "[::]:80", &[][..]),
            ("[fd00::9]:4000", "0.0.0.0:80", &[][..]),
            ("10.0.1.5:4000", "10.0.0.2:80", &[][..]),
        ] {
            let tuple =
                responder_tuple(6, address(client), place(listener), own(local), 70_000, |_| false).expect("free");
            assert!(Ranges::USUAL.is_virtual(tuple.destination.ip()), "{client} to {listener} gave {tuple}");
            assert_eq!(tuple.destination.port(), 4000);
            assert_eq!(tuple.source.is_ipv4(), tuple.destination.is_ipv4());
        }
    }

    #[test]
    fn a_datagram_comes_from_where_answers_find_back() {
        let tuple =
            responder_tuple(17, address("10.0.1.5:4000"), place("0.0.0.0:53"), own(&[]), 9, |_| false).expect("free");
        assert!(Ranges::USUAL.is_virtual(tuple.destination.ip()), "{tuple}");
        assert_eq!(tuple.source, address("198.18.0.1:53"));
    }

    #[test]
    fn a_datagram_servers_program_is_shown_the_client_unless_that_would_mislead_it() {
        let (client, listener) = (address("10.0.1.5:4000"), place("0.0.0.0:53"));
        let tuple = responder_tuple(17, client, listener, own(&[]), 9, |_| false).expect("free");
        let real = client.ip();
        assert_eq!(shown(client, real, &tuple, own(&[])), Some(real));
        let other: IpAddr = "192.168.0.5".parse().expect("literal");
        assert_eq!(shown(client, other, &tuple, own(&[])), None, "behind a translator");
        assert_eq!(shown(client, real, &tuple, own(&[real])), None, "this very host");
        let v6 = responder_tuple(17, client, place("[::]:53"), own(&[]), 9, |_| false).expect("free");
        assert_eq!(shown(client, real, &v6, own(&[])), None, "the socket answers by the other family");
        let tcp = responder_tuple(6, client, listener, own(&[]), 9, |_| false).expect("free");
        assert_eq!(shown(client, real, &tcp, own(&[])), None, "it has that address already");
    }

    #[test]
    fn another_port_is_another_one_of_the_same_client() {
        let before =
            responder_tuple(6, address("10.0.1.5:4000"), place("0.0.0.0:80"), own(&[]), 9, |_| false).expect("free");
        for random in 0..100 {
            let other = other_port(&before, random, |_| false).expect("free");
            assert_ne!(other, before);
            assert_eq!((other.source, other.destination.ip()), (before.source, before.destination.ip()));
        }
        assert_eq!(other_port(&before, 1, |_| true), None);
    }

    #[test]
    fn when_everything_is_taken_there_is_no_tuple() {
        assert!(responder_tuple(17, address("10.0.1.5:4000"), place("0.0.0.0:80"), own(&[]), 1, |_| true).is_none());
    }
}
