//! One client's connection: its requests become frames, and its answers come in its order.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use margay_core::rng::Rng;
use margay_ensemble::{Connection, ConnectionConfig, Order, Over, Standing, Tsn};
use margay_sdk::shares::Share;
use margay_wire::{AbortReason, Framed};
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, sleep_until};

use super::Reach;
use super::flow::{Flows, Place};
use super::slots::Slots;
use crate::clock::Clock;
use crate::head::Head;
use crate::pipe::{self, Read};
use crate::protocol::{Asked, Protocol, Reader, Step};
use crate::random_seed;
use crate::router::MEMBER_DIED;

/// Parts of requests that may be open before the next request is read.
const OPEN_MAX: usize = 256;
/// Bytes of requests that may be repeated, and of answers that wait for those before them or for the client, with what
/// it takes to keep them, before the next request is read.
const UNWRITTEN_MAX: usize = 4 << 20;
/// Bytes of frames that wait, or are under way: a request with the largest item, and a long row of small ones.
const SEND_BUFFER: usize = 9 << 20;
/// Bytes of frames that are put together: an answer with the largest item.
const RECEIVE_BUFFER: usize = 9 << 20;
/// A client waits so long at most while no switch answers.
const REACH_LIMIT: Duration = Duration::from_secs(2);
/// Pause before a switch is asked again that did not take the connection.
const REACH_PAUSE: Duration = Duration::from_millis(50);
/// A client with a part of a request waits so long at most for memory for the rest: another one may wait for its part.
const MEMORY_LIMIT: Duration = Duration::from_secs(2);
/// Pause before memory is asked for again.
const MEMORY_PAUSE: Duration = Duration::from_millis(50);
/// A connection with a switch that ended sooner was no good: the pauses before the next one double, where that happens
/// again and again.
const GOOD_AFTER: Duration = Duration::from_secs(2);
/// So often: up to 3.2 s.
const DOUBLED_MAX: u32 = 6;
/// What a client is told of requests that nobody knows the fate of.
const CONNECTION_ENDED: &str = "the connection with the ensemble ended with this request; it may be done, or not";

/// A framed connection, and its place in a flow. However the client's end of it goes, the switch and its members are
/// told: they would keep the connection for as long as a framer may be silent.
struct Link {
    place: Place,
    connection: Connection,
    clock: Clock,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.connection.close();
        flush(self);
    }
}

/// One client.
pub(super) struct Session<R> {
    client: TcpStream,
    protocol: Protocol,
    reader: Reader,
    reach: Arc<R>,
    flows: Arc<Flows>,
    clock: Clock,
    slots: Slots,
    /// What the client has said, and was not yet a whole request.
    unread: Vec<u8>,
    /// The client says no more.
    is_eof: bool,
    /// So many bytes of a request are wanted before it is looked at again.
    wanted: usize,
    /// So many bytes of the client are passed over.
    skip: usize,
    /// Answers that the client has not taken.
    unwritten: Vec<u8>,
    /// Frames that the connection has no room for yet, or that wait for it to begin.
    unsent: Vec<Vec<u8>>,
    /// The client is told no more, once it has its answers.
    is_last: bool,
    /// The framed connection has begun.
    is_open: bool,
    /// Since when no switch answers.
    unreached_since: Option<Instant>,
    /// Memory that the client's host has.
    memory: Share,
    /// There is some for more.
    has_memory: bool,
    /// Since when only memory is missing for the client to go on.
    stuck_since: Option<Instant>,
}

impl<R: Reach> Session<R> {
    pub(super) fn new(client: TcpStream, protocol: Protocol, reach: Arc<R>, flows: Arc<Flows>, memory: Share) -> Self {
        Self {
            client,
            protocol,
            reader: Reader::new(protocol),
            reach,
            flows,
            clock: Clock::start(),
            slots: Slots::new(protocol),
            unread: Vec::new(),
            is_eof: false,
            wanted: 0,
            skip: 0,
            unwritten: Vec::new(),
            unsent: Vec::new(),
            is_last: false,
            is_open: false,
            unreached_since: None,
            memory,
            has_memory: true,
            stuck_since: None,
        }
    }

    /// Until the client goes.
    pub(super) async fn run(mut self) -> io::Result<()> {
        self.client.set_nodelay(true)?;
        let mut failures = 0;
        loop {
            let began = Instant::now();
            let mut is_by_module = false;
            let why = match self.open().await {
                Ok(mut link) => match self.carry(&mut link).await? {
                    Some(over) => {
                        link.place.spend();
                        is_by_module = matches!(over, Over::Aborted(AbortReason::Module, _));
                        over.to_string()
                    }
                    None => return Ok(()),
                },
                Err(error) => error.to_string(),
            };
            tracing::debug!(name = self.reach.name(), why, "a framed connection is over");
            let was_open = std::mem::take(&mut self.is_open);
            if is_by_module {
                // Repeated, it would have the module fail once more.
                self.refuse(&why).await?;
            } else if was_open {
                self.unsent = self.slots.restart(&self.protocol.error(CONNECTION_ENDED));
                failures = if began.elapsed() >= GOOD_AFTER { 0 } else { failures + 1 };
                // A switch that has just restarted causes one failure.
                if failures > 1 {
                    sleep(REACH_PAUSE * (1 << failures.min(DOUBLED_MAX))).await;
                }
            } else {
                self.wait_for_reach(&why).await?;
            }
            if self.is_done() {
                return Ok(());
            }
        }
    }

    /// Whether the client has all, and says no more.
    fn is_done(&self) -> bool {
        let is_over = self.is_last || self.is_eof;
        is_over && self.slots.open() == 0 && self.unsent.is_empty() && self.unwritten.is_empty()
    }

    async fn open(&self) -> io::Result<Link> {
        let mut rng = Rng::new(random_seed()?);
        let number = rng.u64().max(1);
        let place = self.flows.join(&*self.reach, number).await?;
        let config = ConnectionConfig {
            first: Tsn(rng.u32()),
            send_buffer_bytes: SEND_BUFFER,
            receive_buffer_bytes: RECEIVE_BUFFER,
            protocol: self.protocol.number(),
            ..ConnectionConfig::default()
        };
        let connection = Connection::open(self.clock.now(), number, [0; 16], config);
        Ok(Link { place, connection, clock: self.clock })
    }

    /// No switch takes the connection: after a while the client is told so.
    async fn wait_for_reach(&mut self, why: &str) -> io::Result<()> {
        let since = *self.unreached_since.get_or_insert_with(Instant::now);
        if since.elapsed() >= REACH_LIMIT {
            self.refuse(&format!("no switch answers: {why}")).await?;
        }
        self.account(None)?;
        let may_read = self.may_read();
        tokio::select! {
            ready = self.client.readable(), if may_read => {
                ready?;
                self.read()?;
            }
            () = sleep(REACH_PAUSE) => return Ok(()),
        }
        sleep(REACH_PAUSE).await;
        Ok(())
    }

    /// The client is told why nothing is done, and nothing is tried before it wants something.
    async fn refuse(&mut self, why: &str) -> io::Result<()> {
        self.refuse_all(why);
        self.write_all().await?;
        self.unreached_since = None;
        if !self.is_done() {
            self.client.readable().await?;
        }
        Ok(())
    }

    fn refuse_all(&mut self, why: &str) {
        // It may have words of another host in it.
        let why: String = why.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect();
        let answer = self.protocol.error(&format!("{}: {why}", self.reach.name()));
        loop {
            self.take_requests();
            self.unsent.clear();
            self.slots.refuse_all(&answer);
            self.take_answers();
            if !self.may_take() {
                break;
            }
        }
    }

    /// Answers whose turn has come are the client's.
    fn take_answers(&mut self) {
        self.slots.write(&mut self.unwritten);
        if let Some(is_taken) = self.slots.take_greeted() {
            self.reader.greeted(is_taken);
        }
    }

    async fn write_all(&mut self) -> io::Result<()> {
        while !self.unwritten.is_empty() {
            self.client.writable().await?;
            self.write()?;
        }
        Ok(())
    }

    /// Carries requests and answers. Gives why the framed connection is over; nothing: the client has gone.
    async fn carry(&mut self, link: &mut Link) -> io::Result<Option<Over>> {
        loop {
            self.settle(link);
            self.account(Some(&mut link.connection))?;
            flush(link);
            match link.connection.standing() {
                Standing::Over(over) => return Ok(Some(over.clone())),
                Standing::Open => (self.is_open, self.unreached_since) = (true, None),
                Standing::Opening => {}
            }
            if self.is_done() {
                return Ok(None);
            }
            let deadline = self.clock.deadline(link.connection.next_deadline());
            let deadline = if self.has_memory { deadline } else { deadline.min(Instant::now() + MEMORY_PAUSE) };
            let may_read = self.may_read();
            let Link { place, connection, clock } = link;
            tokio::select! {
                message = place.receive() => {
                    let Some(message) = message else {
                        return Ok(Some(Over::Aborted(AbortReason::Unknown, place.why())));
                    };
                    hear(connection, clock, &message);
                    while let Some(message) = place.receive_now() {
                        hear(connection, clock, &message);
                    }
                }
                // Also of a client that is held back, and not read from.
                failed = self.client.ready(Interest::ERROR) => {
                    failed?;
                    return Err(self.client.take_error()?.unwrap_or_else(|| io::ErrorKind::ConnectionReset.into()));
                }
                ready = self.client.readable(), if may_read => {
                    ready?;
                    self.read()?;
                }
                ready = self.client.writable(), if !self.unwritten.is_empty() => {
                    ready?;
                    self.write()?;
                }
                () = sleep_until(deadline) => {}
            }
        }
    }

    /// Whether the client may say more: it is held back while it does not take its answers.
    fn may_read(&self) -> bool {
        let waiting = self.unwritten.len() + self.slots.held_bytes();
        let is_held = self.is_last || self.is_eof || self.reader.is_waiting();
        let has_room = self.has_memory && waiting < UNWRITTEN_MAX;
        !is_held && self.slots.open() < OPEN_MAX && has_room && self.unsent.is_empty()
    }

    /// Holds the client and the other end back while there is no memory for what they send.
    fn account(&mut self, connection: Option<&mut Connection>) -> io::Result<()> {
        let unsent: usize = self.unsent.iter().map(Vec::len).sum();
        let own = self.unread.len() + self.unwritten.len() + self.slots.held_bytes() + unsent;
        self.has_memory = self.memory.holds(own + connection.as_ref().map_or(0, |connection| connection.memory()));
        if let Some(connection) = connection {
            connection.hold_back(!self.has_memory);
        }
        // A part of a request waits for the rest.
        let is_stuck = !self.has_memory && self.slots.open() == 0 && self.unwritten.is_empty();
        self.stuck_since = self.stuck_since.or_else(|| Some(Instant::now())).filter(|_| is_stuck);
        match self.stuck_since {
            Some(since) if since.elapsed() >= MEMORY_LIMIT => Err(io::ErrorKind::OutOfMemory.into()),
            _ => Ok(()),
        }
    }

    /// Says what follows from what has come.
    fn settle(&mut self, link: &mut Link) {
        let now = self.clock.now();
        let connection = &mut link.connection;
        connection.on_time(now);
        // Others wait where they are: at the servers in the end.
        while self.unwritten.len() < UNWRITTEN_MAX
            && let Some(frame) = connection.poll_frame()
        {
            if let Some((head, answer)) = Head::split(&frame.bytes) {
                self.slots.answer(head.number, answer.to_vec(), self.has_memory);
                self.slots.write(&mut self.unwritten);
            }
        }
        // Not before what has come of their answers is known.
        while self.unwritten.len() < UNWRITTEN_MAX
            && let Some(number) = connection.poll_lost()
        {
            self.unsent.extend(self.slots.lost(number, &self.protocol.error(MEMBER_DIED)));
        }
        self.take_answers();
        self.take_requests();
        let sent = self.unsent.iter().take_while(|frame| connection.send(now, Order::Member, frame).is_ok()).count();
        self.unsent.drain(..sent);
        connection.await_frames(now, self.slots.open() > 0);
        // Those that needed no server.
        self.take_answers();
    }

    /// Reads requests of what the client has said.
    fn take_requests(&mut self) {
        let mut at = 0;
        while self.may_take() && at < self.unread.len() {
            match self.reader.step(&self.unread[at..]) {
                Step::More(wanted) => {
                    self.wanted = wanted.unwrap_or(self.unread.len() - at + 1);
                    break;
                }
                Step::Passed(len) => at += self.pass(at, len),
                Step::Taken(len, asked) => {
                    at += self.pass(at, len);
                    self.take(asked);
                }
            }
        }
        self.unread.drain(..at);
    }

    /// So many bytes are done with, of which not all need be there. Gives how many are.
    fn pass(&mut self, at: usize, len: usize) -> usize {
        let there = len.min(self.unread.len() - at);
        (self.skip, self.wanted) = (len - there, 0);
        there
    }

    fn may_take(&self) -> bool {
        let is_enough = !self.unread.is_empty() && self.unread.len() >= self.wanted;
        let is_held = self.is_last || self.reader.is_waiting();
        is_enough && !is_held && self.slots.open() < OPEN_MAX && self.unsent.len() < OPEN_MAX
    }

    fn take(&mut self, asked: Asked) {
        match asked {
            Asked::Servers { parts, join } => self.unsent.extend(self.slots.ask(parts, join)),
            Asked::Answer(answer) => self.slots.answered(answer),
            Asked::Last(answer) => {
                self.slots.answered(answer);
                self.is_last = true;
            }
        }
    }

    fn read(&mut self) -> io::Result<()> {
        let len = self.unread.len();
        self.is_eof |= pipe::read(&self.client, &mut self.unread)? == Read::End;
        let skipped = self.skip.min(self.unread.len() - len);
        self.unread.drain(len..len + skipped);
        self.skip -= skipped;
        Ok(())
    }

    fn write(&mut self) -> io::Result<()> {
        pipe::write(&self.client, &mut self.unwritten)
    }
}

fn hear(connection: &mut Connection, clock: &Clock, message: &[u8]) {
    if let Ok((_, says)) = Framed::parse(message) {
        connection.on_datagram(clock.now(), &says);
    }
}

/// Sends what there is to be sent.
fn flush(link: &mut Link) {
    let mut out = [0; Connection::DATAGRAM_MAX];
    while let Some(len) = link.connection.poll_datagram(link.clock.now(), &mut out) {
        link.place.send(&out[..len]);
    }
}

#[cfg(test)]
mod test {
    use std::net::SocketAddr;

    use margay_core::fair_table::Peer;
    use margay_sdk::shares::{MEMORY_FLOOR, Room};
    use tokio::io::AsyncWriteExt;
    use tokio::net::{TcpListener, UdpSocket};

    use super::*;

    struct To(SocketAddr);

    impl Reach for To {
        async fn open(&self) -> io::Result<UdpSocket> {
            let socket = UdpSocket::bind("127.0.0.1:0").await?;
            socket.connect(self.0).await?;
            Ok(socket)
        }

        fn name(&self) -> &'static str {
            "cache.test"
        }
    }

    #[tokio::test]
    async fn a_client_whose_host_has_no_memory_left_is_not_read_from_and_ends_with_half_a_request() {
        const SENT: usize = 4 << 20;
        let switch = UdpSocket::bind("127.0.0.1:0").await.expect("a port");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let mut program = TcpStream::connect(listener.local_addr().expect("bound")).await.expect("connected");
        let (client, from) = listener.accept().await.expect("accepted");
        let memory = Room::new(16 * MEMORY_FLOOR, 0);
        let reach = Arc::new(To(switch.local_addr().expect("bound")));
        let share = memory.share(Peer::Unauthenticated(from.ip()));
        let mut session = Session::new(client, Protocol::Memcached, reach, Arc::default(), share);
        session.unread = [&b"set a 0 0 8000000\r\n"[..], &[b'x'; MEMORY_FLOOR]].concat();
        let request = tokio::spawn(async move { program.write_all(&[b'x'; SENT]).await });
        let ended = tokio::time::timeout(Duration::from_secs(20), session.run()).await.expect("an end");
        assert_eq!(ended.map_err(|error| error.kind()), Err(io::ErrorKind::OutOfMemory));
        assert!(request.await.expect("no panic").is_err(), "most of it was never read");
        let mut other = memory.share(Peer::Unauthenticated([192, 0, 2, 1].into()));
        assert!(other.holds(2 * MEMORY_FLOOR), "another host has its share");
    }
}
