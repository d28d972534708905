//! `sick-instance`: three web servers of one name are checked by their own agents. One after the other goes out of
//! service: by an error page, by standing still, and by the end of its listener. It gets no new connections, those that
//! are open live on, the lists say why, and it comes back. A server whose cgroup waits for a processor loses a part of
//! its weight, and so does one that reports its load by the SDK.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;

use super::rolling_restart::{LISTEN, NAME, SERVICE, await_answer, connect, has_failed, instance};
use super::{Findings, Scenario, pair, site};
use crate::agent::{self, Agents};
use crate::arrivals::{Arrival, Arrivals, now_ms};
use crate::downloads::{self, Downloads, Order};
use crate::host::Host;
use crate::program::wait_for;
use crate::python;
use crate::report::Limit::{AtLeast, AtMost, Below, Exactly};
use crate::report::{Bound, bound};
use crate::server::{self, Nginx, noise, sha256};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "sick-instance",
    summary: "an instance whose checks fail gets no new connections, keeps those it has, and comes back",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 13] = [
    bound("new_share_after_ms", Below(5000.0)),
    bound("back_s", AtMost(20.0)),
    bound("resets", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
    bound("reason_wrong", Exactly(0.0)),
    // Otherwise the part of one way is missing.
    bound("ways", AtLeast(WAYS.len() as f64)),
    // Otherwise nothing lived on.
    bound("flows_while_sick", AtLeast(1.0)),
    // Otherwise there were none to speak of.
    bound("requests", AtLeast(200.0)),
    bound("all_sick_served", Exactly(0.0)),
    bound("all_sick_refused_ms", Below(1000.0)),
    // What is left of the weight while more programs of a cgroup want a processor than there are.
    bound("pressed_percent", AtMost(PRESSED_PERCENT)),
    // Reports of load by the SDK that were followed, and the end of them.
    bound("reports_followed", Exactly(REPORTED.len() as f64 + 1.0)),
];

const SERVERS: [&str; 3] = ["web1", "web2", "web3"];
/// The page that is asked for by checks.
const PAGE: &str = "healthz";
const CHECK: [&str; 10] =
    ["--check-http", "/healthz", "--check-interval", "1s", "--check-timeout", "500ms", "--rise", "2", "--fall", "2"];
const LIMIT: Duration = Duration::from_secs(20);
const DOWNLOADS_LIMIT: Duration = Duration::from_secs(60);
/// A share of new connections that is none.
const NO_SHARE: f64 = 0.02;
/// Requests that are looked at while an instance is out.
const WHILE_OUT: usize = 50;
/// The same while all are.
const WHILE_ALL_OUT: usize = 20;
/// So many that some are at each instance.
const DOWNLOADS: usize = 24;
/// Longer than an instance takes to become sick.
const DOWNLOAD_BYTES: usize = 1_200_000;
const PACE: u64 = 200_000;

/// Of the server whose load is the pressure on its cgroup.
const PRESSED_SERVICE: &str = "pressed.shop";
const PRESSED_PORT: u16 = 90;
const PRESSED_PERCENT: f64 = 80.0;
/// Makes the cgroup of the server, of process `$1`, and lets programs there want processors, for less time than the
/// scenario has.
const PRESS: &str = "\
root=$(awk '$3 == \"cgroup2\" { print $2; exit }' /proc/mounts)
mkdir -p $root/pressed
echo $1 > $root/pressed/cgroup.procs
for program in $(seq $((4 * $(nproc)))); do
    timeout 15 sh -c \"echo \\$\\$ > $root/pressed/cgroup.procs; while :; do :; done\" &
done
wait
";
const RELEASE: &str = "echo 1 > $(awk '$3 == \"cgroup2\" { print $2; exit }' /proc/mounts)/pressed/cgroup.kill";

/// Of the server that reports its load.
const LOADED_SERVICE: &str = "loaded.shop";
const LOADED: &str = include_str!("reported_load.py");
const REPORTED: [u32; 2] = [30, 0];

/// How an instance becomes sick.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// The page that is asked for is an error.
    Error,
    /// The program stands still; the kernel takes connections for it.
    Still,
    /// Nothing listens.
    Gone,
}

const WAYS: [Way; 3] = [Way::Error, Way::Still, Way::Gone];

impl Way {
    /// What lists say of the instance: its state, and what the reason has in it.
    const fn said(self) -> (&'static str, &'static str) {
        match self {
            Self::Error => ("sick", "answers 404"),
            Self::Still => ("sick", "no answer within 500ms"),
            Self::Gone => ("waiting", ""),
        }
    }

    fn begin(self, nginx: &mut Nginx) -> Result<()> {
        match self {
            Self::Error => std::fs::remove_file(nginx.root.join(PAGE)).context("cannot remove the page"),
            Self::Still => nginx.program.signal(Signal::SIGSTOP),
            Self::Gone => {
                nginx.program.stop();
                Ok(())
            }
        }
    }

    fn end(self, host: &Host, nginx: &mut Nginx) -> Result<()> {
        match self {
            Self::Error => nginx.put(PAGE, b"well\n"),
            Self::Still => nginx.program.signal(Signal::SIGCONT),
            Self::Gone => {
                *nginx = Nginx::start(host, &[LISTEN])?;
                Ok(())
            }
        }
    }
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = site::build(SCENARIO.name, site::V4, &[&SERVERS[..], &["client"]].concat(), dir)?;
    let _agents = Agents::start(&lab)?;
    let client = lab.host("client")?;
    let servers = SERVERS.iter().map(|name| lab.host(name)).collect::<Result<Vec<_>>>()?;
    let mut running = servers.iter().map(|host| serve(host)).collect::<Result<Vec<_>>>()?;
    agent::await_instances(client, SERVICE, servers.len())?;
    let mut arrivals = connect(client, NAME)?;
    servers.iter().try_for_each(|server| await_answer(&mut arrivals, server))?;
    arrivals.stop()?;

    pair::attempt_part("downloads from a sick instance", findings, |findings| {
        let sha256 = put(client, &running)?;
        let order = Order { host: NAME, path: "file", count: DOWNLOADS, pace: PACE };
        let mut downloads = Downloads::start(client, order)?;
        downloads.await_open(LIMIT)?;
        fall_sick(Way::Error, client, servers[0], &mut running[0], findings)?;
        judge_downloads(&downloads.finish(DOWNLOADS_LIMIT)?, &sha256, findings);
        Ok(())
    });
    for (at, way) in [(1, Way::Still), (2, Way::Gone)] {
        pair::attempt_part("an instance that is out", findings, |findings| {
            fall_sick(way, client, servers[at], &mut running[at], findings)
        });
    }
    pair::attempt_part("all instances are sick", findings, |findings| {
        running.iter_mut().try_for_each(|nginx| Way::Error.begin(nginx))?;
        for host in &servers {
            let shown = await_out(Way::Error, host)?;
            judge_lists(Way::Error, client, host, &shown, findings)?;
        }
        judge_refused(&mut connect(client, NAME)?, findings)
    });
    pair::attempt_part("pressure on a server's cgroup", findings, |findings| press(client, servers[0], findings));
    pair::attempt_part("reports of load", findings, |findings| report(client, servers[1], findings));
    Ok(())
}

fn serve(host: &Host) -> Result<Nginx> {
    let nginx = Nginx::start(host, &[LISTEN])?;
    nginx.put(PAGE, b"well\n")?;
    agent::publish(host, SERVICE, LISTEN, &CHECK)?;
    Ok(nginx)
}

/// Puts the file of the downloads on all servers, and gives its hash.
fn put(client: &Host, running: &[Nginx]) -> Result<String> {
    let content = noise(DOWNLOAD_BYTES, 1);
    running.iter().try_for_each(|nginx| nginx.put("file", &content))?;
    sha256(client, &running[0].root.join("file"))
}

/// Has an instance become sick, and well again, under requests.
fn fall_sick(way: Way, client: &Host, host: &Host, nginx: &mut Nginx, findings: &mut Findings) -> Result<()> {
    let mut arrivals = connect(client, NAME)?;
    await_answer(&mut arrivals, host)?;
    let begun_ms = now_ms();
    way.begin(nginx)?;
    let shown = await_out(way, host)?;
    judge_lists(way, client, host, &shown, findings)?;
    if way == Way::Error {
        findings.set("flows_while_sick", shown["flows"].as_f64().unwrap_or_default());
    }
    // Those that came before may wait for an instance that stands still.
    let mut fresh = connect(client, NAME)?;
    judge_while_out(&mut fresh, host, findings)?;

    let ended_ms = now_ms();
    way.end(host, nginx)?;
    await_answer(&mut fresh, host)?;
    let back_s = (now_ms() - ended_ms) / 1e3;
    findings.set("back_s", findings.figures.get("back_s").max(back_s));
    fresh.stop()?;
    let all: Vec<Arrival> = arrivals.until(now_ms(), LIMIT)?.cloned().collect();
    arrivals.stop()?;
    let seen: Vec<&Arrival> = all.iter().filter(|arrival| (begun_ms..ended_ms).contains(&arrival.begun_ms)).collect();
    let after_ms = no_share_after_ms(&seen, begun_ms, host.name()).context("it had its share to the end")?;
    findings.set("new_share_after_ms", findings.figures.get("new_share_after_ms").max(after_ms));
    findings.figures.add("requests", all.len() as f64);
    findings.figures.add("ways", 1.0);
    Ok(())
}

/// This host's part of what a host shows of the service.
fn own(host: &Host) -> Result<Value> {
    let mut shown = agent::show(host, SERVICE)?;
    Ok(shown["service"].take())
}

/// Waits until the agent of an instance says that it is out. Gives what it says.
fn await_out(way: Way, host: &Host) -> Result<Value> {
    let (state, _) = way.said();
    wait_for(&format!("{} is out", host.name()), LIMIT, || {
        let shown = own(host)?;
        let is_out = shown["health"]["state"] == state || shown["state"] == state;
        ensure!(is_out, "it is in: {shown}");
        Ok(shown)
    })
}

/// The agent of the instance and the router say that it is out, and why.
fn judge_lists(way: Way, client: &Host, host: &Host, shown: &Value, findings: &mut Findings) -> Result<()> {
    let (_, why) = way.said();
    let reason = shown["health"]["reason"].as_str().unwrap_or_default();
    let is_without_weight = way == Way::Gone || shown["effective_weight"] == 0;
    let is_right = reason.contains(why) && is_without_weight && shown["weight"] == 100;
    if !is_right {
        findings.note(format!("{} says of itself: {shown}", host.name()));
    }
    findings.figures.add("reason_wrong", f64::from(u8::from(!is_right)));
    wait_for(&format!("the router's list of {}", host.name()), LIMIT, || {
        let resolved = agent::resolve(client, SERVICE)?;
        let mut instances = resolved["instances"].as_array().into_iter().flatten();
        let listed = instances.find(|listed| listed["host_name"] == host.name());
        ensure!(listed.is_none_or(|listed| listed["weight"] == 0), "it has a share: {resolved}");
        let said = |listed: &Value| listed["zero_weight"].as_str().is_some_and(|why| why.starts_with("sick: "));
        ensure!(listed.is_none_or(said), "the router does not say why: {resolved}");
        Ok(())
    })
}

/// The first requests, when there are so many.
fn first(fresh: &mut Arrivals, count: usize) -> Result<Vec<Arrival>> {
    wait_for("requests while an instance is out", LIMIT, || {
        let seen: Vec<Arrival> = fresh.until(now_ms(), LIMIT)?.cloned().collect();
        ensure!(seen.len() >= count, "there are {}", seen.len());
        Ok(seen)
    })
}

/// While all instances are sick, requests are refused at once.
fn judge_refused(fresh: &mut Arrivals, findings: &mut Findings) -> Result<()> {
    let seen = first(fresh, WHILE_ALL_OUT)?;
    fresh.stop()?;
    let served = seen.iter().filter(|arrival| !has_failed(arrival)).count();
    findings.set("all_sick_served", served as f64);
    findings.set("all_sick_refused_ms", seen.iter().map(|arrival| arrival.took_ms).fold(0.0, f64::max));
    let errors = seen.first().map(|arrival| arrival.error.as_str()).unwrap_or_default();
    findings.note(format!("while all are sick, a client is told: {errors}"));
    Ok(())
}

/// While an instance is out, no request fails or comes to it.
fn judge_while_out(fresh: &mut Arrivals, host: &Host, findings: &mut Findings) -> Result<()> {
    let seen = first(fresh, WHILE_OUT)?;
    let is_wrong = |arrival: &&Arrival| has_failed(arrival) || instance(arrival) == host.name();
    let wrong: Vec<&Arrival> = seen.iter().filter(is_wrong).collect();
    // The first few tell as much as all of them.
    for arrival in wrong.iter().take(3) {
        let Arrival { took_ms, answered, error, .. } = arrival;
        findings.note(format!("while {} was out, after {took_ms:.0} ms: {error}; {answered:?}", host.name()));
    }
    findings.figures.add("failed", wrong.len() as f64);
    Ok(())
}

/// A server has less of its weight while its cgroup waits for processors; one without a cgroup is told so.
fn press(client: &Host, host: &Host, findings: &mut Findings) -> Result<()> {
    let greeter = server::greeter(host, ([0; 4], PRESSED_PORT).into())?;
    let options = ["--load-cpu", "--load-interval", "1s"];
    agent::publish(host, PRESSED_SERVICE, &format!("0.0.0.0:{PRESSED_PORT}"), &options)?;
    let shown = || Ok::<Value, anyhow::Error>(agent::show(host, PRESSED_SERVICE)?["service"].take());
    wait_for("a word about the missing cgroup", LIMIT, || {
        let shown = shown()?;
        let why = shown["health"]["load_failure"].as_str().unwrap_or_default();
        ensure!(why.contains("no cgroup of its own") && shown["effective_weight"] == 100, "it says {shown}");
        Ok(())
    })?;
    let _programs = host.spawn("press", ["bash", "-euc", PRESS, "press", &greeter.pid().to_string()])?;
    let percent = wait_for("less weight for a server that waits for processors", LIMIT, || {
        let shown = shown()?;
        let percent = shown["health"]["load_percent"].as_f64().context("its load is not known")?;
        let is_told = shown["health"]["load_failure"] == "" && shown["effective_weight"].as_f64() == Some(percent);
        ensure!(percent <= PRESSED_PERCENT && is_told, "it says {shown}");
        Ok(percent)
    })?;
    findings.set("pressed_percent", percent);
    let listed = wait_for("the router's list", LIMIT, || {
        let resolved = agent::resolve(client, PRESSED_SERVICE)?;
        let weight = resolved["instances"][0]["weight"].as_f64().context("it has no instance")?;
        ensure!(weight <= PRESSED_PERCENT, "it has its weight: {resolved}");
        Ok(weight)
    });
    host.shell(RELEASE)?;
    listed.map(drop)
}

/// A server has so much of its weight as it reports, until its connection to the agent ends.
fn report(client: &Host, host: &Host, findings: &mut Findings) -> Result<()> {
    let words: Vec<String> = REPORTED.iter().map(ToString::to_string).collect();
    let words: Vec<&str> = [LOADED_SERVICE].into_iter().chain(words.iter().map(String::as_str)).collect();
    let program = python::sdk(host, "reported_load.py", LOADED, &words)?;
    for left in REPORTED.into_iter().map(Some).chain([None]) {
        let percent = left.unwrap_or(100);
        wait_for(&format!("{percent} % of the weight"), LIMIT, || {
            let shown = agent::show(host, LOADED_SERVICE)?["service"].take();
            let is_said = shown["health"]["reported_percent"].as_u64() == left.map(u64::from);
            ensure!(is_said && shown["effective_weight"] == percent, "it says {shown}");
            let resolved = agent::resolve(client, LOADED_SERVICE)?;
            let listed = &resolved["instances"][0];
            ensure!(listed["weight"] == percent, "the router has another weight: {resolved}");
            let is_why = listed["zero_weight"] == "no weight left by its load";
            ensure!(percent > 0 || is_why, "the router does not say why: {resolved}");
            Ok(())
        })?;
        findings.figures.add("reports_followed", 1.0);
        program.signal(Signal::SIGUSR1)?;
    }
    Ok(())
}

fn judge_downloads(results: &[downloads::Download], sha256: &str, findings: &mut Findings) {
    let mut judged = Findings::default();
    downloads::judge("a download", results, sha256, &mut judged);
    findings.figures.add("resets", judged.figures.get("failed"));
    findings.figures.add("wrong_bytes", judged.figures.get("wrong_bytes"));
    findings.notes.append(&mut judged.notes);
}

/// How long after an event an instance has no share of the requests any more that begin from then on. Requests that
/// failed count as its own. None: it has one to the end.
fn no_share_after_ms(seen: &[&Arrival], event_ms: f64, sick: &str) -> Option<f64> {
    let is_its = |arrival: &&&Arrival| has_failed(arrival) || instance(arrival) == sick;
    let share = |from: usize| seen[from..].iter().filter(is_its).count() as f64 / (seen.len() - from) as f64;
    let from = (0..seen.len()).find(|from| share(*from) <= NO_SHARE)?;
    Some(seen[from].begun_ms - event_ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrival(begun_ms: f64, by: &str, error: &str) -> Arrival {
        Arrival { begun_ms, answered: by.to_owned(), error: error.to_owned(), ..Arrival::default() }
    }

    #[test]
    fn a_share_ends_with_the_last_request_that_counts() {
        let all = [
            arrival(1000.0, "web1", ""),
            arrival(1100.0, "web2", ""),
            arrival(1200.0, "", "refused"),
            arrival(1300.0, "web3", ""),
            arrival(1400.0, "web2", ""),
        ];
        let seen: Vec<&Arrival> = all.iter().collect();
        assert_eq!(no_share_after_ms(&seen, 1000.0, "web1"), Some(300.0));
        assert_eq!(no_share_after_ms(&seen, 1000.0, "web2"), None);
        assert_eq!(no_share_after_ms(&[], 1000.0, "web2"), None);
    }
}
