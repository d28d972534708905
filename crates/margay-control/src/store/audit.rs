//! Who was given what, and when: the newest entries, written in the transaction of the act itself.

use prost::Message;
use redb::{ReadableTable, ReadableTableMetadata, TableDefinition, WriteTransaction};

use super::record::AuditRecord;
use super::{Failure, Store, StoreError};

const AUDIT: TableDefinition<u64, &[u8]> = TableDefinition::new("audit");
/// Entries kept; the oldest go.
const ENTRIES_MAX: u64 = 10_000;

/// One entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditEntry {
    /// When, in seconds since 1970.
    pub unix_s: u64,
    /// What was done: `token-create`, `token-revoke`, `join`, `member-remove`.
    pub act: String,
    /// To whom: a token's or a host's identifier.
    pub subject: String,
    /// What it was about.
    pub detail: String,
}

pub(super) fn create(transaction: &WriteTransaction) -> Result<(), Failure> {
    transaction.open_table(AUDIT)?;
    Ok(())
}

pub(super) fn note(transaction: &WriteTransaction, entry: AuditEntry) -> Result<(), Failure> {
    let mut table = transaction.open_table(AUDIT)?;
    let next = table.last()?.map_or(0, |(number, _)| number.value() + 1);
    let AuditEntry { unix_s, act, subject, detail } = entry;
    let record = AuditRecord { unix_s, act, subject, detail };
    table.insert(next, &record.encode_to_vec()[..])?;
    if table.len()? > ENTRIES_MAX {
        table.pop_first()?;
    }
    Ok(())
}

impl Store {
    /// The newest `limit` entries, newest first.
    ///
    /// # Errors
    ///
    /// The disk refuses, or the store is damaged.
    pub fn audit(&self, limit: usize) -> Result<Vec<AuditEntry>, StoreError> {
        self.read(|transaction| {
            let table = transaction.open_table(AUDIT)?;
            let newest = table.iter()?.rev().take(limit);
            newest
                .map(|entry| {
                    let AuditRecord { unix_s, act, subject, detail } = AuditRecord::decode(entry?.1.value())?;
                    Ok(AuditEntry { unix_s, act, subject, detail })
                })
                .collect()
        })
    }
}
