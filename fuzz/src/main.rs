//! Coverage-guided fuzz targets of everything that reads bytes from outside. `MARGAY_FUZZ` names the target; the other
//! arguments are libFuzzer's. `scripts/fuzz` builds this with counters of coverage, and runs each target for a while.
//!
//! A target fails by a panic: of the code under test, whose overflows and assertions are checked, or of an assertion
//! here.
#![no_main]

mod control;
mod core_machine;
mod ensemble;
mod programs;
mod records;
mod stack;
mod wire;

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;

/// Reads bytes that somebody else has made.
type Target = fn(&[u8]);

/// All targets; `scripts/fuzz` reads the names here.
const TARGETS: [(&str, Target); 14] = [
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
    ("switch", ensemble::switch),
    ("wire", wire::wire),
];

fn target() -> Target {
    static TARGET: OnceLock<Target> = OnceLock::new();
    *TARGET.get_or_init(|| {
        let name = std::env::var("MARGAY_FUZZ").expect("MARGAY_FUZZ names a target");
        let found = TARGETS.iter().find(|(known, _)| *known == name);
        found.unwrap_or_else(|| panic!("no target is named {name:?}")).1
    })
}

/// The input as a sequence: each part has a length of one byte before it, and the last one is what remains.
fn parts(mut bytes: &[u8]) -> Vec<&[u8]> {
    let mut parts = Vec::new();
    while let Some((len, rest)) = bytes.split_first() {
        let (part, behind) = rest.split_at(rest.len().min(usize::from(*len) * 2));
        parts.push(part);
        bytes = behind;
    }
    parts
}

fuzz_target!(|bytes: &[u8]| target()(bytes));
