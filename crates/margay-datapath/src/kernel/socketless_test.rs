//! What comes of connections without a socket: to listeners the SYN and what follows it, and nothing that an agent has
//! made; and nothing late of what has closed last here.
#![allow(unsafe_code)]

use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsRawFd;

use super::opening::numbered;
use super::*;
use crate::pinhole::Segment;
use crate::table::TcpNumbers;

/// Number of the SYN.
const FIRST: u32 = 0xffff_ffff;
/// The number after it.
const NEXT_NUMBER: u32 = 0;
/// Another host's port.
const CLIENT: &str = "127.0.0.1:9";

impl Rig {
    /// What becomes of a segment that comes by `sal0`.
    fn arrive(&self, packet: &[u8]) -> i32 {
        let (verdict, out) = self.run_one(&self.0.progs.app_ingress, packet);
        assert_eq!(out, packet, "as it came");
        verdict
    }

    fn ask(&self, tuple: Tuple) {
        assert_eq!(self.arrive(&numbered(tuple, SYN, (FIRST, 0), b"")), NEXT);
    }

    /// What is noted of a connection lies there.
    fn key_of(&self, tuple: Tuple) -> Vec<u8> {
        let is_its = |key: &Vec<u8>| {
            key[32..36] == [tuple.source.port().to_be_bytes(), tuple.destination.port().to_be_bytes()].concat()
        };
        self.0.maps.socketless.keys().find(is_its).expect("it is noted")
    }

    fn noted(&self) -> usize {
        self.0.maps.socketless.keys().count()
    }
}

fn listener() -> (TcpListener, Tuple) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let destination = listener.local_addr().expect("bound");
    (listener, Tuple { protocol: TCP, source: CLIENT.parse().expect("literal"), destination })
}

/// What the core has a TCP say its numbers by.
fn probe(tuple: Tuple) -> Vec<u8> {
    let numbers = Some(TcpNumbers { sequence: 0, acknowledgement: 0, end: None });
    let segment = Segment { source: tuple.source, destination: tuple.destination, numbers, is_knock: false };
    let mut packet = segment.packet().expect("one family");
    packet[34..36].fill(0);
    packet
}

fn pinhole(tuple: Tuple, is_knock: bool) -> Vec<u8> {
    let numbers = Some(TcpNumbers { sequence: NEXT_NUMBER, acknowledgement: 7, end: None });
    let segment = Segment { source: tuple.source, destination: tuple.destination, numbers, is_knock };
    segment.packet().expect("one family")
}

#[test]
fn of_a_connection_without_a_socket_a_listener_gets_what_follows_the_syn_alone() {
    let Some(rig) = programs(SAL0) else { return };
    let (_listener, tuple) = listener();
    let far = |flags: u8, payload: &[u8]| numbered(tuple, flags, (NEXT_NUMBER.wrapping_add(4), 7), payload);
    assert_eq!(rig.arrive(&far(ACK, b"")), NEXT, "of a connection that is over: the listener refuses it");
    rig.ask(tuple);
    for (flags, payload) in [(ACK, &b""[..]), (ACK, b"data"), (FIN | ACK, b"")] {
        assert_eq!(rig.arrive(&far(flags, payload)), DROP);
        assert_eq!(rig.arrive(&numbered(tuple, flags, (NEXT_NUMBER, 7), payload)), NEXT);
    }
    assert_eq!((rig.count_of("drop_socketless"), rig.noted()), (3, 1));
    let other = Tuple { source: "127.0.0.1:10".parse().expect("literal"), ..tuple };
    assert_eq!(rig.arrive(&numbered(other, ACK, (4, 7), b"")), NEXT, "another connection's");
    let key = rig.0.maps.socketless.keys().next().expect("one");
    let (past, next_unanswered) = (1_u64.to_ne_bytes(), u64::from(NEXT_NUMBER).to_ne_bytes());
    put(&rig.0.maps.socketless, &key, &[past, next_unanswered].concat());
    assert_eq!(rig.arrive(&far(ACK, b"data")), NEXT, "the listener takes no cookie any more");
}

#[test]
fn a_syn_that_was_answered_by_a_cookie_comes_to_no_listener_again() {
    let Some(rig) = programs(SAL0) else { return };
    let (listener, tuple) = listener();
    let syn = |first: u32| rig.arrive(&numbered(tuple, SYN, (first, 0), b""));
    assert_eq!([syn(FIRST), syn(FIRST)], [NEXT; 2], "it has said nothing, and may say something now");
    let answer = |acknowledges: u32| {
        let answer = numbered(tuple.reversed(), SYN | ACK, (5, acknowledges), b"");
        assert_eq!(rig.run(true, &answer).0, NEXT, "the agent's");
    };
    answer(9);
    assert_eq!(syn(FIRST), NEXT, "that was another's answer");
    answer(NEXT_NUMBER);
    assert_eq!(syn(FIRST), DROP);
    assert_eq!(syn(77), NEXT, "another connection's");
    drop(listener);
    answer(78);
    assert_eq!(syn(77), NEXT, "to nobody");
}

#[test]
fn nothing_that_an_agent_has_made_comes_to_a_listener() {
    let Some(rig) = programs(SAL0) else { return };
    let (listener, tuple) = listener();
    for is_knock in [false, true] {
        assert_eq!(rig.arrive(&pinhole(tuple, is_knock)), DROP, "what follows the SYN, even");
    }
    assert_eq!(rig.arrive(&probe(tuple)), DROP);
    let client = TcpStream::connect(tuple.destination).expect("a connection");
    let of_client = Tuple { source: client.local_addr().expect("connected"), ..tuple };
    assert_eq!(rig.arrive(&pinhole(of_client, false)), NEXT, "it may be the acknowledgement of a TCP");
    assert_eq!(rig.arrive(&probe(of_client)), NEXT, "it answers");
    // The client closes first, and waits for what comes late.
    let (served, _) = listener.accept().expect("the same");
    let back = of_client.reversed();
    client.shutdown(Shutdown::Write).expect("open");
    drop(served);
    drop(client);
    assert_eq!([pinhole(back, false), probe(back)].map(|made| rig.arrive(&made)), [DROP; 2], "it is over");
    drop(listener);
    assert_eq!(rig.arrive(&pinhole(tuple, false)), NEXT, "to nobody");
}

/// A listener keeps requests until data comes.
fn defer(listener: &TcpListener) {
    let wait_s: libc::c_int = 30;
    // SAFETY: the option's value is an integer that lives across the call, and its size is said.
    let result = unsafe {
        libc::setsockopt(
            listener.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_DEFER_ACCEPT,
            (&raw const wait_s).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    assert_eq!(result, 0);
}

#[test]
fn a_request_gets_nothing_of_before_itself() {
    let Some(rig) = programs(SAL0) else { return };
    let (listener, tuple) = listener();
    defer(&listener);
    let client = TcpStream::connect(tuple.destination).expect("it is answered");
    let asking = Tuple { source: client.local_addr().expect("connected"), ..tuple };
    rig.ask(asking);
    let at = |sequence: u32| numbered(asking, ACK, (sequence, 7), b"");
    assert_eq!(rig.arrive(&probe(asking)), DROP);
    assert_eq!(rig.arrive(&at(NEXT_NUMBER.wrapping_sub(1))), DROP, "what a TCP is restarted by");
    assert_eq!([0, 9].map(|more| rig.arrive(&at(NEXT_NUMBER + more))), [NEXT; 2]);
    assert_eq!(rig.arrive(&pinhole(asking, false)), NEXT);
    assert_eq!(rig.noted(), 1, "a request is no socket");
}

#[test]
fn a_connection_that_has_a_socket_is_awaited_no_more() {
    let Some(rig) = programs(SAL0) else { return };
    let (listener, tuple) = listener();
    let client = TcpStream::connect(tuple.destination).expect("a connection");
    let of_client = Tuple { source: client.local_addr().expect("connected"), ..tuple };
    rig.ask(of_client);
    assert_eq!(rig.arrive(&numbered(of_client, ACK, (4, 7), b"data")), NEXT);
    assert_eq!(rig.noted(), 0);
    drop(listener);
}

/// What its peer has said at last, and what it has been told: 10 bytes and a FIN, from [`FIRST`] on.
const PEERS_END: u32 = 11;

impl Rig {
    /// The host's end closes last. (The socket of a test run is in no state that a connection has.)
    fn part(&self, tuple: Tuple) -> i32 {
        self.run(true, &numbered(tuple.reversed(), FIN | ACK, (500, PEERS_END), b"")).0
    }
}

#[test]
fn nothing_late_comes_to_what_has_closed_last() {
    let (listener, tuple) = listener();
    let Some(rig) = programs(SAL0) else { return };
    let to_nobody = Tuple { destination: "127.0.0.1:9".parse().expect("literal"), ..tuple };
    for tuple in [tuple, to_nobody] {
        let say = |at: u32, flags: u8, payload: &[u8]| rig.arrive(&numbered(tuple, flags, (at, 501), payload));
        let late = || {
            let data = say(NEXT_NUMBER, ACK, b"once more.");
            [data, say(PEERS_END - 1, FIN | ACK, b""), say(PEERS_END, ACK, b""), say(NEXT_NUMBER, ACK, b"")]
        };
        assert_eq!(late(), [NEXT; 4], "nobody knows of a connection: it is refused");
        rig.part(tuple);
        assert_eq!(late(), [DROP; 4]);
        assert_eq!(rig.arrive(&probe(tuple)), DROP);
        assert_eq!(say(PEERS_END + 1, ACK, b"more"), NEXT, "who says more has not closed");
        rig.ask(tuple);
        assert_eq!(say(NEXT_NUMBER, ACK, b""), NEXT, "it is a new connection");
        rig.part(tuple);
        let key = rig.key_of(tuple);
        put(&rig.0.maps.socketless, &key, &[&1_u64.to_ne_bytes()[..], &11_u32.to_ne_bytes(), &[2, 0, 0, 0]].concat());
        assert_eq!(late(), [NEXT; 4], "a minute later");
        rig.part(tuple);
        assert_eq!((say(PEERS_END, RST, b""), rig.noted()), (NEXT, 0), "it did not end in order: its peer may hear so");
    }
    drop(listener);
}

/// An instance that was cut off sends a SYN-ACK after another instance has answered the same SYN and the connection is
/// over: the SYN-ACK is reset, whatever its number.
#[test]
fn an_answer_to_the_syn_of_what_has_closed_last_is_refused() {
    let Some(rig) = programs(SAL0) else { return };
    let (listener, tuple) = listener();
    let to_nobody = Tuple { destination: "127.0.0.1:9".parse().expect("literal"), ..tuple };
    rig.part(to_nobody);
    for number in [PEERS_END - 5, PEERS_END, PEERS_END + 5] {
        assert_eq!(rig.arrive(&numbered(to_nobody, SYN | ACK, (number, 6), b"")), NEXT, "{number}");
    }
    assert_eq!(rig.noted(), 1, "and what is late of the connection is still told from it");
    drop(listener);
}

#[test]
fn what_was_noted_of_a_connection_is_not_for_the_next_one() {
    let Some(rig) = programs(SAL0) else { return };
    let (listener, tuple) = listener();
    let client = TcpStream::connect(tuple.destination).expect("a connection");
    let of_client = Tuple { source: client.local_addr().expect("connected"), ..tuple };
    rig.part(of_client);
    assert_eq!(rig.arrive(&numbered(of_client, ACK, (PEERS_END, 501), b"")), NEXT);
    assert_eq!(rig.noted(), 0, "a socket that has not closed is another connection's");
    drop(listener);
}

#[test]
fn a_flow_leaves_its_card_once_it_has_closed_last() {
    for app in [sample::tuple4(TCP), sample::tuple6(TCP)] {
        let Some(rig) = rig(app, true, true, true) else { return };
        put(&rig.0.maps.in_place, &0_u32.to_ne_bytes(), &1_u32.to_ne_bytes());
        let acknowledge = || rig.run(false, &segment(wire(true).reversed(), ACK, b"")).0;
        assert_eq!(acknowledge(), NEXT);
        rig.part(app.reversed());
        assert_eq!((acknowledge(), acknowledge()), (REDIRECT, REDIRECT));
    }
}

#[test]
fn a_flow_stays_on_its_card_only_once_its_connection_has_a_socket() {
    for app in [sample::tuple4(TCP), sample::tuple6(TCP)] {
        let Some(rig) = rig(app, true, true, true) else { return };
        put(&rig.0.maps.in_place, &0_u32.to_ne_bytes(), &1_u32.to_ne_bytes());
        let data = || rig.run(false, &segment(wire(true).reversed(), ACK, b"x")).0;
        rig.ask(app.reversed());
        assert_eq!((data(), data()), (REDIRECT, REDIRECT));
        let key = rig.0.maps.socketless.keys().next().expect("one");
        rig.0.maps.socketless.delete(&key).expect("its own key");
        assert_eq!(data(), NEXT);
        rig.ask(app.reversed());
        assert_eq!(data(), NEXT, "for good");
        assert_eq!(rig.run(false, &pinhole(wire(true).reversed(), false)).0, REDIRECT, "it may come to a listener");
    }
}
