//! The DNS responder: names of one zone, over UDP and TCP, for programs of this host (DESIGN §5, §18).
//!
//! It knows its zone and the reverse zones of the virtual addresses, and refuses everything else at once, so that whoever asks
//! goes on to the next resolver. It never asks anybody itself.

mod answer;
mod transport;
mod zone;

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;

use margay_core::name::Name;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::lease::Leases;
use answer::Answers;
use zone::Zones;

/// What the responder asks about a name before it answers.
pub trait Directory: Send + Sync + 'static {
    /// Plain addresses to answer with, because nobody serves the name and the operator configured a fallback (DESIGN §18); empty:
    /// virtual addresses.
    fn fallback<'a>(&'a self, name: &'a Name) -> Pin<Box<dyn Future<Output = Vec<IpAddr>> + Send + 'a>>;
}

/// Why the responder does not run.
#[derive(Debug, thiserror::Error)]
pub enum DnsError {
    /// Another server.
    #[error(
        "{0}: another program answers DNS there (`ss -lunpt` shows which); stop it, or give Margay another address with [dns] listen"
    )]
    PortInUse(SocketAddr),
    /// An address of another host, or of none.
    #[error(
        "{0}: this host does not have the address; `margay up` sets the interface up, or give Margay another address with [dns] listen"
    )]
    NoAddress(SocketAddr),
    /// A low port without the right to it.
    #[error(
        "{0}: the port may be opened by root alone; run as root, or give Margay a port above 1023 with [dns] listen"
    )]
    NotPermitted(SocketAddr),
    /// Not a zone.
    #[error("`{zone}` is no DNS zone ({why}); write for example sal.internal")]
    Zone {
        /// As configured.
        zone: String,
        /// What is wrong with it.
        why: String,
    },
    /// Anything else.
    #[error("{listen}: the DNS responder cannot listen there: {error}")]
    Io {
        /// Where.
        listen: SocketAddr,
        /// What the system said.
        error: io::Error,
    },
}

/// What the responder did since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DnsCounters {
    /// Readable questions.
    pub queries: u64,
    /// Answered from the zone, also where the answer is that there is none.
    pub answered: u64,
    /// Of other zones, or of a kind that the responder does not do.
    pub refused: u64,
    /// No address could be leased.
    pub failed: u64,
    /// Not DNS questions.
    pub malformed: u64,
}

/// A running responder. It ends when it is dropped.
pub struct Responder {
    local: SocketAddr,
    answers: Arc<Answers>,
    running: watch::Sender<()>,
    tasks: JoinSet<()>,
}

impl Responder {
    /// Answers for `zone` on `listen`, UDP and TCP. Port 0 takes one that is free for both.
    ///
    /// # Errors
    ///
    /// The address cannot be had, or the zone is none.
    pub async fn start(
        listen: SocketAddr,
        zone: &str,
        leases: Arc<Leases>,
        directory: Arc<dyn Directory>,
    ) -> Result<Self, DnsError> {
        let zones = Zones::new(zone, listen.ip())?;
        let (udp, tcp) = transport::bind(listen).await.map_err(|error| explain(listen, error))?;
        let local = udp.local_addr().map_err(|error| explain(listen, error))?;
        let answers = Arc::new(Answers::new(zones, Arc::clone(&leases), directory));
        let (running, stopped) = watch::channel(());
        let mut tasks = JoinSet::new();
        tasks.spawn(transport::serve_udp(udp, Arc::clone(&answers), stopped.clone()));
        tasks.spawn(transport::serve_tcp(tcp, Arc::clone(&answers), stopped.clone()));
        tasks.spawn(transport::keep_uses(leases, stopped));
        Ok(Self { local, answers, running, tasks })
    }

    /// What it did so far.
    pub fn counters(&self) -> DnsCounters {
        self.answers.counters()
    }

    /// Where it listens.
    pub fn local_address(&self) -> SocketAddr {
        self.local
    }

    /// Ends it; its address is free afterwards.
    pub async fn stop(self) {
        let Self { running, mut tasks, .. } = self;
        drop(running);
        while tasks.join_next().await.is_some() {}
    }
}

impl std::fmt::Debug for Responder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Responder({})", self.local)
    }
}

fn explain(listen: SocketAddr, error: io::Error) -> DnsError {
    match error.kind() {
        io::ErrorKind::AddrInUse => DnsError::PortInUse(listen),
        io::ErrorKind::AddrNotAvailable => DnsError::NoAddress(listen),
        io::ErrorKind::PermissionDenied => DnsError::NotPermitted(listen),
        _ => DnsError::Io { listen, error },
    }
}
