//! Which sockets serve which name.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::str::FromStr;

use margay_control::registration::Terms;
use margay_core::name::{Name, Prefix};
use margay_datapath::active_sockets::{Cookie, Executable, NamespaceCookie, OwnerId};
use nix::net::if_::if_indextoname;
use serde::{Deserialize, Serialize};

use crate::agent::listening::{Listener, Origin};
use crate::agent::service::served_prefix;
use crate::listener::{MiddleboxKind, Protocol, is_loopback, name_and_port, port_number};

/// Whose sockets a rule is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Those of a program that was started for it.
    Owner(OwnerId),
    /// Those of this host's network namespace: of a program file, or of any.
    Host(Option<PathBuf>),
    /// One socket, which its program has bound to a name.
    Socket(Cookie),
}

/// What is served, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Offer {
    /// The written name.
    #[serde(with = "written")]
    pub name: Name,
    /// Port that clients use; none: that of each socket.
    pub port: Option<u16>,
    /// Only sockets on this port.
    pub listen_port: Option<u16>,
    /// Only this protocol.
    pub protocol: Option<Protocol>,
    /// Who may connect, as written.
    pub allow: Vec<String>,
    /// Share among instances of one priority.
    pub weight: u32,
    /// Higher first.
    pub priority: u32,
    /// The service has 2^bits partitions; zero: none.
    #[serde(default)]
    pub partition_bits: u8,
    /// No other program and no other host may serve it.
    #[serde(default)]
    pub exclusive: bool,
    /// With `exclusive`: connections to a host that held it before are reset once another host holds it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fenced: bool,
    /// Datagrams of one unconnected socket are for one instance.
    #[serde(default)]
    pub sticky: bool,
    /// For how long clients wait for this host when it is silent, in milliseconds; all ones: for ever.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub give_up_after_ms: Option<u32>,
    /// A drain ends connections that have carried nothing for so long, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quiet_ms: Option<u32>,
    /// The program is a box, or looks at what passes one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub middlebox: Option<MiddleboxKind>,
}

impl Offer {
    /// How it is served.
    pub fn terms(&self) -> Terms {
        let Self { weight, priority, partition_bits, exclusive, fenced, sticky, give_up_after_ms, quiet_ms, .. } =
            *self;
        Terms { weight, priority, partition_bits, exclusive, fenced, sticky, give_up_after_ms, quiet_ms }
    }

    /// Which names it serves.
    pub fn served(&self) -> Prefix {
        served_prefix(&self.name, &self.terms())
    }
}

/// Sockets that serve a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Whose.
    pub source: Source,
    /// What for.
    pub offer: Offer,
}

/// A socket that listens, as rules see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Which.
    pub cookie: Cookie,
    /// Rises with every socket.
    pub number: u64,
    /// Whose.
    pub owner: Option<OwnerId>,
    /// Its network namespace, where that is not this host's.
    pub elsewhere: Option<NamespaceCookie>,
    /// The program that made it listen.
    pub executable: Option<Executable>,
    /// Protocol.
    pub protocol: Protocol,
    /// Where it is reached from this host.
    pub address: SocketAddr,
    /// At every address of IPv6, it takes IPv4 packets, too.
    pub takes_both: bool,
    /// The interface of this host whose packets alone it takes, or by which alone it sends: never those of `sal0`.
    pub interface: Option<NonZeroU32>,
}

impl Rule {
    /// Whether a socket is of the program that the rule is about.
    fn takes(&self, socket: &Seen) -> bool {
        let is_of_source = match &self.source {
            Source::Owner(owner) => socket.owner == Some(*owner),
            Source::Host(None) => socket.elsewhere.is_none(),
            Source::Socket(cookie) => socket.cookie == *cookie,
            // Looked at each time: an upgrade is another file of that name.
            Source::Host(Some(path)) => {
                socket.elsewhere.is_none()
                    && socket.executable.is_some_and(|known| Executable::at(path).is_ok_and(|now| now == known))
            }
        };
        let offer = &self.offer;
        is_of_source
            && offer.protocol.is_none_or(|protocol| protocol == socket.protocol)
            && offer.listen_port.is_none_or(|port| port == socket.address.port())
            // What nobody has named is not meant for others.
            && (!is_loopback(socket.address) || offer.listen_port.or(offer.port).is_some())
    }

    /// Why a socket that is meant cannot be served, if there is one.
    pub fn out_of_reach<'a>(&self, sockets: impl Iterator<Item = &'a Seen>) -> Option<String> {
        sockets.filter(|socket| self.takes(socket)).find_map(|socket| {
            let interface = socket.interface?.get();
            let name = if_indextoname(interface).ok().and_then(|name| name.into_string().ok());
            let name = name.unwrap_or_else(|| format!("number {interface}"));
            let address = socket.address;
            Some(format!(
                "its socket at {address} is bound to the interface {name} (SO_BINDTODEVICE or the like), by which \
                 nothing of Margay comes; let the program listen without an interface"
            ))
        })
    }

    /// The listeners that the name has now. Several sockets of one address are one.
    pub fn listeners<'a>(&self, sockets: impl Iterator<Item = &'a Seen>) -> Vec<Listener> {
        if let Some(kind) = self.offer.middlebox {
            // It is there as long as the program is.
            return vec![Listener::of_box(kind, self.offer.allow.clone(), Origin::Socket)];
        }
        let is_reached = |socket: &&Seen| socket.interface.is_none();
        let mut taken: Vec<&Seen> = sockets.filter(|socket| self.takes(socket)).filter(is_reached).collect();
        taken.sort_by_key(|socket| socket.number);
        if let (Some(port), None) = (self.offer.port, self.offer.listen_port) {
            // Clients have one port, so one port answers: that of the same number, or the first.
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                let ports = || taken.iter().filter(|seen| seen.protocol == protocol).map(|seen| seen.address.port());
                let chosen = ports().find(|found| *found == port).or_else(|| ports().next());
                taken.retain(|seen| seen.protocol != protocol || Some(seen.address.port()) == chosen);
            }
        }
        // A program that bound a name knows no ports, and its clients need to know none.
        let is_every_port = matches!(self.source, Source::Socket(_));
        let service_port = |seen: &Seen| (!is_every_port).then(|| self.offer.port.unwrap_or(seen.address.port()));
        let listener = |seen: &&Seen| Listener {
            address: seen.address,
            service_port: service_port(seen),
            protocol: Some(seen.protocol),
            allow: self.offer.allow.clone(),
            middlebox: None,
            origin: Origin::Socket,
            takes_both: seen.takes_both,
        };
        let mut listeners: Vec<Listener> = taken.iter().map(listener).collect();
        // Of several at one address, a packet may be given to any: what one does not take comes first, and stays.
        listeners.sort_by_key(|found| (found.address, found.protocol.map(Protocol::label), found.takes_both));
        listeners.dedup_by_key(|found| (found.address, found.protocol));
        listeners
    }
}

/// `NAME[:PORT[:LISTEN]]` of the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The name.
    pub name: Name,
    /// Port that clients use.
    pub port: Option<u16>,
    /// The program's port.
    pub listen_port: Option<u16>,
}

impl FromStr for Wanted {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // Only after a port can there be another one: a name may have colons of its own.
        if let Some((head, last)) = text.rsplit_once(':')
            && let Ok((name, Some(port))) = name_and_port(head)
        {
            return Ok(Self { name: name.0, port: Some(port), listen_port: Some(port_number(last)?) });
        }
        let (name, port) = name_and_port(text)?;
        Ok(Self { name: name.0, port, listen_port: None })
    }
}

/// Names as people write them.
pub(super) mod written {
    use margay_core::name::Name;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(name: &Name, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(name.written())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Name, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn seen(number: u64, owner: u32, protocol: Protocol, address: &str) -> Seen {
        Seen {
            cookie: Cookie(number),
            number,
            owner: (owner != 0).then_some(OwnerId(owner)),
            elsewhere: None,
            executable: None,
            protocol,
            address: address.parse().expect("literal"),
            takes_both: false,
            interface: None,
        }
    }

    fn rule(port: Option<u16>, listen_port: Option<u16>) -> Rule {
        let offer = Offer {
            name: "web.shop".parse().expect("a name"),
            port,
            listen_port,
            protocol: None,
            allow: Vec::new(),
            weight: 100,
            priority: 100,
            partition_bits: 0,
            exclusive: false,
            fenced: false,
            sticky: false,
            give_up_after_ms: None,
            quiet_ms: None,
            middlebox: None,
        };
        Rule { source: Source::Owner(OwnerId(1)), offer }
    }

    fn found(rule: &Rule, sockets: &[Seen]) -> Vec<String> {
        let text = |listener: &Listener| {
            let port = listener.service_port.unwrap_or_default();
            format!("{port}={}/{}", listener.address, listener.protocol.map_or("", Protocol::label))
        };
        rule.listeners(sockets.iter()).iter().map(text).collect()
    }

    use Protocol::{Tcp, Udp};

    #[test]
    fn every_port_of_the_program_is_served_unless_one_is_named() {
        let sockets = [
            seen(5, 1, Tcp, "0.0.0.0:443"),
            seen(2, 1, Tcp, "0.0.0.0:80"),
            seen(3, 1, Tcp, "127.0.0.1:9000"),
            seen(4, 1, Udp, "0.0.0.0:53"),
            seen(1, 2, Tcp, "0.0.0.0:81"),
        ];
        assert_eq!(
            found(&rule(None, None), &sockets),
            ["53=0.0.0.0:53/udp", "80=0.0.0.0:80/tcp", "443=0.0.0.0:443/tcp"],
            "another program's and the loopback's are not"
        );
        assert_eq!(found(&rule(Some(443), None), &sockets), ["443=0.0.0.0:53/udp", "443=0.0.0.0:443/tcp"]);
        assert_eq!(found(&rule(Some(8080), None), &sockets)[1], "8080=0.0.0.0:80/tcp", "the first");
        assert_eq!(found(&rule(Some(8080), Some(9000)), &sockets), ["8080=127.0.0.1:9000/tcp"]);
        assert_eq!(found(&rule(None, Some(443)), &sockets), ["443=0.0.0.0:443/tcp"]);
        assert!(found(&rule(None, Some(444)), &sockets).is_empty());
    }

    #[test]
    fn a_program_that_is_a_box_needs_no_socket() {
        let mut of_box = rule(None, None);
        of_box.offer.middlebox = Some(MiddleboxKind::Sniff);
        let listeners = of_box.listeners([seen(1, 1, Tcp, "0.0.0.0:80")].iter());
        assert_eq!(listeners, [Listener::of_box(MiddleboxKind::Sniff, Vec::new(), Origin::Socket)]);
    }

    #[test]
    fn sockets_of_one_address_are_one_listener() {
        let group = [seen(1, 1, Tcp, "0.0.0.0:80"), seen(2, 1, Tcp, "0.0.0.0:80"), seen(3, 1, Tcp, "[::]:80")];
        assert_eq!(found(&rule(None, None), &group), ["80=0.0.0.0:80/tcp", "80=[::]:80/tcp"]);
        assert_eq!(found(&rule(None, None), &group[2..]), ["80=[::]:80/tcp"]);
    }

    #[test]
    fn sockets_of_both_families_are_one_listener_if_all_of_them_are() {
        let both = |number| Seen { takes_both: true, ..seen(number, 1, Tcp, "[::]:80") };
        let takes_both = |sockets: &[Seen]| {
            let listeners = rule(None, None).listeners(sockets.iter());
            assert_eq!(listeners.len(), 1);
            listeners[0].takes_both
        };
        assert!(takes_both(&[both(1), both(2)]));
        assert!(!takes_both(&[both(1), seen(2, 1, Tcp, "[::]:80"), both(3)]));
    }

    #[test]
    fn a_socket_that_is_bound_to_an_interface_is_no_listener_and_says_so() {
        let bound = Seen { interface: NonZeroU32::new(1), ..seen(1, 1, Tcp, "0.0.0.0:80") };
        let rule = rule(None, None);
        assert!(found(&rule, std::slice::from_ref(&bound)).is_empty());
        let why = rule.out_of_reach([&bound].into_iter()).expect("it is meant");
        assert!(why.contains("0.0.0.0:80") && why.contains("the interface lo "), "{why}");
        assert_eq!(
            rule.out_of_reach([&seen(1, 1, Tcp, "0.0.0.0:80"), &seen(2, 2, Tcp, "0.0.0.0:81")].into_iter()),
            None
        );
        let others = Seen { owner: Some(OwnerId(2)), ..bound.clone() };
        assert_eq!(rule.out_of_reach([&others].into_iter()), None);
        assert_eq!(found(&rule, &[bound, seen(2, 1, Tcp, "10.0.0.2:80")]), ["80=10.0.0.2:80/tcp"]);
    }

    #[test]
    fn sockets_of_the_host_are_taken_by_program_or_by_port() {
        let own = std::env::current_exe().expect("a path");
        let mut socket = seen(1, 0, Tcp, "0.0.0.0:80");
        let mut rule = Rule { source: Source::Host(Some(own.clone())), ..rule(None, None) };
        assert!(found(&rule, &[socket.clone()]).is_empty());
        socket.executable = Executable::at(&own).ok();
        assert_eq!(found(&rule, &[socket.clone()]).len(), 1);
        rule.source = Source::Host(Some("/nowhere".into()));
        assert!(found(&rule, &[socket.clone()]).is_empty());
        rule.source = Source::Host(None);
        assert_eq!(found(&rule, &[socket.clone()]).len(), 1);
        socket.elsewhere = Some(NamespaceCookie(7));
        assert!(found(&rule, &[socket]).is_empty());
    }

    #[test]
    fn a_bound_socket_serves_every_port_of_its_name() {
        let rule = Rule { source: Source::Socket(Cookie(2)), ..rule(None, None) };
        let sockets = [seen(1, 1, Tcp, "[::]:80"), seen(2, 0, Tcp, "[::]:40000")];
        let listeners = rule.listeners(sockets.iter());
        assert_eq!(listeners.len(), 1);
        assert_eq!((listeners[0].address, listeners[0].service_port), (sockets[1].address, None));
    }

    #[test]
    fn what_is_wanted_is_written_with_up_to_two_ports() {
        let parse =
            |text: &str| text.parse().map(|Wanted { name, port, listen_port }| (name.to_string(), port, listen_port));
        for (text, wanted) in [
            ("web.shop", ("web.shop", None, None)),
            ("web.shop:80", ("web.shop", Some(80), None)),
            ("web.shop:80:8000", ("web.shop", Some(80), Some(8000))),
            ("web.shop/key:user42", ("web.shop/key:user42", None, None)),
            ("web.shop/key:user42:80:81", ("web.shop/key:user42", Some(80), Some(81))),
            ("sid:0011/16:80", ("sid:0011/16", Some(80), None)),
        ] {
            assert_eq!(parse(text), Ok((wanted.0.to_owned(), wanted.1, wanted.2)), "{text}");
        }
        for text in ["web.shop:0", "web.shop:x", "web.shop:1:2:3", "", "web..shop", "web.shop:80:"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
