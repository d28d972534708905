use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::{Encoder, Loss, first_number};

fn at(millis: u64) -> Instant {
    Instant::from_millis(millis)
}

/// What is on the wire between the two ends.
#[derive(Clone, Debug)]
enum Sent {
    Datagram(u32, u16, Vec<u8>),
    Repair(RepairOf, Vec<u8>),
}

/// Two ends, and what has been given to the program.
struct Pair {
    encoder: Encoder,
    decoder: Decoder,
    given: Vec<(u32, Vec<u8>)>,
    repairs: usize,
    refused: Vec<Refused>,
}

impl Pair {
    fn new(first: u32, ppm: u32) -> Self {
        let mut encoder = Encoder::new(first);
        encoder.note_loss(Loss { ppm, row_thousandths: 1000 });
        // The block that begins by what is supposed is over.
        encoder.close(|_| {});
        let decoder = Decoder::new(first);
        Self { encoder, decoder, given: Vec::new(), repairs: 0, refused: Vec::new() }
    }

    fn send(&mut self, now: Instant, payload: &[u8]) -> Vec<Sent> {
        let mut sent = Vec::new();
        if self.encoder.is_due(now) {
            sent.extend(self.close());
        }
        let slot = self.encoder.add(now, &[], payload);
        sent.push(Sent::Datagram(slot.base, slot.index, payload.to_vec()));
        if self.encoder.is_full() {
            sent.extend(self.close());
        }
        sent
    }

    fn close(&mut self) -> Vec<Sent> {
        let mut sent = Vec::new();
        self.encoder.close(|one| {
            let of = RepairOf { base: one.base, datagrams: one.datagrams, index: one.index, count: one.count };
            sent.push(Sent::Repair(of, one.symbol.to_vec()));
        });
        self.repairs += sent.len();
        sent
    }

    fn receive(&mut self, now: Instant, sent: &Sent) -> Result<(), Refused> {
        let given = &mut self.given;
        let give = |one: Given<'_>| given.push((one.number, one.payload.to_vec()));
        let result = match sent {
            Sent::Datagram(base, index, payload) => self.decoder.datagram(now, *base, *index, payload, give),
            Sent::Repair(of, symbol) => self.decoder.repair(now, *of, symbol, give),
        };
        self.refused.extend(result.err());
        result
    }

    fn poll(&mut self, now: Instant) {
        let given = &mut self.given;
        self.decoder.poll(now, |one| given.push((one.number, one.payload.to_vec())));
    }

    fn numbers(&self) -> Vec<u32> {
        self.given.iter().map(|(number, _)| *number).collect()
    }
}

fn payload(number: u32) -> Vec<u8> {
    let len = 4 + number as usize * 7 % 90;
    number.to_be_bytes().into_iter().cycle().take(len).collect()
}

/// Frames of 15 datagrams, 30 a second, over a path that loses what `is_lost` says. Gives the pair, and how many frames
/// were not whole.
fn frames(count: u32, ppm: u32, mut is_lost: impl FnMut(usize) -> bool) -> (Pair, u32) {
    let first = first_number(77);
    let mut pair = Pair::new(first, ppm);
    let mut on_wire = 0;
    for frame in 0..count {
        let now = at(u64::from(frame) * 33);
        let mut sent: Vec<Sent> = (0..15).flat_map(|one| pair.send(now, &payload(frame * 15 + one))).collect();
        sent.extend(pair.close());
        for one in &sent {
            on_wire += 1;
            if !is_lost(on_wire) {
                let _ = pair.receive(now, one);
            }
        }
    }
    pair.poll(at(u64::from(count) * 33 + 1000));
    let numbers = pair.numbers();
    assert!(numbers.windows(2).all(|two| two[1].wrapping_sub(two[0]).cast_signed() > 0), "in order, each once");
    assert!(pair.given.iter().all(|(number, bytes)| *bytes == payload(number.wrapping_sub(first))));
    let mut whole = vec![0; count as usize];
    numbers.iter().for_each(|number| whole[number.wrapping_sub(first) as usize / 15] += 1);
    let broken = whole.iter().filter(|datagrams| **datagrams < 15).count();
    (pair, u32::try_from(broken).expect("few"))
}

/// A row of numbers that looks random, and is the same each time.
fn random(seed: u64) -> impl FnMut() -> u32 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    }
}

#[test]
fn losses_at_random_and_in_rows_of_three_are_repaired() {
    for (ppm, most_broken, most_repairs) in [(20_000, 6, 0.25), (50_000, 10, 0.4)] {
        let mut next = random(5);
        let (pair, broken) = frames(3000, ppm, |_| next() % 1_000_000 < ppm);
        let repairs = pair.repairs as f64 / 45_000.0;
        assert!(broken <= most_broken && repairs <= most_repairs, "{ppm}: {broken} broken, {repairs} repairs");
        let arrivals = pair.decoder.arrivals();
        let lost = f64::from(arrivals.expected - arrivals.received) / f64::from(arrivals.expected);
        assert!((lost - f64::from(ppm) / 1e6).abs() < 0.003, "{lost} is measured");
        assert!(arrivals.repaired > 500 && arrivals.lost < 100, "{arrivals:?}");
    }
    let mut next = random(6);
    let mut row = 0;
    let (pair, broken) = frames(3000, 60_000, |_| {
        row = if row > 0 {
            row - 1
        } else if next().is_multiple_of(150) {
            3
        } else {
            0
        };
        row > 0
    });
    assert!(broken <= 60, "{broken}");
    let arrivals = pair.decoder.arrivals();
    let row = f64::from(arrivals.expected - arrivals.received) / f64::from(arrivals.gaps);
    assert!((2.3..2.9).contains(&row), "{row} in a row: where a block ends, some of them are repairs");
}

#[test]
fn nothing_waits_where_nothing_is_missing() {
    let (pair, broken) = frames(100, 0, |_| false);
    assert_eq!((broken, pair.repairs, pair.given.len()), (0, 0, 1500));
    assert_eq!(pair.decoder.deadline(), None);
    assert!(pair.decoder.bytes < 4 << 10, "{} bytes are kept", pair.decoder.bytes);
    let expected = Arrivals { expected: 1500, received: 1500, gaps: 0, repaired: 0, lost: 0 };
    assert_eq!(pair.decoder.arrivals(), expected);
}

#[test]
fn what_is_missing_is_waited_for_until_its_time_has_passed() {
    let mut pair = Pair::new(10, 0);
    let sent: Vec<Sent> = (0..5).flat_map(|one| pair.send(at(0), &[one])).collect();
    assert_eq!(pair.receive(at(0), &sent[0]), Ok(()));
    assert_eq!(pair.receive(at(2), &sent[2]), Ok(()));
    assert_eq!(pair.receive(at(3), &sent[3]), Ok(()));
    assert_eq!((pair.numbers(), pair.decoder.deadline()), (vec![10], Some(at(2) + HOLD)));
    pair.poll(at(41));
    assert_eq!(pair.numbers(), [10]);
    pair.poll(at(42));
    assert_eq!((pair.numbers(), pair.decoder.deadline()), (vec![10, 12, 13], Some(at(0) + BLOCK_LIFETIME)));
    assert_eq!(pair.receive(at(43), &sent[1]), Err(Refused::Late), "it was given up");
    assert_eq!(pair.receive(at(43), &sent[3]), Err(Refused::Late), "it was given");
    assert_eq!(pair.receive(at(43), &sent[4]), Ok(()));
    assert_eq!(pair.numbers(), [10, 12, 13, 14]);
    assert_eq!(pair.decoder.arrivals().lost, 1);
}

#[test]
fn the_last_datagram_of_a_block_is_repaired_before_anything_follows() {
    let mut pair = Pair::new(u32::MAX - 1, 50_000);
    let sent: Vec<Sent> = (0..3).flat_map(|one| pair.send(at(0), &payload(one))).collect();
    sent[..2].iter().for_each(|one| assert_eq!(pair.receive(at(0), one), Ok(())));
    let repairs = pair.close();
    assert_eq!(pair.receive(at(8), &repairs[0]), Ok(()));
    assert_eq!(pair.numbers(), [u32::MAX - 1, u32::MAX, 0]);
    assert_eq!(pair.given[2].1, payload(2));
    assert_eq!(pair.receive(at(9), &repairs[1]), Err(Refused::Late), "nothing is missing");
    assert_eq!(pair.receive(at(9), &sent[2]), Err(Refused::Late), "it was repaired, and is not given twice");
}

#[test]
fn a_block_that_begins_two_blocks_later_ends_the_wait() {
    let mut pair = Pair::new(0, 0);
    let mut blocks: Vec<Vec<Sent>> = Vec::new();
    for _ in 0..4 {
        blocks.push((0..2).flat_map(|one| pair.send(at(0), &[one])).collect());
        pair.close();
    }
    assert_eq!(pair.receive(at(0), &blocks[0][1]), Ok(()));
    assert_eq!(pair.receive(at(0), &blocks[1][0]), Ok(()));
    assert_eq!(pair.numbers(), [0_u32; 0]);
    assert_eq!(pair.receive(at(0), &blocks[2][0]), Ok(()));
    assert_eq!(pair.numbers(), [1, 2]);
    pair.decoder.finish(|one| pair.given.push((one.number, one.payload.to_vec())));
    assert_eq!(pair.numbers(), [1, 2, 4]);
}

#[test]
fn what_contradicts_itself_or_what_came_before_is_refused() {
    let refused = |pair: &mut Pair, sent: Sent, why| assert_eq!(pair.receive(at(0), &sent), Err(why), "{sent:?}");
    let of = RepairOf { base: 100, datagrams: 4, index: 0, count: 2 };
    let fresh = || {
        let mut pair = Pair::new(100, 0);
        assert_eq!(pair.receive(at(0), &Sent::Datagram(100, 1, vec![1])), Ok(()));
        pair
    };
    for (of, len) in [
        (RepairOf { datagrams: 0, ..of }, 4),
        (RepairOf { datagrams: 33, ..of }, 4),
        (RepairOf { count: 0, ..of }, 4),
        (RepairOf { count: 33, ..of }, 4),
        (RepairOf { index: 2, ..of }, 4),
        (of, 0),
        (of, 3),
        (RepairOf { datagrams: 1, ..of }, 4),
    ] {
        refused(&mut fresh(), Sent::Repair(of, vec![0; len]), Refused::Malformed);
    }
    let mut pair = fresh();
    refused(&mut pair, Sent::Datagram(100, 32, vec![0]), Refused::Malformed);
    refused(&mut pair, Sent::Datagram(100, 1, vec![2]), Refused::Late);
    refused(&mut pair, Sent::Datagram(101, 0, vec![2]), Refused::Malformed);
    assert_eq!(pair.receive(at(0), &Sent::Repair(of, vec![9; 4])), Ok(()));
    refused(&mut pair, Sent::Repair(of, vec![8; 4]), Refused::Late);
    refused(&mut pair, Sent::Repair(RepairOf { index: 1, ..of }, vec![8; 6]), Refused::Malformed);
    refused(&mut pair, Sent::Repair(RepairOf { index: 1, count: 3, ..of }, vec![8; 4]), Refused::Malformed);
    refused(&mut pair, Sent::Repair(RepairOf { index: 1, datagrams: 5, ..of }, vec![8; 4]), Refused::Malformed);
    refused(&mut pair, Sent::Datagram(100, 4, vec![2]), Refused::Malformed);
    refused(&mut pair, Sent::Datagram(103, 0, vec![2]), Refused::Malformed);
    // Symbols that are shorter than what has come, or whose lengths lie, repair nothing.
    let mut pair = Pair::new(100, 0);
    assert_eq!(pair.receive(at(0), &Sent::Datagram(100, 0, vec![1; 50])), Ok(()));
    let of = RepairOf { base: 100, datagrams: 2, index: 0, count: 1 };
    assert_eq!(pair.receive(at(0), &Sent::Repair(of, vec![255; 8])), Ok(()));
    let mut pair = Pair::new(100, 0);
    let alone = RepairOf { base: 100, datagrams: 1, index: 0, count: 1 };
    assert_eq!(pair.receive(at(0), &Sent::Repair(alone, vec![255; 8])), Ok(()));
    assert!(pair.given.is_empty());
}

#[test]
fn one_forged_number_ends_nothing_and_a_path_that_was_dead_goes_on() {
    let mut pair = Pair::new(1000, 0);
    assert_eq!(pair.receive(at(0), &Sent::Datagram(1000, 0, vec![1])), Ok(()));
    for forged in [900_000, 2_000_000_000, 700] {
        assert_eq!(pair.receive(at(0), &Sent::Datagram(forged, 0, vec![1])), Err(Refused::Far));
    }
    assert_eq!(pair.receive(at(0), &Sent::Datagram(1000, 1, vec![1])), Ok(()));
    let after = |number| Sent::Datagram(number, 0, vec![2]);
    assert_eq!(pair.receive(at(9000), &after(50_000)), Err(Refused::Far));
    assert_eq!(pair.receive(at(9000), &after(50_001)), Err(Refused::Far));
    assert_eq!(pair.receive(at(9000), &after(50_002)), Ok(()));
    assert_eq!(pair.numbers(), [1000, 1001, 50_002]);
    let old: Vec<Result<(), Refused>> = (0..32).map(|one| pair.receive(at(9000), &after(1002 + one))).collect();
    assert_eq!(old.iter().filter(|result| result.is_ok()).count(), 1);
    assert!(old[31].is_ok(), "so many cannot all be late");
}

#[test]
fn repairs_alone_are_kept_no_longer_than_a_block() {
    let mut pair = Pair::new(0, 0);
    for block in 0..8_u64 {
        for index in 0..4 {
            let of = RepairOf { base: block as u32 * 8, datagrams: 8, index, count: 31 };
            assert_eq!(pair.receive(at(block), &Sent::Repair(of, vec![0; 9000])), Ok(()));
        }
    }
    assert!(pair.decoder.bytes() > 8 * 4 * 9000);
    assert_eq!(pair.decoder.deadline(), Some(at(0) + BLOCK_LIFETIME), "nothing else may ever come");
    pair.poll(at(83));
    assert_eq!((pair.decoder.blocks.len(), pair.decoder.deadline()), (4, Some(at(4) + BLOCK_LIFETIME)));
    pair.poll(at(87));
    assert_eq!((pair.decoder.bytes(), pair.decoder.deadline()), (0, None));
    assert_eq!(pair.receive(at(88), &Sent::Datagram(0, 0, vec![1])), Ok(()), "it was not given up");
    assert_eq!(pair.numbers(), [0]);
}

#[test]
fn a_block_that_never_ends_is_forgotten() {
    let mut pair = Pair::new(0, 0);
    (0..31).for_each(|one| assert_eq!(pair.receive(at(0), &Sent::Datagram(0, one, vec![0; 9000])), Ok(())));
    assert_eq!(pair.given.len(), 31);
    assert!(pair.decoder.bytes() > 31 * 9000);
    pair.poll(at(80));
    assert_eq!((pair.decoder.bytes(), pair.decoder.deadline()), (0, None));
    assert_eq!(pair.receive(at(81), &Sent::Datagram(0, 31, vec![1])), Ok(()));
    assert_eq!(pair.given.len(), 32);
}

#[test]
fn without_memory_everything_is_given_and_nothing_kept() {
    let mut pair = Pair::new(0, 0);
    assert_eq!(pair.receive(at(0), &Sent::Datagram(0, 1, vec![1])), Ok(()));
    let of = RepairOf { base: 32, datagrams: 4, index: 0, count: 1 };
    assert_eq!(pair.receive(at(0), &Sent::Repair(of, vec![9; 4])), Ok(()));
    pair.decoder.finish(|one| pair.given.push((one.number, one.payload.to_vec())));
    assert_eq!((pair.numbers(), pair.decoder.bytes()), (vec![1], 0));
    assert_eq!(pair.receive(at(0), &Sent::Datagram(0, 2, vec![1])), Ok(()));
    assert_eq!(pair.numbers(), [1, 2]);
}

#[test]
fn little_is_kept_whatever_comes() {
    let mut pair = Pair::new(0, 0);
    let mut next = random(9);
    for round in 0..4000 {
        let base = next() % 300;
        let sent = if next().is_multiple_of(2) {
            Sent::Datagram(base, (next() % 32) as u16, vec![0; 9000])
        } else {
            let of = RepairOf { base, datagrams: (next() % 34) as u16, index: (next() % 8) as u16, count: 8 };
            Sent::Repair(of, vec![0; 9000])
        };
        let _ = pair.receive(at(round), &sent);
        pair.given.clear();
        let kept: usize = pair.decoder.blocks.iter().map(Block::bytes).sum();
        assert_eq!(pair.decoder.bytes, kept);
        assert!(kept <= KEPT_BYTES_MAX && pair.decoder.blocks.len() <= BLOCKS_MAX, "{kept}");
    }
}

/// What becomes of one datagram on its way.
#[derive(Clone, Copy, Debug)]
enum Fate {
    Arrives,
    IsLost,
    ComesTwice,
    IsOvertakenBy(usize),
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        8 => Just(Fate::Arrives),
        1 => Just(Fate::IsLost),
        1 => Just(Fate::ComesTwice),
        1 => (1..6_usize).prop_map(Fate::IsOvertakenBy),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn whatever_the_network_does_order_is_kept_and_nothing_is_given_twice(
        first in any::<u32>(),
        lens in prop::collection::vec(0..200_usize, 1..200),
        fates in prop::collection::vec(fate(), 300),
        pauses in prop::collection::vec(0..12_u64, 200),
        ppm in 0..300_000_u32,
    ) {
        let mut pair = Pair::new(first, ppm);
        let mut now = 0;
        let mut wire = VecDeque::new();
        for (number, len) in lens.iter().enumerate() {
            now += pauses[number];
            let sent = pair.send(at(now), &vec![number as u8; *len]);
            wire.extend(sent.into_iter().map(|one| (now, one)));
        }
        wire.extend(pair.close().into_iter().map(|one| (now, one)));
        let mut arriving: Vec<(usize, u64, Sent)> = Vec::new();
        for (place, (sent_at, sent)) in wire.into_iter().enumerate() {
            let order = place * 2;
            match fates[place % fates.len()] {
                Fate::Arrives => arriving.push((order, sent_at, sent)),
                Fate::IsLost => {}
                Fate::ComesTwice => arriving.extend([(order, sent_at, sent.clone()), (order + 3, sent_at, sent)]),
                Fate::IsOvertakenBy(others) => arriving.push((order + others * 2 + 1, sent_at, sent)),
            }
        }
        arriving.sort_by_key(|(order, ..)| *order);
        let mut clock = 0;
        for (_, sent_at, sent) in &arriving {
            clock = clock.max(*sent_at);
            pair.poll(at(clock));
            let _ = pair.receive(at(clock), sent);
        }
        pair.poll(at(clock + 1000));
        prop_assert!(pair.decoder.deadline().is_none());
        let places: Vec<u32> = pair.numbers().iter().map(|number| number.wrapping_sub(first)).collect();
        prop_assert!(places.windows(2).all(|two| two[0] < two[1]), "{places:?}");
        for (place, (_, bytes)) in places.iter().zip(&pair.given) {
            prop_assert_eq!(bytes, &vec![*place as u8; lens[*place as usize]]);
        }
        let arrivals = pair.decoder.arrivals();
        prop_assert!(arrivals.received <= arrivals.expected && arrivals.expected as usize <= lens.len());
        prop_assert!(!pair.refused.contains(&Refused::Malformed) && !pair.refused.contains(&Refused::Far));
    }

    #[test]
    fn whatever_is_forged_nothing_breaks(
        first in any::<u32>(),
        all in prop::collection::vec(
            (any::<u32>(), 0..40_u16, 0..40_u16, 0..40_u16, 0..80_usize, any::<bool>()),
            0..200,
        ),
    ) {
        let mut pair = Pair::new(first, 0);
        for (millis, (base, index, count, datagrams, len, is_near)) in (0..).zip(all) {
            let base = if is_near { first.wrapping_add(base % 64) } else { base };
            let sent = if count == 0 {
                Sent::Datagram(base, index, vec![1; len])
            } else {
                Sent::Repair(RepairOf { base, datagrams, index, count }, vec![1; len])
            };
            let _ = pair.receive(at(millis), &sent);
            pair.poll(at(millis));
        }
        pair.poll(at(10_000));
        prop_assert!(pair.decoder.deadline().is_none());
    }
}
