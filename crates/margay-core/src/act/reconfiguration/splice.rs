//! The host of a program that leaves (docs/decisions/0088): of its two connections one is made. The two sessions'
//! anchors find each other through it, by steps that it passes on from one flow to the other; it says what the numbers
//! of the two connections differ by, and vouches at each end for the other one.

use alloc::collections::BTreeMap;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::time::Duration;

use margay_wire::{Chain, ErrorCode, FlowId, ReconfigurationRepr, ReconfigurationStep, SpliceRepr, SpliceSocketRepr};

use super::refusal::refusal_text;
use super::vouching::{Said, Vouched};
use super::{Beside, EditError, PATIENCE, ReconfigurationRefused, TCP, bare};
use crate::act::chain::Chained;
use crate::act::stack_change::{Sends, number_after};
use crate::association::auth::Verified;
use crate::leg::delta::{SocketFacts, SpliceFacts};
use crate::machine::sal::Sal;
use crate::session::event::Event;
use crate::session::flow::Flow;
use crate::session::{Act, Holder, LockError, LockGuardId};
use crate::types::drop_reason::DropReason;
use crate::types::fair_table::Peer;
use crate::types::role::Role;
use crate::types::time::Instant;

/// How often the lock of the right session is taken anew.
const RENEW: Duration = Duration::from_secs(10);
const LEASE: Duration = crate::session::LEASE_MAX;
/// Clocks of timestamps are said to be so much further than they are: no packet of the new way is to have an earlier
/// one than the last packet of the old way, whose way may have been shorter.
const CLOCK_AHEAD_MS: u32 = 1000;

/// Why a program cannot leave; nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpliceRefused {
    /// No such flow, or of the other role.
    #[error("flow {0} is not one that a program here has {1}; `margay flow list` shows those that there are")]
    UnknownFlow(FlowId, &'static str),
    /// It is leaving already.
    #[error("the two connections are being made one already")]
    UnderWay,
    /// One of the two sessions cannot go another way.
    #[error("{0}")]
    Refused(ReconfigurationRefused),
    /// All of it is on one host, or two thirds are.
    #[error("client, program and server must be on three hosts, and two of them are on one")]
    SameHost,
    /// No TCP.
    #[error("only TCP connections are made one")]
    NotTcp,
}

impl SpliceRefused {
    /// Whether the same may be taken up a moment later. A program has its connections before their sessions are
    /// confirmed by both hosts, and other acts have a session for a while.
    pub const fn is_for_now(self) -> bool {
        use ReconfigurationRefused::{Busy, Held, NotOpen, UnderWay};
        matches!(self, Self::Refused(NotOpen | Held | Busy(_) | UnderWay))
    }
}

/// What has become of a program's wish to leave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SpliceOutcome {
    /// The session goes on without it: both of its sockets are to be reset, and nothing that they still say goes out.
    Done,
    /// It goes on as before, and so does whoever relays.
    Failed(String),
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SpliceState {
    /// The left anchor has been asked, and has not answered.
    Wishing,
    /// The left anchor has taken up the wish, and leads the reconfiguration.
    Led,
}

/// Two connections that are being made one.
#[derive(Debug)]
struct Splice {
    right: FlowId,
    state: SpliceState,
    number: u32,
    facts: SpliceFacts,
    taken_at: Instant,
    guard: LockGuardId,
    sends: Sends,
    until: Instant,
}

/// Those of this host, by the left flow.
#[derive(Debug, Default)]
pub(super) struct Splices {
    by_left: BTreeMap<FlowId, Splice>,
    lefts: BTreeMap<FlowId, FlowId>,
}

impl Splices {
    pub fn next_deadline(&self) -> Option<Instant> {
        self.by_left.values().map(|one| one.sends.next.map_or(one.until, |next| next.min(one.until))).min()
    }

    /// The left and the right flow of the one that a flow is of.
    pub fn of(&self, id: FlowId) -> Option<(FlowId, FlowId)> {
        let left = self.lefts.get(&id).copied().unwrap_or(id);
        self.by_left.get(&left).map(|one| (left, one.right))
    }
}

fn socket(facts: &SocketFacts, elapsed_ms: u32) -> SpliceSocketRepr {
    SpliceSocketRepr {
        unread: facts.unread,
        written: facts.written,
        timestamp: facts.timestamp.map(|clock| clock.wrapping_add(elapsed_ms).wrapping_add(CLOCK_AHEAD_MS)),
        peer_scale: facts.peer_scale.min(14),
        own_scale: facts.own_scale.min(14),
        has_sack: facts.has_sack,
    }
}

/// What a message says of two connections.
pub(super) fn facts_of(said: &SpliceRepr) -> SpliceFacts {
    let socket = |one: &SpliceSocketRepr| SocketFacts {
        unread: one.unread,
        written: one.written,
        timestamp: one.timestamp,
        peer_scale: one.peer_scale,
        own_scale: one.own_scale,
        has_sack: one.has_sack,
    };
    SpliceFacts { left: socket(&said.left), right: socket(&said.right) }
}

/// The one session that two are to be.
fn vouched_of(accepted: &Flow, opened: &Flow) -> Vouched {
    let [left, right] =
        [accepted, opened].map(|flow| flow.chain.as_deref().map(Chained::boxes_between).unwrap_or_default());
    Vouched::of(left, right, opened.app.destination.port())
}

impl Sal {
    /// Whether [`splice`](Self::splice) would begin now, unless another act has the session.
    ///
    /// # Errors
    ///
    /// Why not; [`SpliceRefused::is_for_now`] says whether to ask again.
    pub fn may_splice(&self, left: FlowId, right: FlowId) -> Result<(), SpliceRefused> {
        let flow = |id: FlowId, role: Role, what: &'static str| {
            let found = self.flows.get(id).filter(|flow| flow.role == role && !flow.is_at_box());
            found.ok_or(SpliceRefused::UnknownFlow(id, what))
        };
        let accepted = flow(left, Role::Responder, "accepted")?;
        let opened = flow(right, Role::Initiator, "opened")?;
        if accepted.app.protocol != TCP || opened.app.protocol != TCP {
            return Err(SpliceRefused::NotTcp);
        }
        let session = opened.session;
        let is_between = self.reconfigurations.following.contains_key(&accepted.session)
            || self.reconfigurations.leading.contains_key(&session);
        if is_between {
            return Err(SpliceRefused::Refused(ReconfigurationRefused::UnderWay));
        }
        if [left, right].iter().any(|id| self.reconfigurations.splices.of(*id).is_some()) {
            return Err(SpliceRefused::UnderWay);
        }
        let client = self.may_leave_way(left, Role::Responder).map_err(SpliceRefused::Refused)?;
        let server = self.may_leave_way(right, Role::Initiator).map_err(SpliceRefused::Refused)?;
        if client == server {
            return Err(SpliceRefused::SameHost);
        }
        if vouched_of(accepted, opened).is_too_long() {
            return Err(SpliceRefused::Refused(ReconfigurationRefused::Edit(EditError::TooMany)));
        }
        Ok(())
    }

    /// A program relays between a connection that it has accepted and one that it has opened, and changes nothing: the
    /// two are made one, without it. What becomes of it comes as an event; until then the program, or whoever has its
    /// sockets, goes on relaying.
    ///
    /// # Errors
    ///
    /// Why not; nothing has changed.
    pub fn splice(
        &mut self,
        now: Instant,
        left: FlowId,
        right: FlowId,
        facts: SpliceFacts,
    ) -> Result<(), SpliceRefused> {
        self.now = now;
        self.may_splice(left, right)?;
        let session =
            self.flows.get(right).map(|flow| flow.session).ok_or(SpliceRefused::UnknownFlow(right, "opened"))?;
        let refused = SpliceRefused::Refused;
        let holder = Holder { host: self.config.host_id(), act: Act::Chain };
        let guard = self.locks.acquire(Peer::Own, session, holder, now, LEASE);
        let guard = guard.map_err(|busy: LockError| refused(ReconfigurationRefused::Busy(busy)))?;
        let number = number_after(self.reconfigurations.last_number, now);
        self.reconfigurations.last_number = number;
        let splice = Splice {
            right,
            state: SpliceState::Wishing,
            number,
            facts,
            taken_at: now,
            guard,
            sends: Sends::starting(now),
            until: now + PATIENCE,
        };
        self.reconfigurations.splices.by_left.insert(left, splice);
        self.reconfigurations.splices.lefts.insert(right, left);
        self.splices_due(now);
        Ok(())
    }

    /// Says a step that tells of the two connections, to the left end or to the right one: who is at the end that is
    /// not its own, and which boxes are between the two.
    fn say_spliced(&mut self, now: Instant, left: FlowId, to_left: bool, repr: ReconfigurationRepr) {
        let Some(splice) = self.reconfigurations.splices.by_left.get(&left) else { return };
        let right = splice.right;
        let Some((accepted, opened)) = self.flows.get(left).zip(self.flows.get(right)) else { return };
        let (id, own, other) = if to_left { (left, accepted, opened) } else { (right, opened, accepted) };
        let Some(host) = other.far_end(&self.associations) else { return };
        let elapsed_ms = now.since(splice.taken_at).as_millis() as u32;
        let said = SpliceRepr {
            host: host.0,
            session: accepted.session,
            service: opened.service.0,
            left: socket(&splice.facts.left, elapsed_ms),
            right: socket(&splice.facts.right, elapsed_ms),
        };
        let vouched = vouched_of(accepted, opened);
        let signed = Said { number: repr.number, to: own.session, splice: &said };
        let chain = signed.write(&self.config.host_key, &vouched);
        let beside = Beside {
            splice: Some(said),
            chain: chain.as_deref().and_then(|value| Chain::parse(value).ok()),
            session: vouched.session(accepted.session),
            ..Beside::default()
        };
        self.say_beside(id, repr, &beside);
    }

    /// Says again what has not been answered, and ends what has waited for too long.
    pub(super) fn splices_due(&mut self, now: Instant) {
        let is_due = |one: &Splice| one.until <= now || one.sends.next.is_some_and(|next| next <= now);
        let splices = self.reconfigurations.splices.by_left.iter();
        let due: Vec<FlowId> = splices.filter(|(_, one)| is_due(one)).map(|(left, _)| *left).collect();
        for left in due {
            let Some(splice) = self.reconfigurations.splices.by_left.get_mut(&left) else { continue };
            match splice.state {
                SpliceState::Wishing if splice.until <= now => {
                    let why = "the agent of the client's host has not answered in time, or is of a version that \
                               cannot have a program leave";
                    self.splice_over(left, SpliceOutcome::Failed(why.to_string()));
                }
                SpliceState::Wishing => {
                    let is_to_say = splice.sends.take(now);
                    let wish = bare(ReconfigurationStep::Wish, splice.number);
                    if is_to_say {
                        self.say_spliced(now, left, true, wish);
                    }
                }
                SpliceState::Led => {
                    splice.until = now + RENEW;
                    let wish = bare(ReconfigurationStep::Wish, splice.number);
                    // A lease that has ended lets others lock the session; what they do the steps refuse.
                    let _ = self.locks.renew(splice.guard, now, LEASE);
                    // The agents of both ends may have started again: who has forgotten the session says so.
                    self.say_spliced(now, left, true, wish);
                }
            }
        }
    }

    /// It is over, one way or the other.
    fn splice_over(&mut self, left: FlowId, outcome: SpliceOutcome) {
        let Some(splice) = self.reconfigurations.splices.by_left.remove(&left) else { return };
        self.reconfigurations.splices.lefts.remove(&splice.right);
        // The lease may have ended by itself: then the lock is free already.
        let _ = self.locks.release(splice.guard, self.now);
        let is_done = outcome == SpliceOutcome::Done;
        let counter = if is_done { &mut self.counters.splices_done } else { &mut self.counters.splices_failed };
        *counter += 1;
        self.events.push(Event::SpliceOver { left, right: splice.right, outcome });
    }

    /// One of the two flows is gone.
    pub(crate) fn splice_ends(&mut self, id: FlowId) {
        if let Some((left, _)) = self.reconfigurations.splices.of(id) {
            let why = "one of the two connections has ended meanwhile";
            self.splice_over(left, SpliceOutcome::Failed(why.to_string()));
        }
    }

    /// A step comes by one of the two flows, for the other one.
    pub(super) fn pass_spliced(
        &mut self,
        now: Instant,
        id: FlowId,
        message: &Verified<'_>,
        said: ReconfigurationRepr,
    ) -> Result<(), DropReason> {
        use ReconfigurationStep as Step;
        let (left, right) = self.reconfigurations.splices.of(id).ok_or(DropReason::UnknownFlow)?;
        let code = message.error().map(|error| error.code);
        let is_left = id == left;
        let Some(splice) = self.reconfigurations.splices.by_left.get_mut(&left) else {
            return Err(DropReason::UnknownFlow);
        };
        match said.step {
            Step::Request if is_left && message.splice().is_some() => {
                splice.state = SpliceState::Led;
                splice.sends.next = None;
                splice.until = now + RENEW;
                self.say_spliced(now, left, false, said);
            }
            // The client's operator orders something else at the same time.
            Step::Request if is_left => {
                let no = bare(Step::Refuse, said.number);
                self.say_step_repr(left, no, Some(ErrorCode::Overloaded));
            }
            Step::Refuse if is_left && splice.state == SpliceState::Wishing && said.number == splice.number => {
                let why = refusal_text(code.unwrap_or(ErrorCode::Refused)).replace("server's", "client's");
                self.splice_over(left, SpliceOutcome::Failed(why));
            }
            Step::Refuse if !is_left => {
                self.say_step_repr(left, said, code);
                let why = refusal_text(code.unwrap_or(ErrorCode::Refused));
                self.splice_over(left, SpliceOutcome::Failed(why.to_string()));
            }
            Step::Answer | Step::Canceled if !is_left => self.say_step_repr(left, said, code),
            Step::Cancel if is_left => {
                self.say_step_repr(right, said, code);
                let why = "the way without the program did not come to stand; the log of the client's host has more";
                self.splice_over(left, SpliceOutcome::Failed(why.to_string()));
            }
            // The client's host has no such flow any more, and says so when it is asked.
            Step::Leave | Step::Left if said.step == Step::Leave || is_left => {
                let other = if is_left { right } else { left };
                if said.step == Step::Leave {
                    self.say_step(id, ReconfigurationStep::Left, said.number);
                }
                let said = bare(Step::Leave, said.number);
                self.say_step_repr(other, said, code);
                self.splice_over(left, SpliceOutcome::Done);
                [left, right].into_iter().for_each(|half| self.forget_way(half));
            }
            _ => return Err(DropReason::Unexpected),
        }
        Ok(())
    }

    /// The left anchor is asked to have a session go on without the program at its other end.
    pub(super) fn wished(
        &mut self,
        now: Instant,
        id: FlowId,
        message: &Verified<'_>,
        said: ReconfigurationRepr,
    ) -> Result<(), DropReason> {
        // Without it, a box's host asks whether this flow is there.
        let splice = message.splice().ok_or(DropReason::Stale)?;
        let flow = self.flows.get(id).ok_or(DropReason::UnknownFlow)?;
        if splice.session != flow.session {
            return Err(DropReason::Malformed);
        }
        let asked = Said { number: said.number, to: flow.session, splice: &splice };
        let vouched = asked.read(message, flow.far_end_by_boxes(&self.associations))?;
        match self.begin_leaving(now, id, splice, vouched) {
            // It is asked again.
            Ok(()) | Err(ReconfigurationRefused::Busy(_) | ReconfigurationRefused::UnderWay) => {}
            Err(refused) => {
                let no = bare(ReconfigurationStep::Refuse, said.number);
                self.say_step_repr(id, no, Some(refused.code()));
            }
        }
        Ok(())
    }
}
