//! `margay ensemble socket`: a framed socket for a program of another language than Rust (docs/decisions/0087). The
//! program starts this one with a Unix stream as its standard input, and says there what is to be sent.
//!
//! ```text
//!  each message: 0..4 bytes that follow | 4 kind | value
//!
//!  S  program  send: 0 flags | 1..3 order | 3..7 number of what is answered | 7 length of the key | 8.. key | payload
//!  O  socket   it is open, or served
//!  F  socket   a frame: as S, with the frame's own number
//!  L  socket   0..4 number: the server died with this frame
//!  A  socket   a connection was accepted, whose stream comes with the message: 0.. name of who has opened it
//!  E  socket   0..4 errno | 4.. text: it is over, or could not be
//! ```
//! Flags: 1 safe, 2 wants an answer, 4 is one. Order: 0 per member, 0xffff none, else a stream. The end of the standard
//! input's stream is the end of the connection, either way.

use std::io::{self, ErrorKind, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream as StdStream;

use clap::{Args, Subcommand};
use margay_sdk::{Agent, Arrival, Error, FRAME_MAX, Frames, FramesListener, Options, Order, Received, Sending};
use miette::{IntoDiagnostic, Result};
use nix::errno::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::OwnedReadHalf;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::agent_of;
use crate::config::Config;

/// Where programs say which agent they mean, as the SDKs do.
const PROGRAMS_VARIABLE: &str = "MARGAY_PROGRAMS";
/// Bytes before the payload, with the longest key.
const HEAD_MAX: usize = 9 + 255;
/// An order that is none.
const UNORDERED: u16 = u16::MAX;
const SAFE: u8 = 1;
const WANTS_ANSWER: u8 = 2;
const IS_ANSWER: u8 = 4;

#[derive(Subcommand)]
pub enum SocketVerb {
    /// Connect to a server of frames, or to an ensemble
    Connect(NameArgs),
    /// Serve a name with frames
    Listen(NameArgs),
}

#[derive(Args)]
pub struct NameArgs {
    /// The service or ensemble, as `frames.shop`
    name: String,
    /// What a member is called where keys are divided
    #[arg(long = "as", value_name = "LABEL", default_value = "")]
    label: String,
}

/// Does what a verb says, for the program at standard input.
pub async fn socket(config: &Config, verb: SocketVerb) -> Result<()> {
    let stream = StdStream::from(io::stdin().as_fd().try_clone_to_owned().into_diagnostic()?);
    stream.set_nonblocking(true).into_diagnostic()?;
    let stream = UnixStream::from_std(stream).into_diagnostic()?;
    match verb {
        SocketVerb::Connect(args) => match open(config, &args).await {
            Ok(frames) => carry(frames, stream, true).await,
            Err(error) => say_over(stream, &error).await,
        },
        SocketVerb::Listen(args) => match listen(config, &args).await {
            Ok(listener) => accept(listener, stream).await,
            Err(error) => say_over(stream, &error).await,
        },
    }
    .into_diagnostic()
}

async fn options(config: &Config) -> Result<Options, Error> {
    let agent = match std::env::var_os(PROGRAMS_VARIABLE) {
        Some(_) => Agent::shared(),
        None => agent_of(config).await?,
    };
    Ok(Options::new().agent(&agent))
}

async fn open(config: &Config, args: &NameArgs) -> Result<Frames, Error> {
    options(config).await?.connect_frames(&*args.name).await
}

async fn listen(config: &Config, args: &NameArgs) -> Result<FramesListener, Error> {
    options(config).await?.bind_frames(&*args.name, &args.label).await
}

fn message(kind: u8, parts: &[&[u8]]) -> Vec<u8> {
    let len: usize = 1 + parts.iter().map(|part| part.len()).sum::<usize>();
    // A frame has far less than 2^32 bytes.
    let mut bytes = (len as u32).to_be_bytes().to_vec();
    bytes.push(kind);
    parts.iter().for_each(|part| bytes.extend_from_slice(part));
    bytes
}

fn over(error: &Error) -> Vec<u8> {
    let of_kind = || match error.kind() {
        ErrorKind::TimedOut => Errno::ETIMEDOUT,
        ErrorKind::ConnectionRefused => Errno::ECONNREFUSED,
        ErrorKind::ConnectionReset => Errno::ECONNRESET,
        ErrorKind::InvalidInput => Errno::EINVAL,
        _ => Errno::EIO,
    };
    let errno = error.raw_os_error().unwrap_or_else(|| of_kind() as i32);
    message(b'E', &[&errno.to_be_bytes(), error.to_string().as_bytes()])
}

async fn say_over(mut stream: UnixStream, error: &Error) -> io::Result<()> {
    stream.write_all(&over(error)).await
}

/// One message of the program: its kind and value. None: it says no more.
async fn read(reader: &mut OwnedReadHalf) -> io::Result<Option<(u8, Vec<u8>)>> {
    let mut len = [0; 4];
    match reader.read_exact(&mut len).await {
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    };
    let len = u32::from_be_bytes(len) as usize;
    if len == 0 || len > FRAME_MAX + HEAD_MAX {
        return Err(io::Error::other(format!("a message of {len} bytes is none")));
    }
    let mut bytes = vec![0; len];
    reader.read_exact(&mut bytes).await?;
    Ok(Some((bytes[0], bytes.split_off(1))))
}

/// What the program wants to be sent.
#[derive(Debug, PartialEq, Eq)]
struct Send<'a> {
    how: Sending,
    /// Of an answer, what it answers.
    answers: Option<u32>,
    payload: &'a [u8],
}

impl<'a> Send<'a> {
    fn read(kind: u8, value: &'a [u8]) -> Option<Self> {
        let (head, rest) = value.split_first_chunk::<8>().filter(|_| kind == b'S')?;
        let [flags, order_0, order_1, number_0, number_1, number_2, number_3, key_len] = *head;
        let (key, payload) = rest.split_at_checked(key_len.into())?;
        let order = match u16::from_be_bytes([order_0, order_1]) {
            0 => Order::Member,
            UNORDERED => Order::None,
            stream => Order::Stream(stream),
        };
        let mut how = Sending::new().order(order).key(key);
        how = if flags & SAFE != 0 { how.safe() } else { how };
        how = if flags & WANTS_ANSWER != 0 { how.wants_answer() } else { how };
        let number = u32::from_be_bytes([number_0, number_1, number_2, number_3]);
        Some(Self { how, answers: (flags & IS_ANSWER != 0).then_some(number), payload })
    }
}

fn said(arrival: &Arrival) -> Vec<u8> {
    let Received { number, is_answer, wants_answer, order, key, bytes } = match arrival {
        Arrival::Lost(number) => return message(b'L', &[&number.to_be_bytes()]),
        Arrival::Frame(frame) => frame,
    };
    let flags = if *is_answer { IS_ANSWER } else { 0 } | if *wants_answer { WANTS_ANSWER } else { 0 };
    let order = match order {
        Order::Member => 0,
        Order::None => UNORDERED,
        Order::Stream(stream) => *stream,
    };
    // A key has 255 bytes at most.
    let key_len = [key.len() as u8];
    message(b'F', &[&[flags], &order.to_be_bytes(), &number.to_be_bytes(), &key_len, key, bytes])
}

/// Carries one connection until either end is over.
async fn carry(mut frames: Frames, stream: UnixStream, says_open: bool) -> io::Result<()> {
    let (mut reader, mut writer) = stream.into_split();
    if says_open {
        writer.write_all(&message(b'O', &[])).await?;
    }
    let (give, mut messages) = mpsc::channel(1);
    // A message that is read in part must not be lost when a frame arrives.
    let reading = tokio::spawn(async move {
        while let Ok(Some(message)) = read(&mut reader).await {
            if give.send(message).await.is_err() {
                break;
            }
        }
    });
    let done = loop {
        tokio::select! {
            message = messages.recv() => {
                let Some((kind, value)) = message else {
                    frames.close().await;
                    break Ok(());
                };
                let sent = match Send::read(kind, &value) {
                    None => Err(Error::Io(io::Error::new(ErrorKind::InvalidInput, "this is no message of a program"))),
                    Some(Send { how, answers: None, payload }) => frames.send_with(payload, &how).await.map(drop),
                    Some(Send { answers: Some(number), payload, .. }) => frames.answer_number(number, payload).await,
                };
                if let Err(error) = sent {
                    break writer.write_all(&over(&error)).await;
                }
            }
            arrival = frames.recv() => match arrival {
                Ok(Some(arrival)) => if let Err(error) = writer.write_all(&said(&arrival)).await {
                    break Err(error);
                },
                Ok(None) => break Ok(()),
                Err(error) => break writer.write_all(&over(&error)).await,
            },
        }
    };
    reading.abort();
    done
}

/// Gives the program a stream for each connection, until it wants no more of them, and carries those that there are.
async fn accept(mut listener: FramesListener, mut stream: UnixStream) -> io::Result<()> {
    stream.write_all(&message(b'O', &[])).await?;
    let mut connections = JoinSet::new();
    let mut end = [0];
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let (frames, peer) = match accepted {
                    Ok(accepted) => accepted,
                    Err(error) => return say_over(stream, &error).await,
                };
                let (ours, theirs) = UnixStream::pair()?;
                let who = peer.service().map(|service| service.to_string()).unwrap_or_default();
                give(&stream, &message(b'A', &[who.as_bytes()]), theirs.as_fd()).await?;
                connections.spawn(carry(frames, ours, false));
                // How one ends is its own affair.
                while connections.try_join_next().is_some() {}
            }
            _ = stream.read(&mut end) => break,
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
    Ok(())
}

/// Writes a message with a descriptor: as a whole, since it is short.
async fn give(stream: &UnixStream, bytes: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let passed = [descriptor];
    let pass = || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&passed));
        Ok(sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?)
    };
    let written = stream.async_io(Interest::WRITABLE, pass).await?;
    if written == bytes.len() { Ok(()) } else { Err(ErrorKind::WriteZero.into()) }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn what_a_program_says_is_read() {
        let value = b"\x03\x00\x05\0\0\0\0\x01kdata";
        let how = Sending::new().order(Order::Stream(5)).key(b"k").safe().wants_answer();
        assert_eq!(Send::read(b'S', value), Some(Send { how, answers: None, payload: b"data" }));
        let answer = Send::read(b'S', b"\x04\xff\xff\0\0\x01\x02\0").expect("an answer");
        assert_eq!((answer.answers, answer.how), (Some(0x102), Sending::new().order(Order::None)));
        for (kind, value) in [(b'X', &value[..]), (b'S', &value[..7]), (b'S', b"\0\0\0\0\0\0\0\x02k")] {
            assert_eq!(Send::read(kind, value), None);
        }
    }

    #[test]
    fn what_a_program_is_told_has_its_place() {
        let frame = Received {
            number: 7,
            is_answer: true,
            wants_answer: false,
            order: Order::Stream(2),
            key: b"k".to_vec(),
            bytes: b"x".to_vec(),
        };
        assert_eq!(said(&Arrival::Frame(frame)), b"\0\0\0\x0bF\x04\0\x02\0\0\0\x07\x01kx");
        assert_eq!(said(&Arrival::Lost(258)), b"\0\0\0\x05L\0\0\x01\x02");
        let error = Error::Io(io::Error::new(ErrorKind::TimedOut, "late"));
        assert_eq!(over(&error), b"\0\0\0\x09E\0\0\0\x6elate");
    }
}
