//! Programs behind flows, for rules that are about them: the socket of a flow in the kernel's tables, a process that
//! has it, and what the kernel tells of that. One walk over all processes answers for all flows that are asked about,
//! and walks are so far apart that they take little of a processor.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use margay_core::Tuple;
use margay_core::stack_rule::Program;
use margay_datapath::socket_table::{self, Socket, Table};
use margay_wire::FlowId;
use nix::unistd::{Uid, User};

use super::Agent;

const TCP: u8 = 6;
const UDP: u8 = 17;
/// Between two walks there are so many times the time that one takes: 1 % of a processor.
const APART: u32 = 100;

/// Finds the programs that rules ask for.
#[derive(Default)]
pub struct Finder {
    next: Option<Instant>,
}

impl Finder {
    /// Looks for those that are not known, when it is time to.
    pub fn look(&mut self, agent: &Agent) {
        let begin = Instant::now();
        if self.next.is_some_and(|next| begin < next) {
            return;
        }
        let core = &agent.core.0;
        let sought = core.with_sal(|sal, _| sal.flows_to_identify());
        if sought.is_empty() {
            return;
        }
        let found = find(&sought);
        core.with_sal(|sal, _| found.into_iter().for_each(|(flow, program)| sal.note_program(flow, program)));
        let spent = begin.elapsed();
        self.next = Some(begin + spent + spent.saturating_mul(APART).min(Duration::from_secs(60)));
    }
}

/// The programs of flows whose sockets' packets carry these tuples.
fn find(sought: &[(FlowId, Tuple)]) -> Vec<(FlowId, Option<Program>)> {
    let has = |protocol: u8| sought.iter().any(|(_, app)| app.protocol == protocol);
    let listed = |protocol: u8, tables: [Table; 2]| {
        let is_wanted = has(protocol);
        let sockets = tables.into_iter().filter(move |_| is_wanted).flat_map(Table::sockets);
        Sockets::new(sockets.filter(|socket| socket.inode != 0))
    };
    let tcp = listed(TCP, [Table::Tcp, Table::Tcp6]);
    let udp = listed(UDP, [Table::Udp, Table::Udp6]);
    let inode = |app: &Tuple| if app.protocol == UDP { udp.of(app) } else { tcp.of(app) };
    let sockets: Vec<(FlowId, Option<u64>)> = sought.iter().map(|(flow, app)| (*flow, inode(app))).collect();
    let inodes: HashSet<u64> = sockets.iter().filter_map(|(_, inode)| *inode).collect();
    let holders = if inodes.is_empty() { HashMap::new() } else { socket_table::holders(&inodes) };
    let mut known: HashMap<u32, Program> = HashMap::new();
    let mut program = |inode: u64| {
        let pid = holders.get(&inode)?.pid;
        Some(known.entry(pid).or_insert_with(|| program_of(pid)).clone())
    };
    sockets.into_iter().map(|(flow, inode)| (flow, inode.and_then(&mut program))).collect()
}

/// The sockets of one protocol, by what they are bound and connected to.
struct Sockets(HashMap<(SocketAddr, SocketAddr), u64>);

/// A socket of IPv6 may have addresses of IPv4.
fn plain(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

impl Sockets {
    fn new(sockets: impl Iterator<Item = Socket>) -> Self {
        Self(sockets.map(|socket| ((plain(socket.local), plain(socket.remote)), socket.inode)).collect())
    }

    /// The one whose packets carry this: connected so, or bound to the address or to all, and connected to nobody.
    fn of(&self, app: &Tuple) -> Option<u64> {
        let nobody = |ip: &str| SocketAddr::new(ip.parse().expect("a literal"), 0);
        let [v4, v6] = [nobody("0.0.0.0"), nobody("::")];
        let all = |any: SocketAddr| SocketAddr::new(any.ip(), app.source.port());
        let own = if app.source.is_ipv4() { v4 } else { v6 };
        let unconnected = [(app.source, own), (app.source, v6), (all(v4), v4), (all(v6), v6)];
        // A connection has a socket of its own: that which listens is not it.
        let bound = unconnected.into_iter().filter(|_| app.protocol == UDP);
        std::iter::once((app.source, app.destination)).chain(bound).find_map(|key| self.0.get(&key).copied())
    }
}

/// What the kernel tells of a process.
fn program_of(pid: u32) -> Program {
    let read = |entry: &str| fs::read_to_string(format!("/proc/{pid}/{entry}")).ok();
    let executable = fs::read_link(format!("/proc/{pid}/exe")).ok().and_then(|path| path.to_str().map(file_of));
    let unit = read("cgroup").and_then(|text| unit_of(&text));
    let user = read("status").and_then(|text| uid_of(&text)).map(user_name);
    Program { executable, unit, user }
}

/// An upgrade may have taken the file away under the program.
fn file_of(link: &str) -> String {
    link.strip_suffix(" (deleted)").unwrap_or(link).to_owned()
}

/// The innermost unit of systemd: what `systemctl status` says of the process.
fn unit_of(cgroups: &str) -> Option<String> {
    let own = cgroups.lines().find_map(|line| line.strip_prefix("0::"))?;
    let is_unit = |part: &&str| part.ends_with(".service") || part.ends_with(".scope");
    own.rsplit('/').find(is_unit).map(str::to_owned)
}

/// The effective one, of four.
fn uid_of(status: &str) -> Option<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    line.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// What the system calls a user; the number where it has no name.
fn user_name(uid: u32) -> String {
    let known = User::from_uid(Uid::from_raw(uid)).ok().flatten();
    known.map_or_else(|| uid.to_string(), |user| user.name)
}

#[cfg(test)]
mod test {
    use std::net::{TcpListener, TcpStream, UdpSocket};

    use super::*;

    fn app(protocol: u8, source: SocketAddr, destination: SocketAddr) -> Tuple {
        Tuple { protocol, source, destination }
    }

    #[test]
    fn the_program_of_a_socket_is_this_one() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let stream = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
        let (_accepted, _) = listener.accept().expect("a connection");
        let bound = UdpSocket::bind("0.0.0.0:0").expect("a port");
        let port = bound.local_addr().expect("bound").port();
        let connected = UdpSocket::bind("127.0.0.1:0").expect("a port");
        connected.connect("127.0.0.1:9").expect("no packet is sent");
        let far = "10.9.9.9:9".parse().expect("literal");
        let local = |socket: &UdpSocket| socket.local_addr().expect("bound");
        let tuples = [
            app(TCP, stream.local_addr().expect("bound"), stream.peer_addr().expect("connected")),
            app(TCP, stream.peer_addr().expect("connected"), stream.local_addr().expect("bound")),
            app(UDP, SocketAddr::new([127, 0, 0, 1].into(), port), far),
            app(UDP, local(&connected), "127.0.0.1:9".parse().expect("literal")),
            app(UDP, local(&connected), far),
            app(TCP, listener.local_addr().expect("bound"), far),
        ];
        let sought: Vec<(FlowId, Tuple)> = (1..).map(FlowId).zip(tuples).collect();
        let own = std::env::current_exe().expect("a path");
        let found = find(&sought);
        let is_own = |program: &Option<Program>| {
            let program = program.as_ref()?;
            let is_user = program.user == Some(user_name(Uid::effective().as_raw()));
            Some(is_user && program.executable.as_deref() == own.to_str())
        };
        let known: Vec<Option<bool>> = found.iter().map(|(_, program)| is_own(program)).collect();
        assert_eq!(known, [Some(true), Some(true), Some(true), Some(true), None, None]);
    }

    #[test]
    fn the_innermost_unit_is_the_programs() {
        let unit = |text: &str| unit_of(text);
        assert_eq!(unit("0::/system.slice/backup.service\n").as_deref(), Some("backup.service"));
        let nested = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/app-mail.scope/margay-run-7-00\n";
        assert_eq!(unit(&format!("1:net_cls:/\n{nested}")).as_deref(), Some("app-mail.scope"));
        assert_eq!(unit("0::/\n"), None);
        assert_eq!(unit("1:memory:/a.service\n"), None, "of the first version");
    }

    #[test]
    fn what_the_kernel_says_of_a_process_is_read() {
        assert_eq!(uid_of("Name:\tx\nUid:\t1000\t1001\t1002\t1003\nGid:\t0\n"), Some(1001));
        assert_eq!(uid_of("Name:\tx\n"), None);
        assert_eq!(user_name(0), "root");
        assert_eq!(user_name(4_000_000_001), "4000000001");
        assert_eq!(file_of("/usr/bin/x (deleted)"), "/usr/bin/x");
    }
}
