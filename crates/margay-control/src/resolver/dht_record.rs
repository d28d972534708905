//! Records of services in a DHT (BEP 44, mutable items): what is written there, and under which keys.
//!
//! A *service record* lies under the service's own key, with the first 12 bytes of the serviceID for its salt. Its
//! value, big-endian:
//!
//! ```text
//!  0      version, 1
//!  1 ..  5  for how many seconds an answer holds
//!  5 .. 13  until when the record is good, in seconds since 1970
//! 13      number of instances; none: the service is not there any more
//! 14 ..   for each: 4 or 6 (family), weight (2 bytes), port (2), host-ID (16; zeros: not said), address (4 or 16)
//! ```
//!
//! A name holds a hash of that key and not the key. So whoever knows the name alone finds the key by a *locator*: a
//! record under a key that everybody can derive from the name, whose value is the version (1) and the service's key (32
//! bytes). Anybody may write a locator; one with a key that the name does not certify is passed over.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use margay_core::key::{HostId, VerifyingKey};
use margay_core::name::ServiceId;

use super::Place;

/// Of a value, as BEP 44 has it.
pub const VALUE_MAX: usize = 1000;
const VERSION: u8 = 1;
const HEAD_LEN: usize = 14;
const LOCATOR_CONTEXT: &str = "margay 2026 DHT locator of a service";

/// What a service record says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceRecord {
    /// How long an answer holds.
    pub ttl: Duration,
    /// Until when it is good, in seconds since 1970.
    pub until_s: u64,
    /// Who serves the name.
    pub places: Vec<Place>,
}

/// The salt of a service's record: one key may certify several names.
pub fn salt(service: &ServiceId) -> &[u8] {
    service.0.split_at(12).0
}

/// The private key of a name's locator, which is no secret.
pub fn locator_key(service: &ServiceId) -> [u8; 32] {
    blake3::derive_key(LOCATOR_CONTEXT, &service.0)
}

/// The value of a locator.
pub fn locator(key: &VerifyingKey) -> [u8; 33] {
    let mut value = [VERSION; 33];
    value[1..].copy_from_slice(&key.0);
    value
}

/// The key that a locator names, if the name certifies it.
pub fn read_locator(service: &ServiceId, value: &[u8]) -> Option<VerifyingKey> {
    let (version, key) = value.split_first()?;
    let key = VerifyingKey(key.try_into().ok().filter(|_| *version == VERSION)?);
    service.is_certified_by(&key).then_some(key)
}

impl ServiceRecord {
    /// Its value; of the instances as many as there is room for.
    pub fn value(&self) -> Vec<u8> {
        let seconds = u32::try_from(self.ttl.as_secs()).unwrap_or(u32::MAX);
        let mut value = vec![VERSION];
        value.extend(seconds.to_be_bytes());
        value.extend(self.until_s.to_be_bytes());
        value.push(0);
        for place in &self.places {
            let entry = entry(place);
            if value.len() + entry.len() > VALUE_MAX || value[HEAD_LEN - 1] == u8::MAX {
                break;
            }
            value.extend(entry);
            value[HEAD_LEN - 1] += 1;
        }
        value
    }

    /// Reads a value; `None`: it makes no sense, or is of a later version.
    pub fn parse(value: &[u8]) -> Option<Self> {
        let (head, mut rest) = value.split_at_checked(HEAD_LEN).filter(|_| value.len() <= VALUE_MAX)?;
        let (version, count) = (head[0], head[HEAD_LEN - 1]);
        let ttl = u32::from_be_bytes(head[1..5].try_into().ok()?);
        let until_s = u64::from_be_bytes(head[5..13].try_into().ok()?);
        let mut places = Vec::new();
        for _ in 0..count {
            places.push(read_entry(&mut rest)?);
        }
        let is_whole = version == VERSION && rest.is_empty();
        is_whole.then(|| Self { ttl: Duration::from_secs(ttl.into()), until_s, places })
    }
}

fn entry(place: &Place) -> Vec<u8> {
    let family = if place.address.is_ipv4() { 4 } else { 6 };
    let mut entry = vec![family];
    entry.extend(u16::try_from(place.weight).unwrap_or(u16::MAX).to_be_bytes());
    entry.extend(place.address.port().to_be_bytes());
    entry.extend(place.host.unwrap_or(HostId([0; 16])).0);
    match place.address.ip() {
        IpAddr::V4(v4) => entry.extend(v4.octets()),
        IpAddr::V6(v6) => entry.extend(v6.octets()),
    }
    entry
}

fn take<'a, const N: usize>(rest: &mut &'a [u8]) -> Option<&'a [u8; N]> {
    let (taken, left) = rest.split_first_chunk::<N>()?;
    *rest = left;
    Some(taken)
}

fn read_entry(rest: &mut &[u8]) -> Option<Place> {
    let [family] = *take::<1>(rest)?;
    let weight = u16::from_be_bytes(*take::<2>(rest)?);
    let port = u16::from_be_bytes(*take::<2>(rest)?);
    let host = HostId(*take::<16>(rest)?);
    let ip: IpAddr = match family {
        4 => (*take::<4>(rest)?).into(),
        6 => (*take::<16>(rest)?).into(),
        _ => return None,
    };
    let host = Some(host).filter(|host| host.0 != [0; 16]);
    Some(Place { address: SocketAddr::new(ip, port), host, weight: weight.into() })
}

#[cfg(test)]
mod tests {
    use margay_core::key::SigningKey;
    use margay_core::name::self_certifying_tail;
    use proptest::prelude::*;

    use super::*;

    fn place(address: &str, host: Option<u8>, weight: u32) -> Place {
        Place { address: address.parse().expect("literal"), host: host.map(|n| HostId([n; 16])), weight }
    }

    #[test]
    fn a_record_byte_by_byte() {
        let record = ServiceRecord {
            ttl: Duration::from_secs(60),
            until_s: 0x0102_0304,
            places: vec![place("10.1.0.2:54324", Some(0xab), 100), place("[fd01::3]:1", None, 0x0203)],
        };
        let mut wire = vec![1, 0, 0, 0, 60, 0, 0, 0, 0, 1, 2, 3, 4, 2];
        wire.extend([4, 0, 100, 0xd4, 0x34]);
        wire.extend([0xab; 16]);
        wire.extend([10, 1, 0, 2]);
        wire.extend([6, 2, 3, 0, 1]);
        wire.extend([0; 16]);
        wire.extend([0xfd, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3]);
        assert_eq!(record.value(), wire);
        assert_eq!(ServiceRecord::parse(&wire), Some(record));
        for len in 0..wire.len() {
            assert_eq!(ServiceRecord::parse(&wire[..len]), None, "{len} bytes");
        }
        for (at, wrong) in [(0, 2), (13, 1), (13, 3), (14, 5)] {
            let mut changed = wire.clone();
            changed[at] = wrong;
            assert_eq!(ServiceRecord::parse(&changed), None, "byte {at}");
        }
    }

    #[test]
    fn what_has_no_room_is_left_out() {
        let places = vec![place("[fd01::3]:1", Some(1), 1); 300];
        let record = ServiceRecord { ttl: Duration::from_secs(1), until_s: 1, places };
        let value = record.value();
        assert!(value.len() <= VALUE_MAX && value.len() > VALUE_MAX - 40, "{}", value.len());
        assert_eq!(ServiceRecord::parse(&value).expect("whole").places.len(), (VALUE_MAX - HEAD_LEN) / 37);
    }

    #[test]
    fn a_locator_counts_if_the_name_certifies_its_key() {
        let (own, other) = (SigningKey::from_bytes(&[1; 32]).public(), SigningKey::from_bytes(&[2; 32]).public());
        let head = [7; 12];
        let mut id = [7; 32];
        id[12..].copy_from_slice(&self_certifying_tail(&own, &head));
        let service = ServiceId(id);
        let value = locator(&own);
        assert_eq!((value[0], &value[1..]), (1, &own.0[..]));
        assert_eq!(read_locator(&service, &value), Some(own));
        assert_eq!(read_locator(&service, &locator(&other)), None);
        assert_eq!(read_locator(&service, &value[..32]), None);
        let mut later = value;
        later[0] = 2;
        assert_eq!(read_locator(&service, &later), None);
        assert_eq!(salt(&service), head);
        let derived = "d2a6db2e";
        assert_eq!(&margay_core::key::to_hex(&locator_key(&ServiceId([0; 32])))[..8], derived);
    }

    proptest! {
        #[test]
        fn no_value_makes_it_panic(value: Vec<u8>) {
            if let Some(record) = ServiceRecord::parse(&value) {
                prop_assert_eq!(record.value(), value);
            }
        }
    }
}
