//! `handover-weather`: sessions that talk all the time go from one server to its twin on another host, round after
//! round, while packets are lost, agents are killed, clients move, and the same connections are to be sealed. After
//! each round every session is at exactly one of the servers, or has ended.

use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ipnet::IpNet;

use super::{Findings, Scenario, is_long, pair};
use crate::agent::{self, Agents};
use crate::command::progress;
use crate::host::Host;
use crate::interface::{self, Act};
use crate::lab::Lab;
use crate::program::wait_for;
use crate::report::Limit::{AtLeast, AtMost, Exactly};
use crate::report::{Bound, bound};
use crate::sessions::Sessions;
use crate::topology::Topology;
use crate::twins::{self, HOSTS, PORT, SERVICE, Twins};
use crate::{entries, filter};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "handover-weather",
    summary: "connections go to a twin on another host under loss, killed agents, moves and other acts",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 11] = [
    // Sockets of sessions that another server has, too, or that nobody has.
    bound("both", Exactly(0.0)),
    // Sessions that are open at their client, and that no server answers.
    bound("neither", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    // In rounds in which no agent was killed.
    bound("ended_without_reason", Exactly(0.0)),
    // Of all sessions of the rounds in which an agent was killed. The libraries of a giver whose agent dies close what
    // they were giving; the word of a client whose agent dies in that moment may be lost.
    bound("ended_by_kill_share", AtMost(0.75)),
    // At full length there are more. A round that could not be judged counts as a failure.
    bound("rounds", AtLeast(SHORT_ROUNDS as f64)),
    // In the rounds, and so in some weather. Otherwise nothing went on its way.
    bound("moved", AtLeast(SHORT as f64)),
    // Otherwise no other act has met a hand-over.
    bound("acts_done", AtLeast(1.0)),
    bound("leaked_entries", Exactly(0.0)),
    bound("sockets_left", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

/// All hosts are on networks of their own: what one says to another passes `way`, which can lose it.
const TOPOLOGY: &str = r#"
[subnet.east]
v4 = "10.1.0.0/24"

[subnet.west]
v4 = "10.2.0.0/24"

[subnet.hub]
v4 = "10.3.0.0/24"

# Each link delays what leaves and what comes: 10 ms there and back.
[subnet.far]
v4 = "10.4.0.0/24"
delay_ms = 2.5

[subnet.core]
v4 = "10.5.0.0/24"

[subnet.house]
v4 = "192.168.1.0/24"

[host.way]
role = "gateway"
links = [{ subnet = "east" }, { subnet = "west" }, { subnet = "hub" }, { subnet = "far" }, { subnet = "core" }]

[host.nat]
role = "gateway"
nat = "core"
links = [{ subnet = "core" }, { subnet = "house" }]

[host.router]
role = "router"
links = [{ subnet = "hub" }]

[host.one]
role = "agent"
links = [{ subnet = "east" }]

[host.two]
role = "agent"
links = [{ subnet = "west" }]

[host.client]
role = "agent"
links = [{ subnet = "far" }]

[host.home]
role = "agent"
links = [{ subnet = "house" }]
"#;

/// Hosts that open sessions: far away, and behind a translator.
const CLIENTS: [&str; 2] = ["client", "home"];
/// Sessions of both clients together, by the length of the scenario.
const SHORT: usize = 20;
const LONG: usize = 200;
/// Of a hundred packets between any two hosts.
const LOSS_PERCENT: u32 = 10;
/// Moments within a round, one for each step of a hand-over and some after it.
const MOMENTS: usize = 8;
const BETWEEN_MOMENTS_MS: usize = 20;
/// Short runs have every third moment of each kind of trouble, from another one on for each kind.
const SHORT_STRIDE: usize = 3;
/// Three of the first and the second kind, one of the last one, two of each other one.
const SHORT_ROUNDS: usize = 13;
/// Numbers of addresses from here on are nobody's.
const FREE_NUMBER: usize = 100;
const LIMIT: Duration = Duration::from_secs(20);
/// A giver that hears nothing of its connection closes it after 35 s. An agent looks half a minute after its start for
/// connections that the one before it has not written down.
const SOCKETS_LIMIT: Duration = Duration::from_secs(60);
/// An agent that was killed between the end of a flow and its acknowledgement keeps the flow for 40 s, and for twice as
/// long as the last packet has waited.
const FLOWS_LIMIT: Duration = Duration::from_secs(90);

/// Whose agent is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Giver,
    Taker,
    Client,
}

/// What happens while sessions go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    /// The agent is started again at once.
    Kill(Victim),
    Loss,
    /// A client gets another address.
    Move,
    /// A second act: a client's operator wants each of the connections sealed.
    Act,
}

const TROUBLES: [Trouble; 6] = [
    Trouble::Kill(Victim::Giver),
    Trouble::Kill(Victim::Taker),
    Trouble::Kill(Victim::Client),
    Trouble::Loss,
    Trouble::Move,
    Trouble::Act,
];

impl Trouble {
    /// Of the figure that counts sessions that have ended by it.
    fn figure(self) -> &'static str {
        match self {
            Self::Kill(Victim::Giver) => "ended_giver_killed",
            Self::Kill(Victim::Taker) => "ended_taker_killed",
            Self::Kill(Victim::Client) => "ended_client_killed",
            Self::Loss => "ended_loss",
            Self::Move => "ended_move",
            Self::Act => "ended_act",
        }
    }

    /// Whether sessions may end by it.
    fn may_end(self) -> bool {
        matches!(self, Self::Kill(_))
    }
}

/// Sessions go once, under trouble.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Round {
    trouble: Trouble,
    /// Since the giver was told.
    after: Duration,
    /// The server that gives.
    from: usize,
    /// The client to which it happens, where it happens to one.
    client: usize,
}

fn rounds(stride: usize) -> Vec<Round> {
    let mut rounds = Vec::new();
    for (kind, trouble) in TROUBLES.into_iter().enumerate() {
        let first = if stride == 1 { 0 } else { kind };
        for moment in (first..MOMENTS).step_by(stride) {
            let number = rounds.len();
            let after = Duration::from_millis((moment * BETWEEN_MOMENTS_MS) as u64);
            rounds.push(Round { trouble, after, from: (number / 2) % 2, client: number % 2 });
        }
    }
    rounds
}

/// The sessions of one client.
struct Talkers<'a> {
    client: &'a Host,
    /// The client's own.
    address: IpNet,
    count: usize,
    sessions: Option<Sessions>,
    /// Answers of these sessions that were wrong, and were counted.
    wrong: u64,
}

/// What there is of the sessions after a round.
#[derive(Clone, Copy, Debug, Default)]
struct Left {
    open: usize,
    hung: usize,
}

impl<'a> Talkers<'a> {
    fn new(lab: &'a Lab, name: &str, count: usize) -> Result<Self> {
        let client = lab.host(name)?;
        let address = interface::first_address(lab, client, 0, false)?;
        Ok(Self { client, address, count, sessions: None, wrong: 0 })
    }

    /// Opens all sessions, unless they are.
    fn open(&mut self) -> Result<()> {
        if self.sessions.is_none() {
            let to = agent::virtual_addresses(self.client, SERVICE)?.0;
            self.sessions = Some(Sessions::open(self.client, &to, PORT, self.count, &[])?);
            self.wrong = 0;
        }
        Ok(())
    }

    /// Waits until each is answered once more, or is not for too long.
    fn prove(&mut self, what: &str, findings: &mut Findings) -> Result<Left> {
        let sessions = self.sessions.as_mut().context("there are no sessions")?;
        let mut talked = sessions.round()?;
        if talked.hung > 0 {
            // A connection that has died with the taker's agent is missed half a minute after the agent's next start.
            talked = sessions.round()?;
        }
        findings.figures.add("neither", talked.hung as f64);
        findings.figures.add("wrong_bytes", (talked.wrong - self.wrong) as f64);
        if talked.open < self.count || talked.hung > 0 || talked.wrong > self.wrong {
            let name = self.client.name();
            findings
                .note(format!("{what}: {name}: {} are open, {} hang: {:?}", talked.open, talked.hung, talked.errors));
        }
        self.wrong = talked.wrong;
        Ok(Left { open: talked.open, hung: talked.hung })
    }

    /// Closes them, of which so many should still be open. No more may have ended by then.
    fn close(&mut self, left: Left, findings: &mut Findings) -> Result<()> {
        let Some(sessions) = self.sessions.take() else { return Ok(()) };
        // Those that hang do not end in order.
        if left.hung > 0 {
            return Ok(());
        }
        let talked = sessions.end()?;
        let ended = left.open - talked.open;
        findings.figures.add("wrong_bytes", (talked.wrong - self.wrong) as f64);
        findings.figures.add("ended_without_reason", ended as f64);
        if ended > 0 {
            let name = self.client.name();
            findings.note(format!("{name}: {ended} sessions have ended by themselves: {:?}", talked.errors));
        }
        Ok(())
    }
}

struct Stage<'a> {
    lab: &'a Lab,
    way: &'a Host,
    servers: [&'a Host; 2],
    twins: Twins,
    talkers: [Talkers<'a>; 2],
    /// Addresses that were given to clients.
    number: usize,
    /// Sessions of the rounds that may have ended some.
    at_risk: usize,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse(SCENARIO.name, TOPOLOGY)?, dir)?;
    let _agents = Agents::start(&lab)?;
    let servers = [lab.host(HOSTS[0])?, lab.host(HOSTS[1])?];
    let hosts = [servers[0], servers[1], lab.host(CLIENTS[0])?, lab.host(CLIENTS[1])?];
    pair::demand_kernel(&hosts, findings)?;
    for figure in ["both", "neither", "wrong_bytes", "ended_without_reason", "ended_by_kill", "rounds", "moved"] {
        findings.set(figure, 0.0);
    }
    TROUBLES.into_iter().for_each(|trouble| findings.set(trouble.figure(), 0.0));
    let twins = Twins::start(servers)?;
    hosts.iter().try_for_each(|host| agent::await_instances(host, SERVICE, HOSTS.len()))?;
    let sessions = if is_long() { LONG } else { SHORT };
    let talkers = [Talkers::new(&lab, CLIENTS[0], sessions / 2)?, Talkers::new(&lab, CLIENTS[1], sessions / 2)?];
    let way = lab.host("way")?;
    let mut stage = Stage { lab: &lab, way, servers, twins, talkers, number: FREE_NUMBER, at_risk: 0 };
    for round in rounds(if is_long() { 1 } else { SHORT_STRIDE }) {
        pair::attempt_part(&format!("{round:?}"), findings, |findings| stage.round(round, findings));
    }
    let ended = findings.figures.get("ended_by_kill");
    findings.set("ended_by_kill_share", ended / stage.at_risk.max(1) as f64);
    pair::attempt_part("the end of all sessions", findings, |findings| stage.close(findings));
    // Their maps tell nothing: each agent has been started again, and has others since.
    findings.set("leaked_entries", entries::flows_left(&hosts, FLOWS_LIMIT)?);
    Ok(())
}

impl<'a> Stage<'a> {
    fn round(&mut self, round: Round, findings: &mut Findings) -> Result<()> {
        self.talkers.iter_mut().try_for_each(Talkers::open)?;
        self.gather(round.from)?;
        // Whoever ends in fair weather has no reason for it.
        let calm = self.prove("in fair weather", findings)?;
        let before: usize = calm.iter().map(|left| left.open).sum();
        let all: usize = self.talkers.iter().map(|talkers| talkers.count).sum();
        findings.figures.add("ended_without_reason", (all - before) as f64);
        let done = self.disturb(round, findings);
        self.settle(round)?;
        let after = self.prove(&format!("{round:?}"), findings)?;
        let open: usize = after.iter().map(|left| left.open).sum();
        self.count_ended(round, before, before - open, findings);
        self.compare_sockets(round, open, findings)?;
        for (talkers, left) in self.talkers.iter_mut().zip(after) {
            // Those that have ended are opened anew, and all others with them.
            if left.open < talkers.count || left.hung > 0 {
                talkers.close(left, findings)?;
            }
        }
        done?;
        findings.figures.add("rounds", 1.0);
        Ok(())
    }

    /// All sessions go to the server that is to give them. One whose agent was killed may not be found at once.
    fn gather(&mut self, to: usize) -> Result<()> {
        wait_for("all sessions at one server", LIMIT, || {
            let given = self.twins.order(1 - to)?;
            ensure!(given.kept == 0, "{given:?}; first of all: {:?}", self.twins.not_given(1 - to));
            Ok(())
        })
    }

    /// Each session of each client is answered, or has ended, or hangs.
    fn prove(&mut self, what: &str, findings: &mut Findings) -> Result<[Left; 2]> {
        let [one, other] = &mut self.talkers;
        Ok([one.prove(what, findings)?, other.prove(what, findings)?])
    }

    /// Lets the sessions go, and something happen meanwhile. Waits until the giver knows what has become of each.
    fn disturb(&mut self, round: Round, findings: &mut Findings) -> Result<()> {
        let victim = self.victim(round);
        let pid = victim.map(agent::pid).transpose()?;
        if round.trouble == Trouble::Loss {
            filter::lose(self.way, LOSS_PERCENT)?;
        }
        self.twins.tell(round.from)?;
        // Rounds differ in how far the sessions are by then: nothing tells of that.
        sleep(round.after);
        if let (Some(host), Some(pid)) = (victim, pid) {
            agent::kill_known(host, pid)?;
            agent::start_again(host)?;
        }
        if round.trouble == Trouble::Move {
            self.renumber(round.client)?;
        }
        if round.trouble == Trouble::Act {
            seal_all(self.talkers[round.client].client, findings)?;
        }
        let given = self.twins.await_given(round.from)?;
        if round.trouble == Trouble::Act {
            unseal_all(self.talkers[round.client].client)?;
        }
        progress(&format!("{round:?}: {given:?}"));
        findings.figures.add("moved", given.moved as f64);
        findings.figures.add("kept", given.kept as f64);
        Ok(())
    }

    /// The host whose agent is killed.
    fn victim(&self, round: Round) -> Option<&'a Host> {
        match round.trouble {
            Trouble::Kill(Victim::Giver) => Some(self.servers[round.from]),
            Trouble::Kill(Victim::Taker) => Some(self.servers[1 - round.from]),
            Trouble::Kill(Victim::Client) => Some(self.talkers[round.client].client),
            Trouble::Loss | Trouble::Move | Trouble::Act => None,
        }
    }

    /// The client goes to another address, as seen by the others where nobody translates it.
    fn renumber(&mut self, client: usize) -> Result<()> {
        self.number += 1;
        let talkers = &mut self.talkers[client];
        let new = interface::address(self.lab, talkers.client, 0, false, self.number)?;
        let old = std::mem::replace(&mut talkers.address, new);
        interface::change(self.lab, talkers.client, &[Act::Add(0, new), Act::Remove(0, old)]).map(drop)
    }

    /// The weather is fair, all agents run, and both servers are found and take connections.
    fn settle(&mut self, round: Round) -> Result<()> {
        filter::relent(self.way)?;
        let hosts = [self.servers[0], self.servers[1], self.talkers[0].client, self.talkers[1].client];
        for host in hosts {
            agent::pid(host).map(drop).or_else(|_| agent::start_again(host))?;
        }
        match round.trouble {
            Trouble::Kill(Victim::Giver) => self.twins.take_again(round.from)?,
            Trouble::Kill(Victim::Taker) => self.twins.take_again(1 - round.from)?,
            _ => {}
        }
        hosts.iter().try_for_each(|host| agent::await_instances(host, SERVICE, HOSTS.len()))
    }

    fn count_ended(&mut self, round: Round, before: usize, ended: usize, findings: &mut Findings) {
        findings.figures.add(round.trouble.figure(), ended as f64);
        if round.trouble.may_end() {
            self.at_risk += before;
            findings.figures.add("ended_by_kill", ended as f64);
        } else {
            findings.figures.add("ended_without_reason", ended as f64);
        }
    }

    /// A server has a socket of each session that is open, and of no other one.
    fn compare_sockets(&self, round: Round, open: usize, findings: &mut Findings) -> Result<()> {
        // One that has ended at its client may have its end under way.
        let _ = wait_for("as many sockets as sessions", SOCKETS_LIMIT, || {
            let sockets = self.established()?;
            ensure!(sockets <= open, "there are {sockets} sockets of {open} sessions");
            Ok(())
        });
        let sockets = self.established()?;
        if sockets > open {
            findings.note(format!("{round:?}: servers have {sockets} sockets of {open} sessions"));
        }
        findings.figures.add("both", sockets.saturating_sub(open) as f64);
        Ok(())
    }

    /// Closes what is open, and counts the sockets that stay.
    fn close(&mut self, findings: &mut Findings) -> Result<()> {
        for talkers in &mut self.talkers {
            // There are none where the last round has failed.
            if talkers.sessions.is_some() {
                let left = talkers.prove("at the end", findings)?;
                findings.figures.add("ended_without_reason", (talkers.count - left.open) as f64);
                talkers.close(left, findings)?;
            }
        }
        // Those that stay are counted.
        let _ = wait_for("the end of all sockets", SOCKETS_LIMIT, || {
            let left = self.sockets()?.len();
            ensure!(left == 0, "{left} are left");
            Ok(())
        });
        let left = self.sockets()?;
        if !left.is_empty() {
            findings.note(format!("sockets that are left: {left:?}"));
        }
        findings.set("sockets_left", left.len() as f64);
        Ok(())
    }

    fn established(&self) -> Result<usize> {
        let [one, other] = self.servers;
        Ok(twins::established(one)? + twins::established(other)?)
    }

    /// Sockets of connections of both servers.
    fn sockets(&self) -> Result<Vec<String>> {
        let [one, other] = self.servers;
        Ok([twins::sockets(one)?, twins::sockets(other)?].concat())
    }
}

/// A client's connections to the servers, by their ids.
fn flows(client: &Host) -> Result<Vec<String>> {
    let flows = agent::open_flows(client, SERVICE, "tcp")?;
    Ok(flows.iter().filter_map(|flow| flow["flow"].as_str()).map(str::to_owned).collect())
}

/// Wants each of a client's connections sealed. Refused where one is on its way; one that is being sealed is not given
/// meanwhile.
fn seal_all(client: &Host, findings: &mut Findings) -> Result<()> {
    for flow in flows(client)? {
        match agent::set_stack(client, &flow, "secure") {
            Ok(()) => findings.figures.add("acts_done", 1.0),
            Err(error) => {
                findings.figures.add("acts_refused", 1.0);
                findings.note(format!("another act on a connection: {error:#}"));
            }
        }
    }
    Ok(())
}

/// Takes these orders back.
fn unseal_all(client: &Host) -> Result<()> {
    for flow in flows(client)? {
        // There may have been none.
        let _ = agent::margay(client, ["stack", "release", &flow]);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{MOMENTS, SHORT_ROUNDS, SHORT_STRIDE, TROUBLES, Trouble, Victim, rounds};

    #[test]
    fn rounds_meet_every_trouble_at_both_servers_and_both_clients() {
        for (stride, count) in [(SHORT_STRIDE, SHORT_ROUNDS), (1, TROUBLES.len() * MOMENTS)] {
            let rounds = rounds(stride);
            assert_eq!(rounds.len(), count);
            for trouble in TROUBLES {
                let mut of_kind = rounds.iter().filter(|round| round.trouble == trouble);
                let is_of_client = matches!(trouble, Trouble::Kill(Victim::Client) | Trouble::Move);
                let sides = |side: usize| of_kind.clone().any(|round| !is_of_client || round.client == side);
                assert!(sides(0) && sides(1), "{trouble:?}");
                assert!(of_kind.next().is_some(), "{trouble:?}");
            }
            let from = |side: usize| rounds.iter().any(|round| round.trouble.may_end() && round.from == side);
            assert!(from(0) && from(1));
        }
    }
}
