//! Checks the switch of ensembles: every run of small ones, by stateright, and many random runs of large ones, by
//! seeds.
//!
//! ```text
//! margay-ensemble-model [--long] [--only NAME] [--seeds N] [--seed N]
//! ```
//!
//! Prints one JSON object for each check; the last line sums up: `states`, `sim_seeds`, `violations`, `broken`,
//! `broken_found`. The exit status is 0 if nothing is violated and all that is broken on purpose was found.

mod search;

use std::io::Write;
use std::ops::Range;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use margay_ensemble::{Kind, Rules, Sound};
use margay_sim::ensemble::large::{Run, run_under};
use margay_sim::ensemble::small::{Beginning, Budget, Load};
use margay_sim::ensemble::{EarlyAcknowledgement, HoleForgotten, NoDeferral, NoWatermark};
use search::{Found, explore};
use serde_json::{Value, json};

const SEEDS: u64 = 10_000;
const SEEDS_LONG: u64 = 200_000;
/// Seeds by which something broken must be found.
const SEEDS_BROKEN: u64 = 2_000;
const NONE: Budget = Budget { lose: 0, duplicate: 0, repeat: 0, wait: 0, join: 0, drain: 0, die: 0 };
const OURS: [Kind; 3] = [Kind::Margay; 3];
const FOREIGN: [Kind; 3] = [Kind::Foreign; 3];
const BOTH: [Kind; 3] = [Kind::Margay, Kind::Foreign, Kind::Margay];

/// Whose the frames are: by turns.
const TURNS: &[u8] = &[0b1010];
/// All there are, up to the names of the members.
const ALL: &[u8] = &[0, 2, 4, 6, 8, 10, 12, 14];

/// What runs a search, under which rules.
type Explore = fn(&Beginning, usize) -> Found;

struct Check {
    name: &'static str,
    explore: Explore,
    beginning: Beginning,
    is_long: bool,
    /// Of rules that are broken on purpose: what must be found wrong.
    wrong: Option<&'static str>,
}

const fn check(name: &'static str, load: Load, kinds: [Kind; 3], members: usize, budget: Budget) -> Check {
    let beginning = Beginning { load, kinds, members, budget, choices: TURNS };
    Check { name, explore: explore::<Sound>, beginning, is_long: false, wrong: None }
}

const fn long(check: Check) -> Check {
    Check { is_long: true, beginning: Beginning { choices: ALL, ..check.beginning }, ..check }
}

const fn broken(explore: Explore, wrong: &'static str, check: Check) -> Check {
    Check { explore, wrong: Some(wrong), ..check }
}

const LOST: &str = "a frame was lost";
const DISORDER: &str = "a program was given frames out of order";
const EARLY: &str = "what no member has was acknowledged";

use Load::{Fragments, Member, Mixed, Stream};

const CHECKS: &[Check] = &[
    check("watermarks", Member, OURS, 2, NONE),
    check("watermarks-lossy", Member, OURS, 2, Budget { lose: 1, ..NONE }),
    check("watermarks-late", Member, OURS, 2, Budget { wait: 1, ..NONE }),
    check("patches", Member, FOREIGN, 2, NONE),
    check("patches-lossy", Member, FOREIGN, 2, Budget { lose: 1, ..NONE }),
    check("patches-doubled", Member, FOREIGN, 2, Budget { duplicate: 1, ..NONE }),
    check("both-kinds", Mixed, BOTH, 2, NONE),
    check("streams", Stream, BOTH, 2, NONE),
    check("fragments", Fragments, FOREIGN, 2, NONE),
    check("join", Member, BOTH, 1, Budget { join: 1, ..NONE }),
    check("drain", Stream, BOTH, 2, Budget { drain: 1, ..NONE }),
    check("death", Member, BOTH, 2, Budget { die: 1, ..NONE }),
    check("death-of-a-stream", Stream, BOTH, 2, Budget { die: 1, ..NONE }),
    long(check("watermarks-all", Member, OURS, 2, Budget { lose: 1, duplicate: 1, ..NONE })),
    long(check("patches-all", Mixed, FOREIGN, 2, Budget { lose: 1, duplicate: 1, ..NONE })),
    long(check("members-come-and-go", Member, BOTH, 2, Budget { join: 1, drain: 1, die: 1, ..NONE })),
    long(check("death-and-loss", Fragments, BOTH, 2, Budget { lose: 1, die: 1, repeat: 1, ..NONE })),
    broken(explore::<NoDeferral>, LOST, check("no-deferral", Member, FOREIGN, 2, Budget { lose: 1, ..NONE })),
    broken(explore::<NoWatermark>, DISORDER, check("no-watermark", Member, OURS, 2, NONE)),
    broken(explore::<HoleForgotten>, DISORDER, check("hole-forgotten", Member, OURS, 1, Budget { join: 1, ..NONE })),
    broken(
        explore::<HoleForgotten>,
        DISORDER,
        check("hole-forgotten-foreign", Member, FOREIGN, 1, Budget { join: 1, ..NONE }),
    ),
    broken(explore::<EarlyAcknowledgement>, EARLY, check("acknowledged-early", Member, BOTH, 2, NONE)),
];

/// Of rules that are broken on purpose: random runs must find them as well.
const BROKEN_RUNS: [(&str, Attempt); 4] = [
    ("no-deferral-seeds", run_under::<NoDeferral>),
    ("no-watermark-seeds", run_under::<NoWatermark>),
    ("hole-forgotten-seeds", run_under::<HoleForgotten>),
    ("acknowledged-early-seeds", run_under::<EarlyAcknowledgement>),
];

type Attempt = fn(u64) -> Result<Run, String>;

/// What was asked for.
struct Order {
    is_long: bool,
    only: Option<String>,
    seeds: Option<u64>,
    seed: Option<u64>,
}

impl Order {
    fn read() -> Option<Self> {
        let mut order = Self { is_long: false, only: None, seeds: None, seed: None };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            match word.as_str() {
                "--long" => order.is_long = true,
                "--only" => order.only = Some(words.next()?),
                "--seeds" => order.seeds = Some(words.next()?.parse().ok()?),
                "--seed" => {
                    order.seed = Some(words.next()?.parse().ok()?);
                    order.only.get_or_insert("seeds".into());
                }
                _ => return None,
            }
        }
        Some(order)
    }

    fn takes(&self, name: &str, is_long: bool) -> bool {
        match &self.only {
            Some(only) => only == name,
            None => self.is_long || !is_long,
        }
    }
}

/// The sum of all checks.
#[derive(Default)]
struct Sum {
    states: usize,
    seeds: u64,
    violations: usize,
    broken: usize,
    broken_found: usize,
    checks: usize,
}

impl Sum {
    /// What speaks against a check: what was found wrong, or that something broken was not found.
    fn judge(&mut self, found: Vec<String>, wanted: Option<&str>) -> Vec<String> {
        self.checks += 1;
        let Some(wanted) = wanted else {
            self.violations += found.len();
            return found;
        };
        self.broken += 1;
        if found.iter().any(|text| text.contains(wanted)) {
            self.broken_found += 1;
            return Vec::new();
        }
        vec![format!("broken on purpose, and not found: {wanted}; but: {found:?}")]
    }

    fn search(&mut self, check: &Check, threads: usize) {
        let start = Instant::now();
        let Found { states, depth, wrong } = (check.explore)(&check.beginning, threads);
        let wrong = self.judge(wrong, check.wrong);
        self.states += states;
        let seconds = start.elapsed().as_secs_f64();
        say(&json!({"check": check.name, "states": states, "depth": depth, "seconds": seconds, "wrong": wrong}));
    }

    fn run(&mut self, name: &str, run: Attempt, seeds: Range<u64>, threads: usize, is_broken: bool) {
        let start = Instant::now();
        let count = seeds.end - seeds.start;
        let Tried { wrong, frames, ended } = try_all(seeds, threads, run, is_broken);
        let wrong = self.judge(wrong, is_broken.then_some("seed"));
        if !is_broken {
            self.seeds += count;
        }
        let seconds = start.elapsed().as_secs_f64();
        say(&json!({
            "check": name, "seeds": count, "frames": frames, "ended": ended, "seconds": seconds, "wrong": wrong,
        }));
    }
}

fn say(word: &Value) {
    // Whoever does not listen any more wants the exit status.
    let _ = writeln!(std::io::stdout(), "{word}");
}

struct Tried {
    wrong: Vec<String>,
    frames: u64,
    ended: u64,
}

/// Tries seeds on several threads; where one find is enough, up to that.
fn try_all(seeds: Range<u64>, threads: usize, run: Attempt, is_one_enough: bool) -> Tried {
    let (next, frames, ended) = (AtomicU64::new(seeds.start), AtomicU64::new(0), AtomicU64::new(0));
    let wrong = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Relaxed);
                    if seed >= seeds.end {
                        return;
                    }
                    match run(seed) {
                        Ok(run) => {
                            frames.fetch_add(run.frames as u64, Relaxed);
                            ended.fetch_add(u64::from(run.has_ended), Relaxed);
                        }
                        Err(why) => {
                            let mut wrong = wrong.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                            wrong.push(format!("seed {seed}: {why}"));
                            if is_one_enough {
                                next.store(seeds.end, Relaxed);
                            }
                        }
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    Tried { wrong, frames: frames.into_inner(), ended: ended.into_inner() }
}

fn main() -> ExitCode {
    let Some(order) = Order::read() else {
        // The same.
        let _ =
            writeln!(std::io::stderr(), "usage: margay-ensemble-model [--long] [--only NAME] [--seeds N] [--seed N]");
        return ExitCode::from(2);
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut sum = Sum::default();
    for check in CHECKS.iter().filter(|check| order.takes(check.name, check.is_long)) {
        sum.search(check, threads);
    }
    if order.takes("seeds", false) {
        let count = order.seeds.unwrap_or(if order.is_long { SEEDS_LONG } else { SEEDS });
        let seeds = order.seed.map_or(0..count, |seed| seed..seed + 1);
        sum.run("seeds", run_under::<Sound>, seeds, threads, false);
    }
    for (name, run) in BROKEN_RUNS.into_iter().filter(|(name, _)| order.takes(name, false)) {
        sum.run(name, run, 0..SEEDS_BROKEN, threads, true);
    }
    say(&json!({
        "states": sum.states, "sim_seeds": sum.seeds, "violations": sum.violations, "broken": sum.broken,
        "broken_found": sum.broken_found,
    }));
    if sum.checks == 0 {
        let _ = writeln!(std::io::stderr(), "margay-ensemble-model: there is no such check");
    }
    let is_bad = sum.violations > 0 || sum.broken_found < sum.broken || sum.checks == 0;
    ExitCode::from(u8::from(is_bad))
}

/// Rules that can be searched under.
trait Searchable: Rules + Clone + Default + std::fmt::Debug + std::hash::Hash + PartialEq + Send + Sync + 'static {}

impl<R: Rules + Clone + Default + std::fmt::Debug + std::hash::Hash + PartialEq + Send + Sync + 'static> Searchable
    for R
{
}
