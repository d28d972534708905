//! What is registered here is written where others' resolvers look for it: which names, what of them is written
//! already, and what is to be tried again.
//!
//! A name is written again whenever who serves it changes, and now and then without, since records may get lost. It is
//! taken away when nobody serves it any more. Names that were written are kept on disk, so that a restart takes away
//! what has gone meanwhile.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant as Moment};

use margay_core::name::{Name, Prefix};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{sleep_until, timeout};

use super::Place;
use crate::StateDir;
use crate::quantity::count_of;

/// Names that one resolver is written; further ones are left out, and it is said.
const NAMES_MAX: usize = 4096;
/// Between two looks at who serves what: registrations that come together are one look.
const LOOK_PAUSE: Duration = Duration::from_secs(1);
/// One writing may take so long.
const TIMEOUT: Duration = Duration::from_secs(5);
/// What has not changed is written again after so long.
pub const AGAIN: Duration = Duration::from_secs(600);
/// The first try after a failure; each later one comes twice as late.
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// After a start, whoever registers has so long before the names of an earlier start are taken away.
const SETTLE: Duration = Duration::from_secs(15);

/// A name, and who serves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The name.
    pub name: Name,
    /// Who serves it, in order; nobody: it is to be taken away.
    pub places: Vec<Place>,
}

/// The end of a writing; an error is for people.
pub type Writing<'a> = Pin<Box<dyn Future<Output = Result<(), String>> + Send + 'a>>;

/// Where names are written.
pub trait Write: Send + Sync + 'static {
    /// Whether such a name can be written there at all.
    fn takes(&self, _name: &Name) -> bool {
        true
    }

    /// Makes it say what `entry` says. `before` is what was written last, as far as that is known.
    fn write<'a>(&'a self, entry: &'a Entry, before: &'a [Place]) -> Writing<'a>;
}

#[derive(Debug)]
struct State {
    entry: Entry,
    before: Vec<Place>,
    due: Moment,
    tries: u32,
    error: Option<String>,
}

/// What is written, and what is to be.
#[derive(Debug, Default)]
struct Ledger {
    names: BTreeMap<Prefix, State>,
    left_out: usize,
    written: u64,
    failed: u64,
}

impl Ledger {
    /// Names of an earlier start.
    fn remember(&mut self, now: Moment, names: impl IntoIterator<Item = Name>) {
        for name in names.into_iter().take(NAMES_MAX) {
            let entry = Entry { name, places: Vec::new() };
            let state = State { entry, before: Vec::new(), due: now + SETTLE, tries: 0, error: None };
            self.names.insert(state.entry.name.prefix(), state);
        }
    }

    /// All that is to be written. True if there are other names than before.
    fn want(&mut self, now: Moment, wanted: Vec<Entry>) -> bool {
        let (mut is_other, mut seen) = (false, Vec::new());
        self.left_out = 0;
        for entry in wanted {
            let prefix = entry.name.prefix();
            seen.push(prefix);
            if let Some(state) = self.names.get_mut(&prefix) {
                if state.entry != entry {
                    (state.entry, state.due, state.tries) = (entry, now, 0);
                }
            } else if self.names.len() < NAMES_MAX {
                is_other = true;
                self.names.insert(prefix, State { entry, before: Vec::new(), due: now, tries: 0, error: None });
            } else {
                self.left_out += 1;
            }
        }
        seen.sort_unstable();
        for (prefix, state) in &mut self.names {
            if !state.entry.places.is_empty() && seen.binary_search(prefix).is_err() {
                state.entry.places.clear();
                (state.due, state.tries) = (now, 0);
            }
        }
        is_other
    }

    /// Something that is due.
    fn next(&self, now: Moment) -> Option<(Entry, Vec<Place>)> {
        let due = self.names.values().filter(|state| state.due <= now).min_by_key(|state| state.due)?;
        Some((due.entry.clone(), due.before.clone()))
    }

    /// When something will be due.
    fn due(&self) -> Option<Moment> {
        self.names.values().map(|state| state.due).min()
    }

    /// What became of it. True if a name is gone.
    fn done(&mut self, now: Moment, entry: Entry, result: Result<(), String>) -> bool {
        *(if result.is_ok() { &mut self.written } else { &mut self.failed }) += 1;
        let prefix = entry.name.prefix();
        let Some(state) = self.names.get_mut(&prefix) else { return false };
        match result {
            Ok(()) => {
                (state.tries, state.error, state.before) = (0, None, entry.places);
                // Nothing has changed meanwhile.
                if state.entry.places == state.before {
                    state.due = now + AGAIN;
                }
                let is_gone = state.entry.places.is_empty() && state.before.is_empty();
                if is_gone {
                    self.names.remove(&prefix);
                }
                is_gone
            }
            Err(error) => {
                let wait = RETRY_MIN.saturating_mul(1 << state.tries.min(6)).min(RETRY_MAX);
                state.tries += 1;
                (state.due, state.error) = (now + wait, Some(error));
                false
            }
        }
    }

    fn report(&self) -> Report {
        let mut failing = self.names.values().filter_map(|state| Some((&state.entry.name, state.error.as_ref()?)));
        let trouble = failing.clone().next().map(|(name, error)| format!("{name}: {error}"));
        let left_out =
            (self.left_out > 0).then(|| format!("left out: {}; {NAMES_MAX} at most", count_of(self.left_out, "name")));
        Report {
            names: self.names.values().filter(|state| !state.before.is_empty()).count(),
            failing: failing.by_ref().count(),
            written: self.written,
            failed: self.failed,
            trouble: trouble.or(left_out),
        }
    }

    fn text(&self) -> String {
        self.names.values().map(|state| format!("{}\n", state.entry.name.written())).collect()
    }
}

/// How it goes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Names that are written.
    pub names: usize,
    /// Names whose last try has failed.
    pub failing: usize,
    /// Writings that came about, since the agent's start.
    pub written: u64,
    /// Writings that did not.
    pub failed: u64,
    /// What is wrong.
    pub trouble: Option<String>,
}

/// Keeps one place in step with what is registered.
pub struct Writer {
    to: Box<dyn Write>,
    ledger: Mutex<Ledger>,
    news: Notify,
    dir: StateDir,
    file: String,
}

impl Writer {
    /// `name`: that of the resolver; the names that it was given lie in a file called by it.
    pub fn new(name: &str, to: Box<dyn Write>, dir: StateDir) -> Self {
        let file = format!("written-{name}");
        let mut ledger = Ledger::default();
        match dir.read(&file) {
            Ok(text) => {
                let text = text.unwrap_or_default();
                ledger.remember(now(), text.lines().filter_map(|line| line.parse().ok()));
            }
            Err(error) => tracing::warn!(%error, "what was written before the agent's start is not known"),
        }
        Self { to, ledger: Mutex::new(ledger), news: Notify::new(), dir, file }
    }

    /// How it goes.
    pub fn report(&self) -> Report {
        self.ledger.lock().report()
    }

    /// Somebody else may serve something, or be reached elsewhere.
    pub fn look(&self) {
        self.news.notify_one();
    }

    /// Looks at who serves what whenever [`Self::look`] says so, and writes what is due, until it is aborted.
    pub async fn run(&self, wanted: Arc<dyn Fn() -> Vec<Entry> + Send + Sync>) {
        loop {
            let looked = tokio::time::Instant::now();
            let entries = wanted().into_iter().filter(|entry| self.to.takes(&entry.name)).collect();
            let is_other = self.ledger.lock().want(looked.into_std(), entries);
            if is_other {
                self.keep().await;
            }
            while self.write_next(looked + LOOK_PAUSE).await.is_some() {}
        }
    }

    /// Writes something once it is due. Nothing if it is to be looked again first, which is at `next_look` at the
    /// earliest.
    async fn write_next(&self, next_look: tokio::time::Instant) -> Option<()> {
        let due = self.ledger.lock().due();
        let is_due = async {
            match due {
                Some(due) => sleep_until(due.into()).await,
                None => std::future::pending().await,
            }
        };
        let has_news = async {
            sleep_until(next_look).await;
            self.news.notified().await;
        };
        tokio::select! {
            // However many writings fail, what has changed meanwhile is seen.
            biased;
            () = has_news => return None,
            () = is_due => {}
        }
        let (entry, before) = self.ledger.lock().next(now())?;
        let writing = timeout(TIMEOUT, self.to.write(&entry, &before)).await;
        let result = writing.unwrap_or_else(|_| Err(format!("it did not answer within {} s", TIMEOUT.as_secs())));
        if let Err(error) = &result {
            tracing::warn!(name = %entry.name, %error, "not written; it is tried again");
        }
        let is_gone = self.ledger.lock().done(now(), entry, result);
        if is_gone {
            self.keep().await;
        }
        Some(())
    }

    async fn keep(&self) {
        let (text, dir, file) = (self.ledger.lock().text(), self.dir.clone(), self.file.clone());
        let kept =
            tokio::task::spawn_blocking(move || dir.write(&file, text.as_bytes()).map_err(|error| error.to_string()));
        if let Err(error) = kept.await.unwrap_or_else(|error| Err(error.to_string())) {
            tracing::warn!(
                error,
                "which names are written is not kept: a restart will not take away what is gone then"
            );
        }
    }
}

/// By the clock that waits go by.
fn now() -> Moment {
    tokio::time::Instant::now().into_std()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::mpsc;

    use super::*;

    fn entry(name: &str, hosts: &[u8]) -> Entry {
        let place = |n: &u8| Place { address: ([10, 0, 0, *n], 54324).into(), host: None, weight: 1 };
        Entry { name: name.parse().expect("literal"), places: hosts.iter().map(place).collect() }
    }

    fn after(begin: Moment, seconds: u64) -> Moment {
        begin + Duration::from_secs(seconds)
    }

    #[test]
    fn what_changes_is_written_once_and_what_goes_is_taken_away() {
        let (mut ledger, begin) = (Ledger::default(), Moment::now());
        assert!(ledger.want(begin, vec![entry("web.shop", &[1])]));
        assert_eq!(ledger.next(begin), Some((entry("web.shop", &[1]), vec![])));
        assert!(!ledger.done(begin, entry("web.shop", &[1]), Ok(())));
        assert!(!ledger.want(begin, vec![entry("web.shop", &[1])]));
        assert_eq!(ledger.next(after(begin, 599)), None, "nothing has changed");
        assert!(ledger.next(after(begin, 600)).is_some(), "records may get lost");
        ledger.want(begin, vec![entry("web.shop", &[1, 2])]);
        assert_eq!(ledger.next(begin), Some((entry("web.shop", &[1, 2]), entry("a.b", &[1]).places)));
        ledger.want(begin, vec![]);
        // It has changed while it was being written.
        assert!(!ledger.done(begin, entry("web.shop", &[1, 2]), Ok(())));
        assert_eq!(ledger.next(begin), Some((entry("web.shop", &[]), entry("a.b", &[1, 2]).places)));
        assert!(ledger.done(begin, entry("web.shop", &[]), Ok(())));
        assert_eq!((ledger.next(after(begin, 9999)), ledger.report().written), (None, 3));
    }

    #[test]
    fn failures_are_tried_again_later_and_later() {
        let (mut ledger, begin) = (Ledger::default(), Moment::now());
        ledger.want(begin, vec![entry("web.shop", &[1])]);
        let mut now = begin;
        let mut waits = Vec::new();
        for _ in 0..8 {
            ledger.done(now, entry("web.shop", &[1]), Err("refused".to_owned()));
            let wait = (0..100).find(|seconds| ledger.next(after(now, *seconds)).is_some()).expect("some time");
            waits.push(wait);
            now = after(now, wait);
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60, 60]);
        let report = ledger.report();
        assert_eq!((report.names, report.failing, report.failed), (0, 1, 8));
        assert_eq!(report.trouble.as_deref(), Some("web.shop: refused"));
        ledger.want(now, vec![entry("web.shop", &[2])]);
        assert!(ledger.next(now).is_some(), "what has changed is tried at once");
    }

    #[test]
    fn names_of_an_earlier_start_are_taken_away_once_everybody_had_time_to_register() {
        let dir = tempfile::tempdir().expect("a directory");
        let dir = StateDir::open(dir.path().join("state")).expect("made");
        dir.write("written-corp", b"web.shop\ngone.shop\n").expect("written");
        struct Nowhere;
        impl Write for Nowhere {
            fn write<'a>(&'a self, _: &'a Entry, _: &'a [Place]) -> Writing<'a> {
                Box::pin(async { Ok(()) })
            }
        }
        let begin = Moment::now();
        let writer = Writer::new("corp", Box::new(Nowhere), dir);
        let mut ledger = writer.ledger.lock();
        ledger.want(begin, vec![entry("web.shop", &[1])]);
        assert_eq!(ledger.next(begin).map(|(entry, _)| entry), Some(entry("web.shop", &[1])));
        ledger.done(begin, entry("web.shop", &[1]), Ok(()));
        assert_eq!(ledger.next(after(begin, 14)), None);
        assert_eq!(ledger.next(after(begin, 16)).map(|(entry, _)| entry), Some(entry("gone.shop", &[])));
        assert!(ledger.done(begin, entry("gone.shop", &[]), Ok(())));
        assert_eq!(ledger.text(), "web.shop\n");
    }

    /// Says when it was asked to write, in seconds, and what.
    struct Told(Moment, mpsc::UnboundedSender<(u64, usize)>);

    impl Write for Told {
        fn write<'a>(&'a self, entry: &'a Entry, _: &'a [Place]) -> Writing<'a> {
            let told = self.1.send((now().duration_since(self.0).as_secs(), entry.places.len()));
            Box::pin(async move { told.map_err(|error| error.to_string()) })
        }
    }

    #[tokio::test(start_paused = true)]
    async fn it_looks_when_there_is_news_and_not_otherwise_and_news_that_come_together_are_one_look() {
        let dir = tempfile::tempdir().expect("a directory");
        let dir = StateDir::open(dir.path().join("state")).expect("made");
        let (sender, mut written) = mpsc::unbounded_channel();
        let writer = Arc::new(Writer::new("corp", Box::new(Told(now(), sender)), dir));
        let (looks, hosts) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(1)));
        let wanted = {
            let (looks, hosts) = (Arc::clone(&looks), Arc::clone(&hosts));
            move || {
                looks.fetch_add(1, Ordering::Relaxed);
                vec![entry("web.shop", &[1, 2, 3, 4, 5][..hosts.load(Ordering::Relaxed)])]
            }
        };
        let running = tokio::spawn({
            let writer = Arc::clone(&writer);
            async move { writer.run(Arc::new(wanted)).await }
        });
        assert_eq!(written.recv().await, Some((0, 1)));
        assert_eq!(written.recv().await, Some((600, 1)), "records may get lost");
        assert_eq!(looks.load(Ordering::Relaxed), 1, "nothing has changed");
        for now in 2..=5 {
            hosts.store(now, Ordering::Relaxed);
            writer.look();
            tokio::task::yield_now().await;
        }
        let mut last = (0, 0);
        while last.1 != 5 {
            last = written.recv().await.expect("it goes on");
        }
        assert!(last.0 <= 601, "{last:?}");
        assert!(
            looks.load(Ordering::Relaxed) <= 3,
            "four changes at one moment: now, and what was not seen a second later"
        );
        running.abort();
    }

    #[test]
    fn names_beyond_the_bound_are_left_out_and_it_is_said() {
        let mut ledger = Ledger::default();
        let all = (0..NAMES_MAX + 3).map(|n| entry(&format!("s{n}.shop"), &[1])).collect();
        ledger.want(Moment::now(), all);
        assert_eq!((ledger.names.len(), ledger.left_out), (NAMES_MAX, 3));
        assert!(ledger.report().trouble.expect("said").contains("left out: 3 names"));
    }
}
