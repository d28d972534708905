//! `handover`: connections that talk all the time go from one server to its twin on another host, and back, over links
//! with a round trip of 20 ms: carried by the kernels, encapsulated, and sealed, over IPv4 and IPv6.

use std::path::Path;

use anyhow::{Result, ensure};

use super::{Findings, Scenario, is_long, pair, site};
use crate::agent::{self, Agents};
use crate::command::progress;
use crate::entries::{self, Entries};
use crate::host::Host;
use crate::observe;
use crate::report::Limit::{AtLeast, AtMost, Exactly};
use crate::report::{Bound, bound, median, percentile};
use crate::sessions::Sessions;
use crate::twins::{HOSTS, PORT, SERVICE, Twins};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "handover",
    summary: "connections that talk go to a twin on another host and back: direct, encapsulated, sealed; IPv4 and IPv6",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 13] = [
    bound("resets", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("lost_sessions", Exactly(0.0)),
    // Of those that were to go, there and back.
    bound("not_moved", Exactly(0.0)),
    // At full length there are more.
    bound("moved", AtLeast((PARTS * 2 * SHORT) as f64)),
    bound("moved_per_s", AtLeast(100.0)),
    bound("pause_rtts_p50", AtMost(4.0)),
    bound("pause_ms_p99", AtMost(500.0)),
    bound("sealed_pause_rtts_p50", AtMost(4.0)),
    bound("sealed_pause_ms_p99", AtMost(500.0)),
    // Of the sealed ones, after their way there and back.
    bound("unsealed", Exactly(0.0)),
    bound("leaked_entries", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

/// Each link delays what leaves and what comes, and two of them are between any two hosts.
const BLOCKS: &str = "v4 = \"10.1.0.0/24\"\nv6 = \"fd01::/64\"\ndelay_ms = 5\n";
const RTT_MS: f64 = 20.0;
/// Sessions of each part, by the length of the scenario.
const SHORT: usize = 50;
const LONG: usize = 1000;
const PARTS: usize = 6;

/// Sessions of one client to one address.
struct Part<'a> {
    name: &'static str,
    client: &'a Host,
    address: &'a str,
    is_sealed: bool,
}

struct Stage<'a> {
    twins: Twins,
    count: usize,
    /// How long each session had to wait beyond what it waits for otherwise, in each move.
    pauses_ms: Vec<f64>,
    /// The same of sealed ones alone.
    sealed_pauses_ms: Vec<f64>,
    /// The time of all moves together, and what they have moved.
    took_ms: f64,
    moved: usize,
    findings: &'a mut Findings,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = site::build(SCENARIO.name, BLOCKS, &[HOSTS[0], HOSTS[1], "client", "encap", "sealed"], dir)?;
    let encapsulated = lab.host("encap")?;
    agent::keep_encapsulated(encapsulated)?;
    let sealed = lab.host("sealed")?;
    agent::demand_sealed(sealed)?;
    let _agents = Agents::start(&lab)?;
    let client = lab.host("client")?;
    let hosts = [lab.host(HOSTS[0])?, lab.host(HOSTS[1])?, client, encapsulated, sealed];
    pair::demand_kernel(&hosts[..3], findings)?;
    ["not_moved", "moved", "wrong_bytes", "lost_sessions", "unsealed"]
        .into_iter()
        .for_each(|figure| findings.set(figure, 0.0));
    let twins = Twins::start([hosts[0], hosts[1]])?;
    let clients = [client, encapsulated, sealed];
    clients.into_iter().try_for_each(|client| agent::await_instances(client, SERVICE, 2))?;
    let (direct_v4, direct_v6) = agent::virtual_addresses(client, SERVICE)?;
    let (encapsulated_v4, encapsulated_v6) = agent::virtual_addresses(encapsulated, SERVICE)?;
    let (sealed_v4, sealed_v6) = agent::virtual_addresses(sealed, SERVICE)?;
    let part = |name, client, address, is_sealed| Part { name, client, address, is_sealed };
    // Two of each client.
    let parts: [Part<'_>; PARTS] = [
        part("direct, IPv4", client, &direct_v4, false),
        part("direct, IPv6", client, &direct_v6, false),
        part("encapsulated, IPv4", encapsulated, &encapsulated_v4, false),
        part("encapsulated, IPv6", encapsulated, &encapsulated_v6, false),
        part("sealed, IPv4", sealed, &sealed_v4, true),
        part("sealed, IPv6", sealed, &sealed_v6, true),
    ];
    let mut first = Findings::default();
    let mut stage = Stage::new(twins, 1, &mut first);
    // What the first flow of a client needs, and what two servers need that have not met, is no leak.
    parts.iter().step_by(2).try_for_each(|part| stage.part(part))?;
    let before = Entries::settled(&hosts)?;
    hosts.iter().try_for_each(|host| observe::count_virtual_resets(host))?;

    let twins = stage.twins;
    let count = if is_long() { LONG } else { SHORT };
    let mut stage = Stage::new(twins, count, findings);
    for part in &parts {
        if let Err(error) = stage.part(part) {
            stage.findings.note(format!("{}: {error:#}", part.name));
            stage.findings.figures.add("failed", 1.0);
        }
    }
    // The servers serve until nothing is left of what they have served.
    let Stage { twins: _twins, pauses_ms, sealed_pauses_ms, took_ms, moved, findings, .. } = stage;
    findings.set("pause_rtts_p50", percentile(&pauses_ms, 50.0) / RTT_MS);
    findings.set("pause_ms_p99", percentile(&pauses_ms, 99.0));
    findings.set("pause_ms_max", percentile(&pauses_ms, 100.0));
    findings.set("sealed_pause_rtts_p50", percentile(&sealed_pauses_ms, 50.0) / RTT_MS);
    findings.set("sealed_pause_ms_p99", percentile(&sealed_pauses_ms, 99.0));
    findings.set("moved", moved as f64);
    findings.set("moved_per_s", if took_ms > 0.0 { moved as f64 / (took_ms / 1e3) } else { 0.0 });
    pair::attempt_part("resets", findings, |findings| pair::report_resets(&hosts, findings));
    pair::attempt_part("what is left", findings, |findings| entries::report_leaks(&hosts, &before, findings));
    Ok(())
}

impl<'a> Stage<'a> {
    fn new(twins: Twins, count: usize, findings: &'a mut Findings) -> Self {
        let pauses_ms = Vec::new();
        let sealed_pauses_ms = Vec::new();
        Self { twins, count, pauses_ms, sealed_pauses_ms, took_ms: 0.0, moved: 0, findings }
    }

    fn part(&mut self, part: &Part<'_>) -> Result<()> {
        let Part { name, client, address, is_sealed } = *part;
        let mut sessions = Sessions::open(client, address, PORT, self.count, &[])?;
        let moved = self.there_and_back(part, &mut sessions);
        if is_sealed {
            let flows = agent::open_flows(client, SERVICE, "tcp")?;
            let unsealed = flows.iter().filter(|flow| flow["path"] != "secure").count();
            self.findings.figures.add("unsealed", unsealed as f64);
            ensure!(flows.len() >= self.count, "{} of {} flows are listed", flows.len(), self.count);
        }
        // Also after a failure: the next part begins without them.
        let talked = sessions.end()?;
        for error in &talked.errors {
            self.findings.note(format!("{name}: {error}"));
        }
        self.findings.figures.add("wrong_bytes", talked.wrong as f64);
        self.findings.figures.add("lost_sessions", (self.count - talked.open) as f64);
        moved
    }

    fn there_and_back(&mut self, part: &Part<'_>, sessions: &mut Sessions) -> Result<()> {
        // Both serve the name: some have come to either.
        self.order(1)?;
        for from in [0, 1] {
            let (moved, took_ms, pauses_ms) = self.measure(from, sessions)?;
            let pause_rtts = median(&pauses_ms) / RTT_MS;
            progress(&format!(
                "{}: {moved} sessions have gone in {took_ms:.0} ms; {pause_rtts:.1} RTT each",
                part.name
            ));
            if part.is_sealed {
                self.sealed_pauses_ms.extend(&pauses_ms);
            }
            self.pauses_ms.extend(pauses_ms);
            self.findings.figures.add("not_moved", self.count.abs_diff(moved) as f64);
            self.moved += moved;
            self.took_ms += took_ms;
        }
        Ok(())
    }

    /// Moves all sessions away from a server. Gives how many, how long that took, and how long each had to wait.
    fn measure(&mut self, from: usize, sessions: &mut Sessions) -> Result<(usize, f64, Vec<f64>)> {
        // Waits until now are not those for this move.
        prove(sessions)?;
        let calm_ms = median(&prove(sessions)?);
        let (moved, took_ms) = self.order(from)?;
        let pauses_ms = prove(sessions)?.iter().map(|wait_ms| (wait_ms - calm_ms).max(0.0)).collect();
        Ok((moved, took_ms, pauses_ms))
    }

    /// Tells a server to give its connections to the other one, and waits until it has.
    fn order(&mut self, from: usize) -> Result<(usize, f64)> {
        let given = self.twins.order(from)?;
        for step in self.twins.not_given(from) {
            self.findings.note(format!("a server that gives: {step:?}"));
        }
        Ok((given.moved, given.took_ms))
    }
}

/// Each session is answered once more. Gives how long each has waited at the most since it was asked last.
fn prove(sessions: &mut Sessions) -> Result<Vec<f64>> {
    let talked = sessions.round()?;
    ensure!(talked.hung == 0, "{} sessions are not answered; {:?}", talked.hung, talked.errors);
    Ok(talked.waits_ms)
}
