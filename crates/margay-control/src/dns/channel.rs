//! Between the responder and the agent, which are two processes: questions about the zone, and their answers, in frames
//! on a stream. The stream's end tells either that the other is gone.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::task::JoinSet;

use super::answer::Answers;
use super::{Carrier, Questioner, ResponderCounters, transport};

/// Longest frame: a message of DNS is no longer than 65535 bytes.
const FRAME_MAX: usize = 65_535 + HEAD;
/// Number, carrier and asker before a question.
const HEAD: usize = 8 + 1 + ASKER_LEN;
/// What it is by, and an address.
const ASKER_LEN: usize = 1 + 16;
/// By its user.
const BY_USER: u8 = 1;
/// Frames that wait to be written; more wait themselves.
const QUEUE: usize = 256;
/// Questions that the agent looks into at once: as many as the responder lets in, so that none waits here for others'.
const ASKED_MAX: usize = 3 * (transport::WAITING_MAX + transport::CONNECTIONS_MAX);
/// Marks what is no question but the responder's counters.
const COUNTERS: u8 = 2;
/// Number of a frame that is no answer.
const END: u64 = u64::MAX;

/// The responder is to end: another one takes its place, or none.
pub fn end() -> Vec<u8> {
    frame(END, &[])
}

fn frame(number: u64, body: &[u8]) -> Vec<u8> {
    // Messages are shorter than what 32 bits count.
    let len = u32::try_from(8 + body.len()).unwrap_or(u32::MAX);
    [&len.to_be_bytes()[..], &number.to_be_bytes(), body].concat()
}

/// What it is by, and a user's number or an address.
fn asker_bytes(asker: Questioner) -> [u8; ASKER_LEN] {
    let mut bytes = [0; ASKER_LEN];
    match asker {
        Questioner::User(uid) => {
            bytes[0] = BY_USER;
            bytes[1..5].copy_from_slice(&uid.to_be_bytes());
        }
        Questioner::Address(IpAddr::V4(v4)) => bytes[1..].copy_from_slice(&v4.to_ipv6_mapped().octets()),
        Questioner::Address(IpAddr::V6(v6)) => bytes[1..].copy_from_slice(&v6.octets()),
    }
    bytes
}

fn asker_of(bytes: &[u8; ASKER_LEN]) -> Questioner {
    let [by, rest @ ..] = *bytes;
    if by == BY_USER {
        let [a, b, c, d, ..] = rest;
        return Questioner::User(u32::from_be_bytes([a, b, c, d]));
    }
    Questioner::Address(Ipv6Addr::from(rest).to_canonical())
}

/// A frame's number and body; `None` at the end.
async fn receive(stream: &mut OwnedReadHalf) -> io::Result<Option<(u64, Vec<u8>)>> {
    let len = match stream.read_u32().await {
        Ok(len) => usize::try_from(len).unwrap_or(usize::MAX),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    };
    if !(8..=FRAME_MAX).contains(&len) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let number = stream.read_u64().await?;
    let mut body = vec![0; len - 8];
    stream.read_exact(&mut body).await?;
    Ok(Some((number, body)))
}

/// Writes frames until nobody has more, or the other end is gone.
async fn write_all(mut stream: OwnedWriteHalf, mut frames: mpsc::Receiver<Vec<u8>>) {
    while let Some(frame) = frames.recv().await {
        if stream.write_all(&frame).await.is_err() {
            return;
        }
    }
}

/// How the agent's end of the stream came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The agent has ended, in whatever way.
    Lost,
    /// The responder is to end, too.
    End,
}

/// The responder's end.
pub(super) struct AgentChannel {
    frames: mpsc::Sender<Vec<u8>>,
    waiting: Arc<Mutex<Waiting>>,
}

#[derive(Default)]
struct Waiting {
    next: u64,
    /// `None` once the agent is gone: nobody answers any more.
    answers: Option<HashMap<u64, oneshot::Sender<Vec<u8>>>>,
}

impl AgentChannel {
    /// Over a stream to the agent. Gives what its end is told by, too.
    pub(super) fn open(stream: UnixStream) -> (Self, oneshot::Receiver<Ended>) {
        let (reader, writer) = stream.into_split();
        let (frames, queue) = mpsc::channel(QUEUE);
        let waiting = Arc::new(Mutex::new(Waiting { next: 0, answers: Some(HashMap::new()) }));
        let (say, ended) = oneshot::channel();
        tokio::spawn(write_all(writer, queue));
        let heard = Arc::clone(&waiting);
        tokio::spawn(async move {
            let how = hear(reader, &heard).await;
            // Whoever waits goes on without.
            heard.lock().answers = None;
            // Nobody may want to know.
            let _ = say.send(how);
        });
        (Self { frames, waiting }, ended)
    }

    /// The agent's answer, empty where it has none; `None` when it is gone.
    pub(super) async fn ask(&self, question: &[u8], asker: Questioner, carrier: Carrier) -> Option<Vec<u8>> {
        let (answer, receiver) = oneshot::channel();
        let number = {
            let mut waiting = self.waiting.lock();
            let number = waiting.next;
            waiting.answers.as_mut()?.insert(number, answer);
            waiting.next = (number + 1) % END;
            number
        };
        let body = [&[carrier as u8][..], &asker_bytes(asker), question].concat();
        let _forgotten = Forgotten { number, waiting: &self.waiting };
        self.frames.send(frame(number, &body)).await.ok()?;
        receiver.await.ok()
    }

    /// Tells the agent what was counted.
    pub(super) async fn report(&self, counters: &ResponderCounters) {
        let body = [&[COUNTERS][..], &counters.to_bytes()].concat();
        // Gone: the next agent is told.
        let _ = self.frames.send(frame(0, &body)).await;
    }

    pub(super) fn is_open(&self) -> bool {
        self.waiting.lock().answers.is_some()
    }
}

/// Whoever gives a question up leaves nothing behind.
struct Forgotten<'a> {
    number: u64,
    waiting: &'a Mutex<Waiting>,
}

impl Drop for Forgotten<'_> {
    fn drop(&mut self) {
        if let Some(answers) = self.waiting.lock().answers.as_mut() {
            answers.remove(&self.number);
        }
    }
}

async fn hear(mut stream: OwnedReadHalf, waiting: &Mutex<Waiting>) -> Ended {
    loop {
        match receive(&mut stream).await {
            Ok(Some((END, _))) => return Ended::End,
            Ok(Some((number, answer))) => {
                let asked = waiting.lock().answers.as_mut().and_then(|answers| answers.remove(&number));
                // Given up meanwhile.
                let _ = asked.map(|asked| asked.send(answer));
            }
            Ok(None) | Err(_) => return Ended::Lost,
        }
    }
}

/// The agent's end: answers what the responder asks, until that is gone. `counters` has what it has counted by then.
///
/// # Errors
///
/// The stream breaks, or carries something else.
pub async fn serve(
    stream: UnixStream,
    answers: &Arc<Answers>,
    counters: &watch::Sender<ResponderCounters>,
) -> io::Result<()> {
    let (mut reader, writer) = stream.into_split();
    let (frames, queue) = mpsc::channel(QUEUE);
    let writing = tokio::spawn(write_all(writer, queue));
    let asked = Arc::new(Semaphore::new(ASKED_MAX));
    let mut tasks = JoinSet::new();
    while let Some((number, body)) = receive(&mut reader).await? {
        while tasks.try_join_next().is_some() {}
        let Some((&kind, rest)) = body.split_first() else { return Err(io::ErrorKind::InvalidData.into()) };
        if kind == COUNTERS {
            counters.send_replace(ResponderCounters::from_bytes(rest));
            continue;
        }
        let Some((asker, question)) = rest.split_first_chunk() else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        let asker = asker_of(asker);
        let carrier = if kind == Carrier::Stream as u8 { Carrier::Stream } else { Carrier::Datagram };
        // The semaphore is never closed.
        let permit = Arc::clone(&asked).acquire_owned().await;
        let (answers, frames, question) = (Arc::clone(answers), frames.clone(), question.to_vec());
        tasks.spawn(async move {
            let answer = answers.reply(&question, asker, carrier).await.unwrap_or_default();
            let _ = frames.send(frame(number, &answer)).await;
            drop(permit);
        });
    }
    tasks.shutdown().await;
    writing.abort();
    Ok(())
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_agent_hears_who_asks() {
        let address = |text: &str| Questioner::Address(text.parse().expect("literal"));
        for asker in [Questioner::User(0), Questioner::User(u32::MAX), address("10.0.0.1"), address("fd00::1")] {
            assert_eq!(asker_of(&asker_bytes(asker)), asker);
        }
    }
}
