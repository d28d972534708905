//! Which written name the bits of a serviceID stand for: first come, and no other after it (DESIGN §5).

use margay_core::name::{AUTHORITY_BITS, Name, Prefix, SERVICE_BITS};
use redb::{ReadableTable, ReadableTableMetadata, TableDefinition, WriteTransaction};

use super::agreement::Draft;
use super::record::{PrefixKey, prefix_key, prefix_of};
use super::replica::SharedTable;
use super::{Failure, Store, StoreError};

pub(super) const NAMES: TableDefinition<PrefixKey, &str> = TableDefinition::new("names");
const NAMES_MAX: u64 = 1_000_000;

/// Why a written name was not taken down.
#[derive(Debug, thiserror::Error)]
pub enum NameError {
    /// Another name has its bits.
    #[error("`{name}` has the same first {bits} bits as `{known}`, which was registered before; choose another name")]
    Taken {
        /// The newcomer.
        name: String,
        /// How many bits they share.
        bits: u16,
        /// Who was first.
        known: String,
    },
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
}

pub(super) fn create(transaction: &WriteTransaction) -> Result<(), Failure> {
    transaction.open_table(NAMES)?;
    Ok(())
}

/// What a written name says of each level: authority, service, and the whole where there is more. A `sid:` says nothing.
fn claims(name: &Name) -> Vec<(Prefix, &str)> {
    let written = name.written();
    if written.starts_with("sid:") {
        return Vec::new();
    }
    let id = name.service_id();
    let service = written.split('/').next().unwrap_or(written);
    let mut claims = vec![(Prefix::new(id, SERVICE_BITS), service)];
    if let Some((_, authority)) = service.split_once('.') {
        claims.push((Prefix::new(id, AUTHORITY_BITS), authority));
    }
    claims.push((name.prefix(), written));
    claims
}

/// Gives a name that has the bits already, and how many of them.
fn draft_claims(
    transaction: &WriteTransaction,
    draft: &mut Draft,
    name: &Name,
) -> Result<Option<(u16, String)>, Failure> {
    let table = transaction.open_table(NAMES)?;
    let mut fresh = Vec::new();
    for (prefix, claim) in claims(name) {
        match table.get(prefix_key(&prefix))?.map(|known| known.value().to_owned()) {
            Some(known) if known != claim => return Ok(Some((prefix.bits, known))),
            Some(_) => {}
            None => fresh.push((prefix, claim)),
        }
    }
    if table.len()? + fresh.len() as u64 > NAMES_MAX {
        return Err(Failure::Full { what: "names", limit: NAMES_MAX });
    }
    for (prefix, claim) in fresh {
        draft.put(SharedTable::Names, &prefix_key(&prefix), None, Some(claim.as_bytes().to_vec()));
    }
    Ok(None)
}

impl Store {
    /// Takes a written name down, so that nobody else gets its bits. A name that is known already costs no write.
    ///
    /// # Errors
    ///
    /// Another written name has the same bits, on any level; or the store fails.
    pub fn claim_name(&self, name: &Name) -> Result<(), NameError> {
        // Reading waits for nobody, and a name that is served again and again is known.
        let is_known = self.read(|transaction| {
            let table = transaction.open_table(NAMES)?;
            for (prefix, claim) in claims(name) {
                if table.get(prefix_key(&prefix))?.is_none_or(|known| known.value() != claim) {
                    return Ok(false);
                }
            }
            Ok(true)
        })?;
        if is_known {
            return Ok(());
        }
        let draft = |transaction: &WriteTransaction, draft: &mut Draft| draft_claims(transaction, draft, name);
        let taken = match self.settle(draft) {
            // Hosts that are members go on; the routers see later who was first.
            Err(StoreError::Away(_)) => self.carry_out(&draft)?,
            decided => decided?,
        };
        match taken {
            None => Ok(()),
            Some((bits, known)) => Err(NameError::Taken { name: name.written().to_owned(), bits, known }),
        }
    }

    /// The written name of a prefix, if one was taken down.
    ///
    /// # Errors
    ///
    /// The disk refuses, or the store is damaged.
    pub fn name_of(&self, prefix: &Prefix) -> Result<Option<String>, StoreError> {
        self.read(|transaction| {
            let table = transaction.open_table(NAMES)?;
            Ok(table.get(prefix_key(prefix))?.map(|name| name.value().to_owned()))
        })
    }

    /// Every name that was taken down.
    ///
    /// # Errors
    ///
    /// The disk refuses, or the store is damaged.
    pub fn names(&self) -> Result<Vec<(Prefix, String)>, StoreError> {
        self.read(|transaction| {
            let table = transaction.open_table(NAMES)?;
            let entry =
                |entry: Result<(redb::AccessGuard<'_, PrefixKey>, redb::AccessGuard<'_, &str>), redb::StorageError>| {
                    let (key, value) = entry?;
                    Ok((prefix_of(&key.value())?, value.value().to_owned()))
                };
            table.iter()?.map(entry).collect()
        })
    }

    /// Plants a name for bits of another: what a collision of hashes would do.
    #[cfg(test)]
    pub(crate) fn plant_name(&self, prefix: &Prefix, written: &str) {
        self.write(|transaction| Ok(transaction.open_table(NAMES)?.insert(prefix_key(prefix), written)?.map(|_| ())))
            .expect("written");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::store;

    fn name(text: &str) -> Name {
        text.parse().expect("a name")
    }

    #[test]
    fn the_first_name_keeps_its_bits_on_every_level() {
        let (_base, store) = store();
        let web = name("web.shop");
        store.claim_name(&web).expect("free");
        store.claim_name(&web).expect("its own");
        store.claim_name(&name("web.shop/key:user42")).expect("of the same service");
        store.claim_name(&name("sid:00/96")).expect("says nothing");
        for (planted, bits, newcomer) in
            [("xyz.shop", 96, "api.shop"), ("store", 64, "web.store2"), ("a.b/key:x", 256, "a.b/key:y")]
        {
            let id = name(newcomer).service_id();
            store.plant_name(&Prefix::new(id, bits), planted);
            let error = store.claim_name(&name(newcomer)).expect_err("taken");
            assert!(
                matches!(&error, NameError::Taken { known, bits: found, .. } if known == planted && *found == bits),
                "{error}"
            );
        }
        let before = store.names().expect("readable").len();
        assert!(store.claim_name(&name("web.store2")).is_err());
        assert_eq!(store.names().expect("readable").len(), before, "a refused name leaves nothing behind");
        assert_eq!(store.name_of(&web.prefix()).expect("readable").as_deref(), Some("web.shop"));
    }
}
