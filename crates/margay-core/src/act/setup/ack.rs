//! The ACK that proves the initiator, again and again until the responder says that it has it.

use alloc::vec::Vec;
use core::net::SocketAddr;

use margay_wire::{Addresses, Extension, Flags, FlowId, KeyExchangeRepr, Kind, Message, ResolvableRepr};

use super::retry_after;
use crate::act::moving::rendezvous::ROUTERS_MAX;
use crate::association::AssociationTable;
use crate::association::draft::{Draft, relay_to_host, relayed_from};
use crate::association::location::Pair;
use crate::cache::entry::RemoveReason;
use crate::machine::sal::Sal;
use crate::session::flow::{Marks, Setup};
use crate::types::key::HostId;
use crate::types::time::Instant;

/// So many go by the association's own pair of addresses alone.
const PATIENT: u32 = 2;

impl Sal {
    /// The ACK of a flow, by a router where `relay` says so.
    pub(crate) fn write_ack(
        &mut self,
        id: FlowId,
        message_3: Option<&[u8]>,
        relay: Option<ResolvableRepr>,
    ) -> Option<Vec<u8>> {
        let flow = self.flows.get(id)?;
        let (peer_flow, local_id) = (flow.peer_flow, flow.association);
        let host_id = self.config.host_id().0;
        let exchange = message_3.filter(|message| !message.is_empty());
        let addresses = self.config.own_addresses();
        let mut extensions = alloc::vec![self.secure.capabilities(&self.config)];
        extensions.extend(Addresses::parse(&addresses).map(Extension::Addresses));
        extensions.extend(self.associations.own_rendezvous(&self.config));
        extensions.extend(self.flows.flow_port(id));
        extensions.extend(flow.source.as_deref().map(|source| Extension::SourceService(source.0)));
        let certificate = self.box_certificate(flow);
        extensions.extend((!certificate.is_empty()).then_some(Extension::Certificate(&certificate)));
        if let Setup::Late(late) = &flow.setup {
            extensions.push(Extension::SynSeen(late.syn_digest));
            extensions.extend(late.granted.as_deref().map(|granted| Extension::Grant(granted.asks.wanted)));
        }
        extensions.extend(
            exchange.map(|message| Extension::KeyExchange(KeyExchangeRepr { host_id, assoc_id: local_id, message })),
        );
        let mut draft = Draft::new(Kind::Ack, peer_flow, id);
        if relay.is_some() {
            draft.flags = Flags::RESOLVABLE | Flags::RELAY;
            draft.resolvable = relay;
        }
        draft.extensions = &extensions;
        let epoch = self.config.epoch;
        draft.seal(self.associations.get_mut(local_id)?, epoch)
    }

    pub(crate) fn send_ack_again(&mut self, id: FlowId) {
        let Some(flow) = self.flows.get(id) else { return };
        let Setup::Late(late) = &flow.setup else { return };
        if flow.has(Marks::CONFIRMED) || self.keeps_ack(id) {
            return;
        }
        let (message_3, is_patient) = (late.ack.clone(), late.retries <= PATIENT);
        let answered = late.answered_from.as_deref().copied();
        let Some(association) = self.associations.get(flow.association) else { return };
        let (host, present) = (association.host, Pair { local: association.local, remote: association.remote });
        let mut pairs = alloc::vec![present];
        // Where only the handshake shows the peer, the association is none to it before it has the ACK.
        pairs.extend(answered.map(|remote| Pair { local: None, remote }).filter(|pair| pair.remote != present.remote));
        if !is_patient {
            // By these nothing passes, it seems: the peer has named others, and a router knows where it is.
            let (now, others) = (self.now, self.pairs_for(host).into_iter().filter(|pair| *pair != present));
            pairs.extend(others.filter(|pair| self.locations.may_ask(&self.associations, now, host, *pair)));
        }
        for pair in pairs {
            if let Some(ack) = self.write_ack(id, Some(&message_3), None) {
                self.transmit_from(pair.local, pair.remote, ack, Kind::Ack);
            }
        }
        if !is_patient {
            self.relay_ack(id, &message_3, host, present.remote);
        }
    }

    fn relay_ack(&mut self, id: FlowId, message_3: &[u8], host: HostId, last: SocketAddr) {
        let routers = self.associations.iter().filter(|association| association.is_with_router());
        let routers: Vec<Pair> =
            routers.map(|router| Pair { local: router.local, remote: router.remote }).take(ROUTERS_MAX).collect();
        for router in routers {
            let hop_key = self.associations.hop_key_of(router.remote);
            if let Some(mut ack) = self.write_ack(id, Some(message_3), Some(relay_to_host(host, last))) {
                Self::tag_hop(&mut ack, hop_key);
                self.transmit_from(router.local, router.remote, ack, Kind::Ack);
            }
        }
    }

    /// An ACK that was not confirmed in time: again, or the end.
    pub(crate) fn retry_ack(&mut self, now: Instant, id: FlowId) {
        let Some(flow) = self.flows.get_mut(id) else { return };
        let confirmed = flow.has(Marks::CONFIRMED);
        let Setup::Late(late) = &mut flow.setup else { return };
        if now >= late.give_up || (confirmed && late.retries == u32::MAX) {
            flow.setup = Setup::Done;
            if !confirmed {
                self.fail_flow(now, id, RemoveReason::Unproved);
            }
            return;
        }
        let wait = retry_after(late.retries);
        late.retries += 1;
        let next = (now + wait).min(late.give_up);
        self.flows.set_deadline(id, Some(next));
        self.send_ack_again(id);
    }

    /// Tells the initiator that its ACK came; at first contact with this host's membership, which it may need later.
    pub(super) fn confirm(&mut self, (id, peer_flow): (FlowId, FlowId), association: u32, fresh: bool) {
        let addresses = self.config.own_addresses();
        let whereabouts = Addresses::parse(&addresses)
            .map(Extension::Addresses)
            .into_iter()
            .chain(self.associations.own_rendezvous(&self.config));
        let service = self.flows.get(id).map(|flow| flow.service).filter(|_| fresh);
        let membership = service.map(|service| self.membership_for(&service)).unwrap_or_default();
        let certificate = (!membership.is_empty()).then_some(Extension::Certificate(&membership));
        let extensions: Vec<_> = self.flows.flow_port(id).into_iter().chain(whereabouts).chain(certificate).collect();
        let mut draft = Draft::new(Kind::Ack, peer_flow, id);
        draft.flags = Flags::CONFIRM;
        draft.extensions = &extensions;
        self.seal_and_send(association, draft);
    }

    /// The initiator asks again, and not by the association's pair of addresses: what goes there may be lost.
    pub(super) fn confirm_where_asked(
        &mut self,
        (id, peer_flow): (FlowId, FlowId),
        association: u32,
        message: &Message<'_>,
        sender: SocketAddr,
    ) {
        let from = relayed_from(message).unwrap_or(sender);
        let is_known = self.associations.get(association).is_some_and(|known| known.remote == from);
        if is_known && from == sender {
            return;
        }
        let addresses = self.config.own_addresses();
        let own = Addresses::parse(&addresses).map(Extension::Addresses).into_iter();
        let extensions: Vec<_> = self
            .flows
            .flow_port(id)
            .into_iter()
            .chain(own)
            .chain(self.associations.own_rendezvous(&self.config))
            .collect();
        let mut draft = Draft::new(Kind::Ack, peer_flow, id);
        draft.flags = Flags::CONFIRM;
        draft.extensions = &extensions;
        let Some(host) = self.associations.get(association).map(|association| association.host) else { return };
        if from != sender {
            draft.flags |= Flags::RESOLVABLE | Flags::RELAY;
            draft.resolvable = Some(relay_to_host(host, from));
        }
        let epoch = self.config.epoch;
        let hop_key = self.associations.hop_key_of(sender);
        let local = self.arrival;
        let Some(association) = self.associations.get_mut(association) else { return };
        if let Some(mut datagram) = draft.seal(association, epoch) {
            if from != sender {
                Self::tag_hop(&mut datagram, hop_key);
            }
            self.transmit_from(local, sender, datagram, Kind::Ack);
        }
    }
}

impl AssociationTable {
    /// The addresses that the ACK of an answer goes by, and where else it goes: at first contact the association is
    /// none to its peer before it has the ACK, and the peer may have answered from where its older flows do not go.
    pub(super) fn ways_of_ack(&self, id: u32, answered: SocketAddr, is_first: bool) -> (Pair, Option<SocketAddr>) {
        let known = self.get(id).map(|association| Pair { local: association.local, remote: association.remote });
        let pair = known.unwrap_or(Pair { local: None, remote: answered });
        (pair, Some(answered).filter(|answered| is_first && *answered != pair.remote))
    }
}
