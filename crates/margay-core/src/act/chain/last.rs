//! What a responder makes of a SYN's chain, and what it asks of its neighbour: a box's host, or the client's.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv6Addr, SocketAddr};

use margay_wire::{BoxFlags, BoxRepr, ErrorCode, Flags, FlowId, Message};

use super::adding::Begun;
use super::proof::{Doubt, Origin, Signed};
use super::{ChainSetup, Chained, Place, is_for, service_of};
use crate::association::draft::{Arrival, Reply};
use crate::machine::sal::Sal;
use crate::session::flow::{Flow, Setup};
use crate::table::middlebox::Middlebox;
use crate::table::{Action, Allow, Demux, RuleId};
use crate::types::drop_reason::DropReason;
use crate::types::key::HostId;
use crate::types::name::ServiceId;
use crate::types::time::Instant;
use crate::types::tuple::GREETING;

/// A SYN's chain as its receiver sees it.
#[derive(Default)]
pub(crate) struct Read {
    pub chained: Option<Box<Chained>>,
}

/// A session that this host refuses. Its chain was read all the same: the refusal may have to go back through it.
pub(crate) struct Refused {
    pub read: Read,
    pub code: ErrorCode,
    /// Of a session that ends here: a box that was added on the way and is not to be, from 1; 0: there is none such.
    pub unnamed: u8,
}

/// Whether a SYN's session may be had here, as far as that is known before its sender is proved. Nothing is granted and
/// nothing is set up without looking: the chain itself is inside.
pub(crate) type Ruling = Result<Read, Refused>;

impl Read {
    /// Whether a box is to see the session next.
    pub fn is_at_box(&self) -> bool {
        self.chained.as_ref().is_some_and(|chained| chained.is_left())
    }

    /// The session is refused if there is a `code` for it.
    pub fn ruled(self, code: Option<ErrorCode>) -> Ruling {
        match code {
            Some(code) => Err(Refused { read: self, code, unnamed: 0 }),
            None => Ok(self),
        }
    }
}

impl Refused {
    /// What a half-open flow keeps of a ruling, and which box of the chain a refusal is about.
    pub fn apart(ruling: Ruling) -> (Read, Result<(), ErrorCode>, u8) {
        match ruling {
            Ok(read) => (read, Ok(()), 0),
            Err(refused) => {
                let number = refused.box_number();
                (refused.read, Err(refused.code), number)
            }
        }
    }

    /// Which box of the chain the refusal is about, from 1; 0: none.
    fn box_number(&self) -> u8 {
        match self.read.chained.as_ref().map(|chained| chained.place) {
            Some(Place::Left { at }) => at as u8 + 1,
            _ => self.unnamed,
        }
    }
}

impl Sal {
    /// A SYN with a chain that has come to a listener or to a box, or one without that has come to a box.
    pub(crate) fn handle_chained(
        &mut self,
        now: Instant,
        from: SocketAddr,
        message: &Message<'_>,
        datagram: &[u8],
        rule: RuleId,
    ) -> Result<(), DropReason> {
        let resolvable = message.resolvable.ok_or(DropReason::Malformed)?;
        let (_, known) = self.table.get(rule).ok_or(DropReason::NoService)?;
        let (demux, is_box) = match &known.action {
            Action::Demux(demux) => (demux.clone(), false),
            Action::Box(middlebox) => (middlebox.listener().unwrap_or_else(|| listener_of(middlebox)), true),
            _ => return Err(DropReason::NoService),
        };
        self.table.note_use(now, rule);
        let service = ServiceId(resolvable.service);
        let reply =
            Reply { is_copy: message.flags.contains(Flags::COPIED), ..self.reply_path(from, &resolvable, datagram) };
        let syn_len = datagram.len();
        let (nonce, port) = (resolvable.nonce, message.session().map_or(0, |session| session.service_port));
        let arrival = Arrival { message, service, port, reply, syn_len, nonce, app: None };
        let is_alone = message.grant().is_none() && message.handover().is_none();
        if is_alone && is_for(message.chain().as_ref(), &service, is_box) {
            return self.respond(now, &arrival, &demux);
        }
        // A box takes nothing but sessions that go through it, and a listener is no box.
        let claimed = message.key_exchange().map(|exchange| HostId(exchange.host_id));
        let known = claimed.and_then(|host| self.associations.by_host(host)).map(|association| association.local_id);
        if let Some(known) = known.filter(|_| self.answers.take(now)) {
            self.refuse_syn(&arrival, known, ErrorCode::Refused);
        }
        Err(DropReason::Unexpected)
    }

    /// Reads the chain of a SYN, and rules on it. A service that demands boxes refuses a session without them.
    ///
    /// # Errors
    ///
    /// The session was here already, or the message says two things.
    pub(crate) fn read_chain(
        &mut self,
        now: Instant,
        arrival: &Arrival<'_>,
        allow: &Allow,
    ) -> Result<Ruling, DropReason> {
        let session = arrival.message.session().ok_or(DropReason::Malformed)?;
        let Some(chain) = arrival.message.chain() else {
            let policy = &self.chains.policy;
            let is_required =
                policy.required_for(&arrival.service).next().is_some() || policy.has_lapsed(&arrival.service);
            return Ok(Read::default().ruled(is_required.then_some(ErrorCode::ChainRequired)));
        };
        let exchange = arrival.message.key_exchange().ok_or(DropReason::Malformed)?;
        let boxes: Vec<BoxRepr> = chain.boxes().collect();
        let hosts: Vec<HostId> = chain.hosts().map(HostId).collect();
        let ahead = boxes.iter().position(BoxRepr::is_ahead);
        let (place, is_other_kind) = ahead.map_or((Place::Last, false), |at| self.place_at_box(at, &boxes, &session));
        let mut origin = Origin::of(&chain);
        let is_end = matches!(place, Place::Last | Place::Proxy { .. });
        let begin = arrival.message.reconfiguration();
        if is_end && begin.is_none() && self.chains.heard.has(&session.session, self.unix_s()) {
            return Err(DropReason::Replayed);
        }
        let is_sound = hosts.last().copied().unwrap_or(origin.host_key.id()) == HostId(exchange.host_id);
        // Whoever asked for a proxy has begun no session that goes on behind it.
        let is_over = place == Place::Last && boxes.iter().any(|one| one.flags.contains(BoxFlags::ENDS));
        if !is_sound || is_over || boxes.iter().any(is_left_out_unasked) {
            return Err(DropReason::Malformed);
        }
        let destination = ServiceId(chain.destination());
        let demanding = if place == Place::Last { &destination } else { &arrival.service };
        let passed = boxes.iter().filter(|one| one.flags.contains(BoxFlags::PASSED));
        let passed: Vec<(ServiceId, bool)> =
            passed.map(|one| (service_of(one), one.flags.contains(BoxFlags::ADDED))).collect();
        let policy = &self.chains.policy;
        let lacks_box = is_end && (policy.lacks_box(demanding, &passed) || policy.has_lapsed(demanding));
        let begun =
            Begun { service: &destination, protocol: session.protocol, port: session.service_port, origin: &origin };
        let unnamed = if is_end { self.unnamed_box(&begun, &boxes) } else { None };
        let other_kind = if begin.is_some() { ErrorCode::BoxNeedsFirst } else { ErrorCode::BoxOtherKind };
        let mut refusal = unnamed.map(|_| ErrorCode::BoxUnknown).or(is_other_kind.then_some(other_kind));
        refusal = refusal.or(lacks_box.then_some(ErrorCode::ChainRequired));
        if refusal.is_none() && self.chains.early.take(now) {
            let signed = Signed {
                session: session.session,
                destination: &destination,
                protocol: session.protocol,
                port: session.service_port,
                boxes: &boxes,
                change: begin.map_or(0, |begin| begin.number),
            };
            let checked = self.check_origin(&origin, &signed, (&arrival.service, allow));
            (origin.is_checked, refusal) = (checked.is_ok(), checked.err().map(Doubt::code));
        }
        // Whoever sent the first box's host the SYN is seen by that host alone.
        let is_first = hosts.is_empty();
        let seen = SocketAddr::new(arrival.reply.direct.ip(), session.client.port());
        let client = if is_first { seen } else { session.client };
        let port = session.service_port;
        let setup = Some(Box::new(ChainSetup::new(client, port, origin)));
        let chained = Chained { asked: arrival.service, place, boxes, hosts, other_half: None, far_end: None, setup };
        // A chain has eight boxes at most.
        let unnamed = unnamed.map_or(0, |at| at as u8 + 1);
        let read = Read { chained: Some(Box::new(chained)) };
        Ok(read.ruled(refusal).map_err(|refused| Refused { unnamed, ..refused }))
    }

    /// Whether a session may be had here, now that its sender is proved: also whether that has its share of flows.
    /// `syn_seen`: what the ACK says that its SYN has asked for; `is_neighbour`: the sender is who may pass it on.
    ///
    /// # Errors
    ///
    /// Why it may not.
    pub(crate) fn rule_on_proved(
        &mut self,
        id: FlowId,
        association: u32,
        syn_seen: Option<[u8; 32]>,
        is_neighbour: bool,
    ) -> Result<(), ErrorCode> {
        let flow = self.flows.get_mut(id).ok_or(ErrorCode::UnknownFlow)?;
        let Setup::Responder(setup) = &flow.setup else { return Err(ErrorCode::Closed) };
        // First: what else is found may be about what somebody else has asked for.
        if syn_seen != Some(setup.syn_digest) {
            return Err(ErrorCode::SynChanged);
        }
        setup.ruling?;
        if flow.app.protocol != GREETING {
            self.associations.check_flow_share(association).map_err(|_| ErrorCode::Overloaded)?;
        }
        let allow = setup.allow.clone();
        let change = setup.begin.map_or(0, |begin| begin.number);
        let service = flow.service;
        let session = flow.session;
        let protocol = flow.app.protocol;
        let Some(mut chained) = flow.chain.take() else {
            let is_allowed = self.is_allowed(association, &service, &allow);
            return if is_allowed { Ok(()) } else { Err(ErrorCode::NotAllowed) };
        };
        let refusal = match &chained.setup {
            _ if !is_neighbour => Some(ErrorCode::BadCertificate),
            Some(setup) if !setup.origin.is_checked => {
                let boxes = &chained.boxes[..];
                let signed = Signed { session, destination: &service, protocol, port: setup.port, boxes, change };
                self.check_origin(&setup.origin, &signed, (&chained.asked, &allow)).err().map(Doubt::code)
            }
            _ => None,
        };
        if let Some(setup) = chained.setup.as_ref().filter(|_| refusal.is_none()) {
            let unix_s = self.unix_s();
            let time_s = setup.origin.time_s;
            chained.far_end = Some(setup.origin.host_key.id());
            if chained.is_end() {
                self.chains.note_heard(session, unix_s, time_s);
            }
        }
        if refusal.is_none() {
            // Of a session that ends here: it has passed all of its boxes.
            (chained.boxes, chained.hosts) = chained.passed_at_end(self.config.host_id());
        }
        if let Some(flow) = self.flows.get_mut(id) {
            flow.chain = Some(chained);
        }
        refusal.map_or(Ok(()), Err)
    }

    /// Whether the proved sender of a session's ACK is who may have passed it on: the client's host, or a host that may
    /// speak for the last box that it says the session has passed.
    pub(crate) fn is_neighbour(&mut self, id: FlowId, association: u32, message: &Message<'_>) -> bool {
        let Some((flow, sender)) = self.flows.get(id).zip(self.associations.get(association)) else { return false };
        let Some(chained) = flow.chain.as_deref() else { return true };
        let host = sender.host;
        let host_key = sender.host_key;
        let passed = chained.boxes.iter().rfind(|one| one.flags.contains(BoxFlags::PASSED));
        let Some((last, one)) = chained.hosts.last().zip(passed) else {
            return chained.setup.as_ref().is_some_and(|setup| setup.origin.host_key == host_key);
        };
        let service = service_of(one);
        let demanding = if chained.place == Place::Last { flow.service } else { chained.asked };
        let is_required = chained.is_end() && self.chains.policy.required_for(&demanding).next().is_some();
        let is_it = *last == host;
        if !is_it || sender.is_self() {
            return is_it;
        }
        let chain = message.certificate().unwrap_or_default();
        self.may_serve(&service, &host_key, chain).is_ok_and(|is_proved| is_proved || !is_required)
    }

    /// The certificates that show a neighbour that this host may speak for the box that the flow has passed here, or
    /// that has begun its session.
    pub(crate) fn box_certificate(&self, flow: &Flow) -> Vec<u8> {
        let one = match flow.chain.as_deref() {
            Some(Chained { place: Place::Right { at }, boxes, .. }) => boxes.get(*at),
            Some(Chained { place: Place::First, boxes, hosts, .. })
                if hosts.first() == Some(&self.config.host_id()) =>
            {
                boxes.first()
            }
            _ => None,
        };
        one.map(|one| self.certificate_for(&service_of(one))).unwrap_or_default()
    }
}

/// A box as a responder sees it. What it is given is no listener's.
fn listener_of(middlebox: &Middlebox) -> Demux {
    Demux {
        listener: SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0),
        other_family: None,
        is_looked_up: false,
        service_port: None,
        protocol: None,
        allow: middlebox.allow.clone(),
    }
}

impl Doubt {
    const fn code(self) -> ErrorCode {
        match self {
            Self::Unsigned => ErrorCode::BadCertificate,
            Self::NotAllowed => ErrorCode::NotAllowed,
        }
    }
}

/// A box that was left out although whoever asked for it does not allow that.
fn is_left_out_unasked(one: &BoxRepr) -> bool {
    one.flags.contains(BoxFlags::LEFT_OUT) && !one.flags.contains(BoxFlags::MAY_BE_LEFT_OUT)
}
