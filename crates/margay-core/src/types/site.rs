//! Where a stranger is: the addresses that one person may have for himself. Whoever has one address of IPv6 has a
//! /64, and may have a /48; with IPv4, one address and perhaps a /24 (RFC 6177, RFC 7608).

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

const V4_NETWORK: u32 = !0 << 8;
const V6_LINK: u128 = !0 << 64;
const V6_NETWORK: u128 = !0 << 80;

/// What is counted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Site {
    /// One address of IPv4, or a /64 of IPv6.
    Address(IpAddr),
    /// A /24 of IPv4, or a /48 of IPv6.
    Network(IpAddr),
}

impl Site {
    /// The address's own, and the network that has it.
    pub fn both(address: IpAddr) -> [Self; 2] {
        match address.to_canonical() {
            IpAddr::V4(v4) => {
                let network = Ipv4Addr::from(u32::from(v4) & V4_NETWORK);
                [Self::Address(v4.into()), Self::Network(network.into())]
            }
            IpAddr::V6(v6) => {
                let prefix = |mask: u128| Ipv6Addr::from(u128::from(v6) & mask).into();
                [Self::Address(prefix(V6_LINK)), Self::Network(prefix(V6_NETWORK))]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_prefix_and_a_network() {
        let site = |text: &str| Site::both(text.parse().expect("an address"));
        let ip = |text: &str| -> IpAddr { text.parse().expect("an address") };
        assert_eq!(site("192.0.2.7"), [Site::Address(ip("192.0.2.7")), Site::Network(ip("192.0.2.0"))]);
        assert_eq!(site("::ffff:192.0.2.7"), site("192.0.2.7"));
        assert_eq!(site("2001:db8:1:2:3::4"), [Site::Address(ip("2001:db8:1:2::")), Site::Network(ip("2001:db8:1::"))]);
    }
}
