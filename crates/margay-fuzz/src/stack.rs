//! What the receiving ends of `fec`, of a flow and of a place, and an end of `sctp`, make of forged numbers.

use margay_core::time::Instant;
use margay_stack::decoder::{Decoder, Given, RepairOf};
use margay_stack::sctp::{self, Endpoint};
use margay_stack::{RepairBeside, Restorer};
use margay_wire::{ChunkName, Covered, PlaceRepr, RepairRepr};

use crate::parts;

/// A sequence of datagrams and repairs. None is given twice, and none before one with a lower number.
pub fn fec(bytes: &[u8]) {
    let mut decoder = Decoder::new(1);
    let mut restorer = Restorer::default();
    let mut now = Instant::from_millis(0);
    let mut last: Option<u32> = None;
    let mut give = |given: Given<'_>| {
        assert!(last.is_none_or(|last| (given.number.wrapping_sub(last).cast_signed()) > 0), "in order, and once");
        last = Some(given.number);
    };
    for part in parts(bytes) {
        let Some((what, said)) = part.split_first() else { continue };
        now = Instant::from_micros(now.micros() + u64::from(*what) * 100);
        decoder.poll(now, &mut give);
        let Some((base, said)) = said.split_first_chunk() else { continue };
        let base = u32::from_be_bytes(*base);
        // Both kinds have a place in the block before what they bear.
        let Ok((PlaceRepr { index, count: places }, body)) = PlaceRepr::parse(said) else { continue };
        if what & 2 != 0 {
            beside(&mut restorer, (base, index, places), body);
            continue;
        }
        if what & 1 == 0 {
            let _ = decoder.datagram(now, base, index, body, &mut give);
        } else {
            let Ok((RepairRepr { datagrams }, symbol)) = RepairRepr::parse(body) else { continue };
            let _ = decoder.repair(now, RepairOf { base, datagrams, index, count: places }, symbol, &mut give);
        }
    }
    decoder.finish(&mut give);
    assert!(decoder.deadline().is_none(), "nothing waits after the end");
}

/// The same by a place: what is brought back is what its check says.
fn beside(restorer: &mut Restorer, (number, index, count): (u32, u16, u16), body: &[u8]) {
    let give = |name: ChunkName, datagram: &[u8]| assert!(name.index <= 255 && datagram.len() < 65_536);
    match Covered::parse(body) {
        Ok((covered, symbol)) => {
            let _ = restorer.repair(RepairBeside { block: number, index, count }, &covered, symbol, give);
        }
        Err(_) => restorer.keep(ChunkName { number, index }, body, give),
    }
}

/// A sequence of packets for an end that sends as well: their number in four bytes behind a pause, then chunks.
/// Whatever they say, what is held stays within its bounds, and what is sent within a packet.
pub fn sctp(bytes: &[u8]) {
    const ROOM: usize = 1200;
    let mut end = Endpoint::new(0);
    let mut now = Instant::from_millis(0);
    for (label, part) in (0..).zip(parts(bytes)) {
        let Some((pause, said)) = part.split_first() else { continue };
        now = Instant::from_micros(now.micros() + u64::from(*pause) * 1000);
        let _ = end.send(now, label, &part[..part.len().min(100)]);
        end.poll(now, ROOM, |packet| assert!(!packet.is_empty() && packet.len() <= ROOM));
        let Some((number, packet)) = said.split_first_chunk() else { continue };
        let give = |given: sctp::Given<'_>| assert!(given.payload.len() <= packet.len());
        let _ = end.receive(now, u32::from_be_bytes(*number), packet, give);
        end.poll(now, ROOM, |packet| assert!(packet.len() <= ROOM));
        assert!(end.held() <= sctp::HELD_MAX);
        assert!(end.next_deadline().is_none_or(|due| due > now), "what is due has been done");
    }
}
