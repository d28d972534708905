//! On a router of a cluster: what it knew of the other routers and of who is registered with them, for a start without
//! etcd.

use std::collections::BTreeMap;

use redb::{ReadableTable, TableDefinition, WriteTransaction};

use super::{Failure, META, Store, StoreError};

/// By the key in etcd.
const VIEW: TableDefinition<&str, &[u8]> = TableDefinition::new("cluster_view");
const HEARD: &str = "cluster_view_s";

/// Keys, and what they hold; `None`: they are gone.
pub type ViewChanges = BTreeMap<String, Option<Vec<u8>>>;
/// Keys, and what they hold.
pub type KeptView = Vec<(String, Vec<u8>)>;

pub(super) fn create(transaction: &WriteTransaction) -> Result<(), Failure> {
    transaction.open_table(VIEW)?;
    Ok(())
}

impl Store {
    /// Keeps what has changed, or all that there is, and when that was heard, in seconds since 1970.
    ///
    /// # Errors
    ///
    /// The disk refuses.
    pub fn keep_view(&self, changes: &ViewChanges, is_all: bool, heard_s: u64) -> Result<(), StoreError> {
        self.write(|transaction| {
            let mut table = transaction.open_table(VIEW)?;
            if is_all {
                table.retain(|_, _| false)?;
            }
            for (key, value) in changes {
                match value {
                    Some(value) => drop(table.insert(key.as_str(), &value[..])?),
                    None => drop(table.remove(key.as_str())?),
                }
            }
            transaction.open_table(META)?.insert(HEARD, heard_s)?;
            Ok(())
        })
    }

    /// What was kept, and when it was heard.
    ///
    /// # Errors
    ///
    /// The disk refuses, or the store is damaged.
    pub fn kept_view(&self) -> Result<(u64, KeptView), StoreError> {
        self.read(|transaction| {
            let heard_s = transaction.open_table(META)?.get(HEARD)?.map_or(0, |value| value.value());
            let mut all = Vec::new();
            for entry in transaction.open_table(VIEW)?.iter()? {
                let (key, value) = entry?;
                all.push((key.value().to_owned(), value.value().to_vec()));
            }
            Ok((heard_s, all))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::store;

    #[test]
    fn what_was_heard_last_comes_back() {
        let (_base, store) = store();
        let changes = |all: &[(&str, Option<&str>)]| -> ViewChanges {
            all.iter().map(|(key, value)| ((*key).to_owned(), value.map(|value| value.as_bytes().to_vec()))).collect()
        };
        let kept = |store: &Store| -> Vec<String> {
            store.kept_view().expect("readable").1.into_iter().map(|(key, _)| key).collect()
        };
        store.keep_view(&changes(&[("/a", Some("1")), ("/b", Some("2"))]), true, 5).expect("written");
        store.keep_view(&changes(&[("/a", None), ("/c", Some("3"))]), false, 6).expect("written");
        assert_eq!((store.kept_view().expect("readable").0, kept(&store)), (6, vec!["/b".to_owned(), "/c".to_owned()]));
        store.keep_view(&changes(&[("/d", Some("4"))]), true, 7).expect("written");
        assert_eq!(kept(&store), ["/d"]);
    }
}
