//! TCP and UDP echo server.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};

use crate::host::write_line;

/// As many connections as may wait usually.
pub const BACKLOG: i32 = 4096;
const DATAGRAM_MAX: usize = 65_536;
/// Read in pieces of this size; small, since ten thousand connections have one each.
const PIECE: usize = 2048;

/// How to serve.
pub struct Plan {
    /// What each new connection is sent first.
    pub greeting: Option<String>,
    /// How many connections may wait.
    pub backlog: i32,
    /// Wait after the first one.
    pub after: Duration,
    /// Wait before each further one.
    pub every: Duration,
}

/// Serves until it is ended. Says "ready" when it listens.
pub async fn serve(listen: &[SocketAddr], plan: &Plan) -> Result<()> {
    let greeting: Option<Arc<str>> = plan.greeting.as_deref().map(Into::into);
    for address in listen {
        let listener = listener(*address, plan.backlog).with_context(|| format!("cannot listen on {address}"))?;
        tokio::spawn(take(listener, greeting.clone(), (plan.after, plan.every)));
        let socket = datagram_socket(*address).with_context(|| format!("cannot bind UDP {address}"))?;
        tokio::spawn(echo_datagrams(socket));
    }
    write_line("ready")?;
    std::future::pending().await
}

async fn take(listener: TcpListener, greeting: Option<Arc<str>>, (after, every): (Duration, Duration)) {
    let mut pause = after;
    loop {
        // A connection that ended before it was taken is not an error of the server.
        if let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(echo(stream, greeting.clone()));
        }
        let wait = std::mem::replace(&mut pause, every);
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
    }
}

/// Only its own family, so that a test of "IPv6 only" tests that.
fn listener(address: SocketAddr, backlog: i32) -> Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(backlog)?;
    Ok(TcpListener::from_std(socket.into())?)
}

fn datagram_socket(address: SocketAddr) -> Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(UdpSocket::from_std(socket.into())?)
}

async fn echo(mut stream: TcpStream, greeting: Option<Arc<str>>) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    if let Some(greeting) = greeting {
        stream.write_all(greeting.as_bytes()).await?;
    }
    loop {
        stream.readable().await?;
        let mut piece = [0; PIECE];
        match stream.try_read(&mut piece) {
            Ok(0) => return Ok(()),
            Ok(length) => stream.write_all(&piece[..length]).await?,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

async fn echo_datagrams(socket: UdpSocket) -> std::io::Result<()> {
    let mut datagram = vec![0; DATAGRAM_MAX];
    loop {
        // An ICMP error about an earlier answer comes back here; the next datagram has nothing to do with it.
        if let Ok((length, from)) = socket.recv_from(&mut datagram).await {
            let _ = socket.send_to(&datagram[..length], from).await;
        }
    }
}

/// Reads exactly what was sent, and says whether it is the same.
pub async fn exchange(stream: &mut TcpStream, bytes: &[u8]) -> std::io::Result<bool> {
    let mut back = vec![0; bytes.len()];
    let (mut reader, mut writer) = stream.split();
    let (sent, read) = tokio::join!(writer.write_all(bytes), reader.read_exact(&mut back));
    sent?;
    read?;
    Ok(back == bytes)
}
