//! Network namespaces for tests, each on a thread of its own.

use std::env;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::process::Command;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use margay_datapath::tun;
use nix::sched::{CloneFlags, unshare};

const INSIDE: &str = "MARGAY_TEST_NAMESPACE";
/// How long a test waits for what must come.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Runs `body` in new namespaces: this very test again, in a child process.
pub fn isolated(test: &str, body: fn()) {
    if env::var_os(INSIDE).is_some() {
        return body();
    }
    let mut command = Command::new("unshare");
    if !nix::unistd::geteuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    let status = command.arg("--net").arg(env::current_exe().unwrap()).args([test, "--exact", "--nocapture"]);
    let status = status.env(INSIDE, "1").status().expect("unshare of util-linux");
    assert!(status.success(), "{test} failed in its namespace: {status}");
}

/// Runs iproute2.
pub fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split_whitespace()).output().expect("iproute2");
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Waits until the kernel has noticed that a datapath holds `sal0` of the calling thread's namespace: until then it
/// discards what programs send there, and nobody sends a UDP datagram again.
pub fn await_running() {
    let begun = Instant::now();
    loop {
        let output = Command::new("ip").args(["-oneline", "link", "show", "sal0"]).output().expect("iproute2");
        let shown = String::from_utf8_lossy(&output.stdout);
        // Nothing is known of the carrier at first; that would be said to be running.
        if shown.contains(" state UP ") {
            return;
        }
        assert!(begun.elapsed() < PATIENCE, "the kernel has not noticed: {shown}");
    }
}

type Task = Box<dyn FnOnce() + Send>;

/// A thread in a network namespace of its own.
pub struct Host {
    tasks: Sender<Task>,
    thread_id: i32,
}

impl Host {
    /// A new thread, in a new namespace.
    pub fn new() -> Self {
        let (tasks, inbox) = channel::<Task>();
        let (ready, is_ready) = channel();
        thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            ready.send(nix::unistd::gettid().as_raw()).unwrap();
            inbox.iter().for_each(|task| task());
        });
        Self { tasks, thread_id: is_ready.recv().unwrap() }
    }

    /// Runs `task` on the thread and waits for it.
    pub fn run<R: Send + 'static>(&self, task: impl FnOnce() -> R + Send + 'static) -> R {
        let (result, outcome) = channel();
        self.tasks.send(Box::new(move || drop(result.send(task())))).unwrap();
        outcome.recv().expect("the task did not panic")
    }
}

/// The host's own virtual address, the same on every host.
pub const OWN_V4: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
/// The same in IPv6.
pub const OWN_V6: Ipv6Addr = Ipv6Addr::new(0xfd5a, 0x4c00, 0, 0, 0, 0, 0, 1);
/// Two hosts on one link, each with a persistent `sal0`, the host's virtual addresses on it, and routes.
pub fn two_hosts() -> [Host; 2] {
    let hosts = [Host::new(), Host::new()];
    let other = hosts[1].thread_id;
    hosts[0].run(move || ip(&format!("link add eth0 type veth peer name eth0 netns {other}")));
    for (host, number) in hosts.iter().zip([1, 2]) {
        host.run(move || {
            ip("link set lo up");
            ip("link set eth0 up");
            ip(&format!("address add 10.77.0.{number}/24 dev eth0"));
            ip(&format!("address add fd77::{number}/64 dev eth0 nodad"));
            tun::create_persistent("sal0").unwrap();
            // Nothing that comes by itself, and later: no link-local address, for which the kernel asks for routers.
            ip("link set sal0 addrgenmode none");
            ip("link set sal0 mtu 1446 up");
            ip(&format!("address add {OWN_V4}/32 dev sal0"));
            ip(&format!("address add {OWN_V6}/128 dev sal0 nodad"));
            ip(&format!("route add 198.18.0.0/15 dev sal0 src {OWN_V4}"));
            ip(&format!("route add fd5a:4c00::/32 dev sal0 src {OWN_V6}"));
            // What comes from the virtual local address goes back through sal0 (DESIGN §5).
            ip(&format!("rule add from {OWN_V4} lookup 54 pref 100"));
            ip("route add default dev sal0 table 54");
        });
    }
    hosts
}

/// Bytes that do not repeat where a lost or doubled piece would show nothing.
pub fn pattern(len: usize) -> Vec<u8> {
    let mut state = 1u32;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        })
        .collect()
}
