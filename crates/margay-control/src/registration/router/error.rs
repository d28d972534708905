//! Why there is no router.

use std::io;
use std::net::SocketAddr;

use crate::lineage::LineageError;
use crate::store::StoreError;

/// Why a router cannot be.
#[derive(Debug, thiserror::Error)]
pub enum RouterError {
    /// Another program has the port.
    #[error(
        "TCP {0} is taken by another program (`ss -ltnp` names it); stop that, or set [router] listen in the \
         configuration"
    )]
    PortInUse(SocketAddr),
    /// The system refuses.
    #[error("registrations cannot be heard at TCP {address}: {error}; correct [router] listen in the configuration")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// What it said.
        error: io::Error,
    },
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Whom it knows.
    #[error(transparent)]
    Lineage(#[from] LineageError),
}
