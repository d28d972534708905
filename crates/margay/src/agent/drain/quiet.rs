//! Connections that end since they are quiet: which ones clients' hosts are asked to end, and what has come of that
//! (docs/decisions/0066).

use std::collections::HashSet;
use std::time::Duration;

use margay_core::Tuple;
use margay_core::drain::ServedFlow;
use margay_core::quiet::QuietAnswer;
use tokio::time::Instant;

use super::tally::{TCP, Tally};
use crate::agent::Agent;
use crate::agent::quiet::Sockets;

/// A program that has been told the end of its stream closes within this time; where it does not, the connection is
/// reset. So long beyond the deadline of a drain, quiet connections are ended still.
pub(super) const ENDED_WITHIN: Duration = Duration::from_secs(2);
/// From one question about a flow to the next at the soonest.
const AGAIN_MIN: Duration = Duration::from_millis(100);

/// What has been asked about a flow.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Asking {
    /// It is looked at then at the soonest.
    next: Option<Instant>,
    /// The client's program has been told the end of the stream then.
    ended: Option<Instant>,
}

impl Asking {
    /// Whether the client's program has been told the end of the stream.
    pub fn has_ended(&self) -> bool {
        self.ended.is_some()
    }

    /// Whether one of the programs goes on for too long after that.
    pub fn is_overdue(&self, now: Instant) -> bool {
        self.ended.is_some_and(|ended| now >= ended + ENDED_WITHIN)
    }

    /// Whether it is to be asked about now; from then on after a pause.
    fn is_due(&mut self, now: Instant, quiet: Duration) -> bool {
        if self.ended.is_some() || self.next.is_some_and(|next| now < next) {
            return false;
        }
        self.next = Some(now + quiet.max(AGAIN_MIN));
        true
    }
}

/// A connection, and how long it is to have carried nothing.
struct Candidate {
    flow: ServedFlow,
    quiet: Duration,
}

/// The open connections that end when they are quiet, of which `counts` is true.
fn candidates(
    tally: &mut Tally,
    flows: &[ServedFlow],
    mut counts: impl FnMut(&mut Asking, Duration) -> bool,
) -> Vec<Candidate> {
    let mut candidates = Vec::new();
    for flow in flows.iter().filter(|flow| flow.app.protocol == TCP) {
        let Some(open) = tally.open.get_mut(&flow.flow) else { continue };
        let Some(quiet) = tally.rows[open.place].quiet else { continue };
        if counts(&mut open.asking, quiet) {
            candidates.push(Candidate { flow: *flow, quiet });
        }
    }
    candidates
}

fn sockets(candidates: &[Candidate]) -> Sockets {
    let wanted: HashSet<Tuple> = candidates.iter().map(|candidate| candidate.flow.app).collect();
    Sockets::of(&wanted)
}

/// Asks clients' hosts to end what is quiet at this end. A socket that cannot be found
/// here counts as quiet: the client's host decides.
pub(super) fn ask(tally: &mut Tally, agent: &Agent, flows: &[ServedFlow]) {
    let now = Instant::now();
    if !tally.ends_quiet_ones() || now < tally.quiet_from {
        return;
    }
    let due = candidates(tally, flows, |asking, quiet| asking.is_due(now, quiet));
    if due.is_empty() {
        return;
    }
    let sockets = sockets(&due);
    let quiet = |candidate: &&Candidate| sockets.is_quiet(&candidate.flow.app, candidate.quiet) != Some(false);
    let quiet: Vec<&Candidate> = due.iter().filter(quiet).collect();
    agent.core.0.with_sal(|sal, now| {
        for Candidate { flow, quiet } in quiet {
            // The order's bounds let it fit.
            let quiet_ms = u32::try_from(quiet.as_millis()).unwrap_or(u32::MAX);
            sal.ask_quiet_end(now, flow.flow, quiet_ms);
        }
    });
}

/// Hears what clients' hosts have said of the connections of the last look.
pub(super) fn hear(tally: &mut Tally, agent: &Agent) {
    let now = Instant::now();
    let Tally { rows, open, .. } = tally;
    agent.core.0.with_sal(|sal, _| {
        for (id, open) in open {
            match sal.take_quiet_answer(*id) {
                Some(QuietAnswer::Ended) => open.asking.ended = Some(now),
                Some(QuietAnswer::NotNow(why)) if !why.is_empty() => rows[open.place].count.why_open = why,
                Some(QuietAnswer::NotNow(_)) | None => {}
            }
        }
    });
}

/// Counts the connections that are quiet at this end now.
pub(super) fn rehearse(tally: &mut Tally, flows: &[ServedFlow]) {
    let all = candidates(tally, flows, |_, _| true);
    let sockets = sockets(&all);
    for Candidate { flow, quiet } in all {
        let is_quiet = sockets.is_quiet(&flow.app, quiet) == Some(true);
        if let Some(open) = tally.open.get(&flow.flow).filter(|_| is_quiet) {
            tally.rows[open.place].count.quiet += 1;
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_flow_is_asked_about_with_pauses_until_its_program_was_told() {
        let begun = Instant::now();
        let at = |ms: u64| begun + Duration::from_millis(ms);
        for (quiet_ms, pause_ms) in [(50, 100), (1000, 1000)] {
            let mut asking = Asking::default();
            let quiet = Duration::from_millis(quiet_ms);
            assert!(asking.is_due(at(0), quiet));
            assert!(!asking.is_due(at(pause_ms - 1), quiet));
            assert!(asking.is_due(at(pause_ms), quiet));
            assert!(!asking.has_ended() && !asking.is_overdue(at(1_000_000)));
            asking.ended = Some(at(5000));
            assert!(asking.has_ended() && !asking.is_due(at(9000), quiet));
            assert!(!asking.is_overdue(at(6999)) && asking.is_overdue(at(7000)));
        }
    }
}
