//! Transfers in either direction between two programs of the lab: every byte is checked as it comes, and the times in
//! which nothing came are kept, by a clock that all processes of a lab share.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{BufRead, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::json;
use socket2::{Domain, Protocol, Socket, Type};

use crate::host::write_line;
use crate::pause::Gap;
use crate::server::noise;

/// Said to a program of transfers to end them.
pub const STOP: &str = "stop";
/// Said to the client of transfers to begin the next [`AT_ONCE`].
pub const MORE: &str = "more";
/// Transfers that begin at once. Of hundreds, all at the same moment, agents on few processors hear nothing else for
/// the better part of a second.
pub const AT_ONCE: usize = 8;
/// A prime, so that bytes which are missing or doubled are seen.
const PATTERN_BYTES: usize = 1_048_573;
/// Where in the pattern each stream begins, so that those of another are seen.
const STREAM_STEP: usize = 7_919;
const PIECE: usize = 64 * 1024;
/// A paced sender speaks about so often: waits of the receiver are seen with this precision.
const BEAT: Duration = Duration::from_millis(2);
/// Shorter waits are the sender's own beat, or the scheduler's.
const GAP_MIN_US: u64 = 5_000;
const MARK_EVERY_US: u64 = 100_000;
const HEAD_MAX: usize = 512;
const BACKLOG: i32 = 128;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// Microseconds since 1970.
pub fn now_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

/// Which way a transfer goes, and who says how fast: `up:cubic`, `down:bbr`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Way {
    /// From the client to the server.
    pub up: bool,
    /// The sender's congestion control.
    pub congestion: String,
}

impl FromStr for Way {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (direction, congestion) = text.split_once(':').unwrap_or((text, "cubic"));
        let up = match direction {
            "up" => true,
            "down" => false,
            _ => return Err(format!("\"{direction}\" is no direction: say up or down")),
        };
        Ok(Self { up, congestion: congestion.to_owned() })
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", if self.up { "up" } else { "down" }, self.congestion)
    }
}

/// What one end of a transfer has to say. Gaps and marks are those since it was last asked.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Word {
    /// Bytes that the kernel has taken.
    pub sent: u64,
    /// Bytes that came.
    pub received: u64,
    /// Bytes that were not those that belong there.
    pub wrong: u64,
    /// Times in which nothing came.
    pub gaps: Vec<Gap>,
    /// When how many bytes had come in all, about ten times in a second.
    pub marks: Vec<(u64, u64)>,
    /// When the last bytes came.
    pub last_us: u64,
    /// It is over at this end.
    pub ended: bool,
    /// Why it ended before its end; empty when it did not.
    pub error: String,
    /// The error was a reset.
    pub reset: bool,
}

/// What the client says first, as a line.
#[derive(Serialize, Deserialize)]
struct Head {
    stream: usize,
    way: Way,
    pace: u64,
    bytes: u64,
}

/// What to transfer.
pub struct Plan {
    /// Server's name or address.
    pub host: String,
    /// Server's port.
    pub port: u16,
    /// One transfer each.
    pub ways: Vec<Way>,
    /// Number of the first of them; the server has others by other numbers.
    pub first: usize,
    /// Bytes per second of each; 0: as fast as it goes.
    pub pace: u64,
    /// Bytes of each; 0: until it is told to stop.
    pub bytes: u64,
    /// By MPTCP.
    pub mptcp: bool,
}

/// All transfers of a program.
struct Book {
    words: Mutex<BTreeMap<usize, Word>>,
    /// Those whose sender is at the other end: it stops when it is told that nothing more will come from here.
    sources: Mutex<Vec<TcpStream>>,
    stop: AtomicBool,
    pattern: Vec<u8>,
}

impl Book {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            words: Mutex::default(),
            sources: Mutex::default(),
            stop: AtomicBool::new(false),
            pattern: noise(PATTERN_BYTES, 1),
        })
    }

    fn words(&self) -> MutexGuard<'_, BTreeMap<usize, Word>> {
        self.words.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, stream: usize, change: impl FnOnce(&mut Word)) {
        change(self.words().entry(stream).or_default());
    }

    fn end(&self, stream: usize, result: Result<()>) {
        self.note(stream, |word| {
            word.ended = true;
            if let Err(error) = result {
                let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
                word.reset = matches!(kind, Some(ErrorKind::ConnectionReset | ErrorKind::BrokenPipe));
                word.error = format!("{error:#}");
            }
        });
    }

    /// Answers each line of input with a line of [`Word`]s by stream. Ends with the input. `more`: what [`MORE`] does.
    fn answer(&self, mut more: impl FnMut() -> Result<()>) -> Result<()> {
        for line in std::io::stdin().lock().lines() {
            let line = line?;
            if line.trim() == MORE {
                more()?;
            }
            if line.trim() == STOP {
                self.stop.store(true, Ordering::Relaxed);
                for source in self.sources.lock().unwrap_or_else(PoisonError::into_inner).iter() {
                    // One that has ended needs no word.
                    let _ = source.shutdown(Shutdown::Write);
                }
            }
            let mut said = BTreeMap::new();
            for (stream, word) in self.words().iter_mut() {
                said.insert(*stream, word.clone());
                word.gaps.clear();
                word.marks.clear();
            }
            write_line(&json!({ "streams": said }).to_string())?;
        }
        Ok(())
    }
}

fn protocol(mptcp: bool) -> Protocol {
    if mptcp { Protocol::MPTCP } else { Protocol::TCP }
}

/// Begins the first [`AT_ONCE`] transfers; see [`Book::answer`] for what it says, and how the next ones begin.
pub fn run(plan: Plan) -> Result<()> {
    let to = (plan.host.as_str(), plan.port).to_socket_addrs();
    let to = to.with_context(|| format!("cannot resolve {}", plan.host))?.next();
    let to = to.with_context(|| format!("{} has no address", plan.host))?;
    let book = Book::new();
    let Plan { pace, bytes, mptcp, .. } = plan;
    let mut heads = (plan.first..).zip(plan.ways).map(|(stream, way)| Head { stream, way, pace, bytes });
    let mut begin = || {
        for head in heads.by_ref().take(AT_ONCE) {
            let book = Arc::clone(&book);
            book.note(head.stream, |_| ());
            let work = move || book.end(head.stream, request(to, mptcp, &head, &book));
            std::thread::Builder::new().name("transfer".into()).spawn(work).context("no thread left")?;
        }
        Ok(())
    };
    begin()?;
    book.answer(begin)
}

fn request(to: SocketAddr, mptcp: bool, head: &Head, book: &Book) -> Result<()> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(protocol(mptcp))).context("no socket")?;
    socket.set_tcp_congestion(head.way.congestion.as_bytes()).context("no such congestion control")?;
    socket.connect_timeout(&to.into(), CONNECT_TIMEOUT).context("cannot connect")?;
    let mut stream = TcpStream::from(socket);
    stream.set_nodelay(true)?;
    stream.write_all(format!("{}\n", serde_json::to_string(head)?).as_bytes()).context("cannot ask")?;
    if head.way.up {
        send(&mut stream, head, book, &book.stop)?;
        return await_end(&mut stream);
    }
    book.sources.lock().unwrap_or_else(PoisonError::into_inner).push(stream.try_clone()?);
    receive(&mut stream, head.stream, book)
}

/// Serves transfers until it is ended. Says "ready" when it listens; then as [`run`].
pub fn serve(listen: SocketAddr, mptcp: bool) -> Result<()> {
    let socket = Socket::new(Domain::for_address(listen), Type::STREAM, Some(protocol(mptcp)))?;
    socket.set_reuse_address(true)?;
    socket.bind(&listen.into()).with_context(|| format!("cannot bind {listen}"))?;
    socket.listen(BACKLOG)?;
    let listener = std::net::TcpListener::from(socket);
    let book = Book::new();
    let of_clients = Arc::clone(&book);
    // Ends with the process.
    std::thread::spawn(move || {
        // A connection that ended before it was taken is not an error of the server.
        for stream in listener.incoming().flatten() {
            let book = Arc::clone(&of_clients);
            std::thread::spawn(move || respond(stream, &book));
        }
    });
    write_line("ready")?;
    // Clients say which transfers begin.
    book.answer(|| Ok(()))
}

fn respond(mut stream: TcpStream, book: &Book) {
    // Without a head nobody knows which stream it was to be; the client says what went wrong.
    let Ok(head) = read_head(&mut stream) else { return };
    let result = if head.way.up { receive(&mut stream, head.stream, book) } else { give(&mut stream, &head, book) };
    book.end(head.stream, result);
}

fn read_head(stream: &mut TcpStream) -> Result<Head> {
    let (mut line, mut byte) = (Vec::new(), [0]);
    while !line.ends_with(b"\n") {
        stream.read_exact(&mut byte)?;
        line.push(byte[0]);
        if line.len() > HEAD_MAX {
            bail!("the head has no end");
        }
    }
    Ok(serde_json::from_slice(&line)?)
}

/// Sends until the client closes its direction.
fn give(stream: &mut TcpStream, head: &Head, book: &Book) -> Result<()> {
    let from = stream.try_clone()?;
    socket2::SockRef::from(&*stream).set_tcp_congestion(head.way.congestion.as_bytes())?;
    stream.set_nodelay(true)?;
    let stop = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&stop);
    let listening = std::thread::spawn(move || {
        let mut from = from;
        let result = await_end(&mut from);
        told.store(true, Ordering::Relaxed);
        result
    });
    send(stream, head, book, &stop)?;
    listening.join().unwrap_or_else(|_| bail!("a thread ended badly"))
}

/// Until the other end closes.
fn await_end(stream: &mut TcpStream) -> Result<()> {
    let mut piece = [0; HEAD_MAX];
    while stream.read(&mut piece).context("no end came")? > 0 {}
    Ok(())
}

fn send(stream: &mut TcpStream, head: &Head, book: &Book, stop: &AtomicBool) -> Result<()> {
    let pattern = &book.pattern;
    let most = match head.pace {
        0 => PIECE,
        pace => ((pace as f64 * BEAT.as_secs_f64()) as usize).clamp(1, PIECE),
    };
    let (mut sent, mut due) = (0_u64, Instant::now());
    while !stop.load(Ordering::Relaxed) && (head.bytes == 0 || sent < head.bytes) {
        let at = place(head.stream, sent);
        let rest = if head.bytes == 0 { most as u64 } else { head.bytes - sent };
        let length = most.min(pattern.len() - at).min(usize::try_from(rest).unwrap_or(most));
        stream.write_all(&pattern[at..at + length]).context("cannot send")?;
        sent += length as u64;
        book.note(head.stream, |word| word.sent = sent);
        if head.pace > 0 {
            // What was held up is not caught up with: the pace is that of a program which speaks when it has something
            // to say.
            due = (due + Duration::from_secs_f64(length as f64 / head.pace as f64)).max(Instant::now() - BEAT);
            sleep(due.saturating_duration_since(Instant::now()));
        }
    }
    stream.shutdown(Shutdown::Write).context("cannot close")
}

fn receive(stream: &mut TcpStream, number: usize, book: &Book) -> Result<()> {
    let mut piece = vec![0; PIECE];
    loop {
        let length = stream.read(&mut piece).context("nothing more came")?;
        let now = now_us();
        if length == 0 {
            return Ok(());
        }
        book.note(number, |word| take(word, &piece[..length], number, &book.pattern, now));
    }
}

/// Where in the pattern a byte of a stream is.
fn place(stream: usize, offset: u64) -> usize {
    let offset = usize::try_from(offset % PATTERN_BYTES as u64).unwrap_or_default();
    (offset + stream * STREAM_STEP) % PATTERN_BYTES
}

/// Enters bytes that came at a moment.
fn take(word: &mut Word, came: &[u8], stream: usize, pattern: &[u8], now_us: u64) {
    let mut rest = came;
    while !rest.is_empty() {
        let at = place(stream, word.received);
        let (piece, later) = rest.split_at(rest.len().min(pattern.len() - at));
        let wanted = &pattern[at..at + piece.len()];
        if piece != wanted {
            word.wrong += piece.iter().zip(wanted).filter(|(came, wanted)| came != wanted).count() as u64;
        }
        word.received += piece.len() as u64;
        rest = later;
    }
    if word.last_us > 0 && now_us.saturating_sub(word.last_us) >= GAP_MIN_US {
        word.gaps.push(Gap { from_us: word.last_us, to_us: now_us });
    }
    // Marks that were told are gone, so the time is that of the clock and not since the last one.
    if word.last_us / MARK_EVERY_US != now_us / MARK_EVERY_US {
        word.marks.push((now_us, word.received));
    }
    word.last_us = now_us;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern() -> Vec<u8> {
        noise(PATTERN_BYTES, 1)
    }

    /// Bytes of a stream from an offset on.
    fn bytes(stream: usize, offset: u64, length: u64) -> Vec<u8> {
        let pattern = pattern();
        (offset..offset + length).map(|at| pattern[place(stream, at)]).collect()
    }

    #[test]
    fn ways_are_read_as_they_are_written() {
        for text in ["up:cubic", "down:bbr"] {
            assert_eq!(text.parse::<Way>().map(|way| way.to_string()), Ok(text.to_owned()));
        }
        assert_eq!("down".parse::<Way>().map(|way| way.congestion), Ok("cubic".to_owned()));
        assert!("left:cubic".parse::<Way>().is_err());
    }

    #[test]
    fn right_bytes_are_right_across_the_pattern_s_end() {
        let (pattern, mut word) = (pattern(), Word { received: PATTERN_BYTES as u64 - 100, ..Word::default() });
        take(&mut word, &bytes(0, PATTERN_BYTES as u64 - 100, 300), 0, &pattern, 1_000_000);
        assert_eq!((word.wrong, word.received), (0, PATTERN_BYTES as u64 + 200));
    }

    #[test]
    fn missing_bytes_and_those_of_another_stream_are_wrong() {
        let pattern = pattern();
        let wrong = |came: &[u8]| {
            let mut word = Word::default();
            take(&mut word, came, 3, &pattern, 1_000_000);
            word.wrong
        };
        assert_eq!(wrong(&bytes(3, 0, 1000)), 0);
        assert!(wrong(&bytes(3, 1, 1000)) > 900);
        assert!(wrong(&bytes(2, 0, 1000)) > 900);
        let mut one = bytes(3, 0, 1000);
        one[500] ^= 1;
        assert_eq!(wrong(&one), 1);
    }

    #[test]
    fn waits_are_kept_and_beats_are_not() {
        let (pattern, mut word) = (pattern(), Word::default());
        for now_us in [1_000_000, 1_002_000, 1_060_000, 1_062_000, 1_131_000] {
            let piece = bytes(0, word.received, 10);
            take(&mut word, &piece, 0, &pattern, now_us);
        }
        let gaps: Vec<_> = word.gaps.iter().map(|gap| (gap.from_us, gap.to_us)).collect();
        assert_eq!(gaps, [(1_002_000, 1_060_000), (1_062_000, 1_131_000)]);
        assert_eq!(word.marks, [(1_000_000, 10), (1_131_000, 50)]);
    }
}
