//! Whether a nonce is ever used twice under its key, in many small worlds (`margay_sim::nonces`).

use std::ops::Range;
use std::sync::Mutex;
use std::time::Instant;

use margay_sim::nonces::search::{self, Found};
use serde_json::json;

use crate::{say, wandering};

/// By this name it is asked for.
pub const NAME: &str = "nonces";
/// Seeds of the long form.
pub const LONG: u64 = 100_000;

/// Runs the worlds of every seed and says what was found. Gives how many seeds were wrong.
pub fn explore(seeds: Range<u64>, threads: usize) -> usize {
    let start = Instant::now();
    let tried = seeds.end - seeds.start;
    let all = Mutex::new(Found::default());
    let wrong = wandering::explore(seeds, threads, &|seed| {
        let found = search::run(seed);
        *all.lock().expect("nobody panics") += found;
        match found.reused {
            0 => Ok(()),
            reused => Err(format!("{reused} packets were encrypted under a key and nonce that had been used")),
        }
    });
    let Found { worlds, encrypted, reused, stayed, gone, restarts, changes } = *all.lock().expect("nobody panics");
    say(&json!({
        "check": NAME, "seeds": tried, "worlds": worlds, "encrypted": encrypted, "reused": reused, "stayed": stayed,
        "gone": gone, "restarts": restarts, "changes": changes, "seconds": start.elapsed().as_secs_f64(),
        "wrong": wrong,
    }));
    wrong.len()
}
