//! Messages, several in a datagram, and datagrams, many with one call of the kernel.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use margay_wire::{FRAMED_HEADER_LEN, FRAMED_PART_HEADER_LEN, Framed, FramedParts};
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, MultiHeaders, SockaddrStorage, recvmmsg, sendmmsg, sendto};
use tokio::io::Interest;
use tokio::net::UdpSocket;
use tokio::sync::Notify;

/// Datagrams of one call.
const BATCH_MAX: usize = 32;
/// Longest datagram that is received: what is longer is cut, and refused by its reader.
const DATAGRAM_MAX: usize = 2048;
/// Longest datagram of several messages: longer ones can be cut on their way.
const SENT_MAX: usize = 1300;

thread_local! {
    /// The memory of one call is enough for all on a thread.
    static SPACE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The bytes of a message of a framed connection.
pub(crate) fn bytes_of(number: u64, says: &Framed<'_>) -> Vec<u8> {
    let mut bytes = vec![0; says.len()];
    // It is as long as it says.
    let _ = says.emit(number, &mut bytes);
    bytes
}

/// A datagram that is to be sent: one message, or several of the same two ends.
#[derive(Debug)]
struct Datagram {
    /// Where; none: where the socket is connected to.
    to: Option<SocketAddr>,
    /// As a bundle.
    bytes: Vec<u8>,
    messages: usize,
}

impl Datagram {
    fn begin(to: Option<SocketAddr>, mut bytes: Vec<u8>) -> Self {
        bytes.clear();
        bytes.extend_from_slice(&FramedParts::BUNDLE_HEADER);
        Self { to, bytes, messages: 0 }
    }

    fn has_room(&self, message: &[u8]) -> bool {
        self.bytes.len() + FRAMED_PART_HEADER_LEN + message.len() <= SENT_MAX
    }

    fn add(&mut self, message: &[u8]) {
        // Messages are far shorter than 2^16.
        self.bytes.extend_from_slice(&(message.len() as u16).to_be_bytes());
        self.bytes.extend_from_slice(message);
        self.messages += 1;
    }

    /// One alone goes as it is.
    fn on_the_wire(&self) -> &[u8] {
        let begin = if self.messages == 1 { FRAMED_HEADER_LEN + FRAMED_PART_HEADER_LEN } else { 0 };
        &self.bytes[begin..]
    }
}

/// Messages that wait to be sent at one socket, in few datagrams.
#[derive(Debug, Default)]
pub(crate) struct Outbound {
    datagrams: Vec<Datagram>,
    /// Which of them more may go into, by where it goes.
    open: BTreeMap<Option<SocketAddr>, usize>,
    /// Memory of datagrams that were sent.
    spare: Vec<Vec<u8>>,
}

impl Outbound {
    /// One more message, behind those that wait for the same end. None: to where the socket is connected.
    pub(crate) fn push(&mut self, to: Option<SocketAddr>, message: &[u8]) {
        let open = self.open.get(&to).and_then(|at| self.datagrams.get_mut(*at));
        if let Some(datagram) = open.filter(|datagram| datagram.has_room(message)) {
            return datagram.add(message);
        }
        let mut datagram = Datagram::begin(to, self.spare.pop().unwrap_or_default());
        datagram.add(message);
        self.open.insert(to, self.datagrams.len());
        self.datagrams.push(datagram);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.datagrams.is_empty()
    }

    /// Messages that wait, with where they go.
    #[cfg(test)]
    pub(crate) fn messages(&self) -> impl Iterator<Item = (Option<SocketAddr>, &[u8])> {
        self.datagrams
            .iter()
            .flat_map(|datagram| FramedParts::of(datagram.on_the_wire()).map(|message| (datagram.to, message)))
    }

    /// Sends what waits. What the socket has no room for is lost, as on the way: whoever sent it repeats it.
    ///
    /// # Errors
    ///
    /// Of the socket; of a connected one also that nobody is there.
    pub(crate) fn send(&mut self, socket: &UdpSocket) -> io::Result<()> {
        let sent = send(socket, &self.datagrams);
        self.open.clear();
        self.spare.extend(self.datagrams.drain(..).map(|datagram| datagram.bytes).take(BATCH_MAX));
        self.spare.truncate(BATCH_MAX);
        sent
    }
}

/// What many tasks send at one socket: one of them sends all that has come together.
///
/// Tasks of one thread run one after the other, and the one that sends is woken last: so what all of them say is sent
/// when none has more to say.
#[derive(Debug, Default)]
pub(crate) struct Outlet {
    outbound: Mutex<Outbound>,
    has_come: Notify,
}

impl Outlet {
    fn outbound(&self) -> MutexGuard<'_, Outbound> {
        // Whoever panics leaves whole datagrams.
        self.outbound.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn push(&self, to: Option<SocketAddr>, message: &[u8]) {
        self.outbound().push(to, message);
        self.wake();
    }

    /// The task that sends looks at what there is.
    pub(crate) fn wake(&self) {
        self.has_come.notify_one();
    }

    /// Until something waits to be sent, or [`wake`](Self::wake) was called.
    pub(crate) async fn wait(&self) {
        self.has_come.notified().await;
    }

    /// As [`Outbound::send`].
    pub(crate) fn send(&self, socket: &UdpSocket) -> io::Result<()> {
        self.outbound().send(socket)
    }
}

/// What is waited for: that nobody is there, the kernel says as an error alone.
pub(crate) const ARRIVAL: Interest = Interest::READABLE.add(Interest::ERROR);

/// Waits until something has come to a socket, and takes it: each message, with who sent it where the kernel says so.
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
/// of two. Gives how many there were; `take` has each of their messages.
///
/// # Errors
///
/// As for [`receive`].
pub(crate) fn receive_now(socket: &UdpSocket, mut take: impl FnMut(Option<SocketAddr>, &[u8])) -> io::Result<usize> {
    let mut count = 0;
    // The runtime wants to be asked for each of them.
    for interest in [Interest::READABLE, Interest::ERROR] {
        let received = socket.try_io(interest, || {
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
    // Made anew: the kernel leaves the length of the last sender's address in them.
    let mut headers = MultiHeaders::<SockaddrStorage>::preallocate(BATCH_MAX, None);
    let flags = MsgFlags::MSG_DONTWAIT;
    let received = recvmmsg(socket.as_raw_fd(), &mut headers, slices.iter_mut(), flags, None)?;
    let mut count = 0;
    for message in received {
        count += 1;
        let from = message.address.as_ref().and_then(address_of);
        if let Some(bytes) = message.iovs().next() {
            FramedParts::of(bytes).for_each(|part| take(from, part));
        }
    }
    Ok(count)
}

fn address_of(address: &SockaddrStorage) -> Option<SocketAddr> {
    let v4 = address.as_sockaddr_in().map(|v4| SocketAddr::V4((*v4).into()));
    v4.or_else(|| address.as_sockaddr_in6().map(|v6| SocketAddr::V6((*v6).into())))
}

/// Sends datagrams, as far as there is room.
fn send(socket: &UdpSocket, datagrams: &[Datagram]) -> io::Result<()> {
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
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    if let [datagram] = datagrams {
        let bytes = datagram.on_the_wire();
        let sent = match datagram.to {
            Some(to) => sendto(socket.as_raw_fd(), bytes, &SockaddrStorage::from(to), flags),
            None => nix::sys::socket::send(socket.as_raw_fd(), bytes, flags),
        };
        return sent.map(|_| 1);
    }
    let slices: Vec<[IoSlice<'_>; 1]> =
        datagrams.iter().map(|datagram| [IoSlice::new(datagram.on_the_wire())]).collect();
    let addresses: Vec<Option<SockaddrStorage>> =
        datagrams.iter().map(|datagram| datagram.to.map(Into::into)).collect();
    let mut headers = MultiHeaders::preallocate(datagrams.len(), None);
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
    async fn many_messages_come_whole_and_in_their_order() {
        let a = UdpSocket::bind("127.0.0.1:0").await.expect("a port");
        let b = UdpSocket::bind("127.0.0.1:0").await.expect("a port");
        let from = a.local_addr().expect("bound");
        let to = b.local_addr().expect("bound");
        let all: Vec<Vec<u8>> = (0..40_u8).map(|n| vec![n; 1 + usize::from(n)]).collect();
        let mut outbound = Outbound::default();
        all.iter().for_each(|bytes| outbound.push(Some(to), bytes));
        assert_eq!(outbound.datagrams.len(), 1, "they are short");
        outbound.send(&a).expect("sent");
        assert!(outbound.is_empty());
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
    async fn more_than_a_call_takes_is_sent_with_several() {
        let a = UdpSocket::bind("127.0.0.1:0").await.expect("a port");
        let b = UdpSocket::bind("127.0.0.1:0").await.expect("a port");
        let to = b.local_addr().expect("bound");
        let mut outbound = Outbound::default();
        let all: Vec<Vec<u8>> = (0..70_u8).map(|n| vec![n; SENT_MAX - usize::from(n % 2)]).collect();
        all.iter().for_each(|bytes| outbound.push(Some(to), bytes));
        assert_eq!(outbound.datagrams.len(), all.len(), "none has room for two");
        outbound.send(&a).expect("sent");
        let mut come = Vec::new();
        while come.len() < all.len() {
            timeout(LIMIT, receive(&b, |_, bytes| come.push(bytes.to_vec())))
                .await
                .expect("datagrams")
                .expect("received");
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
        let mut outbound = Outbound::default();
        outbound.push(None, &[1]);
        outbound.send(&socket).expect("taken by the kernel");
        let received = timeout(LIMIT, receive(&socket, |_, _| {})).await.expect("an error");
        let error = received.expect_err("nobody is there");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
}
