//! The thread from UDP to `sal0`.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Arc;

use margay_core::reorder::Part;
use margay_core::segment::is_for_all;
use margay_core::{DirectEvent, Direction, DropReason, Stack};
use margay_wire::{DataRepr, FENCE, FlowId, Kind, is_sealed};

use crate::backlog::{Missed, Notice};
use crate::clock;
use crate::detour::{Detours, Place};
use crate::driver::{Core, Shared};
use crate::ending::Arrived;
use crate::fec::Fec;
use crate::packet::UDP;
use crate::sctp::{self, Sctp};
use crate::striped::Stripe;
use crate::table::{IngressRoute, Recipient};
use crate::train::{Assembler, Run, measure, open_run};
use crate::turning::{self, Admission, Turn};
use crate::udp::{RECEIVE_MAX, Received};
use crate::vnet::Vnet;
use crate::wait::readable;

/// Runs until the datapath stops.
pub(crate) fn run<C: Core>(shared: &Shared<C>) -> io::Result<()> {
    let mut buffer = vec![0; RECEIVE_MAX].into_boxed_slice();
    let mut detours = Detours::default();
    while !shared.is_stopping() {
        work_off_due(shared);
        let Some(received) = shared.sockets.data.receive(&mut buffer)? else {
            let [ordering, holes] = [shared.ordering.as_fd(), shared.holes.as_fd()];
            let [overtaking, repeating] = [shared.overtaking.as_fd(), shared.repeating.as_fd()];
            let data = shared.sockets.data.as_fd();
            readable([data, ordering, holes, overtaking, repeating, shared.stop.as_fd()])?;
            continue;
        };
        // What is for all hosts comes to every socket of the port, and the one for signalling takes it.
        if received.local.is_some_and(is_for_all) {
            continue;
        }
        let mut assembler = shared.assembler.lock();
        let (mut rest, stride) = (&mut buffer[..received.len], received.segment);
        while !rest.is_empty() && stride > 0 {
            let (header, len) = measure(rest, stride);
            let (datagrams, behind) = rest.split_at_mut(len);
            rest = behind;
            let Some(header) = header else {
                // The kernel may join a last, shorter datagram of signalling to DATA.
                if datagrams.get(1).is_none_or(|&kind| kind == Kind::Data.into()) {
                    shared.counting.drop(DropReason::Malformed);
                } else {
                    miss(shared, &received, datagrams);
                }
                continue;
            };
            let came = (received.local, received.from);
            match take(shared, &mut assembler, header, (datagrams, stride), came, Some(&mut detours)) {
                Ok(()) => {}
                Err(DropReason::UnknownFlow) => {
                    let places = datagrams.chunks(stride).filter_map(|one| miss(shared, &received, one));
                    if let Some(place) = places.last() {
                        detours.add(header.dst_flow, place, || shared.backlog.datagrams_done());
                    }
                }
                Err(reason) => shared.counting.drop(reason),
            }
        }
    }
    Ok(())
}

/// What has waited for long enough.
fn work_off_due<C: Core>(shared: &Shared<C>) {
    sctp::repeat_due(shared);
    let mut assembler = shared.assembler.lock();
    work_agenda(shared, &mut assembler);
    fill_holes(shared, &mut assembler);
    turning::release_due(shared, &mut assembler);
}

/// Gives a run of chunks, whose first header is `header`, to the application, opened if they are sealed.
/// [`DropReason::UnknownFlow`] when the flow is not cached, or datagrams of it by `detours` are to come first; nothing
/// has changed then. What the core gives on has no detours.
pub(crate) fn take<C: Core>(
    shared: &Shared<C>,
    assembler: &mut Assembler,
    header: DataRepr,
    (datagrams, stride): (&mut [u8], usize),
    came: (Option<IpAddr>, SocketAddr),
    detours: Option<&mut Detours<FlowId>>,
) -> Result<(), DropReason> {
    let mut restored = Vec::new();
    let taken = take_run(shared, assembler, header, (datagrams, stride), came, (detours, Some(&mut restored)));
    for mut datagram in restored {
        shared.counting.fec_repaired.add(1);
        // It has its own header, which was found to be of this flow.
        let Ok(header) = DataRepr::parse(&datagram) else { continue };
        let len = datagram.len();
        if let Err(reason) = take_run(shared, assembler, header, (&mut datagram, len), came, (None, None)) {
            shared.counting.drop(reason);
        }
    }
    taken
}

/// The same. Datagrams that are brought back by what has come, at a place that repairs, are put into `restored`; what
/// was brought back itself brings nothing back, and has not come by its place.
fn take_run<C: Core>(
    shared: &Shared<C>,
    assembler: &mut Assembler,
    header: DataRepr,
    (datagrams, stride): (&mut [u8], usize),
    came: (Option<IpAddr>, SocketAddr),
    (detours, restored): (Option<&mut Detours<FlowId>>, Option<&mut Vec<Vec<u8>>>),
) -> Result<(), DropReason> {
    let route = shared.table.read().ingress(header.dst_flow, came, &header);
    if route == Err(DropReason::OtherStack) && shared.table.read().may_complain_of_stack(header.dst_flow) {
        shared.notice(Notice::StrangeStack(header.dst_flow));
    }
    let route = route?;
    if let Some(detours) = detours.filter(|_| route.to.key.protocol == UDP)
        && (route.is_opening || detours.has(&header.dst_flow, || shared.backlog.datagrams_done()))
    {
        return Err(DropReason::UnknownFlow);
    }
    if let Some(turn) = &route.turn {
        match admit(shared, assembler, turn, header, (&*datagrams, stride), came)? {
            Admitted::Now => {}
            Admitted::Later => return Ok(()),
            Admitted::Anew => return take_run(shared, assembler, header, (datagrams, stride), came, (None, restored)),
        }
    }
    let ended = ended(&header, datagrams.len().div_ceil(stride)).filter(|_| !route.is_repair);
    if let Some((stripe, place)) = &route.stripe
        && restored.is_some()
        && stripe.note_arrival(shared, *place, ended, datagrams.len())
    {
        shared.notice(Notice::Arrivals(header.dst_flow));
    }
    if route.ends_silence {
        shared.notice(Notice::Answer(header.dst_flow));
    }
    if route.is_repair {
        restored.into_iter().for_each(|restored| restore(shared, &route, datagrams.chunks(stride), restored));
        return Ok(());
    }
    let mut keeping = Keeping::new(&route, header, (datagrams, stride), restored);
    let mut take_run = |run: &Run<'_>| {
        match (&route.fec, &route.sctp) {
            (Some(fec), _) => take_of_fec(shared, assembler, run, (fec, &route))?,
            (None, Some(sctp)) => take_of_sctp(shared, assembler, run, (sctp, &route))?,
            (None, None) => accept(shared, assembler, run, &route)?,
        }
        keeping.iter_mut().for_each(|keeping| keeping.keep(run));
        Ok(())
    };
    let Some(seal) = &route.seal else {
        return take_run(&Run::new(header, datagrams, stride));
    };
    open_run(seal, header, (datagrams, stride), |opened| {
        let result = opened.and_then(|run| take_run(&run));
        let Err(reason) = result else { return };
        let is_copy = |(stripe, place): &(Arc<Stripe>, Option<usize>)| {
            reason == DropReason::ReplayedSeal && stripe.note_copy(shared, *place, header.packet_number)
        };
        if route.stripe.as_ref().is_some_and(is_copy) {
            return;
        }
        if matches!(reason, DropReason::OtherEpoch | DropReason::BadSeal) && seal.may_complain(clock::now()) {
            shared.notice(Notice::StrangeSeal(header.dst_flow));
        }
        shared.counting.drop(reason);
    });
    Ok(())
}

/// When a run of a flow whose stack is changed is taken.
enum Admitted {
    /// Now.
    Now,
    /// It is held.
    Later,
    /// The change is over: when the table has been asked again what the run is.
    Anew,
}

fn admit<C: Core>(
    shared: &Shared<C>,
    assembler: &mut Assembler,
    (turn, stack): &(Arc<Turn>, Stack),
    header: DataRepr,
    run: (&[u8], usize),
    came: (Option<IpAddr>, SocketAddr),
) -> Result<Admitted, DropReason> {
    match turn.admit(clock::now(), *stack, header, run, came) {
        Admission::Take => Ok(Admitted::Now),
        Admission::Held(until) => {
            shared.counting.ingress_held.add(1);
            if let Some(until) = until {
                shared.overtaking.add(turn, until);
            }
            Ok(Admitted::Later)
        }
        Admission::Overtaken => {
            turning::release(shared, assembler, turn);
            Ok(Admitted::Now)
        }
        Admission::Over => {
            turning::release(shared, assembler, turn);
            Ok(Admitted::Anew)
        }
        Admission::Late => Err(DropReason::OtherStack),
        Admission::Full => Err(DropReason::Full),
    }
}

/// Repairs have come by a place: what they bring back is put into `restored`.
fn restore<'a, C>(
    shared: &Shared<C>,
    route: &IngressRoute,
    repairs: impl Iterator<Item = &'a [u8]>,
    restored: &mut Vec<Vec<u8>>,
) {
    let Some((stripe, Some(place))) = &route.stripe else { return };
    for repair in repairs {
        match stripe.restore(*place, repair) {
            Ok(found) => restored.extend(found),
            Err(reason) => shared.counting.drop(reason),
        }
    }
}

/// What has come by a place that repairs, as it was on the wire: what of it is taken is kept.
struct Keeping<'a> {
    stripe: &'a Stripe,
    place: usize,
    header: DataRepr,
    datagrams: Vec<u8>,
    stride: usize,
    restored: &'a mut Vec<Vec<u8>>,
}

impl<'a> Keeping<'a> {
    fn new(
        route: &'a IngressRoute,
        header: DataRepr,
        (datagrams, stride): (&[u8], usize),
        restored: Option<&'a mut Vec<Vec<u8>>>,
    ) -> Option<Self> {
        let (stripe, place) = route.stripe.as_ref().and_then(|(stripe, place)| Some((stripe, (*place)?)))?;
        let restored = restored.filter(|_| stripe.takes_fec(place))?;
        Some(Self { stripe, place, header, datagrams: datagrams.to_vec(), stride, restored })
    }

    /// Of these, those of a run that was taken, opened where they were sealed.
    fn keep(&mut self, run: &Run<'_>) {
        let first = usize::from(run.header.index.wrapping_sub(self.header.index)) * self.stride;
        let end = (first + run.chunks() * self.stride).min(self.datagrams.len());
        let Some(datagrams) = self.datagrams.get(first..end) else { return };
        self.restored.extend(self.stripe.keep(self.place, &Run::new(run.header, datagrams, self.stride)));
    }
}

/// Takes datagrams and repairs of a flow that goes by `fec`, opened where they were sealed; or the last one, behind
/// which there is another stack.
fn take_of_fec<C: Core>(
    shared: &Shared<C>,
    assembler: &mut Assembler,
    run: &Run<'_>,
    (fec, route): (&Arc<Fec>, &IngressRoute),
) -> Result<(), DropReason> {
    if run.header.flags & FENCE == 0 {
        fec.receive(shared, run, |run| give_or_count(shared, assembler, run, &route.to));
        return Ok(());
    }
    let change = run.turns().ok_or(DropReason::Malformed)?;
    let is_known = route.turn.as_ref().is_some_and(|(turn, _)| turn.change == change);
    if is_known {
        fec.finish(shared, |run| give_or_count(shared, assembler, run, &route.to));
    }
    accept(shared, assembler, run, route)
}

/// Takes packets of a flow that goes by `sctp`, opened where they were sealed; or the last one, behind which there is
/// another stack, and what is lost of this one.
fn take_of_sctp<C: Core>(
    shared: &Shared<C>,
    assembler: &mut Assembler,
    run: &Run<'_>,
    (sctp, route): (&Arc<Sctp>, &IngressRoute),
) -> Result<(), DropReason> {
    if run.header.flags & FENCE == 0 {
        sctp.receive(shared, run, |run| give_or_count(shared, assembler, run, &route.to));
        return Ok(());
    }
    run.turns().ok_or(DropReason::Malformed)?;
    accept(shared, assembler, run, route)
}

/// The number of the train that so many chunks from this one on end, if they do.
fn ended(header: &DataRepr, chunks: usize) -> Option<u32> {
    (usize::from(header.index) + chunks >= usize::from(header.count)).then_some(header.packet_number)
}

/// Gives a run of chunks to the application.
fn accept<C: Core>(
    shared: &Shared<C>,
    assembler: &mut Assembler,
    run: &Run<'_>,
    route: &IngressRoute,
) -> Result<(), DropReason> {
    let flow = run.header.dst_flow;
    if let Some(change) = run.turns() {
        if let Some((turn, _)) = route.turn.as_ref().filter(|(turn, _)| turn.fence(change)) {
            turning::release(shared, assembler, turn);
        }
        return Ok(());
    }
    if route.seal.is_some() || route.by_plain_place {
        // Nothing of a sealed flow is about a direct path.
        return deliver(shared, assembler, run, route);
    }
    if run.header.flags & FENCE != 0 {
        // Everything before it has been written to `sal0`: this thread takes them in order.
        shared.table.read().note_fence(flow, run.header.packet_number);
        shared.notice(Notice::Direct(flow, DirectEvent::PeerDirect));
    } else if route.is_back {
        shared.notice(Notice::Direct(flow, DirectEvent::PeerBack));
    }
    if run.is_mark() && route.stripe.is_none() {
        return Ok(());
    }
    if route.is_sending && run.opens() {
        // The peer says SYN-ACK again: the acknowledgement that would open its connection went direct, and nowhere. It
        // waits for the core to take the flow back, and to have the application say it once more: TCP does that only
        // twice a second.
        shared.notice(Notice::Direct(flow, DirectEvent::Stalled));
        return Ok(());
    }
    deliver(shared, assembler, run, route)
}

fn deliver<C: Core>(
    shared: &Shared<C>,
    assembler: &mut Assembler,
    run: &Run<'_>,
    route: &IngressRoute,
) -> Result<(), DropReason> {
    if route.gives_up {
        return give_up(shared, assembler, run, &route.to);
    }
    let Some((stripe, place)) = &route.stripe else { return give(shared, assembler, run, &route.to) };
    let header = &run.header;
    let count = u32::from(header.count);
    let step = if is_sealed(header.stack) || route.by_plain_place { count } else { 1 };
    let part = Part { number: header.packet_number, step, chunks: run.chunks() as u32, count };
    stripe.in_order(shared, *place, part, run, |run| give_or_count(shared, assembler, run, &route.to));
    Ok(())
}

fn give_or_count<C: Core>(shared: &Shared<C>, assembler: &mut Assembler, run: &Run<'_>, to: &Recipient) {
    if run.is_mark() {
        return;
    }
    if let Err(reason) = give(shared, assembler, run, to) {
        shared.counting.drop(reason);
    }
}

/// Flows that go by `fec`, of which something has waited for long enough.
fn fill_holes<C: Core>(shared: &Shared<C>, assembler: &mut Assembler) {
    for fec in shared.holes.take(clock::now()) {
        // Of a flow that is no more, nothing is given.
        let to = shared.table.read().recipient(fec.flow);
        fec.work(shared, |run| {
            if let Some(to) = &to {
                give_or_count(shared, assembler, run, to);
            }
        });
    }
}

/// Striped flows of which something has waited for long enough, or whose peers are to be told of what has come.
fn work_agenda<C: Core>(shared: &Shared<C>, assembler: &mut Assembler) {
    let now = clock::now();
    for stripe in shared.ordering.take(now) {
        // Of a flow that is no more, nothing is given.
        let to = shared.table.read().recipient(stripe.flow);
        let (tells, next) = stripe.work(now, |run| {
            if let Some(to) = &to {
                give_or_count(shared, assembler, run, to);
            }
        });
        if tells {
            shared.notice(Notice::Arrivals(stripe.flow));
        }
        if let Some(next) = next {
            shared.ordering.add(&stripe, next);
        }
    }
}

fn give<C: Core>(
    shared: &Shared<C>,
    assembler: &mut Assembler,
    run: &Run<'_>,
    to: &Recipient,
) -> Result<(), DropReason> {
    let flow: FlowId = run.header.dst_flow;
    shared.counting.ingress_runs.add(1);
    let delivered = assembler.accept(run, to, clock::now, |parts| shared.tun.write(parts));
    shared.counting.drop_many(DropReason::Incomplete, assembler.take_incomplete());
    let delivered = delivered?;
    if delivered.segments > 0 {
        shared.counting.ingress_bytes.add(delivered.bytes as u64);
        let table = shared.table.read();
        let wants_pinhole = table.count_ingress(flow, delivered.bytes, delivered.segments);
        table.note_order(&run.header);
        let arrived = Arrived::of_train(&delivered);
        if let Some(arrived) = &arrived {
            table.note_train(flow, arrived);
        }
        drop(table);
        if wants_pinhole {
            shared.send_pinhole(flow);
        }
        if let Some(ending) = arrived.filter(Arrived::may_end) {
            let caches = shared.caches();
            shared.report(flow, Direction::Ingress, caches.take_ending(flow, &ending, caches.known_of(flow)));
        }
    }
    Ok(())
}

/// Gives what has come of a flow to the core instead.
fn give_up<C: Core>(
    shared: &Shared<C>,
    assembler: &mut Assembler,
    run: &Run<'_>,
    to: &Recipient,
) -> Result<(), DropReason> {
    let of_peer = Some(run.header.dst_flow);
    let mut refused = None;
    let delivered = assembler.accept(run, to, clock::now, |parts| {
        let whole: Vec<u8> = parts.iter().flat_map(|part| part.iter().copied()).collect();
        // Each is written with its header, as to `sal0`.
        if let Some((header, packet)) = whole.split_first_chunk()
            && let Some(vnet) = Vnet::parse(header)
        {
            refused = shared.backlog.packet(Missed { vnet, packet: packet.to_vec(), of_peer }).err();
        }
        Ok(())
    });
    shared.counting.drop_many(DropReason::Incomplete, assembler.take_incomplete());
    delivered?;
    refused.map_or(Ok(()), Err)
}

/// Hands a datagram to the core. Gives its place there.
fn miss<C>(shared: &Shared<C>, received: &Received, datagram: &[u8]) -> Option<Place> {
    shared.counting.ingress_misses.add(1);
    let placed = shared.backlog.datagram(received.local, received.from, datagram);
    placed.inspect_err(|reason| shared.counting.drop(*reason)).ok()
}
