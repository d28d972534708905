//! Keys that an authority lets sign no longer, on routers and on hosts alike: what was signed with them would hold for
//! months, so each host remembers by itself.

use std::collections::BTreeSet;

use margay_core::key::to_hex;
use margay_core::key_revocation::{KEY_REVOCATIONS_MAX, KeyRevocation};
use redb::{ReadableTable, TableDefinition, WriteTransaction};
use tokio::sync::watch;

use super::audit::AuditEntry;
use super::replica::SharedTable;
use super::{Failure, Store, StoreError};

/// The key, then the authority's block: the revocation as it was signed.
pub(super) const REVOKED_KEYS: TableDefinition<[u8; 40], &[u8]> = TableDefinition::new("revoked_keys");

pub(super) fn create(transaction: &WriteTransaction) -> Result<(), Failure> {
    transaction.open_table(REVOKED_KEYS)?;
    Ok(())
}

/// Under which key a revocation is kept.
pub(crate) fn row(revocation: &KeyRevocation) -> [u8; 40] {
    let mut key = [0; 40];
    key[..32].copy_from_slice(&revocation.key.0);
    key[32..].copy_from_slice(&revocation.authority);
    key
}

impl Store {
    /// Keeps a revocation; `authority` is its authority's name, for the audit log. False: it, or one that says more,
    /// was here.
    ///
    /// # Errors
    ///
    /// The others do not agree, or the disk refuses.
    pub fn revoke_key(&self, revocation: &KeyRevocation, authority: &str, unix_s: u64) -> Result<bool, StoreError> {
        let row = row(revocation);
        self.settle(|transaction, draft| {
            let table = transaction.open_table(REVOKED_KEYS)?;
            let before = table.get(row)?.map(|known| known.value().to_vec());
            let until_s = |encoded: &[u8]| KeyRevocation::decode(encoded).map_or(0, |known| known.until_s);
            // What somebody else has put in its place is not the authority's word.
            let known = before.as_deref().and_then(|known| KeyRevocation::decode(known).ok());
            let is_same = |known: &KeyRevocation| known.signer == revocation.signer && known.is_signed();
            if known.is_some_and(|known| known.until_s >= revocation.until_s && is_same(&known)) {
                return Ok(false);
            }
            let mut others = Vec::new();
            for entry in table.iter()? {
                let (key, known) = entry?;
                if key.value() != row && key.value()[32..] == revocation.authority {
                    others.push((until_s(known.value()), key.value(), known.value().to_vec()));
                }
            }
            others.sort_unstable();
            // Of more of one authority, those that end first are forgotten, here as in the core.
            let surplus = (others.len() + 1).saturating_sub(KEY_REVOCATIONS_MAX);
            for (rank, (end_s, key, known)) in others.into_iter().enumerate() {
                if rank < surplus && end_s >= unix_s {
                    tracing::warn!(limit = KEY_REVOCATIONS_MAX, "more revoked keys than are remembered");
                }
                if rank < surplus || end_s < unix_s {
                    draft.put(SharedTable::RevokedKeys, &key, Some(known), None);
                }
            }
            draft.put(SharedTable::RevokedKeys, &row, before, Some(revocation.encode().to_vec()));
            draft.note(AuditEntry::once(
                unix_s,
                "key-revoke",
                to_hex(&revocation.key.0),
                format!("to sign for {authority}"),
            ));
            Ok(true)
        })
    }

    /// Those that mean something still. Whoever may write into the cluster's store may write anything: what is not
    /// signed is left out, and the caller knows by whom it must be.
    ///
    /// # Errors
    ///
    /// The disk refuses.
    pub fn key_revocations(&self, unix_s: u64) -> Result<Vec<KeyRevocation>, StoreError> {
        let mut all = Vec::new();
        // Each may be a later word than the other.
        let shared = self.shared_rows(SharedTable::RevokedKeys)?.into_values();
        let rows: BTreeSet<Vec<u8>> = shared.chain(self.pinned(SharedTable::RevokedKeys)?.into_values()).collect();
        for row in rows {
            match KeyRevocation::decode(&row) {
                Ok(known) if known.until_s < unix_s => {}
                Ok(known) if known.is_signed() => all.push(known),
                _ => tracing::warn!("the store has a revocation of a key that nobody has signed"),
            }
        }
        Ok(all)
    }

    /// Told whenever there may be others, or successions, or other chains.
    pub fn key_changes(&self) -> watch::Receiver<u64> {
        self.keys.subscribe()
    }

    /// Rows of these tables have changed.
    pub(super) fn tell(&self, tables: impl Iterator<Item = SharedTable>) {
        let mut tells_keys = false;
        let mut tells_orders = false;
        for table in tables {
            tells_keys |= matches!(table, SharedTable::RevokedKeys | SharedTable::Successions | SharedTable::Chains);
            tells_orders |= matches!(table, SharedTable::Orders | SharedTable::OrderReports);
        }
        for (_, version) in [(tells_keys, &self.keys), (tells_orders, &self.orders)].iter().filter(|(tells, _)| *tells)
        {
            version.send_modify(|version| *version = version.wrapping_add(1));
        }
    }
}

#[cfg(test)]
mod tests {
    use margay_core::key::{SigningKey, VerifyingKey};
    use margay_core::name::authority_block;
    use margay_core::rng::Rng;

    use super::*;
    use crate::store::tests::store;

    #[test]
    fn revoked_keys_are_kept_until_they_mean_nothing_and_are_told_once() {
        let (_base, store) = store();
        let by = SigningKey::generate(&mut Rng::new([1; 32]));
        let of = |number: u64, until_s| {
            let mut key = [0; 32];
            key[..8].copy_from_slice(&number.to_be_bytes());
            KeyRevocation::new(authority_block("shop"), VerifyingKey(key), until_s, &by)
        };
        let changes = store.key_changes();
        assert!(store.revoke_key(&of(1, 500), "shop", 100).expect("written"));
        assert!(changes.has_changed().expect("the store lives"));
        assert!(!store.revoke_key(&of(1, 500), "shop", 100).expect("written"), "known");
        assert!(!store.revoke_key(&of(1, 400), "shop", 100).expect("written"), "less than is known");
        assert_eq!(store.key_revocations(500).expect("readable"), [of(1, 500)]);
        assert_eq!(store.key_revocations(501).expect("readable"), []);
        let log = store.audit(10).expect("readable");
        assert_eq!((log.len(), log[0].act.as_str()), (1, "key-revoke"));
        for number in 2..=1 + KEY_REVOCATIONS_MAX as u64 {
            assert!(store.revoke_key(&of(number, 600), "shop", 100).expect("written"));
        }
        let all = store.key_revocations(100).expect("readable");
        assert_eq!(
            (all.len(), all.contains(&of(1, 500))),
            (KEY_REVOCATIONS_MAX, false),
            "the first to end is forgotten"
        );
        let lab = KeyRevocation::new(authority_block("lab"), VerifyingKey([9; 32]), 200, &by);
        assert!(store.revoke_key(&lab, "lab", 100).expect("written"));
        assert!(store.revoke_key(&of(9999, u64::MAX), "shop", 100).expect("written"));
        assert!(
            store.key_revocations(100).expect("readable").contains(&lab),
            "one authority forgets nothing of others"
        );
        let forged = KeyRevocation { until_s: 700, ..of(2, 600) };
        store.revoke_key(&forged, "shop", 100).expect("written");
        assert!(!store.key_revocations(100).expect("readable").contains(&forged), "nobody has signed it");
    }
}
