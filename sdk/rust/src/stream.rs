//! Streams: connections to a service, and the serving side.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use margay_core::name::{Prefix, ServiceId};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

use crate::agent::Agent;
use crate::error::Error;
use crate::options::Options;
use crate::target::ToTarget;
use crate::wire::Protocol;

/// The other end: where it is, and by which name it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Peer {
    pub(crate) address: SocketAddr,
    pub(crate) service: Option<ServiceId>,
}

impl Peer {
    /// The address that this host's kernel knows it by.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The name that it said and may say, or else that of its host. `None` if nobody vouches for it: the agent could
    /// not be asked, or the connection is over.
    pub fn service(&self) -> Option<ServiceId> {
        self.service
    }
}

/// What the agent says about whoever is at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Who {
    Named(ServiceId),
    /// The agent could not be asked, or knows no more.
    Unnamed,
    /// It came to the plain address of this host, where nobody asks whether it may. Its answers come from there, too.
    Past,
}

impl Who {
    pub(crate) async fn ask(agent: &Agent, socket: &impl AsFd, protocol: Protocol, address: SocketAddr) -> Self {
        match agent.peer(socket, protocol, address).await {
            Ok(Some(service)) => Self::Named(service),
            // No network leads to Margay's own addresses: that was a flow, which is over.
            Ok(None) => match agent.ranges().await {
                Ok(ranges) if !ranges.is_virtual(address.ip().to_canonical()) => Self::Past,
                Ok(_) | Err(_) => Self::Unnamed,
            },
            Err(_) => Self::Unnamed,
        }
    }

    /// `None` for whoever came past Margay.
    pub(crate) fn at(self, address: SocketAddr) -> Option<Peer> {
        match self {
            Self::Named(service) => Some(Peer { address, service: Some(service) }),
            Self::Unnamed => Some(Peer { address, service: None }),
            Self::Past => None,
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.service {
            Some(service) => service.fmt(f),
            None => self.address.fmt(f),
        }
    }
}

/// A connection. It is the kernel's TCP socket, with all that tokio's [`TcpStream`] can do.
#[derive(Debug)]
pub struct Stream {
    inner: TcpStream,
    agent: Agent,
    source: Option<ServiceId>,
}

impl Stream {
    pub(crate) fn new(inner: TcpStream, agent: Agent, source: Option<ServiceId>) -> Self {
        Self { inner, agent, source }
    }

    /// Connects to a service: to one of its instances, chosen now.
    ///
    /// # Errors
    /// [`Error::Name`]; [`Error::AgentDown`]; [`Error::Refused`]; [`Error::Io`] as of any `connect`:
    /// `ConnectionRefused` or `HostUnreachable` where nobody serves the name.
    pub async fn connect(name: &(impl ToTarget + ?Sized)) -> Result<Self, Error> {
        Options::default().connect(name).await
    }

    /// The source name that [`Options`] asked for.
    pub fn source(&self) -> Option<ServiceId> {
        self.source
    }

    /// The name of the other end, asked now. `None` where it did not come by way of Margay.
    ///
    /// # Errors
    /// Those of every request: [`Error::AgentDown`], [`Error::Incompatible`], [`Error::Refused`]; [`Error::Io`] where
    /// the connection is over.
    pub async fn peer_service(&self) -> Result<Option<ServiceId>, Error> {
        self.agent.peer(&self.inner, Protocol::Tcp, self.inner.peer_addr()?).await
    }

    /// The socket, for its options and addresses.
    pub fn as_tcp(&self) -> &TcpStream {
        &self.inner
    }

    /// The socket alone, for what wants a [`TcpStream`].
    pub fn into_tcp(self) -> TcpStream {
        self.inner
    }

    /// The socket for code without tokio. It stays in non-blocking mode until `set_nonblocking`.
    ///
    /// # Errors
    /// Those of [`TcpStream::into_std`].
    pub fn into_std(self) -> io::Result<std::net::TcpStream> {
        self.inner.into_std()
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

impl AsyncRead for Stream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

/// Serves a name until it is dropped. It is the kernel's listening socket.
#[derive(Debug)]
pub struct Listener {
    inner: TcpListener,
    agent: Agent,
    prefix: Prefix,
    /// Accepted by calls of `accept` that were cancelled before they knew the peer.
    left_over: Mutex<VecDeque<(TcpStream, SocketAddr)>>,
    has_left_over: Notify,
}

impl Listener {
    pub(crate) fn new(inner: TcpListener, agent: Agent, prefix: Prefix) -> Self {
        Self { inner, agent, prefix, left_over: Mutex::default(), has_left_over: Notify::new() }
    }

    /// Serves a name at a port of the kernel's choice; clients need none. A name that stands for a prefix
    /// (`sid:3f00/8`) serves all of it.
    ///
    /// # Errors
    /// [`Error::Refused`] with `EACCES` (the user of this process has no right to the name), `EADDRINUSE` (another name
    /// has the same bits, or an exclusive name is taken); [`Error::Name`]; [`Error::AgentDown`]; [`Error::Io`]. That a
    /// service router refuses shows later, in `margay service list`.
    pub async fn bind(name: &(impl ToTarget + ?Sized)) -> Result<Self, Error> {
        Options::default().bind(name).await
    }

    /// Serves every name under a prefix.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub async fn bind_prefix(prefix: Prefix) -> Result<Self, Error> {
        Options::default().bind(&prefix).await
    }

    /// The next connection, and who it is from. A call that is cancelled loses no connection. Whoever comes to the
    /// plain address of this host is turned away: there nobody asks whether it may connect.
    ///
    /// # Errors
    /// Those of `accept`: about this one connection, or for want of file descriptors. The next call may succeed. That
    /// the agent cannot say who the peer is, is no error: [`Peer::service`] is `None` then, and
    /// [`Stream::peer_service`] tells why.
    pub async fn accept(&self) -> Result<(Stream, Peer), Error> {
        loop {
            let (stream, address) = self.accept_plain().await?;
            let mut asking = Asking { listener: self, accepted: Some((stream, address)) };
            let Some((stream, _)) = &asking.accepted else { continue };
            let who = Who::ask(&self.agent, stream, Protocol::Tcp, address).await;
            if let Some(((stream, _), peer)) = asking.accepted.take().zip(who.at(address)) {
                return Ok((Stream::new(stream, self.agent.clone(), None), peer));
            }
        }
    }

    async fn accept_plain(&self) -> io::Result<(TcpStream, SocketAddr)> {
        loop {
            if let Some(accepted) = self.left_over().pop_front() {
                return Ok(accepted);
            }
            tokio::select! {
                accepted = self.inner.accept() => return accepted,
                () = self.has_left_over.notified() => {}
            }
        }
    }

    /// What is served.
    pub fn prefix(&self) -> Prefix {
        self.prefix
    }

    /// The address that it listens at: that of the kernel's socket.
    ///
    /// # Errors
    /// Those of [`TcpListener::local_addr`].
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }

    /// The listening socket alone, for what wants a [`TcpListener`], and for who will have connections to the plain
    /// address of this host, too. The name is served until it is closed.
    pub fn into_tcp(self) -> TcpListener {
        self.inner
    }

    fn left_over(&self) -> MutexGuard<'_, VecDeque<(TcpStream, SocketAddr)>> {
        self.left_over.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

/// Keeps an accepted connection for the next call, should this one be cancelled.
struct Asking<'a> {
    listener: &'a Listener,
    accepted: Option<(TcpStream, SocketAddr)>,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        if let Some(accepted) = self.accepted.take() {
            self.listener.left_over().push_back(accepted);
            self.listener.has_left_over.notify_one();
        }
    }
}
