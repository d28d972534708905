//! The client call: from a key to the partition that it is in.

use margay_core::name::{Name, PARTITION_BITS_MAX, Prefix, SERVICE_BITS, ServiceId, key_tail};

/// Why a service cannot be used in partitions.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PartitionError {
    /// The number of partitions is none.
    #[error("{0} is no number of partitions; it is a power of two from 2 to 1024, the one that the servers say")]
    Count(u32),
    /// A key, or a block of services.
    #[error("{0} is no service that has partitions; write service.authority, for example cache.shop")]
    Service(String),
}

/// A service that is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partitions {
    service: Prefix,
    bits: u8,
}

impl Partitions {
    /// A service of `count` partitions.
    ///
    /// # Errors
    ///
    /// The name or the number cannot be.
    pub fn new(service: &Name, count: u32) -> Result<Self, PartitionError> {
        if !service.is_service() {
            return Err(PartitionError::Service(service.to_string()));
        }
        Self::of(service.service_prefix(), count)
    }

    /// The same by bits: the first 96 of `service` count.
    ///
    /// # Errors
    ///
    /// The number cannot be.
    pub fn of(service: Prefix, count: u32) -> Result<Self, PartitionError> {
        let bits = u8::try_from(count.trailing_zeros()).unwrap_or(u8::MAX);
        if !count.is_power_of_two() || !(1..=PARTITION_BITS_MAX).contains(&bits) {
            return Err(PartitionError::Count(count));
        }
        Ok(Self { service: Prefix::new(service.id, SERVICE_BITS), bits })
    }

    /// How many there are.
    pub fn count(&self) -> u16 {
        1 << self.bits
    }

    /// The name of a key: the service, and as tail the first 20 bytes of the key's BLAKE3.
    pub fn id_of(&self, key: &[u8]) -> ServiceId {
        let mut id = self.service.id;
        id.0[12..].copy_from_slice(&key_tail(key));
        id
    }

    /// The number of the partition that a key is in.
    pub fn index_of(&self, key: &[u8]) -> u16 {
        self.id_of(key).partition(self.bits)
    }

    /// The partition of this number, whose first name stands for it.
    pub fn prefix(&self, index: u16) -> Prefix {
        self.service.partition(self.bits, index)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_key_is_where_its_name_is() {
        let name = |text: &str| text.parse::<Name>().expect("literal");
        let partitions = Partitions::new(&name("cache.shop"), 16).expect("16 partitions");
        assert_eq!(partitions.id_of(b"user42"), name("cache.shop/key:user42").service_id());
        // For whoever writes another client.
        assert_eq!(
            (partitions.id_of(b"user42").0[12..16].to_vec(), partitions.index_of(b"user42")),
            (vec![0x72, 0xbf, 0x4b, 0x16], 7)
        );
        for key in [&b"user42"[..], b"", b"\xff\x00", b"another"] {
            let index = partitions.index_of(key);
            assert!(partitions.prefix(index).contains(&partitions.id_of(key)));
            assert_eq!(u16::from(partitions.id_of(key).0[12] >> 4), index);
        }
        for count in [0, 1, 12, 2048, u32::MAX] {
            assert_eq!(Partitions::new(&name("cache.shop"), count), Err(PartitionError::Count(count)));
        }
        for text in ["cache.shop/key:a", "sid:00/8"] {
            assert!(matches!(Partitions::new(&name(text), 16), Err(PartitionError::Service(_))), "{text}");
        }
    }
}
