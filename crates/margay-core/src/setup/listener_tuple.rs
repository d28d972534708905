//! The five-tuple that a listener sees (DESIGN §18: each end has one of its own).

use core::net::SocketAddr;

use super::responder::Arrival;
use crate::entry::Tuple;
use crate::name::is_virtual;
use crate::sal::Sal;
use crate::surrogate::{other_port, responder_tuple};
use crate::table::Demux;

/// Ports that are tried beside those of connections that kernels open.
const PORT_TRIES: usize = 32;

impl Sal {
    /// The five-tuple of a new flow as the listener will see it.
    pub(super) fn choose_tuple(
        &mut self,
        arrival: &Arrival<'_>,
        protocol: u8,
        client_port: u16,
        demux: &Demux,
    ) -> Option<Tuple> {
        if let Some(app) = arrival.app {
            return (!self.is_taken(&app)).then_some(app);
        }
        let client = SocketAddr::new(arrival.reply.direct.ip(), client_port);
        let place = demux.place_for(client.ip());
        let mut found = None;
        for _ in 0..PORT_TRIES {
            let (asked, random) = (self.beside_grants(client), self.rng.u32());
            let taken = |tuple: &Tuple| self.is_taken(tuple) || self.stands_for_another(tuple);
            found = responder_tuple(protocol, asked, place, &self.config.local_addresses, random, taken);
            if asked == client || found.is_none_or(|tuple| tuple.destination.port() == asked.port()) {
                break;
            }
        }
        found
    }

    /// The five-tuple with another port of the client, or `None` when every try was taken.
    pub(super) fn choose_other(&mut self, before: &Tuple) -> Option<Tuple> {
        if !self.grants.has_client(before.destination.ip()) {
            let random = self.rng.u32();
            return other_port(before, random, |tuple| self.is_taken(tuple));
        }
        (0..PORT_TRIES).find_map(|_| {
            let other = Tuple { destination: self.beside_grants(before.destination), ..*before };
            (other != *before && !self.is_taken(&other)).then_some(other)
        })
    }

    /// A client, with a port that no connection has which the kernel opens by itself: that takes the ports of programs, and
    /// never a flow port (docs/decisions/0049).
    pub(super) fn beside_grants(&mut self, client: SocketAddr) -> SocketAddr {
        let range = self.ports.range.clone().filter(|_| self.grants.has_client(client.ip()));
        range.map_or(client, |range| SocketAddr::new(client.ip(), self.random_port(&range)))
    }

    pub(super) fn is_taken(&self, tuple: &Tuple) -> bool {
        let is_flow_port = self.ports.range.as_ref().is_some_and(|range| range.contains(&tuple.destination.port()));
        self.flows.by_tuple(tuple).is_some() || self.grants.has_client(tuple.destination.ip()) && !is_flow_port
    }

    /// Whether a surrogate stands for the client of a datagram socket already, whichever that is: programs answer
    /// from new sockets, and are shown an address for it, by the surrogate alone.
    fn stands_for_another(&self, tuple: &Tuple) -> bool {
        is_virtual(tuple.destination.ip()) && self.flows.asked_from(tuple.destination).is_some()
    }
}

#[cfg(test)]
mod tests {
    use margay_wire::FlowId;

    use super::*;
    use crate::config::Limits;
    use crate::event::Role;
    use crate::flow::Flow;
    use crate::handover::tests::sal;
    use crate::name::ServiceId;
    use crate::time::Instant;

    #[test]
    fn a_surrogate_stands_for_the_client_of_one_socket() {
        let mut sal = sal(Limits::default());
        let at = |text: &str| -> SocketAddr { text.parse().expect("literal") };
        let asked = |from, to| Tuple { protocol: 17, source: at(to), destination: at(from) };
        let one = asked("198.19.64.9:4000", "198.18.0.1:69");
        let session = margay_wire::SessionId([1; 16]);
        sal.flows.insert(Flow::new(FlowId(1), session, ServiceId::default(), Role::Responder, one, Instant::ZERO));
        assert!(sal.is_taken(&one));
        let other = asked("198.19.64.9:4000", "198.18.0.1:53");
        assert!(!sal.is_taken(&other) && sal.stands_for_another(&other), "of another socket");
        assert!(!sal.stands_for_another(&asked("198.19.64.9:4001", "198.18.0.1:53")));
        assert!(!sal.stands_for_another(&asked("198.19.64.10:4000", "198.18.0.1:53")));
    }
}
