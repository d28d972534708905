//! TCP sockets that are taken down and set up again, on the loopback of a namespace of each test's own. They need root
//! over that namespace, which `unshare` gives.
#![allow(clippy::unwrap_used)] // A test may say so: any failure here is a failed test.
#![allow(unsafe_code)] // Options of sockets that no library sets.

#[allow(dead_code)] // Other tests use the rest.
mod namespace;

use std::fs;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Instant;

use libc::{IPPROTO_TCP, SOL_SOCKET};
use margay_datapath::repair::{
    Buffer, Family, Frozen, Note, QUEUE_MAX, Refusal, RepairError, Restored, State, TcpRecord, restore,
};
use namespace::{PATIENCE, ip, isolated, pattern};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockType, SockaddrStorage, getsockopt, send, sendto, setsockopt, socket, sockopt,
};

/// Marks packets that pass while others are held.
const MARK: u32 = 7;
const UNREAD_LEN: usize = 100_000;
/// More than the first window of a connection, and less than a send buffer may be.
const WRITTEN_LEN: usize = 1_000_000;
const PLACES: [&str; 3] = ["127.0.0.1:0", "[::1]:0", "[::ffff:127.0.0.1]:0"];

/// A connection over the loopback, whose server's socket is carried.
struct Connection {
    listener: TcpListener,
    client: TcpStream,
    server: TcpStream,
}

impl Connection {
    fn new(place: &str) -> Self {
        let place: SocketAddr = place.parse().unwrap();
        let listener = TcpListener::bind(place).unwrap();
        let address = listener.local_addr().unwrap();
        let client = TcpStream::connect(SocketAddr::new(address.ip().to_canonical(), address.port())).unwrap();
        let (server, _) = listener.accept().unwrap();
        for stream in [&client, &server] {
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.set_write_timeout(Some(PATIENCE)).unwrap();
        }
        Self { listener, client, server }
    }

    /// Carries the server's socket; gives the connection, and what went from host to host.
    fn carry(self) -> (Self, TcpRecord) {
        hold(&self.listener);
        self.carry_held()
    }

    fn carry_held(self) -> (Self, TcpRecord) {
        let Self { listener, client, server } = self;
        let (record, ends) = take_down(server);
        let restored = set_up(&record, ends).unwrap();
        release();
        (Self { listener, client, server: restored.go_on().unwrap().into() }, record)
    }

    /// Both directions work.
    fn prove(&mut self) {
        for len in [1, 200_000] {
            let bytes = pattern(len);
            let ends = [(&self.client, &self.server), (&self.server, &self.client)];
            for (mut from, mut to) in ends {
                thread::scope(|scope| {
                    scope.spawn(|| from.write_all(&bytes).unwrap());
                    assert!(read(&mut to, len) == bytes, "the bytes are the same");
                });
            }
        }
    }
}

fn nft(rules: &str) {
    let mut nft = Command::new("nft").args(["-f", "-"]).stdin(Stdio::piped()).spawn().unwrap();
    nft.stdin.take().unwrap().write_all(rules.as_bytes()).unwrap();
    assert!(nft.wait().unwrap().success(), "{rules}");
}

/// Lets no packet reach a listener's sockets: what they send arrives, and is not acknowledged.
fn hold_answers(listener: &TcpListener) {
    let port = listener.local_addr().unwrap().port();
    nft(&format!(
        "add table inet held
        add chain inet held input {{ type filter hook input priority 0; }}
        add rule inet held input meta mark {MARK} accept
        add rule inet held input tcp dport {port} drop\n"
    ));
}

/// Lets no packet of a listener's connections pass.
fn hold(listener: &TcpListener) {
    hold_answers(listener);
    hold_rest(listener);
}

fn hold_rest(listener: &TcpListener) {
    let port = listener.local_addr().unwrap().port();
    nft(&format!("add rule inet held input tcp sport {port} drop\n"));
}

fn release() {
    nft("delete table inet held\n");
}

fn take_down(server: TcpStream) -> (TcpRecord, [SocketAddr; 2]) {
    let ends = [server.local_addr().unwrap(), server.peer_addr().unwrap()];
    let frozen = Frozen::freeze(server.into()).unwrap();
    let record = frozen.dump().unwrap();
    frozen.close_silently().unwrap();
    (TcpRecord::decode(&record.encode()).unwrap(), ends)
}

fn set_up(record: &TcpRecord, [local, remote]: [SocketAddr; 2]) -> Result<Restored, RepairError> {
    restore(record, local, remote, &mut |packet| inject(packet, local.ip()))
}

/// Sends an IP packet of any source over the loopback.
fn inject(packet: &[u8], to: IpAddr) -> io::Result<()> {
    let to = to.to_canonical();
    let family = if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let socket = raw_socket(family)?;
    setsockopt(&socket, sockopt::Mark, &MARK)?;
    let to = SockaddrStorage::from(SocketAddr::new(to, 0));
    sendto(socket.as_raw_fd(), packet, &to, MsgFlags::empty())?;
    Ok(())
}

/// One that takes packets with their headers.
fn raw_socket(family: AddressFamily) -> io::Result<OwnedFd> {
    Ok(socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC, nix::sys::socket::SockProtocol::Raw)?)
}

fn set(socket: &impl AsFd, level: libc::c_int, name: libc::c_int, value: &[u8]) {
    let raw = socket.as_fd().as_raw_fd();
    // SAFETY: the value lives across the call, and is as long as it says.
    let result = unsafe { libc::setsockopt(raw, level, name, value.as_ptr().cast(), value.len() as libc::socklen_t) };
    assert_eq!(result, 0, "option {name}: {}", io::Error::last_os_error());
}

fn set_number(socket: &impl AsFd, level: libc::c_int, name: libc::c_int, value: u32) {
    set(socket, level, name, &value.to_ne_bytes());
}

fn set_numbers(socket: &impl AsFd, level: libc::c_int, options: &[(libc::c_int, u32)]) {
    for &(name, value) in options {
        set_number(socket, level, name, value);
    }
}

fn info(socket: &impl AsFd) -> libc::tcp_info {
    // SAFETY: numbers may all be zero.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
    let raw = socket.as_fd().as_raw_fd();
    // SAFETY: both live across the call, and the length is that of the room.
    let result = unsafe { libc::getsockopt(raw, IPPROTO_TCP, libc::TCP_INFO, (&raw mut info).cast(), &raw mut len) };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
    info
}

fn read(from: &mut impl Read, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    from.read_exact(&mut bytes).unwrap();
    bytes
}

/// Waits until that many bytes can be read.
fn await_unread(stream: &TcpStream, len: usize) {
    let mut room = vec![0; len];
    let begun = Instant::now();
    while stream.peek(&mut room).unwrap() < len {
        assert!(begun.elapsed() < PATIENCE, "the bytes have not come");
        thread::yield_now();
    }
}

/// Waits until a counter of the connection satisfies `is_so`.
fn await_info(stream: &TcpStream, is_so: impl Fn(&libc::tcp_info) -> bool) {
    let begun = Instant::now();
    while !is_so(&info(stream)) {
        assert!(begun.elapsed() < PATIENCE, "it has not come to that");
        thread::yield_now();
    }
}

fn write_until_full(stream: &mut TcpStream, bytes: &[u8]) -> usize {
    stream.set_nonblocking(true).unwrap();
    let mut written = 0;
    while written < bytes.len() {
        match stream.write(&bytes[written..]) {
            Ok(len) => written += len,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) => panic!("{error}"),
        }
    }
    stream.set_nonblocking(false).unwrap();
    written
}

fn own_loopback() {
    ip("link set lo up");
}

fn switch(name: &str, value: &str) {
    fs::write(format!("/proc/sys/net/ipv4/{name}"), value).unwrap();
}

#[test]
fn bytes_of_both_queues_arrive() {
    isolated("bytes_of_both_queues_arrive", || {
        own_loopback();
        for (place, congestion) in PLACES.into_iter().zip(["cubic", "bbr", "reno"]) {
            let allowed = fs::read_to_string("/proc/sys/net/ipv4/tcp_allowed_congestion_control").unwrap();
            let congestion = if allowed.contains(congestion) { congestion } else { "reno" };
            let mut connection = Connection::new(place);
            set(&connection.server, IPPROTO_TCP, libc::TCP_CONGESTION, congestion.as_bytes());
            let unread = pattern(UNREAD_LEN);
            connection.client.write_all(&unread).unwrap();
            await_unread(&connection.server, UNREAD_LEN);
            hold_answers(&connection.listener);
            let written = pattern(WRITTEN_LEN);
            let written = &written[..write_until_full(&mut connection.server, &written)];
            hold_rest(&connection.listener);
            let (mut connection, record) = connection.carry_held();
            // The kernel would find out when the peer's window grows, and that may be never.
            assert!(info(&connection.server).tcpi_snd_mss > 10_000, "segments are long from the beginning");
            assert!(record.receive_queue == unread && record.send_queue == written, "{place}");
            let unsent_len = record.unsent_len as usize;
            assert!(0 < unsent_len && unsent_len < written.len(), "{unsent_len} of {} bytes", written.len());
            assert_eq!(record.state, State::Established);
            assert_eq!(record.options.congestion, congestion);
            assert_eq!(record.family == Family::V4, place == PLACES[0]);
            assert!(record.timestamp.is_some() && record.selective_acks && record.scales.is_some());
            assert!(read(&mut connection.client, written.len()) == written, "{place}");
            assert!(read(&mut connection.server, UNREAD_LEN) == unread, "{place}");
            connection.prove();
            // It can be carried again, and has the congestion control and the options that it had.
            let before = record.options;
            let (mut connection, mut record) = connection.carry();
            // The kernel may have given it larger buffers meanwhile.
            record.options.receive_buffer.len = before.receive_buffer.len;
            record.options.send_buffer.len = before.send_buffer.len;
            assert_eq!(record.options, before);
            connection.prove();
        }
    });
}

#[test]
fn what_the_peer_has_ended_stays_ended() {
    isolated("what_the_peer_has_ended_stays_ended", || {
        own_loopback();
        for (place, reads_first) in PLACES.into_iter().flat_map(|place| [(place, false), (place, true)]) {
            let mut connection = Connection::new(place);
            connection.client.write_all(b"the last words").unwrap();
            connection.client.shutdown(std::net::Shutdown::Write).unwrap();
            await_info(&connection.client, |info| info.tcpi_state == 5);
            if reads_first {
                let mut text = String::new();
                connection.server.read_to_string(&mut text).unwrap();
            }
            hold_answers(&connection.listener);
            connection.server.write_all(&pattern(UNREAD_LEN)).unwrap();
            hold_rest(&connection.listener);
            let (connection, record) = connection.carry_held();
            assert_eq!(record.state, State::CloseWait);
            let (mut connection, again) = connection.carry();
            assert_eq!((again.state, again.receive_sequence), (State::CloseWait, record.receive_sequence));
            let mut text = String::new();
            connection.server.read_to_string(&mut text).unwrap();
            assert_eq!(text, if reads_first { "" } else { "the last words" });
            connection.server.write_all(b"understood").unwrap();
            drop(connection.server);
            let mut answer = Vec::new();
            connection.client.read_to_end(&mut answer).unwrap();
            assert!(answer == [&pattern(UNREAD_LEN), &b"understood"[..]].concat(), "{place}");
        }
    });
}

#[test]
fn options_of_a_program_are_kept() {
    isolated("options_of_a_program_are_kept", || {
        own_loopback();
        for place in PLACES {
            let connection = Connection::new(place);
            let general = [
                (libc::SO_KEEPALIVE, 1),
                (libc::SO_OOBINLINE, 1),
                (libc::SO_RCVLOWAT, 3),
                (libc::SO_RCVBUF, 300_000),
                (libc::SO_REUSEPORT, 1),
            ];
            set_numbers(&connection.server, SOL_SOCKET, &general);
            let tcp = [
                (libc::TCP_KEEPIDLE, 100),
                (libc::TCP_KEEPINTVL, 20),
                (libc::TCP_KEEPCNT, 3),
                (libc::TCP_NODELAY, 1),
                (libc::TCP_CORK, 1),
                (libc::TCP_USER_TIMEOUT, 40_000),
            ];
            set_numbers(&connection.server, IPPROTO_TCP, &tcp);
            set_number(&connection.server, libc::IPPROTO_IP, libc::IP_TOS, 0x48);
            set_number(&connection.server, SOL_SOCKET, libc::SO_PRIORITY, 5);
            set(&connection.server, SOL_SOCKET, libc::SO_LINGER, &[1_u32, 9].map(u32::to_ne_bytes).concat());
            connection.server.set_nonblocking(true).unwrap();
            let (connection, before) = connection.carry();
            let options = &before.options;
            assert!(options.keepalive && options.urgent_inline && options.shares_port && options.non_blocking);
            assert!(options.no_delay && options.corked && options.receive_buffer.is_set && !options.send_buffer.is_set);
            let keepalive = (options.keepalive_idle_s, options.keepalive_interval_s, options.keepalive_probes);
            assert_eq!(keepalive, (100, 20, 3));
            assert_eq!((options.user_timeout_ms, options.linger_s, options.tos), (40_000, Some(9), 0x48));
            assert_eq!((options.priority, options.receive_low_water), (5, 3));
            assert_eq!(u128::from(options.receive_timeout_us), PATIENCE.as_micros());
            let (_, after) = connection.carry();
            assert_eq!(after.options, before.options, "{place}");
        }
    });
}

#[test]
fn a_socket_that_was_shut_for_reading_stays_so() {
    isolated("a_socket_that_was_shut_for_reading_stays_so", || {
        own_loopback();
        let connection = Connection::new(PLACES[0]);
        connection.server.shutdown(std::net::Shutdown::Read).unwrap();
        let (mut connection, record) = connection.carry();
        assert!(record.reading_is_shut && record.state == State::Established);
        assert_eq!(connection.server.read(&mut [0]).unwrap(), 0);
        connection.server.write_all(b"heard").unwrap();
        assert_eq!(read(&mut connection.client, 5), b"heard");
    });
}

#[test]
fn a_server_listens_again_beside_a_connection_that_was_carried() {
    isolated("a_server_listens_again_beside_a_connection_that_was_carried", || {
        own_loopback();
        for place in PLACES {
            let (connection, _) = Connection::new(place).carry();
            assert!(info(&connection.server).tcpi_segs_out > 0, "the peer hears of it at once");
            let address = connection.listener.local_addr().unwrap();
            let Connection { listener, client, server } = connection;
            drop(listener);
            let listener = TcpListener::bind(address).unwrap();
            Connection { listener, client, server }.prove();
        }
    });
}

#[test]
fn keepalives_of_the_peer_are_answered() {
    isolated("keepalives_of_the_peer_are_answered", || {
        own_loopback();
        let connection = Connection::new(PLACES[0]);
        let options = [(libc::TCP_KEEPIDLE, 1), (libc::TCP_KEEPINTVL, 1), (libc::TCP_KEEPCNT, 2)];
        set_numbers(&connection.client, IPPROTO_TCP, &options);
        set_number(&connection.client, SOL_SOCKET, libc::SO_KEEPALIVE, 1);
        let (mut connection, _) = connection.carry();
        let before = info(&connection.client).tcpi_segs_in;
        await_info(&connection.client, |info| info.tcpi_segs_in >= before + 3);
        connection.prove();
    });
}

#[test]
fn a_frozen_socket_thaws_silently() {
    isolated("a_frozen_socket_thaws_silently", || {
        own_loopback();
        let mut connection = Connection::new(PLACES[0]);
        connection.prove();
        let reuses_address = |stream: &TcpStream| rustix::net::sockopt::socket_reuseaddr(stream).unwrap();
        assert!(reuses_address(&connection.server), "it has it from its listener");
        let segments = info(&connection.server).tcpi_segs_out;
        let frozen = Frozen::freeze(connection.server.into()).unwrap();
        frozen.dump().unwrap();
        connection.server = frozen.thaw().into();
        assert_eq!(info(&connection.server).tcpi_segs_out, segments);
        drop(Frozen::freeze(connection.server.try_clone().unwrap().into()).unwrap());
        assert_eq!(info(&connection.server).tcpi_segs_out, segments);
        assert!(reuses_address(&connection.server));
        connection.prove();
    });
}

#[test]
fn what_is_given_up_is_given_up_silently() {
    isolated("what_is_given_up_is_given_up_silently", || {
        own_loopback();
        let connection = Connection::new(PLACES[0]);
        let mut of_program = connection.server.try_clone().unwrap();
        let ends = [connection.server.local_addr().unwrap(), connection.server.peer_addr().unwrap()];
        // Nothing is on its way, so that whatever the client hears is of what follows.
        let heard = info(&connection.client).tcpi_segs_in;
        let frozen = Frozen::freeze(connection.server.into()).unwrap();
        let mut record = frozen.dump().unwrap();
        let exists = set_up(&record, ends);
        assert!(matches!(exists, Err(RepairError::Exists { .. })), "{exists:?}");
        frozen.close_silently().unwrap();
        let error = of_program.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
        drop(of_program);
        write_unsent(&mut record, UNSENT);
        set_up(&record, ends).unwrap().discard();
        let restored = set_up(&record, ends).unwrap();
        assert_eq!(info(&connection.client).tcpi_segs_in, heard, "the peer hears nothing");
        let mut connection = Connection { server: restored.go_on().unwrap().into(), ..connection };
        assert_eq!(read(&mut connection.client, UNSENT.len()), UNSENT);
        connection.prove();
    });
}

#[test]
fn queues_are_carried_up_to_a_bound() {
    isolated("queues_are_carried_up_to_a_bound", || {
        own_loopback();
        let mut connection = Connection::new(PLACES[0]);
        let much = pattern(40 << 20);
        set_number(&connection.server, SOL_SOCKET, libc::SO_SNDBUFFORCE, much.len() as u32);
        set_number(&connection.server, SOL_SOCKET, libc::SO_RCVBUFFORCE, much.len() as u32);
        connection.server.write_all(&much).unwrap();
        let unread = &much[..10 << 20];
        connection.client.write_all(unread).unwrap();
        await_info(&connection.client, |info| info.tcpi_bytes_acked > unread.len() as u64);
        let frozen = Frozen::freeze(connection.server.into()).unwrap();
        let error = frozen.dump().unwrap_err();
        assert!(matches!(error, RepairError::TooLong { queue: "send", .. }), "{error}");
        connection.server = frozen.thaw().into();
        let read_len = 26 << 20;
        assert!(read(&mut connection.client, read_len) == much[..read_len]);
        let (mut connection, record) = connection.carry();
        assert!(record.receive_queue == unread, "{} bytes", record.receive_queue.len());
        assert!(much.ends_with(&record.send_queue) && record.send_queue.len() > 1 << 20);
        assert!(read(&mut connection.client, much.len() - read_len) == much[read_len..]);
        assert!(read(&mut connection.server, unread.len()) == unread);
        connection.prove();
    });
}

const UNSENT: &[u8] = b"not sent yet";

/// As if the program of a record with an empty send queue had written that while its window was closed.
fn write_unsent(record: &mut TcpRecord, bytes: &[u8]) {
    record.send_queue = bytes.to_vec();
    record.unsent_len = bytes.len() as u32;
    record.send_sequence = record.send_sequence.wrapping_add(record.unsent_len);
}

fn refusal(socket: impl Into<OwnedFd>) -> Refusal {
    match Frozen::freeze(socket.into()) {
        Err((_, RepairError::Refused(refusal))) => refusal,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_cannot_be_carried_is_refused_and_goes_on() {
    isolated("what_cannot_be_carried_is_refused_and_goes_on", || {
        own_loopback();
        let mut connection = Connection::new(PLACES[0]);
        assert_eq!(refusal(UdpSocket::bind(PLACES[0]).unwrap()), Refusal::NotTcp);
        assert_eq!(refusal(std::os::unix::net::UnixStream::pair().unwrap().0), Refusal::NotTcp);
        assert_eq!(refusal(connection.listener.try_clone().unwrap()), Refusal::State(10));
        let stream = |protocol| rustix::net::socket(rustix::net::AddressFamily::INET, STREAM, protocol);
        assert_eq!(refusal(stream(None).unwrap()), Refusal::State(7));
        // A kernel may be without it.
        if let Ok(multipath) = stream(Some(rustix::net::ipproto::MPTCP)) {
            assert_eq!(refusal(multipath), Refusal::Mptcp);
        }
        send(connection.client.as_raw_fd(), b"!", MsgFlags::MSG_OOB).unwrap();
        let begun = Instant::now();
        while Frozen::freeze(connection.server.try_clone().unwrap().into()).is_ok() {
            assert!(begun.elapsed() < PATIENCE, "urgent data is not noticed");
        }
        assert_eq!(refusal(connection.server.try_clone().unwrap()), Refusal::Urgent);
        nix::sys::socket::recv(connection.server.as_raw_fd(), &mut [0], MsgFlags::MSG_OOB).unwrap();
        connection.prove();
        if has_peek_offset() {
            set_number(&connection.server, SOL_SOCKET, libc::SO_PEEK_OFF, 0);
            assert_eq!(refusal(connection.server.try_clone().unwrap()), Refusal::PeekOffset);
            set_number(&connection.server, SOL_SOCKET, libc::SO_PEEK_OFF, u32::MAX);
        }
        let (mut connection, _) = connection.carry();
        if sign(&connection.server) {
            assert_eq!(refusal(connection.server.try_clone().unwrap()), Refusal::Signed);
        }
        connection.prove();
        connection.server.shutdown(std::net::Shutdown::Write).unwrap();
        await_info(&connection.server, |info| info.tcpi_state == 5);
        assert_eq!(refusal(connection.server), Refusal::State(5));
    });
}

const STREAM: rustix::net::SocketType = rustix::net::SocketType::STREAM;

/// Linux 6.9 and later peek with an offset on TCP sockets.
fn has_peek_offset() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split('.').map_while(|number| number.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(9))
}

/// Gives a socket a key for another peer's packets; false where the kernel has no TCP MD5.
fn sign(socket: &TcpStream) -> bool {
    // `struct tcp_md5sig`: address, flags and prefix length, length of the key, interface, key.
    let mut key = [0_u8; 216];
    key[0..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
    key[4..8].copy_from_slice(&[192, 0, 2, 1]);
    key[130..132].copy_from_slice(&4_u16.to_ne_bytes());
    key[136..140].copy_from_slice(b"key!");
    let len = key.len() as libc::socklen_t;
    let raw = socket.as_raw_fd();
    // SAFETY: the key lives across the call, and is as long as it says.
    unsafe { libc::setsockopt(raw, IPPROTO_TCP, libc::TCP_MD5SIG, key.as_ptr().cast(), len) == 0 }
}

#[test]
fn hosts_differ() {
    isolated("hosts_differ", || {
        own_loopback();
        switch("tcp_timestamps", "0");
        let (mut connection, record) = Connection::new(PLACES[0]).carry();
        assert_eq!(record.timestamp, None);
        connection.prove();
        switch("tcp_timestamps", "1");
        switch("tcp_ecn", "1");
        let (mut connection, _) = connection.carry();
        connection.prove();

        let connection = Connection::new(PLACES[1]);
        hold(&connection.listener);
        let (mut record, ends) = take_down(connection.server);
        switch("tcp_timestamps", "0");
        let error = set_up(&record, ends).unwrap_err();
        assert!(matches!(error, RepairError::NoTimestamps), "{error}");
        switch("tcp_timestamps", "1");
        let mixed = ["127.0.0.1:1".parse().unwrap(), ends[1]];
        let error = set_up(&record, mixed).unwrap_err();
        assert!(matches!(error, RepairError::Family { .. }), "{error}");
        record.options.congestion = "none-such".to_owned();
        record.options.receive_buffer = Buffer { len: 1 << 30, is_set: true };
        record.options.send_buffer = Buffer { len: 1 << 30, is_set: true };
        record.options.priority = 4096;
        let restored = set_up(&record, ends).unwrap();
        assert_eq!(restored.notes(), [Note::CongestionControl("none-such".to_owned()), Note::NoEcn]);
        release();
        let server: TcpStream = restored.go_on().unwrap().into();
        let buffers = [getsockopt(&server, sockopt::RcvBuf).unwrap(), getsockopt(&server, sockopt::SndBuf).unwrap()];
        assert!(buffers.iter().all(|len| *len <= 2 * QUEUE_MAX), "no more than a record may bring: {buffers:?}");
        let priority = getsockopt(&server, sockopt::Priority).unwrap();
        assert_eq!(priority, 6, "what a program without privileges may have");
        Connection { server, ..connection }.prove();
    });
}

#[test]
fn a_fin_that_does_not_come_ends_nothing() {
    isolated("a_fin_that_does_not_come_ends_nothing", || {
        own_loopback();
        let connection = Connection::new(PLACES[0]);
        connection.client.shutdown(std::net::Shutdown::Write).unwrap();
        await_info(&connection.client, |info| info.tcpi_state == 5);
        hold(&connection.listener);
        let (mut record, ends) = take_down(connection.server);
        write_unsent(&mut record, UNSENT);
        let error = restore(&record, ends[0], ends[1], &mut |_| Ok(())).unwrap_err();
        assert!(matches!(error, RepairError::FinLost { .. }), "{error}");
        let error = restore(&record, ends[0], ends[1], &mut |_| Err(io::ErrorKind::Other.into())).unwrap_err();
        assert!(matches!(error, RepairError::System { call: "injecting the peer's FIN", .. }), "{error}");
        let restored = set_up(&record, ends).unwrap();
        release();
        let mut server = TcpStream::from(restored.go_on().unwrap());
        assert_eq!(info(&server).tcpi_notsent_bytes, 0, "it is sent at once");
        assert_eq!(server.read(&mut [0]).unwrap(), 0);
        server.write_all(b"still here").unwrap();
        let mut client = connection.client;
        assert_eq!(read(&mut client, UNSENT.len()), UNSENT);
        assert_eq!(read(&mut client, 10), b"still here");
    });
}

#[test]
fn a_thousand_sockets_are_carried() {
    isolated("a_thousand_sockets_are_carried", || {
        own_loopback();
        let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, most, most).unwrap();
        let listener = TcpListener::bind(PLACES[0]).unwrap();
        let address = listener.local_addr().unwrap();
        let words = pattern(1000);
        let mut connections = Vec::new();
        for _ in 0..1000 {
            let mut client = TcpStream::connect(address).unwrap();
            client.write_all(&words).unwrap();
            let (server, _) = listener.accept().unwrap();
            await_unread(&server, words.len());
            connections.push((client, server));
        }
        hold(&listener);
        let begun = Instant::now();
        let taken: Vec<_> = connections.into_iter().map(|(client, server)| (client, take_down(server))).collect();
        let down = begun.elapsed();
        let begun = Instant::now();
        let set_up = taken.into_iter().map(|(client, (record, ends))| (client, set_up(&record, ends).unwrap()));
        let set_up: Vec<_> = set_up.collect();
        let up = begun.elapsed();
        release();
        let begun = Instant::now();
        let gone_on = set_up.into_iter().map(|(client, restored)| (client, restored.go_on().unwrap()));
        let gone_on: Vec<(TcpStream, OwnedFd)> = gone_on.collect();
        eprintln!("of 1000 sockets: down {down:?}, up {up:?}, on {:?}", begun.elapsed());
        for (mut client, server) in gone_on {
            let mut server = TcpStream::from(server);
            server.set_read_timeout(Some(PATIENCE)).unwrap();
            client.set_read_timeout(Some(PATIENCE)).unwrap();
            assert_eq!(read(&mut server, words.len()), words);
            server.write_all(b"on").unwrap();
            assert_eq!(read(&mut client, 2), b"on");
        }
    });
}

/// What one end has not read is what the other one has written last; nothing of the connection changes by the question.
#[test]
fn both_ends_say_the_same_of_a_connection_that_goes_on() {
    isolated("both_ends_say_the_same_of_a_connection_that_goes_on", || {
        own_loopback();
        for place in PLACES {
            let mut connection = Connection::new(place);
            connection.client.write_all(b"read, and not read").unwrap();
            assert_eq!(read(&mut connection.server, 6), b"read, ");
            await_unread(&connection.server, 12);
            let facts = |stream: &TcpStream| {
                let frozen = Frozen::freeze(stream.try_clone().unwrap().into()).unwrap();
                let facts = frozen.facts().unwrap();
                assert!(!frozen.has_ecn().unwrap(), "the kernel asks for none by itself");
                drop(frozen.thaw());
                facts
            };
            let client = facts(&connection.client);
            let server = facts(&connection.server);
            assert_eq!(server.unread.wrapping_add(12), client.written);
            assert_eq!(client.unread, server.written);
            assert_eq!((client.own_scale, client.peer_scale), (server.peer_scale, server.own_scale));
            assert!(client.own_scale > 0 && client.has_sack && server.has_sack);
            let [first, again] = [client, facts(&connection.client)].map(|facts| facts.timestamp.unwrap());
            assert!(again.wrapping_sub(first) < PATIENCE.as_millis() as u32, "a clock of milliseconds");
            assert_eq!(read(&mut connection.server, 12), b"and not read");
            connection.prove();
        }
    });
}

#[test]
fn a_connection_that_one_end_has_closed_says_nothing() {
    isolated("a_connection_that_one_end_has_closed_says_nothing", || {
        own_loopback();
        let Connection { client, server, .. } = Connection::new(PLACES[0]);
        client.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(read_to_end(&server), b"");
        let frozen = Frozen::freeze(server.into()).unwrap();
        assert!(matches!(frozen.facts(), Err(RepairError::Refused(Refusal::State(_)))));
    });
}

fn read_to_end(mut stream: &TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    bytes
}
