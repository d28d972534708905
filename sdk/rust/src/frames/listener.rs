//! Who takes framed connections: a server of frames, or a member of an ensemble.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use margay_core::fair_table::{FairTable, Peer as Account};
use margay_ensemble::{Connection, ConnectionConfig, Reading, Tsn};
use margay_wire::{
    AbortReason, FRAMED_HEADER_LEN, FRAMED_LABEL_MAX, FRAMED_TEXT_MAX, Framed, FramedTerms, OWN_FRAMES,
    framed_host_number,
};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot, watch};

use super::Frames;
use super::driver::{Clock, DATAGRAM_MAX, Driver, Way};
use crate::datagram::Datagrams;
use crate::error::Error;
use crate::options::Options;
use crate::shares::{MEMORY_MAX, Room, Share};
use crate::stream::Peer;
use crate::target::ToTarget;

/// Connections at once; those of one host are a sixteenth of them, and those of all that no authority vouches for half.
const CONNECTIONS_MAX: usize = 65_536;
/// Connections that wait for `accept`, shared in the same way.
const ACCEPTED_MAX: usize = 2048;
/// Closed connections whose end the listener has not processed yet.
const TELLINGS_MAX: usize = 128;
/// Datagrams of one connection that wait; others are lost, as on the way.
const DATAGRAMS_MAX: usize = 512;
/// Bytes of frames that wait to be sent or are under way, and of those that come: the longest frame and more.
const BUFFER_BYTES: usize = super::FRAME_MAX + (1 << 20);

/// A random number: not one that nobody could guess, which the flow's own security is for.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

fn config() -> ConnectionConfig {
    ConnectionConfig {
        // The upper half is as random.
        first: Tsn(random() as u32),
        send_buffer_bytes: BUFFER_BYTES,
        receive_buffer_bytes: BUFFER_BYTES,
        protocol: OWN_FRAMES,
        ..ConnectionConfig::default()
    }
}

impl Options {
    /// Connects to a server of frames, or to an ensemble.
    ///
    /// # Errors
    /// As [`Frames::connect`].
    pub async fn connect_frames(&self, name: &(impl ToTarget + ?Sized)) -> Result<Frames, Error> {
        let socket = self.connect_datagrams(name).await?;
        let clock = Clock::start();
        let connection = Connection::open(clock.now(), random().max(1), [0; 16], config());
        let (driver, frames) = Driver::new(connection, clock, Way::Own(Box::new(socket)), None, None);
        let (opened, outcome) = oneshot::channel();
        tokio::spawn(driver.run(Some(opened)));
        match outcome.await {
            Ok(Ok(())) => Ok(frames),
            Ok(Err(end)) => Err(end.error()),
            // The runtime is going down.
            Err(_) => Err(Error::Io(io::ErrorKind::ConnectionAborted.into())),
        }
    }

    /// Serves a name with frames. `label` is what a member of an ensemble is called where keys are divided: the name of
    /// its host where it is empty.
    ///
    /// # Errors
    /// As [`FramesListener::bind`]; [`Error::Io`] where the label has more than 64 bytes.
    pub async fn bind_frames(&self, name: &(impl ToTarget + ?Sized), label: &str) -> Result<FramesListener, Error> {
        if label.len() > FRAMED_LABEL_MAX {
            let why = format!("the label has {} bytes, and may have {FRAMED_LABEL_MAX}", label.len());
            return Err(Error::Io(io::Error::new(io::ErrorKind::InvalidInput, why)));
        }
        // The agent says which host this is, by the name that it gives the socket.
        let socket = self.clone().own_source_if_none().bind_datagrams(name).await?;
        let host = socket.source().and_then(|source| source.host()).map(|host| host.0).unwrap_or_default();
        let (give, accepted) = mpsc::channel(ACCEPTED_MAX);
        let (told, tellings) = mpsc::channel(TELLINGS_MAX);
        let server = Server {
            socket: Arc::new(socket),
            host,
            label: label.to_owned(),
            clock: Clock::start(),
            known: FairTable::new(CONNECTIONS_MAX, 0),
            waiting: Room::new(ACCEPTED_MAX, 0),
            memory: Room::new(MEMORY_MAX, 0),
            give,
            told,
            is_leaving: watch::Sender::new(false),
        };
        tokio::spawn(server.run(tellings));
        Ok(FramesListener { accepted })
    }
}

/// Takes framed connections by a name. Once it is dropped, no new ones come; those that are there go on, and switches
/// are told that this member leaves.
#[derive(Debug)]
pub struct FramesListener {
    accepted: mpsc::Receiver<Accepted>,
}

/// A connection that waits for `accept`, and its place there.
#[derive(Debug)]
struct Accepted {
    frames: Frames,
    peer: Peer,
    _place: Share,
}

impl FramesListener {
    /// Serves a name: to clients, or as a member to an ensemble's switch, by the members' name.
    ///
    /// # Errors
    /// As [`Listener::bind`](crate::Listener::bind).
    pub async fn bind(name: &(impl ToTarget + ?Sized)) -> Result<Self, Error> {
        Options::default().bind_frames(name, "").await
    }

    /// The next connection, and who has opened it: of an ensemble, its switch, once for each of its clients. A call
    /// that is cancelled loses none.
    ///
    /// # Errors
    /// [`Error::Io`]: the socket has failed.
    pub async fn accept(&mut self) -> Result<(Frames, Peer), Error> {
        let failed = || Error::Io(io::Error::other("the socket that is bound to the name has failed"));
        self.accepted.recv().await.map(|accepted| (accepted.frames, accepted.peer)).ok_or_else(failed)
    }
}

type Key = (SocketAddr, u64);

/// The task that has the socket.
struct Server {
    socket: Arc<Datagrams>,
    /// All zero where nobody knows.
    host: [u8; 16],
    label: String,
    clock: Clock,
    /// Where a connection's datagrams go.
    known: FairTable<Key, mpsc::Sender<Vec<u8>>>,
    /// Places of connections that wait for `accept`.
    waiting: Room,
    /// Bytes that connections hold.
    memory: Room,
    give: mpsc::Sender<Accepted>,
    /// Connections say that they are over.
    told: mpsc::Sender<Key>,
    is_leaving: watch::Sender<bool>,
}

/// What one that leaves says to whoever asks.
const LEAVES: Framed<'static> = Framed::Abort { reason: AbortReason::Leaving, text: "the member leaves" };

impl Server {
    async fn run(mut self, mut tellings: mpsc::Receiver<Key>) {
        let mut bytes = vec![0; DATAGRAM_MAX];
        loop {
            let is_leaving = *self.is_leaving.borrow();
            if is_leaving && self.known.is_empty() {
                return;
            }
            tokio::select! {
                received = self.socket.recv_from(&mut bytes) => match received {
                    Ok((len, peer)) => self.take(peer, &bytes[..len]),
                    // A peer is gone; others are not.
                    Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
                    // Connections find out by the end of their channels.
                    Err(_) => return,
                },
                Some(key) = tellings.recv() => drop(self.known.remove(&key)),
                () = self.give.closed(), if !is_leaving => drop(self.is_leaving.send_replace(true)),
            }
        }
    }

    fn answer(&self, (to, number): Key, says: &Framed<'_>) {
        let mut bytes = [0; FRAMED_HEADER_LEN + FRAMED_TEXT_MAX + 2];
        // Whoever wants it asks again.
        let _ = says.emit(number, &mut bytes).map(|len| self.socket.as_udp().try_send_to(&bytes[..len], to));
    }

    fn take(&mut self, peer: Peer, datagram: &[u8]) {
        let Ok((number, says)) = Framed::parse(datagram) else { return };
        let key = (peer.address(), number);
        if let Some(known) = self.known.get(&key) {
            match known.try_send(datagram.to_vec()) {
                // Whoever took it is gone.
                Err(TrySendError::Closed(_)) => drop(self.known.remove(&key)),
                // One that is behind: its peer repeats what is lost.
                Ok(()) | Err(TrySendError::Full(_)) => return,
            }
        }
        match says {
            Framed::Hello { protocol, .. } if protocol != OWN_FRAMES => {
                let text = "this end sends and receives frames of its own, by the SDKs; the other one does not";
                self.answer(key, &Framed::abort(AbortReason::OtherProtocol, text));
            }
            Framed::Hello { terms, host, .. } => self.accept(key, peer, &terms, host),
            // Of no connection: whether this member is there at all, and takes any.
            Framed::Ping if number == framed_host_number(&self.host) => {
                let is_leaving = *self.is_leaving.borrow();
                self.answer(key, &if is_leaving { LEAVES } else { Framed::Pong });
            }
            Framed::Data(_) | Framed::Ping => self.answer(key, &Framed::abort(AbortReason::Unknown, "")),
            _ => {}
        }
    }

    fn accept(&mut self, key: Key, peer: Peer, terms: &FramedTerms, meant: [u8; 16]) {
        let is_meant = meant == [0; 16] || self.host == [0; 16] || meant == self.host;
        if !is_meant {
            return self.answer(key, &Framed::abort(AbortReason::OtherHost, "another host was meant"));
        }
        let account = Account::Unauthenticated(key.0.ip());
        let permit = match self.give.try_reserve() {
            Ok(permit) => permit,
            Err(TrySendError::Closed(())) => return self.answer(key, &LEAVES),
            // It asks again.
            Err(TrySendError::Full(())) => return,
        };
        let mut place = self.waiting.share(account);
        if place.resize(1).is_err() {
            return;
        }
        let (sender, datagrams) = mpsc::channel(DATAGRAMS_MAX);
        if let Err(full) = self.known.insert(account, key, sender) {
            let text = format!("the server takes no more connections of this host now: {full}");
            return self.answer(key, &Framed::abort(AbortReason::Full, &text));
        }
        // A switch names the host that it means, and puts in order by watermarks what comes from many clients.
        let reading = if meant == [0; 16] { Reading::Plain } else { Reading::Watermarks };
        let set_up = ConnectionConfig { reading, ..config() };
        let connection = Connection::accept(self.clock.now(), key.1, terms, &self.label, set_up);
        let socket = Arc::clone(&self.socket);
        let way = Way::Shared { socket, to: key.0, datagrams };
        let leave = Some(self.is_leaving.subscribe());
        let memory = Some(self.memory.share(account));
        let (driver, frames) = Driver::new(connection, self.clock, way, leave, memory);
        let told = self.told.clone();
        tokio::spawn(async move {
            driver.run(None).await;
            // Nobody serves any more.
            let _ = told.send(key).await;
        });
        permit.send(Accepted { frames, peer, _place: place });
    }
}
