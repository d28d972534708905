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
    /// Keeps what an authority has signed, here and for the other routers, where it `replaces` what was there;
    /// `authority` is its name, for the audit log. False: it, or something that stays, was here.
    ///
    /// # Errors
    ///
    /// The others do not agree, or the disk refuses.
    pub fn keep_chains(
        &self,
        signed: &SignedChains,
        authority: &str,
        unix_s: u64,
        replaces: impl Fn(Option<&SignedChains>) -> bool,
    ) -> Result<bool, StoreError> {
        let (row, encoded) = (signed.authority, signed.encode());
        let pinned = self.pinned(SharedTable::Chains)?.remove(&row[..]);
        let is_pinned = pinned.as_ref() == Some(&encoded);
        let stays = |known: Option<&[u8]>| !replaces(known.and_then(|known| SignedChains::decode(known).ok()).as_ref());
        if !is_pinned && stays(pinned.as_deref()) {
            return Ok(false);
        }
        let is_kept = self.settle(|transaction, draft| {
            let table = transaction.open_table(CHAINS)?;
            let before = table.get(row)?.map(|known| known.value().to_vec());
            let is_shared = before.as_ref() == Some(&encoded);
            if is_shared && is_pinned || !is_shared && stays(before.as_deref()) {
                return Ok(false);
            }
            draft.put(SharedTable::Chains, &row, before, Some(encoded.clone()));
            if !is_pinned {
                let detail = signed.rules().map_or(String::new(), |rules| {
                    let chains = count_of(rules.chains.len(), "chain");
                    format!("{chains}, {}", count_of(rules.required.len(), "requirement"))
                });
                draft.note(AuditEntry::once(unix_s, "chains", authority.to_owned(), detail));
            }
            Ok(true)
        })?;
        if is_kept {
            self.pin(&[(SharedTable::Chains, row.to_vec(), Some(encoded))])?;
        }
        Ok(is_kept)
    }

    /// What authorities have signed, as this host has believed it last. It may count no longer.
    ///
    /// # Errors
    ///
    /// The disk refuses.
    pub fn chains(&self) -> Result<Vec<SignedChains>, StoreError> {
        let rows = self.pinned(SharedTable::Chains)?.into_values();
        Ok(rows.filter_map(|row| SignedChains::decode(&row).ok()).collect())
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
        let keep = |name, ms| {
            let signed = sign(name, ms);
            let is_later = |known: Option<&SignedChains>| known.is_none_or(|known| known.signed_ms < signed.signed_ms);
            store.keep_chains(&signed, name, 1, is_later).expect("written")
        };
        let changes = store.key_changes();
        assert!(keep("shop", 5));
        assert!(changes.has_changed().expect("the store lives"));
        assert!(!keep("shop", 5), "known");
        assert!(!keep("shop", 4), "older");
        assert!(keep("shop", 6));
        assert!(keep("infra", 1));
        let mut kept: Vec<u64> = store.chains().expect("readable").iter().map(|signed| signed.signed_ms).collect();
        kept.sort_unstable();
        assert_eq!(kept, [1, 6]);
        assert_eq!(store.audit(10).expect("readable")[0].act, "chains");
        let (shop, infra) = (sign("shop", 6), sign("infra", 1));
        let row = |signed: &SignedChains, value| (SharedTable::Chains, signed.authority.to_vec(), value);
        store.take_up(&[row(&shop, None), row(&infra, Some(b"nothing".to_vec()))]).expect("written");
        assert_eq!(store.chains().expect("readable").len(), 2, "what was believed stays");
        assert!(keep("shop", 6) && !keep("shop", 5), "the row is given back, and no older one");
        assert_eq!(store.shared_rows(SharedTable::Chains).expect("readable")[&shop.authority[..]], shop.encode());
        assert_eq!(store.audit(10).expect("readable").len(), 3, "nothing new was said");
    }
}
