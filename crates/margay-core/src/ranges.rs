//! The virtual addresses of a host (DESIGN §5): two ranges that nothing else on the host uses. They mean nothing to
//! others, so that each host may have its own.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::name::ServiceId;

/// Bits that all virtual IPv4 addresses of a host share.
pub const BITS_V4: u8 = 15;
/// And all virtual IPv6 addresses.
pub const BITS_V6: u8 = 32;

const MASK_V4: u32 = u32::MAX << (32 - BITS_V4);
/// Where the IPv4 addresses of instances begin, as an offset; and how many there are.
const INSTANCES_V4: u32 = 0x1_0000;
const INSTANCES_V4_COUNT: u32 = 0x4000;
/// The same of surrogates, which stand for clients.
const SURROGATES_V4: u32 = 0x1_4000;
const SURROGATES_V4_COUNT: u32 = 0xbfff;
/// IPv6 addresses of instances are those of authority block 0 whose last 32 bits begin with 01; surrogates those that
/// begin with 1.
const INSTANCES_V6: u32 = 0x4000_0000;
const SURROGATES_V6: u32 = 0x8000_0000;

/// A /15 and a /32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ranges {
    v4: u32,
    v6: [u8; 4],
}

impl Default for Ranges {
    fn default() -> Self {
        Self::USUAL
    }
}

impl Ranges {
    /// 198.18.0.0/15, which is kept for benchmarks (RFC 2544), and fd5a:4c00::/32, which is local (RFC 4193).
    pub const USUAL: Self = Self { v4: 0xc612_0000, v6: [0xfd, 0x5a, 0x4c, 0x00] };

    /// Ranges that begin at these addresses. `None` unless those are the first of a /15 and of a /32, and of addresses
    /// that a host can have.
    pub fn new(v4: Ipv4Addr, v6: Ipv6Addr) -> Option<Self> {
        let octets = v6.octets();
        let is_first = u32::from(v4) & !MASK_V4 == 0 && octets[4..].iter().all(|octet| *octet == 0);
        let is_usable = v4.octets()[0] != 0 && v4.octets()[0] < 224 && !v4.is_loopback() && !v6.is_multicast();
        let is_link_local = v4 == Ipv4Addr::new(169, 254, 0, 0) || octets[..2] == [0xfe, 0x80];
        (is_first && is_usable && !is_link_local && octets[..4] != [0; 4])
            .then_some(Self { v4: v4.into(), v6: [octets[0], octets[1], octets[2], octets[3]] })
    }

    const fn v4(self, offset: u32) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.v4 + offset)
    }

    /// Of authority block 0, which is the agents' own.
    fn v6(self, last: u32) -> Ipv6Addr {
        let mut octets = [0; 16];
        octets[..4].copy_from_slice(&self.v6);
        octets[12..].copy_from_slice(&last.to_be_bytes());
        octets.into()
    }

    /// The first IPv4 address.
    pub const fn first_v4(self) -> Ipv4Addr {
        self.v4(0)
    }

    /// The first IPv6 address.
    pub fn first_v6(self) -> Ipv6Addr {
        self.v6(0)
    }

    /// The host's own virtual IPv4 address on `sal0`.
    pub const fn host_v4(self) -> Ipv4Addr {
        self.v4(1)
    }

    /// The host's own virtual IPv6 address on `sal0`.
    pub fn host_v6(self) -> Ipv6Addr {
        self.v6(1)
    }

    /// Where the host's DNS responder answers.
    pub const fn responder_v4(self) -> Ipv4Addr {
        self.v4(2)
    }

    /// The host's own address towards its DNS responder.
    pub const fn responder_client_v4(self) -> Ipv4Addr {
        self.v4(3)
    }

    /// The IPv4 addresses that stand for names: first and last.
    pub const fn names_v4(self) -> (Ipv4Addr, Ipv4Addr) {
        (self.v4(4), self.v4(INSTANCES_V4 - 1))
    }

    /// Whether an address is one of the host's own two.
    pub fn is_host(self, address: IpAddr) -> bool {
        address == IpAddr::V4(self.host_v4()) || address == IpAddr::V6(self.host_v6())
    }

    /// Whether an address is in one of the ranges.
    pub fn is_virtual(self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(v4) => u32::from(v4) & MASK_V4 == self.v4,
            IpAddr::V6(v6) => v6.octets()[..4] == self.v6,
        }
    }

    /// The computed IPv6 address of a name's first 96 bits.
    pub fn virtual_v6(self, service: &ServiceId) -> Ipv6Addr {
        let mut octets = [0; 16];
        octets[..4].copy_from_slice(&self.v6);
        octets[4..].copy_from_slice(&service.0[..12]);
        octets.into()
    }

    /// The name that a computed address spells out. `None` for other addresses, and for authority block 0, which is the
    /// agents' own.
    pub fn service_of_v6(self, address: Ipv6Addr) -> Option<ServiceId> {
        let octets = address.octets();
        let mut id = [0; 32];
        id[..12].copy_from_slice(&octets[4..]);
        let service = ServiceId(id);
        (octets[..4] == self.v6 && service.authority() != [0; 8]).then_some(service)
    }

    /// The address of instance number `n` of a family; numbers wrap.
    pub fn instance(self, v4: bool, n: u32) -> IpAddr {
        if v4 {
            // .0.0 looks like a network's address.
            self.v4(INSTANCES_V4 + 1 + n % (INSTANCES_V4_COUNT - 1)).into()
        } else {
            self.v6(INSTANCES_V6 + n % INSTANCES_V6).into()
        }
    }

    /// Whether an address can only be an instance's.
    pub fn is_instance(self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(v4) => {
                (INSTANCES_V4..INSTANCES_V4 + INSTANCES_V4_COUNT).contains(&u32::from(v4).wrapping_sub(self.v4))
            }
            IpAddr::V6(v6) => {
                let last = u128::from(v6).wrapping_sub(u128::from(self.first_v6()));
                (u128::from(INSTANCES_V6)..u128::from(SURROGATES_V6)).contains(&last)
            }
        }
    }

    /// Surrogate number `n` of a family; numbers wrap.
    pub(crate) fn surrogate(self, v4: bool, n: u32) -> IpAddr {
        if v4 {
            // .255.255 looks like a broadcast address.
            self.v4(SURROGATES_V4 + n % SURROGATES_V4_COUNT).into()
        } else {
            self.v6(SURROGATES_V6 | n).into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("literal")
    }

    #[test]
    fn addresses_in_literal_bytes() {
        let other = Ranges::new(Ipv4Addr::new(10, 66, 0, 0), Ipv6Addr::from(0xfdaa_0001 << 96)).expect("two ranges");
        for (ranges, v4, v6) in [(Ranges::USUAL, "198.18", "fd5a:4c00:"), (other, "10.66", "fdaa:1:")] {
            assert_eq!(ranges.host_v4(), ip(&alloc::format!("{v4}.0.1")));
            assert_eq!(ranges.responder_v4(), ip(&alloc::format!("{v4}.0.2")));
            assert_eq!(ranges.responder_client_v4(), ip(&alloc::format!("{v4}.0.3")));
            assert_eq!(ranges.host_v6(), ip(&alloc::format!("{v6}:1")));
            let (first, last) = ranges.names_v4();
            assert_eq!([first, last].map(IpAddr::V4), [ip(&alloc::format!("{v4}.0.4")), ip(&alloc::format!("{v4}.255.255"))]);
            assert_eq!(ranges.instance(false, 0x7fff_ffff), ip(&alloc::format!("{v6}:7fff:ffff")));
            assert_eq!(ranges.surrogate(false, 7), ip(&alloc::format!("{v6}:8000:7")));
        }
        assert_eq!(other.instance(true, 0), ip("10.67.0.1"));
        assert_eq!([0, 0xbffe, 0xbfff].map(|n| other.surrogate(true, n)), ["10.67.64.0", "10.67.255.254", "10.67.64.0"].map(ip));
        assert!(other.is_virtual(ip("10.66.0.0")) && other.is_virtual(ip("10.67.255.255")));
        assert!(!other.is_virtual(ip("10.65.255.255")) && !other.is_virtual(ip("10.68.0.0")));
        assert!(!other.is_virtual(ip("198.18.0.1")) && !other.is_virtual(ip("fd5a:4c00::1")));
    }

    #[test]
    fn a_range_begins_at_its_first_address_and_is_one_that_a_host_can_have() {
        let v6 = Ranges::USUAL.first_v6();
        for v4 in ["10.65.0.0", "10.66.0.1", "127.0.0.0", "0.0.0.0", "224.0.0.0", "169.254.0.0"] {
            assert_eq!(Ranges::new(v4.parse().expect("literal"), v6), None, "{v4}");
        }
        for v6 in ["fd00:0:1::", "fe80::", "ff02::", "::", "fd00::1"] {
            assert_eq!(Ranges::new(Ranges::USUAL.first_v4(), v6.parse().expect("literal")), None, "{v6}");
        }
        assert_eq!(Ranges::new(Ranges::USUAL.first_v4(), v6), Some(Ranges::USUAL));
    }

    #[test]
    fn computed_addresses_go_both_ways_but_block_zero_is_ours() {
        let web = "web.shop".parse::<crate::name::Name>().expect("literal").service_id();
        let ranges = Ranges::USUAL;
        assert_eq!(ranges.service_of_v6(ranges.virtual_v6(&web)), Some(web));
        assert_eq!(ranges.service_of_v6(ranges.host_v6()), None);
    }

    #[test]
    fn instances_addresses_are_virtual_and_no_others() {
        for v4 in [true, false] {
            for n in [0, 1, 0x3ffe, 0x3fff, u32::MAX] {
                let address = Ranges::USUAL.instance(v4, n);
                assert!(Ranges::USUAL.is_instance(address) && Ranges::USUAL.is_virtual(address), "{address}");
                assert_eq!(address.is_ipv4(), v4);
            }
        }
        for other in ["198.18.0.9", "198.19.64.1", "fd5a:4c00::8000:1", "fd5a:4c00:1::4000:1", "fd5a:4c00::1"] {
            assert!(!Ranges::USUAL.is_instance(ip(other)), "{other}");
        }
    }
}
