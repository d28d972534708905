//! By which way programs reach the DNS responder: behind an interface of its own, or, where this host cannot have that,
//! at an address of `sal0`.
//!
//! Whoever holds port 53 of any address keeps all others from the wildcard address. So the responder's sockets are in a
//! network namespace of their own, which lives as long as they do, and has no name that could be left behind.

use std::fs::File;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, OnceLock};
use std::thread;

use nix::sched::{CloneFlags, setns, unshare};

use super::netlink::{Block, Netlink, Route};
use crate::agent::RESPONDER_INTERFACE;
use crate::config::Config;

const DNS_PORT: u16 = 53;
/// The end of the pair in the responder's namespace.
const THERE: &str = "host";

/// Where the responder answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResponderWay {
    /// Behind an interface, in a network namespace of its own.
    Apart {
        /// Where it answers.
        address: Ipv4Addr,
    },
    /// In this host's own port space.
    OnHost {
        /// An address of this host, and the port that nobody else has there.
        listen: SocketAddr,
        /// Why not apart, where nobody has said so.
        why: Option<String>,
    },
}

impl ResponderWay {
    /// As configured, and as this host can. Looks at the host once.
    pub fn of(config: &Config) -> Self {
        static IS_POSSIBLE: OnceLock<Result<(), String>> = OnceLock::new();
        if let Some(listen) = config.dns.listen {
            return Self::OnHost { listen, why: None };
        }
        let ranges = config.ranges();
        let apart = Self::Apart { address: ranges.responder_v4() };
        // Who is not root sees what root would do.
        if !config.dns.enabled || !nix::unistd::geteuid().is_root() {
            return apart;
        }
        // One that is there was possible, and an agent that starts again wants no time for another.
        let is_there = || nix::net::if_::if_nametoindex(RESPONDER_INTERFACE).is_ok();
        let look =
            || if is_there() { Ok(()) } else { try_out(ranges.responder_v4()).map_err(|error| error.to_string()) };
        match IS_POSSIBLE.get_or_init(look) {
            Ok(()) => apart,
            Err(why) => Self::OnHost { listen: (ranges.host_v4(), DNS_PORT).into(), why: Some(why.clone()) },
        }
    }

    /// Where resolvers ask.
    pub fn address(&self) -> SocketAddr {
        match self {
            Self::Apart { address } => (*address, DNS_PORT).into(),
            Self::OnHost { listen, .. } => *listen,
        }
    }

    /// Whether it leaves this host's own port space alone.
    pub fn is_apart(&self) -> bool {
        matches!(self, Self::Apart { .. })
    }

    /// What the operator should know.
    pub fn remark(&self) -> Option<String> {
        let Self::OnHost { listen, why: Some(why) } = self else { return None };
        Some(format!(
            "the DNS responder answers at {listen}, and not behind an interface of its own, since this host has none \
             ({why}): nobody else can have port {DNS_PORT} of all addresses"
        ))
    }
}

/// A network namespace without a name.
#[derive(Debug)]
pub struct Namespace(OwnedFd);

impl AsRawFd for Namespace {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl AsFd for Namespace {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<OwnedFd> for Namespace {
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

impl Namespace {
    /// Makes one.
    ///
    /// # Errors
    ///
    /// The kernel has none, or this process may not.
    pub fn new() -> io::Result<Self> {
        on_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET)?;
            Ok(Self(File::open("/proc/thread-self/ns/net")?.into()))
        })
    }

    /// Does something on a thread in it.
    ///
    /// # Errors
    ///
    /// This process may not, or `act` fails.
    pub fn enter<T: Send>(&self, act: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        on_thread(|| {
            setns(&self.0, CloneFlags::CLONE_NEWNET)?;
            act()
        })
    }

    /// Gives the responder's end of the pair its address, and sends everything back by it.
    fn prepare(&self, address: Ipv4Addr) -> io::Result<()> {
        self.enter(|| {
            on_runtime(async {
                let net = Netlink::connect()?;
                let link = net.link(THERE).await?.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
                let only = Block { address: address.into(), bits: 32 };
                net.add_address(link.index, only).await?;
                net.set_up(link.index).await?;
                let everywhere = Block { address: IpAddr::V4(Ipv4Addr::UNSPECIFIED), bits: 0 };
                let route = Route {
                    table: super::change::MAIN_TABLE,
                    destination: everywhere,
                    index: link.index,
                    gateway: None,
                    source: Some(address.into()),
                };
                net.put_route(&route).await
            })
        })
    }
}

fn on_thread<T: Send>(act: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    // A panic there has ended the process already.
    thread::scope(|scope| scope.spawn(act).join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into())))
}

fn on_runtime<T>(act: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(act)
}

/// Whether this host could have a responder apart: makes all of it where nobody sees it, and forgets it.
fn try_out(address: Ipv4Addr) -> io::Result<()> {
    let outside = Namespace::new()?;
    let inside = Namespace::new()?;
    outside.enter(|| on_runtime(async { Netlink::connect()?.add_veth(RESPONDER_INTERFACE, THERE, &inside).await }))?;
    inside.prepare(address)
}

/// Makes the pair, and all that is beyond it.
pub(super) async fn make(net: &Netlink, interface: &str, address: Ipv4Addr) -> io::Result<()> {
    let Some(namespace) = net.namespace().map(Arc::clone) else {
        return Err(io::Error::other("only a running agent, whose responder runs, can make it"));
    };
    // One that is there leads to a namespace that is gone, or goes.
    if let Some(old) = net.link(interface).await?.filter(|link| link.veth) {
        super::change::gone_is_well(net.remove_link(old.index).await)?;
    }
    net.add_veth(interface, THERE, &namespace).await?;
    tokio::task::spawn_blocking(move || namespace.prepare(address)).await.map_err(io::Error::other)?
}

#[cfg(test)]
mod test {
    use margay_core::Ranges;

    use super::*;

    #[test]
    fn a_configured_place_is_taken_at_its_word() {
        let mut config = Config::default();
        let listen = "127.0.0.7:53".parse().expect("literal");
        config.dns.listen = Some(listen);
        let way = ResponderWay::of(&config);
        assert_eq!((way.address(), way.is_apart(), way.remark()), (listen, false, None));
    }

    #[test]
    fn a_host_that_cannot_is_told_why() {
        let listen = (Ranges::USUAL.host_v4(), DNS_PORT).into();
        let way = ResponderWay::OnHost { listen, why: Some("Operation not permitted".into()) };
        let remark = way.remark().expect("there is something to say");
        assert!(remark.contains("198.18.0.1:53") && remark.contains("not permitted"), "{remark}");
        let apart = ResponderWay::Apart { address: Ranges::USUAL.responder_v4() };
        assert_eq!(apart.address(), "198.18.0.2:53".parse().expect("literal"));
    }
}
