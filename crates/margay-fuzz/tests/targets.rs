//! Every target is given inputs that are made from literal ones with some mistakes, each from a seed, so that an input
//! that fails is made again by its seed. `MARGAY_SEEDS` sets how many are made for each target.

use std::panic::{self, AssertUnwindSafe};

use margay_core::rng::Rng;
use margay_fuzz::TARGETS;

const SEEDS: u64 = 20_000;
/// The longest input.
const LONGEST_BYTES: usize = 4096;
/// Bytes that mean something to many formats: bounds of integers, and what parts lines.
const TELLING: [u8; 12] = [0, 1, 0x7f, 0x80, 0xff, b'\r', b'\n', b' ', b'$', b'*', b'0', b'9'];

/// Chances from a seed.
struct Chances(Rng);

impl Chances {
    fn new(seed: u64) -> Self {
        let mut whole = [0; 32];
        whole[..8].copy_from_slice(&seed.to_be_bytes());
        Self(Rng::new(whole))
    }

    /// Less than `bound`, which is not zero.
    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.0.u64() % bound as u64).expect("less than a usize")
    }

    fn one_of<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len())]
    }
}

/// The datagrams that other languages can read, too.
fn datagrams() -> Vec<Vec<u8>> {
    let texts = [
        include_str!("../../margay-wire/vectors/messages.json"),
        include_str!("../../margay-wire/vectors/data.json"),
        include_str!("../../margay-wire/vectors/malformed.json"),
    ];
    let vectors = texts.iter().flat_map(|text| {
        let read: Vec<serde_json::Value> = serde_json::from_str(text).expect("vectors are JSON");
        read
    });
    vectors.map(|vector| bytes_of(vector["hex"].as_str().expect("each vector has its bytes"))).collect()
}

fn bytes_of(hex: &str) -> Vec<u8> {
    let digits = hex.as_bytes().chunks_exact(2).map(|pair| str::from_utf8(pair).expect("hexadecimal digits"));
    digits.map(|pair| u8::from_str_radix(pair, 16).expect("hexadecimal digits")).collect()
}

/// What inputs of a target are made from.
fn literals(target: &str, datagrams: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let lines: &[&[u8]] = match target {
        "memcached" => &[
            b"get a b c\r\nset k 0 0 5\r\nvalue\r\ndelete k\r\nmg k v t\r\nincr n 1\r\n",
            b"VALUE a 0 5\r\nvalue\r\nEND\r\n",
            b"HD f0\r\nVA 5 k\r\nvalue\r\n",
            &[0x80, 0x00, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, b'k'],
        ],
        "resp" => &[
            b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1\r\nv\r\n",
            b"*2\r\n$1\r\na\r\n*1\r\n:5\r\n%1\r\n+k\r\n_\r\n",
            b"PING\r\n$-1\r\n-ERR no\r\n",
        ],
        "dns" => {
            &[b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x03web\x04shop\x03sal\x08internal\x00\x00\x1c\x00\x01"]
        }
        _ => &[],
    };
    let lines = lines.iter().map(|line| line.to_vec());
    let parts = datagrams.iter().filter(|datagram| datagram.len() < 510).map(|datagram| {
        let len = u8::try_from(datagram.len().div_ceil(2) + 1).expect("less than 512 bytes");
        [&[len, 0], &datagram[..]].concat()
    });
    match target {
        "wire" | "packets" | "framed" => lines.chain(datagrams.iter().cloned()).collect(),
        "sal" | "connection" | "switch" | "fec" | "sctp" => lines.chain(parts).collect(),
        _ => lines.chain([vec![0; 64]]).collect(),
    }
}

fn mutant(chances: &mut Chances, literals: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = chances.one_of(literals).clone();
    for _ in 0..=chances.below(6) {
        let at = chances.below(bytes.len().max(1));
        let until = (at + 1 + chances.below(16)).min(bytes.len());
        match chances.below(6) {
            0 if at < bytes.len() => bytes[at] ^= 1 << chances.below(8),
            1 if at < bytes.len() => bytes[at] = *chances.one_of(&TELLING),
            2 if at < until => drop(bytes.drain(at..until)),
            3 if at < until => bytes.extend_from_within(at..until),
            4 => bytes.extend_from_slice(chances.one_of::<Vec<u8>>(literals)),
            _ => bytes.truncate(at),
        }
    }
    bytes.truncate(LONGEST_BYTES);
    bytes
}

#[test]
fn no_target_fails_on_what_is_nearly_right() {
    let seeds = std::env::var("MARGAY_SEEDS").map_or(SEEDS, |seeds| seeds.parse().expect("MARGAY_SEEDS is a number"));
    let datagrams = datagrams();
    for (name, target) in TARGETS {
        let literals = literals(name, &datagrams);
        for seed in 0..seeds {
            let bytes = mutant(&mut Chances::new(seed), &literals);
            let held = panic::catch_unwind(AssertUnwindSafe(|| target(&bytes)));
            assert!(held.is_ok(), "target {name}, seed {seed}: {bytes:02x?}");
        }
    }
}

/// A check that cannot fail would check nothing: an answer of the responder of names is one, so it is not answered.
#[test]
fn literal_inputs_reach_what_they_are_for() {
    let datagrams = datagrams();
    assert!(datagrams.iter().any(|datagram| margay_wire::Message::parse(datagram).is_ok()));
    let question = &literals("dns", &datagrams)[0];
    assert!(matches!(margay_control::dns::receive(question), margay_control::dns::Received::Asked(_)));
}
