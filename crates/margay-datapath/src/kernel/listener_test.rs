//! Sockets that are looked up for what comes by `sal0`, on a real interface in a network namespace of the test's own.
//! It needs root; without it the tests say so and pass.
#![allow(unsafe_code)]

use std::collections::HashSet;
use std::io::{IoSlice, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::process::Command;
use std::time::{Duration, Instant};

use margay_core::{Ranges, Tuple};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::grant::test::alone;
use super::test::opening::numbered;
use super::{CacheConfig, KernelCache};
use crate::packet::{ACK, FIN, RST, SYN, TCP};
use crate::sample::{self, Checksum};
use crate::tun::{self, Tun};
use crate::vnet;

const PATIENCE_MS: u16 = 10_000;
const HOST_V4: Ipv4Addr = Ranges::USUAL.host_v4();
const SAL0: &str = "sal0";
/// Number of a SYN.
const FIRST: u32 = 1000;
const CLIENTS: [&str; 2] = ["10.1.0.1", "fd01::1"];

struct Host {
    tun: Tun,
    cache: KernelCache,
}

impl Host {
    fn new(pins: &std::path::Path) -> Self {
        tun::create_persistent(SAL0).expect("a TUN");
        let host_v6 = Ranges::USUAL.host_v6();
        let script = format!(
            "ip link set lo up; ip addr add 10.1.0.2/32 dev lo; ip addr add fd01::2/128 dev lo nodad
             ip addr add {HOST_V4}/32 dev {SAL0}; ip addr add {host_v6}/128 dev {SAL0} nodad; ip link set {SAL0} up
             ip route add default dev {SAL0}; ip -6 route add default dev {SAL0}"
        );
        assert!(Command::new("sh").args(["-ec", &script]).status().expect("a shell").success());
        let config = CacheConfig {
            sal0: SAL0.to_owned(),
            interfaces: Vec::new(),
            local_addresses: Vec::new(),
            in_place: false,
            pin_dir: pins.to_owned(),
            flow_ports: 61_000..=65_535,
            ranges: Ranges::USUAL,
            boxes: false,
            flows_max: 1024,
        };
        let cache = KernelCache::open(&config).expect("the kernel takes it");
        cache.attach().expect("sal0 takes programs");
        let tun = Tun::open(SAL0).expect("the same");
        await_running();
        Self { tun, cache }
    }

    /// Has these looked up, and no others.
    fn look_up(&self, listeners: &[SocketAddr]) {
        self.cache.set_listeners(&HashSet::from_iter(listeners.iter().copied()), true).expect("room");
    }

    /// The flags of what the host answers to a segment from a client of the family of `to`.
    fn answer(&self, to: IpAddr, port: u16, client_port: u16, flags: u8) -> u8 {
        let client: IpAddr = CLIENTS[usize::from(to.is_ipv6())].parse().expect("literal");
        let source = SocketAddr::new(client, client_port);
        let tuple = Tuple { protocol: TCP, source, destination: SocketAddr::new(to, port) };
        self.write(&sample::packet(tuple, flags, b"", Checksum::Complete));
        self.flags_of([port, client_port])
    }

    /// A packet comes by `sal0`.
    fn write(&self, packet: &[u8]) {
        self.tun.write(&[IoSlice::new(&[0; vnet::LEN]), IoSlice::new(packet)]).expect("written");
    }

    /// The flags of the next segment that leaves by `sal0` with these ports, source and destination.
    fn flags_of(&self, wanted: [u16; 2]) -> u8 {
        loop {
            let mut fds = [PollFd::new(self.tun.as_fd(), PollFlags::POLLIN)];
            assert_ne!(poll(&mut fds, PollTimeout::from(PATIENCE_MS)).expect("a wait"), 0, "no answer");
            let (mut header, mut bytes) = ([0; vnet::LEN], [0; 2048]);
            let mut slots = [IoSliceMut::new(&mut header), IoSliceMut::new(&mut bytes)];
            let Some(len) = self.tun.read(&mut slots).expect("read") else { continue };
            // The host greets its neighbours, too.
            let transport =
                if bytes[0] >> 4 == 4 { (bytes[9] == TCP).then_some(20) } else { (bytes[6] == TCP).then_some(40) };
            let Some(at) = transport.filter(|at| len >= at + 20) else { continue };
            let ports =
                [u16::from_be_bytes([bytes[at], bytes[at + 1]]), u16::from_be_bytes([bytes[at + 2], bytes[at + 3]])];
            if ports == wanted {
                return bytes[at + 13];
            }
        }
    }
}

/// Until the kernel has heard that somebody reads the interface, up to a second later, it drops what leaves by it.
fn await_running() {
    let until = Instant::now() + Duration::from_millis(PATIENCE_MS.into());
    loop {
        let shown = Command::new("ip").args(["-o", "link", "show", SAL0]).output().expect("ip");
        if !String::from_utf8_lossy(&shown.stdout).contains("state DOWN") {
            return;
        }
        assert!(Instant::now() < until, "{shown:?}");
        std::thread::yield_now();
    }
}

/// A listener of MPTCP.
fn listen_mptcp(address: &str) -> TcpListener {
    // SAFETY: a plain system call; the result is checked before it is taken for a descriptor.
    let descriptor = unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM, libc::IPPROTO_MPTCP) };
    assert!(descriptor >= 0, "a kernel of these tests has MPTCP");
    // SAFETY: the kernel has just given it, and nobody else has it.
    let socket = unsafe { OwnedFd::from_raw_fd(descriptor) };
    let address: std::net::SocketAddrV4 = address.parse().expect("literal");
    let address = nix::sys::socket::SockaddrIn::from(address);
    nix::sys::socket::bind(std::os::fd::AsRawFd::as_raw_fd(&socket), &address).expect("a port");
    nix::sys::socket::listen(&socket, nix::sys::socket::Backlog::new(8).expect("a number")).expect("it listens");
    TcpListener::from(socket)
}

#[test]
fn a_listener_at_one_address_gets_what_comes_by_sal0_for_the_host() {
    alone("listeners", |pins| {
        let host = Host::new(pins);
        let mut client_port = 4000;
        let mut answer = |to: IpAddr, port: u16, flags: u8| {
            client_port += 1;
            host.answer(to, port, client_port, flags)
        };
        for text in ["127.0.0.1:0", "[::1]:0", "10.1.0.2:0", "[fd01::2]:0", "mptcp"] {
            let listener =
                if text == "mptcp" { listen_mptcp("127.0.0.1:0") } else { TcpListener::bind(text).expect("a port") };
            let address = listener.local_addr().expect("bound");
            let (port, to) = (
                address.port(),
                if address.is_ipv4() { IpAddr::V4(HOST_V4) } else { IpAddr::V6(Ranges::USUAL.host_v6()) },
            );
            host.look_up(&[]);
            assert_eq!(answer(to, port, SYN), RST | ACK, "{text}: nobody is looked up");
            host.look_up(&[address]);
            assert_eq!(answer(to, port, SYN), SYN | ACK, "{text}");
            assert_eq!(answer(to, port, ACK), RST, "{text}: no handshake is complete, and no cookie was given");
            assert_eq!(answer(to, port ^ 1, SYN), RST | ACK, "{text}: another port");
            let own: IpAddr = if to.is_ipv4() { "10.1.0.2" } else { "fd01::2" }.parse().expect("literal");
            let flags = if address.ip() == own { SYN | ACK } else { RST | ACK };
            assert_eq!(answer(own, port, SYN), flags, "{text}: for another address the kernel alone decides");
            drop(listener);
            // A child of another test has the socket, too, until it executes its program.
            let until = Instant::now() + Duration::from_millis(PATIENCE_MS.into());
            while answer(to, port, SYN) != RST | ACK {
                assert!(Instant::now() < until, "{text}: nothing listens any more");
            }
        }
    });
}

/// As a runtime of containers publishes a port: a socket at every address holds it, and rules translate what comes.
#[test]
fn what_comes_for_a_published_port_is_forwarded() {
    alone("published", |pins| {
        let host = Host::new(pins);
        let holder = TcpListener::bind("0.0.0.0:0").expect("a port");
        let port = holder.local_addr().expect("bound").port();
        let script = format!(
            "echo 1 > /proc/sys/net/ipv4/ip_forward
             nft add table ip runtime
             nft 'add chain ip runtime arriving {{ type nat hook prerouting priority dstnat; }}'
             nft add rule ip runtime arriving fib daddr type local tcp dport {port} dnat to 192.0.2.9:7"
        );
        assert!(Command::new("sh").args(["-ec", &script]).status().expect("a shell").success());
        host.look_up(&[SocketAddr::new("10.1.0.2".parse().expect("literal"), port)]);
        let tuple = Tuple {
            protocol: TCP,
            source: format!("{}:4000", CLIENTS[0]).parse().expect("literal"),
            destination: SocketAddr::new(HOST_V4.into(), port),
        };
        let packet = numbered(tuple, SYN, (FIRST, 0), b"");
        host.write(&packet);
        // All routes lead to `sal0` here.
        assert_eq!(host.flags_of([4000, 7]), SYN, "the container gets it");
        let container: SocketAddr = "192.0.2.9:7".parse().expect("literal");
        host.write(&numbered(
            Tuple { source: container, destination: tuple.source, ..tuple },
            SYN | ACK,
            (7, FIRST + 1),
            b"",
        ));
        assert_eq!(host.flags_of([port, 4000]), SYN | ACK, "the client hears it");
        for (at, flags) in [(1, ACK), (2, ACK), (100, ACK), (200, FIN | ACK)] {
            host.write(&numbered(tuple, flags, (FIRST + at, 8), b"data"));
            assert_eq!(host.flags_of([4000, 7]), flags, "{at} bytes further");
        }
    });
}
