//! Related flows: some datagram servers answer from another port than they were asked at (TFTP: a new one for each
//! transfer), and the client goes on with that port. The server's host opens a second flow to the client's, which keeps
//! both programs' ports (DESIGN §9).
//!
//! On the wire it is a SYN whose destination flow is not zero: it names, at the receiver, the flow that it is related
//! to. Only the host at the other end of that flow may open one, and only to the socket that has it.

use alloc::vec::Vec;
use core::net::SocketAddr;

use margay_wire::{ErrorCode, FlowId, Message};

use crate::act::setup::Start;
use crate::association::draft::{Arrival, Reply};
use crate::cache::output::AppVerdict;
use crate::cache::packet::AppPacket;
use crate::machine::sal::Sal;
use crate::session::flow::{Flow, Marks};
use crate::table::{Allow, AllowItem, Demux};
use crate::types::drop_reason::DropReason;
use crate::types::key::HostId;
use crate::types::name::ServiceId;
use crate::types::role::Role;
use crate::types::time::Instant;

const UDP: u8 = 17;

/// The flow that a new one is related to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Related {
    /// The client's identifier of it.
    pub flow: FlowId,
    /// The client's host, the only one that may answer.
    pub host: HostId,
}

impl Sal {
    /// A datagram to the peer of a flow, from another port than the flow's. `None`: it is to nobody who asked for one.
    pub(crate) fn initiate_related(&mut self, now: Instant, packet: &AppPacket<'_>) -> Option<AppVerdict> {
        let asked = self.flows.asked_from(packet.tuple.destination).and_then(|id| self.flows.get(id));
        // Whoever asked through boxes is not at the other end of this flow.
        let may_relate = |asked: &&Flow| asked.carries_data() && asked.chain.is_none();
        let asked = asked.filter(may_relate).filter(|_| packet.tuple.protocol == UDP)?;
        let association = self.associations.get(asked.association)?;
        if self.flows.len() >= self.config.limits.flows {
            return None;
        }
        let related = Some(Related { flow: asked.peer_flow, host: association.host });
        let next_hop = association.remote;
        let service = asked.service;
        // Nor is a first datagram shown where the flow that it is related to waits to be encrypted.
        let is_sealed = asked.is_sealed() || asked.is_demanded() || asked.has(Marks::GUARDED);
        let nonce = self.rng.u64();
        let id = self.grants.fresh_flow_id(&self.flows, &mut self.rng);
        let session = margay_wire::SessionId(self.rng.bytes());
        let mut flow = Flow::new(id, session, service, Role::Initiator, packet.tuple, now);
        flow.marks |= if is_sealed { Marks::SECURE } else { Marks::empty() };
        self.start_setup(
            now,
            flow,
            Start {
                nonce,
                next_hop,
                beside: Vec::new(),
                first: packet.whole.to_vec(),
                full: false,
                related,
                pin: None,
                asks: None,
                fetch: None,
                begin: None,
            },
        );
        Some(AppVerdict::Consumed)
    }

    /// A SYN that names a flow of a program here.
    pub(crate) fn handle_related(
        &mut self,
        now: Instant,
        from: SocketAddr,
        message: &Message<'_>,
        syn_len: usize,
    ) -> Result<(), DropReason> {
        let (resolvable, session) = message.resolvable.zip(message.session()).ok_or(DropReason::Malformed)?;
        let claimed = HostId(message.key_exchange().ok_or(DropReason::Malformed)?.host_id);
        let reply = Reply::straight(from);
        let service = ServiceId(resolvable.service);
        let port = session.service_port;
        let mut arrival = Arrival { message, service, port, reply, syn_len, nonce: resolvable.nonce, app: None };
        let is_its_own = |flow: &&Flow| {
            let host = self.associations.get(flow.association).map(|association| association.host);
            flow.role == Role::Initiator
                && flow.chain.is_none()
                && flow.carries_data()
                && flow.service == service
                && (flow.app.protocol, session.protocol) == (UDP, UDP)
                && host == Some(claimed)
        };
        let Some(mut app) = self.flows.get(message.dst_flow).filter(is_its_own).map(|flow| flow.app) else {
            // The program has closed its socket, most likely.
            let known = self.associations.by_host(claimed).map(|association| association.local_id);
            if let Some(known) = known.filter(|_| self.answers.take(now)) {
                self.refuse_syn(&arrival, known, ErrorCode::UnknownFlow);
            }
            return Err(DropReason::UnknownFlow);
        };
        let allow = Allow::List(alloc::vec![AllowItem::Host(claimed)]);
        let demux = Demux {
            listener: app.source,
            other_family: None,
            is_looked_up: false,
            service_port: None,
            protocol: Some(UDP),
            allow,
        };
        app.destination.set_port(session.client.port());
        arrival.app = Some(app);
        self.respond(now, &arrival, &demux)
    }
}
