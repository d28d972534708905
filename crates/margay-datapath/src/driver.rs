//! The threads: one from `sal0` to UDP, one from UDP to `sal0`, and one for the core.
//!
//! ```text
//!   sal0 ──▶ egress ──────hit──────▶ UDP          UDP, DATA ──▶ ingress ──────hit──────▶ sal0
//!              │ miss, FIN, RST                                    │ miss, FIN, RST
//!              └────────────▶ backlog ──▶ core thread ◀── backlog ─┘
//!                       UDP, signalling ──▶ │  ▲ timer
//!                                           ▼
//!                            Sal, then its outputs in order
//! ```
//!
//! The packet threads never wait for the core's lock: they read the flow cache under a shared lock and hand everything
//! else over. So neither a flood of signalling nor a slow handshake delays established flows. What missed the cache
//! goes the short way where that delays nobody: once `sal0` is empty the egress thread gives it to the core itself, if
//! the core is free; and the core's thread, having given the host's TCP something, carries the answer itself if the
//! egress thread is not at it yet. A connection is set up with fewer threads to wake (decision 0012).

use std::io::{self, IoSlice};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use margay_core::entry::Wire;
use margay_core::loss::FlowCount;
use margay_core::output::{AppVerdict, Output};
use margay_core::time::Instant;
use margay_core::timing::Order;
use margay_core::{Direction, DropReason, Event, FlowCounters, Input, Sal};
use margay_wire::{DATA_HEADER_LEN, DataRepr, FlowId, PLACES_MAX, STACK_ENCAP};
use parking_lot::{Mutex, RwLock};

use crate::backlog::{Backlog, Notice, Passed};
use crate::caches::Caches;
use crate::core_thread::{self, CoreSide};
use crate::counters::{Counters, Counting};
use crate::direct::{Direct, Routing};
use crate::due_flows::DueFlows;
use crate::egress::EgressSide;
use crate::ending::Endings;
use crate::error::Error;
use crate::fec::Fec;
use crate::kernel::KernelCache;
use crate::outbox::{self, DATAGRAM_MAX, DATAGRAM_MIN};
use crate::packet::{FIN, RST, SYN, UDP};
use crate::restart::Restarts;
use crate::sctp::Sctp;
use crate::segments::{Segment, Segments};
use crate::striped::{Agenda, PlaceCounters};
use crate::table::{Destination, Table, TcpNumbers};
use crate::train::Assembler;
use crate::tun::Tun;
use crate::turning::Overtaking;
use crate::udp::{Origin, SendError, Sockets};
use crate::unconnected::Unconnected;
use crate::vnet::{self, Vnet};
use crate::wait::{Timer, Wake, readable, writable};
use crate::{clock, egress, ingress, unreachable};

/// What the datapath needs of the core: [`Sal`], or in tests something smaller.
pub trait Core: Send + 'static {
    /// See [`Sal::handle_app_packet`].
    fn handle_app_packet(&mut self, now: Instant, packet: &[u8]) -> AppVerdict;
    /// See [`Sal::handle_datagram`]; what it drops it counts itself.
    fn handle_datagram(&mut self, now: Instant, local: Option<IpAddr>, from: SocketAddr, datagram: &[u8]);
    /// See [`Sal::handle`].
    fn handle(&mut self, now: Instant, input: Input<'_>);
    /// See [`Sal::untold`].
    fn untold(&self, datagram: &[u8]) -> Option<(FlowId, u128)>;
    /// See [`Sal::poll`].
    fn poll(&mut self, buf: &mut [u8]) -> Option<Output>;
    /// See [`Sal::poll_event`].
    fn poll_event(&mut self) -> Option<Event>;
    /// See [`Sal::poll_timeout`].
    fn poll_timeout(&self) -> Option<Instant>;
}

impl Core for Sal {
    fn handle_app_packet(&mut self, now: Instant, packet: &[u8]) -> AppVerdict {
        self.handle_app_packet(now, packet)
    }

    fn handle_datagram(&mut self, now: Instant, local: Option<IpAddr>, from: SocketAddr, datagram: &[u8]) {
        if let Err(reason) = self.handle_datagram(now, local, from, datagram) {
            tracing::trace!(%from, %reason, "datagram dropped");
        }
    }

    fn handle(&mut self, now: Instant, input: Input<'_>) {
        self.handle(now, input);
    }

    fn untold(&self, datagram: &[u8]) -> Option<(FlowId, u128)> {
        self.untold(datagram)
    }

    fn poll(&mut self, buf: &mut [u8]) -> Option<Output> {
        self.poll(buf)
    }

    fn poll_event(&mut self) -> Option<Event> {
        self.poll_event()
    }

    fn poll_timeout(&self) -> Option<Instant> {
        self.poll_timeout()
    }
}

/// Where the datapath sits.
pub struct DatapathConfig {
    /// The TUN; made if there is none (it then goes away with the datapath).
    pub tun_name: String,
    /// The SAL's UDP port.
    pub udp_port: u16,
    /// The usual largest UDP payload in bytes of this host's links; only a hint for laying out buffers, the paths
    /// decide.
    pub datagram_max: u16,
    /// How often flows are asked whether they carried something, in milliseconds.
    pub activity_scan_ms: u64,
    /// How to find out where packets leave this host; without it every flow is encapsulated.
    pub routing: Option<Box<dyn Routing>>,
    /// The programs that show clients' real addresses to datagram servers, where they are in use.
    pub unconnected: Option<Arc<Unconnected>>,
    /// The kernel's flow cache, if there is one. The entries that the process before has left there follow the core
    /// from its first update.
    pub cache: Option<Arc<KernelCache>>,
}

impl Default for DatapathConfig {
    fn default() -> Self {
        Self {
            tun_name: "sal0".to_owned(),
            udp_port: margay_wire::PORT,
            datagram_max: 1472,
            activity_scan_ms: 5000,
            routing: None,
            unconnected: None,
            cache: None,
        }
    }
}

/// What the threads share.
pub(crate) struct Shared<C> {
    pub tun: Tun,
    pub sockets: Sockets,
    pub table: RwLock<Table>,
    pub counting: Counting,
    pub backlog: Backlog,
    pub direct: Direct,
    pub restarts: Restarts,
    pub endings: Endings,
    pub segments: Segments,
    /// What of striped flows waits for its turn to be sent.
    pub pacing: Agenda,
    /// What of striped flows waits for what was sent before it.
    pub ordering: Agenda,
    /// Blocks of flows that go by `fec` end.
    pub block_ends: Agenda<Fec>,
    /// What of them waits for what is missing.
    pub holes: Agenda<Fec>,
    /// Flows that go by `sctp` have something to send again, or to acknowledge.
    pub repeating: Agenda<Sctp>,
    /// What of flows that turn to another stack waits for a FENCE.
    pub overtaking: Overtaking,
    /// Flows that this end is to turn.
    pub turns: DueFlows,
    pub unconnected: Option<Arc<Unconnected>>,
    pub timer: Timer,
    /// Packets are taken from now on.
    pub begun: Wake,
    /// The same, for whoever does not wait for it.
    pub has_begun: AtomicBool,
    pub stop: Wake,
    /// The kernel's cache came or went.
    pub reload: Wake,
    /// The core has changes for a copy of its service table.
    pub routes: Wake,
    /// The core has questions for resolvers.
    pub questions: Wake,
    /// Peers want connections of programs here to end in order.
    pub quiet_ends: Wake,
    /// Names need virtual addresses here.
    pub leases: Wake,
    pub stopping: AtomicBool,
    /// Chunks of trains that wait for others. The first ones of a flow may come by the core, and the rest past it.
    /// Locked after the core, and before everything else.
    pub assembler: Mutex<Assembler>,
    pub core: Mutex<CoreSide<C>>,
    pub egress: Mutex<EgressSide>,
    failure: Mutex<Option<String>>,
}

/// A running datapath. Dropping it stops it.
pub struct Datapath<C: Core = Sal> {
    shared: Arc<Shared<C>>,
    threads: Vec<JoinHandle<()>>,
}

impl<C: Core> Datapath<C> {
    /// Opens the TUN and the UDP port and starts the threads. `core`'s clock must be [`clock::now`]. `on_event` is
    /// called on whichever thread drains the core, under its lock: it must be quick and must not call back. Packets
    /// wait in the kernel's queues until [`begin`](Self::begin).
    pub fn start(mut config: DatapathConfig, core: C, on_event: Box<dyn FnMut(Event) + Send>) -> Result<Self, Error> {
        if !(DATAGRAM_MIN..=DATAGRAM_MAX).contains(&config.datagram_max) {
            let (low, high) = (DATAGRAM_MIN, DATAGRAM_MAX);
            return Err(Error::DatagramMax { value: config.datagram_max, low, high });
        }
        let descriptors = |error| Error::system("make event descriptors", error);
        let shared = Arc::new(Shared {
            tun: Tun::open(&config.tun_name)?,
            sockets: Sockets::open(config.udp_port)?,
            table: RwLock::default(),
            counting: Counting::default(),
            backlog: Backlog::new().map_err(descriptors)?,
            direct: Direct::new(config.routing.take()).map_err(descriptors)?,
            restarts: Restarts::default(),
            endings: Endings::default(),
            segments: Segments::default(),
            pacing: Agenda::new().map_err(descriptors)?,
            ordering: Agenda::new().map_err(descriptors)?,
            block_ends: Agenda::new().map_err(descriptors)?,
            holes: Agenda::new().map_err(descriptors)?,
            repeating: Agenda::new().map_err(descriptors)?,
            overtaking: Overtaking::new().map_err(descriptors)?,
            turns: DueFlows::new().map_err(descriptors)?,
            unconnected: config.unconnected.take(),
            timer: Timer::new().map_err(descriptors)?,
            begun: Wake::new().map_err(descriptors)?,
            has_begun: AtomicBool::new(false),
            stop: Wake::new().map_err(descriptors)?,
            reload: Wake::new().map_err(descriptors)?,
            routes: Wake::new().map_err(descriptors)?,
            questions: Wake::new().map_err(descriptors)?,
            quiet_ends: Wake::new().map_err(descriptors)?,
            leases: Wake::new().map_err(descriptors)?,
            stopping: AtomicBool::new(false),
            assembler: Mutex::default(),
            core: Mutex::new(CoreSide::new(core, on_event, &config)),
            egress: Mutex::new(EgressSide::new(config.datagram_max)),
            failure: Mutex::new(None),
        });
        // Before anything is carried out: the entry of a flow that is removed without the cache would stay there.
        shared.direct.use_cache(config.cache.take());
        let mut datapath = Self { shared, threads: Vec::new() };
        datapath.spawn("margay-egress", |shared| shared.when_begun(egress::run))?;
        datapath.spawn("margay-ingress", |shared| shared.when_begun(ingress::run))?;
        datapath.spawn("margay-core", core_thread::run)?;
        datapath.spawn("margay-icmp", unreachable::run)?;
        // The core may have something to say already, and a first deadline.
        datapath.with_sal(|_, _| ());
        // By now the paths of all flows that were taken up are known.
        datapath.shared.direct.drop_strange_paths();
        Ok(datapath)
    }

    fn spawn<F>(&mut self, name: &'static str, work: F) -> Result<(), Error>
    where
        F: FnOnce(&Shared<C>) -> io::Result<()> + Send + 'static,
    {
        let shared = Arc::clone(&self.shared);
        let body = move || {
            if let Err(error) = work(&shared) {
                tracing::error!(thread = name, %error, "the datapath stops");
                *shared.failure.lock() = Some(format!("{name}: {error}"));
                shared.halt();
            }
        };
        let thread = thread::Builder::new().name(name.to_owned()).spawn(body);
        self.threads.push(thread.map_err(|error| Error::system("start a thread", error))?);
        Ok(())
    }

    /// Takes packets from now on. Before, the core should know whatever they ask for: one that it cannot place is
    /// refused.
    pub fn begin(&self) {
        self.shared.has_begun.store(true, Ordering::Release);
        self.shared.begun.set();
    }

    /// Runs `act` on the core, then carries out what the core asks for. For the control side.
    pub fn with_sal<R>(&self, act: impl FnOnce(&mut C, Instant) -> R) -> R {
        let mut side = self.shared.core.lock();
        side.cache_events(&self.shared);
        let result = act(&mut side.core, clock::now());
        side.drain(&self.shared);
        result
    }

    /// Gives this host's kernel an IP packet for one of its programs, as if the network had brought it.
    pub fn give_to_kernel(&self, packet: &[u8]) {
        self.shared.inject(packet);
    }

    /// What was counted so far.
    pub fn counters(&self) -> Counters {
        self.shared.counting.read()
    }

    /// What a cached flow has carried.
    pub fn flow_counters(&self, flow: FlowId) -> Option<FlowCounters> {
        self.shared.flow_counters(flow)
    }

    /// What goes by each place of a striped flow.
    pub fn stripe_counters(&self, flow: FlowId) -> Option<[PlaceCounters; PLACES_MAX]> {
        let stripe = self.shared.table.read().stripe(flow)?;
        Some(stripe.counters())
    }

    /// Uses the kernel's flow cache from now on, or (`None`) no more: flows that are direct are encapsulated again
    /// first. Brings it every entry that it should hold.
    pub fn use_cache(&self, cache: Option<Arc<KernelCache>>) {
        // Held throughout: a flow that the core removed meanwhile would be brought to the cache, and stay there.
        let _core = self.shared.core.lock();
        self.shared.direct.use_cache(cache);
        self.shared.direct.follow_all(&self.shared.table.read());
        self.shared.direct.drop_strange_paths();
        // The core's thread waits on another set of descriptors now.
        self.shared.reload.set();
    }

    /// The kernel's flow cache, while it is in use.
    pub fn cache(&self) -> Option<Arc<KernelCache>> {
        self.shared.direct.cache()
    }

    /// What is for every host near goes over these interfaces from now on.
    ///
    /// # Errors
    ///
    /// One of them does not let this host listen to [`GROUP`](crate::segments::GROUP); the others are used.
    pub fn set_segments(&self, segments: Vec<Segment>) -> io::Result<()> {
        self.shared.segments.set(&self.shared.sockets.signalling, segments)
    }

    /// The host's addresses or routes have changed: asks where the packets of every path leave now.
    pub fn refresh_routes(&self) {
        self.shared.direct.refresh_paths();
    }

    /// What to wait on for changes of the core's service table.
    pub fn route_news(&self) -> News<C> {
        News { shared: Arc::clone(&self.shared), wake: |shared| &shared.routes }
    }

    /// What to wait on for questions of the core's to resolvers.
    pub fn question_news(&self) -> News<C> {
        News { shared: Arc::clone(&self.shared), wake: |shared| &shared.questions }
    }

    /// What to wait on for connections of programs here that peers want to end in order.
    pub fn quiet_news(&self) -> News<C> {
        News { shared: Arc::clone(&self.shared), wake: |shared| &shared.quiet_ends }
    }

    /// What to wait on for names that need virtual addresses on this host.
    pub fn lease_news(&self) -> News<C> {
        News { shared: Arc::clone(&self.shared), wake: |shared| &shared.leases }
    }

    /// Number of cached flows.
    pub fn cached_flows(&self) -> usize {
        self.shared.table.read().len()
    }

    /// Makes the core know of every flow that the kernel has opened by a grant, however young: the kernel's cache is
    /// about to lose them.
    pub fn hear_of_flows(&self) {
        if let Some(cache) = self.shared.direct.cache() {
            cache.tell_of_all();
            self.shared.core.lock().cache_events(&self.shared);
        }
    }

    /// Empties the flow cache: every flow goes on, its next packet brings its entry back (DESIGN §3.2).
    pub fn clear_cache(&self) {
        self.hear_of_flows();
        self.shared.table.write().clear();
        self.shared.direct.clear();
    }

    /// Why the threads ended by themselves, if they did: the interface was deleted, say.
    pub fn failure(&self) -> Option<String> {
        self.shared.failure.lock().clone()
    }

    /// Waits until the datapath ends by itself; [`failure`](Self::failure) then says why.
    pub fn wait(&self) {
        // Nobody clears this signal, so any number may wait for it. A refused poll is no reason to wait for ever.
        if let Err(error) = readable([self.shared.stop.as_fd()]) {
            tracing::error!(%error, "cannot wait for the datapath");
        }
    }

    /// Stops the threads and waits for them.
    pub fn stop(mut self) {
        self.join();
    }

    fn join(&mut self) {
        self.shared.halt();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a datapath thread panicked");
            }
        }
    }
}

/// Word that the core has something to be asked for: changes for a copy of its service table ([`Output::Routes`]), say.
/// The datapath may end meanwhile.
pub struct News<C> {
    shared: Arc<Shared<C>>,
    wake: fn(&Shared<C>) -> &Wake,
}

impl<C> News<C> {
    /// Waits for it; false when the datapath has ended instead.
    ///
    /// # Errors
    ///
    /// The system's word.
    pub fn wait(&self) -> io::Result<bool> {
        let wake = (self.wake)(&self.shared);
        let [has_news, has_ended] = readable([wake.as_fd(), self.shared.stop.as_fd()])?;
        if has_news {
            wake.clear();
        }
        Ok(!has_ended)
    }
}

impl<C: Core> Drop for Datapath<C> {
    fn drop(&mut self) {
        self.join();
    }
}

impl<C> Shared<C> {
    fn halt(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        self.stop.set();
    }

    /// What takes packets waits until it may.
    fn when_begun(&self, run: impl FnOnce(&Self) -> io::Result<()>) -> io::Result<()> {
        let [has_begun, _] = readable([self.begun.as_fd(), self.stop.as_fd()])?;
        if has_begun { run(self) } else { Ok(()) }
    }

    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Sends datagrams of `segment` bytes each on their path. With `patient`, a full send buffer is waited for, so that
    /// the TUN's queue fills instead: the only back-pressure there is.
    pub fn send_data(&self, datagrams: &[u8], segment: usize, to: &Destination, patient: bool) {
        if to.is_void {
            self.counting.drop(DropReason::Nowhere);
            return;
        }
        self.counting.egress_sends.add(1);
        match self.try_send(datagrams, segment, to, patient) {
            Ok(()) => {}
            Err(SendError::TooLarge) => self.send_smaller(datagrams, segment, to, patient),
            Err(SendError::Full) => self.counting.drop(DropReason::Full),
            Err(SendError::System(error)) => {
                tracing::debug!(to = %to.remote, %error, "send refused");
                self.counting.drop(DropReason::Environment);
            }
        }
    }

    fn try_send(&self, datagrams: &[u8], segment: usize, to: &Destination, patient: bool) -> Result<(), SendError> {
        let origin = self.origin(to.remote, to.local);
        loop {
            match self.sockets.data.send(datagrams, segment, to.remote, origin) {
                Err(SendError::Full) if patient && !self.is_stopping() => {
                    writable(self.sockets.data.as_fd(), self.stop.as_fd()).map_err(SendError::System)?;
                }
                result => return result,
            }
        }
    }

    /// Where a datagram to `remote` leaves from.
    pub fn origin(&self, remote: SocketAddr, local: Option<IpAddr>) -> Option<Origin> {
        let local = local.filter(|_| !remote.ip().is_loopback())?;
        Some(Origin { local, interface: self.direct.interface(remote.ip(), local) })
    }

    /// The path is narrower than thought: learn how narrow, and send again in smaller chunks. Chunks have nothing to do
    /// with the inner segments, so this is possible at any time.
    fn send_smaller(&self, datagrams: &[u8], segment: usize, to: &Destination, patient: bool) {
        let largest = self.sockets.data.path_mtu(to.remote).filter(|&largest| usize::from(largest) < segment);
        let Some(largest) = largest else {
            self.counting.drop(DropReason::Environment);
            return;
        };
        if largest < to.datagram_max {
            tracing::info!(to = %to.remote, datagram_max = largest, "path is narrower than thought");
            self.counting.paths_shrunk.add(1);
            self.table.read().shrink_path(to.path, largest);
            self.direct.shrink_paths(to.remote.ip(), largest);
        }
        for (bytes, segment) in outbox::recut(datagrams, segment, largest) {
            if self.try_send(&bytes, segment, to, patient).is_err() {
                self.counting.drop(DropReason::Environment);
            }
        }
    }

    /// Writes a packet whose checksums are complete to `sal0`.
    pub fn inject(&self, packet: &[u8]) {
        let header: [u8; vnet::LEN] = Vnet::default().emit();
        if let Err(error) = self.tun.write(&[IoSlice::new(&header), IoSlice::new(packet)]) {
            tracing::debug!(%error, "sal0 refused a packet");
            self.counting.drop(DropReason::Environment);
        }
    }

    /// Tells the core of a segment that was carried, if it matters to a flow's life.
    pub fn report(&self, flow: FlowId, direction: Direction, flags: u8) {
        if flags & (FIN | RST | SYN) == 0 {
            return;
        }
        self.notice(Notice::Passed(Passed { flow, direction, flags }));
    }

    /// The flow caches as one.
    pub const fn caches(&self) -> Caches<'_> {
        Caches { table: &self.table, direct: &self.direct, endings: &self.endings }
    }

    /// What a cached flow has carried.
    pub fn flow_counters(&self, flow: FlowId) -> Option<FlowCounters> {
        let counted = self.table.read().counters(flow)?;
        Some(self.direct.counters(flow).map_or(counted, |direct| counted + direct))
    }

    /// The same for the core, which reckons what is lost.
    pub fn count(&self, flow: FlowId) -> FlowCount {
        let counters = self.flow_counters(flow).unwrap_or_default();
        // Whoever gives on what has come looks into the table: so it is let go before they are asked.
        let table = self.table.read();
        let [fec, sctp] = [table.fec(flow).map(Ok), table.sctp(flow).map(Err)];
        drop(table);
        let numbered = fec.or(sctp).map(|kept| kept.map_or_else(|sctp| sctp.numbered(), |fec| fec.numbered()));
        let known = self.table.read().order(flow);
        let order = known.unwrap_or_else(|| {
            self.table.write().watch_order(flow);
            Order::default()
        });
        // Counts wrap.
        let FlowCounters { egress_segments, ingress_segments, .. } = counters;
        FlowCount { sent: egress_segments as u32, received: ingress_segments as u32, numbered, order }
    }

    /// Tells the core's thread what was seen of a flow.
    pub fn notice(&self, notice: Notice) {
        if let Err(reason) = self.backlog.notice(notice) {
            self.counting.drop(reason);
        }
    }

    /// Sends an empty DATA of a flow with these flags.
    pub fn send_mark(&self, flow: FlowId, flags: u8) {
        let Some(route) = self.table.read().mark_route(flow) else { return };
        let mut datagram = [0; DATA_HEADER_LEN];
        let (dst_flow, packet_number) = (route.peer_flow, route.packet_number);
        DataRepr { stack: STACK_ENCAP, flags, dst_flow, packet_number, index: 0, count: 1 }.emit(&mut datagram);
        self.send_data(&datagram, DATA_HEADER_LEN, &route.to, false);
    }

    /// Sends a pinhole of a flow, now or with its application's next packet.
    pub fn send_pinhole(&self, flow: FlowId) {
        let found = self.table.read().pinhole(flow);
        if let Some((wire, numbers)) = found {
            self.send_bare(&wire, numbers, false);
        }
    }

    /// Sends a pinhole of a flow that answers none, if its connection's numbers are known.
    pub fn send_knock(&self, flow: FlowId) {
        let found = self.table.read().knock(flow);
        if let Some((wire, numbers)) = found {
            self.send_bare(&wire, numbers, true);
        }
    }

    /// Tells the peer that its direct datagrams arrive, since the application does not.
    pub fn answer_one_way(&self, flow: FlowId) {
        let found = self.table.read().wire(flow);
        if let Some(found) = found.filter(|found| found.app.protocol == UDP && found.wire.sending) {
            self.send_bare(&found.wire, None, false);
        }
    }

    fn send_bare(&self, wire: &Wire, numbers: Option<TcpNumbers>, is_knock: bool) {
        self.counting.pinholes.add(1);
        if let Err(reason) = self.direct.send_pinhole(wire, numbers, is_knock) {
            self.counting.drop(reason);
        }
    }
}
