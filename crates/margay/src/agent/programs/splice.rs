//! Programs that leave: of a connection that a program has accepted, and one that it has opened, one is made, without
//! the program (`docs/book/leaving.md`; docs/decisions/0088).
//!
//! Until the session goes another way somebody relays between the two sockets: the program itself, which says so, or
//! the agent, to which it has given them. Whatever goes wrong, that goes on, and nobody notices.

use std::io;
use std::net::TcpStream as StdStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use margay_core::delta::{SocketFacts, SpliceFacts};
use margay_core::fair_table::FairTable;
use margay_core::reconfiguration::{SpliceOutcome, SpliceRefused};
use margay_core::{Role, Tuple};
use margay_datapath::repair::{Frozen, RepairError};
use margay_wire::{FlowId, SPLICE_RELAYS_ON};
use nix::errno::Errno;
use parking_lot::Mutex;
use rustix::net::sockopt::set_socket_linger;
use tokio::io::copy_bidirectional;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, block_in_place};
use tokio::time::{Instant, sleep};

use super::hand_over::tuple_of;
use super::message::{Kind, Reply, Request};
use super::request::{Handed, No, handed};
use super::rights::Caller;
use crate::agent::Agent;

/// Most pairs of sockets at one time: of root's programs, and beside them of all other users, one of whom has a share.
const PAIRS_MAX: usize = 4096;
/// So long a program waits until its two sessions are set up: what a message that is lost costs, and some more.
const PATIENCE: Duration = Duration::from_secs(2);
const ASKED_AGAIN: Duration = Duration::from_millis(5);

/// What the core has said: the flow of the accepted connection, and what has become of the wish.
pub type Word = (FlowId, SpliceOutcome);

/// Where the core's words come.
#[derive(Clone)]
pub struct Words {
    sender: mpsc::UnboundedSender<Word>,
    receiver: Arc<Mutex<Option<mpsc::UnboundedReceiver<Word>>>>,
}

impl Default for Words {
    fn default() -> Self {
        // Bounded by the flows that there are: each has one word.
        let (sender, receiver) = mpsc::unbounded_channel();
        Self { sender, receiver: Arc::new(Mutex::new(Some(receiver))) }
    }
}

impl Words {
    /// Quick, and never calls back.
    pub fn put(&self, word: Word) {
        // Nobody listens once the agent goes down.
        let _ = self.sender.send(word);
    }
}

/// Two sockets that are being made one connection.
struct Pair {
    left: OwnedFd,
    right: OwnedFd,
    /// Who relays between them, where the agent does.
    relay: Option<AbortHandle>,
    program: String,
}

/// All pairs, by the flow of the accepted connection.
pub struct Splices {
    pairs: Mutex<FairTable<FlowId, Pair>>,
}

impl Default for Splices {
    fn default() -> Self {
        Self { pairs: Mutex::new(FairTable::new(PAIRS_MAX, PAIRS_MAX)) }
    }
}

impl Splices {
    fn add(&self, caller: &Caller, left: FlowId, pair: Pair) -> Result<(), No> {
        let mut pairs = self.pairs.lock();
        if pairs.contains_key(&left) {
            return Err((Errno::EALREADY, "the two connections are being made one already".to_owned()));
        }
        pairs.insert(caller.peer(), left, pair).map_err(|full| {
            let text = format!("too many pairs of connections are being made one already ({full}); try again later");
            (Errno::EAGAIN, text)
        })
    }

    fn take(&self, left: FlowId) -> Option<Pair> {
        self.pairs.lock().remove(&left)
    }

    /// The core's word: the two sockets are ended where the session goes on without them. Otherwise who relays goes on.
    fn note(&self, left: FlowId, outcome: &SpliceOutcome) {
        match outcome {
            SpliceOutcome::Done => {
                let Some(pair) = self.take(left) else { return };
                tracing::debug!(flow = left.0, program = pair.program, "a program has left between two connections");
                pair.end();
            }
            SpliceOutcome::Failed(why) => {
                let mut pairs = self.pairs.lock();
                let program = pairs.get(&left).map_or("", |pair| &pair.program);
                tracing::info!(
                    flow = left.0,
                    program,
                    why,
                    "a program could not leave; its connections go on as before"
                );
                // The agent's own relay ends with the connections, and takes the pair off then.
                if pairs.get(&left).is_some_and(|pair| pair.relay.is_none()) {
                    pairs.remove(&left);
                }
            }
        }
    }
}

impl Pair {
    /// Ends both sockets without a word to their peers, whoever else has descriptors of them.
    fn end(self) {
        if let Some(relay) = &self.relay {
            relay.abort();
        }
        for socket in [self.left, self.right] {
            let ended = Frozen::freeze(socket).map_err(|(_, error)| error).and_then(Frozen::close_silently);
            if let Err(error) = ended {
                tracing::debug!(%error, "a socket of a program that has left had ended by itself");
            }
        }
    }
}

/// Carries out what the core says, until the agent goes down.
pub async fn run(agent: Arc<Agent>) {
    let Some(mut words) = agent.process.watchers.splices().receiver.lock().take() else { return };
    while let Some((left, outcome)) = words.recv().await {
        block_in_place(|| agent.connections.programs.splices.note(left, &outcome));
    }
}

/// Answers a program that wants to leave: the socket that it has accepted, and the one that it has opened, in this
/// order. It has written all that it has read, and reads and writes nothing until the answer.
pub async fn splice(agent: &Arc<Agent>, caller: &Caller, request: &Request, passed: Vec<OwnedFd>) -> Reply {
    let until = Instant::now() + PATIENCE;
    let begun = match wish_of(request, passed) {
        Ok(wish) => loop {
            match block_in_place(|| begin(agent, caller, &wish)) {
                Err((Errno::EAGAIN, _)) if !wish.relays_on && Instant::now() < until => sleep(ASKED_AGAIN).await,
                begun => break begun,
            }
        },
        Err(no) => Err(no),
    };
    match begun {
        Ok(()) => Reply::done(Kind::Splice),
        Err((errno, text)) => {
            if errno != Errno::EAGAIN {
                tracing::info!(program = caller.describe(), why = text, "a program is refused to leave");
            }
            Reply::refused(Kind::Splice as u8, errno, text)
        }
    }
}

/// Two sockets that are to be made one connection.
struct Wish {
    left: Handed,
    right: Handed,
    /// The program goes on relaying until they are one.
    relays_on: bool,
}

fn wish_of(request: &Request, passed: Vec<OwnedFd>) -> Result<Wish, No> {
    let relays_on = match request.port {
        0 => false,
        SPLICE_RELAYS_ON => true,
        _ => return Err((Errno::EINVAL, "the port of this request is 0 or 1".to_owned())),
    };
    let misuse = "two sockets go with this request: the one that was accepted, and the one that was opened";
    let [left, right] = <[OwnedFd; 2]>::try_from(passed).map_err(|_| (Errno::EINVAL, misuse.to_owned()))?;
    Ok(Wish { left: handed(request, vec![left])?, right: handed(request, vec![right])?, relays_on })
}

/// What may be so a moment later is EAGAIN: who relays on asks again with later bytes, others wait here.
fn begin(agent: &Arc<Agent>, caller: &Caller, wish: &Wish) -> Result<(), No> {
    let left_flow = flow_of(agent, &wish.left, Role::Responder)?;
    let right_flow = flow_of(agent, &wish.right, Role::Initiator)?;
    agent.core.0.with_sal(|sal, _| sal.may_splice(left_flow, right_flow)).map_err(not_spliced)?;
    let copy = |handed: &Handed| handed.socket.try_clone().map_err(|error| (Errno::EMFILE, error.to_string()));
    let [left, right] = [copy(&wish.left)?, copy(&wish.right)?];
    let own = [copy(&wish.left)?, copy(&wish.right)?];
    let [kept_left, kept_right] = [copy(&wish.left)?, copy(&wish.right)?];
    let facts = facts_of(left, right)?;
    let pair = Pair { left: kept_left, right: kept_right, relay: None, program: caller.describe() };
    // Before the core could say what has become of it.
    agent.connections.programs.splices.add(caller, left_flow, pair)?;
    let begun = agent.core.0.with_sal(|sal, now| sal.splice(now, left_flow, right_flow, facts));
    if let Err(error) = begun {
        agent.connections.programs.splices.take(left_flow);
        return Err(not_spliced(error));
    }
    if wish.relays_on {
        return Ok(());
    }
    let [left, right] = own;
    relay(agent, left_flow, left, right).map_err(|error| {
        let text = format!("nobody can relay between the two connections until they are one: {error}");
        (Errno::EIO, text)
    })
}

fn not_spliced(refused: SpliceRefused) -> No {
    (if refused.is_for_now() { Errno::EAGAIN } else { Errno::EOPNOTSUPP }, refused.to_string())
}

/// The flow of a program's connection, which must be of this end.
fn flow_of(agent: &Agent, socket: &Handed, role: Role) -> Result<FlowId, No> {
    let (which, how) = match role {
        Role::Responder => ("first", "accepted by a name of this host"),
        Role::Initiator => ("second", "opened to a name"),
    };
    if !socket.is_here()? {
        let text = format!("the {which} socket is of another network namespace than the agent's");
        return Err((Errno::EOPNOTSUPP, text));
    }
    let unconnected = || (Errno::ENOTCONN, format!("the {which} socket is not connected"));
    let app: Tuple = tuple_of(socket.socket.as_fd()).ok_or_else(unconnected)?;
    let find = || agent.core.0.with_sal(|sal, _| sal.flow_of(&app));
    let found = find().or_else(|| {
        // The kernel may have opened it by a grant, and the core has not heard of it yet.
        agent.core.0.hear_of_flows();
        find()
    });
    match found {
        Some((flow, found)) if found == role => Ok(flow),
        Some(_) => {
            let text =
                format!("the {which} socket was not {how}: pass the accepted socket first, the opened one second");
            Err((Errno::EINVAL, text))
        }
        None if agent.config().ranges().is_virtual(app.destination.ip()) => {
            let text = format!("nothing is known yet of the session of the {which} socket; ask again");
            Err((Errno::EAGAIN, text))
        }
        None => {
            let text = format!(
                "the {which} socket, from {} to {}, is no connection that was {how}",
                app.source, app.destination
            );
            Err((Errno::ENOTCONN, text))
        }
    }
}

/// What the kernel says of both sockets. They are frozen for that moment: nothing may be read or written meanwhile.
fn facts_of(left: OwnedFd, right: OwnedFd) -> Result<SpliceFacts, No> {
    let frozen = |socket: OwnedFd, which: &str| Frozen::freeze(socket).map_err(|(_, error)| refused(which, &error));
    let left = frozen(left, "first")?;
    let right = frozen(right, "second")?;
    let facts = |socket: &Frozen, which: &str| -> Result<SocketFacts, No> {
        socket.facts().map_err(|error| refused(which, &error))
    };
    let spliced = SpliceFacts { left: facts(&left, "first")?, right: facts(&right, "second")? };
    let has_ecn = |socket: &Frozen, which: &str| socket.has_ecn().map_err(|error| refused(which, &error));
    if has_ecn(&left, "first")? != has_ecn(&right, "second")? {
        let text = "one of the two connections marks congestion (ECN), and the other one does not: set \
                    net.ipv4.tcp_ecn alike on the three hosts";
        return Err((Errno::EOPNOTSUPP, text.to_owned()));
    }
    drop(left.thaw());
    drop(right.thaw());
    Ok(spliced)
}

fn refused(which: &str, error: &RepairError) -> No {
    let errno = match error {
        RepairError::NotPermitted => Errno::EPERM,
        _ => Errno::EOPNOTSUPP,
    };
    (errno, format!("the {which} socket: {error}"))
}

/// Relays both ways from now on.
fn relay(agent: &Arc<Agent>, flow: FlowId, left: OwnedFd, right: OwnedFd) -> io::Result<()> {
    let [mut left, mut right] = [stream(left)?, stream(right)?];
    let agent_of_task = Arc::clone(agent);
    let mut pairs = agent.connections.programs.splices.pairs.lock();
    // The core may have been quicker: then the sockets have ended.
    let Some(pair) = pairs.get_mut(&flow) else { return Ok(()) };
    let task = tokio::spawn(async move {
        let relayed = copy_bidirectional(&mut left, &mut right).await;
        if relayed.is_ok() {
            // All has been said, and FINs go out as those of any program.
            [left.as_fd(), right.as_fd()].into_iter().for_each(|socket| linger(socket, None));
        }
        drop((left, right));
        agent_of_task.connections.programs.splices.take(flow);
    });
    pair.relay = Some(task.abort_handle());
    Ok(())
}

/// A relay that ends in the middle must not look like the end of what was said: the connection is reset then.
fn stream(socket: OwnedFd) -> io::Result<TcpStream> {
    linger(socket.as_fd(), Some(Duration::ZERO));
    let stream = StdStream::from(socket);
    stream.set_nonblocking(true)?;
    TcpStream::from_std(stream)
}

fn linger(socket: BorrowedFd<'_>, time: Option<Duration>) {
    if let Err(error) = set_socket_linger(socket, time) {
        tracing::debug!(%error, "how a relayed connection ends could not be set");
    }
}
