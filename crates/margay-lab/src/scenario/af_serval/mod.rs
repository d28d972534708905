//! `af-serval`: a C server and a C client, written as the Serval paper's table 1 has it, under the shim as they stand
//! and against the library: streams and datagrams, names and prefixes, what each end is called; and what is refused, or
//! dies half-way.

pub mod programs;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use margay_core::name::Name;
use nix::sys::signal::Signal;
use serde_json::Value;

use super::{Findings, Scenario, pair, site};
use crate::agent::{self, Agents};
use crate::host::Host;
use crate::lab::Lab;
use crate::program::{Program, wait_for};
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::server::Nginx;
use programs::{Door, Outcome, Programs, finish};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "af-serval",
    summary: "C programs with the calls of Serval's table 1, under the shim and against the library; prefixes, \
              datagrams, refusals",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 5] = [
    bound("failed", Exactly(0.0)),
    bound("calls", AtLeast(500.0)),
    bound("pairs", AtLeast(24.0)),
    bound("refusals", AtLeast(7.0)),
    bound("stale_entries", Exactly(0.0)),
];

const LIMIT: Duration = Duration::from_secs(15);
const NAME: &str = "table.shop";
/// A name that an ordinary user is granted.
const GRANTED: &str = "granted.shop";
const NOBODY: &str = "nobody";
const AS_NOBODY: [&str; 6] = ["setpriv", "--reuid", NOBODY, "--regid", "nogroup", "--clear-groups"];
const EVENTS: &str = include_str!("events.py");
const HOSTILE: &str = include_str!("hostile.py");
const ROUNDS: usize = 3;

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let programs = Programs::make(dir)?;
    let lab = site::build("af-serval", site::BOTH, &["alpha", "beta"], dir)?;
    let alpha = lab.host("alpha")?;
    alpha.shell(&format!(
        "printf '[[bind]]\\nuser = \"{NOBODY}\"\\nnames = [\"{GRANTED}\"]\\n' >> /etc/margay/margay.toml"
    ))?;
    let _agents = Agents::start(&lab)?;
    pair::demand_kernel(&[alpha, lab.host("beta")?], findings)?;
    let mut stage = Stage { lab: &lab, programs: &programs, findings, dir };
    stage.try_pairs()?;
    stage.step("an ordinary server", Stage::ordinary_server);
    stage.step("an ordinary client", Stage::ordinary_client);
    stage.step("the agent's death", Stage::agents_death);
    stage.step("events", Stage::events);
    stage.step("hosts without IPv6", Stage::without_v6);
    stage.refusals()?;
    stage.stale()
}

/// Two programs, and what they do.
struct Pair {
    door: Door,
    kind: &'static str,
    /// How the server waits.
    how: &'static str,
    is_prefix: bool,
    is_bound: bool,
    /// Client and server on one host.
    is_one_host: bool,
}

struct Stage<'a> {
    lab: &'a Lab,
    programs: &'a Programs,
    findings: &'a mut Findings,
    dir: &'a Path,
}

/// A name's bits in hexadecimal.
fn hex(name: &str) -> Result<String> {
    let id = name.parse::<Name>()?.service_id().to_string();
    Ok(id.trim_start_matches("sid:").to_owned())
}

/// Sessions of a name of which a watcher was told this.
fn sessions(log: &str, kind: &str, id: &str) -> BTreeSet<String> {
    let events = log.lines().filter_map(|line| serde_json::from_str::<Value>(line.split_once(' ')?.1).ok());
    let is_it = |event: &Value| event["kind"] == kind && event["name"].as_str().is_some_and(|name| name.contains(id));
    events.filter(is_it).filter_map(|event| Some(event["session"].as_str()?.to_owned())).collect()
}

impl Stage<'_> {
    fn alpha(&self) -> Result<&Host> {
        self.lab.host("alpha")
    }

    fn beta(&self) -> Result<&Host> {
        self.lab.host("beta")
    }

    fn step(&mut self, what: &str, act: fn(&mut Self) -> Result<()>) {
        if let Err(error) = act(self) {
            self.findings.note(format!("{what}: {error:#}"));
            self.findings.figures.add("failed", 1.0);
        }
    }

    fn count(&mut self, outcome: &Outcome) {
        self.findings.figures.add("calls", outcome.calls);
        self.findings.figures.add("failed", outcome.failed);
        if outcome.failed > 0.0 {
            self.findings.note(outcome.log.clone());
        }
    }

    fn try_pairs(&mut self) -> Result<()> {
        let mut pairs = Vec::new();
        for door in [Door::Shim, Door::Library] {
            for kind in ["stream", "datagram"] {
                let (is_prefix, is_bound, is_one_host) = (false, false, false);
                let plain = |how| Pair { door, kind, how, is_prefix, is_bound, is_one_host };
                pairs.extend(["block", "poll", "epoll"].map(plain));
                pairs.push(Pair { is_prefix: true, ..plain("poll") });
                pairs.push(Pair { is_bound: true, ..plain("block") });
                pairs.push(Pair { is_one_host: true, ..plain("block") });
            }
        }
        for (number, pair) in pairs.iter().enumerate() {
            if let Err(error) = self.try_pair(number, pair) {
                let Pair { door, kind, how, is_prefix, is_bound, .. } = pair;
                let what = format!("{door:?} {kind} {how}, prefix: {is_prefix}, bound: {is_bound}");
                self.findings.note(format!("{what}: {error:#}"));
                self.findings.figures.add("failed", 1.0);
            }
            self.findings.figures.add("pairs", 1.0);
        }
        Ok(())
    }

    fn try_pair(&mut self, number: usize, pair: &Pair) -> Result<()> {
        let id = hex(NAME)?;
        // The first 100 bits are the prefix's; 25 digits.
        let inside = format!("{}{}", &id[..25], "7".repeat(39));
        let own = format!("{}{:039x}", &hex("caller.shop")?[..25], number + 1);
        let (bound_to, called) = if pair.is_prefix { (format!("{id}/100"), inside) } else { (id.clone(), id) };
        let clients = if pair.kind == "stream" { 1 } else { ROUNDS };
        let log = format!("server-{number}");
        let args = [pair.kind, &bound_to, &clients.to_string(), pair.how];
        let server = self.programs.serve(self.alpha()?, pair.door, &log, &args)?;
        let written = if pair.is_prefix { format!("sid:{bound_to}") } else { NAME.to_owned() };
        agent::await_instances(self.lab.host("router")?, &written, 1)?;
        let rounds = ROUNDS.to_string();
        let mut args = vec![pair.kind, &called, &rounds];
        args.extend(pair.is_bound.then_some(own.as_str()));
        let host = if pair.is_one_host { self.alpha()? } else { self.beta()? };
        let host_id = agent::status(host)?["host_id"].as_str().unwrap_or_default().to_owned();
        let client = self.programs.ask(host, pair.door, &args)?;
        self.count(&client);
        let served = finish(server)?;
        self.count(&served);
        if pair.is_bound {
            ensure!(client.own == own, "the client bound {own} and is called {}", client.own);
        } else {
            let its_own = format!("{}{host_id}", "0".repeat(24));
            ensure!(client.own.starts_with(&its_own), "a client of host {host_id} is called {}", client.own);
        }
        if pair.kind == "stream" {
            let seen = served.log.lines().find_map(|line| line.strip_prefix("client ")).unwrap_or_default();
            ensure!(seen == client.own, "the server saw {seen}, the client is called {}", client.own);
        }
        agent::await_instances(self.lab.host("router")?, &written, 0)
    }

    /// A web server that knows nothing of names, by a client that knows no port.
    fn ordinary_server(&mut self) -> Result<()> {
        let _nginx = Nginx::start(self.alpha()?, &["0.0.0.0:8080"])?;
        agent::publish(self.alpha()?, "web.shop", "0.0.0.0:8080", &[])?;
        let fetched = self.programs.ask(self.beta()?, Door::Shim, &["fetch", &hex("web.shop")?, "host"])?;
        self.count(&fetched);
        ensure!(fetched.log.lines().any(|line| line == "alpha"), "it got {}", fetched.log);
        agent::withdraw(self.alpha()?, "web.shop")
    }

    /// An ordinary client, which uses the name and some port.
    fn ordinary_client(&mut self) -> Result<()> {
        let id = hex(NAME)?;
        let server = self.programs.serve(self.alpha()?, Door::Library, "for-others", &["stream", &id, "1", "block"])?;
        agent::await_instances(self.lab.host("router")?, NAME, 1)?;
        // By its address and port there is nobody for it.
        let shown = agent::show(self.alpha()?, NAME)?;
        let listener = shown["service"]["listeners"][0]["address"].as_str().unwrap_or_default().to_owned();
        let port = listener.rsplit(':').next().context("a listener without a port")?;
        let script = format!(
            "exec 3<>/dev/tcp/{}/{port}; printf hello >&3; head -c 70 <&3 || true",
            pair::address(self.alpha()?)?
        );
        let answer = self.beta()?.shell(&script)?;
        ensure!(answer.is_empty(), "by its address it gave {answer:?}");
        let script = format!("exec 3<>/dev/tcp/{NAME}.sal.internal/4711; printf hello >&3; head -c 70 <&3");
        let answer = self.beta()?.shell(&script)?;
        let host_id = agent::status(self.beta()?)?["host_id"].as_str().unwrap_or_default().to_owned();
        ensure!(answer.starts_with(&format!("{}{host_id}0000", "0".repeat(24))), "it got {answer:?}");
        ensure!(answer.ends_with(" hello"), "it got {answer:?}");
        let served = finish(server)?;
        self.count(&served);
        Ok(())
    }

    /// What is bound and listens is served by the next agent, without a word of its program's.
    fn agents_death(&mut self) -> Result<()> {
        let id = hex(NAME)?;
        for (kind, clients) in [("stream", 2), ("datagram", 2 * ROUNDS)] {
            let args = [kind, &id, &clients.to_string(), "poll"];
            let server = self.programs.serve(self.alpha()?, Door::Shim, &format!("survivor-{kind}"), &args)?;
            for is_after in [false, true] {
                if is_after {
                    agent::kill(self.alpha()?)?;
                    agent::start_again(self.alpha()?)?;
                }
                agent::await_instances(self.lab.host("router")?, NAME, 1)?;
                let client = self.programs.ask(self.beta()?, Door::Shim, &[kind, &id, &ROUNDS.to_string()])?;
                self.count(&client);
            }
            let served = finish(server)?;
            self.count(&served);
            agent::await_instances(self.lab.host("router")?, NAME, 0)?;
        }
        Ok(())
    }

    /// Each user is told of its own flows; root of all.
    fn events(&mut self) -> Result<()> {
        let (id, script) = (hex(NAME)?, self.dir.join("events.py"));
        std::fs::write(&script, EVENTS)?;
        let beta = self.lab.host("beta")?;
        let listen = |uid: &str| -> Result<Program> {
            let argv = ["python3".as_ref(), script.as_os_str(), uid.as_ref()];
            let program = beta.spawn(&format!("events-{uid}"), argv)?;
            wait_for("the agent's word", LIMIT, || {
                if program.log().contains("ready") { Ok(()) } else { bail!("it is not ready: {}", program.log()) }
            })?;
            Ok(program)
        };
        let watchers = [listen("0")?, listen("65534")?];
        let server = self.programs.serve(self.alpha()?, Door::Shim, "eventful", &["stream", &id, "2", "block"])?;
        agent::await_instances(self.lab.host("router")?, NAME, 1)?;
        let client = self.programs.ask(beta, Door::Shim, &["stream", &id, "1"])?;
        self.count(&client);
        let as_nobody = AS_NOBODY.iter().map(Into::into);
        let argv: Vec<OsString> =
            as_nobody.chain(self.programs.argv(Door::Shim, "client", &["stream", &id, "1"])).collect();
        beta.run(argv)?;
        let served = finish(server)?;
        self.count(&served);
        for (watcher, flows) in watchers.iter().zip([2, 1]) {
            wait_for("what happened", LIMIT, || {
                let log = watcher.log();
                let opened = sessions(&log, "opened", &id);
                // Those of the step before may end only now.
                let closed = sessions(&log, "closed", &id);
                let told = [opened.len(), opened.intersection(&closed).count()];
                if told == [flows, flows] { Ok(()) } else { bail!("{told:?} instead of {flows}: {log}") }
            })?;
        }
        Ok(())
    }

    /// Names lead by IPv4 where that is all there is.
    fn without_v6(&mut self) -> Result<()> {
        let id = hex(NAME)?;
        for (on_alpha, on_beta) in [(1, 0), (1, 1), (0, 1)] {
            for (host, off) in [(self.alpha()?, on_alpha), (self.beta()?, on_beta)] {
                host.shell(&format!("echo {off} > /proc/sys/net/ipv6/conf/sal0/disable_ipv6"))?;
                if off == 0 {
                    host.shell(
                        "ip -6 address replace fd5a:4c00::1/128 dev sal0; ip -6 route replace fd5a:4c00::/32 dev sal0",
                    )?;
                }
            }
            for kind in ["stream", "datagram"] {
                let clients = if kind == "stream" { 1 } else { ROUNDS };
                let log = format!("without-v6-{kind}-{on_alpha}{on_beta}");
                let server =
                    self.programs.serve(self.alpha()?, Door::Library, &log, &[kind, &id, &clients.to_string()])?;
                agent::await_instances(self.lab.host("router")?, NAME, 1)?;
                let client = self.programs.ask(self.beta()?, Door::Library, &[kind, &id, &ROUNDS.to_string()])?;
                self.count(&client);
                let served = finish(server)?;
                self.count(&served);
                agent::await_instances(self.lab.host("router")?, NAME, 0)?;
            }
        }
        Ok(())
    }

    fn refusals(&mut self) -> Result<()> {
        type Refusal<T> = fn(&mut T) -> Result<()>;
        let all: [(&str, Refusal<Self>); 5] = [
            ("a bind without right", |stage: &mut Self| stage.bind_as_nobody(NAME, Some("Permission denied"))),
            ("a bind with right", |stage: &mut Self| stage.bind_as_nobody(GRANTED, None)),
            ("a program that dies between bind and listen", Self::dies_half_way),
            ("no agent", Self::no_agent),
            ("nonsense", Self::nonsense),
        ];
        for (what, act) in all {
            match act(self) {
                Ok(()) => self.findings.figures.add("refusals", 1.0),
                Err(error) => {
                    self.findings.note(format!("{what}: {error:#}"));
                    self.findings.figures.add("failed", 1.0);
                }
            }
        }
        Ok(())
    }

    fn bind_as_nobody(&mut self, name: &str, refusal: Option<&str>) -> Result<()> {
        let id = hex(name)?;
        for door in [Door::Shim, Door::Library] {
            let as_nobody = AS_NOBODY.iter().map(Into::into);
            let argv: Vec<OsString> =
                as_nobody.chain(self.programs.argv(door, "server", &["stream", &id, "0"])).collect();
            let output = self.alpha()?.output(argv)?;
            let said = String::from_utf8_lossy(&output.stderr);
            match refusal {
                Some(word) => {
                    ensure!(!output.status.success() && said.contains(word), "{}: {said}", output.status);
                    ensure!(said.contains("has no right to") && said.contains("[[bind]]"), "no advice: {said}");
                    self.findings.figures.add("refusals", 1.0);
                }
                None => ensure!(output.status.success(), "{}: {said}", output.status),
            }
        }
        Ok(())
    }

    fn dies_half_way(&mut self) -> Result<()> {
        let id = hex(NAME)?;
        for kind in ["stream", "datagram"] {
            let args = [kind, &id, "1", "linger"];
            let program = self.programs.serve(self.alpha()?, Door::Shim, &format!("linger-{kind}"), &args)?;
            self.await_bound(1.0)?;
            if kind == "stream" {
                agent::await_instances(self.lab.host("router")?, NAME, 0)?;
                let list: Value = serde_json::from_str(&agent::margay(self.alpha()?, ["service", "list", "--json"])?)?;
                ensure!(list["waiting"].to_string().contains("server-shim"), "nobody says who waits: {list}");
            } else {
                agent::await_instances(self.lab.host("router")?, NAME, 1)?;
            }
            program.signal(Signal::SIGKILL)?;
            self.await_bound(0.0)?;
            agent::await_instances(self.lab.host("router")?, NAME, 0)?;
        }
        Ok(())
    }

    /// Waits until so many sockets are promised something.
    fn await_bound(&self, count: f64) -> Result<()> {
        wait_for(&format!("{count} bound sockets"), LIMIT, || {
            let bound = agent::metric(self.alpha()?, "margay_bound_sockets")?;
            if bound == count { Ok(()) } else { bail!("there are {bound}") }
        })
    }

    fn no_agent(&mut self) -> Result<()> {
        let id = hex(NAME)?;
        let mut argv = self.programs.argv(Door::Library, "server", &["stream", &id, "1"]);
        argv.insert(1, "MARGAY_PROGRAMS=/nowhere".into());
        let output = self.alpha()?.output(argv)?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(!output.status.success() && said.contains("margay up") && said.contains("/nowhere"), "{said}");
        Ok(())
    }

    fn nonsense(&mut self) -> Result<()> {
        let script = self.dir.join("hostile.py");
        std::fs::write(&script, HOSTILE)?;
        let said = self.alpha()?.run([Path::new("python3"), &script])?;
        let said: Value = serde_json::from_str(&said).context("it said no JSON")?;
        ensure!(said["asked"].as_u64() > Some(2000) && said["done"] == 0, "some of it was done: {said}");
        ensure!(said["held"] == 256 && said["refused"] == 44, "a user has no bound: {said}");
        let id = hex(NAME)?;
        let server = self.programs.serve(self.alpha()?, Door::Shim, "afterwards", &["stream", &id, "1", "block"])?;
        agent::await_instances(self.lab.host("router")?, NAME, 1)?;
        let client = self.programs.ask(self.beta()?, Door::Shim, &["stream", &id, "1"])?;
        self.count(&client);
        let served = finish(server)?;
        self.count(&served);
        Ok(())
    }

    /// What is left of programs that have ended.
    fn stale(&mut self) -> Result<()> {
        let mut left = Vec::new();
        let cleared = wait_for("the end of all programs", LIMIT, || {
            left.clear();
            for host in [self.alpha()?, self.beta()?] {
                for name in ["bound_sockets", "named_sockets", "program_connections", "services"] {
                    let count = agent::metric(host, &format!("margay_{name}"))?;
                    left.extend((count > 0.0).then(|| format!("{count} {name} on {}", host.name())));
                }
            }
            if left.is_empty() { Ok(()) } else { bail!("{}", left.join(", ")) }
        });
        if let Err(error) = cleared {
            self.findings.note(format!("{error:#}"));
        }
        self.findings.set("stale_entries", left.len() as f64);
        Ok(())
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_name_is_written_as_the_programs_read_it() {
        let id = hex(NAME).expect("a name");
        assert_eq!((id.len(), &id[24..]), (64, "0".repeat(40).as_str()));
    }
}
