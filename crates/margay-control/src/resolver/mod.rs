//! Who serves a name, asked of others than this host's routers: DNS, a DHT, another router's registry, a file (DESIGN
//! §8).
//!
//! What a resolver says is a hint. It costs a connect at most: whoever answers there proves its right to the name by
//! certificates when the connection is set up, as everywhere else. Each resolver is bounded in time, in questions at
//! once, and in what it takes for an answer.

pub mod dht;
pub mod dht_record;
pub mod dns;
pub mod dns_record;
pub mod dns_update;
pub mod file;
pub mod registry;
pub mod writer;

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::{Duration, Instant as Moment};

use margay_core::key::HostId;
use margay_core::name::{Prefix, ServiceId};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

/// Instances of one answer; the rest is left out.
pub const INSTANCES_MAX: usize = margay_core::delay::HOPS_MAX;
/// How long one question may take unless the section says otherwise.
pub const TIMEOUT: Duration = Duration::from_millis(1000);
/// Questions of one resolver that are under way at once; further ones wait within their time.
const PARALLEL: usize = 64;
/// Names whose last answer is spoken of; the oldest are forgotten.
const REMEMBERED_MAX: usize = 1024;

/// What is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The name's bits.
    pub service: ServiceId,
    /// As people write it, where this host knows.
    pub written: Option<String>,
}

/// An instance that a resolver knows of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Where it hears SAL.
    pub address: SocketAddr,
    /// Its host, where the resolver says.
    pub host: Option<HostId>,
    /// Its share; not zero.
    pub weight: u32,
}

/// What a resolver has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// For which names it holds.
    pub prefix: Prefix,
    /// Never empty.
    pub places: Vec<Place>,
    /// How long it holds.
    pub ttl: Duration,
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    /// It has answered: nobody.
    #[error("it knows nobody who serves the name")]
    Nobody,
    /// It cannot be asked of this name.
    #[error("{0}")]
    Unfit(String),
    /// It has not answered in time.
    #[error("it did not answer within {} ms", .0.as_millis())]
    TimedOut(Duration),
    /// It has failed.
    #[error("{0}")]
    Failed(String),
}

/// The answer to a question, when it comes.
pub type Answering<'a> = Pin<Box<dyn Future<Output = Result<Found, ResolveError>> + Send + 'a>>;

/// Somebody who can be asked.
pub trait Resolve: Send + Sync + 'static {
    /// What it is: `static`, `registry`, `dns`, `dht`.
    fn kind(&self) -> &'static str;

    /// Who serves the name?
    fn resolve<'a>(&'a self, wanted: &'a Wanted) -> Answering<'a>;

    /// What is wrong with it now, apart from single names.
    fn trouble(&self) -> Option<String> {
        None
    }
}

/// What a resolver did since the agent's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Questions.
    pub asked: u64,
    /// Of these, answered with somebody who serves the name.
    pub answered: u64,
    /// Of these, without: nobody, or no answer.
    pub failed: u64,
    /// Milliseconds that all of them took.
    pub ms: u64,
}

/// The last answer about one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Last {
    /// When it came.
    pub at: Moment,
    /// How long it took.
    pub took: Duration,
    /// How many instances; or why none.
    pub what: Result<usize, ResolveError>,
}

#[derive(Default)]
struct Log {
    figures: Figures,
    by_service: HashMap<ServiceId, Last>,
    order: VecDeque<ServiceId>,
}

impl Log {
    fn note(&mut self, service: ServiceId, last: Last) {
        self.figures.asked += 1;
        *(if last.what.is_ok() { &mut self.figures.answered } else { &mut self.figures.failed }) += 1;
        self.figures.ms += u64::try_from(last.took.as_millis()).unwrap_or(u64::MAX);
        if self.by_service.insert(service, last).is_none() {
            self.order.push_back(service);
        }
        while self.order.len() > REMEMBERED_MAX {
            if let Some(oldest) = self.order.pop_front() {
                self.by_service.remove(&oldest);
            }
        }
    }
}

/// A resolver with its name, its bounds and what it did.
pub struct Resolver {
    name: String,
    inner: Box<dyn Resolve>,
    timeout: Duration,
    places: Semaphore,
    log: Mutex<Log>,
}

impl Resolver {
    /// `timeout`: for one question, the wait for its turn included.
    pub fn new(name: String, timeout: Duration, inner: Box<dyn Resolve>) -> Self {
        Self { name, inner, timeout, places: Semaphore::new(PARALLEL), log: Mutex::default() }
    }

    /// As configured.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it is.
    pub fn kind(&self) -> &'static str {
        self.inner.kind()
    }

    /// What is wrong with it now, apart from single names.
    pub fn trouble(&self) -> Option<String> {
        self.inner.trouble()
    }

    /// Who serves the name?
    ///
    /// # Errors
    ///
    /// Nobody, as far as it knows; or it cannot say, or not in time.
    pub async fn ask(&self, wanted: &Wanted) -> Result<Found, ResolveError> {
        let begun = Moment::now();
        let asked = async {
            // Never closed.
            let _place = self.places.acquire().await;
            self.inner.resolve(wanted).await
        };
        let found = match tokio::time::timeout(self.timeout, asked).await {
            Err(_) => Err(ResolveError::TimedOut(self.timeout)),
            Ok(Ok(found)) if found.places.is_empty() => Err(ResolveError::Nobody),
            Ok(Ok(mut found)) => {
                found.places.truncate(INSTANCES_MAX);
                Ok(found)
            }
            Ok(Err(error)) => Err(error),
        };
        let what = found.as_ref().map(|found| found.places.len()).map_err(Clone::clone);
        self.log.lock().note(wanted.service, Last { at: Moment::now(), took: begun.elapsed(), what });
        found
    }

    /// What it did since the agent's start.
    pub fn figures(&self) -> Figures {
        self.log.lock().figures
    }

    /// What it said last of a name.
    pub fn last(&self, service: &ServiceId) -> Option<Last> {
        self.log.lock().by_service.get(service).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Slow(Duration);

    impl Resolve for Slow {
        fn kind(&self) -> &'static str {
            "slow"
        }

        fn resolve<'a>(&'a self, wanted: &'a Wanted) -> Answering<'a> {
            Box::pin(async move {
                tokio::time::sleep(self.0).await;
                let place = Place { address: ([10, 0, 0, 1], 54324).into(), host: None, weight: 1 };
                let places = vec![place; INSTANCES_MAX + 1];
                Ok(Found { prefix: wanted.service.into(), places, ttl: Duration::from_secs(1) })
            })
        }
    }

    fn wanted(n: u8) -> Wanted {
        Wanted { service: ServiceId([n; 32]), written: None }
    }

    #[tokio::test(start_paused = true)]
    async fn time_and_instances_are_bounded_and_every_answer_is_remembered() {
        let (second, millisecond) = (Duration::from_secs(1), Duration::from_millis(1));
        let quick = Resolver::new("quick".to_owned(), second, Box::new(Slow(second - millisecond)));
        assert_eq!(quick.ask(&wanted(1)).await.expect("in time").places.len(), INSTANCES_MAX);
        let slow = Resolver::new("slow".to_owned(), second, Box::new(Slow(second + millisecond)));
        assert_eq!(slow.ask(&wanted(1)).await, Err(ResolveError::TimedOut(second)));
        assert_eq!(slow.figures(), Figures { asked: 1, answered: 0, failed: 1, ms: slow.figures().ms });
        assert_eq!(quick.last(&wanted(1).service).expect("asked").what, Ok(INSTANCES_MAX));
        assert!(quick.last(&wanted(2).service).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn questions_at_once_are_bounded_and_what_waits_too_long_fails() {
        let second = Duration::from_secs(1);
        let resolver = Resolver::new("one".to_owned(), second * 3 / 2, Box::new(Slow(second)));
        let asking: Vec<Wanted> = (0..=PARALLEL).map(|n| wanted(u8::try_from(n).expect("few"))).collect();
        let mut set = tokio::task::JoinSet::new();
        let resolver = std::sync::Arc::new(resolver);
        for wanted in asking {
            let resolver = std::sync::Arc::clone(&resolver);
            set.spawn(async move { resolver.ask(&wanted).await.is_ok() });
        }
        let in_time = set.join_all().await.into_iter().filter(|is_ok| *is_ok).count();
        assert_eq!(in_time, PARALLEL);
    }

    #[test]
    fn what_is_remembered_of_names_is_bounded() {
        let mut log = Log::default();
        let last = || Last { at: Moment::now(), took: Duration::ZERO, what: Ok(1) };
        for n in 0..=REMEMBERED_MAX {
            let mut id = [0; 32];
            id[..8].copy_from_slice(&(n as u64).to_be_bytes());
            log.note(ServiceId(id), last());
        }
        assert_eq!((log.by_service.len(), log.order.len()), (REMEMBERED_MAX, REMEMBERED_MAX));
        assert!(!log.by_service.contains_key(&ServiceId([0; 32])), "the oldest goes");
    }
}
