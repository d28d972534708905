//! Sockets that a program gives to another process of its user on this host: a server is replaced, and its connections
//! go on (`docs/book/programming.md`). Those that go to another host go by [`crate::agent::relocation`].
//!
//! The descriptor itself goes from process to process, so that nothing of it is on the network, and flows notice
//! nothing. At any time one of both processes owns it: the giver until it is told that the other one has it, the taker
//! once its word has reached the agent. A taker that is late is refused before the giver is told so.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use std::{io, net};

use margay_core::Tuple;
use margay_core::name::{Name, Prefix, ServiceId};
use margay_wire::{HANDED_DATA_MAX, TAKE_OVER_GIVES};
use nix::errno::Errno;
use nix::unistd::Uid;
use parking_lot::Mutex;
use rustix::net::{Shutdown, shutdown};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout, timeout_at};

use super::give::{Asking, Wish};
use super::message::{Kind, Reply, Request};
use super::next;
use super::request::{No, canonical, handed, prefix, written};
use super::rights::{Caller, OtherUser, Rights};
use super::socket::{receive, receive_now, transmit};
use crate::agent::relocation::giver::{self, ServedFlow};
use crate::agent::{Agent, core::CoreHandle};
use crate::listener::Protocol;

/// Processes that take over names of one user.
const TAKERS_OF_USER_MAX: usize = 64;
/// How long a taker has to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// Until then a taker may be asked for a socket: with its answer, a giver waits for no longer than its library does.
const ASKING_LIMIT: Duration = Duration::from_secs(2);
/// Wishes that a program has not read yet; a drain that begins meanwhile is not told to it.
const WISHES_MAX: usize = 16;

/// A socket on its way.
pub(in crate::agent) struct Gift {
    /// The name that it serves, or by which its client has come.
    pub name: Prefix,
    /// The socket.
    pub socket: OwnedFd,
    /// What the giver says of it.
    pub data: Option<File>,
}

/// A program's socket as it was passed, and whether it is of the agent's own network namespace: five-tuples name this
/// host's connections in there alone. Whoever has a namespace of his own makes a socket with any five-tuple.
struct Passed {
    gift: Gift,
    is_here: bool,
}

/// A socket for one taker.
pub struct Offer {
    gift: Arc<Gift>,
    /// Told whether the taker has it.
    taken: oneshot::Sender<bool>,
}

/// What there is for one taker.
pub struct Inbox {
    offers: mpsc::Receiver<Offer>,
    wishes: mpsc::Receiver<Wish>,
}

/// A process that takes over sockets.
struct Taker {
    uid: Uid,
    pid: i32,
    /// Users besides its own whose sockets it may take, as the configuration was when it began.
    others: Vec<OtherUser>,
    prefix: Prefix,
    offers: mpsc::Sender<Offer>,
    /// Of a process that gives its own connections away when it is asked to.
    wishes: Option<mpsc::Sender<Wish>>,
    /// One giver at a time: whoever waits here may still give up, whoever has sent an offer may not.
    turn: tokio::sync::Mutex<()>,
}

/// All processes that take over sockets, and how many sockets they have taken.
#[derive(Default)]
pub struct Takers {
    all: Mutex<Vec<Arc<Taker>>>,
    /// What they are asked to give away, of each drain. Locked before `all`.
    asking: Mutex<Vec<Asking>>,
    taken: AtomicU64,
}

impl Takers {
    /// How many sockets have been taken over.
    pub fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// `gives`: it is to be told what to give away, also by drains that have begun already.
    fn add(&self, caller: &Caller, others: Vec<OtherUser>, prefix: Prefix, gives: bool) -> Result<Inbox, No> {
        let mut asking = self.asking.lock();
        let mut all = self.all.lock();
        all.retain(|taker| !taker.offers.is_closed());
        if all.iter().filter(|taker| taker.uid == caller.uid).count() >= TAKERS_OF_USER_MAX {
            let text = format!("{TAKERS_OF_USER_MAX} processes of this user take over sockets already; end some");
            return Err((Errno::EUSERS, text));
        }
        let (offers, offers_of_taker) = mpsc::channel(1);
        let (wishes, wishes_of_taker) = mpsc::channel(WISHES_MAX);
        let Caller { uid, pid, .. } = *caller;
        let wishes = gives.then_some(wishes);
        let taker = Taker { uid, pid, others, prefix, offers, wishes, turn: tokio::sync::Mutex::default() };
        asking.iter_mut().for_each(|asking| taker.ask(asking));
        all.push(Arc::new(taker));
        Ok(Inbox { offers: offers_of_taker, wishes: wishes_of_taker })
    }

    /// Asks all that give, and those that come later until [`end_asking`](Self::end_asking).
    pub(in crate::agent) fn ask(&self, mut asking: Asking) {
        let mut known = self.asking.lock();
        self.all.lock().iter().for_each(|taker| taker.ask(&mut asking));
        known.push(asking);
    }

    /// The drain of a name, or of all of the host, has ended. What programs have been told stays told.
    pub(in crate::agent) fn end_asking(&self, drained: Option<Prefix>) {
        self.asking.lock().retain(|asking| asking.drained != drained);
    }

    /// How many processes would be asked to give connections of names under a prefix.
    pub(in crate::agent) fn givers(&self, scope: &Prefix) -> usize {
        self.all.lock().iter().filter(|taker| taker.gives(scope)).count()
    }

    /// The processes that give connections of a name away when they are asked to.
    pub(in crate::agent) fn givers_of(&self, name: &Prefix) -> BTreeSet<i32> {
        self.all.lock().iter().filter(|taker| taker.gives_all_of(name)).map(|taker| taker.pid).collect()
    }

    /// Asks one process for what `wish` says. False: it gives nothing of that name, or has not read what it was asked
    /// before.
    pub(in crate::agent) fn ask_one(&self, pid: i32, wish: &Wish) -> bool {
        let all = self.all.lock();
        let mut givers = all.iter().filter(|taker| taker.pid == pid && taker.gives_all_of(&wish.name));
        givers.any(|taker| taker.ask_one(wish))
    }

    /// Whether programs are asked to give connections of this name away.
    fn is_asked_for(&self, name: &Prefix) -> bool {
        self.asking.lock().iter().any(|asking| asking.scope.covers(name))
    }

    /// The names whose sockets are taken over now.
    pub fn prefixes(&self) -> BTreeSet<Prefix> {
        let mut all = self.all.lock();
        all.retain(|taker| !taker.offers.is_closed());
        all.iter().map(|taker| taker.prefix).collect()
    }

    /// Whether a process would take a socket of `giver`; of another host's program, where there is none.
    pub fn has(&self, giver: Option<&Caller>, name: &Prefix) -> bool {
        self.all.lock().iter().any(|taker| !taker.offers.is_closed() && taker.takes(giver, name))
    }

    /// The next one for a socket of `giver`, each in its turn.
    fn pick(&self, giver: Option<&Caller>, name: &Prefix, tried: &[Arc<Taker>]) -> Option<Arc<Taker>> {
        let mut all = self.all.lock();
        all.retain(|taker| !taker.offers.is_closed());
        let is_free = |taker: &Arc<Taker>| !tried.iter().any(|one| Arc::ptr_eq(one, taker));
        let at = all.iter().position(|taker| taker.takes(giver, name) && is_free(taker))?;
        let taker = all.remove(at);
        all.push(Arc::clone(&taker));
        Some(taker)
    }

    /// Gives a socket of `giver`, or of another host's program where there is none, to a process that takes over its
    /// name.
    ///
    /// # Errors
    ///
    /// Nobody has it, and it is closed here: `ESRCH`, nobody takes over the name; `ETIMEDOUT`, who does has not
    /// answered.
    pub(in crate::agent) async fn give(&self, giver: Option<&Caller>, gift: Gift) -> Result<(), No> {
        let gift = Arc::new(gift);
        let until = Instant::now() + ASKING_LIMIT;
        let mut tried = Vec::new();
        while let Some(taker) = self.pick(giver, &gift.name, &tried) {
            if taker.take(&gift, until).await {
                if giver.is_some() {
                    self.taken.fetch_add(1, Ordering::Relaxed);
                }
                return Ok(());
            }
            tried.push(taker);
        }
        if tried.is_empty() {
            let text = "no other process of this user takes over the name; start it, and wait until it says so; one of \
                        another user needs `takes_from` in its [[bind]] section";
            return Err((Errno::ESRCH, text.to_owned()));
        }
        let text = "no process that takes over the name has taken it within two seconds; their logs may say why";
        Err((Errno::ETIMEDOUT, text.to_owned()))
    }
}

impl Taker {
    /// Of this host, only what another process of its user gives, or of a user that the configuration names. On another
    /// host, the certificate says who may.
    fn takes(&self, giver: Option<&Caller>, name: &Prefix) -> bool {
        let is_let = |giver: &Caller| {
            let is_other = self.others.iter().any(|other| other.may_give(giver, name));
            (is_other || self.uid == giver.uid) && self.pid != giver.pid
        };
        giver.is_none_or(is_let) && self.prefix.covers(name)
    }

    fn gives(&self, scope: &Prefix) -> bool {
        self.wishes.is_some() && !self.offers.is_closed() && scope.overlaps(&self.prefix)
    }

    fn gives_all_of(&self, name: &Prefix) -> bool {
        self.prefix.covers(name) && self.gives(name)
    }

    /// There is always room for what a drain asks.
    fn ask_one(&self, wish: &Wish) -> bool {
        let wishes = self.wishes.as_ref().filter(|wishes| wishes.capacity() > WISHES_MAX / 2);
        wishes.is_some_and(|wishes| wishes.try_send(wish.clone()).is_ok())
    }

    fn ask(&self, asking: &mut Asking) {
        let Some(wishes) = self.wishes.as_ref().filter(|wishes| !wishes.is_closed()) else { return };
        if let Some(wish) = asking.wish_for(&self.prefix)
            && wishes.try_send(wish).is_err()
        {
            tracing::warn!(pid = self.pid, "a program does not read what it is asked to give away");
        }
    }

    /// Whether it has the socket now. It is asked in its turn, if that comes before `until`.
    async fn take(&self, gift: &Arc<Gift>, until: Instant) -> bool {
        let turn = timeout_at(until, self.turn.lock()).await;
        if turn.is_err() || Instant::now() >= until {
            return false;
        }
        let (taken, is_taken) = oneshot::channel();
        let offer = Offer { gift: Arc::clone(gift), taken };
        // From here on the taker's connection decides, and in time: to give up beside it would make two owners.
        self.offers.send(offer).await.is_ok() && is_taken.await == Ok(true)
    }
}

/// Gives a program's socket to another process of this host, or its connection to another host.
pub async fn give(agent: &Arc<Agent>, caller: &Caller, request: &Request, passed: Vec<OwnedFd>) -> Reply {
    let given = async {
        let passed = passed_socket(agent, request, passed)?;
        let name = passed.gift.name;
        if goes_elsewhere(agent, caller, &passed, &request.text) {
            let flow = given_flow(agent, caller, &passed).inspect_err(|(_, why)| {
                tracing::info!(program = caller.describe(), why, "a program is refused to hand over a connection");
            })?;
            giver::give(agent, passed.gift, flow, &request.text).await?;
        } else {
            agent.connections.programs.takers.give(Some(caller), passed.gift).await?;
        }
        tracing::debug!(%name, program = caller.describe(), "a program has handed over a socket");
        Ok::<_, No>(name)
    };
    match given.await {
        Ok(name) => {
            let mut reply = Reply::done(Kind::HandOver);
            (reply.id, reply.bits) = (name.id, name.bits);
            reply
        }
        Err((errno, text)) => Reply::refused(Kind::HandOver as u8, errno, text),
    }
}

/// Whether a socket is for another host: for the one that is named, or for any where no process here takes it. While
/// its name is drained, none does: it would be asked to give the connection away at once.
fn goes_elsewhere(agent: &Agent, caller: &Caller, passed: &Passed, host: &str) -> bool {
    if host.is_empty() {
        let gift = &passed.gift;
        let has_flow = || tuple_of(gift.socket.as_fd()).is_some_and(|app| giver::served_flow(agent, &app).is_some());
        let takers = &agent.connections.programs.takers;
        let has_taker = takers.has(Some(caller), &gift.name) && !takers.is_asked_for(&gift.name);
        return !has_taker && passed.is_here && has_flow();
    }
    host != agent.host.local.host_name && host != agent.host.identity.host_id().to_string()
}

/// The flow that a program gives to another host: the socket is the flow's own, and the program or its user has a right
/// to the name of the flow, whatever name the request has.
fn given_flow(agent: &Agent, caller: &Caller, passed: &Passed) -> Result<ServedFlow, No> {
    check_namespace(passed.is_here)?;
    let app = tuple_of(passed.gift.socket.as_fd()).ok_or_else(|| {
        let text = "only a connection goes to another host; a socket that listens is bound there anew";
        (Errno::EOPNOTSUPP, text.to_owned())
    })?;
    let flow = giver::served_flow(agent, &app).map(|(id, service)| ServedFlow { app, id, service });
    let rights = agent.connections.programs.rights.read().clone();
    let written = |service: ServiceId| written(agent, &Prefix::from(service));
    check_flow(&rights, caller, flow, written, |name| next::serves(agent, caller, name))
}

/// A flow that a program may give; `None` is a socket to which no client has come.
fn check_flow(
    rights: &Rights,
    caller: &Caller,
    flow: Option<ServedFlow>,
    written: impl FnOnce(ServiceId) -> Result<Name, No>,
    serves: impl FnOnce(&Name) -> bool,
) -> Result<ServedFlow, No> {
    let flow = flow.ok_or_else(|| {
        let text =
            "no client has come to this socket by a name; only accepted connections of a name go to another host";
        (Errno::ENOTCONN, text.to_owned())
    })?;
    next::check_speaker(rights, caller, &written(flow.service)?, serves)?;
    Ok(flow)
}

fn check_namespace(is_here: bool) -> Result<(), No> {
    if is_here {
        return Ok(());
    }
    let text = "the socket is of another network namespace than the agent's, so that no flow of this host is its own; \
                only sockets of the agent's namespace go to another host";
    Err((Errno::EOPNOTSUPP, text.to_owned()))
}

fn passed_socket(agent: &Agent, request: &Request, mut passed: Vec<OwnedFd>) -> Result<Passed, No> {
    let data = if passed.len() == 2 { passed.pop().map(File::from) } else { None };
    let socket = handed(request, passed)?;
    if socket.protocol != Protocol::Tcp {
        return Err((
            Errno::EPROTONOSUPPORT,
            "only TCP sockets are handed over; bind the datagram socket anew".to_owned(),
        ));
    }
    if let Some(data) = &data {
        check_data(data)?;
    }
    let is_here = socket.is_here()?;
    let name = if request.bits == 0 {
        check_namespace(is_here)?;
        served_name(&agent.core, socket.socket.as_fd())?
    } else {
        prefix(request)?
    };
    Ok(Passed { gift: Gift { name, socket: socket.socket, data }, is_here })
}

fn check_data(data: &File) -> Result<(), No> {
    let about = data.metadata().map_err(|error| (Errno::EIO, format!("the data cannot be looked at: {error}")))?;
    if !about.is_file() {
        return Err((Errno::EINVAL, "the data of a socket is passed as a memfd or a file".to_owned()));
    }
    if about.len() > HANDED_DATA_MAX {
        let text = format!("{} bytes go with the socket, and {HANDED_DATA_MAX} are the most", about.len());
        return Err((Errno::E2BIG, text));
    }
    Ok(())
}

/// The name by which a client has come to this connection.
fn served_name(core: &CoreHandle, socket: BorrowedFd<'_>) -> Result<Prefix, No> {
    let no_flow = || (Errno::ENOTCONN, "no flow leads to this socket; hand it over by a name".to_owned());
    let app = tuple_of(socket).ok_or_else(no_flow)?;
    core.0.with_sal(|sal, _| sal.served_name(&app)).map(Prefix::from).ok_or_else(no_flow)
}

/// The five-tuple of a connected TCP socket, as its own packets have it.
pub(in crate::agent) fn tuple_of(socket: BorrowedFd<'_>) -> Option<Tuple> {
    let local = rustix::net::getsockname(socket).ok().and_then(|local| net::SocketAddr::try_from(local).ok())?;
    let remote = rustix::net::getpeername(socket).ok().flatten();
    let remote = remote.and_then(|remote| net::SocketAddr::try_from(remote).ok())?;
    Some(Tuple { protocol: Protocol::Tcp.number(), source: canonical(local), destination: canonical(remote) })
}

/// Notes a program that takes over sockets of a name.
///
/// # Errors
///
/// The program has no right to the name, or its user has too many that do.
pub fn take_over(agent: &Agent, caller: &Caller, request: &Request) -> Result<(Reply, Inbox), No> {
    let prefix = prefix(request)?;
    if prefix.bits == 0 {
        return Err((Errno::EINVAL, "which name's sockets are taken over? a prefix has 1 to 256 bits".to_owned()));
    }
    let name = written(agent, &prefix)?;
    agent
        .connections
        .programs
        .rights
        .read()
        .check(caller, &prefix, name.written())
        .map_err(|text| (Errno::EACCES, text))?;
    let others = agent.connections.programs.rights.read().givers_for(caller);
    let inbox = agent.connections.programs.takers.add(caller, others, prefix, request.port == TAKE_OVER_GIVES)?;
    agent.connections.relocations.follow_takers(agent);
    tracing::info!(%name, program = caller.describe(), "a program takes over sockets");
    let mut reply = Reply::done(Kind::TakeOver);
    (reply.id, reply.bits) = (prefix.id, prefix.bits);
    Ok((reply, inbox))
}

/// Gives a taker what is for it, until it ends or fails to take one, or its connection is to end for another one.
pub async fn tell(connection: &UnixStream, mut inbox: Inbox, displaced: impl Future<Output = ()>) -> io::Result<()> {
    let mut displaced = pin!(displaced);
    loop {
        tokio::select! {
            () = &mut displaced => return Ok(()),
            Some(wish) = inbox.wishes.recv() => {
                let told = timeout(ANSWER_LIMIT, transmit(connection, &wish.message().emit(), &[])).await;
                // One that reads nothing takes no sockets either.
                told.map_err(|_| io::ErrorKind::TimedOut)??;
            }
            offer = inbox.offers.recv() => {
                let Some(Offer { gift, taken }) = offer else { return Ok(()) };
                let is_taken = put(connection, &gift).await;
                // The giver's task may have ended with its agent.
                let _ = taken.send(is_taken);
                if !is_taken {
                    return Ok(());
                }
            }
            // Nothing is asked for here: it is the end.
            _ = receive(connection) => return Ok(()),
        }
    }
}

/// Whether the taker has it.
async fn put(connection: &UnixStream, gift: &Gift) -> bool {
    let mut message = Reply::done(Kind::Handed);
    (message.id, message.bits) = (gift.name.id, gift.name.bits);
    let passed: Vec<BorrowedFd<'_>> =
        [Some(gift.socket.as_fd()), gift.data.as_ref().map(AsFd::as_fd)].into_iter().flatten().collect();
    if transmit(connection, &message.emit(), &passed).await.is_err() {
        return false;
    }
    match timeout(ANSWER_LIMIT, receive(connection)).await {
        Ok(answer) => is_answer(answer.ok().flatten()),
        Err(_) => {
            // From now on its answer fails. One that has come in this moment counts.
            let _ = shutdown(connection, Shutdown::Read);
            is_answer(receive_now(connection).ok().filter(|(bytes, _)| !bytes.is_empty()))
        }
    }
}

fn is_answer(received: Option<(Vec<u8>, Vec<OwnedFd>)>) -> bool {
    received.is_some_and(|(bytes, _)| Request::parse(&bytes).is_ok_and(|request| request.kind == Kind::Handed))
}

#[cfg(test)]
mod test {
    use std::io::{IoSliceMut, Write as _};
    use std::mem::MaybeUninit;
    use std::net::SocketAddr;

    use margay_wire::ProgramRequestRepr;
    use nix::unistd::Gid;
    use rustix::net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketFlags, SocketType,
        recvmsg, send, socketpair,
    };
    use tokio::task::JoinHandle;

    use super::*;

    const GIVER: Caller = Caller { uid: Uid::from_raw(1000), gid: Gid::from_raw(1000), pid: 7, process: None };
    const NEXT: Caller = Caller { pid: 8, ..GIVER };

    fn shop() -> Prefix {
        "web.shop".parse::<margay_core::name::Name>().expect("literal").prefix()
    }

    /// A socket that says `text` to whoever reads it, and its data.
    fn gift(text: &str) -> Gift {
        let (near, mut far) = std::os::unix::net::UnixStream::pair().expect("a pair");
        far.write_all(text.as_bytes()).expect("room");
        let mut data = tempfile::tempfile().expect("a file");
        data.write_all(text.as_bytes()).expect("written");
        Gift { name: shop(), socket: near.into(), data: Some(data) }
    }

    /// A process that takes over sockets: its end of the connection, and the agent's work.
    fn taker(takers: &Takers, caller: &Caller, prefix: Prefix) -> (OwnedFd, JoinHandle<io::Result<()>>) {
        taker_that(takers, caller, prefix, false)
    }

    fn taker_that(
        takers: &Takers,
        caller: &Caller,
        prefix: Prefix,
        gives: bool,
    ) -> (OwnedFd, JoinHandle<io::Result<()>>) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (own, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a pair of sockets");
        let connection = UnixStream::from_std(own.into()).expect("watched");
        let inbox = takers.add(caller, Vec::new(), prefix, gives).expect("there are few");
        (theirs, tokio::spawn(async move { tell(&connection, inbox, std::future::pending()).await }))
    }

    /// The descriptors that have come, as soon as they have.
    async fn taken(theirs: &OwnedFd) -> Vec<OwnedFd> {
        loop {
            let mut bytes = [0; 512];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(&mut bytes)];
            if recvmsg(theirs, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC).is_ok_and(|got| got.bytes > 0) {
                let passed = control.drain().filter_map(|part| match part {
                    RecvAncillaryMessage::ScmRights(passed) => Some(passed),
                    _ => None,
                });
                return passed.flatten().collect();
            }
            tokio::task::yield_now().await;
        }
    }

    fn answer(theirs: &OwnedFd) -> rustix::io::Result<usize> {
        send(theirs, &ProgramRequestRepr::new(Kind::Handed).emit(), SendFlags::NOSIGNAL)
    }

    #[test]
    fn a_connection_is_given_by_whoever_may_serve_its_name_or_does() {
        let nobody = nix::unistd::User::from_name("nobody").expect("users").expect("every system has it");
        let caller = Caller { uid: nobody.uid, gid: nobody.gid, ..GIVER };
        let granted = |name: &str| {
            let text = format!("[[bind]]\nuser = \"nobody\"\nnames = [\"{name}\"]");
            Rights::new(&crate::config::Config::parse(&text, std::path::Path::new("margay.toml")).expect("sound"))
        };
        let web: Name = "web.shop".parse().expect("literal");
        let app: SocketAddr = "198.18.0.1:80".parse().expect("literal");
        let app = Tuple { protocol: 6, source: app, destination: app };
        let flow = ServedFlow { app, id: margay_wire::FlowId(7), service: web.service_id() };
        let check = |rights: &Rights, flow, serves: bool| {
            let written = |service| {
                assert_eq!(service, web.service_id());
                Ok(web.clone())
            };
            let of_name = |name: &Name| serves && *name == web;
            check_flow(rights, &caller, flow, written, of_name).map_err(|(errno, _)| errno)
        };
        let none = Rights::default();
        assert_eq!(check(&none, Some(flow), false), Err(Errno::EACCES), "a stranger");
        assert_eq!(check(&granted("web.shop"), Some(flow), false), Ok(flow));
        assert_eq!(
            check(&granted("adm.shop"), Some(flow), false),
            Err(Errno::EACCES),
            "the name that it says counts not"
        );
        assert_eq!(check(&none, Some(flow), true), Ok(flow), "a process of the server");
        assert_eq!(check(&granted("web.shop"), None, true), Err(Errno::ENOTCONN), "no client has come to it");
    }

    #[tokio::test]
    async fn a_socket_and_its_data_reach_the_taker_before_the_giver_is_told() {
        let takers = Takers::default();
        let (theirs, _task) = taker(&takers, &NEXT, shop());
        let (given, passed) = tokio::join!(takers.give(Some(&GIVER), gift("hello")), async {
            let passed = taken(&theirs).await;
            answer(&theirs).expect("in time");
            passed
        });
        assert_eq!((given, takers.taken()), (Ok(()), 1));
        let mut socket = [0; 5];
        rustix::io::read(&passed[0], &mut socket).expect("the socket");
        let mut data = [0; 5];
        rustix::io::pread(&passed[1], &mut data, 0).expect("the data");
        assert_eq!((&socket, &data), (b"hello", b"hello"));
    }

    #[tokio::test]
    async fn nobody_else_is_asked() {
        let takers = Takers::default();
        let other_user = Caller { uid: Uid::from_raw(1001), ..NEXT };
        let other_name = "db.shop".parse::<margay_core::name::Name>().expect("literal").prefix();
        let _other =
            [taker(&takers, &other_user, shop()), taker(&takers, &NEXT, other_name), taker(&takers, &GIVER, shop())];
        let (errno, _) = takers.give(Some(&GIVER), gift("")).await.expect_err("nobody");
        assert_eq!(errno, Errno::ESRCH);
    }

    #[test]
    fn another_user_takes_what_the_configuration_lets_it_take_and_nothing_else() {
        let takers = Takers::default();
        let other_user = Caller { uid: Uid::from_raw(1001), ..NEXT };
        let others = vec![OtherUser::new(GIVER.uid, vec![shop()])];
        let whole = "sid:/0".parse().expect("literal");
        let _inbox = takers.add(&other_user, others, whole, false).expect("room");
        let db = "db.shop".parse::<margay_core::name::Name>().expect("literal").prefix();
        assert!(takers.has(Some(&GIVER), &shop()));
        assert!(!takers.has(Some(&GIVER), &db), "another name");
        assert!(!takers.has(Some(&Caller { uid: Uid::from_raw(1002), ..GIVER }), &shop()), "a third user");
        assert!(takers.has(Some(&Caller { pid: 9, ..other_user }), &db), "its own user, as ever");
    }

    #[tokio::test]
    async fn one_that_dies_before_its_answer_has_nothing_and_the_next_is_asked() {
        let takers = Takers::default();
        let (dies, _task) = taker(&takers, &NEXT, shop());
        let (lives, _task) = taker(&takers, &Caller { pid: 9, ..GIVER }, shop());
        let (given, ()) = tokio::join!(takers.give(Some(&GIVER), gift("")), async {
            drop(taken(&dies).await);
            drop(dies);
            assert_eq!(taken(&lives).await.len(), 2);
            answer(&lives).expect("in time");
        });
        assert_eq!((given, takers.taken()), (Ok(()), 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_answer_fails_so_that_there_are_never_two_owners() {
        let takers = Takers::default();
        let (theirs, task) = taker(&takers, &NEXT, shop());
        let (errno, _) = takers.give(Some(&GIVER), gift("")).await.expect_err("it does not answer");
        assert_eq!(errno, Errno::ETIMEDOUT);
        task.await.expect("no panic").expect("it has ended");
        assert_eq!(answer(&theirs), Err(rustix::io::Errno::PIPE));
        let (errno, _) = takers.give(Some(&GIVER), gift("")).await.expect_err("it is asked no more");
        assert_eq!(errno, Errno::ESRCH);
    }

    #[tokio::test]
    async fn each_is_asked_in_its_turn_and_there_are_only_so_many() {
        let takers = Takers::default();
        let callers: Vec<Caller> = (0..3).map(|pid| Caller { pid: 10 + pid, ..GIVER }).collect();
        let _inboxes: Vec<_> =
            callers.iter().map(|caller| takers.add(caller, Vec::new(), shop(), false).expect("room")).collect();
        let turns: Vec<i32> =
            (0..6).filter_map(|_| takers.pick(Some(&GIVER), &shop(), &[])).map(|taker| taker.pid).collect();
        assert_eq!(turns, [10, 11, 12, 10, 11, 12]);
        let _more: Vec<_> =
            (3..TAKERS_OF_USER_MAX).map(|_| takers.add(&NEXT, Vec::new(), shop(), false).expect("room")).collect();
        let refused = takers.add(&NEXT, Vec::new(), shop(), false).err().map(|(errno, _)| errno);
        assert_eq!(refused, Some(Errno::EUSERS));
        assert!(takers.add(&Caller { uid: Uid::from_raw(1001), ..NEXT }, Vec::new(), shop(), false).is_ok());
    }

    /// The next message of kind GIVE: how many bits, and the text.
    async fn wish(theirs: &OwnedFd) -> (u8, String) {
        loop {
            let mut bytes = [0; 512];
            let mut control = RecvAncillaryBuffer::default();
            let mut parts = [IoSliceMut::new(&mut bytes)];
            let got = recvmsg(theirs, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC);
            match got {
                Ok(got) if got.bytes > 0 => {
                    assert_eq!(bytes[..4], [1, Kind::Give as u8, 0, 0]);
                    return (bytes[4], String::from_utf8_lossy(&bytes[60..got.bytes]).into_owned());
                }
                _ => tokio::task::yield_now().await,
            }
        }
    }

    #[tokio::test]
    async fn those_that_give_are_asked_once_and_newcomers_while_the_drain_lasts() {
        let takers = Takers::default();
        let (gives, _task) = taker_that(&takers, &GIVER, shop(), true);
        let (silent, _task) = taker(&takers, &NEXT, shop());
        let drained = Some(shop());
        assert_eq!((takers.givers(&shop()), takers.is_asked_for(&shop())), (1, false));
        let hosts = vec!["a".to_owned(), "b".to_owned()];
        takers.ask(Asking::new(drained, shop(), hosts));
        assert!(takers.is_asked_for(&shop()));
        assert_eq!(wish(&gives).await, (1, "a".to_owned()));
        let (later, _task) = taker_that(&takers, &Caller { pid: 9, ..GIVER }, shop(), true);
        assert_eq!(wish(&later).await, (1, "b".to_owned()));
        takers.end_asking(drained);
        assert!(!takers.is_asked_for(&shop()));
        // What is asked next is the next thing that each hears.
        takers.ask(Asking::new(None, Prefix::default(), Vec::new()));
        for theirs in [&gives, &later] {
            assert_eq!(wish(theirs).await, (1, String::new()));
        }
        // A socket is the first thing that one hears which does not give.
        let (given, passed) = tokio::join!(takers.give(Some(&GIVER), gift("x")), async {
            let passed = taken(&silent).await;
            answer(&silent).expect("in time");
            passed.len()
        });
        assert_eq!((given, passed), (Ok(()), 2));
    }

    #[tokio::test]
    async fn one_process_is_asked_for_one_connection_and_a_drain_finds_room() {
        let takers = Takers::default();
        let inbox = takers.add(&GIVER, Vec::new(), shop(), true).expect("room");
        let _silent = takers.add(&NEXT, Vec::new(), shop(), false).expect("room");
        assert_eq!(takers.givers_of(&shop()), [GIVER.pid].into());
        let peer = Some(([10, 1, 0, 3], 4660).into());
        let wish = Wish { name: shop(), host: "a".to_owned(), peer };
        assert!(!takers.ask_one(NEXT.pid, &wish), "it does not give");
        let other =
            Wish { name: "db.shop".parse::<margay_core::name::Name>().expect("literal").prefix(), ..wish.clone() };
        assert!(!takers.ask_one(GIVER.pid, &other), "nothing of that name");
        let asked = (0..WISHES_MAX).filter(|_| takers.ask_one(GIVER.pid, &wish)).count();
        assert_eq!(asked, WISHES_MAX / 2);
        takers.ask(Asking::new(Some(shop()), shop(), Vec::new()));
        let Inbox { mut wishes, .. } = inbox;
        let mut heard = Vec::new();
        while let Ok(wish) = wishes.try_recv() {
            heard.push(wish.peer);
        }
        assert_eq!((heard.len(), heard[0], heard[asked]), (asked + 1, peer, None));
    }

    #[test]
    fn a_socket_of_another_network_namespace_is_no_flow_of_this_host() {
        let connected = || {
            let listener = net::TcpListener::bind("127.0.0.1:0").expect("a port");
            net::TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens")
        };
        let is_here = |socket: net::TcpStream| {
            let request = Request {
                kind: Kind::HandOver,
                protocol: 6,
                port: 0,
                bits: 0,
                id: margay_core::name::ServiceId::default(),
                address: net::Ipv4Addr::UNSPECIFIED.into(),
                text: "host2".to_owned(),
            };
            handed(&request, vec![socket.into()]).and_then(|socket| check_namespace(socket.is_here()?))
        };
        assert_eq!(is_here(connected()), Ok(()));
        // A thread of its own, which ends in the namespace that it has made.
        let elsewhere = std::thread::spawn(move || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).ok()?;
            let up = std::process::Command::new("ip").args(["link", "set", "lo", "up"]).status();
            up.is_ok_and(|status| status.success()).then(connected)
        });
        let Some(socket) = elsewhere.join().expect("no panic") else {
            eprintln!("skipped: no network namespace can be made here");
            return;
        };
        assert_eq!(is_here(socket).map_err(|(errno, _)| errno), Err(Errno::EOPNOTSUPP));
    }

    #[test]
    fn data_is_a_file_of_a_bounded_size() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(HANDED_DATA_MAX).expect("set");
        assert!(check_data(&file).is_ok());
        file.set_len(HANDED_DATA_MAX + 1).expect("set");
        assert_eq!(check_data(&file).expect_err("too long").0, Errno::E2BIG);
        let no_file = File::open("/dev/null").expect("there");
        assert_eq!(check_data(&no_file).expect_err("no file").0, Errno::EINVAL);
    }
}
