//! Who may speak for a name (DESIGN §7).

use alloc::string::{String, ToString};

use margay_wire::{FlowId, Message};

use crate::act::ending::fence::Fences;
use crate::association::AssociationTable;
use crate::machine::sal::Sal;
use crate::session::flow::FlowTable;
use crate::session::flow::Setup;
use crate::types::key::HostPublic;
use crate::types::name::ServiceId;

impl Sal {
    /// Whether a host may speak for a name, by the chain of certificates that it shows. `Ok(false)`: nobody here can
    /// tell, since no authority of the name is trusted or distrusted here.
    ///
    /// # Errors
    ///
    /// Why not, for people.
    pub fn may_serve(&mut self, service: &ServiceId, host_key: &HostPublic, chain: &[u8]) -> Result<bool, String> {
        let unix_s = self.unix_s();
        let proof = self.trust.verify_service(chain, service, &host_key.0, unix_s);
        proof.map(|proof| proof.is_proved()).map_err(|error| error.to_string())
    }

    /// Whether the host behind `association` may answer for the flow's name (DESIGN §7). `Ok(false)`: nobody here can
    /// tell.
    pub(super) fn check_right_to_answer(
        &mut self,
        id: FlowId,
        message: &Message<'_>,
        association: u32,
    ) -> Result<bool, String> {
        let Some(flow) = self.flows.get(id) else { return Ok(false) };
        if let Setup::Initiator(setup) = &flow.setup
            && let Some(related) = setup.related
        {
            // It answers for no name: it is the one that asked.
            let is_client = self.associations.get(association).is_some_and(|other| other.host == related.host);
            return if is_client { Ok(true) } else { Err("another host answers than the one that asked".to_string()) };
        }
        let service = flow.asked();
        let Some(answering) = self.associations.get(association) else {
            return Err("the association with the host that answered is gone; connect again".to_string());
        };
        if let Setup::Initiator(setup) = &flow.setup
            && setup.fetch.is_some_and(|fetch| fetch.taker != answering.host)
        {
            return Err("another host answers than the one that the session goes to".to_string());
        }
        if let Setup::Initiator(setup) = &flow.setup
            && flow.chain.as_ref().is_none_or(|chain| chain.ends_next())
            && setup.begin.is_some_and(|begin| begin.host != answering.host.0)
        {
            return Err("another host answers than the one that the session is with".to_string());
        }
        // Not whoever has this host's key: a clone answers for no more than its certificates say.
        if answering.is_self() {
            return Ok(true);
        }
        let host_key = answering.host_key;
        let chain = message.certificate().unwrap_or_default();
        self.may_serve(&service, &host_key, chain)
            .map_err(|error| alloc::format!("the host that answered may not speak for this name: {error}"))
    }

    /// What the instance has said of its service in its SYN-ACK.
    pub(super) fn note_said(&mut self, id: FlowId, message: &Message<'_>) {
        self.note_terms(id, message.terms());
        self.fences.note_fence(&self.flows, &self.associations, id, message.fence_number());
    }
}

impl Fences {
    /// Whether the host behind `association` holds the flow's name still, where that is fenced and the host has said
    /// its number.
    pub(super) fn check_holder(
        &self,
        flows: &FlowTable,
        associations: &AssociationTable,
        id: FlowId,
        message: &Message<'_>,
        association: u32,
        unix_s: u64,
    ) -> Result<(), String> {
        let Some((flow, peer)) = flows.get(id).zip(associations.get(association)) else { return Ok(()) };
        match self.holder_since(peer.host, &flow.asked(), message.fence_number(), unix_s) {
            None => Ok(()),
            Some(holder) => Err(alloc::format!(
                "the name is held by host {holder} now, and another host answered that held it before; connect again"
            )),
        }
    }
}
