//! Sockets that go to another process of the same user on this host: a server that is replaced gives what it has, and
//! the process in its place takes it. Connections go to other hosts, too.

use std::fmt;
use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use margay_core::name::Prefix;
use margay_wire::{HANDED_DATA_MAX, TAKE_OVER_GIVES};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use rustix::net::sockopt::socket_acceptconn;
use tokio::io::Interest;
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::time::timeout;

use crate::agent::{ANSWER_TIME, Agent, converse, no_answer, receive_passed, send, watched};
use crate::error::Error;
use crate::target::{Target, ToTarget};
use crate::wire::{Kind, Protocol, Reply, Request};

/// Why another process does not have a socket that was to be handed over.
#[derive(Debug)]
pub struct NotHandedOver {
    /// The socket: this process still owns it, and goes on with it. `None`: it is closed, since nobody can say who has
    /// it. The agent may have given it away before it ended.
    pub socket: Option<OwnedFd>,
    /// The reason.
    pub error: Error,
}

impl fmt::Display for NotHandedOver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.socket {
            Some(_) => write!(f, "the socket was not handed over: {}", self.error),
            None => write!(f, "nobody can say who has the socket, so it is closed: {}", self.error),
        }
    }
}

impl std::error::Error for NotHandedOver {}

/// Gives a TCP socket, connected or listening, to another process of this user that takes over its name
/// ([`Takeover`]), and returns when that one has it: this process has it no more. `data` is what the other one has to
/// know of it, at most 1 MiB. Without a `name` the agent finds the one by which the client has come.
///
/// Where no process of this host takes over the name, an accepted connection goes to another host that serves it, as by
/// [`hand_over_to`].
///
/// A call that is cancelled closes the socket: the other process may have it already. It is asked for once, so that
/// there are never two owners. Of many calls at a time a few are asked and the others wait; each has its answer within
/// 45 seconds from when it is asked, or none.
///
/// ```no_run
/// use margay_sdk::{NotHandedOver, ToTarget, hand_over};
/// use tokio::net::TcpStream;
///
/// # async fn example(stream: TcpStream) -> Result<(), Box<dyn std::error::Error>> {
/// let name = "web.shop".to_target()?;
/// match hand_over(stream.into_std()?, Some(&name), b"logged in as anna").await {
///     Ok(()) => println!("the other process goes on with it"),
///     Err(NotHandedOver { socket: Some(socket), error }) => {
///         println!("this process goes on with it: {error}");
///         let stream = TcpStream::from_std(socket.into())?;
///     }
///     Err(closed) => return Err(closed.into()),
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`NotHandedOver`] has the socket, unless it is closed, and as its error [`Error::Refused`] with `ESRCH` (no other
/// process of this user takes over the name), `ETIMEDOUT` (those that do have not taken it), `ENOTCONN` (without a
/// `name`: the client has not come by one), `ENOTSOCK`, `EPROTONOSUPPORT` or `EINVAL`; [`Error::Io`] where `data` is
/// too long, or the name is everything; [`Error::AgentDown`]; [`Error::Incompatible`].
pub async fn hand_over(socket: impl Into<OwnedFd>, name: Option<&Target>, data: &[u8]) -> Result<(), NotHandedOver> {
    Agent::shared().hand_over(socket, name, data).await
}

/// As [`hand_over`], to a host: an accepted connection goes on there, in a program that takes over its name, and the
/// client notices a short pause. `host` is its name or its host-ID.
///
/// # Errors
/// As for [`hand_over`]; also `EHOSTUNREACH` (the host is unknown, or does not answer), `EOPNOTSUPP` (the connection
/// cannot go there; the text says why), `EALREADY` and `EBUSY`. After `ECONNABORTED` neither host has the connection,
/// and the socket is closed.
pub async fn hand_over_to(
    host: &str,
    socket: impl Into<OwnedFd>,
    name: Option<&Target>,
    data: &[u8],
) -> Result<(), NotHandedOver> {
    Agent::shared().hand_over_to(host, socket, name, data).await
}

impl Agent {
    /// As [`hand_over`], by this agent.
    ///
    /// # Errors
    /// As for [`hand_over`].
    pub async fn hand_over(
        &self,
        socket: impl Into<OwnedFd>,
        name: Option<&Target>,
        data: &[u8],
    ) -> Result<(), NotHandedOver> {
        self.hand_over_to("", socket, name, data).await
    }

    /// As [`hand_over_to`], by this agent.
    ///
    /// # Errors
    /// As for [`hand_over_to`].
    pub async fn hand_over_to(
        &self,
        host: &str,
        socket: impl Into<OwnedFd>,
        name: Option<&Target>,
        data: &[u8],
    ) -> Result<(), NotHandedOver> {
        let socket = socket.into();
        let mut is_sent = false;
        match self.give(host, socket.as_fd(), name, data, &mut is_sent).await {
            Ok(()) => Ok(()),
            Err(error) => {
                // Only a refusal says that nobody else has it, and one of them that this process has it no more.
                let lost = Errno::CONNABORTED.raw_os_error();
                let is_ours = !is_sent || matches!(error, Error::Refused { errno, .. } if errno != lost);
                Err(NotHandedOver { socket: is_ours.then_some(socket), error })
            }
        }
    }

    async fn give(
        &self,
        host: &str,
        socket: BorrowedFd<'_>,
        name: Option<&Target>,
        data: &[u8],
        is_sent: &mut bool,
    ) -> Result<(), Error> {
        let prefix = name.map(|target| target.prefix).unwrap_or_default();
        if name.is_some() && prefix.bits == 0 {
            return Err(invalid("a prefix of 0 bits is no name; `None` lets the agent find it".to_owned()).into());
        }
        let file = memory_file(data)?;
        let passed: Vec<BorrowedFd<'_>> = std::iter::once(socket).chain(file.as_ref().map(AsFd::as_fd)).collect();
        let request = Request { prefix, protocol: Some(Protocol::Tcp), text: host, ..Request::new(Kind::HandOver) };
        self.ask_once("to hand the socket over", &request, &passed, is_sent).await?;
        Ok(())
    }
}

fn invalid(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

/// A file that has the data; none for none.
fn memory_file(data: &[u8]) -> io::Result<Option<File>> {
    if data.is_empty() {
        return Ok(None);
    }
    if data.len() as u64 > HANDED_DATA_MAX {
        return Err(invalid(format!("{} bytes go with the socket; at most {HANDED_DATA_MAX} can", data.len())));
    }
    let file = File::from(memfd_create("margay-hand-over", MemfdFlags::CLOEXEC)?);
    file.write_all_at(data, 0)?;
    Ok(Some(file))
}

/// Takes over sockets of a name, or of all names under a prefix, from other processes of this user that give them
/// ([`hand_over`]), until it is dropped.
///
/// ```no_run
/// use margay_sdk::Takeover;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let mut takeover = Takeover::open("web.shop").await?;
/// // Now the process in whose place this one comes may be told to give what it has.
/// loop {
///     let mut taken = takeover.next().await?;
///     let known = std::mem::take(&mut taken.data);
///     if taken.is_listening() {
///         let listener = taken.into_listener()?;
///         println!("this process accepts at {} now", listener.local_addr()?);
///     } else {
///         let stream = taken.into_stream()?;
///         println!("{:?} goes on here; {} bytes are known of it", stream.peer_addr(), known.len());
///     }
/// }
/// # }
/// ```
#[derive(Debug)]
pub struct Takeover {
    agent: Agent,
    prefix: Prefix,
    /// Whether it is told what to give away, too.
    gives: bool,
    /// On which sockets come; none after an error.
    connection: Option<UnixStream>,
}

impl Takeover {
    /// From now on, sockets of the name may be given to this process.
    ///
    /// # Errors
    /// [`Error::Refused`] with `EACCES` (the user of this process has no right to the name) or `EUSERS` (64 processes
    /// of this user take over sockets already); [`Error::Name`]; [`Error::AgentDown`]; [`Error::Incompatible`].
    pub async fn open(name: &(impl ToTarget + ?Sized)) -> Result<Self, Error> {
        Self::of(&Agent::shared(), name).await
    }

    /// As [`open`](Self::open), of another agent than that of this process.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub async fn of(agent: &Agent, name: &(impl ToTarget + ?Sized)) -> Result<Self, Error> {
        Self::register(agent, name, false).await
    }

    async fn register(agent: &Agent, name: &(impl ToTarget + ?Sized), gives: bool) -> Result<Self, Error> {
        let prefix = name.to_target()?.prefix;
        let connection = register(agent, prefix, gives).await?;
        Ok(Self { agent: agent.clone(), prefix, gives, connection: Some(connection) })
    }

    /// The next socket. It belongs to this process from then on. A call that is cancelled loses none. Sockets come one
    /// at a time, and who does not take one within two seconds is too late for it: so call this again soon.
    ///
    /// # Errors
    /// [`Error::AgentDown`] where the agent ended, or this process was too late; [`Error::Io`] where what is known of
    /// the socket cannot be read; [`Error::Incompatible`]. In each case the giver still owns its socket, or has closed
    /// it. The next call asks the agent anew, and has the errors of [`open`](Self::open), too.
    pub async fn next(&mut self) -> Result<Taken, Error> {
        loop {
            if let Incoming::Taken(taken) = self.incoming().await? {
                return Ok(taken);
            }
        }
    }

    async fn incoming(&mut self) -> Result<Incoming, Error> {
        let connection = match self.connection.take() {
            Some(connection) => connection,
            None => register(&self.agent, self.prefix, self.gives).await?,
        };
        // Whoever cancels this call leaves the connection as it is.
        let connection = &*self.connection.insert(connection);
        let incoming = receive(&self.agent, connection).await;
        if incoming.is_err() {
            self.connection = None;
        }
        incoming
    }
}

/// As [`Takeover`], of a process that gives its own connections to another host when it is asked to.
///
/// ```no_run
/// use margay_sdk::{GivingTakeover, Incoming};
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let mut takeover = GivingTakeover::open("web.shop").await?;
/// loop {
///     match takeover.next().await? {
///         Incoming::Taken(taken) => println!("{} bytes are known of a socket", taken.data.len()),
///         // By `hand_over_to`, between two requests of each; of those for which `give.is_for(peer)`.
///         Incoming::Give(give) => println!("connections of {} are to go to {:?}", give.name, give.host),
///     }
/// }
/// # }
/// ```
#[derive(Debug)]
pub struct GivingTakeover(Takeover);

/// What comes to a process that takes over a name, and gives its own connections away when it is asked to.
#[derive(Debug)]
pub enum Incoming {
    /// A socket.
    Taken(Taken),
    /// Connections of this process are to go to another host: all of a name, since an operator drains it on this one,
    /// or one of them, since the other host has fewer than its share. For all it comes once for each drain that begins,
    /// and at once where one has begun already. Those that no other host takes the process goes on with.
    Give(Give),
}

/// Connections that are to go to another host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Give {
    /// The name, or the names, by which their clients have come.
    pub name: Prefix,
    /// The host that gets them, for [`hand_over_to`]; empty: any that serves the name.
    pub host: String,
    /// The peer of the one connection that is meant; `None`: all of the name are. [`is_for`](Self::is_for) compares.
    pub peer: Option<SocketAddr>,
}

impl Give {
    /// Whether the connection with this peer is meant, in either form of an IPv4 address.
    pub fn is_for(&self, peer: SocketAddr) -> bool {
        let plain = |peer: SocketAddr| (peer.ip().to_canonical(), peer.port());
        self.peer.is_none_or(|meant| plain(meant) == plain(peer))
    }

    fn of(reply: &Reply) -> Self {
        let peer = SocketAddr::new(reply.v6.to_canonical(), reply.port);
        Self { name: reply.prefix, host: reply.text.clone(), peer: (reply.port != 0).then_some(peer) }
    }
}

impl GivingTakeover {
    /// As [`Takeover::open`].
    ///
    /// # Errors
    /// As [`Takeover::open`].
    pub async fn open(name: &(impl ToTarget + ?Sized)) -> Result<Self, Error> {
        Self::of(&Agent::shared(), name).await
    }

    /// As [`open`](Self::open), of another agent than that of this process.
    ///
    /// # Errors
    /// As [`Takeover::open`].
    pub async fn of(agent: &Agent, name: &(impl ToTarget + ?Sized)) -> Result<Self, Error> {
        Takeover::register(agent, name, true).await.map(Self)
    }

    /// As [`Takeover::next`]: the next socket, or what this process is to give.
    ///
    /// # Errors
    /// As [`Takeover::next`].
    pub async fn next(&mut self) -> Result<Incoming, Error> {
        self.0.incoming().await
    }
}

async fn register(agent: &Agent, prefix: Prefix, gives: bool) -> Result<UnixStream, Error> {
    let port = if gives { TAKE_OVER_GIVES } else { 0 };
    let request = Request { prefix, port, ..Request::new(Kind::TakeOver) };
    let request = request.to_bytes().map_err(|why| agent.incompatible(why))?;
    let connection = agent.open().await.map_err(|source| agent.down(source))?;
    let answered = timeout(ANSWER_TIME, converse(connection, &request, &[])).await;
    let (connection, message) =
        answered.unwrap_or_else(|_| Err(no_answer(ANSWER_TIME))).map_err(|source| agent.down(source))?;
    agent.read_reply("to let this program take over sockets of the name", Kind::TakeOver, message)??;
    Ok(watched(connection)?)
}

async fn receive(agent: &Agent, connection: &UnixStream) -> Result<Incoming, Error> {
    loop {
        let received = connection.async_io(Interest::READABLE, || receive_passed(connection)).await;
        // From here on nothing is waited for: to be cancelled would lose the socket.
        let (message, passed) = received.map_err(|source| agent.down(source))?;
        match &message {
            Ok(reply @ Reply { kind: Some(Kind::Give), errno: 0, .. }) => {
                return Ok(Incoming::Give(Give::of(reply)));
            }
            Ok(Reply { kind, errno: 0, .. }) if *kind != Some(Kind::Handed) => {
                // A kind that this library does not know is for others, and wants no answer.
            }
            _ => return take(agent, connection, message, passed).map(Incoming::Taken),
        }
    }
}

fn take(
    agent: &Agent,
    connection: &UnixStream,
    message: Result<Reply, String>,
    passed: Vec<OwnedFd>,
) -> Result<Taken, Error> {
    let reply = agent.read_reply("a socket", Kind::Handed, message)??;
    let mut passed = passed.into_iter();
    let socket = passed.next().ok_or_else(|| agent.incompatible("a socket was announced, and none came".to_owned()))?;
    let data = match passed.next() {
        Some(file) => read_data(&File::from(file))?,
        None => Vec::new(),
    };
    let answer = Request::new(Kind::Handed).to_bytes().map_err(|why| agent.incompatible(why))?;
    // There is room: the agent has read all that was sent before. Who cannot say that it has the socket, has it not.
    send(connection, &answer, &[]).map_err(|source| {
        let why = "this process was too late for a socket that was handed over to it, or the agent ended meanwhile";
        agent.down(io::Error::new(source.kind(), why))
    })?;
    Ok(Taken { socket, data, name: reply.prefix })
}

/// Never mapped: its giver could cut it meanwhile. It is in memory, unless a program gives another file than this
/// library does.
fn read_data(file: &File) -> io::Result<Vec<u8>> {
    let length = file.metadata()?.len();
    if length > HANDED_DATA_MAX {
        let why = format!("{length} bytes came with a socket; at most {HANDED_DATA_MAX} can");
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    let mut data = vec![0; length as usize];
    file.read_exact_at(&mut data, 0)?;
    Ok(data)
}

/// A socket that another process has given to this one.
#[derive(Debug)]
pub struct Taken {
    /// The socket.
    pub socket: OwnedFd,
    /// What its giver says of it.
    pub data: Vec<u8>,
    /// The name that it serves.
    pub name: Prefix,
}

impl Taken {
    /// Whether it is a listening one.
    pub fn is_listening(&self) -> bool {
        socket_acceptconn(&self.socket).unwrap_or_default()
    }

    /// A connection, for tokio.
    ///
    /// # Errors
    /// Those of [`TcpStream::from_std`].
    pub fn into_stream(self) -> io::Result<TcpStream> {
        let stream = std::net::TcpStream::from(self.socket);
        // Its giver may have had it otherwise.
        stream.set_nonblocking(true)?;
        TcpStream::from_std(stream)
    }

    /// A listening socket, for tokio. It serves its name as before.
    ///
    /// # Errors
    /// Those of [`TcpListener::from_std`].
    pub fn into_listener(self) -> io::Result<TcpListener> {
        let listener = std::net::TcpListener::from(self.socket);
        listener.set_nonblocking(true)?;
        TcpListener::from_std(listener)
    }
}
