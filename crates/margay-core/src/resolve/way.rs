//! Which way a first packet may go on from a router: up, once across, and down (DESIGN §8). What comes from a router
//! above or beside this one goes to hosts and to routers below alone, and nothing goes back to the router that it comes
//! from. So no packet goes round, whatever the routers have told each other, as long as nobody is above itself: it
//! meets a router once on its way up, and once on its way down, at most.
//!
//! Where nobody serves a name, that is said back from router to router, until one knows who asked.

use core::net::SocketAddr;

use margay_wire::{ErrorCode, ErrorRepr, Extension, FlowId, KeyExchangeRepr, Kind, Message, ResolvableRepr};

use crate::association::draft::Draft;
use crate::machine::sal::Sal;
use crate::types::drop_reason::DropReason;
use crate::types::key::HostId;

/// Routers that this one exchanges announcements with. More than anybody has; what comes from others is taken for a
/// host's.
const NEIGHBOURS_MAX: usize = 4096;

/// What a neighbouring router is to this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Relation {
    /// This router is where it sends what it knows no better way for.
    Below,
    /// Neither is above the other.
    Beside,
    /// It is where this router sends what it knows no better way for.
    Above,
}

/// Who a first packet comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sender {
    /// A program of this host, which may send it on although it is no router.
    Own,
    /// The host of the program that sends it.
    Host,
    /// The router at this address: it has passed that one.
    Router(SocketAddr),
}

/// What is to be known of a packet's sender, for where it may go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WayOn {
    /// Who it is.
    pub sender: Sender,
    /// Where it is a router that this one exchanges announcements with.
    relation: Option<Relation>,
}

impl WayOn {
    /// Whether it may go to hosts and to routers below alone.
    pub fn is_inward(&self) -> bool {
        matches!(self.relation, Some(Relation::Above | Relation::Beside))
    }

    /// Whether a next hop is where it comes from.
    pub fn is_back(&self, to: SocketAddr) -> bool {
        self.relation.is_some() && self.sender == Sender::Router(to)
    }
}

impl Sal {
    /// What a router is to this one from now on; `None`: nothing any more.
    pub fn set_relation(&mut self, host: HostId, relation: Option<Relation>) {
        match relation {
            None => drop(self.neighbours.remove(&host)),
            Some(relation) if self.neighbours.len() < NEIGHBOURS_MAX || self.neighbours.contains_key(&host) => {
                self.neighbours.insert(host, relation);
            }
            Some(_) => {}
        }
    }

    /// What a packet's sender means for where it may go.
    pub(crate) fn way_on(&self, sender: Sender) -> WayOn {
        let relation = match sender {
            Sender::Router(from) if !self.neighbours.is_empty() => {
                let there = self.associations.at_address(from);
                there.filter_map(|association| self.neighbours.get(&association.host).copied()).max()
            }
            Sender::Own | Sender::Host | Sender::Router(_) => None,
        };
        WayOn { sender, relation }
    }

    /// Nobody serves the name, or its instance here is drained, and who asks is not known here: the router that the
    /// packet comes from is told, if it is a neighbour.
    pub(crate) fn tell_router_of_nobody(
        &mut self,
        from: SocketAddr,
        message: &Message<'_>,
        datagram: &[u8],
        code: ErrorCode,
    ) {
        let (Some(resolvable), Some(exchange)) = (message.resolvable, message.key_exchange()) else { return };
        if resolvable.via.is_none() || !self.associations.is_hop_tagged(from, &resolvable, datagram) {
            return;
        }
        let Some(router) = self.neighbour_at(from) else { return };
        self.say_nobody(router, message.src_flow, code, Some((exchange.host_id, resolvable)));
    }

    /// A neighbour says that nobody takes what another host has asked for: that host is told, or the first router of
    /// its packet.
    pub(crate) fn pass_on_nobody(&mut self, association: u32, message: &Message<'_>) -> Result<(), DropReason> {
        let (resolvable, exchange) = (message.resolvable, message.key_exchange());
        let (Some(resolvable), Some(exchange)) = (resolvable, exchange) else { return Err(DropReason::Malformed) };
        let teller = self.associations.get(association).map(|association| association.host);
        let is_neighbour = teller.is_some_and(|host| self.neighbours.contains_key(&host));
        let code = message.error().map(|error| error.code);
        let code = code.filter(|code| is_neighbour && matches!(code, ErrorCode::NoService | ErrorCode::Drained));
        let code = code.ok_or(DropReason::Unexpected)?;
        let asker = self.associations.by_host(HostId(exchange.host_id)).filter(|association| association.router);
        if let Some(asker) = asker.map(|association| association.local_id) {
            self.say_nobody(asker, message.dst_flow, code, None);
            return Ok(());
        }
        if resolvable.hop_limit <= 1 {
            return Err(DropReason::HopLimit);
        }
        let router = resolvable.via.and_then(|via| self.neighbour_at(via)).ok_or(DropReason::NoService)?;
        let onward = ResolvableRepr { hop_limit: resolvable.hop_limit - 1, ..resolvable };
        self.say_nobody(router, message.dst_flow, code, Some((exchange.host_id, onward)));
        Ok(())
    }

    fn neighbour_at(&self, address: SocketAddr) -> Option<u32> {
        let there = self.associations.at_address(address);
        let mut known = there.filter(|association| self.neighbours.contains_key(&association.host));
        known.next().map(|association| association.local_id)
    }

    /// `asker`: who it is for, where that is another host than the one that is told.
    fn say_nobody(
        &mut self,
        association: u32,
        flow: FlowId,
        code: ErrorCode,
        asker: Option<([u8; 16], ResolvableRepr)>,
    ) {
        let error = Extension::Error(ErrorRepr { code, text: "" });
        let host_id = asker.map_or([0; 16], |(host_id, _)| host_id);
        let named = Extension::KeyExchange(KeyExchangeRepr { host_id, assoc_id: 0, message: &[] });
        let extensions = [error, named];
        let mut draft = Draft::new(Kind::Error, flow, FlowId(0));
        draft.resolvable = asker.map(|(_, resolvable)| resolvable);
        draft.extensions = if asker.is_some() { &extensions } else { &extensions[..1] };
        self.seal_and_send(association, draft);
    }
}
