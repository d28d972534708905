//! Targets of fuzzing: whatever reads bytes from outside. Each target takes any bytes, and fails by a panic: of the
//! code under test, whose overflows and assertions are checked, or of an assertion here.
//!
//! `tests/targets.rs` gives every target mutated inputs from seeds. The program of the workspace `fuzz/`, which
//! `scripts/fuzz` runs, lets libFuzzer choose them by what code they reach.

mod control;
mod core_machine;
mod ensemble;
mod programs;
mod records;
mod stack;
mod wire;

/// Reads bytes that somebody else has made. Panics where they are read wrongly.
pub type Target = fn(&[u8]);

/// All targets, by name; `scripts/fuzz` reads the names here.
pub const TARGETS: [(&str, Target); 15] = [
    ("certificates", records::certificates),
    ("connection", ensemble::connection),
    ("control", control::records),
    ("dns", control::dns),
    ("fec", stack::fec),
    ("framed", ensemble::framed),
    ("memcached", programs::memcached),
    ("packets", wire::packets),
    ("program", programs::program_socket),
    ("records", records::records),
    ("resp", programs::resp),
    ("sal", core_machine::sal),
    ("sctp", stack::sctp),
    ("switch", ensemble::switch),
    ("wire", wire::wire),
];

/// The input as a sequence: each part has its length in pairs of bytes, one byte, before it; the last one is what
/// remains.
fn parts(mut bytes: &[u8]) -> Vec<&[u8]> {
    let mut parts = Vec::new();
    while let Some((len, rest)) = bytes.split_first() {
        let (part, behind) = rest.split_at(rest.len().min(usize::from(*len) * 2));
        parts.push(part);
        bytes = behind;
    }
    parts
}
