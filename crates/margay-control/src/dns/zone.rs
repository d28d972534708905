//! The zones that the responder answers for: the configured one, and the reverse zones of Margay's own addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use hickory_proto::rr::rdata::{A, AAAA, NS, SOA};
use hickory_proto::rr::{Name, RData, Record};
use margay_core::Ranges;

use super::DnsError;

/// How long an answer may be remembered. Far less than a lease lives without being asked for.
pub(super) const TTL_S: u32 = 30;
/// For answers that hold only until somebody serves the name.
pub(super) const FALLBACK_TTL_S: u32 = 1;
/// The server's own label. Services have two labels or more, so it takes nobody's name.
const SERVER: &str = "ns";

pub(super) struct Zones {
    forward: Name,
    reverse: Vec<Name>,
    server: Name,
    contact: Name,
    listen: IpAddr,
}

/// What a question is about.
pub(super) enum Place<'z> {
    /// The zone itself.
    Apex(&'z Name),
    /// A name under the configured zone.
    Forward(&'z Name),
    /// A name under a reverse zone.
    Reverse(&'z Name),
    /// None of ours.
    Elsewhere,
}

impl Zones {
    pub(super) fn new(zone: &str, listen: IpAddr, ranges: Ranges) -> Result<Self, DnsError> {
        let wrong = |why: &dyn std::fmt::Display| DnsError::Zone { zone: zone.to_owned(), why: why.to_string() };
        // Under a service label, so that the same rules hold for both.
        let bare = zone.strip_suffix('.').unwrap_or(zone);
        format!("x.{bare}").parse::<margay_core::name::Name>().map_err(|error| wrong(&error))?;
        let absolute = |text: String| Name::from_ascii(text).map_err(|error| wrong(&error));
        let forward = absolute(format!("{}.", bare.to_ascii_lowercase()))?;
        let reverse: Result<Vec<Name>, DnsError> = reverse(ranges).into_iter().map(absolute).collect();
        Ok(Self {
            server: absolute(format!("{SERVER}.{forward}"))?,
            contact: absolute(format!("hostmaster.{forward}"))?,
            reverse: reverse?,
            forward,
            listen,
        })
    }

    pub(super) fn place(&self, name: &Name) -> Place<'_> {
        let mut all = std::iter::once(&self.forward).chain(&self.reverse);
        match all.find(|zone| zone.zone_of(name)) {
            None => Place::Elsewhere,
            Some(zone) if zone.num_labels() == name.num_labels() => Place::Apex(zone),
            Some(zone) if *zone == self.forward => Place::Forward(zone),
            Some(zone) => Place::Reverse(zone),
        }
    }

    /// A written name in the configured zone. `None` where DNS has no spelling for it: keys keep their case, DNS does
    /// not.
    pub(super) fn spelling(&self, written: &str) -> Option<Name> {
        let is_plain = !written.contains(['/', ':']);
        is_plain.then(|| Name::from_ascii(format!("{written}.{}", self.forward)).ok()).flatten()
    }

    pub(super) fn soa(&self, zone: &Name, ttl_s: u32) -> Record {
        let soa = SOA::new(self.server.clone(), self.contact.clone(), 1, 3600, 600, 86400, ttl_s);
        Record::from_rdata(zone.clone(), ttl_s, RData::SOA(soa))
    }

    pub(super) fn ns(&self, zone: &Name) -> Record {
        Record::from_rdata(zone.clone(), TTL_S, RData::NS(NS(self.server.clone())))
    }

    pub(super) fn is_server(&self, name: &Name) -> bool {
        *name == self.server
    }

    /// Where the server itself listens, if that is one address.
    pub(super) fn listen(&self) -> Option<IpAddr> {
        (!self.listen.is_unspecified()).then_some(self.listen)
    }
}

/// The names of the reverse zones: of a /15 there are two.
fn reverse(ranges: Ranges) -> [String; 3] {
    let [one, two, ..] = ranges.first_v4().octets();
    let v4 = [two, two + 1].map(|two| format!("{two}.{one}.in-addr.arpa."));
    let head = ranges.first_v6().octets();
    let digits = head[..4].iter().rev().map(|octet| format!("{:x}.{:x}.", octet & 15, octet >> 4));
    let [first, second] = v4;
    [first, second, format!("{}ip6.arpa.", digits.collect::<String>())]
}

pub(super) fn a(owner: &Name, ttl_s: u32, address: Ipv4Addr) -> Record {
    Record::from_rdata(owner.clone(), ttl_s, RData::A(A(address)))
}

pub(super) fn aaaa(owner: &Name, ttl_s: u32, address: Ipv6Addr) -> Record {
    Record::from_rdata(owner.clone(), ttl_s, RData::AAAA(AAAA(address)))
}

pub(super) fn address(owner: &Name, ttl_s: u32, address: IpAddr) -> Record {
    match address {
        IpAddr::V4(v4) => a(owner, ttl_s, v4),
        IpAddr::V6(v6) => aaaa(owner, ttl_s, v6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reverse_zones_are_those_of_the_ranges() {
        let usual = ["18.198.in-addr.arpa.", "19.198.in-addr.arpa.", "0.0.c.4.a.5.d.f.ip6.arpa."];
        assert_eq!(reverse(Ranges::USUAL), usual);
        let other =
            Ranges { v4: "10.66.0.0/15".parse().expect("a range"), v6: "fdaa:1::/32".parse().expect("a range") };
        assert_eq!(reverse(other), ["66.10.in-addr.arpa.", "67.10.in-addr.arpa.", "1.0.0.0.a.a.d.f.ip6.arpa."]);
    }
}
