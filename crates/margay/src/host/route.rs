//! Asks the kernel how a packet to an address would leave this host, without waiting on anything but the kernel: the
//! core's thread asks, under the core's lock.

use std::io;
use std::net::IpAddr;

use margay_datapath::direct::{Route, Routing};
use netlink_packet_core::{NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::link::{LinkAttribute, LinkLayerType, LinkMessage};
use netlink_packet_route::neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage};
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteVia};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

/// The routing of this host's kernel.
pub struct Kernel;

impl Routing for Kernel {
    fn route(&self, remote: IpAddr, local: Option<IpAddr>) -> Option<Route> {
        lookup(remote, local)
    }

    fn is_up(&self, local: IpAddr) -> bool {
        super::is_up(local)
    }

    fn forget_neighbour(&self, interface: u32, neighbour: IpAddr) {
        if let Err(error) = forget_neighbour(interface, neighbour) {
            tracing::debug!(%neighbour, %error, "nothing to forget of a neighbour");
        }
    }
}

fn forget_neighbour(interface: u32, neighbour: IpAddr) -> io::Result<()> {
    let socket = Socket::new(NETLINK_ROUTE)?;
    socket.connect(&SocketAddr::new(0, 0))?;
    let mut message = NeighbourMessage::default();
    message.header.ifindex = interface;
    let (family, address) = match neighbour {
        IpAddr::V4(v4) => (AddressFamily::Inet, NeighbourAddress::Inet(v4)),
        IpAddr::V6(v6) => (AddressFamily::Inet6, NeighbourAddress::Inet6(v6)),
    };
    message.header.family = family;
    message.attributes = vec![NeighbourAttribute::Destination(address)];
    send(&socket, RouteNetlinkMessage::DelNeighbour(message), NLM_F_REQUEST)
}

/// The route to `remote`, from `local` if that is given; `None` where there is none, or the kernel does not say.
pub fn lookup(remote: IpAddr, local: Option<IpAddr>) -> Option<Route> {
    let ask =
        |way: Way| find(remote, way).inspect_err(|error| tracing::debug!(%remote, %error, "no route")).ok().flatten();
    let usual = ask(Way::Any);
    let Some(local) = local.filter(|local| usual.is_none_or(|usual| usual.local != *local)) else { return usual };
    // Rules may send it another way than what has no source yet; else it leaves by the interface that has the address.
    let interface = super::interface_of(local)?;
    let by_source = ask(Way::From(local)).filter(|found| found.ifindex == interface);
    by_source.or_else(|| ask(Way::By(interface))).map(|found| Route { local, ..found })
}

/// What else is given of a packet than where it goes.
#[derive(Clone, Copy)]
enum Way {
    Any,
    From(IpAddr),
    By(u32),
}

/// Which of this host's addresses packets to `remote` would have, whatever interface they leave by.
pub fn source(remote: IpAddr) -> Option<IpAddr> {
    let socket = Socket::new(NETLINK_ROUTE).ok()?;
    socket.connect(&SocketAddr::new(0, 0)).ok()?;
    let RouteNetlinkMessage::NewRoute(answer) = ask(&socket, request(remote, Way::Any)).ok()? else { return None };
    answer.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::PrefSource(RouteAddress::Inet(v4)) => Some(IpAddr::V4(*v4)),
        RouteAttribute::PrefSource(RouteAddress::Inet6(v6)) => Some(IpAddr::V6(*v6)),
        _ => None,
    })
}

fn request(remote: IpAddr, way: Way) -> RouteNetlinkMessage {
    let mut message = RouteMessage::default();
    let (family, bits, address) = match remote {
        IpAddr::V4(v4) => (AddressFamily::Inet, 32, RouteAddress::Inet(v4)),
        IpAddr::V6(v6) => (AddressFamily::Inet6, 128, RouteAddress::Inet6(v6)),
    };
    message.header.address_family = family;
    message.header.destination_prefix_length = bits;
    message.attributes = vec![RouteAttribute::Destination(address)];
    match way {
        Way::Any => {}
        Way::By(interface) => message.attributes.push(RouteAttribute::Oif(interface)),
        Way::From(IpAddr::V4(local)) => {
            message.header.source_prefix_length = 32;
            message.attributes.push(RouteAttribute::Source(RouteAddress::Inet(local)));
        }
        Way::From(IpAddr::V6(local)) => {
            message.header.source_prefix_length = 128;
            message.attributes.push(RouteAttribute::Source(RouteAddress::Inet6(local)));
        }
    }
    RouteNetlinkMessage::GetRoute(message)
}

fn find(remote: IpAddr, way: Way) -> io::Result<Option<Route>> {
    let socket = Socket::new(NETLINK_ROUTE)?;
    socket.connect(&SocketAddr::new(0, 0))?;
    let RouteNetlinkMessage::NewRoute(answer) = ask(&socket, request(remote, way))? else {
        return Ok(None);
    };
    // An answer about a source does not repeat it.
    let given = if let Way::From(local) = way { Some(local) } else { None };
    let (mut ifindex, mut local, mut next_hop) = (None, given, remote);
    for attribute in &answer.attributes {
        match attribute {
            RouteAttribute::Oif(index) => ifindex = Some(*index),
            RouteAttribute::PrefSource(RouteAddress::Inet(v4)) => local = Some(IpAddr::V4(*v4)),
            RouteAttribute::PrefSource(RouteAddress::Inet6(v6)) => local = Some(IpAddr::V6(*v6)),
            RouteAttribute::Gateway(RouteAddress::Inet(v4)) => next_hop = IpAddr::V4(*v4),
            RouteAttribute::Gateway(RouteAddress::Inet6(v6)) | RouteAttribute::Via(RouteVia::Inet6(v6)) => {
                next_hop = IpAddr::V6(*v6);
            }
            _ => {}
        }
    }
    let (Some(ifindex), Some(local)) = (ifindex, local) else { return Ok(None) };
    let mut message = LinkMessage::default();
    message.header.index = ifindex;
    let RouteNetlinkMessage::NewLink(link) = ask(&socket, RouteNetlinkMessage::GetLink(message))? else {
        return Ok(None);
    };
    // The programs on the cards know Ethernet frames; `lo` has such headers too.
    if !matches!(link.header.link_layer_type, LinkLayerType::Ether | LinkLayerType::Loopback) {
        return Ok(None);
    }
    let mtu = link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::Mtu(mtu) => Some(*mtu),
        _ => None,
    });
    Ok(mtu.map(|mtu| Route { local, next_hop, ifindex, mtu }))
}

fn send(socket: &Socket, request: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
    let mut message = NetlinkMessage::from(request);
    message.header.flags = flags;
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    socket.send(&bytes, 0)?;
    Ok(())
}

/// Asks the kernel one thing.
///
/// # Errors
///
/// Its word.
pub(super) fn question(request: RouteNetlinkMessage) -> io::Result<RouteNetlinkMessage> {
    let socket = Socket::new(NETLINK_ROUTE)?;
    socket.connect(&SocketAddr::new(0, 0))?;
    ask(&socket, request)
}

fn ask(socket: &Socket, request: RouteNetlinkMessage) -> io::Result<RouteNetlinkMessage> {
    send(socket, request, NLM_F_REQUEST)?;
    let (answer, _) = socket.recv_from_full()?;
    let answer = NetlinkMessage::<RouteNetlinkMessage>::deserialize(&answer).map_err(io::Error::other)?;
    match answer.payload {
        NetlinkPayload::InnerMessage(message) => Ok(message),
        NetlinkPayload::Error(error) => Err(error.to_io()),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn loopback_has_a_route() {
        let route = lookup(IpAddr::from([127, 0, 0, 1]), None).expect("every host has one");
        assert_eq!((route.local, route.ifindex), (IpAddr::from([127, 0, 0, 1]), 1));
        assert!(route.mtu >= 1280);
    }
}
