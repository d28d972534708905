//! Which written name the bits of a serviceID stand for: first come, and no other after it (DESIGN §5).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use margay_core::fair_table::{Full, Peer};
use margay_core::key::HostId;
use margay_core::name::{AUTHORITY_BITS, Name, Prefix, SERVICE_BITS};
use redb::{ReadableTable, ReadableTableMetadata, TableDefinition, WriteTransaction};

use super::agreement::Draft;
use super::record::{PrefixKey, prefix_key, prefix_of};
use super::replica::SharedTable;
use super::{Failure, Store, StoreError};

/// The host that has registered a name first, none for this one, and the written name, with a tab between them. A new
/// service has two rows, and one more if its authority is new.
pub(super) const NAMES: TableDefinition<PrefixKey, &str> = TableDefinition::new("names");
/// How many of those rows each host has, on all routers of a cluster together; they stay when it serves them no more.
const ROWS_OF_HOSTS: TableDefinition<[u8; 16], u64> = TableDefinition::new("name_rows_of_hosts");
const ROWS_MAX: u64 = 4_000_000;
/// One host's.
const HOST_ROWS_MAX: u64 = ROWS_MAX / 16;
/// Those that other hosts leave to this one.
const OWN_ROWS: u64 = ROWS_MAX / 16;
/// Names that are judged at once: what is here alone; and what a cluster's store takes as one change.
const CLAIMS_MAX: usize = 1024;
const CLAIMS_MAX_AGREED: usize = 32;

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
    /// A host has had its share of them.
    #[error("names are kept for ever, and this host has registered too many different ones: {0}")]
    Share(#[from] Full),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
}

pub(super) fn create(transaction: &WriteTransaction) -> Result<(), Failure> {
    transaction.open_table(NAMES)?;
    transaction.open_table(ROWS_OF_HOSTS)?;
    Ok(())
}

fn row_of(owner: Option<HostId>, written: &str) -> String {
    format!("{}\t{written}", owner.map(|host| host.to_string()).unwrap_or_default())
}

/// The written name of a row.
pub(crate) fn written_of(row: &str) -> &str {
    row.split_once('\t').map_or(row, |(_, written)| written)
}

fn owner_of(row: &str) -> Option<HostId> {
    row.split_once('\t')?.0.parse().ok()
}

/// Puts a row, or takes it out, and counts it for its host.
pub(super) fn put(transaction: &WriteTransaction, key: PrefixKey, row: Option<&str>) -> Result<(), Failure> {
    let mut table = transaction.open_table(NAMES)?;
    let before = match row {
        Some(row) => table.insert(key, row)?,
        None => table.remove(key)?,
    };
    let before = before.and_then(|before| owner_of(before.value()));
    let after = row.and_then(owner_of);
    if before == after {
        return Ok(());
    }
    let mut counts = transaction.open_table(ROWS_OF_HOSTS)?;
    if let Some(HostId(host)) = before {
        let count = counts.get(host)?.map_or(0, |count| count.value());
        match count.saturating_sub(1) {
            0 => drop(counts.remove(host)?),
            count => drop(counts.insert(host, count)?),
        }
    }
    if let Some(HostId(host)) = after {
        let count = counts.get(host)?.map_or(0, |count| count.value());
        counts.insert(host, count + 1)?;
    }
    Ok(())
}

/// What a written name says of each level: authority, service, and the whole where there is more. A `sid:` says
/// nothing.
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

/// Names that wait to be taken down: whoever has its turn writes for all that wait by then, so that a thousand at once
/// cost the disk little more than one.
#[derive(Default)]
pub(super) struct Claims {
    turn: Mutex<()>,
    waiting: Mutex<Vec<Arc<Claim>>>,
}

impl Claims {
    fn waiting(&self) -> MutexGuard<'_, Vec<Arc<Claim>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Claim {
    name: Name,
    /// Another host that claims it.
    owner: Option<HostId>,
    verdict: OnceLock<Verdict>,
}

enum Verdict {
    Yes,
    Taken {
        bits: u16,
        known: String,
    },
    Full,
    /// Its host has its share.
    Share,
}

/// Drafts names one after the other, each unless another has its bits.
fn judge(transaction: &WriteTransaction, draft: &mut Draft, names: &[Arc<Claim>]) -> Result<Vec<Verdict>, Failure> {
    let (table, counts) = (transaction.open_table(NAMES)?, transaction.open_table(ROWS_OF_HOSTS)?);
    let mut drafted: BTreeMap<PrefixKey, &str> = BTreeMap::new();
    let mut drafted_for: BTreeMap<HostId, u64> = BTreeMap::new();
    let mut verdicts = Vec::with_capacity(names.len());
    'names: for claim in names {
        let mut fresh: BTreeMap<PrefixKey, &str> = BTreeMap::new();
        for (prefix, written) in claims(&claim.name) {
            let key = prefix_key(&prefix);
            let there = table.get(key)?.map(|known| written_of(known.value()).to_owned());
            match there.or_else(|| drafted.get(&key).map(|known| (*known).to_owned())) {
                Some(known) if known != written => {
                    verdicts.push(Verdict::Taken { bits: prefix.bits, known });
                    continue 'names;
                }
                Some(_) => {}
                None => {
                    fresh.insert(key, written);
                }
            }
        }
        if let Some(host) = claim.owner.filter(|_| !fresh.is_empty()) {
            let rows = drafted_for.entry(host).or_default();
            if counts.get(host.0)?.map_or(0, |count| count.value()) + *rows + fresh.len() as u64 > HOST_ROWS_MAX {
                verdicts.push(Verdict::Share);
                continue;
            }
            *rows += fresh.len() as u64;
        }
        let limit = if claim.owner.is_some() { ROWS_MAX - OWN_ROWS } else { ROWS_MAX };
        if table.len()? + (drafted.len() + fresh.len()) as u64 > limit {
            verdicts.push(Verdict::Full);
            continue;
        }
        for (key, written) in fresh {
            let row = row_of(claim.owner, written);
            draft.put(SharedTable::Names, &key, None, Some(row.into_bytes()));
            drafted.insert(key, written);
        }
        verdicts.push(Verdict::Yes);
    }
    Ok(verdicts)
}

impl Store {
    /// Takes a written name down for `by`, so that nobody else gets its bits. A name that is known already costs no
    /// write, and counts for nobody.
    ///
    /// # Errors
    ///
    /// Another written name has the same bits, on any level; or a host has had its share of names; or the store fails.
    pub fn claim_name(&self, name: &Name, by: Peer) -> Result<(), NameError> {
        // Reading waits for nobody, and a name that is served again and again is known.
        let is_known = self.read(|transaction| {
            let table = transaction.open_table(NAMES)?;
            for (prefix, claim) in claims(name) {
                if table.get(prefix_key(&prefix))?.is_none_or(|known| written_of(known.value()) != claim) {
                    return Ok(false);
                }
            }
            Ok(true)
        })?;
        if is_known {
            return Ok(());
        }
        let owner = match by {
            Peer::Member(host) => Some(host),
            _ => None,
        };
        let own = Arc::new(Claim { name: name.clone(), owner, verdict: OnceLock::new() });
        self.claims.waiting().push(Arc::clone(&own));
        let _turn = self.claims.turn.lock().unwrap_or_else(PoisonError::into_inner);
        while own.verdict.get().is_none() {
            self.claim_waiting(&own)?;
        }
        match own.verdict.get() {
            None | Some(Verdict::Yes) => Ok(()),
            Some(Verdict::Full) => Err(StoreError::Full { what: "names", limit: ROWS_MAX }.into()),
            Some(Verdict::Share) => {
                let share = usize::try_from(HOST_ROWS_MAX).unwrap_or(usize::MAX);
                Err(Full::Peer { share }.into())
            }
            Some(Verdict::Taken { bits, known }) => {
                Err(NameError::Taken { name: name.written().to_owned(), bits: *bits, known: known.clone() })
            }
        }
    }

    /// Takes down those that have waited longest, as one change. Where it fails, `own` waits no longer.
    fn claim_waiting(&self, own: &Arc<Claim>) -> Result<(), StoreError> {
        let most = if self.agreement.get().is_some() { CLAIMS_MAX_AGREED } else { CLAIMS_MAX };
        let some: Vec<Arc<Claim>> = {
            let mut waiting = self.claims.waiting();
            let count = waiting.len().min(most);
            waiting.drain(..count).collect()
        };
        let draft = |transaction: &WriteTransaction, draft: &mut Draft| judge(transaction, draft, &some);
        let judged = match self.settle(draft) {
            // Hosts that are members go on; the routers see later who was first.
            Err(StoreError::Away(_)) => self.carry_out(&draft),
            judged => judged,
        };
        match judged {
            Ok(verdicts) => {
                for (claim, verdict) in some.iter().zip(verdicts) {
                    // Nobody else judges it: it was taken from those that wait.
                    let _ = claim.verdict.set(verdict);
                }
                Ok(())
            }
            Err(error) => {
                // Each of the others tries for itself, and hears what is wrong by then.
                let mut waiting = self.claims.waiting();
                waiting.extend(some);
                waiting.retain(|claim| !Arc::ptr_eq(claim, own));
                Err(error)
            }
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
            Ok(table.get(prefix_key(prefix))?.map(|name| written_of(name.value()).to_owned()))
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
                    Ok((prefix_of(&key.value())?, written_of(value.value()).to_owned()))
                };
            table.iter()?.map(entry).collect()
        })
    }

    /// Plants a name for bits of another: what a collision of hashes would do.
    #[cfg(test)]
    pub(crate) fn plant_name(&self, prefix: &Prefix, written: &str) {
        self.write(|transaction| put(transaction, prefix_key(prefix), Some(written))).expect("written");
    }
}

#[cfg(test)]
mod tests {
    use margay_core::key::HostId;

    use super::*;
    use crate::store::tests::store;

    fn name(text: &str) -> Name {
        text.parse().expect("a name")
    }

    #[test]
    fn names_that_come_together_are_judged_one_by_one() {
        let (_base, store) = store();
        let planted = name("web.store2");
        store.plant_name(&Prefix::new(planted.service_id(), 64), "store");
        let start = std::sync::Barrier::new(40);
        let claim = |number: u32| {
            start.wait();
            match number % 4 {
                // Twins, and one that has no room among them.
                0 => store.claim_name(&planted, Peer::Own).is_err(),
                _ => store.claim_name(&name(&format!("s{}.shop", number / 2)), Peer::Own).is_ok(),
            }
        };
        let right = std::thread::scope(|scope| {
            let claims: Vec<_> = (0..40)
                .map(|number| {
                    scope.spawn({
                        let claim = &claim;
                        move || claim(number)
                    })
                })
                .collect();
            claims.into_iter().map(|claim| claim.join().expect("no panic")).filter(|ok| *ok).count()
        });
        assert_eq!(right, 40);
        let taken = (0..40).filter(|number| number % 4 != 0).map(|number| number / 2);
        for number in taken {
            let written = format!("s{number}.shop");
            let known = store.name_of(&name(&written).prefix()).expect("readable");
            assert_eq!(known.as_deref(), Some(&written[..]));
        }
    }

    #[test]
    fn a_member_does_not_use_up_the_names_of_others_by_rows_nor_by_other_routers_nor_by_restarts() {
        let (base, store) = store();
        let of = |n: u8| HostId([n; 16]);
        let rows_of = |store: &Store, host: HostId| {
            let count =
                store.read(|reading| Ok(reading.open_table(ROWS_OF_HOSTS)?.get(host.0)?.map(|count| count.value())));
            count.expect("readable").unwrap_or_default()
        };
        let claim = |store: &Store, written: &str, by| store.claim_name(&name(written), by);
        claim(&store, "a.shop", Peer::Member(of(1))).expect("free");
        claim(&store, "a.shop", Peer::Member(of(2))).expect("known already");
        assert_eq!((rows_of(&store, of(1)), rows_of(&store, of(2))), (3, 0), "its bits, its /96, its authority");
        // What it has taken down at another router of the cluster.
        let key = |written: &str| prefix_key(&name(written).prefix()).to_vec();
        let elsewhere = (SharedTable::Names, key("b.shop"), Some(row_of(Some(of(1)), "b.shop").into_bytes()));
        store.follow(std::slice::from_ref(&elsewhere), crate::store::Marks::default()).expect("written");
        assert_eq!((rows_of(&store, of(1)), store.names().expect("readable").len()), (4, 4));
        let set = |rows: u64| {
            store.write(|transaction| {
                transaction.open_table(ROWS_OF_HOSTS)?.insert(of(1).0, rows)?;
                Ok(())
            })
        };
        set(HOST_ROWS_MAX - 2).expect("written");
        claim(&store, "c.shop", Peer::Member(of(1))).expect("the last two");
        drop(store);
        let store = Store::open(&crate::state_dir::StateDir::open(base.path().join("s")).expect("a directory"))
            .expect("opened");
        let refused = claim(&store, "d.shop", Peer::Member(of(1)));
        assert!(matches!(refused, Err(NameError::Share(Full::Peer { .. }))), "also after a restart");
        assert_eq!(store.name_of(&name("d.shop").prefix()).expect("readable"), None);
        claim(&store, "c.shop", Peer::Member(of(1))).expect("known already");
        claim(&store, "d.shop", Peer::Member(of(2))).expect("others have theirs");
        claim(&store, "e.shop", Peer::Own).expect("so has this host");
        store.follow(&[(elsewhere.0, elsewhere.1, None)], crate::store::Marks::default()).expect("written");
        assert_eq!(rows_of(&store, of(1)), HOST_ROWS_MAX - 1);
    }

    #[test]
    fn the_first_name_keeps_its_bits_on_every_level() {
        let (_base, store) = store();
        let web = name("web.shop");
        store.claim_name(&web, Peer::Own).expect("free");
        store.claim_name(&web, Peer::Own).expect("its own");
        store.claim_name(&name("web.shop/key:user42"), Peer::Own).expect("of the same service");
        store.claim_name(&name("sid:00/96"), Peer::Own).expect("says nothing");
        for (planted, bits, newcomer) in
            [("xyz.shop", 96, "api.shop"), ("store", 64, "web.store2"), ("a.b/key:x", 256, "a.b/key:y")]
        {
            let id = name(newcomer).service_id();
            store.plant_name(&Prefix::new(id, bits), planted);
            let error = store.claim_name(&name(newcomer), Peer::Own).expect_err("taken");
            assert!(
                matches!(&error, NameError::Taken { known, bits: found, .. } if known == planted && *found == bits),
                "{error}"
            );
        }
        let before = store.names().expect("readable").len();
        assert!(store.claim_name(&name("web.store2"), Peer::Own).is_err());
        assert_eq!(store.names().expect("readable").len(), before, "a refused name leaves nothing behind");
        assert_eq!(store.name_of(&web.prefix()).expect("readable").as_deref(), Some("web.shop"));
    }
}
