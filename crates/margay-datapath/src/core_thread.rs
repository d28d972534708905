//! The thread of the core: signalling, misses and timers go in, outputs are carried out in order.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::Duration;

use margay_core::entry::{EntryUpdate, FlowCounters};
use margay_core::output::{AppVerdict, Output};
use margay_core::segment::SEGMENT;
use margay_core::time::Instant;
use margay_core::{DirectEvent, Direction, DropReason, Event, Input};
use margay_wire::{DataRepr, FlowId};

use crate::backlog::{Missed, Notice, Passed, Waiting};
use crate::direct::{Events, Turn, events_fd};
use crate::driver::{Core, DatapathConfig, Shared};
use crate::egress::{By, carry, numbers, sender};
use crate::ending::Arrived;
use crate::kernel::Unjudged;
use crate::outbox::{self, Outbox};
use crate::packet::{self, ACK, Packet, SYN, UDP};
use crate::tun::PACKET_MAX;
use crate::udp::{RECEIVE_MAX, SendError};
use crate::vnet::{Gso, Vnet};
use crate::wait::{Timer, readable};
use crate::{clock, ingress, offload, restart};

/// Receives of signalling between two looks at the rest.
const SIGNALLING_BURST: usize = 64;
/// Packets of `sal0` that are carried after a burst of signalling.
const ANSWERS: usize = 8;
/// For so long events gather where many come: a wake-up for each would take as long as the connection that it is about.
const GATHERING: Duration = Duration::from_millis(1);
/// How often the kernel's cache is told that the agent is alive.
const BEAT: Duration = Duration::from_millis(500);
/// When what the kernel learned of a path has expired there too (`net.ipv4.route.mtu_expires`).
const PATHS_RESTORED: Duration = Duration::from_secs(600);

/// The core, and what it takes to carry out what it asks for. Whoever holds its lock drains it.
pub(crate) struct CoreSide<C> {
    pub core: C,
    on_event: Box<dyn FnMut(Event) + Send>,
    buffer: Box<[u8]>,
    outbox: Outbox,
    armed: Option<Instant>,
    next_scan: Instant,
    scan_every: Duration,
    next_restore: Instant,
    next_beat: Instant,
    /// When the kernel's cache was asked for activity last, on its clock.
    scanned_ns: u64,
    /// What flows have carried that have gone since the last event.
    gone: HashMap<FlowId, FlowCounters>,
    /// Flows of datagrams that the packet threads leave to the core until it has carried what it held of them.
    opening: Vec<FlowId>,
}

impl<C: Core> CoreSide<C> {
    pub fn new(core: C, on_event: Box<dyn FnMut(Event) + Send>, config: &DatapathConfig) -> Self {
        let scan = Duration::from_millis(config.activity_scan_ms.max(1));
        let now = clock::now();
        Self {
            core,
            on_event,
            buffer: vec![0; RECEIVE_MAX.max(PACKET_MAX)].into_boxed_slice(),
            outbox: Outbox::new(config.datagram_max),
            armed: None,
            next_scan: now + scan,
            scan_every: scan,
            next_restore: now + PATHS_RESTORED,
            next_beat: now,
            scanned_ns: 0,
            gone: HashMap::new(),
            opening: Vec::new(),
        }
    }

    /// Carries out what the core asks for, until it asks for nothing; then passes its events on and sets the timer.
    pub fn drain(&mut self, shared: &Shared<C>) {
        while let Some(output) = self.core.poll(&mut self.buffer) {
            match output {
                Output::Transmit { local, to, len } => transmit(shared, local, to, &self.buffer[..len]),
                Output::Inject { len } => shared.inject(&self.buffer[..len]),
                Output::Deliver { flow, len } => self.deliver(shared, flow, len),
                Output::Egress { len } => {
                    let buffer = std::mem::take(&mut self.buffer);
                    self.carry_cached(shared, Vnet::default(), &buffer[..len]);
                    self.buffer = buffer;
                }
                Output::Carry { flow, len } => {
                    let buffer = std::mem::take(&mut self.buffer);
                    self.carry_by(shared, flow, &buffer[..len]);
                    self.buffer = buffer;
                }
                Output::Ingress { from, len } => self.ingress(shared, from, len),
                Output::Update(update) => {
                    if matches!(update, EntryUpdate::Install(entry) if entry.stacks.change != 0) {
                        // What is sent already goes out before the last packet of the flow's stack.
                        self.outbox.flush(&mut sender(shared, false));
                    }
                    let installed = datagrams_installed_by(&update);
                    apply(shared, update, &mut self.gone);
                    self.opening.extend(installed.filter(|flow| shared.table.read().is_opening(*flow)));
                }
                Output::Pinhole(flow) => shared.send_pinhole(flow),
                Output::Knock(flow) => shared.send_knock(flow),
                Output::Fence(flow) => shared.direct.fence(flow),
                Output::Back(flow) => shared.send_mark(flow, 0),
                Output::Restart(flow) => restart::restart(shared, flow),
                Output::Ending(flow) => {
                    let is_over = shared.caches().is_over(flow);
                    self.core.handle(clock::now(), Input::Ending { flow, is_over });
                }
                Output::Survey { grant, flows } => {
                    let survey = shared.direct.survey_grant(grant, flows);
                    self.core.handle(clock::now(), Input::Survey { grant, survey });
                }
                Output::Tell { grant, flows } => shared.direct.tell_of_flows(grant, flows),
                Output::Routes => shared.routes.set(),
                Output::Questions => shared.questions.set(),
                Output::QuietEnds => shared.quiet_ends.set(),
                Output::Leases => shared.leases.set(),
            }
        }
        self.outbox.flush(&mut sender(shared, false));
        if !self.opening.is_empty() {
            let table = shared.table.read();
            self.opening.drain(..).for_each(|flow| table.open(flow));
        }
        while let Some(mut event) = self.core.poll_event() {
            if let Event::FlowClosed { flow, carried, .. } = &mut event
                && let Some(counted) = self.gone.remove(&flow.flow)
            {
                *carried = counted;
            }
            (self.on_event)(event);
        }
        self.gone.clear();
        self.set_timer(shared);
    }

    /// A packet of a peer that the core has had, in the buffer.
    fn deliver(&mut self, shared: &Shared<C>, flow: FlowId, len: usize) {
        let arrived = Arrived::of(&self.buffer[..len]);
        shared.inject(&self.buffer[..len]);
        let Some(arrived) = arrived else { return };
        let caches = shared.caches();
        let (known, connection) = caches.known_of(flow);
        if let Some(numbers) = arrived.numbers(&known, connection.as_ref()) {
            shared.table.read().note_peer_numbers(flow, numbers);
        }
        let taken = caches.take_ending(flow, &arrived, (known, connection));
        if taken != 0 {
            self.core.handle(clock::now(), Input::Transport { flow, direction: Direction::Ingress, flags: taken });
        }
    }

    /// The application's TCP has taken an ending of the peer's: FIN, RST or both.
    fn end(&mut self, flow: FlowId, taken: u8) {
        self.core.handle(clock::now(), Input::Transport { flow, direction: Direction::Ingress, flags: taken });
    }

    /// Endings that the application's TCP has taken meanwhile.
    fn judge_endings(&mut self, shared: &Shared<C>) {
        for (flow, taken) in shared.caches().judge_endings() {
            self.end(flow, taken);
        }
    }

    /// A packet of an application that missed the cache.
    pub fn app_packet(&mut self, shared: &Shared<C>, missed: Missed) {
        self.cache_events(shared);
        let Missed { vnet, mut packet, of_peer } = missed;
        let found = match packet::parse(&packet, packet.len()) {
            Ok(Packet::Transport(found)) => Some(found),
            _ => None,
        };
        // Its entry may have come while it waited here.
        let is_syn = found.is_some_and(|found| found.flags & (SYN | ACK) == SYN);
        if found.is_some() && !is_syn && of_peer.is_none() && self.carry_cached(shared, vnet, &packet) {
            // A small one would wait for others of its kind, of which none may come.
            self.outbox.flush(&mut sender(shared, false));
            return;
        }
        if let Some(found) = found.filter(|_| vnet.gso != Gso::None) {
            let cut = outbox::train_header(&vnet, &found)
                .ok_or(DropReason::Malformed)
                .and_then(|train| offload::segments(&train, &found.key, &packet[..found.total_len]));
            match cut {
                Ok(segments) => segments.iter().for_each(|segment| self.packet_of(shared, of_peer, segment)),
                Err(reason) => shared.counting.drop(reason),
            }
            return;
        }
        if vnet.partial_checksum && !offload::complete(&vnet, &mut packet) {
            shared.counting.drop(DropReason::Malformed);
            return;
        }
        self.packet_of(shared, of_peer, &packet);
    }

    /// A packet as it would be on a wire: of a peer whose flow the core has come to it, or of an application.
    fn packet_of(&mut self, shared: &Shared<C>, of_peer: Option<FlowId>, packet: &[u8]) {
        let Some(flow) = of_peer else { return self.plain_packet(shared, packet) };
        self.core.handle(clock::now(), Input::Parted { flow, packet });
        self.drain(shared);
    }

    /// A packet of an application: the core decides.
    fn plain_packet(&mut self, shared: &Shared<C>, packet: &[u8]) {
        let verdict = self.core.handle_app_packet(clock::now(), packet);
        self.drain(shared);
        match verdict {
            AppVerdict::Consumed => {}
            AppVerdict::Parted(flow) => self.note_parted(shared, flow, packet),
            AppVerdict::Forward(flow) => {
                if !self.carry_cached(shared, Vnet::default(), packet) {
                    tracing::debug!(flow = flow.0, "the core forwards a packet of a flow that it did not install");
                    shared.counting.drop(DropReason::UnknownFlow);
                }
                self.outbox.flush(&mut sender(shared, false));
            }
            AppVerdict::Drop(reason) => tracing::trace!(%reason, "application packet dropped"),
        }
    }

    /// The core has carried what it has made of a packet of an application.
    fn note_parted(&mut self, shared: &Shared<C>, flow: FlowId, packet: &[u8]) {
        let Ok(Packet::Transport(found)) = packet::parse(packet, packet.len()) else { return };
        let Some(numbers) = numbers(packet, &found) else { return };
        let takes_end = shared.table.read().note_parted(flow, numbers);
        if takes_end {
            self.judge_endings(shared);
            self.drain(shared);
        }
    }

    /// Carries a packet if its flow is cached. False if not; a packet that is refused for another reason is counted.
    fn carry_cached(&mut self, shared: &Shared<C>, vnet: Vnet, packet: &[u8]) -> bool {
        let Ok(Packet::Transport(found)) = packet::parse(packet, packet.len()) else { return false };
        let Some(loaded) = self.outbox.load(vnet, packet) else { return false };
        let result = carry(shared, &mut self.outbox, loaded, &found, By::Tuple(false));
        result != Err(DropReason::UnknownFlow)
    }

    /// Carries a packet by a flow that the core names.
    fn carry_by(&mut self, shared: &Shared<C>, flow: FlowId, packet: &[u8]) {
        let Ok(Packet::Transport(found)) = packet::parse(packet, packet.len()) else { return };
        let Some(loaded) = self.outbox.load(Vnet::default(), packet) else { return };
        if carry(shared, &mut self.outbox, loaded, &found, By::Flow(flow)) == Err(DropReason::UnknownFlow) {
            shared.counting.drop(DropReason::UnknownFlow);
        }
    }

    /// A DATA datagram that the core has held: as if received now.
    fn ingress(&mut self, shared: &Shared<C>, from: SocketAddr, len: usize) {
        let datagram = &mut self.buffer[..len];
        let result = DataRepr::parse(datagram).map_err(|_| DropReason::Malformed).and_then(|header| {
            let mut assembler = shared.assembler.lock();
            ingress::take(shared, &mut assembler, header, (datagram, len), (None, from), None)
        });
        if let Err(reason) = result {
            shared.counting.drop(reason);
        }
    }

    fn datagram(&mut self, shared: &Shared<C>, local: Option<IpAddr>, from: SocketAddr, datagram: &[u8]) {
        // The peer goes back with a flow, say, of which the kernel has told nobody yet.
        if let Some((grant, flow)) = self.core.untold(datagram) {
            shared.direct.tell_of_flows(grant, flow);
        }
        self.cache_events(shared);
        self.core.handle_datagram(clock::now(), local, from, datagram);
        self.drain(shared);
    }

    fn notice(&mut self, shared: &Shared<C>, notice: Notice) {
        let now = clock::now();
        match notice {
            Notice::Passed(Passed { flow, direction, flags }) => {
                self.core.handle(now, Input::Transport { flow, direction, flags });
            }
            Notice::Silence(flow, unanswered) => self.core.handle(now, Input::Silence { flow, unanswered }),
            Notice::Answer(flow) => self.core.handle(now, Input::Answer(flow)),
            Notice::Acknowledged => self.judge_endings(shared),
            Notice::Direct(flow, event) => self.core.handle(now, Input::Direct { flow, event }),
            Notice::Arrivals(flow) => {
                let stripe = shared.table.read().stripe(flow);
                if let Some((place, arrivals)) = stripe.map(|stripe| stripe.arrivals()) {
                    self.core.handle(now, Input::Arrivals { flow, place, arrivals: &arrivals });
                }
            }
            Notice::StrangeSeal(flow) => self.core.handle(now, Input::StrangeSeal(flow)),
            Notice::Count(flow) => self.core.handle(now, Input::Counted { flow, count: &shared.count(flow) }),
            Notice::Turned(flow, change) => self.core.handle(now, Input::Turned { flow, change }),
            Notice::StrangeStack(flow) => self.core.handle(now, Input::StrangeStack(flow)),
            Notice::Beside(flow) => {
                let wanted = shared.table.read().wire(flow);
                if shared.direct.is_stalled(flow, wanted) {
                    self.core.handle(now, Input::Direct { flow, event: DirectEvent::Stalled });
                }
            }
        }
        self.drain(shared);
    }

    /// The kernel's cache saw connections begin or end, datagrams that go one way, and the like. Asked before the core
    /// decides about anything, since they gather for a moment where many come. Gives whether more are to be expected:
    /// connections come and go in numbers.
    pub fn cache_events(&mut self, shared: &Shared<C>) -> bool {
        let now = clock::now();
        let seen = shared.direct.take_events();
        if seen == Events::default() {
            return false;
        }
        let crowds = seen.turns.len() > 1 || !seen.taken.is_empty();
        for (flow, turn) in seen.turns {
            match turn {
                Turn::Opened(app) => self.core.handle(now, Input::Opened { flow, app: &app }),
                Turn::Ended(direction, flags) => self.core.handle(now, Input::Transport { flow, direction, flags }),
            }
        }
        seen.taken.into_iter().for_each(|(grant, taken)| self.core.handle(now, Input::Taken { grant, taken }));
        seen.paths.into_iter().for_each(|path| self.core.handle(now, Input::PathDirect(path)));
        seen.one_way.into_iter().for_each(|flow| shared.answer_one_way(flow));
        for (remote, datagram_max) in seen.narrow {
            // What is encapsulated goes the same way, and need not find out by a loss of its own.
            shared.table.read().shrink_paths(remote, datagram_max);
        }
        for pinhole in seen.pinholes {
            self.plain_packet(shared, &pinhole);
        }
        self.drain(shared);
        crowds
    }

    /// The timer fired: whatever is due.
    fn due(&mut self, shared: &Shared<C>) {
        self.armed = None;
        let now = clock::now();
        if self.core.poll_timeout().is_some_and(|at| at <= now) {
            self.core.handle(now, Input::Timeout);
        }
        if self.next_scan <= now {
            self.next_scan = now + self.scan_every;
            self.scan(shared, now);
        }
        if self.next_beat <= now {
            self.next_beat = now + BEAT;
            self.judge_endings(shared);
            if let Some(cache) = shared.direct.cache() {
                cache.heartbeat();
                // Whom the agent before had associations with is known by then.
                if shared.has_begun.load(Ordering::Acquire) {
                    cache.trust_peers();
                }
            }
            shared.direct.forget_left();
        }
        if self.next_restore <= now {
            self.next_restore = now + PATHS_RESTORED;
            shared.table.read().restore_paths();
            shared.direct.restore_paths();
        }
        self.drain(shared);
    }

    /// Looks through the caches for what flows have carried, and for ends that nobody told of: the ring of events may
    /// have been full, and the programs of the agent before go on telling theirs until they are replaced.
    fn scan(&mut self, shared: &Shared<C>, now: Instant) {
        let blocks = shared.table.read().blocks();
        let mut flows: Vec<FlowId> = Vec::new();
        // Block by block, so that an update need not wait for the whole table.
        for block in 0..blocks {
            shared.table.read().take_active(block, &mut flows);
            flows.drain(..).for_each(|flow| self.core.handle(now, Input::Activity(flow)));
        }
        if let Some(cache) = shared.direct.cache() {
            let since = std::mem::replace(&mut self.scanned_ns, clock::now().micros() * 1000);
            for state in cache.entries() {
                if state.last_ns >= since {
                    self.core.handle(now, Input::Activity(state.flow));
                }
                let ends = state.seen.ends();
                ends.for_each(|(direction, flags)| {
                    self.core.handle(now, Input::Transport { flow: state.flow, direction, flags })
                });
                // Acknowledgements of a flow may go by user space, and the rest by the kernel.
                let taken = match state.unjudged {
                    Unjudged { reset: None, end: None, .. } => 0,
                    unjudged => unjudged.taken(shared.table.read().connection(state.flow).as_ref()),
                };
                if taken != 0 {
                    self.end(state.flow, shared.caches().note_taken(state.flow, &state.unjudged, taken));
                }
            }
        }
    }

    fn set_timer(&mut self, shared: &Shared<C>) {
        let own = self.next_scan.min(self.next_beat);
        let next = self.core.poll_timeout().map_or(own, |at| at.min(own));
        // A timer that fires too early does no harm: `due` looks, and arms it again.
        if self.armed.is_none_or(|armed| next < armed) {
            match shared.timer.arm(next) {
                Ok(()) => self.armed = Some(next),
                Err(error) => tracing::error!(%error, "cannot set the timer"),
            }
        }
    }
}

/// Runs until the datapath stops.
pub(crate) fn run<C: Core>(shared: &Shared<C>) -> io::Result<()> {
    let mut buffer = vec![0; RECEIVE_MAX].into_boxed_slice();
    let signalling = &shared.sockets.signalling;
    // Set while events gather.
    let pause = Timer::new()?;
    let mut gathers = false;
    while !shared.is_stopping() {
        let cache = shared.direct.cache();
        // Without a cache the place of its events is taken by a signal that only its coming sets.
        let events = cache.as_deref().map_or(shared.reload.as_fd(), events_fd);
        let events = if gathers { pause.as_fd() } else { events };
        let [has_backlog, has_signalling, is_due, has_events, is_reloaded, _] = readable([
            shared.backlog.as_fd(),
            signalling.as_fd(),
            shared.timer.as_fd(),
            events,
            shared.reload.as_fd(),
            shared.stop.as_fd(),
        ])?;
        if is_reloaded {
            shared.reload.clear();
        }
        if has_events {
            // Nobody waits for what the agent does then.
            gathers = shared.core.lock().cache_events(shared);
            pause.clear();
            if gathers {
                pause.arm(clock::now() + GATHERING)?;
            }
        }
        if has_backlog {
            work_off(shared, shared.backlog.take());
        }
        if has_signalling {
            for _ in 0..SIGNALLING_BURST {
                let Some(received) = signalling.receive(&mut buffer)? else { break };
                for datagram in buffer[..received.len].chunks(received.segment) {
                    shared.counting.signalling_received.add(1);
                    shared.core.lock().datagram(shared, received.local, received.from, datagram);
                }
            }
            // The host's TCP has answered what it was given already; the egress thread is only now waking up.
            if shared.has_begun.load(Ordering::Acquire)
                && let Some(mut egress) = shared.egress.try_lock()
            {
                egress.work(shared, ANSWERS)?;
            }
        }
        if is_due {
            shared.timer.clear();
            shared.core.lock().due(shared);
        }
    }
    Ok(())
}

fn work_off<C: Core>(shared: &Shared<C>, waiting: Waiting) {
    // The lock is let go between items, so that the control side gets its turn.
    for notice in waiting.notices {
        shared.core.lock().notice(shared, notice);
    }
    for missed in waiting.packets {
        shared.core.lock().app_packet(shared, missed);
    }
    for arrived in waiting.datagrams {
        shared.core.lock().datagram(shared, arrived.local, arrived.from, &arrived.bytes);
    }
    shared.backlog.done(waiting.packet_place, waiting.datagram_place);
}

/// The flow of datagrams whose entry an update brings. Connections are never left to the core.
const fn datagrams_installed_by(update: &EntryUpdate) -> Option<FlowId> {
    match update {
        EntryUpdate::Install(entry) | EntryUpdate::Opened(entry) if entry.app.protocol == UDP => Some(entry.flow),
        _ => None,
    }
}

/// Brings a change to the caches, and to what else it is for. What flows have carried that are removed is left in
/// `gone`.
fn apply<C>(shared: &Shared<C>, update: EntryUpdate, gone: &mut HashMap<FlowId, FlowCounters>) {
    match update {
        EntryUpdate::Install(entry) => {
            shared.caches().apply(update);
            turn(shared, entry.flow);
        }
        EntryUpdate::Stripe { flow, news } => {
            // Not under the table's lock, for which whoever sends waits.
            let stripe = shared.table.read().stripe(flow);
            stripe.into_iter().for_each(|stripe| stripe.note(news));
        }
        // Whoever counts takes the lock that is held here.
        EntryUpdate::Count(flow) => shared.notice(Notice::Count(flow)),
        EntryUpdate::Loss { flow, loss } => {
            let fec = shared.table.read().fec(flow);
            fec.into_iter().for_each(|fec| fec.note_loss(loss));
        }
        EntryUpdate::Show { surrogate, address } => {
            if let Some(unconnected) = &shared.unconnected
                && let Err(error) = unconnected.show_client(surrogate, address)
            {
                tracing::debug!(client = %address, %error, "programs know a client of theirs by its surrogate");
            }
        }
        EntryUpdate::Remove { flow, reason } => {
            let key = shared.table.read().key(flow).filter(|key| key.protocol == UDP);
            if let (Some(unconnected), Some(key)) = (&shared.unconnected, key) {
                unconnected.hide_client(key.destination(), key.source_port);
            }
            gone.insert(flow, shared.caches().remove(flow, reason));
        }
        EntryUpdate::Path(_)
        | EntryUpdate::RemovePath(_)
        | EntryUpdate::Opened(_)
        | EntryUpdate::Begun { .. }
        | EntryUpdate::Succession { .. }
        | EntryUpdate::Suspend(_)
        | EntryUpdate::Grant(_)
        | EntryUpdate::StopGrant(_)
        | EntryUpdate::RemoveGrant(_) => shared.caches().apply(update),
    }
}

/// A flow may be another stack's from its new entry on, and what its peer sends of that one may wait.
fn turn<C>(shared: &Shared<C>, flow: FlowId) {
    if shared.table.read().is_to_turn(flow) {
        shared.turns.add(flow);
    }
    if let Some((turn, until)) = shared.table.read().waiting_turn(flow) {
        shared.overtaking.add(&turn, until);
    }
}

fn transmit<C>(shared: &Shared<C>, local: Option<IpAddr>, to: SocketAddr, datagram: &[u8]) {
    shared.counting.signalling_sent.add(1);
    if to == SEGMENT {
        let refused = shared.segments.send(&shared.sockets.signalling, datagram);
        (0..refused).for_each(|_| shared.counting.drop(DropReason::Environment));
        return;
    }
    match shared.sockets.signalling.send(datagram, datagram.len(), to, shared.origin(to, local)) {
        Ok(()) => {}
        Err(SendError::Full) => shared.counting.drop(DropReason::Full),
        Err(error) => {
            tracing::debug!(%to, ?error, "signalling refused");
            shared.counting.drop(DropReason::Environment);
        }
    }
}
