//! Instances with a virtual address of their own on this host: where each datagram of an unconnected socket is
//! resolved, what is resolved to is an instance, and the flow to it is as every other (DESIGN §9).
//!
//! The address stands for the instance as a hint, not as a promise: where it does not answer, the flow goes to whoever
//! serves the name now. What is meant for one host alone, as a connection that is handed over, says so by
//! [`Pin::Only`].

use core::net::IpAddr;

use margay_wire::FlowId;

use crate::machine::sal::Sal;
use crate::resolve::way::Sender;
use crate::session::flow::Setup;
use crate::table::{NextHop, Resolution};
use crate::types::name::ServiceId;
use crate::types::time::Instant;

/// An instance that has an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instance {
    /// The name that it serves, as a program asked for it.
    pub service: ServiceId,
    /// Its host.
    pub next_hop: NextHop,
    /// Who else may answer.
    pub pin: Pin,
}

/// How firmly what goes to an instance is meant for its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pin {
    /// Whoever serves the name may answer, where the host does not or refuses.
    Hint,
    /// The host alone may answer: where it does not, there is no connection.
    Only,
}

/// By what a router picks an instance: the same for every copy of one SYN (DESIGN §7).
pub(crate) fn sticky(flow: FlowId, nonce: u64) -> u64 {
    nonce ^ (u64::from(flow.0) << 32 | u64::from(flow.0))
}

impl Sal {
    /// Packets to `address` are for this instance.
    pub fn bind_instance(&mut self, address: IpAddr, instance: Instance) {
        self.end_grants_to(address);
        self.instances.insert(address, instance);
    }

    /// The address stands for nothing any more. Flows live on.
    pub fn unbind_instance(&mut self, address: IpAddr) {
        self.end_grants_to(address);
        self.instances.remove(&address);
    }

    /// The instance that was meant does not answer, or says no: the flow goes to whoever the service table gives now.
    /// False if it has gone there already, or nobody else is known.
    pub(crate) fn resolve_again(&mut self, now: Instant, id: FlowId) -> bool {
        let Some(flow) = self.flows.get(id) else { return false };
        let Setup::Initiator(setup) = &flow.setup else { return false };
        if setup.pin != Some(Pin::Hint) {
            return false;
        }
        let (service, app, number) = (flow.service, flow.app, sticky(id, setup.nonce));
        let (rule, found) = match self.pick(&service, number, app.protocol, app.destination.port(), Sender::Own) {
            Resolution::Forward(rule, hop) => (Some(rule), Some(hop.address)),
            Resolution::Demux(rule, _) | Resolution::Box(rule, _) => (Some(rule), Some(self.loopback())),
            // Its SYN has waited once; whoever tries again waits for the resolver.
            Resolution::Delay(rule, _) | Resolution::Drop(rule) => (Some(rule), None),
            Resolution::None => (None, None),
        };
        if let Some(rule) = rule {
            self.table.note_use(now, rule);
        }
        if let Some(Setup::Initiator(setup)) = self.flows.get_mut(id).map(|flow| &mut flow.setup) {
            setup.pin = None;
            setup.next_hop = found.unwrap_or(setup.next_hop);
        }
        if found.is_some() {
            self.send_syn(now, id);
        }
        found.is_some()
    }
}
