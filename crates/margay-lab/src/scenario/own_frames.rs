//! `own-frames`: programs with framed sockets of the SDKs, through a switch. Two servers use the Rust SDK, a third one
//! that joins under load the Python package, a fourth the C library. One server dies. The client hears what became of
//! each frame, by an answer or by the word that it is lost, and the connection lives on. Clients in Python and C ask as
//! well, and a server without a switch.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;

use super::af_serval::programs::Programs;
use super::ensemble::{await_deaths, await_members, await_out, shown};
use super::{Findings, Scenario, site};
use crate::agent::Agents;
use crate::command::progress;
use crate::host::Host;
use crate::program::{Program, wait_for};
use crate::python;
use crate::report::Limit::{AtLeast, AtMost, Exactly};
use crate::report::{Bound, bound};
use crate::series::Series;
use crate::traffic::Framed;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "own-frames",
    summary: "programs with framed sockets, in Rust, Python and C, through a switch while servers join and one dies",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 11] = [
    bound("wrong", Exactly(0.0)),
    // No more than was open when the server died.
    bound("lost", AtMost(32.0)),
    bound("unanswered", Exactly(0.0)),
    bound("lost_without_a_death", Exactly(0.0)),
    bound("deaths", Exactly(1.0)),
    // The switch need not wait for a silence.
    bound("told_of_death", Exactly(1.0)),
    // Those in Python and C have their share.
    bound("joined_answers", AtLeast(50.0)),
    bound("joined_c_answers", AtLeast(50.0)),
    bound("python_answers", Exactly(4.0)),
    bound("c_answers", Exactly(4.0)),
    bound("answers", AtLeast(1000.0)),
];

const ENSEMBLE: &str = "work.shop";
const MEMBERS: &str = "work-members.shop";
const ALONE: &str = "alone.shop";
const HOSTS: [&str; 4] = ["m1", "m2", "m3", "m4"];
/// Answers between two events.
const CALM: u64 = 300;
const LIMIT: Duration = Duration::from_secs(30);
const SERVER: &str = include_str!("../../../../sdk/python/examples/frames_server.py");
const CLIENT: &str = include_str!("../../../../sdk/python/examples/frames_client.py");

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let programs = Programs::make(dir)?;
    let names = [&HOSTS[..], &["switch", "client"]].concat();
    let lab = site::build(SCENARIO.name, site::V4, &names, dir)?;
    let _agents = Agents::start(&lab)?;
    let switch = lab.host("switch")?;
    let client = lab.host("client")?;
    let _first = serve(lab.host("m1")?, MEMBERS, "m1")?;
    let second = serve(lab.host("m2")?, MEMBERS, "m2")?;
    let words = ["margay", "ensemble", "serve", ENSEMBLE, "--members", MEMBERS, "--protocol", "frames"];
    let switching = switch.spawn("switch", words)?;
    await_members(switch, ENSEMBLE, 2)?;
    let load = Series::<Framed>::start(client, &["frames-ask".to_owned(), ENSEMBLE.to_owned()])?;
    calm(&load)?;
    let _third = python::sdk(lab.host("m3")?, "frames_server.py", SERVER, &[MEMBERS, "m3"])?;
    await_members(switch, ENSEMBLE, 3)?;
    progress("a server in Python has joined");
    calm(&load)?;
    let _fourth = lab.host("m4")?.spawn("server-m4", programs.example("frames-server", &[MEMBERS, "m4"]))?;
    await_members(switch, ENSEMBLE, 4)?;
    progress("a server in C has joined");
    calm(&load)?;
    let before = total(&load.lines());
    findings.set("lost_without_a_death", (before.lost_safe + before.lost_unsafe) as f64);
    second.signal(Signal::SIGKILL)?;
    await_out(switch, ENSEMBLE, "m2")?;
    await_deaths(switch, ENSEMBLE, 1)?;
    findings.set("told_of_death", switching.log().matches("its flow has ended").count() as f64);
    calm(&load)?;
    ask_in_python(client, ENSEMBLE, findings)?;
    ask_in_c(client, &programs, ENSEMBLE, findings)?;
    let _alone = serve(lab.host("m1")?, ALONE, "alone")?;
    ask_in_python(client, ALONE, findings)?;
    ask_in_c(client, &programs, ALONE, findings)?;
    findings.set("deaths", shown(switch, ENSEMBLE)?["member_deaths"].as_f64().unwrap_or_default());
    let all = total(&load.finish(LIMIT)?);
    findings.set("answers", all.answered as f64);
    findings.set("wrong", all.wrong as f64);
    findings.set("lost", (all.lost_safe + all.lost_unsafe) as f64);
    findings.set("lost_safe", all.lost_safe as f64);
    findings.set("lost_unsafe", all.lost_unsafe as f64);
    findings.set("unanswered", all.unanswered as f64);
    findings.set("joined_answers", all.by_label.get("m3").copied().unwrap_or_default() as f64);
    findings.set("joined_c_answers", all.by_label.get("m4").copied().unwrap_or_default() as f64);
    Ok(())
}

fn serve(host: &Host, name: &str, label: &str) -> Result<Program> {
    let words = ["frames-serve".to_owned(), name.to_owned(), label.to_owned()];
    Program::start(host.traffic(words)?, &host.dir.join(format!("server-{label}.log")))
}

/// Two frames, of which each is answered by whoever has its key.
fn ask_in_python(client: &Host, name: &str, findings: &mut Findings) -> Result<()> {
    let mut answered = 0;
    // A name that was just bound is not known everywhere.
    wait_for("an answer in Python", LIMIT, || {
        let mut program =
            python::sdk(client, &format!("ask-{name}.py"), CLIENT, &[name, "user1:hello", "user2:hello"])?;
        program.finish(LIMIT)?;
        let said = program.log();
        answered = answers(&said);
        ensure!(answered == 2, "it says: {said}");
        Ok(())
    })
    .with_context(|| format!("{name} does not answer a client in Python"))?;
    findings.figures.add("python_answers", answered as f64);
    Ok(())
}

/// The same in C.
fn ask_in_c(client: &Host, programs: &Programs, name: &str, findings: &mut Findings) -> Result<()> {
    let mut answered = 0;
    wait_for("an answer in C", LIMIT, || {
        let output = client.output(programs.example("frames-client", &[name, "user1:hello", "user2:hello"]))?;
        let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        answered = answers(&said);
        ensure!(answered == 2, "it says: {said}");
        Ok(())
    })
    .with_context(|| format!("{name} does not answer a client in C"))?;
    findings.figures.add("c_answers", answered as f64);
    Ok(())
}

fn answers(said: &str) -> usize {
    said.lines().filter(|line| line.ends_with(":hello") && line.contains(": user")).count()
}

fn total(lines: &[Framed]) -> Framed {
    let mut all = Framed::default();
    for line in lines {
        all.answered += line.answered;
        all.wrong += line.wrong;
        all.lost_safe += line.lost_safe;
        all.lost_unsafe += line.lost_unsafe;
        all.unanswered += line.unanswered;
        line.by_label.iter().for_each(|(label, count)| *all.by_label.entry(label.clone()).or_default() += count);
    }
    all
}

/// Waits for some answers.
fn calm(load: &Series<Framed>) -> Result<()> {
    let before = total(&load.lines()).answered;
    wait_for("answers", LIMIT, || {
        let count = total(&load.lines()).answered - before;
        ensure!(count >= CALM, "there are {count}");
        Ok(())
    })
}
