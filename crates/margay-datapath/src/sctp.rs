//! Flows that go by `sctp` (docs/decisions/0099): what is sent of them is sent again while it is lost, and what comes
//! is given on at once, each datagram one time. Chunks of trains are what is repeated: so a packet of any size can go
//! this way.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use margay_core::loss::Numbered;
use margay_core::time::Instant;
use margay_core::{DropReason, Stack};
use margay_stack::sctp::{Arrivals, Endpoint, Given, LINGER};
use margay_wire::sctp::I_DATA_HEADER_LEN;
use margay_wire::{DATA_HEADER_LEN, DataRepr, FlowId, PLACE_LEN, PlaceRepr, SEAL_TAG_LEN, STACK_SCTP};
use parking_lot::Mutex;

use crate::clock;
use crate::driver::Shared;
use crate::table::EgressRoute;
use crate::train::Run;
use crate::udp::{SEGMENTS_MAX, SEND_MAX};

/// By so many bytes a chunk of such a flow is shorter than the path's datagrams may be: the head of its frame, its
/// place, and what makes the frame's length a multiple of four.
const NARROWER_BYTES: usize = I_DATA_HEADER_LEN + PLACE_LEN + 3;

/// Packets for one send: all have the same length, the last may be shorter. In front of each is room for a header, and
/// behind it for a tag where it is to be sealed.
struct Batch {
    bytes: Vec<u8>,
    segment: usize,
}

/// What is sent in order.
struct Batches {
    batches: Vec<Batch>,
    tail: usize,
}

impl Batches {
    const fn new(stack: Stack) -> Self {
        Self { batches: Vec::new(), tail: if stack.is_sealed() { SEAL_TAG_LEN } else { 0 } }
    }

    fn add(&mut self, packet: &[u8]) {
        let len = DATA_HEADER_LEN + packet.len() + self.tail;
        let fits = |batch: &&mut Batch| {
            let is_even = batch.bytes.len().is_multiple_of(batch.segment);
            let has_room = batch.bytes.len() + len <= SEND_MAX && batch.bytes.len() / batch.segment < SEGMENTS_MAX;
            is_even && has_room && len <= batch.segment
        };
        if self.batches.last_mut().filter(fits).is_none() {
            self.batches.push(Batch { bytes: Vec::new(), segment: len });
        }
        let Some(batch) = self.batches.last_mut() else { return };
        let at = batch.bytes.len();
        batch.bytes.resize(at + DATA_HEADER_LEN, 0);
        batch.bytes.extend_from_slice(packet);
        batch.bytes.resize(at + len, 0);
    }

    /// Writes headers, where the seal does not: number and place of a packet together are its own number.
    fn stamp(&mut self, peer_flow: FlowId, next: &mut u32) {
        for Batch { bytes, segment } in &mut self.batches {
            // A send has far fewer.
            let count = bytes.len().div_ceil(*segment) as u16;
            for (index, datagram) in (0..).zip(bytes.chunks_mut(*segment)) {
                let packet_number = *next;
                DataRepr { stack: STACK_SCTP, flags: 0, dst_flow: peer_flow, packet_number, index, count }
                    .emit(datagram);
            }
            *next = next.wrapping_add(count.into());
        }
    }

    fn bytes(&self) -> u64 {
        self.batches.iter().map(|batch| batch.bytes.len() as u64).sum()
    }

    /// Sends everything; nothing plain of what is to be sealed.
    fn send<C>(self, shared: &Shared<C>, route: &EgressRoute, patient: bool) {
        let is_sealed = self.tail > 0;
        for Batch { mut bytes, segment } in self.batches {
            let sealed = match (&route.seal, is_sealed) {
                (Some(seal), true) => seal.seal_sctp(route.peer_flow, &mut bytes, segment),
                (None, true) => Err(DropReason::Protocol),
                (_, false) => Ok(()),
            };
            match sealed {
                Ok(()) => shared.send_data(&bytes, segment, &route.to, patient),
                Err(reason) => shared.counting.drop(reason),
            }
        }
    }
}

struct State {
    endpoint: Endpoint,
    /// The number of the next packet that goes as it is.
    next_number: u32,
    /// The flow is looked at again then.
    armed: Option<Instant>,
    /// A chunk behind its header.
    scratch: Vec<u8>,
}

/// One flow, both ways, from one change on. It outlives the flow's entry.
pub struct Sctp {
    /// This host's number of the flow.
    pub flow: FlowId,
    /// By which stack: `sctp`, or the same under a seal.
    pub stack: Stack,
    /// The change by which it came to be so.
    change: u32,
    /// The flow has turned to another stack, and until then what is under way by this one is repeated and acknowledged,
    /// in microseconds; zero while it has not. The table asks while it is locked.
    left_until_us: AtomicU64,
    state: Mutex<State>,
}

impl std::fmt::Debug for Sctp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sctp").field("flow", &self.flow).field("change", &self.change).finish_non_exhaustive()
    }
}

impl PartialEq for Sctp {
    fn eq(&self, other: &Self) -> bool {
        core::ptr::eq(self, other)
    }
}

impl Eq for Sctp {}

impl Sctp {
    /// A flow that goes by a stack that repeats from this change on.
    pub fn new(flow: FlowId, stack: Stack, change: u32) -> Self {
        let endpoint = Endpoint::new(change);
        let state = State { endpoint, next_number: 0, armed: None, scratch: Vec::new() };
        Self { flow, stack, change, left_until_us: AtomicU64::new(0), state: Mutex::new(state) }
    }

    /// By so many bytes a chunk is shorter than the path's datagrams may be.
    pub const fn narrower_bytes(&self) -> u16 {
        (NARROWER_BYTES + if self.stack.is_sealed() { SEAL_TAG_LEN } else { 0 }) as u16
    }

    /// What has come by numbers.
    pub fn numbered(&self) -> Numbered {
        let Arrivals { expected, received, gaps, .. } = self.state.lock().endpoint.arrivals();
        Numbered { change: self.change, expected, received, gaps }
    }

    /// The flow turns to another stack. What is under way is repeated for a while; but nothing goes as it is of a flow
    /// that is sealed from here on.
    pub fn leave(&self, now: Instant, to: Stack) {
        let is_exposed = to.is_sealed() && !self.stack.is_sealed();
        let until = now + if is_exposed { Duration::ZERO } else { LINGER };
        self.left_until_us.store(until.micros().max(1), Ordering::Relaxed);
    }

    fn left_until(&self) -> Option<Instant> {
        let until = self.left_until_us.load(Ordering::Relaxed);
        (until > 0).then(|| Instant::from_micros(until))
    }

    /// Whether the flow has turned to another stack.
    pub fn is_left(&self) -> bool {
        self.left_until().is_some()
    }

    /// Whether something that is under way may still come or be repeated, though the flow has turned.
    pub fn is_lingering(&self, now: Instant) -> bool {
        self.left_until().is_some_and(|until| now < until)
    }

    /// Whether nothing is owed any more.
    fn is_over(&self, now: Instant) -> bool {
        self.left_until().is_some_and(|until| until <= now)
    }

    /// Sends chunks, of `segment` bytes each with their headers; the last may be shorter.
    pub(crate) fn send<C>(
        self: &Arc<Self>,
        shared: &Shared<C>,
        (datagrams, segment): (&[u8], usize),
        route: &EgressRoute,
        patient: bool,
    ) {
        let now = clock::now();
        self.work_with(shared, Some(route), patient, |state| {
            for datagram in datagrams.chunks(segment) {
                // What is sent here has been stamped.
                let Ok(DataRepr { packet_number, index, count, .. }) = DataRepr::parse(datagram) else { continue };
                let State { endpoint, scratch, .. } = &mut *state;
                scratch.clear();
                scratch.extend_from_slice(&PlaceRepr { index, count }.emit());
                scratch.extend_from_slice(&datagram[DATA_HEADER_LEN..]);
                if endpoint.send(now, packet_number, scratch).is_err() {
                    shared.counting.drop(DropReason::Full);
                }
            }
        });
    }

    /// Takes packets that follow each other in one receive, opened where they were sealed. Calls `give` with chunks.
    pub(crate) fn receive<C>(self: &Arc<Self>, shared: &Shared<C>, run: &Run<'_>, mut give: impl FnMut(&Run<'_>)) {
        let now = clock::now();
        let first = run.header.packet_number.wrapping_add(run.header.index.into());
        self.work_with(shared, None, false, |state| {
            let State { endpoint, scratch, .. } = &mut *state;
            for (number, packet) in (0..).map(|at| first.wrapping_add(at)).zip(run.chunk_bytes()) {
                let give = |given: Given<'_>| give_chunk((self.flow, self.stack), scratch, given, &mut give);
                if endpoint.receive(now, number, packet, give).is_err() {
                    shared.counting.drop(DropReason::Malformed);
                }
            }
        });
    }

    /// Sends what is due. False if the flow has left this stack for so long that nothing is owed any more.
    fn work<C>(self: &Arc<Self>, shared: &Shared<C>) -> bool {
        self.state.lock().armed = None;
        let is_over = self.is_over(clock::now());
        if !is_over {
            self.work_with(shared, None, false, |_| ());
        }
        !is_over
    }

    /// Acts, sends what is due then, and sees to it that the flow is looked at in time. Without `route` the flow's own
    /// is asked for.
    fn work_with<C>(
        self: &Arc<Self>,
        shared: &Shared<C>,
        route: Option<&EgressRoute>,
        patient: bool,
        act: impl FnOnce(&mut State),
    ) {
        let own = if route.is_none() { shared.table.read().route_by(self.flow, self.stack) } else { None };
        let route = route.or(own.as_ref()).filter(|_| !self.is_over(clock::now()));
        let mut batches = Batches::new(self.stack);
        let mut state = self.state.lock();
        let now = clock::now();
        let before = state.endpoint.sent();
        act(&mut state);
        if let Some(route) = route {
            let room = usize::from(route.to.datagram_max).saturating_sub(DATA_HEADER_LEN + batches.tail);
            state.endpoint.poll(now, room, |packet| batches.add(packet));
            if !self.stack.is_sealed() {
                batches.stamp(route.peer_flow, &mut state.next_number);
            }
        }
        let sent = state.endpoint.sent();
        // A flow that must not send now is looked at when it may have lost what it has.
        let deadline = match route {
            Some(_) => state.endpoint.next_deadline(),
            None => state.endpoint.next_deadline().map(|due| due.max(now + LINGER)),
        };
        let due = deadline.into_iter().chain(self.left_until()).min();
        let due = due.filter(|due| state.armed.is_none_or(|armed| *due < armed));
        state.armed = due.or(state.armed);
        drop(state);
        shared.counting.sctp_bytes.add(batches.bytes());
        shared.counting.sctp_repeated.add(sent.repeated.wrapping_sub(before.repeated).into());
        shared.counting.sctp_given_up.add(sent.given_up.wrapping_sub(before.given_up).into());
        if let Some(route) = route {
            batches.send(shared, route, patient);
        }
        if let Some(due) = due {
            shared.repeating.add(self, due);
        }
    }
}

/// Gives a datagram on as the chunk of a train.
fn give_chunk(
    (flow, stack): (FlowId, Stack),
    scratch: &mut Vec<u8>,
    given: Given<'_>,
    give: &mut impl FnMut(&Run<'_>),
) {
    // A datagram that has no place is nobody's: the peer sends none, and whoever forges one gains nothing by it.
    let Ok((PlaceRepr { index, count }, chunk)) = PlaceRepr::parse(given.payload) else { return };
    let header = DataRepr { stack: STACK_SCTP, flags: 0, dst_flow: flow, packet_number: given.label, index, count };
    scratch.clear();
    scratch.resize(DATA_HEADER_LEN, 0);
    header.emit(scratch);
    scratch.extend_from_slice(chunk);
    give(&Run::delivered(header, scratch, stack));
}

/// Sends what is due of flows that go by `sctp`, and forgets those that have left it long ago.
pub(crate) fn repeat_due<C>(shared: &Shared<C>) {
    for sctp in shared.repeating.take(clock::now()) {
        if !sctp.work(shared) {
            shared.table.write().forget_sctp(&sctp);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_go_in_as_few_sends_as_there_are_lengths_and_each_has_a_number() {
        let mut batches = Batches::new(Stack::Sctp);
        for packet in [&b"abcd"[..], b"efgh", b"ij", b"klmn"] {
            batches.add(packet);
        }
        let mut next = u32::MAX;
        batches.stamp(FlowId(7), &mut next);
        let sends: Vec<_> = batches.batches.iter().map(|batch| (batch.segment, batch.bytes.len())).collect();
        assert_eq!((sends, next), (vec![(20, 58), (20, 20)], 3), "a shorter one ends a send");
        let second = [1, 32, 8, 0, 0, 0, 0, 7, 255, 255, 255, 255, 0, 1, 0, 3, b'e', b'f', b'g', b'h'];
        assert_eq!(batches.batches[0].bytes[20..40], second);
        let header = DataRepr::parse(&batches.batches[1].bytes).expect("DATA");
        assert_eq!((header.packet_number, header.index, header.count), (2, 0, 1));
        let mut many = Batches::new(Stack::Sctp);
        (0..200).for_each(|_| many.add(&[0; 1400]));
        let fits = |batch: &Batch| batch.bytes.len() <= SEND_MAX && batch.bytes.len() / batch.segment <= SEGMENTS_MAX;
        assert!(many.batches.iter().all(fits));
    }

    #[test]
    fn what_will_be_sealed_has_room_for_its_tag() {
        let mut batches = Batches::new(Stack::SecureSctp);
        batches.add(b"abcd");
        let len = DATA_HEADER_LEN + 4 + SEAL_TAG_LEN;
        assert_eq!((batches.batches[0].segment, batches.batches[0].bytes.len()), (len, len));
        assert_eq!(batches.batches[0].bytes[DATA_HEADER_LEN..][..5], *b"abcd\0");
        let narrower = |stack| Sctp::new(FlowId(7), stack, 1).narrower_bytes();
        assert_eq!([narrower(Stack::Sctp), narrower(Stack::SecureSctp)], [27, 43]);
    }

    #[test]
    fn what_is_given_is_a_chunk_of_its_train() {
        let mut scratch = Vec::new();
        let mut given = Vec::new();
        let mut give = |run: &Run<'_>| given.push((run.header, run.datagrams().map(<[u8]>::to_vec).next()));
        for payload in [&[0, 2, 0, 3, b'x', b'y'][..], &[0, 3, 0, 3, b'x'], &[0, 3]] {
            give_chunk((FlowId(7), Stack::Sctp), &mut scratch, Given { label: 9, payload }, &mut give);
        }
        let header =
            DataRepr { stack: STACK_SCTP, flags: 0, dst_flow: FlowId(7), packet_number: 9, index: 2, count: 3 };
        let mut datagram = vec![0; DATA_HEADER_LEN];
        header.emit(&mut datagram);
        datagram.extend_from_slice(b"xy");
        assert_eq!(given, [(header, Some(datagram))], "the other two have no place");
    }
}
