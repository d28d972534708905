//! Datagrams: each on its own, or to one instance.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use margay_core::name::{Prefix, ServiceId};
use tokio::net::UdpSocket;

use crate::agent::Agent;
use crate::error::Error;
use crate::options::Options;
use crate::socket;
use crate::stream::{Peer, Who};
use crate::target::ToTarget;
use crate::wire::Protocol;

/// For how long a peer's name is taken for what it was: a burst of datagrams is one question.
const PEER_AGE: Duration = Duration::from_secs(1);
/// Peers whose names are remembered, and services that were asked.
const PEERS_MAX: usize = 1024;

/// Datagrams to any service, each to an instance chosen for it; and from anybody, where a name is bound. It is the
/// kernel's UDP socket.
#[derive(Debug)]
pub struct Datagrams {
    inner: UdpSocket,
    local: SocketAddr,
    agent: Agent,
    source: Option<ServiceId>,
    peers: Mutex<HashMap<SocketAddr, (Who, Instant)>>,
    /// Services that were sent to, by the address that stands for each: answers come from there, whichever instance
    /// sent them.
    asked: Mutex<HashMap<SocketAddr, ServiceId>>,
}

impl Datagrams {
    pub(crate) fn new(inner: UdpSocket, local: SocketAddr, agent: Agent, source: Option<ServiceId>) -> Self {
        Self { inner, local, agent, source, peers: Mutex::default(), asked: Mutex::default() }
    }

    /// Serves a name, or all names of a prefix.
    ///
    /// # Errors
    /// As [`Listener::bind`](crate::Listener::bind).
    pub async fn bind(name: &(impl ToTarget + ?Sized)) -> Result<Self, Error> {
        Options::default().bind_datagrams(name).await
    }

    /// Has no name to be reached by: sends, and receives answers.
    ///
    /// # Errors
    /// [`Error::Io`] for want of file descriptors or ports; those of [`Options`] where a source name was asked for.
    pub async fn unbound() -> Result<Self, Error> {
        Options::default().datagrams().await
    }

    /// Sends one datagram to a service. Returns its length.
    ///
    /// # Errors
    /// [`Error::Name`]; [`Error::AgentDown`] (the address of a name is remembered for 30 seconds); [`Error::Refused`];
    /// [`Error::Io`].
    pub async fn send_to(&self, name: &(impl ToTarget + ?Sized), datagram: &[u8]) -> Result<usize, Error> {
        let prefix = name.to_target()?.prefix;
        let addresses = self.agent.resolve(&prefix, Protocol::Udp).await?;
        let mut outcome = Err(io::ErrorKind::AddrNotAvailable.into());
        for address in addresses.iter() {
            let address = socket::as_seen_from(self.local, address);
            self.note_asked(address, prefix.id);
            outcome = self.inner.send_to(datagram, address).await;
            if !matches!(&outcome, Err(error) if socket::lacks_family(error)) {
                break;
            }
        }
        outcome.map_err(|error| self.failed(prefix, error))
    }

    /// Answers the peer that a datagram came from. Returns the answer's length.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub async fn answer(&self, peer: &Peer, datagram: &[u8]) -> Result<usize, Error> {
        Ok(self.inner.send_to(datagram, peer.address()).await?)
    }

    /// The next datagram: its length, and who it is from. What does not fit into `buf` is cut off. A call that is
    /// cancelled loses no datagram, where one task receives. What comes to the plain address of this host is dropped.
    ///
    /// An answer is from the service that was asked; of others, the name is asked once a second, at most. That the
    /// agent cannot say it is no error: [`Peer::service`] is `None` then.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub async fn recv_from(&self, buf: &mut [u8]) -> Result<(usize, Peer), Error> {
        loop {
            // Whoever sent is asked for while the datagram is still the kernel's, or a cancelled call would lose it.
            let sender = self.inner.peek_sender().await?;
            self.who(sender).await;
            let (length, address) = self.inner.recv_from(buf).await?;
            // Another, if another task received the first one meanwhile.
            if let Some(peer) = self.who(address).await.at(address) {
                return Ok((length, peer));
            }
        }
    }

    fn note_asked(&self, address: SocketAddr, service: ServiceId) {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        if asked.len() >= PEERS_MAX {
            asked.clear();
        }
        asked.insert(address, service);
    }

    async fn who(&self, address: SocketAddr) -> Who {
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner).get(&address).copied();
        if let Some(service) = asked {
            return Who::Named(service);
        }
        let known = self.peers().get(&address).copied();
        if let Some((who, _)) = known.filter(|(_, since)| since.elapsed() < PEER_AGE) {
            return who;
        }
        let who = Who::ask(&self.agent, &self.inner, Protocol::Udp, address).await;
        let mut peers = self.peers();
        if peers.len() >= PEERS_MAX {
            peers.retain(|_, (_, since)| since.elapsed() < PEER_AGE);
        }
        if peers.len() >= PEERS_MAX {
            peers.clear();
        }
        peers.insert(address, (who, Instant::now()));
        who
    }

    /// From now on to and from one instance of a service, which is chosen with the first datagram.
    ///
    /// # Errors
    /// [`Error::Name`]; [`Error::AgentDown`]; [`Error::Refused`]; [`Error::Io`].
    pub async fn connect(self, name: &(impl ToTarget + ?Sized)) -> Result<Connected, Error> {
        let prefix = name.to_target()?.prefix;
        let addresses = self.agent.resolve(&prefix, Protocol::Udp).await?;
        let mut outcome = Err(io::ErrorKind::AddrNotAvailable.into());
        for address in addresses.iter() {
            outcome = self.inner.connect(socket::as_seen_from(self.local, address)).await;
            if !matches!(&outcome, Err(error) if socket::lacks_family(error)) {
                break;
            }
        }
        outcome.map_err(|error| self.failed(prefix, error))?;
        Ok(Connected { socket: self, prefix })
    }

    fn failed(&self, prefix: Prefix, error: io::Error) -> Error {
        self.agent.forget(prefix, Protocol::Udp);
        error.into()
    }

    /// The source name that [`Options`] asked for.
    pub fn source(&self) -> Option<ServiceId> {
        self.source
    }

    /// The socket, for its options and addresses.
    pub fn as_udp(&self) -> &UdpSocket {
        &self.inner
    }

    /// The socket alone, for what wants a [`UdpSocket`]. A bound name is served until that is closed.
    pub fn into_udp(self) -> UdpSocket {
        self.inner
    }

    // What this guards is whole between any two statements.
    fn peers(&self) -> MutexGuard<'_, HashMap<SocketAddr, (Who, Instant)>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsFd for Datagrams {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

/// Datagrams to and from one instance of a service.
#[derive(Debug)]
pub struct Connected {
    socket: Datagrams,
    prefix: Prefix,
}

impl Connected {
    /// Sends one datagram. Returns its length.
    ///
    /// # Errors
    /// [`Error::Io`]; `ConnectionRefused` says that an earlier datagram found nobody.
    pub async fn send(&self, datagram: &[u8]) -> Result<usize, Error> {
        self.socket.inner.send(datagram).await.map_err(|error| self.socket.failed(self.prefix, error))
    }

    /// The next datagram, and its length. What does not fit into `buf` is cut off. A call that is cancelled loses no
    /// datagram.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub async fn recv(&self, buf: &mut [u8]) -> Result<usize, Error> {
        self.socket.inner.recv(buf).await.map_err(|error| self.socket.failed(self.prefix, error))
    }

    /// The name of the other end, asked now. `None` where none is known, as before the first datagram.
    ///
    /// # Errors
    /// Those of every request: [`Error::AgentDown`], [`Error::Incompatible`], [`Error::Refused`].
    pub async fn peer_service(&self) -> Result<Option<ServiceId>, Error> {
        let address = self.socket.inner.peer_addr()?;
        self.socket.agent.peer(&self.socket.inner, Protocol::Udp, address).await
    }

    /// The source name that [`Options`] asked for.
    pub fn source(&self) -> Option<ServiceId> {
        self.socket.source
    }

    /// The socket, for its options and addresses.
    pub fn as_udp(&self) -> &UdpSocket {
        &self.socket.inner
    }

    /// The socket alone, for what wants a [`UdpSocket`].
    pub fn into_udp(self) -> UdpSocket {
        self.socket.inner
    }
}

impl AsFd for Connected {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.inner.as_fd()
    }
}
