use super::*;
use crate::types::tuple::Tuple;

const ACK: u8 = tcp_flags::ACK;

fn at(ms: u64) -> Instant {
    Instant::ZERO + Duration::from_millis(ms)
}

fn packet(protocol: u8, transport: Vec<u8>) -> Vec<u8> {
    let tuple = Tuple {
        protocol,
        source: "198.18.1.1:80".parse().expect("literal"),
        destination: "198.18.0.1:40000".parse().expect("literal"),
    };
    packet::build(&tuple, transport, 0, 64).expect("one family")
}

fn segment(sequence: u32, acknowledgement: u32, flags: u8, data: &[u8]) -> Vec<u8> {
    let mut tcp = alloc::vec![0, 80, 0x9c, 0x40];
    tcp.extend(sequence.to_be_bytes());
    tcp.extend(acknowledgement.to_be_bytes());
    tcp.extend([0x50, flags, 0x10, 0, 0, 0, 0, 0]);
    tcp.extend(data);
    packet(6, tcp)
}

fn data(sequence: u32, data: &[u8]) -> Vec<u8> {
    segment(sequence, 1, ACK, data)
}

fn datagram(number: u8) -> Vec<u8> {
    packet(17, alloc::vec![0, 80, 0x9c, 0x40, 0, 9, 0, 0, number])
}

/// Whether it waits.
fn by_new(gate: &mut Gate, now: Instant, packet: &[u8]) -> bool {
    let Ok(Parsed::Transport(parsed)) = packet::parse(packet) else { panic!("no transport") };
    gate.by_new(now, &parsed)
}

fn by_old(gate: &mut Gate, now: Instant, packet: &[u8]) {
    let Ok(Parsed::Transport(parsed)) = packet::parse(packet) else { panic!("no transport") };
    gate.by_old(now, &parsed);
}

/// A gate whose program has acknowledged all below 1000.
fn gate() -> Gate {
    let mut gate = Gate::new(at(0));
    let own = segment(1, 1000, ACK, b"");
    let Ok(Parsed::Transport(parsed)) = packet::parse(&own) else { panic!("no transport") };
    gate.note_own(&parsed);
    gate
}

#[test]
fn what_is_in_order_does_not_wait_and_the_rest_waits_for_what_is_before_it() {
    let mut gate = gate();
    assert!(!by_new(&mut gate, at(1), &data(1000, b"0123456789")), "it is the next");
    let [late, later, last] = [data(1020, b"0123456789"), data(1030, b"0123"), data(1034, b"01")];
    for early in [&later, &last, &late] {
        assert!(by_new(&mut gate, at(2), early));
    }
    assert!(!by_new(&mut gate, at(2), &segment(1036, 2, ACK, b"")), "an acknowledgement waits for nobody");
    assert!(by_new(&mut gate, at(2), &segment(1036, 2, tcp_flags::RST | ACK, b"")), "a RST waits");
    assert!(gate.take_next(at(3)).is_empty());
    by_old(&mut gate, at(4), &data(1010, b"0123456789"));
    let next = gate.take_next(at(4));
    assert_eq!(next, [late, later, last, segment(1036, 2, tcp_flags::RST | ACK, b"")]);
    assert_eq!((gate.bytes, gate.due()), (0, None), "nothing waits, and the old way may still be used");
    assert!(!by_new(&mut gate, at(5), &data(990, b"said again")));
}

#[test]
fn numbers_wrap() {
    let mut gate = Gate::new(at(0));
    by_old(&mut gate, at(0), &data(u32::MAX - 9, b"0123456789"));
    assert!(by_new(&mut gate, at(1), &data(10, b"01234")));
    assert!(!by_new(&mut gate, at(1), &data(0, b"0123456789")));
    assert_eq!(gate.take_next(at(1)), [data(10, b"01234")]);
}

#[test]
fn nothing_waits_for_what_does_not_come() {
    let mut gate = gate();
    by_new(&mut gate, at(10), &data(1020, b"01"));
    assert_eq!(gate.due(), Some(at(10) + ORDER_WAIT), "no word of the other end, nor the bytes before");
    gate.fence(at(20));
    assert_eq!(gate.due(), Some(at(20) + QUIET));
    by_old(&mut gate, at(60), &data(1000, b"01"));
    gate.fence(at(70));
    assert_eq!(gate.due(), Some(at(60) + QUIET), "the old way is not empty yet, and the word counts once");
    assert_eq!(gate.take_all(), [data(1020, b"01")]);
}

#[test]
fn datagrams_wait_for_the_end_of_the_old_way() {
    let mut gate = Gate::new(at(0));
    for number in [1, 2] {
        assert!(by_new(&mut gate, at(1), &datagram(number)));
        by_old(&mut gate, at(2), &datagram(9));
    }
    assert!(gate.take_next(at(3)).is_empty());
    gate.fence(at(3));
    assert_eq!(gate.due(), Some(at(3) + QUIET));
    assert_eq!(gate.take_all(), [datagram(1), datagram(2)]);
}

#[test]
fn what_waits_is_bounded() {
    let mut gate = gate();
    let long = [0; 60_000];
    let mut waiting = 0;
    while !gate.is_full() {
        assert!(by_new(&mut gate, at(1), &data(2000 + waiting * 60_000, &long)));
        waiting += 1;
    }
    assert_eq!(waiting as usize, HELD_BYTES_MAX.div_ceil(60_040));
}
