//! `handover-attacks`: a host without a key, one that others know, and a member that may not serve the name try to take
//! sessions that go from one server to its twin and back: by forgeries and replays of a true hand-over, by messages
//! with right tags about sessions of others, by connections that nobody has given, and by fetching those. Somebody on
//! the path reads the tickets of true hand-overs and uses them before the client, with keys of his own; a user of the
//! server's host without rights makes sockets with the same five-tuples in a network namespace of his own and gives
//! them away. A client of the name tells giver and taker different things of its own sessions: of each at most one of
//! both may have it. The sessions talk all the while, and true hand-overs go on before, between and after.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::{Findings, Scenario, pair};
use crate::agent::{self, Agents};
use crate::host::Host;
use crate::lab::Lab;
use crate::observe;
use crate::program::{Program, output_within, wait_for};
use crate::recorder::Recorder;
use crate::report::Limit::{AtLeast, AtMost, Exactly};
use crate::report::{Bound, bound};
use crate::server;
use crate::sessions::Sessions;
use crate::topology::Topology;
use crate::traffic::liars_id;
use crate::twins::{self, HOSTS, PORT, SERVICE, Twins};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "handover-attacks",
    summary: "forged, replayed and stolen messages of hand-overs, and connections that nobody gave, beside true ones",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 14] = [
    // Sessions that moved, ended or hang, sockets that came or went, connections that a taker wanted, and those of the
    // liar that both servers have.
    bound("accepted", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    // Messages and streams.
    bound("tried", AtLeast(15_000.0)),
    bound("attacks", Exactly(ATTACKS as f64)),
    bound("types", Exactly(margay_wire::Kind::ALL.len() as f64)),
    // Otherwise the tags of the host that others know were not right.
    bound("answered", AtLeast(1.0)),
    // Otherwise no taker has heard of the connections that were brought.
    bound("brought_refused", AtLeast(BROUGHT as f64)),
    // Otherwise no ticket was read, or nobody made a socket up.
    bound("tickets", AtLeast(5.0)),
    bound("refused_local", AtLeast(2.0 * MADE_UP as f64)),
    // Hand-overs that a client has lied about: in each of six ways.
    bound("lies", AtLeast(12.0)),
    // Of the sessions that were to go, before, between and after.
    bound("not_moved", Exactly(0.0)),
    bound("moved", AtLeast((SESSIONS * (ATTACKS + 1)) as f64)),
    bound("memory_growth_mb", AtMost(20.0)),
    bound("failed", Exactly(0.0)),
];

/// Figures that are added up.
const ZERO_AT_FIRST: [&str; 11] = [
    "accepted",
    "wrong_bytes",
    "tried",
    "attacks",
    "types",
    "answered",
    "brought_refused",
    "tickets",
    "refused_local",
    "lies",
    "not_moved",
];

/// Everybody is on a network of their own, and one router lets any sender's address pass.
const TOPOLOGY: &str = r#"
[subnet.west]
v4 = "10.1.0.0/24"

[subnet.east]
v4 = "10.2.0.0/24"

[subnet.south]
v4 = "10.3.0.0/24"

[subnet.hub]
v4 = "10.4.0.0/24"

[subnet.wild]
v4 = "10.5.0.0/24"

[host.way]
role = "gateway"
links = [{ subnet = "west" }, { subnet = "east" }, { subnet = "south" }, { subnet = "hub" }, { subnet = "wild" }]

[host.router]
role = "router"
links = [{ subnet = "hub" }]

[host.one]
role = "agent"
links = [{ subnet = "east" }]

[host.two]
role = "agent"
links = [{ subnet = "south" }]

[host.client]
role = "agent"
links = [{ subnet = "west" }]

[host.attacker]
role = "plain"
links = [{ subnet = "wild" }]

[host.liar]
role = "plain"
links = [{ subnet = "wild" }]

# Joins with a token that is good for another name alone.
[host.member]
role = "plain"
links = [{ subnet = "wild" }]
"#;

/// The one name that the member may serve.
const MEMBERS_NAME: &str = "insider.shop";
/// Client and servers serve it, so that anybody may become known to them.
const OPEN: &str = "open.shop";
const OPEN_LISTEN: &str = "0.0.0.0:7";
/// The attacker's made-up addresses are in its /16.
const STRANGERS: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 0);
const SESSIONS: usize = 20;
const ATTACKS: usize = 7;
/// Connections that a user without rights gives away.
const MADE_UP: usize = 5;
/// How long tickets are read, during true hand-overs.
const STEALING_MS: u64 = 4_000;
/// How long a client lies, over so many sessions to each server.
const LYING_MS: &str = "25000";
const LYING_SESSIONS: &str = "6";
/// Connections that the member brings.
const BROUGHT: usize = 40;
/// All messages, and of DATA (type 32) what has a packet number that 32 divides.
const SEEN: &str = "(udp[9] != 32 or udp[19] & 31 == 0)";
const CAPTURED: usize = 1_000;
/// The file's own header is no packet.
const EMPTY_CAPTURE: u64 = 24;
const ATTACK_LIMIT: Duration = Duration::from_secs(60);
const SETTLE_LIMIT: Duration = Duration::from_secs(15);
/// From when a giver knows what has become of a session until the liar's last word of it.
const LAST_WORD: Duration = Duration::from_secs(2);
/// A taker may have what it lets go of a moment longer than its giver has asked for that.
const FORK_LIMIT: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(50);
/// Forgeries of each type, and changed copies of each message, for each host.
const FORGERIES: &str = "100";
const FLIPS: &str = "2";
const PER_S: &str = "5000";
/// Rounds of all messages of a hand-over, with right tags, to each host.
const TAGGED: &str = "200";
const FETCHING: &str = "3000";

struct Stage<'a> {
    lab: &'a Lab,
    client: &'a Host,
    servers: [&'a Host; 2],
    twins: Twins,
    sessions: Sessions,
    /// The server that has all sessions.
    at: usize,
    /// Answers that were wrong, and were counted.
    wrong: u64,
    /// A hand-over there and back (pcap).
    capture: String,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse(SCENARIO.name, TOPOLOGY)?, dir)?;
    let _agents = Agents::start(&lab)?;
    let client = lab.host("client")?;
    let servers = [lab.host(HOSTS[0])?, lab.host(HOSTS[1])?];
    pair::demand_kernel(&[client, servers[0], servers[1]], findings)?;
    for figure in ZERO_AT_FIRST {
        findings.set(figure, 0.0);
    }
    // Its authority's hosts, as by default, and one that is of none.
    let liar = format!("host:{}", liars_id());
    let twins = Twins::start_for(servers, &["--allow", "authority:shop", "--allow", &liar])?;
    let _open = serve_to_all(&[client, servers[0], servers[1]])?;
    admit_member(&lab)?;
    // Answers to forged addresses go to somebody.
    let attacker = pair::address(lab.host("attacker")?)?;
    lab.host("way")?.run(["ip", "route", "add", "10.99.0.0/16", "via", &attacker])?;
    agent::await_instances(client, SERVICE, HOSTS.len())?;
    let to = agent::virtual_addresses(client, SERVICE)?.0;
    let sessions = Sessions::open(client, &to, PORT, SESSIONS, &[])?;
    let mut stage = Stage { lab: &lab, client, servers, twins, sessions, at: 0, wrong: 0, capture: String::new() };
    // Some have come to either.
    stage.twins.order(1)?;
    stage.record(findings)?;
    let before = stage.memory()?;
    let attacks: [(&str, Attack, bool); ATTACKS] = [
        ("forgeries and replays", forge, false),
        ("right tags, and sessions of others", speak_of_others, false),
        ("connections that nobody has given", bring, false),
        ("fetching what nobody hands over", fetch, false),
        ("sockets that a user without rights has made up", fabricate, false),
        ("tickets that were read on the path", steal_tickets, true),
        ("different things that giver and taker are told", lie, true),
    ];
    for (what, attack, is_during) in attacks {
        pair::attempt_part(what, findings, |findings| stage.under(what, attack, is_during, findings));
    }
    let grown = stage.memory()?.into_iter().zip(before).map(|(after, before)| (after - before) / 1e6);
    findings.set("memory_growth_mb", grown.fold(0.0, f64::max));
    let talked = stage.sessions.end()?;
    findings.figures.add("accepted", (SESSIONS - talked.open) as f64);
    findings.figures.add("wrong_bytes", (talked.wrong - stage.wrong) as f64);
    Ok(())
}

fn serve_to_all(hosts: &[&Host]) -> Result<Vec<Program>> {
    let mut echoes = Vec::new();
    for host in hosts {
        echoes.push(server::echo(host, &[OPEN_LISTEN.parse()?])?);
        agent::publish(host, OPEN, OPEN_LISTEN, &[])?;
    }
    Ok(echoes)
}

fn admit_member(lab: &Lab) -> Result<()> {
    let words = ["id", "token", "create", &lab.topology.authority, "--grant", MEMBERS_NAME];
    let token = agent::margay(lab.host("router")?, words)?;
    let member = lab.host("member")?;
    agent::join(member, token.trim())?;
    agent::await_instances(member, SERVICE, HOSTS.len())
}

/// Gives the command of an attacker.
type Attack = fn(&Stage<'_>) -> Result<Command>;

/// Every type of message, without a tag and with wrong ones; and what was seen, again and changed.
fn forge(stage: &Stage<'_>) -> Result<Command> {
    let attacker = stage.lab.host("attacker")?;
    let mut command =
        attacker.traffic(["hijack", "--strangers", &STRANGERS.to_string(), "--capture", &stage.capture])?;
    command.args(["--forgeries", FORGERIES, "--flips", FLIPS, "--rate", PER_S]);
    for host in stage.hosts() {
        let at = pair::address(host)?;
        command.args(["--target", &at, "--honest", &at]);
    }
    Ok(command)
}

/// A host that the others have met, as any host may be.
fn speak_of_others(stage: &Stage<'_>) -> Result<Command> {
    let attacker = stage.lab.host("attacker")?;
    let mut command = attacker.traffic(["snatch", "tagged", "--service", OPEN, "--capture", &stage.capture])?;
    command.args(["--count", TAGGED]);
    for host in stage.hosts() {
        command.args(["--target", &pair::address(host)?]);
    }
    Ok(command)
}

/// From a host whose agent leads to the takers' agents.
fn bring(stage: &Stage<'_>) -> Result<Command> {
    let member = stage.lab.host("member")?;
    let to = agent::virtual_addresses(member, SERVICE)?.0;
    let mut command = member.traffic(["snatch", "bring", "--service", SERVICE, "--capture", &stage.capture])?;
    command.args(["--to", &to, "--count", &BROUGHT.to_string()]);
    Ok(command)
}

/// SYNs as the client of a hand-over sends them, with made-up tickets.
fn fetch(stage: &Stage<'_>) -> Result<Command> {
    let attacker = stage.lab.host("attacker")?;
    let mut command = attacker.traffic(["hostile", "--strangers", &STRANGERS.to_string(), "--service", SERVICE])?;
    command.args(["--fetching", "--port", &PORT.to_string(), "--count", FETCHING, "--rate", PER_S]);
    for host in stage.servers {
        let at = pair::address(host)?;
        command.args(["--target", &at, "--honest", &at]);
    }
    Ok(command)
}

/// A user of the server's host, in a namespace where all addresses are its own.
fn fabricate(stage: &Stage<'_>) -> Result<Command> {
    let server = stage.servers[stage.at];
    let words = ["snatch", "local", "--service", SERVICE, "--host", HOSTS[1 - stage.at]];
    let own = server.words_of_traffic(&words)?;
    let connections = twins::connections(server)?;
    let connections = connections.get(..MADE_UP).context("the server has fewer connections")?;
    let mut script = "ip link set lo up; sysctl -qw net.ipv4.ip_unprivileged_port_start=0".to_owned();
    let addresses: BTreeSet<IpAddr> = connections.iter().flat_map(|(local, peer)| [local.ip(), peer.ip()]).collect();
    addresses.iter().for_each(|ip| script.push_str(&format!("; ip addr add {ip} dev lo")));
    script.push_str("; exec setpriv --reuid 65534 --regid 65534 --clear-groups --no-new-privs \"$@\"");
    let mut command = server.command(["unshare", "-n", "sh", "-ec", &script, "sh"]);
    command.args(own);
    for (local, peer) in connections {
        command.args(["--connection", &format!("{local},{peer}")]);
    }
    Ok(command)
}

/// From where all packets pass.
fn steal_tickets(stage: &Stage<'_>) -> Result<Command> {
    let way = stage.lab.host("way")?;
    let mut command = way.traffic(["snatch", "tickets", "--service", SERVICE, "--port", &PORT.to_string()])?;
    command.args(["--time-ms", &STEALING_MS.to_string()]);
    Ok(command)
}

/// From a client that the service admits.
fn lie(stage: &Stage<'_>) -> Result<Command> {
    let liar = stage.lab.host("liar")?;
    let mut command = liar.traffic(["snatch", "lie", "--service", SERVICE, "--port", &PORT.to_string()])?;
    command.args(["--count", LYING_SESSIONS, "--time-ms", LYING_MS]);
    for host in stage.servers {
        command.args(["--server", &pair::address(host)?]);
    }
    Ok(command)
}

impl Stage<'_> {
    fn hosts(&self) -> [&Host; 3] {
        [self.client, self.servers[0], self.servers[1]]
    }

    /// Resident memory of both servers' agents, in bytes.
    fn memory(&self) -> Result<Vec<f64>> {
        self.servers.iter().map(|host| observe::resident_bytes(agent::pid(host)?)).collect()
    }

    /// All sessions go to the other server. Those of the liar, which the servers count among what they give, may stay
    /// or end.
    fn move_all(&mut self, findings: &mut Findings) -> Result<()> {
        // A session that has come a moment ago may not be its server's yet.
        self.prove("before a hand-over", findings)?;
        let given = self.twins.order(self.at)?;
        self.at = 1 - self.at;
        let moved = given.moved.min(self.established()?[self.at]);
        findings.figures.add("moved", moved as f64);
        findings.figures.add("not_moved", SESSIONS.abs_diff(moved) as f64);
        if moved != SESSIONS {
            findings.note(format!("{given:?}: {:?}", self.twins.not_given(1 - self.at)));
        }
        Ok(())
    }

    /// Records a true hand-over there and back, as one who stands before the client sees it.
    fn record(&mut self, findings: &mut Findings) -> Result<()> {
        let mut recorder = Recorder::start(self.lab.host("way")?, 0, SEEN, CAPTURED)?;
        self.move_all(findings)?;
        self.move_all(findings)?;
        // What dumpcap has seen is in its file some moments later.
        let mut before = EMPTY_CAPTURE;
        wait_for("a capture that is complete", SETTLE_LIMIT, || {
            self.client.shell("sleep 0.5")?;
            let length = std::fs::metadata(recorder.file())?.len();
            let is_complete = length == before && length > EMPTY_CAPTURE;
            before = length;
            if is_complete { Ok(()) } else { bail!("{length} bytes, and it grows") }
        })?;
        recorder.finish()?.to_str().context("a path that is no text")?.clone_into(&mut self.capture);
        Ok(())
    }

    /// Nothing changes while somebody attacks; after that, a true hand-over works. `is_during`: true ones go on all the
    /// while.
    fn under(&mut self, what: &str, attack: Attack, is_during: bool, findings: &mut Findings) -> Result<()> {
        let before = self.established()?;
        let mut command = attack(self)?;
        let output = std::thread::scope(|scope| -> Result<Output> {
            let attacking = scope.spawn(move || output_within(&mut command, ATTACK_LIMIT));
            while !attacking.is_finished() {
                self.prove(what, findings)?;
                if is_during {
                    self.move_all(findings)?;
                    findings.figures.add("accepted", self.forked()? as f64);
                }
            }
            attacking.join().ok().context("a thread ended badly")?
        })?;
        let said = understand(&output)?;
        note_attack(what, &said, findings);
        self.prove(what, findings)?;
        let after = self.established()?;
        // Those that moved meanwhile are all at one of the two.
        let sorted = |mut counts: [usize; 2]| {
            counts.sort_unstable();
            counts
        };
        let (before, after) = if is_during { (sorted(before), sorted(after)) } else { (before, after) };
        for (before, after) in before.into_iter().zip(after) {
            findings.figures.add("accepted", before.abs_diff(after) as f64);
        }
        if before != after {
            findings.note(format!("{what}: servers had {before:?} connections, and have {after:?}"));
        }
        self.move_all(findings)
    }

    /// How many connections each server has, but for those of the liar.
    fn established(&self) -> Result<[usize; 2]> {
        Ok(self.clients(false)?.map(|clients| clients.len()))
    }

    /// The clients' ends of the connections that each server has: those of the liar, or all others.
    fn clients(&self, are_liars: bool) -> Result<[Vec<SocketAddr>; 2]> {
        let liar: IpAddr = pair::address(self.lab.host("liar")?)?.parse()?;
        let mut clients = [Vec::new(), Vec::new()];
        for (of, host) in clients.iter_mut().zip(self.servers) {
            let all = twins::connections(host)?.into_iter().map(|(_, client)| client);
            of.extend(all.filter(|client| (client.ip() == liar) == are_liars));
        }
        Ok(clients)
    }

    /// How many sessions of the liar both servers have, once all that it says of them is said.
    fn forked(&self) -> Result<usize> {
        if self.clients(true)?.iter().all(Vec::is_empty) {
            return Ok(0);
        }
        std::thread::sleep(LAST_WORD);
        let until = Instant::now() + FORK_LIMIT;
        loop {
            let [one, two] = self.clients(true)?;
            let both = one.iter().filter(|client| two.contains(client)).count();
            if both == 0 || Instant::now() > until {
                return Ok(both);
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Each session is answered once more.
    fn prove(&mut self, what: &str, findings: &mut Findings) -> Result<()> {
        let talked = self.sessions.round()?;
        findings.figures.add("wrong_bytes", (talked.wrong - self.wrong) as f64);
        self.wrong = talked.wrong;
        // Those that have ended are counted at the end.
        findings.figures.add("accepted", talked.hung as f64);
        let all = talked.open == SESSIONS && talked.hung == 0;
        ensure!(all, "{what}: {} are open, {} hang: {:?}", talked.open, talked.hung, talked.errors);
        Ok(())
    }
}

fn understand(output: &Output) -> Result<Value> {
    if !output.status.success() {
        bail!("the attacker failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    serde_json::from_slice(&output.stdout).context("the attacker says nothing")
}

/// What the attacker has tried, and what it has heard.
fn note_attack(what: &str, said: &Value, findings: &mut Findings) {
    findings.note(format!("{what}: {said}"));
    let number = |field: &str| said[field].as_f64().unwrap_or_default();
    findings.figures.add("attacks", 1.0);
    findings.figures.add("tried", number("sent"));
    findings.figures.add("accepted", number("accepted"));
    findings.figures.add("answered", number("answered"));
    findings.figures.add("tickets", number("tickets"));
    findings.figures.add("lies", number("lies"));
    findings.figures.add("refused_local", number("refused_local"));
    // Of streams alone: a queue that is full refuses packets.
    if said["said"].is_string() {
        findings.figures.add("brought_refused", number("refused"));
    }
    let types = said["types"].as_object().map_or(0, serde_json::Map::len) as f64;
    findings.set("types", findings.figures.get("types").max(types));
}
