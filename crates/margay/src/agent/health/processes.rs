//! Which processes of this host serve a name.

use std::collections::{BTreeSet, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use margay_core::name::Name;
use margay_datapath::sock_diag::{self, Described};
use margay_datapath::socket_table;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerPidfd;

use crate::agent::Agent;
use crate::agent::listening::{Listener, Place};
use crate::listener::Protocol;

/// A process and when it was started: the kernel gives its number to another one later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    pid: u32,
    /// In ticks of the clock since the host was booted.
    started: u64,
}

impl Process {
    /// The process that has this number now.
    pub fn of(pid: i32) -> Option<Self> {
        let pid = u32::try_from(pid).ok()?;
        Some(Self { pid, started: started(pid)? })
    }

    /// The process that has connected: another one may have its number `pid` since. `None`: it has ended. Before Linux
    /// 6.5 the kernel does not say whether it has, and whoever has the number now is taken for it.
    pub fn of_peer(connection: &impl AsFd, pid: i32) -> Option<Self> {
        let found = Self::of(pid)?;
        match getsockopt(connection, PeerPidfd) {
            // The number was its own until now, if it runs now.
            Ok(process) => is_running(&process).then_some(found),
            Err(Errno::ENOPROTOOPT) => Some(found),
            Err(_) => None,
        }
    }

    /// Whether its number is still its own. What was read of the number before that was of this process.
    fn is_there(self) -> bool {
        started(self.pid) == Some(self.started)
    }
}

/// `pidfd_open(2)`: one becomes readable when the process ends, before its number is free.
fn is_running(process: &OwnedFd) -> bool {
    let mut ended = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
    poll(&mut ended, PollTimeout::ZERO) == Ok(0)
}

/// `proc_pid_stat(5)`: field 22, behind the program's name in parentheses, which may contain any character.
fn started(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    text.rsplit_once(')')?.1.split_ascii_whitespace().nth(22 - 3)?.parse().ok()
}

/// Where this host serves a name, also as one of a service with partitions; nowhere where it does not.
pub fn listeners(agent: &Agent, name: &Name) -> Vec<Listener> {
    agent.publishing.services.serving(name).map(|found| found.listeners).unwrap_or_default()
}

/// Processes whose sockets take what comes to these listeners.
pub fn listening(listeners: &[Listener]) -> BTreeSet<u32> {
    socket_table::holders(&sockets(listeners)).into_values().map(|holder| holder.pid).collect()
}

/// Whether a process serves a name: it has a socket that takes what comes to the name, or it belongs to a program that
/// was started for the name.
pub fn serves(agent: &Agent, name: &Name, process: Process) -> bool {
    let is_of_program = match agent.publishing.active.cgroups(name) {
        Ok((hierarchy, started)) => hierarchy.of(process.pid).is_ok_and(|own| is_below(&own, &started)),
        Err(_) => false,
    };
    (is_of_program || has_listener(process.pid, &listeners(agent, name))) && process.is_there()
}

fn is_below(own: &Path, cgroups: &[std::path::PathBuf]) -> bool {
    cgroups.iter().any(|cgroup| own.starts_with(cgroup))
}

fn has_listener(pid: u32, listeners: &[Listener]) -> bool {
    socket_table::has_one(pid, &sockets(listeners))
}

/// Sockets of this network namespace that take what comes to these listeners, by their inodes. Any user may have a
/// socket of another protocol or family on the same port: it takes nothing of theirs.
fn sockets(listeners: &[Listener]) -> HashSet<u64> {
    let ports = |protocol: Protocol| {
        let carried = listeners.iter().filter(move |listener| !listener.is_passed() && listener.carries(protocol));
        carried.map(|listener| listener.address.port()).collect::<BTreeSet<u16>>()
    };
    let mut found = HashSet::new();
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        for port in ports(protocol) {
            let open = sock_diag::open_on(protocol.number(), port).unwrap_or_else(|error| {
                tracing::warn!(%error, port, "the kernel does not say what listens; is its module inet_diag there?");
                Vec::new()
            });
            let takes = |socket: &&Described| {
                let Described { local: address, takes_both, interface, .. } = **socket;
                let place = Place { address, protocol, takes_both };
                interface == 0 && listeners.iter().any(|listener| listener.is_taken_by(&place))
            };
            found.extend(open.iter().filter(takes).map(|socket| socket.inode));
        }
    }
    found
}

#[cfg(test)]
mod test {
    use std::net::{Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::process::Command;

    use rustix::net::sockopt::set_ipv6_v6only;
    use rustix::net::{AddressFamily, SocketType};

    use super::*;
    use crate::agent::listening::Origin;

    fn at(address: SocketAddr) -> Listener {
        Listener {
            address,
            service_port: None,
            protocol: Some(Protocol::Tcp),
            allow: Vec::new(),
            middlebox: None,
            origin: Origin::Socket,
            takes_both: false,
        }
    }

    #[test]
    fn whoever_listens_is_found_by_its_socket() {
        let listener = TcpListener::bind("0.0.0.0:0").expect("a port");
        let any = at(listener.local_addr().expect("bound"));
        let card = at(SocketAddr::new([127, 0, 0, 1].into(), any.address.port()));
        let own = std::process::id();
        for listener in [any, card] {
            assert_eq!(listening(std::slice::from_ref(&listener)), [own].into());
            assert!(has_listener(own, &[listener]));
        }
        assert!(listening(&[]).is_empty() && !has_listener(own, &[]));
    }

    #[test]
    fn a_socket_beside_the_listener_on_its_port_takes_nothing_of_it() {
        let own = std::process::id();
        // The listener itself is nobody's: its socket is closed, and its port taken in all other ways.
        let datagrams = UdpSocket::bind("0.0.0.0:0").expect("a port");
        let listener = at(datagrams.local_addr().expect("bound"));
        assert!(!has_listener(own, std::slice::from_ref(&listener)), "a datagram socket takes no connections");
        let both = Listener { protocol: None, ..listener };
        assert!(has_listener(own, &[both]), "where datagrams are meant, too, it does");
        let socket = rustix::net::socket(AddressFamily::INET6, SocketType::STREAM, None).expect("IPv6");
        set_ipv6_v6only(&socket, true).expect("not bound yet");
        rustix::net::bind(&socket, &SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0)).expect("a port");
        rustix::net::listen(&socket, 1).expect("it listens");
        let bound = SocketAddr::try_from(rustix::net::getsockname(&socket).expect("bound")).expect("an address");
        let of_v4 = at(SocketAddr::new([0, 0, 0, 0].into(), bound.port()));
        assert!(!has_listener(own, &[of_v4]), "it takes the other family alone");
        assert!(has_listener(own, &[at(bound)]));
    }

    #[test]
    fn a_process_is_told_from_the_next_one_of_its_number() {
        let own = Process::of(std::process::id().cast_signed()).expect("it runs");
        assert!(own.is_there());
        assert!(!Process { started: own.started + 1, ..own }.is_there());
        assert_eq!((Process::of(-1), Process::of(i32::MAX)), (None, None));
    }

    /// The one that connects is this test, run once more.
    #[test]
    fn a_process_that_has_connected_and_ended_is_not_the_next_one_of_its_number() {
        const VARIABLE: &str = "MARGAY_TEST_CONNECTS_TO";
        if let Some(path) = std::env::var_os(VARIABLE) {
            UnixStream::connect(path).expect("it listens");
            return;
        }
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("agent.sock");
        let listener = UnixListener::bind(&path).expect("a path");
        let own = std::process::id().cast_signed();
        let _client = UnixStream::connect(&path).expect("it listens");
        let (connection, _) = listener.accept().expect("a connection");
        assert_eq!(Process::of_peer(&connection, own), Process::of(own));
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["a_process_that_has_connected_and_ended_is_not_the_next_one_of_its_number"]);
        assert!(command.env(VARIABLE, &path).output().expect("a process").status.success());
        let (connection, _) = listener.accept().expect("a connection");
        assert_eq!(Process::of_peer(&connection, own), None, "this process has the number, it has not connected");
    }

    #[test]
    fn a_process_below_the_cgroup_of_the_program_belongs_to_it() {
        let program = ["/sys/fs/cgroup/shop/margay-7".into()];
        assert!(is_below(Path::new("/sys/fs/cgroup/shop/margay-7"), &program));
        assert!(is_below(Path::new("/sys/fs/cgroup/shop/margay-7/worker"), &program));
        assert!(!is_below(Path::new("/sys/fs/cgroup/shop/margay-71"), &program));
        assert!(!is_below(Path::new("/sys/fs/cgroup/shop"), &program));
    }
}
