//! The switch as a process: a socket that serves the ensemble's name, one for each member, and what stands between
//! them.
//!
//! All of it is one thread's: no connection of an ensemble is shared. [`worker`] has all that is decided, without any
//! socket; [`served`] is one connection, [`member`] one member; [`control`] answers operators.

pub mod control;
mod member;
mod served;
mod worker;

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use tokio::net::UdpSocket;
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;

use crate::batch;
use crate::clock::Clock;
use crate::random_seed;
use crate::router::Policy;
use control::Command;
use member::Host;
use worker::{Outgoing, Worker};

/// Batches of datagrams that wait for the switch; what comes when there are more waits in the kernel.
const BATCHES_MAX: usize = 64;

/// What a switch is set up with.
#[derive(Clone, Debug)]
pub struct Config {
    /// The ensemble's name, for lists.
    pub name: String,
    /// The members' name, for lists.
    pub members: String,
    /// How frames are divided.
    pub policy: Policy,
    /// Chunks under way in each direction of a connection.
    pub window: u16,
}

/// A member that there is, and how it is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberAt {
    /// Its host.
    pub host: [u8; 16],
    /// Its host's name.
    pub name: String,
    /// Where datagrams for this very member are sent.
    pub address: SocketAddr,
    /// Zero: it is drained.
    pub weight: u32,
}

/// What has come to a member's socket.
struct Arrived {
    host: Host,
    /// Which of the sockets that the member has had.
    turn: u64,
    /// Or why nothing comes any more.
    datagrams: io::Result<Vec<Vec<u8>>>,
}

/// A socket that leads to a member.
struct Link {
    socket: Arc<UdpSocket>,
    address: SocketAddr,
    turn: u64,
    reader: AbortHandle,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// Serves an ensemble at a socket, until an error of that socket, or of the operating system. `members` says who is a
/// member now.
///
/// # Errors
///
/// The socket fails, or the operating system gives no random numbers.
pub async fn run(
    service: UdpSocket,
    mut members: watch::Receiver<Vec<MemberAt>>,
    mut commands: mpsc::Receiver<Command>,
    config: Config,
) -> io::Result<()> {
    let clock = Clock::start();
    let mut worker = Worker::new(config, random_seed()?);
    let mut links = Links::new();
    let (sender, mut arrivals) = mpsc::channel(BATCHES_MAX);
    worker.set_members(clock.now(), &members.borrow_and_update().clone());
    let mut has_commands = true;
    loop {
        links.follow(&mut worker, clock.now(), &sender);
        links.flush(&mut worker, clock.now(), &service)?;
        let deadline = clock.deadline(worker.next_deadline());
        tokio::select! {
            received = batch::receive(&service, |from, bytes| {
                if let Some(from) = from {
                    worker.take_from_peer(clock.now(), from, bytes);
                }
            }) => note_received(received)?,
            arrived = arrivals.recv() => {
                if let Some(arrived) = arrived {
                    take(&mut worker, clock.now(), arrived);
                }
            }
            changed = members.changed() => {
                changed.map_err(|_| io::Error::other("nobody says any more who the members are"))?;
                worker.set_members(clock.now(), &members.borrow_and_update().clone());
            }
            command = commands.recv(), if has_commands => match command {
                Some(command) => command.carry_out(&mut worker, clock.now()),
                None => has_commands = false,
            },
            () = tokio::time::sleep_until(deadline) => {}
        }
        worker.on_time(clock.now());
    }
}

/// A socket that serves hears of peers that are gone as errors of its own, and goes on.
fn note_received(received: io::Result<()>) -> io::Result<()> {
    match received {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
        other => other,
    }
}

/// Takes what has come from a member; not what came from a socket that leads to it no more.
fn take(worker: &mut Worker, now: margay_core::Instant, arrived: Arrived) {
    let Arrived { host, turn, datagrams } = arrived;
    match datagrams {
        Ok(datagrams) => {
            for bytes in &datagrams {
                // The one before may have said that the socket leads there no more.
                if worker.leads(host, turn) {
                    worker.take_from_member(now, host, bytes);
                }
            }
        }
        Err(error) if worker.leads(host, turn) => {
            worker.link_failed(now, host, &format!("its flow has ended: {error}"));
        }
        Err(_) => {}
    }
}

/// The sockets that lead to members.
struct Links {
    by_host: HashMap<Host, Link>,
}

impl Links {
    fn new() -> Self {
        Self { by_host: HashMap::new() }
    }

    /// Opens and closes sockets as the worker wants them.
    fn follow(&mut self, worker: &mut Worker, now: margay_core::Instant, arrivals: &mpsc::Sender<Arrived>) {
        let wanted = worker.links();
        self.by_host.retain(|host, link| wanted.get(host) == Some(&(link.address, link.turn)));
        for (host, (address, turn)) in wanted {
            if self.by_host.contains_key(&host) {
                continue;
            }
            match open(host, address, turn, arrivals.clone()) {
                Ok(link) => drop(self.by_host.insert(host, link)),
                Err(error) => worker.link_failed(now, host, &format!("no socket leads to it: {error}")),
            }
        }
    }

    /// Sends what is to be sent.
    fn flush(&self, worker: &mut Worker, now: margay_core::Instant, service: &UdpSocket) -> io::Result<()> {
        let Outgoing { to_peers, to_members } = worker.take_outgoing();
        batch::send(service, &to_peers)?;
        for (host, datagrams) in to_members {
            if let Some(link) = self.by_host.get(&host)
                && let Err(error) = batch::send(&link.socket, &datagrams)
            {
                worker.link_failed(now, host, &format!("its flow has ended: {error}"));
            }
        }
        Ok(())
    }
}

fn open(host: Host, address: SocketAddr, turn: u64, arrivals: mpsc::Sender<Arrived>) -> io::Result<Link> {
    let any: SocketAddr =
        if address.is_ipv6() { (Ipv6Addr::UNSPECIFIED, 0).into() } else { (Ipv4Addr::UNSPECIFIED, 0).into() };
    let socket = std::net::UdpSocket::bind(any)?;
    socket.connect(address)?;
    socket.set_nonblocking(true)?;
    let socket = Arc::new(UdpSocket::from_std(socket)?);
    let of_reader = Arc::clone(&socket);
    let reader = tokio::spawn(async move {
        loop {
            let mut datagrams = Vec::new();
            let received = batch::receive(&of_reader, |_, bytes| datagrams.push(bytes.to_vec())).await;
            let is_over = received.is_err();
            let arrived = Arrived { host, turn, datagrams: received.map(|()| datagrams) };
            if arrivals.send(arrived).await.is_err() || is_over {
                return;
            }
        }
    });
    Ok(Link { socket, address, turn, reader: reader.abort_handle() })
}
