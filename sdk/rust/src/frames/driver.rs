//! What carries one framed connection: a task between the program's calls and the datagrams of a flow.

use std::collections::{BTreeSet, VecDeque};
use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant as SystemInstant};

use margay_core::Instant;
use margay_ensemble::{Connection, Standing};
use margay_wire::{Framed, OWN_FRAME_HEADER_LEN, OwnFrameRepr};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::sleep_until;

use super::{ARRIVALS_MAX, Arrival, COMMANDS_MAX, End, Frames, FramesReceiver, FramesSender, Received, Send};
use crate::datagram::{Connected, Datagrams};
use crate::shares::Share;

/// Longest datagram that is looked at.
pub(super) const DATAGRAM_MAX: usize = 2048;
/// What was sent has so long to arrive, once the program wants no more of a connection.
const LINGER: Duration = Duration::from_secs(5);
/// Frames that may be numbered beyond the oldest that waits for an answer: a switch remembers no more.
const OPEN_MAX: u64 = 60_000;
/// Numbers that are remembered as settled: as many as a switch remembers.
const SETTLED_MAX: usize = 1 << 16;
/// A timer that is not wanted.
const FAR: Duration = Duration::from_secs(3600);

/// Time as connections know it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock(SystemInstant);

impl Clock {
    pub(super) fn start() -> Self {
        Self(SystemInstant::now())
    }

    pub(super) fn now(self) -> Instant {
        // In half a million years a number of 64 bits is too small.
        Instant::from_micros(self.0.elapsed().as_micros() as u64)
    }

    fn deadline(self, at: Option<Instant>) -> tokio::time::Instant {
        let after = at.map_or_else(|| self.0.elapsed() + FAR, |at| Duration::from_micros(at.micros()));
        tokio::time::Instant::from_std(self.0 + after)
    }
}

/// How datagrams come and go.
#[derive(Debug)]
pub(super) enum Way {
    /// By a socket of the connection's own.
    Own(Box<Connected>),
    /// By one that others use, too.
    Shared { socket: Arc<Datagrams>, to: SocketAddr, datagrams: mpsc::Receiver<Vec<u8>> },
}

impl Way {
    /// The next datagram. A call that is cancelled loses none.
    async fn receive(&mut self) -> io::Result<Vec<u8>> {
        match self {
            Self::Own(socket) => {
                let mut bytes = vec![0; DATAGRAM_MAX];
                let len = socket.as_udp().recv(&mut bytes).await?;
                bytes.truncate(len);
                Ok(bytes)
            }
            Self::Shared { datagrams, .. } => {
                datagrams.recv().await.ok_or_else(|| io::Error::other("the listener's socket has failed"))
            }
        }
    }

    /// What there is no room for is lost, as on the way: the connection repeats it.
    fn send(&self, datagram: &[u8]) -> io::Result<()> {
        let sent = match self {
            Self::Own(socket) => socket.as_udp().try_send(datagram),
            // Of others' peers: this one is found out by its silence.
            Self::Shared { socket, to, .. } => socket.as_udp().try_send_to(datagram, *to).or(Ok(0)),
        };
        match sent {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(()),
        }
    }
}

/// Ends when the listener takes no new connections.
async fn leaving(of_listener: Option<&mut watch::Receiver<bool>>) {
    match of_listener {
        None => pending().await,
        // Its end is one as well.
        Some(is_leaving) => drop(is_leaving.wait_for(|is_leaving| *is_leaving).await),
    }
}

/// The numbers of a client's frames.
#[derive(Clone, Debug, Default)]
struct Numbers {
    next: u64,
    /// Those that wait for an answer.
    awaited: BTreeSet<u64>,
    /// Those that have one, or were told as lost: a switch may say so of them once more.
    settled: BTreeSet<u64>,
}

impl Numbers {
    fn oldest(&self) -> u64 {
        self.awaited.first().copied().unwrap_or(self.next)
    }

    /// An answer has come to a number, or none will. Whether the program is to hear of it.
    fn settle(&mut self, number: u64) -> bool {
        self.awaited.remove(&number);
        let is_new = self.settled.insert(number);
        if self.settled.len() > SETTLED_MAX {
            self.settled.pop_first();
        }
        is_new
    }

    /// The whole number of one that has come.
    fn whole(&self, number: u32) -> Option<u64> {
        // The lower half is what is sent.
        let back = (self.next as u32).wrapping_sub(number);
        self.next.checked_sub(back.into())
    }
}

/// Carries one framed connection over datagrams, and answers its owner.
pub(super) struct Driver {
    connection: Connection,
    clock: Clock,
    way: Way,
    /// Of a client.
    numbers: Option<Numbers>,
    sends: mpsc::Receiver<Send>,
    /// One that there is no room for.
    unsent: Option<Send>,
    arrivals: mpsc::Sender<Arrival>,
    /// One that the program has no room for.
    held: Option<Arrival>,
    /// How long frames are that the program was given last: the last of them wait for it.
    given: VecDeque<usize>,
    /// Of a server's end, memory that its peer has.
    memory: Option<Share>,
    over: Arc<OnceLock<End>>,
    /// When the connection is closed whatever waits; none: the program has it.
    closes_at: Option<tokio::time::Instant>,
    /// Whether the listener takes no new connections, of a server's end that has not said so.
    is_leaving: Option<watch::Receiver<bool>>,
}

impl Driver {
    /// The two halves of a connection: the task's, and the program's.
    pub(super) fn new(
        connection: Connection,
        clock: Clock,
        way: Way,
        is_leaving: Option<watch::Receiver<bool>>,
        memory: Option<Share>,
    ) -> (Self, Frames) {
        let (sends, to_send) = mpsc::channel(COMMANDS_MAX);
        let (arrived, arrivals) = mpsc::channel(ARRIVALS_MAX);
        let over = Arc::new(OnceLock::new());
        let numbers = matches!(way, Way::Own(_)).then(Numbers::default);
        let this = Self {
            connection,
            clock,
            way,
            numbers,
            sends: to_send,
            unsent: None,
            arrivals: arrived,
            held: None,
            given: VecDeque::new(),
            memory,
            over: Arc::clone(&over),
            closes_at: None,
            is_leaving,
        };
        let sender = FramesSender { sends, over: Arc::clone(&over) };
        (this, Frames { sender, receiver: FramesReceiver { arrivals, over } })
    }

    /// Carries the connection until it is over. `opened` hears how it began.
    pub(super) async fn run(mut self, opened: Option<oneshot::Sender<Result<(), End>>>) {
        let mut opened = opened;
        let end = loop {
            if let Err(error) = self.settle() {
                break End::Socket(error.kind(), error.to_string());
            }
            match self.connection.standing() {
                Standing::Over(over) => break End::Over(over.clone()),
                Standing::Open => {
                    // Whoever opened it may have gone: then the calls' channel is closed, too.
                    let _ = opened.take().map(|opened| opened.send(Ok(())));
                }
                Standing::Opening => {}
            }
            if let Err(error) = self.wait().await {
                break End::Socket(error.kind(), error.to_string());
            }
        };
        // Before the channels end, which say that there is a reason.
        let _ = self.over.set(end.clone());
        let _ = opened.take().map(|opened| opened.send(Err(end.clone())));
        // A program that waits until it has sent something takes what has come only after that.
        self.sends.close();
        while let Some(send) = match self.unsent.take() {
            Some(send) => Some(send),
            None => self.sends.recv().await,
        } {
            let _ = send.done.send(Err(end.clone()));
        }
        // What came before the end is the program's, as long as it wants that.
        while let Some(arrival) = self.held.take().or_else(|| self.next_arrival()) {
            if self.arrivals.send(arrival).await.is_err() {
                break;
            }
        }
        if self.memory.is_some() {
            // What the program has not taken counts for the peer until it has, or wants no more: then this fails.
            let _ = self.arrivals.reserve_many(ARRIVALS_MAX).await;
        }
    }

    /// Does what follows from what has come.
    fn settle(&mut self) -> io::Result<()> {
        let now = self.clock.now();
        self.connection.on_time(now);
        self.give_on();
        self.send_frames(now);
        self.account();
        let is_open = self.numbers.as_ref().is_some_and(|numbers| !numbers.awaited.is_empty());
        self.connection.await_frames(now, is_open);
        let is_late = self.closes_at.is_some_and(|at| at <= tokio::time::Instant::now());
        if self.closes_at.is_some() && self.unsent.is_none() && (self.connection.is_idle() || is_late) {
            self.connection.close();
        }
        let mut out = [0; Connection::DATAGRAM_MAX];
        while let Some(len) = self.connection.poll_datagram(now, &mut out) {
            self.way.send(&out[..len])?;
        }
        Ok(())
    }

    /// Holds the other end back while there is no memory for what it sends.
    fn account(&mut self) {
        let Some(memory) = &mut self.memory else { return };
        let waiting = self.arrivals.max_capacity() - self.arrivals.capacity();
        self.given.drain(..self.given.len().saturating_sub(waiting));
        let bytes = self.connection.memory() + self.held.as_ref().map_or(0, Arrival::memory);
        self.connection.hold_back(!memory.holds(bytes + self.given.iter().sum::<usize>()));
    }

    /// Gives the program what has come, as far as it takes it.
    fn give_on(&mut self) {
        loop {
            let Some(arrival) = self.held.take().or_else(|| self.next_arrival()) else { return };
            let len = arrival.memory();
            match self.arrivals.try_send(arrival) {
                Ok(()) => self.given.push_back(len),
                // Who takes none any more has closed it, or is about to.
                Err(TrySendError::Closed(_)) => {}
                Err(TrySendError::Full(arrival)) => {
                    self.held = Some(arrival);
                    return;
                }
            }
        }
    }

    fn next_arrival(&mut self) -> Option<Arrival> {
        while let Some(frame) = self.connection.poll_frame() {
            // What is none stands for one that a switch gives nobody.
            let Some(repr) = OwnFrameRepr::parse(&frame.bytes) else { continue };
            if let Some(numbers) = self.numbers.as_mut().filter(|_| repr.is_answer)
                && let Some(number) = numbers.whole(repr.number)
                && !numbers.settle(number)
            {
                // It is late: the program was told that there is none.
                continue;
            }
            return Some(Arrival::Frame(Received {
                number: repr.number,
                is_answer: repr.is_answer,
                wants_answer: repr.wants_answer,
                order: frame.order,
                key: repr.key.to_vec(),
                bytes: repr.payload.to_vec(),
            }));
        }
        while let Some(number) = self.connection.poll_lost() {
            let numbers = self.numbers.as_mut()?;
            if numbers.whole(number).is_some_and(|number| numbers.settle(number)) {
                return Some(Arrival::Lost(number));
            }
        }
        None
    }

    fn send_frames(&mut self, now: Instant) {
        loop {
            let Some(send) = self.unsent.take().or_else(|| self.sends.try_recv().ok()) else { return };
            if let Some(send) = self.send(now, send) {
                self.unsent = Some(send);
                return;
            }
        }
    }

    /// Gives the frame back where there is no room for it now.
    fn send(&mut self, now: Instant, send: Send) -> Option<Send> {
        let Send { bytes, how, answers, .. } = &send;
        let numbers = self.numbers.as_ref();
        let next = numbers.map_or(0, |numbers| numbers.next);
        let oldest = numbers.map_or(0, Numbers::oldest);
        if next - oldest >= OPEN_MAX {
            return Some(send);
        }
        let wants_answer = how.wants_answer && answers.is_none();
        let repr = OwnFrameRepr {
            // The lower halves are what is sent.
            number: answers.unwrap_or(next as u32),
            oldest: oldest as u32,
            is_safe: how.is_safe,
            wants_answer,
            is_answer: answers.is_some(),
            key: &how.key,
            payload: bytes,
        };
        let mut frame = vec![0; OWN_FRAME_HEADER_LEN + how.key.len() + bytes.len()];
        let is_sent = repr.emit(&mut frame).is_some() && self.connection.send(now, how.order, &frame).is_ok();
        if !is_sent {
            return Some(send);
        }
        // An answer has the number of what it answers, and none of its own.
        if let Some(numbers) = self.numbers.as_mut().filter(|_| answers.is_none()) {
            numbers.next += 1;
            if wants_answer {
                numbers.awaited.insert(next);
            }
        }
        let _ = send.done.send(Ok(next as u32));
        None
    }

    /// Waits for something to do.
    async fn wait(&mut self) -> io::Result<()> {
        let deadline = self.clock.deadline(self.connection.next_deadline());
        let deadline = self.closes_at.map_or(deadline, |at| deadline.min(at));
        let may_take = self.unsent.is_none() && self.closes_at.is_none();
        tokio::select! {
            datagram = self.way.receive() => {
                let datagram = datagram?;
                if let Ok((number, says)) = Framed::parse(&datagram)
                    && number == self.connection.number()
                {
                    self.connection.on_datagram(self.clock.now(), &says);
                }
            }
            send = self.sends.recv(), if may_take => match send {
                Some(send) => self.unsent = Some(send),
                None => self.closes_at = Some(tokio::time::Instant::now() + LINGER),
            },
            // Whatever is held goes there with the next look.
            _ = self.arrivals.reserve(), if self.held.is_some() && !self.arrivals.is_closed() => {}
            () = leaving(self.is_leaving.as_mut()) => {
                self.is_leaving = None;
                self.connection.leave(self.clock.now());
            }
            () = sleep_until(deadline) => {}
        }
        Ok(())
    }
}
