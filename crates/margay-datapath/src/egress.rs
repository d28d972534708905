//! The thread from `sal0` to UDP.

use std::io;
use std::os::fd::AsFd;

use std::sync::Arc;

use margay_core::{Direction, DropReason};
use margay_wire::{FENCE, FlowId, TrainRepr};

use crate::backlog::{Missed, Notice};
use crate::clock;
use crate::detour::{Detours, Place};
use crate::driver::{Core, Shared};
use crate::fec;
use crate::fragment::Reassembler;
use crate::lifting::Lifting;
use crate::outbox::{self, Loaded, Outbox};
use crate::packet::{self, ACK, FIN, FlowKey, Packet, RST, SYN, TCP, Transport, UDP};
use crate::repairing::REPAIR_MORE;
use crate::striped::{self, Stripe};
use crate::table::{Destination, EgressRoute, Origin, TcpNumbers};
use crate::vnet::{Gso, Vnet};
use crate::wait::readable;

/// Reads in one go; then the lock is let go for a moment.
const BURST: usize = 64;
/// Packets that missed the cache wait until `sal0` is empty, but not more than so many.
const MISSED_MAX: usize = 64;

/// The place of what has not been handed over yet.
const HERE: Place = Place::MAX;

/// The way from `sal0` to UDP. Whoever holds its lock reads `sal0`: packets stay in order.
pub(crate) struct EgressSide {
    outbox: Outbox,
    reassembler: Reassembler,
    reads: u32,
    missed: Vec<Missed>,
    /// Of datagrams that missed the cache: what comes behind them follows.
    detours: Detours<FlowKey>,
    lifting: Lifting,
}

/// Runs until the datapath stops; an error means that the interface is gone.
pub(crate) fn run<C: Core>(shared: &Shared<C>) -> io::Result<()> {
    while !shared.is_stopping() {
        let is_drained = shared.egress.lock().work(shared, BURST)?;
        striped::send_due(shared);
        fec::close_due(shared);
        if is_drained {
            let turns = shared.turns.as_fd();
            let [tun, fences] = [shared.tun.as_fd(), shared.direct.fences.as_fd()];
            let [lifting, worked_off] = [shared.direct.lifting.as_fd(), shared.backlog.reached()];
            let [pacing, block_ends] = [shared.pacing.as_fd(), shared.block_ends.as_fd()];
            let [worked_off, ..] =
                readable([worked_off, tun, fences, lifting, turns, pacing, block_ends, shared.stop.as_fd()])?;
            if worked_off {
                // Whoever still waits for the core says so again.
                shared.backlog.forget_awaited();
            }
        }
    }
    Ok(())
}

impl EgressSide {
    pub fn new(datagram_max: u16) -> Self {
        Self {
            outbox: Outbox::new(datagram_max),
            reassembler: Reassembler::default(),
            reads: 0,
            missed: Vec::new(),
            detours: Detours::default(),
            lifting: Lifting::default(),
        }
    }

    /// Carries what lies in `sal0`, at most `burst` packets. True if nothing is left.
    pub fn work<C: Core>(&mut self, shared: &Shared<C>, burst: usize) -> io::Result<bool> {
        for _ in 0..burst {
            for flow in shared.turns.take() {
                // After all that was sent of it, and before all that will be.
                self.outbox.flush(&mut sender(shared, true));
                shared.turn(flow);
            }
            let read = self.outbox.read(&shared.tun);
            let is_drained = matches!(read, Ok(None));
            let fences = shared.direct.due_fences(&mut self.reads, is_drained);
            match read {
                Ok(Some(loaded)) => self.take(shared, loaded),
                Ok(None) => {
                    self.outbox.flush(&mut sender(shared, true));
                    self.hand_over(shared);
                }
                Err(error) if error.kind() == io::ErrorKind::InvalidData => shared.counting.drop(DropReason::Protocol),
                Err(error) => return Err(error),
            }
            let is_lifting = self.lift(shared, is_drained);
            if !fences.is_empty() {
                self.outbox.flush(&mut sender(shared, true));
                fences.into_iter().for_each(|flow| shared.send_mark(flow, FENCE));
            } else if is_drained && !is_lifting {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Goes on with flows that the kernel is to take. True if something is left to do at once.
    fn lift<C: Core>(&mut self, shared: &Shared<C>, is_drained: bool) -> bool {
        if !self.lifting.has_read(shared, is_drained) {
            return false;
        }
        self.hand_over(shared);
        self.lifting.ask(shared)
    }

    fn take<C: Core>(&mut self, shared: &Shared<C>, loaded: Loaded) {
        match packet::parse(self.outbox.head(&loaded), loaded.len) {
            Ok(Packet::Transport(found)) => {
                let is_syn = found.flags & (SYN | ACK) == SYN;
                let is_datagram = found.key.protocol == UDP;
                let is_behind = is_datagram && self.detours.has(&found.key, || shared.backlog.packets_done());
                let is_unknown = |result| result == Err(DropReason::UnknownFlow);
                if is_syn || is_behind || is_unknown(carry(shared, &mut self.outbox, loaded, &found, By::Tuple(true))) {
                    if is_datagram {
                        self.detours.add(found.key, HERE, || shared.backlog.packets_done());
                    }
                    self.miss(shared, loaded.vnet, found.total_len);
                }
            }
            Ok(Packet::Fragment) => {
                shared.counting.fragments.add(1);
                let whole = self.reassembler.accept(self.outbox.whole(&loaded), clock::now());
                shared.counting.drop_many(DropReason::Incomplete, self.reassembler.take_incomplete());
                match whole {
                    Ok(Some(packet)) => {
                        // A reassembled packet is no fragment, so this goes no deeper.
                        if let Some(loaded) = self.outbox.load(Vnet::default(), &packet) {
                            self.take(shared, loaded);
                        }
                    }
                    Ok(None) => {}
                    Err(reason) => shared.counting.drop(reason),
                }
            }
            Ok(Packet::Other(len)) => self.miss(shared, loaded.vnet, len),
            Err(packet::Malformed) => shared.counting.drop(DropReason::Malformed),
        }
    }

    fn miss<C: Core>(&mut self, shared: &Shared<C>, vnet: Vnet, len: usize) {
        shared.counting.egress_misses.add(1);
        let packet = self.outbox.whole(&Loaded { vnet, len }).to_vec();
        self.missed.push(Missed { vnet, packet, of_peer: None });
        if self.missed.len() >= MISSED_MAX {
            self.hand_over(shared);
        }
    }

    /// Gives the core what missed the cache: at once, where nobody else is at it and nothing of earlier waits for it.
    /// To wake its thread would cost more than all that it does for a connection.
    fn hand_over<C: Core>(&mut self, shared: &Shared<C>) {
        if self.missed.is_empty() {
            return;
        }
        let core = if self.missed.len() < MISSED_MAX { shared.core.try_lock() } else { None };
        match core.filter(|_| shared.backlog.is_idle()) {
            Some(mut core) => {
                self.missed.drain(..).for_each(|missed| core.app_packet(shared, missed));
                self.detours.place(HERE, 0);
            }
            None => {
                let mut last = 0;
                for missed in self.missed.drain(..) {
                    match shared.backlog.packet(missed) {
                        Ok(place) => last = place,
                        Err(reason) => shared.counting.drop(reason),
                    }
                }
                self.detours.place(HERE, last);
            }
        }
    }
}

/// What an outbox sends with.
pub(crate) fn sender<C>(shared: &Shared<C>, patient: bool) -> impl FnMut(&[u8], usize, &Destination) {
    move |datagrams: &[u8], segment: usize, to: &Destination| shared.send_data(datagrams, segment, to, patient)
}

/// Who has a packet carried.
#[derive(Clone, Copy, Debug)]
pub(crate) enum By {
    /// The flow that its five-tuple leads to; whether that may wait for the network, which the core must not.
    Tuple(bool),
    /// The core, by this flow.
    Flow(FlowId),
}

/// Carries a packet whose flow is cached. [`DropReason::UnknownFlow`] when it is not; other reasons are counted.
pub(crate) fn carry<C: Core>(
    shared: &Shared<C>,
    outbox: &mut Outbox,
    loaded: Loaded,
    found: &Transport,
    by: By,
) -> Result<(), DropReason> {
    let patient = matches!(by, By::Tuple(true));
    let Some(train) = outbox::train_header(&loaded.vnet, found) else {
        shared.counting.drop(DropReason::Malformed);
        return Err(DropReason::Malformed);
    };
    let bytes = found.payload_len();
    let segments = match loaded.vnet.gso {
        Gso::None => 1,
        _ => bytes.div_ceil(usize::from(loaded.vnet.segment_size)).max(1),
    };
    let numbers = numbers(outbox.head(&loaded), found);
    let table = shared.table.read();
    let route = match by {
        By::Tuple(false) => table.egress(&found.key, bytes, segments, numbers, Origin::Core),
        By::Tuple(true) => table.egress(&found.key, bytes, segments, numbers, Origin::of(found)),
        By::Flow(flow) => table.egress_by(flow, bytes, segments, numbers),
    };
    drop(table);
    let route = route.ok_or(DropReason::UnknownFlow)?;
    if let Some(delta) = &route.delta {
        outbox.translate(&loaded, delta);
    }
    if route.is_beside {
        shared.notice(Notice::Beside(route.flow));
    }
    if let Some(unanswered) = route.silence {
        shared.notice(Notice::Silence(route.flow, unanswered));
    }
    shared.counting.egress_packets.add(1);
    shared.counting.egress_bytes.add(bytes as u64);
    let before = outbox.relaid();
    let loaded = Loaded { len: found.total_len, ..loaded };
    let carried = match (route.stripe.clone(), &route.fec, &route.sctp) {
        (Some(stripe), ..) => carry_striped(shared, outbox, &loaded, (&train, route.clone()), &stripe, patient),
        (None, None, None) => outbox.carry(&loaded, &train, &route, &mut sender(shared, patient)),
        (None, ..) => carry_by_engine(shared, outbox, &loaded, (&train, &route), patient),
    };
    if let Err(reason) = carried {
        shared.counting.drop(reason);
        return Err(reason);
    }
    shared.counting.relaid.add(outbox.relaid() - before);
    if found.flags & (FIN | RST | SYN) != 0 {
        outbox.flush(&mut sender(shared, patient));
        // The core knows of what it has parted itself.
        if matches!(by, By::Tuple(_)) {
            shared.report(route.flow, Direction::Egress, found.flags);
        }
    }
    if route.wants_pinhole {
        shared.send_pinhole(route.flow);
    }
    // What it says after a FIN acknowledges that each time.
    if route.takes_end && shared.endings.are_waiting() {
        shared.notice(Notice::Acknowledged);
    }
    Ok(())
}

/// Carries a packet of a striped flow, by the place that has its turn.
fn carry_striped<C: Core>(
    shared: &Shared<C>,
    outbox: &mut Outbox,
    loaded: &Loaded,
    (train, mut route): (&TrainRepr, EgressRoute),
    stripe: &Arc<Stripe>,
    patient: bool,
) -> Result<(), DropReason> {
    let Some((way, copy)) = stripe.choose(shared, loaded.len)? else {
        return outbox.carry(loaded, train, &route, &mut sender(shared, patient));
    };
    route.to = way.to;
    // It is cut once.
    let datagram_max = copy.map_or(u16::MAX, |copy| copy.to.datagram_max);
    route.to.datagram_max = route.to.datagram_max.min(datagram_max);
    if way.is_fec {
        route.to.datagram_max = route.to.datagram_max.saturating_sub(REPAIR_MORE);
    }
    if way.is_plain
        && let Some(seal) = route.seal.take()
    {
        route.packet_number = seal.take_numbers(outbox::chunks(loaded.len, route.to.datagram_max));
    }
    // Each train goes by itself: small packets that wait for others would all go by one place, at one time.
    outbox.send_earlier(&mut sender(shared, patient));
    let mut send = |datagrams: &[u8], segment: usize, _: &Destination| {
        for way in [Some(way), copy].into_iter().flatten() {
            stripe.send(shared, &way, datagrams, segment);
        }
    };
    outbox.carry(loaded, train, &route, &mut send)?;
    outbox.flush(&mut send);
    Ok(())
}

/// Carries a packet of a flow by `fec` or `sctp`: its chunks go to the engine that numbers them, and are shorter by
/// what that adds.
fn carry_by_engine<C: Core>(
    shared: &Shared<C>,
    outbox: &mut Outbox,
    loaded: &Loaded,
    (train, route): (&TrainRepr, &EgressRoute),
    patient: bool,
) -> Result<(), DropReason> {
    outbox.send_earlier(&mut sender(shared, patient));
    let narrower = route.fec.as_ref().map(|fec| fec.narrower_bytes());
    let narrower = narrower.or(route.sctp.as_ref().map(|sctp| sctp.narrower_bytes())).unwrap_or_default();
    let datagram_max = route.to.datagram_max.saturating_sub(narrower);
    // The engine seals datagrams after it has numbered them.
    let narrow = EgressRoute { to: Destination { datagram_max, ..route.to }, seal: None, ..route.clone() };
    let mut send = |datagrams: &[u8], segment: usize, _: &Destination| {
        if let Some(fec) = &route.fec {
            fec.send(shared, (datagrams, segment), route, patient);
        } else if let Some(sctp) = &route.sctp {
            sctp.send(shared, (datagrams, segment), route, patient);
        }
    };
    outbox.carry(loaded, train, &narrow, &mut send)?;
    outbox.flush(&mut send);
    Ok(())
}

/// What a TCP segment says of its connection.
pub(crate) fn numbers(head: &[u8], found: &Transport) -> Option<TcpNumbers> {
    // A SYN acknowledges nothing.
    if found.key.protocol != TCP || found.flags & ACK == 0 {
        return None;
    }
    let tcp = head.get(found.ip_len..)?;
    let number = |at: usize| Some(u32::from_be_bytes(tcp.get(at..at + 4)?.try_into().ok()?));
    let sequence = number(4)?.wrapping_add(found.payload_len() as u32);
    let end = (found.flags & FIN != 0).then(|| sequence.wrapping_add(1));
    Some(TcpNumbers { sequence, acknowledgement: number(8)?, end })
}
