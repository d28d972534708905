//! [`Sal`]: the Service Access Layer of one host.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr, SocketAddr};

use hashbrown::HashMap;
use margay_wire::{ErrorCode, ErrorRepr, Extension, FlowId, Kind, Message};

use crate::act::chain::Chains;
use crate::act::ending::closing::SWEEP;
use crate::act::ending::fence::Fences;
use crate::act::ending::patience::Patience;
use crate::act::ending::pending_fail::PendingFails;
use crate::act::ending::quiet::QuietEnds;
use crate::act::fetch::Fetches;
use crate::act::flow_lock::FlowLocks;
use crate::act::grant::Grants;
use crate::act::moving::twin::Twins;
use crate::act::path::loss::Losses;
use crate::act::path::policy::{Policy, Share};
use crate::act::path::side_path::SidePaths;
use crate::act::path::striping::{PEERS_STRIPED_MAX, STRIPED_MAX};
use crate::act::reconfiguration::Reconfigurations;
use crate::act::secure::Demands;
use crate::act::stack_change::StackChanges;
use crate::act::stack_rule::StackRules;
use crate::association::auth::Verified;
use crate::association::draft::Draft;
use crate::association::location::{LocationTable, Routes};
use crate::association::{AssociationTable, auth};
use crate::cache::entry::RemoveReason;
use crate::cache::output::{AppVerdict, Output};
use crate::cache::packet;
use crate::cache::packet::{Parsed, Unreachable};
use crate::cache::queue::OutputQueue;
use crate::leg::flow_ports::FlowPorts;
use crate::machine::counters::Counters;
use crate::resolve::delay::Delays;
use crate::resolve::forward::is_relay_request;
use crate::resolve::instance::Instance;
use crate::resolve::notice::Notices;
use crate::resolve::segment::{Relay, is_for_all};
use crate::resolve::source::SourceTable;
use crate::resolve::way::{Relation, Sender};
use crate::session::SessionLocks;
use crate::session::event::{Event, EventQueue};
use crate::session::flow::FlowTable;
use crate::table::lifetime::Lifetimes;
use crate::table::{Resolution, Rule, ServiceTable};
use crate::trust::certificate::TrustStore;
use crate::trust::cookie::CookieJar;
use crate::trust::half_open::HalfOpen;
use crate::trust::handshake_rate::HandshakeRate;
use crate::types::config::Config;
use crate::types::direction::Direction;
use crate::types::drop_reason::DropReason;
use crate::types::fair_table::FairTable;
use crate::types::key::HostId;
use crate::types::keyed_hash::KeyedHash;
use crate::types::name::{Prefix, ServiceId};
use crate::types::rate::RateLimit;
use crate::types::rng::Rng;
use crate::types::role::Lifecycle;
use crate::types::time::Instant;
use crate::types::tuple::Tuple;

/// Sessions that are locked at a time: hand-overs and changes of stacks have smaller bounds of their own.
const LOCKS_MAX: usize = 8192;

/// The Service Access Layer of one host, as a pure state machine.
///
/// # Contract
///
/// *Inputs* are packets of programs ([`handle_app_packet`](Self::handle_app_packet)), datagrams
/// ([`handle_datagram`](Self::handle_datagram)), and all else that happens ([`handle`](Self::handle)). Each comes with
/// `now`, which must never go backwards, and none blocks. *Outputs* are taken by polling, after every input and in this
/// order:
///
/// 1. [`poll`](Self::poll) until it gives `None`: one ordered queue of datagrams to send, packets to deliver and
///    changes to the flow cache. Carry them out in that order; an entry comes before the packet that needs it.
/// 2. [`poll_event`](Self::poll_event) until `None`: for logs and watchers.
/// 3. [`poll_timeout`](Self::poll_timeout): the one instant at which [`Input::Timeout`](crate::Input::Timeout) is
///    due. It may have moved either way.
///
/// Established data does not come through here: the flow cache carries it, filled by
/// [`EntryUpdate`](crate::EntryUpdate)s. What misses the cache comes up through
/// [`handle_app_packet`](Self::handle_app_packet) and [`handle_datagram`](Self::handle_datagram). A TCP SYN without ACK
/// always comes up, since it may begin a new flow on an old five-tuple.
pub struct Sal {
    pub(crate) config: Config,
    pub(crate) rng: Rng,
    /// The latest `now` that any input brought.
    pub(crate) now: Instant,
    wall: (Instant, u64),
    pub(crate) table: ServiceTable,
    /// Rules that end by themselves.
    pub(crate) lifetimes: Lifetimes,
    pub(crate) flows: FlowTable,
    pub(crate) associations: AssociationTable,
    pub(crate) trust: TrustStore,
    /// Encoded chains that show which authorities this host belongs to, by authority.
    pub(crate) memberships: Vec<([u8; 8], Vec<u8>)>,
    /// Encoded chains that let this host answer for prefixes.
    pub(crate) certificates: Vec<(Prefix, Vec<u8>)>,
    /// Leases: virtual addresses that stand for names.
    pub(crate) names: HashMap<IpAddr, ServiceId, KeyedHash>,
    /// Those of them that programs have used since [`Sal::take_used_leases`] was asked last; hence no more than there
    /// are leases.
    pub(crate) names_used: BTreeSet<IpAddr>,
    /// Virtual addresses that stand for one instance of a name.
    pub(crate) instances: HashMap<IpAddr, Instance, KeyedHash>,
    /// Local sockets that have a name of their own.
    pub(crate) sources: SourceTable,
    pub(crate) queue: OutputQueue,
    pub(crate) events: EventQueue,
    pub(crate) counters: Counters,
    pub(crate) cookies: CookieJar,
    /// Responder flows whose peer is not proved.
    pub(crate) half_open: HalfOpen,
    /// What strangers have begun of late.
    pub(crate) handshakes: HandshakeRate,
    pub(crate) ports: FlowPorts,
    pub(crate) answers: RateLimit,
    pub(crate) secure: Demands,
    /// Where each peer and this host find each other.
    pub(crate) locations: LocationTable,
    /// From which address the host's routing sends to peers' addresses.
    pub(crate) routes: Routes,
    /// Whether the host's addresses are known: none may be what they are.
    pub(crate) has_looked: bool,
    /// Pairs of addresses that single flows use.
    pub(crate) side_paths: SidePaths,
    /// What flows do with several addresses, by their names; the longest prefixes first.
    pub(crate) policies: Vec<(Prefix, Policy)>,
    /// Flows that go by several pairs at once.
    pub(crate) striped: FairTable<FlowId, ()>,
    /// How flows are shared out that this host has striped otherwise than by arrival.
    pub(crate) shares: BTreeMap<FlowId, Share>,
    /// Makes the tokens of RSYN-ACK.
    pub(crate) move_secret: [u8; 32],
    /// The local address that the datagram in hand came to, where that is known.
    pub(crate) arrival: Option<IpAddr>,
    /// The datagram in hand came to all hosts of a segment.
    pub(crate) came_to_all: bool,
    /// What this host passes on between its segments, if it does.
    pub(crate) relay: Option<Relay>,
    /// Which names this host tells of, and which it has heard of.
    pub(crate) notices: Notices,
    /// Others' searches for a router that this one answers.
    pub(crate) searches_answered: RateLimit,
    /// Routers that this one exchanges announcements with.
    pub(crate) neighbours: BTreeMap<HostId, Relation>,
    /// First packets that wait for resolvers.
    pub(crate) delays: Delays,
    /// Connections that kernels may set up by themselves.
    pub(crate) grants: Grants,
    /// Sessions that go through boxes.
    pub(crate) chains: Chains,
    /// Keys that are shown in two places.
    pub(crate) twins: Twins,
    pub(crate) pending_fails: PendingFails,
    pub(crate) patience: Patience,
    pub(crate) fences: Fences,
    pub(crate) fetches: Fetches,
    /// Of live flows' stacks.
    pub(crate) stack_changes: StackChanges,
    /// Sessions that come to go through other boxes.
    pub(crate) reconfigurations: Reconfigurations,
    /// What wants flows carried in one way or another.
    pub(crate) stack_rules: StackRules,
    /// What is lost of flows of datagrams.
    pub(crate) losses: Losses,
    /// The locks of the sessions whose home this host is: the initiator's (DESIGN §7).
    pub(crate) locks: SessionLocks,
    /// Those of them that acts of one flow have taken.
    pub(crate) flow_locks: FlowLocks,
    /// Connections that a drained instance wants to end in order.
    pub(crate) quiet_ends: QuietEnds,
    /// The agent is starting: SYNs from the network have no answer yet.
    pub(crate) holds_connects: bool,
    /// Until then hosts may still have to tell this router what they serve.
    pub(crate) hosts_awaited: Instant,
    /// Those that were registered with the start before, and are not with this one.
    pub(crate) hosts_absent: BTreeSet<HostId>,
    next_sweep: Instant,
}

impl Sal {
    /// A core for the host that `config` describes. `unix_s` is the wall clock at `now`, for certificates; `seed` must
    /// be unpredictable and never used twice.
    pub fn new(config: Config, now: Instant, unix_s: u64, seed: [u8; 32]) -> Self {
        let mut rng = Rng::new(seed);
        let mut hasher = || KeyedHash(rng.u64(), rng.u64());
        let (flow_hasher, name_hasher, port_hasher) = (hasher(), hasher(), hasher());
        let (instance_hasher, rate_hasher, source_hasher) = (hasher(), hasher(), hasher());
        let (locations, routes) = (LocationTable::with_hasher(hasher()), HashMap::with_hasher(hasher()));
        let limits = config.limits;
        let associations = AssociationTable::with_hasher(limits.associations, limits.flows, config.epoch, hasher());
        let mut sal = Self {
            now,
            wall: (now, unix_s),
            table: ServiceTable::new(limits.rules),
            lifetimes: Lifetimes::default(),
            flows: FlowTable::new(flow_hasher),
            associations,
            trust: TrustStore::default(),
            memberships: Vec::new(),
            certificates: Vec::new(),
            names: HashMap::with_hasher(name_hasher),
            names_used: BTreeSet::new(),
            instances: HashMap::with_hasher(instance_hasher),
            sources: SourceTable::with_hasher(source_hasher),
            queue: OutputQueue::new(limits.outputs),
            events: EventQueue::default(),
            counters: Counters::default(),
            cookies: CookieJar::new(rng.bytes()),
            half_open: HalfOpen::default(),
            handshakes: HandshakeRate::with_hasher(rate_hasher),
            ports: FlowPorts::new(port_hasher),
            answers: RateLimit::new(limits.answers_per_s, now),
            secure: Demands::default(),
            locations,
            routes,
            has_looked: false,
            side_paths: SidePaths::new(),
            policies: Vec::new(),
            striped: FairTable::new(PEERS_STRIPED_MAX, STRIPED_MAX),
            shares: BTreeMap::new(),
            move_secret: rng.bytes(),
            arrival: None,
            came_to_all: false,
            neighbours: BTreeMap::new(),
            relay: None,
            notices: Notices::new(now),
            searches_answered: RateLimit::new(crate::act::search::ANSWERED_PER_S, now),
            delays: Delays::new(&limits),
            grants: Grants::default(),
            chains: Chains::new(now),
            twins: Twins::default(),
            pending_fails: PendingFails::default(),
            patience: Patience::default(),
            fences: Fences::default(),
            fetches: Fetches::default(),
            stack_changes: StackChanges::default(),
            losses: Losses::default(),
            reconfigurations: Reconfigurations::default(),
            stack_rules: StackRules::default(),
            locks: SessionLocks::new(LOCKS_MAX),
            flow_locks: FlowLocks::new(),
            quiet_ends: QuietEnds::default(),
            holds_connects: false,
            hosts_awaited: now,
            hosts_absent: BTreeSet::new(),
            next_sweep: now + SWEEP,
            rng,
            config,
        };
        sal.meet_self(now);
        sal
    }

    /// A packet that an application sent to `sal0` and that missed the flow cache: a whole IP packet, no fragment. Its
    /// transport checksum may be partial.
    pub fn handle_app_packet(&mut self, now: Instant, packet: &[u8]) -> AppVerdict {
        self.now = now;
        let verdict = match packet::parse(packet) {
            Err(reason) => AppVerdict::Drop(reason),
            Ok(Parsed::IcmpError { quoted, port_unreachable, from_outside }) => {
                match self.handle_icmp_error(now, &quoted.reversed(), port_unreachable, from_outside) {
                    Ok(()) => AppVerdict::Consumed,
                    Err(reason) => AppVerdict::Drop(reason),
                }
            }
            Ok(Parsed::Other { source, destination, echo }) => {
                let error = if echo && self.service_of(destination).is_some() {
                    packet::unreachable_for(packet, source, destination, Unreachable::Prohibited)
                } else {
                    None
                };
                if let Some(error) = error {
                    self.queue.inject(error);
                }
                AppVerdict::Drop(DropReason::Protocol)
            }
            Ok(Parsed::Transport(packet)) => self.handle_transport_packet(now, &packet),
        };
        if let AppVerdict::Drop(reason) = verdict {
            self.counters.drop(reason);
        }
        verdict
    }

    pub(crate) fn handle_transport_packet(&mut self, now: Instant, packet: &packet::AppPacket<'_>) -> AppVerdict {
        if let Some(id) = self.flows.by_tuple(&packet.tuple) {
            let is_over = || self.flows.get(id).is_some_and(|flow| flow.is_over_for_syn(Direction::Egress));
            if !(packet.is_tcp_syn() && is_over()) {
                return self.app_packet_of_flow(id, packet);
            }
            // The program uses its port again; the old flow had only late packets left.
            self.forget_over(id);
        }
        if let Some(verdict) = self.direct_packet(now, packet) {
            return verdict;
        }
        if let Some(verdict) = self.come_out(now, packet) {
            return verdict;
        }
        if packet.is_tcp() && !packet.is_tcp_syn() {
            self.queue.refuse(packet, Unreachable::Port);
            return AppVerdict::Drop(DropReason::UnknownFlow);
        }
        self.initiate(now, packet)
    }

    /// The local stack refused what it was given. `app` is the tuple of the refusing side. A container may write what
    /// it likes: it speaks neither for a named socket of this host nor for a middlebox. An open TCP connection ends by
    /// its own segments.
    fn handle_icmp_error(
        &mut self,
        now: Instant,
        app: &Tuple,
        port_unreachable: bool,
        from_outside: bool,
    ) -> Result<(), DropReason> {
        let Some(flow) = self.flows.by_tuple(app).and_then(|id| self.flows.get(id)) else { return Ok(()) };
        if from_outside && flow.is_of_named_socket() {
            return Err(DropReason::NotItsSocket);
        }
        if from_outside && flow.is_at_box() {
            return Err(DropReason::NotForwarded);
        }
        let (id, is_connecting, is_tcp) = (flow.id, flow.lifecycle == Lifecycle::Connecting, flow.app.protocol == 6);
        if self.box_refused(id) || !port_unreachable {
            return Ok(());
        }
        if is_connecting {
            self.answer(id, &[], Some(ErrorCode::Refused));
            self.drop_half_open(id);
        } else if !is_tcp {
            self.say_fail(id, ErrorCode::Refused);
            self.fail_flow(now, id, RemoveReason::PeerFailed);
        }
        Ok(())
    }

    /// A datagram from the SAL port: signalling, or DATA that missed the flow cache.
    /// `local` is the address of this host that it came to, where that is known.
    ///
    /// # Errors
    ///
    /// Why it was dropped; already counted. Nothing needs to be done about it.
    pub fn handle_datagram(
        &mut self,
        now: Instant,
        local: Option<IpAddr>,
        from: SocketAddr,
        datagram: &[u8],
    ) -> Result<(), DropReason> {
        self.now = now;
        self.came_to_all = local.is_some_and(is_for_all);
        self.arrival = local.filter(|_| !self.came_to_all);
        let result = self.dispatch(now, from, datagram);
        self.seal_again();
        if let Err(reason) = result {
            self.counters.drop(reason);
        }
        self.hold_newcomer(from, datagram);
        self.hear_newcomers(now);
        result
    }

    pub(crate) fn dispatch(&mut self, now: Instant, from: SocketAddr, datagram: &[u8]) -> Result<(), DropReason> {
        if datagram.first().is_some_and(|version| *version != margay_wire::VERSION) {
            return Err(DropReason::Version);
        }
        let kind = margay_wire::kind_of(datagram).map_err(|_| DropReason::Malformed)?;
        self.counters.received(kind);
        if kind == Kind::Data && !self.came_to_all {
            return self.handle_data_miss(now, from, datagram);
        }
        let message = Message::parse(datagram).map_err(|_| DropReason::Malformed)?;
        // What is asked of everybody is for whom it concerns; each refusal would be one of many.
        if self.came_to_all && (!matches!(kind, Kind::Syn | Kind::Notice) || message.unknown_critical().is_some()) {
            return Err(DropReason::Unexpected);
        }
        if message.unknown_critical().is_some() {
            self.answer_unknown_critical(now, from, &message);
            return Err(DropReason::UnknownCritical);
        }
        if self.is_to_pass_back(&message) {
            return self.pass_back(from, &message, datagram);
        }
        if is_relay_request(&message) {
            return if self.config.router { self.relay(from, &message, datagram) } else { Err(DropReason::Unexpected) };
        }
        match kind {
            Kind::Syn => self.handle_syn(now, from, &message, datagram),
            Kind::SynAck => self.handle_syn_ack(now, from, &message),
            Kind::Ack => self.handle_ack(now, from, &message),
            Kind::Error => self.handle_error(now, from, &message),
            Kind::Notice => self.handle_notice(now, from, &message, datagram),
            Kind::Rst if self.flows.is_half_open_here(message.dst_flow) => self.handle_ack(now, from, &message),
            _ => {
                if let Some(resolvable) = self.config.rsyn_for_another(&message) {
                    return self.forward_rsyn(from, &resolvable, datagram);
                }
                let verified = auth::authenticate(&mut self.associations, &message, now)?;
                self.dispatch_verified(now, from, &verified, datagram)
            }
        }
    }

    /// What peers alone may say: no handler of these can be called without the check.
    fn dispatch_verified(
        &mut self,
        now: Instant,
        from: SocketAddr,
        message: &Verified<'_>,
        datagram: &[u8],
    ) -> Result<(), DropReason> {
        match message.kind {
            Kind::Fin => self.handle_fin(now, message),
            Kind::Fail | Kind::Rst => self.handle_fail(now, message),
            Kind::Probe => self.handle_probe(now, from, message),
            Kind::Rsyn => self.handle_rsyn(now, from, message, datagram),
            Kind::RsynAck => self.handle_rsyn_ack(now, from, message),
            Kind::RsynDone if message.handover().is_some() => self.handle_hand_over_done(now, message),
            Kind::RsynDone => self.handle_rsyn_done(now, from, message),
            Kind::Change | Kind::RequestLock | Kind::AckLock | Kind::NackLock | Kind::CancelLock | Kind::AckCancel
                if message.reconfiguration().is_some() =>
            {
                self.handle_reconfiguration(now, message)
            }
            Kind::Change => self.handle_change(now, from, message),
            Kind::RequestLock | Kind::AckLock | Kind::NackLock | Kind::CancelLock | Kind::AckCancel => {
                self.handle_lock(now, message)
            }
            _ => Err(DropReason::Unexpected),
        }
    }

    /// Nobody may bypass a chain, say, by not knowing the word (DESIGN §6).
    fn answer_unknown_critical(&mut self, now: Instant, from: SocketAddr, message: &Message<'_>) {
        if message.kind != Kind::Syn || !self.answers.take(now) {
            return;
        }
        let extensions = [Extension::Error(ErrorRepr { code: ErrorCode::UnknownCritical, text: "" })];
        let mut draft = Draft::new(Kind::Error, message.src_flow, FlowId(0));
        draft.extensions = &extensions;
        if let Some(datagram) = draft.write(None) {
            self.transmit(from, datagram, Kind::Error);
        }
    }

    /// The flow carried data since it was last asked about.
    pub(crate) fn handle_activity(&mut self, now: Instant, id: FlowId) {
        if let Some(flow) = self.flows.get_mut(id) {
            flow.active = now;
        }
        self.losses.stir(now, id);
    }

    /// The instant that [`poll_timeout`](Self::poll_timeout) gave has come.
    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        while let Some(id) = self.flows.pop_due(now) {
            self.flow_due(now, id);
        }
        self.direct_due(now);
        self.locations_due(now);
        self.stripes_due(now);
        self.rules_due(now);
        self.delays_due(now);
        self.notices_due(now);
        self.grants_due(now);
        self.inquiries_due(now);
        self.hear_newcomers(now);
        self.pending_fails_due(now);
        self.patience_due(now);
        self.fetches_due(now);
        self.stack_changes_due(now);
        self.losses_due(now);
        self.reconfigurations_due(now);
        self.guards_due(now);
        self.counters.associations_expired += self.associations.expire(now) as u64;
        if now >= self.next_sweep {
            self.next_sweep = now + SWEEP;
            self.sweep(now);
        }
    }

    /// The next thing to do, its bytes in `buf`, which holds at least 65,536 bytes.
    pub fn poll(&mut self, buf: &mut [u8]) -> Option<Output> {
        self.drop_gone_paths();
        let next = self
            .queue
            .pop(buf)
            .or_else(|| self.associations.take_route_news(&mut self.table).then_some(Output::Routes));
        let next = next.or_else(|| self.delays.take_news().then_some(Output::Questions));
        let next = next.or_else(|| self.chains.take_news().then_some(Output::Leases));
        next.or_else(|| self.quiet_ends.take_news().then_some(Output::QuietEnds))
    }

    /// Whether [`poll`](Self::poll) has something.
    pub fn has_output(&self) -> bool {
        let is_asked = self.delays.has_news() || self.chains.has_news();
        let has_news = self.associations.has_route_news(&self.table) || is_asked || self.quiet_ends.has_news();
        has_news || !self.queue.is_empty() || self.associations.has_gone()
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop()
    }

    /// When to call [`handle_timeout`](Self::handle_timeout), unless something else comes first.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let sweep = (self.flows.len() > 0).then_some(self.next_sweep);
        self.flows
            .next_deadline()
            .into_iter()
            .chain(self.ports.next_deadline())
            .chain(self.locations.next_deadline())
            .chain(self.stripes_deadline())
            .chain(self.lifetimes.next_deadline())
            .chain(self.delays.next_deadline())
            .chain(self.notices.next_deadline())
            .chain(self.grants.next_deadline())
            .chain(self.twins.next_deadline())
            .chain(self.pending_fails.next_deadline())
            .chain(self.patience.next_deadline())
            .chain(self.fetches.next_deadline())
            .chain(self.stack_changes.next_deadline())
            .chain(self.losses.next_deadline())
            .chain(self.reconfigurations.next_deadline())
            .chain(self.stack_rules.guards_deadline())
            .chain(self.associations.next_expiry())
            .chain(sweep)
            .min()
    }

    pub(crate) fn transmit(&mut self, to: SocketAddr, datagram: Vec<u8>, kind: Kind) {
        self.transmit_from(None, to, datagram, kind);
    }

    pub(crate) fn transmit_from(&mut self, local: Option<IpAddr>, to: SocketAddr, datagram: Vec<u8>, kind: Kind) {
        self.counters.sent(kind);
        self.queue.transmit(local, to, datagram);
    }

    /// Seals `draft` under an association and sends it to the association's address.
    pub(crate) fn seal_and_send(&mut self, association: u32, draft: Draft<'_>) {
        let (epoch, kind) = (self.config.epoch, draft.kind);
        let Some(association) = self.associations.get_mut(association) else { return };
        let (local, to) = (association.local, association.remote);
        if let Some(datagram) = draft.seal(association, epoch) {
            self.transmit_from(local, to, datagram, kind);
        }
    }

    /// What the service table says of a first packet: longest prefix, highest priority, by weight and `sticky`.
    pub(crate) fn pick(
        &self,
        service: &ServiceId,
        sticky: u64,
        protocol: u8,
        port: u16,
        sender: Sender,
    ) -> Resolution<'_> {
        let way = self.way_on(sender);
        let usable = |rule: &Rule| self.config.unusable(rule, protocol, port, way).is_none();
        self.table.resolve_last(service, sticky, usable, |rule| self.has_failed(service, rule))
    }

    /// The name behind a virtual address: a lease, an instance, or the /96 that an IPv6 address spells out.
    pub fn service_of(&self, address: IpAddr) -> Option<ServiceId> {
        if let Some(service) = self.names.get(&address) {
            return Some(*service);
        }
        if let Some(instance) = self.instances.get(&address) {
            return Some(instance.service);
        }
        match address {
            IpAddr::V6(address) => self.config.ranges.service_of_v6(address),
            IpAddr::V4(_) => None,
        }
    }

    pub(crate) fn loopback(&self) -> SocketAddr {
        SocketAddr::new(Ipv4Addr::LOCALHOST.into(), margay_wire::PORT)
    }

    /// The wall clock now, in seconds since 1970.
    pub(crate) fn unix_s(&self) -> u64 {
        self.unix_s_at(self.now)
    }

    /// The wall clock at an instant that is not before it was set.
    pub(crate) fn unix_s_at(&self, now: Instant) -> u64 {
        self.wall.1.saturating_add(now.since(self.wall.0).as_secs())
    }

    /// Sets the wall clock, which certificates are checked against.
    pub fn set_wall_clock(&mut self, now: Instant, unix_s: u64) {
        self.now = now;
        self.wall = (now, unix_s);
    }
}

impl Grants {
    /// A flow identifier that is random and free: knowing one says nothing of others (DESIGN §3.5).
    pub(crate) fn fresh_flow_id(&self, flows: &FlowTable, rng: &mut Rng) -> FlowId {
        loop {
            let id = FlowId(rng.u32());
            if id.0 != 0 && flows.get(id).is_none() && !self.has(id) {
                return id;
            }
        }
    }
}
