//! The five-tuple that a listener sees (DESIGN §18: each end has one of its own).

use core::net::SocketAddr;

use super::responder::Arrival;
use crate::entry::Tuple;
use crate::name::is_virtual;
use crate::sal::Sal;
use crate::surrogate::responder_tuple;

/// Of the ports that a client may be shown with.
const PORT_MIN: u16 = 1024;

impl Sal {
    /// The five-tuple of a new flow as the listener will see it.
    pub(super) fn choose_tuple(
        &mut self,
        arrival: &Arrival<'_>,
        protocol: u8,
        client_port: u16,
        listener: SocketAddr,
    ) -> Option<Tuple> {
        let random = self.rng.u32();
        let client = self.beside_grants(SocketAddr::new(arrival.reply.direct.ip(), client_port));
        let taken = |tuple: &Tuple| self.is_taken(tuple) || self.stands_for_another(tuple);
        match arrival.app {
            Some(app) => (!self.is_taken(&app)).then_some(app),
            None => responder_tuple(protocol, client, listener, &self.config.local_addresses, random, taken),
        }
    }

    /// A client, with another port than its program's where the kernel may have opened a connection of that port by a grant, with the answer
    /// lost and the SYN sent again: of one five-tuple there would be two (docs/decisions/0049).
    fn beside_grants(&mut self, client: SocketAddr) -> SocketAddr {
        if !self.grants.has_client(client.ip()) {
            return client;
        }
        let other = PORT_MIN + (self.rng.u32() % u32::from(u16::MAX - PORT_MIN)) as u16;
        SocketAddr::new(client.ip(), if other < client.port() { other } else { other + 1 })
    }

    pub(super) fn is_taken(&self, tuple: &Tuple) -> bool {
        self.flows.by_tuple(tuple).is_some()
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
