//! A connected TCP socket taken down on one host and set up again on another, by Linux's `TCP_REPAIR` (DESIGN §10): the
//! connection's numbers, what waits in both of its queues, and the options that a program has set.
//!
//! 1. The caller stops the program's use of the socket, and holds the connection's packets in both directions.
//! 2. [`Frozen::freeze`] looks whether the socket can be carried, and switches the repair mode on. [`Frozen::dump`]
//!    gives the [`TcpRecord`]. [`Frozen::thaw`] undoes the freeze; [`Frozen::close_silently`] gives the socket up.
//! 3. There, [`restore`] makes a socket of the record, still frozen. The caller lets packets pass to the new place, and
//!    [`Restored::go_on`] gives the socket for the program.
//!
//! **Packets must be held.** The repair mode keeps neither packets nor timers of the kernel from the socket: whatever
//! arrives after the dump is lost to the record. A dump that sees the numbers change under it says so. A packet that
//! arrives where no socket is any more is answered by a reset, which ends the connection.
//!
//! All of it wants `CAP_NET_ADMIN` in the user namespace that the socket's network namespace belongs to.
//!
//! Hold them rather than discard them: the new socket knows no round-trip time, and sends again what was lost on the
//! way to the peer only after one to four seconds. What the peer has got is acknowledged within a round trip.
//!
//! What is not carried: segments that came out of order (the peer sends them again), the estimates of round-trip time
//! and congestion window (both begin anew), where urgent data ends that this end has sent, and options that
//! [`SocketOptions`] does not name, socket filters among them.

mod descriptor;
mod error;
mod fin;
mod frozen;
mod md5;
mod options;
mod record;
#[cfg(test)]
mod record_test;
mod restored;

pub use error::{RecordError, Refusal, RepairError};
pub use frozen::Frozen;
pub use record::{Buffer, Family, SocketOptions, State, TcpRecord, Window, WindowScales};
pub use restored::{Note, Restored, restore};

/// Most bytes of either queue that are carried: 16 MiB.
pub const QUEUE_MAX: usize = 16 << 20;
