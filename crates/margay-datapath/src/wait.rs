//! What threads wait on: an event, a timer, a set of descriptors. Nothing here spins or times out.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use margay_core::time::Instant;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::{TimeSpec, TimeValLike};
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

/// Something that one thread tells another.
#[derive(Debug)]
pub struct Wake(EventFd);

impl Wake {
    /// A signal that is not set.
    pub fn new() -> io::Result<Self> {
        Ok(Self(EventFd::from_value_and_flags(0, EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?))
    }

    /// Sets it; it stays set until [`clear`](Self::clear).
    pub fn set(&self) {
        // The counter cannot overflow in practice, and if it did it would be set all the same.
        let _ = self.0.write(1);
    }

    /// Clears it.
    pub fn clear(&self) {
        // Refused only when it was not set.
        let _ = self.0.read();
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A timer on the clock of [`clock::now`](crate::clock::now).
#[derive(Debug)]
pub struct Timer(TimerFd);

impl Timer {
    /// A timer that is not armed.
    pub fn new() -> io::Result<Self> {
        let flags = TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC;
        Ok(Self(TimerFd::new(ClockId::CLOCK_MONOTONIC, flags)?))
    }

    /// Fires once at `at`, or at once if that has passed.
    pub fn arm(&self, at: Instant) -> io::Result<()> {
        // Zero would disarm it.
        let micros = i64::try_from(at.micros()).unwrap_or(i64::MAX / 1000).clamp(1, i64::MAX / 1000);
        let expiration = Expiration::OneShot(TimeSpec::microseconds(micros));
        Ok(self.0.set(expiration, TimerSetTimeFlags::TFD_TIMER_ABSTIME)?)
    }

    /// Takes note that it fired.
    pub fn clear(&self) {
        // Refused only when it has not fired.
        let _ = self.0.wait();
    }
}

impl AsFd for Timer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Waits until one of `descriptors` can be read; says which can. An error or hang-up counts, so that the read tells.
pub fn readable<const N: usize>(descriptors: [BorrowedFd<'_>; N]) -> io::Result<[bool; N]> {
    ready(descriptors.map(|descriptor| (descriptor, PollFlags::POLLIN)))
}

/// Waits until `to_write` can be written or `to_read` can be read; true if the first.
pub fn writable(to_write: BorrowedFd<'_>, to_read: BorrowedFd<'_>) -> io::Result<bool> {
    ready([(to_write, PollFlags::POLLOUT), (to_read, PollFlags::POLLIN)]).map(|[writable, _]| writable)
}

fn ready<const N: usize>(wanted: [(BorrowedFd<'_>, PollFlags); N]) -> io::Result<[bool; N]> {
    let mut set = wanted.map(|(descriptor, flags)| PollFd::new(descriptor, flags));
    loop {
        match poll(&mut set, PollTimeout::NONE) {
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
            Ok(_) => return Ok(set.map(|one| one.any().unwrap_or(true))),
        }
    }
}
