//! Addresses in sixteen bytes: IPv4 as v4-mapped (RFC 4291 §2.5.5.2).

use core::net::{IpAddr, Ipv6Addr, SocketAddr};

pub(crate) fn emit_ip(ip: IpAddr, out: &mut [u8]) {
    let v6 = match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    out.copy_from_slice(&v6.octets());
}

/// Sixteen bytes; the callers have checked the length.
pub(crate) fn parse_ip(bytes: &[u8]) -> IpAddr {
    let mut octets = [0; 16];
    octets.copy_from_slice(bytes);
    Ipv6Addr::from(octets).to_canonical()
}

pub(crate) fn parse_socket(ip: &[u8], port: &[u8]) -> SocketAddr {
    SocketAddr::new(parse_ip(ip), u16::from_be_bytes([port[0], port[1]]))
}
