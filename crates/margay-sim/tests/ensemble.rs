//! Ensembles from seeds (`margay_sim::ensemble`). `MARGAY_SEED=n cargo test -p margay-sim --test ensemble one_seed`
//! replays a failure; `MARGAY_SEEDS` sets how many are tried, and the scenario `ensemble-model` tries ten thousand and
//! searches small ensembles in full.

use margay_ensemble::{Kind, Sound};
use margay_sim::ensemble::large::{run, run_under};
use margay_sim::ensemble::small::{Beginning, Budget, Load, SmallEnsemble, Step};
use margay_sim::ensemble::{EarlyAcknowledgement, HoleForgotten, NoDeferral, NoWatermark};

fn number_from_environment(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn nothing_is_lost_doubled_or_out_of_order() {
    let seeds = number_from_environment("MARGAY_SEEDS", 200);
    let failed: Vec<_> = (0..seeds).filter_map(|seed| Some((seed, run(seed).err()?))).collect();
    assert!(failed.is_empty(), "{} of {seeds} seeds: {failed:#?}", failed.len());
}

#[test]
fn one_seed() {
    let seed = number_from_environment("MARGAY_SEED", 5);
    let run = run(seed).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    assert!(run.frames > 0);
}

#[test]
fn what_is_broken_is_found() {
    let is_found = |run: fn(u64) -> Result<_, String>| (0..400).any(|seed| run(seed).is_err());
    assert!(is_found(run_under::<NoDeferral>), "patches that are released at once");
    assert!(is_found(run_under::<NoWatermark>), "members that are told that all is complete");
    assert!(is_found(run_under::<HoleForgotten>), "holes that are forgotten at a join");
    assert!(is_found(run_under::<EarlyAcknowledgement>), "acknowledgements by the switch");
}

/// Frames 1 to 3 come before frame 0; everything else is quiet.
#[test]
fn a_small_ensemble_comes_to_rest() {
    let budget = Budget { lose: 1, ..Budget::default() };
    for kind in [Kind::Margay, Kind::Foreign] {
        let beginning = Beginning { load: Load::Member, kinds: [kind; 3], members: 2, budget, choices: &[] };
        let mut world = SmallEnsemble::<Sound>::new(&beginning, [0, 1, 0, 1]);
        world.play(Step::Lose(0));
        assert!(world.steps().contains(&Step::Quiet));
        world.play(Step::Quiet);
        assert_eq!((world.wrong(), world.steps()), (None, Vec::new()));
    }
}
