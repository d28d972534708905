//! One simulated machine: a core, a flow cache, programs.

mod boxes;
mod frozen;
mod journal;
mod let_out;
mod life;

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};

use margay_core::BoxKind;
use margay_core::key::HostSecret;
use margay_core::name::ServiceId;
use margay_core::rng::Rng;
use margay_core::table::{Action, Allow, Demux, NextHop, Rule, RuleId};
use margay_core::{
    AppVerdict, Cipher, Config, DirectEvent, Direction, EntryUpdate, Event, FlowInfo, Input, Instant, Limits, Output,
    Ranges, Role, Sal, Tuple,
};
use margay_wire::{FENCE, FlowId, Kind, Message, PORT};

use crate::cache::{Cache, Came, Carried};
use crate::kernel::Told;
use crate::middlebox::{Habit, Middlebox};
use crate::nonces::Nonces;
use crate::program::{Client, Datagram, FIN, RST, SYN, Segment, Server, TCP, UDP};
use crate::relay::Relay;
use crate::seal::Refused;
use crate::stream::{Plan, State, Stream};
use crate::turn::Admission;
use journal::Journal;

mod repairs;

/// Which host of a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostId(pub usize);

/// How a host starts.
#[derive(Clone, Copy, Debug)]
pub struct Start {
    /// From which its key is made.
    pub key_seed: [u8; 32],
    /// The agent's epoch.
    pub epoch: u32,
    /// Identity of the boot.
    pub boot: u8,
    /// Whether it forwards for others.
    pub router: bool,
    /// Its virtual addresses.
    pub ranges: Ranges,
}

/// What a host gives to the network.
pub(crate) enum Outgoing {
    /// A UDP datagram from the SAL port: source, destination and bytes.
    Datagram(Option<IpAddr>, SocketAddr, Vec<u8>),
    /// A packet of the direct path, with the hosts' own addresses.
    Direct(Vec<u8>),
}

/// One machine.
pub struct Host {
    /// Its first address.
    pub address: IpAddr,
    /// All of them; none while it is nowhere.
    pub addresses: Vec<IpAddr>,
    /// The core that ships.
    pub sal: Sal,
    /// The flow cache.
    pub cache: Cache,
    /// ACKs by which a peer could send on a connection that was not in the cache yet.
    pub early_acks: u64,
    /// Programs that listen.
    pub servers: Vec<Server>,
    /// Programs that connect.
    pub clients: Vec<Client>,
    /// Connections of programs that talk for longer.
    pub streams: Vec<Stream>,
    /// Ports where such programs listen, and what each connection to them says.
    pub listeners: Vec<(u16, Plan)>,
    /// So many more SYNs meet an old connection of their five-tuple, whose TCP acknowledges what it knows.
    pub old_connections: u32,
    /// So many more SYNs find a full queue and get no answer.
    pub full_queue: u32,
    /// Datagrams that programs here were given.
    pub datagrams: Vec<Datagram>,
    /// Its box, if it has one.
    pub middlebox: Option<Middlebox>,
    /// Programs that relay.
    pub relays: Vec<Relay>,
    /// What its kernel says for programs whose sockets were reset.
    pub(crate) resets: Vec<Segment>,
    /// Its streams say the same whatever their numbers are.
    pub speaks_plainly: bool,
    /// What the agent has leased of virtual addresses.
    leases: Vec<(IpAddr, ServiceId)>,
    /// Everything that the core reported.
    pub events: Vec<Event>,
    pub(crate) outbox: Vec<Outgoing>,
    /// Its agent does not run: programs, their TCP and the kernel's cache go on.
    is_dead: bool,
    /// What it has written down; `None`: everything, at every moment.
    journal: Option<Journal>,
    start: Start,
    limits: Limits,
    /// What is encrypted in its world.
    nonces: Nonces,
    /// What its state directory says of its agent's epochs.
    counted_epoch: u32,
    next_port: u16,
    /// The ciphers that its agent has, and whether it demands that every flow is sealed.
    secure: (Vec<Cipher>, bool),
}

pub(crate) const UNIX_START_S: u64 = 1_800_000_000;

impl Host {
    pub(crate) fn new(
        address: IpAddr,
        start: Start,
        now: Instant,
        seed: [u8; 32],
        limits: Limits,
        nonces: Nonces,
    ) -> Self {
        Self::at(vec![address], address, start, now, seed, limits, nonces)
    }

    fn at(
        addresses: Vec<IpAddr>,
        address: IpAddr,
        start: Start,
        now: Instant,
        seed: [u8; 32],
        limits: Limits,
        nonces: Nonces,
    ) -> Self {
        let config = Config {
            host_key: HostSecret::generate(&mut Rng::new(start.key_seed)),
            epoch: start.epoch,
            boot_id: [start.boot; 16],
            router: start.router,
            datagram_max: 1472,
            local_addresses: addresses.clone(),
            ranges: start.ranges,
            limits,
        };
        Self {
            address,
            addresses,
            sal: Sal::new(config, now, UNIX_START_S + now.micros() / 1_000_000, seed),
            cache: Cache::new(address, nonces.clone()),
            servers: Vec::new(),
            clients: Vec::new(),
            streams: Vec::new(),
            listeners: Vec::new(),
            old_connections: 0,
            full_queue: 0,
            datagrams: Vec::new(),
            middlebox: None,
            relays: Vec::new(),
            resets: Vec::new(),
            speaks_plainly: false,
            leases: Vec::new(),
            events: Vec::new(),
            early_acks: 0,
            outbox: Vec::new(),
            is_dead: false,
            journal: None,
            start,
            limits,
            nonces,
            counted_epoch: start.epoch,
            next_port: 30_000,
            secure: (Vec::new(), false),
        }
    }

    /// Its virtual addresses.
    pub const fn ranges(&self) -> Ranges {
        self.start.ranges
    }

    /// The host's public key.
    pub fn public_key(&self) -> [u8; 32] {
        HostSecret::generate(&mut Rng::new(self.start.key_seed)).public().0
    }

    /// Starts a server, reachable as `service`.
    pub fn serve(&mut self, service: ServiceId, port: u16, number: u32, allow: Allow) -> Option<RuleId> {
        self.servers.push(Server::new(port, number));
        self.listen(service, port, allow)
    }

    /// Starts a server whose connections each follow `plan`.
    pub fn serve_streams(&mut self, service: ServiceId, port: u16, plan: Plan) -> Option<RuleId> {
        self.listeners.push((port, plan));
        self.listen(service, port, Allow::Any)
    }

    /// Gives the host a box, reachable as `service`.
    pub fn serve_box(&mut self, service: ServiceId, habit: Habit, allow: Allow) -> Option<RuleId> {
        self.middlebox.get_or_insert(Middlebox::new(habit));
        let action = Action::Box(margay_core::Middlebox { kind: BoxKind::Forward, allow });
        self.sal.add_rule(Instant::ZERO, service.into(), Rule { priority: 100, weight: 1, action }).ok()
    }

    fn listen(&mut self, service: ServiceId, port: u16, allow: Allow) -> Option<RuleId> {
        let demux = Demux {
            listener: SocketAddr::new([0, 0, 0, 0].into(), port),
            other_family: None,
            is_looked_up: false,
            service_port: None,
            protocol: Some(6),
            allow,
        };
        let rule = Rule { priority: 100, weight: 1, action: Action::Demux(demux) };
        self.sal.add_rule(Instant::ZERO, service.into(), rule).ok()
    }

    /// Adds a next hop for `prefix`.
    pub fn forward(&mut self, prefix: margay_core::name::Prefix, to: IpAddr, host: Option<[u8; 32]>) -> Option<RuleId> {
        let host = host.map(|key| margay_core::key::HostPublic(key).id());
        let hop = NextHop { address: SocketAddr::new(to, PORT), host, router: host.is_none() };
        self.sal.add_rule(Instant::ZERO, prefix, Rule { priority: 100, weight: 1, action: Action::Forward(hop) }).ok()
    }

    /// Starts a client of a virtual address.
    pub fn connect(&mut self, now: Instant, to: SocketAddr) -> usize {
        let tuple = self.fresh_tuple(to);
        self.clients.push(Client::new(tuple, now));
        self.clients.len() - 1
    }

    /// Starts a connection that follows `plan`, to a virtual address.
    pub fn connect_stream(&mut self, now: Instant, to: SocketAddr, plan: Plan) -> usize {
        let tuple = self.fresh_tuple(to);
        let mut stream = Stream::connect(tuple, plan, now);
        if self.speaks_plainly {
            stream.say_plainly(true);
        }
        self.streams.push(stream);
        self.streams.len() - 1
    }

    /// The next connections are from the ports of as many before.
    pub const fn come_round(&mut self, count: u16) {
        self.next_port -= count;
    }

    fn fresh_tuple(&mut self, to: SocketAddr) -> Tuple {
        self.next_port += 1;
        let ranges = self.ranges();
        let own: IpAddr = if to.is_ipv4() { ranges.host_v4().into() } else { ranges.host_v6().into() };
        Tuple { protocol: 6, source: SocketAddr::new(own, self.next_port), destination: to }
    }

    /// A program here sends a datagram that misses the cache.
    pub(crate) fn send_datagram(&mut self, now: Instant, datagram: &Datagram) -> AppVerdict {
        let verdict = self.sal.handle_app_packet(now, &datagram.emit());
        self.drain(now);
        verdict
    }

    /// A program here sends a datagram.
    pub(crate) fn say(&mut self, now: Instant, datagram: &Datagram) {
        self.egress(now, &datagram.emit());
        self.drain(now);
    }

    /// Gives the host a kernel cache, or takes the direct path off it. What peers go on sending direct still comes up.
    pub fn set_direct(&mut self, now: Instant, is_on: bool) {
        if is_on {
            self.cache.kernel.get_or_insert_default();
        }
        self.sal.set_flow_ports(now, is_on.then_some(61_000..=65_535));
        self.drain(now);
        if !is_on {
            self.hear_of_flows(now);
            self.cache.clear_kernel();
        }
    }

    /// The kernel tells of every flow that it has opened by a grant.
    fn hear_of_flows(&mut self, now: Instant) {
        let grants: Vec<FlowId> = self.cache.grants.keys().copied().collect();
        grants.into_iter().for_each(|grant| self.cache.tell_of(grant, u128::MAX));
        self.hear(now);
    }

    /// Margay is taken off the host for good.
    pub fn shut_down(&mut self, now: Instant) {
        self.hear_of_flows(now);
        self.sal.shutdown(now);
        self.drain(now);
    }

    /// What the kernel tells the agent.
    fn hear(&mut self, now: Instant) {
        let Some(kernel) = &mut self.cache.kernel else { return };
        let (told, taken) = kernel.take_news();
        if told.is_empty() && taken.is_empty() {
            return;
        }
        for Told { flow, app, closed } in told {
            if let Some(app) = app {
                self.sal.handle(now, Input::Opened { flow, app: &app });
            }
            closed.into_iter().for_each(|(direction, flags)| self.report(now, flow, direction, flags));
        }
        taken.into_iter().for_each(|(grant, count)| self.sal.handle(now, Input::Taken { grant, taken: count }));
        self.drain(now);
    }

    /// Whether the agent hears of what passes of a flow that the kernel carries.
    fn is_told(&self, flow: FlowId) -> bool {
        self.cache.kernel.as_ref().is_none_or(|kernel| !kernel.grants.is_untold(flow))
    }

    /// The host has these addresses now, and a route to every address of their families.
    pub(crate) fn set_addresses(&mut self, now: Instant, addresses: Vec<IpAddr>) {
        if let Some(first) = addresses.first() {
            self.address = *first;
            self.cache.own = *first;
        }
        self.addresses = addresses;
        if self.is_dead {
            return;
        }
        let from = |remote: IpAddr| self.addresses.iter().copied().find(|own| own.is_ipv4() == remote.is_ipv4());
        let routes: Vec<_> = self.sal.remotes().into_iter().map(|remote| (remote, from(remote))).collect();
        self.sal.set_routes(now, self.addresses.clone(), routes);
        self.drain(now);
    }

    /// The address that a datagram leaves with; `None` where it cannot.
    pub(crate) fn source_for(&self, local: Option<IpAddr>, to: IpAddr) -> Option<IpAddr> {
        let mut own = self.addresses.iter().copied().filter(|own| own.is_ipv4() == to.is_ipv4());
        match local {
            Some(local) => own.find(|own| *own == local),
            None => own.next(),
        }
    }

    /// The TCP of a flow sends at once what it would send by its timer.
    fn restart(&mut self, now: Instant, flow: FlowId) {
        let Some(tuple) = self.cache.tuple_of(flow) else { return };
        let Some(at) = self.streams.iter().position(|stream| *stream.tuple() == tuple) else { return };
        for segment in self.streams[at].restart(now) {
            self.egress(now, &segment.emit());
        }
    }

    fn stream_of(&mut self, tuple: &Tuple) -> Option<&mut Stream> {
        self.streams.iter_mut().rev().find(|stream| stream.tuple() == tuple)
    }

    /// The flow of a stream, as the core has it.
    pub fn flow_of(&self, stream: usize) -> Option<FlowInfo> {
        let tuple = self.streams.get(stream)?.tuple();
        self.sal.flows().find(|flow| flow.app == *tuple)
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let clients = self.clients.iter().filter_map(Client::next_deadline).min();
        let streams = self.streams.iter().filter_map(Stream::next_deadline).min();
        let streams = streams.into_iter().chain(self.relays.iter().filter_map(Relay::next_deadline)).min();
        let journal = self.journal.as_ref().and_then(Journal::next_deadline);
        let agents = self.sal.poll_timeout().into_iter().chain(self.cache.next_deadline()).chain(journal).min();
        let agents = agents.filter(|_| !self.is_dead);
        let boxes = self.middlebox.as_ref().and_then(Middlebox::next_deadline);
        agents.into_iter().chain(clients).chain(streams).chain(boxes).min()
    }

    pub(crate) fn handle_time(&mut self, now: Instant) {
        if !self.is_dead && self.sal.poll_timeout().is_some_and(|deadline| deadline <= now) {
            self.sal.handle(now, Input::Timeout);
        }
        if !self.is_dead {
            for (flow, change) in self.cache.turns.take_due(now) {
                self.turned(now, flow, change);
            }
            self.send_due_repairs(now);
            self.write_down(now);
        }
        for at in 0..self.clients.len() {
            for segment in self.clients[at].poll(now) {
                self.egress(now, &segment.emit());
            }
        }
        let late = self.middlebox.as_mut().map(|middlebox| middlebox.take_late(now)).unwrap_or_default();
        late.into_iter().for_each(|segment| self.let_out(now, &segment));
        self.relay(now);
        for at in 0..self.streams.len() {
            if self.streams[at].next_deadline().is_some_and(|deadline| deadline <= now) {
                for segment in self.streams[at].poll(now) {
                    self.egress(now, &segment.emit());
                }
            }
        }
        self.drain(now);
    }

    /// A TCP packet with this host's own address: the kernel's cache takes it, or it goes up. Without either it is
    /// dropped.
    pub(crate) fn handle_direct(&mut self, now: Instant, packet: &[u8]) {
        let Some(kernel) = &mut self.cache.kernel else { return };
        let Some(segment) = Segment::parse(packet) else { return };
        let streams = &self.streams;
        let is_request = |app: &Tuple| {
            streams.iter().rev().find(|stream| stream.tuple() == app).is_some_and(|one| one.state == State::Answered)
        };
        let dropped = kernel.unproved + kernel.resets;
        let found = kernel.ingress(now, &segment, is_request);
        if kernel.unproved + kernel.resets > dropped {
            return;
        }
        if self.is_dead {
            let Some((flow, tuple)) = found else { return };
            let (segment, _) = self.cache.local(flow, segment);
            return self.deliver(now, segment.readdressed(tuple));
        }
        kernel.left += u64::from(found.is_none());
        let (local, remote) = (segment.tuple.destination.ip(), segment.tuple.source.ip());
        if let Some(path) = self.cache.watched(local, remote) {
            self.sal.handle(now, Input::PathDirect(path));
        }
        self.hear(now);
        let Some(kernel) = &mut self.cache.kernel else { return };
        for flow in kernel.take_one_way() {
            self.outbox.extend(self.cache.one_way_answer(flow).map(Outgoing::Direct));
        }
        match found {
            Some((flow, tuple)) => {
                let is_told = self.is_told(flow);
                let (segment, _) = self.cache.local(flow, segment);
                let taken = if is_told { self.cache.take_ending(flow, &segment) } else { 0 };
                self.deliver(now, segment.readdressed(tuple));
                if is_told {
                    self.report(now, flow, Direction::Ingress, taken);
                }
            }
            None => {
                // Consumed, or dropped and counted.
                let _ = self.sal.handle_app_packet(now, packet);
            }
        }
        self.drain(now);
    }

    /// Takes note of what a packet of the peer's shows, before its program is given it. Gives which of FIN and RST the
    /// program's TCP takes.
    fn give(&mut self, flow: FlowId, segment: &Segment) -> u8 {
        let taken = self.cache.take_ending(flow, segment);
        self.cache.note_delivered(flow, segment);
        taken
    }

    /// Programs' TCPs may have taken endings that they were given before.
    fn judge_endings(&mut self, now: Instant) {
        for (flow, taken) in self.cache.judge_endings() {
            self.report(now, flow, Direction::Ingress, taken);
        }
    }

    fn report(&mut self, now: Instant, flow: FlowId, direction: Direction, flags: u8) {
        self.sal.handle(now, Input::Activity(flow));
        if flags & (FIN | RST) != 0 {
            self.sal.handle(now, Input::Transport { flow, direction, flags });
        }
    }

    pub(crate) fn handle_datagram(&mut self, now: Instant, local: IpAddr, from: SocketAddr, datagram: &[u8]) {
        if self.is_dead {
            return;
        }
        if !self.ingress(now, (Some(local), from), datagram) {
            if let Some((grant, flow)) = self.sal.untold(datagram) {
                self.cache.tell_of(grant, flow);
                self.hear(now);
            }
            // Already counted by the core.
            let _ = self.sal.handle_datagram(now, Some(local), from, datagram);
        }
        self.drain(now);
    }

    /// What has waited for a FENCE is given on, and the core is told.
    fn turned(&mut self, now: Instant, flow: FlowId, change: u32) {
        for (came, datagram) in self.cache.turns.take_held(flow) {
            self.ingress(now, came, &datagram);
        }
        self.sal.handle(now, Input::Turned { flow, change });
    }

    fn take(&mut self, now: Instant, came: Came, datagram: &[u8]) -> bool {
        match self.cache.admit(now, came, datagram) {
            Some((_, Admission::Held | Admission::Late | Admission::Full | Admission::Elsewhere)) => return true,
            Some((flow, Admission::Strange)) => {
                self.sal.handle(now, Input::StrangeStack(flow));
                return true;
            }
            Some((flow, Admission::Overtaken(change))) => self.turned(now, flow, change),
            Some((_, Admission::Take)) | None => {}
        }
        let Some(found) = self.cache.decapsulate(came, datagram) else { return false };
        if found.ends_silence {
            self.sal.handle(now, Input::Answer(found.flow));
        }
        if let Some(refused) = found.is_refused {
            if refused == Refused::Strange {
                self.sal.handle(now, Input::StrangeSeal(found.flow));
            }
            return true;
        }
        if let Some(change) = found.turns {
            let flow = found.flow;
            if self.cache.turns.fence(now, flow, change) {
                self.turned(now, flow, change);
            }
            return true;
        }
        let event = match (found.is_fence, found.is_back) {
            (true, _) => Some(DirectEvent::PeerDirect),
            (false, true) => Some(DirectEvent::PeerBack),
            (false, false) => None,
        };
        let (flow, wants_pinhole) = (found.flow, found.wants_pinhole);
        if let Some(segment) = Segment::parse(&found.inner) {
            let (flags, tuple) = (segment.flags, found.tuple);
            if found.is_sending && flags & SYN != 0 {
                // As the agent's ingress thread has it.
                self.sal.handle(now, Input::Direct { flow, event: DirectEvent::Stalled });
                return true;
            }
            let (segment, comes_up) = self.cache.local(flow, segment);
            if comes_up {
                let packet = segment.readdressed(tuple).emit();
                self.sal.handle(now, Input::Parted { flow, packet: &packet });
            } else {
                let taken = self.give(flow, &segment);
                self.deliver(now, segment.readdressed(tuple));
                self.report(now, flow, Direction::Ingress, taken);
            }
        }
        if wants_pinhole {
            self.send_pinhole(flow);
        }
        if let Some(event) = event {
            self.sal.handle(now, Input::Direct { flow, event });
        }
        true
    }

    pub(crate) fn send_segment(&mut self, now: Instant, segment: &Segment) {
        self.egress(now, &segment.emit());
    }

    /// A packet of a program here.
    fn egress(&mut self, now: Instant, packet: &[u8]) {
        let Some(segment) = Segment::parse(packet) else { return };
        let direct = self.cache.send_direct(now, &segment, packet);
        if self.is_dead {
            return self.outbox.extend(direct.map(|(_, packet)| Outgoing::Direct(packet)));
        }
        self.hear(now);
        if let Some((flow, direct)) = direct {
            self.outbox.push(Outgoing::Direct(direct));
            if self.is_told(flow) {
                self.report(now, flow, Direction::Egress, segment.flags);
            }
            return self.judge_endings(now);
        }
        self.agent_egress(now, &segment, packet);
    }

    /// A packet that came to the agent.
    fn agent_egress(&mut self, now: Instant, segment: &Segment, packet: &[u8]) {
        let opens = segment.flags & (SYN | 16) == SYN;
        if !opens && self.carry(now, segment, packet) {
            return;
        }
        match self.sal.handle_app_packet(now, packet) {
            AppVerdict::Forward(_) => {
                self.drain(now);
                self.carry(now, segment, packet);
            }
            AppVerdict::Parted(flow) => {
                self.cache.note_parted(flow, segment);
                self.judge_endings(now);
            }
            AppVerdict::Consumed | AppVerdict::Drop(_) => {}
        }
    }

    fn carry(&mut self, now: Instant, segment: &Segment, packet: &[u8]) -> bool {
        let Some(carried) = self.cache.encapsulate(now, segment, packet) else { return false };
        let Carried { flow, local, to, datagram, is_beside, wants_pinhole, silence, repairs } = carried;
        self.outbox.extend(to.map(|to| Outgoing::Datagram(local, to, datagram)));
        self.send_repairs(repairs);
        self.report(now, flow, Direction::Egress, segment.flags);
        self.judge_endings(now);
        if wants_pinhole {
            self.send_pinhole(flow);
        }
        if let Some(silence) = silence {
            self.sal.handle(now, Input::Silence { flow, unanswered: silence });
            self.drain(now);
        }
        if is_beside && self.cache.is_stalled(now, flow) {
            self.sal.handle(now, Input::Direct { flow, event: DirectEvent::Stalled });
            self.drain(now);
        }
        true
    }

    /// A packet that the core has parted from others: nobody hears of it but the peer.
    fn carry_by(&mut self, now: Instant, flow: FlowId, packet: &[u8]) {
        let Some(segment) = Segment::parse(packet) else { return };
        let carried = self.cache.encapsulate_by(now, flow, &segment, packet);
        let sent = carried.and_then(|carried| Some(Outgoing::Datagram(carried.local, carried.to?, carried.datagram)));
        self.outbox.extend(sent);
    }

    fn send_pinhole(&mut self, flow: FlowId) {
        let packet = self.cache.pinhole(flow);
        self.outbox.extend(packet.map(Outgoing::Direct));
    }

    fn send_mark(&mut self, flow: FlowId, flags: u8) {
        let mark = self.cache.mark(flow, flags);
        self.outbox.extend(mark.map(|(local, to, datagram)| Outgoing::Datagram(local, to, datagram)));
    }

    fn is_early_ack(&self, datagram: &[u8]) -> bool {
        let ack = Message::parse(datagram).ok().filter(|message| message.kind == Kind::Ack);
        let flow = ack.and_then(|message| self.sal.flow(message.src_flow));
        flow.is_some_and(|flow| {
            flow.role == Role::Initiator && flow.app.protocol == TCP && self.cache.tuple_of(flow.flow).is_none()
        })
    }

    pub(crate) fn drain(&mut self, now: Instant) {
        let mut buf = vec![0; 65_536];
        let mut let_out = HashSet::new();
        while let Some(output) = self.sal.poll(&mut buf) {
            if let Output::Update(EntryUpdate::Install(entry)) = &output {
                self.check_let_out(&mut let_out, entry);
            }
            match output {
                Output::Transmit { local, to, len } => {
                    self.early_acks += u64::from(self.is_early_ack(&buf[..len]));
                    self.outbox.push(Outgoing::Datagram(local, to, buf[..len].to_vec()));
                }
                Output::Inject { len } => self.inject(now, &buf[..len]),
                Output::Deliver { flow, len } => {
                    let taken = Segment::parse(&buf[..len]).map(|segment| self.give(flow, &segment));
                    self.inject(now, &buf[..len]);
                    self.report(now, flow, Direction::Ingress, taken.unwrap_or(0));
                }
                Output::Egress { len } => {
                    let packet = buf[..len].to_vec();
                    if let Some(segment) = Segment::parse(&packet) {
                        self.agent_egress(now, &segment, &packet);
                    }
                }
                Output::Carry { flow, len } => {
                    let packet = buf[..len].to_vec();
                    self.carry_by(now, flow, &packet);
                }
                Output::Ingress { from, len } => {
                    let datagram = buf[..len].to_vec();
                    self.ingress(now, (None, from), &datagram);
                }
                Output::Update(EntryUpdate::Count(flow)) => self.tell_count(now, flow),
                Output::Update(update) => self.update(now, update),
                Output::Pinhole(flow) => self.send_pinhole(flow),
                Output::Knock(flow) => self.outbox.extend(self.cache.knock(flow).map(Outgoing::Direct)),
                Output::Fence(flow) => self.send_mark(flow, FENCE),
                Output::Back(flow) => self.send_mark(flow, 0),
                Output::Restart(flow) => self.restart(now, flow),
                Output::Ending(flow) => {
                    let is_over = self.cache.is_over(flow);
                    self.sal.handle(now, Input::Ending { flow, is_over });
                }
                Output::Survey { grant, flows } => {
                    let survey = self.cache.survey(grant, flows);
                    self.sal.handle(now, Input::Survey { grant, survey });
                }
                Output::Tell { grant, flows } => {
                    self.cache.tell_of(grant, flows);
                    self.hear(now);
                }
                // No copy of the service table is kept here.
                Output::Routes => {}
                Output::Leases => self.lease(),
                // Whoever runs the world answers them.
                Output::Questions | Output::QuietEnds => {}
            }
        }
        let kept = self.hear_events(now);
        for reset in std::mem::take(&mut self.resets) {
            self.egress(now, &reset.emit());
        }
        if !kept.is_empty() {
            // All of its records are made when it dies: what it wants to be written down is.
            kept.into_iter().for_each(|old| self.sal.kept(now, old));
            self.drain(now);
        }
    }

    fn update(&mut self, now: Instant, update: EntryUpdate) {
        self.cache.apply(now, update);
        let last = self.cache.take_last_packets();
        self.outbox.extend(last.into_iter().map(|(local, to, datagram)| Outgoing::Datagram(local, to, datagram)));
        for (came, datagram) in self.cache.take_settled() {
            self.ingress(now, came, &datagram);
        }
    }

    fn inject(&mut self, now: Instant, packet: &[u8]) {
        match Segment::parse(packet) {
            Some(segment) => self.deliver(now, segment),
            None => self.deliver_error(now, packet),
        }
    }

    /// ICMP: to the client whose packet it quotes.
    fn deliver_error(&mut self, now: Instant, packet: &[u8]) {
        let header = if packet.first().is_some_and(|byte| byte >> 4 == 4) { 20 } else { 40 };
        let Some(quoted) = packet.get(header + 8..).and_then(Segment::parse) else { return };
        for client in self.clients.iter_mut().filter(|client| *client.tuple() == quoted.tuple) {
            client.unreachable(now);
        }
        self.streams.iter_mut().filter(|stream| *stream.tuple() == quoted.tuple).for_each(Stream::unreachable);
    }

    /// Whether a packet is for a socket here.
    fn is_local(&self, segment: &Segment) -> bool {
        let to = segment.tuple.destination.ip();
        self.ranges().is_host(to) || self.addresses.contains(&to)
    }

    fn deliver(&mut self, now: Instant, segment: Segment) {
        if !self.is_local(&segment) && self.give_box(now, &segment) {
            return;
        }
        if segment.tuple.protocol == UDP {
            self.datagrams.push(Datagram { tuple: segment.tuple, data: segment.data });
            return;
        }
        let to = segment.tuple.destination;
        let is_of = |stream: &&mut Stream| stream.tuple().reversed() == segment.tuple;
        let opens = segment.flags & (SYN | 16) == SYN;
        if opens && self.full_queue > 0 {
            self.full_queue -= 1;
            return;
        }
        let answers = if opens && self.old_connections > 0 {
            self.old_connections -= 1;
            vec![Server::acknowledge(&segment)]
        } else if let Some(client) = self.clients.iter_mut().find(|client| client.tuple().reversed() == segment.tuple) {
            client.handle(now, &segment)
        } else if let Some(stream) = self.streams.iter_mut().rev().find(is_of)
            && !(opens && stream.state == State::Gone)
        {
            stream.handle(now, &segment)
        } else if let Some((_, plan)) = self.listeners.iter().find(|(port, _)| opens && *port == to.port()) {
            let mut stream = Stream::accept(&segment, *plan, now);
            if self.speaks_plainly {
                stream.say_plainly(false);
            }
            let answers = stream.handle(now, &segment);
            self.streams.push(stream);
            answers
        } else if let Some(server) = self.servers.iter_mut().find(|server| server.port == to.port()) {
            server.handle(&segment)
        } else {
            Server::refuse(&segment)
        };
        for answer in answers {
            self.egress(now, &answer.emit());
        }
        if self.relays.iter().any(Relay::waits) {
            self.relay(now);
        }
    }
}
