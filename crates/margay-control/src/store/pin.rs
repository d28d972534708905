//! Pinned rows: what authorities have signed of keys and of chains, once this host has believed it. The rows that
//! routers share are whatever whoever may write into the cluster's store has put there: one that is missing, damaged or
//! older takes nothing back. What is pinned stays until something signed takes its place (`crate::pins`).

use std::collections::BTreeMap;

use redb::{ReadableTable, TableDefinition, WriteTransaction};

use super::agreement::Row;
use super::replica::{Rows, SharedTable};
use super::{Failure, Store, StoreError};

/// A shared table's label, a zero, and its row: as it was when it was believed last.
const PINNED: TableDefinition<&[u8], &[u8]> = TableDefinition::new("pinned");

pub(super) fn create(transaction: &WriteTransaction) -> Result<(), Failure> {
    transaction.open_table(PINNED)?;
    Ok(())
}

fn key_of(table: SharedTable, row: &[u8]) -> Vec<u8> {
    [table.label().as_bytes(), &[0], row].concat()
}

/// The pinned rows of a table.
fn rows_of(pinned: &impl ReadableTable<&'static [u8], &'static [u8]>, table: SharedTable) -> Result<Rows, Failure> {
    let first = key_of(table, &[]);
    let mut rows = BTreeMap::new();
    for entry in pinned.range(&first[..]..)? {
        let (key, value) = entry?;
        let Some(row) = key.value().strip_prefix(&first[..]) else { break };
        rows.insert(row.to_vec(), value.value().to_vec());
    }
    Ok(rows)
}

impl Store {
    /// Pins rows, and lets go of those that hold nothing. The caller has seen that they are signed.
    ///
    /// # Errors
    ///
    /// The disk refuses.
    pub fn pin(&self, rows: &[Row]) -> Result<(), StoreError> {
        let changed = self.decide(|transaction| {
            let mut pinned = transaction.open_table(PINNED)?;
            let mut changed = Vec::new();
            for (table, row, value) in rows {
                let key = key_of(*table, row);
                let known = pinned.get(&key[..])?.map(|known| known.value().to_vec());
                if known == *value {
                    continue;
                }
                match value {
                    Some(value) => drop(pinned.insert(&key[..], &value[..])?),
                    None => drop(pinned.remove(&key[..])?),
                }
                changed.push(*table);
            }
            Ok((!changed.is_empty(), changed))
        })?;
        self.tell(changed.into_iter());
        Ok(())
    }

    /// The pinned rows of a table.
    ///
    /// # Errors
    ///
    /// The disk refuses.
    pub fn pinned(&self, table: SharedTable) -> Result<Rows, StoreError> {
        self.read(|transaction| rows_of(&transaction.open_table(PINNED)?, table))
    }

    /// What a table says: the pinned rows, and those that routers share in whose place nothing is pinned.
    pub(super) fn signed_rows(&self, table: SharedTable) -> Result<Rows, StoreError> {
        self.read(|transaction| {
            let mut rows = table.rows(transaction)?;
            rows.extend(rows_of(&transaction.open_table(PINNED)?, table)?);
            Ok(rows)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::store;

    #[test]
    fn each_table_has_its_own_pinned_rows_and_they_are_told_when_they_change() {
        let (_base, store) = store();
        let row = |table, key: u8, value: Option<u8>| (table, vec![key; 40], value.map(|value| vec![value]));
        let rows = [row(SharedTable::RevokedKeys, 1, Some(2)), row(SharedTable::Successions, 1, Some(3))];
        let mut changes = store.key_changes();
        store.pin(&rows).expect("written");
        assert!(changes.has_changed().expect("the store lives"));
        changes.mark_unchanged();
        store.pin(&rows).expect("readable");
        assert!(!changes.has_changed().expect("the store lives"));
        store.pin(&[row(SharedTable::Successions, 1, None)]).expect("written");
        let of = |table| store.pinned(table).expect("readable").into_iter().collect::<Vec<_>>();
        assert_eq!(of(SharedTable::RevokedKeys), [(vec![1; 40], vec![2])]);
        assert_eq!(of(SharedTable::Successions), []);
    }
}
