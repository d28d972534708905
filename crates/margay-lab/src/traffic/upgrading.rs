//! A server that counts the lines of each of its connections, and whose next process takes all of them over while they
//! go on; or that of another host, also where the agent asks for that: for all of them, since the name is drained, or
//! for one, since the other host has fewer than its share.

use std::future::pending;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Args;
use futures_util::stream::{self, StreamExt};
use margay_sdk::{Give, GivingTakeover, Incoming, NotHandedOver, Taken, Target, ToTarget, hand_over, hand_over_to};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;

use crate::host::write_line;

/// Connections that are given away at once; others go on being served until it is their turn.
const GIVING_MAX: usize = 4;
/// The same to another host: each takes several round trips.
const MOVING_MAX: usize = 32;
/// Longer is no line.
const LINE_MAX: usize = 4096;
/// Ends the head of a request and of its answer.
const HEAD_END: &[u8] = b"\r\n\r\n";
const UPGRADED: &str = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: lines\r\nConnection: Upgrade\r\n\r\n";

/// What the server has come to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// Others may give it what they have.
    Takes,
    /// They may not any more.
    TakesNoMore {
        /// Why not.
        why: String,
    },
    /// It accepts connections.
    Serves,
    /// It was told to give what it has, and begins with its listening socket.
    Gives,
    /// Nobody has taken a socket: it goes on with it.
    Keeps {
        /// It is the listening one.
        listening: bool,
        /// The agent's reason.
        errno: Option<i32>,
        /// The same in words.
        why: String,
    },
    /// Nobody can say who has a socket: it is closed.
    Loses {
        /// Why that is.
        why: String,
    },
    /// It has given its connections to another host.
    Moved {
        /// Connections that the other host has now.
        moved: usize,
        /// Those that stay.
        kept: usize,
        /// How long all of it took.
        took_ms: f64,
    },
    /// It has given what it had.
    Gave {
        /// Connections that another process has now.
        given: usize,
        /// Those of them that the agent has found no name for.
        by_name: usize,
        /// Connections that nobody has taken, and that were served to their end.
        kept: usize,
        /// How long all of it took.
        took_ms: f64,
    },
}

fn say(step: &Step) -> Result<()> {
    write_line(&serde_json::to_string(step)?)
}

/// How to serve.
#[derive(Args, Debug)]
pub struct Plan {
    /// Where to listen
    #[arg(long, required_unless_present = "take_over")]
    listen: Option<SocketAddr>,
    /// Name by which sockets are given and taken
    #[arg(long)]
    service: String,
    /// Take over the sockets of another process of this server, or of its twin on another host
    #[arg(long)]
    take_over: bool,
    /// Host that gets all connections upon SIGUSR1
    #[arg(long)]
    give_to: Option<String>,
    /// Tell this process to give them
    #[arg(long, requires = "take_over")]
    of: Option<i32>,
    /// Want a request for an upgrade of HTTP first, as a server of WebSockets does
    #[arg(long)]
    upgrade: bool,
}

/// Serves until it has given everything away, which SIGTERM tells it to do. Where nobody takes the listening socket, it
/// goes on as before. Upon SIGUSR1, and when its agent asks for it, it gives its connections to another host, and goes
/// on. Upon SIGUSR2 it takes over sockets again, which has an end when the agent has. Prints each [`Step`] as a line of
/// JSON.
pub async fn serve(plan: Plan) -> Result<()> {
    let mut told = signal(SignalKind::terminate()).context("cannot hear signals")?;
    let mut told_to_move = signal(SignalKind::user_defined1()).context("cannot hear signals")?;
    let mut told_to_take = signal(SignalKind::user_defined2()).context("cannot hear signals")?;
    let mut server = Server::start(&plan).await?;
    let give_to = plan.give_to.unwrap_or_default();
    loop {
        tokio::select! {
            _ = told.recv() => {
                if server.give().await? {
                    return Ok(());
                }
            }
            _ = told_to_move.recv() => server.move_all(&give_to).await?,
            _ = told_to_take.recv() => server.take_over(&plan.service).await?,
            accepted = accept(server.listener.as_ref()) => {
                // A connection that ended before it was taken is not an error of the server.
                if let Ok(stream) = accepted {
                    server.begin(Session { stream, lines: 0, begun: Vec::new() }, plan.upgrade);
                }
            }
            come = next(server.takeover.as_mut()) => match come {
                Ok(Incoming::Taken(taken)) => server.take(taken)?,
                Ok(Incoming::Give(give)) if give.peer.is_some() => server.move_one(&give),
                Ok(Incoming::Give(give)) => server.move_all(&give.host).await?,
                Err(error) => server.take_no_more(&error)?,
            },
            Some(_) = server.sessions.join_next() => {}
        }
    }
}

async fn accept(listener: Option<&TcpListener>) -> Result<TcpStream> {
    let Some(listener) = listener else { return pending().await };
    let (stream, _) = listener.accept().await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

async fn next(takeover: Option<&mut GivingTakeover>) -> Result<Incoming, margay_sdk::Error> {
    match takeover {
        Some(takeover) => takeover.next().await,
        None => pending().await,
    }
}

struct Server {
    shared: Arc<Shared>,
    /// None before it was taken over, and after it was given away.
    listener: Option<TcpListener>,
    takeover: Option<GivingTakeover>,
    sessions: JoinSet<()>,
    lines: Vec<Line>,
}

/// By which a session is told to move.
struct Line {
    /// As the session's socket has it.
    peer: SocketAddr,
    sender: mpsc::Sender<Order>,
}

/// A connection is to go to another host; dropped when that is done, or has come to nothing.
struct Order {
    /// Its name or host-ID; empty: any that serves the name.
    host: String,
    /// Whoever waits for that learns it when this is dropped.
    _done: oneshot::Sender<()>,
}

impl Server {
    async fn start(plan: &Plan) -> Result<Self> {
        let name = plan.service.to_target()?;
        let shared = Arc::new(Shared::new(name));
        let mut server = Self { shared, listener: None, takeover: None, sessions: JoinSet::new(), lines: Vec::new() };
        if let Some(address) = plan.listen {
            let listener = TcpListener::bind(address).await;
            server.listener = Some(listener.with_context(|| format!("cannot listen on {address}"))?);
            say(&Step::Serves)?;
        }
        if plan.take_over {
            server.take_over(&plan.service).await?;
        }
        if let Some(pid) = plan.of {
            kill(Pid::from_raw(pid), Signal::SIGTERM).with_context(|| format!("cannot tell process {pid}"))?;
        }
        Ok(server)
    }

    /// Others may give it sockets of the name, from now on or again.
    async fn take_over(&mut self, service: &str) -> Result<()> {
        self.takeover = Some(GivingTakeover::open(service).await?);
        say(&Step::Takes)
    }

    fn begin(&mut self, mut session: Session, upgrades: bool) {
        let shared = Arc::clone(&self.shared);
        let (sender, orders) = mpsc::channel(1);
        self.lines.retain(|line| !line.sender.is_closed());
        // One that has ended already is asked for nothing.
        if let Ok(peer) = session.stream.peer_addr() {
            self.lines.push(Line { peer, sender });
        }
        self.sessions.spawn(async move {
            // A client that asks for something else is told nothing.
            if !upgrades || session.upgrade().await.is_ok() {
                talk(&shared, session, orders).await;
            }
        });
    }

    /// Gives all connections to another host, and goes on with those that it does not take.
    async fn move_all(&mut self, host: &str) -> Result<()> {
        say(&Step::Gives)?;
        let begun = Instant::now();
        let [given_before, kept_before] = self.shared.given_and_kept();
        let senders = self.lines.iter().map(|line| line.sender.clone());
        let moves = senders.map(|sender| async move {
            let (done, is_done) = oneshot::channel();
            // A connection that has ended has nothing to give.
            if sender.send(Order { host: host.to_owned(), _done: done }).await.is_ok() {
                let _ = is_done.await;
            }
        });
        let moves: Vec<_> = moves.collect();
        stream::iter(moves).buffer_unordered(MOVING_MAX).collect::<Vec<()>>().await;
        let [given, kept] = self.shared.given_and_kept();
        let took_ms = begun.elapsed().as_secs_f64() * 1e3;
        say(&Step::Moved { moved: given - given_before, kept: kept - kept_before, took_ms })
    }

    /// Gives one connection to another host, and goes on meanwhile.
    fn move_one(&self, give: &Give) {
        for line in self.lines.iter().filter(|line| give.is_for(line.peer)) {
            // What is given already, or told to go, needs no second order.
            let _ = line.sender.try_send(Order { host: give.host.clone(), _done: oneshot::channel().0 });
        }
    }

    fn take(&mut self, taken: Taken) -> Result<()> {
        if taken.is_listening() {
            self.listener = Some(taken.into_listener().context("cannot listen")?);
            return say(&Step::Serves);
        }
        let (lines, begun) = unpack(&taken.data).context("a connection of another server")?;
        let stream = taken.into_stream().context("cannot go on with a connection")?;
        self.begin(Session { stream, lines, begun }, false);
        Ok(())
    }

    fn take_no_more(&mut self, error: &margay_sdk::Error) -> Result<()> {
        self.takeover = None;
        say(&Step::TakesNoMore { why: error.to_string() })
    }

    /// Gives everything away. Whether that is done.
    async fn give(&mut self) -> Result<bool> {
        let Some(listener) = self.listener.take() else { return Ok(false) };
        say(&Step::Gives)?;
        let begun = Instant::now();
        let listener = listener.into_std().context("cannot give the listening socket")?;
        if let Err(refused) = hand_over(listener, Some(&self.shared.name), &[]).await {
            let NotHandedOver { socket, error } = refused;
            say(&Step::Keeps { listening: true, errno: error.raw_os_error(), why: error.to_string() })?;
            let socket = socket.context("nobody has the listening socket")?;
            self.listener = Some(TcpListener::from_std(socket.into()).context("cannot listen again")?);
            return Ok(false);
        }
        self.shared.turns.add_permits(GIVING_MAX);
        while self.sessions.join_next().await.is_some() {}
        let [given, kept] = self.shared.given_and_kept();
        let by_name = self.shared.by_name.load(Ordering::Relaxed);
        say(&Step::Gave { given, by_name, kept, took_ms: begun.elapsed().as_secs_f64() * 1e3 })?;
        Ok(true)
    }
}

/// What all connections have in common.
struct Shared {
    name: Target,
    /// To give a connection away. There are none until the listening socket is given.
    turns: Semaphore,
    given: AtomicUsize,
    by_name: AtomicUsize,
    kept: AtomicUsize,
}

impl Shared {
    fn new(name: Target) -> Self {
        let turns = Semaphore::new(0);
        let (given, by_name, kept) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
        Self { name, turns, given, by_name, kept }
    }

    fn given_and_kept(&self) -> [usize; 2] {
        [&self.given, &self.kept].map(|count| count.load(Ordering::Relaxed))
    }

    /// Gives a connection away: to a host, or without the name of one to the next process. It comes back where nobody
    /// takes it.
    async fn give(&self, session: Session, host: &str) -> Option<Session> {
        let Session { stream, lines, begun } = session;
        let data = pack(lines, &begun);
        // It can always be taken from the event loop.
        let socket = stream.into_std().ok()?;
        let given = match hand_over_to(host, socket, None, &data).await {
            // It has come by an address, or the agent does not list its flow yet.
            Err(NotHandedOver { socket: Some(socket), error })
                if error.raw_os_error() == Some(Errno::ENOTCONN as i32) =>
            {
                self.by_name.fetch_add(1, Ordering::Relaxed);
                hand_over_to(host, socket, Some(&self.name), &data).await
            }
            given => given,
        };
        let Err(NotHandedOver { socket, error }) = given else {
            self.given.fetch_add(1, Ordering::Relaxed);
            return None;
        };
        let errno = error.raw_os_error();
        let why = error.to_string();
        let Some(socket) = socket else {
            // Who reads this may be gone.
            let _ = say(&Step::Loses { why });
            return None;
        };
        self.kept.fetch_add(1, Ordering::Relaxed);
        let _ = say(&Step::Keeps { listening: false, errno, why });
        let stream = TcpStream::from_std(socket.into()).ok()?;
        Some(Session { stream, lines, begun })
    }
}

/// One connection.
struct Session {
    stream: TcpStream,
    /// How many lines were answered.
    lines: u64,
    /// What was read of the next one.
    begun: Vec<u8>,
}

impl Session {
    /// Reads the head of a request, and agrees to it.
    async fn upgrade(&mut self) -> Result<()> {
        read_head(&mut self.stream, &mut self.begun).await?;
        self.begun.clear();
        Ok(self.stream.write_all(UPGRADED.as_bytes()).await?)
    }

    /// Answers all lines that have come whole: each with its number and itself.
    async fn answer(&mut self) -> Result<()> {
        while let Some(end) = self.begun.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.begun.drain(..=end).collect();
            self.lines += 1;
            let answer = [format!("{} ", self.lines).as_bytes(), &line].concat();
            self.stream.write_all(&answer).await?;
        }
        ensure!(self.begun.len() <= LINE_MAX, "a line without an end");
        Ok(())
    }
}

/// Reads until the empty line after a head. Whoever sends one waits for the answer before it says more.
pub async fn read_head(stream: &mut TcpStream, head: &mut Vec<u8>) -> Result<()> {
    while !head.ends_with(HEAD_END) {
        ensure!(head.len() <= LINE_MAX, "a head without an end");
        ensure!(stream.read_buf(head).await? > 0, "the end within a head");
    }
    Ok(())
}

/// Answers lines until the client ends, or until the connection is given away: between two answers.
async fn talk(shared: &Shared, mut session: Session, mut orders: mpsc::Receiver<Order>) {
    let mut turn = pin!(shared.turns.acquire());
    let mut may_go = true;
    while session.answer().await.is_ok() {
        tokio::select! {
            read = session.stream.read_buf(&mut session.begun) => match read {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            },
            _permit = &mut turn, if may_go => match shared.give(session, "").await {
                Some(kept) => {
                    session = kept;
                    may_go = false;
                }
                None => return,
            },
            Some(order) = orders.recv() => match shared.give(session, &order.host).await {
                Some(kept) => {
                    session = kept;
                    drop(order);
                }
                None => return,
            },
        }
    }
}

/// What the next process has to know of a connection.
fn pack(lines: u64, begun: &[u8]) -> Vec<u8> {
    [&lines.to_be_bytes()[..], begun].concat()
}

fn unpack(data: &[u8]) -> Option<(u64, Vec<u8>)> {
    let (lines, begun) = data.split_first_chunk()?;
    Some((u64::from_be_bytes(*lines), begun.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::{Step, pack, unpack};

    #[test]
    fn what_the_next_process_must_know_arrives() {
        assert_eq!(unpack(&pack(7, b"half a li")), Some((7, b"half a li".to_vec())));
        assert_eq!(unpack(&pack(u64::MAX, b"")), Some((u64::MAX, Vec::new())));
        assert_eq!(unpack(b"seven.."), None);
    }

    #[test]
    fn steps_are_read_as_they_are_written() {
        let why = "nobody takes over the name".to_owned();
        for step in [
            Step::Serves,
            Step::Keeps { listening: true, errno: Some(3), why },
            Step::Moved { moved: 50, kept: 1, took_ms: 400.5 },
        ] {
            let text = serde_json::to_string(&step).expect("JSON");
            assert_eq!(serde_json::from_str::<Step>(&text).expect("a step"), step);
        }
    }
}
