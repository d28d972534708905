//! Starts the process that answers, again and again, and holds what that one is given.

use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use super::{Words, given, pass};

/// One that ends at once is not started more often.
const REST: Duration = Duration::from_millis(100);

/// Until the one that answers was told to end.
pub(super) fn run(words: &Words) -> io::Result<()> {
    let (control, sockets) = given()?;
    let words = Words { worker: true, ..words.clone() };
    loop {
        let start = Instant::now();
        let (mut ours, theirs) = UnixStream::pair()?;
        let mut child = words.command().stdin(OwnedFd::from(theirs)).spawn()?;
        pass(&ours, b"s", &[control.as_fd()].into_iter().chain(sockets.fds()).collect::<Vec<_>>())?;
        // Nothing but its end is waited for.
        let mut word = [0];
        while ours.read(&mut word).is_ok_and(|len| len > 0) {}
        let status = child.wait()?;
        if status.success() {
            return Ok(());
        }
        tracing::warn!(%status, "the DNS responder has ended; it is started again");
        thread::sleep(REST.saturating_sub(start.elapsed()));
    }
}
