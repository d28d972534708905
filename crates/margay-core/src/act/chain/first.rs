//! The initiator's end of a subsession: the client's host, which chooses the chain, and each box's host, which goes on
//! with the rest.

use alloc::borrow::ToOwned;
use alloc::boxed::Box;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::net::SocketAddr;

use margay_wire::{BoxFlags, BoxRepr, ErrorCode, FlowId, Message, SessionId};

use super::proof::{Answered, Signed};
use super::{ChainSetup, Chained, Failure, Place, box_ahead, service_of};
use crate::act::setup::{HandshakeSeed, error_text, unreachable_of};
use crate::cache::packet::{AppPacket, Unreachable};
use crate::machine::sal::Sal;
use crate::resolve::instance::sticky;
use crate::resolve::segment::OTHERS_WAIT;
use crate::resolve::way::Sender;
use crate::session::flow::Setup;
use crate::table::Resolution;
use crate::types::key::HostId;
use crate::types::name::ServiceId;
use crate::types::time::Instant;
use crate::types::tuple::Tuple;

/// What people are told.
const SAYS_NOTHING: &str = "the host that answered says nothing of the chain that it was asked for; run the same \
                            version of Margay on all hosts of it";
const OTHER_END: &str = "another host answers than the one that the session is with";
const OTHER_BOXES: &str = "the session has not passed the boxes that it was to pass: a host on the way has left one \
                           out, or changed the list";

/// What a SYN asks for: by protocol and port of the program's first packet.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    pub destination: ServiceId,
    pub protocol: u8,
    pub port: u16,
}

/// Another way of a session that a program here has begun.
pub(crate) struct NewWay {
    pub session: SessionId,
    pub service: ServiceId,
    pub app: Tuple,
    /// The port of the service that it is for.
    pub port: u16,
    /// The proxy of this host that has begun the session.
    pub begun_by: Option<ServiceId>,
    /// The boxes that it goes through, in order.
    pub between: Vec<ServiceId>,
    /// The proxy that the session ends at.
    pub ends_at: Option<ServiceId>,
    /// Which of the session's reconfigurations.
    pub number: u32,
}

impl NewWay {
    /// The boxes of its chain. It begins and ends at the proxies that the session begins and ends at.
    fn boxes(&self) -> Vec<BoxRepr> {
        let with = |flags| move |service: &ServiceId| BoxRepr { flags, ..box_ahead(service) };
        let begun_by = self.begun_by.as_ref().map(with(BoxFlags::PASSED));
        let ends_at = self.ends_at.as_ref().map(with(BoxFlags::ENDS));
        begun_by.into_iter().chain(self.between.iter().map(box_ahead)).chain(ends_at).collect()
    }
}

impl Sal {
    /// The chain of another way of a session that runs; `None`: it goes through no boxes.
    pub(crate) fn chain_of_way(&self, way: &NewWay) -> Option<Box<Chained>> {
        let boxes = way.boxes();
        let signed = Signed {
            session: way.session,
            destination: &way.service,
            protocol: way.app.protocol,
            port: way.port,
            boxes: &boxes,
            change: way.number,
        };
        (!boxes.is_empty()).then(|| Box::new(self.chain_from_here(&signed, &way.app)))
    }

    /// The chain of what a program here begins. Boxes that were passed already are of this host: a proxy, whose program
    /// that is.
    fn chain_from_here(&self, signed: &Signed<'_>, app: &Tuple) -> Chained {
        let origin = self.sign_origin(signed);
        let client = SocketAddr::new(self.client_address(app), app.source.port());
        let boxes = signed.boxes.to_vec();
        let hosts = boxes.iter().filter(|one| !one.is_ahead()).map(|_| self.config.host_id()).collect();
        let mut chained = Chained {
            asked: *signed.destination,
            place: Place::First,
            boxes,
            hosts,
            other_half: None,
            far_end: None,
            setup: Some(Box::new(ChainSetup::new(client, signed.port, origin))),
        };
        chained.asked = chained.next_name(*signed.destination);
        chained
    }

    /// The chain of a session that a program here begins, if a rule gives it one.
    pub(crate) fn begin_chain(
        &self,
        session: SessionId,
        service: &ServiceId,
        packet: &AppPacket<'_>,
    ) -> Option<Box<Chained>> {
        let protocol = packet.tuple.protocol;
        let port = packet.tuple.destination.port();
        let rule = self.chain_rule_of(service, packet);
        let rule = rule.filter(|rule| !rule.boxes.is_empty())?;
        let boxes = self.boxes_from_here(rule);
        let signed = Signed { session, destination: service, protocol, port, boxes: &boxes, change: 0 };
        let mut chained = self.chain_from_here(&signed, &packet.tuple);
        self.leave_unserved_out(&mut chained, Wanted { destination: *service, protocol, port });
        Some(Box::new(chained))
    }

    /// Passes over boxes that no rule of this host leads to, where the policy allows it. Says what is asked for next.
    pub(super) fn leave_unserved_out(&self, chained: &mut Chained, wanted: Wanted) {
        while let Some(at) = chained.next_box() {
            let one = chained.boxes[at];
            let found = self.pick(&service_of(&one), 0, wanted.protocol, wanted.port, Sender::Own);
            let may_be_served = self.is_awaited(self.now, &service_of(&one));
            let is_served = may_be_served || !matches!(found, Resolution::None | Resolution::Drop(_));
            if is_served || !one.flags.contains(BoxFlags::MAY_BE_LEFT_OUT) {
                break;
            }
            chained.boxes[at].flags |= BoxFlags::LEFT_OUT;
        }
        chained.asked = chained.next_name(wanted.destination);
    }

    /// Nobody serves the box that a connecting flow asks for: where the policy allows it, the session goes on without.
    /// False where it may not, or nobody serves what comes then.
    pub(crate) fn leave_box_out(&mut self, now: Instant, id: FlowId) -> bool {
        let Some(flow) = self.flows.get_mut(id) else { return false };
        let destination = flow.service;
        let protocol = flow.app.protocol;
        let port = flow.service_port();
        let may = |chained: &Chained| {
            chained.next_box().filter(|at| chained.boxes[*at].flags.contains(BoxFlags::MAY_BE_LEFT_OUT))
        };
        let Some(at) = flow.chain.as_deref().and_then(may) else { return false };
        let Some(mut chained) = flow.chain.take() else { return false };
        chained.boxes[at].flags |= BoxFlags::LEFT_OUT;
        self.leave_unserved_out(&mut chained, Wanted { destination, protocol, port });
        let asked = chained.asked;
        let Some(flow) = self.flows.get_mut(id) else { return false };
        flow.chain = Some(chained);
        let Setup::Initiator(setup) = &flow.setup else { return false };
        let number = sticky(id, setup.nonce);
        let (rule, next_hop) = match self.pick(&asked, number, protocol, port, Sender::Own) {
            Resolution::Forward(rule, hop) => (rule, hop.address),
            Resolution::Demux(rule, _) | Resolution::Box(rule, _) => (rule, self.loopback()),
            Resolution::Delay(..) | Resolution::Drop(_) | Resolution::None => return false,
        };
        let beside = self.note_own(rule);
        let seed = self.rng.bytes();
        if let Some(Setup::Initiator(setup)) = self.flows.get_mut(id).map(|flow| &mut flow.setup) {
            // Another name, so another handshake.
            (setup.next_hop, setup.beside, setup.handshake) = (next_hop, beside, HandshakeSeed::new(seed));
            (setup.retries, setup.refused, setup.cookie) = (0, None, None);
        }
        self.send_syn(now, id);
        true
    }

    /// Ends a flow that was refused before it came to be: by the host that was asked, or for a chained session by any
    /// that comes after it. `failed_at`: the box that it is about, from 1; 0: it is about none. `None`: whoever refuses
    /// speaks of the name that was asked for.
    pub(crate) fn fail_refused(&mut self, id: FlowId, code: ErrorCode, failed_at: Option<u8>) {
        let Some(chained) = self.flows.get_mut(id).and_then(|flow| flow.chain.as_mut()) else {
            return self.fail_connecting(id, unreachable_of(code), error_text(code));
        };
        let asked = chained.next_box().map_or(0, |at| at as u8 + 1);
        let at = failed_at.unwrap_or(asked);
        if let Some(setup) = &mut chained.setup {
            setup.failure = Some(Failure { code, at });
        }
        let one = usize::from(at).checked_sub(1).and_then(|at| chained.boxes.get(at)).map(service_of);
        let Some(one) = one else { return self.fail_connecting(id, unreachable_of(code), error_text(code)) };
        let name = self.chains.policy.name_of_box(&one).map_or_else(|| one.to_string(), ToOwned::to_owned);
        let (how, why) = box_text(code, &name);
        self.fail_connecting(id, how, &why);
    }

    /// An agent on the way says that it does not know CHAIN. Nobody vouches for the word, so others may still answer.
    pub(crate) fn hear_of_older_agent(&mut self, now: Instant, id: FlowId) -> bool {
        let Some(flow) = self.flows.get_mut(id).filter(|flow| flow.chain.is_some()) else { return false };
        let Setup::Initiator(setup) = &mut flow.setup else { return false };
        if setup.refused.replace(ErrorCode::UnknownCritical).is_none() {
            setup.give_up = setup.give_up.min(now + OTHERS_WAIT);
            let give_up = setup.give_up;
            self.flows.set_deadline(id, Some(give_up));
        }
        true
    }

    /// What an answer says of the other end of a chained session. Gives whether the right to answer for the session's
    /// name was proved.
    ///
    /// # Errors
    ///
    /// Why the answer does not count, for people.
    pub(crate) fn hear_chain_answer(&mut self, id: FlowId, message: &Message<'_>) -> Result<bool, String> {
        let Some(flow) = self.flows.get(id) else { return Ok(true) };
        let Some(chained) = flow.chain.as_deref() else { return Ok(true) };
        let session = flow.session;
        let service = flow.service;
        let is_first = chained.place == Place::First;
        let wanted = match &flow.setup {
            Setup::Initiator(setup) => setup.begin.map(|begin| HostId(begin.host)),
            _ => None,
        };
        let asked = chained.boxes.clone();
        let left = self.flows.other_half(flow);
        let said = message.chain().filter(|said| said.is_answer() && said.destination() == service.0);
        let answered = said.and_then(|said| Answered::of(&said, message.certificate().unwrap_or_default()));
        let answered = answered.ok_or_else(|| SAYS_NOTHING.to_string())?;
        // Whoever comes after this host does not say which hosts came before.
        if !is_what_was_asked(&chained.boxes, &answered.boxes) || !answered.hosts.starts_with(&chained.hosts) {
            return Err(OTHER_BOXES.to_string());
        }
        let far_end = answered.host_key.id();
        if is_first && wanted.is_some_and(|wanted| wanted != far_end) {
            return Err(OTHER_END.to_string());
        }
        let is_proved = if is_first { self.check_answered(session, &service, &asked, &answered)? } else { true };
        if let Some(chained) = self.flows.get_mut(id).and_then(|flow| flow.chain.as_mut()) {
            chained.boxes.clone_from(&answered.boxes);
            chained.hosts.clone_from(&answered.hosts);
            chained.far_end = is_first.then_some(far_end);
        }
        if let Some(setup) = left.and_then(|left| self.flows.chain_setup(left)) {
            setup.answer = Some(answered);
        }
        Ok(is_proved)
    }
}

/// Whether a session has passed every box that was asked for, but for those that may be left out. Others may be among
/// them that later hosts have added.
fn is_what_was_asked(asked: &[BoxRepr], answered: &[BoxRepr]) -> bool {
    let is_added = |one: &BoxRepr| one.flags.contains(BoxFlags::ADDED);
    let mut rest = asked.iter().peekable();
    let is_expected = |answered: &BoxRepr| {
        let is_same = |asked: &&BoxRepr| asked.service == answered.service && is_added(asked) == is_added(answered);
        let Some(asked) = rest.next_if(is_same) else { return is_added(answered) };
        let may = asked.flags.contains(BoxFlags::MAY_BE_LEFT_OUT);
        answered.flags.contains(BoxFlags::PASSED) || may && answered.flags.contains(BoxFlags::LEFT_OUT)
    };
    answered.iter().all(is_expected) && rest.next().is_none()
}

/// What people are told of a box that was added, and that the end of the chain does not know.
fn unknown_text(name: &str) -> String {
    format!(
        "box {name} was added to the chain on the way, and the host at its end has no policy that lets boxes add it to \
         such sessions; `margay chain show` there shows which it has, and `may_add` of a chain lets them"
    )
}

/// What the program is told, and people, of a session that has failed at a box.
fn box_text(code: ErrorCode, name: &str) -> (Unreachable, String) {
    match code {
        ErrorCode::BoxSilent => (
            Unreachable::Host,
            format!(
                "box {name} of the chain has not let the session's first packet out of sal0 in a second: its rules \
                 drop it, or its host does not forward; `margay check` there looks for the cause"
            ),
        ),
        ErrorCode::BoxRefused => {
            (Unreachable::Prohibited, format!("box {name} of the chain refuses the session: its rules reject it"))
        }
        ErrorCode::BoxAnswered => (
            Unreachable::Host,
            format!("box {name} of the chain has answered in the place of the service; a box forwards, or listens in"),
        ),
        ErrorCode::BoxRewrites => (
            Unreachable::Host,
            format!(
                "box {name} of the chain has changed the session's addresses or ports; one that is to do so is served \
                 with `--kind rewrite`, and takes no TCP options off"
            ),
        ),
        ErrorCode::NoRoomForTag => (
            Unreachable::Host,
            format!(
                "box {name} of the chain changes addresses, and the session's first packet cannot be marked for it: \
                 its TCP options leave no room for 8 bytes, or it is a datagram that is not in the SYN, since it is \
                 too long or sealed"
            ),
        ),
        ErrorCode::BoxAmbiguous => (
            Unreachable::Host,
            format!(
                "box {name} of the chain changes addresses, and its host cannot tell this session from another one: \
                 both have begun with the same datagram within 100 ms, or have the same addresses behind the box"
            ),
        ),
        ErrorCode::BoxOtherKind => (
            Unreachable::Host,
            format!(
                "box {name} of the chain is another kind of box than the chain says: `proxies` of the chain names the \
                 boxes that end TCP connections, and those are served with `--kind proxy`"
            ),
        ),
        ErrorCode::BoxNeedsFirst => (
            Unreachable::Host,
            format!(
                "box {name} changes addresses or ends connections, so that it must have a session from its beginning \
                 on; put boxes of the kinds `forward` and `sniff` into sessions that run"
            ),
        ),
        ErrorCode::BoxUnknown => (Unreachable::Host, unknown_text(name)),
        ErrorCode::NoService => {
            (Unreachable::Host, format!("nobody serves box {name} of the chain, and its policy is to refuse then"))
        }
        ErrorCode::NoAnswer => {
            (Unreachable::Host, format!("the host of box {name} of the chain did not answer in time"))
        }
        ErrorCode::UnknownCritical => (
            Unreachable::Host,
            format!(
                "an agent on the way to box {name} of the chain knows no chains, or no boxes that were added on the \
                 way; run the same version on all hosts"
            ),
        ),
        code => (unreachable_of(code), format!("box {name} of the chain: {}", error_text(code))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(number: u8, flags: BoxFlags) -> BoxRepr {
        BoxRepr { service: [number; 12], flags, added_by: 0 }
    }

    #[test]
    fn every_box_is_passed_or_may_be_left_out() {
        let may = BoxFlags::MAY_BE_LEFT_OUT;
        let asked = [one(1, BoxFlags::empty()), one(2, may)];
        let passed = [one(1, BoxFlags::PASSED), one(2, may | BoxFlags::PASSED)];
        assert!(is_what_was_asked(&asked, &passed));
        let without = [one(1, BoxFlags::PASSED), one(2, may | BoxFlags::LEFT_OUT)];
        assert!(is_what_was_asked(&asked, &without));
        let added = [passed[0], one(3, BoxFlags::ADDED | BoxFlags::PASSED), passed[1]];
        assert!(is_what_was_asked(&asked, &added));
        for wrong in [
            [one(1, BoxFlags::LEFT_OUT), passed[1]],
            [one(3, BoxFlags::PASSED), passed[1]],
            [passed[1], passed[0]],
            [passed[0], one(2, may)],
        ] {
            assert!(!is_what_was_asked(&asked, &wrong), "{wrong:?}");
        }
        assert!(!is_what_was_asked(&asked, &passed[..1]));
        // What was added here is asked for as the others are.
        let with = [asked[0], one(3, BoxFlags::ADDED), asked[1]];
        assert!(is_what_was_asked(&with, &added));
        assert!(!is_what_was_asked(&with, &passed), "it is missing");
        assert!(!is_what_was_asked(&with, &[passed[0], one(3, BoxFlags::PASSED), passed[1]]), "it was not signed");
        assert!(!is_what_was_asked(&asked, &[passed[0], one(2, BoxFlags::ADDED | BoxFlags::PASSED)]));
    }
}
