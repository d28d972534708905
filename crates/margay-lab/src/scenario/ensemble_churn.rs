//! `ensemble-churn`: unmodified memcacheds behind one switch, and clients that ask all the time and check each answer.
//! Members join, are drained, lose their weight, are told to stop, die by `kill -9`, lose their memcached, and lose
//! their link. The switch is one of the agent's configuration, and is given modules that adopt its connections. All
//! connections live on, nothing is lost, done twice or answered wrongly, and only what is not safe is ever refused.

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
use crate::lab::Lab;
use crate::program::{Program, wait_for};
use crate::report::Limit::{AtLeast, Below, Exactly};
use crate::report::{Bound, bound};
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

const BOUNDS: [Bound; 10] = [
    bound("lost", Exactly(0.0)),
    bound("duplicated", Exactly(0.0)),
    bound("wrong_answers", Exactly(0.0)),
    bound("connections_ended", Exactly(0.0)),
    bound("refused_safe", Exactly(0.0)),
    bound("refused_without_a_death", Exactly(0.0)),
    bound("recover_ms_p99", Below(1000.0)),
    bound("deaths", AtLeast(3.0)),
    bound("adopted", AtLeast(CONNECTIONS as f64)),
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
    /// No member's affair: the configuration names another module, which adopts all connections.
    Module,
}

const ACTS: [(Act, usize); 8] = [
    (Act::Stop, 1),
    (Act::Module, 0),
    (Act::Kill, 2),
    (Act::Drain, 1),
    (Act::Weight, 2),
    (Act::KillProgram, 0),
    (Act::Module, 1),
    (Act::Cut, 3),
];
/// The template of modules: where no member is called `images`, it divides requests as the ring does.
const MODULE: &str = include_str!("../../../../examples/alrm/prefix.wat");

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
    /// Connections that modules have adopted.
    adopted: f64,
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
    configure(switch, "")?;
    await_members(switch, ENSEMBLE, 3)?;
    let _framer = client.spawn("framer", ["margay", "ensemble", "framer", "memcached", "--service", ENSEMBLE])?;
    await_listener(client)?;
    let load = start_load(client)?;
    let mut site = Site { lab: &lab, switch, members: Vec::new(), load, deaths_ms: Vec::new(), adopted: 0.0 };
    site.members.append(&mut members);
    site.calm()?;
    site.members[3].framer = Some(start_framer(site.members[3].host)?);
    await_members(switch, ENSEMBLE, HOSTS.len())?;
    progress("a member has joined");
    for round in 0..if is_long() { ROUNDS_LONG } else { ROUNDS } {
        for (act, member) in ACTS {
            site.calm()?;
            site.carry_out(act, member).with_context(|| format!("round {round}, {act:?} of {}", HOSTS[member]))?;
        }
    }
    site.calm()?;
    let shown = shown(switch, ENSEMBLE)?;
    findings.set("deaths", shown["member_deaths"].as_f64().unwrap_or_default());
    findings.set("connections_open", shown["connection_count"].as_f64().unwrap_or_default());
    findings.set("adopted", site.adopted);
    let Site { load, deaths_ms, .. } = site;
    judge(&load.finish(LIMIT)?, CONNECTIONS, &deaths_ms, findings);
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

/// Has the switch host's agent run the switch, by a section with these lines.
fn configure(switch: &Host, lines: &str) -> Result<()> {
    let script = format!(
        "cd /etc/margay; touch margay.toml; test -e before.toml || cp margay.toml before.toml; cp before.toml \
         next.toml; printf '\\n[[ensemble]]\\nname = \"{ENSEMBLE}\"\\nmembers = \"{MEMBERS}\"\\n{lines}\\n' >> \
         next.toml; mv next.toml margay.toml"
    );
    switch.shell(&script)?;
    agent::margay(switch, ["reload"])?;
    // A process that starts.
    wait_for("the switch", LIMIT, || shown(switch, ENSEMBLE).map(drop))
}

fn start_load(client: &Host) -> Result<Series<Cached>> {
    let words = ["cache-checked".to_owned(), format!("127.0.0.1:{PORT}"), format!("--count={CONNECTIONS}")];
    Series::start(client, &words)
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

    /// Another module, of which nothing but the file is another.
    fn change_module(&mut self, number: usize) -> Result<()> {
        let path = self.switch.dir.join(format!("module-{number}.wasm"));
        std::fs::write(&path, wat::parse_str(MODULE)?).with_context(|| format!("cannot write {}", path.display()))?;
        let file = path.to_str().context("the path has odd letters")?;
        configure(self.switch, &format!("module = \"{file}\""))?;
        let mut adopted = 0.0;
        wait_for("the module's connections", LIMIT, || {
            let all = shown(self.switch, ENSEMBLE)?;
            let module = &all["module"];
            adopted = module["adopted"].as_f64().unwrap_or_default();
            // One that a framer has given up is there for a while.
            ensure!(module["file"] == file, "it is {module}");
            ensure!(module["connection_count"] == all["connection_count"], "it has not all: {module}");
            ensure!(module["faults"] == 0, "it has failed: {module}");
            Ok(())
        })?;
        self.adopted += adopted;
        Ok(())
    }

    fn carry_out(&mut self, act: Act, at: usize) -> Result<()> {
        if act == Act::Module {
            return self.change_module(at);
        }
        let lab = self.lab;
        let switch = self.switch;
        let member = &mut self.members[at];
        let name = member.host.name();
        if act.is_death() {
            self.deaths_ms.push(now_ms());
        }
        match act {
            Act::Module => {}
            Act::Drain => {
                agent::margay(switch, ["ensemble", "drain", ENSEMBLE, name])?;
                await_out(switch, ENSEMBLE, name)?;
                agent::margay(switch, ["ensemble", "drain", ENSEMBLE, name, "--undo"])?;
            }
            Act::Weight => {
                let set = |weight| agent::margay(member.host, ["service", "set", MEMBERS, "--weight", weight]);
                set("0")?;
                await_out(switch, ENSEMBLE, name)?;
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
                await_out(switch, ENSEMBLE, name)?;
                member.framer = Some(start_framer(member.host)?);
            }
            Act::KillProgram => {
                member.memcached.signal(Signal::SIGKILL)?;
                await_out(switch, ENSEMBLE, name)?;
                member.memcached = start_memcached(member.host)?;
            }
            Act::Cut => {
                wire::set_link(&lab.topology, member.host, false)?;
                await_out(switch, ENSEMBLE, name)?;
                wire::set_link(&lab.topology, member.host, true)?;
            }
        }
        await_members(switch, ENSEMBLE, HOSTS.len())
    }
}
