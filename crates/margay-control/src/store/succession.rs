//! Keys that follow each other in an authority, on routers and on hosts alike: a host that comes back after years
//! follows them from the one that it knows.

use margay_core::key::to_hex;
use margay_core::succession::Succession;
use redb::{ReadableTable, ReadableTableMetadata, TableDefinition, WriteTransaction};

use super::audit::AuditEntry;
use super::replica::SharedTable;
use super::{Failure, Store, StoreError};

/// The key that is followed, then the authority's block: the succession as it was signed.
pub(super) const SUCCESSIONS: TableDefinition<[u8; 40], &[u8]> = TableDefinition::new("successions");
/// All of them fit into one message to a host.
pub const SUCCESSIONS_MAX: u64 = 64;

pub(super) fn create(transaction: &WriteTransaction) -> Result<(), Failure> {
    transaction.open_table(SUCCESSIONS)?;
    Ok(())
}

/// Under which key a succession is kept.
pub(crate) fn row(succession: &Succession) -> [u8; 40] {
    let mut key = [0; 40];
    key[..32].copy_from_slice(&succession.old.0);
    key[32..].copy_from_slice(&succession.authority);
    key
}

/// What became of a succession.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// It was not known.
    New,
    /// It was.
    Known,
    /// Another key follows that one, as far as is known here: somebody else has the authority's key.
    Rival,
}

impl Store {
    /// Keeps a succession; `authority` is its authority's name, for the audit log.
    ///
    /// # Errors
    ///
    /// The others do not agree, the disk refuses, or there are too many.
    pub fn keep_succession(&self, succession: &Succession, authority: &str, unix_s: u64) -> Result<Kept, StoreError> {
        let row = row(succession);
        self.settle(|transaction, draft| {
            let table = transaction.open_table(SUCCESSIONS)?;
            let before = table.get(row)?.map(|known| known.value().to_vec());
            let known = before.as_deref().and_then(|known| Succession::decode(known).ok());
            if let Some(known) = known.filter(Succession::is_signed) {
                // The same key at other times is the same key.
                return Ok(if known.new == succession.new { Kept::Known } else { Kept::Rival });
            }
            if table.len()? >= SUCCESSIONS_MAX {
                return Err(Failure::Full { what: "keys of authorities that others follow", limit: SUCCESSIONS_MAX });
            }
            draft.put(SharedTable::Successions, &row, before, Some(succession.encode().to_vec()));
            let detail = format!("{authority}, after key {}", to_hex(&succession.old.0));
            draft.note(AuditEntry::once(unix_s, "key-succeed", to_hex(&succession.new.0), detail));
            Ok(Kept::New)
        })
    }

    /// All of them that both keys have signed. Whoever may write into the cluster's store may write anything else.
    ///
    /// # Errors
    ///
    /// The disk refuses.
    pub fn successions(&self) -> Result<Vec<Succession>, StoreError> {
        let mut all = Vec::new();
        for row in self.signed_rows(SharedTable::Successions)?.into_values() {
            match Succession::decode(&row) {
                Ok(known) if known.is_signed() => all.push(known),
                _ => tracing::warn!("the store has a succession of a key that nobody has signed"),
            }
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use margay_core::key::SigningKey;
    use margay_core::name::authority_block;
    use margay_core::rng::Rng;

    use super::*;
    use crate::store::tests::store;

    #[test]
    fn one_key_is_followed_by_one_other_and_no_third() {
        let (_base, store) = store();
        let key = |n: u64| {
            let mut seed = [0; 32];
            seed[..8].copy_from_slice(&n.to_be_bytes());
            SigningKey::generate(&mut Rng::new(seed))
        };
        let of = |old, new| Succession::new(authority_block("shop"), &key(old), &key(new), 10, 20);
        let keep = |one: &Succession| store.keep_succession(one, "shop", 5);
        let changes = store.key_changes();
        assert_eq!(keep(&of(1, 2)).expect("written"), Kept::New);
        assert!(changes.has_changed().expect("the store lives"));
        assert_eq!(keep(&of(1, 2)).expect("readable"), Kept::Known);
        assert_eq!(keep(&of(1, 3)).expect("readable"), Kept::Rival);
        assert_eq!(store.successions().expect("readable"), [of(1, 2)]);
        let log = store.audit(10).expect("readable");
        assert_eq!((log.len(), log[0].act.as_str()), (1, "key-succeed"));
        for n in 2..=SUCCESSIONS_MAX {
            assert_eq!(keep(&of(n, n + 1)).expect("written"), Kept::New);
        }
        assert!(matches!(keep(&of(100, 101)), Err(StoreError::Full { .. })));
        let forged = Succession { trusted_until_s: 99, ..of(1, 2) };
        let encoded = forged.encode().to_vec();
        let row = [&forged.old.0[..], &forged.authority].concat();
        store.take_up(&[(SharedTable::Successions, row, Some(encoded))]).expect("written");
        assert!(!store.successions().expect("readable").contains(&forged), "nobody has signed it");
    }
}
