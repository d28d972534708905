//! Addresses of layer 2: the interfaces' own and their neighbours', as the kernel knows them, and word of what changes
//! of them.

use std::io;
use std::net::IpAddr;

use futures_util::{Stream, StreamExt};
use netlink_packet_core::NetlinkPayload;
use netlink_packet_route::link::{LinkAttribute, LinkMessage};
use netlink_packet_route::neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::route::question;

/// An address of layer 2 in an Ethernet.
pub type Mac = [u8; 6];

/// The neighbour's, if the kernel would send to it now.
pub fn lookup(interface: u32, neighbour: IpAddr) -> Option<Mac> {
    let mut message = NeighbourMessage::default();
    message.header.ifindex = interface;
    let (family, address) = match neighbour {
        IpAddr::V4(v4) => (AddressFamily::Inet, NeighbourAddress::Inet(v4)),
        IpAddr::V6(v6) => (AddressFamily::Inet6, NeighbourAddress::Inet6(v6)),
    };
    message.header.family = family;
    message.attributes = vec![NeighbourAttribute::Destination(address)];
    match question(RouteNetlinkMessage::GetNeighbour(message)) {
        Ok(RouteNetlinkMessage::NewNeighbour(answer)) if is_usable(answer.header.state) => {
            answer.attributes.iter().find_map(|attribute| match attribute {
                NeighbourAttribute::LinkLayerAddress(bytes) => bytes[..].try_into().ok(),
                _ => None,
            })
        }
        Ok(_) => None,
        Err(error) => {
            tracing::trace!(%neighbour, %error, "the kernel does not know a neighbour");
            None
        }
    }
}

/// Whether the kernel sends to a neighbour in this state without asking for it first (`NUD_VALID` but for what needs no
/// address).
const fn is_usable(state: NeighbourState) -> bool {
    matches!(
        state,
        NeighbourState::Reachable
            | NeighbourState::Stale
            | NeighbourState::Delay
            | NeighbourState::Probe
            | NeighbourState::Permanent
    )
}

/// The interface's own.
pub fn of_interface(interface: u32) -> Option<Mac> {
    let mut message = LinkMessage::default();
    message.header.index = interface;
    let Ok(RouteNetlinkMessage::NewLink(link)) = question(RouteNetlinkMessage::GetLink(message)) else { return None };
    link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::Address(bytes) => bytes[..].try_into().ok(),
        _ => None,
    })
}

/// Interface and address of every neighbour of which something changes. Needs a tokio runtime.
///
/// # Errors
///
/// The kernel does not tell.
pub fn changes() -> io::Result<impl Stream<Item = (u32, IpAddr)> + Unpin> {
    let (connection, _, messages) = rtnetlink::new_multicast_connection(&[rtnetlink::MulticastGroup::Neigh])?;
    tokio::spawn(connection);
    let of = |payload| match payload {
        NetlinkPayload::InnerMessage(
            RouteNetlinkMessage::NewNeighbour(message) | RouteNetlinkMessage::DelNeighbour(message),
        ) => destination(&message).map(|address| (message.header.ifindex, address)),
        _ => None,
    };
    Ok(messages.filter_map(move |(message, _)| std::future::ready(of(message.payload))).boxed())
}

fn destination(message: &NeighbourMessage) -> Option<IpAddr> {
    message.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::Destination(NeighbourAddress::Inet(v4)) => Some(IpAddr::V4(*v4)),
        NeighbourAttribute::Destination(NeighbourAddress::Inet6(v6)) => Some(IpAddr::V6(*v6)),
        _ => None,
    })
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn only_neighbours_that_were_found_are_sent_to() {
        assert!(is_usable(NeighbourState::Stale) && !is_usable(NeighbourState::Incomplete));
        assert!(!is_usable(NeighbourState::Failed));
        // The documentation's network (RFC 5737), on the loopback: nobody is there.
        assert_eq!(lookup(1, IpAddr::from([192, 0, 2, 1])), None);
        assert_eq!(of_interface(1), Some([0; 6]));
    }
}
