//! How still a connection of the kernel's is, by its socket.
#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

/// The kernel's number of the state in which neither end has closed.
const ESTABLISHED: u8 = 1;

/// What a TCP socket says of its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stillness {
    /// Neither end has closed it.
    pub is_open: bool,
    /// Since data was sent last; since the connection began, where none was.
    pub sent_before: Duration,
    /// Since data was received last.
    pub received_before: Duration,
    /// What the program has sent and the peer has not acknowledged, whether or not it has left.
    pub unacknowledged_bytes: usize,
    /// What has come and the program has not read.
    pub unread_bytes: usize,
}

impl Stillness {
    /// Asks the kernel.
    ///
    /// # Errors
    ///
    /// It is no TCP socket.
    pub fn of(socket: BorrowedFd<'_>) -> io::Result<Self> {
        let info = tcp_info(socket)?;
        Ok(Self {
            is_open: info.tcpi_state == ESTABLISHED,
            sent_before: Duration::from_millis(info.tcpi_last_data_sent.into()),
            received_before: Duration::from_millis(info.tcpi_last_data_recv.into()),
            unacknowledged_bytes: queued(socket, libc::TIOCOUTQ)?,
            unread_bytes: queued(socket, libc::FIONREAD)?,
        })
    }

    /// Whether the connection has carried nothing for a time, and owes nothing in either direction.
    pub fn is_quiet(&self, time: Duration) -> bool {
        self.is_open
            && self.unacknowledged_bytes == 0
            && self.unread_bytes == 0
            && self.sent_before.min(self.received_before) >= time
    }
}

fn tcp_info(socket: BorrowedFd<'_>) -> io::Result<libc::tcp_info> {
    let mut info = MaybeUninit::<libc::tcp_info>::zeroed();
    // Some hundred bytes.
    let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes, all of them within `info`.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, info.as_mut_ptr().cast(), &raw mut len)
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: integers alone, all of which were zero before: what an older kernel has not written is zero.
    Ok(unsafe { info.assume_init() })
}

/// Bytes in one of a socket's queues.
fn queued(socket: BorrowedFd<'_>, of: libc::Ioctl) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: both requests write one int.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), of, &raw mut bytes) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(usize::try_from(bytes).unwrap_or(0))
}

#[cfg(test)]
mod test {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::os::fd::AsFd;

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let client = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
        let (server, _) = listener.accept().expect("a connection");
        (client, server)
    }

    #[test]
    fn what_is_not_read_and_what_is_closed_is_not_quiet() {
        let (mut client, mut server) = pair();
        server.write_all(b"four").expect("open");
        client.peek(&mut [0; 4]).expect("it has come");
        let still = Stillness::of(client.as_fd()).expect("a socket of TCP");
        assert_eq!((still.is_open, still.unread_bytes), (true, 4));
        assert!(!still.is_quiet(Duration::ZERO));
        client.read_exact(&mut [0; 4]).expect("four bytes");
        assert!(Stillness::of(client.as_fd()).expect("a socket of TCP").is_quiet(Duration::ZERO));
        drop(server);
        assert_eq!(client.read(&mut [0; 4]).expect("the end"), 0);
        assert!(!Stillness::of(client.as_fd()).expect("a socket of TCP").is_quiet(Duration::ZERO));
    }

    #[test]
    fn time_and_what_is_not_acknowledged_count_in_both_directions() {
        let quiet = Stillness {
            is_open: true,
            sent_before: Duration::from_millis(60),
            received_before: Duration::from_millis(50),
            unacknowledged_bytes: 0,
            unread_bytes: 0,
        };
        assert!(quiet.is_quiet(Duration::from_millis(50)) && !quiet.is_quiet(Duration::from_millis(51)));
        assert!(!Stillness { unacknowledged_bytes: 1, ..quiet }.is_quiet(Duration::from_millis(50)));
        assert!(!Stillness { sent_before: Duration::ZERO, ..quiet }.is_quiet(Duration::from_millis(50)));
    }

    #[test]
    fn another_socket_is_refused() {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("loopback");
        assert!(Stillness::of(socket.as_fd()).is_err());
    }
}
