//! What can be said about a socket before it is opened.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;

use margay_core::name::ServiceId;
use tokio::net::TcpSocket;

use crate::agent::Agent;
use crate::datagram::{Connected, Datagrams};
use crate::error::Error;
use crate::socket;
use crate::stream::{Listener, Stream};
use crate::target::{Target, ToTarget};
use crate::wire::Protocol;

/// Connections that may wait for `accept`, unless said otherwise.
const BACKLOG: u32 = 1024;

/// By which name a socket goes when it opens flows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Source {
    /// The host's.
    #[default]
    Host,
    /// One that no other socket has.
    Own,
    /// A service.
    Service(Target),
}

/// What can be said about a socket before it is opened. [`Stream::connect`], [`Listener::bind`] and [`Datagrams::bind`]
/// take the defaults: the agent of this process, and the name of the host as the source.
#[derive(Clone, Debug)]
pub struct Options {
    agent: Agent,
    source: Source,
    backlog: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self { agent: Agent::shared(), source: Source::Host, backlog: BACKLOG }
    }
}

impl Options {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Another agent than that of this process.
    #[must_use]
    pub fn agent(mut self, agent: &Agent) -> Self {
        self.agent = agent.clone();
        self
    }

    /// Peers see this service as the source. The user of this process needs the right to serve it.
    ///
    /// # Errors
    /// [`Error::Name`].
    pub fn source(mut self, name: &(impl ToTarget + ?Sized)) -> Result<Self, Error> {
        self.source = Source::Service(name.to_target()?);
        Ok(self)
    }

    /// Peers see a name that no other socket has. Anybody may have one.
    #[must_use]
    pub fn own_source(mut self) -> Self {
        self.source = Source::Own;
        self
    }

    /// As [`own_source`](Self::own_source), where no service is the source.
    pub(crate) fn own_source_if_none(self) -> Self {
        if self.source == Source::Host { self.own_source() } else { self }
    }

    /// How many connections may wait for `accept` (1024).
    #[must_use]
    pub fn backlog(mut self, connections: u32) -> Self {
        self.backlog = connections;
        self
    }

    /// Connects to a service.
    ///
    /// # Errors
    /// As [`Stream::connect`].
    pub async fn connect(&self, name: &(impl ToTarget + ?Sized)) -> Result<Stream, Error> {
        let target = name.to_target()?;
        let addresses = self.agent.resolve(&target, Protocol::Tcp).await?;
        let mut outcome = Err(Error::Io(io::ErrorKind::AddrNotAvailable.into()));
        for address in addresses.iter() {
            outcome = self.connect_to(address).await;
            if !matches!(&outcome, Err(Error::Io(error)) if socket::lacks_family(error)) {
                break;
            }
        }
        outcome.inspect_err(|_| self.agent.forget(target.prefix, Protocol::Tcp))
    }

    async fn connect_to(&self, address: SocketAddr) -> Result<Stream, Error> {
        let socket = if address.is_ipv6() { TcpSocket::new_v6()? } else { TcpSocket::new_v4()? };
        let mut source = None;
        if self.source != Source::Host {
            // A source is noted for a port, so there must be one.
            socket.bind(socket::anywhere(address.is_ipv6()))?;
            source = self.name_source(&socket, Protocol::Tcp, socket.local_addr()?).await?;
        }
        let inner = socket.connect(address).await?;
        Ok(Stream::new(inner, self.agent.clone(), source))
    }

    /// Serves a name, or all names of a prefix.
    ///
    /// # Errors
    /// As [`Listener::bind`].
    pub async fn bind(&self, name: &(impl ToTarget + ?Sized)) -> Result<Listener, Error> {
        let target = name.to_target()?;
        let socket = socket::stream_anywhere()?;
        // Before it listens: what is refused shall not have answered anybody.
        self.agent.bind(&socket, &target, Protocol::Tcp).await?;
        Ok(Listener::new(socket.listen(self.backlog)?, self.agent.clone(), target.prefix))
    }

    /// Datagrams to and from anybody, without a name of its own to be reached by.
    ///
    /// # Errors
    /// As [`Datagrams::unbound`].
    pub async fn datagrams(&self) -> Result<Datagrams, Error> {
        let inner = socket::datagrams_anywhere()?;
        let local = inner.local_addr()?;
        let source = self.name_source(&inner, Protocol::Udp, local).await?;
        Ok(Datagrams::new(inner, local, self.agent.clone(), source))
    }

    /// Serves a name, or all names of a prefix, with datagrams.
    ///
    /// # Errors
    /// As [`Datagrams::bind`].
    pub async fn bind_datagrams(&self, name: &(impl ToTarget + ?Sized)) -> Result<Datagrams, Error> {
        let target = name.to_target()?;
        let datagrams = self.datagrams().await?;
        self.agent.bind(datagrams.as_udp(), &target, Protocol::Udp).await?;
        Ok(datagrams)
    }

    /// Datagrams to and from one instance of a service.
    ///
    /// # Errors
    /// As [`Datagrams::connect`].
    pub async fn connect_datagrams(&self, name: &(impl ToTarget + ?Sized)) -> Result<Connected, Error> {
        self.datagrams().await?.connect(name).await
    }

    async fn name_source(
        &self,
        socket: &impl AsFd,
        protocol: Protocol,
        local: SocketAddr,
    ) -> Result<Option<ServiceId>, Error> {
        let name = match &self.source {
            Source::Host => return Ok(None),
            Source::Own => None,
            Source::Service(target) => Some(target),
        };
        self.agent.source(socket, name, protocol, local.port()).await.map(Some)
    }
}
