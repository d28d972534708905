//! The five-tuple that a listener sees (DESIGN §18: each end has one of its own).

use core::net::SocketAddr;

use crate::act::chain::Read;
use crate::act::grant::Grants;
use crate::association::draft::Arrival;
use crate::machine::sal::Sal;
use crate::session::flow::FlowTable;
use crate::table::Demux;
use crate::table::surrogate::{Own, responder_tuple};
use crate::types::config::Config;
use crate::types::drop_reason::DropReason;
use crate::types::tuple::{GREETING, Tuple, tuple_of};
use margay_wire::FlowId;

impl Sal {
    /// The five-tuple of a new flow; one that no program and no box is to see has one of its own.
    pub(super) fn tuple_of_new(
        &mut self,
        id: FlowId,
        arrival: &Arrival<'_>,
        client: SocketAddr,
        demux: &Demux,
        (read, is_refused): (&Read, bool),
    ) -> Result<Tuple, DropReason> {
        let protocol = arrival.message.session().map_or(GREETING, |session| session.protocol);
        if protocol == GREETING || read.is_at_box() && is_refused {
            return Ok(tuple_of(id));
        }
        if read.is_at_box() {
            return self.left_tuple(arrival, protocol, client).ok_or(DropReason::Awaited);
        }
        if arrival.message.reconfiguration().is_some() {
            let session = arrival.message.session().map(|session| session.session);
            let of_session = session.and_then(|session| self.reconfigurations.followed(&self.flows, session));
            // Of one that is refused once its sender is proved.
            return Ok(of_session.map_or(tuple_of(id), |flow| flow.app));
        }
        self.choose_tuple(arrival, protocol, client, demux).ok_or(DropReason::Full)
    }

    /// The five-tuple of a new flow as the listener will see it.
    pub(super) fn choose_tuple(
        &mut self,
        arrival: &Arrival<'_>,
        protocol: u8,
        client: SocketAddr,
        demux: &Demux,
    ) -> Option<Tuple> {
        let place = demux.place_for(client.ip());
        let random = self.rng.u32();
        let taken = |tuple: &Tuple| {
            self.grants.is_taken(&self.flows, tuple) || self.flows.stands_for_another(&self.config, tuple)
        };
        match arrival.app {
            Some(app) => (!self.grants.is_taken(&self.flows, &app)).then_some(app),
            None => responder_tuple(protocol, client, place, self.config.own(), random, taken),
        }
    }
}

impl Config {
    /// This host as its listeners know it.
    pub(crate) fn own(&self) -> Own<'_> {
        Own { local: &self.local_addresses, ranges: self.ranges }
    }
}

impl Grants {
    pub(crate) fn is_taken(&self, flows: &FlowTable, tuple: &Tuple) -> bool {
        flows.by_tuple(tuple).is_some() || self.keeps(tuple.destination)
    }
}

impl FlowTable {
    /// Whether a surrogate stands for the client of a datagram socket already, whichever that is: programs answer
    /// from new sockets, and are shown an address for it, by the surrogate alone.
    fn stands_for_another(&self, config: &Config, tuple: &Tuple) -> bool {
        config.ranges.is_virtual(tuple.destination.ip()) && self.asked_from(tuple.destination).is_some()
    }
}

#[cfg(test)]
mod tests {
    use margay_wire::FlowId;

    use super::*;
    use crate::act::handover::tests::sal;
    use crate::session::flow::Flow;
    use crate::types::config::Limits;
    use crate::types::name::ServiceId;
    use crate::types::role::Role;
    use crate::types::time::Instant;

    #[test]
    fn a_surrogate_stands_for_the_client_of_one_socket() {
        let mut sal = sal(Limits::default());
        let at = |text: &str| -> SocketAddr { text.parse().expect("literal") };
        let asked = |from, to| Tuple { protocol: 17, source: at(to), destination: at(from) };
        let one = asked("198.19.64.9:4000", "198.18.0.1:69");
        let session = margay_wire::SessionId([1; 16]);
        sal.flows.insert(Flow::new(FlowId(1), session, ServiceId::default(), Role::Responder, one, Instant::ZERO));
        assert!(sal.grants.is_taken(&sal.flows, &one));
        let other = asked("198.19.64.9:4000", "198.18.0.1:53");
        assert!(
            !sal.grants.is_taken(&sal.flows, &other) && sal.flows.stands_for_another(&sal.config, &other),
            "of another socket"
        );
        assert!(!sal.flows.stands_for_another(&sal.config, &asked("198.19.64.9:4001", "198.18.0.1:53")));
        assert!(!sal.flows.stands_for_another(&sal.config, &asked("198.19.64.10:4000", "198.18.0.1:53")));
    }
}
