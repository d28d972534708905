//! How a live flow is carried becomes another: plain (encapsulated, and direct where that can be), sealed, or repaired
//! where the network loses something (DESIGN §12; docs/decisions/0073, 0081, 0085). The program notices nothing.
//!
//! The initiator *leads*, under the lock of the session, which is kept at its host: so no hand-over runs meanwhile. An
//! order at the responder's host goes to the initiator's as a proposal. Each direction turns by itself:
//!
//! ```text
//!   initiator                                      responder
//!   Asking ─────────── request ──────────────────▶ Ready: takes both, sends by the old one
//!          ◀────────── answer ────────────────────
//!   Turning ── last packet of the old stack, FENCE ▶
//!          ─────────── confirm ──────────────────▶ Turning
//!   Told   ◀────────── done ──────────────────────
//!   Over   ◀─ last packet of the old stack, FENCE ─
//! ```
//!
//! Whoever takes both gives on what is of the old stack until the FENCE, and only then what is of the new one: so
//! nothing is lost and nothing overtakes. Messages that are lost delay a change, and never stop data: before the
//! confirmation both send by the old stack, and after it both take the new one.
//!
//! A change is made by the peer's word alone: by a message, or by a sealed FENCE. What is of the new stack, or a plain
//! FENCE, anybody may forge, or may have kept from an earlier change.
//!
//! An end that demands a sealed flow agrees to nothing less, and asks for nothing less. Two ends that have come to
//! think different things of a flow (an agent started again in the middle of a change) tell each other, and both go to
//! `secure` where one of them is sealed, and to plain otherwise: [`settling`].

mod carrying;
mod failing;
mod following;
mod leading;
mod order;
mod refusal;
mod settling;

use alloc::collections::{BTreeMap, VecDeque};
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::net::SocketAddr;
use core::time::Duration;

use margay_wire::{ChangeRepr, ChangeStep, ErrorCode, ErrorRepr, Extension, Flags, FlowId, Kind};

use crate::act::setup::retry_after;
use crate::act::stack_rule::guard;
use crate::association::auth::Verified;
use crate::association::draft::Draft;
use crate::association::location::Scope;
use crate::leg::stack::{Stack, Stacks, Taking};
use crate::machine::sal::Sal;
use crate::session::event::Event;
use crate::session::flow::{Flow, FlowTable, Marks};
use crate::types::drop_reason::DropReason;
use crate::types::fair_table::FairTable;
use crate::types::role::Role;
use crate::types::time::Instant;

pub use following::{FOLLOWING, FollowingEvent, FollowingState};
pub(crate) use leading::number_after;
pub use leading::{LEADING, LeadingEvent, LeadingState};
pub use order::{StackInfo, StackOrder};
pub use refusal::{ChangeRefused, End};

/// Changes at once that peers ask for, in each of the roles. Those of this host are as many as its flows.
const CHANGES_MAX: usize = 1 << 14;
/// Changes of a flow that are remembered.
const REMEMBERED: usize = 8;
/// For how long an answer is waited for, and for how long each end then waits until the other has turned.
const PATIENCE: Duration = Duration::from_secs(2);
/// A message is sent so often: once, and three times again.
const SENDS_MAX: u32 = 4;

/// Why a flow's stack is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ChangeCause {
    /// The operator of this host has ordered it.
    Order,
    /// An order at this host has been released.
    Release,
    /// The peer wants it.
    Peer,
    /// The two ends had different stacks: an agent had started again.
    Settled,
    /// A rule of this host, by its number.
    Rule(u16),
    /// The same rule has no say any more.
    RuleEnded(u16),
    /// What repairs the flow brings nothing to the peer.
    Failed,
}

impl ChangeCause {
    /// The name that lists and metrics carry.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Order => "order",
            Self::Release => "release",
            Self::Peer => "peer",
            Self::Settled => "settled",
            Self::Rule(_) => "rule",
            Self::RuleEnded(_) => "rule-ended",
            Self::Failed => "failed",
        }
    }
}

/// What has become of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeOutcome {
    /// The flow is carried by the new stack.
    Done,
    /// Nothing has changed, for this reason.
    Refused(ChangeRefused),
    /// The peer has not answered in time. The flow stays as it was.
    NoAnswer,
    /// The flow ended meanwhile.
    Ended,
}

impl ChangeOutcome {
    /// The name that lists and metrics carry.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Refused(_) => "refused",
            Self::NoAnswer => "no-answer",
            Self::Ended => "ended",
        }
    }

    /// A sentence for people.
    pub fn text(self) -> String {
        match self {
            Self::Done => "done".into(),
            Self::Refused(why) => why.to_string(),
            Self::NoAnswer => "the peer's agent has not answered in time; the flow goes on as it was".into(),
            Self::Ended => "the flow ended meanwhile".into(),
        }
    }
}

/// A change that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StackChange {
    /// When it was over.
    pub at: Instant,
    /// The stack before.
    pub from: Stack,
    /// The stack that was wanted.
    pub to: Stack,
    /// Why.
    pub cause: ChangeCause,
    /// What has become of it.
    pub outcome: ChangeOutcome,
}

impl StackChange {
    /// A sentence for people: why it is as it is.
    pub fn text(&self) -> String {
        match (self.cause, self.outcome) {
            (ChangeCause::Failed, ChangeOutcome::Done) => ChangeRefused::Failed.to_string(),
            (_, outcome) => outcome.text(),
        }
    }
}

/// What is remembered of a flow's stack.
#[derive(Debug, Default)]
struct History {
    since: Option<Instant>,
    order: Option<StackOrder>,
    changes: VecDeque<StackChange>,
    /// Repairs have failed: until then no rule of either end tries them again.
    failed_until: Option<Instant>,
    /// The peer's last message of a change: our index of its association, its epoch and its number.
    heard: Option<(u32, u32, u32)>,
}

/// The changes that this host has a part in, and what is remembered of those that are over.
#[derive(Debug)]
pub(crate) struct StackChanges {
    leading: FairTable<FlowId, leading::Leading>,
    following: FairTable<FlowId, following::Following>,
    proposing: BTreeMap<FlowId, following::Proposing>,
    histories: BTreeMap<FlowId, History>,
}

impl Default for StackChanges {
    fn default() -> Self {
        let (leading, following) = (FairTable::new(CHANGES_MAX, usize::MAX), FairTable::new(CHANGES_MAX, usize::MAX));
        Self { leading, following, proposing: BTreeMap::new(), histories: BTreeMap::new() }
    }
}

impl StackChanges {
    /// How often a peer's change found no room.
    pub const fn refused(&self) -> u64 {
        self.leading.refused() + self.following.refused()
    }

    /// When something is due.
    pub fn next_deadline(&self) -> Option<Instant> {
        let leading = self.leading.values().map(leading::Leading::due);
        let following = self.following.values().map(|one| one.until);
        let proposing = self.proposing.values().map(following::Proposing::due);
        leading.chain(following).chain(proposing).min()
    }

    /// Whether a message is older than the last one that was heard of the same flow. Takes note of one that is not.
    fn is_overtaken(&mut self, id: FlowId, message: &Verified<'_>) -> bool {
        let epoch = message.auth().map_or(0, |auth| auth.epoch);
        let heard = (message.association(), epoch, message.control_seq);
        let last = &mut self.histories.entry(id).or_default().heard;
        let is_overtaken = last.is_some_and(|last| last.0 == heard.0 && (last.1, last.2) > (heard.1, heard.2));
        if !is_overtaken {
            *last = Some(heard);
        }
        is_overtaken
    }

    /// Whether a rule of this host wants the change that is under way.
    fn is_by_rule(&self, id: FlowId) -> bool {
        let cause = self.leading.get(&id).map(|one| one.cause).or(self.proposing.get(&id).map(|one| one.cause));
        matches!(cause, Some(ChangeCause::Rule(_) | ChangeCause::RuleEnded(_)))
    }

    /// The stack that a flow is to have, where a change of it is under way.
    pub fn under_way(&self, id: FlowId) -> Option<Stack> {
        let leading = self.leading.get(&id).map(|one| one.to);
        let following = self.following.get(&id).map(|one| one.to);
        leading.or(following).or_else(|| self.proposing.get(&id).map(|one| one.to))
    }

    /// Whether this end waits for its peer's word of the change of that number: the answer, the confirmation or that
    /// the change is made. Each is said again when it is lost.
    fn awaits_word(&self, id: FlowId, number: u32) -> bool {
        let leading = self.leading.get(&id);
        let following = self.following.get(&id);
        leading.is_some_and(|one| one.number == number && one.state != LeadingState::Told)
            || following.is_some_and(|one| one.number == number && !one.is_made())
    }
}

impl FlowTable {
    /// Whether this end demands that a flow is sealed.
    fn has_demand(&self, id: FlowId) -> bool {
        self.get(id).is_some_and(Flow::is_demanded_here)
    }
}

/// The flows of which something is due.
fn due_of<'a, T: 'a>(all: impl Iterator<Item = (&'a FlowId, &'a T)>, is_due: impl Fn(&T) -> bool) -> Vec<FlowId> {
    all.filter(|(_, one)| is_due(one)).map(|(id, _)| *id).collect()
}

/// When a message is sent again, and whether it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sends {
    pub count: u32,
    pub next: Option<Instant>,
}

impl Sends {
    pub const fn starting(now: Instant) -> Self {
        Self { count: 0, next: Some(now) }
    }

    /// Whether it is to be sent now; then it is counted.
    pub fn take(&mut self, now: Instant) -> bool {
        if self.next.is_none_or(|next| next > now) {
            return false;
        }
        let wait = retry_after(self.count);
        self.count += 1;
        self.next = (self.count < SENDS_MAX).then(|| now + wait);
        true
    }
}

impl Sal {
    /// A step of a change.
    pub(crate) fn handle_change(
        &mut self,
        now: Instant,
        from: SocketAddr,
        message: &Verified<'_>,
    ) -> Result<(), DropReason> {
        let association = message.association();
        let said = message.change().ok_or(DropReason::Malformed)?;
        let id = message.dst_flow;
        if self.flows.get(id).is_none() {
            self.open_as_agreed(now, id, from);
        }
        let is_its = |flow: &&Flow| {
            flow.peer_flow == message.src_flow
                && flow.carries_data()
                && self.associations.is_same_peer(flow.association, association)
        };
        let Some(role) = self.flows.get(id).filter(is_its).map(|flow| flow.role) else {
            if matches!(said.step, ChangeStep::Propose | ChangeStep::Request) {
                let no = ChangeRepr { step: ChangeStep::Refuse, demands: false, ..said };
                self.send_change(association, (message.src_flow, id), no, Flags::empty(), Some(ErrorCode::UnknownFlow));
            }
            return Err(DropReason::UnknownFlow);
        };
        let is_overtaken = self.stack_changes.is_overtaken(id, message);
        if said.demands || !is_overtaken {
            // A word that was sent before a demand, and comes after it, does not end it.
            self.note_demand(id, Marks::PEER_DEMANDS, said.demands);
        }
        if guard::is_demanded_by(&said)
            && let Some(host) = self.associations.get(association).map(|association| association.host)
        {
            guard::hold_for_peer(self, now, Scope { host, flow: id });
        }
        match (said.step, role) {
            (ChangeStep::Propose, Role::Initiator) => self.proposed(now, id, said),
            (ChangeStep::Request, Role::Responder) => self.requested(now, id, said),
            (ChangeStep::Answer, Role::Initiator) => self.leading_event(now, id, said.number, LeadingEvent::Answered),
            (ChangeStep::Done, Role::Initiator) => self.leading_event(now, id, said.number, LeadingEvent::Done),
            (ChangeStep::Refuse, Role::Initiator) => self.request_refused(now, id, message, said),
            (ChangeStep::Refuse, Role::Responder) => self.proposal_refused(now, id, message, said),
            (ChangeStep::Confirm, Role::Responder) => self.confirmed(now, id, said),
            (ChangeStep::Abandon, Role::Responder) => self.abandoned(now, id, said.number),
            (ChangeStep::Tell, _) => self.told(now, id, said, message.flags.contains(Flags::CONFIRM)),
            _ => Err(DropReason::Unexpected),
        }
    }

    /// The flow cache has come to the peer's FENCE of a change; or to what can only follow it, where the peer has said
    /// that it turns.
    pub(crate) fn handle_turned(&mut self, now: Instant, id: FlowId, change: u32) {
        // Either one knows of this change, or neither does any more.
        let is_fenced_sealed = |stacks: Stacks| matches!(stacks.takes, Taking::Ready(_)) && stacks.before.is_sealed();
        if self.flows.get(id).is_some_and(|flow| is_fenced_sealed(flow.stacks)) {
            // The FENCE was sealed: the peer has said it by this. A plain one may be anybody's.
            let _ = self.leading_event(now, id, change, LeadingEvent::Done);
            let _ = self.following_event(now, id, change, FollowingEvent::Confirmed);
        }
        let _ = self.leading_event(now, id, change, LeadingEvent::Fenced);
        let _ = self.following_event(now, id, change, FollowingEvent::Fenced);
    }

    /// What is due of all changes.
    pub(crate) fn stack_changes_due(&mut self, now: Instant) {
        self.leading_due(now);
        self.following_due(now);
        self.proposing_due(now);
    }

    /// The flow is over: nothing of it changes any more.
    pub(crate) fn forget_stack_changes(&mut self, id: FlowId) {
        let now = self.now;
        self.end_leading(now, id, ChangeOutcome::Ended);
        self.end_following(now, id, ChangeOutcome::Ended);
        self.end_proposing(now, id, ChangeOutcome::Ended);
        self.stack_changes.histories.remove(&id);
        self.stack_rules.forget(id);
        self.losses.forget(id);
        self.queue.unguard(id);
    }

    /// Takes note of what an end demands.
    pub(crate) fn note_demand(&mut self, id: FlowId, demand: Marks, is_demanded: bool) {
        if let Some(flow) = self.flows.get_mut(id) {
            flow.marks.set(demand, is_demanded);
        }
        if is_demanded {
            self.seal_all_places(id, demand);
        }
        self.stack_rules.stir(id);
        if !is_demanded {
            self.end_guard_of_freed(self.now, id);
        }
    }

    /// Remembers what has become of a change, and tells of it.
    fn remember(&mut self, now: Instant, id: FlowId, change: StackChange) {
        let history = self.stack_changes.histories.entry(id).or_default();
        if change.outcome == ChangeOutcome::Done {
            history.since = Some(now);
            history.order = match change.cause {
                ChangeCause::Order => Some(StackOrder { stack: change.to, at: now }),
                // The later order holds, and one that cannot be followed does not.
                ChangeCause::Release | ChangeCause::Peer | ChangeCause::Failed => None,
                ChangeCause::Settled | ChangeCause::Rule(_) | ChangeCause::RuleEnded(_) => history.order,
            };
        }
        if history.changes.len() == REMEMBERED {
            history.changes.pop_front();
        }
        history.changes.push_back(change);
        self.stack_rules.note_change_for_rules(&self.flows, now, id, &change);
        self.stripe_what_is_sealed(now, id, &change);
        self.events.push(Event::StackChanged { flow: id, change });
    }

    /// Says a step of a change to a flow's peer.
    fn say_change(&mut self, id: FlowId, step: ChangeStep, to: Stack, number: u32) {
        let repr = self.change_repr(id, step, to, number);
        self.say_change_repr(id, repr, Flags::empty(), None);
    }

    fn change_repr(&self, id: FlowId, step: ChangeStep, to: Stack, number: u32) -> ChangeRepr {
        let flow = self.flows.get(id);
        let stack = to.number(flow.and_then(|flow| flow.seal.as_ref()).map(|keys| keys.cipher));
        let by_rule = self.stack_changes.is_by_rule(id);
        ChangeRepr { step, stack, demands: self.flows.has_demand(id), by_rule, number }
    }

    fn say_change_repr(&mut self, id: FlowId, repr: ChangeRepr, flags: Flags, code: Option<ErrorCode>) {
        let Some(flow) = self.flows.get(id) else { return };
        let association = flow.association;
        let peer_flow = flow.peer_flow;
        self.send_change(association, (peer_flow, id), repr, flags, code);
    }

    fn send_change(
        &mut self,
        association: u32,
        (to, from): (FlowId, FlowId),
        repr: ChangeRepr,
        flags: Flags,
        code: Option<ErrorCode>,
    ) {
        let extensions: Vec<_> = core::iter::once(Extension::Change(repr))
            .chain(code.map(|code| Extension::Error(ErrorRepr { code, text: "" })))
            .collect();
        let mut draft = Draft::new(Kind::Change, to, from);
        draft.flags = flags;
        draft.extensions = &extensions;
        self.seal_and_send(association, draft);
    }
}

#[cfg(test)]
mod test;
