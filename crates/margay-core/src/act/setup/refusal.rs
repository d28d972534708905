//! How a connecting flow fails: by refusals, by silence, and what its program is told (DESIGN §3.8).

use alloc::string::String;
use core::net::SocketAddr;

use margay_wire::{ErrorCode, FlowId, Message};

use super::error_text;
use crate::association::auth;
use crate::cache::packet::{self, AppPacket, Parsed, Unreachable};
use crate::cache::queue::OutputQueue;
use crate::machine::sal::Sal;
use crate::resolve::instance::Pin;
use crate::resolve::segment::{OTHERS_WAIT, SEGMENT};
use crate::session::event::Event;
use crate::session::flow::Setup;
use crate::types::drop_reason::DropReason;
use crate::types::name::ServiceId;
use crate::types::time::Instant;
use crate::types::tuple::GREETING;

/// What people are told.
const NOBODY_NEAR: &str =
    "no host on this network segment serves the name, and no service router is known; see `margay status`";

impl Sal {
    /// A host refuses, or says that its listener says nothing. Whoever says so shows its key. The host keeps nothing of
    /// the handshake: what it shows tells where the host is, and is no association to take the place of one.
    pub(super) fn hear_refusal(
        &mut self,
        now: Instant,
        answered: SocketAddr,
        message: &Message<'_>,
        code: ErrorCode,
    ) -> Result<(), DropReason> {
        let id = message.dst_flow;
        let proved = match message.key_exchange() {
            Some(exchange) => {
                let (local_id, (peer, theirs, _, keys)) = self.prove_handshake(message, exchange.message)?;
                if code != ErrorCode::ListenerSilent && self.associations.by_host(peer.id()).is_none() {
                    self.adopt_peer(now, &peer, &theirs, local_id, &keys, message, answered, true)?;
                }
                Ok(())
            }
            None => auth::authenticate(&mut self.associations, message, now).map(drop),
        };
        if proved == Err(DropReason::UnknownAssociation) {
            self.ask_full_handshake(now, id);
        }
        proved?;
        if code == ErrorCode::ListenerSilent {
            self.hear_of_silence(id);
            return Ok(());
        }
        // A box's host that passes a refusal on says what it is about. Others speak of the name that was asked for.
        let failed_at = message.chain().map(|chain| chain.failed_at());
        let is_unserved = code == ErrorCode::NoService && failed_at.is_none() && self.leave_box_out(now, id);
        if !is_unserved && !self.resolve_again(now, id) && !self.others_may_answer(now, id, code) {
            let chained = self.flows.get_mut(id).and_then(|flow| flow.chain.as_mut());
            if let Some((said, chained)) = message.chain().zip(chained) {
                chained.note_boxes(&said);
            }
            self.fail_refused(id, code, failed_at);
        }
        Ok(())
    }

    /// The instance is there, and its listener says nothing: so this end says nothing, either, where in the end there
    /// is no answer. The program's TCP sends its SYN again, and is asked anew, for as long as it would be without
    /// Margay (decision 0048).
    fn hear_of_silence(&mut self, id: FlowId) {
        if let Some(Setup::Initiator(setup)) = self.flows.get_mut(id).map(|flow| &mut flow.setup) {
            setup.is_listener_silent = true;
        }
        self.right_is_silent(id);
    }

    /// One host has refused, or may not speak for the name: where several were asked, or it is drained, its word is not
    /// the last one.
    pub(crate) fn others_may_answer(&mut self, now: Instant, id: FlowId, code: ErrorCode) -> bool {
        let Some(Setup::Initiator(setup)) = self.flows.get(id).map(|flow| &flow.setup) else { return false };
        if setup.fetch.is_some() || setup.begin.is_some() || setup.pin == Some(Pin::Only) {
            return false;
        }
        if code == ErrorCode::Drained && self.ask_elsewhere(now, id) {
            return true;
        }
        let is_search = self.flows.get(id).is_some_and(Self::is_search);
        let Some(Setup::Initiator(setup)) = self.flows.get_mut(id).map(|flow| &mut flow.setup) else { return false };
        if setup.next_hop != SEGMENT && setup.beside.is_empty() {
            return self.leave_notice(now, id);
        }
        // Whoever may not speak for the name cannot shorten the time of those who may.
        if setup.refused.replace(code).is_none() && code != ErrorCode::BadCertificate && !is_search {
            setup.give_up = setup.give_up.min(now + OTHERS_WAIT);
            let give_up = setup.give_up;
            self.flows.set_deadline(id, Some(give_up));
        }
        true
    }

    /// Nobody has set the flow up in time.
    pub(crate) fn give_up_connecting(&mut self, id: FlowId) {
        let Some(Setup::Initiator(setup)) = self.flows.get(id).map(|flow| &flow.setup) else { return };
        if setup.is_listener_silent {
            self.take_flow(id);
            return;
        }
        let is_chained = self.flows.get(id).is_some_and(|flow| flow.chain.is_some());
        match (setup.refused, setup.next_hop) {
            (Some(code), _) => self.fail_refused(id, code, None),
            (None, SEGMENT) => self.fail_connecting(id, Unreachable::Port, NOBODY_NEAR),
            (None, _) if is_chained => self.fail_refused(id, ErrorCode::NoAnswer, None),
            (None, _) => self.fail_connecting(id, Unreachable::Host, error_text(ErrorCode::NoAnswer)),
        }
    }

    /// An ERROR about a SYN of ours: a cookie to bring, or a refusal by our router.
    pub(crate) fn handle_error(
        &mut self,
        now: Instant,
        from: SocketAddr,
        message: &Message<'_>,
    ) -> Result<(), DropReason> {
        let error = message.error().ok_or(DropReason::Malformed)?;
        let id = message.dst_flow;
        if error.code == ErrorCode::UnknownAssociation && message.auth().is_none() {
            return self.consider_greeting(now, from);
        }
        if error.code == ErrorCode::CookieWanted {
            let cookie = message.cookie().ok_or(DropReason::Malformed)?;
            let flow = self.flows.get_mut(id).ok_or(DropReason::UnknownFlow)?;
            let Setup::Initiator(setup) = &mut flow.setup else { return Err(DropReason::Unexpected) };
            // Untagged, so it may cost a retransmission and no more; the second cookie waits for the timer.
            if setup.cookie.replace(cookie).is_none() {
                self.send_syn(now, id);
            }
            return Ok(());
        }
        if error.code == ErrorCode::UnknownCritical && message.auth().is_none() && self.hear_of_older_agent(now, id) {
            return Ok(());
        }
        let association = auth::authenticate(&mut self.associations, message, now)?.association();
        if message.resolvable.is_some() {
            return self.pass_on_nobody(association, message);
        }
        let flow = self.flows.get(id).ok_or(DropReason::UnknownFlow)?;
        if !matches!(flow.setup, Setup::Initiator(_)) {
            return Err(DropReason::Unexpected);
        }
        let is_unserved = error.code == ErrorCode::NoService && self.leave_box_out(now, id);
        if !is_unserved && !self.others_may_answer(now, id, error.code) {
            self.fail_refused(id, error.code, None);
        }
        Ok(())
    }

    /// Ends a flow that never came to be: its application gets a clear error at once (DESIGN §3.8).
    pub(crate) fn fail_connecting(&mut self, id: FlowId, how: Unreachable, why: &str) {
        let Some(flow) = self.take_flow(id) else { return };
        let is_right = flow.chain.as_ref().is_some_and(|chain| chain.is_right());
        if is_right {
            self.right_failed(&flow, code_of(how));
        }
        let Setup::Initiator(setup) = flow.setup else { return };
        if flow.app.protocol == GREETING {
            return;
        }
        if let Some(fetch) = setup.fetch {
            self.fetch_failed(fetch.key(), how);
            return;
        }
        if setup.begin.is_some() && !is_right {
            self.way_not_set_up(self.now, flow.session, why);
            return;
        }
        if let Ok(Parsed::Transport(first)) = packet::parse(&setup.first)
            && !is_right
        {
            self.queue.refuse(&first, how);
        }
        self.counters.connects_failed += 1;
        self.events.push(Event::ConnectFailed { service: flow.service, app: flow.app, why: String::from(why) });
    }

    pub(crate) fn connect_failed(&mut self, service: ServiceId, packet: &AppPacket<'_>, why: String) {
        self.counters.connects_failed += 1;
        self.events.push(Event::ConnectFailed { service, app: packet.tuple, why });
    }
}

impl OutputQueue {
    /// Answers an application's packet with a refusal: RST to TCP where the port is refused, else ICMP. A host that
    /// cannot be reached is a refused port for datagrams: Linux tells a socket of UDP nothing of the former.
    pub(crate) fn refuse(&mut self, packet: &AppPacket<'_>, how: Unreachable) {
        let how = if how == Unreachable::Host && !packet.is_tcp() { Unreachable::Port } else { how };
        let source = packet.tuple.source.ip();
        let destination = packet.tuple.destination.ip();
        let answer = if packet.is_tcp() && how == Unreachable::Port {
            packet::reset_for(packet)
        } else {
            packet::unreachable_for(packet.whole, source, destination, how)
        };
        if let Some(answer) = answer {
            self.inject(answer);
        }
    }
}

/// What a session's left half is refused with where nobody has said why.
const fn code_of(how: Unreachable) -> ErrorCode {
    match how {
        Unreachable::Port => ErrorCode::Refused,
        Unreachable::Host => ErrorCode::NoAnswer,
        Unreachable::Prohibited => ErrorCode::NotAllowed,
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::cache::output::Output;
    use crate::types::tuple::Tuple;

    /// The type and the code of the ICMP error that a program of a protocol is told.
    fn icmp_of(protocol: u8, how: Unreachable) -> [u8; 2] {
        let mut transport = alloc::vec![0; 24];
        // A SYN, where it is one of TCP.
        transport[12..14].copy_from_slice(&[6 << 4, 2]);
        let tuple = Tuple {
            protocol,
            source: "198.18.0.1:40000".parse().expect("literal"),
            destination: "198.18.1.1:80".parse().expect("literal"),
        };
        let bytes = packet::build(&tuple, transport, 0, 64).expect("one family");
        let Ok(Parsed::Transport(packet)) = packet::parse(&bytes) else { panic!("it is a transport's") };
        let mut queue = OutputQueue::new(1);
        queue.refuse(&packet, how);
        let mut buffer = [0; 200];
        let Some(Output::Inject { .. }) = queue.pop(&mut buffer) else { panic!("it is told nothing") };
        assert_eq!(buffer[9], 1, "ICMP");
        [buffer[20], buffer[21]]
    }

    #[test]
    fn a_socket_of_datagrams_is_told_in_words_that_linux_passes_on() {
        const UNREACHABLE: u8 = 3;
        assert_eq!(icmp_of(6, Unreachable::Host), [UNREACHABLE, 1]);
        for how in [Unreachable::Host, Unreachable::Port] {
            assert_eq!(icmp_of(17, how), [UNREACHABLE, 3]);
        }
        assert_eq!(icmp_of(17, Unreachable::Prohibited), [UNREACHABLE, 13]);
    }
}
