//! What is learned of keys that two hosts use.

use core::net::SocketAddr;

use crate::types::key::HostId;

/// What one of three hosts learns of a key that two of them use. Of the other two, it names those that it has not
/// known before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Twin {
    /// At a peer of both: the elder is alive, and the newcomer was kept out.
    KeptOut {
        /// Whose key it is.
        host: HostId,
        /// Where the elder is.
        elder: SocketAddr,
        /// Where the newcomer is.
        newcomer: SocketAddr,
    },
    /// At the elder: this host's key is shown by another one, which is kept out.
    Elsewhere {
        /// Who says so.
        peer: HostId,
        /// Where the newcomer is.
        newcomer: SocketAddr,
    },
    /// At the newcomer: this host is kept out.
    Refused {
        /// By whom.
        peer: HostId,
    },
}
