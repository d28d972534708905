//! The direct path: when a flow's packets go as they are, between the hosts' own addresses, and when they are
//! encapsulated again (DESIGN §2, §18).
//!
//! Both ends choose a *flow port* in SYN and SYN-ACK. That alone proves nothing: a stateful firewall drops segments
//! whose SYN it never saw, and holes in it are per flow. So each flow is proved by packets of its own kind:
//!
//! ```text
//!   initiator                                   responder
//!   Encapsulated ──── pinhole ────────────────▶ Encapsulated
//!                ◀─────────────── pinhole ───── Offered
//!   Sending ───────── direct data, FENCE ─────▶ Offered
//!                ◀── direct data, FENCE ─────── Direct
//!   Direct
//! ```
//!
//! FENCE is the last encapsulated packet: what came direct before it waits behind it, so the change-over reorders
//! nothing. Where the path was proved a short time ago by another flow, both start direct at once and watch for
//! progress: nothing encapsulated is before their first packets, so the initiator (`Starting`) takes the peer's without
//! a word of it. A flow whose direct packets go unanswered goes back, and its peer follows when it sees encapsulated
//! data again.
//!
//! Datagrams that are lost are lost: no transport sends them again. So a flow of datagrams never starts on another's
//! proof, its pinhole is a datagram without a payload (an application's own empty ones go encapsulated). The responder
//! sends one first, for there may be a firewall at either end that lets in only what answers; so it is the second that
//! shows the initiator that its own come through. The end that only receives answers once a second with a pinhole, so
//! that the other has progress to watch. After a pause in which holes may have closed, the first datagram goes
//! encapsulated again, and the flow is proved anew.

mod pinhole;

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::net::IpAddr;
use core::ops::RangeInclusive;
use core::time::Duration;

use margay_wire::{FlowId, FlowPortRepr};

use self::pinhole::PINHOLE_FIRST;
use crate::act::fetch::Fetches;
use crate::act::setup::ResponderSetup;
use crate::association::AssociationTable;
use crate::association::location::{Cause, Scope};
use crate::cache::entry::{Directions, EntryUpdate, Passage, PathId, Wire};
use crate::cache::output::AppVerdict;
use crate::cache::packet::{self, AppPacket};
use crate::cache::queue::OutputQueue;
use crate::cache::waiting_packets::WaitingPackets;
use crate::leg::carriage::{Carriage, DirectEvent, Why};
use crate::leg::delta::Checksum;
use crate::leg::flow_ports::FlowPorts;
use crate::machine::sal::Sal;
use crate::session::flow::FlowTable;
use crate::session::flow::{Flow, Setup};
use crate::types::config::Config;
use crate::types::drop_reason::DropReason;
use crate::types::key::HostId;
use crate::types::rng::Rng;
use crate::types::role::{Lifecycle, Role};
use crate::types::time::Instant;
use crate::types::tuple::Tuple;

/// For so long a proof by one flow is a hint for the next.
const HINT: Duration = Duration::from_secs(60);
/// A lost FENCE holds direct packets up for so long at most.
const FENCE_WAIT: Duration = Duration::from_millis(50);
/// A FENCE that has not come by [`FENCE_WAIT`] may be late only, and what the peer encapsulated before it as well: a
/// busy host's agent has some of that still to read.
const FENCE_LATE: Duration = Duration::from_secs(1);
/// Memory of the direct packets of a flow that wait for a FENCE, in bytes; the next ones go before it. Where a
/// processor has much to do, all that a fast flow sends in [`FENCE_WAIT`] waits.
const QUEUED_BYTES: usize = 4 << 20;
/// What of a flow may overtake its ACK: more than the first window of a connection, and no less than one packet may
/// have.
const HELD_DIRECT_BYTES: usize = 65_535;
/// Wait before a FENCE is said again, and how often it is.
const FENCE_AGAIN: Duration = Duration::from_millis(200);
const FENCES_MAX: u8 = 5;
/// Tries to find a free pair of ports.
const PORT_TRIES: usize = 16;
const TCP: u8 = 6;
const UDP: u8 = 17;

/// What a flow keeps of its direct path.
pub(crate) struct Direct {
    pub carriage: Carriage,
    pub why: Why,
    pub since: Instant,
    pub local_port: u16,
    pub peer_port: u16,
    /// Whose ports they are: this end's and the peer's are one flow's alone.
    pub peer: Option<HostId>,
    /// The path record that the cache's entry names: one per address pair and peer.
    pub path: u32,
    tries: u8,
    /// Pinholes of the responder that have come, of a flow of datagrams.
    heard: u8,
    due: Option<Instant>,
    /// This end accepts direct packets without having heard the peer's FENCE: until then, encapsulated ones may be of
    /// the time before.
    unfenced_until: Option<Instant>,
    /// Packets that wait for a FENCE.
    queued: Option<Box<WaitingPackets>>,
    /// A responder's flow that is direct from the start takes the peer's first packet from the agent, and only then
    /// others from the kernel. By that one the host's TCP makes a socket of a request, and for a moment finds neither:
    /// what comes by another processor then would be answered by a RST.
    begun: bool,
}

impl Direct {
    pub const fn never(why: Why, since: Instant) -> Self {
        Self {
            carriage: Carriage::Never,
            why,
            since,
            local_port: 0,
            peer_port: 0,
            peer: None,
            path: 0,
            tries: 0,
            heard: 0,
            due: None,
            unfenced_until: None,
            queued: None,
            begun: true,
        }
    }

    /// Has a packet wait for the FENCE. False if there is no room for it.
    fn queue(&mut self, packet: &[u8]) -> bool {
        self.queued.get_or_insert_default().push(packet, QUEUED_BYTES)
    }

    /// What waits for the FENCE; from here on nothing does.
    fn take_queued(&mut self) -> Vec<Vec<u8>> {
        self.queued.take().map(|queued| queued.packets).unwrap_or_default()
    }

    /// As the cache's entry has it.
    pub fn wire(&self) -> Option<Wire> {
        (self.carriage != Carriage::Never).then_some(Wire {
            path: PathId(self.path),
            local_port: self.local_port,
            remote_port: self.peer_port,
            sending: self.carriage.sends(),
            accepting: self.carriage.accepts(),
            begun: self.begun,
        })
    }
}

/// Whether one more packet may wait for the ACK that it has overtaken.
fn may_hold(held: &[Vec<u8>], len: usize, packets_max: usize) -> bool {
    held.len() < packets_max && held.iter().map(Vec::len).sum::<usize>() + len <= HELD_DIRECT_BYTES
}

/// A direct packet that overtook the ACK: what is held goes on when the peer is proved.
fn hold_direct(setup: &mut ResponderSetup, packet: &AppPacket<'_>, packets_max: usize) -> AppVerdict {
    if setup.cipher.is_some() {
        return AppVerdict::Drop(DropReason::OtherStack);
    }
    if packet.is_bare() && !packet.is_tcp() {
        // It comes again.
        return AppVerdict::Consumed;
    }
    if !may_hold(&setup.held_direct, packet.whole.len(), packets_max) {
        return AppVerdict::Drop(DropReason::Full);
    }
    setup.held_direct.push(packet.whole.to_vec());
    AppVerdict::Consumed
}

impl Sal {
    /// Which ports direct flows may use; `None` while this host has no eBPF flow cache: then every flow is
    /// encapsulated. Flows that are direct go back at once when it becomes `None`, and are tried again when it comes
    /// back. Packets that peers go on sending direct meanwhile still find their flows.
    pub fn set_flow_ports(&mut self, now: Instant, range: Option<RangeInclusive<u16>>) {
        self.now = now;
        self.ports.is_on = range.is_some();
        self.ports.range = range.or(self.ports.range.take());
        if !self.ports.is_on {
            self.end_all_grants();
        }
        let all: Vec<FlowId> = self.flows.iter().map(|flow| flow.id).collect();
        for id in all {
            if !self.ports.is_on {
                self.direct_event(now, id, DirectEvent::Stalled, Why::NoCache);
                // Nor is one waited for that the peer was offered.
                self.direct_event(now, id, DirectEvent::PeerBack, Why::NoCache);
            } else if self.flows.is_waiting_for_proof(&self.ports, id) {
                self.flows.set_direct_due(&mut self.ports, id, Some(now + PINHOLE_FIRST));
            }
        }
    }

    /// Flows that this end sends direct.
    pub fn direct_count(&self) -> usize {
        self.flows.iter().filter(|flow| flow.direct.carriage.sends() && flow.carries_data()).count()
    }

    /// The responder's choice, once it knows the initiator's address and port.
    pub(crate) fn answer_port(
        &mut self,
        now: Instant,
        id: FlowId,
        (host, peer): (HostId, IpAddr),
        offered: Option<FlowPortRepr>,
    ) {
        let Some(flow) = self.flows.get(id) else { return };
        let app = flow.app;
        let refused = self.ports.refusal(&self.config, &app, peer, offered.is_some());
        let mut direct = Direct::never(refused.unwrap_or(Why::PortsTaken), now);
        if let (None, Some(range), Some(offered)) = (refused, self.ports.range.clone(), offered) {
            for _ in 0..PORT_TRIES {
                let port = self.rng.random_port(&range);
                if self.ports.claim(now, (host, port, offered.port), id) {
                    direct.carriage = Carriage::Encapsulated;
                    direct.why = Why::Unproved;
                    (direct.local_port, direct.peer_port, direct.peer) = (port, offered.port, Some(host));
                    break;
                }
            }
        }
        if let Some(flow) = self.flows.get_mut(id) {
            flow.direct = direct;
        }
    }

    /// What the initiator makes of the responder's answer; `local_port` is what its SYN offered.
    pub(crate) fn settle_ports(
        &mut self,
        now: Instant,
        id: FlowId,
        local_port: Option<u16>,
        answer: Option<FlowPortRepr>,
    ) {
        let Some(flow) = self.flows.get(id) else { return };
        let (app, association) = (flow.app, flow.association);
        let Some(known) = self.associations.get(association) else { return };
        let (host, peer) = (known.host, known.remote.ip());
        let mut direct = Direct::never(Why::PortsTaken, now);
        match (self.ports.refusal(&self.config, &app, peer, answer.is_some()), local_port, answer) {
            (Some(why), _, _) => direct.why = why,
            (None, Some(port), Some(answer)) if self.ports.claim(now, (host, port, answer.port), id) => {
                direct.carriage = Carriage::Encapsulated;
                direct.why = Why::Unproved;
                (direct.local_port, direct.peer_port, direct.peer) = (port, answer.port, Some(host));
            }
            _ => {}
        }
        if let Some(flow) = self.flows.get_mut(id) {
            flow.direct = direct;
        }
    }

    /// The kernel's cache has carried an adopted flow meanwhile: it goes on as it is. `generation` is that of the
    /// cache's entry. False when this host knows no such flow: the entry is of no more use.
    pub fn adopt_direct(&mut self, now: Instant, id: FlowId, generation: u32, wire: &Wire) -> bool {
        self.now = now;
        let Some(flow) = self.flows.get_mut(id) else { return false };
        let is_same = (flow.direct.local_port, flow.direct.peer_port) == (wire.local_port, wire.remote_port);
        if !is_same || flow.direct.carriage == Carriage::Never || !(wire.sending || wire.accepting) {
            return false;
        }
        flow.generation = flow.generation.max(generation);
        // What a responder sends direct, and does not take yet, has been direct from its start, and its first packet
        // has not come.
        flow.direct.begun = wire.takes() || flow.role == Role::Initiator;
        let is_direct = wire.takes() || !flow.direct.begun;
        flow.direct.carriage = if is_direct { Carriage::Direct } else { Carriage::Sending };
        flow.direct.why = Why::Proved;
        let association = flow.association;
        // Otherwise it is of an association that is gone, or of a path aside: it goes on by what it has been given.
        if self.flows.take_up_wire_path(&mut self.associations, &mut self.queue, association, wire.path.0)
            && let Some(flow) = self.flows.get_mut(id)
        {
            flow.direct.path = wire.path.0;
        }
        self.flows.set_direct_due(&mut self.ports, id, None);
        self.flows.install_again(&mut self.queue, id);
        true
    }

    /// From here on nothing of the flow goes direct, such as where it is sealed. Its ports stay its own.
    pub(crate) fn park_direct(&mut self, now: Instant, id: FlowId, why: Why) {
        self.flows.set_direct_due(&mut self.ports, id, None);
        let Some(flow) = self.flows.get_mut(id) else { return };
        let waiting = flow.direct.take_queued();
        let Direct { local_port, peer_port, peer, .. } = flow.direct;
        flow.direct = Direct { local_port, peer_port, peer, ..Direct::never(why, now) };
        waiting.iter().for_each(|packet| self.deliver_direct(id, packet));
    }

    /// The flow is plain again: where it has ports, it may be lifted as at its set-up.
    pub(crate) fn unpark_direct(&mut self, now: Instant, id: FlowId) {
        let Some(flow) = self.flows.get(id) else { return };
        let app = flow.app;
        let association = flow.association;
        let has_ports = flow.direct.peer.is_some();
        let Some(host) = self.associations.get(association).map(|association| association.host) else { return };
        let Some(peer) = self.pair_in_use(Scope { host, flow: id }).map(|pair| pair.remote.ip()) else { return };
        let path = if has_ports { self.associations.wire_path_of_flow(&self.flows, id) } else { None };
        let refused = self.ports.refusal(&self.config, &app, peer, has_ports);
        let Some(flow) = self.flows.get_mut(id) else { return };
        flow.direct.since = now;
        (flow.direct.tries, flow.direct.heard) = (0, 0);
        (flow.direct.carriage, flow.direct.why) = match path {
            Some(path) => {
                flow.direct.path = path;
                (Carriage::Encapsulated, refused.unwrap_or(Why::Unproved))
            }
            None => (Carriage::Never, refused.unwrap_or(Why::SharedAddress)),
        };
    }

    /// The flow cache saw something of a flow's direct path.
    pub(crate) fn handle_direct(&mut self, now: Instant, id: FlowId, event: DirectEvent) {
        let why = match event {
            DirectEvent::Stalled => Why::Stalled,
            DirectEvent::PeerBack => Why::PeerBack,
            _ => Why::Proved,
        };
        let says_again = |flow: &Flow| {
            flow.role == Role::Responder && flow.direct.carriage == Carriage::Direct && event == DirectEvent::PeerDirect
        };
        if let Some(flow) = self.flows.get_mut(id) {
            match event {
                DirectEvent::PeerDirect => flow.direct.unfenced_until = None,
                DirectEvent::PeerBack if flow.direct.unfenced_until.is_some_and(|until| now < until) => return,
                _ => {}
            }
        }
        if self.flows.get(id).is_some_and(says_again) {
            // The initiator repeats its FENCE until it has this end's.
            self.queue.fence(id);
        }
        // Its last packets may find nobody there any more: nothing is wrong with their way.
        let is_over = self.flows.get(id).is_some_and(|flow| flow.lifecycle == Lifecycle::Closed);
        self.direct_event(now, id, event, why);
        if event == DirectEvent::Stalled && !self.rejoin(now, id, Cause::Silence) && !is_over {
            // A firewall, or nothing passes any more.
            let association = self.flows.get(id).and_then(|flow| self.associations.get(flow.association));
            if let Some(host) = association.map(|association| association.host) {
                self.suspect(now, host, None);
            }
        }
    }

    pub(crate) fn direct_event(&mut self, now: Instant, id: FlowId, event: DirectEvent, why: Why) {
        let Some(flow) = self.flows.get_mut(id) else { return };
        let (role, before, association) = (flow.role, flow.direct.carriage, flow.association);
        // A socket that has just closed would answer by a RST.
        let is_open = matches!(flow.lifecycle, Lifecycle::Established | Lifecycle::HalfClosed);
        let is_over = flow.lifecycle == Lifecycle::Closed;
        let to_app = flow.app.reversed();
        let is_tcp = to_app.protocol == TCP;
        let is_at_box = flow.is_at_box();
        let may_send = self.ports.is_on && flow.stripe.is_none();
        let Some(next) = before.after(event, role).filter(|next| *next != before && (may_send || !next.sends())) else {
            return;
        };
        flow.direct.carriage = next;
        (flow.direct.tries, flow.direct.heard, flow.direct.begun) = (0, 0, true);
        flow.direct.unfenced_until = None;
        if next.sends() != before.sends() {
            flow.direct.why = why;
            flow.direct.since = now;
        }
        let queued = flow.direct.take_queued();
        self.flows.set_direct_due(&mut self.ports, id, None);
        // What waited for the FENCE goes before whatever the new entry lets through.
        for packet in queued {
            self.deliver_direct(id, &packet);
        }
        self.flows.install_again(&mut self.queue, id);
        if next.sends() && !before.sends() {
            self.queue.fence(id);
        }
        if event == DirectEvent::Stalled {
            self.queue.back(id);
        }
        if is_open && is_tcp && !is_at_box && before.sends() && !next.sends() {
            // What the application acknowledged last may have gone direct, and nowhere: it says so once more. A box
            // would take the probe for a packet of the session.
            if let Some(probe) = packet::stale_ack(&to_app) {
                self.queue.inject(probe);
            }
        }
        match next {
            Carriage::Direct if is_tcp => {
                self.associations.note_proof(association, Some(now));
                if let Some(host) = self.associations.get(association).map(|association| association.host) {
                    self.locations.note_data_passes(host);
                }
            }
            Carriage::Sending => self.flows.set_direct_due(&mut self.ports, id, Some(now + FENCE_AGAIN)),
            Carriage::Encapsulated => {
                if is_tcp && !is_over {
                    self.associations.note_proof(association, None);
                }
                if role == Role::Initiator && self.ports.is_on {
                    self.flows.set_direct_due(&mut self.ports, id, Some(now + PINHOLE_FIRST));
                } else {
                    self.flows.open_pinhole(&mut self.ports, &mut self.queue, now, id);
                }
            }
            Carriage::Starting | Carriage::Direct | Carriage::Offered | Carriage::Never => {}
        }
    }

    /// The flow that direct packets with these addresses and ports belong to. `tuple` is as they stand on the wire.
    fn flow_on_wire(&self, tuple: &Tuple) -> Option<FlowId> {
        let (local, remote, ip) = (tuple.destination.port(), tuple.source.port(), tuple.source.ip());
        let is_aside = |host| self.side_paths.iter().any(|side| side.host == host && side.pair.remote.ip() == ip);
        let flows = self.ports.flows_by(local, remote);
        // This end's port was chosen at random, so that there is hardly ever more than one.
        flows.filter(|(host, _)| self.associations.is_at(*host, ip) || is_aside(*host)).map(|(_, flow)| flow).next()
    }

    /// A packet of the wire on a flow port that the cache could not place; `None` if it is none.
    pub(crate) fn direct_packet(&mut self, now: Instant, packet: &AppPacket<'_>) -> Option<AppVerdict> {
        let range = self.ports.range.as_ref()?;
        let own = &self.config.local_addresses;
        if !range.contains(&packet.tuple.destination.port()) || !own.contains(&packet.tuple.destination.ip()) {
            return None;
        }
        let Some(id) = self.flow_on_wire(&packet.tuple) else {
            return Some(self.associations.give_to_host(&self.ports, &mut self.queue, packet));
        };
        let is_reset = packet.tcp_flags() & packet::tcp_flags::RST != 0;
        let is_strangers = is_reset
            && self.flows.get(id).is_some_and(|flow| {
                let is_direct = !matches!(flow.direct.carriage, Carriage::Encapsulated | Carriage::Never);
                !is_direct || self.locations.passage_of_flow(&self.associations, flow) != Passage::Open
            });
        // None: it is of a grant, and the kernel has said nothing of it yet. It comes again.
        let is_its = |flow: &&mut Flow| flow.app.protocol == packet.tuple.protocol;
        let Some(flow) = self.flows.get_mut(id).filter(is_its) else {
            return Some(AppVerdict::Drop(DropReason::UnknownFlow));
        };
        if !flow.stacks.takes_direct() {
            // Nobody but the peer may say something of a sealed flow.
            return Some(AppVerdict::Drop(DropReason::OtherStack));
        }
        if let Setup::Responder(setup) = &mut flow.setup {
            let verdict = hold_direct(setup, packet, self.config.limits.held_per_flow);
            self.counters.held_full += u64::from(verdict == AppVerdict::Drop(DropReason::Full));
            return Some(verdict);
        }
        if !flow.carries_data() {
            return Some(AppVerdict::Drop(DropReason::UnknownFlow));
        }
        let (is_bare, is_datagram) = (packet.is_bare(), flow.app.protocol == UDP);
        let carriage = flow.direct.carriage;
        let is_for_agents = !flow.has_socket() || (flow.lifecycle == Lifecycle::Closed && packet.is_pinhole());
        if is_strangers || self.queue.is_frozen(id) {
            // The connection is on its way to another host; or the peer sends nothing direct, or nothing has come by
            // the new path yet: somebody on the way refuses pinholes.
            return Some(AppVerdict::Drop(DropReason::Unexpected));
        }
        if !is_bare && carriage.expects_fence() {
            let is_first = flow.direct.queued.is_none();
            if flow.direct.queue(packet.whole) {
                if is_first {
                    self.flows.set_direct_due(&mut self.ports, id, Some(now + FENCE_WAIT));
                }
                return Some(AppVerdict::Consumed);
            }
        }
        if is_bare && !carriage.accepts() {
            self.handle_pinhole(now, id, packet.is_knock());
        }
        // A pinhole is for the agents: a socket that has just closed would answer it with a RST. But it may also be an
        // acknowledgement of a peer that sends direct already, or still; an open connection takes either. Nothing else
        // is an empty datagram, and the cache gives every one to the agent.
        if is_bare && is_datagram {
            return Some(AppVerdict::Consumed);
        }
        if !is_bare || carriage.accepts() || !is_for_agents {
            self.deliver_direct(id, packet.whole);
        }
        if carriage.accepts() && self.flows.get(id).is_some_and(|flow| flow.directions == Directions::Both) {
            // The cache has forgotten it, or it was the first one.
            self.flows.install_again(&mut self.queue, id);
        }
        Some(AppVerdict::Consumed)
    }

    fn handle_pinhole(&mut self, now: Instant, id: FlowId, is_knock: bool) {
        let Some(flow) = self.flows.get(id).filter(|_| self.ports.is_on) else { return };
        match flow.role {
            Role::Responder => self.queue.pinhole(id),
            // No answer, since nothing was asked: after this end went back the peer still acknowledges direct for a
            // while.
            Role::Initiator if flow.direct.tries == 0 => return,
            Role::Initiator if is_knock || flow.app.protocol == UDP && flow.direct.heard == 0 => {
                // The responder's own says nothing of this end's. What goes out now meets an open hole.
                self.queue.pinhole(id);
                if let Some(flow) = self.flows.get_mut(id) {
                    flow.direct.heard = 1;
                }
                return;
            }
            Role::Initiator => {}
        }
        self.direct_event(now, id, DirectEvent::Pinhole, Why::Proved);
    }

    /// Gives a packet of the wire to the application.
    pub(crate) fn deliver_direct(&mut self, id: FlowId, whole: &[u8]) {
        let Some(flow) = self.flows.get_mut(id) else { return };
        let to_app = flow.app.reversed();
        flow.direct.begun = true;
        let Ok(packet::Parsed::Transport(inner)) = packet::parse(whole) else { return };
        if let Some(mut out) = packet::readdress(&inner, &to_app, u16::MAX) {
            if let Some(delta) = &mut flow.delta {
                delta.apply_ingress(self.now, &mut out, Checksum::Full);
            }
            if flow.directions.gives_up() {
                return self.handle_parted(self.now, id, &out);
            }
            self.queue.deliver(id, out);
        }
    }

    /// Flows whose wait on the direct path is over.
    pub(crate) fn direct_due(&mut self, now: Instant) {
        while let Some(&(at, id)) = self.ports.due.first().filter(|(at, _)| *at <= now) {
            self.ports.due.remove(&(at, id));
            let Some(flow) = self.flows.get_mut(id) else { continue };
            flow.direct.due = None;
            let (carriage, tries) = (flow.direct.carriage, flow.direct.tries);
            let is_waiting = flow.direct.queued.is_some();
            match carriage {
                // The FENCE is lost, or late.
                Carriage::Offered | Carriage::Sending if is_waiting => {
                    self.direct_event(now, id, DirectEvent::PeerDirect, Why::Proved);
                    if let Some(flow) = self.flows.get_mut(id) {
                        flow.direct.unfenced_until = Some(now + FENCE_LATE);
                    }
                }
                Carriage::Sending if tries < FENCES_MAX => {
                    flow.direct.tries += 1;
                    self.queue.fence(id);
                    self.flows.set_direct_due(&mut self.ports, id, Some(now + FENCE_AGAIN));
                }
                Carriage::Encapsulated => self.flows.open_pinhole(&mut self.ports, &mut self.queue, now, id),
                _ => {}
            }
        }
    }

    /// The flow is going: its ports rest, its waits end.
    pub(crate) fn forget_direct(&mut self, flow: &Flow) {
        if let Some(due) = flow.direct.due {
            self.ports.due.remove(&(due, flow.id));
        }
        if let Some(peer) = flow.direct.peer {
            self.ports.rest(self.now, (peer, flow.direct.local_port, flow.direct.peer_port));
        }
    }
}

impl FlowPorts {
    /// Whether flows of this host may go direct now.
    pub(crate) fn is_direct_on(&self) -> bool {
        self.is_on
    }

    /// The initiator's port for a SYN, chosen before anybody knows who will answer.
    pub(crate) fn offer_port(&self, rng: &mut Rng, app: &Tuple) -> Option<u16> {
        let range = self.range.clone().filter(|_| self.is_on && matches!(app.protocol, TCP | UDP))?;
        Some(rng.random_port(&range))
    }

    fn refusal(&self, config: &Config, app: &Tuple, peer: IpAddr, offered: bool) -> Option<Why> {
        let own = &config.local_addresses;
        match () {
            () if !self.is_on || !matches!(app.protocol, TCP | UDP) => Some(Why::NoCache),
            () if peer.is_loopback() || own.contains(&peer) => Some(Why::SameHost),
            () if !offered => Some(Why::PeerHasNone),
            () => None,
        }
    }
}

impl FlowTable {
    /// The flow is established at this end. `peer_starts`: the peer said that it sends direct from the start. Gives
    /// whether this end does. Comes before the entry is installed, so that the entry says it.
    pub(crate) fn begin_direct(
        &mut self,
        fetches: &Fetches,
        associations: &mut AssociationTable,
        now: Instant,
        id: FlowId,
        peer_starts: bool,
    ) -> bool {
        let is_whole =
            |flow: &&crate::session::flow::Flow| flow.directions == Directions::Both && !fetches.is_between(id);
        let Some(flow) = self.get(id).filter(is_whole) else { return false };
        let association = flow.association;
        let role = flow.role;
        if flow.direct.carriage != Carriage::Encapsulated {
            return false;
        }
        let Some(path) = associations.wire_path(association) else {
            if let Some(flow) = self.get_mut(id) {
                flow.direct.carriage = Carriage::Never;
                flow.direct.why = Why::SharedAddress;
            }
            return false;
        };
        let hinted = associations.is_hinted(now, association);
        if peer_starts {
            // The peer has proved the path lately, both ways. Whoever has lost its own proof, by a start of its agent
            // or a flow that stalled, would have none again as long as every flow begins by the peer's.
            associations.note_proof(association, Some(now));
        }
        let Some(flow) = self.get_mut(id) else { return false };
        flow.direct.path = path;
        let event = match (peer_starts, hinted) {
            // What is set up for a session that runs has others' packets before its own.
            _ if flow.app.protocol == UDP || flow.has(crate::session::flow::Marks::LATER) => return false,
            (true, _) => DirectEvent::PeerDirect,
            (false, true) if role == Role::Initiator => DirectEvent::Start,
            _ => return false,
        };
        if let Some(next) = flow.direct.carriage.after(event, role) {
            flow.direct.carriage = next;
            flow.direct.why = Why::Hinted;
            flow.direct.begun = role == Role::Initiator;
        }
        flow.direct.carriage.sends()
    }

    /// A flow taken over with the ports that it had. Encapsulated, unless [`adopt_direct`](Sal::adopt_direct) follows.
    pub(crate) fn adopt_ports(
        &mut self,
        associations: &mut AssociationTable,
        ports: &mut FlowPorts,
        now: Instant,
        id: FlowId,
        pair: &Tuple,
    ) {
        let local_port = pair.source.port();
        let peer_port = pair.destination.port();
        let association = self.get(id).map_or(0, |flow| flow.association);
        let Some(host) = associations.get(association).map(|association| association.host) else { return };
        if !ports.claim(now, (host, local_port, peer_port), id) {
            return;
        }
        let path = associations.wire_path_of_flow(self, id);
        let Some(flow) = self.get_mut(id) else { return };
        flow.direct = Direct::never(Why::SharedAddress, now);
        (flow.direct.local_port, flow.direct.peer_port, flow.direct.peer) = (local_port, peer_port, Some(host));
        if let Some(path) = path {
            flow.direct.path = path;
            flow.direct.carriage = Carriage::Encapsulated;
            flow.direct.why = Why::Unproved;
            if flow.role == Role::Initiator {
                self.set_direct_due(ports, id, Some(now + PINHOLE_FIRST));
            }
        }
    }

    pub(crate) fn install_again(&mut self, queue: &mut OutputQueue, id: FlowId) {
        let Some(flow) = self.get_mut(id) else { return };
        if flow.carries_data() {
            flow.generation += 1;
            let entry = flow.entry();
            queue.update(EntryUpdate::Install(entry));
        }
    }
}

impl Rng {
    pub(crate) fn random_port(&mut self, range: &RangeInclusive<u16>) -> u16 {
        let span = u32::from(range.end() - range.start()) + 1;
        range.start() + (self.u32() % span) as u16
    }
}

impl AssociationTable {
    /// The path record that a flow names for what goes direct: its own pair's, or else its association's.
    fn wire_path_of_flow(&mut self, flows: &FlowTable, id: FlowId) -> Option<u32> {
        let flow = flows.get(id)?;
        let association = flow.association;
        flow.side.map(|side| side.0).or_else(|| self.wire_path(association))
    }

    pub(crate) fn is_hinted(&self, now: Instant, association: u32) -> bool {
        let proved = self.get(association).and_then(|association| association.direct_proved);
        proved.is_some_and(|at| now.since(at) < HINT)
    }

    pub(crate) fn note_proof(&mut self, association: u32, proved: Option<Instant>) {
        if let Some(association) = self.get_mut(association) {
            association.direct_proved = proved;
        }
    }

    /// A packet on a flow port that is no flow's: the host answers it as it would without Margay. Not where it may be
    /// late for a flow that is over, or from where a peer is no longer: the host would reset what is still open at
    /// the peer's end.
    fn give_to_host(&self, ports: &FlowPorts, queue: &mut OutputQueue, packet: &AppPacket<'_>) -> AppVerdict {
        let source = packet.tuple.source;
        let is_peers = self.is_any_at(source.ip());
        let mut resting = ports.resting_by(packet.tuple.destination.port(), source.port());
        let is_late = resting.any(|host| self.is_at(host, source.ip()));
        // Every empty datagram of a peer may be a pinhole.
        let is_pinhole = packet.is_bare() && !packet.is_tcp();
        if !is_peers || is_late || is_pinhole {
            return AppVerdict::Drop(DropReason::UnknownFlow);
        }
        queue.inject(packet.whole.to_vec());
        AppVerdict::Consumed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_overtakes_its_ack_is_bounded_in_packets_and_bytes() {
        let packets = |count: usize, len: usize| alloc::vec![alloc::vec![0; len]; count];
        assert!(may_hold(&[], HELD_DIRECT_BYTES, 8) && may_hold(&packets(7, 1500), 1500, 8));
        assert!(!may_hold(&packets(8, 1500), 1500, 8) && !may_hold(&packets(1, HELD_DIRECT_BYTES), 40, 8));
    }
}
