//! Many connections to a memcached or Redis that ask all the time, several requests at once, and check each answer:
//! whether it is one of a value that was written, and whether anything was done twice.

mod speech;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::host::write_line;
use crate::pump::Dice;
use crate::traffic::now_ms;
use speech::{Outcome, Said, Speech};

/// A line of figures is about so much time.
const SLOT: Duration = Duration::from_millis(100);
/// A request that is not answered after so long is lost.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Answers that took longer are listed one by one.
const SLOW: Duration = Duration::from_millis(20);
/// Keys of one connection, beside its counter.
const KEYS: u32 = 16;
/// Requests that are sent at once.
const AT_ONCE_MAX: u32 = 4;
/// The first few complaints tell as much as all of them.
const ERRORS_MAX: usize = 5;
/// Pause between two turns of a connection.
const PAUSE: Duration = Duration::from_millis(2);

/// What to ask.
#[derive(Clone, Args, Debug)]
pub struct Plan {
    /// Where the server is
    to: SocketAddr,
    /// It is a Redis, and no memcached
    #[arg(long)]
    redis: bool,
    /// How many connections
    #[arg(long)]
    count: u32,
}

/// An answer that took long.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Slow {
    /// The number of the connection, from 0.
    pub connection: u32,
    /// When it was asked, as [`now_ms`] has it.
    pub begun_ms: f64,
    /// How long it took.
    pub took_ms: f64,
}

/// What became of requests in a stretch of time, of all connections together.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Cached {
    /// Its end, as [`now_ms`] has it.
    pub at_ms: f64,
    /// Answers.
    pub answered: u64,
    /// Answers that cannot be those to their requests.
    pub wrong: u64,
    /// Requests that were done more often than they were sent.
    pub duplicated: u64,
    /// Requests that change something, and that were refused since nobody knew whether they were done.
    pub refused_unsafe: u64,
    /// Refused requests that change nothing.
    pub refused_safe: u64,
    /// Requests that were never answered.
    pub lost: u64,
    /// Connections that have ended.
    pub closed: u64,
    /// Answers that took long.
    pub slow: Vec<Slow>,
    /// What was wrong; the first few.
    pub errors: Vec<String>,
}

type Shared = Arc<Mutex<Cached>>;

fn locked(slot: &Shared) -> MutexGuard<'_, Cached> {
    slot.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Asks until the input ends; prints a [`Cached`] as a line of JSON for each stretch of time.
pub async fn ask(plan: Plan) -> Result<()> {
    let slot = Shared::default();
    let is_over = watch::Sender::new(false);
    let mut connections = JoinSet::new();
    for number in 0..plan.count {
        let slot = Arc::clone(&slot);
        let is_over = is_over.subscribe();
        let plan = plan.clone();
        connections.spawn(async move {
            if let Err(error) = Connection::run(number, &plan, &slot, &is_over).await {
                let mut slot = locked(&slot);
                slot.closed += 1;
                note(&mut slot, format!("connection {number}: {error:#}"));
            }
        });
    }
    let mut input = tokio::io::stdin();
    let mut ended = Box::pin(async move { input.read_to_end(&mut Vec::new()).await });
    let mut is_ended = false;
    while !connections.is_empty() {
        tokio::select! {
            _ = &mut ended, if !is_ended => {
                is_ended = true;
                is_over.send_replace(true);
            }
            () = tokio::time::sleep(SLOT) => tell(&slot)?,
            _ = connections.join_next() => {}
        }
    }
    tell(&slot)
}

fn tell(slot: &Shared) -> Result<()> {
    let mut told = std::mem::take(&mut *locked(slot));
    told.at_ms = now_ms();
    write_line(&serde_json::to_string(&told)?)
}

fn note(slot: &mut Cached, error: String) {
    if slot.errors.len() < ERRORS_MAX {
        slot.errors.push(error);
    }
}

/// A request, with what its answer is checked by.
#[derive(Clone, Debug)]
enum Request {
    Get(Vec<u32>),
    Set(u32),
    Delete(u32),
    Increase,
    /// The counter begins anew, at a number that it never had.
    Begin(u64),
}

struct Connection {
    number: u32,
    speech: Speech,
    stream: BufReader<TcpStream>,
    dice: Dice,
    /// By key, the versions that were sent.
    versions: BTreeMap<u32, u64>,
    /// What the counter may be, from the last beginning on.
    counts: BTreeSet<u64>,
    /// The counter's beginnings.
    beginnings: u64,
}

/// Numbers that one beginning of the counter has for itself.
const COUNTS_OF_BEGINNING: u64 = 1_000_000;

fn content(key: &str, version: u64) -> Vec<u8> {
    // Small ones mostly, and some that are more than a datagram.
    let len = if version.is_multiple_of(16) { 9000 } else { 40 + (version * 37) % 500 };
    let unit = format!("{key}={version};");
    unit.bytes().cycle().take(usize::try_from(len).unwrap_or(40)).collect()
}

impl Connection {
    async fn run(number: u32, plan: &Plan, slot: &Shared, is_over: &watch::Receiver<bool>) -> Result<()> {
        let stream = TcpStream::connect(plan.to).await.context("no connection")?;
        stream.set_nodelay(true)?;
        let dice = Dice::new(u64::from(number) + 1);
        let mut this = Self {
            number,
            speech: if plan.redis { Speech::Redis } else { Speech::Memcached },
            stream: BufReader::new(stream),
            dice,
            versions: BTreeMap::new(),
            counts: BTreeSet::new(),
            beginnings: 0,
        };
        while !*is_over.borrow() {
            this.turn(slot).await?;
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    fn key(&self, key: u32) -> String {
        format!("c{}:k{key}", self.number)
    }

    fn counter(&self) -> String {
        format!("c{}:n", self.number)
    }

    fn below(&mut self, bound: u32) -> u32 {
        // Less than a number of 32 bits.
        u32::try_from(self.dice.below(bound as usize)).unwrap_or_default()
    }

    fn choose(&mut self) -> Request {
        match self.below(10) {
            0..4 => {
                let count = 1 + self.below(3);
                Request::Get((0..count).map(|_| self.below(KEYS)).collect())
            }
            4..7 => Request::Set(self.below(KEYS)),
            7 => Request::Delete(self.below(KEYS)),
            _ if self.counts.is_empty() => {
                self.beginnings += 1;
                Request::Begin(self.beginnings * COUNTS_OF_BEGINNING)
            }
            _ => Request::Increase,
        }
    }

    fn said(&mut self, request: &Request) -> Said {
        match request {
            Request::Get(keys) => Said::Get(keys.iter().map(|key| self.key(*key)).collect()),
            Request::Set(key) => {
                let version = self.versions.entry(*key).or_default();
                *version += 1;
                let version = *version;
                let key = self.key(*key);
                let value = content(&key, version);
                Said::Set(key, value)
            }
            Request::Delete(key) => Said::Delete(self.key(*key)),
            Request::Increase => Said::Increase(self.counter()),
            Request::Begin(from) => Said::Set(self.counter(), from.to_string().into_bytes()),
        }
    }

    /// Some requests at once, and their answers.
    async fn turn(&mut self, slot: &Shared) -> Result<()> {
        let count = 1 + self.below(AT_ONCE_MAX);
        let requests: Vec<Request> = (0..count).map(|_| self.choose()).collect();
        let said: Vec<Said> = requests.iter().map(|request| self.said(request)).collect();
        let words: Vec<u8> = said.iter().flat_map(|said| self.speech.say(said)).collect();
        let begun = Instant::now();
        let begun_ms = now_ms();
        self.stream.get_mut().write_all(&words).await.context("cannot send")?;
        for (at, request) in requests.iter().enumerate() {
            let Ok(answer) = timeout(ANSWER_LIMIT, self.speech.hear(&mut self.stream, &said[at])).await else {
                locked(slot).lost += (requests.len() - at) as u64;
                bail!("no answer to {request:?} within {ANSWER_LIMIT:?}");
            };
            let answer = answer?;
            let took = begun.elapsed();
            self.judge(request, answer, slot);
            let mut slot = locked(slot);
            slot.answered += 1;
            if took >= SLOW {
                slot.slow.push(Slow { connection: self.number, begun_ms, took_ms: took.as_secs_f64() * 1e3 });
            }
        }
        Ok(())
    }

    fn judge(&mut self, request: &Request, answer: Outcome, slot: &Shared) {
        let verdict = match (request, answer) {
            (_, Outcome::Refused(line)) => return self.note_refused(request, line, slot),
            (Request::Get(keys), Outcome::Values(values)) => self.judge_values(keys, &values),
            (Request::Set(_), Outcome::Stored) | (Request::Delete(_), Outcome::Deleted(_)) => Ok(()),
            (Request::Begin(from), Outcome::Stored) => {
                self.counts = BTreeSet::from([*from]);
                Ok(())
            }
            // Its key has another server, or that one is new.
            (Request::Increase, Outcome::NoCount) => {
                self.counts.clear();
                Ok(())
            }
            (Request::Increase, Outcome::Count(count)) => {
                self.judge_count(count, slot);
                Ok(())
            }
            (_, answer) => Err(format!("{answer:?}")),
        };
        if let Err(why) = verdict {
            let mut slot = locked(slot);
            slot.wrong += 1;
            note(&mut slot, format!("{request:?}: {why}"));
        }
    }

    fn note_refused(&mut self, request: &Request, line: String, slot: &Shared) {
        let mut slot = locked(slot);
        if matches!(request, Request::Get(_)) {
            slot.refused_safe += 1;
        } else {
            slot.refused_unsafe += 1;
        }
        if matches!(request, Request::Increase) {
            // It may be done, or not.
            let done: Vec<u64> = self.counts.last().map(|count| count + 1).into_iter().collect();
            self.counts.extend(done);
        }
        note(&mut slot, line);
    }

    fn judge_values(&self, keys: &[u32], values: &[(String, Vec<u8>)]) -> Result<(), String> {
        for (key, value) in values {
            let asked =
                keys.iter().find(|asked| self.key(**asked) == *key).ok_or(format!("{key} was not asked for"))?;
            let latest = self.versions.get(asked).copied().unwrap_or_default();
            let text = String::from_utf8_lossy(&value[..value.len().min(40)]);
            let version = text.split_once('=').and_then(|(_, rest)| rest.split_once(';')?.0.parse::<u64>().ok());
            match version {
                Some(version) if version <= latest && content(key, version) == *value => {}
                _ => return Err(format!("{key} has {text}, and version {latest} was the latest")),
            }
        }
        Ok(())
    }

    fn judge_count(&mut self, count: u64, slot: &Shared) {
        let is_possible = count > 0 && self.counts.contains(&(count - 1));
        // An earlier beginning may be back, with a server that had it.
        let is_old = count / COUNTS_OF_BEGINNING < self.beginnings;
        if is_possible {
            self.counts.insert(count);
            return;
        }
        if !is_old {
            let mut slot = locked(slot);
            slot.duplicated += 1;
            note(&mut slot, format!("the counter is {count}, after {:?}", self.counts.last()));
        }
        self.counts.clear();
    }
}
