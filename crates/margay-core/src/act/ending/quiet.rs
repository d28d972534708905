//! Quiet ends: a drained instance asks the client's host to end a connection that carries nothing, in order
//! (docs/decisions/0066). The core checks who asks and about which flow; whether the connection is quiet, the agent
//! sees at the client's own socket, and ends it there.

use alloc::collections::BTreeMap;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use margay_wire::{ErrorCode, ErrorRepr, Extension, Flags, FlowId, Kind, Message, QuietRepr};

use crate::association::Association;
use crate::association::auth::Verified;
use crate::association::draft::Draft;
use crate::machine::sal::Sal;
use crate::session::flow::Flow;
use crate::session::{Act, LockError};
use crate::types::drop_reason::DropReason;
use crate::types::fair_table::{FairTable, Peer};
use crate::types::role::{Lifecycle, Role};
use crate::types::time::Instant;
use crate::types::tuple::Tuple;

/// A connection counts as quiet after so long at the soonest.
pub const QUIET_MS_MIN: u32 = 10;
/// And at the latest.
pub const QUIET_MS_MAX: u32 = 600_000;
/// Unless the operator says otherwise.
pub const QUIET_MS_DEFAULT: u32 = 1000;
/// Requests that wait for the agent. Of more nothing is kept: the instance asks again.
const REQUESTS_MAX: usize = 8192;
const TCP: u8 = 6;

/// A connection of a program here that its peer wants to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuietRequest {
    /// This host's number of the flow.
    pub flow: FlowId,
    /// The five-tuple of the program's socket.
    pub app: Tuple,
    /// It ends only if it has carried nothing for so long, in milliseconds.
    pub quiet_ms: u32,
}

/// What a client's host has made of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QuietAnswer {
    /// Its program has been told the end of the stream.
    Ended,
    /// The connection cannot be ended now. The text says why, where the reason is not that it carries something.
    NotNow(String),
}

/// What has been asked, at either end.
#[derive(Debug)]
pub(crate) struct QuietEnds {
    /// Of programs here that have connected, for the agent.
    requests: FairTable<FlowId, QuietRequest>,
    /// The agent does not know of all of them.
    has_news: bool,
    /// Of services here: what was asked of clients' hosts, and what they have said.
    asked: BTreeMap<FlowId, Option<QuietAnswer>>,
}

impl Default for QuietEnds {
    fn default() -> Self {
        Self { requests: FairTable::new(REQUESTS_MAX, REQUESTS_MAX), has_news: false, asked: BTreeMap::new() }
    }
}

impl QuietEnds {
    /// How often a peer's request found no room.
    pub const fn refused(&self) -> u64 {
        self.requests.refused()
    }

    pub const fn has_news(&self) -> bool {
        self.has_news
    }

    pub const fn take_news(&mut self) -> bool {
        core::mem::replace(&mut self.has_news, false)
    }

    /// The flow is gone.
    pub fn forget(&mut self, id: FlowId) {
        self.requests.remove(&id);
        self.asked.remove(&id);
    }

    fn request(&mut self, peer: Peer, request: QuietRequest) -> Result<(), DropReason> {
        self.requests.insert(peer, request.flow, request).map_err(|_| DropReason::Full)?;
        self.has_news = true;
        Ok(())
    }
}

impl Sal {
    /// Asks the host of a client to end a connection that a program here serves, if it has carried nothing for
    /// `quiet_ms` milliseconds. Its answer comes by [`take_quiet_answer`](Self::take_quiet_answer), or never: nobody
    /// sends a request again but the caller. False where the flow is not an open connection of a service here.
    pub fn ask_quiet_end(&mut self, now: Instant, id: FlowId, quiet_ms: u32) -> bool {
        self.now = now;
        let is_asked = |flow: &&Flow| is_open(flow, Role::Responder) && !self.fetches.is_between(id);
        let Some(flow) = self.flows.get(id).filter(is_asked) else { return false };
        let (association, peer_flow) = (flow.association, flow.peer_flow);
        let extensions = [Extension::Quiet(QuietRepr { quiet_ms })];
        let mut draft = Draft::new(Kind::Fin, peer_flow, id);
        draft.extensions = &extensions;
        self.quiet_ends.asked.insert(id, None);
        self.seal_and_send(association, draft);
        true
    }

    /// What the host of a client has said last since it was asked, once.
    pub fn take_quiet_answer(&mut self, id: FlowId) -> Option<QuietAnswer> {
        let answer = self.quiet_ends.asked.get(&id)?.clone()?;
        self.quiet_ends.asked.remove(&id);
        Some(answer)
    }

    /// What peers have asked since this was called last, of connections of programs here. Until a request is answered,
    /// and for five seconds at most, no other act changes its session; one that another act is at work on by now is
    /// left out, and is asked again by the peer.
    pub fn take_quiet_requests(&mut self, now: Instant) -> Vec<QuietRequest> {
        self.now = now;
        let mut requests: Vec<QuietRequest> = self.quiet_ends.requests.values().copied().collect();
        self.quiet_ends.requests.retain(|_, _| false);
        requests.retain(|request| self.lock_for_quiet_end(now, request.flow).is_ok());
        requests
    }

    fn lock_for_quiet_end(&mut self, now: Instant, id: FlowId) -> Result<(), LockError> {
        let association = self.flows.get(id).and_then(|flow| self.associations.get(flow.association));
        let host = association.map_or(self.config.host_id(), |association| association.host);
        self.lock_flow(now, id, Act::Drain, host)
    }

    /// Answers a request: the program has been told the end of the stream, or why it has not. A text that is empty says
    /// that the connection carries something; one that is too long is cut.
    pub fn answer_quiet_end(&mut self, now: Instant, id: FlowId, answer: &QuietAnswer) {
        self.now = now;
        self.unlock_flow(now, id, Act::Drain);
        let Some(flow) = self.flows.get(id).filter(|flow| flow.association != 0) else { return };
        let (association, peer_flow) = (flow.association, flow.peer_flow);
        let refusal = match answer {
            QuietAnswer::Ended => None,
            QuietAnswer::NotNow(text) => {
                let text = &text[..text.floor_char_boundary(margay_wire::ERROR_TEXT_MAX)];
                Some(Extension::Error(ErrorRepr { code: ErrorCode::NotQuiet, text }))
            }
        };
        let mut draft = Draft::new(Kind::Fin, peer_flow, id);
        draft.flags = Flags::CONFIRM;
        draft.extensions = refusal.as_slice();
        self.seal_and_send(association, draft);
    }

    /// A tagged FIN: an instance asks for a quiet end, or a client's host answers.
    pub(crate) fn handle_fin(&mut self, now: Instant, message: &Verified<'_>) -> Result<(), DropReason> {
        let association = message.association();
        let of_peer = |flow: &&Flow| self.associations.is_same_peer(flow.association, association);
        let flow = self.flows.get(message.dst_flow).filter(of_peer).ok_or(DropReason::UnknownFlow)?;
        let (id, app) = (flow.id, flow.app);
        if message.flags.contains(Flags::CONFIRM) {
            let asked = self.quiet_ends.asked.get_mut(&id).ok_or(DropReason::Unexpected)?;
            *asked = Some(answer_of(message));
            return Ok(());
        }
        if !is_open(flow, Role::Initiator) {
            return Err(DropReason::Unexpected);
        }
        let quiet = message.quiet().ok_or(DropReason::Unexpected)?;
        let quiet_ms = quiet.quiet_ms.clamp(QUIET_MS_MIN, QUIET_MS_MAX);
        if let Err(busy) = self.lock_for_quiet_end(now, id) {
            self.answer_quiet_end(now, id, &QuietAnswer::NotNow(busy.to_string()));
            return Ok(());
        }
        let peer = self.associations.get(message.association()).map_or(Peer::Own, Association::peer);
        let noted = self.quiet_ends.request(peer, QuietRequest { flow: id, app, quiet_ms });
        if noted.is_err() {
            self.unlock_flow(now, id, Act::Drain);
        }
        noted
    }
}

/// A connection that neither end has begun to close, and whose client is at the other end of this flow: no box is
/// between.
fn is_open(flow: &Flow, role: Role) -> bool {
    let is_plain_tcp = flow.app.protocol == TCP && flow.chain.is_none();
    is_plain_tcp && flow.role == role && flow.lifecycle == Lifecycle::Established && flow.association != 0
}

/// The text of a peer is for an operator's terminal: nothing in it may turn that.
fn answer_of(message: &Message<'_>) -> QuietAnswer {
    message.error().map_or(QuietAnswer::Ended, |error| {
        QuietAnswer::NotNow(error.text.chars().filter(|letter| !letter.is_control()).collect())
    })
}

#[cfg(test)]
mod test {
    use core::net::SocketAddr;
    use core::time::Duration;

    use super::*;
    use crate::act::handover::HandoverRecord;
    use crate::act::handover::tests::{meet_peer, record, sal};
    use crate::cache::output::Output;
    use crate::machine::control::AssociationSetup;
    use crate::machine::input::Input;
    use crate::session::{Holder, LockGuardId};
    use crate::trust::handshake::Keys;
    use crate::types::config::Limits;
    use crate::types::key::{HostId, HostPublic};

    const FROM: SocketAddr = SocketAddr::new(core::net::IpAddr::V4(core::net::Ipv4Addr::new(10, 0, 0, 2)), 54324);
    const EPOCH: u32 = 1;

    /// The peer's end of what `meet_peer` has installed, or of another host's.
    fn peers_end(index: u32, key: u8) -> Association {
        let own = HostPublic([8; 32]);
        let mut end = Association::new(3, index, own, Keys { root: [key; 32] }, false, FROM);
        end.peer_epoch = EPOCH;
        end
    }

    fn open(role: Role) -> HandoverRecord {
        HandoverRecord { role, lifecycle: Lifecycle::Established, fins: (false, false), ..record() }
    }

    fn with_flow(record: &HandoverRecord) -> Sal {
        let mut sal = sal(Limits::default());
        meet_peer(&mut sal, 77);
        sal.adopt_flow(Instant::ZERO, record).expect("the peer is known");
        said(&mut sal);
        sal
    }

    fn question(flow: FlowId, quiet_ms: u32, association: &mut Association) -> Vec<u8> {
        let extensions = [Extension::Quiet(QuietRepr { quiet_ms })];
        let mut draft = Draft::new(Kind::Fin, flow, FlowId(9));
        draft.extensions = &extensions;
        draft.seal(association, EPOCH).expect("it fits")
    }

    /// What is sent now, and whether the agent has something to look at.
    fn said(sal: &mut Sal) -> (Vec<Vec<u8>>, bool) {
        let (mut sent, mut has_news, mut buf) = (Vec::new(), false, [0; 2048]);
        while let Some(output) = sal.poll(&mut buf) {
            match output {
                Output::Transmit { len, .. } => sent.push(buf[..len].to_vec()),
                Output::QuietEnds => has_news = true,
                _ => {}
            }
        }
        (sent, has_news)
    }

    fn requests(sal: &mut Sal) -> Vec<QuietRequest> {
        sal.take_quiet_requests(Instant::from_millis(6))
    }

    fn hear(sal: &mut Sal, datagram: &[u8]) -> Result<(), DropReason> {
        sal.handle_datagram(Instant::from_millis(5), None, FROM, datagram)
    }

    #[test]
    fn the_agent_hears_of_what_the_peer_of_an_open_connection_asks() {
        for (asked, heard) in [(50, 50), (0, QUIET_MS_MIN), (u32::MAX, QUIET_MS_MAX)] {
            let record = open(Role::Initiator);
            let mut sal = with_flow(&record);
            let mut peer = peers_end(77, 1);
            assert_eq!(hear(&mut sal, &question(record.flow, asked, &mut peer)), Ok(()));
            assert_eq!(hear(&mut sal, &question(record.flow, asked, &mut peer)), Ok(()), "asked again");
            assert!(said(&mut sal).1 && !said(&mut sal).1, "said once");
            let app = record.app().expect("it has one");
            assert_eq!(requests(&mut sal), [QuietRequest { flow: record.flow, app, quiet_ms: heard }]);
            assert!(requests(&mut sal).is_empty());
        }
    }

    #[test]
    fn nobody_else_may_ask_and_about_nothing_else() {
        let udp = |record: HandoverRecord| {
            let mut legs = record.legs.clone();
            legs[0].tuple = legs[0].tuple.map(|tuple| Tuple { protocol: 17, ..tuple });
            HandoverRecord { legs, ..record }
        };
        let half_closed =
            HandoverRecord { lifecycle: Lifecycle::HalfClosed, fins: (true, false), ..open(Role::Initiator) };
        for record in [open(Role::Responder), udp(open(Role::Initiator)), half_closed] {
            let mut sal = with_flow(&record);
            let asked = question(record.flow, 50, &mut peers_end(77, 1));
            assert_eq!(hear(&mut sal, &asked), Err(DropReason::Unexpected), "{:?}", record.lifecycle);
            assert!(requests(&mut sal).is_empty());
        }
        let record = open(Role::Initiator);
        let mut sal = with_flow(&record);
        let other = AssociationSetup {
            host_key: [4; 32],
            key: [2; 32],
            local_id: 78,
            remote_id: 3,
            peer_epoch: EPOCH,
            boot_id: None,
            remote: FROM,
            hop_key: None,
            router: false,
            initiator: true,
        };
        sal.install_association(Instant::ZERO, other);
        let of_other = question(record.flow, 50, &mut peers_end(78, 2));
        assert_eq!(hear(&mut sal, &of_other), Err(DropReason::UnknownFlow));
        let of_stranger = question(record.flow, 50, &mut peers_end(77, 5));
        assert_eq!(hear(&mut sal, &of_stranger), Err(DropReason::BadTag));
        let bare = Draft::new(Kind::Fin, record.flow, FlowId(9)).seal(&mut peers_end(77, 1), EPOCH).expect("it fits");
        assert_eq!(hear(&mut sal, &bare), Err(DropReason::Unexpected), "nothing is asked");
        assert!(requests(&mut sal).is_empty() && !said(&mut sal).1);
    }

    #[test]
    fn what_waits_for_the_agent_is_bounded_and_gone_with_its_flow() {
        let mut ends = QuietEnds::default();
        let request = |n| QuietRequest { flow: FlowId(n), app: record().app().expect("it has one"), quiet_ms: 50 };
        let bound = u32::try_from(REQUESTS_MAX).expect("small");
        let [one, other] = [1, 2].map(|n| Peer::Member(HostId([n; 16])));
        let got = (1..=bound).filter(|n| ends.request(one, request(*n)).is_ok()).count();
        assert_eq!(got, REQUESTS_MAX / 16, "the share of one peer");
        assert_eq!(ends.request(one, request(bound)), Err(DropReason::Full));
        assert_eq!(ends.request(one, request(1)), Ok(()), "the same again");
        assert_eq!(ends.request(other, request(bound)), Ok(()));
        let record = open(Role::Initiator);
        let mut sal = with_flow(&record);
        assert_eq!(hear(&mut sal, &question(record.flow, 50, &mut peers_end(77, 1))), Ok(()));
        sal.close_flow(Instant::from_millis(6), record.flow);
        sal.handle(Instant::from_millis(600_000), Input::Timeout);
        assert!(sal.flow(record.flow).is_none() && requests(&mut sal).is_empty());
    }

    /// The lock of a flow's session, taken for another act.
    fn take_lock(sal: &mut Sal, flow: FlowId, act: Act, now: Instant) -> LockGuardId {
        let session = sal.flow(flow).expect("there").session;
        let holder = Holder { host: sal.config.host_id(), act };
        sal.locks
            .acquire(crate::types::fair_table::Peer::Own, session, holder, now, Duration::from_secs(1))
            .expect("free")
    }

    #[test]
    fn a_quiet_end_waits_while_another_act_has_the_session() {
        let record = open(Role::Initiator);
        for act in [Act::Move, Act::Stack, Act::HandOver] {
            let mut sal = with_flow(&record);
            let mut peer = peers_end(77, 1);
            let guard = take_lock(&mut sal, record.flow, act, Instant::from_millis(1));
            assert_eq!(hear(&mut sal, &question(record.flow, 50, &mut peer)), Ok(()));
            let (sent, has_news) = said(&mut sal);
            let answer = Message::parse(&sent[0]).expect("our own");
            assert_eq!((answer.kind, answer.flags, has_news), (Kind::Fin, Flags::CONFIRM, false));
            let error = answer.error().expect("not now");
            assert_eq!(error.code, ErrorCode::NotQuiet);
            assert!(error.text.contains(&act.to_string()), "{}", error.text);
            sal.locks.release(guard, Instant::from_millis(5)).expect("held");
            assert_eq!(hear(&mut sal, &question(record.flow, 50, &mut peer)), Ok(()));
            assert_eq!(requests(&mut sal).len(), 1, "after {act}");
        }
    }

    #[test]
    fn a_quiet_end_keeps_other_acts_away_until_it_is_answered_or_its_lease_has_ended() {
        let record = open(Role::Initiator);
        let asked = || {
            let mut sal = with_flow(&record);
            assert_eq!(hear(&mut sal, &question(record.flow, 50, &mut peers_end(77, 1))), Ok(()));
            assert_eq!(sal.locked_sessions(Instant::from_millis(5)), 1);
            sal
        };
        for answer in [QuietAnswer::Ended, QuietAnswer::NotNow(String::new())] {
            let mut sal = asked();
            assert_eq!(requests(&mut sal).len(), 1);
            assert_eq!(sal.locked_sessions(Instant::from_millis(6)), 1, "the agent looks at the socket");
            sal.answer_quiet_end(Instant::from_millis(7), record.flow, &answer);
            assert_eq!(sal.locked_sessions(Instant::from_millis(7)), 0);
        }
        let late = Instant::from_millis(6000);
        let mut sal = asked();
        take_lock(&mut sal, record.flow, Act::HandOver, late);
        assert!(sal.take_quiet_requests(late).is_empty(), "its turn is over");
        let mut sal = asked();
        assert_eq!(sal.take_quiet_requests(late).len(), 1, "nobody else has taken the lock");
        assert_eq!(sal.locked_sessions(late), 1);
        sal.close_flow(late, record.flow);
        sal.handle(late + Duration::from_secs(600), Input::Timeout);
        assert_eq!(sal.locked_sessions(late), 0, "gone with its flow");
    }

    #[test]
    fn an_answer_is_to_a_question_alone_and_may_come_again() {
        let record = open(Role::Responder);
        let mut sal = with_flow(&record);
        let mut peer = peers_end(77, 1);
        let mut answer = |refusal: Option<&str>| {
            let error = refusal.map(|text| Extension::Error(ErrorRepr { code: ErrorCode::NotQuiet, text }));
            let mut draft = Draft::new(Kind::Fin, record.flow, FlowId(9));
            draft.flags = Flags::CONFIRM;
            draft.extensions = error.as_slice();
            draft.seal(&mut peer, EPOCH).expect("it fits")
        };
        assert_eq!(hear(&mut sal, &answer(None)), Err(DropReason::Unexpected), "nobody has asked");
        assert!(sal.ask_quiet_end(Instant::from_millis(5), record.flow, 50));
        let (sent, _) = said(&mut sal);
        let question = Message::parse(&sent[0]).expect("our own");
        assert_eq!((question.kind, question.dst_flow, question.src_flow), (Kind::Fin, record.peer_flow, record.flow));
        assert_eq!(question.quiet(), Some(QuietRepr { quiet_ms: 50 }));
        assert_eq!(sal.take_quiet_answer(record.flow), None);
        assert_eq!(hear(&mut sal, &answer(Some("in a\u{1b}[2J container"))), Ok(()));
        let text = "in a[2J container".into();
        assert_eq!(sal.take_quiet_answer(record.flow), Some(QuietAnswer::NotNow(text)));
        assert!(sal.ask_quiet_end(Instant::from_millis(6), record.flow, 50));
        assert_eq!(hear(&mut sal, &answer(None)), Ok(()));
        assert_eq!(hear(&mut sal, &answer(None)), Ok(()));
        assert_eq!(sal.take_quiet_answer(record.flow), Some(QuietAnswer::Ended));
        assert_eq!(sal.take_quiet_answer(record.flow), None);
        assert!(!sal.ask_quiet_end(Instant::from_millis(7), FlowId(5), 50), "no such flow");
    }

    #[test]
    fn what_the_agent_says_goes_to_the_peer() {
        let record = open(Role::Initiator);
        let mut sal = with_flow(&record);
        let long = "no socket ".repeat(30);
        for (answer, text) in [
            (QuietAnswer::Ended, None),
            (QuietAnswer::NotNow(String::new()), Some("")),
            (QuietAnswer::NotNow(long.clone()), Some(&long[..margay_wire::ERROR_TEXT_MAX])),
        ] {
            sal.answer_quiet_end(Instant::from_millis(5), record.flow, &answer);
            let (sent, _) = said(&mut sal);
            let message = Message::parse(&sent[0]).expect("our own");
            assert_eq!((message.kind, message.flags, message.dst_flow), (Kind::Fin, Flags::CONFIRM, record.peer_flow));
            let error = text.map(|text| ErrorRepr { code: ErrorCode::NotQuiet, text });
            assert_eq!(message.error(), error);
        }
        sal.answer_quiet_end(Instant::from_millis(6), FlowId(5), &QuietAnswer::Ended);
        assert!(said(&mut sal).0.is_empty(), "no such flow");
    }
}
