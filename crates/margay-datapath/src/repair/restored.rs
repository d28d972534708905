//! A socket made of a record.

use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use libc::{IPPROTO_IPV6, IPPROTO_TCP};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, Shutdown, SockFlag, SockProtocol, SockType, SockaddrStorage, bind, connect, shutdown, socket,
};

use super::descriptor::{Descriptor, Leaving, Queue};
use super::error::RepairError;
use super::record::{Family, SocketOptions, State, TcpRecord, Window};
use super::{fin, options};

/// Kinds of TCP options (RFC 9293, RFC 7323, RFC 2018).
const OPTION_MSS: u32 = 2;
const OPTION_WINDOW_SCALE: u32 = 3;
const OPTION_SELECTIVE_ACKS: u32 = 4;
const OPTION_TIMESTAMPS: u32 = 8;
/// The kernel's bounds of `TCP_MAXSEG`.
const MAXSEG_MIN: u16 = 88;
const MAXSEG_MAX: u16 = 32_767;
/// How long a FIN may take from the injector to the socket, both on this host.
const FIN_PATIENCE_MS: u16 = 1000;
/// Of this thread's network namespace: 0 is off.
const TIMESTAMPS_SWITCH: &str = "/proc/sys/net/ipv4/tcp_timestamps";

/// Something of a connection that its new host does otherwise. The connection works.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// Programs of this host may not choose the congestion control of that name, and its default is used.
    CongestionControl(String),
    /// Explicit congestion notification, which the ends had agreed on, is not answered any more: the kernel cannot set
    /// up a socket that does.
    NoEcn,
}

impl std::fmt::Display for Note {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::CongestionControl(name) => {
                let list = "net.ipv4.tcp_allowed_congestion_control";
                write!(f, "{list} of this host does not name {name}: the connection has the host's default")
            }
            Self::NoEcn => f.write_str("the connection goes on without ECN, which the kernel cannot carry"),
        }
    }
}

/// A socket that was set up, in repair mode. Dropping it is [`discard`](Self::discard).
///
/// Its timers run: a second after it was set up it may send again what the old host had sent, and ask for the peer's
/// window. Both are what the connection would send anyhow.
#[derive(Debug)]
pub struct Restored {
    /// `None` once it was given away.
    socket: Option<OwnedFd>,
    options: SocketOptions,
    notes: Vec<Note>,
}

/// Makes a socket of a record: bound to `local`, connected to `remote`, and still frozen. A program may listen at the
/// same address. Nothing is sent.
///
/// `inject` is called once for a connection in CLOSE-WAIT, and never for others: it gets the IP packet that is the
/// peer's FIN, with complete checksums, and must let it come in on this host as what the network brings does (a TUN, or
/// a raw socket). The kernel has no other way to a socket whose peer has closed.
pub fn restore(
    record: &TcpRecord,
    local: SocketAddr,
    remote: SocketAddr,
    inject: &mut dyn FnMut(&[u8]) -> io::Result<()>,
) -> Result<Restored, RepairError> {
    if record.timestamp.is_some() && fs::read_to_string(TIMESTAMPS_SWITCH).is_ok_and(|text| text.trim() == "0") {
        return Err(RepairError::NoTimestamps);
    }
    let family = if record.family == Family::V4 { "IPv4" } else { "IPv6" };
    let ends = [local, remote].map(|address| address_of(record.family, address));
    let ([Some(bound), Some(connected)], true) = (ends, is_one_protocol(local, remote)) else {
        return Err(RepairError::Family { local, remote, family });
    };
    let domain = if record.family == Family::V4 { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let socket = socket(domain, SockType::Stream, SockFlag::SOCK_CLOEXEC, SockProtocol::Tcp)
        .map_err(|error| RepairError::making("socket")(error.into()))?;
    // From here on it is closed silently on any way out.
    let mut restored = Restored { socket: Some(socket), options: record.options.clone(), notes: Vec::new() };
    restored.prepare(record, bound)?;
    restored.connect(record, bound, connected)?;
    restored.fill(record)?;
    options::set(restored.descriptor(), record.family, &record.options)?;
    if record.state == State::CloseWait {
        restored.take_fin(record, bound, connected, inject)?;
    }
    if record.reading_is_shut {
        let result = shutdown(restored.descriptor().raw(), Shutdown::Read);
        result.map_err(|error| RepairError::making("shutdown(SHUT_RD)")(error.into()))?;
    }
    Ok(restored)
}

impl Restored {
    /// What goes on otherwise than it was.
    pub fn notes(&self) -> &[Note] {
        &self.notes
    }

    /// Leaves the repair mode, and gives the socket for the program. The peer hears of this end at once: by a window
    /// probe, which it answers, and by what was not sent yet. Packets must have a way by now. On error the socket is
    /// discarded.
    pub fn go_on(mut self) -> Result<OwnedFd, RepairError> {
        let descriptor = self.descriptor();
        let left = descriptor.leave_repair(Leaving::Probe, self.options.reuses_address);
        left.map_err(RepairError::making("setsockopt(TCP_REPAIR)"))?;
        // To take the cork out sends what the windows let pass; nothing else does for a connection in CLOSE-WAIT. A few
        // bytes of a corked connection leave early.
        let steps = [
            (libc::TCP_NODELAY, self.options.no_delay),
            (libc::TCP_CORK, false),
            (libc::TCP_CORK, self.options.corked),
        ];
        for (name, value) in steps {
            if let Err(error) = descriptor.set(IPPROTO_TCP, name, value.into()) {
                tracing::warn!(%error, "setsockopt(TCP_NODELAY, TCP_CORK) of a connection that was carried");
            }
        }
        // Only methods that end `self` take it.
        Ok(self.socket.take().expect("a restored socket has its descriptor"))
    }

    /// Closes the socket silently: the peer hears nothing, and the connection may go on elsewhere.
    pub fn discard(self) {
        drop(self);
    }

    fn descriptor(&self) -> Descriptor<'_> {
        // Only methods that end `self` take it.
        Descriptor(self.socket.as_ref().expect("a restored socket has its descriptor").as_fd())
    }

    /// What must be before the socket is connected.
    fn prepare(&mut self, record: &TcpRecord, bound: SocketAddr) -> Result<(), RepairError> {
        let socket = self.descriptor();
        // From now on the socket may be bound beside any other.
        socket.repair().map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => RepairError::NotPermitted,
            _ => RepairError::making("setsockopt(TCP_REPAIR)")(error),
        })?;
        if record.family == Family::V6 && bound.ip().to_canonical().is_ipv4() {
            let set = socket.set(IPPROTO_IPV6, libc::IPV6_V6ONLY, 0);
            set.map_err(RepairError::making("setsockopt(IPV6_V6ONLY)"))?;
        }
        let room = [record.receive_queue.len(), record.send_queue.len()];
        let set = options::set_buffers(socket, &record.options, room);
        set.map_err(RepairError::making("setsockopt(SO_RCVBUFFORCE, SO_SNDBUFFORCE, SO_BUF_LOCK)"))?;
        // Without it the kernel cuts segments of 536 bytes, whatever TCP_REPAIR_OPTIONS say, until the peer's window is
        // greater than ever before.
        let mss = record.mss.clamp(MAXSEG_MIN, MAXSEG_MAX);
        socket.set(IPPROTO_TCP, libc::TCP_MAXSEG, mss.into()).map_err(RepairError::making("setsockopt(TCP_MAXSEG)"))?;
        let name = &record.options.congestion;
        // Another host's word: what no program here may choose, it may not, either.
        if options::is_allowed_congestion(name) {
            let set = socket.set_bytes(IPPROTO_TCP, libc::TCP_CONGESTION, name.as_bytes());
            set.map_err(RepairError::making("setsockopt(TCP_CONGESTION)"))?;
        } else {
            self.notes.push(Note::CongestionControl(name.clone()));
        }
        self.notes.extend(record.ecn.then_some(Note::NoEcn));
        Ok(())
    }

    fn connect(&self, record: &TcpRecord, bound: SocketAddr, connected: SocketAddr) -> Result<(), RepairError> {
        let socket = self.descriptor();
        bind(socket.raw(), &SockaddrStorage::from(bound)).map_err(|error| RepairError::making("bind")(error.into()))?;
        let first_unread = record.receive_sequence_of_data().wrapping_sub(record.receive_queue.len() as u32);
        for (queue, sequence) in [(Queue::Receive, first_unread), (Queue::Send, record.first_unacknowledged())] {
            let set = socket.set_sequence(queue, sequence);
            set.map_err(RepairError::making("setsockopt(TCP_QUEUE_SEQ)"))?;
        }
        match connect(socket.raw(), &SockaddrStorage::from(connected)) {
            Ok(()) => {}
            Err(Errno::EADDRNOTAVAIL) => return Err(RepairError::Exists { local: bound, remote: connected }),
            Err(error) => return Err(RepairError::making("connect")(error.into())),
        }
        let set = socket.set_bytes(IPPROTO_TCP, libc::TCP_REPAIR_OPTIONS, &connection_options(record));
        set.map_err(RepairError::making("setsockopt(TCP_REPAIR_OPTIONS)"))?;
        match record.timestamp {
            Some(clock) => socket
                .set(IPPROTO_TCP, libc::TCP_TIMESTAMP, clock)
                .map_err(RepairError::making("setsockopt(TCP_TIMESTAMP)")),
            None => Ok(()),
        }
    }

    /// Fills both queues, and sets the windows.
    fn fill(&self, record: &TcpRecord) -> Result<(), RepairError> {
        let socket = self.descriptor();
        let filled = socket.fill(Queue::Receive, &record.receive_queue);
        filled.map_err(RepairError::making("send to the receive queue"))?;
        let sent_len = record.send_queue.len().saturating_sub(record.unsent_len as usize);
        let (sent, unsent) = record.send_queue.split_at(sent_len);
        socket.fill(Queue::Send, sent).map_err(RepairError::making("send to the send queue"))?;
        let window = record.window_of_data();
        if !unsent.is_empty() {
            // In repair mode it would count as sent. The closed window keeps it here.
            set_window(socket, Window { send_len: 0, ..window })?;
            let written = socket.leave_repair(Leaving::Silent, false).and_then(|()| socket.write(unsent));
            written.and_then(|()| socket.repair()).map_err(RepairError::making("send of what was not sent yet"))?;
        }
        set_window(socket, window)?;
        let set = options::set_buffers(socket, &record.options, [0; 2]);
        set.map_err(RepairError::making("setsockopt(SO_RCVBUFFORCE, SO_SNDBUFFORCE, SO_BUF_LOCK)"))
    }

    fn take_fin(
        &self,
        record: &TcpRecord,
        bound: SocketAddr,
        connected: SocketAddr,
        inject: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<(), RepairError> {
        // Both addresses are of one protocol by now.
        let packet = fin::segment(record, bound, connected).unwrap_or_default();
        inject(&packet).map_err(RepairError::making("injecting the peer's FIN"))?;
        let polled = self.descriptor().poll(libc::POLLRDHUP, FIN_PATIENCE_MS);
        let events = polled.map_err(RepairError::making("poll"))?;
        if events & libc::POLLRDHUP == 0 {
            return Err(RepairError::FinLost { remote: connected });
        }
        Ok(())
    }
}

impl Drop for Restored {
    fn drop(&mut self) {
        if let Some(socket) = &self.socket {
            let socket = Descriptor(socket.as_fd());
            // Outside of the repair mode a reset would be sent. In it, closing alone is silent as well.
            let _ = socket.repair().and_then(|()| socket.end_silently());
        }
    }
}

fn is_one_protocol(local: SocketAddr, remote: SocketAddr) -> bool {
    local.ip().to_canonical().is_ipv4() == remote.ip().to_canonical().is_ipv4()
}

/// The address as a socket of that family has it.
fn address_of(family: Family, address: SocketAddr) -> Option<SocketAddr> {
    match (family, address.ip().to_canonical()) {
        (Family::V4, IpAddr::V4(ip)) => Some(SocketAddr::new(ip.into(), address.port())),
        (Family::V4, IpAddr::V6(_)) => None,
        (Family::V6, IpAddr::V4(ip)) => Some(SocketAddr::new(ip.to_ipv6_mapped().into(), address.port())),
        // With its scope.
        (Family::V6, IpAddr::V6(_)) => Some(address),
    }
}

/// An array of the kernel's `tcp_repair_opt`: what the two SYNs have agreed on.
fn connection_options(record: &TcpRecord) -> Vec<u8> {
    let scales = record.scales.map(|scales| u32::from(scales.send) | u32::from(scales.receive) << 16);
    let all = [
        Some((OPTION_MSS, u32::from(record.mss))),
        scales.map(|scales| (OPTION_WINDOW_SCALE, scales)),
        record.selective_acks.then_some((OPTION_SELECTIVE_ACKS, 0)),
        record.timestamp.map(|_| (OPTION_TIMESTAMPS, 0)),
    ];
    all.into_iter().flatten().flat_map(|(kind, value)| [kind, value]).flat_map(u32::to_ne_bytes).collect()
}

fn set_window(socket: Descriptor<'_>, window: Window) -> Result<(), RepairError> {
    let words = [window.update_sequence, window.send_len, window.send_max_len, window.receive_len, window.receive_from];
    let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
    let set = socket.set_bytes(IPPROTO_TCP, libc::TCP_REPAIR_WINDOW, &bytes);
    set.map_err(RepairError::making("setsockopt(TCP_REPAIR_WINDOW)"))
}
