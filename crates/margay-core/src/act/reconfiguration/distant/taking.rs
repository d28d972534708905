//! The client's host, which takes orders of the hosts of the session's server and of its boxes, as if its own operator
//! had given them.

use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

use margay_wire::{ErrorCode, FlowId, OrderRepr, OrderState, ReconfigurationRepr, ReconfigurationStep, SessionId};

use super::{Beside, Edit, FRESH, ReconfigurationRefused, Word, edit_of, parts_of, reason, step_of};
use crate::act::chain::service_of;
use crate::act::reconfiguration::{ReconfigurationOutcome, SessionBoxes};
use crate::association::auth::Verified;
use crate::machine::sal::Sal;
use crate::session::event::Event;
use crate::types::drop_reason::DropReason;
use crate::types::fair_table::{FairTable, Peer};
use crate::types::key::{HostId, HostPublic};
use crate::types::name::ServiceId;
use crate::types::rate::RateLimit;
use crate::types::rng::Rng;
use crate::types::time::Instant;

/// Orders that are remembered: of one host and session, and of all.
const OF_SESSION_MAX: usize = 128;
const REMEMBERED_MAX: usize = 4096;
/// What has become of one is told to who asks for so long: longer than anybody asks.
const REMEMBERED_FOR: Duration = Duration::from_secs(10);
/// Signatures that are checked.
const CHECKED_PER_S: u32 = 1000;

/// Which host has given an order, where it is not this one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::act::reconfiguration) struct Asker {
    pub host: HostId,
    /// The boxes of the session that it serves, as far as it has shown; `None`: it is the server's.
    pub boxes: Option<Vec<ServiceId>>,
}

impl Asker {
    /// Whether it may have a session through these boxes changed so.
    pub fn check(&self, edit: &Edit, known: &SessionBoxes) -> Result<(), ReconfigurationRefused> {
        self.boxes.as_ref().map_or(Ok(()), |own| edit.check_host_of(own, known))
    }
}

/// The session that an order is about, the host that has given it, and that host's number.
type Key = (SessionId, HostId, u32);

/// An order of another host.
#[derive(Debug)]
pub(in crate::act::reconfiguration) struct Taking {
    edit: Edit,
    /// This host's; `None`: it was refused at once.
    order: Option<u64>,
    /// The flow that it was last asked about by.
    flow: FlowId,
    state: OrderState,
    /// Why not.
    why: String,
    /// Since when what has become of it is known.
    over_at: Option<Instant>,
}

/// What is told of an order.
struct Told {
    session: SessionId,
    by: HostId,
    number: u32,
    edit: Edit,
    state: OrderState,
    why: String,
}

impl Told {
    fn of((session, by, number): Key, taking: &Taking) -> Self {
        let Taking { edit, state, .. } = *taking;
        Self { session, by, number, edit, state, why: taking.why.clone() }
    }
}

/// The orders of other hosts, by the session that they are about.
#[derive(Debug)]
pub(in crate::act::reconfiguration) struct Takings {
    /// Which start of the agent this is: random; zero until somebody wants to know.
    start: u64,
    pub(in crate::act::reconfiguration) orders: FairTable<Key, Taking>,
    checks: RateLimit,
}

impl Default for Takings {
    fn default() -> Self {
        let orders = FairTable::new(REMEMBERED_MAX, 0);
        Self { start: 0, orders, checks: RateLimit::new(CHECKED_PER_S, Instant::ZERO) }
    }
}

impl Takings {
    /// When something is due.
    pub fn next_deadline(&self) -> Option<Instant> {
        let over = self.orders.values().filter_map(|one| one.over_at);
        over.min().map(|at| at + REMEMBERED_FOR)
    }

    /// Forgets what was over long ago.
    pub fn forget_due(&mut self, now: Instant) {
        self.orders.retain(|_, one| one.over_at.is_none_or(|at| at + REMEMBERED_FOR > now));
    }

    fn start(&mut self, rng: &mut Rng) -> u64 {
        while self.start == 0 {
            self.start = rng.u64();
        }
        self.start
    }

    /// One that is known; it was asked about by `flow`.
    fn known(&mut self, session: SessionId, by: HostId, number: u32, flow: FlowId) -> Option<&Taking> {
        let known = self.orders.get_mut(&(session, by, number))?;
        known.flow = flow;
        Some(known)
    }

    /// Whether a later order of its host has come before: it is late, or shown again.
    fn is_outdated(&self, session: SessionId, by: HostId, number: u32) -> bool {
        self.of_session(session, by).any(|known| number.wrapping_sub(known).cast_signed() < 0)
    }

    /// Makes room for another order of a session. What was over [`FRESH`] ago may be forgotten: who shows it again has
    /// to sign anew. False: there is nothing of the kind.
    fn make_room(&mut self, now: Instant, session: SessionId, by: HostId, peer: Peer) -> bool {
        let has_room = |all: &Self| all.of_session(session, by).count() < OF_SESSION_MAX && all.orders.has_room(peer);
        if !has_room(self) {
            self.orders.retain(|_, one| one.over_at.is_none_or(|at| at + FRESH > now));
        }
        has_room(self)
    }

    /// The numbers of a host's orders about a session.
    fn of_session(&self, session: SessionId, by: HostId) -> impl Iterator<Item = u32> {
        self.orders.range((session, by, 0)..=(session, by, u32::MAX)).map(|((.., number), _)| *number)
    }

    /// What has become of an order, where another host has given it. Gives that host.
    fn note_over(
        &mut self,
        now: Instant,
        session: SessionId,
        order: u64,
        outcome: &ReconfigurationOutcome,
    ) -> Option<(Key, &Taking)> {
        let of_order = |(key, one): &(&Key, &mut Taking)| key.0 == session && one.order == Some(order);
        let (key, taking) = self.orders.iter_mut().find(of_order)?;
        taking.state = match outcome {
            ReconfigurationOutcome::Done => OrderState::Done,
            ReconfigurationOutcome::Refused(_) => OrderState::Refused,
            ReconfigurationOutcome::Failed(_) => OrderState::Failed,
            ReconfigurationOutcome::Ended => OrderState::Ended,
        };
        if !matches!(outcome, ReconfigurationOutcome::Done | ReconfigurationOutcome::Ended) {
            taking.why = reason(outcome.text());
        }
        taking.over_at = Some(now);
        Some((*key, taking))
    }
}

impl Sal {
    /// Another host wishes that an order of its be carried out.
    pub(in crate::act::reconfiguration) fn hear_order(
        &mut self,
        now: Instant,
        id: FlowId,
        message: &Verified<'_>,
        said: ReconfigurationRepr,
    ) -> Result<(), DropReason> {
        let order = message.order().ok_or(DropReason::Malformed)?;
        let session = self.flows.get(id).map(|flow| flow.session).ok_or(DropReason::UnknownFlow)?;
        let edit = edit_of(&order).ok_or(DropReason::Malformed)?;
        if order.state != OrderState::Wished || order.session != session {
            return Err(DropReason::Malformed);
        }
        let by = HostId(said.host);
        let number = said.number;
        let takings = &mut self.reconfigurations.takings;
        if !takings.checks.take(now) {
            return Err(DropReason::RateLimited);
        }
        if !(Word { number, by, code: 0, text: "" }).is_of(by, &order) {
            return Err(DropReason::BadCertificate);
        }
        if let Some(known) = takings.known(session, by, number, id) {
            let told = Told::of((session, by, number), known);
            if known.edit != edit {
                return Err(DropReason::Stale);
            }
            self.tell_asker(now, id, &told);
            return Ok(());
        }
        if takings.is_outdated(session, by, number) {
            return Err(DropReason::Stale);
        }
        let start = takings.start(&mut self.rng);
        let of = Told { session, by, number, edit, state: OrderState::ToSign, why: String::new() };
        let asker = match self.asker_of(id, by, &order, message.certificate().unwrap_or_default()) {
            Ok(asker) => asker,
            // It is asked again by nobody who has anything to say here.
            Err(refused) => {
                self.tell_asker(
                    now,
                    id,
                    &Told { state: OrderState::Refused, why: reason(&refused.text(self.chain_policy())), ..of },
                );
                return Ok(());
            }
        };
        let age = clock_ms(now).wrapping_sub(order.said_at_ms);
        if order.start != start || u128::from(age) > FRESH.as_millis() {
            self.tell_asker(now, id, &of);
            return Ok(());
        }
        let peer = self.flows.get(id).map(|flow| flow.peer_of(&self.associations, Some(by)));
        let peer = peer.ok_or(DropReason::UnknownFlow)?;
        if self.reconfigurations.takings.make_room(now, session, by, peer) {
            self.take_order(now, id, (asker, peer), of);
        } else {
            let why = reason(&ReconfigurationRefused::UnderWay.text(self.chain_policy()));
            self.tell_asker(now, id, &Told { state: OrderState::Refused, why, ..of });
        }
        Ok(())
    }

    /// Has an order of another host carried out, and tells it so.
    fn take_order(&mut self, now: Instant, id: FlowId, (asker, peer): (Asker, Peer), of: Told) {
        let Told { session, by, number, edit, .. } = of;
        let named = edit.check_policy(&self.chains.policy);
        let taken = named.and_then(|()| self.reconfigure_for(now, id, edit, Some(asker)));
        let (state, why) = match &taken {
            Ok(_) => (OrderState::Taken, String::new()),
            Err(refused) => (OrderState::Refused, reason(&refused.text(self.chain_policy()))),
        };
        let over_at = taken.is_err().then_some(now);
        let key = (session, by, number);
        let taking = Taking { edit, order: taken.ok(), flow: id, state, why, over_at };
        let told = Told::of(key, &taking);
        // There is room: it was made.
        let _ = self.reconfigurations.takings.orders.insert(peer, key, taking);
        self.events.push(Event::Ordered { flow: id, session, by, edit, refused: told.why.clone() });
        if state == OrderState::Refused {
            self.counters.orders_of_others[ReconfigurationOutcome::Refused(String::new()).number()] += 1;
        }
        self.tell_asker(now, id, &told);
    }

    /// Who has signed an order: the host of the session's server, or that of boxes which it goes through.
    fn asker_of(
        &mut self,
        id: FlowId,
        by: HostId,
        order: &OrderRepr,
        certificate: &[u8],
    ) -> Result<Asker, ReconfigurationRefused> {
        let flow = self.flows.get(id).ok_or(ReconfigurationRefused::UnknownFlow(id))?;
        if flow.far_end(&self.associations) == Some(by) {
            return Ok(Asker { host: by, boxes: None });
        }
        let chained = flow.chain.as_deref().ok_or(ReconfigurationRefused::NotOfSession)?;
        let passed = chained.boxes.iter().filter(|one| one.flags.contains(margay_wire::BoxFlags::PASSED));
        let of_host = passed.zip(&chained.hosts).filter(|(_, host)| **host == by);
        let boxes: Vec<ServiceId> = of_host.map(|(one, _)| service_of(one)).collect();
        let key = HostPublic(order.host_key);
        let boxes: Vec<ServiceId> =
            boxes.into_iter().filter(|one| self.may_serve(one, &key, certificate).is_ok()).collect();
        if boxes.is_empty() {
            return Err(ReconfigurationRefused::NotOfSession);
        }
        Ok(Asker { host: by, boxes: Some(boxes) })
    }

    /// Tells the host that has given an order how that is.
    fn tell_asker(&mut self, now: Instant, id: FlowId, told: &Told) {
        let Some((act, service, other)) = parts_of(&told.edit) else { return };
        let order = OrderRepr {
            state: told.state,
            act,
            session: told.session,
            service,
            other,
            start: self.reconfigurations.takings.start(&mut self.rng),
            said_at_ms: clock_ms(now),
            host_key: [0; 32],
            signature: [0; 64],
        };
        let code = (!told.why.is_empty()).then_some(ErrorCode::Refused);
        let word = Word { number: told.number, by: told.by, code: code.map_or(0, u16::from), text: &told.why };
        let order = word.sign(&self.config.host_key, order);
        let beside = Beside { code, text: &told.why, ..Beside::order(order, &[]) };
        self.say_beside(id, step_of(ReconfigurationStep::Told, told.number, told.by), &beside);
    }

    /// An order is over. Where another host has given it, that one is told: by the flow `id`, and by the one that it
    /// has asked by, since what a box was taken out of goes by another way now. Gives that host.
    pub(in crate::act::reconfiguration) fn tell_over(
        &mut self,
        now: Instant,
        (session, id): (SessionId, FlowId),
        order: Option<u64>,
        outcome: &ReconfigurationOutcome,
    ) -> Option<HostId> {
        let (key, taking) = self.reconfigurations.takings.note_over(now, session, order?, outcome)?;
        let told = Told::of(key, taking);
        let asked_by = taking.flow;
        self.counters.orders_of_others[outcome.number()] += 1;
        self.tell_asker(now, id, &told);
        if asked_by != id {
            self.tell_asker(now, asked_by, &told);
        }
        Some(told.by)
    }
}

/// This host's clock as it is told to others: any that goes on will do.
const fn clock_ms(now: Instant) -> u32 {
    (now.micros() / 1000) as u32
}
