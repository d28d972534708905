//! `nonces`: whether a key and nonce are ever used for two packets, in many small worlds of the core that ships
//! (`margay-model --only nonces`): hand-overs that fail, changes of stacks, moves, agents that start again, and older
//! copies of state directories. A hundred thousand seeds where runs are long.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{Findings, Scenario, is_long, pair};
use crate::fabric::margay_program;
use crate::program::output_within;
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "nonces",
    summary: "no key and nonce twice: small worlds by seeds, with failed hand-overs, changes of stacks, moves, restarts and older \
              copies of state directories",
    bounds: &BOUNDS,
    run,
};

/// Seeds where runs are short, and of the check itself where they are long.
const SEEDS: u64 = 100;
const LONG_SEEDS: u64 = 100_000;
const LIMIT: Duration = Duration::from_secs(120);
const LONG_LIMIT: Duration = Duration::from_secs(2 * 3600);

const BOUNDS: [Bound; 6] = [
    bound("seeds", AtLeast(SEEDS as f64)),
    bound("worlds", AtLeast(2.0 * SEEDS as f64)),
    // Packets that were encrypted under a key and nonce that had been used.
    bound("reused", Exactly(0.0)),
    // What the figure above is about has happened: connections that stayed after a failed hand-over, and restarts.
    bound("stayed", AtLeast(SEEDS as f64 / 4.0)),
    bound("restarts", AtLeast(SEEDS as f64)),
    bound("failed", Exactly(0.0)),
];

fn run(_: &Path, findings: &mut Findings) -> Result<()> {
    pair::attempt_part("the worlds", findings, search);
    findings.figures.add("failed", 0.0);
    Ok(())
}

fn search(findings: &mut Findings) -> Result<()> {
    let program = margay_program()?.with_file_name("margay-model");
    ensure!(program.exists(), "there is no {}; it is built with: make build", program.display());
    let (seeds, limit) = if is_long() { (LONG_SEEDS, LONG_LIMIT) } else { (SEEDS, LIMIT) };
    let mut command = Command::new(program);
    command.args(["--only", "nonces", "--seeds", &seeds.to_string()]);
    let output = output_within(&mut command, limit)?;
    let said = String::from_utf8_lossy(&output.stdout);
    let lines = said.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let check = lines.into_iter().find(|line| line["check"] == "nonces");
    let check =
        check.with_context(|| format!("it says nothing: {}", String::from_utf8_lossy(&output.stderr).trim()))?;
    for figure in ["seeds", "worlds", "reused", "stayed", "restarts"] {
        findings.set(figure, check[figure].as_f64().with_context(|| format!("no {figure}"))?);
    }
    findings.note(check.to_string());
    Ok(())
}
