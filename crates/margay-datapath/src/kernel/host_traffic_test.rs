//! What comes to flow ports and no entry knows: whose it is, and how much of it the agent hears.

use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::time::Instant;

use super::*;
use crate::packet::mapped;

/// Of no flow port, as kernels give them out.
const EPHEMERAL: u16 = 40_000;

impl Rig {
    fn knows(&self, local: IpAddr, peer: IpAddr) {
        put(&self.0.maps.locals, &mapped(local), &1_u32.to_ne_bytes());
        put(&self.0.maps.peers, &mapped(peer), &u64::MAX.to_ne_bytes());
        put(&self.0.maps.peers_known, &0_u32.to_ne_bytes(), &1_u32.to_ne_bytes());
    }

    fn is_hosts(&self, packet: &[u8]) {
        let before = self.count_of("of_host");
        assert_eq!(self.run(false, packet), (NEXT, packet.to_vec()), "as it came");
        assert_eq!(self.count_of("of_host"), before + 1);
    }

    fn is_agents(&self, packet: &[u8]) {
        let before = self.count_of("up_no_flow");
        assert_eq!(self.run(false, packet), (REDIRECT, packet.to_vec()), "up, as it came");
        assert_eq!(self.count_of("up_no_flow"), before + 1);
    }
}

fn between(protocol: u8, source: SocketAddr, destination: SocketAddr) -> Tuple {
    Tuple { protocol, source, destination }
}

/// The programs of a host whose loopback is as a peer: there are sockets of the host at both ends.
fn loopback() -> Option<Rig> {
    let rig = programs(SAL0)?;
    rig.knows(Ipv4Addr::LOCALHOST.into(), Ipv4Addr::LOCALHOST.into());
    rig.beat(crate::clock::now().micros() * 1000);
    Some(rig)
}

/// A socket at a flow port that is free.
fn at_flow_port<T>(bind: impl Fn(SocketAddr) -> std::io::Result<T>) -> (T, SocketAddr) {
    let addresses = (61_000..=65_535).map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    let mut bound = addresses.filter_map(|address| Some((bind(address).ok()?, address)));
    bound.next().expect("one is free")
}

#[test]
fn all_that_comes_from_strangers_is_the_hosts() {
    for (local, stranger) in [("10.1.0.2", "10.1.0.9"), ("fd00::2", "fd00::9")] {
        let Some(rig) = rig(sample::tuple4(TCP), true, true, true) else { return };
        let (local, stranger) = (local.parse().expect("literal"), stranger.parse().expect("literal"));
        rig.knows(local, "10.1.0.1".parse().expect("literal"));
        for port in [EPHEMERAL, REMOTE_PORT] {
            let (from, to) = (SocketAddr::new(stranger, port), SocketAddr::new(local, 61_999));
            for flags in [SYN, SYN | ACK, ACK, FIN | ACK, RST] {
                rig.is_hosts(&segment(between(TCP, from, to), flags, b""));
            }
            rig.is_hosts(&datagram(between(UDP, from, to), b"question"));
            rig.is_hosts(&datagram(between(UDP, from, to), b""));
        }
        assert_eq!(rig.counted(), ["of_host"]);
    }
}

#[test]
fn what_is_on_its_way_through_the_host_is_not_margays() {
    let Some(rig) = rig(sample::tuple4(TCP), true, true, true) else { return };
    let peer = wire(true).destination;
    rig.knows(wire(true).source.ip(), peer.ip());
    rig.is_hosts(&segment(between(TCP, peer, "10.9.0.2:62000".parse().expect("literal")), ACK, b"x"));
}

#[test]
fn a_peers_packets_without_a_socket_are_the_agents_but_for_syns_that_no_grant_can_mean() {
    let Some(rig) = rig(sample::tuple4(TCP), true, true, true) else { return };
    let other: SocketAddr = "10.1.0.7:61500".parse().expect("literal");
    rig.knows(wire(true).source.ip(), other.ip());
    // A pair of addresses that leads to a path, and one that leads to none yet, or no more.
    for remote in [wire(true).destination.ip(), other.ip()] {
        let from = |port| SocketAddr::new(remote, port);
        let to = SocketAddr::new(wire(true).source.ip(), 61_999);
        rig.is_hosts(&segment(between(TCP, from(EPHEMERAL), to), SYN, b""));
        rig.is_agents(&segment(between(TCP, from(63_000), to), SYN, b""));
        for flags in [SYN | ACK, ACK, FIN | ACK, RST] {
            rig.is_agents(&segment(between(TCP, from(63_000), to), flags, b""));
        }
        rig.is_agents(&datagram(between(UDP, from(63_000), to), b"late"));
        let before = rig.count_of("pinholes");
        assert_eq!(rig.run(false, &datagram(between(UDP, from(63_000), to), b"")).0, DROP);
        assert_eq!(rig.count_of("pinholes"), before + 1, "told of");
    }
}

#[test]
fn before_all_peers_are_known_nobody_is_a_stranger() {
    let Some(rig) = rig(sample::tuple4(TCP), true, true, true) else { return };
    let (from, to) = ("10.1.0.9:63000".parse().expect("literal"), wire(true).source);
    put(&rig.0.maps.locals, &mapped(to.ip()), &1_u32.to_ne_bytes());
    rig.is_agents(&segment(between(TCP, from, to), ACK, b"of a flow, perhaps"));
    rig.knows(to.ip(), "10.1.0.1".parse().expect("literal"));
    rig.is_hosts(&segment(between(TCP, from, to), ACK, b"of a flow, perhaps"));
    let past = 1_u64.to_ne_bytes();
    put(&rig.0.maps.peers, &mapped(from.ip()), &past);
    rig.is_hosts(&segment(between(TCP, from, to), ACK, b"long after it has left"));
}

#[test]
fn a_connection_of_the_host_has_its_packets_and_a_listener_none_of_a_flows() {
    let Some(rig) = loopback() else { return };
    let (listener, at) = at_flow_port(TcpListener::bind);
    let stray = between(TCP, SocketAddr::new(at.ip(), 64_999), at);
    for flags in [ACK, FIN | ACK, RST, SYN | ACK] {
        rig.is_agents(&segment(stray, flags, b""));
    }
    rig.is_hosts(&segment(stray, SYN, b""));

    let client = TcpStream::connect(at).expect("a connection");
    let from = client.local_addr().expect("connected");
    let (server, _) = listener.accept().expect("the same");
    for flags in [ACK, FIN | ACK, RST] {
        rig.is_hosts(&segment(between(TCP, from, at), flags, b"data"));
    }
    // That of the end that has closed first waits for late packets.
    drop(server);
    drop(client);
    rig.is_hosts(&segment(between(TCP, from, at), ACK, b""));
    rig.is_agents(&segment(stray, ACK, b""));
}

#[test]
fn a_port_that_a_socket_of_datagrams_has_is_that_sockets() {
    let Some(rig) = loopback() else { return };
    let (socket, at) = at_flow_port(UdpSocket::bind);
    let to = between(UDP, SocketAddr::new(at.ip(), 64_999), at);
    rig.is_hosts(&datagram(to, b"question"));
    rig.is_hosts(&datagram(to, b""));
    socket.connect("127.0.0.1:9").expect("nobody need be there");
    rig.is_agents(&datagram(to, b"it talks with another"));
}

#[test]
fn the_hosts_packets_show_nothing_of_a_path() {
    let Some(rig) = rig(sample::tuple4(TCP), true, true, true) else { return };
    let pair = layout::pair_of(&rig.path());
    put(&rig.0.maps.pairs, pair.bytes(), layout::pair_value { path: PATH.0, flags: PATH_WATCHED, told_ns: 0 }.bytes());
    let told = || get::<layout::pair_value>(&rig.0.maps.pairs, pair.bytes()).is_some_and(|value| value.told_ns > 0);
    let mut plain = wire(true).reversed();
    plain.source.set_port(EPHEMERAL);
    rig.is_hosts(&segment(plain, SYN, b""));
    assert!(!told());
    plain.source.set_port(63_000);
    rig.is_agents(&segment(plain, ACK, b"of a flow, perhaps"));
    assert!(told());
}

#[test]
fn a_flood_that_no_entry_knows_reaches_the_agent_at_a_rate_and_keeps_nobody_else_away() {
    const FLOOD: u32 = 20_000;
    let Some(rig) = rig(sample::tuple4(TCP), true, true, true) else { return };
    let (local, other): (IpAddr, SocketAddr) = (wire(true).source.ip(), "10.1.0.7:61500".parse().expect("literal"));
    rig.knows(local, other.ip());
    let mut stray = wire(true).reversed();
    stray.source.set_port(63_000);
    for packet in [segment(stray, ACK, b"x"), datagram(Tuple { protocol: UDP, ..stray }, b"")] {
        let heard = || rig.count_of("up_no_flow") + rig.count_of("pinholes");
        let (before, dropped, begun) = (heard(), rig.count_of("drop_rate"), Instant::now());
        let data = frame(&packet);
        let input = ProgramInput { data_in: Some(&data), repeat: FLOOD, ..Default::default() };
        rig.0.progs.wire_ingress.test_run(input).expect("a run");
        let most = 512.0 + 8192.0 * (begun.elapsed().as_secs_f64() + 0.1);
        let heard = heard() - before;
        assert_eq!(heard + rig.count_of("drop_rate") - dropped, u64::from(FLOOD));
        assert!(heard as f64 <= most, "{heard} of at most {most}");
    }
    rig.is_agents(&segment(between(TCP, other, SocketAddr::new(local, 61_999)), ACK, b"another's"));
    assert_eq!(rig.run(false, &segment(wire(true).reversed(), ACK, b"of a flow")).0, REDIRECT);
    assert_eq!(rig.count_of("ingress_packets"), 1);
}
