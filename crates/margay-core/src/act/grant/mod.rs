//! Grants: connections that the kernels of two hosts set up by themselves (docs/decisions/0035).
//!
//! A host whose programs connect often to one name and port asks for a grant: an instance's word that it may open so
//! many flows, on ports and under numbers that both ends know beforehand.
//!
//! ```text
//!   initiator                          responder
//!      ──── SYN, GRANT: numbers, ports ────▶
//!      ◀─── SYN-ACK, GRANT: number, port ───
//!      ──── ACK ───────────────────────────▶   its kernel may open the flows
//!   its kernel may   ◀─── ACK, CONFIRM ─────
//! ```
//!
//! From then on the initiator's kernel takes a flow of the grant for a program's SYN and sends it direct, and the
//! responder's opens it there: no agent is on the way. The SYN bears a tag under a key that only these two can
//! derive, since what GRANT says is in the clear. Both cores hear of flows that last, and those are as any other from
//! then on. So that a change of rules, rights or weights counts for new connections soon, a grant is short-lived, and
//! ends at once where its end knows of the change.

mod asking;
mod giving;
mod record;

pub(crate) use asking::{Asks, Granted};
pub(crate) use giving::Offer;

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;

use margay_wire::{DataRepr, ErrorCode, ErrorRepr, Extension, FlowId, HeaderRepr, Kind, SessionId};

use crate::act::ending::closing::LINGER_GRANTED;
use crate::act::path::direct::Direct;
use crate::act::setup::SETUP_TIMEOUT;
use crate::association::Association;
use crate::association::AssociationTable;
use crate::association::draft::Draft;
use crate::cache::entry::{Entry, EntryUpdate, Grant, GrantKey, RemoveReason, Survey};
use crate::cache::queue::OutputQueue;
use crate::leg::carriage::{Carriage, DirectEvent, Why};
use crate::machine::sal::Sal;
use crate::session::event::Event;
use crate::session::flow::FlowTable;
use crate::session::flow::{Flow, Marks};
use crate::types::direction::Direction;
use crate::types::key::HostId;
use crate::types::name::{Prefix, ServiceId};
use crate::types::rng::Rng;
use crate::types::role::{Lifecycle, Role};
use crate::types::time::Instant;
use crate::types::tuple::Tuple;

/// How long flows may be opened by a grant: for so long a change that only routers know may go unnoticed.
const LIFETIME: Duration = Duration::from_secs(1);
/// What was opened at the last moment may be answered, and told of, for so long.
const SETTLING: Duration = SETUP_TIMEOUT;
/// How often the kernel is asked what has become of the flows of a grant. One that is over by then has cost this host's
/// agent nothing; one that was there the time before, and still is, becomes a flow as any other. Where thousands
/// connect at once, a listener may take a tenth of a second to close.
const SURVEYS: Duration = Duration::from_millis(250);
/// The same, at first, of flows that rules have come to be about: what has no answer yet may have one in a round trip.
const SURVEYS_OF_RULED: Duration = Duration::from_millis(10);
/// Grants of this host, whichever end it is. At the bound none is asked for and none is given.
const GRANTS_MAX: usize = 4096;
/// Pairs of flow ports that are in use with one peer, or rest. Fifteen thousand connections a second, each of which
/// rests for a minute, need as many.
const PAIRS_MAX: usize = 1 << 20;
/// A grant is silent when so many surveys after its first flow was opened nobody has answered any of them. Something
/// on the way takes what its SYNs bear, or its giver is dead: each of its connections waits for a second, until TCP
/// sends its SYN again by the agents.
const SILENT_SURVEYS: u8 = 3;
/// After so many silent grants in a row a host is asked for none, for so long.
const SILENT_MAX: u8 = 2;
const SILENT_REST: Duration = Duration::from_secs(60);
/// Hosts whose grants were silent, as far as they are counted. At the bound, the one whose rest ends first is asked
/// again.
const SILENT_HOSTS_MAX: usize = 256;
const TCP: u8 = 6;

/// The key of a grant, of which both ends know all that it derives from: the association's root, the session, which
/// the initiator drew, and the numbers that both ends drew for the flow that asked. Whoever reads on the path lacks
/// the root.
fn grant_key(association: &Association, session: SessionId, initiator: FlowId, responder: FlowId) -> GrantKey {
    let mut hasher = blake3::Hasher::new_derive_key("margay 2026 grant");
    hasher.update(&association.root_key()).update(&session.0);
    hasher.update(&initiator.0.to_be_bytes()).update(&responder.0.to_be_bytes());
    let mut key = [0; 16];
    hasher.finalize_xof().fill(&mut key);
    GrantKey(key)
}

/// A grant as this end has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Given {
    pub grant: Grant,
    /// The peer's number of flow 0.
    pub peer_first: FlowId,
    /// The peer's number of the grant.
    pub peer_grant: FlowId,
    /// From which those of the flows follow.
    pub session: SessionId,
    pub service: ServiceId,
    /// At the responder, the port of the service.
    pub port: u16,
    pub association: u32,
    pub host: HostId,
    /// Whether the responder's right to the name was proved.
    pub authenticated: bool,
    /// How many flows were opened, as far as the kernel has said.
    taken: u16,
    /// By flow, whether the core was told of it; whether it was over before that; and whether the last survey found it
    /// answered, and neither.
    told: u128,
    brief: u128,
    waiting: u128,
    /// Surveys after the first flow was opened, before any was answered.
    silent: u8,
    /// When the kernel is asked next.
    survey: Option<Instant>,
    /// The interval of surveys while new rules apply to its flows: the core then adopts each flow that a survey finds
    /// answered.
    hurry: Option<Duration>,
    /// None is opened any more; it is forgotten then, after what is left has been told of.
    over: Option<Instant>,
    is_last: bool,
}

impl Given {
    fn new(
        grant: Grant,
        session: SessionId,
        service: ServiceId,
        (association, host): (u32, HostId),
        authenticated: bool,
    ) -> Self {
        let (peer_first, peer_grant) = (FlowId(0), FlowId(0));
        Self {
            grant,
            peer_first,
            peer_grant,
            session,
            service,
            port: 0,
            association,
            host,
            authenticated,
            taken: 0,
            told: 0,
            brief: 0,
            waiting: 0,
            silent: 0,
            survey: None,
            hurry: None,
            over: None,
            is_last: false,
        }
    }

    const fn is_initiators(&self) -> bool {
        matches!(self.grant.role, Role::Initiator)
    }

    fn is_told(&self, number: u16) -> bool {
        self.told & 1 << number != 0
    }

    /// Flows of which the kernel alone may know something.
    fn unsettled(&self) -> u128 {
        let all = u128::MAX >> u128::BITS.saturating_sub(self.grant.count.into()).min(u128::BITS - 1);
        all & !(self.told | self.brief)
    }

    /// The kernel is asked at once, and then ever more seldom.
    const fn hurry(&mut self, now: Instant) {
        (self.survey, self.hurry) = (Some(now), Some(SURVEYS_OF_RULED));
        // So many surveys in so short a time do not show that nobody answers.
        self.silent = u8::MAX;
    }

    /// Takes note of a survey. Whether it has just become clear that nobody answers.
    fn note_silence(&mut self) -> bool {
        if !self.has_answers() && self.is_initiators() && self.taken > 0 {
            self.silent = self.silent.saturating_add(1);
            return self.silent == SILENT_SURVEYS;
        }
        false
    }

    /// Whether a flow of it was ever answered.
    fn has_answers(&self) -> bool {
        self.told | self.brief | self.waiting != 0
    }

    /// Flows that may still be opened.
    fn left(&self) -> u16 {
        self.grant.count.saturating_sub(self.taken)
    }

    /// This end's port and the peer's, of a flow.
    const fn ports(&self, number: u16) -> (u16, u16) {
        let Grant { local_port, remote_port, .. } = self.grant;
        // The wire's check and this end's choice keep both in range.
        if self.is_initiators() {
            (local_port.wrapping_add(number), remote_port)
        } else {
            (local_port, remote_port.wrapping_add(number))
        }
    }

    /// A flow as packets of the responder's listener carry it.
    fn listener_tuple(&self, number: u16) -> Tuple {
        let Tuple { protocol, source, destination } = self.grant.app;
        let port = self.grant.ports.get(usize::from(number)).copied().unwrap_or_default();
        Tuple { protocol, source, destination: SocketAddr::new(destination.ip(), port) }
    }

    /// The clients that a responder's listener is to see.
    fn shown(&self) -> impl Iterator<Item = SocketAddr> + use<'_> {
        let count = if self.is_initiators() { 0 } else { self.grant.count };
        (0..count).map(|number| self.listener_tuple(number).destination)
    }

    /// A flow that the kernels have opened. `app` is the five-tuple of the program here.
    fn flow(&self, id: FlowId, number: u16, app: Tuple, now: Instant) -> Flow {
        let mut flow = Flow::new(id, self.session_of(number), self.service, self.grant.role, app, now);
        flow.peer_flow = FlowId(self.peer_first.0.wrapping_add(number.into()));
        flow.port = self.port;
        flow.association = self.association;
        flow.generation = 1;
        flow.lifecycle = Lifecycle::Established;
        flow.marks = Marks::CONFIRMED | if self.authenticated { Marks::AUTHENTICATED } else { Marks::empty() };
        flow.direct = Direct::never(Why::Granted, now);
        flow.direct.carriage = Carriage::Direct;
        (flow.direct.local_port, flow.direct.peer_port) = self.ports(number);
        (flow.direct.peer, flow.direct.path) = (Some(self.host), self.grant.path.0);
        flow
    }

    /// The session of a flow, the same at both ends.
    fn session_of(&self, number: u16) -> SessionId {
        let mut session = self.session.0;
        if let Some(last) = session.last_chunk_mut::<4>() {
            *last = u32::from_be_bytes(*last).wrapping_add(u32::from(number) + 1).to_be_bytes();
        }
        SessionId(session)
    }
}

/// All grants of a host.
#[derive(Default)]
pub(crate) struct Grants {
    all: BTreeMap<FlowId, Box<Given>>,
    /// By the number of flow 0.
    by_first: BTreeMap<FlowId, FlowId>,
    deadlines: BTreeSet<(Instant, FlowId)>,
    demands: asking::Demands,
    /// The port that the next client is shown with, by a grant.
    next_port: u16,
    /// How often grants were ended whose like may be about to be given.
    ends: u64,
    /// Clients' addresses and ports that are kept for flows of grants.
    shown: BTreeSet<SocketAddr>,
    /// Hosts whose last grants were silent: how many, and until when that counts.
    silent: BTreeMap<HostId, (u8, Instant)>,
}

impl Grants {
    /// The grant that a number is of, and which of its flows it is.
    fn of_flow(&self, flow: FlowId) -> Option<(&Given, u16)> {
        let (_, id) = self.by_first.range(..=flow).next_back()?;
        let given = self.all.get(id)?;
        let number = u16::try_from(flow.0 - given.grant.first_flow.0).ok()?;
        (number < given.grant.count).then_some((given, number))
    }

    /// A grant of a host was silent.
    fn note_silent(&mut self, now: Instant, host: HostId) {
        self.silent.retain(|_, (_, until)| *until > now);
        let first = self.silent.iter().min_by_key(|(_, (_, until))| *until).map(|(host, _)| *host);
        if self.silent.len() >= SILENT_HOSTS_MAX && !self.silent.contains_key(&host) {
            first.and_then(|host| self.silent.remove(&host));
        }
        let (count, until) = self.silent.entry(host).or_default();
        (*count, *until) = (count.saturating_add(1), now + SILENT_REST);
    }

    /// Whether flows of a host's grants have no answer, lately.
    pub fn is_silent(&self, now: Instant, host: HostId) -> bool {
        self.silent.get(&host).is_some_and(|(count, until)| *count >= SILENT_MAX && now < *until)
    }

    /// Where programs' flows by these grants go.
    pub fn destinations(&self) -> impl Iterator<Item = IpAddr> {
        let open = self.all.values().filter(|given| given.is_initiators() && given.over.is_none());
        open.map(|given| given.grant.app.destination.ip())
    }

    /// Whether a client's address and port are kept for a flow of a grant.
    pub fn keeps(&self, client: SocketAddr) -> bool {
        self.shown.contains(&client)
    }

    /// Whether a number is a grant's or one of its flows'.
    pub fn has(&self, number: FlowId) -> bool {
        self.all.contains_key(&number) || self.of_flow(number).is_some()
    }

    /// The association and the peer's number of a grant that this end has given.
    pub fn given_by(&self, id: FlowId) -> Option<(u32, FlowId)> {
        let given = self.all.get(&id).filter(|given| !given.is_initiators() && given.over.is_none())?;
        Some((given.association, given.peer_grant))
    }

    pub fn len(&self) -> usize {
        self.all.len()
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// When something is to be done about it: flows may be opened no more, it is forgotten, or the kernel is asked.
    fn deadline_of(given: &Given) -> Instant {
        let end = given.over.unwrap_or(given.grant.until);
        given.survey.map_or(end, |survey| survey.min(end))
    }

    /// Changes what is known of a grant, and when something is to be done about it.
    fn change(&mut self, id: FlowId, change: impl FnOnce(&mut Given)) {
        let Some(given) = self.all.get_mut(&id) else { return };
        self.deadlines.remove(&(Self::deadline_of(given), id));
        change(given);
        self.deadlines.insert((Self::deadline_of(given), id));
    }
}

impl Sal {
    /// How many grants there are.
    pub fn grant_count(&self) -> usize {
        self.grants.len()
    }

    /// Both ends have agreed on a grant: the kernel may open flows by it. False where a number or a pair of ports has
    /// been taken meanwhile.
    fn take_up_grant(&mut self, now: Instant, mut given: Given) -> bool {
        let Grant { id, first_flow: FlowId(first), count, local_port, remote_port, .. } = given.grant;
        let Some(last) = first.checked_add(u32::from(count).saturating_sub(1)) else { return false };
        let ports = (given.host, local_port, remote_port);
        if self.grants.len() >= GRANTS_MAX
            || self.grants.all.contains_key(&id)
            || !self.grants.is_free_block(&self.flows, first, last)
            || !self.ports.claim_all(now, ports, given.is_initiators(), first..=last)
        {
            return false;
        }
        self.associations.hold_grant(&given);
        given.grant.record = record::encode(&given);
        given.survey = Some(now + SURVEYS);
        self.queue.update(EntryUpdate::Grant(Box::new(given.grant)));
        if given.is_initiators() {
            self.grants.demands.set_in_use(&given.grant, true);
        }
        self.grants.by_first.insert(FlowId(first), id);
        self.grants.shown.extend(given.shown());
        self.grants.deadlines.insert((Grants::deadline_of(&given), id));
        self.grants.all.insert(id, Box::new(given));
        true
    }

    /// The kernel's cache has opened a flow by a grant, and both ends have had a packet of it. `app` is the five-tuple
    /// of the program here, as its packets leave `sal0`.
    pub(crate) fn handle_opened(&mut self, now: Instant, flow: FlowId, app: &Tuple) {
        if let Some(entry) = self.open(now, flow, *app) {
            self.queue.update(EntryUpdate::Opened(entry));
            self.announce_opened(now, flow);
        }
    }

    /// A message from `from` names a flow of a grant of which the kernel has said nothing yet: at the responder all is
    /// known.
    pub(crate) fn open_as_agreed(&mut self, now: Instant, flow: FlowId, from: SocketAddr) {
        let Some((given, number)) = self.grants.of_flow(flow) else { return };
        let app = given.listener_tuple(number);
        let peer = self.associations.get(given.association).map(|association| association.remote);
        if !given.is_initiators()
            && peer == Some(from)
            && let Some(entry) = self.open(now, flow, app)
        {
            // The kernel takes this for the agent's word, whatever it has opened.
            self.queue.update(EntryUpdate::Install(entry));
            self.announce_opened(now, flow);
        }
    }

    /// A five-tuple is used again, by a SYN in this direction: what it was before is over. False where it is not.
    fn make_room(&mut self, app: &Tuple, direction: Direction) -> bool {
        let Some(id) = self.flows.by_tuple(app) else { return true };
        let is_over = self.flows.get(id).is_some_and(|flow| flow.is_over_for_syn(direction));
        if is_over {
            self.forget_over(id);
        }
        is_over
    }

    fn open(&mut self, now: Instant, id: FlowId, app: Tuple) -> Option<Entry> {
        let (given, number) = self.grants.of_flow(id)?;
        let (grant_id, association, host) = (given.grant.id, given.association, given.host);
        let is_news = given.unsettled() & 1 << number != 0 && self.flows.get(id).is_none();
        let flow = given.flow(id, number, app, now);
        let direction = if given.is_initiators() { Direction::Egress } else { Direction::Ingress };
        if !is_news || !self.make_room(&app, direction) {
            return None;
        }
        self.grants.change(grant_id, |given| given.told |= 1 << number);
        let entry = flow.entry();
        self.associations.hold_flow(association, flow.role);
        self.flows.insert(flow);
        self.associations.note_proof(association, Some(now));
        self.locations.note_data_passes(host);
        self.counters.flows_granted += 1;
        Some(entry)
    }

    /// Everybody may know of it. Where the kernel's cache has been taken off meanwhile, it goes by user space.
    fn announce_opened(&mut self, now: Instant, id: FlowId) {
        self.begin_rules(now, id);
        self.events.push(Event::FlowOpened(id));
        if !self.ports.is_direct_on() {
            self.direct_event(now, id, DirectEvent::Stalled, Why::NoCache);
        }
    }

    /// The grant by which the kernel may have opened the flow that a datagram names, without having told of it; and the
    /// flow's bit there. Whoever has the datagram for [`handle_datagram`](Self::handle_datagram) makes the kernel tell
    /// first.
    pub fn untold(&self, datagram: &[u8]) -> Option<(FlowId, u128)> {
        let flow = DataRepr::parse(datagram).map(|data| data.dst_flow);
        let flow = flow.or_else(|_| HeaderRepr::parse(datagram).map(|header| header.dst_flow)).ok()?;
        let (given, number) = self.grants.of_flow(flow)?;
        let bit = given.unsettled() & 1 << number;
        (bit != 0).then_some((given.grant.id, bit))
    }

    /// So many flows of a grant have been opened.
    pub(crate) fn handle_taken(&mut self, now: Instant, id: FlowId, taken: u16) {
        let Some(given) = self.grants.all.get_mut(&id).filter(|given| taken > given.taken) else { return };
        let more = taken - given.taken;
        given.taken = taken;
        let connects_to = given.is_initiators().then_some(given.grant.app.destination);
        if given.left() == 0 {
            self.stop_grant(id, LINGER_GRANTED);
        }
        if let Some(destination) = connects_to {
            self.note_connects(now, destination, more.into());
        }
    }

    /// What the kernel's cache says to [`Output::Survey`](crate::Output::Survey).
    pub(crate) fn handle_survey(&mut self, now: Instant, id: FlowId, survey: Survey) {
        let Some(given) = self.grants.all.get_mut(&id) else { return };
        let answered = survey.answered & given.unsettled();
        let brief = survey.over & answered;
        let lasting = answered & !brief;
        let is_news = answered & !given.waiting != 0;
        let told_now = if given.hurry.is_some() { lasting } else { lasting & given.waiting };
        (given.brief, given.waiting) = (given.brief | brief, lasting);
        let (is_silent, is_answered) = (given.note_silence(), given.is_initiators() && given.has_answers());
        let (association, host) = (given.association, given.host);
        let destination = given.grant.app.destination.ip();
        let taken = (given.told | given.brief | given.waiting).count_ones() as u16;
        if told_now != 0 {
            self.queue.tell(id, told_now);
        }
        if is_silent {
            self.end_silent(now, host);
        } else if is_answered {
            self.grants.silent.remove(&host);
        }
        if is_news {
            // Flows that are over before the core is told of them use their name, too. At a responder it is no lease.
            self.note_use_of_lease(destination);
            self.associations.note_proof(association, Some(now));
            self.locations.note_data_passes(host);
        }
        for _ in 0..brief.count_ones() {
            self.counters.flows_granted += 1;
            self.counters.flows_brief += 1;
            self.counters.removed(RemoveReason::Closed);
        }
        // Its word of that may have been lost.
        self.handle_taken(now, id, taken);
    }

    /// Nobody answers the SYNs of a grant: after a few such, no program waits for any other of that host's.
    fn end_silent(&mut self, now: Instant, host: HostId) {
        self.counters.grants_silent += 1;
        self.grants.note_silent(now, host);
        if self.grants.is_silent(now, host) {
            self.end_grants(false, |given| given.is_initiators() && given.host == host);
        }
    }

    /// Nothing is opened by these grants any more; with `is_said`, clients are told.
    fn end_grants(&mut self, is_said: bool, ends: impl Fn(&Given) -> bool) {
        let open = self.grants.all.values().filter(|given| given.over.is_none() && ends(given));
        for id in open.map(|given| given.grant.id).collect::<Vec<_>>() {
            self.stop_grant(id, SETTLING);
            let Some(given) = self.grants.all.get(&id).filter(|given| is_said && !given.is_initiators()) else {
                continue;
            };
            let (association, peer_grant) = (given.association, given.peer_grant);
            let extensions = [Extension::Error(ErrorRepr { code: ErrorCode::Closed, text: "" })];
            let mut draft = Draft::new(Kind::Fail, peer_grant, id);
            draft.extensions = &extensions;
            self.seal_and_send(association, draft);
        }
    }

    /// What leads to names of a prefix, or who may come by it, has changed.
    pub(crate) fn end_grants_under(&mut self, prefix: &Prefix) {
        self.end_grants(true, |given| prefix.contains(&given.service));
    }

    /// An address stands for another name now.
    pub(crate) fn end_grants_to(&mut self, address: IpAddr) {
        self.end_grants(false, |given| given.is_initiators() && given.grant.app.destination.ip() == address);
    }

    /// A host's rights have changed, or it has started anew.
    pub(crate) fn end_grants_with(&mut self, is_it: impl Fn(u32, HostId) -> bool) {
        self.grants.ends += 1;
        self.end_grants(true, |given| is_it(given.association, given.host));
    }

    /// The programs here connect otherwise now.
    pub(crate) fn end_own_grants(&mut self) {
        self.grants.ends += 1;
        self.end_grants(false, Given::is_initiators);
    }

    /// Nothing is opened any more.
    pub(crate) fn end_all_grants(&mut self) {
        self.grants.ends += 1;
        self.end_grants(true, |_| true);
    }

    /// The peer says that a grant is over. False if the number is no grant's.
    pub(crate) fn handle_grant_end(&mut self, id: FlowId, association: u32) -> bool {
        let Some(given) = self.grants.all.get(&id) else { return false };
        if self.associations.is_same_peer(given.association, association) {
            self.stop_grant(id, SETTLING);
        }
        true
    }

    /// No flow is opened by a grant any more. It is forgotten after `rest`.
    fn stop_grant(&mut self, id: FlowId, rest: Duration) {
        let over = self.now + rest;
        let Some(given) = self.grants.all.get(&id) else { return };
        let (was_over, is_initiators, grant) = (given.over.is_some(), given.is_initiators(), given.grant);
        self.grants.change(id, |given| given.over = Some(given.over.map_or(over, |before| before.min(over))));
        if was_over {
            return;
        }
        if is_initiators {
            self.grants.demands.set_in_use(&grant, false);
        }
        self.counters.grants_ended += 1;
        self.queue.update(EntryUpdate::StopGrant(id));
    }

    /// Whoever was opened by a grant that is over is told of, if it lasts; after that the grant is forgotten.
    fn end_grant(&mut self, now: Instant, id: FlowId) {
        let Some(given) = self.grants.all.get(&id) else { return };
        let unsettled = given.unsettled();
        if given.is_last || unsettled == 0 {
            self.forget_grant(id);
            return;
        }
        self.grants.change(id, |given| {
            (given.is_last, given.survey, given.over) = (true, None, Some(now + SURVEYS));
        });
        self.queue.tell(id, unsettled);
    }

    fn forget_grant(&mut self, id: FlowId) {
        let Some(given) = self.grants.all.remove(&id) else { return };
        self.grants.deadlines.remove(&(Grants::deadline_of(&given), id));
        self.grants.by_first.remove(&given.grant.first_flow);
        for client in given.shown() {
            self.grants.shown.remove(&client);
        }
        for number in (0..given.grant.count).filter(|number| !given.is_told(*number)) {
            let (local_port, peer_port) = given.ports(number);
            self.ports.rest(self.now, (given.host, local_port, peer_port));
        }
        self.queue.update(EntryUpdate::RemoveGrant(id));
        self.associations.release(given.association);
        self.associations.release(given.grant.path.0);
    }

    /// Grants about which something is to be done.
    pub(crate) fn grants_due(&mut self, now: Instant) {
        while let Some(&(at, id)) = self.grants.deadlines.first().filter(|(at, _)| *at <= now) {
            match self.grants.all.get(&id) {
                Some(given) if given.survey.is_some_and(|survey| survey <= now) => {
                    self.grants.survey(&mut self.queue, now, id)
                }
                Some(given) if given.over.is_some() => self.end_grant(now, id),
                Some(_) => self.stop_grant(id, SETTLING),
                None => {
                    self.grants.deadlines.remove(&(at, id));
                }
            }
        }
    }

    /// Forgets a flow that is over before its time.
    pub(crate) fn forget_over(&mut self, id: FlowId) {
        if self.flows.get(id).is_some_and(|flow| flow.has(Marks::FAILED)) {
            self.take_flow(id);
        } else {
            self.remove_flow(id, RemoveReason::Closed);
        }
    }
}

impl Grants {
    /// A number for flow 0 of so many, all of them free.
    fn fresh_block(&self, flows: &FlowTable, rng: &mut Rng, count: u16) -> FlowId {
        loop {
            let first = rng.u32();
            let Some(last) = first.checked_add(u32::from(count) - 1).filter(|_| first != 0) else { continue };
            if self.is_free_block(flows, first, last) {
                return FlowId(first);
            }
        }
    }

    fn is_free_block(&self, flows: &FlowTable, first: u32, last: u32) -> bool {
        let is_free = |number: u32| flows.get(FlowId(number)).is_none() && !self.has(FlowId(number));
        let begins_inside = self.by_first.range(FlowId(first)..=FlowId(last)).next().is_some();
        !begins_inside && (first..=last).all(is_free)
    }

    /// Rules have come to be about names. Flows of those that the kernel has opened go plain until the core knows them.
    pub fn hurry(&mut self, now: Instant, is_ruled: impl Fn(&ServiceId) -> bool) {
        let ruled = self.all.values().filter(|given| given.unsettled() != 0 && is_ruled(&given.service));
        for id in ruled.map(|given| given.grant.id).collect::<Vec<_>>() {
            self.change(id, |given| given.hurry(now));
        }
    }

    /// Asks the kernel what has become of the flows of a grant.
    fn survey(&mut self, queue: &mut OutputQueue, now: Instant, id: FlowId) {
        let Some(unsettled) = self.all.get(&id).map(|given| given.unsettled()) else { return };
        self.change(id, |given| {
            given.survey = (unsettled != 0).then_some(now + given.hurry.unwrap_or(SURVEYS));
            given.hurry = given.hurry.map(|after| (2 * after).min(SURVEYS));
        });
        if unsettled != 0 {
            queue.survey(id, unsettled);
        }
    }
}

impl AssociationTable {
    /// Keeps what a grant names until it is forgotten. The path record may be another association's, whose own flows
    /// are over: without it, the kernels would open nothing by the grant, nor find what they have opened.
    fn hold_grant(&mut self, given: &Given) {
        self.hold(given.association);
        self.hold(given.grant.path.0);
    }
}
