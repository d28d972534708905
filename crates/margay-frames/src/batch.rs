//! Datagrams, many with one call of the kernel.

use std::cell::RefCell;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;

use margay_wire::Framed;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, MultiHeaders, SockaddrStorage, recvmmsg, sendmmsg};
use tokio::io::Interest;
use tokio::net::UdpSocket;

/// Datagrams of one call.
const BATCH_MAX: usize = 32;
/// Longest datagram that is received: what is longer is cut, and refused by its reader.
const DATAGRAM_MAX: usize = 2048;

thread_local! {
    static SPACE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The bytes of a datagram of a framed connection.
pub(crate) fn bytes_of(number: u64, says: &Framed<'_>) -> Vec<u8> {
    let mut bytes = vec![0; says.len()];
    // It is as long as it says.
    let _ = says.emit(number, &mut bytes);
    bytes
}

/// A datagram that is to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Datagram {
    /// Where; none: where the socket is connected to.
    pub(crate) to: Option<SocketAddr>,
    pub(crate) bytes: Vec<u8>,
}

/// What is waited for: that nobody is there, the kernel says as an error alone.
pub(crate) const ARRIVAL: Interest = Interest::READABLE.add(Interest::ERROR);

/// Waits until something has come to a socket, and takes it: each datagram, with who sent it where the kernel says so.
///
/// # Errors
///
/// Of the socket; of a connected one also that nobody is there.
pub(crate) async fn receive(socket: &UdpSocket, mut take: impl FnMut(Option<SocketAddr>, &[u8])) -> io::Result<()> {
    loop {
        socket.ready(ARRIVAL).await?;
        if receive_now(socket, &mut take)? > 0 {
            return Ok(());
        }
    }
}

/// Takes what has come to a socket, as far as the runtime knows that something has: the datagrams of one call, or
/// of two. Gives how many there were.
///
/// # Errors
///
/// As for [`receive`].
pub(crate) fn receive_now(socket: &UdpSocket, mut take: impl FnMut(Option<SocketAddr>, &[u8])) -> io::Result<usize> {
    let mut count = 0;
    // The runtime wants to be asked for each of them.
    for interest in [Interest::READABLE, Interest::ERROR] {
        let received = socket.try_io(interest, || {
            // The memory of one call is enough for all on a thread.
            let came = SPACE.with_borrow_mut(|space| receive_into(space, socket, &mut take))?;
            count += came;
            // The queue was empty then: to ask once more would be one call for nothing.
            if came < BATCH_MAX { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
        });
        match received {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
            _ => {}
        }
    }
    Ok(count)
}

fn receive_into(
    space: &mut Vec<u8>,
    socket: &UdpSocket,
    take: &mut impl FnMut(Option<SocketAddr>, &[u8]),
) -> io::Result<usize> {
    space.resize(BATCH_MAX * DATAGRAM_MAX, 0);
    let mut slices: Vec<[IoSliceMut<'_>; 1]> =
        space.chunks_exact_mut(DATAGRAM_MAX).map(|place| [IoSliceMut::new(place)]).collect();
    let mut headers = MultiHeaders::<SockaddrStorage>::preallocate(BATCH_MAX, None);
    let flags = MsgFlags::MSG_DONTWAIT;
    let received = recvmmsg(socket.as_raw_fd(), &mut headers, slices.iter_mut(), flags, None)?;
    let mut count = 0;
    for message in received {
        count += 1;
        let from = message.address.as_ref().and_then(address_of);
        if let Some(bytes) = message.iovs().next() {
            take(from, bytes);
        }
    }
    Ok(count)
}

fn address_of(address: &SockaddrStorage) -> Option<SocketAddr> {
    let v4 = address.as_sockaddr_in().map(|v4| SocketAddr::V4((*v4).into()));
    v4.or_else(|| address.as_sockaddr_in6().map(|v6| SocketAddr::V6((*v6).into())))
}

/// Sends datagrams. What the socket has no room for is lost, as on the way: whoever sent it repeats it.
///
/// # Errors
///
/// Of the socket; of a connected one also that nobody is there.
pub(crate) fn send(socket: &UdpSocket, datagrams: &[Datagram]) -> io::Result<()> {
    for batch in datagrams.chunks(BATCH_MAX) {
        let mut rest = batch;
        while !rest.is_empty() {
            match send_batch(socket, rest) {
                // It goes on behind the last one that was taken.
                Ok(sent) => rest = &rest[sent.clamp(1, rest.len())..],
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN | Errno::ENOBUFS) => return Ok(()),
                // Of one address: nothing is known of the others.
                Err(_) if rest[0].to.is_some() => rest = &rest[1..],
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

fn send_batch(socket: &UdpSocket, datagrams: &[Datagram]) -> nix::Result<usize> {
    let slices: Vec<[IoSlice<'_>; 1]> = datagrams.iter().map(|datagram| [IoSlice::new(&datagram.bytes)]).collect();
    let addresses: Vec<Option<SockaddrStorage>> =
        datagrams.iter().map(|datagram| datagram.to.map(Into::into)).collect();
    let mut headers = MultiHeaders::preallocate(datagrams.len(), None);
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    let sent = sendmmsg(socket.as_raw_fd(), &mut headers, slices.iter(), addresses, [], flags)?;
    Ok(sent.count())
}

#[cfg(test)]
mod test {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn many_datagrams_come_whole_and_in_their_order() {
        let a = UdpSocket::bind("127.0.0.1:0").await.expect("a port");
        let b = UdpSocket::bind("127.0.0.1:0").await.expect("a port");
        let from = a.local_addr().expect("bound");
        let to = b.local_addr().expect("bound");
        let all: Vec<Vec<u8>> = (0..40_u8).map(|n| vec![n; 1 + usize::from(n)]).collect();
        let datagrams: Vec<_> = all.iter().map(|bytes| Datagram { to: Some(to), bytes: bytes.clone() }).collect();
        send(&a, &datagrams).expect("sent");
        let mut come = Vec::new();
        while come.len() < all.len() {
            let take = |sender: Option<SocketAddr>, bytes: &[u8]| {
                assert_eq!(sender, Some(from));
                come.push(bytes.to_vec());
            };
            timeout(LIMIT, receive(&b, take)).await.expect("datagrams").expect("received");
        }
        assert_eq!(come, all);
    }

    #[tokio::test]
    async fn a_connected_socket_hears_that_nobody_is_there() {
        let closed = UdpSocket::bind("127.0.0.1:0").await.expect("a port");
        let address = closed.local_addr().expect("bound");
        let socket = UdpSocket::bind("127.0.0.1:0").await.expect("a port");
        socket.connect(address).await.expect("connected");
        drop(closed);
        send(&socket, &[Datagram { to: None, bytes: vec![1] }]).expect("taken by the kernel");
        let received = timeout(LIMIT, receive(&socket, |_, _| {})).await.expect("an error");
        let error = received.expect_err("nobody is there");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
}
