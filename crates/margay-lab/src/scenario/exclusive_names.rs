//! `exclusive-names`: one host, and on it one program, serves a name; the others stand by, and take over when it
//! leaves.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;

use super::{Findings, Scenario, site};
use crate::agent::{self, Agents};
use crate::arrivals::{Arrivals, now_ms};
use crate::host::Host;
use crate::lab::Lab;
use crate::program::{Program, wait_for};
use crate::report::Limit::{Below, Exactly};
use crate::report::{Bound, bound};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "exclusive-names",
    summary: "three hosts, the router among them, want one name for themselves; each in turn loses it",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 4] = [
    // A standby asks every second.
    bound("takeover_ms", Below(2000.0)),
    bound("takeovers", Exactly(2.0)),
    bound("wrong_answers", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

const SERVICE: &str = "alone.shop";
const PORT: u16 = 7;
const LIMIT: Duration = Duration::from_secs(20);
const EVERY: Duration = Duration::from_millis(20);

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = site::build("exclusive-names", site::V4, &["alpha", "beta", "client"], dir)?;
    let _agents = Agents::start(&lab)?;
    let (alpha, client) = (lab.host("alpha")?, lab.host("client")?);
    for figure in ["takeovers", "wrong_answers", "failed"] {
        findings.set(figure, 0.0);
    }
    let first = serve(alpha, &["--exclusive"])?;
    await_state(alpha, "registered")?;
    for options in [&["--exclusive"][..], &[]] {
        if let Err(error) = refused_here(alpha, options) {
            findings.note(format!("a second program with {options:?}: {error:#}"));
            findings.figures.add("failed", 1.0);
        }
    }
    let second = serve(lab.host("beta")?, &["--exclusive"])?;
    await_state(lab.host("beta")?, "refused")?;
    let mut arrivals = Arrivals::start(client, &format!("{SERVICE}.sal.internal"), PORT, EVERY, None)?;
    lose(&lab, &mut arrivals, ("alpha", first), "beta", findings)?;
    // Who had it may stand by again, since its first program has ended; and the router's own host may as well.
    let again = serve(alpha, &["--exclusive"])?;
    await_state(alpha, "refused")?;
    drop(again);
    let third = serve(lab.host("router")?, &["--exclusive"])?;
    await_state(lab.host("router")?, "refused")?;
    lose(&lab, &mut arrivals, ("beta", second), "router", findings)?;
    let plain = serve(alpha, &[])?;
    await_state(alpha, "refused")?;
    drop((plain, third));
    Ok(())
}

/// A server that greets with its host's name, for the name.
fn serve(host: &Host, options: &[&str]) -> Result<Program> {
    host.spawn("alone", argv(host, options)?)
}

fn argv(host: &Host, options: &[&str]) -> Result<Vec<String>> {
    let listen = format!("0.0.0.0:{PORT}");
    let greeter = host.words_of_traffic(&["echo", "--listen", &listen, "--greeting", &format!("{}\n", host.name())])?;
    let offer = format!("{SERVICE}:{PORT}");
    let run = ["margay", "run", "--service", &offer].into_iter().chain(options.iter().copied()).chain(["--"]);
    Ok(run.map(str::to_owned).chain(greeter).collect())
}

/// A second program of the host is not started, and hears of the first.
fn refused_here(host: &Host, options: &[&str]) -> Result<()> {
    let output = host.output(argv(host, options)?)?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.status.success() && said.contains("echo --listen"), "{}: {said}", output.status);
    Ok(())
}

/// Waits until a host says so of the name, a refusal with who has it.
fn await_state(host: &Host, wanted: &str) -> Result<()> {
    wait_for(&format!("{wanted} on {}", host.name()), LIMIT, || {
        let list: serde_json::Value = serde_json::from_str(&agent::margay(host, ["service", "list", "--json"])?)?;
        let all = list["services"].as_array().cloned().unwrap_or_default();
        let service = all.iter().find(|service| service["name"] == SERVICE).context("it is not listed")?;
        let text = service["registrations"].to_string();
        match service["state"].as_str() {
            Some(state)
                if state == wanted && (wanted != "refused" || text.contains("which one host alone may serve")) =>
            {
                Ok(())
            }
            state => bail!("its state is {state:?}: {text}"),
        }
    })
}

/// Kills who has the name; the standby answers soon, and nobody else ever does.
fn lose(
    lab: &Lab,
    arrivals: &mut Arrivals,
    (holder, program): (&str, Program),
    standby: &str,
    findings: &mut Findings,
) -> Result<()> {
    let begun_ms = now_ms();
    let before = arrivals.until(begun_ms + 500.0, LIMIT)?.filter(|arrival| arrival.begun_ms > begun_ms);
    let wrong = before.filter(|arrival| arrival.answered != holder).count();
    let killed_ms = now_ms();
    program.signal(Signal::SIGKILL)?;
    wait_for(&format!("{standby}'s turn"), LIMIT, || {
        let found = agent::resolve(lab.host("router")?, SERVICE)?["instances"].clone();
        ensure!(found.as_array().is_some_and(|all| all.len() == 1 && all[0]["host_name"] == standby), "{found}");
        Ok(())
    })?;
    let listed_ms = now_ms();
    let seen = arrivals.until(listed_ms + 500.0, LIMIT)?;
    let after: Vec<_> = seen.filter(|arrival| arrival.begun_ms > killed_ms && !arrival.answered.is_empty()).collect();
    // Who had been answered before the kill was seen is no mistake.
    let late =
        after.iter().filter(|arrival| arrival.answered != standby && arrival.begun_ms > killed_ms + 100.0).count();
    findings.figures.add("wrong_answers", (wrong + late) as f64);
    let first = after.iter().filter(|arrival| arrival.answered == standby);
    let answered_ms = first.map(|arrival| arrival.begun_ms + arrival.took_ms).fold(f64::INFINITY, f64::min);
    ensure!(answered_ms.is_finite(), "{standby} has the name and answers nobody");
    findings.note(format!("{standby} answered {:.0} ms after {holder}'s end", answered_ms - killed_ms));
    findings.set("takeover_ms", findings.figures.get("takeover_ms").max(answered_ms - killed_ms));
    findings.figures.add("takeovers", 1.0);
    Ok(())
}
