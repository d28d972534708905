//! Asks the kernel how a packet to an address would leave this host, without waiting on anything but the kernel: the core's
//! thread asks, under the core's lock.

use std::io;
use std::net::IpAddr;

use margay_datapath::direct::Route;
use netlink_packet_core::{NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::link::{LinkAttribute, LinkLayerType, LinkMessage};
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteVia};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

/// The route to `remote`; `None` where there is none, or the kernel does not say.
pub fn lookup(remote: IpAddr) -> Option<Route> {
    find(remote).inspect_err(|error| tracing::debug!(%remote, %error, "no route")).ok().flatten()
}

fn find(remote: IpAddr) -> io::Result<Option<Route>> {
    let socket = Socket::new(NETLINK_ROUTE)?;
    socket.connect(&SocketAddr::new(0, 0))?;
    let mut message = RouteMessage::default();
    let (family, bits, address) = match remote {
        IpAddr::V4(v4) => (AddressFamily::Inet, 32, RouteAddress::Inet(v4)),
        IpAddr::V6(v6) => (AddressFamily::Inet6, 128, RouteAddress::Inet6(v6)),
    };
    message.header.address_family = family;
    message.header.destination_prefix_length = bits;
    message.attributes = vec![RouteAttribute::Destination(address)];
    let RouteNetlinkMessage::NewRoute(answer) = ask(&socket, RouteNetlinkMessage::GetRoute(message))? else {
        return Ok(None);
    };
    let (mut ifindex, mut local, mut next_hop) = (None, None, remote);
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

fn ask(socket: &Socket, request: RouteNetlinkMessage) -> io::Result<RouteNetlinkMessage> {
    let mut message = NetlinkMessage::from(request);
    message.header.flags = NLM_F_REQUEST;
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    socket.send(&bytes, 0)?;
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
        let route = lookup(IpAddr::from([127, 0, 0, 1])).expect("every host has one");
        assert_eq!((route.local, route.ifindex), (IpAddr::from([127, 0, 0, 1]), 1));
        assert!(route.mtu >= 1280);
    }
}
