//! Sockets of this network namespace as the kernel lists them, and who has them.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::RawFd;

/// One of the kernel's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    /// TCP over IPv4.
    Tcp,
    /// TCP over IPv6.
    Tcp6,
    /// UDP over IPv4.
    Udp,
    /// UDP over IPv6.
    Udp6,
}

/// A line of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Socket {
    /// What it is bound to.
    pub local: SocketAddr,
    /// What it is connected to; all zero where it is not.
    pub remote: SocketAddr,
    /// State, by the kernel's number.
    pub state: u8,
    /// Bytes that the peer has not acknowledged, and bytes that the program has not read, together.
    pub queued_bytes: u64,
    /// The kernel's number of the socket; zero where no process has it any more.
    pub inode: u64,
}

/// A process that has a socket, and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Process.
    pub pid: u32,
    /// Descriptor.
    pub descriptor: RawFd,
}

impl Table {
    const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Tcp6 => "tcp6",
            Self::Udp => "udp",
            Self::Udp6 => "udp6",
        }
    }

    /// The sockets that are in it now; none where the kernel has no such table.
    pub fn sockets(self) -> Vec<Socket> {
        // The thread's own namespace, which need not be the process's.
        let text = fs::read_to_string(format!("/proc/thread-self/net/{}", self.name())).unwrap_or_default();
        parse(&text)
    }
}

impl Socket {
    /// TCP: neither end has closed.
    pub const ESTABLISHED: u8 = 0x01;
    /// TCP: the peer has closed.
    pub const CLOSE_WAIT: u8 = 0x08;
    /// TCP: waiting for connections.
    pub const LISTEN: u8 = 0x0a;
    /// TCP: both ends have closed, and what comes late is answered for a minute.
    pub const TIME_WAIT: u8 = 0x06;
    /// UDP: bound, and not connected.
    pub const BOUND: u8 = 0x07;
}

/// A line is `  0: 00000000:0050 00000000:0000 0A …`: number, local address, remote address, state, queues, timer,
/// retransmissions, owner, time-out, inode.
fn parse(text: &str) -> Vec<Socket> {
    let line = |line: &str| {
        let mut columns = line.split_ascii_whitespace().skip(1);
        let (local, remote) = (address(columns.next()?)?, address(columns.next()?)?);
        let state = u8::from_str_radix(columns.next()?, 16).ok()?;
        let (sent, received) = columns.next()?.split_once(':')?;
        let bytes = |queue: &str| u64::from_str_radix(queue, 16).ok();
        let queued_bytes = bytes(sent)? + bytes(received)?;
        Some(Socket { local, remote, state, queued_bytes, inode: columns.nth(4)?.parse().ok()? })
    };
    text.lines().skip(1).filter_map(line).collect()
}

/// Each word of an address is written as a number of this machine.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let word = |at: usize| Some(u32::from_str_radix(ip.get(at..at + 8)?, 16).ok()?.to_ne_bytes());
    let ip: IpAddr = match ip.len() {
        8 => Ipv4Addr::from(word(0)?).into(),
        32 => {
            let mut octets = [0; 16];
            for (at, octets) in octets.chunks_exact_mut(4).enumerate() {
                octets.copy_from_slice(&word(8 * at)?);
            }
            Ipv6Addr::from(octets).into()
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?))
}

/// The sockets of all processes that we may see, each as often as there are descriptors of it.
fn held() -> impl Iterator<Item = (u64, Holder)> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|process| process.file_name().to_str().and_then(|name| name.parse().ok()));
    pids.flat_map(held_by)
}

/// The sockets of a process, if we may see them.
fn held_by(pid: u32) -> impl Iterator<Item = (u64, Holder)> {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    descriptors.filter_map(move |descriptor| {
        let to = fs::read_link(descriptor.path()).ok()?;
        let inode = to.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()?;
        Some((inode, Holder { pid, descriptor: descriptor.file_name().to_str()?.parse().ok()? }))
    })
}

/// Whether a process that we may see has one of these sockets.
pub fn has_one(pid: u32, inodes: &HashSet<u64>) -> bool {
    held_by(pid).any(|(held, _)| inodes.contains(&held))
}

/// A process that has this socket, if we may see it.
pub fn holder(inode: u64) -> Option<Holder> {
    held().find(|(held, _)| *held == inode).map(|(_, holder)| holder)
}

/// A process for each of these sockets, of those that we may see: by one walk over all processes.
pub fn holders(inodes: &HashSet<u64>) -> HashMap<u64, Holder> {
    held().filter(|(held, _)| inodes.contains(held)).collect()
}

/// Who has the UDP port, for the error that says so: "pid 12 (name)"; "another process" when it cannot be found.
pub(crate) fn holder_of_udp(port: u16) -> String {
    let found = [Table::Udp6, Table::Udp]
        .into_iter()
        .find_map(|table| table.sockets().into_iter().find(|socket| socket.local.port() == port))
        .and_then(|socket| holder(socket.inode));
    found.map_or_else(
        || "another process".to_owned(),
        |holder| {
            let command = fs::read_to_string(format!("/proc/{}/comm", holder.pid)).unwrap_or_default();
            format!("pid {} ({})", holder.pid, command.trim())
        },
    )
}

#[cfg(test)]
mod test {
    use super::*;
    use std::net::{TcpListener, UdpSocket};
    use std::os::fd::AsRawFd;

    #[test]
    fn finds_ourselves() {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("loopback");
        let port = socket.local_addr().expect("bound").port();
        assert!(holder_of_udp(port).starts_with(&format!("pid {} (", std::process::id())));
    }

    #[test]
    fn a_listening_socket_is_found_by_its_address() {
        for any in ["127.0.0.1:0", "[::1]:0"] {
            // A host without IPv6 has one family less to look at.
            let Ok(listener) = TcpListener::bind(any) else { continue };
            let local = listener.local_addr().expect("bound");
            let table = if local.is_ipv4() { Table::Tcp } else { Table::Tcp6 };
            let found = table.sockets().into_iter().find(|socket| socket.local == local).expect("it listens");
            assert_eq!(found.state, Socket::LISTEN);
            let holder = holder(found.inode).expect("our own process has it");
            assert_eq!((holder.pid, holder.descriptor), (std::process::id(), listener.as_raw_fd()));
            assert_eq!(holders(&[found.inode].into()), HashMap::from([(found.inode, holder)]));
            assert!(has_one(std::process::id(), &[found.inode].into()), "it is ours");
            assert!(!has_one(std::process::id(), &[0].into()) && !has_one(0, &[found.inode].into()));
        }
    }

    #[test]
    fn literal_table() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n \
                     12: 0100007F:D434 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 4711 2 \
                     0\n \
                     13: 00000000000000000000000001000000:1F90 00000000000000000000000001000000:D431 0A \
                     00000010:00000001 00:00000000 00000000     0        0 4712 2 0\n garbage";
        if cfg!(target_endian = "little") {
            let address = |text: &str| -> SocketAddr { text.parse().expect("literal") };
            let socket = |local, remote, state, queued_bytes, inode| {
                let (local, remote) = (address(local), address(remote));
                Socket { local, remote, state, queued_bytes, inode }
            };
            let expected = [
                socket("127.0.0.1:54324", "0.0.0.0:0", Socket::BOUND, 0, 4711),
                socket("[::1]:8080", "[::1]:54321", Socket::LISTEN, 17, 4712),
            ];
            assert_eq!(parse(table), expected);
        }
    }
}
