//! What a router writes down of those who register and those whom it refuses. It waits for a moment, and what is the
//! same again is counted: a flood costs the disk a write now and then, and pushes little out of the log.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Duration, sleep};

use crate::Clock;
use crate::store::{AuditEntry, Store};

/// From an entry to its writing: those of that time are one transaction.
const PAUSE: Duration = Duration::from_millis(250);
/// Different entries of one kind that are written at once; what comes beyond is only counted.
const DIFFERENT_MAX: usize = 64;
const OTHERS: &str = "others";

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// A host serves a name, or on other terms.
    Register,
    /// A stream came to nothing: nobody knows whose it was.
    StreamRefused,
    /// A host was not let in.
    HostRefused,
    /// A host that was let in may not serve a name.
    RegisterRefused,
    /// A host that was let in said something that makes no sense, or that it may not ask.
    MessageRefused,
    /// A router leads to names, by its own word.
    Announce,
    /// It may not say so.
    AnnounceRefused,
}

impl Act {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Register,
        Self::StreamRefused,
        Self::HostRefused,
        Self::RegisterRefused,
        Self::MessageRefused,
        Self::Announce,
        Self::AnnounceRefused,
    ];

    /// As the log and metrics have it.
    pub fn label(self) -> &'static str {
        match self {
            Self::Register => "register",
            Self::StreamRefused => "stream-refused",
            Self::HostRefused => "host-refused",
            Self::RegisterRefused => "register-refused",
            Self::MessageRefused => "message-refused",
            Self::Announce => "announce",
            Self::AnnounceRefused => "announce-refused",
        }
    }
}

/// What waits to be written.
pub struct Ledger {
    store: Arc<Store>,
    clock: Clock,
    waiting: Mutex<Vec<AuditEntry>>,
    counts: [AtomicU64; Act::ALL.len()],
    has_more: Notify,
}

impl Ledger {
    /// An empty one.
    pub fn new(store: Arc<Store>, clock: Clock) -> Self {
        Self { store, clock, waiting: Mutex::default(), counts: Default::default(), has_more: Notify::new() }
    }

    /// Something happened to `subject`, a host or an address.
    pub fn note(&self, act: Act, subject: impl ToString, detail: impl ToString) {
        self.counts[act as usize].fetch_add(1, Ordering::Relaxed);
        let entry = AuditEntry::once(self.clock.unix_s(), act.label(), subject.to_string(), detail.to_string());
        add(&mut self.waiting.lock(), entry);
        self.has_more.notify_one();
    }

    /// How often each happened.
    pub fn counts(&self) -> [(&'static str, u64); Act::ALL.len()] {
        Act::ALL.map(|act| (act.label(), self.counts[act as usize].load(Ordering::Relaxed)))
    }

    /// Writes what comes, until it is aborted.
    pub async fn keep(self: Arc<Self>) {
        loop {
            self.has_more.notified().await;
            sleep(PAUSE).await;
            Arc::clone(&self).flush().await;
        }
    }

    /// Writes what waits. What the disk refuses waits on, for the next entry's time.
    pub async fn flush(self: Arc<Self>) {
        let written = tokio::task::spawn_blocking(move || {
            let entries = std::mem::take(&mut *self.waiting.lock());
            if entries.is_empty() {
                return;
            }
            if let Err(error) = self.store.note_all(&entries) {
                tracing::warn!(%error, "the audit log is not written");
                let mut waiting = self.waiting.lock();
                let later = std::mem::replace(&mut *waiting, entries);
                later.into_iter().for_each(|entry| add(&mut waiting, entry));
            }
        });
        if written.await.is_err() {
            tracing::error!("the audit log ended badly");
        }
    }
}

/// Counts what is there already, or has no room.
fn add(waiting: &mut Vec<AuditEntry>, entry: AuditEntry) {
    let same = |known: &&mut AuditEntry, subject: &str, detail: &str| {
        known.act == entry.act && known.subject == subject && known.detail == detail
    };
    if let Some(known) = waiting.iter_mut().find(|known| same(known, &entry.subject, &entry.detail)) {
        known.count += entry.count;
        return;
    }
    if waiting.iter().filter(|known| known.act == entry.act).count() < DIFFERENT_MAX {
        waiting.push(entry);
        return;
    }
    const DETAIL: &str = "more at once than are listed one by one";
    match waiting.iter_mut().find(|known| same(known, OTHERS, DETAIL)) {
        Some(others) => others.count += entry.count,
        None => waiting.push(AuditEntry { subject: OTHERS.to_owned(), detail: DETAIL.to_owned(), ..entry }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StateDir;

    #[tokio::test]
    async fn the_same_again_is_counted_and_a_flood_is_summed_up() {
        let base = tempfile::tempdir().expect("a directory");
        let dir = StateDir::open(base.path().join("s")).expect("made");
        let store = Arc::new(Store::open(&dir).expect("opened"));
        let ledger = Arc::new(Ledger::new(Arc::clone(&store), Clock::from_fn(|| 100)));
        for number in 0..1000 {
            ledger.note(Act::HostRefused, "one", "no token");
            ledger.note(Act::StreamRefused, format!("10.0.0.{number}"), "garbage");
        }
        ledger.note(Act::Register, "web1", "web.shop");
        assert!(store.audit(10).expect("readable").is_empty(), "nothing is written yet");
        Arc::clone(&ledger).flush().await;
        let written = store.audit(usize::MAX).expect("readable");
        let of = |act: Act| written.iter().filter(move |entry| entry.act == act.label());
        assert_eq!(of(Act::HostRefused).map(|entry| entry.count).collect::<Vec<_>>(), [1000]);
        assert_eq!(of(Act::StreamRefused).count(), DIFFERENT_MAX + 1);
        assert_eq!(of(Act::StreamRefused).map(|entry| entry.count).sum::<u64>(), 1000, "each is in the sum");
        assert_eq!(of(Act::Register).count(), 1);
        assert_eq!(ledger.counts()[1], ("stream-refused", 1000));
    }
}
