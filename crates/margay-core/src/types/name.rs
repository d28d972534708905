//! Names of services (DESIGN §5): 256 bits, and how people write them.

use alloc::string::{String, ToString};
use core::fmt;
use core::str::FromStr;

use crate::types::key::{VerifyingKey, to_hex};

/// Bits of an authority.
pub const AUTHORITY_BITS: u16 = 64;
/// Bits of a service.
pub const SERVICE_BITS: u16 = 96;
/// Most bits by which a service is divided: 2^10 partitions.
pub const PARTITION_BITS_MAX: u8 = 10;
const LABEL_MAX: usize = 63;
/// Longest written name, in bytes: what DNS takes, less room for a zone.
const WRITTEN_MAX: usize = 200;

/// The 256-bit name of a service, most significant bit first.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceId(pub [u8; 32]);

impl ServiceId {
    /// The block of whoever owns the name.
    pub fn authority(&self) -> [u8; 8] {
        let mut block = [0; 8];
        block.copy_from_slice(&self.0[..8]);
        block
    }

    /// Bits 96 to 255: a self-certifying tail, a key's hash, or zero.
    pub fn tail(&self) -> &[u8] {
        &self.0[12..]
    }

    /// What the routers of an authority are asked for by on a network segment: no name that anybody can write.
    pub fn of_routers(authority: [u8; 8]) -> Self {
        let mut id = Self::default();
        id.0[..8].copy_from_slice(&authority);
        id.0[8..12].copy_from_slice(&blake3::hash(b"margay routers").as_bytes()[..4]);
        id
    }

    /// Which of 2^`bits` partitions of its service a name lies in; `bits` beyond [`PARTITION_BITS_MAX`] count as that.
    pub fn partition(&self, bits: u8) -> u16 {
        let head = u32::from(u16::from_be_bytes([self.0[12], self.0[13]]));
        // Sixteen bits at most are left after the shift.
        u16::try_from(head >> (16 - bits.min(PARTITION_BITS_MAX))).unwrap_or(u16::MAX)
    }

    /// Whether the tail says that `key` speaks for this name.
    pub fn is_certified_by(&self, key: &VerifyingKey) -> bool {
        let mut head = [0; 12];
        head.copy_from_slice(&self.0[..12]);
        self.tail() == self_certifying_tail(key, &head)
    }
}

impl fmt::Display for ServiceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sid:{}", to_hex(&self.0))
    }
}

impl fmt::Debug for ServiceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// The tail that makes a name certify itself: truncated BLAKE3 of the service's public key and bits 0 to 95.
pub fn self_certifying_tail(key: &VerifyingKey, head: &[u8; 12]) -> [u8; 20] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&key.0).update(head);
    let mut tail = [0; 20];
    tail.copy_from_slice(&hasher.finalize().as_bytes()[..20]);
    tail
}

/// The tail of a key's name: truncated BLAKE3 of the key.
pub fn key_tail(key: &[u8]) -> [u8; 20] {
    let mut tail = [0; 20];
    tail.copy_from_slice(&blake3::hash(key).as_bytes()[..20]);
    tail
}

/// The block of an authority: the first 64 bits of the BLAKE3 of its name.
pub fn authority_block(name: &str) -> [u8; 8] {
    let mut block = [0; 8];
    block.copy_from_slice(&blake3::hash(name.as_bytes()).as_bytes()[..8]);
    block
}

/// The number that a certificate carries for a group: 32 bits of the BLAKE3 of its name.
pub fn group_number(name: &str) -> u32 {
    let hash = blake3::hash(name.as_bytes());
    hash.as_bytes()[..4].iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte))
}

/// The leading bits of a name. Bits beyond are zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Prefix {
    /// The name, its bits beyond `bits` zero.
    pub id: ServiceId,
    /// How many bits count: 0 to 256.
    pub bits: u16,
}

impl Prefix {
    /// The first `bits` bits of `id`; more than 256 count as 256.
    pub fn new(id: ServiceId, bits: u16) -> Self {
        let bits = bits.min(256);
        let mut masked = id;
        for (at, byte) in masked.0.iter_mut().enumerate() {
            let kept = usize::from(bits).saturating_sub(at * 8).min(8);
            *byte &= u8::try_from(0xff00_u16 >> kept & 0xff).unwrap_or(0xff);
        }
        Self { id: masked, bits }
    }

    /// Everything of an authority.
    pub fn of_authority(authority: &str) -> Self {
        let mut id = ServiceId::default();
        id.0[..8].copy_from_slice(&authority_block(authority));
        Self { id, bits: AUTHORITY_BITS }
    }

    /// Whether `id` begins with these bits.
    pub fn contains(&self, id: &ServiceId) -> bool {
        Self::new(*id, self.bits).id == self.id
    }

    /// Partition `index` of 2^`bits` of a service: the first bits after those of the service (DESIGN §5). `bits` beyond
    /// [`PARTITION_BITS_MAX`] count as that; of `index` the lowest `bits` count.
    pub fn partition(&self, bits: u8, index: u16) -> Self {
        let bits = bits.min(PARTITION_BITS_MAX);
        let mut id = Self::new(self.id, SERVICE_BITS).id;
        let head = u32::from(index) << (16 - bits);
        id.0[12..14].copy_from_slice(&head.to_be_bytes()[2..]);
        Self { id, bits: SERVICE_BITS + u16::from(bits) }
    }

    /// Whether every name under `other` is under this one.
    pub fn covers(&self, other: &Self) -> bool {
        self.bits <= other.bits && self.contains(&other.id)
    }

    /// Whether some name is under both: one of the two covers the other.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.covers(other) || other.covers(self)
    }
}

impl From<ServiceId> for Prefix {
    fn from(id: ServiceId) -> Self {
        Self { id, bits: 256 }
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.id, self.bits)
    }
}

impl FromStr for Prefix {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        text.parse::<Name>().map(|name| name.prefix())
    }
}

/// What is wrong with a written name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// Nothing there.
    #[error("the name is empty; write service.authority, for example web.shop")]
    Empty,
    /// Not of the form service.authority.
    #[error("`{0}` has no authority; write service.authority, for example web.shop")]
    NoAuthority(String),
    /// A character that labels do not have.
    #[error("character {at} of `{name}` is {found:?}; labels have a-z, 0-9 and - inside")]
    Character {
        /// The name.
        name: String,
        /// Which character, from 1.
        at: usize,
        /// What stands there.
        found: char,
    },
    /// A label of the wrong length.
    #[error("a label of `{0}` is empty or longer than 63 characters")]
    Label(String),
    /// After the slash comes something else than `key:`.
    #[error("after the / of `{0}` comes key:…, for example web.shop/key:user42")]
    Tail(String),
    /// Longer than any resolver would carry.
    #[error("the name has {0} bytes; at most 200 can be looked up")]
    TooLong(usize),
    /// Something else than a hexadecimal digit.
    #[error("character {at} of `{name}` is {found:?}; after sid: come hexadecimal digits and an optional /bits")]
    Hex {
        /// The name.
        name: String,
        /// Which character, from 1.
        at: usize,
        /// What stands there.
        found: char,
    },
    /// Half a byte, or more than 256 bits.
    #[error("`{name}` has {digits} hexadecimal digits; write an even number of them, at most 64")]
    Digits {
        /// The name.
        name: String,
        /// How many there are.
        digits: usize,
    },
    /// A prefix length out of range.
    #[error("the prefix length of `{0}` is not a number from 0 to 256")]
    Bits(String),
}

/// A name as people write it: `web.shop`, `web.shop/key:user42`, or `sid:<hex>[/bits]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name {
    written: String,
    prefix: Prefix,
}

impl Name {
    /// The bits that it stands for: all 256, unless a prefix was written.
    pub fn prefix(&self) -> Prefix {
        self.prefix
    }

    /// The service that it is of, with all its keys and partitions.
    pub fn service_prefix(&self) -> Prefix {
        Prefix::new(self.prefix.id, SERVICE_BITS)
    }

    /// Whether it stands for a service, and not for a key of one or for many of them.
    pub fn is_service(&self) -> bool {
        self.prefix.bits >= SERVICE_BITS && self.prefix.id.tail().iter().all(|byte| *byte == 0)
    }

    /// The serviceID (the prefix's bits, then zeros).
    pub fn service_id(&self) -> ServiceId {
        self.prefix.id
    }

    /// As it was written; all but a key in lower case.
    pub fn written(&self) -> &str {
        &self.written
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.written)
    }
}

impl FromStr for Name {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        if text.is_empty() {
            return Err(NameError::Empty);
        }
        if text.len() > WRITTEN_MAX {
            return Err(NameError::TooLong(text.len()));
        }
        if let Some(rest) = text.strip_prefix("sid:") {
            return Ok(Self { prefix: parse_sid(text, rest)?, written: text.to_ascii_lowercase() });
        }
        let (host, tail) = text.split_once('/').map_or((text, None), |(host, tail)| (host, Some(tail)));
        // DNS knows no case, so names have none; keys are the service's own data.
        let mut written = host.to_ascii_lowercase();
        check_labels(&written)?;
        let (service, authority) = written.split_once('.').ok_or_else(|| NameError::NoAuthority(text.to_string()))?;
        let mut id = [0; 32];
        id[..8].copy_from_slice(&authority_block(authority));
        id[8..12].copy_from_slice(&blake3::hash(service.as_bytes()).as_bytes()[..4]);
        if let Some(tail) = tail {
            let key = tail.strip_prefix("key:").filter(|key| !key.is_empty());
            let key = key.ok_or_else(|| NameError::Tail(text.to_string()))?;
            id[12..].copy_from_slice(&key_tail(key.as_bytes()));
            written.push_str("/key:");
            written.push_str(key);
        }
        Ok(Self { prefix: Prefix::from(ServiceId(id)), written })
    }
}

fn check_labels(host: &str) -> Result<(), NameError> {
    for (at, found) in host.chars().enumerate() {
        if !matches!(found, 'a'..='z' | '0'..='9' | '-' | '.') {
            return Err(NameError::Character { name: host.to_string(), at: at + 1, found });
        }
    }
    let is_good =
        |label: &str| !label.is_empty() && label.len() <= LABEL_MAX && !label.starts_with('-') && !label.ends_with('-');
    if host.split('.').all(is_good) { Ok(()) } else { Err(NameError::Label(host.to_string())) }
}

fn parse_sid(text: &str, rest: &str) -> Result<Prefix, NameError> {
    let (hex, bits) = match rest.split_once('/') {
        None => (rest, 256),
        Some((hex, bits)) => {
            let bits = bits.parse().ok().filter(|bits| *bits <= 256);
            (hex, bits.ok_or_else(|| NameError::Bits(text.to_string()))?)
        }
    };
    let digit = |found: char| found.to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    if let Some((at, found)) = hex.chars().enumerate().find(|(_, found)| digit(*found).is_none()) {
        return Err(NameError::Hex { name: text.to_string(), at: "sid:".len() + at + 1, found });
    }
    if hex.len() > 64 || !hex.len().is_multiple_of(2) {
        return Err(NameError::Digits { name: text.to_string(), digits: hex.len() });
    }
    let mut id = [0; 32];
    for (at, value) in hex.chars().filter_map(digit).enumerate() {
        id[at / 2] = id[at / 2] << 4 | value;
    }
    Ok(Prefix::new(ServiceId(id), bits))
}

/// Whether a name's bits are all in its computed IPv6 address, so that it needs no lease there.
pub fn is_computable(service: &ServiceId) -> bool {
    service.tail().iter().all(|byte| *byte == 0) && service.authority() != [0; 8]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::key::SigningKey;
    use crate::types::rng::Rng;

    fn name(text: &str) -> Name {
        text.parse().expect("a literal name")
    }

    #[test]
    fn names_have_their_fields_where_the_design_says() {
        let web = name("web.shop").service_id();
        assert_eq!(web.authority(), authority_block("shop"));
        assert_eq!(web.0[8..12], blake3::hash(b"web").as_bytes()[..4]);
        assert_eq!(web.tail(), [0; 20]);
        let user = name("web.shop/key:user42").service_id();
        assert_eq!(user.0[..12], web.0[..12]);
        assert_ne!(user.tail(), [0; 20]);
        assert_eq!(name("WEB.Shop").written(), "web.shop");
        assert_eq!(name("WEB.Shop/key:User42").written(), "web.shop/key:User42");
        assert_ne!(name("web.shop/key:User42").service_id(), user);
    }

    #[test]
    fn partitions_are_the_first_bits_of_the_tail() {
        let service = name("cache.shop").service_prefix();
        for bits in 0..=PARTITION_BITS_MAX {
            for index in 0..1_u16 << bits {
                let partition = service.partition(bits, index);
                assert_eq!((partition.bits, partition.id.partition(bits)), (96 + u16::from(bits), index));
                assert!(service.covers(&partition));
            }
        }
        assert_eq!(service.partition(4, 0xa).id.0[11..14], [service.id.0[11], 0xa0, 0]);
        assert_eq!(service.partition(10, 0x3ff).id.0[12..15], [0xff, 0xc0, 0]);
        let key = name("cache.shop/key:user42").service_id();
        assert_eq!(key.tail(), key_tail(b"user42"));
        assert!(service.partition(7, key.partition(7)).contains(&key));
    }

    #[test]
    fn bad_names_say_where_they_are_bad() {
        assert_eq!("".parse::<Name>(), Err(NameError::Empty));
        assert_eq!("web".parse::<Name>(), Err(NameError::NoAuthority("web".into())));
        let bad = NameError::Character { name: "we b.shop".into(), at: 3, found: ' ' };
        assert_eq!("we b.shop".parse::<Name>(), Err(bad));
        assert_eq!("web..shop".parse::<Name>(), Err(NameError::Label("web..shop".into())));
        assert_eq!("web.shop/x".parse::<Name>(), Err(NameError::Tail("web.shop/x".into())));
        let bad = NameError::Hex { name: "sid:00g0".into(), at: 7, found: 'g' };
        assert_eq!("sid:00g0".parse::<Name>(), Err(bad.clone()));
        let said = "character 7 of `sid:00g0` is 'g'; after sid: come hexadecimal digits and an optional /bits";
        assert_eq!(bad.to_string(), said);
        assert_eq!("sid:0é".parse::<Name>(), Err(NameError::Hex { name: "sid:0é".into(), at: 6, found: 'é' }));
        let odd = "sid:00000".parse::<Name>();
        assert_eq!(odd, Err(NameError::Digits { name: "sid:00000".into(), digits: 5 }));
        let long = alloc::format!("web.{}", "shop.".repeat(40));
        assert_eq!(long.parse::<Name>(), Err(NameError::TooLong(204)));
        assert_eq!("sid:00/257".parse::<Name>(), Err(NameError::Bits("sid:00/257".into())));
    }

    #[test]
    fn a_prefix_masks_and_is_read_as_it_is_written() {
        let prefix: Prefix = "sid:ffff/9".parse().expect("literal");
        assert_eq!(prefix.id.0[..2], [0xff, 0x80]);
        assert_eq!(alloc::format!("{prefix}").parse(), Ok(prefix));
        assert!(prefix.contains(&ServiceId([0xff; 32])));
        assert!(Prefix::default().covers(&prefix) && !prefix.covers(&Prefix::default()));
        assert!(Prefix::default().overlaps(&prefix) && prefix.overlaps(&Prefix::default()));
    }

    #[test]
    fn a_self_certifying_name_knows_its_key() {
        let key = SigningKey::generate(&mut Rng::new([1; 32])).public();
        let mut id = name("web.shop").service_id();
        let head = id.0[..12].try_into().expect("twelve");
        id.0[12..].copy_from_slice(&self_certifying_tail(&key, &head));
        assert!(id.is_certified_by(&key));
        assert!(!id.is_certified_by(&VerifyingKey([7; 32])));
        assert!(!is_computable(&id));
    }
}
