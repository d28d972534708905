//! `model`: the checkers, and how much they look at: the Promela models of moves, hand-overs and programs that leave
//! under spin (`verify/`), every run of small worlds of the core that ships under stateright, and large worlds of it by
//! seeds (`margay-model`). The large sizes where runs are long.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::{Findings, Scenario, is_long, pair};
use crate::fabric::margay_program;
use crate::program::output_within;
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "model",
    summary: "models of moves and hand-overs under spin; the core that ships in small worlds under stateright, in large ones by \
              seeds",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 6] = [
    bound("spin_states", AtLeast(500_000.0)),
    bound("stateright_states", AtLeast(50_000.0)),
    bound("sim_seeds", AtLeast(200.0)),
    bound("broken_missed", Exactly(0.0)),
    bound("violations", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

/// The models, and what runs them.
const VERIFY: [(&str, &str); 7] = [
    ("run", include_str!("../../../../verify/run")),
    ("rsyn.pml", include_str!("../../../../verify/rsyn.pml")),
    ("move.pml", include_str!("../../../../verify/move.pml")),
    ("choice.pml", include_str!("../../../../verify/choice.pml")),
    ("clone.pml", include_str!("../../../../verify/clone.pml")),
    ("handover.pml", include_str!("../../../../verify/handover.pml")),
    ("parting.pml", include_str!("../../../../verify/parting.pml")),
];
const LIMIT: Duration = Duration::from_secs(300);
const LONG_LIMIT: Duration = Duration::from_secs(3600);

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    findings.set("violations", 0.0);
    pair::attempt_part("spin", findings, |findings| {
        let mut command = Command::new("python3");
        command.arg(unpack(dir)?).arg("--json");
        let total = check(command, findings)?;
        let number = |field: &str| total[field].as_f64().with_context(|| format!("no {field}"));
        findings.set("spin_states", number("spin_states")?);
        findings.set("spin_models", number("models")?);
        findings.set("broken_missed", number("broken")? - number("broken_found")?);
        findings.figures.add("violations", number("violations")?);
        Ok(())
    });
    pair::attempt_part("the core", findings, |findings| {
        let program = margay_program()?.with_file_name("margay-model");
        ensure!(program.exists(), "there is no {}; it is built with: make build", program.display());
        let total = check(Command::new(program), findings)?;
        let number = |field: &str| total[field].as_f64().with_context(|| format!("no {field}"));
        findings.set("stateright_states", number("stateright_states")?);
        findings.set("sim_seeds", number("sim_seeds")?);
        findings.figures.add("violations", number("violations")?);
        Ok(())
    });
    findings.figures.add("failed", 0.0);
    Ok(())
}

/// Writes the models to a directory of their own; gives the program that runs them.
fn unpack(dir: &Path) -> Result<PathBuf> {
    let dir = dir.join("verify");
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    for (name, text) in VERIFY {
        let path = dir.join(name);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(dir.join("run"))
}

/// Runs a checker, which says a JSON object for each check and one for all; gives that. What went wrong is noted.
fn check(mut command: Command, findings: &mut Findings) -> Result<Value> {
    command.args(is_long().then_some("--long"));
    let output = output_within(&mut command, if is_long() { LONG_LIMIT } else { LIMIT })?;
    let said = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<Value> = said.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let is_wrong =
        |line: &&Value| line["pass"] == false || line["wrong"].as_array().is_some_and(|wrong| !wrong.is_empty());
    let [checks @ .., total] = &lines[..] else {
        bail!("{command:?} says nothing: {}", String::from_utf8_lossy(&output.stderr).trim());
    };
    checks.iter().filter(is_wrong).for_each(|line| findings.note(line.to_string()));
    let all: f64 = checks.iter().filter_map(|line| line["seconds"].as_f64()).sum();
    findings.note(format!("{} checks, {all:.0} s: {total}", checks.len()));
    Ok(total.clone())
}
