//! Source services: what the client's end of a flow is called (Serval §4.1, Table 1: `accept` gives a serviceID).
//!
//! The agent says which local socket has which name. The initiator says it in its ACK, the first message that is proved
//! to come from it; the responder keeps what the initiator's host may say, and nothing else. A client that says nothing
//! is called after its host.

use alloc::sync::Arc;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use hashbrown::HashMap;

use crate::association::AssociationTable;
use crate::cache::packet::is_from_outside;
use crate::machine::sal::Sal;
use crate::session::flow::Flow;
use crate::types::key::HostId;
use crate::types::keyed_hash::KeyedHash;
use crate::types::name::ServiceId;
use crate::types::role::Role;
use crate::types::tuple::Tuple;

/// Sockets with a name at one time; more are a mistake.
pub const SOURCES_MAX: usize = 16_384;

/// There are too many named sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{SOURCES_MAX} sockets of this host have a name already; close some")]
pub struct SourcesFull;

/// Whether packets with a five-tuple are those of a named socket: the kernel knows. It is asked once for each flow that
/// starts where a socket with a name is bound, while nothing else goes on, and has to answer at once.
pub type IsOfSocket = Arc<dyn Fn(&Tuple) -> bool + Send + Sync>;

/// A socket's name.
pub(crate) struct Source {
    service: ServiceId,
    is_its: IsOfSocket,
}

/// Local sockets by protocol and bound address. The address counts as much as the port: another user may bind the same
/// port at another address, and must not inherit the name. Neither must who binds the port before the end of the socket
/// is known here, nor a container whose packets the host translates to the port.
pub(crate) type SourceTable = HashMap<(u8, SocketAddr), Source, KeyedHash>;

impl ServiceId {
    /// What a socket of `host` is called without a name of its own: authority 0, service 0, then the host and a number.
    pub fn at_host(host: HostId, number: u32) -> Self {
        let mut id = [0; 32];
        id[12..28].copy_from_slice(&host.0);
        id[28..].copy_from_slice(&number.to_be_bytes());
        Self(id)
    }

    /// The host that a name of that form is of.
    pub fn host(&self) -> Option<HostId> {
        let mut host = [0; 16];
        host.copy_from_slice(&self.0[12..28]);
        (self.0[..12] == [0; 12]).then_some(HostId(host))
    }

    /// Whether it is a name of that form, of this host.
    pub fn is_at_host(&self, host: HostId) -> bool {
        self.0[..12] == [0; 12] && self.0[12..28] == host.0
    }
}

impl Sal {
    /// Flows that start from a socket bound to `local` carry `service` as their source from now on, as long as `is_its`
    /// knows them. The unspecified address stands for every address of its family.
    ///
    /// # Errors
    ///
    /// There are too many such sockets.
    pub fn set_source(
        &mut self,
        protocol: u8,
        local: SocketAddr,
        service: ServiceId,
        is_its: IsOfSocket,
    ) -> Result<(), SourcesFull> {
        if self.sources.len() >= SOURCES_MAX && !self.sources.contains_key(&(protocol, local)) {
            return Err(SourcesFull);
        }
        self.end_own_grants();
        self.sources.insert((protocol, local), Source { service, is_its });
        Ok(())
    }

    /// The socket is gone. Flows that have started keep what they said.
    pub fn forget_source(&mut self, protocol: u8, local: SocketAddr) {
        self.sources.remove(&(protocol, local));
    }

    /// How many sockets have a name.
    pub fn source_count(&self) -> usize {
        self.sources.len()
    }

    /// The name of the socket that has sent `first`, the first packet of a flow; empty: no program has sent one.
    pub(crate) fn source_of(&self, app: &Tuple, first: &[u8]) -> Option<ServiceId> {
        if is_from_outside(first) {
            return None;
        }
        let local = app.source;
        let any: IpAddr = if local.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let bound = [local, SocketAddr::new(any, local.port())].into_iter();
        let mut named = bound.filter_map(|bound| self.sources.get(&(app.protocol, bound)));
        named.find(|source| (source.is_its)(app)).map(|source| source.service)
    }

    /// What a proved initiator says of itself, if its host may: it is a member of the name's authority, or the name is
    /// the host's.
    pub(crate) fn believed(&self, association: u32, claimed: ServiceId) -> Option<ServiceId> {
        let association = self.associations.get(association)?;
        let (unix_s, block) = (self.unix_s(), claimed.authority());
        let is_member = association
            .membership
            .as_ref()
            .is_some_and(|membership| membership.not_after_s > unix_s && membership.authority == block);
        // Of its own programs the agent has asked itself already.
        let may = association.host == self.config.host_id()
            || (block != [0; 8] && is_member)
            || claimed.is_at_host(association.host);
        may.then_some(claimed)
    }

    /// What the peer of a flow is called, by the five-tuple that the program here has: the service that it connected
    /// to, or the name of the client. `None` where there is no such flow, or its peer is not proved.
    pub fn peer_service(&self, app: &Tuple) -> Option<ServiceId> {
        let flow = self.flows.by_tuple(app).and_then(|id| self.flows.get(id))?;
        match flow.role {
            Role::Initiator => Some(flow.service),
            Role::Responder => self.associations.client_of(flow),
        }
    }

    /// The name by which a client has come to a program here, by the program's five-tuple.
    pub fn served_name(&self, app: &Tuple) -> Option<ServiceId> {
        let flow = self.flows.by_tuple(app).and_then(|id| self.flows.get(id))?;
        (flow.role == Role::Responder).then_some(flow.service)
    }
}

impl AssociationTable {
    fn client_of(&self, flow: &Flow) -> Option<ServiceId> {
        let host = self.get(flow.association).filter(|_| flow.carries_data())?.host;
        let unnamed = || ServiceId::at_host(host, flow.app.destination.port().into());
        Some(flow.source.as_deref().copied().unwrap_or_else(unnamed))
    }
}
