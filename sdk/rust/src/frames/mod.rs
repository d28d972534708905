//! Framed sockets: frames that arrive whole, each to one server, and each in the order that its sender has chosen.
//!
//! A client ([`Frames::connect`]) reaches a server that listens for frames ([`FramesListener`]), or an ensemble whose
//! members do: a switch then gives each frame to one of them. Neither end can tell the difference by the calls.

mod driver;
mod listener;

use std::io;
use std::sync::{Arc, OnceLock};

use margay_ensemble::{Order, Over};
use margay_wire::{AbortReason, OWN_FRAME_KEY_MAX};
use tokio::sync::{mpsc, oneshot};

use crate::error::Error;
use crate::options::Options;
use crate::target::ToTarget;

pub use listener::FramesListener;

/// Longest frame, in bytes.
pub const FRAME_MAX: usize = 8 << 20;
/// Streams of a connection: those that frames name are below.
pub const FRAME_STREAMS_MAX: u16 = margay_ensemble::STREAMS_MAX as u16;
/// Frames that wait to be taken by the program; others wait at their sender.
const ARRIVALS_MAX: usize = 64;
/// Calls that wait for room.
const COMMANDS_MAX: usize = 64;

/// How a frame is sent. Unless said otherwise its place is behind those before it that go to the same server; it is
/// given to one server, once; and no answer is waited for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sending {
    order: Order,
    key: Vec<u8>,
    is_safe: bool,
    wants_answer: bool,
}

impl Default for Sending {
    fn default() -> Self {
        Self { order: Order::Member, key: Vec::new(), is_safe: false, wants_answer: false }
    }
}

impl Sending {
    /// As it is unless said otherwise.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Where it has its place: nowhere, behind those that go to the same server, or in a stream (1 to
    /// [`FRAME_STREAMS_MAX`] - 1), all of which goes to one server.
    #[must_use]
    pub fn order(mut self, order: Order) -> Self {
        self.order = order;
        self
    }

    /// What an ensemble's switch chooses the server by, at most 255 bytes: the same server for the same key. Without a
    /// key, servers are chosen one after the other.
    #[must_use]
    pub fn key(mut self, key: &[u8]) -> Self {
        self.key = key.to_vec();
        self
    }

    /// Where a server has died without acknowledging it, and nobody knows whether it has acted on it, another one is
    /// given it.
    #[must_use]
    pub fn safe(mut self) -> Self {
        self.is_safe = true;
        self
    }

    /// An answer is waited for: a server that is drained stays until it has given it, and [`Arrival::Lost`] tells that
    /// none will come.
    #[must_use]
    pub fn wants_answer(mut self) -> Self {
        self.wants_answer = true;
        self
    }

    fn check(&self, frame: &[u8]) -> Result<(), Error> {
        let is_stream = !matches!(self.order, Order::Stream(stream) if stream == 0 || stream >= FRAME_STREAMS_MAX);
        let why = if self.key.len() > OWN_FRAME_KEY_MAX {
            format!("the key has {} bytes, and may have {OWN_FRAME_KEY_MAX}", self.key.len())
        } else if frame.len() > FRAME_MAX {
            format!("the frame has {} bytes, and may have {FRAME_MAX}", frame.len())
        } else if !is_stream {
            format!("streams are 1 to {}", FRAME_STREAMS_MAX - 1)
        } else {
            return Ok(());
        };
        Err(Error::Io(io::Error::new(io::ErrorKind::InvalidInput, why)))
    }
}

/// A frame of the other end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// Of a client's frame, its number; of an answer, the number of what it answers, as [`Frames::send_with`] has given
    /// it; else zero.
    pub number: u32,
    /// It answers a frame.
    pub is_answer: bool,
    /// Its sender waits for an answer.
    pub wants_answer: bool,
    /// Where it had its place.
    pub order: Order,
    /// What a switch has chosen the server by.
    pub key: Vec<u8>,
    /// The program's bytes.
    pub bytes: Vec<u8>,
}

/// What comes from the other end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// A frame.
    Frame(Received),
    /// The server that had the frame of this number died with it: it may have acted on it, or not. If an answer was
    /// waited for, none will come.
    Lost(u32),
}

impl Arrival {
    /// Bytes of memory that it takes.
    fn memory(&self) -> usize {
        match self {
            Self::Frame(frame) => size_of::<Self>() + frame.key.len() + frame.bytes.len(),
            Self::Lost(_) => size_of::<Self>(),
        }
    }
}

/// A frame that is to be sent.
#[derive(Debug)]
struct Send {
    bytes: Vec<u8>,
    how: Sending,
    /// Of an answer, what it answers.
    answers: Option<u32>,
    done: oneshot::Sender<Result<u32, End>>,
}

/// One end of a framed connection. It is closed when it is dropped, after all that was sent has arrived, or five
/// seconds later.
#[derive(Debug)]
pub struct Frames {
    sender: FramesSender,
    receiver: FramesReceiver,
}

/// The half of a framed connection that sends. The connection is closed when it is dropped, as [`Frames`] is.
#[derive(Debug)]
pub struct FramesSender {
    sends: mpsc::Sender<Send>,
    over: Arc<OnceLock<End>>,
}

/// The half of a framed connection that receives. When it is dropped, what comes is thrown away.
#[derive(Debug)]
pub struct FramesReceiver {
    arrivals: mpsc::Receiver<Arrival>,
    over: Arc<OnceLock<End>>,
}

/// Why a connection is over.
#[derive(Clone, Debug)]
enum End {
    /// As the connection has it.
    Over(Over),
    /// Its socket has failed; of a connected one also: nobody is there.
    Socket(io::ErrorKind, String),
}

impl End {
    fn error(&self) -> Error {
        let (kind, why) = match self {
            Self::Socket(kind, why) => (*kind, why.clone()),
            Self::Over(over) => (kind_of(over), over.to_string()),
        };
        Error::Io(io::Error::new(kind, format!("the framed connection is over: {why}")))
    }
}

fn kind_of(over: &Over) -> io::ErrorKind {
    match over {
        Over::Silent => io::ErrorKind::TimedOut,
        Over::Aborted(AbortReason::NoMember | AbortReason::Leaving | AbortReason::OtherProtocol, _) => {
            io::ErrorKind::ConnectionRefused
        }
        Over::Closed | Over::ClosedByPeer | Over::Overfull | Over::Aborted(..) => io::ErrorKind::ConnectionReset,
    }
}

impl Frames {
    /// Connects to a server of frames, or to an ensemble.
    ///
    /// # Errors
    /// [`Error::Name`]; [`Error::AgentDown`]; [`Error::Refused`]; [`Error::Io`]: `TimedOut` where nobody answers,
    /// `ConnectionRefused` where there is none, or the other end does not take it.
    pub async fn connect(name: &(impl ToTarget + ?Sized)) -> Result<Self, Error> {
        Options::default().connect_frames(name).await
    }

    /// Sends a frame as [`Sending`] has it unless said otherwise. Gives its number.
    ///
    /// # Errors
    /// As [`send_with`](Self::send_with).
    pub async fn send(&self, frame: &[u8]) -> Result<u32, Error> {
        self.sender.send(frame).await
    }

    /// Sends a frame, as soon as there is room for it: what was sent before waits for the other end, too. Gives its
    /// number; a server's frames have none, and give zero. A call that is cancelled may have sent it.
    ///
    /// # Errors
    /// [`Error::Io`]: `InvalidInput` where the frame, its key or its stream cannot be; else the connection is over.
    pub async fn send_with(&self, frame: &[u8], how: &Sending) -> Result<u32, Error> {
        self.sender.send_with(frame, how).await
    }

    /// Answers a frame.
    ///
    /// # Errors
    /// As [`send_with`](Self::send_with).
    pub async fn answer(&self, to: &Received, frame: &[u8]) -> Result<(), Error> {
        self.sender.answer(to, frame).await
    }

    /// Answers the frame of this number.
    ///
    /// # Errors
    /// As [`send_with`](Self::send_with).
    pub async fn answer_number(&self, number: u32, frame: &[u8]) -> Result<(), Error> {
        self.sender.answer_number(number, frame).await
    }

    /// What comes next; nothing once the other end has closed the connection. A call that is cancelled loses nothing.
    ///
    /// # Errors
    /// [`Error::Io`]: the connection has ended otherwise.
    pub async fn recv(&mut self) -> Result<Option<Arrival>, Error> {
        self.receiver.recv().await
    }

    /// Two halves, for a task that receives while another one waits for room to send. Of two ends that send much to
    /// each other, each has to take frames meanwhile, or else both wait for ever.
    #[must_use]
    pub fn split(self) -> (FramesSender, FramesReceiver) {
        (self.sender, self.receiver)
    }

    /// Closes the connection, and waits until all that was sent has arrived, for five seconds at most.
    pub async fn close(self) {
        let Self { sender, mut receiver } = self;
        drop(sender);
        // The task lives as long as there is something to be waited for.
        while receiver.arrivals.recv().await.is_some() {}
    }
}

impl FramesSender {
    /// Sends a frame as [`Sending`] has it unless said otherwise. Gives its number.
    ///
    /// # Errors
    /// As [`send_with`](Self::send_with).
    pub async fn send(&self, frame: &[u8]) -> Result<u32, Error> {
        self.send_with(frame, &Sending::default()).await
    }

    /// Sends a frame, as soon as there is room for it: what was sent before waits for the other end, too. Gives its
    /// number; a server's frames have none, and give zero. A call that is cancelled may have sent it.
    ///
    /// # Errors
    /// [`Error::Io`]: `InvalidInput` where the frame, its key or its stream cannot be; else the connection is over.
    pub async fn send_with(&self, frame: &[u8], how: &Sending) -> Result<u32, Error> {
        self.say(frame, how, None).await
    }

    /// Answers a frame.
    ///
    /// # Errors
    /// As [`send_with`](Self::send_with).
    pub async fn answer(&self, to: &Received, frame: &[u8]) -> Result<(), Error> {
        self.answer_number(to.number, frame).await
    }

    /// Answers the frame of this number.
    ///
    /// # Errors
    /// As [`send_with`](Self::send_with).
    pub async fn answer_number(&self, number: u32, frame: &[u8]) -> Result<(), Error> {
        self.say(frame, &Sending::default(), Some(number)).await.map(drop)
    }

    async fn say(&self, frame: &[u8], how: &Sending, answers: Option<u32>) -> Result<u32, Error> {
        how.check(frame)?;
        let (done, sent) = oneshot::channel();
        let send = Send { bytes: frame.to_vec(), how: how.clone(), answers, done };
        let is_taken = self.sends.send(send).await.is_ok();
        match if is_taken { sent.await.ok() } else { None } {
            Some(sent) => sent.map_err(|end| end.error()),
            None => Err(end_of(&self.over).error()),
        }
    }
}

impl FramesReceiver {
    /// What comes next; nothing once the other end has closed the connection. A call that is cancelled loses nothing.
    ///
    /// # Errors
    /// [`Error::Io`]: the connection has ended otherwise.
    pub async fn recv(&mut self) -> Result<Option<Arrival>, Error> {
        if let Some(arrival) = self.arrivals.recv().await {
            return Ok(Some(arrival));
        }
        match end_of(&self.over) {
            End::Over(Over::ClosedByPeer | Over::Closed) => Ok(None),
            end => Err(end.error()),
        }
    }
}

/// Why a connection is over, once it is. Without a reason the runtime has ended.
fn end_of(over: &OnceLock<End>) -> End {
    over.get().cloned().unwrap_or_else(|| {
        End::Socket(io::ErrorKind::ConnectionAborted, "the runtime that carries it has ended".to_owned())
    })
}
