//! What a host has believed of the signed statements of authorities it pins: keys that follow each other, keys that may
//! sign no longer, and chain policies. Whoever may write into the cluster's store, or puts back an older copy of it,
//! takes none of them back (docs/decisions/0131).

use std::collections::BTreeMap;

use margay_core::key_revocation::{KEY_REVOCATIONS_MAX, KeyRevocation};

use crate::chains::SignedChains;
use crate::keyring::Keyring;
use crate::lineage::LineageError;
use crate::store::{Row, SharedTable, Store, StoreError, revocation_row, succession_row};
use crate::warrant::{believed, lineages};

/// Pins what the store has that authorities have signed which this host knows. Gives the names and blocks of those of
/// whose chains nothing is known, and in whose place there is something that they have not signed.
///
/// # Errors
///
/// Their keys, or the store, cannot be read.
pub fn pin_statements(keyring: &Keyring, store: &Store, unix_s: u64) -> Result<Vec<(String, [u8; 8])>, LineageError> {
    let (lines, revoked) = (lineages(keyring, store)?, believed(keyring, store, unix_s)?);
    let successions = lines.values().flat_map(|(_, line)| line.successions());
    let successions =
        successions.map(|one| (SharedTable::Successions, succession_row(one).to_vec(), Some(one.encode().to_vec())));
    let mut rows: Vec<Row> = successions.chain(revocations(&revoked, store, unix_s)?).collect();
    let mut damaged = Vec::new();
    let pinned = store.chains()?;
    for (block, row) in store.shared_rows(SharedTable::Chains)? {
        let Ok(block) = <[u8; 8]>::try_from(block) else { continue };
        let Some((name, line)) = lines.get(&block) else { continue };
        let known = pinned.iter().find(|known| known.authority == block);
        let told = SignedChains::decode(&row).ok().filter(|told| told.authority == block);
        if told.is_some_and(|told| told.replaces(known, line, &revoked, unix_s)) {
            rows.push((SharedTable::Chains, block.to_vec(), Some(row)));
        } else if known.is_none() {
            tracing::warn!(authority = name, "the store has chains that the authority has not signed");
            damaged.push((name.clone(), block));
        }
    }
    store.pin(&rows)?;
    Ok(damaged)
}

/// Revocations that are pinned from now on. Those that mean nothing any more are not; nor, of more of one authority
/// than are remembered, those that end first, here as in the store.
fn revocations(believed: &[KeyRevocation], store: &Store, unix_s: u64) -> Result<Vec<Row>, StoreError> {
    let mut of_authorities: BTreeMap<[u8; 8], Vec<&KeyRevocation>> = BTreeMap::new();
    for one in believed {
        of_authorities.entry(one.authority).or_default().push(one);
    }
    let mut rows = Vec::new();
    for mut all in of_authorities.into_values() {
        all.sort_unstable_by_key(|one| (one.until_s, one.key.0));
        let surplus = all.len().saturating_sub(KEY_REVOCATIONS_MAX);
        for (rank, one) in all.into_iter().enumerate() {
            let value = (rank >= surplus).then(|| one.encode().to_vec());
            rows.push((SharedTable::RevokedKeys, revocation_row(one).to_vec(), value));
        }
    }
    let is_over = |row: &[u8]| KeyRevocation::decode(row).is_ok_and(|known| known.until_s < unix_s);
    let over = store.pinned(SharedTable::RevokedKeys)?.into_iter().filter(|(_, row)| is_over(row));
    rows.extend(over.map(|(key, _)| (SharedTable::RevokedKeys, key, None)));
    Ok(rows)
}

/// Gives what is pinned back to the other routers, where the cluster's store has lost it.
///
/// # Errors
///
/// Keys or the store cannot be read, or the others cannot be asked.
pub fn give_back(keyring: &Keyring, store: &Store, unix_s: u64) -> Result<(), LineageError> {
    let (lines, revoked) = (lineages(keyring, store)?, believed(keyring, store, unix_s)?);
    for (name, line) in lines.values() {
        for one in line.successions() {
            store.keep_succession(one, name, unix_s)?;
        }
    }
    let pinned = store.pinned(SharedTable::RevokedKeys)?;
    for one in revoked.iter().filter(|one| pinned.contains_key(&revocation_row(one)[..])) {
        if let Some((name, _)) = lines.get(&one.authority) {
            store.revoke_key(one, name, unix_s)?;
        }
    }
    for pinned in store.chains()? {
        if let Some((name, line)) = lines.get(&pinned.authority) {
            let replaces = |known: Option<&SignedChains>| pinned.replaces(known, line, &revoked, unix_s);
            store.keep_chains(&pinned, name, unix_s, replaces)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use margay_core::key::{SigningKey, VerifyingKey};
    use margay_core::rng::Rng;

    use super::*;
    use crate::StateDir;
    use crate::chains::ChainRules;
    use crate::lineage::take_up;
    use crate::store::Marks;
    use crate::warrant::revoke;

    const NOW_S: u64 = 1_700_000_000;

    fn keys() -> (tempfile::TempDir, Keyring, Store) {
        let base = tempfile::tempdir().expect("a directory");
        let dir = StateDir::open(base.path().join("s")).expect("made");
        let (keyring, store) = (Keyring::open(&dir).expect("opened"), Store::open(&dir).expect("made"));
        (base, keyring, store)
    }

    /// As whoever may write into the cluster's store.
    fn delete_all(store: &Store) {
        for table in SharedTable::ALL {
            let rows = store.shared_rows(table).expect("readable").into_keys();
            let gone: Vec<Row> = rows.map(|row| (table, row, None)).collect();
            store.follow(&gone, Marks::default()).expect("written");
        }
    }

    #[test]
    fn rows_that_are_deleted_take_nothing_back_and_are_given_back() {
        let (_base, keyring, store) = keys();
        let by = keyring.create_authority("shop").expect("made");
        let revocation = revoke(&by, VerifyingKey([9; 32]), NOW_S).expect("made");
        assert!(store.revoke_key(&revocation, "shop", NOW_S).expect("written"));
        let follows = keyring.succeed("shop", NOW_S, 20).expect("made");
        assert!(take_up(&keyring, &store, NOW_S).expect("kept"));
        let chains = SignedChains::sign(&by, &ChainRules::default(), None, NOW_S * 1000).expect("signed");
        assert!(store.keep_chains(&chains, "shop", NOW_S, |_| true).expect("written"));
        assert_eq!(pin_statements(&keyring, &store, NOW_S).expect("readable"), []);
        delete_all(&store);
        pin_statements(&keyring, &store, NOW_S).expect("readable");
        let known = || {
            let successions = store.successions().expect("readable");
            (believed(&keyring, &store, NOW_S).expect("readable"), successions, store.chains().expect("readable"))
        };
        assert_eq!(known(), (vec![revocation], vec![follows], vec![chains.clone()]));
        give_back(&keyring, &store, NOW_S).expect("given");
        for table in [SharedTable::RevokedKeys, SharedTable::Successions, SharedTable::Chains] {
            let shared = store.shared_rows(table).expect("readable");
            assert_eq!((shared.len(), shared), (1, store.pinned(table).expect("readable")), "{table:?}");
        }
        pin_statements(&keyring, &store, revocation.until_s + 1).expect("readable");
        assert!(store.pinned(SharedTable::RevokedKeys).expect("readable").is_empty(), "it means nothing any more");
    }

    #[test]
    fn a_later_word_of_a_key_counts_beside_the_pinned_one_and_takes_its_place() {
        let (_base, keyring, store) = keys();
        let by = keyring.create_authority("shop").expect("made");
        let first = revoke(&by, VerifyingKey([9; 32]), NOW_S).expect("made");
        assert!(store.revoke_key(&first, "shop", NOW_S).expect("written"));
        pin_statements(&keyring, &store, NOW_S).expect("readable");
        let later = revoke(&by, VerifyingKey([9; 32]), NOW_S + 1000).expect("made");
        assert!(store.revoke_key(&later, "shop", NOW_S + 1000).expect("written"));
        assert_eq!(believed(&keyring, &store, NOW_S).expect("readable"), [later]);
        pin_statements(&keyring, &store, NOW_S).expect("readable");
        delete_all(&store);
        assert_eq!(believed(&keyring, &store, NOW_S).expect("readable"), [later]);
    }

    #[test]
    fn rows_that_nobody_has_signed_keep_no_word_of_the_authority_away() {
        let (_base, keyring, store) = keys();
        let by = keyring.create_authority("shop").expect("made");
        let posing = SigningKey::generate(&mut Rng::new([3; 32]));
        let revocation = revoke(&by, VerifyingKey([9; 32]), NOW_S).expect("made");
        let row = |value: KeyRevocation| {
            (SharedTable::RevokedKeys, revocation_row(&value).to_vec(), Some(value.encode().to_vec()))
        };
        let forged = KeyRevocation { until_s: u64::MAX, ..revocation };
        for bad in [forged, KeyRevocation::new(by.block(), revocation.key, u64::MAX, &posing)] {
            store.follow(&[row(bad)], Marks::default()).expect("written");
            assert!(store.revoke_key(&revocation, "shop", NOW_S).expect("written"));
            assert_eq!(believed(&keyring, &store, NOW_S).expect("readable"), [revocation]);
        }
        // Of keys and of chains alike, what is pinned is not the row.
        pin_statements(&keyring, &store, NOW_S).expect("readable");
        store.follow(&[row(forged)], Marks::default()).expect("written");
        assert_eq!(believed(&keyring, &store, NOW_S).expect("readable"), [revocation]);
    }
}
