//! The host that gives an order: of the session's server, or of a box.

use alloc::collections::BTreeMap;
use alloc::string::ToString;
use alloc::vec::Vec;
use core::time::Duration;

use margay_wire::{FlowId, OrderRepr, OrderState, ReconfigurationRepr, ReconfigurationStep, SessionId};

use super::{Beside, Edit, ReconfigurationRefused, Word, edit_of, parts_of, reason, step_of};
use crate::act::reconfiguration::leading::Wish;
use crate::act::reconfiguration::orders::OF_SESSION_MAX;
use crate::act::reconfiguration::{ReconfigurationOutcome, SessionBoxes};
use crate::act::stack_change::number_after;
use crate::association::auth::Verified;
use crate::machine::sal::Sal;
use crate::session::flow::{Flow, FlowTable, Marks};
use crate::types::drop_reason::DropReason;
use crate::types::fair_table::Peer;
use crate::types::name::ServiceId;
use crate::types::role::Role;
use crate::types::state::Machine;
use crate::types::time::Instant;

/// Who hears nothing of the client's host for so long gives up.
const PATIENCE: Duration = Duration::from_secs(8);
/// A wish that is not answered is said again after so long, and then each time after twice as long.
const AGAIN_FIRST: Duration = Duration::from_millis(150);
const AGAIN_MAX: Duration = Duration::from_secs(1);
/// What has become of an order that was taken is asked so often.
const ASK_EVERY: Duration = Duration::from_millis(500);

const UNANSWERED: &str = "the client's host has not answered; its agent, or that of a box before this host, cannot be \
                          reached or is of a version that takes no orders of other hosts";
const UNKNOWN: &str = "nothing is heard of the client's host any more, which may still carry the order out; `margay \
                       chain show` shows whether it has";
const RESTARTED: &str = "the agent of the client's host has started again meanwhile; `margay chain show` shows whether \
                         the order was carried out before";
const LEFT: &str = "the session does not go through the box of this host any more";

/// How far an order is at the host that gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OrderingState {
    /// The client's host is to say what is to be signed.
    Knocking,
    /// It was wished for with that.
    Signed,
    /// The client's host has taken it.
    Waiting,
    /// What has become of it is known, or nobody will say.
    Over,
}

/// What the host that gives an order hears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OrderingEvent {
    /// What is to be signed.
    ToSign,
    /// The same of a later start of the agent than before.
    Restarted,
    /// The order waits, or is being carried out.
    Taken,
    /// What has become of it.
    Told,
    /// Nothing has come for too long.
    TimeOut,
    /// The session is over, or does not come here any more.
    Gone,
}

/// The declared life of an order at the host that gives it.
pub const ORDERING: Machine<OrderingState, OrderingEvent> = {
    use OrderingEvent::{Gone, Restarted, Taken, TimeOut, ToSign, Told};
    use OrderingState::{Knocking, Over, Signed, Waiting};
    Machine {
        name: "order at the host that gives it",
        states: &[Knocking, Signed, Waiting, Over],
        events: &[ToSign, Restarted, Taken, Told, TimeOut, Gone],
        transitions: &[
            (Knocking, ToSign, Signed),
            (Knocking, Told, Over),
            (Knocking, TimeOut, Over),
            (Knocking, Gone, Over),
            (Signed, ToSign, Signed),
            (Signed, Restarted, Over),
            (Signed, Taken, Waiting),
            (Signed, Told, Over),
            (Signed, TimeOut, Over),
            (Signed, Gone, Over),
            (Waiting, Restarted, Over),
            (Waiting, Taken, Waiting),
            (Waiting, Told, Over),
            (Waiting, TimeOut, Over),
            (Waiting, Gone, Over),
        ],
    }
};

/// An order that was given here.
#[derive(Debug)]
struct Giving {
    order: u64,
    session: SessionId,
    /// The flow of the session here that it was last said by.
    flow: FlowId,
    edit: Edit,
    /// As the host of which box; `None`: as the server's.
    as_box: Option<ServiceId>,
    /// The boxes that the session is to have then, as far as this host knows.
    boxes: Vec<ServiceId>,
    state: OrderingState,
    /// What is to be signed: the start of the client's agent, and when it has said so.
    signs: (u64, u32),
    /// When the client's host has last said something, by its clock.
    heard_ms: Option<u32>,
    tries: u32,
    next: Instant,
    until: Instant,
    /// At a box: the session has gone over to another way.
    has_left: bool,
}

impl Giving {
    fn wait(&self) -> Duration {
        match self.state {
            OrderingState::Waiting => ASK_EVERY,
            _ => AGAIN_FIRST.saturating_mul(1 << self.tries.min(8)).min(AGAIN_MAX),
        }
    }
}

/// The orders that were given here, by their numbers on the wire.
#[derive(Debug, Default)]
pub(in crate::act::reconfiguration) struct Givings(BTreeMap<u32, Giving>);

impl Givings {
    /// When something is due.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.0.values().map(|one| one.next.min(one.until)).min()
    }

    /// At a box's host: the session goes another way than by this half.
    pub fn note_left(&mut self, half: FlowId) {
        self.0.values_mut().filter(|one| one.flow == half).for_each(|one| one.has_left = true);
    }
}

impl FlowTable {
    /// The box of this host that lets it order a change of a session through `boxes`.
    fn box_here(
        &self,
        session: SessionId,
        edit: &Edit,
        known: &SessionBoxes,
    ) -> Result<ServiceId, ReconfigurationRefused> {
        let chained = self.of_session(session).filter_map(|flow| flow.chain.as_deref());
        let mut own = chained.filter(|chained| chained.is_left()).map(|chained| chained.asked);
        let refused = ReconfigurationRefused::NotItsBox;
        let first = own.next().ok_or(refused)?;
        let check = |one: ServiceId| edit.check_host_of(&[one], known).map(|()| one);
        check(first).or_else(|refused| own.find_map(|one| check(one).ok()).ok_or(refused))
    }

    /// The flow by which this host, that of the server or of a box, speaks to the session's client: `last`, unless that
    /// is of no use any more.
    fn to_client(&self, session: SessionId, last: FlowId) -> Option<&Flow> {
        let speaks = |flow: &&Flow| {
            let is_left = flow.chain.as_deref().is_some_and(|chained| chained.is_left());
            let is_end = flow.role == Role::Responder && !flow.is_at_box() && flow.directions.has_egress();
            (is_left || is_end) && flow.carries_data() && !flow.has(Marks::LEAVING)
        };
        self.get(last).filter(speaks).or_else(|| self.of_session(session).find(speaks))
    }
}

impl Sal {
    /// Orders a change of a session that is served here, or that passes a box of this host, at the client's host.
    pub(in crate::act::reconfiguration) fn give_order(
        &mut self,
        now: Instant,
        id: FlowId,
        edit: Edit,
    ) -> Result<u64, ReconfigurationRefused> {
        let asked = self.flows.get(id).ok_or(ReconfigurationRefused::UnknownFlow(id))?;
        let session = asked.session;
        let mut boxes = SessionBoxes::of(asked);
        let mut as_box = None;
        if asked.is_at_box() {
            let left = self.flows.to_client(session, id).ok_or(ReconfigurationRefused::NotOpen)?;
            left.far_end(&self.associations).ok_or(ReconfigurationRefused::UnknownEnd)?;
            let right = self.flows.other_half(left).and_then(|id| self.flows.get(id));
            // It knows those that were added later, too.
            boxes = SessionBoxes::of(right.ok_or(ReconfigurationRefused::NotOpen)?);
            as_box = Some(self.flows.box_here(session, &edit, &boxes)?);
        } else {
            self.may_go_another_way(id, Role::Responder)?;
        }
        edit.check_policy(&self.chains.policy)?;
        let known = &mut self.reconfigurations;
        // Never refused for what waits of other sessions.
        if known.givings.0.values().filter(|one| one.session == session).count() >= OF_SESSION_MAX {
            return Err(ReconfigurationRefused::UnderWay);
        }
        let number = number_after(known.last_number, now);
        known.last_number = number;
        let order = known.orders.fresh_number();
        let giving = Giving {
            order,
            session,
            flow: id,
            edit,
            as_box,
            boxes: edit.of(&boxes).unwrap_or_default(),
            state: OrderingState::Knocking,
            signs: (0, 0),
            heard_ms: None,
            tries: 0,
            next: now,
            until: now + PATIENCE,
            has_left: false,
        };
        known.givings.0.insert(number, giving);
        self.givings_due(now);
        Ok(order)
    }

    /// Says again what has not been answered, and ends what has waited for too long.
    pub(in crate::act::reconfiguration) fn givings_due(&mut self, now: Instant) {
        let due = self.reconfigurations.givings.0.iter().filter(|(_, one)| one.next.min(one.until) <= now);
        let due: Vec<u32> = due.map(|(number, _)| *number).collect();
        for number in due {
            let Some(giving) = self.reconfigurations.givings.0.get_mut(&number) else { continue };
            let Some(flow) = self.flows.to_client(giving.session, giving.flow) else {
                let takes_out = matches!(giving.edit, Edit::Remove { .. });
                let outcome = match giving.has_left {
                    true if takes_out && giving.state == OrderingState::Waiting => ReconfigurationOutcome::Done,
                    true => ReconfigurationOutcome::Failed(LEFT.to_string()),
                    false => ReconfigurationOutcome::Ended,
                };
                self.ordering_event(now, number, OrderingEvent::Gone, Some(outcome));
                continue;
            };
            if giving.until <= now {
                let why = if giving.state == OrderingState::Knocking { UNANSWERED } else { UNKNOWN };
                let outcome = ReconfigurationOutcome::Failed(why.to_string());
                self.ordering_event(now, number, OrderingEvent::TimeOut, Some(outcome));
                continue;
            }
            giving.flow = flow.id;
            giving.next = now + giving.wait();
            giving.tries += 1;
            let (Some((act, service, other)), by) = (parts_of(&giving.edit), self.config.host_id()) else { continue };
            let id = flow.id;
            let (start, said_at_ms) = giving.signs;
            let order = OrderRepr {
                state: OrderState::Wished,
                act,
                session: giving.session,
                service,
                other,
                start,
                said_at_ms,
                host_key: [0; 32],
                signature: [0; 64],
            };
            let certificate = giving.as_box.map(|one| self.certificate_for(&one)).unwrap_or_default();
            let order = Word { number, by, code: 0, text: "" }.sign(&self.config.host_key, order);
            self.say_beside(id, step_of(ReconfigurationStep::Wish, number, by), &Beside::order(order, &certificate));
        }
    }

    /// The client's host says what becomes of an order that was given here.
    pub(in crate::act::reconfiguration) fn hear_told(
        &mut self,
        now: Instant,
        id: FlowId,
        message: &Verified<'_>,
        said: ReconfigurationRepr,
    ) -> Result<(), DropReason> {
        let order = message.order().ok_or(DropReason::Malformed)?;
        let by = self.config.host_id();
        let giving = self.reconfigurations.givings.0.get_mut(&said.number);
        let giving = giving.filter(|one| one.session == order.session && said.host == by.0).ok_or(DropReason::Stale)?;
        let (code, text) = message.error().map_or((0, ""), |error| (error.code.into(), error.text));
        let client = self.flows.get(id).and_then(|flow| flow.far_end(&self.associations));
        let word = Word { number: said.number, by, code, text };
        let is_its = |client| word.is_of(client, &order) && edit_of(&order) == Some(giving.edit);
        if !client.is_some_and(is_its) {
            return Err(DropReason::BadCertificate);
        }
        let has_signed = giving.state != OrderingState::Knocking;
        let is_news = giving.heard_ms.is_none_or(|last| order.said_at_ms.wrapping_sub(last).cast_signed() > 0);
        let restarted = || (OrderingEvent::Restarted, Some(ReconfigurationOutcome::Failed(RESTARTED.to_string())));
        let (event, outcome) = match order.state {
            OrderState::Wished => return Err(DropReason::Malformed),
            OrderState::ToSign if has_signed && giving.signs.0 != order.start => restarted(),
            // What comes late, or is shown again, keeps nobody waiting.
            OrderState::ToSign | OrderState::Taken if !is_news => return Err(DropReason::Stale),
            OrderState::ToSign => {
                giving.signs = (order.start, order.said_at_ms);
                (OrderingEvent::ToSign, None)
            }
            OrderState::Taken => (OrderingEvent::Taken, None),
            OrderState::Done => (OrderingEvent::Told, Some(ReconfigurationOutcome::Done)),
            OrderState::Refused => (OrderingEvent::Told, Some(ReconfigurationOutcome::Refused(reason(text)))),
            OrderState::Failed => (OrderingEvent::Told, Some(ReconfigurationOutcome::Failed(reason(text)))),
            OrderState::Ended => (OrderingEvent::Told, Some(ReconfigurationOutcome::Ended)),
        };
        giving.heard_ms = Some(order.said_at_ms);
        self.ordering_event(now, said.number, event, outcome);
        Ok(())
    }

    /// Something has happened to an order that was given here. What is not listed changes nothing. `outcome`: what has
    /// become of it, with an event that ends it.
    fn ordering_event(
        &mut self,
        now: Instant,
        number: u32,
        event: OrderingEvent,
        outcome: Option<ReconfigurationOutcome>,
    ) {
        let givings = &mut self.reconfigurations.givings.0;
        let Some(giving) = givings.get_mut(&number) else { return };
        let Ok(after) = ORDERING.after(giving.state, event) else { return };
        giving.state = after;
        if after != OrderingState::Over {
            giving.tries = 0;
            giving.next = if after == OrderingState::Signed { now } else { now + giving.wait() };
            if after == OrderingState::Waiting {
                giving.until = now + PATIENCE;
            }
            return;
        }
        let Some((giving, outcome)) = givings.remove(&number).zip(outcome) else { return };
        let Giving { order, edit, boxes, .. } = giving;
        let wish = Wish { order: Some(order), edit, boxes, by: Peer::Own };
        self.remember_reconfiguration(now, giving.session, giving.flow, (wish, None), outcome);
    }
}
