//! The DNS responder as a process: `margay responder`, which an agent starts and no person (docs/decisions/0044).
//!
//! It is two processes. One answers, without any rights ([`worker`]). The other has rights and does nothing but start
//! the first again when it dies ([`keeper`]). Both have nothing on disk; what they hold, and the agent holds too, are
//! sockets, so that questions wait there while whoever answers them is started again.

mod keeper;
mod worker;

use std::fs;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};

use clap::Args;
use margay_core::{RangeV4, RangeV6};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

use crate::host::responder_way::Namespace;

/// Descriptors that are ever passed at once.
const PASSED_MAX: usize = 4;
/// Length of [`Words::identity`].
pub const IDENTITY_LEN: usize = 32;

/// The words after `responder`.
#[derive(Args, Clone, Debug)]
pub struct Words {
    /// The zone
    #[arg(long)]
    pub zone: String,
    /// Where resolvers ask
    #[arg(long)]
    pub address: SocketAddr,
    /// Virtual IPv4 addresses, whose names it is asked for
    #[arg(long)]
    pub ipv4: RangeV4,
    /// And IPv6 addresses
    #[arg(long)]
    pub ipv6: RangeV6,
    /// Be the one that answers
    #[arg(long)]
    pub worker: bool,
}

impl Words {
    /// The command line, to start one with.
    fn command(&self) -> Command {
        // The same program, also where another one has its path by now.
        let mut command = Command::new("/proc/self/exe");
        if let Some(name) = std::env::args_os().next() {
            command.arg0(name);
        }
        command.args(["responder", "--zone", &self.zone, "--address", &self.address.to_string()]);
        command.args(["--ipv4", &self.ipv4.to_string(), "--ipv6", &self.ipv6.to_string()]);
        command.args(self.worker.then_some("--worker"));
        // Whoever waits for the agent's word is not to hear it from a responder.
        command.env_remove("NOTIFY_SOCKET").current_dir("/").stdout(Stdio::null());
        command
    }

    /// Of what a responder is made: another program, zone, address or range is another one.
    ///
    /// # Errors
    ///
    /// The program is nowhere.
    pub fn identity(&self) -> io::Result<[u8; IDENTITY_LEN]> {
        let program = fs::metadata("/proc/self/exe")?;
        let text = format!(
            "{} {} {} {} {} {} {} {}",
            program.dev(),
            program.ino(),
            program.mtime(),
            program.mtime_nsec(),
            self.zone,
            self.address,
            self.ipv4,
            self.ipv6
        );
        Ok(*blake3::hash(text.as_bytes()).as_bytes())
    }
}

/// Where an agent finds the responder that runs.
pub fn path(runtime_dir: &Path) -> PathBuf {
    runtime_dir.join("responder.sock")
}

/// What programs ask, and the network namespace that it is in, where that is another one than this host's.
#[derive(Debug)]
pub struct Sockets {
    /// UDP.
    pub udp: OwnedFd,
    /// TCP, listening.
    pub tcp: OwnedFd,
    /// Of both.
    pub namespace: Option<Namespace>,
}

impl Sockets {
    fn fds(&self) -> impl Iterator<Item = std::os::fd::BorrowedFd<'_>> {
        [self.udp.as_fd(), self.tcp.as_fd()].into_iter().chain(self.namespace.as_ref().map(AsFd::as_fd))
    }

    /// As they were passed, in this order.
    fn from_passed(mut passed: impl Iterator<Item = OwnedFd>) -> Option<Self> {
        Some(Self { udp: passed.next()?, tcp: passed.next()?, namespace: passed.next().map(Namespace::from) })
    }
}

/// Starts a responder, which hears agents at `control` and programs at `sockets`.
///
/// # Errors
///
/// The system refuses.
pub fn start(words: &Words, control: impl AsFd, sockets: &Sockets) -> io::Result<Child> {
    let (ours, theirs) = UnixStream::pair()?;
    // A group of its own: what ends the agent in a terminal does not end it.
    let child = words.command().stdin(OwnedFd::from(theirs)).process_group(0).spawn()?;
    pass(&ours, b"s", &[control.as_fd()].into_iter().chain(sockets.fds()).collect::<Vec<_>>())?;
    Ok(child)
}

/// Sends descriptors with some bytes.
fn pass(stream: &UnixStream, bytes: &[u8], fds: &[std::os::fd::BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PASSED_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives descriptors, and as many bytes as came with them, up to `bytes`.
fn receive(stream: impl AsFd, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PASSED_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = recvmsg(stream, &mut [IoSliceMut::new(bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let of_message = |part| match part {
        RecvAncillaryMessage::ScmRights(passed) => Some(passed),
        _ => None,
    };
    Ok((message.bytes, control.drain().filter_map(of_message).flatten().collect()))
}

/// Hears from a responder what it is and what it holds; `stream` must not be a non-blocking one.
///
/// # Errors
///
/// It says something else, or nothing in time.
pub fn greet(stream: &UnixStream) -> io::Result<([u8; IDENTITY_LEN], Sockets)> {
    let mut identity = [0; IDENTITY_LEN];
    let (len, passed) = receive(stream, &mut identity)?;
    let sockets = Sockets::from_passed(passed.into_iter()).filter(|_| len == IDENTITY_LEN);
    sockets.map(|sockets| (identity, sockets)).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// What was given to this process by its standard input: where agents are heard, and what programs ask.
fn given() -> io::Result<(OwnedFd, Sockets)> {
    let (_, passed) = receive(io::stdin(), &mut [0])?;
    let mut passed = passed.into_iter();
    let given = passed.next().zip(Sockets::from_passed(passed));
    given.ok_or_else(|| io::Error::other("this verb is for agents alone"))
}

/// Runs one of the two, until it is told to end.
pub fn main(words: &Words) -> ExitCode {
    let done = if words.worker { worker::run(words) } else { keeper::run(words) };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(%error, "the DNS responder ends");
            ExitCode::FAILURE
        }
    }
}
