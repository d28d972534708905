//! `ensemble-churn`: unmodified memcacheds behind one switch, and clients that ask all the time and check each answer.
//! Members join, are drained, lose their weight, are told to stop, die by `kill -9`, lose their memcached, and lose
//! their link. All connections live on, nothing is lost, done twice or answered wrongly, and only what is not safe is
//! ever refused.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;

use super::{Findings, Scenario, is_long, site};
use crate::agent::{self, Agents};
use crate::arrivals::now_ms;
use crate::command::progress;
use crate::host::Host;
use crate::lab::Lab;
use crate::program::{Program, wait_for};
use crate::report::Limit::{AtLeast, Below, Exactly};
use crate::report::{Bound, bound, median, percentile};
use crate::series::Series;
use crate::traffic::Cached;
use crate::wire;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "ensemble-churn",
    summary: "one switch, four memcacheds that join, leave and die under load: no answer is wrong, no connection ends",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 9] = [
    bound("lost", Exactly(0.0)),
    bound("duplicated", Exactly(0.0)),
    bound("wrong_answers", Exactly(0.0)),
    bound("connections_ended", Exactly(0.0)),
    bound("refused_safe", Exactly(0.0)),
    bound("refused_without_a_death", Exactly(0.0)),
    bound("recover_ms_p99", Below(1000.0)),
    bound("deaths", AtLeast(3.0)),
    // Otherwise there was no load to speak of.
    bound("answers", AtLeast(2000.0)),
];

const ENSEMBLE: &str = "cache.shop";
const MEMBERS: &str = "cache-members.shop";
const HOSTS: [&str; 4] = ["m1", "m2", "m3", "m4"];
const PORT: u16 = 11_211;
const CONNECTIONS: u32 = 16;
/// How often all of it happens.
const ROUNDS: usize = 1;
const ROUNDS_LONG: usize = 5;
/// Answers between two events.
const CALM: u64 = 400;
const LIMIT: Duration = Duration::from_secs(30);
/// What is asked so long after a death may have waited for its discovery.
const AFTER_DEATH_MS: f64 = 2000.0;

/// A host with a memcached that is a member.
struct Member<'a> {
    host: &'a Host,
    memcached: Program,
    framer: Option<Program>,
}

/// What happens to a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    /// An operator drains it at the switch, and takes that back.
    Drain,
    /// An operator gives it the weight 0 on its own host, and the usual one again.
    Weight,
    /// It is told to stop, and starts again.
    Stop,
    /// It is killed, and starts again.
    Kill,
    /// Its memcached is killed, and starts again.
    KillProgram,
    /// Its link is cut, and mended.
    Cut,
}

const ACTS: [(Act, usize); 6] =
    [(Act::Stop, 1), (Act::Kill, 2), (Act::Drain, 1), (Act::Weight, 2), (Act::KillProgram, 0), (Act::Cut, 3)];

impl Act {
    const fn is_death(self) -> bool {
        matches!(self, Self::Kill | Self::KillProgram | Self::Cut)
    }
}

struct Site<'a> {
    lab: &'a Lab,
    switch: &'a Host,
    members: Vec<Member<'a>>,
    load: Series<Cached>,
    /// When members died.
    deaths_ms: Vec<f64>,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let names = [&HOSTS[..], &["switch", "client"]].concat();
    let lab = site::build(SCENARIO.name, site::V4, &names, dir)?;
    let _agents = Agents::start(&lab)?;
    let switch = lab.host("switch")?;
    let client = lab.host("client")?;
    // The last one joins under load.
    let mut members =
        HOSTS.iter().map(|name| start_member(lab.host(name)?, *name != HOSTS[3])).collect::<Result<Vec<_>>>()?;
    let _switch = switch.spawn("switch", ["margay", "ensemble", "serve", ENSEMBLE, "--members", MEMBERS])?;
    await_members(switch, 3)?;
    let _framer = client.spawn("framer", ["margay", "ensemble", "framer", "memcached", "--service", ENSEMBLE])?;
    await_listener(client)?;
    let load = start_load(client)?;
    let mut site = Site { lab: &lab, switch, members: Vec::new(), load, deaths_ms: Vec::new() };
    site.members.append(&mut members);
    site.calm()?;
    site.members[3].framer = Some(start_framer(site.members[3].host)?);
    await_members(switch, HOSTS.len())?;
    progress("a member has joined");
    for round in 0..if is_long() { ROUNDS_LONG } else { ROUNDS } {
        for (act, member) in ACTS {
            site.calm()?;
            site.carry_out(act, member).with_context(|| format!("round {round}, {act:?} of {}", HOSTS[member]))?;
        }
    }
    site.calm()?;
    let shown = shown(switch)?;
    findings.set("deaths", shown["member_deaths"].as_f64().unwrap_or_default());
    findings.set("connections_open", shown["connection_count"].as_f64().unwrap_or_default());
    let Site { load, deaths_ms, .. } = site;
    judge(&load.finish(LIMIT)?, &deaths_ms, findings);
    Ok(())
}

fn start_member(host: &Host, joins: bool) -> Result<Member<'_>> {
    let memcached = start_memcached(host)?;
    Ok(Member { host, memcached, framer: if joins { Some(start_framer(host)?) } else { None } })
}

fn start_memcached(host: &Host) -> Result<Program> {
    let port = PORT.to_string();
    let words = ["memcached", "-u", "root", "-l", "127.0.0.1", "-p", &port, "-t", "1", "-m", "64"];
    let program = host.spawn("memcached", words)?;
    await_listener(host)?;
    Ok(program)
}

fn start_framer(host: &Host) -> Result<Program> {
    host.spawn("member", ["margay", "ensemble", "member", MEMBERS])
}

fn await_listener(host: &Host) -> Result<()> {
    let script = format!("exec 3<>/dev/tcp/127.0.0.1/{PORT}");
    wait_for(&format!("a listener on {}", host.name()), LIMIT, || host.shell(&script).map(drop))
}

fn start_load(client: &Host) -> Result<Series<Cached>> {
    let words = ["memcached-checked".to_owned(), format!("127.0.0.1:{PORT}"), format!("--count={CONNECTIONS}")];
    Series::start(client, &words)
}

/// What the switch shows.
fn shown(switch: &Host) -> Result<Value> {
    let text = agent::margay(switch, ["ensemble", "show", ENSEMBLE, "--json"])?;
    serde_json::from_str(&text).context("the switch shows no JSON")
}

fn state_of(shown: &Value, host: &str) -> String {
    let mut members = shown["members"].as_array().into_iter().flatten();
    let found = members.find(|member| member["name"] == host);
    found.and_then(|member| member["state"].as_str()).unwrap_or("absent").to_owned()
}

/// Waits until so many members are up, and part of every connection.
fn await_members(switch: &Host, count: usize) -> Result<()> {
    wait_for("members", LIMIT, || {
        let shown = shown(switch)?;
        let members = shown["members"].as_array().cloned().unwrap_or_default();
        let is_whole =
            |member: &&Value| member["state"] == "up" && member["connection_count"] == shown["connection_count"];
        ensure!(members.iter().filter(is_whole).count() == count, "they are {members:?}");
        Ok(())
    })
}

/// Waits until a member is not up any more.
fn await_out(switch: &Host, host: &str) -> Result<()> {
    wait_for(&format!("{host} is out"), LIMIT, || {
        let state = state_of(&shown(switch)?, host);
        ensure!(state != "up", "it is {state}");
        Ok(())
    })
}

impl Site<'_> {
    fn answers(&self) -> u64 {
        self.load.lines().iter().map(|slot| slot.answered).sum()
    }

    /// Waits for some answers.
    fn calm(&self) -> Result<()> {
        let before = self.answers();
        wait_for("answers", LIMIT, || {
            let count = self.answers() - before;
            ensure!(count >= CALM, "there are {count}");
            Ok(())
        })
    }

    fn carry_out(&mut self, act: Act, at: usize) -> Result<()> {
        let lab = self.lab;
        let switch = self.switch;
        let member = &mut self.members[at];
        let name = member.host.name();
        if act.is_death() {
            self.deaths_ms.push(now_ms());
        }
        match act {
            Act::Drain => {
                agent::margay(switch, ["ensemble", "drain", ENSEMBLE, name])?;
                await_out(switch, name)?;
                agent::margay(switch, ["ensemble", "drain", ENSEMBLE, name, "--undo"])?;
            }
            Act::Weight => {
                let set = |weight| agent::margay(member.host, ["service", "set", MEMBERS, "--weight", weight]);
                set("0")?;
                await_out(switch, name)?;
                set("100")?;
            }
            Act::Stop => {
                let mut framer = member.framer.take().context("it does not run")?;
                framer.signal(Signal::SIGTERM)?;
                framer.finish(LIMIT)?;
                member.framer = Some(start_framer(member.host)?);
            }
            Act::Kill => {
                let framer = member.framer.take().context("it does not run")?;
                framer.signal(Signal::SIGKILL)?;
                await_out(switch, name)?;
                member.framer = Some(start_framer(member.host)?);
            }
            Act::KillProgram => {
                member.memcached.signal(Signal::SIGKILL)?;
                await_out(switch, name)?;
                member.memcached = start_memcached(member.host)?;
            }
            Act::Cut => {
                wire::set_link(&lab.topology, member.host, false)?;
                await_out(switch, name)?;
                wire::set_link(&lab.topology, member.host, true)?;
            }
        }
        await_members(switch, HOSTS.len())
    }
}

fn judge(slots: &[Cached], deaths_ms: &[f64], findings: &mut Findings) {
    let sum = |of: fn(&Cached) -> u64| slots.iter().map(of).sum::<u64>() as f64;
    findings.set("answers", sum(|slot| slot.answered));
    findings.set("lost", sum(|slot| slot.lost));
    findings.set("duplicated", sum(|slot| slot.duplicated));
    findings.set("wrong_answers", sum(|slot| slot.wrong));
    findings.set("connections_ended", sum(|slot| slot.closed));
    findings.set("refused_safe", sum(|slot| slot.refused_safe));
    findings.set("refused_unsafe", sum(|slot| slot.refused_unsafe));
    let is_after_death =
        |at_ms: f64| deaths_ms.iter().any(|death_ms| (0.0..AFTER_DEATH_MS).contains(&(at_ms - death_ms)));
    let strange = slots.iter().filter(|slot| !is_after_death(slot.at_ms)).map(|slot| slot.refused_unsafe).sum::<u64>();
    findings.set("refused_without_a_death", strange as f64);
    let waits_ms = waits_after(slots, deaths_ms);
    findings.set("recover_ms_p99", percentile(&waits_ms, 99.0));
    findings.set("recover_ms", median(&waits_ms));
    for error in slots.iter().flat_map(|slot| &slot.errors).take(8) {
        findings.note(error.clone());
    }
}

/// The longest wait of each connection for an answer, for each death; none is a wait of no time.
fn waits_after(slots: &[Cached], deaths_ms: &[f64]) -> Vec<f64> {
    let mut waits_ms = Vec::new();
    for death_ms in deaths_ms {
        for connection in 0..CONNECTIONS {
            let of_connection = slots.iter().flat_map(|slot| &slot.slow).filter(|slow| slow.connection == connection);
            let near = of_connection
                .filter(|slow| slow.begun_ms + slow.took_ms > *death_ms && slow.begun_ms < death_ms + AFTER_DEATH_MS);
            waits_ms.push(near.map(|slow| slow.took_ms).fold(0.0, f64::max));
        }
    }
    waits_ms
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::traffic::Slow;

    #[test]
    fn a_wait_counts_for_the_death_that_it_is_near() {
        let slow = |connection, begun_ms, took_ms| Slow { connection, begun_ms, took_ms };
        let slots = [Cached {
            slow: vec![slow(0, 900.0, 300.0), slow(0, 2000.0, 50.0), slow(1, 100.0, 20.0), slow(1, 9000.0, 700.0)],
            ..Cached::default()
        }];
        let waits = waits_after(&slots, &[1000.0]);
        assert_eq!(waits.len(), CONNECTIONS as usize);
        assert_eq!(waits[..3], [300.0, 0.0, 0.0]);
    }
}
