//! Mutated vectors: a fuzzer that needs nothing but this crate, and replays a failing seed exactly.
//!
//! `MARGAY_SEEDS` sets how many seeds are tried; a failing one names itself.

use margay_wire::{
    DATA_HEADER_LEN, DataRepr, Extension, HEADER_LEN, HeaderRepr, Kind, Message, ResolvableRepr, TrainRepr, kind_of,
};

use crate::json;
use crate::vector::{data, hex, malformed, messages};

const SEEDS: u64 = 200;
const ROUNDS_PER_SEED: usize = 100;
/// A length field can be made to claim this much; buffers need not be longer.
const LONGEST: usize = 4096;

/// Numbers from a seed (SplitMix64).
pub struct Numbers(u64);

impl Numbers {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// Less than `bound`, which is not zero.
    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).expect("less than a usize")
    }

    fn byte(&mut self) -> u8 {
        self.next().to_be_bytes()[0]
    }
}

/// Everything to start from.
pub fn corpus() -> Vec<Vec<u8>> {
    let good = messages().into_iter().chain(data()).map(|vector| vector.bytes);
    good.chain(malformed().into_iter().map(|vector| vector.bytes)).collect()
}

/// A datagram like one of the corpus, with some mistakes.
pub fn mutant(numbers: &mut Numbers, corpus: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = corpus[numbers.below(corpus.len())].clone();
    for _ in 0..=numbers.below(4) {
        mutate(numbers, corpus, &mut bytes);
    }
    bytes.truncate(LONGEST);
    bytes
}

fn mutate(numbers: &mut Numbers, corpus: &[Vec<u8>], bytes: &mut Vec<u8>) {
    let at = numbers.below(bytes.len().max(1));
    let until = (at + 1 + numbers.below(8)).min(bytes.len());
    match numbers.below(9) {
        _ if bytes.is_empty() => bytes.push(numbers.byte()),
        0 => bytes[at] ^= 1 << numbers.below(8),
        1 => bytes[at] = numbers.byte(),
        2 => bytes[at] = [0, 1, 4, 8, 0x55, 0x7f, 0x80, 0x8a, 0xd5, 0xff][numbers.below(10)],
        3 => {
            // A length, a little off or far off.
            let at = at & !1;
            if let Some(field) = bytes.get_mut(at..at + 2) {
                let was = u16::from_be_bytes([field[0], field[1]]);
                let new =
                    [was.wrapping_add(1), was.wrapping_sub(1), was.wrapping_add(4), was.wrapping_sub(4), 0, 0xffff];
                field.copy_from_slice(&new[numbers.below(new.len())].to_be_bytes());
            }
        }
        4 => bytes.truncate(at),
        5 => bytes.extend((0..numbers.below(40)).map(|n| n as u8)),
        6 => drop(bytes.drain(at..until)),
        7 => {
            let copy = bytes[at..until].to_vec();
            bytes.splice(at..at, copy);
        }
        _ => {
            // The rest of another one.
            let other = &corpus[numbers.below(corpus.len())];
            bytes.truncate(at);
            bytes.extend(other.iter().skip(at));
        }
    }
}

/// What must hold for any bytes whatever. Gives whether somebody takes them.
pub fn check(bytes: &[u8]) -> bool {
    let message = Message::parse(bytes);
    let is_data = json::of_data(bytes).is_ok();
    assert!(!(message.is_ok() && is_data), "both a message and DATA");
    if HeaderRepr::parse(bytes).is_err() {
        assert!(message.is_err(), "no message without its header");
    }
    for at in 0..bytes.len().min(64) {
        // Parts are read on their own too.
        let _ = (Extension::parse(&bytes[at..]), ResolvableRepr::parse(&bytes[at..]), TrainRepr::parse(&bytes[at..]));
    }
    if let Ok(header) = DataRepr::parse(bytes) {
        assert_eq!(kind_of(bytes), Ok(Kind::Data));
        let mut again = [0; DATA_HEADER_LEN];
        header.emit(&mut again);
        assert_eq!(again, bytes[..DATA_HEADER_LEN], "no field of the header is lost");
    }
    match message {
        Ok(message) => check_message(&message, bytes),
        Err(_) => return is_data,
    }
    true
}

fn check_message(message: &Message<'_>, bytes: &[u8]) {
    assert_eq!(kind_of(bytes), Ok(message.kind));
    assert!(bytes.starts_with(message.signed_bytes()));
    assert!(message.signed_bytes().ends_with(message.payload));
    match (message.auth(), message.auth_tag_offset()) {
        (Some(auth), Some(at)) => assert_eq!(message.signed_bytes()[at..at + 16], auth.tag),
        (None, None) => {}
        odd => panic!("{odd:?}"),
    }
    let fields = json::of_message(message, bytes.len());
    let written = json::to_message(&fields).expect("what was read can be written");
    let again = Message::parse(&written).expect("and read again");
    if let Some(normal) = normal(bytes) {
        assert_eq!(hex(&written), hex(&normal), "nothing that is looked at is lost");
        assert_eq!(json::of_message(&again, written.len()), fields, "and means the same");
    } else {
        assert_eq!(json::of_message(&again, written.len())["extensions"], fields["extensions"]);
    }
}

fn zero(bytes: &mut [u8], from: usize, len: usize) {
    bytes[from..from + len].fill(0);
}

/// The same datagram with everything that readers do not look at as zero; `None` when it has what writers do not write.
/// From the format's description, not with the crate's parsers.
fn normal(bytes: &[u8]) -> Option<Vec<u8>> {
    let half = |at: usize| usize::from(bytes[at]) << 8 | usize::from(bytes[at + 1]);
    let (header_len, payload_len) = (half(4), half(6));
    let mut out = bytes.to_vec();
    out[header_len + payload_len..].fill(0);
    let mut at = HEADER_LEN;
    if bytes[2] & 1 != 0 {
        out[21] &= 3;
        for (bit, port, address) in [(1, 22, 24), (2, 40, 44)] {
            if bytes[21] & bit == 0 {
                zero(&mut out, port, 2);
                zero(&mut out, address, 16);
            }
        }
        zero(&mut out, 42, 2);
        at += 88;
    }
    while at < header_len {
        let (kind, len) = (bytes[at], half(at + 2));
        let value = at + 4;
        let end = value + len.next_multiple_of(4);
        out[at + 1] = 0;
        zero(&mut out, value + len, end - value - len);
        match kind {
            1 | 3 | 5 | 0x86 | 0x8a | 0x8b => {}
            2 => zero(&mut out, value + 37, 3),
            4 => zero(&mut out, value + 6, 2),
            8 => zero(&mut out, value + 18, 2),
            9 => zero(&mut out, value + 2, 2),
            0x8c => {
                out[value + 1] &= 1;
                zero(&mut out, value + 2, 2);
            }
            0x98 => {
                out[value + 2] &= 3;
                zero(&mut out, value + 3, 1);
            }
            0x93 => zero(&mut out, value + 10, 2),
            critical if critical & 0x80 != 0 && len == 0 => {}
            _ => return None,
        }
        at = end;
    }
    Some(out)
}

fn seeds() -> u64 {
    match std::env::var("MARGAY_SEEDS") {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("MARGAY_SEEDS is `{text}`; give a number")),
        Err(_) => SEEDS,
    }
}

#[test]
fn mutated_vectors_are_read_as_they_are_or_refused() {
    let corpus = corpus();
    let mut taken = 0_u64;
    for seed in 0..seeds() {
        let mut numbers = Numbers::new(seed);
        for round in 0..ROUNDS_PER_SEED {
            let bytes = mutant(&mut numbers, &corpus);
            let outcome = std::panic::catch_unwind(|| check(&bytes));
            match outcome {
                Ok(is_taken) => taken += u64::from(is_taken),
                Err(_) => panic!("seed {seed}, round {round}: {}", hex(&bytes)),
            }
        }
    }
    let all = seeds() * ROUNDS_PER_SEED as u64;
    assert!(taken > all / 20 && taken < all - all / 20, "the mutations are of some use: {taken} of {all} were taken");
}

#[test]
fn the_corpus_itself_holds() {
    let taken = corpus().iter().filter(|bytes| check(bytes)).count();
    assert_eq!(taken, messages().len() + data().len());
}
