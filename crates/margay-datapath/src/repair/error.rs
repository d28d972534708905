//! Why a socket was not taken down or set up.

use std::io;
use std::net::SocketAddr;

/// What about a socket keeps it on its host. Its connection goes on as before.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// `SO_PROTOCOL` is neither TCP nor MPTCP.
    #[error("it is no TCP socket")]
    NotTcp,
    /// `SO_PROTOCOL` is MPTCP: one connection over several TCP connections, which the repair mode does not know.
    #[error(
        "it speaks MPTCP; a program whose connections are to be carried must use plain TCP sockets \
         (GODEBUG=multipathtcp=0 for one in Go)"
    )]
    Mptcp,
    /// Neither ESTABLISHED nor CLOSE-WAIT.
    #[error("its connection is in state {0} of the kernel; only an open one that has not sent its FIN can be carried")]
    State(u8),
    /// Packets are signed with keys that the kernel does not give away.
    #[error("its packets are signed (TCP MD5 or TCP-AO), and the kernel keeps the keys")]
    Signed,
    /// A program has not read urgent data yet.
    #[error("urgent data waits to be read; try again when the program has read it")]
    Urgent,
    /// `TCP_ULP` names a protocol on top, as kernel TLS is one.
    #[error("the kernel runs a protocol on top of it (kernel TLS or another TCP_ULP), whose state cannot be read")]
    UpperProtocol,
    /// An error, or a message of the error queue, waits to be read.
    #[error("an error waits to be read by the program; try again when the program has read it")]
    PendingError,
    /// `SO_PEEK_OFF` is set: reading the queue would move the program's place in it.
    #[error("the program peeks with SO_PEEK_OFF, and reading its queue would move its place there")]
    PeekOffset,
}

/// A record that is not one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the record of a TCP socket is damaged at byte {at}: {what}")]
pub struct RecordError {
    /// Where the first field that is wrong begins.
    pub at: usize,
    /// What is wrong there.
    pub what: &'static str,
}

/// A socket was not taken down or set up. Nothing that the program or the peer can notice has happened, unless a
/// variant says otherwise.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum RepairError {
    /// This socket cannot be carried.
    #[error("the socket stays on this host: {0}")]
    Refused(Refusal),
    /// The process may not use the repair mode.
    #[error(
        "setsockopt(TCP_REPAIR): not permitted; run as root, or with CAP_NET_ADMIN in the user namespace that the \
         socket's network namespace belongs to"
    )]
    NotPermitted,
    /// A queue is longer than [`QUEUE_MAX`](super::QUEUE_MAX).
    #[error(
        "the {queue} queue holds {len} bytes, and at most {max} are carried: let it drain, and try again",
        max = super::QUEUE_MAX
    )]
    TooLong {
        /// "receive" or "send".
        queue: &'static str,
        /// Bytes in it.
        len: usize,
    },
    /// The numbers changed while the socket was read.
    #[error("packets or writes reached the socket while it was read: hold both, and read it again")]
    Moved,
    /// A record cannot be read.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// Local and remote address are not of the family of the record's socket.
    #[error("{local} and {remote} cannot be the addresses of a socket of this record, which is of {family}")]
    Family {
        /// This end.
        local: SocketAddr,
        /// The peer.
        remote: SocketAddr,
        /// "IPv4" or "IPv6".
        family: &'static str,
    },
    /// The connection has timestamps, and this host has switched them off.
    #[error(
        "the connection uses TCP timestamps, which are off on this host: set net.ipv4.tcp_timestamps=1, or the peer \
         would take its packets for old ones"
    )]
    NoTimestamps,
    /// A socket with these addresses exists.
    #[error("a connection from {local} to {remote} exists on this host already")]
    Exists {
        /// This end.
        local: SocketAddr,
        /// The peer.
        remote: SocketAddr,
    },
    /// The peer's FIN was given to the injector, and did not reach the socket.
    #[error("the peer's FIN did not reach the new socket: does a firewall of this host drop what comes from {remote}?")]
    FinLost {
        /// The peer.
        remote: SocketAddr,
    },
    /// The kernel refused a call.
    #[error("{call}: {source}; {meaning}")]
    System {
        /// The call.
        call: &'static str,
        /// What that means for the connection.
        meaning: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
}

impl RepairError {
    /// While a socket was looked at or read.
    pub(super) fn reading(call: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::System { call, meaning: "the connection stays on this host", source }
    }

    /// While a socket was made from a record.
    pub(super) fn making(call: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::System { call, meaning: "the connection cannot be set up on this host", source }
    }
}
