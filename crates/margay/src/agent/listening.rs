//! Listeners of services, the sockets that take what is sent there, and the rules of the service table that follow; and
//! boxes, which take nothing, and are passed; but for proxies, which are listeners.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use margay_core::name::Name;
use margay_core::table::{Action, Demux};
use margay_core::{Middlebox, Ranges};
use serde::{Deserialize, Serialize};

use crate::allow;
use crate::listener::{self, MiddleboxKind, Protocol, is_loopback};

/// A listening socket of a service, or a box that has its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Listener {
    /// Where it listens; a box that is passed does nowhere.
    pub address: SocketAddr,
    /// Port that clients use; none: every port.
    pub service_port: Option<u16>,
    /// `None`: TCP and UDP.
    pub protocol: Option<Protocol>,
    /// Who may connect, as written.
    pub allow: Vec<String>,
    /// It is a box.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub middlebox: Option<MiddleboxKind>,
    /// Who says so.
    #[serde(skip)]
    pub origin: Origin,
    /// At every address of IPv6, it takes IPv4 packets, too.
    #[serde(skip)]
    pub takes_both: bool,
}

/// Who says that there is a listener, and with that, who takes it away again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Origin {
    /// An order: kept until another one.
    #[default]
    Order,
    /// The configuration, which alone keeps it.
    Configuration,
    /// The kernel: a program listens, and nothing keeps it when it no longer does.
    Socket,
}

/// A socket that listens in this host's network namespace, as the kernel says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// What it is bound to.
    pub address: SocketAddr,
    /// Its protocol.
    pub protocol: Protocol,
    /// At every address of IPv6, it takes IPv4 packets, too.
    pub takes_both: bool,
}

/// All of them.
pub type Listening = HashSet<Place>;

impl Listener {
    /// A box that sessions pass.
    pub fn of_box(kind: MiddleboxKind, allow: Vec<String>, origin: Origin) -> Self {
        Self {
            address: SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0),
            service_port: None,
            protocol: None,
            allow,
            middlebox: Some(kind),
            origin,
            takes_both: false,
        }
    }

    /// A program that ends the sessions of a box.
    pub fn of_proxy(address: SocketAddr, allow: Vec<String>) -> Self {
        let protocol = Some(Protocol::Tcp);
        Self { address, protocol, ..Self::of_box(MiddleboxKind::Proxy, allow, Origin::Order) }
    }

    /// Whether sessions pass it, in the kernel, and no socket takes them.
    pub fn is_passed(&self) -> bool {
        self.middlebox.is_some_and(MiddleboxKind::is_passed)
    }

    /// Whether a service of this name can have it, on a host with these virtual addresses.
    ///
    /// # Errors
    ///
    /// It cannot, and why.
    pub fn fits(&self, name: &Name, ranges: Ranges) -> Result<(), String> {
        if self.middlebox.is_some() {
            listener::box_name(name)?;
        }
        if self.is_passed() {
            return Ok(());
        }
        listener::deliverable(self.address, ranges)?;
        listener::expects_others(self.address, self.protocol, &self.allow, ranges)
    }

    /// What can be brought to it; `None`: TCP and UDP. The kernel lets no datagrams into `::1` from outside.
    fn carried(&self) -> Option<Protocol> {
        let has_no_datagrams = self.address.is_ipv6() && is_loopback(self.address);
        self.protocol.or(has_no_datagrams.then_some(Protocol::Tcp))
    }

    /// Whether a protocol's packets are brought to it.
    pub fn carries(&self, protocol: Protocol) -> bool {
        self.carried().is_none_or(|carried| carried == protocol)
    }

    /// Whether its connections come to it only where it is looked up.
    pub fn is_reached_by_lookup(&self) -> bool {
        is_loopback(self.address) && self.carries(Protocol::Tcp)
    }

    /// Whether a socket takes what is sent there.
    pub fn is_taken_by(&self, place: &Place) -> bool {
        let (own, of_socket) = (self.address.ip(), place.address.ip());
        let takes_all = of_socket.is_unspecified() && (of_socket.is_ipv4() == own.is_ipv4() || place.takes_both);
        self.carries(place.protocol) && self.address.port() == place.address.port() && (takes_all || own == of_socket)
    }

    /// Takes note of whether the sockets at its very address take both families: all of them, as any may be given a
    /// packet.
    pub fn note_families(&mut self, listening: &Listening) {
        if self.origin == Origin::Socket {
            return;
        }
        let mut its = listening.iter().filter(|place| self.carries(place.protocol) && place.address == self.address);
        self.takes_both = its.next().is_some_and(|first| first.takes_both && its.all(|place| place.takes_both));
    }

    /// Whether the two are one service's sockets of either family on one port: a client is given to that of its own.
    fn is_twin_of(&self, other: &Self) -> bool {
        self.address.is_ipv4() != other.address.is_ipv4()
            && self.address.port() == other.address.port()
            && is_loopback(self.address) == is_loopback(other.address)
            && self.service_port == other.service_port
            && self.carried() == other.carried()
            && self.allow == other.allow
            && self.middlebox == other.middlebox
    }

    /// What brings clients to it; `None` where nothing can: connections reach the loopback only where it is looked up.
    fn action(&self, other_family: Option<IpAddr>, is_looked_up: bool) -> Option<Action> {
        // Checked when it was published.
        let allow = allow::parse(&self.allow).unwrap_or_default();
        let has_no_connections = self.is_reached_by_lookup() && !is_looked_up;
        let protocol = self.carried().or(has_no_connections.then_some(Protocol::Udp));
        if has_no_connections && protocol == Some(Protocol::Tcp) {
            return None;
        }
        let demux = Demux {
            listener: self.address,
            other_family,
            is_looked_up,
            service_port: self.service_port,
            protocol: protocol.map(Protocol::number),
            allow,
        };
        Some(match self.middlebox {
            Some(kind) => Action::Box(Middlebox { allow: demux.allow.clone(), kind: kind.core(demux) }),
            None => Action::Demux(demux),
        })
    }
}

/// What brings connections to these listeners of one service. A client of either family gets to a socket of its own
/// family where there is one, which sees its real address: a socket of both families stands for two, and two sockets of
/// one family each stand together. `looked_up`: those at one address that connections for the host's virtual address
/// are brought to.
pub fn actions(listeners: &[Listener], looked_up: &HashSet<SocketAddr>) -> Vec<Action> {
    let is_looked_up = |listener: &Listener| looked_up.contains(&listener.address);
    let is_at_host = |listener: &Listener| listener.address.ip().is_unspecified() || is_looked_up(listener);
    let mut is_paired = vec![false; listeners.len()];
    let mut actions = Vec::with_capacity(listeners.len());
    for (at, listener) in listeners.iter().enumerate() {
        if std::mem::replace(&mut is_paired[at], true) {
            continue;
        }
        if listener.takes_both {
            actions.extend(listener.action(Some(Ipv4Addr::UNSPECIFIED.into()), false));
            continue;
        }
        let is_twin = |other: &usize| {
            let twin = &listeners[*other];
            !is_paired[*other]
                && !twin.takes_both
                && listener.is_twin_of(twin)
                && is_at_host(listener) == is_at_host(twin)
        };
        let twin = (at + 1..listeners.len()).find(is_twin);
        if let Some(twin) = twin {
            is_paired[twin] = true;
        }
        let of_both = is_looked_up(listener) || twin.is_some_and(|twin| is_looked_up(&listeners[twin]));
        actions.extend(listener.action(twin.map(|twin| listeners[twin].address.ip()), of_both));
    }
    actions
}

#[cfg(test)]
mod test {
    use margay_core::BoxKind;
    use margay_core::table::Allow;

    use super::*;

    fn listener(address: &str) -> Listener {
        Listener {
            address: address.parse().expect("literal"),
            service_port: Some(80),
            protocol: Some(Protocol::Tcp),
            allow: Vec::new(),
            middlebox: None,
            origin: Origin::Order,
            takes_both: false,
        }
    }

    #[test]
    fn a_box_is_passed_and_takes_nothing() {
        let allow = vec!["group:ops".to_owned()];
        let found = actions(&[Listener::of_box(MiddleboxKind::Sniff, allow, Origin::Order)], &HashSet::new());
        let [Action::Box(Middlebox { kind: BoxKind::Sniff, allow: Allow::List(items) })] = &found[..] else {
            panic!("{found:?}");
        };
        assert_eq!(items.len(), 1);
    }

    #[test]
    fn a_proxy_is_a_box_that_listens() {
        let of = |text: &str| Listener::of_proxy(text.parse().expect("literal"), Vec::new());
        let found = actions(&[of("0.0.0.0:81"), of("[::]:81")], &HashSet::new());
        let [Action::Box(Middlebox { kind: BoxKind::Proxy(demux), .. })] = &found[..] else { panic!("{found:?}") };
        assert_eq!((demux.listener.port(), demux.protocol), (81, Some(6)));
        assert!(demux.other_family.is_some(), "a socket of each family");
        let name = |text: &str| text.parse::<Name>().expect("literal");
        assert_eq!(of("0.0.0.0:81").fits(&name("lb.shop"), Ranges::USUAL), Ok(()));
        assert!(of("0.0.0.0:0").fits(&name("lb.shop"), Ranges::USUAL).is_err(), "it listens nowhere");
        assert!(of("0.0.0.0:81").fits(&name("lb.shop/key:one"), Ranges::USUAL).is_err(), "no box's name");
        assert!(!of("0.0.0.0:81").is_passed());
    }

    fn places(listeners: &[Listener]) -> Vec<(String, Option<String>)> {
        let place = |action: &Action| match action {
            Action::Demux(demux) => (demux.listener.to_string(), demux.other_family.map(|ip| ip.to_string())),
            _ => panic!("a listener's rule leads to it"),
        };
        let looked_up = listeners.iter().map(|listener| listener.address).filter(|address| is_loopback(*address));
        actions(listeners, &looked_up.collect()).iter().map(place).collect()
    }

    #[test]
    fn a_socket_of_both_families_takes_each_client_by_its_own() {
        let mut listener = listener("[::]:80");
        assert_eq!(places(&[listener.clone()]), [("[::]:80".to_owned(), None)], "nothing is known of it");
        let place = |takes_both| Place { address: listener.address, protocol: Protocol::Tcp, takes_both };
        let (both, one) = (place(true), place(false));
        listener.note_families(&Listening::from([both]));
        assert_eq!(places(&[listener.clone()]), [("[::]:80".to_owned(), Some("0.0.0.0".to_owned()))]);
        listener.note_families(&Listening::from([both, one]));
        assert!(!listener.takes_both, "one of a group does not");
        listener.note_families(&Listening::from([Place { protocol: Protocol::Udp, ..both }]));
        assert!(!listener.takes_both, "the other protocol's");
    }

    #[test]
    fn two_sockets_of_one_port_take_a_family_each() {
        let pair = |one: &str, other: &str| (format!("{one}:80"), Some(other.to_owned()));
        let alone = |one: &str| (format!("{one}:80"), None);
        assert_eq!(places(&[listener("0.0.0.0:80"), listener("[::]:80")]), [pair("0.0.0.0", "::")]);
        let cards = ["10.0.0.2:80", "10.0.0.3:80", "[fd00::2]:80"].map(listener);
        assert_eq!(places(&cards), [pair("10.0.0.2", "fd00::2"), alone("10.0.0.3")]);
        let of_loopback = ["127.0.0.1:80", "[fd00::2]:80", "[::1]:80"].map(listener);
        assert_eq!(places(&of_loopback), [pair("127.0.0.1", "::1"), alone("[fd00::2]")]);
        let others = [
            Listener { service_port: Some(81), ..listener("[::]:80") },
            Listener { protocol: Some(Protocol::Udp), ..listener("[::]:80") },
            Listener { allow: vec!["any".to_owned()], ..listener("[::]:80") },
            listener("[::]:81"),
        ];
        for other in others {
            assert_eq!(places(&[listener("0.0.0.0:80"), other]).len(), 2, "they serve something else");
        }
    }

    #[test]
    fn a_listener_at_one_address_is_reached_there_or_looked_up() {
        let demux = |listeners: &[Listener], looked_up: &[&str]| {
            let looked_up = looked_up.iter().map(|text| text.parse().expect("literal")).collect();
            let found = actions(listeners, &looked_up).into_iter().map(|action| match action {
                Action::Demux(demux) => demux,
                _ => panic!("a listener's rule leads to it"),
            });
            found.collect::<Vec<_>>()
        };
        let card = listener("10.0.0.2:80");
        assert!(!demux(std::slice::from_ref(&card), &[])[0].is_looked_up);
        assert!(demux(std::slice::from_ref(&card), &["10.0.0.2:80"])[0].is_looked_up);
        let six = listener("[fd00::2]:80");
        let both = [card, six];
        assert_eq!(demux(&both, &["10.0.0.2:80", "[fd00::2]:80"]).len(), 1);
        assert_eq!(demux(&both, &[]).len(), 1);
        assert_eq!(demux(&both, &["10.0.0.2:80"]).len(), 2, "a client of one sees another than that of the other");
        let loopback = Listener { protocol: None, ..listener("127.0.0.1:80") };
        assert_eq!(demux(std::slice::from_ref(&loopback), &["127.0.0.1:80"])[0].protocol, None);
        assert_eq!(demux(std::slice::from_ref(&loopback), &[])[0].protocol, Some(17), "datagrams alone get there");
        assert!(demux(&[Listener { protocol: Some(Protocol::Tcp), ..loopback.clone() }], &[]).is_empty());
        assert!(demux(&[Listener { address: "[::1]:80".parse().expect("literal"), ..loopback }], &[]).is_empty());
    }
}
