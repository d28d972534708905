//! The programs on this very kernel, with real sockets. They need root; without it the tests say so and pass.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{TcpListener, UdpSocket};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::Uid;

use super::*;

const PATIENCE_MS: u16 = 10_000;
const OWNER: OwnerId = OwnerId(7);

/// The programs; `None` without root.
fn open() -> Option<(ActiveSockets, PathBuf)> {
    if !Uid::effective().is_root() {
        eprintln!("skipped: eBPF needs root");
        return None;
    }
    let mounts = fs::read_to_string("/proc/self/mounts").expect("mounts");
    let Some(root) = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>()).find(|words| words[2] == "cgroup2")
    else {
        eprintln!("skipped: no cgroup file system of version 2");
        return None;
    };
    let root = PathBuf::from(root[1]);
    Some((ActiveSockets::open(&root, Ranges::USUAL).expect("the kernel takes the programs"), root))
}

impl ActiveSockets {
    /// The next change that `wanted` takes. Other tests make sockets, too.
    fn next<T>(&self, mut wanted: impl FnMut(Change) -> Option<T>) -> T {
        loop {
            if let Some(found) = self.take().into_iter().find_map(&mut wanted) {
                return found;
            }
            let mut fds = [PollFd::new(self.events(), PollFlags::POLLIN)];
            let count = poll(&mut fds, PollTimeout::from(PATIENCE_MS)).expect("a wait");
            assert_ne!(count, 0, "nothing was heard");
        }
    }

    fn listens(&self, is_it: impl Fn(&Socket) -> bool) -> Socket {
        self.next(|change| match change {
            Change::Listens(socket) if is_it(&socket) => Some(socket),
            _ => None,
        })
    }

    fn ends(&self, cookie: Cookie) {
        self.next(|change| (change == Change::Ended(cookie)).then_some(()));
    }
}

/// A cgroup of one test; goes with it.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new(root: &Path, name: &str) -> Self {
        let path = root.join(format!("margay-test-{}-{name}", std::process::id()));
        fs::create_dir(&path).expect("a cgroup");
        Self(path)
    }

    fn id(&self) -> CgroupId {
        CgroupId(self.0.metadata().expect("it is there").ino())
    }

    /// A Python program in it; it says a word, and then waits.
    fn run(&self, prefix: &str, script: &str) -> Running {
        let procs = self.0.join("cgroup.procs");
        let line = format!("echo $$ > {} && exec {prefix} python3 -c \"$SCRIPT\"", procs.display());
        let script = format!("import socket, sys, time\n{script}\nsys.stdin.read()");
        let mut command = Command::new("sh");
        command.args(["-c", &line]).env("SCRIPT", script).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("a shell");
        let mut word = String::new();
        let out = child.stdout.take().expect("it is piped");
        BufReader::new(out).read_line(&mut word).expect("a word");
        Running(child, word.trim().to_owned())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let procs = fs::read_to_string(self.0.join("cgroup.procs"));
        assert_eq!(procs.unwrap_or_default(), "", "programs of the test have ended");
        fs::remove_dir(&self.0).expect("it is empty");
    }
}

struct Running(Child, String);

impl Running {
    fn kill(&mut self) {
        self.0.kill().expect("it runs");
        self.0.wait().expect("it ends");
    }
}

#[test]
fn a_listener_is_heard_of_when_it_listens_and_when_it_is_closed() {
    let Some((active, _)) = open() else { return };
    for text in ["127.0.0.1:0", "0.0.0.0:0", "[::1]:0", "[::]:0"] {
        let listener = TcpListener::bind(text).expect("a port");
        let address = listener.local_addr().expect("bound");
        let socket = active.listens(|socket| socket.address == address);
        assert_eq!((socket.protocol, socket.owner), (6, None));
        assert_eq!(socket.namespace, active.own_namespace());
        let own = Executable::at(&std::env::current_exe().expect("a path")).expect("a file");
        assert_eq!(socket.executable, Some(own));
        drop(listener);
        active.ends(socket.cookie);
    }
}

#[test]
fn what_listened_before_is_found_and_its_end_is_heard() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    let Some((active, _)) = open() else { return };
    let found = active.listening(None).expect("a look");
    let socket = found.into_iter().find(|socket| socket.address == address).expect("it is found");
    let copy = listener.try_clone().expect("a descriptor");
    drop(listener);
    assert!(!active.take().contains(&Change::Ended(socket.cookie)), "another descriptor keeps it");
    drop(copy);
    active.ends(socket.cookie);
}

#[test]
fn a_shut_down_listener_has_ended() {
    let Some((active, _)) = open() else { return };
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    let socket = active.listens(|socket| socket.address == address);
    nix::sys::socket::shutdown(listener.as_raw_fd(), nix::sys::socket::Shutdown::Read).expect("shut");
    active.ends(socket.cookie);
}

#[test]
fn a_program_of_an_owner_is_heard_of_from_any_namespace() {
    let Some((active, root)) = open() else { return };
    let cgroup = Cgroup::new(&root, "owner");
    let inner = Cgroup::new(&cgroup.0, "inner");
    active.set_owner(cgroup.id(), OWNER, Watch::default()).expect("room");
    let script = "s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True)";
    for (cgroup, prefix) in [(&cgroup, ""), (&inner, ""), (&cgroup, "unshare -n")] {
        let mut program = cgroup.run(prefix, script);
        let port: u16 = program.1.parse().expect("a port");
        let socket = active.listens(|socket| socket.owner == Some(OWNER));
        assert_eq!(socket.address.port(), port);
        assert_eq!(socket.namespace == active.own_namespace(), prefix.is_empty());
        if !prefix.is_empty() {
            let namespace = File::open(format!("/proc/{}/ns/net", program.0.id())).expect("a namespace");
            let found = active.listening(Some(namespace.as_fd())).expect("a look");
            let found: Vec<_> = found.iter().map(|found| (found.cookie, found.owner)).collect();
            assert_eq!(found, [(socket.cookie, Some(OWNER))]);
        }
        program.kill();
        active.ends(socket.cookie);
    }
    active.forget_owner(cgroup.id());
}

#[test]
fn a_socket_that_was_passed_belongs_to_its_maker() {
    let Some((active, root)) = open() else { return };
    let cgroup = Cgroup::new(&root, "maker");
    active.set_owner(cgroup.id(), OWNER, Watch::default()).expect("room");
    // It makes the socket there, and listens from elsewhere.
    let script = format!(
        "s = socket.socket(); s.bind(('127.0.0.1', 0)); open('{}/cgroup.procs', 'w').write('0'); s.listen()\n\
         print(s.getsockname()[1], flush=True)",
        root.display()
    );
    let mut program = cgroup.run("", &script);
    let port: u16 = program.1.parse().expect("a port");
    let socket = active.listens(|socket| socket.address.port() == port);
    assert_eq!(socket.owner, Some(OWNER));
    program.kill();
    active.ends(socket.cookie);
}

#[test]
fn datagram_sockets_are_heard_of_where_their_port_is_wanted() {
    let Some((active, root)) = open() else { return };
    let port = UdpSocket::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a free port").port();
    active.want_datagrams(None, port).expect("room");
    let other = UdpSocket::bind("127.0.0.1:0").expect("a port");
    for text in ["0.0.0.0", "::1"] {
        let bound = UdpSocket::bind((text, port)).expect("a port");
        let socket = active.listens(|socket| {
            assert_ne!(socket.address, other.local_addr().expect("bound"));
            socket.address.port() == port
        });
        assert_eq!((socket.protocol, socket.address), (17, bound.local_addr().expect("bound")));
        let found = active.listening(None).expect("a look");
        assert!(found.iter().any(|found| found.cookie == socket.cookie));
        drop(bound);
        active.ends(socket.cookie);
    }
    active.forget_datagrams(None, port);
    let cgroup = Cgroup::new(&root, "low");
    active.set_owner(cgroup.id(), OWNER, Watch { low_ports: true, ..Watch::default() }).expect("room");
    let script = "a = socket.socket(type=socket.SOCK_DGRAM); a.bind(('', 0)); b = socket.socket(type=socket.SOCK_DGRAM)\n\
                  b.bind(('127.0.0.1', 1001)); print('bound', flush=True)";
    let mut program = cgroup.run("unshare -n sh -c 'ip link set lo up && exec \"$@\"' sh", script);
    assert_eq!(program.1, "bound");
    let socket = active.listens(|socket| socket.owner == Some(OWNER));
    assert_eq!(socket.address, "127.0.0.1:1001".parse().expect("literal"));
    program.kill();
    active.ends(socket.cookie);
}

#[test]
fn private_programs_are_bound_where_no_network_leads() {
    let Some((active, root)) = open() else { return };
    let cgroup = Cgroup::new(&root, "private");
    active.set_owner(cgroup.id(), OWNER, Watch { private: true, ..Watch::default() }).expect("room");
    let script = "import errno\ndef bind(family, at):\n  s = socket.socket(family)\n  s.bind(at)\n  return s.getsockname()[0]\n\
                  four, six = socket.AF_INET, socket.AF_INET6\n\
                  print(*[bind(*at) for at in [(four, ('', 1001)), (four, ('10.9.9.9', 1002)), (four, ('127.0.0.1', \
                  1003)),\
                  (four, ('', 0)), (six, ('::', 1001)), (six, ('::1', 1003)), (six, ('::ffff:0.0.0.0', 1004)), (six, \
                  ('::', 0))]],\
                  flush=True)";
    let set_up = "ip link set lo up && ip address add 198.18.0.1/32 dev lo && ip address add fd5a:4c00::1/128 dev lo";
    let mut program = cgroup.run(&format!("unshare -n sh -c '{set_up} && exec \"$@\"' sh"), script);
    assert_eq!(
        program.1, "198.18.0.1 198.18.0.1 127.0.0.1 0.0.0.0 fd5a:4c00::1 ::1 ::ffff:198.18.0.1 ::",
        "a port of one's own choosing is a server's; the loopback is private already"
    );
    program.kill();
}

/// A listener on a port of its own, with these options set before it is bound, `late` ones when it listens, and whether
/// it is of both families and bound to the loopback's interface.
const OPTIONS: [(&str, &str, &str, bool, bool); 7] = [
    ("TCP", "", "", true, false),
    ("TCP", "s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)", "", false, false),
    ("TCP", "s.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b'lo')", "", true, true),
    ("TCP", "", "s.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b'lo')", true, true),
    ("UDP", "", "", true, false),
    ("UDP", "s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)", "", false, false),
    // IPV6_UNICAST_IF, in network byte order.
    ("UDP", "", "s.setsockopt(socket.IPPROTO_IPV6, 76, struct.pack('!I', socket.if_nametoindex('lo')))", true, true),
];

#[test]
fn what_a_socket_takes_is_told_and_that_it_changes() {
    let Some((active, root)) = open() else { return };
    let cgroup = Cgroup::new(&root, "options");
    active.set_owner(cgroup.id(), OWNER, Watch::default()).expect("room");
    let port = UdpSocket::bind("[::]:0").expect("a port").local_addr().expect("bound").port();
    active.want_datagrams(Some(OWNER), port).expect("room");
    for (kind, early, late, takes_both, is_bound) in OPTIONS {
        let (type_of, listen) = if kind == "TCP" { ("SOCK_STREAM", "s.listen()") } else { ("SOCK_DGRAM", "pass") };
        let script = format!(
            "import struct
s = socket.socket(socket.AF_INET6, socket.{type_of})
s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
{early}
s.bind(('::', {port}))
{listen}
{late}
print('ready', flush=True)"
        );
        let mut program = cgroup.run("", &script);
        assert_eq!(program.1, "ready", "{kind} {early} {late}");
        // Both may be told in one go.
        let (mut heard, mut is_rebound) = (None, late.is_empty());
        let socket = active.next(|change| {
            match change {
                Change::Listens(socket) if socket.owner == Some(OWNER) && socket.address.port() == port => {
                    heard = Some(socket);
                }
                Change::Rebound => is_rebound = true,
                _ => {}
            }
            heard.take_if(|_| is_rebound)
        });
        assert_eq!(socket.takes_both, takes_both, "{kind} {early} {late}");
        assert_eq!(socket.interface.is_some(), is_bound && late.is_empty(), "{kind} {early} {late}");
        let now = active.listening(None).expect("a look").into_iter().find(|known| known.cookie == socket.cookie);
        let now = now.expect("it listens");
        assert_eq!((now.takes_both, now.interface.is_some()), (takes_both, is_bound), "{kind} {early} {late}");
        program.kill();
        active.ends(socket.cookie);
    }
    active.forget_datagrams(Some(OWNER), port);
    active.forget_owner(cgroup.id());
}

#[test]
fn thousands_of_listeners_leave_nothing() {
    let Some((active, _)) = open() else { return };
    active.take();
    let before = active.sizes();
    for _ in 0..3000 {
        drop(TcpListener::bind("127.0.0.1:0").expect("a port"));
    }
    let after = active.sizes();
    // Other tests listen at the same time.
    assert!(after[2] < before[2] + 50, "{before:?} {after:?}");
    let heard = active.take();
    let begun = heard.iter().filter(|change| matches!(change, Change::Listens(_))).count();
    assert!(begun >= 3000, "{begun} of 3000 were heard");
    assert!(!active.has_lost());
}

#[test]
fn the_end_of_a_held_socket_is_heard_whether_it_ever_listened_or_not() {
    let Some((active, _)) = open() else { return };
    let before = active.sizes()[3];
    let cookie = |socket: BorrowedFd<'_>| Cookie(rustix::net::sockopt::socket_cookie(socket).expect("a cookie"));
    let stream = rustix::net::socket(rustix::net::AddressFamily::INET6, rustix::net::SocketType::STREAM, None);
    let (stream, datagrams) = (stream.expect("a socket"), UdpSocket::bind("127.0.0.1:0").expect("a port"));
    let other = TcpListener::bind("127.0.0.1:0").expect("a port");
    for held in [stream.as_fd(), datagrams.as_fd()].map(cookie) {
        active.hold(held).expect("room");
        assert!(active.is_held(held));
    }
    let (of_stream, of_other) = (cookie(stream.as_fd()), cookie(other.as_fd()));
    // A second descriptor keeps it.
    let again = stream.try_clone().expect("a descriptor");
    drop((stream, other));
    active.next(|change| {
        assert_ne!(change, Change::Released(of_stream));
        assert_ne!(change, Change::Released(of_other), "nobody holds that one");
        (change == Change::Ended(of_other)).then_some(())
    });
    drop(again);
    active.next(|change| (change == Change::Released(of_stream)).then_some(()));
    active.let_go(cookie(datagrams.as_fd()));
    assert_eq!(active.sizes()[3], before);
}
