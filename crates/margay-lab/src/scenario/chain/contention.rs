//! `contention`: three orders at once want the same running sessions to go through boxes of theirs, again and again:
//! one at the client's host, one at the server's, one at the host of a box that stays. None is lost, none undoes what
//! another one has done, and none waits for ever.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::{apply, build, chain, serve};
use crate::agent::{self, Agents, margay};
use crate::command::progress;
use crate::host::Host;
use crate::observe;
use crate::program::wait_for;
use crate::report::Limit::Exactly;
use crate::report::{Bound, bound};
use crate::scenario::{Findings, Scenario, is_long, pair};
use crate::transfers::{Order, Server, Transfers};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "contention",
    summary: "orders at the hosts of client, server and a box put boxes into the same running sessions and take them out",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 5] = [
    bound("violations", Exactly(0.0)),
    bound("starved", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("resets", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

/// The box that stays, at whose host the third order is given: each puts another one before it, or behind all.
const STAYS: &str = "stays.shop";
const BOXES: [&str; 3] = ["one.shop", "two.shop", "three.shop"];
const SERVICE: &str = "bulk.shop";
const PORT: u16 = 5010;
const WAYS: [&str; 2] = ["up:cubic", "down:cubic"];
/// Bytes per second of each transfer.
const PACE: u64 = 1_000_000;
const LIMIT: Duration = Duration::from_secs(20);
/// Longer than the hosts of a way remember it.
const SHOWN_LIMIT: Duration = Duration::from_secs(6);

/// What one of the three has seen.
#[derive(Default)]
struct Seen {
    completed: f64,
    /// Orders that came to nothing, since the session was another one's for too long.
    refused: f64,
    /// Boxes that were put in and were not there afterwards, or were there although they were taken out.
    violations: Vec<String>,
}

/// Who contends for sessions, with a box of its own.
#[derive(Clone, Copy)]
struct Contender<'a> {
    name: &'static str,
    /// Where it has the box put in, and before which one.
    inserts_at: &'a Host,
    before: Option<&'static str>,
    /// Where it has it taken out.
    removes_at: &'a Host,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = build("contention", BOXES.len() + 1, &[], dir)?;
    let _agents = Agents::start(&lab)?;
    let [client, server, third, stays] = ["client", "server", "box3", "box4"].map(|name| lab.host(name));
    let [client, server, third, stays] = [client?, server?, third?, stays?];
    let names = [BOXES[0], BOXES[1], BOXES[2], STAYS];
    for (name, host) in names.iter().zip(["box1", "box2", "box3", "box4"]) {
        serve(lab.host(host)?, name, "forward", &[])?;
    }
    let hosts: Vec<&Host> = lab.hosts.iter().collect();
    let policy = chain("known", "nobody.shop", &BOXES, "") + &chain("stays", SERVICE, &[STAYS], "");
    apply(lab.host("router")?, &policy, &hosts, &["known", "stays"])?;
    for host in [client, server] {
        observe::count_virtual_resets(host)?;
    }
    for name in names {
        agent::await_instances(client, name, 1)?;
    }
    let contenders = [
        Contender { name: BOXES[0], inserts_at: client, before: None, removes_at: client },
        Contender { name: BOXES[1], inserts_at: server, before: None, removes_at: server },
        Contender { name: BOXES[2], inserts_at: stays, before: Some(STAYS), removes_at: third },
    ];
    for figure in ["violations", "starved", "completed", "wrong_bytes", "failed"] {
        findings.figures.add(figure, 0.0);
    }
    let mut sink = Server::start(server, PORT, false)?;
    agent::publish(server, SERVICE, &format!("0.0.0.0:{PORT}"), &[])?;
    agent::await_instances(client, SERVICE, 1)?;
    let order = Order { to: &format!("{SERVICE}.{}", super::ZONE), ways: &WAYS, pace: PACE };
    let mut transfers = Transfers::start(client, &mut sink, order)?;
    let until = Instant::now() + Duration::from_secs(if is_long() { 60 } else { 8 });
    let seen: Vec<Result<Seen>> = thread::scope(|scope| {
        let running = contenders.map(|one| scope.spawn(move || contend(client, one, until)));
        let join =
            |one: thread::ScopedJoinHandle<'_, Result<Seen>>| one.join().ok().context("a thread has panicked")?;
        running.into_iter().map(join).collect()
    });
    for (name, seen) in BOXES.iter().zip(seen) {
        let seen = seen?;
        findings.figures.add("completed", seen.completed);
        findings.set(&format!("refused_{}", name.trim_end_matches(".shop")), seen.refused);
        findings.figures.add("violations", seen.violations.len() as f64);
        seen.violations.into_iter().for_each(|what| findings.note(what));
        if seen.completed == 0.0 {
            findings.note(format!("the order for {name} has never come to its turn"));
            findings.figures.add("starved", 1.0);
        }
    }
    transfers.await_bytes("transfers after all changes", 100_000, LIMIT)?;
    transfers.finish("transfers", findings)?;
    pair::report_resets(&[client, server], findings)
}

/// Puts a box into all sessions, and takes it out again.
fn contend(client: &Host, contender: Contender<'_>, until: Instant) -> Result<Seen> {
    let name = contender.name;
    let mut seen = Seen::default();
    while Instant::now() < until {
        for act in ["insert", "remove"] {
            let changed = change(contender, act, &mut seen)?;
            // Others change the same sessions meanwhile, but nobody else touches this box. What a session has left is
            // shown until its hosts have forgotten it.
            let is_shown = wait_for("what was done", SHOWN_LIMIT, || {
                let through = sessions_through(client, name)?;
                let other = changed.iter().find(|session| through.contains(*session) != (act == "insert"));
                other.map_or(Ok(()), |session| bail!("{act} of {name} was done, and session {session} shows it not"))
            });
            if let Err(error) = is_shown {
                seen.violations.push(format!("{error:#}"));
            }
        }
    }
    // Whatever was refused above, the box is out at the end.
    for _ in 0..10 {
        if sessions_through(client, name)?.is_empty() {
            return Ok(seen);
        }
        change(contender, "remove", &mut seen)?;
    }
    seen.violations.push(format!("{name} is still there"));
    Ok(seen)
}

/// Gives the sessions that were changed.
fn change(contender: Contender<'_>, act: &str, seen: &mut Seen) -> Result<Vec<String>> {
    let Contender { name, inserts_at, before, removes_at } = contender;
    let program = crate::fabric::margay_program()?;
    let program = program.to_str().context("a path that is no text")?;
    let mut words = vec![program, "chain", act, name, "--name", SERVICE, "--json"];
    let is_insert = act == "insert";
    words.extend(before.filter(|_| is_insert).into_iter().flat_map(|before| ["--before", before]));
    let output = if is_insert { inserts_at } else { removes_at }.output(words)?;
    let reply: Value = serde_json::from_slice(&output.stdout)
        .with_context(|| format!("{act} of {name}: {}", String::from_utf8_lossy(&output.stderr)))?;
    let mut changed = Vec::new();
    for one in reply["changed"].as_array().into_iter().flatten() {
        if one["outcome"] == "done" {
            changed.extend(one["session"].as_str().map(str::to_owned));
            seen.completed += 1.0;
        } else {
            progress(&format!("{act} of {name}: {} {}", one["outcome"], one["why"]));
            seen.refused += 1.0;
        }
    }
    Ok(changed)
}

/// Sessions that pass a box, as the client's host knows them.
fn sessions_through(client: &Host, name: &str) -> Result<Vec<String>> {
    let shown: Value = serde_json::from_str(&margay(client, ["chain", "show", "--json"])?)?;
    let passes = |flow: &&Value| {
        let boxes = flow["chain"]["boxes"].as_array().into_iter().flatten();
        boxes.filter(|one| one["name"] == name).count() > 0
    };
    let flows = shown["flows"].as_array().into_iter().flatten();
    Ok(flows.filter(passes).filter_map(|flow| Some(flow["session"].as_str()?.to_owned())).collect())
}
