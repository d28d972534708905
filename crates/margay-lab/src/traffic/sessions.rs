//! Many connections to an `upgrading-server` that talk all the time: lines at uneven times, some of them in two pieces,
//! whether the answers to those before have come or not. Each answer is checked.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::{Notify, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::host::write_line;
use crate::pump::Dice;
use crate::traffic::resolve;
use crate::traffic::upgrading::read_head;

/// Connections that are being set up at once.
const OPENING_MAX: usize = 128;
const CONNECT_LIMIT: Duration = Duration::from_secs(20);
/// An answer that takes longer does not come.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);
/// After the end of the input: with the last answer, and the server's end.
const END_LIMIT: Duration = Duration::from_secs(45);
/// One of so many lines is sent in two pieces.
const IN_PIECES: usize = 8;
/// The first few complaints tell as much as all of them.
const ERRORS_MAX: usize = 3;
const UPGRADE: &str = "GET / HTTP/1.1\r\nHost: lines\r\nUpgrade: lines\r\nConnection: Upgrade\r\n\r\n";

/// What the connections have to say, all together.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Talked {
    /// Connections that have not ended by themselves.
    pub open: usize,
    /// Those of them that nobody has answered for too long.
    pub hung: usize,
    /// Answers.
    pub answers: u64,
    /// Answers that were not those to the lines that were sent.
    pub wrong: u64,
    /// What was wrong, and why connections have ended; the first few.
    pub errors: Vec<String>,
    /// The longest time that each connection that is open has waited for an answer since it was asked last.
    pub waits_ms: Vec<f64>,
}

/// What to talk to, and how much.
#[derive(Args, Debug)]
pub struct Plan {
    /// Server's name or address
    host: String,
    /// Server's port
    port: u16,
    /// How many connections
    #[arg(long)]
    count: usize,
    /// Time between two lines of a connection, more or less
    #[arg(long)]
    every_ms: u64,
    /// Ask for an upgrade of HTTP first, as a client of WebSockets does
    #[arg(long)]
    upgrade: bool,
}

/// A line that was sent and not answered.
struct Due {
    answer: String,
    /// None while its second piece is not sent.
    sent_at: Option<Instant>,
    /// In which round it was sent.
    round: u64,
}

/// What is known of one connection.
#[derive(Default)]
struct Entry {
    /// When the oldest line without an answer was sent.
    waits_since: Option<Instant>,
    longest_ms: f64,
    /// The last round in which a line of it was answered.
    proven: u64,
    lost: bool,
}

#[derive(Default)]
struct Tally {
    entries: Vec<Entry>,
    answers: u64,
    wrong: u64,
    errors: Vec<String>,
    round: u64,
    /// Connections that are not proven in this round.
    left: usize,
}

impl Tally {
    fn complain(&mut self, error: String) {
        if self.errors.len() < ERRORS_MAX {
            self.errors.push(error);
        }
    }

    /// Counts a connection that has come through the round, or to its end.
    fn settle(&mut self, number: usize) {
        let round = self.round;
        let entry = &mut self.entries[number];
        if entry.proven < round {
            entry.proven = round;
            self.left -= 1;
        }
    }
}

/// What is known of all connections.
struct Book {
    tally: Mutex<Tally>,
    /// Told when none is left in a round.
    proven: Notify,
}

impl Book {
    fn new(count: usize) -> Self {
        let entries = (0..count).map(|_| Entry::default()).collect();
        Self { tally: Mutex::new(Tally { entries, ..Tally::default() }), proven: Notify::new() }
    }

    fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin_round(&self) {
        let mut tally = self.tally();
        tally.round += 1;
        tally.left = tally.entries.iter().filter(|entry| !entry.lost).count();
    }

    /// Waits until each connection is answered a line that it sends after this, or has ended. Those that hang stay.
    async fn prove(&self) {
        self.begin_round();
        let all = async {
            while self.tally().left > 0 {
                self.proven.notified().await;
            }
        };
        // Those are counted.
        let _ = timeout(ANSWER_LIMIT, all).await;
    }

    /// What has come to a connection is the answer that was due, or is not.
    fn hear(&self, number: usize, text: &str, due: Option<Due>) {
        let mut tally = self.tally();
        tally.answers += 1;
        let sent_at = due.as_ref().filter(|due| due.answer == text).and_then(|due| due.sent_at);
        let Some(sent_at) = sent_at else {
            tally.wrong += 1;
            let wanted = due.map(|due| due.answer).unwrap_or_default();
            return tally.complain(format!("connection {number}: {text:?} came, not {wanted:?}"));
        };
        let waited_ms = sent_at.elapsed().as_secs_f64() * 1e3;
        let entry = &mut tally.entries[number];
        entry.longest_ms = entry.longest_ms.max(waited_ms);
        if due.is_some_and(|due| due.round == tally.round) {
            tally.settle(number);
        }
        self.notify(&tally);
    }

    fn wait_since(&self, number: usize, since: Option<Instant>) {
        self.tally().entries[number].waits_since = since;
    }

    fn lose(&self, number: usize, error: &anyhow::Error) {
        let mut tally = self.tally();
        tally.entries[number].lost = true;
        tally.complain(format!("connection {number}: {error:#}"));
        tally.settle(number);
        self.notify(&tally);
    }

    fn notify(&self, tally: &Tally) {
        if tally.left == 0 {
            self.proven.notify_one();
        }
    }

    /// What there is to say since this was asked last.
    fn tell(&self) -> Talked {
        let mut tally = self.tally();
        let mut waits_ms = Vec::new();
        for entry in tally.entries.iter_mut().filter(|entry| !entry.lost) {
            let waits_ms_now = entry.waits_since.map_or(0.0, |since| since.elapsed().as_secs_f64() * 1e3);
            waits_ms.push(entry.longest_ms.max(waits_ms_now));
            entry.longest_ms = 0.0;
        }
        let Tally { answers, wrong, left: hung, .. } = *tally;
        Talked { open: waits_ms.len(), hung, answers, wrong, errors: tally.errors.clone(), waits_ms }
    }
}

/// Opens connections and lets them talk. When each was answered once, and then for each line of input, when each was
/// answered once more, prints a [`Talked`] as a line of JSON; and a last one at the end of the input, when all are
/// closed in order.
pub async fn keep_talking(plan: Plan) -> Result<()> {
    let address = resolve(&plan.host, plan.port).await?;
    let plan = Arc::new(plan);
    let book = Arc::new(Book::new(plan.count));
    let opening = Arc::new(Semaphore::new(OPENING_MAX));
    let (ending, over) = watch::channel(());
    let mut all = JoinSet::new();
    for number in 0..plan.count {
        let plan = Arc::clone(&plan);
        let book = Arc::clone(&book);
        let opening = Arc::clone(&opening);
        let over = over.clone();
        all.spawn(async move {
            if let Err(error) = hold(number, address, &plan, &opening, &book, over).await {
                book.lose(number, &error);
            }
        });
    }
    let mut orders = BufReader::new(tokio::io::stdin()).lines();
    loop {
        book.prove().await;
        write_line(&serde_json::to_string(&book.tell())?)?;
        if orders.next_line().await.context("cannot read the input")?.is_none() {
            break;
        }
    }
    drop(ending);
    let closing = async {
        while let Some(ended) = all.join_next().await {
            ended.context("a connection's task has broken down")?;
        }
        anyhow::Ok(())
    };
    timeout(END_LIMIT, closing).await.context("connections that do not end")??;
    write_line(&serde_json::to_string(&book.tell())?)
}

async fn hold(
    number: usize,
    address: SocketAddr,
    plan: &Plan,
    opening: &Semaphore,
    book: &Book,
    over: watch::Receiver<()>,
) -> Result<()> {
    let place = opening.acquire().await?;
    let mut stream = timeout(CONNECT_LIMIT, TcpStream::connect(address)).await?.context("cannot connect")?;
    stream.set_nodelay(true)?;
    if plan.upgrade {
        stream.write_all(UPGRADE.as_bytes()).await.context("cannot ask for an upgrade")?;
        let mut head = Vec::new();
        timeout(ANSWER_LIMIT, read_head(&mut stream, &mut head)).await?.context("no upgrade")?;
        ensure!(head.starts_with(b"HTTP/1.1 101 "), "the server says {:?}", String::from_utf8_lossy(&head));
    }
    drop(place);
    let every = Duration::from_millis(plan.every_ms);
    let dice = Dice::new(number as u64 + 1);
    let due = VecDeque::new();
    let mut speaker = Speaker { number, stream, every, dice, sent: 0, rest: Vec::new(), due, came: Vec::new() };
    speaker.talk(book, over).await
}

/// A connection that talks.
struct Speaker {
    number: usize,
    stream: TcpStream,
    every: Duration,
    dice: Dice,
    /// How many lines were begun.
    sent: u64,
    /// The second piece of the last one, if it was sent in two.
    rest: Vec<u8>,
    due: VecDeque<Due>,
    /// What has come of the next answer.
    came: Vec<u8>,
}

impl Speaker {
    /// Until it is over and all is answered.
    async fn talk(&mut self, book: &Book, mut over: watch::Receiver<()>) -> Result<()> {
        let mut next = pin!(sleep(self.pause()));
        let mut is_over = false;
        while !is_over || !self.due.is_empty() {
            // A line that was begun has its end in any case.
            let may_speak = !is_over || !self.rest.is_empty();
            tokio::select! {
                _ = over.changed(), if !is_over => is_over = true,
                () = &mut next, if may_speak => {
                    self.speak(book).await.context("cannot send")?;
                    let pause = self.pause();
                    next.as_mut().reset(tokio::time::Instant::now() + pause);
                }
                read = self.stream.read_buf(&mut self.came) => {
                    ensure!(read.context("it broke off")? > 0, "the server has closed it");
                    self.hear(book);
                }
            }
        }
        self.stream.shutdown().await.context("cannot close")?;
        // A connection that is reset at its end has had an error, too.
        let last = timeout(ANSWER_LIMIT, self.stream.read_buf(&mut self.came)).await?.context("no end")?;
        ensure!(last == 0, "more came at the end");
        Ok(())
    }

    /// Half of the usual time to half as much again.
    fn pause(&mut self) -> Duration {
        self.every.mul_f64(0.5 + self.dice.below(1000) as f64 / 1000.0)
    }

    /// Sends the next line, or half of it, or the other half of the last one.
    async fn speak(&mut self, book: &Book) -> Result<()> {
        let piece = if self.rest.is_empty() { self.next_piece(book) } else { std::mem::take(&mut self.rest) };
        self.stream.write_all(&piece).await?;
        if self.rest.is_empty()
            && let Some(last) = self.due.back_mut()
        {
            last.sent_at = Some(Instant::now());
        }
        self.note_wait(book);
        Ok(())
    }

    fn next_piece(&mut self, book: &Book) -> Vec<u8> {
        self.sent += 1;
        let text = format!("{}:{}:{:x}", self.number, self.sent, self.dice.roll());
        let round = book.tally().round;
        self.due.push_back(Due { answer: format!("{} {text}", self.sent), sent_at: None, round });
        let mut line = format!("{text}\n").into_bytes();
        if self.dice.below(IN_PIECES) == 0 {
            self.rest = line.split_off(text.len() / 2);
        }
        line
    }

    fn hear(&mut self, book: &Book) {
        while let Some(end) = self.came.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.came.drain(..=end).collect();
            book.hear(self.number, &String::from_utf8_lossy(&line[..end]), self.due.pop_front());
        }
        self.note_wait(book);
    }

    fn note_wait(&self, book: &Book) {
        book.wait_since(self.number, self.due.front().and_then(|due| due.sent_at));
    }
}

#[cfg(test)]
mod tests {
    use super::{Book, Due, Instant};

    fn due(answer: &str, round: u64) -> Option<Due> {
        Some(Due { answer: answer.to_owned(), sent_at: Some(Instant::now()), round })
    }

    #[test]
    fn an_answer_that_is_not_due_is_wrong() {
        let book = Book::new(1);
        book.hear(0, "1 a", due("1 a", 0));
        book.hear(0, "1 a", due("2 b", 0));
        book.hear(0, "3 c", None);
        book.hear(0, "4 d", due("4 d", 0).map(|due| Due { sent_at: None, ..due }));
        let talked = book.tell();
        assert_eq!((talked.answers, talked.wrong, talked.errors.len()), (4, 3, 3));
        assert!(talked.errors[0].contains("\"1 a\" came, not \"2 b\""), "{:?}", talked.errors);
    }

    #[tokio::test]
    async fn a_round_ends_when_each_was_answered_or_is_lost() {
        let book = Book::new(3);
        let answering = async {
            // Sent before the round: it proves nothing.
            book.hear(0, "1 a", due("1 a", 0));
            book.hear(1, "1 a", due("1 a", 1));
            book.lose(2, &anyhow::anyhow!("it broke off"));
            assert_eq!(book.tell().hung, 1);
            book.hear(0, "2 b", due("2 b", 1));
        };
        tokio::join!(book.prove(), answering);
        let talked = book.tell();
        assert_eq!((talked.open, talked.hung, talked.answers, talked.wrong), (2, 0, 3, 0));
    }
}
