//! How flows end: in order, by reset, by silence, or because the peer cannot carry them any more (DESIGN §3.8, §7,
//! §18).

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::net::SocketAddr;
use core::time::Duration;

use margay_wire::{DataRepr, ErrorCode, ErrorRepr, Extension, FlowId, Kind};

use crate::association::auth::Verified;
use crate::association::draft::Draft;
use crate::association::location::Scope;
use crate::association::twin::Twin;
use crate::cache::entry::{Directions, EntryUpdate, FlowCounters, RemoveReason};
use crate::cache::output::AppVerdict;
use crate::cache::packet::{self, AppPacket, Unreachable, tcp_flags};
use crate::leg::carriage::Why;
use crate::machine::sal::Sal;
use crate::session::event::Event;
use crate::session::event::EventQueue;
use crate::session::flow::FlowTable;
use crate::session::flow::{Flow, LifeEvent, Marks, Setup};
use crate::types::direction::Direction;
use crate::types::drop_reason::DropReason;
use crate::types::role::{Lifecycle, Role};
use crate::types::time::Instant;
use crate::types::tuple::{GREETING, Tuple};

/// After both FINs: late retransmissions still pass.
pub(crate) const LINGER: Duration = Duration::from_secs(10);
/// The same where connections come and go in numbers: their ports are needed again.
pub(crate) const LINGER_GRANTED: Duration = Duration::from_secs(2);
/// After a RST: it may have to be sent again.
const LINGER_RESET: Duration = Duration::from_secs(2);
/// How long a failed flow waits for its application's TCP to show its numbers.
const LINGER_FAILED: Duration = Duration::from_secs(60);
/// UDP flows without traffic, as RFC 4787 has it for NATs (REQ-5: not under two minutes).
const IDLE_UDP: Duration = Duration::from_secs(180);
/// TCP flows without traffic, as Linux has it for what it tracks: a connection that says nothing for days is still one
/// (RFC 5382 REQ-5 asks for two hours at least).
const IDLE_TCP: Duration = Duration::from_secs(432_000);
/// Connections that both ends have closed, and of which nobody has seen that each end has all of the other's: a TCP
/// that waits for an acknowledgement sends again, each time after twice the time before (RFC 6298 §5.5), so one that
/// has been silent for twice as long as it has waited, and for this time more, waits for nothing.
const IDLE_ENDING: Duration = Duration::from_secs(40);
/// What of a program's datagrams waits for the answer to the first one: eight of the largest.
const HELD_SENDS_BYTES: usize = 8 << 16;
/// How often idle flows are looked for.
pub(crate) const SWEEP: Duration = Duration::from_secs(10);

impl Sal {
    /// A packet of an application that missed the cache although its flow is known.
    pub(crate) fn app_packet_of_flow(&mut self, id: FlowId, packet: &AppPacket<'_>) -> AppVerdict {
        if self.queue.is_frozen(id) {
            return AppVerdict::Drop(DropReason::Unexpected);
        }
        let held_max = self.config.limits.held_sends_per_flow;
        let Some(flow) = self.flows.get_mut(id) else { return AppVerdict::Drop(DropReason::UnknownFlow) };
        if flow.is_at_box() && !packet.is_forwarded() {
            // Any user here may bind the addresses of the session's ends: only the middlebox speaks for them.
            return AppVerdict::Drop(DropReason::NotForwarded);
        }
        if flow.is_of_named_socket() && packet.is_from_outside() {
            // NAT has given a container's packet the socket's address: the name is not the container's.
            return AppVerdict::Drop(DropReason::NotItsSocket);
        }
        if flow.has(Marks::FAILED) {
            return self.answer_failed(id, packet);
        }
        if flow.is_held {
            return self.hold_packet(id, packet.whole);
        }
        if flow.has(Marks::GUARDED) {
            return self.hold_unsealed(id, packet.whole);
        }
        if flow.directions == Directions::Parted && flow.carries_data() {
            return self.part_egress(self.now, id, packet);
        }
        if flow.carries_data() {
            let (entry, association) = (flow.entry(), flow.association);
            self.locations.announce_path(&self.associations, &mut self.queue, association);
            self.queue.update(EntryUpdate::Install(entry));
            return AppVerdict::Forward(id);
        }
        match &mut flow.setup {
            // The application's own retransmission; ours runs on its own clock.
            Setup::Initiator(_) if packet.is_tcp_syn() => AppVerdict::Consumed,
            Setup::Initiator(setup) if !packet.is_tcp() => {
                let bytes = setup.held.iter().map(Vec::len).sum::<usize>() + packet.whole.len();
                if setup.held.len() >= held_max || bytes > HELD_SENDS_BYTES {
                    self.counters.held_full += 1;
                    return AppVerdict::Drop(DropReason::Full);
                }
                setup.held.push(packet.whole.to_vec());
                AppVerdict::Consumed
            }
            Setup::Responder(_) => match self.handle_listener_packet(id, packet) {
                Ok(()) => AppVerdict::Consumed,
                Err(reason) => AppVerdict::Drop(reason),
            },
            _ => AppVerdict::Drop(DropReason::Unexpected),
        }
    }

    /// The application's TCP showed its numbers: the exact RST ends it (RFC 5961).
    fn answer_failed(&mut self, id: FlowId, packet: &AppPacket<'_>) -> AppVerdict {
        if packet.tcp_flags() & tcp_flags::RST == 0 {
            self.queue.refuse(packet, Unreachable::Port);
            self.counters.resets += 1;
        }
        self.take_flow(id);
        AppVerdict::Consumed
    }

    /// The cache carried a FIN or RST.
    pub(crate) fn transport_event(&mut self, now: Instant, id: FlowId, direction: Direction, flags: u8) {
        let id = self.reconfigurations.way_of_program(&self.flows, id);
        let Some(flow) = self.flows.get_mut(id) else { return };
        if flags & tcp_flags::RST != 0 {
            let is_ending = flow.lifecycle == Lifecycle::Closed && flow.has(Marks::FIN_EGRESS | Marks::FIN_INGRESS);
            if is_ending {
                // Whoever waited for an acknowledgement waits no more.
                flow.marks &= !Marks::FIN_INGRESS;
                self.flows.set_deadline(id, Some(now + LINGER_RESET));
            }
            self.flows.end(&mut self.events, id, (LifeEvent::Reset, RemoveReason::Reset), now + LINGER_RESET);
            return;
        }
        if flags & tcp_flags::FIN == 0 {
            return;
        }
        let mark = if direction == Direction::Egress { Marks::FIN_EGRESS } else { Marks::FIN_INGRESS };
        let before = flow.marks & (Marks::FIN_EGRESS | Marks::FIN_INGRESS);
        flow.marks |= mark;
        let after = flow.marks & (Marks::FIN_EGRESS | Marks::FIN_INGRESS);
        if !before.is_empty() && after != before {
            let linger = if flow.direct.why == Why::Granted { LINGER_GRANTED } else { LINGER };
            flow.closed_at = now;
            self.flows.end(&mut self.events, id, (LifeEvent::SecondFin, RemoveReason::Closed), now + linger);
        } else if before.is_empty()
            && let Some(next) = flow.lifecycle.after(LifeEvent::FirstFin)
        {
            flow.lifecycle = next;
            self.events.push(Event::FlowChanged(id));
        }
    }

    /// Takes a flow out of every table.
    pub(crate) fn take_flow(&mut self, id: FlowId) -> Option<Flow> {
        let mut flow = self.flows.remove(id)?;
        self.forget_direct(&flow);
        self.chains.note_gone(&flow, self.now);
        self.asked(id);
        self.forget_stack_changes(id);
        self.reconfigurations.forget_flow(id);
        self.splice_ends(id);
        self.quiet_ends.forget(id);
        self.unlock_gone_flow(self.now, id);
        self.let_side_path_go(flow.side);
        self.let_stripe_go(id, flow.stripe.take());
        self.shares.remove(&id);
        if let Some(host) = self.associations.get(flow.association).map(|association| association.host) {
            self.locations.remove(Scope { host, flow: id });
        }
        Some(flow)
    }

    /// Removes a flow and says why.
    pub(crate) fn remove_flow(&mut self, id: FlowId, reason: RemoveReason) {
        if self.way_ends(self.now, id, reason) {
            return;
        }
        self.say_way_over(id, reason);
        let Some(flow) = self.take_flow(id) else { return };
        if let Setup::Responder(setup) = &flow.setup {
            self.half_open.remove(setup.reply.direct.ip());
        } else if flow.association != 0 && (flow.app.protocol != GREETING || flow.role == Role::Initiator) {
            self.associations.release_flow(flow.association, flow.role);
        }
        if flow.app.protocol == GREETING {
            return;
        }
        self.counters.removed(reason);
        self.queue.update(EntryUpdate::Remove { flow: id, reason });
        let info = Box::new(self.describe(&flow));
        self.events.push(Event::FlowClosed { flow: info, reason, carried: FlowCounters::default() });
        if let Some(other) = self.flows.other_half(&flow) {
            self.end_half(other, reason);
        }
    }

    /// Ends an established flow that cannot go on: its application gets a RST now (DESIGN §10, §18).
    pub(crate) fn fail_flow(&mut self, now: Instant, id: FlowId, reason: RemoveReason) {
        if self.ends_between(now, id) || self.way_ends(now, id, reason) {
            return;
        }
        let Some(flow) = self.flows.get_mut(id) else { return };
        if flow.lifecycle == Lifecycle::Connecting {
            match flow.role {
                Role::Initiator => self.fail_connecting(id, Unreachable::Port, "the peer ended the connection"),
                Role::Responder => self.drop_half_open(id),
            }
            return;
        }
        let is_open = matches!(flow.lifecycle, Lifecycle::Established | Lifecycle::HalfClosed);
        if flow.app.protocol != 6 || !is_open || flow.is_at_box() {
            // Late for a peer that has forgotten it in order; or no program here waits for a word, and the peer of the
            // other half is told.
            let is_over = flow.has(Marks::FIN_EGRESS | Marks::FIN_INGRESS);
            self.remove_flow(id, if is_over { RemoveReason::Closed } else { reason });
            return;
        }
        flow.marks |= Marks::FAILED;
        flow.lifecycle = Lifecycle::Closed;
        flow.setup = Setup::Done;
        self.forget_stack_changes(id);
        // With its peer.
        let info = self.flows.get(id).map(|flow| Box::new(self.describe(flow)));
        let Some(flow) = self.flows.get_mut(id) else { return };
        let (to_app, role) = (flow.app.reversed(), flow.role);
        let association = core::mem::take(&mut flow.association);
        self.associations.release_flow(association, role);
        self.flows.set_deadline(id, Some(now + LINGER_FAILED));
        self.counters.removed(reason);
        self.queue.update(EntryUpdate::Remove { flow: id, reason });
        if let Some(probe) = packet::stale_ack(&to_app) {
            self.queue.inject(probe);
        }
        let carried = FlowCounters::default();
        self.events.extend(info.map(|flow| Event::FlowClosed { flow, reason, carried }));
        if let Some(other) = self.flows.get(id).and_then(|flow| self.flows.other_half(flow)) {
            self.end_half(other, reason);
        }
    }

    /// Programs here have no socket any more of these flows, which nobody noticed: their end passed while there was
    /// no agent, or was lost with one that died. What the peer would still send, the host's TCP would refuse; so the
    /// peer's program is told.
    pub fn end_without_socket(&mut self, now: Instant, flows: &[FlowId]) {
        self.now = now;
        for id in flows {
            let is_open = |flow: &&Flow| {
                let is_at_box = flow.chain.as_ref().is_some_and(|chain| chain.is_at_box());
                !is_at_box && matches!(flow.lifecycle, Lifecycle::Established | Lifecycle::HalfClosed)
            };
            if self.flows.get(*id).filter(is_open).is_some_and(|flow| flow.app.protocol == 6) {
                self.say_fail(*id, ErrorCode::Closed);
                self.remove_flow(*id, RemoveReason::Closed);
            }
        }
    }

    /// Connections of programs here, by the five-tuples of their packets, that no flow is of: an agent has died before
    /// it could write the flow down. Nothing reaches such a connection any more, and one that waits for its peer would
    /// do so for ever. Each is made to say its numbers, and what comes up of no flow is reset by them.
    pub fn end_without_flow(&mut self, now: Instant, apps: &[Tuple]) {
        self.now = now;
        let without = apps.iter().filter(|app| self.flows.by_tuple(app).is_none());
        let probes: Vec<Vec<u8>> = without.filter_map(|app| packet::stale_ack(&app.reversed())).collect();
        probes.into_iter().for_each(|probe| self.queue.inject(probe));
    }

    /// A tagged FAIL or RST of the peer.
    pub(crate) fn handle_fail(&mut self, now: Instant, message: &Verified<'_>) -> Result<(), DropReason> {
        let association = message.association();
        if message.error().is_some_and(|error| error.code == ErrorCode::KeptOut)
            && let Some(peer) = self.associations.get(association).map(|association| association.host)
        {
            self.events.push(Event::Twin(Twin::Refused { peer }));
        }
        if self.handle_grant_end(message.dst_flow, association) {
            return Ok(());
        }
        let id = if message.dst_flow.0 != 0 {
            message.dst_flow
        } else {
            // The peer knows only its own number of a flow that it has lost.
            let is_its = |flow: &&Flow| self.associations.is_same_peer(flow.association, association);
            let lost = self.flows.by_peer_flow(message.src_flow).find(is_its);
            lost.map(|flow| flow.id).ok_or(DropReason::UnknownFlow)?
        };
        let of_peer = |flow: &&Flow| self.associations.is_same_peer(flow.association, association);
        let flow = self.flows.get(id).filter(of_peer).ok_or(DropReason::UnknownFlow)?;
        // A refusal of the peer's listener after the answer was given, or a true failure: the same for the application.
        let is_proved = flow.has(Marks::CONFIRMED) || flow.role == Role::Responder && flow.carries_data();
        let reason = match message.error().map(|error| error.code) {
            _ if !is_proved => RemoveReason::Unproved,
            Some(ErrorCode::Drained) => RemoveReason::Drained,
            Some(ErrorCode::Elsewhere) => RemoveReason::Elsewhere,
            _ => RemoveReason::PeerFailed,
        };
        self.fail_flow(now, id, reason);
        Ok(())
    }

    /// DATA that the cache could not place.
    pub(crate) fn handle_data_miss(
        &mut self,
        now: Instant,
        from: SocketAddr,
        datagram: &[u8],
    ) -> Result<(), DropReason> {
        let data = DataRepr::parse(datagram).map_err(|_| DropReason::Malformed)?;
        let limits = &self.config.limits;
        let is_calm = self.half_open.len() < limits.half_open_cookie;
        let held_max = if is_calm { limits.held_data_per_flow } else { limits.held_per_flow };
        // The peer knows it, so that its kernel has opened it; so has the one here.
        if self.flows.get(data.dst_flow).is_none() {
            self.open_as_agreed(now, data.dst_flow, from);
        }
        let Some(flow) = self.flows.get_mut(data.dst_flow) else {
            self.say_unknown(now, from, data.dst_flow, datagram.len());
            return Err(DropReason::UnknownFlow);
        };
        if flow.has(Marks::FAILED) || self.queue.is_frozen(data.dst_flow) {
            return Err(DropReason::UnknownFlow);
        }
        if flow.carries_data() {
            let (entry, association) = (flow.entry(), flow.association);
            let is_place = flow.stripe.as_ref().is_some_and(|striping| striping.leads_to(from));
            let side = flow.side.and_then(|id| self.side_path(id)).map(|side| side.pair.remote);
            let remote = self.associations.get(association).map(|association| association.remote);
            let is_from_peer = is_place || side.or(remote) == Some(from);
            if !is_from_peer {
                return Err(DropReason::WrongPath);
            }
            if !entry.directions.has_ingress() && !entry.directions.gives_up() {
                return self.hold_overtaking(now, data.dst_flow, from, datagram);
            }
            self.locations.announce_path(&self.associations, &mut self.queue, association);
            self.queue.update(EntryUpdate::Install(entry));
            self.queue.ingress(from, datagram.to_vec());
            return Ok(());
        }
        let Setup::Responder(setup) = &mut flow.setup else { return Err(DropReason::Unexpected) };
        // Whoever goes by what this host has told of itself sends none that is longer; it is put together of fragments.
        if setup.held.len() >= held_max || datagram.len() > usize::from(self.config.datagram_max) {
            self.counters.held_full += 1;
            return Err(DropReason::Full);
        }
        setup.held.push((from, datagram.to_vec()));
        Ok(())
    }

    /// Tells a known peer that a flow it still sends on is gone here, so that its application need not wait for a
    /// time-out.
    fn say_unknown(&mut self, now: Instant, from: SocketAddr, flow: FlowId, len: usize) {
        let Some(local_id) = self.associations.last_heard_at(from).map(|association| association.local_id) else {
            self.say_unknown_association(now, from, flow, len);
            return;
        };
        if !self.answers.take(now) {
            return;
        }
        let extensions = [Extension::Error(ErrorRepr { code: ErrorCode::UnknownFlow, text: "" })];
        let mut draft = Draft::new(Kind::Fail, FlowId(0), flow);
        draft.extensions = &extensions;
        self.seal_and_send(local_id, draft);
    }

    /// The peer's host started anew: nothing of its older boot lives any more (DESIGN §7, boot identity).
    pub(crate) fn reset_flows_of(&mut self, now: Instant, associations: &[u32]) {
        self.end_grants_with(|association, _| associations.contains(&association));
        let gone: Vec<FlowId> =
            self.flows.iter().filter(|flow| associations.contains(&flow.association)).map(|flow| flow.id).collect();
        for id in gone {
            self.fail_flow(now, id, RemoveReason::PeerRebooted);
        }
    }

    /// Ends every flow, here and at the peers: the agent is taken off this host for good.
    pub fn shutdown(&mut self, now: Instant) {
        self.withdraw_notices();
        self.end_all_grants();
        let all: Vec<FlowId> = self.flows.iter().map(|flow| flow.id).collect();
        for id in all {
            if self.flows.get(id).is_some_and(|flow| flow.association != 0 && flow.lifecycle != Lifecycle::Closed) {
                self.say_fail(id, ErrorCode::Closed);
            }
            self.fail_flow(now, id, RemoveReason::Operator);
        }
    }

    /// Ends one flow by order of the operator, at both ends. False when there is no such flow.
    pub fn close_flow(&mut self, now: Instant, id: FlowId) -> bool {
        self.now = now;
        if self.flows.get(id).is_none() {
            return false;
        }
        self.say_fail(id, ErrorCode::Closed);
        self.fail_flow(now, id, RemoveReason::Operator);
        true
    }

    /// A flow's own deadline passed.
    pub(crate) fn flow_due(&mut self, now: Instant, id: FlowId) {
        let Some(flow) = self.flows.get(id) else { return };
        if flow.has(Marks::LEAVING) {
            self.forget_halves(id);
            return;
        }
        if matches!(flow.lifecycle, Lifecycle::Closed | Lifecycle::TimedOut) {
            if flow.has(Marks::FAILED) {
                self.take_flow(id);
                return;
            }
            let in_order = flow.has(Marks::FIN_EGRESS | Marks::FIN_INGRESS);
            let waited = flow.active.since(flow.closed_at);
            // What passes one half at a box passes the other: where that has gone, all has arrived.
            let is_last_half = flow.is_at_box() && self.flows.other_half(flow).is_none();
            let is_silent = now.since(flow.active) >= IDLE_ENDING + waited * 2;
            if in_order && flow.app.protocol == 6 && !is_last_half && !is_silent {
                // A FIN that has passed here may not have arrived, nor the data before it. Should nobody answer, it is
                // asked again.
                self.flows.set_deadline(id, Some(now + LINGER));
                self.queue.ending(id);
                return;
            }
            self.remove_flow(id, if in_order { RemoveReason::Closed } else { RemoveReason::Reset });
            return;
        }
        match &flow.setup {
            Setup::Initiator(setup) if now < setup.give_up => {
                if !self.resolve_again(now, id) {
                    self.send_syn_again(now, id);
                }
            }
            Setup::Initiator(_) => self.give_up_connecting(id),
            Setup::Responder(_) if flow.chain.as_ref().is_some_and(|chain| chain.is_left()) => self.left_due(now, id),
            Setup::Responder(_) => self.drop_half_open(id),
            Setup::Late(_) => self.retry_ack(now, id),
            Setup::Done => {}
        }
    }

    /// What the flow cache says to [`Output::Ending`](crate::Output::Ending): each end has acknowledged all of the
    /// other's, or not yet.
    pub(crate) fn handle_ending(&mut self, id: FlowId, is_over: bool) {
        if is_over && self.flows.get(id).is_some_and(|flow| flow.lifecycle == Lifecycle::Closed) {
            self.remove_flow(id, RemoveReason::Closed);
        }
    }

    /// Looks for flows that nothing has passed on for their idle time.
    pub(crate) fn sweep(&mut self, now: Instant) {
        let is_idle = |flow: &Flow| {
            let idle = if flow.app.protocol == 6 { IDLE_TCP } else { IDLE_UDP };
            flow.carries_data() && now.since(flow.active) >= idle
        };
        let idle: Vec<FlowId> = self.flows.iter().filter(|flow| is_idle(flow)).map(|flow| flow.id).collect();
        for id in idle {
            self.remove_flow(id, RemoveReason::Idle);
        }
        let gone: Vec<Scope> =
            self.locations.scopes().filter(|scope| self.associations.by_host(scope.host).is_none()).collect();
        for scope in gone {
            self.locations.remove(scope);
        }
        self.patience.forget_terms(&self.associations);
        self.fences.forget_fences(&self.flows, &self.associations);
        self.locations.keep_peers(&self.associations, &self.config, now);
    }
}

impl FlowTable {
    fn end(&mut self, events: &mut EventQueue, id: FlowId, (event, reason): (LifeEvent, RemoveReason), until: Instant) {
        let Some(flow) = self.get_mut(id) else { return };
        if let Some(next) = flow.lifecycle.after(event) {
            flow.lifecycle = next;
            self.set_deadline(id, Some(until));
            events.push(Event::FlowEnded { flow: id, reason });
        }
    }

    /// The other half of a session at a box is gone: this one, which is closed, waits for late retransmissions alone,
    /// and may have waited for longer.
    pub(crate) fn end_with_other_half(&mut self, now: Instant, id: FlowId) {
        let in_order = |flow: &&Flow| flow.has(Marks::FIN_EGRESS | Marks::FIN_INGRESS) && !flow.has(Marks::FAILED);
        if let Some(closed_at) = self.get(id).filter(in_order).map(|flow| flow.closed_at) {
            self.set_deadline(id, Some((closed_at + LINGER).max(now)));
        }
    }

    pub(crate) fn is_half_open_here(&self, id: FlowId) -> bool {
        self.get(id).is_some_and(|flow| matches!(flow.setup, Setup::Responder(_)))
    }
}

#[cfg(test)]
mod tests {
    use margay_wire::Message;

    use super::*;
    use crate::act::handover::HandoverRecord;
    use crate::act::handover::tests::{meet_peer, record, sal};
    use crate::cache::output::Output;
    use crate::types::config::Limits;
    use margay_wire::STACK_ENCAP;

    #[test]
    fn a_flow_whose_program_has_no_socket_any_more_goes_with_its_entry_and_the_peer_hears_of_it() {
        for fins in [(false, false), (true, false), (false, true)] {
            let mut sal = sal(Limits::default());
            meet_peer(&mut sal, 77);
            let now = Instant::from_millis(60_000);
            sal.adopt_flow(now, &HandoverRecord { fins, ..record() }).expect("the peer is known");
            let mut buf = [0; 2048];
            while sal.poll(&mut buf).is_some() {}
            sal.end_without_socket(now, &[FlowId(7), record().flow]);
            assert!(sal.flow(record().flow).is_none(), "not after two hours");
            let (mut has_gone, mut fails) = (false, 0);
            while let Some(output) = sal.poll(&mut buf) {
                match output {
                    Output::Update(EntryUpdate::Remove { flow, .. }) => has_gone |= flow == record().flow,
                    Output::Transmit { .. } => fails += u32::from(buf[1] == margay_wire::Kind::Fail.into()),
                    _ => {}
                }
            }
            assert_eq!((has_gone, fails), (true, 1));
        }
    }

    /// A flow that an agent has taken up which died before it could write down that the peer's FIN had passed.
    #[test]
    fn a_syn_of_a_program_that_has_sent_its_fin_is_of_another_connection() {
        for (fins, is_kept) in [((true, false), false), ((false, true), true), ((false, false), true)] {
            let mut sal = sal(Limits::default());
            meet_peer(&mut sal, 77);
            let now = Instant::from_millis(60_000);
            let adopted = HandoverRecord { role: Role::Initiator, fins, ..record() };
            sal.adopt_flow(now, &adopted).expect("the peer is known");
            let app = adopted.app().expect("the record is of a flow of its own");
            let mut syn = packet::stale_ack(&app).expect("both are of one family");
            let tcp = syn.len() - 20;
            syn[tcp + 13] = tcp_flags::SYN;
            let verdict = sal.handle_app_packet(now, &syn);
            assert_eq!(
                (sal.flow(adopted.flow).is_some(), verdict == AppVerdict::Forward(adopted.flow)),
                (is_kept, is_kept)
            );
        }
    }

    #[test]
    fn a_connection_that_no_flow_is_of_is_reset_by_its_own_numbers() {
        let mut sal = sal(Limits::default());
        meet_peer(&mut sal, 77);
        let now = Instant::from_millis(60_000);
        sal.adopt_flow(now, &record()).expect("the peer is known");
        let mut buf = [0; 2048];
        while sal.poll(&mut buf).is_some() {}
        let known = record().app().expect("the record is of a flow of its own");
        let unknown = Tuple { source: SocketAddr::new(known.source.ip(), known.source.port() ^ 1), ..known };
        sal.end_without_flow(now, &[known, unknown]);
        let probe = injected(&mut sal);
        let Ok(packet::Parsed::Transport(probe)) = packet::parse(&probe) else { panic!("a segment is expected") };
        assert_eq!((probe.tuple, probe.tcp_flags()), (unknown.reversed(), tcp_flags::ACK));
        // The socket says its numbers: sequence 5, acknowledgement 9.
        let mut answer = packet::stale_ack(&unknown).expect("both are of one family");
        let tcp = answer.len() - 20;
        answer[tcp + 4..tcp + 12].copy_from_slice(&[0, 0, 0, 5, 0, 0, 0, 9]);
        sal.handle_app_packet(now, &answer);
        let reset = injected(&mut sal);
        let Ok(packet::Parsed::Transport(reset)) = packet::parse(&reset) else { panic!("a segment is expected") };
        assert_eq!((reset.tuple, reset.tcp_flags()), (unknown.reversed(), tcp_flags::RST));
        assert_eq!(reset.tcp_numbers(), Some((9, 0)), "RFC 5961 wants the exact one");
    }

    #[test]
    fn a_lost_flow_is_told_of_under_the_association_that_the_peer_has_used_last() {
        let mut sal = sal(Limits::default());
        for local_id in [77, 78, 79] {
            meet_peer(&mut sal, local_id);
            // Others that it meets later supersede it, and it goes unless a flow uses it.
            sal.associations.get_mut(local_id).expect("it is met").flows = 1;
        }
        // The peer has forgotten the oldest one, and the newest was never confirmed to it.
        let from = SocketAddr::new([10, 0, 0, 2].into(), 54324);
        for (local_id, remote_id, heard_ms) in [(77, 3, 10), (78, 4, 30), (79, 5, 20)] {
            let association = sal.associations.get_mut(local_id).expect("it is met");
            association.remote_id = remote_id;
            association.heard = Instant::from_millis(heard_ms);
        }
        let mut data = [0; 64];
        let dst_flow = FlowId(99);
        DataRepr { stack: STACK_ENCAP, flags: 0, dst_flow, packet_number: 0, index: 0, count: 1 }.emit(&mut data);
        let now = Instant::from_millis(60_000);
        assert_eq!(sal.handle_datagram(now, None, from, &data), Err(DropReason::UnknownFlow));
        let mut buf = [0; 2048];
        let mut told = Vec::new();
        while let Some(output) = sal.poll(&mut buf) {
            if let Output::Transmit { len, .. } = output {
                let message = Message::parse(&buf[..len]).expect("it is whole");
                told.push((message.kind, message.src_flow, message.auth().map(|auth| auth.assoc_id)));
            }
        }
        assert_eq!(told, [(Kind::Fail, FlowId(99), Some(4))]);
    }

    /// The one packet that the host's TCP is given.
    fn injected(sal: &mut Sal) -> Vec<u8> {
        let mut buf = [0; 2048];
        let mut packets = Vec::new();
        while let Some(output) = sal.poll(&mut buf) {
            if let Output::Inject { len } = output {
                packets.push(buf[..len].to_vec());
            }
        }
        assert_eq!(packets.len(), 1);
        packets.remove(0)
    }
}
