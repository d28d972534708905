//! The framer of clients: a memcached on this host that is none, or a Redis. Each client's connection is one framed
//! connection with the ensemble.

mod flow;
mod session;
mod slots;

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use margay_core::fair_table::Peer;
use margay_core::name::Prefix;
use margay_sdk::shares::{MEMORY_MAX, Room};
use margay_sdk::{Agent, Options};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, UdpSocket};

use crate::protocol::Protocol;
use flow::Flows;
use session::Session;

/// Concurrent clients on this host; further ones are refused with a message.
const OWN_CLIENTS_MAX: usize = 4096;
/// Clients of other hosts at once; those of one are a sixteenth of them, and of all together half.
const CLIENTS_MAX: usize = 32_768;
/// Bytes that all clients on this host may hold, beside those of other hosts.
const OWN_MEMORY_MAX: usize = 1 << 30;
/// Pause where no connection can be taken: mostly there are no more descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How an ensemble is reached.
pub trait Reach: Send + Sync + 'static {
    /// A connected socket: all that is sent from there goes to one switch. Several connections share it.
    fn open(&self) -> impl Future<Output = io::Result<UdpSocket>> + Send;

    /// What it is called.
    fn name(&self) -> &str;
}

/// An ensemble by its name.
#[derive(Clone, Debug)]
pub struct ByName {
    agent: Agent,
    prefix: Prefix,
    name: String,
}

impl ByName {
    /// Of an agent; the name as it is written, and its bits.
    pub fn new(agent: Agent, prefix: Prefix, name: String) -> Self {
        Self { agent, prefix, name }
    }
}

impl Reach for ByName {
    async fn open(&self) -> io::Result<UdpSocket> {
        let connected = Options::new().agent(&self.agent).connect_datagrams(&self.prefix).await?;
        Ok(connected.into_udp())
    }

    fn name(&self) -> &str {
        &self.name
    }
}

/// Where clients come, and what they reach.
pub struct Framer<R> {
    protocol: Protocol,
    listener: TcpListener,
    reach: Arc<R>,
    flows: Arc<Flows>,
}

impl<R: Reach> Framer<R> {
    /// Listens for clients that speak a protocol.
    ///
    /// # Errors
    ///
    /// The address cannot be had.
    pub async fn bind(protocol: Protocol, listen: SocketAddr, reach: R) -> io::Result<Self> {
        let listener = TcpListener::bind(listen).await?;
        Ok(Self { protocol, listener, reach: Arc::new(reach), flows: Arc::default() })
    }

    /// The address that clients connect to, with the port that the kernel has chosen where none was given.
    ///
    /// # Errors
    ///
    /// The kernel does not know it.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves clients until it is dropped.
    pub async fn run(self) {
        let places = Room::new(CLIENTS_MAX, OWN_CLIENTS_MAX);
        let memory = Room::new(MEMORY_MAX, OWN_MEMORY_MAX);
        let mut clients = tokio::task::JoinSet::new();
        loop {
            let Ok((mut stream, from)) = self.listener.accept().await else {
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            };
            while clients.try_join_next().is_some() {}
            let reach = Arc::clone(&self.reach);
            let flows = Arc::clone(&self.flows);
            let protocol = self.protocol;
            let peer = peer_at(from.ip());
            let mut place = places.share(peer);
            let memory = memory.share(peer);
            clients.spawn(async move {
                // How a client ends is its own affair.
                let _ = match place.resize(1) {
                    Ok(()) => Session::new(stream, protocol, reach, flows, memory).run().await,
                    Err(full) => {
                        let text = format!("the framer takes no more clients of this host now: {full}");
                        stream.write_all(&protocol.error(&text)).await
                    }
                };
            });
        }
    }
}

/// Whose a client is.
fn peer_at(address: IpAddr) -> Peer {
    if address.to_canonical().is_loopback() { Peer::Own } else { Peer::Unauthenticated(address) }
}
