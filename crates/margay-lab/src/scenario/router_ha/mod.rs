//! `router-ha`: three routers that share etcd, under load, while each router, each member of etcd, links between them,
//! and all of etcd are lost and come back.

mod exclusive;
pub(super) mod stage;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use self::stage::{Cast, LIMIT, MEMBERS, ROUTERS, SERVERS, Stage};
use super::pair::attempt_part;
use super::{Findings, Scenario, is_long};
use crate::agent::{self, margay};
use crate::arrivals::{Arrivals, now_ms};
use crate::command::progress;
use crate::held::Held;
use crate::host::Host;
use crate::observe::{self, Passing};
use crate::program::{Program, wait_for};
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::{server, wire};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "router-ha",
    summary: "routers, members of etcd, and all of etcd die and come back under load; no new connection fails a \
        second later",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 8] = [
    bound("failed", Exactly(0.0)),
    bound("faults", AtLeast(FAULTS)),
    bound("connects", AtLeast(1000.0)),
    // Begun later than a second after a fault, or after its end.
    bound("failed_connects", Exactly(0.0)),
    bound("resets", Exactly(0.0)),
    bound("held_lost", Exactly(0.0)),
    bound("stale_entries", Exactly(0.0)),
    bound("missing_entries", Exactly(0.0)),
];

/// Three routers, three members, five partitions, and all of etcd with what happens meanwhile.
const FAULTS: f64 = 15.0;
const CAST: Cast =
    Cast { name: SCENARIO.name, routers: &ROUTERS, members: &MEMBERS, servers: &SERVERS, late: &["late"] };
const WHO: &str = "who.shop.sal.internal";
const WHO_PORT: u16 = 70;
/// Of the connections that are held.
const ECHO_PORT: u16 = 7;
/// Of what is published while etcd is away.
const NEW_PORT: u16 = 71;
const EVERY: Duration = Duration::from_millis(10);
const HELD: usize = 20;
/// A fault has its time to be noticed; what begins later must succeed.
const GRACE_MS: f64 = 1000.0;
/// How long a fault lasts beyond that.
const WATCH_MS: f64 = 1000.0;
const WATCH_LONG_MS: f64 = 12_000.0;

/// The scenario while it runs.
struct Run<'a> {
    stage: &'a Stage,
    arrivals: Arrivals,
    /// When faults were made, and ended.
    events: Vec<(String, f64)>,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let stage = Stage::build(CAST, dir)?;
    let _programs = serve(&stage)?;
    let ends: Vec<&Host> = SERVERS.iter().chain(&["client"]).map(|name| stage.host(name)).collect::<Result<_>>()?;
    ends.iter().try_for_each(|host| count_resets(host))?;
    let client = stage.host("client")?;
    let mut held = Held::open(client, "echo.shop.sal.internal", HELD)?;
    ensure!(held.open_count() == HELD as f64, "not all connections opened: {}", held.said());
    let arrivals = Arrivals::start(client, WHO, WHO_PORT, EVERY, None)?;
    let mut run = Run { stage: &stage, arrivals, events: Vec::new() };
    for name in ["failed", "faults"] {
        findings.set(name, 0.0);
    }
    let rounds = if is_long() { 3 } else { 1 };
    for _ in 0..rounds {
        attempt_part("a router dies", findings, |findings| run.lose_routers(findings));
        attempt_part("a member of etcd dies", findings, |findings| run.lose_members(findings));
        attempt_part("a partition", findings, |findings| run.partitions(findings));
        attempt_part("a name for one host", findings, |findings| run.give_once(findings));
        attempt_part("all of etcd is lost", findings, |findings| run.lose_etcd(findings, &mut held));
    }
    run.judge(findings)?;
    held.round()?;
    findings.set("held_lost", held.end()?);
    for host in &ends {
        let counts = observe::counts(host)?;
        findings.figures.add("resets", counts.values().map(|count| count.packets).sum());
    }
    attempt_part("what is registered in the end", findings, |findings| look_for_stale(&stage, findings));
    attempt_part("a router is taken out", findings, |_| take_out(&stage));
    Ok(())
}

/// A router that has gone for good is taken out by another one, and hosts leave it.
fn take_out(stage: &Stage) -> Result<()> {
    let (r1, r3) = (stage.host("r1")?, stage.host("r3")?);
    for (name, why) in
        [("r1", "is this router"), ("r3", "is still there"), ("r4", "no router of the cluster is called r4")]
    {
        let error = margay(r1, ["router", "remove", name]).err().with_context(|| format!("{name} can be taken out"))?;
        ensure!(error.to_string().replace(['│', '\n', ' '], "").contains(&why.replace(' ', "")), "{name}: {error}");
    }
    agent::down(r3)?;
    let removed = wait_for("r3 can be taken out", LIMIT, || margay(r1, ["router", "remove", "r3"]))?;
    ensure!(removed.contains("out of the cluster"), "it says {removed}");
    for name in ["r1", "r2"] {
        let host = stage.host(name)?;
        wait_for(&format!("{name} forgets r3"), LIMIT, || {
            match agent::status(host)?["cluster"]["routers"].as_array().map(Vec::len) {
                Some(2) => Ok(()),
                other => bail!("it knows {other:?} routers"),
            }
        })?;
    }
    for name in SERVERS.iter().chain(&["client"]) {
        let host = stage.host(name)?;
        wait_for(&format!("{name} leaves r3"), LIMIT, || {
            match agent::status(host)?["routers"].as_array().map(Vec::len) {
                Some(2) => Ok(()),
                other => bail!("it has {other:?} routers"),
            }
        })?;
    }
    Ok(())
}

/// Counts resets of the connections that are held, and of no others: those that come and go are closed by either end.
pub(super) fn count_resets(host: &Host) -> Result<()> {
    for (name, port) in [("from_server", "sport"), ("to_server", "dport")] {
        let matching = |way: &str| format!("{way} sal0 tcp {port} {ECHO_PORT} tcp flags & rst == rst");
        observe::count(host, &format!("in_{name}"), Passing::In, &matching("iifname"))?;
        observe::count(host, &format!("out_{name}"), Passing::Out, &matching("oifname"))?;
    }
    Ok(())
}

fn serve(stage: &Stage) -> Result<Vec<Program>> {
    let mut programs = Vec::new();
    for name in SERVERS {
        let host = stage.host(name)?;
        programs.push(server::greeter(host, ([0; 4], WHO_PORT).into())?);
        programs.push(server::echo(host, &[([0; 4], ECHO_PORT).into(), ([0; 4], NEW_PORT).into()])?);
        agent::publish(host, "who.shop", &format!("0.0.0.0:{WHO_PORT}"), &[])?;
        agent::publish(host, "echo.shop", "0.0.0.0:7", &[])?;
    }
    for router in ROUTERS {
        await_listed(stage, router, &SERVERS)?;
    }
    Ok(programs)
}

fn await_listed(stage: &Stage, router: &str, wanted: &[&str]) -> Result<()> {
    wait_for(&format!("{wanted:?} at {router}"), LIMIT, || match stage.listed(router, "who.shop")? {
        found if found == wanted => Ok(()),
        found => bail!("it lists {found:?}"),
    })
}

impl Run<'_> {
    /// Something begins, or ends, now.
    fn mark(&mut self, what: &str) {
        progress(what);
        self.events.push((what.to_owned(), now_ms()));
    }

    /// A fault lasts for a while, under load.
    fn last(&mut self, findings: &mut Findings) -> Result<()> {
        findings.figures.add("faults", 1.0);
        let last_ms = if is_long() { WATCH_LONG_MS } else { WATCH_MS };
        let since_ms = self.events.last().context("nothing has happened")?.1;
        self.arrivals.until(since_ms + GRACE_MS + last_ms, LIMIT).map(drop)
    }

    fn lose_routers(&mut self, findings: &mut Findings) -> Result<()> {
        for name in ROUTERS {
            self.mark(&format!("{name} is killed"));
            agent::kill(self.stage.host(name)?)?;
            self.last(findings)?;
            self.mark(&format!("{name} starts again"));
            agent::start_again(self.stage.host(name)?)?;
            self.stage.await_router(name)?;
            await_listed(self.stage, name, &SERVERS)?;
        }
        self.stage.await_homes()
    }

    fn lose_members(&mut self, findings: &mut Findings) -> Result<()> {
        for name in MEMBERS {
            self.mark(&format!("{name} is killed"));
            self.stage.kill_member(name)?;
            self.last(findings)?;
            self.stage.start_member(name)?;
            for router in ROUTERS {
                self.stage.await_etcd(router, true)?;
            }
        }
        Ok(())
    }

    fn partitions(&mut self, findings: &mut Findings) -> Result<()> {
        let everybody = [&ROUTERS[1..], &MEMBERS, &SERVERS, &["client"]].concat();
        let cuts: [(&str, &[&str], Vec<&str>); 4] = [
            ("r1 has neither etcd nor the other routers", &["r1"], [&ROUTERS[1..], &MEMBERS].concat()),
            ("no server reaches r1", &["r1"], SERVERS.to_vec()),
            ("r1 and e1 are apart from all others", &["r1", "e1"], [&everybody[..], &["e2", "e3"]].concat()),
            ("web1 reaches r3 alone", &["web1"], vec!["r1", "r2"]),
        ];
        for (what, one, other) in cuts {
            let other: Vec<&str> = other.into_iter().filter(|name| !one.contains(name)).collect();
            self.mark(what);
            self.stage.cut(one, &other)?;
            self.last(findings)?;
            self.mark("it is mended");
            self.stage.mend()?;
            self.stage.await_homes()?;
        }
        Ok(())
    }

    /// All of etcd is gone. Meanwhile a server dies and comes back, a router is started anew, services come and go, and
    /// a new host wants to join.
    fn lose_etcd(&mut self, findings: &mut Findings, held: &mut Held) -> Result<()> {
        let stage = self.stage;
        self.mark("all of etcd is killed");
        MEMBERS.iter().try_for_each(|member| stage.kill_member(member))?;
        self.last(findings)?;
        for router in ROUTERS {
            stage.await_etcd(router, false)?;
        }
        self.mark("web2 is cut off while etcd is away");
        wire::set_link(&stage.lab.topology, stage.host("web2")?, false)?;
        self.last(findings)?;
        for router in ROUTERS {
            await_listed(stage, router, &["web1", "web3"])?;
        }
        self.mark("web2 is back");
        wire::set_link(&stage.lab.topology, stage.host("web2")?, true)?;
        self.mark("r2 is killed while etcd is away");
        agent::kill(stage.host("r2")?)?;
        self.last(findings)?;
        self.mark("r2 starts again, without etcd");
        agent::start_again(stage.host("r2")?)?;
        // Services come and go.
        agent::publish(stage.host("web1")?, "new.shop", &format!("0.0.0.0:{NEW_PORT}"), &[])?;
        agent::withdraw(stage.host("web3")?, "echo.shop")?;
        let found = wait_for("new.shop", LIMIT, || {
            match server::attempt(stage.host("client")?, "new.shop.sal.internal", NEW_PORT, &["--count", "1"])? {
                outcome if outcome.failed() == 0 => Ok(()),
                outcome => bail!("{:?}", outcome.errors),
            }
        });
        found.context("what is published while etcd is away is found")?;
        refuse_newcomer(stage)?;
        for router in ROUTERS {
            await_listed(stage, router, &SERVERS)?;
        }
        held.round()?;
        self.mark("etcd is back");
        MEMBERS.iter().try_for_each(|member| stage.start_member(member))?;
        self.last(findings)?;
        stage.await_homes()?;
        margay(stage.host("late")?, ["up", "--join", &stage.token]).context("the newcomer")?;
        agent::down(stage.host("late")?)?;
        agent::withdraw(stage.host("web1")?, "new.shop")?;
        agent::publish(stage.host("web3")?, "echo.shop", "0.0.0.0:7", &[])
    }

    /// What began later than a second after anything had happened must have succeeded.
    fn judge(&mut self, findings: &mut Findings) -> Result<()> {
        let is_excused = |begun_ms: f64| {
            self.events.iter().any(|(_, event_ms)| (*event_ms..event_ms + GRACE_MS).contains(&begun_ms))
        };
        let (mut connects, mut failed, mut excused, mut slowest_ms) = (0.0, 0.0, 0.0, 0.0_f64);
        for arrival in self.arrivals.until(now_ms(), LIMIT)? {
            connects += 1.0;
            let is_late = !is_excused(arrival.begun_ms);
            if is_late {
                slowest_ms = slowest_ms.max(arrival.took_ms);
            }
            if arrival.error.is_empty() {
                continue;
            }
            *if is_late { &mut failed } else { &mut excused } += 1.0;
            let before = self.events.iter().rev().find(|(_, event_ms)| *event_ms <= arrival.begun_ms);
            if let Some((what, event_ms)) = before
                && failed + excused <= 20.0
            {
                let (since_ms, took_ms) = (arrival.begun_ms - event_ms, arrival.took_ms);
                let how = format!("{since_ms:.0} ms after this failed after {took_ms:.0} ms: {}", arrival.error);
                findings.note(format!("{what}: a connection that began {how}"));
            }
        }
        findings.set("connects", connects);
        findings.set("failed_connects", failed);
        findings.set("failed_in_first_second", excused);
        findings.set("slowest_connect_ms", slowest_ms);
        Ok(())
    }
}

/// A host that is no member learns why it cannot become one now.
fn refuse_newcomer(stage: &Stage) -> Result<()> {
    let late = stage.host("late")?;
    match margay(late, ["up", "--join", &stage.token]) {
        Ok(_) => bail!("it has joined without etcd"),
        Err(error) if format!("{error:#}").contains("cluster's store cannot be asked") => {
            ensure!(agent::pid(late).is_err(), "an agent is left of a join that failed");
            Ok(())
        }
        Err(error) => Err(error.context("the newcomer is not told why")),
    }
}

/// What routers and etcd list besides what is there, and what they lack.
fn look_for_stale(stage: &Stage, findings: &mut Findings) -> Result<()> {
    for name in ["stale_entries", "missing_entries"] {
        findings.set(name, 0.0);
    }
    let servers: Vec<String> = SERVERS.map(str::to_owned).to_vec();
    for router in ROUTERS {
        await_listed(stage, router, &SERVERS)?;
        for (service, wanted) in [("who.shop", &servers[..]), ("echo.shop", &servers), ("new.shop", &[])] {
            let found = stage.listed(router, service)?;
            let stale = found.iter().filter(|name| !wanted.contains(name)).count();
            let missing = wanted.iter().filter(|name| !found.contains(name)).count();
            findings.figures.add("stale_entries", stale as f64);
            findings.figures.add("missing_entries", missing as f64);
            if stale + missing > 0 {
                findings.note(format!("{router} lists {found:?} for {service}"));
            }
        }
        let of_others = agent::routes(stage.host(router)?, "who.shop")?;
        let leads = of_others
            .iter()
            .filter(|route| route["origin"].as_str().is_some_and(|origin| origin.starts_with("registered with")));
        findings.figures.add("stale_entries", leads.count() as f64);
    }
    let ids: Vec<String> = SERVERS
        .iter()
        .map(|name| Ok(agent::status(stage.host(name)?)?["host_id"].as_str().unwrap_or_default().to_owned()))
        .collect::<Result<_>>()?;
    let keys = stage.registered_keys()?;
    let stale: Vec<&String> = keys.iter().filter(|key| !ids.iter().any(|id| key.ends_with(id))).collect();
    findings.figures.add("stale_entries", stale.len() as f64);
    findings.figures.add("missing_entries", (SERVERS.len() * ROUTERS.len()).saturating_sub(keys.len()) as f64);
    if !stale.is_empty() {
        findings.note(format!("etcd has registrations of nobody: {stale:?}"));
    }
    Ok(())
}
