//! The switch as a process: a socket that serves the ensemble's name, one for each member, and what stands between
//! them.
//!
//! All of it is one thread's: no connection of an ensemble is shared. [`worker`] has all that is decided, without any
//! socket; [`served`] is one connection, [`member`] one member; [`control`] answers operators.

mod clients;
pub mod control;
mod gathered;
mod member;
mod placed;
mod served;
mod worker;

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use tokio::net::UdpSocket;
use tokio::sync::{mpsc, watch};

use crate::clock::Clock;
use crate::protocol::Content;
use crate::router::Policy;
use crate::{batch, random_seed};
use control::Command;
use member::Host;
pub use placed::Loaded;
use worker::Worker;

/// What a switch is set up with.
#[derive(Clone, Debug)]
pub struct Config {
    /// The ensemble's name, for lists.
    pub name: String,
    /// The members' name, for lists.
    pub members: String,
    /// What clients and members send each other: others are refused.
    pub content: Content,
    /// How frames are divided.
    pub policy: Policy,
    /// Chunks under way in each direction of a connection.
    pub window: u16,
    /// What divides frames in the policy's place, to begin with.
    pub module: Option<Loaded>,
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

/// A socket that leads to a member.
struct Link {
    socket: Arc<UdpSocket>,
    address: SocketAddr,
    /// Which of the sockets that the member has had.
    turn: u64,
    /// Ends when something has come.
    waiting: Pin<Box<dyn Future<Output = ()> + Send>>,
    has_come: bool,
}

impl Link {
    fn wait(&mut self) {
        let socket = Arc::clone(&self.socket);
        // An error is found by who reads.
        self.waiting = Box::pin(async move { drop(socket.ready(batch::ARRIVAL).await) });
        self.has_come = false;
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
    worker.set_members(clock.now(), &members.borrow_and_update().clone());
    let mut has_commands = true;
    loop {
        links.follow(&mut worker, clock.now());
        links.flush(&mut worker, clock.now(), &service)?;
        let deadline = clock.deadline(worker.next_deadline());
        // All of it in one task: a thread that read for another would have it woken for each batch.
        tokio::select! {
            ready = service.ready(batch::ARRIVAL) => drop(ready?),
            () = links.arrival() => {}
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
        let now = clock.now();
        let received = batch::receive_now(&service, |from, bytes| {
            if let Some(from) = from {
                worker.take_from_peer(now, from, bytes);
            }
        });
        note_received(received)?;
        links.take(&mut worker, now);
        worker.on_time(clock.now());
    }
}

/// A socket that serves hears of peers that are gone as errors of its own, and goes on.
fn note_received(received: io::Result<usize>) -> io::Result<()> {
    match received {
        Err(error) if error.kind() != io::ErrorKind::ConnectionRefused => Err(error),
        _ => Ok(()),
    }
}

/// The sockets that lead to members.
struct Links {
    by_host: BTreeMap<Host, Link>,
}

impl Links {
    fn new() -> Self {
        Self { by_host: BTreeMap::new() }
    }

    /// Opens and closes sockets as the worker wants them.
    fn follow(&mut self, worker: &mut Worker, now: margay_core::Instant) {
        // Both are in the order of hosts. Mostly nothing has changed.
        if worker.links().eq(self.by_host.iter().map(|(host, link)| (*host, link.address, link.turn))) {
            return;
        }
        let wanted: Vec<_> = worker.links().collect();
        self.by_host.retain(|host, link| wanted.contains(&(*host, link.address, link.turn)));
        for (host, address, turn) in wanted {
            if self.by_host.contains_key(&host) {
                continue;
            }
            match open(address, turn) {
                Ok(link) => drop(self.by_host.insert(host, link)),
                Err(error) => worker.link_failed(now, host, &format!("no socket leads to it: {error}")),
            }
        }
    }

    /// Something has come from a member.
    async fn arrival(&mut self) {
        poll_fn(|context| {
            for link in self.by_host.values_mut().filter(|link| !link.has_come) {
                link.has_come = link.waiting.as_mut().poll(context).is_ready();
            }
            if self.by_host.values().any(|link| link.has_come) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Takes what has come from members: not what comes from a socket once it leads there no more.
    fn take(&mut self, worker: &mut Worker, now: margay_core::Instant) {
        for (host, link) in self.by_host.iter_mut().filter(|(_, link)| link.has_come) {
            link.wait();
            let received = batch::receive_now(&link.socket, |_, bytes| {
                // The one before may have said so.
                if worker.leads(*host, link.turn) {
                    worker.take_from_member(now, *host, bytes);
                }
            });
            if let Err(error) = received
                && worker.leads(*host, link.turn)
            {
                note_link_error(worker, now, *host, &error);
            }
        }
    }

    /// Sends what is to be sent, and what follows where that is refused.
    fn flush(&self, worker: &mut Worker, now: margay_core::Instant, service: &UdpSocket) -> io::Result<()> {
        loop {
            let mut out = worker.take_outgoing();
            out.to_peers.send(service)?;
            out.to_members.retain(|host, _| self.by_host.contains_key(host));
            let mut is_refused = false;
            for (host, outbound) in out.to_members.iter_mut().filter(|(_, outbound)| !outbound.is_empty()) {
                if let Some(link) = self.by_host.get(host)
                    && let Err(error) = outbound.send(&link.socket)
                {
                    is_refused = true;
                    note_link_error(worker, now, *host, &error);
                }
            }
            worker.give_back(out);
            if !is_refused {
                return Ok(());
            }
        }
    }
}

fn note_link_error(worker: &mut Worker, now: margay_core::Instant, host: Host, error: &io::Error) {
    let why = format!("its flow has ended: {error}");
    match error.kind() {
        io::ErrorKind::ConnectionRefused => worker.link_refused(now, host, &why),
        _ => worker.link_failed(now, host, &why),
    }
}

fn open(address: SocketAddr, turn: u64) -> io::Result<Link> {
    let any: SocketAddr =
        if address.is_ipv6() { (Ipv6Addr::UNSPECIFIED, 0).into() } else { (Ipv4Addr::UNSPECIFIED, 0).into() };
    let socket = std::net::UdpSocket::bind(any)?;
    socket.connect(address)?;
    socket.set_nonblocking(true)?;
    let socket = Arc::new(UdpSocket::from_std(socket)?);
    let mut link = Link { socket, address, turn, waiting: Box::pin(std::future::ready(())), has_come: false };
    link.wait();
    Ok(link)
}
