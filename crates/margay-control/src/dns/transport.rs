//! The sockets of the responder: bounded in what they hold, and patient with nobody.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use margay_core::Ranges;
use margay_core::fair_table::Peer;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::responder::Desk;
use super::{Carrier, Questioner};
use crate::permits::Permits;

/// Longest question: more than a name, its type and some options is none.
const QUESTION_MAX: usize = 4096;
/// Questions that wait for the agent or a server at once: of root's programs, and twice as many of others, of which one
/// user of this host has a quarter, and one address of others a sixteenth. More are dropped, and asked again by who has
/// them.
pub(super) const WAITING_MAX: usize = 1024;
/// Connections at once, shared out in the same way. More are closed at once: their resolvers ask another server.
pub(super) const CONNECTIONS_MAX: usize = 128;
/// For a whole question to come, and for its answer to go.
const IDLE: Duration = Duration::from_secs(10);
/// After an error of the system, so that a lasting one does not fill the log.
const PAUSE: Duration = Duration::from_millis(200);
const TCP: u8 = 6;
const UDP: u8 = 17;
/// How often to look for a port that both UDP and TCP have free.
const PORT_TRIES: usize = 16;

pub(super) async fn bind(listen: SocketAddr) -> io::Result<(UdpSocket, TcpListener)> {
    let mut tries = PORT_TRIES;
    loop {
        let udp = UdpSocket::bind(listen).await?;
        match TcpListener::bind(udp.local_addr()?).await {
            Ok(tcp) => return Ok((udp, tcp)),
            Err(error) if listen.port() == 0 && error.kind() == io::ErrorKind::AddrInUse && tries > 0 => tries -= 1,
            Err(error) => return Err(error),
        }
    }
}

/// Waits until the responder was stopped or dropped.
pub(super) async fn ended(stopped: &mut watch::Receiver<()>) {
    // Nothing is ever sent: this returns when the sender is gone.
    while stopped.changed().await.is_ok() {}
}

/// The user whose socket of this host a question comes from: by the protocol and the socket's address. `None`: there is
/// no such socket.
pub type UserOf = Box<dyn Fn(u8, SocketAddr) -> Option<u32> + Send + Sync>;

/// Whose questions count together.
pub(super) struct Askers {
    /// The addresses that programs of this host ask from: that of the responder itself, where it is on the host, and
    /// the host's end of the way to a responder in a namespace of its own.
    own: [IpAddr; 2],
    user_of: UserOf,
}

impl Askers {
    /// All who ask from this host's addresses and have no socket there that the kernel shows: containers whose packets
    /// are masqueraded, and programs that have closed the socket. The kernel gives no user this number.
    const UNKNOWN: Peer = Peer::User(u32::MAX);

    pub(super) fn new(local: IpAddr, ranges: Ranges, user_of: UserOf) -> Self {
        Self { own: [local.to_canonical(), ranges.responder_client_v4().into()], user_of }
    }

    fn is_own(&self, ip: IpAddr) -> bool {
        ip.is_loopback() || self.own.contains(&ip)
    }

    fn who(&self, protocol: u8, from: SocketAddr) -> Questioner {
        let ip = from.ip().to_canonical();
        let user = if self.is_own(ip) { (self.user_of)(protocol, SocketAddr::new(ip, from.port())) } else { None };
        user.map_or(Questioner::Address(ip), Questioner::User)
    }

    /// Whose share it has.
    fn peer(&self, asker: Questioner) -> Peer {
        match asker {
            Questioner::User(0) => Peer::Own,
            Questioner::User(uid) => Peer::User(uid),
            Questioner::Address(ip) if self.is_own(ip) => Self::UNKNOWN,
            Questioner::Address(ip) => Peer::Unauthenticated(ip),
        }
    }
}

fn reap(tasks: &mut JoinSet<()>) {
    while tasks.try_join_next().is_some() {}
}

pub(super) async fn serve_udp(
    socket: UdpSocket,
    askers: Arc<Askers>,
    desk: Arc<Desk>,
    mut stopped: watch::Receiver<()>,
) {
    let (socket, waiting) = (Arc::new(socket), Permits::new(2 * WAITING_MAX, WAITING_MAX));
    let mut tasks = JoinSet::new();
    let mut buffer = vec![0; QUESTION_MAX];
    loop {
        let received = tokio::select! {
            received = socket.recv_from(&mut buffer) => received,
            () = ended(&mut stopped) => break,
        };
        reap(&mut tasks);
        let (len, from) = match received {
            Ok(received) => received,
            Err(error) => {
                tracing::warn!(%error, "DNS over UDP");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        let asker = askers.who(UDP, from);
        let Ok(permit) = waiting.take(askers.peer(asker), 1) else {
            desk.note_crowded();
            continue;
        };
        let (socket, desk, question) = (Arc::clone(&socket), Arc::clone(&desk), buffer[..len].to_vec());
        tasks.spawn(async move {
            if let Some(answer) = desk.reply(&question, asker, Carrier::Datagram).await {
                // Who asked may be gone, or have a port that nobody can answer to.
                let sent = socket.send_to(&answer, from).await;
                tracing::trace!(?sent, %from, "answered");
            }
            drop(permit);
        });
    }
    tasks.shutdown().await;
}

pub(super) async fn serve_tcp(
    listener: TcpListener,
    askers: Arc<Askers>,
    desk: Arc<Desk>,
    mut stopped: watch::Receiver<()>,
) {
    let open = Permits::new(2 * CONNECTIONS_MAX, CONNECTIONS_MAX);
    let mut tasks = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = ended(&mut stopped) => break,
        };
        reap(&mut tasks);
        let (stream, from) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "DNS over TCP");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        let asker = askers.who(TCP, from);
        let Ok(permit) = open.take(askers.peer(asker), 1) else {
            desk.note_crowded();
            continue;
        };
        let desk = Arc::clone(&desk);
        tasks.spawn(async move {
            if let Err(error) = serve_stream(stream, asker, &desk).await {
                tracing::debug!(%error, "a DNS connection ended");
            }
            drop(permit);
        });
    }
    tasks.shutdown().await;
}

/// One question after the other (RFC 7766), until the peer closes, is idle, or says something that is no question.
async fn serve_stream(mut stream: TcpStream, asker: Questioner, desk: &Desk) -> io::Result<()> {
    let mut question = Vec::new();
    loop {
        let read = async {
            let len = stream.read_u16().await?;
            if usize::from(len) > QUESTION_MAX {
                return Err(io::ErrorKind::InvalidData.into());
            }
            question.resize(usize::from(len), 0);
            stream.read_exact(&mut question).await
        };
        match timeout(IDLE, read).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Ok(Err(error)) => return Err(error),
            Err(_) => return Ok(()),
        }
        let Some(answer) = desk.reply(&question, asker, Carrier::Stream).await else { return Ok(()) };
        let Ok(len) = u16::try_from(answer.len()) else { return Ok(()) };
        let framed = [&len.to_be_bytes()[..], &answer].concat();
        timeout(IDLE, stream.write_all(&framed)).await??;
    }
}

#[cfg(test)]
mod test {
    use super::*;

    /// Ports below 1024 are root's, others each of the user with that number; nobody has port 9.
    fn askers(local: IpAddr) -> Askers {
        let user_of = |_, from: SocketAddr| match u32::from(from.port()) {
            9 => None,
            port => Some(if port < 1024 { 0 } else { port }),
        };
        Askers::new(local, Ranges::USUAL, Box::new(user_of))
    }

    fn at(ip: impl Into<IpAddr>, port: u16) -> SocketAddr {
        SocketAddr::new(ip.into(), port)
    }

    #[test]
    fn one_user_or_container_leaves_room_for_others_and_root() {
        let askers = askers(IpAddr::from([198, 18, 0, 1]));
        let host = [198, 18, 0, 3];
        let waiting = Permits::new(2 * WAITING_MAX, WAITING_MAX);
        let taken = |from| {
            (0..3 * WAITING_MAX).map_while(|_| waiting.take(askers.peer(askers.who(UDP, from)), 1).ok()).collect()
        };
        let all: [Vec<_>; 5] =
            [at([172, 17, 0, 2], 4000), at([172, 18, 0, 2], 4000), at(host, 4001), at(host, 9), at(host, 4002)]
                .map(taken);
        let share = WAITING_MAX / 8;
        assert_eq!(all.map(|taken| taken.len()), [share, share, 4 * share, 4 * share, 4 * share]);
        assert!(waiting.take(Peer::Own, WAITING_MAX).is_ok(), "root's");
    }

    #[test]
    fn users_are_told_apart_at_each_address_of_the_host() {
        let askers = askers(IpAddr::from([198, 18, 0, 1]));
        for ip in [IpAddr::from([127, 0, 0, 1]), [0, 0, 0, 0, 0, 0xffff, 0xc612, 1].into(), [198, 18, 0, 3].into()] {
            let peers = [53, 4001, 9].map(|port| askers.peer(askers.who(TCP, at(ip, port))));
            assert_eq!(peers, [Peer::Own, Peer::User(4001), Askers::UNKNOWN], "{ip}");
        }
        for container in [[198, 18, 0, 4], [172, 17, 0, 2], [0, 0, 0, 1]].map(IpAddr::from) {
            assert_eq!(askers.peer(askers.who(UDP, at(container, 53))), Peer::Unauthenticated(container));
        }
    }
}
