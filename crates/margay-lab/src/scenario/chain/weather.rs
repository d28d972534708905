//! `chain-weather`: boxes are put into running sessions, replaced and taken out while 5 % of all packets are lost, and
//! while the agents of these boxes are killed or their links are down. No session is reset, and none stays locked.

use std::path::Path;
use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::insert_remove::leaks;
use super::{ZONE, apply, chain, let_forward, serve};
use crate::agent::{self, Agents};
use crate::command::progress;
use crate::host::Host;
use crate::interface::{self, Act as Link};
use crate::lab::Lab;
use crate::observe;
use crate::program::wait_for;
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::scenario::{Findings, Scenario, is_long, pair, site};
use crate::transfers::{Order, Server, Transfers};
use crate::weather::Losses;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "chain-weather",
    summary: "boxes of running sessions are changed under loss, while their agents are killed and their links are down",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 8] = [
    bound("resets", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    // Sessions that are locked for longer than a lease after an order.
    bound("stuck_locks", Exactly(0.0)),
    // Sessions whose boxes cannot be changed when the trouble is over.
    bound("unsettled", Exactly(0.0)),
    bound("leaks", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
    // Otherwise no order has met any trouble.
    bound("rounds", AtLeast(SHORT_ROUNDS as f64)),
    bound("completed", AtLeast(1.0)),
];

/// A change takes some round trips of 10 ms, of 20 ms where it goes through a box.
const SITE: &str = "v4 = \"10.1.0.0/24\"\ndelay_ms = 2.5\n";
const LOSSES: Losses = Losses { share: 0.05, row: 1 };
const BOXES: [&str; 2] = ["scrub.shop", "scrub2.shop"];
const SERVICE: &str = "bulk.shop";
const PORT: u16 = 5010;
const WAYS: [&str; 2] = ["up:cubic", "down:cubic"];
/// Bytes per second of each transfer: less than a connection gets in this weather.
const PACE: u64 = 200_000;
/// Bytes of each transfer after each round.
const AFTER: u64 = 20_000;
/// A lock ends by itself after 30 s.
const LEASE_LIMIT: Duration = Duration::from_secs(35);
/// A TCP that was not answered for 20 s asks again after as long.
const LIMIT: Duration = Duration::from_secs(60);
const MOMENTS: usize = 8;
const BETWEEN_MOMENTS_MS: usize = 30;
/// How long links are down, by the moment at which they go.
const CUTS_S: [u64; MOMENTS] = [20, 2, 5, 10, 2, 5, 2, 20];
const SHORT_CUT: Duration = Duration::from_secs(1);
const SHORT_ROUNDS: usize = 6;

/// What is ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    /// The first box is put in.
    Insert,
    /// The other one takes its place.
    Replace,
    /// The other one is taken out.
    Remove,
}

impl Change {
    const COURSE: [Self; 3] = [Self::Insert, Self::Replace, Self::Remove];

    const fn words(self) -> &'static [&'static str] {
        match self {
            Self::Insert => &["insert", BOXES[0]],
            Self::Replace => &["replace", BOXES[0], "--by", BOXES[1]],
            Self::Remove => &["remove", BOXES[1]],
        }
    }

    /// A box that it is about: of a replacement, the old one or the new one.
    const fn victim(self, is_new: bool) -> usize {
        match self {
            Self::Insert => 0,
            Self::Replace => is_new as usize,
            Self::Remove => 1,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    /// The agent of a box is killed, and started again at once.
    Kill,
    /// The link of a box's host is down for so long.
    Cut(Duration),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Round {
    change: Change,
    trouble: Trouble,
    /// Since the order was given.
    after: Duration,
    /// The box to which it happens.
    victim: usize,
}

/// In courses of three changes, after which sessions are as before.
fn rounds(is_long: bool) -> Vec<Round> {
    let mut rounds = Vec::new();
    for moment in (0..MOMENTS).step_by(if is_long { 1 } else { MOMENTS }) {
        let cut = if is_long { Duration::from_secs(CUTS_S[moment]) } else { SHORT_CUT };
        for trouble in [Trouble::Kill, Trouble::Cut(cut)] {
            for is_new in [false, true] {
                // In the short form it happens to one of the two.
                if !is_long && is_new != (trouble == Trouble::Kill) {
                    continue;
                }
                for (step, change) in Change::COURSE.into_iter().enumerate() {
                    // In the short form each change has another moment.
                    let moment = if is_long { 1 + moment } else { 2 + 2 * step };
                    let after = Duration::from_millis((moment * BETWEEN_MOMENTS_MS) as u64);
                    rounds.push(Round { change, trouble, after, victim: change.victim(is_new) });
                }
            }
        }
    }
    rounds
}

struct Stage<'a> {
    lab: &'a Lab,
    client: &'a Host,
    boxes: [&'a Host; 2],
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = site::build(SCENARIO.name, SITE, &["client", "server", "box1", "box2"], dir)?;
    let_forward(&lab, BOXES.len())?;
    let _agents = Agents::start(&lab)?;
    let [client, server] = [lab.host("client")?, lab.host("server")?];
    let boxes = [lab.host("box1")?, lab.host("box2")?];
    for figure in ["wrong_bytes", "stuck_locks", "unsettled", "leaks", "failed", "rounds", "completed", "undone"] {
        findings.figures.add(figure, 0.0);
    }
    for (host, name) in boxes.into_iter().zip(BOXES) {
        serve(host, name, "forward", &[])?;
    }
    let hosts: Vec<&Host> = lab.hosts.iter().collect();
    apply(lab.host("router")?, &chain("known", "nobody.shop", &BOXES, ""), &hosts, &["known"])?;
    for host in [client, server] {
        observe::count_virtual_resets(host)?;
    }
    let mut sink = Server::start(server, PORT, false)?;
    agent::publish(server, SERVICE, &format!("0.0.0.0:{PORT}"), &[])?;
    agent::await_instances(client, SERVICE, 1)?;
    let order = Order { to: &format!("{SERVICE}.{ZONE}"), ways: &WAYS, pace: PACE };
    let mut transfers = Transfers::start(client, &mut sink, order)?;
    let stage = Stage { lab: &lab, client, boxes };
    lab.sky.lose(LOSSES);
    for round in rounds(is_long()) {
        stage.round(round, &mut transfers, findings).with_context(|| format!("{round:?}"))?;
    }
    lab.sky.lose(Losses::default());
    transfers.finish("transfers", findings)?;
    for host in boxes {
        leaks(host, findings)?;
    }
    pair::report_resets(&[client, server], findings)
}

impl Stage<'_> {
    fn round(&self, round: Round, transfers: &mut Transfers<'_>, findings: &mut Findings) -> Result<()> {
        let host = self.boxes[round.victim];
        let pid = agent::pid(host)?;
        let words = [&["chain"], round.change.words(), &["--name", SERVICE, "--json"]].concat();
        let mut command = agent::command(self.client, words.iter().copied())?;
        let order = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().context("an order")?;
        // Rounds differ in how far the sessions are by then: nothing tells of that.
        sleep(round.after);
        match round.trouble {
            Trouble::Kill => {
                agent::kill_known(host, pid)?;
                agent::start_again(host)?;
            }
            Trouble::Cut(time) => {
                interface::change(self.lab, host, &[Link::Down(0)])?;
                sleep(time);
                interface::change(self.lab, host, &[Link::Up(0)])?;
            }
        }
        let output = order.wait_with_output().context("an order")?;
        let said = outcomes(&output.stdout)
            .with_context(|| format!("{words:?}: {}", String::from_utf8_lossy(&output.stderr)))?;
        let done = said.iter().filter(|said| said.is_done()).count();
        progress(&format!("{round:?}: {said:?}"));
        findings.figures.add("completed", done as f64);
        findings.figures.add("undone", WAYS.len().saturating_sub(done) as f64);
        transfers.await_bytes("transfers after the trouble", AFTER, LIMIT)?;
        self.await_unlocked(findings)?;
        self.await_boxes()?;
        self.settle(round.change, findings)?;
        transfers.await_bytes("transfers after the change", AFTER, LIMIT)?;
        findings.figures.add("rounds", 1.0);
        Ok(())
    }

    /// Hosts that were cut off are members again.
    fn await_boxes(&self) -> Result<()> {
        BOXES.iter().try_for_each(|name| {
            wait_for(&format!("an instance of {name}"), LIMIT, || {
                let found = agent::resolve(self.client, name)?["instances"].as_array().map_or(0, Vec::len);
                ensure!(found == 1, "there are {found}");
                Ok(())
            })
        })
    }

    /// Nobody holds the lock of any session for longer than a lease.
    fn await_unlocked(&self, findings: &mut Findings) -> Result<()> {
        let locked = || agent::metric(self.client, "margay_sessions_locked");
        let is_free = wait_for("the locks of all sessions", LEASE_LIMIT, || {
            let locked = locked()?;
            ensure!(locked == 0.0, "{locked} are held");
            Ok(())
        });
        if let Err(error) = is_free {
            findings.note(format!("{error:#}"));
            findings.figures.add("stuck_locks", locked()?);
        }
        Ok(())
    }

    /// Changes whatever sessions the order has not changed.
    fn settle(&self, change: Change, findings: &mut Findings) -> Result<()> {
        let words = [&["chain"], change.words(), &["--name", SERVICE, "--json"]].concat();
        let until = Instant::now() + LEASE_LIMIT;
        loop {
            let output = agent::command(self.client, words.iter().copied())?.output().context("an order")?;
            let said = outcomes(&output.stdout)
                .with_context(|| format!("{words:?}: {}", String::from_utf8_lossy(&output.stderr)))?;
            let settled = said.iter().filter(|said| said.is_done() || said.is_needless()).count();
            if settled == WAYS.len() {
                return Ok(());
            }
            findings.figures.add("tried_again", 1.0);
            progress(&format!("{change:?} again: {said:?}"));
            if Instant::now() > until {
                findings.note(format!("{change:?} does not come to its end: {said:?}"));
                findings.figures.add("unsettled", WAYS.len().saturating_sub(settled) as f64);
                return Ok(());
            }
        }
    }
}

/// What has become of an order in one session.
#[derive(Debug)]
struct Said {
    outcome: String,
    why: String,
}

impl Said {
    fn is_done(&self) -> bool {
        self.outcome == "done"
    }

    /// The session's boxes are those that it was to have.
    fn is_needless(&self) -> bool {
        self.why.contains("already") || self.why.contains("does not go through")
    }
}

/// An order is no success if a session is not changed; its output says of each what has become of it all the same.
fn outcomes(output: &[u8]) -> Result<Vec<Said>> {
    let reply: Value = serde_json::from_slice(output)?;
    let changed = reply["changed"].as_array().into_iter().flatten();
    let word = |of: &Value| of.as_str().unwrap_or_default().to_owned();
    Ok(changed.map(|one| Said { outcome: word(&one["outcome"]), why: word(&one["why"]) }).collect())
}

#[cfg(test)]
mod tests {
    use super::{Change, SHORT_ROUNDS, Trouble, rounds};

    #[test]
    fn rounds_meet_every_trouble_in_every_change_and_leave_sessions_as_they_were() {
        for (is_long, count) in [(false, SHORT_ROUNDS), (true, 96)] {
            let rounds = rounds(is_long);
            assert_eq!(rounds.len(), count);
            for change in Change::COURSE {
                let of_change = || rounds.iter().filter(|round| round.change == change);
                assert!(of_change().any(|round| round.trouble == Trouble::Kill), "{change:?}");
                assert!(of_change().any(|round| round.trouble != Trouble::Kill), "{change:?}");
            }
            let replaced =
                |victim: usize| rounds.iter().any(|round| round.change == Change::Replace && round.victim == victim);
            assert!(replaced(0) && replaced(1));
            assert!(rounds.chunks(3).all(|course| course.iter().map(|round| round.change).eq(Change::COURSE)));
        }
    }
}
