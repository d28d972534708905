//! Two hosts, each a network namespace with a real TUN and a real UDP port, and real programs' sockets on both.
//!
//! Every test runs itself once more inside of namespaces of its own (`unshare`), as root or without.
#![allow(clippy::unwrap_used)] // A test may say so: any failure here is a failed test.

mod mirror;
mod namespace;

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread;
use std::time::{Duration, Instant};

use margay_core::entry::{GRANT_RECORD_LEN, GrantKey};
use margay_core::{Direction, Grant, PathId, Ranges, Role, Tuple};
use margay_datapath::direct::{Route, Routing};
use margay_datapath::kernel::{CacheConfig, Interface, KernelCache, WireFlow, WirePath};
use margay_datapath::{Counters, Datapath, DatapathConfig, Error, clock};
use margay_wire::FlowId;
use mirror::{Heard, Mirror};
use namespace::{Host, OWN_V4, OWN_V6, PATIENCE, await_running, ip, isolated, pattern, two_hosts};
use rustix::net;

struct Network {
    hosts: [Host; 2],
    datapaths: [Datapath<Mirror>; 2],
    heard: [Receiver<Heard>; 2],
}

/// What the client calls the server, and the server the client.
const PEER_V4: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 9);
const PEER_V6: Ipv6Addr = Ipv6Addr::new(0xfd5a, 0x4c00, 0, 0, 0, 0, 0, 9);

/// The server's five-tuple of a flow whose client has `tuple`, in IPv4 or IPv6.
fn translated(tuple: Tuple, v4: bool) -> Tuple {
    let (client, server) = if v4 { (PEER_V4.into(), OWN_V4.into()) } else { (PEER_V6.into(), OWN_V6.into()) };
    let translate = |address: SocketAddr| {
        let is_server = [IpAddr::from(PEER_V4), IpAddr::from(PEER_V6)].contains(&address.ip());
        SocketAddr::new(if is_server { server } else { client }, address.port())
    };
    Tuple { protocol: tuple.protocol, source: translate(tuple.source), destination: translate(tuple.destination) }
}

fn network(remote: [&'static str; 2], to_v4: bool, scan_ms: u64) -> Network {
    routed(remote, to_v4, scan_ms, [None, None])
}

/// The same, where the datapaths know that everything leaves by `eth0` with these addresses.
fn routed(remote: [&'static str; 2], to_v4: bool, scan_ms: u64, locals: [Option<IpAddr>; 2]) -> Network {
    let hosts = two_hosts();
    let translate: fn(Tuple) -> Tuple =
        if to_v4 { |tuple| translated(tuple, true) } else { |tuple| translated(tuple, false) };
    let mut started = [0, 1].map(|at| {
        let (mirror, heard) = Mirror::new(remote[at].parse().unwrap(), 1452, translate);
        let datapath = hosts[at].run(move || {
            let link = locals[at].map(|local| OneLink { local, ifindex: eth0() });
            let routing = link.map(|link| Box::new(link) as Box<dyn Routing>);
            let config = DatapathConfig { activity_scan_ms: scan_ms, routing, ..DatapathConfig::default() };
            let datapath = Datapath::start(config, mirror, Box::new(|_| ())).unwrap();
            datapath.begin();
            await_running();
            datapath
        });
        Some((datapath, heard))
    });
    let [first, second] = [0, 1].map(|at| started[at].take().unwrap());
    Network { hosts, datapaths: [first.0, second.0], heard: [first.1, second.1] }
}

/// Everything leaves by one interface.
struct OneLink {
    local: IpAddr,
    ifindex: u32,
}

impl Routing for OneLink {
    fn route(&self, remote: IpAddr, _: Option<IpAddr>) -> Option<Route> {
        Some(Route { local: self.local, next_hop: remote, ifindex: self.ifindex, mtu: 1500 })
    }

    fn is_up(&self, _: IpAddr) -> bool {
        true
    }

    fn forget_neighbour(&self, _: u32, _: IpAddr) {}
}

fn eth0() -> u32 {
    nix::net::if_::if_nametoindex("eth0").unwrap()
}

const UNDERLAY_V4: [&str; 2] = ["10.77.0.2:54324", "10.77.0.1:54324"];
const UNDERLAY_V6: [&str; 2] = ["[fd77::2]:54324", "[fd77::1]:54324"];

fn server_address(v4: bool) -> IpAddr {
    if v4 { PEER_V4.into() } else { PEER_V6.into() }
}

fn own_address(v4: bool) -> IpAddr {
    if v4 { OWN_V4.into() } else { OWN_V6.into() }
}

/// A client on the first host, a server on the second that sends back what it gets; `midway` is called when about half
/// has passed.
fn echo(hosts: &[Host; 2], from_v4: bool, to_v4: bool, len: usize, midway: impl FnOnce()) -> SocketAddr {
    let listener = hosts[1].run(move || TcpListener::bind((own_address(to_v4), 80)).unwrap());
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut buffer = vec![0; 1 << 16];
        loop {
            match stream.read(&mut buffer).unwrap() {
                0 => return,
                count => stream.write_all(&buffer[..count]).unwrap(),
            }
        }
    });
    let address = SocketAddr::new(server_address(from_v4), 80);
    let mut stream = hosts[0].run(move || TcpStream::connect(address).unwrap());
    let own = stream.local_addr().unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut writer = stream.try_clone().unwrap();
    let sender = thread::spawn(move || {
        writer.write_all(&pattern(len)).unwrap();
        writer.shutdown(std::net::Shutdown::Write).unwrap();
    });
    let mut received = vec![0; len / 2];
    stream.read_exact(&mut received).unwrap();
    midway();
    stream.read_to_end(&mut received).unwrap();
    assert!(received == pattern(len), "the bytes are the same");
    sender.join().unwrap();
    server.join().unwrap();
    own
}

fn counters(network: &Network) -> [Counters; 2] {
    [0, 1].map(|at| network.datapaths[at].counters())
}

/// Waits until the datapath of a host has told its core something that `wanted` picks.
fn hear(network: &Network, host: usize, wanted: impl Fn(&Heard) -> bool) -> Heard {
    loop {
        let heard = network.heard[host].recv_timeout(PATIENCE).expect("the core hears of it in time");
        if wanted(&heard) {
            return heard;
        }
    }
}

#[test]
fn streams_of_every_family_over_every_underlay() {
    isolated("streams_of_every_family_over_every_underlay", || {
        for (underlay, to_v4) in [(UNDERLAY_V4, true), (UNDERLAY_V4, false), (UNDERLAY_V6, true), (UNDERLAY_V6, false)]
        {
            let network = network(underlay, to_v4, 60_000);
            for from_v4 in [true, false] {
                let own = echo(&network.hosts, from_v4, to_v4, 12 << 20, || ());
                let flow = margay_wire::FlowId(own.port().into());
                // Both FINs are reported on both hosts, once the segments have passed.
                for host in [0, 1] {
                    let mut ways = Vec::new();
                    while !(ways.contains(&Direction::Egress) && ways.contains(&Direction::Ingress)) {
                        let is_fin = |heard: &Heard| matches!(heard, Heard::Passed(id, _, flags) if *id == flow && flags & 1 != 0);
                        if let Heard::Passed(_, way, _) = hear(&network, host, is_fin) {
                            ways.push(way);
                        }
                    }
                }
                let carried = network.datapaths[0].flow_counters(flow).unwrap();
                assert!(carried.egress_bytes >= 12 << 20 && carried.ingress_bytes >= 12 << 20, "{carried:?}");
                // Super-packets, not segments, pass through user space.
                let [first, _] = counters(&network);
                assert!(first.egress_packets < carried.egress_segments, "{first:?} {carried:?}");
            }
            network.datapaths.into_iter().for_each(Datapath::stop);
        }
    });
}

#[test]
fn an_emptied_cache_costs_no_byte() {
    isolated("an_emptied_cache_costs_no_byte", || {
        let network = network(UNDERLAY_V4, true, 60_000);
        let misses = || counters(&network).iter().map(|host| host.egress_misses + host.ingress_misses).sum::<u64>();
        let mut before = 0;
        echo(&network.hosts, true, true, 8 << 20, || {
            // Afterwards some may have been brought back already.
            before = misses();
            network.datapaths.iter().for_each(Datapath::clear_cache);
        });
        assert!(misses() > before, "entries were brought back");
    });
}

#[test]
fn a_path_that_shrinks() {
    isolated("a_path_that_shrinks", || {
        for underlay in [UNDERLAY_V4, UNDERLAY_V6] {
            let network = network(underlay, true, 60_000);
            echo(&network.hosts, true, true, 8 << 20, || {
                for host in &network.hosts {
                    host.run(|| ip("link set eth0 mtu 1300"));
                }
            });
            // A fast machine may have carried all of it before the links were as narrow.
            echo(&network.hosts, true, true, 1 << 20, || ());
            let [first, second] = counters(&network);
            assert!(first.paths_shrunk > 0 || second.paths_shrunk > 0, "{first:?} {second:?}");
        }
    });
}

/// Sends until something arrives: the kernel discards what is sent to a TUN before it has noticed that somebody holds
/// it.
fn await_passage(client: &UdpSocket, server: &UdpSocket, to: SocketAddr) {
    let mut buffer = [0; 16];
    server.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let mut tries = 0..200;
    while server.recv_from(&mut buffer).is_err() {
        tries.next().expect("a datagram arrives within twenty seconds");
        client.send_to(b"hello", to).unwrap();
    }
    while server.recv_from(&mut buffer).is_ok() {}
    server.set_read_timeout(Some(PATIENCE)).unwrap();
}

#[test]
fn datagrams_of_every_size() {
    isolated("datagrams_of_every_size", || {
        for to_v4 in [true, false] {
            let network = network(UNDERLAY_V4, to_v4, 50);
            let server = network.hosts[1].run(move || UdpSocket::bind((own_address(to_v4), 53)).unwrap());
            server.set_read_timeout(Some(PATIENCE)).unwrap();
            for from_v4 in [true, false] {
                let client = network.hosts[0].run(move || UdpSocket::bind((own_address(from_v4), 0)).unwrap());
                client.set_read_timeout(Some(PATIENCE)).unwrap();
                let to = SocketAddr::new(server_address(from_v4), 53);
                await_passage(&client, &server, to);
                for len in [0, 1, 1400, 1430, 1500, 9000, 60_000] {
                    client.send_to(&pattern(len), to).unwrap();
                    let mut buffer = vec![0; 65_536];
                    let (count, from) = server.recv_from(&mut buffer).unwrap();
                    assert!(buffer[..count] == pattern(len), "{len} bytes arrive");
                    server.send_to(&buffer[..count], from).unwrap();
                    let (count, from) = client.recv_from(&mut buffer).unwrap();
                    assert!(from == to && buffer[..count] == pattern(len), "{len} bytes come back");
                }
                let flow = margay_wire::FlowId(client.local_addr().unwrap().port().into());
                hear(&network, 0, |heard| *heard == Heard::Active(flow));
            }
            assert!(counters(&network)[0].fragments > 0);
        }
    });
}

#[test]
fn signalling_and_timers_reach_the_core() {
    isolated("signalling_and_timers_reach_the_core", || {
        let network = network(UNDERLAY_V6, true, 60_000);
        let datagram = [1, 1, 0, 59, 0, 20, 0, 0];
        network.datapaths[0].with_sal(|core, _| core.transmit(&datagram));
        let heard = hear(&network, 1, |heard| matches!(heard, Heard::Signalling(_)));
        assert_eq!(heard, Heard::Signalling(datagram.to_vec()));
        network.datapaths[1].with_sal(|core, now| core.deadline = Some(now + Duration::from_millis(30)));
        let before = clock::now();
        hear(&network, 1, |heard| *heard == Heard::Timeout);
        assert!(clock::now().since(before) < Duration::from_secs(2));
        // Strangers' garbage harms nobody: an empty datagram, one byte, DATA that is none.
        network.hosts[0].run(|| {
            let stranger = UdpSocket::bind("[::]:0").unwrap();
            for bytes in [&[][..], &[1], &[1, 32], &[0xff; 1200], &[1, 32, 2, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1]] {
                stranger.send_to(bytes, "[fd77::2]:54324").unwrap();
            }
        });
        let garbage = hear(&network, 1, |heard| matches!(heard, Heard::Signalling(_)));
        assert_eq!(garbage, Heard::Signalling(vec![0xff; 1200]));
        echo(&network.hosts, true, true, 1 << 20, || ());
    });
}

const FIN: u8 = 1;
const ACK: u8 = 16;

/// A segment without payload and with the number 1, past the sender's TCP.
fn send_segment(from: (Ipv4Addr, u16), to: (Ipv4Addr, u16), flags: u8, acknowledgement: u32) {
    let mut packet = vec![0x45, 0, 0, 40, 0, 1, 0x40, 0, 64, 6, 0, 0];
    packet.extend([from.0.octets(), to.0.octets()].concat());
    packet.extend([from.1.to_be_bytes(), to.1.to_be_bytes()].concat());
    packet.extend([1, acknowledgement].map(u32::to_be_bytes).concat());
    packet.extend([0x50, flags, 255, 255, 0, 0, 0, 0]);
    let socket = net::socket(net::AddressFamily::INET, net::SocketType::RAW, Some(net::ipproto::RAW)).unwrap();
    net::sendto(&socket, &packet, net::SendFlags::empty(), &SocketAddr::new(to.0.into(), 0)).unwrap();
}

/// Waits until a FIN of the peer's, after which this number comes, waits for its acknowledgement.
fn await_fin(cache: &KernelCache, flow: FlowId, end: u32) {
    let begun = Instant::now();
    while cache.state(flow).is_none_or(|state| state.unjudged.end != Some(end)) {
        assert!(begun.elapsed() < PATIENCE, "the FIN waits for its acknowledgement");
        thread::yield_now();
    }
}

/// An agent that starts has its programs put in the place of those of the agent before; what those see until then they
/// tell to a ring that nobody reads.
#[test]
fn an_end_that_nobody_was_told_of_is_found() {
    isolated("an_end_that_nobody_was_told_of_is_found", || {
        if !nix::unistd::geteuid().is_root() {
            return eprintln!("skipped: eBPF needs root");
        }
        let network = network(UNDERLAY_V4, true, 20);
        let pin_dir = std::env::temp_dir().join(format!("margay-two-hosts-{}", std::process::id()));
        let place = pin_dir.clone();
        let ([used, other], path) = network.hosts[0].run(move || {
            let eth0 = eth0();
            let config = small_cache(eth0, place);
            let [used, other] = [0, 1].map(|_| KernelCache::open(&config).unwrap());
            other.set_local_addresses(&["10.77.0.1".parse().unwrap()]);
            other.attach().unwrap();
            let (local, remote) = ("10.77.0.1".parse().unwrap(), "10.77.0.2".parse().unwrap());
            let path = WirePath {
                local,
                remote,
                next_hop: remote,
                ifindex: eth0,
                mtu: 1500,
                stall_us: 200_000,
                held: false,
                watched: false,
            };
            used.set_path(PathId(9), &WirePath { remote: "10.77.0.9".parse().unwrap(), ..path }).unwrap();
            ([used, other], path)
        });
        let app = Tuple { protocol: 6, source: (OWN_V4, 40_000).into(), destination: (PEER_V4, 80).into() };
        let flow = WireFlow {
            flow: FlowId(40_000),
            generation: 1,
            app: app.into(),
            path: PathId(1),
            local_port: 61_001,
            remote_port: 61_002,
            egress: true,
            accept: true,
            by_sal0: false,
            of_socket: false,
            delta: None,
        };
        let used = Arc::new(used);
        network.datapaths[0].use_cache(Some(Arc::clone(&used)));
        assert_eq!(used.paths().count(), 0, "a path of the agent before");
        for id in [1, 2] {
            used.set_path(PathId(id), &path).unwrap();
        }
        used.remove_path(PathId(2));
        used.install(&flow).unwrap();
        other.heartbeat();
        let (here, there) = (Ipv4Addr::new(10, 77, 0, 1), Ipv4Addr::new(10, 77, 0, 2));
        network.hosts[1].run(move || send_segment((there, 61_002), (here, 61_001), FIN | ACK, 1));
        await_fin(&used, flow.flow, 2);
        network.hosts[0].run(|| send_segment((OWN_V4, 40_000), (PEER_V4, 80), ACK, 2));
        hear(&network, 0, |heard| *heard == Heard::Passed(flow.flow, Direction::Ingress, 1));
        used.install(&WireFlow { path: PathId(3), generation: 2, ..flow }).unwrap();
        let ends = used.state(flow.flow).map(|state| state.seen.ends().collect::<Vec<_>>());
        assert_eq!(ends, Some(vec![(Direction::Ingress, 1)]), "it goes with the flow to another path");
        drop(other);
        KernelCache::remove_pins(&pin_dir);
    });
}

/// A FIN of the peer's comes by the kernel's cache, which forgets its flow then: the acknowledgement goes by user
/// space.
#[test]
fn a_fin_that_waits_in_the_kernel_goes_with_its_flow_to_user_space() {
    isolated("a_fin_that_waits_in_the_kernel_goes_with_its_flow_to_user_space", || {
        if !nix::unistd::geteuid().is_root() {
            return eprintln!("skipped: eBPF needs root");
        }
        let network = network(UNDERLAY_V4, true, 20);
        let pin_dir = std::env::temp_dir().join(format!("margay-waiting-fin-{}", std::process::id()));
        let place = pin_dir.clone();
        let cache = network.hosts[0].run(move || {
            let cache = KernelCache::open(&small_cache(eth0(), place)).unwrap();
            cache.set_local_addresses(&["10.77.0.1".parse().unwrap()]);
            cache
        });
        let cache = Arc::new(cache);
        network.datapaths[0].use_cache(Some(Arc::clone(&cache)));
        let (local, remote) = ("10.77.0.1".parse().unwrap(), "10.77.0.2".parse().unwrap());
        let ifindex = network.hosts[0].run(eth0);
        let path = WirePath {
            local,
            remote,
            next_hop: remote,
            ifindex,
            mtu: 1500,
            stall_us: 200_000,
            held: false,
            watched: false,
        };
        cache.set_path(PathId(1), &path).unwrap();
        let flow = FlowId(40_000);
        let (own, peer) = ((OWN_V4, 40_000), (PEER_V4, 80));
        let app = Tuple { protocol: 6, source: own.into(), destination: peer.into() };
        network.hosts[0].run(move || send_segment(own, peer, ACK, 1));
        hear(&network, 0, |heard| *heard == Heard::Active(flow));
        let wired = WireFlow {
            flow,
            generation: 2,
            app: app.into(),
            path: PathId(1),
            local_port: 61_001,
            remote_port: 61_002,
            egress: true,
            accept: true,
            by_sal0: false,
            of_socket: false,
            delta: None,
        };
        cache.install(&wired).unwrap();
        let (here, there) = (Ipv4Addr::new(10, 77, 0, 1), Ipv4Addr::new(10, 77, 0, 2));
        network.hosts[1].run(move || send_segment((there, 61_002), (here, 61_001), FIN | ACK, 1));
        await_fin(&cache, flow, 2);
        network.datapaths[0].with_sal(|core, _| core.encapsulate(flow));
        assert_eq!(cache.state(flow), None, "the kernel has forgotten it");
        network.hosts[0].run(move || send_segment(own, peer, ACK, 2));
        hear(&network, 0, |heard| *heard == Heard::Passed(flow, Direction::Ingress, 1));
        KernelCache::remove_pins(&pin_dir);
    });
}

/// NAT gives the packets of another socket of this host the very address of one that has a source name.
#[test]
fn only_a_named_socket_itself_sends_by_its_flow() {
    isolated("only_a_named_socket_itself_sends_by_its_flow", || {
        if !nix::unistd::geteuid().is_root() {
            return eprintln!("skipped: eBPF needs root");
        }
        let network = network(UNDERLAY_V4, true, 20);
        let pin_dir = std::env::temp_dir().join(format!("margay-named-{}", std::process::id()));
        let place = pin_dir.clone();
        let cache = network.hosts[0].run(move || KernelCache::open(&small_cache(eth0(), place)).unwrap());
        let cache = Arc::new(cache);
        network.datapaths[0].use_cache(Some(Arc::clone(&cache)));
        let (local, remote) = ("10.77.0.1".parse().unwrap(), "10.77.0.2".parse().unwrap());
        let path = WirePath {
            local,
            remote,
            next_hop: remote,
            ifindex: network.hosts[0].run(eth0),
            mtu: 1500,
            stall_us: 200_000,
            held: false,
            watched: false,
        };
        cache.set_path(PathId(1), &path).unwrap();
        let app = Tuple { protocol: 17, source: (OWN_V4, 40_000).into(), destination: (PEER_V4, 53).into() };
        let wired = WireFlow {
            flow: FlowId(40_000),
            generation: 1,
            app: app.into(),
            path: PathId(1),
            local_port: 61_001,
            remote_port: 61_002,
            egress: true,
            accept: true,
            by_sal0: false,
            of_socket: true,
            delta: None,
        };
        cache.install(&wired).unwrap();
        let say = |from: Ipv4Addr| {
            network.hosts[0].run(move || {
                let socket = UdpSocket::bind((from, 40_000)).unwrap();
                socket.send_to(b"x", (PEER_V4, 53)).unwrap();
            });
        };
        say(OWN_V4);
        assert_eq!(cache_counter(&cache, "egress_packets"), 1);
        let misses = counters(&network)[0].egress_misses;
        let elsewhere = Ipv4Addr::new(10, 9, 9, 9);
        network.hosts[0].run(move || {
            ip(&format!("address add {elsewhere}/32 dev lo"));
            let rules = format!(
                "add table ip nat; add chain ip nat post {{ type nat hook postrouting priority 100; }}; \
                 add rule ip nat post ip saddr {elsewhere} oifname sal0 snat to {OWN_V4}"
            );
            assert!(Command::new("nft").arg(rules).status().expect("nftables").success());
        });
        say(elsewhere);
        let begun = Instant::now();
        while counters(&network)[0].egress_misses == misses {
            assert!(begun.elapsed() < PATIENCE, "the agent is given it");
        }
        assert_eq!(cache_counter(&cache, "egress_packets"), 1, "it does not go direct");
        KernelCache::remove_pins(&pin_dir);
    });
}

/// A session's program goes by another flow while the peer still sends by the first one: each end's FIN, and what
/// acknowledges it, pass by different flows.
#[test]
fn a_connection_whose_way_is_changed_ends_as_any_other() {
    isolated("a_connection_whose_way_is_changed_ends_as_any_other", || {
        let network = network(UNDERLAY_V4, true, 60_000);
        let listener = network.hosts[1].run(|| TcpListener::bind((OWN_V4, 80)).unwrap());
        let mut client = network.hosts[0].run(|| TcpStream::connect((PEER_V4, 80)).unwrap());
        let (mut server, _) = listener.accept().unwrap();
        for stream in [&client, &server] {
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
        }
        let mut word = [0; 3];
        client.write_all(b"hey").unwrap();
        server.read_exact(&mut word).unwrap();
        server.write_all(b"you").unwrap();
        client.read_exact(&mut word).unwrap();
        let flow = FlowId(client.local_addr().unwrap().port().into());
        let other = FlowId(flow.0 + 100_000);
        network.datapaths[0].with_sal(|core, _| core.take_by(flow, other));
        network.datapaths[1].with_sal(|core, _| core.turn(flow, other));
        client.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(server.read(&mut word).unwrap(), 0);
        hear(&network, 1, |heard| matches!(heard, Heard::Passed(_, Direction::Ingress, 1)));
        drop(server);
        assert_eq!(client.read(&mut word).unwrap(), 0);
        loop {
            network.datapaths[1].with_sal(|core, _| core.ask_end(other));
            let heard = hear(&network, 1, |heard| matches!(heard, Heard::Over(..)));
            if heard == Heard::Over(other, true) {
                break;
            }
        }
    });
}

/// Flows are taken up, and before the datapath runs one of them is removed: its five-tuple is another's, say.
#[test]
fn what_is_removed_before_the_datapath_runs_leaves_the_kernel() {
    isolated("what_is_removed_before_the_datapath_runs_leaves_the_kernel", || {
        pinned("start", |pin_dir| {
            let hosts = two_hosts();
            let (used, _) = opened_cache(&hosts[0], pin_dir.join("0"), false);
            let app = |port| Tuple { protocol: 6, source: (OWN_V4, port).into(), destination: (PEER_V4, 80).into() };
            for number in [40_000, 40_001] {
                let flow = WireFlow {
                    flow: FlowId(number.into()),
                    generation: 1,
                    app: app(number).into(),
                    path: PathId(1),
                    local_port: number + 21_000,
                    remote_port: 61_900,
                    egress: true,
                    accept: true,
                    by_sal0: false,
                    of_socket: false,
                    delta: None,
                };
                used.install(&flow).unwrap();
            }
            let cache = Some(Arc::clone(&used));
            let datapath = hosts[0].run(move || {
                let (mut mirror, _) = Mirror::new(UNDERLAY_V4[0].parse().unwrap(), 1452, |tuple| tuple);
                mirror.remove(FlowId(40_000));
                Datapath::start(DatapathConfig { cache, ..DatapathConfig::default() }, mirror, Box::new(|_| ()))
                    .unwrap()
            });
            let left: Vec<FlowId> = used.entries().map(|state| state.flow).collect();
            assert_eq!(left, [FlowId(40_001)]);
            datapath.stop();
        });
    });
}

/// A cache of a host: the one in use, and another whose programs are in the place of its own, if the events of those
/// are to be lost.
type Opened = (Arc<KernelCache>, Option<KernelCache>);

/// Of the card `eth0` of a host.
fn small_cache(eth0: u32, pin_dir: PathBuf) -> CacheConfig {
    CacheConfig {
        sal0: "sal0".to_owned(),
        interfaces: vec![Interface::card(eth0)],
        local_addresses: Vec::new(),
        in_place: false,
        pin_dir,
        flow_ports: 61_000..=61_999,
        ranges: Ranges::USUAL,
        boxes: false,
        flows_max: 16,
    }
}

fn opened_cache(host: &Host, pin_dir: PathBuf, are_lost: bool) -> Opened {
    host.run(move || {
        let config = small_cache(eth0(), pin_dir);
        let used = KernelCache::open(&config).unwrap();
        (Arc::new(used), are_lost.then(|| KernelCache::open(&config).unwrap()))
    })
}

fn cache_counter(cache: &KernelCache, name: &str) -> u64 {
    cache.counters().iter().find(|(counter, _)| *counter == name).unwrap().1
}

/// Two hosts that have caches.
fn cached(pin_dir: &Path, are_lost: bool) -> (Network, [Opened; 2]) {
    let locals = ["10.77.0.1", "10.77.0.2"].map(|address| address.parse().ok());
    let network = routed(UNDERLAY_V4, true, 20, locals);
    // What goes direct to a neighbour that the host has yet to find is lost.
    echo(&network.hosts, true, true, 1, || ());
    let caches = [0, 1].map(|at| opened_cache(&network.hosts[at], pin_dir.join(at.to_string()), are_lost && at == 1));
    for at in [0, 1] {
        network.datapaths[at].use_cache(Some(Arc::clone(&caches[at].0)));
    }
    (network, caches)
}

/// Five-tuples of a grant's flows, at either end, as far as the grant says them.
fn granted_apps() -> [(SocketAddr, SocketAddr); 2] {
    let nobody = (Ipv4Addr::UNSPECIFIED, 0).into();
    [(nobody, (PEER_V4, 80).into()), ((OWN_V4, 80).into(), (PEER_V4, 50_000).into())]
}

/// The second host grants the first one two connections.
fn grant_two(network: &Network) {
    let [ours, theirs] = [(Role::Initiator, 61_184, 61_900), (Role::Responder, 61_900, 61_184)];
    for (at, (role, local_port, remote_port)) in [ours, theirs].into_iter().enumerate() {
        let (source, destination) = granted_apps()[at];
        let grant = Grant {
            id: FlowId(5),
            role,
            app: Tuple { protocol: 6, source, destination },
            path: PathId(1),
            local_port,
            remote_port,
            first_flow: FlowId(1000),
            count: 2,
            until: clock::now() + PATIENCE,
            ports: std::array::from_fn(|flow| 50_000 + flow as u16),
            key: GrantKey([7; 16]),
            record: [0; GRANT_RECORD_LEN],
        };
        network.datapaths[at].with_sal(|core, now| core.grant(now, grant));
    }
}

/// Two connections by a grant, one without: the grant is used up.
fn connect_by_grant(pin_dir: &Path, are_lost: bool) {
    let (network, caches) = cached(pin_dir, are_lost);
    grant_two(&network);
    let (apps, before) = (granted_apps(), counters(&network));
    for flow in 0..2 {
        let number = FlowId(1000 + flow);
        // Nobody hears of the beginning of a flow before he asks.
        let own = echo(&network.hosts, true, true, 1 << 20, || {
            for at in [0, 1] {
                if !are_lost || at == 0 {
                    hear(&network, at, |heard| *heard == Heard::Taken(FlowId(5), flow as u16 + 1));
                }
                hear(&network, at, |heard| matches!(heard, Heard::Opened(found, _) if *found == number));
            }
        });
        for (at, from, to) in [(0, own, apps[0].1), (1, apps[1].0, (PEER_V4, 50_000 + flow as u16).into())] {
            assert_eq!(
                caches[at].0.state(number).unwrap().app.tuple(),
                Tuple { protocol: 6, source: from, destination: to }
            );
            hear(&network, at, |heard| matches!(heard, Heard::Passed(id, _, 1) if *id == number));
            let state = caches[at].0.state(number).unwrap();
            assert!(state.counters.ingress_bytes >= 1 << 20 && state.counters.egress_bytes >= 1 << 20);
        }
    }
    assert_eq!(counters(&network), before, "no agent was on the way");
    echo(&network.hosts, true, true, 1 << 20, || ());
    let taken = ["taken", "opened"].map(|name| [0, 1].map(|at| cache_counter(&caches[at].0, name)));
    assert_eq!(taken, [[2, 0], [0, 2]]);
    assert!(counters(&network)[0].egress_misses > before[0].egress_misses, "the third has none left");
}

/// The agent has a SYN, and says nothing; by when TCP says it again there is a grant.
fn connect_in_vain_at_first(pin_dir: &Path) {
    let (network, caches) = cached(pin_dir, false);
    network.datapaths[0].with_sal(|core, _| core.deaf_to = 1);
    let hosts = &network.hosts;
    thread::scope(|scope| {
        let connecting = scope.spawn(move || echo(hosts, true, true, 1000, || ()));
        hear(&network, 0, |heard| *heard == Heard::InVain);
        grant_two(&network);
        connecting.join().unwrap();
    });
    assert_eq!(cache_counter(&caches[0].0, "taken"), 0, "it stays the agent's");
    // The next one is by the grant.
    echo(&network.hosts, true, true, 1000, || ());
    assert_eq!(cache_counter(&caches[0].0, "taken"), 1);
}

/// Runs `body` with a directory for pins, as root.
fn pinned(name: &str, body: fn(&Path)) {
    if !nix::unistd::geteuid().is_root() {
        return eprintln!("skipped: eBPF needs root");
    }
    let pin_dir = std::env::temp_dir().join(format!("margay-{name}-{}", std::process::id()));
    body(&pin_dir);
    for at in 0..2 {
        KernelCache::remove_pins(&pin_dir.join(at.to_string()));
    }
    std::fs::remove_dir(&pin_dir).unwrap();
}

#[test]
fn kernels_open_connections_by_themselves() {
    isolated("kernels_open_connections_by_themselves", || {
        pinned("told", |pin_dir| connect_by_grant(pin_dir, false));
        pinned("untold", |pin_dir| connect_by_grant(pin_dir, true));
    });
}

#[test]
fn what_the_agent_was_asked_for_stays_its_own() {
    isolated("what_the_agent_was_asked_for_stays_its_own", || pinned("asked", connect_in_vain_at_first));
}

#[test]
fn errors_say_what_to_do() {
    isolated("errors_say_what_to_do", || {
        let network = network(UNDERLAY_V4, true, 60_000);
        let second = network.hosts[0].run(|| {
            let mirror = || Mirror::new("10.77.0.2:54324".parse().unwrap(), 1472, |tuple| tuple).0;
            let start = |config| Datapath::start(config, mirror(), Box::new(|_| ())).map(Datapath::stop).unwrap_err();
            let same = start(DatapathConfig::default());
            let other_tun = start(DatapathConfig { tun_name: "sal1".to_owned(), ..DatapathConfig::default() });
            let small = start(DatapathConfig { datagram_max: 100, ..DatapathConfig::default() });
            let not_a_tun = start(DatapathConfig { tun_name: "eth0".to_owned(), ..DatapathConfig::default() });
            [same, other_tun, small, not_a_tun]
        });
        let [same, other_tun, small, not_a_tun] = second;
        assert!(matches!(same, Error::TunBusy { .. }), "{same}");
        let holder = format!("pid {}", std::process::id());
        assert!(
            matches!(&other_tun, Error::PortInUse { holder: found, .. } if found.starts_with(&holder)),
            "{other_tun}"
        );
        assert!(matches!(small, Error::DatagramMax { value: 100, .. }), "{small}");
        assert!(matches!(not_a_tun, Error::NotATun { .. }), "{not_a_tun}");
        // Taking the interface away ends the datapath, and says so.
        network.hosts[1].run(|| ip("link delete sal0"));
        let [_, second] = network.datapaths;
        second.wait();
        assert!(second.failure().unwrap().starts_with("margay-"), "{:?}", second.failure());
    });
}
