//! The system calls on a socket's descriptor that `nix` has no safe form of.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use nix::sys::socket::{MsgFlags, recv, send};

/// From `include/uapi/linux/tcp.h`.
const REPAIR_ON: libc::c_int = 1;
const REPAIR_OFF: libc::c_int = 0;
const REPAIR_OFF_NO_PROBE: libc::c_int = -1;
const QUEUE_SEQUENCE: libc::c_int = 21;
/// Most bytes that go to the kernel by one call: of more it may want memory in one piece.
const SEND_MAX: usize = 64 << 10;

/// The queue that calls mean in repair mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Queue {
    Receive = 1,
    Send = 2,
}

impl Queue {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Receive => "receive",
            Self::Send => "send",
        }
    }
}

/// What leaving the repair mode does first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leaving {
    /// Sends a window probe, which the peer answers.
    Probe,
    Silent,
}

/// A socket, for as long as a call takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Descriptor<'fd>(pub BorrowedFd<'fd>);

impl Descriptor<'_> {
    pub(super) fn raw(self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Fills `value` with as much of an option as fits; gives its length.
    pub(super) fn get_bytes(self, level: libc::c_int, name: libc::c_int, value: &mut [u8]) -> io::Result<usize> {
        let mut len = value.len() as libc::socklen_t;
        // SAFETY: value and length live across the call, and the length says how much room there is.
        let result = unsafe { libc::getsockopt(self.raw(), level, name, value.as_mut_ptr().cast(), &raw mut len) };
        if result == 0 { Ok(len as usize) } else { Err(io::Error::last_os_error()) }
    }

    pub(super) fn set_bytes(self, level: libc::c_int, name: libc::c_int, value: &[u8]) -> io::Result<()> {
        let len = value.len() as libc::socklen_t;
        // SAFETY: the value lives across the call, and is as long as it says.
        let result = unsafe { libc::setsockopt(self.raw(), level, name, value.as_ptr().cast(), len) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// An option of 32 bits, whatever their sign means.
    pub(super) fn get(self, level: libc::c_int, name: libc::c_int) -> io::Result<u32> {
        let mut value = [0; 4];
        self.get_bytes(level, name, &mut value)?;
        Ok(u32::from_ne_bytes(value))
    }

    pub(super) fn set(self, level: libc::c_int, name: libc::c_int, value: u32) -> io::Result<()> {
        self.set_bytes(level, name, &value.to_ne_bytes())
    }

    pub(super) fn repair(self) -> io::Result<()> {
        self.set(libc::IPPROTO_TCP, libc::TCP_REPAIR, REPAIR_ON.cast_unsigned())
    }

    /// Leaves the repair mode, and gives `SO_REUSEADDR` the value that the mode has cleared.
    pub(super) fn leave_repair(self, leaving: Leaving, reuses_address: bool) -> io::Result<()> {
        let value = match leaving {
            Leaving::Probe => REPAIR_OFF,
            Leaving::Silent => REPAIR_OFF_NO_PROBE,
        };
        match self.set(libc::IPPROTO_TCP, libc::TCP_REPAIR, value.cast_unsigned()) {
            // Kernels before 4.19 know no way out without a probe.
            Err(error) if leaving == Leaving::Silent && error.raw_os_error() == Some(libc::EINVAL) => {
                self.set(libc::IPPROTO_TCP, libc::TCP_REPAIR, REPAIR_OFF.cast_unsigned())?;
            }
            result => result?,
        }
        self.set(libc::SOL_SOCKET, libc::SO_REUSEADDR, reuses_address.into())
    }

    /// In repair mode: ends the connection without a word to the peer, whoever else has a descriptor of it.
    pub(super) fn end_silently(self) -> io::Result<()> {
        // SAFETY: all-zero bytes are a valid address of the family AF_UNSPEC, and live across the call.
        let result = unsafe {
            let address: libc::sockaddr = std::mem::zeroed();
            libc::connect(self.raw(), &raw const address, size_of::<libc::sockaddr>() as libc::socklen_t)
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    fn choose(self, queue: Queue) -> io::Result<()> {
        self.set(libc::IPPROTO_TCP, libc::TCP_REPAIR_QUEUE, queue as u32)
    }

    /// In repair mode: the sequence number behind the last byte of a queue.
    pub(super) fn sequence(self, queue: Queue) -> io::Result<u32> {
        self.choose(queue)?;
        self.get(libc::IPPROTO_TCP, QUEUE_SEQUENCE)
    }

    /// In repair mode, before the socket is connected.
    pub(super) fn set_sequence(self, queue: Queue, sequence: u32) -> io::Result<()> {
        self.choose(queue)?;
        self.set(libc::IPPROTO_TCP, QUEUE_SEQUENCE, sequence)
    }

    /// In repair mode: copies what is in a queue, as much as fits.
    pub(super) fn peek(self, queue: Queue, room: &mut [u8]) -> io::Result<usize> {
        self.choose(queue)?;
        Ok(recv(self.raw(), room, MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT)?)
    }

    /// In repair mode: puts bytes into a queue; those of the send queue count as sent.
    pub(super) fn fill(self, queue: Queue, bytes: &[u8]) -> io::Result<()> {
        self.choose(queue)?;
        self.write(bytes)
    }

    /// Writes all of `bytes`, and never waits for room.
    pub(super) fn write(self, bytes: &[u8]) -> io::Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let next = &rest[..rest.len().min(SEND_MAX)];
            let len = send(self.raw(), next, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL)?;
            if len == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            rest = &rest[len..];
        }
        Ok(())
    }

    /// Waits for at most `timeout_ms` until one of the `POLL*` events holds, or an error; gives those that hold.
    pub(super) fn poll(self, events: libc::c_short, timeout_ms: u16) -> io::Result<libc::c_short> {
        let mut polled = libc::pollfd { fd: self.raw(), events, revents: 0 };
        loop {
            // SAFETY: one pollfd lives across the call.
            let result = unsafe { libc::poll(&raw mut polled, 1, timeout_ms.into()) };
            match io::Error::last_os_error() {
                _ if result >= 0 => return Ok(polled.revents),
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error => return Err(error),
            }
        }
    }

    /// A number of bytes by `SIOCINQ`, `SIOCOUTQ` or `SIOCOUTQNSD`.
    pub(super) fn count(self, request: libc::c_ulong) -> io::Result<usize> {
        let mut count: libc::c_int = 0;
        // SAFETY: these requests write one c_int, which lives across the call.
        let result = unsafe { libc::ioctl(self.raw(), request as _, &raw mut count) };
        // Never negative for a connected socket.
        if result == 0 { Ok(usize::try_from(count).unwrap_or(0)) } else { Err(io::Error::last_os_error()) }
    }
}
