//! What the kernel keeps of a grant for the next start of the agent. Flows that kernels set up have no hand-over record
//! until their agent has been told: of those that it was not, this says what they are.
//!
//! ```text
//!  0 version = 1 | 1 flags (1 authenticated) | 2..4 port of the service | 4..8 association | 8..12 peer's flow 0
//! 12..16 peer's grant
//! 16..32 session | 32..64 service | 64..80 peer's host-ID
//! ```

use margay_wire::{FlowId, GRANT_FLOWS_MAX, SessionId};

use super::{Given, Grants, SETTLING, SURVEYS};
use crate::cache::entry::{GRANT_RECORD_LEN, Grant};
use crate::machine::sal::Sal;
use crate::types::key::HostId;
use crate::types::name::ServiceId;
use crate::types::time::Instant;

const VERSION: u8 = 1;
const AUTHENTICATED: u8 = 1;

pub(super) fn encode(given: &Given) -> [u8; GRANT_RECORD_LEN] {
    let mut record = [0; GRANT_RECORD_LEN];
    record[0] = VERSION;
    record[1] = if given.authenticated { AUTHENTICATED } else { 0 };
    record[2..4].copy_from_slice(&given.port.to_be_bytes());
    record[4..8].copy_from_slice(&given.association.to_be_bytes());
    record[8..12].copy_from_slice(&given.peer_first.0.to_be_bytes());
    record[12..16].copy_from_slice(&given.peer_grant.0.to_be_bytes());
    record[16..32].copy_from_slice(&given.session.0);
    record[32..64].copy_from_slice(&given.service.0);
    record[64..80].copy_from_slice(&given.host.0);
    record
}

fn decode(grant: &Grant) -> Option<Given> {
    let record = &grant.record;
    let word = |at: usize| u32::from_be_bytes(core::array::from_fn(|byte| record[at + byte]));
    let half = |at: usize| -> [u8; 16] { core::array::from_fn(|byte| record[at + byte]) };
    if record[0] != VERSION || record[1] > AUTHENTICATED {
        return None;
    }
    let service = ServiceId(core::array::from_fn(|byte| record[32 + byte]));
    let given = Given::new(*grant, SessionId(half(16)), service, (word(4), HostId(half(64))), record[1] != 0);
    let port = u16::from_be_bytes([record[2], record[3]]);
    Some(Given { peer_first: FlowId(word(8)), peer_grant: FlowId(word(12)), port, ..given })
}

impl Sal {
    /// Takes up a grant of the start before, as the kernel's cache has kept it: nothing is opened by it any more, but
    /// [`handle_opened`](Self::handle_opened) is believed of its flows. After the flows of that start were taken up.
    /// False where it is of no use: it is damaged, or its peer is not known.
    pub fn adopt_grant(&mut self, now: Instant, grant: &Grant) -> bool {
        self.now = now;
        let Some(mut given) = decode(grant) else { return false };
        let is_known = self.associations.get(given.association).is_some_and(|known| known.host == given.host);
        let fits = (1..=GRANT_FLOWS_MAX).contains(&grant.count)
            && grant.first_flow.0.checked_add(grant.count.into()).is_some();
        if !is_known || !fits || self.grants.has(grant.id) || self.grants.has(grant.first_flow) {
            return false;
        }
        let flows = (0..grant.count).zip(grant.first_flow.0..);
        for (number, flow) in flows {
            let (local_port, peer_port) = given.ports(number);
            if self.flows.get(FlowId(flow)).is_some() {
                given.told |= 1 << number;
            } else {
                // A pair that rests is not in use.
                self.ports.claim(now, (given.host, local_port, peer_port), FlowId(flow));
            }
        }
        given.taken = grant.count;
        // Which of them were taken nobody knows: that nothing was answered says nothing.
        given.silent = u8::MAX;
        (given.survey, given.over) = (Some(now + SURVEYS), Some(now + SETTLING));
        if self.stack_rules.has_floor_for(&given.service) {
            given.hurry(now);
        }
        self.associations.hold_grant(&given);
        self.grants.by_first.insert(grant.first_flow, grant.id);
        self.grants.shown.extend(given.shown());
        self.grants.deadlines.insert((Grants::deadline_of(&given), grant.id));
        self.grants.all.insert(grant.id, alloc::boxed::Box::new(given));
        true
    }
}

#[cfg(test)]
mod tests {
    use core::net::SocketAddr;

    use super::*;
    use crate::cache::entry::{GrantKey, PathId};
    use crate::types::role::Role;
    use crate::types::tuple::Tuple;

    fn given() -> Given {
        let address = SocketAddr::new([10, 0, 0, 1].into(), 80);
        let grant = Grant {
            id: FlowId(1),
            role: Role::Responder,
            app: Tuple { protocol: 6, source: address, destination: address },
            path: PathId(3),
            local_port: 61_001,
            remote_port: 61_056,
            first_flow: FlowId(100),
            count: 128,
            until: Instant::ZERO,
            ports: core::array::from_fn(|number| 1000 + number as u16),
            key: GrantKey::NONE,
            record: [0; GRANT_RECORD_LEN],
        };
        let (session, service) = (SessionId([0x55; 16]), ServiceId([0x66; 32]));
        let given = Given::new(grant, session, service, (0x0102_0304, HostId([0x77; 16])), true);
        Given { peer_first: FlowId(0x0506_0708), peer_grant: FlowId(0x090a_0b0c), port: 0x0d0e, ..given }
    }

    #[test]
    fn a_record_in_literal_bytes() {
        let record = encode(&given());
        assert_eq!(record[..16], [1, 1, 13, 14, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
        assert_eq!(
            (&record[16..32], &record[32..64], &record[64..]),
            (&[0x55; 16][..], &[0x66; 32][..], &[0x77; 16][..])
        );
        let with_record = Grant { record, ..given().grant };
        assert_eq!(decode(&with_record), Some(Given { grant: with_record, ..given() }));
        for (at, byte) in [(0, 0), (0, 2), (1, 2)] {
            let mut other = with_record;
            other.record[at] = byte;
            assert_eq!(decode(&other), None, "byte {at}");
        }
    }

    #[test]
    fn sessions_and_ports_follow_from_the_grants() {
        let mut given = given();
        given.session.0[12..].copy_from_slice(&[0xff; 4]);
        assert_eq!(given.session_of(0).0[12..], [0; 4], "it wraps");
        assert_eq!(given.session_of(127).0[11..], [0x55, 0, 0, 0, 127]);
        assert_eq!(given.ports(127), (61_001, 61_183));
        assert_eq!(given.listener_tuple(127).destination.port(), 1127);
        given.grant.role = Role::Initiator;
        assert_eq!(given.ports(127), (61_128, 61_056));
        (given.told, given.brief, given.taken) = (1 << 127, 1, 2);
        assert_eq!((given.left(), given.is_told(127), given.is_told(126)), (126, true, false));
        assert_eq!(given.unsettled(), u128::MAX >> 2 << 1);
        given.grant.count = 16;
        assert_eq!(given.unsettled(), 0xfffe);
    }
}
