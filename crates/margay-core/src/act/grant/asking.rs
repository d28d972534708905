//! Which names a host's programs connect to so often that it asks for grants.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::net::SocketAddr;
use core::time::Duration;

use margay_wire::{FlowId, GRANT_FLOWS_MAX, GrantRepr, Message, SessionId};

use super::{GRANTS_MAX, Given, LIFETIME, PAIRS_MAX, TCP, grant_key};
use crate::act::handover::unspecified;
use crate::act::path::policy::Policy;
use crate::act::setup::Start;
use crate::cache::entry::{GRANT_RECORD_LEN, Grant, PathId};
use crate::leg::flow_ports::FlowPorts;
use crate::machine::sal::Sal;
use crate::resolve::instance::sticky;
use crate::resolve::segment::SEGMENT;
use crate::resolve::way::Sender;
use crate::session::flow::Flow;
use crate::table::{Resolution, RuleId};
use crate::types::name::ServiceId;
use crate::types::rng::Rng;
use crate::types::role::Role;
use crate::types::time::Instant;
use crate::types::tuple::{Tuple, tuple_of};

/// Over which connections are counted.
const WINDOW: Duration = Duration::from_millis(250);
/// So many in a window are often: of fewer, each is resolved by itself. A grant has [`LEAST`] flows or more, so that of
/// fewer connections than these not forty choices of an instance would be left in a second, too few for a fine balance.
const OFTEN: u32 = 160;
/// Flows that are kept on hand: those of so long.
const AHEAD_MS: u32 = 100;
/// No rate is told from less: connections begin at once.
const LEAST_MS: u32 = 10;
/// Grants on hand for one destination, each of which another instance may have given: the kernel takes from one at
/// random.
const ON_HAND: u32 = 4;
/// Grants for one destination, with those that are about to end and those that are asked for.
const GRANTS_PER_DESTINATION: usize = 8;
const LEAST: u16 = 16;
/// As many as all grants of a destination have, but for those that are about to end.
const AHEAD_MAX: u32 = ON_HAND * GRANT_FLOWS_MAX as u32;
/// A grant that ends so soon is not counted upon.
const SOON: Duration = Duration::from_millis(250);
/// After a refusal, or none at all.
const REST: Duration = Duration::from_secs(1);
/// Destinations that are counted. At the bound, others are not until one is quiet.
const DEMANDS_MAX: usize = 256;

/// What the asking flow asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asks {
    pub destination: SocketAddr,
    pub wanted: GrantRepr,
    /// How often grants had been ended by then.
    ends: u64,
}

/// What an answer grants, until it is confirmed.
#[derive(Clone, Debug)]
pub(crate) struct Granted {
    pub asks: Asks,
    given: Given,
}

/// How often programs connect to one destination.
#[derive(Debug)]
struct Demand {
    begun: Instant,
    now: u32,
    before: u32,
    asking: usize,
    /// By which flows may be opened.
    grants: Vec<FlowId>,
    /// Not to be asked before.
    rests: Option<Instant>,
}

impl Demand {
    fn note(&mut self, now: Instant, count: u32) {
        let age = now.since(self.begun);
        if age >= WINDOW {
            self.before = if age < 2 * WINDOW { self.now } else { 0 };
            (self.begun, self.now) = (now, 0);
        }
        self.now = self.now.saturating_add(count);
    }

    fn per_window(&self) -> u32 {
        self.now.max(self.before)
    }

    /// Connections in the time that flows are kept on hand for, as many as lately.
    fn ahead(&self, now: Instant) -> u32 {
        let age_ms = now.since(self.begun).as_millis() as u32;
        let lately = self.now.saturating_mul(AHEAD_MS) / age_ms.max(LEAST_MS);
        lately.max(self.before.saturating_mul(AHEAD_MS) / WINDOW.as_millis() as u32)
    }

    fn is_quiet(&self, now: Instant) -> bool {
        self.asking == 0 && self.grants.is_empty() && now.since(self.begun) > REST
    }
}

/// All of them, and the flows that ask.
#[derive(Default)]
pub(crate) struct Demands {
    by_destination: BTreeMap<SocketAddr, Demand>,
    asking: BTreeMap<FlowId, SocketAddr>,
}

impl Demands {
    fn note(&mut self, now: Instant, destination: SocketAddr, count: u32) {
        if !self.by_destination.contains_key(&destination) && self.by_destination.len() >= DEMANDS_MAX {
            self.by_destination.retain(|_, demand| !demand.is_quiet(now));
            if self.by_destination.len() >= DEMANDS_MAX {
                return;
            }
        }
        let new = Demand { begun: now, now: 0, before: 0, asking: 0, grants: Vec::new(), rests: None };
        self.by_destination.entry(destination).or_insert(new).note(now, count);
    }

    /// A grant is in use, or is no more.
    pub fn set_in_use(&mut self, grant: &Grant, is_in_use: bool) {
        let Some(demand) = self.by_destination.get_mut(&grant.app.destination) else { return };
        demand.grants.retain(|id| *id != grant.id);
        demand.grants.extend(is_in_use.then_some(grant.id));
    }

    /// A flow that asked is over; its destination `rests` until then.
    fn end(&mut self, id: FlowId, rests: Option<Instant>) {
        let Some(destination) = self.asking.remove(&id) else { return };
        if let Some(demand) = self.by_destination.get_mut(&destination) {
            demand.asking = demand.asking.saturating_sub(1);
            demand.rests = rests.or(demand.rests);
        }
    }
}

impl Sal {
    /// Programs have connected to a name so many times more, and it may be often.
    pub(crate) fn note_connects(&mut self, now: Instant, destination: SocketAddr, count: u32) {
        self.grants.demands.note(now, destination, count);
        let Some(demand) = self.grants.demands.by_destination.get(&destination) else { return };
        let (often, asking) = (demand.per_window(), demand.asking);
        let wanted = demand.ahead(now).clamp(LEAST.into(), AHEAD_MAX);
        if often < OFTEN || demand.rests.is_some_and(|until| now < until) || !self.may_ask() {
            return;
        }
        let size = (wanted / ON_HAND).clamp(LEAST.into(), GRANT_FLOWS_MAX.into());
        let here = demand.grants.iter().filter_map(|id| self.grants.all.get(id));
        let lasting = here.filter(|given| now + SOON < given.grant.until);
        let on_hand = lasting.map(|given| u32::from(given.left())).sum::<u32>() + asking as u32 * size;
        let room = GRANTS_PER_DESTINATION.saturating_sub(demand.grants.len() + asking);
        let missing = wanted.saturating_sub(on_hand).div_ceil(size) as usize;
        for _ in 0..missing.min(room) {
            self.ask_for_grant(now, destination, size as u16);
        }
    }

    /// Whether flows may be set up without the core at all: nothing that it alone knows of a program's socket would be
    /// lost.
    fn may_ask(&self) -> bool {
        self.ports.is_direct_on()
            && self.sources.is_empty()
            && self.flows.len() < self.config.limits.flows / 2
            && self.grants.len() < GRANTS_MAX / 2
    }

    fn ask_for_grant(&mut self, now: Instant, destination: SocketAddr, count: u16) {
        let Some(service) = self.service_of(destination.ip()) else { return };
        let nonce = self.rng.u64();
        let id = self.grants.fresh_flow_id(&self.flows, &mut self.rng);
        let pin = self.instances.get(&destination.ip()).map(|instance| instance.pin);
        let Some((next_hop, rule)) = self.way_to_grants(&service, destination, sticky(id, nonce)) else { return };
        if let Some(rule) = rule {
            self.table.note_use(now, rule);
        }
        let Some(port) = self.ports.random_row(&mut self.rng) else { return };
        let first_flow = self.grants.fresh_block(&self.flows, &mut self.rng, count);
        let wanted = GrantRepr { first_flow, port, count, lifetime_ms: LIFETIME.as_millis() as u16 };
        let session = SessionId(self.rng.bytes());
        let flow = Flow::new(id, session, service, Role::Initiator, tuple_of(id), now);
        let asks = Some(Asks { destination, wanted, ends: self.grants.ends });
        if let Some(demand) = self.grants.demands.by_destination.get_mut(&destination) {
            demand.asking += 1;
            self.grants.demands.asking.insert(id, destination);
        }
        self.counters.grants_asked += 1;
        let start = Start { pin, asks, ..Start::of(nonce, next_hop, Vec::new(), Vec::new()) };
        self.start_setup(now, flow, start);
    }

    /// Where somebody may be asked for a grant for a name, and by which rule; `None` where its connections are not all
    /// alike.
    fn way_to_grants(
        &self,
        service: &ServiceId,
        destination: SocketAddr,
        sticky: u64,
    ) -> Option<(SocketAddr, Option<RuleId>)> {
        let is_plain = self.policy_of(service) == Policy::FailOver
            && !self.secure.demands_secure(service)
            && !self.stack_rules.has_any_of(service);
        if !is_plain || self.chains.policy.concerns(service) {
            return None;
        }
        if let Some(instance) = self.instances.get(&destination.ip()) {
            return Some((instance.next_hop.address, None));
        }
        match self.pick(service, sticky, TCP, destination.port(), Sender::Own) {
            Resolution::Forward(rule, hop) if hop.address != SEGMENT && self.beside(rule, Sender::Own).is_empty() => {
                Some((hop.address, Some(rule)))
            }
            _ => None,
        }
    }

    /// What the answer to an asking flow grants, if it may be used here.
    pub(crate) fn read_grant(
        &mut self,
        now: Instant,
        id: FlowId,
        (asks, authenticated): (Option<Asks>, bool),
        message: &Message<'_>,
        association: u32,
    ) -> Option<Granted> {
        let (asks, answer) = asks.zip(message.grant())?;
        let flow = self.flows.get(id)?;
        let (session, service) = (flow.session, flow.service);
        let path = self.associations.wire_path(association)?;
        let known = self.associations.get(association)?;
        let (host, remote) = (known.host, known.remote.ip());
        let key = grant_key(known, session, id, message.src_flow);
        // Larger headers on the way than here: what a program sends would not fit.
        let grows = asks.destination.is_ipv4() && remote.is_ipv6();
        let is_narrow = known.datagram_max != self.config.datagram_max;
        if grows || is_narrow || self.grants.is_silent(now, host) || !self.associations.is_hinted(now, association) {
            return None;
        }
        let source = SocketAddr::new(unspecified(asks.destination.ip()), 0);
        let lifetime = Duration::from_millis(answer.lifetime_ms.into()).min(LIFETIME);
        // It costs a handshake, and is to be of use: else it is as good as a refusal, after which nobody is asked for a
        // while.
        if answer.count < LEAST.min(asks.wanted.count) || lifetime <= SOON || self.ports.count(host) >= PAIRS_MAX {
            return None;
        }
        let grant = Grant {
            id,
            role: Role::Initiator,
            app: Tuple { protocol: TCP, source, destination: asks.destination },
            path: PathId(path),
            local_port: asks.wanted.port,
            remote_port: answer.port,
            first_flow: asks.wanted.first_flow,
            count: answer.count.min(asks.wanted.count),
            until: now + lifetime,
            ports: [0; GRANT_FLOWS_MAX as usize],
            key,
            record: [0; GRANT_RECORD_LEN],
        };
        let given = Given::new(grant, session, service, (association, host), authenticated);
        Some(Granted { asks, given: Given { peer_first: answer.first_flow, peer_grant: message.src_flow, ..given } })
    }

    /// The responder has confirmed.
    pub(crate) fn use_grant(&mut self, now: Instant, Granted { asks, given }: Granted) {
        // While it was asked, grants may have been ended that are like it, and what the name stands for, or where it
        // leads, may have changed.
        let (id, destination) = (given.grant.id, asks.destination);
        let is_as_before = asks.ends == self.grants.ends
            && self.service_of(destination.ip()) == Some(given.service)
            && self.way_to_grants(&given.service, destination, sticky(id, 0)).is_some()
            && self.may_ask();
        if !is_as_before || !self.take_up_grant(now, given) {
            // Nor where its ports or numbers have been taken meanwhile is that a refusal: the next ones may be free.
            self.grants.demands.end(id, None);
        }
    }

    /// A flow that asked is over; where no grant came of it, nobody is asked for a while.
    pub(crate) fn asked(&mut self, id: FlowId) {
        let has_got = self.grants.all.contains_key(&id);
        self.grants.demands.end(id, (!has_got).then_some(self.now + REST));
    }
}

impl FlowPorts {
    /// The first of as many ports in a row as a grant may have. Rows begin at multiples of their length: a kernel finds
    /// a grant by any port of its row.
    fn random_row(&self, rng: &mut Rng) -> Option<u16> {
        let range = self.range.clone().filter(|_| self.is_on)?;
        let first = range.start().div_ceil(GRANT_FLOWS_MAX);
        // The row of the last port is whole only if the range ends with it.
        let end = (u32::from(*range.end()) + 1) / u32::from(GRANT_FLOWS_MAX);
        let row = rng.u32().checked_rem(end.checked_sub(first.into())?)?;
        Some((first + row as u16) * GRANT_FLOWS_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demand() -> Demand {
        Demand { begun: Instant::ZERO, now: 0, before: 0, asking: 0, grants: Vec::new(), rests: None }
    }

    #[test]
    fn what_is_often_is_counted_by_windows() {
        let mut demand = demand();
        (0..10).for_each(|n| demand.note(Instant::from_millis(20 * n), 1));
        assert_eq!(demand.per_window(), 10);
        demand.note(Instant::from_millis(260), 1);
        assert_eq!((demand.now, demand.per_window()), (1, 10), "the window before counts");
        demand.note(Instant::from_millis(520), 1);
        assert_eq!(demand.per_window(), 1);
        (0..30).for_each(|_| demand.note(Instant::from_millis(521), 1));
        demand.note(Instant::from_millis(1500), 1);
        assert_eq!(demand.per_window(), 1, "there was a pause");
    }

    #[test]
    fn destinations_are_bounded_and_quiet_ones_make_room() {
        let mut demands = Demands::default();
        let at = |n: usize| SocketAddr::new([10, 0, (n >> 8) as u8, n as u8].into(), 80);
        (0..DEMANDS_MAX + 5).for_each(|n| demands.note(Instant::ZERO, at(n), 1));
        assert_eq!(demands.by_destination.len(), DEMANDS_MAX);
        let later = Instant::ZERO + 2 * REST;
        demands.note(later, at(3), 1);
        demands.note(later, at(DEMANDS_MAX), 1);
        assert_eq!(demands.by_destination.keys().copied().collect::<Vec<_>>(), [at(3), at(DEMANDS_MAX)]);
    }
}
