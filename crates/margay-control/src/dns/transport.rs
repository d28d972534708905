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

use super::Carrier;
use super::responder::Desk;
use crate::permits::Permits;

/// Longest question: more than a name, its type and some options is none.
const QUESTION_MAX: usize = 4096;
/// Questions that wait for the agent or a server at once: of programs of this host, and twice as many of others, of
/// which one address has a sixteenth. More are dropped, and asked again by who has them.
pub(super) const WAITING_MAX: usize = 1024;
/// Connections at once, shared out in the same way. More are closed at once: their resolvers ask another server.
pub(super) const CONNECTIONS_MAX: usize = 128;
/// For a whole question to come, and for its answer to go.
const IDLE: Duration = Duration::from_secs(10);
/// After an error of the system, so that a lasting one does not fill the log.
const PAUSE: Duration = Duration::from_millis(200);
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

/// The addresses that programs of this host ask from: that of the responder itself, where it is on the host, and the
/// host's end of the way to a responder in a namespace of its own. Users of the host are not told apart here: a
/// question does not say whose it is, and the host's sockets are not seen from that namespace.
#[derive(Clone, Copy, Debug)]
pub(super) struct OwnAddresses([IpAddr; 2]);

impl OwnAddresses {
    pub(super) fn new(local: IpAddr, ranges: Ranges) -> Self {
        Self([local.to_canonical(), ranges.responder_client_v4().into()])
    }

    fn asker(self, from: IpAddr) -> Peer {
        let from = from.to_canonical();
        if from.is_loopback() || self.0.contains(&from) { Peer::Own } else { Peer::Unauthenticated(from) }
    }
}

fn reap(tasks: &mut JoinSet<()>) {
    while tasks.try_join_next().is_some() {}
}

pub(super) async fn serve_udp(socket: UdpSocket, own: OwnAddresses, desk: Arc<Desk>, mut stopped: watch::Receiver<()>) {
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
        let Ok(permit) = waiting.take(own.asker(from.ip()), 1) else {
            desk.note_crowded();
            continue;
        };
        let (socket, desk, question) = (Arc::clone(&socket), Arc::clone(&desk), buffer[..len].to_vec());
        tasks.spawn(async move {
            if let Some(answer) = desk.reply(&question, from.ip().to_canonical(), Carrier::Datagram).await {
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
    own: OwnAddresses,
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
        let Ok(permit) = open.take(own.asker(from.ip()), 1) else {
            desk.note_crowded();
            continue;
        };
        let desk = Arc::clone(&desk);
        tasks.spawn(async move {
            if let Err(error) = serve_stream(stream, from.ip().to_canonical(), &desk).await {
                tracing::debug!(%error, "a DNS connection ended");
            }
            drop(permit);
        });
    }
    tasks.shutdown().await;
}

/// One question after the other (RFC 7766), until the peer closes, is idle, or says something that is no question.
async fn serve_stream(mut stream: TcpStream, from: IpAddr, desk: &Desk) -> io::Result<()> {
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
        let Some(answer) = desk.reply(&question, from, Carrier::Stream).await else { return Ok(()) };
        let Ok(len) = u16::try_from(answer.len()) else { return Ok(()) };
        let framed = [&len.to_be_bytes()[..], &answer].concat();
        timeout(IDLE, stream.write_all(&framed)).await??;
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn programs_of_this_host_are_never_refused_for_what_a_container_asks() {
        let own = OwnAddresses::new(IpAddr::from([198, 18, 0, 1]), Ranges::USUAL);
        let container = own.asker(IpAddr::from([172, 17, 0, 2]));
        let waiting = Permits::new(2 * WAITING_MAX, WAITING_MAX);
        let of_one: Vec<_> = (0..2 * WAITING_MAX).map_while(|_| waiting.take(container, 1).ok()).collect();
        assert_eq!(of_one.len(), WAITING_MAX / 8);
        for from in [IpAddr::from([127, 0, 0, 1]), IpAddr::from([0, 0, 0, 0, 0, 0xffff, 0xc612, 1])] {
            assert_eq!(own.asker(from), Peer::Own);
        }
        let other = own.asker(IpAddr::from([172, 17, 0, 3]));
        assert!(waiting.take(other, 1).is_ok() && waiting.take(Peer::Own, WAITING_MAX).is_ok());
    }

    #[test]
    fn programs_that_ask_a_responder_in_a_namespace_of_its_own_are_this_hosts() {
        let own = OwnAddresses::new(IpAddr::from([0, 0, 0, 0]), Ranges::USUAL);
        assert_eq!(own.asker(IpAddr::from([198, 18, 0, 3])), Peer::Own);
        for container in [[198, 18, 0, 4], [172, 17, 0, 2], [0, 0, 0, 1]].map(IpAddr::from) {
            assert_eq!(own.asker(container), Peer::Unauthenticated(container));
        }
    }
}
