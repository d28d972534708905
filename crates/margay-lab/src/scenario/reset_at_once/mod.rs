//! `reset-at-once`: clients that only wait for their server learn at once that it is gone: its program is killed, its
//! host is drained, its host is cut off the network. Plain TCP does not learn of the last; and a client that is to be
//! patient waits for the host to come back. Packaged clients learn of all three: psql, redis-cli, ssh, and a WebSocket.

mod programs;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use nix::sys::signal::Signal;

use self::programs::Programs;
use super::{Findings, Scenario, is_long, pair, site};
use crate::agent::{self, Agents};
use crate::arrivals::{now_ms, sleep_until};
use crate::command::progress;
use crate::draining::Drain;
use crate::host::Host;
use crate::idle::{self, lost, standing};
use crate::lab::Lab;
use crate::program::{Program, wait_for};
use crate::report::Limit::{AtLeast, Below, Exactly};
use crate::report::{Bound, bound, percentile};
use crate::series::Series;
use crate::server;
use crate::traffic::Idle;
use crate::wire;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "reset-at-once",
    summary: "programs wait for servers that are killed, drained at once, and cut off; raw TCP, psql, redis-cli, ssh, \
     WebSocket; and one of them with patience",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 13] = [
    // Of what is killed, and of what is drained.
    bound("error_ms_p99", Below(500.0)),
    bound("cut_error_ms_p99", Below(2500.0)),
    bound("hung", Exactly(0.0)),
    // Of what is drained, and of what is cut off.
    bound("not_reset", Exactly(0.0)),
    // Otherwise plain TCP does as well.
    bound("plain_hung", AtLeast(1.0)),
    // Before anything happened to their server; and of those that are patient.
    bound("early", Exactly(0.0)),
    bound("lost_after_return", Exactly(0.0)),
    bound("flows_left", Exactly(0.0)),
    // Of packaged programs: their servers are killed or drained; and cut off.
    bound("programs_error_ms_max", Below(500.0)),
    bound("programs_cut_error_ms_max", Below(2500.0)),
    bound("programs_without_error", Exactly(0.0)),
    // Otherwise one of them was not there.
    bound("programs", Exactly(12.0)),
    bound("failed", Exactly(0.0)),
];

const SERVICE: &str = "web.shop";
const NAME: &str = "web.shop.sal.internal";
/// What happens to each.
const SERVERS: [&str; 3] = ["killed", "drained", "cut"];
const PORT: u16 = 7;
/// Of connections that are not by name.
const PLAIN_PORT: u16 = 8;
/// What the service tells its clients.
const HASTY: [&str; 2] = ["--give-up-after", "1s"];
/// Of the client whose operator says otherwise.
const PATIENT: &str = "[host]\ngive_up_after = \"30s\"\n";
const LIMIT: Duration = Duration::from_secs(20);
/// A connection that is not told by then hangs.
const HUNG_LIMIT: Duration = Duration::from_secs(10);
/// A host that lost its router asks for it less and less often.
const BACK_LIMIT: Duration = Duration::from_secs(60);
/// After the cut: until then, who is patient waits.
const PATIENCE_MS: f64 = 5000.0;

/// How much, and for how long.
struct Length {
    /// Connections of each client to each server, more or less; and those that are not by name.
    each: usize,
    /// When these are looked at, after the cut.
    plain_ms: f64,
}

const SHORT: Length = Length { each: 16, plain_ms: PATIENCE_MS };
/// The host is back before who is patient gives it up.
const LONG: Length = Length { each: 100, plain_ms: 20_000.0 };

struct Stage<'a> {
    lab: &'a Lab,
    router: &'a Host,
    client: &'a Host,
    killed: &'a Host,
    drained: &'a Host,
    cut: &'a Host,
    length: Length,
    /// Connections of the client.
    hasty: Series<Idle>,
    /// Of the other one.
    patient: Series<Idle>,
    /// Of the client, in the order of [`SERVERS`]; none where they could not be started.
    programs: Vec<Programs<'a>>,
}

/// Which of [`Stage::programs`] are meant.
const KILLED: usize = 0;
const DRAINED: usize = 1;
const CUT: usize = 2;

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = site::build(SCENARIO.name, site::V4, &["killed", "drained", "cut", "client", "patient"], dir)?;
    let client = lab.host("client")?;
    lab.host("patient")?.shell(&format!("printf '{PATIENT}' >> /etc/margay/margay.toml"))?;
    let _agents = Agents::start(&lab)?;
    let counts = ["hung", "not_reset", "early", "programs", "programs_without_error", "failed"];
    counts.into_iter().for_each(|figure| findings.set(figure, 0.0));
    let servers = [lab.host(SERVERS[0])?, lab.host(SERVERS[1])?, lab.host(SERVERS[2])?];
    let serving = servers.into_iter().map(serve).collect::<Result<Vec<_>>>()?;
    let [killed, drained, cut] = servers;
    let length = if is_long() { LONG } else { SHORT };
    let hasty = wait_at(client, &servers, length.each)?;
    let patient = wait_at(lab.host("patient")?, &servers, length.each)?;
    let mut programs = Vec::new();
    pair::attempt_part("packaged programs that wait", findings, |_| {
        programs = Programs::start(dir, &servers, client)?;
        Ok(())
    });
    let router = lab.host("router")?;
    let mut stage = Stage { lab: &lab, router, client, killed, drained, cut, length, hasty, patient, programs };

    let mut errors_ms = Vec::new();
    pair::attempt_part("a program that is killed", findings, |findings| {
        errors_ms.extend(kill(&stage, &serving[0], findings)?);
        Ok(())
    });
    pair::attempt_part("a host that is drained", findings, |findings| {
        errors_ms.extend(drain(&stage, findings)?);
        Ok(())
    });
    findings.set("error_ms_p99", percentile(&errors_ms, 99.0));
    pair::attempt_part("a host that is cut off, and comes back", findings, |findings| {
        let kept = cut_off(&stage, findings)?;
        come_back(&stage, &serving[2], &kept, findings)
    });
    pair::attempt_part("what is left", findings, |findings| report_left(stage.client, findings));
    stage.programs.drain(..).for_each(Programs::finish);
    Ok(())
}

/// Adds what programs needed to notice the end of their server to a figure.
fn note_programs(figure: &str, errors_ms: &[f64], findings: &mut Findings) {
    let longest_ms = percentile(errors_ms, 100.0);
    findings.set(figure, findings.figures.get(figure).max(longest_ms));
}

fn serve(host: &Host) -> Result<Program> {
    let greeter = server::greeter(host, ([0; 4], PORT).into())?;
    agent::publish(host, SERVICE, &format!("0.0.0.0:{PORT}"), &HASTY)?;
    Ok(greeter)
}

/// Opens connections that say nothing, some to each server.
fn wait_at(client: &Host, servers: &[&Host], each: usize) -> Result<Series<Idle>> {
    agent::await_instances(client, SERVICE, servers.len())?;
    let count = each * servers.len();
    let idle = idle::open_at_each(client, NAME, PORT, count, servers)?;
    for server in servers {
        let here = standing(&idle, server).len();
        progress(&format!("{}: {here} of {count} connections are to {}", client.name(), server.name()));
    }
    await_flows(client, count)?;
    Ok(idle)
}

fn open_flows(host: &Host) -> Result<usize> {
    Ok(agent::open_flows(host, SERVICE, "tcp")?.len())
}

/// Waits until an agent lists so many flows: those that kernels have begun by grants are listed a moment later, and
/// those that have ended are still there for a moment.
fn await_flows(host: &Host, count: usize) -> Result<()> {
    wait_for(&format!("flows of {}", host.name()), LIMIT, || {
        let open = open_flows(host)?;
        ensure!(open == count, "there are {open}, not {count}");
        Ok(())
    })
}

/// How many connections stand at a server.
fn standing_at(waiting: &[&Series<Idle>], server: &Host) -> usize {
    waiting.iter().map(|idle| standing(idle, server).len()).sum()
}

/// Waits for the end of all connections to a server, and gives those that have ended. Those that hang are counted, and
/// those that ended before `from_ms`, as [`now_ms`] has it.
fn await_ends(waiting: &[&Series<Idle>], server: &Host, from_ms: f64, findings: &mut Findings) -> Vec<Idle> {
    // What it would say is counted below.
    let _ = wait_for("the end of connections", HUNG_LIMIT, || {
        let open = standing_at(waiting, server);
        ensure!(open == 0, "{open} are open");
        Ok(())
    });
    let hung = standing_at(waiting, server);
    if hung > 0 {
        findings.note(format!("{hung} connections to {} have not ended", server.name()));
    }
    findings.figures.add("hung", hung as f64);
    let all = waiting.iter().flat_map(|idle| lost(idle).into_values());
    let ends: Vec<Idle> = all.filter(|one| one.server == server.name()).collect();
    let early: Vec<f64> = after_ms(&ends, from_ms).into_iter().filter(|after_ms| *after_ms < 0.0).collect();
    if let Some(first_ms) = early.first() {
        findings.note(format!("{} connections to {} ended early; one by {first_ms:.0} ms", early.len(), server.name()));
    }
    findings.figures.add("early", early.len() as f64);
    ends
}

/// How much later than `from_ms` each has ended.
fn after_ms(ends: &[Idle], from_ms: f64) -> Vec<f64> {
    ends.iter().filter_map(|one| one.lost_ms).map(|lost_ms| lost_ms - from_ms).collect()
}

/// All of them were reset.
fn judge_resets(what: &str, ends: &[Idle], findings: &mut Findings) {
    let others: Vec<&Idle> = ends.iter().filter(|one| !one.reset).collect();
    if let Some(other) = others.first() {
        findings.note(format!("{what}: {} connections were not reset; one: {}", others.len(), other.error));
    }
    findings.figures.add("not_reset", others.len() as f64);
}

/// Kills a server. Gives how much later each of its clients has an error, or the end.
fn kill(stage: &Stage<'_>, greeter: &Program, findings: &mut Findings) -> Result<Vec<f64>> {
    let from_ms = now_ms();
    greeter.signal(Signal::SIGKILL)?;
    let ends = await_ends(&[&stage.hasty, &stage.patient], stage.killed, from_ms, findings);
    let each_ms = after_ms(&ends, from_ms);
    findings.set("killed_error_ms_max", percentile(&each_ms, 100.0));
    if let Some(programs) = stage.programs.get(KILLED) {
        let serving = programs.serving()?;
        let from_ms = now_ms();
        stage.killed.run(["kill", "-9"].iter().map(|word| (*word).to_owned()).chain(serving))?;
        note_programs("programs_error_ms_max", &programs.await_errors("killed", from_ms, findings), findings);
    }
    Ok(each_ms)
}

/// Drains a host without giving anybody time. Gives how much later each of its clients is reset.
fn drain(stage: &Stage<'_>, findings: &mut Findings) -> Result<Vec<f64>> {
    let waiting = [&stage.hasty, &stage.patient];
    await_flows(stage.drained, standing_at(&waiting, stage.drained))?;
    let drain = Drain::start(stage.drained, &[SERVICE, "--when", "now"])?;
    let from_ms = drain.begun_ms;
    let ends = await_ends(&waiting, stage.drained, from_ms, findings);
    drain.finish(LIMIT)?;
    judge_resets("a drain", &ends, findings);
    let each_ms = after_ms(&ends, from_ms);
    findings.set("drained_error_ms_max", percentile(&each_ms, 100.0));
    // It is an instance as before; the one whose program was killed is none.
    agent::undrain(stage.drained, SERVICE)?;
    agent::await_instances(stage.router, SERVICE, SERVERS.len() - 1)?;
    if let Some(programs) = stage.programs.get(DRAINED) {
        // Nobody else serves that name.
        let drain = Drain::start(stage.drained, &[programs.service(), "--when", "now", "--last"])?;
        let errors_ms = programs.await_errors("drained", drain.begun_ms, findings);
        drain.finish(LIMIT)?;
        note_programs("programs_error_ms_max", &errors_ms, findings);
    }
    Ok(each_ms)
}

/// Cuts a host off the network, without a word of it. Gives the connections that patience has kept.
fn cut_off(stage: &Stage<'_>, findings: &mut Findings) -> Result<BTreeSet<usize>> {
    let _plain_greeter = server::greeter(stage.cut, ([0; 4], PLAIN_PORT).into())?;
    let plain = idle::open(stage.client, &pair::address(stage.cut)?, PLAIN_PORT, stage.length.each)?;
    let cut_ms = now_ms();
    wire::set_link(&stage.lab.topology, stage.cut, false)?;
    // Clients note by themselves when they hear of it.
    agent::await_instances(stage.router, SERVICE, SERVERS.len() - 2)?;
    findings.set("unlisted_ms", now_ms() - cut_ms);
    let ends = await_ends(&[&stage.hasty], stage.cut, cut_ms, findings);
    judge_resets("a cut", &ends, findings);
    let each_ms = after_ms(&ends, cut_ms);
    findings.set("cut_error_ms_p99", percentile(&each_ms, 99.0));
    findings.set("cut_error_ms_min", percentile(&each_ms, 0.0));
    if let Some(programs) = stage.programs.get(CUT) {
        note_programs("programs_cut_error_ms_max", &programs.await_errors("cut off", cut_ms, findings), findings);
    }

    // That nothing happens cannot be waited for.
    sleep_until(cut_ms + PATIENCE_MS);
    let kept = standing(&stage.patient, stage.cut);
    let mut early = lost(&stage.patient);
    early.retain(|_, one| one.server == stage.cut.name());
    if let Some(first) = early.values().next() {
        findings.note(format!("{} patient connections were lost; one: {}", early.len(), first.error));
    }
    findings.figures.add("early", early.len() as f64);
    sleep_until(cut_ms + stage.length.plain_ms);
    let plain_hung = standing(&plain, stage.cut).len();
    if plain_hung < stage.length.each {
        findings.note(format!("of {} plain connections only {plain_hung} hang", stage.length.each));
    }
    findings.set("plain_hung", plain_hung as f64);
    Ok(kept)
}

/// Mends the link. Then the server is killed: only connections that still live hear of it, and hear that they are
/// closed.
fn come_back(stage: &Stage<'_>, greeter: &Program, kept: &BTreeSet<usize>, findings: &mut Findings) -> Result<()> {
    let mended_ms = now_ms();
    wire::set_link(&stage.lab.topology, stage.cut, true)?;
    wait_for("the host's return", BACK_LIMIT, || {
        let found = agent::resolve(stage.router, SERVICE)?["instances"].as_array().map_or(0, Vec::len);
        ensure!(found == SERVERS.len() - 1, "there are {found} instances");
        Ok(())
    })?;
    findings.set("back_ms", now_ms() - mended_ms);
    let killed_ms = now_ms();
    greeter.signal(Signal::SIGKILL)?;
    // Those that do not hear of it are counted.
    let _ = wait_for("the end of patient connections", HUNG_LIMIT, || {
        let open = standing(&stage.patient, stage.cut).len();
        ensure!(open == 0, "{open} are open");
        Ok(())
    });
    let ends = lost(&stage.patient);
    let is_dead = |one: &Idle| one.reset || one.lost_ms.is_none_or(|lost_ms| lost_ms < killed_ms);
    let dead: Vec<usize> = kept.iter().copied().filter(|number| ends.get(number).is_none_or(is_dead)).collect();
    if let Some(first) = dead.first() {
        let said = ends.get(first).map_or("it hangs", |one| one.error.as_str());
        findings.note(format!("{} of {} connections were dead after the return; one: {said}", dead.len(), kept.len()));
    }
    findings.set("kept", kept.len() as f64);
    findings.set("lost_after_return", dead.len() as f64);
    Ok(())
}

/// All flows of the client that is not patient have ended, also those whose host could not be told.
fn report_left(client: &Host, findings: &mut Findings) -> Result<()> {
    if let Err(error) = await_flows(client, 0) {
        findings.note(format!("{error:#}"));
    }
    findings.set("flows_left", open_flows(client)? as f64);
    Ok(())
}
