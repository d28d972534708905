//! Who was given what, who asked and was refused, and when: the newest entries. What the store itself changes is noted
//! in the transaction of the act.

use std::collections::{BTreeMap, VecDeque};

use prost::Message;
use redb::{ReadableTable, ReadableTableMetadata, TableDefinition, WriteTransaction};

use super::record::AuditRecord;
use super::{Failure, Store, StoreError};

/// What was done, and what was refused. Refusals, of which strangers can cause any number, push out nothing but
/// refusals.
const DONE: TableDefinition<u64, &[u8]> = TableDefinition::new("audit");
const REFUSED: TableDefinition<u64, &[u8]> = TableDefinition::new("audit_refused");
/// What members do by themselves, any number of times: it pushes out nothing that an operator has done, and first what
/// those members have done of whom there is the most.
const BY_MEMBERS: TableDefinition<u64, &[u8]> = TableDefinition::new("audit_members");
/// Entries kept of each; the oldest go.
const ENTRIES_MAX: u64 = 10_000;

/// One entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditEntry {
    /// When, in seconds since 1970; the first time, where it stands for several.
    pub unix_s: u64,
    /// What was done: `token-create`, `token-revoke`, `join`, `member-grant`, `member-remove`, `key-revoke`,
    /// `key-succeed`, `chains`, `chain-order`, `chain-order-over`, `chain-order-failed`, `register`, `rebalance`,
    /// `stack-set`, `stack-release`, `fact-set`, `fact-clear`; or what was not: `stream-refused`, `host-refused`,
    /// `register-refused`, `message-refused`, `stack-refused`.
    pub act: String,
    /// To whom: a token's or a host's identifier, or an address.
    pub subject: String,
    /// What it was about, and why it was refused.
    pub detail: String,
    /// How often.
    pub count: u64,
}

impl AuditEntry {
    /// Of one act.
    pub fn once(unix_s: u64, act: &str, subject: String, detail: String) -> Self {
        Self { unix_s, act: act.to_owned(), subject, detail, count: 1 }
    }

    /// Whether it says what did not happen.
    pub fn is_refusal(&self) -> bool {
        self.act.ends_with("-refused")
    }

    fn is_by_member(&self) -> bool {
        matches!(self.act.as_str(), "register" | "announce")
    }
}

pub(super) fn create(transaction: &WriteTransaction) -> Result<(), Failure> {
    transaction.open_table(DONE)?;
    transaction.open_table(REFUSED)?;
    transaction.open_table(BY_MEMBERS)?;
    Ok(())
}

pub(super) fn note(transaction: &WriteTransaction, entry: AuditEntry) -> Result<(), Failure> {
    let is_by_member = entry.is_by_member();
    let mut table = transaction.open_table(match entry.is_refusal() {
        true => REFUSED,
        false if is_by_member => BY_MEMBERS,
        false => DONE,
    })?;
    let next = table.last()?.map_or(0, |(number, _)| number.value() + 1);
    let AuditEntry { unix_s, act, subject, detail, count } = entry;
    let record = AuditRecord { unix_s, act, subject, detail, count };
    table.insert(next, &record.encode_to_vec()[..])?;
    if !is_by_member && table.len()? > ENTRIES_MAX {
        table.pop_first()?;
    }
    Ok(())
}

/// Leaves room for what members do next: of more entries than are kept, the oldest go of whoever has the most.
fn share_out(transaction: &WriteTransaction) -> Result<(), Failure> {
    let mut table = transaction.open_table(BY_MEMBERS)?;
    let surplus = table.len()?.saturating_sub(ENTRIES_MAX);
    if surplus == 0 {
        return Ok(());
    }
    let mut by_member: BTreeMap<String, VecDeque<u64>> = BTreeMap::new();
    for entry in table.iter()? {
        let (number, record) = entry?;
        by_member.entry(AuditRecord::decode(record.value())?.subject).or_default().push_back(number.value());
    }
    for _ in 0..surplus {
        let most = by_member.values_mut().max_by_key(|entries| entries.len());
        let Some(oldest) = most.and_then(VecDeque::pop_front) else { break };
        table.remove(oldest)?;
    }
    Ok(())
}

impl Store {
    /// Writes entries, all or none.
    ///
    /// # Errors
    ///
    /// The disk refuses.
    pub fn note_all(&self, entries: &[AuditEntry]) -> Result<(), StoreError> {
        self.write(|transaction| {
            entries.iter().try_for_each(|entry| note(transaction, entry.clone()))?;
            if entries.iter().any(AuditEntry::is_by_member) { share_out(transaction) } else { Ok(()) }
        })
    }

    /// The newest `limit` entries, newest first.
    ///
    /// # Errors
    ///
    /// The disk refuses, or the store is damaged.
    pub fn audit(&self, limit: usize) -> Result<Vec<AuditEntry>, StoreError> {
        self.read(|transaction| {
            let mut entries = Vec::new();
            for table in [DONE, REFUSED, BY_MEMBERS] {
                for entry in transaction.open_table(table)?.iter()?.rev().take(limit) {
                    let AuditRecord { unix_s, act, subject, detail, count } = AuditRecord::decode(entry?.1.value())?;
                    // Older programs counted nothing.
                    entries.push(AuditEntry { unix_s, act, subject, detail, count: count.max(1) });
                }
            }
            // Of one second, in the order in which they were written.
            entries.sort_by_key(|entry| std::cmp::Reverse(entry.unix_s));
            entries.truncate(limit);
            Ok(entries)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::store;

    #[test]
    fn refusals_push_out_refusals_alone() {
        let (_base, store) = store();
        let entry = |number: u64, act: &str| AuditEntry::once(number, act, "h".to_owned(), "d".to_owned());
        store.note_all(&[entry(1, "join")]).expect("written");
        let flood: Vec<AuditEntry> = (0..=ENTRIES_MAX).map(|number| entry(2 + number, "host-refused")).collect();
        store.note_all(&flood).expect("written");
        let all = store.audit(usize::MAX).expect("readable");
        assert_eq!(all.len() as u64, ENTRIES_MAX + 1);
        assert_eq!((all[0].unix_s, all[0].act.as_str()), (2 + ENTRIES_MAX, "host-refused"));
        assert_eq!(all.last().map(|last| last.act.as_str()), Some("join"));
        assert_eq!(store.audit(1).expect("readable"), all[..1]);
    }

    #[test]
    fn what_a_member_does_pushes_out_neither_operators_acts_nor_those_of_others() {
        let (_base, store) = store();
        let entry = |number: u64, act: &str, by: &str| AuditEntry::once(number, act, by.to_owned(), "d".to_owned());
        store.note_all(&[entry(1, "key-revoke", "k"), entry(2, "register", "honest")]).expect("written");
        for round in 0..3 {
            let flood =
                (0..ENTRIES_MAX / 2).map(|number| entry(3 + round * ENTRIES_MAX + number, "register", "toggling"));
            store.note_all(&flood.collect::<Vec<_>>()).expect("written");
        }
        let all = store.audit(usize::MAX).expect("readable");
        assert_eq!(all.len() as u64, ENTRIES_MAX + 1);
        assert!(
            ["key-revoke", "register"]
                .iter()
                .zip([1, 2])
                .all(|(act, at)| { all.iter().any(|entry| entry.unix_s == at && entry.act == *act) })
        );
    }
}
