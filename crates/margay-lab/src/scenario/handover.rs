//! `handover`: connections that talk all the time go from one server to its twin on another host, and back, over links
//! with a round trip of 20 ms: carried by the kernels and encapsulated, over IPv4 and IPv6.

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
    summary: "connections that talk go to a twin on another host and back: direct and encapsulated, IPv4 and IPv6",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 9] = [
    bound("resets", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("lost_sessions", Exactly(0.0)),
    // Of those that were to go, there and back.
    bound("not_moved", Exactly(0.0)),
    // At full length there are more.
    bound("moved", AtLeast((PARTS * 2 * SHORT) as f64)),
    bound("pause_rtts_p50", AtMost(4.0)),
    bound("pause_ms_p99", AtMost(500.0)),
    bound("leaked_entries", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

/// Each link delays what leaves and what comes, and two of them are between any two hosts.
const BLOCKS: &str = "v4 = \"10.1.0.0/24\"\nv6 = \"fd01::/64\"\ndelay_ms = 5\n";
const RTT_MS: f64 = 20.0;
/// Sessions of each part, by the length of the scenario.
const SHORT: usize = 50;
const LONG: usize = 1000;
const PARTS: usize = 3;

struct Stage<'a> {
    twins: Twins,
    count: usize,
    /// How long each session had to wait beyond what it waits for otherwise, in each move.
    pauses_ms: Vec<f64>,
    /// The time of all moves together, and what they have moved.
    took_ms: f64,
    moved: usize,
    findings: &'a mut Findings,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = site::build(SCENARIO.name, BLOCKS, &[HOSTS[0], HOSTS[1], "client", "encap"], dir)?;
    let encapsulated = lab.host("encap")?;
    agent::keep_encapsulated(encapsulated)?;
    let _agents = Agents::start(&lab)?;
    let client = lab.host("client")?;
    let hosts = [lab.host(HOSTS[0])?, lab.host(HOSTS[1])?, client, encapsulated];
    pair::demand_kernel(&hosts[..3], findings)?;
    ["not_moved", "moved", "wrong_bytes", "lost_sessions"].into_iter().for_each(|figure| findings.set(figure, 0.0));
    let twins = Twins::start([hosts[0], hosts[1]])?;
    agent::await_instances(client, SERVICE, 2)?;
    agent::await_instances(encapsulated, SERVICE, 2)?;
    let direct_addresses = agent::virtual_addresses(client, SERVICE)?;
    let encapsulated_addresses = agent::virtual_addresses(encapsulated, SERVICE)?;
    let parts = [
        ("direct, IPv4", client, direct_addresses.0),
        ("direct, IPv6", client, direct_addresses.1),
        ("encapsulated, IPv4", encapsulated, encapsulated_addresses.0),
    ];
    let mut first = Findings::default();
    let mut stage = Stage::new(twins, 1, &mut first);
    // What the first of all flows needs, and what two servers need that have not met, is no leak.
    for (name, host, address) in &parts {
        stage.part(name, host, address)?;
    }
    let before = Entries::settled(&hosts)?;
    hosts.iter().try_for_each(|host| observe::count_virtual_resets(host))?;

    let twins = stage.twins;
    let count = if is_long() { LONG } else { SHORT };
    let mut stage = Stage::new(twins, count, findings);
    for (name, host, address) in &parts {
        if let Err(error) = stage.part(name, host, address) {
            stage.findings.note(format!("{name}: {error:#}"));
            stage.findings.figures.add("failed", 1.0);
        }
    }
    // The servers serve until nothing is left of what they have served.
    let Stage { twins: _twins, pauses_ms, took_ms, moved, findings, .. } = stage;
    findings.set("pause_rtts_p50", percentile(&pauses_ms, 50.0) / RTT_MS);
    findings.set("pause_ms_p99", percentile(&pauses_ms, 99.0));
    findings.set("pause_ms_max", percentile(&pauses_ms, 100.0));
    findings.set("moved", moved as f64);
    findings.set("moved_per_s", if took_ms > 0.0 { moved as f64 / (took_ms / 1e3) } else { 0.0 });
    pair::attempt_part("resets", findings, |findings| pair::report_resets(&hosts, findings));
    pair::attempt_part("what is left", findings, |findings| entries::report_leaks(&hosts, &before, findings));
    Ok(())
}

impl<'a> Stage<'a> {
    fn new(twins: Twins, count: usize, findings: &'a mut Findings) -> Self {
        Self { twins, count, pauses_ms: Vec::new(), took_ms: 0.0, moved: 0, findings }
    }

    fn part(&mut self, name: &str, client: &Host, address: &str) -> Result<()> {
        let mut sessions = Sessions::open(client, address, PORT, self.count, &[])?;
        let moved = self.there_and_back(name, &mut sessions);
        // Also after a failure: the next part begins without them.
        let talked = sessions.end()?;
        for error in &talked.errors {
            self.findings.note(format!("{name}: {error}"));
        }
        self.findings.figures.add("wrong_bytes", talked.wrong as f64);
        self.findings.figures.add("lost_sessions", (self.count - talked.open) as f64);
        moved
    }

    fn there_and_back(&mut self, name: &str, sessions: &mut Sessions) -> Result<()> {
        // Both serve the name: some have come to either.
        self.order(1)?;
        for from in [0, 1] {
            let (moved, took_ms) = self.measure(from, sessions)?;
            progress(&format!("{name}: {moved} sessions have gone in {took_ms:.0} ms"));
            self.findings.figures.add("not_moved", self.count.abs_diff(moved) as f64);
            self.moved += moved;
            self.took_ms += took_ms;
        }
        Ok(())
    }

    /// Moves all sessions away from a server. Gives how many, and how long that took.
    fn measure(&mut self, from: usize, sessions: &mut Sessions) -> Result<(usize, f64)> {
        // Waits until now are not those for this move.
        prove(sessions)?;
        let calm_ms = median(&prove(sessions)?);
        let done = self.order(from)?;
        let waits_ms = prove(sessions)?;
        self.pauses_ms.extend(waits_ms.iter().map(|wait_ms| (wait_ms - calm_ms).max(0.0)));
        Ok(done)
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
