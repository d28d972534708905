//! `shed`: SCAFFOLD's Figure 8. Two clients fetch a file by wget, three times a second each. Two servers join the first
//! one; one of them is drained at once, and its requests go on elsewhere; the other one is left until its requests have
//! ended, as servers are usually taken out.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::{Findings, Scenario, is_long, site};
use crate::agent::{self, Agents};
use crate::arrivals::{now_ms, sleep_until};
use crate::draining::Drain;
use crate::host::Host;
use crate::program::{Program, wait_for};
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::server::{Logged, Nginx, noise};
use crate::timeline::Timeline;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "shed",
    summary: "SCAFFOLD Fig. 8: two wget clients; servers join, one sheds its requests, one is left until they end",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 8] = [
    // Of the requests that were open at the server that sheds: begun at another one within a second.
    bound("moved_share_1s", AtLeast(0.95)),
    bound("failed_requests", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("late_requests", Exactly(0.0)),
    // Otherwise there was nothing to shed.
    bound("open_when_shed", AtLeast(2.0)),
    // Otherwise there was nothing to wait for.
    bound("open_when_drained", AtLeast(2.0)),
    bound("figure_drawn", Exactly(1.0)),
    bound("failed", Exactly(0.0)),
];

const SERVICE: &str = "web.shop";
const NAME: &str = "web.shop.sal.internal";
const SERVERS: [&str; 3] = ["s1", "s2", "s3"];
/// Joins first, and is left until its requests have ended.
const DRAINED: usize = 1;
/// Joins last, and sheds its requests.
const SHED: usize = 2;
const CLIENTS: [&str; 2] = ["c1", "c2"];
/// Each link delays what leaves and what comes, and two of them are between any two hosts: 100 ms there and back.
const BLOCKS: &str = "v4 = \"10.1.0.0/24\"\ndelay_ms = 25\n";
const LISTEN: &str = "0.0.0.0:80";
const FILE: &str = "file";
const FILE_BYTES: usize = 100_000;
/// A request takes four seconds so: at each of three servers eight are open.
const BYTES_PER_S: u32 = 20_000;
/// Of each client.
const REQUESTS_PER_S: f64 = 3.0;
/// After the order to drain: a SYN that is on its way by then is sent elsewhere.
const GRACE_MS: f64 = 1500.0;
/// In which requests are to have moved.
const MOVE_MS: f64 = 1000.0;
const LIMIT: Duration = Duration::from_secs(30);
const STEP_MS: f64 = 250.0;

/// Asks at a fixed rate, whatever has become of the request before. One line for each request that has ended: its
/// number, the status of wget, of `cmp`, and what wget said last.
const ASK: &str = r#"
    url=$1 client=$2 every_s=$3 count=$4 right=$5 into=$6
    mkdir -p "$into"
    ask() {
        local at="$into/$1" status=0 other=0
        # A connection that is reset is followed by the next one at once, for what is missing.
        wget -nv --waitretry=0 --timeout=10 -O "$at" "$url?$client-$1" 2>"$at.log" || status=$?
        cmp -s "$at" "$right" || other=$?
        echo "ended $1 $status $other $(tail -n 1 "$at.log")"
        rm "$at" "$at.log"
    }
    for ((number = 0; number < count; number++)); do
        ask "$number" &
        sleep "$every_s"
    done
    wait
"#;

/// When things happen, in seconds after the first request.
struct Times {
    joins_s: [f64; 2],
    shed_s: f64,
    drained_s: f64,
    /// Of the last request.
    end_s: f64,
}

const SHORT: Times = Times { joins_s: [1.5, 3.0], shed_s: 6.0, drained_s: 8.5, end_s: 10.0 };
/// Those of the paper.
const LONG: Times = Times { joins_s: [5.0, 10.0], shed_s: 20.0, drained_s: 30.0, end_s: 40.0 };

/// What happened, as [`now_ms`] has it.
struct Events {
    begun_ms: f64,
    joins_ms: Vec<f64>,
    shed_ms: f64,
    drained_ms: f64,
}

/// What has become of a request, as its client has it.
#[derive(Debug, PartialEq)]
struct Ended {
    number: usize,
    /// Exit status of wget.
    status: i32,
    is_right: bool,
    said: String,
}

impl Ended {
    fn read(line: &str) -> Option<Self> {
        let mut words = line.strip_prefix("ended ")?.splitn(4, ' ');
        let number = words.next()?.parse().ok()?;
        let status = words.next()?.parse().ok()?;
        let is_right = words.next()? == "0";
        Some(Self { number, status, is_right, said: words.next().unwrap_or_default().to_owned() })
    }
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = site::build(SCENARIO.name, BLOCKS, &[&SERVERS[..], &CLIENTS[..]].concat(), dir)?;
    let _agents = Agents::start(&lab)?;
    findings.set("failed", 0.0);
    let servers = SERVERS.iter().map(|name| lab.host(name)).collect::<Result<Vec<_>>>()?;
    let clients = CLIENTS.iter().map(|name| lab.host(name)).collect::<Result<Vec<_>>>()?;
    let times = if is_long() { LONG } else { SHORT };
    let right = dir.join("right");
    std::fs::write(&right, noise(FILE_BYTES, 1)).with_context(|| format!("cannot write {}", right.display()))?;
    let mut running = vec![join(servers[0], &right)?];
    clients.iter().try_for_each(|client| agent::await_instances(client, SERVICE, 1))?;

    let count = (times.end_s * REQUESTS_PER_S).round() as usize;
    let begun_ms = now_ms();
    let mut asking = clients.iter().map(|client| ask(client, &right, count)).collect::<Result<Vec<_>>>()?;
    let mut joins_ms = Vec::new();
    for (host, join_s) in servers[1..].iter().zip(times.joins_s) {
        sleep_until(begun_ms + join_s * 1e3);
        joins_ms.push(now_ms());
        running.push(join(host, &right)?);
    }
    sleep_until(begun_ms + times.shed_s * 1e3);
    let shed = Drain::start(servers[SHED], &[SERVICE, "--when", "now"])?;
    let shed_ms = shed.begun_ms;
    shed.finish(LIMIT)?;
    sleep_until(begun_ms + times.drained_s * 1e3);
    let drained = Drain::start(servers[DRAINED], &[SERVICE, "--when", "finish", "--deadline", "60s"])?;
    let events = Events { begun_ms, joins_ms, shed_ms, drained_ms: drained.begun_ms };
    asking.iter_mut().try_for_each(|program| program.finish(Duration::from_secs_f64(times.end_s) + LIMIT))?;
    drained.finish(LIMIT)?;

    let logged = logged(&running, count * CLIENTS.len())?;
    for (client, program) in CLIENTS.iter().zip(&asking) {
        judge_ended(client, count, &program.log(), findings);
    }
    judge(&events, &logged, findings);
    draw(&events, &logged, findings)
}

/// Starts a server, and lets it serve the name.
fn join(host: &Host, right: &Path) -> Result<Nginx> {
    let nginx = Nginx::start_slow(host, &[LISTEN], BYTES_PER_S)?;
    std::fs::copy(right, nginx.root.join(FILE)).context("cannot copy the file that is fetched")?;
    agent::publish(host, SERVICE, LISTEN, &[])?;
    Ok(nginx)
}

/// Starts the requests of a client.
fn ask(client: &Host, right: &Path, count: usize) -> Result<Program> {
    let url = format!("http://{NAME}/{FILE}");
    let into: PathBuf = client.dir.join("fetched");
    let every_s = (1.0 / REQUESTS_PER_S).to_string();
    let count = count.to_string();
    let words = ["bash", "-c", ASK, "ask", &url, client.name(), &every_s, &count].map(Path::new);
    client.spawn("wget", words.into_iter().chain([right, &into]))
}

/// The requests of each server. A server writes its line after the last byte, so that the last ones come late.
fn logged(running: &[Nginx], count: usize) -> Result<Vec<Vec<Logged>>> {
    wait_for("the logs of all requests", LIMIT, || {
        let logged: Vec<Vec<Logged>> = running.iter().map(Nginx::requests).collect();
        let seen: BTreeSet<&str> = logged.iter().flatten().map(|one| one.arguments.as_str()).collect();
        ensure!(seen.len() >= count, "{} of {count} requests are logged", seen.len());
        Ok(logged)
    })
}

/// Counts the requests of a client that have failed, or have brought another file.
fn judge_ended(client: &str, count: usize, log: &str, findings: &mut Findings) {
    let ended: Vec<Ended> = log.lines().filter_map(Ended::read).collect();
    let failed: Vec<&Ended> = ended.iter().filter(|one| one.status != 0).collect();
    // The first few tell as much as all of them.
    for one in failed.iter().take(3) {
        findings.note(format!("request {} of {client}: wget ended with {}: {}", one.number, one.status, one.said));
    }
    let wrong = ended.iter().filter(|one| one.status == 0 && !one.is_right).count();
    findings.figures.add("requests", ended.len() as f64);
    findings.figures.add("failed_requests", (failed.len() + count.saturating_sub(ended.len())) as f64);
    findings.figures.add("wrong_bytes", wrong as f64);
}

/// Requests that a server had at a moment, and did not bring to their end.
fn open_at(of_server: &[Logged], at_ms: f64) -> impl Iterator<Item = &Logged> {
    of_server.iter().filter(move |one| one.begun_ms < at_ms && at_ms < one.ended_ms)
}

/// How long after a moment a server still had one of the requests that were open then.
fn empty_after_ms(of_server: &[Logged], at_ms: f64) -> f64 {
    open_at(of_server, at_ms).map(|one| one.ended_ms - at_ms).fold(0.0, f64::max)
}

fn judge(events: &Events, logged: &[Vec<Logged>], findings: &mut Findings) {
    let Events { shed_ms, drained_ms, .. } = *events;
    let others = logged.iter().enumerate().filter(|(server, _)| *server != SHED).flat_map(|(_, requests)| requests);
    let gone_on: BTreeSet<&str> = others
        .filter(|one| (shed_ms..shed_ms + MOVE_MS).contains(&one.begun_ms))
        .map(|one| one.arguments.as_str())
        .collect();
    // What ended by itself in the moment of the order had nothing to move.
    let open: Vec<&Logged> = open_at(&logged[SHED], shed_ms).filter(|one| one.sent_bytes < FILE_BYTES as u64).collect();
    let moved = open.iter().filter(|one| gone_on.contains(one.arguments.as_str())).count();
    findings.set("open_when_shed", open.len() as f64);
    findings.set("moved_share_1s", moved as f64 / (open.len() as f64).max(1.0));
    findings.set("shed_empty_ms", empty_after_ms(&logged[SHED], shed_ms));
    findings.set("open_when_drained", open_at(&logged[DRAINED], drained_ms).count() as f64);
    findings.set("drained_empty_ms", empty_after_ms(&logged[DRAINED], drained_ms));
    let late =
        |server: usize, at_ms: f64| logged[server].iter().filter(|one| one.begun_ms > at_ms + GRACE_MS).count() as f64;
    findings.set("late_requests", late(SHED, shed_ms) + late(DRAINED, drained_ms));
    findings.note(
        "moved_share_1s: of the requests that were open at s3 when it was to shed them (the paper: 0.80), those that \
         were at another server within a second; shed_empty_ms, drained_empty_ms: until s3, and s2, had none of theirs \
         any more",
    );
}

/// How many requests each server had at each step.
fn open_over_time(events: &Events, logged: &[Vec<Logged>]) -> Vec<Vec<f64>> {
    let last_ms = logged.iter().flatten().map(|one| one.ended_ms).fold(events.begun_ms, f64::max);
    let steps = ((last_ms - events.begun_ms) / STEP_MS) as usize + 1;
    let of_server = |requests: &Vec<Logged>| {
        (0..steps).map(|step| open_at(requests, events.begun_ms + step as f64 * STEP_MS).count() as f64).collect()
    };
    logged.iter().map(of_server).collect()
}

fn draw(events: &Events, logged: &[Vec<Logged>], findings: &mut Findings) -> Result<()> {
    let rates = open_over_time(events, logged);
    let times_ms = events.joins_ms.iter().copied().chain([events.shed_ms, events.drained_ms]);
    let words = ["s2 joins", "s3 joins", "s3 sheds", "s2 is drained"].map(str::to_owned);
    let changes: Vec<(f64, String)> = times_ms.map(|at_ms| (at_ms - events.begun_ms) / 1e3).zip(words).collect();
    let picture = Timeline {
        names: &SERVERS,
        unit: "requests that are open",
        rates: &rates,
        step_s: STEP_MS / 1e3,
        changes: &changes,
    };
    findings.draw(SCENARIO.name, &picture.svg())?;
    let is_drawn = rates.iter().all(|of_server| of_server.iter().any(|open| *open > 0.0));
    findings.set("figure_drawn", f64::from(u8::from(is_drawn)));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logged(arguments: &str, begun_ms: f64, ended_ms: f64, sent_bytes: u64) -> Logged {
        Logged { arguments: arguments.to_owned(), begun_ms, ended_ms, sent_bytes }
    }

    #[test]
    fn what_wget_ends_with_is_read() {
        let right = Ended { number: 7, status: 0, is_right: true, said: "2026-11-27 URL: x -> y [1]".to_owned() };
        assert_eq!(Ended::read("ended 7 0 0 2026-11-27 URL: x -> y [1]"), Some(right));
        assert_eq!(Ended::read("mkdir: no room"), None);
        let mut findings = Findings::default();
        judge_ended("c1", 4, "ended 0 0 0 \nended 1 4 1 refused\nended 2 0 1 \n", &mut findings);
        let figures = ["requests", "failed_requests", "wrong_bytes"];
        assert_eq!(figures.map(|figure| findings.figures.get(figure)), [3.0, 2.0, 1.0]);
    }

    #[test]
    fn requests_that_move_in_time_are_counted() {
        let events = Events { begun_ms: 0.0, joins_ms: vec![10.0, 20.0], shed_ms: 5000.0, drained_ms: 9000.0 };
        let whole = FILE_BYTES as u64;
        let first = vec![
            logged("c1-1", 5300.0, 8000.0, 40_000),
            logged("c1-2", 6100.0, 8000.0, 40_000),
            logged("c1-9", 100.0, 600.0, whole),
        ];
        let second = vec![logged("c2-1", 5200.0, 8000.0, 40_000), logged("c1-5", 8900.0, 9400.0, whole)];
        let third = vec![
            logged("c1-1", 4000.0, 5050.0, 60_000),
            logged("c1-2", 4100.0, 5050.0, 60_000),
            logged("c2-1", 4200.0, 5050.0, 60_000),
            // It ended by itself; and one that was late.
            logged("c1-3", 2000.0, 5020.0, whole),
            logged("c1-4", 6600.0, 6700.0, whole),
        ];
        let mut findings = Findings::default();
        judge(&events, &[first, second, third], &mut findings);
        let figures = ["open_when_shed", "moved_share_1s", "late_requests", "open_when_drained", "drained_empty_ms"];
        assert_eq!(figures.map(|figure| findings.figures.get(figure)), [3.0, 0.6667, 1.0, 1.0, 400.0]);
    }

    #[test]
    fn open_requests_are_drawn_over_time() {
        let events = Events { begun_ms: 1000.0, joins_ms: Vec::new(), shed_ms: 0.0, drained_ms: 0.0 };
        let open = open_over_time(&events, &[vec![logged("c1-1", 1100.0, 1600.0, 1)], Vec::new()]);
        assert_eq!(open, [vec![0.0, 1.0, 1.0], vec![0.0, 0.0, 0.0]]);
    }
}
