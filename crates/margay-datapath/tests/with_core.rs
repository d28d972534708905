//! Two hosts with the core that ships: connections by name between programs' own sockets.
#![allow(clippy::unwrap_used)] // A test may say so: any failure here is a failed test.

mod namespace;

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Instant as Stopwatch;

use margay_core::key::HostSecret;
use margay_core::name::{Name, Prefix, ServiceId};
use margay_core::rng::Rng;
use margay_core::segment::SEGMENT;
use margay_core::table::{Action, Allow, Demux, NextHop, Rule};
use margay_core::{
    ChangeCause, ChangeOutcome, ChangeRefused, Cipher, Config, DropReason, Event, FlowInfo, Lifecycle, Limits, Ranges,
    Sal, Stack,
};
use margay_datapath::segments::Segment;
use margay_datapath::{Datapath, DatapathConfig, clock, seal};
use margay_wire::Kind;
use namespace::{Host, PATIENCE, await_running, isolated, pattern, two_hosts};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};

const WEB_V4: Ipv4Addr = Ipv4Addr::new(198, 18, 5, 5);
const NOBODY_V4: Ipv4Addr = Ipv4Addr::new(198, 18, 5, 6);
/// Stands for no name at first.
const LATE_V4: Ipv4Addr = Ipv4Addr::new(198, 18, 5, 7);
const UNIX_S: u64 = 1_800_000_000;

struct Network {
    hosts: [Host; 2],
    datapaths: [Datapath; 2],
    events: [Receiver<Event>; 2],
}

fn service(name: &str) -> ServiceId {
    name.parse::<Name>().unwrap().service_id()
}

fn start(host: &Host, number: u8) -> (Datapath, Receiver<Event>) {
    let (events, receiver) = channel();
    let datapath = host.run(move || {
        let config = Config {
            host_key: HostSecret::generate(&mut Rng::new([number; 32])),
            epoch: 1,
            boot_id: [number; 16],
            router: false,
            datagram_max: 1472,
            local_addresses: vec![Ipv4Addr::new(10, 77, 0, number).into()],
            ranges: Ranges::USUAL,
            limits: Limits::default(),
        };
        let sal = Sal::new(config, clock::now(), UNIX_S, [number + 100; 32]);
        let tell = Box::new(move |event| drop(events.send(event)));
        let datapath = Datapath::start(DatapathConfig::default(), sal, tell).unwrap();
        await_running();
        datapath
    });
    (datapath, receiver)
}

/// The number of an interface of the calling thread's namespace.
fn interface(name: &str) -> u32 {
    let output = Command::new("ip").args(["-oneline", "link", "show", name]).output().unwrap();
    let line = String::from_utf8(output.stdout).unwrap();
    line.split(':').next().unwrap().parse().unwrap()
}

/// A client on the first host that knows where the service is; the second host serves it at `listener`.
fn network(listener: SocketAddr) -> Network {
    let network = network_without_service();
    serve_at(&network, listener);
    network.datapaths.iter().for_each(Datapath::begin);
    network
}

/// The second host serves nothing, and neither takes packets yet.
fn network_without_service() -> Network {
    let hosts = two_hosts();
    let [first, second] = [start(&hosts[0], 1), start(&hosts[1], 2)];
    let web = service("web.shop");
    first.0.with_sal(|sal, now| {
        let hop = NextHop { address: "10.77.0.2:54324".parse().unwrap(), host: None, router: false };
        sal.add_rule(now, web.into(), Rule { priority: 1, weight: 1, action: Action::Forward(hop) }).unwrap();
        sal.bind_name(WEB_V4.into(), web);
        sal.bind_name(NOBODY_V4.into(), service("nobody.shop"));
    });
    Network { hosts, datapaths: [first.0, second.0], events: [first.1, second.1] }
}

fn serve_at(network: &Network, listener: SocketAddr) {
    network.datapaths[1].with_sal(|sal, now| {
        let demux = Demux {
            listener,
            other_family: None,
            is_looked_up: false,
            service_port: None,
            protocol: None,
            allow: Allow::Any,
        };
        let rule = Rule { priority: 1, weight: 1, action: Action::Demux(demux) };
        sal.add_rule(now, service("web.shop").into(), rule).unwrap();
    });
}

/// Serves `count` connections, each of which gets back what it sends; gives the clients' addresses as the server saw
/// them.
fn serve(network: &Network, listener: SocketAddr, count: usize) -> thread::JoinHandle<Vec<SocketAddr>> {
    let listener = network.hosts[1].run(move || TcpListener::bind(listener).unwrap());
    thread::spawn(move || {
        let serve_one = |_| {
            let (mut stream, from) = listener.accept().unwrap();
            let serving = thread::spawn(move || {
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                let mut buffer = vec![0; 1 << 16];
                loop {
                    match stream.read(&mut buffer).unwrap() {
                        0 => return,
                        len => stream.write_all(&buffer[..len]).unwrap(),
                    }
                }
            });
            (from, serving)
        };
        let served: Vec<_> = (0..count).map(serve_one).collect();
        served
            .into_iter()
            .map(|(from, serving)| {
                serving.join().unwrap();
                from
            })
            .collect()
    })
}

/// From now on the hosts seal flows: the first because it demands it, the second because it can.
fn demand_secure(network: &Network, ciphers: [&'static [Cipher]; 2]) {
    network.datapaths[0].with_sal(|sal, _| sal.set_secure(ciphers[0], true, Vec::new()));
    network.datapaths[1].with_sal(|sal, _| sal.set_secure(ciphers[1], false, Vec::new()));
}

/// The flows of a host that are set up, and how they are sealed.
fn sealed_with(network: &Network, host: usize) -> Vec<Option<Cipher>> {
    let is_set_up = |flow: &FlowInfo| flow.lifecycle != Lifecycle::Connecting;
    network.datapaths[host].with_sal(|sal, _| sal.flows().filter(is_set_up).map(|flow| flow.secure).collect())
}

fn exchange(mut stream: TcpStream, len: usize) {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut writer = stream.try_clone().unwrap();
    let writing = thread::spawn(move || {
        writer.write_all(&pattern(len)).unwrap();
        writer.shutdown(std::net::Shutdown::Write).unwrap();
    });
    let mut received = Vec::new();
    stream.read_to_end(&mut received).unwrap();
    writing.join().unwrap();
    assert!(received == pattern(len), "the bytes are the same");
}

/// Orders a stack for the one flow at a host, and waits until the flow has it. False if the flow is being set up, or
/// ending.
fn change(network: &Network, host: usize, to: Stack) -> bool {
    let begun_at = loop {
        let (begun, now) = network.datapaths[host].with_sal(|sal, now| {
            let flow = sal.flows().next().map(|flow| flow.flow);
            (flow.map_or(Err(ChangeRefused::NotOpen), |flow| sal.set_flow_stack(now, flow, to)), now)
        });
        match begun {
            // The change before is over at the other end alone.
            Err(ChangeRefused::UnderWay) => thread::yield_now(),
            Err(ChangeRefused::NotOpen | ChangeRefused::Unconfirmed) => return false,
            begun => {
                assert_eq!(begun, Ok(true));
                break now;
            }
        }
    };
    loop {
        // Changes by the other host's orders are told of here as well, and orders that were refused.
        if let Event::StackChanged { change, .. } = network.events[host].recv_timeout(PATIENCE).unwrap()
            && change.cause == ChangeCause::Order
            && change.at >= begun_at
        {
            return change.outcome == ChangeOutcome::Done;
        }
    }
}

#[test]
fn a_busy_connection_is_sealed_and_carried_plainly_in_turns() {
    isolated("a_busy_connection_is_sealed_and_carried_plainly_in_turns", || {
        let listener: SocketAddr = "0.0.0.0:80".parse().unwrap();
        let network = network(listener);
        for datapath in &network.datapaths {
            datapath.with_sal(|sal, _| sal.set_secure(seal::ciphers(), false, Vec::new()));
        }
        let server = serve(&network, listener, 1);
        let stream =
            network.hosts[0].run(|| TcpStream::connect_timeout(&SocketAddr::new(WEB_V4.into(), 80), PATIENCE).unwrap());
        let mut changes = 0_usize;
        thread::scope(|scope| {
            let talking = scope.spawn(move || exchange(stream, 64 << 20));
            while !talking.is_finished() {
                let to = if changes.is_multiple_of(2) { Stack::Secure } else { Stack::Plain };
                changes += usize::from(change(&network, changes / 2 % 2, to));
            }
            talking.join().unwrap();
        });
        server.join().unwrap();
        assert!(changes > 4, "{changes}");
        for datapath in &network.datapaths {
            assert_eq!(datapath.counters().drops(DropReason::OtherStack), 0);
        }
    });
}

#[test]
fn connections_by_name() {
    isolated("connections_by_name", || {
        for listener in ["0.0.0.0:80", "[::]:80"] {
            let listener: SocketAddr = listener.parse().unwrap();
            let network = network(listener);
            let server = serve(&network, listener, 12);
            for to in [IpAddr::from(WEB_V4), Ranges::USUAL.virtual_v6(&service("web.shop")).into()] {
                for at in 0..6 {
                    let stream = network.hosts[0]
                        .run(move || TcpStream::connect_timeout(&SocketAddr::new(to, 80), PATIENCE).unwrap());
                    exchange(stream, if at == 0 { 8 << 20 } else { 1000 });
                }
            }
            let clients = server.join().unwrap();
            assert_eq!(clients.len(), 12);
            if listener.is_ipv4() {
                let real: IpAddr = Ipv4Addr::new(10, 77, 0, 1).into();
                assert!(clients.iter().all(|client| client.ip() == real), "{clients:?}");
            }
        }
    });
}

/// A host that starts is asked for what it does not serve yet, and answers when it does.
#[test]
fn packets_wait_until_the_core_knows_what_they_ask_for() {
    isolated("packets_wait_until_the_core_knows_what_they_ask_for", || {
        let listener: SocketAddr = "0.0.0.0:80".parse().unwrap();
        let network = network_without_service();
        network.datapaths[0].begin();
        let server = serve(&network, listener, 1);
        thread::scope(|scope| {
            let connect = || TcpStream::connect_timeout(&SocketAddr::new(WEB_V4.into(), 80), PATIENCE).unwrap();
            let host = &network.hosts[0];
            let client = scope.spawn(move || host.run(connect));
            while network.datapaths[0].with_sal(|sal, _| sal.counters().messages_sent(Kind::Syn)) == 0 {
                assert!(!client.is_finished(), "refused before it was asked for");
                thread::yield_now();
            }
            serve_at(&network, listener);
            network.datapaths[1].begin();
            exchange(client.join().unwrap(), 1000);
        });
        server.join().unwrap();
    });
}

/// A host that starts hears from others while it does not know yet what its own programs ask for.
#[test]
fn programs_wait_until_the_core_knows_their_names() {
    isolated("programs_wait_until_the_core_knows_their_names", || {
        let listener: SocketAddr = "0.0.0.0:80".parse().unwrap();
        let network = network_without_service();
        let server = serve(&network, listener, 1);
        serve_at(&network, listener);
        network.datapaths[1].begin();
        let (starting, host) = (&network.datapaths[0], &network.hosts[0]);
        let client = host.run(|| {
            let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::NONBLOCK, None).unwrap();
            // It says so when the SYN is sent.
            assert_eq!(connect(&socket, &SocketAddrV4::new(LATE_V4, 80)), Err(Errno::INPROGRESS));
            let stream = TcpStream::from(socket);
            stream.set_nonblocking(false).unwrap();
            stream
        });
        let other = network.hosts[1].run(|| UdpSocket::bind("10.77.0.2:0").unwrap());
        // More than are taken in one go: what the first ones have led to is done then.
        for heard in 1..=200 {
            other.send_to(b"no message of ours", "10.77.0.1:54324").unwrap();
            while starting.counters().signalling_received < heard {
                thread::yield_now();
            }
        }
        starting.with_sal(|sal, _| sal.bind_name(LATE_V4.into(), service("web.shop")));
        starting.begin();
        exchange(client, 1000);
        server.join().unwrap();
    });
}

/// The service is asked for on the segment, by one family at a time, and by both.
#[test]
fn connections_by_asking_the_segment() {
    isolated("connections_by_asking_the_segment", || {
        let listener: SocketAddr = "0.0.0.0:80".parse().unwrap();
        let (v4, v6) = (
            |number| Ipv4Addr::new(10, 77, 0, number),
            |number| Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, u16::from(number)),
        );
        for (with_v4, with_v6) in [(true, false), (false, true), (true, true)] {
            let network = network(listener);
            for (datapath, (host, number)) in network.datapaths.iter().zip(network.hosts.iter().zip([1, 2])) {
                let interface = host.run(|| interface("eth0"));
                let segment = Segment { interface, v4: with_v4.then(|| v4(number)), v6: with_v6.then(|| v6(number)) };
                datapath.set_segments(vec![segment]).unwrap();
                let addresses = vec![v4(number).into(), v6(number).into()];
                datapath.with_sal(|sal, now| sal.set_routes(now, addresses, []));
            }
            network.datapaths[0].with_sal(|sal, now| {
                let known: Vec<_> = sal.rules().map(|(_, id, _)| id).collect();
                known.into_iter().for_each(|id| assert!(sal.remove_rule(id)));
                let hop = NextHop { address: SEGMENT, host: None, router: false };
                let rule = Rule { priority: 0, weight: 1, action: Action::Forward(hop) };
                sal.add_rule(now, Prefix::default(), rule).unwrap();
            });
            let server = serve(&network, listener, 3);
            for _ in 0..3 {
                let stream =
                    network.hosts[0].run(move || TcpStream::connect_timeout(&(WEB_V4, 80).into(), PATIENCE).unwrap());
                exchange(stream, 1000);
            }
            let wanted: IpAddr = if with_v4 { v4(1).into() } else { v6(1).into() };
            let clients = server.join().unwrap();
            assert!(with_v6 || clients.iter().all(|client| client.ip() == wanted), "{clients:?}");
            let answered = network.datapaths[0].with_sal(|sal, _| sal.flows().filter_map(|flow| flow.remote).last());
            let is_of_family = answered.is_some_and(|remote| with_v4 == with_v6 || remote.is_ipv4() == with_v4);
            assert!(is_of_family, "{answered:?}");
            // One copy of each is taken, whichever sockets it came to. What a busy machine answered late was asked
            // again, and may still be on its way.
            let asked = network.datapaths[0].with_sal(|sal, _| sal.counters().messages_sent(Kind::Syn));
            let wanted = if with_v4 && with_v6 { 2 * asked } else { asked };
            let heard = || network.datapaths[1].with_sal(|sal, _| sal.counters().messages_received(Kind::Syn));
            let begun = Stopwatch::now();
            while heard() < wanted && begun.elapsed() < PATIENCE {
                thread::yield_now();
            }
            assert_eq!(heard(), wanted);
        }
    });
}

#[test]
fn many_at_once_and_through_an_empty_cache() {
    isolated("many_at_once_and_through_an_empty_cache", || {
        let listener: SocketAddr = "0.0.0.0:80".parse().unwrap();
        let network = network(listener);
        let server = serve(&network, listener, 100);
        let clients: Vec<_> = (0..100)
            .map(|_| {
                let connect = || TcpStream::connect_timeout(&(WEB_V4, 80).into(), PATIENCE).unwrap();
                let stream = network.hosts[0].run(connect);
                thread::spawn(move || exchange(stream, 200_000))
            })
            .collect();
        for _ in 0..20 {
            network.datapaths.iter().for_each(Datapath::clear_cache);
            network.events[0].try_iter().for_each(drop);
        }
        clients.into_iter().for_each(|client| client.join().unwrap());
        assert_eq!(server.join().unwrap().len(), 100);
    });
}

#[test]
fn failures_are_clear_and_at_once() {
    isolated("failures_are_clear_and_at_once", || {
        let network = network("0.0.0.0:80".parse().unwrap());
        // Nobody serves one name; the other is served by a host whose program does not listen.
        for (to, kinds) in [
            (NOBODY_V4, [ErrorKind::ConnectionRefused, ErrorKind::HostUnreachable]),
            (WEB_V4, [ErrorKind::ConnectionRefused; 2]),
        ] {
            let begun = Stopwatch::now();
            let error =
                network.hosts[0].run(move || TcpStream::connect_timeout(&(to, 80).into(), PATIENCE).unwrap_err());
            assert!(kinds.contains(&error.kind()), "{to}: {error}");
            // Nothing had to run out first: a connect is given up after five seconds.
            assert!(begun.elapsed().as_secs() < 4, "{to}: {:?}", begun.elapsed());
        }
        let failed = network.events[0].iter().find(|event| matches!(event, Event::ConnectFailed { .. }));
        assert!(failed.is_some());
    });
}

#[test]
fn datagrams_by_name() {
    isolated("datagrams_by_name", || {
        let listener: SocketAddr = "0.0.0.0:53".parse().unwrap();
        let network = network(listener);
        let server = network.hosts[1].run(|| UdpSocket::bind((namespace::OWN_V4, 53)).unwrap());
        server.set_read_timeout(Some(PATIENCE)).unwrap();
        let client = network.hosts[0].run(|| UdpSocket::bind("0.0.0.0:0").unwrap());
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        for len in [1, 500, 1400, 20_000, 3] {
            client.send_to(&pattern(len), (WEB_V4, 53)).unwrap();
            let mut buffer = vec![0; 65_536];
            let (count, from) = server.recv_from(&mut buffer).unwrap();
            assert!(buffer[..count] == pattern(len), "{len} bytes arrive");
            server.send_to(&buffer[..count], from).unwrap();
            let (count, from) = client.recv_from(&mut buffer).unwrap();
            assert_eq!((count, from), (len, (WEB_V4, 53).into()));
        }
    });
}

/// A program sends as fast as it can from its first datagram on, and the cache is emptied under it: what waits for the
/// core is not overtaken.
#[test]
fn datagrams_that_find_no_entry_are_not_overtaken() {
    const FLOWS: u32 = 40;
    const BURST: u32 = 100;
    isolated("datagrams_that_find_no_entry_are_not_overtaken", || {
        let listener: SocketAddr = "0.0.0.0:53".parse().unwrap();
        let network = network(listener);
        let server = network.hosts[1].run(|| UdpSocket::bind((namespace::OWN_V4, 53)).unwrap());
        server.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut buffer = [0; 8];
        for flow in 0..FLOWS {
            let client = network.hosts[0].run(|| UdpSocket::bind("0.0.0.0:0").unwrap());
            client.connect((WEB_V4, 53)).unwrap();
            let send = |number: u32| client.send(&[flow.to_be_bytes(), number.to_be_bytes()].concat()).unwrap();
            for number in 1..=BURST {
                send(number);
                if number == BURST / 2 {
                    network.datapaths.iter().for_each(Datapath::clear_cache);
                }
            }
            let mut last = 0;
            while last < BURST {
                assert_eq!(server.recv(&mut buffer).unwrap(), buffer.len());
                let word = |at: usize| u32::from_be_bytes(buffer[at..at + 4].try_into().unwrap());
                assert_eq!(word(0), flow);
                assert!(word(4) > last, "of flow {flow}, {} comes after {last}", word(4));
                last = word(4);
            }
        }
    });
}

#[test]
fn sealed_connections_by_name_through_an_empty_cache() {
    const CLEARED: u64 = 20;
    isolated("sealed_connections_by_name_through_an_empty_cache", || {
        for ciphers in [seal::ciphers(), &[Cipher::ChaCha20Poly1305]] {
            let listener: SocketAddr = "0.0.0.0:80".parse().unwrap();
            let network = network(listener);
            demand_secure(&network, [seal::ciphers(), ciphers]);
            let server = serve(&network, listener, 20);
            let clients: Vec<_> = (0..20)
                .map(|at| {
                    let connect = || TcpStream::connect_timeout(&(WEB_V4, 80).into(), PATIENCE).unwrap();
                    let stream = network.hosts[0].run(connect);
                    thread::spawn(move || exchange(stream, if at == 0 { 32 << 20 } else { 200_000 }))
                })
                .collect();
            for host in [0, 1] {
                assert!(sealed_with(&network, host).iter().all(|cipher| *cipher == ciphers.first().copied()));
            }
            for _ in 0..CLEARED {
                network.datapaths.iter().for_each(Datapath::clear_cache);
            }
            clients.into_iter().for_each(|client| client.join().unwrap());
            assert_eq!(server.join().unwrap().len(), 20);
            for datapath in &network.datapaths {
                let counters = datapath.counters();
                let dropped = |reason| counters.drops(reason);
                assert_eq!([DropReason::OtherStack, DropReason::BadSeal].map(dropped), [0; 2]);
                // What waited for the core while a busy flow went on comes after its window, and is as good as lost.
                assert!(dropped(DropReason::ReplayedSeal) <= CLEARED, "{}", dropped(DropReason::ReplayedSeal));
            }
        }
    });
}

#[test]
fn sealed_datagrams_by_name() {
    isolated("sealed_datagrams_by_name", || {
        let listener: SocketAddr = "0.0.0.0:53".parse().unwrap();
        let network = network(listener);
        demand_secure(&network, [seal::ciphers(); 2]);
        let server = network.hosts[1].run(|| UdpSocket::bind((namespace::OWN_V4, 53)).unwrap());
        server.set_read_timeout(Some(PATIENCE)).unwrap();
        let client = network.hosts[0].run(|| UdpSocket::bind("0.0.0.0:0").unwrap());
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        for len in [1, 500, 1400, 20_000, 60_000, 3] {
            client.send_to(&pattern(len), (WEB_V4, 53)).unwrap();
            let mut buffer = vec![0; 65_536];
            let (count, from) = server.recv_from(&mut buffer).unwrap();
            assert!(buffer[..count] == pattern(len), "{len} bytes arrive");
            server.send_to(&buffer[..count], from).unwrap();
            let (count, from) = client.recv_from(&mut buffer).unwrap();
            assert_eq!((count, from), (len, (WEB_V4, 53).into()));
        }
        assert_eq!(sealed_with(&network, 1), [seal::ciphers().first().copied()]);
    });
}
