//! Greetings: a handshake for its own sake, when a peer says that it no longer knows us (DESIGN §7).
//!
//! A host that lost its keys cannot prove that it lost them: its UNKNOWN is untagged and changes nothing here. It makes
//! us ask, once in a while, for a full handshake. What that proves (a newer boot, say) decides over the flows.
//!
//! On the wire a greeting is a SYN, SYN-ACK and ACK of protocol 0 to the empty name, without an application's packet.

use alloc::vec::Vec;
use core::net::{IpAddr, Ipv6Addr, SocketAddr};
use core::time::Duration;

use margay_wire::{ErrorCode, ErrorRepr, Extension, FlowId, Kind, Message};

use crate::act::setup::Start;
use crate::association::draft::{Arrival, Draft, Reply};
use crate::machine::sal::Sal;
use crate::session::flow::Flow;
use crate::table::{Allow, Demux};
use crate::types::drop_reason::DropReason;
use crate::types::name::ServiceId;
use crate::types::role::Role;
use crate::types::time::Instant;
use crate::types::tuple::tuple_of;

/// How often one peer is greeted at most.
const GREETING_REST: Duration = Duration::from_secs(5);
/// Bytes of an UNKNOWN: nothing shorter is answered with one.
const UNKNOWN_LEN: usize = 28;
impl Sal {
    /// DATA came for a flow that is not here, from a host that is not known here: say so, without proof.
    pub(crate) fn say_unknown_association(&mut self, now: Instant, from: SocketAddr, flow: FlowId, len: usize) {
        if len < UNKNOWN_LEN || !self.answers.take(now) {
            return;
        }
        let extensions = [Extension::Error(ErrorRepr { code: ErrorCode::UnknownAssociation, text: "" })];
        let mut draft = Draft::new(Kind::Error, FlowId(0), flow);
        draft.extensions = &extensions;
        if let Some(datagram) = draft.write(None) {
            self.transmit(from, datagram, Kind::Error);
        }
    }

    /// Somebody at `from` says that it does not know us. If we know somebody there, and have flows with it: greet.
    pub(crate) fn consider_greeting(&mut self, now: Instant, from: SocketAddr) -> Result<(), DropReason> {
        let is_due = |greeted: Option<Instant>| greeted.is_none_or(|at| now.since(at) >= GREETING_REST);
        let known =
            self.associations.at_address(from).find(|association| association.flows > 0 && is_due(association.greeted));
        let local_id = known.map(|association| association.local_id).ok_or(DropReason::UnknownAssociation)?;
        self.greet(now, from)?;
        if let Some(association) = self.associations.get_mut(local_id) {
            association.greeted = Some(now);
        }
        Ok(())
    }

    /// Begins a handshake with the host at an address, for its own sake: an operator asks whether a host that was never
    /// met is there. An answer makes an association, and silence changes nothing.
    ///
    /// # Errors
    ///
    /// The flow table is full.
    pub fn greet(&mut self, now: Instant, to: SocketAddr) -> Result<(), DropReason> {
        if self.flows.len() >= self.config.limits.flows {
            return Err(DropReason::Full);
        }
        let id = self.grants.fresh_flow_id(&self.flows, &mut self.rng);
        let session = margay_wire::SessionId(self.rng.bytes());
        let flow = Flow::new(id, session, ServiceId::default(), Role::Initiator, tuple_of(id), now);
        let nonce = self.rng.u64();
        let (first, full) = (Vec::new(), true);
        self.start_setup(
            now,
            flow,
            Start {
                nonce,
                next_hop: to,
                beside: Vec::new(),
                first,
                full,
                related: None,
                pin: None,
                asks: None,
                fetch: None,
                begin: None,
            },
        );
        Ok(())
    }

    /// A greeting came: answered as any SYN, with nothing behind it.
    pub(crate) fn handle_greeting(
        &mut self,
        now: Instant,
        from: SocketAddr,
        message: &Message<'_>,
        nonce: u64,
        syn_len: usize,
    ) -> Result<(), DropReason> {
        let reply = Reply::straight(from);
        let arrival = Arrival { message, service: ServiceId::default(), port: 0, reply, syn_len, nonce, app: None };
        // Whoever proves its key may share an association; what it may do with it is asked at each connection.
        let nowhere = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0);
        let demux = Demux {
            listener: nowhere,
            other_family: None,
            is_looked_up: false,
            service_port: None,
            protocol: None,
            allow: Allow::Any,
        };
        self.respond(now, &arrival, &demux)
    }
}
