//! A session that runs comes to go through other boxes (docs/decisions/0080; Dysco, section 3). Its program notices
//! nothing.
//!
//! ```text
//!   client's host                                                                   server's host
//!     Asking     ─────── request ──────────────── by the old way ──────────────────────▶ Asked
//!                ◀────── answer: where it hears SAL ────────────────────────────────────
//!     SettingUp  ─────── SYN, SYN-ACK, ACK ────── by the new way ──────────────────────▶ Ready
//!     Confirming ─────── confirm ──────────────── by the new way ──────────────────────▶ Turned
//!                ◀────── FENCE ────────────────── by the old way ───────────────────────
//!     Turned     ◀────── done ─────────────────── by the new way ───────────────────────
//!                ─────── FENCE ────────────────── by the old way ──────────────────────▶
//!     Finishing  ─────── finish ───────────────── by the new way ──────────────────────▶ Finished
//!     Lingering  ◀────── finished ──────────────────────────────────────────────────────
//!     Leaving    ─────── leave ────────────────── by the old way, hop by hop ──────────▶
//! ```
//!
//! The *anchors* are the two ends of the session. Each *way* between them is a flow at either end, with the session's
//! one five-tuple there, and two halves on each box's host, which are ordinary flows. A program sends by one of the two
//! flows alone; what comes is taken of both. Boxes that do not change numbers need no deltas: what was sent by one way
//! may arrive by the other.
//!
//! Where the policy has order kept (`gate`), what comes by the new way waits until all of the old one has come.
//!
//! The session's lock, which is kept at the left anchor, is taken for the whole of it: nobody hands the session over,
//! changes its stack or its boxes meanwhile.
//!
//! Until the right anchor has said that it sends by the new way there is a way back, and whatever happens the session
//! is as it was. From then on it goes on by the new one.

mod cut;
mod distant;
mod duration;
mod edit;
mod following;
mod gate;
mod half_checks;
mod held;
mod leading;
mod listener;
mod orders;
mod parting;
mod passing;
mod record;
mod refusal;
mod splice;
mod vouching;

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv6Addr, SocketAddr};
use core::time::Duration;

use margay_wire::{
    Chain, CutRepr, ErrorCode, ErrorRepr, Extension, FlowId, Kind, OrderRepr, ReconfigurationRepr, ReconfigurationStep,
    SessionId, SessionRepr, SpliceRepr,
};

use crate::act::ending::closing::LINGER;
use crate::act::stack_rule::engine::{act_as_rules_do, guard_as_rules_do};
use crate::association::auth::Verified;
use crate::association::draft::Draft;
use crate::cache::entry::{Directions, EntryUpdate, FlowCounters, RemoveReason};
use crate::leg::carriage::Why;
use crate::leg::stack::Stack;
use crate::machine::sal::Sal;
use crate::session::LEASE_MAX;
use crate::session::event::Event;
use crate::session::flow::{Flow, FlowTable, Marks, Setup};
use crate::types::drop_reason::DropReason;
use crate::types::fair_table::{FairShares, FairTable, Peer};
use crate::types::key::HostId;
use crate::types::name::ServiceId;
use crate::types::role::{Lifecycle, Role};
use crate::types::time::Instant;

pub use cut::PeerCut;
pub use distant::{ORDERING, OrderingEvent, OrderingState};
pub use duration::{Durations, Took};
pub use edit::{EDITS, Edit, EditError, SessionBoxes};
pub use leading::{LEADING, LeadingEvent, LeadingState};
pub use record::{KeptWay, PartingRecord};
pub use refusal::ReconfigurationRefused;
pub use splice::{SpliceOutcome, SpliceRefused};

/// Reconfigurations at once that peers ask for, in each of the roles: of one peer, two of the batches in which an agent
/// changes many sessions. Those of this host are as many as its sessions.
const RECONFIGURATIONS_MAX: usize = 8192;
/// Reconfigurations of a session that are remembered.
const REMEMBERED: usize = 8;
/// A new way that does not stand by then comes to nothing.
const PATIENCE: Duration = Duration::from_secs(2);
/// A FENCE that is late holds up what has overtaken it for so long at most.
const FENCE_WAIT: Duration = Duration::from_millis(50);
/// So many bytes may overtake it; with the next ones, nothing waits any longer.
const HELD_BYTES_MAX: usize = 4 << 20;
const TCP: u8 = 6;
/// Kinds of [`ReconfigurationOutcome`].
pub const OUTCOMES: usize = 4;

/// What has become of a reconfiguration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReconfigurationOutcome {
    /// The session goes by the new way.
    Done,
    /// The server's host does not agree. The session is as it was.
    Refused(String),
    /// The new way did not come to stand. The session is as it was.
    Failed(String),
    /// The session ended meanwhile.
    Ended,
}

impl ReconfigurationOutcome {
    /// Names of all kinds, in the order in which they are counted.
    pub const LABELS: [&'static str; OUTCOMES] = ["done", "refused", "failed", "ended"];

    /// The name that lists and metrics carry.
    pub const fn label(&self) -> &'static str {
        Self::LABELS[self.number()]
    }

    const fn number(&self) -> usize {
        match self {
            Self::Done => 0,
            Self::Refused(_) => 1,
            Self::Failed(_) => 2,
            Self::Ended => 3,
        }
    }

    /// A sentence for people.
    pub fn text(&self) -> &str {
        match self {
            Self::Done => "done",
            Self::Refused(why) | Self::Failed(why) => why,
            Self::Ended => "the session ended meanwhile",
        }
    }
}

/// A reconfiguration that is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reconfigured {
    /// When it was over.
    pub at: Instant,
    /// The number that [`Sal::reconfigure`] gave; `None`: nobody here has ordered it, a program leaves.
    pub order: Option<u64>,
    /// The host that has ordered it, where that is not this one.
    pub by: Option<HostId>,
    /// What was ordered.
    pub edit: Edit,
    /// The boxes that the session was to have between its two ends, in order.
    pub boxes: Vec<ServiceId>,
    /// What has become of it.
    pub outcome: ReconfigurationOutcome,
    /// How long it has taken; `None`: it was refused before it had begun.
    pub took: Option<Took>,
}

/// The two ways of a session at one of its ends.
#[derive(Debug)]
struct Ways {
    old: FlowId,
    /// `None`: it is not there yet.
    new: Option<FlowId>,
    number: u32,
    /// The program sends by the new one.
    has_turned: bool,
    /// The other end sends nothing more by the old one.
    is_fenced: bool,
    /// What has come by the new one, and waits for the last of the old one.
    held: Vec<(SocketAddr, Vec<u8>)>,
    held_bytes: usize,
    /// For whom how many bytes of that, and of what waits at the gate, count.
    counted: Option<(Peer, usize)>,
    /// Until then at most.
    held_until: Option<Instant>,
    /// The program is given what comes by both in order.
    gate: Option<Box<gate::Gate>>,
    /// Both are in use at once: the old one leads through a program that leaves.
    parting: Option<Box<parting::Parting>>,
}

impl Ways {
    const fn of(old: FlowId, number: u32) -> Self {
        Self {
            old,
            new: None,
            number,
            has_turned: false,
            is_fenced: false,
            held: Vec::new(),
            held_bytes: 0,
            counted: None,
            held_until: None,
            gate: None,
            parting: None,
        }
    }

    fn has(&self, id: FlowId) -> bool {
        self.old == id || self.new == Some(id)
    }

    /// The one that the program sends by.
    fn of_program(&self) -> FlowId {
        self.new.filter(|_| self.has_turned).unwrap_or(self.old)
    }
}

/// All reconfigurations that this host has a part in, and what is remembered of those that are over.
#[derive(Debug)]
pub(crate) struct Reconfigurations {
    leading: FairTable<SessionId, leading::Leading>,
    following: FairTable<SessionId, following::Following>,
    /// Orders that wait until the session is free.
    orders: orders::Orders,
    /// Orders given here that the client's host carries out.
    givings: distant::Givings,
    /// Orders that other hosts have given.
    takings: distant::Takings,
    histories: BTreeMap<FlowId, Vec<Reconfigured>>,
    /// Of sessions that end here, the last reconfiguration that was heard of.
    numbers: BTreeMap<FlowId, u32>,
    /// Programs here that leave sessions.
    splices: splice::Splices,
    /// Of old ways of sessions that have two, what the start of the agent before has written down.
    kept: BTreeMap<FlowId, PartingRecord>,
    /// Halves of sessions at a middlebox here that their neighbours may have left.
    half_checks: half_checks::HalfChecks,
    /// Steps for boxes here that wait until a session's halves are written down, by the half that they have come by.
    waiting: BTreeMap<FlowId, passing::Waiting>,
    last_number: u32,
    /// Bytes that wait in sessions that have two ways.
    held: FairShares,
}

impl Default for Reconfigurations {
    fn default() -> Self {
        Self {
            leading: FairTable::new(RECONFIGURATIONS_MAX, usize::MAX),
            following: FairTable::new(RECONFIGURATIONS_MAX, usize::MAX),
            orders: orders::Orders::default(),
            givings: distant::Givings::default(),
            takings: distant::Takings::default(),
            histories: BTreeMap::new(),
            numbers: BTreeMap::new(),
            splices: splice::Splices::default(),
            kept: BTreeMap::new(),
            half_checks: half_checks::HalfChecks::default(),
            waiting: BTreeMap::new(),
            last_number: 0,
            held: held::no_bytes(),
        }
    }
}

impl Reconfigurations {
    /// When something is due.
    pub fn next_deadline(&self) -> Option<Instant> {
        let leading = self.leading.values().map(leading::Leading::due);
        let following = self.following.values().map(following::Following::due);
        leading
            .chain(following)
            .chain(self.orders.next_deadline())
            .chain(self.givings.next_deadline())
            .chain(self.takings.next_deadline())
            .chain(self.splices.next_deadline())
            .chain(self.half_checks.next_deadline())
            .chain(self.waiting_until())
            .min()
    }

    /// This host was absent: no agent ran here, or it had other addresses, or none. The hosts before and behind each
    /// session that passes a box here are asked whether it still does. Who has forgotten it meanwhile would not say so
    /// again.
    pub fn ask_about_halves(&mut self, now: Instant, flows: &FlowTable) {
        let halves = flows.iter().filter(|flow| flow.is_at_box() && flow.carries_data());
        halves.for_each(|flow| self.half_checks.start(now, flow.id));
    }

    /// Both halves of a running session's new path are set up at a middlebox here. Should the ends give that path up,
    /// the word of it may be lost.
    pub fn check_new_path(&mut self, now: Instant, halves: [FlowId; 2]) {
        halves.into_iter().for_each(|half| self.half_checks.start_later(now, half));
    }

    /// Those of a flow's session that are over.
    pub fn of_flow(&self, id: FlowId) -> Vec<Reconfigured> {
        self.histories.get(&id).cloned().unwrap_or_default()
    }

    /// The flow is gone.
    pub fn forget_flow(&mut self, id: FlowId) {
        self.histories.remove(&id);
        self.numbers.remove(&id);
        self.half_checks.stop(id);
        self.waiting.remove(&id);
    }

    /// The flow that a session's program sends by, where this is another one of its two.
    pub fn way_of_program(&self, flows: &FlowTable, id: FlowId) -> FlowId {
        let Some(flow) = flows.get(id).filter(|flow| !flow.directions.has_egress()) else { return id };
        let ways = self.ways(flow.session, flow.role).filter(|ways| ways.has(id));
        ways.map_or(id, Ways::of_program)
    }

    /// The flow of a session that ends here and is to go another way.
    pub fn followed<'a>(&self, flows: &'a FlowTable, session: SessionId) -> Option<&'a Flow> {
        flows.get(self.following.get(&session)?.ways.old)
    }

    fn ways(&self, session: SessionId, role: Role) -> Option<&Ways> {
        match role {
            Role::Initiator => self.leading.get(&session).map(|one| &one.ways),
            Role::Responder => self.following.get(&session).map(|one| &one.ways),
        }
    }

    fn ways_mut(&mut self, session: SessionId, role: Role) -> Option<&mut Ways> {
        self.ways_and_held(session, role).map(|(ways, _)| ways)
    }

    fn ways_and_held(&mut self, session: SessionId, role: Role) -> Option<(&mut Ways, &mut FairShares)> {
        let ways = match role {
            Role::Initiator => self.leading.get_mut(&session).map(|one| &mut one.ways),
            Role::Responder => self.following.get_mut(&session).map(|one| &mut one.ways),
        };
        ways.map(|ways| (ways, &mut self.held))
    }
}

/// The message that a step goes in: those of the lock are the lock's.
const fn kind_of(step: ReconfigurationStep) -> Kind {
    match step {
        ReconfigurationStep::Request => Kind::RequestLock,
        ReconfigurationStep::Answer => Kind::AckLock,
        ReconfigurationStep::Refuse => Kind::NackLock,
        ReconfigurationStep::Cancel => Kind::CancelLock,
        ReconfigurationStep::Canceled => Kind::AckCancel,
        _ => Kind::Change,
    }
}

/// Where nothing is said of an address.
const fn nowhere() -> SocketAddr {
    SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0)
}

/// What a step says beside its number.
const fn bare(step: ReconfigurationStep, number: u32) -> ReconfigurationRepr {
    ReconfigurationRepr { step, number, host: [0; 16], address: nowhere() }
}

/// What a step says beside itself.
#[derive(Clone, Copy, Debug, Default)]
struct Beside<'a> {
    code: Option<ErrorCode>,
    /// Of ERROR, where there is a code.
    text: &'a str,
    splice: Option<SpliceRepr>,
    chain: Option<Chain<'a>>,
    session: Option<SessionRepr>,
    cut: Option<CutRepr>,
    order: Option<OrderRepr>,
    certificate: Option<&'a [u8]>,
}

impl<'a> Beside<'a> {
    /// All that a message says.
    fn of(message: &'a Verified<'_>) -> Self {
        Self {
            code: message.error().map(|error| error.code),
            text: message.error().map_or("", |error| error.text),
            splice: message.splice(),
            chain: message.chain(),
            session: message.session(),
            cut: message.cut(),
            order: message.order(),
            certificate: message.certificate(),
        }
    }

    fn extensions(&self, repr: ReconfigurationRepr) -> Vec<Extension<'a>> {
        let error = self.code.map(|code| Extension::Error(ErrorRepr { code, text: self.text }));
        core::iter::once(Extension::Reconfiguration(repr))
            .chain(error)
            .chain(self.splice.map(Extension::Splice))
            .chain(self.chain.map(Extension::Chain))
            .chain(self.session.map(Extension::Session))
            .chain(self.cut.map(Extension::Cut))
            .chain(self.order.map(Extension::Order))
            .chain(self.certificate.map(Extension::Certificate))
            .collect()
    }
}

impl FlowTable {
    /// What is known of the program's connection, which one flow has carried, goes to another flow of its session; of
    /// its marks, `kept`.
    fn inherit_connection(&mut self, now: Instant, from: FlowId, to: FlowId, kept: Marks) {
        let Some(flow) = self.get(from) else { return };
        let Flow { lifecycle, since, closed_at, .. } = *flow;
        let source = flow.source.clone();
        let marks = flow.marks & kept;
        let Some(flow) = self.get_mut(to) else { return };
        flow.lifecycle = lifecycle;
        flow.since = since;
        flow.closed_at = closed_at;
        flow.active = now;
        flow.source = source;
        flow.marks |= marks;
        if lifecycle == Lifecycle::Closed {
            self.set_deadline(to, Some(now + LINGER));
        }
    }
}

impl Sal {
    /// A step of a reconfiguration.
    pub(crate) fn handle_reconfiguration(&mut self, now: Instant, message: &Verified<'_>) -> Result<(), DropReason> {
        let association = message.association();
        let said = message.reconfiguration().ok_or(DropReason::Malformed)?;
        if message.kind != kind_of(said.step) {
            return Err(DropReason::Malformed);
        }
        let id = message.dst_flow;
        let Some(flow) = self.flows.get(id) else {
            self.answer_of_no_flow(message, said);
            return Err(DropReason::UnknownFlow);
        };
        let is_its = flow.peer_flow == message.src_flow
            && flow.carries_data()
            && self.associations.is_same_peer(flow.association, association);
        if !is_its {
            return Err(DropReason::UnknownFlow);
        }
        match flow.role {
            _ if flow.is_at_box() => self.pass_step_on(now, id, message, said),
            _ if self.reconfigurations.splices.of(id).is_some() => self.pass_spliced(now, id, message, said),
            Role::Initiator => self.leader_hears(now, id, message, said),
            Role::Responder => self.follower_hears(now, id, message, said),
        }
    }

    /// The sender has a flow that this host has forgotten, or never had: it need not wait.
    fn answer_of_no_flow(&mut self, message: &Verified<'_>, said: ReconfigurationRepr) {
        use ReconfigurationStep::{Cancel, Canceled, Confirm, Done, Finish, Leave, Left, Refuse, Request, Wish};
        let (step, code) = match said.step {
            Request => (Refuse, Some(ErrorCode::UnknownFlow)),
            Cancel => (Canceled, None),
            Confirm | Done | Finish | Leave | Wish => (Left, None),
            _ => return,
        };
        let flows = (message.src_flow, message.dst_flow);
        self.send_step(message.association(), flows, bare(step, said.number), &Beside { code, ..Beside::default() });
    }

    /// Says a step by a flow.
    fn say_step(&mut self, id: FlowId, step: ReconfigurationStep, number: u32) {
        self.say_step_repr(id, bare(step, number), None);
    }

    fn say_step_repr(&mut self, id: FlowId, repr: ReconfigurationRepr, code: Option<ErrorCode>) {
        self.say_beside(id, repr, &Beside { code, ..Beside::default() });
    }

    fn say_beside(&mut self, id: FlowId, repr: ReconfigurationRepr, beside: &Beside<'_>) {
        let Some(flow) = self.flows.get(id).filter(|flow| flow.association != 0) else { return };
        let association = flow.association;
        let peer_flow = flow.peer_flow;
        self.send_step(association, (peer_flow, id), repr, beside);
    }

    fn send_step(
        &mut self,
        association: u32,
        (to, from): (FlowId, FlowId),
        repr: ReconfigurationRepr,
        beside: &Beside<'_>,
    ) {
        let extensions = beside.extensions(repr);
        let mut draft = Draft::new(kind_of(repr.step), to, from);
        draft.extensions = &extensions;
        self.seal_and_send(association, draft);
    }

    /// Something has come by a way whose turn it is not yet: it waits for the last of the other one.
    pub(crate) fn hold_overtaking(
        &mut self,
        now: Instant,
        id: FlowId,
        from: SocketAddr,
        datagram: &[u8],
    ) -> Result<(), DropReason> {
        let flow = self.flows.get(id).ok_or(DropReason::UnknownFlow)?;
        let session = flow.session;
        let role = flow.role;
        let has_room = self.reconfigurations.may_hold(&self.flows, &self.associations, id, datagram.len());
        let ways = self.reconfigurations.ways_mut(session, role).filter(|ways| ways.new == Some(id));
        let ways = ways.ok_or(DropReason::Unexpected)?;
        ways.held_bytes += datagram.len();
        ways.held.push((from, datagram.to_vec()));
        ways.held_until.get_or_insert(now + FENCE_WAIT);
        if ways.held_bytes > HELD_BYTES_MAX || !has_room {
            self.take_by_new(session, role);
        }
        Ok(())
    }

    /// What comes by the new way is given on from here on, after what has waited.
    fn take_by_new(&mut self, session: SessionId, role: Role) {
        let Some(ways) = self.reconfigurations.ways_mut(session, role) else { return };
        let Some(new) = ways.new else { return };
        ways.held_until = None;
        ways.held_bytes = 0;
        let held = core::mem::take(&mut ways.held);
        let (has_turned, has_parted) = (ways.has_turned, ways.parting.is_some());
        self.reconfigurations.settle_held(session, role);
        if has_parted {
            return;
        }
        let directions = if has_turned { Directions::Both } else { Directions::Ingress };
        if let Some(association) = self.flows.get(new).map(|flow| flow.association) {
            self.locations.announce_path(&self.associations, &mut self.queue, association);
        }
        self.flows.set_directions(new, directions);
        self.flows.install_again(&mut self.queue, new);
        held.into_iter().for_each(|(from, datagram)| self.queue.ingress(from, datagram));
    }

    /// The other end sends nothing more by the old way.
    fn hear_fence(&mut self, now: Instant, session: SessionId, role: Role) {
        if self.reconfigurations.fence_gate(now, session, role) {
            return;
        }
        let Some(ways) = self.reconfigurations.ways_mut(session, role) else { return };
        if !core::mem::replace(&mut ways.is_fenced, true) && ways.new.is_some() {
            self.take_by_new(session, role);
        }
    }

    /// From here on the program sends by the new way. The other end is told by the last message of the old one.
    fn turn_ways(&mut self, now: Instant, session: SessionId, role: Role) {
        let Some(ways) = self.reconfigurations.ways_mut(session, role) else { return };
        if ways.new.is_none() {
            return;
        }
        ways.has_turned = true;
        let old = ways.old;
        let number = ways.number;
        // What the program sends comes to the core until the gate opens.
        if ways.gate.is_none() {
            self.give_program_over(now, session, role);
        }
        self.say_step(old, ReconfigurationStep::Fence, number);
    }

    /// The program's flow is the new one from here on, since it sends by that.
    fn give_program_over(&mut self, now: Instant, session: SessionId, role: Role) {
        let Some(ways) = self.reconfigurations.ways(session, role) else { return };
        let Some(new) = ways.new else { return };
        let old = ways.old;
        let number = ways.number;
        self.hand_program_over(now, old, new);
        if let Some(history) = self.reconfigurations.histories.remove(&old) {
            self.reconfigurations.histories.insert(new, history);
        }
        if role == Role::Responder {
            self.reconfigurations.numbers.insert(new, number);
        }
        self.begin_policy(now, new);
        act_as_rules_do(self, now, new);
        self.events.push(Event::FlowOpened(new));
        self.events.push(Event::FlowChanged(old));
    }

    /// The program sends by the old way again.
    fn turn_ways_back(&mut self, now: Instant, session: SessionId, role: Role) {
        let has_turned = self.reconfigurations.ways(session, role).filter(|ways| ways.has_turned);
        let Some((old, new)) = has_turned.and_then(|ways| Some((ways.old, ways.new?))) else { return };
        if !self.flows.get(old).is_some_and(Flow::carries_data) {
            return;
        }
        if let Some(ways) = self.reconfigurations.ways_mut(session, role) {
            ways.has_turned = false;
        }
        self.hand_program_over(now, new, old);
        self.flows.set_directions(old, Directions::Both);
        self.flows.install_again(&mut self.queue, old);
        if let Some(history) = self.reconfigurations.histories.remove(&new) {
            self.reconfigurations.histories.insert(old, history);
        }
        self.events.push(Event::FlowOpened(old));
        self.events.push(Event::FlowChanged(new));
    }

    /// A program's flow becomes another one, with all that is known of its connection.
    fn hand_program_over(&mut self, now: Instant, from: FlowId, to: FlowId) {
        if self.flows.get(from).is_none() || self.flows.get(to).is_none() {
            return;
        }
        self.carry_share(from, to);
        self.flows.set_directions(from, Directions::Ingress);
        self.flows.set_deadline(from, None);
        self.flows.install_again(&mut self.queue, from);
        self.flows.inherit_connection(now, from, to, Marks::FIN_EGRESS | Marks::FIN_INGRESS | Marks::STRIPES);
        let Some(flow) = self.flows.get(to) else { return };
        let directions = if flow.directions.has_ingress() { Directions::Both } else { Directions::Egress };
        let association = flow.association;
        self.flows.set_directions(to, directions);
        self.locations.announce_path(&self.associations, &mut self.queue, association);
        guard_as_rules_do(self, now, to);
        self.flows.install_again(&mut self.queue, to);
        self.queue.update(EntryUpdate::Succession { from, to });
    }

    /// The session has one way again: nothing is before what goes direct by it.
    fn settle_way(&mut self, now: Instant, id: FlowId) {
        let Some(flow) = self.flows.get(id) else { return };
        if flow.directions != Directions::Both {
            self.flows.set_directions(id, Directions::Both);
        }
        if self.flows.get(id).is_some_and(|flow| flow.stacks.settled() == Some(Stack::Plain)) {
            self.unpark_direct(now, id);
        }
        self.flows.install_again(&mut self.queue, id);
        self.flows.open_pinhole(&mut self.ports, &mut self.queue, now, id);
    }

    /// Forgets a way of a session without a word to anybody.
    fn forget_way(&mut self, id: FlowId) {
        let Some(flow) = self.take_flow(id) else { return };
        if let Setup::Responder(setup) = &flow.setup {
            self.half_open.remove(setup.reply.direct.ip());
        } else if flow.association != 0 {
            self.associations.release_flow(flow.association, flow.role);
        }
        let reason = RemoveReason::Rechained;
        self.counters.removed(reason);
        self.queue.update(EntryUpdate::Remove { flow: id, reason });
        let info = Box::new(self.describe(&flow));
        self.events.push(Event::FlowClosed { flow: info, reason, carried: FlowCounters::default() });
    }

    /// A flow is to end. True where that is the end of one of its session's two ways alone.
    pub(crate) fn way_ends(&mut self, now: Instant, id: FlowId, reason: RemoveReason) -> bool {
        if self.ends_leaving(id) {
            return true;
        }
        let Some(flow) = self.flows.get(id) else { return false };
        let session = flow.session;
        let role = flow.role;
        let Some(ways) = self.reconfigurations.ways(session, role).filter(|ways| ways.has(id)) else { return false };
        // The end of a way, and not of the session.
        let is_of_way = matches!(
            reason,
            RemoveReason::PeerFailed | RemoveReason::PeerRebooted | RemoveReason::GivenUp | RemoveReason::Unproved
        );
        // Of a session whose order is kept, caches know the program by the old way.
        let is_connections = ways.gate.is_some() && ways.old == id && !is_of_way;
        let is_programs = ways.of_program() == id || is_connections;
        let has_turned = ways.has_turned;
        match (is_programs, has_turned) {
            // The old way of a session that goes by the new one.
            (false, true) => self.old_way_gone(now, session, role),
            // The new way, before it is used.
            (false, false) => self.new_way_gone(now, session, role),
            (true, true) if is_of_way && self.may_turn_back(session, role) => self.new_way_gone(now, session, role),
            (true, _) => {
                self.session_ends(now, id, session, role);
                return false;
            }
        }
        true
    }

    fn may_turn_back(&self, session: SessionId, role: Role) -> bool {
        let has_old = |ways: &Ways| self.flows.get(ways.old).is_some_and(Flow::carries_data);
        match role {
            Role::Initiator => {
                self.reconfigurations.leading.get(&session).is_some_and(|one| one.may_turn_back() && has_old(&one.ways))
            }
            Role::Responder => {
                let following = self.reconfigurations.following.get(&session);
                following.is_some_and(|one| one.may_turn_back() && has_old(&one.ways))
            }
        }
    }

    fn old_way_gone(&mut self, now: Instant, session: SessionId, role: Role) {
        self.open_gate(now, session, role);
        let Some(old) = self.reconfigurations.ways(session, role).map(|ways| ways.old) else { return };
        self.forget_way(old);
        self.hear_fence(now, session, role);
        match role {
            Role::Initiator => self.leader_event(now, session, LeadingEvent::OldGone, ""),
            Role::Responder => self.follower_lost_old(now, session),
        }
    }

    fn new_way_gone(&mut self, now: Instant, session: SessionId, role: Role) {
        match role {
            Role::Initiator => {
                self.leader_event(now, session, LeadingEvent::Failed, "the new way of the session has failed");
            }
            Role::Responder => self.leave_new(now, session),
        }
    }

    /// The other way of a session that ends, with the flow `id`, is of no use.
    fn session_ends(&mut self, now: Instant, id: FlowId, session: SessionId, role: Role) {
        let Some(ways) = self.reconfigurations.ways(session, role) else { return };
        let number = ways.number;
        let other = if ways.old == id { ways.new } else { Some(ways.old) };
        match role {
            Role::Initiator => self.end_reconfiguration(now, session, ReconfigurationOutcome::Ended),
            Role::Responder => drop(self.reconfigurations.take_following(session)),
        }
        if let Some(other) = other {
            self.say_step(other, ReconfigurationStep::Leave, number);
            self.forget_way(other);
        }
    }

    /// From here on nothing of a way goes direct: it is encapsulated until the session has no other one.
    fn keep_encapsulated(&mut self, now: Instant, id: FlowId) {
        self.park_direct(now, id, Why::Unproved);
    }

    /// What is due of all reconfigurations.
    pub(crate) fn reconfigurations_due(&mut self, now: Instant) {
        self.leaders_due(now);
        self.followers_due(now);
        self.orders_due(now);
        self.givings_due(now);
        self.reconfigurations.takings.forget_due(now);
        self.splices_due(now);
        self.reconfigurations.have_waited(now).into_iter().for_each(|id| self.kept(now, id));
        let halves = self.reconfigurations.half_checks.take_due(now);
        halves.into_iter().for_each(|id| self.say_step(id, ReconfigurationStep::Wish, 0));
    }

    fn give_up_holding(&mut self, now: Instant, session: SessionId, role: Role) {
        let held_until = self.reconfigurations.ways(session, role).and_then(|ways| ways.held_until);
        if held_until.is_some_and(|until| until <= now) {
            self.take_by_new(session, role);
        }
        let gate_due = self.reconfigurations.ways(session, role).and_then(Ways::gate_due);
        if gate_due.is_some_and(|due| due <= now) {
            self.open_gate(now, session, role);
        }
    }
}

#[cfg(test)]
mod test;
