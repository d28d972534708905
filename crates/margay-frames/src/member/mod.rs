//! The framer of a member: frames of a switch in, requests to a program on this host out, and back.
//! The program is a memcached or a Redis.
//!
//! Each framed connection is one TCP connection to the program. Answers come from there in the order of the requests,
//! and go to the switch with their numbers.

mod answers;

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use margay_core::fair_table::{FairTable, Peer};
use margay_core::rng::Rng;
use margay_ensemble::{Connection, ConnectionConfig, Order, Standing, Tsn};
use margay_sdk::shares::{MEMORY_MAX, Room, Share};
use margay_wire::{AbortReason, Framed, FramedTerms, framed_host_number};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::mpsc::{self, error::TrySendError};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::batch::{self, Outlet, bytes_of};
use crate::clock::Clock;
use crate::head::{ANSWER_IS, Head};
use crate::pipe::{self, Read};
use crate::protocol::resp::{Carried, Version};
use crate::protocol::{MESSAGE_MAX, Protocol, Shape, TOO_LARGE};
use crate::random_seed;
use answers::Answers;

/// Framed connections at once; those of one host are a sixteenth of them, and those of all together half. Each client
/// of a switch is one here, so a switch may have many.
const CONNECTIONS_MAX: usize = 65_536;
/// Datagrams of one connection that wait; others are lost, as on the way.
const DATAGRAMS_MAX: usize = 512;
/// Bytes of requests that wait for the program to take them; frames wait at the switch's client then.
const UNWRITTEN_MAX: usize = 1 << 20;
/// Requests that the program has not answered.
const UNANSWERED_MAX: usize = 4096;
/// Bytes of frames that wait, or are under way: the longest answer ([`MESSAGE_MAX`]) and more.
const SEND_BUFFER: usize = 9 << 20;
/// Bytes of frames that are put together: a request with the largest item.
const RECEIVE_BUFFER: usize = 9 << 20;
/// The program is looked at so often.
const CHECK_EVERY: Duration = Duration::from_secs(1);
/// And has so long to answer.
const CHECK_LIMIT: Duration = Duration::from_secs(1);
/// So many times in a row without an answer, and it is gone.
const CHECKS_MISSED_MAX: u32 = 3;
/// Bytes of such an answer that are looked at.
const ANSWER_SEEN_MAX: u64 = 256;
/// A program has so long to take a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(1);
/// One that leaves waits so long at most for its switches.
const LEAVE_LIMIT: Duration = Duration::from_secs(10);

/// What a member's framer is set up with.
#[derive(Clone, Debug)]
pub struct Config {
    /// What the program speaks.
    pub protocol: Protocol,
    /// Where the program is.
    pub to: SocketAddr,
    /// What the member is called where keys are divided.
    pub label: String,
    /// This host; all zero where nobody knows.
    pub host: [u8; 16],
}

/// Why a framer serves no more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The program does not answer.
    ProgramGone(String),
    /// It was told to leave, and has.
    Left,
}

/// Asks a program whether it is there, and speaks its protocol.
///
/// # Errors
///
/// It does not, in words.
pub async fn check(protocol: Protocol, to: SocketAddr) -> Result<(), String> {
    let ask = async {
        let mut stream = TcpStream::connect(to).await?;
        stream.write_all(protocol.question()).await?;
        let mut answer = String::new();
        BufReader::new(stream.take(ANSWER_SEEN_MAX)).read_line(&mut answer).await?;
        io::Result::Ok(answer)
    };
    let program = protocol.program();
    match timeout(CHECK_LIMIT, ask).await {
        Ok(Ok(answer)) if answer.starts_with(protocol.reply()) => Ok(()),
        Ok(Ok(answer)) => Err(format!("no {program} that may be asked is at {to}: it says {:?}", answer.trim_end())),
        Ok(Err(error)) => Err(format!("no {program} answers at {to}: {error}")),
        Err(_) => Err(format!("no {program} answers at {to} within {CHECK_LIMIT:?}")),
    }
}

/// What one that leaves says to whoever asks.
const LEAVES: Framed<'static> = Framed::Abort { reason: AbortReason::Leaving, text: "the member leaves" };

type Key = (SocketAddr, u64);

/// A framed connection is over, as it tells the socket's owner. Its program may be gone, too.
struct Over {
    key: Key,
    is_program_gone: bool,
}

/// Serves switches at a socket, until the program is gone, or `leave` becomes true: then no new connection is taken,
/// and those that are there end when their switches have closed them.
///
/// # Errors
///
/// The socket fails, or the operating system gives no random numbers.
pub async fn serve(socket: UdpSocket, config: Config, leave: watch::Receiver<bool>) -> io::Result<End> {
    let way = Arc::new(Way { socket, outlet: Outlet::default() });
    let ended = serve_way(&way, config, leave).await;
    // What was said last is still to be sent.
    way.send();
    ended
}

async fn serve_way(way: &Arc<Way>, config: Config, mut leave: watch::Receiver<bool>) -> io::Result<End> {
    let (told, mut tellings) = mpsc::channel(64);
    let mut server = Server {
        way: Arc::clone(way),
        config,
        rng: Rng::new(random_seed()?),
        clock: Clock::start(),
        known: FairTable::new(CONNECTIONS_MAX, 0),
        memory: Room::new(MEMORY_MAX, 0),
        leave: leave.clone(),
        told,
    };
    let mut checks = Box::pin(watch_program(server.config.protocol, server.config.to));
    let mut limit = Box::pin(tokio::time::sleep(Duration::MAX));
    let mut is_leaving = false;
    loop {
        tokio::select! {
            received = batch::receive(&way.socket, |from, bytes| {
                if let Some(from) = from {
                    server.take(from, bytes);
                }
            }) => match received {
                Err(error) if error.kind() != io::ErrorKind::ConnectionRefused => return Err(error),
                // A switch is gone; others are not.
                _ => {}
            },
            () = way.outlet.wait() => {}
            Some(Over { key, is_program_gone }) = tellings.recv() => {
                server.known.remove(&key);
                if is_program_gone && let Err(why) = check(server.config.protocol, server.config.to).await {
                    return Ok(End::ProgramGone(why));
                }
            }
            why = &mut checks => return Ok(End::ProgramGone(why)),
            changed = leave.changed(), if !is_leaving => {
                // Nobody can say so any more: then it is time as well.
                is_leaving = changed.is_err() || *leave.borrow();
                if is_leaving {
                    limit = Box::pin(sleep(LEAVE_LIMIT));
                }
            }
            () = &mut limit => return Ok(End::Left),
        }
        way.send();
        if is_leaving && server.known.is_empty() {
            return Ok(End::Left);
        }
    }
}

/// Until a program does not answer any more.
async fn watch_program(protocol: Protocol, to: SocketAddr) -> String {
    let mut missed = 0;
    loop {
        sleep(CHECK_EVERY).await;
        match check(protocol, to).await {
            Ok(()) => missed = 0,
            Err(why) => {
                missed += 1;
                if missed >= CHECKS_MISSED_MAX {
                    return why;
                }
            }
        }
    }
}

/// The socket of a member, and what its connections say there.
struct Way {
    socket: UdpSocket,
    outlet: Outlet,
}

impl Way {
    /// Sends what waits. Of one switch: it finds out, or repeats.
    fn send(&self) {
        let _ = self.outlet.send(&self.socket);
    }
}

struct Server {
    way: Arc<Way>,
    config: Config,
    rng: Rng,
    clock: Clock,
    /// By framed connection, where its datagrams go.
    known: FairTable<Key, mpsc::Sender<Vec<u8>>>,
    /// Bytes that connections hold.
    memory: Room,
    leave: watch::Receiver<bool>,
    told: mpsc::Sender<Over>,
}

impl Server {
    fn take(&mut self, from: SocketAddr, datagram: &[u8]) {
        let Ok((number, says)) = Framed::parse(datagram) else { return };
        let key = (from, number);
        if let Some(known) = self.known.get(&key) {
            match known.try_send(datagram.to_vec()) {
                // Whoever took it is gone.
                Err(TrySendError::Closed(_)) => drop(self.known.remove(&key)),
                // One that is behind: its switch repeats what is lost.
                Ok(()) | Err(TrySendError::Full(_)) => return,
            }
        }
        match says {
            Framed::Hello { protocol, .. } if protocol != self.config.protocol.number() => {
                let text = self.config.protocol.refusal_of(protocol);
                self.answer(key, &Framed::abort(AbortReason::OtherProtocol, &text));
            }
            Framed::Hello { terms, host, .. } => self.accept(key, terms, host),
            // Of no connection: whether this member is there at all, and takes any.
            Framed::Ping if number == framed_host_number(&self.config.host) => {
                let is_leaving = *self.leave.borrow();
                self.answer(key, &if is_leaving { LEAVES } else { Framed::Pong });
            }
            Framed::Data(_) | Framed::Ping => self.answer(key, &Framed::abort(AbortReason::Unknown, "")),
            _ => {}
        }
    }

    fn answer(&self, (to, number): Key, says: &Framed<'_>) {
        self.way.outlet.push(Some(to), &bytes_of(number, says));
    }

    fn accept(&mut self, key: Key, terms: FramedTerms, host: [u8; 16]) {
        let is_meant = host == [0; 16] || self.config.host == [0; 16] || host == self.config.host;
        if !is_meant {
            return self.answer(key, &Framed::abort(AbortReason::OtherHost, "another host was meant"));
        }
        if *self.leave.borrow() {
            return self.answer(key, &LEAVES);
        }
        let peer = Peer::Unauthenticated(key.0.ip());
        let (sender, datagrams) = mpsc::channel(DATAGRAMS_MAX);
        if let Err(full) = self.known.insert(peer, key, sender) {
            let text = format!("the member takes no more connections of this host now: {full}");
            return self.answer(key, &Framed::abort(AbortReason::Full, &text));
        }
        let config = ConnectionConfig {
            first: Tsn(self.rng.u32()),
            send_buffer_bytes: SEND_BUFFER,
            receive_buffer_bytes: RECEIVE_BUFFER,
            ..ConnectionConfig::default()
        };
        let connection = Connection::accept(self.clock.now(), key.1, &terms, &self.config.label, config);
        let session = Session {
            way: Arc::clone(&self.way),
            to: key.0,
            clock: self.clock,
            connection,
            unwritten: Vec::new(),
            answers: Answers::new(self.config.protocol),
            program: Program { protocol: self.config.protocol, version: Version::default() },
            asked: VecDeque::new(),
            unsent: None,
            memory: self.memory.share(peer),
            has_memory: true,
        };
        let told = self.told.clone();
        let leave = self.leave.clone();
        let to = self.config.to;
        tokio::spawn(async move {
            let is_program_gone = session.run(to, datagrams, leave).await;
            // Nobody serves any more.
            let _ = told.send(Over { key, is_program_gone }).await;
        });
    }
}

/// What a framed connection's program speaks.
struct Program {
    protocol: Protocol,
    /// Of Redis' protocol, what it was greeted with last.
    version: Version,
}

impl Program {
    /// Appends what the program is told for a request. Gives how many answers come before the one to it; none: it is no
    /// request.
    fn tell(&mut self, request: &[u8], out: &mut Vec<u8>) -> Option<usize> {
        match self.protocol {
            Protocol::Memcached => {
                out.extend_from_slice(request);
                Some(0)
            }
            Protocol::Resp => {
                let carried = Carried::read(request)?;
                let is_other = std::mem::replace(&mut self.version, carried.version) != carried.version;
                if is_other {
                    out.extend_from_slice(carried.version.greeting());
                }
                carried.tell(out);
                Some(usize::from(is_other))
            }
        }
    }
}

/// One framed connection with its program.
struct Session {
    way: Arc<Way>,
    to: SocketAddr,
    clock: Clock,
    connection: Connection,
    program: Program,
    /// Requests that the program has not taken.
    unwritten: Vec<u8>,
    /// Answers that are not whole.
    answers: Answers,
    /// Requests that are not answered, in their order: their numbers, and how the answers end. Without a number the
    /// answer is nobody's.
    asked: VecDeque<(Option<u32>, Shape)>,
    /// An answer that there was no room for.
    unsent: Option<Vec<u8>>,
    /// Memory that the peer's host has.
    memory: Share,
    /// There is some for more.
    has_memory: bool,
}

impl Session {
    /// Until either end is over. Gives whether the program has ended it.
    async fn run(
        mut self,
        to: SocketAddr,
        mut datagrams: mpsc::Receiver<Vec<u8>>,
        mut leave: watch::Receiver<bool>,
    ) -> bool {
        let stream = match timeout(CONNECT_LIMIT, TcpStream::connect(to)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return self.program_gone(&format!("{} takes no connection: {error}", self.name())),
            Err(_) => return self.program_gone(&format!("{} takes no connection", self.name())),
        };
        // Without it answers wait a little longer.
        let _ = stream.set_nodelay(true);
        loop {
            self.flush();
            if matches!(self.connection.standing(), Standing::Over(_)) {
                return false;
            }
            let deadline = self.clock.deadline(self.connection.next_deadline());
            // Where all has been sent, the program may wait for its answers to be read, and requests for the program.
            let may_read = self.unsent.is_none() && (self.has_memory || self.connection.is_idle());
            tokio::select! {
                datagram = datagrams.recv() => match datagram {
                    Some(datagram) => {
                        self.hear(&datagram);
                        while let Ok(datagram) = datagrams.try_recv() {
                            self.hear(&datagram);
                        }
                    }
                    // Nobody serves any more: the switch would wait for answers until it finds out.
                    None => return self.program_gone("the member's framer has ended"),
                },
                ready = stream.readable(), if may_read => {
                    if let Err(error) = ready.and_then(|()| self.read(&stream)) {
                        return self.program_gone(&format!("{} has ended the connection: {error}", self.name()));
                    }
                }
                ready = stream.writable(), if !self.unwritten.is_empty() => {
                    if let Err(error) = ready.and_then(|()| self.write(&stream)) {
                        return self.program_gone(&format!("{} has ended the connection: {error}", self.name()));
                    }
                }
                changed = leave.changed() => {
                    if changed.is_err() {
                        return false;
                    }
                    if *leave.borrow() {
                        self.connection.leave(self.clock.now());
                    }
                }
                () = tokio::time::sleep_until(deadline) => {}
            }
            self.connection.on_time(self.clock.now());
            if let Err(error) = self.cut_answers() {
                return self.program_gone(&format!("{} does not speak its protocol: {error}", self.name()));
            }
            self.take_frames();
            self.account();
        }
    }

    /// Holds the other end back while there is no memory for what it sends.
    fn account(&mut self) {
        let kept = self.unwritten.len() + self.answers.len() + self.unsent.as_ref().map_or(0, Vec::len);
        let asked = self.asked.len() * size_of::<(Option<u32>, Shape)>();
        self.has_memory = self.memory.holds(self.connection.memory() + kept + asked);
        self.connection.hold_back(!self.has_memory);
    }

    /// What the program is called in words.
    fn name(&self) -> String {
        format!("the {}", self.program.protocol.program())
    }

    fn program_gone(&self, why: &str) -> bool {
        let says = bytes_of(self.connection.number(), &Framed::abort(AbortReason::Program, why));
        // At once: nobody may be there any more who sends it with what others say.
        self.way.outlet.push(Some(self.to), &says);
        self.way.send();
        true
    }

    fn hear(&mut self, datagram: &[u8]) {
        if let Ok((_, says)) = Framed::parse(datagram) {
            self.connection.on_datagram(self.clock.now(), &says);
        }
    }

    /// Sends what there is to be sent.
    fn flush(&mut self) {
        let now = self.clock.now();
        if let Some(answer) = self.unsent.take()
            && self.connection.send(now, Order::Member, &answer).is_err()
        {
            self.unsent = Some(answer);
        }
        let mut out = [0; Connection::DATAGRAM_MAX];
        while let Some(len) = self.connection.poll_datagram(now, &mut out) {
            self.way.outlet.push(Some(self.to), &out[..len]);
        }
    }

    /// Frames become requests, as long as the program keeps up.
    fn take_frames(&mut self) {
        while self.unwritten.len() < UNWRITTEN_MAX && self.asked.len() < UNANSWERED_MAX && self.unsent.is_none() {
            let Some(frame) = self.connection.poll_frame() else { return };
            let Some((head, request)) = Head::split(&frame.bytes) else { continue };
            match request.split_first() {
                Some((&ANSWER_IS, answer)) => self.answer(head.number, answer),
                _ => {
                    let Some(before) = self.program.tell(request, &mut self.unwritten) else {
                        self.answer(head.number, &self.program.protocol.error("this is no request"));
                        continue;
                    };
                    let shape = self.program.protocol.shape_of(request);
                    self.asked.extend(std::iter::repeat_n((None, shape), before));
                    self.asked.push_back((Some(head.number), shape));
                }
            }
        }
    }

    fn answer(&mut self, number: u32, answer: &[u8]) {
        let refusal = self.program.protocol.error(TOO_LARGE);
        // One that came with its request may have any length.
        let answer = if answer.len() > MESSAGE_MAX { &refusal } else { answer };
        let frame = Head { number, oldest: 0 }.frame(answer);
        if self.connection.send(self.clock.now(), Order::Member, &frame).is_err() {
            self.unsent = Some(frame);
        }
    }

    fn write(&mut self, stream: &TcpStream) -> io::Result<()> {
        pipe::write(stream, &mut self.unwritten)
    }

    fn read(&mut self, stream: &TcpStream) -> io::Result<()> {
        let mut come = Vec::new();
        let read = pipe::read(stream, &mut come)?;
        self.answers.push(&come);
        match read {
            Read::End => Err(io::ErrorKind::UnexpectedEof.into()),
            Read::Some | Read::Nothing => Ok(()),
        }
    }

    fn cut_answers(&mut self) -> io::Result<()> {
        while self.unsent.is_none() && self.answers.has_begun().map_err(io::Error::other)? {
            let Some((number, shape)) = self.asked.front().copied() else {
                return Err(io::Error::other("it says what nobody has asked for"));
            };
            let Some(answer) = self.answers.next(shape).map_err(io::Error::other)? else { return Ok(()) };
            self.asked.pop_front();
            if let Some(number) = number {
                self.answer(number, &answer);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn hello(number: u64) -> Vec<u8> {
        let terms = FramedTerms { tsn: 1, window_bytes: 1 << 20, window: 100, streams: 1 };
        bytes_of(number, &Framed::Hello { terms, host: [0; 16], protocol: Protocol::Memcached.number() })
    }

    /// Tasks of connections do not run: nothing is awaited.
    #[tokio::test]
    async fn one_host_leaves_room_for_others() {
        let socket = UdpSocket::bind("127.0.0.1:0").await.expect("a port");
        let (told, _tellings) = mpsc::channel(64);
        let (_leaves, leave) = watch::channel(false);
        let to = socket.local_addr().expect("bound");
        let mut server = Server {
            way: Arc::new(Way { socket, outlet: Outlet::default() }),
            config: Config { protocol: Protocol::Memcached, to, label: String::new(), host: [0; 16] },
            rng: Rng::new([0; 32]),
            clock: Clock::start(),
            known: FairTable::new(CONNECTIONS_MAX, 0),
            memory: Room::new(MEMORY_MAX, 0),
            leave,
            told,
        };
        let address = |host, port| SocketAddr::from(([192, 0, 2, host], port));
        for number in 0..=4096 {
            server.take(address(1, 1 + (number % 7) as u16), &hello(1 + number));
        }
        assert_eq!(server.known.len(), 4096, "a switch may have so many clients");
        server.take(address(2, 1), &hello(1));
        assert_eq!(server.known.len(), 4097);
        server.known.remove(&(address(1, 1), 1));
        server.take(address(1, 9), &hello(1));
        assert_eq!(server.known.len(), 4097);
    }
}
