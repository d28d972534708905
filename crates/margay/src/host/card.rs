//! Which interfaces of this host are cards, by which strangers come, and which lead to the inside of it: to its
//! containers and virtual machines (DESIGN §18).

use std::io;
use std::net::IpAddr;

use margay_core::Ranges;
use margay_datapath::kernel::{Inside, Interface};

use super::guard::Opening;
use super::netlink::{Address, Block, Link, Netlink};
use crate::agent::OWN_INTERFACES;

/// An interface other than the loopback and Margay's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// Its name.
    pub name: String,
    /// What the programs are told of it.
    pub interface: Interface,
}

impl Card {
    /// Who may send to virtual addresses from there, where somebody may.
    pub fn opening(&self) -> Option<Opening> {
        let Inside::Prefixes(prefixes) = &self.interface.inside else { return None };
        let prefixes = prefixes.iter().map(|(address, bits)| Block { address: *address, bits: *bits }).collect();
        Some(Opening { interface: self.name.clone(), prefixes })
    }
}

/// Those of this host, now. `inside` is what the configuration says.
///
/// # Errors
///
/// The kernel's tables cannot be read.
pub async fn cards(inside: Option<&[String]>, ranges: Ranges) -> io::Result<Vec<Card>> {
    let net = Netlink::connect()?;
    Ok(judge(&net.links().await?, &net.addresses().await?, inside, ranges))
}

/// Which is which. Without a word of the configuration, bridges that reach nobody outside of this host are inside.
pub fn judge(links: &[Link], addresses: &[Address], inside: Option<&[String]>, ranges: Ranges) -> Vec<Card> {
    let is_inside = |link: &Link| match inside {
        Some(names) => names.contains(&link.name),
        None => is_closed_bridge(link, links),
    };
    let is_port = |link: &Link| {
        link.leads_nowhere && links.iter().any(|bridge| link.controller == Some(bridge.index) && is_inside(bridge))
    };
    let others = links.iter().filter(|link| !link.loopback && !OWN_INTERFACES.contains(&link.name.as_str()));
    others
        .map(|link| {
            let inside = if is_inside(link) && is_plain(&link.name) {
                Inside::Prefixes(prefixes(link, addresses, ranges))
            } else if is_port(link) {
                Inside::Port
            } else {
                Inside::Nobody
            };
            let interface = Interface { index: link.index, is_ethernet: link.ethernet, inside };
            Card { name: link.name.clone(), interface }
        })
        .collect()
}

/// As container runtimes make them: a bridge all of whose ports lead to programs of this host.
fn is_closed_bridge(link: &Link, links: &[Link]) -> bool {
    link.bridge && links.iter().filter(|port| port.controller == Some(link.index)).all(|port| port.leads_nowhere)
}

/// Whether a name is of letters that mean nothing to any other program. The kernel takes nearly all.
pub fn is_plain(name: &str) -> bool {
    let is_usual = |letter: char| letter.is_ascii_alphanumeric() || "-_.@".contains(letter);
    (1..=15).contains(&name.len()) && name.chars().all(is_usual)
}

fn prefixes(link: &Link, addresses: &[Address], ranges: Ranges) -> Vec<(IpAddr, u8)> {
    let own = addresses.iter().filter(|found| found.index == link.index && !found.link_local && found.bits > 0);
    let prefixes = own.map(|found| (network(found.address, found.bits), found.bits));
    prefixes.filter(|(first, _)| !ranges.is_virtual(*first)).collect()
}

/// The first address of a prefix.
pub fn network(address: IpAddr, bits: u8) -> IpAddr {
    match address {
        IpAddr::V4(v4) => {
            let mask = u32::MAX.checked_shl(32 - u32::from(bits.min(32))).unwrap_or(0);
            IpAddr::V4((u32::from(v4) & mask).into())
        }
        IpAddr::V6(v6) => {
            let mask = u128::MAX.checked_shl(128 - u32::from(bits.min(128))).unwrap_or(0);
            IpAddr::V6((u128::from(v6) & mask).into())
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn link(index: u32, name: &str, controller: Option<u32>) -> Link {
        Link {
            index,
            name: name.to_owned(),
            controller,
            mtu: 1500,
            gso_max_size: 65_536,
            queue_packets: 1000,
            up: true,
            running: true,
            operational: true,
            loopback: name == "lo",
            tun: false,
            veth: name.starts_with("veth") || name == "sal-dns",
            bridge: name.starts_with("br") || name == "docker0",
            leads_nowhere: name.starts_with("veth"),
            ethernet: name != "wg0",
        }
    }

    fn address(index: u32, text: &str, bits: u8) -> Address {
        let address: IpAddr = text.parse().expect("literal");
        let link_local = text.starts_with("fe80");
        Address { index, address, bits, link_local, tentative: false }
    }

    fn host() -> (Vec<Link>, Vec<Address>) {
        let links = vec![
            link(1, "lo", None),
            link(2, "eth0", Some(5)),
            link(3, "docker0", None),
            link(4, "veth1", Some(3)),
            link(5, "br0", None),
            link(6, "veth2", Some(5)),
            link(7, "wg0", None),
            link(8, "sal0", None),
            link(9, "sal-dns", None),
        ];
        let addresses = vec![
            address(3, "172.17.0.1", 16),
            address(3, "fd17::1", 64),
            address(3, "fe80::1", 64),
            address(5, "10.1.0.5", 24),
        ];
        (links, addresses)
    }

    fn insides(inside: Option<&[&str]>) -> Vec<(String, Inside)> {
        let (links, addresses) = host();
        let names = inside.map(|names| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
        let cards = judge(&links, &addresses, names.as_deref(), Ranges::USUAL);
        cards.into_iter().map(|card| (card.name, card.interface.inside)).collect()
    }

    fn of(name: &str, inside: Inside) -> (String, Inside) {
        (name.to_owned(), inside)
    }

    #[test]
    fn bridges_without_a_way_out_are_inside_unless_the_configuration_says_otherwise() {
        let docker: Vec<(IpAddr, u8)> =
            vec![("172.17.0.0".parse().expect("literal"), 16), ("fd17::".parse().expect("literal"), 64)];
        let nobody = |name| of(name, Inside::Nobody);
        let found = insides(None);
        let expected = [
            nobody("eth0"),
            of("docker0", Inside::Prefixes(docker)),
            of("veth1", Inside::Port),
            nobody("br0"),
            nobody("veth2"),
            nobody("wg0"),
        ];
        assert_eq!(found, expected);
        assert!(insides(Some(&[])).iter().all(|(_, inside)| *inside == Inside::Nobody));
    }

    #[test]
    fn the_card_of_a_bridge_that_is_called_inside_stays_one() {
        let found = insides(Some(&["br0"]));
        let site: Vec<(IpAddr, u8)> = vec![("10.1.0.0".parse().expect("literal"), 24)];
        assert!(found.contains(&of("br0", Inside::Prefixes(site))));
        assert!(found.contains(&of("eth0", Inside::Nobody)) && found.contains(&of("veth2", Inside::Port)));
        assert!(found.contains(&of("docker0", Inside::Nobody)));
    }

    #[test]
    fn names_that_mean_something_to_others_are_no_names() {
        for (name, is_well) in
            [("br-4f2c", true), ("", false), ("a\"", false), ("a b", false), ("sixteen-letters-x", false)]
        {
            assert_eq!(is_plain(name), is_well, "{name}");
        }
    }
}
