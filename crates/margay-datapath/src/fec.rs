//! Flows that go by `fec` (docs/decisions/0081): what is sent of them gets numbers and repairs, and what comes is put
//! in order and repaired. Chunks of trains are what is numbered: so a packet of any size can go this way.

use std::sync::Arc;

use margay_core::loss::{Loss, Numbered};
use margay_core::time::Instant;
use margay_core::{DropReason, Stack};
use margay_stack::{Arrivals, Decoder, Encoder, Given, Refused, Repair, RepairOf, first_number};
use margay_wire::{
    BLOCK_MAX, DATA_HEADER_LEN, DataRepr, FlowId, PLACE_LEN, PlaceRepr, REPAIR, REPAIR_HEADER_LEN, RepairRepr,
    SEAL_TAG_LEN, SEALED_FEC_LEN, STACK_FEC, SYMBOL_HEAD_LEN, SealedFecRepr,
};
use parking_lot::Mutex;

use crate::clock;
use crate::driver::Shared;
use crate::held_bytes::HeldAccount;
use crate::table::EgressRoute;
use crate::train::Run;
use crate::udp::{SEGMENTS_MAX, SEND_MAX};

/// By so many bytes a datagram of such a flow is shorter than the path allows: a repair is longer than the datagrams of
/// its block, of an even length, and goes the same way.
const NARROWER_BYTES: usize = REPAIR_HEADER_LEN + SYMBOL_HEAD_LEN + PLACE_LEN + 1;
/// The same, of one that is sealed.
const NARROWER_SEALED_BYTES: usize = NARROWER_BYTES + SEALED_FEC_LEN + SEAL_TAG_LEN;

/// Datagrams for one send: all have the same length, the last may be shorter.
struct Part {
    bytes: Vec<u8>,
    segment: usize,
}

/// What is sent in order. Of what will be sealed, each datagram has its place in its block inside, and room for its
/// tag.
struct Parts {
    parts: Vec<Part>,
    is_sealed: bool,
}

impl Parts {
    const fn new(stack: Stack) -> Self {
        Self { parts: Vec::new(), is_sealed: stack.is_sealed() }
    }

    /// Adds one datagram behind the others.
    fn add(&mut self, header: DataRepr, before: &[u8], rest: &[u8]) {
        let inside = SealedFecRepr {
            base: header.packet_number,
            is_repair: header.flags & REPAIR != 0,
            // A block and its repairs have 32 places each.
            index: header.index as u8,
            count: header.count as u8,
        };
        let inside = inside.emit();
        let (inside, tail_len) = if self.is_sealed { (&inside[..], SEAL_TAG_LEN) } else { (&[][..], 0) };
        let len = DATA_HEADER_LEN + inside.len() + before.len() + rest.len() + tail_len;
        let fits = |part: &&mut Part| {
            let is_even = part.bytes.len().is_multiple_of(part.segment);
            let has_room = part.bytes.len() + len <= SEND_MAX && part.bytes.len() / part.segment < SEGMENTS_MAX;
            is_even && has_room && len <= part.segment
        };
        if self.parts.last_mut().filter(fits).is_none() {
            self.parts.push(Part { bytes: Vec::new(), segment: len });
        }
        let Some(part) = self.parts.last_mut() else { return };
        let at = part.bytes.len();
        part.bytes.resize(at + DATA_HEADER_LEN, 0);
        header.emit(&mut part.bytes[at..]);
        part.bytes.extend_from_slice(inside);
        part.bytes.extend_from_slice(before);
        part.bytes.extend_from_slice(rest);
        part.bytes.resize(part.bytes.len() + tail_len, 0);
    }

    fn add_repair(&mut self, peer_flow: FlowId, repair: &Repair<'_>) {
        let Repair { base, datagrams, index, count, symbol } = *repair;
        let header =
            DataRepr { stack: STACK_FEC, flags: REPAIR, dst_flow: peer_flow, packet_number: base, index, count };
        self.add(header, &RepairRepr { datagrams }.emit(), symbol);
    }

    fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.bytes.len() as u64).sum()
    }

    /// Sends everything; nothing plain of what is to be sealed.
    fn send<C>(self, shared: &Shared<C>, route: &EgressRoute, patient: bool) {
        for Part { mut bytes, segment } in self.parts {
            let sealed = match (&route.seal, self.is_sealed) {
                (Some(seal), true) => seal.seal_fec(route.peer_flow, &mut bytes, segment),
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

struct Sending {
    encoder: Encoder,
    /// The end of the present block is waited for.
    is_armed: bool,
}

impl Sending {
    /// Ends the block. Gives how many bytes its repairs have.
    fn close(&mut self, peer_flow: FlowId, parts: &mut Parts) -> u64 {
        let before = parts.bytes();
        self.encoder.close(|repair| parts.add_repair(peer_flow, &repair));
        parts.bytes() - before
    }
}

struct Receiving {
    decoder: Decoder,
    /// When the end of a wait is waited for.
    armed: Option<Instant>,
    /// What the decoder keeps.
    account: HeldAccount,
}

/// One flow, both ways, from one change on. It outlives the flow's entry.
pub struct Fec {
    /// This host's number of the flow.
    pub flow: FlowId,
    /// By which stack: `fec`, or the same under a seal.
    stack: Stack,
    /// The change by which it came to be so.
    change: u32,
    sending: Mutex<Sending>,
    receiving: Mutex<Receiving>,
}

impl std::fmt::Debug for Fec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fec").field("flow", &self.flow).field("change", &self.change).finish_non_exhaustive()
    }
}

impl PartialEq for Fec {
    fn eq(&self, other: &Self) -> bool {
        core::ptr::eq(self, other)
    }
}

impl Eq for Fec {}

impl Fec {
    /// A flow that goes by a stack that repairs from this change on. What waits of it counts for `account`.
    pub fn new(flow: FlowId, stack: Stack, change: u32, account: HeldAccount) -> Self {
        let first = first_number(change);
        let sending = Sending { encoder: Encoder::new(first), is_armed: false };
        let receiving = Receiving { decoder: Decoder::new(first), armed: None, account };
        Self { flow, stack, change, sending: Mutex::new(sending), receiving: Mutex::new(receiving) }
    }

    /// By so many bytes a chunk is shorter than the path's datagrams may be.
    pub const fn narrower_bytes(&self) -> u16 {
        (if self.stack.is_sealed() { NARROWER_SEALED_BYTES } else { NARROWER_BYTES }) as u16
    }

    /// Takes note of what is lost of what is sent.
    pub fn note_loss(&self, loss: Loss) {
        self.sending.lock().encoder.note_loss(loss);
    }

    /// What has come by numbers.
    pub fn numbered(&self) -> Numbered {
        let Arrivals { expected, received, gaps, .. } = self.receiving.lock().decoder.arrivals();
        Numbered { change: self.change, expected, received, gaps }
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
        let mut parts = Parts::new(self.stack);
        let mut repair_bytes = 0;
        let mut sending = self.sending.lock();
        for datagram in datagrams.chunks(segment) {
            // What is sent here has been stamped.
            let Ok(DataRepr { dst_flow, index, count, .. }) = DataRepr::parse(datagram) else { continue };
            if sending.encoder.is_due(now) {
                repair_bytes += sending.close(dst_flow, &mut parts);
            }
            let place = PlaceRepr { index, count }.emit();
            let chunk = &datagram[DATA_HEADER_LEN..];
            let slot = sending.encoder.add(now, &place, chunk);
            let header = DataRepr {
                stack: STACK_FEC,
                flags: 0,
                dst_flow,
                packet_number: slot.base,
                index: slot.index,
                count: BLOCK_MAX,
            };
            parts.add(header, &place, chunk);
            if sending.encoder.is_full() {
                repair_bytes += sending.close(dst_flow, &mut parts);
            }
        }
        let due = sending.encoder.deadline().filter(|_| !sending.is_armed);
        sending.is_armed |= due.is_some();
        drop(sending);
        shared.counting.fec_bytes.add(parts.bytes() - repair_bytes);
        shared.counting.fec_repair_bytes.add(repair_bytes);
        parts.send(shared, route, patient);
        if let Some(due) = due {
            shared.block_ends.add(self, due);
        }
    }

    /// Ends the present block: what repairs it is sent.
    pub(crate) fn close<C>(&self, shared: &Shared<C>, route: &EgressRoute) {
        let mut parts = Parts::new(self.stack);
        let bytes = self.sending.lock().close(route.peer_flow, &mut parts);
        shared.counting.fec_repair_bytes.add(bytes);
        parts.send(shared, route, false);
    }

    /// Ends the present block, if it is time.
    fn close_due<C>(self: &Arc<Self>, shared: &Shared<C>) {
        let mut sending = self.sending.lock();
        let next = sending.encoder.deadline();
        let is_due = sending.encoder.is_due(clock::now());
        sending.is_armed = next.is_some() && !is_due;
        drop(sending);
        match next {
            Some(_) if is_due => {
                let route = shared.table.read().route_by(self.flow, self.stack);
                if let Some(route) = route {
                    self.close(shared, &route);
                }
            }
            Some(next) => shared.block_ends.add(self, next),
            None => {}
        }
    }

    /// Takes datagrams and repairs that follow each other in one receive, opened where they were sealed. Calls `give`
    /// with chunks, in order.
    pub(crate) fn receive<C>(self: &Arc<Self>, shared: &Shared<C>, run: &Run<'_>, give: impl FnMut(&Run<'_>)) {
        let now = clock::now();
        let header = &run.header;
        self.with_decoder(shared, give, |decoder, give| {
            for (at, chunk) in run.chunk_bytes().enumerate() {
                let inside = if self.stack.is_sealed() {
                    SealedFecRepr::parse(chunk).map(|(inside, body)| (Inside::from(inside), body))
                } else {
                    Ok((Inside::of(header, at), chunk))
                };
                let Ok((inside, body)) = inside else {
                    shared.counting.drop(DropReason::Malformed);
                    continue;
                };
                let Inside { base, is_repair, index, count } = inside;
                let taken = if is_repair {
                    RepairRepr::parse(body).map_err(|_| Refused::Malformed).and_then(|(repr, symbol)| {
                        let of = RepairOf { base, datagrams: repr.datagrams, index, count };
                        decoder.repair(now, of, symbol, &mut *give)
                    })
                } else {
                    decoder.datagram(now, base, index, body, &mut *give)
                };
                match taken {
                    Ok(()) => {}
                    // Most repairs come when nothing is missing.
                    Err(Refused::Late) if is_repair => {}
                    Err(Refused::Late | Refused::Far) => shared.counting.drop(DropReason::LateDatagram),
                    Err(Refused::Malformed) => shared.counting.drop(DropReason::Malformed),
                }
            }
        });
    }

    /// Gives all that waits: the peer sends no more by this stack.
    pub(crate) fn finish<C>(self: &Arc<Self>, shared: &Shared<C>, give: impl FnMut(&Run<'_>)) {
        self.with_decoder(shared, give, |decoder, give| decoder.finish(give));
    }

    /// Gives what has waited for long enough.
    pub(crate) fn work<C>(self: &Arc<Self>, shared: &Shared<C>, give: impl FnMut(&Run<'_>)) {
        self.receiving.lock().armed = None;
        self.with_decoder(shared, give, |decoder, give| decoder.poll(clock::now(), give));
    }

    /// Counts what becomes of datagrams meanwhile, and waits for what is due then. Where the peer has its share of what
    /// is kept, nothing of this flow is, and nothing of it is repaired.
    fn with_decoder<C>(
        self: &Arc<Self>,
        shared: &Shared<C>,
        mut give: impl FnMut(&Run<'_>),
        act: impl FnOnce(&mut Decoder, &mut dyn FnMut(Given<'_>)),
    ) {
        let mut scratch = Vec::new();
        let mut give = |given: Given<'_>| give_chunk((self.flow, self.stack), &mut scratch, given, &mut give);
        let mut receiving = self.receiving.lock();
        let Receiving { decoder, armed, account } = &mut *receiving;
        let before = decoder.arrivals();
        act(decoder, &mut give);
        if !account.resize(decoder.bytes()) {
            decoder.finish(&mut give);
            account.clear();
        }
        let after = decoder.arrivals();
        let due = decoder.deadline().filter(|due| armed.is_none_or(|armed| *due < armed));
        *armed = due.or(*armed);
        drop(receiving);
        shared.counting.fec_repaired.add(after.repaired.wrapping_sub(before.repaired).into());
        shared.counting.fec_lost.add(after.lost.wrapping_sub(before.lost).into());
        if let Some(due) = due {
            shared.holes.add(self, due);
        }
    }
}

/// Where a datagram or a repair is in its block.
struct Inside {
    base: u32,
    is_repair: bool,
    index: u16,
    count: u16,
}

impl Inside {
    /// Of the datagram `at` of a run whose first one has this header.
    fn of(header: &DataRepr, at: usize) -> Self {
        // A receive has no more datagrams than that.
        let index = header.index.wrapping_add(at as u16);
        Self { base: header.packet_number, is_repair: header.flags & REPAIR != 0, index, count: header.count }
    }
}

impl From<SealedFecRepr> for Inside {
    fn from(SealedFecRepr { base, is_repair, index, count }: SealedFecRepr) -> Self {
        Self { base, is_repair, index: index.into(), count: count.into() }
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
    let packet_number = given.number.wrapping_sub(index.into());
    let header = DataRepr { stack: STACK_FEC, flags: 0, dst_flow: flow, packet_number, index, count };
    scratch.clear();
    scratch.resize(DATA_HEADER_LEN, 0);
    header.emit(scratch);
    scratch.extend_from_slice(chunk);
    give(&Run::delivered(header, scratch, stack));
}

/// Ends blocks that have lasted long enough.
pub(crate) fn close_due<C>(shared: &Shared<C>) {
    for fec in shared.block_ends.take(clock::now()) {
        fec.close_due(shared);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(packet_number: u32, index: u16) -> DataRepr {
        DataRepr { stack: STACK_FEC, flags: 0, dst_flow: FlowId(7), packet_number, index, count: BLOCK_MAX }
    }

    #[test]
    fn datagrams_and_repairs_are_as_written_in_the_book_and_go_in_as_few_sends_as_there_are_lengths() {
        let mut parts = Parts::new(Stack::Fec);
        let place = PlaceRepr { index: 0, count: 1 }.emit();
        parts.add(header(9, 0), &place, b"ab");
        parts.add(header(9, 1), &place, b"c");
        parts.add(header(9, 2), &place, b"de");
        let repair = Repair { base: 9, datagrams: 3, index: 1, count: 2, symbol: &[0xaa, 0xbb] };
        parts.add_repair(FlowId(7), &repair);
        let sends: Vec<(usize, usize)> = parts.parts.iter().map(|part| (part.segment, part.bytes.len())).collect();
        assert_eq!(sends, [(22, 22 + 21), (22, 22 + 22)], "a shorter one ends a send");
        let first = [1, 32, 5, 0, 0, 0, 0, 7, 0, 0, 0, 9, 0, 0, 0, 32, 0, 0, 0, 1, b'a', b'b'];
        assert_eq!(parts.parts[0].bytes[..22], first);
        let last = [1, 32, 5, 4, 0, 0, 0, 7, 0, 0, 0, 9, 0, 1, 0, 2, 0, 3, 0, 0, 0xaa, 0xbb];
        assert_eq!(parts.parts[1].bytes[22..], last);
        let mut many = Parts::new(Stack::Fec);
        (0..200).for_each(|at| many.add(header(at, 0), &place, &[0; 1400]));
        assert!(many.parts.iter().all(|part| part.bytes.len() <= SEND_MAX && part.bytes.len() / 1420 <= SEGMENTS_MAX));
        assert_eq!(many.bytes(), 200 * 1420);
    }

    #[test]
    fn what_will_be_sealed_has_its_place_inside_and_room_for_a_tag() {
        let mut parts = Parts::new(Stack::SecureFec);
        parts.add(header(9, 1), &PlaceRepr { index: 0, count: 1 }.emit(), b"ab");
        let repair = Repair { base: 9, datagrams: 3, index: 1, count: 2, symbol: &[0xaa, 0xbb] };
        parts.add_repair(FlowId(7), &repair);
        assert_eq!(parts.parts.len(), 1, "both have the same length");
        let part = &parts.parts[0];
        let len = DATA_HEADER_LEN + SEALED_FEC_LEN + 6 + SEAL_TAG_LEN;
        assert_eq!((part.segment, part.bytes.len()), (len, 2 * len));
        let datagram = [0, 0, 0, 9, 0, 1, 32, 0, 0, 0, 0, 1, b'a', b'b'];
        assert_eq!(part.bytes[DATA_HEADER_LEN..len - SEAL_TAG_LEN], datagram);
        let repair = [0, 0, 0, 9, 4, 1, 2, 0, 0, 3, 0, 0, 0xaa, 0xbb];
        assert_eq!(part.bytes[len + DATA_HEADER_LEN..2 * len - SEAL_TAG_LEN], repair);
        assert!(part.bytes[len - SEAL_TAG_LEN..len].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn what_is_given_is_a_chunk_of_its_train() {
        let mut scratch = Vec::new();
        let payload = [0, 2, 0, 3, b'x', b'y'];
        let mut given = Vec::new();
        let mut give = |run: &Run<'_>| given.push((run.header, run.datagrams().map(<[u8]>::to_vec).next()));
        give_chunk((FlowId(7), Stack::Fec), &mut scratch, Given { number: 1, payload: &payload }, &mut give);
        give_chunk((FlowId(7), Stack::Fec), &mut scratch, Given { number: 1, payload: &[0, 3, 0, 3, b'x'] }, &mut give);
        give_chunk((FlowId(7), Stack::Fec), &mut scratch, Given { number: 1, payload: &[0, 3] }, &mut give);
        let header = DataRepr { packet_number: u32::MAX, index: 2, count: 3, ..header(0, 0) };
        let mut datagram = vec![0; DATA_HEADER_LEN];
        header.emit(&mut datagram);
        datagram.extend_from_slice(b"xy");
        assert_eq!(given, [(header, Some(datagram))], "the other two have no place");
    }
}
