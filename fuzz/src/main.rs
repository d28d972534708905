//! The targets of `margay-fuzz` under libFuzzer. `MARGAY_FUZZ` names the target; the arguments are libFuzzer's.
//! `scripts/fuzz` builds this with counters of coverage, and runs each target for a while.
#![no_main]

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use margay_fuzz::{TARGETS, Target};

fn target() -> Target {
    static TARGET: OnceLock<Target> = OnceLock::new();
    *TARGET.get_or_init(|| {
        let name = std::env::var("MARGAY_FUZZ").expect("MARGAY_FUZZ names a target");
        let found = TARGETS.iter().find(|(known, _)| *known == name);
        found.unwrap_or_else(|| panic!("no target is named {name:?}")).1
    })
}

fuzz_target!(|bytes: &[u8]| target()(bytes));
