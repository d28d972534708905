//! What the receiving end of `fec` makes of forged numbers.

use margay_core::time::Instant;
use margay_stack::decoder::{Decoder, RepairOf};
use margay_wire::{PlaceRepr, RepairRepr};

use crate::parts;

/// A sequence of datagrams and repairs. None is given twice, and none before one with a lower number.
pub fn fec(bytes: &[u8]) {
    let mut decoder = Decoder::new(1);
    let mut now = Instant::from_millis(0);
    for part in parts(bytes) {
        let Some((what, said)) = part.split_first() else { continue };
        now = Instant::from_micros(now.micros() + u64::from(*what) * 100);
        decoder.poll(now, |_| {});
        let mut given = 0usize;
        let mut count = |_: margay_stack::decoder::Given<'_>| given += 1;
        if what & 1 == 0 {
            let Ok((place, payload)) = PlaceRepr::parse(said) else { continue };
            let _ = decoder.datagram(now, place.base, place.index, payload, &mut count);
        } else {
            let Ok((repair, symbol)) = RepairRepr::parse(said) else { continue };
            let RepairRepr { base, datagrams, index, count: repairs } = repair;
            let of = RepairOf { base, datagrams, index, count: repairs };
            let _ = decoder.repair(now, of, symbol, &mut count);
        }
    }
    decoder.finish(|_| {});
    assert!(decoder.deadline().is_none(), "nothing waits after the end");
}
