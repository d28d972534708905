//! Names and records of services in DNS: what resolvers look for, and what routers write there.
//!
//! ```text
//! _sal._udp.web.shop.ZONE.   60 IN SRV 0 100 54324 h1.ZONE.     who serves web.shop
//! h1.ZONE.                   60 IN A   10.1.0.2
//! _sal._udp.web.shop.ZONE.   60 IN TXT "margay1 host=0123456789abcdef0123456789abcdef target=h1.ZONE."
//! _sal._udp.web.shop.ZONE.   60 IN TXT "margay1 bits=96"        not needed; the answer is for this prefix of the name
//! _sal._udp.00000000.842adda3.b70d72e0118555bd._sid.ZONE. 60 IN CNAME _sal._udp.web.shop.ZONE.
//! ```
//!
//! A host that knows no more of a name than its bits asks by them: tail, service and authority, in hexadecimal; a tail
//! of zeros is left out.

use std::fmt::Write as _;

use hickory_proto::ProtoError;
use hickory_proto::rr::Name;
use margay_core::key::HostId;
use margay_core::name::ServiceId;

use super::Wanted;

/// What all records of services begin with.
const SERVICE_LABELS: &str = "_sal._udp";
/// Under it names are written by their bits.
const BITS_LABEL: &str = "_sid";
/// The first word of a TXT record of ours.
const VERSION: &str = "margay1";

/// Where the records of a name are, under a zone. By its bits, where it is not known how people write it, or where DNS
/// cannot.
///
/// # Errors
///
/// It is too long for DNS.
pub fn owner(wanted: &Wanted, zone: &Name) -> Result<Name, ProtoError> {
    match wanted.written.as_deref().filter(|written| is_written_in_dns(written)) {
        Some(written) => under(&format!("{SERVICE_LABELS}.{written}"), zone),
        None => owner_by_bits(&wanted.service, zone),
    }
}

/// Where the records of a name are for whoever has only its bits.
///
/// # Errors
///
/// The zone's name is too long.
pub fn owner_by_bits(service: &ServiceId, zone: &Name) -> Result<Name, ProtoError> {
    let (authority, rest) = service.0.split_at(8);
    let (of_service, tail) = rest.split_at(4);
    let mut labels = SERVICE_LABELS.to_owned();
    if tail.iter().any(|byte| *byte != 0) {
        labels = format!("{labels}.{}", hex(tail));
    }
    under(&format!("{labels}.{}.{}.{BITS_LABEL}", hex(of_service), hex(authority)), zone)
}

/// Keys may have any letters, and prefixes are no names.
fn is_written_in_dns(written: &str) -> bool {
    !written.contains('/') && !written.starts_with("sid:")
}

/// A name under a zone.
///
/// # Errors
///
/// It is no name of DNS.
pub fn under(labels: &str, zone: &Name) -> Result<Name, ProtoError> {
    let mut name = Name::from_ascii(labels)?.append_domain(zone)?;
    name.set_fqdn(true);
    Ok(name)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // A string takes all that it is given.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// What a TXT record of ours says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Remark {
    /// Which host is behind a target of SRV.
    Host {
        /// As the SRV record has it.
        target: Name,
        /// The host.
        host: HostId,
    },
    /// The records are for so many bits of the name.
    Bits(u16),
}

impl Remark {
    /// Reads the text of a TXT record; `None`: it is somebody else's, or makes no sense.
    pub fn parse(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        if words.next() != Some(VERSION) {
            return None;
        }
        let (mut target, mut host, mut bits) = (None, None, None);
        for word in words {
            match word.split_once('=')? {
                ("target", value) => target = Some(parse_target(value)?),
                ("host", value) => host = Some(value.parse::<HostId>().ok()?),
                ("bits", value) => bits = Some(value.parse::<u16>().ok().filter(|bits| *bits <= 256)?),
                // Words of later versions.
                _ => {}
            }
        }
        match (target, host, bits) {
            (Some(target), Some(host), None) => Some(Self::Host { target, host }),
            (None, None, Some(bits)) => Some(Self::Bits(bits)),
            _ => None,
        }
    }
}

impl std::fmt::Display for Remark {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Host { target, host } => write!(f, "{VERSION} host={} target={target}", hex(&host.0)),
            Self::Bits(bits) => write!(f, "{VERSION} bits={bits}"),
        }
    }
}

fn parse_target(text: &str) -> Option<Name> {
    let mut name = Name::from_ascii(text).ok()?.to_lowercase();
    name.set_fqdn(true);
    Some(name)
}

#[cfg(test)]
mod tests {
    use hickory_proto::serialize::binary::BinEncodable;

    use super::*;

    fn zone() -> Name {
        Name::from_ascii("dns.test.").expect("literal")
    }

    fn wanted(name: &str) -> Wanted {
        let parsed: margay_core::name::Name = name.parse().expect("literal");
        Wanted { service: parsed.service_id(), written: Some(parsed.written().to_owned()) }
    }

    #[test]
    fn names_in_dns_letter_by_letter() {
        let name = owner(&wanted("web.shop"), &zone()).expect("short");
        let wire = b"\x04_sal\x04_udp\x03web\x04shop\x03dns\x04test\x00";
        assert_eq!(name.to_bytes().expect("short"), wire);
        let nobody = Wanted { written: None, ..wanted("web.shop") };
        let by_bits = owner(&nobody, &zone()).expect("short");
        let wire = b"\x04_sal\x04_udp\x0818555bd6\x10842add7b70d72e01\x04_sid\x03dns\x04test\x00";
        assert_eq!(nobody.service.to_string(), "sid:842add7b70d72e0118555bd60000000000000000000000000000000000000000");
        assert_eq!(by_bits.to_bytes().expect("short"), wire);
        let mut id = ServiceId([0x0a; 32]);
        id.0[31] = 0xff;
        let text = owner_by_bits(&id, &zone()).expect("short").to_string();
        let tail = format!("{}ff", "0a".repeat(19));
        assert_eq!(text, format!("_sal._udp.{tail}.0a0a0a0a.0a0a0a0a0a0a0a0a._sid.dns.test."));
    }

    #[test]
    fn what_dns_cannot_write_is_asked_by_its_bits() {
        for name in ["web.shop/key:User_42", "sid:c0ffee/24"] {
            let text = owner(&wanted(name), &zone()).expect("short").to_string();
            assert!(text.ends_with("._sid.dns.test."), "{text}");
        }
        let long = format!("_sal._udp.{}", "a.".repeat(130));
        assert!(under(long.trim_end_matches('.'), &zone()).is_err());
    }

    #[test]
    fn remarks_letter_by_letter() {
        let host =
            Remark::Host { target: Name::from_ascii("h1.dns.test.").expect("literal"), host: HostId([0xab; 16]) };
        let text = "margay1 host=abababababababababababababababab target=h1.dns.test.";
        assert_eq!((host.to_string().as_str(), Remark::parse(text)), (text, Some(host)));
        assert_eq!(
            (Remark::Bits(96).to_string().as_str(), Remark::parse("margay1 bits=96 later=1")),
            ("margay1 bits=96", Some(Remark::Bits(96)))
        );
        for other in [
            "",
            "v=spf1 -all",
            "margay2 bits=96",
            "margay1 bits=257",
            "margay1 bits",
            "margay1 host=ab target=h1.",
            "margay1 target=h1.",
            "margay1",
        ] {
            assert_eq!(Remark::parse(other), None, "{other}");
        }
    }
}
