//! The stream between a host and a router: Noise XX over TCP, then messages behind their length in two bytes
//! (`proto/registration.proto`). Hosts between which a connection goes have one of the same kind
//! (`proto/handover.proto`).

use std::io;
use std::sync::Arc;

use margay_core::handshake::{HandshakeError, noise_xx};
use margay_core::key::{HostPublic, HostSecret};
use prost::Message;
use snow::StatelessTransportState;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;

use crate::entropy::{self, NoEntropy};

/// What a stream is for: bound into the handshake, so that streams of other protocols and versions come to nothing.
#[derive(Clone, Copy, Debug)]
pub struct Purpose(&'static str);

/// Hosts register with a router.
const REGISTRATION: Purpose = Purpose("margay registration 1");
/// A connection goes to another host ([`crate::relocation`]).
pub const HAND_OVER: Purpose = Purpose("margay hand-over 1");

/// A Noise message is no longer.
const FRAME_MAX: usize = 65_535;
const TAG_LEN: usize = 16;
/// Handshake messages carry keys alone.
const HANDSHAKE_MAX: usize = 256;
/// What one read takes: many small messages, and of a large one the beginning.
const READ_AHEAD: usize = 2048;

/// The stream came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The network.
    #[error("the connection broke: {0}")]
    Io(#[from] io::Error),
    /// Not our protocol, another version of it, or somebody in between.
    #[error("the other end does not speak this protocol, or somebody changed what it said")]
    Garbage,
    /// Another host answers there.
    #[error("another host answers there (host-ID {0}): the router's key has changed, or the address leads elsewhere")]
    WrongKey(margay_core::key::HostId),
    /// No randomness.
    #[error(transparent)]
    NoEntropy(#[from] NoEntropy),
}

impl From<HandshakeError> for StreamError {
    fn from(_: HandshakeError) -> Self {
        Self::Garbage
    }
}

impl From<snow::Error> for StreamError {
    fn from(_: snow::Error) -> Self {
        Self::Garbage
    }
}

impl From<prost::DecodeError> for StreamError {
    fn from(_: prost::DecodeError) -> Self {
        Self::Garbage
    }
}

/// Reads messages.
pub struct Reader {
    /// Whatever has come is taken at once: piece by piece, one frame is two reads, and a third that finds nothing. A
    /// router with a thousand hosts hears five thousand signs of life a second.
    half: BufReader<OwnedReadHalf>,
    noise: Arc<StatelessTransportState>,
    nonce: u64,
}

/// Writes messages.
pub struct Writer {
    half: OwnedWriteHalf,
    noise: Arc<StatelessTransportState>,
    nonce: u64,
}

async fn read_frame(from: &mut (impl AsyncRead + Unpin), max: usize) -> Result<Vec<u8>, StreamError> {
    let len = usize::from(from.read_u16().await?);
    if len > max {
        return Err(StreamError::Garbage);
    }
    let mut frame = vec![0; len];
    from.read_exact(&mut frame).await?;
    Ok(frame)
}

async fn write_frame(to: &mut (impl AsyncWrite + Unpin), body: &[u8]) -> Result<(), StreamError> {
    let len = u16::try_from(body.len()).map_err(|_| StreamError::Garbage)?;
    let mut frame = Vec::with_capacity(2 + body.len());
    frame.extend_from_slice(&len.to_be_bytes());
    frame.extend_from_slice(body);
    // In one piece: a frame that is cut in two by a small write waits for an acknowledgement.
    Ok(to.write_all(&frame).await?)
}

/// Opens the stream to a router whose key is known.
///
/// # Errors
///
/// The connection breaks, or another host answers.
pub async fn open(stream: TcpStream, own: &HostSecret, router: &HostPublic) -> Result<(Reader, Writer), StreamError> {
    let (reader, writer, peer) = begin(stream, own, REGISTRATION).await?;
    if peer == *router { Ok((reader, writer)) } else { Err(StreamError::WrongKey(peer.id())) }
}

/// Takes the stream of a host, whoever it is.
///
/// # Errors
///
/// The connection breaks, or what comes is no handshake.
pub async fn accept(stream: TcpStream, own: &HostSecret) -> Result<(Reader, Writer, HostPublic), StreamError> {
    answer(stream, own, REGISTRATION).await
}

/// Opens a stream; gives who is at the other end, for the caller to check.
///
/// # Errors
///
/// The connection breaks, or the other end does not speak this protocol.
pub async fn begin(
    stream: TcpStream,
    own: &HostSecret,
    purpose: Purpose,
) -> Result<(Reader, Writer, HostPublic), StreamError> {
    shake(stream, own, purpose, true).await
}

/// Takes a stream; gives who is at the other end, for the caller to check.
///
/// # Errors
///
/// The connection breaks, or the other end does not speak this protocol.
pub async fn answer(
    stream: TcpStream,
    own: &HostSecret,
    purpose: Purpose,
) -> Result<(Reader, Writer, HostPublic), StreamError> {
    shake(stream, own, purpose, false).await
}

async fn shake(
    stream: TcpStream,
    own: &HostSecret,
    purpose: Purpose,
    initiator: bool,
) -> Result<(Reader, Writer, HostPublic), StreamError> {
    stream.set_nodelay(true)?;
    let (mut read_half, mut write_half) = stream.into_split();
    let mut noise = noise_xx(own, &mut entropy::rng()?, purpose.0.as_bytes(), initiator)?;
    let mut buffer = vec![0; HANDSHAKE_MAX];
    let mut sends = initiator;
    while !noise.is_handshake_finished() {
        if sends {
            let len = noise.write_message(&[], &mut buffer)?;
            write_frame(&mut write_half, &buffer[..len]).await?;
        } else {
            let frame = read_frame(&mut read_half, HANDSHAKE_MAX).await?;
            noise.read_message(&frame, &mut buffer)?;
        }
        sends = !sends;
    }
    let remote: [u8; 32] = noise.get_remote_static().and_then(|key| key.try_into().ok()).ok_or(StreamError::Garbage)?;
    let noise = Arc::new(noise.into_stateless_transport_mode()?);
    let half = BufReader::with_capacity(READ_AHEAD, read_half);
    let reader = Reader { half, noise: Arc::clone(&noise), nonce: 0 };
    Ok((reader, Writer { half: write_half, noise, nonce: 0 }, HostPublic(remote)))
}

impl Reader {
    /// The next message. Not cancel-safe: a reader belongs to one task.
    ///
    /// # Errors
    ///
    /// The connection breaks, or what comes is no message, or was not sent by the other end.
    pub async fn read<M: Message + Default>(&mut self) -> Result<M, StreamError> {
        let frame = read_frame(&mut self.half, FRAME_MAX).await?;
        let mut plain = vec![0; frame.len()];
        let len = self.noise.read_message(self.nonce, &frame, &mut plain)?;
        self.nonce += 1;
        Ok(M::decode(&plain[..len])?)
    }
}

impl Writer {
    /// Sends a message.
    ///
    /// # Errors
    ///
    /// The connection breaks, or the message is too long.
    pub async fn write(&mut self, message: &impl Message) -> Result<(), StreamError> {
        let plain = message.encode_to_vec();
        if plain.len() > FRAME_MAX - TAG_LEN {
            return Err(StreamError::Garbage);
        }
        let mut sealed = vec![0; plain.len() + TAG_LEN];
        let len = self.noise.write_message(self.nonce, &plain, &mut sealed)?;
        self.nonce += 1;
        write_frame(&mut self.half, &sealed[..len]).await
    }
}

/// Hands on all messages, and the error that ends them. Reading is a task of its own: a read that is cut off half-way
/// would lose its place.
pub async fn read_all<M: Message + Default>(mut reader: Reader, sender: mpsc::Sender<Result<M, StreamError>>) {
    loop {
        let read = reader.read().await;
        let is_last = read.is_err();
        if sender.send(read).await.is_err() || is_last {
            return;
        }
    }
}
