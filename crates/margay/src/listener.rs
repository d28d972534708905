//! What people say of a service that they publish: its name, its listening socket, the protocol.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use margay_core::name::{Name, NameError, PARTITION_BITS_MAX, is_computable};
use margay_core::table::{Demux, HAND_OVER_PORT};
use margay_core::{BoxKind, Ranges};
use serde::de::{Deserialize, Deserializer, Error as _};

/// Greatest weight; enough for any ratio that matters.
pub const WEIGHT_MAX: u32 = 65_535;

/// A written name, checked.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ServiceName(pub Name);

impl fmt::Display for ServiceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for ServiceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse().map(Self).map_err(|error: NameError| match name_and_port(text) {
            Ok((name, Some(port))) => {
                format!("`{text}`: a name alone is wanted here; write {name}, without port {port}")
            }
            _ => error.to_string(),
        })
    }
}

impl<'de> Deserialize<'de> for ServiceName {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

/// A transport protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Deserialize, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl Protocol {
    /// IP protocol number.
    pub const fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
        }
    }

    /// The protocol of a number.
    pub const fn of_number(number: u8) -> Option<Self> {
        match number {
            6 => Some(Self::Tcp),
            17 => Some(Self::Udp),
            _ => None,
        }
    }

    /// As lists show it.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

/// What a box does with sessions that pass it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Deserialize, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum MiddleboxKind {
    /// It lets packets pass, or not: a firewall, a shaper
    Forward,
    /// It looks at packets, which pass whatever it does
    Sniff,
    /// It changes addresses or ports of packets: SNAT, DNAT
    Rewrite,
    /// It ends TCP connections, and makes connections of its own: HAProxy, nginx, squid
    Proxy,
}

impl MiddleboxKind {
    /// The kind of a word.
    pub fn of_label(label: &str) -> Option<Self> {
        [Self::Forward, Self::Sniff, Self::Rewrite, Self::Proxy].into_iter().find(|kind| kind.label() == label)
    }

    /// As lists show it.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Sniff => "sniff",
            Self::Rewrite => "rewrite",
            Self::Proxy => "proxy",
        }
    }

    /// Whether sessions pass it, in the kernel; otherwise a program takes them.
    pub const fn is_passed(self) -> bool {
        !matches!(self, Self::Proxy)
    }

    /// As the core has it; `listener`: where a proxy takes connections.
    pub fn core(self, listener: Demux) -> BoxKind {
        match self {
            Self::Forward => BoxKind::Forward,
            Self::Sniff => BoxKind::Sniff,
            Self::Rewrite => BoxKind::Rewrite,
            Self::Proxy => BoxKind::Proxy(Box::new(listener)),
        }
    }
}

/// Whether a box can have the name.
///
/// # Errors
///
/// It cannot: chains name whole services.
pub fn box_name(name: &Name) -> Result<(), String> {
    let is_plain = name.is_service() && is_computable(&name.service_id());
    is_plain
        .then_some(())
        .ok_or_else(|| format!("{name} cannot be a box's name: a box has the name of a whole service, as in fw.shop"))
}

/// Whether packets from `sal0` can reach a socket that is bound to `address`, on a host with these virtual addresses.
///
/// They carry the host's virtual address as destination, or a local address that the core rewrites to. Whether a
/// listener on the loopback can be reached depends on more ([`crate::agent::loopback`]).
///
/// # Errors
///
/// They cannot; the message says what to bind instead.
pub fn deliverable(address: SocketAddr, ranges: Ranges) -> Result<(), String> {
    let ip = address.ip();
    if address.port() == 0 {
        return Err(format!("`{address}` has no port; write the port on which the service listens"));
    }
    if ip.is_multicast() || (ranges.is_virtual(ip) && !ranges.is_host(ip)) {
        return Err(format!("`{address}` is no address that a socket of this host can have"));
    }
    Ok(())
}

/// Whether a program may answer a port of its service.
///
/// # Errors
///
/// It may not; the message says what to do.
pub fn usable_port(service_port: Option<u16>) -> Result<(), String> {
    if service_port == Some(HAND_OVER_PORT) {
        return Err(format!(
            "port {HAND_OVER_PORT} of every service is where agents hand over connections to each other; choose another"
        ));
    }
    Ok(())
}

/// Whether only programs of this host could reach a socket there by themselves.
pub fn is_loopback(address: SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}

/// Whether a listener on the loopback, if it is one, may be reached from elsewhere (DESIGN §7).
///
/// # Errors
///
/// It may not; the message says what to do.
pub fn expects_others(
    address: SocketAddr,
    protocol: Option<Protocol>,
    allow: &[String],
    ranges: Ranges,
) -> Result<(), String> {
    if !is_loopback(address) {
        return Ok(());
    }
    if protocol == Some(Protocol::Udp) && address.is_ipv6() {
        return Err(format!(
            "the kernel lets no datagrams into `{address}` or out of it; {}",
            instead_of(address, ranges)
        ));
    }
    if allow.is_empty() {
        return Err(format!(
            "`{address}` is a loopback address, and what listens there expects nobody from outside: say who may \
             connect (`authority`, say), or {}",
            instead_of(address, ranges)
        ));
    }
    Ok(())
}

/// Where a service could listen instead of on the loopback.
pub fn instead_of(address: SocketAddr, ranges: Ranges) -> String {
    let (any, virtual_address) = if address.is_ipv4() {
        ("0.0.0.0", ranges.host_v4().to_string())
    } else {
        ("[::]", format!("[{}]", ranges.host_v6()))
    };
    let port = address.port();
    format!(
        "let the service listen on {any}:{port} or on {virtual_address}:{port}, which other hosts cannot reach from \
         outside"
    )
}

/// `NAME[:PORT]` of the command line.
///
/// # Errors
///
/// The name or the port is wrong.
pub fn name_and_port(text: &str) -> Result<(ServiceName, Option<u16>), String> {
    // A written sid: has a colon of its own.
    let (name, port) = match text.rsplit_once(':') {
        Some((name, port)) if !name.is_empty() && name != "sid" && !name.ends_with("/key") => (name, Some(port)),
        _ => (text, None),
    };
    let name = name.parse().map_err(|error: NameError| error.to_string()).map(ServiceName)?;
    Ok((name, port.map(port_number).transpose()?))
}

/// How many bits number so many partitions.
///
/// # Errors
///
/// It is no number of partitions.
pub fn partition_bits(count: u32) -> Result<u8, String> {
    let bits = u8::try_from(count.trailing_zeros()).unwrap_or(u8::MAX);
    if count.is_power_of_two() && (1..=PARTITION_BITS_MAX).contains(&bits) {
        Ok(bits)
    } else {
        Err(format!("{count} is no number of partitions; it is a power of two from 2 to {}", 1 << PARTITION_BITS_MAX))
    }
}

/// A number of partitions of the command line.
///
/// # Errors
///
/// It is none.
pub fn partition_count(text: &str) -> Result<u32, String> {
    let count = text.parse().map_err(|_| format!("`{text}` is no number"))?;
    partition_bits(count).map(|_| count)
}

/// Whether a name can have partitions.
///
/// # Errors
///
/// It is not a whole service.
pub fn divisible(name: &Name, partition_bits: u8) -> Result<(), String> {
    if partition_bits == 0 || name.is_service() {
        return Ok(());
    }
    Err(format!(
        "{name} cannot have partitions: it is a key of a service, or many services; give them to a service.authority"
    ))
}

/// A port of the command line.
///
/// # Errors
///
/// It is none.
pub fn port_number(text: &str) -> Result<u16, String> {
    let port = text.parse().ok().filter(|port| *port != 0);
    port.ok_or_else(|| format!("`{text}` is no port; it is 1 to 65535"))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn names_with_ports() {
        let parse = |text: &str| name_and_port(text).map(|(name, port)| (name.to_string(), port));
        assert_eq!(parse("web.shop"), Ok(("web.shop".into(), None)));
        assert_eq!(parse("web.shop:80"), Ok(("web.shop".into(), Some(80))));
        assert_eq!(parse("web.shop/key:user42"), Ok(("web.shop/key:user42".into(), None)));
        assert_eq!(parse("web.shop/key:user42:80"), Ok(("web.shop/key:user42".into(), Some(80))));
        assert_eq!(parse("sid:0011/16"), Ok(("sid:0011/16".into(), None)));
        assert_eq!(parse("sid:0011/16:80"), Ok(("sid:0011/16".into(), Some(80))));
        let alone = "web.shop:80".parse::<ServiceName>();
        assert_eq!(alone, Err("`web.shop:80`: a name alone is wanted here; write web.shop, without port 80".into()));
        assert_eq!(parse("web.shop:0"), Err("`0` is no port; it is 1 to 65535".into()));
        assert_eq!(parse("web.shop:http"), Err("`http` is no port; it is 1 to 65535".into()));
    }

    #[test]
    fn the_port_of_hand_overs_is_no_programs() {
        assert!(usable_port(Some(HAND_OVER_PORT)).is_err_and(|why| why.contains("54325")));
        assert_eq!((usable_port(Some(80)), usable_port(None)), (Ok(()), Ok(())));
    }

    #[test]
    fn what_listens_on_the_loopback_says_who_may_connect() {
        let allow = ["authority".to_owned()];
        for text in ["127.0.0.1:80", "[::1]:80", "[::ffff:127.0.0.1]:80", "127.8.9.1:80"] {
            let address = text.parse().expect("an address");
            assert_eq!(expects_others(address, None, &allow, Ranges::USUAL), Ok(()));
            let error = expects_others(address, None, &[], Ranges::USUAL).expect_err("refused");
            assert!(error.contains("loopback") && error.contains("listen on"), "{error}");
            assert_eq!(expects_others(address, Some(Protocol::Udp), &allow, Ranges::USUAL).is_err(), address.is_ipv6());
        }
        assert_eq!(
            expects_others("0.0.0.0:80".parse().expect("an address"), Some(Protocol::Udp), &[], Ranges::USUAL),
            Ok(())
        );
    }

    #[test]
    fn an_address_without_a_socket_is_refused() {
        for text in ["0.0.0.0:80", "[::]:80", "10.0.0.1:80", "198.18.0.1:80", "[fd5a:4c00::1]:80"] {
            assert_eq!(deliverable(text.parse().expect("an address"), Ranges::USUAL), Ok(()), "{text}");
        }
        for text in ["0.0.0.0:0", "198.18.3.4:80", "224.0.0.1:80"] {
            assert!(deliverable(text.parse().expect("an address"), Ranges::USUAL).is_err(), "{text}");
        }
    }
}
