//! With which numbers fenced names were given, and to whom last: a later holder has a higher number, also after this
//! router has started again.

use margay_core::key::HostId;
use margay_core::name::Prefix;
use redb::{ReadableTable, TableDefinition, WriteTransaction};

use super::record::{PrefixKey, prefix_key, prefix_of};
use super::{Failure, Store, StoreError};

/// Number and host-ID.
const FENCES: TableDefinition<PrefixKey, (u64, [u8; 16])> = TableDefinition::new("fences");

pub(super) fn create(transaction: &WriteTransaction) -> Result<(), Failure> {
    transaction.open_table(FENCES)?;
    Ok(())
}

impl Store {
    /// A number for a host that holds a name from now on: higher than any before, and at least the time in seconds
    /// since 1970, so that a store that was lost has no lower ones.
    ///
    /// # Errors
    ///
    /// The disk refuses, or the store is damaged.
    pub fn next_fence(&self, prefix: &Prefix, host: HostId, unix_s: u64) -> Result<u64, StoreError> {
        self.write(|transaction| {
            let mut table = transaction.open_table(FENCES)?;
            let key = prefix_key(prefix);
            let last = table.get(key)?.map_or(0, |last| last.value().0);
            let number = unix_s.max(last.saturating_add(1));
            table.insert(key, (number, host.0))?;
            Ok(number)
        })
    }

    /// All names that were given, and to whom last.
    ///
    /// # Errors
    ///
    /// The disk refuses, or the store is damaged.
    pub fn fences(&self) -> Result<Vec<(Prefix, HostId)>, StoreError> {
        self.read(|transaction| {
            let mut all = Vec::new();
            for entry in transaction.open_table(FENCES)?.iter()? {
                let (key, value) = entry?;
                all.push((prefix_of(&key.value())?, HostId(value.value().1)));
            }
            Ok(all)
        })
    }
}

#[cfg(test)]
mod test {
    use super::super::tests::store;
    use super::*;

    #[test]
    fn numbers_rise_by_name_and_are_at_least_the_time() {
        let (_base, store) = store();
        let [db, queue] = ["db.shop", "queue.shop"].map(|name| name.parse::<Prefix>().expect("literal"));
        let next = |prefix, host, unix_s| store.next_fence(prefix, HostId([host; 16]), unix_s).expect("written");
        assert_eq!([next(&db, 1, 100), next(&db, 2, 100), next(&db, 1, 90), next(&queue, 1, 90)], [100, 101, 102, 90]);
        assert_eq!(next(&db, 3, 5000), 5000);
        let mut all = store.fences().expect("readable");
        all.sort_by_key(|(_, host)| *host);
        assert_eq!(all, [(queue, HostId([1; 16])), (db, HostId([3; 16]))]);
    }
}
