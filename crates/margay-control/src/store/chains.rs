//! What authorities have signed of chains, on routers and on hosts alike: a host goes by it also when no router is
//! there.

use redb::{ReadableTable, TableDefinition, WriteTransaction};

use super::audit::AuditEntry;
use super::replica::SharedTable;
use super::{Failure, Store, StoreError};
use crate::chains::SignedChains;
use crate::quantity::count_of;

/// The authority's block: what it has signed last.
pub(super) const CHAINS: TableDefinition<[u8; 8], &[u8]> = TableDefinition::new("chains");

pub(super) fn create(transaction: &WriteTransaction) -> Result<(), Failure> {
    transaction.open_table(CHAINS)?;
    Ok(())
}

impl Store {
    /// Keeps what an authority has signed; `authority` is its name, for the audit log. The caller has seen that it is
    /// signed. False: it, or something later, was here.
    ///
    /// # Errors
    ///
    /// The others do not agree, or the disk refuses.
    pub fn keep_chains(&self, signed: &SignedChains, authority: &str, unix_s: u64) -> Result<bool, StoreError> {
        self.replace_chains(signed, authority, unix_s, |_| false)
    }

    /// The same where what was here `is_void`, also if that is later.
    ///
    /// # Errors
    ///
    /// The others do not agree, or the disk refuses.
    pub fn replace_chains(
        &self,
        signed: &SignedChains,
        authority: &str,
        unix_s: u64,
        is_void: impl Fn(&SignedChains) -> bool,
    ) -> Result<bool, StoreError> {
        let row = signed.authority;
        self.settle(|transaction, draft| {
            let table = transaction.open_table(CHAINS)?;
            let before = table.get(row)?.map(|known| known.value().to_vec());
            let known = before.as_deref().and_then(|known| SignedChains::decode(known).ok());
            if known.is_some_and(|known| known.signed_ms >= signed.signed_ms && !is_void(&known)) {
                return Ok(false);
            }
            draft.put(SharedTable::Chains, &row, before, Some(signed.encode()));
            let detail = signed.rules().map_or(String::new(), |rules| {
                format!("{}, {}", count_of(rules.chains.len(), "chain"), count_of(rules.required.len(), "requirement"))
            });
            draft.note(AuditEntry::once(unix_s, "chains", authority.to_owned(), detail));
            Ok(true)
        })
    }

    /// Blocks of authorities in whose place there is something that nobody has signed, as whoever may write into the
    /// cluster's store could put it there.
    ///
    /// # Errors
    ///
    /// The disk refuses.
    pub fn damaged_chains(&self) -> Result<Vec<[u8; 8]>, StoreError> {
        let rows = self.shared_rows(SharedTable::Chains)?.into_iter();
        let is_good =
            |block: &[u8], row: &[u8]| SignedChains::decode(row).is_ok_and(|signed| signed.authority == block);
        let damaged = rows.filter(|(block, row)| !is_good(block, row));
        Ok(damaged.filter_map(|(block, _)| block.try_into().ok()).collect())
    }

    /// What authorities have signed. Whoever may write into the cluster's store may write anything: whether it is
    /// signed is for the caller to see.
    ///
    /// # Errors
    ///
    /// The disk refuses.
    pub fn chains(&self) -> Result<Vec<SignedChains>, StoreError> {
        self.read(|transaction| {
            let mut all = Vec::new();
            for entry in transaction.open_table(CHAINS)?.iter()? {
                let (block, signed) = entry?;
                match SignedChains::decode(signed.value()) {
                    Ok(signed) if signed.authority == block.value() => all.push(signed),
                    _ => tracing::warn!("the store has chains that nobody has signed"),
                }
            }
            Ok(all)
        })
    }
}

#[cfg(test)]
mod tests {
    use margay_core::key::SigningKey;
    use margay_core::rng::Rng;

    use super::*;
    use crate::chains::ChainRules;
    use crate::keyring::Authority;
    use crate::store::tests::store;

    #[test]
    fn the_last_word_of_each_authority_is_kept() {
        let (_base, store) = store();
        let key = SigningKey::generate(&mut Rng::new([1; 32]));
        let authority = |name: &str| Authority {
            name: name.to_owned(),
            key: key.clone(),
            warrant: None,
            revoked: None,
            next: None,
        };
        let sign = |name, ms| SignedChains::sign(&authority(name), &ChainRules::default(), None, ms).expect("no rules");
        let changes = store.key_changes();
        assert!(store.keep_chains(&sign("shop", 5), "shop", 1).expect("written"));
        assert!(changes.has_changed().expect("the store lives"));
        assert!(!store.keep_chains(&sign("shop", 5), "shop", 1).expect("readable"), "known");
        assert!(!store.keep_chains(&sign("shop", 4), "shop", 1).expect("readable"), "older");
        assert!(store.keep_chains(&sign("shop", 6), "shop", 1).expect("written"));
        assert!(store.keep_chains(&sign("infra", 1), "infra", 1).expect("written"));
        let mut kept: Vec<u64> = store.chains().expect("readable").iter().map(|signed| signed.signed_ms).collect();
        kept.sort_unstable();
        assert_eq!(kept, [1, 6]);
        assert_eq!(store.audit(10).expect("readable")[0].act, "chains");
        store.take_up(&[(SharedTable::Chains, vec![7; 8], Some(b"nothing".to_vec()))]).expect("written");
        assert_eq!(store.chains().expect("readable").len(), 2);
    }
}
