//! `ensemble-shard`: the book's page on sharding a memcached, command by command, and then its page on modules: the
//! template sends the keys of one prefix elsewhere. `margay flow show` on the switch's host has the legs of the flow.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::ensemble::await_members;
use super::{Findings, Scenario, site};
use crate::agent::{self, Agents};
use crate::command::progress;
use crate::host::Host;
use crate::program::{Program, output_within, wait_for};
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::server::await_listener;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "ensemble-shard",
    summary: "the book's pages on sharding a memcached and on modules, command by command; the legs of a flow",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 5] = [
    bound("wrong_answers", Exactly(0.0)),
    // Of the keys without a prefix, those that lie on each of two members at the least.
    bound("least_keys", AtLeast(1.0)),
    // Keys with the template's prefix that are elsewhere than at its member.
    bound("misplaced", Exactly(0.0)),
    // Members that `flow show` has no leg with a window of.
    bound("legs_missing", Exactly(0.0)),
    bound("answers", AtLeast(80.0)),
];

const ENSEMBLE: &str = "cache.shop";
const MEMBERS: &str = "cache-members.shop";
const MEMBER_HOSTS: [&str; 3] = ["m1", "m2", "images"];
const PORT: &str = "11211";
const KEYS: u32 = 20;
const LIMIT: Duration = Duration::from_secs(30);
/// The template as text. What `MARGAY_MODULE` names is loaded instead: what `rustc` makes of `prefix.rs`, say.
const MODULE: &str = include_str!("../../../../examples/alrm/prefix.wat");

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    for figure in ["wrong_answers", "misplaced", "legs_missing", "answers"] {
        findings.figures.add(figure, 0.0);
    }
    let names = [&MEMBER_HOSTS[..], &["switch", "client"]].concat();
    let lab = site::build(SCENARIO.name, site::V4, &names, dir)?;
    let _agents = Agents::start(&lab)?;
    let switch = lab.host("switch")?;
    let client = lab.host("client")?;
    let _members = MEMBER_HOSTS.iter().map(|name| start_member(lab.host(name)?)).collect::<Result<Vec<_>>>()?;
    let _switch = switch.spawn("switch", ["margay", "ensemble", "serve", ENSEMBLE, "--members", MEMBERS])?;
    let mut framer = client.spawn("framer", ["margay", "ensemble", "framer", "memcached", "--service", ENSEMBLE])?;
    await_listener(client, &mut framer, PORT)?;
    await_members(switch, ENSEMBLE, MEMBER_HOSTS.len())?;
    store(client, "user", findings)?;
    let counts = MEMBER_HOSTS.iter().map(|name| held(lab.host(name)?, "user"));
    let mut counts = counts.collect::<Result<Vec<_>>>()?;
    progress(&format!("of {KEYS} keys the members have {counts:?}"));
    ensure!(counts.iter().sum::<usize>() == KEYS as usize, "the members have {counts:?} of {KEYS} keys");
    counts.sort_unstable();
    // Of so few keys one member may have none.
    findings.set("least_keys", counts[1] as f64);
    let file = module(switch)?;
    agent::margay(switch, ["ensemble", "load", ENSEMBLE, file.to_str().context("the path has odd letters")?])?;
    store(client, "img:", findings)?;
    for name in MEMBER_HOSTS.iter().filter(|name| **name != "images") {
        findings.figures.add("misplaced", held(lab.host(name)?, "img:")? as f64);
    }
    let images = held(lab.host("images")?, "img:")?;
    ensure!(images == KEYS as usize, "the member for images has {images} of {KEYS} keys");
    judge_legs(switch, client, findings)
}

/// The file that is loaded.
fn module(switch: &Host) -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("MARGAY_MODULE") {
        return Ok(path.into());
    }
    let path = switch.dir.join("prefix.wasm");
    std::fs::write(&path, wat::parse_str(MODULE)?).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

fn start_member(host: &Host) -> Result<[Program; 2]> {
    let words = ["memcached", "-u", "root", "-l", "127.0.0.1", "-p", PORT, "-t", "1", "-m", "64"];
    let mut memcached = host.spawn("memcached", words)?;
    await_listener(host, &mut memcached, PORT)?;
    let member = ["margay", "ensemble", "member", MEMBERS, "--to", "127.0.0.1:11211"];
    let member = host.spawn("member", member.into_iter().chain(["--as", host.name()]))?;
    Ok([memcached, member])
}

/// What memcached's port on a host answers to lines, on a connection that ends with `quit`.
fn ask(host: &Host, lines: &str) -> Result<Vec<String>> {
    let script = format!("exec 3<>/dev/tcp/127.0.0.1/{PORT}; printf '{lines}quit\\r\\n' >&3; timeout 10 cat <&3");
    let output = output_within(&mut host.command(["bash", "-c", &script]), LIMIT)?;
    Ok(String::from_utf8_lossy(&output.stdout).lines().map(|line| line.trim_end().to_owned()).collect())
}

/// Stores keys of a prefix on the client's host, and asks for each.
fn store(client: &Host, prefix: &str, findings: &mut Findings) -> Result<()> {
    for key in 0..KEYS {
        let lines = format!("set {prefix}{key} 0 0 5\\r\\nhello\\r\\nget {prefix}{key}\\r\\n");
        let answers = ask(client, &lines)?;
        let value = format!("VALUE {prefix}{key} 0 5");
        let is_right = answers == ["STORED", value.as_str(), "hello", "END"];
        findings.figures.add(if is_right { "answers" } else { "wrong_answers" }, if is_right { 2.0 } else { 1.0 });
        if !is_right {
            findings.note(format!("`{prefix}{key}` is answered {answers:?}"));
        }
    }
    Ok(())
}

/// How many of the keys of a prefix a member's own memcached has.
fn held(host: &Host, prefix: &str) -> Result<usize> {
    let keys: String = (0..KEYS).map(|key| format!(" {prefix}{key}")).collect();
    let answers = ask(host, &format!("get{keys}\\r\\n"))?;
    Ok(answers.iter().filter(|line| line.starts_with("VALUE ")).count())
}

/// While a client is connected, its flow shows a leg with a window to each member.
fn judge_legs(switch: &Host, client: &Host, findings: &mut Findings) -> Result<()> {
    let script = format!("exec 3<>/dev/tcp/127.0.0.1/{PORT}; printf 'get user1\\r\\n' >&3; cat <&3");
    let mut connected = client.spawn("connected", ["bash", "-c", &script])?;
    let mut legs = Vec::new();
    wait_for("legs of a flow", LIMIT, || {
        for flow in agent::open_flows(switch, ENSEMBLE, "udp")? {
            let number = flow["flow"].as_str().context("a flow has no number")?;
            let shown: Value = serde_json::from_str(&agent::margay(switch, ["flow", "show", number, "--json"])?)?;
            legs = shown["legs"].as_array().cloned().unwrap_or_default();
            if legs.len() == MEMBER_HOSTS.len() {
                return Ok(());
            }
        }
        Err(anyhow::anyhow!("they are {legs:?}"))
    })?;
    progress(&format!("legs: {}", Value::Array(legs.clone())));
    let has_leg = |name: &&&str| {
        let its = |leg: &&Value| leg["member"] == **name && leg["connections"].as_u64() >= Some(1);
        legs.iter().find(its).is_some_and(|leg| leg["window_bytes"].as_u64() > Some(0))
    };
    let missing = MEMBER_HOSTS.iter().filter(|name| !has_leg(name)).count();
    findings.set("legs_missing", missing as f64);
    let patches = legs.iter().filter_map(|leg| leg["patches"].as_u64()).sum::<u64>();
    ensure!(patches == 0, "members that know watermarks have {patches} redirect patches");
    connected.stop();
    Ok(())
}
