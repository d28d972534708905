//! On a host: the routers that welcomed it, so that a token is sent once and the host finds home after a restart.

use margay_core::key::{HostPublic, VerifyingKey};
use margay_core::name::authority_block;
use prost::Message;
use redb::{ReadableTable, ReadableTableMetadata, TableDefinition, WriteTransaction};

use super::record::{JoinedRecord, bytes};
use super::{Failure, Store, StoreError};
use crate::token::TokenHash;

/// Router's key, then the authority's block.
const JOINED: TableDefinition<[u8; 40], &[u8]> = TableDefinition::new("joined");
const JOINED_MAX: u64 = 256;

/// A router that welcomed this host, for one authority.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Joined {
    /// The router's key.
    pub router_key: HostPublic,
    /// Where it is: `host:port`.
    pub router_address: String,
    /// The authority.
    pub authority: String,
    /// The authority's key.
    pub authority_key: VerifyingKey,
    /// When, in seconds since 1970.
    pub joined_s: u64,
    /// The token that was used.
    pub token: TokenHash,
}

pub(super) fn create(transaction: &WriteTransaction) -> Result<(), Failure> {
    transaction.open_table(JOINED)?;
    Ok(())
}

fn key(router: &HostPublic, authority: [u8; 8]) -> [u8; 40] {
    let mut key = [0; 40];
    key[..32].copy_from_slice(&router.0);
    key[32..].copy_from_slice(&authority);
    key
}

impl Store {
    /// Keeps a welcome.
    ///
    /// # Errors
    ///
    /// The disk refuses, or the table is at its bound.
    pub fn note_joined(&self, joined: &Joined) -> Result<(), StoreError> {
        let record = JoinedRecord {
            router_address: joined.router_address.clone(),
            authority: joined.authority.clone(),
            authority_key: joined.authority_key.0.to_vec(),
            joined_s: joined.joined_s,
            token: joined.token.0.to_vec(),
        };
        self.write(|transaction| {
            let mut table = transaction.open_table(JOINED)?;
            table.insert(key(&joined.router_key, authority_block(&joined.authority)), &record.encode_to_vec()[..])?;
            if table.len()? > JOINED_MAX {
                return Err(Failure::Full { what: "joined routers", limit: JOINED_MAX });
            }
            Ok(())
        })
    }

    /// Forgets a router.
    ///
    /// # Errors
    ///
    /// The disk refuses.
    pub fn forget_joined(&self, router: &HostPublic, authority: [u8; 8]) -> Result<bool, StoreError> {
        self.decide(|transaction| {
            let mut table = transaction.open_table(JOINED)?;
            let was_there = table.remove(key(router, authority))?.is_some();
            Ok((was_there, was_there))
        })
    }

    /// Every router that welcomed this host.
    ///
    /// # Errors
    ///
    /// The disk refuses, or the store is damaged.
    pub fn joined(&self) -> Result<Vec<Joined>, StoreError> {
        self.read(|transaction| {
            let table = transaction.open_table(JOINED)?;
            let mut all = Vec::new();
            for entry in table.iter()? {
                let (key, value) = entry?;
                let record = JoinedRecord::decode(value.value())?;
                all.push(Joined {
                    router_key: HostPublic(bytes("a router's key", &key.value()[..32])?),
                    router_address: record.router_address,
                    authority: record.authority,
                    authority_key: VerifyingKey(bytes("an authority's key", &record.authority_key)?),
                    joined_s: record.joined_s,
                    token: TokenHash(bytes("a token's hash", &record.token)?),
                });
            }
            Ok(all)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::store;

    #[test]
    fn a_host_remembers_who_welcomed_it() {
        let (_base, store) = store();
        let joined = Joined {
            router_key: HostPublic([1; 32]),
            router_address: "10.0.0.1:54324".to_owned(),
            authority: "shop".to_owned(),
            authority_key: VerifyingKey([2; 32]),
            joined_s: 5,
            token: TokenHash([3; 32]),
        };
        store.note_joined(&joined).expect("written");
        store.note_joined(&joined).expect("written");
        assert_eq!(store.joined().expect("readable"), [joined]);
        assert!(store.forget_joined(&HostPublic([1; 32]), authority_block("shop")).expect("written"));
        assert!(store.joined().expect("readable").is_empty());
    }
}
