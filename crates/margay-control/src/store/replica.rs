//! The tables that the routers of a cluster share, as rows of bytes; and how far this router has followed them. What is
//! here is read by everybody, at once and also while the cluster's store is away.

use std::collections::BTreeMap;

use redb::{ReadTransaction, ReadableTable, WriteTransaction};

use super::agreement::Row;
use super::chains::CHAINS;
use super::member::{MEMBERS, REVOKED, TOKENS};
use super::name::{self, NAMES};
use super::order::{ORDER_REPORTS, ORDERS};
use super::record::{PrefixKey, bytes};
use super::revoked_key::REVOKED_KEYS;
use super::succession::SUCCESSIONS;
use super::{Failure, META, Store, StoreError};

const CLUSTER: &str = "cluster";
const REVISION: &str = "cluster_revision";

/// A table that routers share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SharedTable {
    /// Join tokens.
    Tokens,
    /// Hosts that joined.
    Members,
    /// Hosts that were put out.
    Revoked,
    /// Which written name bits stand for.
    Names,
    /// Keys that may sign no longer.
    RevokedKeys,
    /// Keys that follow each other.
    Successions,
    /// Which sessions go through which boxes.
    Chains,
    /// Orders to all hosts of an authority that are under way.
    Orders,
    /// What hosts have said of them to another router than the one that has issued them.
    OrderReports,
}

/// What a table holds, by key.
pub type Rows = BTreeMap<Vec<u8>, Vec<u8>>;

/// How far a router has followed which cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    /// The cluster; zero: none yet.
    pub cluster: u64,
    /// All changes up to this one are here.
    pub revision: i64,
}

impl SharedTable {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Tokens,
        Self::Members,
        Self::Revoked,
        Self::Names,
        Self::RevokedKeys,
        Self::Successions,
        Self::Chains,
        Self::Orders,
        Self::OrderReports,
    ];

    /// As keys name it.
    pub fn label(self) -> &'static str {
        match self {
            Self::Tokens => "tokens",
            Self::Members => "members",
            Self::Revoked => "revoked",
            Self::Names => "names",
            Self::RevokedKeys => "revoked-keys",
            Self::Successions => "successions",
            Self::Chains => "chains",
            Self::Orders => "orders",
            Self::OrderReports => "order-reports",
        }
    }

    pub(super) fn put(self, transaction: &WriteTransaction, key: &[u8], value: Option<&[u8]>) -> Result<(), Failure> {
        macro_rules! put {
            ($table:expr, $key:expr, $value:expr) => {{
                let (key, mut table) = ($key, transaction.open_table($table)?);
                match value {
                    Some(value) => drop(table.insert(key, $value(value)?)?),
                    None => drop(table.remove(key)?),
                }
            }};
        }
        match self {
            Self::Tokens => put!(TOKENS, bytes::<32>("a token's hash", key)?, same),
            Self::Members => put!(MEMBERS, bytes::<40>("a member's key", key)?, same),
            Self::Revoked => put!(REVOKED, bytes::<40>("a member's key", key)?, end_of),
            Self::Names => {
                let key: PrefixKey = bytes("a prefix", key)?;
                name::put(transaction, key, value.map(text_of).transpose()?)?;
            }
            Self::RevokedKeys => put!(REVOKED_KEYS, bytes::<40>("a key and its authority", key)?, same),
            Self::Successions => put!(SUCCESSIONS, bytes::<40>("a key and its authority", key)?, same),
            Self::Chains => put!(CHAINS, bytes::<8>("an authority's block", key)?, same),
            Self::Orders => put!(ORDERS, bytes::<24>("an order's key", key)?, same),
            Self::OrderReports => put!(ORDER_REPORTS, bytes::<40>("an order's key and a host-ID", key)?, same),
        }
        Ok(())
    }

    pub(super) fn rows(self, transaction: &ReadTransaction) -> Result<Rows, Failure> {
        macro_rules! rows {
            ($table:expr, $value:expr) => {{
                let mut all = BTreeMap::new();
                for entry in transaction.open_table($table)?.iter()? {
                    let (key, value) = entry?;
                    all.insert(key.value().to_vec(), $value(value.value()));
                }
                all
            }};
        }
        Ok(match self {
            Self::Tokens => rows!(TOKENS, <[u8]>::to_vec),
            Self::Members => rows!(MEMBERS, <[u8]>::to_vec),
            Self::Revoked => rows!(REVOKED, |end: u64| end.to_be_bytes().to_vec()),
            Self::Names => rows!(NAMES, |text: &str| text.as_bytes().to_vec()),
            Self::RevokedKeys => rows!(REVOKED_KEYS, <[u8]>::to_vec),
            Self::Successions => rows!(SUCCESSIONS, <[u8]>::to_vec),
            Self::Chains => rows!(CHAINS, <[u8]>::to_vec),
            Self::Orders => rows!(ORDERS, <[u8]>::to_vec),
            Self::OrderReports => rows!(ORDER_REPORTS, <[u8]>::to_vec),
        })
    }
}

fn same(value: &[u8]) -> Result<&[u8], Failure> {
    Ok(value)
}

fn end_of(value: &[u8]) -> Result<u64, Failure> {
    Ok(u64::from_be_bytes(bytes("an end", value)?))
}

fn text_of(value: &[u8]) -> Result<&str, Failure> {
    std::str::from_utf8(value).map_err(|error| {
        let error = redb::Error::Corrupted(format!("a name is no text: {error}"));
        Failure::Redb(Box::new(error))
    })
}

impl Store {
    /// How far this router has followed which cluster.
    ///
    /// # Errors
    ///
    /// The disk refuses, or the store is damaged.
    pub fn replica_marks(&self) -> Result<Marks, StoreError> {
        self.read(|transaction| {
            let meta = transaction.open_table(META)?;
            let of = |key| Ok::<_, Failure>(meta.get(key)?.map_or(0, |value| value.value()));
            Ok(Marks { cluster: of(CLUSTER)?, revision: of(REVISION)?.cast_signed() })
        })
    }

    /// All rows of a table.
    ///
    /// # Errors
    ///
    /// The disk refuses, or the store is damaged.
    pub fn shared_rows(&self, table: SharedTable) -> Result<Rows, StoreError> {
        self.read(|transaction| table.rows(transaction))
    }

    /// Takes up what others have changed, and with it how far that is.
    ///
    /// # Errors
    ///
    /// The disk refuses, or a row is none.
    pub fn follow(&self, rows: &[Row], marks: Marks) -> Result<(), StoreError> {
        self.write(|transaction| {
            put_all(transaction, rows)?;
            let mut meta = transaction.open_table(META)?;
            meta.insert(CLUSTER, marks.cluster)?;
            meta.insert(REVISION, marks.revision.cast_unsigned())?;
            Ok(())
        })?;
        self.tell(rows.iter().map(|row| row.0));
        Ok(())
    }

    /// Takes up some rows.
    pub(super) fn take_up(&self, rows: &[Row]) -> Result<(), StoreError> {
        self.write(|transaction| put_all(transaction, rows))?;
        self.tell(rows.iter().map(|row| row.0));
        Ok(())
    }
}

fn put_all(transaction: &WriteTransaction, rows: &[Row]) -> Result<(), Failure> {
    rows.iter().try_for_each(|(table, key, value)| table.put(transaction, key, value.as_deref()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::store;

    #[test]
    fn rows_of_every_table_come_back_as_they_were_written() {
        let (_base, store) = store();
        assert_eq!(store.replica_marks().expect("readable"), Marks::default());
        let rows: Vec<Row> = vec![
            (SharedTable::Tokens, vec![1; 32], Some(vec![])),
            (SharedTable::Members, vec![2; 40], Some(vec![])),
            (SharedTable::Revoked, vec![3; 40], Some(9_u64.to_be_bytes().to_vec())),
            (SharedTable::Names, vec![0; 34], Some(b"web.shop".to_vec())),
            (SharedTable::RevokedKeys, vec![4; 40], Some(vec![5; 145])),
            (SharedTable::Successions, vec![6; 40], Some(vec![7; 217])),
            (SharedTable::Chains, vec![8; 8], Some(vec![9; 100])),
            (SharedTable::Orders, vec![10; 24], Some(vec![11; 100])),
            (SharedTable::OrderReports, vec![12; 40], Some(vec![13; 20])),
        ];
        let marks = Marks { cluster: u64::MAX, revision: 17 };
        let changes = store.key_changes();
        store.follow(&rows, marks).expect("written");
        assert!(changes.has_changed().expect("the store lives"), "another router has revoked a key");
        assert_eq!(store.replica_marks().expect("readable"), marks);
        for (table, key, value) in &rows {
            let all = store.shared_rows(*table).expect("readable");
            assert_eq!(all.into_iter().collect::<Vec<_>>(), [(key.clone(), value.clone().expect("some"))]);
        }
        let gone: Vec<Row> = rows.into_iter().map(|(table, key, _)| (table, key, None)).collect();
        store.follow(&gone, marks).expect("written");
        assert!(SharedTable::ALL.iter().all(|table| store.shared_rows(*table).expect("readable").is_empty()));
        let wrong: Row = (SharedTable::Members, vec![1], None);
        assert!(matches!(store.follow(&[wrong], marks), Err(StoreError::Damaged { .. })));
    }
}
