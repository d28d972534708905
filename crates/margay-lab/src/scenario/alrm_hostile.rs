//! `alrm-hostile`: a switch is given modules that loop, grow, trap and answer nonsense, and mutated datagrams.
//! Clients of another ensemble on the same host, with the same members, notice nothing.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::ensemble::{await_members, shown};
use super::{Findings, Scenario, is_long, site};
use crate::agent::{self, Agents};
use crate::command::progress;
use crate::host::Host;
use crate::observe;
use crate::program::{Program, output_within, wait_for};
use crate::report::Limit::{AtLeast, AtMost, Exactly};
use crate::report::{Bound, bound};
use crate::series::Series;
use crate::server::await_listener;
use crate::traffic::Cached;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "alrm-hostile",
    summary: "modules that loop, grow, trap and talk nonsense, and mutated datagrams: other connections notice nothing",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 9] = [
    // Of the other ensemble's connections.
    bound("failed", Exactly(0.0)),
    bound("agent_restarts", Exactly(0.0)),
    bound("switch_restarts", Exactly(0.0)),
    bound("memory_growth_mb", AtMost(20.0)),
    // Each hostile module was found out, and has lost its place.
    bound("modules_found_out", Exactly(MODULES.len() as f64)),
    // Processes that parse what other hosts and programs send: both switches, both framers of clients, and the carrier
    // of each member. None is root's or has a capability.
    bound("parsers", Exactly(PARSERS as f64)),
    bound("parsers_privileged", Exactly(0.0)),
    // A good module works after all of them.
    bound("good_answers", Exactly(1.0)),
    bound("answers", AtLeast(500.0)),
];

const ENSEMBLE: &str = "cache.shop";
const OTHER: &str = "other.shop";
const MEMBERS: &str = "cache-members.shop";
const MEMBER_HOSTS: [&str; 2] = ["m1", "m2"];
const PORT: &str = "11211";
const OTHER_PORT: &str = "11212";
const CONNECTIONS: u32 = 8;
const LIMIT: Duration = Duration::from_secs(60);
/// Mutated datagrams.
const DATAGRAMS: usize = 20_000;
const DATAGRAMS_LONG: usize = 1_000_000;
/// A module loses its place with the fault of one connection more than ten.
const ATTEMPTS_MAX: usize = 40;

/// What hostile modules do when they are asked, by name.
const MODULES: [(&str, &str); 7] = [
    ("loops", "(loop $again (br $again)) (i64.const 0)"),
    // The switch works for it, and not the interpreter.
    (
        "has-hashed",
        "(drop (memory.grow (i32.const 15)))
         (loop $again (drop (call $ring (i32.const 0) (i32.const 1048576))) (br $again)) (i64.const 0)",
    ),
    ("grows", "(loop $again (br_if $again (i32.ne (memory.grow (i32.const 1)) (i32.const -1)))) (unreachable)"),
    ("traps", "(i64.load (i32.const -8))"),
    ("nobody", "(i64.const 63)"),
    ("too-long", "(i64.const 0x7fffffff00000000)"),
    ("no-request", "(i32.store (i32.const 0) (i32.const 0)) (i64.const 0)"),
];
/// Two switches, their framers, and the members' carriers.
const PARSERS: usize = 4 + MEMBER_HOSTS.len();
const GOOD: &str = "(i64.extend_i32_u (call $member_at (i32.const 0)))";

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let names = [&MEMBER_HOSTS[..], &["switch", "client"]].concat();
    let lab = site::build(SCENARIO.name, site::V4, &names, dir)?;
    let _agents = Agents::start(&lab)?;
    let switch = lab.host("switch")?;
    let client = lab.host("client")?;
    let _members = MEMBER_HOSTS.iter().map(|name| start_member(lab.host(name)?)).collect::<Result<Vec<_>>>()?;
    let serve = |name: &str| switch.spawn(name, ["margay", "ensemble", "serve", name, "--members", MEMBERS]);
    let mut hostile = serve(ENSEMBLE)?;
    let mut other = serve(OTHER)?;
    await_members(switch, ENSEMBLE, MEMBER_HOSTS.len())?;
    await_members(switch, OTHER, MEMBER_HOSTS.len())?;
    let _framers = [start_framer(client, ENSEMBLE, PORT)?, start_framer(client, OTHER, OTHER_PORT)?];
    let words = ["cache-checked".to_owned(), format!("127.0.0.1:{OTHER_PORT}"), format!("--count={CONNECTIONS}")];
    let load = Series::<Cached>::start(client, &words)?;
    let hosts =
        MEMBER_HOSTS.iter().chain(&["switch", "client"]).map(|name| lab.host(name)).collect::<Result<Vec<_>>>()?;
    find_privileged(&hosts, findings)?;
    let agent_before = agent::pid(switch)?;
    await_answer(client, |answer| answer.starts_with("END"))?;
    let memory_before = observe::resident_bytes(hostile.pid())?;
    let mut found_out = 0;
    for (name, body) in MODULES {
        load_module(switch, name, body)?;
        found_out += u32::from(is_found_out(switch, client, name)?);
    }
    findings.set("modules_found_out", found_out.into());
    load_module(switch, "good", GOOD)?;
    let good = await_answer(client, |answer| answer.starts_with("END"));
    findings.set("good_answers", f64::from(u8::from(good.is_ok())));
    send_mutated(client)?;
    let grown = observe::resident_bytes(hostile.pid())? - memory_before;
    findings.set("memory_growth_mb", grown.max(0.0) / 1e6);
    let ended = [hostile.ended()?, other.ended()?].into_iter().flatten().count();
    findings.set("switch_restarts", ended as f64);
    findings.set("agent_restarts", f64::from(u8::from(agent::pid(switch)? != agent_before)));
    judge(&load.finish(LIMIT)?, findings);
    Ok(())
}

/// All of them were started by root.
fn find_privileged(hosts: &[&Host], findings: &mut Findings) -> Result<()> {
    let is_parser = |words: &[String]| {
        let has = |word: &str| words.iter().any(|one| one == word);
        has("ensemble") && ["serve", "framer", "carry"].into_iter().any(has)
    };
    let mut found = Vec::new();
    for host in hosts {
        found.extend(observe::processes(host, is_parser)?);
    }
    let privileged = found.iter().map(|pid| observe::is_privileged(*pid)).collect::<Result<Vec<bool>>>()?;
    findings.set("parsers", found.len() as f64);
    findings.set("parsers_privileged", privileged.into_iter().filter(|is_privileged| *is_privileged).count() as f64);
    Ok(())
}

fn start_member(host: &Host) -> Result<[Program; 2]> {
    let words = ["memcached", "-u", "root", "-l", "127.0.0.1", "-p", PORT, "-t", "1", "-m", "64"];
    let mut memcached = host.spawn("memcached", words)?;
    await_listener(host, &mut memcached, PORT)?;
    Ok([memcached, host.spawn("member", ["margay", "ensemble", "member", MEMBERS])?])
}

fn start_framer(client: &Host, name: &str, port: &str) -> Result<Program> {
    let listen = format!("127.0.0.1:{port}");
    let words = ["margay", "ensemble", "framer", "memcached", "--service", name, "--listen", &listen];
    let mut framer = client.spawn(&format!("framer-{name}"), words)?;
    await_listener(client, &mut framer, port)?;
    Ok(framer)
}

/// Gives the switch a module whose `redirect` does this.
fn load_module(switch: &Host, name: &str, body: &str) -> Result<()> {
    let text = format!(
        r#"(module (import "margay" "member_at" (func $member_at (param i32) (result i32)))
            (import "margay" "ring" (func $ring (param i32 i32) (result i32)))
            (memory (export "memory") 1)
            (func (export "alrm_version") (result i32) (i32.const 1))
            (func (export "alrm_frame") (result i32) (i32.const 0))
            (func (export "redirect") (param i32 i32 i32 i64) (result i64) {body}))"#
    );
    let path: PathBuf = switch.dir.join(format!("{name}.wasm"));
    std::fs::write(&path, wat::parse_str(text)?).with_context(|| format!("cannot write {}", path.display()))?;
    let file = path.to_str().context("the path has odd letters")?;
    agent::margay(switch, ["ensemble", "load", ENSEMBLE, file])?;
    progress(&format!("the module `{name}` is loaded"));
    Ok(())
}

/// One request on a connection of its own; the first line of the answer, nothing where the connection ends.
fn ask(client: &Host) -> Result<String> {
    let script = format!(
        "exec 3<>/dev/tcp/127.0.0.1/{PORT}; printf 'get nothing\\r\\n' >&3; read -t 5 -r line <&3; echo \"$line\""
    );
    let output = output_within(&mut client.command(["bash", "-c", &script]), LIMIT)?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn await_answer(client: &Host, is_meant: impl Fn(&str) -> bool) -> Result<()> {
    wait_for("an answer", LIMIT, || {
        let answer = ask(client)?;
        ensure!(is_meant(&answer), "it is `{answer}`");
        Ok(())
    })
}

/// Asks until the module has lost its place.
fn is_found_out(switch: &Host, client: &Host, name: &str) -> Result<bool> {
    for _ in 0..ATTEMPTS_MAX {
        let answer = ask(client)?;
        ensure!(!answer.starts_with("END"), "`{name}` has let a request pass");
        let module = &shown(switch, ENSEMBLE)?["module"];
        if module["state"] == "out of its place" {
            progress(&format!("`{name}`: {}", module["last_fault"].as_str().unwrap_or_default()));
            return Ok(true);
        }
    }
    Ok(false)
}

fn send_mutated(client: &Host) -> Result<()> {
    let count = if is_long() { DATAGRAMS_LONG } else { DATAGRAMS };
    let words = ["framed-mutations".to_owned(), ENSEMBLE.to_owned(), format!("--count={count}")];
    let output = output_within(&mut client.traffic(words)?, LIMIT)?;
    let why = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "the switch has taken mutated datagrams amiss: {}", why.trim());
    let connections = String::from_utf8_lossy(&output.stdout);
    progress(&format!("{count} mutated datagrams, on {} connections one after the other", connections.trim()));
    Ok(())
}

fn judge(slots: &[Cached], findings: &mut Findings) {
    let sum = |of: fn(&Cached) -> u64| slots.iter().map(of).sum::<u64>() as f64;
    findings.set("answers", sum(|slot| slot.answered));
    let failed = |slot: &Cached| {
        slot.wrong + slot.duplicated + slot.refused_safe + slot.refused_unsafe + slot.lost + slot.closed
    };
    findings.set("failed", sum(failed));
    for error in slots.iter().flat_map(|slot| &slot.errors).take(8) {
        findings.note(error.clone());
    }
}
