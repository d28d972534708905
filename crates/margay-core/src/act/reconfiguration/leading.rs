//! The left anchor: the host of the session's client, which has the session's lock.

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::net::SocketAddr;
use core::time::Duration;

use margay_wire::{CutRepr, FlowId, ReconfigurationRepr, ReconfigurationStep, SessionId, SpliceRepr};

use super::cut::{Cut, Scales};
use super::duration::{Times, Took};
use super::gate::ORDER_WAIT;
use super::parting::STUCK;
use super::refusal::refusal_text;
use super::vouching::Vouched;
use super::{
    Beside, Edit, EditError, FENCE_WAIT, PATIENCE, REMEMBERED, ReconfigurationOutcome, ReconfigurationRefused,
    Reconfigured, SessionBoxes, TCP, Ways, bare,
};
use crate::act::chain::NewWay;
use crate::act::setup::Start;
use crate::act::stack_change::{Sends, number_after};
use crate::association::auth::Verified;
use crate::cache::entry::Directions;
use crate::machine::sal::Sal;
use crate::resolve::instance::{Pin, sticky};
use crate::resolve::named::way_to_anchor;
use crate::resolve::way::Sender;
use crate::session::event::Event;
use crate::session::flow::{Flow, Marks};
use crate::session::{Act, Holder, LockGuardId};
use crate::table::Resolution;
use crate::types::drop_reason::DropReason;
use crate::types::fair_table::Peer;
use crate::types::key::HostId;
use crate::types::name::ServiceId;
use crate::types::role::Role;
use crate::types::state::Machine;
use crate::types::time::Instant;

/// Longer than a reconfiguration takes, whatever is lost of it.
const LEASE: Duration = crate::session::LEASE_MAX;
/// The old way is there for so long after both ends send by the new one: boxes may have something of it still. What of
/// a connection is lost with it is sent again.
const LINGER_TCP: Duration = Duration::from_millis(100);
const LINGER_UDP: Duration = Duration::from_secs(2);
/// For so long a word is waited for that changes nothing more.
const CLOSING: Duration = Duration::from_secs(3);
/// While two ways are in use the right anchor is told of it so often, and so often if it has not heard.
const TELL_EVERY: Duration = Duration::from_secs(1);
const TELL_AGAIN: Duration = Duration::from_millis(200);

const NOBODY_KNOWS_ANCHOR: &str = "no association and no router of this host knows where the other end's host is";
const UNANSWERED: &str = "the server's agent has not answered in time, or is of a version that cannot change sessions";

/// How far the left anchor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeadingState {
    /// The right anchor is asked whether it agrees.
    Asking,
    /// The new way is being set up.
    SettingUp,
    /// It stands at this end; the right anchor is to say that it sends by it.
    Confirming,
    /// A program leaves: both ways are in use, each end's data by their numbers.
    TwoWays,
    /// Both send by it. The right anchor's last word by the old way has not come.
    Turned,
    /// The right anchor is told that the old way is needed no more.
    Finishing,
    /// The session goes by the new way. What boxes still have of the old one is taken.
    Lingering,
    /// The old way is taken down.
    Leaving,
    /// The session goes by the old way, and the right anchor is told so.
    Canceling,
    /// It is over.
    Over,
}

/// What the left anchor hears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeadingEvent {
    /// The right anchor agrees.
    Answered,
    /// It does not.
    Refused,
    /// The new way is set up.
    SetUp,
    /// The right anchor sends by the new way.
    Done,
    /// It sends new data by the new way, and so does this end.
    Parted,
    /// The last of the old way has come.
    Fenced,
    /// The right anchor has heard that the old way is needed no more.
    Finished,
    /// The new way does not come to stand, or is no more.
    Failed,
    /// The old way is no more.
    OldGone,
    /// The right anchor sends by the old way.
    Canceled,
    /// Nothing of the kind has come for as long as the state lasts.
    TimeOut,
    /// The same of what is asked for a program, whose host waits for an outcome, too.
    Unanswered,
}

/// The declared life of a reconfiguration at its left anchor.
pub const LEADING: Machine<LeadingState, LeadingEvent> = {
    use LeadingEvent::{
        Answered, Canceled, Done, Failed, Fenced, Finished, OldGone, Parted, Refused, SetUp, TimeOut, Unanswered,
    };
    use LeadingState::{
        Asking, Canceling, Confirming, Finishing, Leaving, Lingering, Over, SettingUp, Turned, TwoWays,
    };
    Machine {
        name: "reconfiguration at the left anchor",
        states: &[Asking, SettingUp, Confirming, TwoWays, Turned, Finishing, Lingering, Leaving, Canceling, Over],
        events: &[
            Answered, Refused, SetUp, Done, Parted, Fenced, Finished, Failed, OldGone, Canceled, TimeOut, Unanswered,
        ],
        transitions: &[
            (Asking, Answered, SettingUp),
            (Asking, Refused, Over),
            (Asking, Failed, Over),
            (Asking, TimeOut, Over),
            (Asking, Unanswered, Canceling),
            (SettingUp, SetUp, Confirming),
            (SettingUp, Failed, Canceling),
            (SettingUp, TimeOut, Canceling),
            (Confirming, Done, Turned),
            (Confirming, Parted, TwoWays),
            (Confirming, Failed, Canceling),
            (Confirming, TimeOut, Canceling),
            (TwoWays, Finished, Lingering),
            (TwoWays, Failed, Over),
            (TwoWays, TimeOut, Over),
            (Turned, Fenced, Finishing),
            (Turned, Failed, Canceling),
            (Turned, OldGone, Finishing),
            (Turned, TimeOut, Finishing),
            (Finishing, Finished, Lingering),
            (Finishing, Failed, Canceling),
            (Finishing, TimeOut, Lingering),
            (Lingering, OldGone, Over),
            (Lingering, TimeOut, Leaving),
            (Leaving, OldGone, Over),
            (Leaving, TimeOut, Over),
            (Canceling, Canceled, Over),
            (Canceling, TimeOut, Over),
        ],
    }
};

/// What is wanted of a session.
#[derive(Clone, Debug)]
pub(super) struct Wish {
    /// The number of the order; `None`: nobody here has ordered it.
    pub order: Option<u64>,
    pub edit: Edit,
    /// The boxes that it shall have between its two ends, in order.
    pub boxes: Vec<ServiceId>,
    /// Who has asked for it.
    pub by: Peer,
}

/// Of the client's program, whose other end the one that leaves has told.
fn scales_of(splice: &SpliceRepr) -> Scales {
    Scales { told: splice.left.own_scale, own: Some(splice.left.peer_scale) }
}

/// A reconfiguration that this host leads.
#[derive(Debug)]
pub(super) struct Leading {
    pub ways: Ways,
    pub state: LeadingState,
    wish: Wish,
    guard: LockGuardId,
    far_end: HostId,
    /// Where the right anchor hears SAL.
    address: SocketAddr,
    sends: Sends,
    times: Times,
    until: Instant,
    /// Why it comes to nothing, where that is known.
    why: String,
    /// Nothing more is awaited by the old way; the right anchor is told so.
    is_finishing: bool,
    /// What the program at the other end stands between, where that is to leave.
    splice: Option<SpliceRepr>,
    /// The port of the service that it has connected to, where boxes are to see the session.
    port: Option<u16>,
}

impl Leading {
    pub fn due(&self) -> Instant {
        let parting = self.ways.parting.as_ref().and_then(|parting| parting.due());
        let held = self.ways.held_until.into_iter().chain(self.ways.gate_due());
        let next = self.sends.next.into_iter().chain(held).chain(parting).min();
        next.map_or(self.until, |next| next.min(self.until))
    }

    /// Whether a program leaves by it.
    const fn is_of_program(&self) -> bool {
        matches!(self.wish.edit, Edit::Leave { .. })
    }

    pub const fn may_turn_back(&self) -> bool {
        matches!(self.state, LeadingState::Turned | LeadingState::Finishing)
    }
}

impl Sal {
    /// Takes the lock, and asks the right anchor.
    pub(super) fn begin_leading(
        &mut self,
        now: Instant,
        id: FlowId,
        wish: Wish,
        splice: Option<(SpliceRepr, Option<u16>)>,
    ) -> Result<(), ReconfigurationRefused> {
        let (splice, port) = splice.map_or((None, None), |(splice, port)| (Some(splice), port));
        let far_end = match splice {
            None => self.may_go_another_way(id, Role::Initiator)?,
            Some(splice) => {
                self.may_leave_way(id, Role::Initiator)?;
                HostId(splice.host)
            }
        };
        if far_end == self.config.host_id() {
            return Err(ReconfigurationRefused::SameHost);
        }
        let limit = self.config.limits.flows;
        if self.flows.len() >= limit {
            return Err(ReconfigurationRefused::TooManyFlows { limit });
        }
        self.reconfigurations.leading.check(wish.by).map_err(ReconfigurationRefused::Full)?;
        let session = self.flows.get(id).map(|flow| flow.session).ok_or(ReconfigurationRefused::UnknownFlow(id))?;
        let holder = Holder { host: self.config.host_id(), act: Act::Chain };
        let guard = self.locks.acquire(wish.by, session, holder, now, LEASE).map_err(ReconfigurationRefused::Busy)?;
        let number = number_after(self.reconfigurations.last_number, now);
        self.reconfigurations.last_number = number;
        let by = wish.by;
        let leading = Leading {
            ways: Ways::of(id, number),
            state: LeadingState::Asking,
            wish,
            guard,
            far_end,
            address: super::nowhere(),
            sends: Sends::starting(now),
            times: Times::begun(now),
            until: now + PATIENCE,
            why: String::new(),
            is_finishing: false,
            splice,
            port,
        };
        self.reconfigurations.leading.insert(by, session, leading).map_err(ReconfigurationRefused::Full)?;
        self.leaders_due(now);
        Ok(())
    }

    /// The program at the other end of a session leaves. The session is to go on with the host that it names.
    pub(super) fn begin_leaving(
        &mut self,
        now: Instant,
        id: FlowId,
        splice: SpliceRepr,
        vouched: Vouched,
    ) -> Result<(), ReconfigurationRefused> {
        let flow = self.flows.get(id).ok_or(ReconfigurationRefused::UnknownFlow(id))?;
        if self.reconfigurations.leading.contains_key(&flow.session) {
            return Err(ReconfigurationRefused::UnderWay);
        }
        let Vouched { boxes, port } = vouched;
        let known = SessionBoxes::of(flow);
        if known.begun_by.is_some() {
            return Err(ReconfigurationRefused::BehindProxy);
        }
        if let Some(missing) = known.between.into_iter().find(|one| !boxes.contains(one)) {
            // Boxes that are before the program are not its to leave out.
            return Err(ReconfigurationRefused::Edit(EditError::Absent(missing)));
        }
        let edit = Edit::Leave { service: flow.service };
        let by = flow.peer_of(&self.associations, flow.far_end(&self.associations));
        self.begin_leading(now, id, Wish { order: None, edit, boxes, by }, Some((splice, port)))
    }

    /// An agent that has started again goes on with a session that has two ways.
    pub(super) fn resume_leading(&mut self, now: Instant, ways: Ways, far_end: HostId) {
        let Some(flow) = self.flows.get(ways.old) else { return };
        let session = flow.session;
        let edit = Edit::Leave { service: flow.service };
        let holder = Holder { host: self.config.host_id(), act: Act::Chain };
        // Nobody else has asked since the start.
        let Ok(guard) = self.locks.acquire(Peer::Own, session, holder, now, LEASE) else { return };
        let leading = Leading {
            ways,
            state: LeadingState::TwoWays,
            wish: Wish { order: None, edit, boxes: Vec::new(), by: Peer::Own },
            guard,
            far_end,
            address: super::nowhere(),
            sends: Sends::starting(now),
            times: Times::begun(now),
            until: now + STUCK,
            why: String::new(),
            is_finishing: false,
            splice: None,
            port: None,
        };
        // What this host has begun is never refused.
        let _ = self.reconfigurations.leading.insert(Peer::Own, session, leading);
    }

    /// Something has passed by one of the two ways of a session whose program leaves.
    pub(super) fn leader_parted(&mut self, now: Instant, session: SessionId, has_moved: bool) {
        let Some(leading) = self.reconfigurations.leading.get_mut(&session) else { return };
        let Some(parting) = leading.ways.parting.as_deref() else { return };
        let is_over = parting.is_over();
        match leading.state {
            LeadingState::Confirming if parting.cut.has_peer() => self.leader_turns(now, session),
            LeadingState::TwoWays => {
                if has_moved {
                    leading.until = now + STUCK;
                }
                if is_over && !core::mem::replace(&mut leading.is_finishing, true) {
                    leading.sends.next = Some(now);
                    leading.until = now + STUCK;
                    self.leaders_due(now);
                }
            }
            _ => {}
        }
    }

    /// The right anchor has turned at its cut: so does this end, as soon as its program has shown what it has sent.
    pub(super) fn leader_turns(&mut self, now: Instant, session: SessionId) {
        let has_heard = self.reconfigurations.leading.get(&session).and_then(|one| one.ways.parting.as_deref());
        if has_heard.is_some_and(|parting| parting.cut.has_peer()) && self.turn_at_cut(now, session, Role::Initiator) {
            self.leader_event(now, session, LeadingEvent::Parted, "");
        }
    }

    /// The right anchor says where its cut is.
    fn leader_hears_cut(&mut self, now: Instant, session: SessionId, cut: Option<CutRepr>) {
        let Some(cut) = cut else { return };
        self.hear_cut(now, session, Role::Initiator, cut);
        let Some(leading) = self.reconfigurations.leading.get_mut(&session) else { return };
        match leading.state {
            LeadingState::Confirming => self.leader_turns(now, session),
            // It lives, and its own side moves or is over: nothing more is awaited here.
            LeadingState::TwoWays if leading.is_finishing => leading.until = now + STUCK,
            _ => {}
        }
    }

    /// What the right anchor says.
    pub(super) fn leader_hears(
        &mut self,
        now: Instant,
        id: FlowId,
        message: &Verified<'_>,
        said: ReconfigurationRepr,
    ) -> Result<(), DropReason> {
        use ReconfigurationStep as Step;
        if said.step == Step::Wish {
            let is_order = message.order().is_some();
            return if is_order {
                self.hear_order(now, id, message, said)
            } else {
                self.wished(now, id, message, said)
            };
        }
        let session = self.flows.get(id).map(|flow| flow.session).ok_or(DropReason::UnknownFlow)?;
        let known = self.reconfigurations.leading.get_mut(&session).filter(|one| one.ways.has(id));
        let Some(leading) = known.filter(|one| one.ways.number == said.number) else {
            return self.hear_of_forgotten(id, said);
        };
        let is_old = leading.ways.old == id;
        match said.step {
            Step::Answer if is_old => {
                leading.address = said.address;
                self.leader_event(now, session, LeadingEvent::Answered, "");
            }
            Step::Refuse if is_old => {
                let code = message.error().map_or(margay_wire::ErrorCode::Refused, |error| error.code);
                self.leader_event(now, session, LeadingEvent::Refused, refusal_text(code));
            }
            Step::Done if !is_old && leading.is_of_program() => self.leader_hears_cut(now, session, message.cut()),
            Step::Done if !is_old => self.leader_event(now, session, LeadingEvent::Done, ""),
            Step::Fence if is_old => {
                self.hear_fence(now, session, Role::Initiator);
                if self.reconfigurations.ways(session, Role::Initiator).is_some_and(|ways| ways.is_fenced) {
                    self.leader_event(now, session, LeadingEvent::Fenced, "");
                }
            }
            Step::Finished if !is_old => self.leader_event(now, session, LeadingEvent::Finished, ""),
            Step::Canceled if is_old => self.leader_event(now, session, LeadingEvent::Canceled, ""),
            Step::Left | Step::Leave => {
                if said.step == Step::Leave {
                    self.say_step(id, ReconfigurationStep::Left, said.number);
                }
                // Of the session's own way, the peer speaks of something that it has not got.
                if self.reconfigurations.ways(session, Role::Initiator).is_some_and(|ways| ways.of_program() != id) {
                    self.way_ends(now, id, crate::cache::entry::RemoveReason::PeerFailed);
                } else if !is_old {
                    self.leader_event(
                        now,
                        session,
                        LeadingEvent::Failed,
                        "the server's host has no such way of the session",
                    );
                }
            }
            _ => return Err(DropReason::Unexpected),
        }
        Ok(())
    }

    /// The right anchor speaks of a reconfiguration that this start of the agent knows nothing of. The session goes by
    /// the flow that it names.
    fn hear_of_forgotten(&mut self, id: FlowId, said: ReconfigurationRepr) -> Result<(), DropReason> {
        let goes_by_it = self.flows.get(id).is_some_and(|flow| flow.directions == Directions::Both);
        match said.step {
            ReconfigurationStep::Done if goes_by_it => {
                self.say_step(id, ReconfigurationStep::Finish, said.number);
                Ok(())
            }
            _ => Err(DropReason::Stale),
        }
    }

    /// Something has happened to a reconfiguration. What is not listed changes nothing: words come twice, and late.
    /// `why`: for people, where it comes to nothing.
    pub(super) fn leader_event(&mut self, now: Instant, session: SessionId, event: LeadingEvent, why: &str) {
        let Some(leading) = self.reconfigurations.leading.get_mut(&session) else { return };
        let before = leading.state;
        let Ok(after) = LEADING.after(before, event) else { return };
        let has_old = self.flows.get(leading.ways.old).is_some_and(Flow::carries_data);
        if after == LeadingState::Canceling && leading.ways.has_turned && !has_old {
            // There is no other way any more.
            return;
        }
        let turns = before == LeadingState::Confirming && matches!(after, LeadingState::Turned | LeadingState::TwoWays);
        if turns && !self.locks.is_held_by(leading.guard, now) {
            // Whatever the lock protects may have changed.
            return self.leader_event(now, session, LeadingEvent::Failed, "the lock of the session was lost");
        }
        if before == LeadingState::TwoWays && after == LeadingState::Over {
            return self.lose_session(now, session, Role::Initiator);
        }
        leading.state = after;
        leading.sends.next = None;
        if leading.why.is_empty() {
            leading.why = why.to_string();
        }
        match after {
            LeadingState::SettingUp => self.set_new_way_up(now, session),
            LeadingState::Confirming => {
                leading.sends = Sends::starting(now);
                match leading.splice.map(|splice| scales_of(&splice)) {
                    Some(scales) => self.begin_parting(now, session, Role::Initiator, (scales, None)),
                    None => self.set_gate(now, session, Role::Initiator),
                }
            }
            LeadingState::TwoWays => {
                leading.times.turn(now);
                leading.until = now + STUCK;
                leading.sends.next = Some(now);
                self.take_what_waited(now, session, Role::Initiator, Cut::take_held);
                self.leader_parted(now, session, false);
            }
            LeadingState::Turned => {
                leading.times.turn(now);
                leading.until = now + FENCE_WAIT + if leading.ways.gate.is_some() { ORDER_WAIT } else { FENCE_WAIT };
                let is_fenced = leading.ways.is_fenced;
                self.turn_ways(now, session, Role::Initiator);
                if is_fenced {
                    self.leader_event(now, session, LeadingEvent::Fenced, "");
                }
            }
            LeadingState::Finishing => {
                leading.sends = Sends::starting(now);
                leading.until = now + CLOSING;
                self.open_gate(now, session, Role::Initiator);
                self.hear_fence(now, session, Role::Initiator);
            }
            LeadingState::Lingering => {
                self.end_parting(now, session, Role::Initiator);
                self.linger(now, session);
            }
            LeadingState::Leaving | LeadingState::Canceling => {
                leading.sends = Sends::starting(now);
                leading.until = now + CLOSING;
                if after == LeadingState::Canceling {
                    self.cancel(now, session);
                }
            }
            LeadingState::Over => self.finish_reconfiguration(now, session, before, event),
            LeadingState::Asking => {}
        }
        self.leaders_due(now);
    }

    fn finish_reconfiguration(&mut self, now: Instant, session: SessionId, before: LeadingState, event: LeadingEvent) {
        let Some(leading) = self.reconfigurations.leading.get(&session) else { return };
        let why = leading.why.clone();
        let outcome = match (before, event) {
            (LeadingState::Asking, LeadingEvent::Refused) => ReconfigurationOutcome::Refused(why),
            (LeadingState::Asking, _) if why.is_empty() => ReconfigurationOutcome::Failed(UNANSWERED.to_string()),
            (LeadingState::Asking | LeadingState::Canceling, _) => ReconfigurationOutcome::Failed(why),
            _ => ReconfigurationOutcome::Done,
        };
        let left = (before == LeadingState::Leaving).then_some(leading.ways.old);
        self.end_reconfiguration(now, session, outcome);
        left.into_iter().for_each(|old| self.forget_way(old));
    }

    /// The session goes by the new way.
    fn linger(&mut self, now: Instant, session: SessionId) {
        let Some(leading) = self.reconfigurations.leading.get_mut(&session) else { return };
        let Some(new) = leading.ways.new else { return };
        let old = leading.ways.old;
        let protocol = self.flows.get(new).map_or(TCP, |flow| flow.app.protocol);
        leading.until = now + if protocol == TCP { LINGER_TCP } else { LINGER_UDP };
        let wish = leading.wish.clone();
        let took = leading.times.took(now);
        self.settle_way(now, new);
        self.remember_reconfiguration(now, session, new, (wish, Some(took)), ReconfigurationOutcome::Done);
        if self.flows.get(old).is_none() {
            self.leader_event(now, session, LeadingEvent::OldGone, "");
        }
    }

    /// The session is as it was.
    fn cancel(&mut self, now: Instant, session: SessionId) {
        self.drop_gate(now, session, Role::Initiator);
        self.turn_ways_back(now, session, Role::Initiator);
        self.undo_parting(now, session, Role::Initiator);
        let Some(leading) = self.reconfigurations.leading.get_mut(&session) else { return };
        if leading.why.is_empty() {
            leading.why = "the new way of the session did not come to stand in time".to_string();
        }
        let number = leading.ways.number;
        if let Some(new) = leading.ways.new.take() {
            self.say_step(new, ReconfigurationStep::Leave, number);
            self.forget_way(new);
        }
    }

    /// The reconfiguration is over, and the lock is free.
    pub(super) fn end_reconfiguration(&mut self, now: Instant, session: SessionId, outcome: ReconfigurationOutcome) {
        let Some(leading) = self.reconfigurations.take_leading(session) else { return };
        // The lease may have ended by itself: then the lock is free already.
        let _ = self.locks.release(leading.guard, now);
        let id = leading.ways.of_program();
        let is_told = matches!(leading.state, LeadingState::Lingering | LeadingState::Leaving)
            || outcome == ReconfigurationOutcome::Done;
        if !is_told {
            let took = leading.times.took(now);
            self.remember_reconfiguration(now, session, id, (leading.wish, Some(took)), outcome);
        }
    }

    /// Remembers what has become of a reconfiguration, and tells of it. `id`: the flow that the session's program sends
    /// by, or has sent by.
    pub(super) fn remember_reconfiguration(
        &mut self,
        now: Instant,
        session: SessionId,
        id: FlowId,
        (wish, took): (Wish, Option<Took>),
        outcome: ReconfigurationOutcome,
    ) {
        let Wish { order, edit, boxes, .. } = wish;
        self.counters.reconfigurations[edit.number()][outcome.number()] += 1;
        if let Some(took) = took {
            self.counters.reconfiguration_durations[outcome.number()].note(took.to_end);
            took.to_turn.into_iter().for_each(|time| self.counters.reconfiguration_turns.note(time));
        }
        let by = self.tell_over(now, (session, id), order, &outcome);
        let change = Reconfigured { at: now, order, by, edit, boxes, outcome, took };
        // Who has ordered it hears of it although the flow is gone.
        if self.flows.get(id).is_some() {
            let history = self.reconfigurations.histories.entry(id).or_default();
            if history.len() == REMEMBERED {
                history.remove(0);
            }
            history.push(change.clone());
        }
        self.events.push(Event::Reconfigured { flow: id, session, change });
    }

    /// Sets the new way up, by a SYN that ends at the right anchor.
    fn set_new_way_up(&mut self, now: Instant, session: SessionId) {
        let Some(leading) = self.reconfigurations.leading.get(&session) else { return };
        let between = leading.wish.boxes.clone();
        let begin = ReconfigurationRepr {
            step: ReconfigurationStep::Begin,
            number: leading.ways.number,
            host: leading.far_end.0,
            address: leading.address,
        };
        let Some(old) = self.flows.get(leading.ways.old) else { return };
        let Flow { service, app, .. } = *old;
        // Where a program leaves, the proxy that it is stands in the way no more.
        let known = if leading.splice.is_none() { SessionBoxes::of(old) } else { SessionBoxes::default() };
        let SessionBoxes { begun_by, ends_at, .. } = known;
        let service = leading.splice.map_or(service, |splice| ServiceId(splice.service));
        let port = leading.port.unwrap_or(app.destination.port());
        let (is_sealed, source) = (old.is_sealed(), old.source.clone().filter(|_| old.is_of_named_socket()));
        let id = self.grants.fresh_flow_id(&self.flows, &mut self.rng);
        let mut flow = Flow::new(id, session, service, Role::Initiator, app, now);
        flow.source = source;
        flow.directions = Directions::Neither;
        // What is sealed is never given less.
        flow.marks |= Marks::LATER | if is_sealed { Marks::SECURE } else { Marks::empty() };
        flow.chain = self.chain_of_way(&NewWay {
            session,
            service,
            app,
            port,
            begun_by,
            between,
            ends_at,
            number: begin.number,
        });
        let nonce = self.rng.u64();
        let start = if flow.chain.as_ref().is_none_or(|chain| chain.ends_next()) {
            let Some(next_hop) = way_to_anchor(self, &begin, &flow) else {
                return self.leader_event(now, session, LeadingEvent::Failed, NOBODY_KNOWS_ANCHOR);
            };
            Start { pin: Some(Pin::Only), ..Start::of(nonce, next_hop, Vec::new(), Vec::new()) }
        } else {
            match self.pick(&flow.asked(), sticky(id, nonce), app.protocol, port, Sender::Own) {
                Resolution::Forward(rule, hop) => {
                    let address = hop.address;
                    let beside = self.note_own(rule);
                    Start::of(nonce, address, beside, Vec::new())
                }
                Resolution::Demux(..) | Resolution::Box(..) => {
                    Start::of(nonce, self.loopback(), Vec::new(), Vec::new())
                }
                Resolution::Delay(..) | Resolution::Drop(_) | Resolution::None => {
                    return self.leader_event(now, session, LeadingEvent::Failed, "nobody serves the box");
                }
            }
        };
        if let Some(leading) = self.reconfigurations.leading.get_mut(&session) {
            leading.ways.new = Some(id);
        }
        self.start_setup(now, flow, Start { begin: Some(begin), ..start });
    }

    /// The new way was answered for, and its end is proved.
    pub(crate) fn way_answered(&mut self, now: Instant, id: FlowId) {
        self.forget_chain_setup(id);
        let Some(flow) = self.flows.get(id) else { return };
        let session = flow.session;
        let is_sealed = flow.is_sealed();
        if !is_sealed {
            self.keep_encapsulated(now, id);
        }
        let Some(leading) = self.reconfigurations.leading.get(&session) else {
            // It was given up meanwhile.
            return self.forget_way(id);
        };
        let is_wanted = self.flows.get(leading.ways.old).is_some_and(Flow::is_sealed);
        if is_wanted && !is_sealed {
            return self.leader_event(
                now,
                session,
                LeadingEvent::Failed,
                "the new way cannot be sealed as the old one is",
            );
        }
        self.leader_event(now, session, LeadingEvent::SetUp, "");
    }

    /// The new way was not set up.
    pub(crate) fn way_not_set_up(&mut self, now: Instant, session: SessionId, why: &str) {
        if let Some(leading) = self.reconfigurations.leading.get_mut(&session) {
            leading.ways.new = None;
            self.leader_event(now, session, LeadingEvent::Failed, why);
        }
    }

    /// Tells the right anchor where this end's cut is, and when nothing more is awaited by the old way.
    fn say_two_ways(&mut self, now: Instant, session: SessionId) {
        let Some(leading) = self.reconfigurations.leading.get_mut(&session) else { return };
        if leading.sends.next.is_none_or(|next| next > now) {
            return;
        }
        // The session is two ways' for as long as bytes move; a lease that has ended is anybody's.
        let _ = self.locks.renew(leading.guard, now, LEASE);
        let is_finishing = leading.is_finishing;
        let is_heard = leading.ways.parting.as_ref().is_some_and(|parting| parting.is_heard);
        leading.sends.next = Some(now + if is_heard && !is_finishing { TELL_EVERY } else { TELL_AGAIN });
        if !is_heard || is_finishing {
            self.tell_new_way(now, session, Role::Initiator);
        }
        let step = if is_finishing && is_heard { ReconfigurationStep::Finish } else { ReconfigurationStep::Confirm };
        self.say_cut(session, Role::Initiator, step);
    }

    /// Says again what has not been answered, and ends what has waited for too long.
    pub(super) fn leaders_due(&mut self, now: Instant) {
        let due = self.reconfigurations.leading.iter().filter(|(_, one)| one.due() <= now);
        let due: Vec<SessionId> = due.map(|(session, _)| *session).collect();
        for session in due {
            self.give_up_holding(now, session, Role::Initiator);
            self.ask_for_numbers_due(now, session, Role::Initiator);
            let Some(leading) = self.reconfigurations.leading.get_mut(&session) else { continue };
            if leading.until <= now {
                match leading.state {
                    LeadingState::Asking if leading.is_of_program() => {
                        self.leader_event(now, session, LeadingEvent::Unanswered, UNANSWERED);
                    }
                    _ => self.leader_event(now, session, LeadingEvent::TimeOut, ""),
                }
                continue;
            }
            if leading.state == LeadingState::TwoWays {
                self.say_two_ways(now, session);
                continue;
            }
            if !leading.sends.take(now) {
                continue;
            }
            let splice = leading.splice;
            let number = leading.ways.number;
            let old = leading.ways.old;
            let new = leading.ways.new;
            let (id, step) = match leading.state {
                LeadingState::Asking if let Some(splice) = splice => {
                    let beside = Beside { splice: Some(splice), ..Beside::default() };
                    self.say_beside(old, bare(ReconfigurationStep::Request, number), &beside);
                    continue;
                }
                LeadingState::Asking => (Some(old), ReconfigurationStep::Request),
                LeadingState::Confirming => (new, ReconfigurationStep::Confirm),
                LeadingState::Finishing => (new, ReconfigurationStep::Finish),
                LeadingState::Leaving => (Some(old), ReconfigurationStep::Leave),
                LeadingState::Canceling => (Some(old), ReconfigurationStep::Cancel),
                _ => continue,
            };
            id.into_iter().for_each(|id| self.say_step(id, step, number));
        }
    }
}
