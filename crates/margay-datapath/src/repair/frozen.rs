//! A socket whose connection stands still.

use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};

use libc::{IPPROTO_TCP, SOL_SOCKET};
use margay_core::delta::SocketFacts;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};

use super::descriptor::{Descriptor, Leaving, Queue};
use super::error::{Refusal, RepairError};
use super::record::{Family, State, TcpRecord, Window, WindowScales};
use super::{QUEUE_MAX, md5, options};

/// From `include/net/tcp_states.h`.
const ESTABLISHED: u8 = 1;
const CLOSE_WAIT: u8 = 8;
/// Of `tcpi_options` (`include/uapi/linux/tcp.h`).
const HAS_TIMESTAMPS: u8 = 1;
const HAS_SELECTIVE_ACKS: u8 = 2;
const HAS_SCALES: u8 = 4;
const HAS_ECN: u8 = 8;
/// While data arrives, its number and how much of it waits are not read at one moment.
const READINGS_MAX: usize = 1000;
/// The kernel keeps a segment that is acknowledged in part until all of it is, at most 64 KiB.
const ACKNOWLEDGED_MAX: usize = 128 << 10;

/// A connected TCP socket in repair mode.
///
/// Dropping it thaws it, and closes this descriptor of it: a panic or an early return never ends a connection of which
/// the program has a descriptor. Where this one is the last, closing it ends the connection as any close does: give it
/// back by [`thaw`](Self::thaw).
#[derive(Debug)]
pub struct Frozen {
    /// `None` once it was given away.
    socket: Option<TcpStream>,
    family: Family,
    reuses_address: bool,
}

/// A connection that can be carried, by `TCP_INFO`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Connection {
    state: State,
    has: u8,
    scales: WindowScales,
}

/// What the kernel tells of the connection, and must not change while it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Numbers {
    connection: Connection,
    reading_is_shut: bool,
    receive_sequence: u32,
    send_sequence: u32,
    unread_len: usize,
    unacknowledged_len: usize,
    unsent_len: usize,
}

impl Frozen {
    /// Looks whether the socket can be carried, and switches the repair mode on. On error it gives the socket back as
    /// it was, and the connection goes on.
    ///
    /// Whether packets are signed by MD5 keys the kernel tells only in the calling thread's network namespace.
    /// Connections that TCP Fast Open has not finished are in no state that is carried.
    pub fn freeze(socket: OwnedFd) -> Result<Self, (OwnedFd, RepairError)> {
        let stream = TcpStream::from(socket);
        let (family, reuses_address) = match examine(&stream) {
            Ok(found) => found,
            Err(error) => return Err((stream.into(), error)),
        };
        match Descriptor(stream.as_fd()).repair() {
            Ok(()) => Ok(Self { socket: Some(stream), family, reuses_address }),
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                Err((stream.into(), RepairError::NotPermitted))
            }
            Err(error) => Err((stream.into(), RepairError::reading("setsockopt(TCP_REPAIR)")(error))),
        }
    }

    /// Reads the connection. The socket stays as it is, so that it can be read again.
    pub fn dump(&self) -> Result<TcpRecord, RepairError> {
        let socket = self.descriptor();
        let numbers = self.numbers()?;
        let receive_queue = read_queue(socket, Queue::Receive, numbers.unread_len)?;
        let send_queue = read_queue(socket, Queue::Send, numbers.unacknowledged_len)?;
        let tcp = |name| socket.get(IPPROTO_TCP, name).map_err(RepairError::reading("getsockopt(IPPROTO_TCP)"));
        let has = |option: u8| numbers.connection.has & option != 0;
        let record = TcpRecord {
            family: self.family,
            state: numbers.connection.state,
            receive_sequence: numbers.receive_sequence,
            send_sequence: numbers.send_sequence,
            // At most the queue's length, which is bounded.
            unsent_len: numbers.unsent_len as u32,
            // In repair mode, what the peer has said; otherwise what the path lets pass.
            mss: u16::try_from(tcp(libc::TCP_MAXSEG)?).unwrap_or(u16::MAX),
            scales: has(HAS_SCALES).then_some(numbers.connection.scales),
            // After everything that was sent: the clock must not go back at the other host.
            timestamp: if has(HAS_TIMESTAMPS) { Some(tcp(libc::TCP_TIMESTAMP)?) } else { None },
            selective_acks: has(HAS_SELECTIVE_ACKS),
            ecn: has(HAS_ECN),
            reading_is_shut: numbers.reading_is_shut,
            window: read_window(socket)?,
            options: options::read(socket, self.family, self.reuses_address)?,
            receive_queue,
            send_queue,
        };
        if self.numbers()? == numbers { Ok(record) } else { Err(RepairError::Moved) }
    }

    /// What of the connection counts where another one is to go on in its place: see [`SocketFacts`]. Both ends must be
    /// open. Packets may pass meanwhile; the program must neither read nor write.
    pub fn facts(&self) -> Result<SocketFacts, RepairError> {
        let socket = self.descriptor();
        let sequence = |queue| socket.sequence(queue).map_err(RepairError::reading("getsockopt(TCP_QUEUE_SEQ)"));
        for _ in 0..READINGS_MAX {
            let received = sequence(Queue::Receive)?;
            let unread_len = socket.count(libc::FIONREAD).map_err(RepairError::reading("ioctl(SIOCINQ)"))?;
            let written = sequence(Queue::Send)?;
            let again = sequence(Queue::Receive)?;
            let connection = Connection::of(socket)?;
            // A FIN has a number, too.
            if connection.state != State::Established {
                return Err(RepairError::Refused(Refusal::State(CLOSE_WAIT)));
            }
            if received != again {
                continue;
            }
            let has = |option: u8| connection.has & option != 0;
            let scale = |scale: u8| if has(HAS_SCALES) { scale } else { 0 };
            let timestamp = socket.get(IPPROTO_TCP, libc::TCP_TIMESTAMP);
            let timestamp = timestamp.map_err(RepairError::reading("getsockopt(TCP_TIMESTAMP)"))?;
            return Ok(SocketFacts {
                unread: received.wrapping_sub(unread_len as u32),
                written,
                timestamp: has(HAS_TIMESTAMPS).then_some(timestamp),
                peer_scale: scale(connection.scales.send),
                own_scale: scale(connection.scales.receive),
                has_sack: has(HAS_SELECTIVE_ACKS),
            });
        }
        Err(RepairError::Moved)
    }

    /// Whether both ends of the connection mark congestion.
    pub fn has_ecn(&self) -> Result<bool, RepairError> {
        Connection::of(self.descriptor()).map(|connection| connection.has & HAS_ECN != 0)
    }

    /// Leaves the repair mode without a probe: the connection goes on as if nothing had been.
    pub fn thaw(mut self) -> OwnedFd {
        self.leave_repair();
        // Only methods that end `self` take it.
        self.socket.take().expect("a frozen socket has its descriptor").into()
    }

    /// Ends the connection on this host, and sends nothing: the peer's packets are for the other host now. Programs
    /// that have a descriptor of the socket see `ECONNABORTED`. On error the connection goes on here.
    pub fn close_silently(mut self) -> Result<(), RepairError> {
        self.descriptor().end_silently().map_err(RepairError::reading("connect(AF_UNSPEC)"))?;
        self.leave_repair();
        self.socket = None;
        Ok(())
    }

    fn descriptor(&self) -> Descriptor<'_> {
        // Only methods that end `self` take it.
        Descriptor(self.socket.as_ref().expect("a frozen socket has its descriptor").as_fd())
    }

    fn leave_repair(&self) {
        let result = self.descriptor().leave_repair(Leaving::Silent, self.reuses_address);
        if let Err(error) = result {
            tracing::error!(%error, "setsockopt(TCP_REPAIR): a socket stays frozen; its program must open another one");
        }
    }

    fn numbers(&self) -> Result<Numbers, RepairError> {
        let socket = self.descriptor();
        let connection = Connection::of(socket)?;
        let reading = RepairError::reading;
        let receive_sequence = socket.sequence(Queue::Receive).map_err(reading("getsockopt(TCP_QUEUE_SEQ)"))?;
        let send_sequence = socket.sequence(Queue::Send).map_err(reading("getsockopt(TCP_QUEUE_SEQ)"))?;
        let count = |request, call| socket.count(request).map_err(reading(call));
        let events = socket.poll(libc::POLLRDHUP, 0).map_err(reading("poll"))?;
        Ok(Numbers {
            connection,
            reading_is_shut: connection.state == State::Established && events & libc::POLLRDHUP != 0,
            receive_sequence,
            send_sequence,
            unread_len: count(libc::FIONREAD, "ioctl(SIOCINQ)")?,
            unacknowledged_len: count(libc::TIOCOUTQ, "ioctl(SIOCOUTQ)")?,
            unsent_len: count(libc::SIOCOUTQNSD, "ioctl(SIOCOUTQNSD)")?,
        })
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        if self.socket.is_some() {
            self.leave_repair();
        }
    }
}

impl Connection {
    fn of(socket: Descriptor<'_>) -> Result<Self, RepairError> {
        // State, four fields that do not matter, options, and both scales in one byte, as its bits are laid out.
        let mut info = [0; 8];
        let len = socket.get_bytes(IPPROTO_TCP, libc::TCP_INFO, &mut info);
        len.map_err(RepairError::reading("getsockopt(TCP_INFO)"))?;
        let state = match info[0] {
            ESTABLISHED => State::Established,
            CLOSE_WAIT => State::CloseWait,
            other => return Err(RepairError::Refused(Refusal::State(other))),
        };
        let halves = [info[6] & 0xf, info[6] >> 4];
        let [send, receive] = if cfg!(target_endian = "little") { halves } else { [halves[1], halves[0]] };
        Ok(Self { state, has: info[5], scales: WindowScales { send, receive } })
    }
}

/// What the socket was made with, and its `SO_REUSEADDR`, unless it cannot be carried. Changes nothing.
fn examine(stream: &TcpStream) -> Result<(Family, bool), RepairError> {
    let socket = Descriptor(stream.as_fd());
    let refuse = |refusal| Err(RepairError::Refused(refusal));
    let general = |name| socket.get(SOL_SOCKET, name).map_err(RepairError::reading("getsockopt(SOL_SOCKET)"));
    match general(libc::SO_PROTOCOL)?.cast_signed() {
        libc::IPPROTO_TCP => {}
        libc::IPPROTO_MPTCP => return refuse(Refusal::Mptcp),
        _ => return refuse(Refusal::NotTcp),
    }
    let family = match general(libc::SO_DOMAIN)?.cast_signed() {
        libc::AF_INET => Family::V4,
        libc::AF_INET6 => Family::V6,
        _ => return refuse(Refusal::NotTcp),
    };
    Connection::of(socket)?;
    let mut upper_protocol = [0; 16];
    if socket.get_bytes(IPPROTO_TCP, libc::TCP_ULP, &mut upper_protocol).is_ok_and(|len| len > 0) {
        return refuse(Refusal::UpperProtocol);
    }
    let events = socket.poll(libc::POLLPRI, 0).map_err(RepairError::reading("poll"))?;
    // The error itself is the program's: whoever reads it takes it away.
    if events & libc::POLLERR != 0 {
        return refuse(Refusal::PendingError);
    }
    if events & libc::POLLPRI != 0 || is_urgent_on_its_way(socket) {
        return refuse(Refusal::Urgent);
    }
    // It cannot be set on TCP sockets before Linux 6.9.
    if general(libc::SO_PEEK_OFF).is_ok_and(|offset| offset.cast_signed() >= 0) {
        return refuse(Refusal::PeekOffset);
    }
    let local = stream.local_addr().map_err(RepairError::reading("getsockname"))?;
    let remote = stream.peer_addr().map_err(RepairError::reading("getpeername"))?;
    if md5::is_signed(socket, local, remote) {
        return refuse(Refusal::Signed);
    }
    Ok((family, general(libc::SO_REUSEADDR)? != 0))
}

/// The peer has announced urgent data. EINVAL says that there is none.
fn is_urgent_on_its_way(socket: Descriptor<'_>) -> bool {
    let flags = MsgFlags::MSG_OOB | MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    matches!(recv(socket.raw(), &mut [0], flags), Ok(1) | Err(Errno::EAGAIN))
}

/// The `len` bytes that a queue ends with.
fn read_queue(socket: Descriptor<'_>, queue: Queue, len: usize) -> Result<Vec<u8>, RepairError> {
    if len > QUEUE_MAX {
        return Err(RepairError::TooLong { queue: queue.name(), len });
    }
    // The kernel gives no error for an empty queue, but "not now" or the peer's FIN.
    if len == 0 {
        return Ok(Vec::new());
    }
    let before = if queue == Queue::Send { ACKNOWLEDGED_MAX } else { 0 };
    let mut bytes = vec![0; len + before];
    let read = socket.peek(queue, &mut bytes).map_err(RepairError::reading("recv(MSG_PEEK)"))?;
    bytes.truncate(read);
    let acknowledged = read.checked_sub(len).ok_or(RepairError::Moved)?;
    bytes.drain(..acknowledged);
    Ok(bytes)
}

fn read_window(socket: Descriptor<'_>) -> Result<Window, RepairError> {
    let mut bytes = [0; 20];
    let len = socket.get_bytes(IPPROTO_TCP, libc::TCP_REPAIR_WINDOW, &mut bytes);
    len.map_err(RepairError::reading("getsockopt(TCP_REPAIR_WINDOW)"))?;
    let word = |at: usize| u32::from_ne_bytes(std::array::from_fn(|byte| bytes[at + byte]));
    Ok(Window {
        update_sequence: word(0),
        send_len: word(4),
        send_max_len: word(8),
        receive_len: word(12),
        receive_from: word(16),
    })
}
