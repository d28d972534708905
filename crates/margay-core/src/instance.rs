//! Instances with a virtual address of their own on this host: where each datagram of an unconnected socket is resolved, what is
//! resolved to is an instance, and the flow to it is as every other (DESIGN §9).
//!
//! The address stands for the instance as a hint, not as a promise: where it does not answer, the flow goes to whoever serves the
//! name now.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use margay_wire::FlowId;

use crate::flow::Setup;
use crate::name::ServiceId;
use crate::sal::Sal;
use crate::setup::sticky;
use crate::table::{NextHop, Resolution};
use crate::time::Instant;
use crate::way::Sender;

/// Instances' IPv4 addresses: 198.19.0.0/18. The rest of 198.19.0.0/16 stands for clients.
const FIRST_V4: u32 = 0xc613_0000;
const COUNT_V4: u32 = 0x4000;
/// Instances' IPv6 addresses: authority block 0, last 32 bits with the top bits 01.
const FIRST_V6: u128 = 0xfd5a_4c00_0000_0000_0000_0000_4000_0000;
const COUNT_V6: u32 = 0x4000_0000;

/// An instance that has an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instance {
    /// The name that it serves, as a program asked for it.
    pub service: ServiceId,
    /// Its host.
    pub next_hop: NextHop,
}

/// The address that number `n` of a family stands for; numbers wrap.
pub fn instance_address(v4: bool, n: u32) -> IpAddr {
    if v4 {
        // .0.0 looks like a network's address.
        Ipv4Addr::from(FIRST_V4 + 1 + n % (COUNT_V4 - 1)).into()
    } else {
        Ipv6Addr::from(FIRST_V6 + u128::from(n % COUNT_V6)).into()
    }
}

/// Whether an address can only be an instance's.
pub fn is_instance_address(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => u32::from(v4) & !(COUNT_V4 - 1) == FIRST_V4,
        IpAddr::V6(v6) => u128::from(v6) & !u128::from(COUNT_V6 - 1) == FIRST_V6,
    }
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

    /// The instance that was meant does not answer, or says no: the flow goes to whoever the service table gives now. False if it
    /// has gone there already, or nobody else is known.
    pub(crate) fn resolve_again(&mut self, now: Instant, id: FlowId) -> bool {
        let Some(flow) = self.flows.get(id) else { return false };
        let Setup::Initiator(setup) = &flow.setup else { return false };
        if !setup.pinned {
            return false;
        }
        let (service, app, number) = (flow.service, flow.app, sticky(id, setup.nonce));
        let (rule, found) = match self.pick(&service, number, app.protocol, app.destination.port(), Sender::Own) {
            Resolution::Forward(rule, hop) => (Some(rule), Some(hop.address)),
            Resolution::Demux(rule, _) => (Some(rule), Some(self.loopback())),
            // Its SYN has waited once; whoever tries again waits for the resolver.
            Resolution::Delay(rule, _) | Resolution::Drop(rule) => (Some(rule), None),
            Resolution::None => (None, None),
        };
        if let Some(rule) = rule {
            self.table.note_use(now, rule);
        }
        if let Some(Setup::Initiator(setup)) = self.flows.get_mut(id).map(|flow| &mut flow.setup) {
            setup.pinned = false;
            setup.next_hop = found.unwrap_or(setup.next_hop);
        }
        if found.is_some() {
            self.send_syn(now, id);
        }
        found.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::{HOST_V4, HOST_V6, is_virtual};

    #[test]
    fn instances_addresses_are_virtual_and_no_others() {
        for v4 in [true, false] {
            for n in [0, 1, 0x3ffe, 0x3fff, u32::MAX] {
                let address = instance_address(v4, n);
                assert!(is_instance_address(address) && is_virtual(address), "{address}");
                assert_eq!(address.is_ipv4(), v4);
            }
        }
        for other in ["198.18.0.9", "198.19.64.1", "fd5a:4c00::8000:1", "fd5a:4c00:1::4000:1"] {
            assert!(!is_instance_address(other.parse().expect("literal")), "{other}");
        }
        assert!(!is_instance_address(HOST_V4.into()) && !is_instance_address(HOST_V6.into()));
    }
}
