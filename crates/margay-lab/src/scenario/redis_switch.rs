//! `redis-switch`: unmodified Redis servers behind one switch. redis-cli, redis-benchmark and clients that check each
//! answer ask them by one address, while a server joins, one is drained and two die. No answer is wrong, none is lost,
//! no connection ends, and only what is not safe is refused, after deaths.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;

use super::ensemble::{await_members, await_out, judge, shown};
use super::{Findings, Scenario, is_long, site};
use crate::agent::{self, Agents};
use crate::arrivals::now_ms;
use crate::command::progress;
use crate::host::Host;
use crate::program::{Program, wait_for};
use crate::report::Limit::{AtLeast, Below, Exactly};
use crate::report::{Bound, bound};
use crate::series::Series;
use crate::server::await_listener;
use crate::traffic::Cached;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "redis-switch",
    summary: "one switch, Redis servers that join, leave and die under load: no answer is wrong, no connection ends",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 11] = [
    bound("lost", Exactly(0.0)),
    bound("duplicated", Exactly(0.0)),
    bound("wrong_answers", Exactly(0.0)),
    bound("connections_ended", Exactly(0.0)),
    bound("refused_safe", Exactly(0.0)),
    bound("refused_without_a_death", Exactly(0.0)),
    // Of redis-cli and redis-benchmark.
    bound("failed", Exactly(0.0)),
    bound("benchmarks", AtLeast(BENCHMARKS as f64)),
    bound("recover_ms_p99", Below(1000.0)),
    bound("deaths", AtLeast(2.0)),
    // Otherwise there was no load to speak of.
    bound("answers", AtLeast(2000.0)),
];

const ENSEMBLE: &str = "redis.shop";
const MEMBERS: &str = "redis-members.shop";
const HOSTS: [&str; 4] = ["r1", "r2", "r3", "r4"];
const PORT: &str = "6379";
const CONNECTIONS: u32 = 16;
/// What redis-benchmark asks for.
const TESTS: &str = "ping,set,get,incr,lpush,rpush,lpop,rpop,sadd,hset,spop,zadd,zpopmin,lrange_100,mset";
/// Lines of figures that redis-benchmark prints for them.
const BENCHMARKS: usize = 17;
const REQUESTS: &str = "400";
const REQUESTS_LONG: &str = "20000";
/// How often servers die.
const ROUNDS: usize = 1;
const ROUNDS_LONG: usize = 5;
/// Answers between two events.
const CALM: u64 = 400;
const LIMIT: Duration = Duration::from_secs(30);
const BENCHMARK_LIMIT: Duration = Duration::from_secs(60);

/// What redis-cli is told, and what it prints.
const COMMANDS: [(&str, &str); 11] = [
    ("PING", "PONG"),
    ("MSET a 1 b 2 c 3 {t}d 4 {t}e 5", "OK"),
    ("MGET a none b c", "1\n\n2\n3"),
    ("EXISTS a b none", "2"),
    ("DEL a b none", "2"),
    ("HSET hash field value", "1"),
    ("-3 --json HGETALL hash", r#"{"field":"value"}"#),
    ("RENAME {t}d {t}e", "OK"),
    ("EVAL return{KEYS[1],ARGV[1]} 1 c argument", "c\nargument"),
    ("RENAME {t}e c", "CROSSSLOT "),
    ("SUBSCRIBE channel", "ERR SUBSCRIBE is not supported by an ensemble"),
];

/// A host with a Redis that is a member.
struct Member<'a> {
    host: &'a Host,
    redis: Program,
    framer: Option<Program>,
}

impl<'a> Member<'a> {
    fn start(host: &'a Host, joins: bool) -> Result<Self> {
        let redis = start_redis(host)?;
        Ok(Self { host, redis, framer: if joins { Some(start_member(host)?) } else { None } })
    }
}

fn start_redis(host: &Host) -> Result<Program> {
    let data = host.dir.display().to_string();
    let words = ["redis-server", "--port", PORT, "--bind", "127.0.0.1", "--save", "", "--dir", &data];
    let mut redis = host.spawn("redis", words)?;
    await_listener(host, &mut redis, PORT)?;
    Ok(redis)
}

fn start_member(host: &Host) -> Result<Program> {
    host.spawn("member", ["margay", "ensemble", "member", MEMBERS, "--protocol", "resp"])
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let names = [&HOSTS[..], &["switch", "client"]].concat();
    let lab = site::build(SCENARIO.name, site::V4, &names, dir)?;
    let _agents = Agents::start(&lab)?;
    let switch = lab.host("switch")?;
    let client = lab.host("client")?;
    // The last one joins under load.
    let mut members =
        HOSTS.iter().map(|name| Member::start(lab.host(name)?, *name != HOSTS[3])).collect::<Result<Vec<_>>>()?;
    let words = ["margay", "ensemble", "serve", ENSEMBLE, "--members", MEMBERS, "--protocol", "resp"];
    let _switch = switch.spawn("switch", words)?;
    await_members(switch, ENSEMBLE, 3)?;
    let mut framer = client.spawn("framer", ["margay", "ensemble", "framer", "resp", "--service", ENSEMBLE])?;
    await_listener(client, &mut framer, PORT)?;
    let mut failed = ask_by_hand(client, findings)?;
    let words = ["cache-checked", &format!("127.0.0.1:{PORT}"), &format!("--count={CONNECTIONS}"), "--redis"];
    let load: Series<Cached> = Series::start(client, &words.map(str::to_owned))?;
    calm(&load)?;
    let benchmark = start_benchmark(client)?;
    members[3].framer = Some(start_member(members[3].host)?);
    await_members(switch, ENSEMBLE, HOSTS.len())?;
    progress("a server has joined");
    calm(&load)?;
    drain(switch, HOSTS[0])?;
    failed += judge_benchmark(benchmark, findings)?;
    let mut deaths_ms = Vec::new();
    for round in 0..if is_long() { ROUNDS_LONG } else { ROUNDS } {
        calm(&load)?;
        kill(switch, &mut members, &mut deaths_ms).with_context(|| format!("round {round}"))?;
    }
    calm(&load)?;
    let shown = shown(switch, ENSEMBLE)?;
    findings.set("deaths", shown["member_deaths"].as_f64().unwrap_or_default());
    findings.set("failed", f64::from(failed));
    judge(&load.finish(LIMIT)?, CONNECTIONS, &deaths_ms, findings);
    Ok(())
}

/// Waits for some answers.
fn calm(load: &Series<Cached>) -> Result<()> {
    let answers = || -> u64 { load.lines().iter().map(|slot| slot.answered).sum() };
    let before = answers();
    wait_for("answers", LIMIT, || {
        let count = answers() - before;
        ensure!(count >= CALM, "there are {count}");
        Ok(())
    })
}

/// What redis-cli prints. Gives how much of that is wrong.
fn ask_by_hand(client: &Host, findings: &mut Findings) -> Result<u32> {
    let mut failed = 0;
    for (command, expected) in COMMANDS {
        // An error is printed, too.
        let said = client.shell(&format!("redis-cli {} || true", command.replace('{', "\\{")))?;
        if !said.trim_end_matches('\n').starts_with(expected) {
            findings.note(format!("redis-cli {command}: {said}"));
            failed += 1;
        }
    }
    Ok(failed)
}

fn start_benchmark(client: &Host) -> Result<Program> {
    let requests = if is_long() { REQUESTS_LONG } else { REQUESTS };
    let words = ["redis-benchmark", "-t", TESTS, "-n", requests, "-r", "500", "-c", "16", "-P", "4", "--csv"];
    client.spawn("benchmark", words)
}

/// Waits for redis-benchmark, and counts what it says. Gives how much has failed.
fn judge_benchmark(mut benchmark: Program, findings: &mut Findings) -> Result<u32> {
    benchmark.finish(BENCHMARK_LIMIT)?;
    let log = benchmark.log();
    let lines = log.lines().filter(|line| line.starts_with('"') && !line.starts_with("\"test\"")).count();
    findings.set("benchmarks", lines as f64);
    let errors: Vec<&str> = log.lines().filter(|line| line.to_lowercase().contains("error")).collect();
    errors.iter().for_each(|line| findings.note((*line).to_owned()));
    Ok(u32::try_from(errors.len())?)
}

/// A server is drained, and used again.
fn drain(switch: &Host, name: &str) -> Result<()> {
    agent::margay(switch, ["ensemble", "drain", ENSEMBLE, name])?;
    await_out(switch, ENSEMBLE, name)?;
    agent::margay(switch, ["ensemble", "drain", ENSEMBLE, name, "--undo"])?;
    await_members(switch, ENSEMBLE, HOSTS.len())
}

/// One member's Redis dies, and another member's framer.
fn kill(switch: &Host, members: &mut [Member<'_>], deaths_ms: &mut Vec<f64>) -> Result<()> {
    let member = &mut members[1];
    deaths_ms.push(now_ms());
    member.redis.signal(Signal::SIGKILL)?;
    await_out(switch, ENSEMBLE, member.host.name())?;
    member.redis = start_redis(member.host)?;
    await_members(switch, ENSEMBLE, HOSTS.len())?;
    progress("a Redis has died, and is there again");
    let member = &mut members[2];
    deaths_ms.push(now_ms());
    member.framer.take().context("it does not run")?.signal(Signal::SIGKILL)?;
    await_out(switch, ENSEMBLE, member.host.name())?;
    member.framer = Some(start_member(member.host)?);
    await_members(switch, ENSEMBLE, HOSTS.len())
}
