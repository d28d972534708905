//! A SYN that meets a connection in TIME-WAIT comes after the reset of that connection.

use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsRawFd;

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, sendto, socket};

use super::opening::{complete, numbered};
use super::*;

/// Where the checksum of an IPv4 header lies.
const IP_CHECKSUM: usize = 10;
/// Where the sequence number of a TCP segment over IPv4 lies.
const SEQUENCE: usize = 24;
/// Where the length of the TCP header lies.
const HEADER_LEN: usize = 32;

/// Puts a packet on the loopback, as a whole.
fn send(tuple: Tuple, packet: &[u8]) {
    let raw = socket(AddressFamily::Inet, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::Raw).expect("root");
    sendto(raw.as_raw_fd(), packet, &SockaddrStorage::from(tuple.destination), MsgFlags::empty()).expect("loopback");
}

#[test]
fn a_connection_in_time_wait_makes_way_for_a_new_one() {
    let Some(rig) = programs(SAL0) else { return };
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let destination = listener.local_addr().expect("bound");
    let client = TcpStream::connect(destination).expect("a connection");
    let tuple = Tuple { protocol: TCP, source: client.local_addr().expect("connected"), destination };
    // The copy of the SYN comes to the host in earnest. It is not to get as far as TCP.
    let syn = |number: u32| {
        let mut syn = numbered(tuple, SYN, (number, 0), b"");
        syn[IP_CHECKSUM] ^= 1;
        syn
    };
    let ask = |number: u32| rig.run_one(&rig.0.progs.app_ingress, &syn(number));
    assert_eq!(ask(1), (NEXT, syn(1)), "an open connection is TCP's affair");
    // The listener's side closes first.
    let (served, _) = listener.accept().expect("the same");
    served.shutdown(Shutdown::Write).expect("open");
    drop(client);
    drop(served);
    let (verdict, reset) = ask(2);
    let expected = u32::from_be_bytes(reset[SEQUENCE..SEQUENCE + 4].try_into().expect("four bytes"));
    let mut right = numbered(tuple, RST, (expected, 0), b"");
    // Timestamps older than the connection's would have TCP pass a reset over.
    right[HEADER_LEN] = 5 << 4;
    let right = complete(right);
    let mut wanted = right.clone();
    wanted[IP_CHECKSUM] ^= 1;
    assert_eq!((verdict, reset), (NEXT, wanted), "whole, but for what was wrong before");
    assert_eq!(ask(2), (NEXT, syn(2)), "once for a SYN, whatever becomes of the reset");
    assert_ne!(ask(3).1, syn(3), "nothing has ended the connection yet");
    send(tuple, &right);
    assert_eq!(ask(4), (NEXT, syn(4)), "the listener's");
}
