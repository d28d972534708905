//! What each request does.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use margay_control::lease::{Asker, LeaseError};
use margay_core::Tuple;
use margay_core::name::{AUTHORITY_BITS, Name, Prefix, ServiceId, is_computable};
use margay_core::table::SERVICE_PORT;
use margay_datapath::active_sockets::{Cookie, NamespaceCookie, Socket, namespace_of, own_namespace};
use margay_datapath::sock_diag;
use nix::errno::Errno;
use nix::sys::socket::sockopt::BindToDevice;
use rustix::net::sockopt;

use super::message::{Kind, Reply, Request};
use super::next;
use super::rights::{Caller, Rights};
use super::source::bound_to;
use crate::agent::Agent;
use crate::agent::active::bound::{BindError, Bound};
use crate::agent::service::PublishError;
use crate::listener::{Protocol, is_loopback};

/// What went wrong: for the program, and for whoever reads its messages.
pub(in crate::agent) type No = (Errno, String);

/// A number of a socket that no port is: what names itself after a port is told apart from it.
const OWN_NUMBER: u32 = 1 << 31;
/// What the number of a socket's own name is derived with.
const OWN_NUMBER_CONTEXT: &str = "margay 2026 own name of a socket";

/// Answers a request.
pub fn answer(agent: &Agent, caller: &Caller, request: &Request, passed: Vec<OwnedFd>) -> Reply {
    let done = match request.kind {
        Kind::Name => name(request),
        Kind::Resolve => resolve(agent, caller, request),
        Kind::Bind => handed(request, passed).and_then(|socket| bind(agent, caller, request, &socket)),
        Kind::Source => handed(request, passed).and_then(|socket| source(agent, caller, request, &socket)),
        Kind::Peer => handed(request, passed).and_then(|socket| peer(agent, request, &socket)),
        Kind::Ranges => Ok(ranges(agent)),
        Kind::Next => next::answer(agent, caller, request),
        // Those have more to do than to answer, and come elsewhere (`socket`).
        Kind::Events
        | Kind::Event
        | Kind::HandOver
        | Kind::TakeOver
        | Kind::Handed
        | Kind::Give
        | Kind::Instances
        | Kind::Instance
        | Kind::Splice
        | Kind::Load => Err((Errno::EINVAL, "nothing was asked, or handed over, by this connection".to_owned())),
    };
    done.unwrap_or_else(|(errno, text)| Reply::refused(request.kind as u8, errno, text))
}

/// A program's socket, as the kernel describes it.
pub(super) struct Handed {
    cookie: Cookie,
    namespace: NamespaceCookie,
    pub(super) protocol: Protocol,
    local: SocketAddr,
    /// At every address of IPv6, it takes IPv4 packets, too.
    takes_both: bool,
    /// The interface that it is bound to.
    interface: Option<String>,
    /// Held while the request is carried out: the socket cannot end before its end is watched for.
    pub(super) socket: OwnedFd,
}

pub(super) fn handed(request: &Request, passed: Vec<OwnedFd>) -> Result<Handed, No> {
    let misuse = |text: &str| (Errno::EINVAL, text.to_owned());
    let [socket] = <[OwnedFd; 1]>::try_from(passed).map_err(|_| misuse("exactly one socket goes with this request"))?;
    let no_socket = |_| (Errno::ENOTSOCK, "what was passed is no internet socket".to_owned());
    let number = sockopt::socket_protocol(&socket).map_err(no_socket)?.map_or(0, |number| number.as_raw().get());
    let protocol = u8::try_from(number).ok().and_then(Protocol::of_number);
    let protocol = protocol.ok_or((Errno::EPROTONOSUPPORT, "names are for TCP and UDP sockets".to_owned()))?;
    if protocol.number() != request.protocol {
        return Err(misuse("the socket is of another protocol than the request says"));
    }
    let local = rustix::net::getsockname(&socket).map_err(no_socket)?;
    let local = SocketAddr::try_from(local).map_err(|_| misuse("the socket is of no internet protocol"))?;
    let interface = nix::sys::socket::getsockopt(&socket, BindToDevice).unwrap_or_default();
    let is_any_v6 = local.is_ipv6() && local.ip().is_unspecified();
    Ok(Handed {
        interface: (!interface.is_empty()).then(|| interface.to_string_lossy().into_owned()),
        takes_both: is_any_v6 && !sockopt::ipv6_v6only(&socket).map_err(no_socket)?,
        cookie: Cookie(sockopt::socket_cookie(&socket).map_err(no_socket)?),
        namespace: namespace_of(socket.as_fd()).map_err(|error| (Errno::ENOTSOCK, error.to_string()))?,
        protocol,
        local: canonical(local),
        socket,
    })
}

pub(super) fn canonical(address: SocketAddr) -> SocketAddr {
    // The unspecified address of IPv6 takes both families, and stays what it is.
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

impl Handed {
    pub(super) fn is_here(&self) -> Result<bool, No> {
        let own = own_namespace().map_err(|error| (Errno::EIO, error.to_string()))?;
        Ok(self.namespace == own)
    }

    /// Names lead to this host's own network namespace, and to sockets that a name can lead to at all.
    fn check_place(&self) -> Result<(), No> {
        if !self.is_here()? {
            let text = "the socket is of another network namespace; run its program there with `margay run --service`";
            return Err((Errno::EOPNOTSUPP, text.to_owned()));
        }
        if is_loopback(self.local) {
            let text = format!("the socket is bound to {}, where nothing from outside comes", self.local);
            return Err((Errno::EINVAL, text));
        }
        if let Some(interface) = &self.interface {
            let text = format!("the socket is bound to the interface {interface}, by which nothing of Margay comes");
            return Err((Errno::EINVAL, text));
        }
        Ok(())
    }
}

pub(super) fn prefix(request: &Request) -> Result<Prefix, No> {
    let prefix = Prefix::new(request.id, request.bits);
    if prefix.id == request.id {
        return Ok(prefix);
    }
    Err((Errno::EINVAL, format!("bits beyond the first {} of the serviceID are not zero", request.bits)))
}

fn ranges(agent: &Agent) -> Reply {
    let ranges = agent.names.leases.ranges();
    let mut reply = Reply::done(Kind::Ranges);
    (reply.v4, reply.v6) = (ranges.host_v4(), ranges.host_v6());
    reply
}

fn name(request: &Request) -> Result<Reply, No> {
    let name: Name = request.text.parse().map_err(|error| (Errno::EINVAL, format!("{error}")))?;
    let mut reply = Reply::done(Kind::Name);
    (reply.id, reply.bits, reply.text) = (name.service_id(), name.prefix().bits, name.written().to_owned());
    Ok(reply)
}

fn resolve(agent: &Agent, caller: &Caller, request: &Request) -> Result<Reply, No> {
    let id = prefix(request)?.id;
    let name = wanted(agent, &Prefix::from(id), &request.text)?;
    let mut reply = Reply::done(Kind::Resolve);
    let leased = agent.names.leases.lease(&name, Asker::User(caller.account()));
    match (leased, is_computable(&id)) {
        // Whoever has no IPv6 will say so.
        (leased, true) => {
            reply.v6 = agent.names.leases.ranges().virtual_v6(&id);
            reply.v4 = leased.unwrap_or(reply.v4);
        }
        (Ok(v4), false) => (reply.v4, reply.v6) = (v4, v4.to_ipv6_mapped()),
        (Err(error), false) => {
            let errno = match error {
                LeaseError::TooFast(_) | LeaseError::TooMany { .. } => Errno::EAGAIN,
                LeaseError::Exhausted(_) => Errno::EADDRNOTAVAIL,
                LeaseError::Store { .. } | LeaseError::Stopping(_) => Errno::EIO,
            };
            return Err((errno, error.to_string()));
        }
    }
    (reply.id, reply.bits, reply.port) = (id, 256, SERVICE_PORT);
    Ok(reply)
}

/// The name of a prefix as people know it here, or in hexadecimal.
pub(super) fn written(agent: &Agent, prefix: &Prefix) -> Result<Name, No> {
    let known = agent.host.store.name_of(prefix).ok().flatten().and_then(|known| known.parse::<Name>().ok());
    if let Some(known) = known.filter(|known| known.prefix() == *prefix) {
        return Ok(known);
    }
    let text = if prefix.bits == 256 { prefix.id.to_string() } else { prefix.to_string() };
    text.parse().map_err(|error| (Errno::EINVAL, format!("{error}")))
}

/// The name of a prefix as the program wrote it; without that, as it is known here.
fn wanted(agent: &Agent, prefix: &Prefix, text: &str) -> Result<Name, No> {
    if text.is_empty() {
        return written(agent, prefix);
    }
    let name: Name = text.parse().map_err(|error| (Errno::EINVAL, format!("{error}")))?;
    if name.prefix() == *prefix { Ok(name) } else { Err((Errno::EINVAL, format!("{name} is the name of other bits"))) }
}

fn bind(agent: &Agent, caller: &Caller, request: &Request, socket: &Handed) -> Result<Reply, No> {
    let prefix = prefix(request)?;
    let name = wanted(agent, &prefix, &request.text)?;
    if prefix.bits >= AUTHORITY_BITS && prefix.id.authority() == [0; 8] {
        return Err((Errno::EINVAL, format!("{name} is of authority 0, which is the agents' own; nobody serves it")));
    }
    agent.connections.programs.rights.read().check(caller, &prefix, name.written()).map_err(|text| {
        tracing::info!(%name, program = caller.describe(), "a program has no right to the name that it binds");
        (Errno::EACCES, text)
    })?;
    socket.check_place()?;
    if socket.protocol == Protocol::Udp && socket.local.port() == 0 {
        return Err((Errno::EINVAL, "the socket has no port; bind it to port 0 of every address first".to_owned()));
    }
    let bound = Bound {
        cookie: socket.cookie.0,
        protocol: socket.protocol,
        port: socket.local.port(),
        name: name.clone(),
        program: caller.describe(),
        weight: None,
    };
    let seen = Socket {
        cookie: socket.cookie,
        namespace: socket.namespace,
        owner: None,
        executable: None,
        protocol: socket.protocol.number(),
        address: socket.local,
        takes_both: socket.takes_both,
        // One that is bound to an interface was refused.
        interface: None,
    };
    agent.publishing.active.bind(bound, seen).map_err(|error| match error {
        BindError::Unavailable(_) => (Errno::EOPNOTSUPP, error.to_string()),
        BindError::Taken(_) => (Errno::EADDRINUSE, error.to_string()),
        BindError::Full(_) | BindError::Refused(_) => (Errno::ENOSPC, error.to_string()),
        BindError::Publish(error) => refused(&error),
    })?;
    tracing::debug!(%name, port = socket.local.port(), program = caller.describe(), "bound by a program");
    let mut reply = Reply::done(Kind::Bind);
    (reply.id, reply.bits, reply.port, reply.text) =
        (prefix.id, prefix.bits, socket.local.port(), name.written().to_owned());
    Ok(reply)
}

fn refused(error: &PublishError) -> No {
    let errno = match error {
        PublishError::Name(_) => Errno::EADDRINUSE,
        PublishError::Table(_) => Errno::ENOSPC,
        PublishError::State(_) => Errno::EIO,
        PublishError::Misuse(_) | PublishError::Followed(_) | PublishError::Unknown(_) => Errno::EINVAL,
    };
    (errno, error.to_string())
}

fn source(agent: &Agent, caller: &Caller, request: &Request, socket: &Handed) -> Result<Reply, No> {
    let port = socket.local.port();
    let host = agent.host.identity.host_id();
    if port == 0 || port != request.port {
        let text =
            "the socket is not bound to the port that the request says; bind it to port 0 of every address first";
        return Err((Errno::EINVAL, text.to_owned()));
    }
    let mut reply = Reply::done(Kind::Source);
    (reply.bits, reply.port) = (256, port);
    let is_unnamed = request.id == ServiceId::default();
    let by_port = ServiceId::at_host(host, port.into());
    let is_shared = sockopt::socket_reuseaddr(&socket.socket).unwrap_or(true);
    let any = SocketAddr::new(socket.local.ip(), 0);
    let is_told_apart = sock_diag::socket_of(socket.protocol.number(), socket.local, any).is_ok();
    if (is_unnamed || request.id == by_port)
        && (agent.publishing.active.why_not().is_some() || !socket.is_here()? || is_shared || !is_told_apart)
    {
        // Nobody would say when the socket is gone or which packets are its own, or its port is not this host's or not
        // its own. It has the name that all others have.
        reply.id = by_port;
        return Ok(reply);
    }
    socket.check_place()?;
    if !is_told_apart {
        let text = "the kernel does not say which socket a packet is of, so that others could have its name; load its \
                    modules tcp_diag and udp_diag";
        return Err((Errno::EOPNOTSUPP, text.to_owned()));
    }
    let own = own_name(agent, socket.cookie);
    reply.id = if is_unnamed { own } else { request.id };
    let name = written(agent, &Prefix::from(reply.id))?;
    let rights = agent.connections.programs.rights.read().clone();
    check_source(&rights, caller, (reply.id, name.written()), [own, by_port]).map_err(|text| {
        tracing::info!(%name, program = caller.describe(), "a program has no right to the source that it asks for");
        (Errno::EACCES, text)
    })?;
    if is_shared {
        let text = "other sockets may be bound to the port of this one, and would have its name, too; clear \
                    SO_REUSEADDR before the socket is bound";
        return Err((Errno::EINVAL, text.to_owned()));
    }
    let bound = bound_to(socket.protocol.number(), socket.local, socket.takes_both);
    let sources = &agent.connections.programs.sources;
    let set = sources.set(&agent.core, (socket.cookie, caller), bound, reply.id);
    set.map_err(|error| (Errno::ENOSPC, error.to_string()))?;
    // After the share is taken: else one user holds all sockets that the kernel reports, also those that are bound.
    agent.publishing.active.hold(socket.cookie).map_err(|error| {
        sources.forget(&agent.core, &[socket.cookie]);
        match error {
            BindError::Unavailable(_) => (Errno::EOPNOTSUPP, error.to_string()),
            _ => (Errno::ENOSPC, error.to_string()),
        }
    })?;
    Ok(reply)
}

/// A socket may have the names that are its own by nature; every other one, also of the form that is this host's own,
/// needs the right to serve it: it may be that of another user's socket.
fn check_source(
    rights: &Rights,
    caller: &Caller,
    (asked, written): (ServiceId, &str),
    of_socket: [ServiceId; 2],
) -> Result<(), String> {
    if of_socket.contains(&asked) { Ok(()) } else { rights.check(caller, &Prefix::from(asked), written) }
}

/// The name that no other socket has. It follows from the socket: after a restart of the agent a program asks for the
/// same one again, and nobody but this socket gets it.
fn own_name(agent: &Agent, cookie: Cookie) -> ServiceId {
    let identity = &agent.host.identity;
    ServiceId::at_host(identity.host_id(), own_number(&identity.host_key.to_bytes()[..], cookie))
}

fn own_number(host_secret: &[u8], cookie: Cookie) -> u32 {
    let key = blake3::derive_key(OWN_NUMBER_CONTEXT, host_secret);
    let digest = blake3::keyed_hash(&key, &cookie.0.to_be_bytes());
    let [a, b, c, d, ..] = *digest.as_bytes();
    u32::from_be_bytes([a, b, c, d]) | OWN_NUMBER
}

fn peer(agent: &Agent, request: &Request, socket: &Handed) -> Result<Reply, No> {
    // The five-tuple of a socket elsewhere may be that of another user's here.
    if !socket.is_here()? {
        return Err((Errno::EOPNOTSUPP, "the socket is of another network namespace than the agent's".to_owned()));
    }
    let destination = SocketAddr::new(request.address, request.port);
    let ranges = agent.names.leases.ranges();
    let ip = match (socket.local.ip(), destination.ip()) {
        // A socket at every address: its packets have the host's virtual one, of the family of its peer.
        (local, IpAddr::V4(_)) if local.is_unspecified() => IpAddr::V4(ranges.host_v4()),
        (local, IpAddr::V6(_)) if local.is_unspecified() => IpAddr::V6(ranges.host_v6()),
        (local, _) => local,
    };
    let (source, protocol) = (SocketAddr::new(ip, socket.local.port()), socket.protocol);
    // What the program sees may stand for another address, with the same port.
    let behind = if protocol == Protocol::Udp { agent.kernel.spreads.behind(destination) } else { Vec::new() };
    let mut candidates = std::iter::once(destination.ip()).chain(behind).map(|ip| Tuple {
        protocol: protocol.number(),
        source,
        destination: SocketAddr::new(ip, destination.port()),
    });
    let found = agent.core.0.with_sal(|sal, _| candidates.find_map(|app| sal.peer_service(&app)));
    let unknown = || (Errno::ENOTCONN, format!("no flow leads from {source} to {destination}"));
    let mut reply = Reply::done(Kind::Peer);
    (reply.id, reply.bits, reply.port) = (found.ok_or_else(unknown)?, 256, request.port);
    reply.v6 = match request.address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    Ok(reply)
}

#[cfg(test)]
mod test {
    use margay_core::key::HostId;
    use nix::unistd::{Gid, Uid};

    use super::*;

    #[test]
    fn a_source_is_the_sockets_own_or_one_that_its_user_may_serve() {
        let host = HostId([7; 16]);
        let name = |number| ServiceId::at_host(host, number);
        let own = [name(own_number(b"secret", Cookie(1))), name(4000)];
        let of_another = [name(own_number(b"secret", Cookie(2))), name(4001), name(9)];
        let user = Caller { uid: Uid::from_raw(54_321), gid: Gid::from_raw(54_321), pid: 1, process: None };
        let root = Caller { uid: Uid::from_raw(0), ..user };
        let check = |caller: &Caller, asked: ServiceId| {
            check_source(&Rights::default(), caller, (asked, &asked.to_string()), own)
        };
        for asked in own {
            assert_eq!(check(&user, asked), Ok(()));
        }
        for asked in of_another {
            let refused = check(&user, asked).expect_err("refused");
            assert!(refused.contains("no right"), "{refused}");
            assert_eq!(check(&root, asked), Ok(()));
        }
    }

    #[test]
    fn the_own_name_of_a_socket_follows_from_the_socket() {
        let number = |secret: &[u8], cookie| own_number(secret, Cookie(cookie));
        assert_eq!(number(b"secret", 1), number(b"secret", 1), "also after a restart of the agent");
        assert_ne!(number(b"secret", 1), number(b"secret", 2));
        assert_ne!(number(b"secret", 1), number(b"other", 1));
        assert!((0..64).all(|cookie| number(b"secret", cookie) & OWN_NUMBER != 0));
    }
}
