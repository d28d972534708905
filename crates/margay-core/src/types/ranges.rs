//! The virtual addresses of a host (DESIGN §5): two ranges that nothing else on the host uses. They mean nothing to
//! others, so that each host may have its own.

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::str::FromStr;

use crate::types::name::ServiceId;

/// Bits that all virtual IPv4 addresses of a host share.
pub const BITS_V4: u8 = 15;
/// And all virtual IPv6 addresses.
pub const BITS_V6: u8 = 32;

const MASK_V4: u32 = u32::MAX << (32 - BITS_V4);
/// Where the IPv4 addresses of names begin, as an offset: those before are the host's own and its responder's.
const NAMES_V4: u32 = 0x100;
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
/// Networks that a range may be a part of, as their first address and length: no host of the internet is there.
const LOCAL_V4: [(Ipv4Addr, u8); 4] = [
    (Ipv4Addr::new(10, 0, 0, 0), 8),
    (Ipv4Addr::new(100, 64, 0, 0), 10),
    (Ipv4Addr::new(172, 16, 0, 0), 12),
    (Ipv4Addr::new(198, 18, 0, 0), 15),
];

/// A /15 of IPv4.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RangeV4(u32);

/// A /32 of IPv6.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RangeV6([u8; 4]);

/// Why a text is no range of virtual addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeError {
    /// It is no address with a length.
    Form,
    /// It has another length.
    Length,
    /// Its address is not the first one; which that is.
    NotFirst(IpAddr),
    /// Its addresses may be those of other hosts, or mean something else.
    NotLocal,
}

impl fmt::Display for RangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Form => f.write_str("is no range of addresses"),
            Self::Length => f.write_str("has another length than the virtual addresses of a host need"),
            Self::NotFirst(first) => write!(f, "does not begin with the first address of its range, {first}"),
            Self::NotLocal => f.write_str("has addresses that hosts on a network may have"),
        }
    }
}

impl core::error::Error for RangeError {}

/// The address before the slash, where the length after it is `bits`.
fn split<A: FromStr>(text: &str, bits: u8) -> Result<A, RangeError> {
    let (address, length) = text.split_once('/').ok_or(RangeError::Form)?;
    let address = address.parse().map_err(|_| RangeError::Form)?;
    match length.parse::<u8>() {
        Ok(found) if found == bits && !length.starts_with(['+', '0']) => Ok(address),
        Ok(_) => Err(RangeError::Length),
        Err(_) => Err(RangeError::Form),
    }
}

impl FromStr for RangeV4 {
    type Err = RangeError;

    fn from_str(text: &str) -> Result<Self, RangeError> {
        let bits = split::<Ipv4Addr>(text, BITS_V4)?.to_bits();
        if bits & !MASK_V4 != 0 {
            return Err(RangeError::NotFirst(Ipv4Addr::from_bits(bits & MASK_V4).into()));
        }
        let is_part = |(first, length): &(Ipv4Addr, u8)| (bits ^ first.to_bits()) >> (32 - length) == 0;
        if LOCAL_V4.iter().any(is_part) { Ok(Self(bits)) } else { Err(RangeError::NotLocal) }
    }
}

impl FromStr for RangeV6 {
    type Err = RangeError;

    fn from_str(text: &str) -> Result<Self, RangeError> {
        let octets = split::<Ipv6Addr>(text, BITS_V6)?.octets();
        let range = Self([octets[0], octets[1], octets[2], octets[3]]);
        if octets[4..].iter().any(|octet| *octet != 0) {
            return Err(RangeError::NotFirst(range.at(0).into()));
        }
        // Unique local addresses (RFC 4193).
        if octets[0] & 0xfe == 0xfc { Ok(range) } else { Err(RangeError::NotLocal) }
    }
}

impl RangeV6 {
    /// An address of authority block 0, which is the agents' own.
    fn at(self, last: u32) -> Ipv6Addr {
        let mut octets = [0; 16];
        octets[..4].copy_from_slice(&self.0);
        octets[12..].copy_from_slice(&last.to_be_bytes());
        octets.into()
    }
}

impl fmt::Display for RangeV4 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{BITS_V4}", Ipv4Addr::from_bits(self.0))
    }
}

impl fmt::Display for RangeV6 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{BITS_V6}", self.at(0))
    }
}

impl fmt::Debug for RangeV4 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

impl fmt::Debug for RangeV6 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

/// The virtual addresses of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ranges {
    /// Of IPv4.
    pub v4: RangeV4,
    /// Of IPv6.
    pub v6: RangeV6,
}

impl Default for Ranges {
    fn default() -> Self {
        Self::USUAL
    }
}

impl fmt::Display for Ranges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} and {}", self.v4, self.v6)
    }
}

impl Ranges {
    /// 198.18.0.0/15, which is kept for benchmarks (RFC 2544), and fd5a:4c00::/32, which is local (RFC 4193).
    pub const USUAL: Self = Self { v4: RangeV4(0xc612_0000), v6: RangeV6([0xfd, 0x5a, 0x4c, 0x00]) };
    /// How many IPv4 addresses there are for names.
    pub const NAMES_V4: u32 = INSTANCES_V4 - NAMES_V4;

    /// The ranges that two addresses are in, of which a host says that they are its own virtual ones.
    pub const fn of_host(v4: Ipv4Addr, v6: Ipv6Addr) -> Self {
        let [a, b, c, d, ..] = v6.octets();
        Self { v4: RangeV4(v4.to_bits() & MASK_V4), v6: RangeV6([a, b, c, d]) }
    }

    const fn v4(self, offset: u32) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.v4.0 + offset)
    }

    /// The first IPv4 address.
    pub const fn first_v4(self) -> Ipv4Addr {
        self.v4(0)
    }

    /// The first IPv6 address.
    pub fn first_v6(self) -> Ipv6Addr {
        self.v6.at(0)
    }

    /// The host's own virtual IPv4 address on `sal0`.
    pub const fn host_v4(self) -> Ipv4Addr {
        self.v4(1)
    }

    /// The host's own virtual IPv6 address on `sal0`.
    pub fn host_v6(self) -> Ipv6Addr {
        self.v6.at(1)
    }

    /// Where the host's DNS responder answers.
    pub const fn responder_v4(self) -> Ipv4Addr {
        self.v4(2)
    }

    /// The host's own address towards its DNS responder.
    pub const fn responder_client_v4(self) -> Ipv4Addr {
        self.v4(3)
    }

    /// The IPv4 address of name number `n`; numbers wrap.
    pub const fn name_v4(self, n: u32) -> Ipv4Addr {
        self.v4(NAMES_V4 + n % Self::NAMES_V4)
    }

    /// Whether an address can only be a name's.
    pub fn is_name_v4(self, address: Ipv4Addr) -> bool {
        (NAMES_V4..INSTANCES_V4).contains(&u32::from(address).wrapping_sub(self.v4.0))
    }

    /// Whether an address is one of the host's own two.
    pub fn is_host(self, address: IpAddr) -> bool {
        address == IpAddr::V4(self.host_v4()) || address == IpAddr::V6(self.host_v6())
    }

    /// Whether an address is in one of the ranges.
    pub fn is_virtual(self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(v4) => u32::from(v4) & MASK_V4 == self.v4.0,
            IpAddr::V6(v6) => v6.octets()[..4] == self.v6.0,
        }
    }

    /// The computed IPv6 address of a name's first 96 bits.
    pub fn virtual_v6(self, service: &ServiceId) -> Ipv6Addr {
        let mut octets = [0; 16];
        octets[..4].copy_from_slice(&self.v6.0);
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
        (octets[..4] == self.v6.0 && service.authority() != [0; 8]).then_some(service)
    }

    /// The address of instance number `n` of a family; numbers wrap.
    pub fn instance(self, v4: bool, n: u32) -> IpAddr {
        if v4 {
            // .0.0 looks like a network's address.
            self.v4(INSTANCES_V4 + 1 + n % (INSTANCES_V4_COUNT - 1)).into()
        } else {
            self.v6.at(INSTANCES_V6 + n % INSTANCES_V6).into()
        }
    }

    /// Whether an address can only be an instance's.
    pub fn is_instance(self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(v4) => {
                (INSTANCES_V4..INSTANCES_V4 + INSTANCES_V4_COUNT).contains(&u32::from(v4).wrapping_sub(self.v4.0))
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
            self.v6.at(SURROGATES_V6 | n).into()
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("literal")
    }

    #[test]
    fn addresses_in_literal_bytes() {
        let other =
            Ranges { v4: "10.66.0.0/15".parse().expect("a range"), v6: "fdaa:1::/32".parse().expect("a range") };
        for (ranges, v4, v6) in [(Ranges::USUAL, "198.18", "fd5a:4c00:"), (other, "10.66", "fdaa:1:")] {
            assert_eq!(ranges.host_v4(), ip(&alloc::format!("{v4}.0.1")));
            assert_eq!(ranges.responder_v4(), ip(&alloc::format!("{v4}.0.2")));
            assert_eq!(ranges.responder_client_v4(), ip(&alloc::format!("{v4}.0.3")));
            assert_eq!(ranges.host_v6(), ip(&alloc::format!("{v6}:1")));
            assert_eq!(Ranges::of_host(ranges.host_v4(), ranges.host_v6()), ranges);
            let names = [0, 0xfeff, 0xff00].map(|n| ranges.name_v4(n));
            assert!(names.iter().all(|address| ranges.is_name_v4(*address)));
            assert_eq!(names.map(IpAddr::V4), ["1.0", "255.255", "1.0"].map(|end| ip(&alloc::format!("{v4}.{end}"))));
            assert!(!ranges.is_name_v4(ranges.responder_v4()));
            assert_eq!(ranges.instance(false, 0x7fff_ffff), ip(&alloc::format!("{v6}:7fff:ffff")));
            assert_eq!(ranges.surrogate(false, 7), ip(&alloc::format!("{v6}:8000:7")));
        }
        assert_eq!(other.instance(true, 0), ip("10.67.0.1"));
        assert_eq!(
            [0, 0xbffe, 0xbfff].map(|n| other.surrogate(true, n)),
            ["10.67.64.0", "10.67.255.254", "10.67.64.0"].map(ip)
        );
        assert!(other.is_virtual(ip("10.66.0.0")) && other.is_virtual(ip("10.67.255.255")));
        assert!(!other.is_virtual(ip("10.65.255.255")) && !other.is_virtual(ip("10.68.0.0")));
        assert!(!other.is_virtual(ip("198.18.0.1")) && !other.is_virtual(ip("fd5a:4c00::1")));
    }

    #[test]
    fn a_range_is_read_as_it_is_written() {
        for text in ["198.18.0.0/15", "10.0.0.0/15", "10.254.0.0/15", "172.30.0.0/15", "100.64.0.0/15"] {
            assert_eq!(text.parse::<RangeV4>().expect(text).to_string(), text);
        }
        for text in ["fd5a:4c00::/32", "fc00::/32", "fdff:ffff::/32"] {
            assert_eq!(text.parse::<RangeV6>().expect(text).to_string(), text);
        }
        assert_eq!(Ranges::USUAL.to_string(), "198.18.0.0/15 and fd5a:4c00::/32");
    }

    #[test]
    fn a_range_begins_at_its_first_address_and_no_other_host_can_be_there() {
        use RangeError::{Form, Length, NotFirst, NotLocal};
        for (text, wrong) in [
            ("", Form),
            ("10.66.0.0", Form),
            ("10.66.0.0/", Form),
            ("10.66.0.0/x", Form),
            ("fd5a:4c00::/32", Form),
            ("10.66.0.0/16", Length),
            ("10.66.0.0/015", Length),
            ("10.66.0.1/15", NotFirst(ip("10.66.0.0"))),
            ("10.67.0.0/15", NotFirst(ip("10.66.0.0"))),
            ("8.8.0.0/15", NotLocal),
            ("192.168.0.0/15", NotLocal),
            ("127.0.0.0/15", NotLocal),
            ("0.0.0.0/15", NotLocal),
            ("169.254.0.0/15", NotLocal),
            ("224.0.0.0/15", NotLocal),
            ("172.32.0.0/15", NotLocal),
            ("100.128.0.0/15", NotLocal),
        ] {
            assert_eq!(text.parse::<RangeV4>(), Err(wrong), "{text}");
        }
        for (text, wrong) in [
            ("198.18.0.0/15", Form),
            ("fd00::/48", Length),
            ("fd00:0:1::/32", NotFirst(ip("fd00::"))),
            ("fe80::/32", NotLocal),
            ("ff02::/32", NotLocal),
            ("::/32", NotLocal),
            ("2001:db8::/32", NotLocal),
        ] {
            assert_eq!(text.parse::<RangeV6>(), Err(wrong), "{text}");
        }
    }

    #[test]
    fn computed_addresses_go_both_ways_but_block_zero_is_ours() {
        let web = "web.shop".parse::<crate::types::name::Name>().expect("literal").service_id();
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
