//! The listening side from the ACK on: the initiator is proved, or not, and let in, or not.

use alloc::boxed::Box;
use core::net::SocketAddr;

use margay_wire::{ErrorCode, Flags, FlowId, GrantRepr, Kind, Message, MoveFlags, MoveRepr};

use super::{ResponderSetup, Shown, starts_direct};
use crate::act::stack_rule::engine::{act_as_rules_do, guard_as_rules_do};
use crate::association::draft::relayed_from;
use crate::association::location::Pair;
use crate::association::{Association, AssociationTable, auth};
use crate::cache::entry::{EntryUpdate, RemoveReason};
use crate::cache::packet::{self, Parsed};
use crate::machine::sal::Sal;
use crate::session::event::Event;
use crate::session::flow::{Flow, FlowTable, LifeEvent, Marks, Setup};
use crate::trust::handshake::{Introduction, Keys};
use crate::types::config::Config;
use crate::types::drop_reason::DropReason;
use crate::types::key::HostPublic;
use crate::types::name::ServiceId;
use crate::types::role::{Lifecycle, Role};
use crate::types::time::Instant;
use crate::types::tuple::GREETING;

/// What an ACK proved.
#[derive(Clone, Copy)]
struct Proof {
    association: u32,
    /// The handshake ended with it.
    fresh: bool,
    /// The initiator sends direct from the start.
    starts: bool,
    /// What its socket is called, as it says.
    claimed: Option<ServiceId>,
    /// The grant that it has asked for: nobody vouches for a SYN.
    asks: Option<GrantRepr>,
    /// What it says that its SYN has asked for.
    syn_seen: Option<[u8; 32]>,
    /// It may pass on the session that it has: its own, or such as has passed a box that it may speak for.
    is_neighbour: bool,
    /// The pair of addresses by which the initiator has had an answer.
    answered: Pair,
}

impl Sal {
    /// The ACK: the peer is proved, or not.
    pub(crate) fn handle_ack(
        &mut self,
        now: Instant,
        from: SocketAddr,
        message: &Message<'_>,
    ) -> Result<(), DropReason> {
        if message.flags.contains(Flags::CONFIRM) {
            let association = authenticate_confirm(self, now, from, message)?;
            return self.handle_confirm(now, message, association);
        }
        let id = message.dst_flow;
        if let Some((given, peer_grant)) = self.grants.given_by(id) {
            let association = auth::authenticate(&mut self.associations, message, now)?.association();
            if association != given {
                return Err(DropReason::Unexpected);
            }
            // The CONFIRM was lost.
            self.confirm((id, peer_grant), association, false);
            return Ok(());
        }
        let flow = self.flows.get(id).filter(|flow| flow.role == Role::Responder).ok_or(DropReason::UnknownFlow)?;
        let fresh = matches!(&flow.setup, Setup::Responder(setup) if setup.handshake.is_some());
        // A router may have passed it on. Which address that names decides nothing: see `relayed_from`.
        let straight = Some(from).filter(|_| relayed_from(message).is_none());
        let at = match &flow.setup {
            Setup::Responder(setup) => setup.reply.proved(straight),
            _ => straight,
        };
        let association = if fresh {
            self.finish_handshake(now, at.ok_or(DropReason::WrongPath)?, message)?
        } else {
            auth::authenticate(&mut self.associations, message, now)?.association()
        };
        let flow = self.flows.get_mut(id).ok_or(DropReason::UnknownFlow)?;
        if flow.lifecycle != Lifecycle::Connecting {
            return confirm_again(self, association, from, message);
        }
        if !fresh && flow.association != association {
            return Err(DropReason::Unexpected);
        }
        if message.kind == Kind::Rst {
            if fresh {
                // The initiator proved itself only to say no, and keeps no association: nor do we.
                self.associations.remove(association);
            }
            self.drop_half_open(id);
            return Ok(());
        }
        let at = at.ok_or(DropReason::WrongPath)?;
        let answered = Pair { local: self.arrival.filter(|_| straight == Some(at)), remote: at };
        let claimed = message.source_service().map(ServiceId);
        let is_neighbour = self.is_neighbour(id, association, message);
        self.note_whereabouts(association, message);
        self.associations.note_abilities(association, message);
        let (starts, asks, syn_seen) = (starts_direct(message), message.grant(), message.syn_seen());
        let peer_flow = message.src_flow;
        let proof = Proof { association, fresh, starts, claimed, asks, syn_seen, is_neighbour, answered };
        self.admit(now, id, proof)?;
        if self.flows.get(id).is_some() {
            self.confirm_where_asked((id, peer_flow), association, message, from);
            if let Some(remote) = straight {
                have_it_proved(self, association, remote);
            }
        }
        Ok(())
    }

    /// Reads the third handshake message and adopts the association that it makes; the one check then sees its tag.
    fn finish_handshake(&mut self, now: Instant, at: SocketAddr, message: &Message<'_>) -> Result<u32, DropReason> {
        let exchange = message.key_exchange().ok_or(DropReason::Untagged)?;
        let flow = self.flows.get_mut(message.dst_flow).ok_or(DropReason::UnknownFlow)?;
        let Setup::Responder(setup) = &mut flow.setup else { return Err(DropReason::Unexpected) };
        let handshake = setup.handshake.as_mut().ok_or(DropReason::Unexpected)?;
        let read = setup.shown_by.take().filter(|shown| shown.message_3 == exchange.message).map(|shown| shown.proved);
        let (peer, theirs, keys) = match read {
            Some(proved) => proved,
            None => handshake.finish(exchange.message).map_err(|_| DropReason::BadHandshake)?,
        };
        let (reserved, datagram_max, claimed) = (setup.association, setup.datagram_max, setup.claimed);
        if peer.id() != claimed || peer.id().0 != exchange.host_id {
            return Err(DropReason::BadHandshake);
        }
        let adopted = self.adopt_peer(now, &peer, &theirs, reserved, &keys, message, at, false);
        if let Err(reason) = adopted {
            self.put_newcomer_off(at, message, reserved, (peer, theirs, keys), reason);
            return Err(reason);
        }
        if let Some(association) = self.associations.get_mut(reserved) {
            association.datagram_max = datagram_max;
        }
        Ok(reserved)
    }

    /// A peer has proved its key, and another host uses that as well: it waits until it is known whether that one is
    /// there, or goes.
    fn put_newcomer_off(
        &mut self,
        from: SocketAddr,
        message: &Message<'_>,
        reserved: u32,
        proved: (HostPublic, Introduction, Keys),
        reason: DropReason,
    ) {
        let id = message.dst_flow;
        match reason {
            DropReason::KeptOut => {
                let (peer, theirs, keys) = proved;
                let mut once = Association::new(reserved, theirs.assoc_id, peer, keys, false, from);
                once.peer_epoch = theirs.epoch;
                self.say_kept_out(id, message, from, once);
            }
            DropReason::Inquired | DropReason::Full => {
                let message_3 = message.key_exchange().map(|exchange| exchange.message.to_vec()).unwrap_or_default();
                if let Some(Setup::Responder(setup)) = self.flows.get_mut(id).map(|flow| &mut flow.setup) {
                    setup.shown_by = Some(Box::new(Shown { message_3, proved }));
                }
            }
            _ => {}
        }
    }

    /// A proved peer: may it connect? Then the flow is established and what was held is let go.
    fn admit(&mut self, now: Instant, id: FlowId, proof: Proof) -> Result<(), DropReason> {
        let Proof { association, fresh, starts, claimed, asks, syn_seen, is_neighbour, answered: pair } = proof;
        let Some(flow) = self.flows.get(id) else { return Err(DropReason::UnknownFlow) };
        // A greeting is over at once, and nothing needs the association for its sake.
        let flow_is_connection = flow.app.protocol != GREETING;
        let is_chained = flow.chain.is_some();
        let Setup::Responder(setup) = &flow.setup else { return Err(DropReason::Unexpected) };
        let answered = setup.answered;
        let client = setup.reply.direct.ip();
        self.find_peer(association, pair);
        if let Some(association) = self.associations.get_mut(association) {
            association.rtt = answered.map(|at| now.since(at)).or(association.rtt);
        }
        if let Err(code) = self.rule_on_proved(id, association, syn_seen, is_neighbour) {
            if let Some(flow) = self.flows.get_mut(id) {
                flow.association = association;
            }
            self.say_fail(id, code);
            self.drop_half_open(id);
            return Err(reason_of(code));
        }
        self.locations.announce_path(&self.associations, &mut self.queue, association);
        if flow_is_connection {
            self.associations.hold_flow(association, Role::Responder);
        }
        self.half_open.remove(client);
        // Who passes a session on is not its client.
        let source = claimed.filter(|_| !is_chained).and_then(|claimed| self.believed(association, claimed));
        let Some(flow) = self.flows.get_mut(id) else { return Err(DropReason::UnknownFlow) };
        flow.source = source.map(Box::new);
        flow.association = association;
        flow.generation += 1;
        flow.active = now;
        flow.marks |= Marks::AUTHENTICATED;
        flow.lifecycle = flow.lifecycle.after(LifeEvent::Proved).unwrap_or(flow.lifecycle);
        let (protocol, peer_flow) = (flow.app.protocol, flow.peer_flow);
        let mut setup = core::mem::replace(&mut flow.setup, Setup::Done);
        self.flows.set_deadline(id, None);
        if protocol == GREETING {
            let is_over = self.give_offered(now, id, &setup, asks);
            end_greeting(self, (id, peer_flow), (association, fresh), is_over);
            return Ok(());
        }
        self.flows.seal_as_set_up(&self.associations, &self.config, id, &setup);
        if self.way_set_up(now, id, &mut setup) {
            self.confirm((id, peer_flow), association, fresh);
            return Ok(());
        }
        let handover = if let Setup::Responder(setup) = &setup { setup.handover } else { None };
        if handover.is_none() {
            self.flows.begin_direct(&self.fetches, &mut self.associations, now, id, starts);
            guard_as_rules_do(self, now, id);
        }
        self.left_proved(now, id);
        if let Setup::Responder(setup) = setup {
            self.let_in(id, *setup);
        }
        if let Some(handover) = handover {
            self.confirm((id, peer_flow), association, fresh);
            self.await_connection(now, id, &handover);
            return Ok(());
        }
        self.flows.open_pinhole(&mut self.ports, &mut self.queue, now, id);
        self.confirm((id, peer_flow), association, fresh);
        self.begin_policy(now, id);
        act_as_rules_do(self, now, id);
        self.events.push(Event::FlowOpened(id));
        Ok(())
    }

    /// Installs an established flow, and gives its program what was held.
    fn let_in(&mut self, id: FlowId, setup: ResponderSetup) {
        let Some(entry) = self.flows.get(id).map(Flow::entry) else { return };
        if let Some(address) = setup.shown {
            // Before the first datagram: a client that has two addresses is two clients.
            self.queue.update(EntryUpdate::Show { surrogate: entry.app.destination, address });
        }
        self.queue.update(EntryUpdate::Install(entry));
        if let Some(Ok(Parsed::Transport(answer))) = setup.app_answer.as_deref().map(packet::parse)
            && let Some((sequence, expected)) = answer.tcp_numbers()
        {
            self.queue.update(EntryUpdate::Begun { flow: id, next: sequence.wrapping_add(1), expected });
        }
        if let Some(first) = setup.first {
            self.queue.deliver(id, first);
        }
        for (from, datagram) in setup.held {
            self.queue.ingress(from, datagram);
        }
        let have_waited = !setup.held_direct.is_empty();
        for packet in setup.held_direct {
            self.deliver_direct(id, &packet);
        }
        if have_waited {
            // Now the cache may give it others: see `Direct::begun`.
            self.flows.install_again(&mut self.queue, id);
        }
    }
}

impl FlowTable {
    fn seal_as_set_up(&mut self, associations: &AssociationTable, config: &Config, id: FlowId, setup: &Setup) {
        if let Setup::Responder(setup) = setup
            && let Some(cipher) = setup.cipher
        {
            self.seal_flow(associations, config, id, cipher);
        }
    }
}

fn end_greeting(sal: &mut Sal, flows: (FlowId, FlowId), (association, fresh): (u32, bool), is_over: bool) {
    if is_over {
        sal.confirm(flows, association, fresh);
        sal.remove_flow(flows.0, RemoveReason::Closed);
    }
}

/// The confirmation of an ACK. Where the peer is, may be hearsay: then it has to come from there.
fn authenticate_confirm(
    sal: &mut Sal,
    now: Instant,
    from: SocketAddr,
    message: &Message<'_>,
) -> Result<u32, DropReason> {
    let association = auth::authenticate(&mut sal.associations, message, now)?.association();
    let is_elsewhere = sal.associations.get(association).is_none_or(|known| known.remote != from);
    let is_hearsay = |flow: &Flow| matches!(&flow.setup, Setup::Late(late) if late.is_hearsay);
    if is_elsewhere && sal.flows.get(message.dst_flow).is_some_and(is_hearsay) {
        return Err(DropReason::WrongPath);
    }
    Ok(association)
}

/// The CONFIRM of a flow that is set up was lost.
fn confirm_again(sal: &mut Sal, association: u32, from: SocketAddr, message: &Message<'_>) -> Result<(), DropReason> {
    let flow = sal.flows.get(message.dst_flow).filter(|flow| flow.association == association);
    let flows = flow.map(|flow| (flow.id, flow.peer_flow)).ok_or(DropReason::Unexpected)?;
    if relayed_from(message).is_none() {
        sal.find_peer(association, Pair { local: sal.arrival, remote: from });
    }
    sal.confirm(flows, association, false);
    sal.confirm_where_asked(flows, association, message, from);
    Ok(())
}

/// An initiator that is known elsewhere has sent its ACK from `remote`: it has to prove by RSYN that it is there,
/// before anything but this goes there.
fn have_it_proved(sal: &mut Sal, association: u32, remote: SocketAddr) {
    let known = sal.associations.get(association).filter(|known| known.remote != remote);
    let Some(host) = known.map(|known| known.host) else { return };
    let probe =
        MoveRepr { number: sal.rng.u32(), token: 0, challenge: 0, address: remote, flags: MoveFlags::ELSEWHERE };
    sal.send_probe(host, Pair { local: sal.arrival, remote }, probe, Flags::empty());
}

/// As what a refusal of a proved host is counted.
fn reason_of(code: ErrorCode) -> DropReason {
    if code == ErrorCode::SynChanged { DropReason::SynChanged } else { DropReason::NotAllowed }
}
