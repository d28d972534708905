//! Listeners at one address of this host, or on its loopback (DESIGN §7, decision 0052): connections come for the
//! host's virtual address, and an eBPF program gives them to the socket at the listener's own. It has the port alone to
//! go by, so of each family and port it serves one address.

use std::collections::HashSet;
use std::net::SocketAddr;

use margay_core::Ranges;

use super::direct::DirectPath;
use super::listening::Listener;
use crate::host;
use crate::listener::{Protocol, instead_of, is_loopback};

/// Has these listeners looked up from now on, and alone those or what an agent before has left, too; gives whether they
/// are.
pub type LookUp = Box<dyn Fn(&HashSet<SocketAddr>, bool) -> bool + Send + Sync>;

/// Whether a listener at `address` can be reached here.
///
/// # Errors
///
/// It cannot; the message says what to bind instead.
pub fn deliverable(address: SocketAddr, direct: &DirectPath, ranges: Ranges) -> Result<(), String> {
    match direct.why_no_lookup().filter(|_| is_loopback(address)) {
        None => Ok(()),
        Some(why) => Err(format!(
            "`{address}` is a loopback address, which only an eBPF program can reach, and there is none ({why}); {}",
            instead_of(address, ranges)
        )),
    }
}

/// Whether it is to be looked up: a TCP socket at one address of this host.
fn is_meant(listener: &Listener, ranges: Ranges, is_own: impl Fn(SocketAddr) -> bool) -> bool {
    let ip = listener.address.ip();
    listener.carries(Protocol::Tcp)
        && !ip.is_unspecified()
        && !ranges.is_virtual(ip)
        && (ip.is_loopback() || is_own(listener.address))
}

/// Which of these listeners are looked up. Those on the loopback come first: the others are reached at their own
/// addresses all the same, only that they see surrogates. Then those that are looked up `now`: what is does not change
/// without need.
pub fn chosen<'a>(
    listeners: impl Iterator<Item = &'a Listener>,
    now: &HashSet<SocketAddr>,
    ranges: Ranges,
) -> HashSet<SocketAddr> {
    choose(listeners, now, ranges, |address| host::has_address(address.ip()))
}

fn choose<'a>(
    listeners: impl Iterator<Item = &'a Listener>,
    now: &HashSet<SocketAddr>,
    ranges: Ranges,
    is_own: impl Fn(SocketAddr) -> bool + Copy,
) -> HashSet<SocketAddr> {
    let mut meant: Vec<SocketAddr> =
        listeners.filter(|listener| is_meant(listener, ranges, is_own)).map(|listener| listener.address).collect();
    meant.sort_by_key(|address| (!is_loopback(*address), !now.contains(address), *address));
    let mut taken = HashSet::new();
    meant.into_iter().filter(|address| taken.insert((address.is_ipv4(), address.port()))).collect()
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::agent::listening::Origin;

    fn listener(address: &str, protocol: Option<Protocol>) -> Listener {
        Listener {
            address: address.parse().expect("literal"),
            service_port: None,
            protocol,
            allow: Vec::new(),
            middlebox: None,
            origin: Origin::Order,
            takes_both: false,
        }
    }

    fn chosen(listeners: &[Listener], now: &[&str]) -> Vec<String> {
        let now = now.iter().map(|address| address.parse().expect("literal")).collect();
        let is_own = |address: SocketAddr| !address.to_string().starts_with("10.9.");
        let mut found: Vec<String> =
            choose(listeners.iter(), &now, Ranges::USUAL, is_own).iter().map(SocketAddr::to_string).collect();
        found.sort();
        found
    }

    #[test]
    fn tcp_at_an_address_of_this_host_is_looked_up() {
        let listeners = [
            listener("0.0.0.0:80", None),
            listener("[::]:81", None),
            listener("198.18.0.1:82", None),
            listener("10.9.0.2:83", None),
            listener("10.0.0.2:84", Some(Protocol::Udp)),
            listener("10.0.0.2:85", Some(Protocol::Tcp)),
            listener("[fd00::2]:85", None),
            listener("127.0.0.1:86", None),
        ];
        assert_eq!(chosen(&listeners, &[]), ["10.0.0.2:85", "127.0.0.1:86", "[fd00::2]:85"]);
    }

    #[test]
    fn one_of_each_family_and_port_is() {
        let listeners = ["10.0.0.3:80", "10.0.0.2:80", "[fd00::2]:80", "10.0.0.3:81"].map(|text| listener(text, None));
        assert_eq!(chosen(&listeners, &[]), ["10.0.0.2:80", "10.0.0.3:81", "[fd00::2]:80"]);
        assert_eq!(chosen(&listeners, &["10.0.0.3:80"])[0], "10.0.0.3:80", "it stays");
        let with_loopback = [listener("127.0.0.1:80", None), listener("10.0.0.3:80", None)];
        assert_eq!(chosen(&with_loopback, &["10.0.0.3:80"]), ["127.0.0.1:80"], "which nothing else reaches");
    }
}
