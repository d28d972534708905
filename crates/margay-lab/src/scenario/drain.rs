//! `drain`: two hosts serve a name with a web server and a server of idle connections; one of them is drained under
//! load. Transfers end by themselves, WebSockets go on at the other one, new connections go there and none fails, and
//! what is open at the deadline ends with a clear error. A drain outlives its agent, and wrong ones are refused.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;

use super::{Findings, Scenario, is_long, pair, site};
use crate::agent::{self, Agents};
use crate::arrivals::{Arrival, Arrivals, now_ms};
use crate::command::progress;
use crate::downloads::{self, Downloads, Order};
use crate::draining::Drain;
use crate::entries::{self, Entries};
use crate::host::Host;
use crate::idle::{self, lost, standing};
use crate::program::{Program, output_within, wait_for};
use crate::report::Limit::{AtLeast, Below, Exactly};
use crate::report::{Bound, bound, percentile};
use crate::series::Series;
use crate::server::{self, Nginx, Outcome, noise, sha256};
use crate::sessions::Sessions;
use crate::traffic::Idle;
use crate::{observe, websockets};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "drain",
    summary: "one of two hosts is drained under transfers, idle connections and new ones; by a deadline, and at once",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 25] = [
    bound("dry_run_wrong", Exactly(0.0)),
    bound("late_connects", Exactly(0.0)),
    bound("failed_connects", Exactly(0.0)),
    // Otherwise there were none to speak of.
    bound("connects", AtLeast(200.0)),
    bound("downloads_cut", Exactly(0.0)),
    // Of WebSockets, which their server gives to the other host.
    bound("resets_movable", Exactly(0.0)),
    bound("websockets_moved", AtLeast(1.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("empty_after_deadline_ms", Below(3000.0)),
    bound("error_ms_max", Below(2000.0)),
    bound("error_ms_p99_now", Below(500.0)),
    bound("idle_reset", AtLeast(2.0)),
    // Before the deadline, or of the instance that is not drained.
    bound("idle_early", Exactly(0.0)),
    bound("idle_lost", Exactly(0.0)),
    bound("not_reset", Exactly(0.0)),
    bound("hung", Exactly(0.0)),
    bound("report_wrong", Exactly(0.0)),
    bound("back_again", Exactly(RETURNS)),
    bound("bad_refused", Exactly((BAD_LINES.len() + 1) as f64)),
    bound("bad_accepted", Exactly(0.0)),
    bound("datagrams_elsewhere", AtLeast(1.0)),
    bound("datagrams_failed", Exactly(0.0)),
    bound("resets_unexpected", Exactly(0.0)),
    bound("leaked_entries", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

const SERVICE: &str = "web.shop";
const NAME: &str = "web.shop.sal.internal";
const SERVERS: [&str; 2] = ["web1", "web2"];
const WEB_PORT: u16 = 80;
const WEBSOCKET_PORT: u16 = 83;
/// Of idle connections and of datagrams.
const IDLE_PORT: u16 = 7;
/// The answer ends with the instance's name.
const ASK: &str = "GET /host HTTP/1.0\\r\\n\\r\\n";
const EVERY: Duration = Duration::from_millis(20);
const LIMIT: Duration = Duration::from_secs(20);
/// After the command to drain, its own way included. A grant lives for a second: what was taken back is over when it
/// is.
const GRACE_MS: f64 = 1500.0;
/// How long new connections are looked at after an agent has started.
const LOOK_MS: f64 = 2000.0;
/// Between the times of two processes.
const EARLY_MS: f64 = 100.0;
/// An idle connection that is not told by then hangs.
const HUNG_LIMIT: Duration = Duration::from_secs(5);
/// Commands that are wrong end sooner, also if one of them is done.
const BAD_LIMIT: Duration = Duration::from_secs(15);
/// By undrain, under load.
const RETURNS: f64 = 2.0;
/// Of the program that `margay run` starts.
const RUN_SERVICE: &str = "run.shop";
const RUN_NAME: &str = "run.shop.sal.internal";
const RUN_PORT: u16 = 9;
const RUN_DEADLINE: &str = "2s";
const RUN_DEADLINE_MS: f64 = 2000.0;
/// So many that both servers have some.
const SOCKETS: usize = 16;
/// Exchanges of each socket, so many milliseconds apart.
const EXCHANGES: &str = "100";
const EXCHANGE_EVERY_MS: &str = "50";
const ASKING_LIMIT: Duration = Duration::from_secs(60);

/// Wrong ones while the first server is drained: on which server, and what comes after `margay`.
const BAD_LINES: [(usize, &[&str]); 12] = [
    // Nobody has published it.
    (0, &["drain", "none.shop", "--deadline", "1s"]),
    (0, &["drain", "no.such", "--deadline", "1s"]),
    // It is drained.
    (0, &["drain", SERVICE, "--deadline", "1s"]),
    // Nobody else serves it.
    (1, &["drain", SERVICE, "--deadline", "1s"]),
    // It is not drained.
    (1, &["undrain", SERVICE]),
    (1, &["undrain", "--host"]),
    (1, &["drain"]),
    (1, &["drain", SERVICE, "--deadline", "soon"]),
    // It has passed.
    (1, &["drain", SERVICE, "--deadline=-5s"]),
    (1, &["drain", SERVICE, "--when", "later"]),
    (1, &["drain", SERVICE, "--when", "quiet", "--quiet-ms", "5"]),
    (1, &["drain", SERVICE, "--when", "finish", "--quiet-ms", "50"]),
];

/// How much, and for how long.
struct Length {
    downloads: usize,
    bytes: usize,
    pace: u64,
    idle: usize,
    websockets: usize,
    deadline_s: u64,
}

const SHORT: Length =
    Length { downloads: 20, bytes: 2_400_000, pace: 400_000, idle: 20, websockets: 20, deadline_s: 10 };
const LONG: Length =
    Length { downloads: 100, bytes: 12_000_000, pace: 200_000, idle: 50, websockets: 100, deadline_s: 90 };

struct Stage<'a> {
    client: &'a Host,
    servers: [&'a Host; 2],
    length: Length,
    arrivals: Arrivals,
    /// Of the file that is downloaded.
    sha256: String,
    /// Downloads that the first server serves.
    downloads_here: f64,
    /// When it was drained.
    drained_ms: f64,
    /// Those that are explained.
    resets: f64,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = site::build(SCENARIO.name, site::V4, &[&SERVERS[..], &["client"]].concat(), dir)?;
    let _agents = Agents::start(&lab)?;
    let client = lab.host("client")?;
    let servers = [lab.host(SERVERS[0])?, lab.host(SERVERS[1])?];
    let hosts = [client, servers[0], servers[1]];
    pair::demand_kernel(&hosts, findings)?;
    let length = if is_long() { LONG } else { SHORT };
    let content = noise(length.bytes, 1);
    let serving = servers.into_iter().map(|host| serve(host, &content)).collect::<Result<Vec<_>>>()?;
    agent::await_instances(client, SERVICE, servers.len())?;
    let counts = ["late_connects", "idle_reset", "idle_early", "idle_lost", "not_reset", "hung", "report_wrong"];
    let others = ["back_again", "bad_refused", "bad_accepted", "resets_unexpected"];
    counts.iter().chain(&others).for_each(|figure| findings.set(figure, 0.0));
    let mut stage = Stage {
        client,
        servers,
        length,
        arrivals: connect(client)?,
        sha256: sha256(client, &serving[0].0.root.join("paced"))?,
        downloads_here: 0.0,
        drained_ms: f64::INFINITY,
        resets: 0.0,
    };
    // Both instances are known, and what that takes is there.
    stage.await_both()?;
    stage.arrivals.stop()?;
    stage.meet()?;
    let before = Entries::settled(&hosts)?;
    hosts.iter().try_for_each(|host| observe::count_virtual_resets(host))?;

    let mut held = vec![stage.open_idle()?];
    let mut running = stage.download()?;
    running.await_open(LIMIT)?;
    let websockets = stage.open_websockets()?;
    pair::attempt_part("a dry run", findings, |findings| dry_run(&mut stage, &held[0], findings));
    stage.arrivals = connect(client)?;
    pair::attempt_part("a drain", findings, |findings| drain(&mut stage, &held[0], running, websockets, findings));
    pair::attempt_part("wrong commands", findings, |findings| refuse_all(&stage, findings));
    pair::attempt_part("an undrain", findings, |findings| return_to_service(&mut stage, findings));
    held.push(stage.open_idle()?);
    pair::attempt_part("an agent that starts again", findings, |findings| restart(&mut stage, &held[1], findings));
    pair::attempt_part("what became of connections", findings, |findings| judge_connects(&mut stage, findings));
    pair::attempt_part("a drain at once", findings, |findings| drain_now(&stage, &held, findings));
    held.into_iter().try_for_each(|idle| idle.finish(LIMIT).map(drop))?;
    pair::attempt_part("what is left", findings, |findings| entries::report_leaks(&hosts, &before, findings));
    pair::attempt_part("a program that is told to stop", findings, |findings| run_drained(&stage, findings));
    // What is left of datagrams stays for minutes.
    pair::attempt_part("datagrams", findings, |findings| datagrams(&stage, findings));
    Ok(())
}

/// One name with three ports.
fn serve(host: &Host, content: &[u8]) -> Result<(Nginx, [Program; 2])> {
    let nginx = Nginx::start(host, &["0.0.0.0:80"])?;
    nginx.put("paced", content)?;
    let greeter = server::greeter(host, ([0; 4], IDLE_PORT).into())?;
    let websockets = websockets::serve(host, SERVICE, WEBSOCKET_PORT)?;
    for port in [WEB_PORT, IDLE_PORT, WEBSOCKET_PORT] {
        agent::publish(host, SERVICE, &format!("0.0.0.0:{port}"), &[])?;
    }
    Ok((nginx, [greeter, websockets]))
}

fn connect(client: &Host) -> Result<Arrivals> {
    Arrivals::start(client, NAME, WEB_PORT, EVERY, Some(ASK))
}

/// Which instance answered; empty when none did.
fn instance(arrival: &Arrival) -> &str {
    arrival.answered.lines().last().unwrap_or_default().trim()
}

impl Stage<'_> {
    /// When connections began, between two moments, that an instance answered.
    fn answered_ms(&mut self, server: &Host, from_ms: f64, until_ms: f64) -> Result<Vec<f64>> {
        let all = self.arrivals.until(until_ms, LIMIT)?.filter(|arrival| instance(arrival) == server.name());
        Ok(all.map(|arrival| arrival.begun_ms).filter(|begun_ms| (from_ms..until_ms).contains(begun_ms)).collect())
    }

    /// Waits until an instance answers a connection that begins after this, and gives how much later that begins.
    fn await_answer(&mut self, server: &Host) -> Result<f64> {
        let from_ms = now_ms();
        wait_for(&format!("an answer of {}", server.name()), LIMIT, || {
            let answered_ms = self.answered_ms(server, from_ms, now_ms())?;
            answered_ms.into_iter().reduce(f64::min).map(|begun_ms| begun_ms - from_ms).context("there is none")
        })
    }

    fn await_both(&mut self) -> Result<()> {
        self.servers.into_iter().try_for_each(|server| self.await_answer(server).map(drop))
    }

    /// What hosts need that have given each other no connection yet is no leak.
    fn meet(&self) -> Result<()> {
        let sessions = self.open_websockets()?;
        let first = self.servers[0];
        Drain::start(first, &[SERVICE, "--deadline", "10s"])?.finish(LIMIT)?;
        sessions.end()?;
        agent::undrain(first, SERVICE)
    }

    /// Opens connections that say nothing, some to each server.
    fn open_idle(&self) -> Result<Series<Idle>> {
        idle::open_at_each(self.client, NAME, IDLE_PORT, self.length.idle, &self.servers)
    }

    /// Opens WebSockets that ask all the time, until some are to the first server: what the client's kernel opens by a
    /// grant goes to one server for a second.
    fn open_websockets(&self) -> Result<Sessions> {
        wait_for("WebSockets to the first server", LIMIT, || {
            let sessions = websockets::open(self.client, NAME, WEBSOCKET_PORT, self.length.websockets)?;
            if websockets_at(self.servers[0])? > 0.0 {
                return Ok(sessions);
            }
            sessions.end()?;
            bail!("none is to {}", self.servers[0].name())
        })
    }

    fn download(&self) -> Result<Downloads> {
        let Length { downloads: count, pace, .. } = self.length;
        Downloads::start(self.client, Order { host: NAME, path: "paced", count, pace })
    }

    /// All resets since this was asked last; those of a drain are explained.
    fn resets_since(&mut self) -> Result<(f64, String)> {
        let (all, places) = observe::virtual_resets(&[self.client, self.servers[0], self.servers[1]])?;
        let new = all - self.resets;
        self.resets = all;
        Ok((new, places))
    }

    fn note_resets(&mut self, what: &str, findings: &mut Findings) -> Result<()> {
        let (resets, places) = self.resets_since()?;
        findings.figures.add("resets_unexpected", resets);
        if resets > 0.0 {
            findings.note(format!("{what}: resets by now: {places}"));
        }
        Ok(())
    }
}

/// What a report counts of all its names together.
fn counted(report: &Value, of: &str) -> f64 {
    let services = report["services"].as_array().into_iter().flatten();
    services.filter_map(|service| service[of].as_f64()).sum()
}

/// A report is of this name, and counts what there was.
fn judge_report(
    report: &Value,
    [handed_over, reset]: [f64; 2],
    finished: &RangeInclusive<f64>,
    findings: &mut Findings,
) {
    let is_of_name = report["name"] == SERVICE && report["phase"] == "over";
    let is_told = report["silent_routers"].as_array().is_none_or(Vec::is_empty);
    let counts = ["open", "elsewhere", "handed_over", "reset"].map(|of| counted(report, of));
    let is_right = counts == [0.0, 0.0, handed_over, reset] && finished.contains(&counted(report, "finished"));
    if !(is_of_name && is_told && is_right) {
        findings.figures.add("report_wrong", 1.0);
        let expected = format!("{handed_over} were to be handed over, {reset} reset and {finished:?} to finish");
        findings.note(format!("{expected}; the report: {report}"));
    }
}

/// Flows of the name that a host serves and that are not over.
fn served(host: &Host, protocol: &str) -> Result<f64> {
    let flows = agent::open_flows(host, SERVICE, protocol)?;
    Ok(flows.iter().filter(|flow| flow["role"] == "responder").count() as f64)
}

/// WebSockets among them.
fn websockets_at(host: &Host) -> Result<f64> {
    let flows = agent::open_flows(host, SERVICE, "tcp")?;
    let port = format!(":{WEBSOCKET_PORT}");
    let is_one = |flow: &&Value| {
        flow["role"] == "responder" && flow["app_source"].as_str().is_some_and(|end| end.ends_with(&port))
    };
    Ok(flows.iter().filter(is_one).count() as f64)
}

/// All of them are open and answered, with what the server that had them first has counted.
fn judge_websockets(mut sessions: Sessions, count: usize, findings: &mut Findings) -> Result<()> {
    let talked = sessions.round()?;
    let ended = sessions.end()?;
    talked.errors.iter().chain(&ended.errors).for_each(|error| findings.note(format!("WebSockets: {error}")));
    findings.set("resets_movable", (count - talked.open) as f64);
    findings.figures.add("hung", talked.hung as f64);
    findings.figures.add("wrong_bytes", ended.wrong as f64);
    findings.set("websocket_wait_ms_max", talked.waits_ms.into_iter().fold(0.0, f64::max));
    Ok(())
}

/// Those that have ended must have been at a server that was drained.
fn judge_kept(idle: &Series<Idle>, drained: &[&Host], findings: &mut Findings) {
    for one in lost(idle).values() {
        if drained.iter().all(|host| host.name() != one.server) {
            findings.figures.add("idle_lost", 1.0);
            findings.note(format!("an idle connection to {:?} was lost: {}", one.server, one.error));
        }
    }
}

/// These end with a reset, and not before a moment. Gives how much later each does.
fn judge_ended(idle: &Series<Idle>, here: &BTreeSet<usize>, from_ms: f64, findings: &mut Findings) -> Vec<f64> {
    // Those that hang are counted.
    let _ = wait_for("the end of idle connections", HUNG_LIMIT, || {
        let lost = lost(idle);
        here.iter().all(|number| lost.contains_key(number)).then_some(()).context("some are open")
    });
    let lost = lost(idle);
    let ended: Vec<&Idle> = here.iter().filter_map(|number| lost.get(number)).collect();
    let after_ms: Vec<f64> = ended.iter().filter_map(|one| one.lost_ms).map(|lost_ms| lost_ms - from_ms).collect();
    let others: Vec<&&Idle> = ended.iter().filter(|one| !one.reset).collect();
    if let Some(other) = others.first() {
        findings.note(format!("{} idle connections were not reset; one: {}", others.len(), other.error));
    }
    findings.figures.add("hung", (here.len() - ended.len()) as f64);
    findings.figures.add("not_reset", others.len() as f64);
    findings.figures.add("idle_reset", (ended.len() - others.len()) as f64);
    findings.figures.add("idle_early", after_ms.iter().filter(|after_ms| **after_ms < -EARLY_MS).count() as f64);
    after_ms
}

/// Says what a drain would meet, and changes nothing.
fn dry_run(stage: &mut Stage<'_>, idle: &Series<Idle>, findings: &mut Findings) -> Result<()> {
    let [first, _] = stage.servers;
    let mut wrong = f64::INFINITY;
    let mut open = 0.0;
    // Those that the kernels have begun by grants are listed a moment later.
    let right = wait_for("a dry run that counts what there is", HUNG_LIMIT, || {
        let report = Drain::start(first, &[SERVICE, "--dry-run"])?.finish(LIMIT)?;
        ensure!(report["name"] == SERVICE && report["phase"] == "dry-run", "its report: {report}");
        open = served(first, "tcp")?;
        wrong = (counted(&report, "open") - open).abs();
        ensure!(wrong == 0.0, "{open} flows are listed; its report: {report}");
        Ok(())
    });
    if wrong.is_finite() {
        findings.set("dry_run_wrong", wrong);
    }
    stage.downloads_here = open - standing(idle, first).len() as f64 - websockets_at(first)?;
    progress(&format!("{}: {open} flows, {} of them downloads", first.name(), stage.downloads_here));
    right?;
    ensure!(!agent::is_drained(first, SERVICE)?, "a dry run has drained it");
    Ok(())
}

/// Drains the first server with a deadline, under load.
fn drain(
    stage: &mut Stage<'_>,
    idle: &Series<Idle>,
    mut running: Downloads,
    websockets: Sessions,
    findings: &mut Findings,
) -> Result<()> {
    let [drained, other] = stage.servers;
    // Also after a dry run.
    stage.await_both()?;
    let here = standing(idle, drained);
    let movable = websockets_at(drained)?;
    let begun = running.progress()?;
    ensure!(begun.ended == 0, "{} downloads have ended before the drain", begun.ended);
    let deadline = format!("{}s", stage.length.deadline_s);
    let limit = Duration::from_secs(stage.length.deadline_s) + LIMIT;
    let mut drain = Drain::start(drained, &[SERVICE, "--deadline", &deadline])?;
    stage.drained_ms = drain.begun_ms;
    let deadline_ms = drain.begun_ms + stage.length.deadline_s as f64 * 1e3;
    drain.await_drained(drained, SERVICE)?;
    refuse(drained, &["drain", SERVICE, "--deadline", "1s"], findings)?;
    let results = running.finish(limit)?;
    downloads::judge("a drain", &results, &stage.sha256, findings);
    findings.set("downloads_cut", results.iter().filter(|result| !result.error.is_empty()).count() as f64);
    findings.set("downloads_drained", stage.downloads_here);
    ensure!(now_ms() < deadline_ms, "the downloads took longer than the deadline");
    stage.note_resets("before the deadline", findings)?;
    let report = drain.finish(limit)?;
    findings.set("websockets_moved", counted(&report, "handed_over"));
    judge_websockets(websockets, stage.length.websockets, findings)?;
    wait_for("the end of all flows", LIMIT, || {
        let left = served(drained, "tcp")?;
        ensure!(left == 0.0, "{left} are left on {}", drained.name());
        Ok(())
    })?;
    findings.set("empty_after_deadline_ms", (now_ms() - deadline_ms).max(0.0));
    let after_ms = judge_ended(idle, &here, deadline_ms, findings);
    findings.set("error_ms_max", after_ms.into_iter().fold(0.0, f64::max));
    judge_kept(idle, &[drained], findings);
    findings.set("idle_kept", standing(idle, other).len() as f64);
    // Connections that were open when it began have finished, too.
    let new = stage.answered_ms(drained, 0.0, now_ms())?.len() as f64;
    let finished = stage.downloads_here..=stage.downloads_here + new;
    judge_report(&report, [movable, here.len() as f64], &finished, findings);
    stage.resets_since().map(drop)
}

/// A wrong command fails, and says why.
fn refuse(host: &Host, words: &[&str], findings: &mut Findings) -> Result<()> {
    let output = output_within(&mut agent::command(host, words.iter().copied())?, BAD_LIMIT);
    let is_refused = output.as_ref().is_ok_and(|output| !output.status.success() && !output.stderr.is_empty());
    findings.figures.add(if is_refused { "bad_refused" } else { "bad_accepted" }, 1.0);
    if !is_refused {
        findings.note(format!("{}: margay {}: {output:?}", host.name(), words.join(" ")));
    }
    Ok(())
}

fn refuse_all(stage: &Stage<'_>, findings: &mut Findings) -> Result<()> {
    for (server, words) in BAD_LINES {
        refuse(stage.servers[server], words, findings)?;
        let drained = [agent::is_drained(stage.servers[0], SERVICE)?, agent::is_drained(stage.servers[1], SERVICE)?];
        ensure!(drained == [true, false], "after `margay {}`: drained: {drained:?}", words.join(" "));
    }
    Ok(())
}

/// No new connection has come to the first server since it was drained; then it is back.
fn return_to_service(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let [drained, _] = stage.servers;
    let begun_ms = stage.drained_ms;
    let answered_ms = stage.answered_ms(drained, begun_ms, now_ms())?;
    let after_ms: Vec<f64> = answered_ms.into_iter().map(|at_ms| at_ms - begun_ms).collect();
    findings.figures.add("late_connects", after_ms.iter().filter(|after_ms| **after_ms > GRACE_MS).count() as f64);
    let last_ms = after_ms.into_iter().fold(findings.figures.get("last_connect_ms"), f64::max);
    findings.set("last_connect_ms", last_ms);
    agent::undrain(drained, SERVICE)?;
    ensure!(!agent::is_drained(drained, SERVICE)?, "it is drained still");
    let back_ms = stage.await_answer(drained)?;
    findings.set("back_ms_max", findings.figures.get("back_ms_max").max(back_ms));
    findings.figures.add("back_again", 1.0);
    stage.note_resets("before and after an undrain", findings)
}

/// A drain outlives its agent; flows have still time then.
fn restart(stage: &mut Stage<'_>, idle: &Series<Idle>, findings: &mut Findings) -> Result<()> {
    let [drained, _] = stage.servers;
    let mut drain = Drain::start(drained, &[SERVICE, "--deadline", "10m"])?;
    stage.drained_ms = drain.begun_ms;
    drain.await_drained(drained, SERVICE)?;
    agent::kill(drained)?;
    // Nobody reports to it any more.
    drop(drain);
    agent::start_again(drained)?;
    wait_for("the drain after a start", LIMIT, || {
        ensure!(agent::is_drained(drained, SERVICE)?, "it is not drained");
        Ok(())
    })?;
    // That there are connections is what is waited for.
    stage.arrivals.until(now_ms() + LOOK_MS, LIMIT).map(drop)?;
    judge_kept(idle, &[], findings);
    return_to_service(stage, findings)
}

/// None has failed, whoever was drained; and no more begin.
fn judge_connects(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let seen: Vec<&Arrival> = stage.arrivals.until(now_ms(), LIMIT)?.collect();
    let failed: Vec<&&Arrival> =
        seen.iter().filter(|arrival| !SERVERS.contains(&instance(arrival)) || !arrival.error.is_empty()).collect();
    // The first few tell as much as all of them.
    for arrival in failed.iter().take(3) {
        let at_ms = arrival.begun_ms - seen[0].begun_ms;
        findings
            .note(format!("a connection begun at {at_ms:.0} ms, after {:.0} ms: {}", arrival.took_ms, arrival.error));
    }
    findings.set("failed_connects", failed.len() as f64);
    findings.set("connects", seen.len() as f64);
    findings.set("connect_ms_max", seen.iter().map(|arrival| arrival.took_ms).fold(0.0, f64::max));
    stage.arrivals.stop()
}

/// Drains the other server without giving anybody time.
fn drain_now(stage: &Stage<'_>, held: &[Series<Idle>], findings: &mut Findings) -> Result<()> {
    let [first, drained] = stage.servers;
    let here: Vec<BTreeSet<usize>> = held.iter().map(|idle| standing(idle, drained)).collect();
    let open = here.iter().map(BTreeSet::len).sum::<usize>() as f64;
    ensure!(open > 0.0, "no idle connection stands at {}", drained.name());
    // Of connections that have ended the agent may not have heard yet.
    wait_for("the end of other flows", LIMIT, || {
        let all = served(drained, "tcp")?;
        ensure!(all == open, "there are {all}, not {open}");
        Ok(())
    })?;
    let drain = Drain::start(drained, &[SERVICE, "--when", "now"])?;
    let begun_ms = drain.begun_ms;
    let report = drain.finish(LIMIT)?;
    findings.set("now_took_ms", now_ms() - begun_ms);
    let mut after_ms = Vec::new();
    for (idle, here) in held.iter().zip(&here) {
        after_ms.extend(judge_ended(idle, here, begun_ms, findings));
    }
    findings.set("error_ms_p99_now", percentile(&after_ms, 99.0));
    judge_report(&report, [0.0, open], &(0.0..=0.0), findings);
    // Of the second ones, none that the first server has.
    judge_kept(&held[0], &[first, drained], findings);
    held[1..].iter().for_each(|idle| judge_kept(idle, &[drained], findings));
    agent::undrain(drained, SERVICE)
}

/// `margay run` has its program's name drained before it passes SIGTERM on. The next start serves it again.
fn run_drained(stage: &Stage<'_>, findings: &mut Findings) -> Result<()> {
    let [stopped, other] = stage.servers;
    let mut program = run_greeter(stopped)?;
    let _other = run_greeter(other)?;
    agent::await_instances(stage.client, RUN_SERVICE, 2)?;
    let idle = idle::open_at_each(stage.client, RUN_NAME, RUN_PORT, stage.length.idle, &stage.servers)?;
    let here = standing(&idle, stopped);
    let stopped_ms = now_ms();
    program.signal(Signal::SIGTERM)?;
    wait_for("the drain of a program", LIMIT, || {
        ensure!(agent::is_drained(stopped, RUN_SERVICE)?, "it is not drained");
        Ok(())
    })?;
    let new = idle::open(stage.client, RUN_NAME, RUN_PORT, stage.length.idle)?;
    findings.figures.add("late_connects", standing(&new, stopped).len() as f64);
    ensure!(program.ended()?.is_none(), "the program has ended before its connections");
    judge_ended(&idle, &here, stopped_ms + RUN_DEADLINE_MS, findings);
    judge_kept(&idle, &[stopped], findings);
    judge_kept(&new, &[], findings);
    wait_for("the end of the program", LIMIT, || program.ended()?.context("it runs still"))?;
    let _again = run_greeter(stopped)?;
    agent::await_instances(stage.client, RUN_SERVICE, 2)?;
    ensure!(!agent::is_drained(stopped, RUN_SERVICE)?, "the next start of the program is drained");
    Ok(())
}

/// Starts a server that greets with its host's name, by `margay run`.
fn run_greeter(host: &Host) -> Result<Program> {
    let listen = format!("0.0.0.0:{RUN_PORT}");
    let greeting = format!("{}\n", host.name());
    let greeter = host.words_of_traffic(&["echo", "--listen", &listen, "--greeting", &greeting])?;
    let offer = format!("{RUN_SERVICE}:{RUN_PORT}");
    let run = ["margay", "run", "--service", &offer, "--drain", RUN_DEADLINE, "--"];
    host.spawn("run", run.into_iter().map(str::to_owned).chain(greeter))
}

/// Connected sockets ask all the time while the first host is drained of everything: each is served by the other one.
fn datagrams(stage: &Stage<'_>, findings: &mut Findings) -> Result<()> {
    let [drained, _] = stage.servers;
    let port = IDLE_PORT.to_string();
    let sockets = SOCKETS.to_string();
    let to = ["attempt", NAME, &port, "--udp", "--count", &sockets, "--parallel", &sockets];
    let exchanges = ["--rounds", EXCHANGES, "--round-pause-ms", EXCHANGE_EVERY_MS, "--resend-ms", "200"];
    let words = to.iter().chain(&exchanges).chain(&["--timeout-ms", "30000"]).map(|word| (*word).to_owned());
    let asking: Series<Outcome> = Series::start(stage.client, &words.collect::<Vec<_>>())?;
    wait_for("datagrams at both servers", LIMIT, || {
        let [here, there] = [served(stage.servers[0], "udp")?, served(stage.servers[1], "udp")?];
        ensure!(here > 0.0 && there > 0.0 && here + there == SOCKETS as f64, "flows: {here} and {there}");
        Ok(())
    })?;
    let here = served(drained, "udp")?;
    let report = Drain::start(drained, &["--host", "--deadline", "10s"])?.finish(LIMIT)?;
    findings.set("datagrams_elsewhere", counted(&report, "elsewhere"));
    let is_right = report["name"].as_str().unwrap_or_default().is_empty()
        && report["phase"] == "over"
        && counted(&report, "elsewhere") == here
        && counted(&report, "reset") == 0.0;
    if !is_right {
        findings.figures.add("report_wrong", 1.0);
        findings.note(format!("{here} flows of datagrams were to go elsewhere; the report: {report}"));
    }
    let outcomes = asking.finish(ASKING_LIMIT)?;
    let outcome = outcomes.first().context("the datagrams have no outcome")?;
    findings.set("datagrams_failed", outcome.failed() as f64);
    findings.set("datagrams_lost", outcome.lost as f64);
    outcome.errors.iter().for_each(|(error, count)| findings.note(format!("datagrams: {count} times {error}")));
    let left = served(drained, "udp")?;
    ensure!(left == 0.0, "{left} flows of datagrams are left on {}", drained.name());
    agent::undrain(drained, "--host")
}
