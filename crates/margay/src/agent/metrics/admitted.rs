//! Who may read metrics at the same time: anybody that reaches the port, but no address keeps it from others.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::serve::Listener;
use margay_control::permits::{Permit, Permits};
use margay_core::fair_table::Peer;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};

/// Connections of other hosts at one time, of which one address has a sixteenth.
const CONNECTIONS_MAX: usize = 256;
/// The same of this host.
const OWN_CONNECTIONS_MAX: usize = 64;

/// A listener that closes connections for which there is no room.
pub struct Admitted {
    listener: TcpListener,
    open: Permits,
}

impl Admitted {
    /// All that come to a listener.
    pub fn new(listener: TcpListener) -> Self {
        Self { listener, open: Permits::new(CONNECTIONS_MAX, OWN_CONNECTIONS_MAX) }
    }
}

impl Listener for Admitted {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        loop {
            // It waits after an error of the system.
            let (stream, from) = Listener::accept(&mut self.listener).await;
            let ip = from.ip().to_canonical();
            let peer = if ip.is_loopback() { Peer::Own } else { Peer::Unauthenticated(ip) };
            match self.open.take(peer, 1) {
                Ok(permit) => return (Connection { stream, _permit: permit }, from),
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
    _permit: Permit,
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod test {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn connections_beyond_their_share_are_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let to = listener.local_addr().expect("bound");
        let mut admitted = Admitted { open: Permits::new(0, 1), ..Admitted::new(listener) };
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
}
