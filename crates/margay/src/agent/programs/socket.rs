//! Connections: who is there, one request after the other, bounded.

use std::fs;
use std::future::pending;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use margay_control::permits::{Backlog, BacklogPlace};
use margay_control::quantity::count_of;
use margay_core::fair_table::Full;
use miette::Diagnostic;
use nix::errno::Errno;
use nix::unistd::{Gid, Uid};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, listen, recvmsg, send, sendmsg,
    socket_with,
};
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;

use super::event::Subscription;
use super::hand_over::{self, Inbox};
use super::instances::Follower;
use super::load::Reporting;
use super::message::{Kind, REQUEST_MAX, Reply, Request};
use super::request;
use super::rights::Caller;
use super::splice;
use crate::agent::Agent;
use crate::agent::health::processes::Process;

/// Connections of all users but root at one time; one user has at most a quarter of them. Where all are taken, a user
/// who has fewer than another one gets a place of whoever has the most.
const CONNECTIONS_MAX: usize = 1024;
/// The same of root, beside those of others.
const CONNECTIONS_OF_ROOT_MAX: usize = 1024;
const BACKLOG: i32 = 128;
/// More than one is refused, and must be seen for that.
const PASSED_MAX: usize = 4;
/// Anybody may ask; what they may have is another question.
const MODE: u32 = 0o666;

/// Why there is no program socket.
#[derive(Debug, thiserror::Error, Diagnostic)]
#[error("programs cannot reach the agent at {}: cannot {act}: {error}", path.display())]
#[diagnostic(help("remove what is there, or set another `runtime_dir` in the configuration"))]
pub struct ListenError {
    path: PathBuf,
    act: &'static str,
    error: io::Error,
}

/// The listening socket.
///
/// # Errors
///
/// The file system refuses, or something else is there.
pub fn open(path: &Path) -> Result<UnixListener, ListenError> {
    let failed = |act| move |error: io::Error| ListenError { path: path.to_owned(), act, error };
    match fs::symlink_metadata(path) {
        Ok(about) if about.file_type().is_socket() => fs::remove_file(path).map_err(failed("remove the old socket"))?,
        Ok(_) => return Err(failed("replace it")(io::Error::other("it is no socket"))),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(failed("look at it")(error)),
    }
    let socket = new_socket().map_err(failed("make a socket"))?;
    let address = SocketAddrUnix::new(path).map_err(|error| failed("use this path")(error.into()))?;
    bind(&socket, &address).map_err(|error| failed("bind it")(error.into()))?;
    fs::set_permissions(path, fs::Permissions::from_mode(MODE)).map_err(failed("set its mode"))?;
    listen(&socket, BACKLOG).map_err(|error| failed("listen there")(error.into()))?;
    // These types know of streams alone; accepting, and waiting, are the same for packets in sequence.
    UnixListener::from_std(socket.into()).map_err(failed("watch it"))
}

fn new_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// The same by an abstract name, which is the path: programs whose root directory is another one see no file of it.
/// `None` where somebody has that name, as anybody may; libraries look who it is.
pub fn open_by_name(path: &Path) -> Option<UnixListener> {
    let opened = || -> io::Result<UnixListener> {
        let socket = new_socket()?;
        bind(&socket, &SocketAddrUnix::new_abstract_name(path.as_os_str().as_bytes())?)?;
        listen(&socket, BACKLOG)?;
        UnixListener::from_std(socket.into())
    };
    let opened = opened().inspect_err(|error| {
        tracing::warn!(%error, "programs with a root directory of their own cannot reach the agent");
    });
    opened.ok()
}

/// Takes connections until it is aborted; with it, they end.
pub async fn run(agent: Arc<Agent>, listener: UnixListener, by_name: Option<UnixListener>) {
    let mut tasks = JoinSet::new();
    let open = Backlog::with_own(CONNECTIONS_MAX, CONNECTIONS_OF_ROOT_MAX);
    loop {
        let ended = async { if tasks.is_empty() { pending().await } else { tasks.join_next().await } };
        let accepted = tokio::select! {
            _ = ended => {
                agent.connections.programs.connections.store(tasks.len(), Ordering::Relaxed);
                continue;
            }
            accepted = accept(&listener) => accepted,
            accepted = accept_by_name(by_name.as_ref()) => accepted,
        };
        let (connection, caller) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "a program could not connect to the agent");
                // Out of descriptors, most likely: trying at once again would not help.
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                continue;
            }
        };
        let place = match open.admit(caller.peer()) {
            Ok(place) => place,
            Err(full) => {
                // Whoever does not read it finds the connection closed.
                let _ = send(&connection, &too_many(full).emit(), SendFlags::NOSIGNAL);
                continue;
            }
        };
        let agent_of_task = Arc::clone(&agent);
        tasks.spawn(async move {
            if let Err(error) = serve(&agent_of_task, &connection, caller, place).await {
                tracing::trace!(%error, pid = caller.pid, "a program's connection has ended");
            }
        });
        agent.connections.programs.connections.store(tasks.len(), Ordering::Relaxed);
    }
}

fn too_many(full: Full) -> Reply {
    let whose = match full {
        Full::Peer { .. } => "this user has",
        Full::Group { .. } | Full::Table { .. } => "programs have",
    };
    let text = format!("{whose} {} to the agent already; close some", count_of(full.limit(), "connection"));
    Reply::refused(0, Errno::EUSERS, text)
}

async fn accept_by_name(listener: Option<&UnixListener>) -> io::Result<(UnixStream, Caller)> {
    match listener {
        Some(listener) => accept(listener).await,
        None => pending().await,
    }
}

async fn accept(listener: &UnixListener) -> io::Result<(UnixStream, Caller)> {
    let (connection, _) = listener.accept().await?;
    let peer = connection.peer_cred()?;
    let (uid, gid) = (Uid::from_raw(peer.uid()), Gid::from_raw(peer.gid()));
    let pid = peer.pid().unwrap_or_default();
    let process = Process::of_peer(&connection, pid);
    Ok((connection, Caller { uid, gid, pid, process }))
}

/// What a connection is for after a reply.
enum Next {
    /// More requests.
    Requests,
    /// Events alone.
    Events(Subscription),
    /// Who serves a name alone.
    Instances(Box<Follower>),
    /// Sockets of other processes alone, and what this one is to give.
    Sockets(Inbox),
}

/// Until the program closes its end, or its place is another one's. A request that is under way is answered first.
async fn serve(agent: &Arc<Agent>, connection: &UnixStream, caller: Caller, mut place: BacklogPlace) -> io::Result<()> {
    let mut reporting = Reporting::new(agent);
    loop {
        let received = unless(place.displaced(), receive(connection)).await?;
        let Some((bytes, passed)) = received? else { return Ok(()) };
        let (reply, next) = match Request::parse(&bytes) {
            Ok(asked) if asked.kind == Kind::Load => (reporting.answer(&caller, &asked).await, Next::Requests),
            Ok(asked) => respond(agent, &caller, &asked, passed).await,
            Err(refusal) => (refusal, Next::Requests),
        };
        unless(place.displaced(), transmit(connection, &reply.emit(), &[])).await??;
        match next {
            Next::Requests => {}
            Next::Events(subscription) => return unless(place.displaced(), tell(connection, subscription)).await?,
            Next::Instances(follower) => {
                return unless(place.displaced(), tell_instances(connection, *follower)).await?;
            }
            Next::Sockets(inbox) => {
                let told = hand_over::tell(connection, inbox, place.displaced()).await;
                agent.connections.relocations.follow_takers(agent);
                return told;
            }
        }
    }
}

/// What `act` gives, unless the connection is to end for another one before.
async fn unless<T>(displaced: impl Future<Output = ()>, act: impl Future<Output = T>) -> io::Result<T> {
    tokio::select! {
        () = displaced => Err(io::Error::other("other users have fewer connections than this one")),
        done = act => Ok(done),
    }
}

async fn respond(agent: &Arc<Agent>, caller: &Caller, asked: &Request, passed: Vec<OwnedFd>) -> (Reply, Next) {
    match asked.kind {
        // From before the reply: what happens after it is told.
        Kind::Events => match Subscription::new(agent, caller) {
            Ok(subscription) => (Reply::done(Kind::Events), Next::Events(subscription)),
            Err(error) => (Reply::refused(Kind::Events as u8, error.errno(), error.to_string()), Next::Requests),
        },
        Kind::Instances => match Follower::new(agent, caller, asked) {
            Ok(follower) => (Reply::done(Kind::Instances), Next::Instances(Box::new(follower))),
            Err((errno, text)) => (Reply::refused(Kind::Instances as u8, errno, text), Next::Requests),
        },
        Kind::TakeOver => match tokio::task::block_in_place(|| hand_over::take_over(agent, caller, asked)) {
            Ok((reply, inbox)) => (reply, Next::Sockets(inbox)),
            Err((errno, text)) => (Reply::refused(Kind::TakeOver as u8, errno, text), Next::Requests),
        },
        Kind::Splice => (splice::splice(agent, caller, asked, passed).await, Next::Requests),
        Kind::HandOver => (hand_over::give(agent, caller, asked, passed).await, Next::Requests),
        _ => (tokio::task::block_in_place(|| request::answer(agent, caller, asked, passed)), Next::Requests),
    }
}

async fn tell(connection: &UnixStream, mut subscription: Subscription) -> io::Result<()> {
    loop {
        tokio::select! {
            line = subscription.next() => match line {
                Some(line) => transmit(connection, &Reply::event(line.to_string()).emit(), &[]).await?,
                None => return Ok(()),
            },
            // Nothing more is asked for here: it is the end.
            _ = receive(connection) => return Ok(()),
        }
    }
}

async fn tell_instances(connection: &UnixStream, mut follower: Follower) -> io::Result<()> {
    loop {
        tokio::select! {
            news = follower.next() => match news {
                Some(messages) => {
                    for message in messages {
                        transmit(connection, &message.emit(), &[]).await?;
                    }
                }
                None => return Ok(()),
            },
            // Nothing more is asked for here: it is the end.
            _ = receive(connection) => return Ok(()),
        }
    }
}

/// A message and the descriptors that came with it; `None` at the end.
pub(super) async fn receive(connection: &UnixStream) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
    let received = connection.async_io(Interest::READABLE, || receive_now(connection)).await?;
    Ok(Some(received).filter(|(bytes, _)| !bytes.is_empty()))
}

pub(super) fn receive_now(connection: impl AsFd) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    // One more byte than there may be: what is too long shows.
    let mut bytes = vec![0; REQUEST_MAX + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PASSED_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = recvmsg(connection, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let of_message = |part| match part {
        RecvAncillaryMessage::ScmRights(passed) => Some(passed),
        _ => None,
    };
    let passed = control.drain().filter_map(of_message).flatten().collect();
    if !message.flags.contains(ReturnFlags::TRUNC) {
        bytes.truncate(message.bytes);
    }
    Ok((bytes, passed))
}

/// Sends a message, with descriptors.
pub(super) async fn transmit(connection: &UnixStream, bytes: &[u8], passed: &[BorrowedFd<'_>]) -> io::Result<()> {
    let act = || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PASSED_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !passed.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(passed));
        }
        Ok(sendmsg(connection, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
    };
    connection.async_io(Interest::WRITABLE, act).await.map(drop)
}
