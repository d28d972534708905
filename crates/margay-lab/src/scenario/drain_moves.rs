//! `drain-moves`: two hosts serve a name with servers that give their connections away when they are asked to. One
//! host after the other is drained while sessions talk all the time: to wherever the server chooses, and to a host that
//! the operator names. All sessions go on at the other host, and none is reset.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;

use super::{Findings, Scenario, is_long, pair, site};
use crate::agent::{self, Agents};
use crate::arrivals::now_ms;
use crate::draining::Drain;
use crate::entries::{self, Entries};
use crate::host::Host;
use crate::observe;
use crate::program::wait_for;
use crate::report::Limit::{AtLeast, Below, Exactly};
use crate::report::{Bound, bound};
use crate::sessions::Sessions;
use crate::traffic::{Step, Talked};
use crate::upgrading::Serving;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "drain-moves",
    summary: "a host is drained whose server gives its connections to the other host: by its choice, and by --to",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 12] = [
    // Of connections that another host could take.
    bound("resets_movable", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("lost_sessions", Exactly(0.0)),
    // Of those that stood at a host when it was drained.
    bound("not_moved", Exactly(0.0)),
    // All in the second drain, and those of the host in the first one; at full length there are more.
    bound("moved", AtLeast((SHORT + 1) as f64)),
    bound("empty_after_ms", Below(3000.0)),
    bound("report_wrong", Exactly(0.0)),
    bound("dry_run_wrong", Exactly(0.0)),
    bound("bad_accepted", Exactly(0.0)),
    bound("drains", Exactly(2.0)),
    bound("leaked_entries", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

const SERVICE: &str = "web.shop";
const LISTEN: &str = "0.0.0.0:81";
const PORT: u16 = 81;
/// Sessions that come one by one before anything is measured: so many that both hosts have some.
const FIRST: usize = 12;
const SERVERS: [&str; 2] = ["one", "two"];
/// Sessions, by the length of the scenario: so many that both hosts have some.
const SHORT: usize = 40;
const LONG: usize = 400;
const DEADLINE: &str = "10s";
const LIMIT: Duration = Duration::from_secs(30);

struct Stage<'a> {
    servers: [&'a Host; 2],
    serving: [Serving; 2],
    sessions: Sessions,
    count: usize,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = site::build(SCENARIO.name, site::V4, &[&SERVERS[..], &["client"]].concat(), dir)?;
    let _agents = Agents::start(&lab)?;
    let client = lab.host("client")?;
    let servers = [lab.host(SERVERS[0])?, lab.host(SERVERS[1])?];
    let hosts = [client, servers[0], servers[1]];
    pair::demand_kernel(&hosts, findings)?;
    for figure in ["not_moved", "moved", "report_wrong", "dry_run_wrong", "bad_accepted", "empty_after_ms", "drains"] {
        findings.set(figure, 0.0);
    }
    let serving = [serve(servers[0])?, serve(servers[1])?];
    agent::await_instances(client, SERVICE, servers.len())?;
    let (address, _) = agent::virtual_addresses(client, SERVICE)?;
    let serving = meet(client, &address, servers, serving)?;
    let before = Entries::settled(&hosts)?;
    hosts.iter().try_for_each(|host| observe::count_virtual_resets(host))?;

    let count = if is_long() { LONG } else { SHORT };
    let sessions = Sessions::open(client, &address, PORT, count, &[])?;
    let mut stage = Stage { servers, serving, sessions, count };
    pair::attempt_part("wrong commands", findings, |findings| refuse_all(&stage, findings));
    pair::attempt_part("a drain", findings, |findings| stage.drain(0, &[], findings));
    pair::attempt_part("a drain to a host that is named", findings, |findings| {
        agent::undrain(servers[0], SERVICE)?;
        stage.drain(1, &["--to", SERVERS[0]], findings)
    });
    let Stage { sessions, serving: _serving, .. } = stage;
    let (resets, places) = observe::virtual_resets(&hosts)?;
    findings.set("resets_movable", resets);
    if resets > 0.0 {
        findings.note(format!("resets: {places}"));
    }
    judge_sessions(&sessions.end()?, count, findings);
    pair::attempt_part("what is left", findings, |findings| entries::report_leaks(&hosts, &before, findings));
    Ok(())
}

fn serve(host: &Host) -> Result<Serving> {
    let mut serving = Serving::start(host, SERVICE, host.name(), &["--listen", LISTEN, "--take-over"])?;
    serving.await_step("a server", 1, |step| *step == Step::Takes)?;
    agent::publish(host, SERVICE, LISTEN, &[])?;
    Ok(serving)
}

/// What the first of all flows needs, and what hosts need that have not met, is no leak. They meet by one connection at
/// a time: of several first contacts at once, each makes an association.
fn meet(client: &Host, address: &str, servers: [&Host; 2], serving: [Serving; 2]) -> Result<[Serving; 2]> {
    for _ in 0..FIRST {
        Sessions::open(client, address, PORT, 1, &[])?.end()?;
    }
    let sessions = Sessions::open(client, address, PORT, 1, &[])?;
    let mut stage = Stage { servers, serving, sessions, count: 1 };
    // There and back.
    let first = if stage.await_all(0)? == 1 { 0 } else { 1 };
    for number in [first, 1 - first] {
        let serving = &mut stage.serving[number];
        serving.program.signal(Signal::SIGUSR1)?;
        serving.await_step("a server that has given its connection away", 1, |step| {
            matches!(step, Step::Moved { moved: 1, .. })
        })?;
        stage.sessions.round()?;
    }
    stage.sessions.end()?;
    Ok(stage.serving)
}

fn judge_sessions(talked: &Talked, count: usize, findings: &mut Findings) {
    for error in &talked.errors {
        findings.note(format!("sessions: {error}"));
    }
    findings.set("wrong_bytes", talked.wrong as f64);
    findings.set("lost_sessions", (count - talked.open) as f64);
    findings.set("answers", talked.answers as f64);
}

/// Hosts that connections cannot go to.
fn refuse_all(stage: &Stage<'_>, findings: &mut Findings) -> Result<()> {
    let [one, two] = SERVERS;
    // The host itself; nobody; one that does not serve the name, after one that does; and no time to give anything.
    for words in [&["--to", one][..], &["--to", "nobody"], &["--to", "two,client"], &["--to", two, "--when", "now"]] {
        let words = ["drain", SERVICE, "--deadline", "1s"].iter().chain(words).copied();
        if agent::margay(stage.servers[0], words).is_ok() {
            findings.figures.add("bad_accepted", 1.0);
        }
    }
    ensure!(!agent::is_drained(stage.servers[0], SERVICE)?, "a wrong command has drained the name");
    Ok(())
}

impl Stage<'_> {
    /// Flows of sessions that a host serves.
    fn served(&self, number: usize) -> Result<usize> {
        let flows = agent::open_flows(self.servers[number], SERVICE, "tcp")?;
        let port = format!(":{PORT}");
        // Streams between agents are flows of the name, too.
        let is_session = |flow: &&Value| flow["app_source"].as_str().is_some_and(|end| end.ends_with(&port));
        Ok(flows.iter().filter(|flow| flow["role"] == "responder").filter(is_session).count())
    }

    /// Waits until all sessions are listed, and gives how many of them stand at a host.
    fn await_all(&self, number: usize) -> Result<usize> {
        // Those that the kernels have begun by grants are listed a moment later.
        wait_for("sessions that are listed", LIMIT, || {
            let here = self.served(number)?;
            let all = here + self.served(1 - number)?;
            ensure!(all == self.count, "{all} of {} are", self.count);
            Ok(here)
        })
    }

    /// Drains a host under load. All its sessions go to the other one.
    fn drain(&mut self, number: usize, to: &[&str], findings: &mut Findings) -> Result<()> {
        let host = self.servers[number];
        let here = self.await_all(number)?;
        ensure!(here > 0, "no session has come to {}", host.name());
        let words = [&[SERVICE, "--deadline", DEADLINE][..], to].concat();
        // The router may hear of the other host's return a moment later.
        let rehearsed =
            wait_for("a dry run", LIMIT, || Drain::start(host, &[&words[..], &["--dry-run"]].concat())?.finish(LIMIT))?;
        if [counted(&rehearsed, "giving_programs"), counted(&rehearsed, "open")] != [1.0, here as f64] {
            findings.figures.add("dry_run_wrong", 1.0);
            findings.note(format!("{here} sessions stood at {}; its dry run: {rehearsed}", host.name()));
        }
        let drain = Drain::start(host, &words)?;
        let begun_ms = drain.begun_ms;
        let report = drain.finish(LIMIT)?;
        let empty_after_ms = now_ms() - begun_ms;
        findings.set("empty_after_ms", findings.figures.get("empty_after_ms").max(empty_after_ms));
        self.judge_report(number, &report, here, findings);
        self.serving[number]
            .await_step("a server that has given its connections away", 1, |step| matches!(step, Step::Moved { .. }))?;
        let stays = self.serving[number].steps().into_iter();
        // The first few tell as much as all of them.
        for step in stays.filter(|step| matches!(step, Step::Keeps { .. } | Step::Loses { .. })).take(3) {
            findings.note(format!("{}: {step:?}", host.name()));
        }
        let talked = self.sessions.round()?;
        ensure!(talked.hung == 0, "{} sessions are not answered; {:?}", talked.hung, talked.errors);
        let left = self.await_all(number)?;
        findings.figures.add("not_moved", left as f64);
        findings.figures.add("moved", (here - left.min(here)) as f64);
        findings.figures.add("drains", 1.0);
        let longest_ms = talked.waits_ms.into_iter().fold(findings.figures.get("pause_ms_max"), f64::max);
        findings.set("pause_ms_max", longest_ms);
        Ok(())
    }

    /// A report counts what has gone, and nothing else.
    fn judge_report(&self, number: usize, report: &Value, here: usize, findings: &mut Findings) {
        let others = ["open", "finished", "quiet", "elsewhere", "reset"];
        let is_right = report["phase"] == "over"
            && counted(report, "handed_over") == here as f64
            && others.into_iter().all(|of| counted(report, of) == 0.0);
        if !is_right {
            findings.figures.add("report_wrong", 1.0);
            findings.note(format!("{here} sessions stood at {}; its report: {report}", self.servers[number].name()));
        }
    }
}

/// What a report counts of all its names together.
fn counted(report: &Value, of: &str) -> f64 {
    let services = report["services"].as_array().into_iter().flatten();
    services.filter_map(|service| service[of].as_f64()).sum()
}
