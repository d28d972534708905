//! The embedded store of one agent: `registry.redb` in the state directory (DESIGN §8).
//!
//! Each change is one transaction: after a crash, a full disk or a refused request it is there whole or not at all. A
//! disk that was full does not end the store: once there is room the next change goes through.

mod agreement;
mod audit;
mod chains;
mod fence;
mod join;
mod lease;
mod member;
mod name;
mod order;
mod pin;
mod record;
mod replica;
mod revoked_key;
mod rule;
mod succession;
mod view;

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use redb::{
    CommitError, Database, DatabaseError, ReadTransaction, ReadableDatabase, ReadableTable, StorageError,
    TableDefinition, TransactionError, WriteTransaction,
};

pub use agreement::{Agreement, Change, Dissent, Row};
pub use audit::AuditEntry;
pub use join::Joined;
pub use lease::StoredLease;
pub use member::{AdmitError, Member, MemberKey, Token, TokenState};
pub use name::NameError;
pub(crate) use name::written_of;
pub use replica::{Marks, Rows, SharedTable};
pub(crate) use revoked_key::row as revocation_row;
pub use rule::StoredRule;
pub use succession::Kept;
pub(crate) use succession::row as succession_row;
pub use view::{KeptView, ViewChanges};

use tokio::sync::watch;

use crate::state_dir::StateDir;

const FILE: &str = "registry.redb";
/// Version of what the tables hold. A newer program may read older ones, never the other way round.
const SCHEMA: u64 = 1;
const META: TableDefinition<&str, u64> = TableDefinition::new("meta");

/// Something about the store that only the operator can put right. Each names the file.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A second agent.
    #[error("{}: another agent has it open; one agent runs per state directory", .0.display())]
    Locked(PathBuf),
    /// Not what was written there.
    #[error("{path}: the store is damaged ({what}); stop the agent, move the file away and restore a copy, or let the hosts join again", path = path.display())]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// What was found.
        what: String,
    },
    /// Written by a newer program.
    #[error("{path}: the store has version {found}, this program knows up to {SCHEMA}; run the newer program again", path = path.display())]
    Newer {
        /// Which file.
        path: PathBuf,
        /// The version found.
        found: u64,
    },
    /// The disk is full.
    #[error("{}: the disk is full; make room and try again, nothing was changed and nothing was lost", .0.display())]
    DiskFull(PathBuf),
    /// The operating system refused.
    #[error("{path}: {error}; nothing was changed", path = path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        error: String,
    },
    /// The routers of the cluster cannot agree about it.
    #[error(
        "the cluster's store cannot be asked ({0}), so nothing new is decided: hosts that are members go on meanwhile; \
         `margay status` on the router shows how it stands with etcd"
    )]
    Away(String),
    /// A table is at its bound.
    #[error("the store holds {limit} {what} already, its bound; remove some first")]
    Full {
        /// Of what.
        what: &'static str,
        /// The bound.
        limit: u64,
    },
}

/// How a database is opened; tests put a disk of their own below it.
type Opener = Box<dyn Fn() -> Result<Database, DatabaseError> + Send + Sync>;

/// The store. Calls block on the disk: from async code, call them on a blocking thread.
pub struct Store {
    path: PathBuf,
    open: Opener,
    /// `None` after an error of the disk; the next call opens it again.
    database: Mutex<Option<Database>>,
    claims: name::Claims,
    /// The routers of the cluster, where there are more.
    agreement: OnceLock<Arc<dyn Agreement>>,
    /// Rises with every change of what authorities have said: which keys follow each other, which may sign no longer,
    /// and which sessions go through boxes.
    keys: watch::Sender<u64>,
    /// Rises with every change of orders that are under way, and of what was passed on of them.
    orders: watch::Sender<u64>,
}

/// What goes wrong inside a transaction.
#[derive(Debug)]
enum Failure {
    Redb(Box<redb::Error>),
    Record(prost::DecodeError),
    Full { what: &'static str, limit: u64 },
}

macro_rules! failures {
    ($($error:ty),*) => {$(
        impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                Self::Redb(Box::new(error.into()))
            }
        }
    )*};
}
failures!(StorageError, redb::TableError, TransactionError, CommitError, DatabaseError, redb::SetDurabilityError);

impl From<prost::DecodeError> for Failure {
    fn from(error: prost::DecodeError) -> Self {
        Self::Record(error)
    }
}

impl Store {
    /// Opens the store of a state directory, and makes it on the first start.
    ///
    /// # Errors
    ///
    /// Another agent has it open, it is damaged or newer than this program, or the disk refuses.
    pub fn open(dir: &StateDir) -> Result<Self, StoreError> {
        let path = dir.join(FILE);
        let file = path.clone();
        Self::with_opener(path, Box::new(move || redb::Builder::new().create_file(open_file(&file)?)))
    }

    fn with_opener(path: PathBuf, open: Opener) -> Result<Self, StoreError> {
        let (claims, agreement) = (name::Claims::default(), OnceLock::new());
        let database = Mutex::new(None);
        let keys = watch::Sender::default();
        let orders = watch::Sender::default();
        let store = Self { path, open, database, claims, agreement, keys, orders };
        store.write(|transaction| {
            audit::create(transaction)?;
            chains::create(transaction)?;
            fence::create(transaction)?;
            join::create(transaction)?;
            lease::create(transaction)?;
            member::create(transaction)?;
            name::create(transaction)?;
            order::create(transaction)?;
            pin::create(transaction)?;
            revoked_key::create(transaction)?;
            succession::create(transaction)?;
            rule::create(transaction)?;
            view::create(transaction)?;
            Ok(())
        })?;
        Ok(store)
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs `act` in one transaction, which is committed, and on disk, when this returns `Ok`.
    fn write<T>(&self, act: impl FnOnce(&WriteTransaction) -> Result<T, Failure>) -> Result<T, StoreError> {
        self.decide(|transaction| act(transaction).map(|value| (true, value)))
    }

    /// Like `write`, for acts that may find that there is nothing to change: they return false, and nothing is written.
    fn decide<T>(&self, act: impl FnOnce(&WriteTransaction) -> Result<(bool, T), Failure>) -> Result<T, StoreError> {
        self.with_database(|database| {
            let transaction = database.begin_write()?;
            let (changed, value) = act(&transaction)?;
            if changed {
                transaction.commit()?;
            } else {
                transaction.abort()?;
            }
            Ok(value)
        })
    }

    fn read<T>(&self, act: impl FnOnce(&ReadTransaction) -> Result<T, Failure>) -> Result<T, StoreError> {
        self.with_database(|database| act(&database.begin_read()?))
    }

    fn with_database<T>(&self, act: impl FnOnce(&Database) -> Result<T, Failure>) -> Result<T, StoreError> {
        // A panic while the lock was held left no half-made change: the transaction was dropped, hence rolled back.
        let mut slot = self.database.lock().unwrap_or_else(PoisonError::into_inner);
        if slot.is_none() {
            let opened = (self.open)().map_err(|error| self.explain(error.into()))?;
            self.check_schema(&opened)?;
            *slot = Some(opened);
        }
        let Some(database) = slot.as_ref() else { return Err(StoreError::Locked(self.path.clone())) };
        act(database).map_err(|failure| {
            if is_of_disk(&failure) {
                *slot = None;
            }
            self.explain(failure)
        })
    }

    fn check_schema(&self, database: &Database) -> Result<(), StoreError> {
        let found = (|| {
            let transaction = database.begin_write()?;
            let found = {
                let mut meta = transaction.open_table(META)?;
                let found = meta.get("schema")?.map(|value| value.value());
                if found.is_none() {
                    meta.insert("schema", SCHEMA)?;
                }
                found
            };
            if found.is_none() {
                transaction.commit()?;
            } else {
                transaction.abort()?;
            }
            Ok::<_, Failure>(found.unwrap_or(SCHEMA))
        })()
        .map_err(|failure| self.explain(failure))?;
        if found > SCHEMA { Err(StoreError::Newer { path: self.path.clone(), found }) } else { Ok(()) }
    }

    fn explain(&self, failure: Failure) -> StoreError {
        let path = self.path.clone();
        let error = match failure {
            Failure::Full { what, limit } => return StoreError::Full { what, limit },
            Failure::Record(error) => return StoreError::Damaged { path, what: error.to_string() },
            Failure::Redb(error) => *error,
        };
        match error {
            redb::Error::DatabaseAlreadyOpen => StoreError::Locked(path),
            redb::Error::Io(error) if is_full(&error) => StoreError::DiskFull(path),
            redb::Error::Io(error)
                if error.kind() == io::ErrorKind::InvalidData || error.kind() == io::ErrorKind::UnexpectedEof =>
            {
                StoreError::Damaged { path, what: error.to_string() }
            }
            redb::Error::Io(error) => StoreError::Io { path, error: error.to_string() },
            redb::Error::PreviousIo => StoreError::Io { path, error: "the disk failed before; try again".to_owned() },
            redb::Error::UpgradeRequired(version) => StoreError::Newer { path, found: u64::from(version) },
            other => StoreError::Damaged { path, what: other.to_string() },
        }
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Store({})", self.path.display())
    }
}

fn open_file(path: &Path) -> io::Result<std::fs::File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge)
}

/// After such an error redb refuses everything until the file is opened again.
fn is_of_disk(failure: &Failure) -> bool {
    matches!(failure, Failure::Redb(error) if matches!(**error, redb::Error::Io(_) | redb::Error::PreviousIo))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use margay_core::fair_table::Peer;
    use margay_core::name::Name;
    use redb::StorageBackend;
    use redb::backends::FileBackend;

    use super::*;

    pub(crate) fn store() -> (tempfile::TempDir, Store) {
        let base = tempfile::tempdir().expect("a directory");
        let dir = StateDir::open(base.path().join("s")).expect("made");
        let store = Store::open(&dir).expect("opened");
        (base, store)
    }

    /// A store whose successions cannot be read.
    pub(crate) fn damage(store: &Store) {
        store.write(|transaction| Ok(transaction.delete_table(succession::SUCCESSIONS)?)).expect("written");
    }

    /// A disk that has room for so many more bytes beyond what was ever written.
    #[derive(Debug)]
    struct Quota {
        file: FileBackend,
        room: Arc<AtomicU64>,
    }

    impl StorageBackend for Quota {
        fn len(&self) -> io::Result<u64> {
            self.file.len()
        }
        fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
            self.file.read(offset, out)
        }
        fn set_len(&self, len: u64) -> io::Result<()> {
            self.file.set_len(len)
        }
        fn sync_data(&self) -> io::Result<()> {
            self.file.sync_data()
        }
        fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
            let len = data.len() as u64;
            let taken = self.room.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |room| room.checked_sub(len));
            taken.map_err(|_| io::Error::from(io::ErrorKind::StorageFull))?;
            self.file.write(offset, data)
        }
        fn close(&self) -> io::Result<()> {
            self.file.close()
        }
    }

    #[test]
    fn a_second_agent_is_refused() {
        let (base, store) = store();
        let dir = StateDir::open(base.path().join("s")).expect("there");
        let error = Store::open(&dir).expect_err("refused");
        assert!(matches!(error, StoreError::Locked(_)), "{error}");
        drop(store);
        assert!(Store::open(&dir).is_ok());
    }

    #[test]
    fn a_damaged_or_newer_file_is_refused_and_left_alone() {
        let (base, store) = store();
        store
            .write(|transaction| Ok(transaction.open_table(META)?.insert("schema", 99)?.map(|_| ())))
            .expect("written");
        drop(store);
        let dir = StateDir::open(base.path().join("s")).expect("there");
        assert!(matches!(Store::open(&dir), Err(StoreError::Newer { found: 99, .. })));
        let garbage = vec![0x5a; 10_000];
        std::fs::write(dir.join(FILE), &garbage).expect("written");
        let error = Store::open(&dir).expect_err("refused");
        assert!(matches!(error, StoreError::Damaged { .. }), "{error}");
        assert!(error.to_string().contains("registry.redb"), "{error}");
        assert_eq!(std::fs::read(dir.join(FILE)).expect("readable"), garbage);
    }

    #[test]
    fn a_full_disk_loses_nothing_and_ends_when_there_is_room() {
        let base = tempfile::tempdir().expect("a directory");
        let path = base.path().join(FILE);
        let room = Arc::new(AtomicU64::new(u64::MAX));
        let (file, quota) = (path.clone(), Arc::clone(&room));
        let open: Opener = Box::new(move || {
            let backend = Quota { file: FileBackend::new(open_file(&file)?)?, room: Arc::clone(&quota) };
            redb::Builder::new().create_with_backend(backend)
        });
        let store = Store::with_opener(path, open).expect("opened");
        let name = |n: u32| -> Name { format!("s{n}.shop").parse().expect("a name") };
        store.claim_name(&name(0), Peer::Own).expect("written");
        room.store(100, Ordering::SeqCst);
        let refused = |number| {
            let error = store.claim_name(&name(number), Peer::Own).expect_err("refused");
            assert!(matches!(error, NameError::Store(StoreError::DiskFull(_) | StoreError::Io { .. })), "{error}");
        };
        (0..3).for_each(|_| refused(1));
        // Each of several at once hears it.
        std::thread::scope(|scope| (2..10).for_each(|number| drop(scope.spawn(move || refused(number)))));
        room.store(u64::MAX, Ordering::SeqCst);
        assert_eq!(store.names().expect("readable").len(), 3, "the service, its /96 and its authority, nothing else");
        store.claim_name(&name(1), Peer::Own).expect("written");
        assert_eq!(store.names().expect("readable").len(), 5);
    }
}
