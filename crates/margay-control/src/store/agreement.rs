//! What all routers of a cluster must agree about, before a change of it holds on any of them (DESIGN §8).
//!
//! An act on such a table is drafted first: it reads what is here, and says what it would change. On a router by itself
//! the draft is carried out at once, in the same transaction. In a cluster the others' store is asked: it takes the
//! draft as a whole, if all that the draft replaces is still so there; else what it has instead is taken up here, and
//! the act is drafted anew.

use redb::WriteTransaction;

use super::audit::{self, AuditEntry};
use super::replica::SharedTable;
use super::{Failure, Store, StoreError};

/// Others change the same thing at the same time; so often in a row is no accident.
const TRIES_MAX: usize = 8;

/// A row: its table, its key, and what it holds; `None`: there is none.
pub type Row = (SharedTable, Vec<u8>, Option<Vec<u8>>);

/// One row becomes another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Of which table.
    pub table: SharedTable,
    /// Its key.
    pub key: Vec<u8>,
    /// What it replaces; `None`: there is none.
    pub before: Option<Vec<u8>>,
    /// What it holds from then on; `None`: it is removed.
    pub after: Option<Vec<u8>>,
}

/// Why a draft is not agreed to.
#[derive(Debug)]
pub enum Dissent {
    /// These rows are others in the meantime.
    Outdated(Vec<Row>),
    /// Nobody can be asked; says why.
    Away(String),
}

/// Whoever must agree. Calls wait for the network: they come from blocking threads.
pub trait Agreement: Send + Sync {
    /// All of it or nothing; gives the number of the change.
    ///
    /// # Errors
    ///
    /// Why not.
    fn agree(&self, changes: &[Change]) -> Result<i64, Dissent>;
    /// What rows hold now.
    ///
    /// # Errors
    ///
    /// Why nobody can be asked.
    fn ask(&self, keys: &[(SharedTable, Vec<u8>)]) -> Result<Vec<Row>, String>;
}

/// What an act would change.
#[derive(Debug, Default)]
pub(super) struct Draft {
    changes: Vec<Change>,
    notes: Vec<AuditEntry>,
}

impl Draft {
    /// A row becomes another. Said again of the same row, the later word counts.
    pub fn put(&mut self, table: SharedTable, key: &[u8], before: Option<Vec<u8>>, after: Option<Vec<u8>>) {
        if let Some(known) = self.changes.iter_mut().find(|known| known.table == table && known.key == key) {
            known.after = after;
        } else if before != after {
            self.changes.push(Change { table, key: key.to_vec(), before, after });
        }
    }

    /// For the audit log, with the change.
    pub fn note(&mut self, entry: AuditEntry) {
        self.notes.push(entry);
    }

    /// How many rows it changes.
    pub fn len(&self) -> usize {
        self.changes.len()
    }

    fn apply(&self, transaction: &WriteTransaction, with_changes: bool) -> Result<(), Failure> {
        for change in self.changes.iter().filter(|_| with_changes) {
            change.table.put(transaction, &change.key, change.after.as_deref())?;
        }
        self.notes.iter().try_for_each(|entry| audit::note(transaction, entry.clone()))
    }
}

impl Store {
    /// Whoever must agree to changes from now on.
    pub fn set_agreement(&self, agreement: std::sync::Arc<dyn Agreement>) {
        // Set once, at the start.
        let _ = self.agreement.set(agreement);
    }

    /// Drafts an act, has it agreed to, and carries it out.
    pub(super) fn settle<T>(
        &self,
        act: impl Fn(&WriteTransaction, &mut Draft) -> Result<T, Failure>,
    ) -> Result<T, StoreError> {
        let Some(agreement) = self.agreement.get() else { return self.carry_out(&act) };
        for _ in 0..TRIES_MAX {
            let mut draft = Draft::default();
            let value = self.decide(|transaction| Ok((false, act(transaction, &mut draft)?)))?;
            if draft.changes.is_empty() {
                if !draft.notes.is_empty() {
                    self.write(|transaction| draft.apply(transaction, false))?;
                }
                return Ok(value);
            }
            match agreement.agree(&draft.changes) {
                Ok(revision) => {
                    // Where the others' changes were followed that far already, it is among them.
                    let is_news = self.replica_marks()?.revision < revision;
                    self.write(|transaction| draft.apply(transaction, is_news))?;
                    self.tell(draft.changes.iter().map(|change| change.table));
                    return Ok(value);
                }
                Err(Dissent::Outdated(rows)) => self.take_up(&rows)?,
                Err(Dissent::Away(why)) => return Err(StoreError::Away(why)),
            }
        }
        Err(StoreError::Away("other routers change the same again and again".to_owned()))
    }

    /// Drafts an act and carries it out on this router alone.
    pub(super) fn carry_out<T>(
        &self,
        act: &impl Fn(&WriteTransaction, &mut Draft) -> Result<T, Failure>,
    ) -> Result<T, StoreError> {
        let mut draft = Draft::default();
        let value = self.decide(|transaction| {
            let value = act(transaction, &mut draft)?;
            draft.apply(transaction, true)?;
            Ok((!draft.changes.is_empty() || !draft.notes.is_empty(), value))
        })?;
        self.tell(draft.changes.iter().map(|change| change.table));
        Ok(value)
    }

    /// Takes up what the cluster knows of some rows; false on a router by itself.
    pub(super) fn refresh(&self, keys: &[(SharedTable, Vec<u8>)]) -> Result<bool, StoreError> {
        let Some(agreement) = self.agreement.get() else { return Ok(false) };
        let rows = agreement.ask(keys).map_err(StoreError::Away)?;
        self.take_up(&rows)?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use margay_core::fair_table::Peer;
    use margay_core::key::HostPublic;
    use margay_core::name::{Name, Prefix, ServiceId, authority_block};
    use parking_lot::Mutex;

    use super::*;
    use crate::store::record::prefix_key;
    use crate::store::tests::store;
    use crate::store::{AdmitError, MemberKey, NameError, Token, TokenState};
    use crate::token::TokenHash;

    type Rows = BTreeMap<(SharedTable, Vec<u8>), Vec<u8>>;

    /// What the routers share, as etcd does it.
    #[derive(Default)]
    struct Table {
        rows: Mutex<Rows>,
        revision: Mutex<i64>,
        is_away: Mutex<bool>,
    }

    impl Agreement for Table {
        fn agree(&self, changes: &[Change]) -> Result<i64, Dissent> {
            if *self.is_away.lock() {
                return Err(Dissent::Away("gone".to_owned()));
            }
            let mut rows = self.rows.lock();
            let now = |change: &Change| rows.get(&(change.table, change.key.clone())).cloned();
            if changes.iter().any(|change| now(change) != change.before) {
                let current = changes.iter().map(|change| (change.table, change.key.clone(), now(change)));
                return Err(Dissent::Outdated(current.collect()));
            }
            for change in changes {
                let key = (change.table, change.key.clone());
                match change.after.clone() {
                    Some(value) => rows.insert(key, value),
                    None => rows.remove(&key),
                };
            }
            *self.revision.lock() += 1;
            Ok(*self.revision.lock())
        }

        fn ask(&self, keys: &[(SharedTable, Vec<u8>)]) -> Result<Vec<Row>, String> {
            if *self.is_away.lock() {
                return Err("gone".to_owned());
            }
            let rows = self.rows.lock();
            Ok(keys.iter().map(|key| (key.0, key.1.clone(), rows.get(key).cloned())).collect())
        }
    }

    fn host(n: u8) -> MemberKey {
        MemberKey { host: HostPublic([n; 32]), authority: authority_block("shop") }
    }

    fn token(uses_left: u32) -> Token {
        let mut id = [0; 32];
        id[..8].copy_from_slice(&authority_block("shop"));
        Token {
            hash: TokenHash([1; 32]),
            authority: "shop".to_owned(),
            grants: vec![Prefix::new(ServiceId(id), 64)],
            groups: Vec::new(),
            uses_left,
            created_s: 100,
            expires_s: 200,
        }
    }

    #[test]
    fn routers_count_a_tokens_uses_together_and_know_each_others_members() {
        let shared = Arc::new(Table::default());
        let ((_a, one), (_b, two)) = (store(), store());
        for store in [&one, &two] {
            store.set_agreement(Arc::clone(&shared) as Arc<dyn Agreement>);
        }
        one.add_token(&token(2)).expect("agreed");
        let hash = Some(TokenHash([1; 32]));
        // The second router hears of the token only because it asks.
        two.admit(&host(1), "a", hash, 150).expect("let in");
        // The first does not know yet that one use is taken.
        one.admit(&host(2), "b", hash, 150).expect("let in");
        for store in [&one, &two] {
            assert!(matches!(store.admit(&host(3), "c", hash, 150), Err(AdmitError::UsedUp)));
            for n in [1, 2] {
                store.admit(&host(n), "x", None, 150).expect("a member of all");
            }
        }
        assert_eq!(one.tokens().expect("readable")[0].state(150), TokenState::UsedUp);
        one.remove_member(host(1).host.id(), 160).expect("agreed");
        assert!(two.member(&host(1)).expect("readable").is_some(), "not told yet");
        let grants = two.set_grants(&host(1), &[], 160).expect("agreed");
        assert!(grants.is_none(), "what is gone comes not back");
    }

    #[test]
    fn without_the_others_those_who_are_known_are_let_in_and_nobody_else() {
        let shared = Arc::new(Table::default());
        let (_base, store) = store();
        store.set_agreement(Arc::clone(&shared) as Arc<dyn Agreement>);
        store.add_token(&token(2)).expect("agreed");
        let hash = Some(TokenHash([1; 32]));
        store.admit(&host(1), "a", hash, 150).expect("let in");
        *shared.is_away.lock() = true;
        store.admit(&host(1), "a", None, 150).expect("known");
        for token in [hash, None] {
            let error = store.admit(&host(2), "b", token, 150).expect_err("not known");
            assert!(matches!(&error, AdmitError::Store(StoreError::Away(why)) if why == "gone"), "{error}");
        }
        let web: Name = "web.shop".parse().expect("a name");
        store.claim_name(&web, Peer::Own).expect("known hosts go on");
        *shared.is_away.lock() = false;
        store.claim_name(&"api.shop".parse().expect("a name"), Peer::Own).expect("agreed");
        assert!(!store.tokens().expect("readable").is_empty());
    }

    #[test]
    fn of_two_names_with_the_same_bits_all_routers_keep_the_first() {
        let shared = Arc::new(Table::default());
        let (_base, store) = store();
        store.set_agreement(Arc::clone(&shared) as Arc<dyn Agreement>);
        let api: Name = "api.shop".parse().expect("a name");
        // What another router has taken down, and this one has not heard of yet.
        let key = prefix_key(&Prefix::new(api.service_id(), 96)).to_vec();
        shared.rows.lock().insert((SharedTable::Names, key), b"xyz.shop".to_vec());
        let error = store.claim_name(&api, Peer::Own).expect_err("taken elsewhere");
        assert!(matches!(&error, NameError::Taken { known, .. } if known == "xyz.shop"), "{error}");
    }
}
