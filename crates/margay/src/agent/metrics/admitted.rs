//! Who may read metrics at the same time: anybody that reaches the port, but nobody keeps it from others.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::serve::Listener;
use margay_control::permits::Backlog;
use margay_core::fair_table::Peer;
use margay_datapath::sock_diag;
use nix::unistd::Uid;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};

use crate::agent::programs::rights;
use crate::listener::Protocol;

/// Connections of other hosts and local users at one time: a user has a quarter, other hosts half, an address a
/// sixteenth.
const CONNECTIONS_MAX: usize = 256;
/// The same of root.
const OWN_CONNECTIONS_MAX: usize = 64;
/// How long a connection may last, idle or not. A scrape takes milliseconds; whoever keeps connections open between
/// scrapes connects again.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);

/// A listener that closes connections for which there is no room.
pub struct Admitted {
    listener: TcpListener,
    open: Backlog,
}

impl Admitted {
    /// All that come to a listener.
    pub fn new(listener: TcpListener) -> Self {
        Self { listener, open: Backlog::with_own(CONNECTIONS_MAX, OWN_CONNECTIONS_MAX) }
    }
}

/// Whose share a connection takes: a user's, if its other end is a socket of this host.
fn peer_of(stream: &TcpStream, from: SocketAddr) -> Peer {
    let ip = from.ip().to_canonical();
    let from = SocketAddr::new(ip, from.port());
    let described = stream.local_addr().and_then(|to| sock_diag::socket_of(Protocol::Tcp.number(), from, to));
    // A listener at any address is found for the port of another host, too.
    let is_end = |local: SocketAddr| local.ip().to_canonical() == ip && local.port() == from.port();
    match described {
        Ok(socket) => {
            let user = socket.filter(|socket| is_end(socket.local)).and_then(|socket| socket.user());
            user.map_or(Peer::Unauthenticated(ip), |user| rights::peer_of(Uid::from_raw(user)))
        }
        Err(error) => {
            tracing::debug!(%from, %error, "the kernel does not say whose connection for metrics it is");
            Peer::Unauthenticated(ip)
        }
    }
}

impl Listener for Admitted {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        loop {
            // It waits after an error of the system.
            let (stream, from) = Listener::accept(&mut self.listener).await;
            match self.open.admit(peer_of(&stream, from)) {
                Ok(mut place) => {
                    let end = Box::pin(async move {
                        let _ = tokio::time::timeout(CONNECTION_TIMEOUT, place.displaced()).await;
                    });
                    return (Connection { stream, end: Some(end) }, from);
                }
                Err(full) => tracing::debug!(%from, %full, "a connection for metrics is closed"),
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection, and its place until it is closed.
pub struct Connection {
    stream: TcpStream,
    /// Holds the place, and is ready when the connection has to end; `None` from then on.
    end: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Connection {
    /// The stream, until the connection has to end.
    fn poll_stream(&mut self, context: &mut Context<'_>) -> io::Result<Pin<&mut TcpStream>> {
        if self.end.as_mut().is_none_or(|end| end.as_mut().poll(context).is_ready()) {
            self.end = None;
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(Pin::new(&mut self.stream))
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.poll_stream(context)?.poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_stream(context)?.poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_stream(context)?.poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod test {
    use std::time::Instant;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    async fn admitted(own: usize) -> (Admitted, SocketAddr) {
        let listener = TcpListener::bind("0.0.0.0:0").await.expect("a port");
        let to = listener.local_addr().expect("bound");
        (Admitted { open: Backlog::with_own(1, own), ..Admitted::new(listener) }, to)
    }

    #[tokio::test]
    async fn connections_beyond_their_share_are_closed() {
        let (mut admitted, to) = admitted(1).await;
        let connect = async || TcpStream::connect(to).await.expect("it listens");
        let (mut first, mut second) = (connect().await, connect().await);
        let (mut served, _) = admitted.accept().await;
        served.write_all(b"a").await.expect("it is open");
        assert_eq!(first.read_u8().await.expect("served"), b'a');
        let mut rest = [0];
        tokio::select! {
            _ = admitted.accept() => panic!("there is no room"),
            end = second.read(&mut rest) => assert_eq!(end.expect("closed in order"), 0),
        }
        drop((first, served));
        let _third = connect().await;
        admitted.accept().await;
    }

    #[tokio::test]
    async fn whose_socket_it_is_decides() {
        let (mut admitted, to) = admitted(1).await;
        let client = TcpStream::connect(to).await.expect("it listens");
        let (served, from) = admitted.accept().await;
        assert_eq!(peer_of(&served.stream, from), Peer::Own, "of the user that runs this");
        drop(client);
        let elsewhere = SocketAddr::from(([192, 0, 2, 1], to.port()));
        assert_eq!(peer_of(&served.stream, elsewhere), Peer::Unauthenticated(elsewhere.ip()));
    }

    #[tokio::test]
    async fn a_silent_connection_ends_when_its_time_is_over() {
        let (mut admitted, to) = admitted(1).await;
        let _client = TcpStream::connect(to).await.expect("it listens");
        let (mut served, _) = admitted.accept().await;
        tokio::time::pause();
        let start = Instant::now();
        let error = served.read_u8().await.expect_err("its time is over");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(start.elapsed() < CONNECTION_TIMEOUT, "time was turned on");
        let _next = TcpStream::connect(to).await.expect("it listens");
        admitted.accept().await;
    }
}
