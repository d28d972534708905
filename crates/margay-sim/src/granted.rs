//! Connections that a simulated kernel sets up by grants, as `margay-datapath/bpf/grant.h` has it.

use std::collections::{HashMap, HashSet};
use std::hash::Hasher;
use std::net::{IpAddr, SocketAddr};

use margay_core::entry::{GrantKey, PathId};
use margay_core::flow_cache::GRANT_NEWS;
use margay_core::{Grant, Instant, Role, Tuple, Wire};
use margay_wire::FlowId;
use siphasher::sip::SipHasher24;

use crate::program::{ACK, RST, SYN, Segment};

/// A grant, and what was opened by it.
struct Taken {
    grant: Grant,
    /// This host's address and the peer's.
    between: (IpAddr, IpAddr),
    /// An initiator's next flow.
    next: u16,
    /// A responder's flows that were opened.
    used: u128,
}

impl Taken {
    /// How many flows are opened, where the agent is to hear of it.
    fn news(&self) -> Option<(FlowId, u16)> {
        let count = if self.grant.role == Role::Initiator { self.next } else { self.used.count_ones() as u16 };
        let step = (self.grant.count / GRANT_NEWS).max(1);
        (count.is_multiple_of(step) || count == self.grant.count).then_some((self.grant.id, count))
    }
}

/// A flow that is to be opened.
pub(crate) struct Opening {
    pub flow: FlowId,
    pub app: Tuple,
    pub wire: Wire,
    pub between: (IpAddr, IpAddr),
    /// Under which its SYN is tagged.
    pub key: GrantKey,
}

/// What the SYN of a flow bears, with these ports on the wire.
pub(crate) fn proof(GrantKey(key): &GrantKey, source_port: u16, destination_port: u16, sequence: u32) -> u64 {
    let mut hasher = SipHasher24::new_with_key(key);
    hasher.write(&source_port.to_be_bytes());
    hasher.write(&destination_port.to_be_bytes());
    hasher.write(&sequence.to_be_bytes());
    hasher.finish()
}

/// What becomes of a SYN from the wire.
pub(crate) enum Answer {
    /// It is by no grant, or by one that has nothing for it.
    Nothing,
    /// It does not show that its sender holds the grant.
    Unproved,
    /// It opens a flow.
    Opens(Opening),
}

/// All grants of a host's kernel.
#[derive(Default)]
pub(crate) struct Grants {
    all: HashMap<FlowId, Taken>,
    /// Flows that nobody has answered, and those that the agent has not been told of.
    fresh: HashSet<FlowId>,
    untold: HashSet<FlowId>,
    /// How many flows of which grants are opened, as the agent is told.
    pub news: Vec<(FlowId, u16)>,
}

fn wire(grant: &Grant, number: u16) -> Wire {
    let Grant { path, local_port, remote_port, .. } = *grant;
    let (local, remote) = if grant.role == Role::Initiator { (number, 0) } else { (0, number) };
    let (local_port, remote_port) = (local_port + local, remote_port + remote);
    Wire { path, local_port, remote_port, sending: true, accepting: true, begun: true }
}

fn number_of(grant: &Grant, number: u16) -> FlowId {
    FlowId(grant.first_flow.0 + u32::from(number))
}

impl Grants {
    pub fn add(&mut self, grant: Grant, between: (IpAddr, IpAddr)) {
        self.all.insert(grant.id, Taken { grant, between, next: 0, used: 0 });
    }

    pub fn stop(&mut self, id: FlowId) {
        self.all.remove(&id);
    }

    pub fn lose_path(&mut self, path: PathId) {
        self.all.retain(|_, taken| taken.grant.path != path);
    }

    pub fn stop_all(&mut self) {
        self.all.clear();
    }

    pub fn clear(&mut self) {
        self.all.clear();
        self.fresh.clear();
        self.untold.clear();
    }

    /// Whether the agent has not been told of a flow that somebody has answered.
    pub fn is_untold(&self, flow: FlowId) -> bool {
        self.untold.contains(&flow)
    }

    /// The agent knows a flow from now on. Whether it has not before.
    pub fn know(&mut self, flow: FlowId) -> bool {
        self.untold.remove(&flow)
    }

    pub fn is_fresh(&self, flow: FlowId) -> bool {
        self.fresh.contains(&flow)
    }

    /// A program's SYN to an address that a grant leads to.
    pub fn take(&mut self, now: Instant, segment: &Segment) -> Option<Opening> {
        let leads = |taken: &&mut Taken| {
            taken.grant.role == Role::Initiator
                && taken.grant.app.destination == segment.tuple.destination
                && now <= taken.grant.until
                && taken.next < taken.grant.count
        };
        let taken = self.all.values_mut().filter(leads).min_by_key(|taken| taken.grant.id)?;
        let number = taken.next;
        taken.next += 1;
        let flow = number_of(&taken.grant, number);
        self.news.extend(taken.news());
        self.fresh.insert(flow);
        self.untold.insert(flow);
        let (wire, between, key) = (wire(&taken.grant, number), taken.between, taken.grant.key);
        Some(Opening { flow, app: segment.tuple, wire, between, key })
    }

    /// A SYN from the wire that a grant allows.
    pub fn open(&mut self, now: Instant, segment: &Segment) -> Answer {
        let (source, destination) = (segment.tuple.source, segment.tuple.destination);
        let found = self.all.values_mut().find_map(|taken| {
            let Grant { role, local_port, remote_port, count, until, .. } = taken.grant;
            let number = source.port().checked_sub(remote_port).filter(|number| *number < count)?;
            let is_it = role == Role::Responder
                && (destination.port(), now <= until) == (local_port, true)
                && taken.between == (destination.ip(), source.ip())
                && taken.used & 1 << number == 0;
            is_it.then_some((taken, number))
        });
        let Some((taken, number)) = found else { return Answer::Nothing };
        let right = proof(&taken.grant.key, source.port(), destination.port(), segment.sequence);
        if segment.proof != Some(right) || !segment.data.is_empty() {
            return Answer::Unproved;
        }
        taken.used |= 1 << number;
        let Tuple { protocol, source, destination } = taken.grant.app;
        let destination = SocketAddr::new(destination.ip(), taken.grant.ports[usize::from(number)]);
        let flow = number_of(&taken.grant, number);
        self.news.extend(taken.news());
        self.fresh.insert(flow);
        self.untold.insert(flow);
        let app = Tuple { protocol, source, destination };
        let (wire, between, key) = (wire(&taken.grant, number), taken.between, taken.grant.key);
        Answer::Opens(Opening { flow, app, wire, between, key })
    }

    /// A packet of the peer's: it may be the first answer to a flow.
    pub fn note(&mut self, flow: FlowId, flags: u8) {
        if flags & RST == 0 && flags & (SYN | ACK) != SYN {
            self.fresh.remove(&flow);
        }
    }

    /// Flows that nobody has answered, between these numbers.
    pub fn take_fresh(&mut self, first: FlowId, count: u16) -> Vec<FlowId> {
        let last = first.0 + u32::from(count);
        let gone: Vec<FlowId> = self.fresh.iter().copied().filter(|flow| (first.0..last).contains(&flow.0)).collect();
        self.fresh.retain(|flow| !gone.contains(flow));
        self.untold.retain(|flow| !(first.0..last).contains(&flow.0));
        gone
    }
}
