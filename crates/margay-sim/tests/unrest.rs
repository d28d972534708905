//! Long connections while everything about them changes, from seeds (`margay_sim::unrest`). `MARGAY_SEED=n cargo test
//! -p margay-sim --test unrest one_seed` replays a failure and prints what was done; `MARGAY_SEEDS` sets how many are
//! tried, and `margay-model --long --only unrest` tries a hundred thousand.

use margay_sim::unrest::run;

fn number_from_environment(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn after_unrest_all_find_each_other_again() {
    let (from, seeds) = (number_from_environment("MARGAY_SEED_FROM", 0), number_from_environment("MARGAY_SEEDS", 200));
    let failed: Vec<_> = (from..from + seeds).filter_map(|seed| Some((seed, run(seed).err()?))).collect();
    let short: Vec<_> = failed.iter().map(|(seed, why)| (seed, why.lines().next().unwrap_or_default())).collect();
    assert!(failed.is_empty(), "{} of {seeds} seeds: {short:#?}", failed.len());
}

#[test]
fn one_seed() {
    let seed = number_from_environment("MARGAY_SEED", 5);
    if let Err(why) = run(seed) {
        panic!("seed {seed}: {why}");
    }
}
