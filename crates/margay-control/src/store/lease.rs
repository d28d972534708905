//! Virtual addresses that stand for names, kept across restarts (DESIGN §5).

use std::net::{IpAddr, Ipv6Addr};

use margay_core::name::ServiceId;
use prost::Message;
use redb::{ReadableTable, TableDefinition, WriteTransaction};

use super::record::{LeaseRecord, bytes};
use super::{Failure, Store, StoreError};

/// By address; IPv4 as IPv4-mapped.
const LEASES: TableDefinition<[u8; 16], &[u8]> = TableDefinition::new("leases");

/// A lease as it lies on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredLease {
    /// The virtual address.
    pub address: IpAddr,
    /// All 256 bits.
    pub service: ServiceId,
    /// As written.
    pub name: String,
    /// When it was last asked for, in seconds since 1970; a minute old at most while the agent runs.
    pub used_s: u64,
}

pub(super) fn create(transaction: &WriteTransaction) -> Result<(), Failure> {
    transaction.open_table(LEASES)?;
    Ok(())
}

fn key(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

impl Store {
    /// Keeps leases, new ones and newer uses alike; `gone` are taken back in the same transaction.
    ///
    /// # Errors
    ///
    /// The disk refuses.
    pub fn write_leases(&self, leases: &[StoredLease], gone: &[IpAddr]) -> Result<(), StoreError> {
        self.write(|transaction| {
            let mut table = transaction.open_table(LEASES)?;
            for address in gone {
                table.remove(key(*address))?;
            }
            for lease in leases {
                let service = lease.service.0.to_vec();
                let record = LeaseRecord { service, name: lease.name.clone(), used_s: lease.used_s };
                table.insert(key(lease.address), &record.encode_to_vec()[..])?;
            }
            Ok(())
        })
    }

    /// Every lease.
    ///
    /// # Errors
    ///
    /// The disk refuses, or the store is damaged.
    pub fn leases(&self) -> Result<Vec<StoredLease>, StoreError> {
        self.read(|transaction| {
            let table = transaction.open_table(LEASES)?;
            let mut all = Vec::new();
            for entry in table.iter()? {
                let (key, value) = entry?;
                let record = LeaseRecord::decode(value.value())?;
                all.push(StoredLease {
                    address: Ipv6Addr::from(key.value()).to_canonical(),
                    service: ServiceId(bytes("a serviceID", &record.service)?),
                    name: record.name,
                    used_s: record.used_s,
                });
            }
            Ok(all)
        })
    }
}
