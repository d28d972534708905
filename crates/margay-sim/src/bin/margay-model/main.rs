//! Checks the core that ships: every run of small worlds, by stateright, and many random runs of large ones, by seeds.
//!
//! ```text
//! margay-model [--long] [--only NAME] [--seeds N] [--seed N]
//! ```
//!
//! Prints one JSON object for each check; the last line sums up: `stateright_states`, `sim_seeds`, `violations`. The
//! exit status is 0 if there are none. `--only` takes one search, `wandering`, `unrest` or `nonces`, which
//! runs only when it is asked for; `--seed` one seed, of `wandering` if nothing else is said.

mod changing;
mod handing;
mod meeting;
mod moving;
mod nonces;
mod search;
mod wandering;

use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

use changing::{ABOVE, Carried, TOGETHER};
use handing::OneEnd;
use margay_core::Stack::{self, Plain, Secure};
use margay_sim::small::Budget;
use margay_sim::small::changing::{Lack, Orders};
use margay_sim::small::meeting::Acquaintance::{self, Forgotten, Known, Strangers};
use margay_sim::small::moving::Travels;
use meeting::Attempt;
use moving::{AGREE, Whereabouts};
use search::{Found, explore};
use serde_json::{Value, json};

const SEEDS: u64 = 200;
/// Of a large world: its name, what runs it, and how many seeds are tried in the long form.
type Large = (&'static str, fn(u64) -> Result<(), String>, u64);
const LARGE: [Large; 2] = [("wandering", wandering::run, 10_000), ("unrest", margay_sim::unrest::run, 100_000)];
const NONE: Budget =
    Budget { lose: 0, duplicate: 0, replay: 0, wait: 0, early: 0, doubt: 0, cancel: 0, restart: 0, demand: 0 };

/// What a search is of.
enum World {
    Meeting(Acquaintance),
    Moving(Travels),
    Handing,
    Changing(Orders),
}

struct Check {
    name: &'static str,
    world: World,
    budget: Budget,
    is_long: bool,
    /// Of a world that lacks something on purpose: the property that must be found not to hold.
    wrong: Option<&'static str>,
}

const fn meet(name: &'static str, acquaintance: Acquaintance, budget: Budget) -> Check {
    Check { name, world: World::Meeting(acquaintance), budget, is_long: false, wrong: None }
}

type Places = &'static [&'static [u8]];

const fn travel(name: &'static str, places: [Places; 2], router: bool, budget: Budget) -> Check {
    Check { name, world: World::Moving(Travels { places, router }), budget, is_long: false, wrong: None }
}

const fn hand(name: &'static str, budget: Budget) -> Check {
    Check { name, world: World::Handing, budget, is_long: false, wrong: None }
}

const fn change(name: &'static str, from: Stack, to: [Option<Stack>; 2], budget: Budget) -> Check {
    let world = World::Changing(Orders { from, to, lacks: None });
    Check { name, world, budget, is_long: false, wrong: None }
}

/// As [`change`], of a world that lacks something, so that it must be found wrong.
const fn lacking(name: &'static str, orders: Orders, budget: Budget, wrong: &'static str) -> Check {
    Check { name, world: World::Changing(orders), budget, is_long: false, wrong: Some(wrong) }
}

const fn long(check: Check) -> Check {
    Check { is_long: true, ..check }
}

const fn goes_wrong(name: &'static str, check: Check, wrong: &'static str) -> Check {
    Check { name, wrong: Some(wrong), ..check }
}

/// A host that stays, and others that go from place to place.
const HOME: Places = &[&[1]];
const ONCE: Places = &[&[1], &[2]];
const TWICE: Places = &[&[1], &[2], &[3]];
const LOSES_ONE: Places = &[&[1, 2], &[2]];

const CHECKS: &[Check] = &[
    meet("strangers-meet", Strangers, Budget { lose: 1, duplicate: 1, wait: 2, ..NONE }),
    meet("known-hosts-meet", Known, Budget { lose: 1, duplicate: 1, wait: 2, ..NONE }),
    meet("forgotten-hosts-meet", Forgotten, Budget { lose: 1, wait: 2, ..NONE }),
    meet("strangers-meet-replayed", Strangers, Budget { replay: 1, wait: 2, ..NONE }),
    travel("one-moves", [ONCE, HOME], false, Budget { lose: 1, duplicate: 1, wait: 2, early: 1, ..NONE }),
    travel("one-moves-replayed", [ONCE, HOME], false, Budget { lose: 1, replay: 1, wait: 2, ..NONE }),
    travel("move-in-a-move", [TWICE, HOME], false, Budget { lose: 1, duplicate: 1, wait: 2, ..NONE }),
    travel("one-loses-an-address", [LOSES_ONE, HOME], false, Budget { lose: 1, doubt: 1, ..NONE }),
    travel("both-move", [ONCE, ONCE], true, NONE),
    // As it would be without the router (`no-router` of the models).
    goes_wrong("both-move-unaided", travel("", [ONCE, ONCE], false, Budget { wait: 1, ..NONE }), AGREE),
    hand("hand-over", Budget { lose: 1, wait: 2, ..NONE }),
    hand("hand-over-restart", Budget { restart: 1, wait: 1, ..NONE }),
    change("unseal-and-demand", Secure, [Some(Plain), None], Budget { lose: 1, wait: 1, demand: 1, ..NONE }),
    change("seal-and-restart", Plain, [Some(Secure), None], Budget { restart: 1, wait: 1, ..NONE }),
    lacking(
        "demand-untold",
        Orders { from: Secure, to: [Some(Plain), None], lacks: Some(Lack::Demand) },
        Budget { demand: 1, ..NONE },
        ABOVE,
    ),
    lacking(
        "word-kept-back",
        Orders { from: Secure, to: [Some(Plain), None], lacks: Some(Lack::Word) },
        Budget { restart: 1, wait: 1, ..NONE },
        TOGETHER,
    ),
    long(hand("hand-over-cancelled", Budget { cancel: 1, wait: 1, early: 1, ..NONE })),
    long(hand("hand-over-cancelled-late", Budget { cancel: 1, wait: 2, early: 1, ..NONE })),
    long(hand("hand-over-restart-and-lose", Budget { lose: 1, restart: 1, wait: 2, ..NONE })),
    long(meet("forgotten-hosts-meet-replayed", Forgotten, Budget { lose: 1, replay: 1, wait: 3, ..NONE })),
    long(travel("both-move-and-lose", [ONCE, ONCE], true, Budget { lose: 1, ..NONE })),
];

impl Check {
    /// What speaks against the check, of what was found wrong.
    fn judge(&self, found: Vec<String>) -> Vec<String> {
        match self.wrong {
            Some(wanted) if found.iter().any(|text| text.contains(wanted)) => Vec::new(),
            Some(wanted) => vec![format!("broken on purpose, and not found: {wanted}")],
            None => found,
        }
    }
}

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
                    order.only.get_or_insert("wandering".into());
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

fn say(word: &Value) {
    // Whoever does not listen any more wants the exit status.
    let _ = writeln!(std::io::stdout(), "{word}");
}

fn main() -> ExitCode {
    let Some(order) = Order::read() else {
        // The same.
        let _ = writeln!(std::io::stderr(), "usage: margay-model [--long] [--only NAME] [--seeds N] [--seed N]");
        return ExitCode::from(2);
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let (mut states, mut seeds, mut violations, mut checks) = (0, 0, 0, 0);
    for check in CHECKS.iter().filter(|check| order.takes(check.name, check.is_long)) {
        let start = Instant::now();
        let Found { states: found, depth, wrong } = match check.world {
            World::Meeting(acquaintance) => explore::<Attempt>(acquaintance, check.budget, threads),
            World::Moving(travels) => explore::<Whereabouts>(travels, check.budget, threads),
            World::Handing => explore::<OneEnd>((), check.budget, threads),
            World::Changing(orders) => explore::<Carried>(orders, check.budget, threads),
        };
        let wrong = check.judge(wrong);
        (states, violations, checks) = (states + found, violations + wrong.len(), checks + 1);
        let seconds = start.elapsed().as_secs_f64();
        say(&json!({"check": check.name, "states": found, "depth": depth, "seconds": seconds, "wrong": wrong}));
    }
    for (name, run, long) in LARGE.into_iter().filter(|(name, ..)| order.takes(name, false)) {
        let count = order.seeds.unwrap_or(if order.is_long { long } else { SEEDS });
        let range = order.seed.map_or(0..count, |seed| seed..seed + 1);
        let start = Instant::now();
        let tried = range.end - range.start;
        let wrong = wandering::explore(range, threads, &run);
        (seeds, violations, checks) = (seeds + tried, violations + wrong.len(), checks + 1);
        let seconds = start.elapsed().as_secs_f64();
        say(&json!({"check": name, "seeds": tried, "seconds": seconds, "wrong": wrong}));
    }
    if order.only.as_deref() == Some(nonces::NAME) {
        let count = order.seeds.unwrap_or(if order.is_long { nonces::LONG } else { SEEDS });
        let range = order.seed.map_or(0..count, |seed| seed..seed + 1);
        let (tried, wrong) = (range.end - range.start, nonces::explore(range, threads));
        (seeds, violations, checks) = (seeds + tried, violations + wrong, checks + 1);
    }
    say(&json!({"stateright_states": states, "sim_seeds": seeds, "violations": violations}));
    if checks == 0 {
        let _ = writeln!(std::io::stderr(), "margay-model: there is no such check");
    }
    ExitCode::from(u8::from(violations > 0 || checks == 0))
}
