//! The programs on this very kernel, with real sockets in a network namespace of the test's own. They need root;
//! without it the tests say so and pass.

use std::net::{Ipv4Addr, UdpSocket};
use std::process::Command;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::Uid;

use super::*;
use crate::kernel::KernelCache;

const PATIENCE: Duration = Duration::from_secs(5);
const NAME_V4: &str = "198.18.5.5";
const NAME_V6: &str = "fd5a:4c00:1::5";
/// Instances' addresses: on the loopback here, where an agent has flows.
const INSTANCES: [&str; 4] = ["198.19.0.1", "198.19.0.2", "fd5a:4c00::4000:1", "fd5a:4c00::4000:2"];

/// Runs `work` in a network namespace with the instances' addresses. A thread of its own, since a namespace is a
/// thread's.
fn with_programs(name: &str, work: impl FnOnce(&Unconnected, &Path) + Send) {
    if !Uid::effective().is_root() {
        eprintln!("skipped: eBPF needs root");
        return;
    }
    let mounts = fs::read_to_string("/proc/self/mounts").expect("mounts");
    let found = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>()).find(|words| words[2] == "cgroup2");
    let Some(root) = found.map(|words| PathBuf::from(words[1])) else {
        eprintln!("skipped: no cgroup file system of version 2");
        return;
    };
    let pins = std::env::temp_dir().join(format!("margay-unconnected-{}-{name}", std::process::id()));
    std::thread::scope(|scope| {
        let there = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace");
            let ip = |arguments: &str| {
                let done = Command::new("ip").args(arguments.split(' ')).status().expect("iproute2");
                assert!(done.success(), "ip {arguments}");
            };
            ip("link set lo up");
            INSTANCES.iter().for_each(|address| ip(&format!("addr add {address} dev lo")));
            KernelCache::prepare(&pins).expect("a place for pins");
            let programs = Unconnected::open(&root, &pins, 0, Ranges::USUAL).expect("the kernel takes the programs");
            work(&programs, &root);
        });
        let result = there.join();
        Unconnected::remove_pins(&pins);
        KernelCache::remove_pins(&pins);
        result.expect("the test in the namespace");
    });
}

fn socket(address: &str) -> UdpSocket {
    let socket = UdpSocket::bind((address.parse::<IpAddr>().expect("literal"), 0)).expect("a socket");
    socket.set_read_timeout(Some(PATIENCE)).expect("a time limit");
    socket
}

/// Two servers with one port.
fn servers(first: &str, second: &str) -> (UdpSocket, UdpSocket, u16) {
    let first = socket(first);
    let port = first.local_addr().expect("bound").port();
    let second = UdpSocket::bind((second.parse::<IpAddr>().expect("literal"), port)).expect("the same port");
    second.set_read_timeout(Some(PATIENCE)).expect("a time limit");
    (first, second, port)
}

fn receive(socket: &UdpSocket) -> Option<(String, SocketAddr)> {
    let mut buffer = [0; 100];
    let (len, from) = socket.recv_from(&mut buffer).ok()?;
    Some((String::from_utf8_lossy(&buffer[..len]).into_owned(), from))
}

fn drain(socket: &UdpSocket) -> usize {
    socket.set_read_timeout(Some(Duration::from_millis(1))).expect("a time limit");
    std::iter::from_fn(|| receive(socket)).count()
}

fn spread_over(programs: &Unconnected, name: SocketAddr, instances: &[&str], client: &UdpSocket) {
    let (first, second, port) = servers(instances[0], instances[1]);
    let name = SocketAddr::new(name.ip(), port);
    let addresses: Vec<(IpAddr, u32)> =
        instances.iter().map(|address| (address.parse().expect("literal"), 100)).collect();
    programs.spread(name, &addresses, false).expect("room");
    for _ in 0..200 {
        client.send_to(b"one", name).expect("sent");
    }
    let (of_first, of_second) = (drain(&first), drain(&second));
    assert_eq!(of_first + of_second, 200);
    assert!(of_first > 50 && of_second > 50, "{of_first} {of_second}");

    // Sticky: a socket keeps to one of them, sockets differ.
    programs.spread(name, &addresses, true).expect("room");
    let ip = client.local_addr().expect("bound").ip().to_string();
    let many: Vec<UdpSocket> = (0..16).map(|_| socket(&ip)).collect();
    let mut both = [0, 0];
    for socket in &many {
        for _ in 0..5 {
            socket.send_to(b"six", name).expect("sent");
        }
        let counts = (drain(&first), drain(&second));
        assert!(counts == (5, 0) || counts == (0, 5), "{counts:?}");
        both[usize::from(counts.0 == 0)] += 1;
    }
    assert!(both[0] > 0 && both[1] > 0, "{both:?}");
    programs.spread(name, &addresses, false).expect("room");

    // One of them goes; from that moment nothing comes to it.
    programs.spread(name, &addresses[1..], false).expect("room");
    for _ in 0..100 {
        client.send_to(b"two", name).expect("sent");
    }
    assert_eq!((drain(&first), drain(&second)), (0, 100));

    // The answer is the name's.
    second.send_to(b"answer", client.local_addr().map(|own| to_loopback(own, name)).expect("bound")).expect("sent");
    let (_, from) = receive(client).expect("answered");
    assert_eq!(SocketAddr::new(from.ip().to_canonical(), from.port()), name);
}

/// The client's address as a server on this host writes to it.
fn to_loopback(own: SocketAddr, name: SocketAddr) -> SocketAddr {
    let host: IpAddr = if name.is_ipv4() { "127.0.0.1" } else { "::1" }.parse().expect("literal");
    SocketAddr::new(host, own.port())
}

#[test]
fn datagrams_are_spread_in_both_families_and_answers_are_the_names() {
    with_programs("spread", |programs, _| {
        let v4 = SocketAddr::new(NAME_V4.parse().expect("literal"), 0);
        let v6 = SocketAddr::new(NAME_V6.parse().expect("literal"), 0);
        spread_over(programs, v4, &INSTANCES[..2], &socket("0.0.0.0"));
        spread_over(programs, v6, &INSTANCES[2..], &socket("::"));
        assert_eq!(programs.spreads().len(), 2);
        assert!(programs.spreads().iter().all(|(_, idle)| *idle < PATIENCE));
        assert_eq!(programs.faces().len(), 4);
    });
}

#[test]
fn what_is_not_spread_is_asked_about_once_and_strangers_are_left_alone() {
    with_programs("asked", |programs, _| {
        let client = socket("0.0.0.0");
        let name: SocketAddr = "198.18.5.5:99".parse().expect("literal");
        for _ in 0..10 {
            // There is no route to it here.
            let _ = client.send_to(b"who", name);
        }
        let mut fds = [PollFd::new(programs.questions(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut fds, PollTimeout::from(5000_u16)), Ok(1));
        assert_eq!(programs.take(), [name]);
        let other = socket("127.0.0.1");
        client.send_to(b"plain", other.local_addr().expect("bound")).expect("sent");
        assert_eq!(receive(&other).expect("came").0, "plain");
        assert!(programs.take().is_empty());
    });
}

#[test]
fn a_socket_that_began_before_a_sticky_name_was_spread_stays_where_it_was() {
    with_programs("early", |programs, _| {
        // The name's own address leads to a socket here, as to the name's flow where there is an agent.
        let done = Command::new("ip").args(["addr", "add", NAME_V4, "dev", "lo"]).status().expect("iproute2");
        assert!(done.success());
        let (own, instance, port) = servers(NAME_V4, INSTANCES[0]);
        let name = SocketAddr::new(NAME_V4.parse().expect("literal"), port);
        let (early, late) = (socket("0.0.0.0"), socket("0.0.0.0"));
        early.send_to(b"first", name).expect("sent");
        assert_eq!(programs.take(), [name]);
        let only = [(INSTANCES[0].parse().expect("literal"), 1)];
        programs.spread(name, &only, true).expect("room");
        for socket in [&early, &late, &early] {
            socket.send_to(b"then", name).expect("sent");
        }
        assert_eq!((drain(&own), drain(&instance)), (3, 1));
        programs.spread(name, &only, false).expect("room");
        early.send_to(b"each for itself", name).expect("sent");
        assert_eq!((drain(&own), drain(&instance)), (0, 1));
    });
}

#[test]
fn a_socket_goes_on_with_the_port_that_answered_it() {
    with_programs("heard", |programs, _| {
        let client = socket("0.0.0.0");
        let (first, second, port) = servers(INSTANCES[0], INSTANCES[1]);
        let name = SocketAddr::new(NAME_V4.parse().expect("literal"), port);
        let addresses: Vec<(IpAddr, u32)> =
            INSTANCES[..2].iter().map(|address| (address.parse().expect("literal"), 1)).collect();
        programs.spread(name, &addresses, false).expect("room");
        client.send_to(b"read", name).expect("sent");
        // Whoever it was, the second server answers from a new port, as TFTP's do.
        let transfer = socket(INSTANCES[1]);
        transfer.send_to(b"block", to_loopback(client.local_addr().expect("bound"), name)).expect("sent");
        let (_, from) = receive(&client).expect("answered");
        assert_eq!(from, SocketAddr::new(name.ip(), transfer.local_addr().expect("bound").port()));
        for _ in 0..20 {
            client.send_to(b"more", from).expect("sent");
        }
        assert_eq!(drain(&transfer), 20);
        client.connect(from).expect("connected");
        assert_eq!(client.peer_addr().expect("connected"), from);
        client.send(b"most").expect("sent");
        assert_eq!(drain(&transfer), 1);
        drop((first, second));
    });
}

#[test]
fn a_server_knows_its_clients_by_their_real_addresses_and_answers_there() {
    with_programs("clients", |programs, _| {
        // Where an agent has a flow, the client's datagrams come from a surrogate: here, from a socket that is bound to
        // one.
        let client = socket(INSTANCES[0]);
        let surrogate = client.local_addr().expect("bound");
        let real = SocketAddr::new("10.9.9.9".parse().expect("literal"), surrogate.port());
        let server = socket("0.0.0.0");
        let at: SocketAddr =
            format!("127.0.0.1:{}", server.local_addr().expect("bound").port()).parse().expect("an address");
        programs.show_client(surrogate, real.ip()).expect("room");
        client.send_to(b"ask", at).expect("sent");
        assert_eq!(receive(&server).expect("came"), ("ask".to_owned(), real));
        server.send_to(b"answer", real).expect("sent");
        assert_eq!(receive(&client).expect("answered").0, "answer");
        // Servers answer from other sockets, and connect them.
        let other = socket("0.0.0.0");
        other.connect(real).expect("connected");
        assert_eq!(other.peer_addr().expect("connected"), real);
        other.send(b"more").expect("sent");
        let (text, from) = receive(&client).expect("answered");
        client.send_to(b"got it", from).expect("sent");
        assert_eq!((text.as_str(), receive(&other).map(|(text, _)| text)), ("more", Some("got it".to_owned())));

        // The same socket has another flow: it is the same client, and is answered where it was heard last.
        let second =
            UdpSocket::bind((INSTANCES[1].parse::<IpAddr>().expect("literal"), surrogate.port())).expect("free");
        second.set_read_timeout(Some(PATIENCE)).expect("a time limit");
        programs.show_client(second.local_addr().expect("bound"), real.ip()).expect("room");
        for asker in [&client, &second, &client] {
            asker.send_to(b"ask", at).expect("sent");
            assert_eq!(receive(&server).expect("came").1, real);
            server.send_to(b"answer", real).expect("sent");
            assert_eq!(receive(asker).expect("answered").0, "answer");
        }
        programs.hide_client(second.local_addr().expect("bound"), at.port());
        server.send_to(b"answer", real).expect("sent");
        assert_eq!(receive(&client).expect("answered").0, "answer");
        programs.hide_client(surrogate, at.port());
        assert!(programs.shown().is_empty());
        client.send_to(b"ask", at).expect("sent");
        assert_eq!(receive(&server).expect("came").1, surrogate);
    });
}

#[test]
fn a_client_that_uses_its_port_again_without_margay_is_answered_without_it() {
    with_programs("again", |programs, _| {
        let done = Command::new("ip").args(["addr", "add", "10.9.9.9", "dev", "lo"]).status().expect("iproute2");
        assert!(done.success());
        let client = socket(INSTANCES[0]);
        let surrogate = client.local_addr().expect("bound");
        let real = SocketAddr::new("10.9.9.9".parse().expect("literal"), surrogate.port());
        // The client's port again, by which the client's host sends without Margay.
        let plain = UdpSocket::bind(real).expect("free");
        plain.set_read_timeout(Some(PATIENCE)).expect("a time limit");
        let at = |server: &UdpSocket| {
            SocketAddr::new(Ipv4Addr::LOCALHOST.into(), server.local_addr().expect("bound").port())
        };
        let (served, other, fresh) = (socket("0.0.0.0"), socket("0.0.0.0"), socket("0.0.0.0"));
        programs.show_client(surrogate, real.ip()).expect("room");
        client.send_to(b"ask", at(&served)).expect("sent");
        assert_eq!(receive(&served).expect("came").1, real);

        plain.send_to(b"plain", at(&other)).expect("sent");
        assert_eq!(receive(&other).expect("came").1, real);
        other.send_to(b"answer", real).expect("sent");
        assert_eq!(receive(&plain).expect("answered without").0, "answer");
        // A port that has heard the client by its flow is not led away from it: who sends plainly may be anybody.
        plain.send_to(b"forged", at(&served)).expect("sent");
        assert_eq!(receive(&served).expect("came").0, "forged");
        for server in [&served, &fresh] {
            server.send_to(b"sealed", real).expect("sent");
            assert_eq!(receive(&client).expect("by the flow").0, "sealed");
        }
        // The flow comes to the other one, too.
        client.send_to(b"ask", at(&other)).expect("sent");
        assert_eq!(receive(&other).expect("came").1, real);
        other.send_to(b"sealed", real).expect("sent");
        assert_eq!(receive(&client).expect("by the flow").0, "sealed");
        programs.hide_client(surrogate, at(&other).port());
        programs.keep_clients(|_| false);
        for server in [&served, &other, &fresh] {
            server.send_to(b"answer", real).expect("sent");
            assert_eq!(receive(&plain).expect("answered without").0, "answer");
        }
    });
}

#[test]
fn a_client_that_cannot_be_noted_is_known_by_its_surrogate() {
    with_programs("full", |programs, _| {
        let done = Command::new("ip").args(["addr", "add", "10.9.9.9", "dev", "lo"]).status().expect("iproute2");
        assert!(done.success());
        let client = socket(INSTANCES[0]);
        let surrogate = client.local_addr().expect("bound");
        let real = SocketAddr::new("10.9.9.9".parse().expect("literal"), surrogate.port());
        let server = socket("0.0.0.0");
        let at = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), server.local_addr().expect("bound").port());
        programs.show_client(surrogate, real.ip()).expect("room");
        let value = layout::value_of(surrogate.ip());
        let surrogates = &programs.skeleton.maps.surrogates;
        let is_full = (0..1_u32 << 20).any(|number| {
            let other = SocketAddr::new(Ipv4Addr::from(number).into(), 1);
            surrogates.update(layout::client_key_of(other, 1).bytes(), value.bytes(), MapFlags::ANY).is_err()
        });
        assert!(is_full);
        client.send_to(b"ask", at).expect("sent");
        assert_eq!(receive(&server).expect("came"), ("ask".to_owned(), surrogate));
        // A datagram in the client's name leads nothing away that is for the client.
        let plain = UdpSocket::bind(real).expect("free");
        plain.send_to(b"forged", at).expect("sent");
        assert_eq!(receive(&server).expect("came"), ("forged".to_owned(), real));
        server.send_to(b"sealed", surrogate).expect("sent");
        assert_eq!(receive(&client).expect("by the flow").0, "sealed");
    });
}

#[test]
fn the_next_agent_finds_what_was_spread_and_nothing_is_left_when_it_is_taken_off() {
    with_programs("kept", |programs, root| {
        let name: SocketAddr = "198.18.5.5:99".parse().expect("literal");
        programs.spread(name, &[(INSTANCES[0].parse().expect("literal"), 1)], false).expect("room");
        let pins = std::env::temp_dir().join(format!("margay-unconnected-{}-kept", std::process::id()));
        let next = Unconnected::open(root, &pins, 0, Ranges::USUAL).expect("taken over");
        assert_eq!(next.spreads().iter().map(|(name, _)| *name).collect::<Vec<_>>(), [name]);
        next.gather(name);
        next.forget(INSTANCES[0].parse().expect("literal"));
        assert!(programs.spreads().is_empty() && programs.faces().is_empty());
    });
}

#[test]
fn what_is_bound_to_a_card_does_not_reach_names_and_hears_so_at_once() {
    with_programs("bound", |_, _| {
        let name = SocketAddr::new(INSTANCES[0].parse().expect("literal"), 9);
        let plain = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 9);
        let refused =
            |result: std::io::Result<usize>| result.expect_err("refused").raw_os_error() == Some(libc::ENETUNREACH);
        let free = socket("0.0.0.0");
        free.send_to(b"x", name).expect("nothing is bound");
        let bound = socket("0.0.0.0");
        nix::sys::socket::setsockopt(&bound, nix::sys::socket::sockopt::BindToDevice, &"lo".into()).expect("root may");
        assert!(refused(bound.send_to(b"x", name)));
        assert!(refused(bound.connect(name).map(|()| 0)));
        bound.send_to(b"x", plain).expect("what is no name is the card's");
        let unicast = socket("0.0.0.0");
        let index = nix::net::if_::if_nametoindex("lo").expect("there is one").to_be();
        // SAFETY: the option reads the four bytes of `index`, which lives across the call.
        let set = unsafe {
            libc::setsockopt(
                unicast.as_raw_fd(),
                libc::IPPROTO_IP,
                libc::IP_UNICAST_IF,
                (&raw const index).cast(),
                size_of::<u32>() as libc::socklen_t,
            )
        };
        assert_eq!(set, 0);
        assert!(refused(unicast.send_to(b"x", name)));
        let stream = bound_stream();
        assert!(refused(stream.map(|()| 0)));
    });
}

/// A connect of TCP to a name by a socket that is bound to a card.
fn bound_stream() -> std::io::Result<()> {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, connect, setsockopt, socket, sockopt};
    let stream = socket(AddressFamily::Inet, SockType::Stream, SockFlag::empty(), None)?;
    setsockopt(&stream, sockopt::BindToDevice, &"lo".into())?;
    let name: std::net::SocketAddrV4 = format!("{}:9", INSTANCES[0]).parse().expect("literal");
    Ok(connect(stream.as_raw_fd(), &SockaddrIn::from(name))?)
}
