//! The agent of this host, as a program asks it.

use std::collections::HashMap;
use std::env;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use margay_core::Ranges;
use margay_core::name::{Prefix, ServiceId};
use rustix::buffer::spare_capacity;
use rustix::cmsg_space;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use rustix::process::{Gid, Pid, Uid, getegid, geteuid, getpid};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use crate::error::Error;
use crate::target::{Target, ToTarget};
use crate::wire::{Kind, MESSAGE_MAX, Protocol, Reply, Request};

/// Where an agent listens for programs, unless `MARGAY_PROGRAMS` names another place.
pub const DEFAULT_PATH: &str = "/run/margay/programs.sock";
/// An agent that takes longer than this for an answer is treated as absent.
pub(crate) const ANSWER_TIME: Duration = Duration::from_secs(5);
/// The same where a socket is handed over, maybe to another host: the agent answers before.
const GIVE_TIME: Duration = Duration::from_secs(45);
/// Most descriptors that go with a message: a socket, and a file about it.
const PASSED_MAX: usize = 2;
/// Pause before the next try where the agent's queue of connections is full: the kernel tells nobody when it no longer
/// is.
const QUEUE_PAUSE: Duration = Duration::from_millis(5);
/// Requests at one time, each on a connection of its own; others wait. An agent has so many connections for each user.
const AT_ONCE_MAX: usize = 8;
/// The same of sockets that are handed over: with another host each takes several round trips.
const GIVING_AT_ONCE_MAX: usize = 32;
/// Connections that are kept open for the next request.
const IDLE_MAX: usize = 4;
/// Addresses that are remembered.
const ADDRESSES_MAX: usize = 256;
/// How long an address is remembered: as long as the agent's answers by DNS hold. An agent gives the address of a name
/// that is idle to another only after an hour.
const ADDRESS_AGE: Duration = Duration::from_secs(30);

/// Who opened a connection: the agent judges requests by it, and the kernel notes it once, at `connect`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Owner {
    process: Pid,
    user: Uid,
    group: Gid,
}

impl Owner {
    fn current() -> Self {
        Self { process: getpid(), user: geteuid(), group: getegid() }
    }
}

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    turns: Semaphore,
    /// Of those that hand over sockets, which may take long.
    giving: Semaphore,
    idle: Mutex<Vec<(Owner, OwnedFd)>>,
    addresses: Mutex<HashMap<(Prefix, Protocol), (Addresses, Instant)>>,
    /// That by which loads are reported: what was reported holds until it is closed.
    reporting: tokio::sync::Mutex<Option<(Owner, OwnedFd)>>,
}

/// The agent of this host. Clones share connections and what was learned; any number of tasks, threads and runtimes may
/// use one.
///
/// Connections are opened when there is something to ask, and opened anew after the agent was restarted. Every request
/// ends within five seconds, which needs a runtime with time and I/O enabled. A request that is cancelled leaves
/// nothing behind.
#[derive(Clone, Debug)]
pub struct Agent {
    shared: Arc<Shared>,
}

/// What stands for a name on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// The virtual IPv6 address.
    pub v6: Option<Ipv6Addr>,
    /// The virtual IPv4 address.
    pub v4: Option<Ipv4Addr>,
    /// The port that means the service, whatever port its instances listen on.
    pub port: u16,
}

impl Addresses {
    /// In the order in which they are to be tried.
    pub fn iter(&self) -> impl Iterator<Item = SocketAddr> + use<> {
        let Self { v6, v4, port } = *self;
        [v6.map(IpAddr::V6), v4.map(IpAddr::V4)].into_iter().flatten().map(move |ip| SocketAddr::new(ip, port))
    }
}

impl Agent {
    /// The agent at the path in `MARGAY_PROGRAMS`, or else at [`DEFAULT_PATH`].
    ///
    /// # Errors
    /// [`Error::AgentDown`] where nobody listens there.
    pub async fn connect() -> Result<Self, Error> {
        Self::connect_to(&default_path()).await
    }

    /// The agent whose socket for programs is at `path`.
    ///
    /// # Errors
    /// [`Error::AgentDown`] where nobody listens there.
    pub async fn connect_to(path: &Path) -> Result<Self, Error> {
        let agent = Self::at(path);
        let owner = Owner::current();
        let connection = agent.open().await.map_err(|source| agent.down(source))?;
        agent.put_back(owner, connection);
        Ok(agent)
    }

    /// The agent that this process uses where none is named: that of [`Agent::connect`], opened by the first request.
    pub fn shared() -> Self {
        static SHARED: OnceLock<Agent> = OnceLock::new();
        SHARED.get_or_init(|| Self::at(&default_path())).clone()
    }

    fn at(path: &Path) -> Self {
        let turns = Semaphore::new(AT_ONCE_MAX);
        let giving = Semaphore::new(GIVING_AT_ONCE_MAX);
        let shared = Shared {
            path: path.into(),
            turns,
            giving,
            idle: Mutex::default(),
            addresses: Mutex::default(),
            reporting: tokio::sync::Mutex::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// The path of its socket.
    pub fn path(&self) -> &Path {
        &self.shared.path
    }

    /// Closes the connections that are open for the next request or the next report of load: a process calls this
    /// before it gives up privileges. The agent judges a connection by who has opened it, so whoever takes the process
    /// over later would still have the former user's rights. Loads that were reported end with their connection.
    pub async fn disconnect(&self) {
        self.idle().clear();
        *self.shared.reporting.lock().await = None;
    }

    /// What the agent reads in a written name: the bits, and the name as it is written out.
    ///
    /// # Errors
    /// [`Error::Refused`] with `EINVAL` if it is no name; those of every request: [`Error::AgentDown`],
    /// [`Error::Incompatible`].
    pub async fn name(&self, written: &str) -> Result<(Prefix, String), Error> {
        let request = Request { text: written, ..Request::new(Kind::Name) };
        let reply = self.ask("the name", &request, None).await?;
        Ok((reply.prefix, reply.text))
    }

    /// The addresses that stand for a name on this host. A prefix names its first serviceID. They are remembered for 30
    /// seconds.
    ///
    /// # Errors
    /// [`Error::Name`]; [`Error::Refused`]; those of every request: [`Error::AgentDown`], [`Error::Incompatible`].
    pub async fn resolve(&self, name: &(impl ToTarget + ?Sized), protocol: Protocol) -> Result<Addresses, Error> {
        let prefix = name.to_target()?.prefix;
        let known = self.addresses().get(&(prefix, protocol)).copied();
        if let Some((addresses, _)) = known.filter(|(_, since)| since.elapsed() < ADDRESS_AGE) {
            return Ok(addresses);
        }
        let request = Request { prefix, protocol: Some(protocol), ..Request::new(Kind::Resolve) };
        let reply = self.ask("to resolve the name", &request, None).await?;
        let addresses = Addresses {
            // A name that has no address of its own in IPv6 has the other one, mapped.
            v6: Some(reply.v6).filter(|v6| !v6.is_unspecified() && v6.to_ipv4_mapped().is_none()),
            v4: Some(reply.v4).filter(|v4| !v4.is_unspecified()),
            port: reply.port,
        };
        if addresses.port == 0 || addresses.iter().next().is_none() {
            return Err(self.incompatible("an answer without an address or a port".to_owned()));
        }
        self.remember(prefix, protocol, addresses);
        Ok(addresses)
    }

    fn remember(&self, prefix: Prefix, protocol: Protocol, addresses: Addresses) {
        let mut known = self.addresses();
        if known.len() >= ADDRESSES_MAX {
            known.retain(|_, (_, since)| since.elapsed() < ADDRESS_AGE);
        }
        if known.len() >= ADDRESSES_MAX {
            let oldest = known.iter().min_by_key(|(_, (_, since))| *since).map(|(key, _)| *key);
            oldest.map(|key| known.remove(&key));
        }
        known.insert((prefix, protocol), (addresses, Instant::now()));
    }

    /// What was remembered may be why a connect failed.
    pub(crate) fn forget(&self, prefix: Prefix, protocol: Protocol) {
        self.addresses().remove(&(prefix, protocol));
    }

    /// `socket` serves a name, or all names of a prefix, from the moment it listens (UDP: is bound) until it is closed
    /// by all who have it.
    ///
    /// # Errors
    /// [`Error::Refused`] with `EACCES` (the user of this process has no right to the name), `EADDRINUSE` (another name
    /// has the same bits, or an exclusive name is taken), `EINVAL` or `ENOSPC` (bounds); [`Error::Name`]; those of
    /// every request.
    pub async fn bind(
        &self,
        socket: &impl AsFd,
        name: &(impl ToTarget + ?Sized),
        protocol: Protocol,
    ) -> Result<(), Error> {
        let Target { prefix, written } = name.to_target()?;
        let text = written.as_deref().unwrap_or_default();
        let request = Request { prefix, protocol: Some(protocol), text, ..Request::new(Kind::Bind) };
        self.ask("to let this program serve the name", &request, Some(socket.as_fd())).await?;
        Ok(())
    }

    /// Flows that `socket` opens from now on carry `name` as their source; `None` gives the socket a name of its own.
    /// `port` is the socket's local port. Returns the name.
    ///
    /// # Errors
    /// [`Error::Refused`] with `EACCES` (no right to the name); [`Error::Name`]; those of every request.
    pub async fn source(
        &self,
        socket: &impl AsFd,
        name: Option<&Target>,
        protocol: Protocol,
        port: u16,
    ) -> Result<ServiceId, Error> {
        let prefix = name.map(|target| target.prefix).unwrap_or_default();
        let text = name.and_then(|target| target.written.as_deref()).unwrap_or_default();
        let request = Request { prefix, port, protocol: Some(protocol), text, ..Request::new(Kind::Source) };
        let reply = self.ask("the source name", &request, Some(socket.as_fd())).await?;
        Ok(reply.prefix.id)
    }

    /// The name of the peer that `socket` knows as `address`: what it said and may say, or else the name of its host.
    /// `None` where the connection, or the datagram, did not come by way of Margay.
    ///
    /// # Errors
    /// Those of every request: [`Error::AgentDown`], [`Error::Incompatible`], [`Error::Refused`].
    pub async fn peer(
        &self,
        socket: &impl AsFd,
        protocol: Protocol,
        address: SocketAddr,
    ) -> Result<Option<ServiceId>, Error> {
        let request = Request {
            protocol: Some(protocol),
            address: Some(address.ip()),
            port: address.port(),
            ..Request::new(Kind::Peer)
        };
        match self.ask("to say who the peer is", &request, Some(socket.as_fd())).await {
            Ok(reply) => Ok(Some(reply.prefix.id)),
            Err(Error::Refused { errno, .. }) if errno == Errno::NOTCONN.raw_os_error() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Takes or makes the connection of reports, and says `request` on it.
    pub(crate) async fn report(&self, what: &'static str, request: &Request<'_>) -> Result<Reply, Error> {
        let bytes = bytes_of(request)?;
        let exchange = async {
            let mut kept = self.shared.reporting.lock().await;
            let owner = Owner::current();
            // The agent would take this process for the one that forked it, or for the user that it was.
            let before = kept.take().filter(|(opened_by, _)| *opened_by == owner);
            // One that an agent left open when it died fails; a report may be repeated.
            let answered = match before {
                Some((_, connection)) => converse(connection, &bytes, &[]).await.ok(),
                None => None,
            };
            let (connection, message) = match answered {
                Some(answered) => answered,
                None => converse(self.open().await?, &bytes, &[]).await?,
            };
            // What answers another question would be late for the next one, too.
            if message.as_ref().is_ok_and(|reply| reply.errno != 0 || reply.kind == Some(request.kind)) {
                *kept = Some((owner, connection));
            }
            Ok(message)
        };
        let message = timeout(ANSWER_TIME, exchange).await.unwrap_or_else(|_| Err(no_answer(ANSWER_TIME)));
        self.read_reply(what, request.kind, message.map_err(|source| self.down(source))?)?
    }

    /// The virtual addresses of this host. An agent that does not say has the usual ones.
    pub(crate) async fn ranges(&self) -> Result<Ranges, Error> {
        match self.ask("for the virtual addresses", &Request::new(Kind::Ranges), None).await {
            Ok(reply) if !reply.v4.is_unspecified() => Ok(Ranges::of_host(reply.v4, reply.v6)),
            Ok(_) | Err(Error::Refused { .. }) => Ok(Ranges::USUAL),
            Err(error) => Err(error),
        }
    }

    pub(crate) async fn ask(
        &self,
        what: &'static str,
        request: &Request<'_>,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<Reply, Error> {
        let bytes = bytes_of(request)?;
        let message = timeout(ANSWER_TIME, self.exchange(&bytes, fd.as_slice())).await;
        let message = message.unwrap_or_else(|_| Err(no_answer(ANSWER_TIME)));
        let (owner, connection, message) = message.map_err(|source| self.down(source))?;
        let reply = self.read_reply(what, request.kind, message)?;
        self.put_back(owner, connection);
        reply
    }

    /// As [`ask`](Self::ask), for what must not be asked a second time where the agent may have received it: from then
    /// on `is_sent` is set. The time for the answer begins there, too.
    pub(crate) async fn ask_once(
        &self,
        what: &'static str,
        request: &Request<'_>,
        passed: &[BorrowedFd<'_>],
        is_sent: &mut bool,
    ) -> Result<Reply, Error> {
        let bytes = bytes_of(request)?;
        let exchanged = self.exchange_once(&bytes, passed, is_sent).await;
        let (owner, connection, message) = exchanged.map_err(|source| self.down(source))?;
        let reply = self.read_reply(what, request.kind, message)?;
        self.put_back(owner, connection);
        reply
    }

    /// The outer error says that no more is to be asked on the connection.
    pub(crate) fn read_reply(
        &self,
        what: &'static str,
        kind: Kind,
        message: Result<Reply, String>,
    ) -> Result<Result<Reply, Error>, Error> {
        let reply = message.map_err(|why| self.incompatible(why))?;
        // A refusal may be that of the connection, which is of no kind.
        if reply.errno == 0 {
            return match reply.kind {
                Some(of_reply) if of_reply == kind => Ok(Ok(reply)),
                other => Err(self.incompatible(format!("a reply of kind {other:?} to a request of kind {kind:?}"))),
            };
        }
        let errno = i32::from(reply.errno);
        let text = match reply.text {
            text if text.is_empty() => io::Error::from_raw_os_error(errno).to_string(),
            text => text,
        };
        Ok(Err(Error::Refused { what, errno, text }))
    }

    async fn exchange(
        &self,
        request: &[u8],
        passed: &[BorrowedFd<'_>],
    ) -> io::Result<(Owner, OwnedFd, Result<Reply, String>)> {
        // Nobody closes it.
        let _turn = self.shared.turns.acquire().await.map_err(io::Error::other)?;
        let owner = Owner::current();
        // Those that an agent left open when it died fail one by one; these requests may be repeated.
        while let Some(connection) = self.take_idle(owner) {
            if let Ok((connection, reply)) = converse(connection, request, passed).await {
                return Ok((owner, connection, reply));
            }
        }
        let (connection, reply) = converse(self.open().await?, request, passed).await?;
        Ok((owner, connection, reply))
    }

    async fn exchange_once(
        &self,
        request: &[u8],
        passed: &[BorrowedFd<'_>],
        is_sent: &mut bool,
    ) -> io::Result<(Owner, OwnedFd, Result<Reply, String>)> {
        // Nobody closes it.
        let _turn = self.shared.giving.acquire().await.map_err(io::Error::other)?;
        let owner = Owner::current();
        let connection = self.say_once(owner, request, passed, is_sent).await?;
        let reply = timeout(GIVE_TIME, hear(&connection)).await.unwrap_or_else(|_| Err(no_answer(GIVE_TIME)))?;
        Ok((owner, connection.into_std()?.into(), reply))
    }

    /// Sends a request on the first connection that takes it.
    async fn say_once(
        &self,
        owner: Owner,
        request: &[u8],
        passed: &[BorrowedFd<'_>],
        is_sent: &mut bool,
    ) -> io::Result<UnixStream> {
        while let Some(connection) = self.take_idle(owner) {
            let connection = watched(connection)?;
            // Those that an agent left open when it died take nothing: a message goes whole or not at all.
            if say(&connection, request, passed).await.is_ok() {
                *is_sent = true;
                return Ok(connection);
            }
        }
        let connection = watched(self.open().await?)?;
        match say(&connection, request, passed).await {
            // An agent with too many connections says so, unasked, and closes this one.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
            Err(error) => return Err(error),
            Ok(()) => *is_sent = true,
        }
        Ok(connection)
    }

    pub(crate) async fn open(&self) -> io::Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let connection = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let address = SocketAddrUnix::new(&*self.shared.path)?;
        let connect = async {
            loop {
                match rustix::net::connect(&connection, &address) {
                    Err(Errno::AGAIN) => sleep(QUEUE_PAUSE).await,
                    result => return result,
                }
            }
        };
        match timeout(ANSWER_TIME, connect).await {
            Ok(result) => result?,
            Err(_) => return Err(io::Error::new(io::ErrorKind::TimedOut, "its queue of connections is full")),
        }
        Ok(connection)
    }

    fn take_idle(&self, owner: Owner) -> Option<OwnedFd> {
        let mut idle = self.idle();
        // The agent would take this process for the one that forked it, or for the user that it was.
        idle.retain(|(opened_by, _)| *opened_by == owner);
        idle.pop().map(|(_, connection)| connection)
    }

    fn put_back(&self, owner: Owner, connection: OwnedFd) {
        let mut idle = self.idle();
        // A request may end after its process has given up privileges.
        if idle.len() < IDLE_MAX && owner == Owner::current() {
            idle.push((owner, connection));
        }
    }

    // What these guard is whole between any two statements, so that a panic elsewhere does not matter.
    fn idle(&self) -> MutexGuard<'_, Vec<(Owner, OwnedFd)>> {
        self.shared.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn addresses(&self) -> MutexGuard<'_, HashMap<(Prefix, Protocol), (Addresses, Instant)>> {
        self.shared.addresses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn down(&self, source: io::Error) -> Error {
        Error::AgentDown { path: self.shared.path.clone(), source }
    }

    pub(crate) fn incompatible(&self, why: String) -> Error {
        Error::Incompatible { path: self.shared.path.clone(), why }
    }
}

fn default_path() -> PathBuf {
    env::var_os("MARGAY_PROGRAMS").filter(|path| !path.is_empty()).map_or_else(|| DEFAULT_PATH.into(), PathBuf::from)
}

fn bytes_of(request: &Request<'_>) -> Result<Vec<u8>, Error> {
    request.to_bytes().map_err(|why| Error::Io(io::Error::new(io::ErrorKind::InvalidInput, why)))
}

/// Nothing came for so long.
pub(crate) fn no_answer(time: Duration) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, format!("no answer for {} seconds", time.as_secs()))
}

/// One request and its reply. The connection belongs to a reactor only meanwhile, so that runtimes may come and go.
pub(crate) async fn converse(
    connection: OwnedFd,
    request: &[u8],
    passed: &[BorrowedFd<'_>],
) -> io::Result<(OwnedFd, Result<Reply, String>)> {
    let connection = watched(connection)?;
    match say(&connection, request, passed).await {
        // An agent with too many connections says so, unasked, and closes this one.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
        result => result?,
    }
    let reply = hear(&connection).await?;
    Ok((connection.into_std()?.into(), reply))
}

async fn say(connection: &UnixStream, request: &[u8], passed: &[BorrowedFd<'_>]) -> io::Result<()> {
    connection.async_io(Interest::WRITABLE, || send(connection, request, passed)).await
}

async fn hear(connection: &UnixStream) -> io::Result<Result<Reply, String>> {
    match connection.async_io(Interest::READABLE, || receive(connection)).await {
        // It did not read the request; what it said comes after this error.
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => receive(connection),
        result => result,
    }
}

/// Tells when the connection is ready. Tokio has no type for sockets that keep messages apart, and [`AsyncFd`] cannot
/// be had without `unsafe`; of a [`UnixStream`] only its readiness is used.
///
/// [`AsyncFd`]: tokio::io::unix::AsyncFd
pub(crate) fn watched(connection: OwnedFd) -> io::Result<UnixStream> {
    UnixStream::from_std(connection.into())
}

pub(crate) fn send(connection: &impl AsFd, request: &[u8], passed: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(PASSED_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !passed.is_empty() && !control.push(SendAncillaryMessage::ScmRights(passed)) {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    rustix::net::sendmsg(connection, &[IoSlice::new(request)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// One message. The inner error says why it is none of ours.
pub(crate) fn receive(connection: &impl AsFd) -> io::Result<Result<Reply, String>> {
    let mut bytes = Vec::with_capacity(MESSAGE_MAX);
    // With TRUNC the kernel says how long the message was, not how much of it fitted.
    let (_, length) = rustix::net::recv(connection, spare_capacity(&mut bytes), RecvFlags::TRUNC)?;
    read_message(&bytes, length)
}

/// As [`receive`], with the descriptors that came with it; those that are too many are closed.
pub(crate) fn receive_passed(connection: &impl AsFd) -> io::Result<(Result<Reply, String>, Vec<OwnedFd>)> {
    let mut bytes = vec![0; MESSAGE_MAX];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(PASSED_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::TRUNC;
    let received = rustix::net::recvmsg(connection, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)?;
    let mut passed = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            passed.extend(descriptors);
        }
    }
    passed.truncate(PASSED_MAX);
    bytes.truncate(received.bytes);
    Ok((read_message(&bytes, received.bytes)?, passed))
}

/// A message of so many bytes, of which these have fitted.
fn read_message(bytes: &[u8], length: usize) -> io::Result<Result<Reply, String>> {
    match length {
        0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection")),
        length if length > bytes.len() => Ok(Err(format!("a message of {length} bytes"))),
        _ => Ok(Reply::parse(bytes)),
    }
}
